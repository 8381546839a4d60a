"""A control node: the control of one application, without sockets and clocks.

Events come in (`holdfast.control.events`): messages of sites, of the controls of other applications
and of the arbiter, broken connections, timers, exits of processes, requests of the user. Effects go
out: asks to the arbiter, messages, launches, timers, the end. The caller (`Control` on asyncio, the
simulator in virtual time) executes effects in order, and answers every ask and every probe once,
however late. Time is an argument.

The parts of a node:

- `Leadership` says whether this application leads, and when a commit is done;
- `Leading` is one term that it leads: the controller, its decisions and their execution;
- `SiteWatch` knows the sites that report, and finds those that are silent, gone or cut off.

The node joins them. While another application leads, the node finds it and launches sites for it.

The rule that makes terms safe: **sites get no order that is not committed**. Every decision that a
successor must know (a view, the start, the drain, the end) waits until the arbiter has it, and so
does every decision after it. Only a launch does not wait: the next leader fences a site whose
launch is not committed. Every order carries the term, so that sites refuse the orders of a leader
that does not know yet that it has been replaced.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import assert_never

from holdfast import errors
from holdfast.api.options import Options
from holdfast.control import events as ev
from holdfast.control.arbiter_watch import ArbiterWatch
from holdfast.control.balancer import LoadBalancer
from holdfast.control.knowledge import Knowledge, continue_flow, decode
from holdfast.control.leading import Leading, LeadingEffect
from holdfast.control.site_watch import GATHER_S, SiteWatch
from holdfast.core import events as core
from holdfast.core import requests
from holdfast.core.controller import Controller
from holdfast.core.effects import (
    AskCommit,
    AskLead,
    AskRead,
    AskRenew,
    AskResign,
    BeginTerm,
    CommitDone,
    ControllerEffect,
    EndTerm,
    FollowEntry,
    LeadershipOver,
)
from holdfast.core.ids import Entry, SiteId
from holdfast.core.layout import Shape
from holdfast.core.leadership import Leadership, Role
from holdfast.core.roster import first_id
from holdfast.net import protocol, wire
from holdfast.net.protocol import Receiver


class ControlNode:
    """The control of one application."""

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
        self._sites, self._spares = sites, spares
        self._machine = partial(
            machine,
            relaunch_ms=options.relaunch_wait_ms,
            groups_per_site=options.groups_per_site,
        )
        self.leadership = Leadership(holder)
        self.watch = SiteWatch(options.lease_s, options.call_s_max)
        self.leading: Leading | None = None
        """The term that this application leads."""
        self.over = False
        self._launched_here: set[SiteId] = set()
        """Sites whose processes were started here and have not ended."""
        self._searched = False
        """Whether a lost leader has been searched for since the last lead timer."""
        self._stop_requested: requests.StopRequested | None = None
        """What the user has requested. If this application does not lead, it acts on the request
        when it does."""
        self._taking_over: tuple[int, Entry, Knowledge] | None = None
        """The number of the probe whose result the take-over waits for, and what it begins with."""
        self._error: Exception | None = None
        self._exposed: tuple[str, ...] = ()
        """The exposures that the log has."""
        self._arbiter = ArbiterWatch()
        self._now = 0.0
        self._out: list[ev.ControlEffect] = []
        self._handlers = protocol.handlers({Receiver.CONTROL_NODE: self})

    @property
    def controller(self) -> Controller | None:
        """The controller, if this application leads."""
        return self.leading.controller if self.leading is not None else None

    @property
    def term(self) -> int:
        return self.leadership.term

    def check_invariants(self) -> None:
        self.leadership.check_invariants()

    # --- one way in -----------------------------------------------------------------------------

    def handle(self, event: ev.ControlEvent, now: float) -> list[ev.ControlEffect]:
        """The effects of an event."""
        self._now, self._out = now, []
        if self.over:
            if isinstance(event, core.LeadGranted):
                self._lead(event)  # it resigns; no other event matters after the end
            return self._out
        if self.leadership.leads and now >= self.leadership.lease_until:
            self._lead(core.LeadDue())  # its lease has expired by its own clock
        self._dispatch(event)
        return self._out

    def _dispatch(self, event: ev.ControlEvent) -> None:
        match event:
            case ev.Began():
                self._do(ev.SetTimer(ev.WatchTimer(), self.watch.interval_s))
                self._on_lead_timer()
            case ev.SiteSaid():
                self.watch.on_message(event.site, event.message, self._now)
                self._receive(event.site, event.message)
            case ev.SiteLost():
                self.watch.on_lost(event.site)
                self._suspect(event.site, None)
            case ev.PulseLost():
                self.watch.on_pulse_lost(event.site)
            case ev.ProcessExited():
                self._on_process_exited(event)
            case ev.AgentOpened():
                self._on_agent_opened(event.app)
            case ev.AgentLost():
                if self.leading is not None:
                    self.leading.on_agent_lost(event.app)
            case ev.AgentSaid():
                self._receive(event.app, event.message)
            case ev.LeaderOpened():
                self._on_leader_opened(event.holder)
            case ev.LeaderLost():
                self._on_leader_lost()
            case ev.LeaderSaid():
                self._receive(None, event.message)
            case core.LeaderGone():
                self._lead(event)
            case ev.Probed():
                self._on_probed(event)
            case ev.TimerFired():
                self._on_timer(event.timer)
            case requests.StopRequested():
                self._stop_requested = event
                self._control(event)
            case (
                requests.ProtectionWanted()
                | requests.MovesWanted()
                | requests.EmptySites()
                | requests.SitesWanted()
                | core.FlowFailed()
                | core.StoreUnderWay()
            ):
                self._control(event)
            case _:
                self._lead(event)

    def _receive(self, sender: SiteId | int | None, message: wire.Message) -> None:
        """Handle a message, unless only the caller of this node receives it."""
        handler = self._handlers.get(type(message))
        if handler is not None:
            handler(sender, message)

    def _on_timer(self, timer: ev.Timer) -> None:
        match timer:
            case ev.LeadTimer():
                self._on_lead_timer()
            case ev.WatchTimer():
                self._on_watch_timer()
            case ev.InquireTimer():
                self._on_inquire_timer()
            case ev.LaunchTimer():
                if self.leading is not None and self.leading.term == timer.term:
                    self._execute(self.leading.launch(timer.site))
            case ev.WaitTimer():
                if self.leading is not None and self.leading.term == timer.term:
                    self._control(core.WaitOver(timer.wait))
            case _:
                assert_never(timer)

    def _do(self, *effects: ev.ControlEffect) -> None:
        self._out += effects

    # --- leadership -----------------------------------------------------------------------------

    def _lead(self, event: core.LeadershipEvent) -> None:
        """Pass an event to the leadership, and act on its effects."""
        if isinstance(event, ev.ArbiterAnswer):
            self._do(*self._arbiter.on_answer(event, self._now))
        for effect in self.leadership.handle(event, self._now):
            match effect:
                case AskLead() | AskRenew() | AskRead() | AskResign() | AskCommit():
                    self._do(effect)
                case BeginTerm():
                    self._begin_term(effect.entry)
                case EndTerm():
                    self._end_term(effect)
                case CommitDone():
                    self._on_commit_done()
                case FollowEntry():
                    self._follow(effect.entry)
                case LeadershipOver():
                    self.over = True
                    self._do(ev.StopFeeding(), ev.End(self._error))
                case _:
                    assert_never(effect)

    def _on_lead_timer(self) -> None:
        self._searched = False
        self._lead(core.LeadDue())
        if not self.leadership.lasts:
            self._do(ev.SetTimer(ev.LeadTimer(), self.options.lease_s / 5))

    def _begin_term(self, entry: Entry) -> None:
        self._do(ev.Note(f"application {self.app} leads, term {entry.term}"))
        self._do(ev.HangUpOnLeader())
        if not entry.value:
            self._begin_flow(entry.term)
            return
        known = self._decoded(entry)
        if known is None:
            return
        probe = self.watch.suspects.probe(known.member_addresses())
        self._taking_over = (probe.number, entry, known)
        self._do(probe)

    def _balancer(self) -> LoadBalancer | None:
        """The balancer of a term. Each begins anew: what it measures is soon measured again."""
        return LoadBalancer() if self.options.balance == "auto" else None

    def _begin_flow(self, term: int) -> None:
        ids = [SiteId(first_id(term) + i) for i in range(self._sites + self._spares)]
        sites, spares = ids[: self._sites], ids[self._sites :]
        controller = self._machine(self.shape, sites, spares, term)
        app_of = {int(s): s % self.apps for s in ids}
        leading = Leading(
            term, controller, self.app, app_of, False, self.watch, balancer=self._balancer()
        )
        self.leading = leading
        self.watch.suspects.forget_all()
        self._lead(core.TermTaken(term))
        for site in list(self.watch.registered):
            self._do(leading.expel(site))  # an earlier leader launched it, and committed nothing
        for site in ids:
            self._execute(leading.launch(site))
        if self._stop_requested is not None:
            self._control(self._stop_requested)

    def _take_over(self, entry: Entry, known: Knowledge, gone: Iterable[SiteId]) -> None:
        """Continue the flow, without the sites that are gone."""
        flow = continue_flow(known, entry.term, self.watch.registered, self.shape, self._machine)
        controller, effects = flow.controller, flow.effects
        app_of = {int(s): a for s, a in known.app_of.items()}
        leading = Leading(
            entry.term,
            controller,
            self.app,
            app_of,
            known.running,
            self.watch,
            known.next_id,
            self._balancer(),
        )
        self.leading = leading
        self._lead(core.TermTaken(entry.term))
        self.watch.begin_term(controller.addresses, self._now)
        for site in flow.unknown:
            # It replaces a site whose death was not committed, and which is replaced again.
            self._do(leading.expel(site))
        lost = (*gone, *flow.orphans)
        if lost:
            effects += controller.handle(core.SitesFailed(lost, "its application is gone"))
        self._decide(effects)
        if self.watch.suspects:  # they were noticed before this application led
            self._do(ev.SetTimer(ev.InquireTimer(), GATHER_S))
        if known.running and not self.over:
            self._do(ev.FlowRuns(begins=False), ev.Attached())
        if self._stop_requested is not None:
            self._control(self._stop_requested)

    def _end_term(self, effect: EndTerm) -> None:
        self._do(ev.Note(f"application {self.app} no longer leads: {effect.reason}", warns=True))
        leading, self.leading = self.leading, None
        self._taking_over = None
        self.watch.suspects.end_inquiries()
        self._do(ev.StopFeeding())
        if leading is not None and leading.agents:
            self._do(ev.HangUpOnAgents(tuple(leading.agents)))

    # --- decisions of the controller ------------------------------------------------------------

    def _control(self, event: core.ControllerEvent | None) -> None:
        """Have the controller handle an event, if there is one and this application leads."""
        if event is not None and self.leading is not None:
            self._decide(self.leading.controller.handle(event))

    def _decide(self, effects: list[ControllerEffect]) -> None:
        assert self.leading is not None
        self._execute(self.leading.decide(effects))

    def _execute(self, effects: Iterable[LeadingEffect]) -> None:
        for effect in effects:
            match effect:
                case core.CommitWanted() | core.EndWanted():
                    self._lead(effect)
                case ev.LaunchHere():
                    self._launch_here(effect.site)
                case _:
                    self._do(effect)

    def _on_commit_done(self) -> None:
        assert self.leading is not None
        self._error = self.leading.decisions.error
        more = self.leadership.role is not Role.LEADING
        self._execute(self.leading.on_committed(more))

    def _warn_if_exposed(self, controller: Controller) -> None:
        """Write once to the log whose loss would end the flow, unless replicas are being made."""
        if not controller.protected:
            return
        found = tuple(str(exposure) for exposure in controller.exposures)
        if found != self._exposed:
            self._do(*(ev.Note(text, warns=True) for text in found))
            self._exposed = found

    # --- other applications ---------------------------------------------------------------------

    def _follow(self, entry: Entry) -> None:
        """Connect to the leader that the entry names, or end with the flow."""
        if entry.value and self._decoded(entry) is None:
            return
        if entry.holder and entry.holder != self.leadership.holder:
            self._do(ev.DialLeader(entry))

    def _decoded(self, entry: Entry) -> Knowledge | None:
        """What was committed; None if this application ends, because the flow has ended or this
        version of Holdfast cannot read the entry."""
        try:
            known = decode(entry.value)
        except errors.HostError as error:
            self._flow_ended(error)
            return None
        if known.ended:
            self._flow_ended(known.failure)
            return None
        return known

    def _flow_ended(self, error: Exception | None) -> None:
        """Another application has ended the flow."""
        self._error = error
        self._lead(core.FlowEnded())

    def _on_leader_opened(self, holder: str) -> None:
        if self.leadership.leads:
            self._do(ev.HangUpOnLeader())  # a term was granted to this application meanwhile
        else:
            self._lead(core.LeaderFound(holder))
            self._do(ev.Attached())

    def _on_leader_lost(self) -> None:
        """Search for the leader immediately, but only once between two lead timers: the other
        application may follow, too, and close every connection that is opened to it."""
        search, self._searched = not self._searched, True
        self._lead(core.LeaderMissed(search))

    def on_launch(self, _: None, message: wire.Launch) -> None:
        if message.term >= self.leadership.known_term:
            self._launch_here(SiteId(message.site))

    def _launch_here(self, site: SiteId) -> None:
        if site not in self._launched_here:
            self._launched_here.add(site)
            self._do(ev.LaunchHere(site))

    def on_dismiss(self, _: None, message: wire.Dismiss) -> None:
        if message.term >= self.leadership.known_term:
            self._flow_ended(None)

    def _on_agent_opened(self, app: int) -> None:
        if self.leading is None:
            self._do(ev.HangUpOnAgents((app,)))  # this application follows, too
        else:
            self._execute(self.leading.on_agent_opened(app))

    def on_exited(self, app: int, message: wire.Exited) -> None:
        self._suspect(SiteId(message.site), message.reason)

    def _on_process_exited(self, event: ev.ProcessExited) -> None:
        # If this does not reach the leader, it has the site launched again.
        self._launched_here.discard(event.site)
        if self.leading is not None or self.leadership.leader is None:
            self._suspect(event.site, event.reason)
        else:
            self._do(ev.SendLeader(wire.Exited(event.site, event.reason)))

    # --- messages of sites ----------------------------------------------------------------------

    def on_register(self, site: SiteId, message: wire.Register) -> None:
        self.watch.on_register(site, message)
        if self.leading is None:
            return
        controller = self.leading.controller
        if site not in controller.roster.launched:
            self._execute(self.leading.on_registered_again(site))
        else:
            address = (message.host, message.port)
            self._control(core.SiteRegistered(site, address, message.domain))

    def on_beat(self, site: SiteId, message: wire.Beat) -> None:
        self.watch.on_beat(site, message)

    def on_status(self, site: SiteId | None, message: wire.Status) -> None:
        self.watch.on_status(site, message)

    def on_seen(self, site: SiteId, message: wire.Seen) -> None:
        self._control(core.ViewSeen(site, message.term, message.number))

    def on_replica_report(self, site: SiteId, message: wire.ReplicaReport) -> None:
        self._control(message.report)

    def on_behind(self, site: SiteId, message: wire.Behind) -> None:
        if self.leading is not None and not self.leading.frozen:
            self._control(message.replica)

    def on_unheard(self, site: SiteId, message: wire.Unheard) -> None:
        if self.leading is not None:
            self.watch.on_unheard(site, message, self._now)

    def on_failed(self, site: SiteId, message: wire.Failed) -> None:
        self._control(core.FlowFailed(site, _rebuilt(message)))

    def on_finished(self, site: SiteId, message: wire.Finished) -> None:
        self._control(core.SiteFinished(site, message.number))

    # --- failures of sites ----------------------------------------------------------------------

    def _suspect(self, site: SiteId, reason: str | None) -> None:
        """Find out what happened to a site, together with those that are lost soon after it. An
        application that does not lead finds out when it does."""
        first = self.watch.suspects.add(site, reason)
        if self.leading is None:
            self.watch.suspects.trim()
        elif first:
            self._do(ev.SetTimer(ev.InquireTimer(), GATHER_S))

    def _on_inquire_timer(self) -> None:
        if self.leading is None:
            return
        found = self.watch.inquire(self.leading.controller.addresses)
        if isinstance(found, ev.Probe):
            self._do(found)
        else:
            self._control(found)

    def _on_probed(self, event: ev.Probed) -> None:
        if self._taking_over is not None and self._taking_over[0] == event.number:
            _, entry, known = self._taking_over
            self._taking_over = None
            self._take_over(entry, known, event.gone)
        else:
            self._control(self.watch.on_probed(event))

    def _on_watch_timer(self) -> None:
        """Look for sites that are silent, partitioned, hung or stuck. Each finding is acted on
        before the next is looked for: it may change the view, or freeze decisions."""
        now, leading = self._now, self.leading
        self._do(ev.SetTimer(ev.WatchTimer(), self.watch.interval_s))
        self.watch.on_look(now, leading.controller.addresses if leading is not None else ())
        if leading is None:
            return
        if leading.agents:
            self._do(ev.TellAgents())
        self._warn_if_exposed(leading.controller)
        self._control(self.watch.silent(leading.controller.addresses, now))
        if not leading.frozen:
            self._control(self.watch.partitioned(now))
        if not leading.frozen:
            self._control(self.watch.hung())
        if leading.controller.view is not None:
            self._control(self.watch.stuck(leading.controller.view, now))
        if leading.balancer is not None and not leading.frozen:
            self._control(leading.balancer.step(leading.controller, self.watch.status, now))


def _rebuilt(message: wire.Failed) -> Exception:
    """A site's error as an exception of this process. Only our own classes are made."""
    kind = getattr(errors, message.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.HoldfastError)):
        kind = errors.HoldfastError
    return kind.rebuilt(message.detail)
