"""Runs a flow as an ordinary Spark job over DataFrames: backfill for users, oracle for tests.

Every input row gets the sequence number that it has, or would have, in a live run. The stages
then run the same code as sites do. A small survey job per source counts the rows of each block
and records how their event times advance; everything else is lazy. A keyed stage is one shuffle
of shuffle blocks. It merges the blocks while it reads them, so memory does not grow with the input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F

from holdfast.api.graph import Flow
from holdfast.core.ids import Epoch, StageId
from holdfast.core.records import EpochRecord, Range
from holdfast.engine.batches import UNMOVED, Track
from holdfast.engine.batches import with_order as with_order_columns
from holdfast.engine.groups import Groups
from holdfast.engine.operators.base import KeyedOperator
from holdfast.engine.steps import conform
from holdfast.engine.watermark import Steps, Watermark, source_times, track_of
from holdfast.errors import FlowError, InputError, require
from holdfast.plan.planner import Exchange, Plan, Stage
from holdfast.plan.stage_runner import StageRunner
from holdfast.spark import shuffle_blocks as blocks
from holdfast.spark.session import described, use_this_python
from holdfast.spark.shuffle_blocks import SPLIT

BLOCK = "__block"
_SPLIT_BITS = 20
_RANGE_ROWS, _RANGES_MAX = 500_000, 64
_ALONE = (0, 0)
"""The split of a block that is surveyed by itself: the only split of the only source."""
_SURVEY_DDL = "code long, rows long, at array<long>, marks array<long>"


def batch(
    flow: Flow,
    spark: SparkSession,
    inputs: Mapping[str, DataFrame],
    *,
    sinks: Sequence[str],
    records: Sequence[EpochRecord | Mapping[str, Any]] | None = None,
    partitions: int = 8,
    with_order: bool = False,
) -> dict[str, DataFrame]:
    """Return the rows of these sinks, by name; see `Flow.batch`."""
    use_this_python(spark)
    planned = blocks.checked_plan(flow, inputs, partitions, streaming=False)
    known = None if records is None else [_as_record(r) for r in records]
    job = BatchJob(planned, Order.of(planned, inputs, known), partitions)
    return {s.name: job.result(s, with_order) for s in planned.sinks if s.name in sinks}


# --- stages as DataFrames -------------------------------------------------------------------------


Keep = Callable[[Stage, KeyedOperator], None]
"""A task calls it with its operator once the operator has processed all rows."""


class BatchJob:
    """The DataFrames of the stages.

    The consumers of a stage share one shuffle of its shuffle blocks, which Spark then computes once
    per query (ReusedExchange).
    """

    def __init__(
        self, planned: Plan, order: Order, partitions: int, keep: Keep | None = None
    ) -> None:
        self.plan, self.order, self.partitions, self.keep = planned, order, partitions, keep
        self._blocks: dict[tuple[int, ...], DataFrame] = {}

    def result(self, sink: Stage, with_order: bool) -> DataFrame:
        schema = blocks.sink_schema(sink, with_order)
        results = []
        for producer, exchanges in blocks.by_producer(self.plan, sink):
            outlet = blocks.ToRows(exchanges, schema)
            results.append(self._run(producer, outlet))
        return reduce(DataFrame.unionAll, results)

    def _run(self, stage: Stage, outlet: blocks.Outlet) -> DataFrame:
        planned, lean = blocks.shipped(self.plan, stage)
        if stage.kind == "source":
            assert stage.source is not None
            read = self.order.sources[stage.id]
            task: Any = _SourceTask(planned, lean, read, outlet, stage.ports["out"].schema)
            return read.df.mapInArrow(task, outlet.ddl)
        task = _KeyedTask(planned, lean, self.order.track, self.partitions, outlet, self.keep)
        sent = self._sent_to(stage).repartitionById(self.partitions, F.col("bucket"))
        return sent.sortWithinPartitions("low").mapInArrow(task, outlet.ddl)

    def _sent_to(self, stage: Stage) -> DataFrame:
        """Return all shuffle blocks for a keyed stage; with a single producer, also those for the
        producer's other consumers."""
        producers = blocks.by_producer(self.plan, stage)
        if len(producers) == 1:
            producer = producers[0][0]
            keyed = [e for e in producer.outputs if e.keys is not None]
            return self._blocks_of(producer, keyed)
        return reduce(DataFrame.unionAll, [self._blocks_of(p, e) for p, e in producers])

    def _blocks_of(self, producer: Stage, exchanges: list[Exchange]) -> DataFrame:
        key = tuple(e.id for e in exchanges)
        if key not in self._blocks:
            outlet = blocks.ToBlocks(exchanges, self.partitions)
            self._blocks[key] = self._run(producer, outlet)
        return self._blocks[key]


