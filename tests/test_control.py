"""An application's control: what it does about sites that it has doubts about."""

import asyncio
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast import Flow
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.arbiter import Entry
from holdfast.control import events as ev
from holdfast.control.hosting import Place, widen_failure_domains
from holdfast.control.knowledge import Knowledge
from holdfast.control.node import ControlNode
from holdfast.control.record_log import RecordLog
from holdfast.control.server import Control
from holdfast.core import events as core
from holdfast.core.effects import AskLead, AskRenew
from holdfast.core.events import SiteRegistered, SitesFailed
from holdfast.core.failure_detector import ALONE_LEASES, JOIN_S_MAX
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Domain
from holdfast.core.placement import place
from holdfast.core.records import EpochRecord
from holdfast.errors import FlowError
from holdfast.net import wire
from holdfast.net.connection import Connection, listen
from holdfast.plan.planner import plan, shape
from holdfast.protections import pairs, passive
from holdfast.sinks import discard
from holdfast.sources import generator
from tests.support.parties import party

SCHEMA = pa.schema([("k", pa.int64())])
INF = float("inf")
NEW = 1_000
"""The first number of a site in the second term."""


class NoHost:
    """Sites are launched and never come."""

    name = application = "none"
    listen_host = advertise_host = "127.0.0.1"

    def launch(self, *_: Any) -> None: ...

    def close(self) -> None: ...


def flow() -> Flow:
    made = Flow("f", protect=pairs(failure_domain="process"))
    source = made.source("s", generator(lambda *_: None, SCHEMA))
    source.key_by("k").agg(n=F.count()).sink("out", discard())
    return made


@pytest.fixture
def control() -> Iterator[Control]:
    made = Control(flow(), plan(flow()), NoHost(), 4, 0, Options(lease=60.0), b"s" * 16, Place())
    made._over = made.loop.create_future()
    yield made
    made.loop.close()


@pytest.fixture
def node() -> ControlNode:
    return ControlNode(shape(plan(flow()), 32), Options(lease=60.0), holder="me", sites=4)


def committed(node: ControlNode, addresses: dict[int, tuple[str, int]]) -> Knowledge:
    domains = {SiteId(s): Domain(f"p{s}", f"p{s}", "h", "a") for s in range(4)}
    view = place(node.shape, list(domains), domains)
    app_of = dict.fromkeys(range(4), 0)
    return Knowledge(view, addresses, dict(domains), app_of, {}, [], True, False)


def grant(node: ControlNode, known: Knowledge, now: float = 0.0) -> ev.Probe:
    """Have the arbiter give it a term after another leader's; it wants to know who lives."""
    (ask,) = (e for e in node.handle(ev.Began(), now) if isinstance(e, AskLead))
    entry = Entry(7, 2, "me", known.encode())
    effects = node.handle(core.LeadGranted(ask, entry, INF), now)
    (probe,) = (e for e in effects if isinstance(e, ev.Probe))
    return probe


def take_over(node: ControlNode, known: Knowledge, gone: tuple[int, ...] = ()) -> Any:
    probe = grant(node, known)
    node.handle(ev.Probed(probe.number, tuple(SiteId(s) for s in gone)), 0.0)
    assert node.controller is not None
    return node.controller


EVERYWHERE = dict.fromkeys(range(4), ("127.0.0.1", 1))


def test_a_site_that_dies_while_a_controller_takes_over_is_not_forgotten(node: ControlNode) -> None:
    probe = grant(node, committed(node, EVERYWHERE))
    reason = "process 7 ended with status -9"
    assert node.handle(ev.ProcessExited(SiteId(2), reason), 0.0) == []
    effects = node.handle(ev.Probed(probe.number, ()), 0.0)
    assert [e.timer for e in effects if isinstance(e, ev.SetTimer)] == [ev.InquireTimer()]
    node.handle(ev.TimerFired(ev.InquireTimer()), 0.003)
    assert node.controller is not None and node.controller.dead == {2: reason}


def registers(node: ControlNode, site: int) -> list[ev.ControlEffect]:
    """A site says who it is."""
    domain = Domain(f"p{site}", f"p{site}", "h", "a")
    message = wire.Register(site, "127.0.0.1", 1, 7, domain)
    return node.handle(ev.SiteSaid(SiteId(site), message), 0.0)


def test_a_new_leader_launches_no_more_sites_than_there_were(node: ControlNode) -> None:
    """The last one had launched 9 in place of a site whose death it could not commit, and 8 in
    place of another, which it could."""
    known = msgspec.structs.replace(committed(node, EVERYWHERE), launched=[8])
    registers(node, 8)
    registers(node, 9)
    node.watch.status = {1: {"site": 1}, 8: {"site": 8}}
    controller = take_over(node, known, gone=(1,))
    (new,) = controller.roster.launched
    assert controller.roster.replaced == {1: new}, "8 has come already"
    assert set(controller.addresses) == {0, 2, 3, 8} and 9 not in node.watch.connected
    assert list(node.watch.status) == [8], "what the dead said last counts no more"


