"""``holdfast bench security``: what each level of security costs.

The network-monitoring flow runs on plain processes at each level in turn, several times: processor
time per row of all sites, and the rate, without protection and with pairs. Then a paced flow loses
sites: the extra latency of the slowest row around a kill. All figures are ratios to the level
`auth` of the same repeat, or stand beside it.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.api.options import Options
from holdfast.api.protection import Protection, none, pairs
from holdfast.api.security import Level
from holdfast.connectors.sinks import discard
from holdfast.errors import InvariantError
from holdfast.lab.bench.failover_runs import compare, paced_flow, paced_source
from holdfast.lab.bench.kills import Stalls, kill_site, pause, settle, until
from holdfast.lab.workloads import dmz
from holdfast.lab.workloads.paced import gap_ms, read_log
from holdfast.ui.report import Figure, show

SITES = 2
KILLED_SITES = 4
RATE = 200_000


def bench(quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Measure, print a table, and return the figures."""
    console = console or Console()
    rows, repeats, kills = (10_000_000, 3, 2) if quick else (20_000_000, 7, 6)
    costs: dict[tuple[str, Level], list[tuple[float, float]]] = {}
    gaps: dict[Level, list[float]] = {level: [] for level in Level}
    work = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        for repeat in range(repeats):
            for level in _turn(repeat):
                for name, protection in (
                    ("none", none()),
                    ("pairs", pairs(failure_domain="process")),
                ):
                    cost = _cost(level, protection, rows)
                    costs.setdefault((name, level), []).append(cost)
                    console.print(f"  {name}, {level.value}: {cost[0]:.0f} ns/row")
        for turn in range(kills):
            for level in _turn(turn):
                gaps[level].append(gap := _gap(work, level))
                console.print(f"  kill, {level.value}: {gap:.0f} ms")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _report(costs, gaps, console)


def _turn(repeat: int) -> list[Level]:
    """The levels, each first in turn: what comes first on a busy machine is often different."""
    levels = list(Level)
    at = repeat % len(levels)
    return levels[at:] + levels[:at]


def _cost(level: Level, protection: Protection, rows: int) -> tuple[float, float]:
    """Processor time of all sites in nanoseconds per row, and rows per second."""
    make = dmz.DmzRows(splits=SITES)
    flow = dmz.dmz_flow(make.source(rows=rows), discard())
    flow.protection = protection
    run = flow.start(options=Options(sites=SITES, security=level.value))
    begun = time.monotonic()
    run.wait()
    seconds = time.monotonic() - begun
    expected = dmz.oracle(rows, splits=SITES)["digest"]
    if run.sink_report("alerts")["digest"] != expected:
        raise InvariantError(f"at the level {level.value} the rows are wrong")
    used = sum(site["cpu_s"] for site in run.status()["sites"])
    return 1e9 * used / rows, rows / seconds


def _gap(work: Path, level: Level) -> float:
    """The extra latency of the slowest row around the kill of a site, in milliseconds."""
    folder, stalls = tempfile.mkdtemp(dir=work), Stalls()
    options = Options(sites=KILLED_SITES, security=level.value)
    with paced_flow(folder, RATE).start(options=options) as run:
        until(lambda: run.protected, "everything is protected", run)
        pause(run, stalls)
        settle(f"{folder}/epochs")
        kill = kill_site(run, stalls)
        pause(run, stalls)
        rows = paced_source(folder, RATE).end()
        until(lambda: run.ended(0), "the flow has ended")
        run.wait()
    deliveries = read_log(f"{folder}/epochs")
    if (wrong := compare(deliveries, rows)) != (0, 0):
        raise InvariantError(f"{wrong[0]} rows lost, {wrong[1]} repeated at {level.value}")
    return gap_ms(deliveries, kill.at)


def _report(
    costs: dict[tuple[str, Level], list[tuple[float, float]]],
    gaps: dict[Level, list[float]],
    console: Console,
) -> dict[str, Any]:
    figures: dict[str, Any] = {}
    table = []
    for (name, level), measured in sorted(costs.items(), key=lambda item: item[0][0]):
        base = costs[name, Level.AUTH]
        ratios = [ours[0] / auth[0] for ours, auth in zip(measured, base, strict=True)]
        spent = Figure(tuple(cost for cost, _ in measured))
        rate = statistics.median(rate for _, rate in measured)
        figures[f"{name}, {level.value}"] = {"ns": spent, "ratio": Figure(tuple(ratios))}
        table.append([f"{name}, {level.value}", spent, Figure(tuple(ratios)), rate])
    columns = ("protection, level", "ns of processor time a row", "over auth", "rows/s")
    show("The cost of security", columns, table, console)
    rows = [[level.value, Figure(tuple(values))] for level, values in gaps.items() if values]
    show("Kill of a site", ("level", "extra latency of the slowest row, ms"), rows, console)
    figures["gap_ms"] = {level.value: Figure(tuple(v)) for level, v in gaps.items() if v}
    return figures
