"""A source whose rows are due at fixed times, and a sink that logs when they were delivered.

`holdfast bench failover` and `holdfast chaos` share them. The rows of the source depend on the
offset alone, so that a new leader generates the same ones. The log has a line for every epoch, from
which all figures are computed. This module does not import Spark, so that sites load it quickly.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import pyarrow as pa

from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.connectors.sources import Position, Source, SplitReader
from holdfast.engine.batches import empty, row_digests
from holdfast.lab.workloads import dmz

WINDOW_S = 2.0
LOOK_S = 0.1
SAMPLES = 20
"""Number of latencies logged per epoch, evenly spread over its rows, in addition to the largest."""


class WatchedRun(Protocol):
    """A running flow: a `Run`, or `Apps`."""

    @property
    def protected(self) -> bool: ...

    def status(self) -> dict[str, Any]: ...

    def ended(self, timeout: float | None = None) -> bool: ...

    def wait(self, timeout: float | None = None) -> bool: ...


# --- rows that are due at a set time --------------------------------------------------------------


class Paced(Source):
    """A source whose rows are due at times that depend on their offset alone.

    The first `head` rows in all, evenly over the splits, are due immediately, the others at `rate`
    from then on. Times count from the first read of any process, which writes the time to `folder`.
    All replicas of the ingress, in any application and at any time, therefore generate the same
    rows. The source ends at the offset that `end` writes to the folder.
    """

    DUE = pa.field("due", pa.int64())  # microseconds since the Unix epoch

    def __init__(
        self,
        folder: str,
        make: Callable[[int, int, int], pa.RecordBatch],
        schema: pa.Schema,
        rate: float,
        splits: int,
        head: int = 0,
    ) -> None:
        self.folder, self.make, self.splits = folder, make, splits
        self.schema = pa.schema([*schema, self.DUE])
        self.rate_per_split, self.head_per_split = rate / splits, head // splits

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        return _PacedReader(self, split, offset)

    def began(self) -> float:
        """Return the time from which the rows' due times count."""
        path = os.path.join(self.folder, "began")
        if not os.path.exists(path):
            hidden = f"{path}.{os.getpid()}"
            Path(hidden).write_text(repr(time.time()))
            with suppress(FileExistsError):  # another process was first
                os.link(hidden, path)
            os.unlink(hidden)
        return float(Path(path).read_text())

    def last_offset(self) -> int | None:
        """Return the offset at which every split ends, or None if it is not known yet."""
        try:
            return int(Path(self.folder, "end").read_text())
        except FileNotFoundError:
            return None

    def end(self, after_s: float = 1.0) -> int:
        """Let all splits end in `after_s` seconds, and return the total number of rows."""
        elapsed = time.time() + after_s - self.began()
        offset = self.head_per_split + int(elapsed * self.rate_per_split)
        hidden = Path(self.folder, "end.tmp")
        hidden.write_text(str(offset))
        os.replace(hidden, Path(self.folder, "end"))
        return offset * self.splits


class _PacedReader(SplitReader):
    def __init__(self, source: Paced, split: int, offset: int) -> None:
        self._source, self._split, self._next = source, split, offset
        self._began: float | None = None
        self._end, self._look_again = source.last_offset(), 0.0
        self._nothing = empty(source.schema)

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        source, count = self._source, rows_max
        if self._began is None:
            self._began = source.began()
        if not due:
            elapsed = time.time() - self._began
            in_time = source.head_per_split + int(elapsed * source.rate_per_split)
            count = min(count, in_time - self._next)
        if self._end is None and time.monotonic() > self._look_again:
            self._end, self._look_again = source.last_offset(), time.monotonic() + LOOK_S
        if self._end is not None:
            count = min(count, self._end - self._next)
            if self._next >= self._end:
                return None
        return self._make(count) if count > 0 else self._nothing

    def _make(self, count: int) -> pa.RecordBatch:
        source, began = self._source, self._began or 0.0
        batch = source.make(self._split, self._next, count)
        offsets = np.arange(self._next, self._next + count) - source.head_per_split
        due_us = (began + np.maximum(offsets, 0) / source.rate_per_split) * 1e6
        self._next += count
        columns = [*batch.columns, pa.array(due_us.astype(np.int64))]
        return pa.RecordBatch.from_arrays(columns, schema=source.schema)


# --- a sink that logs when every epoch was delivered ----------------------------------------------


