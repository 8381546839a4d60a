"""The simulated flows, and their right results.

They have few rows and few keys, so that every epoch touches most of the state. The result of a flow
does not depend on how its splits are interleaved: either no key gets rows from two of them, or its
windows, for which no row is late, only count rows, add integers and find maxima.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pyarrow as pa

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.protection import Protection, none
from holdfast.api.streams import Stream
from holdfast.connectors.sinks import discard
from holdfast.connectors.sources import rows
from holdfast.engine.expressions import col, lit
from holdfast.lab.sim.pushing import PushedRows
from holdfast.lab.sim.world import World

ROWS = 1_000
SPLITS = {"splits": 3, "sources": 3, "joins": 4}
"""Number of splits of a flow's sources together, if it is not one. All have the same length."""
EVEN = {"dmz"}
"""Flows whose epochs all have the same number of rows. In others the number depends on timing."""
POISONED = {"poison"}
"""Flows that must stop and name the row."""
STUMBLES_AT = 60


def dmz(rows_in: int = ROWS) -> Flow:
    """The papers' network-monitoring flow: the durations of connections, then the worst and typical
    of the last two of a group."""
    return _monitoring("dmz", rows_in)


def splits(rows_in: int = ROWS) -> Flow:
    """The same with three splits, which are interleaved differently in every run."""
    return _monitoring("splits", rows_in)


def _monitoring(name: str, rows_in: int) -> Flow:
    flow = Flow(name)
    packets = flow.source("packets", rows(*_packets(rows_in, SPLITS.get(name, 1))))
    emit = {"app": col("dst") % 4, "src": col("src"), "dur": col("ts") - F.at_start("ts")}
    start, end = col("kind") == 0, col("kind") == 1
    sessions = packets.key_by("src", "dst").spans(start=start, end=end, emit=emit)
    stats = sessions.key_by("app", "src").window(rows=2, every=1)
    stats.agg(worst=F.max("dur"), typical=F.mean("dur")).sink("alerts", discard())
    return flow


def windows(rows_in: int = ROWS) -> Flow:
    """Two keyed stages in a row, and windows over event time beside them; two sinks."""
    flow = Flow("windows")
    source = flow.source("events", rows(_events(rows_in)), event_time="ts")
    totals = source.key_by("k").agg(x=F.sum("v")).select(k=col("k") % 3, x=col("x"))
    totals.key_by("k").agg(m=F.max("x"), n=F.count()).sink("out", discard())
    per_group = source.key_by("g").window(time=20, every=10, lateness=5).agg(n=F.count())
    per_group.sink("windows", discard())
    return flow


def times(rows_in: int = ROWS) -> Flow:
    """Windows over event time, and windows over their results: state of the recent past only."""
    flow = Flow("times")
    source = flow.source("events", rows(_events(rows_in)), event_time="ts")
    counts = source.key_by("k").window(time=20, lateness=5).agg(n=F.count(), x=F.sum("v"))
    groups = counts.select("window_start", g=col("k") % 3, n=col("n"), x=col("x"))
    groups.key_by("g").window(time=60).agg(most=F.max("x"), n=F.sum("n")).sink("out", discard())
    return flow


def timeouts(rows_in: int = ROWS) -> Flow:
    """Spans, some of which end and some time out, and windows over both."""
    flow = Flow("timeouts")
    source = flow.source("events", rows(_events(rows_in)), event_time="ts")
    emit = {"g": col("k") % 3, "ts": F.at_start("ts"), "ended": lit(1)}
    start, end = col("v") < 12, col("v") > 40
    spans = source.key_by("k").spans(start=start, end=end, emit=emit, timeout=15)
    expired = spans.expired.select(g=col("k") % 3, ts=col("ts"), ended=lit(0))
    groups = spans.union(expired).key_by("g")
    groups.window(time=30).agg(n=F.count(), ended=F.sum("ended")).sink("out", discard())
    return flow


