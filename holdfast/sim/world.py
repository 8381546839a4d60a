"""All sites of a flow in one process, with a network and faults that a seed decides.

The world runs the real nodes: their machines, operators, messages and controller. Messages between
two sites keep their order, as on a connection; everything else (which message arrives next, which
site works, when a source is read, when a timer fires) is drawn from one seeded generator, so a run
can be repeated exactly. Sites can crash, connections can break, and single stages can be stalled.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from holdfast.core.controller import Controller, State
from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    FenceSite,
    LaunchSite,
    OrderCatchUp,
    PauseFlow,
    StartFlow,
    Wait,
)
from holdfast.core.events import (
    ControllerEvent,
    CopyReported,
    SiteFinished,
    SiteRegistered,
    SitesFailed,
    StopRequested,
    ViewSeen,
    WaitOver,
)
from holdfast.core.ids import CohortId, SiteId, StageId
from holdfast.core.layout import Domain
from holdfast.core.records import EpochRecord
from holdfast.errors import InvariantError
from holdfast.flow.graph import Flow
from holdfast.flow.options import Options
from holdfast.flow.plan import plan, shape
from holdfast.flow.sinks import Sink, SinkWriter
from holdfast.site import wire
from holdfast.site.node import Node, Order

CONTROLLER = SiteId(-1)

Move = Callable[[], None]


class _Up:
    """The connection is there."""


class _Down:
    """The connection is gone."""


class _Collected(SinkWriter):
    """What a sink has got, by epoch; shared by all copies, like a store outside."""

    def __init__(self, into: dict[int, pa.RecordBatch]) -> None:
        self._into = into

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        if epoch in self._into:
            raise InvariantError(f"epoch {epoch} was written twice")
        self._into[epoch] = batch


class _Store(Sink):
    """Stands in for a flow's sink: a store outside, in which every epoch is durable at once."""

    def __init__(self, into: dict[int, pa.RecordBatch], with_order: bool) -> None:
        self._into, self.with_order = into, with_order

    def open(self, name: str, schema: pa.Schema) -> SinkWriter:
        return _Collected(self._into)

    def resume(self, name: str, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        return _Collected(self._into), max(self._into, default=-1)


class _Port:
    """A node's transport."""

    def __init__(self, world: World, site: SiteId) -> None:
        self._world, self._site = world, site

    def send(self, site: SiteId, message: wire.Message, body: list[Any] | None = None) -> None:
        queue = self._world.network.get((self._site, site))
        if queue is not None and (self._site, site) not in self._world.broken:
            data = b"".join(bytes(memoryview(part)) for part in body or [])
            header = wire.decode(wire.encode(message)[wire.PREFIX.size :])
            queue.append((header, memoryview(data)))

    def tell(self, message: wire.Message) -> None:
        self._world.network[self._site, CONTROLLER].append((message, memoryview(b"")))


class World:
    """A flow on `sites` simulated sites. `results` has what each sink got, by epoch."""

    def __init__(
        self,
        flow: Flow,
        *,
        sites: int = 2,
        standbys: int = 0,
        seed: int = 0,
        options: Options | None = None,
        relaunch: bool = True,
    ) -> None:
        self.options = options or Options()
        self.flow = flow
        self.plan = plan(flow)
        self.random = random.Random(seed)
        self.results: dict[str, dict[int, pa.RecordBatch]] = {s.name: {} for s in self.plan.sinks}
        for stage in self.plan.sinks:
            assert stage.sink is not None
            stage.sink = _Store(self.results[stage.name], stage.sink.with_order)
        self.stalled: Callable[[SiteId, Order], bool] = lambda site, order: False
        self.steps = 0
        self.log: list[str] = []
        self.error: Exception | None = None
        self.nodes: dict[SiteId, Node] = {}
        self.network: dict[tuple[SiteId, SiteId], deque[Any]] = {}
        self.broken: set[tuple[SiteId, SiteId]] = set()
        self._records: dict[int, EpochRecord] = {}
        self._timers: list[ControllerEvent | _Launch] = []
        self._started = False
        self._relaunch = relaunch
        ids = [SiteId(i) for i in range(sites + standbys)]
        self.controller = Controller(
            shape(self.plan, self.options.partitions), ids[:sites], ids[sites:]
        )
        for site in ids:
            self._launch(site)

    @property
    def records(self) -> list[EpochRecord]:
        return [self._records[e] for e in sorted(self._records)]

    def _launch(self, site: SiteId) -> None:
        node = Node(self.plan, site, self.options, _Port(self, site), now=lambda: self.steps / 1e3)
        self.nodes[site] = node
        self.network[site, CONTROLLER] = deque()
        self.network[CONTROLLER, site] = deque()
        domain = Domain(f"p{site}", f"p{site}", "host", "app")
        self._control(SiteRegistered(site, ("", site), domain))

    # --- running --------------------------------------------------------------------------------

    def run(self, steps_max: int = 1_000_000) -> None:
        """Go on until the flow has ended; raise its error."""
        while not self.ended:
            if self.steps >= steps_max:
                raise InvariantError(f"no end after {steps_max} steps: {self.describe()}")
            if not self.step():
                raise InvariantError(f"stuck after {self.steps} steps: {self.describe()}")
        if self.error is not None:
            raise self.error

    @property
    def ended(self) -> bool:
        return self.controller.state in (State.DONE, State.FAILED)

    def settle(self) -> int:
        """Go on until nothing can move (because of what is stalled); how many steps it took."""
        begun = self.steps
        while not self.ended and self.step():
            pass
        return self.steps - begun

    def step(self) -> bool:
        """Let one thing happen, whichever the seed chooses; False if nothing can."""
        moves = self._moves()
        if not moves or (self._timers and self.random.random() < 0.01):
            if not self._timers:
                return False
            due = self._timers.pop(self.random.randrange(len(self._timers)))
            if isinstance(due, _Launch):
                self._launch(due.site)
            else:
                self._control(due)
        else:
            self.random.choice(moves)()
        self.steps += 1
        return True

    def _moves(self) -> list[Move]:
        moves: list[Move] = []
        for site, node in self.nodes.items():
            for entry in node.orders:
                order = entry[-1]
                if not self.stalled(site, order) and node.stages.ready(order):
                    moves.append(lambda s=site, e=entry: self._work(s, e))  # type: ignore[misc]
            if self._started and not node.finished:
                for unit, split in node.stages.splits():
                    room = split.rows_held < self.options.read_ahead_rows
                    if room and not split.ended and node.dataflow.units[unit].installed:
                        moves.append(lambda s=site, u=unit, p=split: self._read(s, u, p))  # type: ignore[misc]
            if node.outgoing:
                moves.append(lambda n=node: n.hand_over())  # type: ignore[misc]
        for key, queue in self.network.items():
            if queue:
                moves.append(lambda k=key: self._deliver(*k))  # type: ignore[misc]
        return moves

    def drain(self) -> None:
        """Ask the sequencer to take no more rows."""
        self._control(StopRequested(drain=True))

    def describe(self) -> str:
        lines = [f"view {self.controller.view}"]
        for site, node in self.nodes.items():
            done = {
                f"{u.shape.name}/{u.key[1]}": (u.finished, u.installed, u.busy)
                for u in node.dataflow.units.values()
            }
            lines.append(f"site {site}: {done}, orders {len(node.orders)}")
        return "\n".join([*lines, *self.log[-20:]])

    def result(self, sink: str) -> pa.Table:
        """All rows that a sink got, in the order in which it got them."""
        batches = [b for _, b in sorted(self.results[sink].items()) if b.num_rows]
        if not batches:
            schema = self.plan.stage_named(sink).inputs[0].schema
            return schema.empty_table()
        return pa.Table.from_batches(batches)

    # --- faults ---------------------------------------------------------------------------------

    def crash(self, *sites: SiteId) -> None:
        """These processes are gone, all at once; the others find out as time goes by."""
        self.log.append(f"{self.steps}: crash of {sites}")
        for site in sites:
            del self.nodes[site]
            for key in [k for k in self.network if site in k]:
                queue = self.network.pop(key)
                if key[0] == site and key[1] in self.nodes:
                    # What was sent may still arrive; then the connection is seen to be gone.
                    keep = self.random.randint(0, len(queue))
                    left = deque(list(queue)[:keep])
                    left.append(_Down())
                    self.network[key] = left
                elif key[0] == site and key[1] == CONTROLLER:
                    self._finish_reports(site, queue)
        self._timers.append(SitesFailed(tuple(sites), "crashed"))

    def _finish_reports(self, site: SiteId, queue: deque[Any]) -> None:
        for item in list(queue)[: self.random.randint(0, len(queue))]:
            self._on_told(site, item[0])

    def reset(self, one: SiteId, other: SiteId) -> None:
        """The connection between two sites breaks, and is made anew."""
        self.log.append(f"{self.steps}: reset of {one}-{other}")
        for key in ((one, other), (other, one)):
            if key in self.network:
                self.network[key] = deque([_Down(), _Up()])
                self.broken.add((key[1], key[0]))  # what it sends before it notices is lost

    # --- moves ----------------------------------------------------------------------------------

    def _read(self, site: SiteId, unit: Any, split: Any) -> None:
        node = self.nodes[site]
        node.read_split(unit, split, self.random.randint(1, self.options.block_rows))
        self._after(node)

    def _work(self, site: SiteId, entry: Any) -> None:
        node = self.nodes[site]
        node.orders.remove(entry)
        node.carry_out(entry[-1])
        self._after(node)

    def _after(self, node: Node) -> None:
        while node._acks:
            node.flush()
        node.dataflow.check_invariants()
        if node.sequencer is not None:
            node.sequencer.check_invariants()

    def _deliver(self, sender: SiteId, receiver: SiteId) -> None:
        item = self.network[sender, receiver].popleft()
        if receiver == CONTROLLER:
            self._on_told(sender, item[0])
            return
        node = self.nodes[receiver]
        if isinstance(item, _Up):
            self.broken.discard((receiver, sender))
            node.on_connected(sender)
        elif isinstance(item, _Down):
            node.on_lost(sender)
            if sender not in self.nodes:
                del self.network[sender, receiver]
        elif isinstance(item[0], wire.NewView):
            self._on_new_view(receiver, item[0])
        elif isinstance(item[0], wire.Start):
            self._started = True
        else:
            node.receive(sender, *item)
        self._after(node)

    def _on_new_view(self, site: SiteId, message: wire.NewView) -> None:
        node = self.nodes[site]
        for key in [k for k in self.network if site in k]:
            other = key[0] if key[1] == site else key[1]
            if other != CONTROLLER and other not in message.view.members:
                del self.network[key]  # fenced: nothing from there counts any more
                if key[1] == site:
                    node.on_lost(other)
        node.on_view(message.view)
        for other in message.view.members:
            if other != site and other in self.nodes and (site, other) not in self.network:
                self.network[site, other] = deque([_Up()])
                self.network[other, site] = deque([_Up()])
        self.network[site, CONTROLLER].append(
            (wire.Seen(message.view.term, message.view.number), memoryview(b""))
        )

    # --- the controller -------------------------------------------------------------------------

    def _on_told(self, site: SiteId, message: wire.Message) -> None:
        match message:
            case wire.Seen():
                self._control(ViewSeen(site, message.term, message.number))
            case wire.CopyState():
                unit = (StageId(message.stage), CohortId(message.cohort))
                copy = SiteId(message.site)
                self._control(
                    CopyReported(copy, unit, message.number, message.phase, message.reason)
                )
            case wire.Cut():
                known = self._records.setdefault(message.record.epoch, message.record)
                if known != message.record:
                    raise InvariantError(f"epoch {known.epoch} was cut twice")
            case wire.Finished():
                self._control(SiteFinished(site, message.number))

    def _control(self, event: ControllerEvent) -> None:
        for effect in self.controller.handle(event):
            self._apply(effect)

    def _apply(self, effect: ControllerEffect) -> None:
        match effect:
            case CommitView():
                self.log.append(f"{self.steps}: {effect.view}")
                for site in effect.view.members:
                    self._skip_views(site)
                    self._send(site, wire.NewView(effect.view, {}))
            case StartFlow():
                for site in self.nodes:
                    self._send(site, wire.Start())
            case OrderCatchUp():
                self._send(effect.donor, wire.CatchUp(0, *effect.unit, effect.joiner))
            case DrainFlow():
                self._send(effect.site, wire.Drain())
            case PauseFlow():
                self._send(effect.site, wire.Pause(effect.paused))
            case LaunchSite():
                if self._relaunch:
                    self._timers.append(_Launch(effect.site))
            case FenceSite():
                pass
            case Wait():
                self._timers.append(WaitOver(effect.what))
            case EndFlow():
                self.error = effect.error

    def _skip_views(self, site: SiteId) -> None:
        """A view that is committed right after another may be the only one that is given out."""
        queue = self.network.get((CONTROLLER, site))
        if queue is not None and self.random.random() < 0.5:
            for item in [i for i in queue if isinstance(i[0], wire.NewView)]:
                queue.remove(item)

    def _send(self, site: SiteId, message: wire.Message) -> None:
        queue = self.network.get((CONTROLLER, site))
        if queue is not None:
            queue.append((message, memoryview(b"")))


class _Launch:
    """A timer: a site's process comes up."""

    def __init__(self, site: SiteId) -> None:
        self.site = site
