"""The state table against a dict: writing, growing, forgetting, and moving partitions."""

from __future__ import annotations

import decimal
import random

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.keys import KeyWords, partition_of
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import CHUNK_BITS, Field
from tests.support.harness import examples, through_ipc
from tests.support.state_model import FIELDS, FRESH, PARTITIONS, Model, key_lists, words_for

FRESH |= {"reals": None, "pairs": None, "both": {"a": 1, "b": None}}
FRESH |= {"exact": decimal.Decimal("0.50")}
FRESH |= {"ring": (0.0,) * 3, "words": (None,) * 2, "lists": (None,) * 2}


@examples(60)
@given(
    st.lists(
        st.tuples(st.sampled_from(["write", "remove", "move", "drop"]), key_lists()), max_size=9
    ),
    st.integers(0, 2**32),
)
def test_a_table_is_a_dict(actions: list[tuple[str, list]], seed: int) -> None:
    rng = random.Random(seed)
    model = Model()
    for epoch, (action, keys) in enumerate(actions):
        if action == "write":
            model.write(keys, rng, epoch)
        elif action == "remove":
            model.remove(keys)
        elif action == "move":
            moved = StateTable(FIELDS, PARTITIONS)
            for part in range(PARTITIONS):
                moved.install(through_ipc(model.table.extract([part])))
            model.table = moved
        elif model.rows:
            gone = set(rng.sample(range(PARTITIONS), 2))
            model.table.drop(gone)
            parts = partition_of(words_for(list(model.rows)), PARTITIONS).tolist()
            for key, part in zip(list(model.rows), parts, strict=True):
                if part in gone:
                    del model.rows[key]
        model.check()


def test_extract_gives_each_partition_once() -> None:
    table = StateTable({"n": Field(pa.int64())}, PARTITIONS)
    keys = np.arange(5000)
    slots = table.slots(KeyWords(keys, None))
    table["n"][slots] = keys
    whole = table.extract()
    assert sorted(whole.column("n").to_pylist()) == keys.tolist()
    parts = [table.extract([p]) for p in range(PARTITIONS)]
    assert sum(p.num_rows for p in parts) == 5000
    for number, part in enumerate(parts):
        assert set(part.column("__part").to_pylist()) == {number}
    assert table.extract([]).num_rows == 0
    assert table.extract([]).schema.equals(whole.schema)


def test_install_overwrites_and_adds() -> None:
    a, b = (StateTable({"n": Field(pa.int64()), "s": Field(pa.string())}, 4) for _ in range(2))
    for table, keys in ((a, [1, 2, 3]), (b, [2, 3, 4])):
        slots = table.slots(words_for(keys))
        table["n"][slots] = np.array(keys) * (10 if table is a else 100)
        texts = ["x", None, "z"] if table is a else [None, "y", None]
        table.put("s", slots, pa.array(texts, pa.string()))
    a.install(b.extract())
    slots = a.slots(words_for([1, 2, 3, 4]))
    assert a["n"][slots].tolist() == [10, 200, 300, 400]
    assert a.get("s", slots).to_pylist() == ["x", None, "y", None]
    a.install(StateTable({"n": Field(pa.int64()), "s": Field(pa.string())}, 4).extract())
    assert a.size == 4


def test_since_gives_the_chunks_that_changed() -> None:
    table = StateTable({"n": Field(pa.int64())}, 4)
    rows = 3 << CHUNK_BITS
    slots = table.slots(KeyWords(np.arange(rows), None))
    table.touch(slots, 1)
    assert table.extract(since=0).num_rows == rows
    assert table.extract(since=1).num_rows == 0
    table["n"][slots[5]] = 9
    table.touch(slots[5:6], 4)
    changed = table.extract(since=1)
    assert changed.num_rows == 1 << CHUNK_BITS
    assert 9 in changed.column("n").to_pylist()
    replica = StateTable({"n": Field(pa.int64())}, 4)
    replica.install(table.extract())
    assert replica.extract(since=3).num_rows >= 1 << CHUNK_BITS  # what changed is known there too
    assert replica.extract(since=4).num_rows == 0


def test_an_increment_brings_a_replica_up_to_date() -> None:
    rng = random.Random(3)
    model, replica = Model(), StateTable(FIELDS, PARTITIONS)
    for epoch in range(6):
        model.write(rng.choices(range(3000), k=700), rng, epoch)
        replica.install(through_ipc(model.table.extract(since=epoch - 1)))
    model.table = replica
    model.check()


def test_a_removed_key_starts_afresh() -> None:
    model = Model()
    model.write([1, 2, None], random.Random(1), 0)
    model.remove([1, None])
    model.check()
    model.slots([1, None])
    model.check()


