"""Every error a user of Holdfast can meet, in one place.

Three kinds are never mixed. *Our bug* is an `InvariantError`, raised by `require` (which, unlike
`assert`, also runs under ``python -O``). *A peer's violation* is a `ProtocolError`. *The user's or
the environment's* are the others, each saying what failed, where, and what to do. All of them
survive pickling, because Spark carries exceptions between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar


class HoldfastError(Exception):
    """Base of all errors raised by Holdfast."""

    fields: ClassVar[tuple[str, ...]] = ("message", "hint")
    """The attributes that are sent to another process, which calls `rebuilt` with them."""

    @classmethod
    def rebuilt(cls, detail: Mapping[str, Any]) -> HoldfastError:
        """The error whose `fields` these are."""
        if cls.fields != HoldfastError.fields:
            return cls(**detail)
        return cls(detail["message"], hint=detail.get("hint"))

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message if hint is None else f"{message}\n  hint: {hint}")
        self.message = message
        self.hint = hint

    def __reduce__(self) -> tuple[Callable[..., HoldfastError], tuple[object, ...]]:
        return _rebuild, (type(self), self.args, dict(self.__dict__))


def _rebuild(
    kind: type[HoldfastError], args: tuple[object, ...], state: dict[str, object]
) -> HoldfastError:
    error = kind.__new__(kind)
    error.args = args
    error.__dict__.update(state)
    return error


class FlowError(HoldfastError):
    """The flow, as written, cannot run: an unknown column, a cycle, a name used twice."""


class StoreDamagedError(FlowError):
    """A file of a store is not what was written: it was cut, changed or exchanged."""


class StoreTakenError(FlowError):
    """Another process goes on from a store, or writes to it."""


class InputError(HoldfastError):
    """A source delivered rows that do not fit the schema it was declared with."""


class OperatorError(HoldfastError):
    """A step raised, or returned something of the wrong shape, while the flow ran."""

    fields = ("flow", "stage", "operator", "epoch", "row", "cause")

    def __init__(
        self, *, flow: str, stage: str, operator: str, epoch: int, row: str, cause: str
    ) -> None:
        super().__init__(
            f"flow {flow!r}, stage {stage!r}, operator {operator!r}, epoch {epoch}: {cause}\n"
            f"  at row: {row}",
            hint='write Flow(..., on_error="dead-letter") to put such rows aside and go on',
        )
        self.flow, self.stage, self.operator = flow, stage, operator
        self.epoch, self.row, self.cause = epoch, row, cause


class HungError(HoldfastError):
    """A call of a stage's code, such as a user's function, does not come to an end."""


class OutOfMemoryError(HoldfastError):
    """A site has no more memory for the flow's state or rows. No row is to blame for it."""


class SinkError(HoldfastError):
    """A store outside refuses a sink's rows, or is not as the sink needs it."""


class SinkRewoundError(SinkError):
    """A store outside has less than it has confirmed before: a standby was promoted that lacked the
    last transactions, an older backup was restored, or what says how far the rows reach was
    deleted. Going on would leave a gap or repeat rows."""

    fields = ("sink", "committed", "found", "hint")

    def __init__(self, sink: str, committed: int, found: int, hint: str) -> None:
        known = f"epochs up to {committed}" if committed >= 0 else "that it knew this flow"
        has = f"only epochs up to {found}" if found >= 0 else "nothing of this flow"
        super().__init__(
            f"sink {sink!r} went backwards: its store confirmed {known}, but now it has {has}",
            hint=hint,
        )
        self.sink, self.committed, self.found = sink, committed, found


class HostError(HoldfastError):
    """The host (Spark, or this machine) cannot carry the flow as asked."""


class SiteLostError(HoldfastError):
    """A site died and its partitions were not protected."""


class Superseded(HoldfastError):
    """Somebody else leads the flow, or has committed since: what was meant to be done is void."""

    fields = ("flow", "term", "cause")

    def __init__(self, *, flow: str, term: int, cause: str) -> None:
        super().__init__(
            f"flow {flow!r}: term {term} may not commit: {cause}",
            hint="read the entry again; only whoever leads now may go on from there",
        )
        self.flow, self.term, self.cause = flow, term, cause


class ArbiterAway(HoldfastError):
    """The arbiter cannot be reached just now; whether the call took effect is not known."""

    fields = ("where", "cause")

    def __init__(self, *, where: str, cause: str) -> None:
        super().__init__(
            f"the arbiter at {where} cannot be reached: {cause}",
            hint="data flows on and membership is frozen until it answers; try again",
        )
        self.where, self.cause = where, cause


class DivergenceError(HoldfastError):
    """A frame is not what its digest says: two parties disagree about the same rows."""


class ProtocolError(HoldfastError):
    """A peer sent something that the protocol does not allow."""


class InvariantError(HoldfastError):
    """Holdfast itself is wrong: please report it with the message."""


def require(condition: object, message: str) -> None:
    """Stop with an `InvariantError` unless `condition` holds; never stripped by ``-O``."""
    if not condition:
        raise InvariantError(message)
