"""All sites of a flow in one process, with a network that a seed decides.

The world runs the real machines and the real operators. Messages between two sites keep their
order, as on a connection; everything else (which message arrives next, which site works, when a
source is read) is drawn from one seeded generator, so a run can be repeated exactly. Single stages
can be stalled, to see that nothing else depends on them but what must.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import (
    IngestEpoch,
    ProcessBundles,
    ReportDelivered,
    ReportFinished,
    SendAck,
    SendBundle,
    SiteEffect,
)
from holdfast.core.events import (
    AckArrived,
    BlocksAvailable,
    BundleArrived,
    DrainRequested,
    EpochDelivered,
    RecordArrived,
    SequencerEvent,
    SiteEvent,
    SplitEnded,
)
from holdfast.core.ids import SiteId, StageId
from holdfast.core.layout import place
from holdfast.core.records import EpochRecord
from holdfast.core.sequencer import Sequencer
from holdfast.errors import InvariantError
from holdfast.flow.graph import Flow
from holdfast.flow.options import Options
from holdfast.flow.plan import plan, shape
from holdfast.flow.sinks import SinkWriter
from holdfast.site import bundles
from holdfast.site.stages import SiteStages

Order = IngestEpoch | ProcessBundles


@dataclass(eq=False)
class _Site:
    stages: SiteStages
    dataflow: Dataflow
    orders: list[Order]
    finished: bool = False


class _Collected(SinkWriter):
    def __init__(self, into: list[tuple[int, pa.RecordBatch]]) -> None:
        self._into = into

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        if batch.num_rows:
            self._into.append((epoch, batch))


class World:
    """A flow on `sites` simulated sites. `results` has what each sink got, by epoch."""

    def __init__(
        self, flow: Flow, *, sites: int = 2, seed: int = 0, options: Options | None = None
    ) -> None:
        self.options = options or Options()
        self.plan = plan(flow)
        self.random = random.Random(seed)
        self.results: dict[str, list[tuple[int, pa.RecordBatch]]] = {}
        self.records: list[EpochRecord] = []
        self.stalled: Callable[[SiteId, Order], bool] = lambda site, order: False
        self.steps = 0
        shaped = shape(self.plan, self.options.partitions)
        ids = [SiteId(i) for i in range(sites)]
        self.layout = place(shaped, ids)
        self.sites = {i: self._make_site(i, shaped) for i in ids}
        sinks = [StageId(s.id) for s in self.plan.sinks]
        self.sequencer = Sequencer(self.plan.splits, sinks, self.options.budget)
        # One queue for each ordered pair of sites, the sequencer's messages to a site included.
        self.network: dict[tuple[SiteId, SiteId], deque[SiteEvent | SequencerEvent]] = {}
        self._ended: set[tuple[int, int]] = set()

    def _make_site(self, site: SiteId, shaped: Any) -> _Site:
        stages = SiteStages(self.plan, self.layout, site, self.options)
        for stage in stages.writers:
            name = self.plan.stages[stage].name
            stages.writers[stage] = _Collected(self.results.setdefault(name, []))
        return _Site(stages, Dataflow(site, shaped, self.layout, self.options.window), [])

    # --- running --------------------------------------------------------------------------------

    def run(self, steps_max: int = 1_000_000) -> None:
        """Go on until every site has seen the last epoch through."""
        while not all(s.finished for s in self.sites.values()):
            if self.steps >= steps_max:
                raise InvariantError(f"no end after {steps_max} steps")
            if not self.step():
                raise InvariantError(f"stuck after {self.steps} steps: {self.describe()}")

    def settle(self) -> int:
        """Go on until nothing can move (because of what is stalled); how many steps it took."""
        begun = self.steps
        while self.step():
            pass
        return self.steps - begun

    def step(self) -> bool:
        """Let one thing happen, whichever the seed chooses; False if nothing can."""
        moves: list[Callable[[], None]] = []
        for site_id, site in self.sites.items():
            for order in site.orders:
                if not self.stalled(site_id, order):
                    moves.append(lambda s=site_id, o=order: self._work(s, o))  # type: ignore[misc]
            for split in site.stages.splits:
                key = (split.stage.id, split.number)
                room = split.rows_held < self.options.read_ahead_rows
                if room and key not in self._ended:
                    moves.append(lambda s=site_id, p=split: self._read(s, p))  # type: ignore[misc]
        for key, queue in self.network.items():
            if queue:
                moves.append(lambda k=key: self._deliver(*k))  # type: ignore[misc]
        if not moves:
            return False
        self.steps += 1
        self.random.choice(moves)()
        return True

    def drain(self) -> None:
        """Ask the sequencer to take no more rows."""
        self._sequence(DrainRequested())

    def describe(self) -> str:
        lines = []
        for site_id, site in self.sites.items():
            finished = {s.shape.name: s.finished for s in site.dataflow.stages.values()}
            lines.append(f"site {site_id}: finished {finished}, orders {len(site.orders)}")
        return "; ".join(lines)

    def result(self, sink: str) -> pa.Table:
        """All rows that a sink got, in the order in which it got them."""
        batches = [b for _, b in self.results[sink]]
        if not batches:
            schema = self.plan.stage_named(sink).inputs[0].schema
            return schema.empty_table()
        return pa.Table.from_batches(batches)

    # --- moves ----------------------------------------------------------------------------------

    def _read(self, site: SiteId, split: Any) -> None:
        rows = self.random.randint(1, self.options.block_rows)
        block = split.read(rows)
        source = StageId(split.stage.id)
        if block is not None:
            self._to_sequencer(site, BlocksAvailable(source, split.number, (block,)))
        elif split.ended:
            self._ended.add((split.stage.id, split.number))
            self._to_sequencer(site, SplitEnded(source, split.number))

    def _work(self, site_id: SiteId, order: Order) -> None:
        site = self.sites[site_id]
        site.orders.remove(order)
        self._handle(site_id, site.stages.carry_out(order))

    def _deliver(self, sender: SiteId, receiver: SiteId) -> None:
        event = self.network[sender, receiver].popleft()
        if isinstance(event, RecordArrived | BundleArrived | AckArrived):
            self._handle(receiver, event)
        else:
            self._sequence(event)  # type: ignore[arg-type]

    def _handle(self, site_id: SiteId, event: SiteEvent) -> None:
        site = self.sites[site_id]
        for effect in site.dataflow.handle(event):
            self._apply(site_id, site, effect)
        site.dataflow.check_invariants()

    def _apply(self, site_id: SiteId, site: _Site, effect: SiteEffect) -> None:
        match effect:
            case IngestEpoch() | ProcessBundles():
                site.orders.append(effect)
            case SendBundle():
                bundle = effect.bundle
                if effect.consumer != site_id:
                    bundle = self._over_the_wire(effect, site_id)
                self._send(
                    site_id,
                    effect.consumer,
                    BundleArrived(effect.exchange, effect.epoch, site_id, effect.last, bundle),
                )
            case SendAck():
                ack = AckArrived(
                    effect.exchange, site_id, effect.received, effect.stable, effect.credit
                )
                self._send(site_id, effect.producer, ack)
            case ReportDelivered():
                self._to_sequencer(site_id, EpochDelivered(effect.sink, effect.epoch))
            case ReportFinished():
                site.finished = True

    def _over_the_wire(self, effect: SendBundle, sender: SiteId) -> bundles.Frames:
        """What arrives has been encoded, decoded and checked against its digest."""
        message, body = bundles.encode(effect.bundle, effect.exchange, effect.epoch, effect.last)
        data = memoryview(b"".join(bytes(memoryview(part)) for part in body))  # type: ignore[arg-type]
        frames = bundles.decode(message, data, self.plan.exchanges[effect.exchange].schema)
        checkers = self.sites[effect.consumer].stages.checkers
        checkers[effect.exchange].check(frames, effect.epoch, sender)
        return frames

    def _send(self, sender: SiteId, receiver: SiteId, event: SiteEvent | SequencerEvent) -> None:
        self.network.setdefault((sender, receiver), deque()).append(event)

    def _to_sequencer(self, site: SiteId, event: SequencerEvent) -> None:
        self._send(site, self.layout.sequencer, event)

    def _sequence(self, event: SequencerEvent) -> None:
        for effect in self.sequencer.handle(event):
            self.records.append(effect.record)
            for site in self.sites:
                self._send(self.layout.sequencer, site, RecordArrived(effect.record))
        self.sequencer.check_invariants()
