"""Snapshots: whatever happens to a table or an operator, one gives out what was there when it
was taken, each key once; and an operator made from it goes on like the one it was taken of."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Collection
from itertools import pairwise
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.streams import KeyedStream, Stream
from holdfast.connectors.sinks import discard
from holdfast.connectors.sources import rows
from holdfast.engine.batches import Track, with_order
from holdfast.engine.expressions import col
from holdfast.engine.keys import partition_of
from holdfast.engine.operators.base import KeyedOperator
from holdfast.engine.operators.custom import KeyedFunction
from holdfast.engine.snapshot import Snapshot
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field
from holdfast.plan.planner import Plan, plan
from tests.support.harness import Input, examples, naive_marks, rows_of, through_ipc
from tests.support.operator_cases import AGGS, NULLABLE, Changes, World, _values, built, worlds
from tests.support.state_model import PARTITIONS, Model, key_lists, words_for

# --- tables -------------------------------------------------------------------------------------


class Frozen:
    """A snapshot beside a replica of the rows it has to give out."""

    def __init__(self, model: Model, partitions: Collection[int] | None) -> None:
        self.snapshot: Snapshot = model.table.snapshot(partitions)
        self.rows = {
            key: row
            for key, row in model.rows.items()
            if partitions is None or part_of(key) in partitions
        }
        self.parts: list[pa.RecordBatch] = []

    def pull(self, rows_max: int) -> bool:
        part = self.snapshot.next(rows_max)
        if part is None:
            assert self.snapshot.rows_left == self.snapshot.nbytes_left == 0
            return False
        assert 0 < part.num_rows <= rows_max
        self.parts.append(through_ipc(part))
        assert self.snapshot.rows_left == len(self.rows) - sum(p.num_rows for p in self.parts)
        return True

    def check(self, rows_max: int) -> None:
        while self.pull(rows_max):
            pass
        assert sum(p.num_rows for p in self.parts) == len(self.rows)
        replica = Model()
        replica.rows = self.rows
        for part in self.parts:
            replica.table.install(part)
        replica.check()


def part_of(key: int | None) -> int:
    return int(partition_of(words_for([key]), PARTITIONS)[0])


class Watched(Model):
    """A table with snapshots of it under way."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen: list[Frozen] = []

    def write(self, keys: list[int | None], rng: random.Random, epoch: int) -> None:
        self.table.touch(self.slots(keys), epoch)
        super().write(keys, rng, epoch)

    def act(self, action: str, keys: list[int | None], rng: random.Random, epoch: int) -> None:
        match action:
            case "write":
                self.write(keys, rng, epoch)
            case "remove":
                self.remove(keys)
            case "crowd":  # enough keys to enlarge the table
                self.write([*range(100, 100 + rng.choice([450, 700]))], rng, epoch)
            case "desert":  # and to compact it
                self.remove([*range(100, 800)])
            case "install":
                other = Model()
                other.write(keys, rng, epoch)
                self.table.install(through_ipc(other.table.extract()))
                self.rows |= other.rows
            case "drop":
                gone = rng.sample(range(PARTITIONS), 2)
                self.table.drop(gone)
                self.rows = {k: r for k, r in self.rows.items() if part_of(k) not in gone}
            case "snapshot":
                some = set(rng.sample(range(PARTITIONS), 3)) if rng.random() < 0.3 else None
                self.frozen.append(Frozen(self, some))
            case "next":
                for frozen in self.frozen:
                    frozen.pull(rng.choice([1, 5, 300]))
            case "close" if self.frozen:
                snapshot = self.frozen.pop(rng.randrange(len(self.frozen))).snapshot
                snapshot.close()
                assert snapshot.next(9) is None


ACTIONS = ["write", "remove", "crowd", "desert", "install", "drop", "snapshot", "next", "close"]
OFTEN = ["write", "write", "remove", "snapshot", "next", "next"]


