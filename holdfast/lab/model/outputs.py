"""What a step of a site or of the controller does to the rest of the world."""

from __future__ import annotations

from typing import Any, NamedTuple

from holdfast.core.ids import SiteId, TaskId
from holdfast.core.timers import Timer


class Send(NamedTuple):
    """A message to a site."""

    site: SiteId
    message: Any


class Tell(NamedTuple):
    """A message to the controller."""

    message: Any


class Members(NamedTuple):
    """The site drops its connections to all others, and connects to these."""

    members: tuple[SiteId, ...]


class Write(NamedTuple):
    """The leading replica writes the result of an epoch to the store."""

    task: TaskId
    epoch: int
    result: int


class Join(NamedTuple):
    """A replica that leads a task has the store take the results that it lacks."""

    task: TaskId
    results: tuple[int, ...]


class Vanish(NamedTuple):
    """The site ends, because it was fenced."""

    fenced: bool = True


class LaunchOrder(NamedTuple):
    """The controller has a site launched."""

    site: SiteId


class StartTimer(NamedTuple):
    timer: Timer


class FlowOver(NamedTuple):
    """The controller has ended the flow."""

    error: str


Output = Send | Tell | Members | Write | Join | Vanish | LaunchOrder | StartTimer | FlowOver
