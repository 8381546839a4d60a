"""Which members a site has heard nothing from for too long, and how long its own loop stood still.

Only time counts in which the site itself ran. A site that was stopped, starved, or in one long call
did not listen, and it reads what arrived meanwhile before it checks again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.core.failure_detector import BEATS_PER_LEASE, PATIENCE_LEASES
from holdfast.core.ids import SiteId


class PeerMonitor:
    """What one site hears from its peers. It calls `listen` about every quarter of a lease.

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
        self._complained: dict[SiteId, int] = {}

    def listen(
        self, now: float, members: Iterable[SiteId], heard: Collection[SiteId]
    ) -> list[tuple[SiteId, int]]:
        """The members to complain about, and for how many leases nothing was heard from them: once
        for each number of leases, from two on. `heard` are the members that something has arrived
        from since the last call."""
        longest = 2 * self._lease_s / BEATS_PER_LEASE
        elapsed = min(now - self._at, longest) if self._at is not None else 0.0
        self._at = now
        known, complained = self._unheard_s, self._complained
        self._unheard_s = {s: known.get(s, -elapsed) + elapsed for s in members if s not in heard}
        leases = {s: int(t / self._lease_s) for s, t in self._unheard_s.items()}
        self._complained = {s: n for s, n in leases.items() if n >= PATIENCE_LEASES}
        return [(s, n) for s, n in self._complained.items() if n > complained.get(s, 0)]


class Standstill:
    """How long a site's event loop has not turned, as measured by a thread every `pause_s`.

    Time in which the thread did not run either does not count: a process that was stopped is not in
    a long call when it continues.

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
        """How long the event loop has stood still; it turned last at `turned`."""
        elapsed = min(now - self._at, 2 * self._pause_s)
        self._seconds = self._seconds + elapsed if turned == self._turned else 0.0
        self._at, self._turned = now, turned
        return self._seconds
