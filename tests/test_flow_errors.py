"""Bad flows, bad functions and bad rows: each says what is wrong and where, and nothing is lost."""

from __future__ import annotations

import datetime
import json
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import errors
from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.streams import Stream
from holdfast.connectors.sinks import discard
from holdfast.connectors.sources import generator, rows
from holdfast.engine.expressions import col, lit
from holdfast.engine.operators.custom import KeyedFunction
from holdfast.engine.steps import conform
from holdfast.errors import FlowError, HoldfastError, InputError, OperatorError
from holdfast.plan.planner import plan
from tests.support.harness import Input, Shape, rows_of, run, without_order

SECONDS = datetime.timedelta(seconds=1)
ENDS = col("x") > 3
BATCH = pa.record_batch(
    {
        "k": pa.array([1, 2, 1, 3], pa.int64()),
        "name": pa.array(["a", "b", None, "d"], pa.string()),
        "x": pa.array([1.0, 2.0, 3.0, 4.0], pa.float64()),
        "t": pa.array([1, 2, 3, 4], pa.int64()),
        "at": pa.array([1, 2, 3, 4], pa.timestamp("ms")),
        "s": pa.array([1, 2, 3, 4], pa.timestamp("s")),
        "many": pa.array([[1], [2], [], None], pa.list_(pa.int64())),
        "gap": pa.array([(1, 2, 3)] * 4, pa.month_day_nano_interval()),
    }
)


def source(flow: Flow | None = None, name: str = "in", event_time: str | None = None) -> Stream:
    return (flow or Flow("shop")).source(name, rows(BATCH), event_time=event_time)


class Echo(KeyedFunction):
    output = pa.schema([("y", pa.float64())])

    def process(self, rows: Any, state: Any) -> tuple[np.ndarray, dict[str, Any]]:
        return np.arange(len(rows)), {"y": rows["x"]}


def with_state(**state: Any) -> KeyedFunction:
    return type("Mine", (Echo,), {"state": state})()


def with_output(schema: Any) -> KeyedFunction:
    return type("Mine", (Echo,), {"output": schema})()


def _two_sources() -> None:
    flow = Flow("shop")
    source(flow)
    source(flow)


def _two_sinks() -> None:
    stream = source()
    stream.sink("out", discard())
    stream.sink("out", discard())


def _other_flow() -> Stream:
    return source(Flow("other"), event_time="t")


def _renamed(stream: Stream) -> Stream:
    return stream.select("k", "t", "name", x_right=col("x"), x=col("x"))


