"""The flows that are simulated, and what they must give.

Their rows are few and their keys few, so that every epoch touches most of the state. What a flow
gives does not depend on how its splits are interleaved: no key gets rows from two of them.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa

from holdfast.bench.dmz import DmzRows, dmz_flow
from holdfast.flow.expr import col, count, max_, sum_
from holdfast.flow.graph import Flow
from holdfast.flow.protection import Protection, none
from holdfast.flow.sinks import discard
from holdfast.flow.sources import rows
from holdfast.sim.world import World

ROWS = 1_000
SPLITS = {"dmz": 3, "windows": 1, "diamond": 1}


def dmz(rows_in: int = ROWS) -> Flow:
    """The network-monitoring flow: sessions, then windows over rows; three splits."""
    return dmz_flow(rows(*_packets(rows_in, SPLITS["dmz"])), discard())


def windows(rows_in: int = ROWS) -> Flow:
    """Two keyed stages in a row, and windows over event time beside them; two sinks."""
    flow = Flow("windows")
    source = flow.source("events", rows(_events(rows_in)), event_time="ts")
    totals = source.key_by("k").agg(x=sum_("v")).select(k=col("k") % 3, x=col("x"))
    totals.key_by("k").agg(m=max_("x"), n=count()).sink("out", discard())
    per_group = source.key_by("g").window(time=20, every=10, lateness=5).agg(n=count())
    per_group.sink("windows", discard())
    return flow


def diamond(rows_in: int = ROWS) -> Flow:
    """One stream goes two ways and comes together again."""
    flow = Flow("diamond")
    source = flow.source("events", rows(_events(rows_in)), event_time="ts")
    left = source.key_by("k").agg(x=sum_("v")).select(k=col("k"), x=col("x"))
    right = source.filter(col("g") == 0).select(k=col("k"), x=col("v"))
    left.union(right).key_by("k").agg(n=count(), s=sum_("x")).sink("out", discard())
    return flow


FLOWS: dict[str, Callable[[int], Flow]] = {"dmz": dmz, "windows": windows, "diamond": diamond}


def make(name: str, protection: Protection, rows_in: int = ROWS) -> Flow:
    flow = FLOWS[name](rows_in)
    flow.protection = protection
    return flow


@cache
def expected(name: str, rows_in: int = ROWS) -> dict[str, pa.Table]:
    """What each sink gets on one site, without a fault."""
    world = World(make(name, none(), rows_in), sites=1)
    world.run()
    return {sink: in_order(world.result(sink)) for sink in world.results}


def in_order(table: pa.Table) -> pa.Table:
    """The rows of a result in an order that does not depend on how the splits were interleaved."""
    return table.sort_by([(name, "ascending") for name in table.schema.names]).combine_chunks()


@cache
def _packets(count_: int, splits: int) -> list[pa.RecordBatch]:
    make = DmzRows(keys=60, splits=splits)
    return [make(split, 0, count_ // splits) for split in range(splits)]


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
