"""What happened in a run, as text to read and as a picture to look at.

Pure functions over a list of events: whoever ran the flow says what happened, on which lane and
when. A run of a few seconds has thousands of events and a handful that explain it, so both forms
are built around the faults: what is close to one is shown in full, the rest is summed up or faded.

Texts follow one habit, so that runs of them can be summed up: what it is, then ``epoch N``. For
messages the first word says what it is (``bundle x1 epoch 4``); for work the stage and the
partition group (``count/0 epoch 4``). A fault that begins with ``crash`` ends its lane.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar
from xml.sax.saxutils import escape

CONTROLLER = -1
OUTSIDE = -2


@dataclass(frozen=True, slots=True)
class Event:
    """One thing that happened."""

    at: float
    """In seconds of virtual time."""
    kind: str
    """fault, view, send, arrive, ack, work, phase, deliver, control or note"""
    site: int
    """The lane; -1 is the controller, -2 the outside, where sources and sinks are."""
    text: str
    other: int | None = None
    """The other lane of a message, or of a connection that fails."""
    until: float | None = None
    """The end of a span (work, a pause, a partition); of a message when it arrived."""


LANDMARKS = ({"fault", "view", "phase", "control", "note"}, {"fault", "view"}, {"fault"})
"""What has a line of its own in any case; the later ones for runs that have too many of them."""
MESSAGES = {"send", "arrive", "ack", "deliver", "control"}
ALL_LANES = -3

T = TypeVar("T")


def save(path: str | Path, events: Iterable[Event], title: str) -> None:
    """Write a picture if the path ends in ``.svg``, text if not."""
    events = list(events)
    picture = str(path).endswith(".svg")
    Path(path).write_text(svg_timeline(events, title) if picture else text_timeline(events))


# --- what both forms need -----------------------------------------------------------------------


def _in_order(events: Iterable[Event]) -> list[Event]:
    """By time, without arrivals of which the message itself tells."""
    ordered = sorted(events, key=lambda e: e.at)
    told = {(e.site, e.other, e.text, e.until) for e in ordered if e.kind != "arrive"}
    return [e for e in ordered if e.kind != "arrive" or (e.other, e.site, e.text, e.at) not in told]


def _lanes(events: Iterable[Event]) -> list[int]:
    """The controller on top, then the sites, the outside at the bottom."""
    found = {e.site for e in events} | {e.other for e in events if e.other is not None}
    sites = sorted(s for s in found if s >= 0)
    return [s for s in (CONTROLLER,) if s in found] + sites + [s for s in (OUTSIDE,) if s in found]


def _lane_name(site: int) -> str:
    names = {CONTROLLER: "controller", OUTSIDE: "outside", ALL_LANES: "..."}
    return names.get(site, f"site {site}")


def _short_name(site: int) -> str:
    return {CONTROLLER: "ctl", OUTSIDE: "out"}.get(site, str(site))


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


_EPOCHS = re.compile(r"\bepochs? (-?\d+)(?:-(\d+))?")


def _epochs(events: Iterable[Event]) -> tuple[int, int] | None:
    """The first and the last epoch that the texts name."""
    found = [m for e in events if (m := _EPOCHS.search(e.text))]
    if not found:
        return None
    return min(int(m[1]) for m in found), max(int(m[2] or m[1]) for m in found)


def _is_landmark(event: Event, kinds: set[str]) -> bool:
    """What a controller is told of every epoch is none, other things that it hears or says are."""
    return event.kind in kinds and not (event.kind == "control" and _epochs([event]))


def _subject(event: Event) -> str:
    """What an event is about, without the numbers that differ from one to the next."""
    before = _EPOCHS.split(event.text)[0].strip(" ,:") or event.kind
    return before.split()[0] if event.kind in MESSAGES else before


class _Nearness:
    """How far a moment is from the next fault, or from a view that followed one."""

    def __init__(self, events: Sequence[Event]) -> None:
        faults = [e for e in events if e.kind == "fault"]
        first = min((e.at for e in faults), default=float("-inf"))
        views = [e for e in events if e.kind == "view" and e.at >= first]
        marks = faults + (views if faults else views[1:])  # a run begins with a view
        self._spans = sorted((e.at, e.until or e.at) for e in marks)
        self._begins = [begin for begin, _ in self._spans]
        ends = [end for _, end in self._spans]
        self._ends = [max(ends[: i + 1]) for i in range(len(ends))]

    def __bool__(self) -> bool:
        return bool(self._spans)

    def distance(self, begin: float, end: float | None = None) -> float:
        """In seconds; 0 if the moment, or any moment of the span, is within one."""
        end = begin if end is None else max(begin, end)
        after = bisect_left(self._begins, begin)
        to_next = self._begins[after] - end if after < len(self._begins) else float("inf")
        to_last = begin - self._ends[after - 1] if after else float("inf")
        return max(0.0, min(to_next, to_last))


# --- text ---------------------------------------------------------------------------------------


def text_timeline(
    events: Iterable[Event], width: int = 120, *, full: bool = False, lines_max: int = 200
) -> str:
    """A line for each event, in order of time, each lane with an indent of its own.

    Runs of similar events between two landmarks are summed up so that about `lines_max` lines
    come out; the closer to a fault, the more detail there is. `full` leaves nothing out.
    """
    ordered = sorted(events, key=lambda e: e.at) if full else _in_order(events)
    if not ordered:
        return "nothing happened\n"
    lanes = _lanes(ordered)
    lines = [_Line.of(e) for e in ordered] if full else _summed_up(ordered, lines_max)
    return "".join(_printed(line, lanes, width) + "\n" for line in lines)


@dataclass(frozen=True, slots=True)
class _Line:
    at: float
    site: int
    text: str
    sign: str = " "

    @classmethod
    def of(cls, event: Event) -> _Line:
        sign = {"fault": "!", "view": "=", "phase": "*"}.get(event.kind, " ")
        return cls(event.at, event.site, _told(event), sign)


def _told(event: Event) -> str:
    """The whole of one event."""
    to = "" if event.other is None else f" {_way(event)}"
    if event.until is None:
        return event.text + to
    word = "arrives" if event.kind in MESSAGES else "until"
    return f"{event.text}{to} ({word} {_ms(event.until)})"


def _way(event: Event) -> str:
    assert event.other is not None
    sign = {"arrive": "<-", "fault": "><"}.get(event.kind, "->")
    return f"{_short_name(event.site)}{sign}{_short_name(event.other)}"


def _printed(line: _Line, lanes: Sequence[int], width: int) -> str:
    indent = 2 * lanes.index(line.site) if line.site in lanes else 0
    column = max(len(_lane_name(s)) + 2 * i for i, s in enumerate(lanes)) + 2
    name = " " * indent + _lane_name(line.site)
    text = " ".join(line.text.split())
    whole = f"{_ms(line.at):>12} {line.sign} {name:<{column}}{text}"
    return whole if len(whole) <= width else whole[: width - 1] + "…"


def _summed_up(events: Sequence[Event], lines_max: int) -> list[_Line]:
    """Landmarks, and between them as much detail as there is room for."""
    for kinds in LANDMARKS:
        stretches = _stretches(events, kinds)
        forms = [[[], _in_one_line(s), _in_groups(s), _in_full(s)] for s in stretches]
        total = sum(1 for e in events if _is_landmark(e, kinds))
        if total + sum(len(f[1]) for f in forms) <= lines_max:
            break
    chosen = _levels(stretches, forms, lines_max - total, _Nearness(events))
    lines = [_Line.of(e) for e in events if _is_landmark(e, kinds)]
    lines += [line for form, level in zip(forms, chosen, strict=True) for line in form[level]]
    return sorted(lines, key=lambda line: line.at)


def _stretches(events: Sequence[Event], kinds: set[str]) -> list[list[Event]]:
    """The events between two landmarks, where there are any."""
    found: list[list[Event]] = [[]]
    for event in events:
        if _is_landmark(event, kinds):
            found.append([])
        else:
            found[-1].append(event)
    return [stretch for stretch in found if stretch]


def _levels(
    stretches: Sequence[list[Event]],
    forms: Sequence[list[list[_Line]]],
    room: int,
    nearness: _Nearness,
) -> list[int]:
    """How much of each stretch is told: all get a line, then those near a fault groups, then all
    of their events, for as long as there is room."""
    near = sorted(
        range(len(stretches)),
        key=lambda i: nearness.distance(stretches[i][0].at, stretches[i][-1].at),
    )
    chosen = [0] * len(stretches)
    for level in (1, 2, 3):
        for i in near:
            more = len(forms[i][level]) - len(forms[i][chosen[i]])
            if more <= room and chosen[i] == level - 1:
                chosen[i] = level
                room -= more
    return chosen


def _in_full(stretch: Sequence[Event]) -> list[_Line]:
    return [_Line.of(e) for e in stretch]


def _in_groups(stretch: Sequence[Event]) -> list[_Line]:
    groups: dict[tuple[object, ...], list[Event]] = {}
    for event in stretch:
        groups.setdefault((event.kind, event.site, event.other, _subject(event)), []).append(event)
    return [_group_line(group) for group in groups.values()]


def _group_line(group: Sequence[Event]) -> _Line:
    """``12 bundles 0->2 epochs 4-6``"""
    first, end = group[0], max(e.until or e.at for e in group)
    if len(group) == 1:
        return _Line.of(first)
    words = [_counted(len(group), first)]
    if first.other is not None:
        words.append(_way(first))
    words += [_epoch_words(group), f"(until {_ms(end)})"]
    return _Line(first.at, first.site, " ".join(w for w in words if w))


def _counted(count: int, event: Event) -> str:
    subject = _subject(event)
    if event.kind not in MESSAGES:
        return f"{count} x {subject}"
    return f"{count} {subject[:-1]}ies" if subject.endswith("y") else f"{count} {subject}s"


def _epoch_words(group: Sequence[Event]) -> str:
    epochs = _epochs(group)
    if epochs is None:
        return ""
    return f"epoch {epochs[0]}" if epochs[0] == epochs[1] else f"epochs {epochs[0]}-{epochs[1]}"


def _in_one_line(stretch: Sequence[Event]) -> list[_Line]:
    """``240 send, 200 ack, 60 work, epochs 4-9``"""
    if len(stretch) == 1:
        return _in_full(stretch)
    kinds = Counter(e.kind for e in stretch)
    words = [f"{n} {kind}" for kind, n in kinds.items()]
    words += [w for w in (_epoch_words(stretch),) if w]
    end = max(e.until or e.at for e in stretch)
    text = f"{', '.join(words)} (until {_ms(end)})"
    return [_Line(stretch[0].at, ALL_LANES, text)]


# --- picture ------------------------------------------------------------------------------------

WIDTH = 1600
LEFT, RIGHT = 96, 28
LANE, EDGE = 84, 56
"""How high a site's lane is without labels, and those of the controller and the outside."""
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


