"""Every operator against a plain loop, and against itself however the run is cut and spread."""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.connectors.sinks import discard
from holdfast.connectors.sources import rows
from holdfast.engine.expressions import col, lit
from holdfast.plan.planner import plan
from tests.support import models
from tests.support.harness import (
    Input,
    Result,
    Shape,
    examples,
    naive_marks,
    rows_of,
    run,
    without_order,
)
from tests.support.operator_cases import AGGS, NAN, NULLABLE, Changes, World, built, check, worlds


def expect(result: Result, sink: str, model: models.Rows) -> None:
    batch = result.sinks[sink]
    assert rows_of(batch) == models.expected(model, without_order(batch).schema)


# --- keyed operators ----------------------------------------------------------------------------


@examples(40)
@given(worlds())
def test_running_aggregate(world: World) -> None:
    flow = Flow("f")
    aggs = {**AGGS, **NULLABLE}
    world.source(flow).key_by(*world.keys).agg(**built(aggs)).sink("out", discard())
    result = check(flow, world.input, world.shape)
    expect(result, "out", models.running(models.stream(world.input, "s"), world.keys, aggs))


@examples(40)
@given(worlds(), st.integers(1, 40), st.sampled_from([1, 1, 2, 5, 33]))
def test_row_window(world: World, size: int, every: int) -> None:
    flow = Flow("f")
    windowed = world.source(flow).key_by(*world.keys).window(rows=size, every=every)
    aggs = {**AGGS, **NULLABLE}
    windowed.agg(**built(aggs)).sink("out", discard())
    result = check(flow, world.input, world.shape)
    model = models.stream(world.input, "s")
    expect(result, "out", models.row_window(model, world.keys, size, every, aggs))


def _closed(batch: pa.RecordBatch) -> list[tuple]:
    """Window results without the hash that orders those of one row and window."""
    return sorted(rows_of(without_order(batch, "__o0", "__o1")), key=repr)


