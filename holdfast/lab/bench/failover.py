"""``holdfast bench failover``: what ``kill -9`` does to the output of a flow under pairs.

The DMZ flow runs at half of its maximum rate on sites that are Spark tasks. Sites are killed one
after another, each at a random moment after everything is protected again; then the driver of one
of two Spark applications that host the flow together, with all that belongs to it. Every row
carries when it was due, and the sink notes for every epoch when it was delivered and how late its
rows were. From these notes come all figures, and the proof that nothing was lost or repeated.

What the figures are:

- The *gap* of a kill is the largest latency of any row that was under way in the `WINDOW_S` after
  it, minus the largest among the rows delivered in the `WINDOW_S` before it. A row counts from
  when it was due, so one that the flow was slow to take is late too.
- A *stall* is the longest time that a site stood still to freeze state or to send a part of it,
  as the sites report it.
- *Catch-up* lasts from the kill until every partition has all its replicas again. Its latency
factor
  is the 99th percentile of the latencies of all rows delivered from `TAKE_OVER_S` after a kill
  until everything was protected, over that of all rows delivered in the windows before the kills.
- The *throughput ratio* compares the maximum rates on the same sites. Ours includes everything:
  ingress, sequencer and egress are replicated like the operators, on the same sites and cores.
  Beside it stands the ratio of the processor time per row, which hardly depends on what else the
  machine does. That one cannot be much above a half, so a rate ratio that is was not limited by
  the processor without protection.
- Structured Streaming's gap is the time between its last output before the kill of its driver,
  which is started again at once, and its next: what its rows wait for their batch comes on top.
"""

from __future__ import annotations

import functools
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.protection import Protection, none, pairs
from holdfast.connectors.sinks import discard
from holdfast.control.applications import Apps
from holdfast.errors import HostError, InvariantError
from holdfast.lab.bench.processes import cpu_s, tree
from holdfast.lab.workloads import dmz
from holdfast.lab.workloads.paced import (
    WINDOW_S,
    Delivery,
    EpochLog,
    Paced,
    Watched,
    gap_ms,
    p99_ms,
    read_latest,
    read_log,
    slowest,
    usual_ms,
)
from holdfast.spark.session import hosting_session
from holdfast.ui.report import Figure, show

SITES = 4
TAKE_OVER_S = 0.2
PATIENCE_S = 120.0
TOO_BUSY_MS = 250.0
SETTLE_S_MAX = 10.0
WARM_UP_ROWS = 4_000_000
HISTORY_KEYS = 1_000_000
HISTORY_ROWS = 100