SCHEMA = BATCH.schema
BAD: dict[str, tuple[Callable[[], Any], list[str]]] = {
    # --- flow and sources
    "on_error": (lambda: Flow("shop", on_error="ignore"), ["shop", "on_error", "ignore"]),  # type: ignore[arg-type]
    "not a source": (lambda: Flow("shop").source("in", BATCH), ["shop", "in", "RecordBatch"]),
    "two sources": (_two_sources, ["shop", "source 'in'", "a source of that name"]),
    "event time unknown": (lambda: source(event_time="no"), ["source 'in'", "'no'", "k: int64"]),
    "event time type": (lambda: source(event_time="x"), ["source 'in'", "'x'", "double"]),
    "reserved column": (
        lambda: Flow("shop").source("in", rows(pa.record_batch({"__x": [1]}))),
        ["source 'in'", "'__x'", "reserved"],
    ),
    "column twice": (
        lambda: Flow("shop").source(
            "in", rows(pa.RecordBatch.from_arrays([pa.array([1])] * 2, names=["x", "x"]))
        ),
        ["source 'in'", "two columns 'x'"],
    ),
    "no rows": (lambda: rows(), ["rows()"]),
    "no batch": (lambda: rows([]), ["rows()"]),
    "generator": (lambda: generator(None, SCHEMA, splits=0), ["generator()", "splits"]),  # type: ignore[arg-type]
    "no dead letters": (lambda: Flow("shop").dead_letters(), ["shop", "dead-letter"]),
    # --- steps
    "select unknown": (lambda: source().select("no"), ["select after 'in'", "'no'"]),
    "select unknown in expression": (
        lambda: source().select(y=col("no") + 1),
        ["select after 'in'", "'y'", "'no'"],
    ),
    "select nothing": (lambda: source().select(), ["select after 'in'"]),
    "select reserved": (lambda: source().select(__o0=col("k")), ["select", "'__o0'", "reserved"]),
    "with_columns reserved": (lambda: source().with_columns(__n=1), ["with_columns", "'__n'"]),
    "expression misfit": (lambda: source().select(y=col("name") - 1), ["select", "col('name')"]),
    "modulo of text": (lambda: source().select(y=col("name") % 2), ["select", "col('name')"]),
    "modulo of nothing": (lambda: source().select(y=col("k") % 0), ["select", "division by zero"]),
    "fill_null misfit": (lambda: source().select(y=col("k").fill_null("a")), ["select", "'a'"]),
    "truth of an expression": (lambda: bool(col("x") > 1), ["truth value", "& | ~"]),
    "filter not an expression": (lambda: source().filter(True), ["filter after 'in'", "True"]),  # type: ignore[arg-type]
    "filter not a condition": (lambda: source().filter(col("x")), ["filter after 'in'", "double"]),
    "filter unknown": (lambda: source().filter(col("no") > 1), ["filter after 'in'", "'no'"]),
    "map not callable": (lambda: source().map(3, SCHEMA), ["map after 'in'", "3"]),  # type: ignore[arg-type]
    "map schema": (lambda: source().map(len, {"a": 1}), ["map after 'in'", "pyarrow.Schema"]),  # type: ignore[arg-type]
    "map reserved": (
        lambda: source().map(len, pa.schema([("__o0", pa.int64())])),
        ["map after 'in'", "'__o0'"],
    ),
    "map_pandas not callable": (lambda: source().map_pandas(None, SCHEMA), ["map_pandas", "None"]),  # type: ignore[arg-type]
    "flat_map not callable": (lambda: source().flat_map("f", SCHEMA), ["flat_map", "'f'"]),  # type: ignore[arg-type]
    "union of schemas": (
        lambda: source().select("k").union(source(Flow("shop")).select("x")),
        ["union after 'select'"],
    ),
    "union of flows": (
        lambda: source().union(_other_flow()),
        ["union after 'in'", "different flows"],
    ),
    "union with no stream": (
        lambda: source().union(source().key_by("k")),
        ["union", "KeyedStream"],
    ),  # type: ignore[arg-type]
    "not a sink": (lambda: source().sink("out", print), ["sink 'out'", "builtin_function"]),  # type: ignore[arg-type]
    "two sinks": (_two_sinks, ["shop", "sink 'out'", "a sink of that name"]),
    # --- keys
    "no key": (lambda: source().key_by(), ["key_by after 'in'"]),
    "key unknown": (lambda: source().key_by("no"), ["key_by after 'in'", "'no'", "k: int64"]),
    "stage named as a source": (
        lambda: source().key_by("k", name="in").agg(n=F.count()),
        ["shop", "stage 'in'", "a source of that name"],
    ),
    "sink named as a stage": (
        lambda: source().key_by("k", name="st").agg(n=F.count()).sink("st", discard()),
        ["shop", "sink 'st'", "a stage of that name"],
    ),
    "key twice": (lambda: source().key_by("k", "k"), ["key_by", "'k'", "twice"]),
    "key nested": (lambda: source().key_by("many"), ["key_by", "'many'", "list"]),
    "key interval": (lambda: source().key_by("gap"), ["key_by", "'gap'", "interval"]),
    "merge": (lambda: source().key_by("k", merge="any"), ["key_by", "'any'"]),  # type: ignore[arg-type]
    "merge with event time": (
        lambda: source(event_time="t").key_by("k", merge="arrival").window(time=3).agg(n=F.count()),
        ["by (k)", "ordered"],
    ),
    "dead letters keyed": (
        lambda: Flow("shop", on_error="dead-letter").dead_letters().key_by("stage"),
        ["key_by after 'dead letters'"],
    ),
    # --- aggregates
    "no aggregate": (lambda: source().key_by("k").agg(), ["agg by (k) after 'in'"]),
    "not an aggregate": (lambda: source().key_by("k").agg(n=col("x")), ["agg by (k)", "n="]),  # type: ignore[arg-type]
    "aggregate unknown": (lambda: source().key_by("k").agg(n=F.sum("no")), ["'n'", "'no'"]),
    "sum of text": (lambda: source().key_by("k").agg(n=F.sum("name")), ["sum", "string"]),
    "mean of time": (lambda: source().key_by("k").agg(n=F.mean("at")), ["mean", "timestamp"]),
    "max of text": (lambda: source().key_by("k").agg(n=F.max("name")), ["max", "string"]),
    "sum of nothing": (lambda: source().key_by("k").agg(n=F.sum(None)), ["agg by (k)", "null"]),  # type: ignore[arg-type]
    "aggregate reserved": (lambda: source().key_by("k").agg(__n=F.count()), ["'__n'", "reserved"]),
    "aggregate like the key": (lambda: source().key_by("k").agg(k=F.count()), ["two columns 'k'"]),
    # --- windows
    "window of nothing": (lambda: source().key_by("k").window(), ["window by (k)", "rows="]),
    "window of both": (lambda: source().key_by("k").window(rows=1, time=1), ["rows="]),
    "window of no rows": (
        lambda: source().key_by("k").window(rows=0).agg(n=F.count()),
        ["window by (k)", "rows", "0"],
    ),
    "window of half a row": (
        lambda: source().key_by("k").window(rows=1.5).agg(n=F.count()),  # type: ignore[arg-type]
        ["window by (k)", "rows", "1.5"],
    ),
    "window every time": (
        lambda: source().key_by("k").window(rows=2, every=SECONDS).agg(n=F.count()),
        ["window by (k)", "every"],
    ),
    "window without aggregate": (
        lambda: source().key_by("k").window(rows=2).agg(),
        ["window by (k)"],
    ),
    "window without time": (
        lambda: source().key_by("k").window(time=5).agg(n=F.count()),
        ["window by (k)", "event time"],
    ),
    "window on a time that the source does not have": (
        lambda: source().key_by("k").window(time=5, on="t").agg(n=F.count()),
        ["window by (k)", "source 'in' has no event time", "event_time="],
    ),
    "window after agg": (
        lambda: (
            source(event_time="t")
            .key_by("k")
            .agg(n=F.count())
            .key_by("k")
            .window(time=5)
            .agg(m=F.count())
        ),
        ["window by (k)", "'running aggregate by (k)' does not pass 't' on", "say on="],
    ),
    "window after a time that was dropped": (
        lambda: (
            source(event_time="t")
            .select("k", "x")
            .filter(col("x") > 0)
            .key_by("k")
            .window(time=5)
            .agg(n=F.count())
        ),
        ["window by (k)", "'select' does not pass 't' on"],
    ),
    "join after agg": (
        lambda: (
            (timed := source(event_time="t").key_by("k"))
            .agg(n=F.count())
            .key_by("k")
            .join(timed, within=5)
        ),
        ["join by (k)", "'running aggregate by (k)' does not pass 't' on", "before it"],
    ),
    "window on unknown": (
        lambda: source().key_by("k").window(time=5, on="no").agg(n=F.count()),
        ["window by (k)", "'no'"],
    ),
    "window on text": (
        lambda: source().key_by("k").window(time=5, on="name").agg(n=F.count()),
        ["window by (k)", "'name'", "string"],
    ),
    "window timedelta over numbers": (
        lambda: source(event_time="t").key_by("k").window(time=SECONDS).agg(n=F.count()),
        ["window by (k)", "int64"],
    ),
    "window number over timestamps": (
        lambda: source(event_time="at").key_by("k").window(time=5).agg(n=F.count()),
        ["window by (k)", "timedelta"],
    ),
    "window of text": (
        lambda: source(event_time="t").key_by("k").window(time="5 s").agg(n=F.count()),  # type: ignore[arg-type]
        ["window by (k)", "'5 s'"],
    ),
    "window finer than time": (
        lambda: source(event_time="s").key_by("k").window(time=SECONDS * 1.5).agg(n=F.count()),
        ["window by (k)", "0:00:01.5", "timestamp[s]"],
    ),
    "window negative": (
        lambda: source(event_time="t").key_by("k").window(time=-5).agg(n=F.count()),
        ["window by (k)", "positive"],
    ),
    "window lateness": (
        lambda: source(event_time="t").key_by("k").window(time=5, lateness=-1).agg(n=F.count()),
        ["window by (k)", "lateness"],
    ),
    "window with gaps": (
        lambda: source(event_time="t").key_by("k").window(time=5, every=6).agg(n=F.count()),
        ["window by (k)", "every=6"],
    ),
    "window like its start": (
        lambda: source(event_time="t").key_by("k").window(time=5).agg(window_start=F.count()),
        ["two columns 'window_start'"],
    ),
    # --- spans
    "spans of both": (
        lambda: source().key_by("k").spans(start=col("x") > 1, end=col("x") > 2),
        ["spans by (k)", "emit="],
    ),
    "spans start": (
        lambda: source().key_by("k").spans(start=col("x"), end=col("x") > 2, time="t"),
        ["spans by (k)", "start", "double"],
    ),
    "spans end": (
        lambda: source().key_by("k").spans(start=col("x") > 2, end=True, time="t"),  # type: ignore[arg-type]
        ["spans by (k)", "end", "True"],
    ),
    "spans time": (
        lambda: source().key_by("k").spans(start=col("x") > 2, end=col("x") > 3, time="no"),
        ["spans by (k)", "no"],
    ),
    "spans emit": (
        lambda: (
            source()
            .key_by("k")
            .spans(start=col("x") > 2, end=col("x") > 3, emit={"y": F.at_start("no")})
        ),
        ["spans by (k)", "'y'", "no"],
    ),
    "spans timeout without a time": (
        lambda: source().key_by("k").spans(start=col("x") > 2, end=ENDS, time="t", timeout=9),
        ["spans by (k)", "timeout=", "event_time"],
    ),
    "spans timeout of nothing": (
        lambda: (
            source(event_time="t")
            .key_by("k")
            .spans(start=col("x") > 2, end=ENDS, time="t", timeout=0)
        ),
        ["spans by (k)", "timeout must be positive"],
    ),
    "spans timeout in other units": (
        lambda: (
            source(event_time="t")
            .key_by("k")
            .spans(start=col("x") > 2, end=ENDS, time="t", timeout=SECONDS)
        ),
        ["spans by (k)", "int64", "whole numbers"],
    ),
    "spans timeout as they come": (
        lambda: (
            source(event_time="t")
            .key_by("k", merge="arrival")
            .spans(start=col("x") > 2, end=ENDS, time="t", timeout=9)
        ),
        ["spans by (k)", "merge='ordered'"],
    ),
    "spans reserved": (
        lambda: (
            source()
            .key_by("k")
            .spans(start=col("x") > 2, end=col("x") > 3, emit={"__o0": col("x")})
        ),
        ["spans", "'__o0'"],
    ),
    "spans key": (
        lambda: (
            source()
            .with_columns(dur=col("k"))
            .key_by("dur")
            .spans(start=col("x") > 2, end=col("x") > 3, time="t")
        ),
        ["spans by (dur)", "'dur'"],
    ),
    "spans name": (
        lambda: (
            source()
            .select("k", "x", **{"start.x": col("x")})
            .key_by("k")
            .spans(start=col("x") > 2, end=col("x") > 3, time="x")
        ),
        ["spans by (k)", "'start.x'"],
    ),
    # --- joins
    "join keys": (
        lambda: source().key_by("k").join(source(Flow("shop")).key_by("t"), within=1),
        ["join by (k)"],
    ),
    "join with no key": (lambda: source().key_by("k").join(source(), within=1), ["join by (k)"]),  # type: ignore[arg-type]
    "join of flows": (
        lambda: source(event_time="t").key_by("k").join(_other_flow().key_by("k"), within=1),
        ["join by (k)", "different flows"],
    ),
    # --- functions of one's own
    "apply a class": (lambda: source().key_by("k").apply(Echo), ["apply by (k)", "instance"]),  # type: ignore[arg-type]
    "apply reserved state": (
        lambda: source().key_by("k").apply(with_state(__low=(pa.int64(), 0))),
        ["apply by (k)", "Mine", "'__low'"],
    ),
    "apply state without type": (
        lambda: source().key_by("k").apply(with_state(n=0)),
        ["apply by (k)", "Mine", "'n'"],
    ),
    "apply state start": (
        lambda: source().key_by("k").apply(with_state(n=(pa.int64(), None))),
        ["apply by (k)", "Mine", "'n'", "None"],
    ),
    "apply state time": (
        lambda: source().key_by("k").apply(with_state(n=(pa.timestamp("us"), SECONDS))),
        ["apply by (k)", "Mine", "'n'"],
    ),
    "apply output": (
        lambda: source().key_by("k").apply(with_output(["y"])),
        ["apply by (k)", "Mine", "Schema"],
    ),
    "apply reserved output": (
        lambda: source().key_by("k").apply(with_output(pa.schema([("__y", pa.int64())]))),
        ["Mine by (k)", "'__y'"],
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_flow_is_refused_where_it_is_written(name: str) -> None:
    make, words = BAD[name]
    with pytest.raises(FlowError) as caught:
        make()
    for word in words:
        assert word in str(caught.value), str(caught.value)


def _join(change: Callable[[Stream], Stream], **options: Any) -> Any:
    flow = Flow("shop")
    left, right = source(flow, "left", "t"), source(flow, "right", "t")
    return left.key_by("k").join(change(right).key_by("k"), **({"within": 1} | options))


@pytest.mark.parametrize(
    ("change", "options", "words"),
    [
        (lambda r: r.select("k", "x"), {}, ["event time"]),
        (lambda r: r.with_columns(k=col("x")), {}, ["'k'", "int64", "double"]),
        (lambda r: r, {"within": 0}, ["within"]),
        (lambda r: r, {"within": SECONDS}, ["whole numbers"]),
        (lambda r: r, {"within": 1, "lateness": -1}, ["lateness"]),
        (lambda r: r, {"suffix": ""}, ["suffix"]),
    ],
)
def test_a_bad_join_is_refused(change: Any, options: dict, words: list[str]) -> None:
    with pytest.raises(FlowError) as caught:
        _join(change, **options)
    for word in ["shop", "join by (k)", *words]:
        assert word in str(caught.value)


def test_event_times_of_different_types_do_not_join() -> None:
    flow = Flow("shop")
    left, right = source(flow, "left", "t"), source(flow, "right", "at")
    with pytest.raises(FlowError, match=r"join by \(k\).*differ in type: int64 and timestamp"):
        left.key_by("k").join(right.key_by("k"), within=1)


def test_an_event_time_that_a_function_made_text_is_one_no_longer() -> None:
    stream = source(event_time="t")
    same = stream.map(lambda b: b, BATCH.schema)
    text = stream.map(lambda b: b, pa.schema([("k", pa.int64()), ("t", pa.string())]))
    assert same.port.event_time == "t"
    assert text.port.event_time is None


# --- refused when the whole flow is looked at ---------------------------------------------------


def test_a_flow_without_source() -> None:
    with pytest.raises(FlowError, match="'shop' has no source"):
        plan(Flow("shop"))


def test_a_flow_without_sink() -> None:
    flow = Flow("shop")
    source(flow).select("k")
    with pytest.raises(FlowError, match="'shop' has no sink"):
        plan(flow)


def test_a_result_that_goes_nowhere() -> None:
    flow = Flow("shop")
    stream = source(flow)
    stream.sink("out", discard())
    stream.key_by("k").agg(n=F.count())
    with pytest.raises(FlowError, match=r"'running aggregate by \(k\)' goes nowhere"):
        plan(flow)


def test_a_cycle() -> None:
    flow = Flow("shop")
    a = source(flow).filter(col("x") > 0)
    b = a.select("k", "x")
    b.sink("out", discard())
    a.node.inputs = [b]
    with pytest.raises(FlowError, match="'shop' has a cycle: filter -> select -> filter"):
        plan(flow)


def test_dead_letters_that_nobody_takes() -> None:
    flow = Flow("shop", on_error="dead-letter")
    source(flow).sink("out", discard())
    with pytest.raises(FlowError, match="'shop' puts bad rows aside but nothing takes them"):
        plan(flow)


def test_event_times_of_different_units_are_refused_if_anything_watches_them() -> None:
    """Seconds of one source and microseconds of another have no common watermark."""

    def two(window: bool) -> Flow:
        flow = Flow("units")
        for name, kind in (("a", pa.timestamp("s")), ("b", pa.timestamp("us"))):
            batch = pa.record_batch({"k": pa.array([1]), "at": pa.array([1], kind)})
            keyed = flow.source(name, rows(batch), event_time="at").key_by("k")
            results = (
                keyed.window(time=SECONDS).agg(n=F.count()) if window else keyed.agg(n=F.count())
            )
            results.sink(f"out {name}", discard())
        return flow

    with pytest.raises(FlowError, match=r"'a': timestamp\[s\], 'b': timestamp\[us\]"):
        plan(two(window=True))
    plan(two(window=False))


# --- rows and functions that fail while the flow runs -------------------------------------------

SMALL = pa.record_batch(
    {
        "k": pa.array([1, 2, 1, 2, 1, 3], pa.int64()),
        "x": pa.array([6, 0, 3, 2, 0, 1], pa.int64()),
        "y": pa.array([1.0, 2.0, None, 4.0, 5.0, None], pa.float64()),
        "t": pa.array([1, 5, 9, 12, 20, 31], pa.int64()),
    }
)


def invert(batch: pa.RecordBatch) -> pa.RecordBatch:
    x = batch.column("x").to_pylist()
    return pa.record_batch({"k": batch.column("k"), "x": pa.array([6 // v for v in x], pa.int64())})


def explode(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, list[int]]:
    """Row by row x replicas of it; a row without a y is refused."""
    origins = [i for i, x in enumerate(batch.column("x").to_pylist()) for _ in range(x)]
    if batch.column("y").null_count:
        raise ValueError("no y")
    return batch.take(pa.array(origins, pa.int64())), origins


class Ratio(KeyedFunction):
    """The sum so far over x, which must not be zero; changes its state before it finds out."""

    state = {"sum": (pa.int64(), 0), "note": (pa.string(), None)}  # noqa: RUF012
    output = pa.schema([("ratio", pa.int64())])

    def process(self, rows: Any, state: Any) -> tuple[np.ndarray, dict[str, Any]]:
        groups = rows.groups()
        sums = groups.fold(np.add, state["sum"][groups.slots], rows["x"][groups.rows])
        state["sum"][groups.slots] = sums[groups.lasts]
        state.put("note", groups.slots, pa.array(["seen"] * groups.slots.size))
        if not rows["x"].all():
            raise ZeroDivisionError("x is zero")
        return np.arange(len(rows)), {"ratio": groups.scattered(sums) // rows["x"]}


X_ZERO, Y_NULL = {1, 4}, {2, 5}
SMALL_COLUMNS = pa.schema([("k", pa.int64()), ("x", pa.int64())])
STEPS: dict[str, tuple[Callable[[Stream], Stream], set[int], str, str]] = {
    "map": (lambda s: s.map(invert, SMALL_COLUMNS), X_ZERO, "invert", "ZeroDivisionError"),
    "flat_map": (
        lambda s: s.flat_map(explode, SMALL.schema),
        Y_NULL,
        "explode",
        "ValueError: no y",
    ),
    "filter": (
        lambda s: s.filter(lit(6) / (col("k") // col("x")) > 1),
        X_ZERO,
        "filter",
        "division by zero in (col('k') // col('x'))",
    ),
    "select": (
        lambda s: s.select("k", r=col("k") % col("x")),
        X_ZERO,
        "select",
        "division by zero in (col('k') % col('x'))",
    ),
    "cast": (
        lambda s: s.select("k", r=(col("x") - 1).cast(pa.uint8())),
        X_ZERO,
        "select",
        "ArrowInvalid",
    ),
    "running": (
        lambda s: s.key_by("k").agg(sy=F.sum("y"), n=F.count(), fx=F.first("x")),
        Y_NULL,
        "running aggregate",
        "got a null",
    ),
    "row window": (
        lambda s: s.key_by("k").window(rows=2).agg(sy=F.sum("y"), my=F.max("y")),
        Y_NULL,
        "row window",
        "got a null",
    ),
    "time window": (
        lambda s: s.key_by("k").window(time=10, lateness=10).agg(sy=F.sum("y"), n=F.count()),
        Y_NULL,
        "time window",
        "got a null",
    ),
    "spans": (
        lambda s: s.key_by("k").spans(
            start=(col("k") // col("x")) >= 0, end=col("x") > 9, emit={"x": col("x")}
        ),
        X_ZERO,
        "spans",
        "division by zero",
    ),
    "spans with a time-out": (
        lambda s: s.key_by("k").spans(
            start=(col("k") // col("x")) >= 0, end=col("x") > 9, emit={"x": col("x")}, timeout=2
        ),
        X_ZERO,
        "spans",
        "division by zero",
    ),
    "what spans emit": (
        lambda s: (
            s.key_by("k")
            .spans(
                start=col("x") > 1, end=col("x") < 1, emit={"r": col("k") // col("x")}, timeout=12
            )
            .expired
        ),
        {4},
        "spans",
        "division by zero",
    ),
    "custom": (lambda s: s.key_by("k").apply(Ratio()), X_ZERO, "Ratio", "x is zero"),
}
SHAPES = [
    Shape(),
    Shape(cuts=[1, 2, 3, 4, 5], partitions=3, sites=2),
    Shape(cuts=[3], partitions=8, sites=3, seed=4),
]


@pytest.mark.parametrize("name", STEPS)
def test_a_row_that_raises_stops_the_flow_and_is_named(name: str) -> None:
    build, bad, label, cause = STEPS[name]
    flow = Flow("shop")
    build(flow.source("in", rows(SMALL), event_time="t")).sink("out", discard())
    worst = min(bad)
    stage = "in" if "by (k)" not in (names := [s.name for s in plan(flow).stages])[1] else names[1]
    for cuts, epoch in (([], 0), (range(1, 6), worst)):
        with pytest.raises(OperatorError) as caught:
            run(flow, Input.of(**{"in": SMALL}), Shape(cuts=list(cuts)))
        error = caught.value
        assert (error.flow, error.stage, error.operator) == ("shop", stage, label)
        assert error.epoch == epoch
        assert cause in error.cause
        number, row = error.row.split(": ", 1)
        # Two ingresses share the rows of an epoch, so either one's first bad row may be named.
        assert int(number.removeprefix("sequence number ")) in (bad if epoch == 0 else {worst})
        assert json.loads(row)["k"] == SMALL.column("k")[int(number.split()[-1])].as_py()
        for word in ("'shop'", repr(stage), repr(label), f"epoch {epoch}", "dead-letter"):
            assert word in str(error)


@pytest.mark.parametrize("shape", SHAPES, ids=["whole", "row by row", "two epochs"])
@pytest.mark.parametrize("name", STEPS)
def test_exactly_the_bad_rows_become_dead_letters(name: str, shape: Shape) -> None:
    build, bad, label, cause = STEPS[name]
    flow = Flow("shop", on_error="dead-letter")
    build(flow.source("in", rows(SMALL), event_time="t")).sink("out", discard())
    flow.dead_letters().sink("dead", discard())
    result = run(flow, Input.of(**{"in": SMALL}), shape)
    dead = result.sinks["dead"]
    assert dead.column("__o0").to_pylist() == sorted(bad)
    assert result.dead_rows == len(bad)
    assert set(dead.column("operator").to_pylist()) == {label}
    assert all(cause in e for e in dead.column("error").to_pylist())
    for seq, text in zip(sorted(bad), dead.column("row").to_pylist(), strict=True):
        whole = SMALL.slice(seq, 1).to_pylist()[0]
        assert json.loads(text).items() <= whole.items()
        assert json.loads(text)["k"] == whole["k"]
    # A bad row was still seen by its source, where it moved the watermark; else it never was.
    assert result.rows("out") == _without(build, bad)


def _without(build: Callable[[Stream], Stream], bad: set[int]) -> list[tuple]:
    """The run without the bad rows."""
    good = pa.array([i not in bad for i in range(SMALL.num_rows)])
    batch = SMALL.append_column("good", good)
    flow = Flow("shop")
    stream = flow.source("in", rows(batch), event_time="t").filter(col("good"))
    build(stream.select(*SMALL.schema.names)).sink("out", discard())
    return run(flow, Input.of(**{"in": batch})).rows("out")


def test_one_of_several_rows_with_the_same_sequence_number_is_bad() -> None:
    """Rows that descend from one input row are judged one by one."""
    batch = pa.record_batch({"k": [1, 2], "x": [4, 4], "y": [1.0, 1.0]})

    def replicas(given: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
        origins = np.repeat(np.arange(given.num_rows), 4)
        out = given.take(pa.array(origins))
        return out.set_column(1, "x", pa.array(np.arange(out.num_rows) % 4)), origins

    schema = pa.schema([("k", pa.int64()), ("x", pa.int64()), ("y", pa.float64())])
    results = []
    for shape in (Shape(), Shape(cuts=[1], partitions=5, sites=3, seed=2)):
        flow = Flow("shop", on_error="dead-letter")
        stream = flow.source("in", rows(batch)).flat_map(replicas, schema)
        stream = stream.with_columns(j=col("x") // 3)
        stream.key_by("k", "x").apply(Ratio()).sink("out", discard())
        stream.with_columns(z=lit(9) // (col("x") - 2)).sink("steps", discard())
        flow.dead_letters().sink("dead", discard())
        result = run(flow, Input.of(**{"in": batch}), shape)
        assert [r[:3] for r in result.rows("out")] == [(k, x, 1) for k in (1, 2) for x in (1, 2, 3)]
        assert result.sinks["steps"].column("x").to_pylist() == [0, 1, 3] * 2
        dead = [json.loads(r)["x"] for r in result.sinks["dead"].column("row").to_pylist()]
        assert sorted(dead) == [0, 0, 2, 2]
        results.append(result.rows("dead"))
    assert results[0] == results[1]


def test_rows_of_one_place_find_the_same_watermark_though_one_is_bad() -> None:
    """The second row moves the watermark past 10, but only after all that descends from it."""
    batch = pa.record_batch({"k": [1, 1, 1], "t": [1, 20, 21], "y": [1.0, 2.0, 3.0]})

    def earlier(given: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
        """Each row, and three more from before; one of them is bad."""
        origins = np.repeat(np.arange(given.num_rows), 4)
        out = given.take(pa.array(origins))
        replica = np.arange(out.num_rows) % 4
        times = np.where(replica > 0, 6, out.column("t").to_numpy())
        y = out.column("y").to_numpy()
        y = pa.array(y, mask=(replica == 2) & (y == 2.0))
        return pa.record_batch({"k": out.column("k"), "t": times, "y": y}), origins

    for shape in (Shape(), Shape(cuts=[1, 2], partitions=3, sites=2)):
        flow = Flow("shop", on_error="dead-letter")
        stream = flow.source("in", rows(batch), event_time="t").flat_map(earlier, batch.schema)
        windows = stream.key_by("k").window(time=10).agg(n=F.count(), sy=F.sum("y"))
        windows.sink("out", discard())
        windows.late.sink("late", discard())
        flow.dead_letters().sink("dead", discard())
        result = run(flow, Input.of(**{"in": batch}), shape)
        assert [r[1:5:2] for r in result.rows("out")] == [(0, 6), (20, 2)]
        assert result.sinks["late"].column("__o0").to_pylist() == [2, 2, 2]
        assert result.sinks["dead"].column("__o0").to_pylist() == [1]


def test_a_bad_row_on_both_sides_of_a_join_is_put_aside_twice() -> None:
    """Both sides have the row, at the same place; neither replica of it may be lost."""
    batch = pa.record_batch(
        {"k": [1, 1, 1], "t": pa.array([1, None, 2], pa.int64()), "u": pa.array([1, 2, 3])}
    )
    flow = Flow("shop", on_error="dead-letter")
    stream = flow.source("in", rows(batch), event_time="u")
    left = stream.with_columns(u=col("t")).select("k", "t", u2=col("u"))
    sides = []
    for side in (left, left.select("k", "t", "u2")):
        sides.append(side.map(lambda b: b, side.schema))
        object.__setattr__(sides[-1].port, "event_time", "t")  # a time that may be null
    sides[0].key_by("k").join(sides[1].key_by("k"), within=5).sink("out", discard())
    flow.dead_letters().sink("dead", discard())
    for shape in (Shape(), Shape(cuts=[1, 2], partitions=4, sites=2)):
        result = run(flow, Input.of(**{"in": batch}), shape)
        assert result.sinks["dead"].column("__o0").to_pylist() == [1, 1]
        assert sorted(r[1:4:2] for r in result.rows("out")) == [(1, 1), (1, 2), (2, 1), (2, 2)]


def test_dead_letters_can_be_filtered_and_mapped() -> None:
    flow = Flow("shop", on_error="dead-letter")
    flow.source("in", rows(SMALL)).map(invert, SMALL_COLUMNS).sink("out", discard())
    dead = flow.dead_letters()
    dead.filter(col("operator") == "invert").select("row").sink("kept", discard())
    dead.filter(col("operator") == "other").sink("none", discard())
    result = run(flow, Input.of(**{"in": SMALL}), Shape(cuts=[2]))
    assert [json.loads(r)["x"] for r in result.sinks["kept"].column("row").to_pylist()] == [0, 0]
    assert result.sinks["none"].num_rows == 0


def test_a_step_over_dead_letters_that_raises_stops_the_flow() -> None:
    flow = Flow("shop", on_error="dead-letter")
    flow.source("in", rows(SMALL)).map(invert, SMALL_COLUMNS).sink("out", discard())
    flow.dead_letters().select(n=col("row").cast(pa.int64())).sink("dead", discard())
    with pytest.raises(OperatorError, match="operator 'select'"):
        run(flow, Input.of(**{"in": SMALL}))


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "nothing": (lambda b: None, "returned NoneType, not an Arrow batch"),
    "no column": (lambda b: b.select(["k"]), "no column 'x'"),
    "type": (lambda b: b.set_column(1, "x", pa.array(["?"] * b.num_rows)), "'x' as string"),
    "fewer rows": (lambda b: b.slice(1), "got 1 rows and returned 0"),
    "null": (lambda b: b.set_column(1, "x", pa.nulls(b.num_rows, pa.int64())), "a null in 'x'"),
}
PROMISED = pa.schema([("k", pa.int64()), pa.field("x", pa.int64(), nullable=False)])


@pytest.mark.parametrize("name", WRONG)
def test_a_map_that_breaks_its_promise(name: str) -> None:
    function, cause = WRONG[name]
    flow = Flow("shop")
    flow.source("in", rows(SMALL)).map(function, PROMISED).sink("out", discard())
    with pytest.raises(OperatorError) as caught:
        run(flow, Input.of(**{"in": SMALL}))
    assert cause in caught.value.cause
    assert "TypeError" in caught.value.cause


def test_a_map_may_give_a_table_or_castable_columns() -> None:
    flow = Flow("shop")
    stream = flow.source("in", rows(SMALL))
    narrow = pa.schema([("x", pa.int16())])
    stream.map(lambda b: pa.Table.from_batches([b]), narrow).sink("table", discard())
    stream.map_pandas(lambda f: f.assign(x=f["x"] * 1.0), narrow).sink("cast", discard())
    result = run(flow, Input.of(**{"in": SMALL}))
    for sink in ("table", "cast"):
        assert result.sinks[sink].column("x").equals(SMALL.column("x").cast(pa.int16()))


def test_a_map_pandas_that_gives_no_frame() -> None:
    flow = Flow("shop")
    flow.source("in", rows(SMALL)).map_pandas(lambda f: f["x"], PROMISED).sink("out", discard())
    with pytest.raises(OperatorError, match="returned Series, not a DataFrame"):
        run(flow, Input.of(**{"in": SMALL}))


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (lambda b: b, "must return (batch, origins)"),
        (lambda b: (b, [0, 0]), "1 rows and 2 origins"),
        (lambda b: (b, [5]), "origins must be ascending"),
        (lambda b: (b, [-1]), "origins must be ascending"),
    ],
)
def test_a_flat_map_that_breaks_its_promise(given: Any, cause: str) -> None:
    flow = Flow("shop")
    flow.source("in", rows(SMALL)).flat_map(given, SMALL.schema).sink("out", discard())
    with pytest.raises(OperatorError) as caught:
        run(flow, Input.of(**{"in": SMALL}))
    assert cause in caught.value.cause


@pytest.mark.parametrize(
    ("given", "cause"),
    [
        (([0], {}), "no column 'ratio'"),
        (([0], {"ratio": [1, 2]}), "returned 1 rows, but 2 values of 'ratio'"),
        (([0, 0], {"ratio": [1, 2]}), "ascending order"),
        (([7], {"ratio": [1]}), "outside of them"),
        (([-1], {"ratio": [1]}), "outside of them"),
        ((np.array([False]), {"ratio": [1]}), "row numbers, not as bool"),
        (([0], {"ratio": ["text"]}), "text"),
        (None, "NoneType"),
    ],
)
def test_a_keyed_function_that_breaks_its_promise(given: Any, cause: str) -> None:
    function = type("Wrong", (Ratio,), {"process": lambda self, rows, state: given})()
    flow = Flow("shop")
    flow.source("in", rows(SMALL)).key_by("k").apply(function).sink("out", discard())
    with pytest.raises(OperatorError) as caught:
        run(flow, Input.of(**{"in": SMALL}))
    assert cause in caught.value.cause
    assert caught.value.operator == "Wrong"


def test_a_failed_call_leaves_no_trace_in_the_state() -> None:
    flow = Flow("shop", on_error="dead-letter")
    flow.source("in", rows(SMALL)).key_by("k").apply(Ratio()).sink("out", discard())
    flow.dead_letters().sink("dead", discard())
    result = run(flow, Input.of(**{"in": SMALL}))
    assert rows_of(without_order(result.sinks["out"])) == [(1, 1), (1, 3), (2, 1), (3, 1)]


# --- errors between processes -------------------------------------------------------------------


def _all_errors() -> list[HoldfastError]:
    kinds = [
        e for e in vars(errors).values() if isinstance(e, type) and issubclass(e, HoldfastError)
    ]
    special: list[HoldfastError] = [
        OperatorError(flow="f", stage="s", operator="o", epoch=3, row="r", cause="c"),
        errors.Superseded(flow="f", term=3, cause="term 4 leads"),
        errors.ArbiterAway(where="zk://a,b/flow", cause="no answer"),
        errors.SinkRewoundError("out", 7, 3, "go back"),
    ]
    made = [k("what failed", hint="do this") for k in kinds if k not in map(type, special)]
    return [*made, *special, FlowError("no hint")]


@pytest.mark.parametrize("error", _all_errors(), ids=lambda e: type(e).__name__)
def test_errors_survive_pickling(error: HoldfastError) -> None:
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        again = pickle.loads(pickle.dumps(error, protocol))
        assert type(again) is type(error)
        assert str(again) == str(error)
        assert again.args == error.args
        assert vars(again) == vars(error)


@pytest.mark.parametrize("error", _all_errors(), ids=lambda e: type(e).__name__)
def test_a_site_tells_the_control_what_failed(error: HoldfastError) -> None:
    """Nothing is pickled there: the class is made again of the fields that it names."""
    detail = {name: getattr(error, name) for name in error.fields}
    again = type(error).rebuilt(detail)
    assert str(again) == str(error) and vars(again) == vars(error)


def test_a_store_that_went_backwards_is_described() -> None:
    error = errors.SinkRewoundError("out", 7, 3, "go back")
    assert "sink 'out' went backwards" in str(error)
    assert "confirmed epochs up to 7, but now it has only epochs up to 3" in str(error)
    assert "now it has nothing of this flow" in str(errors.SinkRewoundError("o", 7, -1, "h"))


def test_a_hint_is_part_of_the_text() -> None:
    assert str(FlowError("broken", hint="mend it")) == "broken\n  hint: mend it"
    assert FlowError("broken", hint="mend it").message == "broken"


def test_require() -> None:
    errors.require(1, "fine")
    with pytest.raises(errors.InvariantError, match="not fine"):
        errors.require([], "not fine")


# --- rows that do not fit their source ----------------------------------------------------------

DECLARED = pa.schema([pa.field("k", pa.int32(), nullable=False), ("x", pa.float64())])


def test_conform_gives_the_declared_schema() -> None:
    batch = pa.record_batch({"x": [1, 2], "more": ["a", "b"], "k": pa.array([1, 2], pa.int64())})
    fitted = conform(batch, DECLARED, "in")
    assert fitted.schema.equals(DECLARED)
    assert fitted.to_pylist() == [{"k": 1, "x": 1.0}, {"k": 2, "x": 2.0}]
    assert conform(fitted, DECLARED, "in") is fitted


@pytest.mark.parametrize("bad", [0, 1, 6, 7])
def test_conform_names_the_misfit_row(bad: int) -> None:
    values = [1, 2, 3, 4, 5, 6, 7, 8]
    values[bad] = 2**40 + bad
    batch = pa.record_batch({"k": values, "x": [0.5] * 8})
    with pytest.raises(InputError) as caught:
        conform(batch, DECLARED, "in")
    for word in ("source 'in'", "'k' (int32)", f"row {bad} of its batch", str(2**40 + bad)):
        assert word in str(caught.value)


def test_conform_names_the_first_of_several_misfits() -> None:
    batch = pa.record_batch({"k": [1, 2, 3, 4, 5], "x": ["1.5", "2", "?", "4", "!"]})
    with pytest.raises(InputError, match=r"'x' \(double\)(.|\n)*row 2 of its batch"):
        conform(batch, DECLARED, "in")


def test_conform_names_a_null_that_was_ruled_out() -> None:
    for schema in (DECLARED, pa.schema([("k", pa.int64()), ("x", pa.float64())])):
        batch = pa.record_batch({"k": [1, 2, None, None], "x": [0.5] * 4}).cast(
            pa.schema([("k", schema.field("k").type), ("x", pa.float64())])
        )
        with pytest.raises(InputError, match=r"'k' \(int32\): null(.|\n)*row 2 of its batch"):
            conform(batch, DECLARED, "in")
    same = pa.RecordBatch.from_arrays(
        [pa.array([None], pa.int32()), pa.array([1.0])], schema=DECLARED
    )
    with pytest.raises(InputError, match="row 0 of its batch"):
        conform(same, DECLARED, "in")


def test_conform_names_a_missing_column() -> None:
    with pytest.raises(InputError, match="source 'in': rows have no column 'x'"):
        conform(pa.record_batch({"k": [1]}), DECLARED, "in")


def test_conform_refuses_what_can_never_be_cast() -> None:
    batch = pa.record_batch({"k": pa.array([[1]], pa.list_(pa.int64())), "x": [0.5]})
    with pytest.raises(InputError, match="row 0 of its batch"):
        conform(batch, DECLARED, "in")
    with pytest.raises(InputError, match=r"\(none\)"):
        conform(batch.slice(0, 0), DECLARED, "in")


def test_what_belongs_to_event_time_windows_is_refused_for_row_windows() -> None:
    keyed = Flow("shop").source("in", rows(SMALL)).key_by("k")
    for extra in ({"lateness": 5}, {"on": "t"}):
        with pytest.raises(FlowError, match="go with time=, not rows="):
            keyed.window(rows=3, **extra)


# --- no memory: the fault of no row --------------------------------------------------------------


def no_memory(batch: pa.RecordBatch) -> pa.RecordBatch:
    raise pa.ArrowMemoryError("malloc of size 4096 failed")


def no_memory_in_the_end(batch: pa.RecordBatch) -> pa.RecordBatch:
    """As a library's function may put it."""
    try:
        return no_memory(batch)
    except MemoryError as error:
        raise RuntimeError("cannot invert") from error


class Greedy(Echo):
    def process(self, rows: Any, state: Any) -> tuple[np.ndarray, dict[str, Any]]:
        raise np._core._exceptions._ArrayMemoryError((1 << 40,), np.dtype(np.int64))


WITHOUT_MEMORY: dict[str, Callable[[Stream], Stream]] = {
    "a step": lambda s: s.map(no_memory, BATCH.schema),
    "a step that says it otherwise": lambda s: s.map(no_memory_in_the_end, BATCH.schema),
    "an operator": lambda s: s.key_by("k").apply(Greedy()),
}


@pytest.mark.parametrize("on_error", ["stop", "dead-letter"])
@pytest.mark.parametrize("name", sorted(WITHOUT_MEMORY))
def test_no_row_is_to_blame_if_there_is_no_memory(name: str, on_error: str) -> None:
    flow = Flow("shop", on_error=on_error)
    WITHOUT_MEMORY[name](source(flow)).sink("out", discard())
    if on_error == "dead-letter":
        flow.dead_letters().sink("dead", discard())
    with pytest.raises(errors.OutOfMemoryError) as caught:
        run(flow, Input.of(**{"in": BATCH}), Shape())
    said = str(caught.value)
    assert "flow 'shop', stage '" in said and "epoch 0" in said and "limit" in said
    assert ("4 keys" in said or "3 keys" in said) == (name == "an operator")
    assert "row:" not in said


def test_a_source_whose_rows_cannot_be_cast_for_want_of_memory_names_no_row(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = pa.record_batch({"k": pa.array([1, 2], pa.int32())})
    monkeypatch.setattr("holdfast.engine.steps.as_array", lambda *_: no_memory(batch))
    with pytest.raises(MemoryError):
        conform(batch, pa.schema([("k", pa.int64())]), "in")


def test_of_several_sinks_a_batch_job_gives_those_that_are_named() -> None:
    flow = Flow("shop")
    source = flow.source("s", rows(SMALL))
    source.sink("one", discard())
    source.sink("two", discard())
    for job in (flow.batch, flow.stream):
        with pytest.raises(FlowError, match="'shop' has several sinks: 'one', 'two'"):
            job(None, {})  # type: ignore[arg-type]
        with pytest.raises(FlowError, match="'shop' has no sink 'three'"):
            job(None, {}, sink=["one", "three"])  # type: ignore[arg-type]
