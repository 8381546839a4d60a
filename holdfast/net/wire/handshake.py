"""The messages that open a connection. `holdfast.net.handshake` has the rules.

    server -> client   Challenge(version, level, nonce)
    client -> server   Hello(role, id, whom it dials, plan, ..., proof)
    server -> client   Welcome(proof), or Refusal(reason, proof)

`Challenge` is sent in the clear; at the level `tls` what follows it is encrypted. Until `Welcome`
no message may be longer than a kilobyte, and only these four are decoded. The role in `Hello`
decides which messages the client may send afterwards (`holdfast.net.protocol`).

A later version may add fields at the end of `Challenge`: decoding ignores them.
"""

from __future__ import annotations

from holdfast.net.wire.base import Message, Number, NumberOrNone

VERSION = 1
"""The version of the wire protocol, one higher with every change of a message."""


class Challenge(Message, frozen=True):
    nonce: bytes
    version: Number = 0
    level: str = ""


class Hello(Message, frozen=True):
    role: str
    id: Number
    peer_role: str
    peer_id: NumberOrNone
    keys: str
    """The id of the keys that the proof was made with."""
    plan: str
    """The fingerprint of the flow's plan; empty for a client that has none."""
    nonce: bytes
    proof: bytes


class Welcome(Message, frozen=True):
    proof: bytes


class Refusal(Message, frozen=True):
    """The server knows who the client is, and why it does not let it in."""

    reason: str
    proof: bytes
