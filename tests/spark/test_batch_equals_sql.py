"""Every operator through ``flow.batch`` against the same thing said in plain Spark SQL.

Rows carry their number in ``i``, so SQL can say "in order". Sums run strictly in that order in both
(window frames are folded row by row), so floats are compared to the last bit; only where SQL groups
rows in no order are the values such that every sum is exact.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.window import Window

from holdfast import Flow, FlowError, col
from holdfast import functions as hf
from holdfast.core.records import EpochRecord, Range
from holdfast.sinks import discard
from holdfast.sources import rows, spark_batch
from holdfast.spark import batch as batch_module
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
)

pytestmark = pytest.mark.spark


def in_order(*keys: str) -> Any:
    """A key's rows in order."""
    return Window.partitionBy(*keys).orderBy("i")


def so_far(*keys: str) -> Any:
    return in_order(*keys).rowsBetween(Window.unboundedPreceding, 0)


def same(got: DataFrame, wanted: DataFrame) -> None:
    assert got.columns == wanted.columns
    expected = content(wanted)
    assert expected, "the test would prove nothing"
    assert content(got) == expected


# --- one operator each ----------------------------------------------------------------------------


def test_running_aggregates(spark: SparkSession) -> None:
    flow = Flow("running")
    agg = (
        source(flow)
        .key_by("k")
        .agg(
            rows=hf.count(),
            total=hf.sum("v"),
            whole=hf.sum("n"),
            mid=hf.mean("v"),
            high=hf.max("v"),
            low=hf.min("n"),
            opening=hf.first("i"),
            latest=hf.last("k"),
        )
    )
    agg.sink("out", discard())
    df = events(spark)
    over = so_far("k")
    wanted = df.select(
        "k",
        F.count(F.lit(1)).over(over).alias("rows"),
        F.sum("v").over(over).alias("total"),
        F.sum("n").over(over).alias("whole"),
        F.avg("v").over(over).alias("mid"),
        F.max("v").over(over).alias("high"),
        F.min("n").over(over).alias("low"),
        F.first("i").over(over).alias("opening"),
        F.last("k").over(over).alias("latest"),
    )
    same(batch(flow, spark, {"events": df}), wanted)


@pytest.mark.parametrize("every", [1, 3])
def test_row_windows(spark: SparkSession, every: int) -> None:
    flow = Flow("rows")
    windowed = source(flow).key_by("k", "g").window(rows=4, every=every)
    aggs = windowed.agg(
        n=hf.count(), s=hf.sum("v"), m=hf.mean("v"), top=hf.max("n"), head=hf.first("i")
    )
    aggs.sink("out", discard())
    df = events(spark)
    order = in_order("k", "g")
    over = order.rowsBetween(-3, 0)
    wanted = df.select(
        "k",
        "g",
        F.count(F.lit(1)).over(over).alias("n"),
        F.sum("v").over(over).alias("s"),
        F.avg("v").over(over).alias("m"),
        F.max("n").over(over).alias("top"),
        F.first("i").over(over).alias("head"),
        F.row_number().over(order).alias("number"),
    )
    wanted = wanted.where(F.col("number") % every == 0).drop("number")
    same(batch(flow, spark, {"events": df}), wanted)


def test_first_and_last_take_nulls(spark: SparkSession) -> None:
    """In all operators, by default; as SQL's do."""
    flow = Flow("nulls")
    keyed = source(flow, event_time="ts").key_by("g")
    pick = {"head": hf.first("k"), "tail": hf.last("k")}
    keyed.agg(i=hf.last("i"), **pick).sink("running", discard())
    keyed.window(rows=3).agg(i=hf.last("i"), **pick).sink("rows", discard())
    whole = keyed.window(time=100_000, lateness=100_000).agg(n=hf.count(), **pick)
    whole.select("g", "n", "head", "tail").sink("whole", discard())
    df = events(spark).withColumn("ts", F.col("ts") + 1000)
    results = batch(flow, spark, {"events": df})
    for name, over in (("running", so_far("g")), ("rows", in_order("g").rowsBetween(-2, 0))):
        heads = [f("k").over(over).alias(n) for f, n in ((F.first, "head"), (F.last, "tail"))]
        same(results[name], df.select("g", "i", *heads))
    in_all = in_order("g").rowsBetween(Window.unboundedPreceding, Window.unboundedFollowing)
    heads = [f("k").over(in_all).alias(n) for f, n in ((F.first, "head"), (F.last, "tail"))]
    counted = F.count(F.lit(1)).over(in_all).alias("n")
    same(results["whole"], df.select("g", counted, *heads).distinct())


