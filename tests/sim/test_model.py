"""The model: every state that the machines of pairs reach in a small world."""

import pytest

from holdfast.lab.model.search import ModelSearch, SearchResult
from holdfast.lab.model.world import ModelBounds
from holdfast.lab.sim.bugs import BUGS
from holdfast.ui import cli


def searched(bounds: ModelBounds) -> SearchResult:
    found = ModelSearch(bounds).run()
    assert found.problem is None, found.trace
    assert found.complete
    return found


def test_without_faults_every_order_delivers_everything() -> None:
    found = searched(ModelBounds(epochs=2, sources=1, partitions=2, crashes=0))
    assert set(found.ends) == {"all delivered"}
    assert found.states > 2_000


def test_one_crash_at_any_moment_in_every_order() -> None:
    """The crash of either site in any state; take-over, catch-up and fold-in in every order."""
    found = searched(ModelBounds(epochs=1, sources=1, partitions=1, crashes=1))
    assert set(found.ends) == {"all delivered"}
    assert found.states > 10_000


@pytest.mark.parametrize(
    "name", ["trim too early", "ack ahead", "snapshot within an epoch", "forgotten ack"]
)
def test_the_model_finds_a_planted_bug(name: str) -> None:
    bug = next(bug for bug in BUGS if bug.name == name)
    with bug.planted():
        found = ModelSearch(ModelBounds(epochs=1, sources=1, partitions=1, crashes=1)).run()
    assert found.problem is not None


def test_a_counterexample_can_be_read(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["model", "--epochs", "2", "--crashes", "0", "--bug", "trim too early"]
    assert cli.main(arguments) == 1
    said = capsys.readouterr().out
    assert "site 0 works on source/0" in said


def test_the_command_says_what_it_took(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["model", "--crashes", "0"]) == 0
    said = capsys.readouterr().out
    assert "all states:" in said and "states a second" in said
