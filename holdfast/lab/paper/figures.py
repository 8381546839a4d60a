"""Tables of figures, and their pictures: lines over an axis, or bars."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from holdfast.ui.drawing import (
    BOTTOM,
    COLOURS,
    HEIGHT,
    INK,
    PALE,
    RIGHT,
    TOP,
    WIDTH,
    Axis,
    Point,
    framed,
    text,
)
from holdfast.ui.report import number, show

THIN = ("rollback", "pairs")
DASHES = {"paper": "2 4", "model": "", "Monte Carlo": "", "simulated": "", "Holdfast": "8 4"}


@dataclass(frozen=True, slots=True)
class Series:
    """The values of one origin (`paper`, `model`, `Holdfast`) for one approach, at each place of a
    table; None where there is no value. A picture leaves out origins that `DASHES` has not."""

    approach: str
    who: str
    values: tuple[float | None, ...]

    @property
    def name(self) -> str:
        return f"{self.approach}, {self.who}"


@dataclass(frozen=True, slots=True)
class Table:
    """The paper's figures beside ours, and the reasons why they differ."""

    key: str
    title: str
    x_name: str
    y_name: str
    places: tuple[float, ...]
    series: tuple[Series, ...]
    notes: tuple[str, ...]
    log: bool = False
    """Whether the picture's y axis is logarithmic."""
    log_x: bool = False
    significant: bool = False
    """Whether values differ so widely that each is printed with its significant digits."""

    def cell(self, value: float) -> str:
        return number(value) if self.significant else f"{value:.1f}"

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
        """Return the values of one series."""
        return next(s.values for s in self.series if (s.approach, s.who) == (approach, who))


Line = tuple[str, str, Sequence[Point | None]]
"""An approach, the origin of the values, and points; the line is interrupted at None."""


def picture(table: Table) -> str:
    """Draw a table's values over its places as SVG."""
    series = [s for s in table.series if s.who in DASHES]
    lines = [(s.approach, s.who, known(table.places, s.values)) for s in series]
    ticks = table.places if table.log_x else None
    return drawn(table.title, table.x_name, table.y_name, lines, table.log, ticks)


def show_table(table: Table, console: Console) -> None:
    """Print a table, and under it the reasons why its values differ."""
    rows = []
    for series in table.series:
        cells = ["" if v is None else table.cell(v) for v in series.values]
        rows.append((series.name, *cells))
    show(table.title, (table.x_name, *(f"{x:g}" for x in table.places)), rows, console)
    for note in table.notes:
        console.print(f"  {note}", highlight=False, markup=False)
    console.print()


def known(xs: Sequence[float | None], ys: Sequence[float | None]) -> list[Point | None]:
    """Return points where both coordinates are known, None elsewhere."""
    pairs = zip(xs, ys, strict=True)
    return [None if x is None or y is None else (x, y) for x, y in pairs]


def drawn(
    title: str,
    x_name: str,
    y_name: str,
    lines: Sequence[Line],
    log: bool = False,
    log_ticks: Sequence[float] | None = None,
    marks: bool = True,
    event: tuple[float, str] | None = None,
) -> str:
    """Draw lines in a frame with both axes and a legend as SVG. With `log_ticks` the x axis is
    logarithmic and has these ticks. `event` is where something happened, and what."""
    lines = [line for line in lines if any(line[2])]
    points = [point for _, _, line in lines for point in line if point is not None]
    across = Axis.across([x for x, _ in points], log_ticks is not None)
    across.ticks = [*(log_ticks or across.ticks)]
    upward = Axis.upward([y for _, y in points], log)
    parts: list[str] = []
    if event is not None:
        x = across.at(event[0])
        parts += [
            f'<path d="M{x:.1f} {TOP}V{HEIGHT - BOTTOM}" stroke="{PALE}"/>',
            text(x + 5, TOP + 12, event[1], "pale"),
        ]
    for row, (approach, who, line) in enumerate(lines):
        placed = [None if p is None else (across.at(p[0]), upward.at(p[1])) for p in line]
        parts += _line(approach, who, placed, marks)
        parts += _legend(row, approach, who, marks)
    return framed(title, x_name, y_name, across, upward, parts)


