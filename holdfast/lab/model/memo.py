"""Tables that answer for a whole column of keys at once.

`Memo` remembers a function of one integer: numpy looks all keys up, and only those that are asked
for the first time are computed, one by one. `Fingerprints` is a set of 64-bit numbers. Both are
hash tables with linear probing in plain arrays.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Hashes = NDArray[np.uint64]

_SPREAD = np.uint64(0x9E3779B97F4A7C15)
_NONE = np.int64(-1)


class GrowingArray:
    """An array that grows at its end."""

    def __init__(self, dtype: Any, width: int = 0) -> None:
        shape = (1024, width) if width else 1024
        self._all = np.zeros(shape, dtype)
        self._size = 0

    def __len__(self) -> int:
        return self._size

    @property
    def all(self) -> NDArray[Any]:
        return self._all[: self._size]

    def append(self, value: Any) -> None:
        if self._size == len(self._all):
            self._all = np.concatenate([self._all, np.zeros_like(self._all)])
        self._all[self._size] = value
        self._size += 1


class Memo:
    """A function of a key that is not negative; its values fit into 32 bits."""

    def __init__(self, compute: Callable[[int], int]) -> None:
        self._compute = compute
        self._bits = 12
        self._keys = np.full(1 << self._bits, _NONE)
        self._values = np.zeros(1 << self._bits, np.int32)
        self.size = 0

    def __call__(self, keys: Ints) -> NDArray[np.int32]:
        """The values of these keys."""
        found, missing = self._look_up(keys)
        if len(missing):
            for key in np.unique(keys[missing]).tolist():
                self._insert(key, self._compute(key))
            found[missing], _ = self._look_up(keys[missing])
        return found

    def _look_up(self, keys: Ints) -> tuple[NDArray[np.int32], NDArray[np.int64]]:
        mask = len(self._keys) - 1
        at = _places(keys.view(np.uint64), self._bits)
        found = self._values[at]
        left = np.flatnonzero(self._keys[at] != keys)
        at = at[left]
        missing = []
        while len(left):
            here = self._keys[at]
            empty = here == _NONE
            if empty.any():
                missing.append(left[empty])
            right = here == keys[left]
            found[left[right]] = self._values[at[right]]
            on = ~(empty | right)
            left, at = left[on], (at[on] + 1) & mask
        return found, np.concatenate(missing) if missing else left

    def _insert(self, key: int, value: int) -> None:
        if 2 * self.size > len(self._keys):
            self._grow()
        self._place(np.array([key]), np.array([value], np.int32))
        self.size += 1

    def _grow(self) -> None:
        used = self._keys != _NONE
        keys, values = self._keys[used], self._values[used]
        self._bits += 2
        self._keys = np.full(1 << self._bits, _NONE)
        self._values = np.zeros(1 << self._bits, np.int32)
        self._place(keys, values)

    def _place(self, keys: Ints, values: NDArray[np.int32]) -> None:
        mask = len(self._keys) - 1
        at = _places(keys.view(np.uint64), self._bits)
        while len(keys):
            free = self._keys[at] == _NONE
            self._keys[at[free]] = keys[free]
            mine = free & (self._keys[at] == keys)
            self._values[at[mine]] = values[mine]
            keys, values, at = keys[~mine], values[~mine], (at[~mine] + 1) & mask


class Fingerprints:
    """A set of 64-bit numbers other than 0."""

    def __init__(self) -> None:
        self._bits = 16
        self._table = np.zeros(1 << self._bits, np.uint64)
        self.size = 0

    def add(self, hashes: Hashes) -> NDArray[np.bool_]:
        """Add these; True for each that is new, once if it comes several times."""
        while 5 * (self.size + len(hashes)) > 3 * len(self._table):
            self._grow()
        new = self._place(hashes)
        self.size += int(np.count_nonzero(new))
        return new

    def _grow(self) -> None:
        hashes = self._table[self._table != 0]
        self._bits += 1
        self._table = np.zeros(1 << self._bits, np.uint64)
        for part in np.array_split(hashes, 1 + len(hashes) // (1 << 22)):
            self._place(part)

    def _place(self, hashes: Hashes) -> NDArray[np.bool_]:
        mask = len(self._table) - 1
        new = np.zeros(len(hashes), np.bool_)
        left, at = np.arange(len(hashes)), _places(hashes, self._bits)
        while len(left):
            wanted, here = hashes[left], self._table[at]
            free = here == 0
            # Of several that claim a free place the last one gets it. Of equal ones that is the
            # same number: only the one that is noted last counts as new.
            self._table[at[free]] = wanted[free]
            mine = free & (self._table[at] == wanted)
            claimed = np.flatnonzero(mine)
            _, first = np.unique(at[claimed], return_index=True)
            new[left[claimed[first]]] = True
            on = ~(mine | (here == wanted))
            left, at = left[on], (at[on] + 1) & mask
        return new


def _places(hashes: Hashes, bits: int) -> Ints:
    mixed = hashes ^ (hashes >> np.uint64(32))
    return ((mixed * _SPREAD) >> np.uint64(64 - bits)).astype(np.int64)
