"""The dataflow of one site: its replicas under a view, and when each may process which epoch.

The machine joins the ends of all exchanges that touch the site. It gives one order per replica at a
time, so a task's epochs are processed strictly one after another; which of several replicas goes
first is for the runtime to choose. What a replica is at any time, and what may happen to it then,
is in `holdfast.core.replica`.

A replica that joins has no state and does nothing. The one it is copied from (its donor) hands over
at an epoch boundary that everything its producers have dropped lies before: they keep the rest,
because they count the new replica since the view in which it appeared. One that joins where no
replica is left is rebuilt from its input (see `holdfast.core.upstream`).

What arrives too late, twice, or for a replica that is no more is discarded, and counted by its
reason in `stale`.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from holdfast.core.effects import (
    AbandonHandOver,
    AskLog,
    AskRecords,
    BeginTask,
    CloseTask,
    OpenTask,
    ReportDelivered,
    ReportFinished,
    ReportJoinFailed,
    ReportMissed,
    ReportReplica,
    SiteEffect,
    TellLog,
)
from holdfast.core.events import (
    AckArrived,
    BundleArrived,
    CatchUpOrdered,
    CheckpointDue,
    HandOverBegun,
    LogAsked,
    LogTold,
    PeerConnected,
    PeerLost,
    RecordArrived,
    ReplicaInstalled,
    RetentionOrdered,
    SinkDurable,
    SiteEvent,
    Stale,
    StoreOrdered,
    TaskProcessed,
    ViewCommitted,
)
from holdfast.core.exchange import Consumer, Producer
from holdfast.core.ids import NO_EPOCH, STORE, Epoch, ExchangeId, GroupId, SiteId, TaskId
from holdfast.core.layout import Shape, View, meant_behind, producing, senders
from holdfast.core.records import EpochRecord
from holdfast.core.replica import Replica, State, assigned
from holdfast.core.upstream import Log
from holdfast.errors import ProtocolError, require

HISTORY = 512
"""Records kept for replicas that join later."""


class Dataflow:
    """The machine: `handle` takes an event and returns the orders that follow from it."""

    def __init__(self, site: SiteId, shape: Shape, window: int, begun: Epoch = NO_EPOCH) -> None:
        """The flow begins after the epoch `begun`: its tasks have been there before."""
        require(window >= 1, "a consumer must have room for the epoch it processes next")
        self.site, self.shape, self.window, self.begun = site, shape, window, begun
        self.view: View | None = None
        self.tasks: dict[TaskId, Replica] = {}
        """The replicas that this site holds."""
        self.producers: dict[tuple[ExchangeId, GroupId], Producer] = {}
        self.consumers: dict[tuple[ExchangeId, GroupId], Consumer] = {}
        self.records: dict[Epoch, EpochRecord] = {}
        self.recorded = begun
        """The latest epoch of which it is known that it was recorded."""
        self.connected = {site}
        self._early: dict[tuple[ExchangeId, GroupId, GroupId, SiteId], AckArrived] = {}
        self._asked: dict[tuple[ExchangeId, GroupId, GroupId, SiteId], LogAsked] = {}
        """By consumers that are not counted here yet."""
        self.last: Epoch | None = None
        """The last epoch, once it is known."""
        self.ended = False
        """Whether that is because the sources have ended: there is nothing to go on with."""
        self._reported = False
        self._stored: Epoch | None = None
        """The epoch of the last checkpoint that counts, as far as it is known here."""
        self.stale: Counter[Stale] = Counter()
        """How many events were discarded, by reason."""

    def handle(self, event: SiteEvent) -> list[SiteEffect]:
        match event:
            case ViewCommitted():
                return self._on_view_committed(event)
            case PeerConnected():
                return self._on_peer_connected(event)
            case PeerLost():
                return self._on_peer_lost(event)
            case RecordArrived():
                return self._on_record_arrived(event)
            case BundleArrived():
                return self._on_bundle_arrived(event)
            case AckArrived():
                return self._on_ack_arrived(event)
            case TaskProcessed():
                return self._on_task_processed(event)
            case LogAsked():
                return self._on_log_asked(event)
            case LogTold():
                return self._on_log_told(event)
            case SinkDurable():
                return self._on_sink_durable(event)
            case CheckpointDue():
                return self._on_checkpoint_due(event)
            case StoreOrdered():
                return self._on_store_ordered(event)
            case CatchUpOrdered():
                return self._on_catch_up_ordered(event)
            case RetentionOrdered():
                return self._on_retention_ordered(event)
            case HandOverBegun():
                return self._on_hand_over_begun(event)
            case ReplicaInstalled():
                return self._on_replica_installed(event)
        assert_never(event)

    def _discard(self, reason: Stale) -> list[SiteEffect]:
        self.stale[reason] += 1
        return []

    # --- who is where ---------------------------------------------------------------------------

    def _on_view_committed(self, event: ViewCommitted) -> list[SiteEffect]:
        view = event.view
        if not view.replaces(self.view):
            return self._discard(Stale.VIEW)
        self.view, self.shape = view, self.shape.under(view)
        self._reported = False  # it is said for each view
        effects = self._reassign(view)
        for producer in self.producers.values():
            self._count_takers(producer)
        effects += self._take_early()
        for replica in self.tasks.values():
            effects += self._follow_producers(replica)
        for replica in self.tasks.values():
            effects += self._search(replica)
        effects += self.delivered()
        for replica in self.tasks.values():
            effects += [*self._next(replica), *replica.caught_up()]
        if view.number:  # the last one, too, must reach sites that have no source
            effects.append(AskRecords(self.lacks_records()))
        return effects + self._finish_site()

    def _reassign(self, view: View) -> list[SiteEffect]:
        """Retire replicas that the view no longer has, begin new ones, and
        tell the others what they are now."""
        effects: list[SiteEffect] = []
        held = view.tasks_at(self.site)
        for key, replica in list(self.tasks.items()):
            if key not in held or view.group(key).joined_view_of(self.site) != replica.joined_view:
                effects += self._retire(replica)
        for key in held:
            if key not in self.tasks:
                effects += self._open(key, view)
        for key, replica in self.tasks.items():
            group, shape = view.group(key), self.shape.stages[key[0]]
            says = assigned(group, self.site, shape)
            effects += replica.on_view(says, shape, view.members, self.recorded)
            if replica.has_state:
                replica.protect(self.shape)
            gone = replica.donor.on_view(group, group.led_by(self.site))
            effects += [AbandonHandOver(key, site) for site in gone]
        return effects

    def lacks_records(self) -> Epoch | None:
        """After which epoch records may be of use here; None: only the latest."""
        sources = [u for u in self.tasks.values() if u.shape.kind == "source" and u.has_state]
        return min((u.finished for u in sources), default=None)

    def records_after(self, epoch: Epoch | None) -> list[EpochRecord]:
        """For somebody who lacks them; see `lacks_records`."""
        if epoch is None:
            return [self.records[max(self.records)]] if self.records else []
        return [self.records[e] for e in sorted(self.records) if e > epoch]

    def _open(self, key: TaskId, view: View) -> list[SiteEffect]:
        group, shape = view.group(key), self.shape.stages[key[0]]
        joined_view = group.joined_view_of(self.site)
        says = assigned(group, self.site, shape)
        replica = Replica(key, shape, joined_view, says, self.begun, self.window)
        self.tasks[key] = replica
        if replica.has_state:
            self._add_ends(replica, replica.finished)
            alike = [s for s in group.standbys if group.joined_view_of(s) == joined_view]
            replica.donor.begin(alike, replica.finished)
        return [OpenTask(key, view)]

    def _retire(self, replica: Replica) -> list[SiteEffect]:
        replica.retire()
        del self.tasks[replica.key]
        for exchange in replica.outputs:
            del self.producers[exchange, replica.key[1]]
        for exchange in replica.inputs:
            del self.consumers[exchange, replica.key[1]]
        return [CloseTask(replica.key)]

    def _add_ends(self, replica: Replica, needs: Epoch, log: Log | None = None) -> None:
        replica.add_ends(self.shape, needs, log)
        for exchange, producer in replica.outputs.items():
            self.producers[exchange, replica.key[1]] = producer
        for exchange, consumer in replica.inputs.items():
            self.consumers[exchange, replica.key[1]] = consumer

    def _count_takers(self, producer: Producer) -> None:
        assert self.view is not None
        groups = self.view.groups[self.shape.consumer_of[producer.exchange]]
        producer.on_view(
            {GroupId(j): {s: c.joined_view_of(s) for s in c.all} for j, c in enumerate(groups)}
        )

    def _follow_producers(self, replica: Replica) -> list[SiteEffect]:
        """Say to all replicas of its producers where it is, and take from some, if it computes."""
        assert self.view is not None
        effects: list[SiteEffect] = []
        needed = replica.needed
        for exchange, consumer in replica.inputs.items():
            stage = self.shape.producer_of[exchange]
            groups = self.view.groups[stage]
            prefer = {
                GroupId(i): self.site
                for i in range(len(groups))
                if self._is_current((stage, GroupId(i)), consumer)
            }
            takes, alike = replica.computes, self.shape.stages[stage].guard.deterministic
            effects += consumer.on_view(
                *senders(self.view, self.shape, exchange),
                prefer,
                self.connected,
                needed,
                takes=takes,
                deterministic=alike,
            )
        return effects

    def _is_current(self, key: TaskId, consumer: Consumer) -> bool:
        """Whether this site has a replica of the producer that is not behind the one we take
        from."""
        replica = self.tasks.get(key)
        if replica is None or not (replica.computes or replica.follows):
            return False
        return replica.finished >= consumer.received.get(key[1], consumer.finished)

    def _on_peer_connected(self, event: PeerConnected) -> list[SiteEffect]:
        self.connected.add(event.site)
        effects: list[SiteEffect] = []
        for replica in self.tasks.values():
            needed = replica.needed
            for consumer in replica.inputs.values():
                effects += consumer.on_connected(event.site, self.connected, needed)
        for replica in self.tasks.values():
            effects += self._search(replica)
        return effects

    def _on_peer_lost(self, event: PeerLost) -> list[SiteEffect]:
        """Of what was on its way some may not have arrived. That a hand-over failed is reported by
        both ends, since the other one may be dead."""
        site = event.site
        self.connected.discard(site)
        self._early = {key: ack for key, ack in self._early.items() if key[3] != site}
        effects: list[SiteEffect] = []
        for key, replica in self.tasks.items():
            if replica.donor.on_lost(site):
                effects += self._hand_over_failed(key, site)
            if replica.source_site == site:
                effects += replica.on_sender_lost(f"its connection to site {site} broke")
        for producer in self.producers.values():
            producer.on_lost(site)
        for replica in self.tasks.values():
            needed = replica.needed
            for consumer in replica.inputs.values():
                effects += consumer.on_lost(site, self.connected, needed)
        return effects

    def _hand_over_failed(self, key: TaskId, joiner: SiteId) -> list[SiteEffect]:
        assert self.view is not None
        if joiner not in self.view.group(key).joining:
            return [AbandonHandOver(key, joiner)]
        reason = f"its connection to site {self.site} broke"
        return [AbandonHandOver(key, joiner), ReportJoinFailed(key, joiner, reason)]

    def retry_stalled(self) -> list[SiteEffect]:
        """Replicas that have something to do and have not moved since the last call: take what
        they lack from another replica, in case the one they take from is slow."""
        effects: list[SiteEffect] = []
        for replica in self.tasks.values():
            if replica.is_stuck(self.recorded):
                for consumer in replica.inputs.values():
                    effects += consumer.turn(self.connected, replica.needed)
        return effects

    # --- the flow of data -----------------------------------------------------------------------

    def _on_record_arrived(self, event: RecordArrived) -> list[SiteEffect]:
        record = event.record
        known = self.records.get(record.epoch)
        if known is not None:
            if known != record:
                raise ProtocolError(f"two records of epoch {record.epoch}")
            return []
        self.records[record.epoch] = record
        self.recorded = max(self.recorded, record.epoch)
        if record.last:
            self.last, self.ended = record.epoch, record.ended
        sources = [u for u in self.tasks.values() if u.shape.kind == "source"]
        effects = [e for replica in sources for e in self._next(replica)]
        self._trim_records()
        return effects + self._finish_site()

    def _on_bundle_arrived(self, event: BundleArrived) -> list[SiteEffect]:
        consumer = self.consumers.get((event.exchange, event.consumer))
        if (
            consumer is None
            or consumer.joined_view != event.joined_view
            or not consumer.on_bundle(event)
        ):
            if consumer is None:
                return self._discard(Stale.NOT_HELD)
            other = consumer.joined_view != event.joined_view
            return self._discard(Stale.OTHER_INCARNATION if other else Stale.REPEATED)
        return self._next(self.tasks[self.shape.consumer_of[event.exchange], event.consumer])

    def _on_ack_arrived(self, event: AckArrived) -> list[SiteEffect]:
        producer = self.producers.get((event.exchange, event.producer))
        counted = producer.joined_view(event.consumer, event.site) if producer else -1
        if producer is None or counted < event.joined_view:
            # From a site that acts on a later view than this one, or for a replica not in place
            # yet.
            key = (event.exchange, event.producer, event.consumer, event.site)
            self._early[key] = event
            return []
        if counted > event.joined_view:
            return self._discard(Stale.OTHER_INCARNATION)
        effects: list[SiteEffect] = list(producer.on_ack(event))
        replica = self.tasks[self.shape.producer_of[event.exchange], event.producer]
        if replica.follows:
            effects += self._next(replica)
        return effects + self._finish_site()

    def _take_early(self) -> list[SiteEffect]:
        """What came for a view or a replica that is in place only now."""
        early, self._early = self._early, {}
        asked, self._asked = self._asked, {}
        effects = [e for ack in early.values() for e in self._on_ack_arrived(ack)]
        return effects + [e for question in asked.values() for e in self._on_log_asked(question)]

    def _on_task_processed(self, event: TaskProcessed) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)  # retired while it was at work
        effects = replica.on_processed(event, self.connected)
        if event.last:
            effects += self._delivered(replica)
            effects += self._handovers(replica)
            effects += replica.caught_up()
            effects += replica.retained()
        self._trim_records()
        return effects + self._next(replica) + self._finish_site()

    def delivered(self) -> list[SiteEffect]:
        """How far the sinks are that this site leads, for a sequencer that may not know."""
        return [e for replica in self.tasks.values() for e in self._delivered(replica)]

    def _delivered(self, replica: Replica) -> list[SiteEffect]:
        assert self.view is not None
        leads = self.view.group(replica.key).led_by(self.site)
        if replica.shape.kind != "sink" or not leads or replica.finished == NO_EPOCH:
            return []
        return [ReportDelivered(replica.key[0], replica.finished)]

    def _next(self, replica: Replica) -> list[SiteEffect]:
        """What the replica can do now, if anything."""
        if replica.work.busy:
            return []
        if replica.computes:
            order = replica.next_order(self.records, self.recorded)
            return [order] if order is not None else []
        if replica.follows:
            return [*replica.follow(self.records), *self._handovers(replica)]
        return []

    def _on_sink_durable(self, event: SinkDurable) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        if not replica.follows:
            return self._discard(Stale.NOT_FOLLOWING)
        if event.epoch <= replica.finished:
            return self._discard(Stale.REPEATED)
        adopted = replica.adopt_checkpoint(event.epoch, self.connected)
        return [*adopted, *self._handovers(replica)]

    def _trim_records(self) -> None:
        sources = [u.finished for u in self.tasks.values() if u.shape.kind == "source"]
        done = min([*sources, Epoch(self.recorded - HISTORY)])
        # They come in order, almost always: one that does not goes when it is the first.
        while self.records and (oldest := next(iter(self.records))) <= done:
            del self.records[oldest]

    def _finish_site(self) -> list[SiteEffect]:
        """Once in a view, when nothing is left to do here."""
        if self._reported or self.last is None or self.view is None:
            return []
        working = [u for u in self.tasks.values() if not u.stands_by]
        if any(not u.has_state or (u.finished < self.last and not u.follows) for u in working):
            return []
        sending = [producer for u in working for producer in u.outputs.values()]
        if any(self._is_owed(p, self.last) for p in sending):
            return []
        self._reported = True
        return [ReportFinished()]

    def _is_owed(self, producer: Producer, last: Epoch) -> bool:
        """Whether some replica of a consumer that takes it does not have everything yet."""
        assert self.view is not None
        stage = self.shape.consumer_of[producer.exchange]
        taking = 1 if self.shape.stages[stage].guard.followers else None
        return any(
            producer.received(GroupId(j), site) < last
            for j, group in enumerate(self.view.groups[stage])
            for site in group.replicas[:taking]
        )

    # --- making a new replica ---------------------------------------------------------------------

    def _on_catch_up_ordered(self, event: CatchUpOrdered) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        if not (replica.computes or replica.follows):
            return self._discard(Stale.NO_STATE)
        if event.joiner in replica.donor.handed:
            return self._discard(Stale.HANDED_OVER)
        assert self.view is not None
        if event.joiner not in self.view.group(event.task).joining:
            return self._discard(Stale.NOT_JOINING)
        # What the producers dropped before they counted the new replica, this one has received.
        replica.donor.order(event.joiner, replica.received)
        return self._handovers(replica) if not replica.work.busy else []

    def _handovers(self, replica: Replica) -> list[SiteEffect]:
        if not replica.donor.due:
            return []
        assert self.view is not None
        group = self.view.group(replica.key)
        over = replica.donor.hand_over(
            replica.finished, group, replica.outputs, self.connected, self._stored
        )
        return list(over)

    def _on_store_ordered(self, event: StoreOrdered) -> list[SiteEffect]:
        """Every task as it is after this epoch and no other: what some have of later epochs others
        would not know of."""
        assert self.view is not None
        self._stored = event.after
        effects: list[SiteEffect] = []
        for replica in self.tasks.values():
            if not self.view.group(replica.key).led_by(self.site):
                continue
            if replica.finished + replica.work.busy > event.epoch:
                replica.donor.cancel(STORE)
                effects.append(ReportMissed(replica.key, event.epoch))
                continue
            replica.donor.order(STORE, event.epoch)
            if not replica.work.busy:
                effects += self._handovers(replica)
        return effects

    def is_covered(self, key: TaskId, epoch: int) -> bool:
        """Whether all that are standbys for the consumers of a task have checkpoints after
        `epoch`."""
        return all(
            producer.stable > epoch
            for x, producer in self.tasks[key].outputs.items()
            if self.shape.stages[self.shape.consumer_of[x]].guard.standbys
        )

    def _on_checkpoint_due(self, event: CheckpointDue) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        if not replica.computes:
            return self._discard(Stale.NOT_COMPUTING)
        assert self.view is not None
        standbys, busy = self.view.group(replica.key).standbys, replica.work.busy
        replica.donor.order_checkpoints(standbys, replica.finished, bool(busy))
        return self._handovers(replica) if not busy else []

    def _on_hand_over_begun(self, event: HandOverBegun) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        if replica.joined_view != event.joined_view:
            # Producers may have dropped since then what that state lacks.
            return self._discard(Stale.OTHER_INCARNATION)
        return replica.on_offered(event.sender, event.offer) or self._discard(Stale.NOT_AWAITED)

    def _on_replica_installed(self, event: ReplicaInstalled) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        assert self.view is not None
        had_state = replica.has_state
        enough = len(self.view.group(replica.key).replicas) >= replica.shape.guard.replicas
        if not replica.installs(enough):
            return self._discard(Stale.NOT_AWAITED)
        if had_state:
            replica.install_outputs(event.epoch, event.kept, event.gaps, event.whole)
            return list(replica.adopt_checkpoint(event.epoch, self.connected))
        self._begin(replica, event.epoch, event.needs)
        replica.install_outputs(event.epoch, event.kept, event.gaps)
        return self._take_part(replica)

    def _begin(self, replica: Replica, epoch: Epoch, needs: Epoch, log: Log | None = None) -> None:
        """The replica has the state after `epoch` from now on."""
        replica.begins_at(epoch, self.recorded)
        self._add_ends(replica, needs, log)

    def _take_part(self, replica: Replica) -> list[SiteEffect]:
        """From now on it is a replica like any other."""
        for producer in replica.outputs.values():
            self._count_takers(producer)
        effects = [*self._take_early(), *self._follow_producers(replica)]
        if replica.shape.kind == "source":
            effects.append(AskRecords(replica.finished))
        effects.append(ReportReplica(replica.key, "installed"))
        effects += [*self._next(replica), *replica.caught_up()]
        if replica.follows:  # it waits for nothing
            effects.append(ReportReplica(replica.key, "caught_up"))
        return effects + self._finish_site()

    # --- rebuilding a replica -------------------------------------------------------------------

    def _search(self, replica: Replica) -> list[SiteEffect]:
        """Ask all replicas of the producers what they have, if that is what it waits for."""
        if replica.state is not State.SEARCHING:
            return []
        assert self.view is not None
        asked = [
            AskLog(site, exchange, producer, replica.key[1], replica.joined_view)
            for exchange, producer, site in producing(self.view, self.shape, replica.key[0])
            if (exchange, producer, site) not in replica.search.told and site in self.connected
        ]
        return [*asked, *self._rebuild(replica)]

    def _on_log_asked(self, event: LogAsked) -> list[SiteEffect]:
        producer = self.producers.get((event.exchange, event.producer))
        counted = producer.joined_view(event.consumer, event.site) if producer else -1
        if producer is None or counted < event.joined_view:
            self._asked[event.exchange, event.producer, event.consumer, event.site] = event
            return []
        if counted > event.joined_view:
            return self._discard(Stale.OTHER_INCARNATION)
        asked = (event.exchange, event.producer, event.consumer, event.joined_view)
        return [TellLog(event.site, *asked, producer.log(event.consumer))]

    def _on_log_told(self, event: LogTold) -> list[SiteEffect]:
        key = (self.shape.consumer_of[event.exchange], event.consumer)
        replica = self.tasks.get(key)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        if replica.joined_view != event.joined_view:
            return self._discard(Stale.OTHER_INCARNATION)
        if replica.state is not State.SEARCHING:
            return self._discard(Stale.NOT_SEARCHING)
        replica.on_told((event.exchange, event.producer, event.site), event.log)
        return self._rebuild(replica)

    def _rebuild(self, replica: Replica) -> list[SiteEffect]:
        """Begin, if it is known from where on."""
        assert self.view is not None
        log = replica.rebuild_point(producing(self.view, self.shape, replica.key[0]))
        if log is None:
            return []
        if replica.state is State.SEARCHING:
            return [ReportReplica(replica.key, "impossible")]
        self.recorded = max(self.recorded, log.upto)
        right = max(log.after, log.line.get(replica.key, NO_EPOCH))
        makes = Log(right, log.upto, log.credit - 1, log.line)
        self._begin(replica, log.after, log.after, makes)
        begun = BeginTask(replica.key, log.after == self.begun)
        return [begun, *self._take_part(replica)]

    def _on_retention_ordered(self, event: RetentionOrdered) -> list[SiteEffect]:
        """Every member keeps from now on what it shall keep."""
        assert self.view is not None
        if event.number != self.view.number:
            return self._discard(Stale.VIEW)
        return [e for replica in self.tasks.values() for e in replica.retain()]

    def slowest(self) -> tuple[SiteId, int] | None:
        """The replica elsewhere that most is kept for here, and how many bytes."""
        if (view := self.view) is None:
            return None
        producers = self.producers.values()
        found = [p.slowest(meant_behind(view, self.shape, p.exchange)) for p in producers]
        return max((f for f in found if f is not None), key=lambda f: f[1], default=None)

    def check_invariants(self) -> None:
        for producer in self.producers.values():
            producer.check_invariants()
        for consumer in self.consumers.values():
            consumer.check_invariants()
        for replica in self.tasks.values():
            replica.check_invariants()
