"""Connections: only who knows the secret gets in, and nothing malformed does harm."""

import asyncio
import contextlib
import os
import struct

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.api.security import Level
from holdfast.core.events import BlocksAvailable, ReplicaReported
from holdfast.core.layout import Domain, PartitionGroup, View
from holdfast.core.messages import Ack, BundleKey, SequencerState
from holdfast.core.records import Block, EpochRecord, Range, pack_step
from holdfast.net import wire
from holdfast.net.admission import Listener
from holdfast.net.connection import Connection, dial, listen
from tests.support.parties import SECRET, party


class End:
    """One end of a connection, with everything that happened to it."""

    def __init__(
        self,
        secret: bytes = SECRET,
        identity: tuple[str, int] | None = None,
        level: Level = Level.AUTH,
    ) -> None:
        self.opened: list[Connection] = []
        self.messages: list[tuple[wire.Message, bytes]] = []
        self.closed = asyncio.Event()
        self.changed = asyncio.Event()
        self._party = party(identity or (wire.SITE, 0), secret, level)
        self._identity = identity

    def make(self) -> Connection:
        def on_open(connection: Connection) -> None:
            self.opened.append(connection)
            self.changed.set()

        def on_message(_: Connection, message: wire.Message, body: memoryview) -> None:
            self.messages.append((message, bytes(body)))
            self.changed.set()

        def on_close(_: Connection, error: Exception | None) -> None:
            self.closed.set()
            self.changed.set()

        called = (on_open, on_message, on_close)
        return Connection(self._party, *called, self._identity, (wire.SITE, 0))

    async def until(self, condition) -> None:
        while not condition():
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 5)


async def server(level: Level = Level.AUTH) -> tuple[End, Listener, tuple[str, int]]:
    end = End(level=level)
    listening, port = await listen(end.make, "127.0.0.1")
    return end, listening, ("127.0.0.1", port)


@pytest.mark.parametrize("level", Level)
def test_messages_and_bodies_arrive_in_order(level: Level) -> None:
    async def main() -> None:
        end, listening, address = await server(level)
        client = End(identity=("site", 3), level=level)
        await dial(client.make, address)
        await client.until(lambda: client.opened)
        big = os.urandom(3_000_000)
        for epoch in range(3):
            body = [b"ab", big] if epoch == 1 else None
            client.opened[0].send(wire.Delivered(7, epoch, epoch, epoch), body)
        await end.until(lambda: len(end.messages) == 3)
        assert [m.epoch for m, _ in end.messages] == [0, 1, 2]
        assert end.messages[1][1] == b"ab" + big
        assert (end.opened[0].role, end.opened[0].id) == ("site", 3)
        listening.close()

    asyncio.run(main())


@pytest.mark.parametrize(
    ("secret", "role"),
    [(b"another secret", "site"), (SECRET, "server")],
    ids=["stranger", "server"],
)
def test_a_client_with_another_secret_is_refused_and_one_that_plays_the_controller(
    secret: bytes, role: str
) -> None:
    """Only a controller gives orders, and it is dialled: to know the secret is not enough."""

    async def main() -> None:
        end, listening, address = await server()
        client = End(secret, (role, 0))
        await dial(client.make, address)
        await asyncio.wait_for(client.closed.wait(), 5)
        assert not end.opened and not client.opened
        listening.close()

    asyncio.run(main())


def test_a_server_with_another_secret_is_refused() -> None:
    """A Welcome that only echoes is not enough: the client checks the server's proof too."""

    async def main() -> None:
        async def impostor(reader, writer) -> None:
            writer.write(wire.encode(wire.Challenge(b"x" * 16, wire.VERSION, "auth")))
            await reader.read(100)
            writer.write(wire.encode(wire.Welcome(b"y" * 32)))
            await writer.drain()

        listening = await asyncio.start_server(impostor, "127.0.0.1", 0)
        client = End(identity=("site", 0))
        await dial(client.make, listening.sockets[0].getsockname())
        await asyncio.wait_for(client.closed.wait(), 5)
        assert not client.opened
        listening.close()

    asyncio.run(main())


