"""A Kafka topic as a source: every partition is a split, which the ingress reads directly.

The flow keeps the offsets itself and does not use a consumer group. Every replica of the ingress
reads the committed records from the broker independently, so all of them must find the same
records. They begin at offsets that are resolved once, before the flow starts. A position is an
offset in the partition and the row number of the first row at that offset.
"""

from __future__ import annotations

import copy
import datetime
import json
import logging
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.connectors.kafka.client import Options, check, settings
from holdfast.connectors.kafka.formats import Format, reading
from holdfast.connectors.sources import Position, Source, SplitReader
from holdfast.engine.batches import DECODE_ERROR, concat, empty
from holdfast.errors import FlowError, InputError

log = logging.getLogger("holdfast.kafka")

Start = str | int | datetime.datetime | Mapping[int, int]

ANSWER_S_MAX = 10.0
"""Maximum time for the broker to answer when a flow is started."""
CHECK_S = 2.0
"""Interval at which one reader checks that the topic still exists with as many partitions."""
MISSED_CHECKS_MAX = 3
"""Consecutive checks that must miss the topic before it counts as deleted: a broker that has just
started does not know its topics yet."""
MESSAGES_MAX = 16_384
"""Maximum messages taken in one call; the site does nothing else during the call."""
SHOWN_BYTES_MAX = 1_000
"""Maximum bytes of an undecodable record that are shown."""
_OURS = {
    "bootstrap.servers",
    "group.id",
    "isolation.level",
    "enable.auto.commit",
    "enable.auto.offset.store",
    "auto.offset.reset",
    "enable.partition.eof",
}


@dataclass(frozen=True)
class MetadataColumns:
    """Names of the columns for a record's key and metadata; None for columns to leave out."""

    key: str | None = None
    timestamp: str | None = None
    partition: str | None = None
    offset: str | None = None

    TYPES = {  # noqa: RUF012
        "key": pa.binary(),
        "timestamp": pa.timestamp("ms", "UTC"),
        "partition": pa.int64(),
        "offset": pa.int64(),
    }

    @property
    def wanted(self) -> dict[str, str]:
        return {what: name for what in self.TYPES if (name := getattr(self, what)) is not None}

    @property
    def fields(self) -> list[pa.Field]:
        return [pa.field(name, self.TYPES[what]) for what, name in self.wanted.items()]

    def of(self, messages: list[Any]) -> list[pa.Array]:
        arrays = []
        for what in self.wanted:
            if what == "timestamp":
                plain = pa.array([m.timestamp()[1] for m in messages], pa.int64())
                arrays.append(plain.cast(self.TYPES[what]))
            else:
                get = {"key": "key", "partition": "partition", "offset": "offset"}[what]
                values = [getattr(m, get)() for m in messages]
                arrays.append(pa.array(values, self.TYPES[what]))
        return arrays


