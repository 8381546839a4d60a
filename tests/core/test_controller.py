"""The controller's decisions, event by event."""

from dataclasses import replace

import pytest

from holdfast.core.controller import Controller
from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    FenceSite,
    LaunchSite,
    OrderCatchUp,
    StartFlow,
    Wait,
)
from holdfast.core.events import (
    Call,
    FlowFailed,
    ReplicaBehind,
    SiteRegistered,
    SitesFailed,
    SitesHung,
    SitesPartitioned,
    ViewSeen,
    WaitOver,
)
from holdfast.core.flow_phase import FlowPhase, PhaseEvent
from holdfast.core.joins import DOUBT_MS, JOINS_MAX
from holdfast.core.layout import Domain, Shape, StageShape
from holdfast.core.placement import place
from holdfast.core.protection import ProtectionSpec
from holdfast.core.requests import ProtectionWanted, StopRequested
from holdfast.core.roster import FAILED_STARTS_MAX, RELAUNCH_MS
from holdfast.core.timers import DoubtTimer, PatienceTimer, RejoinTimer
from holdfast.errors import HostError, HungError, InvariantError, SiteLostError
from tests.support.controllers import (
    KEYED,
    PAIRS,
    SHAPE,
    addresses,
    domain,
    finished,
    protected,
    registered,
    replicas,
    reported,
    running,
    seen,
    views,
    waits,
)

# --- coming together ----------------------------------------------------------------------------


def test_the_view_is_given_out_when_all_are_there_and_the_flow_started_when_all_act_on_it() -> None:
    controller = Controller(SHAPE, [0, 1], [2])
    assert controller.handle(registered(2)) == []  # a standby is not waited for
    assert controller.handle(registered(0)) == []
    placed = place(SHAPE, [0, 1], {0: domain(0), 1: domain(1)})
    assert controller.handle(registered(1)) == [CommitView(placed, addresses(0, 1))]
    assert controller.handle(ViewSeen(1, 0, 0)) == []
    assert controller.handle(ViewSeen(0, 0, 0)) == [StartFlow()]
    assert controller.state is FlowPhase.RUNNING


def test_who_acts_on_an_earlier_view_is_not_counted() -> None:
    controller = Controller(SHAPE, [0, 1])
    for site in (0, 1):
        controller.handle(registered(site))
    controller.handle(SitesFailed((1,), "killed"))
    assert views(controller.handle(registered(2))) == ["view 0.1 of 0 2: 0 2 | 0 2 | 0"]
    assert controller.handle(ViewSeen(2, 0, 1)) == []
    assert controller.handle(ViewSeen(0, 0, 0)) == [], "that was the view before"
    assert controller.handle(ViewSeen(0, 0, 1)) == [StartFlow()]


def test_the_flow_is_done_when_every_site_is() -> None:
    controller = running()
    assert controller.handle(finished(controller, 1)) == []
    assert controller.handle(finished(controller, 0)) == [EndFlow(None)]
    assert controller.state is FlowPhase.DONE


def test_a_death_before_the_start_is_a_relaunch_with_back_off() -> None:
    controller = Controller(SHAPE, [0, 1])
    waits, site = [], 0
    for life in range(FAILED_STARTS_MAX - 1):
        fence, launch = controller.handle(SitesFailed((site,), "oom"))
        assert fence == FenceSite(site)
        assert launch.site == 2 + life, "every life has a number of its own"
        waits.append(launch.after_ms)
        site = launch.site
    assert waits == sorted(waits) and waits[-1] > waits[0]
    controller.handle(registered(site))
    assert controller.handle(SitesFailed((site,), "oom"))[1].after_ms == 0, "it had come up"


def test_a_death_while_connecting_starts_the_gathering_again() -> None:
    controller = Controller(SHAPE, [0, 1])
    controller.handle(registered(0))
    controller.handle(registered(1))
    assert controller.handle(SitesFailed((1,), "killed")) == [FenceSite(1), LaunchSite(2, 0)]
    assert controller.state is FlowPhase.GATHERING
    (committed,) = controller.handle(registered(2))
    assert isinstance(committed, CommitView) and committed.view.number == 1


def test_what_an_earlier_life_says_is_stale() -> None:
    controller = Controller(SHAPE, [0, 1])
    controller.handle(SitesFailed((0,), "killed"))
    assert controller.handle(SitesFailed((0,), "the same death, reported by the host")) == []
    assert controller.handle(registered(0)) == [FenceSite(0)]
    assert controller.handle(registered(77)) == [FenceSite(77)], "nobody launched that one"
    assert 0 not in controller.addresses and 77 not in controller.addresses


