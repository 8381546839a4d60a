"""Row-count window: after every `every`-th row of a key, the aggregates of its last `rows` rows.

While a key has had fewer than `rows`, the window holds those it has had.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from holdfast.errors import FlowError
from holdfast.flow.batches import Track, as_array, order_arrays, take
from holdfast.flow.expr import Aggregate
from holdfast.flow.groups import Groups
from holdfast.flow.operators.base import Agg, KeyedOperator, Port, columns_of, one_zero
from holdfast.flow.state import Field, StateTable


class RowWindow(KeyedOperator):
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
                raise FlowError(
                    f"{where}: {what} must be a whole number of at least 1, not {value!r}"
                )
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
        fields += [pa.field(a.name, a.given) for a in self.aggs]
        self.outputs["out"] = Port(pa.schema(fields), source.width, delay=source.delay)

    def _allocate(self) -> None:
        fields = {n: Field(aggs[0].taken, width=self.rows) for n, aggs in self.rings.items()}
        self.table = StateTable({"__n": Field(pa.int64()), **fields}, self.partitions)

    def tables(self) -> dict[str, StateTable]:
        return {"history": self.table}

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        batch = inputs[0]
        operands = {n: aggs[0].whole(batch) for n, aggs in self.rings.items()}  # what can raise
        groups = Groups(self.table.slots(self.words(batch)))
        self.table.touch(groups.slots, epoch)
        seen = self.table["__n"][groups.slots]
        base = np.repeat(seen, groups.lengths)
        index = base + groups.ranks()  # each row's number among all rows of its key
        if self.every == 1:
            due = np.arange(index.size)
        else:
            due = np.flatnonzero((index + 1) % self.every == 0)
        windows = _Windows(self.rows, groups, index, base, due)
        results: dict[str, np.ndarray] = {}
        for name, aggs in self.rings.items():
            values = operands[name][groups.rows]
            results |= windows.fold(aggs, values, self.table[name])
            windows.remember(values, self.table[name])
        results |= {a.name: windows.count for a in self.aggs if a.kind == "count"}
        self.table["__n"][groups.slots] = seen + groups.lengths
        return {"out": self._output(batch, groups, due, results)}

    def _output(
        self, batch: pa.RecordBatch, groups: Groups, due: np.ndarray, results: dict[str, np.ndarray]
    ) -> pa.RecordBatch:
        """Put the results, which are grouped by key, back into the order of their rows."""
        restore = groups.in_row_order(due)
        origin = take(batch, groups.rows[due[restore]])
        port = self.outputs["out"]
        arrays = [origin.column(k) for k in self.keys]
        for agg in self.aggs:
            field = agg.given_field
            loaded = field.loaded(results[agg.name][restore].astype(field.dtype, copy=False), None)
            arrays.append(as_array(loaded, agg.given))
        return pa.RecordBatch.from_arrays([*arrays, *order_arrays(origin)], schema=port.full_schema)


class _Windows:
    """The windows that end at the rows `due`, all stepped through together from old to new."""

    def __init__(
        self, rows: int, groups: Groups, index: np.ndarray, base: np.ndarray, due: np.ndarray
    ) -> None:
        self.rows, self.groups, self.index = rows, groups, index
        self.due = due
        self.due_index = index[due]
        self.due_base = base[due]
        self.due_slot = groups.sorted_slots[due]
        self.count = np.minimum(self.due_index + 1, rows)

    def fold(self, aggs: list[Agg], values: np.ndarray, ring: np.ndarray) -> dict[str, np.ndarray]:
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
        return results

    def _start(self, agg: Agg) -> np.ndarray:
        return np.full(self.due.size, agg.field.allocate(1)[0], agg.field.dtype)

    def _at_age(
        self, age: int, values: np.ndarray, ring: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray | None]:
        """The value `age` rows before each window's end, and where there is one (None: all)."""
        if age == 0:
            return values[self.due], None
        wanted = self.due_index - age
        value = values[np.maximum(self.due - age, 0)]  # right where the row is in this batch
        earlier = np.flatnonzero(wanted < self.due_base)
        value[earlier] = ring[self.due_slot[earlier], wanted[earlier] % self.rows]
        present = wanted >= 0
        return value, None if present.all() else present

    @staticmethod
    def _step(
        agg: Agg, results: dict[str, np.ndarray], value: np.ndarray, present: np.ndarray | None
    ) -> None:
        so_far = results[agg.name]
        if agg.kind == "last":
            results[agg.name] = value
        elif agg.kind == "first":
            fresh = results.setdefault(f"?{agg.name}", np.ones(so_far.size, bool))
            here = fresh if present is None else fresh & present
            so_far[here] = value[here]
            fresh &= ~here
        elif present is None:
            results[agg.name] = agg.ufunc(so_far, value, dtype=so_far.dtype)
        else:
            agg.ufunc(so_far, value, out=so_far, where=present, dtype=so_far.dtype)

    def remember(self, values: np.ndarray, ring: np.ndarray) -> None:
        """Keep the last `rows` values of every key in its ring."""
        groups = self.groups
        left = np.repeat(groups.starts + groups.lengths, groups.lengths) - np.arange(values.size)
        keep = left <= self.rows
        if keep.all():
            ring[groups.sorted_slots, self.index % self.rows] = values
        else:
            ring[groups.sorted_slots[keep], self.index[keep] % self.rows] = values[keep]
