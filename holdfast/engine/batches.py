"""Batches in the engine: user columns, followed by the columns of the order key.

The *order key* is a row's place in the recorded input order. It has the sequence number of the
input row (``__o0``) and, where one input row can produce several output rows, further columns that
distinguish these (``__o1``, ...). The plan determines the number of columns, not the data. An
ordered merge only compares order keys.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.engine.keys import _hash_column, mix, segment_sums

DECODE_ERROR = "__decode_error"
"""The column of decode errors: null, or the error and the row's text as a JSON array. A row with a
decode error is null in all other columns, and is handled like a row that a step raised on."""

_PREFIX = "__o"
_NULL_DIGEST = np.uint64(0x9AE16A3B2F90404F)
_ODD = np.uint64(0x9E3779B97F4A7C15)


def order_names(width: int) -> list[str]:
    return [f"{_PREFIX}{i}" for i in range(width)]


def is_order_name(name: str) -> bool:
    return name.startswith(_PREFIX)


def user_names(schema: pa.Schema) -> list[str]:
    """Return the names of the columns outside the order key."""
    return [n for n in schema.names if not is_order_name(n)]


def with_order(schema: pa.Schema, width: int) -> pa.Schema:
    """Return `schema` plus the columns of an order key of `width`."""
    return pa.schema([*schema, *(pa.field(n, pa.int64(), False) for n in order_names(width))])


def order_of(batch: pa.RecordBatch) -> list[np.ndarray]:
    """Return the columns of the order key, the most significant first."""
    return [batch.column(n).to_numpy() for n in batch.schema.names if is_order_name(n)]


def order_arrays(batch: pa.RecordBatch) -> list[pa.Array]:
    return [batch.column(n) for n in batch.schema.names if is_order_name(n)]


@lru_cache(maxsize=1024)
def empty(schema: pa.Schema) -> pa.RecordBatch:
    return pa.RecordBatch.from_arrays([pa.array([], f.type) for f in schema], schema=schema)


def take(batch: pa.RecordBatch, rows: np.ndarray) -> pa.RecordBatch:
    if rows.size == batch.num_rows and _is_range(rows):
        return batch
    return batch.take(pa.array(rows))


def _is_range(rows: np.ndarray) -> bool:
    return bool(rows.size == 0 or (rows[0] == 0 and np.all(rows[1:] > rows[:-1])))


def take_column(column: np.ndarray | pa.Array, rows: np.ndarray) -> np.ndarray | pa.Array:
    return column[rows] if isinstance(column, np.ndarray) else column.take(pa.array(rows))


def overlaid(column: pa.Array, where: np.ndarray, others: pa.Array) -> pa.Array:
    """Replace the rows of a column where `where` is true by `others`, in order. This uses `take`,
    which, unlike `if_else`, supports every type."""
    rows = np.arange(len(column))
    rows[where] = np.arange(len(column), len(column) + len(others))
    return pa.concat_arrays([column, others]).take(pa.array(rows))


def row_values(batch: pa.RecordBatch, at: int) -> dict[str, Any]:
    """Return a row as Python values, for messages. A time that Python cannot represent becomes a
    number."""
    row: dict[str, Any] = {}
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        try:
            row[name] = column[at].as_py()
        except (ValueError, OverflowError):
            plain = pa.types.is_temporal(column.type) and column.type.bit_width == 64
            cell = column.slice(at, 1)
            row[name] = (cell.view(pa.int64()) if plain else cell.cast(pa.string()))[0].as_py()
    return row


def concat(batches: Sequence[pa.RecordBatch]) -> pa.RecordBatch:
    return batches[0] if len(batches) == 1 else pa.concat_batches(batches)


def merge(batches: Iterable[pa.RecordBatch], schema: pa.Schema) -> pa.RecordBatch:
    """Return all rows of `batches`, sorted by order key."""
    filled = [b for b in batches if b.num_rows]
    if not filled:
        return empty(schema)
    return sort(concat(filled))


def sort(batch: pa.RecordBatch) -> pa.RecordBatch:
    order = order_of(batch)
    if len(order) == 1:
        rows = np.argsort(order[0], kind="stable")  # timsort: linear on a few sorted runs
    else:
        rows = np.lexsort(order[::-1])
    return take(batch, rows)


def build(columns: dict[str, object], schema: pa.Schema) -> pa.RecordBatch:
    """Create a batch of `schema` from numpy or Arrow columns; casts must be lossless."""
    return pa.RecordBatch.from_arrays(
        [as_array(columns[f.name], f.type) for f in schema], schema=schema
    )


def as_array(values: object, kind: pa.DataType) -> pa.Array:
    if isinstance(values, pa.ChunkedArray):
        values = values.combine_chunks()
    if not isinstance(values, pa.Array):
        return pa.array(values, kind)
    return values if values.type == kind else values.cast(kind)


def row_digests(batch: pa.RecordBatch) -> np.ndarray:
    """Return a 64-bit digest of each row; the digest of a frame is the sum of its rows' digests."""
    total = np.zeros(batch.num_rows, np.uint64)
    for position, column in enumerate(batch.columns):
        odd = np.uint64(0x9E3779B97F4A7C15 + 2 * position)
        total += np.multiply(_digest_words(column), odd, dtype=np.uint64, casting="unsafe")
    total ^= total >> np.uint64(32)
    total *= np.uint64(0xBF58476D1CE4E5B9)
    total ^= total >> np.uint64(29)
    return total


