"""Values of every type: they come out of state, of moves between sites and off the wire as they
went in, to the bit; and keys of every type are one where their values are."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.streams import KeyedStream
from holdfast.connectors.sinks import Authority, discard
from holdfast.connectors.sources import rows
from holdfast.connectors.table import LatestTableWriter
from holdfast.core.exchange import Kept
from holdfast.core.ids import Epoch
from holdfast.core.layout import PartitionGroup
from holdfast.core.messages import BundleKey
from holdfast.engine.batches import UNMOVED, row_digests, with_order
from holdfast.engine.expressions import col
from holdfast.engine.operators.custom import KeyedFunction
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field
from holdfast.engine.types import plain_type
from holdfast.net.bundles import Router, check, decode, encode
from holdfast.plan.planner import Exchange
from holdfast.site.spill import Spill
from tests.support.arrays import ENCODED, KEYS, LEAVES, array_of, exact, kinds
from tests.support.harness import Input, Shape, examples, run, through_ipc
from tests.support.operator_cases import shapes
from tests.support.state_model import words_for

# --- state ----------------------------------------------------------------------------------------


class Model:
    """Key -> its value and its ring of two."""

    def __init__(self, field: Field) -> None:
        fresh = exact(field.loaded(field.allocate(1), None))[0] if field.fixed else None
        self.fresh, self.rows = (fresh, fresh, fresh), dict[int, tuple]()

    def put(self, keys: list[int], x: list, ring: list, places: list[int]) -> None:
        for i, key in enumerate(keys):
            held = [x[i], *self.rows.get(key, self.fresh)[1:]]
            held[1 + places[i]] = ring[i]
            self.rows[key] = tuple(held)


def held(table: StateTable) -> dict[int, tuple]:
    slots = table.live()
    columns = [table.get("x", slots)]
    columns += [table.get("ring", slots, np.full(slots.size, at)) for at in range(2)]
    keys = table.extract().column("__low").to_pylist()
    return dict(zip(keys, zip(*map(exact, columns), strict=True), strict=True))


ACTIONS = ["put", "put", "remove", "move", "freeze", "compact"]


@examples(60)
@given(kinds(), st.lists(st.sampled_from(ACTIONS), max_size=10), st.integers(0, 2**32))
def test_a_table_gives_back_what_it_was_given(
    kind: pa.DataType, actions: list[str], seed: int
) -> None:
    """Overwritten, removed, extracted, installed, frozen while it changes, and compacted."""
    rng = random.Random(seed)
    fields = {"x": Field(kind), "ring": Field(kind, width=2)}
    table, model = StateTable(fields, 4), Model(fields["x"])
    frozen: list[tuple[Any, dict[int, tuple]]] = []
    for epoch, action in enumerate(["put", *actions, "put"]):
        keys = rng.sample(range(30), rng.randrange(1, 12))
        match action:
            case "put":
                slots = table.slots(words_for(keys))  # type: ignore[arg-type]
                table.touch(slots, epoch)
                x, ring = (array_of(kind, rng, len(keys) + 1).slice(1) for _ in range(2))
                places = [rng.randrange(2) for _ in keys]
                table.put("x", slots, x)
                table.put("ring", slots, ring, np.array(places))
                model.put(keys, exact(x), exact(ring), places)
            case "remove":
                known = [k for k in keys if k in model.rows]
                table.remove(table.slots(words_for(known)))  # type: ignore[arg-type]
                model.rows = {k: v for k, v in model.rows.items() if k not in known}
            case "move":
                moved = StateTable(fields, 4)
                for part in range(4):
                    moved.install(through_ipc(table.extract([part])))
                table = moved
            case "freeze":
                frozen.append((table.snapshot(), dict(model.rows)))
            case "compact":
                for name in table._heaps:
                    table._compact(name)
    assert held(table) == model.rows
    for snapshot, wanted in frozen:
        replica = StateTable(fields, 4)
        while (part := snapshot.next(rng.choice([1, 7]))) is not None:
            replica.install(through_ipc(part))
        assert held(replica) == wanted


@examples(30)
@given(kinds(), st.integers(0, 2**32))
def test_a_view_has_the_rows_it_was_given(kind: pa.DataType, seed: int) -> None:
    rng = random.Random(seed)
    keys = pa.array([rng.randrange(5) for _ in range(20)])
    batch = pa.record_batch({"k": keys, "x": array_of(kind, rng, 20)})
    view = LatestTableWriter(Authority("f", "s"), batch.schema, ["k"])
    for epoch in range(4):
        view.write(epoch, batch.slice(5 * epoch, 5))
    _, (found,) = view.answer({"do": "get", "keys": "[[0], [1], [2], [3], [4]]"}, [])
    wanted = dict(zip(keys.to_pylist(), exact(batch.column("x")), strict=True))
    assert dict(zip(found.column("k").to_pylist(), exact(found.column("x")), strict=True)) == wanted


# --- flows ----------------------------------------------------------------------------------------


class Before(KeyedFunction):
    """For each row, what its key's row before it has had."""

    def __init__(self, kind: pa.DataType) -> None:
        self.state = {"x": (kind, None if not Field(kind).fixed else 0)}  # type: ignore[misc]
        self.output = pa.schema([("i", pa.int64()), ("x", kind)])  # type: ignore[misc]

    def process(self, rows: Any, state: StateTable) -> tuple[np.ndarray, dict[str, Any]]:
        groups = rows.groups()
        values = rows.batch.column("x").take(pa.array(groups.rows))
        kept = state.get("x", groups.slots)
        where = np.maximum(np.arange(len(rows)) - 1, 0)
        where[groups.starts] = len(rows) + np.arange(groups.starts.size)
        before = pa.concat_arrays([values, kept]).take(pa.array(where))
        state.put("x", groups.slots, values.take(pa.array(groups.lasts)))
        back = pa.array(np.argsort(groups.rows))
        return np.arange(len(rows)), {"i": rows["i"], "x": before.take(back)}


