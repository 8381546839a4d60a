"""A control and its arbiter: what is committed, when the answer gets lost; and who leads again."""

from pathlib import Path
from typing import Any

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.arbiter import Arbiter, Entry
from holdfast.arbiter.memory import MemoryArbiter
from holdfast.control import events as ev
from holdfast.control.hosting import Place
from holdfast.control.knowledge import decode
from holdfast.control.server import Control
from holdfast.core import requests
from holdfast.core.effects import (
    ArbiterAsk,
    AskCommit,
    AskLead,
    AskRead,
    AskRenew,
    AskResign,
)
from holdfast.core.ids import SiteId
from holdfast.core.layout import Domain
from holdfast.core.roster import first_id
from holdfast.errors import ArbiterAway
from holdfast.net import wire
from holdfast.plan.planner import plan
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.site.config import OnExit, SiteConfig
from tests.support.lines import one_line


class NoHost:
    """Launches nothing."""

    name = application = "none"
    listen_host = advertise_host = "127.0.0.1"

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None:
        pass

    def close(self) -> None:
        pass


class Forgetful(MemoryArbiter):
    """The first answer to a commit of a view gets lost."""

    heard = False
    forgets = False

    def commit(self, expected: Entry, value: bytes) -> Entry:
        entry = super().commit(expected, value)
        if self.forgets and not self.heard:
            self.heard = True
            raise ArbiterAway(where="here", cause="the answer got lost")
        return entry


class Leader:
    """The control of a flow that runs on four sites, in two applications; without sockets."""

    def __init__(self, arbiter: Arbiter, folder: Path) -> None:
        flow = one_line(discard(), pairs())
        place = Place(0, (("127.0.0.1", 1), ("127.0.0.1", 2)), f"file:{folder}")
        options = Options(partitions=4, lease=60.0)
        self.control = Control(flow, plan(flow), NoHost(), 4, 0, options, b"secret" * 6, place)
        self.control.arbiter.arbiter = arbiter
        self.control.node.leadership.holder = "here"
        self.node, self.now = self.control.node, 0.0
        self.effects: list[Any] = []
        self.handle(ev.Began())
        for site in range(4):
            domain = Domain(f"p{site}", f"e{site}", "h", f"application {site % 2}")
            self.says(site, wire.Register(site, "127.0.0.1", 9, 7, domain))
        self.see()
        assert self.node.controller is not None and self.node.controller.running

    def handle(self, event: ev.ControlEvent) -> None:
        """And whatever the arbiter answers to what follows."""
        asks: list[ArbiterAsk] = []
        for effect in self.node.handle(event, self.now):
            self.effects.append(effect)
            if isinstance(effect, AskLead | AskRenew | AskRead | AskResign | AskCommit):
                asks.append(effect)
        for ask in asks:
            self.handle(self.control.arbiter.answer(ask, "here"))

    def says(self, site: int, message: wire.Message) -> None:
        self.handle(ev.SiteSaid(SiteId(site), message))

    def see(self) -> None:
        """All sites act on the view."""
        assert self.node.controller is not None
        view = self.node.controller.view
        assert view is not None
        for site in view.members:
            self.says(site, wire.Seen(view.term, view.number))

    def dies(self, site: int) -> None:
        self.handle(ev.ProcessExited(SiteId(site), "killed"))
        self.handle(ev.TimerFired(ev.InquireTimer()))


def test_a_commit_whose_answer_got_lost_is_not_somebody_elses(tmp_path: Path) -> None:
    """Also if another view has come up before it is said again."""
    arbiter = Forgetful("flow", 60.0)
    leader = Leader(arbiter, tmp_path)
    node = leader.node
    arbiter.forgets = True
    leader.handle(requests.StopRequested(drain=True))
    assert arbiter.heard and node.leading is not None and node.leading.frozen
    leader.dies(0)
    leader.handle(ev.TimerFired(ev.LeadTimer()))
    assert node.controller is not None, "it still leads"
    assert not node.leading.frozen
    known = decode(arbiter.read().value)
    assert known.view is not None
    assert known.view == node.controller.view and first_id(1) not in known.view.members


def test_who_has_stepped_down_does_not_lead_again_in_the_same_term(tmp_path: Path) -> None:
    """Sites would be given numbers that others have, and say nothing again."""
    leader = Leader(MemoryArbiter("flow", 60.0), tmp_path)
    node = leader.node
    leader.now = 61.0  # by its own clock; the arbiter's has hardly moved
    leader.handle(ev.TimerFired(ev.WatchTimer()))
    if node.leading is None:
        leader.handle(ev.TimerFired(ev.LeadTimer()))
    assert node.leadership.entry is not None and node.leadership.entry.term == 2
    assert [e.entry.term for e in leader.effects if isinstance(e, AskResign)] == [1]


def test_the_end_is_committed_before_anybody_is_told(tmp_path: Path) -> None:
    """A leader that has lost the arbiter must not end what another one leads."""
    arbiter = Forgetful("flow", 60.0)
    leader = Leader(arbiter, tmp_path)
    arbiter.forgets = True
    leader.handle(requests.StopRequested(drain=False))
    told = [e for e in leader.effects if isinstance(e, ev.SendSite)]
    assert not any(isinstance(e.message, wire.Dismiss) for e in told)
    assert not any(isinstance(e, ev.End) for e in leader.effects)
    leader.handle(ev.TimerFired(ev.LeadTimer()))
    told = [e for e in leader.effects if isinstance(e, ev.SendSite)]
    assert {e.site for e in told if isinstance(e.message, wire.Dismiss)} == {0, 1, 2, 3}
    assert leader.effects[-1] == ev.End(None) and decode(arbiter.read().value).ended
