"""Every operator against a plain loop, and against itself however the run is cut and spread."""

from __future__ import annotations

import datetime
import math
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.streams import Stream
from holdfast.connectors.sinks import discard
from holdfast.connectors.sources import rows
from holdfast.engine.expressions import col, lit
from holdfast.engine.operators.custom import KeyedFunction
from holdfast.plan.planner import plan

from . import models
from .arrays import array_of
from .harness import (
    Input,
    Result,
    Shape,
    examples,
    naive_marks,
    rows_of,
    run,
    without_order,
)

NAN = math.nan
US = pa.timestamp("us")
LONG = "a key much longer than sixteen bytes, " * 3
KEYS: dict[str, list[tuple[pa.DataType, list]]] = {
    "int": [(pa.int64(), [0, 1, -1, 7, 2**40, -(2**63)])],
    "int or null": [(pa.int32(), [None, 0, 1, 2, 3, -5])],
    "string": [(pa.string(), ["a", "b", "", "\u00df", LONG, LONG + "x"])],
    "string or null": [(pa.string(), [None, "", "a", "ab", "ba", "null"])],
    "float": [(pa.float64(), [0.0, -0.0, NAN, 1.5, None, -math.inf])],
    "time": [(US, [0, 1, None, 10**15, 5, 6])],
    "date": [(pa.date32(), [0, 1, None, 19000, 5, 6])],
    "bool": [(pa.bool_(), [True, False, None])],
    "packed": [(pa.int32(), [0, 1, None]), (pa.int16(), [0, 1, None])],
    "wide": [(pa.string(), ["a", None, "b"]), (pa.int64(), [0, 1, None])],
    "two longs": [(pa.int64(), [0, 1, 2]), (pa.float32(), [0.0, -0.0, NAN])],
}
DEEP = pa.map_(pa.string(), pa.struct([("a", pa.list_(pa.float32())), ("b", pa.int64())]))
SPECIAL = [0.0, -0.0, 1e308, -1e308, math.inf, -math.inf, NAN, 1e-310, 0.1]


@dataclass
class World:
    """Some rows, and a way to cut and spread their run."""

    batch: pa.RecordBatch
    keys: list[str]
    shape: Shape
    splits: int = 1

    @property
    def input(self) -> Input:
        return self.with_()

    def with_(self, **others: pa.RecordBatch) -> Input:
        """The rows together with those of other sources, in some order."""
        return Input.mixed(self.shape.seed, {"s": self.splits}, s=self.batch, **others)

    def source(self, flow: Flow, event_time: str = "ts") -> Stream:
        return flow.source("s", rows(*[self.batch] * self.splits), event_time=event_time)


@st.composite
def worlds(draw: st.DrawFn, rows_max: int = 150) -> World:
    n = draw(st.one_of(st.integers(0, 12), st.integers(13, rows_max)))
    kind = draw(st.sampled_from(sorted(KEYS)))
    rng = random.Random(draw(st.integers(0, 2**32)))
    variety = draw(st.sampled_from([1, 2, 6]))  # one key: more than 32 rows of it
    columns: dict[str, pa.Array] = {}
    keys = []
    for i, (arrow, pool) in enumerate(KEYS[kind]):
        keys.append(f"k{i}")
        pool = rng.sample(pool, min(variety, len(pool)))
        columns[keys[-1]] = pa.array([rng.choice(pool) for _ in range(n)], arrow)
    columns |= _values(rng, n, wild=draw(st.booleans()))
    splits = draw(st.sampled_from([1, 1, 3]))
    return World(pa.record_batch(columns), keys, draw(shapes(n)), splits)


@st.composite
def shapes(draw: st.DrawFn, n: int) -> Shape:
    cuts = draw(st.lists(st.integers(0, n), max_size=7))
    return Shape(
        cuts=cuts,
        partitions=draw(st.sampled_from([1, 2, 7, 32])),
        sites=draw(st.integers(1, 4)),
        thin=draw(st.booleans()),
        move_at=draw(st.none() | st.integers(0, len(cuts))),
        sites_after=draw(st.integers(1, 4)),
        fresh=draw(st.booleans()),
        seed=draw(st.integers(0, 99)),
    )


