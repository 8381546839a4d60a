"""A sink's transactions, and the last epoch that they have made durable. Imports the Kafka client.
Every call may wait for the broker until it answers."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import repeat
from types import TracebackType
from typing import Any

import msgspec
import pyarrow as pa
from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition

from holdfast.connectors.kafka.client import settings
from holdfast.connectors.kafka.formats import Format
from holdfast.connectors.kafka.sink import Group, KafkaSink
from holdfast.connectors.kafka.topics import partitions_of
from holdfast.connectors.sinks import Authority
from holdfast.errors import FlowError, HostError, SinkRewoundError

log = logging.getLogger("holdfast.kafka")

CALL_S = 20.0
"""How long a call waits for the broker. After a failed call the writer starts over with a new
producer: the broker shows whether the call had an effect, and some calls of the client hang when
they are repeated."""
RETRY_S = 0.2
CLAIM_S = 2.0
"""How long a refused writer waits for the claim of another writer."""
FAILURES_MAX = 10
"""Consecutive failures, other than an absent broker, after which the sink fails."""

FENCED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
UNAVAILABLE = (
    KafkaError._TRANSPORT,
    KafkaError._ALL_BROKERS_DOWN,
    KafkaError._TIMED_OUT,
    KafkaError._MSG_TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,
    KafkaError._WAIT_COORD,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.NOT_COORDINATOR,
    KafkaError.REQUEST_TIMED_OUT,
)
PERMANENT = (
    KafkaError.TOPIC_AUTHORIZATION_FAILED,
    KafkaError.GROUP_AUTHORIZATION_FAILED,
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
    KafkaError.CLUSTER_AUTHORIZATION_FAILED,
    KafkaError._AUTHENTICATION,
    KafkaError.MSG_SIZE_TOO_LARGE,
    KafkaError.RECORD_LIST_TOO_LARGE,
    KafkaError.INVALID_TRANSACTION_TIMEOUT,
    KafkaError.POLICY_VIOLATION,
)


@dataclass(frozen=True, slots=True)
class KafkaClaim:
    """The last writer, and its last epoch. An epoch without an incarnation was set by hand."""

    incarnation: str = ""
    term: int = -1
    epoch: int = -1


class Ledger:
    """One writer's transactions. `confirmed` is the epoch that the broker must have at least (see
    `Authority.confirmed`); `stopped` returns True once the writer was abandoned."""

    def __init__(
        self,
        sink: KafkaSink,
        whose: Authority,
        format: Format,
        *,
        new_incarnation: bool,
        confirmed: int | None = None,
        stopped: Callable[[], bool],
    ) -> None:
        self._sink, self._authority, self._format = sink, whose, format
        self._new_incarnation, self._confirmed, self._stopped = new_incarnation, confirmed, stopped
        self._name = f"holdfast-{whose.flow}-{whose.sink}"
        self._reached = whose.after
        self._claimed = False
        self._failures = 0
        self._producer: Any = None
        self._consumer: Any = None
        self._uncommitted_consumer: Any = None

    @property
    def _where(self) -> str:
        return f"sink {self._authority.sink!r}, topic {self._sink.topic!r} at {self._sink.servers}"

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._producer = None
        for consumer in (self._consumer, self._uncommitted_consumer):
            if consumer is not None:
                consumer.close()

    # --- what a writer calls --------------------------------------------------------------------

    def begin(self) -> int | None:
        """Fence the writer before this one and claim. Return the last durable epoch, or None if a
        later writer has replaced this one."""
        while not self._stopped():
            try:
                if self._claimed and self._is_replaced(self._peek()):
                    return None
                self._connect()
                claim = self._read()
                if self._is_replaced(claim):
                    return None  # this writer fenced a later one, which will reconnect
                self._transact([], self._durable_epoch(claim))
                self._claimed, self._failures = True, 0
                return self._reached
            except KafkaException as error:
                self._raise_if_permanent(error)
                time.sleep(RETRY_S)
        return None

    def append(self, group: Group) -> int | None:
        """Write epochs, all or none. Return the last durable epoch, which tells whether they were
        written, or None as in `begin`. Without epochs the call renews the claim, because the broker
        drops old offsets."""
        try:
            self._transact(group, group[-1][0] if group else self._reached)
            self._failures = 0
            return self._reached
        except KafkaException as error:
            self._raise_if_permanent(error)
            if error.args[0].code() in FENCED and self._is_claimed_by_other():
                return None
        return self.begin()

    # --- the last durable epoch -----------------------------------------------------------------

    def _durable_epoch(self, claim: KafkaClaim) -> int:
        """Return the last durable epoch. Raise if it is less than was confirmed: then rows are gone
        that the flow no longer has, or the broker has dropped the claim and rows that exist would
        be written again."""
        authority = self._authority
        mine = claim.incarnation == authority.incarnation
        if self._confirmed is not None:
            by_hand = not claim.incarnation and claim.epoch >= 0
            found = claim.epoch if mine or by_hand else -1
            if found < self._confirmed or not (mine or by_hand):
                raise self._rewound(self._confirmed, found)
            return found
        if authority.before is not None and not mine:
            self._check_predecessor(claim, *authority.before)
        return claim.epoch if mine else authority.after

    def _check_predecessor(self, claim: KafkaClaim, incarnation: str, confirmed: int) -> None:
        """Raise if rows of the stopped flow are missing. If another flow was started since, the
        claim tells nothing about it."""
        if claim.incarnation in ("", incarnation) and claim.epoch < confirmed:
            raise self._rewound(confirmed, claim.epoch)

    def _rewound(self, confirmed: int, found: int) -> SinkRewoundError:
        return SinkRewoundError(
            self._authority.sink,
            confirmed,
            found,
            f"topic {self._sink.topic!r} at {self._sink.servers}: the offset of the group "
            f"{self._name!r} records the last epoch. The broker drops it after "
            f"offsets.retention.minutes, and another cluster or a deleted topic does not have it. "
            f"Check whether the rows exist; then set the offset by hand and continue with "
            f"restore_from=, and with another checkpoint= if the flow is stored only when it is "
            f"stopped: "
            f"confluent_kafka.Consumer({{'bootstrap.servers': ..., 'group.id': {self._name!r}}})"
            f".commit(offsets=[TopicPartition({self._sink.topic!r}, 0, N + 1)], "
            f"asynchronous=False), where N is the last epoch whose rows exist; with N = "
            f"{confirmed} rows that were written later, if any, are written again",
        )

    # --- claims ---------------------------------------------------------------------------------

    def _is_replaced(self, claim: KafkaClaim) -> bool:
        authority = self._authority
        if claim.incarnation == authority.incarnation:
            # A site that died before the start may have claimed, but has not written.
            written = claim.epoch > authority.after and claim.term <= authority.term
            if self._new_incarnation and not self._claimed and written:
                raise FlowError(
                    f"{self._where}: flow {authority.flow!r} was already started with the same "
                    f"secret, and has written {claim.epoch + 1} epochs",
                    hint="use a new secret for each start",
                )
            return claim.term > authority.term
        if self._claimed and claim.incarnation:
            raise FlowError(
                f"{self._where}: another flow named {authority.flow!r} has fenced this one",
                hint="give flows that run at the same time different names",
            )
        return False

    def _is_claimed_by_other(self) -> bool:
        """Whether the writer that fenced this one claims to lead."""
        deadline = time.monotonic() + CLAIM_S
        while time.monotonic() < deadline and not self._stopped():
            try:
                if self._is_replaced(self._peek()):
                    return True
            except KafkaException as error:
                self._raise_if_permanent(error)
            time.sleep(RETRY_S)
        return False

    def _read(self) -> KafkaClaim:
        """Return the latest claim. Waits for an open transaction, so it is called only after
        `_connect`, which aborts one."""
        if self._consumer is None:
            self._consumer = self._make_consumer("read_committed")
        return self._ask(self._consumer)

    def _peek(self) -> KafkaClaim:
        """Return the latest committed claim without waiting for an open transaction."""
        if self._uncommitted_consumer is None:
            self._uncommitted_consumer = self._make_consumer("read_uncommitted")
        return self._ask(self._uncommitted_consumer)

    def _make_consumer(self, isolation: str) -> Consumer:
        if partitions_of(self._sink.servers, self._sink.topic, self._sink.options, CALL_S) == 0:
            raise FlowError(f"{self._where}: the topic does not exist", hint="create it first")
        return Consumer(
            settings(
                self._sink.servers,
                self._sink.options,
                group_id=self._name,
                isolation_level=isolation,
                enable_auto_commit=False,
            )
        )

    def _ask(self, consumer: Consumer) -> KafkaClaim:
        at = TopicPartition(self._sink.topic, 0)
        (committed,) = consumer.committed([at], timeout=CALL_S)
        if committed.error is not None:
            raise KafkaException(committed.error)
        if committed.offset < 0:
            return KafkaClaim()
        try:
            incarnation, term = msgspec.json.decode(committed.metadata or "", type=tuple[str, int])
        except msgspec.MsgspecError:
            # Other software wrote the offset, or a user set it by hand.
            return KafkaClaim(epoch=committed.offset - 1)
        return KafkaClaim(incarnation, term, committed.offset - 1)

    # --- transactions ---------------------------------------------------------------------------

    def _connect(self) -> None:
        self._producer = None  # at most one exists at a time
        self._producer = Producer(
            settings(
                self._sink.servers,
                {
                    # The partitions are the same as those of Kafka's own client.
                    "partitioner": "murmur2_random",
                    "compression.type": "lz4",
                    # The size of a transaction is already bounded.
                    "queue.buffering.max.messages": 0,
                    "queue.buffering.max.kbytes": 2_097_151,
                    # Otherwise librdkafka 2.16 loses the coordinator while all brokers are down,
                    # and a call that waits for it hangs.
                    "metadata.recovery.strategy": "none",
                    **self._sink.options,
                },
                transactional_id=self._name,
            )
        )
        self._producer.init_transactions(CALL_S)

    def _transact(self, group: Group, reached: int) -> None:
        producer = self._producer
        producer.begin_transaction()
        for _, batch in group:
            self._produce(batch)
        claim = msgspec.json.encode((self._authority.incarnation, self._authority.term)).decode()
        at = TopicPartition(self._sink.topic, 0, reached + 1, claim)
        group_metadata = self._consumer.consumer_group_metadata()
        producer.send_offsets_to_transaction([at], group_metadata, CALL_S)
        producer.commit_transaction(CALL_S)
        self._reached = self._confirmed = reached

    def _produce(self, batch: pa.RecordBatch) -> None:
        sink = self._sink
        values = self._format.encode(batch.select(self._format.schema.names))
        more = [] if sink.key is None else [_keys(batch.column(sink.key))]
        deque(map(self._producer.produce, repeat(sink.topic), values, *more), maxlen=0)

    def _raise_if_permanent(self, error: KafkaException) -> None:
        """Log an error. Raise if it is permanent, or after `FAILURES_MAX` failures in a row."""
        cause = error.args[0]
        log.warning("%s: %s", self._where, cause.str())
        if cause.code() not in FENCED and cause.code() not in UNAVAILABLE:
            self._failures += 1
        if cause.code() in PERMANENT or self._failures >= FAILURES_MAX:
            raise HostError(f"{self._where}: {cause.str()}") from error


def _keys(column: pa.Array) -> list[bytes | None]:
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.string()).cast(pa.binary())
    return column.to_pylist()
