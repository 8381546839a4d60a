"""How long flows live under pairs: the Monte Carlo against an exact Markov chain and the papers'
formulas, and Holdfast's own placement and controller."""

import json
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.errors import InvariantError
from holdfast.lab.paper import controlled, mttf, reliability
from holdfast.lab.paper.mttf import formula, scheme_of, shape_of
from holdfast.lab.paper.reliability import Scheme, Times, first_order, simulate
from holdfast.ui.cli import main

# --- an exact chain, state by state ---------------------------------------------------------------

State = tuple[frozenset[int], frozenset[int], int]
"""Places that have a site, units that have their state, standbys that wait."""


def steps(state: State, scheme: Scheme, times: Times, machines: int) -> Iterator[tuple]:
    """The rate of each event and the state after it; None once all replicas of a group are lost."""
    manned, up, idle = state
    broken = machines - len(manned) - idle
    for place in manned:
        left = up - {scheme.unit_of[place]}
        lost = not all(left & set(group) for group in scheme.groups)
        after = None if lost else staffed(manned - {place}, left, idle, scheme)
        yield 1 / times.site_mttf_s, after
    for unit in set(range(scheme.units)) - up:
        if all(p in manned for p in range(scheme.places) if scheme.unit_of[p] == unit):
            yield 1 / times.catch_up_s, (manned, up | {unit}, idle)
    if idle:
        yield idle / times.site_mttf_s, (manned, up, idle - 1)
    if broken:
        yield broken / times.repair_s, staffed(manned, up, idle + 1, scheme)


def staffed(manned: frozenset[int], up: frozenset[int], idle: int, scheme: Scheme) -> State:
    for place in range(scheme.places):
        if idle and place not in manned:
            manned, idle = manned | {place}, idle - 1
    return manned, up, idle


def exact(scheme: Scheme, times: Times, standbys: int) -> float:
    """The mean time from the state in which nothing is broken until a group is lost."""
    places, units = frozenset(range(scheme.places)), frozenset(range(scheme.units))
    states: dict[State, int] = {(places, units, standbys): 0}
    waiting, found = list(states), []
    for state in waiting:
        for rate, after in steps(state, scheme, times, scheme.places + standbys):
            if after is not None and after not in states:
                states[after] = len(states)
                waiting.append(after)
            found.append((states[state], None if after is None else states[after], rate))
    rates = np.zeros((len(states), len(states)))
    for before, after, rate in found:
        rates[before, before] += rate
        if after is not None:
            rates[before, after] -= rate
    return float(np.linalg.solve(rates, np.ones(len(states)))[0])


def chain(places: int) -> Scheme:
    """Chained declustering; on two places both neighbours are the same."""
    found = {tuple(sorted({p, (p + 1) % places})) for p in range(places)}
    return Scheme(tuple(range(places)), tuple(sorted(found)))