def _timed(keyed: KeyedStream, kind: pa.DataType) -> Any:
    return keyed.spans(
        start=col("i") % 3 == 0, end=col("i") % 3 == 1, emit={"i": col("i"), "x": F.at_start("x")}
    )


Keyed = Callable[[KeyedStream, pa.DataType], Any]
Wanted = Callable[[list[int], int], int | None]
"""Of the rows of a key, and the place among them of the one that gives a result: whose value."""

OPERATORS: dict[str, tuple[Keyed, Wanted]] = {
    "first": (lambda keyed, _: keyed.agg(i=F.last("i"), x=F.first("x")), lambda mine, at: 0),
    "last": (lambda keyed, _: keyed.agg(i=F.last("i"), x=F.last("x")), lambda mine, at: at),
    "first of some": (
        lambda keyed, _: keyed.window(rows=3).agg(i=F.last("i"), x=F.first("x")),
        lambda mine, at: max(at - 2, 0),
    ),
    "last of some": (
        lambda keyed, _: keyed.window(rows=2, every=2).agg(i=F.last("i"), x=F.last("x")),
        lambda mine, at: at if at % 2 else None,
    ),
    "first of a window": (
        lambda keyed, _: keyed.window(time=1000).agg(i=F.last("i"), x=F.first("x")),
        lambda mine, at: 0 if at == len(mine) - 1 else None,
    ),
    "last of a window": (
        lambda keyed, _: keyed.window(time=1000).agg(i=F.last("i"), x=F.last("x")),
        lambda mine, at: at if at == len(mine) - 1 else None,
    ),
    "start of a span": (
        _timed,
        lambda mine, at: at - 1 if at and mine[at] % 3 == 1 and mine[at - 1] % 3 == 0 else None,
    ),
    "state of one's own": (
        lambda keyed, kind: keyed.apply(Before(kind)),
        lambda mine, at: at - 1 if at else -1,
    ),
}


