"""Where rows come from: what ``flow.source`` takes."""

from typing import TYPE_CHECKING

from holdfast.connectors.kafka import kafka_source as kafka
from holdfast.connectors.pull import follow, lines
from holdfast.connectors.sources import generator, rows

if TYPE_CHECKING:
    from holdfast.spark.sources import spark_batch, spark_stream

__all__ = ["follow", "generator", "kafka", "lines", "rows", "spark_batch", "spark_stream"]


def __getattr__(name: str) -> object:
    # The Spark ends need pyspark, which takes a while to import: only when they are asked for.
    if name in ("spark_batch", "spark_stream"):
        from holdfast.spark import sources

        return getattr(sources, name)
    raise AttributeError(f"module 'holdfast.sources' has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
