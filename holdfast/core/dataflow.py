"""The dataflow of one site: when each of its units may process which epoch.

The machine joins the ends of all exchanges that touch the site. It gives one order per unit at a
time, so a unit's epochs are processed strictly one after another; which of several units goes
first is for the runtime to choose.

A unit that is joining has no state yet and does nothing. The unit it is copied from (its donor)
hands over at an epoch boundary that everything its producers have let go of lies before: they keep
the rest, because they count the new replica since the view in which it appeared. One that joins
where there is no replica is made anew from its input (see `holdfast.core.upstream`).
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any, assert_never

from holdfast.core.effects import (
    AbandonHandOver,
    AskLog,
    AskRecords,
    BeginUnit,
    CloseUnit,
    OpenUnit,
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
    SinkDurable,
    SiteEvent,
    StockOrdered,
    StoreOrdered,
    UnitProcessed,
    ViewCommitted,
)
from holdfast.core.exchange import Consumer, Producer
from holdfast.core.ids import NO_EPOCH, STORE, CohortId, Epoch, ExchangeId, SiteId, Unit
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
        """The flow begins after the epoch `begun`: its units have been there before."""
        require(window >= 1, "a consumer must have room for the epoch it processes next")
        self.site, self.shape, self.window, self.begun = site, shape, window, begun
        self.view: View | None = None
        self.units: dict[Unit, Replica] = {}
        self.producers: dict[tuple[ExchangeId, CohortId], Producer] = {}
        self.consumers: dict[tuple[ExchangeId, CohortId], Consumer] = {}
        self.records: dict[Epoch, EpochRecord] = {}
        self.recorded = begun
        """The latest epoch of which it is known that it was recorded."""
        self.connected = {site}
        self._early: dict[tuple[ExchangeId, CohortId, CohortId, SiteId], AckArrived] = {}
        self._asked: dict[tuple[ExchangeId, CohortId, CohortId, SiteId], LogAsked] = {}
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
            case UnitProcessed():
                return self._on_unit_processed(event)
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
            case StockOrdered():
                return self._on_stock_ordered(event)
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
        held = view.units_at(self.site)
        for key, unit in list(self.units.items()):
            if key not in held or view.cohort(key).since_of(self.site) != unit.since:
                effects += self._close(key)
        for key in held:
            if key not in self.units:
                cohort = view.cohort(key)
                effects += self._open(key, installed=self.site in cohort.replicas + cohort.standing)
        for unit in self.units.values():
            unit.shape, unit.stock = self.shape.stages[unit.key[0]], None
            self._stand(unit)
            if unit.installed:
                self._guard(unit)
            cohort = view.cohort(unit.key)
            gone = unit.keep_handovers(cohort, cohort.led_by(self.site))
            effects += [AbandonHandOver(unit.key, site) for site in gone]
        for producer in self.producers.values():
            self._count_takers(producer)
        effects += self._take_early()
        for consumer in self.consumers.values():
            effects += self._follow_producers(consumer)
        for unit in self.units.values():
            effects += self._search(unit)
        effects += self.delivered()
        for unit in self.units.values():
            effects += [*self._next(unit), *unit.caught_up(self.window)]
        if view.number:  # the last one, too, must reach sites that have no source
            effects.append(AskRecords(self.lacks_records()))
        return effects + self._finish_site()

    def lacks_records(self) -> Epoch | None:
        """After which epoch records may be of use here; None: only the latest."""
        sources = [u for u in self.units.values() if u.shape.kind == "source" and u.installed]
        return min((u.finished for u in sources), default=None)

    def records_after(self, epoch: Epoch | None) -> list[EpochRecord]:
        """For somebody who lacks them; see `lacks_records`."""
        if epoch is None:
            return [self.records[max(self.records)]] if self.records else []
        return [self.records[e] for e in sorted(self.records) if e > epoch]

    def _stand(self, unit: Replica) -> None:
        """Compute from now on, or do not."""
        assert self.view is not None
        cohort = self.view.cohort(unit.key)
        stood = unit.stands
        unit.stands = self.site in cohort.standing or (stood and self.site in cohort.joining)
        if stood and not unit.stands:
            unit.needs = None
            unit.replay(max(self.recorded, unit.finished), self.window)
        unit.lazy = unit.shape.guard.lazy and not cohort.led_by(self.site)
        for consumer in unit.inputs.values():
            consumer.stands = unit.stands or unit.lazy

    def _guard(self, unit: Replica) -> None:
        """Keep, and say, what the protection of the unit and of its neighbours takes."""
        if not unit.shape.guard.level:
            unit.needs = None
        elif unit.needs is None:  # what its state comes from was not followed
            unit.needs = Needs(unit.finished, NO_EPOCH)
        for exchange, producer in unit.outputs.items():
            guard = self.shape.stages[self.shape.consumer_of[exchange]].guard
            producer.level, producer.complete = guard.level, guard.anew
            producer.alike = unit.shape.guard.comparable
        for exchange, consumer in unit.inputs.items():
            consumer.alike = self.shape.stages[self.shape.producer_of[exchange]].guard.alike
            consumer.levels = partial(unit.levels, self.shape.levels)
            consumer.lines = partial(unit.lines, self.shape.levels)

    def _open(self, key: Unit, installed: bool) -> list[SiteEffect]:
        assert self.view is not None
        since = self.view.cohort(key).since_of(self.site)
        finished = self.begun if installed else NO_EPOCH
        self.units[key] = Replica(key, self.shape.stages[key[0]], installed, since, finished)
        self.units[key].stands = self.site in self.view.cohort(key).standing
        if installed:
            self._add_ends(self.units[key], finished, finished)
            cohort = self.view.cohort(key)
            alike = [s for s in cohort.standing if cohort.since_of(s) == since]
            self.units[key].given = dict.fromkeys(alike, finished)
        return [OpenUnit(key, self.view)]

    def _close(self, key: Unit) -> list[SiteEffect]:
        unit = self.units.pop(key)
        for exchange in unit.outputs:
            del self.producers[exchange, key[1]]
        for exchange in unit.inputs:
            del self.consumers[exchange, key[1]]
        return [CloseUnit(key)]

    def _add_ends(
        self, unit: Replica, finished: Epoch, needs: Epoch, log: Log | None = None
    ) -> None:
        cohort = unit.key[1]
        unit.needs = Needs(finished, needs)
        for exchange in unit.shape.outputs:
            level = self.shape.stages[self.shape.consumer_of[exchange]].guard.level
            producer = Producer(exchange, cohort, level, finished, log)
            unit.outputs[exchange] = self.producers[exchange, cohort] = producer
        for exchange in unit.shape.inputs:
            consumer = Consumer(exchange, cohort, self.window, finished, unit.since)
            consumer.stands = unit.stands or unit.lazy
            unit.inputs[exchange] = self.consumers[exchange, cohort] = consumer
        self._guard(unit)

    def _count_takers(self, producer: Producer) -> None:
        assert self.view is not None
        cohorts = self.view.cohorts[self.shape.consumer_of[producer.exchange]]
        producer.on_view(
            {CohortId(j): {s: c.since_of(s) for s in c.all} for j, c in enumerate(cohorts)}
        )

    def _follow_producers(self, consumer: Consumer) -> list[SiteEffect]:
        assert self.view is not None
        stage = self.shape.producer_of[consumer.exchange]
        cohorts = self.view.cohorts[stage]
        prefer = {
            CohortId(i): self.site
            for i in range(len(cohorts))
            if self._is_current((stage, CohortId(i)), consumer)
        }
        working = 1 if self.shape.stages[stage].guard.lazy else None
        return list(
            consumer.on_view(
                {CohortId(i): c.replicas[:working] for i, c in enumerate(cohorts)},
                {
                    CohortId(i): (c.replicas[working:] if working else ()) + c.joining
                    for i, c in enumerate(cohorts)
                },
                prefer,
                self.connected,
            )
        )

    def _is_current(self, key: Unit, consumer: Consumer) -> bool:
        """Whether this site has a replica of the producer that is not behind the one we take
        from."""
        unit = self.units.get(key)
        if unit is None or not unit.installed or unit.stands:
            return False
        return unit.finished >= consumer.received.get(key[1], consumer.finished)

    def _on_peer_connected(self, event: PeerConnected) -> list[SiteEffect]:
        self.connected.add(event.site)
        effects: list[SiteEffect] = [
            e for c in self.consumers.values() for e in c.on_connected(event.site, self.connected)
        ]
        for unit in self.units.values():
            effects += self._search(unit)
        return effects

    def _on_peer_lost(self, event: PeerLost) -> list[SiteEffect]:
        self.connected.discard(event.site)
        self._early = {key: ack for key, ack in self._early.items() if key[3] != event.site}
        for unit in self.units.values():  # some of it may not have arrived
            unit.given.pop(event.site, None)
        for producer in self.producers.values():
            producer.on_lost(event.site)
        return [e for c in self.consumers.values() for e in c.on_lost(event.site, self.connected)]

    def hurry(self) -> list[SiteEffect]:
        """Units that have something to do and have not moved since the last call: take what they
        lack from another replica, in case the one they take from is slow."""
        effects: list[SiteEffect] = []
        for unit in self.units.values():
            stuck = unit.works and not unit.busy and unit.finished == unit.hurried
            if stuck and unit.finished < self.recorded:
                for consumer in unit.inputs.values():
                    effects += consumer.turn(self.connected)
            unit.hurried = unit.finished
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
        sources = [u for u in self.units.values() if u.shape.kind == "source"]
        effects = [e for u in sources for e in self._next(u)]
        self._trim_records()
        return effects + self._finish_site()

    def _on_bundle_arrived(self, event: BundleArrived) -> list[SiteEffect]:
        consumer = self.consumers.get((event.exchange, event.consumer))
        if consumer is None or consumer.since != event.since or not consumer.on_bundle(event):
            return []  # for a replica that is no more, or it came twice
        return self._next(self.units[self.shape.consumer_of[event.exchange], event.consumer])

    def _on_ack_arrived(self, event: AckArrived) -> list[SiteEffect]:
        producer = self.producers.get((event.exchange, event.producer))
        counted = producer.since(event.consumer, event.site) if producer else -1
        if producer is None or counted < event.since:
            # From a site that acts on a later view than this one, or for a replica not in place
            # yet.
            key = (event.exchange, event.producer, event.consumer, event.site)
            self._early[key] = event
            return []
        if counted > event.since:
            return []  # from a replica that was there before
        effects: list[SiteEffect] = list(producer.on_ack(event))
        unit = self.units[self.shape.producer_of[event.exchange], event.producer]
        if unit.lazy:
            effects += self._next(unit)
        return effects + self._finish_site()

    def _take_early(self) -> list[SiteEffect]:
        """What came for a view or a replica that is in place only now."""
        early, self._early = self._early, {}
        asked, self._asked = self._asked, {}
        effects = [e for ack in early.values() for e in self._on_ack_arrived(ack)]
        return effects + [e for question in asked.values() for e in self._on_log_asked(question)]

    def _on_unit_processed(self, event: UnitProcessed) -> list[SiteEffect]:
        unit = self.units.get(event.unit)
        if unit is None:
            return []  # closed while it was at work
        first = Epoch(event.epoch - len(event.earlier))
        asked = unit.busy == len(event.earlier) + 1
        require(asked, f"stage {unit.shape.name!r} was not asked to process epoch {event.epoch}")
        unit.worked(event.seconds)
        effects: list[SiteEffect] = []
        for epoch, outputs in enumerate((*event.earlier, event.outputs), first):
            for exchange, bundles in outputs.items():
                effects += unit.outputs[exchange].offer(Epoch(epoch), event.last, bundles)
        if event.last:
            require(first == unit.finished + 1, f"epoch {first} was skipped")
            unit.finished = event.epoch
            if unit.needs is not None:
                unit.needs.processed(event.epoch, event.needs)
            for consumer in unit.inputs.values():
                effects += consumer.finish(event.epoch, self.connected)
            effects += self._delivered(unit)
            effects += self._handovers(unit)
            effects += unit.caught_up(self.window)
            effects += unit.stocked(self.shape.levels)
        self._trim_records()
        return effects + self._next(unit) + self._finish_site()

    def delivered(self) -> list[SiteEffect]:
        """How far the sinks are that this site leads, for a sequencer that may not know."""
        return [e for unit in self.units.values() for e in self._delivered(unit)]

    def _delivered(self, unit: Replica) -> list[SiteEffect]:
        assert self.view is not None
        leads = self.view.cohort(unit.key).led_by(self.site)
        if unit.shape.kind != "sink" or not leads or unit.finished == NO_EPOCH:
            return []
        return [ReportDelivered(unit.key[0], unit.finished)]

    def _next(self, unit: Replica) -> list[SiteEffect]:
        """What the unit can do now, if anything."""
        if unit.busy or not unit.installed or unit.stands:
            return []
        if unit.lazy:
            return [*unit.follow(self.records), *self._handovers(unit)]
        order = unit.next_epochs(self.records, self.recorded)
        return [order] if order is not None else []

    def _on_sink_durable(self, event: SinkDurable) -> list[SiteEffect]:
        unit = self.units.get(event.unit)
        if unit is None or not unit.installed or not unit.lazy or event.epoch <= unit.finished:
            return []
        return [*unit.stand_at(event.epoch, self.connected), *self._handovers(unit)]

    def _trim_records(self) -> None:
        sources = [u.finished for u in self.units.values() if u.shape.kind == "source"]
        done = min([*sources, Epoch(self.recorded - HISTORY)])
        # They come in order, almost always: one that does not goes when it is the first.
        while self.records and (oldest := next(iter(self.records))) <= done:
            del self.records[oldest]

    def _finish_site(self) -> list[SiteEffect]:
        """Once in a view, when nothing is left to do here."""
        if self._reported or self.last is None or self.view is None:
            return []
        working = [u for u in self.units.values() if not u.stands]
        if any(not u.installed or (u.finished < self.last and not u.lazy) for u in working):
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
        taking = 1 if self.shape.stages[stage].guard.lazy else None
        return any(
            producer.received(CohortId(j), site) < last
            for j, cohort in enumerate(self.view.cohorts[stage])
            for site in cohort.replicas[:taking]
        )

    # --- making a new replica ---------------------------------------------------------------------

    def _on_catch_up_ordered(self, event: CatchUpOrdered) -> list[SiteEffect]:
        unit = self.units.get(event.unit)
        if unit is None or not unit.installed or event.joiner in unit.handed:
            return []
        assert self.view is not None
        if event.joiner not in self.view.cohort(event.unit).joining:
            return []  # it was given up meanwhile
        # What the producers let go of before they counted the new replica, this one has received.
        unit.handovers[event.joiner] = unit.received
        return self._handovers(unit) if not unit.busy else []

    def _handovers(self, unit: Replica) -> list[SiteEffect]:
        assert self.view is not None
        return list(unit.hand_over(self.view.cohort(unit.key), self._stored))

    def _on_store_ordered(self, event: StoreOrdered) -> list[SiteEffect]:
        """Every unit as it is after this epoch and no other: what some have of later epochs others
        would not know of."""
        assert self.view is not None
        self._stored = event.after
        effects: list[SiteEffect] = []
        for unit in self.units.values():
            if not self.view.cohort(unit.key).led_by(self.site):
                continue
            unit.handovers[STORE] = event.epoch
            if unit.finished + unit.busy > event.epoch:
                del unit.handovers[STORE]
                effects.append(ReportMissed(unit.key, event.epoch))
            elif not unit.busy:
                effects += self._handovers(unit)
        return effects

    def is_covered(self, key: Unit, epoch: int) -> bool:
        """Whether all that stand by for the consumers of a unit have checkpoints after `epoch`."""
        return all(
            producer.stable > epoch
            for x, producer in self.units[key].outputs.items()
            if self.shape.stages[self.shape.consumer_of[x]].guard.standbys
        )

    def _on_checkpoint_due(self, event: CheckpointDue) -> list[SiteEffect]:
        unit = self.units.get(event.unit)
        if unit is None or not unit.installed or unit.stands:
            return []
        assert self.view is not None
        unit.checkpoint(self.view.cohort(unit.key).standing)
        return self._handovers(unit) if not unit.busy else []

    def _on_replica_installed(self, event: ReplicaInstalled) -> list[SiteEffect]:
        unit = self.units.get(event.unit)
        if unit is None or (unit.installed and not unit.stands):
            return []
        if not unit.installed:
            return self._install(unit, event.epoch, event.needs, event.kept, event.gaps)
        unit.install_outputs(event.epoch, event.kept, event.gaps, event.whole)
        return list(unit.stand_at(event.epoch, self.connected))

    def _install(
        self,
        unit: Replica,
        epoch: Epoch,
        needs: Epoch,
        kept: Mapping[ExchangeId, Mapping[CohortId, list[Any]]],
        gaps: Mapping[ExchangeId, Mapping[CohortId, Gap]],
        log: Log | None = None,
    ) -> list[SiteEffect]:
        """The unit's state is that after `epoch`: from now on it is a replica like any other."""
        assert self.view is not None
        unit.installed, unit.finished = True, epoch
        enough = len(self.view.cohort(unit.key).replicas) >= unit.shape.guard.replicas
        unit.stands = enough and unit.shape.guard.standbys > 0
        unit.lazy = unit.shape.guard.lazy
        self._add_ends(unit, epoch, needs, log)
        upto = epoch if unit.lazy else max(self.recorded, epoch)
        unit.replay(None if unit.stands else upto, self.window)
        unit.install_outputs(epoch, kept, gaps)
        for producer in unit.outputs.values():
            self._count_takers(producer)
        effects = self._take_early()
        for consumer in unit.inputs.values():
            effects += self._follow_producers(consumer)
        if unit.shape.kind == "source":
            effects.append(AskRecords(epoch))
        effects.append(ReportReplica(unit.key, "installed"))
        effects += [*self._next(unit), *unit.caught_up(self.window)]
        return effects + self._finish_site()

    # --- making a unit anew ---------------------------------------------------------------------

    def _search(self, unit: Replica) -> list[SiteEffect]:
        """Ask all replicas of the producers of a unit that is to be made anew what they have."""
        assert self.view is not None
        cohort = self.view.cohort(unit.key)
        if unit.installed or cohort.replicas or self.site not in cohort.joining:
            unit.search = None
            return []
        unit.search = unit.search or Search()
        asked = [
            AskLog(site, exchange, producer, unit.key[1], unit.since)
            for exchange, producer, site in self._sources(unit)
            if (exchange, producer, site) not in unit.search.told and site in self.connected
        ]
        return [*asked, *self._make_anew(unit)]

    def _sources(self, unit: Replica) -> dict[Source, None]:
        """All replicas of its producers; none while one of them has no replica itself."""
        assert self.view is not None
        found: dict[Source, None] = {}
        for exchange in unit.shape.inputs:
            for i, cohort in enumerate(self.view.cohorts[self.shape.producer_of[exchange]]):
                if not cohort.replicas:
                    return {}
                found |= {(exchange, CohortId(i), site): None for site in cohort.replicas}
        return found

    def _on_log_asked(self, event: LogAsked) -> list[SiteEffect]:
        producer = self.producers.get((event.exchange, event.producer))
        counted = producer.since(event.consumer, event.site) if producer else -1
        if producer is None or counted < event.since:
            self._asked[event.exchange, event.producer, event.consumer, event.site] = event
            return []
        if counted > event.since:
            return []
        asked = (event.exchange, event.producer, event.consumer, event.since)
        return [TellLog(event.site, *asked, producer.log(event.consumer))]

    def _on_log_told(self, event: LogTold) -> list[SiteEffect]:
        key = (self.shape.consumer_of[event.exchange], event.consumer)
        unit = self.units.get(key)
        if unit is None or unit.search is None or unit.since != event.since:
            return []
        source = (event.exchange, event.producer, event.site)
        unit.search.told[source] = event.log
        return self._make_anew(unit)

    def _make_anew(self, unit: Replica) -> list[SiteEffect]:
        """Begin, if it is known from where on."""
        log = unit.search.begins(self._sources(unit)) if unit.search is not None else None
        if log is None:
            return []
        unit.search = None
        if log.credit < 1:
            return [ReportReplica(unit.key, "impossible")]
        self.recorded = max(self.recorded, log.upto)
        right = max(log.after, log.line.get(unit.key, NO_EPOCH))
        makes = Log(right, log.upto, log.credit - 1, log.line)
        nothing: dict[ExchangeId, dict[CohortId, Any]] = {x: {} for x in unit.shape.outputs}
        effects = self._install(unit, log.after, log.after, nothing, nothing, makes)
        return [BeginUnit(unit.key, log.after == self.begun), *effects]

    def _on_stock_ordered(self, event: StockOrdered) -> list[SiteEffect]:
        """Producers have let go of nothing that a unit had not received by now."""
        assert self.view is not None
        effects: list[SiteEffect] = []
        for unit in self.units.values() if event.number == self.view.number else ():
            if unit.installed and unit.shape.guard.anew < unit.shape.guard.level:
                unit.stock = unit.received
                effects += unit.stocked(self.shape.levels)
        return effects

    def slowest(self) -> tuple[SiteId, int] | None:
        """The replica elsewhere that most is kept for here, and how many bytes."""
        found = [p.slowest(self._standing(p)) for p in self.producers.values()]
        return max((f for f in found if f is not None), key=lambda f: f[1], default=None)

    def _standing(self, producer: Producer) -> dict[CohortId, tuple[SiteId, ...]]:
        """Those that are meant to be behind. If a unit is made anew from what is kept, it is behind
        at first, and letting it go would not let go any of that."""
        assert self.view is not None
        stage = self.shape.consumer_of[producer.exchange]
        guard = self.shape.stages[stage].guard
        return {
            CohortId(j): c.all
            if guard.anew
            else c.standing + (c.replicas[1:] if guard.lazy else ())
            for j, c in enumerate(self.view.cohorts[stage])
        }

    def check_invariants(self) -> None:
        for producer in self.producers.values():
            producer.check_invariants()
        for consumer in self.consumers.values():
            consumer.check_invariants()
