"""The model: every state that the machines of pairs reach in a small world."""

from functools import cache

import pytest

from holdfast.lab.model.search import ModelSearch, SearchResult
from holdfast.lab.model.steps import ModelBounds
from holdfast.lab.sim.bugs import BUGS
from holdfast.ui import cli
from tests.support.tiers import rest_nightly

ONE_CRASH = ModelBounds(epochs=1, sources=1, partitions=1, crashes=1)
"""One partition of each stage, one epoch, and a crash of either site."""


@cache
def searched(bounds: ModelBounds, symmetry: bool = True, reduced: bool = False) -> SearchResult:
    found = ModelSearch(bounds, symmetry=symmetry, reduced=reduced).run()
    assert found.problem is None, found.trace
    assert found.complete
    return found


def test_without_faults_every_order_delivers_everything() -> None:
    found = searched(ModelBounds(epochs=2, sources=1, partitions=2, crashes=0))
    assert found.ends == {"all delivered"}
    assert found.states > 1_000


def test_one_crash_at_any_moment_in_every_order() -> None:
    """The crash of either site in any state; take-over, catch-up and fold-in in every order."""
    found = searched(ONE_CRASH)
    assert found.ends == {"all delivered"}
    assert found.states > 10_000


@pytest.mark.nightly
def test_one_false_suspicion_at_any_moment_in_every_order() -> None:
    found = searched(ModelBounds(epochs=1, sources=1, partitions=1, crashes=0, suspicions=1))
    assert found.ends == {"all delivered"}


@pytest.mark.nightly
def test_two_crashes_at_any_moment_in_every_order() -> None:
    """The flow ends with an error only if no live replica of a task is left."""
    found = searched(ModelBounds(epochs=1, sources=1, partitions=1, crashes=2))
    assert found.ends == {"all delivered", "SiteLostError"}


def test_the_reduction_leaves_out_orders_and_nothing_else() -> None:
    """The same ends, and the same steps of machines, in fewer states."""
    whole = searched(ONE_CRASH, symmetry=False)
    reduced = searched(ONE_CRASH, symmetry=False, reduced=True)
    assert reduced.ends == whole.ends
    assert reduced.steps == whole.steps
    assert reduced.states < whole.states


def test_the_numbers_of_sites_make_no_difference() -> None:
    every, named = searched(ONE_CRASH, symmetry=False), searched(ONE_CRASH)
    assert named.ends == every.ends
    assert named.states < every.states


FOUND_SOON = [
    "trim too early",
    "ack ahead",
    "credit leaks",
    "snapshot within an epoch",
    "joiner not counted",
]
FOUND = [*FOUND_SOON, "forgotten ack", "output left out"]


@pytest.mark.parametrize("name", rest_nightly(FOUND, FOUND_SOON))
@pytest.mark.parametrize("reduced", [False, True], ids=["every order", "reduced"])
def test_the_model_finds_a_planted_bug(name: str, reduced: bool) -> None:
    bug = next(bug for bug in BUGS if bug.name == name)
    with bug.planted():
        found = ModelSearch(ONE_CRASH, reduced=reduced).run()
    assert found.problem is not None
    assert len(found.trace) >= found.depth


def test_a_counterexample_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "--bug", "joiner not counted"]) == 1
    said = " ".join(capsys.readouterr().out.split())
    assert "site 0 crashes" in said or "site 1 crashes" in said
    assert "the controller notices that site" in said
    assert "no live replica of that has the next one" in said


def test_the_command_says_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "--crashes", "0"]) == 0
    said = capsys.readouterr().out
    assert "all states:" in said and "states a second" in said


def test_the_command_says_if_time_ran_out(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "--seconds", "0"]) == 2
    assert "not all states:" in capsys.readouterr().out
