"""Symmetric window join: pairs of rows with equal keys whose times differ by at most `within`. A
null equals nothing, so rows with a null in their key are in no pair and are not kept.

The order key of a pair begins with that of the later of its two rows. If both sides may have rows
of the same order key, one more column has the side of the later row.

Lateness is decided in buckets of `within`: a row is late if the watermark has passed the end of its
bucket plus the allowed lateness before the row. A kept row can therefore match only kept rows, and
rows that no later row can match are removed. Neither depends on epoch boundaries.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Sequence

import numpy as np
import pyarrow as pa

from holdfast.engine.batches import (
    Track,
    concat,
    empty,
    order_names,
    order_of,
    sort,
    take,
    user_names,
)
from holdfast.engine.expressions import column
from holdfast.engine.keys import KeyWords, key_words, partition_of
from holdfast.engine.operators.base import KeyedOperator, Port
from holdfast.engine.state import STANDBY, StateTable
from holdfast.engine.watermark import event_times, operator_times
from holdfast.errors import FlowError


class WindowJoin(KeyedOperator):
    """The window join of two inputs."""

    label = "window join"
    bounded = True

    def __init__(
        self,
        keys: Sequence[str],
        left: Port,
        right: Port,
        on: tuple[str, str],
        within: int,
        lateness: int,
        suffix: str,
        shared: bool,
        where: str,
    ) -> None:
        super().__init__(keys, [left, right])
        if within < 1 or lateness < 0:
            raise FlowError(f"{where}: within must be positive and lateness not negative")
        self.on, self.within, self.shared = on, within, shared
        self.hold = lateness + max(left.delay, right.delay)
        self.horizon = 2 * within + self.hold
        self.boundaries = [(within, self.hold % within)]
        names = set(left.schema.names)
        self.right_names: dict[str, str] = {}  # column of the right side -> its name in the output
        for f in right.schema:
            if f.name not in keys:
                output_name = f.name + suffix if f.name in names else f.name
                if output_name in names:
                    raise FlowError(
                        f"{where}: both sides have a column {output_name!r}; pass suffix=..."
                    )
                self.right_names[f.name] = output_name
                names.add(output_name)
        fields = [*left.schema]
        fields += [
            pa.field(new, right.schema.field(old).type) for old, new in self.right_names.items()
        ]
        width = 2 * max(left.width, right.width) + shared
        self.outputs["out"] = Port(
            pa.schema(fields), width, left.event_time, self.hold + 2 * within
        )
        self.outputs["late"] = Port(left.schema, left.width)
        self.outputs["late_right"] = Port(right.schema, right.width)
        self.needs = [set(left.schema.names), set(right.schema.names)]

    def parameters(self) -> dict[str, object]:
        return {"on": self.on, "within": self.within, "hold": self.hold}

    def _allocate(self) -> None:
        self.sides = [
            _Side(self.keys, port.full_schema, on, self.partitions)
            for port, on in zip(self.inputs, self.on, strict=True)
        ]

    def tables(self) -> dict[str, StateTable]:
        return {"left": self.sides[0], "right": self.sides[1]}  # type: ignore[dict-item]

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        kept, late = [], []
        for batch, on in zip(inputs, self.on, strict=True):
            mark = track.before(column(batch, "__o0"))
            on_time = self._bucket_end(operator_times(batch, on)) > mark
            kept.append(take(batch, np.flatnonzero(on_time & self._joinable(batch))))
            late.append(take(batch, np.flatnonzero(~on_time)))
        self.late_rows += sum(b.num_rows for b in late)
        pairs = [self._pairs(kept[0], self.sides[1], flip=False)]
        self.sides[0].add(kept[0], epoch)
        # The left side has its new rows now: this finds both old-new and new-new pairs.
        pairs.append(self._pairs(kept[1], self.sides[0], flip=True))
        self.sides[1].add(kept[1], epoch)
        self._expire(track.final)
        out = sort(concat(pairs))
        return {"out": out, "late": late[0], "late_right": late[1]}

    def _joinable(self, batch: pa.RecordBatch) -> np.ndarray:
        """Return which rows can be in a pair: as in SQL, a key with a null equals no key, not even
        itself."""
        joinable = np.ones(batch.num_rows, bool)
        for key in self.keys:
            column = batch.column(key)
            if column.null_count:
                joinable &= column.is_valid().to_numpy(zero_copy_only=False)
        return joinable

    def _bucket_end(self, times: np.ndarray) -> np.ndarray:
        """Return the watermark from which rows of these times are late."""
        return (times // self.within + 1) * self.within + self.hold

    def _expire(self, mark: int) -> None:
        """Remove the rows that no row after the watermark `mark` can match."""
        if mark == Track.NEVER:
            return
        if mark == Track.END:
            for side in self.sides:
                side.clear()
            return
        oldest = (mark - self.hold) // self.within * self.within  # no row below this is on time
        for side in self.sides:
            side.forget(oldest - self.within)

    def _pairs(self, probe: pa.RecordBatch, side: _Side, flip: bool) -> pa.RecordBatch:
        schema = self.outputs["out"].full_schema
        pairs = [empty(schema)]
        if probe.num_rows:
            words = self.words(probe)
            times = event_times(probe, self.on[1 if flip else 0])
            for run in side.runs:
                mine, theirs = run.matches(words)
                other = event_times(run.batch, self.on[0 if flip else 1])
                mine_at, theirs_at = times[mine], other[theirs]
                # This does not compute the difference, which may overflow int64.
                near = theirs_at >= mine_at - self.within
                near &= theirs_at <= mine_at + self.within
                a, b = take(probe, mine[near]), take(run.batch, theirs[near])
                pairs.append(self._joined(b, a) if flip else self._joined(a, b))
        return concat(pairs)

    def _joined(self, left: pa.RecordBatch, right: pa.RecordBatch) -> pa.RecordBatch:
        port = self.outputs["out"]
        columns = {n: left.column(n) for n in user_names(left.schema)}
        columns |= {new: right.column(old) for old, new in self.right_names.items()}
        half = max(p.width for p in self.inputs)
        a, b = (_padded(order_of(side), half) for side in (left, right))
        left_later = _after(a, b)
        order = [np.where(left_later, x, y) for x, y in zip(a, b, strict=True)]
        order += [np.where(left_later, y, x) for x, y in zip(a, b, strict=True)]
        if self.shared:  # rows i and j of one source may be in the pairs (i, j) and (j, i)
            order.append(left_later.astype(np.int64))
        columns |= {n: pa.array(c) for n, c in zip(order_names(port.width), order, strict=True)}
        schema = port.full_schema
        return pa.RecordBatch.from_arrays([columns[n] for n in schema.names], schema=schema)


def _padded(order: list[np.ndarray], width: int) -> list[np.ndarray]:
    rows = order[0].size
    return order + [np.zeros(rows, np.int64)] * (width - len(order))


def _after(a: list[np.ndarray], b: list[np.ndarray]) -> np.ndarray:
    """Return where the order key `a` is greater than `b`."""
    above = np.zeros(a[0].size, bool)
    equal = np.ones(a[0].size, bool)
    for x, y in zip(a, b, strict=True):
        above |= equal & (x > y)
        equal &= x == y
    return above


class _SortedRun:
    """Rows sorted by the first word of their key."""

    def __init__(self, batch: pa.RecordBatch, words: KeyWords) -> None:
        rows = np.argsort(words.low)
        self.words = words.take(rows)
        self.batch = take(batch, rows)

    def matches(self, words: KeyWords) -> tuple[np.ndarray, np.ndarray]:
        """Return all pairs (row of the probe, row of this run) with equal keys."""
        low = self.words.low
        start = np.searchsorted(low, words.low, "left")
        length = np.searchsorted(low, words.low, "right") - start
        mine = np.repeat(np.arange(words.low.size), length)
        theirs = np.arange(mine.size) - np.repeat(np.cumsum(length) - length - start, length)
        a, b = words.high, self.words.high
        if a is not None or b is not None:
            zero = np.zeros(1, np.int64)
            same = (zero if a is None else a[mine]) == (zero if b is None else b[theirs])
            mine, theirs = mine[same], theirs[same]
        return mine, theirs


class _Side:
    """The rows of one input that rows of the other may still match, in runs of decreasing size."""

    removals = 0  # a standby drops old rows itself, given the floor

    def __init__(self, keys: list[str], schema: pa.Schema, on: str, partitions: int) -> None:
        self.keys, self.schema, self.on, self.partitions = keys, schema, on, partitions
        self.runs: list[_SortedRun] = []
        self._floor = Track.NEVER
        self._births: deque[tuple[int, int]] = deque()
        """By epoch: the latest time of its rows."""
        self._unread: dict[str, list[tuple[int, pa.RecordBatch]]] = {}
        """By reader of changes: the epochs and rows since its last snapshot."""

    def follow(self, *, births: bool, changes: Collection[str] = ()) -> None:
        """Start or stop tracking, for these readers of changes, the rows added since the last
        snapshot of each. The epochs of rows are always tracked."""
        self._unread = {reader: self._unread.get(reader, []) for reader in changes}

    def oldest(self) -> int | None:
        """Return the first epoch of which a row may still be held."""
        while self._births and self._births[0][1] < self._floor:
            self._births.popleft()
        return self._births[0][0] if self._births else None

    @property
    def size(self) -> int:
        return sum(r.batch.num_rows for r in self.runs)

    @property
    def nbytes(self) -> int:
        return sum(r.batch.nbytes + r.words.low.nbytes for r in self.runs)

    @property
    def row_bytes(self) -> int:
        return self.nbytes // self.size if self.size else 0

    def _run(self, batch: pa.RecordBatch) -> _SortedRun:
        return _SortedRun(batch, key_words([batch.column(k) for k in self.keys]))

    def add(self, batch: pa.RecordBatch, epoch: int = -1) -> None:
        if batch.num_rows == 0:
            return
        batch = batch.select(self.schema.names)
        latest = int(event_times(batch, self.on).max())
        runs = [*self.runs, self._run(batch)]
        while len(runs) > 1 and runs[-2].batch.num_rows < 2 * runs[-1].batch.num_rows:
            runs[-2:] = [self._run(concat([runs[-2].batch, runs[-1].batch]))]
        # All allocations are done: change the state only now.
        self.runs = runs
        self._births.append((epoch, latest))
        for unread in self._unread.values():
            unread.append((epoch, batch))

    def clear(self) -> None:
        self.runs = []
        self._births.clear()

    def forget(self, oldest: int) -> None:
        """Drop rows with a time below `oldest` from runs of which at least half is that old."""
        if oldest <= self._floor:
            return
        kept: list[_SortedRun] = []
        for run in self.runs:
            rows = np.flatnonzero(event_times(run.batch, self.on) >= oldest)
            if 2 * rows.size <= run.batch.num_rows:
                if rows.size:
                    kept.append(self._run(take(run.batch, rows)))
            else:
                kept.append(run)
        self.runs, self._floor = kept, oldest

    def extract(
        self, partitions: Sequence[int] | None = None, since: int | None = None
    ) -> pa.RecordBatch:
        """Return the rows of some partitions. `since` is ignored: all rows are returned."""
        batch = concat([empty(self.schema), *(r.batch for r in self.runs)])
        return self.wanted(batch, partitions, self._floor)

    def held(self) -> list[int]:
        """Return the partitions that hold rows."""
        return np.unique(self._partition(self.extract())).tolist()

    def within(self, state: pa.RecordBatch, first: int, end: int) -> pa.RecordBatch:
        """Filter a result of `extract` for the partitions ``[first, end)``."""
        return self.wanted(state, range(first, end), Track.NEVER)

    def _partition(self, batch: pa.RecordBatch) -> np.ndarray:
        return partition_of(key_words([batch.column(k) for k in self.keys]), self.partitions)

    def wanted(
        self, batch: pa.RecordBatch, partitions: Sequence[int] | None, oldest: int
    ) -> pa.RecordBatch:
        """Return the rows of some partitions with a time of at least `oldest`. Runs may still have
        older rows: when these are dropped depends on how the runs were merged."""
        held = event_times(batch, self.on) >= oldest
        if partitions is not None:
            held &= np.isin(self._partition(batch), list(partitions))
        return take(batch, np.flatnonzero(held))

    def snapshot(
        self,
        partitions: Sequence[int] | None = None,
        after: int | None = None,
        whose: str = STANDBY,
    ) -> _SideSnapshot:
        batches = [run.batch for run in self.runs]
        if after is not None and whose in self._unread:
            batches = [batch for epoch, batch in self._unread[whose] if epoch > after]
        if whose in self._unread:
            self._unread[whose] = []
        return _SideSnapshot(self, partitions, self._floor, batches)

    def removed(self, whose: str = STANDBY) -> pa.RecordBatch:
        """Return the time before which rows are removed."""
        return pa.record_batch({"floor": [self._floor]})

    def take_out(self, gone: pa.RecordBatch) -> None:
        """Remove the rows that `removed` of another replica describes."""
        self.forget(gone.column("floor")[0].as_py())

    def install(self, state: pa.RecordBatch) -> None:
        self.add(state)

    def drop(self, partitions: Sequence[int]) -> None:
        gone = set(partitions)
        rest = self.extract([p for p in range(self.partitions) if p not in gone])
        self.runs = [self._run(rest)] if rest.num_rows else []


class _SideSnapshot:
    """The `Snapshot` of a side. Runs never change, so it only keeps references to them."""

    def __init__(
        self,
        side: _Side,
        partitions: Sequence[int] | None,
        oldest: int,
        batches: list[pa.RecordBatch],
    ) -> None:
        self._side, self._partitions, self._oldest = side, partitions, oldest
        self._batches = batches

    @property
    def rows_left(self) -> int:
        return sum(b.num_rows for b in self._batches)

    @property
    def nbytes_left(self) -> int:
        return sum(b.nbytes for b in self._batches)

    def next(self, rows_max: int) -> pa.RecordBatch | None:
        while self._batches:
            batch = self._batches.pop()
            if batch.num_rows > rows_max:
                self._batches.append(batch.slice(rows_max))
            part = self._side.wanted(batch.slice(0, rows_max), self._partitions, self._oldest)
            if part.num_rows:
                return part
        return None

    def close(self) -> None:
        self._batches = []
