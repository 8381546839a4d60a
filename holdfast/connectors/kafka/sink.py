"""A Kafka topic as a sink: every row once, whoever dies while it is written.

Rows go out in transactions, each with all rows of some epochs. In the same transaction goes how far
it reaches: an offset, of a consumer group named after the sink, that is the epoch after the last
one. So a new leader reads there what is durable. Its producer has the transactional id of the one
before, and the broker refuses that one from then on.

The offset's metadata is a *claim*: the flow's incarnation and the term of whoever leads. It is made
before anything is written, and tells a writer that finds itself refused what to make of that. A
higher term: it leads no more, and keeps quiet. Another incarnation: two flows write to one sink,
which is an error. Its own claim: somebody who led before has woken up and has not seen yet that its
time is over; go on.

All talking to the broker is done in a thread of the writer's own; the site never waits for it.
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
"""A transaction has no more than this, but for a larger epoch."""
WAITING_BYTES_MAX = 64 << 20
"""With so much unwritten the flow must wait."""
RENEW_S = 600.0
"""So often a sink that gets no rows says again how far it is: the broker forgets what is older than
its ``offsets.retention.minutes``."""
QUIET_S = 30.0
"""A writer that leads no more is told so by the site's end. One that is still asked to write after
so long is not what it takes itself for."""
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
                f"{where}: there is no column {self.key!r} to be the key",
                hint=f"the columns are {', '.join(schema.names)}",
            )
        if self.key is not None and pa.types.is_nested(schema.field(self.key).type):
            raise FlowError(f"{where}: {schema.field(self.key).type} cannot be a key")
        self.formatted(schema, where)

    def formatted(self, schema: pa.Schema, where: str) -> Format:
        """How rows of `schema` are written."""
        # Bytes have no place for the key's column in the value.
        names = [n for n in schema.names if n != self.key or self.format != "bytes"]
        return writing(self.format, pa.schema([schema.field(n) for n in names]), where)

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return KafkaWriter(self, whose, schema, whose.after, fresh=True)

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        # What was durable in truth the writer finds out by itself, and leaves that out.
        return KafkaWriter(self, whose, schema, durable, fresh=False), durable


class KafkaWriter(SinkWriter):
    """Collects epochs for a thread that writes them."""

    def __init__(
        self, sink: KafkaSink, whose: Authority, schema: pa.Schema, durable: int, *, fresh: bool
    ) -> None:
        from holdfast.connectors.kafka.ledger import Ledger

        self._sink, self._whose = sink, whose
        format = sink.formatted(schema, f"sink {whose.sink!r}")
        self._ledger = Ledger(
            sink,
            whose,
            format,
            fresh=fresh,
            confirmed=None if fresh else whose.confirmed(durable),
            stopped=lambda: self._abandoned,
        )
        self._changed = threading.Condition()
        self._waiting: deque[tuple[int, pa.RecordBatch]] = deque()
        self._waiting_bytes = 0
        self._committed = self._written = durable
        self._closing = self._abandoned = False
        self._quiet_since: float | None = None
        self._error: Exception | None = None
        self._rows = self._transactions = 0
        self._thread = threading.Thread(target=self._work, daemon=True, name="holdfast-kafka-sink")
        self._thread.start()

    # --- called by the site ---------------------------------------------------------------------

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
        """Whether nothing will be written any more."""
        return self._abandoned or self._quiet_since is not None or self._error is not None

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        quiet = self._quiet_since
        if quiet is not None and not self._abandoned and time.monotonic() - quiet > QUIET_S:
            raise FlowError(
                f"sink {self._whose.sink!r}: a later leader of flow {self._whose.flow!r} has "
                f"written to topic {self._sink.topic!r}, but this site leads",
                hint="was the flow started twice with one secret? Each start needs another",
            )

    # --- the writing thread ---------------------------------------------------------------------

    def _work(self) -> None:
        try:
            with self._ledger as ledger:
                reached = ledger.begin()
                while reached is not None:
                    self._let_go(reached)
                    group = self._next_group()
                    if group is None:
                        return
                    reached = ledger.append(group)
            with self._changed:
                self._quiet_since = time.monotonic()
                self._changed.notify_all()
        except Exception as error:
            with self._changed:
                self._error = error if isinstance(error, HoldfastError) else self._strange(error)
                self._changed.notify_all()

    def _strange(self, error: Exception) -> HostError:
        return HostError(
            f"sink {self._whose.sink!r}: writing to topic {self._sink.topic!r} at "
            f"{self._sink.servers} failed: {error}"
        )

    def _next_group(self) -> Group | None:
        """The epochs to write next: an empty list if there were none for long, None if there will
        be none."""
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

    def _let_go(self, reached: int) -> None:
        """Everything up to this epoch is durable."""
        with self._changed:
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
    """Write rows to a Kafka topic, each exactly once for whoever reads with ``read_committed``.

    `format` says what a record's value is: ``"json"``, an object for each row; ``"arrow"``, an IPC
    stream for each epoch; ``"bytes"``, the only column besides the key. The column `key` becomes
    the records' key, as text if it is not bytes, and says which partition a row goes to, as it
    would for Kafka's own client. Within a partition rows are in the flow's order.

    Epochs share a transaction for `linger`; that long, and a little more, rows take to be
    seen. A flow that is started again adds to what is there. `options` are librdkafka's, for
    instance those of TLS and SASL.
    """
    what = f"sinks.kafka({topic!r})"
    options = check(what, servers, topic, options, _OURS)
    if format not in FORMATS:
        raise FlowError(f"{what}: format is one of {', '.join(FORMATS)}, not {format!r}")
    if key is not None and format == "arrow":
        raise FlowError(f"{what}: a record of many rows has no key", hint="leave out key=")
    linger_s = seconds(linger, f"{what}: linger")
    return KafkaSink(servers, topic, key, format, linger_s, options)
