"""What tests do with a broker besides what Holdfast does with it."""

import itertools
from collections.abc import Iterable

import msgspec
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient, NewPartitions, NewTopic

_numbers = itertools.count()


class Kafka:
    def __init__(self, servers: str) -> None:
        self.servers = servers
        self.admin = AdminClient({"bootstrap.servers": servers})

    def create(self, partitions: int = 1, **config: str) -> str:
        """A topic of its own for a test."""
        name = f"topic-{next(_numbers)}"
        settings = {k.replace("_", "."): v for k, v in config.items()}
        made = self.admin.create_topics([NewTopic(name, partitions, 1, config=settings)])
        made[name].result()
        return name

    def delete(self, topic: str) -> None:
        self.admin.delete_topics([topic])[topic].result()

    def grow(self, topic: str, partitions: int) -> None:
        self.admin.create_partitions([NewPartitions(topic, partitions)])[topic].result()

    def trim(self, topic: str, partition: int, offset: int) -> None:
        at = TopicPartition(topic, partition, offset)
        self.admin.delete_records([at])[at].result()

    def forget(self, group: str, topic: str) -> None:
        """Delete a group's offset, as the broker does when it is old."""
        of = ConsumerGroupTopicPartitions(group, [TopicPartition(topic, 0)])
        self.admin.delete_consumer_groups([group])[group].result()
        (found,) = self.admin.list_consumer_group_offsets([of]).values()
        assert found.result().topic_partitions[0].offset < 0

    def set_offset(self, group: str, topic: str, offset: int) -> None:
        """By hand."""
        consumer = Consumer({"bootstrap.servers": self.servers, "group.id": group})
        consumer.commit(offsets=[TopicPartition(topic, 0, offset)], asynchronous=False)
        consumer.close()

    def producer(self, **config: object) -> Producer:
        settings = {k.replace("_", "."): v for k, v in config.items()}
        return Producer({"bootstrap.servers": self.servers, **settings})

    def fill(self, topic: str, rows: Iterable[object], partition: int = 0) -> None:
        """As JSON, without a transaction; bytes as they are."""
        producer = self.producer()
        for row in rows:
            value = row if isinstance(row, bytes) else msgspec.json.encode(row)
            producer.produce(topic, value, partition=partition)
        producer.flush()

    def read(self, topic: str, partition: int = 0) -> list[bytes]:
        """All values that are committed."""
        consumer = Consumer(
            {
                "bootstrap.servers": self.servers,
                "group.id": "tests",
                "isolation.level": "read_committed",
                "enable.partition.eof": True,
            }
        )
        consumer.assign([TopicPartition(topic, partition, 0)])
        _, end = consumer.get_watermark_offsets(TopicPartition(topic, partition), timeout=10)
        values: list[bytes] = []
        while end:
            for message in consumer.consume(10_000, 0.1):
                if message.offset() >= end:
                    end = 0
                elif message.error() is None:
                    values.append(message.value())
        consumer.close()
        return values

    def rows(self, topic: str, partition: int = 0) -> list[dict]:
        return [msgspec.json.decode(v) for v in self.read(topic, partition)]


class Transactions:
    """Puts rows on a topic in small transactions of which every third is aborted: so offsets have
    gaps, and some records are not to be read."""

    def __init__(self, kafka: Kafka, topic: str, partition: int) -> None:
        self.producer = kafka.producer(transactional_id=f"{topic}-{partition}")
        self.producer.init_transactions(30)
        self._topic, self._partition, self._count = topic, partition, 0

    def put(self, rows: Iterable[object]) -> None:
        self._count += 1
        if self._count % 3 == 0:
            self._produce([{"k": -1, "v": 1e9}] * 5)
            self.producer.flush()
            self.producer.abort_transaction(30)
        self._produce(rows)
        self.producer.commit_transaction(30)

    def _produce(self, rows: Iterable[object]) -> None:
        self.producer.begin_transaction()
        for row in rows:
            self.producer.produce(self._topic, msgspec.json.encode(row), partition=self._partition)