@pytest.mark.parametrize("name", OPERATORS)
@examples(12)
@given(kinds(encoded=True), st.integers(1, 40), st.integers(0, 2**32), st.data())
def test_operators_keep_values_of_any_type(
    name: str, kind: pa.DataType, n: int, seed: int, data: st.DataObject
) -> None:
    """Whatever goes through an operator, its state and a move of it comes out the same."""
    rng = random.Random(seed)
    plain = plain_type(kind)
    assert plain is not None
    keys = [rng.randrange(3) for _ in range(n)]
    index = pa.array(range(n), pa.int64())
    x = array_of(kind, rng, n)
    batch = pa.record_batch({"k": pa.array(keys, pa.int64()), "i": index, "ts": index, "x": x})
    build, whose = OPERATORS[name]
    flow = Flow("f")
    source = flow.source("s", rows(batch), event_time="ts")
    if name == "start of a span":  # which is over at a row that is neither start nor end
        source = source.filter(col("i") % 3 != 2)
    build(source.key_by("k"), plain).sink("out", discard())
    found = run(flow, Input.of(s=batch), data.draw(shapes(n))).sinks["out"]
    assert found.schema.field("x").type == plain
    cells = exact(x)
    field = Field(plain)
    cells.append(exact(field.loaded(field.allocate(1), None))[0] if field.fixed else None)
    wanted = {}
    for key in range(3):
        mine = [i for i in range(n) if keys[i] == key]
        if name == "start of a span":
            mine = [i for i in mine if i % 3 != 2]
        for at, i in enumerate(mine):
            origin = whose(mine, at)
            if origin is not None:
                wanted[i] = cells[-1 if origin < 0 else mine[origin]]
    assert dict(zip(found.column("i").to_pylist(), exact(found.column("x")), strict=True)) == wanted


@examples(30)
@given(kinds(encoded=True), st.integers(0, 2**32), st.data())
def test_joins_keep_values_of_any_type(kind: pa.DataType, seed: int, data: st.DataObject) -> None:
    rng = random.Random(seed)
    n = 12
    index = pa.array(range(n), pa.int64())
    batches = [
        pa.record_batch({"k": index, "ts": index, "x": array_of(kind, rng, n)}) for _ in range(2)
    ]
    given_ = Input.of(a=batches[0], b=batches[1])
    flow = Flow("f")
    a, b = (flow.source(s, rows(r), event_time="ts") for s, r in given_.batches.items())
    a.key_by("k").join(b.key_by("k"), within=3).sink("out", discard())
    found = run(flow, given_, data.draw(shapes(2 * n))).sinks["out"]
    assert found.num_rows == n
    for name, batch in zip(("x", "x_right"), batches, strict=True):
        cells = exact(batch.column("x"))
        assert exact(found.column(name)) == [cells[k] for k in found.column("k").to_pylist()]


# --- keys -----------------------------------------------------------------------------------------


def identity(column: pa.Array) -> list:
    """What tells keys apart: zeros are one key."""
    if not pa.types.is_floating(column.type):
        return exact(column)
    minus_zero = ("bits", -(2 ** (column.type.bit_width - 1)))
    return [("bits", 0) if cell == minus_zero else cell for cell in exact(column)]


@pytest.mark.parametrize("kind", KEYS, ids=str)
@examples(8)
@given(st.integers(0, 40), st.integers(0, 2**32), st.data())
def test_keys_of_any_type(kind: pa.DataType, n: int, seed: int, data: st.DataObject) -> None:
    """Rows are counted by key; null is one of them. In a join it is equal to nothing."""
    rng = random.Random(seed)
    index = pa.array(range(n), pa.int64())
    batch = pa.record_batch({"k": array_of(kind, rng, n), "i": index, "ts": index})
    given_ = Input.of(a=batch, b=batch)
    flow = Flow("f")
    a, b = (flow.source(s, rows(r), event_time="ts") for s, r in given_.batches.items())
    a.key_by("k").agg(i=F.last("i"), n=F.count()).sink("counts", discard())
    closed = a.key_by("k").window(time=1000).agg(i=F.first("i"), n=F.count())
    closed.sink("windows", discard())
    joined = a.select("k", "i", "ts").key_by("k").join(b.key_by("k"), within=5)
    joined.select("i", "i_right").sink("pairs", discard())
    found = run(flow, given_, data.draw(shapes(2 * n)))
    keys = identity(batch.column("k"))
    counts = [(i, keys[: i + 1].count(keys[i])) for i in range(n)]
    assert _columns(found.sinks["counts"], "i", "n") == counts
    firsts = [(i, keys.count(keys[i])) for i in range(n) if keys[i] not in keys[:i]]
    assert sorted(_columns(found.sinks["windows"], "i", "n")) == firsts
    pairs = [
        (i, j)
        for i in range(n)
        for j in range(n)
        if keys[i] is not None and keys[i] == keys[j] and abs(i - j) <= 5
    ]
    assert sorted(_columns(found.sinks["pairs"], "i", "i_right")) == pairs