def test_a_site_that_never_comes_up_ends_the_flow() -> None:
    controller = Controller(SHAPE, [0, 1])
    site = 0
    for _ in range(FAILED_STARTS_MAX - 1):
        site = controller.handle(SitesFailed((site,), "No module named holdfast"))[1].site
    (end,) = controller.handle(SitesFailed((site,), "No module named holdfast"))
    assert isinstance(end.error, HostError)
    assert "never registered: No module named holdfast" in str(end.error)


def test_stopping() -> None:
    controller = running()
    assert controller.handle(StopRequested(drain=True)) == [DrainFlow(0)]
    assert controller.handle(StopRequested(drain=True)) == []
    assert controller.handle(StopRequested(drain=False)) == [EndFlow(None)]
    assert controller.handle(finished(controller, 0)) == []  # nothing matters any more


@pytest.mark.parametrize("registered_sites", [1, 2], ids=["gathering", "connecting"])
def test_stopping_before_the_start(registered_sites: int) -> None:
    controller = Controller(SHAPE, [0, 1])
    for site in range(registered_sites):
        controller.handle(registered(site))
    assert controller.handle(StopRequested(drain=False)) == [EndFlow(None)]
    assert controller.state is FlowPhase.DONE


def test_an_error_of_the_flow_ends_it() -> None:
    error = ValueError("bad")
    assert running().handle(FlowFailed(0, error)) == [EndFlow(error)]


def test_an_error_while_the_flow_connects_or_drains_ends_it() -> None:
    error, connecting, draining = ValueError("bad"), Controller(SHAPE, [0, 1]), running()
    connecting.handle(registered(0))
    connecting.handle(registered(1))
    draining.handle(StopRequested(drain=True))
    for controller in (connecting, draining):
        assert controller.handle(FlowFailed(0, error)) == [EndFlow(error)]
        assert controller.state is FlowPhase.FAILED


def test_only_edges_of_the_table_are_taken() -> None:
    controller = running()
    with pytest.raises(InvariantError, match="history"):
        controller.lifecycle.advance(PhaseEvent.PLACED)
    assert controller.state is FlowPhase.RUNNING


# --- take-over ----------------------------------------------------------------------------------


def test_a_death_of_the_only_replica_names_the_partitions_that_are_lost() -> None:
    (end,) = running().handle(SitesFailed((1,), "killed"))
    assert isinstance(end, EndFlow) and isinstance(end.error, SiteLostError)
    text = str(end.error)
    assert "site 1 died (killed)" in text and "not protected" in text and "pairs()" in text
    assert "'packets': 1" in text and "'sessions': 4-7" in text and "alerts" not in text


def test_a_site_that_has_finished_may_go() -> None:
    controller = running()
    controller.handle(finished(controller, 1))
    assert controller.handle(SitesFailed((1,), "gone")) == []
    assert controller.handle(finished(controller, 0)) == [EndFlow(None)]


def test_a_death_is_a_view_without_the_site_and_another_one_is_launched() -> None:
    controller = running(PAIRS, 4, 0)
    assert replicas(controller) == "0,1 1,2 | 2,3 3,0 0,1 1,2 | 2,3"
    assert controller.protected
    effects = controller.handle(SitesFailed((1,), "killed"))
    assert effects == [
        FenceSite(1),
        LaunchSite(4, 0),
        CommitView(controller.view, addresses(0, 2, 3)),
        Wait(PatienceTimer(1), RELAUNCH_MS),
    ]
    assert str(controller.view) == "view 0.1 of 0 2 3: 0 2 | 2,3 3,0 0 2 | 2,3"
    assert controller.dead == {1: "killed"} and controller.roster.replaced == {1: 4}
    assert not controller.protected
    phases = [controller.phase((1, c)) for c in range(4)]
    assert phases == ["protected", "protected", "taken over", "taken over"]


def test_a_missing_replica_waits_for_a_launch_as_long_as_it_was_told() -> None:
    controller = running(PAIRS, 4, 0, relaunch_ms=300)
    assert Wait(PatienceTimer(1), 300) in controller.handle(SitesFailed((1,), "killed"))
    (view,) = views(controller.handle(WaitOver(PatienceTimer(1))))
    assert "+" in view, "replicas join the sites that are left"


def test_a_successor_does_not_wait_for_sites_that_were_launched_and_never_came() -> None:
    last = running(PAIRS, spares=0)
    last.handle(SitesFailed((1,), "killed"))
    assert last.view is not None and last.roster.launched == {2}
    after = Controller(PAIRS, [0])
    known = (last.view, 2, addresses(0), {0: domain(0)}, {1: "killed"}, True, False)
    effects = after.resume(*known, orphans=[2])
    assert len(views(effects)) == len(effects) == 1, "it sets no timer"
    assert after.roster.launched == {2}
    fence, launch = after.handle(SitesFailed((2,), "its application is gone"))[:2]
    assert fence == FenceSite(2) and isinstance(launch, LaunchSite) and launch.site == 1_000


