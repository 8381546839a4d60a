"""Tables and flows that run as Spark jobs, and their content."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from pyspark.sql import DataFrame, SparkSession

from holdfast import Flow, KeyedFunction
from holdfast.plan.planner import plan
from holdfast.sources import rows

EVENTS = pa.schema(
    [
        ("i", pa.int64()),
        ("k", pa.string()),
        ("g", pa.int32()),
        ("ts", pa.int64()),
        ("v", pa.float64()),
        ("n", pa.int64()),
        ("cmd", pa.int8()),
    ]
)


def events(spark: SparkSession, count: int = 600, seed: int = 1) -> DataFrame:
    """Rows with null keys, disorder in time, and floats that add up differently in every order;
    in as many Spark partitions as there are cores."""
    rng = np.random.default_rng(seed)
    table = pa.Table.from_pydict(
        {
            "i": np.arange(count),
            "k": [None if x == 0 else f"key {x}" for x in rng.integers(0, 9, count)],
            "g": rng.integers(0, 5, count),
            "ts": np.arange(count) * 4 + rng.integers(-90, 90, count),
            "v": rng.normal(size=count) * 10.0 ** rng.integers(-8, 8, count),
            "n": rng.integers(-1000, 1000, count),
            "cmd": rng.integers(0, 3, count),
        },
        schema=EVENTS,
    )
    return spark.createDataFrame(table)


def source(flow: Flow, name: str = "events", schema: pa.Schema = EVENTS, **options: Any) -> Any:
    return flow.source(name, rows(pa.RecordBatch.from_pylist([], schema=schema)), **options)


def batch(flow: Flow, spark: SparkSession, inputs: dict[str, DataFrame], **options: Any) -> Any:
    """Few partitions: every task costs, and the machine is small. Of several sinks all."""
    names = [sink.name for sink in plan(flow).sinks]
    wanted = {"sink": names if len(names) > 1 else None, **options}
    return flow.batch(spark, inputs, partitions=3, **wanted)


def content(df: DataFrame) -> list[str]:
    """The rows as a sorted list; repr() tells floats apart to the last bit."""
    return sorted(repr(tuple(r)) for r in df.collect())


ORDERS = pa.schema(
    [("i", pa.int64()), ("k", pa.string()), ("at", pa.int64()), ("item", pa.int32())]
)


def two_streams(spark: SparkSession) -> dict[str, DataFrame]:
    left = events(spark, 200)
    right = events(spark, 150, seed=2)
    return {"events": left, "orders": right.selectExpr("i", "k", "ts at", "g item")}


class Jump(KeyedFunction):
    """Each value that differs from its key's previous one by more than 500."""

    state = {"last": (pa.int64(), 0), "seen": (pa.bool_(), False)}  # noqa: RUF012
    output = pa.schema([("i", pa.int64()), ("before", pa.int64())])

    def process(self, rows: Any, state: Any) -> Any:
        groups = rows.groups()
        value = rows["n"][groups.rows]
        before, seen = np.empty_like(value), np.ones(value.size, bool)
        before[1:] = value[:-1]
        before[groups.starts] = state["last"][groups.slots]
        seen[groups.starts] = state["seen"][groups.slots]
        state["last"][groups.slots] = value[groups.lasts]
        state["seen"][groups.slots] = True
        jumped = np.flatnonzero(seen & (np.abs(value - before) > 500))
        jumped = jumped[np.argsort(groups.rows[jumped])]
        row = groups.rows[jumped]
        return row, {"i": rows["i"][row], "before": before[jumped]}


def fragile(batch: pa.RecordBatch) -> pa.RecordBatch:
    if np.any(batch.column("i").to_numpy() % 50 == 7):
        raise ValueError("a bad row")
    return batch.select(["k", "i", "n"])


CHECK = "spark.sql.streaming.unsupportedOperationCheck"


@pytest.fixture
def unchecked(spark: SparkSession) -> Iterator[None]:
    """Let several `applyInPandasWithState` into one query."""
    spark.conf.set(CHECK, "false")
    yield
    spark.conf.unset(CHECK)
