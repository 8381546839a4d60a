"""The flows of ``holdfast bench protections``, and the rows that they get.

Apart from what measures them: a site loads this module, and nothing else of that.
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
"""Rows of two would come in another order at another speed, and some of them late."""
RATE = 60_000.0
"""Rows a second while sites are killed: what every protection can bear on two cores."""
SECOND = 1_000
"""Of event time, which is in milliseconds."""
DUE = Paced.DUE.name


def events(source: Paced, sink: EpochLog) -> Flow:
    """The papers' flow with what it knows bounded by a second: connections that have not ended by
    then are given up, and a group's worst and typical are those of a second. What it says of a
    second is due when that is over."""
    flow = Flow("events")
    over = col(DUE) + (SECOND - col("ts") % SECOND) * 1_000
    emit = {"app": col("dst") % dmz.APPS, "src": col("src"), "ts": col("ts"), DUE: over}
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


def made(name: str, folder: str, rate: float, protection: Protection, head: int = 0) -> Flow:
    """Source and sink meet in `folder`."""
    flow = FLOWS[name](source(folder, rate, head), EpochLog(f"{folder}/epochs"))
    flow.protection = protection
    return flow


class Timed:
    """The rows of the workload with the time in `ts`, as if they had come at `RATE`, instead of
    their number: whatever the speed, a second of event time has as many rows."""

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
