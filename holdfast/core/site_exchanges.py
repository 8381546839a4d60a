"""The ends of all exchanges that touch a site, under its view and its connections."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from holdfast.core.effects import SiteEffect
from holdfast.core.events import AckArrived, LogAsked
from holdfast.core.exchange import Consumer, Producer
from holdfast.core.ids import Epoch, ExchangeId, GroupId, SiteId, TaskId
from holdfast.core.layout import Shape, View, meant_behind, producing, senders
from holdfast.core.replica import Replica
from holdfast.core.stale import Stale
from holdfast.core.upstream import ProducerReplica

Ends = tuple[ExchangeId, GroupId, GroupId, SiteId]


class EarlyEvents:
    """Acks and log queries of consumers that act on a later view than this site, or that are for a
    replica which is not in place yet. Of each consumer only the latest is kept."""

    def __init__(self) -> None:
        self.acks: dict[Ends, AckArrived] = {}
        self.queries: dict[Ends, LogAsked] = {}

    def hold(self, event: AckArrived | LogAsked) -> None:
        if isinstance(event, AckArrived):
            ack = event.ack
            self.acks[ack.exchange, ack.producer, ack.consumer, event.site] = event
        else:
            query = event.query
            self.queries[query.exchange, query.producer, query.consumer, event.site] = event

    def on_lost(self, site: SiteId) -> None:
        """The site repeats its acks when it is connected again."""
        self.acks = {ends: event for ends, event in self.acks.items() if ends[3] != site}

    def take(self) -> tuple[list[AckArrived], list[LogAsked]]:
        """The events, which are not kept any longer."""
        acks, self.acks = self.acks, {}
        queries, self.queries = self.queries, {}
        return list(acks.values()), list(queries.values())


class SiteExchanges:
    """The producers and consumers of the replicas at a site that have state."""

    def __init__(self, site: SiteId, shape: Shape) -> None:
        self._site, self._shape = site, shape
        self._view: View | None = None
        self.connected = {site}
        self.producers: dict[tuple[ExchangeId, GroupId], Producer] = {}
        self.consumers: dict[tuple[ExchangeId, GroupId], Consumer] = {}
        self.early = EarlyEvents()

    # --- replicas and views ---------------------------------------------------------------------

    def on_view(self, view: View, shape: Shape) -> None:
        self._view, self._shape = view, shape

    def add(self, replica: Replica) -> None:
        for exchange, producer in replica.outputs.items():
            self.producers[exchange, replica.key[1]] = producer
        for exchange, consumer in replica.inputs.items():
            self.consumers[exchange, replica.key[1]] = consumer

    def remove(self, replica: Replica) -> None:
        for exchange in replica.outputs:
            del self.producers[exchange, replica.key[1]]
        for exchange in replica.inputs:
            del self.consumers[exchange, replica.key[1]]

    def count_replicas(self, producers: Iterable[Producer]) -> None:
        """Have producers count all replicas of their consumers that the view has."""
        for producer in producers:
            self._count_replicas(producer)

    def _count_replicas(self, producer: Producer) -> None:
        assert self._view is not None
        groups = self._view.groups[self._shape.consumer_of[producer.exchange]]
        producer.on_view(
            {GroupId(j): {s: c.joined_view_of(s) for s in c.all} for j, c in enumerate(groups)}
        )

    def subscribe(self, replica: Replica, held: Mapping[TaskId, Replica]) -> list[SiteEffect]:
        """Tell all replicas of the producers how far a replica is. If it computes, it subscribes to
        one replica of each producer: the one at this site, unless that is behind."""
        assert self._view is not None
        effects: list[SiteEffect] = []
        needed = replica.needed
        for exchange, consumer in replica.inputs.items():
            stage = self._shape.producer_of[exchange]
            prefer = {
                GroupId(i): self._site
                for i in range(len(self._view.groups[stage]))
                if _is_current(held.get((stage, GroupId(i))), consumer)
            }
            effects += consumer.on_view(
                *senders(self._view, self._shape, exchange),
                prefer,
                self.connected,
                needed,
                subscribes=replica.computes,
                deterministic=self._shape.stages[stage].guard.deterministic,
            )
        return effects

    # --- connections ----------------------------------------------------------------------------

    def on_connected(self, site: SiteId, replicas: Iterable[Replica]) -> list[SiteEffect]:
        self.connected.add(site)
        effects: list[SiteEffect] = []
        for replica in replicas:
            needed = replica.needed
            for consumer in replica.inputs.values():
                effects += consumer.on_connected(site, self.connected, needed)
        return effects

    def on_lost(self, site: SiteId, replicas: Iterable[Replica]) -> list[SiteEffect]:
        """Stop sending to a lost site, and subscribe to other replicas instead of those there."""
        self.connected.discard(site)
        self.early.on_lost(site)
        for producer in self.producers.values():
            producer.on_lost(site)
        effects: list[SiteEffect] = []
        for replica in replicas:
            needed = replica.needed
            for consumer in replica.inputs.values():
                effects += consumer.on_lost(site, self.connected, needed)
        return effects

    # --- messages -------------------------------------------------------------------------------

    def producer_for(self, event: AckArrived | LogAsked) -> Producer | Stale | None:
        """The producer that an ack or a log query is for; None if the event is early, and held; a
        reason to discard it if it is from an earlier replica at that site."""
        message = event.ack if isinstance(event, AckArrived) else event.query
        producer = self.producers.get((message.exchange, message.producer))
        counted = producer.joined_view(message.consumer, event.site) if producer else -1
        if producer is None or counted < message.joined_view:
            self.early.hold(event)
            return None
        return Stale.OTHER_INCARNATION if counted > message.joined_view else producer

    def producing(self, replica: Replica) -> Mapping[ProducerReplica, object]:
        """All replicas of the producers of a replica."""
        assert self._view is not None
        return producing(self._view, self._shape, replica.key[0])

    # --- what consumers still lack --------------------------------------------------------------

    def have_sent_all(self, replicas: Collection[Replica], last: Epoch) -> bool:
        """Whether all replicas that process the output of these have received the last epoch."""
        sending = [producer for replica in replicas for producer in replica.outputs.values()]
        return not any(self._is_owed(producer, last) for producer in sending)

    def _is_owed(self, producer: Producer, last: Epoch) -> bool:
        assert self._view is not None
        stage = self._shape.consumer_of[producer.exchange]
        computing = 1 if self._shape.stages[stage].guard.followers else None
        return any(
            producer.received(GroupId(j), site) < last
            for j, group in enumerate(self._view.groups[stage])
            for site in group.replicas[:computing]
        )

    def is_covered(self, replica: Replica, epoch: int) -> bool:
        """Whether all standbys of the consumers of a replica have checkpoints after `epoch`."""
        return all(
            producer.stable > epoch
            for x, producer in replica.outputs.items()
            if self._shape.stages[self._shape.consumer_of[x]].guard.standbys
        )

    def slowest(self) -> tuple[SiteId, int] | None:
        """The site that most bytes are kept for here, and how many."""
        if (view := self._view) is None:
            return None
        producers = self.producers.values()
        found = [p.slowest(meant_behind(view, self._shape, p.exchange)) for p in producers]
        return max((f for f in found if f is not None), key=lambda f: f[1], default=None)

    def check_invariants(self) -> None:
        for producer in self.producers.values():
            producer.check_invariants()
        for consumer in self.consumers.values():
            consumer.check_invariants()


def _is_current(replica: Replica | None, consumer: Consumer) -> bool:
    """Whether a replica of a producer at this site is not behind the one that the consumer is
    subscribed to."""
    if replica is None or not (replica.computes or replica.follows):
        return False
    return replica.finished >= consumer.received.get(replica.key[1], consumer.finished)
