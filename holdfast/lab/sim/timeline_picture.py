"""The timeline of a run as a picture: a lane for each site, time from left to right."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar
from xml.sax.saxutils import escape

from holdfast.lab.sim.timeline import (
    LANDMARKS,
    OUTSIDE,
    Nearness,
    TimelineEvent,
    event_text,
    in_order,
    is_landmark,
    lane_name,
    lanes_of,
    subject_of,
)

T = TypeVar("T")

WIDTH = 1600
LEFT, RIGHT = 96, 28
LANE, EDGE = 84, 56
"""Height of a site's lane without labels, and of the lanes of the controller and the outside."""
BAR = 15
MARKS_MAX = 1_500
LABEL_ROWS = 8

INK, PALE, RED = "#1f2933", "#8795a5", "#d21f2b"
FRAME, ACK, ORDER, OUT = "#3e5c76", "#7f90a3", "#7b4fb5", "#1b8a5a"
STAGES = (
    "#4c78a8", "#f2a541", "#5aa469", "#b07aa1", "#76b7b2", "#9c755f", "#8cb4e0", "#c9b458",
)  # fmt: skip

STYLE = f"""
text {{ font: 11px Inter, 'Helvetica Neue', Helvetica, Arial, 'DejaVu Sans', sans-serif; fill: {INK} }}
.title {{ font-size: 17px; font-weight: 600 }}
.lane {{ font-size: 12.5px; font-weight: 600 }}
.tick, .note {{ fill: {PALE} }}
.note {{ font-style: italic }}
.bad {{ fill: {RED}; font-weight: 600 }}
.frame {{ stroke: {FRAME}; stroke-width: .8; stroke-opacity: .8; marker-end: url(#a-frame) }}
.ack {{ stroke: {ACK}; stroke-width: .7; stroke-dasharray: 3.5 2 }}
.control {{ stroke: {ORDER}; stroke-width: 1; marker-end: url(#a-control) }}
.deliver {{ stroke: {OUT}; stroke-width: 1.1; marker-end: url(#a-deliver) }}
.lost {{ stroke: {RED}; stroke-width: 1.2; stroke-dasharray: 2 2 }}
.view {{ stroke: {INK}; stroke-width: 1; stroke-dasharray: 5 3; opacity: .55 }}
.cross {{ stroke: {RED}; stroke-width: 2.6; stroke-linecap: round; fill: none }}
.band {{ fill: {RED}; fill-opacity: .16; stroke: {RED}; stroke-width: .8; stroke-opacity: .6 }}
"""  # noqa: E501


def svg_timeline(events: Iterable[TimelineEvent], title: str) -> str:
    """Return the picture as SVG."""
    return _Picture(in_order(events), title).svg()


