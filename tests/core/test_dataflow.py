"""The dataflow of one site, event by event."""

from dataclasses import replace

from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import (
    AbandonHandOver,
    AskRecords,
    CloseTask,
    HandOver,
    IngestEpochs,
    OpenTask,
    ProcessBundles,
    ReportDelivered,
    ReportFinished,
    ReportMissed,
    ReportReplica,
    SendAck,
    SendBundle,
    SiteEffect,
    StoreState,
)
from holdfast.core.events import (
    AckArrived,
    CatchUpOrdered,
    HandOverBegun,
    PeerConnected,
    PeerLost,
    RecordArrived,
    ReplicaInstalled,
    StoreOrdered,
    TaskProcessed,
    ViewCommitted,
)
from holdfast.core.ids import NO_EPOCH
from holdfast.core.layout import PartitionGroup, View
from holdfast.core.messages import Ack, BundleKey
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord, Range
from holdfast.core.replica import ROOM_BEHIND, State
from holdfast.core.upstream import Gap
from holdfast.core.work import AT_ONCE_ROWS, AT_ONCE_S, REPLAYED
from tests.support.core_machines import (
    KEYED,
    SHAPE,
    SINK,
    SOURCE,
    Frames,
    bundle,
    of,
    processed,
    record,
    site,
    view,
)


def gap(let_go: int) -> Gap:
    """Nothing is kept up to here, and nothing was rebuilt."""
    return Gap(let_go, NO_EPOCH, NO_EPOCH, 0, {})


def ack(exchange: int, from_: int, received: int, take: bool = True) -> AckArrived:
    return AckArrived(from_, Ack(exchange, 0, 0, 0, received, 99, take, NO_EPOCH, 0))


def install(machine: Dataflow, done: ReplicaInstalled, donor: int = 0) -> list[SiteEffect]:
    """All of a task's state comes in."""
    machine.handle(HandOverBegun(done.task, donor, None))
    return machine.handle(done)


def test_a_frame_on_its_way_through_a_site() -> None:
    machine = site(0, "0", "0", "0")
    assert machine.handle(record(0)) == [IngestEpochs(SOURCE, (record(0).record,))]
    assert machine.handle(processed(SOURCE, 0, x0="a")) == [], "nobody has asked yet"
    (sent,) = machine.handle(ack(0, 0, NO_EPOCH))
    assert sent == SendBundle(0, BundleKey(0, 0, 0, 0, 0), Frames("a"))
    assert machine.handle(bundle(0, 0, "a")) == [ProcessBundles(KEYED, 0, True, {0: [Frames("a")]})]
    assert machine.handle(bundle(0, 1, "b")) == [], "one epoch at a time"
    effects = machine.handle(processed(KEYED, 0, x1="c"))
    assert of(ProcessBundles, effects) == [ProcessBundles(KEYED, 1, True, {0: [Frames("b")]})]
    (told,) = of(SendAck, effects)
    assert (told.ack.received, told.ack.credit) == (1, 3)
    machine.handle(ack(1, 0, NO_EPOCH))
    machine.handle(bundle(1, 0, "c"))
    assert ReportDelivered(2, 0) in machine.handle(processed(SINK, 0))


def test_an_earlier_view_is_not_acted_on() -> None:
    machine = site(0, "0,1", "0,1", "0,1")
    machine.handle(view(2, "0", "0", "0"))
    assert machine.handle(view(1, "0,1", "0,1", "0,1")) == []
    assert machine.view is not None and machine.view.number == 2


def test_tasks_come_and_go_with_the_views() -> None:
    machine = Dataflow(0, SHAPE, window=3)
    effects = machine.handle(view(0, "0,1", "1,2", "2,0"))
    assert [e.task for e in of(OpenTask, effects)] == [SOURCE, SINK]
    effects = machine.handle(view(1, "0,1", "1,2+0", "2"))
    assert [e.task for e in of(OpenTask, effects)] == [KEYED]
    assert of(CloseTask, effects) == [CloseTask(SINK)]
    assert machine.handle(processed(SINK, 0)) == [], "it was at work when it was closed"


