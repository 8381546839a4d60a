"""What a site measures of itself."""

from __future__ import annotations

import selectors
import time
from collections import deque
from typing import Any


class IdleSelector(selectors.DefaultSelector):
    """A selector that knows how long it has waited: the rest of the time its loop is busy. A
    process that gets little processor time is busy all the time, although it uses little."""

    def __init__(self) -> None:
        super().__init__()
        self.idle_s = 0.0

    def select(self, timeout: float | None = None) -> list[Any]:
        if timeout is not None and timeout <= 0:
            return super().select(timeout)
        begun = time.monotonic()
        try:
            return super().select(timeout)
        finally:
            self.idle_s += time.monotonic() - begun


class BusyTime:
    """What part of the time a site is busy."""

    def __init__(self, now: float, idle_s: float = 0.0) -> None:
        self._since, self._idle_s = now, idle_s

    def part(self, now: float, idle_s: float) -> float:
        """The busy part of the time since the last call, if the site has been idle for `idle_s` in
        all."""
        elapsed, idle = now - self._since, idle_s - self._idle_s
        self._since, self._idle_s = now, idle_s
        return min(1.0, max(0.0, 1.0 - idle / elapsed)) if elapsed > 0 else 0.0


class OutputGaps:
    """How long a sink got nothing, as its replicas see it: also across the death of its leader."""

    _SPAN_S = 5.0

    def __init__(self) -> None:
        self._last: float | None = None
        self._gaps: deque[tuple[float, float]] = deque()

    def delivered(self, now: float) -> None:
        if self._last is not None:
            self._gaps.append((now, now - self._last))
        self._last = now
        while self._gaps and self._gaps[0][0] < now - self._SPAN_S:
            self._gaps.popleft()

    def longest_ms(self, now: float) -> float | None:
        """The longest gap of the last seconds, the current one included; None if no sink is
        here."""
        if self._last is None:
            return None
        return 1e3 * max([now - self._last, *(gap for _, gap in self._gaps)])


def quantiles(samples: list[float]) -> dict[str, float] | None:
    """The median and the 99th percentile."""
    if not samples:
        return None
    ordered = sorted(samples)
    return {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 99)}
