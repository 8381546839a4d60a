"""Every other protection than pairs on a real Spark: a site that computes is killed, and the batch
job agrees."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.api.protection import Protection
from holdfast.protections import active, passive, rollback, upstream
from holdfast.sinks import parquet
from holdfast.spark.sources import spark_batch
from tests.support.spark_runs import same, until
from tests.support.tiers import rest_nightly

ROWS = 400_000
SELECT = ("id", "id * 7919 % 500 as k", "id % 997 as v", "id div 40 + id * 31 % 9 as ts")
PROTECTIONS = {
    "active": active(failure_domain="process"),
    "passive": passive(interval=0.1, failure_domain="process"),
    "upstream": upstream(failure_domain="process"),
    "rollback": rollback(failure_domain="process"),
}


def windows(df: DataFrame, out: Path, protection: Protection | None = None) -> Flow:
    """Windows of about 20,000 rows each, and windows over them."""
    flow = Flow("windows on Spark", protect=protection)
    source = spark_batch(df, order_by="id")
    keyed = flow.source("numbers", source, event_time="ts").key_by("k")
    totals = keyed.window(time=500, lateness=20).agg(t=F.sum("v"), n=F.count())
    groups = totals.select("window_start", g=col("k") % 50, t=col("t"), n=col("n")).key_by("g")
    made = groups.window(time=1_000).agg(m=F.max("t"), n=F.sum("n"))
    made.sink("out", parquet(out, interval=0.2))
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


@pytest.mark.parametrize("name", rest_nightly(PROTECTIONS, ["upstream"]))
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