def mirrors(places: int) -> Scheme:
    return Scheme(tuple(p * 2 // places for p in range(places)), ((0, 1),))


def triples(places: int) -> Scheme:
    return Scheme(
        tuple(range(places)),
        tuple((p, (p + 1) % places, (p + 2) % places) for p in range(places)),
    )


SCHEMES = [*map(chain, (2, 3, 4, 5)), *map(mirrors, (2, 4, 6)), triples(4)]
SCHEMES += [Scheme.disjoint_pairs(4)]
SECONDS = st.floats(0.05, 50.0)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(SCHEMES), st.integers(0, 2), SECONDS, SECONDS, st.integers(0, 9))
def test_the_monte_carlo_agrees_with_the_exact_chain(
    scheme: Scheme, standbys: int, repair: float, catch_up: float, seed: int
) -> None:
    """From repairs that are nearly immediate to ones that take half as long as a site lives: the
    mean is within 2.5 confidence intervals, and that interval is narrow."""
    times = Times(100.0, repair, catch_up)
    found = simulate(scheme, times, standbys, cycles=4_000, seed=seed)
    right = exact(scheme, times, standbys)
    assert abs(found.mean_s - right) <= 2.5 * found.error_s + 1e-9 * right
    assert found.error_s < right


def test_rare_failures_are_as_easy() -> None:
    """Both replicas are lost once in a hundred million failures of a site."""
    times = Times(1e8, 10.0, 0.1)
    found = simulate(chain(4), times, 1, cycles=20_000)
    assert found.mean_s == pytest.approx(exact(chain(4), times, 1), rel=0.02)
    assert found.error_s < 0.02 * found.mean_s


def test_a_simulation_without_catch_up_disagrees(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check can fail: here a standby has the state at once."""
    times, staff = Times(100.0, 5.0, 5.0), reliability._Cycles._staff

    def hasty(self: reliability._Cycles) -> None:
        staff(self)
        self._up |= self._manned  # every unit is one place

    monkeypatch.setattr(reliability._Cycles, "_staff", hasty)
    found = simulate(chain(4), times, 1, cycles=4_000)
    assert found.mean_s > 1.2 * exact(chain(4), times, 1)


def test_the_same_seed_gives_the_same_figure() -> None:
    assert simulate(chain(4), Times(), 1, 500, 3) == simulate(chain(4), Times(), 1, 500, 3)


# --- what the papers say, and what Holdfast does --------------------------------------------------


@pytest.mark.parametrize("sites", [4, 8, 16, 64])
def test_where_the_formulas_and_the_simulation_differ(sites: int) -> None:
    """Either of a pair may fail first, and in a chain there are two dangerous neighbours."""
    times = Times()
    wrong_by = {"partition pairs": 4.0, "disjoint pairs": 2.0, "cluster pairs": 2.0}
    for approach, factor in wrong_by.items():
        scheme = scheme_of(approach, sites)
        said = formula(approach, sites, times, times.catch_up_s)
        assert said == pytest.approx(factor * first_order(scheme, times, times.catch_up_s))
        found = simulate(scheme, times, standbys=3, cycles=20_000)
        assert found.mean_s * factor == pytest.approx(said, rel=0.03)


def test_holdfast_places_partition_pairs_in_a_chain_and_cluster_pairs_in_two_mirrors() -> None:
    ring = scheme_of("partition pairs", 8)
    assert ring == chain(8)
    assert [ring.dangerous(p) for p in range(8)] == [2] * 8
    assert [scheme_of("partition pairs", 2).dangerous(p) for p in range(2)] == [1, 1]
    halves = scheme_of("cluster pairs", 8)
    assert halves.units == 2 and [halves.dangerous(p) for p in range(8)] == [4] * 8


@cache
def under_the_controller(approach: str, sites: int, standbys: int) -> float:
    times = Times(1e7, 600.0, 5.0)
    return controlled.simulate(shape_of(approach), sites, standbys, times, 1_000).mean_s


def test_the_controller_agrees_with_the_model_where_it_does_the_same() -> None:
    """With cluster pairs a mirror is rebuilt at once, on a standby or after the repair."""
    times = Times(1e7, 600.0, 5.0)
    for sites in (2, 4):
        scheme = scheme_of("cluster pairs", sites)
        right = exact(scheme, times, 0)
        assert under_the_controller("cluster pairs", sites, 0) == pytest.approx(right, rel=0.02)
        right = first_order(scheme, times, times.catch_up_s)
        assert under_the_controller("cluster pairs", sites, 1) == pytest.approx(right, rel=0.2)


def test_without_standbys_the_controller_rebuilds_on_the_sites_that_are_left() -> None:
    times = Times(1e7, 600.0, 5.0)
    waits = first_order(scheme_of("partition pairs", 4), times, times.without_standby())
    assert under_the_controller("partition pairs", 4, 0) > 20 * waits
    assert under_the_controller("cluster pairs", 4, 0) < 1.1 * waits


def test_the_sites_that_count_as_fatal_end_the_flow_and_no_others_do() -> None:
    for approach in mttf.GRANULARITIES:
        ended = 0
        for seed in range(12):
            world = controlled.ControlledSites(shape_of(approach), 4, 1, Times(50, 9, 9), seed)
            for _ in range(10 + seed):
                world.step(controlled._Sum())
            fatal, victim = world.fatal(), world.random.choice(world.alive)
            if victim in fatal:
                with pytest.raises(InvariantError, match="the flow has ended"):
                    world._fail(victim)
                ended += 1
            else:
                world._fail(victim)
        assert 0 < ended < 12


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mttf, "QUICK", mttf.MttfEffort(200, 60, (4, 16)))
    out, found = tmp_path / "figures", tmp_path / "found.json"
    words = ["paper", "mttf", "--quick", "--catch-up", "3", "--out", str(out), "--json", str(found)]
    assert main(words) == 0
    result = json.loads(found.read_text())
    assert result["catch_up_s"] == 3.0 and set(result["tables"]) == {"standby", "alone", "standbys"}
    for name, table in result["tables"].items():
        assert all(len(s["values"]) == len(table["places"]) for s in table["series"])
        assert {s["who"] for s in table["series"]} == {
            "paper",
            "first order",
            "Monte Carlo",
            "Holdfast",
        }
        assert table["notes"]
        ET.parse(out / f"mttf-{name}.svg")
    with pytest.raises(SystemExit):
        main(["paper", "mttf", "--repair", "0"])
