"""Planned moves: a replica leaves a site as soon as another one has taken its place.

A view names the replica that leaves and has another one join (`PartitionGroup.moving`). From then
on this is an ordinary catch-up, with a donor that stays, if there is one. The replica that leaves
counts until the new one has its state and has caught up; then a view removes it. So a move exposes
nothing, no task waits for it, and a controller that takes over finds it in the view.

A failure comes first: it gives up all moves whose new replica has no state yet (`given_up`), and no
move begins while a replica is missing. Sites that are to be emptied are in the view's `emptying`;
their tasks are moved when nothing is missing.

A site that is emptied gives up its tasks one after another. Tasks of sources and sinks remain until
the end: no view takes a sequencer or a sink from a site that lives. When all of these could
continue without it, the site leaves the flow with them, like a site that died.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import replace

from holdfast.core.ids import SiteId, TaskId
from holdfast.core.joins import ReplicaJoins
from holdfast.core.layout import Domain, PartitionGroup, Shape, View, partitions_of
from holdfast.core.placement import Assignment, may_join, missing, place
from holdfast.core.requests import Relocation
from holdfast.core.separation import exposures
from holdfast.errors import HostError

NOWHERE = SiteId(-1)
"""The target of a move that is not known yet."""


def refusal(
    view: View, shape: Shape, domains: Mapping[SiteId, Domain], move: Relocation
) -> str | None:
    """Why a move cannot begin now; None if it can."""
    stage, group = shape.stages[move.task[0]], view.group(move.task)
    name = partitions_of(view, [move.task], shape)
    if shape.granularity != "partition":
        return f"with {shape.granularity} pairs only whole mirrors are rebuilt"
    if stage.kind != "keyed":
        return f"{stage.name!r} is a {stage.kind}: it moves only when its site is drained"
    if move.source not in group.replicas + group.standbys:
        return f"site {move.source} does not hold {name}"
    if move.target not in domains or move.target in view.emptying:
        return f"site {move.target} takes no partitions"
    if group.leaving or group.joining or len(group.all) < stage.guard.wanted:
        return f"a replica of {name} is already being moved or replaced"
    others = [s for s in group.all if s != move.source]
    if move.target in group.all or not may_join(stage, others, move.target, domains):
        return (
            f"site {move.target} shares its {stage.guard.failure_domain} with another replica of "
            f"{name}"
        )
    if _exposes(view, shape, domains, move):
        return f"site {move.target} has partitions that must not be lost together with {name}"
    return None


def _exposes(view: View, shape: Shape, domains: Mapping[SiteId, Domain], move: Relocation) -> bool:
    """Whether a move brings stages together that must not be lost together."""
    if not shape.stages[move.task[0]].guard.rebuild_level:
        return False
    group = view.group(move.task)
    replicas, standbys = (
        tuple(move.target if s == move.source else s for s in some)
        for some in (group.replicas, group.standbys)
    )
    after = view.changed({move.task: replace(group, replicas=replicas, standbys=standbys)})
    return len(exposures(after, shape, domains)) > len(exposures(view, shape, domains))


def possible(
    view: View, shape: Shape, domains: Mapping[SiteId, Domain], moves: Iterable[Relocation]
) -> list[Relocation]:
    """Those of the moves that can begin now, one for each task at most. None while a replica is
    missing: recovery comes first."""
    first: dict[TaskId, Relocation] = {}
    if missing(view, shape):
        return []
    for move in moves:
        if refusal(view, shape, domains, move) is None:
            first.setdefault(move.task, move)
    return list(first.values())


def begun(view: View, moves: Iterable[Relocation]) -> View:
    """The next view, in which these moves begin. Each task is moved once at most."""
    joiners = {m.task: m.target for m in moves}
    marked = view.changed({m.task: _without_source(view, m) for m in moves})
    return Assignment(joiners, tuple(joiners.values())).view(replace(marked, number=view.number))


def _without_source(view: View, move: Relocation) -> PartitionGroup:
    return replace(view.group(move.task), moving=((move.source, move.target),))


def is_replaced(view: View, shape: Shape, task: TaskId, joins: ReplicaJoins) -> bool:
    """Whether a task could do without those of its replicas that leave: all others that are wanted
    are there, and have caught up."""
    group, guard = view.group(task), shape.stages[task[0]].guard
    if group.joining or group.lacks_replica(guard.replicas):
        return False
    late = any((task, site) in joins.replaying for site in group.staying)
    return len(group.staying) >= guard.wanted and not late


def completed(
    view: View, shape: Shape, joins: ReplicaJoins, leaders_stay: bool
) -> dict[TaskId, PartitionGroup]:
    """The keyed tasks whose moves are complete, without the replicas that leave."""
    found = {}
    for task in view.tasks():
        group = view.group(task)
        keyed = bool(group.leaving) and shape.stages[task[0]].kind == "keyed"
        if leaders_stay and any(group.led_by(site) for site in group.leaving):
            continue
        if keyed and is_replaced(view, shape, task, joins):
            found[task] = group.without(group.leaving)
    return found


def given_up(group: PartitionGroup) -> PartitionGroup:
    """This group without its move, unless the new replica has its state. A replica that is missing
    joins anew, because the one that was to join for the move may already believe that it computes,
    or is a standby."""
    return group.without([target for _, target in group.moving if target in group.joining])


def without_moves(view: View) -> View:
    """This view with all moves given up that can be."""
    groups = tuple(tuple(given_up(group) for group in groups) for groups in view.groups)
    return replace(view, groups=groups)


def settled(view: View, shape: Shape) -> View:
    """This view without moves of keyed tasks, in which protection can change: a replica whose
    successor has its state has left, the others stay."""
    stages = []
    for stage, groups in zip(shape.stages, view.groups, strict=True):
        rest = [given_up(group) for group in groups]
        if stage.kind == "keyed":
            rest = [group.without(group.leaving) for group in rest]
        stages.append(tuple(rest))
    return replace(view, groups=tuple(stages))


# --- emptying sites -----------------------------------------------------------------------------


def emptying(view: View, sites: Iterable[SiteId]) -> View:
    """The next view, in which these members are to be emptied."""
    wanted = dict.fromkeys((*view.emptying, *(s for s in sites if s in view.members)))
    return replace(view, number=view.number + 1, emptying=tuple(wanted))


def too_few(
    shape: Shape, view: View, gone: Collection[SiteId], domains: Mapping[SiteId, Domain]
) -> str | None:
    """Why the flow cannot be protected, as it is or is to be, without these sites; None if it
    can."""
    for guards in {shape.guards, view.aims or shape.guards}:
        try:
            place(shape.guarded(guards), [s for s in domains if s not in gone], domains)
        except HostError as error:
            return str(error)
    return None


def easiest_to_empty(
    view: View, sites: Iterable[SiteId], known: Collection[SiteId], count: int
) -> tuple[SiteId, ...]:
    """The sites, of those that are not to be emptied yet, with the fewest tasks: first those that
    are not `known` because they are being launched; of equals, the latest."""
    staying = [s for s in sites if s not in view.emptying]
    order = sorted(staying, key=lambda s: (s in known, len(view.tasks_at(s)), -s))
    return tuple(order[:count])


def with_room_made(
    view: View,
    assign: Callable[[View, list[TaskId]], Assignment],
    may_begin: Callable[[TaskId], bool],
) -> tuple[View | None, Assignment]:
    """The next view, in which replicas at the sites to be emptied begin to leave: as many as
    `assign` finds sites for. None if there is none."""
    away = {
        u: replace(view.group(u), moving=((_next_to_empty(view, u)[0], NOWHERE),))
        for u in view.tasks()
        if not view.group(u).leaving and _next_to_empty(view, u) and may_begin(u)
    }
    found = assign(view.changed(away), list(away))
    wanted = [
        Relocation(u, away[u].leaving[0], target)
        for u, target in found.joiners.items()
        if target not in view.emptying
    ]
    return (begun(view, wanted) if wanted else None), found


def _next_to_empty(view: View, task: TaskId) -> tuple[SiteId, ...]:
    """The site, if any, that gives up a task next. Of each task one replica leaves at a time, and
    all tasks take the sites in the same order, so that they do not wait for each other."""
    group = view.group(task)
    return tuple(s for s in view.emptying if s in group.replicas + group.standbys)[:1]


def is_superfluous(view: View, shape: Shape, site: SiteId, joins: ReplicaJoins) -> bool:
    """Whether the flow has everything elsewhere that a site to be emptied holds."""
    return all(
        site in view.group(u).leaving and is_replaced(view, shape, u, joins)
        for u in view.tasks_at(site)
    )
