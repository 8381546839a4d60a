"""Where results go: what ``stream.sink`` takes."""

from holdfast.connectors.kafka import kafka_sink as kafka
from holdfast.connectors.outlet import outlet
from holdfast.connectors.parquet import parquet
from holdfast.connectors.postgres.sink import postgres
from holdfast.connectors.sinks import callback, console, discard
from holdfast.connectors.table import table

__all__ = ["callback", "console", "discard", "kafka", "outlet", "parquet", "postgres", "table"]
