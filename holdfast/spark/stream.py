"""Runs a flow's operators under Structured Streaming: a fallback, and a baseline for benchmarks.

A keyed stage is one stateful operator of Spark over shuffle blocks, grouped by hash bucket. Its
state is one binary value per bucket: the operator's tables as Arrow bytes. Spark processes one
micro-batch after the other, so a task needs to order only the rows within a micro-batch.

Event time needs more. The row at which a window closes depends on all rows of all sources, and
Spark calls an operator only for keys with rows in the micro-batch. A query with event-time
operators therefore starts with one more stateful operator, the *ingress*: a single group that
numbers all rows, advances the watermark like a live ingress, and sends a heartbeat to each bucket
of the next stages, which forward it. A micro-batch corresponds to an epoch of a live run. Spark
never reports the end of the input, so the last windows stay open; and a split without rows is
never idle.

PySpark 4.3 has two APIs for this. A single `applyInPandasWithState` is the cheapest. Spark's
analyser refuses two of them in one query unless its check is off
(``spark.sql.streaming.unsupportedOperationCheck=false``; it guards watermarks and timeouts, and
this query has neither). `transformWithStateInPandas` can be chained, but it needs the RocksDB state
store and the package protobuf, and is slower. Chains use the second API, or the first if the
session has the check switched off.
"""

from __future__ import annotations

import importlib
import struct
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any, Protocol

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from holdfast.api.graph import Flow
from holdfast.engine.batches import UNMOVED, Track, concat, from_ipc, with_order
from holdfast.engine.operators.base import KeyedOperator
from holdfast.engine.state_rows import Field
from holdfast.engine.steps import conform
from holdfast.engine.watermark import Steps, Watermark, source_times, track_of
from holdfast.errors import HostError, InputError, require
from holdfast.plan.planner import Exchange, Plan, Stage
from holdfast.plan.stage_runner import StageRunner
from holdfast.spark import shuffle_blocks as blocks
from holdfast.spark.session import described, use_this_python
from holdfast.spark.shuffle_blocks import SPLIT

BLOCK = "__block"
_BLOCK_COLUMNS = ("exchange", "low", "data")
_STATE_DDL = "token binary, data binary"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_CHECK = "spark.sql.streaming.unsupportedOperationCheck"


def stream(
    flow: Flow,
    spark: SparkSession,
    inputs: Mapping[str, DataFrame],
    *,
    sinks: Sequence[str],
    checkpoint: str | None = None,
    partitions: int = 8,
) -> dict[str, DataFrame]:
    """Return the rows of these sinks as streaming DataFrames, by name; see `Flow.stream`."""
    use_this_python(spark)
    planned = blocks.checked_plan(flow, inputs, partitions, streaming=True)
    if checkpoint is not None:
        spark.conf.set("spark.sql.streaming.checkpointLocation", checkpoint)
    wanted = [s for s in planned.sinks if s.name in sinks]
    kinds = {s.name: _TimedStreamJob if _uses_watermark(planned, s) else _StreamJob for s in wanted}
    chained = any(kinds[s.name].stateful(planned, s) > 1 for s in wanted)
    backend = _chaining(spark) if chained else _in_pandas
    with described(spark, f"Holdfast flow {flow.name!r} as a stream: keys for the buckets"):
        bucket_key = _bucket_key(spark, partitions)
    given = (planned, inputs, partitions, bucket_key, backend)
    return {s.name: kinds[s.name](*given).result(s) for s in wanted}


def _uses_watermark(planned: Plan, stage: Stage) -> bool:
    """Return whether the input or output of `stage` depends on the watermark."""
    if stage.operator is not None and stage.operator.boundaries:
        return True
    producers = {e.producer for e in stage.inputs}
    return any(_uses_watermark(planned, planned.stages[p]) for p in producers)


# --- stages as DataFrames -------------------------------------------------------------------------


