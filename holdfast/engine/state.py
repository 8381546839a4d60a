"""Keyed state: one table for all the partitions of an operator that a site holds.

A table consists of numpy columns indexed by slot, and a `KeyIndex` from key to slot. Numbers and
times are stored in the columns themselves. For all other types (text, lists, structs) a column
stores indexes into a `Heap`, which holds the values in Arrow format. The partition of a slot is
itself a column, so operators never see partitions, and the state of any partition can be extracted
and installed as an Arrow batch. Slots are grouped into chunks, and each chunk records the epoch of
its last change, for incremental extraction.

A table allocates memory before it changes anything: if an allocation fails, the table is
unchanged.

Code that writes to slots calls `touch` first. A `Snapshot` can therefore return the table as it was
at one moment while the table changes: the table saves rows to it before it overwrites them.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.engine.batches import as_array
from holdfast.engine.expressions import Column, unwrap
from holdfast.engine.keys import KeyIndex, KeyWords, partition_of
from holdfast.engine.snapshot import Snapshot
from holdfast.engine.state_rows import (
    CHUNK_BITS,
    NULL,
    Field,
    StateRows,
    distinct,
    rows_at,
    state_batch,
)

_UNBORN = np.iinfo(np.int64).max
_GARBAGE_MIN = 1 << 16
STANDBY = "standby"
"""The default reader of a table's changes: the standbys."""
_Where = np.ndarray | tuple[np.ndarray, np.ndarray]
"""Slots, and the positions within them if a key has several values."""


