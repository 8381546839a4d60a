"""Who is let into a flow, and what each process gets to prove who it is."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from holdfast.api.security import Level, Security, Tls, level_of
from holdfast.net import wire
from holdfast.net.addresses import is_loopback
from holdfast.net.handshake import Party
from holdfast.net.keys import AUTHORITY, Keyring, Keys, rotated
from holdfast.net.tls import Certificate, CertificateAuthority


class Credentials:
    """The secrets, keys and certificates of one application's control, and of what it launches."""

    def __init__(
        self,
        secret: bytes,
        security: Security | None,
        hosts: Iterable[str],
        app: int,
        plan: Mapping[str, str],
        flow: str = "",
    ) -> None:
        """`hosts` are the addresses that the flow's processes listen at, `plan` the marks of its
        stages."""
        self._flow = flow
        keys = Keys.of(secret, flow)
        self._secrets = {keys.id: secret}
        self._sets = {keys.id: keys}
        self._held: tuple[str, ...] = (keys.id,)
        self.rotated = False
        """Whether sites were launched with other keys than those that are held now."""
        self.local = all(map(is_loopback, hosts))
        self.level = level_of(security) or (Level.AUTH if self.local else Level.TLS)
        self._files = security if isinstance(security, Tls) else None
        own = Certificate.read(self._files) if self._files else self.certificate("control", app)
        self.party = Party((wire.SERVER, app), Keyring(keys), self.level, own, plan)
        """The control's own."""
        self.pusher = Party.client(keys, wire.PUSHER, self.level, self.trust)
        """What pushers get. They are given the same object for as long as the flow runs."""

    @property
    def keys(self) -> Keys:
        """Those that the control dials with, and readers get."""
        return self._sets[self._held[0]]

    @property
    def secret(self) -> bytes:
        return self._secrets[self._held[0]]

    @property
    def secrets(self) -> tuple[bytes, ...]:
        """Those whose keys are accepted; the current one first."""
        return tuple(self._secrets[id_] for id_ in self._held)

    @property
    def trust(self) -> Certificate | None:
        """What clients check certificates by."""
        return self.party.certificate.without_key() if self.party.certificate else None

    # --- what others get --------------------------------------------------------------------------

    def for_site(self, site: int) -> Party:
        """What a site is launched with. It reads certificates of the user's own by itself."""
        ring, certificate = Keyring(*self.site_keys(site)), self.certificate("site", site)
        return Party((wire.SITE, site), ring, self.level, certificate, self.party.plan)

    def site_keys(self, site: int) -> list[Keys]:
        return [self._sets[id_].for_site(site) for id_ in self._held]

    def certificate(self, name: str, number: int) -> Certificate | None:
        """A certificate of the flow's authority; None if there is none, or it is not used. Those
        of other accepted secrets are trusted as well."""
        if self.level is not Level.TLS or self._files is not None:
            return None
        authorities = [CertificateAuthority(self._sets[id_].held[AUTHORITY]) for id_ in self._held]
        return authorities[0].certify(name, number, trusted=authorities)

    # --- rotation ---------------------------------------------------------------------------------

    def wanted(self, secret: str | None) -> bytes:
        """The secret in the form that names the start of the flow; None: a random one."""
        return rotated(self.keys, secret)

    def add(self, secret: bytes) -> str:
        """Make a secret known that `wanted` has returned. Return the id of its keys."""
        return self._know(secret)

    def stretch(self, secrets: Iterable[bytes]) -> None:
        """Derive the keys of secrets, which takes long. For a thread; later it is quick."""
        for secret in secrets:
            Keys.of(secret, self._flow)

    def _know(self, secret: bytes) -> str:
        keys = Keys.of(secret, self._flow)
        self._secrets[keys.id], self._sets[keys.id] = secret, keys
        return keys.id

    def hold(self, ids: Sequence[str]) -> None:
        """Accept keys of these secrets and no others, and dial with the first."""
        self._held, self.rotated = tuple(ids), True
        self._secrets = {id_: self._secrets[id_] for id_ in ids}
        self._sets = {id_: self._sets[id_] for id_ in ids}
        self.party.hold(list(self._sets.values()), self.certificate("control", self.party.own[1]))
        self.pusher.hold([self.keys.for_client(wire.PUSHER)], self.trust)

    def hold_secrets(self, secrets: Sequence[bytes]) -> tuple[str, ...]:
        """The same for secrets that another application sent. Return the ids of their keys."""
        ids = tuple(map(self._know, secrets))
        self.hold(ids)
        return ids

    def close_retired(self) -> None:
        self.party.close_retired()
