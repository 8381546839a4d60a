"""Keys: their identity, their partition, and the index from key to state slot.

A key of at most 64 bits of plain numbers is its own identity, packed into one word; a second word
has the null bits of its columns. A wider key, or one with strings, is identified by a 128-bit hash,
as git identifies files: two different keys would have to collide in both words. Hashes depend only
on the values, not on the process, the run or Python's hash seed, so all sites and Spark executors
assign a key to the same partition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_U = np.uint64
_GOLDEN, _MIX1, _MIX2 = _U(0x9E3779B97F4A7C15), _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)


class KeyWords(NamedTuple):
    """The identity of each row's key: one word, and a second one where needed."""

    low: np.ndarray
    high: np.ndarray | None

    def take(self, rows: np.ndarray) -> KeyWords:
        return KeyWords(self.low[rows], None if self.high is None else self.high[rows])


def key_words(columns: list[pa.Array]) -> KeyWords:
    """Return the identity of every row's key, given the key's columns."""
    if sum(_bits(c.type) for c in columns) <= 64:
        return _pack(columns)
    low = np.zeros(len(columns[0]), _U)
    high = np.full(len(columns[0]), _MIX2)
    for column in columns:
        h1, h2 = _hash_column(column)
        low = mix(low * _GOLDEN + h1)
        high = mix(high * _MIX1 + h2)
    return KeyWords(low.view(np.int64), high.view(np.int64))


def partition_of(words: KeyWords, partitions: int) -> np.ndarray:
    """Return the partition of every key, as uint16."""
    z = words.low.view(_U) * _GOLDEN
    if words.high is not None:
        # Without nulls the second word is zero, and the partition must be the same as without it.
        z ^= words.high.view(_U) * _MIX1
    z ^= z >> _U(31)
    z *= _MIX2
    z >>= _U(32)
    z *= _U(partitions)
    z >>= _U(32)
    return z.astype(np.uint16)


def mix(z: np.ndarray) -> np.ndarray:
    """Spread every bit of each word over the whole word (the finaliser of splitmix64)."""
    z = (z ^ (z >> _U(30))) * _MIX1
    z = (z ^ (z >> _U(27))) * _MIX2
    return z ^ (z >> _U(31))


def _bits(kind: pa.DataType) -> int:
    if pa.types.is_boolean(kind):
        return 1
    fixed = pa.types.is_integer(kind) or pa.types.is_temporal(kind) or pa.types.is_floating(kind)
    return int(kind.bit_width) if fixed else 65


def _pack(columns: list[pa.Array]) -> KeyWords:
    low, nulls = None, None
    for position, column in enumerate(columns):
        word = _plain_word(column)
        low = word if low is None else (low << _U(_bits(column.type))) | word
        if column.null_count:
            missing = pc.is_null(column).to_numpy(zero_copy_only=False).astype(np.int64)
            nulls = (missing << position) if nulls is None else nulls | (missing << position)
    assert low is not None
    return KeyWords(np.ascontiguousarray(low).view(np.int64), nulls)


def _plain_word(column: pa.Array) -> np.ndarray:
    """Return the bits of each number as an unsigned word; equal numbers have equal bits."""
    kind = column.type
    if pa.types.is_temporal(kind):
        column = column.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    if column.null_count:
        column = column.fill_null(pa.scalar(0, pa.int64()).cast(column.type))
    values = column.to_numpy(zero_copy_only=False)
    if pa.types.is_floating(kind):
        values = np.where(np.isnan(values), np.nan, values + 0.0).astype(values.dtype)
    width = values.dtype.itemsize
    return values.view(f"u{width}").astype(_U, copy=False)


_BYTES = (
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
    pa.types.is_binary_view,
)


