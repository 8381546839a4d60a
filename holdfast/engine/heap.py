"""Non-numeric values of keyed state, stored in Arrow: text, lists, structs, maps, decimals.

A column of state stores an index for each slot, and a `Heap` maps the index to a value. Values stay
in Arrow format, so they are preserved exactly: a null inside a list remains distinct from NaN, and
an empty list from a null list.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

_MERGED_BYTES_MAX = 256 << 20
"""Maximum size of a merged array: 32-bit offsets limit it to 2 GB, and copying takes time."""


class Heap:
    """Values of one type, indexed in the order in which they were added. They are held in arrays of
    decreasing size, so that each value is copied a logarithmic number of times.

    >>> heap = Heap(pa.array([None], pa.list_(pa.float64())))
    >>> numbers = heap.append(pa.array([[1.0, None], []], pa.list_(pa.float64())))
    >>> heap.take(numbers[::-1]).to_pylist()
    [[], [1.0, None]]
    """

    def __init__(self, values: pa.Array) -> None:
        self._arrays = [_copied([values])]
        self._starts = [0]
        self.size = len(values)
        self.nbytes = self._arrays[0].nbytes

    def append(self, values: pa.Array) -> np.ndarray:
        """Add values and return their indexes. The values are copied, so the caller's buffers can
        be freed. If the allocation fails, the heap is unchanged."""
        kept, together = len(self._arrays), [values]
        rows, nbytes = len(values), values.nbytes
        while kept and len(self._arrays[kept - 1]) < 2 * rows:
            nbytes += self._arrays[kept - 1].nbytes
            if nbytes > _MERGED_BYTES_MAX:
                break
            kept -= 1
            together.insert(0, self._arrays[kept])
            rows += len(together[0])
        merged = _copied(together)
        numbers = np.arange(self.size, self.size + len(values))
        start = self._starts[kept] if kept < len(self._starts) else self.size
        self._arrays[kept:], self._starts[kept:] = [merged], [start]
        self.size += len(values)
        self.nbytes += values.nbytes
        return numbers

    def take(self, numbers: np.ndarray) -> pa.Array:
        """Return the values at these indexes."""
        if len(self._arrays) == 1:
            return self._arrays[0].take(pa.array(numbers))
        where = np.searchsorted(self._starts, numbers, "right") - 1
        held = np.unique(where).tolist()
        if len(held) <= 1:
            at = held[0] if held else 0
            return self._arrays[at].take(pa.array(numbers - self._starts[at]))
        order = np.argsort(where, kind="stable")
        ends = np.cumsum(np.bincount(where, minlength=len(self._arrays)))
        parts = []
        for at in held:
            rows = order[ends[at - 1] if at else 0 : ends[at]]
            parts.append(self._arrays[at].take(pa.array(numbers[rows] - self._starts[at])))
        back = np.empty_like(order)
        back[order] = np.arange(order.size)
        return pa.concat_arrays(parts).take(pa.array(back))

    def copied_into(self, heap: Heap, numbers: np.ndarray) -> np.ndarray:
        """Add the values at these indexes to another heap, array by array; return their indexes
        there."""
        order = np.argsort(numbers)
        ends = np.searchsorted(numbers[order], [*self._starts[1:], self.size]).tolist()
        there, first = np.empty_like(numbers), 0
        for array, start, end in zip(self._arrays, self._starts, ends, strict=True):
            rows = order[first:end]
            there[rows] = heap.append(array.take(pa.array(numbers[rows] - start)))
            first = end
        return there

    def frozen(self) -> Heap:
        """Return a heap with the same values and indexes, which later additions do not change."""
        frozen = Heap.__new__(Heap)
        frozen._arrays, frozen._starts = list(self._arrays), list(self._starts)
        frozen.size, frozen.nbytes = self.size, self.nbytes
        return frozen


def _copied(arrays: list[pa.Array]) -> pa.Array:
    """Concatenate arrays into one that shares no memory with them; a single array is copied."""
    return pa.concat_arrays([*arrays, arrays[0].slice(0, 0)])
