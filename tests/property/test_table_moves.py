"""Tables that grow, shrink, give up partitions and take them back, against dicts; whatever the size
of the slices in which that is done, and the sizes from which memory is reserved."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine import compaction, keys, reserve, state
from holdfast.engine.keys import KeyIndex, KeyWords, partition_of
from holdfast.engine.state import STANDBY, StateTable
from holdfast.engine.state_rows import Field
from tests.support.harness import examples, through_ipc

PARTITIONS = 4096
FIELDS = {"n": Field(pa.int64(), 3), "s": Field(pa.string()), "ring": Field(pa.float64(), 0, 2)}
Row = tuple[int, str, float, int]
"""A key's number, text, last value of the ring, and the epoch in which its state began."""


@dataclass(frozen=True)
class Sizes:
    """The limits at which a table does something."""

    slots: int = 1 << 13
    small: int = 1 << 16
    released: int = 1 << 18
    advance: int = 6

    @contextmanager
    def apply(self) -> Iterator[None]:
        with (
            mock.patch.multiple(state, SLICE=self.slots, SMALL=self.small, ADVANCE=self.advance),
            mock.patch.multiple(compaction, SMALL=self.small, _RELEASED=self.released),
        ):
            yield


SIZES = [Sizes(), Sizes(50, 512, 64), Sizes(700, 600, 100, 1), Sizes(300, 1 << 16, 1, 0)]


def words_of(numbers: list[int]) -> KeyWords:
    """Keys of which some have a second word."""
    low = np.array(numbers, np.int64)
    return KeyWords(low * 1_000_003, low % 3) if any(n % 7 == 0 for n in numbers) else _plain(low)


def _plain(low: np.ndarray) -> KeyWords:
    high = low % 3
    return KeyWords(low * 1_000_003, high if high.any() else None)


def parts_of(numbers: list[int]) -> list[int]:
    low = np.array(numbers, np.int64)
    return partition_of(KeyWords(low * 1_000_003, low % 3), PARTITIONS).tolist()


