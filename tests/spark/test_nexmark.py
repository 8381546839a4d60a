"""Nexmark in Spark SQL, as a batch job and live: all the same, and the same as a plain model."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast.api.options import Options
from holdfast.core.sequencer import Budget
from holdfast.lab.sim.world import World
from holdfast.lab.workloads.nexmark import (
    CYCLE,
    EVENT_SCHEMA,
    NAMES,
    QUERIES,
    SHARE,
    Nexmark,
    nexmark_flow,
)
from holdfast.sinks import discard
from tests.support.nexmark_oracle import SQL, Rows, expected, rows_of
from tests.support.tiers import nightly

pytestmark = pytest.mark.spark

CYCLES = 24
RATE = 40
GROUP = 4
OPTIONS = Options(
    partitions=3, budget=Budget(epoch_rows_max=150), block_rows=60, read_ahead_rows=120
)


def frame(spark: SparkSession, table: pa.Table, splits: int) -> DataFrame:
    """The rows in their order, each with the split that it is of."""
    split = pa.array(np.arange(table.num_rows) % splits, pa.int32())
    return spark.createDataFrame(table.append_column("__split", split))


def frames(spark: SparkSession, events: Nexmark, sources: int) -> dict[str, DataFrame]:
    if sources > 1:
        return {n: frame(spark, events.table(k), events.splits) for k, n in NAMES.items()}
    batch = events.events(np.arange(CYCLES * CYCLE))
    table = pa.Table.from_batches([batch], EVENT_SCHEMA)
    return {"events": frame(spark, table, events.splits)}


def collected(query: str, df: DataFrame) -> Rows:
    return rows_of(query, (row.asDict() for row in df.collect()))


def model(query: str, events: Nexmark) -> Rows:
    right = expected(query, *(events.table(kind).to_pylist() for kind in SHARE))
    assert right, "the test would prove nothing"
    return right


@pytest.mark.parametrize("query", QUERIES)
def test_sql_says_what_the_model_says(spark: SparkSession, query: str) -> None:
    events = Nexmark(CYCLES, rate=RATE)
    for kind, name in NAMES.items():
        spark.createDataFrame(events.table(kind)).createOrReplaceTempView(name)
    assert collected(query, spark.sql(SQL[query])) == model(query, events)


@pytest.mark.parametrize("query", QUERIES)
def test_a_batch_job_without_records(spark: SparkSession, query: str) -> None:
    """One source after another: those that come later hold the watermark until then."""
    events = Nexmark(CYCLES, rate=RATE)
    flow = nexmark_flow(query, events, discard(), sources=3)
    inputs = {n: df.drop("__split") for n, df in frames(spark, events, 3).items()}
    given = flow.batch(spark, inputs, partitions=2, sink="out")
    assert collected(query, given) == model(query, events)


@pytest.mark.parametrize("sources", [nightly(1), 3])
@pytest.mark.parametrize("query", QUERIES)
def test_a_batch_job_in_the_order_of_a_live_run(
    spark: SparkSession, query: str, sources: int
) -> None:
    """Three splits, out of order: the live run and the batch job give what the model gives."""
    events = Nexmark(CYCLES, rate=RATE, group=GROUP, splits=3)
    flow = nexmark_flow(query, events, discard(), sources=sources)
    world = World(flow, sites=2, seed=sources, options=OPTIONS)
    world.run()
    inputs = frames(spark, events, sources)
    given = flow.batch(spark, inputs, partitions=2, sink="out", records=world.records)
    right = model(query, events)
    assert collected(query, given) == right
    assert rows_of(query, world.result("out").to_pylist()) == right
