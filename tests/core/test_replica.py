"""The life of a replica: in every state, whatever may happen to it then.

Stories are told to the dataflow of one site, event by event. Together they take every edge of the
table.
"""

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import (
    AbandonHandOver,
    AskLog,
    BeginTask,
    CloseTask,
    DiscardState,
    HandOver,
    IngestEpochs,
    OpenTask,
    ProcessBundles,
    ReceiveState,
    RefuseCheckpoint,
    ReportJoinFailed,
    ReportReplica,
    SendAck,
    SiteEffect,
)
from holdfast.core.events import (
    BundleArrived,
    CatchUpOrdered,
    CheckpointDue,
    CheckpointRefused,
    HandOverBegun,
    LogTold,
    PeerConnected,
    PeerLost,
    RecordArrived,
    ReplicaInstalled,
    RetentionOrdered,
    SinkDurable,
    TaskProcessed,
    ViewCommitted,
)
from holdfast.core.ids import NO_EPOCH
from holdfast.core.layout import PartitionGroup, Shape, StageShape, View
from holdfast.core.messages import BundleKey, LogQuery
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord
from holdfast.core.replica import STALE, TABLE, Event, State
from holdfast.core.stale import Stale
from holdfast.core.upstream import Gap, Log
from holdfast.errors import InvariantError
from tests.support.core_machines import KEYED, SINK, SOURCE, Frames, of
from tests.support.replica_edges import taken

PAIRS = ProtectionSpec("pairs", replicas=2)
PASSIVE = ProtectionSpec("passive", standbys=1, every_ms=100)
REBUILT = ProtectionSpec("upstream", level=1, rebuild_level=1)
BOTH = replace(PASSIVE, level=1, rebuild_level=1)
"""While a stage changes from being rebuilt to having a standby."""
ENDS = ProtectionSpec("pairs", replicas=2, deterministic=False, followers=True)


def shape(keyed: ProtectionSpec = PAIRS, ends: ProtectionSpec = PAIRS) -> Shape:
    return Shape(
        (
            StageShape(0, "packets", "source", 1, (), (0,), guard=ends),
            StageShape(1, "sessions", "keyed", 1, (0,), (1,), guard=keyed),
            StageShape(2, "alerts", "sink", 1, (1,), (), guard=ends),
        ),
        producer_of=(0, 1),
        consumer_of=(1, 2),
    )


def group(held: str) -> PartitionGroup:
    """``0,1+2@5~3``: 0 and 1 compute, 2 joins since view 5, 3 is a standby."""
    computing, *standbys = held.split("~")
    computing, *joining = computing.split("+")
    replicas = tuple(int(s) for s in computing.split(",") if s)
    joined_view = [tuple(int(n) for n in j.split("@")) for j in joining]
    return PartitionGroup(
        0,
        1,
        replicas,
        tuple(s[0] for s in joined_view),
        tuple((s[0], s[1]) for s in joined_view if len(s) > 1),
        tuple(int(s) for s in standbys),
    )


def view(number: int, source: str, keyed: str, sink: str) -> ViewCommitted:
    groups = tuple((group(c),) for c in (source, keyed, sink))
    members = tuple(sorted({s for (c,) in groups for s in c.all}))
    return ViewCommitted(View(0, number, members, groups))


def kept_since(event: ViewCommitted, **joined_view: int) -> ViewCommitted:
    """With the joined views that replicas of the keyed stage had before: ``s2=1``."""
    source, (keyed,), sink = event.view.groups
    keyed = replace(keyed, joined_view=tuple((int(s[1:]), n) for s, n in joined_view.items()))
    return ViewCommitted(replace(event.view, groups=(source, (keyed,), sink)))


class Site:
    """Site 2, with connections to 0 and 1; the sequencer has cut epochs 0 to 7."""

    def __init__(self, first: ViewCommitted, of_shape: Shape | None = None) -> None:
        self.machine = Dataflow(2, of_shape or shape(), window=3)
        for other in (0, 1):
            self.machine.handle(PeerConnected(other))
        self.tell(first)

    def tell(self, *events: object) -> list[SiteEffect]:
        effects = [e for event in events for e in self.machine.handle(event)]  # type: ignore[arg-type]
        self.machine.check_invariants()
        return effects

    def record(self, upto: int = 7) -> None:
        for epoch in range(upto + 1):
            self.tell(RecordArrived(EpochRecord(epoch, epoch, ())))

    def state(self, task: tuple[int, int] = KEYED) -> State:
        return self.machine.tasks[task].state

    def stale(self) -> dict[Stale, int]:
        """What was discarded since this was asked the last time."""
        found = dict(self.machine.stale)
        self.machine.stale.clear()
        return found