class _Picture:
    def __init__(self, events: Sequence[TimelineEvent], title: str) -> None:
        self.events, self.title = events, title
        self.begin = min((e.at for e in events), default=0.0)
        self.end = max((max(e.at, e.until or e.at) for e in events), default=0.0)
        self.span = (self.end - self.begin) or 1e-3
        self.nearness = Nearness(events)
        self.shown = thinned(events, self.nearness, MARKS_MAX)
        self.colours = _colours(events)
        self.views = [e for e in events if e.kind == "view"]
        rows = _rows([(self.x(e.at) + 4, e.text) for e in self.views], LABEL_ROWS)
        self.view_rows = [LABEL_ROWS if row is None else row for row in rows]
        self.top = 58 + 15 * (max(self.view_rows, default=-1) + 1)
        self.y, self.bottom = self._place_lanes()

    def _place_lanes(self) -> tuple[dict[int, float], float]:
        places, at = {}, float(self.top)
        for site in lanes_of(self.events):
            height = LANE if site >= 0 else EDGE
            places[site] = at + height / 2
            at += height + 13 * self._rows_below(site)
        return places, at

    def _rows_below(self, site: int) -> int:
        labels = [(self.x(e.at), e.text) for e in self._beside(site)]
        return max((row + 1 for row in _rows(labels, LABEL_ROWS) if row is not None), default=0)

    def _beside(self, site: int) -> list[TimelineEvent]:
        """Return the events whose labels are below a lane."""
        return [e for e in self.events if e.site == site and e.kind in ("phase", "note")]

    def x(self, at: float) -> float:
        return LEFT + (at - self.begin) / self.span * (WIDTH - LEFT - RIGHT)

    def fade(self, event: TimelineEvent) -> float:
        """Return the opacity of an event: less the farther it is from a fault."""
        if not self.nearness:
            return 1.0
        far = self.nearness.distance(event.at, event.until) / self.span
        return round(1.0 - 0.75 * min(1.0, max(0.0, (far - 0.05) / 0.10)), 2)

    def svg(self) -> str:
        height = self.bottom + 74
        of = self._of
        parts = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height:.0f}" '
            f'width="{WIDTH}" height="{height:.0f}">',
            f"<title>{_escaped(self.title)}</title><style>{STYLE}</style>",
            f"<defs>{_arrow('frame', FRAME)}{_arrow('control', ORDER)}{_arrow('deliver', OUT)}"
            "</defs>",
            f'<rect width="{WIDTH}" height="{height:.0f}" fill="#fff"/>',
            _text(LEFT, 28, self.title, "title"),
            *self._axis(),
            *(self._lane(site) for site in self.y),
            *of(self._ack, "ack"),
            *of(self._frame, "send", "arrive"),
            *of(self._work, "work"),
            *of(self._control, "control"),
            *of(self._deliver, "deliver"),
            *of(self._band, "fault"),
            *(self._view(e, row) for e, row in zip(self.views, self.view_rows, strict=True)),
            *(label for site in self.y for label in self._labels(site)),
            *of(self._cross, "fault"),
            *self._legend(self.bottom + 52),
            "</svg>",
        ]
        return "\n".join(part for part in parts if part) + "\n"

    def _of(self, draw: Callable[[TimelineEvent], str], *kinds: str) -> list[str]:
        return [draw(e) for e in self.shown if e.kind in kinds]

    # --- the background -------------------------------------------------------------------------

    def _axis(self) -> list[str]:
        parts = []
        step = _step(self.span)
        tick = math.ceil(self.begin / step)
        while (at := tick * step) <= self.end + step * 1e-6:
            x = self.x(at)
            parts.append(
                f'<path d="M{x:.1f} {self.top - 4}V{self.bottom:.1f}" stroke="#e6eaee"/>'
                + _text(x, self.bottom + 16, f"{at * 1e3:,.10g} ms", "tick", anchor="middle")
            )
            tick += 1
        return parts

    def _lane(self, site: int) -> str:
        """Draw the band of a lane, until it crashes."""
        y = self.y[site]
        half = BAR / 2 + 4
        mine = [e.at for e in self.events if site in (e.site, e.other)]
        ends = [e.at for e in self.events if e.site == site and _is_crash(e)]
        x0, x1 = self.x(min(mine)), self.x(ends[0] if ends else self.end)
        fill = "#eef1f4" if site >= 0 else "#eef7f2" if site == OUTSIDE else "#f6f3fb"
        return (
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dfe4e9"/>'
            f'<rect x="{x0:.1f}" y="{y - half:.1f}" width="{max(2.0, x1 - x0):.1f}" '
            f'height="{2 * half}" rx="3" fill="{fill}"/>'
            + _text(LEFT - 12, y + 4, lane_name(site), "lane", anchor="end")
        )

    def _view(self, event: TimelineEvent, row: int) -> str:
        x, y = self.x(event.at), 50 + 15 * row
        anchor = "end" if _anchored(x + 4, event.text) < x else ""
        return (
            f'<path class="view" d="M{x:.1f} {y - 8}V{self.bottom:.1f}"/>'
            + _label(x + (-4 if anchor else 4), y, event.text, anchor=anchor)
        )  # fmt: skip

    # --- events on the lanes --------------------------------------------------------------------

    def _work(self, event: TimelineEvent) -> str:
        x, y = self.x(event.at), self.y[event.site]
        width = max(1.2, self.x(event.until or event.at) - x)
        return (
            f'<rect x="{x:.1f}" y="{y - BAR / 2:.1f}" width="{width:.1f}" height="{BAR}" rx="1" '
            f'fill="{self.colours[_stage(event)]}" opacity="{self.fade(event)}">'
            f"<title>{_escaped(event_text(event))}</title></rect>"
        )

    def _frame(self, event: TimelineEvent) -> str:
        if event.kind == "arrive":
            x, y = self.x(event.at), self.y[event.site]
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" fill="{FRAME}"/>'
        return self._arrow(event, "frame")

    def _ack(self, event: TimelineEvent) -> str:
        return self._arrow(event, "ack")

    def _control(self, event: TimelineEvent) -> str:
        return self._arrow(event, "control")

    def _deliver(self, event: TimelineEvent) -> str:
        return self._arrow(event, "deliver")

    def _arrow(self, event: TimelineEvent, kind: str) -> str:
        """Draw an arrow from lane to lane; half of it, and in red, if the message got lost."""
        x0, y0 = self.x(event.at), self.y[event.site]
        if event.other == event.site:
            return ""
        if event.other is None:
            colour = {"control": ORDER, "deliver": OUT}.get(kind, FRAME)
            return f'<circle cx="{x0:.1f}" cy="{y0:.1f}" r="2.4" fill="{colour}"/>'
        x1, y1 = self.x(event.until or event.at), self.y[event.other]
        if event.until is None and kind in ("frame", "ack"):
            kind, y1 = "lost", (y0 + y1) / 2
        edge = BAR / 2 + 1 if y1 > y0 else -BAR / 2 - 1
        return (
            f'<path class="{kind}" d="M{x0:.1f} {y0 + edge:.1f}L{x1:.1f} {y1 - edge:.1f}" '
            f'opacity="{self.fade(event)}"><title>{_escaped(event_text(event))}</title></path>'
        )

    def _band(self, event: TimelineEvent) -> str:
        """Draw a fault that lasts, of one lane or between two."""
        if event.until is None:
            return ""
        x0, x1 = self.x(event.at), self.x(event.until)
        y0 = self.y[event.site]
        y1 = y0 if event.other is None else self.y[event.other]
        edge = BAR / 2 + 8 if event.other is None else -BAR / 2 - 4
        low, high = min(y0, y1) - edge, max(y0, y1) + edge
        return (
            f'<rect class="band" x="{x0:.1f}" y="{low:.1f}" width="{max(2.0, x1 - x0):.1f}" '
            f'height="{high - low:.1f}" rx="3"><title>{_escaped(event_text(event))}</title></rect>'
        )

    def _cross(self, event: TimelineEvent) -> str:
        if event.until is not None:
            return ""
        x, sites = self.x(event.at), [event.site]
        line = ""
        if event.other is not None:
            sites.append(event.other)
            line = f'<path class="lost" d="M{x:.1f} {self.y[event.site]}V{self.y[event.other]}"/>'
        crosses = [
            f'<path class="cross" d="M{x - 6:.1f} {self.y[s] - 6:.1f}l12 12m0 -12l-12 12"/>'
            for s in sites
        ]
        return f"<g>{line}{''.join(crosses)}<title>{_escaped(event_text(event))}</title></g>"

    def _labels(self, site: int) -> list[str]:
        """Draw faults above the lane, and phases and notes below it, without overlaps."""
        faults = [e for e in self.events if e.site == site and e.kind == "fault"]
        above, below = self.y[site] - BAR / 2 - 8, self.y[site] + BAR / 2 + 15
        return [
            *self._labels_of(faults, above, -12, 2),
            *self._labels_of(self._beside(site), below, 13, LABEL_ROWS),
        ]

    def _labels_of(
        self, events: Sequence[TimelineEvent], base: float, step: float, rows_max: int
    ) -> list[str]:
        rows = _rows([(self.x(e.at), e.text) for e in events], rows_max)
        return [
            self._label(e, base + step * row) if row is not None else self._tick(e)
            for e, row in zip(events, rows, strict=True)
        ]

    def _label(self, event: TimelineEvent, y: float) -> str:
        x = self.x(event.at)
        anchor = "end" if _anchored(x, event.text) < x else ""
        if event.kind == "fault":
            return _label(x, y, event.text, "bad", anchor)
        kind = "note" if event.kind == "note" else ""
        return self._tick(event, y) + _label(x + (-4 if anchor else 4), y, event.text, kind, anchor)

    def _tick(self, event: TimelineEvent, low: float | None = None) -> str:
        """Mark the place of a label on its lane. Without room for the label only this is drawn."""
        x, y = self.x(event.at), self.y[event.site]
        low = y + BAR / 2 + 7 if low is None else low
        return (
            f'<path d="M{x:.1f} {y - BAR / 2 - 3:.1f}V{low:.1f}" stroke="{INK}" stroke-width=".9">'
            f"<title>{_escaped(event_text(event))}</title></path>"
        )

    # --- the legend -----------------------------------------------------------------------------

    def _legend(self, y: float) -> list[str]:
        x, parts = float(LEFT), []
        for stage, colour in self.colours.items():
            parts.append(
                f'<rect x="{x:.1f}" y="{y - 9}" width="14" height="10" rx="1" fill="{colour}"/>'
                + _text(x + 19, y, stage)
            )
            x += 36 + _width(stage)
        kinds = {e.kind for e in self.events}
        lines = (
            ("send", "frame", "bundle"),
            ("ack", "ack", "ack"),
            ("control", "control", "control"),
            ("deliver", "deliver", "delivery"),
        )
        for kind, style, name in lines:
            if kind in kinds:
                parts.append(
                    f'<path class="{style}" d="M{x:.1f} {y - 4}h22"/>' + _text(x + 29, y, name)
                )
                x += 48 + _width(name)
        if self.nearness and len(self.shown) < len(self.events):
            text = f"{len(self.shown):,} of {len(self.events):,} marks are drawn"
            parts.append(_text(WIDTH - RIGHT, y, text, "tick", anchor="end"))
        return parts


