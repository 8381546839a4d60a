"""Event time over several sources and several splits, on real processes."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.core.sequencer import Budget
from holdfast.sinks import discard, parquet
from holdfast.sources import generator, rows
from tests.support.tiers import nightly

PER_SPLIT = 100_000


def in_order(split: int, offset: int, n: int) -> pa.RecordBatch:
    """Splits of the same times, each in order."""
    at = np.arange(offset, offset + n)
    return pa.record_batch({"ts": at, "k": at % 7, "v": at + split})


SCHEMA = in_order(0, 0, 0).schema


@pytest.mark.parametrize("splits", [nightly(1), nightly(2), 3])
def test_no_row_of_splits_that_are_each_in_order_is_late(kept, tmp_path, splits: int) -> None:
    flow = Flow("backfill")
    source = flow.source(
        "events",
        generator(in_order, SCHEMA, rows=PER_SPLIT * splits, splits=splits),
        event_time="ts",
    )
    windows = source.key_by("k").window(time=1_000).agg(n=F.count(), most=F.max("v"))
    windows.sink("out", parquet(tmp_path / "out"))
    windows.late.sink("late", discard())
    run = flow.start(sites=2)
    kept.append(run)
    assert run.wait(60)
    assert run.sink_report("late")["rows"] == 0 and run.status()["late_rows"] == {}
    table = pq.read_table(tmp_path / "out")
    assert pa.compute.sum(table["n"]).as_py() == PER_SPLIT * splits
    assert table.num_rows == 7 * PER_SPLIT // 1_000
    assert pa.compute.max(table["most"]).as_py() == PER_SPLIT - 1 + splits - 1


def test_a_backfill_reads_splits_side_by_side(kept) -> None:
    """From when all of them are there: so windows close while it goes on, and what they hold is
    bounded by what is read ahead, not by the input."""
    flow = Flow("backfill")
    source = flow.source(
        "events", generator(in_order, SCHEMA, rows=3 * PER_SPLIT, splits=3), event_time="ts"
    )
    source.key_by("k").window(time=100).agg(n=F.count()).sink("out", discard())
    small = Options(budget=Budget(epoch_rows_max=6_000), block_rows=2_000, read_ahead_rows=10_000)
    run = flow.start(sites=2, options=small)
    kept.append(run)
    assert run.wait(60)
    at, ahead = [0, 0, 0], []
    for record in run.records():
        for r in record.ranges:
            at[r.split] = r.end
        ahead.append(max(at) - min(at))
        assert record.rows <= 6_000
    assert at == [PER_SPLIT] * 3
    assert sorted(ahead)[len(ahead) // 2] <= small.read_ahead_rows


def test_late_rows_are_counted_where_a_user_looks(kept) -> None:
    """Once, however many replicas have seen them."""
    flow = Flow("tardy")
    times = [*range(100), *range(10), *range(100, 200)]
    batch = pa.record_batch({"ts": times, "k": [t % 3 for t in times]})
    source = flow.source("events", rows(batch), event_time="ts")
    windows = source.key_by("k", name="tens").window(time=10).agg(n=F.count())
    windows.sink("out", discard())
    run = flow.start(sites=2)
    kept.append(run)
    assert run.wait(60)
    assert run.status()["late_rows"] == {"tens": 10}


@pytest.mark.parametrize("epoch_rows", [262_144, 500])
def test_a_window_over_one_of_two_sources_closes_where_the_watermark_moves(
    kept, tmp_path, epoch_rows: int
) -> None:
    """So a join behind it finds its results in time."""
    flow = Flow("two")
    clicks = flow.source("clicks", rows(in_order(0, 0, 1_000)), event_time="ts")
    views = flow.source("views", rows(in_order(1, 0, 1_000)), event_time="ts")
    counted = (
        clicks.key_by("k").window(time=70).agg(n=F.count()).select("k", "n", ts=col("window_start"))
    )
    joined = counted.key_by("k").join(views.key_by("k"), within=1)
    joined.sink("out", parquet(tmp_path / "out"))
    joined.late.sink("late", discard())
    run = flow.start(sites=2, options=Options(budget=Budget(epoch_rows_max=epoch_rows)))
    kept.append(run)
    assert run.wait(60)
    assert run.status()["late_rows"] == {} and run.sink_report("late")["rows"] == 0
    found = pq.read_table(tmp_path / "out").select(["k", "ts", "ts_right", "n"]).to_pylist()
    starts = range(0, 1_000, 70)
    wanted = [
        (k, start, start + shift, sum(t % 7 == k for t in range(start, min(start + 70, 1_000))))
        for start in starts
        for k, shift in ((0, 0), (1, 1), (6, -1))
        if start + shift >= 0
    ]
    assert sorted(tuple(row.values()) for row in found) == sorted(wanted)
