"""Carries out the rotation of a flow's secret: sends keys to sites and secrets to applications.

`holdfast.control.rotation` decides which keys are held when.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

from holdfast import errors
from holdfast.api.security import Level
from holdfast.control.credentials import Credentials
from holdfast.control.rotation import (
    Asked,
    Confirmed,
    Joined,
    Left,
    Member,
    Rotation,
    RotationEvent,
    RotationPhase,
    TermEnded,
)
from holdfast.control.site_connections import SiteConnections
from holdfast.core.ids import SiteId
from holdfast.net import wire
from holdfast.net.connection import Connection

log = logging.getLogger("holdfast.control")


Stretch = Callable[[Sequence[bytes], Callable[[], None]], None]
"""Derives the keys of secrets outside the event loop, then calls back in it, in order."""


class KeyRotator:
    """`agents` are the connections to the applications that follow, `members` who must hold new
    keys before they are used."""

    def __init__(
        self,
        credentials: Credentials,
        sites: SiteConnections,
        agents: Mapping[int, Connection],
        term: Callable[[], int],
        leads: Callable[[], bool],
        members: Callable[[], tuple[Member, ...]],
        stretch: Stretch,
    ) -> None:
        self._credentials, self._sites, self._agents = credentials, sites, agents
        self._term, self._leads, self._members = term, leads, members
        self._stretch = stretch
        self._rotation = Rotation()
        self._done: Future[str] = Future()
        self._known: tuple[Member, ...] = ()

    @property
    def waits_for(self) -> list[Member]:
        return self._rotation.waits_for

    def ask(self, secret: str | None, wanted: bytes | None = None) -> Future[str]:
        """Begin. The future gets the new secret when no process accepts the old one. `wanted` is
        the secret as `Credentials.wanted` returns it, if a thread has stretched it already."""
        if self._rotation.phase is not RotationPhase.STEADY:
            if secret is None or self._credentials.wanted(secret) in self._credentials.secrets:
                return self._done  # it goes on
            raise errors.HostError(
                "the secret is being replaced by another one already",
                hint="wait until that is done; both are good meanwhile",
            )
        if not (self._credentials.local or self._credentials.level is Level.TLS):
            raise errors.HostError(
                f"with security={self._credentials.level.value!r} others could read the new keys "
                "on their way to the sites",
                hint="run the flow with security='tls'; or stop it and start it with a new secret",
            )
        old, new = (
            self._credentials.keys.id,
            self._credentials.add(wanted or self._credentials.wanted(secret)),
        )
        self._done = Future()
        self._known = self._members()
        self._handle(Asked(old, new, self._known))
        return self._done

    def on_joined(self, member: Member) -> None:
        """A site or application has connected. It may have been away when others got new keys."""
        if self._credentials.rotated and self._leads():
            self._send(member)
        self._handle(Joined(member))

    def follow_members(self) -> None:
        """Wait for whom the flow has got meanwhile, and no longer for whom it has lost."""
        if self._rotation.phase is RotationPhase.STEADY:
            return
        if not self._leads():
            self._rotation.handle(TermEnded())
            self._done.set_exception(
                errors.HostError(
                    "this application no longer leads; the secret may be replaced in part",
                    hint="ask the application that leads",
                )
            )
            return
        before, self._known = self._known, self._members()
        for member in self._known:
            if member not in before:
                self._handle(Joined(member))
        for member in before:
            if member not in self._known:
                self._handle(Left(member))

    def on_keys_held(self, connection: Connection, message: wire.KeysHeld) -> None:
        self._handle(Confirmed((connection.role, connection.id), message.ids))

    def on_new_secrets(self, connection: Connection, message: wire.NewSecrets) -> None:
        """This application follows, and the leader rotates."""
        if self._leads() or message.term < self._term():
            raise errors.ProtocolError("it does not lead")
        self._stretch(message.secrets, partial(self._hold_secrets, connection, message))

    def _hold_secrets(self, connection: Connection, message: wire.NewSecrets) -> None:
        if self._leads() or message.term < self._term():
            return  # the leader was replaced while the keys were derived
        connection.send(wire.KeysHeld(self._credentials.hold_secrets(message.secrets)))
        self._credentials.close_retired()

    def _handle(self, event: RotationEvent) -> None:
        for phase in self._rotation.handle(event):
            self._enter(phase)

    def _enter(self, phase: RotationPhase) -> None:
        log.info("rotation of the secret: %s", phase.value)
        if phase is RotationPhase.STEADY:
            self._done.set_result(self._credentials.secret.decode())
            return
        self._credentials.hold(self._rotation.held(phase))
        for member in self._members():
            self._send(member)
        self._credentials.close_retired()  # only now, so that what was sent leaves first

    def _send(self, member: Member) -> None:
        """Have a member hold what this control holds."""
        role, number = member
        if role == wire.SITE:
            keys = tuple(
                wire.KeySet(k.id, k.incarnation, dict(k.held))
                for k in self._credentials.site_keys(number)
            )
            made = self._credentials.certificate("site", number)
            shown = (made.ca, made.cert, made.key) if made is not None else None
            self._sites.send(SiteId(number), wire.NewKeys(self._term(), keys, shown))
        elif number in self._agents:
            self._agents[number].send(wire.NewSecrets(self._term(), self._credentials.secrets))
