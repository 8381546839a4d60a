"""Continuous dataflows on a Spark cluster that keep running."""

from holdfast.errors import (
    DivergenceError,
    FlowError,
    HoldfastError,
    HostError,
    HungError,
    InputError,
    OperatorError,
    OutOfMemoryError,
    SinkError,
    SinkRewoundError,
    SiteLostError,
)
from holdfast.flow.expr import (
    at_start,
    col,
    count,
    first,
    last,
    lit,
    max_,
    mean,
    min_,
    sum_,
)
from holdfast.flow.graph import Flow, KeyedStream, Stream
from holdfast.flow.kafka import kafka_sink, kafka_source
from holdfast.flow.operators.custom import KeyedFunction, Rows
from holdfast.flow.outlet import outlet
from holdfast.flow.parquet import parquet
from holdfast.flow.postgres import postgres
from holdfast.flow.protection import active, none, pairs, passive, rollback, upstream
from holdfast.flow.sinks import callback, console, discard
from holdfast.flow.sources import generator, rows
from holdfast.flow.taps import follow, lines
from holdfast.flow.view import view

__version__ = "0.1.0"

__all__ = [
    "DivergenceError",
    "Flow",
    "FlowError",
    "HoldfastError",
    "HostError",
    "HungError",
    "InputError",
    "KeyedFunction",
    "KeyedStream",
    "OperatorError",
    "OutOfMemoryError",
    "Rows",
    "SinkError",
    "SinkRewoundError",
    "SiteLostError",
    "Stream",
    "active",
    "at_start",
    "callback",
    "col",
    "console",
    "count",
    "discard",
    "first",
    "follow",
    "generator",
    "kafka_sink",
    "kafka_source",
    "last",
    "lines",
    "lit",
    "max_",
    "mean",
    "min_",
    "none",
    "outlet",
    "pairs",
    "parquet",
    "passive",
    "postgres",
    "rollback",
    "rows",
    "spark_batch",
    "spark_stream",
    "sum_",
    "upstream",
    "view",
]


def __getattr__(name: str) -> object:
    # The Spark ends need pyspark, which takes a while to import: only when they are asked for.
    if name in ("spark_batch", "spark_stream"):
        from holdfast.spark import sources

        return getattr(sources, name)
    raise AttributeError(f"module 'holdfast' has no attribute {name!r}")