@examples(60)
@given(
    worlds(),
    st.sampled_from([1, 7, 20, 100]),
    st.sampled_from([1, 2, 3, 7]),
    st.sampled_from([0, 5, 30]),
    st.booleans(),
)
def test_time_window(world: World, size: int, per: int, lateness: int, two: bool) -> None:
    flow = Flow("f")
    every = max(1, size // per)
    aggs = {**AGGS, **NULLABLE}
    given_ = world.input
    if two:  # a second source, whose rows hold the watermark back and move it on
        other = world.batch.slice(world.batch.num_rows // 3).select(["ts", "n"])
        given_ = world.with_(t=other)
        flow.source("t", rows(other), event_time="ts").sink("others", discard())
    windowed = world.source(flow).key_by(*world.keys)
    windowed = windowed.window(time=size, every=every, lateness=lateness).agg(**built(aggs))
    windowed.sink("out", discard())
    windowed.late.sink("late", discard())
    result = check(flow, given_, world.shape)
    marks = naive_marks(plan(flow), given_)
    stream = models.stream(given_, "s")
    out, late = models.time_window(stream, world.keys, "ts", size, every, lateness, aggs, marks)
    schema = without_order(result.sinks["out"]).schema
    assert _closed(result.sinks["out"]) == sorted(models.expected(out, schema), key=repr)
    expect(result, "late", late)
    assert result.late_rows == len(late)


@examples(20)
@given(worlds())
def test_time_window_over_timestamps(world: World) -> None:
    flow = Flow("f")
    source = world.source(flow, "at")
    micro = datetime.timedelta(microseconds=1)
    windowed = source.key_by(*world.keys).window(time=20 * micro, lateness=3 * micro)
    windowed.agg(**built(AGGS)).sink("out", discard())
    result = check(flow, world.input, world.shape)
    marks = naive_marks(plan(flow), world.input)
    stream = models.stream(world.input, "s")
    out, _ = models.time_window(stream, world.keys, "at", 20, 20, 3, AGGS, marks)
    schema = without_order(result.sinks["out"]).schema
    assert _closed(result.sinks["out"]) == sorted(models.expected(out, schema), key=repr)


def _emitted(keys: list[str]) -> dict[str, Any]:
    return {k: col(k) for k in keys} | {
        "v0": F.at_start("v"),
        "v1": col("v"),
        "name0": F.at_start("name"),
        "u0": F.at_start("u"),
        "at0": F.at_start("at"),
        "reals0": F.at_start("reals"),
        "deep0": F.at_start("deep"),
        "took": col("ts") - F.at_start("ts"),
        "one": lit(1),
    }


def _span(keys: list[str], a: models.Row, b: models.Row) -> models.Row:
    return {k: b[k] for k in keys} | {
        "v0": a["v"],
        "v1": b["v"],
        "name0": a["name"],
        "u0": a["u"],
        "at0": a["at"],
        "reals0": a["reals"],
        "deep0": a["deep"],
        "took": b["ts"] - a["ts"],
        "one": 1,
    }


def _starts(row: models.Row) -> bool:
    return row["cmd"] == 1


def _ends(row: models.Row) -> bool:
    return row["cmd"] is not None and row["cmd"] > 1


@examples(40)
@given(worlds())
def test_spans(world: World) -> None:
    flow = Flow("f")
    keyed = world.source(flow).key_by(*world.keys)
    emit = _emitted(world.keys)
    keyed.spans(start=col("cmd") == 1, end=col("cmd") > 1, emit=emit).sink("out", discard())
    result = check(flow, world.input, world.shape)
    made = partial(_span, world.keys)
    model = models.spans(models.stream(world.input, "s"), world.keys, _starts, _ends, made)
    expect(result, "out", model)


@examples(80)
@given(
    worlds(),
    st.sampled_from([1, 7, 25, 40, 90, 1000]),
    st.booleans(),
    st.sampled_from([1, 1, 3]),
)
def test_spans_with_a_time_out(world: World, timeout: int, two: bool, coarse: int) -> None:
    """Also where rows of another source move the watermark, or several rows stand at one place."""
    flow = Flow("f")
    given_ = world.input
    if two:
        other = world.batch.slice(world.batch.num_rows // 3).select(["ts", "n"])
        given_ = world.with_(t=other)
        flow.source("t", rows(other), event_time="ts").sink("others", discard())
    source = world.source(flow)
    if coarse > 1:
        source = source.flat_map(_thrice, source.schema)
    spans = source.key_by(*world.keys).spans(
        start=col("cmd") == 1, end=col("cmd") > 1, emit=_emitted(world.keys), timeout=timeout
    )
    spans.sink("out", discard())
    spans.expired.sink("expired", discard())
    spans.late.sink("late", discard())
    result = check(flow, given_, world.shape)
    stream = models.stream(given_, "s")
    if coarse > 1:
        stream = [((*o, n), r | {"cmd": c}) for o, r in stream for n, c in enumerate(_cmds(r))]
    out, expired, late = models.timed_spans(
        stream,
        world.keys,
        "ts",
        timeout,
        _starts,
        _ends,
        partial(_span, world.keys),
        naive_marks(plan(flow), given_),
    )
    expect(result, "out", out)
    expect(result, "late", late)
    names = without_order(result.sinks["expired"]).schema
    kept = ["v", "u", "name", "reals", "deep", "ts", "at"]
    assert names.names == [*world.keys, *kept]
    assert _closed(result.sinks["expired"]) == sorted(models.expected(expired, names), key=repr)
    assert result.late_rows == len(late)


def _cmds(row: models.Row) -> list[int | None]:
    """What becomes of a row's command: nothing, or it and two more at the same place."""
    cmd = row["cmd"]
    return [] if cmd is None else [cmd, (cmd + 1) % 4, 1]


def _thrice(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    cmds = [_cmds({"cmd": c}) for c in batch.column("cmd").to_pylist()]
    origins = np.repeat(np.arange(len(cmds)), [len(c) for c in cmds])
    flat = pa.array([c for some in cmds for c in some], pa.int8())
    made = batch.take(pa.array(origins))
    return made.set_column(made.schema.get_field_index("cmd"), "cmd", flat), origins


@examples(40)
@given(worlds(rows_max=100), st.sampled_from([1, 5, 20, 200]), st.sampled_from([0, 4, 50]))
def test_window_join(world: World, within: int, lateness: int) -> None:
    batch = world.batch.select([*world.keys, "ts", "v", "name", "reals"])
    half = batch.num_rows // 2
    left, right = batch.slice(0, half), batch.slice(half).drop_columns(["name"])
    # Both halves cover the same stretch of time.
    shifted = pa.array(right.column("ts").to_numpy() - 3 * half, pa.int64())
    right = right.set_column(right.schema.get_field_index("ts"), "ts", shifted)
    given_ = Input.mixed(world.shape.seed, {}, a=left, b=right)
    flow = Flow("f")
    sides = [flow.source(n, rows(b), event_time="ts") for n, b in given_.batches.items()]
    a, b = (s.key_by(*world.keys) for s in sides)
    joined = a.join(b, within=within, lateness=lateness)
    joined.sink("out", discard())
    joined.late.sink("late", discard())
    joined.late_right.sink("late_right", discard())
    result = check(flow, given_, world.shape)
    marks = naive_marks(plan(flow), given_)
    a_rows, b_rows = models.stream(given_, "a"), models.stream(given_, "b")
    out, *late = models.join(a_rows, b_rows, world.keys, "ts", within, lateness, marks)
    expect(result, "out", out)
    expect(result, "late", late[0])
    expect(result, "late_right", late[1])


@examples(25)
@given(worlds(rows_max=80), st.sampled_from([1, 8, 60]))
def test_join_of_a_stream_with_itself(world: World, within: int) -> None:
    """Both sides have the same rows: (i, j) and (j, i) are two pairs with one place each."""
    flow = Flow("f")
    source = world.source(flow).select(*world.keys, "ts", "n")
    other = source.filter(col("n") % 2 == 0)
    joined = source.key_by(*world.keys).join(other.key_by(*world.keys), within=within)
    joined.sink("out", discard())
    result = check(flow, world.input, world.shape)
    marks = naive_marks(plan(flow), world.input)
    names = [*world.keys, "ts", "n"]
    stream = [(o, {n: r[n] for n in names}) for o, r in models.stream(world.input, "s")]
    even = [r for r in stream if r[1]["n"] % 2 == 0]
    out, _, _ = models.join(stream, even, world.keys, "ts", within, 0, marks)
    batch = result.sinks["out"]
    got = rows_of(without_order(batch, "__o0", "__o1"))
    assert sorted(got, key=repr) == sorted(
        models.expected(out, without_order(batch).schema), key=repr
    )


def model_changes(rows_: models.Rows, keys: list[str]) -> models.Rows:
    state: dict[tuple, tuple] = {}
    out = []
    for order, row in rows_:
        key = models.key_of(row, keys)
        name, seen, top = state.get(key, (None, 0, -1e9))
        top = top if math.isnan(row["v"]) else max(top, row["v"] + 0.0)
        state[key] = (row["name"], seen + 1, top)
        if row["name"] != name:
            made = {"before": name, "name": row["name"], "seen": seen + 1, "top": top}
            out.append((order, {k: row[k] for k in keys} | made))
    return out


@examples(40)
@given(worlds())
def test_custom_operator(world: World) -> None:
    flow = Flow("f")
    world.source(flow).key_by(*world.keys).apply(Changes()).sink("out", discard())
    result = check(flow, world.input, world.shape)
    expect(result, "out", model_changes(models.stream(world.input, "s"), world.keys))


# --- stateless steps ----------------------------------------------------------------------------


def _double(batch: pa.RecordBatch) -> pa.RecordBatch:
    twice = pa.compute.multiply(batch.column("i"), 2)
    return pa.record_batch({"twice": twice, "n": batch.column("n"), "ts": batch.column("ts")})


def _double_pandas(frame: Any) -> Any:
    return frame.assign(twice=frame["i"] * 2)[["twice", "n", "ts"]]


def _repeat(batch: pa.RecordBatch) -> tuple[pa.RecordBatch, np.ndarray]:
    """Each row as often as its `i` says, modulo 4."""
    times = batch.column("i").to_numpy() % 4
    origin = np.repeat(np.arange(batch.num_rows), times)
    replica = np.arange(origin.size) - np.searchsorted(origin, origin)
    out = {n: batch.column(n).take(pa.array(origin)) for n in batch.schema.names}
    return pa.record_batch({**out, "copy": pa.array(replica)}), origin


def _repeated(model: models.Rows) -> models.Rows:
    return [((*o, c), r | {"copy": c}) for o, r in model for c in range(r["i"] % 4)]


@examples(25)
@given(worlds())
def test_stateless_steps(world: World) -> None:
    flow = Flow("f")
    source = world.source(flow)
    picked = source.select("ts", "n", "name", x=col("u") + col("i"), y=lit(3), z=col("v") > 0)
    picked.filter((col("x") > 0) | (col("name") == "y")).sink("picked", discard())
    promised = pa.schema([("twice", pa.int64()), ("n", pa.int64()), ("ts", pa.int64())])
    source.map(_double, promised).with_columns(n=col("n") // 7).sink("arrow", discard())
    source.map_pandas(_double_pandas, promised).filter(col("twice") != 4).sink("pandas", discard())
    replicas = pa.schema([*world.batch.schema, ("copy", pa.int64())])
    source.flat_map(_repeat, replicas).select("n", "copy").sink("flat", discard())
    result = check(flow, world.input, world.shape)

    stream = models.stream(world.input, "s")
    wanted = []
    for order, r in stream:
        x = None if r["u"] is None else r["u"] + r["i"]
        if (x is not None and x > 0) or r["name"] == "y":
            wanted.append((order, r | {"x": x, "y": 3, "z": r["v"] > 0}))
    expect(result, "picked", wanted)
    expect(result, "arrow", [(o, r | {"twice": 2 * r["i"], "n": r["n"] // 7}) for o, r in stream])
    expect(result, "pandas", [(o, r | {"twice": 2 * r["i"]}) for o, r in stream if r["i"] != 2])
    expect(result, "flat", _repeated(stream))


OPERATIONS: dict[str, Callable[[Any, Any], Any]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
    "//": lambda a, b: a // b,
    "%": lambda a, b: a % b,
    "==": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
    "&": lambda a, b: a & b,
    "|": lambda a, b: a | b,
}
NUMBERS = {
    "i8": (pa.int8(), [1, -3, 127, None]),
    "u8": (pa.uint8(), [1, 7, 255, None]),
    "i64": (pa.int64(), [1, -3, 2**53 + 1, 2**63 - 1, -(2**63), None]),
    "u64": (pa.uint64(), [1, 3, 2**63 + 1, 2**64 - 1, None]),
    "f32": (pa.float32(), [0.1, -1.5, NAN, math.inf, None]),
    "f64": (pa.float64(), [0.1, -1.5, NAN, 1e300, None]),
    "bit": (pa.bool_(), [True, False, None]),
}
OPERANDS = [*(col(n) for n in NUMBERS), lit(3), lit(0.1), lit(-1), lit(True)]


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@examples(100)
@given(
    st.sampled_from(sorted(OPERATIONS)),
    st.sampled_from(OPERANDS),
    st.sampled_from(OPERANDS),
    st.integers(0, 2**32),
)
def test_an_expression_does_not_mind_the_batch(op: str, a: Any, b: Any, seed: int) -> None:
    """Whether a row's neighbours are null decides between numpy and Arrow, and nothing else."""
    rng = random.Random(seed)
    batch = pa.record_batch(
        {n: pa.array([rng.choice(pool) for _ in range(12)], t) for n, (t, pool) in NUMBERS.items()}
    )
    flow = Flow("f")
    try:
        made = flow.source("s", rows(batch)).select(x=OPERATIONS[op](a, b))
    except Exception as error:
        assert type(error).__name__ == "FlowError"  # the two do not go together, for any row
        return
    made.sink("out", discard())
    given_ = Input.of(s=batch)
    whole = run(flow, given_).rows("out")
    assert run(flow, given_, Shape(cuts=range(12))).rows("out") == whole
    if op not in "&|":
        missing = [
            any(row[n] is None for n in [*a.columns(), *b.columns()]) for row in batch.to_pylist()
        ]
        assert [row[0] is None for row in whole] == missing


# --- flows of several stages --------------------------------------------------------------------


@examples(25)
@given(worlds())
def test_chain_of_three_keyed_stages(world: World) -> None:
    flow = Flow("f")
    first_ = {"rows": ("count", None), "sv": ("sum", "v"), "ltag": ("last", "tag")}
    second = {"msv": ("mean", "sv"), "top": ("max", "rows"), "frows": ("first", "rows")}
    third = {"total": ("sum", "msv"), "many": ("count", None)}
    stream = world.source(flow).key_by(*world.keys).agg(**built(first_))
    stream = stream.key_by("ltag").window(rows=5).agg(**built(second))
    stream = stream.filter(col("top") % 3 != 0).with_columns(odd=col("frows") % 2)
    stream.key_by("odd").agg(**built(third)).sink("out", discard())
    result = check(flow, world.input, world.shape)
    model = models.running(models.stream(world.input, "s"), world.keys, first_)
    model = models.row_window(model, ["ltag"], 5, 1, second)
    model = [(o, r | {"odd": r["frows"] % 2}) for o, r in model if r["top"] % 3 != 0]
    expect(result, "out", models.running(model, ["odd"], third))


@examples(25)
@given(worlds())
def test_chain_of_flat_map_and_two_keyed_stages(world: World) -> None:
    flow = Flow("f")
    replicas = pa.schema([*world.batch.schema, ("copy", pa.int64())])
    stream = world.source(flow).flat_map(_repeat, replicas)
    stream = stream.key_by("copy").agg(sv=F.sum("v"), tag=F.last("tag"))
    stream.key_by("tag").window(rows=3, every=2).agg(m=F.mean("sv")).sink("out", discard())
    result = check(flow, world.input, world.shape)
    model = _repeated(models.stream(world.input, "s"))
    model = models.running(model, ["copy"], {"sv": ("sum", "v"), "tag": ("last", "tag")})
    expect(result, "out", models.row_window(model, ["tag"], 3, 2, {"m": ("mean", "sv")}))


@examples(25)
@given(worlds(), st.booleans())
def test_diamond(world: World, flat: bool) -> None:
    """Two branches of one source meet again: each of its rows comes twice, in a fixed order."""
    flow = Flow("f")
    source = world.source(flow).select(*world.keys, "i", "v")
    low = source.filter(col("i") < 50)
    if flat:
        high = source.flat_map(_repeat, pa.schema([*source.schema, ("copy", pa.int64())]))
        high = high.select(*source.schema.names)
    else:
        high = source.filter(col("i") > -50).with_columns(v=col("v") * 2)
    both = low.union(high)
    aggs = {"sv": ("sum", "v"), "rows": ("count", None)}
    both.key_by(*world.keys).agg(**built(aggs)).sink("out", discard())
    both.sink("both", discard())
    result = check(flow, world.input, world.shape)
    stream = models.stream(world.input, "s")
    model = [
        ((*o, 0, 0)[: 3 if flat else 1] + (0,) * (not flat), r) for o, r in stream if r["i"] < 50
    ]
    if flat:
        model += [((*o, 1), r) for o, r in _repeated(stream)]
    else:
        model += [((*o, 1), r | {"v": r["v"] * 2}) for o, r in stream if r["i"] > -50]
    expect(result, "both", model)
    expect(result, "out", models.running(model, world.keys, aggs))


@examples(25)
@given(worlds())
def test_windows_of_two_sources_meet(world: World) -> None:
    """A window closes at a row of any source, so results of different sources share a place."""
    half = world.batch.slice(0, world.batch.num_rows // 2)
    given_ = Input.mixed(world.shape.seed, {}, a=half, b=world.batch)
    flow = Flow("f")
    closed = []
    for name, batch in given_.batches.items():
        stream = flow.source(name, rows(batch), event_time="ts").with_columns(i=col("i") % 4)
        keyed = stream.key_by("i")
        closed.append(keyed.window(time=10).agg(sv=F.sum("v"), sn=F.sum("n")))
    met = closed[0].union(closed[1])
    totals = met.with_columns(b=col("sn") % 3).key_by("b").agg(sv=F.sum("sv"), rows=F.count())
    totals.key_by("rows").agg(sv=F.sum("sv")).sink("out", discard())
    check(flow, given_, world.shape)


@examples(25)
@given(worlds(), st.sampled_from([0, 6]))
def test_windows_over_windows_lose_nothing(world: World, lateness: int) -> None:
    """What a window gives is late for nobody, although it trails the watermark."""
    flow = Flow("f")
    keyed = world.source(flow).key_by(*world.keys, "tag")
    small = keyed.window(time=10, every=5, lateness=lateness).agg(n=F.count(), sv=F.sum("v"))
    large = small.key_by("tag").window(time=30).agg(n=F.sum("n"), sv=F.sum("sv"))
    large.late.sink("late", discard())
    large.key_by("tag").window(time=90).agg(n=F.sum("n")).sink("out", discard())
    small.late.sink("first", discard())
    result = check(flow, world.input, world.shape)
    assert result.sinks["late"].num_rows == 0
    late = result.sinks["first"].num_rows
    counted = sum(row["n"] for row in result.sinks["out"].to_pylist())
    # Every row is in two of the small windows, unless one of the two had closed before it came.
    assert world.batch.num_rows - late <= counted <= 2 * (world.batch.num_rows - late)


@examples(20)
@given(worlds())
def test_windows_after_what_came_after_windows_lose_nothing(world: World) -> None:
    """How far rows trail the watermark is known still after operators that drop the event time."""
    flow = Flow("f")
    small = world.source(flow).key_by("tag").window(time=10).agg(n=F.count())
    totals = (
        small.key_by("tag", "window_start").agg(n=F.sum("n")).select("n", t=col("window_start"))
    )
    large = (
        totals.with_columns(b=col("n") % 2).key_by("b").window(time=10, on="t").agg(n=F.sum("n"))
    )
    large.late.sink("late", discard())
    large.sink("out", discard())
    assert check(flow, world.input, world.shape).sinks["late"].num_rows == 0


@examples(30)
@given(worlds(), st.sampled_from([1, 25, 90]))
def test_spans_and_windows_in_a_row_lose_nothing(world: World, timeout: int) -> None:
    """Whether a span ended or timed out, its start is late for nobody; nor is a window."""
    flow = Flow("f")
    spans = (
        world.source(flow)
        .key_by(*world.keys)
        .spans(
            start=col("cmd") == 1,
            end=col("cmd") > 1,
            emit={"tag": F.at_start("tag"), "begun": F.at_start("ts")},
            timeout=timeout,
        )
    )
    both = spans.union(spans.expired.select("tag", begun=col("ts")))
    both.sink("both", discard())
    windows = both.key_by("tag").window(time=10).agg(n=F.count())
    windows.late.sink("late windows", discard())
    windows.sink("windows", discard())
    again = windows.key_by("tag").spans(
        start=col("n") > 1, end=col("n") == 1, time="window_start", timeout=timeout
    )
    again.late.sink("late spans", discard())
    again.sink("out", discard())
    again.expired.sink("expired", discard())
    result = check(flow, world.input, world.shape)
    assert result.sinks["late windows"].num_rows == result.sinks["late spans"].num_rows == 0
    counted = sum(result.sinks["windows"].column("n").to_pylist())
    assert counted == result.sinks["both"].num_rows


@examples(20)
@given(worlds())
def test_join_after_windows(world: World) -> None:
    flow = Flow("f")
    source = world.source(flow)
    closed = source.key_by("tag").window(time=10).agg(sv=F.sum("v"))
    joined = source.select("tag", "ts", "n").key_by("tag").join(closed.key_by("tag"), within=15)
    joined.key_by("tag").agg(rows=F.count(), sv=F.sum("sv")).sink("out", discard())
    joined.late_right.sink("late", discard())
    assert check(flow, world.input, world.shape).sinks["late"].num_rows == 0


# --- moving state -------------------------------------------------------------------------------


@pytest.mark.parametrize("fresh", [True, False], ids=["to fresh runners", "between runners"])
@examples(8)
@given(worlds(), st.integers(1, 4), st.integers(1, 4))
def test_state_moves_half_way(fresh: bool, world: World, sites: int, after: int) -> None:
    """All kinds of state at once: extracted, carried and installed in the middle of the run."""
    n = world.batch.num_rows
    flow = Flow("f")
    source = world.source(flow)
    keyed = source.key_by(*world.keys)
    keyed.agg(**built({**AGGS, **NULLABLE})).sink("running", discard())
    keyed.window(rows=9).agg(**built({**AGGS, **NULLABLE})).sink("rows", discard())
    keyed.window(time=60, every=20).agg(**built({**AGGS, **NULLABLE})).sink("time", discard())
    keyed.spans(start=col("cmd") == 1, end=col("cmd") > 1, time="at").sink("open", discard())
    timed = keyed.spans(start=col("cmd") == 1, end=col("cmd") > 1, time="at", timeout=50)
    timed.sink("timed", discard())
    timed.expired.sink("expired", discard())
    keyed.apply(Changes()).sink("custom", discard())
    right = source.select(*world.keys, "ts", "n").key_by(*world.keys)
    keyed.join(right, within=30).sink("join", discard())
    shape = replace(
        world.shape,
        cuts=[n // 4, n // 2, 3 * n // 4],
        partitions=13,
        sites=sites,
        sites_after=after,
        move_at=2,
        fresh=fresh,
    )
    check(flow, world.input, shape)
