"""Ways to lose, repeat or change a row that were found, each with a test; and what is refused."""

from __future__ import annotations

import datetime
import json
import random
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Flow, FlowError, InputError, OperatorError, col, lit
from holdfast import functions as F
from holdfast.engine.watermark import source_times
from holdfast.sinks import discard
from holdfast.sources import generator, rows
from tests.support.harness import Input, Shape, examples, run

LARGEST = 2**63 - 1


def given_(flow: Flow, batch: pa.RecordBatch, **options: Any) -> Any:
    return flow.source("s", rows(batch), **options)


def results(flow: Flow, batch: pa.RecordBatch, shape: Shape | None = None) -> list[dict]:
    out = run(flow, Input.of(s=batch), shape).sinks["out"]
    return out.select([n for n in out.schema.names if not n.startswith("__")]).to_pylist()


THREE = pa.record_batch({"k": [1, 1, 2], "x": [1, None, 3], "name": ["a", None, "c"]})


# --- constants ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("expr", "values"),
    [
        (lit("abc").cast(pa.large_string()), ["abc"] * 3),
        (lit("12").cast(pa.int8()), [12] * 3),
        (lit(0).cast(pa.int32()), [0] * 3),
        (lit(None).cast(pa.string()), [None] * 3),
        (lit(1.5), [1.5] * 3),
        (lit([1, None]), [[1, None]] * 3),
        (lit(pa.scalar(7, pa.int16())), [7] * 3),
        (lit(0).cast(pa.int32()) + col("x"), [1, None, 3]),
        (lit(None).cast(pa.int64()) + col("k"), [None] * 3),
        (lit(None).cast(pa.int64()) + 1, [None] * 3),
        (col("name") == lit("c").cast(pa.string()), [False, None, True]),
        (lit("abc").is_null(), [False] * 3),
        (lit(5).is_null(), [False] * 3),
        (lit(None).is_null(), [True] * 3),
        (lit(3).fill_null(1), [3] * 3),
        (lit(None).cast(pa.int64()).fill_null(4), [4] * 3),
        (~lit(True), [False] * 3),
        (lit(7) % lit(4).cast(pa.int64()), [3] * 3),
        (
            lit(datetime.date(2020, 1, 1)).cast(pa.timestamp("s")),
            [datetime.datetime(2020, 1, 1)] * 3,
        ),
    ],
    ids=str,
)
def test_a_constant_is_one_value_for_all_rows(expr: Any, values: list) -> None:
    flow = Flow("f")
    made = given_(flow, THREE).select(y=expr)
    made.sink("out", discard())
    assert [r["y"] for r in results(flow, THREE)] == values


def test_a_cast_constant_has_the_type_it_was_cast_to() -> None:
    stream = given_(Flow("f"), THREE).select(
        a=lit(0).cast(pa.int8()), b=lit(None).cast(pa.date32()), c=lit(0).cast(pa.int8()) + 1
    )
    assert stream.schema.types == [pa.int8(), pa.date32(), pa.int8()]


@pytest.mark.parametrize(
    "build",
    [
        lambda s: s.select("k", y="name"),
        lambda s: s.with_columns(y="name"),
        lambda s: s.key_by("k").spans(start=col("x") == 1, end=col("x") == 3, emit={"y": "name"}),
    ],
    ids=["select", "with_columns", "spans"],
)
def test_text_as_a_column_is_refused(build: Any) -> None:
    with pytest.raises(FlowError) as caught:
        build(given_(Flow("f"), THREE))
    for words in ("y='name'", "col('name')", "lit('name')"):
        assert words in str(caught.value)


def test_a_constant_is_not_a_column_of_values() -> None:
    with pytest.raises(FlowError, match="one value for all rows"):
        lit(np.array([1, 2, 3]))


# --- nulls ----------------------------------------------------------------------------------------


def test_lists_with_nulls_stay_what_they_are_in_state() -> None:
    kind = pa.list_(pa.float64())
    values = [[1.0, None], [], None, [None], [2.0]]
    batch = pa.record_batch({"k": [1] * 5, "x": pa.array(values, kind)})
    flow = Flow("f")
    given_(flow, batch).key_by("k").agg(f=F.first("x"), l=F.last("x")).sink("out", discard())
    shape = Shape(cuts=[1, 2, 3], partitions=3, sites=2, move_at=1)
    assert results(flow, batch, shape) == [{"k": 1, "f": [1.0, None], "l": v} for v in values]


