"""A flow whose state depends only on recent rows, so that it can be rebuilt from its input.

The rows are those of the network-monitoring flow. `ts` numbers them and is their event time. The
flow counts them by connection in windows of a fifth of a second, and sums these counts by group in
windows of a second, one of which ends every fifth of a second. There is only one split: the rows of
two would arrive in an order that depends on speed, and some would be late.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.engine.batches import row_digests
from holdfast.engine.expressions import col
from holdfast.lab.workloads import dmz
from holdfast.lab.workloads.paced import EpochLog, Paced

KEYS = 2_000
PANE = 4_000
"""Rows per fifth of a second."""
PANES = 5
ROWS = dmz.DmzRows(KEYS, splits=1, staggered=True)
OUTPUT = pa.schema(
    [
        ("app", pa.int32()),
        ("src", pa.int32()),
        ("window_start", pa.int64()),
        ("window_end", pa.int64()),
        ("n", pa.int64()),
        ("last", pa.int64()),
    ]
)


def windows_flow(source: Paced, sink: EpochLog) -> Flow:
    due = Paced.DUE.name
    flow = Flow("windows")
    packets = flow.source("packets", source, event_time="ts")
    counts = packets.key_by("src", "dst").window(time=PANE)
    counted = counts.agg(n=F.count(), last=F.max("ts"), due=F.max(due))
    groups = counted.select("window_start", "n", "last", due, "src", app=col("dst") % dmz.APPS)
    totals = groups.key_by("app", "src").window(time=PANES * PANE, every=PANE)
    totals.agg(n=F.sum("n"), last=F.max("last"), due=F.max(due)).sink("alerts", sink)
    return flow


def oracle(rows: int) -> dict[str, Any]:
    """Return the expected result of the first `rows` rows, computed without the engine."""
    count, digest = 0, 0
    for batch in answers(rows):
        count += batch.num_rows
        digest += int(row_digests(batch).sum(dtype=np.uint64))
    return {"rows": count, "digest": dmz.as_hex(digest)}


def answers(rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the output rows, one batch per window of a second; the last windows are cut short."""
    nothing = np.zeros(dmz.GROUPS, np.int64)
    panes = [(nothing, nothing)] * PANES
    ends = -(-rows // PANE)
    for end in range(1, ends + PANES):
        first = (end - 1) * PANE
        count = min(PANE, rows - first)
        panes = [*panes[1:], _pane(first, count) if count > 0 else (nothing, nothing)]
        n = np.sum([pane[0] for pane in panes], axis=0)
        newest = np.max([pane[1] for pane in panes], axis=0)
        group = np.flatnonzero(n)
        start = np.full(group.size, (end - PANES) * PANE)
        bounds = (start, start + PANES * PANE)
        columns = (group // dmz.SOURCES, group % dmz.SOURCES, *bounds, n[group], newest[group])
        arrays = [pa.array(c, t) for c, t in zip(columns, OUTPUT.types, strict=True)]
        yield pa.RecordBatch.from_arrays(arrays, schema=OUTPUT)


def _pane(first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the number of these rows per group, and the newest of each group."""
    batch = ROWS(0, first, count)
    src, dst, ts = (batch.column(name).to_numpy() for name in ("src", "dst", "ts"))
    group = dst % dmz.APPS * dmz.SOURCES + src
    newest = np.zeros(dmz.GROUPS, np.int64)
    np.maximum.at(newest, group, ts)
    return np.bincount(group, minlength=dmz.GROUPS), newest
