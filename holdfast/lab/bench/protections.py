"""``holdfast bench protections``: measures the cost of each protection, and recovery after a
``kill -9`` under it.

Three flows run on four sites that are plain processes, under every protection in turn:

- *events*: network monitoring in event time: sessions of 100,000 connections, which time out after
  a second, and windows of a second over the ended sessions;
- *dmz*: the papers' network-monitoring flow, whose state depends on all rows of a key;
- *stateless*: a filter and two maps whose outputs are merged, between source and sink.

The figures of cost are relative to the same flow without protection, measured alternately:

- *rate*: the maximum number of rows per second;
- *extra bytes*: the additional bytes between sites;
- *extra memory*: the additional resident memory of all sites at the end.

The figures of recovery are measured at a rate that all protections sustain. The benchmark kills a
site while everything is protected; if the flow gives rows only when a window closes, shortly before
that:

- *detection*: from the kill until the controller declares the site dead;
- *gap*: the largest latency of any row in flight in the two seconds after the kill, minus the
  largest in the two seconds before it, minus the detection;
- *full recovery*: from the kill until no latency exceeds 1.5 times the largest before it.

The JSON also has measurements of the flows without protection at both rates (`facts`). The models
of ``holdfast advise`` are fitted to them and to these figures.

Lost and duplicate rows are counted against an undisturbed run over the same rows on one site.
"""

from __future__ import annotations

import itertools
import math
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from holdfast.advise.measure import STATUS_MS, observe
from holdfast.api.options import Options
from holdfast.api.protection import Protection, active, none, pairs, passive, rollback, upstream
from holdfast.control.run import Run
from holdfast.errors import FlowError, InvariantError
from holdfast.lab.bench.kills import settle, until
from holdfast.lab.bench.tradeoff import picture as picture
from holdfast.lab.workloads import dmz
from holdfast.lab.workloads.monitoring import FLOWS, RATE, protected_flow, source
from holdfast.lab.workloads.paced import Delivery, gap_ms, read_latest, read_log, usual_ms
from holdfast.plan.planner import plan
from holdfast.ui.report import Figure, show

SITES, PARTITIONS = 4, 16
CHECKPOINT_MS = 1_000
MORE = {"stateless": 4}
"""Factor for the number of rows, for flows whose rows are cheap."""
WARM_S = 2.0
"""Warm-up: the first windows are late."""
QUIET_S = 0.3
"""A flow whose output pauses for longer than this gives rows in bursts."""
BEFORE_S = 0.05
"""Time between a kill and the next burst."""
WITHOUT_END = 1 << 40
FACTS_S = 5.0
"""Duration of the measurement of a flow without protection."""
PROTECTIONS: dict[str, Protection] = {
    "none": none(),
    "pairs": pairs(failure_domain="process"),
    "active": active(failure_domain="process"),
    "passive": passive(interval=CHECKPOINT_MS / 1e3, failure_domain="process"),
    "upstream": upstream(summary_interval=CHECKPOINT_MS / 1e3, failure_domain="process"),
    "rollback": rollback(summary_interval=CHECKPOINT_MS / 1e3, failure_domain="process"),
}


# --- measuring ----------------------------------------------------------------------------------


@dataclass(slots=True)
class Cost:
    """The results of runs at maximum rate."""

    rows_per_s: list[float] = field(default_factory=list)
    bytes_per_row: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)


@dataclass(slots=True)
class KillResults:
    """The results of runs in which sites are killed."""

    detection_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    full_ms: list[float] = field(default_factory=list)
    lost_rows: int = 0
    duplicate_rows: int = 0


