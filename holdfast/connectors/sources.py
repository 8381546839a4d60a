"""Sources: descriptions that a user passes to ``flow.source``.

A source has a schema and one or more splits. Each split is a sequence of rows with offsets 0, 1,
2, ..., read by a `SplitReader` on the ingress that the split was placed on. If a source has its own
offsets, with gaps, its readers also report a *position*, from which another reader can continue.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from holdfast.engine.batches import empty
from holdfast.errors import FlowError

Position = dict[str, int]
"""The place of a row in a split, in the external system's own terms."""


class SplitReader:
    """Reads a split. `read` returns rows, an empty batch for "nothing yet", or None at the end.

    With `due`, another replica of the ingress has already read these rows. The reader returns them
    immediately, even if they are not yet due by its own clock.
    """

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        raise NotImplementedError

    def position(self) -> Position | None:
        """Return the position of the row that `read` returns next, or of one before it, for
        `Source.open`. None if the row's offset is sufficient."""
        return None

    def caught_up(self) -> bool:
        """Whether a `read` without rows means that there are none. False if the source has not
        answered yet: a slow split must not be treated as idle, or its rows would be late."""
        return True

    def close(self) -> None:
        """Called once, after the last `read`."""


Taken = tuple[list[pa.RecordBatch], str]
"""Rows, and the mark of the position after them; the mark is empty if there is none."""


class PullReader:
    """The reader of a pull source. Only the leading replica of the ingress reads with it. The other
    replicas have one too, and note the marks of the leader's."""

    def take(self) -> Taken | None:
        """Return some rows, no rows if there are none now, or None if the source has ended."""
        raise NotImplementedError

    def note(self, mark: str, epoch: int) -> None:
        """Note that rows with this mark have entered the flow, in this epoch or a later one. Called
        at all replicas, including the leader. Raises `ValueError` for an invalid mark and then
        changes nothing."""

    def check(self, mark: str) -> None:
        """Raise `ValueError` for a mark that `note` would refuse."""

    def rewind(self) -> None:
        """Called when this replica leads: `take` continues after the last mark."""

    def save(self) -> str:
        """Return the noted position, in a few bytes. State that grows with the source is in the
        tables of the pull reader."""
        return ""

    def restore(self, saved: str) -> None:
        """The inverse of `save`."""

    def close(self) -> None:
        """Called when this replica stops reading."""


Locate = Callable[[], list[tuple[str, int]]]


class Pusher(Protocol):
    """Pushes rows into a push source from the controller's side; calls `failed` on an error."""

    failed: Callable[[Exception], None]

    def start(self, locate: Locate, access: Any, source: int, name: str, flow: str) -> None:
        """Start pushing. `locate` returns the current addresses of the ingress's replicas;
        `access` is the pusher's `holdfast.net.handshake.Party`. `name` and `flow` are the names of
        the source and the flow, for messages."""

    def stop(self) -> None: ...


class Source:
    """Base of the sources."""

    schema: pa.Schema
    splits: int = 1
    pushed = False
    """Whether rows are pushed to the ingress (by Spark tasks) instead of being read by it."""
    pulled = False
    """Whether this is a pull source: the leading ingress reads the rows that it pushes."""
    resumable = True
    """Of a push source: whether another application can continue pushing."""
    through = False
    """Of a push source: whether rows enter as they arrive, not only as a whole batch."""
    has_decode_errors = False
    """Whether readers add the column `DECODE_ERROR`, for rows that they cannot decode."""

    def resolve(self, replicas: int, known: Sequence[str] = ()) -> Any:
        """Look up what is known only when the flow starts and must be the same for all `replicas`
        (the number of splits, their first offsets). Returns plain values for `resolved`; called
        once. `known` are the files that the source's history was read from, if it has one."""
        return None

    def resolved(self, values: Any) -> Source:
        """Return this source with the values that `resolve` returned."""
        return self

    def timed(self, event_time: str) -> Source:
        """Return this source with the column that is the event time of its rows."""
        return self

    def dry_run(self) -> Source:
        """Return this source for a dry run, in which reading leaves no trace in the external
        system that would move another reader. Raises if rows would be missing elsewhere."""
        return self

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        """Read a split from its row `offset` on. Not called for push sources. `position` is what a
        reader reported at that row or at one before it."""
        raise NotImplementedError

    def pull_reader(self) -> PullReader:
        """Return the reader of a pull source."""
        raise NotImplementedError

    def pusher(self) -> Pusher:
        """Return the pusher of a push source."""
        raise NotImplementedError


