"""``holdfast bench ends``: measures sources and sinks of Spark and Kafka, relative to Spark alone.

Input: files that a Spark stream reads, and a Kafka topic of JSON objects, through the DMZ flow into
parquet. Output: the results of a flow, which ``spark.readStream`` reads into parquet. As a baseline
Spark copies the same files into parquet and does nothing else. All are measured in one run. The
first micro-batch, which includes the start of the query, is never counted, and every result is
compared with the expected one. Without a broker's jars (``make test-integration`` downloads them)
Kafka is left out.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from rich.console import Console

from holdfast.connectors.kafka import kafka_source
from holdfast.connectors.outlet import outlet
from holdfast.connectors.parquet import parquet
from holdfast.control.run import Run
from holdfast.errors import InvariantError
from holdfast.lab.bench import rivals
from holdfast.lab.chaos import kafka
from holdfast.lab.workloads import dmz
from holdfast.spark.session import local_session
from holdfast.spark.sources import spark_stream
from holdfast.ui.report import Figure, show

SITES = 2
FILE_ROWS = 300_000
FILES_PER_BATCH = 2
FILLED_AT_ONCE = 50_000
TOPIC = "packets"
COLUMNS = ["kind", "src", "dst", "ts"]
JSON = '{"kind":%d,"src":%d,"dst":%d,"ts":%d}'


@dataclass(frozen=True, slots=True)
class _EndsSizes:
    rows: int
    repeats: int


def bench(quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Measure, print a table, and return the figures."""
    console = console or Console()
    sizes = _EndsSizes(3_000_000, 1) if quick else _EndsSizes(12_000_000, 3)
    work = Path(tempfile.mkdtemp(prefix="holdfast-bench-"))
    missing = kafka.unavailable()
    measured = {n: m for n, m in MEASURED.items() if n != "kafka_in" or missing is None}
    if missing is not None:
        console.print(f"Kafka is left out: {missing}")
    try:
        dmz.write_parquet(work / "input", sizes.rows, sizes.rows // FILE_ROWS)
        runs: dict[str, list[float]] = {}
        for repeat in range(sizes.repeats):
            console.print(f"repeat {repeat + 1} of {sizes.repeats}")
            for name, measure in measured.items():
                with _session() as spark:
                    rate = measure(spark, work, sizes)
                runs.setdefault(name, []).append(rate)
                console.print(f"  {name}: {rate:,.0f} rows/s")
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return _report(runs, console)


@contextmanager
def _session() -> Iterator[Any]:
    spark = local_session("holdfast bench", SITES + 2, **{"spark.ui.enabled": "false"})
    spark.conf.set("spark.sql.streaming.numRecentProgressUpdates", "1000")
    try:
        yield spark
    finally:
        spark.stop()


def _files(spark: Any, work: Path) -> Any:
    stream = spark.readStream.schema(rivals.INPUT_DDL)
    stream = stream.option("maxFilesPerTrigger", FILES_PER_BATCH)
    return stream.parquet(str(work / "input")).select(*COLUMNS)


def _copied(df: Any, work: Path, **trigger: Any) -> Any:
    """Start a query that writes parquet; return it and its output folder."""
    folder = Path(tempfile.mkdtemp(dir=work))
    writer = df.writeStream.format("parquet").option("checkpointLocation", str(folder / "at"))
    if trigger:
        writer = writer.trigger(**trigger)
    return writer.start(str(folder / "rows")), folder / "rows"


def _rate(query: Any) -> float:
    """Return the rows per second of all micro-batches but the first."""
    batches = [p for p in query.recentProgress if p["numInputRows"]][1:]
    if not batches:
        raise InvariantError("the query had only one micro-batch, so it has no rate to measure")
    rows = sum(p["numInputRows"] for p in batches)
    return float(rows / sum(p["durationMs"]["triggerExecution"] for p in batches) * 1e3)


def _passthrough(spark: Any, work: Path, sizes: _EndsSizes) -> float:
    query, folder = _copied(_files(spark, work), work, availableNow=True)
    query.awaitTermination()
    copied = spark.read.parquet(str(folder)).count()
    if copied != sizes.rows:
        raise InvariantError(f"Spark copied {copied} of {sizes.rows} rows")
    return _rate(query)


def _file_in(spark: Any, work: Path, sizes: _EndsSizes) -> float:
    source = spark_stream(_files(spark, work), order_by="ts", trigger={"availableNow": True})
    output = Path(tempfile.mkdtemp(dir=work)) / "alerts"
    run = dmz.dmz_flow(source, parquet(output)).start(spark, sites=SITES)
    rate = _taken(run, sizes.rows, FILES_PER_BATCH * FILE_ROWS)
    _check(dmz.read_back(output), sizes.rows)
    return rate


def _taken(run: Run, rows: int, warm_up: int) -> float:
    """Return the rows per second from the end of the warm-up to the end of the flow."""
    while run.status()["rows_in"] < warm_up:
        if run.ended(0.01):
            raise InvariantError("the flow ended before its warm-up")
    begun, before = time.monotonic(), run.status()["rows_in"]
    run.wait()
    return float((rows - before) / (time.monotonic() - begun))


def _readstream_out(spark: Any, work: Path, sizes: _EndsSizes) -> float:
    """Measure reading alone: the flow holds all its results before the query starts."""
    make = dmz.DmzRows()
    sink = outlet(unread_bytes_max=1 << 30)
    run = dmz.dmz_flow(make.source(rows=sizes.rows), sink).start(spark, sites=SITES)
    right = dmz.oracle(sizes.rows)
    while run.status()["rows_in"] < sizes.rows and not run.ended(0.05):
        pass
    source = spark.readStream.format("holdfast").option("flow", run.url).option("sink", "alerts")
    rows = max(1, int(right["rows"]) // 5)
    source = source.option("reader", "bench")
    df = source.option("maxRowsPerBatch", rows).option("partitions", SITES).load()
    query, folder = _copied(df, work)
    while not run.ended(0.05):
        if query.exception() is not None:
            raise InvariantError(f"the query failed: {query.exception()}")
    run.wait()
    query.stop()
    _check(dmz.read_back(folder), sizes.rows)
    return _rate(query)


def _check(result: dict[str, Any], rows: int, splits: int = 1) -> None:
    expected = dmz.oracle(rows, splits=splits)
    if result["digest"] != expected["digest"]:
        raise InvariantError(
            f"the result is wrong: {result['rows']} rows instead of the {expected['rows']} expected"
        )


def _kafka_in(spark: Any, work: Path, sizes: _EndsSizes) -> float:
    broker = kafka.Broker(Path(tempfile.mkdtemp(dir=work)))
    broker.start()
    try:
        rows = sizes.rows // 2 // SITES * SITES
        _fill(broker.servers, rows)
        used = pa.schema([dmz.SCHEMA.field(name) for name in COLUMNS])
        source = kafka_source(broker.servers, TOPIC, schema=used, end="latest")
        output = Path(tempfile.mkdtemp(dir=work)) / "alerts"
        run = dmz.dmz_flow(source, parquet(output)).start(spark, sites=SITES)
        rate = _taken(run, rows, FILE_ROWS)
        _check(dmz.read_back(output), rows, SITES)
    finally:
        broker.kill()
    return rate


def _fill(servers: str, rows: int) -> None:
    """Write the rows to a topic, one partition per split."""
    from confluent_kafka import Producer
    from confluent_kafka.admin import AdminClient, NewTopic

    admin = AdminClient({"bootstrap.servers": servers})
    admin.create_topics([NewTopic(TOPIC, SITES, 1)])[TOPIC].result()
    producer = Producer({"bootstrap.servers": servers, "linger.ms": 50, "acks": 1})
    make = dmz.DmzRows(splits=SITES)
    for split in range(SITES):
        for at in range(0, rows // SITES, FILLED_AT_ONCE):
            batch = make(split, at, min(FILLED_AT_ONCE, rows // SITES - at))
            for row in zip(*(batch.column(n).to_pylist() for n in COLUMNS), strict=True):
                producer.produce(TOPIC, JSON % row, partition=split)
            producer.flush()


MEASURED = {
    "spark_passthrough": _passthrough,
    "file_in": _file_in,
    "readstream_out": _readstream_out,
    "kafka_in": _kafka_in,
}


def _report(runs: dict[str, list[float]], console: Console) -> dict[str, Any]:
    figures = {name: Figure(tuple(values)) for name, values in runs.items()}
    alone = figures["spark_passthrough"].median
    rows = [
        (name.replace("_", " "), figure, f"{figure.median / alone:.2f}")
        for name, figure in figures.items()
    ]
    show("rows per second at Spark's ends", ("", "rows/s", "of Spark's copy"), rows, console)
    medians: dict[str, Any] = {f"{n}_rows_per_s": f.median for n, f in figures.items()}
    return medians | {"runs": {name: f.to_dict() for name, f in figures.items()}}
