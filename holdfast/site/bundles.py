"""Bundles: all frames that one site sends to another in one epoch of an exchange.

Rows keep their sequence order within a bundle, so a consumer merges a few sorted runs. Which
partition a row is for follows from its key; the bundle carries the digest of each partition's
frame, and the receiver checks it.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

from holdfast.core.ids import SiteId
from holdfast.core.layout import Layout
from holdfast.errors import DivergenceError, ProtocolError
from holdfast.flow.batches import Track, empty, frame_digests, row_digests, take
from holdfast.flow.keys import key_words, partition_of
from holdfast.flow.plan import Exchange
from holdfast.site import wire


class Frames:
    """A bundle in memory."""

    __slots__ = ("batch", "digests", "track")

    def __init__(self, batch: pa.RecordBatch, track: Track, digests: np.ndarray | None) -> None:
        self.batch, self.track, self.digests = batch, track, digests

    @property
    def nbytes(self) -> int:
        return int(self.batch.nbytes)


class Router:
    """Splits the output of a stage by the sites that hold the consumer's partitions."""

    def __init__(self, exchange: Exchange, layout: Layout, digests: bool) -> None:
        self.exchange = exchange
        self._digests = digests
        self.sites = layout.sites_of(exchange.consumer)  # type: ignore[arg-type]
        homes = [copies[0] for copies in layout.sites[exchange.consumer]]
        self.partitions = len(homes)
        self._site_of = np.array([self.sites.index(home) for home in homes], np.uint16)
        self.partitions_at = [np.flatnonzero(self._site_of == i) for i in range(len(self.sites))]

    def partition(self, batch: pa.RecordBatch) -> np.ndarray:
        """The consumer partition of every row."""
        if self.exchange.keys is None:
            return np.zeros(batch.num_rows, np.uint16)
        return partition_of(
            key_words([batch.column(k) for k in self.exchange.keys]), self.partitions
        )

    def split(self, batch: pa.RecordBatch, track: Track) -> dict[SiteId, Frames]:
        """One bundle for each consumer site, an empty one where it gets no rows."""
        if batch.num_rows == 0:
            return {site: Frames(batch, track, None) for site in self.sites}
        if len(self.sites) == 1 and not self._digests:
            return {self.sites[0]: Frames(batch, track, None)}
        partition = self.partition(batch)
        digests = frame_digests(batch, partition, self.partitions) if self._digests else None
        bundles = {}
        for index, site in enumerate(self.sites):
            part = batch
            if len(self.sites) > 1:
                part = take(batch, np.flatnonzero(self._site_of[partition] == index))
            own = None if digests is None else digests[self.partitions_at[index]]
            bundles[site] = Frames(part, track, own)
        return bundles


class Checker:
    """Verifies the digests of the bundles that arrive at one site on one exchange."""

    def __init__(self, router: Router, site: SiteId, stage: str) -> None:
        self._router, self._stage = router, stage
        self._mine = router.partitions_at[router.sites.index(site)]

    def check(self, frames: Frames, epoch: int, producer: int) -> None:
        if frames.digests is None or frames.batch.num_rows == 0:
            return
        # Almost always right, and the sum over all partitions is cheaper to work out.
        total = frames.digests.sum(dtype=np.uint64)
        if row_digests(frames.batch).sum(dtype=np.uint64) == total:
            return
        found = frame_digests(
            frames.batch, self._router.partition(frames.batch), self._router.partitions
        )[self._mine]
        wrong = self._mine[found != frames.digests]
        if wrong.size:
            raise DivergenceError(
                f"stage {self._stage!r}, partition {wrong[0]}, epoch {epoch}: the frame from site "
                f"{producer} is not what its digest says"
            )


def encode(
    frames: Frames, exchange: int, epoch: int, last: bool
) -> tuple[wire.Bundle, list[object]]:
    """The message and the buffers of its body."""
    track = frames.track.to_bytes()
    digests = b"" if frames.digests is None else frames.digests.tobytes()
    rows = frames.batch.num_rows
    body: list[object] = [track, digests]
    if rows:
        body.append(frames.batch.serialize())
    return wire.Bundle(exchange, epoch, last, rows, len(track), len(digests)), body


def decode(message: wire.Bundle, body: memoryview, schema: pa.Schema) -> Frames:
    """The inverse of `encode`; the rows stay in the body, uncopied."""
    head = message.track + message.digests
    if head > body.nbytes or message.track % 16 or message.digests % 8 or message.track == 0:
        raise ProtocolError(f"bundle of exchange {message.exchange}: lengths do not fit the body")
    track = Track.from_bytes(body[: message.track])
    digests = np.frombuffer(body[message.track : head], np.uint64) if message.digests else None
    if message.rows == 0:
        return Frames(empty(schema), track, digests)
    try:
        batch = pa.ipc.read_record_batch(pa.py_buffer(body[head:]), schema)
        batch.validate()
    except (pa.ArrowException, OSError) as error:
        raise ProtocolError(f"bundle of exchange {message.exchange}: {error}") from error
    if batch.num_rows != message.rows:
        raise ProtocolError(f"bundle of exchange {message.exchange}: {batch.num_rows} rows")
    return Frames(batch, track, digests)
