"""An application's control: what it does about sites that it has doubts about."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast import Flow
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.control.hosting import Place, apart
from holdfast.control.server import Committed, Control
from holdfast.core.events import SiteRegistered, SitesFailed
from holdfast.core.failure_detector import ALONE_LEASES, JOIN_S_MAX
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Domain, place
from holdfast.core.records import EpochRecord
from holdfast.errors import FlowError
from holdfast.net import wire
from holdfast.net.connection import Connection, listen
from holdfast.plan.planner import plan, shape
from holdfast.protections import pairs, passive
from holdfast.sinks import discard
from holdfast.sources import generator

SCHEMA = pa.schema([("k", pa.int64())])


class NoHost:
    """Sites are launched and never come."""

    name = application = "none"
    listen_host = advertise_host = "127.0.0.1"

    def launch(self, *_: Any) -> None: ...

    def close(self) -> None: ...


@pytest.fixture
def control() -> Iterator[Control]:
    flow = Flow("f", protect=pairs(failure_domain="process"))
    source = flow.source("s", generator(lambda *_: None, SCHEMA))
    source.key_by("k").agg(n=F.count()).sink("out", discard())
    made = Control(flow, plan(flow), NoHost(), 4, 0, Options(lease=60.0), b"s" * 16, Place())
    made._over = made.loop.create_future()
    yield made
    made.loop.close()


def committed(control: Control, addresses: dict[int, tuple[str, int]]) -> Committed:
    domains = {SiteId(s): Domain(f"p{s}", f"p{s}", "h", "a") for s in range(4)}
    view = place(control.shape, list(domains), domains)
    app_of = dict.fromkeys(range(4), 0)
    return Committed(view, addresses, dict(domains), app_of, {}, [], True, False)


def test_a_site_that_dies_while_a_controller_takes_over_is_not_forgotten(control: Control) -> None:
    async def main() -> None:
        control._port = 0
        looked, go_on = asyncio.Event(), asyncio.Event()

        async def slowly(sites: Any, addresses: Any) -> list[SiteId]:
            looked.set()
            await go_on.wait()
            return []

        control._gone = slowly  # type: ignore[method-assign]
        known = committed(control, dict.fromkeys(range(4), ("127.0.0.1", 1)))
        taking_over = asyncio.ensure_future(control._take_over(known, 1))
        await looked.wait()
        control._suspect(SiteId(2), "process 7 ended with status -9")
        go_on.set()
        await taking_over
        assert control.controller is not None
        while 2 not in control.controller.dead:
            await asyncio.sleep(0.001)

    control.loop.run_until_complete(asyncio.wait_for(main(), 20))


def registers(control: Control, site: int, number: int) -> None:
    """A site says who it is to a control that does not lead."""
    domain = Domain(f"p{site}", f"p{site}", "h", "a")
    connection = Connection(b"s" * 16, _ignore, _ignore, _ignore)
    control._on_register(connection, wire.Register(site, "127.0.0.1", number, 7, domain))


def test_a_new_leader_launches_no_more_sites_than_there_were(control: Control) -> None:
    """The last one had launched 9 in place of a site whose death it could not commit, and 8 in
    place of another, which it could."""

    async def only_one(sites: Any, addresses: Any) -> list[SiteId]:
        return [SiteId(1)]

    control._port = 0
    control._gone = only_one  # type: ignore[method-assign]
    known = committed(control, dict.fromkeys(range(4), ("127.0.0.1", 1)))
    known = msgspec.structs.replace(known, launched=[8])
    registers(control, 8, 1)
    registers(control, 9, 1)
    control.status = {1: {"site": 1}, 8: {"site": 8}}
    control.loop.run_until_complete(control._take_over(known, 2))
    controller = control.controller
    assert controller is not None
    (new,) = controller.launched
    assert controller.replaced == {1: new}, "8 has come already"
    assert set(controller.addresses) == {0, 2, 3, 8} and 9 not in control._connections
    assert list(control.status) == [8], "what the dead said last counts no more"


def test_a_process_that_is_ending_does_not_count_as_listening(control: Control) -> None:
    """Its kernel may still take the connection, and then break it."""

    async def main() -> None:
        def accept_and_break(_: Any, writer: asyncio.StreamWriter) -> None:
            writer.transport.abort()

        dying = await asyncio.start_server(accept_and_break, "127.0.0.1", 0)
        make = lambda: Connection(b"s" * 16, _ignore, _ignore, _ignore)  # noqa: E731
        alive, port = await listen(make, "127.0.0.1")
        addresses = {
            SiteId(0): ("127.0.0.1", dying.sockets[0].getsockname()[1]),
            SiteId(1): ("127.0.0.1", port),
        }
        assert await control._gone(addresses, addresses) == [0]
        dying.close()
        alive.close()

    control.loop.run_until_complete(asyncio.wait_for(main(), 20))


def _ignore(*_: Any) -> None: ...


def test_whoever_is_alone_leads_however_long_it_stood_still(control: Control) -> None:
    """There is nobody it could have been replaced by; to begin again would give all rows again."""
    control._port, control.options = 0, Options(lease=0.02)

    async def main() -> None:
        leading = asyncio.ensure_future(control._keep_leading())
        while control.controller is None:
            await asyncio.sleep(0.001)
        first = control.controller
        control._arbiter._extend(first.term, 0)  # type: ignore[attr-defined]
        await asyncio.sleep(0.1)
        leading.cancel()
        assert control.controller is first

    control.loop.run_until_complete(asyncio.wait_for(main(), 20))


def test_two_are_apart_when_both_say_so_or_one_for_long(control: Control) -> None:
    async def nobody(*_: Any) -> list[SiteId]:
        return []

    control._port = 0
    control._gone = nobody  # type: ignore[method-assign]
    known = committed(control, dict.fromkeys(range(4), ("127.0.0.1", 1)))
    control.loop.run_until_complete(control._take_over(known, 1))
    assert control.controller is not None
    connections = [Connection(b"s" * 16, _ignore, _ignore, _ignore) for _ in range(4)]

    def dead_after(site: int, *words: wire.Message) -> set[int]:
        connections[site].id = site
        for word in words:
            control._on_message(connections[site], word, memoryview(b""))
        control._part(time.monotonic() + control.options.lease_s / 2)
        assert control.controller is not None
        return set(control.controller.dead)

    assert dead_after(0, wire.Unheard(2, 2, "how")) == set()
    assert dead_after(2, wire.Beat(busy=True), wire.Unheard(0, 2, "how")) == set(), (
        "2 is in a long call"
    )
    control._detector.forget(SiteId(2))
    assert dead_after(2, wire.Unheard(0, 2, "how")) == {2}
    assert dead_after(1, wire.Unheard(0, ALONE_LEASES - 1, "how")) == {2}
    assert dead_after(1, wire.Unheard(0, ALONE_LEASES, "how")) == {0, 2}, "1 has what 2 had"


def test_a_replica_that_gets_nothing_for_long_is_given_up(control: Control) -> None:
    async def nobody(*_: Any) -> list[SiteId]:
        return []

    control._port = 0
    control._gone = nobody  # type: ignore[method-assign]
    known = committed(control, dict.fromkeys(range(4), ("127.0.0.1", 1)))
    control.loop.run_until_complete(control._take_over(known, 1))
    controller = control.controller
    assert controller is not None
    controller.handle(SitesFailed((SiteId(1),), "killed"))
    domain = Domain("p9", "p9", "h", "a")
    controller.handle(SiteRegistered(SiteId(9), ("127.0.0.1", 1), domain))

    def joins() -> list[TaskId]:
        assert controller.view is not None
        return [u for u in controller.view.tasks() if controller.view.group(u).joining]

    first, *others = joins()
    begun, limit = time.monotonic(), max(JOIN_S_MAX, 10 * control.options.lease_s)
    copying = [{"task": list(u), "to": 9, "bytes_left": 500} for u in joins()]
    control.status = {0: {"copying": copying}}
    control._give_up_joins(begun)
    control._give_up_joins(begun + limit - 1)
    for replica in copying[1:]:
        replica["bytes_left"] = 400
    control._give_up_joins(begun + limit - 0.5)
    assert joins() == [first, *others]
    control._give_up_joins(begun + limit + 1)
    assert joins() == others, "these have got something"
    assert any("got nothing for more than" in line for line in controller.history)


@pytest.mark.parametrize(
    "protection", [pairs(failure_domain="process"), passive(failure_domain="process")]
)
def test_replicas_and_who_stands_by_are_in_different_applications(protection: Any) -> None:
    flow = Flow("f", protect=protection)
    source = flow.source("s", generator(lambda *_: None, SCHEMA))
    source.key_by("k").agg(n=F.count()).sink("out", discard())
    assert {s.guard.failure_domain for s in apart(shape(plan(flow), 8), 2).stages} == {
        "application"
    }


def test_a_lease_must_be_positive() -> None:
    with pytest.raises(FlowError, match="must be positive"):
        Options(lease=0)


def test_only_the_last_records_are_remembered(
    control: Control, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.control.server.RECORDS_MAX", 3)
    for epoch in range(7):
        control._note_record(EpochRecord(epoch, epoch * 10, ()))
    assert list(control.records) == [4, 5, 6]