def test_a_sum_that_does_not_fit_is_an_error_in_both(spark: SparkSession) -> None:
    flow = Flow("large")
    source(flow).key_by("g").agg(s=hf.sum("n")).sink("out", discard())
    df = events(spark, 20).withColumn("n", F.lit(2**62)).withColumn("g", F.lit(1).cast("int"))
    with pytest.raises(Exception, match="ARITHMETIC_OVERFLOW"):
        df.select(F.sum("n").over(so_far("g"))).collect()
    with pytest.raises(Exception, match=r"sum\(col\('n'\)\) of the key \(g=1\) does not fit"):
        batch(flow, spark, {"events": df}).collect()


def test_sessions(spark: SparkSession) -> None:
    flow = Flow("sessions")
    emit = {
        "k": col("k"),
        "opened": hf.at_start("ts"),
        "with_": hf.at_start("v"),
        "dur": col("ts") - hf.at_start("ts"),
    }
    keyed = source(flow).key_by("k")
    keyed.spans(start=col("cmd") == 1, end=col("cmd") == 2, emit=emit).sink("out", discard())
    df = events(spark)
    relevant = df.where("cmd in (1, 2)").select(
        "*", *[F.lag(c).over(in_order("k")).alias(f"last_{c}") for c in ("cmd", "ts", "v")]
    )
    wanted = relevant.where("cmd = 2 and last_cmd = 1").selectExpr(
        "k", "last_ts opened", "last_v with_", "ts - last_ts dur"
    )
    same(batch(flow, spark, {"events": df}), wanted)


def watermarked(df: DataFrame) -> DataFrame:
    """The watermark that each row finds: the largest time among the rows before it."""
    before = Window.orderBy("i").rowsBetween(Window.unboundedPreceding, -1)
    return df.withColumn("mark", F.max("ts").over(before))


def test_sessions_with_a_time_out(spark: SparkSession) -> None:
    flow = Flow("timed")
    emit = {"k": col("k"), "v": hf.at_start("v"), "dur": col("ts") - hf.at_start("ts")}
    sessions = (
        source(flow, event_time="ts")
        .key_by("k")
        .spans(start=col("cmd") == 1, end=col("cmd") == 2, emit=emit, timeout=60)
    )
    sessions.sink("out", discard())
    sessions.expired.sink("expired", discard())
    sessions.late.sink("late", discard())
    df = events(spark)
    rated = watermarked(df).withColumn("over", F.expr("if(cmd = 1, ts + 60, null)"))
    rated = rated.withColumn("late", F.expr("coalesce(over <= mark, false)"))
    relevant = rated.where("cmd in (1, 2) and not late").select(
        "*",
        *[F.lag(c).over(in_order("k")).alias(f"last_{c}") for c in ("over", "ts", "v")],
        F.lead("mark").over(in_order("k")).alias("next_mark"),
    )
    ended = relevant.where("cmd = 2 and last_over > mark")
    expired = relevant.where("cmd = 1 and (next_mark is null or over <= next_mark)")
    results = batch(flow, spark, {"events": df})
    same(results["out"], ended.selectExpr("k", "last_v v", "ts - last_ts dur"))
    same(results["expired"], expired.select("k", "ts", "v"))
    same(results["late"], rated.where("late").select(*EVENTS.names))


