"""What the machines know of a flow: its shape, and where its partitions are.

`Shape` is the plan reduced to numbers. A `View` says which sites take part and which of them hold
the replicas of each partition. Both are plain data that travel between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from holdfast.core.ids import ExchangeId, GroupId, SiteId, StageId, TaskId
from holdfast.core.protection import DOMAINS, NO_PROTECTION, ProtectionSpec
from holdfast.errors import HostError


@dataclass(frozen=True, slots=True)
class StageShape:
    """A stage: its exchanges, how many partitions it has, and how it merges its inputs."""

    id: StageId
    name: str
    kind: str
    partitions: int
    inputs: tuple[ExchangeId, ...] = ()
    outputs: tuple[ExchangeId, ...] = ()
    ordered: bool = True
    guard: ProtectionSpec = NO_PROTECTION


@dataclass(frozen=True, slots=True)
class Shape:
    stages: tuple[StageShape, ...]
    producer_of: tuple[StageId, ...]
    """By exchange: the stage that feeds it."""
    consumer_of: tuple[StageId, ...]
    """By exchange: the stage that it feeds."""
    granularity: str = "partition"
    """What is lost with a site, and rebuilt: see `mirrors`."""

    @property
    def levels(self) -> int:
        """How many levels of acknowledgement there are."""
        return max(s.guard.level for s in self.stages)

    @property
    def guards(self) -> tuple[ProtectionSpec, ...]:
        """By stage."""
        return tuple(s.guard for s in self.stages)

    def under(self, view: View) -> Shape:
        """With the protection that the view says."""
        return self if view.guards in ((), self.guards) else self.guarded(view.guards)

    def guarded(self, guards: tuple[ProtectionSpec, ...]) -> Shape:
        both = zip(self.stages, guards, strict=True)
        return replace(self, stages=tuple(replace(s, guard=g) for s, g in both))


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a site really is; what can fail together with it."""

    process: str
    executor: str
    host: str
    application: str

    def shared(self, other: Domain) -> tuple[bool, ...]:
        """Which domains two sites have in common, the widest first."""
        return tuple(getattr(self, d) == getattr(other, d) for d in reversed(DOMAINS))


@dataclass(frozen=True, slots=True)
class PartitionGroup:
    """Partitions ``[first, end)`` of a stage. They live on the same sites and advance together, so
    that an operator call takes all of them at once."""

    first: int
    end: int
    replicas: tuple[SiteId, ...]
    """The sites that compute it. The first one leads: it announces a source's rows, and writes a
    sink's."""
    joining: tuple[SiteId, ...] = ()
    """The sites to which a replica is being made."""
    joined_view: tuple[tuple[SiteId, int], ...] = ()
    """The number of the view in which a replica began to join. It tells a replica from one that was
    at the same site before; those of the first view began with 0."""
    standbys: tuple[SiteId, ...] = ()
    """The sites that have a checkpoint of it, and will go on from there when no replica is left."""

    @property
    def all(self) -> tuple[SiteId, ...]:
        return self.replicas + self.joining + self.standbys

    def led_by(self, site: SiteId) -> bool:
        return self.replicas[:1] == (site,)

    def joined_view_of(self, site: SiteId) -> int:
        return dict(self.joined_view).get(site, 0)

    def joined_by(self, site: SiteId, number: int) -> PartitionGroup:
        """With a new replica at `site`, from the view with this number on."""
        return replace(
            self, joining=(*self.joining, site), joined_view=(*self.joined_view, (site, number))
        )

    def installed_at(self, site: SiteId, replicas: int) -> PartitionGroup:
        """The state is in place at `site`, which joined: it computes, or there are enough that do
        and it is a standby."""
        rest = tuple(s for s in self.joining if s != site)
        if len(self.replicas) < replicas:
            return replace(self, joining=rest, replicas=(*self.replicas, site))
        return replace(self, joining=rest, standbys=(*self.standbys, site))

    def without(self, gone: Iterable[SiteId]) -> PartitionGroup:
        """What is left; with no replica that computes, a standby goes on."""
        left = set(self.all) - set(gone)
        replicas = tuple(s for s in self.replicas if s in left)
        standbys = tuple(s for s in self.standbys if s in left)
        stepped_in = 0 if replicas else 1
        return replace(
            self,
            replicas=replicas + standbys[:stepped_in],
            joining=tuple(s for s in self.joining if s in left),
            standbys=standbys[stepped_in:],
            joined_view=tuple(pair for pair in self.joined_view if pair[0] in left),
        )

    def fitted(self, guard: ProtectionSpec, number: int) -> PartitionGroup:
        """With as many replicas as a stage shall have from the view with this number on, and as
        many that are standbys, as far as they are there. One that has computed and shall stand by
        gets its state again: it is ahead of what it would be given."""
        if not self.replicas:
            return self
        more = max(0, guard.replicas - len(self.replicas))
        replicas, standbys = self.replicas + self.standbys[:more], self.standbys[more:]
        surplus, standbys = replicas[guard.replicas :], standbys[: guard.standbys]
        kept = {*replicas[: guard.replicas], *standbys}
        joined_view = tuple(pair for pair in self.joined_view if pair[0] in kept)
        fitted = PartitionGroup(
            self.first, self.end, replicas[: guard.replicas], (), joined_view, standbys
        )
        for site in surplus[: guard.standbys - len(standbys)]:
            fitted = fitted.joined_by(site, number)
        return fitted

    @property
    def donor(self) -> SiteId:
        """The replica that new ones are made from: the one that has least else to do."""
        return self.replicas[-1]


