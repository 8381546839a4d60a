"""How two processes of a flow make sure of each other, without sockets.

    acceptor                                   dialler
    Challenge(nonce, version, level)  ------>
                 (TLS begins, at the level `tls`)
                                      <------  Hello(who it is, whom it dials, plan, proof)
    Welcome(proof)                    ------>

A proof is an HMAC, under the key of the dialler's role, of everything that was said: both nonces,
the level, who dials whom, the plan, and the certificate that the acceptor has shown. So

- only a holder of the key can make one, and each end checks the other's;
- a connection that is relayed to another site than the dialled one is refused, and so is one whose
  Challenge was changed on the way to ask for a weaker level;
- who ends TLS between the two has another certificate, and nothing that it relays fits.

The dialler follows the level of the acceptor, unless it was given one of its own. At the level
`mac` the keys of the seals come from what was said as well.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import ssl
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any
from weakref import WeakSet

import msgspec

from holdfast.api.security import Level
from holdfast.errors import ProtocolError
from holdfast.net import tls, wire
from holdfast.net.keys import Keyring, Keys
from holdfast.net.sealing import Sealer

Identity = tuple[str, int]
"""A role, and the number of a site or application."""

NONCE_BYTES = 16


@dataclass
class Party:
    """What a process is and has, in all of its handshakes."""

    own: Identity
    """Who it is when it is dialled."""
    ring: Keyring
    level: Level | None
    """None: as the dialled process wants it."""
    certificate: tls.Certificate | None = None
    plan: Mapping[str, str] = field(default_factory=dict)
    """Digests of the plan's stages by their names; empty for clients."""
    connections: WeakSet[Any] = field(default_factory=WeakSet, repr=False)
    """The open connections of this process."""

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "connections": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state, connections=WeakSet())

    def hold(self, keys: Sequence[Keys], certificate: tls.Certificate | None) -> None:
        """Accept these keys and no others, and dial with the first."""
        self.ring.hold(keys)
        self.certificate = certificate or self.certificate

    def close_retired(self) -> None:
        """Close connections that were opened with keys that are not accepted any more. What belongs
        to the flow dials again."""
        for connection in list(self.connections):
            if self.ring.find(connection.keys) is None:
                connection.close()

    @classmethod
    def client(
        cls,
        keys: Keys,
        role: str,
        level: Level | None = None,
        trust: tls.Certificate | None = None,
    ) -> Party:
        """A pusher or a reader. It has no certificate of its own."""
        return cls((role, 0), Keyring(keys.for_client(role)), level, trust)


class HandshakePhase(Enum):
    CHALLENGE = "waits for Challenge"
    SECURING = "begins TLS"
    HELLO = "waits for Hello"
    WELCOME = "waits for Welcome"
    OPEN = "is over"
    REFUSED = "was refused"


class HandshakeEvent(Enum):
    """What moves a handshake from one phase to the next."""

    CHALLENGED = "Challenge"
    DIALLER_SECURED = "the dialler's TLS is up, or not needed"
    ACCEPTOR_SECURED = "the acceptor's TLS is up, or not needed"
    GREETED = "Hello"
    TURNED_AWAY = "Hello of a peer that is not let in"
    WELCOMED = "Welcome"


EDGES: dict[tuple[HandshakePhase, HandshakeEvent], HandshakePhase] = {
    (HandshakePhase.CHALLENGE, HandshakeEvent.CHALLENGED): HandshakePhase.SECURING,
    (HandshakePhase.SECURING, HandshakeEvent.DIALLER_SECURED): HandshakePhase.WELCOME,
    (HandshakePhase.SECURING, HandshakeEvent.ACCEPTOR_SECURED): HandshakePhase.HELLO,
    (HandshakePhase.HELLO, HandshakeEvent.GREETED): HandshakePhase.OPEN,
    (HandshakePhase.HELLO, HandshakeEvent.TURNED_AWAY): HandshakePhase.REFUSED,
    (HandshakePhase.WELCOME, HandshakeEvent.WELCOMED): HandshakePhase.OPEN,
}


