"""The watermark against a naive model, however its input is cut."""

from __future__ import annotations

import itertools

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from holdfast.flow.batches import Track
from holdfast.flow.watermark import Watermark, cells, track_of

BOUNDARIES = [(10, 0), (7, 3)]
Blocks = list[tuple[int, list[int]]]
"""Blocks of rows in order: the source, and the rows' times."""


def blocks() -> st.SearchStrategy[Blocks]:
    times = st.lists(st.integers(-60, 60), max_size=6)
    return st.lists(st.tuples(st.integers(0, 2), times), max_size=8)


def naive(given: Blocks, sources: int) -> list[int]:
    """The mark after every row."""
    top = [Track.NEVER] * sources
    marks = []
    for source, times in given:
        for time in times:
            top[source] = max(top[source], time)
            marks.append(min(top))
    return marks


def run(mark: Watermark, given: Blocks) -> Track:
    steps, seq = [], 0
    for source, times in given:
        seqs = np.arange(seq, seq + len(times))
        steps.append(mark.advance(source, seqs, np.array(times, np.int64)))
        seq += len(times)
    return track_of(steps)


def cell(mark: int, period: int, offset: int) -> int:
    return (mark - offset) // period


@given(blocks())
def test_every_row_finds_the_cells_of_the_naive_watermark(given: Blocks) -> None:
    track = run(Watermark([0, 1, 2], BOUNDARIES), given)
    marks = naive(given, 3)
    found = track.before(np.arange(1, len(marks) + 1))
    for period, offset in BOUNDARIES:
        assert [cell(int(m), period, offset) for m in found] == [
            cell(m, period, offset) for m in marks
        ]


@given(blocks())
def test_steps_are_only_those_that_matter(given: Blocks) -> None:
    track = run(Watermark([0, 1, 2], BOUNDARIES), given)
    marks = [Track.NEVER, *naive(given, 3)]
    moves = [
        seq
        for seq, (a, b) in enumerate(itertools.pairwise(marks))
        if any(cell(a, *line) != cell(b, *line) for line in BOUNDARIES)
    ]
    assert track.seqs[1:].tolist() == moves
    assert track.marks[1:].tolist() == [marks[seq + 1] for seq in moves]


@given(blocks(), st.data())
def test_cutting_blocks_changes_nothing(given: Blocks, data: st.DataObject) -> None:
    finer: Blocks = []
    for source, times in given:
        at = data.draw(st.integers(0, len(times)))
        finer += [(source, times[:at]), (source, times[at:])]
    one, two = Watermark([0, 1, 2], BOUNDARIES), Watermark([0, 1, 2], BOUNDARIES)
    a, b = run(one, given), run(two, finer)
    assert a.to_bytes() == b.to_bytes()
    assert one.value == two.value


@given(blocks())
def test_two_machines_together_report_what_one_would(given: Blocks) -> None:
    """Source 0 is here, the others elsewhere: each side observes what the other advances over."""
    filled = [(s, t) for s, t in given if t]
    sides = [Watermark([0, 1, 2], BOUNDARIES) for _ in range(2)]
    steps, seq = [], 0
    for source, times in filled:
        here = sides[min(source, 1)]
        there = sides[1 - min(source, 1)]
        seqs = np.arange(seq, seq + len(times))
        steps.append(here.advance(source, seqs, np.array(times, np.int64)))
        there.observe(source, max(times))
        assert here.value == there.value
        seq += len(times)
    whole = run(Watermark([0, 1, 2], BOUNDARIES), filled)
    assert track_of(steps).to_bytes() == whole.to_bytes()


@given(blocks(), st.integers(0, 8), st.sets(st.integers(0, 2)))
def test_what_was_saved_goes_on_the_same(given: Blocks, at: int, idle: set[int]) -> None:
    old, new = Watermark([0, 1, 2], BOUNDARIES), Watermark([0, 1, 2], BOUNDARIES)
    run(old, given[:at])
    for source in idle:
        old.idle(source)
    new.restore(old.save())
    assert new.value == old.value
    assert run(new, given[at:]).to_bytes() == run(old, given[at:]).to_bytes()
    assert new.save() == old.save()


def test_a_source_without_rows_holds_it_until_idle() -> None:
    mark = Watermark([0, 1], [(10, 0)])
    assert mark.advance(0, np.arange(2), np.array([5, 25]))[0].size == 0
    assert mark.value == Track.NEVER
    mark.idle(1)
    assert mark.value == 25
    seqs, marks = mark.advance(0, np.arange(2, 4), np.array([7, 31]))
    assert seqs.tolist() == [2, 3]
    assert marks.tolist() == [25, 31]


def test_an_idle_source_that_wakes_never_pulls_it_back() -> None:
    mark = Watermark([0, 1], [(10, 0)])
    mark.idle(1)
    mark.advance(0, np.arange(1), np.array([50]))
    assert mark.advance(1, np.arange(1, 3), np.array([20, 30]))[0].size == 0
    assert mark.value == 50
    mark.advance(0, np.arange(3, 4), np.array([90]))
    assert mark.value == 50, "source 1 counts again and is at 30"
    seqs, marks = mark.advance(1, np.arange(4, 5), np.array([70]))
    assert (seqs.tolist(), marks.tolist()) == ([4], [70])


def test_with_all_sources_idle_nothing_moves() -> None:
    mark = Watermark([0, 1], [(10, 0)])
    mark.advance(0, np.arange(1), np.array([50]))
    mark.idle(0)
    mark.idle(1)
    assert mark.value == Track.NEVER


def test_the_end_is_a_step_of_its_own() -> None:
    mark = Watermark([], [(10, 0)])
    seqs, marks = mark.end(7)
    assert (seqs.tolist(), marks.tolist()) == ([7], [Track.END])
    assert mark.value == Track.END


def test_cells_at_the_edges_of_int64() -> None:
    edges = np.array([Track.NEVER, -1, 0, Track.END])
    for period, offset in ((1, 0), (7, 6), (10, 3)):
        exact = [(int(m) - offset) // period for m in edges]
        assert cells(edges, period, offset).tolist() == exact