def test_sites_that_fail_together_are_one_view() -> None:
    controller = running(protected(replicas=3), 4, 0)
    effects = controller.handle(SitesFailed((1, 2), "the host is gone"))
    assert views(effects) == ["view 0.1 of 0 3: 0 3 | 3,0 3,0 0 3 | 3,0"]
    assert [e.site for e in effects if isinstance(e, LaunchSite)] == [4, 5]


def test_the_loss_of_all_replicas_names_their_partitions() -> None:
    (end,) = running(PAIRS, 4, 0).handle(SitesFailed((1, 2), "killed"))
    assert isinstance(end, EndFlow) and isinstance(end.error, SiteLostError)
    text = str(end.error)
    assert "site 1, 2 died (killed); no replica is left of" in text and "more replicas" in text
    assert "'packets': 1" in text and "'sessions': 6-7" in text and "alerts" not in text


def test_a_silent_site_is_let_go_if_the_flow_can_do_without_it() -> None:
    controller = running(PAIRS, 4, 0)
    assert len(views(controller.handle(SitesFailed((1,), "silent", certain=False)))) == 1
    assert controller.handle(SitesFailed((2,), "silent", certain=False)) == [], "2 has the last"
    assert 2 not in controller.dead and controller.running
    (end,) = controller.handle(SitesFailed((2,), "exited"))
    assert isinstance(end.error, SiteLostError), "now it is known to be gone"


def test_a_replica_that_is_too_far_behind_is_let_go_likewise() -> None:
    controller = running(PAIRS, 4, 0)
    effects = controller.handle(ReplicaBehind(1, "300 MB are kept for it at site 0"))
    assert FenceSite(1) in effects and len(views(effects)) == 1
    assert "300 MB" in controller.dead[1]
    assert controller.handle(ReplicaBehind(2, "300 MB")) == []
    assert controller.handle(ReplicaBehind(1, "300 MB")) == [], "it is gone already"


def test_of_two_that_are_apart_one_is_let_go_that_can_be_spared() -> None:
    controller = running(PAIRS, 4, 0)
    effects = controller.handle(SitesPartitioned({(2, 1): (2, "how"), (1, 2): (2, "how")}))
    assert FenceSite(2) in effects and len(views(effects)) == 1
    assert controller.dead[2] == "it and site 1 have heard nothing from each other: how"
    assert controller.handle(SitesPartitioned({(1, 2): (3, "how")})) == [], "it is gone already"
    effects = controller.handle(SitesPartitioned({(3, 0): (2, "how"), (0, 3): (2, "how")}))
    assert FenceSite(0) in effects, "3 has the last replica of what 2 had"


def test_a_site_whose_call_does_not_end_is_let_go_and_the_call_is_named() -> None:
    controller = running(PAIRS, 4, 0)
    short = Call("sessions", 7, 50.0)
    assert controller.handle(SitesHung({1: short}, 60.0)) == []
    long = Call("sessions", 7, 61.0)
    effects = controller.handle(SitesHung({1: long, 3: Call("packets", 8, 40.0)}, 60.0))
    assert FenceSite(1) in effects and len(views(effects)) == 1
    assert controller.dead == {1: "it has been in stage 'sessions', epoch 7, for 61 s"}
    assert controller.handle(SitesHung({1: long}, 60.0)) == [], "it is gone already"


def test_a_call_that_ends_nowhere_ends_the_flow_and_no_site_is_failed_for_it() -> None:
    """The replicas are in it together: one after the other would be lost at the same row."""
    controller = running(PAIRS, 4, 0)
    calls = {1: Call("sessions", 7, 61.0), 2: Call("sessions", 7, 59.0)}
    (end,) = controller.handle(SitesHung(calls, 60.0))
    assert isinstance(end, EndFlow) and isinstance(end.error, HungError)
    assert "sites 1, 2 have been in stage 'sessions', epoch 7, for 61 s" in str(end.error)
    assert controller.dead == {}


def test_a_call_that_does_not_end_where_the_only_replica_is_ends_the_flow() -> None:
    (end,) = running().handle(SitesHung({1: Call("alerts", -1, 61.0)}, 60.0))
    assert isinstance(end.error, HungError)
    assert "site 1 has been in stage 'alerts' for 61 s, and there is no other replica" in str(
        end.error
    )
    (end,) = running().handle(SitesHung({1: Call("", -1, 61.0)}, 60.0))
    assert "site 1 has been busy with something for 61 s" in str(end.error)