def _line(approach: str, who: str, points: Sequence[Point | None], marks: bool = True) -> list[str]:
    """Draw a line through consecutive points; thinly if it may coincide with another line. Without
    marks only the paper's line is dashed."""
    path, pen = "", "M"
    for point in points:
        path += f"{pen}{point[0]:.1f} {point[1]:.1f}" if point else ""
        pen = "L" if point else "M"
    dashed = DASHES[who] and (marks or who == "paper")
    dash = f' stroke-dasharray="{DASHES[who]}"' if dashed else ""
    colour, width = COLOURS[approach], 1.0 if approach in THIN else 1.8
    shown = [point for point in points if point is not None] if marks else []
    return [
        f'<path d="{path}" fill="none" stroke="{colour}" stroke-width="{width}"{dash}/>',
        *(_mark(approach, who, *point) for point in shown),
    ]


def _mark(approach: str, who: str, x: float, y: float) -> str:
    """Draw a ring for the paper, a disc for the model, a square for Holdfast."""
    colour = COLOURS[approach]
    if who == "Holdfast":
        size, fill = (4.0, "#fff") if approach in THIN else (8.0, colour)
        where = f'x="{x - size / 2:.1f}" y="{y - size / 2:.1f}" width="{size}" height="{size}"'
        return f'<rect {where} fill="{fill}" stroke="{colour}"/>'
    fill, size = ("#fff", 5.0) if who == "paper" else (colour, 3.0)
    where = f'cx="{x:.1f}" cy="{y:.1f}" r="{size}"'
    return f'<circle {where} fill="{fill}" stroke="{colour}" stroke-width="1.6"/>'


def _legend(row: int, approach: str, who: str, marks: bool) -> list[str]:
    x, y = WIDTH - RIGHT + 26, TOP + 10 + 20 * row
    line = _line(approach, who, [(x, y), (x + 36, y)], marks)
    return [
        line[0],
        *([_mark(approach, who, x + 18, y)] if marks else []),
        text(x + 46, y + 4, f"{approach}, {who}"),
    ]


# --- bars -----------------------------------------------------------------------------------------

FILLS = ("#fff", "#66788a", "#b8860b")
"""Of the bars of a group, in their order."""


def bars(
    title: str,
    y_name: str,
    names: Sequence[str],
    groups: Mapping[str, Sequence[Sequence[float]]],
) -> str:
    """Draw a group of bars for each key, as SVG. A bar is the median of its values, with a line
    from the lowest to the highest."""
    highest = max(v for group in groups.values() for values in group for v in values)
    upward = Axis.upward([0.0, highest])
    across = Axis.across([0.0, float(len(groups))])
    across.ticks = []
    width = 0.8 / len(names)
    parts: list[str] = []
    for place, (name, group) in enumerate(groups.items()):
        for n, values in enumerate(group):
            left, right = (across.at(place + 0.1 + width * (n + k)) for k in (0.06, 0.94))
            parts += _bar(left, right, upward, values, FILLS[n])
        parts.append(text(across.at(place + 0.5), HEIGHT - BOTTOM + 18, name, "pale", "middle"))
    for row, name in enumerate(names):
        x, y = WIDTH - RIGHT + 26, TOP + 10 + 20 * row
        box = f'x="{x}" y="{y - 6}" width="14" height="12"'
        parts += [f'<rect {box} fill="{FILLS[row]}" stroke="{INK}"/>', text(x + 22, y + 4, name)]
    return framed(title, "", y_name, across, upward, parts)


def _bar(left: float, right: float, upward: Axis, values: Sequence[float], fill: str) -> list[str]:
    middle = statistics.median(values)
    top, bottom, x = upward.at(middle), upward.at(0.0), (left + right) / 2
    box = f'x="{left:.1f}" y="{top:.1f}" width="{right - left:.1f}" height="{bottom - top:.1f}"'
    parts = [f'<rect {box} fill="{fill}" stroke="{INK}"/>']
    if len(values) > 1:
        spread = f"M{x:.1f} {upward.at(min(values)):.1f}V{upward.at(max(values)):.1f}"
        parts.append(f'<path d="{spread}" stroke="{INK}" stroke-width="1.6"/>')
    label = text(x, upward.at(max(values)) - 6, f"{middle:.2f}", "", "middle")
    return [*parts, label]
