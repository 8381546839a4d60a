"""Kafka topics at both ends of a flow, without Spark in between.

Nothing here needs the client before a flow that uses it is started.
"""

from holdfast.flow.kafka.sink import kafka_sink
from holdfast.flow.kafka.source import kafka_source

__all__ = ["kafka_sink", "kafka_source"]