def test_a_process_that_is_ending_does_not_count_as_listening(control: Control) -> None:
    """Its kernel may still take the connection, and then break it."""

    async def main() -> None:
        def accept_and_break(_: Any, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        dying = await asyncio.start_server(accept_and_break, "127.0.0.1", 0)
        make = lambda: Connection(party(), _ignore, _ignore, _ignore)  # noqa: E731
        alive, port = await listen(make, "127.0.0.1")
        addresses = {
            SiteId(0): ("127.0.0.1", dying.sockets[0].getsockname()[1]),
            SiteId(1): ("127.0.0.1", port),
        }
        assert await control.launcher.gone(addresses) == [0]
        dying.close()
        alive.close()

    control.loop.run_until_complete(asyncio.wait_for(main(), 20))


def _ignore(*_: Any) -> None: ...


def test_whoever_is_alone_leads_however_long_it_stood_still(control: Control) -> None:
    """There is nobody it could have been replaced by; to begin again would give all rows again."""
    control.node.options = Options(lease=0.02)

    async def main() -> None:
        control.handle(ev.Began())
        first = control.controller
        assert first is not None
        control.arbiter.arbiter._extend(first.term, 0)  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
        control.handle(ev.TimerFired(ev.LeadTimer()))
        assert control.controller is first

    control.loop.run_until_complete(asyncio.wait_for(main(), 20))


def test_two_are_apart_when_both_say_so_or_one_for_long(node: ControlNode) -> None:
    controller = take_over(node, committed(node, EVERYWHERE))
    settle(node)

    def dead_after(site: int, *words: wire.Message) -> set[int]:
        for word in words:
            node.handle(ev.SiteSaid(SiteId(site), word), 0.0)
        # Not everything that the watch does: nobody has beaten since.
        node._control(node.watch.partitioned(node.options.lease_s / 2))
        settle(node)
        return set(controller.dead)

    for site in range(4):
        node.handle(ev.SiteSaid(SiteId(site), wire.Beat()), 0.0)
    assert dead_after(0, wire.Unheard(2, 2, "how")) == set()
    assert dead_after(2, wire.Beat(busy=True), wire.Unheard(0, 2, "how")) == set(), (
        "2 is in a long call"
    )
    node.watch.detector.forget(SiteId(2))
    assert dead_after(2, wire.Unheard(0, 2, "how")) == {2}
    assert dead_after(1, wire.Unheard(0, ALONE_LEASES - 1, "how")) == {2}
    assert dead_after(1, wire.Unheard(0, ALONE_LEASES, "how")) == {0, 2}, "1 has what 2 had"


def settle(node: ControlNode) -> None:
    """Have the arbiter commit whatever it was asked to."""
    while (ask := node.leadership._committing) is not None:
        entry = ask.entry
        assert isinstance(entry, Entry)
        after = Entry(entry.version + 1, entry.term, entry.holder, ask.value)
        node.handle(core.Committed(ask, after), 0.0)


def test_a_replica_that_gets_nothing_for_long_is_given_up(node: ControlNode) -> None:
    controller = take_over(node, committed(node, EVERYWHERE))
    controller.handle(SitesFailed((SiteId(1),), "killed"))
    domain = Domain("p9", "p9", "h", "a")
    controller.handle(SiteRegistered(SiteId(NEW), ("127.0.0.1", 1), domain))

    def joins() -> list[TaskId]:
        assert controller.view is not None
        return [u for u in controller.view.tasks() if controller.view.group(u).joining]

    first, *others = joins()
    begun, limit = 5.0, max(JOIN_S_MAX, 10 * node.options.lease_s)
    copying = [{"task": list(u), "to": NEW, "bytes_left": 500} for u in joins()]
    node.watch.status = {0: {"copying": copying}}

    def look(now: float) -> None:
        assert controller.view is not None
        node._control(node.watch.stuck(controller.view, now))

    look(begun)
    look(begun + limit - 1)
    for replica in copying[1:]:
        replica["bytes_left"] = 400
    look(begun + limit - 0.5)
    assert joins() == [first, *others]
    look(begun + limit + 1)
    assert joins() == others, "these have got something"
    assert any("got nothing for more than" in line for line in controller.lifecycle.history)


def test_a_lease_is_renewed_until_it_is_lost(node: ControlNode) -> None:
    (ask,) = (e for e in node.handle(ev.Began(), 0.0) if isinstance(e, AskLead))
    node.handle(core.LeadGranted(ask, Entry(1, 1, "me"), 60.0), 0.0)
    effects = node.handle(ev.TimerFired(ev.LeadTimer()), 12.0)
    (renew,) = (e for e in effects if isinstance(e, AskRenew))
    node.handle(core.Renewed(renew, 60.0), 13.0)
    node.handle(ev.TimerFired(ev.InquireTimer()), 71.9)
    assert node.controller is not None
    node.handle(ev.TimerFired(ev.InquireTimer()), 72.0)
    assert node.controller is None, "60 s after it asked, not after it heard"


@pytest.mark.parametrize(
    "protection", [pairs(failure_domain="process"), passive(failure_domain="process")]
)
def test_replicas_and_who_stands_by_are_in_different_applications(protection: Any) -> None:
    flow = Flow("f", protect=protection)
    source = flow.source("s", generator(lambda *_: None, SCHEMA))
    source.key_by("k").agg(n=F.count()).sink("out", discard())
    assert {
        s.guard.failure_domain for s in widen_failure_domains(shape(plan(flow), 8), 2).stages
    } == {"application"}


def test_a_lease_must_be_positive() -> None:
    with pytest.raises(FlowError, match="must be positive"):
        Options(lease=0)


def test_only_the_last_records_are_remembered(control: Control) -> None:
    control.records = RecordLog(records_max=3)
    for epoch in range(7):
        control._note_record(EpochRecord(epoch, epoch * 10, ()))
        control._note_record(EpochRecord(epoch, epoch * 10, ()))
    assert [record.epoch for record in control.records.all()] == [4, 5, 6]
    assert control.records.last is not None and control.records.last.epoch == 6
