"""The handshake: both ends of a connection prove that they know the flow's secret.

    server -> client   Challenge(nonce)
    client -> server   Hello(role, id, nonce, proof)    proof = HMAC(secret, both nonces, role, id)
    server -> client   Welcome(proof)                   the same, with the parts swapped

Until `Welcome` no message may be longer than a kilobyte, and only these three are decoded. The role
in `Hello` decides which messages the client may send afterwards (`holdfast.net.protocol`).
"""

from __future__ import annotations

import hashlib
import hmac

from holdfast.errors import ProtocolError
from holdfast.net.wire.base import Message, Number


class Challenge(Message, frozen=True):
    nonce: bytes


class Hello(Message, frozen=True):
    role: str
    id: Number
    nonce: bytes
    proof: bytes


class Welcome(Message, frozen=True):
    proof: bytes


def proof(secret: bytes, *parts: bytes | str | int) -> bytes:
    """Return what only a holder of the secret can compute from these parts."""
    mac = hmac.new(secret, digestmod=hashlib.sha256)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        mac.update(len(data).to_bytes(4, "little") + data)
    return mac.digest()


def hello(secret: bytes, challenge: Challenge, nonce: bytes, role: str, id_: int) -> Hello:
    """Return a client's answer to a challenge."""
    return Hello(role, id_, nonce, proof(secret, "client", challenge.nonce, nonce, role, id_))


def check_welcome(secret: bytes, challenge: Challenge, nonce: bytes, welcome: Welcome) -> None:
    """Check the server's own proof."""
    expected = proof(secret, "server", nonce, challenge.nonce)
    if not hmac.compare_digest(expected, welcome.proof):
        raise ProtocolError("the server does not know the flow's secret")


def incarnation(secret: bytes) -> str:
    """The name of one incarnation of a flow: a flow that is started again has a new secret."""
    return hashlib.sha256(secret).hexdigest()[:12]
