"""The control node: events in, whole lists of effects out."""

import msgspec
import pyarrow as pa
import pytest

from holdfast import Flow
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.arbiter import Entry
from holdfast.control import events as ev
from holdfast.control.hosting import widen_failure_domains
from holdfast.control.knowledge import VERSION, decode
from holdfast.control.node import ControlNode
from holdfast.control.site_watch import GATHER_S
from holdfast.core import events as core
from holdfast.core import requests
from holdfast.core.effects import AskCommit, AskLead, AskRead, AskRenew, AskResign
from holdfast.core.ids import SiteId
from holdfast.core.layout import Domain
from holdfast.core.timers import PatienceTimer, RejoinTimer
from holdfast.errors import HostError
from holdfast.net import wire
from holdfast.plan.planner import plan, shape
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.sources import generator

SCHEMA = pa.schema([("k", pa.int64())])
LEASE = 10.0
ONE, OTHER = SiteId(0), SiteId(1)


class Desk:
    """A node of the first of two applications, a clock, and an arbiter that says yes if asked."""

    def __init__(self, app: int = 0) -> None:
        flow = Flow("f", protect=pairs(failure_domain="process"))
        source = flow.source("s", generator(lambda *_: None, SCHEMA))
        source.key_by("k").agg(n=F.count()).sink("out", discard())
        shaped = widen_failure_domains(shape(plan(flow), 2), 2)
        options = Options(lease=LEASE)
        self.node = ControlNode(shaped, options, holder="me", app=app, apps=2, sites=2)
        self.now = 0.0

    def on(self, event: ev.ControlEvent) -> list[ev.ControlEffect]:
        effects = self.node.handle(event, self.now)
        self.node.check_invariants()
        return effects

    def says(self, site: int, message: wire.Message) -> list[ev.ControlEffect]:
        return self.on(ev.SiteSaid(SiteId(site), message))

    def registers(self, site: int) -> list[ev.ControlEffect]:
        domain = Domain(f"p{site}", f"p{site}", "h", f"application {site % 2}")
        return self.says(site, wire.Register(site, "host", site, 7, domain))

    def commits(self, effects: list[ev.ControlEffect]) -> list[ev.ControlEffect]:
        """The arbiter takes what it was asked to."""
        (ask,) = (e for e in effects if isinstance(e, AskCommit))
        return self.on(committed(ask))

    def leads(self) -> None:
        self.on(ev.Began())
        self.on(core.LeadGranted(AskLead(1, None), Entry(1, 1, "me"), LEASE))

    def runs(self) -> None:
        self.leads()
        self.registers(0)
        self.commits(self.registers(1))
        self.says(0, wire.Seen(1, 0))
        self.commits(self.says(1, wire.Seen(1, 0)))
        assert self.node.controller is not None and self.node.controller.running


def committed(ask: AskCommit) -> core.Committed:
    entry = ask.entry
    assert isinstance(entry, Entry)
    return core.Committed(ask, Entry(entry.version + 1, entry.term, entry.holder, ask.value))


def test_it_begins_a_flow_that_nobody_has_begun() -> None:
    desk = Desk()
    assert desk.on(ev.Began()) == [
        ev.SetTimer(ev.WatchTimer(), LEASE / 5),
        AskLead(1, None),
        ev.SetTimer(ev.LeadTimer(), LEASE / 5),
    ]
    assert desk.on(core.LeadGranted(AskLead(1, None), Entry(1, 1, "me"), LEASE)) == [
        ev.Note("application 0 leads, term 1"),
        ev.HangUpOnLeader(),
        ev.LaunchHere(ONE),
    ]
    assert desk.on(ev.AgentOpened(1)) == [ev.SendAgent(1, wire.Launch(1, OTHER))]


