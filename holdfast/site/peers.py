"""The connections of a site to the other members of its view.

There is one connection for each pair of sites. The site with the lower number dials, and dials
again when the connection breaks: a broken connection does not mean that the other site is dead.
Only a view says so. A site that is in no view any more is refused, and told to leave.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from holdfast.core.failure_detector import BEATS_PER_LEASE
from holdfast.core.ids import SiteId
from holdfast.core.layout import View
from holdfast.core.peer_monitor import PeerMonitor
from holdfast.net import wire
from holdfast.net.connection import Connection, Handler, dial
from holdfast.net.handshake import Party

log = logging.getLogger("holdfast.site")

REDIAL_S = 0.05
DEAD_MAX = 100
"""How many dead sites are remembered, to tell them so. The controller knows all."""

Address = tuple[str, int]


class Peers:
    """`connected` and `lost` are called with the site; `on_message` gets what peers send."""

    def __init__(
        self,
        site: SiteId,
        party: Party,
        on_message: Handler,
        on_close: Callable[[Connection, Exception | None], None],
        connected: Callable[[SiteId], None],
        lost: Callable[[SiteId], None],
    ) -> None:
        self._site, self._party = site, party
        self._on_message, self._on_close = on_message, on_close
        self._connected, self._lost = connected, lost
        self._connections: dict[SiteId, Connection] = {}
        self._dials: dict[SiteId, asyncio.Task[None]] = {}
        self._dead: dict[SiteId, None] = {}
        """The last sites that were members and are no more."""
        self._forgotten = SiteId(-1)
        """The highest number of a dead site that is not remembered."""
        self._closed_bytes = 0
        """Bytes sent on connections that are closed."""
        self._undialled: dict[SiteId, str] = {}
        """Why the last attempt to connect to a member failed."""
        self.addresses: dict[SiteId, Address] = {}
        """Where the other members listen."""

    # --- sending --------------------------------------------------------------------------------

    def send(self, site: SiteId, message: wire.Message, body: list[Any] | None = None) -> None:
        """Send a message, or drop it if there is no connection."""
        connection = self._connections.get(site)
        if connection is not None:
            connection.send(message, body)

    def queued_to(self, site: SiteId) -> int:
        """Bytes for one site that the kernel has not accepted yet."""
        connection = self._connections.get(site)
        return connection.queued if connection is not None else 0

    @property
    def queued_bytes(self) -> int:
        return sum(c.queued for c in self._connections.values())

    @property
    def sent_bytes(self) -> int:
        return self._closed_bytes + sum(c.sent_bytes for c in self._connections.values())

    def close(self) -> None:
        for connection in self._connections.values():
            connection.close()

    # --- the view -------------------------------------------------------------------------------

    @property
    def are_complete(self) -> bool:
        """Whether there is a connection to every other member."""
        return self._connections.keys() >= self.addresses.keys()

    def on_view(
        self, view: View, known: View | None, addresses: Mapping[int, Address]
    ) -> list[SiteId]:
        """Follow a view that replaces `known`. Return the sites whose connections were closed,
        because they are members no more."""
        removed = [s for s in known.members if s not in view.members] if known is not None else []
        self._dead |= dict.fromkeys(removed)
        gone = [site for site in self._connections if site in self._dead]
        while len(self._dead) > DEAD_MAX:
            oldest = next(iter(self._dead))
            del self._dead[oldest]
            self._forgotten = max(self._forgotten, oldest)
        for site in gone:
            self._connections.pop(site).abort()
        self.addresses = {SiteId(s): a for s, a in addresses.items() if s != self._site}
        return gone

    # --- connections ----------------------------------------------------------------------------

    def accept(self, connection: Connection, term: int) -> None:
        """Use a new connection from or to another site; it replaces an earlier one."""
        site = SiteId(connection.id)
        if site == self._site:
            log.warning("site %s: another process uses its number", self._site)
            connection.abort()
            return
        if site in self._dead:
            connection.send(wire.Fenced(term))
            connection.close()
            return
        if site <= self._forgotten and site not in self.addresses:
            # It is dead, or a spare that joins with a view that is on its way here. It dials again,
            # and the controller tells it if it is dead.
            connection.close()
            return
        old = self._connections.pop(site, None)
        if old is not None:
            old.abort()
            self._lost(site)
        self._connections[site] = connection
        self._undialled.pop(site, None)
        self._connected(site)

    def forget(self, connection: Connection) -> None:
        """A connection has closed."""
        site = SiteId(connection.id)
        if connection.role == wire.SITE and self._connections.get(site) is connection:
            del self._connections[site]
            self._closed_bytes += connection.sent_bytes
            log.info("site %s: connection to site %s is lost", self._site, site)
            self._lost(site)

    async def keep_dialling(self, on_open: Callable[[Connection], None]) -> None:
        """Dial the members with higher numbers that there is no connection to."""
        while True:
            for site, address in list(self.addresses.items()):
                missing = site not in self._connections and site not in self._dials
                if site > self._site and missing:
                    attempt = self._dial(site, address, on_open)
                    self._dials[site] = asyncio.get_running_loop().create_task(attempt)
            await asyncio.sleep(REDIAL_S)

    async def _dial(
        self, site: SiteId, address: Address, on_open: Callable[[Connection], None]
    ) -> None:
        """One attempt, until the handshake has succeeded or failed. Another attempt meanwhile would
        end this connection as soon as it opens, and any hand-over on it."""
        settled = asyncio.get_running_loop().create_future()
        try:
            await dial(partial(self._dialled, site, settled, on_open), address)
            await settled
        except OSError as error:
            reason = error or type(error).__name__
            self._undialled[site] = f"site {self._site} dials in vain: {reason}"
        finally:
            self._dials.pop(site, None)

    def _dialled(
        self,
        site: SiteId,
        settled: asyncio.Future[None],
        on_open: Callable[[Connection], None],
    ) -> Connection:
        def settle() -> None:
            if not settled.done():
                settled.set_result(None)

        def opened(connection: Connection) -> None:
            settle()
            on_open(connection)

        def closed(connection: Connection, error: Exception | None) -> None:
            settle()
            self._on_close(connection, error)

        return Connection(
            self._party,
            opened,
            self._on_message,
            closed,
            identity=(wire.SITE, self._site),
            peer=(wire.SITE, site),
        )

    # --- signs of life --------------------------------------------------------------------------

    async def keep_in_touch(
        self,
        lease_s: float,
        turned: Callable[[float], None],
        tell: Callable[[wire.Message], None],
    ) -> None:
        """Beat on quiet connections, and report members that are not heard. `turned` gets the time
        of every turn. The controller removes one of the two sites if the flow survives that; if
        not, nothing moves, and the report says why."""
        monitor = PeerMonitor(lease_s)
        while True:
            await asyncio.sleep(lease_s / BEATS_PER_LEASE)
            now = time.monotonic()
            turned(now)
            heard = set()
            for site, connection in self._connections.items():
                if not connection.spoke:
                    connection.send(wire.Beat())
                if connection.heard:
                    heard.add(site)
                connection.heard = connection.spoke = False
            for site, leases in monitor.listen(now, self.addresses, heard):
                tell(wire.Unheard(site, leases, self._contact(site)))

    def _contact(self, site: SiteId) -> str:
        """The state of the connection to a member that is not heard, for people."""
        connection = self._connections.get(site)
        if connection is not None:
            return f"connected, {connection.queued} bytes queued at site {self._site}"
        if site < self._site:
            return f"site {self._site} was not dialled"
        return self._undialled.get(site, f"site {self._site} dials")
