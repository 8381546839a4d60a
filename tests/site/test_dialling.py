"""How sites find each other: one attempt at a time for each, and none holds up another."""

import asyncio
import socket
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from holdfast.core.ids import SiteId
from holdfast.net import wire
from holdfast.net.connection import Connection, listen
from holdfast.site import runtime
from holdfast.site.peers import REDIAL_S
from holdfast.site.runtime import Site
from tests.support.lonely_site import lonely_site
from tests.support.parties import party


async def count_callers(callers: list[int]) -> tuple[str, int]:
    """A listener that says nothing, like a site that is too busy for the handshake."""

    async def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        callers.append(1)
        await reader.read()

    server = await asyncio.start_server(accept, "127.0.0.1", 0)
    return server.sockets[0].getsockname()


def deaf() -> tuple[socket.socket, list[socket.socket]]:
    """A port where no connection comes about and none is refused: its queue is full."""
    listening = socket.create_server(("127.0.0.1", 0), backlog=0)
    waiting = []
    for _ in range(2):
        s = socket.socket()
        s.setblocking(False)
        s.connect_ex(listening.getsockname())
        waiting.append(s)
    return listening, waiting


def dial_until(
    holds: Callable[[], bool], prepare: Callable[[Site], Coroutine[Any, Any, None]]
) -> None:
    async def scene() -> None:
        site = lonely_site()
        await prepare(site)
        task = asyncio.create_task(site.peers.keep_dialling(site._on_open))
        for _ in range(20):
            await asyncio.sleep(REDIAL_S)
            if holds():
                break
        task.cancel()

    asyncio.run(scene())


def test_a_slow_handshake_is_waited_for() -> None:
    """A second connection would end the first as soon as it opens, and all that is on its way."""
    callers: list[int] = []

    async def prepare(site: Site) -> None:
        site.peers.addresses = {SiteId(1): await count_callers(callers)}

    dial_until(lambda: len(callers) > 1, prepare)
    assert len(callers) == 1


def test_a_site_that_does_not_answer_does_not_keep_others_from_being_dialled() -> None:
    callers: list[int] = []
    listening, waiting = deaf()

    async def prepare(site: Site) -> None:
        there = await count_callers(callers)
        site.peers.addresses = {SiteId(1): listening.getsockname(), SiteId(2): there}

    dial_until(lambda: bool(callers), prepare)
    for s in (listening, *waiting):
        s.close()
    assert callers


@pytest.mark.parametrize("started", [False, True])
def test_a_site_that_all_controls_refuse_leaves(
    started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have another secret, for example because it was rotated while the site was away."""
    monkeypatch.setattr(runtime, "ORPHAN_S", 5 * REDIAL_S)
    opened: list[Connection] = []
    refused: list[Exception | None] = []

    def closed(_: Connection, error: Exception | None) -> None:
        refused.append(error)

    def accept() -> Connection:
        control = party((wire.SERVER, 0), secret=b"another secret than the site's")
        return Connection(control, opened.append, lambda *_: None, closed)

    async def scene() -> None:
        listeners = [await listen(accept, "127.0.0.1") for _ in range(2)]
        site = lonely_site(tuple(("127.0.0.1", port) for _, port in listeners))
        site._started = started
        await asyncio.wait_for(site.run(), 60)
        for listener, _ in listeners:
            listener.close()

    asyncio.run(scene())
    assert not opened and len(refused) >= 2
