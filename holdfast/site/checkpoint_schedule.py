"""When tasks give their state to standbys.

Tasks take their checkpoints in rounds, all at about the same time, and each one after those that
take its output: what is in their checkpoints nobody will ask it for, and need not be in its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from holdfast.core.ids import TaskId
from holdfast.core.protection import ProtectionSpec

AGAIN = 0.5
"""Of the time that a recovery may take, what is for doing again what the lost site had done since
the last checkpoint. The rest is for finding its way."""
SECONDS_MAX = 60.0
"""A standby gets a checkpoint so often at least, however little there is to do."""
PATIENCE = 0.5
"""For so much of the time between two rounds a task waits for its consumers."""


class Progress(NamedTuple):
    """How far a task is. Clocks of several machines show about the same time."""

    now_s: float
    epoch: int
    work_s: float
    """How long the site's tasks have been at work that others would have to do again."""


class CheckpointSchedule:
    """The tasks of one site."""

    def __init__(self) -> None:
        self._last: dict[TaskId, Progress] = {}

    def is_due(
        self, task: TaskId, guard: ProtectionSpec, now: Progress, is_covered: Callable[[int], bool]
    ) -> bool:
        """Whether a task takes a checkpoint now. `is_covered` says whether all who take its output
        have had theirs after an epoch."""
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
    """How many of them there have been."""
    if guard.every_epochs:
        return progress.epoch / guard.every_epochs
    return progress.now_s * 1e3 / guard.every_ms
