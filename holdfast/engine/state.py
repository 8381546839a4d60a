"""Keyed state: one table for all the partitions of an operator that a site holds.

A table consists of numpy columns indexed by slot, and a `KeyIndex` from key to slot. Numbers and
times are stored in the columns themselves. For all other types (text, lists, structs) a column
stores indexes into a `Heap`, which holds the values in Arrow format. The partition of a slot is
itself a column, so operators never see partitions, and the state of any partition can be extracted
and installed as an Arrow batch. Slots are grouped into chunks, and each chunk records the epoch of
its last change, for incremental extraction.

A table allocates memory before it changes anything: if an allocation fails, the table is
unchanged.

No call takes much longer than its rows do. The columns of a large table are in reserved memory, so
they grow without being copied, and the index is rebuilt in slices (`KeyIndex.advance`). Removed
keys keep their slots at first; `tidy` and `remove` then move rows from the last slots into those
slots, in slices, and give the memory of the last slots back.

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
from holdfast.engine.compaction import close_up, shrink
from holdfast.engine.expressions import Column, unwrap
from holdfast.engine.keys import ADVANCE, KeyIndex, KeyWords, partition_of
from holdfast.engine.reserve import reserve, rows_reserved
from holdfast.engine.snapshot import Snapshot
from holdfast.engine.state_rows import (
    CHUNK_BITS,
    NULL,
    SMALL,
    Field,
    StateRows,
    distinct,
    rows_at,
    state_batch,
)

_UNBORN = np.iinfo(np.int64).max
_GARBAGE_MIN = 1 << 16
SLICE = 1 << 13
"""Slots that a call tidies at least, if there is something to tidy."""
_DEAD_MIN = 1 << 10
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
        self._snapshots: list[Snapshot] = []
        self._capacity = 512
        self._is_reserved = False
        self._index = KeyIndex(self._capacity)
        self._low = np.zeros(self._capacity, np.int64)
        self._high = np.zeros(self._capacity, np.int64)
        self._part = np.zeros(self._capacity, np.uint16)
        self._dead = np.zeros(self._capacity, bool)
        self._dead_count = 0
        self._dead_from = 0
        """No slot before this one is dead."""
        self._reclaim = 0
        """Dead slots that `tidy` has to reuse or give back."""
        self._provided = 0
        """Slots of reserved columns that may have memory."""
        self._changed = np.full((self._capacity >> CHUNK_BITS) + 1, -1, np.int64)
        self._columns = {name: self._zeros(f.shape, f.dtype) for name, f in self.fields.items()}
        self._fills = {name: f.allocate(1)[0] for name, f in self.fields.items()}
        self._null: dict[str, np.ndarray] = {}  # created with the first null of a column
        self._heaps = {name: f.new_heap() for name, f in self.fields.items() if not f.fixed}
        self._compacted = {name: heap.nbytes for name, heap in self._heaps.items()}

    def _zeros(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """Return an array of zeros with a row of this shape for each slot."""
        make = reserve if self._is_reserved else np.zeros
        return make((self._capacity, *shape), np.dtype(dtype))

    def follow(self, *, births: bool, changes: Collection[str] = ()) -> None:
        """Start or stop tracking changes.

        `births` tracks the epoch in which each key's state began; existing keys count as epoch 0.
        `changes` names the readers of changes: for them the table tracks the epoch of each key's
        last change, and the keys removed since the reader's last snapshot.
        """
        born = self._born if births else None
        if births and born is None:
            born = self._zeros((), np.dtype(np.int64))
        touched = self._touched if changes else None
        if changes and touched is None:
            touched = self._zeros((), np.dtype(np.int64))
            touched[: self._index.size] = -1
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
        rows = self._provided if self._is_reserved else self._capacity
        own: list[np.ndarray] = [
            self._low,
            self._high,
            self._part,
            self._dead,
            *self._columns.values(),
        ]
        return (
            self._index.nbytes
            + self._changed.nbytes
            + sum(a[:rows].nbytes for a in own)
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
            if rows.size or self._index.is_rebuilding:
                self._index.advance(self._low, self._high, SLICE + ADVANCE * rows.size)
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
        self._begin(slots)
        self._dead_count -= slots.size

    def _begin(self, slots: np.ndarray | slice) -> None:
        """Give these slots the state of new keys."""
        for name, column in self._columns.items():
            column[slots] = self._fills[name]
        for null in self._null.values():
            null[slots] = False
        if self._born is not None:
            self._born[slots] = _UNBORN
        self._dead[slots] = False

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
            self._null[name] = self._zeros(self.fields[name].shape, np.dtype(bool))
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
        if size >> CHUNK_BITS >= self._changed.size:
            new_chunks = np.full((size >> CHUNK_BITS) + 1, -1, np.int64)
            self._changed = np.concatenate([self._changed, new_chunks])
        new = slice(size - words.low.size, size)
        self._low[new] = words.low
        self._high[new] = 0 if words.high is None else words.high
        self._part[new] = partition
        if self._touched is not None:
            self._touched[new] = -1
        self._begin(new)
        self._provided = max(self._provided, size)

    def _enlarge(self, least: int) -> None:
        """Enlarge all arrays, into reserved memory if they are large."""
        if least > SMALL:
            rows = rows_reserved(sum(a[:1].nbytes for a in self._arrays().values()) + 1)
            try:
                if rows >= 4 * least:
                    return self._move_into(rows, reserved=True)
            except OSError:
                pass  # the system refuses reservations
        self._move_into(1 << (least - 1).bit_length(), reserved=False)

    def _move_into(self, capacity: int, *, reserved: bool) -> None:
        """Copy all arrays into others. All are allocated before any is replaced."""
        moved = copy.copy(self)
        moved._capacity, moved._is_reserved = capacity, reserved
        moved._snapshots = []  # existing ones keep the old arrays
        rows = min(self._capacity, capacity, max(self._provided, self._index.size))

        def copied(array: np.ndarray) -> np.ndarray:
            other = moved._zeros(array.shape[1:], array.dtype)
            other[:rows] = array[:rows]
            return other

        for name in ("_low", "_high", "_part", "_dead", "_born", "_touched"):
            if (array := getattr(self, name)) is not None:
                setattr(moved, name, copied(array))
        moved._columns = {name: copied(column) for name, column in self._columns.items()}
        moved._null = {name: copied(null) for name, null in self._null.items()}
        vars(self).update(vars(moved))

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
        size = self._index.size
        column = self._columns[name][:size]
        held = column > 0  # index 0 is the value of new keys
        held[self._dead[:size]] = False
        heap = self.fields[name].new_heap()
        numbers = self._zeros(column.shape[1:], column.dtype)
        numbers[:size][held] = self._heaps[name].copied_into(heap, column[held])
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
        self._bury(slots)
        self.removals += slots.size
        if 2 * self._dead_count > max(self._index.size, _DEAD_MIN):
            self._reclaim = self._dead_count
        if self._reclaim:
            self._tidy(max(SLICE, 4 * slots.size))

    def _bury(self, slots: np.ndarray) -> None:
        """Mark these slots, which are distinct, ascending and live, as dead."""
        if slots.size:
            self._dead_from = min(self._dead_from, int(slots[0]))
            self._dead[slots] = True
            self._dead_count += slots.size

    def extract(
        self, partitions: Iterable[int] | None = None, since: int | None = None
    ) -> pa.RecordBatch:
        """Return the state of some partitions (by default all) as a batch; with `since`, only
        chunks that changed after that epoch."""
        slots = self.live() if partitions is None else self._slots_in(partitions)
        if since is not None:
            slots = slots[self._changed[slots >> CHUNK_BITS] > since]
        return state_batch(self.fields, self._heaps, rows_at(self._arrays(), self._changed, slots))

    def within(self, state: pa.RecordBatch, first: int, end: int) -> pa.RecordBatch:
        """Filter a result of `extract` for the partitions ``[first, end)``."""
        part = state.column("__part").to_numpy()
        return state.filter(pa.array((first <= part) & (part < end)))

    def _slots_in(self, partitions: Iterable[int]) -> np.ndarray:
        """Return the live slots of some partitions, ascending."""
        slots = np.flatnonzero(self._in(partitions, self._part[: self._index.size]))
        return slots[~self._dead[slots]]

    def _in(self, partitions: Iterable[int], part: np.ndarray) -> np.ndarray:
        """Return which of these partitions are among `partitions`."""
        wanted = np.unique(np.fromiter(partitions, np.int64))
        if wanted.size and wanted[-1] - wanted[0] == wanted.size - 1:  # neighbours: no table
            return part - part.dtype.type(wanted[0]) < wanted.size
        listed = np.zeros(self.partitions, bool)
        listed[wanted] = True
        return listed[part]

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
        """Remove the state of some partitions, for example when they move to another site. Readers
        of changes are not told. `tidy` gives the memory back."""
        slots = self._slots_in(partitions)
        self._bury(slots)
        self._reclaim += slots.size

    def tidy(self) -> bool:
        """Do a slice of the work that removed keys and growth have left; return whether there is
        more. Slots returned before this call are invalid afterwards."""
        return self._tidy(SLICE)

    def _tidy(self, rows: int) -> bool:
        if self._index.advance(self._low, self._high, rows):
            return True
        self._reclaim = min(self._reclaim, self._dead_count)
        if not self._reclaim:
            return False
        close_up(self, min(rows, self._reclaim))
        shrink(self)
        return True


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
