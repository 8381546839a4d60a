"""The base of operators written for Spark: when user code runs, and for which key.

A call of the operator reads the state of all its keys in one step, runs user code key by key, and
writes the state back in one step if nothing raised.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.engine.batches import Track, empty, order_of, sort, take
from holdfast.engine.expressions import column
from holdfast.engine.groups import Groups
from holdfast.engine.keys import key_hash
from holdfast.engine.operators.base import KeyedOperator, Port
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field
from holdfast.spark.schemas import RowCodec
from holdfast.spark.stateful.clock import NO_STEPS, SparkClock, Steps, shown
from holdfast.spark.stateful.handles import NO_TIMER, KeyState, Variable


class Results:
    """The outputs of user code in one call of the operator, with their places in the order."""

    def __init__(self) -> None:
        self.outputs: list[Any] = []
        self.places: list[tuple[int, int, int, int]] = []
        """The place of each output row. Output of a row: 0, the input row, the number among the
        row's outputs, 0. Output of a timer: 1, the sequence number at which it fired, the key's
        hash, the number among the outputs of the key's timers there."""

    def add(
        self, outputs: Iterable[Any], place: Callable[[int], tuple[Any, ...]], first: int
    ) -> int:
        """Consume the outputs of user code, number them from `first`, and return the next free
        number."""
        for output in outputs if outputs is not None else ():
            rows = len(output) if isinstance(output, pd.DataFrame) else 1
            self.outputs.append(output)
            self.places += [place(n) for n in range(first, first + rows)]
            first += rows
        return first


