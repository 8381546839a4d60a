"""A flow file for tests of several applications: the same rows whenever and wherever it is run."""

import os

import numpy as np
import pyarrow as pa

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.protections import pairs
from holdfast.sinks import parquet
from holdfast.sources import generator

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.float64())])
RATE = 60_000


def make(split: int, start: int, count_: int) -> pa.RecordBatch:
    i = np.arange(start, start + count_)
    return pa.record_batch({"k": i * 7919 % 5000, "v": (i % 997).astype("f8")}, schema=SCHEMA)


def flow(spark: object = None, out: str | None = None, rows: int | None = None) -> Flow:
    """Without end at a set rate; or so many `rows`, as fast as they are taken."""
    made = Flow("apps", protect=pairs())
    rate = None if rows else RATE
    source = made.source("numbers", generator(make, SCHEMA, rows=rows, rate=rate))
    totals = source.key_by("k").agg(t=F.sum("v"), n=F.count())
    groups = totals.select(g=col("k") % 100, t=col("t"), n=col("n"))
    groups.key_by("g").agg(m=F.max("t"), c=F.count()).sink(
        "out", parquet(out or os.environ["HOLDFAST_TEST_OUT"], interval=0.2)
    )
    return made
