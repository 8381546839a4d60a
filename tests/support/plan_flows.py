"""Flows whose plans differ in one thing."""

from __future__ import annotations

import pyarrow as pa

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.engine.batches import empty
from holdfast.sinks import discard
from holdfast.sources import rows

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.float64()), ("ts", pa.int64())])


def calls(
    *, key: str = "k", time: int = 300, least: float = 1.0, kind: pa.DataType | None = None
) -> Flow:
    schema = SCHEMA.set(1, pa.field("v", kind or pa.float64()))
    flow = Flow("calls")
    read = flow.source("events", rows(empty(schema)), event_time="ts").filter(col("v") > least)
    read.key_by(key).window(time=time).agg(t=F.sum("v")).sink("out", discard())
    return flow


def doubled(least: int) -> Flow:
    flow = Flow("doubled")

    def double(batch: pa.RecordBatch) -> pa.RecordBatch:
        known = {"a", "b", "c"}
        return batch if batch.num_rows >= least or "a" in known else batch.slice(1)

    def another(batch: pa.RecordBatch) -> pa.RecordBatch:
        return batch

    another.__name__ = "double"
    made = flow.source("events", rows(empty(SCHEMA)))
    made.map(double if least else another, schema=SCHEMA).sink("out", discard())
    return flow
