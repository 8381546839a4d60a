"""All sites of a flow in one process, with a network and faults that a seed decides.

The world runs the real nodes: those of sites, with their machines, operators and messages, and
those that control them, with a simulated arbiter. Messages between two sites keep their order, as
on a connection; everything else (which message arrives next, which site works, when a source is
read, when a timer fires) is chosen step by step, by default at random from a seed, so a run can be
repeated exactly. `holdfast.lab.sim.timed` has a world that goes by a clock instead. Sites and
controllers can crash, connections can break, and single stages can be stalled. In this world the
arbiter answers at once; one with a clock has several applications, too.
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
from holdfast.control import events as ev
from holdfast.control.arbitration import answer
from holdfast.control.hosting import apart
from holdfast.control.node import ControlNode
from holdfast.core import events as core
from holdfast.core.controller import Controller
from holdfast.core.effects import ArbiterAsk, AskCommit, AskLead, AskRead, AskRenew, AskResign
from holdfast.core.ids import GroupId, SiteId, StageId
from holdfast.core.layout import Domain, View
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord
from holdfast.errors import HoldfastError, InvariantError, ProtocolError
from holdfast.lab.sim.arbiter import Ledger, SimArbiter
from holdfast.lab.sim.memory import Memory
from holdfast.net import wire
from holdfast.plan.planner import plan, shape
from holdfast.site.node import Node, Order
from holdfast.site.stages import TaskRunner


def control_of(app: int) -> SiteId:
    """What an application's control is called on links."""
    return SiteId(-1 - app)


CONTROLLER = control_of(0)
NOTHING = memoryview(b"")

Move = Callable[[], None]
Link = tuple[SiteId, SiteId]


class Up:
    """The connection is there."""


class Down:
    """The connection is gone."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A timer: a site's process comes up, in an application."""

    site: SiteId
    app: int = 0


@dataclass(frozen=True, slots=True)
class Restart:
    """A timer: an application that has died comes back."""

    app: int


@dataclass(frozen=True, slots=True)
class Exited:
    """A timer: it is noticed that these processes have ended, together."""

    sites: tuple[SiteId, ...]


@dataclass(frozen=True, slots=True)
class Tell:
    """A timer: something reaches a control, if that still lives."""

    app: int
    life: int
    event: ev.ControlEvent


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
        for app in self._world.controls:
            if (self._site, control_of(app)) in self._world.network:
                self._world.put((self._site, control_of(app)), (message, NOTHING))