def test_acks_that_come_before_the_view_are_counted_when_it_comes() -> None:
    machine = site(0, "0", "1", "1", connected=(1, 2))
    machine.handle(ack(0, 1, NO_EPOCH))
    machine.handle(record(0))
    machine.handle(processed(SOURCE, 0, x0="a"))
    assert machine.handle(ack(0, 2, NO_EPOCH)) == [], "2 knows a view in which it counts"
    machine.handle(ack(0, 1, 0))
    producer = machine.exchanges.producers[0, 0]
    assert producer.held() == 0
    machine.handle(record(1))
    machine.handle(processed(SOURCE, 1, x0="b"))
    effects = machine.handle(view(1, "0", "1+2", "1"))
    assert of(SendBundle, effects) == [SendBundle(2, BundleKey(0, 1, 0, 0, 0), Frames("b"))]
    machine.handle(ack(0, 1, 1))
    assert producer.held() == 1, "2 has not"


def test_acks_of_a_lost_connection_are_not_counted_later() -> None:
    machine = site(0, "0", "1", "1", connected=(1, 2))
    machine.handle(record(0))
    machine.handle(processed(SOURCE, 0, x0="a"))
    machine.handle(ack(0, 2, NO_EPOCH))
    machine.handle(PeerLost(2))
    assert of(SendBundle, machine.handle(view(1, "0", "1+2", "1"))) == []


def test_a_lost_connection_turns_a_consumer_to_the_other_replica() -> None:
    machine = site(0, "1,2", "0", "0", connected=(1, 2))
    source = machine.exchanges.consumers[0, 0].source[0]
    other = 3 - source
    (told,) = of(SendAck, machine.handle(PeerLost(source)))
    assert (told.site, told.ack.subscribe) == (other, True)
    (told,) = of(SendAck, machine.handle(PeerConnected(source)))
    assert (told.site, told.ack.subscribe) == (source, False), "but it keeps for us"


def test_a_death_in_a_view_turns_a_consumer_too_and_lets_go_of_what_was_kept() -> None:
    machine = site(0, "0", "1,2", "1", connected=(1, 2))
    machine.handle(record(0))
    machine.handle(processed(SOURCE, 0, x0="a"))
    machine.handle(ack(0, 1, 0))
    assert machine.exchanges.producers[0, 0].held() == 1
    machine.handle(view(1, "0", "1", "1"))
    assert machine.exchanges.producers[0, 0].held() == 0
    machine.check_invariants()


def test_a_sink_reports_from_the_replica_that_leads_only() -> None:
    for leader, expected in (("0,1", [ReportDelivered(2, 0)]), ("1,0", [])):
        machine = site(0, "1", "1", leader, connected=(1,))
        machine.handle(bundle(1, 0))
        assert of(ReportDelivered, machine.handle(processed(SINK, 0))) == expected
    effects = machine.handle(view(1, "1", "1", "0"))
    assert of(ReportDelivered, effects) == [ReportDelivered(2, 0)], "it leads now"


def test_a_source_asks_for_records_when_the_sequencer_may_be_another() -> None:
    machine = site(0, "1,0", "1", "1", connected=(1,))
    machine.handle(record(0))
    machine.handle(processed(SOURCE, 0, x0="a"))
    assert AskRecords(0) in machine.handle(view(1, "0", "1", "1"))


def test_a_site_without_a_source_asks_for_records_too() -> None:
    """The last one may have been published before it was a member; without it nothing ends."""
    machine = Dataflow(2, SHAPE, window=3)
    assert AskRecords(None) in machine.handle(view(4, "0,1", "1+2", "1"))


def test_who_asks_for_the_latest_record_gets_no_other() -> None:
    machine = site(0, "0", "1", "1", connected=(1,))
    assert machine.records.after(None) == []
    for epoch in range(3):
        machine.handle(record(epoch))
    assert [r.epoch for r in machine.records.after(None)] == [2]
    assert [r.epoch for r in machine.records.after(0)] == [1, 2]


# --- the end ------------------------------------------------------------------------------------


def finished_source() -> Dataflow:
    """Site 0 has only the source, and is through with it."""
    machine = site(0, "0,1", "1", "1,2", connected=(1, 2))
    machine.handle(ack(0, 1, NO_EPOCH))
    machine.handle(record(0, last=True))
    effects = machine.handle(processed(SOURCE, 0, x0="a"))
    effects += machine.handle(ack(0, 1, 0))  # and what it made has arrived
    assert of(ReportFinished, effects) == [ReportFinished()]
    return machine


def test_the_end_is_said_once() -> None:
    machine = finished_source()
    assert of(ReportFinished, machine.handle(record(0, last=True))) == []


