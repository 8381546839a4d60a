"""The dataflow of one site: when each of its tasks may process which epoch.

The machine joins the ends of all exchanges that touch the site. It gives one order per task at a
time, so a task's epochs are processed strictly one after another; which of several tasks goes
first is for the runtime to choose.

A task that is joining has no state yet and does nothing. The task it is copied from (its donor)
hands over at an epoch boundary that everything its producers have let go of lies before: they keep
the rest, because they count the new replica since the view in which it appeared. One that joins
where there is no replica is rebuilt from its input (see `holdfast.core.upstream`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, assert_never

from holdfast.core.effects import (
    AbandonHandOver,
    AskLog,
    AskRecords,
    BeginTask,
    CloseTask,
    OpenTask,
    ReportDelivered,
    ReportFinished,
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
from holdfast.core.exchange import Consumer, Producer
from holdfast.core.ids import NO_EPOCH, STORE, Epoch, ExchangeId, GroupId, SiteId, TaskId
from holdfast.core.layout import Shape, View
from holdfast.core.records import EpochRecord
from holdfast.core.replica import Replica
from holdfast.core.upstream import Gap, Log, Needs, Search, Source
from holdfast.errors import ProtocolError, require

HISTORY = 512
"""So many records are kept for replicas that are made later."""


class Dataflow:
    """The machine: `handle` takes an event and returns the orders that follow from it."""

    def __init__(self, site: SiteId, shape: Shape, window: int, begun: Epoch = NO_EPOCH) -> None:
        """The flow begins after the epoch `begun`: its tasks have been there before."""
        require(window >= 1, "a consumer must have room for the epoch it processes next")
        self.site, self.shape, self.window, self.begun = site, shape, window, begun
        self.view: View | None = None
        self.tasks: dict[TaskId, Replica] = {}
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
            case ReplicaInstalled():
                return self._on_replica_installed(event)
        assert_never(event)

    # --- who is where ---------------------------------------------------------------------------

    def _on_view_committed(self, event: ViewCommitted) -> list[SiteEffect]:
        view = event.view
        if not view.replaces(self.view):
            return []
        self.view, self.shape = view, self.shape.under(view)
        self._reported = False  # it is said for each view
        effects: list[SiteEffect] = []
        held = view.tasks_at(self.site)
        for key, task in list(self.tasks.items()):
            if key not in held or view.group(key).joined_view_of(self.site) != task.joined_view:
                effects += self._close(key)
        for key in held:
            if key not in self.tasks:
                group = view.group(key)
                effects += self._open(key, installed=self.site in group.replicas + group.standbys)
        for task in self.tasks.values():
            task.shape, task.retain_upto = self.shape.stages[task.key[0]], None
            self._update_standby(task)
            if task.installed:
                self._guard(task)
            group = view.group(task.key)
            gone = task.keep_handovers(group, group.led_by(self.site))
            effects += [AbandonHandOver(task.key, site) for site in gone]
        for producer in self.producers.values():
            self._count_takers(producer)
        effects += self._take_early()
        for consumer in self.consumers.values():
            effects += self._follow_producers(consumer)
        for task in self.tasks.values():
            effects += self._search(task)
        effects += self.delivered()
        for task in self.tasks.values():
            effects += [*self._next(task), *task.caught_up(self.window)]
        if view.number:  # the last one, too, must reach sites that have no source
            effects.append(AskRecords(self.lacks_records()))
        return effects + self._finish_site()

    def lacks_records(self) -> Epoch | None:
        """After which epoch records may be of use here; None: only the latest."""
        sources = [u for u in self.tasks.values() if u.shape.kind == "source" and u.installed]
        return min((u.finished for u in sources), default=None)

    def records_after(self, epoch: Epoch | None) -> list[EpochRecord]:
        """For somebody who lacks them; see `lacks_records`."""
        if epoch is None:
            return [self.records[max(self.records)]] if self.records else []
        return [self.records[e] for e in sorted(self.records) if e > epoch]

    def _update_standby(self, task: Replica) -> None:
        """Compute from now on, or do not."""
        assert self.view is not None
        group = self.view.group(task.key)
        stood = task.standby
        task.standby = self.site in group.standbys or (stood and self.site in group.joining)
        if stood and not task.standby:
            task.needs = None
            task.replay(max(self.recorded, task.finished), self.window)
        task.follower = task.shape.guard.follower and not group.led_by(self.site)
        for consumer in task.inputs.values():
            consumer.standby = task.standby or task.follower

    def _guard(self, task: Replica) -> None:
        """Keep, and say, what the protection of the task and of its neighbours takes."""
        if not task.shape.guard.level:
            task.needs = None
        elif task.needs is None:  # what its state comes from was not followed
            task.needs = Needs(task.finished, NO_EPOCH)
        for exchange, producer in task.outputs.items():
            guard = self.shape.stages[self.shape.consumer_of[exchange]].guard
            producer.level, producer.complete = guard.level, guard.rebuild_level
            producer.deterministic = task.shape.guard.comparable
        for exchange, consumer in task.inputs.items():
            guard = self.shape.stages[self.shape.producer_of[exchange]].guard
            consumer.deterministic = guard.deterministic
            consumer.levels = partial(task.levels, self.shape.levels)
            consumer.lines = partial(task.lines, self.shape.levels)

    def _open(self, key: TaskId, installed: bool) -> list[SiteEffect]:
        assert self.view is not None
        joined_view = self.view.group(key).joined_view_of(self.site)
        finished = self.begun if installed else NO_EPOCH
        self.tasks[key] = Replica(key, self.shape.stages[key[0]], installed, joined_view, finished)
        self.tasks[key].standby = self.site in self.view.group(key).standbys
        if installed:
            self._add_ends(self.tasks[key], finished, finished)
            group = self.view.group(key)
            alike = [s for s in group.standbys if group.joined_view_of(s) == joined_view]
            self.tasks[key].given = dict.fromkeys(alike, finished)
        return [OpenTask(key, self.view)]

    def _close(self, key: TaskId) -> list[SiteEffect]:
        task = self.tasks.pop(key)
        for exchange in task.outputs:
            del self.producers[exchange, key[1]]
        for exchange in task.inputs:
            del self.consumers[exchange, key[1]]
        return [CloseTask(key)]

    def _add_ends(
        self, task: Replica, finished: Epoch, needs: Epoch, log: Log | None = None
    ) -> None:
        group = task.key[1]
        task.needs = Needs(finished, needs)
        for exchange in task.shape.outputs:
            level = self.shape.stages[self.shape.consumer_of[exchange]].guard.level
            producer = Producer(exchange, group, level, finished, log)
            task.outputs[exchange] = self.producers[exchange, group] = producer
        for exchange in task.shape.inputs:
            consumer = Consumer(exchange, group, self.window, finished, task.joined_view)
            consumer.standby = task.standby or task.follower
            task.inputs[exchange] = self.consumers[exchange, group] = consumer
        self._guard(task)

    def _count_takers(self, producer: Producer) -> None:
        assert self.view is not None
        groups = self.view.groups[self.shape.consumer_of[producer.exchange]]
        producer.on_view(
            {GroupId(j): {s: c.joined_view_of(s) for s in c.all} for j, c in enumerate(groups)}
        )

    def _follow_producers(self, consumer: Consumer) -> list[SiteEffect]:
        assert self.view is not None
        stage = self.shape.producer_of[consumer.exchange]
        groups = self.view.groups[stage]
        prefer = {
            GroupId(i): self.site
            for i in range(len(groups))
            if self._is_current((stage, GroupId(i)), consumer)
        }
        working = 1 if self.shape.stages[stage].guard.follower else None
        return list(
            consumer.on_view(
                {GroupId(i): c.replicas[:working] for i, c in enumerate(groups)},
                {
                    GroupId(i): (c.replicas[working:] if working else ()) + c.joining
                    for i, c in enumerate(groups)
                },
                prefer,
                self.connected,
            )
        )

    def _is_current(self, key: TaskId, consumer: Consumer) -> bool:
        """Whether this site has a replica of the producer that is not behind the one we take
        from."""
        task = self.tasks.get(key)
        if task is None or not task.installed or task.standby:
            return False
        return task.finished >= consumer.received.get(key[1], consumer.finished)

    def _on_peer_connected(self, event: PeerConnected) -> list[SiteEffect]:
        self.connected.add(event.site)
        effects: list[SiteEffect] = [
            e for c in self.consumers.values() for e in c.on_connected(event.site, self.connected)
        ]
        for task in self.tasks.values():
            effects += self._search(task)
        return effects

    def _on_peer_lost(self, event: PeerLost) -> list[SiteEffect]:
        self.connected.discard(event.site)
        self._early = {key: ack for key, ack in self._early.items() if key[3] != event.site}
        for task in self.tasks.values():  # some of it may not have arrived
            task.given.pop(event.site, None)
        for producer in self.producers.values():
            producer.on_lost(event.site)
        return [e for c in self.consumers.values() for e in c.on_lost(event.site, self.connected)]

    def retry_stalled(self) -> list[SiteEffect]:
        """Tasks that have something to do and have not moved since the last call: take what they
        lack from another replica, in case the one they take from is slow."""
        effects: list[SiteEffect] = []
        for task in self.tasks.values():
            stuck = task.works and not task.busy and task.finished == task.finished_before
            if stuck and task.finished < self.recorded:
                for consumer in task.inputs.values():
                    effects += consumer.turn(self.connected)
            task.finished_before = task.finished
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
        effects = [e for u in sources for e in self._next(u)]
        self._trim_records()
        return effects + self._finish_site()

    def _on_bundle_arrived(self, event: BundleArrived) -> list[SiteEffect]:
        consumer = self.consumers.get((event.exchange, event.consumer))
        if (
            consumer is None
            or consumer.joined_view != event.joined_view
            or not consumer.on_bundle(event)
        ):
            return []  # for a replica that is no more, or it came twice
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
            return []  # from a replica that was there before
        effects: list[SiteEffect] = list(producer.on_ack(event))
        task = self.tasks[self.shape.producer_of[event.exchange], event.producer]
        if task.follower:
            effects += self._next(task)
        return effects + self._finish_site()

    def _take_early(self) -> list[SiteEffect]:
        """What came for a view or a replica that is in place only now."""
        early, self._early = self._early, {}
        asked, self._asked = self._asked, {}
        effects = [e for ack in early.values() for e in self._on_ack_arrived(ack)]
        return effects + [e for question in asked.values() for e in self._on_log_asked(question)]

    def _on_task_processed(self, event: TaskProcessed) -> list[SiteEffect]:
        task = self.tasks.get(event.task)
        if task is None:
            return []  # closed while it was at work
        first = Epoch(event.epoch - len(event.earlier))
        asked = task.busy == len(event.earlier) + 1
        require(asked, f"stage {task.shape.name!r} was not asked to process epoch {event.epoch}")
        task.worked(event.seconds)
        effects: list[SiteEffect] = []
        for epoch, outputs in enumerate((*event.earlier, event.outputs), first):
            for exchange, bundles in outputs.items():
                effects += task.outputs[exchange].offer(Epoch(epoch), event.last, bundles)
        if event.last:
            require(first == task.finished + 1, f"epoch {first} was skipped")
            task.finished = event.epoch
            if task.needs is not None:
                task.needs.processed(event.epoch, event.needs)
            for consumer in task.inputs.values():
                effects += consumer.finish(event.epoch, self.connected)
            effects += self._delivered(task)
            effects += self._handovers(task)
            effects += task.caught_up(self.window)
            effects += task.retained(self.shape.levels)
        self._trim_records()
        return effects + self._next(task) + self._finish_site()

    def delivered(self) -> list[SiteEffect]:
        """How far the sinks are that this site leads, for a sequencer that may not know."""
        return [e for task in self.tasks.values() for e in self._delivered(task)]

    def _delivered(self, task: Replica) -> list[SiteEffect]:
        assert self.view is not None
        leads = self.view.group(task.key).led_by(self.site)
        if task.shape.kind != "sink" or not leads or task.finished == NO_EPOCH:
            return []
        return [ReportDelivered(task.key[0], task.finished)]

    def _next(self, task: Replica) -> list[SiteEffect]:
        """What the task can do now, if anything."""
        if task.busy or not task.installed or task.standby:
            return []
        if task.follower:
            return [*task.follow(self.records), *self._handovers(task)]
        order = task.next_epochs(self.records, self.recorded)
        return [order] if order is not None else []

    def _on_sink_durable(self, event: SinkDurable) -> list[SiteEffect]:
        task = self.tasks.get(event.task)
        if task is None or not task.installed or not task.follower or event.epoch <= task.finished:
            return []
        return [*task.adopt_checkpoint(event.epoch, self.connected), *self._handovers(task)]

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
        working = [u for u in self.tasks.values() if not u.standby]
        if any(not u.installed or (u.finished < self.last and not u.follower) for u in working):
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
        taking = 1 if self.shape.stages[stage].guard.follower else None
        return any(
            producer.received(GroupId(j), site) < last
            for j, group in enumerate(self.view.groups[stage])
            for site in group.replicas[:taking]
        )

    # --- making a new replica ---------------------------------------------------------------------

    def _on_catch_up_ordered(self, event: CatchUpOrdered) -> list[SiteEffect]:
        task = self.tasks.get(event.task)
        if task is None or not task.installed or event.joiner in task.handed:
            return []
        assert self.view is not None
        if event.joiner not in self.view.group(event.task).joining:
            return []  # it was given up meanwhile
        # What the producers let go of before they counted the new replica, this one has received.
        task.handovers[event.joiner] = task.received
        return self._handovers(task) if not task.busy else []

    def _handovers(self, task: Replica) -> list[SiteEffect]:
        assert self.view is not None
        return list(task.hand_over(self.view.group(task.key), self._stored))

    def _on_store_ordered(self, event: StoreOrdered) -> list[SiteEffect]:
        """Every task as it is after this epoch and no other: what some have of later epochs others
        would not know of."""
        assert self.view is not None
        self._stored = event.after
        effects: list[SiteEffect] = []
        for task in self.tasks.values():
            if not self.view.group(task.key).led_by(self.site):
                continue
            task.handovers[STORE] = event.epoch
            if task.finished + task.busy > event.epoch:
                del task.handovers[STORE]
                effects.append(ReportMissed(task.key, event.epoch))
            elif not task.busy:
                effects += self._handovers(task)
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
        task = self.tasks.get(event.task)
        if task is None or not task.installed or task.standby:
            return []
        assert self.view is not None
        task.checkpoint(self.view.group(task.key).standbys)
        return self._handovers(task) if not task.busy else []

    def _on_replica_installed(self, event: ReplicaInstalled) -> list[SiteEffect]:
        task = self.tasks.get(event.task)
        if task is None or (task.installed and not task.standby):
            return []
        if not task.installed:
            return self._install(task, event.epoch, event.needs, event.kept, event.gaps)
        task.install_outputs(event.epoch, event.kept, event.gaps, event.whole)
        return list(task.adopt_checkpoint(event.epoch, self.connected))

    def _install(
        self,
        task: Replica,
        epoch: Epoch,
        needs: Epoch,
        kept: Mapping[ExchangeId, Mapping[GroupId, list[Any]]],
        gaps: Mapping[ExchangeId, Mapping[GroupId, Gap]],
        log: Log | None = None,
    ) -> list[SiteEffect]:
        """The task's state is that after `epoch`: from now on it is a replica like any other."""
        assert self.view is not None
        task.installed, task.finished = True, epoch
        enough = len(self.view.group(task.key).replicas) >= task.shape.guard.replicas
        task.standby = enough and task.shape.guard.standbys > 0
        task.follower = task.shape.guard.follower
        self._add_ends(task, epoch, needs, log)
        upto = epoch if task.follower else max(self.recorded, epoch)
        task.replay(None if task.standby else upto, self.window)
        task.install_outputs(epoch, kept, gaps)
        for producer in task.outputs.values():
            self._count_takers(producer)
        effects = self._take_early()
        for consumer in task.inputs.values():
            effects += self._follow_producers(consumer)
        if task.shape.kind == "source":
            effects.append(AskRecords(epoch))
        effects.append(ReportReplica(task.key, "installed"))
        effects += [*self._next(task), *task.caught_up(self.window)]
        return effects + self._finish_site()

    # --- rebuilding a task ---------------------------------------------------------------------

    def _search(self, task: Replica) -> list[SiteEffect]:
        """Ask all replicas of the producers of a task that is to be rebuilt what they have."""
        assert self.view is not None
        group = self.view.group(task.key)
        if task.installed or group.replicas or self.site not in group.joining:
            task.search = None
            return []
        task.search = task.search or Search()
        asked = [
            AskLog(site, exchange, producer, task.key[1], task.joined_view)
            for exchange, producer, site in self._sources(task)
            if (exchange, producer, site) not in task.search.told and site in self.connected
        ]
        return [*asked, *self._rebuild(task)]

    def _sources(self, task: Replica) -> dict[Source, None]:
        """All replicas of its producers; none while one of them has no replica itself."""
        assert self.view is not None
        found: dict[Source, None] = {}
        for exchange in task.shape.inputs:
            for i, group in enumerate(self.view.groups[self.shape.producer_of[exchange]]):
                if not group.replicas:
                    return {}
                found |= {(exchange, GroupId(i), site): None for site in group.replicas}
        return found

    def _on_log_asked(self, event: LogAsked) -> list[SiteEffect]:
        producer = self.producers.get((event.exchange, event.producer))
        counted = producer.joined_view(event.consumer, event.site) if producer else -1
        if producer is None or counted < event.joined_view:
            self._asked[event.exchange, event.producer, event.consumer, event.site] = event
            return []
        if counted > event.joined_view:
            return []
        asked = (event.exchange, event.producer, event.consumer, event.joined_view)
        return [TellLog(event.site, *asked, producer.log(event.consumer))]

    def _on_log_told(self, event: LogTold) -> list[SiteEffect]:
        key = (self.shape.consumer_of[event.exchange], event.consumer)
        task = self.tasks.get(key)
        if task is None or task.search is None or task.joined_view != event.joined_view:
            return []
        source = (event.exchange, event.producer, event.site)
        task.search.told[source] = event.log
        return self._rebuild(task)

    def _rebuild(self, task: Replica) -> list[SiteEffect]:
        """Begin, if it is known from where on."""
        log = task.search.begins(self._sources(task)) if task.search is not None else None
        if log is None:
            return []
        task.search = None
        if log.credit < 1:
            return [ReportReplica(task.key, "impossible")]
        self.recorded = max(self.recorded, log.upto)
        right = max(log.after, log.line.get(task.key, NO_EPOCH))
        makes = Log(right, log.upto, log.credit - 1, log.line)
        nothing: dict[ExchangeId, dict[GroupId, Any]] = {x: {} for x in task.shape.outputs}
        effects = self._install(task, log.after, log.after, nothing, nothing, makes)
        return [BeginTask(task.key, log.after == self.begun), *effects]

    def _on_retention_ordered(self, event: RetentionOrdered) -> list[SiteEffect]:
        """Producers have let go of nothing that a task had not received by now."""
        assert self.view is not None
        effects: list[SiteEffect] = []
        for task in self.tasks.values() if event.number == self.view.number else ():
            if task.installed and task.shape.guard.rebuild_level < task.shape.guard.level:
                task.retain_upto = task.received
                effects += task.retained(self.shape.levels)
        return effects

    def slowest(self) -> tuple[SiteId, int] | None:
        """The replica elsewhere that most is kept for here, and how many bytes."""
        found = [p.slowest(self._standbys_of(p)) for p in self.producers.values()]
        return max((f for f in found if f is not None), key=lambda f: f[1], default=None)

    def _standbys_of(self, producer: Producer) -> dict[GroupId, tuple[SiteId, ...]]:
        """Those that are meant to be behind. If a task is rebuilt from what is kept, it is behind
        at first, and letting it go would not let go any of that."""
        assert self.view is not None
        stage = self.shape.consumer_of[producer.exchange]
        guard = self.shape.stages[stage].guard
        return {
            GroupId(j): c.all
            if guard.rebuild_level
            else c.standbys + (c.replicas[1:] if guard.follower else ())
            for j, c in enumerate(self.view.groups[stage])
        }

    def check_invariants(self) -> None:
        for producer in self.producers.values():
            producer.check_invariants()
        for consumer in self.consumers.values():
            consumer.check_invariants()
