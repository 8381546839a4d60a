"""The same operators under Structured Streaming: the fall-back, and an honest rival.

A keyed stage is one stateful operator of Spark over parcels, grouped by hash bucket; its state is
one binary value per bucket, the operator's tables as Arrow bytes. Micro-batches come one after the
other, so inside a task an order within the micro-batch is all that is needed.

What PySpark 4.3 offers for this: a single `applyInPandasWithState` is the cheapest. Two of them in
one query are refused by Spark's analyser, unless its check is switched off
(``spark.sql.streaming.unsupportedOperationCheck=false``; it guards watermarks and timeouts, and
there are none here). `transformWithStateInPandas` may be chained as it is, but needs the RocksDB
state store and the package protobuf, and is slower. So chains use the second kind, or the first
if the session has the check switched off.
"""

from __future__ import annotations

import importlib
import struct
import uuid
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import reduce
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyspark import TaskContext
from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from holdfast.errors import FlowError, HostError, InputError, require
from holdfast.flow.batches import Track, concat, with_order
from holdfast.flow.execute import StageRunner
from holdfast.flow.graph import Flow
from holdfast.flow.operators.base import KeyedOperator
from holdfast.flow.plan import Exchange, Plan, Stage
from holdfast.flow.state import Field
from holdfast.flow.steps import conform
from holdfast.spark import parcels
from holdfast.spark.session import use_this_python

BLOCK = "__block"
_STATE_DDL = "token binary, data binary"
_PROVIDER = "spark.sql.streaming.stateStore.providerClass"
_ROCKSDB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"
_CHECK = "spark.sql.streaming.unsupportedOperationCheck"


def stream(
    flow: Flow,
    spark: SparkSession,
    inputs: Mapping[str, DataFrame],
    *,
    checkpoint: str | None = None,
    partitions: int = 8,
    sink: str | None = None,
) -> Any:
    """The rows of the flow's sink as a streaming DataFrame; of several sinks, a dict of them.

    Rows are taken micro-batch by micro-batch; inside one by the ``order_by`` columns of their
    source, or else as Spark has them: source by source, partition by partition. `checkpoint` is
    where queries of this session keep their checkpoints unless they name a place of their own.
    Set ``spark.sql.shuffle.partitions`` to `partitions` or less: more tasks would have no bucket.
    """
    use_this_python(spark)
    planned = parcels.checked_plan(flow, inputs, partitions, streaming=True)
    _refuse_event_time(planned)
    if checkpoint is not None:
        spark.conf.set("spark.sql.streaming.checkpointLocation", checkpoint)
    sinks = parcels.wanted_sinks(planned, sink)
    chained = max(_Job.stateful(planned, s) for s in sinks) > 1
    backend = _chaining(spark) if chained else _in_pandas
    job = _Job(planned, inputs, partitions, _bucket_key(spark, partitions), backend)
    results = {s.name: job.result(s) for s in sinks}
    return results if len(results) > 1 else next(iter(results.values()))


def _refuse_event_time(planned: Plan) -> None:
    for stage in planned.stages:
        if stage.operator is not None and stage.operator.boundaries:
            raise FlowError(
                f"flow {planned.flow!r}: {stage.name!r} cannot run under Structured Streaming: its "
                "results depend on the watermark over all rows, but Spark calls an operator only "
                "for buckets with rows in the micro-batch, and never says that the input ended",
                hint="use flow.start(...), or flow.batch(...) over a batch DataFrame",
            )


# --- stages as DataFrames -------------------------------------------------------------------------


