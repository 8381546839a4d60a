"""What goes wrong during planned moves, and in what order."""

from dataclasses import replace

from holdfast.core.checkpoints import Checkpoints
from holdfast.core.controller import Controller
from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import CommitView, ControllerEffect, EndFlow, LaunchSite
from holdfast.core.events import (
    FlowFailed,
    HandOverBegun,
    PeerConnected,
    ReplicaInstalled,
    ReplicaReported,
    SiteRegistered,
    SitesFailed,
    StoreDue,
    StoreUnderWay,
    ViewCommitted,
    ViewSeen,
    WaitOver,
)
from holdfast.core.flow_phase import FlowPhase
from holdfast.core.joins import JOINS_MAX
from holdfast.core.layout import Domain, Shape, StageShape, View
from holdfast.core.protection import ProtectionSpec
from holdfast.core.requests import (
    EmptySites,
    MovesWanted,
    ProtectionWanted,
    Relocation,
    SitesWanted,
)
from holdfast.core.timers import PatienceTimer, RejoinTimer
from holdfast.errors import OutOfMemoryError

PAIR = ProtectionSpec(replicas=2)
STANDBY = ProtectionSpec(standbys=1, every_epochs=1)
REBUILT = ProtectionSpec(level=1, rebuild_level=1)
SOURCE, KEYED, SINK = (0, 0), (1, 0), (2, 0)


def line(guard: ProtectionSpec, partitions: int = 1, ends: ProtectionSpec = PAIR) -> Shape:
    """A source, a keyed stage with this protection, and a sink."""
    return Shape(
        (
            StageShape(0, "packets", "source", 1, (), (0,), guard=ends),
            StageShape(1, "sessions", "keyed", partitions, (0,), (1,), guard=guard),
            StageShape(2, "alerts", "sink", 1, (1,), (), guard=ends),
        ),
        producer_of=(0, 1),
        consumer_of=(1, 2),
    )


def registered(site: int) -> SiteRegistered:
    return SiteRegistered(
        site, ("127.0.0.1", 5000 + site), Domain(f"p{site}", f"p{site}", "h", "a")
    )


def seen(controller: Controller) -> list[ControllerEffect]:
    """All members report that they act on the view."""
    view = latest(controller)
    return [e for s in view.members for e in controller.handle(ViewSeen(s, view.term, view.number))]


def running(shape: Shape, sites: int, spares: int = 0) -> Controller:
    ids = list(range(sites + spares))
    controller = Controller(shape, ids[:sites], ids[sites:], groups_per_site=1)
    for site in ids:
        controller.handle(registered(site))
    seen(controller)
    return controller


def latest(controller: Controller) -> View:
    assert controller.view is not None
    return controller.view


def report(
    controller: Controller, site: int, task: tuple[int, int], phase: str, reason: str = ""
) -> list[ControllerEffect]:
    number = latest(controller).number
    return controller.handle(ReplicaReported(site, task, number, phase, reason))


def settle(controller: Controller, rounds: int = 100) -> None:
    """Have every member see every view, and every new replica install its state and catch up."""
    for _ in range(rounds):
        seen(controller)
        view = latest(controller)
        joining = [(u, s) for u in view.tasks() for s in view.group(u).joining]
        replaying = [*controller.joins.replaying]
        for task, site in joining[:1]:
            report(controller, site, task, "installed")
        for task, site in replaying:
            if site in latest(controller).group(task).replicas:
                report(controller, site, task, "caught_up")
        if not joining and not replaying and latest(controller) == view:
            return


def resumed(before: Controller, shape: Shape, term: int = 2) -> Controller:
    """A controller that continues from what the last one has committed, as
    `holdfast.control.knowledge` has it continue."""
    view = latest(before)
    others = [s for s in before.roster.domains if s not in view.members]
    sites = [*view.members, *others][: len(before.roster.sites)]
    after = Controller(shape, sites, term=term)
    after.resume(
        view,
        term,
        dict(before.roster.addresses),
        dict(before.roster.domains),
        dict(before.roster.dead),
        True,
        False,
        sorted(before.roster.launched),
        before.roster.next_id,
    )
    seen(after)
    return after


# --- the leaver dies ----------------------------------------------------------------------------