VIEW = View(
    2,
    7,
    (0, 3),
    (
        (PartitionGroup(0, 4, (0, 3)), PartitionGroup(4, 8, (3,), (5,))),
        (PartitionGroup(0, 1, (0,)),),
    ),
)
RECORD = EpochRecord(
    3, 100, (Range(0, 1, 5, 9, pack_step(5, 77)), Range(0, 2, 0, 1)), ((0, 1),), False, True
)
EXTRAS: wire.Extras = {
    "counts": (1, 2, 3, 4),
    "ingress": {
        "offsets": {"0": 7},
        "positions": {"0": {"row": 5}},
        "mark": b"x",
        "push_readers": [],
        "pull_readers": [],
    },
    "egress": None,
    "operator": None,
}
BUNDLE = wire.Bundle(BundleKey(1, 2, 3, 4, 5, 0, True), 6, 16, 8)


@pytest.mark.parametrize(
    "message",
    [
        wire.Register(1, "h", 99, 5, Domain("p", "e", "h", "a")),
        wire.NewView(VIEW, {0: ("h", 1), 3: ("h", 2)}),
        wire.ReplicaReport(ReplicaReported(3, (1, 2), 4, "failed", "it broke")),
        wire.Pass(RECORD),
        wire.SequencerCopy(SequencerState(4, 104, False, 1, (9, 1), (True, False), (RECORD,))),
        wire.Blocks(
            BlocksAvailable(0, 1, (Block(0, 5, 40), Block(5, 9, 32, pack_step(5, 7))), True)
        ),
        wire.Acks([Ack(0, 1, 2, 0, -1, 3, True, -1, 2**64 - 1)]),
        wire.HandOverBegin((1, 2), 30, 4_000, EXTRAS, None, {}),
        wire.HandOverKept((1, 2), BUNDLE),
    ],
    ids=lambda m: type(m).__name__,
)
def test_headers_come_back_as_they_were(message: wire.Message) -> None:
    again = wire.decode(wire.encode(message)[wire.PREFIX.size :])
    assert again == message
    assert again == message


@pytest.mark.parametrize(
    "data",
    [
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n",
        struct.pack("<II", 0, 0xFFFFFFFF),
        struct.pack("<II", 0xFFFFFFFF, 10),
        struct.pack("<II", 0, 4) + b"\xc1\xc1\xc1\xc1",
        wire.encode(wire.Delivered(0, 0, 0, 0)),
        wire.encode(wire.Hello("site", 0, "site", 0, "", "", b"n" * 16, b"p" * 32)),
    ],
)
def test_a_stranger_is_refused_and_others_are_served(data: bytes) -> None:
    async def main() -> None:
        end, listening, address = await server()
        reader, writer = await asyncio.open_connection(*address)
        writer.write(data)
        with contextlib.suppress(ConnectionResetError):
            await asyncio.wait_for(reader.read(-1), 5)  # the challenge, then the end
        assert not end.opened and not end.messages
        client = End(identity=("site", 1))
        await dial(client.make, address)
        await client.until(lambda: client.opened)
        listening.close()

    asyncio.run(main())


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.binary(max_size=300))
def test_arbitrary_bytes_never_crash_the_decoder(data: bytes) -> None:
    async def main() -> None:
        end = End()
        connection = end.make()

        class Transport(asyncio.Transport):
            closing = False

            def write(self, _: object) -> None: ...

            def set_write_buffer_limits(self, high=None, low=None) -> None: ...

            def get_extra_info(self, name: str, default=None):
                return None

            def is_closing(self) -> bool:
                return self.closing

            def abort(self) -> None:
                self.closing = True

        transport = Transport()
        connection.connection_made(transport)
        rest = data
        while rest and not transport.closing:
            buffer = connection.get_buffer(-1)
            part = rest[: len(buffer)]
            buffer[: len(part)] = part
            connection.buffer_updated(len(part))
            rest = rest[len(part) :]
        assert not end.opened
        connection.connection_lost(None)

    asyncio.run(main())
