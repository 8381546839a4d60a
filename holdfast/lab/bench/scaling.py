"""``holdfast bench scaling``: measures the cost of a row as keys and partitions grow.

Cost is the processor time of the sites per row, which hardly depends on the load of the machine.
The flow is the DMZ flow on two sites. Every measurement starts after a warm-up in which all keys
get state.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

from rich.console import Console

from holdfast.connectors.sinks import discard
from holdfast.control.run import Run
from holdfast.errors import InvariantError
from holdfast.lab.workloads import dmz
from holdfast.ui.report import Figure, show

SITES = 2
KEYS = (10_000, 100_000, 1_000_000)
KEYS_WALL = 10_000_000
PARTITIONS = (4, 32, 256)


def bench(quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Measure, print a table, and return the figures."""
    console = console or Console()
    repeats = 1 if quick else 3
    rows = 4_000_000 if quick else 10_000_000
    keys: dict[int, list[float]] = {}
    partitions: dict[int, list[float]] = {}
    for repeat in range(repeats):
        console.print(f"repeat {repeat + 1} of {repeats}")
        for n in (*KEYS, KEYS_WALL):
            _note(keys, n, _cost(n, 32, rows), f"{n:,} keys", console)
        for n in PARTITIONS:
            _note(partitions, n, _cost(100_000, n, rows), f"{n} partitions", console)
    return _report(keys, partitions, console)


def _note(into: dict[int, list[float]], n: int, ns: float, what: str, console: Console) -> None:
    into.setdefault(n, []).append(ns)
    console.print(f"  {what}: {ns:,.0f} ns per row")


def _cost(keys: int, partitions: int, rows: int) -> float:
    """Return nanoseconds of processor time per row, after every key has occurred twice.

    The rows of a key alternate between start and end, and only ends cause work downstream. The
    measured rows are therefore whole pairs of rounds over all keys.
    """
    pair = 2 * keys
    warm = pair * -(-1_000_000 // pair)
    rows = pair * -(-rows // pair)
    make = dmz.DmzRows(keys=keys, splits=SITES)
    flow = dmz.dmz_flow(make.source(rows=warm + rows), discard())
    run = flow.start(sites=SITES, partitions=partitions)
    before = _wait_for(run, warm)
    run.wait()
    after = _reading(run)
    _require_keys(run, keys)
    return (after[1] - before[1]) / (after[0] - before[0]) * 1e9


def _require_keys(run: Run, keys: int) -> None:
    """Raise unless the state really holds this many keys."""
    held = sum(s["keys"] for site in run.status()["sites"] for s in site["stages"] if _first(s))
    if held != keys:
        raise InvariantError(f"the first keyed stage holds {held} keys instead of {keys}")


def _first(stage: dict[str, Any]) -> bool:
    return str(stage["stage"]).startswith("spans")


def _wait_for(run: Run, rows: int) -> tuple[int, float]:
    while not run.ended(0):
        reading = _reading(run)
        if reading[0] >= rows:
            return reading
        time.sleep(0.02)
    return 0, 0.0


def _reading(run: Run) -> tuple[int, float]:
    """Return the rows processed by the first keyed stage, and processor seconds of all sites."""
    sites = run.status()["sites"]
    rows = sum(s["rows_in"] for site in sites for s in site["stages"] if _first(s))
    return rows, sum(site["cpu_s"] for site in sites)


def _report(
    keys: dict[int, list[float]], partitions: dict[int, list[float]], console: Console
) -> dict[str, Any]:
    by_keys = {n: statistics.median(v) for n, v in keys.items()}
    by_partitions = {n: statistics.median(v) for n, v in partitions.items()}
    show(
        "cost of a row, ns of processor time",
        ["", "ns"],
        [[f"{n:,} keys", Figure(tuple(v))] for n, v in keys.items()]
        + [[f"{n} partitions", Figure(tuple(v))] for n, v in partitions.items()],
        console,
    )
    small = by_keys[KEYS[0]]
    growth = {
        "keys": max(by_keys[n] for n in KEYS) / min(by_keys[n] for n in KEYS),
        "partitions": max(by_partitions.values()) / min(by_partitions.values()),
    }
    figures = {
        "ns_per_row_by_keys": by_keys,
        "ns_per_row_by_partitions": by_partitions,
        "worst_growth": max(growth.values()),
        "growth_at_10m_keys": by_keys[KEYS_WALL] / small,
    }
    console.print(
        f"worst growth {figures['worst_growth']:.2f} (wanted: at most 2); "
        f"at 10 million keys {figures['growth_at_10m_keys']:.2f} (wanted: at most 4)"
    )
    return figures
