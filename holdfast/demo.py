"""``holdfast demo``: the papers' network-monitoring flow on an embedded Spark, with a live table.

Packets arrive as parquet files in a folder that Spark follows; the flow runs in Spark tasks; the
results go to a parquet table that Spark reads back and compares with the batch job over the same
packets.
"""

from __future__ import annotations

import tempfile
import threading
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console

from holdfast.bench.dmz import SCHEMA, DmzRows, dmz_flow
from holdfast.dashboard import watch
from holdfast.flow.sinks import parquet
from holdfast.spark.parcels import spark_schema
from holdfast.spark.session import local_session
from holdfast.spark.sources import spark_batch, spark_stream

PACKETS = pa.schema([*SCHEMA, ("n", pa.int64())])
ROWS_PER_FILE = 50_000
FILES_PER_S = 4


class _Traffic(threading.Thread):
    """Writes a file of packets every quarter of a second; `n` numbers the packets."""

    def __init__(self, folder: Path, seconds: float) -> None:
        super().__init__(daemon=True, name="demo-traffic")
        self._folder, self._files = folder, int(seconds * FILES_PER_S)
        self._make = DmzRows()
        self.rows = 0

    def run(self) -> None:
        begun = time.monotonic()
        for number in range(self._files):
            self.write(number)
            time.sleep(max(0.0, begun + (number + 1) / FILES_PER_S - time.monotonic()))

    def write(self, number: int) -> None:
        batch = self._make(0, number * ROWS_PER_FILE, ROWS_PER_FILE)
        n = pa.array(np.arange(self.rows, self.rows + ROWS_PER_FILE))
        table = pa.Table.from_arrays([*batch.columns, n], schema=PACKETS)
        hidden = self._folder / f".packets-{number:06d}.tmp"
        pq.write_table(table, hidden)
        hidden.rename(self._folder / f"packets-{number:06d}.parquet")
        self.rows += ROWS_PER_FILE


def demo(seconds: float = 20.0, sites: int = 2, console: Console | None = None) -> bool:
    """Run the demo; True if the flow's result is exactly that of the batch job."""
    console = console or Console()
    console.print("Starting Spark (about 7 s) ...")
    spark = local_session("holdfast-demo", sites + 4, **{"spark.ui.enabled": "true"})
    console.print(f"Spark UI, with a running job for every site: {spark.sparkContext.uiWebUrl}")
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        try:
            return _demo(spark, Path(folder), seconds, sites, console)
        finally:
            spark.stop()


def _demo(spark: SparkSession, folder: Path, seconds: float, sites: int, console: Console) -> bool:
    packets, alerts = folder / "packets", folder / "alerts"
    packets.mkdir()
    traffic = _Traffic(packets, seconds)
    stream = spark.readStream.schema(spark_schema(PACKETS)).parquet(str(packets))
    flow = dmz_flow(spark_stream(stream, order_by="n"), parquet(alerts))
    run = flow.start(spark, sites=sites)
    console.print(f"The flow runs on {sites} sites; packets come for {seconds:.0f} s.")
    traffic.start()
    watch(run, console, lambda: not traffic.is_alive() and run.status()["rows_in"] >= traffic.rows)
    run.stop()
    console.print(f"Delivered everything. Checking {traffic.rows:,} packets with the batch job ...")
    return _check(spark, packets, alerts, console)


def _check(spark: SparkSession, packets: Path, alerts: Path, console: Console) -> bool:
    found = spark.read.parquet(str(alerts))
    source = spark.read.parquet(str(packets))
    batch_flow = dmz_flow(spark_batch(source, order_by="n"), parquet(alerts))
    expected = batch_flow.batch(spark, {"packets": source}).select(*found.columns)
    ours, theirs = _summary(found), _summary(expected)
    console.print(f"  flow:  {ours[0]:,} rows, checksum {ours[1]}")
    console.print(f"  batch: {theirs[0]:,} rows, checksum {theirs[1]}")
    same = ours == theirs
    console.print("[green]The results are the same.[/]" if same else "[red]They differ![/]")
    console.print("\nThe five worst sessions, from the parquet table:")
    for row in found.orderBy(F.desc("worst"), "app", "src").limit(5).collect():
        console.print(f"  app {row['app']}  src {row['src']:>4}  worst {row['worst']:,}")
    return same


def _summary(df: DataFrame) -> tuple[int, int]:
    """Number of rows, and a checksum that does not depend on their order."""
    hashed = F.xxhash64(*df.columns).cast("decimal(38,0)")
    row = df.agg(F.count("*").alias("rows"), F.sum(hashed).alias("sum")).collect()[0]
    return int(row["rows"]), int(row["sum"] or 0)