def test_the_leaver_of_a_stage_with_a_standby_dies_when_the_new_replica_computes() -> None:
    shape = line(STANDBY)
    controller = running(shape, 4)
    view = latest(controller)
    (leaver,), (standby,) = view.group(KEYED).replicas, view.group(KEYED).standbys
    target = next(s for s in range(4) if s not in (leaver, standby))
    controller.handle(MovesWanted((Relocation(KEYED, leaver, target),)))
    seen(controller)

    machine = Dataflow(target, shape, window=3)
    for other in range(4):
        machine.handle(PeerConnected(other))
    machine.handle(ViewCommitted(latest(controller)))
    joined_view = latest(controller).group(KEYED).joined_view_of(target)
    machine.handle(HandOverBegun(KEYED, leaver, None, joined_view, 3, None))
    machine.handle(ReplicaInstalled(KEYED, 3, {1: {}}, {1: {}}, True, 0))
    assert machine.tasks[KEYED].computes
    told = ReplicaReported(target, KEYED, latest(controller).number, "installed")

    controller.handle(SitesFailed((leaver,), "killed"))  # before the report arrives
    machine.handle(ViewCommitted(latest(controller)))
    controller.handle(told)
    machine.handle(ViewCommitted(latest(controller)))  # raises: it has it stand by
    machine.check_invariants()


# --- failed moves count as failed recoveries -----------------------------------------------------


def test_failed_moves_do_not_keep_a_lost_task_from_being_rebuilt() -> None:
    controller = running(line(REBUILT), 4)
    (leaver,) = latest(controller).group(KEYED).replicas
    target = next(s for s in range(4) if s != leaver)
    for _ in range(JOINS_MAX):
        controller.handle(MovesWanted((Relocation(KEYED, leaver, target),)))
        seen(controller)
        report(controller, target, KEYED, "failed", "the connection broke")
        controller.handle(WaitOver(RejoinTimer(KEYED)))
    assert controller.state is FlowPhase.RUNNING
    effects = controller.handle(SitesFailed((leaver,), "killed"))
    assert not any(isinstance(e, EndFlow) for e in effects)


def test_failed_moves_do_not_keep_a_missing_replica_from_being_replaced() -> None:
    controller = running(line(PAIR), 4)
    one, other = latest(controller).group(KEYED).replicas
    target = next(s for s in range(4) if s not in (one, other))
    for _ in range(JOINS_MAX):
        controller.handle(MovesWanted((Relocation(KEYED, one, target),)))
        seen(controller)
        report(controller, target, KEYED, "failed", "the connection broke")
        controller.handle(WaitOver(RejoinTimer(KEYED)))
    controller.handle(EmptySites((one,)))
    controller.handle(SitesFailed((one,), "killed"))
    settle(controller)
    assert len(latest(controller).group(KEYED).replicas) == 2


def test_an_emptied_site_leaves_although_one_target_cannot_be_reached() -> None:
    controller = running(line(PAIR, 4), 5)
    controller.handle(EmptySites((4,)))
    bad: int | None = None
    for _ in range(200):
        seen(controller)
        view = latest(controller)
        for task in view.tasks():
            for site in view.group(task).joining:
                if task[0] == 1 and bad in (None, site):
                    bad = site
                    report(controller, site, task, "failed", "no connection to its donor")
                elif site in latest(controller).group(task).joining:
                    report(controller, site, task, "installed")
                    report(controller, site, task, "caught_up")
        for task in view.tasks():
            controller.handle(WaitOver(RejoinTimer(task)))
        controller.handle(EmptySites((4,)))
    assert 4 not in latest(controller).members


# --- what is left behind of a replica that leaves ------------------------------------------------


def test_a_replica_that_leaves_before_it_has_caught_up_is_not_waited_for() -> None:
    controller = running(line(PAIR), 4)
    one, other = latest(controller).group(KEYED).replicas
    second, third = (s for s in range(4) if s not in (one, other))
    controller.handle(MovesWanted((Relocation(KEYED, one, second),)))
    seen(controller)
    report(controller, second, KEYED, "installed")
    controller.handle(SitesFailed((one,), "killed"))  # the new replica has not caught up
    controller.handle(registered(4))
    settle_but = latest(controller).group(KEYED)
    assert settle_but.replicas == (other, second)
    seen(controller)
    controller.handle(MovesWanted((Relocation(KEYED, second, third),)))
    seen(controller)
    report(controller, third, KEYED, "installed")
    report(controller, third, KEYED, "caught_up")
    assert latest(controller).group(KEYED).replicas == (other, third)
    settle(controller)
    assert controller.phase(KEYED) == "protected"


def test_a_replica_that_left_early_and_is_a_standby_now_does_not_hold_up_moves() -> None:
    controller = running(line(STANDBY), 4)
    view = latest(controller)
    (first,), (standby,) = view.group(KEYED).replicas, view.group(KEYED).standbys
    second, third = (s for s in range(4) if s not in (first, standby))

    def moved(source: int, target: int, *phases: str) -> None:
        controller.handle(MovesWanted((Relocation(KEYED, source, target),)))
        seen(controller)
        for phase in phases:
            report(controller, target, KEYED, phase)

    moved(first, second, "installed")
    controller.handle(SitesFailed((first,), "killed"))  # before `second` has caught up
    controller.handle(registered(4))
    seen(controller)
    moved(second, third, "installed", "caught_up")
    assert latest(controller).group(KEYED).replicas == (third,)
    moved(standby, second, "installed")
    assert latest(controller).group(KEYED).standbys == (second,)
    moved(third, standby, "installed", "caught_up")
    assert latest(controller).group(KEYED).replicas == (standby,)


