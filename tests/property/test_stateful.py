"""Operators written for Spark: against Spark's own tester, row by row, and against themselves
however the run is cut and spread."""

from __future__ import annotations

import datetime
import random
from collections import Counter
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.streaming.tws_tester import TwsTester

from holdfast import Flow, FlowError, col
from holdfast.api.streams import Stream
from holdfast.engine.batches import Track
from holdfast.errors import OperatorError
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.sources import rows
from holdfast.spark.schemas import RowCodec, struct_of
from holdfast.spark.stateful.clock import LAST_MS
from tests.support.commands import BEGIN, COMMANDS, UTC, table
from tests.support.harness import Input, Shape, examples, naive_marks, rows_of, run
from tests.support.operator_cases import check, shapes
from tests.support.processors import (
    COUNTS,
    GAP_MS,
    SESSION,
    SESSIONS,
    VISITS,
    FrameCounts,
    Visits,
    ms_of,
    sessions,
)

END = LAST_MS
LATENESS_MS = 15


@st.composite
def worlds(draw: st.DrawFn, commands: list[str] | None = None) -> tuple[pa.RecordBatch, Shape]:
    n = draw(st.one_of(st.integers(0, 12), st.integers(13, 80)))
    rng = random.Random(draw(st.integers(0, 2**32)))
    return table(rng, n, commands or COMMANDS), draw(shapes(n))


def source(flow: Flow, batch: pa.RecordBatch) -> Stream:
    return flow.source("s", rows(batch), event_time="ts")


def visits(batch: pa.RecordBatch, on_error: Any = "stop") -> Flow:
    flow = Flow("f", on_error=on_error)
    lateness = datetime.timedelta(milliseconds=LATENESS_MS)
    out = source(flow, batch).key_by("k")
    out = out.transform_with_state(Visits(), VISITS, time_mode="EventTime", lateness=lateness)
    out.sink("out", discard())
    out.late.sink("late", discard())
    if on_error == "dead-letter":
        flow.dead_letters().sink("dead", discard())
    return flow


def steps(flow: Flow, batch: pa.RecordBatch) -> list[tuple[int, dict, int, int]]:
    """Every row with its sequence number, and the watermark in ms before and after it."""
    from holdfast.plan.planner import plan

    marks = [_ms(m) for m in naive_marks(plan(flow), Input.of(s=batch))]
    return [
        (seq, row, marks[seq - 1] if seq else 0, marks[seq])
        for seq, row in enumerate(batch.to_pylist())
    ]


def _ms(mark: int) -> int:
    return 0 if mark == Track.NEVER else (mark - LATENESS_MS * 1_000) // 1_000


def in_spark(flow: Flow, batch: pa.RecordBatch) -> tuple[Counter, int]:
    """What Spark's tester gives, and at which sequence number; and how many rows are late."""
    tester = TwsTester(Visits(), timeMode="EventTime", eventTimeExtractor=lambda row: ms_of(row.ts))
    given: Counter = Counter()
    late = 0
    for seq, row, before, after in steps(flow, batch):
        micros = (row["ts"] - BEGIN) // datetime.timedelta(microseconds=1)
        if ms_of(BEGIN) * 1_000 + micros <= before * 1_000:
            late += 1
        else:
            # Its own idea of lateness is in whole milliseconds.
            tester._eventTimeExtractor = lambda _: END
            given.update((seq, tuple(r)) for r in tester.test(row["k"], [Row(**row)]))
        if after > tester._currentWatermarkMs:
            given.update((seq, tuple(r)) for r in tester.setWatermark(after))
    given.update((batch.num_rows, tuple(r)) for r in tester.setWatermark(END))
    return given, late


def given_by(result: Any, sink: str = "out") -> Counter:
    batch = result.sinks[sink]
    names = [n for n in batch.schema.names if not n.startswith("__")]
    return Counter((row["__o0"], tuple(row[n] for n in names)) for row in batch.to_pylist())


@examples(40)
@given(worlds())
def test_a_processor_gives_what_spark_gives_row_by_row(world: tuple[pa.RecordBatch, Shape]) -> None:
    batch, shape = world
    flow = visits(batch)
    result = check(flow, Input.of(s=batch), shape)
    expected, late = in_spark(flow, batch)
    assert given_by(result) == expected
    assert result.late_rows == result.sinks["late"].num_rows == late