@examples(80)
@given(
    st.lists(st.tuples(st.sampled_from(ACTIONS + OFTEN), key_lists()), max_size=14),
    st.integers(0, 2**32),
    st.sampled_from([1, 3, 64, 1000]),
)
def test_a_snapshot_is_a_frozen_dict(
    actions: list[tuple[str, list]], seed: int, rows_max: int
) -> None:
    rng = random.Random(seed)
    model = Watched()
    model.write([None, *range(-9, 9)], rng, 0)
    for epoch, (action, keys) in enumerate([("snapshot", []), *actions]):
        model.act(action, keys, rng, epoch)
    model.check()
    for frozen in model.frozen:
        frozen.check(rows_max)
    assert model.table._snapshots == []


def test_a_snapshot_knows_when_its_chunks_changed() -> None:
    table = StateTable({"n": Field(pa.int64())}, 4)
    slots = table.slots(words_for([*range(100)]))
    table.touch(slots, 3)
    snapshot = table.snapshot()
    table.touch(slots[:50], 8)
    part = snapshot.next(1000)
    assert part is not None
    assert set(part.column("__changed").to_pylist()) == {3}


def test_little_that_is_saved_at_a_time_comes_in_large_parts() -> None:
    """Otherwise a snapshot read once an epoch would get no further than the epochs' few keys."""
    table = StateTable({"n": Field(pa.int64())}, 4)
    slots = table.slots(words_for([*range(1000)]))
    snapshot = table.snapshot()
    given_ = []
    for at in range(0, 1000, 10):
        table.touch(slots[at : at + 10], 1)
        if part := snapshot.next(100):
            given_.append(part.num_rows)
    assert given_ == [100] * 10


# --- operators ----------------------------------------------------------------------------------

Build = Callable[[Stream, KeyedStream], Stream]


def _spans(source: Stream, keyed: KeyedStream) -> Stream:
    kept = {f"{n}0": F.at_start(n) for n in ("v", "name", "u", "at", "reals", "deep")}
    return keyed.spans(start=col("cmd") == 1, end=col("cmd") > 1, emit=kept | {"v1": col("v")})


def _timed(source: Stream, keyed: KeyedStream) -> Stream:
    kept = {f"{n}0": F.at_start(n) for n in ("v", "name", "u", "at", "reals", "deep")}
    spans = keyed.spans(
        start=col("cmd") == 1, end=col("cmd") > 1, emit=kept | {"v1": col("v")}, timeout=60
    )
    return spans


def _join(within: int) -> Build:
    def build(source: Stream, keyed: KeyedStream) -> Stream:
        other = source.filter(col("n") % 2 == 0).select(*keyed.keys, "ts", "n")
        return keyed.join(other.key_by(*keyed.keys), within=within, lateness=4)

    return build


class Tally(StatefulProcessor):
    """Written for Spark: a number and a list for each key."""

    def init(self, handle: Any) -> None:
        self.total = handle.getValueState("total", "n long")
        self.tags = handle.getListState("tags", "tag string")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Any:
        for row in rows:
            (total,) = self.total.get() or (0,)
            self.total.update((total + row.i,))
            self.tags.put([*self.tags.get(), (row.tag,)][-3:])
            if row.i % 7 == 0:
                self.tags.clear()
                self.total.clear()
            yield Row(total=total, tags=str(list(self.tags.get())))


OPERATORS: dict[str, Build] = {
    "written for Spark": lambda _, keyed: keyed.transform_with_state(
        Tally(), "total long, tags string"
    ),
    "running": lambda _, keyed: keyed.agg(**built({**AGGS, **NULLABLE})),
    "row window": lambda _, keyed: keyed.window(rows=5, every=2).agg(**built({**AGGS, **NULLABLE})),
    "tumbling": lambda _, keyed: keyed.window(time=20).agg(**built({**AGGS, **NULLABLE})),
    "sliding": lambda _, keyed: keyed.window(time=60, every=20, lateness=9).agg(**built(AGGS)),
    "spans": _spans,
    "timed spans": _timed,
    "custom": lambda _, keyed: keyed.apply(Changes()),
    "join": _join(20),
    "wide join": _join(1000),  # runs with rows that are forgotten but still there
}