def _hash_column(column: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    if _bits(column.type) <= 64:
        word = _plain_word(column)
        if column.null_count:
            missing = pc.is_null(column).to_numpy(zero_copy_only=False)
            return np.where(missing, _MIX2, mix(word)), np.where(missing, _MIX1, mix(~word))
        return mix(word), mix(~word)
    if pa.types.is_decimal(column.type) and column.type.bit_width < 128:
        # Arrow cannot dictionary-encode these; a wider type has the same number.
        column = column.cast(pa.decimal128(column.type.precision, column.type.scale))
    elif pa.types.is_interval(column.type):
        column = column.view(pa.binary(column.type.bit_width // 8))
    if not pa.types.is_dictionary(column.type):
        column = column.dictionary_encode()
    values = column.dictionary
    if not any(test(values.type) for test in _BYTES):
        values = values.cast(pa.large_string())
    values = values.cast(pa.large_binary())
    h1, h2 = _hash_binary(values)
    codes = column.indices.fill_null(len(values)).to_numpy(zero_copy_only=False)
    return np.append(h1, _MIX2)[codes], np.append(h2, _MIX1)[codes]


def _hash_binary(values: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Hash byte strings: the sum, over positions, of a well-mixed word of (byte, position)."""
    offsets = np.frombuffer(values.buffers()[1], np.int64)[values.offset :][: len(values) + 1]
    lengths = np.diff(offsets)
    data = np.frombuffer(values.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    position = np.arange(data.size, dtype=np.int64) - np.repeat(offsets[:-1] - offsets[0], lengths)
    word = (position.astype(_U) << _U(8)) | data.astype(_U)
    sums = [segment_sums(mix(word * m + s), offsets) for m, s in ((_GOLDEN, _MIX1), (_MIX1, _U(1)))]
    length = lengths.astype(_U)
    return mix(sums[0] + length), mix(sums[1] ^ (length * _GOLDEN))


def segment_sums(words: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return the sum of the words from each offset to the next."""
    total = np.concatenate([np.zeros(1, _U), np.cumsum(words, dtype=_U)])
    ends = offsets - offsets[0]
    return total[ends[1:]] - total[ends[:-1]]


class KeyIndex:
    """A hash table from key to slot (0, 1, 2, ...), looked up a whole column at a time.

    It uses open addressing with linear probing and is at most half full. Each round of probing is
    one numpy pass over the rows that are still unresolved; the first round resolves almost all.

    If the allocation for new keys fails, the index is unchanged.
    """

    def __init__(self, capacity: int = 512) -> None:
        self.size = 0
        self._bits = max(10, (2 * capacity - 1).bit_length())
        self._mask = (1 << self._bits) - 1
        self._low = np.zeros(1 << self._bits, np.int64)
        self._high: np.ndarray | None = None
        self._slot = np.full(1 << self._bits, -1, np.int32)
        self._begun: tuple[int, list[np.ndarray]] = (0, [])
        """What `undo` restores: the number of keys, and the places of the keys added since."""

    def _home(self, words: KeyWords) -> np.ndarray:
        z = words.low.view(_U) * _MIX1
        if words.high is not None:
            z ^= words.high.view(_U) * _MIX2
        z ^= z >> _U(29)
        z *= _GOLDEN
        z >>= _U(64 - self._bits)
        return z.view(np.int64)

    @property
    def nbytes(self) -> int:
        high = 0 if self._high is None else self._high.nbytes
        return self._low.nbytes + self._slot.nbytes + high

    def lookup(self, words: KeyWords) -> tuple[np.ndarray, np.ndarray]:
        """Return the slot of every row's key, and the rows with new keys, in slot order. `undo`
        removes the new keys until `settle` is called, which the next `lookup` does as well."""
        self.settle()
        try:
            while (result := self._lookup(words)) is None:
                pass  # the table grew: start again from the new home places
        except BaseException:
            self.undo()
            raise
        return result

    def settle(self) -> None:
        """Keep the new keys: `undo` no longer removes them."""
        self._begun = (self.size, [])

    def undo(self) -> None:
        """Remove the keys added since `settle`. They were added last, so no other key's probe
        sequence passes over them."""
        size, placed = self._begun
        for where in placed:
            self._slot[where] = -1
        self.size = size

    def _lookup(self, words: KeyWords) -> tuple[np.ndarray, np.ndarray] | None:
        """Like `lookup`; return None if there was no room and the table was enlarged."""
        if words.high is not None and self._high is None:
            self._high = np.zeros(self._mask + 1, np.int64)
        if self._high is not None and words.high is None:
            words = KeyWords(words.low, np.zeros(words.low.size, np.int64))
        at = self._home(words)
        slots = self._slot.take(at)
        hit = self._matches(at, words)
        hit &= slots >= 0
        if hit.all():
            return slots.astype(np.int64), _NO_ROWS
        new_rows: list[np.ndarray] = []
        pending = np.flatnonzero(~hit)
        while pending.size:
            extra = self._insert(pending, at, words, new_rows)
            if extra:
                self.undo()
                self._grow(extra)
                return None
            where = at[pending]
            found = self._slot[where]
            hit = self._matches(where, words.take(pending))
            hit &= found >= 0
            slots[pending[hit]] = found[hit]
            pending = pending[~hit]
            at[pending] = (at[pending] + 1) & self._mask
        rows = np.concatenate(new_rows) if new_rows else _NO_ROWS
        assert rows.size == self.size - self._begun[0]
        return slots.astype(np.int64), rows

    def find(self, words: KeyWords) -> np.ndarray:
        """Return the slot of every row's key; -1 for unknown keys."""
        if (words.high is None) != (self._high is None):
            zeros = np.zeros(words.low.size, np.int64)
            if self._high is not None:
                words = KeyWords(words.low, zeros)
            else:  # no known key has a second word
                known = words.high == 0 if words.high is not None else zeros == 0
                return np.where(known, self.find(KeyWords(words.low, None)), -1)
        at = self._home(words)
        slots = np.full(words.low.size, -1, np.int64)
        pending = np.arange(words.low.size)
        while pending.size:
            found = self._slot[at[pending]]
            hit = self._matches(at[pending], words.take(pending)) & (found >= 0)
            slots[pending[hit]] = found[hit]
            pending = pending[~hit & (found >= 0)]
            at[pending] = (at[pending] + 1) & self._mask
        return slots

    def _matches(self, at: np.ndarray, words: KeyWords) -> np.ndarray:
        same = self._low.take(at) == words.low
        if self._high is not None:
            same &= self._high.take(at) == words.high
        return same

    def _insert(
        self, pending: np.ndarray, at: np.ndarray, words: KeyWords, new_rows: list[np.ndarray]
    ) -> int:
        """Insert the keys of rows whose place is empty; the first row of each place wins. Return
        0, or, if there is no room, the number of keys to make room for beyond the settled ones."""
        where = at[pending]
        empty = self._slot[where] < 0
        if not empty.any():
            return 0
        rows, where = pending[empty], where[empty]
        if self.size + rows.size > (self._mask + 1) // 2:
            return int(self.size - self._begun[0] + rows.size)
        claim = -2 - np.arange(
            rows.size, dtype=np.int32
        )  # negative, so the place still counts as empty
        self._slot[where[::-1]] = claim[::-1]
        won = self._slot[where] == claim
        rows, where = rows[won], where[won]
        self._begun[1].append(where)
        self._place(where, words.take(rows), np.arange(self.size, self.size + rows.size))
        self.size += rows.size
        new_rows.append(rows)
        return 0

    def _place(self, where: np.ndarray, words: KeyWords, slots: np.ndarray) -> None:
        self._low[where] = words.low
        if self._high is not None:
            self._high[where] = words.high
        self._slot[where] = slots

    def _grow(self, extra: int) -> None:
        """Make room for `extra` more keys. All arrays are allocated before any is replaced."""
        bits = self._bits
        while self.size + extra > (1 << bits) // 2:
            bits += 1
        grown = KeyIndex(1 << (bits - 1))
        if self._high is not None:
            grown._high = np.zeros(1 << bits, np.int64)
        used = self._slot >= 0
        words = KeyWords(self._low[used], None if self._high is None else self._high[used])
        grown._fill(words, self._slot[used])
        grown.size = self.size
        grown.settle()
        vars(self).update(vars(grown))

    def _fill(self, words: KeyWords, slots: np.ndarray) -> None:
        """Insert distinct keys into an empty table that has room for them."""
        at = self._home(words)
        pending = np.arange(slots.size)
        while pending.size:
            free = pending[self._slot[at[pending]] < 0]
            self._place(at[free], words.take(free), slots[free])
            pending = pending[self._slot[at[pending]] != slots[pending]]
            at[pending] = (at[pending] + 1) & self._mask


_NO_ROWS = np.empty(0, np.int64)


def key_hash(words: KeyWords) -> np.ndarray:
    """Return a hash of each key, which orders results of different keys at the same row."""
    z = words.low.view(np.uint64).copy()
    if words.high is not None:
        z ^= mix(words.high.view(np.uint64))
    return mix(z).view(np.int64)