@dataclass(frozen=True, slots=True)
class View:
    """Who takes part, and who holds what. A later one (by term, then number) replaces it."""

    term: int
    number: int
    members: tuple[SiteId, ...]
    groups: tuple[tuple[PartitionGroup, ...], ...]
    """By stage."""
    guards: tuple[ProtectionSpec, ...] = ()
    """How each is protected, if not as planned."""
    aims: tuple[ProtectionSpec, ...] = ()
    """How each shall be, if that is not how it is."""

    def __str__(self) -> str:
        """``view 0.3 of 0 1 4: 01 | 01 1+4``: the replicas of each partition group, stage by
        stage."""
        stages = [" ".join(_sites(c) for c in stage) for stage in self.groups]
        members = " ".join(str(s) for s in self.members)
        return f"view {self.term}.{self.number} of {members}: {' | '.join(stages)}"

    @property
    def rank(self) -> int:
        """A later view has a higher one."""
        return (self.term << 32) + self.number

    def replaces(self, other: View | None) -> bool:
        """Whether this view is the later one."""
        return other is None or self.rank > other.rank

    @property
    def sequencers(self) -> tuple[SiteId, ...]:
        """The sequencer lives with the first source's first partition group, so whatever failures
        leave a replica of every partition leave one of the sequencer."""
        return self.groups[0][0].replicas

    def group(self, task: TaskId) -> PartitionGroup:
        return self.groups[task[0]][task[1]]

    def tasks(self) -> list[TaskId]:
        return [
            (StageId(s), GroupId(c))
            for s, groups in enumerate(self.groups)
            for c in range(len(groups))
        ]

    def tasks_at(self, site: SiteId) -> list[TaskId]:
        """What `site` holds or is about to hold."""
        return [u for u in self.tasks() if site in self.group(u).all]

    def bare(self) -> list[TaskId]:
        """The tasks of which no replica is left."""
        return [u for u in self.tasks() if not self.group(u).replicas]

    def without(self, gone: Iterable[SiteId]) -> View:
        """The next view, in which these sites take no part."""
        gone = set(gone)
        groups = tuple(tuple(c.without(gone) for c in stage) for stage in self.groups)
        members = tuple(s for s in self.members if s not in gone)
        return replace(self, number=self.number + 1, members=members, groups=groups)

    def changed(
        self, groups: Mapping[TaskId, PartitionGroup], members: Iterable[SiteId] = ()
    ) -> View:
        """The next view, with these partition groups replaced and these sites added."""
        stages = [list(stage) for stage in self.groups]
        for (stage, number), group in groups.items():
            stages[stage][number] = group
        added = tuple(sorted({s for s in members if s not in self.members}))
        placed = tuple(tuple(stage) for stage in stages)
        members = self.members + added
        return replace(self, number=self.number + 1, members=members, groups=placed)

    def guarded(
        self,
        before: tuple[ProtectionSpec, ...],
        guards: tuple[ProtectionSpec, ...],
        aims: tuple[ProtectionSpec, ...] = (),
    ) -> View:
        """The next view, in which stages are protected otherwise than before."""
        number = self.number + 1
        fitted = tuple(
            tuple(c.fitted(new, number) for c in stage) if old.counts != new.counts else stage
            for stage, old, new in zip(self.groups, before, guards, strict=True)
        )
        return replace(self, number=self.number + 1, groups=fitted, guards=guards, aims=aims)


