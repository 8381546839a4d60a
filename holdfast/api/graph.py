"""What a user writes: a `Flow`, its streams, and what happens to them.

Nothing runs here. Every call checks what can be known before the run (columns, types, names) and
adds a node to a graph; `holdfast.plan.planner` cuts the graph into stages.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

import pyarrow as pa

from holdfast.api.protection import none
from holdfast.connectors.sinks import Sink
from holdfast.connectors.sources import Source
from holdfast.core.protection import ProtectionSpec
from holdfast.engine.expressions import Aggregate, Col, Expr, at_start, col, computed
from holdfast.engine.operators.base import KeyedOperator, Port, require_columns
from holdfast.engine.operators.custom import CustomOperator, KeyedFunction
from holdfast.engine.operators.join import WindowJoin
from holdfast.engine.operators.row_window import RowWindow
from holdfast.engine.operators.running import RunningAggregate
from holdfast.engine.operators.sessions import Sessions, TimedSessions
from holdfast.engine.operators.time_window import TimeWindow
from holdfast.engine.steps import Filter, FlatMap, Select, Step, UserMap
from holdfast.engine.types import plain_schema, refuse_type
from holdfast.engine.watermark import REACH_MAX, reach_max
from holdfast.errors import FlowError
from holdfast.storage.restore_point import RestorePoint

if TYPE_CHECKING:
    from holdfast.control.run import Run

Merge = Literal["ordered", "arrival"]
Duration = int | datetime.timedelta
DEAD_LETTER = pa.schema([(n, pa.string()) for n in ("stage", "operator", "error", "row")])


@dataclass(eq=False)
class Node:
    """One vertex of the graph. Its inputs are streams of nodes made before it."""

    name: str
    inputs: list[Stream] = field(default_factory=list)


@dataclass(eq=False)
class SourceNode(Node):
    source: Source = None  # type: ignore[assignment]
    port: Port = None  # type: ignore[assignment]


@dataclass(eq=False)
class StepNode(Node):
    step: Step = None  # type: ignore[assignment]


@dataclass(eq=False)
class UnionNode(Node):
    port: Port = None  # type: ignore[assignment]
    disjoint: bool = True


@dataclass(eq=False)
class KeyedNode(Node):
    operator: KeyedOperator = None  # type: ignore[assignment]
    merge: Merge = "ordered"
    protection: ProtectionSpec | None = None


@dataclass(eq=False)
class DeadLetterNode(Node):
    port: Port = field(default_factory=lambda: Port(DEAD_LETTER, 3))


@dataclass(eq=False)
class SinkNode(Node):
    sink: Sink = None  # type: ignore[assignment]


KINDS = {SourceNode: "source", KeyedNode: "stage", SinkNode: "sink"}


class Flow:
    """A dataflow: sources, what is done to their rows, and sinks.

    `on_error` says what happens to a row that makes a step raise: ``"stop"`` ends the flow with
    an error that names the row, ``"dead-letter"`` puts the row aside into `dead_letters`.

    >>> from holdfast import Flow, col, discard, rows, sum_
    >>> flow = Flow("totals")
    >>> sales = flow.source("sales", rows(pa.record_batch({"shop": [1, 2, 1], "eur": [5, 7, 9]})))
    >>> sales.key_by("shop").agg(total=sum_("eur")).sink("totals", discard())
    """

    def __init__(
        self,
        name: str,
        *,
        on_error: Literal["stop", "dead-letter"] = "stop",
        protect: ProtectionSpec | None = None,
    ) -> None:
        if on_error not in ("stop", "dead-letter"):
            raise FlowError(f"flow {name!r}: on_error is 'stop' or 'dead-letter', not {on_error!r}")
        self.name = name
        self.on_error = on_error
        self.protection = protect or none()
        self.nodes: list[Node] = []
        self.resolved: dict[str, Any] = {}
        """What sources had to find out before the start, by name; see
        `holdfast.control.bootstrap`."""
        self.restore_point: RestorePoint | None = None
        """What it begins with, if not with nothing."""

    def source(self, name: str, source: Source, *, event_time: str | None = None) -> Stream:
        """Rows from `source`; `event_time` names the column that says when each happened."""
        where = f"flow {self.name!r}, source {name!r}"
        if not isinstance(source, Source):
            raise FlowError(
                f"{where}: {type(source).__name__} is not a source",
                hint="wrap a DataFrame in spark_batch(df) or spark_stream(df)",
            )
        self._refuse_taken(name, where)
        schema = _declared(source.schema, where)
        if event_time is not None:
            require_columns([event_time], schema, f"{where}, event_time")
            _require_time(schema, event_time, where)
            source = source.timed(event_time)
        port = Port(schema, 1, event_time)
        node = SourceNode(name, source=source, port=port)
        return self._add(node, port)

    def dead_letters(self) -> Stream:
        """The rows that steps raised on, with stage, operator, error and the row as text."""
        if self.on_error != "dead-letter":
            raise FlowError(
                f'flow {self.name!r}: dead letters need Flow(..., on_error="dead-letter")'
            )
        for node in self.nodes:
            if isinstance(node, DeadLetterNode):
                return Stream(self, node, "out", node.port)
        dead = DeadLetterNode("dead letters")
        return self._add(dead, dead.port)

    def _refuse_taken(self, name: str, where: str) -> None:
        """A name that is given says which source, stage or sink is meant, whatever it is."""
        for kind, owner in KINDS.items():
            if any(isinstance(n, kind) and n.name == name for n in self.nodes):
                raise FlowError(f"{where}: there is a {owner} of that name already")

    def _add(self, node: Node, port: Port) -> Stream:
        self.nodes.append(node)
        return Stream(self, node, "out", port)

    def start(self, spark: Any = None, **options: Any) -> Run:
        """Run the flow: on Spark, or with ``spark=None`` in plain processes on this machine.

        See `holdfast.control.run.start` for the options.
        """
        from holdfast.control.run import start

        return start(self, spark, **options)

    def batch(self, spark: Any, inputs: Mapping[str, Any], **options: Any) -> Any:
        """The same flow as an ordinary Spark job over DataFrames; see `holdfast.spark.batch`."""
        from holdfast.spark.batch import batch

        return batch(self, spark, inputs, **options)

    def stream(self, spark: Any, inputs: Mapping[str, Any], **options: Any) -> Any:
        """The same operators under Structured Streaming; see `holdfast.spark.stream`."""
        from holdfast.spark.stream import stream

        return stream(self, spark, inputs, **options)


class Stream:
    """Rows on their way. Every method gives a new stream and leaves this one as it was."""

    def __init__(self, flow: Flow, node: Node, out: str, port: Port) -> None:
        self.flow, self.node, self.out, self.port = flow, node, out, port

    @property
    def schema(self) -> pa.Schema:
        return self.port.schema

    def _where(self, what: str) -> str:
        return f"flow {self.flow.name!r}, {what} after {self.node.name!r}"

    def _step(self, step: Step, name: str) -> Stream:
        _refuse_reserved(step.port.schema, self._where(name))
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
            self.port, function, _declared(schema, self._where("map")), "arrow", self._where("map")
        )
        return self._step(step, step.label)

    def map_pandas(self, function: Callable[[Any], Any], schema: pa.Schema) -> Stream:
        """Like `map`, with a pandas DataFrame in and out."""
        where = self._where("map_pandas")
        step = UserMap(self.port, function, _declared(schema, where), "pandas", where)
        return self._step(step, step.label)

    def flat_map(self, function: Callable[[pa.RecordBatch], Any], schema: pa.Schema) -> Stream:
        """Any number of rows for each: the function returns ``(batch, origins)``, where
        ``origins[i]`` is the input row that output row `i` comes from, ascending."""
        where = self._where("flat_map")
        step = FlatMap(self.port, function, _declared(schema, where), where)
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
        disjoint = _disjoint(streams)
        width = max(s.port.width for s in streams) + (0 if disjoint else 1)
        times = {s.port.event_time for s in streams}
        port = Port(
            self.schema,
            width,
            times.pop() if len(times) == 1 else None,
            max(s.port.delay for s in streams),
        )
        return self.flow._add(UnionNode("union", streams, port=port, disjoint=disjoint), port)

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
        if _descends_from_dead_letters(self):
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


class KeyedStream:
    """A stream with a key: what comes next keeps state for each value of it."""

    def __init__(self, stream: Stream, keys: list[str], name: str | None, merge: Merge) -> None:
        self.stream, self.keys, self._name, self._merge = stream, keys, name, merge
        self._protection: ProtectionSpec | None = None

    def protect(self, protection: ProtectionSpec) -> KeyedStream:
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
        _refuse_reach(operator, where)
        for port in operator.outputs.values():
            _refuse_reserved(port.schema, where)
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
        return Outputs(flow, node, operator)

    def agg(self, **aggregates: Aggregate) -> Stream:
        """Running aggregates: after each row, those of all rows of its key so far."""
        where = self._where("agg")
        _some(aggregates, where)
        return self._operate(RunningAggregate(self.keys, self.stream.port, aggregates, where)).out

    def window(
        self,
        *,
        rows: int | None = None,
        time: Duration | None = None,
        every: Duration | None = None,
        lateness: Duration = 0,
        on: str | None = None,
    ) -> Windowed:
        """The last `rows` rows of the key, or event-time windows of length `time`; a new one
        `every` so many rows, or so much time (by default each row, and windows end to end)."""
        if (rows is None) == (time is None):
            raise FlowError(f"{self._where('window')}: give either rows= or time=")
        if rows is not None and (lateness != 0 or on is not None):
            raise FlowError(f"{self._where('window')}: lateness= and on= go with time=, not rows=")
        return Windowed(self, rows, time, every, lateness, on)

    def sessions(
        self,
        *,
        start: Expr,
        end: Expr,
        time: str | None = None,
        emit: Mapping[str, Expr] | None = None,
        timeout: Duration | None = None,
    ) -> Any:
        """A row for each session: from a row where `start` holds to the next where `end` does.

        `emit` names the columns of the result: ``col("x")`` is taken from the end row,
        ``at_start("x")`` from the start row. With `time` instead, the result is the key, the
        values of that column at ``start`` and ``end``, and their difference ``dur``.

        With `timeout`, a session that has not ended when the watermark reaches the event time of
        its start plus `timeout` is over. ``.expired`` of the result then has the key, the event
        time and the ``at_start`` columns of such sessions, and ``.late`` the starts that came too
        late for one.
        """
        where = self._where("sessions")
        if (emit is None) == (time is None):
            raise FlowError(f"{where}: give either emit= or time=")
        if emit is None:
            assert time is not None
            emit = {k: Col(k) for k in self.keys}
            for key in ("start", "end", "dur"):
                if key in emit:
                    raise FlowError(
                        f"{where}: the key {key!r} has the name of a result", hint="use emit="
                    )
            emit |= {"start": at_start(time), "end": col(time), "dur": col(time) - at_start(time)}
        emit, port = computed(emit, where), self.stream.port
        if timeout is None:
            return self._operate(Sessions(self.keys, port, start, end, emit, where)).out
        on = _event_time(self.stream, f"{where}, timeout=")
        wait = _units(timeout, port.schema.field(on).type, where)
        return _with_late(
            self._operate(TimedSessions(self.keys, port, start, end, emit, on, wait, where))
        )

    def join(
        self,
        other: KeyedStream,
        *,
        within: Duration,
        lateness: Duration = 0,
        suffix: str = "_right",
    ) -> Joined:
        """Pairs of rows with equal keys and event times at most `within` apart."""
        where = self._where("join")
        if not isinstance(other, KeyedStream):
            raise FlowError(f"{where}: {type(other).__name__} has no key", hint="use key_by()")
        if other.stream.flow is not self.stream.flow:
            raise FlowError(f"{where}: the streams belong to different flows")
        if other.keys != self.keys:
            raise FlowError(f"{where}: the keys differ: {self.keys} and {other.keys}")
        ports = self.stream.port, other.stream.port
        on = (_event_time(self.stream, where), _event_time(other.stream, where))
        for key in self.keys:
            kinds = [p.schema.field(key).type for p in ports]
            if kinds[0] != kinds[1]:
                raise FlowError(
                    f"{where}: the key {key!r} is {kinds[0]} on the left, {kinds[1]} on the right"
                )
        times = [p.schema.field(o).type for p, o in zip(ports, on, strict=True)]
        if times[0] != times[1]:
            raise FlowError(f"{where}: the event times differ in type: {times[0]} and {times[1]}")
        units = [_units(d, times[0], where) for d in (within, lateness)]
        shared = not _disjoint([self.stream, other.stream])
        operator = WindowJoin(self.keys, *ports, on, units[0], units[1], suffix, shared, where)
        outputs = self._operate(operator, other)
        return Joined(outputs)

    def apply(self, function: KeyedFunction) -> Stream:
        """A keyed operator of your own; see `KeyedFunction`."""
        operator = CustomOperator(self.keys, self.stream.port, function, self._where("apply"))
        return self._operate(operator).out

    def transform_with_state(
        self,
        processor: Any,
        output_schema: Any,
        *,
        output_mode: str = "update",
        time_mode: str = "None",
        lateness: Duration = 0,
        pandas: bool = False,
    ) -> Any:
        """A `StatefulProcessor` that was written for Spark's ``transformWithState`` or, with
        `pandas`, for ``transformWithStateInPandas``.

        Every row is a micro-batch of its own (see `holdfast.spark.stateful`). With
        ``time_mode="EventTime"`` the watermark is behind the event time by `lateness`, as with
        Spark's ``withWatermark``, and ``.late`` of the result has the rows that came too late.
        """
        from holdfast.spark import stateful

        where = self._where("transform_with_state")
        stateful.refuse_mode(output_mode, where)
        clock = self._clock(time_mode, lateness, where)
        operator = stateful.TransformWithState(
            self.keys,
            self.stream.port,
            processor,
            output_schema,
            clock=clock,
            pandas=pandas,
            where=where,
        )
        return _with_late(self._operate(operator))

    def apply_in_pandas_with_state(
        self,
        function: Callable[..., Any],
        output_schema: Any,
        state_schema: Any,
        output_mode: str = "update",
        timeout: str = "NoTimeout",
        *,
        lateness: Duration = 0,
    ) -> Any:
        """A function that was written for Spark's ``applyInPandasWithState``; see
        `transform_with_state`. The `timeout` is ``NoTimeout`` or ``EventTimeTimeout``."""
        from holdfast.spark import stateful

        where = self._where("apply_in_pandas_with_state")
        stateful.refuse_mode(output_mode, where)
        clock = self._clock(timeout, lateness, where)
        operator = stateful.ApplyInPandasWithState(
            self.keys,
            self.stream.port,
            function,
            output_schema,
            state_schema,
            clock=clock,
            where=where,
        )
        return _with_late(self._operate(operator))

    def _clock(self, time_mode: str, lateness: Duration, where: str) -> Any:
        """The watermark that an operator written for Spark is to see, if any."""
        from holdfast.spark import stateful

        if not stateful.event_time_of(time_mode, where):
            if lateness != 0:
                raise FlowError(f"{where}: lateness= goes with event time")
            return None
        clock = stateful.clock_of(self.stream.port, _event_time(self.stream, where), where)
        return clock.behind(_units(lateness, clock.kind, where))


class Outputs:
    """The output streams of a keyed operator."""

    def __init__(self, flow: Flow, node: KeyedNode, operator: KeyedOperator) -> None:
        self._streams = {n: Stream(flow, node, n, p) for n, p in operator.outputs.items()}

    @property
    def out(self) -> Stream:
        return self._streams["out"]

    def __getitem__(self, name: str) -> Stream:
        return self._streams[name]

    def __contains__(self, name: str) -> bool:
        return name in self._streams


class TimeWindowed(Stream):
    """Results of an operator in event time. `late` has the rows that came too late for it, and
    `expired`, where there is a time-out, what it ran out for."""

    late: Stream
    expired: Stream


def _with_late(outputs: Outputs) -> Stream:
    out = outputs.out
    if "late" not in outputs:
        return out
    result = TimeWindowed(out.flow, out.node, out.out, out.port)
    result.late = outputs["late"]
    if "expired" in outputs:
        result.expired = outputs["expired"]
    return result


class Joined(Stream):
    """The pairs of a window join, and what came too late on either side."""

    def __init__(self, outputs: Outputs) -> None:
        out = outputs.out
        super().__init__(out.flow, out.node, out.out, out.port)
        self.late = outputs["late"]
        self.late_right = outputs["late_right"]


class Windowed:
    """A keyed stream cut into windows, waiting for ``agg``."""

    def __init__(
        self,
        keyed: KeyedStream,
        rows: int | None,
        time: Duration | None,
        every: Duration | None,
        lateness: Duration,
        on: str | None,
    ) -> None:
        self._keyed, self._rows, self._time = keyed, rows, time
        self._every, self._lateness, self._on = every, lateness, on

    def agg(self, **aggregates: Aggregate) -> Any:
        """The aggregates of each window. Of event-time windows, ``.late`` of the result has the
        rows that came too late."""
        keyed, port = self._keyed, self._keyed.stream.port
        where = keyed._where("window")
        _some(aggregates, where)
        if self._rows is not None:
            every = 1 if self._every is None else self._every
            operator = RowWindow(keyed.keys, port, self._rows, every, aggregates, where)  # type: ignore[arg-type]
            return keyed._operate(operator).out
        on = self._event_time(where)
        kind = _require_time(port.schema, on, where)
        assert self._time is not None
        every = self._time if self._every is None else self._every
        size, step, lateness = (_units(d, kind, where) for d in (self._time, every, self._lateness))
        window = TimeWindow(keyed.keys, port, on, size, step, lateness, aggregates, where)
        return _with_late(keyed._operate(window))

    def _event_time(self, where: str) -> str:
        """The column that says to which windows a row belongs."""
        stream = self._keyed.stream
        if self._on is None:
            again = ", or keep the time (for example with agg(ts=max_(...))) and say on="
            return _event_time(stream, where, again)
        require_columns([self._on], stream.schema, where)
        _require_time(stream.schema, self._on, where)
        _require_timed_sources(stream, where)
        return self._on


def _some(aggregates: Mapping[str, Aggregate], where: str) -> None:
    if not aggregates:
        raise FlowError(f"{where}: no aggregate was given", hint="for example agg(n=count())")


def _declared(schema: pa.Schema, where: str) -> pa.Schema:
    """The columns that rows have from there on: encoded ones are decoded."""
    if not isinstance(schema, pa.Schema):
        raise FlowError(f"{where}: the schema of the result must be a pyarrow.Schema")
    _refuse_reserved(schema, where)
    return plain_schema(schema, where)


def _refuse_reserved(schema: pa.Schema, where: str) -> None:
    for name in schema.names:
        if name.startswith("__"):
            raise FlowError(f"{where}: the column name {name!r} is reserved (it starts with __)")
        if schema.names.count(name) > 1:
            raise FlowError(f"{where}: there are two columns {name!r}")


def _require_time(schema: pa.Schema, name: str, where: str) -> pa.DataType:
    kind = schema.field(name).type
    if not (pa.types.is_int64(kind) or pa.types.is_timestamp(kind)):
        raise FlowError(f"{where}: an event time is int64 or timestamp, but {name!r} is {kind}")
    return kind


def _event_time(stream: Stream, where: str, hint: str = "") -> str:
    """The column that says when each row of `stream` happened."""
    _require_timed_sources(stream, where)
    if stream.port.event_time is None:
        node, column = _event_time_lost(stream)
        raise FlowError(
            f"{where}: the rows have no event time: {node!r} does not pass {column!r} on",
            hint=f"do this before it{hint}",
        )
    return stream.port.event_time


def _require_timed_sources(stream: Stream, where: str) -> None:
    """The watermark comes from the sources: if one has no event time, nothing would ever close."""
    for node in _ancestors(stream).values():
        if isinstance(node, SourceNode) and node.port.event_time is None:
            raise FlowError(
                f"{where}: source {node.name!r} has no event time",
                hint=f'say which column it is: flow.source({node.name!r}, ..., event_time="ts")',
            )


def _event_time_lost(stream: Stream) -> tuple[str, str]:
    """Behind which node a stream without event time has none any more, and what it was called."""
    timed = [s.port.event_time for s in stream.node.inputs if s.port.event_time is not None]
    if timed:
        return stream.node.name, timed[0]
    return _event_time_lost(stream.node.inputs[0])


def _refuse_reach(operator: KeyedOperator, where: str) -> None:
    """Times must not be so far apart that int64 has no number for them."""
    reach = max(operator.horizon, *(port.delay for port in operator.outputs.values()))
    timed = [p.schema.field(p.event_time).type for p in operator.inputs if p.event_time]
    limit = min(map(reach_max, timed), default=REACH_MAX)
    if reach > limit:
        raise FlowError(
            f"{where}: it looks back by {reach} units of event time, at most {limit} are possible",
            hint="window, lateness, time-out and those of the operators before it count together",
        )


_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def _units(duration: Duration, kind: pa.DataType, where: str) -> int:
    """A duration in the units of the event time it is compared with."""
    if isinstance(duration, datetime.timedelta):
        if not pa.types.is_timestamp(kind):
            raise FlowError(f"{where}: the event time is {kind}: give durations as whole numbers")
        micros = duration // datetime.timedelta(microseconds=1)
        units, rest = divmod(micros * _PER_SECOND[kind.unit], 10**6)
        if rest:
            raise FlowError(f"{where}: {duration} is not a whole number of the units of {kind}")
        return units
    if not isinstance(duration, int):
        raise FlowError(f"{where}: {duration!r} is not a duration (a whole number or a timedelta)")
    if pa.types.is_timestamp(kind) and duration != 0:
        raise FlowError(f"{where}: the event time is {kind}: give durations as timedelta")
    return duration


def _ancestors(stream: Stream) -> dict[int, Node]:
    """All nodes that a stream descends from, by their identity."""
    found: dict[int, Node] = {}
    todo: list[Node] = [stream.node]
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found[id(node)] = node
            todo += [s.node for s in node.inputs]
    return found


def _disjoint(streams: Sequence[Stream]) -> bool:
    """Whether no two of these streams can have rows of the same place in the input order.

    So it is when they descend from different sources. But the results of event-time windows, and
    dead letters, may stand at a row of any source.
    """
    seen: set[int] = set()
    for stream in streams:
        nodes = _ancestors(stream)
        for node in nodes.values():
            anywhere = isinstance(node, DeadLetterNode) or (
                isinstance(node, KeyedNode) and node.operator.clocked
            )
            if anywhere and len(streams) > 1:
                return False
        origins = {i for i, node in nodes.items() if isinstance(node, SourceNode)}
        if seen & origins:
            return False
        seen |= origins
    return True


def _descends_from_dead_letters(stream: Stream) -> bool:
    return any(isinstance(n, DeadLetterNode) for n in _ancestors(stream).values())


def topological(nodes: Sequence[Node], flow: str) -> list[Node]:
    """The nodes with inputs before consumers, or a `FlowError` that shows the cycle."""
    done: dict[int, Node] = {}
    path: list[Node] = []

    def visit(node: Node) -> None:
        if id(node) in done:
            return
        if any(n is node for n in path):
            at = next(i for i, n in enumerate(path) if n is node)
            names = " -> ".join(n.name for n in [*path[at:], node][::-1])
            raise FlowError(f"flow {flow!r} has a cycle: {names}")
        path.append(node)
        for stream in node.inputs:
            visit(stream.node)
        path.pop()
        done[id(node)] = node

    for node in nodes:
        visit(node)
    return list(done.values())
