"""The flow under Structured Streaming gives the rows that the batch job gives.

Input comes as files, a few per micro-batch. Where they are read by two tasks the source has order
columns; without any, one file is one partition.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast import Flow, FlowError, HostError, col
from holdfast import functions as F
from holdfast.engine.batches import Track, from_ipc
from holdfast.errors import InputError
from holdfast.plan.planner import plan
from holdfast.sinks import discard
from holdfast.sources import rows
from holdfast.spark import shuffle_blocks as blocks
from holdfast.spark import stream as stream_module
from tests.support.spark_tables import (
    EVENTS,
    ORDERS,
    Jump,
    batch,
    content,
    events,
    fragile,
    source,
    two_streams,
    unchecked,
)
from tests.support.tiers import nightly

__all__ = ["unchecked"]

pytestmark = pytest.mark.spark


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


def reading(spark: SparkSession, files: Path, per_batch: int) -> DataFrame:
    schema = spark.read.parquet(str(files)).schema
    return (
        spark.readStream.schema(schema).option("maxFilesPerTrigger", per_batch).parquet(str(files))
    )


def streaming(flow: Flow, spark: SparkSession, files: Path, per_batch: int, *sinks: str) -> Any:
    given = {"events": reading(spark, files, per_batch)}
    return flow.stream(spark, given, partitions=3, sink=sinks or None)


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
    emit = {"g": col("g"), "dur": col("ts") - F.at_start("ts"), "v": F.at_start("v")}
    closed = connections(flow, *order).spans(start=col("cmd") == 1, end=col("cmd") == 2, emit=emit)
    closed.key_by("g").window(rows=3).agg(worst=F.max("dur"), v=F.sum("v")).sink("out", discard())
    return flow


def test_one_keyed_stage_and_a_restart(spark: SparkSession, files: Path, tmp_path: Path) -> None:
    flow = Flow("running")
    connections(flow, "i").agg(i=F.last("i"), total=F.sum("v"), mid=F.mean("n")).sink(
        "out", discard()
    )
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
    totals = stream.key_by("k").agg(i=F.last("i"), n=F.sum("n")).filter(col("n") > 0)
    jumps = stream.key_by("k").apply(Jump()).select("k", "i", n=col("before"))
    totals.union(jumps, stream.select("k", "i", "n")).key_by("k").agg(
        n=F.count(), i=F.last("i"), m=F.sum("n")
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
    stream.key_by("k").window(rows=2).agg(n=F.sum("n")).sink("out", discard())
    stream.select("i", m=col("n") * 2).sink("plain", discard())
    flow.dead_letters().sink("dead", discard())
    some = copied(files, tmp_path / "in", range(2))
    one_by_one = [spark.read.parquet(str(some / f"{n}.parquet")) for n in range(2)]
    wanted = batch(flow, spark, {"events": one_by_one[0].union(one_by_one[1])})
    streams = streaming(flow, spark, some, 1, "out", "plain", "dead")
    assert set(streams) == {"out", "plain", "dead"}
    for name, df in streams.items():
        agree(written(df, tmp_path / name), wanted[name])


def recorded(*sizes: tuple[int, ...]) -> list[dict[str, Any]]:
    """The records of micro-batches with so many rows of each source. The input has not ended."""
    records: list[dict[str, Any]] = []
    base, at = 0, [0] * len(sizes[0])
    for epoch, rows_of in enumerate(sizes):
        ranges = [[s, 0, at[s], at[s] + n] for s, n in enumerate(rows_of) if n]
        records.append({"epoch": epoch, "base": base, "ranges": ranges, "ended": False})
        base, at = base + sum(rows_of), [a + n for a, n in zip(at, rows_of, strict=True)]
    return records


def windows_flow() -> Flow:
    """Tumbling windows, sliding windows over their results, and what was late for the first."""
    flow = Flow("windows")
    stream = flow.source("events", ordered("i"), event_time="ts")
    tumbling = stream.key_by("k").window(time=40, lateness=20).agg(n=F.count(), v=F.sum("v"))
    sliding = tumbling.key_by("n").window(time=150, every=60).agg(v=F.mean("v"))
    late = tumbling.late.select("n", "v", t=col("ts"))
    parts = [s.select("n", "v", t=col("window_start")) for s in (tumbling, sliding)]
    late.union(*parts).sink("out", discard())
    return flow


def timed_flow() -> Flow:
    """Sessions with a time-out, what timed out of them in windows, and which starts were late."""
    flow = Flow("timed")
    emit = {"i": col("i"), "t": F.at_start("ts")}
    sessions = (
        flow.source("events", ordered("i"), event_time="ts")
        .key_by("k")
        .spans(start=col("cmd") == 1, end=col("cmd") == 2, emit=emit, timeout=60)
    )
    windows = sessions.expired.key_by("k").window(time=100).agg(i=F.count())
    late = sessions.late.select("i", t=col("ts"))
    sessions.union(late, windows.select("i", t=col("window_start"))).sink("out", discard())
    return flow


@pytest.mark.parametrize("flow", [windows_flow, nightly(timed_flow)])
def test_time_passes_in_buckets_without_rows_and_after_a_restart(
    spark: SparkSession,
    files: Path,
    tmp_path: Path,
    unchecked: None,
    monkeypatch: Any,
    flow: Callable[[], Flow],
) -> None:
    some = copied(files, tmp_path / "in", range(4))
    written(streaming(flow(), spark, some, 4), tmp_path)
    final = events(spark).toArrow().slice(400, 3)
    times = pa.array([10, 9_000, 9_100])  # is late; closes all there is; the last window stays open
    pq.write_table(final.set_column(3, "ts", times), some / "4.parquet")
    # Other Python workers: no operator is alive in them.
    monkeypatch.setitem(spark.sparkContext.environment, "HOLDFAST_TEST_WORKERS", "fresh")
    streamed = written(streaming(flow(), spark, some, 4), tmp_path)
    df = spark.read.parquet(str(some))
    records = recorded((400,), (3,))
    agree(streamed, batch(flow(), spark, {"events": df}, records=records))


def test_a_join_of_two_streams(spark: SparkSession, tmp_path: Path) -> None:
    """One file of each per micro-batch, until one of them has no more."""
    flow = Flow("join")
    left = source(flow, event_time="ts").select("i", "k", "ts").key_by("k")
    pairs = left.join(source(flow, "orders", ORDERS, event_time="at").key_by("k"), within=30)
    late = [pairs.late.select("i", j=col("ts")), pairs.late_right.select("i", j=col("at"))]
    pairs.select("i", j=col("i_right")).union(*late).sink("out", discard())
    inputs, streams = two_streams(spark), {}
    for name, size in (("events", 70), ("orders", 75)):
        (tmp_path / name).mkdir()
        for n in range(-(-inputs[name].count() // size)):
            path = tmp_path / name / f"{n}.parquet"
            pq.write_table(inputs[name].toArrow().slice(n * size, size), path)
            dated(path, n)
        streams[name] = reading(spark, tmp_path / name, 1)
    try:
        streamed = written(flow.stream(spark, streams, partitions=3), tmp_path)
    finally:
        spark.conf.unset(stream_module._PROVIDER)
    wanted = batch(flow, spark, inputs, records=recorded((70, 75), (70, 75), (60, 0)))
    agree(streamed, wanted)


def test_what_does_not_watch_the_watermark_has_no_ingress(spark: SparkSession, files: Path) -> None:
    flow = Flow("both")
    keyed = source(flow, event_time="ts").key_by("k")
    keyed.window(time=10).agg(n=F.count()).sink("windows", discard())
    keyed.agg(n=F.count()).sink("running", discard())
    planned = plan(flow)
    windows, running = planned.sinks
    assert stream_module._uses_watermark(planned, windows)
    assert not stream_module._uses_watermark(planned, running)
    assert stream_module._TimedStreamJob.stateful(planned, windows) == 2
    assert stream_module._StreamJob.stateful(planned, running) == 1


def ingress(*names: str) -> Any:
    """The ingress of a flow that counts the rows of some sources in windows."""
    flow = Flow("windows")
    first, *others = [source(flow, name, event_time="ts") for name in names]
    window = first.union(*others).key_by("k").window(time=10)
    window.agg(n=F.count()).sink("out", discard())
    planned = plan(flow)
    entries = []
    for s in planned.sources:
        rows = stream_module._SourceRows(s.name, EVENTS, EVENTS, [], 1)
        entries.append(stream_module._StreamEntry(rows, s, blocks.ToBlocks(s.outputs, 3)))
    return stream_module._IngressTask(planned, entries, 3)


def block(place: int, low: int, *times: int | None) -> Any:
    rows_ = pa.RecordBatch.from_pylist([{"ts": t} for t in times], schema=EVENTS)
    return place, 0, low, blocks.to_bytes(rows_)


def taken(task: Any, state: bytes | None, *arrived: Any) -> tuple[list[Any], Track, bytes]:
    """The (number, time) of each row that an ingress gives, the track, and its new state."""
    frames = [blocks.table([a]).to_pandas() for a in arrived]
    token = None if state is None else b"some"
    made, _, data = task.run(0, frames, token, lambda: state)
    out, tracks = [], set()
    for frame in made:
        for exchange, bucket, low, packed in frame.itertuples(index=False):
            if exchange == blocks.HEARTBEAT:
                tracks.add((bucket, low, packed))
            else:
                got = from_ipc(packed)
                out += zip(got["__o0"].to_pylist(), got["ts"].to_pylist(), strict=True)
    assert [t[:2] for t in sorted(tracks)] == [(0, 0), (1, 1), (2, 2)]
    (track,) = {t[2] for t in tracks}
    return sorted(out), Track.from_bytes(track), data


def test_ingress_goes_on_where_the_last_micro_batch_ended() -> None:
    task = ingress("a", "b")
    # In the order of sources and, within one, of ``low``; not of arrival.
    got, track, state = taken(task, None, block(1, 0, 12), block(0, 9, 25), block(0, 0, 3))
    assert got == [(0, 3), (1, 25), (2, 12)]
    assert (track.seqs[1:].tolist(), track.marks.tolist()) == ([2], [Track.NEVER, 12])
    got, track, state = taken(task, state, block(1, 0, 17, 40))
    assert got == [(3, 17), (4, 40)]
    assert (track.seqs[1:].tolist(), track.marks.tolist()) == ([4], [12, 25])
    got, track, _ = taken(task, state, block(0, 0, 31))
    assert got == [(5, 31)]
    assert (track.seqs[1:].tolist(), track.marks.tolist()) == ([5], [25, 31])


def test_an_event_time_that_is_null_is_refused() -> None:
    with pytest.raises(InputError, match="'events': the event time 'ts' is null"):
        taken(ingress("events"), None, block(0, 0, 3, None))


def test_sources_that_differ_when_read_twice_are_noticed() -> None:
    flow = windows_flow()
    planned = plan(flow)
    stage = next(s for s in planned.stages if s.kind == "keyed")
    task = stream_module._BucketTask(planned, stage, 3, stage.outputs)
    beats = [blocks.heartbeats(Track.flat(mark), [2]).to_pandas() for mark in (10, 20)]
    with pytest.raises(InputError, match="'windows': the sources returned different rows"):
        task.run(0, beats, None, bytes)


def test_only_streams_are_taken(spark: SparkSession, files: Path) -> None:
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


# --- several splits -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def split_files(tmp_path_factory: Any) -> Path:
    """Two files, each with the same times of three splits, one split behind the other."""
    folder = tmp_path_factory.mktemp("splits")
    for n in range(2):
        times = list(range(n * 300, n * 300 + 300))
        parts = [{"ts": times, "k": [t % 4 for t in times], "__split": [s] * 300} for s in range(3)]
        pq.write_table(pa.concat_tables(map(pa.table, parts)), folder / f"{n}.parquet")
        dated(folder / f"{n}.parquet", n)
    return folder


def split_flow(splits: int) -> Flow:
    flow = Flow("splits")
    empty = pa.RecordBatch.from_pylist(
        [], schema=pa.schema([("ts", pa.int64()), ("k", pa.int64())])
    )
    source = flow.source("events", rows(*[empty] * splits), event_time="ts")
    source.key_by("k").window(time=50).agg(n=F.count()).sink("out", discard())
    return flow


@pytest.mark.parametrize("told", [True, nightly(False)])
def test_no_row_of_splits_that_are_each_in_order_is_late(
    spark: SparkSession, split_files: Path, tmp_path: Path, told: bool
) -> None:
    """Whether a column says which split a row is of, or rows then come by event time."""
    names = ["ts", "k", *(["__split"] if told else [])]
    wanted = (
        spark.read.parquet(str(split_files))
        .selectExpr("k", "floor(ts / 50) * 50 window_start", "floor(ts / 50) * 50 + 50 window_end")
        .groupBy("k", "window_start", "window_end")
        .count()
    )
    first, second = (spark.read.parquet(str(split_files / f"{n}.parquet")) for n in range(2))
    made = batch(split_flow(3), spark, {"events": first.unionAll(second).select(*names)})
    assert content(made) == content(wanted)
    df = reading(spark, split_files, 1).select(*names)
    streamed = written(split_flow(3).stream(spark, {"events": df}, partitions=3), tmp_path)
    closed = wanted.where("window_end < 600")  # Spark never says that the input has ended
    assert content(streamed) == content(closed)


def test_a_split_that_the_source_does_not_have_is_refused(
    spark: SparkSession, split_files: Path, tmp_path: Path
) -> None:
    with pytest.raises(FlowError, match="rows of split 2, but the source has 2"):
        batch(split_flow(2), spark, {"events": spark.read.parquet(str(split_files))})
    df = reading(spark, split_files, 1)
    with pytest.raises(Exception, match="rows of split 2, but the source has 2"):
        written(split_flow(2).stream(spark, {"events": df}, partitions=3), tmp_path)
