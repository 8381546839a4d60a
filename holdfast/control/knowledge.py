"""What a leader commits, and how the next leader continues a flow from it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import msgspec

from holdfast import errors
from holdfast.core.controller import Controller
from holdfast.core.effects import ControllerEffect
from holdfast.core.ids import SiteId
from holdfast.core.layout import Domain, Shape, View
from holdfast.net import wire

VERSION = 2
"""The version of what is committed. Version 0 had none, and no `next_id`; version 1 had no moves
and no number of sites. Both are read."""


class Knowledge(msgspec.Struct, frozen=True):
    """The value of the arbiter's entry: what another controller needs to continue the flow. Its
    size does not depend on how long the flow has run."""

    view: View | None
    addresses: dict[int, tuple[str, int]]
    domains: dict[int, Domain]
    app_of: dict[int, int]
    dead: dict[int, str]
    """By site: why it died. Only the last ones, for people."""
    launched: list[int]
    running: bool
    draining: bool
    ended: bool = False
    error: str | None = None
    next_id: int = 0
    """No site has this number or a higher one, also none whose launch is not committed."""
    version: int = 0
    sites: int = 0
    """The number of sites that the flow is to run on; 0: as many as are members."""

    @property
    def failure(self) -> Exception | None:
        """The error of a flow that has failed."""
        return errors.HoldfastError(self.error) if self.error else None

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def member_addresses(self) -> dict[SiteId, tuple[str, int]]:
        """The addresses of the members of the view."""
        members = self.view.members if self.view is not None else ()
        return {SiteId(s): a for s, a in self.addresses.items() if s in members}


class _EntryVersion(msgspec.Struct, frozen=True):
    version: int = 0


def decode(value: bytes) -> Knowledge:
    """What was committed. Raise `HostError` if a later version of Holdfast has written it."""
    found = msgspec.msgpack.decode(value, type=_EntryVersion).version
    if found > VERSION:
        raise errors.HostError(
            f"the arbiter's entry of the flow has version {found}, and this Holdfast reads version "
            f"{VERSION} at most: a later Holdfast leads the flow",
            hint="install the same version of Holdfast in all applications of the flow",
        )
    return msgspec.msgpack.decode(value, type=Knowledge)


@dataclass(frozen=True, slots=True)
class Continued:
    """A flow that a new leader continues."""

    controller: Controller
    effects: list[ControllerEffect]
    """The first decisions of the controller."""
    orphans: list[SiteId]
    """Sites that the last leader launched and that have not registered."""
    unknown: list[SiteId]
    """Sites that have registered, but whose launch the last leader did not commit."""


def continue_flow(
    known: Knowledge,
    term: int,
    registered: Mapping[SiteId, wire.Register],
    shape: Shape,
    machine: Callable[..., Controller],
) -> Continued:
    """Continue from what the last leader committed, and from the sites that have registered."""
    assert known.view is not None
    domains = {SiteId(s): d for s, d in known.domains.items()}
    addresses = {SiteId(s): a for s, a in known.addresses.items()}
    unknown = []
    for site, message in registered.items():
        if site in addresses or site in known.launched:
            domains[site] = message.domain
            addresses[site] = (message.host, message.port)
        else:
            unknown.append(site)
    dead = {SiteId(s): reason for s, reason in known.dead.items()}
    orphans = [SiteId(s) for s in known.launched if s not in addresses]
    controller = machine(shape, _sites(known, addresses))
    effects = controller.resume(
        known.view,
        term,
        addresses,
        domains,
        dead,
        known.running,
        known.draining,
        orphans,
        SiteId(known.next_id),
    )
    return Continued(controller, effects, orphans, unknown)


def _sites(known: Knowledge, addresses: Iterable[SiteId]) -> list[SiteId]:
    """The sites that the flow runs on, or begins on. Before it has begun, other sites replace the
    dead ones, if possible of the same application."""
    assert known.view is not None
    members, app_of = list(known.view.members), known.app_of
    others = dict.fromkeys([*addresses, *(SiteId(s) for s in known.launched)])
    fresh = [s for s in others if s not in known.view.members]
    for at, site in enumerate(members):
        if site not in others and fresh and not known.running:
            same_app = [s for s in fresh if app_of.get(s) == app_of.get(site)] or fresh
            members[at] = same_app[0]
            fresh.remove(same_app[0])
    return [*members, *fresh[: max(0, known.sites - len(members))]]
