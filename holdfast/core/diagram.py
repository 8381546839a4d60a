"""Draws the table of a state machine for the documentation: a Mermaid diagram and a matrix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import Enum


def mermaid(start: Iterable[Enum], table: Mapping[tuple[Enum, Enum], Enum]) -> str:
    """The states and the edges between different ones. Events with the same edge share a label."""
    lines = ["stateDiagram-v2"]
    lines += [f"  [*] --> {state.name}" for state in dict.fromkeys(start)]
    edges: dict[tuple[str, str], list[str]] = {}
    for (state, event), then in table.items():
        if then is not state:
            edges.setdefault((state.name, then.name), []).append(event.name)
    lines += [f"  {a} --> {b}: {', '.join(events)}" for (a, b), events in edges.items()]
    return "\n".join(lines)


def matrix(
    states: Iterable[Enum],
    events: Iterable[Enum],
    table: Mapping[tuple[Enum, Enum], Enum],
    stale: Mapping[tuple[Enum, Enum], str],
) -> str:
    """The next state for each state and event, as a table in Markdown."""
    states = list(states)

    def cell(state: Enum, event: Enum) -> str:
        then = table.get((state, event))
        if then is None:
            return "stale" if (state, event) in stale else ""
        return "stays" if then is state else then.name

    lines = ["| | " + " | ".join(s.name for s in states) + " |", "| --- " * (len(states) + 1) + "|"]
    for event in events:
        cells = " | ".join(cell(state, event) for state in states)
        lines.append(f"| {event.name}: {event.value} | {cells} |")
    return "\n".join(lines)