def test_tumbling_windows_and_late_rows(spark: SparkSession) -> None:
    flow = Flow("tumbling")
    window = source(flow, event_time="ts").key_by("k").window(time=50, lateness=15)
    aggs = window.agg(
        n=hf.count(), total=hf.sum("n"), low=hf.min("v"), head=hf.first("v"), tail=hf.last("v")
    )
    aggs.sink("out", discard())
    aggs.late.sink("late", discard())
    df = events(spark)
    rated = watermarked(df).withColumn("start", F.expr("floor(ts / 50) * 50"))
    rated = rated.withColumn("late", F.expr("coalesce(start + 50 + 15 <= mark, false)"))
    wanted = (
        rated.where("not late")
        .groupBy(
            "k", F.col("start").alias("window_start"), F.expr("start + 50").alias("window_end")
        )
        .agg(
            F.count(F.lit(1)).alias("n"),
            F.sum("n").alias("total"),
            F.min("v").alias("low"),
            F.min_by("v", "i").alias("head"),
            F.max_by("v", "i").alias("tail"),
        )
    )
    results = batch(flow, spark, {"events": df})
    same(results["out"], wanted)
    same(results["late"], rated.where("late").select(*EVENTS.names))


def test_sliding_windows_over_timestamps(spark: SparkSession) -> None:
    schema = EVENTS.set(3, pa.field("ts", pa.timestamp("us", "UTC")))
    flow = Flow("sliding")
    seconds = [datetime.timedelta(seconds=s) for s in (60, 25, 10)]
    keyed = source(flow, schema=schema, event_time="ts").key_by("g")
    window = keyed.window(time=seconds[0], every=seconds[1], lateness=seconds[2])
    window.agg(n=hf.count(), newest=hf.max("ts"), total=hf.sum("n")).sink("out", discard())
    df = events(spark).withColumn("ts", F.timestamp_seconds("ts"))
    # Window w covers [25 w, 25 w + 60): of a row's windows the newest is floor(ts / 25).
    unix = F.unix_micros("ts") / 1_000_000
    candidates = F.expr("transform(sequence(0, 2), x -> (newest - x) * 25)")
    paired = watermarked(df).withColumn("newest", F.floor(unix / 25))
    paired = paired.withColumn("start", F.explode(candidates)).where(unix < F.col("start") + 60)
    kept = paired.where("mark is null or start + 60 + 10 > unix_seconds(mark)")
    wanted = (
        kept.groupBy("g", "start")
        .agg(F.count(F.lit(1)).alias("n"), F.max("ts").alias("newest"), F.sum("n").alias("total"))
        .selectExpr(
            "g",
            "timestamp_seconds(start) window_start",
            "timestamp_seconds(start + 60) window_end",
            "n",
            "newest",
            "total",
        )
    )
    same(batch(flow, spark, {"events": df}), wanted)


def joined_flow() -> Flow:
    flow = Flow("join")
    left = source(flow, event_time="ts").select("i", "k", "ts", "v").key_by("k")
    right = source(flow, "orders", ORDERS, event_time="at").key_by("k")
    pairs = left.join(right, within=30, lateness=10)
    pairs.sink("out", discard())
    pairs.late.sink("late left", discard())
    pairs.late_right.sink("late right", discard())
    return flow


def joined_sql(inputs: dict[str, DataFrame], seq: Callable[[str], Any]) -> dict[str, DataFrame]:
    """The join with lateness in SQL; `seq` gives, per source, a row's sequence number."""
    left = inputs["events"].selectExpr("0 side", "ts t", "*").withColumn("seq", seq("events"))
    right = inputs["orders"].selectExpr("1 side", "at t", "*").withColumn("seq", seq("orders"))
    both = left.select("side", "t", "seq").union(right.select("side", "t", "seq"))
    before = Window.orderBy("seq").rowsBetween(Window.unboundedPreceding, -1)
    tops = [F.max(F.when(F.col("side") == s, F.col("t"))).over(before) for s in (0, 1)]
    rated = both.withColumn("a", tops[0]).withColumn("b", tops[1])
    late = rated.selectExpr(
        "seq", "coalesce((floor(t / 30) + 1) * 30 + 10 <= if(a < b, a, b), false) late"
    )
    left, right = left.join(late, "seq"), right.join(late, "seq")
    other = right.where("not late").selectExpr("i i_right", "k key", "at", "item")
    near = (F.col("k") == F.col("key")) & (F.abs(F.col("ts") - F.col("at")) <= 30)
    pairs = left.where("not late").join(other, near)
    return {
        "out": pairs.select("i", "k", "ts", "v", "i_right", "at", "item"),
        "late left": left.where("late").select("i", "k", "ts", "v"),
        "late right": right.where("late").select("i", "k", "at", "item"),
    }