@examples(20)
@given(worlds([*COMMANDS, "raise"]))
def test_rows_that_raise_are_put_aside_and_change_nothing(
    world: tuple[pa.RecordBatch, Shape],
) -> None:
    """They still move the watermark, as they would for anybody else."""
    batch, shape = world
    result = check(visits(batch, "dead-letter"), Input.of(s=batch), shape)
    bad = [row["cmd"] == "raise" for row in batch.to_pylist()]
    harmless = pa.array(
        ["quiet" if b else row["cmd"] for b, row in zip(bad, batch.to_pylist(), strict=True)],
        pa.string(),
    )
    other = pa.array(
        [
            f"bad {i}" if b else k
            for i, (b, k) in enumerate(zip(bad, batch["k"].to_pylist(), strict=True))
        ],
        pa.string(),
    )
    clean = batch.set_column(3, "cmd", harmless).set_column(0, "k", other)
    assert given_by(result) == given_by(run(visits(clean), Input.of(s=clean)))


@examples(20)
@given(worlds())
def test_sessions_in_pandas(world: tuple[pa.RecordBatch, Shape]) -> None:
    batch, shape = world
    flow = Flow("f")
    lateness = datetime.timedelta(milliseconds=LATENESS_MS)
    keyed = source(flow, batch).key_by("k")
    out = keyed.apply_in_pandas_with_state(
        sessions, SESSIONS, SESSION, "append", "EventTimeTimeout", lateness=lateness
    )
    out.sink("out", discard())
    result = check(flow, Input.of(s=batch), shape)
    assert given_by(result) == _naive_sessions(flow, batch)


def _naive_sessions(flow: Flow, batch: pa.RecordBatch) -> Counter:
    given: Counter = Counter()
    open_: dict[Any, tuple[int, int, int | None]] = {}

    def close(seq: int, mark: int) -> None:
        for key, (n, total, until) in list(open_.items()):
            if until is not None and until < mark:
                del open_[key]
                given[seq, (key, "over", n, total)] += 1

    for seq, row, before, after in steps(flow, batch):
        micros = (row["ts"] - BEGIN) // datetime.timedelta(microseconds=1)
        if ms_of(BEGIN) * 1_000 + micros > before * 1_000:
            n, total, _ = open_.get(row["k"], (0, 0, None))
            n, total = n + 1, total + row["n"]
            until = max(ms_of(row["ts"]) + GAP_MS, before) if total % 5 else None
            open_[row["k"]] = (n, total, until)
            given[seq, (row["k"], "row", n, total)] += 1
        close(seq, max(before, after))
    close(batch.num_rows, END)
    return given


@examples(10)
@given(worlds())
def test_a_processor_in_pandas_without_time(world: tuple[pa.RecordBatch, Shape]) -> None:
    batch, shape = world
    flow = Flow("f")
    numbered = flow.source("t", rows(batch)).select(k=col("n"))
    numbered.key_by("k").transform_with_state(FrameCounts(), COUNTS, pandas=True).sink(
        "out", discard()
    )
    result = check(flow, Input.of(t=batch), shape)
    seen: Counter = Counter()
    for given_, row in zip(result.sinks["out"].to_pylist(), batch.to_pylist(), strict=True):
        seen[row["n"]] += 1
        assert (given_["k"], given_["n"]) == (row["n"], seen[row["n"]])


