"""Where results go: descriptions that a user passes to ``stream.sink``.

Egress gives a sink one batch per epoch, in sequence order, and calls `commit` when the epoch is
complete; only then is it counted as delivered.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

import numpy as np
import pyarrow as pa

from holdfast.engine.batches import row_digests
from holdfast.errors import FlowError


@dataclass(frozen=True, slots=True)
class Authority:
    """In whose name a writer writes."""

    flow: str
    sink: str
    incarnation: str = ""
    """Of the flow: another one each time it is started again."""
    term: int = 0
    """Whoever leads the egress after another has a higher one."""
    after: int = -1
    """The last epoch before the first of this incarnation: a flow that goes on from one that was
    stopped counts on."""
    before: tuple[str, int] | None = None
    """The incarnation that was stopped, and the last epoch that its store has confirmed."""
    lost: bool = False
    """Whether this incarnation has run before and was lost. Then its store knows of it."""

    def confirmed(self, durable: int) -> int | None:
        """The least that the store must have of this incarnation, if `durable` is what it said
        last. None if it may never have heard of it."""
        return durable if self.lost or durable > self.after else None


class SinkWriter:
    """Takes the rows of one sink on the site that leads its egress."""

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        """Take the rows of the next epoch. Who goes on in place of another is not given again
        those that had none."""
        raise NotImplementedError

    def commit(self, epoch: int) -> int:
        """All rows up to and including `epoch` have been written. The answer is the last epoch
        whose rows outlive this process: up to there nobody will ever be asked to write again.
        While that is not the last one, the same is said again every now and then. Never more than
        the store itself has confirmed (epochs without rows that it was not told of are not
        counted): whoever leads next takes a store that knows of less for one that has lost it."""
        return epoch

    def room(self) -> bool:
        """Whether another epoch can be taken now. If not it waits, and the source with it; the
        question is asked again and again."""
        return True

    def finish(self) -> bool:
        """No epoch follows. Whether all that were committed are durable: asked until they are, so
        that a site does not stand still while a store outside is away."""
        return True

    def close(self) -> None:
        """The flow has ended; everything written must be readable now."""

    def abandon(self) -> None:
        """This site has nothing more to do with the sink: nothing is to be written after this."""

    def report(self) -> dict[str, Any]:
        """Figures for ``run.status()``."""
        return {}

    def answer(
        self, request: Mapping[str, Any], held: Sequence[tuple[int, pa.RecordBatch]]
    ) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        """What somebody is told who reads the sink where it is written; `held` are the epochs that
        are not durable. A request that changes what `save` gives is known to all replicas before
        its answer is given."""
        raise FlowError("this sink is not one that can be asked")

    def drop_reader(self, held_bytes: int) -> bool:
        """Of a sink that is read where it is written, called every now and then at the leading
        replica until it says no: whether a reader for which rows are held was dropped just now."""
        return False

    def is_attended(self) -> bool:
        """Whether a reader that lacks rows was seen just now."""
        return False

    def save(self) -> dict[str, Any]:
        """Of a replicated sink: what a new replica needs to go on."""
        return {}

    def restore(self, saved: dict[str, Any]) -> None:
        """The inverse of `save`."""


class Sink:
    """Base of the sinks."""

    with_order = False
    """Whether rows keep the columns of their order key (named ``__o0``, ...)."""
    replicated = False
    """Whether every replica of the egress writes, because what is written is in memory only."""
    unread_bytes_max: int | None = None
    """How much the egress keeps for those who read it there; None if nothing is kept for them."""

    def check(self, schema: pa.Schema, where: str) -> None:
        """Refuse columns that the sink has no place for, while the flow is written."""

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        """Begin with the first epoch."""
        raise NotImplementedError

    def go_on(self, whose: Authority, schema: pa.Schema, durable: int) -> SinkWriter:
        """Begin with the epoch after `durable`, in a flow that goes on from where an earlier one
        was stopped. Raises `SinkRewoundError` if the store lacks what that one has written."""
        return self.open(whose, schema)

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        """Go on in place of a writer that is gone, which said last that `durable` was durable.
        Also gives the epoch that was durable in truth: the first to write is the one after it.
        Raises `SinkRewoundError`, now or when rows are written, if the store has less."""
        return self.open(whose, schema), durable


class Discard(Sink):
    """Counts the rows and adds up their digests: for benchmarks and checks.

    With `clock` it also measures latency: the column so named holds, in microseconds since the
    Unix epoch, when the row came into being.
    """

    replicated = True

    def __init__(self, clock: str | None = None) -> None:
        self.clock = clock

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return _DiscardWriter(self.clock)


class _DiscardWriter(SinkWriter):
    """Latencies are counted in bins of a tenth of a millisecond: what measures must not slow."""

    _BIN_MS, _BINS = 0.1, 100_000
    _WARM_UP_S = 1.0  # the start-up is not the steady state

    def __init__(self, clock: str | None) -> None:
        self._clock = clock
        self._rows, self._digest = 0, 0
        self._first_row: float | None = None
        self._latencies = np.zeros(self._BINS, np.int64)

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        self._rows += batch.num_rows
        self._digest = (self._digest + int(row_digests(batch).sum(dtype=np.uint64))) % (1 << 64)
        if self._clock is not None and batch.num_rows:
            self._measure(batch.column(self._clock).to_numpy(), time.time())

    def _measure(self, born_us: np.ndarray, now: float) -> None:
        self._first_row = now if self._first_row is None else self._first_row
        if now - self._first_row >= self._WARM_UP_S:
            bins = (now * 1e6 - born_us) / (1e3 * self._BIN_MS)
            bins = np.clip(bins, 0, self._BINS - 1).astype(np.int64)
            self._latencies += np.bincount(bins, minlength=self._BINS)

    def save(self) -> dict[str, Any]:
        return {"rows": self._rows, "digest": f"{self._digest:016x}"}

    def restore(self, saved: dict[str, Any]) -> None:
        self._rows, self._digest = saved["rows"], int(saved["digest"], 16)

    def report(self) -> dict[str, Any]:
        figures: dict[str, Any] = {"rows": self._rows, "digest": f"{self._digest:016x}"}
        seen = np.cumsum(self._latencies)
        if seen[-1]:
            for q in (50, 99):
                at = np.searchsorted(seen, seen[-1] * q / 100)
                figures[f"p{q}_ms"] = float((at + 1) * self._BIN_MS)
        return figures


class Console(Sink):
    """Prints rows as JSON lines: for a first look."""

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return _ConsoleWriter(whose.sink, sys.stdout)


class _ConsoleWriter(SinkWriter):
    def __init__(self, name: str, out: TextIO) -> None:
        self._name, self._out = name, out

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        for row in batch.to_pylist():
            print(f"{self._name} {json.dumps(row, default=str)}", file=self._out, flush=True)


class Callback(Sink):
    """Calls ``function(epoch, batch)`` on the egress site, at least once for an epoch with rows."""

    def __init__(self, function: Callable[[int, pa.RecordBatch], None]) -> None:
        self.function = function

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return _CallbackWriter(self.function)


class _CallbackWriter(SinkWriter):
    def __init__(self, function: Callable[[int, pa.RecordBatch], None]) -> None:
        self._function = function

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._function(epoch, batch)


def discard(clock: str | None = None) -> Sink:
    """Count and checksum the rows, and keep none."""
    return Discard(clock)


def console() -> Sink:
    """Print every row where the egress runs."""
    return Console()


def callback(function: Callable[[int, pa.RecordBatch], None]) -> Sink:
    """Call a function with each epoch's rows, on the site that hosts the egress."""
    return Callback(function)
