"""How fast a site hands state over: a little at a time, so that the stream goes on.

A site sends parts until their bytes reach the configured rate, for at most `STALL_S` at a stretch,
and only while the receiver keeps up.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.ids import STORE
from holdfast.site.node import SiteNode
from holdfast.site.peers import Peers

STALL_S = 0.005
"""The longest stretch for which a site does nothing but hand over."""
LATE_S_MAX = 0.5
"""Time that was lost is made up for up to this much."""
REBUILD_S = 0.5
"""Hand-overs wait this long when tasks are rebuilt: first the stream must flow again."""
QUEUED_BYTES_MAX = 4 << 20
"""Hand-overs wait while this much is on its way to the new replica."""
PAUSE_S = 0.002


class Trickle:
    """The pace of a site's hand-overs."""

    def __init__(self, node: SiteNode, peers: Peers, mb_per_s: float) -> None:
        self._node, self._peers, self._bytes_per_s = node, peers, mb_per_s * 1e6
        self._due_at = 0.0
        self.stall_ms = 0.0
        """The longest stretch so far."""

    def hold(self, now: float) -> None:
        """Tasks are being rebuilt."""
        self._due_at = max(self._due_at, now + REBUILD_S)

    def run(self, begun: float, clock: Callable[[], float]) -> float:
        """Send the parts that are due. Return the pause until the next ones are."""
        now = begun
        self._due_at = max(self._due_at, begun - LATE_S_MAX)
        while self._due_at <= now < begun + STALL_S and self._send_part():
            now = clock()
        self.stall_ms = max(self.stall_ms, (now - begun) * 1e3)
        return max(self._due_at - now, 0.0) or PAUSE_S

    def _send_part(self) -> bool:
        """Send a part if there is one and the receiver keeps up; return whether another may
        follow at once."""
        joiner = next((joiner for _, joiner in self._node.transfers.outgoing), STORE)
        if self._peers.queued_to(joiner) >= QUEUED_BYTES_MAX:
            return False
        sent = self._node.hand_over()
        self._due_at += max(0, sent) / self._bytes_per_s
        return sent > 0 or (sent == 0 and joiner != STORE)
