"""What the controller waits for: values, so that a timer that fires says which one it is."""

from __future__ import annotations

from holdfast.core.ids import TaskId
from holdfast.core.values import value


@value
class DoubtTimer:
    """How long to wait for word from a new replica whose donor died; the n-th time."""

    number: int


@value
class PatienceTimer:
    """How long a missing replica waits for the n-th site that was launched."""

    number: int


@value
class RejoinTimer:
    """The pause before a replica that could not be made is tried again."""

    task: TaskId


Timer = DoubtTimer | PatienceTimer | RejoinTimer
"""What the controller waits for."""