class _KeyedTask:
    """Runs some buckets of a keyed stage over their shuffle blocks, which are sorted by ``low``."""

    def __init__(
        self,
        planned: Plan,
        stage: Stage,
        track: Track,
        partitions: int,
        outlet: blocks.Outlet,
        keep: Keep | None,
    ) -> None:
        self.plan, self.stage, self.track = planned, stage, track
        self.partitions, self.outlet, self.keep = partitions, outlet, keep
        self.__name__ = blocks.title(planned, stage)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        runner = StageRunner(self.plan, self.stage, self.partitions)
        merge, track = _Merge([e.id for e in self.stage.inputs]), self.track
        for arrived in batches:
            for exchange, low, rows in blocks.unpack(arrived, set(merge.held)):
                if merge.due:
                    ready = merge.below(low)
                    before, track = track.split(low - 1)
                    yield from self.outlet(runner.run_keyed(ready, before, 0))
                merge.add(exchange, rows)
        if merge.touched:
            yield from self.outlet(runner.run_keyed(merge.rest(), track, 0))
        if self.keep is not None:
            assert runner.operator is not None
            self.keep(self.stage, runner.operator)


class _Merge:
    """Holds rows that later shuffle blocks may still precede.

    Shuffle blocks arrive in the order of their lowest sequence number, so all rows below that
    of the next block are complete.
    """

    def __init__(self, exchanges: list[int]) -> None:
        self.held: dict[int, list[pa.RecordBatch]] = {e: [] for e in exchanges}
        self.touched = False
        self._rows, self._goal = 0, blocks.BLOCK_ROWS

    @property
    def due(self) -> bool:
        return self._rows >= self._goal

    def add(self, exchange: int, rows: pa.RecordBatch) -> None:
        self.held[exchange].append(rows)
        self._rows += rows.num_rows
        self.touched = True

    def below(self, seq: int) -> list[list[pa.RecordBatch]]:
        """Remove and return the rows below the sequence number `seq`, per exchange."""
        ready = []
        for exchange, batches in self.held.items():
            early = [b.column("__o0").to_numpy() < seq for b in batches]
            ready.append([b.filter(pa.array(e)) for b, e in zip(batches, early, strict=True)])
            kept = [b.filter(pa.array(~e)) for b, e in zip(batches, early, strict=True)]
            self.held[exchange] = [b for b in kept if b.num_rows]
        self._rows = sum(b.num_rows for held in self.held.values() for b in held)
        # A fixed goal would filter the rows of long overlaps again and again.
        self._goal = 2 * self._rows + blocks.BLOCK_ROWS
        return ready

    def rest(self) -> list[list[pa.RecordBatch]]:
        return list(self.held.values())


# --- the order of the input -----------------------------------------------------------------------


@dataclass
class _Read:
    """A source's DataFrame and the numbering of its rows.

    A row's *code* names its block (a Spark partition, or a range of the order columns) and its
    split. ``first[code]`` is the offset of the block's first row in its split. ``ranges[split]``
    holds the start and end offsets of the recorded ranges, and their first sequence numbers.
    """

    df: DataFrame
    name: str
    split_column: bool
    rows: dict[int, int] = field(default_factory=dict)
    first: dict[int, int] = field(default_factory=dict)
    steps: dict[int, Steps] = field(default_factory=dict)
    ranges: dict[int, np.ndarray] = field(default_factory=dict)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"df": None, "steps": {}}

    @property
    def splits(self) -> list[int]:
        """The splits that have rows."""
        return sorted({_split_of(code) for code in self.rows})

    def split_rows(self, split: int) -> int:
        return sum(n for code, n in self.rows.items() if _split_of(code) == split)

    def locate(self) -> None:
        """Compute the offset of every block's first row; the blocks of a split are contiguous."""
        reached: dict[int, int] = {}
        for code in sorted(self.rows):
            split = _split_of(code)
            self.first[code] = reached.get(split, 0)
            reached[split] = self.first[code] + self.rows[code]

    def seqs(self, split: int, offsets: np.ndarray) -> np.ndarray:
        """Return the sequence numbers of a split's rows; -1 for rows that are in no epoch."""
        if split not in self.ranges:
            return np.full(offsets.size, -1, np.int64)
        starts, ends, seqs = self.ranges[split]
        at = np.searchsorted(starts, offsets, "right") - 1
        inside = (at >= 0) & (offsets < ends[at])
        return np.where(inside, seqs[at] + offsets - starts[at], -1)


