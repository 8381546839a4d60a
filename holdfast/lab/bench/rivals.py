"""The workload of `holdfast.lab.workloads.dmz` in Structured Streaming, as a baseline for Holdfast.

There are three formulations, all pure PySpark, all exact. `packed` is the fastest we know: it packs
rows into one binary value per hash bucket as soon as they reach Python, so that neither the
exchanges nor the state API handle single rows. `bucketed` is what an expert would write: rows go
through the exchanges, and state is kept per hash bucket in numpy arrays. `plain` is what the
documentation shows: `transformWithState` with a value per key.

Spark's exchange does not keep the order of rows, so every stage sorts its rows by ``ts``, which
numbers them. The analyser of Spark 4.3 refuses two chained `applyInPandasWithState`, so the check
is switched off for them. That is safe here: the check guards watermarks and timeouts, and this flow
has neither.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
from pyspark.sql import Column, DataFrame, Row, SparkSession
from pyspark.sql import functions as F
from pyspark.sql.streaming import StatefulProcessor, StatefulProcessorHandle

from holdfast.lab.workloads.dmz import APPS, GROUPS, OUTPUT, SOURCES, as_hex, read_back
from holdfast.spark.session import provide_java

INPUT_DDL = "kind byte, src int, dst int, ts long, payload binary"
ENDED_DDL = "app int, src int, dur long, ts long"
OUTPUT_DDL = "app int, src int, worst long, typical double"
BLOB_DDL = "blob binary"
PACKED_DDL = f"bucket int, {BLOB_DDL}"

_STORES = {
    "memory": "org.apache.spark.sql.execution.streaming.state.HDFSBackedStateStoreProvider",
    "rocksdb": "org.apache.spark.sql.execution.streaming.state.RocksDBStateStoreProvider",
}
_LOW32 = (1 << 32) - 1


def session(cores: int = 2, memory: str = "4g") -> SparkSession:
    """Return a local session with the settings that were best for the rivals."""
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    provide_java()
    builder = SparkSession.Builder().master(f"local[{cores}]").appName("holdfast bench: rival")
    settings = {
        "spark.driver.memory": memory,
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.extraJavaOptions": "-XX:+UseParallelGC",  # for throughput, not short pauses
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # applyInPandasWithState pads its own frames in a way that pandas warns about.
        "spark.executorEnv.PYTHONWARNINGS": "ignore::FutureWarning",
    }
    for name, value in settings.items():
        builder = builder.config(name, value)
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("ERROR")
    return spark


def packed(
    spark: SparkSession,
    input_dir: str | os.PathLike[str],
    *,
    files_per_batch: int = 2,
    warmup: int = 5,
    partitions: int | None = None,
    store: str = "memory",
    to_parquet: bool = False,
) -> dict[str, Any]:
    """Measure rows that are packed by bucket before the first exchange, and stay packed between the
    stages.

    `dmz.write_parquet` has written `input_dir`. The first `warmup` batches are not measured.
    """
    buckets = partitions or spark.sparkContext.defaultParallelism
    with _settings(spark, buckets, store):
        stats = _packed(spark, input_dir, files_per_batch, buckets)
        return {"name": "packed", **_measure(stats, warmup, to_parquet)}


def serve(input_dir: str, checkpoint: str, output: str) -> None:
    """Run `packed` in this process until it is killed, with one file per batch, from the last
    checkpoint. The output is parquet; batches in ``_spark_metadata`` have been delivered."""
    spark = session()
    buckets = spark.sparkContext.defaultParallelism
    with _settings(spark, buckets, "memory"):
        writer = _packed(spark, input_dir, 1, buckets).writeStream.outputMode("append")
        writer = writer.option("checkpointLocation", checkpoint).format("parquet")
        writer.option("path", output).start().awaitTermination()


def _packed(
    spark: SparkSession, input_dir: str | os.PathLike[str], files_per_batch: int, buckets: int
) -> DataFrame:
    bucket = _bucket(spark, buckets)
    rows = _read(spark, input_dir, files_per_batch).mapInArrow(_packer(buckets), PACKED_DDL)
    ended = (
        # The JVM replaces the bucket's number, which also turns Arrow's rows into Spark's: an
        # exchange directly after mapInArrow fails with a ClassCastException.
        rows.withColumn("bucket", bucket(F.col("bucket")))
        .groupBy("bucket")
        .applyInPandasWithState(
            _packed_sessions(buckets), PACKED_DDL, BLOB_DDL, "append", "NoTimeout"
        )
    )
    return (
        ended.withColumn("bucket", bucket(F.col("bucket")))
        .groupBy("bucket")
        .applyInPandasWithState(_packed_last_two, BLOB_DDL, BLOB_DDL, "append", "NoTimeout")
        .mapInArrow(_unpack, OUTPUT_DDL)
    )


def bucketed(
    spark: SparkSession,
    input_dir: str | os.PathLike[str],
    *,
    files_per_batch: int = 2,
    warmup: int = 5,
    partitions: int | None = None,
    store: str = "memory",
    to_parquet: bool = False,
) -> dict[str, Any]:
    """Measure rows keyed by hash bucket, with one binary value of numpy arrays as the state of each
    bucket."""
    buckets = partitions or spark.sparkContext.defaultParallelism
    with _settings(spark, buckets, store):
        bucket = _bucket(spark, buckets)
        ended = (
            _read(spark, input_dir, files_per_batch)
            .withColumn("bucket", bucket(F.pmod(F.hash("src", "dst"), F.lit(buckets))))
            .groupBy("bucket")
            .applyInPandasWithState(_sessions, ENDED_DDL, BLOB_DDL, "append", "NoTimeout")
        )
        stats = (
            ended.withColumn("bucket", bucket(F.pmod(F.hash("app", "src"), F.lit(buckets))))
            .groupBy("bucket")
            .applyInPandasWithState(_last_two, OUTPUT_DDL, BLOB_DDL, "append", "NoTimeout")
        )
        return {"name": "bucketed", **_measure(stats, warmup, to_parquet)}


def plain(
    spark: SparkSession,
    input_dir: str | os.PathLike[str],
    *,
    files_per_batch: int = 1,
    warmup: int = 1,
    partitions: int | None = None,
    to_parquet: bool = False,
) -> dict[str, Any]:
    """Measure a state variable per key, as in Spark's guide. It is slow: pass about 10,000 rows.

    `transformWithState` imports the package protobuf, which PySpark does not install itself.
    """
    partitions = partitions or spark.sparkContext.defaultParallelism
    with _settings(spark, partitions, "rocksdb"):
        rows = _read(spark, input_dir, files_per_batch)
        ended = rows.groupBy("src", "dst").transformWithState(
            _PlainSessions(), ENDED_DDL, "append", "None"
        )
        stats = ended.groupBy("app", "src").transformWithState(
            _PlainLastTwo(), OUTPUT_DDL, "append", "None"
        )
        return {"name": "plain", **_measure(stats, warmup, to_parquet)}


# --- running and measuring -----------------------------------------------------------------------


@contextlib.contextmanager
def _settings(spark: SparkSession, partitions: int, store: str) -> Iterator[None]:
    """Apply the settings of the queries, and restore the previous ones afterwards."""
    wanted = {
        "spark.sql.shuffle.partitions": partitions,
        "spark.sql.execution.arrow.maxRecordsPerBatch": 1_000_000,  # one call per bucket
        "spark.sql.streaming.stateStore.providerClass": _STORES[store],
        "spark.sql.streaming.stateStore.rocksdb.changelogCheckpointing.enabled": "true",
        "spark.sql.streaming.unsupportedOperationCheck": "false",
        "spark.sql.streaming.noDataMicroBatches.enabled": "false",
        "spark.sql.streaming.numRecentProgressUpdates": 100_000,
    }
    before = {name: spark.conf.get(name, None) for name in wanted}
    for name, value in wanted.items():
        spark.conf.set(name, str(value))
    try:
        yield
    finally:
        for name, old in before.items():
            spark.conf.unset(name) if old is None else spark.conf.set(name, old)


def _read(
    spark: SparkSession, input_dir: str | os.PathLike[str], files_per_batch: int
) -> DataFrame:
    """Return the file stream without the payload, which no stage reads."""
    reader = spark.readStream.schema(INPUT_DDL).option("maxFilesPerTrigger", files_per_batch)
    return reader.parquet(str(input_dir)).select("kind", "src", "dst", "ts")


def _bucket(spark: SparkSession, buckets: int) -> Any:
    """Return a function from the bucket number to the key that represents the bucket.

    Spark hashes keys into partitions again, and two of two buckets often share one partition. The
    keys are therefore chosen so that each bucket gets a separate partition.
    """
    landing = F.pmod(F.hash(F.col("id").cast("int")), F.lit(buckets))
    key_of: dict[int, int] = {}
    for key, partition in spark.range(100 * buckets).select("id", landing).collect():
        key_of.setdefault(partition, key)
    keys = F.array(*[F.lit(key_of[i]).cast("int") for i in range(buckets)])
    return lambda number: F.element_at(keys, number + 1)


def _measure(stats: DataFrame, warmup: int, to_parquet: bool) -> dict[str, Any]:
    """Run the query over all its input and report the batches after the first `warmup`."""
    work = Path(tempfile.mkdtemp(prefix="holdfast-rival-"))
    try:
        # Observed metrics need no additional job, exchange or Python.
        writer = stats.observe("output", *_sums()).writeStream.outputMode("append")
        writer = writer.option("checkpointLocation", str(work / "checkpoint"))
        writer = writer.trigger(availableNow=True)
        if to_parquet:
            query = writer.format("parquet").option("path", str(work / "output")).start()
        else:
            query = writer.format("noop").start()
        query.awaitTermination()
        progress = [p for p in query.recentProgress if p.numInputRows]
        result = _steady(progress, warmup) | _output(progress)
        if to_parquet:
            written = read_back(work / "output")
            result |= {"output_rows": written["rows"], "digest": written["digest"]}
        return result
    finally:
        shutil.rmtree(work, ignore_errors=True)


def _sums() -> list[Column]:
    """Return count and checksum. The halves are summed separately because Spark's sum must not
    overflow."""
    hashed = F.xxhash64(*OUTPUT.names)
    return [
        F.count(F.lit(1)).alias("rows"),
        F.sum(hashed.bitwiseAND(F.lit(_LOW32))).alias("low"),
        F.sum(F.shiftrightunsigned(hashed, 32)).alias("high"),
    ]


def _steady(progress: list[Any], warmup: int) -> dict[str, Any]:
    if len(progress) <= warmup:
        raise ValueError(f"{len(progress)} batches are too few: the first {warmup} are warm-up")
    steady = progress[warmup:]
    rows = sum(p.numInputRows for p in steady)
    seconds = sum(p.durationMs["triggerExecution"] for p in steady) / 1e3
    return {
        "input_rows": sum(p.numInputRows for p in progress),
        "rows": rows,
        "seconds": seconds,
        "rows_per_s": rows / seconds,
        "batches": len(steady),
        "batch_rows": rows // len(steady),
        "batch_s": [p.durationMs["triggerExecution"] / 1e3 for p in progress],
    }


def _output(progress: list[Any]) -> dict[str, Any]:
    sums = [p.observedMetrics["output"] for p in progress]
    total = sum(((s.high or 0) << 32) + (s.low or 0) for s in sums)
    return {"output_rows": sum(s.rows for s in sums), "xxhash": as_hex(total)}


# --- the two stages on numpy arrays, for `bucketed` and `packed` ---------------------------------


def _close(
    word: np.ndarray, stamp: np.ndarray, state: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return key, end and duration of the sessions that end. The state is the open sessions.

    `word` holds (src, dst) in one number, `stamp` holds ``2 * ts + kind`` in one number.
    """
    if state.exists:
        opened = np.frombuffer(state.get[0], np.int64).reshape(2, -1)
        word, stamp = np.concatenate([opened[0], word]), np.concatenate([opened[1], stamp])
    # The rows consist of a few ascending runs, which makes the first of the two sorts cheap.
    order = np.argsort(stamp, kind="stable")
    order = order[np.argsort(word[order], kind="stable")]
    word, stamp = word[order], stamp[order]
    follows = np.zeros(word.size, bool)
    np.equal(word[1:], word[:-1], out=follows[1:])
    is_end = (stamp & 1).astype(bool)
    ends = np.flatnonzero(is_end & follows)
    ends = ends[~is_end[ends - 1]]
    still_open = ~is_end
    still_open[:-1] &= ~follows[1:]
    state.update((np.concatenate([word[still_open], stamp[still_open]]).tobytes(),))
    end = stamp[ends] >> 1
    return word[ends], end, end - (stamp[ends - 1] >> 1)