class _StreamJob:
    def __init__(
        self,
        planned: Plan,
        inputs: Mapping[str, DataFrame],
        partitions: int,
        bucket_key: Column,
        backend: Backend,
    ) -> None:
        self.plan, self.inputs, self.partitions = planned, inputs, partitions
        self.bucket_key, self.backend = bucket_key, backend

    @classmethod
    def stateful(cls, planned: Plan, stage: Stage) -> int:
        """Return the number of stateful operators in the query up to `stage`; Spark shares none of
        them."""
        producers = {e.producer for e in stage.inputs}
        own = 1 if stage.kind == "keyed" else 0
        return own + sum(cls.stateful(planned, planned.stages[p]) for p in producers)

    def result(self, sink: Stage) -> DataFrame:
        schema = blocks.sink_schema(sink, with_order=False)
        results = []
        for producer, exchanges in blocks.by_producer(self.plan, sink):
            if producer.kind == "source":
                results.append(self._source(producer, blocks.ToRows(exchanges, schema)))
            else:
                opening = blocks.Opening(exchanges, schema)
                sent = self._keyed(producer, exchanges)
                results.append(sent.mapInArrow(opening, blocks.spark_schema(schema)))
        return reduce(DataFrame.unionAll, results)

    def _source(self, stage: Stage, outlet: blocks.Outlet) -> DataFrame:
        df = self.inputs[stage.name]
        order, rows = blocks.order_columns(stage, df), _SourceRows.of(stage, df)
        df = df.select(*rows.declared.names)
        by_value = len(order) == 1 and len(self.plan.sources) == 1 and _countable(stage, order[0])
        if order and not by_value:
            df = df.coalesce(1)  # one task sorts the micro-batch, since Spark refuses to
        df = df.withColumn(BLOCK, F.spark_partition_id())
        planned, lean = blocks.shipped(self.plan, stage)
        task = _StreamSourceTask(planned, lean, rows, by_value, outlet)
        return df.mapInArrow(task, outlet.ddl)

    def _keyed(self, stage: Stage, exchanges: list[Exchange]) -> DataFrame:
        planned, lean = blocks.shipped(self.plan, stage)
        task = _BucketTask(planned, lean, self.partitions, exchanges)
        return self._stateful(self._sent_to(stage), task)

    def _sent_to(self, stage: Stage) -> list[DataFrame]:
        """Return the shuffle blocks for a keyed stage."""
        sent = []
        for producer, inward in blocks.by_producer(self.plan, stage):
            if producer.kind == "source":
                sent.append(self._source(producer, blocks.ToBlocks(inward, self.partitions)))
            else:
                sent.append(self._keyed(producer, inward))
        return sent

    def _stateful(self, sent: list[DataFrame], task: _Task) -> DataFrame:
        # The JVM computes the column again, which also turns Arrow's rows into Spark's: directly
        # after a Python task, an exchange in a streaming query fails with a ClassCastException.
        keyed = reduce(DataFrame.unionAll, sent).withColumn("bucket", self.bucket_key)
        return self.backend(keyed, task)


class _TimedStreamJob(_StreamJob):
    """A job with an ingress between the sources and the keyed stages. All rows of all sources pass
    through each ingress of the query, so all assign the same numbers and the same watermark."""

    @classmethod
    def stateful(cls, planned: Plan, stage: Stage) -> int:
        pushed = stage.kind == "keyed" and any(
            planned.stages[e.producer].kind == "source" for e in stage.inputs
        )
        return super().stateful(planned, stage) + pushed

    def _sent_to(self, stage: Stage) -> list[DataFrame]:
        producers = blocks.by_producer(self.plan, stage)
        sent = [self._keyed(p, inward) for p, inward in producers if p.kind == "keyed"]
        if len(sent) < len(producers):
            sent.append(self._ingress({p.id: inward for p, inward in producers}))
        return sent

    def _ingress(self, exchanges: dict[int, list[Exchange]]) -> DataFrame:
        """Return the shuffle blocks of these exchanges of the sources, and heartbeats."""
        entries = []
        for stage in self.plan.sources:
            outlet = blocks.ToBlocks(exchanges.get(stage.id, []), self.partitions)
            rows = _SourceRows.of(stage, self.inputs[stage.name])
            entries.append(_StreamEntry(rows, blocks.shipped(self.plan, stage)[1], outlet))
        planned = blocks.shipped(self.plan, self.plan.sources[0])[0]
        task = _IngressTask(planned, entries, self.partitions)
        return self._stateful([self._raw(s) for s in self.plan.sources], task)

    def _raw(self, stage: Stage) -> DataFrame:
        df = self.inputs[stage.name]
        names = [
            *_SourceRows.of(stage, df).declared.names,
            *([SPLIT] if SPLIT in df.columns else []),
        ]
        df = df.select(*names).withColumn(BLOCK, F.spark_partition_id())
        return df.mapInArrow(_RawTask(stage.id), blocks.DDL)


