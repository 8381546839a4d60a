"""The controls of a simulated world's applications, and their arbiter.

The real control nodes handle events one after another. `ControlPlane` has the world carry out their
effects, and checks what holds for all of them: only the leader gives orders, and no epoch is cut
twice.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from holdfast.control import events as ev
from holdfast.control.arbitration import answer
from holdfast.control.hosting import widen_failure_domains
from holdfast.control.node import ControlNode
from holdfast.core import events as core
from holdfast.core import requests
from holdfast.core.controller import Controller
from holdfast.core.effects import ArbiterAsk, AskCommit, AskLead, AskRead, AskRenew, AskResign
from holdfast.core.ids import SiteId
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord
from holdfast.errors import InvariantError
from holdfast.lab.sim.arbiter import ArbiterLedger, SimArbiter
from holdfast.lab.sim.links import control_of
from holdfast.net import wire

if TYPE_CHECKING:
    from holdfast.lab.sim.world import World

NO_LEASE_S = 1e9
"""The lease in a world without a clock: it does not end."""


class ControlPlane:
    """The controls that live, by application, and what they have committed."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.nodes: dict[int, ControlNode] = {}
        self.lives: dict[int, int] = {}
        """How often each application has started or died. It tells whether an answer is still for
        the control that asked."""
        self.ledger = ArbiterLedger()
        self.starting = True
        """Whether the world is being set up: then sites start at once, and the arbiter answers at
        once."""
        self._arbiters: dict[int, SimArbiter] = {}
        self._controller: Controller | None = None
        self._records: dict[int, EpochRecord] = {}
        self._registered: set[SiteId] = set()
        """All sites that have ever registered."""
        self._events: deque[tuple[int, ev.ControlEvent]] = deque()
        self._handling = False

    # --- state ------------------------------------------------------------------------------------

    @property
    def controller(self) -> Controller:
        """The leader's controller, or the last leader's while no application leads."""
        assert self._controller is not None
        return self._controller

    @property
    def leader(self) -> int | None:
        """The application that leads, in the latest term if several believe that they do."""
        leading = [a for a, node in self.nodes.items() if node.leading is not None]
        return max(leading, key=lambda app: self.nodes[app].term, default=None)

    @property
    def records(self) -> list[EpochRecord]:
        return [self._records[e] for e in sorted(self._records)]

    # --- applications -----------------------------------------------------------------------------

    def start_all(self, apps: int) -> None:
        """Start all applications of a new world."""
        for app in range(apps):
            self.start(app)
        self.starting = False

    def start(self, app: int) -> None:
        """Start an application, or start it again. All sites report to it."""
        world = self._world
        self.lives[app] = self.lives.get(app, 0) + 1
        self._arbiters[app] = SimArbiter(world.lease_s, self.ledger, world.now)
        self.nodes[app] = world.make_control(app)
        for site in world.nodes:
            world.connect(site, app)
        self.handle(app, ev.Began())

    def kill(self, app: int) -> None:
        del self.nodes[app]
        self.lives[app] += 1

    # --- events -----------------------------------------------------------------------------------

    def handle(self, app: int, event: ev.ControlEvent) -> None:
        """Have a control handle an event, then carry out what follows from it, one event after
        another."""
        self._events.append((app, event))
        if self._handling:
            return
        self._handling = True
        try:
            while self._events:
                app, event = self._events.popleft()
                node = self.nodes.get(app)
                if node is not None:
                    for effect in node.handle(event, self._world.now()):
                        self._execute(app, effect)
                    node.check_invariants()
                    self._note_leader(node)
        finally:
            self._handling = False
            self._events.clear()

    def on_exits(self, sites: tuple[SiteId, ...]) -> None:
        """Report that these processes have ended. The events arrive together: no control acts on
        one of them before it knows of the others."""
        events: list[tuple[int, ev.ControlEvent]] = []
        for app in self.nodes:
            for site in sites:
                if self._world.home[site] == app:
                    events.append((app, ev.ProcessExited(site, "crashed")))
                if (site, control_of(app)) not in self._world.network:
                    events.append((app, ev.SiteLost(site)))
        if events:
            self._events.extend(events[:-1])
            self.handle(*events[-1])

    def hear(self, app: int, site: SiteId, message: wire.Message) -> None:
        """Deliver a site's message to a control."""
        if isinstance(message, wire.Cut):
            known = self._records.setdefault(message.record.epoch, message.record)
            if known != message.record:
                raise InvariantError(f"epoch {known.epoch} was cut twice")
        if isinstance(message, wire.Register):
            self._registered.add(site)
        self.handle(app, ev.SiteSaid(site, message))

    def want(self, guards: tuple[ProtectionSpec, ...]) -> None:
        """Ask the leader to protect the stages in this way."""
        wanted = widen_failure_domains(self.controller.shape.guarded(guards), self._world.apps)
        self.request(requests.ProtectionWanted(wanted.guards))

    def request(self, wanted: requests.Request) -> None:
        """Ask the leader for something, if there is one."""
        app = self.leader
        if app is not None:
            self.handle(app, wanted)

    def _note_leader(self, node: ControlNode) -> None:
        found, last = node.controller, self._controller
        if found is not None and found is not last and (last is None or found.term >= last.term):
            self._controller = found

    # --- effects ----------------------------------------------------------------------------------

    def _execute(self, app: int, effect: ev.ControlEffect) -> None:
        world = self._world
        match effect:
            case AskLead() | AskRenew() | AskRead() | AskResign() | AskCommit():
                world.ask(app, effect)
            case ev.SendSite() | ev.ExpelSite():
                self._check_leader(app)
                world.send_order(app, effect.site, effect.message)
            case ev.LaunchHere():
                if effect.site in self._registered:
                    raise InvariantError(f"the number {effect.site} is used for a second site")
                world.launch_for(app, effect.site)
            case ev.SetTimer():
                world.set_timer(app, effect)
            case ev.Probe():
                world.probe(app, effect)
            case ev.ViewGiven():
                world.on_view_given(app, effect.view)
            case ev.Note():
                world.log.append(f"{world.steps}: {effect.text}")
            case ev.End():
                world.end(effect.error)
            case _:
                world.between(app, effect)

    def _check_leader(self, app: int) -> None:
        """A leader steps down before the arbiter lets another one lead. So only the leader of the
        latest term gives orders, unless the arbiter ended its lease too early."""
        term, latest = self.nodes[app].term, self.ledger.record.entry.term
        if term != latest and term not in self.ledger.broken:
            raise InvariantError(f"application {app} gives orders in term {term} of {latest}")

    def answer(self, app: int, ask: ArbiterAsk) -> ev.ArbiterAnswer:
        """Return the arbiter's answer to an application."""
        own = self._world.lease_s
        lease_s = float("inf") if own == NO_LEASE_S else own
        found = answer(self._arbiters[app], str(app), ask, lease_s)
        if isinstance(found, core.Committed):
            self.ledger.note()
        return found