def diamond(rows_in: int = ROWS) -> Flow:
    """A stream that is split and merged again."""
    flow = Flow("diamond")
    source = flow.source("events", rows(_events(rows_in)), event_time="ts")
    left = source.key_by("k").agg(x=F.sum("v")).select(k=col("k"), x=col("x"))
    right = source.filter(col("g") == 0).select(k=col("k"), x=col("v"))
    left.union(right).key_by("k").agg(n=F.count(), s=F.sum("x")).sink("out", discard())
    return flow


def sources(rows_in: int = ROWS) -> Flow:
    """Two sources, one with two splits, merged, and one of them alone; windows of windows."""
    flow = Flow("sources")
    left, right = _two_sources(flow, rows_in, (2, 1))
    both = left.union(right).key_by("k").window(time=20, every=10, lateness=DELAY)
    counts = both.agg(n=F.count(), x=F.sum("v")).select("window_start", "n", "x", g=col("k") % 3)
    counts.key_by("g").window(time=40).agg(n=F.sum("n"), most=F.max("x")).sink("out", discard())
    # Rows of the other source close these windows, too.
    alone = left.key_by("g").window(time=20, lateness=DELAY).agg(n=F.count(), x=F.sum("v"))
    alone.sink("alone", discard())
    return flow


def joins(rows_in: int = ROWS) -> Flow:
    """A join of windows of two sources, and windows over its results."""
    flow = Flow("joins")
    counts = []
    for source in _two_sources(flow, rows_in, (2, 2)):
        window = source.key_by("k").window(time=20, lateness=DELAY)
        counts.append(window.agg(n=F.count(), x=F.sum("v")).select("window_start", "k", "n", "x"))
    keys = ("k", "window_start")
    joined = counts[0].key_by(*keys).join(counts[1].key_by(*keys), within=20)
    both = joined.select("window_start", "k", n=col("n") * col("n_right"), x=col("x_right"))
    both.key_by("k").window(time=60).agg(n=F.sum("n"), most=F.max("x")).sink("out", discard())
    return flow


def pushed(rows_in: int = ROWS) -> Flow:
    """Rows that a query pushes in micro-batches: a key for each, because every push of a
    micro-batch has its rows in another order."""
    flow = Flow("pushed")
    source = flow.source("events", PushedRows(_numbered(rows_in)))
    source.key_by("id").agg(n=F.count(), x=F.sum("v")).sink("out", discard())
    return flow


def poison(rows_in: int = ROWS) -> Flow:
    """A row in the middle makes a function raise: the flow must stop there and name it."""
    flow = Flow("poison")
    source = flow.source("events", rows(_events(rows_in)))
    totals = source.key_by("k").agg(x=F.sum("v"), n=F.count())
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
    "sources": sources,
    "joins": joins,
    "pushed": pushed,
    "poison": poison,
}


def make(name: str, protection: Protection, rows_in: int = ROWS) -> Flow:
    flow = FLOWS[name](rows_in)
    flow.protection = protection
    return flow


@cache
def expected(name: str, rows_in: int = ROWS) -> dict[str, pa.Table]:
    """Return the right rows of each sink: computed without the engine if possible, else by a run on
    one site without faults. Empty for a flow that stops."""
    if name in POISONED:
        return {}
    if name in ANSWERS:
        return {sink: in_order(table) for sink, table in ANSWERS[name](rows_in).items()}
    world = World(make(name, none(), rows_in), sites=1)
    world.run()
    return {sink: in_order(world.result(sink)) for sink in world.results}


def in_order(table: pa.Table) -> pa.Table:
    """Sort the rows of a result, so that their order does not depend on how the splits were
    interleaved."""
    return table.sort_by([(name, "ascending") for name in table.schema.names]).combine_chunks()


@cache
def _packets(count_: int, splits: int) -> list[pa.RecordBatch]:
    """Return the packets of each split. A split has 20 connections, which start and end in turn."""
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
    """Return events that are nearly in the order of their times; a few are late."""
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


@cache
def _numbered(count_: int) -> pa.RecordBatch:
    at = np.arange(count_)
    return pa.record_batch({"id": at, "v": at % 17})


# --- several sources ------------------------------------------------------------------------------

