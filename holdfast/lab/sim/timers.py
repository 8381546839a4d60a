"""What a simulated world does after a while: the events of its timers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from holdfast.control import events as ev
from holdfast.core.ids import SiteId


@dataclass(frozen=True, slots=True)
class LaunchProcess:
    """A site's process starts, in an application."""

    site: SiteId
    app: int = 0


@dataclass(frozen=True, slots=True)
class RestartApplication:
    """An application that has died comes back."""

    app: int


@dataclass(frozen=True, slots=True)
class NoticeExits:
    """The controls notice that these processes have ended, all at once."""

    sites: tuple[SiteId, ...]


@dataclass(frozen=True, slots=True)
class TellControl:
    """An event reaches a control, if that still lives."""

    app: int
    life: int
    event: ev.ControlEvent


WorldTimer: TypeAlias = LaunchProcess | RestartApplication | NoticeExits | TellControl
