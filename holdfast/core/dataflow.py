"""The dataflow of one site: its replicas under a view, and when each may process which epoch.

The machine orders one call per replica at a time, so a task's epochs are processed strictly one
after another. The runtime chooses which of several replicas goes first. Its parts:

- `Replica`: the states of one replica, and what it does next;
- `SiteExchanges`: the ends of all exchanges that touch the site, and its connections;
- `KnownRecords`: the epoch records that the site knows.

A replica that joins has no state and does nothing. Another replica, its donor, hands over at an
epoch boundary; everything that the producers have dropped lies before that boundary. They keep the
rest, because they count the new replica since the view in which it appeared. A replica that joins
where no replica is left is rebuilt from its input (see `holdfast.core.upstream`).

An event that comes too late, twice, or for a replica that no longer exists is discarded, and
counted by its reason in `stale`.
"""

from __future__ import annotations

from collections import Counter
from typing import assert_never

from holdfast.core.effects import (
    AskLog,
    AskRecords,
    BeginTask,
    CloseTask,
    OpenTask,
    ReportDelivered,
    ReportFinished,
    ReportReplica,
    SiteEffect,
    TellLog,
)
from holdfast.core.events import (
    AckArrived,
    BundleArrived,
    CatchUpOrdered,
    CheckpointDue,
    CheckpointRefused,
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
    StoreOrdered,
    TaskProcessed,
    ViewCommitted,
)
from holdfast.core.ids import NO_EPOCH, Epoch, SiteId, TaskId
from holdfast.core.known_records import KnownRecords
from holdfast.core.layout import Shape, View
from holdfast.core.messages import LogQuery
from holdfast.core.replica import Replica, State, assigned
from holdfast.core.site_exchanges import SiteExchanges
from holdfast.core.stale import Stale
from holdfast.core.upstream import Log
from holdfast.errors import require


