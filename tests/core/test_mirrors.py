"""Dataflow and cluster pairs: a mirror is lost as a whole, and rebuilt as a whole."""

from dataclasses import replace

import pytest

from holdfast.core.controller import Controller
from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    EndFlow,
    FenceSite,
    LaunchSite,
    OrderCatchUp,
    PauseFlow,
    StartFlow,
)
from holdfast.core.events import ReplicaReported, SiteRegistered, SitesFailed, ViewSeen
from holdfast.core.layout import Domain, Shape, StageShape
from holdfast.core.mirrors import is_whole, mirrors_of
from holdfast.core.placement import place
from holdfast.core.protection import ProtectionSpec
from holdfast.errors import HostError, SiteLostError

PAIRS = ProtectionSpec(replicas=2)
SHAPE = Shape(
    (
        StageShape(0, "packets", "source", 2, (), (0,), guard=PAIRS),
        StageShape(1, "sessions", "keyed", 8, (0,), (1,), guard=PAIRS),
        StageShape(2, "alerts", "sink", 1, (1,), (), guard=PAIRS),
    ),
    producer_of=(0, 1),
    consumer_of=(1, 2),
)


def register(controller: Controller, site: int) -> list[ControllerEffect]:
    domain = Domain(f"p{site}", f"p{site}", "h", "a")
    return controller.handle(SiteRegistered(site, ("127.0.0.1", 5000 + site), domain))


def seen(controller: Controller) -> list[ControllerEffect]:
    view = controller.view
    assert view is not None
    return [e for s in view.members for e in controller.handle(ViewSeen(s, view.term, view.number))]


def running(granularity: str, sites: int = 4) -> Controller:
    controller = Controller(replace(SHAPE, granularity=granularity), list(range(sites)))
    for site in range(sites):
        register(controller, site)
    assert StartFlow() in seen(controller)
    return controller


def replicas(controller: Controller) -> str:
    return str(controller.view).split(": ", 1)[1]


def views(effects: list[ControllerEffect]) -> list[str]:
    return [str(e.view) for e in effects if isinstance(e, CommitView)]


def test_a_mirror_is_lost_with_one_of_its_sites_and_rebuilt_while_the_flow_pauses() -> None:
    controller = running("cluster")
    assert replicas(controller) == "0,1 2,3 | 0,1 2,3 | 0,1"
    effects = controller.handle(SitesFailed((1,), "killed"))
    assert effects[:2] == [FenceSite(1), LaunchSite(4, 0)]
    assert views(effects) == ["view 0.1 of 0 2 3: 0 2 | 0 2 | 0"], "3 is a member without replicas"
    effects = register(controller, 4)
    assert views(effects) == ["view 0.2 of 0 2 3 4: 0+3 2+4 | 0+3 2+4 | 0+3"]
    assert effects[-1] == PauseFlow(0, True)
    assert PauseFlow(0, True) in controller.orders_for(0), "said again to a site that comes back"
    assert not controller.orders_for(2), "it has no sequencer"
    orders = [e for e in seen(controller) if isinstance(e, OrderCatchUp)]
    assert [(e.donor, e.joiner) for e in orders] == [(0, 3), (2, 4), (0, 3), (2, 4), (0, 3)]
    assert controller.view is not None
    joins = [(u, s) for u in controller.view.tasks() for s in controller.view.group(u).joining]
    for task, site in joins:
        assert PauseFlow(0, False) not in effects, "it pauses until the last replica is in place"
        number = controller.view.number
        effects = controller.handle(ReplicaReported(site, task, number, "installed"))
    assert PauseFlow(0, False) in effects
    assert PauseFlow(0, False) in controller.orders_for(0), "the last order may be lost, too"
    assert replicas(controller) == "0,3 2,4 | 0,3 2,4 | 0,3"


@pytest.mark.parametrize("gone", [0, 1])
def test_either_mirror_can_be_lost(gone: int) -> None:
    controller = running("dataflow", sites=2)
    assert replicas(controller) == "0,1 | 0,1 | 0,1"
    controller.handle(SitesFailed((gone,), "killed"))
    kept = 1 - gone
    assert replicas(controller) == f"{kept} | {kept} | {kept}"
    effects = register(controller, 2)
    assert replicas(controller) == f"{kept}+2 | {kept}+2 | {kept}+2"
    assert PauseFlow(kept, True) in effects


def test_a_mirror_is_rebuilt_on_idle_sites() -> None:
    """It does not wait for a site that is launched in place of the dead one."""
    controller = running("dataflow", sites=3)
    assert replicas(controller) == "0,1 | 0,1 | 0,1", "site 2 is idle"
    effects = controller.handle(SitesFailed((0,), "killed"))
    assert LaunchSite(3, 0) in effects
    assert replicas(controller) == "1+2 | 1+2 | 1+2"
    controller = running("cluster", sites=5)
    assert replicas(controller) == "0,1 2,3 | 0,1 2,3 | 0,1"
    controller.handle(SitesFailed((3,), "killed"))
    assert replicas(controller) == "0+1 2+4 | 0+1 2+4 | 0+1"