def _columns(batch: pa.RecordBatch, *names: str) -> list[tuple]:
    return list(zip(*(batch.column(n).to_pylist() for n in names), strict=True))


# --- between sites --------------------------------------------------------------------------------


@examples(80)
@given(kinds(), st.sampled_from([k for k in KEYS if k not in ENCODED]), st.integers(0, 2**32))
def test_a_frame_crosses_between_sites(kind: pa.DataType, key: pa.DataType, seed: int) -> None:
    """Routed by key, with digests, as bytes and back; and what is kept for others, off a disk."""
    rng = random.Random(seed)
    n = rng.randrange(1, 30)
    columns = [array_of(key, rng, n), array_of(kind, rng, n), pa.array(range(n), pa.int64())]
    schema = with_order(pa.schema([("k", key), ("x", kind)]), 1)
    batch = pa.RecordBatch.from_arrays(columns, schema=schema)
    exchange = Exchange(0, 0, "out", 1, 0, ["k"], schema)
    router = Router(exchange, [PartitionGroup(0, 2, ()), PartitionGroup(2, 5, ())], digests=True)
    seen = {}
    for number, frames in router.split(batch, UNMOVED).items():
        message, body = encode(BundleKey(0, 3, 0, int(number), 0), frames)
        got = decode(message, memoryview(b"".join(bytes(part) for part in body)), schema)
        check([got], [got.batch], "here")
        kept = decode(message, memoryview(b"".join(bytes(part) for part in body)), schema)
        Spill(None, 0).make_room([Kept(Epoch(0), True, kept)])
        for part in (got, kept):
            places = part.batch.column("__o0").to_pylist()
            cells = zip(exact(part.batch.column("k")), exact(part.batch.column("x")), strict=True)
            seen |= dict(zip(places, cells, strict=True))
            assert len(places) == frames.batch.num_rows
    wanted = zip(exact(batch.column("k")), exact(batch.column("x")), strict=True)
    assert seen == dict(enumerate(wanted))


@examples(80)
@given(kinds(), st.integers(0, 2**32))
def test_a_digest_tells_values_apart(kind: pa.DataType, seed: int) -> None:
    """Rows have one digest just if they are the same; whatever rows are beside them."""
    rng = random.Random(seed)
    column = array_of(kind, rng, 20)
    digests = row_digests(pa.record_batch({"x": column}))
    alone = [row_digests(pa.record_batch({"x": column.slice(i, 1)}))[0] for i in range(20)]
    assert digests.tolist() == [int(d) for d in alone]
    cells = [repr(c) for c in exact(column)]
    pairs = set(zip(cells, digests.tolist(), strict=True))
    assert len(pairs) == len(set(cells)), "the same value has one digest"


def test_the_generator_makes_every_type_that_flows_carry() -> None:
    """Otherwise a type could be added, and never tried."""
    rng = random.Random(1)
    for kind in [*LEAVES, *ENCODED]:
        assert array_of(kind, rng, 50).type == kind and plain_type(kind) is not None
    found = run(_all_types(), Input.of(s=ALL), Shape(cuts=[5], partitions=4, sites=2, move_at=0))
    assert found.sinks["out"].num_rows == ALL.num_rows


ALL = pa.record_batch(
    {
        "k": pa.array([0, 1] * 5),
        **{f"c{i}": array_of(k, random.Random(i), 10) for i, k in enumerate([*LEAVES, *ENCODED])},
    }
)


def _all_types() -> Flow:
    flow = Flow("f")
    aggs = {f"f{n}": F.first(n) for n in ALL.schema.names[1:]}
    flow.source("s", rows(ALL)).key_by("k").agg(**aggs).sink("out", discard())
    return flow