class World:
    """A flow on `sites` simulated sites of `apps` applications. `results` has what each sink got,
    by epoch. With a `memory` no order is computed that was in another world of the same flow."""

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
        apps: int = 1,
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
        self.exceeded = False
        """Whether something was lost that pairs do not promise to keep."""
        self.over = False
        self._records: dict[int, EpochRecord] = {}
        self._timers: list[Any] = []
        self._started = False
        self._relaunch = relaunch
        self.apps, self._sites, self._spares = apps, sites, spares
        self.shape = apart(shape(self.plan, self.options.partitions), apps)
        self.ledger = Ledger()
        self.controls: dict[int, ControlNode] = {}
        """The applications' controls that live."""
        self.lives: dict[int, int] = {}
        self.arbiters: dict[int, SimArbiter] = {}
        self.home: dict[SiteId, int] = {}
        """The application that has launched a site."""
        self._controller: Controller | None = None
        self._told: deque[tuple[int, ev.ControlEvent]] = deque()
        self._telling = False
        self._setting_out = True
        for app in range(apps):
            self._begin(app)
        self._setting_out = False

    @property
    def controller(self) -> Controller:
        """Of the leader, or of the last one while nobody leads."""
        assert self._controller is not None
        return self._controller

    @property
    def leader(self) -> int | None:
        """The application that leads, in the latest term if several believe that they do."""
        leading = [a for a, node in self.controls.items() if node.leading is not None]
        return max(leading, key=lambda app: self.controls[app].term, default=None)

    @property
    def leaderless(self) -> bool:
        return all(node.leading is None for node in self.controls.values())

    @property
    def records(self) -> list[EpochRecord]:
        return [self._records[e] for e in sorted(self._records)]

    def now(self) -> float:
        """In seconds. This world has no clock; a step stands for a millisecond."""
        return self.steps / 1e3

    def _launch(self, site: SiteId, app: int = 0) -> None:
        self.nodes[site], self.home[site] = self.make_node(site), app
        for other in self.controls:
            self._connect(site, other)

    def _connect(self, site: SiteId, app: int) -> None:
        """A site dials an application's control, and says who it is."""
        self.network[site, control_of(app)] = deque()
        self.network.setdefault((control_of(app), site), deque())
        self.announce(site, app)

    def make_node(self, site: SiteId) -> Node:
        port = _Port(self, site)
        return Node(self.plan, site, self.options, port, now=self.now, runner=self.runner)

    def make_control(self, app: int) -> ControlNode:
        return ControlNode(
            self.shape,
            self.options,
            holder=str(app),
            app=app,
            apps=self.apps,
            sites=self._sites,
            spares=self._spares,
        )

    def _begin(self, app: int) -> None:
        """An application starts, or starts again; its sites and those of others report to it."""
        self.lives[app] = self.lives.get(app, 0) + 1
        self.arbiters[app] = SimArbiter(self.lease_s, self.ledger, self.now)
        self.controls[app] = self.make_control(app)
        for site in self.nodes:
            self._connect(site, app)
        self.control(app, ev.Began())

    def registration(self, site: SiteId) -> wire.Register:
        return wire.Register(site, "", site, 0, self.domain_of(site))

    def domain_of(self, site: SiteId) -> Domain:
        """Every site of a simulated world is a process of its own."""
        return Domain(f"p{site}", f"p{site}", "host", f"application {self.home[site]}")

    # --- what a world with a clock does otherwise -----------------------------------------------

    def packed(self, message: wire.Message, body: list[Any] | None) -> tuple[wire.Message, Any]:
        """A message as it arrives: through the real encoder and decoder."""
        data = b"".join(bytes(memoryview(part)) for part in body or [])
        return wire.decode(wire.encode(message)[wire.PREFIX.size :]), memoryview(data)

    lease_s = 1e9
    """Without a clock no lease runs out."""

    def announce(self, site: SiteId, app: int) -> None:
        """A process that has come up says so to a control."""
        self.control(app, ev.SiteSaid(site, self.registration(site)))

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
        return self.over

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
            self._launch(due.site, due.app)
        elif isinstance(due, Restart):
            self.restart(due.app)
        elif isinstance(due, Exited):
            self._exited(due.sites)
        elif self.lives[due.app] == due.life:
            self.control(due.app, due.event)

    def _exited(self, sites: tuple[SiteId, ...]) -> None:
        """All at once: nothing is found out of one before the others are known of."""
        told: list[tuple[int, ev.ControlEvent]] = []
        for app in self.controls:
            for site in sites:
                if self.home[site] == app:
                    told.append((app, ev.ProcessExited(site, "crashed")))
                if (site, control_of(app)) not in self.network:
                    told.append((app, ev.SiteLost(site)))
        if told:
            self._told.extend(told[:-1])
            self.control(*told[-1])

    def moves(self) -> list[Move]:
        """All that can happen next but timers, in an order that is the same in the same state."""
        moves: list[Move] = []
        for site, node in self.nodes.items():
            if site in self.failed:
                continue
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
            if queue:
                moves.append(lambda k=link: self.deliver(k))  # type: ignore[misc]
        return moves

    def drain(self) -> None:
        """Ask the sequencer to take no more rows."""
        for app in list(self.controls):
            self.control(app, core.StopRequested(drain=True))

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
        view = self.ledger.known.view if self.ledger.known is not None else None
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
        self.later(0.0, Exited(tuple(sites)))

    def vanish(self, site: SiteId) -> None:
        """A process ends. What it sent may still arrive; then the connection is seen to be gone."""
        del self.nodes[site]
        for link in [k for k in self.network if site in k]:
            queue = self.network.pop(link)
            if link[0] == site and link[1] in self.nodes:
                keep = self.random.randint(0, len(queue))
                self.put_instead(link, [*list(queue)[:keep], Down()])
            elif link[0] == site and link[1] < 0:
                self.last_words(link, list(queue)[: self.random.randint(0, len(queue))])

    def last_words(self, link: Link, items: list[Any]) -> None:
        """What a site that is gone had sent to a control, and arrives."""
        for item in items:
            self._hear(-1 - link[1], link[0], item[0])

    def reset(self, one: SiteId, other: SiteId) -> None:
        """The connection between two sites breaks, and is rebuilt."""
        self.log.append(f"{self.steps}: reset of {one}-{other}")
        for link in ((one, other), (other, one)):
            if link in self.network:
                self.put_instead(link, [Down(), Up()])
                self.broken.add((link[1], link[0]))  # what it sends before it notices is lost

    def crash_controller(self, app: int | None = None) -> None:
        """The control of an application dies; by default that of the leader. Its sites live."""
        app = self.leader if app is None else app
        assert app is not None, "nobody leads"
        self.log.append(f"{self.steps}: crash of the controller of application {app}")
        del self.controls[app]
        self.lives[app] += 1
        for site in self.nodes:
            self.network.pop((site, control_of(app)), None)
        self.later(self.options.lease_s, Restart(app))

    def restart(self, app: int) -> None:
        """What it had sent may still arrive; nobody heard what it has not said."""
        self.log.append(f"{self.steps}: application {app} is back")
        self.expire()
        self._begin(app)

    def expire(self) -> None:
        """By now the lease of an application that has died has run out."""
        self.ledger.end_lease()

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
            self._say_failed(node)
        self.acting = None

    def _say_failed(self, node: Node) -> None:
        error = self.failed[node.site]
        detail = {name: getattr(error, name) for name in error.fields}
        _Port(self, node.site).tell(wire.Failed(type(error).__name__, detail))

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
        if receiver < 0 and isinstance(item, Down):
            if sender not in self.nodes:
                del self.network[link]
            self.control(-1 - receiver, ev.SiteLost(sender))
            return
        if receiver < 0:
            self._hear(-1 - receiver, sender, item[0])
            return
        node = self.nodes[receiver]
        self.guarded(node, lambda: self._take(node, sender, item))
        gone = sender not in self.nodes and sender >= 0
        if isinstance(item, Down) and gone and link in self.network:
            del self.network[link]

    def _take(self, node: Node, sender: SiteId, item: Any) -> None:
        if isinstance(item, Up):
            self.broken.discard((node.site, sender))
            node.on_connected(sender)
        elif isinstance(item, Down):
            node.on_lost(sender)
        elif sender < 0:
            self._obey(node, sender, item[0])
        elif node.site not in self.failed:
            node.receive(sender, *item)

    def _obey(self, node: Node, control: SiteId, order: wire.Message) -> None:
        """As a site does it."""
        if not node.obeys(order):
            return
        match order:
            case wire.NewView():
                self._on_new_view(node, order)
            case wire.Start():
                self._started = True
            case wire.Fenced():
                self._leave(node)
            case wire.Dismiss():
                self._dismissed(node)
            case _:
                if node.site not in self.failed:
                    node.receive(control, order, NOTHING)

    def _leave(self, node: Node) -> None:
        known = self.ledger.known
        members = known.view.members if known is not None and known.view is not None else ()
        if known is not None and node.site in members and node.site not in known.dead:
            raise InvariantError(f"site {node.site} was fenced, and is in {known.view}")
        self.vanish(node.site)

    def _dismissed(self, node: Node) -> None:
        known = self.ledger.known
        if known is None or not known.ended:
            raise InvariantError(f"site {node.site} was dismissed, and the flow has not ended")
        self.vanish(node.site)

    def _on_new_view(self, node: Node, message: wire.NewView) -> None:
        site, view, known = node.site, message.view, node.view
        if view.replaces(known):
            self._act_on(node, view, known)
        assert node.view is not None
        _Port(self, site).tell(wire.Seen(node.view.term, node.view.number))

    def _act_on(self, node: Node, view: View, known: View | None) -> None:
        site = node.site
        self.fence(node, view)
        node.on_view(view)
        if known is not None and view.term > known.term:
            if site in self.failed:
                self._say_failed(node)
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
            if other >= 0 and other not in view.members:
                del self.network[link]
                if link[1] == node.site:
                    node.on_lost(other)
                elif other in self.nodes:
                    self.put_instead(link, [Down()])

    # --- control --------------------------------------------------------------------------------

    def _hear(self, app: int, site: SiteId, message: wire.Message) -> None:
        """A message of a site reaches a control."""
        if isinstance(message, wire.Cut):
            known = self._records.setdefault(message.record.epoch, message.record)
            if known != message.record:
                raise InvariantError(f"epoch {known.epoch} was cut twice")
        self.control(app, ev.SiteSaid(site, message))

    def want(self, guards: tuple[ProtectionSpec, ...]) -> None:
        """The user wants stages to be protected so."""
        app = self.leader
        if app is not None:
            wanted = apart(self.controller.shape.guarded(guards), self.apps)
            self.control(app, core.ProtectionWanted(wanted.guards))

    def control(self, app: int, event: ev.ControlEvent) -> None:
        """Have a control handle an event, and carry out what follows, one after the other."""
        self._told.append((app, event))
        if self._telling:
            return
        self._telling = True
        try:
            while self._told:
                app, event = self._told.popleft()
                node = self.controls.get(app)
                if node is not None:
                    for effect in node.handle(event, self.now()):
                        self._apply(app, effect)
                    node.check_invariants()
                    self._note_leader(node)
        finally:
            self._telling = False
            self._told.clear()

    def _note_leader(self, node: ControlNode) -> None:
        found, last = node.controller, self._controller
        if found is not None and found is not last and (last is None or found.term >= last.term):
            self._controller = found

    def _apply(self, app: int, effect: ev.ControlEffect) -> None:
        match effect:
            case AskLead() | AskRenew() | AskRead() | AskResign() | AskCommit():
                self.ask(app, effect)
            case ev.SendSite() | ev.ExpelSite():
                self._check_leader(app)
                self._send(app, effect.site, effect.message)
            case ev.LaunchHere():
                if self._setting_out:
                    self._launch(effect.site, app)
                elif self._relaunch:
                    self.later(0.0, Launch(effect.site, app))
            case ev.SetTimer():
                self.set_timer(app, effect)
            case ev.Probe():
                self.probe(app, effect)
            case ev.ViewGiven():
                self.log.append(f"{self.steps}: {effect.view}")
            case ev.Note():
                self.log.append(f"{self.steps}: {effect.text}")
            case ev.End():
                if not self.over:
                    self.error, self.over = effect.error, True
            case _:
                self.between(app, effect)

    def _check_leader(self, app: int) -> None:
        """A leader steps down before the arbiter lets another lead: nobody else gives orders,
        unless the arbiter has broken its word."""
        term, latest = self.controls[app].term, self.ledger.record.entry.term
        if term != latest and term not in self.ledger.broken:
            raise InvariantError(f"application {app} gives orders in term {term} of {latest}")

    def ask(self, app: int, ask: ArbiterAsk) -> None:
        """Ask the arbiter, which answers at once."""
        self.control(app, self.answer(app, ask))

    def answer(self, app: int, ask: ArbiterAsk) -> ev.ArbiterAnswer:
        lease_s = float("inf") if self.lease_s == World.lease_s else self.lease_s
        found = answer(self.arbiters[app], str(app), ask, lease_s)
        if isinstance(found, core.Committed):
            self.ledger.note()
        return found

    def probe(self, app: int, effect: ev.Probe) -> None:
        gone = tuple(s for s in effect.addresses if s not in self.nodes)
        self.control(app, ev.Probed(effect.number, gone))

    def set_timer(self, app: int, effect: ev.SetTimer) -> None:
        """Without a clock nobody is silent for too long, and no lease is renewed. Those that are
        gone at once are found out at once."""
        tell = Tell(app, self.lives[app], ev.TimerFired(effect.timer))
        if isinstance(effect.timer, ev.InquireTimer):
            self.control(app, tell.event)
        elif not isinstance(effect.timer, ev.WatchTimer | ev.LeadTimer):
            self.later(effect.seconds, tell)

    def between(self, app: int, effect: ev.ControlEffect) -> None:
        """What goes on between applications; here there is one."""

    def _skip_views(self, link: Link) -> None:
        """A view that is committed right after another may be the only one that is given out."""
        queue = self.network[link]
        if self.random.random() < 0.5:
            for item in [i for i in queue if isinstance(i[0], wire.NewView)]:
                queue.remove(item)

    def _send(self, app: int, site: SiteId, message: wire.Message) -> None:
        link = (control_of(app), site)
        if link in self.network and site in self.nodes:
            if isinstance(message, wire.NewView):
                self._skip_views(link)
            self.put(link, (message, NOTHING))
