"""Shuffle blocks: the unit of data between the stages of a Spark job.

A *shuffle block* is one Spark row that holds many rows of the flow: all rows that one task sends
over one exchange to one hash bucket, as Arrow bytes. Spark's shuffle and its state API thus handle
a few large binary values instead of every row, the engine's own types (unsigned integers,
nanoseconds, dictionaries) survive the shuffle, and inputs with different columns can share one.
``low`` is the lowest sequence number in the block. Shuffle blocks sorted by ``low`` can be merged
without holding a whole bucket.

A *heartbeat* is a shuffle block without rows: it tells a bucket how the watermark advances. Under
Structured Streaming it also makes Spark call a bucket that has received no rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import AtomicType, StructType

from holdfast.api.graph import Flow
from holdfast.engine.batches import Track, concat, from_ipc, take, to_ipc, user_names
from holdfast.engine.keys import key_words, partition_of
from holdfast.errors import FlowError
from holdfast.plan.planner import Exchange, Plan, Stage, plan

DDL = "exchange int, bucket int, low long, data binary"
SCHEMA = pa.schema(
    [("exchange", pa.int32()), ("bucket", pa.int32()), ("low", pa.int64()), ("data", pa.binary())]
)
ShuffleBlock = tuple[int, int, int, bytes]
SPLIT = "__split"
"""The input column that holds the source's split of a row."""
HEARTBEAT = -1
"""The value of ``exchange`` in a heartbeat."""
BLOCK_ROWS = 65_536
"""Target number of rows per call of a stage: a call is expensive, a row in it is cheap."""


# --- shuffle blocks -------------------------------------------------------------------------------


def pack(
    outputs: Mapping[int, pa.RecordBatch], exchanges: Sequence[Exchange], partitions: int
) -> pa.RecordBatch:
    """Pack a stage's output rows into shuffle blocks for the given `exchanges`."""
    packed: list[ShuffleBlock] = []
    for exchange in exchanges:
        batch = outputs[exchange.id]
        for bucket, rows in _by_bucket(batch, exchange.keys, partitions):
            low = int(rows.column("__o0").to_numpy().min())
            packed.append((exchange.id, bucket, low, to_bytes(rows)))
    return table(packed)


def heartbeats(track: Track, buckets: Iterable[int]) -> pa.RecordBatch:
    """Return a heartbeat with the track for each of `buckets`. ``low`` holds the bucket's number,
    because Spark may group by another key that represents the bucket."""
    data = track.to_bytes()
    return table([(HEARTBEAT, bucket, bucket, data) for bucket in buckets])


