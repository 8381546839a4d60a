"""Which members a site has heard nothing of for too long, though it listened.

Only time in which the site itself got to run counts: one that was stopped, starved, or busy with
one long call has not listened, and what came meanwhile is read before it looks here again.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.core.ids import SiteId

BEATS_PER_LEASE = 4
PATIENCE_LEASES = 2


class Hearing:
    """One site's. `listen` is called when the site looks, about every quarter of a lease.

    >>> hearing = Hearing(lease_s=1.0)
    >>> [hearing.listen(at, members=[7, 8], heard=[8]) for at in (0.0, 0.5, 1.0, 1.5)]
    [[], [], [], []]
    >>> hearing.listen(2.0, members=[7, 8], heard=[8])
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
