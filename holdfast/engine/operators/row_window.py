"""Row-count window: after every `every`-th row of a key, the aggregates of its last `rows` rows.

If a key has had fewer than `rows` rows, the window has all of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from holdfast.engine.aggregates import Aggregate
from holdfast.engine.batches import Track, as_array, order_arrays, overlaid, take, take_column
from holdfast.engine.expressions import Column
from holdfast.engine.groups import Groups
from holdfast.engine.operators.base import (
    LARGEST,
    Agg,
    KeyedOperator,
    Port,
    columns_of,
    one_zero,
    peak,
)
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field
from holdfast.errors import FlowError


class RowWindow(KeyedOperator):
    """The row-count window."""

    label = "row window"

    def __init__(
        self,
        keys: Sequence[str],
        source: Port,
        rows: int,
        every: int,
        aggregates: Mapping[str, Aggregate],
        where: str,
    ) -> None:
        super().__init__(keys, [source])
        for what, value in (("rows", rows), ("every", every)):
            if not isinstance(value, int) or value < 1:
                raise FlowError(f"{where}: {what} must be an integer of at least 1, not {value!r}")
        self.rows, self.every = rows, every
        self.aggs = [Agg.bind(n, a, source.schema, where) for n, a in aggregates.items()]
        self.needs[0] |= columns_of(list(aggregates.values()))
        # Aggregates of the same expression share one ring of history.
        shared: dict[str, list[Agg]] = {}
        for agg in self.aggs:
            if agg.kind != "count":
                shared.setdefault(repr(agg.expr), []).append(agg)
        self.rings = {aggs[0].name: aggs for aggs in shared.values()}
        fields = [source.schema.field(k) for k in keys]
        fields += [pa.field(a.name, a.result_type) for a in self.aggs]
        self.outputs["out"] = Port(pa.schema(fields), source.width, delay=source.delay)

    def parameters(self) -> dict[str, object]:
        return {"rows": self.rows, "every": self.every, **{a.name: a for a in self.aggs}}

    def _allocate(self) -> None:
        fields = {n: Field(aggs[0].operand_type, width=self.rows) for n, aggs in self.rings.items()}
        self.table = StateTable({"__n": Field(pa.int64()), **fields}, self.partitions)
        self._peaks = dict.fromkeys(self.rings, 0)
        """Upper bounds of the absolute values in each ring: small bounds rule out overflow."""

    def tables(self) -> dict[str, StateTable]:
        return {"history": self.table}

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        batch = inputs[0]
        columns = {n: aggs[0].column(batch) for n, aggs in self.rings.items()}
        operands = {n: self._numbers(aggs, columns[n]) for n, aggs in self.rings.items()}
        groups = Groups(self.table.slots(self.words(batch)))
        seen = self.table["__n"][groups.slots]
        base = np.repeat(seen, groups.lengths)
        index = base + groups.ranks()  # each row's number among all rows of its key
        if self.every == 1:
            due = np.arange(index.size)
        else:
            due = np.flatnonzero((index + 1) % self.every == 0)
        windows = _Windows(self.rows, groups, index, base, due)
        results: dict[str, Column] = {}
        try:
            for name, aggs in self.rings.items():
                results |= self._fold(name, aggs, operands[name], windows, batch)
        except OverflowError:
            self.table.remove(groups.slots[seen == 0])  # remove the new keys
            raise
        for name, aggs in self.rings.items():
            picking = [a for a in aggs if a.picks]
            results |= {a.name: windows.pick(a, columns[name], self.table, name) for a in picking}
        self.table.touch(groups.slots, epoch)
        for name, operand in operands.items():
            windows.remember(columns[name] if operand is None else operand, self.table, name)
        results |= {a.name: windows.count for a in self.aggs if a.kind == "count"}
        self.table["__n"][groups.slots] = seen + groups.lengths
        return {"out": self._output(batch, groups, due, results)}

    @staticmethod
    def _numbers(aggs: list[Agg], column: Column) -> np.ndarray | None:
        """Return the operand of the folds, None without folds. Only first and last accept nulls."""
        folding = [a.numbers(column) for a in aggs if not a.picks]
        return folding[0] if folding else None

    def _fold(
        self,
        name: str,
        aggs: list[Agg],
        operand: np.ndarray | None,
        windows: _Windows,
        batch: pa.RecordBatch,
    ) -> dict[str, Column]:
        if operand is None:
            return {}
        folding = [a for a in aggs if not a.picks]
        values, ring = operand[windows.groups.rows], self.table[name]
        for agg in folding:
            if agg.bounded:
                self._peaks[name] = max(self._peaks[name], peak(values))
                if self._peaks[name] * self.rows > LARGEST:
                    self.refuse_sums(agg, batch, windows.wrong_sums(values, ring))
        return windows.fold(folding, values, ring)

    def install(self, state: dict[str, pa.RecordBatch]) -> None:
        super().install(state)
        for name, aggs in self.rings.items():
            if any(a.bounded for a in aggs):
                held = state["history"].column(name).flatten().to_numpy(zero_copy_only=False)
                self._peaks[name] = max(self._peaks[name], peak(held))

    def _output(
        self, batch: pa.RecordBatch, groups: Groups, due: np.ndarray, results: dict[str, Column]
    ) -> pa.RecordBatch:
        """Build the output: sort the results, which are grouped by key, into row order."""
        restore = groups.in_row_order(due)
        origin = take(batch, groups.rows[due[restore]])
        port = self.outputs["out"]
        arrays = [origin.column(k) for k in self.keys]
        for agg in self.aggs:
            result, field = take_column(results[agg.name], restore), agg.result_field
            if not agg.picks:
                result = field.loaded(result.astype(field.dtype, copy=False), None)
            arrays.append(as_array(result, agg.result_type))
        return pa.RecordBatch.from_arrays([*arrays, *order_arrays(origin)], schema=port.full_schema)


class _Windows:
    """The windows that end at the rows `due`. All are computed together, from old to new rows."""

    def __init__(
        self, rows: int, groups: Groups, index: np.ndarray, base: np.ndarray, due: np.ndarray
    ) -> None:
        self.rows, self.groups, self.index = rows, groups, index
        self.due = due
        self.due_index = index[due]
        self.due_base = base[due]
        self.due_slot = groups.sorted_slots[due]
        self.count = np.minimum(self.due_index + 1, rows)

    def fold(self, aggs: list[Agg], values: np.ndarray, ring: np.ndarray) -> dict[str, Column]:
        results = {a.name: self._start(a) for a in aggs}
        for age in range(self.rows - 1, -1, -1):
            value, present = self._at_age(age, values, ring)
            for agg in aggs:
                self._step(agg, results, value, present)
        for agg in aggs:
            if agg.kind == "mean":
                results[agg.name] = results[agg.name] / self.count
            elif agg.kind in ("max", "min"):
                results[agg.name] = one_zero(results[agg.name])
        return dict(results)

    def wrong_sums(self, values: np.ndarray, ring: np.ndarray) -> np.ndarray:
        """Return the rows at which the sum of the window does not fit into int64. The upper and
        lower halves of the numbers are summed separately, so only the final sum counts, not
        intermediate ones."""
        upper, lower = (np.zeros(self.due.size, np.int64) for _ in range(2))
        for age in range(self.rows):
            value, present = self._at_age(age, values, ring)
            value = np.where(True if present is None else present, value, 0).astype(np.int64)
            upper += value >> 32
            lower += value & 0xFFFFFFFF
        upper += lower >> 32
        wrong = (upper < -(1 << 31)) | (upper >= 1 << 31)
        return self.groups.rows[self.due[wrong]]

    def pick(self, agg: Agg, column: Column, table: StateTable, name: str) -> Column:
        """Return the value, possibly null, of each window's first or last row; `column` is by
        row."""
        if agg.kind == "last":
            return take_column(column, self.groups.rows[self.due])
        age = self.count - 1
        first = self.due_index - age
        earlier = first < self.due_base  # than this batch
        here = take_column(column, self.groups.rows[np.where(earlier, self.due, self.due - age)])
        if not earlier.any():
            return here
        kept = table.get(name, self.due_slot[earlier], first[earlier] % self.rows)
        return overlaid(as_array(here, agg.operand_type), earlier, kept)

    def _start(self, agg: Agg) -> np.ndarray:
        return np.full(self.due.size, agg.field.allocate(1)[0], agg.field.dtype)

    def _at_age(
        self, age: int, values: np.ndarray, ring: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """Return the value `age` rows before each window's end, and where it exists (None:
        everywhere)."""
        if age == 0:
            return values[self.due], None
        wanted = self.due_index - age
        value = values[np.maximum(self.due - age, 0)]  # correct if the row is in this batch
        earlier = np.flatnonzero(wanted < self.due_base)
        value[earlier] = ring[self.due_slot[earlier], wanted[earlier] % self.rows]
        present = wanted >= 0
        return value, None if present.all() else present

    @staticmethod
    def _step(
        agg: Agg, results: dict[str, np.ndarray], value: np.ndarray, present: np.ndarray | None
    ) -> None:
        so_far = results[agg.name]
        if present is None:
            results[agg.name] = agg.ufunc(so_far, value, dtype=so_far.dtype)
        else:
            agg.ufunc(so_far, value, out=so_far, where=present, dtype=so_far.dtype)

    def remember(self, column: Column, table: StateTable, name: str) -> None:
        """Store the last `rows` values of every key in its ring; `column` is by row."""
        groups = self.groups
        rows, slots, index = groups.rows, groups.sorted_slots, self.index
        left = np.repeat(groups.starts + groups.lengths, groups.lengths) - np.arange(rows.size)
        keep = left <= self.rows
        if not keep.all():
            rows, slots, index = rows[keep], slots[keep], index[keep]
        table.put(name, slots, take_column(column, rows), index % self.rows)