def test_what_was_there_before_births_were_followed_is_the_oldest() -> None:
    table = StateTable({"x": Field(pa.int64())}, 4)
    table.touch(table.slots(words_for([1, 2])), 7)
    assert table.oldest() is None
    table.follow(births=True)
    slots = table.slots(words_for([3]))
    table.touch(slots, 9)
    assert table.oldest() == 0
    table.remove(table.find(words_for([1, 2])))
    assert table.oldest() == 9
    table.follow(births=False)
    assert table.oldest() is None


def test_removing_twice_counts_once() -> None:
    table = StateTable({"n": Field(pa.int64())}, 4)
    slots = table.slots(words_for([1, 2, 3]))
    table.remove(np.array([slots[0], slots[0]]))
    table.remove(slots[:1])
    assert table.size == 2


def test_many_come_and_go() -> None:
    """Slots are given back: the table does not grow with all keys that ever were."""
    table = StateTable({"n": Field(pa.int64()), "s": Field(pa.string())}, 4)
    for start in range(0, 60_000, 1000):
        keys = np.arange(start, start + 1000)
        slots = table.slots(KeyWords(keys, None))
        assert table["n"][slots].sum() == 0
        table["n"][slots] = keys
        if start:
            old = table.slots(KeyWords(keys - 1000, None))
            assert table["n"][old].tolist() == (keys - 1000).tolist()
            table.remove(old)
    assert table.size == 1000
    assert table.nbytes < 400_000


def test_of_a_slot_named_twice_the_last_value_stays() -> None:
    table = StateTable({"s": Field(pa.string()), "n": Field(pa.int64())}, 4)
    slots = table.slots(words_for([5, 5, 6, 5]))
    table.put("s", slots, pa.array(["a", None, "c", "d"]))
    table.put("n", slots, pa.array([1, 2, 3, None]))
    assert table.get("s", slots).to_pylist() == ["d", "d", "c", "d"]
    assert table.get("n", slots).to_pylist() == [None, None, 3, None]


def test_backup_and_put_back() -> None:
    table = StateTable({"s": Field(pa.string()), "n": Field(pa.int64())}, 4)
    slots = table.slots(words_for([1, 2, 3]))
    table["n"][slots] = [4, 5, 6]
    held = table.backup(slots[:2])
    table.put("n", slots, pa.array([None, 0, None], pa.int64()))
    table.put("s", slots, pa.array(["x", "y", "z"]))
    table.put_back(slots[:2], held)
    assert table.get("n", slots).to_pylist() == [4, 5, None]
    assert table.get("s", slots).to_pylist() == [None, None, "z"]


@pytest.mark.parametrize("kind", [pa.timestamp("ns", "UTC"), pa.duration("ms"), pa.time32("s")])
def test_times_keep_their_type(kind: pa.DataType) -> None:
    table = StateTable({"t": Field(kind)}, 4)
    values = pa.array([0, None, 86_000], pa.int32() if kind.bit_width == 32 else pa.int64()).view(
        kind
    )
    slots = table.slots(words_for([1, 2, 3]))
    table.put("t", slots, values)
    assert table.get("t", slots).equals(values)
    moved = StateTable({"t": Field(kind)}, 4)
    moved.install(through_ipc(table.extract()))
    assert moved.get("t", moved.slots(words_for([1, 2, 3]))).equals(values)


def test_text_and_the_like_can_be_read_and_written_as_python_values() -> None:
    kind = pa.list_(pa.float64())
    table = StateTable({"l": Field(kind), "s": Field(pa.string(), "new")}, 4)
    slots = table.slots(words_for([1, 2, 3]))
    table["l"][slots] = [[1.0, None], None, []]
    table["s"][slots[1]] = "b"
    assert table.get("l", slots).equals(pa.array([[1.0, None], None, []], kind))
    assert table["l"][slots].tolist() == [[1.0, None], None, []]
    assert table["s"][slots].tolist() == ["new", "b", "new"]
    assert table["s"][slots[1]] == "b"


def test_values_that_were_replaced_take_no_room() -> None:
    """Whatever a key held before is given back; and so is what the values came in."""
    table = StateTable({"s": Field(pa.string()), "l": Field(pa.list_(pa.int64()), width=2)}, 4)
    slots = table.slots(words_for([*range(50)]))
    for turn in range(400):
        table.touch(slots, turn)
        whole = pa.array([f"{turn:02000}"] * 50 + ["x" * 1_000_000])
        table.put("s", slots, whole.slice(0, 50))
        table.put("l", slots, pa.array([[turn] * 100] * 50), slots % 2)
    assert table.get("s", slots).to_pylist() == ["0" * 1997 + "399"] * 50
    assert table.nbytes < 2_000_000