def test_who_is_apart_from_most_is_let_go() -> None:
    controller = running(PAIRS, 4, 0)
    effects = controller.handle(
        SitesPartitioned({(3, 0): (2, "how"), (0, 1): (2, "how"), (2, 0): (2, "how")})
    )
    assert [e for e in effects if isinstance(e, FenceSite)] == [FenceSite(0)]


def test_two_that_are_apart_and_cannot_be_spared_are_waited_for_and_at_last_named() -> None:
    controller = running(SHAPE, 2, 0)
    assert controller.handle(SitesPartitioned({(0, 1): (9, "how")})) == [] and controller.dead == {}
    (end,) = controller.handle(SitesPartitioned({(0, 1): (10, "how")}))
    assert "sites 0 and 1 have heard nothing from each other for 10 leases (how)" in str(end.error)


def test_a_late_site_that_was_declared_dead_is_fenced() -> None:
    controller = running(PAIRS, 4, 0)
    controller.handle(SitesFailed((1,), "silent", certain=False))
    assert controller.handle(registered(1)) == [FenceSite(1)]
    assert controller.handle(SitesFailed((1,), "exited")) == []
    view = controller.view
    assert controller.handle(ViewSeen(1, view.term, view.number)) == []
    assert controller.handle(finished(controller, 1)) == []


def test_a_drain_is_asked_of_the_sequencer_that_takes_over() -> None:
    controller = running(PAIRS, 4, 0)
    assert controller.handle(StopRequested(drain=True)) == [DrainFlow(0)]
    effects = controller.handle(SitesFailed((0,), "killed"))
    assert DrainFlow(1) in effects
    kinds = [type(e) for e in effects]
    assert kinds.index(DrainFlow) == kinds.index(CommitView) + 1, "after it knows that it leads"


# --- catch-up -----------------------------------------------------------------------------------


def lost_one() -> Controller:
    """Site 1 of four is gone, and 4 has come in its place."""
    controller = running(PAIRS, 4, 0)
    controller.handle(SitesFailed((1,), "killed"))
    controller.handle(registered(4))
    return controller


def installed(controller: Controller, stage: int, group: int, site: int) -> list[ControllerEffect]:
    effects = controller.handle(reported(controller, site, (stage, group), "installed"))
    controller.handle(reported(controller, site, (stage, group), "caught_up"))
    return effects


def test_a_new_site_gets_the_missing_replicas_one_of_a_stage_at_a_time() -> None:
    controller = running(PAIRS, 4, 0)
    controller.handle(SitesFailed((1,), "killed"))
    effects = controller.handle(registered(4))
    assert views(effects) == ["view 0.2 of 0 2 3 4: 0+4 2 | 2,3 3,0 0+4 2 | 2,3"]
    assert controller.phase((1, 2)) == "taken over"
    assert seen(controller, 3) == [], "not all count the new replicas yet"
    assert seen(controller) == [OrderCatchUp(0, (0, 0), 4), OrderCatchUp(0, (1, 2), 4)]
    assert controller.phase((1, 2)) == "copying"
    effects = controller.handle(reported(controller, 4, (0, 0), "installed"))
    assert views(effects) == ["view 0.4 of 0 2 3 4: 0,4 2+4 | 2,3 3,0 0+4 2 | 2,3"]
    assert controller.phase((0, 0)) == "replaying"
    controller.handle(reported(controller, 4, (0, 0), "caught_up"))
    assert controller.phase((0, 0)) == "protected"
    assert seen(controller) == [OrderCatchUp(2, (0, 1), 4)], "the other was ordered before"
    installed(controller, 1, 2, 4)
    installed(controller, 0, 1, 4)
    assert seen(controller) == [OrderCatchUp(2, (1, 3), 0)], "0 has no more to do than 4 now"
    assert not controller.protected
    effects = installed(controller, 1, 3, 0)
    assert views(effects) == ["view 0.8 of 0 2 3 4: 0,4 2,4 | 2,3 3,0 0,4 2,0 | 2,3"]
    assert not controller.protected, "one of them may have died meanwhile"
    seen(controller)
    assert controller.protected


def test_a_standby_takes_over_at_once() -> None:
    controller = running(PAIRS, 4, 1)
    effects = controller.handle(SitesFailed((1,), "killed"))
    without, joining = views(effects)
    assert without.startswith("view 0.1 of 0 2 3:")
    assert joining == "view 0.2 of 0 2 3 4: 0+4 2 | 2,3 3,0 0+4 2 | 2,3"


def test_if_no_site_comes_the_others_get_the_replicas() -> None:
    controller = running(PAIRS, 4, 0)
    controller.handle(SitesFailed((1,), "killed"))
    effects = controller.handle(WaitOver(PatienceTimer(1)))
    assert views(effects) == ["view 0.2 of 0 2 3: 0+3 2 | 2,3 3,0 0+2 2 | 2,3"]
    assert seen(controller) == [OrderCatchUp(0, (0, 0), 3), OrderCatchUp(0, (1, 2), 2)]