def test_a_timer_in_the_past_is_due_at_once_and_one_that_a_timer_sets_at_the_next_step() -> None:
    class RestorePoint(StatefulProcessor):
        def init(self, handle: Any) -> None:
            self.handle = handle

        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            for row in rows:
                if row.cmd == "restore_point":
                    self.handle.registerTimer(timerValues.getCurrentWatermarkInMs())
                yield Row(what=f"row {row.n}")

        def handleExpiredTimer(self, key: Any, timerValues: Any, expiredTimerInfo: Any) -> Any:
            due = expiredTimerInfo.getExpiryTimeInMs()
            yield Row(what=f"timer {due - ms_of(BEGIN)}")
            self.handle.registerTimer(due)  # gone again when this one is over
            if due - ms_of(BEGIN) > -3:
                self.handle.registerTimer(due - 1)

    at = [BEGIN + datetime.timedelta(milliseconds=m) for m in (0, 5, 5, 7, 9)]
    batch = pa.record_batch(
        {
            "k": ["a", "a", "a", "b", "b"],
            "ts": pa.array(at, pa.timestamp("us", "UTC")),
            "n": range(5),
            "cmd": ["", "restore_point", "", "", ""],
        }
    )
    flow = Flow("f")
    out = (
        source(flow, batch)
        .key_by("k")
        .transform_with_state(RestorePoint(), "what string", time_mode="EventTime")
    )
    out.sink("out", discard())
    for cuts in ((), (1, 2, 3, 4)):
        result = run(flow, Input.of(s=batch), Shape(cuts=cuts))
        assert [(r["__o0"], r["what"]) for r in result.sinks["out"].to_pylist()] == [
            (0, "row 0"),
            (1, "row 1"),
            (1, "timer 0"),  # by the watermark that the row found
            (1, "timer -1"),  # which the first set, at the step that the row makes
            (3, "row 3"),
            (3, "timer -2"),
            (4, "row 4"),
            (4, "timer -3"),
        ]
        assert result.late_rows == 1


def test_state_goes_with_its_last_value() -> None:
    batch = table(random.Random(1), 200, ["clear"])
    from holdfast.plan.planner import plan
    from holdfast.plan.stage_runner import StageRunner

    p = plan(visits(batch))
    stage = p.stage_named("Visits by (k)")
    runner = StageRunner(p, stage, 4)
    ordered = batch.append_column("__o0", pa.array(range(200), pa.int64()))
    runner.run_keyed([[ordered.cast(stage.inputs[0].schema)]], Track.flat(Track.NEVER), 0)
    assert runner.operator is not None and runner.operator.state_rows() == 0


# --- values of state ------------------------------------------------------------------------------


def test_values_come_back_as_spark_gives_them() -> None:
    import decimal

    schema = struct_of(
        "a tinyint, b float, c decimal(10,2), d date, e timestamp, f array<struct<x: int>>, "
        "g map<string, double> NOT NULL, h binary, `odd name` boolean COMMENT 'yes', "
        "i timestamp_ntz",
        "here",
    )
    codec = RowCodec(schema, "here")
    moment = datetime.datetime(2024, 2, 29, 12, 0, 0, 7)
    value = (
        1,
        0.1,
        decimal.Decimal("1.5"),
        moment.date(),
        moment.replace(tzinfo=UTC),
        [(1,), None],
        {"a": 1},
        bytearray(b"x"),
        True,
        moment,
    )
    back = codec.decode(codec.encode(value))
    assert back == (
        1,
        0.10000000149011612,
        decimal.Decimal("1.50"),
        moment.date(),
        moment,
        [Row(x=1), None],
        {"a": 1.0},
        b"x",
        True,
        moment,
    )
    assert codec.decode(codec.encode((None,) * 10)) == (None,) * 10


@pytest.mark.parametrize(
    ("schema", "value", "complaint"),
    [
        ("n int", (2**31,), "does not fit into 32 bits"),
        ("n long", (1.5,), "not an integer"),
        ("n long", (1, 2), "a tuple of \\(n bigint\\)"),
        ("n long", 1, "a tuple of"),
        ("s string", (b"x",), "it is not str"),
        ("d decimal(3,1)", ("1000",), "cannot hold"),
    ],
)
def test_values_that_do_not_fit_are_refused(schema: str, value: Any, complaint: str) -> None:
    with pytest.raises(TypeError, match=complaint):
        RowCodec(struct_of(schema, "here"), "here").encode(value)


@pytest.mark.parametrize(
    "ddl", ["", "n", "n int,", "n int x", "n array<int", "n interval day", "!"]
)
def test_a_schema_that_cannot_be_read(ddl: str) -> None:
    with pytest.raises(FlowError, match="cannot parse"):
        struct_of(ddl, "here")


