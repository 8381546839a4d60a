"""All sites of a flow in one process, with a network and faults that a seed decides.

The world runs the real nodes: their machines, operators, messages and controller. Messages between
two sites keep their order, as on a connection; everything else (which message arrives next, which
site works, when a source is read, when a timer fires) is chosen step by step, by default at random
from a seed, so a run can be repeated exactly. `holdfast.lab.sim.timed` has a world that goes by a
clock instead. Sites and controllers can crash, connections can break, and single stages can be
stalled.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.core.controller import Controller, State
from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    FenceSite,
    LaunchSite,
    OrderCatchUp,
    OrderRetention,
    PauseFlow,
    StartFlow,
    Wait,
)
from holdfast.core.events import (
    ControllerEvent,
    FlowFailed,
    ProtectionWanted,
    ReplicaBehind,
    ReplicaReported,
    SiteFinished,
    SiteRegistered,
    SitesFailed,
    StopRequested,
    ViewSeen,
    WaitOver,
)
from holdfast.core.ids import GroupId, SiteId, StageId
from holdfast.core.layout import Domain, View
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord
from holdfast.errors import HoldfastError, InvariantError, ProtocolError
from holdfast.lab.sim.memory import Memory
from holdfast.net import wire
from holdfast.plan.planner import plan, shape
from holdfast.site.node import Node, Order
from holdfast.site.stages import TaskRunner

CONTROLLER = SiteId(-1)
NOTHING = memoryview(b"")

Move = Callable[[], None]
Link = tuple[SiteId, SiteId]


class Up:
    """The connection is there."""


class Down:
    """The connection is gone."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A timer: a site's process comes up."""

    site: SiteId


class TakeOver:
    """A timer: the arbiter has noticed that nobody leads."""


@dataclass(frozen=True, slots=True)
class Committed:
    """What the arbiter keeps: enough for another controller to go on."""

    term: int
    view: View
    dead: dict[SiteId, str]
    launched: frozenset[SiteId]
    running: bool
    draining: bool


DURABLE_EVERY = 3
"""A store outside makes so many epochs durable at once, as one does that writes files."""


class _Collected(SinkWriter):
    """What a sink has got, by epoch; shared by all replicas, like a store outside."""

    def __init__(self, world: World, into: dict[int, pa.RecordBatch], filled: set[int]) -> None:
        self._world, self._into, self._filled = world, into, filled
        self._pending: dict[int, pa.RecordBatch] = {}

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        if epoch in self._pending:
            raise InvariantError(f"site {self._world.acting} wrote epoch {epoch} twice")
        self._pending[epoch] = batch
        if batch.num_rows:
            self._filled.add(epoch)

    def commit(self, epoch: int) -> int:
        """Written is not durable: what is not dies with the writer."""
        if len(self._pending) >= DURABLE_EVERY:
            self._make_durable()
        return max(self._into, default=-1)

    def close(self) -> None:
        self._make_durable()

    def _make_durable(self) -> None:
        pending, self._pending = self._pending, {}
        for epoch, batch in pending.items():
            known, newest = self._into.get(epoch), max(self._into, default=-1)
            for left_out in range(newest + 1, epoch):
                if left_out in self._filled:
                    raise InvariantError(f"epoch {left_out}, which has rows, was left out")
                self._into[left_out] = batch.slice(0, 0)
            # Whoever is not in the view any more may not know it. The store takes an epoch once.
            if known is not None and not known.equals(batch):
                raise InvariantError(f"epoch {epoch} was written twice, with different rows")
            if known is not None and self._world.leads_sink(self._into):
                raise InvariantError(f"the leader wrote epoch {epoch}, which was there")
            self._into.setdefault(epoch, batch)


class _Store(Sink):
    """Stands in for a flow's sink: a store outside."""

    def __init__(self, world: World, into: dict[int, pa.RecordBatch], with_order: bool) -> None:
        self._world, self._into, self.with_order = world, into, with_order
        self._filled: set[int] = set()
        """The epochs that have rows, as far as some writer has had them."""

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return _Collected(self._world, self._into, self._filled)

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        found = max(self._into, default=-1)
        if durable > found:  # a real store would be taken for one that went backwards
            raise InvariantError(
                f"site {self._world.acting} expects epoch {durable} in a store that has {found}"
            )
        return _Collected(self._world, self._into, self._filled), found