def test_a_replica_that_comes_after_the_end_was_said_is_seen_through_and_said() -> None:
    """It may be the only one by then: nobody else would say it."""
    machine = finished_source()
    machine.handle(view(1, "0,1", "1", "1+0"))
    effects = install(machine, ReplicaInstalled(SINK, NO_EPOCH, {}, {}))
    assert of(ReportFinished, effects) == []
    machine.handle(view(2, "0,1", "1", "1,0"))
    machine.handle(bundle(1, 0))
    assert of(ReportFinished, machine.handle(processed(SINK, 0))) == [ReportFinished()]


# --- a new replica --------------------------------------------------------------------------------


def donor() -> Dataflow:
    """Site 0 has the keyed stage; of its input, epochs 0 and 1 are here and 0 is at work."""
    machine = site(0, "1", "0", "1", connected=(1, 2))
    for epoch in (0, 1):
        machine.handle(bundle(0, epoch, f"i{epoch}"))
    machine.handle(view(1, "1", "0+2", "1"))
    return machine


def test_the_donor_hands_over_after_all_that_it_had_received_is_processed() -> None:
    """Its producers may have let go of that before they counted the new replica."""
    machine = donor()
    assert machine.handle(CatchUpOrdered(KEYED, 2)) == []
    assert of(HandOver, machine.handle(processed(KEYED, 0, x1="o0"))) == []
    (over,) = of(HandOver, machine.handle(processed(KEYED, 1, x1="o1")))
    assert (over.task, over.joiner, over.epoch) == (KEYED, 2, 1)
    assert [(k.epoch, k.bundle.name) for k in over.kept[1][0]] == [(0, "o0"), (1, "o1")]


def test_the_donor_hands_over_at_once_if_there_is_nothing_to_wait_for() -> None:
    machine = site(0, "1", "0+2", "1", connected=(1, 2))
    (over,) = of(HandOver, machine.handle(CatchUpOrdered(KEYED, 2)))
    assert over.epoch == NO_EPOCH


def test_a_hand_over_that_is_not_wanted_any_more_is_abandoned() -> None:
    machine = donor()
    machine.handle(CatchUpOrdered(KEYED, 2))
    machine.handle(view(2, "1", "0", "1"))
    machine.handle(processed(KEYED, 0, x1="o0"))
    assert of(HandOver, machine.handle(processed(KEYED, 1, x1="o1"))) == []
    machine = donor()
    machine.handle(CatchUpOrdered(KEYED, 2))
    machine.handle(processed(KEYED, 0, x1="o0"))
    machine.handle(processed(KEYED, 1, x1="o1"))
    effects = machine.handle(view(2, "1", "0", "1"))
    assert of(AbandonHandOver, effects) == [AbandonHandOver(KEYED, 2)]
    assert of(AbandonHandOver, machine.handle(view(3, "1", "0", "1"))) == [], "once"


def test_what_is_not_held_here_is_not_handed_over() -> None:
    machine = site(0, "0", "1", "1", connected=(1, 2))
    assert machine.handle(CatchUpOrdered(KEYED, 2)) == []
    machine.handle(view(1, "0", "1+0", "1"))
    assert machine.handle(CatchUpOrdered(KEYED, 2)) == [], "nor what is only on its way here"


def test_a_new_replica_does_nothing_until_its_state_is_there() -> None:
    machine = site(0, "1", "1+0", "1", connected=(1,))
    assert machine.handle(bundle(0, 0)) == []
    assert not machine.exchanges.consumers and not machine.exchanges.producers


def test_a_new_replica_goes_on_from_where_its_state_was_taken() -> None:
    machine = site(2, "1", "0+2", "1", connected=(0, 1))
    machine.handle(record(7))  # the others are at 7
    machine.handle(ack(1, 1, 2))  # early: the sink's replica counts us already
    kept = {1: {0: [(3, True, Frames("o3")), (4, True, Frames("o4")), (5, True, Frames("o5"))]}}
    effects = install(
        machine, ReplicaInstalled(KEYED, 5, kept, {1: {0: gap(kept[1][0][0][0] - 1)}})
    )
    assert ReportReplica(KEYED, "installed") in effects
    assert ReportReplica(KEYED, "caught_up") not in effects
    sent = of(SendBundle, effects)
    assert [(s.site, s.key.exchange, s.key.epoch) for s in sent] == [
        (1, 1, 3),
        (1, 1, 4),
        (1, 1, 5),
    ]
    (told,) = of(SendAck, effects)
    assert (told.site, told.ack.received, told.ack.subscribe) == (1, 5, True)
    assert machine.handle(bundle(0, 5)) == [], "that was in the state"
    for epoch in (6, 7):
        assert of(ProcessBundles, machine.handle(bundle(0, epoch)))[0].epoch == epoch
        effects = machine.handle(processed(KEYED, epoch, x1="o"))
        caught_up = ReportReplica(KEYED, "caught_up") in effects
        assert caught_up == (epoch == 7)
    machine.check_invariants()


