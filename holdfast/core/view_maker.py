"""Views that follow from what is missing, and from what is to leave: the controller's own moves.

Take-over goes on without sites that are lost. Catch-up makes replicas that are missing. When
nothing is missing, sites that are to be emptied give up what they hold, and moves are completed.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.core import moves
from holdfast.core.effects import CommitView, ControllerEffect, DrainFlow, EndFlow
from holdfast.core.flow_phase import FlowPhase, PhaseEvent
from holdfast.core.flow_state import FlowState
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Shape, View
from holdfast.core.losses import site_lost
from holdfast.core.placement import assign, missing
from holdfast.core.roster import EMPTIED, SiteRoster
from holdfast.core.view_reports import ViewReports


class ViewMaker(FlowState):
    """The part of the controller that makes views without being asked."""

    def __init__(self, shape: Shape, roster: SiteRoster) -> None:
        super().__init__(shape, roster)
        self._stores = False
        """Whether a checkpoint is being stored: a leader that left would make it fail."""

    def _commit(self, view: View) -> list[ControllerEffect]:
        """Make this the latest view."""
        self.view, self.shape = view, self.shape.under(view)
        self.joins.on_view(view)
        self.roster.on_members(view.members)
        self._reports = ViewReports(self._departed.sites)
        addresses = {s: self.roster.addresses[s] for s in view.members}
        effects: list[ControllerEffect] = [CommitView(view, addresses), *self._mirrors.pause(view)]
        if self.state is FlowPhase.DRAINING:
            effects.append(DrainFlow(view.sequencers[0]))
        return effects

    def _fail(self, error: Exception) -> list[ControllerEffect]:
        self.lifecycle.advance(PhaseEvent.FLOW_FAILED)
        return [EndFlow(error)]

    def _remove(self, gone: Collection[SiteId], reason: str) -> list[ControllerEffect]:
        """Never deal with these sites again; launch others in the place of those that were not to
        leave anyway."""
        emptying = self.view.emptying if self.view is not None else ()
        effects = self.roster.remove([s for s in gone if s not in emptying], reason)
        for site in gone:
            if site in emptying:
                effects += self.roster.retire(site, reason)
            self.lifecycle.note(f"site {site} failed: {reason}")
        return [*effects]

    def _take_over(self, view: View, gone: Collection[SiteId]) -> list[ControllerEffect]:
        """Go on with this view, without the replicas at these sites."""
        before = self._latest
        self.joins.on_sites_lost(gone)
        if view.members == before.members:
            return []
        self.joins.on_take_over(before, view, self.shape)
        return self._commit(view)

    def _recover(self) -> list[ControllerEffect]:
        """Begin to make replicas that are missing."""
        if not self.running or self._departed.sites:
            return []
        view, tasks = self._latest, missing(self._latest, self.shape)
        if self._mirrors.used:
            return self._recover_mirror(tasks)
        for task in tasks:
            if not view.group(task).replicas and task in self.joins.unrecovered:
                return self._fail_unrecovered(task)
        if not tasks:
            return self._make_room()
        wanted = [u for u in tasks if self.joins.may_begin(u)]
        assigned = assign(view, self.shape, wanted, self._candidates)
        for task, reason in assigned.impossible.items():
            self.joins.give_up(task, reason)
        effects = self._commit(assigned.view(view)) if assigned.joiners else []
        if assigned.waits or not assigned.joiners:
            effects += self.roster.wait_for_launched()
        return effects

    def _recover_mirror(self, tasks: list[TaskId]) -> list[ControllerEffect]:
        """Begin to rebuild a whole mirror, with the flow standing still."""
        view = self._latest
        assigned = self._mirrors.assign(view, self.shape, tasks, self.roster.domains)
        if assigned is None or not all(self.joins.may_begin(u) for u in tasks):
            return []
        return self._commit(assigned.view(view))

    def _fail_unrecovered(self, task: TaskId) -> list[ControllerEffect]:
        """End the flow: a task has no replica, and all attempts to rebuild it have failed."""
        reason = self.joins.unrecovered[task]
        return self._fail(site_lost(self._latest, self.shape, [], [task], reason))

    def _make_room(self) -> list[ControllerEffect]:
        """Begin to move replicas away from sites that are to be emptied, and let go of those that
        the flow can do without. Nothing is missing."""
        view = self._latest
        for site in view.emptying:
            if moves.is_superfluous(view, self.shape, site, self.joins):
                return self._let_go(site)
        if not view.emptying:
            return []
        room, assigned = moves.with_room_made(
            view, lambda v, u: assign(v, self.shape, u, self._candidates), self.joins.may_begin
        )
        if room is not None:
            return self._commit(room)
        return [*self.roster.wait_for_launched()] if assigned.waits else []

    def _complete_moves(self) -> list[ControllerEffect]:
        """Remove replicas that leave and that others have replaced."""
        if not self.running:
            return []
        gone = moves.completed(self._latest, self.shape, self.joins, self._stores)
        effects = self._commit(self._latest.changed(gone)) if gone else []
        return effects + self._recover() if gone or self._latest.emptying else []

    def _let_go(self, site: SiteId) -> list[ControllerEffect]:
        """Go on without a site that holds nothing which the flow needs."""
        self.lifecycle.note(f"site {site} is empty")
        effects: list[ControllerEffect] = [*self.roster.retire(site, EMPTIED)]
        return effects + self._take_over(self._without([site]), [site]) + self._recover()
