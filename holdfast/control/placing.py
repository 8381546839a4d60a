"""What a user asks about the places of replicas, as requests to the controller. Whatever cannot be
done is refused here, by name; the controller ignores it."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from holdfast.core import moves
from holdfast.core.controller import Controller
from holdfast.core.ids import GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import PartitionGroup, View, spans
from holdfast.core.requests import EmptySites, MovesWanted, Relocation, SitesWanted
from holdfast.errors import FlowError, HostError


def moves_wanted(
    controller: Controller,
    stage: str,
    partitions: Collection[int],
    to: int,
    source: int | None,
    busy: Mapping[int, float],
) -> MovesWanted:
    """Move these partitions of a stage to a site, from `source` or else from the busiest site that
    holds a replica."""
    view = _view(controller)
    wanted = [
        Relocation(task, _source(view.group(task), source, busy), SiteId(to))
        for task in _tasks(controller, view, stage, partitions)
        if to not in view.group(task).staying
    ]
    for move in wanted:
        refusal = moves.refusal(view, controller.shape, controller.roster.domains, move)
        if refusal is not None:
            raise HostError(f"stage {stage!r} cannot be moved to site {to}: {refusal}")
    return MovesWanted(tuple(wanted))


def sites_to_empty(controller: Controller, sites: Iterable[int]) -> EmptySites:
    """Empty these sites."""
    view, roster = _view(controller), controller.roster
    gone = {SiteId(s) for s in sites}
    for site in sorted(gone):
        if not roster.knows(site):
            known = ", ".join(str(s) for s in sorted(roster.domains))
            raise HostError(f"the flow has no site {site}", hint=f"it has {known}")
    _check_rest(controller, {*gone, *view.emptying}, f"site {spans(sorted(gone))} cannot leave")
    return EmptySites(tuple(sorted(gone)))


def sites_wanted(controller: Controller, count: int) -> SitesWanted:
    """Run on this many sites."""
    view, roster = _view(controller), controller.roster
    if count < 1:
        raise FlowError(f"a flow needs at least 1 site, not {count}")
    surplus = len(roster.sites) - len(view.emptying) - count
    if surplus > 0:
        surplus_sites = moves.easiest_to_empty(view, roster.sites, roster.domains, surplus)
        gone = {*view.emptying, *surplus_sites}
        _check_rest(controller, gone, f"{count} sites are too few")
    return SitesWanted(count)


def _check_rest(controller: Controller, gone: Collection[SiteId], what: str) -> None:
    domains = controller.roster.domains
    if controller.shape.granularity != "partition":
        raise HostError(f"{what}: with {controller.shape.granularity} pairs the sites are fixed")
    reason = moves.too_few(controller.shape, _view(controller), gone, domains)
    if reason is not None:
        raise HostError(f"{what}: {reason}", hint="add sites first, with run.scale()")


def _view(controller: Controller) -> View:
    assert controller.view is not None
    return controller.view


def _tasks(
    controller: Controller, view: View, stage: str, partitions: Collection[int]
) -> list[TaskId]:
    """The tasks that have these partitions, which must be all of their partitions."""
    known = {s.name: s.id for s in controller.shape.stages if s.kind == "keyed"}
    if stage not in known:
        names = ", ".join(repr(name) for name in known)
        raise FlowError(f"the flow has no keyed stage {stage!r}", hint=f"it has {names}")
    wanted, found = set(partitions), []
    for number, group in enumerate(view.groups[known[stage]]):
        own = set(range(group.first, group.end))
        if own & wanted and not own <= wanted:
            raise FlowError(
                f"partitions {spans(sorted(own))} of stage {stage!r} move together",
                hint="name all of them; Options(groups_per_site=) makes smaller groups",
            )
        if own & wanted:
            found.append((StageId(known[stage]), GroupId(number)))
        wanted -= own
    if wanted:
        raise FlowError(f"stage {stage!r} has no partition {spans(sorted(wanted))}")
    return found


def _source(group: PartitionGroup, source: int | None, busy: Mapping[int, float]) -> SiteId:
    if source is not None:
        return SiteId(source)
    held = group.replicas or group.standbys
    return max(held, key=lambda s: (busy.get(s, 0.0), not group.led_by(s)))
