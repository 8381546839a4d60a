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
    WatchedRun,
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


# --- lost and duplicate rows --------------------------------------------------------------------


def compare(deliveries: Sequence[Delivery], rows: int) -> tuple[int, int]:
    """Return the numbers of lost and duplicate rows in the log of a run with `rows` input rows."""
    expected = _oracle(rows)
    first: dict[int, Delivery] = {}
    for delivery in deliveries:
        first.setdefault(delivery.epoch, delivery)
    repeated = sum(d.rows for d in deliveries if first[d.epoch] is not d)
    missing = set(range(max(first, default=-1))) - first.keys()
    surplus = sum(d.rows for d in first.values()) - int(expected["rows"])
    lost, duplicate = max(0, -surplus), repeated + max(0, surplus)
    digest = dmz.as_hex(sum(d.digest for d in first.values()))
    if not (lost or duplicate) and digest != expected["digest"]:
        raise InvariantError(
            f"the number of rows is correct ({expected['rows']}), but the rows are not: digest "
            f"{digest} instead of {expected['digest']}; epochs missing: {sorted(missing)[:10]}"
        )
    return lost, duplicate


@functools.cache
def _oracle(rows: int) -> dict[str, Any]:
    return dmz.oracle(rows, splits=SITES, staggered=True)


# --- maximum rates --------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Speed:
    """The result of a run at maximum rate."""

    rows_per_s: float
    cpu_us: float  # of all processes, per row


def _speeds(rows: int, repeats: int, console: Console) -> dict[str, list[Speed]]:
    """Measure without protection and under pairs alternately, after a warm-up run of each."""
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
    result, expected = run.sink_report("alerts"), _oracle(rows)
    if (result["rows"], result["digest"]) != (expected["rows"], expected["digest"]):
        raise InvariantError(f"the result is wrong: {result} instead of {expected}")
    return Speed(rows / seconds, used / rows * 1e6)


