"""What a site measures of itself."""

from __future__ import annotations

from collections import deque


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