def bench(quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Measure, print a table, and return the figures."""
    console = console or Console()
    work = tempfile.mkdtemp(prefix="holdfast-bench-")
    rows, repeats, kills = (8_000_000, 3, 2) if quick else (12_000_000, 9, 5)
    try:
        result: dict[str, Any] = {}
        for name in FLOWS:
            costs = _costs(work, name, rows * MORE.get(name, 1), repeats, console)
            recoveries = {p: _killed(work, name, p, kills, console) for p in costs if p != "none"}
            figures = _figures(costs, recoveries)
            figures["none"]["facts"] = facts(work, name)
            _show(name, figures, console)
            result |= figures if name == "events" else {name: figures}
        return result
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _costs(work: str, name: str, rows: int, repeats: int, console: Console) -> dict[str, Cost]:
    """Measure every protection that the flow can have in turn, in alternating order, so that a
    machine that becomes slower or faster favours none of them."""
    console.print(f"{name}: {rows:,} rows at maximum rate")
    costs = {p: Cost() for p in PROTECTIONS if _is_possible(name, PROTECTIONS[p])}
    for turn in range(repeats):
        for protection in list(costs)[:: 1 if turn % 2 == 0 else -1]:
            cost = costs[protection]
            _run_at_full_speed(work, name, PROTECTIONS[protection], rows, cost)
            console.print(
                f"  {protection}: {cost.rows_per_s[-1]:,.0f} rows/s, "
                f"{cost.bytes_per_row[-1]:.1f} bytes per row, {cost.memory_mb[-1]:,.0f} MB"
            )
    return costs


def facts(work: str, name: str) -> dict[str, Any]:
    """Measure the flow without protection, at maximum rate and at the rate of the kills."""
    measured = {}
    for kind, head in (("full", WITHOUT_END), ("paced", 0)):
        flow = protected_flow(name, tempfile.mkdtemp(dir=work), RATE, none(), head=head)
        begun, options = time.monotonic(), Options(status_interval=STATUS_MS / 1e3)
        with flow.start(sites=SITES, partitions=PARTITIONS, options=options) as run:
            measured[kind] = observe(run, SITES, begun, FACTS_S).to_dict()
            run.stop(drain=False)
    return measured


def _is_possible(name: str, protection: Protection) -> bool:
    try:
        plan(protected_flow(name, "", 1.0, protection))
    except FlowError:
        return False
    return True


def _run_at_full_speed(work: str, name: str, protection: Protection, rows: int, cost: Cost) -> None:
    folder = tempfile.mkdtemp(dir=work)
    source(folder, 1.0, head=rows).end(0.0)
    with protected_flow(name, folder, 1.0, protection, head=rows).start(
        sites=SITES, partitions=PARTITIONS
    ) as run:
        begun = time.monotonic()
        until(lambda: run.ended(0.02), "the flow has ended")
        seconds = time.monotonic() - begun
        run.wait()
    sites = run.status()["sites"]
    cost.rows_per_s.append(rows / seconds)
    cost.bytes_per_row.append(sum(s["sent_bytes"] for s in sites) / rows)
    cost.memory_mb.append(sum(s["rss_mb"] for s in sites))


def _killed(work: str, name: str, protection: str, kills: int, console: Console) -> KillResults:
    """Kill a site with a partition of the first keyed stage (or of the first stage)."""
    folder, results = tempfile.mkdtemp(dir=work), KillResults()
    flow = protected_flow(name, folder, RATE, PROTECTIONS[protection])
    at: list[tuple[float, float]] = []
    draw = random.Random(7)
    with flow.start(sites=SITES, partitions=PARTITIONS) as run:
        time.sleep(WARM_S)
        for _ in range(kills):
            until(lambda: run.protected, "everything is protected", run)
            time.sleep(3.0 + draw.random())
            settle(f"{folder}/epochs")
            _until_rows_are_due(read_latest(f"{folder}/epochs"))
            at.append(_kill(run))
        until(lambda: run.protected, "everything is protected", run)
        time.sleep(3.0)
        rows = source(folder, RATE).end()
        until(lambda: run.ended(0.02), "the flow has ended")
        run.wait()
    deliveries = read_log(f"{folder}/epochs")
    for killed, noticed in at:
        detection = (noticed - killed) * 1e3
        results.detection_ms.append(detection)
        results.gap_ms.append(max(0.0, gap_ms(deliveries, killed) - detection))
        results.full_ms.append(_full_recovery_ms(deliveries, killed))
    results.lost_rows, results.duplicate_rows = _compare(work, name, deliveries, rows)
    console.print(
        f"  {protection}: gaps {[round(g) for g in results.gap_ms]} ms, detected after "
        f"{[round(d) for d in results.detection_ms]} ms"
    )
    return results


def _until_rows_are_due(deliveries: Sequence[Delivery]) -> None:
    """If the flow gives rows in bursts, wait until shortly before the next one: a kill at any other
    moment would not delay a row."""
    at = [d.at for d in deliveries if d.rows]
    begun = [b for a, b in itertools.pairwise(at) if b - a > QUIET_S]
    if len(begun) > 1:
        every = statistics.median(b - a for a, b in itertools.pairwise(begun))
        passed = time.time() + BEFORE_S - begun[-1]
        time.sleep(math.ceil(passed / every) * every - passed)


def _kill(run: Run) -> tuple[float, float]:
    """Kill a site; return when it was killed, and when it was declared dead."""
    status = run.status()
    keyed = [p for p in status["partitions"] if p["stage"] not in ("packets", "alerts")]
    victim = (keyed or status["partitions"])[0]["replicas"][0]
    pid = next(s["pid"] for s in status["sites"] if s["site"] == victim)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    until(lambda: victim in run.status()["dead"], "the site is declared dead", run, every_s=0.001)
    return killed, time.time()


def _full_recovery_ms(deliveries: Sequence[Delivery], killed: float) -> float:
    """Return the time until no latency exceeds 1.5 times the largest before the kill."""
    usual = 1.5 * usual_ms(deliveries, killed)
    late = [d.at for d in deliveries if killed <= d.at < killed + 3.0 and d.largest_ms > usual]
    return (max(late, default=killed) - killed) * 1e3


def _compare(work: str, name: str, deliveries: Sequence[Delivery], rows: int) -> tuple[int, int]:
    """Count lost and duplicate rows against an undisturbed run on one site."""
    folder = tempfile.mkdtemp(dir=work)
    source(folder, 1.0, head=rows).end(0.0)
    with protected_flow(name, folder, 1.0, none(), head=rows).start(
        sites=1, partitions=PARTITIONS
    ) as run:
        until(lambda: run.ended(0.02), "the flow has ended")
        run.wait()
    expected = read_log(f"{folder}/epochs")
    first = {d.epoch: d for d in reversed(deliveries)}
    repeated = sum(d.rows for d in deliveries if first[d.epoch] is not d)
    surplus = sum(d.rows for d in first.values()) - sum(d.rows for d in expected)
    digests = [dmz.as_hex(sum(d.digest for d in log)) for log in (first.values(), expected)]
    if not surplus and digests[0] != digests[1]:
        raise InvariantError(f"{name}: the number of rows is correct, but the rows are not")
    return max(0, -surplus), repeated + max(0, surplus)


# --- figures ------------------------------------------------------------------------------------


def _figures(costs: dict[str, Cost], recoveries: dict[str, KillResults]) -> dict[str, Any]:
    plain = costs["none"]
    figures: dict[str, Any] = {"none": {"rows_per_s": Figure(tuple(plain.rows_per_s))}}
    for name, cost in costs.items():
        if name == "none":
            continue
        recovery = recoveries[name]
        rates = [a / b for a, b in zip(cost.rows_per_s, plain.rows_per_s, strict=True)]
        extra = [a / b - 1 for a, b in zip(cost.bytes_per_row, plain.bytes_per_row, strict=True)]
        memory = [a / b - 1 for a, b in zip(cost.memory_mb, plain.memory_mb, strict=True)]
        figures[name] = {
            "rate": statistics.median(rates),
            "extra_bytes": statistics.median(extra),
            "extra_memory": statistics.median(memory),
            "detection_ms": statistics.median(recovery.detection_ms),
            "gap_ms": statistics.median(recovery.gap_ms),
            "full_recovery_ms": statistics.median(recovery.full_ms),
            "lost_rows": recovery.lost_rows,
            "duplicate_rows": recovery.duplicate_rows,
            "rates": Figure(tuple(rates)),
            "gaps_ms": Figure(tuple(recovery.gap_ms)),
            "full_recoveries_ms": Figure(tuple(recovery.full_ms)),
        }
    return figures


def _show(name: str, figures: dict[str, Any], console: Console) -> None:
    columns = (
        "",
        "rate",
        "extra bytes",
        "extra memory",
        "detected ms",
        "gap ms",
        "full ms",
        "lost",
    )
    rows = [
        (
            protection,
            f["rates"],
            f"{f['extra_bytes']:+.2f}",
            f"{f['extra_memory']:+.2f}",
            f["detection_ms"],
            f["gaps_ms"],
            f["full_recoveries_ms"],
            f"{f['lost_rows']} / {f['duplicate_rows']}",
        )
        for protection, f in figures.items()
        if protection != "none"
    ]
    plain = figures["none"]["rows_per_s"]
    show(
        f"{name}: without protection {plain} rows/s; lost / duplicate rows", columns, rows, console
    )
