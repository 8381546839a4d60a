"""Maximum rates of the flow of ``holdfast bench failover``, without protection and under pairs."""

from __future__ import annotations

import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.api.protection import Protection, none, pairs
from holdfast.connectors.sinks import discard
from holdfast.errors import InvariantError
from holdfast.lab.bench.failover_runs import (
    SITES,
    oracle,
    paced_flow,
    paced_source,
    session,
)
from holdfast.lab.bench.kills import (
    until,
)
from holdfast.lab.bench.processes import cpu_s
from holdfast.lab.workloads import dmz

WARM_UP_ROWS = 4_000_000


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of a run at maximum rate."""

    rows_per_s: float
    cpu_us: float  # of all processes, per row


def measure_speeds(rows: int, repeats: int, console: Console) -> dict[str, list[Speed]]:
    """Measure without protection and under pairs alternately, after a warm-up run of each."""
    speeds: dict[str, list[Speed]] = {"none": [], "pairs": []}
    protections = [none(), pairs(failure_domain="process")]
    with session() as spark:
        for protection in protections:
            _speed(spark, protection, WARM_UP_ROWS)
        for repeat in range(repeats):
            for protection in protections if repeat % 2 == 0 else protections[::-1]:
                speed = _speed(spark, protection, rows)
                speeds[protection.name].append(speed)
                console.print(
                    f"  {protection.name}: {speed.rows_per_s:,.0f} rows/s, "
                    f"{speed.cpu_us:.2f} µs of processor time per row"
                )
    return speeds


def _speed(spark: Any, protection: Protection, rows: int) -> Speed:
    make = dmz.DmzRows(splits=SITES, staggered=True)
    flow = dmz.dmz_flow(make.source(rows=rows), discard())
    flow.protection = protection
    run = flow.start(spark, sites=SITES)
    begun, used = time.monotonic(), cpu_s()
    with run:
        until(lambda: run.ended(0.05), "the flow has ended")
    run.wait()
    seconds, used = time.monotonic() - begun, cpu_s() - used
    result, expected = run.sink_report("alerts"), oracle(rows)
    if (result["rows"], result["digest"]) != (expected["rows"], expected["digest"]):
        raise InvariantError(f"the result is wrong: {result} instead of {expected}")
    return Speed(rows / seconds, used / rows * 1e6)


def measure_paced_speed(work: Path, rows: int) -> float:
    """Return the maximum rate, in rows/s, of the flow whose sites are killed. It does more work
    than the flow of `_speed`: its rows carry their due times, and its sink writes a log."""
    folder = tempfile.mkdtemp(dir=work)
    paced_source(folder, 1.0, head=rows).end(0.0)
    with session() as spark, paced_flow(folder, 1.0, head=rows).start(spark, sites=SITES) as run:
        begun = time.monotonic()
        until(lambda: run.ended(0.05), "the flow has ended")
        seconds = time.monotonic() - begun
        run.wait()
    return rows / seconds