class StateTable:
    """State with one slot per key. Read ``table["name"][slots]``; call `touch` before writing."""

    def __init__(self, fields: Mapping[str, Field], partitions: int) -> None:
        self.fields = dict(fields)
        self.partitions = partitions
        self._born: np.ndarray | None = None
        self._touched: np.ndarray | None = None
        self._removed: dict[str, list[pa.RecordBatch]] = {}
        self.removals = 0
        """Keys removed so far."""
        self._reset(512)

    def _reset(self, capacity: int) -> None:
        self._snapshots: list[Snapshot] = []  # existing ones keep the old arrays
        self._capacity = capacity
        self._index = KeyIndex(capacity)
        self._low = np.zeros(capacity, np.int64)
        self._high = np.zeros(capacity, np.int64)
        self._part = np.zeros(capacity, np.uint16)
        self._dead = np.zeros(capacity, bool)
        self._dead_count = 0
        self._changed = np.full((capacity >> CHUNK_BITS) + 1, -1, np.int64)
        self._columns = {name: f.allocate(capacity) for name, f in self.fields.items()}
        self._null: dict[str, np.ndarray] = {}  # created with the first null of a column
        self._heaps = {name: f.new_heap() for name, f in self.fields.items() if not f.fixed}
        self._compacted = {name: heap.nbytes for name, heap in self._heaps.items()}
        if self._born is not None:
            self._born = np.full(capacity, _UNBORN)
        if self._touched is not None:
            self._touched = np.full(capacity, -1)

    def follow(self, *, births: bool, changes: Collection[str] = ()) -> None:
        """Start or stop tracking changes.

        `births` tracks the epoch in which each key's state began; existing keys count as epoch 0.
        `changes` names the readers of changes: for them the table tracks the epoch of each key's
        last change, and the keys removed since the reader's last snapshot.
        """
        born = self._born if births else None
        if births and born is None:
            born = np.full(self._capacity, _UNBORN)
            born[: self._index.size] = 0
        touched = self._touched if changes else None
        if changes and touched is None:
            touched = np.full(self._capacity, -1)
        self._born, self._touched = born, touched
        self._removed = {reader: self._removed.get(reader, []) for reader in changes}

    def oldest(self) -> int | None:
        """Return the epoch in which the oldest state began; None if there is no state or births
        are not tracked."""
        if self._born is None or not self.size:
            return None
        born = self._born[: self._index.size]
        oldest = int(born.min(where=~self._dead[: self._index.size], initial=_UNBORN))
        return None if oldest == _UNBORN else oldest

    def __getitem__(self, name: str) -> np.ndarray:
        """Return a column of numbers or times, indexed by slot. Columns of other types can be read
        and written in the same way as Python values, but `get` and `put` are faster."""
        return _Objects(self, name) if name in self._heaps else self._columns[name]  # type: ignore[return-value]

    @property
    def size(self) -> int:
        """The number of keys with state."""
        return self._index.size - self._dead_count

    @property
    def nbytes(self) -> int:
        own = (self._low, self._high, self._part, self._dead, self._changed)
        return (
            self._index.nbytes
            + sum(a.nbytes for a in own)
            + sum(a.nbytes for a in self._columns.values())
            + sum(h.nbytes for h in self._heaps.values())
        )

    @property
    def row_bytes(self) -> int:
        """The approximate size of a key's row in a snapshot, which is less than in the table."""
        sent = {n: a for n, a in self._arrays().items() if n != "__touched"}
        values = (h.nbytes // h.size * (self.fields[n].width or 1) for n, h in self._heaps.items())
        return 8 + sum(a[:1].nbytes for a in sent.values()) + sum(values)

    def live(self) -> np.ndarray:
        """Return all slots that hold state."""
        return np.flatnonzero(~self._dead[: self._index.size])

    def keys(self, slots: np.ndarray) -> list[tuple[int, int]]:
        """Return the words of these slots' keys as Python integers."""
        words = zip(self._low[slots].tolist(), self._high[slots].tolist(), strict=True)
        return list(words)

    def held(self) -> list[int]:
        """Return the partitions that hold state."""
        return np.unique(self._part[self.live()]).tolist()

    def slots(self, words: KeyWords, partition: np.ndarray | None = None) -> np.ndarray:
        """Return the slot of every row's key; new keys get new slots.

        The caller passes `partition` if the state is keyed by more than the partitioning key.
        """
        try:
            slots, rows = self._index.lookup(words)
            if rows.size:
                self._admit(words.take(rows), None if partition is None else partition[rows])
            if self._dead_count:
                self._revive(slots[self._dead[slots]])
            self._index.settle()
        except BaseException:
            self._index.undo()
            raise
        return slots

    def find(self, words: KeyWords) -> np.ndarray:
        """Return the slot of every row's key; -1 for keys without state."""
        slots = self._index.find(words)
        slots[self._dead[slots] & (slots >= 0)] = -1
        return slots

    def _revive(self, slots: np.ndarray) -> None:
        slots = distinct(slots)
        self._save(slots)
        for name, field in self.fields.items():
            self._columns[name][slots] = field.allocate(1)[0]
        for null in self._null.values():
            null[slots] = False
        if self._born is not None:
            self._born[slots] = _UNBORN
        self._dead[slots] = False
        self._dead_count -= slots.size

    def put(
        self, name: str, slots: np.ndarray, values: Column, at: np.ndarray | None = None
    ) -> None:
        """Store a column of any type, including nulls. If a slot occurs twice, its last value wins.
        `at` gives the position within each slot if a key has several values."""
        field = self.fields[name]
        where = slots if at is None else (slots, at)
        if field.fixed:
            self._write(name, where, *self._stored(name, values))
        else:
            self._put_on_heap(name, where, as_array(values, field.kind))

    def _stored(self, name: str, values: Column) -> tuple[np.ndarray, np.ndarray | None]:
        """Convert a column to its stored form, and return its null mask; allocate the column's
        null array if it gets its first null."""
        if name in self._heaps:
            return self._heaps[name].append(as_array(values, self.fields[name].kind)), None
        stored = self.fields[name].stored(values)
        if not (isinstance(values, pa.Array) and values.null_count > 0):
            return stored, None
        if name not in self._null:
            self._null[name] = np.zeros(self._columns[name].shape, bool)
        return stored, values.is_null().to_numpy(zero_copy_only=False)

    def _write(self, name: str, where: _Where, stored: np.ndarray, null: np.ndarray | None) -> None:
        self._columns[name][where] = stored
        if name in self._null:
            self._null[name][where] = False if null is None else null

    def _put_on_heap(self, name: str, where: _Where, values: pa.Array) -> None:
        column, heap = self._columns[name], self._heaps[name]
        before, at = column[where], where
        numbers = np.arange(heap.size, heap.size + len(values))
        try:
            column[where] = numbers
            wins = column[where] == numbers
            if not wins.all():  # a slot occurs twice: keep only its last value
                rows = np.flatnonzero(wins)
                values = values.take(pa.array(rows))
                at = where[rows] if isinstance(where, np.ndarray) else tuple(w[rows] for w in where)  # type: ignore[assignment]
            column[at] = heap.append(values)
        except BaseException:
            column[where] = before
            raise

    def get(self, name: str, slots: np.ndarray, at: np.ndarray | None = None) -> pa.Array:
        """Return the stored column as Arrow, including nulls."""
        where = slots if at is None else (slots, at)
        values = self._columns[name][where]
        if name in self._heaps:
            return self._heaps[name].take(values)
        null = self._null.get(name)
        return self.fields[name].loaded(values, None if null is None else null[where])

    def backup(self, slots: np.ndarray) -> dict[str, tuple[np.ndarray, np.ndarray | None]]:
        """Copy the contents of these slots, for `put_back` before the next `touch`."""
        return {
            name: (column[slots], self._null[name][slots] if name in self._null else None)
            for name, column in self._columns.items()
        }

    def put_back(
        self, slots: np.ndarray, held: Mapping[str, tuple[np.ndarray, np.ndarray | None]]
    ) -> None:
        """Undo the changes of these slots since `backup`."""
        for name, (values, null) in held.items():
            self._columns[name][slots] = values
            if name in self._null:
                self._null[name][slots] = False if null is None else null

    def _admit(self, words: KeyWords, partition: np.ndarray | None) -> None:
        size = self._index.size
        if partition is None:
            partition = partition_of(words, self.partitions)
        if size > self._capacity:
            self._enlarge(size)
        new = slice(size - words.low.size, size)
        self._low[new] = words.low
        self._high[new] = 0 if words.high is None else words.high
        self._part[new] = partition

    def _enlarge(self, least: int) -> None:
        """Enlarge all arrays. All are allocated before any is replaced."""
        capacity = self._capacity
        while capacity < least:
            capacity *= 2
        larger: dict[str, Any] = {
            name: _extended(getattr(self, name), capacity, 0)
            for name in ("_low", "_high", "_part", "_dead")
        }
        larger["_changed"] = _extended(self._changed, (capacity >> CHUNK_BITS) + 1, -1)
        if self._born is not None:
            larger["_born"] = _extended(self._born, capacity, _UNBORN)
        if self._touched is not None:
            larger["_touched"] = _extended(self._touched, capacity, -1)
        columns = {}
        for name, field in self.fields.items():
            columns[name] = field.allocate(capacity)
            columns[name][: self._capacity] = self._columns[name]
        nulls = {name: _extended(null, capacity, 0) for name, null in self._null.items()}
        larger |= {"_columns": columns, "_null": nulls, "_capacity": capacity}
        larger["_snapshots"] = []  # existing ones keep the old arrays
        vars(self).update(larger)

    def touch(self, slots: np.ndarray, epoch: int) -> None:
        """Record that these slots change in `epoch`. Call this before the first write."""
        self._save(slots)
        for name, heap in self._heaps.items():
            if heap.nbytes > 2 * self._compacted[name] + _GARBAGE_MIN:
                self._compact(name)
        self._changed[slots >> CHUNK_BITS] = epoch
        if self._born is not None:
            self._born[slots] = np.minimum(self._born[slots], epoch)
        if self._touched is not None:
            self._touched[slots] = epoch

    def _compact(self, name: str) -> None:
        """Drop replaced values from a heap. Snapshots keep the old indexes and values."""
        column, size = self._columns[name], self._index.size
        held = column > 0  # index 0 is the value of new keys
        held[size:] = False
        held[:size][self._dead[:size]] = False
        heap = self.fields[name].new_heap()
        numbers = np.zeros_like(column)
        numbers[held] = self._heaps[name].copied_into(heap, column[held])
        self._columns[name], self._heaps[name] = numbers, heap
        self._compacted[name] = heap.nbytes

    def renew(self, slots: np.ndarray, epoch: int) -> None:
        """Like `touch`, for slots whose old contents no longer count: their state now begins in
        `epoch`."""
        self.touch(slots, epoch)
        if self._born is not None:
            self._born[slots] = epoch

    def _save(self, slots: np.ndarray) -> None:
        for snapshot in self._snapshots:
            snapshot.save(slots)

    def snapshot(
        self,
        partitions: Iterable[int] | None = None,
        after: int | None = None,
        whose: str = STANDBY,
    ) -> Snapshot:
        """Return a snapshot of some partitions (by default all). With `after`, and if changes are
        tracked, the snapshot has only the rows changed after this epoch, which must be that of the
        last snapshot of the reader `whose`."""
        snapshot = Snapshot(self, partitions, after)
        self._snapshots.append(snapshot)
        if whose in self._removed:
            self._removed[whose] = []
        return snapshot

    def removed(self, whose: str = STANDBY) -> pa.RecordBatch:
        """Return the keys removed since the last snapshot of the reader `whose`. Some may exist
        again."""
        keys = pa.schema([("__low", pa.int64()), ("__high", pa.int64())])
        table = pa.Table.from_batches(self._removed.get(whose, []), keys).combine_chunks()
        (batch,) = table.to_batches() or [pa.RecordBatch.from_pylist([], keys)]
        return batch

    def take_out(self, keys: pa.RecordBatch) -> None:
        """Remove the keys that `removed` returned in another table."""
        high = keys.column("__high").to_numpy()
        slots = self.find(KeyWords(keys.column("__low").to_numpy(), high if high.any() else None))
        self.remove(slots[slots >= 0])

    def remove(self, slots: np.ndarray) -> None:
        """Remove the state of these slots. Slots returned before this call are invalid afterwards.

        The columns do not change until the slots are reused, so snapshots need no saved rows.
        """
        slots = distinct(slots)
        slots = slots[~self._dead[slots]]
        if self._touched is not None and slots.size:
            gone = pa.record_batch({"__low": self._low[slots], "__high": self._high[slots]})
            for removed in self._removed.values():
                removed.append(gone)
        self._dead[slots] = True
        self._dead_count += slots.size
        self.removals += slots.size
        if 2 * self._dead_count > max(self._index.size, 1024):
            self._restore(self.extract())

    def extract(
        self, partitions: Iterable[int] | None = None, since: int | None = None
    ) -> pa.RecordBatch:
        """Return the state of some partitions (by default all) as a batch; with `since`, only
        chunks that changed after that epoch."""
        slots = self.live()
        if partitions is not None:
            slots = slots[self._in(partitions, self._part[slots])]
        if since is not None:
            slots = slots[self._changed[slots >> CHUNK_BITS] > since]
        return state_batch(self.fields, self._heaps, rows_at(self._arrays(), self._changed, slots))

    def within(self, state: pa.RecordBatch, first: int, end: int) -> pa.RecordBatch:
        """Filter a result of `extract` for the partitions ``[first, end)``."""
        part = state.column("__part").to_numpy()
        return state.filter(pa.array((first <= part) & (part < end)))

    def _in(self, partitions: Iterable[int], part: np.ndarray) -> np.ndarray:
        wanted = np.zeros(self.partitions, bool)
        wanted[list(partitions)] = True
        return wanted[part]

    def _arrays(self) -> StateRows:
        own: StateRows = {"__low": self._low, "__high": self._high, "__part": self._part}
        nulls = {NULL + name: null for name, null in self._null.items()}
        followed = {"__born": self._born, "__touched": self._touched}
        own |= {name: array for name, array in followed.items() if array is not None}
        return {**own, **self._columns, **nulls}

    def install(self, state: pa.RecordBatch) -> None:
        """Install a result of `extract` of this or another table; existing keys are overwritten."""
        high = state.column("__high").to_numpy()
        words = KeyWords(state.column("__low").to_numpy(), high if high.any() else None)
        columns: dict[str, tuple[np.ndarray, np.ndarray | None]] = {}
        for name, field in self.fields.items():
            if field.width is None:
                columns[name] = self._stored(name, unwrap(state.column(name)))
                continue
            stored, null = self._stored(name, unwrap(state.column(name).flatten()))
            shape = (-1, field.width)
            columns[name] = stored.reshape(shape), None if null is None else null.reshape(shape)
        slots = self.slots(words, state.column("__part").to_numpy())
        self._save(slots)
        for name, (stored, null) in columns.items():
            self._write(name, slots, stored, null)
        np.maximum.at(self._changed, slots >> CHUNK_BITS, state.column("__changed").to_numpy())
        if self._born is not None:
            known = "__born" in state.schema.names
            self._born[slots] = state.column("__born").to_numpy() if known else 0
        if self._touched is not None and "__touched" in state.schema.names:
            self._touched[slots] = state.column("__touched").to_numpy()

    def drop(self, partitions: Iterable[int]) -> None:
        """Remove the state of some partitions, for example when they move to another site."""
        gone = set(partitions)
        self._restore(self.extract([p for p in range(self.partitions) if p not in gone]))

    def _restore(self, state: pa.RecordBatch) -> None:
        """Replace all state by this one, in arrays of a matching size."""
        restored = copy.copy(self)
        restored._reset(max(512, 1 << (state.num_rows - 1).bit_length() if state.num_rows else 512))
        restored.install(state)
        vars(self).update(vars(restored))


class _Objects:
    """A column stored in a heap, with the interface of a numpy array of Python values."""

    def __init__(self, table: StateTable, name: str) -> None:
        self._table, self._name = table, name

    def __getitem__(self, slots: Any) -> Any:
        if np.ndim(slots) == 0:
            return self._table.get(self._name, np.array([slots])).to_pylist()[0]
        held = self._table.get(self._name, np.asarray(slots)).to_pylist()
        objects = np.empty(len(held), object)
        objects[:] = held
        return objects

    def __setitem__(self, slots: Any, values: Any) -> None:
        if np.ndim(slots) == 0:
            slots, values = [slots], [values]
        kind = self._table.fields[self._name].kind
        self._table.put(self._name, np.asarray(slots), pa.array(list(values), kind))


def _extended(column: np.ndarray, size: int, fill: int) -> np.ndarray:
    longer = np.full((size, *column.shape[1:]), fill, column.dtype)
    longer[: len(column)] = column
    return longer
