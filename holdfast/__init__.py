"""Continuous dataflows on a Spark cluster that keep running."""

from holdfast.api.graph import Flow, KeyedStream, Stream
from holdfast.api.protection import active, none, pairs, passive, rollback, upstream
from holdfast.connectors.kafka import kafka_sink, kafka_source
from holdfast.connectors.outlet import outlet
from holdfast.connectors.parquet import parquet
from holdfast.connectors.postgres.sink import postgres
from holdfast.connectors.pull import follow, lines
from holdfast.connectors.sinks import callback, console, discard
from holdfast.connectors.sources import generator, rows
from holdfast.connectors.table import view
from holdfast.engine.expressions import (
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
from holdfast.engine.operators.custom import KeyedFunction, Rows
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
