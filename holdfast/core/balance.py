"""Which partitions move where: a function from the statistics of a round to moves.

`plan_round` gets what the sites measured and what is under way, and returns moves, the most
important first, each with its reason. Nothing here keeps state or knows a clock: what must be
remembered is in the `BalanceHistory` that a round returns and the next one gets. The same code runs
in the leading controller and in a simulation of the thesis' experiments.

The policies are those of Flux-LB (thesis, sections 4.4.3, 4.5.2 and 4.5.4). `docs/balance.md` has
the formulas, and where they differ from the thesis.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from holdfast.core.ids import SiteId, TaskId
from holdfast.core.load import (
    Collection,
    LoadEstimate,
    LoadHistory,
    PartKey,
    PartLoad,
    SiteLoad,
    estimate,
)
from holdfast.core.relocations import (
    BalanceParams,
    BalancePolicy,
    MoveLimits,
    RelocationPlan,
    ShortageLevel,
    SiteLevel,
    UtilisationLevel,
)
from holdfast.core.requests import Relocation

__all__ = [
    "BalanceHistory",
    "BalanceMode",
    "BalanceParams",
    "BalancePolicy",
    "Collection",
    "PartLoad",
    "Relocation",
    "Round",
    "SiteLoad",
    "next_collect_ms",
    "plan_round",
]


class BalanceMode(Enum):
    """How large an imbalance must be to act on it."""

    STEADY = "steady"
    BALANCING = "balancing"
    """Moves have begun. They go on until sites are much closer than what began them."""


@dataclass(frozen=True, slots=True)
class BalanceHistory:
    """What a round must know of earlier ones."""

    loads: LoadHistory = field(default_factory=LoadHistory)
    mode: BalanceMode = BalanceMode.STEADY
    resting: Mapping[TaskId, int] = field(default_factory=dict)
    """By task that has moved: for how many more rounds it stays."""
    left: Mapping[PartKey, float] = field(default_factory=dict)
    """By task and site that it left: for how many more ms it does not return."""
    hopeless: Mapping[SiteId, float] = field(default_factory=dict)
    """By site that cannot keep up: for how many more ms it receives nothing."""


@dataclass(frozen=True, slots=True)
class Round:
    """What is to be done after a round of statistics."""

    moves: tuple[Relocation, ...]
    imbalance: float
    """The largest utilisation relative to the mean, before the moves."""
    reasons: tuple[str, ...]
    """Why these moves, or why none, in words."""
    next_collect_ms: float
    """For how long to collect next if there are no moves. Else `next_collect_ms` says it when they
    are done."""
    leaving: tuple[SiteId, ...]
    """The sites that everything leaves: they cannot keep up, or are drained."""
    history: BalanceHistory


def next_collect_ms(params: BalanceParams, last: Collection) -> float:
    """How long the next collection lasts: as long as the moves took, or half of the last collection
    if there were none, and not shorter than it takes to gather statistics."""
    wanted = last.moves_took_ms or last.collected_ms / 2
    least = max(params.collect_ms_min, last.gathering_took_ms)
    return max(least, min(wanted, params.collect_ms_max))


def _named(task: TaskId) -> str:
    return f"group {task[1]} of stage {task[0]}"


def plan_round(
    sites: Sequence[SiteLoad],
    parts: Sequence[PartLoad],
    collection: Collection,
    params: BalanceParams,
    may_hold: Callable[[TaskId, SiteId, SiteId], bool],
    in_flight: Sequence[Relocation] = (),
    history: BalanceHistory | None = None,
    drain: Iterable[SiteId] = (),
    name: Callable[[TaskId], str] = _named,
) -> Round:
    """Choose the moves that follow from a round of statistics.

    `may_hold(task, source, target)` says whether a replica that leaves `source` may go to `target`,
    in view of where the others are. `in_flight` are moves of earlier rounds that are not done:
    their tasks do not move again and count where they go. Everything leaves the sites of `drain`.
    """
    before = history or BalanceHistory()
    unsettled = {m.task for m in in_flight} | before.resting.keys()
    load, loads = estimate(
        sites, parts, collection.collected_ms, params.smooth_ms, before.loads, unsettled
    )
    hopeless = _hopeless(sites, load, before, params, collection)
    closed = frozenset(hopeless) | frozenset(drain)
    steady = before.mode is BalanceMode.STEADY
    ratio = params.imbalance_min if steady else params.settled
    limits = MoveLimits(may_hold, before.resting, before.left, closed, ratio)
    plan = RelocationPlan(sites, parts, load.without(closed), params, limits, in_flight, name)
    if loads.seen_ms < params.evidence_ms:
        plan.reasons.append(f"only {loads.seen_ms:.0f} ms of statistics so far")
    else:
        _choose(plan, sorted(closed), hopeless)
    levels = load.utilisation
    mean = sum(levels.values()) / max(1, len(levels))
    resting = _resting(before, plan.moves, params)
    active = plan.moves or in_flight or resting
    after = BalanceHistory(
        loads.forgetting(before.hopeless.keys() - hopeless.keys()),
        BalanceMode.BALANCING if active else BalanceMode.STEADY,
        resting,
        _left(before, plan, collection),
        hopeless,
    )
    return Round(
        tuple(plan.moves),
        max(levels.values()) / mean if mean else 1.0,
        tuple(plan.reasons),
        next_collect_ms(params, replace(collection, moves_took_ms=0.0)),
        tuple(sorted(closed)),
        after,
    )


def _choose(
    plan: RelocationPlan, closed: Sequence[SiteId], hopeless: Mapping[SiteId, float]
) -> None:
    for site in closed:
        plan.empty(site, f"site {site} " + ("cannot keep up" if site in hopeless else "is drained"))
    levels: list[SiteLevel] = []
    if plan.params.policy is not BalancePolicy.CPU:
        levels.append(ShortageLevel(plan))
    if plan.params.policy is not BalancePolicy.MEMORY:
        levels.append(UtilisationLevel(plan))
    for level in levels:
        if not plan.moves:
            plan.even_out(level)
    if not plan.moves and plan.receivers:
        used = [plan.utilisation[s] for s in plan.receivers]
        plan.reasons.append(f"nothing to gain: sites at {min(used):.2f} to {max(used):.2f}")


def _hopeless(
    sites: Sequence[SiteLoad],
    load: LoadEstimate,
    before: BalanceHistory,
    params: BalanceParams,
    collection: Collection,
) -> dict[SiteId, float]:
    """The sites that cannot keep up, and for how many more ms they receive nothing. An empty site
    measures no capacity, so it remains one for a while. A site that lacks memory is slow because of
    its disk: what it has too much leaves it, not everything."""
    elapsed = collection.collected_ms + collection.moves_took_ms
    found = {}
    for s in sites:
        rest = before.hopeless.get(s.site, 0.0) - elapsed
        lacks_memory = s.memory_max is not None and s.state_bytes > s.memory_max
        if lacks_memory or load.capacity[s.site] >= params.hopeless * load.typical:
            continue
        if s.busy > params.receiver_max:
            found[s.site] = params.retry_ms
        elif rest > 0:
            found[s.site] = rest
    return found


def _resting(
    before: BalanceHistory, moves: Sequence[Relocation], params: BalanceParams
) -> dict[TaskId, int]:
    kept = {task: rounds - 1 for task, rounds in before.resting.items() if rounds > 1}
    return kept | {m.task: params.rest_rounds for m in moves if params.rest_rounds}


def _left(
    before: BalanceHistory, plan: RelocationPlan, collection: Collection
) -> dict[PartKey, float]:
    """What does not return: tasks that moved, but for those that try a site out."""
    elapsed = collection.collected_ms + collection.moves_took_ms
    kept = {key: ms - elapsed for key, ms in before.left.items() if ms > elapsed}
    moves = [m for m in plan.moves if m.target in plan.load.known]
    return kept | {(m.task, m.source): plan.params.return_ms for m in moves}
