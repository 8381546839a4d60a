"""A Kafka topic as a source: every partition is a split, read by the ingress itself.

The flow keeps the offsets, and no consumer group does. All replicas of the ingress read from the
broker, each for itself, what is committed there; so they must find the same records. They begin at
offsets that are settled once, before the flow starts. A row is found again by its position: an
offset in the partition, and the number that the first row there had.
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
"""So long the broker may take to answer whoever starts a flow."""
LOOK_S = 2.0
"""How often one reader looks whether the topic is still what it was."""
GONE_LOOKS = 3
"""How often in a row it must not be there. A broker that has just started does not know it yet."""
MESSAGES_MAX = 16_384
"""So many are taken at once: the site does nothing else meanwhile."""
TEXT_MAX = 1_000
"""So much of a record that could not be read is shown."""
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
class Extras:
    """Columns for what a record has besides its value; None for those that are not wanted."""

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
        found = []
        for what in self.wanted:
            if what == "timestamp":
                plain = pa.array([m.timestamp()[1] for m in messages], pa.int64())
                found.append(plain.cast(self.TYPES[what]))
            else:
                get = {"key": "key", "partition": "partition", "offset": "offset"}[what]
                values = [getattr(m, get)() for m in messages]
                found.append(pa.array(values, self.TYPES[what]))
        return found


class KafkaSource(Source):
    """See `holdfast.sources.kafka`."""

    def __init__(
        self,
        servers: str,
        topic: str,
        format: Format,
        extras: Extras,
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
        # Arrow's parser options do not travel.
        return self.__dict__ | {"format": (self.format.name, self.format.schema)}

    def __setstate__(self, state: dict[str, Any]) -> None:
        name, schema = state["format"]
        where = f"topic {state['topic']!r}"
        again = reading(name, None if name == "bytes" else schema, where)
        self.__dict__.update(state | {"format": again})

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
                f"topic {self.topic!r} is read before it is known where it begins",
                hint="start the flow with flow.start()",
            )
        begin = position or {"row": 0, "offset": self.begins[split]}
        return KafkaReader(self, split, offset, begin)


class KafkaReader(SplitReader):
    """Reads one partition with a consumer of its own, which is made when it is first asked."""

    def __init__(self, source: KafkaSource, split: int, offset: int, begin: Position) -> None:
        self._source, self._split = source, split
        self._begin = begin
        """Where `_rest` began when it was read, or the next records do."""
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
        self._watch: _Watch | None = None

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
        if self._watch is not None:
            self._watch.close()

    # --- records --------------------------------------------------------------------------------

    def _messages(self, count: int) -> list[Any]:
        """What is there of the next records, without waiting."""
        if self._consumer is None:
            self._connect()
        if self._watch is not None and self._watch.error is not None:
            raise self._watch.error
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
                    # A queue that was full is filled up at once, and many splits fit in memory.
                    "fetch.queue.backoff.ms": 5,
                    "queued.max.messages.kbytes": 16_384,
                    # The end is noticed when the broker has nothing more to give.
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
            self._watch = _Watch(source)

    def _on_error(self, message: Any) -> None:
        """Wait if it may pass; the client tries again by itself."""
        from confluent_kafka import KafkaError

        error = message.error()
        code = error.code()
        if code == KafkaError._PARTITION_EOF:
            # Markers of transactions are no records, so the last record need not be the end.
            self._over = self._end is not None and message.offset() >= self._end
        elif code in (
            KafkaError._AUTO_OFFSET_RESET,
            KafkaError.OFFSET_OUT_OF_RANGE,
            KafkaError._LOG_TRUNCATION,
        ):
            raise InputError(
                f"{self._where}: the records at offset {self._after['offset']} are gone: "
                f"{error.str()}",
                hint="keep records for longer than the flow may be behind (retention.ms)",
            )
        elif code in (
            KafkaError.TOPIC_AUTHORIZATION_FAILED,
            KafkaError.GROUP_AUTHORIZATION_FAILED,
            KafkaError._AUTHENTICATION,
        ):
            raise InputError(f"{self._where} may not be read: {error.str()}")
        else:
            log.warning("%s: %s", self._where, error.str())

    def _take(self, messages: list[Any]) -> None:
        """Make rows of records, leaving out those that were had before."""
        batch = self._rows(messages)
        rows = self._begin["row"] + batch.num_rows
        self._after = {"row": rows, "offset": messages[-1].offset() + 1}
        skipped = min(self._skip, batch.num_rows)
        self._skip -= skipped
        self._rest = batch.slice(skipped)

    def _rows(self, messages: list[Any]) -> pa.RecordBatch:
        """Decode all at once; if that fails, in ever smaller parts, until what is wrong stands
        alone."""
        try:
            batch, counts = self._source.format.decode([m.value() for m in messages])
        except pa.ArrowMemoryError:
            raise  # no record is to blame
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
        """A row that says what is wrong with a record."""
        cause = f"{self._where}, offset {message.offset()}: {_first_line(error)}"
        text = (message.value() or b"")[:TEXT_MAX].decode(errors="replace")
        nulls = [pa.nulls(1, f.type) for f in self._source.schema]
        decode_error = pa.array([json.dumps([cause, text])])
        return pa.RecordBatch.from_arrays([*nulls, decode_error], schema=self._schema)


def _is_end(message: Any) -> bool:
    """Whether the broker says that there is nothing more for now."""
    from confluent_kafka import KafkaError

    return message.error() is not None and message.error().code() == KafkaError._PARTITION_EOF


def _first_line(error: Exception) -> str:
    return str(error).splitlines()[0] if str(error) else type(error).__name__


class _Watch(threading.Thread):
    """Looks every now and then whether the topic is there and has as many partitions as before.
    Has a client of its own: another thread's could be closed under it."""

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
        while not self._closed.wait(LOOK_S) and self.error is None:
            count = partitions_of(self._source.servers, topic, self._source.options, LOOK_S)
            missed = missed + 1 if count == 0 else 0
            if missed >= GONE_LOOKS:
                self.error = InputError(
                    f"topic {topic!r} is gone: nobody at {self._source.servers} knows it",
                    hint="what was read is in the results; start the flow again to read another",
                )
            elif count is not None and count > self._source.splits:
                self.error = InputError(
                    f"topic {topic!r} has {count} partitions, and had {self._source.splits} when "
                    "the flow was started: records of the new ones would be missed",
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
    """The committed records of a Kafka topic; every partition is a split.

    `format` says what a record's value is: ``"json"``, an object with the columns of `schema` as
    members; ``"arrow"``, an IPC stream of any number of rows; ``"bytes"``, which need no schema and
    become the column ``value``. `key`, `timestamp`, `partition` and `offset` name further columns
    for what else a record has.

    `start` is ``"earliest"``, ``"latest"``, a time (records from then on), or a mapping from
    partition to offset; it is looked up once, when the flow is started. With ``end="latest"`` the
    source ends with the records that were committed then.

    A record that does not fit the format, or lacks a column that is not nullable, is treated like
    a row that a step raised on: it stops the flow, or becomes a dead letter. `options` are
    librdkafka's, for instance those of TLS and SASL.
    """
    what = f"sources.kafka({topic!r})"
    options = check(what, servers, topic, options, _OURS)
    extras = Extras(key, timestamp, partition, offset)
    made = reading(format, schema, what)
    names = [*made.schema.names, *extras.wanted.values()]
    if len(set(names)) < len(names):
        raise FlowError(f"{what}: two columns have the same name: {', '.join(sorted(names))}")
    _check_start(start, what)
    if end not in (None, "latest"):
        raise FlowError(f"{what}: end is 'latest' or left out, not {end!r}")
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
            f"{what}: start is 'earliest', 'latest', a time or a mapping, not {start!r}"
        )
