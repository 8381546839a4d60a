"""The operators once more, as plain loops over rows: what the vectorised ones are held to.

A stream is a list of ``(order, row)``: the order key as a tuple, the row as a dict. Every model
takes one and gives one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from holdfast.engine.batches import Track
from tests.support.harness import Input, rows_of

Row = dict[str, Any]
Rows = list[tuple[tuple[int, ...], Row]]


def stream(given: Input, source: str) -> Rows:
    """The rows of a source in order; times as whole numbers."""
    batch = given.batches[source]
    columns = {
        name: (column.cast(pa.int64()) if pa.types.is_timestamp(column.type) else column)
        for name, column in zip(batch.schema.names, batch.columns, strict=True)
    }
    lists = {name: column.to_pylist() for name, column in columns.items()}
    seqs = given.seqs(source).tolist()
    return [((s,), {n: v[i] for n, v in lists.items()}) for i, s in enumerate(seqs)]


def expected(rows: Rows, schema: pa.Schema) -> list[tuple]:
    """A model's rows in the form that `rows_of` gives the engine's in, in order."""
    rows = sorted(rows, key=lambda r: r[0])
    arrays = [pa.array([r.get(f.name) for _, r in rows], f.type) for f in schema]
    plain = rows_of(pa.RecordBatch.from_arrays(arrays, schema=schema)) if arrays else []
    return [(*p, *order) for p, (order, _) in zip(plain, rows, strict=True)]


def key_of(row: Row, keys: Sequence[str]) -> tuple:
    return tuple(_same(row[k]) for k in keys)


def _same(value: Any) -> Any:
    """Zeros are one key and so are NaNs; True is not 1."""
    if isinstance(value, float):
        return "NaN" if math.isnan(value) else value + 0.0
    return value


def aggregate(kind: str, values: list) -> Any:
    """One aggregate of `values`, strictly in order."""
    if kind == "count":
        return len(values)
    if kind in ("first", "last"):
        return values[0 if kind == "first" else -1]
    if kind in ("max", "min"):
        return _extreme(kind, values)
    total = 0.0 if kind == "mean" or isinstance(values[0], float) else 0
    for value in values:
        total = total + (float(value) if isinstance(total, float) else value)
    if kind == "mean":
        return total / len(values)
    return total


def _extreme(kind: str, values: list) -> Any:
    """NaN is above all numbers, and the zeros are one."""
    if not isinstance(values[0], float):
        return max(values) if kind == "max" else min(values)
    numbers = [v + 0.0 for v in values if not math.isnan(v)]
    if kind == "max":
        return max(numbers) if len(numbers) == len(values) else math.nan
    return min(numbers) if numbers else math.nan


Aggs = Mapping[str, tuple[str, str | None]]
"""Result column -> (kind, column)."""


def _aggregated(aggs: Aggs, rows: list[Row]) -> Row:
    return {n: aggregate(kind, [r.get(c) for r in rows]) for n, (kind, c) in aggs.items()}


def running(rows: Rows, keys: Sequence[str], aggs: Aggs) -> Rows:
    return row_window(rows, keys, len(rows) + 1, 1, aggs)


def row_window(rows: Rows, keys: Sequence[str], size: int, every: int, aggs: Aggs) -> Rows:
    seen: dict[tuple, list[Row]] = {}
    out = []
    for order, row in sorted(rows, key=lambda r: r[0]):
        history = seen.setdefault(key_of(row, keys), [])
        history.append(row)
        if len(history) % every == 0:
            out.append((order, {k: row[k] for k in keys} | _aggregated(aggs, history[-size:])))
    return out


def time_window(
    rows: Rows,
    keys: Sequence[str],
    on: str,
    size: int,
    every: int,
    lateness: int,
    aggs: Aggs,
    marks: list[int],
) -> tuple[Rows, Rows]:
    """The results, with (row that closed it, window) as order; and the late rows."""
    open_: dict[tuple, list[Row]] = {}
    out: Rows = []
    late: Rows = []

    def close(seq: int, mark: int) -> None:
        for key, window in sorted(open_, key=lambda kw: kw[1]):
            if window * every + size + lateness <= mark:
                members = open_.pop((key, window))
                edges = {"window_start": window * every, "window_end": window * every + size}
                row = {k: members[0][k] for k in keys} | edges | _aggregated(aggs, members)
                out.append(((seq, window), row))

    by_seq: dict[int, Rows] = {}
    for order, row in rows:
        by_seq.setdefault(order[0], []).append((order, row))
    before = Track.NEVER
    for seq, mark in enumerate(marks):
        for order, row in by_seq.get(seq, []):
            time = row[on]
            caught = False
            window = time // every
            while window * every + size > time:
                if window * every + size + lateness > before:
                    open_.setdefault((key_of(row, keys), window), []).append(row)
                    caught = True
                window -= 1
            if not caught:
                late.append((order, row))
        close(seq, mark)
        before = mark
    close(len(marks), Track.END)
    return out, late


def spans(
    rows: Rows,
    keys: Sequence[str],
    start: Callable[[Row], Any],
    end: Callable[[Row], Any],
    emit: Callable[[Row, Row], Row],
) -> Rows:
    open_: dict[tuple, Row] = {}
    out = []
    for order, row in sorted(rows, key=lambda r: r[0]):
        key = key_of(row, keys)
        if start(row) is True:
            open_[key] = row
        elif end(row) is True and key in open_:
            out.append((order, emit(open_.pop(key), row)))
    return out


def timed_spans(
    rows: Rows,
    keys: Sequence[str],
    on: str,
    wait: int,
    start: Callable[[Row], Any],
    end: Callable[[Row], Any],
    emit: Callable[[Row, Row], Row],
    marks: list[int],
) -> tuple[Rows, Rows, Rows]:
    """What ended; what timed out, with (row that moved the watermark, that watermark) as order and
    the whole start rows; and the late starts."""
    open_: dict[tuple, Row] = {}
    out: Rows = []
    expired: Rows = []
    late: Rows = []

    def expire(seq: int, mark: int) -> None:
        for key, row in list(open_.items()):
            if row[on] + wait <= mark:
                expired.append(((seq, row[on] + wait), open_.pop(key)))

    by_seq: dict[int, Rows] = {}
    for order, row in rows:
        by_seq.setdefault(order[0], []).append((order, row))
    before = Track.NEVER
    for seq, mark in enumerate(marks):
        for order, row in sorted(by_seq.get(seq, []), key=lambda r: r[0]):
            key = key_of(row, keys)
            if start(row) is True:
                if row[on] + wait <= before:
                    late.append((order, row))
                else:
                    open_[key] = row
            elif end(row) is True and key in open_:
                out.append((order, emit(open_.pop(key), row)))
        expire(seq, mark)
        before = mark
    expire(len(marks), Track.END)
    return out, expired, late


def join(
    left: Rows,
    right: Rows,
    keys: Sequence[str],
    on: str,
    within: int,
    lateness: int,
    marks: list[int],
) -> tuple[Rows, Rows, Rows]:
    """The pairs, and each side's late rows. The order of a pair: its later row's, the other's."""

    def on_time(order: tuple, row: Row) -> bool:
        before = marks[order[0] - 1] if order[0] else Track.NEVER
        return (row[on] // within + 1) * within + lateness > before

    kept = [[r for r in side if on_time(*r)] for side in (left, right)]
    late = [[r for r in side if not on_time(*r)] for side in (left, right)]
    pairs = []
    for a, x in kept[0]:
        for b, y in kept[1]:
            known = all(x[k] is not None for k in keys)  # nobody knows whether nulls are the same
            if known and key_of(x, keys) == key_of(y, keys) and abs(x[on] - y[on]) <= within:
                added = {(n + "_right" if n in x else n): v for n, v in y.items() if n not in keys}
                pairs.append(((*max(a, b), *min(a, b)), x | added))
    return pairs, late[0], late[1]