def test_an_idle_site_can_be_lost() -> None:
    controller = running("cluster", sites=5)
    effects = controller.handle(SitesFailed((4,), "killed"))
    assert views(effects) == ["view 0.1 of 0 1 2 3: 0,1 2,3 | 0,1 2,3 | 0,1"]
    assert controller.handle(SitesFailed((1,), "killed"))
    assert replicas(controller) == "0 2 | 0 2 | 0"
    assert register(controller, 5)
    assert replicas(controller) == "0+3 2+5 | 0+3 2+5 | 0+3"


@pytest.mark.parametrize("both", [(0, 1), (0, 3), (2, 1)])
def test_a_flow_that_loses_a_site_of_each_mirror_ends(both: tuple[int, int]) -> None:
    controller = running("cluster")
    (end,) = controller.handle(SitesFailed(both, "killed"))
    assert isinstance(end, EndFlow) and isinstance(end.error, SiteLostError)
    assert "no replica is left of 'packets': 0-1; 'sessions': 0-7; 'alerts': 0" in str(end.error)


def test_a_flow_that_loses_the_other_mirror_before_one_is_rebuilt_ends() -> None:
    controller = running("cluster")
    controller.handle(SitesFailed((1,), "killed"))
    (end,) = controller.handle(SitesFailed((2,), "killed"))
    assert isinstance(end, EndFlow) and isinstance(end.error, SiteLostError)


def test_another_controller_knows_the_mirrors_and_lets_the_flow_continue() -> None:
    before = running("cluster")
    before.handle(SitesFailed((1,), "killed"))
    assert PauseFlow(0, True) in register(before, 4)
    assert before.view is not None
    controller = Controller(replace(SHAPE, granularity="cluster"), [0, 2, 3, 4])
    roster = before.roster
    effects = controller.resume(
        before.view, 1, dict(roster.addresses), dict(roster.domains), dict(roster.dead), True, False
    )
    assert PauseFlow(0, True) in effects, "a mirror is still being rebuilt"
    effects = controller.handle(SitesFailed((4,), "killed"))
    assert replicas(controller) == "0 2 | 0 2 | 0", "site 3 is of the same mirror"
    assert PauseFlow(0, False) in effects


def test_a_replica_of_a_lost_mirror_need_not_catch_up() -> None:
    """Site 3 lives, but what it had is worthless when its mirror is lost again."""
    controller = running("cluster")
    controller.handle(SitesFailed((1,), "killed"))
    register(controller, 4)
    seen(controller)
    joined(controller)
    assert controller.view is not None and mirrors_of(controller.view) == [{0, 2}, {3, 4}]
    assert {site for _, site in controller.joins.replaying} == {3, 4}
    controller.handle(SitesFailed((4,), "killed"))
    assert not controller.joins.replaying


def joined(controller: Controller) -> None:
    """All replicas that join have their state."""
    assert controller.view is not None
    while joins := [
        (u, s) for u in controller.view.tasks() for s in controller.view.group(u).joining
    ]:
        for task, site in joins:
            number = controller.view.number
            controller.handle(ReplicaReported(site, task, number, "installed"))


def test_no_failure_domain_has_sites_of_both_mirrors() -> None:
    """Else the loss of an executor would end the flow."""
    domains = {s: Domain(f"p{s}", f"e{s // 2}", "h", "a") for s in range(6)}
    executors = replace(PAIRS, failure_domain="executor")
    shape = replace(SHAPE.guarded((executors,) * 3), granularity="cluster")
    view = place(shape, range(6), domains)
    assert str(view) == "view 0.0 of 0 1 2 3 4 5: 0,2 1,3 | 0,2 1,3 | 0,2"
    assert all(is_whole(view, {s for s in domains if s // 2 != lost}) for lost in range(3))
    domains = {s: Domain(f"p{s}", f"e{s // 3}", "h", "a") for s in range(4)}
    assert str(place(shape, range(4), domains)).endswith("0,3 | 0,3 | 0,3")
    domains = {s: Domain(f"p{s}", "e", "h", "a") for s in range(4)}
    with pytest.raises(HostError, match="no two in one executor, and the sites are in only 1"):
        place(shape, range(4), domains)


def test_a_mirror_is_rebuilt_apart_from_the_other() -> None:
    executors = replace(PAIRS, failure_domain="executor")
    shape = replace(SHAPE.guarded((executors,) * 3), granularity="cluster")
    controller = Controller(shape, [0, 1, 2, 3])
    for site, executor in enumerate("aabb"):
        domain = Domain(f"p{site}", executor, "h", "a")
        controller.handle(SiteRegistered(site, ("127.0.0.1", 5000 + site), domain))
    seen(controller)
    assert replicas(controller) == "0,2 1,3 | 0,2 1,3 | 0,2"
    controller.handle(SitesFailed((3,), "killed"))
    again = Domain("p4", "a", "h", "a")
    controller.handle(SiteRegistered(4, ("127.0.0.1", 5004), again))
    assert replicas(controller) == "0 1 | 0 1 | 0", "executor a has the other mirror"


def test_a_replica_that_fails_to_join_breaks_off_its_whole_mirror() -> None:
    controller = running("cluster")
    controller.handle(SitesFailed((1,), "killed"))
    register(controller, 4)
    seen(controller)
    assert controller.view is not None
    failed = ReplicaReported(4, (1, 1), controller.view.number, "failed", "its connection broke")
    effects = controller.handle(failed)
    assert replicas(controller) == "0 2 | 0 2 | 0"
    assert PauseFlow(0, False) in effects and not controller.joins.ordered
