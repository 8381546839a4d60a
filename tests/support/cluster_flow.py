"""A flow file for spark-submit: rows at a set rate, until a file says that it is enough."""

import json
import sys
from pathlib import Path

import pyarrow as pa

import holdfast
from holdfast import Flow
from holdfast.lab.workloads.dmz import SCHEMA, DmzRows, dmz_flow
from holdfast.protections import pairs
from holdfast.sinks import parquet
from holdfast.sources import generator

KEYS, RATE, SITES = 20_000, 20_000, 4
make = DmzRows(KEYS, staggered=True)


def packets(split: int, offset: int, count: int) -> pa.RecordBatch:
    """A function of this file: it travels with the flow."""
    return make(split, offset, count)


def flow(out: str) -> Flow:
    made = dmz_flow(generator(packets, SCHEMA, rate=RATE), parquet(out, interval=0.5))
    made.protection = pairs(failure_domain="host")
    return made


def where(_: int) -> str:
    """Where an executor has Holdfast from."""
    return holdfast.__file__


if __name__ == "__main__":
    from pyspark.sql import SparkSession

    folder = Path(sys.argv[1])
    spark = SparkSession.builder.appName("cluster").getOrCreate()
    from_ = spark.sparkContext.parallelize(range(SITES), SITES).map(where).distinct().collect()
    with flow(str(folder / "out")).start(spark, sites=SITES, http="127.0.0.1:0") as run:
        assert run.web is not None
        (folder / "http").write_text(run.web.address)
        while not (folder / "enough").exists() and not run.ended(0.1):
            pass
    said = {"rows_in": run.status()["rows_in"], "from": from_, "driver": holdfast.__file__}
    (folder / "said").write_text(json.dumps(said))
    spark.stop()
