"""Several applications: who leads, who is obeyed, and what must not happen when both believe to.

The first tests show defects that the real control had, and that the simulator finds now that it
runs it: once with the code as it was (a planted bug), once as it is.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from holdfast.core import requests
from holdfast.core.leadership import Role
from holdfast.errors import InvariantError
from holdfast.lab.sim import flows
from holdfast.lab.sim.bugs import BUGS
from holdfast.lab.sim.checks import WorldChecks
from holdfast.lab.sim.explore import OPTIONS, PROTOCOLS, Case, run
from holdfast.lab.sim.faults import APP_KINDS, Fault
from holdfast.lab.sim.planted import Bug
from holdfast.lab.sim.timed import TimedWorld

LEASE = OPTIONS.lease_s


def named(name: str) -> Bug:
    return next(bug for bug in BUGS if bug.name == name)


@contextmanager
def planted(*names: str) -> Iterator[None]:
    with ExitStack() as stack:
        for name in names:
            stack.enter_context(named(name).planted())
        yield


def two_applications(seed: int = 1, apps: int = 2) -> TimedWorld:
    flow = flows.make("windows", PROTOCOLS["pairs"], flows.ROWS)
    world = TimedWorld(flow, sites=4, seed=seed, options=OPTIONS, free_rows=300, apps=apps)
    until(world, lambda: world.controller.protected)
    return world


def until(world: TimedWorld, holds: object, within: float = 3.0) -> None:
    deadline, checks = world.time + within, WorldChecks(world)
    while not holds():  # type: ignore[operator]
        assert not world.over and world.time < deadline, world.describe()
        assert world.step()
        checks.step()


def finish(world: TimedWorld) -> None:
    """The flow ends with the right rows."""
    until(world, lambda: not world.leaderless and world.controller.protected)
    world.gate_is_open = True
    while not world.over:
        assert world.step() and world.steps < 60_000, world.describe()
    checks = WorldChecks(world)
    checks.all()
    checks.end("windows", flows.ROWS)


# --- defects that there were --------------------------------------------------------------------


def a_leader_that_lost_the_arbiter_ends_the_flow() -> None:
    world = two_applications()
    world.applications.cut_off_from_arbiter(0, 10 * LEASE)
    until(world, lambda: world.controls[1].leading is not None)
    world.control(0, requests.StopRequested(drain=False))
    until(world, lambda: world.time > world.applications.cut_off_until[0] - 8 * LEASE)
    finish(world)


def test_a_leader_that_has_lost_the_arbiter_does_not_end_what_another_leads() -> None:
    a_leader_that_lost_the_arbiter_ends_the_flow()


def test_the_code_as_it_was_ended_it() -> None:
    with (
        planted("end not committed", "lease not watched"),
        pytest.raises(InvariantError, match="application 0 gives orders in term 1 of 2"),
    ):
        a_leader_that_lost_the_arbiter_ends_the_flow()


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("fences outlive the term", "was fenced, and is in view"),
        ("start not committed", "no live producer has the next one"),
    ],
)
def test_what_was_wrong_is_found_and_mended(name: str, said: str) -> None:
    bug = named(name)
    with bug.planted():
        outcomes = [run(bug.case(seed)) for seed in range(3)]
    assert any(said in str(outcome.problem) for outcome in outcomes)
    assert [run(bug.case(seed)).problem for seed in range(3)] == [None] * 3


AT_THE_START = (
    Fault("crash", 0.034, who=11),
    Fault("no arbiter", 0.034, "unnoticed", seconds=0.14),
)


@pytest.mark.parametrize(
    "case",
    [
        Case(
            125,
            apps=2,
            faults=(
                Fault("crash", 0.034, who=11),
                Fault("no arbiter", 0.034, "unnoticed", seconds=0.14),
            ),
        ),
        Case(30, "windows", apps=3),
        Case(100, "windows", apps=3),
        Case(102, "windows", apps=3),
    ],
    ids=["crash at the start", "sequencer elsewhere", "application at the start", "silent early"],
)
def test_schedules_that_once_failed(case: Case) -> None:
    """A site is lost before the flow runs, and with it a leader that could not commit so."""
    assert run(case).problem is None


# --- attacks ------------------------------------------------------------------------------------


def test_a_leader_that_was_stopped_gives_no_orders_when_it_wakes() -> None:
    """Whatever came meanwhile waits for it: also what would make a leader act."""
    world = two_applications()
    world.applications.stop(0, 3 * LEASE)
    until(world, lambda: world.controls[1].leading is not None)
    assert world.controls[0].leading is not None, "it does not know"
    world.crash(next(s for s in world.nodes if world.home[s] == 0))
    until(world, lambda: world.controls[0].leading is None)
    assert world.leader == 1
    finish(world)


@pytest.mark.parametrize("answers", [1, 2, 3])
def test_commits_whose_answers_get_lost_are_not_a_successors(answers: int) -> None:
    world = two_applications()
    world.applications.lose_answers(0, answers)
    world.crash(min(world.nodes))
    finish(world)
    assert world.controls[0].term == world.ledger.record.entry.term or world.leader == 1


def test_a_session_that_ends_while_a_commit_is_under_way() -> None:
    world = two_applications()
    world.crash(min(world.nodes))
    until(world, lambda: world.controls[0].leadership.role is Role.COMMITTING)
    world.applications.lose_session()
    until(world, lambda: world.controller.term == 2)
    finish(world)


@pytest.mark.parametrize("steps", range(0, 12, 2))
def test_a_controller_dies_between_what_it_asks_and_the_answer(steps: int) -> None:
    """The commit went through, or it did not; a successor goes on from what there is."""
    world = two_applications(seed=steps)
    world.crash(max(world.nodes))
    until(world, lambda: world.controls[0].leadership.role is Role.COMMITTING)
    for _ in range(steps):
        world.step()
    world.crash_controller(0)
    finish(world)


def test_the_same_application_leads_again_in_a_new_term() -> None:
    """Nobody else is there: it steps down by its own clock, and the arbiter gives it another."""
    world = two_applications(apps=1)
    world.applications.away_until = world.time + 2 * LEASE
    until(world, lambda: world.leaderless)
    until(world, lambda: world.controls[0].leading is not None)
    assert world.controls[0].term >= 2
    finish(world)


def test_the_end_is_not_said_twice_nor_to_some_only() -> None:
    """The leader dies right when it has committed the end: the other finds it there."""
    world = two_applications()
    world.gate_is_open = True
    until(world, lambda: world.controls[0].leadership.role is Role.ENDING)
    until(world, lambda: world.ledger.known is not None and world.ledger.known.ended)
    world.crash_controller(0)
    while not world.over:
        assert world.step() and world.steps < 60_000
    assert world.error is None and world.controls[1].over


def test_a_leader_dies_while_it_ends_the_flow_and_the_other_ends_it() -> None:
    world = two_applications()
    world.gate_is_open = True
    world.applications.cut_off_until[0] = world.time + 100 * LEASE
    until(world, lambda: world.controls[1].leading is not None)
    while not world.over:
        assert world.step() and world.steps < 60_000
    assert world.controls[1].over and world.ledger.known is not None and world.ledger.known.ended


@pytest.mark.parametrize(("apps", "first"), [(2, 0), (2, 10), (3, 0), (3, 10)])
def test_seeds_with_several_applications(apps: int, first: int) -> None:
    """More of them: ``holdfast sim --apps 2``."""
    outcomes = [run(Case(seed, "windows", apps=apps)) for seed in range(first, first + 10)]
    assert not [(o.case.seed, o.problem) for o in outcomes if o.problem is not None]
    assert any(kind in APP_KINDS for outcome in outcomes for _, kind in outcome.done)


def test_some_seeds_have_several_applications() -> None:
    counts = [Case(seed).applications for seed in range(64)]
    assert (counts.count(1), counts.count(2), counts.count(3)) == (56, 4, 4)
