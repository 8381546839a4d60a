"""Spans of rows with an explicit start and end, as in the papers' network-monitoring flow.

A start row opens its key's span, replacing an open one; an end row closes it and emits one row.
An end without an open span, and rows that are neither start nor end, have no effect.

With a timeout, a span expires at the row that moves the watermark to the event time of its start
plus the timeout, whatever epoch that row is in: the span is removed, and emitted on the port
``expired`` at that row's place in the order. A start whose span would have expired before the
start's own row is late: it opens nothing, is counted, and emitted on the port ``late``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pyarrow as pa

from holdfast.engine.batches import Track, as_array, empty, order_arrays, overlaid, take
from holdfast.engine.expressions import AtStart, Col, Expr, column, unwrap
from holdfast.engine.groups import Groups
from holdfast.engine.keys import KeyWords, key_hash
from holdfast.engine.operators.base import KeyedOperator, Port, broadcast, columns_of, holds, infer
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field
from holdfast.engine.watermark import operator_times
from holdfast.errors import FlowError


class Spans(KeyedOperator):
    """Spans without a timeout."""

    label = "spans"

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
                    hint='use for example col("cmd") == 1',
                )
            kind = infer(condition, source.schema, f"{where}, {what}")
            if not pa.types.is_boolean(kind):
                raise FlowError(f"{where}: {what}={condition} has the type {kind}, not bool")
        for name in source.schema.names:
            reserved = AtStart.PREFIX + name
            if reserved in source.schema.names:
                raise FlowError(
                    f"{where}: the column name {reserved!r} is reserved for at_start({name!r})",
                    hint="rename the column",
                )
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

    def parameters(self) -> dict[str, object]:
        return {"start": self.start, "end": self.end, "emit": self.emit}

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
        # A span is open before a row if the previous row of its group is a start; for the
        # first row of a group, the state decides.
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
        """Return a column of the rows that opened the spans now closing."""
        kept = self.table.get(name, groups.sorted_slots[closing[from_state]])
        if from_state.all():
            return kept
        here = batch.column(name).take(pa.array(groups.rows[closing - 1]))
        stored, there = unwrap(kept), unwrap(here)
        if isinstance(stored, np.ndarray) and isinstance(there, np.ndarray):
            there = there.copy()
            there[from_state] = stored
            return pa.array(there)
        return overlaid(here, from_state, kept)

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


class TimedSpans(Spans):
    """Spans with a timeout. The table has only open spans, so the state depends only on
    starts that trail the watermark by less than the timeout."""

    bounded = True
    clocked = True

    def __init__(
        self,
        keys: Sequence[str],
        source: Port,
        start: Expr,
        end: Expr,
        emit: Mapping[str, Expr],
        on: str,
        timeout: int,
        where: str,
    ) -> None:
        super().__init__(keys, source, start, end, emit, where)
        if timeout < 1:
            raise FlowError(f"{where}: timeout must be positive")
        self.on, self.wait = on, timeout + source.delay
        self.horizon = self.wait
        # A span may expire at any time, so every step of the watermark counts.
        self.boundaries = [(1, 0)]
        self.needs[0].add(on)
        begun = [f.name for f in source.schema if f.name in {on, *self.kept} - set(keys)]
        opening = pa.schema([source.schema.field(n) for n in [*keys, *begun]])
        self._kinds = {f.name: f.type for f in opening}
        self.outputs["out"] = self._timed(self.outputs["out"])
        self.outputs["expired"] = Port(opening, 3, on, self.wait)
        self.outputs["late"] = Port(source.schema, source.width)

    def _timed(self, port: Port) -> Port:
        """Return `port` with its event time: that of the span's end or, if only the start's is
        emitted, of its start, which may trail the watermark by the timeout."""
        for name, expr in self.emit.items():
            if isinstance(expr, Col) and expr.name == self.on:
                return replace(port, event_time=name)
        for name, expr in self.emit.items():
            if isinstance(expr, AtStart) and expr.name == self.on:
                return replace(port, event_time=name, delay=self.wait)
        return port

    def parameters(self) -> dict[str, object]:
        return super().parameters() | {"on": self.on, "wait": self.wait}

    def _allocate(self) -> None:
        fields = {n: Field(kind) for n, kind in self._kinds.items()}
        own = {"__over": Field(pa.int64(), Track.NEVER), "__hash": Field(pa.int64())}
        self.table = StateTable(own | fields, self.partitions)
        self._next_over = Track.END

    def install(self, state: dict[str, pa.RecordBatch]) -> None:
        super().install(state)
        over = state["open"].column("__over").to_numpy()
        if over.size:
            self._next_over = min(self._next_over, int(over.min()))

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        whole = inputs[0]
        starts, ends = holds(self.start, whole), holds(self.end, whole)
        over = self._over(whole, starts)
        mark = track.before(column(whole, "__o0"))
        late = starts & (over <= mark)
        rows = np.flatnonzero((starts | ends) & ~late)
        if rows.size or track.final >= self._next_over:
            results = self._follow(take(whole, rows), over[rows], mark[rows], track, epoch)
        else:
            results = {n: empty(self.outputs[n].full_schema) for n in ("out", "expired")}
        self.late_rows += int(np.count_nonzero(late))
        return results | {"late": take(whole, np.flatnonzero(late))}

    def _over(self, batch: pa.RecordBatch, starts: np.ndarray) -> np.ndarray:
        """Return the watermark at which the span of a start expires; `NEVER` for other rows."""
        over = np.full(starts.size, Track.NEVER)
        rows = np.flatnonzero(starts)
        over[rows] = operator_times(take(batch, rows), self.on) + self.wait
        return over

    def _follow(
        self,
        batch: pa.RecordBatch,
        over: np.ndarray,
        mark: np.ndarray,
        track: Track,
        epoch: int,
    ) -> dict[str, pa.RecordBatch]:
        """Process starts and ends, given the watermark before each, and remove expired spans."""
        words = self.words(batch)
        slots = self._slots(words, over != Track.NEVER)
        known = np.flatnonzero(slots >= 0)
        batch, words, over, mark = take(batch, known), words.take(known), over[known], mark[known]
        groups = Groups(slots[known])
        rows = _Ranked(groups, over, mark, self.table["__over"][groups.slots])
        try:
            out = self._emit(batch, groups, rows.closing())
        except Exception:
            self.table.remove(groups.slots[rows.held == Track.NEVER])  # remove the new keys
            raise
        opened = rows.over_before(track.final)
        idle = self._idle(groups.slots, track.final)
        slots = np.concatenate([rows.found_over(), idle])
        expired = self._expired(batch, words, groups.rows[opened], rows.over[opened], slots, track)
        last = groups.lasts
        stays = rows.over[last] > track.final
        opening, last = groups.slots[stays], last[stays]
        self._open(batch, words, groups.rows[last], rows.over[last], opening, epoch)
        self.table.remove(np.concatenate([groups.slots[~stays], idle]))
        return {"out": out, "expired": expired}

    def _slots(self, words: KeyWords, starts: np.ndarray) -> np.ndarray:
        """Return the slot of every row's key; -1 for an end whose key has no state, so that an end
        does not add its key to the table."""
        slots = np.empty(starts.size, np.int64)
        opening, ending = np.flatnonzero(starts), np.flatnonzero(~starts)
        if opening.size:
            slots[opening] = self.table.slots(words.take(opening))
        if ending.size:
            slots[ending] = self.table.find(words.take(ending))
        return slots

    def _idle(self, but: np.ndarray, mark: int) -> np.ndarray:
        """Return the slots of spans expired by `mark`, except `but`: slots with new rows."""
        if mark < self._next_over:
            return np.empty(0, np.int64)
        live = self.table.live()
        over = self.table["__over"][live]
        reached = over <= mark
        rest = over[~reached]
        self._next_over = int(rest.min()) if rest.size else Track.END
        return np.setdiff1d(live[reached], but, assume_unique=True)

    def _expired(
        self,
        batch: pa.RecordBatch,
        words: KeyWords,
        rows: np.ndarray,
        over: np.ndarray,
        slots: np.ndarray,
        track: Track,
    ) -> pa.RecordBatch:
        """Return the expired spans: those opened by these rows and those in these slots."""
        port = self.outputs["expired"]
        if rows.size + slots.size == 0:
            return empty(port.full_schema)
        over = np.concatenate([over, self.table["__over"][slots]])
        hashed = np.concatenate([key_hash(words.take(rows)), self.table["__hash"][slots]])
        seq = track.crossing(over)
        order = np.lexsort((hashed, over, seq))
        columns = []
        for name in port.schema.names:
            both = [batch.column(name).take(pa.array(rows)), self.table.get(name, slots)]
            columns.append(pa.concat_arrays(both).take(pa.array(order)))
        columns += [pa.array(level[order]) for level in (seq, over, hashed)]
        return pa.RecordBatch.from_arrays(columns, schema=port.full_schema)

    def _open(
        self,
        batch: pa.RecordBatch,
        words: KeyWords,
        rows: np.ndarray,
        over: np.ndarray,
        slots: np.ndarray,
        epoch: int,
    ) -> None:
        """Store the spans that these rows opened, replacing earlier ones."""
        if rows.size == 0:
            return
        self.table.renew(slots, epoch)
        self.table["__over"][slots] = over
        self.table["__hash"][slots] = key_hash(words.take(rows))
        for name in self._kinds:
            self.table.put(name, slots, unwrap(batch.column(name).take(pa.array(rows))))
        self._next_over = min(self._next_over, int(over.min()))


class _Ranked:
    """Starts and ends grouped by key, in order within each group.

    ``over[i]`` is the watermark at which the span of a start expires (`NEVER` for an end), and
    ``mark[i]`` is the watermark before the row. The span before a row is that of the previous
    row of its group, if this is a start; for the first row of a group, it is the `held` one.
    """

    def __init__(
        self, groups: Groups, over: np.ndarray, mark: np.ndarray, held: np.ndarray
    ) -> None:
        self.groups, self.held = groups, held
        self.over, self.mark = over[groups.rows], mark[groups.rows]
        self._until = np.empty_like(self.over)
        self._until[1:] = self.over[:-1]
        self._until[groups.starts] = held

    def closing(self) -> np.ndarray:
        """Return the ends that close an open span."""
        return np.flatnonzero((self.over == Track.NEVER) & (self._until > self.mark))

    def over_before(self, final: int) -> np.ndarray:
        """Return the starts whose spans expire before the next row of their key or, if there is
        none, by the watermark `final`."""
        then = np.empty_like(self.mark)
        then[:-1] = self.mark[1:]
        then[self.groups.lasts] = final
        return np.flatnonzero((self.over != Track.NEVER) & (self.over <= then))

    def found_over(self) -> np.ndarray:
        """Return the slots of held spans that expire before the first row of their key."""
        first = self.mark[self.groups.starts]
        return self.groups.slots[(self.held != Track.NEVER) & (self.held <= first)]
