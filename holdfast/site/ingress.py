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
"""A block is announced with no more steps of event time than this."""


def _delivered(stage: Stage) -> pa.Schema:
    """The schema of what enters the flow, which is that of what readers give without encoding. A
    row that could not be read is null all over."""
    assert stage.source is not None
    schema = stage.ports["out"].schema
    if not stage.source.has_decode_errors:
        return schema
    decode_error = pa.field(DECODE_ERROR, pa.string())
    return pa.schema([*(f.with_nullable(True) for f in schema), decode_error])


def _columns(stage: Stage) -> list[str]:
    """Those that go on from here."""
    assert stage.source is not None
    return [*stage.used["out"], *([DECODE_ERROR] if stage.source.has_decode_errors else [])]


class Split:
    """One split: its reader, and the rows that were read and not yet put into an epoch. Blocks of
    them are announced with the steps of event time that cross one of the `boundaries`."""

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
        """Where the reader was before each batch that has rows in no epoch yet."""
        self._astray = False
        """Whether the reader is not at the next row, as others have given out those before, or it
        is closed."""
        self._closed = False
        self._told: deque[tuple[int, Position]] = deque()
        """By row: positions that the replica which gives them out has told."""
        self._hint: Position | None = None
        """A position at the next row or before it, of a reader that is astray."""

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
        """What a reader needs to find the row `first`."""
        if self._astray:
            return self._hint
        if self._positions:
            return self._positions[0][1]
        return self._hint if self._closed else self.reader.position()

    def note(self, row: int, position: Position) -> None:
        """The replica that reads was there when it was at this row. It says so again and again."""
        if not self._told or self._told[-1][0] != row:
            self._told.append((row, position))

    def skip(self, end: int) -> None:
        """Be at the row `end`: those before have been given out by another replica."""
        if not self._astray:
            self._hint = self.position
        self._held.clear()
        self._positions.clear()
        self._first = self._next = end
        self._astray = True
        while self._told and self._told[0][0] <= end:
            self._hint = self._told.popleft()[1]

    def close(self) -> None:
        """Let go of the source. Should rows be wanted after all, it is opened again."""
        assert self.stage.source is not None
        if self._closed:
            return
        if not self._astray:
            self._hint = self.position
        self._astray = not self.stage.source.pushed
        self._closed = True
        self.reader.close()

    def read(self, rows_max: int, *, due: bool = False) -> tuple[Block, ...]:
        """Read some rows; nothing if there are none now, or (see `ended`) ever."""
        if self._astray:
            assert self.stage.source is not None
            if not self._closed:
                self.reader.close()
            self.reader = self.stage.source.open(self.number, self._next, self._hint)
            self._astray = self._closed = False
            self._told.clear()
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
        """What goes on from here of rows as the reader gives them."""
        return conform(batch, self._schema, self.stage.name).select(self._columns)

    def read_to(self, end: int, rows_max: int) -> bool:
        """Have the rows before `end`, which another replica has had; False if not all are there."""
        while self._next < end:
            if not self.read(min(rows_max, end - self._next), due=True):
                return False
        return True

    def blocks(self) -> tuple[Block, ...]:
        """What is held, as blocks to announce."""
        found: list[Block] = []
        start = self._first
        for batch in self._held:
            found += self._blocks_of(start, batch)
            start += batch.num_rows
        return tuple(found)

    def _blocks_of(self, start: int, batch: pa.RecordBatch) -> tuple[Block, ...]:
        """A batch as one block, or as several if its event time rises too often for one."""
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
        """Give out the rows ``[start, end)``, which are the oldest held."""
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
    """A source's part on one site. Turns epoch records into rows with sequence numbers, and into
    the steps of the watermark over all sources, which go along with the rows."""

    def __init__(self, plan: Plan, stage: Stage, readers: Mapping[int, SplitReader]) -> None:
        assert stage.source is not None
        self.stage, self._boundaries = stage, plan.boundaries
        self.splits = {n: Split(stage, n, r, plan.boundaries) for n, r in readers.items()}
        delivered = _delivered(stage)
        self._schema = with_order(pa.schema([delivered.field(n) for n in _columns(stage)]), 1)
        mark = Watermark(plan.timed_splits, plan.boundaries)
        self._mark = mark if plan.boundaries else None

    def begin(self, restore_point: RestorePoint) -> None:
        """Event time has come so far before the first epoch; and so has the source, if the flow
        was stopped."""
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
        """Rows that had come in and were in no epoch; there may be more than fit into memory."""
        pushed = [s.reader for s in self.splits.values() if isinstance(s.reader, PushReader)]
        overflow = Overflow(pushed[0].overflow.folder if pushed else None, MEMORY_BYTES_MAX)
        return [overflow.hold(rows).rows for rows in restore_point.waiting_of(self.stage.id)]

    def epoch(self, record: EpochRecord) -> tuple[pa.RecordBatch, Track]:
        """This site's rows of an epoch, in order, and how the whole epoch moves the watermark."""
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
        """Be after an epoch whose rows another replica has given out."""
        for r in record.ranges:
            if r.source == self.stage.id and r.split in self.splits:
                self.splits[r.split].skip(r.end)
        self._track(record)

    def ready(self, records: Iterable[EpochRecord], rows_max: int) -> bool:
        """Whether all rows of the epochs are in hand; those another replica has had are read
        now."""
        ranges = [r for record in records for r in record.ranges if r.source == self.stage.id]
        ends = {r.split: r.end for r in ranges if r.split in self.splits}
        return all(self.splits[split].read_to(end, rows_max) for split, end in ends.items())

    def unsequenced(self) -> list[pa.RecordBatch]:
        """Of a push source: all rows that are in no epoch yet."""
        (split,) = self.splits.values()
        assert isinstance(split.reader, PushReader)
        return [*split.held, *map(split.conformed, split.reader.unread())]

    def save(self) -> wire.IngressExtras:
        """What a new replica needs besides the source itself."""
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
        """Be where the replica was that this was saved from."""
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
