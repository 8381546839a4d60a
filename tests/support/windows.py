"""Flows over event time that any protection may have, at a set rate; sites of them are killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.api.protection import Protection
from holdfast.connectors.sources import Source
from holdfast.control.run import Run
from holdfast.core.protection import ProtectionSpec
from holdfast.lab.workloads.paced import Paced
from holdfast.sinks import discard
from tests.support.runs import PATIENCE_S, pids, until

RATE = 40_000


def events(split: int, first: int, n: int) -> pa.RecordBatch:
    at = np.arange(first, first + n)
    return pa.record_batch(
        {"k": at * 7919 % 700, "v": at % 997 * 1.0, "ts": at // 40 + at * 31 % 9}
    )


def paced(folder: Path, rows: int | None = None) -> Paced:
    """Rows for as long as they are wanted, however long that is; or so many, at once."""
    if rows is None:
        return Paced(str(folder), events, events(0, 0, 0).schema, RATE, 1)
    plain = folder / "plain"
    plain.mkdir()
    source = Paced(str(plain), events, events(0, 0, 0).schema, 1.0, 1, head=rows)
    source.end(0.0)
    return source


def windows(
    source: Source, flow: ProtectionSpec | None = None, stage: ProtectionSpec | None = None
) -> Flow:
    """Windows of about 20,000 rows each, and windows over them."""
    made = Flow("windows", protect=flow)
    keyed = made.source("events", source, event_time="ts").key_by("k", name="totals")
    if stage is not None:
        keyed.protect(stage)
    totals = keyed.window(time=500, lateness=20).agg(t=F.sum("v"), n=F.count())
    groups = totals.select("window_start", g=col("k") % 50, t=col("t"), n=col("n")).key_by("g")
    groups.window(time=1_000).agg(m=F.max("t"), n=F.sum("n")).sink("out", discard())
    return made


def spans(source: Source, flow: Protection | None = None) -> Flow:
    """Spans of which most end and some time out, and windows over both."""
    made = Flow("spans", protect=flow)
    ended = (
        made.source("events", source, event_time="ts")
        .key_by("k")
        .spans(
            start=col("v") < 300,
            end=col("v") > 600,
            emit={"g": col("k") % 50, "ts": F.at_start("ts"), "v": F.at_start("v")},
            timeout=40,
        )
    )
    expired = ended.expired.select("ts", g=col("k") % 50, v=-col("v")).select("g", "ts", "v")
    groups = ended.union(expired).key_by("g").window(time=500)
    groups.agg(t=F.sum("v"), n=F.count()).sink("out", discard())
    return made


def totals(source: Source, flow: ProtectionSpec | None = None) -> Flow:
    """Windows, and what each of their keys has had from the beginning."""
    made = Flow("totals", protect=flow)
    keyed = made.source("events", source, event_time="ts").key_by("k")
    sums = keyed.window(time=500, lateness=20).agg(t=F.sum("v"))
    sums.select("t", g=col("k") % 50).key_by("g").agg(t=F.sum("t")).sink("out", discard())
    return made


def kill(run: Run, *victims: int) -> None:
    found, dead = pids(run), len(run.status()["dead"])
    for site in victims:
        os.kill(found[site], signal.SIGKILL)
    until(lambda: len(run.status()["dead"]) >= dead + len(victims), "the deaths are known")


def check(
    run: Run, kept: list[Run], folder: Path, make: Callable[[Source], Flow] = windows
) -> None:
    """It gives what one site gives that nobody disturbs, although sites died."""
    check_rows(run, kept, folder, make)
    assert run.status()["dead"]


def check_rows(
    run: Run, kept: list[Run], folder: Path, make: Callable[[Source], Flow] = windows
) -> None:
    """It gives what one site gives that nobody disturbs."""
    rows = paced(folder).end(0.5)
    assert run.wait(PATIENCE_S)
    plain = make(paced(folder, rows)).start(sites=1)
    kept.append(plain)
    assert plain.wait(PATIENCE_S)
    assert run.sink_report("out") == plain.sink_report("out")