# --- refusals -------------------------------------------------------------------------------------


class Declares(StatefulProcessor):
    def __init__(self, declare: Any) -> None:
        self.declare = declare

    def init(self, handle: Any) -> None:
        self.declare(handle)

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        return iter([])


@pytest.mark.parametrize(
    ("declare", "complaint"),
    [
        (
            lambda h: h.getValueState("v", "n long", 1000),
            "state 'v': a time to live is not supported",
        ),
        (lambda h: h.getListState("v", "n long", 1000), "state 'v': a time to live"),
        (lambda h: h.getMapState("v", "n long", "n long", 1000), "state 'v': a time to live"),
        (lambda h: h.getValueState("v", "n variant"), "state 'v': .* unknown type 'variant'"),
        (lambda h: [h.getValueState("v", "n long") for _ in "ab"], "has the same name"),
        (lambda h: 1 / 0, r"init\(\) raised ZeroDivisionError"),
    ],
)
def test_what_a_processor_may_not_declare(declare: Any, complaint: str) -> None:
    keyed = source(Flow("f"), table(random.Random(1), 1, COMMANDS)).key_by("k")
    with pytest.raises(FlowError, match=complaint):
        keyed.transform_with_state(Declares(declare), "n long")


def test_what_needs_processing_time_is_refused_by_name() -> None:
    batch = table(random.Random(1), 1, COMMANDS)
    keyed = source(Flow("f"), batch).key_by("k")
    with pytest.raises(FlowError, match="ProcessingTime is not supported"):
        keyed.transform_with_state(Visits(), VISITS, time_mode="ProcessingTime")
    with pytest.raises(FlowError, match="ProcessingTimeTimeout is not supported"):
        keyed.apply_in_pandas_with_state(
            sessions, SESSIONS, SESSION, timeout="ProcessingTimeTimeout"
        )
    with pytest.raises(FlowError, match="'complete' is not supported"):
        keyed.transform_with_state(Visits(), VISITS, output_mode="complete")
    with pytest.raises(FlowError, match="source 's' has no event time"):
        untimed = Flow("f").source("s", rows(batch)).key_by("k")
        untimed.transform_with_state(Visits(), VISITS, time_mode="EventTime")
    with pytest.raises(FlowError, match="not a StatefulProcessor"):
        keyed.transform_with_state(Visits, VISITS)
    with pytest.raises(FlowError, match="lateness= goes with event time"):
        keyed.transform_with_state(Visits(), VISITS, lateness=datetime.timedelta(seconds=1))


@pytest.mark.parametrize("time_mode", ["None", "EventTime"])
def test_what_is_asked_for_while_it_runs(time_mode: str) -> None:
    class Asks(Declares):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            if time_mode == "EventTime":
                timerValues.getCurrentProcessingTimeInMs()
            self.handle.registerTimer(5)
            return iter([])

        def init(self, handle: Any) -> None:
            self.handle = handle

    batch = table(random.Random(1), 1, COMMANDS)
    flow = Flow("f", protect=pairs())
    keyed = source(flow, batch).key_by("k")
    keyed.transform_with_state(Asks(None), "n long", time_mode=time_mode).sink("out", discard())
    complaint = "depend on processing time" if time_mode == "EventTime" else "timers need"
    with pytest.raises(OperatorError, match=complaint):
        run(flow, Input.of(s=batch))


def test_an_output_that_does_not_fit_is_named() -> None:
    class Tells(Declares):
        def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
            return iter([Row(n="text")])

    batch = table(random.Random(1), 1, COMMANDS)
    flow = Flow("f")
    keyed = source(flow, batch).key_by("k")
    keyed.transform_with_state(Tells(lambda handle: None), "n long").sink("out", discard())
    with pytest.raises(OperatorError, match="operator 'Tells'"):
        run(flow, Input.of(s=batch))


def test_rows_of_keys_in_order() -> None:
    """What a row gives stands at the row."""
    batch = table(random.Random(3), 50, ["add"])
    result = run(visits(batch), Input.of(s=batch))
    assert rows_of(result.sinks["out"]) == sorted(
        rows_of(result.sinks["out"]), key=lambda r: r[-4:]
    )
