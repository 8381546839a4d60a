"""The watermark against a naive model, however its input is cut into blocks and epochs."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.records import Block, EpochRecord, Range, pack_step
from holdfast.engine.batches import Track
from holdfast.engine.watermark import Watermark, block_steps, cells, track_of

BOUNDARIES = [(10, 0), (7, 3)]
SPLITS = [(0, 0), (0, 1), (2, 0)]
A, B, C = SPLITS


@dataclass
class Part:
    """Some rows of a split, and which splits are idle behind them."""

    split: tuple[int, int]
    times: list[int]
    idle: list[tuple[int, int]]


def parts() -> st.SearchStrategy[list[Part]]:
    times = st.lists(st.integers(-60, 60), min_size=1, max_size=6)
    idle = st.lists(st.sampled_from(SPLITS), max_size=2, unique=True)
    return st.lists(st.builds(Part, st.sampled_from(SPLITS), times, idle), max_size=8)


def naive(given: list[Part]) -> list[int]:
    """The mark after every row."""
    top = dict.fromkeys(SPLITS, Track.NEVER)
    idle: set[tuple[int, int]] = set()
    mark, marks = Track.NEVER, []
    for part in given:
        idle.discard(part.split)
        for number, time in enumerate(part.times):
            top[part.split] = max(top[part.split], time)
            if number == len(part.times) - 1:
                mark = max(mark, min(t for s, t in top.items() if s not in idle))
                idle |= set(part.idle)
            counted = [t for s, t in top.items() if s not in idle]
            mark = max(mark, min(counted) if counted else max(top.values()))
            marks.append(mark)
    return marks


def record_of(given: list[Part], epoch: int = 0, base: int = 0, *, at: dict | None = None):
    """An epoch with these rows; only its last part may say what is idle."""
    at = {} if at is None else at
    ranges = []
    for part in given:
        start = at.get(part.split, 0)
        end = at[part.split] = start + len(part.times)
        steps = block_steps(np.array(part.times, np.int64), start, BOUNDARIES)
        ranges.append(Range(*part.split, start, end, steps))
    idle = tuple(given[-1].idle) if given else ()
    return EpochRecord(epoch, base, tuple(ranges), idle)


def epochs(given: list[Part]) -> list[EpochRecord]:
    """An epoch for each part."""
    at: dict = {}
    bases = itertools.accumulate((len(p.times) for p in given), initial=0)
    return [record_of([p], e, b, at=at) for e, (p, b) in enumerate(zip(given, bases, strict=False))]


def run(mark: Watermark, records: list[EpochRecord]) -> Track:
    """The tracks of all epochs as one."""
    start = mark.value
    tracks = [mark.track(record) for record in records]
    return track_of([(t.seqs[1:], t.marks[1:]) for t in tracks], start)


def cell(mark: int, period: int, offset: int) -> int:
    return (mark - offset) // period


@given(parts())
def test_every_row_finds_the_cells_of_the_naive_watermark(given: list[Part]) -> None:
    track = run(Watermark(SPLITS, BOUNDARIES), epochs(given))
    marks = naive(given)
    found = track.before(np.arange(1, len(marks) + 1))
    for period, offset in BOUNDARIES:
        assert [cell(int(m), period, offset) for m in found] == [
            cell(m, period, offset) for m in marks
        ]


@given(parts())
def test_a_track_has_only_steps_that_matter(given: list[Part]) -> None:
    track = run(Watermark(SPLITS, BOUNDARIES), epochs(given))
    marks = [Track.NEVER, *naive(given)]
    crossed = {
        seq
        for seq, (a, b) in enumerate(itertools.pairwise(marks))
        if any(cell(a, *line) != cell(b, *line) for line in BOUNDARIES)
    }
    assert set(track.seqs[1:].tolist()) == crossed


@given(parts(), st.data())
def test_cutting_blocks_and_epochs_changes_nothing(given: list[Part], data: st.DataObject) -> None:
    finer = []
    for part in given:
        at = data.draw(st.integers(1, len(part.times)))
        finer.append(Part(part.split, part.times[:at], part.idle if at == len(part.times) else []))
        if at < len(part.times):
            finer.append(Part(part.split, part.times[at:], part.idle))
    one, two = Watermark(SPLITS, BOUNDARIES), Watermark(SPLITS, BOUNDARIES)
    a, b = run(one, epochs(given)), run(two, epochs(finer))
    assert a.seqs.tolist() == b.seqs.tolist()
    for line in BOUNDARIES:
        assert cells(a.marks, *line).tolist() == cells(b.marks, *line).tolist()
        assert cell(one.value, *line) == cell(two.value, *line)


@given(parts(), st.data())
def test_a_block_that_is_cut_has_the_steps_of_its_parts(
    given: list[Part], data: st.DataObject
) -> None:
    for part in given:
        if len(part.times) > 1:
            steps = block_steps(np.array(part.times), 100, BOUNDARIES)
            whole = Block(100, 100 + len(part.times), 800, steps)
            first, second = whole.cut(100 + data.draw(st.integers(1, len(part.times) - 1)))
            assert (first.rows + second.rows, first.nbytes + second.nbytes) == (whole.rows, 800)
            ranges = tuple(Range(*part.split, b.start, b.end, b.steps) for b in (first, second))
            marks = [Watermark([part.split], BOUNDARIES) for _ in range(2)]
            one = marks[0].track(EpochRecord(0, 0, (Range(*part.split, 100, whole.end, steps),)))
            two = marks[1].track(EpochRecord(0, 0, ranges))
            assert one.to_bytes() == two.to_bytes()


@given(parts(), st.integers(0, 8))
def test_what_was_saved_goes_on_the_same(given: list[Part], at: int) -> None:
    old, new = Watermark(SPLITS, BOUNDARIES), Watermark(SPLITS, BOUNDARIES)
    records = epochs(given)
    run(old, records[:at])
    new.restore(old.save())
    assert new.value == old.value
    assert run(new, records[at:]).to_bytes() == run(old, records[at:]).to_bytes()
    assert new.save() == old.save()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(1, 5)), max_size=20))
def test_splits_that_are_each_in_order_have_no_late_rows(turns: list[tuple[int, int]]) -> None:
    """However they are read in turns: no row finds a watermark that is past its own time."""
    mark, seq = Watermark(SPLITS, [(1, 0)]), 0
    at = dict.fromkeys(SPLITS, 0)
    for number, rows in turns:
        split = SPLITS[number]
        times = np.arange(at[split], at[split] + rows)
        steps = block_steps(times, at[split], [(1, 0)])
        spans = (Range(*split, at[split], at[split] + rows, steps),)
        track = mark.track(EpochRecord(0, seq, spans))
        assert (track.before(np.arange(seq, seq + rows)) <= times).all()
        at[split] += rows
        seq += rows
    shown = min(at.values())
    assert mark.value == (shown - 1 if shown else Track.NEVER)


def test_a_split_that_a_saved_watermark_did_not_know_has_shown_nothing() -> None:
    """The batch job over a history knows one split of each source."""
    history, live = Watermark([A], [(10, 0)]), Watermark([A, B], [(10, 0)])
    history.advance(A, np.arange(1), np.array([50]))
    live.restore(history.save())
    assert live.value == 50
    live.advance(A, np.arange(1, 2), np.array([90]))
    assert live.value == 50
    live.advance(B, np.arange(2, 3), np.array([70]))
    assert live.value == 70


def test_a_split_without_rows_holds_it_until_idle() -> None:
    mark = Watermark([A, B], [(10, 0)])
    assert mark.advance(A, np.arange(2), np.array([5, 25]))[0].size == 0
    assert mark.value == Track.NEVER
    mark.mark_idle(B)
    assert mark.value == 25
    seqs, marks = mark.advance(A, np.arange(2, 4), np.array([7, 31]))
    assert (seqs.tolist(), marks.tolist()) == ([3], [31])


def test_an_idle_split_that_wakes_never_pulls_it_back() -> None:
    mark = Watermark([A, B], [(10, 0)])
    mark.mark_idle(B)
    mark.advance(A, np.arange(1), np.array([50]))
    assert mark.advance(B, np.arange(1, 3), np.array([20, 30]))[0].size == 0
    assert mark.value == 50
    mark.advance(A, np.arange(3, 4), np.array([90]))
    assert mark.value == 50, "split B counts again and is at 30"
    seqs, marks = mark.advance(B, np.arange(4, 5), np.array([70]))
    assert (seqs.tolist(), marks.tolist()) == ([4], [70])


@pytest.mark.parametrize("told", [[(A, B)], [(A,), (B,)], [(B,), (A,)]])
def test_with_all_splits_idle_it_is_where_the_first_of_them_is(told: list) -> None:
    """Whatever order they are told in; a split without rows has nothing to say."""
    mark = Watermark([A, B, C], [(10, 0)])
    mark.mark_idle(C)
    mark.advance(A, np.arange(1), np.array([50]))
    mark.advance(B, np.arange(1, 2), np.array([20]))
    for splits in told:
        mark.mark_idle(*splits)
    assert mark.value == 50


def test_a_flow_that_goes_on_waits_for_all_splits_again() -> None:
    """Their sources have yet to be heard of: rows of one that is slow must not be late."""
    mark = Watermark([A, B], [(10, 0)])
    mark.mark_idle(B)
    rows = Range(*A, 0, 1, pack_step(0, 50)), Range(*A, 1, 2, pack_step(1, 90))
    mark.track(EpochRecord(0, 0, rows[:1]))
    assert mark.value == 50
    mark.track(EpochRecord(1, 1, rows[1:], awake=True))
    assert mark.value == 50


def test_the_end_is_a_step_of_its_own() -> None:
    mark = Watermark([], [(10, 0)])
    track = mark.track(EpochRecord(0, 7, (), last=True, ended=True))
    assert (track.seqs[1:].tolist(), track.marks[1:].tolist()) == ([7], [Track.END])
    assert mark.value == Track.END


def test_a_summary_has_the_largest_time_of_each_range() -> None:
    steps = pack_step(5, 30) + pack_step(7, 50) + pack_step(9, 40)
    record = EpochRecord(3, 100, (Range(0, 1, 5, 20, steps), Range(1, 0, 0, 1)), ((0, 1),))
    assert record.summary() == EpochRecord(
        3, 100, (Range(0, 1, 5, 20, pack_step(5, 50)), Range(1, 0, 0, 1)), ((0, 1),)
    )


def test_cells_at_the_edges_of_int64() -> None:
    edges = np.array([Track.NEVER, -1, 0, Track.END])
    for period, offset in ((1, 0), (7, 6), (10, 3)):
        exact = [(int(m) - offset) // period for m in edges]
        assert cells(edges, period, offset).tolist() == exact