def _split_of(code: int) -> int:
    return code & ((1 << _SPLIT_BITS) - 1)


@dataclass
class Order:
    """The numbering of all sources, and the watermark over their rows."""

    sources: dict[int, _Read]
    track: Track
    rows: int
    """Number of sequence numbers assigned."""
    mark: bytes
    """The saved watermark after the last row; empty if no operator uses event time."""

    @classmethod
    def of(
        cls,
        planned: Plan,
        inputs: Mapping[str, DataFrame],
        records: list[EpochRecord] | None = None,
        *,
        ended: bool = True,
    ) -> Order:
        """Return the order that `records` define; without them, all rows are in one epoch, which is
        the last one if the input has `ended`."""
        reads = {}
        for stage in planned.sources:
            what = f"Holdfast flow {planned.flow!r} as a batch job: survey of source {stage.name!r}"
            with described(inputs[stage.name].sparkSession, what):
                reads[stage.id] = _survey(planned, stage, inputs[stage.name])
        if records is None:
            records = [_one_epoch(reads, ended)]
        _number(planned, reads, records)
        rows = records[-1].base + records[-1].rows if records else 0
        if not planned.boundaries:
            return cls(reads, UNMOVED, rows, b"")
        track, mark = _track(planned, reads, records)
        return cls(reads, track, rows, mark.save())


def _as_record(record: EpochRecord | Mapping[str, Any]) -> EpochRecord:
    if isinstance(record, EpochRecord):
        return record
    ranges = tuple(Range(StageId(s), p, a, b) for s, p, a, b in record["ranges"])
    idle = tuple((StageId(s), int(n)) for s, n in record.get("idle", ()))
    ended = bool(record.get("ended", False))
    awake = bool(record.get("awake", False))
    return EpochRecord(Epoch(record["epoch"]), record["base"], ranges, idle, ended, ended, awake)


def _one_epoch(reads: dict[int, _Read], ended: bool) -> EpochRecord:
    """Return one epoch with all rows, source by source and split by split."""
    ranges = [Range(StageId(s), n, 0, r.split_rows(n)) for s, r in reads.items() for n in r.splits]
    return EpochRecord(Epoch(0), 0, tuple(ranges), (), ended, ended)


def _number(planned: Plan, reads: dict[int, _Read], records: list[EpochRecord]) -> None:
    """Set the sequence numbers of every source's ranges."""
    recorded: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    known = set(planned.splits)
    for record in records:
        seq = record.base
        for r in record.ranges:
            recorded.setdefault((r.source, r.split), []).append((r.start, r.end, seq))
            seq += r.rows
    for (source, split), ranges in recorded.items():
        if source not in reads:
            raise FlowError(
                f"flow {planned.flow!r}: the records name stage {source}, which is not a source"
            )
        read = reads[source]
        if (source, split) not in known:
            raise FlowError(
                f"flow {planned.flow!r}, source {read.name!r}: there are rows of split {split}, "
                f"but the source has {sum(s == source for s, _ in known)} splits"
            )
        _refuse_missing(planned.flow, read, split, max(end for _, end, _ in ranges))
        read.ranges[split] = np.array(sorted(ranges), np.int64).T


def _refuse_missing(flow: str, read: _Read, split: int, end: int) -> None:
    where = f"flow {flow!r}, source {read.name!r}"
    if split > 0 and not read.split_column:
        raise FlowError(
            f"{where}: the records name split {split}, but the DataFrame has no column {SPLIT!r}",
            hint="add one with the split of each row",
        )
    if end > read.split_rows(split):
        raise FlowError(
            f"{where}: the records go up to row {end} of split {split}, "
            f"but the DataFrame has {read.split_rows(split)} rows of it"
        )


def _track(
    planned: Plan, reads: dict[int, _Read], records: list[EpochRecord]
) -> tuple[Track, Watermark]:
    """Compute the watermark over all recorded rows from the steps within each block.

    A row can advance the watermark only if it also does so within its own block, so it is enough to
    examine these few rows in sequence order. The steps in the records of a live run are ignored,
    because live runs are checked against the batch job.
    """
    candidates = {s: _candidates(reads[s]) for s, _ in planned.timed_splits}
    mark = Watermark(_timed_splits(planned, reads), planned.boundaries)
    steps: list[Steps] = [] if records else [mark.end(0)]
    for record in records:
        steps += mark.follow(
            record, lambda r, seq: _within(candidates[r.source], seq, seq + r.rows)
        )
    return track_of(steps), mark


