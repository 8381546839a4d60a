"""Moves of replicas and the emptying of sites, as the controller decides on them."""

from dataclasses import replace

import pytest

from holdfast.core import moves
from holdfast.core.controller import Controller
from holdfast.core.effects import CommitView, FenceSite, LaunchSite, OrderCatchUp
from holdfast.core.events import ReplicaReported, SitesFailed
from holdfast.core.ids import GroupId, StageId, TaskId
from holdfast.core.protection import ProtectionSpec
from holdfast.core.requests import (
    EmptySites,
    MovesWanted,
    ProtectionWanted,
    Relocation,
    SitesWanted,
    StopRequested,
)
from holdfast.core.roster import EMPTIED
from tests.support.controllers import PAIRS, registered, replicas, running, seen, views

KEYED: TaskId = (StageId(1), GroupId(0))
PASSIVE = ProtectionSpec("passive", 1, "process", standbys=1, every_ms=100)


def shape(guard: ProtectionSpec):
    stages = tuple(replace(s, guard=guard) if s.kind == "keyed" else s for s in PAIRS.stages)
    return replace(PAIRS, stages=stages)


def reports(controller: Controller, task: TaskId, site: int, phase: str) -> list:
    assert controller.view is not None
    return controller.handle(ReplicaReported(site, task, controller.view.number, phase))


def test_a_replica_leaves_when_the_new_one_has_caught_up() -> None:
    controller = running(PAIRS, sites=3, spares=0)
    first, second = controller.view.group(KEYED).replicas
    third = next(s for s in controller.view.members if s not in (first, second))
    begun = controller.handle(MovesWanted((Relocation(KEYED, first, third),)))
    (view,) = [e.view for e in begun if isinstance(e, CommitView)]
    group = view.group(KEYED)
    assert (group.replicas, group.joining, group.leaving) == ((first, second), (third,), (first,))
    assert controller.phase(KEYED) == "moving"
    # The donor is the one that stays.
    assert OrderCatchUp(second, KEYED, third) in seen(controller)
    assert reports(controller, KEYED, third, "installed")
    assert controller.view.group(KEYED).replicas == (first, second, third)
    seen(controller)
    assert controller.protected, "a move exposes nothing"
    reports(controller, KEYED, third, "caught_up")
    group = controller.view.group(KEYED)
    assert (group.replicas, group.leaving) == ((second, third), ())


def test_a_move_twice_is_one_move() -> None:
    controller = running(PAIRS, sites=3, spares=0)
    first, second = controller.view.group(KEYED).replicas
    third = next(s for s in controller.view.members if s not in (first, second))
    wanted = MovesWanted((Relocation(KEYED, first, third), Relocation(KEYED, second, third)))
    assert len(views(controller.handle(wanted))) == 1
    assert controller.handle(wanted) == []
    assert controller.view.group(KEYED).joining == (third,)


@pytest.mark.parametrize("dies", ["the new one", "the donor", "the one that leaves"])
def test_a_failure_gives_up_a_move_that_has_no_state_yet(dies: str) -> None:
    controller = running(PAIRS, sites=4, spares=0)
    first, second = controller.view.group(KEYED).replicas
    third = next(s for s in controller.view.members if s not in (first, second))
    controller.handle(MovesWanted((Relocation(KEYED, first, third),)))
    seen(controller)
    victim = {"the new one": third, "the donor": second, "the one that leaves": first}[dies]
    controller.handle(SitesFailed((victim,), "killed"))
    group = controller.view.group(KEYED)
    assert group.leaving == () and victim not in group.all
    left = [s for s in (first, second) if s != victim]
    assert list(group.replicas) == left
    if victim != third:
        assert len(group.joining) <= 1, "a replica is missing, and one at most joins"
        late = ReplicaReported(third, KEYED, 1, "installed")
        controller.handle(late)
        assert list(controller.view.group(KEYED).replicas) == left, "it began to join for the move"


def test_a_failure_after_the_new_one_has_its_state_leaves_the_move_to_go_on() -> None:
    controller = running(PAIRS, sites=4, spares=0)
    first, second = controller.view.group(KEYED).replicas
    third, fourth = (s for s in controller.view.members if s not in (first, second))
    controller.handle(MovesWanted((Relocation(KEYED, first, third),)))
    seen(controller)
    reports(controller, KEYED, third, "installed")
    controller.handle(SitesFailed((fourth,), "killed"))
    assert controller.view.group(KEYED).leaving == (first,)
    reports(controller, KEYED, third, "caught_up")
    assert controller.view.group(KEYED).replicas == (second, third)


