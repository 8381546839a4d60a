"""Where results go: descriptions that a user passes to ``stream.sink``.

Egress gives a sink one batch per epoch, in sequence order, and calls `commit` when the epoch is
complete; only then is it counted as delivered.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast.errors import FlowError
from holdfast.flow.batches import row_digests


class SinkWriter:
    """Takes the rows of one sink on the site that hosts its egress."""

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        raise NotImplementedError

    def commit(self, epoch: int) -> None:
        """All rows up to and including `epoch` have been written."""

    def close(self) -> None:
        """The flow has ended; everything written must be readable now."""

    def report(self) -> dict[str, Any]:
        """Figures for ``run.status()``."""
        return {}


class Sink:
    """Base of the sinks."""

    with_order = False
    """Whether rows keep the columns of their order key (named ``__o0``, ...)."""

    def open(self, name: str, schema: pa.Schema) -> SinkWriter:
        raise NotImplementedError


class Parquet(Sink):
    """A directory of parquet files, each the rows of a range of epochs, that Spark reads back."""

    def __init__(
        self, path: str | os.PathLike[str], *, roll_s: float = 1.0, with_order: bool = False
    ) -> None:
        self.path, self.roll_s, self.with_order = Path(path).absolute(), roll_s, with_order

    def open(self, name: str, schema: pa.Schema) -> SinkWriter:
        if any(self.path.glob("*.parquet")):
            raise FlowError(
                f"sink {name!r}: the directory {self.path} already holds parquet files",
                hint="give each run a directory of its own, or empty it first",
            )
        self.path.mkdir(parents=True, exist_ok=True)
        return _ParquetWriter(self, schema)


class _ParquetWriter(SinkWriter):
    """Buffers until `roll_s` has passed, then writes one file under a name that hides it from
    readers until it is whole."""

    _ROWS_MAX = 1 << 20

    def __init__(self, sink: Parquet, schema: pa.Schema) -> None:
        self._sink, self._schema = sink, schema
        self._batches: list[pa.RecordBatch] = []
        self._rows = 0
        self._first: int | None = None
        self._committed = -1
        self._rolled = time.monotonic()

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._first = epoch if self._first is None else self._first
            self._batches.append(batch)
            self._rows += batch.num_rows

    def commit(self, epoch: int) -> None:
        self._committed = epoch
        due = time.monotonic() - self._rolled >= self._sink.roll_s
        if self._batches and (due or self._rows >= self._ROWS_MAX):
            self._roll()

    def _roll(self) -> None:
        name = f"part-{self._first:012d}-{self._committed:012d}.parquet"
        hidden = self._sink.path / f".{name}.tmp"
        pq.write_table(pa.Table.from_batches(self._batches), hidden)
        os.replace(hidden, self._sink.path / name)
        self._batches, self._rows, self._first = [], 0, None
        self._rolled = time.monotonic()

    def close(self) -> None:
        if self._batches or not any(self._sink.path.glob("*.parquet")):
            if not self._batches:  # an empty result must still be readable
                self._batches = [pa.RecordBatch.from_pylist([], schema=self._schema)]
                self._first = 0
            self._roll()
        (self._sink.path / "_SUCCESS").touch()


class Discard(Sink):
    """Counts the rows and adds up their digests: for benchmarks and checks.

    With `clock` it also measures latency: the column so named holds, in microseconds since the
    Unix epoch, when the row came into being.
    """

    def __init__(self, clock: str | None = None) -> None:
        self.clock = clock

    def open(self, name: str, schema: pa.Schema) -> SinkWriter:
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

    def open(self, name: str, schema: pa.Schema) -> SinkWriter:
        return _ConsoleWriter(name, sys.stdout)


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

    def open(self, name: str, schema: pa.Schema) -> SinkWriter:
        return _CallbackWriter(self.function)


class _CallbackWriter(SinkWriter):
    def __init__(self, function: Callable[[int, pa.RecordBatch], None]) -> None:
        self._function = function

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._function(epoch, batch)


def parquet(path: str | os.PathLike[str], *, roll_s: float = 1.0, with_order: bool = False) -> Sink:
    """Write a directory of parquet files; a new one at most every `roll_s` seconds."""
    return Parquet(path, roll_s=roll_s, with_order=with_order)


def discard(clock: str | None = None) -> Sink:
    """Count and checksum the rows, and keep none."""
    return Discard(clock)


def console() -> Sink:
    """Print every row where the egress runs."""
    return Console()


def callback(function: Callable[[int, pa.RecordBatch], None]) -> Sink:
    """Call a function with each epoch's rows, on the site that hosts the egress."""
    return Callback(function)