def test_null_keys_join_nothing() -> None:
    batch = pa.record_batch({"k": [None, 1, None], "j": [2, 2, None], "ts": [1, 2, 3]})
    flow = Flow("f")
    sides = [flow.source(n, rows(batch), event_time="ts") for n in "ab"]
    sides[0].key_by("k", "j").join(sides[1].key_by("k", "j"), within=9).sink("out", discard())
    out = run(flow, Input.of(a=batch, b=batch)).sinks["out"]
    assert out.select(["k", "j", "ts", "ts_right"]).to_pylist() == [
        {"k": 1, "j": 2, "ts": 2, "ts_right": 2}
    ]


@pytest.mark.parametrize("cuts", [[], [1, 2, 3]])
def test_first_and_last_take_nulls_in_all_operators(cuts: list[int]) -> None:
    """As Spark's do, by default."""
    batch = pa.record_batch(
        {"k": [1] * 4, "ts": [1, 2, 3, 4], "x": pa.array([None, 5, 6, None], pa.int64())}
    )
    aggs = {"f": F.first("x"), "l": F.last("x")}
    for build, wanted in (
        (lambda k: k.agg(**aggs), [(None, None), (None, 5), (None, 6), (None, None)]),
        (
            lambda k: k.window(rows=9).agg(**aggs),
            [(None, None), (None, 5), (None, 6), (None, None)],
        ),
        (lambda k: k.window(rows=2).agg(**aggs), [(None, None), (None, 5), (5, 6), (6, None)]),
        (lambda k: k.window(time=9).agg(**aggs), [(None, None)]),
        (
            lambda k: k.spans(
                start=col("ts") == 1, end=col("ts") == 4, emit={"f": F.at_start("x"), "l": col("x")}
            ),
            [(None, None)],
        ),
    ):
        flow = Flow("f")
        build(given_(flow, batch, event_time="ts").key_by("k")).sink("out", discard())
        assert [(r["f"], r["l"]) for r in results(flow, batch, Shape(cuts=cuts))] == wanted


# --- sums -----------------------------------------------------------------------------------------

SUMS = {
    "running": lambda k: k.agg(n=F.sum("x")),
    "row window": lambda k: k.window(rows=2).agg(n=F.sum("x")),
    "time window": lambda k: k.window(time=100).agg(n=F.sum("x")),
}


@pytest.mark.parametrize("cuts", [[], [1, 2, 3]])
@pytest.mark.parametrize("name", SUMS)
def test_a_sum_that_leaves_int64_is_refused_and_named(name: str, cuts: list[int]) -> None:
    x = [5, LARGEST, 7, 1]
    batch = pa.record_batch({"k": ["a", "b", "a", "b"], "ts": [1, 2, 3, 4], "x": x})
    flow = Flow("f")
    SUMS[name](given_(flow, batch, event_time="ts").key_by("k")).sink("out", discard())
    with pytest.raises(OperatorError) as caught:
        run(flow, Input.of(s=batch), Shape(cuts=cuts))
    for words in (f"{name}", "by (k)", "sum(col('x'))", "k=b", "int64", "sequence number 3"):
        assert words in str(caught.value).replace("running aggregate", "running")


@pytest.mark.parametrize("name", SUMS)
def test_an_unsigned_number_that_int64_has_no_room_for_is_refused(name: str) -> None:
    x = pa.array([1, 2**63, 3], pa.uint64())
    batch = pa.record_batch({"k": [1, 2, 3], "ts": [1, 2, 3], "x": x})
    flow = Flow("f")
    SUMS[name](given_(flow, batch, event_time="ts").key_by("k")).sink("out", discard())
    with pytest.raises(OperatorError, match=r"does not fit into int64[\s\S]*sequence number 1"):
        run(flow, Input.of(s=batch))


def test_the_largest_unsigned_number_is_one_like_others() -> None:
    x = pa.array([2**63, 2**64 - 1], pa.uint64())
    batch = pa.record_batch({"k": [1, 1], "x": x})
    flow = Flow("f")
    given_(flow, batch).key_by("k").window(rows=2).agg(m=F.max("x")).sink("out", discard())
    assert [r["m"] for r in results(flow, batch)] == [2**63, 2**64 - 1]


def test_a_window_of_rows_minds_its_sum_and_not_the_way_there() -> None:
    x = [-5, LARGEST, 3, -10, -(2**63) + 3, -5, 7]
    batch = pa.record_batch({"k": [1] * 7, "x": x})
    flow = Flow("f")
    given_(flow, batch).key_by("k").window(rows=3).agg(n=F.sum("x")).sink("out", discard())
    wanted = [sum(x[max(0, i - 2) : i + 1]) for i in range(7)]
    with pytest.raises(OperatorError, match="sequence number 4"):
        run(flow, Input.of(s=batch))
    batch = batch.slice(0, 4)
    assert [r["n"] for r in results(flow, batch, Shape(cuts=[2]))] == wanted[:4]