def svg_timeline(events: Iterable[Event], title: str) -> str:
    """The run as a picture: a lane for each site, time from left to right."""
    return _Picture(_in_order(events), title).svg()


class _Picture:
    def __init__(self, events: Sequence[Event], title: str) -> None:
        self.events, self.title = events, title
        self.begin = min((e.at for e in events), default=0.0)
        self.end = max((max(e.at, e.until or e.at) for e in events), default=0.0)
        self.span = (self.end - self.begin) or 1e-3
        self.nearness = _Nearness(events)
        self.shown = thinned(events, self.nearness, MARKS_MAX)
        self.colours = _colours(events)
        self.views = [e for e in events if e.kind == "view"]
        rows = _rows([(self.x(e.at) + 4, e.text) for e in self.views], LABEL_ROWS)
        self.view_rows = [LABEL_ROWS if row is None else row for row in rows]
        self.top = 58 + 15 * (max(self.view_rows, default=-1) + 1)
        self.y, self.bottom = self._place_lanes()

    def _place_lanes(self) -> tuple[dict[int, float], float]:
        places, at = {}, float(self.top)
        for site in _lanes(self.events):
            height = LANE if site >= 0 else EDGE
            places[site] = at + height / 2
            at += height + 13 * self._rows_below(site)
        return places, at

    def _rows_below(self, site: int) -> int:
        labels = [(self.x(e.at), e.text) for e in self._beside(site)]
        return max((row + 1 for row in _rows(labels, LABEL_ROWS) if row is not None), default=0)

    def _beside(self, site: int) -> list[Event]:
        """What is written below a lane."""
        return [e for e in self.events if e.site == site and e.kind in ("phase", "note")]

    def x(self, at: float) -> float:
        return LEFT + (at - self.begin) / self.span * (WIDTH - LEFT - RIGHT)

    def fade(self, event: Event) -> float:
        """Opaque near faults, pale far away from them."""
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

    def _of(self, draw: Callable[[Event], str], *kinds: str) -> list[str]:
        return [draw(e) for e in self.shown if e.kind in kinds]

    # --- the ground -----------------------------------------------------------------------------

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
        """A band for as long as the lane lives."""
        y = self.y[site]
        half = BAR / 2 + 4
        mine = [e.at for e in self.events if site in (e.site, e.other)]
        ends = [e.at for e in self.events if e.site == site and _is_crash(e)]
        x0, x1 = self.x(min(mine)), self.x(ends[0] if ends else self.end)
        fill = "#eef1f4" if site >= 0 else "#f6f3fb" if site == CONTROLLER else "#eef7f2"
        return (
            f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#dfe4e9"/>'
            f'<rect x="{x0:.1f}" y="{y - half:.1f}" width="{max(2.0, x1 - x0):.1f}" '
            f'height="{2 * half}" rx="3" fill="{fill}"/>'
            + _text(LEFT - 12, y + 4, _lane_name(site), "lane", anchor="end")
        )

    def _view(self, event: Event, row: int) -> str:
        x, y = self.x(event.at), 50 + 15 * row
        anchor = "end" if _anchored(x + 4, event.text) < x else ""
        return (
            f'<path class="view" d="M{x:.1f} {y - 8}V{self.bottom:.1f}"/>'
            + _label(x + (-4 if anchor else 4), y, event.text, anchor=anchor)
        )  # fmt: skip

    # --- what happens on the lanes --------------------------------------------------------------

    def _work(self, event: Event) -> str:
        x, y = self.x(event.at), self.y[event.site]
        width = max(1.2, self.x(event.until or event.at) - x)
        return (
            f'<rect x="{x:.1f}" y="{y - BAR / 2:.1f}" width="{width:.1f}" height="{BAR}" rx="1" '
            f'fill="{self.colours[_stage(event)]}" opacity="{self.fade(event)}">'
            f"<title>{_escaped(_told(event))}</title></rect>"
        )

    def _frame(self, event: Event) -> str:
        if event.kind == "arrive":
            x, y = self.x(event.at), self.y[event.site]
            return f'<circle cx="{x:.1f}" cy="{y:.1f}" r="1.6" fill="{FRAME}"/>'
        return self._arrow(event, "frame")

    def _ack(self, event: Event) -> str:
        return self._arrow(event, "ack")

    def _control(self, event: Event) -> str:
        return self._arrow(event, "control")

    def _deliver(self, event: Event) -> str:
        return self._arrow(event, "deliver")

    def _arrow(self, event: Event, kind: str) -> str:
        """From lane to lane; half of the way and red if it never arrived."""
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
            f'opacity="{self.fade(event)}"><title>{_escaped(_told(event))}</title></path>'
        )

    def _band(self, event: Event) -> str:
        """A fault that lasts: of a lane, or between two."""
        if event.until is None:
            return ""
        x0, x1 = self.x(event.at), self.x(event.until)
        y0 = self.y[event.site]
        y1 = y0 if event.other is None else self.y[event.other]
        edge = BAR / 2 + 8 if event.other is None else -BAR / 2 - 4
        low, high = min(y0, y1) - edge, max(y0, y1) + edge
        return (
            f'<rect class="band" x="{x0:.1f}" y="{low:.1f}" width="{max(2.0, x1 - x0):.1f}" '
            f'height="{high - low:.1f}" rx="3"><title>{_escaped(_told(event))}</title></rect>'
        )

    def _cross(self, event: Event) -> str:
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
        return f"<g>{line}{''.join(crosses)}<title>{_escaped(_told(event))}</title></g>"

    def _labels(self, site: int) -> list[str]:
        """Faults above the lane; phases and notes below it, where they do not hide each other."""
        faults = [e for e in self.events if e.site == site and e.kind == "fault"]
        above, below = self.y[site] - BAR / 2 - 8, self.y[site] + BAR / 2 + 15
        return [
            *self._labels_of(faults, above, -12, 2),
            *self._labels_of(self._beside(site), below, 13, LABEL_ROWS),
        ]

    def _labels_of(
        self, events: Sequence[Event], base: float, step: float, rows_max: int
    ) -> list[str]:
        rows = _rows([(self.x(e.at), e.text) for e in events], rows_max)
        return [
            self._label(e, base + step * row) if row is not None else self._tick(e)
            for e, row in zip(events, rows, strict=True)
        ]

    def _label(self, event: Event, y: float) -> str:
        x = self.x(event.at)
        anchor = "end" if _anchored(x, event.text) < x else ""
        if event.kind == "fault":
            return _label(x, y, event.text, "bad", anchor)
        kind = "note" if event.kind == "note" else ""
        return self._tick(event, y) + _label(x + (-4 if anchor else 4), y, event.text, kind, anchor)

    def _tick(self, event: Event, low: float | None = None) -> str:
        """Where on the lane a label belongs; all that is left of it where there is no room."""
        x, y = self.x(event.at), self.y[event.site]
        low = y + BAR / 2 + 7 if low is None else low
        return (
            f'<path d="M{x:.1f} {y - BAR / 2 - 3:.1f}V{low:.1f}" stroke="{INK}" stroke-width=".9">'
            f"<title>{_escaped(_told(event))}</title></path>"
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


def thinned(events: Sequence[Event], nearness: _Nearness, marks_max: int) -> list[Event]:
    """At most about so many: landmarks all stay, and of the rest two thirds of the room are for
    what is nearest to a fault; from what remains every so-manieth is taken."""
    rest = [e for e in events if not _is_landmark(e, LANDMARKS[0])]
    if len(rest) <= marks_max:
        return list(events)
    rest.sort(key=lambda e: nearness.distance(e.at, e.until) if nearness else 0.0)
    near = marks_max * 2 // 3 if nearness else 0
    keep = {id(e) for e in rest[:near]}
    keep |= {id(e) for e in _every(sorted(rest[near:], key=lambda e: e.at), marks_max - near)}
    return [e for e in events if _is_landmark(e, LANDMARKS[0]) or id(e) in keep]


def _every(items: Sequence[T], count: int) -> list[T]:
    """`count` of the items, evenly spread."""
    return (
        [items[i * len(items) // count] for i in range(count)] if count < len(items) else [*items]
    )


def _stage(event: Event) -> str:
    return _subject(event).split("/")[0]


def _colours(events: Iterable[Event]) -> dict[str, str]:
    """A colour for each stage, in the order in which they first work."""
    stages = dict.fromkeys(_stage(e) for e in events if e.kind == "work")
    return {stage: STAGES[i % len(STAGES)] for i, stage in enumerate(stages)}


def _is_crash(event: Event) -> bool:
    return event.kind == "fault" and event.text.startswith("crash")


def _rows(labels: Sequence[tuple[float, str]], rows_max: int) -> list[int | None]:
    """In which row each label goes so that none hides another; None where there is no room."""
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
    """Where a label begins: to the left of its place if it would not fit to the right of it."""
    return x if x + _width(text) + 8 <= WIDTH else x - _width(text)


def _width(text: str) -> float:
    """About how wide a text is, in pixels."""
    return 6.1 * len(text)


def _step(span: float) -> float:
    """About a dozen ticks, at round times."""
    steps = [m * 10.0**e for e in range(-7, 7) for m in (1, 2, 5)]
    return next((s for s in steps if span / s <= 14), span)


def _escaped(text: str) -> str:
    """For XML, which does not allow control characters at all."""
    return escape("".join(c if c.isprintable() else " " for c in text), {'"': "&quot;"})


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    style = f' class="{kind}"' if kind else ""
    where = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:.1f}" y="{y:.1f}"{style}{where}>{_escaped(text)}</text>'


def _label(x: float, y: float, text: str, kind: str = "", anchor: str = "") -> str:
    """Text on a white ground, so that it stays legible on top of lines."""
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
