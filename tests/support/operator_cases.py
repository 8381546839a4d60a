"""Inputs of operators as Hypothesis draws them, and what is checked of each."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.streams import Stream
from holdfast.connectors.sources import rows
from holdfast.engine.operators.custom import KeyedFunction
from holdfast.plan.planner import plan
from tests.support import models
from tests.support.arrays import array_of
from tests.support.harness import Input, Result, Shape, run

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
