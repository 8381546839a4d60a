"""Key identity, partitions and the key index, against a dict."""

from __future__ import annotations

import datetime
import decimal
import math
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

import holdfast
from holdfast.engine.keys import KeyIndex, KeyWords, key_words, partition_of
from tests.support.harness import examples

NAN = math.nan
KINDS: dict[str, tuple[pa.DataType, st.SearchStrategy]] = {
    "int64": (pa.int64(), st.integers(-(2**63), 2**63 - 1) | st.integers(-3, 3)),
    "uint64": (pa.uint64(), st.integers(0, 2**64 - 1)),
    "int8": (pa.int8(), st.integers(-128, 127)),
    "bool": (pa.bool_(), st.booleans()),
    "float64": (pa.float64(), st.floats() | st.sampled_from([0.0, -0.0, NAN])),
    "float32": (pa.float32(), st.floats(width=32) | st.sampled_from([0.0, -0.0, NAN])),
    "date": (pa.date32(), st.integers(-(2**31), 2**31 - 1)),
    "timestamp": (pa.timestamp("us"), st.integers(-(2**62), 2**62)),
    "string": (pa.string(), st.text(max_size=40) | st.sampled_from(["", "a", "ab", "ba"])),
    "binary": (pa.binary(), st.binary(max_size=20)),
}


def words_of(*columns: pa.Array) -> list[tuple[int, int]]:
    words = key_words(list(columns))
    high = np.zeros(words.low.size, np.int64) if words.high is None else words.high
    return list(zip(words.low.tolist(), high.tolist(), strict=True))


def canonical(column: pa.Array) -> list:
    """Python values that are equal where the keys are."""
    if pa.types.is_temporal(column.type):
        column = column.view(pa.int32() if column.type.bit_width == 32 else pa.int64())
    same = {True: "true", False: "false"} if pa.types.is_boolean(column.type) else {}
    values = [same.get(v, v) for v in column.to_pylist()]
    return [("NaN" if math.isnan(v) else v + 0.0) if isinstance(v, float) else v for v in values]


@st.composite
def key_columns(draw: st.DrawFn) -> list[pa.Array]:
    rows = draw(st.integers(0, 40))
    columns = []
    for name in draw(st.lists(st.sampled_from(sorted(KINDS)), min_size=1, max_size=3)):
        kind, values = KINDS[name]
        if draw(st.booleans()):
            values = values | st.none()
        columns.append(pa.array(draw(st.lists(values, min_size=rows, max_size=rows)), kind))
    return columns


@examples(100)
@given(key_columns(), st.data())
def test_keys_are_equal_exactly_where_their_values_are(
    columns: list[pa.Array], data: st.DataObject
) -> None:
    words = words_of(*columns)
    values = list(zip(*(canonical(c) for c in columns), strict=True))
    assert len(set(words)) == len(set(values)) == len(set(zip(words, values, strict=True)))
    # A row's identity is its own: neighbours, offsets and nulls elsewhere do not matter.
    start = data.draw(st.integers(0, len(words)))
    assert words_of(*(c.slice(start) for c in columns)) == words[start:]
    single = [words_of(*(c.slice(i, 1) for c in columns))[0] for i in range(len(words))]
    assert single == words


@examples(40)
@given(key_columns(), st.sampled_from([1, 2, 7, 1000, 65535]))
def test_partitions_follow_the_key_alone(columns: list[pa.Array], partitions: int) -> None:
    whole = partition_of(key_words(columns), partitions)
    assert whole.dtype == np.uint16
    assert not whole.size or whole.max() < partitions
    rows = range(len(columns[0]))
    alone = [partition_of(key_words([c.slice(i, 1) for c in columns]), partitions)[0] for i in rows]
    assert whole.tolist() == alone


@pytest.mark.parametrize(
    ("kind", "value"),
    [
        (pa.date32(), datetime.date(2020, 1, 1)),
        (pa.date64(), datetime.date(2020, 1, 1)),
        (pa.time32("s"), datetime.time(1)),
        (pa.time64("us"), datetime.time(1)),
        (pa.timestamp("ns", "UTC"), datetime.datetime(2020, 1, 1)),
        (pa.duration("ms"), datetime.timedelta(1)),
        (pa.float16(), np.float16(1.5)),
        (pa.large_string(), "a"),
        (pa.string_view(), "a key longer than twelve"),
        (pa.binary(), b"\xff\x00"),
        (pa.binary(2), b"\xff\x00"),
        (pa.binary_view(), b"\xff\x00"),
        (pa.decimal128(9, 2), decimal.Decimal("1.25")),
        (pa.dictionary(pa.int32(), pa.string()), "a"),
    ],
    ids=str,
)
def test_every_type_of_key(kind: pa.DataType, value: object) -> None:
    column = pa.array([value, None, value, None], kind)
    a, null, b, other_null = words_of(column)
    assert a == b != null == other_null
    assert words_of(column.slice(2)) == [b, other_null]
    assert words_of(column.slice(0, 0)) == []
    wide = words_of(column, column)
    assert wide[0] == wide[2] != wide[1] == wide[3]