def test_sites_are_told_what_is_committed_and_not_before() -> None:
    desk = Desk()
    desk.leads()
    assert desk.registers(0) == []
    (ask,) = desk.registers(1)
    assert isinstance(ask, AskCommit) and not ask.ends
    known = decode(ask.value)
    assert known.view is not None and not known.running
    addresses = {0: ("host", 0), 1: ("host", 1)}
    assert desk.on(committed(ask)) == [
        ev.ViewGiven(known.view),
        ev.SendSite(ONE, wire.NewView(known.view, addresses)),
        ev.SendSite(OTHER, wire.NewView(known.view, addresses)),
    ]
    assert desk.says(0, wire.Seen(1, 0)) == []
    (ask,) = desk.says(1, wire.Seen(1, 0))
    assert isinstance(ask, AskCommit) and decode(ask.value).running
    assert desk.on(committed(ask)) == [
        ev.SendSite(ONE, wire.Start(1)),
        ev.SendSite(OTHER, wire.Start(1)),
        ev.FlowRuns(begins=True),
        ev.Attached(),
    ]


def test_a_death_is_found_out_at_the_port_and_committed_before_the_fence() -> None:
    desk = Desk()
    desk.runs()
    assert desk.on(ev.SiteLost(OTHER)) == [ev.SetTimer(ev.InquireTimer(), GATHER_S)]
    probe = ev.Probe(1, {OTHER: ("host", 1)})
    assert desk.on(ev.TimerFired(ev.InquireTimer())) == [probe]
    wait, ask = desk.on(ev.Probed(1, (OTHER,)))
    assert wait == ev.SetTimer(ev.WaitTimer(1, PatienceTimer(1)), 2.0)
    assert isinstance(ask, AskCommit)
    known = decode(ask.value)
    assert known.dead == {1: "its process is gone"} and known.launched == [2]
    effects = desk.on(committed(ask))
    assert effects[0] == ev.ExpelSite(OTHER, wire.Fenced(1))
    assert effects[1] == ev.ViewGiven(known.view)  # type: ignore[arg-type]
    assert desk.on(ev.AgentOpened(1)) == [ev.SendAgent(1, wire.Launch(1, 2))]


def test_the_user_stops_the_flow_and_all_are_dismissed_when_that_is_committed() -> None:
    desk = Desk()
    desk.runs()
    desk.on(ev.AgentOpened(1))
    (ask,) = desk.on(requests.StopRequested(drain=False))
    assert isinstance(ask, AskCommit) and ask.ends and decode(ask.value).ended
    end = committed(ask)
    assert desk.on(end) == [
        ev.SendSite(ONE, wire.Dismiss(1)),
        ev.SendSite(OTHER, wire.Dismiss(1)),
        ev.SendAgent(1, wire.Dismiss(1)),
        AskResign(ask.number + 1, end.entry),
        ev.StopFeeding(),
        ev.End(None),
    ]
    assert desk.on(ev.TimerFired(ev.WatchTimer())) == []


def test_a_drain_is_committed_before_the_sequencer_hears_of_it() -> None:
    desk = Desk()
    desk.runs()
    (ask,) = desk.on(requests.StopRequested(drain=True))
    assert isinstance(ask, AskCommit) and decode(ask.value).draining
    assert desk.on(committed(ask)) == [ev.StopFeeding(), ev.SendSite(ONE, wire.Drain(1))]


def test_who_comes_back_while_something_is_committed_is_told_afterwards() -> None:
    """It may have missed the view itself, though only the drain is being committed."""
    desk = Desk()
    desk.runs()
    (ask,) = desk.on(requests.StopRequested(drain=True))
    assert isinstance(ask, AskCommit)
    assert desk.registers(1) == []
    view, known = decode(ask.value).view, {0: ("host", 0), 1: ("host", 1)}
    assert view is not None
    assert desk.on(committed(ask)) == [
        ev.StopFeeding(),
        ev.SendSite(ONE, wire.Drain(1)),
        ev.SendSite(OTHER, wire.NewView(view, known)),
        ev.SendSite(OTHER, wire.Start(1)),
    ]


