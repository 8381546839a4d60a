"""The sites of a flow: which are launched, registered or dead, and which replaces which."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from holdfast.core.effects import FenceSite, LaunchSite, Wait
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Domain
from holdfast.core.placement import Candidates
from holdfast.core.timers import PatienceTimer

BACKOFF_MS = (0, 100, 500, 1_000, 2_000, 5_000)
"""How long to wait before the n-th attempt in a row; the last value repeats."""

EMPTIED = "it was drained"
"""Why a site has left that was to be emptied."""

FAILED_STARTS_MAX = 5
"""How many launches in a row may end before the site registers. More are a fault of the set-up."""

DEATHS_MAX = 50
"""How many of the last deaths are remembered, for people. Nothing depends on them: a site that is
neither launched nor registered is dead, or was never launched."""

REASON_MAX = 200
"""How many characters of the reason of a death are kept."""

TERM_IDS = 1_000
"""Sites are numbered in blocks. A leader of a new term begins a block of its own."""

RELAUNCH_MS = 2_000
"""How long a missing replica waits for a site that is being launched before it joins another, if
the user does not say otherwise."""


def first_id(term: int) -> SiteId:
    """The first number of a site that is launched in a term before which nothing was committed."""
    return SiteId(TERM_IDS * max(0, term - 1))


def ids_end(next_id: int) -> SiteId:
    """The end of the numbers that a leader may use up to its next commit, if the next site gets the
    number `next_id`. At least half a block remains, for launches that are not committed yet.

    >>> ids_end(4), ids_end(500), ids_end(501)
    (1000, 1000, 2000)
    """
    return SiteId(-(-(next_id + TERM_IDS // 2) // TERM_IDS) * TERM_IDS)


def backoff_ms(failures: int) -> int:
    """How long to wait after this many failures in a row."""
    return BACKOFF_MS[min(failures, len(BACKOFF_MS) - 1)]


class SiteRoster:
    """The sites. A site that dies is replaced by a new one. No number is used twice, so a number
    below `next_id` that is neither launched nor registered is that of a dead site.

    The flow begins on `sites`; `spares` register and wait. A missing replica waits for a
    replacement for `relaunch_ms` at most.
    """

    def __init__(
        self, sites: Sequence[SiteId], spares: Sequence[SiteId], relaunch_ms: int = RELAUNCH_MS
    ) -> None:
        self._relaunch_ms = relaunch_ms
        self.sites, self.spares = list(sites), list(spares)
        self.launched: set[SiteId] = {*sites, *spares}
        """Sites whose processes are started and that have not registered."""
        self.addresses: dict[SiteId, tuple[str, int]] = {}
        """By registered site."""
        self.domains: dict[SiteId, Domain] = {}
        """By registered site."""
        self.dead: dict[SiteId, str] = {}
        """By site: why it died. Only the last `DEATHS_MAX`."""
        self.replaced: dict[SiteId, SiteId] = {}
        """By site that is in `dead`: the one that was launched in its place."""
        self.next_id = SiteId(1 + max([*sites, *spares]))
        """The number of the next site that is launched."""
        self._failed_starts: dict[SiteId, int] = {}
        """By launched site: how many launches in a row ended before the site registered."""
        self._replacements = 0
        """How many sites were launched in place of others."""
        self._waiting_for = self._waited_for = -1
        """For how many replacements a wait has begun, and for how many one is over."""

    def resume(
        self,
        addresses: dict[SiteId, tuple[str, int]],
        domains: dict[SiteId, Domain],
        dead: Mapping[SiteId, str],
        next_id: SiteId,
    ) -> None:
        """Continue from what another controller knew. It has not used `next_id` or any number
        above."""
        self.launched = {s for s in self.launched if s not in addresses}
        self.addresses, self.domains, self.dead = addresses, domains, dict(dead)
        self.next_id = next_id

    def await_launched(self, sites: Iterable[SiteId]) -> None:
        """These sites were launched by another controller, and have not registered."""
        self.launched |= set(sites)

    # --- what is known of sites -----------------------------------------------------------------

    def knows(self, site: SiteId) -> bool:
        """Whether a site is alive as far as is known."""
        return site in self.launched or site in self.addresses

    @property
    def gathered(self) -> bool:
        """Whether all sites have registered that the flow begins on."""
        return all(s in self.addresses for s in self.sites)

    def failed_starts(self, sites: Iterable[SiteId]) -> int:
        """How many launches in a row have failed, if these sites are dead: the most of any."""
        return max(self._failed_starts.get(s, 0) + 1 if s in self.launched else 0 for s in sites)

    # --- what happens to them -------------------------------------------------------------------

    def register(self, site: SiteId, address: tuple[str, int], domain: Domain) -> bool:
        """Note where a site is. False if it is dead or was never launched."""
        if site not in self.launched:
            return False
        self.launched.discard(site)
        self.addresses[site] = address
        self.domains[site] = domain
        self._failed_starts.pop(site, None)
        return True

    def remove(self, sites: Iterable[SiteId], reason: str) -> list[FenceSite | LaunchSite]:
        """Never deal with these sites again; launch others in their place."""
        effects: list[FenceSite | LaunchSite] = []
        for site in sites:
            failed_starts = self._failed_starts.get(site, 0) + (site in self.launched)
            launch = self._replace(site, failed_starts)
            effects += [*self.retire(site, reason), launch]
        return effects

    def retire(self, site: SiteId, reason: str) -> list[FenceSite | LaunchSite]:
        """Never deal with this site again, and launch no other."""
        self._note_death(site, reason)
        self.addresses.pop(site, None)
        self.domains.pop(site, None)
        self._failed_starts.pop(site, None)
        self.launched.discard(site)
        for group in (self.sites, self.spares):
            if site in group:
                group.remove(site)
        return [FenceSite(site)]

    def on_members(self, members: Collection[SiteId]) -> None:
        """A spare that has become a member is one of the sites, and the one that it stands in for
        is a spare."""
        for at, spare in enumerate(self.spares):
            idle = next((s for s in self.sites if s not in members), None)
            if spare in members and idle is not None:
                self.sites[self.sites.index(idle)], self.spares[at] = spare, idle

    def resize(self, count: int) -> list[LaunchSite]:
        """Have the flow run on this many sites from now on. Launch those that are missing; sites
        beyond the number are emptied first, and stay until then."""
        effects = []
        while len(self.sites) < count:
            self.sites.append(self.next_id)
            effects.append(self._launch(0))
        return effects

    def _note_death(self, site: SiteId, reason: str) -> None:
        self.dead[site] = reason[:REASON_MAX]
        while len(self.dead) > DEATHS_MAX:
            oldest = next(iter(self.dead))
            del self.dead[oldest]
            self.replaced.pop(oldest, None)

    def _replace(self, site: SiteId, failed_starts: int) -> LaunchSite:
        self.replaced[site] = self.next_id
        for group in (self.sites, self.spares):
            if site in group:
                group[group.index(site)] = self.next_id
        return self._launch(failed_starts)

    def _launch(self, failed_starts: int) -> LaunchSite:
        new = self.next_id
        self.next_id = SiteId(new + 1)
        self.launched.add(new)
        self._replacements += 1
        self._failed_starts[new] = failed_starts
        return LaunchSite(new, backoff_ms(failed_starts))

    # --- waiting for launched sites -------------------------------------------------------------

    def candidates(
        self,
        closed: Collection[SiteId] = (),
        failed: Mapping[TaskId, Collection[SiteId]] | None = None,
    ) -> Candidates:
        """The sites that new replicas can join at: see `Candidates`."""
        launching = bool(self.launched)
        await_launch = launching and self._waited_for != self._replacements
        planned = len(self.sites)
        return Candidates(self.domains, planned, launching, await_launch, closed, failed or {})

    def wait_for_launched(self) -> list[Wait]:
        """Limit the wait for the sites that are being launched, unless a wait has begun since the
        last one was launched."""
        if not self.launched or self._waiting_for == self._replacements:
            return []
        self._waiting_for = self._replacements
        return [Wait(PatienceTimer(self._waiting_for), self._relaunch_ms)]

    def on_wait_over(self, timer: PatienceTimer) -> None:
        """A wait is over. It counts unless another site was launched since."""
        self._waited_for = timer.number