def _countable(stage: Stage, name: str) -> bool:
    assert stage.source is not None
    kind = stage.ports["out"].schema.field(name).type
    return pa.types.is_signed_integer(kind) or pa.types.is_timestamp(kind)


def _bucket_key(spark: SparkSession, partitions: int) -> Column:
    """Return the key that represents a bucket, chosen so that Spark's hash spreads the buckets
    evenly over the tasks."""
    tasks = int(spark.conf.get("spark.sql.shuffle.partitions", "200"))
    landing = F.pmod(F.hash(F.col("id").cast("int")), F.lit(tasks))
    by_task: dict[int, list[int]] = {}
    for key, task in spark.range(20 * tasks + 20 * partitions).select("id", landing).collect():
        by_task.setdefault(task, []).append(key)
    keys = [by_task[i % tasks][i // tasks] for i in range(partitions)]
    return F.element_at(F.array(*[F.lit(k).cast("int") for k in keys]), F.col("bucket") + 1)


# --- tasks ----------------------------------------------------------------------------------------


@dataclass
class _SourceRows:
    """Converts rows of a source from Spark's types to the flow's."""

    name: str
    declared: pa.Schema
    """The used columns and the order columns."""
    schema: pa.Schema
    """The used columns."""
    order: list[str]
    splits: int
    """Number of splits: one if the input has no split column."""

    @classmethod
    def of(cls, stage: Stage, df: DataFrame) -> _SourceRows:
        assert stage.source is not None
        field, used = stage.ports["out"].schema.field, stage.used["out"]
        order = blocks.order_columns(stage, df)
        declared = pa.schema([field(n) for n in dict.fromkeys([*used, *order])])
        splits = stage.source.splits if SPLIT in df.columns else 1
        return cls(stage.name, declared, pa.schema([field(n) for n in used]), order, splits)

    def sorted(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        keys = [(n, "ascending") for n in self.order]
        return batch.take(pc.sort_indices(batch, keys, null_placement="at_start"))

    def conformed(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return conform(batch.select(self.declared.names), self.declared, self.name)

    def numbered(self, rows: pa.RecordBatch, seqs: np.ndarray) -> pa.RecordBatch:
        arrays = [*rows.select(self.schema.names).columns, pa.array(seqs)]
        return pa.RecordBatch.from_arrays(arrays, schema=with_order(self.schema, 1))


class _StreamSourceTask:
    """Numbers a micro-batch's rows by their order and runs the steps of the stage over them."""

    def __init__(
        self,
        planned: Plan,
        stage: Stage,
        rows: _SourceRows,
        by_value: bool,
        outlet: blocks.Outlet,
    ) -> None:
        self.plan, self.stage, self.rows, self.by_value = planned, stage, rows, by_value
        self.outlet = outlet
        self.__name__ = blocks.title(planned, stage)

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        runner, seen, epoch = StageRunner(self.plan, self.stage, 1), 0, _micro_batch()
        for batch in self._sorted(batches):
            rows = self.rows.conformed(batch)
            seqs = self._values(rows) if self.by_value else self._positions(batch, seen)
            seen += batch.num_rows
            yield from self.outlet(runner.run_source(self.rows.numbered(rows, seqs), epoch))

    def _sorted(self, batches: Iterator[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        if not self.rows.order or self.by_value:
            return blocks.blocks(batches)
        held = [b for b in batches if b.num_rows]
        return [self.rows.sorted(concat(held))] if held else []

    def _values(self, rows: pa.RecordBatch) -> np.ndarray:
        name = self.rows.order[0]
        column = rows.column(name)
        if column.null_count:
            raise InputError(
                f"source {self.stage.name!r}: the order_by column {name!r} has null values"
            )
        return Field(column.type).stored(column).astype(np.int64)

    def _positions(self, batch: pa.RecordBatch, seen: int) -> np.ndarray:
        """Number the rows by source, Spark partition and position in it. The number need not
        contain the micro-batch."""
        part = batch.column(BLOCK).to_numpy().astype(np.int64)
        require(self.stage.id < 128 and part.max() < 1 << 16, "too many sources or partitions")
        return (self.stage.id << 56) + (part << 40) + np.arange(seen, seen + batch.num_rows)


class _RawTask:
    """Packs a source's unchanged rows into shuffle blocks for the ingress. Their ``exchange`` holds
    the source, and ``low`` orders them by Spark partition and position in it."""

    def __init__(self, source: int) -> None:
        self.source = source

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        seen = 0
        for batch in blocks.blocks(batches):
            low = (int(batch.column(BLOCK)[0].as_py()) << 40) + seen
            seen += batch.num_rows
            data = blocks.to_bytes(batch.drop_columns([BLOCK]))
            yield blocks.table([(self.source, 0, low, data)])


def _micro_batch() -> int:
    return int(_property("streaming.sql.batchId") or 0)


def _property(name: str) -> str | None:
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


class _Task(Protocol):
    """The work of one group in one micro-batch: it takes state and shuffle blocks, and returns
    shuffle blocks and the new state."""

    def run(
        self, key: int, frames: Iterable[Any], token: bytes | None, load: Callable[[], bytes]
    ) -> tuple[list[Any], bytes, bytes]:
        """Return the resulting shuffle blocks as pandas, and token and bytes of the new state.
        Calls `load` for the bytes of the state `token` unless this worker has it in memory."""


Backend = Callable[[DataFrame, _Task], DataFrame]


@dataclass
class _StreamEntry:
    """A source at the ingress."""

    rows: _SourceRows
    stage: Stage
    outlet: blocks.ToBlocks


class _IngressTask:
    """Processes all rows of one micro-batch: numbers them, advances the watermark, runs the steps
    of their sources, and sends a heartbeat to every bucket. The numbers continue those of the last
    micro-batch, so its state is the next number and the watermark's state."""

    def __init__(self, planned: Plan, entries: list[_StreamEntry], partitions: int) -> None:
        self.plan, self.entries, self.partitions = planned, entries, partitions

    def run(
        self, key: int, frames: Iterable[Any], token: bytes | None, load: Callable[[], bytes]
    ) -> tuple[list[Any], bytes, bytes]:
        mark, seq = self._watermark(), 0
        if token is not None:
            saved = load()
            seq = int.from_bytes(saved[:8], "little")
            mark.restore(saved[8:])
        start, steps = mark.value, []
        outputs: list[pa.RecordBatch] = []
        held = self._held(frames)
        for entry in self.entries:
            for split, batch in self._by_split(entry, held.get(entry.stage.id, [])):
                rows = self._numbered(entry, batch, seq)
                seq += rows.num_rows
                steps.append(self._advance(mark, entry, split, rows))
                outputs += self._sent(entry, rows)
        outputs.append(blocks.heartbeats(track_of(steps, start), range(self.partitions)))
        state = seq.to_bytes(8, "little") + mark.save()
        return [packed.to_pandas() for packed in outputs], uuid.uuid4().bytes, state

    def _watermark(self) -> Watermark:
        timed = [e for e in self.entries if e.stage.event_time is not None]
        splits = [(e.stage.id, n) for e in timed for n in range(e.rows.splits)]
        return Watermark(splits, self.plan.boundaries)

    @staticmethod
    def _held(frames: Iterable[Any]) -> dict[int, list[pa.RecordBatch]]:
        """Return the rows of each source that has any, sorted: Spark delivers shuffle blocks in no
        particular order."""
        by_source: dict[int, list[tuple[int, bytes]]] = {}
        for frame in frames:
            for source, low, data in zip(*(frame[n] for n in _BLOCK_COLUMNS), strict=True):
                by_source.setdefault(int(source), []).append((int(low), data))
        return {s: [from_ipc(data) for _, data in sorted(p)] for s, p in by_source.items()}

    @staticmethod
    def _by_split(
        entry: _StreamEntry, batches: list[pa.RecordBatch]
    ) -> Iterator[tuple[int, pa.RecordBatch]]:
        if not batches:
            return
        whole = concat(batches)
        if SPLIT not in whole.schema.names:
            yield 0, whole
            return
        numbers = whole.column(SPLIT).to_numpy(zero_copy_only=False).astype(np.int64)
        for split in np.unique(numbers).tolist():
            if not 0 <= split < entry.rows.splits:
                raise InputError(
                    f"source {entry.rows.name!r}: there are rows of split {split}, "
                    f"but the source has {entry.rows.splits} splits"
                )
            yield split, whole.filter(pa.array(numbers == split))

    @staticmethod
    def _numbered(entry: _StreamEntry, whole: pa.RecordBatch, seq: int) -> pa.RecordBatch:
        ordered = entry.rows.sorted(whole) if entry.rows.order else whole
        seqs = np.arange(seq, seq + whole.num_rows)
        return entry.rows.numbered(entry.rows.conformed(ordered), seqs)

    @staticmethod
    def _advance(mark: Watermark, entry: _StreamEntry, split: int, rows: pa.RecordBatch) -> Steps:
        on = entry.stage.event_time
        if on is None:
            return np.empty(0, np.int64), np.empty(0, np.int64)
        times = source_times(rows, on, entry.stage.name)
        return mark.advance((entry.stage.id, split), rows.column("__o0").to_numpy(), times)

    def _sent(self, entry: _StreamEntry, rows: pa.RecordBatch) -> Iterable[pa.RecordBatch]:
        if not entry.outlet.exchanges:
            return []  # this ingress numbers its rows, but another path sends them
        runner = StageRunner(self.plan, entry.stage, 1)
        return entry.outlet(runner.run_source(rows, _micro_batch()))


class _BucketTask:
    """Runs one bucket of a keyed stage for one micro-batch."""

    def __init__(
        self, planned: Plan, stage: Stage, partitions: int, exchanges: list[Exchange]
    ) -> None:
        self.plan, self.stage, self.partitions = planned, stage, partitions
        self.outlet = blocks.ToBlocks(exchanges, partitions)

    def run(
        self, key: int, frames: Iterable[Any], token: bytes | None, load: Callable[[], bytes]
    ) -> tuple[list[Any], bytes, bytes]:
        place = (_property("sql.streaming.queryId"), self.stage.id, key)
        runner = _live.take(place, token)
        if runner is None:
            runner = StageRunner(self.plan, self.stage, self.partitions)
            if token is not None:
                _install(runner.operator, load())
        inputs, beats = self._arrived(frames)
        track = Track.from_bytes(beats[0][1]) if beats else UNMOVED
        outputs = list(self.outlet(runner.run_keyed(inputs, track, _micro_batch())))
        if beats and self.outlet.exchanges[0].keys is not None:
            # All stages have the same number of buckets, so one heartbeat from each reaches all.
            outputs.append(blocks.heartbeats(track, [beats[0][0]]))
        new_token = uuid.uuid4().bytes
        data = _extract(runner.operator)
        _live.keep(place, new_token, runner)
        return [packed.to_pandas() for packed in outputs], new_token, data

    def _arrived(
        self, frames: Iterable[Any]
    ) -> tuple[list[list[pa.RecordBatch]], list[tuple[int, bytes]]]:
        """Return the rows per exchange, and the heartbeats: the bucket's number and the track."""
        inputs: dict[int, list[pa.RecordBatch]] = {e.id: [] for e in self.stage.inputs}
        beats: list[tuple[int, bytes]] = []
        for frame in frames:
            for exchange, low, data in zip(*(frame[n] for n in _BLOCK_COLUMNS), strict=True):
                if exchange == blocks.HEARTBEAT:
                    beats.append((int(low), bytes(data)))
                else:
                    inputs[exchange].append(from_ipc(data))
        if len(set(beats)) > 1:
            raise InputError(
                f"flow {self.plan.flow!r}: the sources returned different rows when Spark read "
                "them again",
                hint="give them order_by columns that are unique per row",
            )
        return list(inputs.values()), beats


class _Live:
    """Operators that this Python worker keeps in memory from one micro-batch to the next.

    The state in Spark's store is authoritative; a live operator is used only if it holds exactly
    that state. Every stored state has a new random token. A retried task, a replayed batch or a
    restart from a checkpoint therefore finds a different token here.
    """

    _MAX = 256

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, tuple[bytes, StageRunner]] = OrderedDict()

    def take(self, place: Any, token: bytes | None) -> StageRunner | None:
        """Remove and return the operator in the state `token`, if it is here. It is removed because
        it may fail half-way."""
        kept = self._kept.pop(place, None)
        return kept[1] if kept is not None and kept[0] == token else None

    def keep(self, place: Any, token: bytes, runner: StageRunner) -> None:
        self._kept[place] = (token, runner)
        while len(self._kept) > self._MAX:
            self._kept.popitem(last=False)


_live = _Live()


def _extract(operator: KeyedOperator | None) -> bytes:
    assert operator is not None
    tables = [blocks.to_bytes(batch) for batch in operator.extract().values()]
    return b"".join(struct.pack("<Q", len(t)) + t for t in tables)


def _install(operator: KeyedOperator | None, data: bytes) -> None:
    assert operator is not None
    state, at = {}, 0
    for name in operator.tables():
        (size,) = struct.unpack_from("<Q", data, at)
        state[name] = from_ipc(data[at + 8 : at + 8 + size])
        at += 8 + size
    operator.install(state)


# --- Spark's two state APIs -----------------------------------------------------------------------


def _in_pandas(df: DataFrame, task: _Task) -> DataFrame:
    """Run a task with `applyInPandasWithState`, which passes the state to every call."""

    def process(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        token, data = state.get if state.exists else (None, b"")
        outputs, token, data = task.run(int(key[0]), frames, token, lambda: data)
        state.update((token, data))
        yield from outputs

    grouped = df.groupBy("bucket")
    return grouped.applyInPandasWithState(process, blocks.DDL, _STATE_DDL, "append", "NoTimeout")


def _transforming(df: DataFrame, task: _Task) -> DataFrame:
    """Run a task with `transformWithStateInPandas`, which loads state on request: a live operator
    needs no load."""
    grouped = df.groupBy("bucket")
    return grouped.transformWithStateInPandas(_Processor(task), blocks.DDL, "append", "none")


class _Processor(StatefulProcessor):
    def __init__(self, task: _Task) -> None:
        self.task = task

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.token = handle.getValueState("token", "value binary")
        self.data = handle.getValueState("data", "value binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        stored = self.token.get()
        token = None if stored is None else bytes(stored[0])
        outputs, new_token, data = self.task.run(
            int(key[0]), rows, token, lambda: bytes(self.data.get()[0])
        )
        self.token.update((new_token,))
        self.data.update((data,))
        yield from outputs

    def close(self) -> None:
        pass


def _chaining(spark: SparkSession) -> Backend:
    """Return the state API that several stages of one query can use in this session."""
    if spark.conf.get(_CHECK, "true") == "false":
        return _in_pandas
    try:
        importlib.import_module("google.protobuf.descriptor")
    except ImportError as error:
        raise HostError(
            "several stateful stages in one streaming query need the package protobuf",
            hint=f"install it, or set {_CHECK}=false to chain applyInPandasWithState",
        ) from error
    if _PROVIDER not in spark.conf.getAll:
        spark.conf.set(_PROVIDER, _ROCKSDB)
    elif spark.conf.get(_PROVIDER) != _ROCKSDB:
        raise HostError(
            "several stateful stages in one streaming query need the RocksDB state store",
            hint=f"set {_PROVIDER}={_ROCKSDB}, or {_CHECK}=false",
        )
    return _transforming