DELAY = 5
"""Maximum time by which a row may be behind an earlier one of its split."""


def _two_sources(flow: Flow, rows_in: int, splits: tuple[int, int]) -> list[Stream]:
    return [
        flow.source(name, rows(*_timed(rows_in, splits, which)), event_time="ts")
        for which, name in enumerate(("left", "right"))
    ]


@cache
def _timed(rows_in: int, splits: tuple[int, int], which: int) -> list[pa.RecordBatch]:
    """Return the splits of one of two sources. All have the same keys and cover the same time, each
    at a pace of its own that changes."""
    each = rows_in // sum(splits)
    made = []
    for split in range(splits[which]):
        random = np.random.default_rng([which, split])
        pace = np.sort(random.random(each)) ** (1.0 + 0.5 * split)
        ts = (pace * rows_in / 4).astype(np.int64) + DELAY - random.integers(0, DELAY + 1, each)
        columns = {"ts": ts, "k": random.integers(0, 7, each), "g": random.integers(0, 2, each)}
        made.append(pa.record_batch(columns | {"v": random.integers(0, 50, each)}))
    return made


def _plain(rows_in: int, splits: tuple[int, int], which: int) -> list[dict[str, int]]:
    return [row for batch in _timed(rows_in, splits, which) for row in batch.to_pylist()]


Window = dict[tuple[int, int], list[dict[str, int]]]
"""Rows by key and start of the window."""


def _windowed(given: list[dict[str, int]], key: str, on: str, size: int, every: int = 0) -> Window:
    found: Window = {}
    every = every or size
    for row in given:
        for start in range(row[on] // every * every, row[on] - size, -every):
            found.setdefault((row[key], start), []).append(row)
    return found


def _sources_answer(rows_in: int) -> dict[str, pa.Table]:
    left, right = (_plain(rows_in, (2, 1), which) for which in (0, 1))
    small = [
        {"g": k % 3, "at": start, "n": len(found), "x": _total(found)}
        for (k, start), found in _windowed(left + right, "k", "ts", 20, 10).items()
    ]
    large = _windowed(small, "g", "at", 40)
    alone = _windowed(left, "g", "ts", 20)
    return {
        "out": _table(
            "g",
            40,
            {
                key: {"n": sum(r["n"] for r in found), "most": max(r["x"] for r in found)}
                for key, found in large.items()
            },
        ),
        "alone": _table(
            "g",
            20,
            {k: {"n": len(found), "x": _total(found)} for k, found in alone.items()},
        ),
    }


def _joins_answer(rows_in: int) -> dict[str, pa.Table]:
    left, right = (_windowed(_plain(rows_in, (2, 2), which), "k", "ts", 20) for which in (0, 1))
    pairs = [
        {"k": k, "at": at, "n": len(left[k, at]) * len(right[k, at]), "x": _total(right[k, at])}
        for k, at in left.keys() & right.keys()
    ]
    large = _windowed(pairs, "k", "at", 60)
    folded = {
        key: {"n": sum(r["n"] for r in found), "most": max(r["x"] for r in found)}
        for key, found in large.items()
    }
    return {"out": _table("k", 60, folded)}


def _pushed_answer(rows_in: int) -> dict[str, pa.Table]:
    found = [{"id": r["id"], "n": 1, "x": r["v"]} for r in _numbered(rows_in).to_pylist()]
    return {"out": pa.Table.from_pylist(found)}


def _total(found: list[dict[str, int]]) -> int:
    return sum(row["v"] for row in found)


def _table(key: str, size: int, folded: dict[tuple[int, int], dict[str, int]]) -> pa.Table:
    """Return the rows as the sink of a window gets them."""
    return pa.Table.from_pylist(
        [
            {key: k, "window_start": start, "window_end": start + size, **values}
            for (k, start), values in folded.items()
        ]
    )


ANSWERS: dict[str, Callable[[int], dict[str, pa.Table]]] = {
    "sources": _sources_answer,
    "joins": _joins_answer,
    "pushed": _pushed_answer,
}
"""Right results by plain loops over the rows: a run on one site could be wrong, too."""