def begun(donor: int = 0, joined_view: int = 1, task: tuple[int, int] = KEYED) -> HandOverBegun:
    return HandOverBegun(task, donor, "offer", joined_view)


def complete(epoch: int = 5, task: tuple[int, int] = KEYED, whole: bool = True) -> ReplicaInstalled:
    outputs = {KEYED: [1], SOURCE: [0], SINK: []}[task]
    gap = Gap(epoch, NO_EPOCH, NO_EPOCH, 0, {})
    kept = {x: {0: []} for x in outputs}
    return ReplicaInstalled(task, epoch, kept, {x: {0: gap} for x in outputs}, whole)


def bundle(epoch: int, joined_view: int = 1) -> BundleArrived:
    return BundleArrived(BundleKey(0, epoch, 0, 0, joined_view), Frames("b"))


def processed(epoch: int) -> TaskProcessed:
    return TaskProcessed(KEYED, epoch, True, {1: {0: Frames("o")}})


def joining(of_shape: Shape | None = None, keyed: str = "0+2@1") -> Site:
    return Site(view(1, "0,1", keyed, "0,1"), of_shape)


def installing(of_shape: Shape | None = None, keyed: str = "0+2@1") -> Site:
    site = joining(of_shape, keyed)
    site.tell(begun())
    return site


def searching() -> Site:
    return joining(shape(REBUILT), "+2@1")


def replaying() -> Site:
    site = installing()
    site.record()
    site.tell(complete(5))
    return site


def active() -> Site:
    return Site(view(0, "0,1", "0,2", "0,1"))


def standby() -> Site:
    return Site(view(0, "0,1", "0~2", "0,1"), shape(PASSIVE))


# --- waiting for its state ----------------------------------------------------------------------


def test_a_joiner_becomes_a_replica_like_any_other() -> None:
    site = joining()
    assert site.state() is State.JOINING
    assert site.tell(begun()) == [ReceiveState(KEYED, 0, "offer", False)]
    assert site.state() is State.INSTALLING
    site.record()
    effects = site.tell(complete(5))
    assert site.state() is State.REPLAYING
    assert of(ReportReplica, effects) == [ReportReplica(KEYED, "installed")]
    site.tell(kept_since(view(2, "0,1", "0,2", "0,1"), s2=1))
    for epoch in (6, 7):
        assert [o.epoch for o in of(ProcessBundles, site.tell(bundle(epoch)))] == [epoch]
        effects = site.tell(processed(epoch))
    assert ReportReplica(KEYED, "caught_up") in effects and site.state() is State.ACTIVE


def test_views_that_come_meanwhile_change_nothing() -> None:
    for site, state in (
        (joining(), State.JOINING),
        (installing(), State.INSTALLING),
        (replaying(), State.REPLAYING),
    ):
        effects = site.tell(view(2, "0,1", "0+2@1", "0"))
        assert site.state() is state
        assert not [e for e in effects if isinstance(e, OpenTask | CloseTask | DiscardState)]


def test_the_donor_is_lost_and_the_joiner_says_so() -> None:
    site = installing()
    assert site.tell(PeerLost(0))[:2] == [
        DiscardState(KEYED),
        ReportReplica(KEYED, "failed", "its connection to site 0 broke"),
    ]
    assert site.state() is State.JOINING
    assert site.tell(complete()) == [] and site.stale() == {Stale.NOT_AWAITED: 1}
    assert "the hand-over was broken off" in site.machine.tasks[KEYED].history[-1]
    assert site.tell(begun(1)) == [ReceiveState(KEYED, 1, "offer", False)], "from another one"
    assert site.state() is State.INSTALLING


def test_the_donor_leaves_the_view_and_another_one_is_left() -> None:
    site = installing()
    effects = site.tell(view(2, "1", "1+2@1", "1"))
    assert effects[:2] == [DiscardState(KEYED), ReportReplica(KEYED, "failed", "site 0 died")]
    assert site.state() is State.JOINING


