"""The flows of ``holdfast bench protections``, and their rows.

They are separate from the benchmark, so that a site loads only this module.
"""

from __future__ import annotations

from collections.abc import Callable

import pyarrow as pa

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.protection import Protection
from holdfast.engine.expressions import col
from holdfast.lab.workloads import dmz
from holdfast.lab.workloads.paced import EpochLog, Paced

SPLITS = 1
"""The rows of two splits would arrive in an order that depends on speed, and some would be late."""
RATE = 60_000.0
"""Rows per second while sites are killed: every protection sustains it on two cores."""
SECOND = 1_000
"""A second of event time, which is in milliseconds."""
DUE = Paced.DUE.name


def events(source: Paced, sink: EpochLog) -> Flow:
    """Return the papers' flow with state bounded to a second: connections time out after a second,
    and a group's worst and typical durations are those of a second. The results of a second are due
    at its end."""
    flow = Flow("events")
    end = col(DUE) + (SECOND - col("ts") % SECOND) * 1_000
    emit = {"app": col("dst") % dmz.APPS, "src": col("src"), "ts": col("ts"), DUE: end}
    sessions = (
        flow.source("packets", source, event_time="ts")
        .key_by("src", "dst")
        .spans(
            start=col("kind") == 0,
            end=col("kind") == 1,
            emit=emit | {"dur": col("ts") - F.at_start("ts")},
            timeout=SECOND,
        )
    )
    stats = sessions.key_by("app", "src").window(time=SECOND)
    stats.agg(worst=F.max("dur"), typical=F.mean("dur"), due=F.max(DUE)).sink("alerts", sink)
    return flow


def monitoring(source: Paced, sink: EpochLog) -> Flow:
    return dmz.dmz_flow(source, sink, clock=DUE)


def stateless(source: Paced, sink: EpochLog) -> Flow:
    flow = Flow("stateless")
    packets = flow.source("packets", source).filter(col("dst") % 2 == 0)
    up = packets.filter(col("kind") == 0).select("src", DUE, size=col("ts") % 1_000)
    down = packets.filter(col("kind") == 1).select("src", DUE, size=-(col("ts") % 1_000))
    up.union(down).sink("alerts", sink)
    return flow


FLOWS: dict[str, Callable[[Paced, EpochLog], Flow]] = {
    "events": events,
    "dmz": monitoring,
    "stateless": stateless,
}


def protected_flow(
    name: str, folder: str, rate: float, protection: Protection, head: int = 0
) -> Flow:
    """Return the flow `name` under `protection`. Source and sink share `folder`."""
    flow = FLOWS[name](source(folder, rate, head), EpochLog(f"{folder}/epochs"))
    flow.protection = protection
    return flow


class Timed:
    """The rows of the workload with their event time at `RATE` in `ts`, instead of their number. A
    second of event time has the same number of rows at any speed."""

    def __init__(self) -> None:
        self.rows = dmz.DmzRows(splits=SPLITS, staggered=True)

    def __call__(self, split: int, offset: int, count: int) -> pa.RecordBatch:
        batch = self.rows(split, offset, count)
        at = batch.schema.get_field_index("ts")
        times = batch.column(at).to_numpy() * SECOND // int(RATE)
        return batch.set_column(at, batch.schema.field(at), pa.array(times))


def source(folder: str, rate: float, head: int = 0) -> Paced:
    make = Timed()
    return Paced(folder, make, dmz.SCHEMA, rate, SPLITS, head)