def test_patience_ends_though_more_has_failed_since() -> None:
    controller = running(PAIRS, 4, 0)
    first = waits(controller.handle(SitesFailed((1,), "killed")))
    again = waits(controller.handle(SitesFailed((4,), "it never came up")))
    assert (first, again) == ([PatienceTimer(1)], [PatienceTimer(2)])
    assert controller.handle(WaitOver(PatienceTimer(1))) == [], "5 is expected since then"
    effects = controller.handle(WaitOver(PatienceTimer(2)))
    assert views(effects) == ["view 0.2 of 0 2 3: 0+3 2 | 2,3 3,0 0+2 2 | 2,3"]
    seen(controller)
    effects = controller.handle(reported(controller, 3, (0, 0), "installed"))
    assert replicas(controller) == "0,3 2+0 | 2,3 3,0 0+2 2 | 2,3", "nobody waits once more"
    assert waits(effects) == []


def test_one_wait_for_a_site_is_enough() -> None:
    controller = running(PAIRS, 4, 0)
    controller.handle(SitesFailed((1,), "killed"))
    assert controller.handle(WaitOver(RejoinTimer((0, 0)))) == []


def test_a_joiner_that_dies_before_its_replica_was_ordered() -> None:
    controller = lost_one()
    effects = controller.handle(SitesFailed((4,), "killed"))
    assert Wait(RejoinTimer((0, 0)), 0) in effects and Wait(RejoinTimer((1, 2)), 0) in effects
    assert LaunchSite(5, 0) in effects
    assert replicas(controller) == "0 2 | 2,3 3,0 0 2 | 2,3"
    assert views(controller.handle(registered(5))) == [
        "view 0.4 of 0 2 3 5: 0 2+5 | 2,3 3,0 0 2+5 | 2,3"
    ], "what has just failed pauses, the others go first"
    assert seen(controller) == [OrderCatchUp(2, (0, 1), 5), OrderCatchUp(2, (1, 3), 5)]


def test_a_joiner_that_dies_while_it_is_copied_to() -> None:
    controller = lost_one()
    seen(controller)
    controller.handle(SitesFailed((4,), "killed"))
    assert controller.handle(reported(controller, 4, (1, 2), "installed")) == [], "too late"
    controller.handle(WaitOver(RejoinTimer((0, 0))))
    controller.handle(WaitOver(RejoinTimer((1, 2))))
    assert views(controller.handle(registered(5))) == [
        "view 0.4 of 0 2 3 5: 0+5 2 | 2,3 3,0 0+5 2 | 2,3"
    ]
    assert seen(controller) == [OrderCatchUp(0, (0, 0), 5), OrderCatchUp(0, (1, 2), 5)]


def test_a_joiner_that_dies_when_its_replica_is_in_place() -> None:
    controller = lost_one()
    seen(controller)
    controller.handle(reported(controller, 4, (1, 2), "installed"))
    assert replicas(controller) == "0+4 2 | 2,3 3,0 0,4 2+4 | 2,3"
    controller.handle(SitesFailed((4,), "killed"))
    assert replicas(controller) == "0 2 | 2,3 3,0 0 2 | 2,3"
    assert controller.phase((1, 2)) == "taken over"
    controller.handle(WaitOver(RejoinTimer((0, 0))))
    controller.handle(WaitOver(RejoinTimer((1, 3))))
    controller.handle(registered(5))
    assert replicas(controller) == "0+5 2 | 2,3 3,0 0+5 2 | 2,3"


def test_a_replica_that_failed_is_tried_again_after_a_pause_and_not_for_ever() -> None:
    controller = lost_one()
    waits = []
    for attempt in range(JOINS_MAX):
        seen(controller)
        failed = reported(controller, 4, (1, 2), "failed", "its connection broke")
        effects = controller.handle(failed)
        waits += [e.ms for e in effects if isinstance(e, Wait) and e.timer == RejoinTimer((1, 2))]
        assert controller.view.group((1, 2)).joining == ()
        assert len(views(effects)) == 1
        if attempt < JOINS_MAX - 1:
            assert (1, 2) not in controller.joins.unrecovered
            (again,) = views(controller.handle(WaitOver(RejoinTimer((1, 2)))))
            assert controller.view.group((1, 2)).joining == (4,), again
    assert waits == sorted(waits) and len(waits) == JOINS_MAX - 1
    assert (
        "5 attempts failed, the last because its connection broke"
        in (controller.joins.unrecovered[1, 2])
    )
    controller.handle(reported(controller, 4, (0, 0), "installed"))
    assert controller.view.group((1, 2)).joining == (), "it was given up"
    assert controller.view.group((1, 3)).joining == (4,), "the others are not"
    assert not controller.protected
    controller.handle(SitesFailed((4,), "killed"))
    controller.handle(registered(5))
    assert controller.joins.unrecovered == {}, "a new site is a new chance"


