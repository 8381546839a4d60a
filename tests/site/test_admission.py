"""Connections that say nothing: they take neither descriptors nor the log, and nobody's place."""

import asyncio
import contextlib
import os
import resource
import socket
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.api.security import Level
from holdfast.control.run import Run, start
from holdfast.hosts.fork_server import Work
from holdfast.hosts.processes import ProcessHost
from holdfast.net import wire
from holdfast.net.admission import (
    ACCEPTS_PER_TURN,
    TLS_MAX,
    AdmissionLimits,
    Listener,
    open_listener,
)
from holdfast.net.client import Client
from holdfast.net.connection import Connection, dial, is_listening, listen
from holdfast.net.handshake import Party
from holdfast.protections import pairs
from holdfast.sinks import parquet
from holdfast.site.config import SiteConfig
from tests.support.lines import one_line
from tests.support.parties import party
from tests.support.runs import until, until_protected, until_rows

DESCRIPTORS = 256
STRANGERS = 300


def frugal(work: Work) -> None:
    """Do the work with few descriptors, as in a container with a low limit."""
    resource.setrlimit(resource.RLIMIT_NOFILE, (DESCRIPTORS, DESCRIPTORS))
    work()


class FrugalHost(ProcessHost):
    def work(self, flow: Flow, config: SiteConfig) -> Work:
        return partial(frugal, super().work(flow, config))


@contextlib.contextmanager
def strangers(address: tuple[str, int], count: int) -> Iterator[list[socket.socket]]:
    """Connections that stay open as long as the other side lets them, and say nothing."""
    with contextlib.ExitStack() as held:
        yield [
            held.enter_context(socket.create_connection(address, timeout=10)) for _ in range(count)
        ]


def descriptors(pid: int) -> int:
    return len(os.listdir(f"/proc/{pid}/fd"))


