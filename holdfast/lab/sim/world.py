"""A simulated cluster: all sites of a flow in one process, with faults.

The world runs the real nodes: those of sites, with their machines, operators and messages, and
those of controls, with a simulated arbiter. Messages between two sites keep their order, as on a
connection. Everything else (which message arrives next, which site works, when a source is read,
when a timer fires) is chosen step by step, by default at random from a seed, so that a run can be
repeated exactly. Sites and controls can crash, connections can break, and single stages can be
stalled. The arbiter answers at once.

`holdfast.lab.sim.timed` has a world with a clock instead, which may have several applications.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pyarrow as pa

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.control import events as ev
from holdfast.control.hosting import widen_failure_domains
from holdfast.control.node import ControlNode
from holdfast.core import requests
from holdfast.core.controller import Controller
from holdfast.core.effects import ArbiterAsk
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Domain, View
from holdfast.core.mirrors import is_whole
from holdfast.core.records import EpochRecord
from holdfast.core.separation import lost_stretch
from holdfast.errors import InvariantError
from holdfast.lab.sim.arbiter import ArbiterLedger
from holdfast.lab.sim.control_plane import NO_LEASE_S, ControlPlane
from holdfast.lab.sim.links import NOTHING, Down, Link, SitePort, Up, app_of, control_of
from holdfast.lab.sim.memory import Memory
from holdfast.lab.sim.site_shell import SiteShell
from holdfast.lab.sim.stores import SimStore
from holdfast.lab.sim.timers import (
    LaunchProcess,
    NoticeExits,
    RestartApplication,
    TellControl,
    WorldTimer,
)
from holdfast.net import wire
from holdfast.plan.planner import plan, shape
from holdfast.site.node import SiteNode
from holdfast.site.orders import Order
from holdfast.site.stages import TaskRunner

Move = Callable[[], None]


class World:
    """A flow on `sites` simulated sites of `apps` applications. `results` has the rows of each
    sink, by epoch. With a `memory`, the world does not compute an order again that another world of
    the same flow has computed."""

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
            into, with_order = self.results[stage.name], stage.sink.with_order
            stage.sink = SimStore(self, stage.id, into, with_order)
        self.stalled: Callable[[SiteId, Order], bool] = lambda site, order: False
        self.steps = 0
        self.log: list[str] = []
        self.error: Exception | None = None
        self.shell = SiteShell(self)
        self.nodes: dict[SiteId, SiteNode] = {}
        self.network: dict[Link, deque[Any]] = {}
        self.broken: set[Link] = set()
        self.exceeded = False
        """Whether a fault took more than the protection promises to survive."""
        self.over = False
        self._timers: list[WorldTimer] = []
        self._relaunch = relaunch
        self.apps, self._sites, self._spares = apps, sites, spares
        self.shape = widen_failure_domains(shape(self.plan, self.options.partitions), apps)
        self.home: dict[SiteId, int] = {}
        """The application that launched each site."""
        self.plane = ControlPlane(self)
        self.plane.start_all(apps)

    @property
    def controls(self) -> dict[int, ControlNode]:
        """The controls that live, by application."""
        return self.plane.nodes

    @property
    def controller(self) -> Controller:
        return self.plane.controller

    @property
    def leader(self) -> int | None:
        return self.plane.leader

    @property
    def leaderless(self) -> bool:
        return all(node.leading is None for node in self.controls.values())

    @property
    def ledger(self) -> ArbiterLedger:
        return self.plane.ledger

    @property
    def records(self) -> list[EpochRecord]:
        return self.plane.records

    def now(self) -> float:
        """Return the time in seconds. This world has no clock; a step counts as a millisecond."""
        return self.steps / 1e3

    def launch(self, site: SiteId, app: int = 0) -> None:
        self.nodes[site], self.home[site] = self.make_node(site), app
        for other in self.controls:
            self.connect(site, other)

    def connect(self, site: SiteId, app: int) -> None:
        """Connect a site to an application's control, and register it there."""
        self.network[site, control_of(app)] = deque()
        self.network.setdefault((control_of(app), site), deque())
        self.announce(site, app)

    def make_node(self, site: SiteId) -> SiteNode:
        port = SitePort(self, site)
        return SiteNode(self.plan, site, self.options, port, now=self.now, runner=self.runner)

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

    def registration(self, site: SiteId) -> wire.Register:
        return wire.Register(site, "", site, 0, self.domain_of(site))

    def domain_of(self, site: SiteId) -> Domain:
        """Return the failure domain of a site: each is a process of its own."""
        return Domain(f"p{site}", f"p{site}", "host", f"application {self.home[site]}")

    # --- overridden by a world with a clock -----------------------------------------------------

    def packed(self, message: wire.Message, body: list[Any] | None) -> tuple[wire.Message, Any]:
        """Return a message as it arrives, after the real encoder and decoder."""
        data = b"".join(bytes(memoryview(part)) for part in body or [])
        return wire.decode(wire.encode(message)[wire.PREFIX.size :]), memoryview(data)

    lease_s = NO_LEASE_S
    """Without a clock no lease ends."""

    def announce(self, site: SiteId, app: int) -> None:
        """Tell a control that a site's process has started."""
        self.control(app, ev.SiteSaid(site, self.registration(site)))

    def put(self, link: Link, item: Any) -> None:
        """Send something on a link."""
        self.network[link].append(item)

    def put_instead(self, link: Link, items: Iterable[Any]) -> None:
        """Replace everything that is on its way on a link."""
        self.network[link] = deque(items)

    def later(self, seconds: float, what: WorldTimer) -> None:
        """Set a timer."""
        self._timers.append(what)

    # --- running --------------------------------------------------------------------------------

    def run(self, steps_max: int = 1_000_000) -> None:
        """Run until the flow has ended; raise its error."""
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
        """Run until nothing can happen, because stages are stalled. Return the number of steps."""
        begun = self.steps
        while not self.ended and self.step():
            pass
        return self.steps - begun

    def step(self) -> bool:
        """Let one thing happen, chosen by the seed. Return False if nothing can happen."""
        moves = self.moves()
        if not moves or (self._timers and self.random.random() < 0.01):
            if not self._timers:
                return False
            self.happen(self._timers.pop(self.random.randrange(len(self._timers))))
        else:
            self.random.choice(moves)()
        self.steps += 1
        return True

    def happen(self, due: WorldTimer) -> None:
        """Carry out what a timer was set for."""
        if isinstance(due, LaunchProcess):
            self.launch(due.site, due.app)
        elif isinstance(due, RestartApplication):
            self.restart(due.app)
        elif isinstance(due, NoticeExits):
            self.plane.on_exits(due.sites)
        elif self.plane.lives[due.app] == due.life:
            self.control(due.app, due.event)

    def moves(self) -> list[Move]:
        """Return everything that can happen next except timers. The order depends only on the
        state."""
        moves: list[Move] = []
        for site, node in self.nodes.items():
            if site in self.shell.failed:
                continue
            for order in node.orders:
                if not self.stalled(site, order) and node.stages.ready(order):
                    moves.append(lambda s=site, o=order: self._work(s, o))  # type: ignore[misc]
            if self.shell.started and not node.finished and node.dataflow.records.last is None:
                for task, split in node.stages.splits():
                    room = split.rows_held < self.options.read_ahead_rows
                    held = node.dataflow.tasks[task]
                    if room and not split.ended and held.computes:
                        moves.append(lambda s=site, u=task, p=split: self._read(s, u, p))  # type: ignore[misc]
            if node.transfers.outgoing:
                moves.append(lambda s=site: self.hand_over(s))  # type: ignore[misc]
        for link, queue in self.network.items():
            if queue:
                moves.append(lambda k=link: self.deliver(k))  # type: ignore[misc]
        return moves

    def drain(self) -> None:
        """Ask the sequencer to take no more rows."""
        for app in list(self.controls):
            self.control(app, requests.StopRequested(drain=True))

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
        """Return all rows of a sink, in the order in which they were written."""
        batches = [b for _, b in sorted(self.results[sink].items()) if b.num_rows]
        if not batches:
            schema = self.plan.stage_named(sink).inputs[0].schema
            return schema.empty_table()
        return pa.Table.from_batches(batches)

    # --- faults ---------------------------------------------------------------------------------

    def survives(self, *victims: SiteId) -> bool:
        """Whether every task that cannot be rebuilt has a live replica or standby without these
        sites; of mirrors, whether one is whole. A joining replica does not count."""
        view = self.controller.view
        if view is None:
            return False
        living = set(self.nodes) - set(victims)
        if self.shape.granularity != "partition":
            return is_whole(view, living)
        stages = self.controller.shape.stages
        kept = [u for u in view.tasks() if not stages[u[0]].guard.rebuild_level]
        groups = [view.group(u) for u in kept]
        if not all(living.intersection(c.replicas + c.standbys) for c in groups):
            return False
        left = view.without([s for s in view.members if s not in living])
        return lost_stretch(left, self.controller.shape, self._weak(view)) is None

    @property
    def moves_are_open(self) -> bool:
        """Whether replicas are to leave their sites, or sites the flow."""
        view = self.controller.view
        if view is None:
            return False
        return bool(view.emptying or any(view.group(u).leaving for u in view.tasks()))

    def _weak(self, view: View) -> list[TaskId]:
        """The tasks that are being rebuilt, or were rebuilt so lately that what they keep is not
        enough for all of their consumers to be rebuilt from."""
        weak = [u for u in view.tasks() if view.group(u).joining]
        for node in self.nodes.values():
            for task, replica in node.dataflow.tasks.items():
                lanes = [lane for p in replica.outputs.values() for lane in p.lanes.values()]
                if any(lane.known_stable < lane.rebuilt_from for lane in lanes):
                    weak.append(task)
        stages = self.controller.shape.stages
        return [u for u in weak if stages[u[0]].guard.rebuild_level]

    def crash(self, *sites: SiteId) -> None:
        """Kill these processes at once. The other ones notice later."""
        self.log.append(f"{self.steps}: crash of {sites}")
        if self.controller.running and not self.survives(*sites):
            self.exceeded = True
        for site in sites:
            self.vanish(site)
        self.later(0.0, NoticeExits(tuple(sites)))

    def vanish(self, site: SiteId) -> None:
        """End a process. Some of the messages that it sent still arrive, then its connections
        break."""
        del self.nodes[site]
        for link in [k for k in self.network if site in k]:
            queue = self.network.pop(link)
            if link[0] == site and link[1] in self.nodes:
                keep = self.random.randint(0, len(queue))
                self.put_instead(link, [*list(queue)[:keep], Down()])
            elif link[0] == site and link[1] < 0:
                self.last_words(link, list(queue)[: self.random.randint(0, len(queue))])

    def last_words(self, link: Link, items: list[Any]) -> None:
        """Deliver the messages to a control that a dead site had sent."""
        for item in items:
            self.plane.hear(app_of(link[1]), link[0], item[0])

    def reset(self, one: SiteId, other: SiteId) -> None:
        """Break the connection between two sites; they connect again."""
        self.log.append(f"{self.steps}: reset of {one}-{other}")
        for link in ((one, other), (other, one)):
            if link in self.network:
                self.put_instead(link, [Down(), Up()])
                self.broken.add((link[1], link[0]))  # what it sends before it notices is lost

    def crash_controller(self, app: int | None = None) -> None:
        """Kill the control of an application, by default the leader's. Its sites stay alive."""
        app = self.leader if app is None else app
        assert app is not None, "no application leads"
        self.log.append(f"{self.steps}: crash of the controller of application {app}")
        self.plane.kill(app)
        for site in self.nodes:
            self.network.pop((site, control_of(app)), None)
        self.later(self.options.lease_s, RestartApplication(app))

    def restart(self, app: int) -> None:
        """Start an application again after its control died. Messages that the old control sent may
        still arrive."""
        self.log.append(f"{self.steps}: application {app} is back")
        self.expire()
        self.plane.start(app)

    def expire(self) -> None:
        """End the lease of an application that died."""
        self.ledger.end_lease()

    # --- moves ----------------------------------------------------------------------------------

    def _read(self, site: SiteId, task: Any, split: Any) -> None:
        node = self.nodes[site]
        node.sourcing.read_split(task, split, self.random.randint(1, self.options.block_rows))
        self.after(node)

    def _work(self, site: SiteId, order: Order) -> None:
        node = self.nodes[site]
        node.orders.remove(order)
        self.shell.guarded(node, lambda: node.execute(order))

    def hand_over(self, site: SiteId) -> None:
        self.nodes[site].hand_over()

    def after(self, node: SiteNode) -> None:
        """Send the acks of a node that has acted, and check it."""
        while node.acks_wait:
            node.flush()
        self.check(node)

    def check(self, node: SiteNode) -> None:
        """Check the invariants of a node's machines."""
        node.dataflow.check_invariants()
        for reader in node.stages.pushed().values():
            reader.check_invariants()
        if node.sequencer is not None:
            node.sequencer.check_invariants()

    def deliver(self, link: Link) -> None:
        """Deliver the oldest message of a link."""
        sender, receiver = link
        item = self.network[link].popleft()
        if receiver < 0 and isinstance(item, Down):
            if sender not in self.nodes:
                del self.network[link]
            self.control(app_of(receiver), ev.SiteLost(sender))
            return
        if receiver < 0:
            self.plane.hear(app_of(receiver), sender, item[0])
            return
        node = self.nodes[receiver]
        self.shell.guarded(node, lambda: self.shell.take(node, sender, item))
        gone = sender not in self.nodes and sender >= 0
        if isinstance(item, Down) and gone and link in self.network:
            del self.network[link]

    # --- effects of controls ----------------------------------------------------------------------

    def control(self, app: int, event: ev.ControlEvent) -> None:
        """Have a control handle an event."""
        self.plane.handle(app, event)

    def ask(self, app: int, ask: ArbiterAsk) -> None:
        """Ask the arbiter, which answers at once."""
        self.control(app, self.plane.answer(app, ask))

    def launch_for(self, app: int, site: SiteId) -> None:
        """Start a site's process, in an application."""
        if self.plane.starting:
            self.launch(site, app)
        elif self._relaunch:
            self.later(0.0, LaunchProcess(site, app))

    def probe(self, app: int, effect: ev.Probe) -> None:
        gone = tuple(s for s in effect.addresses if s not in self.nodes)
        self.control(app, ev.Probed(effect.number, gone))

    def set_timer(self, app: int, effect: ev.SetTimer) -> None:
        """Set a control's timer. Without a clock no site is silent for too long, and no lease needs
        renewing; dead sites are detected at once."""
        tell = TellControl(app, self.plane.lives[app], ev.TimerFired(effect.timer))
        if isinstance(effect.timer, ev.InquireTimer):
            self.control(app, tell.event)
        elif not isinstance(effect.timer, ev.WatchTimer | ev.LeadTimer):
            self.later(effect.seconds, tell)

    def on_view_given(self, app: int, view: View) -> None:
        self.log.append(f"{self.steps}: {view}")

    def end(self, error: Exception | None) -> None:
        """Note that the flow has ended. Later calls have no effect."""
        if not self.over:
            self.error, self.over = error, True

    def between(self, app: int, effect: ev.ControlEffect) -> None:
        """Carry out what concerns several applications; here there is one."""

    def send_order(self, app: int, site: SiteId, message: wire.Message) -> None:
        link = (control_of(app), site)
        if link in self.network and site in self.nodes:
            if isinstance(message, wire.NewView):
                self._skip_views(link, message.view)
            self.put(link, (message, NOTHING))

    def _skip_views(self, link: Link, view: View) -> None:
        """A control that commits a view right after another may send only the last one. An old
        leader's view takes the place of no later one."""
        queue = self.network[link]
        if self.random.random() < 0.5:
            sent = [i for i in queue if isinstance(i[0], wire.NewView)]
            for item in [i for i in sent if view.replaces(i[0].view)]:
                queue.remove(item)