@dataclass
class Site:
    """A table, a standby that follows it, and the dict that both should equal."""

    table: StateTable = field(default_factory=lambda: StateTable(FIELDS, PARTITIONS))
    standby: StateTable = field(default_factory=lambda: StateTable(FIELDS, PARTITIONS))
    rows: dict[int, Row] = field(default_factory=dict)
    followed: int = -1
    frozen: list[tuple[state.Snapshot, dict[int, Row]]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.table.follow(births=True, changes=[STANDBY])
        self.standby.follow(births=True)

    def write(self, numbers: list[int], epoch: int) -> None:
        slots = self.table.slots(words_of(numbers))
        self.table.touch(slots, epoch)
        self.table["n"][slots] = epoch
        self.table.put("s", slots, pa.array([f"{n}@{epoch}" for n in numbers]))
        self.table["ring"][slots, 1] = epoch / 2
        for n in numbers:
            born = self.rows[n][3] if n in self.rows else epoch
            self.rows[n] = (epoch, f"{n}@{epoch}", epoch / 2, born)

    def remove(self, numbers: list[int]) -> None:
        known = [n for n in numbers if n in self.rows]
        if known:
            self.table.remove(self.table.find(words_of(known)))
        for n in known:
            self.rows.pop(n, None)

    def give(self, partitions: range, to: Site | None, rows_max: int) -> None:
        """Drop some partitions, or move them to another site."""
        if to is not None:
            snapshot = self.table.snapshot(partitions, whose="mover")
            while (part := snapshot.next(rows_max)) is not None:
                assert part.num_rows <= rows_max
                to.table.install(through_ipc(part))
                to.standby.install(part)  # or it would have to follow it from the beginning
                to.table.tidy()
        for table in (self.table, self.standby):
            table.drop(partitions)
        own = dict(zip(self.rows, parts_of(list(self.rows)), strict=True))
        for n, part in own.items():
            if part in partitions:
                row = self.rows.pop(n)
                if to is not None:
                    to.rows[n] = row

    def follow(self, epoch: int, rows_max: int) -> None:
        self.standby.take_out(through_ipc(self.table.removed()))
        snapshot = self.table.snapshot(after=self.followed)
        while (part := snapshot.next(rows_max)) is not None:
            self.standby.install(through_ipc(part))
        self.followed = epoch
        assert contents(self.standby) == contents(self.table)

    def freeze(self) -> None:
        self.frozen.append((self.table.snapshot(whose="frozen"), dict(self.rows)))

    def check(self) -> None:
        assert contents(self.table) == self.rows
        assert self.table.size == len(self.rows) == self.table.live().size
        assert self.table.oldest() == min((r[3] for r in self.rows.values()), default=None)
        if self.rows:
            slots = self.table.find(words_of(list(self.rows)))
            assert self.table["n"][slots].tolist() == [r[0] for r in self.rows.values()]
            assert self.table.get("s", slots).to_pylist() == [r[1] for r in self.rows.values()]
        absent = [n for n in range(40) if n not in self.rows]
        assert not absent or (self.table.find(words_of(absent)) == -1).all()

    def finish(self, rows_max: int) -> None:
        for snapshot, rows in self.frozen:
            copy = StateTable(FIELDS, PARTITIONS)
            while (part := snapshot.next(rows_max)) is not None:
                copy.install(part)
            copied = sorted((n, r[:3]) for n, r in rows.items())
            found = sorted((n, r[:3]) for n, r in contents(copy).items())
            assert found == copied
        turns = 0
        while self.table.tidy():
            turns += 1
            assert turns < 100_000
        assert self.table._index.size == self.table.size or not self.table._reclaim


def contents(table: StateTable) -> dict[int, Row]:
    batch = table.extract().to_pydict()
    born = batch.get("__born", [0] * len(batch["n"]))
    numbers = [low // 1_000_003 for low in batch["__low"]]
    assert batch["__part"] == parts_of(numbers)
    rings = [ring[1] for ring in batch["ring"]]
    rows = zip(batch["n"], batch["s"], rings, born, strict=True)
    found = dict(zip(numbers, rows, strict=True))
    assert len(found) == len(numbers), "a key occurs twice"
    return found


ACTIONS = [
    "write",
    "write",
    "remove",
    "crowd",
    "desert",
    "drop",
    "move",
    "tidy",
    "freeze",
    "follow",
]


@st.composite
def stories(draw: st.DrawFn) -> list[tuple[str, int, list[int], range]]:
    story = []
    for _ in range(draw(st.integers(0, 9))):
        first = draw(st.sampled_from([0, 1024, 4095]) | st.integers(0, 4095))
        end = min(PARTITIONS, first + draw(st.sampled_from([1, 64, 2000])))
        numbers = draw(st.lists(st.integers(0, 40), max_size=12))
        story.append(
            (draw(st.sampled_from(ACTIONS)), draw(st.integers(0, 1)), numbers, range(first, end))
        )
    return story


def play(story: list[tuple[str, int, list[int], range]], rows_max: int) -> list[dict[int, Row]]:
    sites = [Site(), Site()]
    for epoch, (action, which, numbers, partitions) in enumerate(story):
        site, other = sites[which], sites[1 - which]
        match action:
            case "write":
                mine = [n for n in numbers if n not in other.rows]
                site.write(mine, epoch)
            case "crowd":
                for first in range(100, 1900, 600):
                    some = range(first + 10 * which, first + 600)
                    site.write([n for n in some if n not in other.rows], epoch)
            case "remove":
                site.remove(numbers)
            case "desert":
                site.remove([*range(100, 1500 + 300 * which)])
            case "drop":
                site.give(partitions, None, rows_max)
            case "move":
                site.give(partitions, other, rows_max)
            case "tidy":
                site.table.tidy()
            case "freeze":
                site.freeze()
            case "follow":
                site.follow(epoch, rows_max)
        site.check()
        other.check()
    for site in sites:
        site.finish(rows_max)
        site.check()
        site.follow(len(story), rows_max)
    return [contents(site.table) for site in sites]


@examples(10)
@given(stories(), st.sampled_from([3, 100, 10_000]))
def test_a_table_that_moves_is_a_dict(
    story: list[tuple[str, int, list[int], range]], rows_max: int
) -> None:
    results = []
    for sizes in SIZES:
        with sizes.apply():
            results.append(play(story, rows_max))
    assert all(result == results[0] for result in results[1:])


CYCLE = ["crowd", "freeze", "move", "desert", "follow", "crowd", "drop", "tidy", "write"]


@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_a_table_that_moves_for_long(sizes: Sizes) -> None:
    story = [
        (action, turn % 2, [*range(turn, turn + 9)], range(turn * 300, turn * 300 + 1500))
        for turn in range(2)
        for action in CYCLE
    ]
    with sizes.apply():
        play(story, 128)


def test_a_large_table_gives_its_memory_back() -> None:
    with Sizes(slots=4096, small=1024, released=256).apply():
        table = StateTable(FIELDS, PARTITIONS)
        slots = table.slots(KeyWords(np.arange(60_000), None))
        table["n"][slots] = np.arange(60_000)
        whole = table.nbytes
        assert table._is_reserved
        table.drop(range(64, PARTITIONS))
        while table.tidy():
            pass
        assert table.nbytes < whole / 20
        kept = table.extract()
        assert kept.num_rows == table.size == table._index.size
        assert max(kept.column("__part").to_pylist()) < 64
        assert kept.column("n").to_pylist() == kept.column("__low").to_pylist()


def test_pages_that_were_given_back_are_zero_and_can_be_used() -> None:
    array = reserve.reserve((1 << 20, 2), np.dtype(np.int32))
    array[:100_000] = 7
    reserve.release(array, 1_000, 100_000)
    assert (array[:1_000] == 7).all()
    assert not array[2_000:99_000].any()
    array[50_000] = 9
    assert array[50_000].tolist() == [9, 9]


def test_memory_is_not_reserved_where_address_space_is_limited(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reserve.resource, "getrlimit", lambda which: (5 << 30, 5 << 30))
    assert reserve.rows_reserved(8) == 0
    with Sizes(small=512).apply():
        table = StateTable(FIELDS, PARTITIONS)
        table.slots(KeyWords(np.arange(5_000), None))
        assert not table._is_reserved and table.size == 5_000


def test_an_index_is_rebuilt_in_slices() -> None:
    """Without `_grow`, which rebuilds it in one call."""
    index, low = KeyIndex(), np.empty(0, np.int64)
    with mock.patch.object(KeyIndex, "_grow", side_effect=AssertionError):
        for first in range(0, 50_000, 100):
            words = KeyWords(np.arange(first, first + 100), None)
            slots, rows = index.lookup(words)
            assert sorted(slots.tolist()) == [*range(first, first + 100)]
            low = np.concatenate([low, words.low[rows]])
            index.advance(low, np.zeros_like(low), state.SLICE + keys.ADVANCE * rows.size)
    assert index.find(KeyWords(low, None)).tolist() == [*range(50_000)]
    assert index.nbytes <= 12 << 18
