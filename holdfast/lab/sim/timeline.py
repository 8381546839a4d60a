"""The timeline of a run: its events, and what its two forms, text and picture, share.

The functions are pure: they take a list of events, each with its lane and its time. A run of a few
seconds has thousands of events, of which a handful explain it. Both forms therefore show the events
close to a fault in full, and summarise or fade the others.

The text of an event has a subject and then ``epoch N``, so that similar events can be summarised.
For messages the subject is the first word (``bundle x1 epoch 4``), for work the stage and the
partition group (``count/0 epoch 4``). A fault whose text begins with ``crash`` ends its lane.
"""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

CONTROLLER = -1
OUTSIDE = -1000
"""Below the numbers of all controls: that of application n is -1 - n."""


@dataclass(frozen=True, slots=True)
class TimelineEvent:
    """One event of a run."""

    at: float
    """In seconds of virtual time."""
    kind: str
    """fault, view, send, arrive, ack, work, phase, deliver, control or note"""
    site: int
    """The lane; -1, -2 and so on are the controls of the applications, `OUTSIDE` is where sources
    and sinks are."""
    text: str
    other: int | None = None
    """The other lane of a message, or of a connection that fails."""
    until: float | None = None
    """The end of a span (work, a pause, a partition), or the arrival of a message."""


LANDMARKS = ({"fault", "view", "phase", "control", "note"}, {"fault", "view"}, {"fault"})
"""The kinds of events that always have a line; fewer kinds for runs with too many landmarks."""
MESSAGES = {"send", "arrive", "ack", "deliver", "control"}
ALL_LANES = OUTSIDE - 1


def in_order(events: Iterable[TimelineEvent]) -> list[TimelineEvent]:
    """Sort events by time, without arrivals that the event of the message already shows."""
    ordered = sorted(events, key=lambda e: e.at)
    told = {(e.site, e.other, e.text, e.until) for e in ordered if e.kind != "arrive"}
    return [e for e in ordered if e.kind != "arrive" or (e.other, e.site, e.text, e.at) not in told]


def lanes_of(events: Iterable[TimelineEvent]) -> list[int]:
    """Return the lanes from top to bottom: the controllers, the sites, the outside."""
    found = {e.site for e in events} | {e.other for e in events if e.other is not None}
    sites = sorted(s for s in found if s >= 0)
    controls = sorted((s for s in found if OUTSIDE < s < 0), reverse=True)
    return controls + sites + [s for s in (OUTSIDE,) if s in found]


def lane_name(site: int) -> str:
    names = {CONTROLLER: "controller", OUTSIDE: "outside", ALL_LANES: "..."}
    other = f"site {site}" if site >= 0 else f"controller {CONTROLLER - site}"
    return names.get(site, other)


def short_name(site: int) -> str:
    other = str(site) if site >= 0 else f"ctl{CONTROLLER - site}"
    return {CONTROLLER: "ctl", OUTSIDE: "out"}.get(site, other)


def ms_text(seconds: float) -> str:
    return f"{seconds * 1e3:,.2f}"


_EPOCHS = re.compile(r"\bepochs? (-?\d+)(?:-(\d+))?")


def epochs_of(events: Iterable[TimelineEvent]) -> tuple[int, int] | None:
    """Return the first and the last epoch that the texts name."""
    found = [m for e in events if (m := _EPOCHS.search(e.text))]
    if not found:
        return None
    return min(int(m[1]) for m in found), max(int(m[2] or m[1]) for m in found)


def is_landmark(event: TimelineEvent, kinds: set[str]) -> bool:
    """Whether an event is a landmark. A control message about an epoch is not: every epoch has
    one."""
    return event.kind in kinds and not (event.kind == "control" and epochs_of([event]))


def subject_of(event: TimelineEvent) -> str:
    """Return the subject of an event, without the epoch."""
    before = _EPOCHS.split(event.text)[0].strip(" ,:") or event.kind
    return before.split()[0] if event.kind in MESSAGES else before


def event_text(event: TimelineEvent) -> str:
    """Describe an event in full."""
    to = "" if event.other is None else f" {way_text(event)}"
    if event.until is None:
        return event.text + to
    word = "arrives" if event.kind in MESSAGES else "until"
    return f"{event.text}{to} ({word} {ms_text(event.until)})"


def way_text(event: TimelineEvent) -> str:
    assert event.other is not None
    sign = {"arrive": "<-", "fault": "><"}.get(event.kind, "->")
    return f"{short_name(event.site)}{sign}{short_name(event.other)}"


class Nearness:
    """Distances in time to the nearest fault, or to a view after the first fault."""

    def __init__(self, events: Sequence[TimelineEvent]) -> None:
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
        """Return the distance of a moment or a span in seconds; 0 if they overlap."""
        end = begin if end is None else max(begin, end)
        after = bisect_left(self._begins, begin)
        to_next = self._begins[after] - end if after < len(self._begins) else float("inf")
        to_last = begin - self._ends[after - 1] if after else float("inf")
        return max(0.0, min(to_next, to_last))
