"""Somebody who relays a connection without knowing the secret, over real sockets."""

import asyncio
import contextlib
import ssl

import pytest

from holdfast.api.security import Level
from holdfast.errors import HoldfastError
from holdfast.net import wire
from holdfast.net.client import Client
from holdfast.net.connection import Connection, dial, listen
from holdfast.net.handshake import Party
from holdfast.net.keys import Keyring, Keys
from holdfast.net.tls import CertificateAuthority, context
from tests.support.parties import SECRET, party

SITE, CONTROL = (wire.SITE, 1), (wire.SERVER, 0)
ORDER = wire.encode(wire.Dismiss(7))


class Ends:
    """A control that listens, and a site that dials it."""

    def __init__(self, level: Level) -> None:
        self.level = level
        self.opened, self.orders, self.over = asyncio.Event(), [], asyncio.Event()

    async def listen(self) -> tuple[str, int]:
        def make() -> Connection:
            return Connection(party(CONTROL, level=self.level), _ignore, _ignore, _ignore)

        self.listener, port = await listen(make, "127.0.0.1")
        return "127.0.0.1", port

    async def dial(self, address: tuple[str, int]) -> None:
        def make() -> Connection:
            own = party(SITE, level=self.level)
            called = (self._on_open, self._on_message, self._on_close)
            return Connection(own, *called, SITE, CONTROL)

        await dial(make, address)

    def _on_open(self, connection: Connection) -> None:
        self.opened.set()
        self.site = connection

    def _on_message(self, _: Connection, message: wire.Message, body: memoryview) -> None:
        self.orders.append(message)
        self.over.set()

    def _on_close(self, *_: object) -> None:
        self.over.set()


def _ignore(*_: object) -> None: ...


class Relay:
    """Passes on everything between two ends. `say` adds bytes to what the dialler gets."""

    def __init__(self, to: tuple[str, int]) -> None:
        self._to = to
        self._writers: list[asyncio.StreamWriter] = []

    async def listen(self) -> tuple[str, int]:
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self.server.sockets[0].getsockname()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others, other = await asyncio.open_connection(*self._to)
        self._writers = [writer, other]
        with contextlib.suppress(ConnectionError):
            await asyncio.gather(_pass(reader, other), _pass(others, writer))

    def say(self, data: bytes) -> None:
        self._writers[0].write(data)