def test_join(spark: SparkSession) -> None:
    inputs = two_streams(spark)
    wanted = joined_sql(inputs, lambda s: F.col("i") + (0 if s == "events" else 200))
    results = batch(joined_flow(), spark, inputs)
    for name in ("out", "late right"):
        same(results[name], wanted[name])
    # The second source starts only when the first has ended: until then nothing of that is late.
    assert results["late left"].count() == wanted["late left"].count() == 0


def test_join_in_a_recorded_order(spark: SparkSession) -> None:
    inputs = two_streams(spark)
    records, base = [], 0
    for epoch in range(10):  # 20 rows of one and 15 of the other in turn, as dicts and as records
        ranges = [[0, 0, epoch * 20, epoch * 20 + 20], [1, 0, epoch * 15, epoch * 15 + 15]]
        record: Any = {"epoch": epoch, "base": base, "ranges": ranges, "ended": epoch == 9}
        if epoch % 2:
            record = EpochRecord(
                epoch, base, tuple(Range(*r) for r in ranges), (), False, epoch == 9
            )
        records.append(record)
        base += 35
    numbers = {
        "events": F.expr("i div 20 * 35 + i % 20"),
        "orders": F.expr("i div 15 * 35 + 20 + i % 15"),
    }
    wanted = joined_sql(inputs, numbers.__getitem__)
    results = batch(joined_flow(), spark, inputs, records=records)
    for name in ("out", "late left", "late right"):
        same(results[name], wanted[name])


def test_custom_operator(spark: SparkSession) -> None:
    flow = Flow("custom")
    source(flow).key_by("k").apply(Jump()).sink("out", discard())
    df = events(spark)
    lagged = df.withColumn("before", F.lag("n").over(in_order("k")))
    wanted = lagged.where("abs(n - before) > 500").select("k", "i", "before")
    same(batch(flow, spark, {"events": df}), wanted)


# --- streams that meet, part and go on ------------------------------------------------------------