def test_another_site_is_lost_and_the_hand_over_goes_on() -> None:
    site = installing()
    assert DiscardState(KEYED) not in site.tell(PeerLost(1), view(2, "0", "0+2@1", "0"))
    assert site.state() is State.INSTALLING


def test_a_hand_over_that_begins_again_makes_what_has_come_void() -> None:
    site = installing()
    assert site.tell(begun(1)) == [ReceiveState(KEYED, 1, "offer", False)]
    assert site.state() is State.INSTALLING
    assert DiscardState(KEYED) not in site.tell(PeerLost(0)), "nothing comes from it any more"
    assert DiscardState(KEYED) in site.tell(PeerLost(1))


def test_state_for_a_replica_that_was_here_before_is_not_taken_for_the_next_one() -> None:
    """It was given up, and joins again. Between the two, producers did not count it, and may have
    dropped what the old state lacks."""
    site = joining()
    effects = site.tell(view(2, "0,1", "0", "0,1"), view(3, "0,1", "0+2@3", "0,1"))
    assert of(CloseTask, effects) == [CloseTask(KEYED)]
    assert site.tell(begun(joined_view=1)) == []
    assert site.tell(complete()) == []
    assert site.state() is State.JOINING
    assert site.stale() == {Stale.OTHER_INCARNATION: 1, Stale.NOT_AWAITED: 1}
    assert site.tell(begun(joined_view=3)) == [ReceiveState(KEYED, 0, "offer", False)]


def test_the_donor_says_for_which_incarnation_it_hands_over() -> None:
    site = Site(view(1, "0,1", "2+1@1", "0,1"))
    (over,) = of(HandOver, site.tell(CatchUpOrdered(KEYED, 1)))
    assert over.joined_view == 1


@pytest.mark.parametrize("has", ["replaying", "active"])
def test_a_replica_that_computes_takes_no_state(has: str) -> None:
    site, joined_view = (replaying(), 1) if has == "replaying" else (active(), 0)
    finished = site.machine.tasks[KEYED].finished
    assert site.tell(begun(joined_view=joined_view), complete(7)) == []
    assert site.stale() == {Stale.NOT_AWAITED: 2}
    assert site.state().value == has and site.machine.tasks[KEYED].finished == finished


@pytest.mark.parametrize(
    "made",
    [joining, installing, searching, replaying, active, standby],
    ids=lambda made: made.__name__,
)
def test_whatever_it_is_at_a_view_may_remove_it_or_have_it_join_again(made: object) -> None:
    site = made()  # type: ignore[operator]
    before = site.machine.tasks[KEYED]
    again = view(4, "0,1", "0+2@4", "0,1")
    effects = site.tell(again)
    assert before.state is State.RETIRED and "retired" in before.history[-1]
    assert [type(e) for e in effects[:2]] == [CloseTask, OpenTask]
    assert site.state() is State.JOINING and site.machine.tasks[KEYED] is not before
    assert site.tell(view(5, "0,1", "0", "0,1"))[0] == CloseTask(KEYED)
    assert KEYED not in site.machine.tasks
    late = (begun(), complete(), processed(6), CheckpointDue(KEYED), CatchUpOrdered(KEYED, 0))
    assert site.tell(bundle(6), *late) == []
    assert site.stale() == {Stale.NOT_HELD: 1 + len(late)}


def test_what_was_sent_to_the_replica_before_is_not_counted() -> None:
    site = replaying()
    site.tell(view(4, "0,1", "0+2@4", "0,1"), begun(joined_view=4), complete(7))
    site.stale()
    assert site.tell(bundle(8, joined_view=1)) == [] and site.stale() == {
        Stale.OTHER_INCARNATION: 1
    }
    assert of(ProcessBundles, site.tell(bundle(8, joined_view=4)))
    assert site.tell(bundle(8, joined_view=4)) == [] and site.stale() == {Stale.REPEATED: 1}


# --- being rebuilt ------------------------------------------------------------------------------


def told(site: int, credit: int = 1, joined_view: int = 1) -> LogTold:
    return LogTold(site, LogQuery(0, 0, 0, joined_view), Log(3, 8, credit, {}))