class StatefulOperator(KeyedOperator):
    """Base of both operators: owns the table, and decides when to call user code for which key."""

    due_after = 0
    """A timer is due once the watermark is at least this many milliseconds past it."""

    def __init__(
        self,
        keys: Sequence[str],
        source: Port,
        schema: pa.Schema,
        variables: Sequence[Variable],
        clock: SparkClock | None,
        where: str,
    ) -> None:
        super().__init__(keys, [source])
        self.needs[0] |= set(source.schema.names)
        self.variables, self.clock, self.where = list(variables), clock, where
        for variable in variables:  # refuse types that cannot be stored
            RowCodec(variable.schema, f"{where}, state {variable.name!r}")
            if variable.keys is not None:
                RowCodec(variable.keys, f"{where}, state {variable.name!r}")
        self._key_kinds = [source.schema.field(k).type for k in keys]
        self._names = source.schema.names
        # One level numbers the outputs of a row; outputs of timers follow them, key by key.
        width = source.width + 1 if clock is None else 2 + max(source.width, 2)
        delay = source.delay if clock is None else clock.hold
        self.outputs["out"] = Port(schema, width, delay=delay)
        if clock is not None:
            self.clocked = True
            self.boundaries = [clock.boundary]
            self.outputs["late"] = Port(source.schema, source.width)

    # --- implemented by the two operators ---------------------------------------------------------

    def _begin(self) -> None:
        """Prepare user code for its first call."""
        raise NotImplementedError

    def _inputs(self, batch: pa.RecordBatch) -> Callable[[int], Any]:
        """Return a function that converts a row to the type that user code takes."""
        raise NotImplementedError

    def _on_row(self, key_state: KeyState, row: Any, watermark_ms: int) -> Iterable[Any]:
        raise NotImplementedError

    def _on_timer(self, key_state: KeyState, due: int, watermark_ms: int) -> Iterable[Any]:
        raise NotImplementedError

    def _batches(self, outputs: list[Any]) -> list[pa.RecordBatch]:
        """Convert the outputs of user code to Arrow."""
        raise NotImplementedError

    def _key_values(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return list(zip(*(c.to_pylist() for c in columns), strict=True))

    # --- state ------------------------------------------------------------------------------------

    def parameters(self) -> dict[str, object]:
        state = {
            v.name: f"{v.kind} {v.schema.simpleString()}"
            + (f" by {v.keys.simpleString()}" if v.keys is not None else "")
            for v in self.variables
        }
        timed = {} if self.clock is None else {"on": self.clock.on, "hold": self.clock.hold}
        return {"state": state, **timed}

    def _allocate(self) -> None:
        fields = {f"__key.{k}": Field(t) for k, t in zip(self.keys, self._key_kinds, strict=True)}
        fields |= {"__hash": Field(pa.int64()), "__next": Field(pa.int64(), NO_TIMER)}
        fields |= {"__timers": Field(pa.binary())}
        fields |= {f"v{n}": Field(pa.binary()) for n in range(len(self.variables))}
        self.table = StateTable(fields, self.partitions)
        self._next_due = NO_TIMER
        self._begin()

    def tables(self) -> dict[str, StateTable]:
        return {"state": self.table}

    def install(self, state: dict[str, pa.RecordBatch]) -> None:
        super().install(state)
        due = state["state"].column("__next").to_numpy()
        if due.size:
            self._next_due = min(self._next_due, int(due.min()))

    def _key_states(self, slots: np.ndarray, keys: list[tuple[Any, ...]]) -> list[KeyState]:
        """Return the states of these slots for user code."""
        columns = [self.table.get(f"v{n}", slots).to_pylist() for n in range(len(self.variables))]
        timers = self.table.get("__timers", slots).to_pylist()
        return [KeyState(key, [c[i] for c in columns], timers[i]) for i, key in enumerate(keys)]

    def _store(self, slots: np.ndarray, key_states: list[KeyState]) -> int:
        """Write the states back; return the earliest mark at which one of their timers is due."""
        stored = [key_state.stored() for key_state in key_states]
        due = np.array([self.due(key_state) for key_state in key_states], np.int64)
        for n in range(len(self.variables)):
            self.table.put(f"v{n}", slots, pa.array([s[n] for s in stored], pa.binary()))
        timers = [key_state.stored_timers() for key_state in key_states]
        self.table.put("__timers", slots, pa.array(timers, pa.binary()))
        self.table["__next"][slots] = due
        return int(due.min())

    def due(self, key_state: KeyState) -> int:
        """Return the mark at which the key's first timer is due."""
        return key_state.timers[0] + self.due_after if key_state.timers else NO_TIMER

    def _remove_empty(self, slots: np.ndarray) -> None:
        """Remove the keys that have neither values nor timers."""
        is_empty = self.table["__next"][slots] == NO_TIMER
        for n in range(len(self.variables)):
            is_empty &= self.table.get(f"v{n}", slots).is_null().to_numpy(zero_copy_only=False)
        if is_empty.any():
            self.table.remove(slots[is_empty])

    # --- an epoch ---------------------------------------------------------------------------------

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        batch, late = self._punctual(inputs[0], track)
        steps = self.clock.steps(track) if self.clock else NO_STEPS
        words = self.words(batch)
        groups = Groups(self.table.slots(words)) if batch.num_rows else None
        with_rows = groups.slots if groups else np.empty(0, np.int64)
        idle, next_due = self._due_slots(steps, with_rows)
        slots = np.concatenate([with_rows, idle])
        if slots.size == 0:
            return self._ports(empty(self.outputs["out"].full_schema), late)
        self.table.touch(slots, epoch)
        if groups:
            self._name_keys(groups, batch, key_hash(words))
        key_states = self._key_states(slots, self._keys_of(slots))
        try:
            out = self._run(batch, track, steps, groups, slots, key_states)
        except Exception:
            self._remove_empty(with_rows)  # the new keys; nothing else has changed
            raise
        self._next_due = min(next_due, self._store(slots, key_states))
        self._remove_empty(slots)
        return self._ports(out, late)

    def _ports(self, out: pa.RecordBatch, late: pa.RecordBatch | None) -> dict[str, pa.RecordBatch]:
        if late is None:
            return {"out": out}
        self.late_rows += late.num_rows
        return {"out": out, "late": late}

    def _punctual(
        self, batch: pa.RecordBatch, track: Track
    ) -> tuple[pa.RecordBatch, pa.RecordBatch | None]:
        """Split a batch into the rows on time and the late rows."""
        if self.clock is None or batch.num_rows == 0:
            return batch, None if self.clock is None else batch
        late = self.clock.late(batch, self._marks_ms(batch, track))
        return take(batch, np.flatnonzero(~late)), take(batch, np.flatnonzero(late))

    def _marks_ms(self, batch: pa.RecordBatch, track: Track) -> np.ndarray:
        assert self.clock is not None
        return self.clock.ms(track.before(column(batch, "__o0")))

    def _due_slots(self, steps: Steps, but: np.ndarray) -> tuple[np.ndarray, int]:
        """Return the slots outside `but` whose timers are due within these steps, and the earliest
        mark at which a timer of the remaining keys is due."""
        if steps[1].size == 0 or steps[1][-1] < self._next_due:
            return np.empty(0, np.int64), self._next_due
        live = self.table.live()
        due = self.table["__next"][live]
        reached = (due <= steps[1][-1]) & (due != NO_TIMER)
        others = due[~reached]
        return np.setdiff1d(live[reached], but), int(others.min()) if others.size else NO_TIMER

    def _name_keys(self, groups: Groups, batch: pa.RecordBatch, hashes: np.ndarray) -> None:
        first = groups.rows[groups.starts]
        for key in self.keys:
            values = batch.column(key).take(pa.array(first))
            if pa.types.is_floating(values.type):
                values = pc.add(values, pa.scalar(0, values.type))  # -0.0 and 0.0 are one key
            self.table.put(f"__key.{key}", groups.slots, values)
        self.table["__hash"][groups.slots] = hashes[first]

    def _keys_of(self, slots: np.ndarray) -> list[tuple[Any, ...]]:
        return self._key_values([self.table.get(f"__key.{k}", slots) for k in self.keys])

    def _run(
        self,
        batch: pa.RecordBatch,
        track: Track,
        steps: Steps,
        groups: Groups | None,
        slots: np.ndarray,
        key_states: list[KeyState],
    ) -> pa.RecordBatch:
        """Run all keys one after the other: the rows and timers of each in their order."""
        results = Results()
        hashes = self.table["__hash"][slots].tolist()
        seqs = column(batch, "__o0").tolist() if groups else []
        marks = self._marks_ms(batch, track).tolist() if groups and self.clock else None
        row_of = self._inputs(batch) if groups else None
        bounds = [*groups.starts.tolist(), groups.rows.size] if groups else [0]
        for n, key_state in enumerate(key_states):
            timers = _Timers(self, key_state, hashes[n], steps, results)
            if groups and row_of is not None and n + 1 < len(bounds):
                for row in groups.rows[bounds[n] : bounds[n + 1]].tolist():
                    timers.fire_before(seqs[row])
                    self._run_row(key_state, row, row_of, marks, results)
            timers.fire_rest()
        return self._placed(batch, results)

    def _run_row(
        self,
        key_state: KeyState,
        row: int,
        row_of: Callable[[int], Any],
        marks: list[int] | None,
        results: Results,
    ) -> None:
        """Run a micro-batch of one row: the row, then the timers that are due by its watermark."""

        def place(n: int) -> tuple[int, int, int, int]:
            return (0, row, n, 0)

        mark = -1 if marks is None else marks[row]
        first = results.add(
            self._on_row(key_state, row_of(row), shown(mark) if marks else -1), place, 0
        )
        if marks is not None and self.due(key_state) <= mark:
            for timer in [t for t in key_state.timers if t + self.due_after <= mark]:
                if timer in key_state.timers:
                    first = results.add(self.fire(key_state, timer, mark), place, first)

    def fire(self, key_state: KeyState, timer: int, mark: int) -> Iterator[Any]:
        try:
            yield from self._on_timer(key_state, timer, shown(mark)) or ()
        except Exception as error:
            raise RuntimeError(
                f"the timer at {timer} ms of key {key_state.key!r} raised "
                f"{type(error).__name__}: {error}"
            ) from error

    def _placed(self, batch: pa.RecordBatch, results: Results) -> pa.RecordBatch:
        """Return the results with their order key, sorted."""
        port = self.outputs["out"]
        if not results.places:
            return empty(port.full_schema)
        rows = pa.Table.from_batches(self._batches(results.outputs), port.schema)
        (rows,) = rows.combine_chunks().to_batches()
        phase, *places = np.array(results.places, np.int64).T
        levels = self._levels(batch, phase == 1, *places)
        arrays = [*rows.columns, *(pa.array(level) for level in levels)]
        return sort(pa.RecordBatch.from_arrays(arrays, schema=port.full_schema))

    def _levels(
        self, batch: pa.RecordBatch, timed: np.ndarray, a: np.ndarray, b: np.ndarray, c: np.ndarray
    ) -> list[np.ndarray]:
        if self.clock is None:
            return [*(level[a] for level in order_of(batch)), b]
        levels = [np.where(timed, a, 0), timed.astype(np.int64), np.where(timed, b, 0)]
        levels += [np.where(timed, c, 0)]
        levels += [np.zeros_like(a) for _ in range(self.outputs["out"].width - len(levels))]
        rows = a[~timed]
        own = [level[rows] for level in order_of(batch)] if rows.size else []
        for at, level in zip((0, *range(2, len(levels))), [*own, b[~timed]], strict=False):
            levels[at][~timed] = level
        return levels


class _Timers:
    """Fires the timers of one key along the steps of the watermark."""

    def __init__(
        self,
        operator: StatefulOperator,
        key_state: KeyState,
        hashed: int,
        steps: Steps,
        results: Results,
    ) -> None:
        self._operator, self._key_state, self._hash = operator, key_state, hashed
        self._seqs, self._marks = steps
        self._results = results
        self._at = 0  # the next step
        self._seq, self._number = -1, 0

    def fire_before(self, seq: int) -> None:
        """Fire the timers that are due before the row `seq`; a step at a row comes after it."""
        if self._seqs.size:
            self._advance(int(np.searchsorted(self._seqs, seq, "left")))

    def fire_rest(self) -> None:
        self._advance(self._seqs.size)

    def _advance(self, end: int) -> None:
        while self._at < end:
            due = int(np.searchsorted(self._marks, self._operator.due(self._key_state), "left"))
            self._at = min(max(self._at, due), end)
            if self._at < end:
                self._step(int(self._seqs[self._at]), int(self._marks[self._at]))
                self._at += 1

    def _step(self, seq: int, mark: int) -> None:
        """Fire the timers that are due at this step. Timers that they register wait for the next
        step."""
        if seq != self._seq:
            self._seq, self._number = seq, 0
        after = self._operator.due_after
        for timer in [t for t in self._key_state.timers if t + after <= mark]:
            if timer in self._key_state.timers:
                outputs = self._operator.fire(self._key_state, timer, mark)
                self._number = self._results.add(
                    outputs, lambda n: (1, seq, self._hash, n), self._number
                )
