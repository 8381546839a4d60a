"""The failure detector of a control: who lives, who hears whom, and which new replicas get on.

It only says what it has noticed; what follows from that is for the controller. All times are those
of one clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from holdfast.core.events import Call
from holdfast.core.ids import GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import View

BEATS_PER_LEASE = 4
"""How often sites say something to each other, if only that they live."""
PATIENCE_LEASES = 2
"""A site complains of another when it has heard nothing of it for so many leases."""
ALONE_LEASES = 5
"""After so many leases it counts that one site does not hear another, though only one says so."""
JOIN_S_MAX = 10.0
"""So long a replica that is being made may get nothing; or ten leases, if that is longer."""

Couple = tuple[SiteId, SiteId]
"""Who complains, and of whom."""


class FailureDetector:
    """Of all sites."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard: dict[SiteId, float] = {}
        self._deaf: dict[SiteId, float] = {}
        """Who could neither hear nor be heard, and when that was last so."""
        self._calls: dict[SiteId, Call] = {}
        """What sites are at that are in a long call."""
        self._apart: dict[Couple, tuple[float, int, str]] = {}
        self._joins: dict[tuple[TaskId, SiteId, int], tuple[float, int | None]] = {}
        """Replicas that are being made, and since which view: since when, and how many bytes, have
        not become fewer."""

    def begin(self, sites: Iterable[SiteId], now: float) -> None:
        """From now on these are to be heard of."""
        self._heard = dict.fromkeys(sites, now)

    def was_away(self, now: float) -> None:
        """This process did not get to run: nobody is to blame for what it has not heard."""
        self._heard = dict.fromkeys(self._heard, now)
        self._apart.clear()

    def heard(self, site: SiteId, now: float, busy: bool = False) -> None:
        """A site has said something; if it is in a long call, it can hear nobody."""
        if busy or self._heard.get(site, now) < now - self._lease_s:
            self._deaf[site] = now
        self._heard[site] = now

    def in_call(self, site: SiteId, call: Call | None) -> None:
        """A site says what it has been at for longer than the lease; None: for no longer."""
        if call is not None:
            self._calls[site] = call
        else:
            self._calls.pop(site, None)

    def hung(self, limit_s: float) -> dict[SiteId, Call]:
        """All calls that take at least half as long as any may, if one takes longer."""
        if all(call.seconds <= limit_s for call in self._calls.values()):
            return {}
        return {s: call for s, call in self._calls.items() if 2 * call.seconds > limit_s}

    def complained(self, site: SiteId, other: SiteId, leases: int, how: str, now: float) -> None:
        """A site has heard nothing of another for so many leases."""
        self._apart[site, other] = (now, leases, how)

    def forget(self, site: SiteId) -> None:
        self._deaf.pop(site, None)
        self._calls.pop(site, None)

    def silent(self, known: Collection[SiteId], now: float) -> list[SiteId]:
        """Those of whom nothing was heard for longer than the lease."""
        limit = now - self._lease_s
        return [s for s, at in self._heard.items() if at < limit and s in known]

    def partitioned(self, now: float) -> dict[Couple, tuple[int, str]]:
        """Those that hear nothing of each other, for sure, and all that was said of them. Not if
        one of them is silent, or was so or was busy in the time that is complained of: that is
        another matter. Nor at once: others may have more to say of them. As long as only one
        complains, the other may not have heard that they are to meet."""
        limit, settled = now - self._lease_s, now - self._lease_s / BEATS_PER_LEASE
        self._apart = {c: said for c, said in self._apart.items() if said[0] > limit}

        def at_work(site: SiteId, complained_at: float) -> bool:
            since = complained_at - PATIENCE_LEASES * self._lease_s
            return self._heard.get(site, 0.0) > limit and self._deaf.get(site, since) <= since

        said = {c: s for c, s in self._apart.items() if all(at_work(site, s[0]) for site in c)}
        sure = {
            site
            for (one, other), (at, leases, _) in said.items()
            if (other, one) in said or leases >= ALONE_LEASES
            if max(at, said[other, one][0] if (other, one) in said else at) <= settled
            for site in (one, other)
        }
        return {c: (leases, how) for c, (_, leases, how) in said.items() if sure & set(c)}

    def settled(self) -> None:
        """Complaints were acted on. What still holds is said again in a lease."""
        self._apart.clear()

    def stuck(
        self, view: View, figures: Iterable[Mapping[str, Any]], now: float
    ) -> tuple[list[tuple[TaskId, SiteId]], float]:
        """Replicas that are being made and get nowhere, by what the sites say of themselves; and
        for how many seconds they have not."""
        left = {
            ((StageId(stage), GroupId(group)), SiteId(replica["to"])): int(replica["bytes_left"])
            for said in figures
            for replica in said["copying"]
            for stage, group in [replica["task"]]
        }
        known, self._joins = self._joins, {}
        for task in view.tasks():
            group = view.group(task)
            for site in group.joining if group.replicas else ():  # others wait for their input
                join = (task, site, group.joined_view_of(site))
                since, was = known.get(join, (now, None))
                got = left.get((task, site))
                in_call = site in self._calls or group.donor in self._calls
                waits = got == was and not in_call
                self._joins[join] = (since, was) if waits else (now, got)
        patience = max(JOIN_S_MAX, 10 * self._lease_s)
        stuck = [(u, s) for (u, s, _), (since, _) in self._joins.items() if since < now - patience]
        return stuck, patience
