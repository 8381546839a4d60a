"""The timers of the controller. They are values, so that a timer that fires identifies itself."""

from __future__ import annotations

from holdfast.core.ids import TaskId
from holdfast.core.values import value


@value
class DoubtTimer:
    """The wait for the report of a joining replica whose donor died; waits are numbered."""

    number: int


@value
class PatienceTimer:
    """The wait of a missing replica for the n-th replacement that was launched."""

    number: int


@value
class RejoinTimer:
    """The pause before another attempt at a replica that failed to join."""

    task: TaskId


Timer = DoubtTimer | PatienceTimer | RejoinTimer
