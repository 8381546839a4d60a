"""The failure detector of a control: silent, partitioned and hung sites, and joins that are stuck.

It only reports what it has noticed; the controller decides what follows. All times are of one
clock, in seconds.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import Any

from holdfast.core.events import Call
from holdfast.core.ids import GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import View

BEATS_PER_LEASE = 4
"""How often a site sends something to each other site, if only a heartbeat."""
PATIENCE_LEASES = 2
"""A site complains about another after this many leases without hearing from it."""
ALONE_LEASES = 5
"""After this many leases a complaint counts even if the other site does not complain."""
JOIN_S_MAX = 10.0
"""How long a joining replica may receive nothing; ten leases if that is longer."""

Couple = tuple[SiteId, SiteId]
"""The site that complains, and the site that it complains about."""


class FailureDetector:
    """What is known of all sites' signs of life."""

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._heard: dict[SiteId, float] = {}
        self._deaf: dict[SiteId, float] = {}
        """Sites that were silent or in a long call, and when they last were."""
        self._calls: dict[SiteId, Call] = {}
        """By site that is in a long call: the call."""
        self._complaints: dict[Couple, tuple[float, int, str]] = {}
        """When a site complained last, for how many leases it has heard nothing, and how it
        knows."""
        self._joins: dict[tuple[TaskId, SiteId, int], tuple[float, int | None]] = {}
        """By joining replica and the number of the view in which it began: how many bytes are left,
        and since when that has not changed."""

    def begin(self, sites: Iterable[SiteId], now: float) -> None:
        """Expect to hear from these sites from now on."""
        self._heard = dict.fromkeys(sites, now)

    def was_away(self, now: float) -> None:
        """This process did not run for a while, so silence in that time is not the sites' fault."""
        self._heard = dict.fromkeys(self._heard, now)
        self._complaints.clear()

    def heard(self, site: SiteId, now: float, busy: bool = False) -> None:
        """A site has sent something. While it is in a long call (`busy`) it receives nothing."""
        if busy or self._heard.get(site, now) < now - self._lease_s:
            self._deaf[site] = now
        self._heard[site] = now

    def in_call(self, site: SiteId, call: Call | None) -> None:
        """A site reports the call that it has been in for longer than the lease; None: in no
        call."""
        if call is not None:
            self._calls[site] = call
        else:
            self._calls.pop(site, None)

    def hung(self, limit_s: float) -> dict[SiteId, Call]:
        """If a call has taken longer than the limit, all calls that have taken at least half of
        it."""
        if all(call.seconds <= limit_s for call in self._calls.values()):
            return {}
        return {s: call for s, call in self._calls.items() if 2 * call.seconds > limit_s}

    def complained(self, site: SiteId, other: SiteId, leases: int, how: str, now: float) -> None:
        """A site has heard nothing from another for this many leases."""
        self._complaints[site, other] = (now, leases, how)

    def forget(self, site: SiteId) -> None:
        self._heard.pop(site, None)
        self._deaf.pop(site, None)
        self._calls.pop(site, None)

    def keep(self, sites: Collection[SiteId]) -> None:
        """Forget all other sites: a site may send something after it was declared dead."""
        for heard in (self._heard, self._deaf, self._calls):
            for site in [s for s in heard if s not in sites]:
                del heard[site]

    def silent(self, known: Collection[SiteId], now: float) -> list[SiteId]:
        """The known sites that have sent nothing for longer than the lease."""
        limit = now - self._lease_s
        return [s for s, at in self._heard.items() if at < limit and s in known]

    def partitioned(self, now: float) -> dict[Couple, tuple[int, str]]:
        """The sites that certainly hear nothing from each other, with all complaints about them.

        A complaint does not count if one of the two sites is silent, or was silent or busy during
        the time that it is about: other rules apply to those. It does not count at once, because
        other sites may complain about the same ones. While only one of the two complains, the other
        may not know yet that they are to connect.
        """
        limit, ripe = now - self._lease_s, now - self._lease_s / BEATS_PER_LEASE
        self._complaints = {c: made for c, made in self._complaints.items() if made[0] > limit}

        def at_work(site: SiteId, complained_at: float) -> bool:
            since = complained_at - PATIENCE_LEASES * self._lease_s
            return self._heard.get(site, 0.0) > limit and self._deaf.get(site, since) <= since

        valid = {
            c: s for c, s in self._complaints.items() if all(at_work(site, s[0]) for site in c)
        }
        sure = {
            site
            for (one, other), (at, leases, _) in valid.items()
            if (other, one) in valid or leases >= ALONE_LEASES
            if max(at, valid[other, one][0] if (other, one) in valid else at) <= ripe
            for site in (one, other)
        }
        return {c: (leases, how) for c, (_, leases, how) in valid.items() if sure & set(c)}

    def settled(self) -> None:
        """The complaints were acted on. Sites repeat those that still hold, after a lease."""
        self._complaints.clear()

    def stuck(
        self, view: View, metrics: Iterable[Mapping[str, Any]], now: float
    ) -> tuple[list[tuple[TaskId, SiteId]], float]:
        """The joining replicas that have received nothing for too long, by the metrics of the
        sites; and for how many seconds."""
        left = {
            ((StageId(stage), GroupId(group)), SiteId(replica["to"])): int(replica["bytes_left"])
            for site_metrics in metrics
            for replica in site_metrics["copying"]
            for stage, group in [replica["task"]]
        }
        known, self._joins = self._joins, {}
        for task in view.tasks():
            group = view.group(task)
            # A replica that is rebuilt waits for its input, and no donor sends to it.
            for site in group.joining if group.replicas else ():
                join = (task, site, group.joined_view_of(site))
                since, left_before = known.get(join, (now, None))
                left_now = left.get((task, site))
                in_call = site in self._calls or group.donor in self._calls
                waits = left_now == left_before and not in_call
                self._joins[join] = (since, left_before) if waits else (now, left_now)
        patience = max(JOIN_S_MAX, 10 * self._lease_s)
        stuck = [(u, s) for (u, s, _), (since, _) in self._joins.items() if since < now - patience]
        return stuck, patience