async def _pass(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    while data := await reader.read(1 << 16):
        writer.write(data)
    writer.close()


@pytest.mark.parametrize(("level", "obeyed"), [("auth", True), ("mac", False), ("tls", False)])
def test_an_order_that_a_relay_injects(level: str, obeyed: bool) -> None:
    """At the level `auth` it is obeyed, which is why that is not the default on a network."""

    async def main() -> None:
        ends = Ends(Level(level))
        relay = Relay(await ends.listen())
        await ends.dial(await relay.listen())
        await asyncio.wait_for(ends.opened.wait(), 10)
        relay.say(ORDER + bytes(16))
        await asyncio.wait_for(ends.over.wait(), 10)
        assert bool(ends.orders) is obeyed
        ends.listener.close()
        relay.server.close()

    asyncio.run(main())


class TlsRelay(Relay):
    """Ends TLS towards both, with a certificate that it has made."""

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        others, other = await asyncio.open_connection(*self._to)
        prefix = await others.readexactly(wire.PREFIX.size)
        _, header = wire.PREFIX.unpack(prefix)
        writer.write(prefix + await others.readexactly(header))
        await writer.drain()
        forged = CertificateAuthority(b"x" * 32).certify("control", 0)
        with contextlib.suppress(OSError, asyncio.IncompleteReadError):
            await writer.start_tls(context(forged, True))
            await other.start_tls(context(None, False), server_hostname=None)
            self._writers = [writer, other]
            await asyncio.gather(_pass(reader, other), _pass(others, writer))
        writer.close()


@pytest.mark.parametrize("role", ["reader", "site"])
def test_a_relay_that_ends_tls_is_refused_by_both(role: str) -> None:
    """A site checks the certificate. A reader has none to compare with: its proof includes the one
    that it was shown, and the control's proof its own."""

    async def main() -> None:
        ends = Ends(Level.TLS)
        relay = TlsRelay(await ends.listen())
        address = await relay.listen()
        if role == "reader":
            with pytest.raises((HoldfastError, OSError)):
                await asyncio.to_thread(
                    Client, address, party((wire.READER, 0)), None, (wire.SERVER, -1)
                )
        else:
            await ends.dial(address)
            await asyncio.wait_for(ends.over.wait(), 10)
            assert not ends.opened.is_set()
        ends.listener.close()
        relay.server.close()

    asyncio.run(main())


def test_tls_shows_no_byte_of_what_is_said() -> None:
    async def main() -> None:
        ends, seen = Ends(Level.TLS), bytearray()

        class Tap(Relay):
            async def _serve(self, reader, writer) -> None:
                others, other = await asyncio.open_connection(*self._to)

                async def note(source, target) -> None:
                    while data := await source.read(1 << 16):
                        seen.extend(data)
                        target.write(data)

                await asyncio.gather(note(reader, other), note(others, writer))

        tap = Tap(await ends.listen())
        await ends.dial(await tap.listen())
        await asyncio.wait_for(ends.opened.wait(), 10)
        ends.site.send(wire.Failed("a secret value", "a secret detail"))
        await asyncio.sleep(0.1)
        assert len(seen) > 500 and b"secret value" not in seen and b"Welcome" not in seen
        ends.listener.close()
        tap.server.close()

    asyncio.run(main())


def test_a_certificate_of_another_flow_or_of_another_site_is_refused() -> None:
    """Even from somebody who has the key: one site cannot be another."""

    async def main(secret: bytes, number: int) -> bool:
        ends = Ends(Level.TLS)
        address = await ends.listen()
        own = party(SITE, level=Level.TLS)
        own.certificate = CertificateAuthority(Keys.of(secret).held["authority"]).certify(
            "site", number
        )
        opened, over = asyncio.Event(), asyncio.Event()
        called = (lambda _: opened.set(), _ignore, lambda *_: over.set())
        await dial(lambda: Connection(own, *called, SITE, CONTROL), address)
        waits = [asyncio.create_task(event.wait()) for event in (opened, over)]
        await asyncio.wait(waits, timeout=10, return_when=asyncio.FIRST_COMPLETED)
        await asyncio.sleep(0.05)
        ends.listener.close()
        return opened.is_set()

    assert asyncio.run(main(SECRET, 1))
    assert not asyncio.run(main(b"the secret of another", 1))
    assert not asyncio.run(main(SECRET, 2))


def test_contexts_speak_nothing_older_than_tls_1_3() -> None:
    made = CertificateAuthority(b"x" * 32).certify("site", 1)
    assert context(made, True).minimum_version is ssl.TLSVersion.TLSv1_3
    assert context(None, False).minimum_version is ssl.TLSVersion.TLSv1_3


def test_who_has_the_key_of_clients_cannot_play_a_server_to_others() -> None:
    """A pusher knows the key that pushers prove themselves by. Under TLS that is not enough."""

    async def main() -> None:
        keys = Keys.of(SECRET).for_client(wire.PUSHER)
        forged = CertificateAuthority(b"x" * 32).certify("site", 1)
        posing = Party(SITE, Keyring(keys), Level.TLS, forged)
        listener, port = await listen(
            lambda: Connection(posing, _ignore, _ignore, _ignore), "127.0.0.1"
        )
        victim = Party.client(
            keys, wire.PUSHER, Level.TLS, party(SITE, level=Level.TLS).certificate.without_key()
        )
        with pytest.raises(HoldfastError, match="certificate verify failed"):
            await asyncio.to_thread(Client, ("127.0.0.1", port), victim)
        posing.level = Level.AUTH  # nor by asking for less
        with pytest.raises(HoldfastError, match="the peer has security 'auth'"):
            await asyncio.to_thread(Client, ("127.0.0.1", port), victim)
        listener.close()

    asyncio.run(main())
