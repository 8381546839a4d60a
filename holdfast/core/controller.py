"""The controller: gathers the sites, starts the flow, and decides what a failure means.

It takes no part in the flow of data. While the flow runs it turns failures into views without the
sites that failed (take-over), and replaces missing replicas, at most one of a stage at a time
(catch-up): it puts the new replica into a view as joining, waits until all members act on that
view, orders the donor to hand over, and makes it a full replica when its state is in place.

The controller is the one way in. It knows the flow's state (`FlowState`) and makes views
(`ViewMaker`). Its parts keep the rest:

- `Lifecycle`: the phase that the flow is in;
- `SiteRoster`: which sites are launched, registered or dead;
- `ReplicaJoins`: which replicas join, and which attempts have failed;
- `ViewReports`: what sites have reported about the latest view;
- `Mirrors`: whole mirrors, for dataflow and cluster pairs.

Decisions that need no state are functions: where replicas go (`holdfast.core.placement`), what the
loss of a site means (`holdfast.core.losses`), when a change of protection is complete
(`holdfast.core.protection_change`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import assert_never

from holdfast.core import moves, protection_change
from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    FenceSite,
    StartFlow,
)
from holdfast.core.events import (
    ControllerEvent,
    FlowFailed,
    ReplicaBehind,
    ReplicaReported,
    SiteFinished,
    SiteRegistered,
    SitesFailed,
    SitesHung,
    SitesPartitioned,
    StoreUnderWay,
    ViewSeen,
    WaitOver,
)
from holdfast.core.flow_phase import FlowPhase, PhaseEvent
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.joins import DoubtfulLosses
from holdfast.core.layout import Domain, Shape, View
from holdfast.core.losses import (
    judge_hung,
    judge_partition,
    not_rebuilt,
    site_lost,
    unrecoverable,
)
from holdfast.core.placement import (
    load_of,
    place,
    substituted,
)
from holdfast.core.requests import (
    Change,
    EmptySites,
    MovesWanted,
    ProtectionWanted,
    SitesWanted,
    StopRequested,
)
from holdfast.core.roster import EMPTIED, FAILED_STARTS_MAX, RELAUNCH_MS, SiteRoster, first_id
from holdfast.core.timers import DoubtTimer, PatienceTimer, RejoinTimer
from holdfast.core.view_maker import ViewMaker
from holdfast.errors import HoldfastError, HostError


class Controller(ViewMaker):
    """The machine. The flow begins on `sites`; `spares` register and wait."""

    def __init__(
        self,
        shape: Shape,
        sites: Sequence[SiteId],
        spares: Sequence[SiteId] = (),
        term: int = 0,
        relaunch_ms: int = RELAUNCH_MS,
        groups_per_site: int = 1,
    ) -> None:
        """A keyed stage has this number of partition groups for each site, if it has as many
        partitions."""
        super().__init__(shape, SiteRoster(sites, spares, relaunch_ms))
        self.term, self._groups_per_site = term, groups_per_site
        self._doubtful = DoubtfulLosses()

    def resume(
        self,
        view: View,
        term: int,
        addresses: dict[SiteId, tuple[str, int]],
        domains: dict[SiteId, Domain],
        dead: dict[SiteId, str],
        running: bool,
        draining: bool,
        orphans: Sequence[SiteId] = (),
        next_id: SiteId | None = None,
    ) -> list[ControllerEffect]:
        """Continue in place of a controller that is gone, from what it had committed last. It has
        launched the orphans, and they have not registered. It cannot have launched a site with the
        number `next_id` or above, also after that commit."""
        self.term = term
        used = [1 + s for s in (*addresses, *orphans, *dead, *view.members)]
        new_id = SiteId(max(first_id(term), next_id or 0, *used))
        self.roster.resume(addresses, domains, dead, new_id)
        self.lifecycle.note(f"term {term} begins")
        self.view, self.shape = replace(view, term=term), self.shape.under(view)
        effects = self._resume_running(draining) if running else self._place_if_gathered()
        # New replicas do not wait for orphans: their processes may never have been started.
        self.roster.await_launched(orphans)
        return effects

    def _resume_running(self, draining: bool) -> list[ControllerEffect]:
        self.lifecycle.advance(PhaseEvent.RESUMED)
        if draining:
            self.lifecycle.advance(PhaseEvent.DRAIN_REQUESTED)
        self.joins.resume(self._latest)
        return self._commit(replace(self._latest, number=self._latest.number + 1)) + self._recover()

    def handle(self, event: ControllerEvent) -> list[ControllerEffect]:
        """What an event leads to. After the end of the flow, nothing."""
        if self.lifecycle.over:
            return []
        match event:
            case SiteRegistered():
                return self._on_site_registered(event)
            case ViewSeen():
                return self._on_view_seen(event)
            case SitesFailed():
                return self._on_sites_failed(event)
            case ReplicaReported():
                return self._on_replica_reported(event)
            case ReplicaBehind():
                return self._on_replica_behind(event)
            case SitesPartitioned():
                return self._on_sites_partitioned(event)
            case SitesHung():
                return self._on_sites_hung(event)
            case FlowFailed():
                left = event.site >= 0 and self.is_dead(event.site)
                return [] if left else self._fail(event.error)
            case StoreUnderWay():
                self._stores = event.under_way
                return self._complete_moves()
            case SiteFinished():
                return self._on_site_finished(event)
            case WaitOver():
                return self._on_wait_over(event)
            case StopRequested():
                return self._on_stop_requested(event)
            case ProtectionWanted() | MovesWanted() | EmptySites() | SitesWanted():
                return self._on_change(event) if self.state is FlowPhase.RUNNING else []
        assert_never(event)

    def _on_change(self, event: Change) -> list[ControllerEffect]:
        match event:
            case ProtectionWanted():
                return self._on_protection_wanted(event)
            case MovesWanted():
                return self._on_moves_wanted(event)
            case EmptySites():
                return self._on_empty_sites(event)
            case SitesWanted():
                return self._on_sites_wanted(event)
        assert_never(event)

    # --- gathering sites ------------------------------------------------------------------------

    def _on_site_registered(self, event: SiteRegistered) -> list[ControllerEffect]:
        if not self.roster.register(event.site, event.address, event.domain):
            return [FenceSite(event.site)]
        self.lifecycle.note(f"site {event.site} registered")
        if self.state is FlowPhase.GATHERING:
            return self._place_if_gathered()
        self.joins.forget_failures()
        return self._recover()

    def _place_if_gathered(self) -> list[ControllerEffect]:
        """Place the flow on its sites, when all have registered."""
        if not self.roster.gathered:
            return []
        sites, domains, before = self.roster.sites, self.roster.domains, self.view
        try:
            again = substituted(before, self.shape, sites, domains) if before is not None else None
            placed = again or place(self.shape, sites, domains, self._groups_per_site)
        except HostError as error:
            return self._fail(error)
        self.lifecycle.advance(PhaseEvent.PLACED)
        number = 0 if before is None else before.number + 1
        return self._commit(replace(placed, term=self.term, number=number))

    def _on_view_seen(self, event: ViewSeen) -> list[ControllerEffect]:
        if self.view is None or (event.term, event.number) != (self.view.term, self.view.number):
            return []  # that was an earlier view
        self._reports.on_seen(event.site)
        if not self.seen_by_all:
            return []
        if self.state is FlowPhase.CONNECTING:
            self.lifecycle.advance(PhaseEvent.CONNECTED)
            return [StartFlow(), *self._recover()]
        catch_ups, retention = self.joins.order(self.view), self._change.retention_orders()
        return [*catch_ups, *retention, *self._complete_change()]

    # --- take-over ------------------------------------------------------------------------------

    def _on_sites_failed(self, event: SitesFailed) -> list[ControllerEffect]:
        gone = [s for s in event.sites if self.roster.knows(s)]
        if not gone:
            return []
        if not self.running:
            return self._remove_early(gone, event.reason)
        if not event.certain and not self._can_lose(*gone):
            return []  # they may live
        before, view = self._latest, self._without(gone)
        useless = self._mirrors.lost_with(before, gone)
        if lost := self._lost_in(view):
            return self._on_tasks_lost(event, gone, view, lost)
        effects = self._remove(gone, event.reason)
        for task in before.tasks():
            for site in before.group(task).joining:
                if site in useless:
                    effects += self._join_failed(task, f"site {gone[0]} died: {event.reason}")
        if any(s in before.members for s in gone):
            view = self._without(gone, moves.without_moves(before))  # recovery comes first
        return effects + self._take_over(view, useless) + self._recover()

    def _on_tasks_lost(
        self, event: SitesFailed, gone: list[SiteId], view: View, lost: list[TaskId]
    ) -> list[ControllerEffect]:
        """No replica of these tasks would be left: end the flow, unless the sites have finished, or
        joining replicas may be in place. If all leaders have finished, everything is delivered."""
        if self._reports.have_finished(gone):
            after = self._departed.add(gone, self._latest)
            done = self._reports.leaders_have_finished(self._latest)
            return self._end() if done else self._commit(after) if after is not None else []
        if all(view.group(u).joining for u in lost):
            return [self._doubtful.add(event)]
        return self._fail(site_lost(self._latest, self.shape, gone, lost, event.reason))

    def _remove_early(self, gone: list[SiteId], reason: str) -> list[ControllerEffect]:
        """Remove sites before the flow has started. The others are placed again when the sites are
        there that replace them."""
        failed_starts = self.roster.failed_starts(gone)
        effects = self._remove(gone, reason)
        if failed_starts >= FAILED_STARTS_MAX:
            text = f"a site was launched {FAILED_STARTS_MAX} times and never registered: {reason}"
            return self._fail(HostError(text))
        self.lifecycle.advance(PhaseEvent.SITE_LOST)
        return effects

    def _on_replica_behind(self, event: ReplicaBehind) -> list[ControllerEffect]:
        """A slow replica must not slow down the flow: give it up, if the flow can continue."""
        if not self.running or event.site not in self._latest.members:
            return []
        view = self._latest
        joining = [u for u in view.tasks() if event.site in view.group(u).joining]
        if not joining or self._mirrors.used:
            gone = SitesFailed((event.site,), event.reason)
            return self._on_sites_failed(gone) if self._can_lose(event.site) else []
        effects: list[ControllerEffect] = []
        for task in joining:
            failed = ReplicaReported(event.site, task, view.number, "failed", event.reason)
            effects += self._on_replica_reported(failed)
        return effects

    def _on_sites_partitioned(self, event: SitesPartitioned) -> list[ControllerEffect]:
        if not self.running:
            return []
        load = load_of(self._latest, self.addresses)
        members = self._latest.members
        return self._execute(judge_partition(event.couples, members, load, self._can_lose))

    def _on_sites_hung(self, event: SitesHung) -> list[ControllerEffect]:
        if not self.running:
            return []
        return self._execute(judge_hung(event, self._latest.members, self._can_lose))

    def _execute(self, verdict: SitesFailed | HoldfastError | None) -> list[ControllerEffect]:
        match verdict:
            case SitesFailed():
                return self._on_sites_failed(verdict)
            case HoldfastError():
                return self._fail(verdict)
            case None:
                return []

    # --- catch-up -------------------------------------------------------------------------------

    def _on_replica_reported(self, event: ReplicaReported) -> list[ControllerEffect]:
        if event.phase == "caught_up":
            self.joins.on_caught_up(event.task, event.site)
            return self._complete_moves()
        if event.phase == "retained":
            if event.number == self._latest.number:
                self._reports.on_retained(event.task, event.site)
            return self._complete_change()
        if self.joins.is_stale(event, self._latest.group(event.task)):
            return []
        if event.phase == "impossible":
            return self._fail(not_rebuilt(self._latest, self.shape, event.task))
        if event.phase == "installed":
            return self._on_installed(event.task, event.site)
        return self._on_join_failed(event)

    def _on_installed(self, task: TaskId, site: SiteId) -> list[ControllerEffect]:
        replicas = self.shape.stages[task[0]].guard.replicas
        group = self._latest.group(task).installed_at(site, replicas)
        self.joins.on_installed(task, site, computes=site in group.replicas)
        self.view = self._latest.changed({task: group})
        effects = [e for loss in self._doubtful.take() for e in self._on_sites_failed(loss)]
        if self.running:
            effects += self._recover()
        # Whatever else has changed since, the last view is the one to act on.
        if self.running and not any(isinstance(e, CommitView) for e in effects):
            effects += self._commit(self.view)
        return effects + self._complete_change() + self._complete_moves()

    def _on_join_failed(self, event: ReplicaReported) -> list[ControllerEffect]:
        effects = self._join_failed(event.task, event.reason)
        group = self._latest.group(event.task)
        if event.task in self.joins.unrecovered and not group.replicas:
            return self._fail_unrecovered(event.task)
        if self._mirrors.used:
            return effects + self._break_off_mirror(event.site)
        view = self._latest.changed({event.task: group.without([event.site])})
        return effects + self._commit(view)

    def _break_off_mirror(self, site: SiteId) -> list[ControllerEffect]:
        """A replica of a mirror failed to join at this site: no other one of it remains. Its sites
        remain members."""
        useless = self._mirrors.lost_with(self._latest, [site])
        self.joins.clear_orders()
        self.joins.on_sites_lost(useless)
        view = self._latest.without(useless)
        return self._commit(replace(view, members=self._latest.members))

    def _join_failed(self, task: TaskId, reason: str) -> list[ControllerEffect]:
        self.lifecycle.note(f"a replica of {task} failed to join: {reason}")
        targets = [target for _, target in self._latest.group(task).moving]
        if targets:
            return [*self.joins.on_move_failed(task, targets)]
        return [*self.joins.on_failed(task, reason)]

    def _on_wait_over(self, event: WaitOver) -> list[ControllerEffect]:
        match event.timer:
            case DoubtTimer():
                return self._on_doubt_over(event.timer)
            case RejoinTimer():
                self.joins.on_wait_over(event.timer)
            case PatienceTimer():
                self.roster.on_wait_over(event.timer)
            case _:
                assert_never(event.timer)
        return self._recover()

    def _on_doubt_over(self, timer: DoubtTimer) -> list[ControllerEffect]:
        """No report of a joining replica has come in time."""
        if timer not in self._doubtful or not self.running:
            return []
        losses = self._doubtful.take()
        gone = [s for loss in losses for s in loss.sites]
        lost = unrecoverable(self._without(gone), self.shape)
        return self._fail(site_lost(self._latest, self.shape, gone, lost, losses[0].reason))

    # --- changing protection --------------------------------------------------------------------

    def _on_protection_wanted(self, event: ProtectionWanted) -> list[ControllerEffect]:
        view, domains = self._latest, self.roster.domains
        aims = replace(view, aims=event.guards)
        if view.emptying and moves.too_few(self.shape, aims, view.emptying, domains):
            return []
        self.lifecycle.note("protection changes")
        self.joins.allow_another()
        begun = protection_change.begun(self._latest, self.shape, event.guards)
        return self._commit(begun) + self._recover()

    def _complete_change(self) -> list[ControllerEffect]:
        """Protect as wanted, if all is in place that this needs."""
        view = self._change.completed(self._reports) if self.running else None
        if view is None:
            return []
        self.lifecycle.note("protection has changed")
        return self._commit(view) + self._recover()

    # --- moves ----------------------------------------------------------------------------------

    def _on_moves_wanted(self, event: MovesWanted) -> list[ControllerEffect]:
        view, domains = self._latest, self.roster.domains
        possible = moves.possible(view, self.shape, domains, event.moves)
        return self._commit(moves.begun(view, possible)) if possible else []

    def _on_empty_sites(self, event: EmptySites) -> list[ControllerEffect]:
        view, domains = self._latest, self.roster.domains
        gone = {*view.emptying, *event.sites}
        if self._mirrors.used or moves.too_few(self.shape, view, gone, domains):
            return []
        effects: list[ControllerEffect] = []
        for site in event.sites:
            if site not in view.members and self.roster.knows(site):
                effects += self.roster.retire(site, EMPTIED)
        emptying = moves.emptying(view, event.sites)
        if emptying.emptying != view.emptying:
            effects += self._commit(emptying)
        return effects + self._recover()

    def _on_sites_wanted(self, event: SitesWanted) -> list[ControllerEffect]:
        view = self._latest
        going = [s for s in self.roster.sites if s in view.emptying]
        surplus = len(self.roster.sites) - len(going) - event.count
        if surplus > 0:
            known = self.roster.domains
            gone = moves.easiest_to_empty(view, self.roster.sites, known, surplus)
            return self._on_empty_sites(EmptySites(gone))
        launched = self.roster.resize(event.count + len(going))
        if not launched:
            return []
        return [*launched, *self._commit(replace(view, number=view.number + 1))]

    # --- the end --------------------------------------------------------------------------------

    def _on_site_finished(self, event: SiteFinished) -> list[ControllerEffect]:
        if self.view is not None and event.number == self.view.number:
            self._reports.on_finished(event.site)
        if not self.running or self._latest.bare():
            return []
        at_work = {s for u in self._latest.tasks() for s in self._latest.group(u).replicas}
        return self._end() if self._reports.have_finished(at_work) else []

    def _on_stop_requested(self, event: StopRequested) -> list[ControllerEffect]:
        if event.drain and self.state is FlowPhase.RUNNING:
            self.lifecycle.advance(PhaseEvent.DRAIN_REQUESTED)
            return [DrainFlow(self._latest.sequencers[0])]
        if event.drain and self.state is FlowPhase.DRAINING:
            return []
        return self._end()

    def _end(self) -> list[ControllerEffect]:
        self.lifecycle.advance(PhaseEvent.ENDED)
        return [EndFlow(None)]
