"""Replicas that join: which were ordered, which failed and when they are tried again.

A replica joins in three steps. A view has it as joining; when all members act on that view, the
donor gets the order to hand over (`order`); when the joining site reports that the state is in
place, the replica is a full one, and replays until it has caught up.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from holdfast.core.effects import OrderCatchUp, Wait
from holdfast.core.events import ReplicaReported, SitesFailed
from holdfast.core.ids import FIRST, SiteId, TaskId
from holdfast.core.layout import PartitionGroup, Shape, View
from holdfast.core.roster import backoff_ms
from holdfast.core.timers import DoubtTimer, RejoinTimer

JOINS_MAX = 5
"""After this many failed attempts in a row a replica is given up, and reported."""

MOVE_AGAIN_MS = 500
"""How long a task rests after a move of it has failed."""

DOUBT_MS = 300
"""How long to wait for a report of a joining replica whose donor died."""


class ReplicaJoins:
    """The replicas that join or have joined and not caught up, and the attempts that failed."""

    def __init__(self) -> None:
        self.unrecovered: dict[TaskId, str] = {}
        """By task that lacks a replica which is no longer tried: why."""
        self.replaying: set[tuple[TaskId, SiteId]] = set()
        """Replicas that have joined and not caught up."""
        self.ordered: dict[tuple[TaskId, SiteId], tuple[SiteId, int]] = {}
        """By joining replica: the donor that was ordered to hand over, and the number of the view
        in which it began to join."""
        self._failures: dict[TaskId, int] = {}
        """By task: how many attempts in a row have failed."""
        self._backing_off: set[TaskId] = set()
        """Tasks whose last attempt failed and that wait for their `RejoinTimer`."""
        self.failed_at: dict[TaskId, set[SiteId]] = {}
        """By task: the sites that it failed to move to since a replica last joined."""
        self._chain_changed = 0
        """The number of the view in which a replica of the sequencer was last lost."""
        self._leader_changed: dict[TaskId, int] = {}
        """By source: the number of the view in which its leader was last lost."""

    def resume(self, view: View) -> None:
        """Continue in place of another controller: replicas that have caught up report it again."""
        self.replaying = {
            (u, s)
            for u in view.tasks()
            for s in view.group(u).replicas
            if view.group(u).joined_view_of(s)
        }
        # What was reported before may be about a leader that was lost before.
        self._leader_changed = dict.fromkeys(view.tasks(), view.number)

    def on_view(self, view: View) -> None:
        """Forget replicas that the view does not have."""
        self.replaying = {(u, s) for u, s in self.replaying if s in view.group(u).replicas}

    # --- orders ---------------------------------------------------------------------------------

    def order(self, view: View) -> list[OrderCatchUp]:
        """Order the donors of joining replicas to hand over. All members act on the view, so they
        keep from now on what these replicas need."""
        effects = []
        joining = {(u, s) for u in view.tasks() for s in view.group(u).joining}
        self.ordered = {join: order for join, order in self.ordered.items() if join in joining}
        for task in view.tasks():
            group = view.group(task)
            for joiner in group.joining if group.replicas else ():
                order = (group.donor, group.joined_view_of(joiner))
                if self.ordered.get((task, joiner)) != order:
                    self.ordered[task, joiner] = order
                    effects.append(OrderCatchUp(group.donor, task, joiner))
        return effects

    def orders_of(self, donor: SiteId) -> list[OrderCatchUp]:
        """The orders that a donor has."""
        return [
            OrderCatchUp(d, u, joiner) for (u, joiner), (d, _) in self.ordered.items() if d == donor
        ]

    def is_copying(self, task: TaskId) -> bool:
        return any(u == task for u, _ in self.ordered)

    def is_replaying(self, task: TaskId) -> bool:
        return any(u == task for u, _ in self.replaying)

    def clear_orders(self) -> None:
        """All joins are broken off."""
        self.ordered.clear()

    # --- reports --------------------------------------------------------------------------------

    def is_stale(self, report: ReplicaReported, group: PartitionGroup) -> bool:
        """Whether a report is about a replica that was given up. A replica of the sequencer that is
        in a chain which has changed since reports again, when it is in the new one; one of a source
        whose leader has changed, when it has what the new leader has."""
        if report.site not in group.joining:
            return True
        since = group.joined_view_of(report.site)
        if report.phase == "installed":
            since = max(since, self._leader_changed.get(report.task, 0))
        if report.task == FIRST and report.phase == "installed":
            since = max(since, self._chain_changed)
        return report.number < since

    def on_installed(self, task: TaskId, site: SiteId, computes: bool) -> None:
        """The state of a replica is in place. If it computes, it has to catch up."""
        self.ordered.pop((task, site), None)
        self._failures.pop(task, None)
        self.failed_at.pop(task, None)
        if computes:
            self.replaying.add((task, site))

    def on_caught_up(self, task: TaskId, site: SiteId) -> None:
        self.replaying.discard((task, site))

    def on_take_over(self, before: View, view: View, shape: Shape) -> None:
        """Sites are lost with this view. A replica of the sequencer, or the leader of a source, may
        have been among them."""
        if view.sequencers != before.sequencers:
            self._chain_changed = view.number
        for task in view.tasks():
            changed = view.group(task).replicas[:1] != before.group(task).replicas[:1]
            if changed and shape.stages[task[0]].kind == "source":
                self._leader_changed[task] = view.number

    # --- failures and retries -------------------------------------------------------------------

    def on_sites_lost(self, gone: Collection[SiteId]) -> None:
        self.replaying = {(u, s) for u, s in self.replaying if s not in gone}

    def on_failed(self, task: TaskId, reason: str) -> list[Wait]:
        """An attempt has failed: try again after a pause, or give up."""
        for key in [k for k in self.ordered if k[0] == task]:
            del self.ordered[key]
        count = self._failures[task] = self._failures.get(task, 0) + 1
        if count >= JOINS_MAX:
            self.give_up(task, f"{JOINS_MAX} attempts failed, the last because {reason}")
            return []
        self._backing_off.add(task)
        return [Wait(RejoinTimer(task), backoff_ms(count - 1))]

    def on_move_failed(self, task: TaskId, targets: Iterable[SiteId]) -> list[Wait]:
        """A replica that was to take the place of another one has failed to join. Nothing is
        missing, so this does not count as an attempt. Another move waits for a while, and tries
        another site."""
        self.failed_at.setdefault(task, set()).update(targets)
        self.ordered = {key: order for key, order in self.ordered.items() if key[0] != task}
        if task in self._backing_off:
            return []
        self._backing_off.add(task)
        return [Wait(RejoinTimer(task), MOVE_AGAIN_MS)]

    def on_wait_over(self, timer: RejoinTimer) -> None:
        self._backing_off.discard(timer.task)

    def may_begin(self, task: TaskId) -> bool:
        """Whether a missing replica may be tried now."""
        return task not in self._backing_off and task not in self.unrecovered

    def give_up(self, task: TaskId, reason: str) -> None:
        self.unrecovered[task] = reason

    def allow_another(self) -> None:
        """Protection changes: try once more what was given up."""
        self.unrecovered.clear()

    def forget_failures(self) -> None:
        """A new site has registered: forget failed attempts."""
        self.unrecovered.clear()
        self._failures.clear()
        self.failed_at.clear()


class DoubtfulLosses:
    """Losses of sites that end the flow unless a joining replica proves to be in place.

    If a donor dies, the replica that it made may have all it needs, and its report may be under
    way. So the loss waits for that report, for a short time.
    """

    def __init__(self) -> None:
        self._waiting: dict[int, SitesFailed] = {}
        self._count = 0

    def add(self, loss: SitesFailed) -> Wait:
        """Let a loss wait."""
        self._count += 1
        self._waiting[self._count] = loss
        return Wait(DoubtTimer(self._count), DOUBT_MS)

    def __contains__(self, timer: DoubtTimer) -> bool:
        return timer.number in self._waiting

    def take(self) -> list[SitesFailed]:
        """Return all losses that wait, and forget them."""
        waiting, self._waiting = self._waiting, {}
        return list(waiting.values())
