"""How the connections of a flow are protected."""

from __future__ import annotations

import os
from dataclasses import dataclass
from enum import Enum

from holdfast.errors import FlowError


class Level(Enum):
    """What is done for every connection between sites, controls, pushers and readers.

    At every level both ends prove that they have the key of their role before anything else is
    decoded.
    """

    AUTH = "auth"
    """Nothing more: on a network that others can write to, messages can be injected."""
    MAC = "mac"
    """Every message is numbered and authenticated under a key of the connection. Others can read
    it; they cannot change, repeat, drop or add one unnoticed."""
    TLS = "tls"
    """Connections are encrypted, and sites and controls have certificates."""


@dataclass(frozen=True, slots=True)
class Tls:
    """Certificates that the user made: files in PEM format, at these paths on every machine.

    `ca` is the authority that signed the certificates of all sites and controls. Without them a
    flow makes an authority of its own from its secret.
    """

    ca: str | os.PathLike[str]
    cert: str | os.PathLike[str]
    key: str | os.PathLike[str]


Security = str | Tls
"""``"tls"``, ``"mac"``, ``"auth"``, or `Tls` with certificates."""


def level_of(security: Security | None) -> Level | None:
    """
    >>> level_of("mac"), level_of(None)
    (<Level.MAC: 'mac'>, None)
    """
    if security is None:
        return None
    if isinstance(security, Tls):
        return Level.TLS
    try:
        return Level(security)
    except ValueError:
        raise FlowError(
            f"security={security!r} is no level",
            hint="write 'tls', 'mac' or 'auth', or Tls(ca=, cert=, key=)",
        ) from None