def test_a_replica_is_rebuilt_if_nobody_has_its_state() -> None:
    site = searching()
    assert site.state() is State.SEARCHING
    assert site.tell(told(0)) == []
    effects = site.tell(told(1))
    assert effects[0] == BeginTask(KEYED, False)
    assert site.state() is State.REPLAYING
    assert site.tell(told(1)) == [] and site.stale() == {Stale.NOT_SEARCHING: 1}
    site.tell(view(2, "0,1", "+2@1", "0,1"))
    assert site.state() is State.REPLAYING, "the view does not know yet that it has its state"


def test_it_has_caught_up_before_the_view_knows_of_it() -> None:
    site = searching()
    site.tell(told(0), told(1))
    for epoch in range(4, 9):
        site.tell(bundle(epoch), processed(epoch))
    assert site.state() is State.ACTIVE
    for number, keyed in ((2, "+2@1"), (3, "0+2@1")):
        site.tell(view(number, "0,1", keyed, "0,1"))
        assert site.state() is State.ACTIVE


def test_the_last_donor_dies_and_the_joiner_is_rebuilt_at_once() -> None:
    for site in (joining(shape(REBUILT)), installing(shape(REBUILT))):
        dropped = site.state() is State.INSTALLING
        effects = site.tell(view(2, "1", "+2@1", "1"))
        assert site.state() is State.SEARCHING
        assert (DiscardState(KEYED) in effects) == dropped
        assert not of(ReportReplica, effects), "nothing has failed: it goes on in another way"
        assert [e.site for e in of(AskLog, effects)] == [1]
        assert site.tell(begun(), complete()) == [], "late, from the donor that is gone"
        assert site.stale() == {Stale.NOT_AWAITED: 2} and site.state() is State.SEARCHING


def test_a_producer_is_lost_while_the_replica_searches() -> None:
    site = searching()
    site.tell(told(0))
    assert BeginTask(KEYED, False) in site.tell(PeerLost(1), view(2, "0", "+2@1", "0"))


def test_what_an_earlier_incarnation_was_told_does_not_count() -> None:
    site = searching()
    site.tell(view(2, "0,1", "", "0,1"), view(3, "0,1", "+2@3", "0,1"))
    assert site.tell(told(0, joined_view=1), told(1, joined_view=1)) == []
    assert site.stale() == {Stale.OTHER_INCARNATION: 2} and site.state() is State.SEARCHING


def test_that_it_cannot_be_rebuilt_is_said() -> None:
    site = searching()
    assert site.tell(told(0, credit=0), told(1)) == [ReportReplica(KEYED, "impossible")]
    assert site.state() is State.SEARCHING
    asked = of(AskLog, site.tell(view(2, "0,1", "+2@1", "0,1")))
    assert [e.site for e in asked] == [0, 1], "they may have more by then"


# --- standing by --------------------------------------------------------------------------------


def test_a_standby_takes_one_checkpoint_after_another_and_then_over() -> None:
    site = standby()
    for epoch in (2, 4):
        after = NO_EPOCH if epoch == 2 else 2
        begins = HandOverBegun(KEYED, 0, "offer", 0, epoch, after)
        assert site.tell(begins) == [ReceiveState(KEYED, 0, "offer", True)]
        site.tell(complete(epoch, whole=epoch == 2))
        assert site.state() is State.STANDBY and site.machine.tasks[KEYED].finished == epoch
    site.record(4)
    effects = site.tell(view(1, "1", "2", "1"))
    assert ReportReplica(KEYED, "caught_up") in effects and site.state() is State.ACTIVE


def test_a_standby_does_not_go_back_when_one_with_an_older_checkpoint_takes_over() -> None:
    """Producers have dropped what it said that it has."""
    site = standby()
    site.tell(HandOverBegun(KEYED, 0, "offer", 0, 4), complete(4))
    site.tell(view(1, "0,1", "1~2", "0,1"))
    refused = RefuseCheckpoint(KEYED, 1, 0, offered=3, has=4)
    assert site.tell(HandOverBegun(KEYED, 1, "offer", 0, 3)) == [refused]
    assert site.machine.tasks[KEYED].finished == 4 and site.state() is State.STANDBY
    effects = site.tell(HandOverBegun(KEYED, 1, "offer", 0, 6, after=3))
    assert effects == [replace(refused, offered=6)], "it builds on the one that was refused"
    assert of(ReceiveState, site.tell(HandOverBegun(KEYED, 1, "offer", 0, 4)))