def test_strings_are_the_same_key_in_every_encoding() -> None:
    values = ["", "a", None, "\u00df", "a", "x" * 100]
    kinds = [pa.large_string(), pa.string_view(), pa.dictionary(pa.int8(), pa.string())]
    plain = words_of(pa.array(values, pa.string()))
    for kind in kinds:
        assert words_of(pa.array(values, kind)) == plain
    reordered = pa.DictionaryArray.from_arrays(
        [2, 1, None, 0, 1, 3], ["\u00df", "a", "", "x" * 100]
    )
    assert words_of(reordered) == plain


# What is stored, and where it is, depends on these: a change of hash must not go unnoticed.
PINNED = {
    "int": pa.array([0, 1, -1, 2**40, None], pa.int64()),
    "string": pa.array(["", "a", "ab", "Holdfast", None], pa.string()),
    "float": pa.array([0.0, -0.0, 1.5, NAN, None], pa.float64()),
    "date": pa.array([0, 1, 19000, -1, None], pa.date32()),
}
PARTITIONS = {
    "int": [0, 427, 944, 385, 611],
    "string": [88, 193, 710, 591, 837],
    "float": [0, 0, 900, 188, 611],
    "date": [0, 427, 298, 890, 611],
    "wide": [7, 848, 562, 528, 806],
}


def pinned_partitions() -> dict[str, list[int]]:
    found = {n: partition_of(key_words([c]), 1000).tolist() for n, c in PINNED.items()}
    wide = key_words([PINNED["string"], PINNED["int"]])
    return found | {"wide": partition_of(wide, 1000).tolist()}


def test_partitions_are_pinned() -> None:
    assert pinned_partitions() == PARTITIONS


@pytest.mark.parametrize("seed", ["0", "12345"])
def test_partitions_do_not_depend_on_the_process(seed: str) -> None:
    code = f"import {__name__} as here; print(here.pinned_partitions())"
    top = Path(__file__).parents[__name__.count(".")]
    roots = [str(Path(holdfast.__file__).parent.parent), str(top)]
    env = os.environ | {"PYTHONHASHSEED": seed, "PYTHONPATH": os.pathsep.join(roots)}
    out = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    assert out.stdout.strip() == str(PARTITIONS)


def test_partitions_are_balanced() -> None:
    keys = [pa.array(np.arange(20_000)), pa.array([f"user-{i}" for i in range(20_000)])]
    for column in keys:
        counts = np.bincount(partition_of(key_words([column]), 16), minlength=16)
        assert counts.min() > 1_100
        assert counts.max() < 1_400


# --- the index ----------------------------------------------------------------------------------


class Model:
    """A dict from key to slot."""

    def __init__(self) -> None:
        self.slots: dict[tuple[int, int], int] = {}

    def check(self, index: KeyIndex, words: KeyWords) -> None:
        size = len(self.slots)
        slots, fresh = index.lookup(words)
        high = np.zeros(words.low.size, np.int64) if words.high is None else words.high
        keys = list(zip(words.low.tolist(), high.tolist(), strict=True))
        assert slots.dtype == np.int64
        for row, (key, slot) in enumerate(zip(keys, slots.tolist(), strict=True)):
            assert self.slots.setdefault(key, slot) == slot, row
        assert len(self.slots) == index.size
        assert sorted(self.slots.values()) == list(range(index.size))
        # The rows that brought a key: the first of each, in the order of the slots.
        assert slots[fresh].tolist() == list(range(size, index.size))
        earliest = {key: row for row, key in reversed(list(enumerate(keys)))}
        assert fresh.tolist() == [earliest[keys[row]] for row in fresh.tolist()]


@examples(40)
@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 900), st.booleans()), max_size=6))
def test_index_is_a_dict(seed: int, calls: list[tuple[int, bool]]) -> None:
    rng = np.random.default_rng(seed)
    index, model = KeyIndex(1), Model()
    span = int(rng.choice([3, 300, 2**60]))
    for rows, wide in calls:
        low = rng.integers(-span, span, rows)
        high = rng.integers(0, 3, rows) if wide else None
        model.check(index, KeyWords(low, high))


def test_index_grows() -> None:
    index, model = KeyIndex(1), Model()
    for start in (0, 50_000, 25_000):
        low = np.arange(start, start + 50_000) * 1_000_003
        model.check(index, KeyWords(low, None))
    assert index.size == 100_000
    assert index.nbytes > 100_000 * 12
    model.check(index, KeyWords(np.arange(2_000), np.arange(2_000) % 2))


def test_index_when_all_keys_fight_for_one_place() -> None:
    """Keys with the same home: found by asking the index itself."""
    index, model = KeyIndex(512), Model()
    many = np.arange(400_000)
    homes = index._home(KeyWords(many, None))
    rivals = many[homes == homes[0]]
    assert rivals.size > 200
    model.check(index, KeyWords(np.repeat(rivals, 2), None))
    model.check(index, KeyWords(rivals[::-1].copy(), None))


def test_index_takes_nulls_after_it_was_filled_without() -> None:
    index, model = KeyIndex(), Model()
    column = pa.array([0, 1, 2], pa.int64())
    nulls = pa.array([None, 0, 1, None], pa.int64())
    for keys in (column, nulls, column):
        model.check(index, key_words([keys]))
    assert index.size == 4
