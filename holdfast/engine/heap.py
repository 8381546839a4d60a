"""Values that are no numbers, kept as Arrow has them: text, lists, structs, maps, decimals.

A column of state has a number for each slot, and a `Heap` says which value the number stands for.
Values never leave Arrow, so nothing about them can change: a null inside a list stays one, beside
NaN, and an empty list is not a null list.
"""

from __future__ import annotations

import numpy as np
import pyarrow as pa

_MERGED_BYTES_MAX = 256 << 20
"""Larger arrays are not put together: offsets of 32 bits reach 2 GB, and copying takes time."""


class Heap:
    """Values of one type, numbered in the order in which they came. They are held in arrays of
    falling size, so that adding some replicas each of the others a logarithmic number of times.

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
        """Add values; their numbers. They are copied: whatever they were a part of can go. If there
        is no memory for it, nothing has changed."""
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
        """The values of these numbers."""
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
        """Add the values of these numbers to another heap, array by array; their numbers there."""
        order = np.argsort(numbers)
        ends = np.searchsorted(numbers[order], [*self._starts[1:], self.size]).tolist()
        there, first = np.empty_like(numbers), 0
        for array, start, end in zip(self._arrays, self._starts, ends, strict=True):
            rows = order[first:end]
            there[rows] = heap.append(array.take(pa.array(numbers[rows] - start)))
            first = end
        return there

    def frozen(self) -> Heap:
        """The same values under the same numbers, whatever is added to this one later."""
        replica = Heap.__new__(Heap)
        replica._arrays, replica._starts = list(self._arrays), list(self._starts)
        replica.size, replica.nbytes = self.size, self.nbytes
        return replica


def _copied(arrays: list[pa.Array]) -> pa.Array:
    """Arrays as one that shares no memory with them: also one array alone is copied."""
    return pa.concat_arrays([*arrays, arrays[0].slice(0, 0)])
