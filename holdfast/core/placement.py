"""Which sites get which replicas: functions from a view and what is known of the sites to a view.

`place` makes the first view. `substituted` puts new sites in the place of those that were lost
before the flow started. `assign` chooses sites for replicas that are missing. Nothing here keeps
state or sends anything: the controller decides when to ask, and commits the result.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Domain, PartitionGroup, Shape, StageShape, View
from holdfast.core.protection import DOMAINS
from holdfast.core.separation import Neighbours, exposures, separated
from holdfast.errors import HostError


def place(
    shape: Shape,
    sites: Sequence[SiteId],
    domains: Mapping[SiteId, Domain],
    groups_per_site: int = 1,
) -> View:
    """The first view: contiguous runs of each stage's partitions, chained over the sites. Each site
    leads `groups_per_site` runs of a keyed stage: a run is what can be moved.

    Replicas follow one another around the ring of sites (chained declustering). The ring is ordered
    so that neighbours share as few failure domains as possible. A stage with fewer partitions than
    sites begins where the one before ended, so that such stages do not all share the first site.
    Stages that must not be lost together have sites of their own, as far as there are enough: see
    `holdfast.core.separation`.
    """
    if not sites:
        raise HostError("a flow needs at least one site")
    ring = _ring(sites, domains)
    if shape.granularity != "partition":
        return _place_mirrors(shape, ring, domains)
    placed, turn = [], 0
    own = separated(shape, ring, domains)
    for stage in shape.stages:
        usable = own.get(stage.id, ring)
        groups = len(usable) * (groups_per_site if stage.kind == "keyed" else 1)
        count = min(stage.partitions, groups)
        placed.append(_place_stage(stage, usable, turn, domains, count))
        if count < len(usable):
            turn += count
    return View(0, 0, tuple(sites), tuple(placed))


def _place_stage(
    stage: StageShape,
    ring: Sequence[SiteId],
    turn: int,
    domains: Mapping[SiteId, Domain],
    count: int,
) -> tuple[PartitionGroup, ...]:
    """This number of partition groups of a stage, from the site at `turn` on."""
    guard = stage.guard
    bounds = _bounds(stage.partitions, count)
    groups = []
    for c in range(count):
        at = (turn + c) % len(ring)
        replicas = [ring[at]]
        while len(replicas) < guard.wanted:
            after = [ring[(at + k) % len(ring)] for k in range(1, len(ring))]
            replicas.append(_next_replica(stage, replicas, after, domains))
        both = (tuple(replicas[: guard.replicas]), tuple(replicas[guard.replicas :]))
        groups.append(PartitionGroup(bounds[c], bounds[c + 1], both[0], standbys=both[1]))
    return tuple(groups)


def mirror_domain(shape: Shape) -> str:
    """The failure domain that no two mirrors may share: the widest that a stage names."""
    return max((s.guard.failure_domain for s in shape.stages), key=DOMAINS.index)


def mirrors(
    shape: Shape, ring: Sequence[SiteId], domains: Mapping[SiteId, Domain]
) -> tuple[list[SiteId], list[SiteId]]:
    """The two sets of sites that each hold one replica of everything: one site each for dataflow
    pairs, up to half of the sites each for cluster pairs.

    A mirror is lost with any of its sites. So no failure domain has sites of both, or its loss
    would end the flow; the largest domains are dealt first, each to the smaller mirror.
    """
    decks: dict[str, list[SiteId]] = {}
    for site in ring:
        decks.setdefault(getattr(domains[site], mirror_domain(shape)), []).append(site)
    both: tuple[list[SiteId], list[SiteId]] = ([], [])
    for deck in sorted(decks.values(), key=len, reverse=True):
        min(both, key=len).extend(deck)
    count = min(1 if shape.granularity == "dataflow" else len(ring), *map(len, both))
    return both[0][:count], both[1][:count]


def _bounds(partitions: int, groups: int) -> list[int]:
    """Where contiguous runs of about the same length begin, and where the last one ends."""
    return [-(-partitions * c // groups) for c in range(groups + 1)]


def _place_mirrors(shape: Shape, ring: Sequence[SiteId], domains: Mapping[SiteId, Domain]) -> View:
    first, second = mirrors(shape, ring, domains)
    if not second:
        widest = max(shape.stages, key=lambda s: DOMAINS.index(s.guard.failure_domain))
        _next_replica(widest, ring[:1], ring[1:], domains)  # raises with the reason
    placed = []
    for stage in shape.stages:
        count = min(stage.partitions, len(first))
        bounds = _bounds(stage.partitions, count)
        placed.append(
            tuple(
                PartitionGroup(bounds[c], bounds[c + 1], (first[c], second[c]))
                for c in range(count)
            )
        )
    return View(0, 0, tuple(sorted(ring)), tuple(placed))


def may_join(
    stage: StageShape, replicas: Iterable[SiteId], site: SiteId, domains: Mapping[SiteId, Domain]
) -> bool:
    """Whether a replica at `site` shares no failure domain with these, as the stage demands."""
    domain = stage.guard.failure_domain
    return all(
        site != other and getattr(domains[site], domain) != getattr(domains[other], domain)
        for other in replicas
    )


def closeness(
    replicas: Iterable[SiteId], site: SiteId, domains: Mapping[SiteId, Domain]
) -> tuple[bool, ...]:
    """Which failure domains `site` shares with the closest of these; less is better."""
    shared = [domains[site].shared(domains[other]) for other in replicas]
    return max(shared, default=(False,) * len(DOMAINS))


def _next_replica(
    stage: StageShape,
    replicas: Sequence[SiteId],
    candidates: Sequence[SiteId],
    domains: Mapping[SiteId, Domain],
) -> SiteId:
    fit = [s for s in candidates if may_join(stage, replicas, s, domains)]
    if not fit:
        domain = stage.guard.failure_domain
        found = {getattr(domains[s], domain) for s in [*replicas, *candidates]}
        raise HostError(
            f"stage {stage.name!r} wants {stage.guard.wanted} replicas of each partition, no two "
            f"in one {domain}, and the sites are in only {len(found)}: {', '.join(sorted(found))}",
            hint=f"start more sites, spread them over more than one {domain}, or allow replicas "
            f"to share it with pairs(failure_domain=...), one of {', '.join(DOMAINS)}",
        )
    return min(
        fit, key=lambda s: closeness(replicas, s, domains)
    )  # the first of equals is the next in the ring


def _ring(sites: Sequence[SiteId], domains: Mapping[SiteId, Domain]) -> list[SiteId]:
    """The sites in an order in which neighbours are in different applications, hosts, executors."""

    def dealt(some: list[SiteId], levels: tuple[str, ...]) -> list[SiteId]:
        if not levels:
            return some
        groups: dict[str, list[SiteId]] = {}
        for site in some:
            groups.setdefault(getattr(domains[site], levels[0]), []).append(site)
        decks = [dealt(g, levels[1:]) for g in groups.values()]
        longest = max(len(d) for d in decks)
        return [d[i] for i in range(longest) for d in decks if i < len(d)]

    return dealt(sorted(sites), tuple(reversed(DOMAINS)))


def substituted(
    view: View, shape: Shape, sites: Sequence[SiteId], domains: Mapping[SiteId, Domain]
) -> View | None:
    """`view`, with each of its members replaced by the site at the same position of `sites`; None
    if two replicas would share a failure domain, or stages that must not be lost together.

    Before the flow starts, members have already opened the sinks and sequencers that an earlier
    view gave them. No view takes these from a site that lives, so only what lost sites had moves.
    """
    if len(view.members) != len(sites):
        return None
    new = dict(zip(view.members, sites, strict=True))

    def moved(group: PartitionGroup) -> PartitionGroup:
        replicas, standbys = (
            tuple(new[s] for s in some) for some in (group.replicas, group.standbys)
        )
        return replace(group, replicas=replicas, standbys=standbys)

    groups = tuple(tuple(moved(group) for group in stage) for stage in view.groups)
    view = replace(view, members=tuple(sites), groups=groups)
    fits = all(
        may_join(shape.stages[u[0]], view.group(u).all[:n], site, domains)
        for u in view.tasks()
        for n, site in enumerate(view.group(u).all)
    )
    return view if fits and not exposures(view, shape, domains) else None


# --- replicas that are missing ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Assignment:
    """Where new replicas join."""

    joiners: dict[TaskId, SiteId]
    members: tuple[SiteId, ...]
    """The sites that must be members for it."""
    impossible: dict[TaskId, str] = field(default_factory=dict)
    """The tasks that no site can hold another replica of unless more sites come, and why."""
    waits: bool = False
    """Whether a task waits for a site that is being launched."""

    def view(self, before: View) -> View:
        """The view after `before`, in which these replicas join."""
        number = before.number + 1
        groups = {u: before.group(u).joined_by(s, number) for u, s in self.joiners.items()}
        return before.changed(groups, self.members)


@dataclass(frozen=True, slots=True)
class Candidates:
    """The sites that a new replica can join at."""

    domains: Mapping[SiteId, Domain]
    """By registered site."""
    sites_planned: int
    """How many sites the flow is meant to run on."""
    launching: bool
    """Whether more sites are being launched."""
    await_launch: bool
    """Whether it is still worth waiting for those."""
    closed: Collection[SiteId] = ()
    """Registered sites that a replica joins at only if there is no other, and none is waited
    for."""
    failed: Mapping[TaskId, Collection[SiteId]] = field(default_factory=dict)
    """By task: the sites at which a replica of it has failed to join. Others are tried first."""


def missing(view: View, shape: Shape) -> list[TaskId]:
    """The tasks with fewer replicas and standbys than wanted, joining ones included, and without
    those that leave."""
    return [u for u in view.tasks() if len(view.group(u).staying) < shape.stages[u[0]].guard.wanted]


def is_complete(view: View, shape: Shape, task: TaskId) -> bool:
    """Whether a task has all its replicas and standbys, joining ones not included."""
    group, guard = view.group(task), shape.stages[task[0]].guard
    return len(group.replicas) >= guard.replicas and len(group.standbys) >= guard.standbys


def load_of(view: View, sites: Iterable[SiteId]) -> dict[SiteId, int]:
    """By site: how many tasks it holds or is about to hold."""
    return {s: len(view.tasks_at(s)) for s in sites}


def assign(view: View, shape: Shape, tasks: Sequence[TaskId], candidates: Candidates) -> Assignment:
    """Choose sites for another replica of each of these tasks, of a stage only one at a time.

    A task without a replica is rebuilt. It does not wait for others of its stage, but at first it
    is rebuilt at one site only: further replicas are copied from that one. It waits for a site that
    is being launched only if all others have tasks that must not be lost together with it.
    """
    busy = {u[0] for u in view.tasks() if view.group(u).joining}
    load, near = load_of(view, candidates.domains), Neighbours(view, shape, candidates.domains)
    fair = sum(shape.stages[u[0]].guard.wanted for u in view.tasks()) // max(
        1, candidates.sites_planned
    )
    joiners: dict[TaskId, SiteId] = {}
    impossible: dict[TaskId, str] = {}
    waits = False
    for task in tasks:
        group = view.group(task)
        begun = task[0] in busy if group.replicas else bool(group.joining)
        if begun:
            continue
        stage = shape.stages[task[0]]
        fit = _fitting(stage, group, load, candidates)
        if not fit:
            if not candidates.launching:
                domain = stage.guard.failure_domain
                impossible[task] = f"no site is in another {domain} than its replicas"
            continue
        harm = {s: near.harm(task, s) for s in fit}
        far = {s: closeness(group.staying, s, candidates.domains) for s in fit}
        failed = candidates.failed.get(task, ())
        best = min(fit, key=lambda s: (*harm[s], s in failed, load[s], far[s], s))
        exposed = harm[best][0] > 0 or (group.all and load[best] >= fair)
        if exposed and candidates.await_launch:
            waits = True
            continue  # a site without tasks is about to register
        joiners[task] = best
        load[best] += 1
        near.add(task, best)
        busy.add(task[0])
    return Assignment(joiners, tuple(joiners.values()), impossible, waits)


def _fitting(
    stage: StageShape, group: PartitionGroup, sites: Iterable[SiteId], candidates: Candidates
) -> list[SiteId]:
    """The sites at which a further replica of a task can join."""
    fit = [
        s
        for s in sites
        if s not in group.leaving and may_join(stage, group.staying, s, candidates.domains)
    ]
    open_sites = [s for s in fit if s not in candidates.closed]
    return open_sites if open_sites or candidates.await_launch else fit
