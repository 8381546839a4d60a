"""The controller: gathers the sites, starts the flow, and decides what a failure means.

It takes no part in the flow of data. Its lifecycle is the table below. While the flow runs it
turns failures into views (take-over), and brings missing replicas back, at most one of a stage at a
time (catch-up): it puts the new replica into a view as joining, waits until all members act on that
view, tells the donor to hand over, and makes it a full replica when its state is in place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from enum import Enum
from typing import assert_never

from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    FenceSite,
    LaunchSite,
    OrderCatchUp,
    OrderRetention,
    PauseFlow,
    StartFlow,
    Wait,
)
from holdfast.core.events import (
    ControllerEvent,
    FlowFailed,
    ProtectionWanted,
    ReplicaBehind,
    ReplicaReported,
    SiteFinished,
    SiteRegistered,
    SitesFailed,
    SitesHung,
    SitesPartitioned,
    StopRequested,
    ViewSeen,
    WaitOver,
)
from holdfast.core.ids import FIRST, SiteId, TaskId
from holdfast.core.layout import (
    Domain,
    PartitionGroup,
    Shape,
    View,
    closeness,
    may_join,
    partitions_of,
    place,
)
from holdfast.core.timers import DoubtTimer, PatienceTimer, RejoinTimer
from holdfast.errors import HostError, HungError, InvariantError, SiteLostError


class State(Enum):
    GATHERING = "gathering"
    CONNECTING = "connecting"
    RUNNING = "running"
    DRAINING = "draining"
    DONE = "done"
    FAILED = "failed"


EDGES: dict[State, set[State]] = {
    State.GATHERING: {State.CONNECTING, State.FAILED, State.DONE},
    State.CONNECTING: {State.RUNNING, State.GATHERING, State.FAILED, State.DONE},
    State.RUNNING: {State.DRAINING, State.FAILED, State.DONE},
    State.DRAINING: {State.FAILED, State.DONE},
    State.DONE: set(),
    State.FAILED: set(),
}

BACKOFF_MS = (0, 100, 500, 1_000, 2_000, 5_000)
"""How long to wait before the n-th attempt in a row; the last value repeats."""

STILLBORN_MAX = 5
"""So many lives of a site in a row that ended before they registered are a fault of the set-up."""

JOINS_MAX = 5
"""So many attempts in a row at a replica that all failed are enough; it is reported instead."""

RELAUNCH_MS = 10_000
"""How long a missing replica waits for a site that is being launched before it burdens another."""

APART_LEASES_MAX = 10
"""So long two sites may be apart before the flow is ended, if it can do without neither."""

DOUBT_MS = 300
"""How long to wait for word from a new replica when the one it was made from dies."""


def _backoff_ms(failures: int) -> int:
    return BACKOFF_MS[min(failures, len(BACKOFF_MS) - 1)]


def _listed(sites: Iterable[SiteId]) -> str:
    return ", ".join(str(s) for s in sorted(sites))


def first_id(term: int) -> SiteId:
    """Sites that are launched in different terms have different numbers."""
    return SiteId(1_000 * max(0, term - 1))


class Controller:
    """The machine. The flow begins on `sites`; `standbys` register and wait."""

    def __init__(
        self,
        shape: Shape,
        sites: Sequence[SiteId],
        spares: Sequence[SiteId] = (),
        term: int = 0,
    ) -> None:
        self.shape, self.term = shape, term
        self.sites = list(sites)
        self.spares = list(spares)
        self.state = State.GATHERING
        self.history: deque[str] = deque(maxlen=50)
        self.view: View | None = None
        self.addresses: dict[SiteId, tuple[str, int]] = {}
        self.domains: dict[SiteId, Domain] = {}
        self.dead: dict[SiteId, str] = {}
        self.launched: set[SiteId] = {*sites, *spares}
        """Sites whose processes have been started and have not registered yet."""
        self.unrecovered: dict[TaskId, str] = {}
        """Tasks with a replica missing that nobody tries to make any more, and why."""
        self.replaying: set[tuple[TaskId, SiteId]] = set()
        self.replaced: dict[SiteId, SiteId] = {}
        """By site: the one that was launched in its place."""
        self._next_id = 1 + max([*sites, *spares])
        self._failed_to_start: dict[SiteId, int] = {}
        self._seen: set[SiteId] = set()
        self._ordered: dict[tuple[TaskId, SiteId], tuple[SiteId, int]] = {}
        """By replica that joins: which one was told to hand over to it, and since when it joins."""
        self._failed_joins: dict[TaskId, int] = {}
        self._paused: set[TaskId] = set()
        self._patience, self._asked_for = 0, -1
        """Counts what is launched in place of something, and which of that is waited for."""
        self._patience_over = False
        self._chain_joined_view = 0
        """The number of the view in which a replica of the sequencer was last lost."""
        self._in_doubt: dict[int, SitesFailed] = {}
        self._doubts = 0
        self._paused_flow = False
        self._mirror_of: dict[SiteId, int] = {}
        """With dataflow or cluster pairs: which of the two mirrors a site belongs to."""
        self._finished: set[SiteId] = set()
        self._retained: set[tuple[TaskId, SiteId]] = set()
        """Replicas for which, in this view, all is kept that they are to be rebuilt from."""

    def resume(
        self,
        view: View,
        term: int,
        addresses: dict[SiteId, tuple[str, int]],
        domains: dict[SiteId, Domain],
        dead: dict[SiteId, str],
        running: bool,
        draining: bool,
    ) -> list[ControllerEffect]:
        """Go on in place of a controller that is gone, from what it had committed last."""
        self.term = term
        self.launched = {s for s in self.launched if s not in addresses}
        self.addresses, self.domains, self.dead = addresses, domains, dict(dead)
        self._next_id = max(first_id(term), *(1 + s for s in [*addresses, *dead, *view.members]))
        self.history.append(f"term {term} begins")
        self.view, self.shape = replace(view, term=term), self.shape.under(view)
        if not running:
            return self._gathered()
        self.state = State.DRAINING if draining else State.RUNNING
        # Those that have caught up will say so to a new controller.
        self.replaying = {
            (u, s)
            for u in view.tasks()
            for s in view.group(u).replicas
            if view.group(u).joined_view_of(s)
        }
        return self._commit(replace(self.view, number=view.number + 1)) + self._recover()

    def handle(self, event: ControllerEvent) -> list[ControllerEffect]:
        if self.state in (State.DONE, State.FAILED):
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
                return self._end(State.FAILED, event.error)
            case SiteFinished():
                return self._on_site_finished(event)
            case WaitOver():
                return self._on_wait_over(event)
            case StopRequested():
                return self._on_stop_requested(event)
            case ProtectionWanted():
                return self._on_protection_wanted(event)
        assert_never(event)

    @property
    def running(self) -> bool:
        return self.state in (State.RUNNING, State.DRAINING)

    def _become(self, state: State) -> None:
        if state not in EDGES[self.state]:
            raise InvariantError(
                f"controller: no way from {self.state} to {state}; history: {list(self.history)}"
            )
        self.history.append(f"{self.state.value} -> {state.value}")
        self.state = state

    def _end(self, state: State, error: Exception | None) -> list[ControllerEffect]:
        self._become(state)
        return [EndFlow(error)]

    # --- coming together ------------------------------------------------------------------------

    def _on_site_registered(self, event: SiteRegistered) -> list[ControllerEffect]:
        if event.site in self.dead or event.site not in self.launched:
            return [FenceSite(event.site)]
        self.launched.discard(event.site)
        self.addresses[event.site] = event.address
        self.domains[event.site] = event.domain
        self._failed_to_start.pop(event.site, None)
        self.history.append(f"site {event.site} registered")
        if self.state is State.GATHERING:
            return self._gathered()
        self.unrecovered.clear()
        self._failed_joins.clear()
        return self._recover()

    def _gathered(self) -> list[ControllerEffect]:
        if not all(s in self.addresses for s in self.sites):
            return []
        try:
            placed = self._with_replacements() or place(self.shape, self.sites, self.domains)
        except HostError as error:
            return self._end(State.FAILED, error)
        self._become(State.CONNECTING)
        if self.shape.granularity != "partition":
            self._mirror_of = {
                site: replica
                for stage in placed.groups
                for group in stage
                for replica, site in enumerate(group.replicas)
            }
        number = 0 if self.view is None else self.view.number + 1
        return self._commit(replace(placed, term=self.term, number=number))

    def _with_replacements(self) -> View | None:
        """The view that was committed before the flow could start, with what the lost sites had at
        those that came in their place. The others have opened sinks and sequencers by it, and no
        view takes such a thing from a site that lives."""
        if self.view is None or len(self.view.members) != len(self.sites):
            return None
        instead = dict(zip(self.view.members, self.sites, strict=True))

        def moved(sites: tuple[SiteId, ...]) -> tuple[SiteId, ...]:
            return tuple(instead[s] for s in sites)

        groups = tuple(
            tuple(replace(c, replicas=moved(c.replicas), standbys=moved(c.standbys)) for c in stage)
            for stage in self.view.groups
        )
        view = replace(self.view, members=tuple(self.sites), groups=groups)
        fits = all(
            may_join(self.shape.stages[u[0]], view.group(u).all[:n], site, self.domains)
            for u in view.tasks()
            for n, site in enumerate(view.group(u).all)
        )
        return view if fits else None

    def _commit(self, view: View) -> list[ControllerEffect]:
        self.view, self.shape = view, self.shape.under(view)
        self._seen.clear()
        self._retained.clear()
        self._finished.clear()  # it may give them more to do, such as to lead a sink
        effects: list[ControllerEffect] = [
            CommitView(view, {s: self.addresses[s] for s in view.members})
        ]
        if self.state is State.DRAINING:
            effects.append(DrainFlow(view.sequencers[0]))
        return effects

    def _on_view_seen(self, event: ViewSeen) -> list[ControllerEffect]:
        if self.view is None or (event.term, event.number) != (self.view.term, self.view.number):
            return []
        self._seen.add(event.site)
        if not self.seen_by_all:
            return []
        if self.state is State.CONNECTING:
            self._become(State.RUNNING)
            return [StartFlow(), *self._recover()]
        return [*self._order_catch_ups(), *self._order_retention(), *self._change()]

    # --- take-over ------------------------------------------------------------------------------

    def _on_sites_failed(self, event: SitesFailed) -> list[ControllerEffect]:
        gone = [s for s in event.sites if s not in self.dead and self._is_known(s)]
        if not gone:
            return []
        if not self.running:
            return self._failed_early(gone, event.reason)
        assert self.view is not None
        view = self._without(gone)
        bare = self._lost_with(view)
        if bare and not event.certain:
            return []  # better wait for a silent site than stop
        if bare and all(s in self._finished for s in gone):
            return []  # they had nothing left to do
        if bare and all(view.group(u).joining for u in bare):
            self._doubts += 1
            self._in_doubt[self._doubts] = event
            return [Wait(DoubtTimer(self._doubts), DOUBT_MS)]
        if bare:
            return self._end(State.FAILED, self._lost(gone, bare, event.reason))
        effects = self._remove(gone, event.reason)
        for task in self.view.tasks():
            for site in self.view.group(task).joining:
                if site in gone:
                    effects += self._join_failed(task, f"site {site} died: {event.reason}")
        self.replaying = {(u, s) for u, s in self.replaying if s not in gone}
        if any(s in self.view.members for s in gone):
            if view.group(FIRST).replicas != self.view.group(FIRST).replicas:
                self._chain_joined_view = view.number
            effects += self._commit(view)
            effects += self._pause(False)
        return effects + self._recover()

    def _without(self, gone: Iterable[SiteId]) -> View:
        """The next view without these; of a whole mirror nothing is left with one site of it."""
        assert self.view is not None
        view = self.view.without(gone)
        if self.shape.granularity == "partition":
            return view
        return self._useless(view, {r for s, r in self._mirror_of.items() if s in gone})

    def _useless(self, view: View, lost: set[int]) -> View:
        """`view`, with all replicas of these mirrors gone, but not their sites."""
        sites = [s for s in view.members if self._mirror_of.get(s) in lost]
        return replace(view.without(sites), number=view.number, members=view.members)

    def _lost_with(self, view: View) -> list[TaskId]:
        """The tasks of which nothing is left in a view, and that cannot be rebuilt either."""
        return [u for u in view.bare() if not self.shape.stages[u[0]].guard.rebuild_level]

    def _is_known(self, site: SiteId) -> bool:
        return site in self.launched or site in self.addresses

    def _remove(self, gone: Iterable[SiteId], reason: str) -> list[ControllerEffect]:
        """Never deal with these again; launch others in their place."""
        effects: list[ControllerEffect] = []
        for site in gone:
            self.history.append(f"site {site} failed: {reason}")
            self.dead[site] = reason
            for known in (self.addresses, self.domains):
                known.pop(site, None)
            born = site not in self.launched
            self.launched.discard(site)
            effects += [FenceSite(site), self._replacement(site, 0 if born else 1)]
        return effects

    def _replacement(self, site: SiteId, failed_to_start: int) -> LaunchSite:
        new = SiteId(self._next_id)
        self._next_id += 1
        self.launched.add(new)
        self.replaced[site] = new
        self._patience += 1
        self._patience_over = False
        if site in self._mirror_of:
            self._mirror_of[new] = self._mirror_of.pop(site)
        self._failed_to_start[new] = failed_to_start and self._failed_to_start.get(site, 0) + 1
        for group in (self.sites, self.spares):
            if site in group:
                group[group.index(site)] = new
        return LaunchSite(new, _backoff_ms(self._failed_to_start[new]))

    def _failed_early(self, gone: list[SiteId], reason: str) -> list[ControllerEffect]:
        worst = max(self._failed_to_start.get(s, 0) + 1 if s in self.launched else 0 for s in gone)
        effects = self._remove(gone, reason)
        if worst >= STILLBORN_MAX:
            text = f"a site was launched {STILLBORN_MAX} times and never came up: {reason}"
            return self._end(State.FAILED, HostError(text))
        if self.state is State.CONNECTING:
            self._become(State.GATHERING)  # the others are placed again when it is back
        return effects

    def _lost(self, gone: list[SiteId], bare: list[TaskId], reason: str) -> SiteLostError:
        assert self.view is not None
        names = partitions_of(self.view, bare, self.shape)
        protected = any(self.shape.stages[u[0]].guard.wanted > 1 for u in bare)
        said = "no replica is left of" if protected else "its partitions were not protected:"
        happened = f"site {_listed(gone)} died ({reason})" if gone else reason
        return SiteLostError(
            f"{happened}; {said} {names}",
            hint="start the flow again"
            + (", with more replicas" if protected else ", or protect its stages with pairs()"),
        )

    # --- catch-up -------------------------------------------------------------------------------

    def _recover(self) -> list[ControllerEffect]:
        """Begin to make replicas that are missing, at most one of a stage at a time."""
        if not self.running:
            return []
        assert self.view is not None
        changes: dict[TaskId, PartitionGroup] = {}
        added: list[SiteId] = []
        effects: list[ControllerEffect] = []
        if self.shape.granularity != "partition":
            return self._recover_mirror()
        busy = {u[0] for u in self.view.tasks() if self.view.group(u).joining}
        load = self._load()
        for task in self._missing():
            group = self.view.group(task)
            bare = not group.replicas
            if bare and task in self.unrecovered:
                return [*effects, *self._given_up(task)]
            # Of what is rebuilt there is one at first; others are copied from it.
            begun = bool(group.joining) if bare else task[0] in busy
            if begun or task in self._paused or task in self.unrecovered:
                continue
            site = self._joiner(task, load)
            if site is None:
                continue
            changes[task] = group.joined_by(site, self.view.number + 1)
            added.append(site)
            load[site] += 1
            busy.add(task[0])
        if changes:
            effects += self._commit(self.view.changed(changes, added))
        elif self.launched and self._missing() and self._asked_for != self._patience:
            self._asked_for = self._patience
            effects.append(Wait(PatienceTimer(self._patience), RELAUNCH_MS))
        return effects

    def _given_up(self, task: TaskId) -> list[ControllerEffect]:
        """There is no replica of it, and nobody could rebuild it."""
        return self._end(State.FAILED, self._lost([], [task], self.unrecovered[task]))

    def _recover_mirror(self) -> list[ControllerEffect]:
        """Rebuild a whole mirror, all at once and with the flow standing still: what partition
        pairs are there to avoid. All its sites must be there before it can begin."""
        assert self.view is not None
        missing = self._missing()
        replicas = [s for u in self.view.tasks() for s in self.view.group(u).replicas]
        kept = {self._mirror_of[s] for s in replicas}
        sites = sorted(s for s, r in self._mirror_of.items() if r not in kept)
        if not missing or not sites or any(s not in self.addresses for s in sites):
            return []
        if any(u in self._paused or u in self.unrecovered for u in missing):
            return []
        changes = {}
        for task in missing:
            group, site = self.view.group(task), sites[task[1] % len(sites)]
            changes[task] = group.joined_by(site, self.view.number + 1)
        return [*self._commit(self.view.changed(changes, sites)), *self._pause(True)]

    def _pause(self, paused: bool) -> list[ControllerEffect]:
        if paused == self._paused_flow:
            return []
        assert self.view is not None
        self._paused_flow = paused
        return [PauseFlow(self.view.sequencers[0], paused)]

    def _missing(self) -> list[TaskId]:
        assert self.view is not None
        return [
            u
            for u in self.view.tasks()
            if len(self.view.group(u).all) < self.shape.stages[u[0]].guard.wanted
        ]

    def _load(self) -> dict[SiteId, int]:
        assert self.view is not None
        return {s: len(self.view.tasks_at(s)) for s in self.addresses}

    def _joiner(self, task: TaskId, load: dict[SiteId, int]) -> SiteId | None:
        """Who shall get the replica: the site with least to do among those that are apart."""
        assert self.view is not None
        stage, replicas = self.shape.stages[task[0]], self.view.group(task).all
        fit = [s for s in load if may_join(stage, replicas, s, self.domains)]
        if not fit:
            if not self.launched:
                apart = stage.guard.failure_domain
                self.unrecovered[task] = f"no site is in another {apart} than its replicas"
            return None
        wanted = sum(self.shape.stages[u[0]].guard.wanted for u in self.view.tasks())
        fair = wanted // max(1, len(self.sites))
        best = min(fit, key=lambda s: (load[s], closeness(replicas, s, self.domains), s))
        if replicas and load[best] >= fair and self.launched and not self._patience_over:
            return None  # a site is about to come that has nothing to do
        return best

    def _order_catch_ups(self) -> list[ControllerEffect]:
        """All members count the joining replicas: whatever they need from now on is kept."""
        assert self.view is not None
        effects: list[ControllerEffect] = []
        for task in self.view.tasks():
            group = self.view.group(task)
            for joiner in group.joining if group.replicas else ():
                order = (group.donor, group.joined_view_of(joiner))
                if self._ordered.get((task, joiner)) != order:
                    self._ordered[task, joiner] = order
                    effects.append(OrderCatchUp(group.donor, task, joiner))
        return effects

    def _on_replica_reported(self, event: ReplicaReported) -> list[ControllerEffect]:
        assert self.view is not None
        group = self.view.group(event.task)
        if event.phase == "caught_up":
            self.replaying.discard((event.task, event.site))
            return []
        if event.phase == "retained":
            if event.number == self.view.number:
                self._retained.add((event.task, event.site))
            return self._change()
        if event.site not in group.joining or event.number < group.joined_view_of(event.site):
            return []  # word of a replica that was given up
        if event.phase == "impossible":
            return self._end(State.FAILED, self._not_rebuilt(event.task))
        if (
            event.task == FIRST
            and event.phase == "installed"
            and event.number < self._chain_joined_view
        ):
            return []  # it is in a chain that is no more, and will say so again
        if event.phase == "installed":
            self._ordered.pop((event.task, event.site), None)
            self._failed_joins.pop(event.task, None)
            joined = group.installed_at(event.site, self.shape.stages[event.task[0]].guard.replicas)
            if event.site in joined.replicas:
                self.replaying.add((event.task, event.site))
            self.view = self.view.changed({event.task: joined})
            effects = [e for d in self._resolved() for e in self._on_sites_failed(d)]
            if not any(self.view.group(u).joining for u in self.view.tasks()):
                effects += self._pause(False)
            if self.running:
                effects += self._recover()
            # Whatever changed since, the last view is the one to act on.
            if self.running and not any(isinstance(e, CommitView) for e in effects):
                effects += self._commit(self.view)
            return effects + self._change()
        effects = self._join_failed(event.task, event.reason)
        if event.task in self.unrecovered and not group.replicas:
            return self._given_up(event.task)
        view = self.view.changed({event.task: group.without([event.site])})
        if self.shape.granularity != "partition":
            self._ordered.clear()
            view = self._useless(view, {self._mirror_of[event.site]})
        return effects + self._commit(view) + self._pause(False)

    # --- changing protection --------------------------------------------------------------------

    def _on_protection_wanted(self, event: ProtectionWanted) -> list[ControllerEffect]:
        """At first, what was kept and who was there is still kept and there, until the new
        protection holds: see `ProtectionSpec.towards`."""
        if self.view is None or self.state is not State.RUNNING:
            return []
        before, aims = self.shape.guards, event.guards
        guards = tuple(g.towards(aim) for g, aim in zip(before, aims, strict=True))
        self.history.append("protection changes")
        self.unrecovered.clear()
        view = self.view.guarded(before, guards, () if guards == aims else aims)
        return self._commit(view) + self._recover()

    def _order_retention(self) -> list[OrderRetention]:
        """All members act on the view: from now on nothing is let go that will be needed."""
        assert self.view is not None
        if not self.view.aims:
            return []
        held = {
            site: None
            for task in self.view.tasks()
            for site in self.view.group(task).replicas
            if self._lacks_retention(task)
        }
        return [OrderRetention(site, self.view.number) for site in held]

    def _lacks_retention(self, task: TaskId) -> bool:
        assert self.view is not None
        guard = self.shape.stages[task[0]].guard
        return guard.rebuild_level < guard.level and self.view.aims[task[0]].level == guard.level

    def _change(self) -> list[ControllerEffect]:
        """Protect as wanted, if what comes before it is in place."""
        if self.view is None or not self.view.aims or not self.running:
            return []
        for task in self.view.tasks():
            group = self.view.group(task)
            if not self._has_all(task) or group.joining:
                return []
            retained = all((task, site) in self._retained for site in group.replicas)
            if self._lacks_retention(task) and not retained:
                return []
        self.history.append("protection has changed")
        view = self.view.guarded(self.shape.guards, self.view.aims)
        return self._commit(view) + self._recover()

    def _has_all(self, task: TaskId) -> bool:
        assert self.view is not None
        group, guard = self.view.group(task), self.shape.stages[task[0]].guard
        return len(group.replicas) >= guard.replicas and len(group.standbys) >= guard.standbys

    def _not_rebuilt(self, task: TaskId) -> SiteLostError:
        assert self.view is not None
        names = partitions_of(self.view, [task], self.shape)
        level = self.shape.stages[task[0]].guard.level
        return SiteLostError(
            f"{names} cannot be rebuilt: more than {level} stages in a row were lost within a "
            "short time, and with them what it needs",
            hint=f"start the flow again, with upstream(k={level + 1})",
        )

    def _resolved(self) -> list[SitesFailed]:
        doubts, self._in_doubt = self._in_doubt, {}
        return list(doubts.values())

    def _join_failed(self, task: TaskId, reason: str) -> list[ControllerEffect]:
        for key in [k for k in self._ordered if k[0] == task]:
            del self._ordered[key]
        count = self._failed_joins[task] = self._failed_joins.get(task, 0) + 1
        self.history.append(f"copying of {task} failed: {reason}")
        if count >= JOINS_MAX:
            self.unrecovered[task] = f"{JOINS_MAX} attempts failed, the last because {reason}"
            return []
        self._paused.add(task)
        return [Wait(RejoinTimer(task), _backoff_ms(count - 1))]

    def _on_replica_behind(self, event: ReplicaBehind) -> list[ControllerEffect]:
        """A slow replica must not govern the flow: let it go, if the flow can do without it."""
        if self.view is None or not self.running or event.site not in self.view.members:
            return []
        joins = [u for u in self.view.tasks() if event.site in self.view.group(u).joining]
        if joins and self.shape.granularity == "partition":
            number = self.view.number
            words = [ReplicaReported(event.site, u, number, "failed", event.reason) for u in joins]
            return [e for word in words for e in self._on_replica_reported(word)]
        if not self._lost_with(self._without([event.site])):
            return self._on_sites_failed(SitesFailed((event.site,), event.reason))
        return []

    def _on_sites_partitioned(self, event: SitesPartitioned) -> list[ControllerEffect]:
        """Let one of them go: who is apart from most others, or else has least to lose. Whoever
        remains apart will be heard of again."""
        if self.view is None or not self.running:
            return []
        members = set(self.view.members)
        couples = {c: said for c, said in event.couples.items() if members.issuperset(c)}
        others: dict[SiteId, dict[SiteId, str]] = {}
        for (one, other), (_, how) in couples.items():
            others.setdefault(one, {})[other] = how
            others.setdefault(other, {})[one] = how
        load = self._load()
        for site in sorted(others, key=lambda s: (-len(others[s]), load[s], -s)):
            if not self._lost_with(self._without([site])):
                how = "; ".join(sorted(set(others[site].values())))
                reason = f"it and site {_listed(others[site])} have heard nothing of each other"
                return self._on_sites_failed(SitesFailed((site,), f"{reason}: {how}"))
        if all(leases < APART_LEASES_MAX for leases, _ in couples.values()):
            return []
        (one, other), (leases, how) = max(couples.items(), key=lambda item: item[1])
        return self._end(
            State.FAILED,
            HostError(
                f"sites {one} and {other} have heard nothing of each other for {leases} leases "
                f"({how}), and of what they hold there is no other replica",
                hint="is the network between the executors sound?",
            ),
        )

    def _on_sites_hung(self, event: SitesHung) -> list[ControllerEffect]:
        """Fail the site, if its call would end elsewhere. If several are in the same stage, it is
        the stage's code or what that waits for, and the next replica would hang as well."""
        if self.view is None or not self.running:
            return []
        calls = {s: c for s, c in event.calls.items() if s in self.view.members}
        for site, call in sorted(calls.items(), key=lambda item: -item[1].seconds):
            if call.seconds <= event.limit_s:
                continue
            alike = sorted(s for s, c in calls.items() if call.stage and c.stage == call.stage)
            spared = not self._lost_with(self._without([site]))
            if len(alike) < 2 and spared:
                return self._on_sites_failed(SitesFailed((site,), f"it has been {call}"))
            who = f"sites {_listed(alike)} have" if len(alike) > 1 else f"site {site} has"
            return self._end(
                State.FAILED,
                HungError(
                    f"{who} been {call}"
                    + (
                        "" if len(alike) > 1 else ", and of what it holds there is no other replica"
                    ),
                    hint="does a function of the flow wait for something that does not come? If "
                    "calls take that long, have smaller epochs, with "
                    "Options(budget=Budget(epoch_rows_max=...)), or allow for it, with "
                    "Options(call_timeout=...)",
                ),
            )
        return []

    def _on_wait_over(self, event: WaitOver) -> list[ControllerEffect]:
        match event.timer:
            case DoubtTimer():
                return self._on_doubt_over(event.timer)
            case RejoinTimer():
                self._paused.discard(event.timer.task)
            case PatienceTimer():
                self._patience_over = event.timer.number == self._patience
            case _:
                assert_never(event.timer)
        return self._recover()

    def _on_doubt_over(self, timer: DoubtTimer) -> list[ControllerEffect]:
        if timer.number not in self._in_doubt or not self.running:
            return []
        doubts = self._resolved()
        assert self.view is not None
        gone = [s for d in doubts for s in d.sites]
        bare = self._lost_with(self._without(gone))
        return self._end(State.FAILED, self._lost(gone, bare, doubts[0].reason))

    def orders_for(self, site: SiteId) -> list[ControllerEffect]:
        """What a site was told last, in case that was lost with its connection."""
        orders: list[ControllerEffect] = [
            OrderCatchUp(donor, task, joiner)
            for (task, joiner), (donor, _) in self._ordered.items()
            if donor == site
        ]
        if self.state is State.DRAINING and self.view is not None:
            orders += [DrainFlow(s) for s in self.view.sequencers[:1] if s == site]
        if self._paused_flow:
            orders.append(PauseFlow(site, True))
        if self.seen_by_all:
            orders += [o for o in self._order_retention() if o.site == site]
        return orders

    # --- the end --------------------------------------------------------------------------------

    def _on_site_finished(self, event: SiteFinished) -> list[ControllerEffect]:
        if self.view is not None and event.number == self.view.number:
            self._finished.add(event.site)
        return self._end_if_finished()

    def _end_if_finished(self) -> list[ControllerEffect]:
        if self.view is None or not self.running:
            return []
        at_work = {s for u in self.view.tasks() for s in self.view.group(u).replicas}
        if not self.view.bare() and self._finished.issuperset(at_work):
            return self._end(State.DONE, None)
        return []

    def _on_stop_requested(self, event: StopRequested) -> list[ControllerEffect]:
        if event.drain and self.state is State.RUNNING:
            self._become(State.DRAINING)
            assert self.view is not None
            return [DrainFlow(self.view.sequencers[0])]
        if event.drain and self.state is State.DRAINING:
            return []
        return self._end(State.DONE, None)

    # --- being watched --------------------------------------------------------------------------

    def phase(self, task: TaskId) -> str:
        """How protected a task is: see the glossary."""
        assert self.view is not None
        group, stage = self.view.group(task), self.shape.stages[task[0]]
        if self.view.aims and stage.guard != self.view.aims[task[0]]:
            return "changing"
        if stage.guard.wanted == 1 and not stage.guard.level:
            return "not protected"
        if not group.replicas:
            return "rebuilt"
        if group.joining:
            return "copying" if any(u == task for u, _ in self._ordered) else "taken over"
        if not self._has_all(task):
            return "taken over"
        return "replaying" if any(u == task for u, _ in self.replaying) else "protected"

    @property
    def seen_by_all(self) -> bool:
        """Whether all members act on the latest view."""
        return self.view is not None and self._seen.issuperset(self.view.members)

    @property
    def protected(self) -> bool:
        """Whether every task has all its replicas, and all of them are up to date and have said
        that they act on the view."""
        if self.view is None or not self.running or not self.seen_by_all:
            return False
        return all(self.phase(u) in ("protected", "not protected") for u in self.view.tasks())
