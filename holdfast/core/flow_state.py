"""What the controller knows of a flow, and what others ask of it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from holdfast.core.departures import DepartedSites
from holdfast.core.effects import ControllerEffect, DrainFlow, PauseFlow
from holdfast.core.flow_phase import FlowPhase, Lifecycle
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.joins import ReplicaJoins
from holdfast.core.layout import Shape, View
from holdfast.core.losses import unrecoverable
from holdfast.core.mirrors import Mirrors
from holdfast.core.placement import Candidates
from holdfast.core.protection_change import ProtectionChange
from holdfast.core.roster import SiteRoster
from holdfast.core.separation import Exposure, exposures, joint_exposures, lost_stretch
from holdfast.core.task_phase import SAFE, task_phase
from holdfast.core.view_reports import ViewReports


class FlowState:
    """The latest view, and the parts of the controller that keep the rest."""

    def __init__(self, shape: Shape, roster: SiteRoster) -> None:
        self.shape, self.roster = shape, roster
        self.view: View | None = None
        self.lifecycle = Lifecycle()
        self.joins = ReplicaJoins()
        self._reports = ViewReports()
        self._mirrors = Mirrors(used=shape.granularity != "partition")
        self._departed = DepartedSites()

    @property
    def state(self) -> FlowPhase:
        return self.lifecycle.phase

    @property
    def running(self) -> bool:
        return self.lifecycle.running

    @property
    def addresses(self) -> dict[SiteId, tuple[str, int]]:
        """By registered site."""
        return self.roster.addresses

    @property
    def dead(self) -> dict[SiteId, str]:
        """By site: why it died. Only the last ones; `is_dead` knows all."""
        return self.roster.dead

    def is_dead(self, site: SiteId) -> bool:
        """Whether a site is dead, or was never launched."""
        return not self.roster.knows(site)

    @property
    def _latest(self) -> View:
        """The latest view; once the flow runs there is one."""
        assert self.view is not None
        return self.view

    @property
    def _change(self) -> ProtectionChange:
        return ProtectionChange(self._latest, self.shape)

    def _without(self, gone: Collection[SiteId], view: View | None = None) -> View:
        """The next view, without these sites. A mirror is lost with any of its sites."""
        view = (view or self._latest).without(self._mirrors.lost_with(self._latest, gone))
        return replace(view, members=tuple(s for s in self._latest.members if s not in gone))

    def _can_lose(self, *sites: SiteId) -> bool:
        """Whether the flow can continue without these sites. A task that was rebuilt just now may
        not keep enough yet for another to be rebuilt from."""
        view = self._without(sites)
        weak = [u for u, _ in self.joins.replaying if self.shape.stages[u[0]].guard.rebuild_level]
        return not self._lost_in(view) and not lost_stretch(view, self.shape, weak)

    def _lost_in(self, view: View) -> list[TaskId]:
        return unrecoverable(view, self.shape) + self._departed.lost(self._latest, view, self.shape)

    @property
    def _candidates(self) -> Candidates:
        return self.roster.candidates(self._latest.emptying, self.joins.failed_at)

    def orders_for(self, site: SiteId) -> list[ControllerEffect]:
        """The last orders for a site, in case they were lost with its connection."""
        orders: list[ControllerEffect] = [*self.joins.orders_of(site)]
        if self.state is FlowPhase.DRAINING:
            orders += [DrainFlow(s) for s in self._latest.sequencers[:1] if s == site]
        if self._mirrors.used and site == self._latest.sequencers[0]:
            orders.append(PauseFlow(site, self._mirrors.paused(self._latest)))
        if self.seen_by_all:
            orders += [o for o in self._change.retention_orders() if o.site == site]
        return orders

    def phase(self, task: TaskId) -> str:
        """How protected a task is: see the glossary."""
        return task_phase(task, self._latest, self.shape, self.joins)

    @property
    def exposures(self) -> list[Exposure]:
        """The failure domains whose loss would end the flow, because stages that must not be lost
        together share them."""
        if self.view is None:
            return []
        known = (self.view, self.shape, self.roster.domains)
        return exposures(*known) + joint_exposures(*known)

    @property
    def seen_by_all(self) -> bool:
        """Whether all members act on the latest view."""
        return self.view is not None and self._reports.seen_by_all(self.view)

    @property
    def protected(self) -> bool:
        """Whether every task has all its replicas, all of them are up to date, and all members have
        reported that they act on the view."""
        if not self.running or not self.seen_by_all:
            return False
        return all(self.phase(u) in SAFE for u in self._latest.tasks())
