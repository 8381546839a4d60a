"""Whatever grows is as it was before, or as it is meant to be, if there is no memory for it."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine import state_rows as tables
from holdfast.engine.keys import KeyIndex, KeyWords, key_words, partition_of
from holdfast.engine.operators.join import _Side, _SortedRun
from holdfast.engine.snapshot import Snapshot
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field
from tests.support.harness import examples

PARTITIONS = 4
FIELDS = {"n": Field(pa.int64(), 3), "s": Field(pa.string()), "ring": Field(pa.float64(), 0, 2)}


def code_of(owner: type) -> set[CodeType]:
    methods = (vars(owner)[name] for name in vars(owner))
    functions = (getattr(m, "fget", None) or m for m in methods)
    return {f.__code__ for f in functions if hasattr(f, "__code__")}


@contextmanager
def no_memory_at(line: int, codes: set[CodeType]) -> Iterator[list[tuple[CodeType, int]]]:
    """The `line`-th line that is run of these functions raises instead; those that were run are in
    the list. An error within `trace` ends tracing, so whatever handles it is run whole."""
    seen: list[tuple[CodeType, int]] = []

    def trace(frame: FrameType, event: str, arg: Any) -> Any:
        if frame.f_code not in codes:
            return None
        if event == "line":
            if len(seen) == line:
                raise MemoryError(f"injected at {frame.f_code.co_name}:{frame.f_lineno}")
            seen.append((frame.f_code, frame.f_lineno))
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield seen
    finally:
        sys.settrace(before)


def every_failure(
    make: Callable[[], Any],
    act: Callable[[Any], Any],
    shown: Callable[[Any], Any],
    codes: set[CodeType],
) -> int:
    """Have `act` fail at each of its lines in turn, the first and the last time that it is run:
    what it acted on is `shown` to be as before, or as after it, and a second attempt gives what it
    gives to one that has not failed. How many lines there were."""
    undisturbed = make()
    before = shown(undisturbed)
    with no_memory_at(-1, codes) as run:
        act(undisturbed)
    after = shown(undisturbed)
    first = {place: at for at, place in reversed(list(enumerate(run)))}
    last = {place: at for at, place in enumerate(run)}
    for line in sorted({*first.values(), *last.values()}):
        one = make()
        with pytest.raises(MemoryError) as caught, no_memory_at(line, codes):
            act(one)
        assert shown(one) in (before, after), caught.value
        act(one)
        assert shown(one) == after, caught.value
    return len(first)


def words(keys: list[int | None]) -> KeyWords:
    return key_words([pa.array(keys, pa.int64())])


ROOM = 512
"""So many keys fit before a table, and its index, grow."""

GROWING = code_of(KeyIndex) | {
    f.__code__ for f in (StateTable.slots, StateTable._admit, StateTable._enlarge)
}


def index_shown(index: KeyIndex) -> Any:
    found = index.find(words([*range(-5, 4 * ROOM), None]))
    return index.size, found.tolist()


@pytest.mark.parametrize("nulls", [False, True])
@pytest.mark.parametrize("known", [10, ROOM - 3])
def test_a_key_index_is_as_it_was_if_it_cannot_grow(known: int, nulls: bool) -> None:
    start = KeyIndex()
    start.lookup(words(list(range(known))))
    more = [*range(known - 4, known + 9), *range(known, known + 9), None if nulls else 0]
    lines = every_failure(
        lambda: copy.deepcopy(start),
        lambda i: i.lookup(words(more)),
        index_shown,
        code_of(KeyIndex),
    )
    assert lines > 20


def table_shown(table: StateTable) -> Any:
    """All that can be seen of a table from outside."""
    state = table.extract()
    return table.size, state.sort_by([("__low", "ascending"), ("__high", "ascending")]).to_pydict()


def written(table: StateTable, keys: list[int | None], epoch: int) -> None:
    slots = table.slots(words(keys))
    table.touch(slots, epoch)
    table["n"][slots] = np.arange(slots.size)
    table.put("s", slots, pa.array([None if k is None else str(k) for k in keys]))
    table["ring"][slots] = 0.5


@given(
    known=st.sampled_from([5, ROOM - 2, ROOM]),
    fresh=st.lists(st.none() | st.integers(-3, 3 * ROOM), min_size=1, max_size=40),
    gone=st.lists(st.integers(0, 4), max_size=3),
    births=st.booleans(),
    frozen=st.booleans(),
)
@examples(4)
def test_a_table_is_as_it_was_if_it_cannot_grow(
    known: int, fresh: list[int | None], gone: list[int], births: bool, frozen: bool
) -> None:
    start = StateTable(FIELDS, PARTITIONS)
    start.follow(births=births, changes=["standby"] if births else [])
    written(start, list(range(known)), 1)
    start.remove(start.slots(words(list(gone))) if gone else np.empty(0, np.int64))

    def make() -> tuple[StateTable, Snapshot | None]:
        table = copy.deepcopy(start)
        return table, table.snapshot() if frozen else None

    def shown(both: tuple[StateTable, Snapshot | None]) -> Any:
        snapshot = copy.deepcopy(both[1])
        parts = [] if snapshot is None else list(iter(lambda: snapshot.next(100), None))
        rows = [row for part in parts for row in part.to_pylist()]
        return table_shown(both[0]), sorted(rows, key=lambda r: (r["__low"], r["__high"]))

    every_failure(make, lambda both: both[0].slots(words(fresh)), shown, GROWING)


def test_a_partition_of_a_key_that_came_after_a_failure_is_right() -> None:
    """What the failed attempt has left behind in rows that nobody has is overwritten."""
    table = StateTable(FIELDS, PARTITIONS)
    wide = KeyWords(np.arange(9), np.arange(1, 10))
    with pytest.raises(MemoryError), no_memory_at(3, {StateTable._revive.__code__}):
        table.slots(words([1]))
        table.remove(table.slots(words([1])))
        table.slots(KeyWords(np.append(wide.low, 1), np.append(wide.high, 0)))
    plain = words(list(range(20, 29)))
    table.slots(plain)
    state = table.extract()
    assert state.num_rows == 9
    assert state.column("__high").to_pylist() == [0] * 9
    assert state.column("__part").to_pylist() == partition_of(plain, PARTITIONS).tolist()


@pytest.mark.parametrize("act", ["remove", "drop"])
def test_a_table_that_cannot_be_made_smaller_loses_nothing(act: str) -> None:
    start = StateTable(FIELDS, PARTITIONS)
    start.follow(births=True, changes=["standby"])
    written(start, list(range(1_100)), 1)
    codes = {f.__code__ for f in (StateTable._restore, StateTable._reset, StateTable.install)}

    def shrink(table: StateTable) -> None:
        if act == "remove":
            table.remove(table.find(words(list(range(600)))))
        else:
            table.drop([0, 2])

    def remove_again(table: StateTable) -> None:
        found = table.find(words(list(range(600))))
        if (found >= 0).any():
            shrink(table)

    again = remove_again if act == "remove" else shrink
    every_failure(lambda: copy.deepcopy(start), again, table_shown, codes | code_of(KeyIndex))


def test_a_snapshot_keeps_what_it_could_not_save() -> None:
    start = StateTable(FIELDS, PARTITIONS)
    written(start, list(range(40)), 1)

    def make() -> tuple[StateTable, Snapshot]:
        table = copy.deepcopy(start)
        return table, table.snapshot()

    def shown(both: tuple[StateTable, Snapshot]) -> Any:
        snapshot = copy.deepcopy(both[1])
        rows = [r for p in iter(lambda: snapshot.next(7), None) for r in p.to_pylist()]
        return sorted(rows, key=lambda r: r["__low"])

    slots = np.arange(10)
    codes = {f.__code__ for f in (tables.rows_at, tables.distinct)}
    every_failure(make, lambda both: both[0].touch(slots, 2), shown, codes)


@pytest.mark.parametrize("act", ["add", "forget", "drop"])
def test_a_side_of_a_join_loses_no_rows(act: str) -> None:
    schema = pa.schema([("k", pa.int64()), ("t", pa.int64()), ("__o0", pa.int64())])

    def batch(first: int, rows: int) -> pa.RecordBatch:
        numbers = np.arange(first, first + rows)
        return pa.record_batch([numbers % 5, numbers, numbers], schema=schema)

    start = _Side(["k"], schema, "t", PARTITIONS)
    start.follow(births=True, changes=["standby"])
    for epoch, first in enumerate((0, 100, 130)):
        start.add(batch(first, 40 if first == 0 else 10), epoch)

    def shown(side: _Side) -> Any:
        rows = sorted(side.extract().to_pylist(), key=lambda r: r["t"])
        fresh = [(e, b.num_rows) for e, b in side._unread["standby"]]
        return rows, fresh, list(side._births), side._floor

    def change(side: _Side) -> None:
        if act == "add" and side._births[-1][0] != 7:
            side.add(batch(200, 30), 7)
        elif act == "forget":
            side.forget(30)
        elif act == "drop":
            side.drop([0, 1])

    codes = {_Side._run.__code__, _SortedRun.__init__.__code__}
    every_failure(lambda: copy.deepcopy(start), change, shown, codes)
