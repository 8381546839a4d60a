"""``holdfast bench tables``: measures the longest call of a state table while it grows and moves.

A table with millions of keys grows, gives up partitions and takes them back, in batches as an epoch
brings them. A single call must not be much longer than others: the site processes nothing else
meanwhile. Times are processor time of the thread, which hardly depends on the load of the machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pyarrow as pa
from rich.console import Console

from holdfast.engine.keys import KeyWords
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field
from holdfast.ui.report import Figure, show

PARTITIONS = 4096
BLOCK = PARTITIONS // 64
"""Fine partitions that move together: one of 64 parts of the state."""
BATCH = 10_000
FIELDS = {"n": Field(pa.int64()), "total": Field(pa.float64())}
_ODD = 0x9E3779B97F4A7C15


def bench(quick: bool = False, console: Console | None = None) -> dict[str, Any]:
    """Measure, print a table, and return the figures."""
    console = console or Console()
    keys = 400_000 if quick else 4_000_000
    found: dict[str, list[float]] = {}
    for _ in range(1 if quick else 3):
        for name, value in measured(keys).items():
            found.setdefault(name, []).append(value)
    figures = {name: Figure(tuple(values)) for name, values in found.items()}
    show(f"a state table of {keys:,} keys", ["", ""], [[*row] for row in figures.items()], console)
    return {name: figure.to_dict() for name, figure in figures.items()}


def measured(keys: int) -> dict[str, float]:
    """Return the figures of one run."""
    table = StateTable(FIELDS, PARTITIONS)
    grown = [_timed(_write, table, first, 0) for first in range(0, keys, BATCH)]
    figures = {
        "insert, longest call, ms": max(grown) * 1e3,
        "insert, ns a row": sum(grown) / keys * 1e9,
        "update, ns a row": _updates(table, keys),
    }
    figures |= _moved(table, range(7, 8), f"1 of {PARTITIONS}")
    figures |= _moved(table, range(BLOCK, 2 * BLOCK), "1 of 64")
    figures |= _shrunk(table)
    figures["update and insert again, ns a row"] = _updates(table, keys)
    return figures


def _words(numbers: np.ndarray) -> KeyWords:
    return KeyWords((numbers.astype(np.uint64) * np.uint64(_ODD)).view(np.int64), None)


def _write(table: StateTable, first: int, epoch: int) -> None:
    _update(table, _words(np.arange(first, first + BATCH)), epoch)


def _update(table: StateTable, words: KeyWords, epoch: int) -> None:
    table.tidy()
    slots = table.slots(words)
    table.touch(slots, epoch)
    table["n"][slots] += 1
    table["total"][slots] += 0.5


def _updates(table: StateTable, keys: int) -> float:
    rng = np.random.default_rng(1)
    batches = [_words(rng.integers(0, keys, BATCH)) for _ in range(200)]
    return sum(_timed(_update, table, words, 1) for words in batches) / (200 * BATCH) * 1e9


def _moved(table: StateTable, partitions: range, what: str) -> dict[str, float]:
    """Extract, drop and install some partitions."""
    parts: list[pa.RecordBatch] = []
    reading = _Timer()
    snapshot = reading(table.snapshot, partitions)
    while (part := reading(snapshot.next, BATCH)) is not None:
        parts.append(part)
    dropping, tidying, installing = _Timer(), _Timer(), _Timer()
    dropping(table.drop, partitions)
    while tidying(table.tidy):
        pass
    for part in parts:
        installing(table.install, part)
        tidying(table.tidy)
    return {
        f"extract {what}, longest call, ms": reading.longest_ms,
        f"drop {what}, longest call, ms": dropping.longest_ms,
        f"tidy after {what}, longest call, ms": tidying.longest_ms,
        f"install {what}, longest call, ms": installing.longest_ms,
    }


def _shrunk(table: StateTable) -> dict[str, float]:
    """Give up three quarters of the partitions, a block at a time."""
    dropping, tidying = _Timer(), _Timer()
    for block in _blocks(PARTITIONS // 4):
        dropping(table.drop, block)
        tidying(table.tidy)
    while tidying(table.tidy):
        pass
    return {
        "drop 3 of 4, longest call, ms": dropping.longest_ms,
        "drop 3 of 4, all calls, ms": dropping.total_ms,
        "tidy after 3 of 4, longest call, ms": tidying.longest_ms,
        "tidy after 3 of 4, all calls, ms": tidying.total_ms,
        "bytes a key afterwards": table.nbytes / table.size,
    }


def _blocks(first: int) -> Iterable[range]:
    return (range(at, at + BLOCK) for at in range(first, PARTITIONS, BLOCK))


class _Timer:
    """Calls functions, and notes the longest call."""

    def __init__(self) -> None:
        self.longest_ms = self.total_ms = 0.0

    def __call__(self, function: Callable[..., Any], *args: Any) -> Any:
        start = time.thread_time()
        result = function(*args)
        ms = (time.thread_time() - start) * 1e3
        self.longest_ms = max(self.longest_ms, ms)
        self.total_ms += ms
        return result


def _timed(function: Callable[..., Any], *args: Any) -> float:
    start = time.thread_time()
    function(*args)
    return time.thread_time() - start