def repeat(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    """A row for each unit of ``cmd``."""
    times = batch.column("cmd").to_numpy()
    origin = np.repeat(np.arange(times.size), times)
    return batch.take(pa.array(origin)).select(["k", "i"]), origin


def doubled(frame: Any) -> Any:
    return frame.assign(n=frame["n"] * 2)[["k", "n"]]


def test_stateless_steps(spark: SparkSession) -> None:
    flow = Flow("stateless")
    stream = source(flow).filter((col("n") > 0) & ~col("k").is_null())
    stream.with_columns(w=col("v") / 3, k=col("k").fill_null("?")).sink("computed", discard())
    stream.flat_map(repeat, pa.schema([("k", pa.string()), ("i", pa.int64())])).sink(
        "flat", discard()
    )
    stream.map_pandas(doubled, pa.schema([("k", pa.string()), ("n", pa.int64())])).sink(
        "pandas", discard()
    )
    df = events(spark)
    kept = df.where("n > 0 and k is not null")
    results = batch(flow, spark, {"events": df})
    same(results["computed"], kept.withColumn("w", F.col("v") / 3))
    repeated = kept.select("k", "i", F.explode(F.expr("array_repeat(0, int(cmd))"))).select(
        "k", "i"
    )
    same(results["flat"], repeated)
    same(results["pandas"], kept.selectExpr("k", "n * 2 n"))


def test_two_keyed_stages_with_fan_out_and_union(spark: SparkSession) -> None:
    flow = Flow("diamond")
    totals = source(flow).key_by("k").agg(i=hf.last("i"), total=hf.sum("n"))
    high = totals.filter(col("total") > 0).select("i", "total", g=col("i") % 3)
    low = totals.filter(col("total") <= 0).select("i", "total", g=col("i") % 2)
    high.union(low).key_by("g").agg(i=hf.last("i"), sum=hf.sum("total")).sink("out", discard())
    high.key_by("g").window(rows=2).agg(m=hf.mean("total")).sink("high", discard())
    df = events(spark)
    over = so_far("k")
    first_stage = df.select("i", F.sum("n").over(over).alias("total"))
    group = F.expr("if(total > 0, i % 3, i % 2)")
    running = F.sum("total").over(so_far("g")).alias("sum")
    results = batch(flow, spark, {"events": df})
    same(results["out"], first_stage.withColumn("g", group).select("g", "i", running))
    pairs = F.avg("total").over(in_order("g").rowsBetween(-1, 0)).alias("m")
    wanted = first_stage.where("total > 0").withColumn("g", group).select("g", pairs)
    same(results["high"], wanted)


def test_dead_letters(spark: SparkSession) -> None:
    flow = Flow("dead", on_error="dead-letter")
    schema = pa.schema([EVENTS.field(n) for n in ("k", "i", "n")])
    stream = source(flow).map(fragile, schema)
    stream.key_by("k").agg(n=hf.count(), i=hf.last("i")).sink("out", discard())
    flow.dead_letters().sink("dead", discard())
    df = events(spark)
    results = batch(flow, spark, {"events": df})
    over = so_far("k")
    good = df.where("i % 50 != 7")
    same(results["out"], good.select("k", F.count(F.lit(1)).over(over).alias("n"), "i"))
    dead = results["dead"].selectExpr("operator", "error", "get_json_object(row, '$.i') i")
    wanted = df.where("i % 50 = 7").selectExpr(
        "'fragile' operator", "'ValueError: a bad row' error", "cast(i as string) i"
    )
    same(dead, wanted)


def test_an_error_of_user_code_comes_out(spark: SparkSession) -> None:
    flow = Flow("stops")
    schema = pa.schema([EVENTS.field(n) for n in ("k", "i", "n")])
    source(flow).map(fragile, schema).sink("out", discard())
    with pytest.raises(Exception, match="a bad row"):
        batch(flow, spark, {"events": events(spark)}).collect()


# --- the order of rows ----------------------------------------------------------------------------


def running_flow(description: Any, event_time: str | None = None) -> Flow:
    flow = Flow("order")
    stream = flow.source("events", description, event_time=event_time)
    stream.key_by("k").agg(i=hf.last("i"), total=hf.sum("v")).sink("out", discard())
    return flow


def running_sql(df: DataFrame) -> DataFrame:
    over = so_far("k")
    return df.select("k", "i", F.sum("v").over(over).alias("total"))


def test_order_columns_and_a_sorted_input(spark: SparkSession, monkeypatch: Any) -> None:
    monkeypatch.setattr(batch_module, "_RANGE_ROWS", 100)  # six ranges, so that there is a border
    df = events(spark)
    mixed = df.repartition(3).orderBy(F.hash("i")).selectExpr("*", "i div 50 day")
    flow = running_flow(spark_batch(mixed, order_by=["day", "i"]))
    same(batch(flow, spark, {"events": mixed}), running_sql(df))
    plain = running_flow(rows(pa.RecordBatch.from_pylist([], schema=EVENTS)))
    same(batch(plain, spark, {"events": mixed.orderBy("i")}), running_sql(df))


def test_order_key_and_more_rows_than_fit_a_block(spark: SparkSession) -> None:
    df = spark.range(300_000, numPartitions=5).selectExpr(
        "id i", "cast(hash(id) % 1000 as string) k", "ln(id + 1) v"
    )
    schema = pa.schema([EVENTS.field(n) for n in ("i", "k", "v")])
    flow = running_flow(rows(pa.RecordBatch.from_pylist([], schema=schema)))
    got = batch(flow, spark, {"events": df}, with_order=True)
    wanted = running_sql(df).withColumn("__o0", F.col("i"))
    assert got.columns == wanted.columns
    digest = [F.count(F.lit(1)), F.bit_xor(F.xxhash64(*got.columns))]
    assert got.select(*digest).collect() == wanted.select(*digest).collect()


def test_recorded_order_of_two_splits(spark: SparkSession) -> None:
    df = events(spark, 200)
    flow = running_flow(rows(*[pa.RecordBatch.from_pylist([], schema=EVENTS)] * 2))
    split = df.withColumn("__split", F.expr("cast(i % 2 as int)"))
    # Offset o of split s is row 2 o + s. The first 30 of each split, then the rest of split 1.
    ranges = [[0, 1, 0, 30], [0, 0, 0, 30], [0, 1, 30, 100]]
    records = [
        {"epoch": 0, "base": 0, "ranges": ranges[:2], "idle": [], "ended": False},
        {"epoch": 1, "base": 60, "ranges": ranges[2:], "idle": [], "ended": False},
    ]
    place = F.expr("if(i % 2 = 1, if(i < 60, i div 2, i div 2 + 30), i div 2 + 30)")
    taken = df.where("i < 60 or i % 2 = 1").withColumn("j", place)
    over = Window.partitionBy("k").orderBy("j").rowsBetween(Window.unboundedPreceding, 0)
    wanted = taken.select("k", "i", F.sum("v").over(over).alias("total"))
    same(batch(flow, spark, {"events": split}, records=records), wanted)
    with pytest.raises(FlowError, match="__split"):
        batch(flow, spark, {"events": df}, records=records)


def test_idle_sources_and_an_input_that_has_not_ended(spark: SparkSession) -> None:
    flow = Flow("idle")
    quiet = source(flow, "quiet", event_time="ts")
    stream = quiet.union(source(flow, event_time="ts"))
    stream.key_by("g").window(time=100).agg(n=hf.count()).sink("out", discard())
    df = events(spark)
    inputs = {"events": df, "quiet": df.limit(0)}
    parts = [
        {"epoch": e, "base": 100 * e, "ranges": [[1, 0, 100 * e, 100 * e + 100]]} for e in range(6)
    ]
    # The source without rows holds everything back, until it is declared idle after epoch 2.
    assert batch(flow, spark, inputs, records=parts).count() == 0
    parts[2]["idle"] = [[0, 0]]
    mark = Window.orderBy("i").rowsBetween(Window.unboundedPreceding, -1)
    rated = df.withColumn("mark", F.when(F.col("i") >= 300, F.max("ts").over(mark)))
    rated = rated.withColumn("start", F.expr("floor(ts / 100) * 100"))
    kept = rated.where("mark is null or start + 100 > mark")
    end = df.agg(F.max("ts")).head()[0]
    wanted = kept.where(F.col("start") + 100 <= end).groupBy(
        "g", F.col("start").alias("window_start"), F.expr("start + 100").alias("window_end")
    )
    same(batch(flow, spark, inputs, records=parts), wanted.agg(F.count(F.lit(1)).alias("n")))


# --- types, and what is refused -------------------------------------------------------------------


def test_types_that_spark_lacks(spark: SparkSession) -> None:
    schema = pa.schema(
        [
            ("a", pa.uint32()),
            ("t", pa.timestamp("ns")),
            ("d", pa.dictionary(pa.int8(), pa.string())),
        ]
    )
    flow = Flow("types")
    stream = flow.source("s", rows(pa.RecordBatch.from_pylist([], schema=schema)))
    stream.key_by("d").agg(a=hf.last("a"), t=hf.max("t"), n=hf.count()).sink("out", discard())
    df = spark.sql(
        "select id a, timestamp_ntz'2024-05-01 00:00:00' + make_interval(0,0,0,0,0,0,id) t, 'x' d "
        "from range(3)"
    )
    wanted = df.selectExpr("d", "a", "t", "a + 1 n")
    same(batch(flow, spark, {"s": df.coalesce(1)}), wanted)


def test_refusals(spark: SparkSession) -> None:
    flow = running_flow(rows(pa.RecordBatch.from_pylist([], schema=EVENTS)))
    df = events(spark, 10)
    for inputs, words in (
        ({}, "no DataFrame"),
        ({"events": df.drop("v")}, "no column 'v'"),
        ({"events": df, "other": df}, "no source 'other'"),
    ):
        with pytest.raises(FlowError, match=words):
            batch(flow, spark, inputs)
    with pytest.raises(FlowError, match="no sink 'x'"):
        batch(flow, spark, {"events": df}, sink="x")
    beyond = [{"epoch": 0, "base": 0, "ranges": [[0, 0, 0, 11]], "idle": [], "ended": True}]
    with pytest.raises(FlowError, match="up to row 11"):
        batch(flow, spark, {"events": df}, records=beyond)
