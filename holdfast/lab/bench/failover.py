"""``holdfast bench failover``: measures the effect of ``kill -9`` on the output of a flow under
pairs.

The DMZ flow runs at half of its maximum rate on sites that are Spark tasks. The benchmark kills
sites one after another, each at a random moment after everything is protected again. It then kills
the driver of one of two Spark applications that host the flow together, with all its processes.
Every row carries the time at which it was due, and the sink logs for every epoch when it was
delivered and how late its rows were. All figures, and the proof that no row was lost or repeated,
come from this log.

The figures:

- The *gap* of a kill is the largest latency of any row in flight during the `WINDOW_S` after it,
  minus the largest among the rows delivered in the `WINDOW_S` before it. Latency counts from the
  time at which a row was due, so it includes the delay before the flow reads the row.
- A *stall* is the longest time for which a site paused to freeze state or to send a part of it, as
  reported by the sites.
- *Catch-up* lasts from the kill until every partition has all its replicas again. Its latency
  factor is the 99th percentile of the latencies of all rows delivered from `TAKE_OVER_S` after a
  kill until everything was protected, divided by that of all rows delivered in the windows before
  the kills.
- The *throughput ratio* compares the maximum rates on the same sites. The rate under pairs includes
  everything: ingress, sequencer and egress are replicated like the operators, on the same sites and
  cores. The report also has the ratio of processor time per row, which hardly depends on the load
  of the machine. That ratio cannot be much above a half; if the rate ratio is, then the run without
  protection was not limited by the processor.
- The gap of Structured Streaming is the time between its last output before the kill of its driver,
  which is restarted immediately, and its next output. The time that its rows wait for their batch
  is not included.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.lab.bench.failover_rates import Speed, measure_paced_speed, measure_speeds
from holdfast.lab.bench.failover_rival import rival_gaps
from holdfast.lab.bench.failover_runs import (
    SITES,
    FailoverOutcome,
    kill_drivers,
    kill_sites,
    kill_with_large_state,
)
from holdfast.lab.bench.kills import (
    TOO_BUSY_MS,
)
from holdfast.lab.workloads.paced import (
    p99_ms,
)
from holdfast.ui.report import Figure, show


def bench(quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Measure, print a table, and return the figures."""
    console = console or Console()
    work = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        return _bench(_FailoverSizes(quick), work, console)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _FailoverSizes:
    """Number of kills and rows to measure."""

    def __init__(self, quick: bool) -> None:
        self.kills = 5 if quick else 20
        self.driver_kills = 1 if quick else 3
        self.rival_kills = 1 if quick else 3
        self.rate_repeats = 1 if quick else 3
        self.rate_rows = 16_000_000 if quick else 30_000_000


def _bench(sizes: _FailoverSizes, work: Path, console: Console) -> dict[str, Any]:
    speeds = measure_speeds(sizes.rate_rows, sizes.rate_repeats, console)
    rate = measure_paced_speed(work, sizes.rate_rows) / 2
    console.print(f"kill -9 of {sizes.kills} sites, one after another, at {rate:,.0f} rows/s")
    sites = kill_sites(work, rate, sizes.kills, console)
    console.print("kill -9 of a site with a large state")
    large = kill_with_large_state(work, console)
    console.print(f"kill -9 of the leading one of two applications, at {rate:,.0f} rows/s")
    drivers = kill_drivers(work, rate, sizes.driver_kills, console)
    console.print("kill -9 of the driver of the Structured Streaming version of the flow")
    rival = rival_gaps(work, sizes.rival_kills, console)
    return _report(speeds, rate, sites, large, drivers, rival, console)