def _sites(group: PartitionGroup) -> str:
    joining = "".join(f"+{s}" for s in group.joining)
    standbys = "".join(f"~{s}" for s in group.standbys)
    return ",".join(str(s) for s in group.replicas) + joining + standbys


def producing(
    view: View, shape: Shape, stage: StageId
) -> dict[tuple[ExchangeId, GroupId, SiteId], None]:
    """All replicas of a stage's producers; none while a producer has no replica itself."""
    found: dict[tuple[ExchangeId, GroupId, SiteId], None] = {}
    for exchange in shape.stages[stage].inputs:
        for i, group in enumerate(view.groups[shape.producer_of[exchange]]):
            if not group.replicas:
                return {}
            found |= {(exchange, GroupId(i), site): None for site in group.replicas}
    return found


BySender = dict[GroupId, tuple[SiteId, ...]]


def senders(view: View, shape: Shape, exchange: ExchangeId) -> tuple[BySender, BySender]:
    """By producer of an exchange: the replicas that its frames can be taken from, and others that
    must be told what was received. A follower has nothing to send before it leads."""
    stage = shape.producer_of[exchange]
    groups = {GroupId(i): c for i, c in enumerate(view.groups[stage])}
    if shape.stages[stage].guard.followers:
        others = {i: c.replicas[1:] + c.joining for i, c in groups.items()}
        return {i: c.replicas[:1] for i, c in groups.items()}, others
    return {i: c.replicas for i, c in groups.items()}, {i: c.joining for i, c in groups.items()}


def meant_behind(
    view: View, shape: Shape, exchange: ExchangeId
) -> dict[GroupId, tuple[SiteId, ...]]:
    """Of an exchange's consumers, the replicas that may be far behind. One that is rebuilt from
    what is kept is behind at first, and removing it would not free any of that."""
    stage = shape.consumer_of[exchange]
    guard = shape.stages[stage].guard

    def some(group: PartitionGroup) -> tuple[SiteId, ...]:
        followers = group.replicas[1:] if guard.followers else ()
        return group.all if guard.rebuild_level else group.standbys + followers

    return {GroupId(j): some(c) for j, c in enumerate(view.groups[stage])}


def partitions_of(view: View, tasks: Iterable[TaskId], shape: Shape) -> str:
    """``'stats': 0-7; 'out': 0`` for an error message."""
    by_stage: dict[str, list[int]] = {}
    for task in tasks:
        group = view.group(task)
        found = by_stage.setdefault(shape.stages[task[0]].name, [])
        found.extend(range(group.first, group.end))
    return "; ".join(f"{name!r}: {spans(sorted(found))}" for name, found in by_stage.items())


