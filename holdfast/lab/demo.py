"""``holdfast demo``: runs the papers' network-monitoring flow, and kills a site and a driver.

Two Spark applications host one flow under partition pairs, with a live table. The demo kills a
site with ``kill -9``, then the driver of the leading application. It prints how long the output
paused and how long it took until everything was protected again. At the end Spark reads the results
and compares them with the batch job over the same packets.
"""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F
from rich.console import Console

from holdfast.api.graph import Flow
from holdfast.api.protection import pairs
from holdfast.connectors.parquet import parquet
from holdfast.control.applications import Apps
from holdfast.lab.bench.processes import tree
from holdfast.lab.workloads.dmz import SCHEMA, DmzRows, dmz_flow
from holdfast.spark.session import local_session
from holdfast.spark.shuffle_blocks import spark_schema
from holdfast.spark.sources import spark_batch
from holdfast.ui.live_table import watch

RATE = 200_000
RESULTS = "HOLDFAST_DEMO_RESULTS"
"""The environment variable with the results folder of the applications."""
PATIENCE_S = 120.0


def flow(spark: Any) -> Flow:
    """Return the flow that both applications run; each loads this file."""
    dmz = dmz_flow(DmzRows().source(rate=RATE), parquet(os.environ[RESULTS], interval=0.5))
    dmz.protection = pairs()
    return dmz


def demo(seconds: float = 5.0, sites: int = 4, console: Console | None = None) -> bool:
    """Run the demo; return whether the flow's result is exactly that of the batch job.

    The flow runs for `seconds` before, between and after the kills.
    """
    console = console or Console()
    with tempfile.TemporaryDirectory(prefix="holdfast-demo-") as folder:
        results = Path(folder) / "alerts"
        os.environ[RESULTS] = str(results)
        console.print("Starting two Spark applications (about 20 s) ...")
        with Apps(__file__, apps=2, sites=sites) as apps:
            _wait(apps, lambda: apps.protected)
            console.print(
                f"One flow on {sites} sites, its replicas in different applications; "
                f"{RATE:,} packets per second."
            )
            _show(apps, console, seconds)
            _kill_site(apps, console)
            _show(apps, console, seconds)
            _kill_driver(apps, console)
            _show(apps, console, seconds)
            apps.stop()
            apps.wait()
            packets = int(apps.status()["rows_in"])
        return _check(packets, results, console)


def _wait(apps: Apps, enough: Callable[[], bool]) -> float:
    """Wait until `enough` returns true, and return the seconds that took."""
    begun = time.monotonic()
    while not enough():
        if apps.ended(0.05):
            apps.wait()
            raise RuntimeError("the flow has ended")
        if time.monotonic() - begun > PATIENCE_S:
            raise TimeoutError(
                f"the flow is not protected after {PATIENCE_S:.0f} s: {apps.status()['view']}"
            )
    return time.monotonic() - begun


def _show(apps: Apps, console: Console, seconds: float) -> None:
    until = time.monotonic() + seconds
    watch(apps, console, lambda: time.monotonic() >= until)


def _kill_site(apps: Apps, console: Console) -> None:
    site = random.choice(apps.status()["sites"])
    usual = _gap_ms(apps)
    console.print(f"\n[bold]kill -9 of site {site['site']}[/] (process {site['pid']})")
    os.kill(site["pid"], signal.SIGKILL)
    _recovered(apps, console, usual, {site["site"]})


def _kill_driver(apps: Apps, console: Console) -> None:
    leader = apps.leader
    assert leader is not None
    usual, process = _gap_ms(apps), apps.processes[leader]
    below = tree(process.pid)
    killed = {s["site"] for s in apps.status()["sites"] if s["pid"] in below}
    console.print(
        f"\n[bold]kill -9 of the Spark driver of the leading application {leader}[/] "
        f"(process {process.pid}), with all its sites"
    )
    os.killpg(process.pid, signal.SIGKILL)
    _recovered(apps, console, usual, killed)


def _recovered(apps: Apps, console: Console, usual: float, killed: set[int]) -> None:
    """Wait for recovery; print how long the output paused, and how long recovery took."""
    begun, gaps = time.monotonic(), [0.0]

    def protected() -> bool:
        gaps.append(_gap_ms(apps))
        seen = {s["site"] for s in apps.status()["sites"]}
        return killed.isdisjoint(seen) and time.monotonic() - begun > 1.0 and apps.protected

    with console.status("recovering ..."):
        _wait(apps, protected)
    console.print(
        f"  the output paused for at most {max(gaps):.0f} ms (before: {usual:.0f} ms); "
        f"everything was protected again after {time.monotonic() - begun:.1f} s"
    )


def _gap_ms(apps: Apps) -> float:
    """Return the longest time between two deliveries during the last seconds."""
    sites = apps.status()["sites"]
    return max((s["output_gap_ms"] for s in sites if s["output_gap_ms"] is not None), default=0.0)


# --- the check ----------------------------------------------------------------------------------


def _check(packets: int, results: Path, console: Console) -> bool:
    console.print(f"\nAll results delivered. Checking {packets:,} packets with the batch job ...")
    spark = local_session("holdfast-demo-check", 2)
    try:
        delivered = spark.read.parquet(str(results))
        source = _packets(spark, packets)
        batch_flow = dmz_flow(spark_batch(source, order_by="n"), parquet(results))
        expected = batch_flow.batch(spark, {"packets": source}).select(*delivered.columns)
        of_flow, of_batch = _summary(delivered), _summary(expected)
        console.print(f"  flow:  {of_flow[0]:,} rows, checksum {of_flow[1]}")
        console.print(f"  batch: {of_batch[0]:,} rows, checksum {of_batch[1]}")
        same = of_flow == of_batch
        console.print(
            "[green]The results are the same.[/]" if same else "[red]The results differ![/]"
        )
        console.print("\nThe five worst sessions, from the parquet table:")
        for row in delivered.orderBy(F.desc("worst"), "app", "src").limit(5).collect():
            console.print(f"  app {row['app']}  src {row['src']:>4}  worst {row['worst']:,}")
        return same
    finally:
        spark.stop()


def _packets(spark: SparkSession, count: int) -> DataFrame:
    """Return the packets that the flow has processed, generated again by Spark; `n` numbers
    them."""
    make = DmzRows()

    def generate(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        for batch in batches:
            n = batch.column(0)
            packets = make(0, n[0].as_py(), batch.num_rows)
            columns = [packets.column(f.name).cast(f.type) for f in schema if f.name != "n"]
            yield pa.RecordBatch.from_arrays([*columns, n], schema=schema)

    # Spark has no binary type of a fixed length.
    fields = [pa.field(f.name, pa.binary()) if f.name == "payload" else f for f in SCHEMA]
    schema = pa.schema([*fields, ("n", pa.int64())])
    return spark.range(0, count, 1, 4).mapInArrow(generate, spark_schema(schema))


def _summary(df: DataFrame) -> tuple[int, int]:
    """Return the number of rows, and a checksum that does not depend on their order."""
    hashed = F.xxhash64(*df.columns).cast("decimal(38,0)")
    row = df.agg(F.count("*").alias("rows"), F.sum(hashed).alias("sum")).collect()[0]
    return int(row["rows"]), int(row["sum"] or 0)
