"""The connections of a control to sites, and to their heartbeat threads."""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.control import events as ev
from holdfast.core.ids import SiteId
from holdfast.net import wire
from holdfast.net.connection import Connection


class SiteConnections:
    """The latest connection of each site, and of its heartbeat thread."""

    def __init__(self) -> None:
        self._sites: dict[SiteId, Connection] = {}
        self._pulses: dict[SiteId, Connection] = {}

    def __contains__(self, site: SiteId) -> bool:
        return site in self._sites

    def __iter__(self) -> Iterator[SiteId]:
        return iter(list(self._sites))

    def add(self, connection: Connection) -> None:
        self._sites[SiteId(connection.id)] = connection

    def add_pulse(self, connection: Connection) -> None:
        self._pulses[SiteId(connection.id)] = connection

    def on_close(self, connection: Connection) -> ev.SiteLost | ev.PulseLost | None:
        """A connection has closed. It does not matter if a later one has replaced it."""
        site = SiteId(connection.id)
        if connection.role == wire.PULSE and self._pulses.get(site) is connection:
            del self._pulses[site]
            return ev.PulseLost(site)
        if connection.role == wire.SITE and self._sites.get(site) is connection:
            del self._sites[site]
            return ev.SiteLost(site)
        return None

    def send(self, site: SiteId, message: wire.Message) -> None:
        """Send a message to a site, if it is connected."""
        connection = self._sites.get(site)
        if connection is not None:
            connection.send(message)

    def send_all(self, message: wire.Message) -> None:
        for connection in list(self._sites.values()):
            connection.send(message)

    def expel(self, effect: ev.ExpelSite) -> None:
        # A site in a call that does not end reads only the connection of its heartbeat thread.
        site = effect.site
        for connection in (self._sites.pop(site, None), self._pulses.pop(site, None)):
            if connection is not None:
                connection.send(effect.message)
                connection.close()

    def close(self) -> None:
        """Close the connections of the sites, not those of their heartbeat threads."""
        for connection in self._sites.values():
            connection.close()