def test_a_term_takes_everything_with_it() -> None:
    """What was to be fenced is not, when the same application leads again."""
    desk = Desk()
    desk.runs()
    (ask,) = desk.on(requests.StopRequested(drain=True))
    desk.on(committed(ask))  # type: ignore[arg-type]
    desk.on(ev.AgentOpened(1))
    desk.on(ev.ProcessExited(OTHER, "killed"))
    (commit,) = desk.on(ev.TimerFired(ev.InquireTimer()))[-1:]
    assert isinstance(commit, AskCommit)
    desk.now = LEASE
    note, *rest = desk.on(ev.TimerFired(ev.WaitTimer(1, RejoinTimer((0, 0)))))
    assert note == ev.Note(
        "application 0 no longer leads: its lease has expired by its own clock", warns=True
    )
    lead = AskLead(commit.number + 1, None)
    assert rest == [ev.StopFeeding(), ev.HangUpOnAgents((1,)), lead]
    assert desk.on(committed(commit)) == [], "too late for this one"
    entry = Entry(9, 3, "me", decode_before(commit))
    effects = desk.on(core.LeadGranted(lead, entry, LEASE))
    probe = effects[-1]
    assert isinstance(probe, ev.Probe)
    effects = desk.on(ev.Probed(probe.number, ()))
    (ask,) = (e for e in effects if isinstance(e, AskCommit))
    told = desk.on(committed(ask))
    assert not any(isinstance(e, ev.ExpelSite) for e in told)
    assert {e.site for e in told if isinstance(e, ev.SendSite)} == {ONE, OTHER}
    assert desk.on(ev.TimerFired(ev.WaitTimer(1, RejoinTimer((0, 0))))) == [], (
        "a timer of the first term"
    )


def decode_before(ask: AskCommit) -> bytes:
    """What the entry had when the commit was asked for."""
    assert isinstance(ask.entry, Entry)
    return ask.entry.value


def test_it_follows_and_launches_for_whoever_leads() -> None:
    desk = Desk(app=1)
    desk.on(ev.Began())
    assert desk.on(core.LeadRefused(AskLead(1, None))) == [AskRead(2)]
    entry = Entry(4, 2, "other")
    assert desk.on(core.EntryRead(AskRead(2), entry)) == [ev.DialLeader(entry)]
    assert desk.on(ev.LeaderOpened("other")) == [ev.Attached()]
    launch = wire.Launch(2, 7)
    assert desk.on(ev.LeaderSaid(launch)) == [ev.LaunchHere(SiteId(7))]
    assert desk.on(ev.LeaderSaid(launch)) == [], "once"
    exited = ev.ProcessExited(SiteId(7), "killed")
    assert desk.on(exited) == [ev.SendLeader(wire.Exited(7, "killed"))]
    assert desk.on(ev.AgentOpened(0)) == [ev.HangUpOnAgents((0,))]
    assert desk.on(ev.LeaderSaid(wire.Dismiss(1))) == [], "of a leader of old"
    assert desk.on(ev.LeaderSaid(wire.Dismiss(2))) == [ev.StopFeeding(), ev.End(None)]


def test_a_leader_that_is_lost_is_looked_for_once_at_a_time() -> None:
    desk = Desk(app=1)
    desk.on(ev.Began())
    desk.on(core.LeadRefused(AskLead(1, None)))
    entry = Entry(4, 2, "other")
    desk.on(core.EntryRead(AskRead(2), entry))
    desk.on(ev.LeaderOpened("other"))
    assert desk.on(ev.LeaderLost()) == [AskRead(3)]
    assert desk.on(core.EntryRead(AskRead(3), entry)) == [ev.DialLeader(entry)]
    desk.on(ev.LeaderOpened("other"))
    assert desk.on(ev.LeaderLost()) == [], "it follows itself, and hangs up on all"
    assert desk.on(core.LeaderGone(entry)) == [AskLead(4, entry)]


@pytest.mark.parametrize("ended", [None, "it broke"])
def test_a_flow_that_has_ended_is_not_begun_again(ended: str | None) -> None:
    first = Desk()
    first.runs()
    event: ev.ControlEvent = requests.StopRequested(drain=False)
    if ended is not None:
        event = core.FlowFailed(ONE, RuntimeError(ended))
    (ask,) = first.on(event)
    assert isinstance(ask, AskCommit)
    second = Desk(app=1)
    second.on(ev.Began())
    entry = Entry(9, 2, "me", ask.value)
    *_, end = second.on(core.LeadGranted(AskLead(1, None), entry, LEASE))
    assert isinstance(end, ev.End) and (end.error is None) == (ended is None)
    assert ended is None or ended in str(end.error)