def spans(numbers: Sequence[int]) -> str:
    """``[0, 1, 2, 5]`` as ``0-2, 5``."""
    found: list[list[int]] = []
    for n in numbers:
        if found and found[-1][1] == n - 1:
            found[-1][1] = n
        else:
            found.append([n, n])
    return ", ".join(str(a) if a == b else f"{a}-{b}" for a, b in found)


def place(shape: Shape, sites: Sequence[SiteId], domains: Mapping[SiteId, Domain]) -> View:
    """The first view: contiguous runs of each stage's partitions, chained over the sites.

    Replicas follow one another around the ring of sites (chained declustering), which is ordered so
    that neighbours share as little as possible. Stages with fewer partitions than sites begin where
    the one before ended, so that they do not all pile up on the first site.
    """
    if not sites:
        raise HostError("a flow needs at least one site")
    ring = _ring(sites, domains)
    if shape.granularity != "partition":
        return _place_mirrors(shape, ring, domains)
    placed, turn = [], 0
    for stage in shape.stages:
        count = min(stage.partitions, len(ring))
        bounds = _bounds(stage.partitions, count)
        groups = []
        for c in range(count):
            at = (turn + c) % len(ring)
            replicas = [ring[at]]
            guard = stage.guard
            while len(replicas) < guard.wanted:
                after = [ring[(at + k) % len(ring)] for k in range(1, len(ring))]
                replicas.append(_next_replica(stage, replicas, after, domains))
            both = (tuple(replicas[: guard.replicas]), tuple(replicas[guard.replicas :]))
            groups.append(PartitionGroup(bounds[c], bounds[c + 1], both[0], standbys=both[1]))
        if count < len(ring):
            turn += count
        placed.append(tuple(groups))
    return View(0, 0, tuple(sites), tuple(placed))


def mirrors(shape: Shape, ring: Sequence[SiteId]) -> tuple[list[SiteId], list[SiteId]]:
    """The two sets of sites that hold one replica of everything each: one site a set for dataflow
    pairs, half of them for cluster pairs."""
    count = 1 if shape.granularity == "dataflow" else len(ring) // 2
    return list(ring[0 : 2 * count : 2]), list(ring[1 : 2 * count : 2])


def _bounds(partitions: int, groups: int) -> list[int]:
    """Where contiguous runs of about the same length begin, and where the last one ends."""
    return [-(-partitions * c // groups) for c in range(groups + 1)]


def _place_mirrors(shape: Shape, ring: Sequence[SiteId], domains: Mapping[SiteId, Domain]) -> View:
    first, second = mirrors(shape, ring)
    placed = []
    for stage in shape.stages:
        if not first or not second or not may_join(stage, first[:1], second[0], domains):
            _next_replica(stage, ring[:1], ring[1:], domains)  # says what is wrong
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
    """Whether a replica at `site` is apart from these, as the stage wants it."""
    apart = stage.guard.failure_domain
    return all(
        site != other and getattr(domains[site], apart) != getattr(domains[other], apart)
        for other in replicas
    )


def closeness(
    replicas: Iterable[SiteId], site: SiteId, domains: Mapping[SiteId, Domain]
) -> tuple[bool, ...]:
    """How much `site` shares with these; less is better."""
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
        apart = stage.guard.failure_domain
        found = {getattr(domains[s], apart) for s in [*replicas, *candidates]}
        raise HostError(
            f"stage {stage.name!r} wants {stage.guard.wanted} replicas of each partition, no two "
            "in "
            f"one {apart}, and the sites are in only {len(found)}: {', '.join(sorted(found))}",
            hint=f"start more sites, spread them over more than one {apart}, or allow replicas "
            f"to share it with pairs(failure_domain=...), one of {', '.join(DOMAINS)}",
        )
    return min(fit, key=lambda s: closeness(replicas, s, domains))  # of equals the next in the ring


def _ring(sites: Sequence[SiteId], domains: Mapping[SiteId, Domain]) -> list[SiteId]:
    """The sites dealt out so that neighbours are in different applications, hosts, executors."""

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
