"""An application's control without its sockets: who leads, what the leader decides, who is told.

Events come in (`holdfast.control.events`): messages from sites, from the controls of other
applications and from the arbiter, broken connections, timers, processes that have ended, what the
user asks for. Effects go out: asks to the arbiter, messages, launches, timers, the end. Whoever
runs a node (`Control` on asyncio, the simulator in virtual time) carries effects out in order and
answers every ask and every probe once, however late. Time is an argument.

Three machines work together here. `Leadership` says whether this application leads, and when
something is committed. `Controller` decides on members, and only while a term is led; it is made
again for each (`Leading`). `FailureDetector` says who is silent or cut off.

The rule that makes terms safe: **sites are told nothing that is not committed**. Every decision
that a successor must know (a view, the start, the drain, the end) waits until the arbiter has it,
and so does whatever is decided after it. Only launching does not wait: a site that nobody has
committed is told to leave by whoever leads next. Every order carries the term, so that sites do not
listen to a leader that does not know yet that it is none.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, assert_never

import msgspec

from holdfast import errors
from holdfast.api.options import Options
from holdfast.control import events as ev
from holdfast.control import orders
from holdfast.control.leading import Knowledge, Leading, decode
from holdfast.control.suspects import Suspects
from holdfast.core import events as core
from holdfast.core.controller import Controller, first_id
from holdfast.core.effects import (
    AskCommit,
    AskLead,
    AskRead,
    AskRenew,
    AskResign,
    BeginTerm,
    CommitDone,
    ControllerEffect,
    EndFlow,
    EndTerm,
    FenceSite,
    FollowEntry,
    LaunchSite,
    LeadershipOver,
    Wait,
)
from holdfast.core.failure_detector import FailureDetector
from holdfast.core.ids import Entry, GroupId, SiteId, StageId
from holdfast.core.layout import Shape
from holdfast.core.leadership import Leadership, Role
from holdfast.net import wire

GATHER_S = 0.003
"""Sites that are lost within so long of each other have failed together: one view, not several."""


class ControlNode:
    """One application's control."""

    def __init__(
        self,
        shape: Shape,
        options: Options,
        *,
        holder: str = "",
        app: int = 0,
        apps: int = 1,
        sites: int = 2,
        spares: int = 0,
        machine: type[Controller] = Controller,
    ) -> None:
        self.shape, self.options = shape, options
        self.app, self.apps = app, apps
        self._sites, self._spares, self._machine = sites, spares, machine
        self.leadership = Leadership(holder)
        self.detector = FailureDetector(options.lease_s)
        self.leading: Leading | None = None
        """The term that is led here."""
        self.status: dict[int, dict[str, Any]] = {}
        """What sites say of themselves."""
        self.over = False
        self.connected: list[SiteId] = []
        self.registered: dict[SiteId, wire.Register] = {}
        self.asked: core.StopRequested | None = None
        """What the user wants. Should nobody lead just now, whoever comes to lead will know."""
        self._launched_here: set[SiteId] = set()
        self.suspects = Suspects()
        self._taking_over: tuple[int, Entry, Knowledge] | None = None
        """The number of the probe that must be answered before a term is taken over."""
        self._watched_at: float | None = None
        self._looked = False
        """Whether, since the last lead timer, a leader that was lost has been looked for."""
        self._error: Exception | None = None
        self._now = 0.0
        self._out: list[ev.ControlEffect] = []

    # --- being looked at ------------------------------------------------------------------------

    @property
    def controller(self) -> Controller | None:
        """Who decides on members, if this application leads."""
        return self.leading.controller if self.leading is not None else None

    @property
    def term(self) -> int:
        return self.leadership.term

    def check_invariants(self) -> None:
        self.leadership.check_invariants()

    # --- one way in -----------------------------------------------------------------------------

    def handle(self, event: ev.ControlEvent, now: float) -> list[ev.ControlEffect]:
        """What is to be done about an event. Nothing, once the flow is over."""
        if self.over:
            return self._after_the_end(event, now)
        self._now, self._out = now, []
        if self.leadership.leads and now >= self.leadership.lease_until:
            self._lead(core.LeadDue())  # by its own clock it leads no more, whatever the event is
        self._dispatch(event)
        return self._out

    def _after_the_end(self, event: ev.ControlEvent, now: float) -> list[ev.ControlEffect]:
        """A term that is granted now is given up at once; nothing else matters."""
        self._now, self._out = now, []
        if isinstance(event, core.LeadGranted):
            self._lead(event)
        return self._out

    def _dispatch(self, event: ev.ControlEvent) -> None:
        match event:
            case ev.Began():
                self._do(ev.SetTimer(ev.WatchTimer(), self.options.lease_s / 5))
                self._on_lead_timer()
            case ev.SiteSaid():
                self._on_site_said(event)
            case ev.SiteLost():
                self._on_site_lost(event.site)
            case ev.PulseLost():
                self.detector.in_call(event.site, None)
            case ev.ProcessExited():
                self._on_process_exited(event)
            case ev.AgentOpened():
                self._on_agent_opened(event.app)
            case ev.AgentLost():
                if self.leading is not None and event.app in self.leading.agents:
                    self.leading.agents.remove(event.app)
            case ev.AgentSaid():
                self._suspect(SiteId(event.message.site), event.message.reason)
            case ev.LeaderOpened():
                self._on_leader_opened(event.holder)
            case ev.LeaderLost():
                self._on_leader_lost()
            case ev.LeaderSaid():
                self._on_leader_said(event.message)
            case core.LeaderGone():
                self._lead(event)
            case ev.Probed():
                self._on_probed(event)
            case ev.TimerFired():
                self._on_timer(event.timer)
            case core.StopRequested():
                self.asked = event
                self._control(event)
            case core.ProtectionWanted() | core.FlowFailed():
                self._control(event)
            case _:
                self._lead(event)

    def _do(self, *effects: ev.ControlEffect) -> None:
        self._out += effects

    # --- who leads ------------------------------------------------------------------------------

    def _lead(self, event: core.LeadershipEvent) -> None:
        """Tell the machine that knows who leads, and act on what follows."""
        if isinstance(event, core.ArbiterUnreachable):
            self._do(ev.Note(event.reason, warns=True))
        for effect in self.leadership.handle(event, self._now):
            match effect:
                case AskLead() | AskRenew() | AskRead() | AskResign() | AskCommit():
                    self._do(effect)
                case BeginTerm():
                    self._begin(effect.entry)
                case EndTerm():
                    self._step_down(effect)
                case CommitDone():
                    self._committed()
                case FollowEntry():
                    self._follow(effect.entry)
                case LeadershipOver():
                    self.over = True
                    self._do(ev.StopFeeding(), ev.End(self._error))
                case _:
                    assert_never(effect)

    def _on_lead_timer(self) -> None:
        self._looked = False
        self._lead(core.LeadDue())
        if not self.leadership.lasts:
            self._do(ev.SetTimer(ev.LeadTimer(), self.options.lease_s / 5))

    def _begin(self, entry: Entry) -> None:
        self._do(ev.Note(f"application {self.app} leads, term {entry.term}"))
        self._do(ev.HangUpOnLeader())
        if not entry.value:
            self._set_out(entry.term)
            return
        known = decode(entry.value)
        if known.ended:
            self._over(known.failure)
            return
        members = known.view.members if known.view is not None else ()
        addresses = {SiteId(s): a for s, a in known.addresses.items() if s in members}
        probe = self.suspects.probe(addresses)
        self._taking_over = (probe.number, entry, known)
        self._do(probe)

    def _set_out(self, term: int) -> None:
        """Begin the flow."""
        ids = [SiteId(first_id(term) + i) for i in range(self._sites + self._spares)]
        sites, spares = ids[: self._sites], ids[self._sites :]
        controller = self._machine(self.shape, sites, spares, term)
        app_of = {int(s): s % self.apps for s in ids}
        self.leading = Leading(term, controller, app_of, running=False)
        self.suspects.forget_all()
        self._lead(core.TermTaken(term))
        for site in list(self.registered):
            self._expel(site)  # of a leader that has committed nothing
        for site in ids:
            self._launch(site)
        if self.asked is not None:
            self._control(self.asked)

    def _take_over(self, entry: Entry, known: Knowledge, gone: Iterable[SiteId]) -> None:
        """Go on from what the last leader had committed, and from what the sites have reported."""
        term = entry.term
        assert known.view is not None
        domains = {SiteId(s): d for s, d in known.domains.items()}
        addresses = {SiteId(s): a for s, a in known.addresses.items()}
        unknown = []
        for site, registered in self.registered.items():
            if site in addresses or site in known.launched:
                domains[site] = registered.domain
                addresses[site] = (registered.host, registered.port)
            else:
                unknown.append(site)
        dead = {SiteId(s): reason for s, reason in known.dead.items()}
        controller = self._machine(self.shape, _members(known, addresses))
        effects = controller.resume(
            known.view, term, addresses, domains, dead, known.running, known.draining
        )
        orphans = [SiteId(s) for s in known.launched if s not in addresses]
        controller.launched |= set(orphans)
        self.status = {s: said for s, said in self.status.items() if s in self.registered}
        app_of = {int(s): a for s, a in known.app_of.items()}
        self.leading = Leading(term, controller, app_of, known.running)
        self._lead(core.TermTaken(term))
        self.detector.begin(addresses, self._now)
        for site in unknown:
            self._expel(site)  # in place of one whose death was not committed: it is done again
        lost = (*gone, *orphans)
        if lost:
            effects += controller.handle(core.SitesFailed(lost, "its application is gone"))
        self._decide(effects)
        if self.suspects:
            self._do(ev.SetTimer(ev.InquireTimer(), GATHER_S))  # noticed before this one led
        if known.running and not self.over:
            self._do(ev.FlowRuns(begins=False), ev.Attached())
        if self.asked is not None:
            self._control(self.asked)

    def _step_down(self, effect: EndTerm) -> None:
        self._do(ev.Note(f"application {self.app} no longer leads: {effect.reason}", warns=True))
        leading, self.leading = self.leading, None
        self._taking_over = None
        self.suspects.end_inquiries()
        self._do(ev.StopFeeding())
        if leading is not None and leading.agents:
            self._do(ev.HangUpOnAgents(tuple(leading.agents)))

    # --- following ------------------------------------------------------------------------------

    def _follow(self, entry: Entry) -> None:
        """Offer the leader to launch sites for it."""
        if entry.value:
            known = decode(entry.value)
            if known.ended:
                self._over(known.failure)
                return
        if entry.holder and entry.holder != self.leadership.holder:
            self._do(ev.DialLeader(entry))

    def _on_leader_opened(self, holder: str) -> None:
        if self.leadership.leads:
            self._do(ev.HangUpOnLeader())  # this one has been granted a term meanwhile
        else:
            self._lead(core.LeaderFound(holder))
            self._do(ev.Attached())

    def _on_leader_lost(self) -> None:
        """Find out what became of it: at once, but only once between two lead timers, for it may be
        one that follows itself and hangs up on whoever comes."""
        if self._looked:
            self.leadership.leader = None
        else:
            self._looked = True
            self._lead(core.LeaderMissed())

    def _on_leader_said(self, message: wire.Launch | wire.Dismiss) -> None:
        if message.term < self.leadership.known_term:
            return
        if isinstance(message, wire.Launch):
            self._launch_here(SiteId(message.site))
        else:
            self._over(None)

    def _over(self, error: Exception | None) -> None:
        """Another one has ended the flow."""
        self._error = error
        self._lead(core.FlowEnded())

    # --- other applications ---------------------------------------------------------------------

    def _on_agent_opened(self, app: int) -> None:
        if self.leading is None:
            self._do(ev.HangUpOnAgents((app,)))  # we follow ourselves
            return
        if app not in self.leading.agents:
            self.leading.agents.append(app)
        # Also those it may have been told before: the last agent may have died with them.
        for site in sorted(self.leading.controller.launched):
            if self.leading.app_of.get(site) == app:
                self._do(ev.SendAgent(app, wire.Launch(self.leading.term, site)))

    def _launch(self, site: SiteId) -> None:
        """Have the application that the site belongs to start its process."""
        assert self.leading is not None
        app = self.leading.app_of[site]
        if app == self.app:
            self._launch_here(site)
        elif app in self.leading.agents:  # if not, it is told when it comes
            self._do(ev.SendAgent(app, wire.Launch(self.leading.term, site)))

    def _launch_here(self, site: SiteId) -> None:
        if site not in self._launched_here:
            self._launched_here.add(site)
            self._do(ev.LaunchHere(site))

    def _on_process_exited(self, event: ev.ProcessExited) -> None:
        if self.leading is not None or self.leadership.leader is None:
            self._suspect(event.site, event.reason)
        else:
            self._do(ev.SendLeader(wire.Exited(event.site, event.reason)))

    # --- sites ----------------------------------------------------------------------------------

    def _on_site_said(self, event: ev.SiteSaid) -> None:
        site, message = event.site, event.message
        self.detector.heard(site, self._now, isinstance(message, wire.Beat) and message.busy)
        match message:
            case wire.Beat():
                if event.pulse:
                    busy = core.Call(message.stage, message.epoch, message.seconds)
                    self.detector.in_call(site, busy if message.busy else None)
            case wire.Register():
                self._on_register(message)
            case wire.Seen():
                self._control(core.ViewSeen(site, message.term, message.number))
            case wire.ReplicaReport():
                task = (StageId(message.stage), GroupId(message.group))
                replica, number = SiteId(message.site), message.number
                reported = core.ReplicaReported(
                    replica, task, number, message.phase, message.reason
                )
                self._control(reported)
            case wire.Behind():
                if self.leading is not None and not self.leading.frozen:
                    self._control(core.ReplicaBehind(SiteId(message.site), message.reason))
            case wire.Unheard():
                if self.leading is not None:
                    about = (site, SiteId(message.site), message.leases, message.how)
                    self.detector.complained(*about, self._now)
            case wire.Status():
                if site in self.registered:
                    self.status[site] = msgspec.json.decode(message.figures)
            case wire.Failed():
                self._control(core.FlowFailed(site, _rebuilt(message)))
            case wire.Finished():
                self._control(core.SiteFinished(site, message.number))
            case _:
                pass  # it concerns what is stored, and whoever runs this node sees to that

    def _on_register(self, message: wire.Register) -> None:
        site = SiteId(message.site)
        if site not in self.connected:
            self.connected.append(site)
        self.registered[site] = message
        self.suspects.forget(site)
        leading = self.leading
        if leading is None:
            return
        controller = leading.controller
        if site not in controller.dead and site not in controller.addresses:
            address = (message.host, message.port)
            self._control(core.SiteRegistered(site, address, message.domain))
        elif leading.frozen:
            leading.came_back(site)  # also if it is dead: that may not be committed yet
        else:
            self._give_again(site)

    def _on_site_lost(self, site: SiteId) -> None:
        if site in self.connected:
            self.connected.remove(site)
        self.registered.pop(site, None)
        self._suspect(site, None)

    # --- who is dead ----------------------------------------------------------------------------

    def _suspect(self, site: SiteId, reason: str | None) -> None:
        """Something is wrong with a site: find out what, together with those that follow soon. If
        this application does not lead, it is to be found out when it does."""
        if self.suspects.add(site, reason) and self.leading is not None:
            self._do(ev.SetTimer(ev.InquireTimer(), GATHER_S))

    def _inquire(self) -> None:
        """Tell the dead from those whose connection broke: nobody listens where a process died."""
        if self.leading is None:
            return
        found = self.suspects.inquire(self.leading.controller.addresses)
        if isinstance(found, ev.Probe):
            self._do(found)
        else:
            self._remove(found)

    def _on_probed(self, event: ev.Probed) -> None:
        if self._taking_over is not None and self._taking_over[0] == event.number:
            _, entry, known = self._taking_over
            self._taking_over = None
            self._take_over(entry, known, event.gone)
        else:
            self._remove(self.suspects.gone(event))

    def _remove(self, gone: dict[SiteId, str]) -> None:
        if gone:
            reason = "; ".join(sorted(set(gone.values())))
            self._control(core.SitesFailed(tuple(gone), reason))

    def _watch(self) -> None:
        """Declare dead who has been silent for longer than the lease, unless we have been."""
        pause, now = self.options.lease_s / 5, self._now
        before, self._watched_at = self._watched_at, now
        self._do(ev.SetTimer(ev.WatchTimer(), pause))
        if before is not None and now - before > 3 * pause:
            self.detector.was_away(now)  # it is this process that did not get to run
        if self.leading is None:
            return
        if self.leading.agents:
            self._do(ev.TellAgents())
        if silent := self.detector.silent(self.leading.controller.addresses, now):
            reason = f"silent for more than {self.options.lease_s} s"
            self._control(core.SitesFailed(tuple(silent), reason, certain=False))
        self.part(now)
        self._end_hung_calls()
        self.give_up_joins(now)

    def part(self, now: float) -> None:
        """See to those that hear nothing of each other."""
        couples = self.detector.partitioned(now)
        if couples and self.leading is not None and not self.leading.frozen:
            self.detector.settled()
            self._control(core.SitesPartitioned(couples))

    def _end_hung_calls(self) -> None:
        """See to sites that have been in one call for too long."""
        limit = max(self.options.call_s_max, 2 * self.options.lease_s)
        calls = self.detector.hung(limit)
        if calls and self.leading is not None and not self.leading.frozen:
            self._control(core.SitesHung(calls, limit))

    def give_up_joins(self, now: float) -> None:
        """A replica that is being made and gets nowhere is given up, and rebuilt."""
        view = self.controller.view if self.controller else None
        if view is None:
            return
        stuck, seconds = self.detector.stuck(view, self.status.values(), now)
        for task, site in stuck[:1]:  # the view is another one after that
            reason = f"site {site} got nothing for more than {seconds:.0f} s"
            self._control(core.ReplicaReported(site, task, view.number, "failed", reason))

    def _on_timer(self, timer: ev.Timer) -> None:
        match timer:
            case ev.LeadTimer():
                self._on_lead_timer()
            case ev.WatchTimer():
                self._watch()
            case ev.InquireTimer():
                self._inquire()
            case ev.LaunchTimer():
                if self.leading is not None and self.leading.term == timer.term:
                    self._launch(timer.site)
            case ev.WaitTimer():
                if self.leading is not None and self.leading.term == timer.term:
                    self._control(core.WaitOver(timer.wait))
            case _:
                assert_never(timer)

    # --- what the controller decides ------------------------------------------------------------

    def _control(self, event: core.ControllerEvent) -> None:
        if self.leading is not None:
            self._decide(self.leading.controller.handle(event))

    def _decide(self, effects: list[ControllerEffect]) -> None:
        """Launch and wait at once; everything else when what it rests on is committed."""
        leading = self.leading
        assert leading is not None
        for effect in effects:
            match effect:
                case LaunchSite():
                    self._launch_after(effect)
                case Wait():
                    timer = ev.WaitTimer(leading.term, effect.timer)
                    self._do(ev.SetTimer(timer, effect.ms / 1e3))
                case _:
                    leading.add(effect)
        if leading.to_commit:
            self._commit(leading)
        elif not leading.under_way:
            self._execute_all(leading.released())

    def _commit(self, leading: Leading) -> None:
        value = leading.knowledge().encode()
        wanted = core.EndWanted if leading.ends else core.CommitWanted
        leading.begin()
        self._lead(wanted(leading.term, value))

    def _committed(self) -> None:
        """The arbiter has what was decided up to when it was asked."""
        leading = self.leading
        assert leading is not None
        self._execute_all(leading.done(more=self.leadership.role is not Role.LEADING))
        if not leading.frozen:
            for site in leading.returned():
                self._give_again(site)

    def _launch_after(self, effect: LaunchSite) -> None:
        assert self.leading is not None
        self.leading.note_app(effect.site)
        if effect.after_ms:
            timer = ev.LaunchTimer(self.leading.term, effect.site)
            self._do(ev.SetTimer(timer, effect.after_ms / 1e3))
        else:
            self._launch(effect.site)

    def _execute_all(self, effects: Iterable[ControllerEffect]) -> None:
        """What these decisions rest on is committed."""
        assert self.leading is not None
        for effect in effects:
            if isinstance(effect, FenceSite):
                self._expel(effect.site)
            else:
                self._do(*orders.of(effect, self.leading, self.connected))
            if isinstance(effect, EndFlow):
                self._error = effect.error

    def _give_again(self, site: SiteId) -> None:
        """The connection to a site broke: it may have missed something."""
        assert self.leading is not None
        controller = self.leading.controller
        if site in controller.dead:
            self._expel(site)
        elif controller.view is not None:
            self._do(*orders.view_for(site, controller.view, self.leading, self.connected))
            self._execute_all(controller.orders_for(site))

    def _expel(self, site: SiteId) -> None:
        assert self.leading is not None
        if site in self.connected:
            self.connected.remove(site)
        self.registered.pop(site, None)
        self.detector.forget(site)
        self.status.pop(site, None)
        self._do(ev.ExpelSite(site, wire.Fenced(self.leading.term)))


def _members(known: Knowledge, addresses: Iterable[SiteId]) -> list[SiteId]:
    """The sites that the flow runs on, or begins on: then others are there in place of the dead, if
    possible of the same application."""
    assert known.view is not None
    members, app_of = list(known.view.members), known.app_of
    others = dict.fromkeys([*addresses, *(SiteId(s) for s in known.launched)])
    fresh = [s for s in others if s not in known.view.members]
    for at, site in enumerate(members):
        if site in known.dead and fresh and not known.running:
            alike = [s for s in fresh if app_of.get(s) == app_of.get(site)] or fresh
            members[at] = alike[0]
            fresh.remove(alike[0])
    return members


def _rebuilt(message: wire.Failed) -> Exception:
    """A site's error as an exception of this process; only our own classes are made."""
    kind = getattr(errors, message.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.HoldfastError)):
        kind = errors.HoldfastError
    return kind.rebuilt(message.detail)