# --- draining and protection ---------------------------------------------------------------------


def test_a_site_is_not_emptied_if_the_protection_to_come_needs_it() -> None:
    shape = line(ProtectionSpec(), ends=ProtectionSpec())
    controller = running(shape, 3)
    kept = replace(PAIR, replicas=3, level=1)
    controller.handle(ProtectionWanted((PAIR, kept, PAIR)))
    assert latest(controller).aims
    controller.handle(EmptySites((2,)))
    for _ in range(20):
        settle(controller)
        for task in latest(controller).tasks():
            for site in latest(controller).group(task).replicas:
                report(controller, site, task, "retained")
    assert latest(controller).guards[1].replicas == 3
    assert len(latest(controller).group(KEYED).replicas) == 3


def test_a_change_of_protection_that_needs_a_site_which_is_emptied_is_refused() -> None:
    controller = running(line(PAIR), 3)
    controller.handle(EmptySites((2,)))
    assert controller.handle(ProtectionWanted((PAIR, replace(PAIR, replicas=3), PAIR))) == []
    settle(controller)
    assert 2 not in latest(controller).members


# --- failure domains -----------------------------------------------------------------------------


def test_a_move_within_a_host_and_the_loss_of_the_other_replica() -> None:
    controller, task, leaver, target = moved_within_a_host(line(ON_HOSTS, 4))
    other = next(s for s in latest(controller).group(task).replicas if s not in (leaver, target))
    controller.handle(SitesFailed((other,), "killed"))
    on_host = Domain("p4", "p4", HOSTS[4], "")
    controller.handle(SiteRegistered(4, ("127.0.0.1", 5004), on_host))
    settle(controller)
    group = latest(controller).group(task)
    assert len(group.replicas) == 2
    assert len({HOSTS[s] for s in group.replicas}) == 2, latest(controller)


def test_a_move_within_a_host_and_a_change_to_more_replicas() -> None:
    controller, task, _, _ = moved_within_a_host(line(replace(ON_HOSTS, replicas=1), 4))
    controller.handle(ProtectionWanted((PAIR, ON_HOSTS, PAIR)))
    settle(controller)
    group = latest(controller).group(task)
    assert len(group.replicas) == 2
    assert len({HOSTS[s] for s in group.replicas}) == 2, latest(controller)


ON_HOSTS = replace(PAIR, failure_domain="host")
HOSTS = ("one", "two", "one", "three", "four")


def moved_within_a_host(shape: Shape) -> tuple[Controller, tuple[int, int], int, int]:
    """A flow of which a task has the replica that leaves and the new one, which has its state and
    has not caught up; both are on the same host."""
    controller = Controller(shape, [0, 1, 2, 3])
    for site, host in enumerate(HOSTS[:4]):
        domain = Domain(f"p{site}", f"p{site}", host, "")
        controller.handle(SiteRegistered(site, ("127.0.0.1", 5000 + site), domain))
    seen(controller)
    view = latest(controller)
    task, leaver = next(
        (u, s)
        for u in view.tasks()
        for s in view.group(u).replicas
        if u[0] == 1 and HOSTS[s] == "one"
    )
    target = 2 - leaver
    controller.handle(MovesWanted((Relocation(task, leaver, target),)))
    seen(controller)
    report(controller, target, task, "installed")
    assert {leaver, target} <= set(latest(controller).group(task).replicas)
    return controller, task, leaver, target


def test_a_move_does_not_expose_the_flow_to_the_loss_of_one_site() -> None:
    stages = (
        StageShape(0, "packets", "source", 1, (), (0,), guard=PAIR),
        StageShape(1, "sessions", "keyed", 1, (0,), (1,), guard=REBUILT),
        StageShape(2, "users", "keyed", 1, (1,), (2,), guard=REBUILT),
        StageShape(3, "alerts", "sink", 1, (2,), (), guard=PAIR),
    )
    controller = running(Shape(stages, (0, 1, 2), (1, 2, 3)), 4)
    assert controller.exposures == []
    (first,), (second,) = (latest(controller).group((n, 0)).replicas for n in (1, 2))
    controller.handle(MovesWanted((Relocation((2, 0), second, first),)))
    settle(controller)
    assert controller.exposures == []


# --- recovery comes first ------------------------------------------------------------------------


