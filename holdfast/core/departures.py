"""Members that died after they had finished, and that have the only replica of some task.

No view can be without them, and none needs to be: they have processed the last epoch, and all
replicas that process their output have received it. Nobody can hand over what only they had, and
they never act on another view. So no replica joins any more, and the flow ends when all other
members have finished.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Shape, View


class DepartedSites:
    """The members that are dead and not missed."""

    def __init__(self) -> None:
        self.sites: set[SiteId] = set()

    def add(self, sites: Iterable[SiteId], view: View) -> View | None:
        """Sites have died that had finished. Returns the next view, in which no replica joins: a
        site that waits for state would never report that it has finished. None if none joins."""
        self.sites.update(sites)
        joining = {u: g.without(g.joining) for u in view.tasks() if (g := view.group(u)).joining}
        return view.changed(joining) if joining else None

    def lost(self, before: View, view: View, shape: Shape) -> list[TaskId]:
        """The tasks at the end of the flow that one of these sites leads in the next view, and did
        not before: what the last leader has not written is lost."""
        return [
            task
            for task in view.tasks()
            if not shape.stages[task[0]].outputs
            and self.sites.issuperset(leader := view.group(task).replicas[:1])
            and leader != before.group(task).replicas[:1]
            and leader
        ]
