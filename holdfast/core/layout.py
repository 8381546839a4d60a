"""What the machines know of a flow: its shape, and where its partitions are.

`Shape` is the plan reduced to numbers. A `View` has the sites that are members and, for each
partition, the sites that hold its replicas. Both are plain data that travel between processes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from holdfast.core.ids import ExchangeId, GroupId, SiteId, StageId, TaskId
from holdfast.core.protection import DOMAINS, NO_PROTECTION, ProtectionSpec


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
    """The stages of a flow and the exchanges between them."""

    stages: tuple[StageShape, ...]
    producer_of: tuple[StageId, ...]
    """By exchange: the stage that produces its bundles."""
    consumer_of: tuple[StageId, ...]
    """By exchange: the stage that consumes its bundles."""
    granularity: str = "partition"
    """What is lost with a site, and rebuilt: see `holdfast.core.mirrors`."""

    @property
    def levels(self) -> int:
        """How many levels of acknowledgement there are."""
        return max(s.guard.level for s in self.stages)

    @property
    def guards(self) -> tuple[ProtectionSpec, ...]:
        """By stage: its protection."""
        return tuple(s.guard for s in self.stages)

    def under(self, view: View) -> Shape:
        """This shape with the protection that the view has."""
        return self if view.guards in ((), self.guards) else self.guarded(view.guards)

    def guarded(self, guards: tuple[ProtectionSpec, ...]) -> Shape:
        """This shape with this protection, by stage."""
        both = zip(self.stages, guards, strict=True)
        return replace(self, stages=tuple(replace(s, guard=g) for s, g in both))


@dataclass(frozen=True, slots=True)
class Domain:
    """Where a site runs: its failure domains, from the narrowest to the widest."""

    process: str
    executor: str
    host: str
    application: str

    def shared(self, other: Domain) -> tuple[bool, ...]:
        """By domain, the widest first: whether two sites share it."""
        return tuple(getattr(self, d) == getattr(other, d) for d in reversed(DOMAINS))


@dataclass(frozen=True, slots=True)
class PartitionGroup:
    """Partitions ``[first, end)`` of a stage. They are on the same sites and advance together, so
    that one operator call processes all of them."""

    first: int
    end: int
    replicas: tuple[SiteId, ...]
    """The sites that compute. The first one leads: it announces a source's rows and writes a
    sink's."""
    joining: tuple[SiteId, ...] = ()
    """The sites at which a replica joins."""
    joined_view: tuple[tuple[SiteId, int], ...] = ()
    """By site: the number of the view in which its replica began to join. It distinguishes a
    replica from an earlier one at the same site. Replicas of the first view have 0."""
    standbys: tuple[SiteId, ...] = ()
    """The sites that have a checkpoint, and compute from there when no replica is left."""
    moving: tuple[tuple[SiteId, SiteId], ...] = ()
    """A replica or standby that leaves, and the one that takes its place: see
    `holdfast.core.moves`. At most one at a time."""

    @property
    def all(self) -> tuple[SiteId, ...]:
        """All sites that hold something of it, or are about to."""
        return self.replicas + self.joining + self.standbys

    @property
    def leaving(self) -> tuple[SiteId, ...]:
        """Those that leave as soon as others have taken their place."""
        return tuple(source for source, _ in self.moving)

    @property
    def staying(self) -> tuple[SiteId, ...]:
        """All sites but those that leave."""
        return tuple(s for s in self.all if s not in self.leaving)

    def lacks_replica(self, replicas: int) -> bool:
        """Whether fewer sites than this compute, apart from those that leave."""
        return len([s for s in self.replicas if s not in self.leaving]) < replicas

    def led_by(self, site: SiteId) -> bool:
        return self.replicas[:1] == (site,)

    def joined_view_of(self, site: SiteId) -> int:
        return dict(self.joined_view).get(site, 0)

    def joined_by(self, site: SiteId, number: int) -> PartitionGroup:
        """This group with a replica that joins at `site` in the view of this number."""
        return replace(
            self, joining=(*self.joining, site), joined_view=(*self.joined_view, (site, number))
        )

    def installed_at(self, site: SiteId, replicas: int) -> PartitionGroup:
        """This group after the state is in place at `site`, which joined. The site computes; if
        `replicas` others do so already, and stay, it is a standby."""
        rest = tuple(s for s in self.joining if s != site)
        if self.lacks_replica(replicas):
            return replace(self, joining=rest, replicas=(*self.replicas, site))
        return replace(self, joining=rest, standbys=(*self.standbys, site))

    def without(self, gone: Iterable[SiteId]) -> PartitionGroup:
        """This group without these sites. If no replica is left, a standby computes. A move from or
        to one of the sites is over."""
        left = set(self.all) - set(gone)
        replicas = tuple(s for s in self.replicas if s in left)
        standbys = tuple(s for s in self.standbys if s in left)
        promoted = 0 if replicas else 1
        return replace(
            self,
            replicas=replicas + standbys[:promoted],
            joining=tuple(s for s in self.joining if s in left),
            standbys=standbys[promoted:],
            joined_view=tuple(pair for pair in self.joined_view if pair[0] in left),
            moving=tuple(move for move in self.moving if left.issuperset(move)),
        )

    def fitted(self, guard: ProtectionSpec, number: int) -> PartitionGroup:
        """This group with the numbers of replicas and standbys that a stage has from the view of
        this number on, as far as they are there. A replica that has computed and becomes a standby
        joins again: its state is ahead of the checkpoints that it would get."""
        if not self.replicas:
            return self
        wanted = guard.replicas + len(self.moving)  # one that leaves is not one that is wanted
        more = max(0, wanted - len(self.replicas))
        replicas, standbys = self.replicas + self.standbys[:more], self.standbys[more:]
        surplus, standbys = replicas[wanted:], standbys[: guard.standbys]
        kept = {*replicas[:wanted], *standbys}
        joined_view = tuple(pair for pair in self.joined_view if pair[0] in kept)
        moving = tuple(move for move in self.moving if kept.issuperset(move))
        fitted = PartitionGroup(
            self.first, self.end, replicas[:wanted], (), joined_view, standbys, moving
        )
        for site in surplus[: guard.standbys - len(standbys)]:
            fitted = fitted.joined_by(site, number)
        return fitted

    @property
    def donor(self) -> SiteId:
        """The replica that hands its state over to new ones: the last that stays, which does not
        lead unless it is the only one. One that leaves may do so because its site is overloaded."""
        staying = [s for s in self.replicas if s not in self.leaving]
        return (staying or self.replicas)[-1]


