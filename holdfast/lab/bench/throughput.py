"""``holdfast bench throughput``: measures the DMZ flow on Holdfast and in Structured Streaming.

Both process the same rows on the same machine in the same run, one after the other. The results of
both are compared with an oracle that uses neither engine. Holdfast's sites are Spark tasks.
"""

from __future__ import annotations

import shutil
import statistics
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.connectors.parquet import parquet
from holdfast.connectors.sinks import Sink, discard
from holdfast.connectors.sources import Generator, Source
from holdfast.control.run import Run
from holdfast.engine.expressions import col
from holdfast.errors import InvariantError
from holdfast.lab.bench import rivals
from holdfast.lab.bench.processes import PeakRss
from holdfast.lab.workloads import dmz
from holdfast.spark.session import local_session
from holdfast.spark.sources import spark_stream
from holdfast.ui.report import Figure, show

SITES = 2
RATIO_WANTED = 15.0


def bench(quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Measure, print a table, and return the figures."""
    console = console or Console()
    work = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    try:
        return _bench(_ThroughputSizes(quick), work, console)
    finally:
        shutil.rmtree(work, ignore_errors=True)


class _ThroughputSizes:
    """Amounts to measure: enough batches for each engine to reach its steady state."""

    def __init__(self, quick: bool) -> None:
        self.repeats = 1 if quick else 3
        self.holdfast_rows = 20_000_000 if quick else 40_000_000
        self.rival_rows = 6_000_000 if quick else 12_000_000
        self.plain_rows = 20_000 if quick else 40_000
        self.file_rows = 300_000
        self.latency_s = 6.0 if quick else 15.0
        self.latency_repeats = 3


def _bench(sizes: _ThroughputSizes, work: Path, console: Console) -> dict[str, Any]:
    files = sizes.rival_rows // sizes.file_rows
    dmz.write_parquet(work / "input", sizes.rival_rows, files)
    dmz.write_parquet(work / "plain", sizes.plain_rows, 4)
    runs: dict[str, list[float]] = {}
    peak = 0.0
    for repeat in range(sizes.repeats):
        console.print(f"repeat {repeat + 1} of {sizes.repeats}")
        with _session(_ours()) as spark, PeakRss() as memory:
            _note(runs, "holdfast", _holdfast(spark, sizes.holdfast_rows), console)
            _note(runs, "holdfast, Spark ends", _with_ends(spark, work, sizes), console)
        peak = max(peak, memory.peak_mb)
        with _session(rivals.session()) as spark:
            _note(runs, "spark, packed", _rival(rivals.packed, spark, work, sizes), console)
            _note(runs, "spark, bucketed", _rival(rivals.bucketed, spark, work, sizes), console)
            ends = _rival(rivals.packed, spark, work, sizes, to_parquet=True)
            _note(runs, "spark, packed, to parquet", ends, console)
            if repeat == 0:
                _note(runs, "spark, plain", _plain(spark, work, sizes), console)
    rate = statistics.median(runs["holdfast"]) / 4
    with _session(_ours()) as spark:
        seen = [_latency(spark, rate, sizes.latency_s) for _ in range(sizes.latency_repeats)]
    latency = {name: statistics.median(run[name] for run in seen) for name in seen[0]}
    return _report(runs, latency, rate, peak, console)


def _note(runs: dict[str, list[float]], name: str, rows_per_s: float, console: Console) -> None:
    runs.setdefault(name, []).append(rows_per_s)
    console.print(f"  {name}: {rows_per_s:,.0f} rows/s")


@contextmanager
def _session(spark: Any) -> Iterator[Any]:
    """Stop the session at the end, so that every measurement has a separate one."""
    try:
        yield spark
    finally:
        spark.stop()


def _ours() -> Any:
    return local_session("holdfast bench", SITES + 2, **{"spark.ui.enabled": "false"})


# --- Holdfast ------------------------------------------------------------------------------------


def _holdfast(spark: Any, rows: int) -> float:
    """Return rows per second with a generator in each site and a sink that counts and checksums."""
    make = dmz.DmzRows(splits=SITES)
    flow = dmz.dmz_flow(make.source(rows=rows), discard())
    run = flow.start(spark, sites=SITES)
    begun = time.monotonic()
    run.wait()
    seconds = time.monotonic() - begun
    _same(run.sink_report("alerts"), dmz.oracle(rows, splits=SITES), "digest")
    return rows / seconds


def _with_ends(spark: Any, work: Path, sizes: _ThroughputSizes) -> float:
    """Return rows per second when Spark's file stream pushes the rows and the sink writes parquet.

    Like the rival, the flow is measured after a warm-up: the first batch includes the query's
    start.
    """
    output = Path(tempfile.mkdtemp(dir=work)) / "alerts"
    stream = spark.readStream.schema(rivals.INPUT_DDL).option("maxFilesPerTrigger", 1)
    source = spark_stream(
        stream.parquet(str(work / "input")).select("kind", "src", "dst", "ts"),
        order_by="ts",
        trigger={"availableNow": True},
    )
    run = dmz.dmz_flow(source, parquet(output)).start(spark, sites=SITES)
    begun, skipped = _first_rows(run, 5 * sizes.file_rows)
    run.wait()
    seconds = time.monotonic() - begun
    _same(dmz.read_back(output), dmz.oracle(sizes.rival_rows), "digest")
    return (sizes.rival_rows - skipped) / seconds


def _first_rows(run: Run, rows: int) -> tuple[float, int]:
    """Wait until the flow has read `rows` rows, the same warm-up as the rival's; return the time
    and the number of rows."""
    while not run.ended(0):
        rows_in = run.status()["rows_in"]
        if rows_in >= rows:
            return time.monotonic(), rows_in
        time.sleep(0.01)
    raise InvariantError("the flow ended before its warm-up")


class _DueRows:
    """The DMZ rows with the time at which each is due, in microseconds since the Unix epoch.

    Latency counts from that time, so it includes the delay before the flow reads a row.
    """

    SCHEMA = pa.schema([*dmz.SCHEMA, ("due", pa.int64())])

    def __init__(self, rate: float) -> None:
        self._make = dmz.DmzRows(splits=SITES)
        self._rate_per_split = rate / SITES
        self._begun: dict[int, float] = {}

    def __call__(self, split: int, offset: int, count: int) -> pa.RecordBatch:
        first_due = time.time() - (offset + count) / self._rate_per_split
        begun = self._begun.setdefault(split, first_due)
        due = (begun + np.arange(offset, offset + count) / self._rate_per_split) * 1e6
        batch = self._make(split, offset, count)
        return pa.RecordBatch.from_arrays(
            [*batch.columns, pa.array(due.astype(np.int64))], schema=self.SCHEMA
        )


def _due_flow(source: Source, sink: Sink) -> Flow:
    """Return the DMZ flow; every result carries the due time of the row that caused it."""
    flow = Flow("dmz-latency")
    emit = {
        "app": col("dst") % dmz.APPS,
        "src": col("src"),
        "dur": col("ts") - F.at_start("ts"),
        "due": col("due"),
    }
    ended = flow.source("packets", source).key_by("src", "dst")
    sessions = ended.spans(start=col("kind") == 0, end=col("kind") == 1, emit=emit)
    stats = sessions.key_by("app", "src").window(rows=2, every=1)
    stats.agg(worst=F.max("dur"), typical=F.mean("dur"), due=F.max("due")).sink("alerts", sink)
    return flow


def _latency(spark: Any, rate: float, seconds: float) -> dict[str, float]:
    """Measure the time from when a row is due until its result is at the sink, at a fixed rate."""
    source = Generator(
        _DueRows(rate), _DueRows.SCHEMA, rows=int(rate * seconds), rate=rate, splits=SITES
    )
    run = _due_flow(source, discard(clock="due")).start(spark, sites=SITES)
    run.wait()
    return {k: v for k, v in run.sink_report("alerts").items() if k in ("p50_ms", "p99_ms")}


# --- Spark ---------------------------------------------------------------------------------------


def _rival(
    query: Any, spark: Any, work: Path, sizes: _ThroughputSizes, to_parquet: bool = False
) -> float:
    result = query(spark, work / "input", files_per_batch=1, warmup=5, to_parquet=to_parquet)
    expected = dmz.oracle(sizes.rival_rows)
    key = "digest" if to_parquet else "xxhash"
    _same({"rows": result["output_rows"], key: result[key]}, expected, key)
    return float(result["rows_per_s"])


def _plain(spark: Any, work: Path, sizes: _ThroughputSizes) -> float:
    result = rivals.plain(spark, work / "plain")
    expected = dmz.oracle(sizes.plain_rows)
    _same({"rows": result["output_rows"], "xxhash": result["xxhash"]}, expected, "xxhash")
    return float(result["rows_per_s"])


def _same(result: dict[str, Any], expected: dict[str, Any], key: str) -> None:
    """Raise unless the result is correct: the speed of a wrong result is worthless."""
    if (result["rows"], result[key]) != (expected["rows"], expected[key]):
        raise InvariantError(f"the result is wrong: {result} instead of {expected}")


def _report(
    runs: dict[str, list[float]],
    latency: dict[str, float],
    rate: float,
    peak: float,
    console: Console,
) -> dict[str, Any]:
    medians = {name: statistics.median(values) for name, values in runs.items()}
    fastest = max(medians["spark, packed"], medians["spark, bucketed"])
    show(
        "DMZ flow, 2 sites",
        ["engine", "rows/s"],
        [[name, Figure(tuple(values))] for name, values in runs.items()],
        console,
    )
    figures = {
        "holdfast_rows_per_s": medians["holdfast"],
        "spark_rows_per_s": fastest,
        "spark_bucketed_rows_per_s": medians["spark, bucketed"],
        "spark_plain_rows_per_s": medians["spark, plain"],
        "ratio": medians["holdfast"] / fastest,
        "ratio_to_bucketed": medians["holdfast"] / medians["spark, bucketed"],
        "ratio_with_spark_ends": medians["holdfast, Spark ends"]
        / medians["spark, packed, to parquet"],
        "holdfast_with_spark_ends_rows_per_s": medians["holdfast, Spark ends"],
        "latency_p50_ms": latency["p50_ms"],
        "latency_p99_ms": latency["p99_ms"],
        "latency_rate_rows_per_s": rate,
        "peak_rss_mb": peak,
        "runs": runs,
    }
    console.print(
        f"ratio {figures['ratio']:.1f} (wanted: {RATIO_WANTED:.0f}; to the bucketed formulation "
        f"{figures['ratio_to_bucketed']:.1f}; with Spark at both ends "
        f"{figures['ratio_with_spark_ends']:.1f})\n"
        f"latency at {rate:,.0f} rows/s: p50 {latency['p50_ms']:.1f} ms, "
        f"p99 {latency['p99_ms']:.1f} ms; peak memory {peak:,.0f} MB"
    )
    return figures
