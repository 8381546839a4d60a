"""The flow under Structured Streaming gives the rows that the batch job gives.

Input comes as files, a few per micro-batch. Where they are read by two tasks the source has order
columns; without any, one file is one partition.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast import (
    Flow,
    FlowError,
    HostError,
    at_start,
    col,
    count,
    discard,
    last,
    max_,
    mean,
    rows,
    sum_,
)
from holdfast.spark import stream as stream_module
from tests.spark.test_batch_equals_sql import EVENTS, Jump, batch, content, events, fragile, source

pytestmark = pytest.mark.spark

CHECK = "spark.sql.streaming.unsupportedOperationCheck"


@pytest.fixture(scope="module")
def files(spark: SparkSession, tmp_path_factory: Any) -> Path:
    """Six files of 100 rows each, named in their order."""
    folder = tmp_path_factory.mktemp("events")
    table = events(spark).toArrow()
    for n in range(6):
        part = table.slice(n * 100, 100)
        if n % 2:  # within a file rows may be in any order: only `i` says
            part = part.take(pa.array(range(99, -1, -1)))
        pq.write_table(part, folder / f"{n}.parquet")
        dated(folder / f"{n}.parquet", n)
    return folder


def dated(path: Path, number: int) -> None:
    """Spark streams files in the order of their dates."""
    os.utime(path, (1_700_000_000 + number, 1_700_000_000 + number))


def copied(files: Path, folder: Path, numbers: range) -> Path:
    folder.mkdir(exist_ok=True)
    for n in numbers:
        (folder / f"{n}.parquet").write_bytes((files / f"{n}.parquet").read_bytes())
        dated(folder / f"{n}.parquet", n)
    return folder


@pytest.fixture
def unchecked(spark: SparkSession) -> Iterator[None]:
    """Let several `applyInPandasWithState` into one query."""
    spark.conf.set(CHECK, "false")
    yield
    spark.conf.unset(CHECK)


def reading(spark: SparkSession, files: Path, per_batch: int) -> DataFrame:
    schema = spark.read.parquet(str(files)).schema
    return (
        spark.readStream.schema(schema).option("maxFilesPerTrigger", per_batch).parquet(str(files))
    )


def streaming(flow: Flow, spark: SparkSession, files: Path, per_batch: int) -> Any:
    return flow.stream(spark, {"events": reading(spark, files, per_batch)}, partitions=3)


def ordered(*names: str) -> Any:
    description = rows(pa.RecordBatch.from_pylist([], schema=EVENTS))
    description.order_by = list(names)  # type: ignore[attr-defined]
    return description


def written(df: DataFrame, folder: Path) -> DataFrame:
    """Run the query over all input that it has not seen; what it wrote, now and before."""
    writer = df.writeStream.format("parquet").option(
        "checkpointLocation", str(folder / "checkpoint")
    )
    query = writer.option("path", str(folder / "out")).trigger(availableNow=True).start()
    query.awaitTermination()
    return df.sparkSession.read.schema(df.schema).parquet(str(folder / "out"))


def agree(streamed: DataFrame, wanted: DataFrame) -> None:
    assert streamed.columns == wanted.columns
    expected = content(wanted)
    assert expected
    assert content(streamed) == expected


def connections(flow: Flow, *order: str) -> Any:
    return flow.source("events", ordered(*order)).key_by("k")


def sessions_flow(*order: str) -> Flow:
    """Two keyed stages: sessions, then the last three of each group."""
    flow = Flow("sessions")
    emit = {"g": col("g"), "dur": col("ts") - at_start("ts"), "v": at_start("v")}
    closed = connections(flow, *order).sessions(
        start=col("cmd") == 1, end=col("cmd") == 2, emit=emit
    )
    closed.key_by("g").window(rows=3).agg(worst=max_("dur"), v=sum_("v")).sink("out", discard())
    return flow


def test_one_keyed_stage_and_a_restart(spark: SparkSession, files: Path, tmp_path: Path) -> None:
    flow = Flow("running")
    connections(flow, "i").agg(i=last("i"), total=sum_("v"), mid=mean("n")).sink("out", discard())
    for numbers in (range(4), range(4, 6)):  # the second go is a restart from the checkpoint
        some = copied(files, tmp_path / "in", numbers)
        streamed = written(streaming(flow, spark, some, 2), tmp_path)
    agree(streamed, batch(flow, spark, {"events": spark.read.parquet(str(files))}))


def test_two_stages_and_an_order_of_two_columns(
    spark: SparkSession, files: Path, tmp_path: Path, unchecked: None
) -> None:
    flow = sessions_flow("ts", "i")
    # Sorted by (ts, i) the rows of one micro-batch are in another order than all of them would be,
    # so the batch job gets the whole input as one micro-batch, too.
    streamed = written(streaming(flow, spark, files, 6), tmp_path)
    agree(streamed, batch(flow, spark, {"events": spark.read.parquet(str(files))}))


def test_two_stages_of_transform_with_state(
    spark: SparkSession, files: Path, tmp_path: Path
) -> None:
    pytest.importorskip("google.protobuf.descriptor", reason="transformWithState needs protobuf")
    flow = sessions_flow("i")
    streamed = streaming(flow, spark, files, 3)
    try:
        got = written(streamed, tmp_path)
    finally:
        spark.conf.unset(stream_module._PROVIDER)
    agree(got, batch(flow, spark, {"events": spark.read.parquet(str(files))}))


def test_chains_need_something(spark: SparkSession, files: Path, monkeypatch: Any) -> None:
    monkeypatch.setitem(sys.modules, "google.protobuf.descriptor", None)
    with pytest.raises(HostError, match="protobuf"):
        sessions_flow("i").stream(spark, {"events": reading(spark, files, 3)})


def test_union_fan_out_and_a_custom_operator(
    spark: SparkSession, files: Path, tmp_path: Path, unchecked: None
) -> None:
    flow = Flow("diamond")
    stream = flow.source("events", ordered("i"))
    totals = stream.key_by("k").agg(i=last("i"), n=sum_("n")).filter(col("n") > 0)
    jumps = stream.key_by("k").apply(Jump()).select("k", "i", n=col("before"))
    totals.union(jumps, stream.select("k", "i", "n")).key_by("k").agg(
        n=count(), i=last("i"), m=sum_("n")
    ).sink("out", discard())
    wanted = batch(flow, spark, {"events": spark.read.parquet(str(files))})
    agree(
        written(streaming(flow, spark, files, 3), tmp_path),
        wanted,
    )


def test_partition_order_stateless_steps_and_dead_letters(
    spark: SparkSession, files: Path, tmp_path: Path
) -> None:
    flow = Flow("dead", on_error="dead-letter")
    schema = pa.schema([EVENTS.field(n) for n in ("k", "i", "n")])
    stream = source(flow).map(fragile, schema)
    stream.key_by("k").window(rows=2).agg(n=sum_("n")).sink("out", discard())
    stream.select("i", m=col("n") * 2).sink("plain", discard())
    flow.dead_letters().sink("dead", discard())
    some = copied(files, tmp_path / "in", range(2))
    one_by_one = [spark.read.parquet(str(some / f"{n}.parquet")) for n in range(2)]
    wanted = batch(flow, spark, {"events": one_by_one[0].union(one_by_one[1])})
    streams = streaming(flow, spark, some, 1)
    assert set(streams) == {"out", "plain", "dead"}
    for name, df in streams.items():
        agree(written(df, tmp_path / name), wanted[name])


def test_event_time_is_refused(spark: SparkSession, files: Path) -> None:
    flow = Flow("windows")
    source(flow, event_time="ts").key_by("k").window(time=10).agg(n=count()).sink("out", discard())
    with pytest.raises(FlowError, match=r"time window by \(k\).*watermark"):
        streaming(flow, spark, files, 1)
    with pytest.raises(FlowError, match="must be a streaming DataFrame"):
        sessions_flow("i").stream(spark, {"events": spark.read.parquet(str(files))})


def test_a_live_operator_is_used_only_for_the_state_it_has() -> None:
    live = stream_module._Live()
    runner: Any = object()
    live.keep("place", b"1", runner)
    assert live.take("place", b"2") is None
    live.keep("place", b"3", runner)
    assert live.take("place", b"3") is runner
    assert live.take("place", b"3") is None, "it may fail half-way and is not kept meanwhile"