@examples(120)
@given(
    st.sampled_from(sorted(SUMS)),
    st.lists(st.tuples(st.integers(0, 1), st.integers(-(2**63), LARGEST)), max_size=40),
    st.lists(st.integers(0, 40), max_size=4),
    st.integers(0, 2**32),
)
def test_sums_are_right_or_refused(
    name: str, given_rows: list[tuple[int, int]], cuts: list[int], seed: int
) -> None:
    """Rows that would make a sum wrong are put aside, exactly those, and leave no trace, however
    the rows are cut into epochs; all other sums are those of Python's numbers."""
    rng = random.Random(seed)
    keys = [k for k, _ in given_rows]
    x = [rng.choice([n, n >> 2, n >> 40]) for _, n in given_rows]
    ts = list(range(len(x)))
    columns = {"k": pa.array(keys, pa.int64()), "x": pa.array(x, pa.int64())}
    batch = pa.record_batch({**columns, "ts": pa.array(ts, pa.int64())})
    flow = Flow("f", on_error="dead-letter")
    SUMS[name](given_(flow, batch, event_time="ts").key_by("k")).sink("out", discard())
    flow.dead_letters().sink("dead", discard())
    shape = Shape(cuts=[min(c, len(x)) for c in cuts], partitions=3, sites=2, move_at=0, seed=seed)
    found = run(flow, Input.of(s=batch), shape)
    bad, wanted = _sums(name, keys, x)
    assert found.sinks["dead"].column("__o0").to_pylist() == bad
    got = [(r["k"], r["n"]) for r in found.sinks["out"].to_pylist()]
    assert (sorted(got) if name == "time window" else got) == wanted


def _sums(name: str, keys: list[int], x: list[int]) -> tuple[list[int], list[tuple[int, int]]]:
    history: dict[int, list[int]] = {}
    bad, out = [], []
    for i, (key, value) in enumerate(zip(keys, x, strict=True)):
        so_far = [*history.get(key, []), value]
        total = sum(so_far[-2:] if name == "row window" else so_far)
        if not -(2**63) <= total <= LARGEST:
            bad.append(i)
            continue
        history[key] = so_far
        out.append((key, total))
    return bad, sorted(
        {k: sum(v) for k, v in history.items()}.items()
    ) if name == "time window" else out


# --- types ----------------------------------------------------------------------------------------


def test_encoded_columns_are_decoded_where_they_enter() -> None:
    names = pa.array(["a", None, "a"])
    batch = pa.record_batch(
        {
            "d": names.dictionary_encode(),
            "v": names.cast(pa.string_view()),
            "l": pa.array([["a"], None, []], pa.list_(pa.dictionary(pa.int8(), pa.string()))),
        }
    )
    flow = Flow("f")
    stream = given_(flow, batch)
    assert stream.schema.types == [pa.string(), pa.string(), pa.list_(pa.string())]
    mapped = stream.map(lambda b: batch.slice(0, b.num_rows), batch.schema)
    assert mapped.schema == stream.schema
    mapped.key_by("d").agg(v=F.last("v"), l=F.last("l")).sink("out", discard())
    assert run(flow, Input.of(s=batch)).sinks["out"].num_rows == 3


@pytest.mark.parametrize(
    "kind",
    [
        pa.run_end_encoded(pa.int32(), pa.string()),
        pa.dense_union([pa.field("a", pa.int64())]),
        pa.uuid(),
        pa.list_(pa.null()),
        pa.struct([("a", pa.list_(pa.uuid()))]),
    ],
    ids=str,
)
def test_a_type_without_plain_values_is_refused_by_name(kind: pa.DataType) -> None:
    schema = pa.schema([("k", pa.int64()), ("x", kind)])
    with pytest.raises(FlowError, match=r"'x' has the unsupported type"):
        Flow("f").source("s", generator(lambda *_: None, schema))  # type: ignore[arg-type]
    with pytest.raises(FlowError, match=r"'x' has the unsupported type"):
        given_(Flow("f"), THREE).map(lambda b: b, schema)


def test_an_expression_may_not_encode() -> None:
    with pytest.raises(FlowError, match=r"unsupported type dictionary[\s\S]*use string"):
        given_(Flow("f"), THREE).select(y=col("name").cast(pa.dictionary(pa.int8(), pa.string())))


# --- sources --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("total", "splits"), [(100, 3), (2, 5), (0, 2), (9, 3)])
def test_a_generator_gives_as_many_rows_as_it_was_asked_for(total: int, splits: int) -> None:
    def make(split: int, offset: int, n: int) -> pa.RecordBatch:
        return pa.record_batch({"i": np.arange(offset, offset + n) * splits + split})

    source = generator(make, make(0, 0, 0).schema, rows=total, splits=splits)
    found = []
    for split in range(splits):
        reader = source.open(split)
        while (batch := reader.read(7)) is not None:
            found += batch.column("i").to_pylist()
        assert source.open(split, 1000).read(7) is None
    assert sorted(found) == list(range(total))


