"""Seeds, faults and checks: the simulator on flows that are right, and on ones that are not."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from holdfast.lab.sim import exhaust
from holdfast.lab.sim.bugs import BUGS
from holdfast.lab.sim.explore import ALONE, MIRRORED, PROTOCOLS, Case, run, shrink
from holdfast.lab.sim.faults import KINDS, PAIRS, PHASES, Fault, schedule
from holdfast.lab.sim.flows import FLOWS
from holdfast.lab.sim.planted import Bug
from holdfast.ui import cli
from tests.support import find_seeds
from tests.support.tiers import nightly


def named(name: str) -> Bug:
    return next(bug for bug in BUGS if bug.name == name)


FLOWS_AND_PROTOCOLS = [
    *((flow, "pairs") for flow in sorted(FLOWS)),
    ("times", "upstream"),
    *(("timeouts", protocol) for protocol in ("upstream", "rollback")),
    *((flow, "passive") for flow in ("windows", "times", "timeouts", "dmz")),
    *((flow, protocol) for flow in ("joins", "windows") for protocol in ("passive-2", "active-3")),
    ("joins", "upstream"),
    ("windows", "active"),
    ("dmz", "upstream"),
    ("pushed", "triples"),
    *((flow, protocol) for flow in ("dmz", "windows") for protocol in MIRRORED),
]
FAST = {("dmz", "pairs"): 20}
"""How many runs of a flow every change must pass, if not 5: in these are one that ends while it
recovers and one whose buffers are small. ``holdfast sim`` tries any number."""
NIGHTLY = {("dmz", "pairs"): 120, ("times", "upstream"): 40}
"""How many are tried nightly, if not 20."""
AT_ONCE = 20


def parts() -> Iterator[Any]:
    """Seeds from, and up to, of every flow."""
    for what in FLOWS_AND_PROTOCOLS:
        fast = FAST.get(what, 5)
        yield *what, 0, fast
        for first in range(fast, NIGHTLY.get(what, 20), AT_ONCE):
            yield nightly(*what, first, min(first + AT_ONCE, NIGHTLY.get(what, 20)))


@pytest.mark.parametrize(("flow", "protocol", "first", "end"), list(parts()))
def test_whatever_goes_wrong_the_result_is_right(
    flow: str, protocol: str, first: int, end: int
) -> None:
    outcomes = [run(Case(seed, flow, protocol)) for seed in range(first, end)]
    assert not [(o.case.seed, o.problem) for o in outcomes if o.problem is not None]
    assert any(outcome.done for outcome in outcomes)


TWO_PROTOCOLS = [
    *itertools.permutations(sorted(PROTOCOLS.keys() - {*ALONE}), 2),
    ("passive", "passive-2"),
    ("passive-2", "passive"),
    ("passive-2", "upstream"),
    ("upstream", "passive-2"),
    ("pairs", "active-3"),
    ("active-3", "passive-2"),
]


@pytest.mark.parametrize("runs", [2, nightly(10)])
@pytest.mark.parametrize(("first", "second"), TWO_PROTOCOLS)
def test_neighbours_are_protected_in_different_ways(first: str, second: str, runs: int) -> None:
    """The two stages of a flow, every protection before and behind every other; with crashes."""
    cases = [Case(s, "times", second, first=first, kinds=("crash",)) for s in range(runs)]
    outcomes = [run(case) for case in cases]
    assert not [(o.case.seed, o.problem) for o in outcomes if o.problem is not None]
    assert any(outcome.done for outcome in outcomes)


@pytest.mark.parametrize("runs", [2, nightly(10)])
@pytest.mark.parametrize(("before", "after"), TWO_PROTOCOLS)
def test_protection_changes_while_things_go_wrong(before: str, after: str, runs: int) -> None:
    ends = itertools.cycle(("pairs", "upstream"))
    cases = [Case(s, "times", next(ends), before, after) for s in range(runs)]
    outcomes = [run(case) for case in cases]
    assert not [(o.case.seed, o.problem) for o in outcomes if o.problem is not None]
    assert any(outcome.guards == outcome.case.guards for outcome in outcomes)


JOINS_AT_THE_END = (
    Fault("crash", 0.056248, who=8),
    Fault("crash", 0.056248, "transferring", who=0),
    Fault("crash", 0.056248, "folding in", who=11),
)
FAILS_WITHOUT_A_CONTROLLER = (
    Fault("crash", 0.01248, who=6),
    Fault("block", 0.01248, "without a controller", who=9, other=3, seconds=0.146878),
    Fault("old leader", 0.01248, "taken over", who=9),
)
# The donor says that it cannot hand over to a controller whose next view is never committed.
FAILED_REPLICA_IS_NOT_COMMITTED = (
    Fault("cut off", 0.015411782198, who=1, other=8, seconds=0.18493009),
    Fault("arbiter", 0.015411782198, "joining", who=4, other=1, seconds=0.031497893),
    Fault("controller", 0.015411782198, "replaying", who=6),
)


@pytest.mark.parametrize(
    "case",
    [
        Case(57, "windows", faults=JOINS_AT_THE_END),
        Case(4, "poison", faults=FAILS_WITHOUT_A_CONTROLLER),
        Case(85, sites=3, faults=FAILED_REPLICA_IS_NOT_COMMITTED),
        Case(70013, "dmz"),
    ],
    ids=[
        "joins at the end",
        "fails without a controller",
        "failed replica is not committed",
        "an old leader speaks while a view is on its way",
    ],
)
def test_schedules_that_once_failed(case: Case) -> None:
    assert run(case).problem is None


def test_three_replicas_outlive_two_crashes() -> None:
    at_once = (Fault("crash of two", 0.04, who=1, other=2),)
    outcome = run(Case(1, "windows", "triples", sites=5, faults=at_once))
    assert outcome.problem is None and outcome.done == [("protected", "crash of two")]


def test_what_exceeds_the_promise_ends_in_a_stop() -> None:
    both = (Fault("crash of two", 0.03, who=0, other=0, beyond=True),)
    outcome = run(Case(1, "windows", sites=3, faults=both))
    assert outcome.problem is None and outcome.stopped


def test_the_same_seed_gives_the_same_run() -> None:
    one, other = (run(Case(5, "windows"), trace=True) for _ in range(2))
    assert one.log == other.log and one.trace == other.trace
    assert one.log != run(Case(6, "windows")).log


def test_faults_are_drawn_from_all_kinds_and_phases() -> None:
    drawn = [schedule(seed, 0.1) for seed in range(len(PAIRS))]
    assert [(faults[-1].phase, faults[-1].kind) for faults in drawn] == PAIRS
    assert {len(faults) for faults in drawn} == {1, 2, 3}
    assert len(PAIRS) == len(set(PAIRS)) == len(KINDS) * len(PHASES) - 1


def test_a_schedule_that_fails_is_made_small() -> None:
    bug = named("trim too early")
    with bug.planted():
        small = shrink(Case(3, "windows"))
        assert small.faults == (), "it needs no fault at all"
        assert run(small).problem is not None
    assert run(small).problem is None


def test_what_right_code_has_done_does_not_hide_a_bug() -> None:
    bug = named("state not counted")
    seed = find_seeds.stored()[bug.name]
    cases = [bug.case(s) for s in (seed, seed + 1)]
    assert not any(run(case).problem for case in cases)
    with bug.planted():
        assert any(run(case).problem for case in cases)
    assert not any(run(case).problem for case in cases)


@pytest.mark.parametrize("bug", BUGS, ids=[b.name for b in BUGS])
def test_a_planted_bug_is_caught(bug: Bug) -> None:
    """By the seed that is stored for it."""
    seed = find_seeds.stored().get(bug.name)
    assert seed is not None, f"no seed is stored that catches it; {find_seeds.AGAIN}"
    assert find_seeds.catches(bug, seed), f"seed {seed} does not catch it now; {find_seeds.AGAIN}"


@pytest.mark.nightly
@pytest.mark.parametrize("bug", BUGS, ids=[b.name for b in BUGS])
def test_a_planted_bug_is_caught_from_scratch(bug: Bug) -> None:
    assert find_seeds.first_seed(bug) is not None, bug.what


def test_seeds_are_stored_of_planted_bugs_only() -> None:
    """Of those that have none, the test above tells."""
    assert find_seeds.stored().keys() <= {bug.name for bug in BUGS}, find_seeds.AGAIN


def test_there_are_enough_bugs_and_the_code_is_as_it_was() -> None:
    assert len({bug.name for bug in BUGS}) == len(BUGS) >= 15
    for bug in BUGS:
        right = bug.owner.__dict__[bug.method]
        with bug.planted():
            assert bug.owner.__dict__[bug.method] is not right
        assert bug.owner.__dict__[bug.method] is right


# --- exhaustively -------------------------------------------------------------------------------


def test_every_crash_point_of_a_small_flow() -> None:
    paths = list(exhaust.one_crash())
    assert len(paths) > 100
    wrong = [path for path in paths if exhaust.run(path)[1] is not None]
    assert not wrong


def test_orders_close_to_a_crash_and_second_crashes() -> None:
    """A part of them; ``holdfast sim --exhaustive`` tries all."""
    paths = [*list(exhaust.preempted(every=67)), *list(exhaust.two_crashes(every=31))]
    assert len(paths) > 100
    wrong = [path for path in paths if exhaust.run(path)[1] is not None]
    assert not wrong


def test_exhaustion_finds_a_bug() -> None:
    with named("record on one replica").planted():
        assert any(exhaust.run(path)[1] is not None for path in exhaust.one_crash())


# --- the command --------------------------------------------------------------------------------


def test_the_command_explores(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sim", "--seeds", "4", "--flow", "windows"]) == 0
    assert "4 runs, all right" in capsys.readouterr().out


def test_the_command_shows_a_failure(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["sim", "--seeds", "4", "--bug", "trim too early", "--out", str(tmp_path)]
    assert cli.main(arguments) == 1
    said = capsys.readouterr().out
    assert "seed 0 fails" in said and "--trace" in said
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".txt"}


def test_the_command_replays(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    again = ["sim", "--seed", "3", "--trace", "--flow", "windows", "--out", str(tmp_path)]
    assert cli.main(again) == 0
    assert "ended with the right rows" in capsys.readouterr().out


def test_an_unknown_bug_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sim", "--bug", "none such"]) == 2
    assert "trim too early" in capsys.readouterr().err