def bench(quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Measure, print a table, and return the figures."""
    console = console or Console()
    work = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        return _bench(_Sizes(quick), work, console)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _Sizes:
    """How much is measured."""

    def __init__(self, quick: bool) -> None:
        self.kills = 5 if quick else 20
        self.driver_kills = 1 if quick else 3
        self.rival_kills = 1 if quick else 3
        self.rate_repeats = 1 if quick else 3
        self.rate_rows = 16_000_000 if quick else 30_000_000


def _bench(sizes: _Sizes, work: Path, console: Console) -> dict[str, Any]:
    speeds = _speeds(sizes.rate_rows, sizes.rate_repeats, console)
    rate = _paced_speed(work, sizes.rate_rows) / 2
    console.print(f"kill -9 of {sizes.kills} sites, one after another, at {rate:,.0f} rows/s")
    sites = kill_sites(work, rate, sizes.kills, console)
    console.print("kill -9 of a site with a large state")
    large = kill_with_large_state(work, console)
    console.print(f"kill -9 of the leading one of two applications, at {rate:,.0f} rows/s")
    drivers = kill_drivers(work, rate, sizes.driver_kills, console)
    console.print("kill -9 of the driver of the Structured Streaming version of the flow")
    rival = rival_gaps(work, sizes.rival_kills, console)
    return _report(speeds, rate, sites, large, drivers, rival, console)


# --- what was lost or came twice ----------------------------------------------------------------


def compare(deliveries: Sequence[Delivery], rows: int) -> tuple[int, int]:
    """Lost and duplicate rows of a log, given how many rows went in."""
    expected = _oracle(rows)
    found: dict[int, Delivery] = {}
    for delivery in deliveries:
        found.setdefault(delivery.epoch, delivery)
    again = sum(d.rows for d in deliveries if found[d.epoch] is not d)
    missing = set(range(max(found, default=-1))) - found.keys()
    surplus = sum(d.rows for d in found.values()) - int(expected["rows"])
    lost, duplicate = max(0, -surplus), again + max(0, surplus)
    digest = dmz.as_hex(sum(d.digest for d in found.values()))
    if not (lost or duplicate) and digest != expected["digest"]:
        raise InvariantError(
            f"as many rows as expected ({expected['rows']}), but not the right ones: digest "
            f"{digest} instead of {expected['digest']}; epochs missing: {sorted(missing)[:10]}"
        )
    return lost, duplicate


@functools.cache
def _oracle(rows: int) -> dict[str, Any]:
    return dmz.oracle(rows, splits=SITES, staggered=True)


# --- maximum rates --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Speed:
    """A run as fast as possible."""

    rows_per_s: float
    cpu_us: float  # of all processes, a row


def _speeds(rows: int, repeats: int, console: Console) -> dict[str, list[Speed]]:
    """Without protection and under pairs, in turn, after a run each that warms the workers up."""
    speeds: dict[str, list[Speed]] = {"none": [], "pairs": []}
    protections = [none(), pairs(failure_domain="process")]
    with _session() as spark:
        for protection in protections:
            _speed(spark, protection, WARM_UP_ROWS)
        for repeat in range(repeats):
            for protection in protections if repeat % 2 == 0 else protections[::-1]:
                speed = _speed(spark, protection, rows)
                speeds[protection.name].append(speed)
                console.print(
                    f"  {protection.name}: {speed.rows_per_s:,.0f} rows/s, "
                    f"{speed.cpu_us:.2f} µs of processor time a row"
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
    found, expected = run.sink_report("alerts"), _oracle(rows)
    if (found["rows"], found["digest"]) != (expected["rows"], expected["digest"]):
        raise InvariantError(f"the result is wrong: {found} instead of {expected}")
    return Speed(rows / seconds, used / rows * 1e6)


def _paced_speed(work: Path, rows: int) -> float:
    """The maximum rate, in rows/s, of the flow whose sites are killed: it does more than that of
    `_speed`, as its rows carry when they were due and its sink takes notes."""
    folder = tempfile.mkdtemp(dir=work)
    _paced_source(folder, 1.0, head=rows).end(0.0)
    with _session() as spark, paced_flow(folder, 1.0, head=rows).start(spark, sites=SITES) as run:
        begun = time.monotonic()
        until(lambda: run.ended(0.05), "the flow has ended")
        seconds = time.monotonic() - begun
        run.wait()
    return rows / seconds


@contextmanager
def _session() -> Iterator[Any]:
    # A site that was killed leaves its slot a little later than the next one wants it.
    spark = hosting_session("holdfast bench", SITES + 4, **{"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("FATAL")  # a lost worker is not news here
    try:
        yield spark
    finally:
        spark.stop()


CLOSED = ("protected", "not protected")
"""Phases in which nothing is to be done for a task."""


def until(
    condition: Callable[[], bool],
    what: str,
    run: Watched | None = None,
    every_s: float = 0.005,
) -> float:
    """Poll until something is so; how many seconds that took. It ends with the flow, or after
    `PATIENCE_S`, in an error."""
    begun = time.monotonic()
    while not condition():
        if run is not None and run.ended(0):
            run.wait()
            raise HostError(f"the flow has ended while the benchmark waited until {what}")
        if time.monotonic() - begun > PATIENCE_S:
            said = run.status() if run is not None else {}
            open_ = [p for p in said.get("partitions", []) if p["phase"] not in CLOSED]
            phases = [f"{p['stage']} {p['partitions']}: {p['phase']}" for p in open_]
            raise HostError(
                f"after {PATIENCE_S:.0f} s it is still not so that {what}; "
                f"view {said.get('view')}; {'; '.join(phases) or 'everything is protected'}"
            )
        time.sleep(every_s)
    return time.monotonic() - begun


# --- killing sites --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill, and when everything was protected again."""

    what: str
    at: float
    protected_at: float

    @property
    def catchup_s(self) -> float:
        return self.protected_at - self.at


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run with kills has shown."""

    kills: list[Kill]
    deliveries: list[Delivery]
    lost_rows: int
    duplicate_rows: int
    stall_ms: float = 0.0

    @property
    def gaps_ms(self) -> list[float]:
        return [gap_ms(self.deliveries, kill.at) for kill in self.kills]

    def before(self) -> list[Delivery]:
        spans = [(k.at - WINDOW_S, k.at) for k in self.kills]
        return [d for d in self.deliveries if any(a <= d.at < b for a, b in spans)]

    def during_catch_up(self) -> list[Delivery]:
        spans = [(k.at + TAKE_OVER_S, k.protected_at) for k in self.kills]
        return [d for d in self.deliveries if any(a <= d.at < b for a, b in spans)]

    def per_kill(self) -> list[dict[str, Any]]:
        return [self._described(kill) for kill in self.kills]

    def _described(self, kill: Kill) -> dict[str, Any]:
        worst = slowest(self.deliveries, kill.at)
        return {
            "killed": kill.what,
            "gap_ms": gap_ms(self.deliveries, kill.at),
            "largest_before_ms": usual_ms(self.deliveries, kill.at),
            "slowest_delivered_after_s": worst.at - kill.at if worst else None,
            "catchup_s": kill.catchup_s,
        }


def paced_flow(folder: str, rate: float, head: int = 0) -> Flow:
    """The DMZ flow of this benchmark; source and sink meet in `folder`."""
    source, sink = _paced_source(folder, rate, head), EpochLog(f"{folder}/epochs")
    flow = dmz.dmz_flow(source, sink, clock=Paced.DUE.name)
    flow.protection = pairs(failure_domain="process")
    return flow


def _paced_source(folder: str, rate: float, head: int = 0) -> Paced:
    make = dmz.DmzRows(splits=SITES, staggered=True)
    return Paced(folder, make, dmz.SCHEMA, rate, SITES, head)


def kill_sites(work: Path, rate: float, count: int, console: Console) -> Outcome:
    """Kill sites one after another, each when everything is protected, at random moments."""
    folder = tempfile.mkdtemp(dir=work)
    stalls, kills = _Stalls(), []
    with _session() as spark, paced_flow(folder, rate).start(spark, sites=SITES) as run:
        for _ in range(count):
            until(lambda: run.protected, "everything is protected", run)
            _pause(run, stalls)
            settle(f"{folder}/epochs")
            kills.append(kill := _kill_site(run, stalls))
            _say(console, kill, read_latest(f"{folder}/epochs"))
        _pause(run, stalls)
        rows = _paced_source(folder, rate).end()
        until(lambda: run.ended(0), "the flow has ended")
        run.wait()
    deliveries = read_log(f"{folder}/epochs")
    return Outcome(kills, deliveries, *compare(deliveries, rows), stalls.largest_ms)


class _Stalls:
    """The longest stall that any site has reported so far: sites take theirs with them."""

    def __init__(self) -> None:
        self.largest_ms = 0.0

    def look(self, run: Watched) -> None:
        seen = [site["stall_ms"] for site in run.status()["sites"]]
        self.largest_ms = max([self.largest_ms, *seen])


def _pause(run: Watched, stalls: _Stalls | None = None) -> None:
    """Undisturbed output to compare with, for a time of random length."""
    until = time.monotonic() + WINDOW_S + random.uniform(0.1, 1.1)
    while time.monotonic() < until:
        if run.ended(0.1):
            run.wait()
            raise HostError("the flow has ended before its time")
        if stalls is not None:
            stalls.look(run)


def settle(log: str) -> None:
    """Wait until the rows that the last kill delayed are through: a gap that is measured against
    them would look small. On a machine that is too busy for the rate that never happens."""
    until = time.monotonic() + SETTLE_S_MAX
    while time.monotonic() < until:
        since = time.time() - WINDOW_S
        if p99_ms([d for d in read_latest(log) if d.at >= since]) <= TOO_BUSY_MS:
            return
        time.sleep(0.2)


def _kill_site(run: Watched, stalls: _Stalls) -> Kill:
    status = run.status()
    site = random.choice([s for s in status["sites"] if s["site"] not in status["dead"]])
    at = time.time()
    os.kill(site["pid"], signal.SIGKILL)
    until(lambda: site["site"] in run.status()["dead"], "the site is known to be dead", run, 0.02)
    until(lambda: run.protected, "everything is protected", run)
    kill = Kill(f"site {site['site']}", at, time.time())
    stalls.look(run)
    return kill


def _say(console: Console, kill: Kill, deliveries: Sequence[Delivery]) -> None:
    """What can be said of a kill at once; later rows may still make the gap larger."""
    gap = gap_ms(deliveries, kill.at)
    console.print(f"  {kill.what}: gap {gap:.0f} ms, protected after {kill.catchup_s:.1f} s")


# --- a large state --------------------------------------------------------------------------------


class HistoryRows:
    """Every key once in a round, in a scattered order, with 5 bytes to remember."""

    SCHEMA = pa.schema([("key", pa.int64()), ("size", pa.int32()), ("flags", pa.int8())])

    def __call__(self, split: int, offset: int, count: int) -> pa.RecordBatch:
        row = np.arange(offset, offset + count) * SITES + split
        columns = row * 7_919 % HISTORY_KEYS, row.astype(np.int32), (row & 0x7F).astype(np.int8)
        return pa.record_batch([pa.array(c) for c in columns], schema=self.SCHEMA)


def kill_with_large_state(work: Path, console: Console) -> dict[str, Any]:
    """Kill a site of a flow that keeps the last 100 rows of 1,000,000 keys: 500 MB and the keys.

    The first row of a key allocates all of its history, and all of it is handed over, so two
    rounds over the keys make the state as large as it will ever be.
    """
    folder = tempfile.mkdtemp(dir=work)
    head = 2 * HISTORY_KEYS
    source = Paced(folder, HistoryRows(), HistoryRows.SCHEMA, 50_000, SITES, head)
    flow = Flow("history", protect=pairs(failure_domain="process"))
    keyed = flow.source("rows", source).key_by("key")
    window = keyed.window(rows=HISTORY_ROWS, every=HISTORY_ROWS)
    window.agg(size=F.last("size"), flags=F.last("flags")).sink("out", discard())
    stalls = _Stalls()
    with _session() as spark, flow.start(spark, sites=SITES) as run:
        until(lambda: _processed(run) >= 2 * head, "the state is full", run, 0.1)
        until(lambda: run.protected, "everything is protected", run)
        _pause(run, stalls)
        keys, state_mb = _held(run)
        kill = _kill_site(run, stalls)
        _pause(run, stalls)
        source.end()
        until(lambda: run.ended(0), "the flow has ended")
        run.wait()
    if keys != 2 * HISTORY_KEYS:
        raise InvariantError(f"two replicas hold {keys} keys instead of {2 * HISTORY_KEYS}")
    console.print(
        f"  {kill.what}, {state_mb:,.0f} MB in two replicas: longest stall {stalls.largest_ms:.1f} "
        f"ms, protected after {kill.catchup_s:.1f} s"
    )
    return {
        "stall_ms": stalls.largest_ms,
        "state_mb": state_mb / 2,
        "catchup_s": kill.catchup_s,
    }


def _keyed(run: Watched) -> list[dict[str, Any]]:
    return [s for site in run.status()["sites"] for s in site["stages"] if s["kind"] == "keyed"]


def _processed(run: Watched) -> int:
    return sum(s["rows_in"] for s in _keyed(run))


def _held(run: Watched) -> tuple[int, float]:
    """Keys and MB that all replicas hold."""
    held = _keyed(run)
    return sum(s["keys"] for s in held), sum(s["state_bytes"] for s in held) / 1e6


# --- killing drivers ------------------------------------------------------------------------------


def kill_drivers(work: Path, rate: float, count: int, console: Console) -> Outcome:
    """Kill the application that leads, when everything is protected, `count` times."""
    folder = tempfile.mkdtemp(dir=work)
    file = Path(folder, "flow.py")
    file.write_text(
        "from holdfast.lab.bench.failover import paced_flow\n\n"
        f"flow = paced_flow({folder!r}, {rate!r})\n"
    )
    kills = []
    with Apps(str(file), apps=2, sites=SITES) as apps:
        for _ in range(count):
            until(lambda: apps.protected, "everything is protected", apps, 0.05)
            _pause(apps)
            settle(f"{folder}/epochs")
            kills.append(kill := kill_driver(apps))
            _say(console, kill, read_latest(f"{folder}/epochs"))
        _pause(apps)
        rows = _paced_source(folder, rate).end()
        until(lambda: apps.ended(0), "the flow has ended")
        apps.wait()
    deliveries = read_log(f"{folder}/epochs")
    return Outcome(kills, deliveries, *compare(deliveries, rows))


def kill_driver(apps: Apps) -> Kill:
    leader = apps.leader
    if leader is None:
        raise HostError("no application leads")
    lives, root = apps.lives[leader], apps.processes[leader].pid
    below = tree(root)
    gone = {s["site"] for s in apps.status()["sites"] if s["pid"] in below}

    def recovered() -> bool:
        # The next leader begins with the view of the last one, which says "protected", too.
        status = apps.status()
        known = gone <= {int(site) for site in status["dead"]}
        # On a busy machine the one that was killed may lead again by now, in another life.
        back = status["time"] > at and apps.lives[leader] > lives
        return bool(known and back and status["protected"])

    at = _kill_all(root)
    until(recovered, "the application is back and everything protected", apps, 0.05)
    return Kill(f"application {leader}", at, time.time())


def _kill_all(root: int) -> float:
    """Kill a driver and all that belongs to it: its process group, with the JVM, and the sites,
    which PySpark puts into a group of their own. When that was."""
    descendants = tree(root)[1:]
    at = time.time()
    os.killpg(root, signal.SIGKILL)
    for pid in descendants:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at


# --- the same kill on Structured Streaming --------------------------------------------------------


def rival_gaps(work: Path, count: int, console: Console) -> list[float]:
    """How long the output of the rival stands still, in ms, for each kill of its driver."""
    folder = Path(tempfile.mkdtemp(dir=work))
    files = 40 * (count + 1)
    dmz.write_parquet(folder / "input", files * 100_000, files)
    gaps: list[float] = []
    rival = _start_rival(folder)
    try:
        for _ in range(count):
            _until_written(folder, len(_outputs(folder)) + 5, rival)
            time.sleep(random.uniform(0.0, 1.0))
            gone = rival
            _kill_all(gone.pid)
            rival = _start_rival(folder)
            gone.wait()
            before = _outputs(folder)  # the next one is not up for seconds
            _until_written(folder, len(before) + 1, rival)
            gaps.append((_outputs(folder)[len(before)] - before[-1]) * 1e3)
            console.print(f"  gap {gaps[-1]:,.0f} ms")
    finally:
        _kill_all(rival.pid)
        rival.wait()
    return gaps


def _start_rival(folder: Path) -> subprocess.Popen[bytes]:
    code = "import sys; from holdfast.lab.bench.rivals import serve; serve(*sys.argv[1:])"
    paths = [str(folder / name) for name in ("input", "checkpoint", "output")]
    with open(folder / "rival.log", "ab") as log:
        return subprocess.Popen(
            [sys.executable, "-c", code, *paths],
            start_new_session=True,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def _until_written(folder: Path, batches: int, rival: subprocess.Popen[bytes]) -> None:
    def written() -> bool:
        if rival.poll() is not None:
            said = (folder / "rival.log").read_text()[-2_000:]
            raise HostError(f"the rival has ended with status {rival.returncode}: {said}")
        return len(_outputs(folder)) >= batches

    until(written, f"the rival has written {batches} batches")


def _outputs(folder: Path) -> list[float]:
    """When each batch's output was written, in order. A batch is in the output as soon as it has
    an entry in Spark's log of it."""
    log = folder / "output" / "_spark_metadata"
    return sorted(f.stat().st_mtime for f in log.glob("[0-9]*"))


# --- the report -----------------------------------------------------------------------------------


def _report(
    speeds: dict[str, list[Speed]],
    rate: float,
    sites: Outcome,
    large: dict[str, Any],
    drivers: Outcome,
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
        ["  the same by processor time a row", f["throughput_cpu_ratio"], ""],
        ["Structured Streaming: gap, ms", Figure(tuple(f["spark_gaps_ms"])), ""],
    ]
    title = (
        f"DMZ flow, {SITES} sites, {f['rate_rows_per_s']:,.0f} rows/s, {f['kills']} kills of sites"
    )
    show(title, ["median (smallest..largest)", "measured", "wanted"], rows, console)
    if f["machine_too_busy"]:
        console.print(
            f"Before the kills p99 was above {TOO_BUSY_MS:.0f} ms: the machine was too busy for "
            "this rate, and the figures say little. Above all a gap of 0 means nothing then."
        )
