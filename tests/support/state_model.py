"""A state table as a dictionary."""

from __future__ import annotations

import decimal
import random
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from holdfast.engine.keys import KeyWords, key_words
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field
from tests.support.arrays import exact

PARTITIONS = 6


US = pa.timestamp("us")


FIELDS = {
    "n": Field(pa.int64()),
    "x": Field(pa.float64(), -1.5),
    "flag": Field(pa.bool_(), False),
    "small": Field(pa.uint8(), 7),
    "text": Field(pa.string()),
    "raw": Field(pa.binary()),
    "at": Field(US),
    "day": Field(pa.date32()),
    "reals": Field(pa.list_(pa.float64())),
    "pairs": Field(pa.map_(pa.string(), pa.list_(pa.int8()))),
    "both": Field(pa.struct([("a", pa.int64()), ("b", pa.list_(pa.string()))]), {"a": 1}),
    "exact": Field(pa.decimal128(20, 2), decimal.Decimal("0.50")),
    "ring": Field(pa.float32(), width=3),
    "words": Field(pa.string(), width=2),
    "lists": Field(pa.list_(pa.float64()), width=2),
}


RINGS: dict[str, list] = {
    "ring": [0.0, -0.0, 0.5, float("nan"), None],
    "words": ["q", "r", "", None],
    "lists": [[1.0, None], [float("nan")], [-0.0], [], None],
}


POOLS: dict[str, list] = {
    "n": [0, 1, -(2**63), 2**63 - 1, None],
    "x": [0.0, -0.0, float("nan"), 1e300, None],
    "flag": [True, False, None],
    "small": [0, 255, None],
    "text": ["", "a", "\u00df", None],
    "raw": [b"", b"\xff\x00", None],
    "at": [0, -1, 10**15, None],
    "day": [0, -1, 19000, None],
    "reals": [[1.0, None], [float("nan"), -0.0], [], [None], None],
    "pairs": [[("a", [1, None]), ("b", None)], [("", [])], [], None],
    "both": [{"a": None, "b": [None, ""]}, {"a": 2**53 + 1, "b": None}, {"a": 0, "b": []}, None],
    "exact": [decimal.Decimal("1.25"), decimal.Decimal("-999999999999999999.99"), None],
}


FRESH = {"n": 0, "x": -1.5, "flag": False, "small": 7, "text": None, "raw": None, "at": 0, "day": 0}


def words_for(keys: list[int | None]) -> KeyWords:
    return key_words([pa.array(keys, pa.int64())])


class Model:
    """Key -> column -> value, beside a real table that is told the same."""

    def __init__(self) -> None:
        self.table = StateTable(FIELDS, PARTITIONS)
        self.rows: dict[int | None, dict[str, Any]] = {}

    def slots(self, keys: list[int | None]) -> np.ndarray:
        for key in keys:
            self.rows.setdefault(key, FRESH)
        return self.table.slots(words_for(keys))

    def write(self, keys: list[int | None], rng: random.Random, epoch: int) -> None:
        slots = self.slots(keys)
        for name, pool in POOLS.items():
            values = [rng.choice(pool) for _ in keys]
            self.table.put(name, slots, pa.array(values, FIELDS[name].kind))
            for key, value in zip(keys, values, strict=True):
                self.rows[key] = self.rows[key] | {name: value}
        for name, pool in RINGS.items():
            places = np.array([rng.randrange(FIELDS[name].width) for _ in keys], np.int64)
            values = [rng.choice(pool) for _ in keys]
            self.table.put(name, slots, pa.array(values, FIELDS[name].kind), places)
            for key, place, value in zip(keys, places.tolist(), values, strict=True):
                ring = list(self.rows[key][name])
                ring[place] = value
                self.rows[key] = self.rows[key] | {name: tuple(ring)}
        self.table.touch(slots, epoch)

    def remove(self, keys: list[int | None]) -> None:
        known = [k for k in keys if k in self.rows]
        if known:
            self.table.remove(self.table.slots(words_for(known)))
        for key in known:
            self.rows.pop(key, None)

    def check(self) -> None:
        assert self.table.size == len(self.rows) == self.table.live().size
        assert self.table.nbytes > 0
        keys = list(self.rows)
        if not keys:
            return
        slots = self.table.slots(words_for(keys))
        for name in POOLS:
            want = pa.array([self.rows[k][name] for k in keys], FIELDS[name].kind)
            got = self.table.get(name, slots)
            assert got.type == want.type
            assert exact(got) == exact(want), name
        for name in RINGS:
            for place in range(FIELDS[name].width):
                want = pa.array([self.rows[k][name][place] for k in keys], FIELDS[name].kind)
                got = self.table.get(name, slots, np.full(slots.size, place))
                assert got.type == want.type
                assert exact(got) == exact(want), name


def key_lists() -> st.SearchStrategy[list[int | None]]:
    return st.lists(st.none() | st.integers(-20, 20), max_size=12)