def _timed_splits(planned: Plan, reads: dict[int, _Read]) -> list[tuple[int, int]]:
    """Return the splits whose rows advance the watermark. A DataFrame without a split column is one
    split, regardless of how many the source has in a live run."""
    return [
        (source, split)
        for source, split in planned.timed_splits
        if reads[source].split_column or split == 0
    ]


def _candidates(read: _Read) -> Steps:
    """Return the rows at which a source's own largest time may advance, by sequence number."""
    seqs, marks = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for code, (at, values) in read.steps.items():
        seqs.append(read.seqs(_split_of(code), read.first[code] + at))
        marks.append(values)
    seq, mark = np.concatenate(seqs), np.concatenate(marks)
    order = np.argsort(seq, kind="stable")
    return seq[order], mark[order]


def _within(candidates: Steps, start: int, end: int) -> Steps:
    """Return the candidates in ``[start, end)``."""
    seqs, marks = candidates
    a, b = np.searchsorted(seqs, [start, end])
    return seqs[a:b], marks[a:b]


# --- reading a source -----------------------------------------------------------------------------


def _survey(planned: Plan, stage: Stage, df: DataFrame) -> _Read:
    """Count a source's rows by block and split, and compute the steps of their event times."""
    assert stage.source is not None
    splits = SPLIT in df.columns
    used = [*stage.used["out"], *([SPLIT] if splits else [])]
    order = blocks.order_columns(stage, df)
    blocked = _ranged(df, order, used) if order else _as_it_is(df, used)
    read = _Read(blocked.select(*used, BLOCK), stage.name, splits)
    on = stage.event_time if planned.boundaries else None
    schema = pa.schema([stage.ports["out"].schema.field(on)]) if on else pa.schema([])
    count = _SurveyTask(schema, on, planned.boundaries, stage.name)
    names = [*([on] if on else []), *([SPLIT] if splits else []), BLOCK]
    for row in blocked.select(*names).mapInArrow(count, _SURVEY_DDL).collect():
        require(row.code not in read.rows, f"block {row.code} is in two Spark partitions")
        read.rows[row.code] = row.rows
        read.steps[row.code] = (np.array(row.at, np.int64), np.array(row.marks, np.int64))
    read.locate()
    return read


def _as_it_is(df: DataFrame, used: list[str]) -> DataFrame:
    """Return the DataFrame in its own order: by Spark partition, and by position within one.

    A shuffle may give its rows in another order, or in other partitions, when Spark runs it again;
    a local checkpoint keeps the order of one run. Rows from the driver's memory need one too,
    because Spark's optimizer evaluates the partition number before there are partitions.
    """
    df = df.select(*used)
    how = df._jdf.queryExecution().executedPlan().toString()
    if "Exchange" in how or "LocalTableScan" in how:
        df = df.localCheckpoint()
    return df.withColumn(BLOCK, F.spark_partition_id())


def _ranged(df: DataFrame, order: list[str], used: list[str]) -> DataFrame:
    """Return the DataFrame sorted by `order`, in blocks that are ranges of these columns.

    ``orderBy`` would sample new ranges every time Spark runs the DataFrame.
    """
    df = df.select(*dict.fromkeys([*used, *order]))
    bounds = _bounds(df, order)
    whole = F.struct(*order)
    above = [(whole >= bound).cast("int") for bound in bounds]
    df = df.withColumn(BLOCK, reduce(Column.__add__, above, F.lit(0)))
    return df.repartitionById(len(bounds) + 1, F.col(BLOCK)).sortWithinPartitions(BLOCK, *order)


