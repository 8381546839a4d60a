"""Tables as pictures: lines over an axis, in a file that needs nothing else to be looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
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
}
THIN = ("rollback", "pairs")
DASHES = {"paper": "2 4", "model": "", "Holdfast": "8 4"}
STYLE = (
    "text{font:12px Inter,'Helvetica Neue',Helvetica,Arial,'DejaVu Sans',sans-serif;"
    f"fill:{INK}}} .title{{font-size:16px;font-weight:600}} .pale{{fill:{PALE}}}"
)


@dataclass(frozen=True, slots=True)
class Series:
    """What one of `paper`, `model` and `Holdfast` says of one approach, at each of a table's
    places; None where it says nothing."""

    approach: str
    who: str
    values: tuple[float | None, ...]

    @property
    def name(self) -> str:
        return f"{self.approach}, {self.who}"


@dataclass(frozen=True, slots=True)
class Table:
    """Figures of the paper and ours beside each other, and why they differ."""

    key: str
    title: str
    x_name: str
    y_name: str
    places: tuple[float, ...]
    series: tuple[Series, ...]
    notes: tuple[str, ...]
    log: bool = False
    """Whether the picture's y axis is logarithmic."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "title": self.title,
            "x": self.x_name,
            "y": self.y_name,
            "places": list(self.places),
            "series": [
                {"approach": s.approach, "who": s.who, "values": list(s.values)}
                for s in self.series
            ],
            "notes": list(self.notes),
        }

    def of(self, approach: str, who: str) -> tuple[float | None, ...]:
        """The values of one series."""
        return next(s.values for s in self.series if (s.approach, s.who) == (approach, who))


Point = tuple[float, float]
Line = tuple[str, str, Sequence[Point | None]]
"""An approach, who says so, and points; nothing is drawn across what is not known."""


def picture(table: Table) -> str:
    """A table's values over its places, as SVG."""
    lines = [(s.approach, s.who, known(table.places, s.values)) for s in table.series]
    return drawn(table.title, table.x_name, table.y_name, lines, table.log)


def known(xs: Sequence[float | None], ys: Sequence[float | None]) -> list[Point | None]:
    """Points, where both are known."""
    pairs = zip(xs, ys, strict=True)
    return [None if x is None or y is None else (x, y) for x, y in pairs]


def drawn(title: str, x_name: str, y_name: str, lines: Sequence[Line], log: bool = False) -> str:
    """Lines in a frame with both axes and a legend, as SVG."""
    lines = [line for line in lines if any(line[2])]
    points = [point for _, _, line in lines for point in line if point is not None]
    across = _Axis([x for x, _ in points], LEFT, WIDTH - RIGHT, log=False)
    upward = _Axis([y for _, y in points], HEIGHT - BOTTOM, TOP, log=log)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}"><style>{STYLE}</style>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff"/>',
        _text(LEFT, 28, title, "title"),
        *(_grid_line(upward, tick, across=True) for tick in upward.ticks),
        *(_grid_line(across, tick, across=False) for tick in across.ticks),
        _text((LEFT + WIDTH - RIGHT) / 2, HEIGHT - 18, x_name, "pale", "middle"),
        f'<g transform="translate(18 {(TOP + HEIGHT - BOTTOM) / 2}) rotate(-90)">'
        f"{_text(0, 0, y_name, 'pale', 'middle')}</g>",
    ]
    for row, (approach, who, line) in enumerate(lines):
        placed = [None if p is None else (across.at(p[0]), upward.at(p[1])) for p in line]
        parts += _line(approach, who, placed)
        parts += _legend(row, approach, who)
    return "\n".join([*parts, "</svg>"]) + "\n"


class _Axis:
    """Where values are, in pixels, and which are written beside the axis."""

    def __init__(self, values: Sequence[float], begin: float, end: float, log: bool) -> None:
        self._begin, self._end, self._log = begin, end, log
        low, high = min(values, default=0.0), max(values, default=1.0)
        if log:
            powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
            self.ticks = [10.0**p for p in powers]
        else:
            step = _step(high if low < high / 2 else high - low)
            first = 0.0 if low < high / 2 else math.floor(low / step) * step
            count = math.ceil((high - first) / step)
            self.ticks = [first + i * step for i in range(count + 1)]
        self._low, self._high = self._scaled(self.ticks[0]), self._scaled(self.ticks[-1])

    def _scaled(self, value: float) -> float:
        return math.log10(value) if self._log else value

    def at(self, value: float) -> float:
        span = (self._high - self._low) or 1.0
        return self._begin + (self._scaled(value) - self._low) / span * (self._end - self._begin)


def _step(span: float) -> float:
    """Half a dozen ticks or so, at round values."""
    steps = [m * 10.0**e for e in range(-3, 7) for m in (1, 2, 5)]
    return next(s for s in steps if span / s <= 7)


def _grid_line(axis: _Axis, tick: float, across: bool) -> str:
    at, label = axis.at(tick), f"{tick:,.10g}"
    if across:
        path = f"M{LEFT} {at:.1f}H{WIDTH - RIGHT}"
        return f'<path d="{path}" stroke="{GRID}"/>' + _text(LEFT - 8, at + 4, label, "pale", "end")
    path = f"M{at:.1f} {TOP}V{HEIGHT - BOTTOM}"
    label = _text(at, HEIGHT - BOTTOM + 18, label, "pale", "middle")
    return f'<path d="{path}" stroke="{GRID}"/>' + label


def _line(approach: str, who: str, points: Sequence[Point | None]) -> list[str]:
    """Points that follow each other are joined. What may coincide with others is drawn thinly."""
    way, pen = "", "M"
    for point in points:
        way += f"{pen}{point[0]:.1f} {point[1]:.1f}" if point else ""
        pen = "L" if point else "M"
    dash = f' stroke-dasharray="{DASHES[who]}"' if DASHES[who] else ""
    colour, width = COLOURS[approach], 1.0 if approach in THIN else 1.8
    return [
        f'<path d="{way}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>',
        *(_mark(approach, who, *point) for point in points if point is not None),
    ]


def _mark(approach: str, who: str, x: float, y: float) -> str:
    """Rings are the paper's, discs the model's, squares Holdfast's."""
    colour = COLOURS[approach]
    if who == "Holdfast":
        size, fill = (4.0, "#fff") if approach in THIN else (8.0, colour)
        where = f'x="{x - size / 2:.1f}" y="{y - size / 2:.1f}" width="{size}" height="{size}"'
        return f'<rect {where} fill="{fill}" stroke="{colour}"/>'
    fill, size = ("#fff", 5.0) if who == "paper" else (colour, 3.0)
    where = f'cx="{x:.1f}" cy="{y:.1f}" r="{size}"'
    return f'<circle {where} fill="{fill}" stroke="{colour}" stroke-width="1.6"/>'


def _legend(row: int, approach: str, who: str) -> list[str]:
    x, y = WIDTH - RIGHT + 26, TOP + 10 + 20 * row
    line = _line(approach, who, [(x, y), (x + 36, y)])
    return [
        line[0],
        _mark(approach, who, x + 18, y),
        _text(x + 46, y + 4, f"{approach}, {who}"),
    ]


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    where = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}{where}>{escape(text)}</text>'
