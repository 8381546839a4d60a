"""The thread that reports to each control that the site lives, while its event loop is busy.

A site in a long operator call neither reads nor sends. The controller must not take that for death,
and must not believe the peers that hear nothing of the site. So the pulse has a connection of its
own. It also reports how long the call has taken, because a call that never ends must be found. Code
that holds Python's global lock for longer than the lease silences this thread, too.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

from holdfast.core.ids import SiteId
from holdfast.core.peer_monitor import Standstill
from holdfast.errors import HoldfastError
from holdfast.net import wire
from holdfast.net.client import Client
from holdfast.net.handshake import Party
from holdfast.site.peers import REDIAL_S

log = logging.getLogger("holdfast.site")

FENCED_S = 3.0
"""How long a site that was declared dead has to leave; then its process is ended."""
HUNG_STATUS = 75
"""The exit status of a process that is ended so."""


class Pulse:
    """`call` is the stage and epoch that the site is at, if it is in a call; `term` the latest
    term that the site knows."""

    def __init__(
        self,
        site: SiteId,
        party: Party,
        lease_s: float,
        call: Callable[[], tuple[str, int] | None],
        term: Callable[[], int],
    ) -> None:
        self._site, self._party, self._lease_s = site, party, lease_s
        self._call, self._term = call, term
        self._turned = time.monotonic()
        self._left = threading.Event()

    def turned(self, now: float) -> None:
        """The event loop has had a turn."""
        self._turned = now

    def start(self, address: tuple[str, int]) -> None:
        thread = threading.Thread(
            target=self._beat, args=(address,), daemon=True, name="holdfast-pulse"
        )
        thread.start()

    def stop(self) -> None:
        """The site leaves."""
        self._left.set()

    def _beat(self, address: tuple[str, int]) -> None:
        pause = self._lease_s / 5
        still = Standstill(pause)
        while not self._left.is_set():
            try:
                identity = (wire.PULSE, self._site)
                client = Client(address, self._party, identity, (wire.SERVER, -1))
                while not self._left.is_set():
                    client.tell(self.message(still, time.monotonic()))
                    fenced = client.heard(wire.Fenced)
                    if fenced is not None and fenced.term >= self._term():
                        self._end_if_hung()
                    self._left.wait(pause)
                client.close()
            except (OSError, HoldfastError):
                self._left.wait(REDIAL_S)

    def message(self, still: Standstill, now: float) -> wire.Beat:
        """What to report now: the site is alive, or busy in a call."""
        seconds = still.seconds(now, self._turned)
        stage, epoch = self._call() or ("", -1)
        if now - self._turned <= self._lease_s:
            return wire.Beat()
        return wire.Beat(True, seconds, stage, epoch)

    def _end_if_hung(self) -> None:
        """End the process if its event loop does not leave: the site was declared dead, and another
        has its place."""
        if not self._left.wait(FENCED_S):
            log.error("site %s was declared dead in a call that does not end; it exits", self._site)
            os._exit(HUNG_STATUS)
