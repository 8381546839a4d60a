"""Flows that are run live and again by a reference, and how they are run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.streams import Stream
from holdfast.engine.aggregates import Aggregate
from holdfast.engine.expressions import col, lit
from tests.support.reference import ordered

SCHEMA = pa.schema([("ts", pa.int64()), ("k", pa.int64()), ("g", pa.int64()), ("v", pa.float64())])


PERIOD = 8
"""Windows are of so much time, or of twice as much."""


def _rows(rng: np.random.Generator, n: int, disorder: int) -> pa.RecordBatch:
    """Splits begin at different times, and their times advance at different rates."""
    steps = rng.integers(0, rng.integers(2, 9), n)
    ts = rng.integers(0, 30) + np.cumsum(steps) - rng.integers(0, disorder + 1, n)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(ts.astype(np.int64)),
            pa.array(rng.integers(0, 4, n)),
            pa.array(rng.integers(0, 2, n)),
            # Sums of these depend on the order in which they are added up.
            pa.array(rng.normal(size=n) * 10.0 ** rng.integers(-6, 6, n)),
        ],
        schema=SCHEMA,
    )


Folds = dict[str, Aggregate]


STRICT: Folds = {
    "n": F.count(),
    "s": F.sum("v"),
    "m": F.mean("v"),
    "a": F.first("v"),
    "z": F.last("v"),
}
"""Aggregates that tell every order from every other."""


@dataclass
class How:
    """How long windows wait for late rows, and what they make of the others."""

    lateness: int
    folds: Folds

    def window(self, stream: Stream) -> Any:
        keyed = stream.key_by("k")
        windows = keyed.window(time=2 * PERIOD, every=PERIOD, lateness=self.lateness)
        return windows.agg(**self.folds)


Build = Callable[[Sequence[Stream], How], dict[str, Stream]]
"""From the sources' streams to what is put into sinks."""


def window_of_a_union(streams: Sequence[Stream], how: How) -> dict[str, Stream]:
    windows = how.window(streams[0].union(*streams[1:]))
    return {"out": windows, "late": windows.late}


def windows_apart(streams: Sequence[Stream], how: How) -> dict[str, Stream]:
    """A window over each source by itself: rows of the others close it."""
    found: dict[str, Stream] = {}
    for n, stream in enumerate(streams):
        windows = how.window(stream)
        found |= {f"out {n}": windows, f"late {n}": windows.late}
    return found


def union_of_windows(streams: Sequence[Stream], how: How) -> dict[str, Stream]:
    windows = [how.window(s) for s in streams]
    both = windows[0].union(*windows[1:])
    totals = both.key_by("k").agg(
        n=F.sum("n"), s=F.sum("s"), a=F.first("window_start"), z=F.last("m")
    )
    return {"out": totals}


def window_of_windows(streams: Sequence[Stream], how: How) -> dict[str, Stream]:
    found = {}
    for n, stream in enumerate(streams):
        small = how.window(stream).select("window_start", "n", v=col("s"), g=col("k") % 2)
        large = small.key_by("g").window(time=4 * PERIOD)
        found[f"out {n}"] = large.agg(**how.folds, rows=F.sum("n"))
    return found


def join_with_a_window(streams: Sequence[Stream], how: How) -> dict[str, Stream]:
    windows = how.window(streams[-1]).select("window_start", "k", "n", "s")
    joined = streams[0].key_by("k").join(windows.key_by("k"), within=PERIOD, lateness=how.lateness)
    return {"out": joined, "late": joined.late, "late right": joined.late_right}


def join_of_windows(streams: Sequence[Stream], how: How) -> dict[str, Stream]:
    names = ("window_start", "k", "n", "s")
    left, right = (how.window(s).select(*names) for s in (streams[0], streams[-1]))
    joined = left.key_by("k").join(right.key_by("k"), within=PERIOD)
    sums = joined.key_by("k").window(time=2 * PERIOD)
    return {"pairs": joined, "out": sums.agg(n=F.sum("n"), s=F.sum("s"), r=F.sum("s_right"))}


def window_of_a_join(streams: Sequence[Stream], how: How) -> dict[str, Stream]:
    joined = (
        streams[0]
        .key_by("k")
        .join(streams[-1].key_by("k"), within=PERIOD // 2, lateness=how.lateness)
    )
    sums = joined.key_by("g").window(time=PERIOD)
    return {"pairs": joined, "out": sums.agg(**how.folds)}


def spans_of_windows(streams: Sequence[Stream], how: How) -> dict[str, Stream]:
    """Spans of what the windows of all sources give, and windows of what becomes of them."""
    windows = [how.window(s) for s in streams]
    emit = {"k": col("k"), "window_start": F.at_start("window_start"), "ended": lit(1)}
    spans = (
        windows[0]
        .union(*windows[1:])
        .key_by("k")
        .spans(start=col("n") > 2, end=col("n") == 1, emit=emit, timeout=3 * PERIOD)
    )
    expired = spans.expired.select("k", "window_start", ended=lit(0))
    both = spans.union(expired).key_by("k").window(time=4 * PERIOD)
    late = spans.late.select("k", "window_start", "n")
    return {"out": both.agg(n=F.count(), ended=F.sum("ended")), "late": late}


def spans_of_rows(streams: Sequence[Stream], how: How) -> dict[str, Stream]:
    spans = (
        streams[0]
        .union(*streams[1:])
        .key_by("k")
        .spans(start=col("v") > 0, end=col("g") == 1, time="ts", timeout=PERIOD)
    )
    found = {"out": spans, "expired": spans.expired}
    return found | {"late": spans.late.select("k", "ts", "v")}


def no_event_time(streams: Sequence[Stream], how: How) -> dict[str, Stream]:
    """Rows only, in their order; one of the sources is also windowed."""
    totals = streams[0].union(*streams[1:]).key_by("k").agg(**how.folds)
    again = totals.key_by("n").window(rows=3).agg(top=F.max("s"), z=F.last("z"))
    return {"out": again, "windows": how.window(streams[-1])}


BUILD: dict[str, Build] = {
    build.__name__.replace("_", " "): build
    for build in (
        window_of_a_union,
        windows_apart,
        union_of_windows,
        window_of_windows,
        join_with_a_window,
        join_of_windows,
        window_of_a_join,
        spans_of_windows,
        spans_of_rows,
        no_event_time,
    )
}


def build(flow: Flow, streams: Sequence[Stream], how: How) -> None:
    """What the flow's name says of its sources, with sinks."""
    for sink, stream in BUILD[flow.name](streams, how).items():
        stream.sink(sink, ordered())
    used = {id(s.node) for node in flow.nodes for s in node.inputs}
    for stream in streams:
        if id(stream.node) not in used:
            stream.sink(f"rows of {stream.node.name}", ordered())
