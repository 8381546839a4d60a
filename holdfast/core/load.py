"""The load of sites and partitions: what a round of statistics says about the next one.

A site is *busy* while it does not wait in poll. A partition uses *work*: processor time, or rows
where nobody measured that. What a site gets done while it is busy is its *capacity*, so a site that
shares its processor with others is busy all the time and has a low capacity. From these follows
how utilised a site is if a partition is added to it or taken away (`docs/balance.md`).

Short rounds measure badly. What is smoothed is each partition's share of all work, and each site's
capacity: neither changes when a partition moves, or when a bottleneck is gone and all rates rise.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import median

from holdfast.core.ids import SiteId, StageId, TaskId

BUSY_S_MIN = 5e-4
"""A site that was busy for less than this says nothing about its capacity."""
SATURATED = 0.98
"""A site that is busy for this part of a round may do less than it should."""
STALLED = 0.5
"""A site that got nothing done is slow if it was busy for this part of a round; else it had nothing
to do."""
CAPACITY_MIN = 1e-3
"""The least capacity that is assumed, relative to the median."""

PartKey = tuple[TaskId, SiteId]


@dataclass(frozen=True, slots=True)
class SiteLoad:
    """What a site measured in a round."""

    site: SiteId
    busy: float
    """1 - time waiting in poll / time: what part of the round it did not wait."""
    memory_max: int | None = None
    """Bytes of state that it may keep in memory; None if that is not limited."""
    state_bytes: int = 0
    """Bytes of state of all that it holds, in memory and on disk."""
    disk_bytes: int = 0
    cpu_s: float | None = None
    """Processor time of the site in the round, if measured. What exceeds the work of its
    partitions is a constant that no move changes."""


@dataclass(frozen=True, slots=True)
class PartLoad:
    """What one replica of a task did in a round."""

    task: TaskId
    site: SiteId
    rows: int
    work_s: float
    """Processor time; 0 if not measured."""
    state_bytes: int
    movable: bool = True
    on_disk: int = 0
    """How many bytes of its state are on disk."""

    @property
    def key(self) -> PartKey:
        return self.task, self.site


@dataclass(frozen=True, slots=True)
class Collection:
    """How long a round took."""

    collected_ms: float
    moves_took_ms: float = 0.0
    """How long the moves before it took; 0 if there were none."""
    gathering_took_ms: float = 0.0
    """How long it took until all sites had answered."""


@dataclass(frozen=True, slots=True)
class LoadHistory:
    """Smoothed measurements of earlier rounds."""

    shares: Mapping[PartKey, float] = field(default_factory=dict)
    """By replica: its share of all work."""
    capacities: Mapping[SiteId, tuple[float, float]] = field(default_factory=dict)
    """By site: work a second, and the busy part of a second in which it was done."""
    rate: float = 0.0
    """Work a second of all sites."""
    seen_ms: float = 0.0
    """For how long statistics have been collected."""
    in_rows: bool = False
    """Whether work is counted in rows."""

    def forgetting(self, sites: Iterable[SiteId]) -> LoadHistory:
        """This history without the capacities of sites that are tried again."""
        gone = set(sites)
        kept = {site: c for site, c in self.capacities.items() if site not in gone}
        return replace(self, capacities=kept) if gone else self


@dataclass(frozen=True, slots=True)
class LoadEstimate:
    """What the next round is expected to be like, without moves."""

    work: Mapping[PartKey, float]
    """By replica: work a second."""
    capacity: Mapping[SiteId, float]
    """By site: work a second if it were busy all the time."""
    utilisation: dict[SiteId, float]
    typical: float
    """The median capacity."""
    known: frozenset[SiteId]
    """The sites whose capacity was measured and not assumed."""
    usual: Mapping[StageId, float] = field(default_factory=dict)
    """By stage: the mean work of its replicas, where that was asked for."""

    def without(self, closed: frozenset[SiteId]) -> LoadEstimate:
        """This estimate, with the mean work of replicas that are not on these sites."""
        if not closed:
            return self
        found: dict[StageId, list[float]] = {}
        for (task, site), work in self.work.items():
            if site not in closed:
                found.setdefault(task[0], []).append(work)
        usual = {stage: sum(some) / len(some) for stage, some in found.items()}
        return replace(self, usual=usual)


def estimate(
    sites: Sequence[SiteLoad],
    parts: Sequence[PartLoad],
    collected_ms: float,
    smooth_ms: float,
    history: LoadHistory,
    unsettled: Container[TaskId] = (),
) -> tuple[LoadEstimate, LoadHistory]:
    """Combine the measurements of a round with those of earlier ones. Tasks that are unsettled have
    moved: what they did in this round was held up, or had been held up before, and says nothing
    about their share of the work."""
    seconds = collected_ms / 1e3
    weights, in_rows = _weights(parts)
    if in_rows != history.in_rows and history.rate:
        history = LoadHistory()
    new = _newness(collected_ms, smooth_ms, history.seen_ms)
    total = sum(weights.values())
    rate = total / seconds if total else history.rate
    before = _carried_over(weights, history.shares)
    shares = _smoothed_shares(weights, total, new, before, unsettled)
    shares = _no_less_where_saturated(sites, shares, before)
    work = {key: share * rate for key, share in shares.items()}
    done: dict[SiteId, float] = {}
    for (_, site), weight in weights.items():
        done[site] = done.get(site, 0.0) + weight
    used = {
        s.site: done.get(s.site, 0.0)
        if in_rows or s.cpu_s is None
        else max(s.cpu_s, done.get(s.site, 0.0))
        for s in sites
    }
    measured = _smoothed_capacities(sites, used, seconds, new, history)
    capacity, typical = _capacities(sites, measured, in_rows)
    utilisation = {
        s.site: (used[s.site] - done.get(s.site, 0.0)) / seconds / capacity[s.site] for s in sites
    }
    for (_, site), amount in work.items():
        utilisation[site] += amount / capacity[site]
    after = LoadHistory(shares, measured, rate, history.seen_ms + collected_ms, in_rows)
    return LoadEstimate(work, capacity, utilisation, typical, frozenset(measured)), after


def _weights(parts: Sequence[PartLoad]) -> tuple[dict[PartKey, float], bool]:
    """By replica: its work in the round, and whether that is rows. If only some have measured
    their processor time, the others get what their rows cost on average."""
    work = sum(p.work_s for p in parts)
    rows = sum(p.rows for p in parts if p.work_s)
    if not work:
        return {(p.task, p.site): float(p.rows) for p in parts}, True
    cost = work / rows if rows else 0.0
    return {(p.task, p.site): p.work_s or p.rows * cost for p in parts}, False


def _newness(collected_ms: float, smooth_ms: float, seen_ms: float) -> float:
    """The weight of this round: at first that of an average over all rounds, later exponential."""
    average = collected_ms / (seen_ms + collected_ms)
    return max(average, 1.0 - math.exp(-collected_ms / smooth_ms)) if smooth_ms else 1.0


def _smoothed_shares(
    weights: Mapping[PartKey, float],
    total: float,
    new: float,
    before: Mapping[PartKey, float],
    unsettled: Container[TaskId],
) -> dict[PartKey, float]:
    if not total:
        return {key: before.get(key, 0.0) for key in weights}
    shares = {}
    for key, weight in weights.items():
        share, old = weight / total, before.get(key)
        if old is not None:
            share = old if key[0] in unsettled else old + new * (share - old)
        shares[key] = share
    return shares


def _no_less_where_saturated(
    sites: Sequence[SiteLoad], shares: dict[PartKey, float], before: Mapping[PartKey, float]
) -> dict[PartKey, float]:
    """Scale shares to a sum of 1. A site that never waits may have got slower and do less of what
    it should do, while its input is held up elsewhere: its tasks together have no less than they
    had before."""
    full = {s.site for s in sites if s.busy >= SATURATED}
    now: dict[SiteId, float] = {}
    then: dict[SiteId, float] = {}
    for key, share in shares.items() if full else ():
        if key[1] in full:
            now[key[1]] = now.get(key[1], 0.0) + share
            then[key[1]] = then.get(key[1], 0.0) + before.get(key, share)
    more = {s: then[s] / now[s] for s in now if 0 < now[s] < then[s]}
    if more:
        shares = {key: share * more.get(key[1], 1.0) for key, share in shares.items()}
    scale = sum(shares.values())
    return {key: share / scale for key, share in shares.items()} if scale else shares


def _carried_over(
    parts: Mapping[PartKey, float], before: Mapping[PartKey, float]
) -> Mapping[PartKey, float]:
    """Shares before, in which a replica that was not there has the share of the task's other
    replicas, or of the one that it replaces."""
    new = parts.keys() - before.keys() if before else ()
    if not new:
        return before
    others: dict[TaskId, list[float]] = {}
    for (task, _), share in before.items():
        others.setdefault(task, []).append(share)
    means = {key: others[key[0]] for key in new if key[0] in others}
    return {**before, **{key: sum(some) / len(some) for key, some in means.items()}}


def _smoothed_capacities(
    sites: Sequence[SiteLoad],
    used: Mapping[SiteId, float],
    seconds: float,
    new: float,
    history: LoadHistory,
) -> dict[SiteId, tuple[float, float]]:
    measured: dict[SiteId, tuple[float, float]] = {}
    for s in sites:
        old = history.capacities.get(s.site)
        told = s.busy * seconds >= BUSY_S_MIN if used[s.site] else s.busy >= STALLED
        if told:
            work, busy = used[s.site] / seconds, s.busy
            if old is not None:
                work, busy = old[0] + new * (work - old[0]), old[1] + new * (busy - old[1])
            measured[s.site] = work, busy
        elif old is not None:
            measured[s.site] = old
    return measured


def _capacities(
    sites: Sequence[SiteLoad], measured: Mapping[SiteId, tuple[float, float]], in_rows: bool
) -> tuple[dict[SiteId, float], float]:
    """The capacity of each site, and the median, which a site of which nothing is known gets."""
    known = {site: work / busy for site, (work, busy) in measured.items()}
    some = [c for c in known.values() if c > 0]
    typical = median(some) if some else 1.0
    if not some and in_rows:
        typical = math.inf
    least = CAPACITY_MIN * typical if some else 0.0
    return {s.site: max(known.get(s.site, typical), least) or typical for s in sites}, typical
