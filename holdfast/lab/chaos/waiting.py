"""Waiting while a flow runs under faults."""

from __future__ import annotations

import time
from collections.abc import Callable

from holdfast.errors import HostError
from holdfast.lab.workloads.paced import WatchedRun

TICK_S = 0.01


class Waiter:
    """Waits for conditions, and raises if the flow ends meanwhile or a wait lasts too long.

    `on_tick` is called all the time; `describe` returns what to report of a wait in vain.
    """

    def __init__(
        self,
        run: WatchedRun,
        patience_s: float,
        describe: Callable[[], str],
        on_tick: Callable[[], None] = lambda: None,
    ) -> None:
        self._run, self._patience_s = run, patience_s
        self._describe, self._on_tick = describe, on_tick

    def until(self, condition: Callable[[], bool], what: str) -> None:
        """Wait until the condition holds; `what` says it in words."""
        deadline = time.monotonic() + self._patience_s
        while not condition():
            if time.monotonic() > deadline:
                raise HostError(
                    f"waited {self._patience_s:.0f} s in vain until {what}; "
                    f"{self._run.status().get('view')}",
                    hint=self._describe(),
                )
            self._tick()

    def pause(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._tick()

    def _tick(self) -> None:
        if self._run.ended(TICK_S):
            self._run.wait()
            raise HostError("the flow has ended too early")
        self._on_tick()
