"""A flow that begins with a history: the batch job builds its state, and it goes on from there."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast import Flow, FlowError, col
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.connectors.sinks import Sink
from holdfast.connectors.sources import Source
from holdfast.core.protection import ProtectionSpec
from holdfast.net.reader import SinkReader
from holdfast.plan.planner import plan
from holdfast.protections import pairs
from holdfast.sinks import outlet, parquet, table
from holdfast.sources import follow, generator, rows
from holdfast.spark import history
from tests.support.spark_runs import kill_leader, until

ROWS, BEFORE = 60_000, 40_000


def events(count: int = ROWS) -> pa.Table:
    """Ordered by id; their times jump about, so some are late."""
    random = np.random.default_rng(5)
    at = np.arange(count)
    return pa.table(
        {
            "id": at,
            "k": random.integers(0, 900, count),
            "v": random.integers(0, 1_000, count) / 8,
            "ts": pa.array(at * 40 + random.integers(-900, 900, count)),
            "on": random.integers(0, 9, count) == 0,
        }
    )


def four_kinds(
    source: Source, sink: Callable[[str], Sink], protect: ProtectionSpec | None = None
) -> Flow:
    """State of every kind: row windows, event-time windows, sessions, running aggregates."""
    flow = Flow("four kinds", protect=protect)
    stream = flow.source("events", source, event_time="ts")
    keyed = stream.key_by("k")
    keyed.window(rows=7, every=3).agg(m=F.mean("v")).sink("last", sink("last"))
    windows = keyed.window(time=5_000, lateness=300).agg(t=F.sum("v"), n=F.count())
    windows.key_by("k").agg(c=F.count(), most=F.sum("t")).sink("windows", sink("windows"))
    windows.late.sink("late", sink("late"))
    sessions = keyed.spans(start=col("on"), end=col("v") > 100.0, time="ts")
    sessions.sink("sessions", sink("sessions"))
    return flow


def sorted_by_order(table: pa.Table) -> pa.Table:
    return table.sort_by([(n, "ascending") for n in table.column_names if n.startswith("__o")])


def same(found: pa.Table, wanted: pa.Table) -> None:
    assert found.column_names == wanted.column_names and found.num_rows == wanted.num_rows > 0
    for name in found.column_names:
        assert found[name].to_pylist() == wanted[name].to_pylist(), name


def in_order(spark: SparkSession, table: pa.Table) -> DataFrame:
    return spark.createDataFrame(table.to_pandas()).orderBy("id")


def test_it_is_as_if_everything_had_been_streamed(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranges are small, so that there are many first epochs. The site that writes them is killed,
    and the one that reads what follows."""
    monkeypatch.setattr(history, "RANGE_ROWS", 8_000)
    whole, folder = events(), tmp_path / "in"
    folder.mkdir()

    def add(first: int, end: int) -> None:
        pq.write_table(whole.slice(first, end - first), folder / f".{first}")
        (folder / f".{first}").rename(folder / f"{first:06d}.parquet")

    for first in range(0, BEFORE, 10_000):
        add(first, first + 10_000)
    before = spark.read.parquet(str(folder)).orderBy("id")
    source = follow(folder, whole.schema, until="_END")
    protect = pairs(failure_domain="process")
    flow = four_kinds(source, lambda name: parquet(tmp_path / name, with_order=True), protect)
    run = flow.start(
        spark,
        sites=3,
        partitions=6,
        history=before,
        options=Options(history_folder=str(tmp_path / "at")),
    )
    restore_point = run.flow.restore_point
    assert restore_point is not None and restore_point.rows == BEFORE and restore_point.epochs > 3
    kill_leader(run, "windows")
    for first in range(BEFORE, ROWS, 5_000):
        add(first, first + 5_000)
        until(run, lambda end=first + 5_000: run.status()["rows_in"] >= end, "the file is read")
        if first == BEFORE:
            kill_leader(run, "events")
    (folder / "_END").touch()
    assert run.wait(120)
    assert run.records()[0].base == BEFORE, "what the history was read from is not read again"
    alone = four_kinds(rows(whole), lambda _: outlet())
    names = [sink.name for sink in plan(alone).sinks]
    before = {"events": in_order(spark, whole)}
    results = alone.batch(spark, before, sink=names, with_order=True)
    for name, wanted in results.items():
        same(sorted_by_order(pq.read_table(tmp_path / name)), sorted_by_order(wanted.toArrow()))
    assert not list((tmp_path / "at").rglob("*.arrow")), "nothing is left behind"


def test_plain_processes_begin_with_a_history_and_a_view_and_readers_have_it(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Of two sources one has a history."""
    whole = events(7_000)
    first, second = in_order(spark, whole.slice(0, 5_000)), whole.slice(5_000)
    flow = Flow("orders", protect=pairs(failure_domain="process"))
    stop = generator(lambda split, offset, n: events(n).to_batches()[0], events(1).schema, rows=0)
    joined = flow.source("none", stop).union(flow.source("some", follow(tmp_path, second.schema)))
    counted = joined.key_by("k").agg(n=F.count(), t=F.sum("v"))
    counted.sink("latest", table("k"))
    counted.sink("all", outlet())
    with flow.start(sites=2, partitions=4, history={"some": first}) as run:
        pq.write_table(second, tmp_path / ".0")
        (tmp_path / ".0").rename(tmp_path / "0.parquet")
        wanted = whole.group_by("k").aggregate([("id", "count"), ("v", "sum")])
        latest = sorted(zip(*(wanted[n].to_pylist() for n in wanted.column_names), strict=True))

        def is_there() -> bool:
            found = run.table("latest").to_arrow()
            return (
                sorted(zip(*(found[n].to_pylist() for n in ("k", "n", "t")), strict=True)) == latest
            )

        until(run, is_there, "the view has everything")
        with SinkReader(run.url, "all") as reader:
            upto = reader.ask({"do": "latest", "after": -1, "rows": -1, "reader": "r"})[0]["epoch"]
            read, after = [], -1
            while after < upto:
                ask = {"do": "read", "reader": "r", "after": after, "upto": upto}
                values, some = reader.ask(ask)
                read, after = read + some, values["epoch"]
        assert sum(batch.num_rows for batch in read) == 7_000
        run.stop(drain=False)


def test_what_cannot_be_a_history_is_refused(spark: SparkSession, tmp_path: Path) -> None:
    flow = four_kinds(rows(events()), lambda _: outlet())
    before = in_order(spark, events(50))
    for given, message in (
        ({"evnets": before}, "has no source 'evnets'"),
        ({}, "the dict is empty"),
        ([1], "'events' is list, not a DataFrame"),
        (before.drop("v"), "the DataFrame has no column 'v'"),
        (spark.readStream.format("rate").load(), "must be not a streaming DataFrame"),
    ):
        with pytest.raises(FlowError, match=message):
            flow.start(history=given)
    poisoned = before.selectExpr("id", "k", "cast(null as double) as v", "ts", "on")
    with pytest.raises(FlowError, match=r"history of flow 'four kinds' .* got a null"):
        flow.start(history=poisoned, options=Options(history_folder=str(tmp_path)))
