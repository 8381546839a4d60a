"""The search over everything that runs differ in, and what it reports."""

from pathlib import Path

import pytest

from holdfast.core import flow_phase, leadership, replica
from holdfast.lab.sim.bugs import BUGS
from holdfast.lab.sim.edges import EDGES, Edge, reached, share, summary
from holdfast.lab.sim.explore import PROTOCOLS, Case, Failure, run
from holdfast.lab.sim.faults import STARTING, Fault
from holdfast.lab.sim.flows import FLOWS
from holdfast.lab.sim.planted import Bug
from holdfast.lab.sim.search import GROUP, UNMIXED, drawn
from holdfast.ui import cli
from tests.support.find_seeds import stored


def named(name: str) -> Bug:
    return next(bug for bug in BUGS if bug.name == name)


def test_seeds_draw_everything_that_runs_differ_in() -> None:
    cases = [drawn(seed) for seed in range(0, 1600, 2)]
    assert {case.flow for case in cases} == set(FLOWS)
    assert {case.protocol for case in cases} == set(PROTOCOLS)
    mixable = PROTOCOLS.keys() - set(UNMIXED)
    assert {case.first for case in cases} == mixable | {None}
    assert {case.then for case in cases} == mixable | {None}
    assert {case.apps for case in cases} == {0, 2, 3}
    assert len({case.sites for case in cases}) == len({0, 3, 4, 6, 7})
    assert not [c for c in cases if c.protocol in UNMIXED and (c.first or c.then or c.apps)]


def test_a_seed_draws_one_case_and_its_group_shares_the_flow() -> None:
    assert [drawn(seed) for seed in range(40)] == [drawn(seed) for seed in range(40)]
    shared = {(c.flow, c.protocol, c.first, c.rows_in) for c in map(drawn, range(GROUP))}
    assert len(shared) == 1


def test_the_command_says_what_it_has_tried(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sim", "--minutes", "0", "--seed", "3"]) == 0
    said = capsys.readouterr().out
    assert "seeds from 0" in said and f"{GROUP} runs" in said
    for what in ("flows: ", "protocols: ", "sites: ", "applications: ", "(state, event) pairs: "):
        assert what in said
    assert "not reached: flow: DRAIN_REQUESTED in RUNNING" in said


def test_a_seed_that_fails_is_shown_with_its_smallest_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with named("trim too early").planted():  # the search's processes inherit it
        assert cli.main(["sim", "--minutes", "0", "--out", str(tmp_path)]) == Failure.CRASH.value
        said = capsys.readouterr().out
        assert "seed 0 fails" in said and "crash" in said
        assert " ms" not in said.split("seed 0 fails")[1], "it needs no fault at all"
        again = "sim --drawn --seed 0 --trace"
        assert f"again: holdfast {again}" in said
        status = cli.main([*again.split(), "--out", str(tmp_path)])
    assert status == Failure.CRASH.value
    assert {path.suffix for path in tmp_path.iterdir()} == {".svg", ".txt"}


@pytest.mark.parametrize(
    ("bug", "failure"),
    [
        ("trim too early", Failure.CRASH),
        ("ack ahead", Failure.WRONG),
        ("lease not watched", Failure.STALL),
    ],
)
def test_the_exit_status_tells_a_crash_a_wrong_result_and_a_stall(
    bug: str, failure: Failure, tmp_path: Path
) -> None:
    seed = str(stored()[bug])
    said = ["sim", "--bug", bug, "--seed", seed, "--trace", "--out", str(tmp_path)]
    assert cli.main(said) == failure.value
    assert len({kind.value for kind in Failure} | {0, 2}) == len(Failure) + 2


def test_a_site_may_fail_before_the_flow_has_started() -> None:
    early = Fault("crash", 0.0001, STARTING, who=1)
    with reached() as edges:
        outcome = run(Case(0, "times", sites=4, apps=1, rows_in=300, faults=(early,)))
    assert outcome.problem is None and outcome.done == [(STARTING, "crash")]
    assert Edge("flow", "GATHERING", "SITE_LOST") in edges
    assert any(f.phase == STARTING for seed in range(80) for f in drawn(seed).schedule())


# --- pairs of the machines' tables ----------------------------------------------------------------


def test_pairs_are_recorded_for_as_long_as_somebody_watches() -> None:
    before = replica.Replica._become
    with reached() as edges:
        assert run(Case(11, "windows", sites=3)).problem is None
    assert replica.Replica._become is before
    assert Edge("flow", "GATHERING", "PLACED") in edges
    assert Edge("leadership", "FOLLOWING", "LeadGranted") in edges
    assert Edge("replica", "INSTALLING", "STATE_COMPLETE") in edges
    assert edges <= EDGES
    assert 0 < share(edges) < 1


def test_all_tables_count() -> None:
    sizes = {
        "replica": len(replica.TABLE) + len(replica.STALE),
        "flow": len(flow_phase.TABLE),
        "leadership": len(leadership.TABLE),
    }
    for name, size in sizes.items():
        assert len([edge for edge in EDGES if edge.machine == name]) == size
    assert summary(set(EDGES)).startswith(f"replica {sizes['replica']} of {sizes['replica']}")
