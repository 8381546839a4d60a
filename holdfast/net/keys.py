"""The keys of a flow: one for each right, all derived from its secret.

| who | holds the key to |
| --- | --- |
| control | everything: it knows the secret |
| site i | other sites; its own connections to controls; it checks pushers and readers |
| pusher | push rows |
| reader | read sinks |

A site's key towards controls is its own, so a site can pretend to be neither a control nor, to a
control, another site. A key does not tell the secret, nor any other key.

Secrets may be chosen by people. Whatever is derived from one goes through a slow function first, so
that neither a recorded handshake nor the flow's incarnation, which is in the names of its entries
in ZooKeeper, PostgreSQL and Kafka, allows guesses at it in bulk.
"""

from __future__ import annotations

import hashlib
import hmac
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from holdfast.errors import FlowError
from holdfast.net.wire import AGENT, PULSE, PUSHER, READER, SERVER, SITE

CONTROL = "control"
"""The key that controls derive the keys of sites from."""
AUTHORITY = "authority"
"""The key that the flow's certificates are signed with, derived from this."""
SECRET_LENGTH_MIN = 16

_NAMED = re.compile(rb"([0-9a-f]{12}):(.+)", re.DOTALL)


@dataclass(frozen=True)
class Keys:
    """The keys that a process holds, by name."""

    id: str
    """Which secret they are derived from; it says nothing about the secret."""
    incarnation: str
    """The name of this start of the flow. It stays when the secret is rotated."""
    held: Mapping[str, bytes]

    @classmethod
    def of(cls, secret: bytes, flow: str = "") -> Keys:
        """All keys of a flow, by its name. A secret in which an incarnation comes first, as
        `rotated` makes it, belongs to a flow that was started with another one."""
        master = _stretched(secret, flow)
        named = _NAMED.fullmatch(secret)
        incarnation = named[1].decode() if named else _derive(master, "incarnation").hex()[:12]
        names = (CONTROL, AUTHORITY, AGENT, SITE, PUSHER, READER)
        return cls(
            _derive(master, "id").hex()[:12], incarnation, {n: _derive(master, n) for n in names}
        )

    def for_site(self, site: int) -> Keys:
        own = {_of_site(site): _derive(self.held[CONTROL], str(site))}
        return self._only(SITE, PUSHER, READER, **own)

    def for_client(self, role: str) -> Keys:
        """For a pusher or a reader."""
        return self._only(role)

    def _only(self, *names: str, **more: bytes) -> Keys:
        return Keys(self.id, self.incarnation, {**{n: self.held[n] for n in names}, **more})

    def key(self, role: str, id_: int, dialled: str) -> bytes | None:
        """The key of a connection, by who dials and the role of who is dialled; None if this
        process does not hold it."""
        if role in (SITE, PULSE) and dialled == SERVER:
            if CONTROL in self.held:
                return _derive(self.held[CONTROL], str(id_))
            return self.held.get(_of_site(id_))
        if role == SERVER or (role in (PULSE, AGENT) and dialled != SERVER):
            return None
        if role == PUSHER and dialled != SITE:
            return None
        return self.held.get(role)


class Keyring:
    """The keys of a process: those it dials with, and others it still accepts.

    While the secret is rotated a process holds two sets.

    >>> old, new = Keys("1", "run", {}), Keys("2", "run", {})
    >>> ring = Keyring(old)
    >>> ring.hold([new, old]); ring.current.id, ring.find("1") is old
    ('2', True)
    >>> ring.hold([new]); ring.find("1")
    """

    def __init__(self, *keys: Keys) -> None:
        self.hold(keys)

    def hold(self, keys: Sequence[Keys]) -> None:
        """Accept these keys and no others, and dial with the first."""
        self.current = keys[0]
        self._held = {k.id: k for k in keys}

    def find(self, id_: str) -> Keys | None:
        return self._held.get(id_)

    @property
    def ids(self) -> list[str]:
        return list(self._held)


def rotated(keys: Keys, secret: str | None = None) -> bytes:
    """A new secret for the same start of a flow: the given one, or a random one."""
    text = secret if secret is not None else secrets.token_hex(32)
    check_length(text)
    named = _NAMED.fullmatch(text.encode())
    if named is not None and named[1].decode() != keys.incarnation:
        raise FlowError(
            f"this secret is of start {named[1].decode()} of a flow, not of {keys.incarnation}"
        )
    return text.encode() if named else f"{keys.incarnation}:{text}".encode()


def check_length(secret: str) -> None:
    """Refuse a secret that is too short, whether or not it names the start of a flow."""
    named = _NAMED.fullmatch(secret.encode())
    if len(named[2] if named else secret) < SECRET_LENGTH_MIN:
        raise FlowError(
            f"a secret must have at least {SECRET_LENGTH_MIN} characters",
            hint="make one with: openssl rand -hex 32",
        )


def _of_site(site: int) -> str:
    return f"{CONTROL}:{site}"


@lru_cache(maxsize=8)
def _stretched(secret: bytes, flow: str) -> bytes:
    """A key from a secret. It takes 16 MB and some tens of milliseconds, once a process, so event
    loops call `Keys.of` only for secrets that a thread has asked for before. The salt is the flow's
    name, which all who know the secret know: a guess is good for the flows of one name only."""
    salt = b"holdfast:" + flow.encode()
    return hashlib.scrypt(secret, salt=salt, n=1 << 14, r=8, p=1, dklen=32)


def _derive(key: bytes, name: str) -> bytes:
    return hmac.digest(key, name.encode(), "sha256")
