"""Planned moves: a replica leaves a site as soon as another one has taken its place.

A view marks the replica as leaving and has another one join. From then on this is an ordinary
catch-up, with a donor that stays, if there is one. The replica that leaves counts until the new one
has its state and has caught up; then a view removes it. So a move exposes nothing, no task waits
for it, and a controller that takes over finds it in the view.

A failure comes first: it gives up all moves whose new replica has no state yet (`given_up`). So
does a failed attempt. Sites that are to be emptied are members of the view's `emptying`, and are
tried again when nothing is missing.

A site that is emptied gives up its tasks one after another. Tasks of sources and sinks remain until
the end: no view takes a sequencer or a sink from a site that lives. When all of these could
continue without it, the site leaves the flow with them, like a site that died.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from holdfast.core.ids import SiteId, TaskId
from holdfast.core.joins import ReplicaJoins
from holdfast.core.layout import Domain, PartitionGroup, Shape, View, partitions_of
from holdfast.core.placement import Assignment, may_join, place
from holdfast.core.protection import ProtectionSpec
from holdfast.core.requests import Relocation
from holdfast.errors import HostError


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
    return None


def possible(
    view: View, shape: Shape, domains: Mapping[SiteId, Domain], moves: Iterable[Relocation]
) -> list[Relocation]:
    """Those of the moves that can begin now, one for each task at most."""
    first: dict[TaskId, Relocation] = {}
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
    return replace(view.group(move.task), leaving=(move.source,))


def is_replaced(view: View, shape: Shape, task: TaskId, joins: ReplicaJoins) -> bool:
    """Whether a task could do without those of its replicas that leave: all others that are wanted
    are there, and have caught up."""
    group, guard = view.group(task), shape.stages[task[0]].guard
    if group.joining or group.lacks_replica(guard.replicas):
        return False
    late = any((task, site) in joins.replaying for site in group.staying)
    return len(group.staying) >= guard.wanted and not late


def completed(view: View, shape: Shape, joins: ReplicaJoins) -> dict[TaskId, PartitionGroup]:
    """The keyed tasks whose moves are complete, without the replicas that leave."""
    return {
        u: view.group(u).without(view.group(u).leaving)
        for u in view.tasks()
        if view.group(u).leaving
        and shape.stages[u[0]].kind == "keyed"
        and is_replaced(view, shape, u, joins)
    }


def given_up(group: PartitionGroup, guard: ProtectionSpec) -> PartitionGroup:
    """This group without its move, unless the new replica has its state: nobody leaves, and nobody
    joins. A replica that is missing joins anew, because the one that was to join for the move may
    already believe that it computes, or is a standby."""
    standbys = [s for s in group.standbys if s not in group.leaving]
    lacks_standby = len(standbys) < guard.standbys
    computes = any(s in group.replicas for s in group.leaving)
    if not group.leaving or not (
        group.lacks_replica(guard.replicas) if computes else lacks_standby
    ):
        return group
    return replace(group.without(group.joining), leaving=())


def without_moves(view: View, shape: Shape) -> View:
    """This view with all moves given up that can be. When sites are lost, this comes before and
    after: a move whose leaving replica is lost is none in the view without it, and yet its new
    replica must join anew."""
    groups = tuple(
        tuple(given_up(group, stage.guard) for group in groups)
        for stage, groups in zip(shape.stages, view.groups, strict=True)
    )
    return replace(view, groups=groups)


# --- emptying sites -----------------------------------------------------------------------------


def emptying(view: View, sites: Iterable[SiteId]) -> View:
    """The next view, in which these members are to be emptied."""
    wanted = dict.fromkeys((*view.emptying, *(s for s in sites if s in view.members)))
    return replace(view, number=view.number + 1, emptying=tuple(wanted))


def too_few(shape: Shape, sites: Iterable[SiteId], domains: Mapping[SiteId, Domain]) -> str | None:
    """Why the flow cannot be protected as it is on these sites alone; None if it can."""
    try:
        place(shape, [s for s in sites if s in domains], domains)
    except HostError as error:
        return str(error)
    return None


def easiest_to_empty(view: View, count: int) -> tuple[SiteId, ...]:
    """The members with the fewest tasks that are not to be emptied yet; of equals, the latest."""
    staying = [s for s in view.members if s not in view.emptying]
    return tuple(sorted(staying, key=lambda s: (len(view.tasks_at(s)), -s))[:count])


def with_room_made(
    view: View,
    assign: Callable[[View, list[TaskId]], Assignment],
    may_begin: Callable[[TaskId], bool],
) -> tuple[View | None, Assignment]:
    """The next view, in which replicas at the sites to be emptied begin to leave: as many as
    `assign` finds sites for. None if there is none."""
    away = {
        u: replace(view.group(u), leaving=_next_to_empty(view, u))
        for u in view.tasks()
        if not view.group(u).leaving and _next_to_empty(view, u) and may_begin(u)
    }
    found = assign(view.changed(away), list(away))
    if not found.joiners:
        return None, found
    marked = view.changed({u: away[u] for u in found.joiners})
    return found.view(replace(marked, number=view.number)), found


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
