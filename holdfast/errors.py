"""All errors that Holdfast raises.

There are three kinds. A bug in Holdfast is an `InvariantError`, raised by `require`, which, unlike
`assert`, also runs under ``python -O``. A protocol violation by a peer is a `ProtocolError`. All
others are errors of the user or the environment; each states what failed, where, and what to do.
All errors can be pickled, because Spark sends exceptions between processes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar


class HoldfastError(Exception):
    """Base class of all errors that Holdfast raises."""

    fields: ClassVar[tuple[str, ...]] = ("message", "hint")
    """Attributes sent to another process, which passes them to `rebuilt`."""

    @classmethod
    def rebuilt(cls, detail: Mapping[str, Any]) -> HoldfastError:
        """Create the error from its `fields`."""
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
    """The flow is invalid: for example an unknown column, a cycle or a duplicate name."""


class StoreDamagedError(FlowError):
    """A file of a store was truncated, modified or replaced after it was written."""


class StoreTakenError(FlowError):
    """Another process owns the store: it has resumed from it or writes to it."""


class InputError(HoldfastError):
    """A source delivered rows that do not match its declared schema."""


class OperatorError(HoldfastError):
    """A step or operator raised, or returned a result of the wrong shape, while the flow ran."""

    fields = ("flow", "stage", "operator", "epoch", "row", "cause")

    def __init__(
        self, *, flow: str, stage: str, operator: str, epoch: int, row: str, cause: str
    ) -> None:
        super().__init__(
            f"flow {flow!r}, stage {stage!r}, operator {operator!r}, epoch {epoch}: {cause}\n"
            f"  at row: {row}",
            hint='set Flow(..., on_error="dead-letter") to divert such rows and continue',
        )
        self.flow, self.stage, self.operator = flow, stage, operator
        self.epoch, self.row, self.cause = epoch, row, cause


class HungError(HoldfastError):
    """A call of a stage's code, such as a user's function, does not return."""


class OutOfMemoryError(HoldfastError):
    """A site ran out of memory for the flow's state or rows. No single row is the cause."""


class SinkError(HoldfastError):
    """An external store rejects a sink's rows, or does not meet the sink's requirements."""


class SinkRewoundError(SinkError):
    """An external store has less than it confirmed before.

    A standby of the store was promoted that lacked the last transactions, an older backup was
    restored, or the record of the last durable epoch was deleted. Continuing would skip or repeat
    rows.
    """

    fields = ("sink", "committed", "found", "hint")

    def __init__(self, sink: str, committed: int, found: int, hint: str) -> None:
        known = f"epochs up to {committed}" if committed >= 0 else "a record of this flow"
        has = f"only epochs up to {found}" if found >= 0 else "nothing of this flow"
        super().__init__(
            f"sink {sink!r} went backwards: its store confirmed {known}, but now it has {has}",
            hint=hint,
        )
        self.sink, self.committed, self.found = sink, committed, found


class HostError(HoldfastError):
    """The host (Spark, or this machine) cannot run the flow as requested."""


class SiteLostError(HoldfastError):
    """A site died whose partitions were not protected."""


class Superseded(HoldfastError):
    """Another party leads the flow or has committed in the meantime; the commit had no effect."""

    fields = ("flow", "term", "cause")

    def __init__(self, *, flow: str, term: int, cause: str) -> None:
        super().__init__(
            f"flow {flow!r}: term {term} cannot commit: {cause}",
            hint="read the entry again; only the current leader can commit",
        )
        self.flow, self.term, self.cause = flow, term, cause


class ArbiterAway(HoldfastError):
    """The arbiter is unreachable. It is unknown whether the call took effect."""

    fields = ("where", "cause")

    def __init__(self, *, where: str, cause: str) -> None:
        super().__init__(
            f"the arbiter at {where} is unreachable: {cause}",
            hint="rows continue to flow, and membership is frozen until it answers; try again",
        )
        self.where, self.cause = where, cause


class DivergenceError(HoldfastError):
    """A frame does not match its digest: two parties disagree about the same rows."""


class ProtocolError(HoldfastError):
    """A peer sent a message that the protocol does not allow."""


class InvariantError(HoldfastError):
    """Holdfast has a bug: please report it with the message."""


def require(condition: object, message: str) -> None:
    """Raise an `InvariantError` unless `condition` holds; ``-O`` does not strip this check."""
    if not condition:
        raise InvariantError(message)
