"""The controls of a flow in two applications, with sites that only answer: years pass quickly."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import msgspec
import pyarrow as pa

from holdfast import Flow
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.arbiter.memory import ArbiterMemory
from holdfast.control import events as ev
from holdfast.control.arbitration import answer
from holdfast.control.hosting import widen_failure_domains
from holdfast.control.node import ControlNode
from holdfast.core.effects import (
    ArbiterAsk,
    AskCommit,
    AskLead,
    AskRead,
    AskRenew,
    AskResign,
)
from holdfast.core.events import ArbiterUnreachable, ReplicaReported
from holdfast.core.ids import SiteId
from holdfast.core.layout import Domain
from holdfast.lab.sim.arbiter import SimArbiter
from holdfast.net import wire
from holdfast.plan.planner import plan, shape
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.sources import generator

APPS, SITES, LEASE_S = 2, 4, 10.0
STATUS = msgspec.json.encode({"site": 0, "copying": [], "stages": []})


class ControlYears:
    """Both controls, the arbiter, and the sites that they have launched."""

    def __init__(self) -> None:
        flow = Flow("f", protect=pairs())
        source = flow.source("s", generator(lambda *_: None, pa.schema([("k", pa.int64())])))
        source.key_by("k").agg(n=F.count()).sink("out", discard())
        self._shape = widen_failure_domains(shape(plan(flow), 4), APPS)
        self.random, self.now = random.Random(1), 0.0
        self.store = ArbiterMemory()
        self.nodes: dict[int, ControlNode] = {}
        self._arbiters: dict[int, SimArbiter] = {}
        self.sites: dict[SiteId, int] = {}
        """The application of each site that runs."""
        self.numbers: set[SiteId] = set()
        """All sites that were ever launched."""
        self._launches: deque[tuple[int, SiteId]] = deque()
        self._events: deque[tuple[int, ev.ControlEvent]] = deque()
        self.deaths = self.failed_starts = self.terms = 0
        self.arbiter_is_away = False
        self.header_bytes_max = 0
        """The largest message that a control has sent."""
        for app in range(APPS):
            self.start(app)

    @property
    def leader(self) -> int:
        return next(app for app, node in self.nodes.items() if node.leading is not None)

    @property
    def controller(self) -> Any:
        return self.nodes[self.leader].controller

    # --- what happens ---------------------------------------------------------------------------

    def start(self, app: int) -> None:
        """Start a control, also in place of one that died."""
        options = Options(lease=LEASE_S)
        self.nodes[app] = ControlNode(
            self._shape, options, holder=str(app), app=app, apps=APPS, sites=SITES
        )
        self._arbiters[app] = SimArbiter(LEASE_S, self.store, lambda: self.now)
        for site in self.sites:
            self._register(app, site)
        self.on(app, ev.Began())
        self.settle()

    def pass_time(self) -> None:
        """Let a fifth of a lease pass, with a heartbeat of every site."""
        self.now += LEASE_S / 5
        for app, node in list(self.nodes.items()):
            for site in self.sites:
                self.on(app, ev.SiteSaid(site, wire.Beat()))
            self.on(app, ev.TimerFired(ev.LeadTimer()))
            if not node.over:
                self.on(app, ev.TimerFired(ev.WatchTimer()))
        self.settle()

    def kill(self) -> None:
        """Kill one site; its last heartbeat arrives after it is declared dead."""
        site = self.random.choice(sorted(self.sites))
        self._end(site, "killed: " + "with a long reason " * self.random.randrange(50))
        self.settle()
        for app in self.nodes:
            self.on(app, ev.SiteSaid(site, wire.Beat(busy=True)))
        self.deaths += 1

    def replace_leader(self) -> None:
        """The leading control dies, and is started again when the other one leads."""
        leader = self.leader
        del self.nodes[leader]
        other = 1 - leader
        self.on(other, ev.LeaderLost())
        self.now += 2 * LEASE_S
        self.on(other, ev.TimerFired(ev.LeadTimer()))
        self.settle()
        self.terms += 1
        self.start(leader)

    def _end(self, site: SiteId, reason: str) -> None:
        home = self.sites.pop(site)
        if home in self.nodes:
            self.on(home, ev.ProcessExited(site, reason))
        for app in list(self.nodes):
            self.on(app, ev.SiteLost(site))

    def settle(self) -> None:
        """Start the processes that were ordered; one in ten ends at once."""
        while self._launches:
            app, site = self._launches.popleft()
            assert site not in self.sites, f"two processes are site {site}"
            assert site not in self.numbers, f"number {site} is used twice"
            self.numbers.add(site)
            if self.random.random() < 0.1 and self.deaths:
                self.failed_starts += 1
                self.on(app, ev.ProcessExited(site, "it failed to start"))
                continue
            self.sites[site] = app
            for node in list(self.nodes):
                self._register(node, site)

    def _register(self, app: int, site: SiteId) -> None:
        home = f"application {self.sites[site]}"
        domain = Domain(f"p{site}", f"p{site}", "host", home)
        self.on(app, ev.SiteSaid(site, wire.Register(site, "host", site, 7, domain)))
        self.on(app, ev.SiteSaid(site, wire.Status(STATUS)))

    # --- effects --------------------------------------------------------------------------------

    def on(self, app: int, event: ev.ControlEvent) -> None:
        """Have a control handle an event, and all that follows."""
        self._events.append((app, event))
        if len(self._events) > 1:
            return
        while self._events:
            app, event = self._events[0]
            node = self.nodes.get(app)
            for effect in node.handle(event, self.now) if node is not None else ():
                self._execute(app, effect)
            self._events.popleft()

    def _execute(self, app: int, effect: ev.ControlEffect) -> None:
        match effect:
            case AskLead() | AskRenew() | AskRead() | AskResign() | AskCommit():
                self.on(app, self._answer(app, effect))
            case ev.LaunchHere():
                self._launches.append((app, effect.site))
            case ev.SendAgent() if effect.app in self.nodes:
                self.on(effect.app, ev.LeaderSaid(effect.message))
            case ev.SendLeader():
                self.on(self.leader, ev.AgentSaid(app, effect.message))
            case ev.DialLeader() if int(effect.entry.holder) in self.nodes:
                self.on(int(effect.entry.holder), ev.AgentOpened(app))
                self.on(app, ev.LeaderOpened(effect.entry.holder))
            case ev.Probe():
                gone = tuple(s for s in effect.addresses if s not in self.sites)
                self.on(app, ev.Probed(effect.number, gone))
            case ev.SetTimer() if not isinstance(effect.timer, ev.LeadTimer | ev.WatchTimer):
                self.on(app, ev.TimerFired(effect.timer))
            case ev.SendSite():
                size = len(wire.encode(effect.message))
                self.header_bytes_max = max(self.header_bytes_max, size)
                if effect.site in self.sites:
                    self._obey(app, effect.site, effect.message)
            case ev.ExpelSite() if effect.site in self.sites:
                self._end(effect.site, "fenced")
            case ev.End():
                raise effect.error or AssertionError("the flow has ended")

    def _answer(self, app: int, ask: ArbiterAsk) -> ev.ArbiterAnswer:
        if self.arbiter_is_away:
            return ArbiterUnreachable(ask, "it is away")
        return answer(self._arbiters[app], str(app), ask, LEASE_S)

    def _obey(self, app: int, site: SiteId, order: wire.Message) -> None:
        if isinstance(order, wire.NewView):
            self.on(app, ev.SiteSaid(site, wire.Seen(order.view.term, order.view.number)))
            for task in order.view.tasks_at(site):
                if site in order.view.group(task).replicas:
                    self._report(app, ReplicaReported(site, task, order.view.number, "caught_up"))
        if isinstance(order, wire.CatchUp):
            task, joiner = order.order.task, order.order.joiner
            for phase in ("installed", "caught_up"):
                number = self.controller.view.number
                self._report(app, ReplicaReported(joiner, task, number, phase))

    def _report(self, app: int, report: ReplicaReported) -> None:
        self.on(app, ev.SiteSaid(report.site, wire.ReplicaReport(report)))
