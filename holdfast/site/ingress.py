"""Ingress: the rows of one source's splits on one site, from reading them to epochs."""

from __future__ import annotations

from collections import deque

import numpy as np
import pyarrow as pa

from holdfast.core.records import Block, EpochRecord
from holdfast.errors import require
from holdfast.flow.batches import UNMOVED, Track, concat, empty, with_order
from holdfast.flow.plan import Plan, Stage
from holdfast.flow.sources import SplitReader
from holdfast.flow.steps import conform
from holdfast.flow.watermark import Steps, Watermark, source_times, track_of


class Split:
    """One split: its reader, and the rows that were read and not yet put into an epoch."""

    def __init__(self, stage: Stage, number: int, reader: SplitReader) -> None:
        assert stage.source is not None
        self.stage, self.number, self.reader = stage, number, reader
        self.ended = False
        self._held: deque[pa.RecordBatch] = deque()
        self._first = 0  # offset of the first held row
        self._next = 0
        self._columns = stage.used["out"]

    @property
    def rows_held(self) -> int:
        return self._next - self._first

    def read(self, rows_max: int) -> Block | None:
        """Read some rows; None if there are none now, or (see `ended`) ever."""
        assert self.stage.source is not None
        batch = self.reader.read(rows_max)
        if batch is None:
            self.ended = True
            return None
        if batch.num_rows == 0:
            return None
        batch = conform(batch, self.stage.source.schema, self.stage.name).select(self._columns)
        self._held.append(batch)
        start, self._next = self._next, self._next + batch.num_rows
        return Block(start, self._next, int(batch.nbytes), self._time_max(batch))

    def _time_max(self, batch: pa.RecordBatch) -> int | None:
        name = self.stage.event_time
        if name is None:
            return None
        return int(source_times(batch, name, self.stage.name).max())

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
        return concat(taken)


class Ingress:
    """A source's part on one site. Turns epoch records into rows with sequence numbers."""

    def __init__(self, plan: Plan, stage: Stage, splits: dict[int, Split]) -> None:
        self.stage, self.splits = stage, splits
        declared = stage.ports["out"].schema
        self._schema = with_order(pa.schema([declared.field(n) for n in stage.used["out"]]), 1)
        timed = [s.id for s in plan.sources if s.event_time is not None]
        self._mark = Watermark(timed, plan.boundaries) if plan.boundaries else None

    def epoch(self, record: EpochRecord) -> tuple[pa.RecordBatch, Track]:
        """This site's rows of an epoch, in order, and the steps the watermark takes at them."""
        batches: list[pa.RecordBatch] = []
        steps: list[Steps] = []
        seq = record.base
        start = Track.NEVER if self._mark is None else self._mark.value
        for r in record.ranges:
            mine = r.source == self.stage.id and r.split in self.splits
            if mine:
                rows = self.splits[r.split].take(r.start, r.end)
                seqs = np.arange(seq, seq + r.rows)
                batches.append(
                    pa.RecordBatch.from_arrays([*rows.columns, pa.array(seqs)], schema=self._schema)
                )
                if self._mark is not None and self.stage.event_time is not None:
                    times = source_times(rows, self.stage.event_time, self.stage.name)
                    steps.append(self._mark.advance(r.source, seqs, times))
            elif self._mark is not None and r.time_max is not None:
                self._mark.observe(r.source, r.time_max)
            seq += r.rows
        track = self._track(record, start, steps, seq)
        return (concat(batches) if batches else empty(self._schema)), track

    def _track(self, record: EpochRecord, start: int, steps: list[Steps], end: int) -> Track:
        if self._mark is None:
            return UNMOVED
        if record.idle:
            steps.append(self._mark.let_go(record.idle, end))
        if record.ended:
            steps.append(self._mark.end(end))
        return track_of(steps, start)