def planned(build: Build, batch: pa.RecordBatch, keys: list[str]) -> tuple[Plan, KeyedOperator]:
    flow = Flow("f")
    source = flow.source("s", rows(batch), event_time="ts")
    build(source, source.key_by(*keys)).sink("out", discard())
    p = plan(flow)
    (operator,) = [s.operator for s in p.stages if s.operator is not None]
    return p, operator


class Epochs:
    """The rows of a run as an operator gets them, cut into epochs."""

    def __init__(self, build: Build, batch: pa.RecordBatch, keys: list[str], cuts: Any) -> None:
        p, self.operator = planned(build, batch, keys)
        self.marks = naive_marks(p, Input.of(s=batch))
        arrays = [*batch.columns, pa.array(np.arange(batch.num_rows))]
        self.batch = pa.RecordBatch.from_arrays(arrays, schema=with_order(batch.schema, 1))
        self.bounds = [*pairwise([0, *sorted(cuts), batch.num_rows])]

    def __len__(self) -> int:
        return len(self.bounds)

    def feed(self, operator: KeyedOperator, epoch: int) -> dict[str, list[tuple]]:
        start, stop = self.bounds[epoch]
        mark = self.marks[start - 1] if start else Track.NEVER
        seqs = np.array([Track.START, *range(start, stop)], np.int64)
        marks = np.array([mark, *self.marks[start:stop]], np.int64)
        part = self.batch.slice(start, stop - start)
        inputs = [part.select(port.full_schema.names) for port in operator.inputs]
        if len(inputs) > 1:
            inputs[1] = inputs[1].filter(pa.array(part.column("n").to_numpy() % 2 == 0))
        with np.errstate(all="ignore"):
            out = operator.process(inputs, Track(seqs, marks), epoch)
        return {port: rows_of(batch) for port, batch in out.items()}


class Follower:
    """A new replica, which gets its state in parts while the original goes on."""

    def __init__(self, original: KeyedOperator, fresh: KeyedOperator, since: int) -> None:
        self.replica, self.since = fresh, since
        self.rows = original.state_rows()
        self.snapshot = original.snapshot()
        assert self.snapshot.rows_left == self.rows

    def pull(self, rows_max: int) -> bool:
        part = self.snapshot.next(rows_max)
        if part is None:
            assert self.snapshot.rows_left == self.snapshot.nbytes_left == 0
            return False
        name, batch = part
        assert 0 < batch.num_rows <= rows_max
        self.replica.install({name: through_ipc(batch)})
        return True


def state_of(
    operator: KeyedOperator, partitions: list[int] | None = None
) -> dict[str, list[tuple]]:
    """Its state but for the epochs of chunks, which depend on the slots that keys got."""
    tables = {}
    for name, batch in operator.extract(partitions).items():
        kept = [n for n in batch.schema.names if n != "__changed"]
        tables[name] = sorted(rows_of(batch.select(kept)), key=repr)
    return tables


def follow(epochs: Epochs, starts: Collection[int], pulls: int, rows_max: int) -> None:
    """Snapshots before the epochs `starts`, read `pulls` times after every epoch."""
    original = epochs.operator.open(7)
    wanted, followers = [], []
    for epoch in range(len(epochs)):
        if epoch in starts:
            followers.append(Follower(original, epochs.operator.open(7), epoch))
        wanted.append(epochs.feed(original, epoch))
        for follower in followers:
            for _ in range(pulls):
                follower.pull(rows_max)
    for follower in followers:
        while follower.pull(rows_max):
            pass
        replica = follower.replica
        replica.install_extras(json.loads(json.dumps(follower.snapshot.extras)))
        for epoch in range(follower.since, len(epochs)):
            assert epochs.feed(replica, epoch) == wanted[epoch]
        assert replica.late_rows == original.late_rows
        assert state_of(replica) == state_of(original)


