"""Runs operators written for Spark as keyed operators of a flow.

PySpark's `StatefulProcessor` and the functions of `applyInPandasWithState` can observe how a stream
is divided into micro-batches. A flow's results must not depend on such a division. Here *every row
is a micro-batch of its own*, which is one of the divisions that Spark could choose: a call gets one
row of its key, and the watermark that results from the rows before it. Timers and timeouts fire
when the watermark advances, immediately after the row that advances it, as in the no-data batch
that Spark runs when it is idle. All of this is a function of the recorded order. Processing time is
not, so everything that needs it is refused.

The state of a key is a row of a table, as in any operator: its variables as bytes, its timers, and
the first timer in a separate column. A call reads the state of all its keys in one step, runs user
code key by key, and writes the state back in one step if nothing raised.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
from pyspark.sql import Row
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    TimerValues,
)

from holdfast.engine.batches import Track, empty, order_of, sort, take
from holdfast.engine.expressions import column
from holdfast.engine.groups import Groups
from holdfast.engine.keys import key_hash
from holdfast.engine.operators.base import KeyedOperator, Port
from holdfast.engine.state import Field, StateTable
from holdfast.engine.watermark import operator_times
from holdfast.errors import FlowError
from holdfast.spark.schemas import RowCodec, arrow_of, struct_of
from holdfast.spark.state_handles import NO_TIMER, Handle, KeyState, Variable

MODES = ("append", "update")
_PER_MS = {"s": (1, 1_000), "ms": (1, 1), "us": (1_000, 1), "ns": (1_000_000, 1)}
LAST_MS = 253_402_300_799_999
"""The watermark that timers see when the input has ended: the end of the year 9999. It is later
than any valid time, and user code can still do arithmetic with it."""
_LONG_AGO = np.iinfo(np.int64).min


@dataclass(frozen=True)
class SparkClock:
    """Converts the watermark to Spark's: in milliseconds, and delayed by the allowed lateness."""

    on: str
    kind: pa.DataType
    hold: int
    """Delay behind the flow's watermark, in the unit of the event time."""

    @property
    def unit(self) -> str:
        return str(self.kind.unit)

    def behind(self, lateness: int) -> SparkClock:
        return replace(self, hold=self.hold + lateness)

    @property
    def boundary(self) -> tuple[int, int]:
        period = _PER_MS[self.unit][0]
        return period, self.hold % period

    def ms(self, marks: np.ndarray) -> np.ndarray:
        """Convert marks of a track to milliseconds; the final one is later than any timer."""
        divisor, factor = _PER_MS[self.unit]
        moved = (marks != Track.NEVER) & (marks != Track.END)
        ms = (np.where(moved, marks, self.hold) - self.hold) // divisor * factor
        return np.where(moved, ms, np.where(marks == Track.END, NO_TIMER, _LONG_AGO))

    def late(self, batch: pa.RecordBatch, marks_ms: np.ndarray) -> np.ndarray:
        """Return a mask of the rows whose time is not later than the watermark before them."""
        divisor, factor = _PER_MS[self.unit]
        times = operator_times(batch, self.on)
        before = np.where(marks_ms == _LONG_AGO, 0, marks_ms) * divisor
        return (marks_ms != _LONG_AGO) & (times * factor <= before)

    def steps(self, track: Track) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequence numbers at which the watermark advances in milliseconds, and its
        values from there on."""
        ms = self.ms(track.marks)
        moved = np.flatnonzero(ms[1:] > ms[:-1]) + 1
        return track.seqs[moved], ms[moved]


Steps = tuple[np.ndarray, np.ndarray]
NO_STEPS: Steps = (np.empty(0, np.int64), np.empty(0, np.int64))


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
            self._on_row(key_state, row_of(row), _shown(mark) if marks else -1), place, 0
        )
        if marks is not None and self.due(key_state) <= mark:
            for timer in [t for t in key_state.timers if t + self.due_after <= mark]:
                if timer in key_state.timers:
                    first = results.add(self.fire(key_state, timer, mark), place, first)

    def fire(self, key_state: KeyState, timer: int, mark: int) -> Iterator[Any]:
        try:
            yield from self._on_timer(key_state, timer, _shown(mark)) or ()
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


def _shown(mark: int) -> int:
    """Return a mark as user code sees it: it is 0 before the first watermark, as in Spark."""
    return min(max(mark, 0), LAST_MS)


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


# --- StatefulProcessor ----------------------------------------------------------------------------


class TransformWithState(StatefulOperator):
    """PySpark's `transformWithState` and `transformWithStateInPandas`."""

    def __init__(
        self,
        keys: Sequence[str],
        source: Port,
        processor: StatefulProcessor,
        schema: Any,
        *,
        clock: SparkClock | None,
        pandas: bool,
        where: str,
    ) -> None:
        if not isinstance(processor, StatefulProcessor):
            raise FlowError(
                f"{where}: {processor!r} is not a StatefulProcessor", hint="pass an instance"
            )
        self.processor, self.pandas = processor, pandas
        self.label = type(processor).__name__
        here = f"{where}, {self.label}"
        super().__init__(
            keys, source, arrow_of(schema, here), _declared(processor, clock, here), clock, here
        )

    def _begin(self) -> None:
        self.processor = copy.deepcopy(self.processor)
        self._named = Row(*self.keys)
        self._handle = Handle(self.clock is not None, self.where)
        self.processor.init(self._handle)
        self._handle.seal()
        self._adapter = _FrameAdapter(self) if self.pandas else _RowAdapter(self)

    def _inputs(self, batch: pa.RecordBatch) -> Callable[[int], Any]:
        return self._adapter.inputs(batch)

    def _key_values(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return _numpy_keys(columns) if self.pandas else super()._key_values(columns)

    def _on_row(self, key_state: KeyState, row: Any, watermark_ms: int) -> Iterable[Any]:
        values = self._enter(key_state, watermark_ms)
        return self._adapter.checked(
            self.processor.handleInputRows(key_state.key, iter([row]), values)
        )

    def _on_timer(self, key_state: KeyState, due: int, watermark_ms: int) -> Iterable[Any]:
        values = self._enter(key_state, watermark_ms)
        yield from self._adapter.checked(
            self.processor.handleExpiredTimer(
                key=self._named(*key_state.key),
                timerValues=values,
                expiredTimerInfo=ExpiredTimerInfo(due),
            )
        )
        if due in key_state.timers:
            key_state.timers.remove(due)

    def _enter(self, key_state: KeyState, watermark_ms: int) -> TimerValues:
        self._handle.key_state = key_state
        return _EventTime(watermark_ms) if self.clock else TimerValues(-1, -1)

    def _batches(self, outputs: list[Any]) -> list[pa.RecordBatch]:
        return self._adapter.batches(outputs, self.outputs["out"].schema)


class _EventTime(TimerValues):
    """Timer values without processing time."""

    def __init__(self, watermark_ms: int) -> None:
        super().__init__(-1, watermark_ms)

    def getCurrentProcessingTimeInMs(self) -> int:
        raise NotImplementedError(
            "getCurrentProcessingTimeInMs: results in Holdfast never depend on processing time"
        )


def _declared(processor: StatefulProcessor, clock: SparkClock | None, where: str) -> list[Variable]:
    """Call the processor's `init` to learn its state variables, as Spark does on the driver."""
    handle = Handle(clock is not None, where)
    processor = copy.deepcopy(processor)
    try:
        processor.init(handle)
        processor.close()
    except FlowError:
        raise
    except Exception as error:
        raise FlowError(f"{where}: init() raised {type(error).__name__}: {error}") from error
    return handle.variables


# --- applyInPandasWithState -----------------------------------------------------------------------


class ApplyInPandasWithState(StatefulOperator):
    """PySpark's `applyInPandasWithState`. A timeout is a timer; a key has at most one."""

    due_after = 1  # a timeout is due once the watermark is past it

    def __init__(
        self,
        keys: Sequence[str],
        source: Port,
        function: Callable[..., Any],
        schema: Any,
        state_schema: Any,
        *,
        clock: SparkClock | None,
        where: str,
    ) -> None:
        if not callable(function):
            raise FlowError(f"{where}: {function!r} is not a function")
        self.function = function
        self.label = getattr(function, "__name__", "applyInPandasWithState")
        here = f"{where}, {self.label}"
        state = Variable("state", "value", struct_of(state_schema, here))
        super().__init__(keys, source, arrow_of(schema, here), [state], clock, here)

    def _begin(self) -> None:
        self._codec = RowCodec(self.variables[0].schema, self.where)
        self._adapter = _FrameAdapter(self)
        self._no_rows = pd.DataFrame(columns=self._names)

    def _inputs(self, batch: pa.RecordBatch) -> Callable[[int], Any]:
        return self._adapter.inputs(batch)

    def _key_values(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return _numpy_keys(columns)

    def _on_row(self, key_state: KeyState, row: Any, watermark_ms: int) -> Iterable[Any]:
        return self._call(key_state, row, watermark_ms, timed_out=False)

    def _on_timer(self, key_state: KeyState, due: int, watermark_ms: int) -> Iterable[Any]:
        return self._call(key_state, self._no_rows.copy(), watermark_ms, timed_out=True)

    def _call(
        self, key_state: KeyState, frame: pd.DataFrame, watermark_ms: int, timed_out: bool
    ) -> Iterator[Any]:
        state = self._group_state(key_state, watermark_ms, timed_out)
        yield from self._adapter.checked(self.function(key_state.key, iter([frame]), state))
        key_state.put(0, self._codec.encode(tuple(state._value)) if state.exists else None)
        timeout = state._timeout_timestamp
        key_state.timers[:] = [] if timeout == GroupState.NO_TIMESTAMP else [int(timeout)]

    def _group_state(self, key_state: KeyState, watermark_ms: int, timed_out: bool) -> GroupState:
        stored = key_state.value(0)
        conf = GroupStateTimeout
        return _EventTimeState(
            optionalValue=None if stored is None else Row(*self._codec.decode(stored)),
            batchProcessingTimeMs=-1,
            eventTimeWatermarkMs=watermark_ms if self.clock else GroupState.NO_TIMESTAMP,
            timeoutConf=conf.EventTimeTimeout if self.clock else conf.NoTimeout,
            hasTimedOut=timed_out,
            watermarkPresent=self.clock is not None,
            defined=stored is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=self.variables[0].schema,
        )

    def _batches(self, outputs: list[Any]) -> list[pa.RecordBatch]:
        return self._adapter.batches(outputs, self.outputs["out"].schema)


class _EventTimeState(GroupState):
    def getCurrentProcessingTimeMs(self) -> int:
        raise NotImplementedError(
            "getCurrentProcessingTimeMs: results in Holdfast never depend on processing time"
        )


# --- rows in and out ------------------------------------------------------------------------------


class _RowAdapter:
    """Converts inputs and outputs of user code that works on `Row`."""

    def __init__(self, operator: StatefulOperator) -> None:
        self._names, self._label = operator._names, operator.label

    def inputs(self, batch: pa.RecordBatch) -> Callable[[int], Any]:
        row_class = Row(*self._names)
        columns = [batch.column(n).to_pylist() for n in self._names]
        return lambda row: row_class(*(c[row] for c in columns))

    def checked(self, outputs: Iterable[Any] | None) -> Iterator[Any]:
        for output in outputs or ():
            if not (isinstance(output, Row) and hasattr(output, "__fields__")):
                raise TypeError(f"{self._label} returned {output!r}, which is not a Row with names")
            yield output

    def batches(self, outputs: list[Any], schema: pa.Schema) -> list[pa.RecordBatch]:
        return [pa.RecordBatch.from_pylist([row.asDict(True) for row in outputs], schema)]


class _FrameAdapter:
    """Converts inputs and outputs of user code that works on `pandas.DataFrame`."""

    def __init__(self, operator: StatefulOperator) -> None:
        self._names, self._label = operator._names, operator.label

    def inputs(self, batch: pa.RecordBatch) -> Callable[[int], Any]:
        frame, one = _frame(batch.select(self._names)), pd.RangeIndex(1)

        def frame_of(row: int) -> pd.DataFrame:
            part = frame.iloc[row : row + 1].copy()
            part.index = one
            return part

        return frame_of

    def checked(self, outputs: Iterable[Any] | None) -> Iterator[Any]:
        if isinstance(outputs, pd.DataFrame):
            raise TypeError(f"{self._label} returned a DataFrame instead of an iterator of them")
        for output in outputs or ():
            if not isinstance(output, pd.DataFrame):
                raise TypeError(f"{self._label} returned {type(output).__name__}, not a DataFrame")
            if len(output):
                yield output

    def batches(self, outputs: list[Any], schema: pa.Schema) -> list[pa.RecordBatch]:
        """Convert all frames in one step if their columns have the same names and types, which is
        ten times as fast. Concatenating other frames would change their types."""
        first = outputs[0]
        uniform = all(
            f.dtypes.equals(first.dtypes) and f.columns.equals(first.columns) for f in outputs
        )
        frames = [pd.concat(outputs, ignore_index=True)] if uniform else outputs
        return [self._batch(frame, schema) for frame in frames]

    def _batch(self, frame: pd.DataFrame, schema: pa.Schema) -> pa.RecordBatch:
        if len(frame.columns) != len(schema):
            raise TypeError(
                f"{self._label} returned {len(frame.columns)} columns, but its result schema has "
                f"{len(schema)}"
            )
        if all(isinstance(name, str) for name in frame.columns):
            missing = [n for n in schema.names if n not in frame.columns]
            if missing:
                raise TypeError(f"{self._label} returned no column {missing[0]!r}")
            frame = frame[schema.names]
        else:
            frame = frame.set_axis(schema.names, axis=1)
        return pa.RecordBatch.from_pandas(frame, schema, preserve_index=False)


def _frame(batch: pa.RecordBatch) -> pd.DataFrame:
    """Convert a batch to pandas as Spark does in a UTC session: times have no zone."""
    frame = batch.to_pandas(date_as_object=True, coerce_temporal_nanoseconds=True)
    for field in batch.schema:
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            frame[field.name] = frame[field.name].dt.tz_convert("UTC").dt.tz_localize(None)
    return frame


def _numpy_keys(columns: list[pa.Array]) -> list[tuple[Any, ...]]:
    """Return keys in numpy's types, as Spark passes them to pandas functions."""
    frame = _frame(pa.RecordBatch.from_arrays(columns, [f"k{n}" for n in range(len(columns))]))
    arrays = [frame[name].array for name in frame.columns]
    return [tuple(array[i] for array in arrays) for i in range(len(frame))]


# --- refused options ------------------------------------------------------------------------------


def refuse_mode(output_mode: str, where: str) -> None:
    """Raise unless the output mode is append or update, which are equivalent here. The mode
    complete would need a result table, and there is none."""
    if output_mode.lower() not in MODES:
        raise FlowError(
            f"{where}: the output mode {output_mode!r} is not supported",
            hint="use append or update, which give the same rows",
        )


def event_time_of(name: str, where: str) -> bool:
    """Return whether a time mode, or a kind of timeout, uses event time."""
    plain = name.lower()
    if plain in ("processingtime", "processingtimetimeout"):
        raise FlowError(
            f"{where}: {name} is not supported: results in Holdfast never depend on processing "
            "time",
            hint="use event time: EventTime, or EventTimeTimeout",
        )
    if plain not in ("none", "notimeout", "eventtime", "eventtimetimeout"):
        raise FlowError(f"{where}: unknown time mode {name!r}", hint="use None, or event time")
    return plain.startswith("event")


def clock_of(source: Port, on: str, where: str) -> SparkClock:
    """Return the clock of an operator over `source`, whose rows have the event time `on`."""
    kind = source.schema.field(on).type
    if not pa.types.is_timestamp(kind):
        raise FlowError(
            f"{where}: timers are in milliseconds, but the event time {on!r} is {kind}",
            hint="convert it to a timestamp",
        )
    return SparkClock(on, kind, source.delay)