def test_a_new_source_asks_for_the_records_it_lacks() -> None:
    machine = site(2, "0+2", "1", "1", connected=(0, 1))
    effects = install(machine, ReplicaInstalled(SOURCE, 4, {0: {0: []}}, {0: {0: gap(4)}}))
    assert AskRecords(4) in effects
    assert [e.epoch for e in of(IngestEpochs, machine.handle(record(5)))] == [5]


def test_a_source_that_is_behind_takes_small_epochs_together() -> None:
    machine = site(0, "0", "0", "0")
    machine.handle(ack(0, 0, NO_EPOCH))
    assert of(IngestEpochs, machine.handle(record(0)))[0].epoch == 0
    for epoch in range(1, 4):
        assert not machine.handle(record(epoch)), "it is at work"
    large = EpochRecord(4, 4, (Range(0, 0, 0, AT_ONCE_ROWS + 1),))
    machine.handle(RecordArrived(large))
    (order,) = of(IngestEpochs, machine.handle(processed(SOURCE, 0, x0="a")))
    assert [r.epoch for r in order.records] == [1, 2, 3], "the next one is large"
    made = [{0: {0: Frames(name)}} for name in "bcd"]
    effects = machine.handle(TaskProcessed(SOURCE, 3, True, made[2], earlier=tuple(made[:2])))
    sent = [(e.key.epoch, e.bundle.name) for e in of(SendBundle, effects)]
    assert sent == [(1, "b"), (2, "c"), (3, "d")]
    assert [e.records for e in of(IngestEpochs, effects)] == [(large,)]
    machine.check_invariants()


def test_a_stage_that_takes_anothers_place_takes_epochs_together_until_it_has_caught_up() -> None:
    machine = site(2, "0", "1+2", "1", connected=(0, 1))
    for epoch in range(12):
        machine.handle(record(epoch))
    told = of(SendAck, install(machine, ReplicaInstalled(KEYED, 5, {1: {0: []}}, {1: {0: gap(5)}})))
    assert [(a.site, a.ack.credit) for a in told] == [(0, 5 + ROOM_BEHIND)]
    assert of(ProcessBundles, machine.handle(bundle(0, 6)))[0].earlier == ()
    for epoch in range(7, 14):
        assert not machine.handle(bundle(0, epoch)), "it is at work"
    effects = machine.handle(processed(KEYED, 6, x1="o"))
    (order,) = of(ProcessBundles, effects)
    assert (order.first, order.epoch) == (7, 11), "up to where the others were"
    assert [b[0][0].name for b in order.epochs] == ["b"] * 5
    made = tuple({1: {0: Frames(name)}} for name in "pqrst")
    effects = machine.handle(TaskProcessed(KEYED, 11, True, made[-1], earlier=made[:-1]))
    assert ReportReplica(KEYED, "caught_up") in effects
    kept = [(k.epoch, k.bundle.name) for k in machine.exchanges.producers[1, 0].lanes[0].kept]
    assert kept[-5:] == list(zip(range(7, 12), "pqrst", strict=True))
    assert machine.exchanges.consumers[0, 0].window == 3, "it has room as ever"
    assert [o.epoch for o in of(ProcessBundles, effects)] == [12], "and goes on one by one"
    for epoch in range(14, 6 + REPLAYED):
        machine.handle(bundle(0, epoch))  # as was promised
    machine.check_invariants()


def test_a_source_stops_where_its_state_is_wanted() -> None:
    machine = site(0, "0", "0", "0")
    machine.handle(record(0))
    machine.handle(StoreOrdered(2, None))
    for epoch in range(1, 5):
        machine.handle(record(epoch))
    (order,) = of(IngestEpochs, machine.handle(processed(SOURCE, 0, x0="a")))
    assert [r.epoch for r in order.records] == [1, 2]
    made = ({0: {0: Frames("b")}},)
    effects = machine.handle(TaskProcessed(SOURCE, 2, True, made[0], earlier=made))
    assert [e.epoch for e in of(StoreState, effects)] == [2]
    assert machine.handle(StoreOrdered(3, None))[0] == ReportMissed(SOURCE, 3), "it is at 3 and 4"


