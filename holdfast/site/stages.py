"""The stages of a flow on one site: carries out the orders of the dataflow machine."""

from __future__ import annotations

from typing import Any

import pyarrow as pa

from holdfast.core.effects import IngestEpoch, ProcessBundles
from holdfast.core.events import StageProcessed
from holdfast.core.ids import ExchangeId, SiteId
from holdfast.core.layout import Layout
from holdfast.flow.batches import Track, user_names
from holdfast.flow.execute import StageRunner
from holdfast.flow.options import Options
from holdfast.flow.plan import Plan, Stage
from holdfast.flow.sinks import SinkWriter
from holdfast.site.bundles import Checker, Frames, Router
from holdfast.site.feed import FedReader
from holdfast.site.ingress import Ingress, Split


class Counters:
    """What a stage has done on this site, for the live table."""

    __slots__ = ("calls", "epoch", "rows_in", "rows_out")

    def __init__(self) -> None:
        self.rows_in = self.rows_out = self.calls = 0
        self.epoch = -1


class SiteStages:
    """All stages of which this site holds partitions, with their state, sources and sinks."""

    def __init__(self, plan: Plan, layout: Layout, site: SiteId, options: Options) -> None:
        self.plan, self.layout, self.site = plan, layout, site
        self.runners: dict[int, StageRunner] = {}
        self.ingresses: dict[int, Ingress] = {}
        self.writers: dict[int, SinkWriter] = {}
        self._delivered: dict[int, list[str]] = {}  # by sink stage: the columns that it gets
        self.routers: dict[int, Router] = {}
        self.checkers: dict[int, Checker] = {}
        self.counters: dict[int, Counters] = {}
        for stage in plan.stages:
            held = layout.partitions_at(stage.id, site)  # type: ignore[arg-type]
            if held:
                self._open(stage, held, options)

    def _open(self, stage: Stage, held: tuple[int, ...], options: Options) -> None:
        self.counters[stage.id] = Counters()
        self.runners[stage.id] = StageRunner(self.plan, stage, options.partitions)
        for exchange in stage.outputs:
            self.routers[exchange.id] = Router(exchange, self.layout, options.digests)
        for exchange in stage.inputs:
            router = Router(exchange, self.layout, options.digests)
            self.checkers[exchange.id] = Checker(router, self.site, stage.name)
        if stage.source is not None:
            splits = {}
            for number in held:
                fed = stage.source.fed
                reader = (
                    FedReader(stage.source.schema, stage.source.through)
                    if fed
                    else stage.source.open(number)
                )
                splits[number] = Split(stage, number, reader)
            self.ingresses[stage.id] = Ingress(self.plan, stage, splits)
        if stage.sink is not None:
            schema = stage.inputs[0].schema
            names = schema.names if stage.sink.with_order else user_names(schema)
            self._delivered[stage.id] = names
            columns = pa.schema([schema.field(n) for n in names])
            self.writers[stage.id] = stage.sink.open(stage.name, columns)

    @property
    def splits(self) -> list[Split]:
        return [s for i in self.ingresses.values() for s in i.splits.values()]

    def carry_out(self, order: IngestEpoch | ProcessBundles) -> StageProcessed:
        """Ingest or process; the answer has the output split by consumer site."""
        if isinstance(order, IngestEpoch):
            return self._ingest(order)
        if order.stage in self.writers:
            return self._write(order)
        return self._process(order)

    def _ingest(self, order: IngestEpoch) -> StageProcessed:
        batch, track = self.ingresses[order.stage].epoch(order.record)
        outputs = self.runners[order.stage].run_source(batch, order.record.epoch)
        self._count(order.stage, batch.num_rows, outputs, order.record.epoch)
        routed = self._route(outputs, track)
        return StageProcessed(order.stage, order.record.epoch, True, routed)

    def _process(self, order: ProcessBundles) -> StageProcessed:
        frames = [f for x in order.bundles for f in order.bundles[x]]
        track = Track.merged([f.track for f in frames])
        batches = [[f.batch for f in order.bundles[x]] for x in order.bundles]
        outputs = self.runners[order.stage].run_keyed(batches, track, order.epoch)
        self._count(order.stage, sum(f.batch.num_rows for f in frames), outputs, order.epoch)
        return StageProcessed(order.stage, order.epoch, order.last, self._route(outputs, track))

    def _write(self, order: ProcessBundles) -> StageProcessed:
        batches = [[f.batch for f in order.bundles[x]] for x in order.bundles]
        batch = self.runners[order.stage].merged(batches)[0].select(self._delivered[order.stage])
        writer = self.writers[order.stage]
        writer.write(order.epoch, batch)
        writer.commit(order.epoch)
        self._count(order.stage, batch.num_rows, {}, order.epoch)
        return StageProcessed(order.stage, order.epoch, order.last, {})

    def _route(
        self, outputs: dict[int, Any], track: Track
    ) -> dict[ExchangeId, dict[SiteId, Frames]]:
        return {ExchangeId(x): self.routers[x].split(b, track) for x, b in outputs.items()}

    def _count(self, stage: int, rows_in: int, outputs: dict[int, Any], epoch: int) -> None:
        counters = self.counters[stage]
        counters.calls += 1
        counters.rows_in += rows_in
        counters.rows_out += sum(b.num_rows for b in outputs.values())
        counters.epoch = epoch

    def figures(self) -> list[dict[str, Any]]:
        """One row for each stage held here."""
        return [self._stage_figures(stage) for stage in self.counters]

    def _stage_figures(self, stage: int) -> dict[str, Any]:
        counters, runner = self.counters[stage], self.runners[stage]
        operator = runner.operator
        return {
            "stage": self.plan.stages[stage].name,
            "kind": self.plan.stages[stage].kind,
            "partitions": len(self.layout.partitions_at(stage, self.site)),  # type: ignore[arg-type]
            "epoch": counters.epoch,
            "rows_in": counters.rows_in,
            "rows_out": counters.rows_out,
            "calls": counters.calls,
            "keys": operator.state_rows() if operator else 0,
            "state_bytes": operator.state_bytes() if operator else 0,
            "late_rows": operator.late_rows if operator else 0,
            "dead_rows": runner.dead_rows,
            "sink": self.writers[stage].report() if stage in self.writers else None,
        }

    def close(self) -> None:
        """The last epoch is through: make what the sinks wrote readable, let go of the sources."""
        for writer in self.writers.values():
            writer.close()
        for split in self.splits:
            split.reader.close()
