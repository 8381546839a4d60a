"""A sink's transactions, and how far they reach. Needs the client; every call may wait for the
broker, as long as it is away."""

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
"""How long a call waits for the broker. After any that fails all begins again: whether it had an
effect is to be seen there, and some calls of the client never end if they are made again."""
AGAIN_S = 0.2
CLAIM_S = 2.0
"""So long a writer that was refused waits for the claim of another."""
FAILURES_MAX = 10
"""So many in a row that are not the broker's absence are more than bad luck."""

REFUSED = (KafkaError._FENCED, KafkaError.PRODUCER_FENCED, KafkaError.INVALID_PRODUCER_EPOCH)
AWAY = (
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
FORBIDDEN = (
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
class Claim:
    """Who wrote last, and up to which epoch. An epoch without an incarnation was set by hand."""

    incarnation: str = ""
    term: int = -1
    epoch: int = -1


class Ledger:
    """One writer's part in it. `confirmed` is the least that must be there (see
    `Authority.confirmed`); `stopped` says that what it does is of no use any more."""

    def __init__(
        self,
        sink: KafkaSink,
        whose: Authority,
        format: Format,
        *,
        fresh: bool,
        confirmed: int | None = None,
        stopped: Callable[[], bool],
    ) -> None:
        self._sink, self._whose, self._format = sink, whose, format
        self._fresh, self._confirmed, self._stopped = fresh, confirmed, stopped
        self._name = f"holdfast-{whose.flow}-{whose.sink}"
        self._reached = whose.after
        self._claimed = False
        self._failures = 0
        self._producer: Any = None
        self._consumer: Any = None
        self._glancer: Any = None

    @property
    def _where(self) -> str:
        return f"sink {self._whose.sink!r}, topic {self._sink.topic!r} at {self._sink.servers}"

    def __enter__(self) -> Ledger:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        self._producer = None
        for consumer in (self._consumer, self._glancer):
            if consumer is not None:
                consumer.close()

    # --- what a writer calls --------------------------------------------------------------------

    def begin(self) -> int | None:
        """Take the place of whoever wrote before. The answer is the last epoch that is durable, or
        None if somebody else has taken this one's place."""
        while not self._stopped():
            try:
                if self._claimed and self._is_over(self._glance()):
                    return None
                self._connect()
                claim = self._read()
                if self._is_over(claim):
                    return None  # it is this one that has come late, and the other will come back
                self._transact([], self._found(claim))
                self._claimed, self._failures = True, 0
                return self._reached
            except KafkaException as error:
                self._consider(error)
                time.sleep(AGAIN_S)
        return None

    def append(self, group: Group) -> int | None:
        """Write epochs, all or none. The answer is the last epoch that is durable, which says
        whether it was done, or None as with `begin`. Without any epochs the claim is renewed: the
        broker forgets one that is old."""
        try:
            self._transact(group, group[-1][0] if group else self._reached)
            self._failures = 0
            return self._reached
        except KafkaException as error:
            self._consider(error)
            if error.args[0].code() in REFUSED and self._is_claimed_by_another():
                return None
        return self.begin()

    # --- how far it reaches ---------------------------------------------------------------------

    def _found(self, claim: Claim) -> int:
        """Up to which epoch rows are there. If that is less than was confirmed, rows are gone that
        nobody here has, or the broker has forgotten the claim; and then rows may be there that
        would be written again."""
        whose = self._whose
        mine = claim.incarnation == whose.incarnation
        if self._confirmed is not None:
            by_hand = not claim.incarnation and claim.epoch >= 0
            found = claim.epoch if mine or by_hand else -1
            if found < self._confirmed or not (mine or by_hand):
                raise self._rewound(self._confirmed, found)
            return found
        if whose.before is not None and not mine:
            self._check_predecessor(claim, *whose.before)
        return claim.epoch if mine else whose.after

    def _check_predecessor(self, claim: Claim, incarnation: str, confirmed: int) -> None:
        """What a flow has written that was stopped must be there. If another one was started since,
        the claim says nothing about it."""
        if claim.incarnation in ("", incarnation) and claim.epoch < confirmed:
            raise self._rewound(confirmed, claim.epoch)

    def _rewound(self, confirmed: int, found: int) -> SinkRewoundError:
        return SinkRewoundError(
            self._whose.sink,
            confirmed,
            found,
            f"topic {self._sink.topic!r} at {self._sink.servers}: the offset of the group "
            f"{self._name!r} says which epochs are there. The broker forgets it after "
            f"offsets.retention.minutes, and with another cluster or a deleted topic it is lost. "
            f"Look whether the rows are there; then set it by hand and go on with restore_from=, "
            f"and with another checkpoint= if the flow is stored only when it is stopped: "
            f"confluent_kafka.Consumer({{'bootstrap.servers': ..., 'group.id': {self._name!r}}})"
            f".commit(offsets=[TopicPartition({self._sink.topic!r}, 0, N + 1)], "
            f"asynchronous=False), where N is the last epoch whose rows are there; with N = "
            f"{confirmed} rows that were written later, if any, come again",
        )

    # --- who may write --------------------------------------------------------------------------

    def _is_over(self, claim: Claim) -> bool:
        whose = self._whose
        if claim.incarnation == whose.incarnation:
            before = claim.epoch > whose.after or claim.term < whose.term
            if self._fresh and not self._claimed and before and claim.term <= whose.term:
                raise FlowError(
                    f"{self._where}: flow {whose.flow!r} was started before with the same secret, "
                    f"and has written {claim.epoch + 1} epochs",
                    hint="each start needs a secret of its own",
                )
            return claim.term > whose.term
        if self._claimed and claim.incarnation:
            raise FlowError(
                f"{self._where}: another flow called {whose.flow!r} has taken this one's place",
                hint="flows that run at the same time need different names",
            )
        return False

    def _is_claimed_by_another(self) -> bool:
        """Whether whoever had this one refused says that it leads."""
        deadline = time.monotonic() + CLAIM_S
        while time.monotonic() < deadline and not self._stopped():
            try:
                if self._is_over(self._glance()):
                    return True
            except KafkaException as error:
                self._consider(error)
            time.sleep(AGAIN_S)
        return False

    def _read(self) -> Claim:
        """The latest claim. Waits for whatever transaction is under way, so it is asked only by
        who has just seen to it that there is none."""
        if self._consumer is None:
            self._consumer = self._make_consumer("read_committed")
        return self._ask(self._consumer)

    def _glance(self) -> Claim:
        """The same, but for a transaction that is under way."""
        if self._glancer is None:
            self._glancer = self._make_consumer("read_uncommitted")
        return self._ask(self._glancer)

    def _make_consumer(self, isolation: str) -> Consumer:
        if partitions_of(self._sink.servers, self._sink.topic, self._sink.options, CALL_S) == 0:
            raise FlowError(f"{self._where}: there is no such topic", hint="create it first")
        return Consumer(
            settings(
                self._sink.servers,
                self._sink.options,
                group_id=self._name,
                isolation_level=isolation,
                enable_auto_commit=False,
            )
        )

    def _ask(self, consumer: Consumer) -> Claim:
        at = TopicPartition(self._sink.topic, 0)
        (found,) = consumer.committed([at], timeout=CALL_S)
        if found.error is not None:
            raise KafkaException(found.error)
        if found.offset < 0:
            return Claim()
        try:
            incarnation, term = msgspec.json.decode(found.metadata or "", type=tuple[str, int])
        except msgspec.MsgspecError:
            return Claim(epoch=found.offset - 1)  # not of ours, or set by hand
        return Claim(incarnation, term, found.offset - 1)

    # --- transactions ---------------------------------------------------------------------------

    def _connect(self) -> None:
        self._producer = None  # only one at a time
        self._producer = Producer(
            settings(
                self._sink.servers,
                {
                    # Kafka's own client puts keys into the same partitions.
                    "partitioner": "murmur2_random",
                    "compression.type": "lz4",
                    # What is in a transaction is bounded already.
                    "queue.buffering.max.messages": 0,
                    "queue.buffering.max.kbytes": 2_097_151,
                    # If not, librdkafka 2.16 forgets the coordinator while all brokers are away,
                    # and a call that waits for it never ends.
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
        claim = msgspec.json.encode((self._whose.incarnation, self._whose.term)).decode()
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

    def _consider(self, error: KafkaException) -> None:
        """Raise what will not pass by itself."""
        cause = error.args[0]
        log.warning("%s: %s", self._where, cause.str())
        if cause.code() not in REFUSED and cause.code() not in AWAY:
            self._failures += 1
        if cause.code() in FORBIDDEN or self._failures >= FAILURES_MAX:
            raise HostError(f"{self._where}: {cause.str()}") from error


def _keys(column: pa.Array) -> list[bytes | None]:
    if not pa.types.is_binary(column.type):
        column = column.cast(pa.string()).cast(pa.binary())
    return column.to_pylist()
