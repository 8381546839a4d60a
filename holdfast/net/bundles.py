"""Bundles: all frames that one partition group sends to another in one epoch of an exchange.

Rows keep their sequence order within a bundle, so a consumer merges a few sorted runs. Which
partition a row belongs to follows from its key. The bundle carries the digest of each partition's
frame, and the consumer checks the rows against it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.core.ids import GroupId
from holdfast.core.layout import PartitionGroup
from holdfast.core.messages import BundleKey
from holdfast.engine.batches import (
    Track,
    content_of,
    empty,
    frame_digests,
    from_ipc,
    row_digests,
    take,
    validate,
)
from holdfast.engine.keys import key_words, partition_of
from holdfast.errors import DivergenceError, ProtocolError
from holdfast.net import wire
from holdfast.plan.planner import Exchange


class Frames:
    """A bundle in memory."""

    def __init__(self, batch: pa.RecordBatch, track: Track, digests: np.ndarray | None) -> None:
        self.batch, self.track, self.digests = batch, track, digests
        self.spilled = False

    def put_aside(self, rows: pa.RecordBatch) -> None:
        """Replace the rows by the same rows outside of memory."""
        self.nbytes  # noqa: B018 (caches the size in memory)
        self.batch, self.spilled = rows, True

    @cached_property
    def nbytes(self) -> int:
        return int(self.batch.nbytes)

    @cached_property
    def checksum(self) -> int:
        """A checksum of the rows, by which the replicas of a producer are compared."""
        return 0 if self.digests is None else int(self.digests.sum(dtype=np.uint64))

    @cached_property
    def content(self) -> tuple[bytes, ...]:
        """The full content: equal exactly for equal frames."""
        digests = b"" if self.digests is None else self.digests.tobytes()
        return (self.track.to_bytes(), digests, *content_of(self.batch))


class Router:
    """Splits the output of a stage by the consumer's partition groups."""

    def __init__(self, exchange: Exchange, groups: Sequence[PartitionGroup], digests: bool) -> None:
        self.exchange = exchange
        self._digests = digests
        self.groups = groups
        self.partitions = groups[-1].end
        self._group_of = np.empty(self.partitions, np.uint16)
        for number, group in enumerate(groups):
            self._group_of[group.first : group.end] = number

    def partition(self, batch: pa.RecordBatch) -> np.ndarray:
        """The consumer partition of every row."""
        if self.exchange.keys is None:
            return np.zeros(batch.num_rows, np.uint16)
        return partition_of(
            key_words([batch.column(k) for k in self.exchange.keys]), self.partitions
        )

    def split(self, batch: pa.RecordBatch, track: Track) -> dict[GroupId, Frames]:
        """Return a bundle for each consumer partition group, also for groups without rows."""
        numbers = [GroupId(n) for n in range(len(self.groups))]
        if batch.num_rows == 0:
            return {n: Frames(batch, track, None) for n in numbers}
        if len(numbers) == 1 and not self._digests:
            return {numbers[0]: Frames(batch, track, None)}
        return self.split_epochs(batch, [track], np.zeros(batch.num_rows, np.uint8))[0]

    def split_epochs(
        self, batch: pa.RecordBatch, tracks: Sequence[Track], epoch_of: np.ndarray
    ) -> list[dict[GroupId, Frames]]:
        """Like `split`, for several epochs, given their tracks and the epoch of every row."""
        epochs, groups = len(tracks), len(self.groups)
        partition = self.partition(batch)
        # Sorting 16-bit numbers, where they suffice, is several times as fast as larger ones.
        epoch_of = epoch_of.astype(np.min_scalar_type(epochs * self.partitions))
        digests = None
        if self._digests:
            frame = epoch_of * self.partitions + partition
            digests = frame_digests(batch, frame, epochs * self.partitions)
        bundle = epoch_of * groups + self._group_of[partition]
        if epochs * groups > 1:
            batch = take(batch, np.argsort(bundle, kind="stable"))
        ends = np.cumsum(np.bincount(bundle, minlength=epochs * groups)).tolist()
        counts = np.bincount(epoch_of, minlength=epochs).tolist()
        split: list[dict[GroupId, Frames]] = [{} for _ in tracks]
        for at, (start, end) in enumerate(itertools.pairwise([0, *ends])):
            epoch, number = divmod(at, groups)
            first, beyond = self.groups[number].first, self.groups[number].end
            before = epoch * self.partitions
            own = None
            if digests is not None and counts[epoch]:
                own = digests[before + first : before + beyond]
            rows = batch.slice(start, end - start)
            split[epoch][GroupId(number)] = Frames(rows, tracks[epoch], own)
        return split