class Dataflow:
    """The machine: `handle` takes an event and returns the orders that follow from it."""

    def __init__(self, site: SiteId, shape: Shape, window: int, begun: Epoch = NO_EPOCH) -> None:
        """The flow begins after the epoch `begun`: its tasks have the state after it."""
        require(window >= 1, "a consumer must have room for the epoch it processes next")
        self.site, self.shape, self.window, self.begun = site, shape, window, begun
        self.view: View | None = None
        self.tasks: dict[TaskId, Replica] = {}
        """The replicas that this site holds."""
        self.exchanges = SiteExchanges(site, shape)
        self.records = KnownRecords(begun)
        self._reported = False
        """Whether the site has reported in this view that it has finished."""
        self.stale: Counter[Stale] = Counter()
        """How many events were discarded, by reason."""

    @property
    def _latest(self) -> View:
        """The view that the site acts on."""
        assert self.view is not None
        return self.view

    def handle(self, event: SiteEvent) -> list[SiteEffect]:
        match event:  # the frequent ones first
            case BundleArrived():
                return self._on_bundle_arrived(event)
            case AckArrived():
                return self._on_ack_arrived(event)
            case TaskProcessed():
                return self._on_task_processed(event)
            case ViewCommitted():
                return self._on_view_committed(event)
            case PeerConnected():
                return self._on_peer_connected(event)
            case PeerLost():
                return self._on_peer_lost(event)
            case RecordArrived():
                return self._on_record_arrived(event)
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
            case CheckpointRefused():
                return self._on_checkpoint_refused(event)
            case ReplicaInstalled():
                return self._on_replica_installed(event)
        assert_never(event)

    def _discard(self, reason: Stale) -> list[SiteEffect]:
        self.stale[reason] += 1
        return []

    # --- views ----------------------------------------------------------------------------------

    def _on_view_committed(self, event: ViewCommitted) -> list[SiteEffect]:
        view = event.view
        if not view.replaces(self.view):
            return self._discard(Stale.VIEW)
        self.view, self.shape = view, self.shape.under(view)
        self.exchanges.on_view(view, self.shape)
        self._reported = False
        effects = self._reassign(view)
        self.exchanges.count_replicas(self.exchanges.producers.values())
        effects += self._take_early()
        for replica in self.tasks.values():
            effects += self.exchanges.subscribe(replica, self.tasks)
        for replica in self.tasks.values():
            effects += self._search(replica)
        effects += self.delivered()
        for replica in self.tasks.values():
            effects += [*self._next(replica), *replica.caught_up()]
        if view.number:  # sites without a source must learn of the last epoch, too
            effects.append(AskRecords(self.lacks_records()))
        return effects + self._finish_site()

    def _reassign(self, view: View) -> list[SiteEffect]:
        """Retire replicas that the view no longer has, open new ones, and give all of them their
        roles."""
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
            role = assigned(group, self.site, shape)
            effects += replica.on_view(role, shape, view.members, self.records.recorded)
            if replica.has_state:
                replica.protect(self.shape)
            effects += replica.donor.on_view(group, group.led_by(self.site))
        return effects

    def lacks_records(self) -> Epoch | None:
        """The epoch after which a source here needs records; None: no source does, and the latest
        record is enough."""
        sources = [u for u in self.tasks.values() if u.shape.kind == "source" and u.has_state]
        return min((u.finished for u in sources), default=None)

    def _open(self, key: TaskId, view: View) -> list[SiteEffect]:
        group, shape = view.group(key), self.shape.stages[key[0]]
        joined_view = group.joined_view_of(self.site)
        role = assigned(group, self.site, shape)
        replica = Replica(key, shape, joined_view, role, self.begun, self.window)
        self.tasks[key] = replica
        if replica.has_state:
            self._add_ends(replica, replica.finished)
        if replica.computes:  # a standby does not know what has changed when it takes over
            same_view = [s for s in group.standbys if group.joined_view_of(s) == joined_view]
            replica.donor.begin(same_view, replica.finished)
        return [OpenTask(key, view)]

    def _retire(self, replica: Replica) -> list[SiteEffect]:
        replica.retire()
        del self.tasks[replica.key]
        self.exchanges.remove(replica)
        return [CloseTask(replica.key)]

    def _add_ends(self, replica: Replica, needs: Epoch, log: Log | None = None) -> None:
        replica.add_ends(self.shape, needs, log)
        self.exchanges.add(replica)

    # --- connections ----------------------------------------------------------------------------

    def _on_peer_connected(self, event: PeerConnected) -> list[SiteEffect]:
        effects = self.exchanges.on_connected(event.site, self.tasks.values())
        for replica in self.tasks.values():
            effects += self._search(replica)
        return effects

    def _on_peer_lost(self, event: PeerLost) -> list[SiteEffect]:
        """Some messages that were on their way may be lost. Both ends report that a hand-over
        failed, since the other end may be dead."""
        site = event.site
        effects: list[SiteEffect] = []
        for key, replica in self.tasks.items():
            effects += replica.donor.on_lost(site, self._latest.group(key), self.site)
            if replica.source_site == site:
                effects += replica.on_sender_lost(f"its connection to site {site} broke")
        return effects + self.exchanges.on_lost(site, self.tasks.values())

    def retry_stalled(self) -> list[SiteEffect]:
        """Subscribe to other producer replicas for replicas that have work and have finished
        nothing since the last call: the sending replica may be slow."""
        effects: list[SiteEffect] = []
        for replica in self.tasks.values():
            if replica.is_stuck(self.records.recorded):
                for consumer in replica.inputs.values():
                    effects += consumer.turn(self.exchanges.connected, replica.needed)
        return effects

    # --- the flow of data -----------------------------------------------------------------------

    def _on_record_arrived(self, event: RecordArrived) -> list[SiteEffect]:
        if not self.records.add(event.record):
            return []
        sources = [u for u in self.tasks.values() if u.shape.kind == "source"]
        effects = [e for replica in sources for e in self._next(replica)]
        self._trim_records()
        return effects + self._finish_site()

    def _on_bundle_arrived(self, event: BundleArrived) -> list[SiteEffect]:
        key = event.key
        consumer = self.exchanges.consumers.get((key.exchange, key.consumer))
        if consumer is None:
            return self._discard(Stale.NOT_HELD)
        if consumer.joined_view != key.joined_view:
            return self._discard(Stale.OTHER_INCARNATION)
        if not consumer.on_bundle(key, event.bundle):
            return self._discard(Stale.REPEATED)
        return self._next(self.tasks[self.shape.consumer_of[key.exchange], key.consumer])

    def _on_ack_arrived(self, event: AckArrived) -> list[SiteEffect]:
        producer = self.exchanges.producer_for(event)
        if producer is None:
            return []
        if isinstance(producer, Stale):
            return self._discard(producer)
        ack = event.ack
        effects: list[SiteEffect] = list(producer.on_ack(event.site, ack))
        replica = self.tasks[self.shape.producer_of[ack.exchange], ack.producer]
        if replica.follows:
            effects += self._next(replica)
        return effects + self._finish_site()

    def _take_early(self) -> list[SiteEffect]:
        """Handle acks and log queries that came before their view or their replica."""
        acks, queries = self.exchanges.early.take()
        effects = [e for ack in acks for e in self._on_ack_arrived(ack)]
        return effects + [e for query in queries for e in self._on_log_asked(query)]

    def _on_task_processed(self, event: TaskProcessed) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)  # retired while it was at work
        effects = replica.on_processed(event, self.exchanges.connected)
        if event.last:
            effects += self._delivered(replica)
            effects += self._handovers(replica)
            effects += replica.caught_up()
            effects += replica.retained()
        self._trim_records()
        return effects + self._next(replica) + self._finish_site()

    def delivered(self) -> list[SiteEffect]:
        """Report how far the sinks are that this site leads: a new sequencer may not know."""
        return [e for replica in self.tasks.values() for e in self._delivered(replica)]

    def _delivered(self, replica: Replica) -> list[SiteEffect]:
        leads = self._latest.group(replica.key).led_by(self.site)
        if replica.shape.kind != "sink" or not leads or replica.finished == NO_EPOCH:
            return []
        return [ReportDelivered(replica.key[0], replica.finished)]

    def _next(self, replica: Replica) -> list[SiteEffect]:
        """The next order of a replica, if there is something to do."""
        if replica.work.busy:
            return []
        if replica.computes:
            order = replica.next_order(self.records.by_epoch, self.records.recorded)
            return [order] if order is not None else []
        if replica.follows:
            return [*replica.follow(self.records.by_epoch), *self._handovers(replica)]
        return []

    def _on_sink_durable(self, event: SinkDurable) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        if not replica.follows:
            return self._discard(Stale.NOT_FOLLOWING)
        if event.epoch <= replica.finished:
            return self._discard(Stale.REPEATED)
        adopted = replica.adopt_checkpoint(event.epoch, self.exchanges.connected)
        return [*adopted, *self._handovers(replica)]

    def _trim_records(self) -> None:
        tasks = self.tasks.values()
        self.records.trim([u.finished for u in tasks if u.shape.kind == "source"])

    def _finish_site(self) -> list[SiteEffect]:
        """Report once in a view that nothing is left to do here."""
        last = self.records.last
        if self._reported or last is None or self.view is None:
            return []
        working = [u for u in self.tasks.values() if not u.stands_by]
        if any(not u.has_state or (u.finished < last and not u.follows) for u in working):
            return []
        if not self.exchanges.have_sent_all(working, last):
            return []
        self._reported = True
        return [ReportFinished()]

    # --- handing state over ---------------------------------------------------------------------

    def _on_catch_up_ordered(self, event: CatchUpOrdered) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        if not (replica.computes or replica.follows):
            return self._discard(Stale.NO_STATE)
        if event.joiner in replica.donor.handed:
            return self._discard(Stale.HANDED_OVER)
        if event.joiner not in self._latest.group(event.task).joining:
            return self._discard(Stale.NOT_JOINING)
        # The donor has received what producers dropped before they counted the new replica.
        replica.donor.order(event.joiner, replica.received)
        return self._handovers(replica) if not replica.work.busy else []

    def _handovers(self, replica: Replica) -> list[SiteEffect]:
        if not replica.donor.due:
            return []
        group, connected = self._latest.group(replica.key), self.exchanges.connected
        over = replica.donor.hand_over(replica.finished, group, replica.outputs, connected)
        return list(over)

    def _on_store_ordered(self, event: StoreOrdered) -> list[SiteEffect]:
        """Store every task that is led here, all of them after the same epoch: what one has of
        later epochs the others would not know."""
        effects: list[SiteEffect] = []
        for replica in self.tasks.values():
            if not self._latest.group(replica.key).led_by(self.site):
                continue
            reached = Epoch(replica.finished + replica.work.busy)
            effects += replica.donor.order_store(event.epoch, event.after, reached)
            if not replica.work.busy:
                effects += self._handovers(replica)
        return effects

    def _on_checkpoint_due(self, event: CheckpointDue) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        if not replica.computes:
            return self._discard(Stale.NOT_COMPUTING)
        standbys, busy = self._latest.group(replica.key).standbys, replica.work.busy
        replica.donor.order_checkpoints(standbys, replica.finished, bool(busy))
        return self._handovers(replica) if not busy else []

    def _on_hand_over_begun(self, event: HandOverBegun) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        if replica.joined_view != event.joined_view:
            # Since then producers may have dropped input that this state lacks.
            return self._discard(Stale.OTHER_INCARNATION)
        return replica.on_offered(event) or self._discard(Stale.NOT_AWAITED)

    def _on_checkpoint_refused(self, event: CheckpointRefused) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        abandoned = replica.donor.on_refused(event)
        if not abandoned:
            return self._discard(Stale.REPEATED)  # a later hand-over has begun, or none is due
        return [*abandoned, *(self._handovers(replica) if not replica.work.busy else ())]

    def _on_replica_installed(self, event: ReplicaInstalled) -> list[SiteEffect]:
        replica = self.tasks.get(event.task)
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        had_state = replica.has_state
        group, guard = self._latest.group(replica.key), replica.shape.guard
        enough = not group.lacks_replica(guard.replicas)
        if not replica.installs(enough):
            return self._discard(Stale.NOT_AWAITED)
        if had_state:
            replica.install_outputs(event.epoch, event.kept, event.gaps, event.whole)
            return list(replica.adopt_checkpoint(event.epoch, self.exchanges.connected))
        self._begin(replica, event.epoch, event.needs)
        replica.install_outputs(event.epoch, event.kept, event.gaps)
        return self._take_part(replica)

    def _begin(self, replica: Replica, epoch: Epoch, needs: Epoch, log: Log | None = None) -> None:
        """Begin a replica with the state after `epoch`."""
        replica.begins_at(epoch, self.records.recorded)
        self._add_ends(replica, needs, log)

    def _take_part(self, replica: Replica) -> list[SiteEffect]:
        """Connect a replica that has its state now to its producers and consumers."""
        self.exchanges.count_replicas(replica.outputs.values())
        effects = [*self._take_early(), *self.exchanges.subscribe(replica, self.tasks)]
        if replica.shape.kind == "source":
            effects.append(AskRecords(replica.finished))
        effects.append(ReportReplica(replica.key, "installed"))
        effects += [*self._next(replica), *replica.caught_up()]
        if replica.follows:  # it has nothing to replay
            effects.append(ReportReplica(replica.key, "caught_up"))
        return effects + self._finish_site()

    # --- rebuilding a replica -------------------------------------------------------------------

    def _search(self, replica: Replica) -> list[SiteEffect]:
        """Ask all replicas of the producers for their logs, if the replica is being rebuilt."""
        if replica.state is not State.SEARCHING:
            return []
        connected, told = self.exchanges.connected, replica.search.told
        asked = [
            AskLog(site, LogQuery(exchange, producer, replica.key[1], replica.joined_view))
            for exchange, producer, site in self.exchanges.producing(replica)
            if (exchange, producer, site) not in told and site in connected
        ]
        return [*asked, *self._rebuild(replica)]

    def _on_log_asked(self, event: LogAsked) -> list[SiteEffect]:
        producer = self.exchanges.producer_for(event)
        if producer is None:
            return []
        if isinstance(producer, Stale):
            return self._discard(producer)
        return [TellLog(event.site, event.query, producer.log(event.query.consumer))]

    def _on_log_told(self, event: LogTold) -> list[SiteEffect]:
        query = event.query
        replica = self.tasks.get((self.shape.consumer_of[query.exchange], query.consumer))
        if replica is None:
            return self._discard(Stale.NOT_HELD)
        if replica.joined_view != query.joined_view:
            return self._discard(Stale.OTHER_INCARNATION)
        if replica.state is not State.SEARCHING:
            return self._discard(Stale.NOT_SEARCHING)
        replica.on_told((query.exchange, query.producer, event.site), event.log)
        return self._rebuild(replica)

    def _rebuild(self, replica: Replica) -> list[SiteEffect]:
        """Begin a replica that is rebuilt, if its rebuild point is known."""
        log = replica.rebuild_point(self.exchanges.producing(replica))
        if log is None:
            return []
        if replica.state is State.SEARCHING:
            return [ReportReplica(replica.key, "impossible")]
        self.records.note(log.upto)
        right = max(log.after, log.valid_after.get(replica.key, NO_EPOCH))
        makes = Log(right, log.upto, log.complete_level - 1, log.valid_after)
        self._begin(replica, log.after, log.after, makes)
        begun = BeginTask(replica.key, log.after == self.begun)
        return [begun, *self._take_part(replica)]

    def _on_retention_ordered(self, event: RetentionOrdered) -> list[SiteEffect]:
        """All members act on the view, so producers keep what its protection needs from now on."""
        if event.number != self._latest.number:
            return self._discard(Stale.VIEW)
        return [e for replica in self.tasks.values() for e in replica.retain()]

    def check_invariants(self) -> None:
        self.exchanges.check_invariants()
        for replica in self.tasks.values():
            replica.check_invariants()
