"""A flow file with a line for each kind of source and sink, which have nothing to do with each
other: what a line gives does not depend on the other ones."""

import json
import os
from typing import Any

import pyarrow as pa

from holdfast import Flow
from holdfast import functions as F
from holdfast.protections import pairs
from holdfast.sinks import kafka as kafka_sink
from holdfast.sinks import outlet, parquet, postgres, table
from holdfast.sources import follow, generator
from holdfast.sources import kafka as kafka_source
from holdfast.spark.sources import spark_stream

ROWS = pa.schema([("k", pa.int64()), ("v", pa.float64())])
MADE, RATE = 100_000, 4_000


def numbers(split: int, first: int, n: int) -> pa.RecordBatch:
    at = range(first, first + n)
    return pa.record_batch([[i * 7919 % 500 for i in at], [i % 997 * 1.0 for i in at]], schema=ROWS)


def flow(spark: Any) -> Flow:
    told = json.loads(os.environ["HOLDFAST_TEST_ENDS"])
    files = spark.readStream.schema("id bigint, k bigint, v double").parquet(told["files"])
    lines = {
        "files": (
            spark_stream(files, order_by="id", checkpoint=told["checkpoint"]),
            parquet(told["parquet"], interval=0.3),
        ),
        "folder": (
            follow(told["folder"], ROWS),
            postgres(told["dsn"], told["table"], create=True, interval=0.2),
        ),
        "topic": (
            kafka_source(told["servers"], told["topic"], schema=ROWS, start="earliest"),
            kafka_sink(told["servers"], told["out"]),
        ),
        "made": (generator(numbers, ROWS, rows=MADE, rate=RATE), outlet()),
    }
    made = Flow("ends", protect=pairs())
    for name, (source, sink) in lines.items():
        totals = made.source(name, source).key_by("k").agg(t=F.sum("v"), n=F.count())
        totals.sink(f"{name} out", sink)
        if name == "made":
            totals.sink("latest", table("k"))
    return made