def _fold(
    group: np.ndarray, dur: np.ndarray, ts: np.ndarray, state: Any
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return group, maximum and mean of the last two durations. The state is the last duration of
    every group."""
    last = np.frombuffer(state.get[0], np.int64).copy() if state.exists else np.full(GROUPS, -1)
    order = np.argsort(ts, kind="stable")
    order = order[np.argsort(group[order].astype(np.uint16), kind="stable")]
    group, dur = group[order], dur[order]
    opens = np.ones(group.size, bool)
    np.not_equal(group[1:], group[:-1], out=opens[1:])
    before = np.where(opens, last[group], np.roll(dur, 1))
    closes = np.roll(opens, -1)
    last[group[closes]] = dur[closes]
    state.update((last.tobytes(),))
    return group, np.maximum(before, dur), np.where(before < 0, dur, (before + dur) / 2)


def _columns(frames: Iterable[pd.DataFrame], *names: str) -> list[np.ndarray]:
    parts = list(frames)
    return [np.concatenate([p[name].to_numpy() for p in parts]) for name in names]


def _sessions(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    kind, src, dst, ts = _columns(frames, "kind", "src", "dst", "ts")
    word, end, dur = _close((src.astype(np.int64) << 32) | dst, 2 * ts + kind, state)
    app = (word & _LOW32) % APPS
    yield pd.DataFrame({"app": app, "src": word >> 32, "dur": dur, "ts": end})


def _last_two(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    app, src, dur, ts = _columns(frames, "app", "src", "dur", "ts")
    group, worst, typical = _fold(app * SOURCES + src, dur, ts, state)
    app, src = np.divmod(group, SOURCES)
    yield pd.DataFrame({"app": app, "src": src, "worst": worst, "typical": typical})


# --- packing: the rows of a bucket as one binary value --------------------------------------------


def _pack(bucket: np.ndarray, buckets: int, *columns: np.ndarray) -> list[bytes]:
    """Return one value per bucket: its rows, column by column, as int64."""
    order = np.argsort(bucket, kind="stable")
    cuts = np.searchsorted(bucket[order], np.arange(buckets + 1))
    table = np.stack([c[order] for c in columns])
    return [table[:, a:b].tobytes() for a, b in itertools.pairwise(cuts)]


def _unpacked(frames: Iterable[pd.DataFrame], columns: int) -> np.ndarray:
    blobs = [blob for frame in frames for blob in frame["blob"]]
    return np.concatenate([np.frombuffer(b, np.int64).reshape(columns, -1) for b in blobs], axis=1)


def _packer(buckets: int) -> Any:
    def pack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        numbers = pa.array(np.arange(buckets, dtype=np.int32))
        for batch in batches:
            kind, src, dst, ts = (c.to_numpy() for c in batch.columns)
            word = (src.astype(np.int64) << 32) | dst
            mixed = (word.view(np.uint64) * np.uint64(0x9E3779B97F4A7C15)) >> np.uint64(33)
            bucket = (mixed % np.uint64(buckets)).astype(np.uint16)
            blobs = _pack(bucket, buckets, word, 2 * ts + kind)
            yield pa.record_batch({"bucket": numbers, "blob": pa.array(blobs, pa.binary())})

    return pack


def _packed_sessions(buckets: int) -> Any:
    def close(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
        word, stamp = _unpacked(frames, 2)
        word, end, dur = _close(word, stamp, state)
        group = (word & _LOW32) % APPS * SOURCES + (word >> 32)
        blobs = _pack((group % buckets).astype(np.uint16), buckets, group, dur, end)
        yield pd.DataFrame({"bucket": np.arange(buckets, dtype=np.int32), "blob": blobs})

    return close


def _packed_last_two(
    key: Any, frames: Iterator[pd.DataFrame], state: Any
) -> Iterator[pd.DataFrame]:
    group, dur, ts = _unpacked(frames, 3)
    group, worst, typical = _fold(group, dur, ts, state)
    yield pd.DataFrame({"blob": [np.stack([group, worst, typical.view(np.int64)]).tobytes()]})


def _unpack(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    for batch in batches:
        for blob in batch.column("blob"):
            group, worst, typical = np.frombuffer(blob.as_buffer(), np.int64).reshape(3, -1)
            app, src = np.divmod(group.astype(np.int32), np.int32(SOURCES))
            columns = [app, src, worst, typical.view(np.float64)]
            yield pa.RecordBatch.from_arrays([pa.array(c) for c in columns], schema=OUTPUT)


# --- a value per key ------------------------------------------------------------------------------


class _PlainSessions(StatefulProcessor):
    """Keeps the start of each open connection."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._started = handle.getValueState("started", "ts long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        for row in sorted(rows, key=lambda r: r.ts):
            if row.kind == 0:
                self._started.update((row.ts,))
            elif self._started.exists():
                (started,) = self._started.get()
                self._started.clear()
                yield Row(app=row.dst % APPS, src=row.src, dur=row.ts - started, ts=row.ts)


class _PlainLastTwo(StatefulProcessor):
    """Keeps the last duration of each group."""

    def init(self, handle: StatefulProcessorHandle) -> None:
        self._last = handle.getValueState("last", "dur long")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        last = self._last.get()
        held = [] if last is None else [last[0]]
        for row in sorted(rows, key=lambda r: r.ts):
            held = [*held, row.dur][-2:]
            yield Row(app=row.app, src=row.src, worst=max(held), typical=sum(held) / len(held))
        self._last.update((held[-1],))
