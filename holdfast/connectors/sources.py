"""Where rows come from: descriptions that a user passes to ``flow.source``.

A source has a schema and one or more splits. Each split is a sequence of rows with offsets 0, 1,
2, ..., read by a `SplitReader` on the ingress that the split was placed on. Where a source has
offsets of its own, with gaps, its readers say a *position* for the rows they are at: what it takes
to read on from there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import pyarrow as pa

from holdfast.engine.batches import empty
from holdfast.errors import FlowError

Position = dict[str, int]
"""Where in a split some row is, in terms of whoever keeps the rows."""


class SplitReader:
    """Reads a split. `read` returns rows, an empty batch for "nothing yet", or None at the end.

    With `due`, another replica of the ingress has had these rows: they are to be given at once,
    even if their time has not come by the clock of this one.
    """

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        raise NotImplementedError

    def position(self) -> Position | None:
        """What `Source.open` needs to find the row that `read` gives next, or one before it. None
        if the row's offset says it all."""
        return None

    def caught_up(self) -> bool:
        """Whether a `read` that gave no rows means that there are none. False if the source has not
        answered yet: a split that is only slow must not be taken for idle, or its rows would come
        late."""
        return True

    def close(self) -> None:
        """Called once, when no more rows will be asked for."""


Taken = tuple[list[pa.RecordBatch], str]
"""Rows, and a mark: how far reading has come with them; empty if there is nothing to say."""


class PullReader:
    """What the leading replica of an ingress reads, of a source that only one can. The other
    replicas have one, too, which is told how far that has come."""

    def take(self) -> Taken | None:
        """Some rows, none if there are none now, or None if there never will be again."""
        raise NotImplementedError

    def note(self, mark: str, epoch: int) -> None:
        """Rows with this mark have entered the flow, in this epoch or a later one: at all replicas,
        the one that has taken them included. A mark that is none is a `ValueError`, and changes
        nothing."""

    def rewind(self) -> None:
        """This replica leads from now on: `take` goes on behind what was noted."""

    def save(self) -> str:
        """What `note` has said so far, in a few bytes. Whatever grows with the source is in tables
        of the pull reader."""
        return ""

    def restore(self, saved: str) -> None:
        """The inverse of `save`."""

    def close(self) -> None:
        """Somebody else reads now, or nobody."""


Locate = Callable[[], list[tuple[str, int]]]


class Pusher(Protocol):
    """Pushes rows into a push source from the controller's side; calls `failed` if that breaks."""

    failed: Callable[[Exception], None]

    def start(self, locate: Locate, secret: bytes, source: int, name: str, flow: str) -> None:
        """`locate` tells where the replicas of the ingress are just now; `name` is the source's and
        `flow` the flow's, for people to read."""

    def stop(self) -> None: ...


class Source:
    """Base of the sources."""

    schema: pa.Schema
    splits: int = 1
    pushed = False
    """Whether rows are pushed to the ingress (by Spark tasks) instead of read by it."""
    pulled = False
    """Of a push source: whether the leading ingress feeds itself."""
    resumable = True
    """Of a push source: whether another application can go on feeding it."""
    through = False
    """Of a push source: whether rows are taken as they come in, or a whole batch at a time."""
    has_decode_errors = False
    """Whether readers add the column `DECODE_ERROR`, because they may come across rows they cannot
    read."""

    def resolve(self, replicas: int, known: Sequence[str] = ()) -> Any:
        """What is not known before the flow starts and must be the same for all `replicas` (how
        many splits there are, where they begin), as plain values for `resolved`. Asked once.
        `known` are the files that the source's history was read from, if it has one."""
        return None

    def resolved(self, values: Any) -> Source:
        """This source, once that is known."""
        return self

    def timed(self, event_time: str) -> Source:
        """This source, once it is known which column is the event time of its rows."""
        return self

    def dry_run(self) -> Source:
        """This source for a flow that is only tried: whoever reads it leaves nothing behind by
        which another would go on elsewhere. Refused if the rows would be missing there."""
        return self

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        """Read one of the splits from its row `offset` on; of a source that is not fed.
        `position` is what a reader said when it was at that row or at one before it."""
        raise NotImplementedError

    def pull_reader(self) -> PullReader:
        """What the leading ingress reads; of a source that is pulled."""
        raise NotImplementedError

    def pusher(self) -> Pusher:
        """What pushes the rows; of a push source."""
        raise NotImplementedError


class Rows(Source):
    """Rows that are already in memory, one list of batches for each split."""

    def __init__(self, *splits: pa.RecordBatch | pa.Table | Sequence[pa.RecordBatch]) -> None:
        if not splits:
            raise FlowError("rows() needs at least one batch or table")
        self._splits = [_batches(s) for s in splits]
        first = [b for s in self._splits for b in s]
        if not first:
            raise FlowError("rows() needs at least one batch, if only an empty one with a schema")
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
    """Rows made by a function of (split, first offset, count), at a set rate or as fast as taken.

    The function must give the same rows whenever it is asked for the same offsets.
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
        """How many rows a split has, if there is an end: the first ones have one more where they
        cannot have the same number."""
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
    """A source of rows already in memory; each argument is one split."""
    return Rows(*splits)


def generator(
    make: Callable[[int, int, int], pa.RecordBatch],
    schema: pa.Schema,
    *,
    rows: int | None = None,
    rate: float | None = None,
    splits: int = 1,
) -> Source:
    """A source of made-up rows: ``make(split, offset, count)`` gives `count` rows of `schema`."""
    return Generator(make, schema, rows=rows, rate=rate, splits=splits)
