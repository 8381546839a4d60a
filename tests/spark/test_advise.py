"""`holdfast advise` on a flow that Spark feeds: by another query, with nothing to remember."""

from pathlib import Path
from typing import Any

import pytest

from holdfast import Flow
from holdfast import functions as F
from holdfast.advise.measure import measure
from holdfast.sinks import discard
from holdfast.sources import spark_stream

pytestmark = pytest.mark.spark


@pytest.mark.nightly
def test_a_stream_is_measured_without_its_checkpoint(spark: Any, tmp_path: Path) -> None:
    df = spark.readStream.format("rate").option("rowsPerSecond", 2_000).load()
    checkpoint = tmp_path / "checkpoint"
    source = spark_stream(df, checkpoint=str(checkpoint))
    flow = Flow("pushed")
    flow.source("rate", source).key_by("value").agg(n=F.count()).sink("out", discard())
    facts = measure(flow, sites=2, partitions=4, seconds=8.0)
    assert facts.rows_in > 0 and facts.stages[1].keys > 0
    assert not checkpoint.exists()
    assert source.checkpoint == str(checkpoint)  # type: ignore[attr-defined]
    assert flow.nodes[0].source is source  # type: ignore[attr-defined]
