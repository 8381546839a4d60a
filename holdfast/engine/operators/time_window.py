"""Event-time windows, tumbling and sliding.

A window ``[start, end)`` closes at the row that moves the watermark to ``end + lateness``, and its
result has that row's place in the order, whatever epoch the row is in. A row is late if all its
windows closed before it: it is counted, and emitted on the port ``late``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import pyarrow as pa

from holdfast.engine.aggregates import Aggregate
from holdfast.engine.batches import Track, as_array, empty, take, take_column
from holdfast.engine.expressions import Column, column
from holdfast.engine.groups import Groups
from holdfast.engine.keys import KeyWords, key_hash, mix, partition_of
from holdfast.engine.operators.base import (
    LARGEST,
    Agg,
    KeyedOperator,
    Port,
    columns_of,
    overflows,
    peak,
)
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field
from holdfast.engine.watermark import operator_times
from holdfast.errors import FlowError

START, END = "window_start", "window_end"


class TimeWindow(KeyedOperator):
    """The event-time window."""

    label = "time window"
    bounded = True
    clocked = True

    def __init__(
        self,
        keys: Sequence[str],
        source: Port,
        on: str,
        size: int,
        every: int,
        lateness: int,
        aggregates: Mapping[str, Aggregate],
        where: str,
    ) -> None:
        super().__init__(keys, [source])
        if size < 1 or every < 1 or lateness < 0:
            raise FlowError(f"{where}: time and every must be positive and lateness not negative")
        if every > size:
            raise FlowError(
                f"{where}: every={every} is longer than time={size}: rows would be in no window"
            )
        self.on, self.size, self.every = on, size, every
        self.hold = lateness + source.delay
        self.horizon = size + self.hold
        self.boundaries = [(every, (size + self.hold) % every)]
        self.aggs = [Agg.bind(n, a, source.schema, where) for n, a in aggregates.items()]
        self.time_kind = source.schema.field(on).type
        fields = [source.schema.field(k) for k in keys]
        fields += [pa.field(START, self.time_kind), pa.field(END, self.time_kind)]
        fields += [pa.field(a.name, a.result_type) for a in self.aggs]
        self.outputs["out"] = Port(pa.schema(fields), 3, START, self.hold + size)
        self.outputs["late"] = Port(source.schema, source.width)
        self.needs[0] |= columns_of(list(aggregates.values())) | {on}
        self._key_kinds = [source.schema.field(k).type for k in keys]

    def parameters(self) -> dict[str, object]:
        given = {"on": self.on, "time": self.size, "every": self.every, "hold": self.hold}
        return given | {a.name: a for a in self.aggs}

    def _allocate(self) -> None:
        fields = {f"__key.{k}": Field(t) for k, t in zip(self.keys, self._key_kinds, strict=True)}
        fields |= {a.name: a.field for a in self.aggs}
        base = {
            "__n": Field(pa.int64()),
            "__window": Field(pa.int64()),
            "__hash": Field(pa.int64()),
        }
        self.table = StateTable(base | fields, self.partitions)
        self._next_close = Track.END
        self._peaks = dict.fromkeys((a.name for a in self.aggs if a.bounded), 0)
        """Upper bounds of the absolute sums in the table: small bounds rule out overflow."""

    def tables(self) -> dict[str, StateTable]:
        return {"windows": self.table}

    def install(self, state: dict[str, pa.RecordBatch]) -> None:
        super().install(state)
        for name, known in self._peaks.items():
            self._peaks[name] = max(known, peak(state["windows"].column(name).to_numpy()))
        windows = state["windows"].column("__window").to_numpy()
        if windows.size:
            self._next_close = min(self._next_close, int(self._close_at(windows.min())))

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        batch = inputs[0]
        late = self._fold(batch, track, epoch) if batch.num_rows else np.empty(0, np.int64)
        self.late_rows += late.size
        out = self._close(track)
        return {"out": out, "late": take(batch, late)}

    def _close_at(self, window: np.ndarray) -> np.ndarray:
        """Return the watermark at which each window closes."""
        return window * self.every + (self.size + self.hold)

    def _fold(self, batch: pa.RecordBatch, track: Track, epoch: int) -> np.ndarray:
        """Add the rows to their open windows; return the rows that are late."""
        times = operator_times(batch, self.on)
        rows, window = self._assign(times)
        mark = track.before(column(batch, "__o0"))
        open_ = self._close_at(window) > mark[rows]
        on_time = np.zeros(times.size, bool)
        on_time[rows[open_]] = True
        rows, window = rows[open_], window[open_]
        if rows.size:
            self._add(batch, rows, window, epoch)
        return np.flatnonzero(~on_time)

    def _assign(self, times: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return all (row, window) pairs by row; window `w` covers [w*every, w*every + size)."""
        newest = times // self.every
        per_row = -(-self.size // self.every)
        if per_row == 1:
            return np.arange(times.size), newest
        window = newest[:, None] - np.arange(per_row - 1, -1, -1)
        inside = window * self.every + self.size > times[:, None]
        rows = np.repeat(np.arange(times.size), per_row).reshape(inside.shape)
        return rows[inside], window[inside]

    def _add(self, batch: pa.RecordBatch, rows: np.ndarray, window: np.ndarray, epoch: int) -> None:
        # Everything that can raise precedes the first change of state.
        operands = {a.name: self._operand(a, batch, rows) for a in self.aggs}
        words = self.words(batch).take(rows)
        slots = self.table.slots(_with_window(words, window), partition_of(words, self.partitions))
        seen = self.table["__n"][slots]
        try:
            self._check_sums(operands, batch, rows, slots)
        except OverflowError:
            self.table.remove(slots[seen == 0])  # remove the new keys
            raise
        self.table.touch(slots, epoch)
        opening = np.flatnonzero(seen == 0)[
            ::-1
        ]  # reversed: the first row of a slot is written last
        first_slots, first_rows = slots[opening], rows[opening]
        self.table["__window"][first_slots] = window[opening]
        self.table["__hash"][first_slots] = key_hash(words.take(opening))
        for key in self.keys:
            values = batch.column(key).take(pa.array(first_rows))
            self.table.put(f"__key.{key}", first_slots, values)
        for agg in self.aggs:
            operand = operands[agg.name]
            if agg.kind == "first":
                self.table.put(agg.name, first_slots, take_column(operand, opening))
            elif agg.kind == "last":
                self.table.put(agg.name, slots, operand)
            else:
                agg.ufunc.at(self.table[agg.name], slots, operand)
        np.add.at(self.table["__n"], slots, 1)
        self._next_close = min(self._next_close, int(self._close_at(window.min())))

    def _check_sums(
        self,
        operands: Mapping[str, Column],
        batch: pa.RecordBatch,
        rows: np.ndarray,
        slots: np.ndarray,
    ) -> None:
        """Raise if a row makes a window's sum, folded in order, overflow int64."""
        for agg in self.aggs:
            if not agg.bounded:
                continue
            values, held = operands[agg.name], self.table[agg.name]
            added = peak(values) * rows.size
            if self._peaks[agg.name] + added > LARGEST:
                self._peaks[agg.name] = peak(held[self.table.live()])
            if self._peaks[agg.name] + added > LARGEST:
                groups = Groups(slots)
                initial, values = held[groups.slots], values[groups.rows]
                folded = groups.fold(agg.ufunc, initial, values)
                wrong = overflows(groups, initial, values, folded)
                self.refuse_sums(agg, batch, rows[groups.rows[wrong]])
            self._peaks[agg.name] += added

    @staticmethod
    def _operand(agg: Agg, batch: pa.RecordBatch, rows: np.ndarray) -> Column:
        if agg.kind == "count":
            return np.ones(rows.size, np.int64)
        whole = agg.column(batch) if agg.picks else agg.values(batch)
        return take_column(whole, rows)

    def _close(self, track: Track) -> pa.RecordBatch:
        if track.final < self._next_close:
            return empty(self.outputs["out"].full_schema)
        live = self.table.live()
        window = self.table["__window"][live]
        closing = self._close_at(window) <= track.final
        slots, window = live[closing], window[closing]
        rest = self.table["__window"][live[~closing]]
        self._next_close = int(self._close_at(rest).min()) if rest.size else Track.END
        out = self._results(slots, window, track)
        self.table.remove(slots)
        return out

    def _results(self, slots: np.ndarray, window: np.ndarray, track: Track) -> pa.RecordBatch:
        seq = track.crossing(self._close_at(window))
        hashed = self.table["__hash"][slots]
        order = np.lexsort((hashed, window, seq))
        slots, window = slots[order], window[order]
        port = self.outputs["out"]
        start = window * self.every
        time = Field(self.time_kind)
        columns: list[pa.Array] = [self.table.get(f"__key.{k}", slots) for k in self.keys]
        columns += [time.loaded(start.astype(time.dtype), None)]
        columns += [time.loaded((start + self.size).astype(time.dtype), None)]
        for agg in self.aggs:
            value = self.table.get(agg.name, slots)
            if agg.kind == "mean":
                value = pa.array(self.table[agg.name][slots] / self.table["__n"][slots])
            columns.append(as_array(value, agg.result_type))
        columns += [pa.array(c) for c in (seq[order], window, hashed[order])]
        return pa.RecordBatch.from_arrays(columns, schema=port.full_schema)


def _with_window(words: KeyWords, window: np.ndarray) -> KeyWords:
    """Return the identity of (key, window)."""
    if words.high is None:
        return KeyWords(words.low, window)
    return KeyWords(words.low, window ^ mix(words.high.view(np.uint64)).view(np.int64))