class EpochLog(Sink):
    """Appends a line for every epoch to a file. One call writes a whole line, so that a crash
    leaves the complete line or none. A new leader reads from the file which epochs it has."""

    def __init__(self, path: str) -> None:
        self.path = path

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return _EpochLogWriter(self.path)

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        return _EpochLogWriter(self.path), max(durable, self.last_epoch())

    def last_epoch(self) -> int:
        """Return the largest epoch in the log, -1 if there is none.

        It reads only the end of the file, because rows wait for it. The largest epoch need not be
        in the last line: a site that was stopped may have appended an older one.
        """
        try:
            with open(self.path, "rb") as file:
                file.seek(max(0, os.fstat(file.fileno()).st_size - 4_096))
                lines = file.read().splitlines()
        except FileNotFoundError:
            return -1
        epochs = [int(line.split()[0]) for line in lines[len(lines) > 1 :]]  # the first may be cut
        return max(epochs, default=-1)


class _EpochLogWriter(SinkWriter):
    def __init__(self, path: str) -> None:
        self._file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        names = [n for n in batch.schema.names if n != Paced.DUE.name]
        digest = int(row_digests(batch.select(names)).sum(dtype=np.uint64))
        due = np.sort(batch.column(Paced.DUE.name).to_numpy())[::-1]
        now_us = time.time_ns() // 1_000
        late = now_us - due[_spread(due.size)]
        fields = [epoch, now_us, due.size, dmz.as_hex(digest), os.getpid(), *late.tolist()]
        os.write(self._file, (" ".join(map(str, fields)) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


def _spread(size: int) -> np.ndarray:
    """Return positions evenly spread over `size` rows, and the last.

    >>> _spread(100).tolist()[:3], _spread(100).tolist()[-2:], _spread(0).size
    ([2, 7, 12], [97, 99], 0)
    """
    if size == 0:
        return np.empty(0, np.int64)
    middle = (np.arange(SAMPLES) + 0.5) * size / SAMPLES
    return np.append(middle.astype(np.int64), size - 1)


@dataclass(frozen=True, slots=True)
class Delivery:
    """A line of an `EpochLog`: when an epoch was delivered, and how late its rows were then."""

    epoch: int
    at: float
    rows: int
    digest: int
    late_ms: tuple[float, ...]
    writer: int = 0
    """The process that wrote it."""

    @property
    def largest_ms(self) -> float:
        return self.late_ms[-1] if self.late_ms else 0.0

    @classmethod
    def parse(cls, line: str) -> Delivery:
        epoch, now_us, rows, digest, writer, *late = line.split()
        late_ms = tuple(int(us) / 1e3 for us in late)
        at = int(now_us) / 1e6
        return cls(int(epoch), at, int(rows), int(digest, 16), late_ms, int(writer))


def read_log(path: str) -> list[Delivery]:
    return [Delivery.parse(line) for line in Path(path).read_text().splitlines()]


def read_latest(path: str, bytes_max: int = 1 << 20) -> list[Delivery]:
    """Read the end of a log, which is cheap enough while the flow runs in this process."""
    with open(path, "rb") as file:
        start = max(0, os.fstat(file.fileno()).st_size - bytes_max)
        file.seek(start)
        lines = file.read().decode().splitlines()
    return [Delivery.parse(line) for line in lines[1 if start else 0 :]]


def p99_ms(deliveries: Sequence[Delivery]) -> float:
    """Return the 99th percentile of the latencies of all rows, estimated from the logged ones.

    >>> p99_ms([Delivery(0, 0.0, 980, 0, (1.0, 1.0)), Delivery(1, 0.0, 20, 0, (7.0, 9.0))])
    7.0
    """
    # The largest latency, which is the last, represents only itself.
    logged = [(ms, d.rows / (len(d.late_ms) - 1)) for d in deliveries for ms in d.late_ms[:-1]]
    if not logged:
        return 0.0
    late, weight = (np.array(column) for column in zip(*sorted(logged), strict=True))
    seen = np.cumsum(weight)
    return float(late[np.searchsorted(seen, 0.99 * seen[-1])])


def gap_ms(deliveries: Sequence[Delivery], killed: float) -> float:
    """Return the additional latency of the slowest row; see `holdfast.lab.bench.failover`.

    >>> before, after = Delivery(0, 9.0, 1, 0, (5.0, 5.0)), Delivery(1, 10.04, 1, 0, (42.0, 42.0))
    >>> gap_ms([before, after], 10.0)
    37.0
    """
    worst = slowest(deliveries, killed)
    return max(0.0, (worst.largest_ms if worst else 0.0) - usual_ms(deliveries, killed))


def usual_ms(deliveries: Sequence[Delivery], killed: float) -> float:
    """Return the largest latency in the window before a kill."""
    before = [d.largest_ms for d in deliveries if killed - WINDOW_S <= d.at < killed]
    return max(before, default=0.0)


def slowest(deliveries: Sequence[Delivery], killed: float) -> Delivery | None:
    """Return the delivery with the largest latency of those in flight in the window after a
    kill."""
    around = [
        d for d in deliveries if d.at >= killed and d.at - d.largest_ms / 1e3 <= killed + WINDOW_S
    ]
    return max(around, key=lambda d: d.largest_ms, default=None)