class RowsSource(Source):
    """Reads rows that are already in memory, one list of batches for each split."""

    def __init__(self, *splits: pa.RecordBatch | pa.Table | Sequence[pa.RecordBatch]) -> None:
        if not splits:
            raise FlowError("rows() needs at least one batch or table")
        self._splits = [_batches(s) for s in splits]
        first = [b for s in self._splits for b in s]
        if not first:
            raise FlowError("rows() needs at least one batch; it may be empty, but has a schema")
        self.schema = first[0].schema
        self.splits = len(splits)

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        return _RowsReader(self._splits[split], offset)


def _batches(split: pa.RecordBatch | pa.Table | Sequence[pa.RecordBatch]) -> list[pa.RecordBatch]:
    if isinstance(split, pa.RecordBatch):
        return [split]
    return split.to_batches() if isinstance(split, pa.Table) else list(split)


class _RowsReader(SplitReader):
    def __init__(self, batches: list[pa.RecordBatch], offset: int) -> None:
        self._batches = [b for b in batches if b.num_rows][::-1]
        while offset and self._batches:
            first = self._batches.pop()
            if first.num_rows > offset:
                self._batches.append(first.slice(offset))
            offset = max(0, offset - first.num_rows)

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        if not self._batches:
            return None
        batch = self._batches.pop()
        if batch.num_rows > rows_max:
            self._batches.append(batch.slice(rows_max))
        return batch.slice(0, rows_max)


class Generator(Source):
    """Generates rows with a function of (split, first offset, count), at a fixed rate or as fast as
    the flow reads them.

    The function must return the same rows for the same offsets.
    """

    def __init__(
        self,
        make: Callable[[int, int, int], pa.RecordBatch],
        schema: pa.Schema,
        *,
        rows: int | None = None,
        rate: float | None = None,
        splits: int = 1,
    ) -> None:
        if splits < 1 or (rows is not None and rows < 0) or (rate is not None and rate <= 0):
            raise FlowError("generator(): splits and rate must be positive and rows not negative")
        self.make, self.schema, self.splits, self.rows = make, schema, splits, rows
        self.rate_per_split = None if rate is None else rate / splits

    def rows_of(self, split: int) -> int | None:
        """Return the number of rows of a split, or None if it has no end. If the rows do not divide
        evenly, the first splits have one more."""
        if self.rows is None:
            return None
        share, rest = divmod(self.rows, self.splits)
        return share + (split < rest)

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        return _GeneratorReader(self, split, offset)


class _GeneratorReader(SplitReader):
    def __init__(self, source: Generator, split: int, offset: int) -> None:
        self._source, self._split, self._next = source, split, offset
        self._rows = source.rows_of(split)
        self._started: float | None = None

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        source, count = self._source, rows_max
        if source.rate_per_split is not None:
            if self._started is None:
                self._started = time.monotonic() - self._next / source.rate_per_split
            if not due:
                elapsed = time.monotonic() - self._started
                count = min(count, int(elapsed * source.rate_per_split) - self._next)
        if self._rows is not None:
            left = self._rows - self._next
            if left <= 0:
                return None
            count = min(count, left)
        if count <= 0:
            return empty(source.schema)
        batch = source.make(self._split, self._next, count)
        self._next += batch.num_rows
        return batch


def rows(*splits: pa.RecordBatch | pa.Table | Sequence[pa.RecordBatch]) -> Source:
    """A source of rows that are already in memory; each argument is one split."""
    return RowsSource(*splits)


def generator(
    make: Callable[[int, int, int], pa.RecordBatch],
    schema: pa.Schema,
    *,
    rows: int | None = None,
    rate: float | None = None,
    splits: int = 1,
) -> Source:
    """A source of generated rows: ``make(split, offset, count)`` returns `count` rows, from the row
    `offset` of the split on; for the same arguments always the same rows. There are `rows` rows, or
    without it no end, at `rate` rows a second, or without it as fast as the flow takes them."""
    return Generator(make, schema, rows=rows, rate=rate, splits=splits)
