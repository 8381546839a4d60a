"""Sessions with an explicit start and end, as in the papers' network-monitoring flow.

A start row opens its key's session (and replaces one that is open); an end row closes it and
emits one row. An end without an open session, and rows that are neither, cause nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.errors import FlowError
from holdfast.flow.batches import Track, as_array, empty, order_arrays, take
from holdfast.flow.expr import AtStart, Column, Expr, unwrap
from holdfast.flow.groups import Groups
from holdfast.flow.operators.base import KeyedOperator, Port, broadcast, columns_of, holds, infer
from holdfast.flow.state import Field, StateTable


class Sessions(KeyedOperator):
    label = "sessions"

    def __init__(
        self,
        keys: Sequence[str],
        source: Port,
        start: Expr,
        end: Expr,
        emit: Mapping[str, Expr],
        where: str,
    ) -> None:
        super().__init__(keys, [source])
        self.start, self.end, self.emit = start, end, dict(emit)
        for what, condition in (("start", start), ("end", end)):
            if not isinstance(condition, Expr):
                raise FlowError(
                    f"{where}: {what}={condition!r} is not an expression",
                    hint='write for example col("cmd") == 1',
                )
            kind = infer(condition, source.schema, f"{where}, {what}")
            if not pa.types.is_boolean(kind):
                raise FlowError(f"{where}: {what}={condition} is not a condition but {kind}")
        for name in source.schema.names:
            taken = AtStart.PREFIX + name
            if taken in source.schema.names:
                raise FlowError(f"{where}: {taken!r} means at_start({name!r}); rename the column")
        opened = [pa.field(AtStart.PREFIX + f.name, f.type) for f in source.schema]
        both = pa.schema([*source.schema, *opened])
        fields = [pa.field(n, infer(e, both, f"{where}, emit {n!r}")) for n, e in emit.items()]
        read = columns_of(list(emit.values()))
        self.kept = sorted(
            n.removeprefix(AtStart.PREFIX) for n in read if n.startswith(AtStart.PREFIX)
        )
        plain = {n for n in read if not n.startswith(AtStart.PREFIX)}
        self.needs[0] |= plain | set(self.kept) | columns_of([start, end])
        self.outputs["out"] = Port(pa.schema(fields), source.width, delay=source.delay)
        self._kinds = {n: source.schema.field(n).type for n in self.kept}

    def _allocate(self) -> None:
        fields = {n: Field(kind) for n, kind in self._kinds.items()}
        self.table = StateTable({"__open": Field(pa.bool_(), False), **fields}, self.partitions)

    def tables(self) -> dict[str, StateTable]:
        return {"open": self.table}

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        batch, starts = self._relevant(inputs[0])
        if batch.num_rows == 0:
            return {"out": empty(self.outputs["out"].full_schema)}
        groups = Groups(self.table.slots(self.words(batch)))
        starts = starts[groups.rows]
        # What a row finds open: the row before it in its group, if that is a start; for the
        # first row of a group, what the state says.
        was_open = np.empty(starts.size, bool)
        was_open[1:] = starts[:-1]
        was_open[groups.starts] = self.table["__open"][groups.slots]
        closing = np.flatnonzero(was_open & ~starts)
        out = self._emit(batch, groups, closing)
        self._remember(batch, groups, starts, epoch)
        return {"out": out}

    def _relevant(self, batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
        starts, ends = holds(self.start, batch), holds(self.end, batch)
        relevant = starts | ends
        if not relevant.all():
            rows = np.flatnonzero(relevant)
            return take(batch, rows), starts[rows]
        return batch, starts

    def _emit(self, batch: pa.RecordBatch, groups: Groups, closing: np.ndarray) -> pa.RecordBatch:
        closing = closing[groups.in_row_order(closing)]
        rows = groups.rows[closing]
        ends = take(batch, rows)
        from_state = groups.is_first[closing]
        arrays, names = list(ends.columns), list(ends.schema.names)
        for name in self.kept:
            arrays.append(self._opening(name, batch, groups, closing, from_state))
            names.append(AtStart.PREFIX + name)
        seen = pa.RecordBatch.from_arrays(arrays, names=names)
        port = self.outputs["out"]
        columns = [
            as_array(broadcast(e.eval(seen), rows.size, f.type), f.type)
            for e, f in zip(self.emit.values(), port.schema, strict=True)
        ]
        return pa.RecordBatch.from_arrays([*columns, *order_arrays(ends)], schema=port.full_schema)

    def _opening(
        self,
        name: str,
        batch: pa.RecordBatch,
        groups: Groups,
        closing: np.ndarray,
        from_state: np.ndarray,
    ) -> pa.Array:
        """A column of the rows that opened the sessions now closing."""
        kept = self.table.get(name, groups.sorted_slots[closing])
        if from_state.all():
            return kept
        here: Column = batch.column(name).take(pa.array(groups.rows[closing - 1]))
        stored, there = unwrap(kept), unwrap(here)
        if isinstance(stored, np.ndarray) and isinstance(there, np.ndarray):
            return pa.array(np.where(from_state, stored, there))
        return pc.if_else(pa.array(from_state), kept, here)

    def _remember(
        self, batch: pa.RecordBatch, groups: Groups, starts: np.ndarray, epoch: int
    ) -> None:
        self.table.touch(groups.slots, epoch)
        lasts = groups.lasts
        opens = starts[lasts]
        self.table["__open"][groups.slots] = opens
        rows, slots = groups.rows[lasts[opens]], groups.slots[opens]
        for name in self.kept:
            self.table.put(name, slots, unwrap(batch.column(name).take(pa.array(rows))))