def _digest_words(column: pa.Array) -> np.ndarray:
    if pa.types.is_integer(column.type) or pa.types.is_float64(column.type):
        return _digest_numbers(column)
    if pa.types.is_nested(column.type):
        return _digest_nested(column)
    return _hash_column(column)[0]


def _digest_nested(column: pa.Array) -> np.ndarray:
    """Digest structs and lists from their items and the items' positions; null has a digest of its
    own."""
    if pa.types.is_struct(column.type):
        fields = [column.field(i) for i in range(column.type.num_fields)]
        total = _digest_together(fields, len(column))
    else:
        offsets, parts = _items(column)
        first, end = int(offsets[0]), int(offsets[-1])
        words = _digest_together([p.slice(first, end - first) for p in parts], end - first)
        lengths = np.diff(offsets)
        place = np.arange(first, end) - np.repeat(offsets[:-1], lengths)
        total = segment_sums(mix(words + place.astype(np.uint64) * _ODD), offsets)
        total = mix(total + lengths.astype(np.uint64))
    if column.null_count == 0:
        return total
    return np.where(column.is_null().to_numpy(zero_copy_only=False), _NULL_DIGEST, total)


def _digest_together(columns: Sequence[pa.Array], rows: int) -> np.ndarray:
    total = np.full(rows, _ODD)
    for column in columns:
        total = mix(total * _ODD + _digest_words(column).astype(np.uint64))
    return total


def _items(column: pa.Array) -> tuple[np.ndarray, list[pa.Array]]:
    """Return the offsets of lists or maps, and the columns of their items."""
    if pa.types.is_fixed_size_list(column.type):
        size = column.type.list_size
        return (column.offset + np.arange(len(column) + 1)) * size, [column.values]
    offsets = column.offsets.to_numpy().astype(np.int64)
    if pa.types.is_map(column.type):
        return offsets, [column.keys, column.items]
    return offsets, [column.values]


def _digest_numbers(column: pa.Array) -> np.ndarray:
    """Return the numbers themselves, and a fixed word for null: the digest of a row must not depend
    on nulls in other rows of its batch."""
    if column.null_count == 0:
        words = column.to_numpy()
        return words.view(np.uint64) if words.dtype.kind == "f" else words
    words = column.fill_null(0).to_numpy()
    words = words.view(np.uint64) if words.dtype.kind == "f" else words.astype(np.uint64)
    return np.where(column.is_null().to_numpy(zero_copy_only=False), _NULL_DIGEST, words)


def content_of(batch: pa.RecordBatch) -> tuple[bytes, ...]:
    """Return the rows as bytes, which are equal only for the same rows in the same order."""
    if batch.num_rows == 0:
        return ()
    plain = all(c.null_count == 0 and pa.types.is_primitive(c.type) for c in batch.columns)
    if not plain:
        return (to_ipc(concat([batch, batch.slice(0, 0)])).to_pybytes(),)
    return tuple(c.to_numpy(zero_copy_only=False).tobytes() for c in batch.columns)


def frame_digests(batch: pa.RecordBatch, partition: np.ndarray, partitions: int) -> np.ndarray:
    """Return the digest of each consumer partition's frame, given each row's partition."""
    digests = np.zeros(partitions, np.uint64)
    np.add.at(digests, partition, row_digests(batch))
    return digests