class _Job:
    def __init__(
        self,
        planned: Plan,
        inputs: Mapping[str, DataFrame],
        partitions: int,
        bucket_key: Column,
        backend: Callable[[DataFrame, _BucketTask], DataFrame],
    ) -> None:
        self.plan, self.inputs, self.partitions = planned, inputs, partitions
        self.bucket_key, self.backend = bucket_key, backend

    @classmethod
    def stateful(cls, planned: Plan, stage: Stage) -> int:
        """How many stateful operators the query up to `stage` has; Spark shares none of them."""
        producers = {e.producer for e in stage.inputs}
        own = 1 if stage.kind == "keyed" else 0
        return own + sum(cls.stateful(planned, planned.stages[p]) for p in producers)

    def result(self, sink: Stage) -> DataFrame:
        schema = parcels.sink_schema(sink, with_order=False)
        made = []
        for producer, exchanges in self._by_producer(sink):
            if producer.kind == "source":
                made.append(self._source(producer, parcels.ToRows(exchanges, schema)))
            else:
                opening = parcels.Opening(exchanges, schema)
                sent = self._keyed(producer, exchanges)
                made.append(sent.mapInArrow(opening, parcels.spark_schema(schema)))
        return reduce(DataFrame.unionAll, made)

    def _by_producer(self, stage: Stage) -> list[tuple[Stage, list[Exchange]]]:
        producers = dict.fromkeys(e.producer for e in stage.inputs)
        return [
            (self.plan.stages[p], [e for e in stage.inputs if e.producer == p]) for p in producers
        ]

    def _source(self, stage: Stage, outlet: parcels.Outlet) -> DataFrame:
        assert stage.source is not None
        order = parcels.order_columns(stage)
        df = self.inputs[stage.name].select(*dict.fromkeys([*stage.used["out"], *order]))
        by_value = len(order) == 1 and len(self.plan.sources) == 1 and _countable(stage, order[0])
        if order and not by_value:
            df = df.coalesce(1)  # the only way to sort a micro-batch: Spark refuses to
        df = df.withColumn(BLOCK, F.spark_partition_id())
        planned, lean = parcels.shipped(self.plan, stage)
        task = _SourceTask(planned, lean, stage.source.schema, order, by_value, outlet)
        return df.mapInArrow(task, outlet.ddl)

    def _keyed(self, stage: Stage, exchanges: list[Exchange]) -> DataFrame:
        sent = []
        for producer, inward in self._by_producer(stage):
            if producer.kind == "source":
                sent.append(self._source(producer, parcels.ToParcels(inward, self.partitions)))
            else:
                sent.append(self._keyed(producer, inward))
        # Made anew in the JVM, which also turns Arrow's rows into Spark's: right after a Python
        # task, an exchange in a streaming query fails with a ClassCastException.
        keyed = reduce(DataFrame.unionAll, sent).withColumn("bucket", self.bucket_key)
        planned, lean = parcels.shipped(self.plan, stage)
        return self.backend(keyed, _BucketTask(planned, lean, self.partitions, exchanges))


def _countable(stage: Stage, name: str) -> bool:
    assert stage.source is not None
    kind = stage.source.schema.field(name).type
    return pa.types.is_signed_integer(kind) or pa.types.is_timestamp(kind)