def _bounds(df: DataFrame, order: list[str]) -> list[Column]:
    """Return values of the order columns that split the rows into parts of similar size."""
    rows = df.count()
    parts = min(-(-rows // _RANGE_ROWS), _RANGES_MAX)
    if parts <= 1:
        return []
    keys = df.select(*order)
    sample = keys.sample(min(1.0, 200 * parts / rows), seed=7).orderBy(*order).collect()
    chosen = dict.fromkeys(sample[i * len(sample) // parts] for i in range(1, parts))
    kinds = {f.name: f.dataType for f in keys.schema}
    return [F.struct(*[F.lit(row[n]).cast(kinds[n]).alias(n) for n in order]) for row in chosen]


class _Places:
    """Computes the place of rows: their code, and their position among the rows of that code."""

    def __init__(self) -> None:
        self.seen: dict[int, int] = {}

    def of(self, batch: pa.RecordBatch) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield each code of the batch with its row indices and the positions of these rows."""
        codes = batch.column(BLOCK).to_numpy().astype(np.int64) << _SPLIT_BITS
        if SPLIT in batch.schema.names:
            codes = codes | batch.column(SPLIT).to_numpy().astype(np.int64)
        groups = Groups(codes)
        for code, start, length in zip(groups.slots, groups.starts, groups.lengths, strict=True):
            seen = self.seen.get(int(code), 0)
            self.seen[int(code)] = seen + int(length)
            yield int(code), groups.rows[start : start + length], np.arange(seen, seen + length)


class _SurveyTask:
    """Counts rows by code; with `on`, also finds where their largest time passes a boundary."""

    def __init__(
        self, schema: pa.Schema, on: str | None, boundaries: list[tuple[int, int]], name: str
    ) -> None:
        self.schema, self.on, self.boundaries, self.name = schema, on, boundaries, name
        self.__name__ = f"survey of {name}"

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        places = _Places()
        marks: dict[int, Watermark] = {}
        steps: dict[int, list[Steps]] = {}
        for batch in blocks.blocks(batches):
            times = self._times(batch)
            for code, rows, at in places.of(batch):
                mark = marks.setdefault(code, Watermark([_ALONE], self.boundaries))
                moves = steps.setdefault(code, [])
                if times is not None:
                    moves.append(mark.advance(_ALONE, at, times[rows]))
        yield self._result(places.seen, steps)

    def _times(self, batch: pa.RecordBatch) -> np.ndarray | None:
        if self.on is None:
            return None
        rows = conform(batch.select(self.schema.names), self.schema, self.name)
        return source_times(rows, self.on, self.name)

    @staticmethod
    def _result(seen: dict[int, int], steps: dict[int, list[Steps]]) -> pa.RecordBatch:
        at = [[int(x) for s, _ in steps[c] for x in s] for c in seen]
        marks = [[int(x) for _, m in steps[c] for x in m] for c in seen]
        longs = pa.list_(pa.int64())
        return pa.record_batch(
            {
                "code": pa.array(list(seen), pa.int64()),
                "rows": pa.array(list(seen.values()), pa.int64()),
                "at": pa.array(at, longs),
                "marks": pa.array(marks, longs),
            }
        )


class _SourceTask:
    """Numbers a source's rows and runs the steps of its stage over them."""

    def __init__(
        self,
        planned: Plan,
        stage: Stage,
        read: _Read,
        outlet: blocks.Outlet,
        declared: pa.Schema,
    ) -> None:
        self.plan, self.stage, self.read, self.outlet = planned, stage, read, outlet
        self.__name__ = blocks.title(planned, stage)
        self.schema = pa.schema([declared.field(n) for n in stage.used["out"]])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        runner, places = StageRunner(self.plan, self.stage, 1), _Places()
        for batch in blocks.blocks(batches):
            seqs = np.full(batch.num_rows, -1, np.int64)
            for code, rows, at in places.of(batch):
                offsets = self.read.first.get(code, 0) + at
                seqs[rows] = self.read.seqs(_split_of(code), offsets)
            self._refuse_change(places.seen.items(), done=False)
            yield from self.outlet(runner.run_source(self._numbered(batch, seqs), 0))
        self._refuse_change(places.seen.items(), done=True)

    def _numbered(self, batch: pa.RecordBatch, seqs: np.ndarray) -> pa.RecordBatch:
        rows = conform(batch.select(self.schema.names), self.schema, self.stage.name)
        full = with_order_columns(self.schema, 1)
        numbered = pa.RecordBatch.from_arrays([*rows.columns, pa.array(seqs)], schema=full)
        return numbered if (seqs >= 0).all() else numbered.filter(pa.array(seqs >= 0))

    def _refuse_change(self, seen: Iterable[tuple[int, int]], done: bool) -> None:
        """Raise if the DataFrame has other blocks now than it had during the survey."""
        for code, rows in seen:
            expected = self.read.rows.get(code, 0)
            if rows > expected or (done and rows < expected):
                raise InputError(
                    f"source {self.stage.name!r}: the DataFrame returned different rows when Spark "
                    "read it again",
                    hint="persist() it, or give the source order_by columns",
                )
