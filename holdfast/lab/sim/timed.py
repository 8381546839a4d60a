"""A simulated world with a clock: delays, speeds, pauses and leases, all from one seed.

Events happen in the order of their due times. The delay of a message is random, and grows with its
size; connections are independent of each other. A site carries out one order at a time, at the
speed of its machine. Sites read sources, hand state over and send heartbeats at the intervals of
real ones, scaled down so that a lease lasts a few dozen epochs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.control import events as ev
from holdfast.core.effects import ArbiterAsk
from holdfast.core.events import ReplicaBehind
from holdfast.core.ids import SiteId
from holdfast.core.layout import View
from holdfast.errors import InvariantError
from holdfast.lab.sim.agenda import Agenda
from holdfast.lab.sim.applications import Applications
from holdfast.lab.sim.gated import GatedSource
from holdfast.lab.sim.links import NOTHING, Down, Link, SitePort, control_of
from holdfast.lab.sim.memory import Memory
from holdfast.lab.sim.pushing import PushedRows, SimQuery
from holdfast.lab.sim.run_trace import RunTrace
from holdfast.lab.sim.timers import LaunchProcess, NoticeExits, RestartApplication, WorldTimer
from holdfast.lab.sim.world import World
from holdfast.net import wire
from holdfast.net.bundles import Frames
from holdfast.site.node import Codec, SiteNode
from holdfast.site.orders import Order

BEAT = wire.Beat()
_SHARED = frozenset({wire.Acks, wire.Record, wire.Delivered, wire.Blocks, wire.Pass})


@dataclass(frozen=True, slots=True)
class Pace:
    """Durations, in seconds."""

    delay: float = 0.0003
    spread: float = 1.0
    """The spread of the delays: the sigma of their logarithm."""
    bytes_per_s: float = 50e6
    work: float = 0.0004
    poll: float = 0.002
    part: float = 0.0005
    acks: float = 0.01
    retry_stalled: float = 0.06
    status: float = 0.03
    relaunch: float = 0.02
    notice: float = 0.001
    """Time until the death of a process is noticed."""
    arbiter: float = 0.0002
    """Delay of a message to the arbiter, and of its answer; with 0 it answers at once."""


class _ByReference(Codec):
    """Passes bundles between nodes of one process without encoding them: they never change."""

    def pack(self, frames: Frames) -> list[Any]:
        return [b"", b"", frames]

    def unpack(self, message: wire.Bundle, body: Any, schema: Any) -> Frames:
        assert isinstance(body, Frames)
        return body


class TimedWorld(World):
    """A flow on simulated sites, in virtual time; see `World`.

    With `free_rows`, each split gives at most that number of rows before `gate_is_open` is set.
    """

    def __init__(
        self,
        flow: Flow,
        *,
        sites: int = 3,
        spares: int = 0,
        seed: int = 0,
        options: Options | None = None,
        pace: Pace | None = None,
        free_rows: int | None = None,
        memory: Memory | None = None,
        apps: int = 1,
    ) -> None:
        self.pace = pace or Pace()
        self.lease_s = (options or Options()).lease_s
        self.applications = Applications(self)
        self.gate_is_open = False
        self.time = 0.0
        self.agenda = Agenda()
        self._free: dict[Link, float] = {}
        self._awake: dict[SiteId, float] = {}
        self._open: dict[Link, float] = {}
        self._speed: dict[SiteId, float] = {}
        self.paused_at: dict[SiteId, float] = {}
        self.poisoned = False
        """Whether the input has a row that makes the flow stop."""
        self.trace = RunTrace()
        super().__init__(
            flow,
            sites=sites,
            spares=spares,
            seed=seed,
            options=options,
            memory=memory,
            apps=apps,
        )
        self.queries: list[SimQuery] = []
        """The queries that push rows."""
        for stage in self.plan.sources:
            if isinstance(stage.source, PushedRows):
                most = stage.source.rows.num_rows if free_rows is None else free_rows
                self.queries.append(SimQuery(self, stage.id, stage.source, most))
            elif free_rows is not None and stage.source is not None:
                stage.source = GatedSource(self, stage.source, free_rows)
        self.add(self.options.lease_s / 5, "pulse", None)

    def now(self) -> float:
        return self.time

    def note(
        self, kind: str, site: int, text: str, other: int | None = None, until: float | None = None
    ) -> None:
        """Record something for the timeline."""
        self.trace.note(self.time, kind, site, text, other, until)

    # --- the clock ------------------------------------------------------------------------------

    def add(self, delay: float, kind: str, what: Any) -> None:
        """Have something happen after a delay."""
        self.agenda.add(self.time + delay, kind, what)

    def _once(self, delay: float, kind: str, site: SiteId) -> None:
        self.agenda.add_once(self.time + delay, kind, site)

    def later(self, seconds: float, what: WorldTimer) -> None:
        if isinstance(what, NoticeExits):
            seconds += self.pace.notice * (0.2 + self.random.random())
        elif isinstance(what, LaunchProcess):
            seconds += self.pace.relaunch * (0.2 + 2 * self.random.random())
        self.add(seconds, "timer", what)

    def step(self) -> bool:
        """Let the next event happen. Return False if there is none."""
        if not self.agenda:
            return False
        due, kind, what = self.agenda.pop()
        self.time = max(self.time, due)
        self.steps += 1
        match kind:
            case "net":
                self._arrive(what)
            case "work":
                self._work_at(what)
            case "poll" | "hand" | "retry_stalled" | "status" | "acks":
                self._do_regularly(kind, what)
            case "timer":
                self._timer(what)
            case "control":
                self._reach(*what)
            case "ask":
                self.applications.on_ask(*what)
            case "pulse":
                self._pulse()
            case "do":
                what(self)
        return True

    def at(self, when: float, act: Any) -> None:
        """Call ``act(world)`` at this time."""
        self.add(max(0.0, when - self.time), "do", act)

    def _timer(self, what: WorldTimer) -> None:
        self.happen(what)
        if isinstance(what, RestartApplication):
            self.note("control", control_of(what.app), f"application {what.app} is back")

    # --- the network ----------------------------------------------------------------------------

    def packed(self, message: wire.Message, body: list[Any] | None) -> tuple[wire.Message, Any]:
        """Return a message as it arrives. The frequent ones hold nothing that changes, so that
        sender and receiver can share them; `World` has all of them encoded and decoded."""
        if type(message) in _SHARED:
            return message, NOTHING
        if body and isinstance(body[-1], Frames):
            return message, body[-1]
        return super().packed(message, body)

    def put(self, link: Link, item: Any) -> None:
        super().put(link, item)
        self._schedule(link, item)

    def put_instead(self, link: Link, items: Iterable[Any]) -> None:
        super().put_instead(link, items)
        for item in self.network[link]:
            self._schedule(link, item)

    def _schedule(self, link: Link, item: Any) -> None:
        took = self.pace.delay * self.random.lognormvariate(0.0, self.pace.spread)
        nbytes = item[1].nbytes if isinstance(item, tuple) else 0
        due = max(self._free.get(link, 0.0), self.time + took + nbytes / self.pace.bytes_per_s)
        self._free[link] = due
        self.agenda.add(due, "net", link)
        if isinstance(item, tuple):
            self.trace.message(self.time, link, item[0], due)

    def _arrive(self, link: Link) -> None:
        queue = self.network.get(link)
        if not queue:
            return  # the message was lost with its connection
        receiver = link[1]
        ready = max(self._open.get(link, 0.0), self._awake.get(receiver, 0.0))
        if ready > self.time:
            self.add(ready - self.time, "net", link)
            return
        if receiver >= 0 and receiver not in self.nodes:
            queue.popleft()
            return
        if isinstance(queue[0], tuple) and isinstance(queue[0][0], wire.Bundle):
            self._refuse_strangers(link)
        self.deliver(link)
        if receiver in self.nodes:
            self._rouse(receiver)

    def _refuse_strangers(self, link: Link) -> None:
        view = self.nodes[link[1]].view
        if view is not None and view.number > 0 and link[0] not in view.members:
            raise InvariantError(f"site {link[1]} takes a frame from {link[0]}, who is no member")

    # --- sites ----------------------------------------------------------------------------------

    def make_node(self, site: SiteId) -> SiteNode:
        return SiteNode(
            self.plan,
            site,
            self.options,
            SitePort(self, site),
            now=self.now,
            codec=_ByReference(),
            runner=self.runner,
        )

    def launch(self, site: SiteId, app: int = 0) -> None:
        super().launch(site, app)
        for kind, every in (("poll", self.pace.poll), ("retry_stalled", self.pace.retry_stalled)):
            self._once(every * self.random.random(), kind, site)
        self._once(self.pace.status, "status", site)

    def announce(self, site: SiteId, app: int) -> None:
        self.put((site, control_of(app)), (self.registration(site), NOTHING))
        if self.nodes[site].view is not None:
            self.nodes[site].report_again()

    def is_awake(self, site: SiteId) -> bool:
        """Whether a site's process is alive and handles what it gets."""
        running = site in self.nodes and site not in self.shell.failed
        return running and self.shell.started and self._awake.get(site, 0.0) <= self.time

    def act_at(self, site: SiteId, act: Callable[[], object]) -> None:
        """Have a site handle something that comes from outside."""
        self.shell.guarded(self.nodes[site], act)
        if site in self.nodes:
            self._rouse(site)

    def _rouse(self, site: SiteId) -> None:
        """Schedule the work that a site has."""
        node = self.nodes[site]
        if node.orders:
            cost = self.pace.work * (0.3 + self.random.random())
            self._once(cost * self._speed.get(site, 1.0), "work", site)
        if node.transfers.outgoing:
            self._once(self.pace.part * self.random.random() * 2, "hand", site)

    def _asleep(self, kind: str, site: SiteId) -> bool:
        if self._awake.get(site, 0.0) > self.time:
            self._once(self._awake[site] - self.time, kind, site)
            return True
        return False

    def _work_at(self, site: SiteId) -> None:
        node = self.nodes.get(site)
        if node is None or self._asleep("work", site) or site in self.shell.failed:
            return
        done: list[Order | None] = []
        self.shell.guarded(node, lambda: done.append(node.work()))
        if done and done[0] is not None:
            self._note_work(site, done[0])
        if site in self.nodes and (not done or done[0] is not None):
            self._rouse(site)
        elif site in self.nodes and node.orders:
            self._once(self.pace.poll, "work", site)  # the order waits for rows of a source

    def _note_work(self, site: SiteId, order: Order) -> None:
        if self.trace.recording:
            name = self.plan.stages[order.task[0]].name.replace(" ", "_")
            text = f"{name}/{order.task[1]} epoch {order.epoch}"
            took = self.pace.work * self._speed.get(site, 1.0) / 2
            self.trace.note(self.time - took, "work", site, text, None, self.time)

    def _do_regularly(self, kind: str, site: SiteId) -> None:
        node = self.nodes.get(site)
        if node is None or self._asleep(kind, site):
            return
        again: float | None
        match kind:
            case "poll":
                if self.shell.started and site not in self.shell.failed:
                    self.shell.guarded(node, node.read_ahead)
                again = self.pace.poll
            case "hand":
                self.shell.guarded(node, node.hand_over)
                again = (
                    self.pace.part * self.random.random() * 2 if node.transfers.outgoing else None
                )
            case "retry_stalled":
                self.shell.guarded(node, node.retry_stalled)
                again = self.pace.retry_stalled
            case "acks":
                self.shell.guarded(node, node.flush)
                again = None
            case _:
                self._report_behind(node)
                again = self.pace.status
        if site in self.nodes:
            self._rouse(site)
            if again is not None and not self.ended:
                self._once(again, kind, site)

    def _report_behind(self, node: SiteNode) -> None:
        behind = node.behind()
        if behind is not None and behind[1] > self.options.kept_bytes_max:
            message = wire.Behind(ReplicaBehind(behind[0], f"{behind[1]} bytes are kept for it"))
            SitePort(self, node.site).tell(message)

    def after(self, node: SiteNode) -> None:
        """Send acks as a site does: together, unless a producer waits for one. `WorldChecks` checks
        the machines, though not after every call."""
        while node.acks_are_due:
            node.flush()
        if node.acks_wait:
            self._once(self.pace.acks, "acks", node.site)

    # --- control --------------------------------------------------------------------------------

    def _reach(self, app: int, life: int, event: ev.ControlEvent) -> None:
        """Deliver an event to a control, if it is still alive; if it is paused, when it wakes."""
        if self.plane.lives[app] != life:
            return
        wake = self._awake.get(control_of(app), 0.0)
        if wake > self.time:
            self.add(wake - self.time, "control", (app, life, event))
        else:
            self.control(app, event)

    def ask(self, app: int, ask: ArbiterAsk) -> None:
        if self.plane.starting or not self.pace.arbiter:
            super().ask(app, ask)
        else:
            self.applications.ask(app, ask)

    def set_timer(self, app: int, effect: ev.SetTimer) -> None:
        seconds, timer = effect.seconds, effect.timer
        if isinstance(timer, ev.WaitTimer | ev.InquireTimer):
            seconds /= 10  # the controller's own times are scaled down like the lease
        self.add(seconds, "control", (app, self.plane.lives[app], ev.TimerFired(timer)))

    def probe(self, app: int, effect: ev.Probe) -> None:
        gone = tuple(s for s in effect.addresses if s not in self.nodes)
        after = self.pace.delay * (0.5 + self.random.random())
        self.add(after, "control", (app, self.plane.lives[app], ev.Probed(effect.number, gone)))

    def between(self, app: int, effect: ev.ControlEffect) -> None:
        self.applications.execute(app, effect)

    def _pulse(self) -> None:
        """Send the heartbeats of the sites to the controls that they reach."""
        if not self.ended:
            self.add(self.options.lease_s / 5, "pulse", None)
        for site in [s for s in self.nodes if self._awake.get(s, 0.0) <= self.time]:
            for app in [*self.controls]:
                link = (site, control_of(app))
                awake = self._awake.get(link[1], 0.0) <= self.time
                if awake and link in self.network and self._open.get(link, 0.0) <= self.time:
                    self.control(app, ev.SiteSaid(site, BEAT))

    def last_words(self, link: Link, items: list[Any]) -> None:
        self.put_instead(link, [*items, Down()])

    def on_view_given(self, app: int, view: View) -> None:
        if self.trace.recording:
            self.note("view", control_of(app), str(view))
        super().on_view_given(app, view)

    def expire(self) -> None:
        """Do nothing: here leases end by the clock."""

    # --- faults ---------------------------------------------------------------------------------

    def crash(self, *sites: SiteId) -> None:
        for site in sites:
            self.note("fault", site, "crash")
            self.paused_at.pop(site, None)
        super().crash(*sites)

    def crash_controller(self, app: int | None = None) -> None:
        app = self.leader if app is None else app
        assert app is not None, "no application leads"
        self.note("fault", control_of(app), "crash")
        super().crash_controller(app)
        self._awake.pop(control_of(app), None)
        self.applications.died(app)

    def restart(self, app: int) -> None:
        self.applications.note_old_view()
        super().restart(app)

    def sleep(self, site: SiteId, seconds: float) -> None:
        """Make the process of a site or a control do nothing for this time."""
        self._awake[site] = self.time + seconds

    def pause(self, site: SiteId, seconds: float) -> None:
        """Pause a site's process. If the pause outlasts the lease, the site does not know when it
        wakes up that it is no longer a member."""
        self.note("fault", site, "pause", None, self.time + seconds)
        self.log.append(f"{self.time:.4f}: pause of {site} for {seconds:.4f}")
        self.sleep(site, seconds)
        self.paused_at[site] = self.time
        self.at(self.time + seconds, lambda world: world.paused_at.pop(site, None))

    def block(self, link: Link, seconds: float) -> None:
        """Hold back all messages in this direction for this time; none is lost."""
        self.note("fault", link[0], "blocked", link[1], self.time + seconds)
        self.log.append(f"{self.time:.4f}: {link} blocked for {seconds:.4f}")
        self._open[link] = self.time + seconds
        if link[1] < 0:  # heartbeats are held back, too
            self.paused_at.setdefault(link[0], self.time)
            self.at(self.time + seconds, lambda world: world.paused_at.pop(link[0], None))

    def slow(self, site: SiteId, factor: float, seconds: float) -> None:
        """Slow a site's machine down for this time."""
        self.note("fault", site, f"{factor:.0f} times slower", None, self.time + seconds)
        self.log.append(f"{self.time:.4f}: {site} {factor:.0f} times slower for {seconds:.4f}")
        self._speed[site] = factor
        self.at(self.time + seconds, lambda world: world._speed.pop(site, None))

    def reset(self, one: SiteId, other: SiteId) -> None:
        self.note("fault", one, "reset", other)
        super().reset(one, other)