def test_what_was_coming_in_is_void_when_its_sender_begins_with_what_is_refused() -> None:
    site = standby()
    site.tell(HandOverBegun(KEYED, 0, "offer", 0, 4), complete(4))
    site.tell(HandOverBegun(KEYED, 0, "offer", 0, 6, after=4))
    effects = site.tell(HandOverBegun(KEYED, 0, "offer", 0, 7, after=6))
    assert effects == [DiscardState(KEYED), RefuseCheckpoint(KEYED, 0, 0, offered=7, has=4)]


def test_a_checkpoint_that_was_under_way_is_void_when_the_standby_takes_over() -> None:
    site = standby()
    site.record()
    site.tell(HandOverBegun(KEYED, 0, "offer", 0))
    assert DiscardState(KEYED) in site.tell(view(1, "1", "2", "1"))
    assert site.state() is State.REPLAYING
    assert site.tell(complete(3), HandOverBegun(KEYED, 0, "offer", 0)) == []
    assert site.stale() == {Stale.NOT_AWAITED: 2}
    assert site.machine.tasks[KEYED].finished == NO_EPOCH


def test_the_connection_breaks_during_a_checkpoint_and_the_one_before_counts() -> None:
    site = standby()
    site.tell(HandOverBegun(KEYED, 0, "offer", 0))
    effects = site.tell(PeerLost(0))
    assert DiscardState(KEYED) in effects and not of(ReportReplica, effects)
    assert site.state() is State.STANDBY
    site.tell(PeerConnected(0), HandOverBegun(KEYED, 0, "offer", 0))
    effects = site.tell(ViewCommitted(view(1, "0,1", "0~2", "0,1").view))
    assert DiscardState(KEYED) not in effects, "the view has the sender"


def test_a_joiner_that_is_to_stand_by_does_so_before_the_view_says_it() -> None:
    site = installing(shape(PASSIVE))
    assert of(ReportReplica, site.tell(complete(5))) == [ReportReplica(KEYED, "installed")]
    assert site.state() is State.STANDBY
    site.tell(view(2, "0,1", "0+2@1", "0"))
    assert site.state() is State.STANDBY
    site.tell(kept_since(view(3, "0,1", "0~2", "0"), s2=1))
    assert site.state() is State.STANDBY


def test_its_donor_dies_before_the_view_knows_that_it_stands_by() -> None:
    """The controller hears of it next, and has it compute: nothing is rebuilt."""
    site = installing(shape(BOTH))
    site.tell(complete(5))
    effects = site.tell(view(2, "1", "+2@1", "1"))
    assert site.state() is State.STANDBY and not of(AskLog, effects)
    site.record()
    site.tell(kept_since(view(3, "1", "2", "1"), s2=1))
    assert site.state() is State.REPLAYING


def test_a_standby_hands_nothing_over_and_takes_no_input() -> None:
    site = standby()
    assert site.tell(CatchUpOrdered(KEYED, 1), CheckpointDue(KEYED)) == []
    assert site.stale() == {Stale.NO_STATE: 1, Stale.NOT_COMPUTING: 1}
    acks = of(SendAck, site.tell(view(1, "0,1", "0~2", "0,1")))
    assert acks and not any(a.ack.subscribe for a in acks)


# --- following ----------------------------------------------------------------------------------


def test_a_joiner_of_a_source_follows_and_then_leads() -> None:
    site = Site(view(1, "0+2@1", "0", "0,1"), shape(REBUILT, ENDS))
    effects = site.tell(begun(task=SOURCE), complete(5, SOURCE))
    assert site.state(SOURCE) is State.FOLLOWER
    assert of(ReportReplica, effects) == [
        ReportReplica(SOURCE, "installed"),
        ReportReplica(SOURCE, "caught_up"),
    ]
    site.tell(view(2, "0+2@1", "0", "0,1"))
    assert site.state(SOURCE) is State.FOLLOWER
    assert site.tell(begun(task=SOURCE), complete(6, SOURCE)) == [], "it has its state"
    assert site.stale() == {Stale.NOT_AWAITED: 2}
    site.record()
    source = PartitionGroup(0, 1, (2,), (), ((2, 1),))
    leads = view(3, "2", "1", "1").view
    leads = replace(leads, groups=((source,), *leads.groups[1:]))
    (order,) = of(IngestEpochs, site.tell(ViewCommitted(leads)))
    assert site.state(SOURCE) is State.ACTIVE and order.first == 6


