"""Keys: their identity, their partition, and the table from key to state slot.

A key of up to 64 bits of plain numbers is its own identity, packed into one word (a second word
says which of its columns are null). Any wider key, or one with strings, is identified by 128 bits
of hash, as git identifies files: two different keys would have to collide in both words. Hashes
depend on the values alone, never on the process, the run or Python's hash seed, so every site and
every Spark executor puts a key into the same partition.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

_U = np.uint64
_GOLDEN, _MIX1, _MIX2 = _U(0x9E3779B97F4A7C15), _U(0xBF58476D1CE4E5B9), _U(0x94D049BB133111EB)


class KeyWords(NamedTuple):
    """The identity of each row's key: one word, and a second where it is needed."""

    low: np.ndarray
    high: np.ndarray | None

    def take(self, rows: np.ndarray) -> KeyWords:
        return KeyWords(self.low[rows], None if self.high is None else self.high[rows])


def key_words(columns: list[pa.Array]) -> KeyWords:
    """Identify the key of every row, given the key's columns."""
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
    """The partition of every key, as uint16."""
    z = words.low.view(_U) * _GOLDEN
    if words.high is not None:
        # A row without nulls has a zero second word and must land where it lands without one.
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
    """The bits of a number as an unsigned word; equal numbers have equal bits."""
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
        # There is no dictionary of these; the number is the same in a wider type.
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
    """The sum of the words from each offset to the next."""
    total = np.concatenate([np.zeros(1, _U), np.cumsum(words, dtype=_U)])
    ends = offsets - offsets[0]
    return total[ends[1:]] - total[ends[:-1]]


class KeyIndex:
    """A growing table from key to slot (0, 1, 2, ...), looked up a whole column at a time.

    Open addressing with linear probing, at most half full. Every round of probing is one numpy
    pass over the rows that are not yet settled; almost all settle in the first.

    If there is no memory for new keys, the index is as it was before.
    """

    def __init__(self, capacity: int = 512) -> None:
        self.size = 0
        self._bits = max(10, (2 * capacity - 1).bit_length())
        self._mask = (1 << self._bits) - 1
        self._low = np.zeros(1 << self._bits, np.int64)
        self._high: np.ndarray | None = None
        self._slot = np.full(1 << self._bits, -1, np.int32)
        self._begun: tuple[int, list[np.ndarray]] = (0, [])
        """What `undo` goes back to: how many keys there were, and where others are since."""

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
        """The slot of every row's key, and the rows that brought a new key, in slot order. Until
        `settle`, which the next call does, too, `undo` takes the new keys out again."""
        self.settle()
        try:
            while (found := self._lookup(words)) is None:
                pass  # the table grew; every row starts from its new home
        except BaseException:
            self.undo()
            raise
        return found

    def settle(self) -> None:
        """The keys that are new are there to stay."""
        self._begun = (self.size, [])

    def undo(self) -> None:
        """Take the keys out again that are not settled. They are the last that went in, so no
        other key's way to its place leads past them."""
        size, placed = self._begun
        for where in placed:
            self._slot[where] = -1
        self.size = size

    def _lookup(self, words: KeyWords) -> tuple[np.ndarray, np.ndarray] | None:
        """As `lookup`; None if there was no room, and the table has been made larger."""
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
        fresh: list[np.ndarray] = []
        pending = np.flatnonzero(~hit)
        while pending.size:
            extra = self._insert(pending, at, words, fresh)
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
        rows = np.concatenate(fresh) if fresh else _NO_ROWS
        assert rows.size == self.size - self._begun[0]
        return slots.astype(np.int64), rows

    def find(self, words: KeyWords) -> np.ndarray:
        """The slot of every row's key, -1 for one that has none."""
        if (words.high is None) != (self._high is None):
            zeros = np.zeros(words.low.size, np.int64)
            if self._high is not None:
                words = KeyWords(words.low, zeros)
            else:  # no key with a second word is there
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
        self, pending: np.ndarray, at: np.ndarray, words: KeyWords, fresh: list[np.ndarray]
    ) -> int:
        """Let rows that point at an empty place claim it; the first row of each place wins. If
        there is not enough room: for how many keys there must be in addition to settled ones."""
        where = at[pending]
        empty = self._slot[where] < 0
        if not empty.any():
            return 0
        rows, where = pending[empty], where[empty]
        if self.size + rows.size > (self._mask + 1) // 2:
            return int(self.size - self._begun[0] + rows.size)
        claim = -2 - np.arange(rows.size, dtype=np.int32)  # below 0, so the place stays empty
        self._slot[where[::-1]] = claim[::-1]
        won = self._slot[where] == claim
        rows, where = rows[won], where[won]
        self._begun[1].append(where)
        self._place(where, words.take(rows), np.arange(self.size, self.size + rows.size))
        self.size += rows.size
        fresh.append(rows)
        return 0

    def _place(self, where: np.ndarray, words: KeyWords, slots: np.ndarray) -> None:
        self._low[where] = words.low
        if self._high is not None:
            self._high[where] = words.high
        self._slot[where] = slots

    def _grow(self, extra: int) -> None:
        """Make room for so many more keys. All of it is made before any of it is used."""
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
        """Put different keys into an empty table that has room for them."""
        at = self._home(words)
        pending = np.arange(slots.size)
        while pending.size:
            free = pending[self._slot[at[pending]] < 0]
            self._place(at[free], words.take(free), slots[free])
            pending = pending[self._slot[at[pending]] != slots[pending]]
            at[pending] = (at[pending] + 1) & self._mask


_NO_ROWS = np.empty(0, np.int64)


def key_hash(words: KeyWords) -> np.ndarray:
    """What orders the results of different keys that stand at the same row."""
    z = words.low.view(np.uint64).copy()
    if words.high is not None:
        z ^= mix(words.high.view(np.uint64))
    return mix(z).view(np.int64)
