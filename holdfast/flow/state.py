"""Keyed state: one table for all the partitions of an operator that a site holds.

A table is a set of numpy columns indexed by slot, and a `KeyIndex` from key to slot. The partition
of a slot is itself a column, so operators never see partitions, and the state of any of them can
be taken out and put in as an Arrow batch. Slots are grouped into chunks that know the epoch they
last changed in: increments, spilling and moves read that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.flow.expr import Column, is_plain, unwrap
from holdfast.flow.keys import KeyIndex, KeyWords, partition_of

CHUNK_BITS = 10


@dataclass(frozen=True)
class Field:
    """One column of state: its Arrow type, the value of a new key, and how many per key."""

    kind: pa.DataType
    fill: Any = 0
    width: int | None = None

    @cached_property
    def dtype(self) -> np.dtype:
        """How numpy stores it: numbers and times as numbers, everything else as objects."""
        if is_plain(self.kind):
            return np.dtype(self.kind.to_pandas_dtype())
        if pa.types.is_temporal(self.kind):
            return np.dtype(f"i{self.kind.bit_width // 8}")
        return np.dtype(object)

    def allocate(self, slots: int) -> np.ndarray:
        shape = (slots,) if self.width is None else (slots, self.width)
        fill = None if self.dtype == object and self.fill == 0 else self.fill
        return np.full(shape, fill, self.dtype)

    def stored(self, values: Column) -> np.ndarray:
        """A column in the form in which the state keeps it (nulls as any value)."""
        if isinstance(values, np.ndarray):
            return values
        if self.dtype == object:
            return values.to_numpy(zero_copy_only=False)
        if pa.types.is_temporal(self.kind):
            values = values.view(pa.from_numpy_dtype(self.dtype))
        return values.fill_null(False if pa.types.is_boolean(values.type) else 0).to_numpy(
            zero_copy_only=False
        )

    def loaded(self, values: np.ndarray, mask: np.ndarray | None) -> pa.Array:
        """The inverse of `stored`."""
        if self.dtype == object or is_plain(self.kind):
            return pa.array(values, self.kind, mask=mask, from_pandas=False)
        return pa.array(values, mask=mask).view(self.kind)


class StateTable:
    """State per key, a slot each. Read and write ``table["name"][slots]``, then `touch` them."""

    def __init__(self, fields: Mapping[str, Field], partitions: int) -> None:
        self.fields = dict(fields)
        self.partitions = partitions
        self._reset(512)

    def _reset(self, capacity: int) -> None:
        self._capacity = capacity
        self._index = KeyIndex(capacity)
        self._low = np.zeros(capacity, np.int64)
        self._high = np.zeros(capacity, np.int64)
        self._part = np.zeros(capacity, np.uint16)
        self._dead = np.zeros(capacity, bool)
        self._dead_count = 0
        self._changed = np.full((capacity >> CHUNK_BITS) + 1, -1, np.int64)
        self._columns = {name: f.allocate(capacity) for name, f in self.fields.items()}
        self._null: dict[str, np.ndarray] = {}  # made for a column when it gets its first null

    def __getitem__(self, name: str) -> np.ndarray:
        return self._columns[name]

    @property
    def size(self) -> int:
        """How many keys have state."""
        return self._index.size - self._dead_count

    @property
    def nbytes(self) -> int:
        own = (self._low, self._high, self._part, self._dead, self._changed)
        return (
            self._index.nbytes
            + sum(a.nbytes for a in own)
            + sum(a.nbytes for a in self._columns.values())
        )

    def live(self) -> np.ndarray:
        """All slots that hold state."""
        return np.flatnonzero(~self._dead[: self._index.size])

    def slots(self, words: KeyWords, partition: np.ndarray | None = None) -> np.ndarray:
        """The slot of every row's key; keys not seen before get fresh ones.

        `partition` is given where the state is keyed by more than the key that partitions it.
        """
        slots, rows = self._index.lookup(words)
        if rows.size:
            self._admit(words.take(rows), None if partition is None else partition[rows])
        if self._dead_count:
            self._revive(slots[self._dead[slots]])
        return slots

    def _revive(self, slots: np.ndarray) -> None:
        slots = np.unique(slots)
        for name, field in self.fields.items():
            self._columns[name][slots] = field.allocate(1)[0]
        for null in self._null.values():
            null[slots] = False
        self._dead[slots] = False
        self._dead_count -= slots.size

    def put(self, name: str, slots: np.ndarray, values: Column) -> None:
        """Store a column of any type, nulls included; of a slot named twice the last one stays."""
        self._columns[name][slots] = self.fields[name].stored(values)
        null: np.ndarray | bool = False
        if isinstance(values, pa.Array) and values.null_count > 0:
            null = values.is_null().to_numpy(zero_copy_only=False)
            if name not in self._null:
                self._null[name] = np.zeros(self._capacity, bool)
        if name in self._null:
            self._null[name][slots] = null

    def get(self, name: str, slots: np.ndarray) -> pa.Array:
        """The stored column as Arrow, nulls included."""
        null = self._null.get(name)
        values = self._columns[name][slots]
        return self.fields[name].loaded(values, None if null is None else null[slots])

    def backup(self, slots: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """What these slots hold, for `put_back`."""
        return {
            name: (column[slots], self._null[name][slots] if name in self._null else None)
            for name, column in self._columns.items()
        }

    def put_back(
        self, slots: np.ndarray, held: Mapping[str, tuple[np.ndarray, np.ndarray | None]]
    ) -> None:
        """Undo what was done to these slots since `backup`."""
        for name, (values, null) in held.items():
            self._columns[name][slots] = values
            if name in self._null:
                self._null[name][slots] = False if null is None else null

    def _admit(self, words: KeyWords, partition: np.ndarray | None) -> None:
        size = self._index.size
        if size > self._capacity:
            self._enlarge(size)
        new = slice(size - words.low.size, size)
        self._low[new] = words.low
        if words.high is not None:
            self._high[new] = words.high
        if partition is None:
            partition = partition_of(words, self.partitions)
        self._part[new] = partition

    def _enlarge(self, least: int) -> None:
        capacity = self._capacity
        while capacity < least:
            capacity *= 2
        for name in ("_low", "_high", "_part", "_dead"):
            setattr(self, name, _extended(getattr(self, name), capacity, 0))
        self._changed = _extended(self._changed, (capacity >> CHUNK_BITS) + 1, -1)
        for name, field in self.fields.items():
            column = field.allocate(capacity)
            column[: self._capacity] = self._columns[name]
            self._columns[name] = column
        for name, null in self._null.items():
            self._null[name] = _extended(null, capacity, 0)
        self._capacity = capacity

    def touch(self, slots: np.ndarray, epoch: int) -> None:
        """Say that these slots changed in `epoch`."""
        self._changed[slots >> CHUNK_BITS] = epoch

    def remove(self, slots: np.ndarray) -> None:
        """Forget the state of these slots. Slots handed out before are void afterwards."""
        slots = np.unique(slots)
        slots = slots[~self._dead[slots]]
        self._dead[slots] = True
        self._dead_count += slots.size
        if 2 * self._dead_count > max(self._index.size, 1024):
            self._restore(self.extract())

    def extract(
        self, partitions: Iterable[int] | None = None, since: int | None = None
    ) -> pa.RecordBatch:
        """The state of some partitions (all, by default) as a batch; `since`: only chunks that
        changed after that epoch."""
        slots = self.live()
        if partitions is not None:
            wanted = np.zeros(self.partitions, bool)
            wanted[list(partitions)] = True
            slots = slots[wanted[self._part[slots]]]
        if since is not None:
            slots = slots[self._changed[slots >> CHUNK_BITS] > since]
        arrays: dict[str, pa.Array] = {
            "__low": pa.array(self._low[slots]),
            "__high": pa.array(self._high[slots]),
            "__part": pa.array(self._part[slots]),
            "__changed": pa.array(self._changed[slots >> CHUNK_BITS]),
        }
        for name, field in self.fields.items():
            arrays[name] = (
                self.get(name, slots) if field.width is None else self._lists(name, slots)
            )
        return pa.RecordBatch.from_pydict(arrays)

    def _lists(self, name: str, slots: np.ndarray) -> pa.Array:
        field = self.fields[name]
        flat = field.loaded(self._columns[name][slots].reshape(-1), None)
        return pa.FixedSizeListArray.from_arrays(flat, field.width)

    def install(self, state: pa.RecordBatch) -> None:
        """Put in what `extract` gave, here or elsewhere; keys already present are overwritten."""
        high = state.column("__high").to_numpy()
        words = KeyWords(state.column("__low").to_numpy(), high if high.any() else None)
        slots = self.slots(words, state.column("__part").to_numpy())
        for name, field in self.fields.items():
            if field.width is None:
                self.put(name, slots, unwrap(state.column(name)))
            else:
                flat = field.stored(unwrap(state.column(name).flatten()))
                self._columns[name][slots] = flat.reshape(-1, field.width)
        np.maximum.at(self._changed, slots >> CHUNK_BITS, state.column("__changed").to_numpy())

    def drop(self, partitions: Iterable[int]) -> None:
        """Forget the state of some partitions, as when they move away."""
        gone = set(partitions)
        self._restore(self.extract([p for p in range(self.partitions) if p not in gone]))

    def _restore(self, state: pa.RecordBatch) -> None:
        self._reset(max(512, 1 << (state.num_rows - 1).bit_length() if state.num_rows else 512))
        self.install(state)


def _extended(column: np.ndarray, size: int, fill: int) -> np.ndarray:
    longer = np.full(size, fill, column.dtype)
    longer[: column.size] = column
    return longer
