"""The dataflow of one site: when each of its stages may process which epoch.

The machine joins the ends of all exchanges that touch the site. It gives one order per stage at a
time, so a stage's epochs are processed strictly one after another; which of several stages goes
first is for the runtime to choose.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, assert_never

from holdfast.core.effects import (
    IngestEpoch,
    ProcessBundles,
    ReportDelivered,
    ReportFinished,
    SiteEffect,
)
from holdfast.core.events import (
    AckArrived,
    BundleArrived,
    RecordArrived,
    SiteEvent,
    StageProcessed,
)
from holdfast.core.exchange import Consumer, Producer
from holdfast.core.ids import NO_EPOCH, Epoch, ExchangeId, SiteId, StageId
from holdfast.core.layout import Layout, Shape, StageShape
from holdfast.core.records import EpochRecord
from holdfast.errors import ProtocolError, require


@dataclass(slots=True)
class _Stage:
    """A stage's part on this site."""

    shape: StageShape
    finished: Epoch = NO_EPOCH
    busy: bool = False


class Dataflow:
    """The machine: `handle` takes an event and returns the orders that follow from it."""

    def __init__(self, site: SiteId, shape: Shape, layout: Layout, window: int) -> None:
        require(window >= 1, "a consumer must have room for the epoch it processes next")
        self.site = site
        self.stages: dict[StageId, _Stage] = {}
        self.producers: dict[ExchangeId, Producer] = {}
        self.consumers: dict[ExchangeId, Consumer] = {}
        self._records: dict[Epoch, EpochRecord] = {}
        self._recorded = NO_EPOCH
        self._last: Epoch | None = None
        self._reported = False
        self._consumer_of = shape.consumer_of
        for stage in shape.stages:
            if layout.partitions_at(stage.id, site):
                self.stages[stage.id] = _Stage(stage)
                self._add_ends(stage, shape, layout, window)

    def _add_ends(self, stage: StageShape, shape: Shape, layout: Layout, window: int) -> None:
        for exchange in stage.outputs:
            sites = layout.sites_of(shape.consumer_of[exchange])
            self.producers[exchange] = Producer(exchange, sites, Epoch(NO_EPOCH + window))
        for exchange in stage.inputs:
            sites = layout.sites_of(shape.producer_of[exchange])
            self.consumers[exchange] = Consumer(exchange, sites, window)

    def handle(self, event: SiteEvent) -> list[SiteEffect]:
        match event:
            case RecordArrived():
                return self._on_record_arrived(event)
            case BundleArrived():
                return self._on_bundle_arrived(event)
            case AckArrived():
                return self._on_ack_arrived(event)
            case StageProcessed():
                return self._on_stage_processed(event)
        assert_never(event)

    def _on_record_arrived(self, event: RecordArrived) -> list[SiteEffect]:
        record = event.record
        if record.epoch <= self._recorded:
            return []
        if record.epoch != self._recorded + 1:
            raise ProtocolError(f"record of epoch {record.epoch} after that of {self._recorded}")
        self._recorded = record.epoch
        self._records[record.epoch] = record
        if record.last:
            self._last = record.epoch
        effects = [
            e for s in self.stages.values() if s.shape.kind == "source" for e in self._next(s)
        ]
        self._trim_records()
        return effects + self._finish_site()

    def _on_bundle_arrived(self, event: BundleArrived) -> list[SiteEffect]:
        consumer = self.consumers.get(event.exchange)
        if consumer is None:
            raise ProtocolError(f"site {self.site} is no consumer of exchange {event.exchange}")
        if not consumer.on_bundle(event):
            return [consumer.ack(event.producer)]  # it came twice; the ack may have been lost
        return self._next(self.stages[self._consumer_of[event.exchange]])

    def _on_ack_arrived(self, event: AckArrived) -> list[SiteEffect]:
        producer = self.producers.get(event.exchange)
        if producer is None:
            raise ProtocolError(f"site {self.site} is no producer of exchange {event.exchange}")
        return list(producer.on_ack(event))

    def _on_stage_processed(self, event: StageProcessed) -> list[SiteEffect]:
        stage = self.stages[event.stage]
        require(stage.busy, f"stage {stage.shape.name!r} was not asked to process anything")
        stage.busy = False
        effects: list[SiteEffect] = []
        for exchange, bundles in event.outputs.items():
            effects += self.producers[exchange].offer(event.epoch, event.last, bundles)
        if event.last:
            require(event.epoch == stage.finished + 1, f"epoch {event.epoch} was skipped")
            stage.finished = event.epoch
            for exchange in stage.shape.inputs:
                effects += self.consumers[exchange].finish(event.epoch)
            if stage.shape.kind == "sink":
                effects.append(ReportDelivered(event.stage, event.epoch))
        self._trim_records()
        return effects + self._next(stage) + self._finish_site()

    def _next(self, stage: _Stage) -> list[SiteEffect]:
        """What the stage can do now, if anything."""
        if stage.busy:
            return []
        epoch = Epoch(stage.finished + 1)
        if stage.shape.kind == "source":
            if epoch not in self._records:
                return []
            stage.busy = True
            return [IngestEpoch(stage.shape.id, self._records[epoch])]
        consumers = [self.consumers[x] for x in stage.shape.inputs]
        if all(c.complete(epoch) for c in consumers):
            stage.busy = True
            return [ProcessBundles(stage.shape.id, epoch, True, self._take(stage, epoch))]
        if stage.shape.ordered:
            return []
        # Arrival merging takes what is there, be it of a later epoch: what it causes belongs to
        # the epoch that the stage has reached.
        waiting = sorted({e for c in consumers for e in c.waiting()})
        if not waiting:
            return []
        stage.busy = True
        return [ProcessBundles(stage.shape.id, epoch, False, self._take(stage, waiting[0]))]

    def _take(self, stage: _Stage, epoch: Epoch) -> dict[ExchangeId, list[Any]]:
        return {x: self.consumers[x].take(epoch) for x in stage.shape.inputs}

    def _trim_records(self) -> None:
        sources = [s.finished for s in self.stages.values() if s.shape.kind == "source"]
        done = min(sources, default=self._recorded)
        for epoch in [e for e in self._records if e <= done]:
            del self._records[epoch]

    def _finish_site(self) -> list[SiteEffect]:
        """Once, when nothing is left to do here."""
        if self._reported or self._last is None:
            return []
        if any(s.finished < self._last for s in self.stages.values()):
            return []
        self._reported = True
        return [ReportFinished()]

    def check_invariants(self) -> None:
        for producer in self.producers.values():
            producer.check_invariants()
        for consumer in self.consumers.values():
            consumer.check_invariants()
