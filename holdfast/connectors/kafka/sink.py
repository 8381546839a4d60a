"""A Kafka topic as a sink: every row exactly once, also when sites fail.

The writer sends rows in transactions, each with all rows of some epochs. The same transaction
commits an offset of a consumer group named after the sink: the last epoch plus one. A new leader
reads the last durable epoch there. Its producer has the same transactional id as the producer
before it, so the broker fences the earlier one.

The offset's metadata is a *claim*: the flow's incarnation and the leader's term. A writer claims
before it writes. A writer that the broker refuses reads the claim to decide what to do:

- A higher term: another site leads. The writer stops without an error.
- Another incarnation: two flows write to one sink. That is an error.
- Its own claim: an earlier leader woke up and does not know yet that it was replaced. The writer
  continues.

The writer talks to the broker only in its own thread. A site waits for the broker once, when the
flow starts: the broker has the claim before the first row is read. So a flow that was lost later
can rely on it, whatever had been written.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from typing import Any

import pyarrow as pa

from holdfast.connectors.kafka.client import Options, check
from holdfast.connectors.kafka.formats import FORMATS, Format, writing
from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.engine.durations import Seconds, seconds
from holdfast.errors import FlowError, HoldfastError, HostError

Group = list[tuple[int, pa.RecordBatch]]
"""Epochs with their rows."""

GROUP_BYTES = 16 << 20
"""Maximum bytes per transaction, unless a single epoch is larger."""
WAITING_BYTES_MAX = 64 << 20
"""Maximum unwritten bytes; at this bound the flow waits."""
RENEW_S = 600.0
"""Interval at which a sink without rows commits its offset again: the broker drops offsets that are
older than ``offsets.retention.minutes``."""
CLAIM_S_MAX = 60.0
"""How long the start of a flow waits for the first claim."""
QUIET_S = 30.0
"""How long a replaced writer stays quiet. Normally its site is fenced in that time. If the site
still leads afterwards, the flow was started twice with the same secret, which is an error."""
_OURS = {"bootstrap.servers", "transactional.id", "enable.idempotence", "acks", "group.id"}


class KafkaSink(Sink):
    """See `kafka_sink`."""

    def __init__(
        self,
        servers: str,
        topic: str,
        key: str | None,
        format: str,
        linger_s: float,
        options: Options,
    ) -> None:
        self.servers, self.topic, self.key, self.format = servers, topic, key, format
        self.linger_s, self.options = linger_s, options

    def check(self, schema: pa.Schema, where: str) -> None:
        if self.key is not None and self.key not in schema.names:
            raise FlowError(
                f"{where}: the key column {self.key!r} does not exist",
                hint=f"the columns are {', '.join(schema.names)}",
            )
        if self.key is not None and pa.types.is_nested(schema.field(self.key).type):
            raise FlowError(
                f"{where}: a column of type {schema.field(self.key).type} cannot be the key"
            )
        self.formatted(schema, where)

    def formatted(self, schema: pa.Schema, where: str) -> Format:
        """Return the format in which rows of `schema` are written."""
        # A value of format bytes has no room for the key column.
        names = [n for n in schema.names if n != self.key or self.format != "bytes"]
        return writing(self.format, pa.schema([schema.field(n) for n in names]), where)

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        writer = KafkaWriter(self, whose, schema, whose.after, new_incarnation=True)
        writer.wait_for_claim()
        return writer

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        # The writer reads the durable epoch from the broker later, and skips epochs up to it.
        return KafkaWriter(self, whose, schema, durable, new_incarnation=False), durable


class KafkaWriter(SinkWriter):
    """Queues epochs for a thread that writes them."""

    def __init__(
        self,
        sink: KafkaSink,
        whose: Authority,
        schema: pa.Schema,
        durable: int,
        *,
        new_incarnation: bool,
    ) -> None:
        from holdfast.connectors.kafka.ledger import Ledger

        self._sink, self._authority = sink, whose
        format = sink.formatted(schema, f"sink {whose.sink!r}")
        self._ledger = Ledger(
            sink,
            whose,
            format,
            new_incarnation=new_incarnation,
            confirmed=None if new_incarnation else whose.confirmed(durable),
            stopped=lambda: self._abandoned,
        )
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, pa.RecordBatch]] = deque()
        self._waiting_bytes = 0
        self._committed = self._written = durable
        self._claimed = self._closing = self._abandoned = False
        self._quiet_since: float | None = None
        self._error: Exception | None = None
        self._rows = self._transactions = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="holdfast-kafka-sink")
        self._thread.start()

    # --- called by the site ---------------------------------------------------------------------

    def wait_for_claim(self) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: self._claimed or self._ended, CLAIM_S_MAX)
        if not done:
            self.abandon()
            raise HostError(
                f"sink {self._authority.sink!r}: the broker at {self._sink.servers} did not answer "
                f"within {CLAIM_S_MAX:g} s",
                hint="check the address, and that the broker allows transactions",
            )
        self._check()

    def room(self) -> bool:
        return self._waiting_bytes < WAITING_BYTES_MAX or self._ended

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        with self._changed:
            self._check()
            if batch.num_rows and epoch > self._written and not self._ended:
                self._waiting.append((epoch, batch))
                self._waiting_bytes += batch.nbytes

    def commit(self, epoch: int) -> int:
        with self._changed:
            self._check()
            self._committed = epoch
            self._changed.notify_all()
            return self._written

    def close(self) -> None:
        with self._changed:
            self._closing = True
            self._changed.notify_all()
        self._thread.join()
        self._check()

    def abandon(self) -> None:
        with self._changed:
            self._abandoned = True
            self._changed.notify_all()

    def report(self) -> dict[str, Any]:
        return {"rows": self._rows, "transactions": self._transactions}

    @property
    def _ended(self) -> bool:
        """Whether the writer has stopped writing."""
        return self._abandoned or self._quiet_since is not None or self._error is not None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        quiet = self._quiet_since
        if quiet is not None and not self._abandoned and time.monotonic() - quiet > QUIET_S:
            raise FlowError(
                f"sink {self._authority.sink!r}: a later leader of flow {self._authority.flow!r} "
                f"has written to topic {self._sink.topic!r}, but this site leads",
                hint="was the flow started twice with the same secret? Use a new one each time",
            )

    # --- the writing thread ---------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with self._ledger as ledger:
                reached = ledger.begin()
                while reached is not None:
                    self._drop_written(reached)
                    group = self._next_group()
                    if group is None:
                        return
                    reached = ledger.append(group)
            with self._changed:
                self._quiet_since = time.monotonic()
                self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error = error if isinstance(error, HoldfastError) else self._unexpected(error)
                self._changed.notify_all()

    def _unexpected(self, error: Exception) -> HostError:
        return HostError(
            f"sink {self._authority.sink!r}: writing to topic {self._sink.topic!r} at "
            f"{self._sink.servers} failed: {error}"
        )

    def _next_group(self) -> Group | None:
        """Wait for epochs to write and return them. An empty list means that there were none for
        `RENEW_S`, None that there will be none."""
        with self._changed:
            if not self._changed.wait_for(
                lambda: self._is_due() or self._closing or self._abandoned, RENEW_S
            ):
                return []
            self._changed.wait_for(
                lambda: self._waiting_bytes >= GROUP_BYTES or self._closing or self._abandoned,
                self._sink.linger_s,
            )
            if self._abandoned or not self._is_due():
                return None
            group: Group = []
            nbytes = 0
            for epoch, batch in self._waiting:
                nbytes += batch.nbytes
                if epoch > self._committed or (group and nbytes > GROUP_BYTES):
                    break
                group.append((epoch, batch))
            return group

    def _is_due(self) -> bool:
        return bool(self._waiting) and self._waiting[0][0] <= self._committed

    def _drop_written(self, reached: int) -> None:
        """Drop the rows up to this epoch, which are durable."""
        with self._changed:
            self._claimed = True
            self._transactions += 1
            self._written = max(self._written, reached)
            while self._waiting and self._waiting[0][0] <= reached:
                _, batch = self._waiting.popleft()
                self._waiting_bytes -= batch.nbytes
                self._rows += batch.num_rows
            self._changed.notify_all()


def kafka_sink(
    servers: str,
    topic: str,
    *,
    key: str | None = None,
    format: str = "json",
    linger: Seconds = 0.1,
    options: Options | None = None,
) -> Sink:
    """Write rows to a Kafka topic, each exactly once for consumers that read ``read_committed``.

    `format` is the format of a record's value: ``"json"``, an object for each row; ``"arrow"``, an
    IPC stream for each epoch; or ``"bytes"``, the only column other than the key. The column `key`
    becomes the record's key, as text if it is not bytes, and determines the partition as in Kafka's
    own client. Within a partition rows are in the flow's order.

    A transaction collects epochs for `linger`, which delays rows by a little more than that. A flow
    that is started again appends to the topic. `options` are librdkafka's, for example those for
    TLS and SASL.
    """
    what = f"sinks.kafka({topic!r})"
    options = check(what, servers, topic, options, _OURS)
    if format not in FORMATS:
        raise FlowError(f"{what}: format must be one of {', '.join(FORMATS)}, not {format!r}")
    if key is not None and format == "arrow":
        raise FlowError(f"{what}: a record of several rows cannot have a key", hint="omit key=")
    linger_s = seconds(linger, f"{what}: linger")
    return KafkaSink(servers, topic, key, format, linger_s, options)
