"""Simulated runs in which planned moves met the wrong moment."""

from collections.abc import Callable

import pytest

from holdfast.core.requests import SitesWanted
from holdfast.lab.sim import flows
from holdfast.lab.sim.explore import OPTIONS, PROTOCOLS, Case, run
from holdfast.lab.sim.faults import Fault
from holdfast.lab.sim.timed import TimedWorld


def protected(apps: int = 1) -> TimedWorld:
    flow = flows.make("windows", PROTOCOLS["pairs"], flows.ROWS)
    world = TimedWorld(flow, sites=4, seed=1, options=OPTIONS, free_rows=300, apps=apps)
    until(world, lambda: world.controller.protected)
    return world


def until(world: TimedWorld, holds: Callable[[], bool], within: float = 3.0) -> None:
    deadline = world.time + within
    while not holds():
        assert not world.over and world.time < deadline, world.describe()
        assert world.step()


@pytest.mark.parametrize(
    "case",
    [
        Case(
            5132,
            protocol="rollback",
            rows_in=600,
            moves=5,
            groups=2,
            faults=(
                Fault("crash", 0.005751282977695185, "folding in", 0, 6),
                Fault("controller", 0.09000760715091992, "folding in", 11, 8),
            ),
        ),
        Case(
            5140,
            protocol="passive-2",
            rows_in=600,
            moves=20,
            groups=2,
            faults=(
                Fault("controller", 0.019622405166345124, None, 6, 11),
                Fault("crash", 0.059488637445044415, "joining", 10, 8),
                Fault("crash", 0.15715672492346103, None, 7, 7),
            ),
        ),
    ],
    ids=str,
)
def test_the_leaver_of_a_stage_with_a_standby_dies(case: Case) -> None:
    problem = run(case).problem
    if problem is not None:
        raise problem


def test_a_move_within_an_application_and_a_change_to_more_replicas() -> None:
    problem = run(Case(3030, "splits", "upstream-1", then="active", moves=20)).problem
    if problem is not None:
        raise problem


def test_a_request_for_more_sites_outlives_the_leader() -> None:
    world = protected()
    world.plane.request(SitesWanted(6))
    until(world, lambda: world.ledger.known is not None and world.ledger.known.sites == 6)
    world.crash_controller()
    until(world, lambda: not world.leaderless and world.controller.protected)
    until(world, lambda: len(world.controller.addresses) == 6)


def test_more_sites_are_spread_over_the_applications() -> None:
    world = protected(apps=2)
    world.plane.request(SitesWanted(8))
    until(world, lambda: len(world.controller.addresses) == 8)
    by_app = [sum(home == app for home in world.home.values()) for app in (0, 1)]
    assert by_app == [4, 4]