def test_a_follower_that_joins_may_be_given_up() -> None:
    site = Site(view(1, "0+2@1", "0", "0,1"), shape(REBUILT, ENDS))
    site.tell(begun(task=SOURCE), complete(5, SOURCE), view(2, "0", "0", "0,1"))
    assert SOURCE not in site.machine.tasks


def test_who_leads_a_sink_knows_by_itself_what_is_durable() -> None:
    site = Site(view(0, "0,1", "0", "2,1"), shape(REBUILT, ENDS))
    assert site.tell(SinkDurable(SINK, 4)) == []
    assert site.stale() == {Stale.NOT_FOLLOWING: 1}
    site = Site(view(0, "0,1", "0", "1,2"), shape(REBUILT, ENDS))
    assert of(SendAck, site.tell(SinkDurable(SINK, 4)))
    assert site.tell(SinkDurable(SINK, 4)) == [] and site.stale() == {Stale.REPEATED: 1}


# --- placed again before the flow starts ---------------------------------------------------------


def test_before_the_flow_starts_a_site_may_be_placed_otherwise() -> None:
    """A site dies while all connect, and another one takes its number in the ring."""
    site = Site(view(0, "2,1", "2~0", "2,1"), shape(PASSIVE, ENDS))
    assert {u.state for u in site.machine.tasks.values()} == {State.ACTIVE}
    site.tell(view(1, "1,2", "1~2", "1,2"))
    assert site.state(SOURCE) is site.state(SINK) is State.FOLLOWER
    assert site.state() is State.STANDBY
    site.tell(view(2, "2,1", "2~1", "2,1"))
    assert {u.state for u in site.machine.tasks.values()} == {State.ACTIVE}


def test_who_has_computed_does_not_come_to_stand_by() -> None:
    site = Site(view(0, "0,1", "2~1", "0,1"), shape(PASSIVE))
    site.tell(bundle(0, joined_view=0), processed(0))
    with pytest.raises(InvariantError, match=r"has computed; history: .*active -> standby"):
        site.tell(view(1, "0,1", "1~2", "0,1"))


def test_a_view_that_contradicts_what_the_replica_knows_is_a_bug_and_shows_its_history() -> None:
    site = installing()
    with pytest.raises(InvariantError, match=r"cannot be; history: .*joining -> installing"):
        site.tell(kept_since(view(2, "0,1", "0,2", "0,1"), s2=1))


# --- as a donor ---------------------------------------------------------------------------------


def test_orders_to_hand_over_that_come_late_or_twice() -> None:
    site = Site(view(1, "0,1", "2+1@1", "0,1"))
    (over,) = of(HandOver, site.tell(CatchUpOrdered(KEYED, 1)))
    assert over.joiner == 1
    assert site.tell(CatchUpOrdered(KEYED, 1)) == [] and site.stale() == {Stale.HANDED_OVER: 1}
    assert AbandonHandOver(KEYED, 1) in site.tell(view(2, "0,1", "2", "0,1"))
    assert site.tell(CatchUpOrdered(KEYED, 1)) == [] and site.stale() == {Stale.NOT_JOINING: 1}
    site = joining()
    assert site.tell(CatchUpOrdered(KEYED, 1)) == [] and site.stale() == {Stale.NO_STATE: 1}


def test_a_joiner_that_cannot_be_reached_is_reported() -> None:
    site = Site(view(1, "0,1", "2+1@1", "0,1"))
    site.tell(CatchUpOrdered(KEYED, 1))
    assert site.tell(PeerLost(1))[:2] == [
        AbandonHandOver(KEYED, 1),
        ReportJoinFailed(KEYED, 1, "its connection to site 2 broke"),
    ]
    site = Site(view(1, "0,1", "2+3@1", "0,1"))
    (failed,) = of(ReportJoinFailed, site.tell(CatchUpOrdered(KEYED, 3)))
    assert failed.joiner == 3 and "no connection" in failed.reason


def test_a_standby_that_cannot_be_reached_gets_all_of_it_the_next_time() -> None:
    site = Site(view(0, "0,1", "2~1", "0,1"), shape(PASSIVE))
    site.tell(bundle(0, joined_view=0), processed(0))
    assert [h.after for h in of(HandOver, site.tell(CheckpointDue(KEYED)))] == [NO_EPOCH]
    site.tell(PeerLost(1), bundle(1, joined_view=0), processed(1))
    assert of(HandOver, site.tell(CheckpointDue(KEYED))) == []
    site.tell(PeerConnected(1))
    assert [h.after for h in of(HandOver, site.tell(CheckpointDue(KEYED)))] == [None]