EDGES = [LARGEST, -(2**63), LARGEST - 1, -(2**63) + 1, LARGEST - 2**58, -(2**63) + 2**58]


@pytest.mark.parametrize("time", EDGES)
@pytest.mark.parametrize("kind", [pa.int64(), pa.timestamp("ns")], ids=str)
def test_an_event_time_at_the_ends_of_int64_is_refused_by_name(
    time: int, kind: pa.DataType
) -> None:
    times = pa.array([1, time, 2], pa.int64()).view(kind)
    batch = pa.record_batch({"ts": times, "name": ["a", "b", "c"]})
    with pytest.raises(InputError) as caught:
        source_times(batch, "ts", "calls")
    for words in ("'calls'", "'ts'", str(time), "'name': 'b'"):
        assert words in str(caught.value)


def test_an_event_time_that_is_made_later_is_refused_with_its_row() -> None:
    batch = pa.record_batch({"k": [1, 2], "ts": [1, 2], "at": [5, LARGEST]})
    for build in (lambda k: k.window(time=10, on="at").agg(n=F.count()),):
        flow = Flow("f")
        build(given_(flow, batch, event_time="ts").key_by("k")).sink("out", discard())
        with pytest.raises(OperatorError) as caught:
            run(flow, Input.of(s=batch))
        assert json.loads(caught.value.row.split(": ", 1)[1])["at"] == LARGEST
        assert "too close to the ends of int64" in caught.value.cause


@pytest.mark.parametrize(
    "build",
    [
        lambda k: k.window(time=2**58).agg(n=F.count()),
        lambda k: k.window(time=1, lateness=2**58).agg(n=F.count()),
        lambda k: k.join(k, within=2**57),
        lambda k: k.spans(start=col("k") == 1, end=col("k") == 2, time="ts", timeout=2**60),
    ],
    ids=["window", "lateness", "join", "spans"],
)
def test_durations_that_lead_out_of_int64_are_refused(build: Any) -> None:
    batch = pa.record_batch({"k": [1], "ts": [1]})
    with pytest.raises(FlowError, match="units of event time"):
        build(given_(Flow("f"), batch, event_time="ts").key_by("k"))


WIDEST = 2**63 - 1 - 2**59
REACH = 2**57


@examples(60)
@given(
    st.lists(
        st.tuples(
            st.sampled_from([-WIDEST, WIDEST, 0, -WIDEST + REACH, WIDEST - REACH]),
            st.integers(0, 9),
        ),
        max_size=12,
    ),
    st.sampled_from([(10, 5, 3), (REACH - 9, REACH // 3, 9), (7, 7, REACH - 7)]),
    st.lists(st.integers(0, 12), max_size=3),
)
def test_times_as_far_apart_as_can_be_lose_no_row(
    at: list[tuple[int, int]], sizes: tuple[int, int, int], cuts: list[int]
) -> None:
    """Every row is in a window, or late; each span ends or times out; joined are just those
    that are near."""
    times = sorted(t + (d if t <= 0 else -d) for t, d in at)
    n = len(times)
    batch = pa.record_batch({"k": pa.array([0] * n, pa.int64()), "ts": pa.array(times, pa.int64())})
    size, every, lateness = sizes
    flow = Flow("f")
    sides = [flow.source(s, rows(batch), event_time="ts") for s in "ab"]
    keyed = sides[0].key_by("k")
    windows = keyed.window(time=size, lateness=lateness).agg(n=F.count())
    windows.sink("windows", discard())
    windows.late.sink("late", discard())
    keyed.window(time=size, every=every, lateness=lateness).agg(n=F.count()).sink("slid", discard())
    opened = sides[0].with_columns(me=col("ts")).key_by("me")
    spans = opened.spans(
        start=lit(True) & (col("k") == 0), end=col("k") == 1, time="ts", timeout=size
    )
    spans.sink("spans", discard())
    spans.expired.sink("expired", discard())
    keyed.join(sides[1].key_by("k"), within=max(1, size // 3)).sink("pairs", discard())
    shape = Shape(cuts=[min(c, 2 * n) for c in cuts], partitions=3, sites=2)
    found = run(flow, Input.of(a=batch, b=batch), shape)
    assert found.sinks["late"].num_rows == 0
    assert sum(found.sinks["windows"].column("n").to_pylist()) == n
    assert sum(found.sinks["slid"].column("n").to_pylist()) >= n
    assert found.sinks["expired"].num_rows == len(set(times))
    near = max(1, size // 3)
    assert found.sinks["pairs"].num_rows == sum(abs(a - b) <= near for a in times for b in times)
