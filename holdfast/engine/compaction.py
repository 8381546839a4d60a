"""Closes up a state table: live rows move from the last slots into the slots of removed keys.

Each call gives up some of the last slots, and takes time in proportion to them, whatever the size
of the table. So a table that has lost many keys is closed up in slices, between which it is used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from holdfast.engine.keys import KeyWords
from holdfast.engine.reserve import release
from holdfast.engine.state_rows import CHUNK_BITS, SMALL, StateRows

if TYPE_CHECKING:
    from holdfast.engine.state import StateTable

_CAPACITY_MIN = 512
_RELEASED = 1 << 18
"""Unused slots of which memory is given back together."""


def close_up(table: StateTable, count: int) -> None:
    """Give up the last `count` slots: move their live rows into dead slots before them. The table
    has at least that many dead slots."""
    end = table._index.size
    first = end - count
    last = np.arange(first, end)
    is_dead = table._dead[first:end]
    live = last[~is_dead]
    into = first_dead(table, live.size)
    gone = np.concatenate([last[is_dead], into])
    table._save(np.concatenate([last, into]))
    deleted = table._index.places(KeyWords(table._low[gone], table._high[gone]))
    moved = table._index.places(KeyWords(table._low[live], table._high[live]))
    assert min(deleted.min(initial=0), moved.min(initial=0)) == 0, "a slot has no key"
    rows = {name: array.take(live, axis=0) for name, array in table._arrays().items()}
    np.maximum.at(table._changed, into >> CHUNK_BITS, table._changed[live >> CHUNK_BITS])
    table._index.renumber(deleted, moved, into, first)
    _put_rows(table, into, rows, count)


def _put_rows(table: StateTable, into: np.ndarray, rows: StateRows, count: int) -> None:
    """Finish `close_up`. Like `KeyIndex.renumber`, this allocates nothing."""
    for name, array in table._arrays().items():
        array[into] = rows[name]
    table._dead[into] = False
    size = table._index.size
    table._dead[size : size + count] = False
    table._dead_count -= count
    table._reclaim -= count
    if into.size:
        table._dead_from = int(into[-1]) + 1


def first_dead(table: StateTable, count: int) -> np.ndarray:
    """Return the first `count` dead slots."""
    found, at = [np.empty(0, np.int64)], table._dead_from
    while count > 0:
        part = np.flatnonzero(table._dead[at : at + SMALL])[:count] + at
        found.append(part)
        count -= part.size
        at += SMALL
    return np.concatenate(found)


def shrink(table: StateTable) -> None:
    """Give back the memory of slots that are no longer used."""
    size = table._index.size
    if not table._is_reserved or 8 * size < SMALL:
        if 4 * size < table._capacity > _CAPACITY_MIN:
            capacity = max(_CAPACITY_MIN, 1 << (2 * size).bit_length())
            table._move_into(capacity, reserved=False)
            table._provided = size
    elif table._provided - size >= _RELEASED:
        for array in (*table._arrays().values(), table._dead):
            release(array, size, table._provided)
        table._provided = size
    for name in table._heaps if not table._reclaim else ():
        table._compact(name)
