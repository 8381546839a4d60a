"""Every other protection than pairs on a real Spark: a site that computes is killed, and the batch
job agrees."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast import Flow, active, col, count, max_, parquet, passive, rollback, sum_, upstream
from holdfast.core.protection import ProtectionSpec
from holdfast.spark.sources import spark_batch
from tests.spark.test_pairs import same, until

ROWS = 400_000
SELECT = ("id", "id * 7919 % 500 as k", "id % 997 as v", "id div 40 + id * 31 % 9 as ts")
PROTECTIONS = {
    "active": active(apart="process"),
    "passive": passive(every_ms=100, apart="process"),
    "upstream": upstream(apart="process"),
    "rollback": rollback(apart="process"),
}


def windows(df: DataFrame, out: Path, protection: ProtectionSpec | None = None) -> Flow:
    """Windows of about 20,000 rows each, and windows over them."""
    flow = Flow("windows on Spark", protect=protection)
    source = spark_batch(df, order_by="id")
    keyed = flow.source("numbers", source, event_time="ts").key_by("k")
    totals = keyed.window(time=500, lateness=20).agg(t=sum_("v"), n=count())
    groups = totals.select("window_start", g=col("k") % 50, t=col("t"), n=col("n")).key_by("g")
    made = groups.window(time=1_000).agg(m=max_("t"), n=sum_("n"))
    made.sink("out", parquet(out, roll_s=0.2))
    return flow


@pytest.fixture(scope="module")
def numbers(spark: SparkSession) -> DataFrame:
    return spark.range(0, ROWS, 1, 2).selectExpr(*SELECT)


@pytest.fixture(scope="module")
def expected(spark: SparkSession, numbers: DataFrame) -> Iterator[DataFrame]:
    """What the batch job gives, however the flow is protected: computed once."""
    found = windows(numbers, Path("none")).batch(spark, {"numbers": numbers}).cache()
    yield found
    found.unpersist()


@pytest.mark.parametrize("name", PROTECTIONS)
def test_a_site_dies_while_rows_flow(
    spark: SparkSession, tmp_path: Path, numbers: DataFrame, expected: DataFrame, name: str
) -> None:
    """The one that computes the first partitions of the first windows."""
    run = windows(numbers, tmp_path, PROTECTIONS[name]).start(spark, sites=3, partitions=6)
    until(run, lambda: run.protected and run.status()["rows_in"] > ROWS // 8, "rows flow")
    status = run.status()
    site = next(p["replicas"][0] for p in status["partitions"] if p["stage"].startswith("time"))
    os.kill(int(status["domains"][site].process.rpartition("/")[2]), signal.SIGKILL)
    until(run, lambda: site in run.status()["dead"], "its death is noticed")
    assert run.wait(120)
    assert same(spark.read.parquet(str(tmp_path)), expected)
