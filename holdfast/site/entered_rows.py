"""Rows of a push source that have entered the flow and were not read yet."""

from __future__ import annotations

from collections import deque

import pyarrow as pa

from holdfast.site.spill import Held, Overflow


class EnteredRows:
    """A queue of rows, in memory or on disk; each piece has the number of its run's last push
    batch."""

    def __init__(self, overflow: Overflow) -> None:
        self.nbytes = 0
        """Of all pieces that were not read entirely."""
        self._overflow = overflow
        self._pieces: deque[tuple[int, Held]] = deque()
        self._first_read = 0  # rows of the first piece that were read

    def __bool__(self) -> bool:
        return bool(self._pieces)

    @property
    def first_number(self) -> int:
        return self._pieces[0][0]

    def add(self, number: int, held: Held) -> None:
        """Append a piece, which this queue releases when it was read."""
        self._pieces.append((number, held))
        self.nbytes += held.nbytes

    def read(self, rows_max: int) -> pa.RecordBatch:
        """Remove and return rows of the first piece."""
        _, held = self._pieces[0]
        batch = held.rows.slice(self._first_read, rows_max)
        self._first_read += batch.num_rows
        if self._first_read == held.rows.num_rows:
            self._pieces.popleft()
            self._first_read = 0
            self.nbytes -= held.nbytes
            self._overflow.release([held])
        return batch

    def unread(self) -> list[pa.RecordBatch]:
        rows = [held.rows for _, held in self._pieces]
        return [rows[0].slice(self._first_read), *rows[1:]] if rows else []

    def clear(self) -> None:
        self._overflow.release(held for _, held in self._pieces)
        self._pieces.clear()
        self._first_read = self.nbytes = 0
