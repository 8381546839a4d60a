"""Who is let into a flow, and what each process gets to prove who it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.api.security import Level, Security, Tls, level_of
from holdfast.net import wire
from holdfast.net.addresses import is_loopback
from holdfast.net.handshake import Party
from holdfast.net.keys import AUTHORITY, Keyring, Keys
from holdfast.net.tls import Authority, Certificate


class Access:
    """The keys and certificates of one application's control, and of what it launches."""

    def __init__(
        self,
        secret: bytes,
        security: Security | None,
        hosts: Iterable[str],
        app: int,
        plan: Mapping[str, str],
    ) -> None:
        """`hosts` are the addresses that the flow's processes listen at, `plan` the marks of its
        stages."""
        ring = Keyring(Keys.of(secret))
        local = all(map(is_loopback, hosts))
        self.level = level_of(security) or (Level.AUTH if local else Level.TLS)
        self._files = security if isinstance(security, Tls) else None
        own = Certificate.read(self._files) if self._files else self._certify("control", app, ring)
        self.party = Party((wire.SERVER, app), ring, self.level, own, plan)
        """The control's own."""
        self.pusher = Party.client(ring.current, wire.PUSHER)
        """What pushers get. They are given the same object for as long as the flow runs."""

    @property
    def keys(self) -> Keys:
        return self.party.ring.current

    def for_site(self, site: int) -> Party:
        """What a site is launched with. It reads certificates of the user's own by itself."""
        ring = Keyring(self.keys.for_site(site))
        certificate = None if self._files else self._certify("site", site, self.party.ring)
        return Party((wire.SITE, site), ring, self.level, certificate, self.party.plan)

    def _certify(self, name: str, number: int, ring: Keyring) -> Certificate | None:
        if self.level is not Level.TLS:
            return None
        return Authority(ring.current.held[AUTHORITY]).certify(name, number)
