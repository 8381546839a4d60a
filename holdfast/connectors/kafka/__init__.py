"""Kafka topics at both ends of a flow, without Spark in between.

Nothing here needs the client before a flow that uses it is started.
"""

from holdfast.connectors.kafka.sink import kafka_sink
from holdfast.connectors.kafka.source import kafka_source

__all__ = ["kafka_sink", "kafka_source"]