def _bucket_key(spark: SparkSession, partitions: int) -> Column:
    """The key that stands for a bucket, so chosen that Spark's hash spreads them evenly."""
    tasks = int(spark.conf.get("spark.sql.shuffle.partitions", "200"))
    landing = F.pmod(F.hash(F.col("id").cast("int")), F.lit(tasks))
    found: dict[int, list[int]] = {}
    for key, task in spark.range(20 * tasks + 20 * partitions).select("id", landing).collect():
        found.setdefault(task, []).append(key)
    keys = [found[i % tasks][i // tasks] for i in range(partitions)]
    return F.element_at(F.array(*[F.lit(k).cast("int") for k in keys]), F.col("bucket") + 1)


# --- tasks ----------------------------------------------------------------------------------------


class _SourceTask:
    """Give a micro-batch's rows numbers that say their order; send them through the steps."""

    def __init__(
        self,
        planned: Plan,
        stage: Stage,
        declared: pa.Schema,
        order: list[str],
        by_value: bool,
        outlet: parcels.Outlet,
    ) -> None:
        self.plan, self.stage, self.order, self.by_value = planned, stage, order, by_value
        self.outlet = outlet
        names = dict.fromkeys([*stage.used["out"], *order])
        self.declared = pa.schema([declared.field(n) for n in names])
        self.schema = pa.schema([declared.field(n) for n in stage.used["out"]])

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        runner, seen, epoch = StageRunner(self.plan, self.stage, 1), 0, _micro_batch()
        for batch in self._sorted(batches):
            rows = conform(batch.select(self.declared.names), self.declared, self.stage.name)
            seqs = self._values(rows) if self.by_value else self._positions(batch, seen)
            seen += batch.num_rows
            arrays = [*rows.select(self.schema.names).columns, pa.array(seqs)]
            numbered = pa.RecordBatch.from_arrays(arrays, schema=with_order(self.schema, 1))
            yield from self.outlet(runner.run_source(numbered, epoch))

    def _sorted(self, batches: Iterator[pa.RecordBatch]) -> Iterable[pa.RecordBatch]:
        if not self.order or self.by_value:
            return parcels.blocks(batches)
        held = [b for b in batches if b.num_rows]
        if not held:
            return []
        whole = concat(held)
        keys = [(n, "ascending") for n in self.order]
        return [whole.take(pc.sort_indices(whole, keys, null_placement="at_start"))]

    def _values(self, rows: pa.RecordBatch) -> np.ndarray:
        column = rows.column(self.order[0])
        if column.null_count:
            raise InputError(
                f"source {self.stage.name!r}: the column {self.order[0]!r} that orders rows is null"
            )
        return Field(column.type).stored(column).astype(np.int64)

    def _positions(self, batch: pa.RecordBatch, seen: int) -> np.ndarray:
        """Source, Spark partition and place in it; the micro-batch goes without saying."""
        part = batch.column(BLOCK).to_numpy().astype(np.int64)
        require(self.stage.id < 128 and part.max() < 1 << 16, "too many sources or partitions")
        return (self.stage.id << 56) + (part << 40) + np.arange(seen, seen + batch.num_rows)


def _micro_batch() -> int:
    return int(_property("streaming.sql.batchId") or 0)


def _property(name: str) -> str | None:
    context = TaskContext.get()
    return None if context is None else context.getLocalProperty(name)


class _BucketTask:
    """One bucket of a keyed stage, one micro-batch: state in, rows in, rows out, state out."""

    def __init__(
        self, planned: Plan, stage: Stage, partitions: int, exchanges: list[Exchange]
    ) -> None:
        self.plan, self.stage, self.partitions = planned, stage, partitions
        self.outlet = parcels.ToParcels(exchanges, partitions)

    def run(
        self, bucket: int, frames: Iterable[Any], token: bytes | None, load: Callable[[], bytes]
    ) -> tuple[list[Any], bytes, bytes]:
        """The parcels it gives, as pandas, and the new state under a name of its own. `load` is
        called for the bytes of the state `token` if this worker does not have it alive."""
        place = (_property("sql.streaming.queryId"), self.stage.id, bucket)
        runner = _live.take(place, token)
        if runner is None:
            runner = StageRunner(self.plan, self.stage, self.partitions)
            if token is not None:
                _install(runner.operator, load())
        inputs = self._inputs(frames)
        outputs = runner.run_keyed(inputs, Track.flat(Track.NEVER), _micro_batch())
        made = [packed.to_pandas() for packed in self.outlet(outputs)]
        fresh = uuid.uuid4().bytes
        data = _extract(runner.operator)
        _live.keep(place, fresh, runner)
        return made, fresh, data

    def _inputs(self, frames: Iterable[Any]) -> list[list[pa.RecordBatch]]:
        inputs: dict[int, list[pa.RecordBatch]] = {e.id: [] for e in self.stage.inputs}
        for frame in frames:
            for exchange, data in zip(frame["exchange"], frame["data"], strict=True):
                inputs[exchange].append(parcels.from_bytes(data))
        return list(inputs.values())


class _Live:
    """Operators that stay alive in this Python worker from one micro-batch to the next.

    What Spark has stored is the truth; a live operator is used only if it is that very state,
    which a fresh random name for every state that was ever stored makes sure of: a task that is
    run again, a batch that is replayed or a restart from a checkpoint finds another name here.
    """

    _MAX = 256

    def __init__(self) -> None:
        self._kept: OrderedDict[Any, tuple[bytes, StageRunner]] = OrderedDict()

    def take(self, place: Any, token: bytes | None) -> StageRunner | None:
        """The operator in the state `token`. It is no longer kept: it may fail half-way."""
        found = self._kept.pop(place, None)
        return found[1] if found is not None and found[0] == token else None

    def keep(self, place: Any, token: bytes, runner: StageRunner) -> None:
        self._kept[place] = (token, runner)
        while len(self._kept) > self._MAX:
            self._kept.popitem(last=False)


_live = _Live()


def _extract(operator: KeyedOperator | None) -> bytes:
    assert operator is not None
    tables = [parcels.to_bytes(batch) for batch in operator.extract().values()]
    return b"".join(struct.pack("<Q", len(t)) + t for t in tables)


def _install(operator: KeyedOperator | None, data: bytes) -> None:
    assert operator is not None
    state, at = {}, 0
    for name in operator.tables():
        (size,) = struct.unpack_from("<Q", data, at)
        state[name] = parcels.from_bytes(data[at + 8 : at + 8 + size])
        at += 8 + size
    operator.install(state)


# --- Spark's two kinds of state -------------------------------------------------------------------


def _in_pandas(df: DataFrame, task: _BucketTask) -> DataFrame:
    """`applyInPandasWithState`: the state travels with every call."""

    def process(key: Any, frames: Iterator[Any], state: Any) -> Iterator[Any]:
        token, data = state.get if state.exists else (None, b"")
        made, token, data = task.run(int(key[0]), frames, token, lambda: data)
        state.update((token, data))
        yield from made

    grouped = df.groupBy("bucket")
    return grouped.applyInPandasWithState(process, parcels.DDL, _STATE_DDL, "append", "NoTimeout")


def _transforming(df: DataFrame, task: _BucketTask) -> DataFrame:
    """`transformWithStateInPandas`: the state is asked for, so a live operator saves its way."""
    grouped = df.groupBy("bucket")
    return grouped.transformWithStateInPandas(_Processor(task), parcels.DDL, "append", "none")


class _Processor(StatefulProcessor):
    def __init__(self, task: _BucketTask) -> None:
        self.task = task

    def init(self, handle: StatefulProcessorHandle) -> None:
        self.token = handle.getValueState("token", "value binary")
        self.data = handle.getValueState("data", "value binary")

    def handleInputRows(self, key: Any, rows: Iterator[Any], timerValues: Any) -> Iterator[Any]:
        stored = self.token.get()
        token = None if stored is None else bytes(stored[0])
        made, fresh, data = self.task.run(
            int(key[0]), rows, token, lambda: bytes(self.data.get()[0])
        )
        self.token.update((fresh,))
        self.data.update((data,))
        yield from made

    def close(self) -> None:
        pass


def _chaining(spark: SparkSession) -> Callable[[DataFrame, _BucketTask], DataFrame]:
    """The kind of state that more than one stage of a query can have in this session."""
    if spark.conf.get(_CHECK, "true") == "false":
        return _in_pandas
    try:
        importlib.import_module("google.protobuf.descriptor")
    except ImportError as error:
        raise HostError(
            "several keyed stages in one streaming query need the package protobuf",
            hint=f"install it, or set {_CHECK}=false to chain applyInPandasWithState",
        ) from error
    if _PROVIDER not in spark.conf.getAll:
        spark.conf.set(_PROVIDER, _ROCKSDB)
    elif spark.conf.get(_PROVIDER) != _ROCKSDB:
        raise HostError(
            "several keyed stages in one streaming query need the RocksDB state store",
            hint=f"set {_PROVIDER}={_ROCKSDB}, or {_CHECK}=false",
        )
    return _transforming
