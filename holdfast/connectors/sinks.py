"""Sinks: descriptions that a user passes to ``stream.sink``.

The egress gives a sink one batch per epoch, in sequence order, and calls `commit` when the epoch is
complete. Only then does the epoch count as delivered.
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
    """The identity of a writer: its flow and sink, and its right to write."""

    flow: str
    sink: str
    incarnation: str = ""
    """Identifies the flow's start: a flow that is started again has another one."""
    term: int = 0
    """The leader's term. Each new leader of the egress has a higher one."""
    after: int = -1
    """The last epoch before this incarnation. A flow that continues a stopped one also continues
    its epoch numbers."""
    before: tuple[str, int] | None = None
    """The stopped incarnation, and the last epoch that its store confirmed."""
    lost: bool = False
    """Whether this incarnation ran before and was lost. If so, its store knows it."""

    def confirmed(self, durable: int) -> int | None:
        """Return the epoch up to which the store must have this incarnation's rows, given the last
        `durable` epoch. None if the store may not know the incarnation."""
        return durable if self.lost or durable > self.after else None


class SinkWriter:
    """Writes the rows of one sink on the site that leads its egress."""

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        """Take the rows of the next epoch. A writer that takes over from another does not get
        epochs without rows again."""
        raise NotImplementedError

    def commit(self, epoch: int) -> int:
        """Note that all rows up to and including `epoch` were written. Return the last durable
        epoch: no writer will be asked to write the epochs up to it again. While `epoch` is not
        durable, the egress repeats the call from time to time. Never return more than the store
        itself has confirmed (an epoch without rows that was not sent to the store does not count),
        because the next leader treats a store that has less as one that lost rows."""
        return epoch

    def room(self) -> bool:
        """Whether the writer can take another epoch now. If not, the epoch and the source wait,
        and the egress asks again."""
        return True

    def finish(self) -> bool:
        """Called after the last epoch. Return whether all committed epochs are durable. The egress
        repeats the call until they are, so that the site does not block on an external store."""
        return True

    def close(self) -> None:
        """Called at the end of the flow. Everything written must be readable afterwards."""

    def abandon(self) -> None:
        """Called when this site loses the sink. The writer must not write anything afterwards."""

    def report(self) -> dict[str, Any]:
        """Return metrics for ``run.status()``."""
        return {}

    def answer(
        self, request: Mapping[str, Any], held: Sequence[tuple[int, pa.RecordBatch]]
    ) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        """Answer a reader of a sink that is read from the egress. `held` are the epochs that are
        not durable. If a request changes what `save` returns, all replicas know the change before
        the reader gets the answer."""
        raise FlowError("this sink cannot be read from the egress")

    def drop_reader(self, held_bytes: int) -> bool:
        """Drop a reader that exceeds its limits, if any, and return whether one was dropped. For
        sinks that are read from the egress; the leading replica calls it from time to time, each
        time until it returns False."""
        return False

    def is_attended(self) -> bool:
        """Whether a reader that lacks rows was active recently."""
        return False

    def save(self) -> dict[str, Any]:
        """Return what a new replica of a replicated sink needs to continue."""
        return {}

    def restore(self, saved: dict[str, Any]) -> None:
        """The inverse of `save`."""


class Sink:
    """Base of the sinks."""

    with_order = False
    """Whether rows keep the columns of their order key (named ``__o0``, ...)."""
    replicated = False
    """Whether every replica of the egress writes, because the result is only in memory."""
    unread_bytes_max: int | None = None
    """Maximum bytes that the egress holds for readers; None if the sink has no readers."""

    def check(self, schema: pa.Schema, where: str) -> None:
        """Refuse columns that the sink cannot store. Called while the flow is built."""

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        """Return a writer that begins with the first epoch."""
        raise NotImplementedError

    def go_on(self, whose: Authority, schema: pa.Schema, durable: int) -> SinkWriter:
        """Return a writer that begins with the epoch after `durable`, in a flow that continues a
        stopped one. Raises `SinkRewoundError` if the store lacks rows of the stopped flow."""
        return self.open(whose, schema)

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        """Take over from a writer that last reported `durable`. Return a writer and the epoch that
        is actually durable; the writer begins with the next one. Raises `SinkRewoundError`, now
        or when rows are written, if the store has less."""
        return self.open(whose, schema), durable


class Discard(Sink):
    """Counts the rows and sums their digests, for benchmarks and checks.

    With `clock` it also measures latency. The column of that name holds the time at which the row
    was created, in microseconds since the Unix epoch.
    """

    replicated = True

    def __init__(self, clock: str | None = None) -> None:
        self.clock = clock

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return _DiscardWriter(self.clock)


class _DiscardWriter(SinkWriter):
    """Counts latencies in bins of 0.1 ms, so that measuring does not slow the flow down."""

    _BIN_MS, _BINS = 0.1, 100_000
    _WARM_UP_S = 1.0  # excludes the start-up from the measurement

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

    def _measure(self, created_us: np.ndarray, now: float) -> None:
        self._first_row = now if self._first_row is None else self._first_row
        if now - self._first_row >= self._WARM_UP_S:
            bins = (now * 1e6 - created_us) / (1e3 * self._BIN_MS)
            bins = np.clip(bins, 0, self._BINS - 1).astype(np.int64)
            self._latencies += np.bincount(bins, minlength=self._BINS)

    def save(self) -> dict[str, Any]:
        return {"rows": self._rows, "digest": f"{self._digest:016x}"}

    def restore(self, saved: dict[str, Any]) -> None:
        self._rows, self._digest = saved["rows"], int(saved["digest"], 16)

    def report(self) -> dict[str, Any]:
        metrics: dict[str, Any] = {"rows": self._rows, "digest": f"{self._digest:016x}"}
        seen = np.cumsum(self._latencies)
        if seen[-1]:
            for q in (50, 99):
                at = np.searchsorted(seen, seen[-1] * q / 100)
                metrics[f"p{q}_ms"] = float((at + 1) * self._BIN_MS)
        return metrics


class Console(Sink):
    """Prints rows as JSON lines."""

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
    """Count and checksum the rows, and discard them."""
    return Discard(clock)


def console() -> Sink:
    """Print every row on the site that runs the egress."""
    return Console()


def callback(function: Callable[[int, pa.RecordBatch], None]) -> Sink:
    """Call a function with the rows of each epoch, on the site that runs the egress."""
    return Callback(function)
