"""A change of protection that is under way: from what a view has to what it aims at.

It takes two views if the number of levels changes (see `ProtectionSpec.towards`). The first has
what was there before as well as what is kept from now on. The second has the protection that is
wanted; it follows when all replicas are there and all input is retained that others would be
rebuilt from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from holdfast.core import moves
from holdfast.core.effects import OrderRetention
from holdfast.core.ids import TaskId
from holdfast.core.layout import Shape, View
from holdfast.core.placement import is_complete
from holdfast.core.protection import ProtectionSpec
from holdfast.core.view_reports import ViewReports


def begun(view: View, shape: Shape, aims: Sequence[ProtectionSpec]) -> View:
    """The first view of a change: what is there now stays until the new protection holds. Sources
    and sinks get more replicas if a stage now survives more losses. They keep them if it survives
    fewer: no view takes a sequencer or a sink from a site that lives."""
    aims = tuple(
        aim if s.kind == "keyed" else replace(aim, replicas=max(aim.replicas, s.guard.replicas))
        for s, aim in zip(shape.stages, aims, strict=True)
    )
    guards = tuple(g.towards(aim) for g, aim in zip(shape.guards, aims, strict=True))
    view = moves.settled(view, shape)
    return view.guarded(shape.guards, guards, () if guards == aims else aims)


class ProtectionChange:
    """How far the change has come that a view is part of, if it is."""

    def __init__(self, view: View, shape: Shape) -> None:
        self._view, self._shape = view, shape

    def changes(self, task: TaskId) -> bool:
        """Whether a task is to be protected otherwise than it is."""
        view, stage = self._view, task[0]
        return bool(view.aims) and self._shape.stages[stage].guard != view.aims[stage]

    def retention_orders(self) -> list[OrderRetention]:
        """Have the replicas report when all is retained that they would be rebuilt from. All
        members act on the view, so they drop nothing of that from now on."""
        if not self._view.aims:
            return []
        held = {
            site: None
            for task in self._view.tasks()
            for site in self._view.group(task).replicas
            if self._lacks_retention(task)
        }
        return [OrderRetention(site, self._view.number) for site in held]

    def completed(self, reports: ViewReports) -> View | None:
        """The second view of the change. None before what it needs is in place, and if nothing
        changes."""
        if not self._view.aims:
            return None
        for task in self._view.tasks():
            group = self._view.group(task)
            if not is_complete(self._view, self._shape, task) or group.joining:
                return None
            if self._lacks_retention(task) and not reports.is_retained(task, group.replicas):
                return None
        view = moves.settled(self._view, self._shape)
        return view.guarded(self._shape.guards, view.aims)

    def _lacks_retention(self, task: TaskId) -> bool:
        """Whether a task cannot be rebuilt yet at the level that it is to be."""
        guard = self._shape.stages[task[0]].guard
        return guard.rebuild_level < guard.level and self._view.aims[task[0]].level == guard.level
