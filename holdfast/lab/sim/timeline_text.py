"""The timeline of a run as text: a line for each event, or for several similar ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.lab.sim.timeline import (
    ALL_LANES,
    LANDMARKS,
    MESSAGES,
    Nearness,
    TimelineEvent,
    epochs_of,
    event_text,
    in_order,
    is_landmark,
    lane_name,
    lanes_of,
    ms_text,
    subject_of,
    way_text,
)


def text_timeline(
    events: Iterable[TimelineEvent], width: int = 120, *, full: bool = False, lines_max: int = 200
) -> str:
    """Return a line for each event, in order of time, with an indent for each lane.

    Similar events between two landmarks are summarised so that the text has about `lines_max`
    lines, with more detail close to faults. With `full` every event has its line.
    """
    ordered = sorted(events, key=lambda e: e.at) if full else in_order(events)
    if not ordered:
        return "nothing happened\n"
    lanes = lanes_of(ordered)
    lines = [_Line.of(e) for e in ordered] if full else _summed_up(ordered, lines_max)
    return "".join(_printed(line, lanes, width) + "\n" for line in lines)


@dataclass(frozen=True, slots=True)
class _Line:
    at: float
    site: int
    text: str
    sign: str = " "

    @classmethod
    def of(cls, event: TimelineEvent) -> _Line:
        sign = {"fault": "!", "view": "=", "phase": "*"}.get(event.kind, " ")
        return cls(event.at, event.site, event_text(event), sign)


def _printed(line: _Line, lanes: Sequence[int], width: int) -> str:
    indent = 2 * lanes.index(line.site) if line.site in lanes else 0
    column = max(len(lane_name(s)) + 2 * i for i, s in enumerate(lanes)) + 2
    name = " " * indent + lane_name(line.site)
    text = " ".join(line.text.split())
    whole = f"{ms_text(line.at):>12} {line.sign} {name:<{column}}{text}"
    return whole if len(whole) <= width else whole[: width - 1] + "…"


def _summed_up(events: Sequence[TimelineEvent], lines_max: int) -> list[_Line]:
    """Return the landmarks, and between them as much detail as there is room for."""
    for kinds in LANDMARKS:
        stretches = _stretches(events, kinds)
        forms = [[[], _in_one_line(s), _in_groups(s), _in_full(s)] for s in stretches]
        total = sum(1 for e in events if is_landmark(e, kinds))
        if total + sum(len(f[1]) for f in forms) <= lines_max:
            break
    chosen = _levels(stretches, forms, lines_max - total, Nearness(events))
    lines = [_Line.of(e) for e in events if is_landmark(e, kinds)]
    lines += [line for form, level in zip(forms, chosen, strict=True) for line in form[level]]
    return sorted(lines, key=lambda line: line.at)


def _stretches(events: Sequence[TimelineEvent], kinds: set[str]) -> list[list[TimelineEvent]]:
    """Return the events between each two landmarks, if there are any."""
    found: list[list[TimelineEvent]] = [[]]
    for event in events:
        if is_landmark(event, kinds):
            found.append([])
        else:
            found[-1].append(event)
    return [stretch for stretch in found if stretch]


def _levels(
    stretches: Sequence[list[TimelineEvent]],
    forms: Sequence[list[list[_Line]]],
    room: int,
    nearness: Nearness,
) -> list[int]:
    """Choose the level of detail of each stretch: one line, groups, or all events. As long as there
    is room, all stretches get the next level, those near a fault first."""
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


def _in_full(stretch: Sequence[TimelineEvent]) -> list[_Line]:
    return [_Line.of(e) for e in stretch]


def _in_groups(stretch: Sequence[TimelineEvent]) -> list[_Line]:
    groups: dict[tuple[object, ...], list[TimelineEvent]] = {}
    for event in stretch:
        groups.setdefault((event.kind, event.site, event.other, subject_of(event)), []).append(
            event
        )
    return [_group_line(group) for group in groups.values()]


def _group_line(group: Sequence[TimelineEvent]) -> _Line:
    """``12 bundles 0->2 epochs 4-6``"""
    first, end = group[0], max(e.until or e.at for e in group)
    if len(group) == 1:
        return _Line.of(first)
    words = [_counted(len(group), first)]
    if first.other is not None:
        words.append(way_text(first))
    words += [_epoch_words(group), f"(until {ms_text(end)})"]
    return _Line(first.at, first.site, " ".join(w for w in words if w))


def _counted(count: int, event: TimelineEvent) -> str:
    subject = subject_of(event)
    if event.kind not in MESSAGES:
        return f"{count} x {subject}"
    return f"{count} {subject[:-1]}ies" if subject.endswith("y") else f"{count} {subject}s"


def _epoch_words(group: Sequence[TimelineEvent]) -> str:
    epochs = epochs_of(group)
    if epochs is None:
        return ""
    return f"epoch {epochs[0]}" if epochs[0] == epochs[1] else f"epochs {epochs[0]}-{epochs[1]}"


def _in_one_line(stretch: Sequence[TimelineEvent]) -> list[_Line]:
    """``240 send, 200 ack, 60 work, epochs 4-9``"""
    if len(stretch) == 1:
        return _in_full(stretch)
    kinds = Counter(e.kind for e in stretch)
    words = [f"{n} {kind}" for kind, n in kinds.items()]
    words += [w for w in (_epoch_words(stretch),) if w]
    end = max(e.until or e.at for e in stretch)
    text = f"{', '.join(words)} (until {ms_text(end)})"
    return [_Line(stretch[0].at, ALL_LANES, text)]