def test_a_lease_is_asked_for_again_while_it_runs() -> None:
    desk = Desk()
    desk.leads()
    desk.now = 2.0
    entry = Entry(1, 1, "me")
    assert desk.on(ev.TimerFired(ev.LeadTimer())) == [
        AskRenew(2, entry),
        ev.SetTimer(ev.LeadTimer(), LEASE / 5),
    ]


def test_sites_refuse_orders_of_an_older_term() -> None:
    from holdfast.site.node import SiteNode

    node = SiteNode.__new__(SiteNode)
    node.site, node.term = ONE, 2
    assert not any(node.obeys(order) for order in (wire.Dismiss(1), wire.Drain(1), wire.Fenced(1)))
    assert node.obeys(wire.Start(2)) and node.obeys(wire.Dismiss(3)) and node.term == 3
    assert not node.obeys(wire.Pause(2, True))
    assert node.obeys(wire.Beat()), "no order"


def test_an_arbiter_that_is_away_is_noted_when_it_goes_seldom_meanwhile_and_when_it_is_back() -> (
    None
):
    """It was noted at every ask, five times a lease."""
    desk = Desk()
    desk.runs()
    notes = []
    for _ in range(3_000):
        desk.now += 0.2
        away = core.ArbiterUnreachable(AskRenew(9, Entry(3, 1, "me")), "the arbiter is away")
        notes += [e for e in desk.on(away) if isinstance(e, ev.Note) and "arbiter" in e.text]
        desk.node.leadership.lease_until = desk.now + LEASE
    assert notes[0] == ev.Note("the arbiter is away", warns=True)
    assert 5 < len(notes) < 12
    counted = [int(n.text.split("(")[1].split()[0].replace(",", "")) + 1 for n in notes[1:]]
    assert counted == sorted(counted) and sum(counted) + 1 <= 3_000
    back = core.Renewed(AskRenew(9, Entry(3, 1, "me")), LEASE)
    assert [e for e in desk.on(back) if isinstance(e, ev.Note)] == [
        ev.Note("the arbiter answers again, after 599.8 s", warns=True)
    ]
    assert not [e for e in desk.on(back) if isinstance(e, ev.Note)]


def entry_of(version: int | None) -> Entry:
    """What a leader has committed, as another version of Holdfast would write it."""
    desk = Desk()
    desk.leads()
    desk.registers(0)
    (ask,) = (e for e in desk.registers(1) if isinstance(e, AskCommit))
    known = msgspec.msgpack.decode(ask.value)
    del known["version"], known["next_id"]
    if version is not None:
        known["version"] = version
    return Entry(2, 1, "other", msgspec.msgpack.encode(known))


def test_an_entry_of_a_later_version_ends_an_application_and_not_the_flow() -> None:
    """Whether it follows, or a term was granted to it: that it gives up at once."""
    follower, leader = Desk(), Desk()
    for desk in (follower, leader):
        desk.on(ev.Began())
    follower.on(core.LeadRefused(AskLead(1, None)))
    (end,) = (
        e
        for e in follower.on(core.EntryRead(AskRead(2), entry_of(VERSION + 1)))
        if isinstance(e, ev.End)
    )
    assert isinstance(end.error, HostError)
    said = f"version {VERSION + 1}, and this Holdfast reads version {VERSION}"
    assert said in str(end.error)
    assert "the same version of Holdfast in all applications" in str(end.error)
    effects = leader.on(core.LeadGranted(AskLead(1, None), entry_of(VERSION + 1), LEASE))
    assert [type(e) for e in effects if isinstance(e, AskResign | ev.End | AskCommit)] == [
        AskResign,
        ev.End,
    ]


def test_an_entry_without_a_version_is_read() -> None:
    desk = Desk()
    desk.on(ev.Began())
    effects = desk.on(core.LeadGranted(AskLead(1, None), entry_of(None), LEASE))
    (probe,) = (e for e in effects if isinstance(e, ev.Probe))
    desk.on(ev.Probed(probe.number, ()))
    assert desk.node.controller is not None and desk.node.controller.roster.next_id >= 2
