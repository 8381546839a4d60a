"""Which members a site has heard nothing of for too long, though it listened; and whether it does.

Only time in which the site itself got to run counts: one that was stopped, starved, or busy with
one long call has not listened, and what came meanwhile is read before it looks here again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.core.failure_detector import BEATS_PER_LEASE, PATIENCE_LEASES
from holdfast.core.ids import SiteId


class PeerMonitor:
    """One site's. `listen` is called when the site looks, about every quarter of a lease.

    >>> monitor = PeerMonitor(lease_s=1.0)
    >>> [monitor.listen(at, members=[7, 8], heard=[8]) for at in (0.0, 0.5, 1.0, 1.5)]
    [[], [], [], []]
    >>> monitor.listen(2.0, members=[7, 8], heard=[8])
    [(7, 2)]
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._at: float | None = None
        self._unheard_s: dict[SiteId, float] = {}
        self._said: dict[SiteId, int] = {}

    def listen(
        self, now: float, members: Iterable[SiteId], heard: Collection[SiteId]
    ) -> list[tuple[SiteId, int]]:
        """Whom to complain of, and for how many leases nothing was heard: from two on, once for
        each. `heard` are those that something has come from since the last time."""
        longest = 2 * self._lease_s / BEATS_PER_LEASE
        past = min(now - self._at, longest) if self._at is not None else 0.0
        self._at = now
        known, said = self._unheard_s, self._said
        self._unheard_s = {s: known.get(s, -past) + past for s in members if s not in heard}
        leases = {s: int(t / self._lease_s) for s, t in self._unheard_s.items()}
        self._said = {s: n for s, n in leases.items() if n >= PATIENCE_LEASES}
        return [(s, n) for s, n in self._said.items() if n > said.get(s, 0)]


class Standstill:
    """For how long a site's event loop has not got to turn, as a thread beside it sees that, which
    looks every `pause_s`. Time in which the thread did not get to run either does not count: a
    process that was stopped is not in a long call when it goes on.

    >>> still = Standstill(pause_s=1.0)
    >>> [still.seconds(at, turned=5.0) for at in (6.0, 7.0, 8.0)]
    [0.0, 1.0, 2.0]
    >>> [still.seconds(900.0, turned=5.0), still.seconds(901.0, turned=900.5)]
    [4.0, 0.0]
    """

    def __init__(self, pause_s: float) -> None:
        self._pause_s = pause_s
        self._at = self._turned = 0.0
        self._seconds = 0.0

    def seconds(self, now: float, turned: float) -> float:
        """The event loop has last turned at `turned`."""
        past = min(now - self._at, 2 * self._pause_s)
        self._seconds = self._seconds + past if turned == self._turned else 0.0
        self._at, self._turned = now, turned
        return self._seconds