def test_a_donor_that_dies_is_replaced_by_another_replica() -> None:
    controller = running(protected(replicas=3), 4, 1)
    assert replicas(controller).startswith("0,1,2 1,2,3 |")
    controller.handle(SitesFailed((1,), "killed"))
    assert controller.view.group((0, 0)).all == (0, 2, 4)
    assert OrderCatchUp(2, (0, 0), 4) in seen(controller)
    controller.handle(SitesFailed((2,), "killed"))
    assert controller.view.group((0, 0)).replicas == (0,)
    assert OrderCatchUp(0, (0, 0), 4) in seen(controller)


LINE = replace(PAIRS, stages=tuple(replace(s, partitions=1) for s in PAIRS.stages))
"""Three tasks, each with two replicas."""


def test_word_of_a_replica_in_time_saves_the_flow_when_its_donor_dies() -> None:
    controller = running(LINE, 2, 1)
    assert replicas(controller) == "0,1 | 1,0 | 0,1"
    controller.handle(SitesFailed((1,), "killed"))
    assert replicas(controller) == "0+2 | 0+2 | 0+2"
    seen(controller)
    controller.handle(reported(controller, 2, (0, 0), "installed"))
    controller.handle(reported(controller, 2, (2, 0), "installed"))
    assert controller.handle(SitesFailed((0,), "killed too")) == [Wait(DoubtTimer(1), DOUBT_MS)]
    effects = controller.handle(reported(controller, 2, (1, 0), "installed"))
    assert replicas(controller) == "2 | 2 | 2"
    assert controller.running and controller.dead == {1: "killed", 0: "killed too"}
    assert FenceSite(0) in effects
    last = views(effects)[-1]
    assert last == str(controller.view), "and all of them hear of it"
    assert controller.handle(WaitOver(DoubtTimer(1))) == []


def test_a_task_that_cannot_be_rebuilt_ends_the_flow_and_says_why() -> None:
    guards = {
        "source": ProtectionSpec(replicas=2),
        "keyed": ProtectionSpec(level=1, rebuild_level=1),
        "sink": ProtectionSpec(replicas=2),
    }
    anew = replace(LINE, stages=tuple(replace(s, guard=guards[s.kind]) for s in LINE.stages))
    controller = running(anew, 3, 1)
    assert controller.view is not None
    (lost,) = controller.view.group(KEYED).replicas
    controller.handle(SitesFailed((lost,), "killed"))
    effects: list[ControllerEffect] = []
    for _ in range(JOINS_MAX):
        seen(controller)
        (site,) = controller.view.group(KEYED).joining
        effects = controller.handle(reported(controller, site, KEYED, "failed", "no room"))
        controller.handle(WaitOver(RejoinTimer((1, 0))))
    (end,) = (e for e in effects if isinstance(e, EndFlow))
    text = str(end.error)
    assert text.startswith(f"{JOINS_MAX} attempts failed, the last because no room; ")


def test_no_word_of_the_replica_ends_the_flow() -> None:
    controller = running(LINE, 2, 1)
    controller.handle(SitesFailed((1,), "killed"))
    seen(controller)
    controller.handle(reported(controller, 2, (0, 0), "installed"))
    assert controller.handle(SitesFailed((0,), "killed too")) == [Wait(DoubtTimer(1), DOUBT_MS)]
    (end,) = controller.handle(WaitOver(DoubtTimer(1)))
    assert isinstance(end.error, SiteLostError)
    text = str(end.error)
    assert "site 0 died (killed too); no replica is left of 'sessions': 0; 'alerts': 0" in text


def test_a_replica_that_says_it_failed_does_not_save_the_flow() -> None:
    controller = running(LINE, 2, 1)
    controller.handle(SitesFailed((1,), "killed"))
    seen(controller)
    controller.handle(SitesFailed((0,), "killed too"))
    controller.handle(reported(controller, 2, (1, 0), "failed", "site 0 died"))
    effects = controller.handle(WaitOver(DoubtTimer(1)))
    assert [type(e) for e in effects] == [EndFlow] and isinstance(effects[0].error, SiteLostError)


