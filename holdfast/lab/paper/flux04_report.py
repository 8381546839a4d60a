"""The tables and pictures of ``holdfast paper flux04``: what was measured beside the paper."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from rich.console import Console

from holdfast.lab.paper.figures import Line, bars, drawn
from holdfast.lab.paper.flux04 import (
    AFTER_S,
    BEFORE_S,
    PAPER_BUFFER_S,
    PAPER_CAUGHT_UP_S,
    PAPER_RATES,
    PAPER_STEADY_S,
    Speeds,
    Trace,
    typical,
)
from holdfast.ui.drawing import Point
from holdfast.ui.report import Figure, show

KILL_NOTES = (
    "paper: the text says that output stays steady for a quarter of a second and then drops, that "
    "941 ms later 8.5 MB of state have been moved, and that a spike follows at about one second. "
    "It does not say how deep and how high. Nothing was dropped.",
    "Holdfast, partition pairs: rows are not held up by the hand-over. The donor hands over a "
    "snapshot while it goes on computing. So a kill is felt until consumers have asked the other "
    "replica, not until the new one has its state.",
    "Holdfast, cluster pairs: after the same take-over the flow stands still until the whole "
    "mirror is rebuilt. What has come in meanwhile is the spike behind it.",
    "Drops: Holdfast's source waits, so nothing is dropped. The column has the rows that would "
    "not fit into the buffer of a source that cannot wait and that holds the input of "
    f"{1e3 * PAPER_BUFFER_S:.0f} ms more than usual: the paper's 4,000 tuples, at its rate.",
    "All rates and latencies are averages over a quarter of a second, as in the paper. Sites are "
    "processes on one machine and share its processors; a busy machine shows up in what is usual "
    "before the kill.",
)
SPEED_NOTES = (
    "paper: with cluster pairs every row is computed twice on the same machines, which halves the "
    "rate; Flux adds acknowledgements and the search for duplicates, another 10 %.",
    "Holdfast: a mirror of half of the sites exchanges fewer rows between sites than the flow on "
    "all of them, and source and sink are not the paper's separate machine. So computing "
    "everything twice costs less than twice.",
    "Holdfast, partition pairs: acknowledgements are a few numbers for each epoch instead of one "
    "for each tuple.",
    "Processor time is what all sites use for a row. It depends less than the rate on what else "
    "runs on the machine.",
)


def show_kills(traces: Mapping[str, Sequence[Trace]], console: Console) -> None:
    """Print figure 8 in numbers."""
    rows: list[tuple[object, ...]] = [
        ("partition pairs, paper", "", PAPER_CAUGHT_UP_S - PAPER_STEADY_S, "", "", 1.0, 0)
    ]
    for approach, some in traces.items():
        rows.append(
            (
                f"{approach}, Holdfast",
                Figure(tuple(t.gap_ms for t in some)),
                Figure(tuple(t.low_s for t in some)),
                Figure(tuple(t.lowest for t in some)),
                Figure(tuple(t.highest for t in some)),
                Figure(tuple(t.protected_s for t in some)),
                Figure(tuple(float(t.dropped(PAPER_BUFFER_S)) for t in some)),
            )
        )
    columns = (
        "kill of one of four sites",
        "gap ms",
        "dip s",
        "lowest %",
        "spike %",
        "protected s",
        "drops",
    )
    show("Figure 8: output around a kill; rates in percent of the usual", columns, rows, console)
    late = [t.usual_ms for some in traces.values() for t in some if t.too_busy]
    if late:
        console.print(
            f"  The machine was too busy: before {len(late)} of the kills rows were late, by up to "
            f"{max(late):,.0f} ms, or did not come at all. Their figures say little.",
            highlight=False,
        )
    _notes(KILL_NOTES, console)


def show_speeds(found: Mapping[str, Speeds], console: Console) -> None:
    """Print the overhead comparison."""
    rows = [
        (
            approach,
            PAPER_RATES[approach],
            Figure(tuple(speeds.rows_per_s)),
            f"{PAPER_RATES[approach] / PAPER_RATES['none']:.2f}",
            Figure(relative_rates(found, approach)),
            Figure(tuple(speeds.cpu_us)),
            Figure(relative_costs(found, approach)),
        )
        for approach, speeds in found.items()
    ]
    columns = (
        "",
        "paper rows/s",
        "rows/s",
        "paper, of none",
        "of none",
        "µs of processor a row",
        "of none",
    )
    show("Overhead: maximum rate and processor time", columns, rows, console)
    _notes(SPEED_NOTES, console)


def relative_rates(found: Mapping[str, Speeds], approach: str) -> tuple[float, ...]:
    """Return the rates relative to those without protection, turn by turn."""
    both = zip(found[approach].rows_per_s, found["none"].rows_per_s, strict=True)
    return tuple(a / b for a, b in both)


def relative_costs(found: Mapping[str, Speeds], approach: str) -> tuple[float, ...]:
    """Return the processor times relative to those without protection, turn by turn."""
    both = zip(found[approach].cpu_us, found["none"].cpu_us, strict=True)
    return tuple(a / b for a, b in both)


def _notes(notes: Sequence[str], console: Console) -> None:
    for note in notes:
        console.print(f"  {note}", highlight=False, markup=False)
    console.print()


# --- pictures -------------------------------------------------------------------------------------


def pictures(traces: Mapping[str, Sequence[Trace]], found: Mapping[str, Speeds]) -> dict[str, str]:
    """Return the pictures by name. Of several kills the one with the median gap is drawn."""
    shown = {approach: typical(some) for approach, some in traces.items()}
    seconds = "seconds since a site was killed"
    rate = drawn(
        "Figure 8a: output rate around a kill (% of the usual)",
        seconds,
        "output rate (%)",
        [*_paper_rate(), *(_line(a, t, t.rate) for a, t in shown.items())],
        marks=False,
        event=(0.0, "kill"),
    )
    latency = drawn(
        "Figure 8b: mean latency of the output around a kill",
        seconds,
        "latency (ms)",
        [_line(a, t, t.latency_ms) for a, t in shown.items()],
        marks=False,
        event=(0.0, "kill"),
    )
    return {"rate": rate, "latency": latency, "overhead": _overhead(found)}


def _line(approach: str, around: Trace, values: Sequence[float | None]) -> Line:
    points = zip(around.ends, values, strict=True)
    return approach, "Holdfast", [(t, v) for t, v in points if v is not None]


def _paper_rate() -> list[Line]:
    """What the text says of the paper's curve: steady, then unknown until a quarter of a second
    after the catch-up."""
    usual: list[Point | None] = [(-BEFORE_S, 100.0), (PAPER_STEADY_S, 100.0), None]
    usual += [(PAPER_CAUGHT_UP_S + 0.25, 100.0), (AFTER_S, 100.0)]
    return [("partition pairs", "paper", usual)]


def _overhead(found: Mapping[str, Speeds]) -> str:
    """Draw the overhead comparison: three bars for each approach."""
    groups = {}
    for approach in found:
        ours = relative_rates(found, approach), relative_costs(found, approach)
        groups[approach] = (
            (PAPER_RATES[approach] / PAPER_RATES["none"],),
            ours[0],
            tuple(1.0 / cost for cost in ours[1]),
        )
    return bars(
        "Maximum rate relative to no protection",
        "relative rate",
        ("paper", "Holdfast", "Holdfast, by processor time"),
        groups,
    )
