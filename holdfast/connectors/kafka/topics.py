"""Metadata of a topic: its partitions and offsets. Imports the Kafka client."""

from __future__ import annotations

import datetime
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient, ConfigResource

from holdfast.connectors.kafka.client import Options, settings
from holdfast.errors import FlowError, HostError

log = logging.getLogger("holdfast.kafka")

UNKNOWN = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_TOPIC)


def partitions_of(servers: str, topic: str, options: Options, timeout: float) -> int | None:
    """Return the number of partitions; 0 if the topic does not exist, None without an answer."""
    try:
        listed = AdminClient(settings(servers, options)).list_topics(topic, timeout=timeout)
    except KafkaException as error:
        log.info("topic %r: no metadata: %s", topic, error)
        return None
    metadata = listed.topics[topic]
    if metadata.error is not None:
        return 0 if metadata.error.code() in UNKNOWN else None
    return len(metadata.partitions)


class Topic:
    """An existing topic, with the offsets of its partitions."""

    def __init__(self, servers: str, name: str, options: Options, timeout: float) -> None:
        self.servers, self.name = servers, name
        self._options, self._timeout = options, timeout
        self._consumer = Consumer(
            settings(servers, options, group_id="holdfast", isolation_level="read_committed")
        )
        count = partitions_of(servers, name, options, timeout)
        if count is None:
            raise HostError(
                f"topic {name!r}: no broker at {servers} answered within {timeout:.0f} s",
                hint="is the address right, and the broker up?",
            )
        if count == 0:
            raise FlowError(f"topic {name!r} does not exist at {servers}", hint="create it first")
        self.partitions = [TopicPartition(name, n) for n in range(count)]

    def __enter__(self) -> Topic:
        return self

    def __exit__(self, *_: object) -> None:
        self._consumer.close()

    def begins(self, start: Any) -> list[int]:
        """Return the offset at which to begin in each partition."""
        if start == "earliest":
            return [low for low, _ in self._spans()]
        if start == "latest":
            return self.latest()
        if isinstance(start, Mapping):
            return self._given(start)
        return self._at(start)

    def latest(self) -> list[int]:
        """Return the end of the committed records of each partition."""
        return [high for _, high in self._spans()]

    def _spans(self) -> list[tuple[int, int]]:
        return [self._ask(self._consumer.get_watermark_offsets, p) for p in self.partitions]

    def _given(self, start: Mapping[int, int]) -> list[int]:
        offsets = []
        for partition, (low, high) in enumerate(self._spans()):
            offset = start.get(partition)
            if offset is None or not low <= offset <= high:
                raise FlowError(
                    f"topic {self.name!r}, partition {partition}: it has the offsets {low} to "
                    f"{high}, and start says {offset}",
                    hint="give a valid offset for every partition",
                )
            offsets.append(offset)
        if unknown := sorted(start.keys() - range(len(offsets))):
            raise FlowError(f"topic {self.name!r} has {len(offsets)} partitions, and no {unknown}")
        return offsets

    def _at(self, start: datetime.datetime) -> list[int]:
        ms = math.ceil(start.timestamp() * 1e3)
        wanted = [TopicPartition(self.name, p.partition, ms) for p in self.partitions]
        found = self._ask(self._consumer.offsets_for_times, wanted)
        ends = self.latest()
        return [
            min(p.offset, end) if p.offset >= 0 else end for p, end in zip(found, ends, strict=True)
        ]

    def refuse_compacted(self) -> None:
        """Raise if the topic is compacted: one replica may not find what another has read."""
        resource = ConfigResource(ConfigResource.Type.TOPIC, self.name)
        admin = AdminClient(settings(self.servers, self._options))
        try:
            found = admin.describe_configs([resource])[resource].result(self._timeout)
        except KafkaException as error:
            log.warning("topic %r: cannot tell whether it is compacted: %s", self.name, error)
            return
        if "compact" in found["cleanup.policy"].value:
            raise FlowError(
                f"topic {self.name!r} is compacted: records that one replica of the flow has read "
                "may be gone when another reads them",
                hint="protect the flow with none(), or read the topic through spark_stream(...)",
            )

    def _ask(self, call: Callable[..., Any], about: Any) -> Any:
        try:
            return call(about, timeout=self._timeout)
        except KafkaException as error:
            raise HostError(
                f"topic {self.name!r} at {self.servers}: {error.args[0].str()}",
                hint="is the broker up, and does this user have permission to read the topic?",
            ) from error
