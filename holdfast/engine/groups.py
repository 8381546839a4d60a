"""Rows grouped by slot, in order within each group, and folds over such groups."""

from __future__ import annotations

import numpy as np

_LONG = 32


class Groups:
    """The rows of a batch, stably sorted by slot.

    ``rows`` maps sorted positions to rows of the batch. Group `g` has the slot ``slots[g]`` and
    covers ``lengths[g]`` sorted positions from ``starts[g]`` on.
    """

    def __init__(self, slots: np.ndarray) -> None:
        n = slots.size
        bits = max(1, (n - 1).bit_length()) if n else 1
        # One sort of packed (slot, row) words is several times faster than a stable argsort.
        packed = np.sort((slots << bits) | np.arange(n))
        self.rows = packed & ((1 << bits) - 1)
        self.sorted_slots = packed >> bits
        new = np.empty(n, bool)
        new[:1] = True
        np.not_equal(self.sorted_slots[1:], self.sorted_slots[:-1], out=new[1:])
        self.is_first = new
        self.starts = np.flatnonzero(new)
        self.lengths = np.diff(self.starts, append=n)
        self.slots = self.sorted_slots[self.starts]

    @property
    def lasts(self) -> np.ndarray:
        """The sorted position of each group's last row."""
        return self.starts + self.lengths - 1

    def ranks(self) -> np.ndarray:
        """Return for each sorted position the number of earlier rows in its group."""
        return np.arange(self.rows.size) - np.repeat(self.starts, self.lengths)

    def fold(self, ufunc: np.ufunc, initial: np.ndarray, values: np.ndarray) -> np.ndarray:
        """Return the running fold of `values` (in sorted positions) per group, from
        ``initial[g]`` on.

        The fold is strictly sequential, so that float results do not depend on epoch boundaries.
        Long groups use numpy's sequential `accumulate`, one call per group; short groups are folded
        together, one pass per rank.
        """
        out = np.empty(values.size, np.result_type(initial, values))
        long = self.lengths > _LONG
        for g in np.flatnonzero(long):
            part = slice(self.starts[g], self.starts[g] + self.lengths[g])
            line = np.concatenate([initial[g : g + 1], values[part]])
            out[part] = ufunc.accumulate(line)[1:]
        short = np.flatnonzero(~long)
        at, value = self.starts[short], initial[short]
        lengths = self.lengths[short]
        rank = 0
        while at.size:
            value = ufunc(value, values[at])
            out[at] = value
            rank += 1
            more = lengths > rank
            at, value, lengths = at[more] + 1, value[more], lengths[more]
        return out

    def in_row_order(self, positions: np.ndarray) -> np.ndarray:
        """Return the permutation that puts `positions` (distinct sorted ones) into row order."""
        where = np.full(self.rows.size, -1)
        where[self.rows[positions]] = np.arange(positions.size)
        return where[where >= 0]

    def scattered(self, sorted_values: np.ndarray) -> np.ndarray:
        """Convert values by sorted position to values by row."""
        out = np.empty_like(sorted_values)
        out[self.rows] = sorted_values
        return out
