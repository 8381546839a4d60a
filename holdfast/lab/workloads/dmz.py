"""The workload of all benchmarks: the network-monitoring flow (DMZ) of the papers, on fixed rows.

It follows section 3.4.4 of the Flux thesis. Each of 100,000 connections (src, dst) alternates start
and end rows; every round of 100,000 rows has each connection once, in a new random order. The rows
are a function of seed, split and offset alone, so all runs over the same number of rows have the
same correct result, which `oracle` computes without the engine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.connectors.sinks import Sink
from holdfast.connectors.sources import Generator, Source
from holdfast.engine.batches import row_digests
from holdfast.engine.expressions import col

SCHEMA = pa.schema(
    [
        ("kind", pa.int8()),  # 0 start, 1 end
        ("src", pa.int32()),
        ("dst", pa.int32()),
        ("ts", pa.int64()),
        ("payload", pa.binary(32)),
    ]
)
OUTPUT = pa.schema(
    [("app", pa.int32()), ("src", pa.int32()), ("worst", pa.int64()), ("typical", pa.float64())]
)
KEYS = 100_000
SEED = 816
APPS = 10
SOURCES = 1_000
GROUPS = APPS * SOURCES
"""Distinct keys (app, src) of stage 2."""

_PAYLOADS = 4_096


class DmzRows:
    """Generates the rows of the workload: ``DmzRows()(split, offset, count)``.

    Connection `p` belongs to the group ``p % GROUPS`` of stage 2, and a split owns whole groups.
    Both stages therefore see all rows of a key in the order of one split, and the result does not
    depend on how the splits interleave. `ts` numbers the rows; sorting by it restores the order
    that Spark loses.

    A round has only starts or only ends, so the flow gives no results half of the time. With
    `staggered`, half of the sources are a round ahead (their first ends have no start and give no
    result), so that every range of rows has results.

    >>> make = DmzRows(keys=20_000)
    >>> make(0, 15_000, 10_000).slice(5_000, 3).equals(make(0, 20_000, 3))
    True
    """

    def __init__(
        self, keys: int = KEYS, splits: int = 1, seed: int = SEED, staggered: bool = False
    ) -> None:
        if keys < 1 or splits < 1 or min(keys, GROUPS) < splits:
            raise ValueError(f"{splits} splits of {keys} keys: every split needs a key")
        self.keys, self.splits, self.seed, self.staggered = keys, splits, seed, staggered
        self._clear_caches()

    def __getstate__(self) -> tuple[int, int, int, bool]:
        return self.keys, self.splits, self.seed, self.staggered

    def __setstate__(self, state: tuple[int, int, int, bool]) -> None:
        self.keys, self.splits, self.seed, self.staggered = state
        self._clear_caches()

    def _clear_caches(self) -> None:
        self._pairs: dict[int, np.ndarray] = {}
        self._rounds: dict[int, tuple[int, np.ndarray]] = {}
        self._payload = np.zeros(0, np.uint8)

    def source(self, rows: int | None = None, rate: float | None = None) -> Source:
        """Return a source of these rows for ``flow.source``."""
        return Generator(self, SCHEMA, rows=rows, rate=rate, splits=self.splits)

    def pairs(self, split: int) -> np.ndarray:
        """Return the numbers of the connections that a split owns."""
        pairs = np.arange(self.keys)
        return pairs if self.splits == 1 else pairs[pairs % GROUPS % self.splits == split]

    def order(self, split: int, round_: int) -> np.ndarray:
        """Return the order of a round: the split's connection at each position."""
        bits = np.random.PCG64([self.seed, round_, split, self.splits])
        return np.random.Generator(bits).permutation(self._addresses(split).size)

    def _addresses(self, split: int) -> np.ndarray:
        """Return (src, dst) of the split's connections as one word each, so that one gather moves
        both."""
        if split not in self._pairs:
            src, dst = addresses(self.pairs(split))
            both = np.empty((src.size, 2), np.int32)
            both[:, 0], both[:, 1] = src, dst
            self._pairs[split] = both.view(np.int64)[:, 0]
        return self._pairs[split]

    def _round(self, split: int, round_: int) -> np.ndarray:
        """Return a round. The last one is cached, because readers read rounds in order."""
        kept = self._rounds.get(split)
        if kept is None or kept[0] != round_:
            shuffled = self._addresses(split)[self.order(split, round_)]
            kept = self._rounds[split] = (round_, shuffled.view(np.int32).reshape(-1, 2))
        return kept[1]

    def _payloads(self, offset: int, count: int) -> pa.Array:
        """Return a slice of an endlessly repeated table, without copying bytes."""
        start = offset % _PAYLOADS
        if self._payload.size < (start + count) * 32:
            table = np.random.default_rng(self.seed).integers(0, 256, _PAYLOADS * 32, np.uint8)
            self._payload = np.tile(table, -(-(start + count) // _PAYLOADS) + 1)
        data = pa.py_buffer(self._payload[start * 32 : (start + count) * 32])
        return pa.FixedSizeBinaryArray.from_buffers(pa.binary(32), count, [None, data])

    def __call__(self, split: int, offset: int, count: int) -> pa.RecordBatch:
        size = self._addresses(split).size
        kind = np.empty(count, np.int8)
        src, dst = np.empty(count, np.int32), np.empty(count, np.int32)
        done = 0
        while done < count:
            round_, start = divmod(offset + done, size)
            piece = self._round(split, round_)[start : start + count - done]
            to = slice(done, done + len(piece))
            kind[to] = (round_ + _ahead(piece[:, 0])) % 2 if self.staggered else round_ % 2
            src[to], dst[to] = piece[:, 0], piece[:, 1]
            done += len(piece)
        ts = np.arange(offset, offset + count) * self.splits + split
        arrays = [pa.array(column) for column in (kind, src, dst, ts)]
        return pa.RecordBatch.from_arrays([*arrays, self._payloads(offset, count)], schema=SCHEMA)


def addresses(pairs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return src and dst of connections. The dst of a source are scattered, like addresses."""
    src, app = pairs % SOURCES, pairs // SOURCES % APPS
    host = (pairs // GROUPS * 7_919 + src * 104_729) % 10_000_000
    return src.astype(np.int32), (host * APPS + app).astype(np.int32)


def _ahead(src: np.ndarray) -> np.ndarray:
    """Return by how many rounds staggered sources are ahead; in blocks, so that any split has
    both."""
    return src // 8 % 2


def dmz_flow(source: Source, sink: Sink, name: str = "dmz", clock: str | None = None) -> Flow:
    """Return the flow: durations of connections, then the worst and typical of a group's last two.

    With `clock`, a column of the source, every result also carries that column of the row that
    caused it.
    """
    flow = Flow(name)
    also = {} if clock is None else {clock: col(clock)}
    emit = {
        "app": col("dst") % APPS,
        "src": col("src"),
        "dur": col("ts") - F.at_start("ts"),
        **also,
    }
    sessions = (
        flow.source("packets", source)
        .key_by("src", "dst")
        .spans(start=col("kind") == 0, end=col("kind") == 1, emit=emit)
    )
    stats = sessions.key_by("app", "src").window(rows=2, every=1)
    newest = {name: F.last(name) for name in also}
    stats.agg(worst=F.max("dur"), typical=F.mean("dur"), **newest).sink("alerts", sink)
    return flow


def write_parquet(
    path: str | os.PathLike[str], rows: int, files: int, keys: int = KEYS, seed: int = SEED
) -> int:
    """Write the first `rows` rows as `files` files for a Spark file stream; return rows per file.

    A file stream reads files in the order of their modification times. They are set a second apart
    here, so that files written within one clock tick are not read in the wrong order.
    """
    folder = Path(path)
    folder.mkdir(parents=True, exist_ok=True)
    make, per_file = DmzRows(keys, 1, seed), -(-rows // files)
    for number, start in enumerate(range(0, rows, per_file)):
        batch = make(0, start, min(per_file, rows - start))
        file = folder / f"part-{number:05d}.parquet"
        pq.write_table(pa.Table.from_batches([batch]), file)
        os.utime(file, (1_700_000_000 + number, 1_700_000_000 + number))
    return per_file


def oracle(
    rows: int, keys: int = KEYS, splits: int = 1, seed: int = SEED, staggered: bool = False
) -> dict[str, Any]:
    """Return the expected result of the first `rows` rows, computed round by round without the
    engine.

    `rows` of the result is the number of output rows, `digest` is the digest that the sink
    `discard()` reports, and `xxhash` the sum of Spark's ``xxhash64(app, src, worst, typical)``.
    """
    count, digest, xxhash = 0, 0, 0
    for batch in answers(rows, keys, splits, seed, staggered):
        count += batch.num_rows
        digest += int(row_digests(batch).sum(dtype=np.uint64))
        xxhash += int(xxhash64(batch).sum(dtype=np.uint64))
    return {"rows": count, "digest": as_hex(digest), "xxhash": as_hex(xxhash)}


def read_back(path: str | os.PathLike[str]) -> dict[str, Any]:
    """Return count and digest, as in `oracle`, of the results in a folder of parquet files."""
    count, digest = 0, 0
    for file in sorted(Path(path).glob("*.parquet")):
        for batch in pq.ParquetFile(file).iter_batches(columns=OUTPUT.names):
            count += batch.num_rows
            digest += int(row_digests(batch).sum(dtype=np.uint64))
    return {"rows": count, "digest": as_hex(digest)}


def as_hex(total: int) -> str:
    """Return a sum of 64-bit words modulo 2**64, in the format of the sink `discard()`."""
    return f"{total % (1 << 64):016x}"


def answers(
    rows: int, keys: int = KEYS, splits: int = 1, seed: int = SEED, staggered: bool = False
) -> Iterator[pa.RecordBatch]:
    """Yield the output rows, a batch per round and split (`rows` is split as in `Generator`).

    This relies on properties of the rows: a connection occurs at most once in a round, and its rows
    alternate between start and end.
    """
    make, per_split = DmzRows(keys, splits, seed, staggered), -(-rows // splits)
    for split in range(splits):
        pairs = make.pairs(split)
        ahead = _ahead(addresses(pairs)[0]) if staggered else np.zeros(pairs.size, np.int32)
        began, last_dur = np.zeros(pairs.size, np.int64), np.full(GROUPS, -1)
        for first in range(0, per_split, pairs.size):
            round_ = first // pairs.size
            order = make.order(split, round_)[: per_split - first]
            ts = np.arange(first, first + order.size) * splits + split
            is_end = (round_ + ahead[order]) % 2 == 1
            began[order[~is_end]] = ts[~is_end]
            ends = order[is_end]
            if round_ > 0 and ends.size:
                yield _last_two(pairs[ends] % GROUPS, ts[is_end] - began[ends], last_dur)


def _last_two(group: np.ndarray, dur: np.ndarray, last: np.ndarray) -> pa.RecordBatch:
    """Return maximum and mean of each duration and its predecessor in its group; update `last`."""
    by_group = np.argsort(group.astype(np.uint16), kind="stable")
    group, dur = group[by_group], dur[by_group]
    opens = np.diff(group, prepend=-1) != 0
    before = np.where(opens, last[group], np.roll(dur, 1))
    alone = before < 0  # the group's first duration ever
    worst = np.maximum(before, dur)
    typical = np.where(alone, dur, (before + dur) / 2)
    closes = np.roll(opens, -1)
    last[group[closes]] = dur[closes]
    columns = group // SOURCES, group % SOURCES, worst, typical
    arrays = [pa.array(c, t) for c, t in zip(columns, OUTPUT.types, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=OUTPUT)


# --- Spark's xxhash64, for comparison with the hash that a query computes in the JVM -------------

_P1, _P2, _P3, _P4, _P5 = (
    np.uint64(p)
    for p in (
        0x9E3779B185EBCA87,
        0xC2B2AE3D27D4EB4F,
        0x165667B19E3779F9,
        0x85EBCA77C2B2AE63,
        0x27D4EB2F165667C5,
    )
)


def xxhash64(batch: pa.RecordBatch) -> np.ndarray:
    """Compute Spark's ``xxhash64(*columns)`` for int32, int64 and float64 without nulls."""
    hashed = np.full(batch.num_rows, 42, np.uint64)
    for column in batch.columns:
        word = column.to_numpy()
        if column.type == pa.int32():
            hashed += _P5 + np.uint64(4)
            hashed ^= word.view(np.uint32).astype(np.uint64) * _P1
            hashed = _rotate(hashed, 23) * _P2 + _P3
        else:
            hashed += _P5 + np.uint64(8)
            hashed ^= _rotate(word.view(np.uint64) * _P2, 31) * _P1
            hashed = _rotate(hashed, 27) * _P1 + _P4
        hashed = (hashed ^ (hashed >> np.uint64(33))) * _P2
        hashed = (hashed ^ (hashed >> np.uint64(29))) * _P3
        hashed ^= hashed >> np.uint64(32)
    return hashed


def _rotate(word: np.ndarray, bits: int) -> np.ndarray:
    return (word << np.uint64(bits)) | (word >> np.uint64(64 - bits))
