"""Running aggregate: after every row, the aggregates of all rows of its key so far."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from holdfast.engine.aggregates import Aggregate
from holdfast.engine.batches import Track, build, order_arrays, take_column
from holdfast.engine.expressions import Column
from holdfast.engine.groups import Groups
from holdfast.engine.operators.base import Agg, KeyedOperator, Port, columns_of, overflows
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field


class RunningAggregate(KeyedOperator):
    """The running aggregate."""

    label = "running aggregate"

    def __init__(
        self, keys: Sequence[str], source: Port, aggregates: Mapping[str, Aggregate], where: str
    ) -> None:
        super().__init__(keys, [source])
        self.aggs = [Agg.bind(n, a, source.schema, where) for n, a in aggregates.items()]
        self.needs[0] |= columns_of(list(aggregates.values()))
        fields = [source.schema.field(k) for k in keys]
        fields += [pa.field(a.name, a.result_type) for a in self.aggs]
        self.outputs["out"] = Port(pa.schema(fields), source.width, delay=source.delay)

    def parameters(self) -> dict[str, object]:
        return {a.name: a for a in self.aggs}

    def _allocate(self) -> None:
        fields = {a.name: a.field for a in self.aggs if a.kind not in ("count", "last")}
        self.table = StateTable({"__n": Field(pa.int64()), **fields}, self.partitions)

    def tables(self) -> dict[str, StateTable]:
        return {"groups": self.table}

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        batch = inputs[0]
        operands = {
            a.name: self._operand(a, batch) for a in self.aggs
        }  # may raise, so before any change
        slots = self.table.slots(self.words(batch))
        groups = Groups(slots)
        seen = self.table["__n"][groups.slots]
        try:
            folds = {a.name: self._folded(a, operands[a.name], groups, batch) for a in self.aggs}
        except OverflowError:
            self.table.remove(groups.slots[seen == 0])  # remove the new keys
            raise
        self.table.touch(groups.slots, epoch)
        counts = groups.scattered(np.repeat(seen, groups.lengths) + groups.ranks() + 1)
        columns: dict[str, object] = {k: batch.column(k) for k in self.keys}
        for agg in self.aggs:
            operand, folded = operands[agg.name], folds[agg.name]
            columns[agg.name] = self._advance(agg, operand, folded, slots, groups, seen, counts)
        self.table["__n"][groups.slots] = seen + groups.lengths
        out = build(columns, self.outputs["out"].schema)
        arrays = [*out.columns, *order_arrays(batch)]
        schema = self.outputs["out"].full_schema
        return {"out": pa.RecordBatch.from_arrays(arrays, schema=schema)}

    @staticmethod
    def _operand(agg: Agg, batch: pa.RecordBatch) -> Column:
        if agg.kind == "count":
            return np.empty(0)
        return agg.column(batch) if agg.picks else agg.values(batch)

    def _folded(
        self, agg: Agg, operand: Column, groups: Groups, batch: pa.RecordBatch
    ) -> np.ndarray | None:
        """Return the value of a fold after every row, in sorted positions; None without a fold."""
        if agg.kind == "count" or agg.picks:
            return None
        initial, values = self.table[agg.name][groups.slots], operand[groups.rows]
        folded = groups.fold(agg.ufunc, initial, values)
        if agg.bounded:
            wrong = overflows(groups, initial, values, folded)
            self.refuse_sums(agg, batch, groups.rows[wrong])
        return folded

    def _advance(
        self,
        agg: Agg,
        operand: Column,
        folded: np.ndarray | None,
        slots: np.ndarray,
        groups: Groups,
        seen: np.ndarray,
        counts: np.ndarray,
    ) -> object:
        """Update one aggregate's state and return its value after every row."""
        if agg.kind == "count":
            return counts
        if agg.kind == "last":
            return operand
        if agg.kind == "first":
            new = seen == 0
            opening = groups.rows[groups.starts[new]]
            self.table.put(agg.name, groups.slots[new], take_column(operand, opening))
            return self.table.get(agg.name, slots)
        assert folded is not None
        self.table[agg.name][groups.slots] = folded[groups.lasts]
        result = groups.scattered(folded)
        if agg.kind == "mean":
            return result / counts
        return self.table.fields[agg.name].loaded(result, None)
