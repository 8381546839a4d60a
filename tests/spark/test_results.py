"""``spark.readStream.format("holdfast")``: any Spark sink gets every row of a flow once."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql.streaming import StreamingQuery

from holdfast import Flow
from holdfast import functions as F
from holdfast.api.options import Checkpoint
from holdfast.control.run import Run
from holdfast.protections import pairs
from holdfast.sinks import outlet, table
from holdfast.sources import generator
from tests.support.lines import SCHEMA, numbers
from tests.support.runs import kill, replicas, taken, until

ROWS = 60_000


def flow(endless: bool = False, readers: int = 1, rate: float = 5_000.0) -> Flow:
    made = Flow("results", protect=pairs(failure_domain="process"))
    much = {"rate": rate} if endless else {"rows": ROWS}
    source = made.source("numbers", generator(numbers, SCHEMA, **much))
    source.key_by("k").agg(t=F.sum("v"), n=F.count()).sink("out", outlet(readers=readers))
    return made


@pytest.fixture
def begun() -> Iterator[Any]:
    """Starts flows on plain processes, and ends them with the test."""
    runs: list[Run] = []

    def start(made: Flow, **more: str) -> Run:
        runs.append(made.start(sites=3, partitions=6, **more))
        return runs[-1]

    yield start
    for run in runs:
        if not run.ended(0):
            run.stop(drain=False)


def results(spark: SparkSession, run: Run, reader: str = "query", **options: str) -> DataFrame:
    source = spark.readStream.format("holdfast").option("flow", run.url).option("sink", "out")
    return source.options(reader=reader, **options).load()


def into_files(df: DataFrame, folder: Path, **trigger: bool) -> StreamingQuery:
    writer = df.writeStream.format("parquet").option("checkpointLocation", str(folder / "at"))
    if trigger:
        writer = writer.trigger(**trigger)
    return writer.start(str(folder / "rows"))


def rows_of(spark: SparkSession, folder: Path) -> list[tuple[Any, ...]]:
    return sorted(tuple(row) for row in spark.read.parquet(str(folder / "rows")).collect())


def right(spark: SparkSession, count: int = ROWS) -> list[tuple[Any, ...]]:
    rows = spark.createDataFrame(numbers(0, 0, count).to_pandas()).coalesce(1)
    return sorted(tuple(row) for row in flow().batch(spark, {"numbers": rows}).collect())


def everything_is_read(query: StreamingQuery, run: Run) -> None:
    until(lambda: run.ended(0) or query.exception() is not None, "the flow has ended")
    assert query.exception() is None, query.exception()
    run.wait()
    query.processAllAvailable()
    query.stop()


def test_a_query_gets_what_the_batch_job_gives(spark: SparkSession, begun, tmp_path: Path) -> None:
    run = begun(flow())
    df = results(spark, run, maxRowsPerBatch="20000", partitions="2")
    assert df.schema.simpleString() == "struct<k:bigint,t:double,n:bigint>"
    query = into_files(df, tmp_path)
    everything_is_read(query, run)
    assert rows_of(spark, tmp_path) == right(spark)


def test_a_query_that_is_started_again_goes_on_where_it_was(
    spark: SparkSession, begun, tmp_path: Path
) -> None:
    """And the site that it read from is killed meanwhile."""
    run = begun(flow(endless=True))
    df = results(spark, run)
    query = into_files(df, tmp_path)
    until(lambda: query.lastProgress and query.lastProgress["batchId"] >= 1, "it has read some")
    query.stop()
    kill(run, replicas(run)["out", 0][0])
    again = into_files(df, tmp_path)
    run.stop()
    everything_is_read(again, run)
    assert rows_of(spark, tmp_path) == right(spark, taken(run)["numbers"])


def test_two_queries_and_another_life_of_the_flow(
    spark: SparkSession, begun, tmp_path: Path
) -> None:
    run = begun(flow(readers=2))
    names = ("one", "other")
    queries = [into_files(results(spark, run, name), tmp_path / name) for name in names]
    for query in queries:
        everything_is_read(query, run)
    assert rows_of(spark, tmp_path / "one") == rows_of(spark, tmp_path / "other") == right(spark)
    query = into_files(results(spark, begun(flow()), "one"), tmp_path / "one")
    until(lambda: query.exception() is not None, "it is refused")
    assert "another incarnation of the flow" in str(query.exception())


def test_a_scheduled_query_reads_what_is_there_and_ends(
    spark: SparkSession, begun, tmp_path: Path
) -> None:
    """And goes on there the next time, though the site it read from is killed meanwhile. To the
    flow it is the same reader."""
    run = begun(flow(endless=True, rate=500.0))
    counts = [0]
    for more in (5, 10):
        until(lambda more=more: run.sink_report("out").get("epoch", -1) > more, "there is more")
        df = results(spark, run, "scheduled", maxRowsPerBatch="5000")
        query = into_files(df, tmp_path, availableNow=True)
        assert query.awaitTermination(120), "though rows keep coming"
        counts.append(len(found := rows_of(spark, tmp_path)))
        if more == 5:
            kill(run, replicas(run)["out", 0][0])
    assert counts == sorted(set(counts)) and found == right(spark, counts[-1])
    (reader,) = run.readers("out")
    assert reader["reader"] == "scheduled" and reader["state"] == "reading"
    renamed = into_files(results(spark, run, "other"), tmp_path)
    until(lambda: renamed.exception() is not None, "it is refused")
    assert "checkpoint is that of reader 'scheduled'" in str(renamed.exception())


@pytest.mark.nightly
def test_a_query_goes_on_with_the_flow_that_goes_on(
    spark: SparkSession, begun, tmp_path: Path
) -> None:
    made, store = flow(endless=True, rate=500.0), str(tmp_path / "store")
    run = begun(made, checkpoint=Checkpoint(store))
    until(lambda: run.sink_report("out").get("epoch", -1) > 5, "there are rows")
    into_files(results(spark, run), tmp_path, availableNow=True).awaitTermination(120)
    read = len(rows_of(spark, tmp_path))
    run.stop()
    before = sum(record.rows for record in run.records())
    again = begun(made, restore_from=store)
    until(lambda: again.status()["rows_in"] > before, "it goes on")
    into_files(results(spark, again), tmp_path, availableNow=True).awaitTermination(120)
    found = rows_of(spark, tmp_path)
    assert len(found) >= before > read and found == right(spark, len(found))


def test_a_view_is_a_batch_dataframe(spark: SparkSession, begun) -> None:
    made = Flow("latest", protect=pairs(failure_domain="process"))
    made.source("numbers", generator(numbers, SCHEMA, rate=50_000.0)).sink("out", table("k"))
    run = begun(made)
    until(lambda: run.status()["rows_in"] > 10_000, "each key has come up")
    df = spark.read.format("holdfast").option("flow", run.url).option("sink", "out").load()
    assert df.count() == df.select("k").distinct().count() == 5_000


def test_a_stream_needs_a_name(spark: SparkSession, begun, tmp_path: Path) -> None:
    run = begun(flow())
    source = spark.readStream.format("holdfast").option("flow", run.url).option("sink", "out")
    with pytest.raises(Exception, match=r"needs the option 'reader'(?s:.)*holds rows for every"):
        into_files(source.load(), tmp_path).processAllAvailable()
    assert run.readers("out") == []


def test_options_that_are_missing_or_wrong(spark: SparkSession) -> None:
    with pytest.raises(Exception, match="needs the option 'flow'"):
        spark.readStream.format("holdfast").load()
    with pytest.raises(Exception, match="not the address of a flow"):
        spark.readStream.format("holdfast").option("flow", "x").option("sink", "out").load()
