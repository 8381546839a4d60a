"""The very same operators under Spark's own engine and as part of a flow give the same rows."""

from __future__ import annotations

import datetime
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast import Flow, col
from holdfast.sinks import discard
from holdfast.sources import rows
from holdfast.spark.stateful.clock import LAST_MS
from tests.support.harness import Input, Shape, run
from tests.support.processors import (
    COUNTS,
    SESSION,
    SESSIONS,
    VISITS,
    FrameCounts,
    Visits,
    sessions,
)
from tests.support.spark_tables import unchecked

__all__ = ["unchecked"]

pytestmark = pytest.mark.spark

LATENESS = datetime.timedelta(milliseconds=30)
BEGIN = datetime.datetime(2024, 1, 1, tzinfo=datetime.UTC)
PROVIDER = "spark.sql.streaming.stateStore.providerClass"
ROCKS_DB = "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider"

# Each a micro-batch: (key, milliseconds before the clock, number, command). A row of the key
# "clock" ends it, and moves the watermark: before it all rows of the batch find the same.
BATCHES: list[tuple[int, list[tuple[str, int, int, str]]]] = [
    (0, []),
    (
        150,
        [("a", 0, 1, "wait"), ("b", 0, 2, "wait twice"), ("c", 5, 4, "wait"), ("d", 9, 4, "add")],
    ),
    (
        260,
        [
            ("b", 0, 3, "shorten"),
            ("d", 29, 2, "wait"),
            ("e", 7, 5, "wait"),
            ("late", 40, 2, "wait"),
        ],
    ),
    (90_000_000, [("a", 0, 1, "forget timers"), ("b", 7, 6, "wait"), ("d", 0, 8, "clear")]),
]


def tables() -> list[pa.Table]:
    found, clock = [], 0
    for end, given in BATCHES:
        made = [(k, clock - ago, n, cmd) for k, ago, n, cmd in given]
        made.append(("clock", end, 0, "quiet"))
        clock = end
        keys, at, numbers, commands = zip(*made, strict=True)
        times = [BEGIN + datetime.timedelta(milliseconds=1_000 + ms) for ms in at]
        columns = {"k": keys, "ts": pa.array(times, pa.timestamp("us", "UTC"))}
        found.append(pa.table(columns | {"n": pa.array(numbers, pa.int64()), "cmd": commands}))
    return found


def everything() -> pa.RecordBatch:
    (batch,) = pa.concat_tables(tables()).combine_chunks().to_batches()
    return batch


def flow(what: str) -> Flow:
    made = Flow("stateful")
    stream = made.source("s", rows(everything()), event_time="ts")
    match what:
        case "rows":
            out = stream.key_by("k").transform_with_state(
                Visits(), VISITS, time_mode="EventTime", lateness=LATENESS
            )
        case "sessions":
            out = stream.key_by("k").apply_in_pandas_with_state(
                sessions, SESSIONS, SESSION, "append", "EventTimeTimeout", lateness=LATENESS
            )
        case _:
            keyed = stream.select(k=col("n")).key_by("k")
            out = keyed.transform_with_state(FrameCounts(), COUNTS, pandas=True)
    out.sink("out", discard())
    return made


def in_spark(what: str, df: DataFrame) -> DataFrame:
    timed = df.withWatermark("ts", "30 milliseconds").groupBy("k")
    match what:
        case "rows":
            return timed.transformWithState(Visits(), VISITS, "Update", "EventTime")
        case "sessions":
            return timed.applyInPandasWithState(
                sessions, SESSIONS, SESSION, "append", "EventTimeTimeout"
            )
        case _:
            numbered = df.selectExpr("n AS k").groupBy("k")
            return numbered.transformWithStateInPandas(FrameCounts(), COUNTS, "Update", "None")


KINDS = ["rows", "sessions", "frames"]