def test_state_that_comes_too_late_is_dropped() -> None:
    machine = site(2, "1", "0+2", "1", connected=(0, 1))
    machine.handle(view(1, "1", "0", "1"))
    assert install(machine, ReplicaInstalled(KEYED, 5, {1: {0: []}}, {1: {0: gap(5)}})) == []


def test_a_consumer_does_not_turn_to_a_replica_beside_it_that_is_behind() -> None:
    """Site 2 has the sink, and gets a replica of the keyed stage whose state is older than what the
    sink has received from the other."""
    machine = site(2, "1", "0+2", "2", connected=(0, 1))
    for epoch in range(3):
        machine.handle(bundle(1, epoch))
    install(machine, ReplicaInstalled(KEYED, 1, {1: {0: []}}, {1: {0: gap(1)}}))
    machine.handle(view(1, "1", "0,2", "2"))
    assert machine.exchanges.consumers[1, 0].source[0] == 0
    machine.handle(bundle(0, 2))
    machine.handle(processed(KEYED, 2, x1="o"))
    machine.handle(view(2, "1", "0,2", "2"))
    assert machine.exchanges.consumers[1, 0].source[0] == 2, "now it is not"


def test_a_site_without_a_view_has_nothing_to_finish() -> None:
    """Others may know of it, and tell it of the last epoch, before it hears of the view itself."""
    machine = Dataflow(5, SHAPE, window=2)
    assert machine.handle(record(0, last=True)) == []


def test_who_stood_by_and_lacks_nothing_has_caught_up_when_it_computes() -> None:
    """If nothing comes for a while, nobody else would say so."""
    guards = (
        ProtectionSpec(replicas=2),
        ProtectionSpec(standbys=1, every_ms=100),
        ProtectionSpec(replicas=2),
    )
    machine = Dataflow(2, SHAPE.guarded(guards), window=3)
    machine.handle(PeerConnected(0))
    standby = View(
        0,
        0,
        (0, 1, 2),
        ((PartitionGroup(0, 1, (0,)),), (PartitionGroup(0, 1, (1,), standbys=(2,)),)),
    )
    standby = replace(standby, groups=(*standby.groups, (PartitionGroup(0, 1, (0,)),)))
    machine.handle(ViewCommitted(standby))
    assert machine.tasks[KEYED].state is State.STANDBY
    effects = machine.handle(ViewCommitted(standby.without([1])))
    assert machine.tasks[KEYED].state is State.ACTIVE
    assert ReportReplica(KEYED, "caught_up") in effects


def joined_after(seconds: float) -> list[int]:
    """How many epochs a keyed stage that is behind takes in each call, if an epoch takes so long
    there. Each has as many bytes as another."""
    machine = site(2, "0", "1+2", "1", connected=(0, 1))
    for epoch in range(40):
        machine.handle(record(epoch))
    install(machine, ReplicaInstalled(KEYED, 5, {1: {0: []}}, {1: {0: gap(5)}}))
    orders = of(ProcessBundles, [e for n in range(6, 40) for e in machine.handle(bundle(0, n))])
    calls: list[int] = []
    while orders:
        (order,) = orders
        calls.append(len(order.epochs))
        made = [{1: {0: Frames("o")}} for _ in order.epochs]
        took = seconds * len(made)
        done = TaskProcessed(KEYED, order.epoch, True, made[-1], NO_EPOCH, tuple(made[:-1]), took)
        orders = of(ProcessBundles, machine.handle(done))
    assert sum(calls) == 34
    return calls


def test_a_stage_that_is_behind_and_slow_does_not_make_long_calls() -> None:
    """The site hears nobody during one: sixteen epochs at once would be as many times as long."""
    assert joined_after(seconds=0.0)[:2] == [1, REPLAYED]
    assert joined_after(seconds=AT_ONCE_S / 4)[:3] == [1, 4, 4]
    assert set(joined_after(seconds=AT_ONCE_S)) == {1}
    assert set(joined_after(seconds=60.0)) == {1}


def test_a_source_that_is_behind_and_slow_does_not_make_long_calls() -> None:
    for seconds, expected in ((0.0, 8), (AT_ONCE_S / 4, 4), (AT_ONCE_S, 1)):
        machine = site(0, "0", "0", "0")
        machine.handle(ack(0, 0, NO_EPOCH))
        machine.handle(record(0))
        for epoch in range(1, 9):
            machine.handle(record(epoch))
        done = TaskProcessed(SOURCE, 0, True, {0: {0: Frames("a")}}, seconds=seconds)
        (order,) = of(IngestEpochs, machine.handle(done))
        assert len(order.records) == expected
