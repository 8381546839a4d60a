"""A simulated world with a clock: delays, speeds, pauses and leases, all from one seed.

What happens next is what is due next. Messages take a time that varies from one to the next and
with their size; connections are independent of each other. A site carries out one order at a time,
as fast as its machine is; sources are read, state is handed over, and silent sites are looked for,
at the intervals at which real ones do it (but scaled down, so that a lease is a few dozen epochs).
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.connectors.sources import Position, Source, SplitReader
from holdfast.control import events as ev
from holdfast.core.effects import ArbiterAsk
from holdfast.core.ids import SiteId
from holdfast.core.layout import View
from holdfast.engine.batches import empty
from holdfast.errors import InvariantError
from holdfast.lab.sim.applications import Applications
from holdfast.lab.sim.memory import Memory
from holdfast.lab.sim.world import (
    CONTROLLER,
    NOTHING,
    Down,
    Exited,
    Launch,
    Link,
    Restart,
    World,
    _Port,
    control_of,
)
from holdfast.net import wire
from holdfast.net.bundles import Frames
from holdfast.site.node import Codec, Node, Order

BEAT = wire.Beat()


@dataclass(frozen=True, slots=True)
class Pace:
    """How long things take, in seconds."""

    delay: float = 0.0003
    spread: float = 1.0
    """How much delays vary: the sigma of their logarithm."""
    bytes_per_s: float = 50e6
    work: float = 0.0004
    poll: float = 0.002
    part: float = 0.0005
    acks: float = 0.01
    retry_stalled: float = 0.06
    status: float = 0.03
    relaunch: float = 0.02
    notice: float = 0.001
    """How long it takes until a dead process is known to be dead."""
    arbiter: float = 0.0002
    """On the way to the arbiter, and back; 0: it answers at once."""


class _ByReference(Codec):
    """Bundles between nodes of one process go as they are: they are never changed."""

    def pack(self, frames: Frames) -> list[Any]:
        return [b"", b"", frames]

    def unpack(self, message: wire.Bundle, body: Any, schema: Any) -> Frames:
        assert isinstance(body, Frames)
        return body


class _Gated(Source):
    """A source that holds its last rows back until the world lets go of them: so that a flow does
    not end before it has recovered."""

    def __init__(self, world: TimedWorld, source: Source, rows: int) -> None:
        self.world, self._source, self._rows = world, source, rows
        self.schema, self.splits = source.schema, source.splits

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        reader = self._source.open(split, offset, position)
        return _GatedReader(self, reader, self._rows - offset)


class _GatedReader(SplitReader):
    def __init__(self, source: _Gated, reader: SplitReader, rows: int) -> None:
        self._source, self._reader, self._free = source, reader, rows

    def position(self) -> Position | None:
        return self._reader.position()

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        if due or self._source.world.gate_is_open:
            batch = self._reader.read(rows_max, due=due)
        elif self._free > 0:
            batch = self._reader.read(min(rows_max, self._free))
        else:
            return empty(self._source.schema)
        self._free -= batch.num_rows if batch is not None else 0
        return batch


class TimedWorld(World):
    """A flow on simulated sites, in virtual time. See `World` for what both have.

    With `free_rows`, each split gives only so many rows before `gate_is_open` is set.
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
        self._events: list[tuple[float, int, str, Any]] = []
        self._ties = itertools.count()
        self._free: dict[Link, float] = {}
        self._awake: dict[SiteId, float] = {}
        self._open: dict[Link, float] = {}
        self._speed: dict[SiteId, float] = {}
        self._pending: set[tuple[str, SiteId]] = set()
        self.paused_at: dict[SiteId, float] = {}
        self.old_view: View | None = None
        self.poisoned = False
        """Whether a row was put in that makes the flow stop."""
        self.trace: list[tuple[Any, ...]] | None = None
        super().__init__(
            flow,
            sites=sites,
            spares=spares,
            seed=seed,
            options=options,
            memory=memory,
            apps=apps,
        )
        for stage in self.plan.sources:
            if free_rows is not None and stage.source is not None:
                stage.source = _Gated(self, stage.source, free_rows)
        self._push(self.options.lease_s / 5, "pulse", None)

    def now(self) -> float:
        return self.time

    def note(
        self, kind: str, site: int, text: str, other: int | None = None, until: float | None = None
    ) -> None:
        """For the timeline, if somebody wants one."""
        if self.trace is not None:
            self.trace.append((self.time, kind, site, text, other, until))

    # --- the clock ------------------------------------------------------------------------------

    def _push(self, delay: float, kind: str, what: Any) -> None:
        heapq.heappush(self._events, (self.time + delay, next(self._ties), kind, what))

    def _once(self, delay: float, kind: str, site: SiteId) -> None:
        """Have something done at a site, unless it is going to be done anyway."""
        if (kind, site) not in self._pending:
            self._pending.add((kind, site))
            self._push(delay, kind, site)

    def later(self, seconds: float, what: Any) -> None:
        if isinstance(what, Exited):
            seconds += self.pace.notice * (0.2 + self.random.random())
        elif isinstance(what, Launch):
            seconds += self.pace.relaunch * (0.2 + 2 * self.random.random())
        self._push(seconds, "timer", what)

    def step(self) -> bool:
        """Let the next thing happen; False if nothing is left."""
        if not self._events:
            return False
        due, _, kind, what = heapq.heappop(self._events)
        self.time = max(self.time, due)
        self.steps += 1
        match kind:
            case "net":
                self._arrive(what)
            case "work":
                self._pending.discard((kind, what))
                self._work_at(what)
            case "poll" | "hand" | "retry_stalled" | "status" | "acks":
                self._pending.discard((kind, what))
                self._flush_notes(kind, what)
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
        """Have ``act(world)`` called at a time."""
        self._push(max(0.0, when - self.time), "do", act)

    def _timer(self, what: Any) -> None:
        self.happen(what)
        if isinstance(what, Restart):
            self.note("control", control_of(what.app), f"application {what.app} is back")

    # --- the network ----------------------------------------------------------------------------

    def packed(self, message: wire.Message, body: list[Any] | None) -> tuple[wire.Message, Any]:
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
        heapq.heappush(self._events, (due, next(self._ties), "net", link))
        if self.trace is not None and isinstance(item, tuple):
            self._note_message(link, item, due)

    def _note_message(self, link: Link, item: Any, due: float) -> None:
        message = item[0]
        if isinstance(message, wire.Bundle):
            kind, text = "send", f"bundle x{message.exchange} epoch {message.epoch}"
        elif isinstance(message, wire.Acks):
            kind, text = "ack", "ack"
        elif isinstance(message, wire.NewView):
            kind, text = "send", f"view {message.view.term}.{message.view.number}"
        else:
            kind, text = "send", type(message).__name__
        self.note(kind, link[0], text, link[1], due)

    def _arrive(self, link: Link) -> None:
        queue = self.network.get(link)
        if not queue:
            return  # it was lost with its connection
        receiver = link[1]
        ready = max(self._open.get(link, 0.0), self._awake.get(receiver, 0.0))
        if ready > self.time:
            self._push(ready - self.time, "net", link)
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

    def make_node(self, site: SiteId) -> Node:
        return Node(
            self.plan,
            site,
            self.options,
            _Port(self, site),
            now=self.now,
            codec=_ByReference(),
            runner=self.runner,
        )

    def _launch(self, site: SiteId, app: int = 0) -> None:
        super()._launch(site, app)
        for kind, every in (("poll", self.pace.poll), ("retry_stalled", self.pace.retry_stalled)):
            self._once(every * self.random.random(), kind, site)
        self._once(self.pace.status, "status", site)

    def announce(self, site: SiteId, app: int) -> None:
        self.put((site, control_of(app)), (self.registration(site), NOTHING))
        if self.nodes[site].view is not None:
            self.nodes[site].report_again()

    def _rouse(self, site: SiteId) -> None:
        """See to it that a site does what it has to do."""
        node = self.nodes[site]
        if node.orders:
            cost = self.pace.work * (0.3 + self.random.random())
            self._once(cost * self._speed.get(site, 1.0), "work", site)
        if node.outgoing:
            self._once(self.pace.part * self.random.random() * 2, "hand", site)

    def _asleep(self, kind: str, site: SiteId) -> bool:
        if self._awake.get(site, 0.0) > self.time:
            self._once(self._awake[site] - self.time, kind, site)
            return True
        return False

    def _work_at(self, site: SiteId) -> None:
        node = self.nodes.get(site)
        if node is None or self._asleep("work", site) or site in self.failed:
            return
        done: list[Order | None] = []
        self.guarded(node, lambda: done.append(node.work()))
        if done and done[0] is not None:
            self._note_work(site, done[0])
        if site in self.nodes and (not done or done[0] is not None):
            self._rouse(site)
        elif site in self.nodes and node.orders:
            self._once(self.pace.poll, "work", site)  # it waits for rows of a source

    def _note_work(self, site: SiteId, order: Order) -> None:
        if self.trace is not None:
            name = self.plan.stages[order.task[0]].name.replace(" ", "_")
            text = f"{name}/{order.task[1]} epoch {order.epoch}"
            took = self.pace.work * self._speed.get(site, 1.0) / 2
            self.trace.append((self.time - took, "work", site, text, None, self.time))

    def _flush_notes(self, kind: str, site: SiteId) -> None:
        node = self.nodes.get(site)
        if node is None or self._asleep(kind, site):
            return
        again: float | None
        match kind:
            case "poll":
                if self._started and site not in self.failed:
                    self.guarded(node, node.read_ahead)
                again = self.pace.poll
            case "hand":
                self.guarded(node, node.hand_over)
                again = self.pace.part * self.random.random() * 2 if node.outgoing else None
            case "retry_stalled":
                self.guarded(node, node.retry_stalled)
                again = self.pace.retry_stalled
            case "acks":
                self.guarded(node, node.flush)
                again = None
            case _:
                self._report_behind(node)
                again = self.pace.status
        if site in self.nodes:
            self._rouse(site)
            if again is not None and not self.ended:
                self._once(again, kind, site)

    def _report_behind(self, node: Node) -> None:
        behind = node.behind()
        if behind is not None and behind[1] > self.options.kept_bytes_max:
            message = wire.Behind(behind[0], f"{behind[1]} bytes are kept for it")
            _Port(self, node.site).tell(message)

    def _after(self, node: Node) -> None:
        """Acks are sent as a site sends them: together, unless somebody waits for one. Machines
        are looked at from time to time: see `Checks`."""
        while node.acks_are_due:
            node.flush()
        if node.acks_wait:
            self._once(self.pace.acks, "acks", node.site)

    # --- control --------------------------------------------------------------------------------

    def _reach(self, app: int, life: int, event: ev.ControlEvent) -> None:
        """Something reaches a control, if that still lives, and when it is awake."""
        if self.lives[app] != life:
            return
        wake = self._awake.get(control_of(app), 0.0)
        if wake > self.time:
            self._push(wake - self.time, "control", (app, life, event))
        else:
            self.control(app, event)

    def ask(self, app: int, ask: ArbiterAsk) -> None:
        if self._setting_out or not self.pace.arbiter:
            super().ask(app, ask)
        else:
            self.applications.ask(app, ask)

    def set_timer(self, app: int, effect: ev.SetTimer) -> None:
        seconds, timer = effect.seconds, effect.timer
        if isinstance(timer, ev.WaitTimer | ev.InquireTimer):
            seconds /= 10  # the controller's own times are scaled down like the lease
        self._push(seconds, "control", (app, self.lives[app], ev.TimerFired(timer)))

    def probe(self, app: int, effect: ev.Probe) -> None:
        gone = tuple(s for s in effect.addresses if s not in self.nodes)
        after = self.pace.delay * (0.5 + self.random.random())
        self._push(after, "control", (app, self.lives[app], ev.Probed(effect.number, gone)))

    def between(self, app: int, effect: ev.ControlEffect) -> None:
        self.applications.execute(app, effect)

    def _pulse(self) -> None:
        """Sites say that they live, to whoever they reach."""
        if not self.ended:
            self._push(self.options.lease_s / 5, "pulse", None)
        for site in [s for s in self.nodes if self._awake.get(s, 0.0) <= self.time]:
            for app in [*self.controls]:
                link = (site, control_of(app))
                awake = self._awake.get(link[1], 0.0) <= self.time
                if awake and link in self.network and self._open.get(link, 0.0) <= self.time:
                    self.control(app, ev.SiteSaid(site, BEAT))

    def last_words(self, link: Link, items: list[Any]) -> None:
        self.put_instead(link, [*items, Down()])

    def _apply(self, app: int, effect: ev.ControlEffect) -> None:
        if self.trace is not None and isinstance(effect, ev.ViewGiven):
            self.note("view", control_of(app), str(effect.view))
        super()._apply(app, effect)

    def expire(self) -> None:
        """Leases run out by themselves."""

    # --- faults ---------------------------------------------------------------------------------

    def crash(self, *sites: SiteId) -> None:
        for site in sites:
            self.note("fault", site, "crash")
            self.paused_at.pop(site, None)
        super().crash(*sites)

    def crash_controller(self, app: int | None = None) -> None:
        app = self.leader if app is None else app
        assert app is not None, "nobody leads"
        self.note("fault", control_of(app), "crash")
        super().crash_controller(app)
        self._awake.pop(control_of(app), None)
        self.applications.died(app)

    def restart(self, app: int) -> None:
        known = self.ledger.known
        self.old_view = known.view if known is not None else None
        super().restart(app)

    def stop_application(self, app: int, seconds: float) -> None:
        """Its control stands still (SIGSTOP), and finds out later that it does not lead any more.
        Its sites go on."""
        self.note("fault", control_of(app), "stopped", None, self.time + seconds)
        self.log.append(f"{self.time:.4f}: application {app} stopped for {seconds:.4f}")
        self._awake[control_of(app)] = self.time + seconds

    def cut_off_from_arbiter(self, app: int, seconds: float) -> None:
        """It reaches everybody but the arbiter."""
        self.note("fault", control_of(app), "no arbiter", None, self.time + seconds)
        self.log.append(f"{self.time:.4f}: no arbiter for application {app} for {seconds:.4f}")
        self.applications.cut_off_until[app] = self.time + seconds

    def reset_control(self, site: SiteId, app: int) -> None:
        """The connection of a site to a control breaks, and is rebuilt."""
        self.note("fault", site, "reset", control_of(app))
        self.log.append(f"{self.time:.4f}: reset of {site} and application {app}")
        self.put_instead((control_of(app), site), [])
        self.put_instead((site, control_of(app)), [Down()])
        self.announce(site, app)

    def lose_session(self) -> None:
        """The arbiter ends the lease of whoever leads, who does not know."""
        self.note("fault", CONTROLLER, "session lost")
        self.log.append(f"{self.time:.4f}: the leader has lost its session")
        self.ledger.end_lease()

    def lose_answers(self, app: int, count: int) -> None:
        """What the arbiter does for it next is done, and it does not hear so."""
        self.note("fault", control_of(app), "answers lost")
        self.log.append(f"{self.time:.4f}: {count} answers to application {app} get lost")
        self.applications.unheard[app] = count

    def crash_application(self, app: int) -> None:
        """It dies with all its sites."""
        self.crash(*self.applications.sites_of(app))
        if app in self.controls:
            self.crash_controller(app)

    def pause(self, site: SiteId, seconds: float) -> None:
        """A process stands still. If that is longer than the lease, it wakes up as a zombie."""
        self.note("fault", site, "pause", None, self.time + seconds)
        self.log.append(f"{self.time:.4f}: pause of {site} for {seconds:.4f}")
        self._awake[site] = self.time + seconds
        self.paused_at[site] = self.time
        self.at(self.time + seconds, lambda world: world.paused_at.pop(site, None))

    def block(self, link: Link, seconds: float) -> None:
        """Nothing gets through in this direction for a while; nothing is lost."""
        self.note("fault", link[0], "blocked", link[1], self.time + seconds)
        self.log.append(f"{self.time:.4f}: {link} blocked for {seconds:.4f}")
        self._open[link] = self.time + seconds
        if link[1] < 0:  # its beats do not get through either
            self.paused_at.setdefault(link[0], self.time)
            self.at(self.time + seconds, lambda world: world.paused_at.pop(link[0], None))

    def slow(self, site: SiteId, factor: float, seconds: float) -> None:
        """A machine is slower for a while."""
        self.note("fault", site, f"{factor:.0f} times slower", None, self.time + seconds)
        self.log.append(f"{self.time:.4f}: {site} {factor:.0f} times slower for {seconds:.4f}")
        self._speed[site] = factor
        self.at(self.time + seconds, lambda world: world._speed.pop(site, None))

    def reset(self, one: SiteId, other: SiteId) -> None:
        self.note("fault", one, "reset", other)
        super().reset(one, other)

    def send_old_view(self) -> None:
        """A controller that does not know yet that it is not the leader any more says once again
        what it said last."""
        if self.old_view is None:
            return
        self.note("fault", CONTROLLER, "an old leader speaks")
        self.log.append(f"{self.time:.4f}: old {self.old_view}")
        for site in self.nodes:
            self._send(0, site, wire.NewView(self.old_view, {}))
            for task in self.old_view.tasks_at(site):
                message = wire.CatchUp(self.old_view.term, *task, max(self.nodes))
                self._send(0, site, message)

    def take_arbiter_away(self, seconds: float) -> None:
        self.note("fault", CONTROLLER, "arbiter away", None, self.time + seconds)
        self.log.append(f"{self.time:.4f}: arbiter away for {seconds:.4f}")
        self.applications.away_until = self.time + seconds