def test_strangers_leave_a_site_its_descriptors_and_its_log(
    kept: list[Run], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They held all of them, the sink could open no file, and asyncio logged without end."""
    out = tmp_path / "out"
    flow = one_line(parquet(str(out)), pairs(failure_domain="process"))
    run = start(flow, options=Options(sites=2, partitions=4), host=FrugalHost())
    kept.append(run)
    until_protected(run, 2)
    sites = {s["site"]: s["pid"] for s in run.status()["sites"]}
    doors = {site: run._controller.addresses[site] for site in sites}
    capfd.readouterr()
    with contextlib.ExitStack() as held:
        for door in doors.values():
            held.enter_context(strangers(door, STRANGERS))
        written = len(list(out.glob("*.parquet")))
        until_rows(run, 20_000)
        until(lambda: len(list(out.glob("*.parquet"))) > written, "the sink writes files")
        for site, pid in sites.items():
            assert descriptors(pid) < DESCRIPTORS - ACCEPTS_PER_TURN
            client = Client(doors[site], Party.client(run._control.credentials.keys, wire.READER))
            client.close()
        assert not run.ended(0) and run.status()["dead"] == {}
    said = capfd.readouterr().err.splitlines()
    assert any("dropped the oldest connection" in line for line in said)
    assert len(said) < 50


def test_strangers_at_the_control_do_not_keep_a_new_site_out(kept: list[Run]) -> None:
    from holdfast.sinks import discard

    flow = one_line(discard(), pairs(failure_domain="process"))
    run = flow.start(sites=2, partitions=4)
    kept.append(run)
    until_protected(run, 2)
    waiting = AdmissionLimits.of_process().per_address + 2 * ACCEPTS_PER_TURN
    with strangers(("127.0.0.1", run._control._port), waiting):
        os.kill(next(s["pid"] for s in run.status()["sites"] if s["site"] == 1), 9)
        until(lambda: 1 in run.status()["dead"], "the death is known")
        until_protected(run, 2)
    assert set(run.status()["dead"]) == {1}


# --- the listener ---------------------------------------------------------------------------------


class Door:
    """A listener, and the connections that have authenticated there."""

    def __init__(self) -> None:
        self.opened: list[Connection] = []

    def make(self) -> Connection:
        return Connection(party(), self.opened.append, _ignore, _ignore)

    async def listen(self, limits: AdmissionLimits) -> Listener:
        return await open_listener(self.make, "127.0.0.1", patience_s=5, limits=limits)


def _ignore(*_: Any) -> None: ...


async def knock(port: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    return reader, writer


async def authenticate(port: int) -> None:
    client = await asyncio.to_thread(Client, ("127.0.0.1", port), party((wire.PUSHER, 0)))
    client.close()


MANY = 1 << 20


def test_the_oldest_that_waits_makes_room_for_a_peer() -> None:
    async def main() -> None:
        door = Door()
        listener = await door.listen(AdmissionLimits(waiting=8, per_address=8, descriptors=MANY))
        silent = [await knock(listener.port) for _ in range(8)]
        for reader, _ in silent:
            assert await reader.read(1)
        assert len(listener.waiting) == 8
        await authenticate(listener.port)
        assert len(door.opened) == 1 and len(listener.waiting) == 7
        assert len(await silent[0][0].read(-1)) < 1024 and silent[0][0].at_eof()
        assert not any(reader.at_eof() for reader, _ in silent[1:])
        listener.close()
        for _, writer in silent:
            writer.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_connection_in_reserve_takes_the_place_of_one_that_waits() -> None:
    async def main() -> None:
        door = Door()
        listener = await door.listen(AdmissionLimits(waiting=8, per_address=8, descriptors=MANY))
        silent = [await knock(listener.port) for _ in range(3)]
        await silent[-1][0].read(1)
        listener._limits = AdmissionLimits(waiting=8, per_address=8, descriptors=0)
        await authenticate(listener.port)
        assert len(door.opened) == 1 and len(listener.waiting) == 2
        listener.close()
        for _, writer in silent:
            writer.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_site_without_free_descriptors_refuses_and_is_not_taken_for_dead() -> None:
    """Its peers probe it at its port: an end without a byte would mean that it is gone."""

    async def main() -> None:
        listener = await Door().listen(AdmissionLimits(waiting=8, per_address=8, descriptors=0))
        assert await is_listening(("127.0.0.1", listener.port), 5)
        reader, writer = await knock(listener.port)
        assert len(await reader.read(-1)) == 1
        writer.close()
        assert len(listener.waiting) == 0
        listener.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_accepting_pauses_while_the_process_has_no_descriptor(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main() -> None:
        door = Door()
        listener = await door.listen(AdmissionLimits(waiting=8, per_address=8, descriptors=MANY))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        stranger = socket.socket()
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        fillers = []
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1, hard))
        try:
            with contextlib.suppress(OSError):
                while True:
                    fillers.append(os.open("/dev/null", os.O_RDONLY))
            stranger.setblocking(False)
            await asyncio.get_running_loop().sock_connect(stranger, ("127.0.0.1", listener.port))
            turns = 0
            deadline = asyncio.get_running_loop().time() + 0.2
            while asyncio.get_running_loop().time() < deadline:
                await asyncio.sleep(0.01)
                turns += 1
        finally:
            for filler in fillers:
                os.close(filler)
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        lines = [r for r in caplog.records if "no connection can be accepted" in r.getMessage()]
        assert len(lines) == 1 and turns > 1
        assert len(caplog.records) == 1
        await authenticate(listener.port)
        assert len(door.opened) == 1
        stranger.close()
        listener.close()

    asyncio.run(asyncio.wait_for(main(), 20))


def test_a_listener_that_is_closed_drops_those_that_wait() -> None:
    async def main() -> None:
        listener = await Door().listen(AdmissionLimits(waiting=8, per_address=8, descriptors=MANY))
        reader, writer = await knock(listener.port)
        await reader.read(1)
        listener.close()
        await reader.read(-1)
        assert reader.at_eof() and len(listener.waiting) == 0
        writer.close()

    asyncio.run(asyncio.wait_for(main(), 20))


# --- TLS ------------------------------------------------------------------------------------------


def secure_door(opened: list[Connection]) -> Any:
    own = party(level=Level.TLS)
    return lambda: Connection(own, opened.append, _ignore, _ignore)


def test_strangers_that_wait_for_tls_take_no_more_places_than_there_are() -> None:
    async def main() -> None:
        opened: list[Connection] = []
        listener, port = await listen(secure_door(opened), "127.0.0.1")
        silent = [await knock(port) for _ in range(2 * TLS_MAX)]
        for reader, _ in silent:
            assert await reader.read(1)
        assert len(listener.waiting) == 2 * TLS_MAX
        assert len(listener.gate.running) == TLS_MAX and len(listener.gate) == TLS_MAX
        await authenticate(port)
        assert len(opened) == 1
        listener.close()
        for _, writer in silent:
            writer.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_many_tasks_of_one_machine_that_connect_at_once_all_get_in() -> None:
    async def main() -> None:
        opened: list[Connection] = []
        listener, port = await listen(secure_door(opened), "127.0.0.1")
        own = party((wire.SITE, 1), level=Level.TLS)
        lost: list[Connection] = []

        def dialler() -> Connection:
            def closed(connection: Connection, _: Exception | None) -> None:
                lost.append(connection)

            return Connection(own, _ignore, _ignore, closed, (wire.SITE, 1), (wire.SITE, 0))

        made = await asyncio.gather(*(dial(dialler, ("127.0.0.1", port)) for _ in range(200)))
        while len(opened) + len(lost) < len(made):
            await asyncio.sleep(0.01)
        assert not lost
        listener.close()

    asyncio.run(asyncio.wait_for(main(), 60))
