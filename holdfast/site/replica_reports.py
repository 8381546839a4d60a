"""What a site reports to the controller about its replicas.

A report may be lost with the controller that it was sent to, so the site can repeat every one of
them. A new replica is reported when it is whole: the first source's also needs its replica of the
sequencer to be in the chain, and a push source's needs the push batches that have entered.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import ReportReplica
from holdfast.core.events import CatchUpOrdered, ReplicaReported
from holdfast.core.ids import FIRST, GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import View
from holdfast.core.replica import State
from holdfast.net import wire
from holdfast.site.sequencing import Sequencing
from holdfast.site.stages import SiteStages


class ReplicaReports:
    """`tell` reaches the controller."""

    def __init__(
        self,
        site: SiteId,
        stages: SiteStages,
        dataflow: Dataflow,
        sequencing: Sequencing,
        tell: Callable[[wire.Message], None],
    ) -> None:
        self._site, self._stages, self._dataflow = site, stages, dataflow
        self._sequencing, self._tell_controller = sequencing, tell
        self._failed: dict[tuple[TaskId, SiteId], tuple[int, str]] = {}
        """Hand-overs from or to this site that failed: the view in which that replica joined, and
        the reason. The controller that was told may die before it commits a view without the
        replica; only these entries tell the next controller that no site hands over any more."""
        self._uncounted: set[TaskId] = set()
        """New replicas of push sources that may lack push batches."""

    @property
    def _view(self) -> View:
        assert self._dataflow.view is not None
        return self._dataflow.view

    def on_view(self, view: View) -> None:
        """Forget failures of replicas that the view no longer has."""
        self._failed = {
            (task, site): (joined_view, reason)
            for (task, site), (joined_view, reason) in self._failed.items()
            if _joined_view_of_joiner(view, task, site) == joined_view
        }

    def on_leaders_changed(self, known: View, view: View) -> None:
        """Report again that replicas of sources are whole whose leader has changed since: the
        controller ignores what was reported before. The new leader of a push source has to count
        the replica again, because rows may enter there without it."""
        for task in view.tasks_at(self._site):
            group, replica = view.group(task), self._dataflow.tasks[task]
            if (
                self._stages.plan.stages[task[0]].source is None
                or self._site not in group.joining
                or not replica.has_state
                or group.replicas[:1] == known.group(task).replicas[:1]
            ):
                continue
            if task[0] in self._stages.pushed():
                self._uncounted.add(task)
            self.report_if_whole(task)

    def repeat(self) -> None:
        """Report again everything that a new controller must know."""
        for task in self._view.tasks_at(self._site):
            if self._dataflow.tasks[task].joined_view:
                self.report_if_whole(task)
        for (task, site), (_, reason) in self._failed.items():
            self._tell(task, site, "failed", reason)

    def fail(self, task: TaskId, site: SiteId, reason: str) -> None:
        """The replica at `site` cannot be made: report it, now and again."""
        joined_view = _joined_view_of_joiner(self._view, task, site)
        if joined_view is not None:
            self._failed[task, site] = (joined_view, reason)
        self._tell(task, site, "failed", reason)

    def refuses(self, order: CatchUpOrdered) -> bool:
        """Whether a hand-over to this replica has failed before: some of its state may be there, so
        it must join again first. The controller is told once more."""
        failed = self._failed.get((order.task, order.joiner))
        if failed is not None:
            self._tell(order.task, order.joiner, "failed", failed[1])
        return failed is not None

    def begin_again(self, task: TaskId) -> None:
        """A new hand-over to this site has begun."""
        self._failed.pop((task, self._site), None)

    def closed(self, task: TaskId) -> None:
        self._uncounted.discard(task)

    def report(self, effect: ReportReplica) -> None:
        task, phase = effect.task, effect.phase
        if phase == "failed":
            self.fail(task, self._site, effect.reason)
            return
        if phase == "installed":
            self._on_installed(task)
        if self._is_whole(task):
            self._tell(task, self._site, phase)

    def _on_installed(self, task: TaskId) -> None:
        self._failed.pop((task, self._site), None)
        if task[0] in self._stages.pushed():
            self._uncounted.add(task)
        if task == FIRST:
            self._sequencing.waits_for_chain = True
            self._sequencing.join_chain(self._view)

    def on_push_counted(self, source: int) -> None:
        """The replica of a push source has all push batches."""
        task = (StageId(source), GroupId(0))
        if task in self._uncounted:
            self._uncounted.discard(task)
            self.report_if_whole(task)

    def _is_whole(self, task: TaskId) -> bool:
        """Whether a new replica can take the place of the others."""
        waits_for_chain = task == FIRST and self._sequencing.waits_for_chain
        return task not in self._uncounted and not waits_for_chain

    def report_if_whole(self, task: TaskId) -> None:
        replica = self._dataflow.tasks.get(task)
        if replica is not None and replica.has_state and self._is_whole(task):
            self._tell(task, self._site, "installed")
            if replica.state is not State.REPLAYING:
                self._tell(task, self._site, "caught_up")

    def _tell(self, task: TaskId, site: SiteId, phase: str, reason: str = "") -> None:
        report = ReplicaReported(site, task, self._view.number, phase, reason)
        self._tell_controller(wire.ReplicaReport(report))


def _joined_view_of_joiner(view: View, task: TaskId, site: SiteId) -> int | None:
    """The view in which a joining replica joined; None if it does not join."""
    group = view.group(task)
    return group.joined_view_of(site) if site in group.joining else None