class KafkaSource(Source):
    """See `holdfast.sources.kafka`."""

    def __init__(
        self,
        servers: str,
        topic: str,
        format: Format,
        extras: MetadataColumns,
        start: Start,
        bounded: bool,
        options: Options,
    ) -> None:
        self.servers, self.topic, self.format, self.extras = servers, topic, format, extras
        self.start, self.bounded, self.options = start, bounded, options
        self.schema = pa.schema([*format.schema, *extras.fields])
        self.has_decode_errors = format.has_decode_errors
        self.begins: list[int] | None = None
        self.ends: list[int] | None = None

    def __getstate__(self) -> dict[str, Any]:
        # Arrow's parser options cannot be pickled.
        return self.__dict__ | {"format": (self.format.name, self.format.schema)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name, schema = state["format"]
        where = f"topic {state['topic']!r}"
        format = reading(name, None if name == "bytes" else schema, where)
        self.__dict__.update(state | {"format": format})

    def resolve(self, replicas: int, known: Sequence[str] = ()) -> dict[str, Any]:
        from holdfast.connectors.kafka.topics import Topic

        with Topic(self.servers, self.topic, self.options, ANSWER_S_MAX) as topic:
            if replicas > 1:
                topic.refuse_compacted()
            begins = topic.begins(self.start)
            return {"begins": begins, "ends": topic.latest() if self.bounded else None}

    def resolved(self, values: Any) -> KafkaSource:
        made = copy.copy(self)
        made.begins, made.ends = list(values["begins"]), values["ends"]
        made.splits = len(made.begins)
        return made

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        if self.begins is None:
            raise FlowError(
                f"topic {self.topic!r}: its first offsets are not resolved",
                hint="start the flow with flow.start()",
            )
        begin = position or {"row": 0, "offset": self.begins[split]}
        return KafkaReader(self, split, offset, begin)


class KafkaReader(SplitReader):
    """Reads one partition with its own consumer, which the first read creates."""

    def __init__(self, source: KafkaSource, split: int, offset: int, begin: Position) -> None:
        self._source, self._split = source, split
        self._begin = begin
        """The position of the first row of the batch of `_rest`, or of the next records."""
        self._after = begin
        self._skip = offset - begin["row"]
        self._end = source.ends[split] if source.ends is not None else None
        self._over = self._end is not None and begin["offset"] >= self._end
        delivered = (
            [f.with_nullable(True) for f in source.schema] if source.has_decode_errors else None
        )
        decode_error = pa.field(DECODE_ERROR, pa.string())
        self._schema = pa.schema([*delivered, decode_error]) if delivered else source.schema
        self._rest = empty(self._schema)
        self._caught_up = False
        self._consumer: Any = None
        self._monitor: _TopicMonitor | None = None

    @property
    def _where(self) -> str:
        return f"topic {self._source.topic!r}, partition {self._split}"

    def position(self) -> Position:
        return self._begin

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        while not self._rest.num_rows:
            self._begin = self._after
            messages = [] if self._over else self._messages(rows_max)
            if not messages:
                return None if self._over else self._rest
            self._take(messages)
        batch, self._rest = self._rest.slice(0, rows_max), self._rest.slice(rows_max)
        if not self._rest.num_rows:
            self._begin = self._after
        return batch

    def caught_up(self) -> bool:
        return self._caught_up

    def close(self) -> None:
        if self._consumer is not None:
            self._consumer.close()
        if self._monitor is not None:
            self._monitor.close()

    # --- records --------------------------------------------------------------------------------

    def _messages(self, count: int) -> list[Any]:
        """Return the next records that are available, without waiting."""
        if self._consumer is None:
            self._connect()
        if self._monitor is not None and self._monitor.error is not None:
            raise self._monitor.error
        messages = self._consumer.consume(min(count, MESSAGES_MAX), 0)
        if messages:
            self._caught_up = _is_end(messages[-1])
        errors = [m for m in messages if m.error() is not None]
        if errors:
            for message in errors:
                self._on_error(message)
            messages = [m for m in messages if m.error() is None]
        if self._end is not None and messages and messages[-1].offset() >= self._end:
            messages = [m for m in messages if m.offset() < self._end]
            self._over = True
        return messages

    def _connect(self) -> None:
        from confluent_kafka import Consumer, TopicPartition

        source = self._source
        self._consumer = Consumer(
            settings(
                source.servers,
                {
                    # Refill a full queue quickly, and let many splits fit into memory.
                    "fetch.queue.backoff.ms": 5,
                    "queued.max.messages.kbytes": 16_384,
                    # The client reports the end only when a fetch has returned nothing.
                    "fetch.wait.max.ms": 500 if self._end is None else 50,
                    **source.options,
                },
                group_id="holdfast",
                isolation_level="read_committed",
                enable_auto_commit=False,
                enable_auto_offset_store=False,
                auto_offset_reset="error",
                enable_partition_eof=True,
            )
        )
        at = TopicPartition(source.topic, self._split, self._begin["offset"])
        self._consumer.assign([at])
        if self._split == 0:
            self._monitor = _TopicMonitor(source)

    def _on_error(self, message: Any) -> None:
        """Raise if the error is permanent; otherwise the client retries by itself."""
        from confluent_kafka import KafkaError

        error = message.error()
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            # Transaction markers take offsets too, so the end may be after the last record.
            self._over = self._end is not None and message.offset() >= self._end
        elif code in (
            KafkaError._AUTO_OFFSET_RESET,
            KafkaError.OFFSET_OUT_OF_RANGE,
            KafkaError._LOG_TRUNCATION,
        ):
            raise InputError(
                f"{self._where}: the records at offset {self._after['offset']} are gone: "
                f"{error.str()}",
                hint="retain records for longer than the flow can lag (retention.ms)",
            )
        elif code in (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError._AUTHENTICATION,
        ):
            raise InputError(f"{self._where}: reading is not permitted: {error.str()}")
        else:
            log.warning("%s: %s", self._where, error.str())

    def _take(self, messages: list[Any]) -> None:
        """Decode records into rows, and skip rows that were read before."""
        batch = self._rows(messages)
        rows = self._begin["row"] + batch.num_rows
        self._after = {"row": rows, "offset": messages[-1].offset() + 1}
        skipped = min(self._skip, batch.num_rows)
        self._skip -= skipped
        self._rest = batch.slice(skipped)

    def _rows(self, messages: list[Any]) -> pa.RecordBatch:
        """Decode all records at once. If that fails, halve them until the undecodable records are
        isolated."""
        try:
            batch, counts = self._source.format.decode([m.value() for m in messages])
        except pa.ArrowMemoryError:
            raise  # not the fault of a record
        except (pa.ArrowException, ValueError, KeyError) as error:
            if len(messages) == 1:
                return self._decode_error(messages[0], error)
            half = len(messages) // 2
            return concat([self._rows(messages[:half]), self._rows(messages[half:])])
        extras = self._source.extras.of(messages)
        if counts is not None and extras:
            rows = pa.array(np.repeat(np.arange(len(messages)), counts))
            extras = [e.take(rows) for e in extras]
        columns = [*batch.columns, *extras]
        if self._source.has_decode_errors:
            columns.append(pa.nulls(batch.num_rows, pa.string()))
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)

    def _decode_error(self, message: Any, error: Exception) -> pa.RecordBatch:
        """Return a row that describes why a record cannot be decoded."""
        cause = f"{self._where}, offset {message.offset()}: {_first_line(error)}"
        text = (message.value() or b"")[:SHOWN_BYTES_MAX].decode(errors="replace")
        nulls = [pa.nulls(1, f.type) for f in self._source.schema]
        decode_error = pa.array([json.dumps([cause, text])])
        return pa.RecordBatch.from_arrays([*nulls, decode_error], schema=self._schema)


