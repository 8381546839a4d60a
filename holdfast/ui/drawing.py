"""Charts as self-contained SVG files: a frame with two axes.

This module draws the frame, its axes and its text; the caller draws the content.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 860, 430
LEFT, RIGHT, TOP, BOTTOM = 72, 250, 56, 62
INK, PALE, GRID = "#1f2933", "#66788a", "#e6eaee"
COLOURS = {
    "passive": "#c8553d",
    "active": "#3e5c76",
    "upstream": "#1b8a5a",
    "rollback": "#7b4fb5",
    "pairs": "#b8860b",
    "partition pairs": "#b8860b",
    "cluster pairs": "#8c2f39",
    "disjoint pairs": "#4a7c93",
    "none": "#66788a",
    "unloaded": "#66788a",
    "ideal": "#66788a",
    "static": "#c8553d",
    "divided buffer": "#c8553d",
    "shared buffer": "#3e5c76",
    "thesis' rules": "#3e5c76",
    "formula as printed": "#8c2f39",
    "Holdfast": "#1b8a5a",
}
"""Colours of the protections and policies, the same in every chart."""
STYLE = (
    "text{font:12px Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif;"
    f"fill:{INK}}} .title{{font-size:16px;font-weight:600}} .pale{{fill:{PALE}}}"
)

Point = tuple[float, float]


def framed(
    title: str, x_name: str, y_name: str, across: Axis, upward: Axis, inside: Sequence[str]
) -> str:
    """Return a chart: the content, placed by the two axes, in a frame with a grid."""
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}"><style>{STYLE}</style>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        text(LEFT, 28, title, "title"),
        *(_grid_line(upward, tick, across=True) for tick in upward.ticks),
        *(_grid_line(across, tick, across=False) for tick in across.ticks),
        text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, x_name, "pale", "middle"),
        f'<g transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">'
        f"{text(0, 0, y_name, 'pale', 'middle')}</g>",
        *inside,
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


class Axis:
    """Maps values to pixels, and chooses the ticks of the axis."""

    def __init__(self, values: Sequence[float], begin: float, end: float, log: bool) -> None:
        self._begin, self._end, self._log = begin, end, log
        low, high = min(values, default=0.0), max(values, default=1.0)
        if log:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            self.ticks = [10.0**p for p in powers]
        else:
            base = min(low, 0.0) if low < high / 2 else low
            step = _step(high - base)
            first = math.floor(base / step) * step
            count = math.ceil((high - first) / step)
            self.ticks = [first + i * step for i in range(count + 1)]
        self._low, self._high = self._scaled(self.ticks[0]), self._scaled(self.ticks[-1])

    @classmethod
    def across(cls, values: Sequence[float], log: bool = False) -> Axis:
        return cls(values, LEFT, WIDTH - RIGHT, log)

    @classmethod
    def upward(cls, values: Sequence[float], log: bool = False) -> Axis:
        return cls(values, HEIGHT - BOTTOM, TOP, log)

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def at(self, value: float) -> float:
        span = (self._high - self._low) or 1.0
        return self._begin + (self._scaled(value) - self._low) / span * (self._end - self._begin)


def _step(span: float) -> float:
    """Return a round distance between ticks that gives about half a dozen ticks."""
    steps = [m * 10.0**e for e in range(-3, 7) for m in (1, 2, 5)]
    return next(s for s in steps if span / s <= 7)


def _grid_line(axis: Axis, tick: float, across: bool) -> str:
    at, label = axis.at(tick), f"{tick:,.10g}"
    if across:
        path = f"M{LEFT} {at:.1f}H{WIDTH - RIGHT}"
        return f'<path d="{path}" stroke="{GRID}"/>' + text(LEFT - 8, at + 4, label, "pale", "end")
    path = f"M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"
    label = text(at, HEIGHT - BOTTOM + 18, label, "pale", "middle")
    return f'<path d="{path}" stroke="{GRID}"/>' + label


def text(x: float, y: float, content: str, kind: str = "", anchor: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    where = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}{where}>{escape(content)}</text>'
