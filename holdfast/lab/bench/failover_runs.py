"""The runs with kills of ``holdfast bench failover``: of sites, of a site with a large state, of
drivers. See `holdfast.lab.bench.failover` for the figures.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.protection import pairs
from holdfast.connectors.sinks import discard
from holdfast.control.applications import Apps
from holdfast.errors import InvariantError
from holdfast.lab.bench.kills import (
    Kill,
    Stalls,
    kill_driver,
    kill_site,
    pause,
    print_kill,
    settle,
    until,
)
from holdfast.lab.workloads import dmz
from holdfast.lab.workloads.paced import (
    WINDOW_S,
    Delivery,
    EpochLog,
    Paced,
    WatchedRun,
    gap_ms,
    read_latest,
    read_log,
    slowest,
    usual_ms,
)
from holdfast.spark.session import hosting_session

SITES = 4
TAKE_OVER_S = 0.2
HISTORY_KEYS = 1_000_000
HISTORY_ROWS = 100


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


def compare(deliveries: Sequence[Delivery], rows: int) -> tuple[int, int]:
    """Return the numbers of lost and duplicate rows in the log of a run with `rows` input rows."""
    expected = oracle(rows)
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
def oracle(rows: int) -> dict[str, Any]:
    return dmz.oracle(rows, splits=SITES, staggered=True)


@contextmanager
def session() -> Iterator[Any]:
    # More slots than sites: a killed site frees its slot after its replacement needs one.
    spark = hosting_session("holdfast bench", SITES + 4, **{"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("FATAL")  # lost workers are expected here
    try:
        yield spark
    finally:
        spark.stop()


def paced_flow(folder: str, rate: float, head: int = 0) -> Flow:
    """Return the DMZ flow of this benchmark. Source and sink share `folder`."""
    source, sink = paced_source(folder, rate, head), EpochLog(f"{folder}/epochs")
    flow = dmz.dmz_flow(source, sink, clock=Paced.DUE.name)
    flow.protection = pairs(failure_domain="process")
    return flow


def paced_source(folder: str, rate: float, head: int = 0) -> Paced:
    make = dmz.DmzRows(splits=SITES, staggered=True)
    return Paced(folder, make, dmz.SCHEMA, rate, SITES, head)


def kill_sites(work: Path, rate: float, count: int, console: Console) -> FailoverOutcome:
    """Kill sites one after another, each at a random moment while everything is protected."""
    folder = tempfile.mkdtemp(dir=work)
    stalls, kills = Stalls(), []
    with session() as spark, paced_flow(folder, rate).start(spark, sites=SITES) as run:
        for _ in range(count):
            until(lambda: run.protected, "everything is protected", run)
            pause(run, stalls)
            settle(f"{folder}/epochs")
            kills.append(kill := kill_site(run, stalls))
            print_kill(console, kill, read_latest(f"{folder}/epochs"))
        pause(run, stalls)
        rows = paced_source(folder, rate).end()
        until(lambda: run.ended(0), "the flow has ended")
        run.wait()
    deliveries = read_log(f"{folder}/epochs")
    return FailoverOutcome(kills, deliveries, *compare(deliveries, rows), stalls.largest_ms)


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
    stalls = Stalls()
    with session() as spark, flow.start(spark, sites=SITES) as run:
        until(lambda: _processed(run) >= 2 * head, "the state is full", run, 0.1)
        until(lambda: run.protected, "everything is protected", run)
        pause(run, stalls)
        keys, state_mb = _held(run)
        kill = kill_site(run, stalls)
        pause(run, stalls)
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


def kill_drivers(work: Path, rate: float, count: int, console: Console) -> FailoverOutcome:
    """Kill the leading application `count` times, each time while everything is protected."""
    folder = tempfile.mkdtemp(dir=work)
    file = Path(folder, "flow.py")
    file.write_text(
        "from holdfast.lab.bench.failover_runs import paced_flow\n\n"
        f"flow = paced_flow({folder!r}, {rate!r})\n"
    )
    kills = []
    with Apps(str(file), apps=2, sites=SITES) as apps:
        for _ in range(count):
            until(lambda: apps.protected, "everything is protected", apps, 0.05)
            pause(apps)
            settle(f"{folder}/epochs")
            kills.append(kill := kill_driver(apps))
            print_kill(console, kill, read_latest(f"{folder}/epochs"))
        pause(apps)
        rows = paced_source(folder, rate).end()
        until(lambda: apps.ended(0), "the flow has ended")
        apps.wait()
    deliveries = read_log(f"{folder}/epochs")
    return FailoverOutcome(kills, deliveries, *compare(deliveries, rows))
