"""Moves of a round while they are chosen: from which site, which task, to which site.

`RelocationPlan` knows what every site would be like after the moves that it has so far. Each
further move takes from the highest site and gives to the lowest one, by utilisation or by lack of
memory. A move lowers the higher of the two, and not by little, so moves never go in a circle while
loads stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from math import inf

from holdfast.core.ids import SiteId, TaskId
from holdfast.core.load import LoadEstimate, PartKey, PartLoad, SiteLoad
from holdfast.core.requests import Relocation


class BalancePolicy(Enum):
    """What is evened out."""

    CPU = "cpu"
    MEMORY = "memory"
    HYBRID = "hybrid"
    """Memory while a site lacks it and that can be mended; else CPU, as far as memory allows."""


@dataclass(frozen=True, slots=True)
class BalanceParams:
    """The thresholds of the policies."""

    policy: BalancePolicy = BalancePolicy.HYBRID
    imbalance_min: float = 1.15
    """Moves begin if the most utilised site exceeds the least utilised one by this factor."""
    settled: float = 1.05
    """They end when no site exceeds another one by this factor."""
    receiver_max: float = 0.925
    """A site that is more utilised than this receives nothing."""
    margin: float = 0.5
    """A move must lower the higher of both sites by this part of what the task weighs there."""
    severe: float = 1.2
    """A site gives or takes one task in a round, unless a donor exceeds the mean by this factor."""
    moves_max: int = 16
    """Most moves at a time, those under way included."""
    bytes_max: int = 256 << 20
    """Bytes of state under way from which on no further move begins."""
    rest_rounds: int = 3
    """For how many rounds a task that has moved stays where it is."""
    return_ms: float = 30_000.0
    """For how long a task does not return to a site that it left."""
    hopeless: float = 0.05
    """Everything leaves a site whose capacity is below this part of the median."""
    retry_ms: float = 60_000.0
    """For how long such a site receives nothing."""
    collect_ms_min: float = 250.0
    collect_ms_max: float = 5_000.0
    smooth_ms: float = 2_000.0
    """How fast measurements of earlier rounds are forgotten; 0 if only the last one counts."""
    evidence_ms: float = 250.0
    """For how long statistics must have been collected before anything moves."""


@dataclass(frozen=True, slots=True)
class MoveLimits:
    """What restricts the moves of a round."""

    may_hold: Callable[[TaskId, SiteId, SiteId], bool]
    """Whether a task that leaves the first site may go to the second, in view of its other
    replicas."""
    resting: Mapping[TaskId, int]
    """The tasks that stay where they are, unless their site must be left."""
    left: Mapping[PartKey, float]
    """The sites that a task must not return to."""
    closed: frozenset[SiteId]
    """The sites that everything leaves."""
    ratio: float
    """The factor between two utilisations from which on a move is worth it."""


class RelocationPlan:
    """The moves of a round so far, and what the sites would be like after them."""

    def __init__(
        self,
        sites: Sequence[SiteLoad],
        parts: Sequence[PartLoad],
        load: LoadEstimate,
        params: BalanceParams,
        limits: MoveLimits,
        in_flight: Sequence[Relocation],
        name: Callable[[TaskId], str],
    ) -> None:
        self.load, self.params, self.limits = load, params, limits
        self.moves: list[Relocation] = []
        self.reasons: list[str] = []
        self.utilisation = dict(load.utilisation)
        self.shortage: dict[SiteId, float] = {
            s.site: s.state_bytes - (inf if s.memory_max is None else s.memory_max) for s in sites
        }
        self.receivers = [s.site for s in sites if s.site not in limits.closed]
        self._name = name
        self._under_way = {m.task for m in in_flight}
        self._count, self._bytes = len(in_flight), 0
        self._at: dict[SiteId, list[PartLoad]] = {s.site: [] for s in sites}
        self._took_part: set[SiteId] = set()
        for p in parts:
            self._at[p.site].append(p)
        moving = {(m.task, m.source): m for m in in_flight}
        for p in parts if moving else ():
            move = moving.get(p.key)
            if move is not None:
                self._bytes += p.state_bytes
                there = (p.task, move.target) in load.work
                self._shift(p, None if there else move.target)

    # --- what the sites would be like -----------------------------------------------------------

    def work_of(self, part: PartLoad) -> float:
        """The work of a task where it can be done. On a site that cannot keep up it does less, so
        it counts at least as much there as others of its stage do elsewhere."""
        own = self.load.work[part.key]
        return max(own, self._usual(part)) if part.site in self.limits.closed else own

    def _usual(self, part: PartLoad) -> float:
        return self.load.usual.get(part.task[0], 0.0)

    def utilisation_with(self, part: PartLoad, site: SiteId) -> float:
        return self.utilisation[site] + self.work_of(part) / self.load.capacity[site]

    def fits(self, part: PartLoad, site: SiteId) -> bool:
        """Whether a site can process a part in addition to what it has, and has memory for it, or
        at least lacks no more than the site that gives it."""
        if self.utilisation_with(part, site) > 1.0:
            return False
        lack = max(0.0, self.shortage[part.site])
        by_cpu_alone = self.params.policy is BalancePolicy.CPU
        return by_cpu_alone or self.shortage[site] + part.state_bytes <= lack

    def _shift(self, part: PartLoad, target: SiteId | None) -> None:
        source = part.site
        self.utilisation[source] -= self.load.work[part.key] / self.load.capacity[source]
        self.shortage[source] -= part.state_bytes
        if target is not None and target in self.utilisation:
            self.utilisation[target] = self.utilisation_with(part, target)
            self.shortage[target] += part.state_bytes

    # --- choosing -------------------------------------------------------------------------------

    def empty(self, site: SiteId, why: str) -> None:
        """Everything leaves a site, the most loaded tasks first."""
        parts = [p for p in self._at.get(site, ()) if p.movable and p.task not in self._under_way]
        for part in sorted(parts, key=lambda p: (-self.work_of(p), p.task)):
            if not self._has_room():
                return
            fit = [s for s in self.receivers if self._may_move(part, s) and self.fits(part, s)]
            if not fit:
                self.reasons.append(f"{why}, and no site can take {self._name(part.task)}")
                continue
            best = min(fit, key=lambda s: (self.utilisation_with(part, s), s))
            before, after = self.utilisation[best], self.utilisation_with(part, best)
            words = f"site {best} at {before:.2f}: {self._name(part.task)} moves"
            self._add(part, best, f"{why}, {words}, expected {after:.2f}")
        if not parts:
            self.reasons.append(f"{why}: nothing is left there that can move")

    def even_out(self, level: SiteLevel) -> None:
        """Take from the highest and give to the lowest, as they would be after each move, and work
        inwards where the highest has nothing to give."""
        donors = set(self.receivers)
        while donors and self._has_room():
            donor = max(donors, key=lambda s: (level.value[s], -s))
            if not level.receivers(donor):
                break
            if not self._move_from(donor, level):
                donors.discard(donor)

    def _has_room(self) -> bool:
        return self._count < self.params.moves_max and self._bytes < self.params.bytes_max

    def _move_from(self, donor: SiteId, level: SiteLevel) -> bool:
        severe = level.severe(donor)
        if donor in self._took_part and not severe:
            return False
        parts = [p for p in self._at[donor] if self._may_leave(p)]
        targets = [s for s in level.receivers(donor) if self._may_take(s, severe)]
        if not parts or not targets:
            return False
        usual = sorted(parts, key=lambda p: level.weight(p, donor))[len(parts) // 2]
        targets.sort(key=lambda s: (level.after(usual, s), self.utilisation[s], s))
        found = self._best(parts, donor, targets, level)
        if found is None:
            return False
        self._add(*found, level.words(*found, self._name(found[0].task)))
        return True

    def _best(
        self, parts: Sequence[PartLoad], donor: SiteId, targets: Sequence[SiteId], level: SiteLevel
    ) -> tuple[PartLoad, SiteId] | None:
        """The part that lowers the higher of both sites most; of equal ones, one that is in memory,
        then the one with the least state."""
        high, found = level.value[donor], None
        best = (0.0, 0, 0)
        for part in parts:
            relief = level.weight(part, donor)
            if relief <= 0 or relief < best[0]:
                continue
            fit = (s for s in targets if self._may_move(part, s) and level.accepts(part, s))
            target = next(fit, None)
            if target is None:
                continue
            gain = high - max(high - relief, level.after(part, target))
            least = self.params.margin * min(relief, level.weight(part, target))
            rank = (gain, -int(part.on_disk > 0), -part.state_bytes)
            if gain >= least and rank > best:
                best, found = rank, (part, target)
        return found

    def _may_leave(self, part: PartLoad) -> bool:
        resting = part.task in self.limits.resting
        return part.movable and not resting and part.task not in self._under_way

    def _may_take(self, site: SiteId, severe: bool) -> bool:
        """A site whose capacity is not known gets one task to show it."""
        return site not in self._took_part or (severe and site in self.load.known)

    def _may_move(self, part: PartLoad, target: SiteId) -> bool:
        return (
            (part.task, target) not in self.load.work
            and (part.task, target) not in self.limits.left
            and self.limits.may_hold(part.task, part.site, target)
        )

    def _add(self, part: PartLoad, target: SiteId, reason: str) -> None:
        self.moves.append(Relocation(part.task, part.site, target, reason))
        self.reasons.append(reason)
        self._shift(part, target)
        self._at[part.site].remove(part)
        self._under_way.add(part.task)
        self._took_part |= {part.site, target}
        self._count += 1
        self._bytes += part.state_bytes


# --- what is evened out ---------------------------------------------------------------------------


class SiteLevel:
    """A number for each site, which every part that it holds raises."""

    def __init__(self, plan: RelocationPlan, value: dict[SiteId, float]) -> None:
        self.plan, self.value = plan, value

    def weight(self, part: PartLoad, site: SiteId) -> float:
        """By how much a part raises the level of a site."""
        raise NotImplementedError

    def after(self, part: PartLoad, site: SiteId) -> float:
        return self.value[site] + self.weight(part, site)

    def accepts(self, part: PartLoad, site: SiteId) -> bool:
        raise NotImplementedError

    def receivers(self, donor: SiteId) -> list[SiteId]:
        """The sites that are so far below `donor` that it should give them something."""
        raise NotImplementedError

    def severe(self, donor: SiteId) -> bool:
        """Whether a site may give several tasks in a round."""
        raise NotImplementedError

    def words(self, part: PartLoad, target: SiteId, name: str) -> str:
        raise NotImplementedError


class UtilisationLevel(SiteLevel):
    """The CPU policy."""

    def __init__(self, plan: RelocationPlan) -> None:
        super().__init__(plan, plan.utilisation)
        usable = {s: self.value[s] for s in plan.receivers}
        self._mean = sum(usable.values()) / max(1, len(usable))
        self._severe = {s for s, u in usable.items() if u >= plan.params.severe * self._mean}

    def weight(self, part: PartLoad, site: SiteId) -> float:
        return self.plan.work_of(part) / self.plan.load.capacity[site]

    def accepts(self, part: PartLoad, site: SiteId) -> bool:
        return self.plan.fits(part, site)

    def receivers(self, donor: SiteId) -> list[SiteId]:
        if self.value[donor] < self._mean:
            return []
        high = min(self.plan.params.receiver_max, self.value[donor] / self.plan.limits.ratio)
        return [s for s in self.plan.receivers if s != donor and self.value[s] <= high]

    def severe(self, donor: SiteId) -> bool:
        return donor in self._severe

    def words(self, part: PartLoad, target: SiteId, name: str) -> str:
        donor, value = part.site, self.value
        after = value[donor] - self.weight(part, donor), self.after(part, target)
        return (
            f"site {donor} at {value[donor]:.2f}, site {target} at {value[target]:.2f}: "
            f"{name} moves, expected {after[0]:.2f} / {after[1]:.2f}"
        )


class ShortageLevel(SiteLevel):
    """The memory policy: bytes of state beyond the memory that a site has."""

    def __init__(self, plan: RelocationPlan) -> None:
        super().__init__(plan, plan.shortage)

    def weight(self, part: PartLoad, site: SiteId) -> float:
        return float(part.state_bytes)

    def accepts(self, part: PartLoad, site: SiteId) -> bool:
        return True

    def receivers(self, donor: SiteId) -> list[SiteId]:
        if self.value[donor] <= 0:
            return []
        return [s for s in self.plan.receivers if self.value[s] < self.value[donor]]

    def severe(self, donor: SiteId) -> bool:
        return True

    def words(self, part: PartLoad, target: SiteId, name: str) -> str:
        donor, value = part.site, self.value
        after = value[donor] - part.state_bytes, self.after(part, target)
        return (
            f"site {donor} {_memory(value[donor])}, site {target} {_memory(value[target])}: "
            f"{name} moves, expected {_memory(after[0])} / {_memory(after[1])}"
        )


def _memory(lack: float) -> str:
    """
    >>> _memory(3.2e6), _memory(-64e6), _memory(-inf)
    ('lacks 3.2 MB', 'has 64.0 MB', 'has any memory')
    """
    if lack == -inf:
        return "has any memory"
    return f"lacks {lack / 1e6:.1f} MB" if lack > 0 else f"has {-lack / 1e6:.1f} MB"
