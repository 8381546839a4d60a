"""The controller's decisions, event by event."""

import pytest

from holdfast.core.controller import EDGES, STILLBORN_MAX, Controller, State
from holdfast.core.effects import AssignSites, DrainFlow, EndFlow, RelaunchSite, StartFlow
from holdfast.core.events import (
    FlowFailed,
    SiteConnected,
    SiteFailed,
    SiteFinished,
    SiteRegistered,
    StopRequested,
)
from holdfast.core.layout import Domain, Shape, StageShape, place
from holdfast.errors import HostError, InvariantError, SiteLostError

SHAPE = Shape(
    (
        StageShape(0, "packets", "source", 2, (), (0,)),
        StageShape(1, "sessions", "keyed", 8, (0,), (1,)),
        StageShape(2, "alerts", "sink", 1, (1,), ()),
    ),
    producer_of=(0, 1),
    consumer_of=(1, 2),
)


def registered(site: int, attempt: int = 0) -> SiteRegistered:
    domain = Domain(f"p{site}", "e", "h", "a")
    return SiteRegistered(site, attempt, ("127.0.0.1", 5000 + site), domain)


def running() -> Controller:
    controller = Controller(SHAPE, [0, 1], [2])
    controller.handle(registered(0))
    controller.handle(registered(1))
    controller.handle(SiteConnected(0))
    controller.handle(SiteConnected(1))
    return controller


def test_sites_are_assigned_when_all_are_there_and_started_when_all_are_connected() -> None:
    controller = Controller(SHAPE, [0, 1], [2])
    assert controller.handle(registered(2)) == []  # a standby is not waited for
    assert controller.handle(registered(0)) == []
    addresses = {0: ("127.0.0.1", 5000), 1: ("127.0.0.1", 5001)}
    assert controller.handle(registered(1)) == [AssignSites(place(SHAPE, [0, 1]), addresses)]
    assert controller.handle(SiteConnected(1)) == []
    assert controller.handle(SiteConnected(0)) == [StartFlow()]
    assert controller.state is State.RUNNING


def test_the_flow_is_done_when_every_site_is() -> None:
    controller = running()
    assert controller.handle(SiteFinished(1)) == []
    assert controller.handle(SiteFinished(0)) == [EndFlow(None)]
    assert controller.state is State.DONE


def test_a_death_while_running_names_the_partitions_that_are_lost() -> None:
    (end,) = running().handle(SiteFailed(1, 0, "killed"))
    assert isinstance(end, EndFlow) and isinstance(end.error, SiteLostError)
    text = str(end.error)
    assert "site 1 died (killed)" in text
    assert "'packets': 1" in text and "'sessions': 4-7" in text and "alerts" not in text


def test_a_site_that_has_finished_may_go() -> None:
    controller = running()
    controller.handle(SiteFinished(1))
    (relaunch,) = controller.handle(SiteFailed(1, 0, "gone"))
    assert isinstance(relaunch, RelaunchSite)


def test_a_death_before_the_start_is_a_relaunch_with_back_off() -> None:
    controller = Controller(SHAPE, [0, 1])
    waits = []
    for attempt in range(4):
        (relaunch,) = controller.handle(SiteFailed(0, attempt, "oom"))
        assert (relaunch.site, relaunch.attempt) == (0, attempt + 1)
        waits.append(relaunch.after_ms)
        controller.handle(registered(0, attempt + 1))
    assert waits == sorted(waits) and waits[-1] > waits[0]


def test_a_death_while_connecting_starts_the_gathering_anew() -> None:
    controller = Controller(SHAPE, [0, 1])
    controller.handle(registered(0))
    controller.handle(registered(1))
    assert controller.handle(SiteFailed(1, 0, "killed")) == [RelaunchSite(1, 1, 0)]
    assert controller.state is State.GATHERING
    (assigned,) = controller.handle(registered(1, 1))
    assert isinstance(assigned, AssignSites)


def test_what_an_earlier_life_says_is_stale() -> None:
    controller = Controller(SHAPE, [0, 1])
    controller.handle(SiteFailed(0, 0, "killed"))
    assert controller.handle(SiteFailed(0, 0, "the same death, reported by the host")) == []
    assert controller.handle(registered(0, attempt=0)) == []
    assert 0 not in controller.addresses


def test_a_site_that_never_comes_up_ends_the_flow() -> None:
    controller = Controller(SHAPE, [0, 1])
    for attempt in range(STILLBORN_MAX - 1):
        controller.handle(SiteFailed(0, attempt, "No module named holdfast"))
    (end,) = controller.handle(SiteFailed(0, STILLBORN_MAX - 1, "No module named holdfast"))
    assert isinstance(end.error, HostError)
    assert "never came up: No module named holdfast" in str(end.error)


def test_stopping() -> None:
    controller = running()
    assert controller.handle(StopRequested(drain=True)) == [DrainFlow()]
    assert controller.handle(StopRequested(drain=True)) == []
    assert controller.handle(StopRequested(drain=False)) == [EndFlow(None)]
    assert controller.handle(SiteFinished(0)) == []  # nothing matters any more


def test_an_error_of_the_flow_ends_it() -> None:
    error = ValueError("bad")
    assert running().handle(FlowFailed(0, error)) == [EndFlow(error)]


def test_only_edges_of_the_table_are_taken() -> None:
    controller = running()
    with pytest.raises(InvariantError, match="history"):
        controller._become(State.GATHERING)
    assert set(EDGES) == set(State)


def test_partitions_are_spread_evenly_and_single_ones_do_not_pile_up() -> None:
    layout = place(SHAPE, [0, 1, 2])
    assert sorted(len(layout.partitions_at(1, s)) for s in (0, 1, 2)) == [2, 3, 3]
    assert [layout.sites[0][p] for p in (0, 1)] == [(0,), (1,)]
    assert layout.sites[2][0] == (2,)
    with pytest.raises(HostError):
        place(SHAPE, [])
