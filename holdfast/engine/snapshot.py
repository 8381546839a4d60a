"""A table of keyed state as it was at one moment, read while the table changes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa

from holdfast.engine.state_rows import (
    StateRows,
    distinct,
    joined,
    row_count,
    rows_at,
    state_batch,
)

if TYPE_CHECKING:
    from holdfast.engine.state import StateTable


_SCANNED = 1 << 16


class Snapshot:
    """A table as it was at one moment, read in parts while the table changes.

    It reads the arrays that the table had at that moment. The table saves rows here before it
    overwrites them; once the table uses other arrays, only the snapshot uses the old ones. The
    thread that writes to the table must also read the snapshot, to the end or until it closes it:
    an open snapshot costs memory and slows writes.
    """

    def __init__(
        self, table: StateTable, partitions: Iterable[int] | None, after: int | None = None
    ) -> None:
        self._table = table
        self._arrays = table._arrays()
        self._heaps = {name: heap.frozen() for name, heap in table._heaps.items()}
        self._changed = table._changed.copy()
        self._due = ~table._dead[: table._index.size]  # slots neither returned nor saved
        if partitions is not None:
            self._due &= table._in(partitions, table._part[: self._due.size])
        if after is not None and table._touched is not None:
            self._due &= table._touched[: self._due.size] > after
        self._arrays.pop("__touched", None)
        self._at = 0  # no slot before this one is due
        self._saved: list[StateRows] = []
        self.rows_left = int(np.count_nonzero(self._due))
        self._row_bytes = table.row_bytes

    @property
    def nbytes_left(self) -> int:
        """The approximate number of bytes not yet returned."""
        return self.rows_left * self._row_bytes

    def save(self, slots: np.ndarray) -> None:
        """Save the rows of these slots, which are about to change."""
        slots = slots[slots < self._due.size]
        slots = distinct(slots[self._due[slots]])
        if slots.size:
            self._saved.append(rows_at(self._arrays, self._changed, slots))
            self._due[slots] = False

    def next(self, rows_max: int) -> pa.RecordBatch | None:
        """Return the next rows, in the form of `StateTable.install`; None at the end."""
        parts = self._pop_saved(rows_max)
        room = rows_max - sum(row_count(p) for p in parts)
        slots = self._find_due(room)
        if slots.size:
            parts.append(self._pick(slots))
        if not parts:
            self.close()
            return None
        batch = state_batch(self._table.fields, self._heaps, joined(parts))
        self.rows_left -= batch.num_rows
        return batch

    def close(self) -> None:
        """Discard the remaining rows."""
        self._table._snapshots = [s for s in self._table._snapshots if s is not self]
        self._arrays, self._heaps, self._saved = {}, {}, []
        self._due = np.empty(0, bool)
        self.rows_left = 0

    def _pick(self, slots: np.ndarray) -> StateRows:
        rows = rows_at(self._arrays, self._changed, slots)
        self._due[slots] = False
        return rows

    def _pop_saved(self, room: int) -> list[StateRows]:
        parts: list[StateRows] = []
        while self._saved and room > 0:
            part = self._saved.pop()
            if row_count(part) > room:
                self._saved.append({name: a[room:] for name, a in part.items()})
                part = {name: a[:room] for name, a in part.items()}
            parts.append(part)
            room -= row_count(part)
        return parts

    def _find_due(self, room: int) -> np.ndarray:
        """Return up to `room` due slots; none if there is no room or no due slot."""
        while room > 0 and self._at < self._due.size:
            stop = self._at + max(room, _SCANNED)
            slots = np.flatnonzero(self._due[self._at : stop])[:room] + self._at
            self._at = int(slots[-1]) + 1 if slots.size else stop
            if slots.size:
                return slots
        return np.empty(0, np.int64)
