"""``holdfast bench sim``: measures simulated crash-recover runs per second, and their coverage.

A run is the DMZ flow on 3 sites with 4 partitions per stage, 20 epochs of 50 rows and one to three
faults, until everything is protected again and drained, with all checks, in one process. Coverage
is counted over these and the same number of runs on 3 to 5 sites.
"""

from __future__ import annotations

import time
from typing import Any

from rich.console import Console

from holdfast.errors import InvariantError
from holdfast.lab.sim.edges import EDGES, reached, share
from holdfast.lab.sim.explore import Case, Outcome, run
from holdfast.lab.sim.faults import PAIRS
from holdfast.ui.report import Figure, show

REPEATS = 3


def bench(quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Measure, print a table, and return the figures."""
    console = console or Console()
    count = 60 if quick else 200
    _must_be_right(run(Case(0, sites=3)))
    rates: list[float] = []
    hit: set[tuple[str, str]] = set()
    with reached() as edges:
        for repeat in range(REPEATS):
            seeds = range(repeat * count, (repeat + 1) * count)
            begun = time.process_time()
            outcomes = [_must_be_right(run(Case(seed, sites=3))) for seed in seeds]
            rates.append(count / (time.process_time() - begun))
            outcomes += [_must_be_right(run(Case(seed))) for seed in seeds]
            hit.update(pair for outcome in outcomes for pair in outcome.done)
    speed = Figure(tuple(rates))
    coverage = len(hit.intersection(PAIRS)) / len(PAIRS)
    missing = sorted(set(PAIRS) - hit)
    rows = [
        ("runs per second of processor time", speed, "≥ 100"),
        ("pairs of phase and fault that were hit", Figure((coverage,)), ""),
        ("(state, event) pairs that were reached", Figure((share(edges),)), ""),
    ]
    columns = ("median (smallest..largest)", "measured", "wanted")
    show("simulated crash-recover runs, one process", columns, rows, console)
    return {
        "runs_per_s": speed.median,
        "runs_per_s_spread": [speed.lowest, speed.highest],
        "coverage": coverage,
        "pairs": len(PAIRS),
        "missing": [list(pair) for pair in missing],
        "edges": share(edges),
        "edges_missing": [str(edge) for edge in sorted(EDGES - edges)],
        "runs": 2 * REPEATS * count,
    }


def _must_be_right(outcome: Outcome) -> Outcome:
    if outcome.problem is not None:
        raise InvariantError(f"seed {outcome.case.seed} failed: {outcome.problem}")
    return outcome
