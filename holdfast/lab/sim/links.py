"""What travels between the sites and controls of a simulated world, and on which links."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from holdfast.core.ids import SiteId
from holdfast.net import wire

if TYPE_CHECKING:
    from holdfast.lab.sim.world import World

Link = tuple[SiteId, SiteId]
"""Sender and receiver."""
NOTHING = memoryview(b"")


def control_of(app: int) -> SiteId:
    """Return the number that an application's control has on links: a negative one."""
    return SiteId(-1 - app)


def app_of(control: SiteId) -> int:
    """The inverse of `control_of`."""
    return -1 - control


CONTROLLER = control_of(0)


class Up:
    """The connection is established."""


class Down:
    """The connection is lost."""


class SitePort:
    """The transport of a site's node."""

    def __init__(self, world: World, site: SiteId) -> None:
        self._world, self._site = world, site

    def send(self, site: SiteId, message: wire.Message, body: list[Any] | None = None) -> None:
        link = (self._site, site)
        if link in self._world.network and link not in self._world.broken:
            self._world.put(link, self._world.packed(message, body))

    def tell(self, message: wire.Message) -> None:
        for app in self._world.controls:
            if (self._site, control_of(app)) in self._world.network:
                self._world.put((self._site, control_of(app)), (message, NOTHING))
