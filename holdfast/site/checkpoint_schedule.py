"""When tasks send checkpoints to their standbys.

Tasks take checkpoints in rounds, all at about the same time, each after its consumers. The
consumers will not ask again for output that is in their checkpoints, so the task's own checkpoint
need not contain it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.ids import TaskId
from holdfast.core.protection import ProtectionSpec

AGAIN = 0.5
"""Share of the recovery time for repeating the work since the last checkpoint. The rest is for all
other steps of the recovery."""
SECONDS_MAX = 60.0
"""Maximum time between two checkpoints, even if there is little work."""
PATIENCE = 0.5
"""Share of the time between two rounds for which a task waits for its consumers."""


class Progress(NamedTuple):
    """The progress of a task. The clocks of the machines show about the same time."""

    now_s: float
    epoch: int
    work_s: float
    """Time for which the site's tasks have worked; a standby would have to repeat this work."""


class CheckpointSchedule:
    """The checkpoint times of one site's tasks."""

    def __init__(self) -> None:
        self._last: dict[TaskId, Progress] = {}

    def is_due(
        self, task: TaskId, guard: ProtectionSpec, now: Progress, is_covered: Callable[[int], bool]
    ) -> bool:
        """Whether a task takes a checkpoint now. `is_covered` tells whether all its consumers have
        taken one after an epoch."""
        last = self._last.setdefault(task, now)
        if guard.recovery_ms:
            worked, waited = now.work_s - last.work_s, now.now_s - last.now_s
            due = worked >= AGAIN * guard.recovery_ms / 1e3 or waited >= SECONDS_MAX
        else:
            before, schedule = (_schedule(guard, progress) for progress in (last, now))
            late = schedule - math.floor(before) - 1
            due = late >= PATIENCE or (late >= 0 and is_covered(last.epoch))
        if due:
            self._last[task] = now
        return due


def _schedule(guard: ProtectionSpec, progress: Progress) -> float:
    """Return the number of rounds so far."""
    if guard.every_epochs:
        return progress.epoch / guard.every_epochs
    return progress.now_s * 1e3 / guard.every_ms