@pytest.mark.parametrize("name", OPERATORS)
@examples(25)
@given(
    worlds(),
    st.lists(st.integers(0, 7), min_size=1, max_size=3),
    st.integers(0, 2),
    st.sampled_from([1, 3, 50]),
)
def test_a_replica_goes_on_like_the_original(
    name: str, world: World, starts: list[int], pulls: int, rows_max: int
) -> None:
    epochs = Epochs(OPERATORS[name], world.batch, world.keys, world.shape.cuts)
    follow(epochs, {s % len(epochs) for s in starts}, pulls, rows_max)


@pytest.mark.parametrize("name", OPERATORS)
def test_a_replica_of_much_state_goes_on_like_the_original(name: str) -> None:
    """Tables that grow, and are compacted, between the parts."""
    rng = random.Random(5)
    n = 3750
    keys = pa.array([rng.randrange(n // 2) for _ in range(n)], pa.int64())
    batch = pa.record_batch({"k0": keys, **_values(rng, n, wild=False)})
    epochs = Epochs(OPERATORS[name], batch, ["k0"], range(250, n, 250))
    follow(epochs, {1, 7, 11, 13}, 1, 60)


class Fussy(KeyedFunction):
    """A sum per key that refuses negative numbers, after it has spoilt the state."""

    state = {"total": (pa.int64(), 0)}  # noqa: RUF012
    output = pa.schema([("total", pa.int64())])

    def process(self, rows: Any, state: Any) -> tuple[np.ndarray, dict[str, Any]]:
        np.add.at(state["total"], rows.slots, rows["n"])
        if (rows["n"] < 0).any():
            raise ValueError("negative")
        return np.arange(len(rows)), {"total": state["total"][rows.slots]}


def test_what_an_operator_takes_back_is_not_in_a_snapshot() -> None:
    batch = pa.record_batch({"k": [1, 2, 3, 1, 2, 3], "n": [1, 2, 3, 4, -5, 6], "ts": range(6)})
    epochs = Epochs(lambda _, keyed: keyed.apply(Fussy()), batch, ["k"], [3, 4])
    original, replica = epochs.operator.open(7), epochs.operator.open(7)
    epochs.feed(original, 0)
    follower = Follower(original, replica, 1)
    with pytest.raises(ValueError, match="negative"):
        epochs.feed(original, 2)
    before = state_of(original)
    epochs.feed(original, 1)
    while follower.pull(2):
        pass
    assert state_of(replica) == before != state_of(original)


def test_a_snapshot_of_some_partitions() -> None:
    rng = random.Random(6)
    batch = pa.record_batch({"k0": [*range(200)], **_values(rng, 200, wild=False)})
    for build in OPERATORS.values():
        epochs = Epochs(build, batch, ["k0"], [100])
        original, replica = epochs.operator.open(7), epochs.operator.open(7)
        epochs.feed(original, 0)
        snapshot, wanted = original.snapshot(partitions=[1, 4]), state_of(original, [1, 4])
        epochs.feed(original, 1)
        while part := snapshot.next(16):
            replica.install(dict([part]))
        assert state_of(replica) == wanted


def test_a_closed_snapshot_costs_nothing() -> None:
    rng = random.Random(7)
    batch = pa.record_batch({"k0": [*range(50)], **_values(rng, 50, wild=False)})
    for build in OPERATORS.values():
        epochs = Epochs(build, batch, ["k0"], [25])
        original = epochs.operator.open(7)
        epochs.feed(original, 0)
        snapshot = original.snapshot()
        snapshot.next(3)
        snapshot.close()
        assert snapshot.rows_left == snapshot.nbytes_left == 0
        assert snapshot.next(3) is None
        for table in original.tables().values():
            assert not getattr(table, "_snapshots", [])
