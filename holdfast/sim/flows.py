"""The flows that are simulated, and what they must give.

Their rows are few and their keys few, so that every epoch touches most of the state. What a flow
gives does not depend on how its splits are interleaved: no key gets rows from two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa

from holdfast.flow.expr import at_start, col, count, lit, max_, mean, sum_
from holdfast.flow.graph import Flow
from holdfast.flow.protection import Protection, none
from holdfast.flow.sinks import discard
from holdfast.flow.sources import rows
from holdfast.sim.world import World

ROWS = 1_000
SPLITS = {"splits": 3}
"""How many splits the sources of a flow have, if not one."""
EVEN = {"dmz"}
"""Flows whose epochs all have the same number of rows; those of the others vary with the time."""
POISONED = {"poison"}
"""Flows that must stop, and say at which row."""
STUMBLES_AT = 60


def dmz(rows_in: int = ROWS) -> Flow:
    """The papers' network-monitoring flow: how long connections took, then the worst and typical
    of a group's last two."""
    return _monitoring("dmz", rows_in)


def splits(rows_in: int = ROWS) -> Flow:
    """The same with three splits, whose rows come together in another way in every run."""
    return _monitoring("splits", rows_in)


def _monitoring(name: str, rows_in: int) -> Flow:
    flow = Flow(name)
    packets = flow.source("packets", rows(*_packets(rows_in, SPLITS.get(name, 1))))
    emit = {"app": col("dst") % 4, "src": col("src"), "dur": col("ts") - at_start("ts")}
    start, end = col("kind") == 0, col("kind") == 1
    sessions = packets.key_by("src", "dst").sessions(start=start, end=end, emit=emit)
    stats = sessions.key_by("app", "src").window(rows=2, every=1)
    stats.agg(worst=max_("dur"), typical=mean("dur")).sink("alerts", discard())
    return flow


def windows(rows_in: int = ROWS) -> Flow:
    """Two keyed stages in a row, and windows over event time beside them; two sinks."""
    flow = Flow("windows")
    source = flow.source("events", rows(_events(rows_in)), event_time="ts")
    totals = source.key_by("k").agg(x=sum_("v")).select(k=col("k") % 3, x=col("x"))
    totals.key_by("k").agg(m=max_("x"), n=count()).sink("out", discard())
    per_group = source.key_by("g").window(time=20, every=10, lateness=5).agg(n=count())
    per_group.sink("windows", discard())
    return flow


def times(rows_in: int = ROWS) -> Flow:
    """Windows over event time, and windows of what they give: the state is of the recent past."""
    flow = Flow("times")
    source = flow.source("events", rows(_events(rows_in)), event_time="ts")
    counts = source.key_by("k").window(time=20, lateness=5).agg(n=count(), x=sum_("v"))
    groups = counts.select("window_start", g=col("k") % 3, n=col("n"), x=col("x"))
    groups.key_by("g").window(time=60).agg(most=max_("x"), n=sum_("n")).sink("out", discard())
    return flow


def timeouts(rows_in: int = ROWS) -> Flow:
    """Sessions of which some end and some time out, and windows of both."""
    flow = Flow("timeouts")
    source = flow.source("events", rows(_events(rows_in)), event_time="ts")
    emit = {"g": col("k") % 3, "ts": at_start("ts"), "ended": lit(1)}
    start, end = col("v") < 12, col("v") > 40
    sessions = source.key_by("k").sessions(start=start, end=end, emit=emit, timeout=15)
    expired = sessions.expired.select(g=col("k") % 3, ts=col("ts"), ended=lit(0))
    groups = sessions.union(expired).key_by("g")
    groups.window(time=30).agg(n=count(), ended=sum_("ended")).sink("out", discard())
    return flow


def diamond(rows_in: int = ROWS) -> Flow:
    """One stream goes two ways and comes together again."""
    flow = Flow("diamond")
    source = flow.source("events", rows(_events(rows_in)), event_time="ts")
    left = source.key_by("k").agg(x=sum_("v")).select(k=col("k"), x=col("x"))
    right = source.filter(col("g") == 0).select(k=col("k"), x=col("v"))
    left.union(right).key_by("k").agg(n=count(), s=sum_("x")).sink("out", discard())
    return flow


def poison(rows_in: int = ROWS) -> Flow:
    """A row in the middle makes a function raise: the flow must stop there, and name it."""
    flow = Flow("poison")
    source = flow.source("events", rows(_events(rows_in)))
    totals = source.key_by("k").agg(x=sum_("v"), n=count())
    totals.map(_stumble, totals.schema).sink("out", discard())
    return flow


def _stumble(batch: pa.RecordBatch) -> pa.RecordBatch:
    if (batch.column("n").to_numpy() == STUMBLES_AT).any():
        raise ValueError("a poisoned row")
    return batch


FLOWS: dict[str, Callable[[int], Flow]] = {
    "dmz": dmz,
    "splits": splits,
    "windows": windows,
    "times": times,
    "timeouts": timeouts,
    "diamond": diamond,
    "poison": poison,
}


def make(name: str, protection: Protection, rows_in: int = ROWS) -> Flow:
    flow = FLOWS[name](rows_in)
    flow.protection = protection
    return flow


@cache
def expected(name: str, rows_in: int = ROWS) -> dict[str, pa.Table]:
    """What each sink gets on one site, without a fault; nothing is said of a flow that stops."""
    if name in POISONED:
        return {}
    world = World(make(name, none(), rows_in), sites=1)
    world.run()
    return {sink: in_order(world.result(sink)) for sink in world.results}


def in_order(table: pa.Table) -> pa.Table:
    """The rows of a result in an order that does not depend on how the splits were interleaved."""
    return table.sort_by([(name, "ascending") for name in table.schema.names]).combine_chunks()


@cache
def _packets(count_: int, splits: int) -> list[pa.RecordBatch]:
    """Each split has 20 connections of its own, which start and end in turn."""
    made = []
    for split in range(splits):
        at = np.arange(count_ // splits)
        connection = (at * 7 + at // 20) % 20
        kind = at // 20 % 2
        src, dst = connection % 5 * splits + split, connection * 3 + 1
        made.append(pa.record_batch({"kind": kind, "src": src, "dst": dst, "ts": at * splits}))
    return made


@cache
def _events(count_: int, seed: int = 1) -> pa.RecordBatch:
    """Events in almost the order of their times; a few are late."""
    random = np.random.default_rng(seed)
    ts = np.arange(count_) // 2 - random.integers(0, 4, count_) * (random.random(count_) < 0.2)
    return pa.record_batch(
        {
            "ts": np.maximum(ts, 0),
            "k": random.integers(0, 9, count_),
            "g": random.integers(0, 2, count_),
            "v": random.integers(0, 50, count_),
        }
    )
