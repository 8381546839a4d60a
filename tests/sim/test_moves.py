"""Simulated runs in which replicas move, sites are emptied and others come, among faults."""

import pytest

from holdfast.lab.sim.explore import PROTOCOLS, Case, run
from tests.support.tiers import nightly

PLAIN = [p for p in PROTOCOLS if p not in ("dataflow", "cluster")]


@pytest.mark.parametrize("protocol", PLAIN)
def test_moves_change_nothing(protocol: str) -> None:
    """Without faults: whatever is moved, the rows are the same, and nothing is exposed."""
    for seed in range(3):
        outcome = run(Case(seed, protocol=protocol, moves=12, groups=1 + seed % 2, faults=()))
        assert outcome.problem is None, (outcome.case, outcome.problem)


@pytest.mark.parametrize("protocol", PLAIN)
@pytest.mark.parametrize("flow", ["dmz", "windows", nightly("joins"), nightly("pushed")])
def test_moves_among_faults(flow: str, protocol: str) -> None:
    for seed in range(4):
        case = Case(seed, flow, protocol, moves=8, groups=1 + seed % 2)
        outcome = run(case)
        assert outcome.problem is None, (case, outcome.problem)


@pytest.mark.parametrize("then", ["passive", "upstream", "active"])
def test_protection_changes_among_moves(then: str) -> None:
    for seed in range(4):
        case = Case(seed, "windows", "pairs", then=then, moves=8)
        outcome = run(case)
        assert outcome.problem is None, (case, outcome.problem)