def test_a_standby_moves_and_a_computing_replica_moves_past_its_standby() -> None:
    controller = running(shape(PASSIVE), sites=3, spares=0)
    group = controller.view.group(KEYED)
    (computes,), (standby,) = group.replicas, group.standbys
    third = next(s for s in controller.view.members if s not in (computes, standby))
    controller.handle(MovesWanted((Relocation(KEYED, standby, third),)))
    seen(controller)
    reports(controller, KEYED, third, "installed")
    group = controller.view.group(KEYED)
    assert (group.replicas, group.standbys, group.leaving) == ((computes,), (third,), ())
    seen(controller)
    controller.handle(MovesWanted((Relocation(KEYED, computes, standby),)))
    seen(controller)
    reports(controller, KEYED, standby, "installed")
    assert controller.view.group(KEYED).replicas == (computes, standby)
    reports(controller, KEYED, standby, "caught_up")
    group = controller.view.group(KEYED)
    assert (group.replicas, group.standbys) == ((standby,), (third,))


def test_what_cannot_move() -> None:
    controller = running(PAIRS, sites=3, spares=0)
    view, domains = controller.view, controller.roster.domains
    first, second = view.group(KEYED).replicas
    third = next(s for s in view.members if s not in (first, second))
    ends = (StageId(0), GroupId(0))

    def refusal(task: TaskId, source: int, target: int) -> str | None:
        return moves.refusal(
            controller.view, controller.shape, domains, Relocation(task, source, target)
        )

    assert refusal(KEYED, first, third) is None
    assert "is a source" in str(refusal(ends, view.group(ends).replicas[0], third))
    assert "does not hold" in str(refusal(KEYED, third, first))
    assert "takes no partitions" in str(refusal(KEYED, first, 77))
    assert "shares its" in str(refusal(KEYED, first, second))
    controller.handle(MovesWanted((Relocation(KEYED, first, third),)))
    assert "already being moved" in str(refusal(KEYED, second, third))


def settle(controller: Controller) -> None:
    """All sites do what they are told, until nothing joins."""
    for _ in range(60):
        seen(controller)
        view = controller.view
        joining = [(u, s) for u in view.tasks() for s in view.group(u).joining]
        late = list(controller.joins.replaying)
        if not joining and not late:
            return
        for task, site in joining:
            reports(controller, task, site, "installed")
        for task, site in late:
            reports(controller, task, site, "caught_up")
    raise AssertionError(f"never settles: {controller.view}")


def test_a_site_is_emptied_and_leaves() -> None:
    controller = running(PAIRS, sites=4, spares=0)
    site = controller.view.group((StageId(0), GroupId(0))).replicas[0]
    effects = controller.handle(EmptySites((site,)))
    assert not any(isinstance(e, FenceSite | LaunchSite) for e in effects)
    settle(controller)
    assert site not in controller.view.members and controller.view.emptying == ()
    assert controller.dead == {site: EMPTIED} and site not in controller.roster.sites
    assert controller.protected
    assert not controller.roster.launched, "no other takes its place"


def test_an_emptying_site_that_dies_is_not_replaced() -> None:
    controller = running(PAIRS, sites=4, spares=0)
    controller.handle(EmptySites((3,)))
    effects = controller.handle(SitesFailed((3,), "killed"))
    assert not any(isinstance(e, LaunchSite) for e in effects)
    assert controller.view.emptying == ()
    settle(controller)
    assert controller.protected


def test_two_sites_are_emptied_at_once() -> None:
    controller = running(PAIRS, sites=5, spares=0)
    controller.handle(EmptySites((0, 1)))
    settle(controller)
    assert sorted(controller.view.members) == [2, 3, 4] and controller.protected


def test_too_many_sites_are_not_emptied() -> None:
    controller = running(PAIRS, sites=3, spares=0)
    assert controller.handle(EmptySites((0, 1))) == []
    controller.handle(EmptySites((0,)))
    settle(controller)
    assert controller.handle(EmptySites((1,))) == []


def test_the_number_of_sites_changes() -> None:
    controller = running(PAIRS, sites=3, spares=0)
    launched = [e for e in controller.handle(SitesWanted(5)) if isinstance(e, LaunchSite)]
    assert [e.site for e in launched] == [3, 4]
    assert controller.handle(SitesWanted(5)) == []
    for effect in launched:
        controller.handle(registered(effect.site))
    controller.handle(SitesWanted(3))
    settle(controller)
    assert len(controller.roster.sites) == 3 and controller.protected


def test_nothing_moves_while_the_flow_drains() -> None:
    controller = running(PAIRS, sites=3, spares=0)
    controller.handle(StopRequested(drain=True))
    first, second = controller.view.group(KEYED).replicas
    third = next(s for s in controller.view.members if s not in (first, second))
    assert controller.handle(MovesWanted((Relocation(KEYED, first, third),))) == []
    assert controller.handle(EmptySites((0,))) == []
    assert controller.handle(SitesWanted(5)) == []


def test_a_change_of_protection_gives_up_a_move() -> None:
    controller = running(PAIRS, sites=4, spares=0)
    first, second = controller.view.group(KEYED).replicas
    third = next(s for s in controller.view.members if s not in (first, second))
    controller.handle(MovesWanted((Relocation(KEYED, first, third),)))
    seen(controller)
    controller.handle(ProtectionWanted(shape(PASSIVE).guards))
    assert controller.view.group(KEYED).leaving == ()
    settle(controller)
    assert controller.protected, replicas(controller)
