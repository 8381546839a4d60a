"""What a user does to rows: streams, keyed streams, and what their operators give.

Every call checks what can be known before the run (columns, types, names) and adds a node to the
graph; nothing runs here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, overload

import numpy as np
import pyarrow as pa

from holdfast.api.columns import (
    declared,
    event_time_of,
    refuse_reach,
    refuse_reserved,
)
from holdfast.api.nodes import (
    FlowNode,
    KeyedNode,
    Merge,
    SinkNode,
    StepNode,
    UnionNode,
    descends_from_dead_letters,
    disjoint,
)
from holdfast.api.protection import Protection
from holdfast.api.windows import RowWindows, TimeWindows, refuse_none
from holdfast.connectors.sinks import Sink
from holdfast.engine.aggregates import Aggregate
from holdfast.engine.durations import Duration, event_units
from holdfast.engine.expressions import Expr, at_start, col, computed
from holdfast.engine.operators.base import KeyedOperator, Port, require_columns
from holdfast.engine.operators.custom import CustomOperator, KeyedFunction
from holdfast.engine.operators.join import WindowJoin
from holdfast.engine.operators.running import RunningAggregate
from holdfast.engine.operators.spans import Spans, TimedSpans
from holdfast.engine.steps import Filter, FlatMap, Select, Step, UserMap
from holdfast.engine.types import refuse_type
from holdfast.errors import FlowError

if TYPE_CHECKING:
    import pandas as pd
    from pyspark.sql.streaming import StatefulProcessor
    from pyspark.sql.types import StructType

    from holdfast.api.graph import Flow
    from holdfast.spark.stateful.clock import SparkClock

Origins: TypeAlias = Sequence[int] | np.ndarray | pa.Array
SparkSchema: TypeAlias = "StructType | str"
OutputMode: TypeAlias = Literal["append", "update"]
PandasWithState: TypeAlias = Callable[..., Any]
"""As Spark calls it: with the key, an iterator of DataFrames, and the state."""


class Stream:
    """Rows on their way. Every method gives a new stream and leaves this one as it was."""

    def __init__(self, flow: Flow, node: FlowNode, out: str, port: Port) -> None:
        self.flow, self.node, self.out, self.port = flow, node, out, port

    @property
    def schema(self) -> pa.Schema:
        return self.port.schema

    def _where(self, what: str) -> str:
        return f"flow {self.flow.name!r}, {what} after {self.node.name!r}"

    def _step(self, step: Step, name: str) -> Stream:
        refuse_reserved(step.port.schema, self._where(name))
        return self.flow._add(StepNode(name, [self], step=step), step.port)

    def select(self, *names: str, **exprs: Expr | Any) -> Stream:
        """Only these columns: named ones as they are, others computed (``app=col("dst") % 10``)."""
        where = self._where("select")
        require_columns(names, self.schema, where)
        columns = {n: col(n) for n in names} | computed(exprs, where)
        if not columns:
            raise FlowError(f"{where}: no columns are left")
        return self._step(Select(self.port, columns, False, where), "select")

    def with_columns(self, **exprs: Expr | Any) -> Stream:
        """All columns, and these computed ones beside or instead of them."""
        where = self._where("with_columns")
        columns = computed(exprs, where)
        return self._step(Select(self.port, columns, True, where), "with_columns")

    def filter(self, condition: Expr) -> Stream:
        """Only the rows for which `condition` is true."""
        if not isinstance(condition, Expr):
            raise FlowError(
                f"{self._where('filter')}: {condition!r} is not an expression",
                hint='write for example col("x") > 0',
            )
        return self._step(Filter(self.port, condition, self._where("filter")), "filter")

    def map(
        self, function: Callable[[pa.RecordBatch], pa.RecordBatch], schema: pa.Schema
    ) -> Stream:
        """An Arrow function: a batch in, a batch of `schema` with as many rows out.

        It must treat every row by itself: how rows are batched is not fixed.
        """
        step = UserMap(
            self.port, function, declared(schema, self._where("map")), "arrow", self._where("map")
        )
        return self._step(step, step.label)

    def map_pandas(
        self, function: Callable[[pd.DataFrame], pd.DataFrame], schema: pa.Schema
    ) -> Stream:
        """Like `map`, with a pandas DataFrame in and out."""
        where = self._where("map_pandas")
        step = UserMap(self.port, function, declared(schema, where), "pandas", where)
        return self._step(step, step.label)

    def flat_map(
        self,
        function: Callable[[pa.RecordBatch], tuple[pa.RecordBatch, Origins]],
        schema: pa.Schema,
    ) -> Stream:
        """Any number of rows for each: the function returns ``(batch, origins)``, where
        ``origins[i]`` is the input row that output row `i` comes from, ascending."""
        where = self._where("flat_map")
        step = FlatMap(self.port, function, declared(schema, where), where)
        return self._step(step, step.label)

    def union(self, *others: Stream) -> Stream:
        """The rows of all these streams, merged in the recorded input order."""
        streams = [self, *others]
        where = self._where("union")
        for other in others:
            if not isinstance(other, Stream):
                raise FlowError(f"{where}: {type(other).__name__} is not a stream")
            if other.flow is not self.flow:
                raise FlowError(f"{where}: the streams belong to different flows")
            if not other.schema.equals(self.schema):
                raise FlowError(
                    f"{where}: the streams have different columns",
                    hint=f"{self.schema.names} and {other.schema.names}; align them with select()",
                )
        apart = disjoint(streams)
        width = max(s.port.width for s in streams) + (0 if apart else 1)
        times = {s.port.event_time for s in streams}
        port = Port(
            self.schema,
            width,
            times.pop() if len(times) == 1 else None,
            max(s.port.delay for s in streams),
        )
        return self.flow._add(UnionNode("union", streams, port=port, disjoint=apart), port)

    def key_by(self, *keys: str, name: str | None = None, merge: Merge = "ordered") -> KeyedStream:
        """Partition by these columns. `name` is what the stage that follows is called in the
        status, in errors and in `run.protect`; by default ``"time window by (app, src)"`` and the
        like. ``merge="arrival"`` takes rows as they come, which is faster past a slow producer,
        and leaves the order of rows from different producers open."""
        where = self._where("key_by")
        if not keys:
            raise FlowError(f"{where}: no key was given")
        require_columns(keys, self.schema, where)
        for key in keys:
            if keys.count(key) > 1:
                raise FlowError(f"{where}: the key {key!r} is given twice")
            kind = self.schema.field(key).type
            if pa.types.is_nested(kind) or pa.types.is_interval(kind):
                raise FlowError(
                    f"{where}: {key!r} is {self.schema.field(key).type}, which cannot be a key"
                )
        if merge not in ("ordered", "arrival"):
            raise FlowError(f"{where}: merge is 'ordered' or 'arrival', not {merge!r}")
        if descends_from_dead_letters(self):
            raise FlowError(
                f"{where}: dead letters cannot be keyed, for a stage cannot feed itself",
                hint="sink them, and read them with another flow",
            )
        return KeyedStream(self, list(keys), name, merge)

    def sink(self, name: str, sink: Sink) -> None:
        """Hand the rows out."""
        where = f"flow {self.flow.name!r}, sink {name!r}"
        if not isinstance(sink, Sink):
            raise FlowError(f"{where}: {type(sink).__name__} is not a sink")
        self.flow._refuse_taken(name, where)
        sink.check(self.schema, where)
        self.flow.nodes.append(SinkNode(name, [self], sink=sink))


class TimedStream(Stream):
    """Results of an operator in event time, and what came too late for it."""

    def __init__(self, outputs: Outputs) -> None:
        out = outputs["out"]
        super().__init__(out.flow, out.node, out.out, out.port)
        self.late = outputs["late"]
        """The rows that came too late."""


class ExpiringStream(TimedStream):
    """Results of an operator with a time-out, and what it ran out for."""

    def __init__(self, outputs: Outputs) -> None:
        super().__init__(outputs)
        self.expired = outputs["expired"]
        """What had not ended when its time was over."""


class JoinedStream(TimedStream):
    """The pairs of a window join; `late` has the rows of the left side that came too late."""

    def __init__(self, outputs: Outputs) -> None:
        super().__init__(outputs)
        self.late_right = outputs["late_right"]
        """The rows of the right side that came too late."""


Outputs = dict[str, Stream]
"""The streams that a keyed operator gives, by the name of its port."""


class KeyedStream:
    """A stream with a key: what comes next keeps state for each value of it."""

    def __init__(self, stream: Stream, keys: list[str], name: str | None, merge: Merge) -> None:
        self.stream, self.keys, self._name, self._merge = stream, keys, name, merge
        self._protection: Protection | None = None

    def protect(self, protection: Protection) -> KeyedStream:
        """How the stage that follows is protected; by default as the flow is."""
        self._protection = protection
        return self

    def _where(self, what: str) -> str:
        return self.stream._where(f"{what} by ({', '.join(self.keys)})")

    def _operate(self, operator: KeyedOperator, *more: KeyedStream) -> Outputs:
        streams = [self.stream, *(k.stream for k in more)]
        if self._merge == "arrival" and operator.boundaries:
            raise FlowError(
                f"{self._where(operator.label)}: event time needs merge='ordered'",
                hint="with arrival merging rows and watermarks come in no fixed order",
            )
        where = self._where(operator.label)
        refuse_reach(operator, where)
        for port in operator.outputs.values():
            refuse_reserved(port.schema, where)
            for column in port.schema:
                refuse_type(column.type, f"{where}: the column {column.name!r}")
        flow = self.stream.flow
        if self._name is not None:
            flow._refuse_taken(self._name, f"flow {flow.name!r}, stage {self._name!r}")
        name = self._name or f"{operator.label} by ({', '.join(self.keys)})"
        node = KeyedNode(
            name, streams, operator=operator, merge=self._merge, protection=self._protection
        )
        flow.nodes.append(node)
        return {n: Stream(flow, node, n, p) for n, p in operator.outputs.items()}

    def agg(self, **aggregates: Aggregate) -> Stream:
        """Running aggregates: after each row, those of all rows of its key so far."""
        where = self._where("agg")
        refuse_none(aggregates, where)
        return self._operate(RunningAggregate(self.keys, self.stream.port, aggregates, where))[
            "out"
        ]

    @overload
    def window(self, *, rows: int, every: int | None = None) -> RowWindows: ...

    @overload
    def window(
        self,
        *,
        time: Duration,
        every: Duration | None = None,
        lateness: Duration = 0,
        on: str | None = None,
    ) -> TimeWindows: ...

    def window(
        self,
        *,
        rows: int | None = None,
        time: Duration | None = None,
        every: Duration | None = None,
        lateness: Duration = 0,
        on: str | None = None,
    ) -> RowWindows | TimeWindows:
        """The last `rows` rows of the key, or event-time windows of length `time`; a new one
        `every` number of rows, or amount of time (by default each row, and windows end to end).

        Event-time windows wait for rows that are behind others by up to `lateness`. `on` is the
        column that says to which windows a row belongs, by default its event time.
        """
        if (rows is None) == (time is None):
            raise FlowError(f"{self._where('window')}: give either rows= or time=")
        if rows is not None:
            if lateness != 0 or on is not None:
                raise FlowError(
                    f"{self._where('window')}: lateness= and on= go with time=, not rows="
                )
            return RowWindows(self, rows, 1 if every is None else every)
        assert time is not None
        return TimeWindows(self, time, time if every is None else every, lateness, on)

    @overload
    def spans(
        self,
        *,
        start: Expr,
        end: Expr,
        time: str | None = None,
        emit: Mapping[str, Expr] | None = None,
        timeout: None = None,
    ) -> Stream: ...

    @overload
    def spans(
        self,
        *,
        start: Expr,
        end: Expr,
        time: str | None = None,
        emit: Mapping[str, Expr] | None = None,
        timeout: Duration,
    ) -> ExpiringStream: ...

    def spans(
        self,
        *,
        start: Expr,
        end: Expr,
        time: str | None = None,
        emit: Mapping[str, Expr] | None = None,
        timeout: Duration | None = None,
    ) -> Stream:
        """A row for each span: from a row where `start` holds to the next where `end` does.

        `emit` names the columns of the result: ``col("x")`` is taken from the end row,
        ``at_start("x")`` from the start row. With `time` instead, the result is the key, the
        values of that column at ``start`` and ``end``, and their difference ``dur``.

        With `timeout`, a span that has not ended when the watermark reaches the event time of
        its start plus `timeout` is over. ``.expired`` of the result then has the key, the event
        time and the ``at_start`` columns of such spans, and ``.late`` the starts that came too
        late for one.
        """
        where = self._where("spans")
        emit, port = computed(self._emitted(time, emit, where), where), self.stream.port
        if timeout is None:
            return self._operate(Spans(self.keys, port, start, end, emit, where))["out"]
        on = event_time_of(self.stream, f"{where}, timeout=")
        wait = event_units(timeout, port.schema.field(on).type, where)
        operator = TimedSpans(self.keys, port, start, end, emit, on, wait, where)
        return ExpiringStream(self._operate(operator))

    def _emitted(
        self, time: str | None, emit: Mapping[str, Expr] | None, where: str
    ) -> Mapping[str, Expr]:
        """The columns of a span's row."""
        if (emit is None) == (time is None):
            raise FlowError(f"{where}: give either emit= or time=")
        if emit is not None:
            return emit
        assert time is not None
        for key in ("start", "end", "dur"):
            if key in self.keys:
                raise FlowError(
                    f"{where}: the key {key!r} has the name of a result", hint="use emit="
                )
        taken = {"start": at_start(time), "end": col(time), "dur": col(time) - at_start(time)}
        return {**{k: col(k) for k in self.keys}, **taken}

    def join(
        self,
        other: KeyedStream,
        *,
        within: Duration,
        lateness: Duration = 0,
        suffix: str = "_right",
    ) -> JoinedStream:
        """Pairs of rows with equal keys and event times at most `within` apart."""
        where = self._where("join")
        if not isinstance(other, KeyedStream):
            raise FlowError(f"{where}: {type(other).__name__} has no key", hint="use key_by()")
        if other.stream.flow is not self.stream.flow:
            raise FlowError(f"{where}: the streams belong to different flows")
        if other.keys != self.keys:
            raise FlowError(f"{where}: the keys differ: {self.keys} and {other.keys}")
        ports = self.stream.port, other.stream.port
        on = (event_time_of(self.stream, where), event_time_of(other.stream, where))
        for key in self.keys:
            kinds = [p.schema.field(key).type for p in ports]
            if kinds[0] != kinds[1]:
                raise FlowError(
                    f"{where}: the key {key!r} is {kinds[0]} on the left, {kinds[1]} on the right"
                )
        times = [p.schema.field(o).type for p, o in zip(ports, on, strict=True)]
        if times[0] != times[1]:
            raise FlowError(f"{where}: the event times differ in type: {times[0]} and {times[1]}")
        units = [event_units(d, times[0], where) for d in (within, lateness)]
        shared = not disjoint([self.stream, other.stream])
        operator = WindowJoin(self.keys, *ports, on, units[0], units[1], suffix, shared, where)
        return JoinedStream(self._operate(operator, other))

    def apply(self, function: KeyedFunction) -> Stream:
        """A keyed operator of your own; see `KeyedFunction`."""
        operator = CustomOperator(self.keys, self.stream.port, function, self._where("apply"))
        return self._operate(operator)["out"]

    @overload
    def transform_with_state(
        self,
        processor: StatefulProcessor,
        output_schema: SparkSchema,
        *,
        output_mode: OutputMode = "update",
        time_mode: Literal["None"] = "None",
        pandas: bool = False,
    ) -> Stream: ...

    @overload
    def transform_with_state(
        self,
        processor: StatefulProcessor,
        output_schema: SparkSchema,
        *,
        output_mode: OutputMode = "update",
        time_mode: Literal["EventTime"],
        lateness: Duration = 0,
        pandas: bool = False,
    ) -> TimedStream: ...

    def transform_with_state(
        self,
        processor: StatefulProcessor,
        output_schema: SparkSchema,
        *,
        output_mode: OutputMode = "update",
        time_mode: Literal["None", "EventTime"] = "None",
        lateness: Duration = 0,
        pandas: bool = False,
    ) -> Stream:
        """A `StatefulProcessor` that was written for Spark's ``transformWithState`` or, with
        `pandas`, for ``transformWithStateInPandas``.

        Every row is a micro-batch of its own (see `holdfast.spark.stateful`). With
        ``time_mode="EventTime"`` the watermark is behind the event time by `lateness`, as with
        Spark's ``withWatermark``, and ``.late`` of the result has the rows that came too late.
        """
        from holdfast.spark.stateful.refused import refuse_mode
        from holdfast.spark.stateful.transform_with_state import TransformWithState

        where = self._where("transform_with_state")
        refuse_mode(output_mode, where)
        clock = self._clock(time_mode, lateness, where)
        operator = TransformWithState(
            self.keys,
            self.stream.port,
            processor,
            output_schema,
            clock=clock,
            pandas=pandas,
            where=where,
        )
        outputs = self._operate(operator)
        return TimedStream(outputs) if clock is not None else outputs["out"]

    @overload
    def apply_in_pandas_with_state(
        self,
        function: PandasWithState,
        output_schema: SparkSchema,
        state_schema: SparkSchema,
        output_mode: OutputMode = "update",
        timeout: Literal["NoTimeout"] = "NoTimeout",
    ) -> Stream: ...

    @overload
    def apply_in_pandas_with_state(
        self,
        function: PandasWithState,
        output_schema: SparkSchema,
        state_schema: SparkSchema,
        output_mode: OutputMode = "update",
        timeout: Literal["EventTimeTimeout"] = ...,
        *,
        lateness: Duration = 0,
    ) -> TimedStream: ...

    def apply_in_pandas_with_state(
        self,
        function: PandasWithState,
        output_schema: SparkSchema,
        state_schema: SparkSchema,
        output_mode: OutputMode = "update",
        timeout: Literal["NoTimeout", "EventTimeTimeout"] = "NoTimeout",
        *,
        lateness: Duration = 0,
    ) -> Stream:
        """A function that was written for Spark's ``applyInPandasWithState``; see
        `transform_with_state`. The `timeout` is ``NoTimeout`` or ``EventTimeTimeout``."""
        from holdfast.spark.stateful.apply_in_pandas import ApplyInPandasWithState
        from holdfast.spark.stateful.refused import refuse_mode

        where = self._where("apply_in_pandas_with_state")
        refuse_mode(output_mode, where)
        clock = self._clock(timeout, lateness, where)
        operator = ApplyInPandasWithState(
            self.keys,
            self.stream.port,
            function,
            output_schema,
            state_schema,
            clock=clock,
            where=where,
        )
        outputs = self._operate(operator)
        return TimedStream(outputs) if clock is not None else outputs["out"]

    def _clock(self, time_mode: str, lateness: Duration, where: str) -> SparkClock | None:
        """The watermark that an operator written for Spark is to see, if any."""
        from holdfast.spark.stateful.clock import clock_of
        from holdfast.spark.stateful.refused import uses_event_time

        if not uses_event_time(time_mode, where):
            if lateness != 0:
                raise FlowError(f"{where}: lateness= goes with event time")
            return None
        clock = clock_of(self.stream.port, event_time_of(self.stream, where), where)
        return clock.behind(event_units(lateness, clock.kind, where))
