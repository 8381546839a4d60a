"""Which stages must not be lost together, and so must not share a failure domain.

A stage that is rebuilt from its input (see `holdfast.core.upstream`) survives as long as not too
many stages in a row lose a task at once: at level k the log of a stage's producers is enough for k
of them. A *stretch* is one stage more than that, so a flow that loses a task of every stage of a
stretch ends. A site has tasks of several stages and dies with all of them, and so does an executor
or a host. Placement therefore keeps the stages of a stretch apart, as far as there are enough
failure domains; what could not be kept apart is an `Exposure`.

These are functions of a shape, a view and the failure domains of the sites. How a stage is spread
over the sites that it may use is up to `holdfast.core.placement`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.core.ids import SiteId, StageId, TaskId
from holdfast.core.layout import Domain, PartitionGroup, Shape, View
from holdfast.core.protection import DOMAINS

SEARCH_STEPS_MAX = 20_000
"""After so many steps the search for a division of the stages counts as failed. A flow needs dozens
of stages, with many ways between them, to get there."""

Stretch = tuple[StageId, ...]
"""Stages in a row, of which one too many is lost if all of them lose a task."""


def stretches(shape: Shape) -> list[Stretch]:
    """All stretches of a flow: from each stage that is rebuilt, along all ways."""
    return [
        way
        for stage in shape.stages
        if stage.guard.rebuild_level
        for way in _ways(shape, (stage.id,), stage.guard.rebuild_level + 1)
    ]


def _ways(shape: Shape, way: Stretch, length: int) -> Iterator[Stretch]:
    """The ways of `length` stages that begin like `way` and have stages that are rebuilt only."""
    if len(way) == length:
        yield way
        return
    outputs = shape.stages[way[-1]].outputs
    for stage in dict.fromkeys(shape.consumer_of[exchange] for exchange in outputs):
        if shape.stages[stage].guard.rebuild_level:
            yield from _ways(shape, (*way, stage), length)


# --- what a loss would do -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Exposure:
    """A failure domain whose loss would end the flow, although the protection is meant to survive
    it: it has tasks of too many stages in a row."""

    sites: tuple[SiteId, ...]
    stages: tuple[str, ...]
    """A stretch, by name."""
    domain: str
    """The kind of failure domain that the sites are."""
    domains_needed: int
    """How many failure domains of that kind the flow needs, so that no such loss ends it."""
    at_once: bool = False
    """Whether they are several failure domains, and only their loss at once ends the flow."""

    def __str__(self) -> str:
        sites = ", ".join(str(s) for s in self.sites)
        stages = ", ".join(repr(name) for name in self.stages)
        what = "site" if len(self.sites) == 1 else "sites"
        when, has = (" at once", "they have") if self.at_once else ("", "it has")
        rebuilt = len(self.stages) - 1
        return (
            f"the loss of {what} {sites}{when} would end the flow: {has} partitions of {stages}, "
            f"and {rebuilt} of these stages can be rebuilt at once; to keep them apart takes sites "
            f"in {self.domains_needed} different {_plural(self.domain)}"
        )


def _plural(domain: str) -> str:
    return f"{domain}es" if domain.endswith("s") else f"{domain}s"


def lost_stretch(view: View, shape: Shape, weak: Collection[TaskId] = ()) -> Stretch | None:
    """A stretch of which every stage has a task without a replica, or one that is `weak`: what that
    one keeps may not be enough to rebuild another from."""
    hit = {u[0] for u in (*view.bare(), *weak)}
    return next((way for way in stretches(shape) if hit.issuperset(way)), None)


def exposures(view: View, shape: Shape, domains: Mapping[SiteId, Domain]) -> list[Exposure]:
    """The failure domains whose loss would end the flow, a stretch at a time."""
    found, ways = [], stretches(shape)
    needed = domains_needed(shape) if ways else 1
    for way in ways:
        kind = shape.stages[way[-1]].guard.failure_domain  # it is the last that is not rebuilt
        for sites in by_domain(view.members, domains, kind).values():
            if all(_is_hit(view, stage, sites) for stage in way):
                names = tuple(shape.stages[stage].name for stage in way)
                found.append(Exposure(tuple(sites), names, kind, needed))
    return found


def joint_exposures(view: View, shape: Shape, domains: Mapping[SiteId, Domain]) -> list[Exposure]:
    """Failure domains whose loss at once would end the flow, although the protection is meant to
    survive as many: some for each stretch, if the loss of one of them is survived. A stretch of
    k + 1 stages is lost with k domains if one of these has tasks of two of its stages."""
    found = []
    for way in stretches(shape):
        at_once = len(way) - 1
        kind = shape.stages[way[-1]].guard.failure_domain
        units = [*by_domain(view.members, domains, kind).values()]
        chosen = _covering(way, [[s for s in way if _is_hit(view, s, u)] for u in units])
        if 1 < len(chosen) <= at_once:
            sites = tuple(sorted(s for n in chosen for s in units[n]))
            names = tuple(shape.stages[stage].name for stage in way)
            needed = domains_needed(shape, at_once)
            found.append(Exposure(sites, names, kind, needed, at_once=True))
    return found


def _covering(way: Stretch, hits: Sequence[Sequence[StageId]]) -> list[int]:
    """Few of the failure domains, by number, that together have tasks of all stages of a stretch;
    none if there are no such."""
    chosen: list[int] = []
    left = set(way)
    while left:
        best = max(range(len(hits)), key=lambda n: len(left.intersection(hits[n])), default=None)
        if best is None or not left.intersection(hits[best]):
            return []
        chosen.append(best)
        left -= set(hits[best])
    return chosen


def _is_hit(view: View, stage: StageId, gone: Collection[SiteId]) -> bool:
    return any(_is_lost(group, gone) for group in view.groups[stage])


def _is_lost(group: PartitionGroup, gone: Collection[SiteId]) -> bool:
    holders = (*group.replicas, *group.standbys) or group.joining
    return all(site in gone for site in holders)


def by_domain(
    sites: Sequence[SiteId], domains: Mapping[SiteId, Domain], kind: str
) -> dict[str, list[SiteId]]:
    """The sites of each failure domain of one kind."""
    found: dict[str, list[SiteId]] = {}
    for site in sites:
        if site in domains:
            found.setdefault(getattr(domains[site], kind), []).append(site)
    return found


# --- which stages may share a failure domain ----------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Rule:
    """How many stages of each stretch a failure domain may have tasks of."""

    limits: tuple[tuple[frozenset[StageId], int], ...]

    def excess(self, held: Collection[StageId]) -> int:
        """By how many stages these are too many."""
        return sum(max(0, len(way.intersection(held)) - limit) for way, limit in self.limits)


def _rule(ways: Sequence[Stretch], at_once: int) -> _Rule:
    """The rule under which the loss of `at_once` failure domains leaves a stage of each stretch. If
    a stretch is too short for that, each domain has one of its stages."""
    return _Rule(tuple((frozenset(w), max(1, (len(w) - 1) // at_once)) for w in ways))


def domains_needed(shape: Shape, at_once: int = 1) -> int:
    """How many failure domains it takes so that the loss of so many of them does not end the
    flow."""
    ways = stretches(shape)
    stages = sorted({stage for way in ways for stage in way})
    rule = _rule(ways, at_once)
    count = 1
    while count < len(stages) and _divided(stages, rule, count) is None:
        count += 1
    return count


def separated(
    shape: Shape, ring: Sequence[SiteId], domains: Mapping[SiteId, Domain]
) -> dict[StageId, list[SiteId]]:
    """The sites that stages of stretches may use, in the order of the ring; empty if none need to
    be kept apart.

    If there are enough failure domains, the loss of any k of them leaves a stage of each stretch of
    k + 1 stages. With fewer, the loss of any k - 1 does, and so on. If the loss of one may end the
    flow in any case, as few stages share a domain as a greedy search finds.
    """
    ways = stretches(shape)
    if not ways:
        return {}
    stages = sorted({stage for way in ways for stage in way})
    kind = max((shape.stages[s].guard.failure_domain for s in stages), key=DOMAINS.index)
    # The largest first: what is left over is divided among the small ones.
    units = sorted(by_domain(ring, domains, kind).values(), key=len, reverse=True)
    for at_once in range(max(len(way) for way in ways) - 1, 0, -1):
        rule = _rule(ways, at_once)
        held = _divided(stages, rule, len(units))
        if held is not None:
            break
    else:
        held = _crowded(stages, rule, len(units))
    _fill(held, stages, rule, units)
    allowed = {
        stage: {s for some, unit in zip(held, units, strict=True) if stage in some for s in unit}
        for stage in stages
    }
    return {stage: [s for s in ring if s in allowed[stage]] for stage in stages}


def _divided(stages: Sequence[StageId], rule: _Rule, count: int) -> list[set[StageId]] | None:
    """The stages divided among so many failure domains; None if the rule does not allow it. This is
    the colouring of a graph: the search goes through all divisions."""
    held: list[set[StageId]] = [set() for _ in range(count)]
    steps = 0

    def divide(n: int) -> bool:
        nonlocal steps
        steps += 1
        if n == len(stages):
            return True
        unused = [h for h in held if not h][:1]  # they are all alike
        for some in [*unused, *(h for h in held if h)]:
            some.add(stages[n])
            if steps < SEARCH_STEPS_MAX and not rule.excess(some) and divide(n + 1):
                return True
            some.remove(stages[n])
        return False

    return held if divide(0) else None


def _crowded(stages: Sequence[StageId], rule: _Rule, count: int) -> list[set[StageId]]:
    """The stages divided among too few failure domains: each goes where it does the least harm."""
    held: list[set[StageId]] = [set() for _ in range(count)]
    for stage in stages:
        min(held, key=lambda h: (rule.excess({*h, stage}), len(h))).add(stage)
    return held


def _fill(
    held: list[set[StageId]],
    stages: Sequence[StageId],
    rule: _Rule,
    units: Sequence[Sequence[SiteId]],
) -> None:
    """Give every failure domain as many stages as the rule allows, first those with the fewest
    sites, so that all sites have something to do and stages get about the same number of sites."""
    sites = {s: sum(len(u) for h, u in zip(held, units, strict=True) if s in h) for s in stages}
    for some, unit in zip(held, units, strict=True):
        before = rule.excess(some)
        for stage in sorted(stages, key=lambda s: sites[s]):
            if stage not in some and rule.excess({*some, stage}) <= before:
                some.add(stage)
                sites[stage] += len(unit)


# --- where a replica may join -------------------------------------------------------------------


class Neighbours:
    """What a new replica would share a failure domain with."""

    def __init__(self, view: View, shape: Shape, domains: Mapping[SiteId, Domain]) -> None:
        self._shape, self._domains = shape, domains
        self._ways = stretches(shape)
        self._strict = _rule(self._ways, max((len(w) - 1 for w in self._ways), default=1))
        self._plain = _rule(self._ways, 1)
        self._held: dict[SiteId, set[StageId]] = {}
        for task in view.tasks() if self._ways else ():
            group = view.group(task)
            for site in (*group.replicas, *group.joining):
                self.add(task, site)

    def add(self, task: TaskId, site: SiteId) -> None:
        """A replica of this task is there, or joins there."""
        self._held.setdefault(site, set()).add(task[0])

    def harm(self, task: TaskId, site: SiteId) -> tuple[int, int]:
        """By how much a replica at `site` would break the rule that the flow survives the loss of a
        failure domain, and the rule for as many at once as its protection allows."""
        if not any(task[0] in way for way in self._ways):
            return 0, 0
        kind = self._shape.stages[task[0]].guard.failure_domain
        domain = getattr(self._domains[site], kind)
        near = by_domain([*self._held], self._domains, kind).get(domain, ())
        others = {stage for s in near for stage in self._held[s]} - {task[0]}
        plain, strict = (
            rule.excess({*others, task[0]}) - rule.excess(others)
            for rule in (self._plain, self._strict)
        )
        return plain, strict