def table(packed: Sequence[ShuffleBlock]) -> pa.RecordBatch:
    columns = list(zip(*packed, strict=True)) or [()] * 4
    arrays = [pa.array(c, f.type) for c, f in zip(columns, SCHEMA, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


def _by_bucket(
    batch: pa.RecordBatch, keys: list[str] | None, partitions: int
) -> Iterator[tuple[int, pa.RecordBatch]]:
    if batch.num_rows == 0:
        return
    if keys is None:
        yield 0, batch
        return
    bucket = partition_of(key_words([batch.column(k) for k in keys]), partitions)
    order = np.argsort(bucket, kind="stable")
    batch, bucket = take(batch, order), bucket[order]
    starts = np.flatnonzero(np.append(True, bucket[1:] != bucket[:-1]))
    for start, end in zip(starts, np.append(starts[1:], bucket.size), strict=True):
        yield int(bucket[start]), batch.slice(start, end - start)


def unpack(blocks: pa.RecordBatch, only: set[int]) -> Iterator[tuple[int, int, pa.RecordBatch]]:
    """Yield exchange, lowest sequence number and rows of each shuffle block of the exchanges
    `only`."""
    exchanges, lows = (blocks.column(n).to_numpy() for n in ("exchange", "low"))
    data = blocks.column("data")
    for i in np.flatnonzero(np.isin(exchanges, list(only))):
        yield int(exchanges[i]), int(lows[i]), from_ipc(data[int(i)].as_buffer())


def to_bytes(batch: pa.RecordBatch) -> bytes:
    return to_ipc(batch).to_pybytes()


def blocks(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Yield the same rows in batches of at least `BLOCK_ROWS`; the last one may be smaller."""
    held: list[pa.RecordBatch] = []
    rows = 0
    for batch in batches:
        if batch.num_rows:
            held.append(batch)
            rows += batch.num_rows
        if rows >= BLOCK_ROWS:
            yield concat(held)
            held, rows = [], 0
    if held:
        yield concat(held)


# --- Spark's types ------------------------------------------------------------------------------


def spark_schema(schema: pa.Schema) -> StructType:
    """Return the Spark schema of a stream's columns."""
    return from_arrow_schema(arrow_for_spark(schema))


def arrow_for_spark(schema: pa.Schema) -> pa.Schema:
    """Return `schema` with every type that Spark lacks replaced by one that holds its values."""
    return pa.schema([pa.field(f.name, _spark_kind(f.type), f.nullable) for f in schema])


_WIDER = {
    pa.uint8(): pa.int16(),
    pa.uint16(): pa.int32(),
    pa.uint32(): pa.int64(),
    pa.uint64(): pa.decimal128(20, 0),
    pa.float16(): pa.float32(),
    pa.string_view(): pa.string(),
    pa.binary_view(): pa.binary(),
}


def _spark_kind(kind: pa.DataType) -> pa.DataType:
    if pa.types.is_dictionary(kind):
        return _spark_kind(kind.value_type)
    if pa.types.is_timestamp(kind):
        return pa.timestamp("us", "UTC" if kind.tz else None)
    if pa.types.is_duration(kind):
        return pa.duration("us")
    if pa.types.is_date64(kind):
        return pa.date32()
    if pa.types.is_fixed_size_binary(kind):
        return pa.binary()
    return _WIDER.get(kind, kind)


def to_spark(batch: pa.RecordBatch, schema: pa.Schema) -> pa.RecordBatch:
    """Cast rows to the types of `arrow_for_spark`. Times are truncated to Spark's microseconds."""
    arrays = []
    for field in schema:
        column = batch.column(field.name)
        if column.type != field.type:
            temporal = pa.types.is_temporal(field.type)
            column = column.cast(field.type, safe=not temporal)
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


class Opening:
    """A task that unpacks a sink's shuffle blocks into rows."""

    def __init__(self, exchanges: Sequence[Exchange], schema: pa.Schema) -> None:
        self.only, self.schema = {e.id for e in exchanges}, schema

    def __call__(self, blocks: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in blocks:
            for _, _, rows in unpack(batch, self.only):
                yield to_spark(rows, self.schema)


# --- the output of a task -------------------------------------------------------------------------


class ToBlocks:
    """Gives a task's results as shuffle blocks for the next stages."""

    ddl: str | StructType = DDL

    def __init__(self, exchanges: list[Exchange], partitions: int) -> None:
        self.exchanges, self.partitions = exchanges, partitions

    def __call__(self, outputs: dict[int, pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        packed = pack(outputs, self.exchanges, self.partitions)
        for start in range(0, packed.num_rows, 64):  # a few megabytes at a time
            yield packed.slice(start, 64)


class ToRows:
    """Gives a task's results as the rows of a sink."""

    def __init__(self, exchanges: list[Exchange], schema: pa.Schema) -> None:
        self.exchanges, self.schema = exchanges, schema
        self.ddl: str | StructType = spark_schema(schema)

    def __call__(self, outputs: dict[int, pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for exchange in self.exchanges:
            rows = outputs[exchange.id]
            if rows.num_rows:
                yield to_spark(rows, self.schema)


Outlet = ToBlocks | ToRows


# --- the plan, as the Spark jobs use it -----------------------------------------------------------


def shipped(plan: Plan, stage: Stage) -> tuple[Plan, Stage]:
    """Return the parts that a task needs, without the rows, DataFrames and files of the flow's
    sources and sinks."""
    return replace(plan, stages=[], exchanges=[]), replace(stage, source=None, sink=None)


def title(plan: Plan, stage: Stage) -> str:
    """Return the name of a stage in Spark's query plans."""
    return f"{plan.flow}: {stage.name}"


def checked_plan(
    flow: Flow, inputs: Mapping[str, DataFrame], partitions: int, streaming: bool
) -> Plan:
    """Return the flow's plan; raise unless `inputs` has the DataFrames and columns it needs."""
    planned = plan(flow)
    if not 1 <= partitions <= 65_535:
        raise FlowError(f"partitions must be between 1 and 65,535, not {partitions}")
    names = [s.name for s in planned.sources]
    for name in inputs:
        if name not in names:
            raise FlowError(
                f"flow {flow.name!r} has no source {name!r}", hint=f"its sources are {names}"
            )
    for stage in planned.sources:
        where = f"flow {flow.name!r}, source {stage.name!r}"
        df = inputs.get(stage.name)
        if df is None:
            raise FlowError(f"{where}: there is no DataFrame for it", hint="add one to inputs")
        if df.isStreaming != streaming:
            wanted = "a streaming DataFrame" if streaming else "not a streaming DataFrame"
            raise FlowError(f"{where}: the input must be {wanted}")
        for name in [*stage.used["out"], *order_columns(stage, df)]:
            if name not in df.columns:
                raise FlowError(
                    f"{where}: the DataFrame has no column {name!r}",
                    hint=f"its columns are {df.columns}",
                )
    return planned


def order_columns(stage: Stage, df: DataFrame) -> list[str]:
    """Return the columns that order a source's rows; none if the DataFrame's own order counts.

    A DataFrame of several splits without a split column may hold the rows of one split behind those
    of another. Such rows are ordered by event time, which restores the order in which they were
    written.
    """
    assert stage.source is not None
    order_by = list(getattr(stage.source, "order_by", None) or ())
    if order_by or stage.event_time is None or stage.source.splits == 1 or SPLIT in df.columns:
        return order_by
    kinds = {f.name: f.dataType for f in df.schema}
    flat = [n for n in stage.used["out"] if n in kinds and isinstance(kinds[n], AtomicType)]
    return [*dict.fromkeys([stage.event_time, *flat])]


def sink_schema(stage: Stage, with_order: bool) -> pa.Schema:
    """Return the columns of a sink in Spark's types."""
    schema = stage.inputs[0].schema
    names = schema.names if with_order else user_names(schema)
    return arrow_for_spark(pa.schema([schema.field(n) for n in names]))


def by_producer(planned: Plan, stage: Stage) -> list[tuple[Stage, list[Exchange]]]:
    """Return the stages that send to `stage`, each with its exchanges into it."""
    producers = dict.fromkeys(e.producer for e in stage.inputs)
    return [(planned.stages[p], [e for e in stage.inputs if e.producer == p]) for p in producers]