def _values(rng: random.Random, n: int, wild: bool) -> dict[str, pa.Array]:
    def number() -> float:
        return rng.choice(SPECIAL) if wild and rng.random() < 0.5 else rng.gauss(0, 1e3)

    big = 2**54 if wild else 100  # no sum of them is too large
    time = [3 * i + rng.randrange(-40, 40) for i in range(n)]
    names = [None, "x", "y", "zz"]
    return {
        "v": pa.array([number() for _ in range(n)], pa.float64()),
        "f": pa.array([number() for _ in range(n)], pa.float32()),
        "n": pa.array([rng.randrange(-big, big) for _ in range(n)], pa.int64()),
        "i": pa.array([rng.randrange(-99, 99) for _ in range(n)], pa.int32()),
        "u": pa.array([rng.choice([None, 0, 1, 2, 250]) for _ in range(n)], pa.uint8()),
        "name": pa.array([rng.choice(names) for _ in range(n)], pa.string()),
        "tag": pa.array([rng.choice(names[1:]) for _ in range(n)], pa.string()),
        "reals": array_of(pa.list_(pa.float64()), rng, n),
        "deep": array_of(DEEP, rng, n),
        "exact": array_of(pa.decimal128(20, 2), rng, n),
        "ts": pa.array(time, pa.int64()),
        "at": pa.array(time, US),
        "cmd": pa.array([rng.choice([0, 0, 1, 2, 3, None]) for _ in range(n)], pa.int8()),
    }


def check(flow: Flow, given_: Input, shape: Shape) -> Result:
    """Run in one piece on one site, and as `shape` says: nothing may differ."""
    p = plan(flow)
    whole, spread = run(p, given_), run(p, given_, shape)
    for sink in whole.sinks:
        assert spread.sinks[sink].schema.equals(whole.sinks[sink].schema)
        assert spread.rows(sink) == whole.rows(sink), sink
    assert (spread.late_rows, spread.dead_rows) == (whole.late_rows, whole.dead_rows)
    return whole


def expect(result: Result, sink: str, model: models.Rows) -> None:
    batch = result.sinks[sink]
    assert rows_of(batch) == models.expected(model, without_order(batch).schema)


BUILD = {"sum": F.sum, "mean": F.mean, "max": F.max, "min": F.min, "first": F.first, "last": F.last}
AGGS: models.Aggs = {
    "rows": ("count", None),
    "sv": ("sum", "v"),
    "sn": ("sum", "n"),
    "si": ("sum", "i"),
    "mv": ("mean", "v"),
    "mn": ("mean", "n"),
    "xv": ("max", "v"),
    "iv": ("min", "v"),
    "xf": ("max", "f"),
    "xn": ("max", "n"),
    "ii": ("min", "i"),
    "iat": ("min", "at"),
    "xat": ("max", "at"),
    "ltag": ("last", "tag"),
    "ftag": ("first", "tag"),
    "fv": ("first", "v"),
    "fat": ("first", "at"),
}
NULLABLE: models.Aggs = {
    "fname": ("first", "name"),
    "lname": ("last", "name"),
    "fu": ("first", "u"),
    "lu": ("last", "u"),
    "freals": ("first", "reals"),
    "lreals": ("last", "reals"),
    "fdeep": ("first", "deep"),
    "ldeep": ("last", "deep"),
    "fexact": ("first", "exact"),
}


def built(aggs: models.Aggs) -> dict[str, Any]:
    return {n: F.count() if c is None else BUILD[kind](c) for n, (kind, c) in aggs.items()}


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


class Changes(KeyedFunction):
    """Emit every row whose name differs from its key's last one, with that one and a count."""

    state = {"last": (pa.string(), None), "seen": (pa.int64(), 0), "top": (pa.float64(), -1e9)}  # noqa: RUF012
    output = pa.schema(
        [
            ("before", pa.string()),
            ("name", pa.string()),
            ("seen", pa.int64()),
            ("top", pa.float64()),
        ]
    )

    def process(self, rows: Any, state: Any) -> tuple[np.ndarray, dict[str, Any]]:
        groups = rows.groups()
        names = rows.batch.column("name").take(pa.array(groups.rows))
        shifted = pa.array(np.maximum(np.arange(len(rows)) - 1, 0))
        kept = state.get("last", groups.sorted_slots)
        before = pa.compute.if_else(pa.array(groups.is_first), kept, names.take(shifted))
        same = pa.compute.equal(names.fill_null("?"), before.fill_null("?")).to_numpy(False)
        seen = np.repeat(state["seen"][groups.slots], groups.lengths) + groups.ranks() + 1
        top = groups.fold(np.fmax, state["top"][groups.slots], rows["v"][groups.rows] + 0.0)
        state["seen"][groups.slots] = seen[groups.lasts]
        state["top"][groups.slots] = top[groups.lasts]
        state.put("last", groups.slots, names.take(pa.array(groups.lasts)))
        changed = np.flatnonzero(~same)
        changed = changed[np.argsort(groups.rows[changed])]
        at = pa.array(changed)
        columns = {"before": before.take(at), "name": names.take(at), "seen": seen[changed]}
        return groups.rows[changed], columns | {"top": top[changed]}


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