class Track:
    """The watermark during one epoch, as the steps that an operator can notice.

    ``marks[i]`` is the watermark from the row ``seqs[i]`` on (that row included); ``seqs[0]`` is
    below every row of the epoch and has the watermark at the start of the epoch. The ingress
    reduces the steps to those that cross a boundary of some event-time operator, so a track is
    short.
    """

    START = np.iinfo(np.int64).min
    NEVER = np.iinfo(np.int64).min
    END = np.iinfo(np.int64).max

    __slots__ = ("marks", "seqs")

    def __init__(self, seqs: np.ndarray, marks: np.ndarray) -> None:
        self.seqs, self.marks = seqs, marks

    @classmethod
    def flat(cls, mark: int) -> Track:
        """Return a track on which the watermark does not move."""
        return cls(np.array([cls.START]), np.array([mark]))

    @property
    def final(self) -> int:
        return int(self.marks[-1])

    @property
    def is_sound(self) -> bool:
        """Whether the track begins before all rows and the watermark only rises."""
        return bool(
            self.seqs[0] == self.START
            and np.all(self.seqs[1:] >= self.seqs[:-1])
            and np.all(self.marks[1:] > self.marks[:-1])
        )

    def before(self, seqs: np.ndarray) -> np.ndarray:
        """Return the watermark before each row, without the row's own time."""
        return self.marks[np.searchsorted(self.seqs, seqs, "left") - 1]

    def crossing(self, marks: np.ndarray) -> np.ndarray:
        """Return the sequence number at which the watermark reaches each of `marks`."""
        return self.seqs[np.searchsorted(self.marks, marks, "left")]

    def begun_at(self, seq: int) -> Track:
        """Return the same track for an epoch that follows others and begins with the row `seq`."""
        return Track(np.append(seq, self.seqs[1:]), self.marks)

    def split(self, seq: int) -> tuple[Track, Track]:
        """Split the track after the row `seq`."""
        at = int(np.searchsorted(self.seqs, seq, "right"))
        rest = np.concatenate([[self.START], self.seqs[at:]])
        return (
            Track(self.seqs[:at], self.marks[:at]),
            Track(rest, np.concatenate([self.marks[at - 1 : at], self.marks[at:]])),
        )

    @classmethod
    def merged(cls, tracks: Sequence[Track]) -> Track:
        """Merge the tracks of several ingresses, each of which has the steps of its own rows."""
        if len(tracks) <= 1:
            return tracks[0] if tracks else UNMOVED
        seqs = np.concatenate([t.seqs for t in tracks])
        marks = np.concatenate([t.marks for t in tracks])
        order = np.lexsort((marks, seqs))
        seqs, marks = seqs[order], np.maximum.accumulate(marks[order])
        keep = np.append(True, (marks[1:] > marks[:-1]) & (seqs[1:] > cls.START))
        return cls(seqs[keep], marks[keep])

    def to_bytes(self) -> bytes:
        return self.seqs.tobytes() + self.marks.tobytes()

    @classmethod
    def from_bytes(cls, data: bytes | memoryview) -> Track:
        seqs, marks = np.frombuffer(data, np.int64).reshape(2, -1)
        return cls(seqs, marks)


UNMOVED = Track.flat(Track.NEVER)
"""The track of a flow without event-time operators."""


def to_ipc(batch: pa.RecordBatch) -> pa.Buffer:
    """Encode a batch with its schema."""
    out = pa.BufferOutputStream()
    with pa.ipc.new_stream(out, batch.schema) as writer:
        writer.write_batch(batch)
    return out.getvalue()


def from_ipc(data: pa.Buffer | bytes) -> pa.RecordBatch:
    """Decode a batch of `to_ipc` without copying: the rows refer to `data`."""
    with pa.ipc.open_stream(data) as reader:
        return reader.read_next_batch()


def validate(batch: pa.RecordBatch) -> None:
    """Raise unless all values can be read safely: a wrong offset would read foreign memory. The
    values themselves are not checked: text that is not UTF-8 entered the flow that way."""
    batch.validate()
    for column in batch.columns:
        bare = _layout(column.type)
        if not pa.types.is_primitive(bare):
            column.view(bare).validate(full=True)


@lru_cache(maxsize=1024)
def _layout(kind: pa.DataType) -> pa.DataType:
    """Return a type with the same buffers for which every value is valid."""
    if pa.types.is_string(kind):
        return pa.binary()
    if pa.types.is_large_string(kind):
        return pa.large_binary()
    if pa.types.is_string_view(kind):
        return pa.binary_view()
    if pa.types.is_map(kind):
        return pa.map_(_layout(kind.key_type), _layout(kind.item_type))
    if pa.types.is_list(kind):
        return pa.list_(kind.value_field.with_type(_layout(kind.value_type)))
    if pa.types.is_large_list(kind):
        return pa.large_list(kind.value_field.with_type(_layout(kind.value_type)))
    if pa.types.is_struct(kind):
        return pa.struct([f.with_type(_layout(f.type)) for f in kind])
    if pa.types.is_temporal(kind) and kind.bit_width <= 64:
        return pa.int32() if kind.bit_width == 32 else pa.int64()
    if pa.types.is_decimal(kind):
        return pa.binary(kind.bit_width // 8)
    return kind


def cut(batch: pa.RecordBatch, nbytes_max: int) -> Iterator[pa.RecordBatch]:
    """Split a batch into batches of about `nbytes_max` at most, or of one row. Batches that share
    most of their bytes (a dictionary) are not split further."""
    waiting = [batch]
    while waiting:
        first = waiting.pop()
        half = first.num_rows // 2
        if first.nbytes <= nbytes_max or not half:
            yield first
            continue
        halves = [first.slice(half), first.slice(0, half)]
        if sum(h.nbytes for h in halves) > 1.5 * first.nbytes:
            yield first
        else:
            waiting += halves