def test_the_last_replicas_die_after_they_have_finished_while_others_join() -> None:
    """Site 2 cannot finish: nobody is left to hand over what joins there. `holdfast model` found
    this, with two crashes."""
    controller = running(LINE, 2, 1)
    controller.handle(SitesFailed((1,), "killed"))
    controller.handle(WaitOver(PatienceTimer(0)))
    seen(controller)
    controller.handle(reported(controller, 2, (0, 0), "installed"))
    assert replicas(controller) == "0,2 | 0+2 | 0+2"
    assert controller.handle(finished(controller, 0)) == []
    lost = controller.handle(SitesFailed((0,), "killed"))
    assert lost == [EndFlow(None)], "all was delivered"


def test_a_site_that_gets_a_replica_after_it_had_finished_is_not_finished() -> None:
    """Site 0 has read the source to its end. Then it gets a replica of the sink, and its donor
    dies: the flow is done when that replica is through."""
    controller = running(LINE, 4, 0)
    assert replicas(controller) == "0,1 | 1,2 | 2,3"
    controller.handle(finished(controller, 0))
    controller.handle(SitesFailed((3,), "killed"))
    controller.handle(WaitOver(PatienceTimer(1)))
    assert replicas(controller) == "0,1 | 1,2 | 2+0"
    seen(controller)
    controller.handle(reported(controller, 0, (2, 0), "installed"))
    controller.handle(SitesFailed((2,), "killed"))
    assert controller.view.group((2, 0)).replicas == (0,)
    seen(controller)
    said = controller.handle(finished(controller, 1))
    assert said == [], "0 has not said that the sink is through"
    assert controller.handle(finished(controller, 0)) == [EndFlow(None)]


def finished_donor_lost() -> Controller:
    """Site 0 leads the source and joins the sink, whose donor dies after it has finished: nobody
    can hand over, and a site that waits for state does not report that it has finished."""
    controller = running(LINE, 4, 0)
    controller.handle(SitesFailed((3,), "killed"))
    controller.handle(WaitOver(PatienceTimer(1)))
    assert replicas(controller) == "0,1 | 1,2 | 2+0"
    seen(controller)
    controller.handle(finished(controller, 2))
    controller.handle(SitesFailed((2,), "killed"))
    return controller


def test_a_leader_that_joins_at_a_finished_donor_which_dies_can_finish() -> None:
    controller = finished_donor_lost()
    assert replicas(controller) == "0,1 | 1,2 | 2", "the join is broken off"
    controller.handle(registered(4))
    assert replicas(controller) == "0,1 | 1,2 | 2", "and no other begins: nobody can hand over"
    assert controller.handle(finished(controller, 0)) == []
    assert controller.handle(finished(controller, 1)) == [EndFlow(None)]


def test_a_site_that_died_when_it_had_finished_is_not_missed_in_later_views() -> None:
    controller = finished_donor_lost()
    controller.handle(SitesFailed((1,), "killed"))
    assert replicas(controller) == "0 | 2 | 2"
    assert controller.handle(finished(controller, 0)) == [EndFlow(None)]


def test_a_site_that_died_when_it_had_finished_cannot_lead_a_sink() -> None:
    """What the leader of the sink has not written is lost with both."""
    controller = running(LINE, 4, 0)
    controller.handle(SitesFailed((0,), "killed"))
    controller.handle(WaitOver(PatienceTimer(1)))
    assert replicas(controller) == "1+3 | 1,2 | 2,3"
    seen(controller)
    controller.handle(reported(controller, 3, (0, 0), "installed"))
    controller.handle(SitesFailed((1,), "killed"))
    assert replicas(controller) == "3 | 2 | 2,3"
    controller.handle(finished(controller, 3))
    assert controller.handle(SitesFailed((3,), "killed")) == []
    (end,) = controller.handle(SitesFailed((2,), "killed"))
    assert isinstance(end.error, SiteLostError)


def test_replicas_of_tasks_that_are_through_do_not_keep_the_flow_from_ending() -> None:
    controller = running(LINE, 2, 1)
    controller.handle(finished(controller, 0))
    controller.handle(SitesFailed((1,), "killed"))
    seen(controller)
    controller.handle(finished(controller, 0))  # it may say so again
    assert controller.state is FlowPhase.DONE, "though all three miss a replica"


# --- placement -----------------------------------------------------------------------------------


GRID = {s: Domain(f"p{s}", f"e{s // 2}", f"h{s // 4}", f"a{s // 8}") for s in range(16)}
"""Two sites to an executor, two executors to a host, two hosts to an application."""


def test_too_few_sites_for_the_replicas_end_the_flow_before_it_starts() -> None:
    controller = Controller(protected(3), [0, 1])
    controller.handle(registered(0))
    (end,) = controller.handle(registered(1))
    assert isinstance(end.error, HostError) and "wants 3 replicas" in str(end.error)
    assert controller.state is FlowPhase.FAILED


