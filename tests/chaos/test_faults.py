"""Choosing faults: a function of the seed, and never more than a protection promises to survive."""

from collections import Counter
from itertools import islice

import pytest

from holdfast.lab.chaos.faults import (
    KILL,
    KINDS,
    NAP,
    TWO_KILLS,
    ChaosFault,
    candidates,
    faults,
    survivable,
)
from holdfast.lab.chaos.load import PROTECTIONS, Absence, Load, _once
from holdfast.lab.workloads.paced import Delivery
from holdfast.plan.planner import plan


def fault(kind, rank: int) -> ChaosFault:
    return ChaosFault(0, kind, rank, 0.0, 0.0, False)


def partition(
    *replicas: int, phase: str = "protected", standbys: tuple[int, ...] = (), stage: str = "s"
) -> dict:
    return {"stage": stage, "replicas": list(replicas), "standbys": list(standbys), "phase": phase}


def test_the_same_seed_gives_the_same_faults() -> None:
    first, again, other = (list(islice(faults(seed, KINDS), 200)) for seed in (5, 5, 6))
    assert first == again != other
    assert [f.number for f in first] == list(range(200))


def test_every_kind_has_its_share() -> None:
    deck = sum(k.weight for k in KINDS)
    dealt = Counter(f.kind for f in islice(faults(1, KINDS), 3 * deck))
    assert dealt == {k: 3 * k.weight for k in KINDS}
    assert any(f.overlaps for f in islice(faults(1, KINDS), 50))


def test_victims_are_chosen_by_rank_among_the_living() -> None:
    assert candidates(fault(KILL, 6), {14, 3, 8, 20}) == [(14,), (20,), (3,), (8,)]
    assert candidates(fault(TWO_KILLS, 0), {4, 2}) == [(2, 4)]
    assert candidates(fault(TWO_KILLS, 9), {4}) == []
    assert candidates(fault(NAP, 9), set()) == []


def test_a_replica_of_everything_must_be_left_and_be_up_to_date() -> None:
    ring = [partition(0, 1), partition(1, 2), partition(2, 3), partition(3, 0)]
    assert survivable(ring, {0})
    assert survivable(ring, {0, 2})
    assert not survivable(ring, {0, 1})
    assert not survivable([*ring, partition(0, phase="copying")], {0})
    replaying = partition(0, 4, phase="replaying")
    assert survivable([replaying], {4})
    assert not survivable([replaying], {0}), "4 is not up to date yet"


def test_who_stands_by_can_go_on() -> None:
    ring = [partition(0, standbys=(1,)), partition(1, standbys=(2,))]
    assert survivable(ring, {0}) and survivable(ring, {1})
    assert not survivable(ring, {0, 1})


def test_what_is_rebuilt_needs_no_replica_but_the_ends_do() -> None:
    flow = [
        partition(0, 1, stage="in"),
        partition(2, stage="windows"),
        partition(3, 2, stage="out"),
    ]
    assert survivable(flow, {2}, {"windows"}) and survivable(flow, {0, 2}, {"windows"})
    assert not survivable(flow, {2, 3}, {"windows"})
    assert not survivable(flow, {2})


@pytest.mark.parametrize("protection", PROTECTIONS)
def test_every_protection_has_a_flow(protection: str) -> None:
    load = Load.of(protection)
    anew = PROTECTIONS[protection].rebuild_level > 0
    assert plan(load.flow("")).sinks and bool(load.rebuilt()) == anew == (load.name == "windows")


# --- what is a repeated row ---------------------------------------------------------------------


def line(epoch: int, at: float, writer: int, digest: int = 7, rows: int = 3) -> Delivery:
    return Delivery(epoch, at, rows, digest, (1.0, 1.0), writer)


def test_a_line_that_comes_twice_is_repeated() -> None:
    kept, late, repeated, differing = _once([line(0, 1.0, 1), line(0, 2.0, 2)], [])
    assert (len(kept), late, repeated, differing) == (1, 0, 3, set())


def test_what_a_fenced_site_adds_late_is_dropped_if_it_says_the_same() -> None:
    slept = Absence(1, since=1.5, until=4.0)
    lines = [line(0, 1.0, 1), line(1, 2.0, 2), line(1, 3.0, 1)]
    assert _once(lines, [slept])[1:] == (1, 0, set())
    assert _once([*lines, line(0, 2.0, 2)], [slept])[1:] == (1, 3, set()), "written before it slept"
    other = line(1, 3.0, 1, digest=8)
    assert _once([lines[1], other], [slept])[3] == {1}
