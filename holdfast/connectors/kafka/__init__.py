"""Kafka topics as sources and sinks, without Spark in between.

The Kafka client is imported only when a flow that uses it is started.
"""

from holdfast.connectors.kafka.sink import kafka_sink
from holdfast.connectors.kafka.source import kafka_source

__all__ = ["kafka_sink", "kafka_source"]
