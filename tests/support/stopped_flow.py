"""A flow that is stopped and goes on later."""

from __future__ import annotations

from pathlib import Path

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.connectors.sources import Source, generator
from holdfast.core.protection import ProtectionSpec
from holdfast.sinks import parquet, table
from tests.support.windows import events

ROWS = 120_000


def mixed(source: Source, out: Path, protect: ProtectionSpec | None = None) -> Flow:
    """State of several kinds, and two sinks."""
    flow = Flow("mixed", protect=protect)
    keyed = flow.source("events", source, event_time="ts").key_by("k")
    totals = keyed.window(time=300, lateness=20).agg(t=F.sum("v"), n=F.count())
    totals.select(g=col("k") % 50, t=col("t")).key_by("g").agg(m=F.max("t"), n=F.count()).sink(
        "windows", parquet(out / "windows", with_order=True)
    )
    running = keyed.agg(t=F.sum("v"), n=F.count())
    running.sink("running", parquet(out / "running", with_order=True))
    running.sink("latest", table("k"))
    return flow


def made(rate: int | None) -> Source:
    return generator(events, events(0, 0, 0).schema, rows=ROWS, rate=rate)