def thinned(
    events: Sequence[TimelineEvent], nearness: Nearness, marks_max: int
) -> list[TimelineEvent]:
    """Return all landmarks and about `marks_max` other events: two thirds of them the nearest to a
    fault, the others evenly spread."""
    rest = [e for e in events if not is_landmark(e, LANDMARKS[0])]
    if len(rest) <= marks_max:
        return list(events)
    rest.sort(key=lambda e: nearness.distance(e.at, e.until) if nearness else 0.0)
    near = marks_max * 2 // 3 if nearness else 0
    keep = {id(e) for e in rest[:near]}
    keep |= {id(e) for e in _every(sorted(rest[near:], key=lambda e: e.at), marks_max - near)}
    return [e for e in events if is_landmark(e, LANDMARKS[0]) or id(e) in keep]


def _every(items: Sequence[T], count: int) -> list[T]:
    """Return `count` of the items, evenly spread."""
    return (
        [items[i * len(items) // count] for i in range(count)] if count < len(items) else [*items]
    )


def _stage(event: TimelineEvent) -> str:
    return subject_of(event).split("/")[0]


def _colours(events: Iterable[TimelineEvent]) -> dict[str, str]:
    """Return a colour for each stage, in the order in which they first work."""
    stages = dict.fromkeys(_stage(e) for e in events if e.kind == "work")
    return {stage: STAGES[i % len(STAGES)] for i, stage in enumerate(stages)}


def _is_crash(event: TimelineEvent) -> bool:
    return event.kind == "fault" and event.text.startswith("crash")


def _rows(labels: Sequence[tuple[float, str]], rows_max: int) -> list[int | None]:
    """Return a row for each label so that no two overlap; None if there is no room."""
    ends: list[list[tuple[float, float]]] = [[] for _ in range(rows_max)]
    placed: list[int | None] = []
    for x, text in labels:
        begin = _anchored(x, text)
        span = (begin - 4, begin + _width(text) + 8)
        free = [r for r in range(rows_max) if not any(_overlap(span, s) for s in ends[r])]
        placed.append(free[0] if free else None)
        if free:
            ends[free[0]].append(span)
    return placed


def _overlap(one: tuple[float, float], other: tuple[float, float]) -> bool:
    return one[0] < other[1] and other[0] < one[1]


def _anchored(x: float, text: str) -> float:
    """Return where a label begins: left of its place if there is no room to the right."""
    return x if x + _width(text) + 8 <= WIDTH else x - _width(text)


def _width(text: str) -> float:
    """Return the approximate width of a text in pixels."""
    return 6.1 * len(text)


def _step(span: float) -> float:
    """Return the interval of the ticks: a round time that gives about a dozen."""
    steps = [m * 10.0**e for e in range(-7, 7) for m in (1, 2, 5)]
    return next((s for s in steps if span / s <= 14), span)


def _escaped(text: str) -> str:
    """Escape a text for XML, which does not allow control characters."""
    return escape("".join(c if c.isprintable() else " " for c in text), {'"': "&quot;"})


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    where = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}{where}>{_escaped(text)}</text>'


def _label(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    """Draw a text on a white background, so that it is legible on top of lines."""
    width = _width(text) + 4
    left = x - width + 2 if anchor == "end" else x - 2
    ground = (
        f'<rect x="{left:.1f}" y="{y - 10:.1f}" width="{width:.1f}" height="13" rx="2" '
        'fill="#fff" opacity=".82"/>'
    )
    return ground + _text(x, y, text, kind, anchor)


def _arrow(name: str, colour: str) -> str:
    return (
        f'<marker id="a-{name}" viewBox="0 0 6 6" refX="5.4" refY="3" markerWidth="5.5" '
        f'markerHeight="5.5" markerUnits="userSpaceOnUse" orient="auto">'
        f'<path d="M0 .6L6 3L0 5.4z" fill="{colour}"/></marker>'
    )