def test_new_replicas_are_made_only_where_they_are_apart() -> None:
    controller = Controller(protected(apart="executor"), [0, 2])
    for site in (0, 2):
        controller.handle(SiteRegistered(site, ("", site), GRID[site]))
    seen(controller)
    (_, launch, *_) = controller.handle(SitesFailed((2,), "killed"))
    controller.handle(SiteRegistered(launch.site, ("", 0), GRID[1]))  # beside site 0
    assert all(controller.view.group(u).all == (0,) for u in controller.view.tasks())
    assert controller.joins.unrecovered[0, 0] == "no site is in another executor than its replicas"
    assert not controller.protected


# --- changing protection ------------------------------------------------------------------------


ANEW = ProtectionSpec(level=1, rebuild_level=1)


def keyed_as(guard: ProtectionSpec) -> Shape:
    """Pairs at the ends."""
    stages = tuple(replace(s, guard=guard) if s.kind == "keyed" else s for s in PAIRS.stages)
    return replace(PAIRS, stages=stages)


def test_a_replica_that_is_made_for_another_reason_now_is_ordered_again() -> None:
    """Pairs shall be passive, and pairs again before the standby has its state: the donor has
    forgotten the first order with the replica that it was for."""
    controller = running(PAIRS, sites=2, spares=0)
    for guard in (ProtectionSpec(standbys=1, every_ms=100), ProtectionSpec(replicas=2)):
        controller.handle(ProtectionWanted(keyed_as(guard).guards))
        assert controller.view is not None
        (joiner,) = controller.view.group(KEYED).joining
        orders = [e for e in seen(controller) if isinstance(e, OrderCatchUp) and e.task == KEYED]
        assert [e.joiner for e in orders] == [joiner]


def test_a_task_is_rebuilt_at_one_site_only() -> None:
    """Also if it is lost while its second replica is being made."""
    controller = running(keyed_as(ANEW), sites=4, spares=2)
    controller.handle(ProtectionWanted(PAIRS.guards))
    assert controller.view is not None
    replicas = controller.view.group(KEYED).replicas
    assert len(controller.view.group(KEYED).joining) == 1
    controller.handle(SitesFailed(replicas, "crashed"))
    group = controller.view.group(KEYED)
    assert group.replicas == () and len(group.joining) == 1


def test_sources_and_sinks_get_more_replicas_and_do_not_lose_those_that_they_have() -> None:
    """No view takes a sequencer or a sink from a site that lives."""
    controller = running(PAIRS, sites=4, spares=0)
    controller.handle(ProtectionWanted(protected(replicas=3).guards))
    assert controller.view is not None
    assert all(len(controller.view.group(u).all) >= 2 for u in controller.view.tasks())
    assert len(controller.view.groups[0][0].all) == 3
    controller = running(protected(replicas=3), sites=4, spares=0)
    controller.handle(ProtectionWanted(PAIRS.guards))
    assert controller.view is not None
    counts = {s.kind: len(controller.view.groups[s.id][0].replicas) for s in PAIRS.stages}
    assert counts == {"source": 3, "keyed": 2, "sink": 3}


TWO_KEYED = Shape(
    (
        StageShape(0, "packets", "source", 1, (), (0,), guard=ProtectionSpec(replicas=2)),
        StageShape(1, "sessions", "keyed", 4, (0,), (1,), guard=ProtectionSpec(replicas=2)),
        StageShape(2, "groups", "keyed", 4, (1,), (2,), guard=ProtectionSpec(replicas=2)),
        StageShape(3, "alerts", "sink", 1, (2,), (), guard=ProtectionSpec(replicas=2)),
    ),
    producer_of=(0, 1, 2),
    consumer_of=(1, 2, 3),
)


def test_stages_that_share_sites_after_a_change_of_protection_are_said() -> None:
    """Tasks are not moved for it. As pairs they shared sites; rebuilt, they must not."""
    controller = running(TWO_KEYED, sites=4, spares=0)
    assert controller.exposures == []
    guards = tuple(
        replace(s.guard, replicas=1, level=1, rebuild_level=1) if s.kind == "keyed" else s.guard
        for s in TWO_KEYED.stages
    )
    controller.handle(ProtectionWanted(guards))
    seen(controller)
    view = controller.view
    assert view is not None and view.aims
    for task in view.tasks():
        for site in view.group(task).replicas if 0 < task[0] < 3 else ():
            controller.handle(reported(controller, site, task, "retained"))
    assert controller.shape.guards == guards, "the change is complete"
    found = [str(exposure) for exposure in controller.exposures]
    assert found and all("it has partitions of 'sessions', 'groups'" in text for text in found)
    assert all(text.endswith("takes sites in 2 different processes") for text in found)