def check(frames: Sequence[Frames], merged: Sequence[pa.RecordBatch], where: str) -> None:
    """Raise `DivergenceError` if the merged rows do not match the digests of the frames."""
    filled = [f.digests for f in frames if f.batch.num_rows]
    digests = [d for d in filled if d is not None]
    if not digests or len(digests) < len(filled):
        return
    expected = np.concatenate(digests).sum(dtype=np.uint64)
    found = np.array([row_digests(b).sum(dtype=np.uint64) for b in merged]).sum(dtype=np.uint64)
    if found != expected:
        raise DivergenceError(
            f"{where}: the rows do not match the digests of their frames "
            f"({int(found):016x} instead of {int(expected):016x})"
        )


def encode(
    key: BundleKey, frames: Frames, pack: Callable[[Frames], list[Any]] | None = None
) -> tuple[wire.Bundle, list[Any]]:
    """Return the message and the buffers of its body: track, digests, and rows if any."""
    body = (pack or packed)(frames)
    return wire.Bundle(key, frames.batch.num_rows, len(body[0]), len(body[1])), body


@lru_cache(maxsize=1)  # a bundle is sent to all replicas of its consumer in succession
def packed(frames: Frames) -> list[Any]:
    """Return a bundle's body as buffers."""
    track = frames.track.to_bytes()
    digests = b"" if frames.digests is None else frames.digests.tobytes()
    rows = [frames.batch.serialize()] if frames.batch.num_rows else []
    return [track, digests, *rows]


@contextmanager
def _from_a_peer() -> Iterator[None]:
    """Turn Arrow's errors about a peer's rows into `ProtocolError`."""
    try:
        yield
    except (pa.ArrowException, OSError, EOFError) as error:
        raise ProtocolError(f"the rows are not an Arrow batch: {error}") from error


def rows_of(body: memoryview) -> pa.RecordBatch:
    """Decode rows that carry their schema (see `to_ipc`), without a copy."""
    if not body.nbytes:
        raise ProtocolError("the rows are not an Arrow batch: the body is empty")
    with _from_a_peer():
        batch = from_ipc(pa.py_buffer(body))
        validate(batch)
    return batch


def decode(message: wire.Bundle, body: memoryview, schema: pa.Schema) -> Frames:
    """The inverse of `encode`; the rows stay in the body, without a copy."""
    head = message.track + message.digests
    if head > body.nbytes or message.track % 16 or message.digests % 8 or message.track == 0:
        raise ProtocolError(
            f"bundle of exchange {message.key.exchange}: the lengths do not fit the body"
        )
    track = Track.from_bytes(body[: message.track])
    if not track.is_sound:
        raise ProtocolError(f"bundle of exchange {message.key.exchange}: the watermark goes back")
    digests = np.frombuffer(body[message.track : head], np.uint64) if message.digests else None
    if message.rows == 0:
        return Frames(empty(schema), track, digests)
    with _from_a_peer():
        batch = pa.ipc.read_record_batch(pa.py_buffer(body[head:]), schema)
        validate(batch)
    if batch.num_rows != message.rows:
        raise ProtocolError(
            f"bundle of exchange {message.key.exchange}: {batch.num_rows} rows, not {message.rows}"
        )
    if any(c.null_count and not f.nullable for c, f in zip(batch.columns, schema, strict=True)):
        raise ProtocolError(
            f"bundle of exchange {message.key.exchange}: nulls in a required column"
        )
    return Frames(batch, track, digests)
