"""Dataflow and cluster pairs: a mirror is lost as a whole, and rebuilt as a whole."""

from dataclasses import replace

import pytest

from holdfast.core.controller import Controller
from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    FenceSite,
    LaunchSite,
    OrderCatchUp,
    PauseFlow,
    StartFlow,
)
from holdfast.core.events import ReplicaReported, SiteRegistered, SitesFailed, ViewSeen
from holdfast.core.layout import Domain, Shape, StageShape
from holdfast.core.protection import ProtectionSpec

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


def running(granularity: str) -> Controller:
    controller = Controller(replace(SHAPE, granularity=granularity), [0, 1, 2, 3])
    for site in range(4):
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
    assert PauseFlow(2, True) in controller.orders_for(2), "said again to a site that comes back"
    orders = [e for e in seen(controller) if isinstance(e, OrderCatchUp)]
    assert [(e.donor, e.joiner) for e in orders] == [(0, 3), (2, 4), (0, 3), (2, 4), (0, 3)]
    assert controller.view is not None
    joins = [(u, s) for u in controller.view.tasks() for s in controller.view.group(u).joining]
    for task, site in joins:
        assert PauseFlow(0, False) not in effects, "it pauses until the last replica is in place"
        number = controller.view.number
        effects = controller.handle(ReplicaReported(site, task, number, "installed"))
    assert PauseFlow(0, False) in effects
    assert replicas(controller) == "0,3 2,4 | 0,3 2,4 | 0,3"


@pytest.mark.parametrize("gone", [0, 1])
def test_either_mirror_can_be_lost(gone: int) -> None:
    controller = running("dataflow")
    assert replicas(controller) == "0,1 | 0,1 | 0,1"
    controller.handle(SitesFailed((gone,), "killed"))
    kept = 1 - gone
    assert replicas(controller) == f"{kept} | {kept} | {kept}"
    effects = register(controller, 4)
    assert replicas(controller) == f"{kept}+4 | {kept}+4 | {kept}+4"
    assert PauseFlow(kept, True) in effects


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