class _Port:
    """A node's transport."""

    def __init__(self, world: World, site: SiteId) -> None:
        self._world, self._site = world, site

    def send(self, site: SiteId, message: wire.Message, body: list[Any] | None = None) -> None:
        link = (self._site, site)
        if link in self._world.network and link not in self._world.broken:
            self._world.put(link, self._world.packed(message, body))

    def tell(self, message: wire.Message) -> None:
        if (self._site, CONTROLLER) in self._world.network:
            self._world.put((self._site, CONTROLLER), (message, NOTHING))


class World:
    """A flow on `sites` simulated sites. `results` has what each sink got, by epoch. With a
    `memory` no order is computed that was in another world of the same flow."""

    def __init__(
        self,
        flow: Flow,
        *,
        sites: int = 2,
        spares: int = 0,
        seed: int = 0,
        options: Options | None = None,
        relaunch: bool = True,
        memory: Memory | None = None,
    ) -> None:
        self.runner = memory.runner() if memory else TaskRunner
        self.options = options or Options()
        self.flow = flow
        self.plan = plan(flow)
        self.random = random.Random(seed)
        self.results: dict[str, dict[int, pa.RecordBatch]] = {s.name: {} for s in self.plan.sinks}
        for stage in self.plan.sinks:
            assert stage.sink is not None
            stage.sink = _Store(self, self.results[stage.name], stage.sink.with_order)
        self.stalled: Callable[[SiteId, Order], bool] = lambda site, order: False
        self.steps = 0
        self.log: list[str] = []
        self.error: Exception | None = None
        self.failed: dict[SiteId, HoldfastError] = {}
        """Sites that have given up, and why: they say so again to a new controller."""
        self.acting: SiteId | None = None
        """Whose code runs."""
        self.acted: SiteId | None = None
        """Whose code ran last."""
        self.nodes: dict[SiteId, Node] = {}
        self.network: dict[Link, deque[Any]] = {}
        self.broken: set[Link] = set()
        self.committed: Committed | None = None
        self.committed_views: set[tuple[int, int]] = set()
        self.exceeded = False
        """Whether something was lost that pairs do not promise to keep."""
        self._records: dict[int, EpochRecord] = {}
        self._timers: list[Any] = []
        self._started = False
        self._relaunch = relaunch
        ids = [SiteId(i) for i in range(sites + spares)]
        self.shape = shape(self.plan, self.options.partitions)
        self.controller = Controller(self.shape, ids[:sites], ids[sites:])
        self.leaderless = False
        for site in ids:
            self._launch(site)

    @property
    def records(self) -> list[EpochRecord]:
        return [self._records[e] for e in sorted(self._records)]

    def now(self) -> float:
        """In seconds. This world has no clock; a step stands for a millisecond."""
        return self.steps / 1e3

    def _launch(self, site: SiteId) -> None:
        self.nodes[site] = self.make_node(site)
        self.network[site, CONTROLLER] = deque()
        self.network[CONTROLLER, site] = deque()
        self.announce(site)

    def make_node(self, site: SiteId) -> Node:
        port = _Port(self, site)
        return Node(self.plan, site, self.options, port, now=self.now, runner=self.runner)

    def _register(self, site: SiteId) -> None:
        self._control(SiteRegistered(site, ("", site), domain_of(site)))

    # --- what a world with a clock does otherwise -----------------------------------------------

    def packed(self, message: wire.Message, body: list[Any] | None) -> tuple[wire.Message, Any]:
        """A message as it arrives: through the real encoder and decoder."""
        data = b"".join(bytes(memoryview(part)) for part in body or [])
        return wire.decode(wire.encode(message)[wire.PREFIX.size :]), memoryview(data)

    def announce(self, site: SiteId) -> None:
        """A process that has come up says so to the controller."""
        self._register(site)

    def put(self, link: Link, item: Any) -> None:
        """Something is on its way."""
        self.network[link].append(item)

    def put_instead(self, link: Link, items: Iterable[Any]) -> None:
        """Whatever was on its way is lost; this comes instead."""
        self.network[link] = deque(items)

    def later(self, seconds: float, what: Any) -> None:
        """Something is to happen after a while."""
        self._timers.append(what)

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

    def run_until_idle(self) -> int:
        """Go on until nothing can move (because of what is stalled); how many steps it took."""
        begun = self.steps
        while not self.ended and self.step():
            pass
        return self.steps - begun

    def step(self) -> bool:
        """Let one thing happen, whichever the seed chooses; False if nothing can."""
        moves = self.moves()
        if not moves or (self._timers and self.random.random() < 0.01):
            if not self._timers:
                return False
            self.happen(self._timers.pop(self.random.randrange(len(self._timers))))
        else:
            self.random.choice(moves)()
        self.steps += 1
        return True

    def happen(self, due: Any) -> None:
        """What a timer was set for."""
        if isinstance(due, Launch):
            self._launch(due.site)
        elif isinstance(due, TakeOver):
            self.take_over()
        else:
            self._control(due)

    def moves(self) -> list[Move]:
        """All that can happen next but timers, in an order that is the same in the same state."""
        moves: list[Move] = []
        for site, node in self.nodes.items():
            for entry in node.orders:
                order = entry[-1]
                if not self.stalled(site, order) and node.stages.ready(order):
                    moves.append(lambda s=site, e=entry: self._work(s, e))  # type: ignore[misc]
            if self._started and not node.finished and node.dataflow.last is None:
                for task, split in node.stages.splits():
                    room = split.rows_held < self.options.read_ahead_rows
                    held = node.dataflow.tasks[task]
                    if room and not split.ended and held.computes:
                        moves.append(lambda s=site, u=task, p=split: self._read(s, u, p))  # type: ignore[misc]
            if node.outgoing:
                moves.append(lambda s=site: self.hand_over(s))  # type: ignore[misc]
        for link, queue in self.network.items():
            if queue and not (link[1] == CONTROLLER and self.leaderless):
                moves.append(lambda k=link: self.deliver(k))  # type: ignore[misc]
        return moves

    def drain(self) -> None:
        """Ask the sequencer to take no more rows."""
        self._control(StopRequested(drain=True))

    def describe(self) -> str:
        lines = [f"view {self.controller.view}"]
        for site, node in self.nodes.items():
            done = {
                f"{u.shape.name}/{u.key[1]}": (u.finished, u.state.value, u.work.busy)
                for u in node.dataflow.tasks.values()
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

    def leads_sink(self, into: dict[int, pa.RecordBatch]) -> bool:
        """Whether the site whose code runs leads the sink in the view that counts."""
        name = next(n for n, found in self.results.items() if found is into)
        view = self.controller.view
        task = (StageId(self.plan.stage_named(name).id), GroupId(0))
        return view is not None and view.group(task).replicas[:1] == (self.acting,)

    # --- faults ---------------------------------------------------------------------------------

    def survives(self, *victims: SiteId) -> bool:
        """Whether a living replica is left without these of everything that cannot be rebuilt.
        One that joins is none."""
        view = self.controller.view
        if view is None:
            return False
        living = set(self.nodes) - set(victims)
        stages = self.controller.shape.stages
        kept = [u for u in view.tasks() if not stages[u[0]].guard.rebuild_level]
        groups = [view.group(u) for u in kept]
        return all(living.intersection(c.replicas + c.standbys) for c in groups)

    def crash(self, *sites: SiteId) -> None:
        """These processes are gone, all at once; the others find out as time goes by."""
        self.log.append(f"{self.steps}: crash of {sites}")
        if self.controller.running and not self.survives(*sites):
            self.exceeded = True
        for site in sites:
            self.vanish(site)
        self.later(0.0, SitesFailed(tuple(sites), "crashed"))

    def vanish(self, site: SiteId) -> None:
        """A process ends. What it sent may still arrive; then the connection is seen to be gone."""
        del self.nodes[site]
        for link in [k for k in self.network if site in k]:
            queue = self.network.pop(link)
            if link[0] == site and link[1] in self.nodes:
                keep = self.random.randint(0, len(queue))
                self.put_instead(link, [*list(queue)[:keep], Down()])
            elif link[0] == site and link[1] == CONTROLLER and not self.leaderless:
                for item in list(queue)[: self.random.randint(0, len(queue))]:
                    self._on_told(site, item[0])

    def reset(self, one: SiteId, other: SiteId) -> None:
        """The connection between two sites breaks, and is rebuilt."""
        self.log.append(f"{self.steps}: reset of {one}-{other}")
        for link in ((one, other), (other, one)):
            if link in self.network:
                self.put_instead(link, [Down(), Up()])
                self.broken.add((link[1], link[0]))  # what it sends before it notices is lost

    def crash_controller(self) -> None:
        """Nobody leads until the arbiter notices."""
        self.log.append(f"{self.steps}: crash of the controller")
        self.leaderless = True
        self._timers = [t for t in self._timers if isinstance(t, Launch)]
        for site in self.nodes:
            if (site, CONTROLLER) in self.network:
                self.put_instead((site, CONTROLLER), [])
        self.later(self.options.lease_s, TakeOver())

    def take_over(self) -> None:
        """Another controller goes on from what was committed and from what the sites say."""
        known = self.committed
        assert known is not None, "a controller that has committed nothing is not replaced"
        term = known.term + 1
        self.committed = Committed(
            term, known.view, known.dead, known.launched, known.running, known.draining
        )
        self.log.append(f"{self.steps}: take-over of control, term {term}")
        here = [s for s in self.nodes if s not in known.dead]
        addresses = {s: ("", int(s)) for s in {*here, *known.view.members}}
        domains = {s: domain_of(s) for s in addresses}
        controller = Controller(self.shape, known.view.members)
        effects = controller.resume(
            known.view, term, addresses, domains, dict(known.dead), known.running, known.draining
        )
        controller.launched |= known.launched - addresses.keys()
        self.controller, self.leaderless = controller, False
        gone = [s for s in {*known.view.members, *known.launched} if s not in self.nodes]
        if gone:
            effects += controller.handle(SitesFailed(tuple(sorted(gone)), "crashed"))
        for effect in effects:
            self._apply(effect)

    # --- moves ----------------------------------------------------------------------------------

    def _read(self, site: SiteId, task: Any, split: Any) -> None:
        node = self.nodes[site]
        node.sourcing.read_split(task, split, self.random.randint(1, self.options.block_rows))
        self._after(node)

    def _work(self, site: SiteId, entry: Any) -> None:
        node = self.nodes[site]
        node.orders.remove(entry)
        self.guarded(node, lambda: node.execute(entry[-1]))

    def guarded(self, node: Node, act: Callable[[], object]) -> None:
        """As a site does it: an error is told to the controller."""
        self.acting = self.acted = node.site
        try:
            act()
            self._after(node)
        except (InvariantError, ProtocolError):
            raise
        except HoldfastError as error:
            self.failed[node.site] = error
            self._control(FlowFailed(node.site, error))
        self.acting = None

    def hand_over(self, site: SiteId) -> None:
        self.nodes[site].hand_over()

    def _after(self, node: Node) -> None:
        while node.acks_wait:
            node.flush()
        self.check(node)

    def check(self, node: Node) -> None:
        """Have a node's machines check themselves."""
        node.dataflow.check_invariants()
        if node.sequencer is not None:
            node.sequencer.check_invariants()

    def deliver(self, link: Link) -> None:
        """The oldest message on a connection arrives."""
        sender, receiver = link
        item = self.network[link].popleft()
        if receiver == CONTROLLER:
            self._on_told(sender, item[0])
            return
        node = self.nodes[receiver]
        self.guarded(node, lambda: self._take(node, sender, item))
        gone = sender not in self.nodes and sender != CONTROLLER
        if isinstance(item, Down) and gone and link in self.network:
            del self.network[link]

    def _take(self, node: Node, sender: SiteId, item: Any) -> None:
        if isinstance(item, Up):
            self.broken.discard((node.site, sender))
            node.on_connected(sender)
        elif isinstance(item, Down):
            node.on_lost(sender)
        elif isinstance(item[0], wire.NewView):
            self._on_new_view(node, item[0])
        elif isinstance(item[0], wire.Start):
            self._started = True
        elif isinstance(item[0], wire.Fenced):
            self.vanish(node.site)
        else:
            node.receive(sender, *item)

    def _on_new_view(self, node: Node, message: wire.NewView) -> None:
        site, view, known = node.site, message.view, node.view
        if view.replaces(known):
            self._act_on(node, view, known)
        assert node.view is not None
        seen = wire.Seen(node.view.term, node.view.number)
        self.put((site, CONTROLLER), (seen, NOTHING))

    def _act_on(self, node: Node, view: View, known: View | None) -> None:
        site = node.site
        self.fence(node, view)
        node.on_view(view)
        if known is not None and view.term > known.term:
            if site in self.failed:
                self._control(FlowFailed(site, self.failed[site]))
            node.report_again()
        for other in view.members:
            if other != site and other in self.nodes and (other, site) not in self.network:
                # It may have been connected before, and not know yet that it was not a member.
                lost = [Down()] if (site, other) in self.network else []
                self.put_instead((site, other), [*lost, Up()])
                self.put_instead((other, site), [Up()])

    def fence(self, node: Node, view: View) -> None:
        """As a site does it: nothing counts any more that comes from one who is no member."""
        for link in [k for k in self.network if node.site in k]:
            other = link[0] if link[1] == node.site else link[1]
            if other != CONTROLLER and other not in view.members:
                del self.network[link]
                if link[1] == node.site:
                    node.on_lost(other)
                elif other in self.nodes:
                    self.put_instead(link, [Down()])

    # --- the controller -------------------------------------------------------------------------

    def _on_told(self, site: SiteId, message: wire.Message) -> None:
        match message:
            case wire.Register():
                self._register(site)
            case wire.Seen():
                self._control(ViewSeen(site, message.term, message.number))
            case wire.ReplicaReport():
                task = (StageId(message.stage), GroupId(message.group))
                replica = SiteId(message.site)
                self._control(
                    ReplicaReported(replica, task, message.number, message.phase, message.reason)
                )
            case wire.Behind():
                self._control(ReplicaBehind(SiteId(message.site), message.reason))
            case wire.Cut():
                known = self._records.setdefault(message.record.epoch, message.record)
                if known != message.record:
                    raise InvariantError(f"epoch {known.epoch} was cut twice")
            case wire.Finished():
                self._control(SiteFinished(site, message.number))

    def want(self, guards: tuple[ProtectionSpec, ...]) -> None:
        """The user wants stages to be protected so."""
        self._control(ProtectionWanted(guards))

    def _control(self, event: ControllerEvent) -> None:
        if not self.leaderless:
            for effect in self.controller.handle(event):
                self._apply(effect)

    def _apply(self, effect: ControllerEffect) -> None:
        match effect:
            case CommitView():
                self.commit(effect)
            case StartFlow():
                self._note_committed()
                for site in self.nodes:
                    self._send(site, wire.Start())
            case OrderCatchUp():
                term = self.controller.term
                self._send(effect.donor, wire.CatchUp(term, *effect.task, effect.joiner))
            case OrderRetention():
                self._send(effect.site, wire.Retain(effect.number))
            case DrainFlow():
                self._note_committed()
                self._send(effect.site, wire.Drain())
            case PauseFlow():
                self._send(effect.site, wire.Pause(effect.paused))
            case LaunchSite():
                if self._relaunch:
                    self.later(effect.after_ms / 1e3, Launch(effect.site))
            case FenceSite():
                self._send(effect.site, wire.Fenced())
            case Wait():
                self.later(effect.ms / 1e3, WaitOver(effect.timer))
            case EndFlow():
                self.error = effect.error

    def commit(self, effect: CommitView) -> None:
        """The arbiter takes a view, and only then anybody hears of it."""
        self.log.append(f"{self.steps}: {effect.view}")
        self._note_committed()
        self.committed_views.add((effect.view.term, effect.view.number))
        self.give_out(effect)

    def give_out(self, effect: CommitView) -> None:
        for site in effect.view.members:
            self._skip_views(site)
            self._send(site, wire.NewView(effect.view, {}))

    def _note_committed(self) -> None:
        controller = self.controller
        if controller.view is not None:
            self.committed = Committed(
                controller.term,
                controller.view,
                dict(controller.dead),
                frozenset(controller.launched),
                controller.running,
                controller.state is State.DRAINING,
            )

    def _skip_views(self, site: SiteId) -> None:
        """A view that is committed right after another may be the only one that is given out."""
        queue = self.network.get((CONTROLLER, site))
        if queue is not None and self.random.random() < 0.5:
            for item in [i for i in queue if isinstance(i[0], wire.NewView)]:
                queue.remove(item)

    def _send(self, site: SiteId, message: wire.Message) -> None:
        if (CONTROLLER, site) in self.network:
            self.put((CONTROLLER, site), (message, NOTHING))


def domain_of(site: SiteId) -> Domain:
    """Every site of a simulated world is a process of its own."""
    return Domain(f"p{site}", f"p{site}", "host", "app")