@dataclass(frozen=True, slots=True)
class View:
    """The members, and which of them hold what. A later view (by term, then number) replaces it."""

    term: int
    number: int
    members: tuple[SiteId, ...]
    groups: tuple[tuple[PartitionGroup, ...], ...]
    """By stage: its partition groups."""
    guards: tuple[ProtectionSpec, ...] = ()
    """By stage: its protection; empty if that is as planned."""
    aims: tuple[ProtectionSpec, ...] = ()
    """By stage: the protection that it changes to; empty if nothing changes."""
    emptying: tuple[SiteId, ...] = ()
    """The members that give up all that they hold, and leave the flow."""

    def __str__(self) -> str:
        """``view 0.3 of 0 1 4: 0,1 | 0,1 1+4``: the replicas of each partition group, stage by
        stage. ``+4``: it joins at site 4; ``~4``: a standby; ``-4``: it leaves. ``of 0 1 4-``: site
        4 is to be emptied."""
        stages = [" ".join(_sites(c) for c in stage) for stage in self.groups]
        members = " ".join(f"{s}-" if s in self.emptying else str(s) for s in self.members)
        return f"view {self.term}.{self.number} of {members}: {' | '.join(stages)}"

    @property
    def rank(self) -> int:
        """Orders views: a later one has a higher rank."""
        return (self.term << 32) + self.number

    def replaces(self, other: View | None) -> bool:
        """Whether this view is the later one."""
        return other is None or self.rank > other.rank

    @property
    def sequencers(self) -> tuple[SiteId, ...]:
        """The sites of the sequencer. It is with the first partition group of the first source, so
        failures that leave a replica of every partition leave one of the sequencer."""
        return self.groups[0][0].replicas

    def group(self, task: TaskId) -> PartitionGroup:
        return self.groups[task[0]][task[1]]

    def tasks(self) -> tuple[TaskId, ...]:
        return _tasks(tuple(map(len, self.groups)))

    def tasks_at(self, site: SiteId) -> list[TaskId]:
        """The tasks that `site` holds or is about to hold."""
        return [u for u in self.tasks() if site in self.group(u).all]

    def bare(self) -> list[TaskId]:
        """The tasks without a replica."""
        return [u for u in self.tasks() if not self.group(u).replicas]

    def without(self, gone: Iterable[SiteId]) -> View:
        """The next view, without these sites."""
        gone = set(gone)
        groups = tuple(tuple(c.without(gone) for c in stage) for stage in self.groups)
        members = tuple(s for s in self.members if s not in gone)
        emptying = tuple(s for s in self.emptying if s not in gone)
        return replace(
            self, number=self.number + 1, members=members, groups=groups, emptying=emptying
        )

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
        """The next view, with the protection `guards` instead of `before`, and `aims` to change
        to."""
        number = self.number + 1
        fitted = tuple(
            tuple(c.fitted(new, number) for c in stage) if old.counts != new.counts else stage
            for stage, old, new in zip(self.groups, before, guards, strict=True)
        )
        return replace(self, number=self.number + 1, groups=fitted, guards=guards, aims=aims)


