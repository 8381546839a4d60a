"""Partition pairs on a real Spark: sites are killed, and the batch job agrees."""

from pathlib import Path
from typing import Any

import pytest
from pyspark.sql import SparkSession

from holdfast import Flow, col
from holdfast import functions as hf
from holdfast.api.options import Checkpoint
from holdfast.control.run import Run
from holdfast.errors import FlowError, HostError
from holdfast.protections import pairs
from holdfast.sinks import parquet
from holdfast.spark.sources import spark_batch, spark_stream
from tests.support.spark_runs import kill_leader, same, until
from tests.support.tiers import nightly

SELECT = ("id", "id * 7919 % 500 as k", "cast(id % 997 as double) as v")


def totals(source: Any, out: Path) -> Flow:
    flow = Flow("pairs on Spark", protect=pairs(failure_domain="process"))
    keyed = flow.source("numbers", source).key_by("k").agg(t=hf.sum("v"), n=hf.count())
    groups = keyed.select(g=col("k") % 100, t=col("t"), n=col("n")).key_by("g")
    groups.agg(m=hf.max("t"), c=hf.count()).sink("out", parquet(out, interval=0.2))
    return flow


@pytest.mark.parametrize("stage", ["numbers", nightly("out")])
def test_a_site_dies_while_spark_feeds_the_flow(
    spark: SparkSession, tmp_path: Path, stage: str
) -> None:
    """Micro-batches of files; the site that takes them in, or the one that writes, is killed."""
    packets = tmp_path / "in"
    for start in range(0, 40_000, 4_000):
        rows = spark.range(start, start + 4_000, 1, 1).selectExpr(*SELECT)
        rows.write.mode("append").parquet(str(packets))
    schema = spark.read.parquet(str(packets)).schema
    stream = spark.readStream.schema(schema).option("maxFilesPerTrigger", 1).parquet(str(packets))
    source = spark_stream(stream, order_by="id", trigger={"availableNow": True})
    flow = totals(source, tmp_path / "out")
    run = flow.start(spark, sites=3)
    until(run, lambda: run.status()["rows_in"] > 0, "rows flow")
    if not run.ended(0):
        kill_leader(run, stage)
    assert run.wait(120)
    found = spark.read.parquet(str(tmp_path / "out"))
    whole = spark.read.parquet(str(packets))
    assert found.count() == 40_000
    # Files come in the order in which they were written, so the ids do.
    expected = totals(spark_batch(whole, order_by="id"), tmp_path / "none")
    assert same(found, expected.batch(spark, {"numbers": whole}))


def test_a_query_goes_on_from_its_checkpoint_location_and_from_no_other(
    spark: SparkSession, tmp_path: Path
) -> None:
    """Another one has another query, whose micro-batches begin with 0 again: taken for those that
    the flow has, their rows would be gone."""
    folder, store = tmp_path / "in", str(tmp_path / "store")

    def add(start: int) -> None:
        rows = spark.range(start, start + 1_000, 1, 2).selectExpr(*SELECT)
        rows.write.mode("append").parquet(str(folder))

    def start(location: str, **more: Any) -> Run:
        stream = spark.readStream.schema("id long, k long, v double").parquet(str(folder))
        source = spark_stream(stream, checkpoint=str(tmp_path / location))
        flow = Flow("fed by a query")
        flow.source("numbers", source).filter(col("id") >= 0).sink("out", parquet(tmp_path / "out"))
        return flow.start(spark, sites=1, **more)

    add(0)
    run = start("first", checkpoint=Checkpoint(store, interval=0.2))
    until(run, lambda: run.status()["rows_in"] == 1_000, "the rows are in")
    run.stop(timeout=60)
    add(1_000)
    run = start("second", restore_from=store)
    with pytest.raises(FlowError, match=r"'numbers' failed: the flow is fed by .* query with id"):
        run.wait(60)
    run = start("first", restore_from=store)
    until(run, lambda: run.status()["rows_in"] == 2_000, "the rows of the next micro-batch are in")
    run.stop(timeout=60)
    found = [row["id"] for row in spark.read.parquet(str(tmp_path / "out")).collect()]
    assert sorted(found) == list(range(2_000))


def test_a_batch_dataframe_is_fed_again_from_where_the_ingress_died(
    spark: SparkSession, tmp_path: Path
) -> None:
    df = spark.range(0, 1_500_000, 1, 4).selectExpr(*SELECT)
    flow = totals(spark_batch(df, order_by="id"), tmp_path / "out")
    run = flow.start(spark, sites=3)
    until(run, lambda: run.status()["rows_in"] > 0, "rows flow")
    kill_leader(run, "numbers")
    assert run.wait(120)
    found = spark.read.parquet(str(tmp_path / "out"))
    assert same(found, flow.batch(spark, {"numbers": df}))


def test_replicas_in_one_executor_are_refused_unless_allowed(
    spark: SparkSession, tmp_path: Path
) -> None:
    flow = totals(spark_batch(spark.range(10).selectExpr(*SELECT)), tmp_path / "out")
    flow.protection = pairs()
    with pytest.raises(HostError, match="no two in one executor, and the sites are in only 1"):
        flow.start(spark, sites=2)
