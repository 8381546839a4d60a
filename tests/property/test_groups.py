"""Grouping by slot, and folds that run strictly in order, against plain loops."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.groups import _LONG, Groups
from tests.support.harness import bits_of, examples


@st.composite
def slot_columns(draw: st.DrawFn) -> np.ndarray:
    """Few slots or many, so that there are groups of either side of the length that matters."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    rows = draw(st.integers(0, 10) | st.integers(2 * _LONG, 6 * _LONG))
    slots = rng.integers(0, draw(st.sampled_from([1, 3, 50, 10**6])), rows)
    slots[rng.random(rows) < draw(st.sampled_from([0.0, 0.5]))] = 7  # a hot one among the others
    return slots


@examples(150)
@given(slot_columns())
def test_groups(slots: np.ndarray) -> None:
    groups = Groups(slots)
    members: dict[int, list[int]] = {}
    for row, slot in enumerate(slots.tolist()):
        members.setdefault(slot, []).append(row)
    assert groups.slots.tolist() == sorted(members)
    assert groups.rows.tolist() == [row for slot in sorted(members) for row in members[slot]]
    assert groups.lengths.tolist() == [len(members[s]) for s in sorted(members)]
    assert groups.sorted_slots.tolist() == sorted(slots.tolist())
    assert groups.rows[groups.starts].tolist() == [members[s][0] for s in sorted(members)]
    assert groups.rows[groups.lasts].tolist() == [members[s][-1] for s in sorted(members)]
    assert groups.ranks().tolist() == [i for s in sorted(members) for i in range(len(members[s]))]
    assert np.flatnonzero(groups.is_first).tolist() == groups.starts.tolist()
    assert groups.scattered(groups.rows).tolist() == list(range(slots.size))


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@examples(100)
@given(slot_columns(), st.sampled_from(["add", "maximum", "fmin"]), st.integers(0, 2**32))
def test_fold_is_a_loop(slots: np.ndarray, name: str, seed: int) -> None:
    rng = np.random.default_rng(seed)
    groups = Groups(slots)
    wild = rng.choice([0.1, 1e308, -1e308, math.inf, 1e-310, 3.0], slots.size)
    values = np.where(rng.random(slots.size) < 0.9, rng.normal(0, 1e6, slots.size), wild)
    initial = rng.normal(size=groups.slots.size)
    step = {"add": lambda a, b: a + b, "maximum": max, "fmin": min}[name]
    expected = []
    for g in range(groups.slots.size):
        so_far = float(initial[g])
        for value in values[groups.starts[g] :][: groups.lengths[g]].tolist():
            so_far = step(so_far, value)
            expected.append(bits_of(so_far))
    got = groups.fold(getattr(np, name), initial, values)
    assert [bits_of(v) for v in got.tolist()] == expected


@examples(60)
@given(slot_columns(), st.integers(0, 2**32), st.data())
def test_fold_does_not_mind_the_cut(slots: np.ndarray, seed: int, data: st.DataObject) -> None:
    """A long group in one call is folded by another path than the same rows in short ones."""
    values = np.random.default_rng(seed).normal(0, 1e9, slots.size)
    whole = _sums(slots, values, [])
    cuts = data.draw(st.lists(st.integers(0, slots.size), max_size=5))
    assert _sums(slots, values, sorted(cuts)) == whole
    assert _sums(slots, values, list(range(slots.size))) == whole


def _sums(slots: np.ndarray, values: np.ndarray, cuts: list[int]) -> list[tuple[str, int]]:
    state: dict[int, float] = {}
    out: list[tuple[str, int]] = []
    for start, stop in zip([0, *cuts], [*cuts, slots.size], strict=True):
        groups = Groups(slots[start:stop])
        initial = np.array([state.get(s, 0.0) for s in groups.slots.tolist()])
        folded = groups.fold(np.add, initial, values[start:stop][groups.rows])
        state |= dict(zip(groups.slots.tolist(), folded[groups.lasts].tolist(), strict=True))
        out += [bits_of(v) for v in groups.scattered(folded).tolist()]
    return out


def test_fold_keeps_whole_numbers_whole() -> None:
    slots = np.zeros(_LONG + 5, np.int64)
    values = np.full(slots.size, 2**53 + 1)
    folded = Groups(slots).fold(np.add, np.zeros(1, np.int64), values)
    assert folded.dtype == np.int64
    assert folded[-1] == (2**53 + 1) * slots.size