def _is_end(message: Any) -> bool:
    """Whether this message reports the current end of the partition."""
    from confluent_kafka import KafkaError

    return message.error() is not None and message.error().code() == KafkaError._PARTITION_EOF


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class _TopicMonitor(threading.Thread):
    """Checks every `CHECK_S` that the topic exists and has as many partitions as before. It has its
    own client, because another thread could close a shared one during a call."""

    def __init__(self, source: KafkaSource) -> None:
        super().__init__(daemon=True, name="holdfast-kafka-watch")
        self._source = source
        self._closed = threading.Event()
        self.error: InputError | None = None
        self.start()

    def close(self) -> None:
        self._closed.set()

    def run(self) -> None:
        from holdfast.connectors.kafka.topics import partitions_of

        topic, missed = self._source.topic, 0
        while not self._closed.wait(CHECK_S) and self.error is None:
            count = partitions_of(self._source.servers, topic, self._source.options, CHECK_S)
            missed = missed + 1 if count == 0 else 0
            if missed >= MISSED_CHECKS_MAX:
                self.error = InputError(
                    f"topic {topic!r} is gone: no broker at {self._source.servers} knows it",
                    hint="the results include all rows read so far; to read a new topic, start the "
                    "flow again",
                )
            elif count is not None and count > self._source.splits:
                self.error = InputError(
                    f"topic {topic!r} has {count} partitions, and had {self._source.splits} when "
                    "the flow was started: the flow would miss records of the new ones",
                    hint="start the flow again",
                )


def kafka_source(
    servers: str,
    topic: str,
    *,
    schema: pa.Schema | None = None,
    format: str = "json",
    start: Start = "earliest",
    end: str | None = None,
    key: str | None = None,
    timestamp: str | None = None,
    partition: str | None = None,
    offset: str | None = None,
    options: Options | None = None,
) -> Source:
    """Read the committed records of a Kafka topic; every partition is a split.

    `format` is the format of a record's value: ``"json"``, an object with the columns of `schema`
    as members; ``"arrow"``, an IPC stream of any number of rows; or ``"bytes"``, which needs no
    schema and becomes the column ``value``. `key`, `timestamp`, `partition` and `offset` name
    columns for the record's key and metadata.

    `start` is ``"earliest"``, ``"latest"``, a time (records from then on), or a mapping from
    partition to offset. It is resolved once, when the flow is started. With ``end="latest"`` the
    source ends after the records that were committed at that time.

    A record that does not fit the format, or lacks a column that is not nullable, is treated like
    a row that made a step raise: it stops the flow or becomes a dead letter. `options` are
    librdkafka's, for example those for TLS and SASL.
    """
    what = f"sources.kafka({topic!r})"
    options = check(what, servers, topic, options, _OURS)
    extras = MetadataColumns(key, timestamp, partition, offset)
    made = reading(format, schema, what)
    names = [*made.schema.names, *extras.wanted.values()]
    if len(set(names)) < len(names):
        raise FlowError(f"{what}: two columns have the same name: {', '.join(sorted(names))}")
    _check_start(start, what)
    if end not in (None, "latest"):
        raise FlowError(f"{what}: end must be 'latest' or None, not {end!r}")
    return KafkaSource(servers, topic, made, extras, start, end is not None, options)


def _check_start(start: Start, what: str) -> None:
    if isinstance(start, datetime.datetime):
        if start.tzinfo is None:
            raise FlowError(f"{what}: the start {start} has no time zone")
    elif isinstance(start, Mapping):
        whole = all(isinstance(n, int) and n >= 0 for item in start.items() for n in item)
        if not start or not whole:
            raise FlowError(f"{what}: start must map partitions to offsets, not {dict(start)}")
    elif start not in ("earliest", "latest"):
        raise FlowError(
            f"{what}: start must be 'earliest', 'latest', a time or a mapping, not {start!r}"
        )