class Handshake:
    """One handshake, as the dialler if it has an identity, else as the acceptor.

    The owner sends what the methods return, and begins TLS in the phase `SECURING` if `level` says
    so. Whatever is wrong raises a `ProtocolError`.
    """

    def __init__(self, party: Party, identity: Identity | None, peer: Identity) -> None:
        self._party, self._identity, self._dialled = party, identity, peer
        self._certificate = party.certificate  # the party may get another one meanwhile
        self.phase = HandshakePhase.SECURING if identity is None else HandshakePhase.CHALLENGE
        self.role, self.id = "", -1
        """Who the peer is."""
        self.keys = ""
        """The id of the keys that were used."""
        self._nonce = os.urandom(NONCE_BYTES)
        self._challenge: wire.Challenge | None = None
        self._binding = b""
        self._channel: ssl.SSLObject | ssl.SSLSocket | None = None
        self._hello: wire.Hello | None = None
        self._key = b""
        if identity is None:
            level = party.level or Level.AUTH
            self._challenge = wire.Challenge(self._nonce, wire.VERSION, level.value)

    def _move(self, event: HandshakeEvent) -> None:
        following = EDGES.get((self.phase, event))
        if following is None:
            raise ProtocolError(f"{event.value} while the handshake {self.phase.value}")
        self.phase = following

    def _expect(self, phase: HandshakePhase, message: wire.Message) -> None:
        if self.phase is not phase:
            raise ProtocolError(f"{type(message).__name__} while the handshake {self.phase.value}")

    @property
    def identity(self) -> Identity:
        """Who this end is."""
        return self._identity or self._party.own

    @property
    def level(self) -> Level:
        assert self._challenge is not None
        return Level(self._challenge.level)

    @property
    def context(self) -> ssl.SSLContext:
        """For TLS, in the phase `SECURING`."""
        server = self._identity is None
        if server and self._certificate is None:
            raise ProtocolError("a process that is dialled needs a certificate")
        return tls.context(self._certificate, server)

    @property
    def challenge(self) -> wire.Challenge:
        """What the acceptor sends first."""
        assert self._challenge is not None
        return self._challenge

    def handle(self, message: wire.Message) -> wire.Message | None:
        """Take a message. Return the answer, if there is one."""
        match message:
            case wire.Challenge():
                self._on_challenge(message)
            case wire.Hello():
                return self._on_hello(message)
            case wire.Welcome():
                self._on_welcome(message)
            case wire.Refusal():
                self._on_refusal(message)
            case _:
                raise ProtocolError(f"{type(message).__name__} before the handshake")
        return None

    # --- the dialler ------------------------------------------------------------------------------

    def _on_challenge(self, message: wire.Challenge) -> None:
        self._move(HandshakeEvent.CHALLENGED)
        if message.version != wire.VERSION:
            raise ProtocolError(
                f"the peer speaks version {message.version} of the wire protocol, this process "
                f"version {wire.VERSION}: all processes of a flow need the same release"
            )
        if message.level not in (level.value for level in Level):
            raise ProtocolError(f"the peer asks for security {message.level!r}")
        wanted = self._party.level
        if wanted is not None and wanted.value != message.level:
            raise ProtocolError(
                f"the peer has security {message.level!r}, this process {wanted.value!r}"
            )
        self._challenge = message

    def secured(self, channel: ssl.SSLObject | ssl.SSLSocket | None) -> wire.Hello | None:
        """TLS is up, or not needed. Returns the dialler's Hello."""
        dials = self._identity is not None
        self._move(HandshakeEvent.DIALLER_SECURED if dials else HandshakeEvent.ACCEPTOR_SECURED)
        self._channel = channel
        if channel is not None:
            self._bind(channel, dials)
        return self._greet() if dials else None

    def _bind(self, channel: ssl.SSLObject | ssl.SSLSocket, dials: bool) -> None:
        if dials:
            shown = channel.getpeercert(True)
            assert shown is not None  # every server shows one
            self._binding = tls.digest_of(shown)
            self._check_holder(*self._dialled)
        else:
            assert self._certificate is not None
            self._binding = self._certificate.digest

    def _greet(self) -> wire.Hello:
        assert self._identity is not None
        keys = self._party.ring.current
        key = keys.key(*self._identity, self._dialled[0])
        if key is None:
            raise ProtocolError(f"a {self._identity[0]} has no key to dial a {self._dialled[0]}")
        plan = "".join(self._party.plan.values())
        hello = wire.Hello(*self._identity, *self._dialled, keys.id, plan, self._nonce, proof=b"")
        self._key, self._hello, self.keys = key, hello, keys.id
        return replace_proof(hello, self._proof("client"))

    def _on_welcome(self, message: wire.Welcome) -> None:
        self._expect(HandshakePhase.WELCOME, message)
        if not hmac.compare_digest(self._proof("server"), message.proof):
            raise ProtocolError("the server does not know the flow's secret")
        self._move(HandshakeEvent.WELCOMED)
        self.role, self.id = self._dialled

    def _on_refusal(self, message: wire.Refusal) -> None:
        self._expect(HandshakePhase.WELCOME, message)
        if hmac.compare_digest(self._proof("refusal", message.reason.encode()), message.proof):
            raise ProtocolError(f"the peer refused the connection: {message.reason}")
        raise ProtocolError("a server that does not know the flow's secret refused the connection")

    # --- the acceptor -----------------------------------------------------------------------------

    def _on_hello(self, message: wire.Hello) -> wire.Message:
        self._expect(HandshakePhase.HELLO, message)
        self._hello, self.keys = replace_proof(message, b""), message.keys
        keys = self._party.ring.find(message.keys)
        if keys is None:
            raise ProtocolError(
                f"a {message.role!r} has keys {message.keys!r} of another flow, or of a secret "
                f"that was rotated; valid: {', '.join(self._party.ring.ids)}"
            )
        key = keys.key(message.role, message.id, self._party.own[0])
        if key is None:
            raise ProtocolError(f"a {message.role!r} may not dial a {self._party.own[0]}")
        self._key = key
        if not hmac.compare_digest(self._proof("client"), message.proof):
            raise ProtocolError("the peer does not know the flow's secret")
        reason = self._why_not(message)
        if reason:
            self._move(HandshakeEvent.TURNED_AWAY)
            return wire.Refusal(reason, self._proof("refusal", reason.encode()))
        self._check_holder(message.role, message.id)
        self._move(HandshakeEvent.GREETED)
        self.role, self.id = message.role, message.id
        return wire.Welcome(self._proof("server"))

    def _why_not(self, hello: wire.Hello) -> str:
        """Why a peer that is who it says is not let in; empty if it is."""
        role, id_ = self._party.own
        if hello.peer_role != role or hello.peer_id not in (-1, id_):
            return (
                f"{hello.role} {hello.id} dialled {hello.peer_role} {hello.peer_id}, "
                f"and reached {role} {id_}"
            )
        here = self._party.plan
        if hello.plan and here and hello.plan != "".join(here.values()):
            return _other_plan(here, hello.plan)
        return ""

    def _check_holder(self, role: str, id_: int) -> None:
        """The certificate of a site or control is of the flow's authority, and names it."""
        certificate = self._certificate
        if self._channel is None or certificate is None or not tls.needs_certificate(role):
            return
        shown: dict[str, Any] = self._channel.getpeercert() or {}
        if not shown:
            raise ProtocolError(f"a {role} without a certificate")
        if certificate.of_flow and not tls.may_be(tls.holder_of(shown), role, id_):
            raise ProtocolError(f"the certificate of {tls.holder_of(shown)} as {role} {id_}")

    # --- what both compute ------------------------------------------------------------------------

    def _proof(self, purpose: str, *more: bytes) -> bytes:
        """What only a holder of the key can compute from what was said."""
        mac = hmac.new(self._key, digestmod=hashlib.sha256)
        said = [msgspec.msgpack.encode(m) for m in (self._challenge, self._hello)]
        for part in (purpose.encode(), *said, self._binding, *more):
            mac.update(len(part).to_bytes(4, "little") + part)
        return mac.digest()

    def sealers(self) -> tuple[Sealer, Sealer] | None:
        """For what is sent and what is received; None at other levels than `mac`."""
        if self.level is not Level.MAC:
            return None
        client, server = Sealer(self._proof("client seals")), Sealer(self._proof("server seals"))
        return (server, client) if self._identity is None else (client, server)


def replace_proof(hello: wire.Hello, proof: bytes) -> wire.Hello:
    return msgspec.structs.replace(hello, proof=proof)


def _other_plan(here: Mapping[str, str], there: str) -> str:
    """Which stages differ. The peer sent only digests, all of one length."""
    size = len(next(iter(here.values())))
    others = [there[at : at + size] for at in range(0, len(there), size)]
    named = [
        name for (name, digest), other in zip(here.items(), others, strict=False) if digest != other
    ]
    if len(others) != len(here):
        named.append(f"{len(here)} stages here, {len(others)} there")
    return (
        f"it runs another flow file: stages that differ: {', '.join(named)}; all applications of "
        "a flow need the same file"
    )
