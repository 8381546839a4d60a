"""``holdfast bench protections``: what each protection costs, and what a ``kill -9`` does under it.

Three flows on four sites that are plain processes, under every protection in turn:

- *events*: network monitoring in event time: sessions of 100,000 connections, which time out after
  a second, and windows of a second over those that ended;
- *dmz*: the papers' network-monitoring flow, whose state comes from all rows of a key;
- *stateless*: a filter and two maps that come together again, between source and sink.

What the figures are, all relative to the same flow without protection, measured in turn:

- *rate*: the largest number of rows a second;
- *extra bytes*: what sites send each other more, relative to what they send without;
- *extra memory*: resident memory of all sites at the end, relative to that without.

And at a rate that all of them can bear, of a site that is killed when everything is protected; if
the flow gives rows only when a window closes, right before that:

- *detection*: from the kill until it is known which site is dead;
- *gap*: the largest latency of any row that was under way in the two seconds after it, minus the
  largest in the two seconds before it, minus the detection;
- *full recovery*: from the kill until no row is half as late again as the latest before it.

What the flows do without protection, at both rates, is in the JSON (`facts`): the models behind
``holdfast advise`` are fitted to that and to these figures.

Lost and duplicate rows are found by comparing with the same rows on one site, undisturbed.
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

from holdfast.advise.measure import STATUS_MS, watched
from holdfast.api.options import Options
from holdfast.api.protection import active, none, pairs, passive, rollback, upstream
from holdfast.control.run import Run
from holdfast.core.protection import ProtectionSpec
from holdfast.errors import FlowError, InvariantError
from holdfast.lab.bench.failover import settle, until
from holdfast.lab.bench.tradeoff import picture as picture
from holdfast.lab.workloads import dmz
from holdfast.lab.workloads.monitoring import FLOWS, RATE, made, source
from holdfast.lab.workloads.paced import Delivery, gap_ms, read_latest, read_log, usual_ms
from holdfast.plan.planner import plan
from holdfast.ui.report import Figure, show

SITES, PARTITIONS = 4, 16
CHECKPOINT_MS = 1_000
MORE = {"stateless": 4}
"""By flow: how many times as many rows, where a row costs little."""
WARM_S = 2.0
"""The first windows are late."""
QUIET_S = 0.3
"""A flow that gives no row for so long gives them now and then."""
BEFORE_S = 0.05
"""A site is killed so long before the next ones."""
WITHOUT_END = 1 << 40
FACTS_S = 5.0
"""How long a flow is looked at, to know what it does."""
PROTECTIONS: dict[str, ProtectionSpec] = {
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
    """Runs as fast as possible."""

    rows_per_s: list[float] = field(default_factory=list)
    bytes_per_row: list[float] = field(default_factory=list)
    memory_mb: list[float] = field(default_factory=list)


@dataclass(slots=True)
class Recovery:
    """Runs in which sites are killed."""

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
        found: dict[str, Any] = {}
        for name in FLOWS:
            costs = _costs(work, name, rows * MORE.get(name, 1), repeats, console)
            recoveries = {p: _killed(work, name, p, kills, console) for p in costs if p != "none"}
            figures = _figures(costs, recoveries)
            figures["none"]["facts"] = facts(work, name)
            _show(name, figures, console)
            found |= figures if name == "events" else {name: figures}
        return found
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _costs(work: str, name: str, rows: int, repeats: int, console: Console) -> dict[str, Cost]:
    """Every protection that the flow can have, in turn, there and back: a machine that becomes
    slower or faster meanwhile is no advantage to any of them."""
    console.print(f"{name}: {rows:,} rows as fast as possible")
    costs = {p: Cost() for p in PROTECTIONS if _is_possible(name, PROTECTIONS[p])}
    for turn in range(repeats):
        for protection in list(costs)[:: 1 if turn % 2 == 0 else -1]:
            cost = costs[protection]
            _run_at_full_speed(work, name, PROTECTIONS[protection], rows, cost)
            console.print(
                f"  {protection}: {cost.rows_per_s[-1]:,.0f} rows/s, "
                f"{cost.bytes_per_row[-1]:.1f} bytes a row, {cost.memory_mb[-1]:,.0f} MB"
            )
    return costs


def facts(work: str, name: str) -> dict[str, Any]:
    """What the flow does without protection, at full speed and at the rate of the kills."""
    found = {}
    for kind, head in (("full", WITHOUT_END), ("paced", 0)):
        flow = made(name, tempfile.mkdtemp(dir=work), RATE, none(), head=head)
        begun, options = time.monotonic(), Options(status_interval=STATUS_MS / 1e3)
        with flow.start(sites=SITES, partitions=PARTITIONS, options=options) as run:
            found[kind] = watched(run, SITES, begun, FACTS_S).to_dict()
            run.stop(drain=False)
    return found


def _is_possible(name: str, protection: ProtectionSpec) -> bool:
    try:
        plan(made(name, "", 1.0, protection))
    except FlowError:
        return False
    return True


def _run_at_full_speed(
    work: str, name: str, protection: ProtectionSpec, rows: int, cost: Cost
) -> None:
    folder = tempfile.mkdtemp(dir=work)
    source(folder, 1.0, head=rows).end(0.0)
    with made(name, folder, 1.0, protection, head=rows).start(
        sites=SITES, partitions=PARTITIONS
    ) as run:
        begun = time.monotonic()
        until(lambda: run.ended(0.02), "the flow has ended")
        seconds = time.monotonic() - begun
        run.wait()
    said = run.status()["sites"]
    cost.rows_per_s.append(rows / seconds)
    cost.bytes_per_row.append(sum(s["sent_bytes"] for s in said) / rows)
    cost.memory_mb.append(sum(s["rss_mb"] for s in said))


def _killed(work: str, name: str, protection: str, kills: int, console: Console) -> Recovery:
    """Kill a site that holds a partition of the first keyed stage (or whatever comes first)."""
    folder, found = tempfile.mkdtemp(dir=work), Recovery()
    flow = made(name, folder, RATE, PROTECTIONS[protection])
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
        found.detection_ms.append(detection)
        found.gap_ms.append(max(0.0, gap_ms(deliveries, killed) - detection))
        found.full_ms.append(_full_recovery_ms(deliveries, killed))
    found.lost_rows, found.duplicate_rows = _compare(work, name, deliveries, rows)
    console.print(
        f"  {protection}: gaps {[round(g) for g in found.gap_ms]} ms, noticed after "
        f"{[round(d) for d in found.detection_ms]} ms"
    )
    return found


def _until_rows_are_due(deliveries: Sequence[Delivery]) -> None:
    """Of a flow that gives rows only now and then, wait until right before the next ones: at any
    other moment nobody would notice the loss."""
    at = [d.at for d in deliveries if d.rows]
    begun = [b for a, b in itertools.pairwise(at) if b - a > QUIET_S]
    if len(begun) > 1:
        every = statistics.median(b - a for a, b in itertools.pairwise(begun))
        passed = time.time() + BEFORE_S - begun[-1]
        time.sleep(math.ceil(passed / every) * every - passed)


def _kill(run: Run) -> tuple[float, float]:
    """When it was killed, and when that was known."""
    status = run.status()
    keyed = [p for p in status["partitions"] if p["stage"] not in ("packets", "alerts")]
    victim = (keyed or status["partitions"])[0]["replicas"][0]
    pid = next(s["pid"] for s in status["sites"] if s["site"] == victim)
    killed = time.time()
    os.kill(pid, signal.SIGKILL)
    until(lambda: victim in run.status()["dead"], "the death is known", run, every_s=0.001)
    return killed, time.time()


def _full_recovery_ms(deliveries: Sequence[Delivery], killed: float) -> float:
    """Until no row is half as late again as the latest before the kill."""
    usual = 1.5 * usual_ms(deliveries, killed)
    late = [d.at for d in deliveries if killed <= d.at < killed + 3.0 and d.largest_ms > usual]
    return (max(late, default=killed) - killed) * 1e3


def _compare(work: str, name: str, deliveries: Sequence[Delivery], rows: int) -> tuple[int, int]:
    """Lost and duplicate rows, against an undisturbed run on one site."""
    folder = tempfile.mkdtemp(dir=work)
    source(folder, 1.0, head=rows).end(0.0)
    with made(name, folder, 1.0, none(), head=rows).start(sites=1, partitions=PARTITIONS) as run:
        until(lambda: run.ended(0.02), "the flow has ended")
        run.wait()
    right = read_log(f"{folder}/epochs")
    once = {d.epoch: d for d in reversed(deliveries)}
    again = sum(d.rows for d in deliveries if once[d.epoch] is not d)
    surplus = sum(d.rows for d in once.values()) - sum(d.rows for d in right)
    digests = [dmz.as_hex(sum(d.digest for d in log)) for log in (once.values(), right)]
    if not surplus and digests[0] != digests[1]:
        raise InvariantError(f"{name}: as many rows as there should be, but not the right ones")
    return max(0, -surplus), again + max(0, surplus)


# --- figures ------------------------------------------------------------------------------------


def _figures(costs: dict[str, Cost], recoveries: dict[str, Recovery]) -> dict[str, Any]:
    plain = costs["none"]
    found: dict[str, Any] = {"none": {"rows_per_s": Figure(tuple(plain.rows_per_s))}}
    for name, cost in costs.items():
        if name == "none":
            continue
        recovery = recoveries[name]
        rates = [a / b for a, b in zip(cost.rows_per_s, plain.rows_per_s, strict=True)]
        extra = [a / b - 1 for a, b in zip(cost.bytes_per_row, plain.bytes_per_row, strict=True)]
        memory = [a / b - 1 for a, b in zip(cost.memory_mb, plain.memory_mb, strict=True)]
        found[name] = {
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
    return found


def _show(name: str, figures: dict[str, Any], console: Console) -> None:
    columns = ("", "rate", "extra bytes", "extra memory", "noticed ms", "gap ms", "full ms", "lost")
    rows = [
        (
            protection,
            said["rates"],
            f"{said['extra_bytes']:+.2f}",
            f"{said['extra_memory']:+.2f}",
            said["detection_ms"],
            said["gaps_ms"],
            said["full_recoveries_ms"],
            f"{said['lost_rows']} / {said['duplicate_rows']}",
        )
        for protection, said in figures.items()
        if protection != "none"
    ]
    plain = figures["none"]["rows_per_s"]
    show(
        f"{name}: without protection {plain} rows/s; lost / duplicate rows", columns, rows, console
    )