def _paced_speed(work: Path, rows: int) -> float:
    """Return the maximum rate, in rows/s, of the flow whose sites are killed. It does more work
    than the flow of `_speed`: its rows carry their due times, and its sink writes a log."""
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
    # More slots than sites: a killed site frees its slot after its replacement needs one.
    spark = hosting_session("holdfast bench", SITES + 4, **{"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("FATAL")  # lost workers are expected here
    try:
        yield spark
    finally:
        spark.stop()


CLOSED = ("protected", "not protected")
"""Phases of a task that has no recovery work left."""


def until(
    condition: Callable[[], bool],
    what: str,
    run: WatchedRun | None = None,
    every_s: float = 0.005,
) -> float:
    """Poll until `condition` holds, and return the seconds that took. Raise if the flow ends, or
    after `PATIENCE_S`."""
    begun = time.monotonic()
    while not condition():
        if run is not None and run.ended(0):
            run.wait()
            raise HostError(f"the flow has ended while the benchmark waited until {what}")
        if time.monotonic() - begun > PATIENCE_S:
            status = run.status() if run is not None else {}
            open_ = [p for p in status.get("partitions", []) if p["phase"] not in CLOSED]
            phases = [f"{p['stage']} {p['partitions']}: {p['phase']}" for p in open_]
            raise HostError(
                f"waited {PATIENCE_S:.0f} s in vain until {what}; "
                f"view {status.get('view')}; {'; '.join(phases) or 'everything is protected'}"
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
class FailoverOutcome:
    """The results of a run with kills."""

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
    """Return the DMZ flow of this benchmark. Source and sink share `folder`."""
    source, sink = _paced_source(folder, rate, head), EpochLog(f"{folder}/epochs")
    flow = dmz.dmz_flow(source, sink, clock=Paced.DUE.name)
    flow.protection = pairs(failure_domain="process")
    return flow


def _paced_source(folder: str, rate: float, head: int = 0) -> Paced:
    make = dmz.DmzRows(splits=SITES, staggered=True)
    return Paced(folder, make, dmz.SCHEMA, rate, SITES, head)


def kill_sites(work: Path, rate: float, count: int, console: Console) -> FailoverOutcome:
    """Kill sites one after another, each at a random moment while everything is protected."""
    folder = tempfile.mkdtemp(dir=work)
    stalls, kills = _Stalls(), []
    with _session() as spark, paced_flow(folder, rate).start(spark, sites=SITES) as run:
        for _ in range(count):
            until(lambda: run.protected, "everything is protected", run)
            _pause(run, stalls)
            settle(f"{folder}/epochs")
            kills.append(kill := _kill_site(run, stalls))
            _print_kill(console, kill, read_latest(f"{folder}/epochs"))
        _pause(run, stalls)
        rows = _paced_source(folder, rate).end()
        until(lambda: run.ended(0), "the flow has ended")
        run.wait()
    deliveries = read_log(f"{folder}/epochs")
    return FailoverOutcome(kills, deliveries, *compare(deliveries, rows), stalls.largest_ms)


class _Stalls:
    """The longest stall that any site has reported so far. It is kept here because a killed site's
    own report is lost."""

    def __init__(self) -> None:
        self.largest_ms = 0.0

    def update(self, run: WatchedRun) -> None:
        seen = [site["stall_ms"] for site in run.status()["sites"]]
        self.largest_ms = max([self.largest_ms, *seen])


def _pause(run: WatchedRun, stalls: _Stalls | None = None) -> None:
    """Let the flow run undisturbed for a random time, as the baseline of the next kill."""
    until = time.monotonic() + WINDOW_S + random.uniform(0.1, 1.1)
    while time.monotonic() < until:
        if run.ended(0.1):
            run.wait()
            raise HostError("the flow has ended too early")
        if stalls is not None:
            stalls.update(run)


def settle(log: str) -> None:
    """Wait until the rows that the last kill delayed have been delivered, at most `SETTLE_S_MAX`: a
    gap measured against them would look small. On a machine that is too busy for the rate they
    never are."""
    until = time.monotonic() + SETTLE_S_MAX
    while time.monotonic() < until:
        since = time.time() - WINDOW_S
        if p99_ms([d for d in read_latest(log) if d.at >= since]) <= TOO_BUSY_MS:
            return
        time.sleep(0.2)


def _kill_site(run: WatchedRun, stalls: _Stalls) -> Kill:
    status = run.status()
    site = random.choice([s for s in status["sites"] if s["site"] not in status["dead"]])
    at = time.time()
    os.kill(site["pid"], signal.SIGKILL)
    until(lambda: site["site"] in run.status()["dead"], "the site is known to be dead", run, 0.02)
    until(lambda: run.protected, "everything is protected", run)
    kill = Kill(f"site {site['site']}", at, time.time())
    stalls.update(run)
    return kill


def _print_kill(console: Console, kill: Kill, deliveries: Sequence[Delivery]) -> None:
    """Print the preliminary figures of a kill; later rows may still enlarge its gap."""
    gap = gap_ms(deliveries, kill.at)
    console.print(f"  {kill.what}: gap {gap:.0f} ms, protected after {kill.catchup_s:.1f} s")


# --- a large state --------------------------------------------------------------------------------


class HistoryRows:
    """Rows with every key once per round, in a scattered order, and 5 bytes of values each."""

    SCHEMA = pa.schema([("key", pa.int64()), ("size", pa.int32()), ("flags", pa.int8())])

    def __call__(self, split: int, offset: int, count: int) -> pa.RecordBatch:
        row = np.arange(offset, offset + count) * SITES + split
        columns = row * 7_919 % HISTORY_KEYS, row.astype(np.int32), (row & 0x7F).astype(np.int8)
        return pa.record_batch([pa.array(c) for c in columns], schema=self.SCHEMA)


def kill_with_large_state(work: Path, console: Console) -> dict[str, Any]:
    """Kill a site of a flow that keeps the last 100 rows of 1,000,000 keys: 500 MB and the keys.

    The first row of a key allocates its whole history, and a hand-over sends all of it, so after
    two rounds over the keys the state has its full size.
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


def _keyed(run: WatchedRun) -> list[dict[str, Any]]:
    return [s for site in run.status()["sites"] for s in site["stages"] if s["kind"] == "keyed"]


def _processed(run: WatchedRun) -> int:
    return sum(s["rows_in"] for s in _keyed(run))


def _held(run: WatchedRun) -> tuple[int, float]:
    """Return the numbers of keys and MB that all replicas hold."""
    held = _keyed(run)
    return sum(s["keys"] for s in held), sum(s["state_bytes"] for s in held) / 1e6


# --- killing drivers ------------------------------------------------------------------------------


def kill_drivers(work: Path, rate: float, count: int, console: Console) -> FailoverOutcome:
    """Kill the leading application `count` times, each time while everything is protected."""
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
            _print_kill(console, kill, read_latest(f"{folder}/epochs"))
        _pause(apps)
        rows = _paced_source(folder, rate).end()
        until(lambda: apps.ended(0), "the flow has ended")
        apps.wait()
    deliveries = read_log(f"{folder}/epochs")
    return FailoverOutcome(kills, deliveries, *compare(deliveries, rows))


def kill_driver(apps: Apps) -> Kill:
    leader = apps.leader
    if leader is None:
        raise HostError("no application leads")
    lives, root = apps.lives[leader], apps.processes[leader].pid
    below = tree(root)
    killed = {s["site"] for s in apps.status()["sites"] if s["pid"] in below}

    def recovered() -> bool:
        # The next leader starts with the last leader's view, which also says "protected".
        status = apps.status()
        known = killed <= {int(site) for site in status["dead"]}
        # On a busy machine the killed application may already be restarted and lead again.
        back = status["time"] > at and apps.lives[leader] > lives
        return bool(known and back and status["protected"])

    at = _kill_all(root)
    until(recovered, "the application is back and everything is protected", apps, 0.05)
    return Kill(f"application {leader}", at, time.time())


def _kill_all(root: int) -> float:
    """Kill a driver with all its processes, and return the time. These are its process group, with
    the JVM, and the sites, which PySpark puts into another group."""
    descendants = tree(root)[1:]
    at = time.time()
    os.killpg(root, signal.SIGKILL)
    for pid in descendants:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at


# --- the same kill on Structured Streaming --------------------------------------------------------


def rival_gaps(work: Path, count: int, console: Console) -> list[float]:
    """Return the output gap of the rival, in ms, for each kill of its driver."""
    folder = Path(tempfile.mkdtemp(dir=work))
    files = 40 * (count + 1)
    dmz.write_parquet(folder / "input", files * 100_000, files)
    gaps: list[float] = []
    rival = _start_rival(folder)
    try:
        for _ in range(count):
            _until_written(folder, len(_outputs(folder)) + 5, rival)
            time.sleep(random.uniform(0.0, 1.0))
            killed = rival
            _kill_all(killed.pid)
            rival = _start_rival(folder)
            killed.wait()
            before = _outputs(folder)  # the new process takes seconds to start
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
            log = (folder / "rival.log").read_text()[-2_000:]
            raise HostError(f"the rival ended with status {rival.returncode}: {log}")
        return len(_outputs(folder)) >= batches

    until(written, f"the rival has written {batches} batches")


def _outputs(folder: Path) -> list[float]:
    """Return when each batch's output was written, in order. A batch is in the output once it has
    an entry in the output's metadata log."""
    log = folder / "output" / "_spark_metadata"
    return sorted(f.stat().st_mtime for f in log.glob("[0-9]*"))


# --- the report -----------------------------------------------------------------------------------


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
