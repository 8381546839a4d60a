"""The checkpoints that a site's tasks send to their standbys, when the schedule says so."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from holdfast.core.dataflow import Dataflow
from holdfast.core.events import CheckpointDue, SiteEvent
from holdfast.site.checkpoint_schedule import CheckpointSchedule, Progress
from holdfast.site.stages import SiteStages
from holdfast.site.transfers import Transfers


class StandbyCheckpoints:
    """`handle` gives an event to the dataflow."""

    def __init__(
        self,
        stages: SiteStages,
        dataflow: Dataflow,
        transfers: Transfers,
        handle: Callable[[SiteEvent], None],
    ) -> None:
        self._stages, self._dataflow, self._transfers = stages, dataflow, transfers
        self._handle = handle
        self._schedule = CheckpointSchedule()

    def take_due(self, now: float) -> None:
        """Have tasks whose checkpoint is due send their state. A checkpoint that is under way is
        not overtaken by the next."""
        view = self._dataflow.view
        for task, runner in self._stages.tasks.items():
            group = view.group(task) if view is not None else None
            standbys = group.standbys if group is not None else ()
            if not standbys or not self._dataflow.tasks[task].computes:
                continue
            if group is not None and not group.led_by(self._dataflow.site):
                continue  # while a replica is moved there are two
            if any(self._transfers.is_under_way(task, site) for site in standbys):
                continue
            so_far = Progress(now, runner.epoch, self._work_s())
            is_covered = partial(self._dataflow.exchanges.is_covered, self._dataflow.tasks[task])
            if self._schedule.is_due(task, runner.guard, so_far, is_covered):
                runner.checkpoints += 1
                self._handle(CheckpointDue(task))

    def _work_s(self) -> float:
        """How long tasks here have computed that would go on elsewhere from checkpoints."""
        return sum(r.work_s for r in self._stages.tasks.values() if r.guard.recovery_ms)
