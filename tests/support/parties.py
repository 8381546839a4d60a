"""Both ends of connections, as a flow with a known secret would make them."""

from __future__ import annotations

from holdfast.api.security import Level
from holdfast.net import wire
from holdfast.net.handshake import Identity, Party
from holdfast.net.keys import AUTHORITY, Keyring, Keys
from holdfast.net.tls import CertificateAuthority

SECRET = b"a secret of thirty-two bytes....."


def party(
    own: Identity = (wire.SITE, 0), secret: bytes = SECRET, level: Level = Level.AUTH
) -> Party:
    """A site, a control, a pusher or a reader, with the keys that it would be given."""
    keys, (role, number) = Keys.of(secret), own
    if role in (wire.PUSHER, wire.READER):
        return Party.client(keys, role)
    named = "site" if role in (wire.SITE, wire.PULSE) else "control"
    certificate = None
    if level is Level.TLS:
        certificate = CertificateAuthority(keys.held[AUTHORITY]).certify(named, number)
    held = keys.for_site(number) if named == "site" else keys
    return Party(own, Keyring(held), level, certificate)
