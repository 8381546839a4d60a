"""Ingress: the rows of one source's splits on one site, from reading them to epochs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.connectors.sources import Position, SplitReader
from holdfast.core.records import Block, EpochRecord
from holdfast.engine.batches import DECODE_ERROR, UNMOVED, Track, concat, empty, with_order
from holdfast.engine.steps import conform
from holdfast.engine.watermark import Boundaries, Watermark, block_steps, source_times
from holdfast.errors import require
from holdfast.net import wire
from holdfast.net.bundles import rows_of
from holdfast.plan.planner import Plan, Stage
from holdfast.site.push import MEMORY_BYTES_MAX, PushReader
from holdfast.site.spill import Overflow
from holdfast.storage.restore_point import RestorePoint

BLOCK_STEPS_MAX = 4_096
"""Maximum steps of event time in the announcement of a block."""


def _delivered(stage: Stage) -> pa.Schema:
    """Return the schema of the rows that enter the flow: that of the reader's rows, decoded. A row
    that could not be read has only nulls."""
    assert stage.source is not None
    schema = stage.ports["out"].schema
    if not stage.source.has_decode_errors:
        return schema
    decode_error = pa.field(DECODE_ERROR, pa.string())
    return pa.schema([*(f.with_nullable(True) for f in schema), decode_error])


def _columns(stage: Stage) -> list[str]:
    """Return the columns that leave the ingress."""
    assert stage.source is not None
    return [*stage.used["out"], *([DECODE_ERROR] if stage.source.has_decode_errors else [])]


class Split:
    """One split: its reader, and the rows that were read and are in no epoch yet. Blocks of them
    are announced with the steps of event time that cross one of the `boundaries`."""

    def __init__(
        self,
        stage: Stage,
        number: int,
        reader: SplitReader,
        boundaries: Boundaries,
        offset: int = 0,
        held: Sequence[pa.RecordBatch] = (),
    ) -> None:
        self.stage, self.number, self.reader = stage, number, reader
        self._boundaries = boundaries if stage.event_time is not None else ()
        self.ended = False
        self._schema = _delivered(stage)
        self._columns = _columns(stage)
        self._held = deque(b.select(self._columns) for b in held)
        self._first = offset  # offset of the first held row
        self._next = offset + sum(b.num_rows for b in held)
        self._positions: deque[tuple[int, Position | None]] = deque()
        """Positions of the reader before each batch that has rows in no epoch yet, by the batch's
        end."""
        self._misplaced = False
        """Whether the reader is not at the next row: another replica has read the rows before it,
        or the reader is closed."""
        self._closed = False
        self._reported: deque[tuple[int, Position]] = deque()
        """Positions that the leading replica has reported, by row."""
        self._hint: Position | None = None
        """While the reader is misplaced: a position at the next row or before it."""

    @property
    def held(self) -> list[pa.RecordBatch]:
        return list(self._held)

    @property
    def rows_held(self) -> int:
        return self._next - self._first

    @property
    def first(self) -> int:
        """The offset of the oldest row that is in no epoch yet."""
        return self._first

    @property
    def next(self) -> int:
        """The offset of the row that is read next."""
        return self._next

    @property
    def position(self) -> Position | None:
        """The position from which another reader finds the row `first`."""
        if self._misplaced:
            return self._hint
        if self._positions:
            return self._positions[0][1]
        return self._hint if self._closed else self.reader.position()

    def note(self, row: int, position: Position) -> None:
        """Note a position that the leading replica reported for a row. It repeats its reports."""
        if not self._reported or self._reported[-1][0] != row:
            self._reported.append((row, position))

    def skip(self, end: int) -> None:
        """Continue at the row `end`: another replica has processed the rows before it."""
        if not self._misplaced:
            self._hint = self.position
        self._held.clear()
        self._positions.clear()
        self._first = self._next = end
        self._misplaced = True
        while self._reported and self._reported[0][0] <= end:
            self._hint = self._reported.popleft()[1]

    def close(self) -> None:
        """Close the reader. If rows are read later, the source is opened again."""
        assert self.stage.source is not None
        if self._closed:
            return
        if not self._misplaced:
            self._hint = self.position
        self._misplaced = not self.stage.source.pushed
        self._closed = True
        self.reader.close()

    def read(self, rows_max: int, *, due: bool = False) -> tuple[Block, ...]:
        """Read some rows, and return their blocks. Empty if there are no rows now, or no more (see
        `ended`)."""
        if self._misplaced:
            assert self.stage.source is not None
            if not self._closed:
                self.reader.close()
            self.reader = self.stage.source.open(self.number, self._next, self._hint)
            self._misplaced = self._closed = False
            self._reported.clear()
        before = self.reader.position()
        batch = self.reader.read(rows_max, due=due)
        if batch is None:
            self.ended = True
            return ()
        if batch.num_rows == 0:
            return ()
        batch = self.conformed(batch)
        self._held.append(batch)
        self._positions.append((self._next + batch.num_rows, before))
        start, self._next = self._next, self._next + batch.num_rows
        return self._blocks_of(start, batch)

    def conformed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        """Convert rows of the reader to those that leave the ingress."""
        return conform(batch, self._schema, self.stage.name).select(self._columns)

    def read_to(self, end: int, rows_max: int) -> bool:
        """Read the rows before `end`, which another replica has read. Return False if some are not
        available yet."""
        while self._next < end:
            if not self.read(min(rows_max, end - self._next), due=True):
                return False
        return True

    def blocks(self) -> tuple[Block, ...]:
        """Return the blocks of the rows that are in no epoch yet."""
        found: list[Block] = []
        start = self._first
        for batch in self._held:
            found += self._blocks_of(start, batch)
            start += batch.num_rows
        return tuple(found)

    def _blocks_of(self, start: int, batch: pa.RecordBatch) -> tuple[Block, ...]:
        """Return a batch as one block, or as several if it has too many steps for one."""
        rest = Block(start, start + batch.num_rows, int(batch.nbytes), self._steps(start, batch))
        found = []
        while rest.steps_count > BLOCK_STEPS_MAX:
            block, rest = rest.cut(rest.row_of_step(BLOCK_STEPS_MAX))
            found.append(block)
        return (*found, rest)

    def _steps(self, start: int, batch: pa.RecordBatch) -> bytes:
        name = self.stage.event_time
        if name is None:
            return b""
        times = source_times(batch, name, self.stage.name)
        return block_steps(times, start, self._boundaries) if self._boundaries else b""

    def take(self, start: int, end: int) -> pa.RecordBatch:
        """Remove and return the rows ``[start, end)``, which are the oldest held."""
        require(start == self._first and end <= self._next, f"rows [{start}, {end}) are not held")
        taken, missing = [], end - start
        while missing:
            batch = self._held.popleft()
            if batch.num_rows > missing:
                self._held.appendleft(batch.slice(missing))
                batch = batch.slice(0, missing)
            taken.append(batch)
            missing -= batch.num_rows
        self._first = end
        while self._positions and self._positions[0][0] <= end:
            self._positions.popleft()
        return concat(taken)


class Ingress:
    """The splits of a source on one site. Converts epoch records to rows with sequence numbers, and
    to the track of the watermark over all sources, which travels with the rows."""

    def __init__(self, plan: Plan, stage: Stage, readers: Mapping[int, SplitReader]) -> None:
        assert stage.source is not None
        self.stage, self._boundaries = stage, plan.boundaries
        self.splits = {n: Split(stage, n, r, plan.boundaries) for n, r in readers.items()}
        delivered = _delivered(stage)
        self._schema = with_order(pa.schema([delivered.field(n) for n in _columns(stage)]), 1)
        mark = Watermark(plan.timed_splits, plan.boundaries)
        self._mark = mark if plan.boundaries else None

    def begin(self, restore_point: RestorePoint) -> None:
        """Restore the watermark of the flow's restore point; if the flow was stopped or lost, also
        the source's position and its rows that are in no epoch."""
        saved = restore_point.sources.get(self.stage.id)
        if saved is not None:
            known = msgspec.msgpack.decode(saved, type=wire.IngressExtras)
            self.restore(known, self._waiting(restore_point))
        elif self._mark is not None and restore_point.mark:
            self._mark.restore(restore_point.mark)
        for split in self.splits.values():
            if isinstance(split.reader, PushReader):
                for header, bodies in restore_point.push_batches_of(self.stage.id):
                    message = msgspec.msgpack.decode(header, type=wire.PushBatch)
                    split.reader.recover(message, [rows_of(memoryview(b)) for b in bodies])
                split.reader.drop_part()

    def _waiting(self, restore_point: RestorePoint) -> list[pa.RecordBatch]:
        """Return the stored rows that are in no epoch. They may not fit into memory."""
        pushed = [s.reader for s in self.splits.values() if isinstance(s.reader, PushReader)]
        overflow = Overflow(pushed[0].overflow.folder if pushed else None, MEMORY_BYTES_MAX)
        return [overflow.hold(rows).rows for rows in restore_point.waiting_of(self.stage.id)]

    def epoch(self, record: EpochRecord) -> tuple[pa.RecordBatch, Track]:
        """Return this site's rows of an epoch, in order, and the epoch's track of the watermark."""
        batches: list[pa.RecordBatch] = []
        seq = record.base
        for r in record.ranges:
            if r.source == self.stage.id and r.split in self.splits:
                rows = self.splits[r.split].take(r.start, r.end)
                seqs = pa.array(np.arange(seq, seq + r.rows))
                batches.append(
                    pa.RecordBatch.from_arrays([*rows.columns, seqs], schema=self._schema)
                )
            seq += r.rows
        return (concat(batches) if batches else empty(self._schema)), self._track(record)

    def follow(self, record: EpochRecord) -> None:
        """Skip an epoch whose rows another replica processes."""
        for r in record.ranges:
            if r.source == self.stage.id and r.split in self.splits:
                self.splits[r.split].skip(r.end)
        self._track(record)

    def ready(self, records: Iterable[EpochRecord], rows_max: int) -> bool:
        """Whether all rows of the epochs are here. Rows that only another replica has read so far
        are read now."""
        ranges = [r for record in records for r in record.ranges if r.source == self.stage.id]
        ends = {r.split: r.end for r in ranges if r.split in self.splits}
        return all(self.splits[split].read_to(end, rows_max) for split, end in ends.items())

    def unsequenced(self) -> list[pa.RecordBatch]:
        """Return all rows of a push source that are in no epoch yet."""
        (split,) = self.splits.values()
        assert isinstance(split.reader, PushReader)
        return [*split.held, *map(split.conformed, split.reader.unread())]

    def save(self) -> wire.IngressExtras:
        """Return what a new replica needs to continue reading the source."""
        return {
            "offsets": {str(n): s.first for n, s in self.splits.items()},
            "positions": {
                str(n): p for n, s in self.splits.items() if (p := s.position) is not None
            },
            "mark": self._mark.save() if self._mark else b"",
            "push_readers": [
                s.reader.save() for s in self.splits.values() if isinstance(s.reader, PushReader)
            ],
            "pull_readers": [
                s.reader.save_pull()
                for s in self.splits.values()
                if isinstance(s.reader, PushReader)
            ],
            "queries": [
                s.reader.query for s in self.splits.values() if isinstance(s.reader, PushReader)
            ],
        }

    def restore(self, saved: wire.IngressExtras, rows: list[pa.RecordBatch]) -> None:
        """The inverse of `save`. `rows` are the rows of a push source that are in no epoch."""
        assert self.stage.source is not None
        for number, split in self.splits.items():
            offset, reader = saved["offsets"][str(number)], split.reader
            position = saved["positions"].get(str(number))
            if isinstance(reader, PushReader):
                reader.restore(saved["push_readers"][0], *saved.get("queries", []))
                reader.restore_pull(saved["pull_readers"][0])
            else:
                split.close()
                reader = self.stage.source.open(number, offset, position)
            self.splits[number] = Split(self.stage, number, reader, self._boundaries, offset, rows)
        if self._mark is not None:
            self._mark.restore(saved["mark"])

    def _track(self, record: EpochRecord) -> Track:
        return UNMOVED if self._mark is None else self._mark.track(record)