@pytest.fixture(scope="module")
def from_spark(spark: SparkSession, tmp_path_factory: Any) -> Iterator[dict[str, Counter]]:
    """What Spark's engine gives."""
    spark.conf.set(PROVIDER, ROCKS_DB)
    spark.conf.set("spark.sql.shuffle.partitions", "1")
    yield {what: _streamed(spark, what, tmp_path_factory.mktemp(what)) for what in KINDS}
    spark.conf.unset(PROVIDER)  # to say the default would be to choose it
    spark.conf.set("spark.sql.shuffle.partitions", "2")


def _streamed(spark: SparkSession, what: str, folder: Path) -> Counter:
    """It runs a batch without data, which is when timers are due, only when there is no other; so a
    file comes when all before it is done."""
    files = folder / "given"
    files.mkdir()
    schema = "k string, ts timestamp, n long, cmd string"
    query = (
        in_spark(what, spark.readStream.schema(schema).parquet(str(files)))
        .writeStream.format("memory")
        .queryName(f"stateful_{what}")
        .outputMode("append" if what == "sessions" else "update")
        .option("checkpointLocation", str(folder / "checkpoint"))
        .start()
    )
    timed = what != "frames"
    for n, table in enumerate(tables() if timed else [pa.concat_tables(tables())]):
        pq.write_table(table, folder / "hidden")
        os.rename(folder / "hidden", files / f"{n}.parquet")
        query.processAllAvailable()
    query.stop()
    return Counter(map(tuple, spark.table(f"stateful_{what}").collect()))


@pytest.mark.parametrize("what", KINDS)
def test_spark_and_flow_give_the_same(
    spark: SparkSession, from_spark: dict[str, Counter], what: str
) -> None:
    live = run(flow(what), Input.of(s=everything()), Shape(cuts=[3, 7, 8], partitions=5, sites=2))
    names = [n for n in live.sinks["out"].schema.names if not n.startswith("__")]
    given = [tuple(row[n] for n in names) for row in live.sinks["out"].to_pylist()]
    df = spark.createDataFrame(pa.Table.from_batches([everything()])).coalesce(1)
    batch = flow(what).batch(spark, {"s": df}, partitions=3).collect()
    assert Counter(map(tuple, batch)) == Counter(given)
    # A stream of Spark's never ends: what is due then is not there.
    before_end = [row for row in given if what != "rows" or row[-1] < LAST_MS]
    assert Counter(before_end) == from_spark[what]
    assert sum(from_spark[what].values()) > 10
    if what != "frames":
        due = [row for row in from_spark[what] if "timer" in row[1] or "over" in row[1]]
        assert len(due) > 3 and not any("late" in str(row[0]) for row in from_spark[what])


@pytest.mark.usefixtures("unchecked")
def test_in_structured_streaming_the_flow_gives_the_same(
    spark: SparkSession, tmp_path: Path
) -> None:
    """The fall-back: state as bytes under Spark's engine, a few rows at a time."""
    files = tmp_path / "given"
    files.mkdir()
    for n, table in enumerate([everything().slice(0, 7), everything().slice(7)]):
        pq.write_table(pa.Table.from_batches([table]), files / f"{n}.parquet")
        os.utime(files / f"{n}.parquet", (1_700_000_000 + n,) * 2)
    reading = spark.readStream.schema("k string, ts timestamp, n long, cmd string")
    df = reading.option("maxFilesPerTrigger", 1).parquet(str(files))
    streamed = flow("rows").stream(spark, {"s": df}, partitions=2)
    writer = streamed.writeStream.format("parquet").option("path", str(tmp_path / "out"))
    writer = writer.option("checkpointLocation", str(tmp_path / "checkpoint"))
    writer.trigger(availableNow=True).start().awaitTermination()
    written = spark.read.schema(streamed.schema).parquet(str(tmp_path / "out")).collect()
    live = run(flow("rows"), Input.of(s=everything())).sinks["out"].to_pylist()
    expected = [tuple(row[n] for n in streamed.columns) for row in live if row["mark"] < LAST_MS]
    assert Counter(map(tuple, written)) == Counter(expected)
