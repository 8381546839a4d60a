"""Reserved memory: arrays that are as long as they may ever be, of which only used pages exist.

A column in reserved memory never moves, so a table grows without copying it. A reservation takes
address space, not memory: the system provides a page when it is first written to.
"""

from __future__ import annotations

import mmap
import resource
import sys

import numpy as np

from holdfast.engine.memory import limit_bytes

_NO_RESERVE = 0x4000  # Linux: without it, the system refuses what exceeds its memory
_FLAGS = (mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE) if sys.platform == "linux" else 0
_ROWS_MAX = (1 << 31) - 2
"""Slots are numbered by int32 in the key index."""


def rows_reserved(row_bytes: int) -> int:
    """Return the rows to reserve: as many as fit into all memory; 0 if address space is limited
    (`spark.executor.pyspark.memory` limits it), because a reservation would exhaust it."""
    soft, _ = resource.getrlimit(resource.RLIMIT_AS)
    if not _FLAGS or soft != resource.RLIM_INFINITY:
        return 0
    return min(_ROWS_MAX, limit_bytes() // row_bytes)


def reserve(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array of zeros in reserved memory; raise an OSError if the system refuses."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * dtype.itemsize
    mapping = mmap.mmap(-1, nbytes, flags=_FLAGS)
    mapping.madvise(mmap.MADV_HUGEPAGE)  # as numpy does for its large arrays
    return np.frombuffer(mapping, dtype).reshape(shape)


def release(array: np.ndarray, first: int, end: int) -> None:
    """Give the memory of some rows of a reserved array back; they become zero. Rows that share a
    page with other rows stay as they are."""
    row_bytes = array[:1].nbytes
    page = mmap.PAGESIZE
    start, stop = -(-first * row_bytes // page) * page, end * row_bytes // page * page
    if start < stop:
        _mapping(array).madvise(mmap.MADV_DONTNEED, start, stop - start)


def _mapping(array: np.ndarray) -> mmap.mmap:
    base: object = array
    while not isinstance(base, mmap.mmap):
        base = base.obj if isinstance(base, memoryview) else base.base  # type: ignore[attr-defined]
    return base