def test_moves_do_not_hold_up_the_replacement_of_a_lost_replica() -> None:
    controller = running(line(PAIR, 4), 4)
    controller.handle(SitesFailed((3,), "killed"))
    seen(controller)

    def lacking() -> list[tuple[int, int]]:
        view = latest(controller)
        return [u for u in view.tasks() if u[0] == 1 and len(view.group(u).staying) < 2]

    assert lacking(), "it waits for the site that is being launched"
    under_way: list[tuple[tuple[int, int], int]] = []

    def ask() -> None:
        view = latest(controller)
        for task in view.tasks():
            group = view.group(task)
            for target in range(5):
                if task[0] == 1 and len(group.all) == 2 and not group.joining:
                    controller.handle(MovesWanted((Relocation(task, group.replicas[0], target),)))
                    if target in latest(controller).group(task).joining:
                        under_way.append((task, target))
                        return

    ask()
    controller.handle(registered(4))
    for _ in range(20):  # there is always one move under way, and it is never the same for long
        ask()
        seen(controller)
        settle(controller, 1)
    assert not lacking(), latest(controller)


def test_a_failure_comes_before_the_emptying_of_a_site() -> None:
    controller = running(line(PAIR, 3), 3)
    controller.handle(EmptySites((0,)))
    controller.handle(SitesFailed((1,), "killed"))  # the site in its place never comes
    for number in range(3):
        controller.handle(WaitOver(PatienceTimer(number)))
        settle(controller)
    view = latest(controller)
    assert all(len(view.group(u).replicas) == 2 for u in view.tasks())


def test_as_many_sites_as_there_are_while_a_spare_is_emptied() -> None:
    controller = running(line(PAIR, 4), 3, spares=1)
    task = next(u for u in latest(controller).tasks() if u[0] == 1)
    source = latest(controller).group(task).replicas[0]
    controller.handle(MovesWanted((Relocation(task, source, 3),)))
    settle(controller)
    controller.handle(EmptySites((3,)))
    assert latest(controller).emptying == (3,)
    effects = controller.handle(SitesWanted(3))
    assert not any(isinstance(e, LaunchSite) for e in effects)


# --- how many sites there are --------------------------------------------------------------------


def test_a_new_leader_counts_sites_that_hold_nothing() -> None:
    shape = line(PAIR)
    controller = running(shape, 3)
    controller.handle(SitesWanted(4))
    controller.handle(registered(3))
    after = resumed(controller, shape)
    effects = after.handle(SitesWanted(4))
    assert not any(isinstance(e, LaunchSite) for e in effects)


def test_a_request_for_more_sites_is_committed() -> None:
    controller = running(line(PAIR), 3)
    effects = controller.handle(SitesWanted(4))
    assert any(isinstance(e, LaunchSite) for e in effects)
    assert any(isinstance(e, CommitView) for e in effects)


def test_the_same_number_of_sites_wanted_twice_with_a_spare_among_the_members() -> None:
    controller = running(line(PAIR, 4), 3, spares=1)
    controller.handle(SitesFailed((2,), "killed"))
    settle(controller)
    controller.handle(registered(4))
    settle(controller)
    assert 3 in latest(controller).members
    controller.handle(SitesWanted(2))
    settle(controller)
    before = sorted(controller.addresses)
    controller.handle(SitesWanted(2))
    settle(controller)
    assert sorted(controller.addresses) == before


def test_the_error_of_a_site_that_has_left_does_not_end_the_flow() -> None:
    controller = running(line(PAIR), 4)
    controller.handle(EmptySites((3,)))
    settle(controller)
    assert controller.is_dead(3)
    assert controller.handle(FlowFailed(3, OutOfMemoryError("drained too late"))) == []


def test_fewer_sites_take_the_one_that_holds_nothing() -> None:
    controller = running(line(PAIR, 4), 3)
    controller.handle(SitesWanted(4))
    controller.handle(SitesWanted(3))
    assert latest(controller).emptying == ()


# --- stored checkpoints --------------------------------------------------------------------------


def test_a_leader_does_not_leave_while_a_checkpoint_is_stored() -> None:
    controller = running(line(PAIR), 4)
    machine = Checkpoints()
    failed = 0
    for _ in range(5):
        machine.handle(StoreDue(latest(controller), 1))
        controller.handle(StoreUnderWay(machine.epoch is not None))
        leader = latest(controller).group(KEYED).replicas[0]
        target = next(s for s in range(4) if s not in latest(controller).group(KEYED).all)
        controller.handle(MovesWanted((Relocation(KEYED, leader, target),)))
        settle(controller)
        machine.handle(ViewCommitted(latest(controller)))
        failed += machine.epoch is None
    assert failed == 0
    controller.handle(StoreUnderWay(False))
    assert latest(controller).group(KEYED).leaving == ()