def test_a_standby_that_takes_over_gives_the_others_the_whole_state_first() -> None:
    """Also if they have had no checkpoint since the start: it has not tracked what changed."""
    site = Site(view(0, "0,1", "0~1~2", "0,1"), shape(replace(PASSIVE, standbys=2)))
    site.tell(HandOverBegun(KEYED, 0, "offer", 0, 4, NO_EPOCH), complete(4, whole=False))
    site.tell(view(1, "1", "2~1", "1"))
    assert [h.after for h in of(HandOver, site.tell(CheckpointDue(KEYED)))] == [None]


def test_a_standby_that_has_a_later_checkpoint_gets_the_whole_state_when_that_is_as_late() -> None:
    site = Site(view(0, "0,1", "2~1", "0,1"), shape(PASSIVE))
    site.tell(bundle(0, joined_view=0), processed(0))
    (over,) = of(HandOver, site.tell(CheckpointDue(KEYED)))
    refused = CheckpointRefused(KEYED, 1, 0, offered=over.epoch, has=2)
    assert site.tell(refused) == [AbandonHandOver(KEYED, 1)]
    assert site.tell(refused) == [] and site.stale() == {Stale.REPEATED: 1}
    assert of(HandOver, site.tell(CheckpointDue(KEYED))) == [], "it is not as late"
    assert of(HandOver, site.tell(bundle(1, joined_view=0), processed(1))) == []
    (over,) = of(HandOver, site.tell(bundle(2, joined_view=0), processed(2)))
    assert (over.epoch, over.after) == (2, None)
    assert site.tell(replace(refused, joined_view=7, offered=2)) == [], "of another replica there"


# --- protection changes -------------------------------------------------------------------------


def test_more_is_to_be_kept_while_the_replica_replays() -> None:
    site = replaying()
    kept = replace(PAIRS, level=1)
    changing = kept_since(view(2, "0,1", "0,2", "0,1"), s2=1).view
    site.tell(ViewCommitted(replace(changing, guards=(PAIRS, kept, PAIRS))))
    assert site.state() is State.REPLAYING
    assert site.tell(RetentionOrdered(1)) == [] and site.stale() == {Stale.VIEW: 1}
    assert site.tell(RetentionOrdered(2)) == [], "its state comes from all there ever was"
    assert site.machine.tasks[KEYED].retain_after == 5
    site.tell(ViewCommitted(replace(changing, number=3, guards=(PAIRS, kept, PAIRS))))
    assert site.machine.tasks[KEYED].retain_after is None, "that was for the view before"


def test_a_replica_that_is_surplus_joins_again_to_stand_by() -> None:
    site = replaying()
    before = site.machine.tasks[KEYED]
    changing = kept_since(view(2, "0,1", "0,2", "0,1"), s2=1).view
    site.tell(ViewCommitted(changing))
    site.tell(ViewCommitted(changing.guarded((PAIRS,) * 3, (PAIRS, PASSIVE, PAIRS))))
    assert before.state is State.RETIRED and site.state() is State.JOINING
    assert site.machine.tasks[KEYED].joined_view == 3
    site.tell(begun(joined_view=3), complete(7))
    assert site.state() is State.STANDBY


# --- the table ----------------------------------------------------------------------------------


def stories() -> Iterator[Callable[[], Any]]:
    """All tests above, with each of their parameters."""
    for name, story in vars(sys.modules[__name__]).items():
        if (
            name.startswith("test_")
            and story is not test_every_edge_is_taken_in_a_story_or_in_simulated_runs
        ):
            marks = [m for m in getattr(story, "pytestmark", []) if m.name == "parametrize"]
            yield from (partial(story, value) for m in marks for value in m.args[1])
            if not marks:
                yield story


def test_every_edge_is_taken_in_a_story_or_in_simulated_runs() -> None:
    """`tests/sim/test_replica_edges.py` has those that only happen between several sites."""
    with taken() as edges:
        for story in stories():
            story()
    assert TABLE.keys() <= edges, TABLE.keys() - edges
    assert {e for e in STALE if e[1] is Event.STATE_OFFERED} <= edges