def _report(
    speeds: dict[str, list[Speed]],
    rate: float,
    sites: FailoverOutcome,
    large: dict[str, Any],
    drivers: FailoverOutcome,
    rival: list[float],
    console: Console,
) -> dict[str, Any]:
    both = list(zip(speeds["pairs"], speeds["none"], strict=True))
    ratios = [p.rows_per_s / n.rows_per_s for p, n in both]
    cpu_ratio = statistics.median(n.cpu_us / p.cpu_us for p, n in both)
    before_drivers = p99_ms(drivers.before())
    gaps, catchups = sites.gaps_ms, [k.catchup_s for k in sites.kills]
    before, during = p99_ms(sites.before()), p99_ms(sites.during_catch_up())
    spark_gap = statistics.median(rival)
    figures: dict[str, Any] = {
        "kills": len(sites.kills),
        "lost_rows": sites.lost_rows + drivers.lost_rows,
        "duplicate_rows": sites.duplicate_rows + drivers.duplicate_rows,
        "gap_p50_ms": statistics.median(gaps),
        "gap_max_ms": max(gaps),
        "catchup_stall_max_ms": max(sites.stall_ms, large["stall_ms"]),
        "catchup_stall_100k_ms": sites.stall_ms,
        "catchup_stall_500mb_ms": large["stall_ms"],
        "catchup_s": statistics.median(catchups),
        "catchup_s_max": max(catchups),
        "catchup_latency_factor": during / before,
        "latency_p99_before_ms": before,
        "latency_p99_catchup_ms": during,
        "driver_kill_gap_ms": max(drivers.gaps_ms),
        "driver_latency_p99_before_ms": before_drivers,
        "machine_too_busy": max(before, before_drivers) > TOO_BUSY_MS,
        "driver_catchup_s": max(k.catchup_s for k in drivers.kills),
        "throughput_ratio": statistics.median(ratios),
        "throughput_cpu_ratio": cpu_ratio,
        "spark_gap_ms": spark_gap,
        "gap_p50_over_spark": statistics.median(gaps) / spark_gap,
        "gap_max_over_spark": max(gaps) / spark_gap,
        "driver_kill_gap_over_spark": max(drivers.gaps_ms) / spark_gap,
        "rate_rows_per_s": rate,
        "large_state_mb": large["state_mb"],
        "large_state_catchup_s": large["catchup_s"],
        "per_kill": sites.per_kill(),
        "per_driver_kill": drivers.per_kill(),
        "spark_gaps_ms": rival,
        "runs": {name: [s.rows_per_s for s in runs] for name, runs in speeds.items()},
    }
    _show(figures, ratios, console)
    return figures


def _show(figures: dict[str, Any], ratios: list[float], console: Console) -> None:
    def spread(per_kill: str, name: str) -> Figure:
        return Figure(tuple(kill[name] for kill in figures[per_kill]))

    f = figures
    rows: list[list[object]] = [
        ["rows lost", f["lost_rows"], "0"],
        ["rows delivered twice", f["duplicate_rows"], "0"],
        ["gap: extra latency of the slowest row, ms", spread("per_kill", "gap_ms"), "≤ 50, 200"],
        ["  the median over Spark's", f["gap_p50_over_spark"], "≤ 0.05"],
        ["  the largest over Spark's", f["gap_max_over_spark"], "≤ 0.05"],
        ["stall for a snapshot, 100,000 keys, ms", f["catchup_stall_100k_ms"], "≤ 20"],
        [
            f"stall for a snapshot, {f['large_state_mb']:,.0f} MB, ms",
            f["catchup_stall_500mb_ms"],
            "≤ 20",
        ],
        ["from the kill to protected again, s", spread("per_kill", "catchup_s"), ""],
        [f"  with {f['large_state_mb']:,.0f} MB of state, s", f["large_state_catchup_s"], ""],
        ["p99 latency before the kills, ms", f["latency_p99_before_ms"], ""],
        ["  during catch-up, over that", f["catchup_latency_factor"], "≤ 5"],
        ["driver kill: gap, ms", spread("per_driver_kill", "gap_ms"), "≤ 500"],
        ["  over Spark's", f["driver_kill_gap_over_spark"], "≤ 0.05"],
        ["  to protected again, s", spread("per_driver_kill", "catchup_s"), ""],
        ["  p99 latency before, ms", f["driver_latency_p99_before_ms"], ""],
        ["maximum rate under pairs, over none", Figure(tuple(ratios)), "≥ 0.45"],
        ["  the same by processor time per row", f["throughput_cpu_ratio"], ""],
        ["Structured Streaming: gap, ms", Figure(tuple(f["spark_gaps_ms"])), ""],
    ]
    title = (
        f"DMZ flow, {SITES} sites, {f['rate_rows_per_s']:,.0f} rows/s, {f['kills']} kills of sites"
    )
    show(title, ["median (smallest..largest)", "measured", "wanted"], rows, console)
    if f["machine_too_busy"]:
        console.print(
            f"Before the kills p99 was above {TOO_BUSY_MS:.0f} ms: the machine was too busy for "
            "this rate, and the figures are not meaningful, in particular a gap of 0."
        )