@lru_cache(maxsize=64)
def _tasks(counts: tuple[int, ...]) -> tuple[TaskId, ...]:
    """The tasks of stages with these numbers of partition groups: the same in almost every view."""
    return tuple(
        (StageId(stage), GroupId(group))
        for stage, count in enumerate(counts)
        for group in range(count)
    )


def _sites(group: PartitionGroup) -> str:
    joining = "".join(f"+{s}" for s in group.joining)
    standbys = "".join(f"~{s}" for s in group.standbys)
    leaving = "".join(f"-{s}" for s in group.leaving)
    return ",".join(str(s) for s in group.replicas) + joining + standbys + leaving


def producing(
    view: View, shape: Shape, stage: StageId
) -> dict[tuple[ExchangeId, GroupId, SiteId], None]:
    """The replicas of a stage's producers, by (exchange, group, site); empty while a producer has
    no replica."""
    found: dict[tuple[ExchangeId, GroupId, SiteId], None] = {}
    for exchange in shape.stages[stage].inputs:
        for i, group in enumerate(view.groups[shape.producer_of[exchange]]):
            if not group.replicas:
                return {}
            found |= {(exchange, GroupId(i), site): None for site in group.replicas}
    return found


BySender = dict[GroupId, tuple[SiteId, ...]]


def senders(view: View, shape: Shape, exchange: ExchangeId) -> tuple[BySender, BySender]:
    """By producer of an exchange: the replicas that send its frames, and others that must learn
    what was received. A follower has nothing to send before it leads."""
    stage = shape.producer_of[exchange]
    groups = {GroupId(i): c for i, c in enumerate(view.groups[stage])}
    if shape.stages[stage].guard.followers:
        others = {i: c.replicas[1:] + c.joining for i, c in groups.items()}
        return {i: c.replicas[:1] for i, c in groups.items()}, others
    return {i: c.replicas for i, c in groups.items()}, {i: c.joining for i, c in groups.items()}


def meant_behind(
    view: View, shape: Shape, exchange: ExchangeId
) -> dict[GroupId, tuple[SiteId, ...]]:
    """By consumer of an exchange: the replicas that may be far behind. A replica that is rebuilt
    from what producers keep is behind at first, and removing it would free nothing of that."""
    stage = shape.consumer_of[exchange]
    guard = shape.stages[stage].guard

    def some(group: PartitionGroup) -> tuple[SiteId, ...]:
        followers = group.replicas[1:] if guard.followers else ()
        return group.all if guard.rebuild_level else group.standbys + followers

    return {GroupId(j): some(c) for j, c in enumerate(view.groups[stage])}


def partitions_of(view: View, tasks: Iterable[TaskId], shape: Shape) -> str:
    """The partitions of these tasks for an error message, like ``'stats': 0-7; 'out': 0``."""
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
