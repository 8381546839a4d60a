"""Upstream backup: what is kept, for how long, and from where a lost unit begins."""

from holdfast.core.effects import AskLog, ProcessBundles, ReportCopy, SendAck, SendBundle, TellLog
from holdfast.core.events import AckArrived, LogAsked, LogTold, UnitProcessed, ViewCommitted
from holdfast.core.exchange import Producer
from holdfast.core.ids import NO_EPOCH
from holdfast.core.layout import Guard, Shape, StageShape
from holdfast.core.unit import ROOM_BEHIND
from holdfast.core.upstream import Needs, Search

from .test_dataflow import Dataflow, Frames, PeerConnected, view

SHAPE = Shape(
    (
        StageShape(0, "source", "source", 1, (), (0,), guard=Guard(copies=2)),
        StageShape(1, "first", "keyed", 1, (0,), (1,), guard=Guard(level=2, anew=2)),
        StageShape(2, "second", "keyed", 1, (1,), (2,), guard=Guard(level=1, anew=1)),
        StageShape(3, "sink", "sink", 1, (2,), (), guard=Guard(copies=2)),
    ),
    producer_of=(0, 1, 2),
    consumer_of=(1, 2, 3),
)
FIRST, SECOND = (1, 0), (2, 0)


def site(number: int, *copies: str, connected: tuple[int, ...] = ()) -> Dataflow:
    machine = Dataflow(number, SHAPE, window=3)
    for other in connected:
        machine.handle(PeerConnected(other))
    machine.handle(view(0, *copies))
    return machine


def ack(producer: Producer, received: int, *levels: int, site: int = 9) -> None:
    producer.on_ack(AckArrived(0, 0, 0, site, 0, received, received + 3, True, -1, 0, levels))


def test_what_the_state_comes_from_is_known_by_epoch() -> None:
    needs = Needs(-1, -1)
    assert needs.at(5) == -1
    for epoch, after in ((0, -1), (1, 0), (2, 0), (3, 2)):
        needs.processed(epoch, after)
    assert [needs.at(e) for e in range(-1, 5)] == [-1, -1, 0, 0, 2, 2]
    needs.forget(2)
    assert [needs.at(e) for e in (1, 2, 3)] == [-1, 0, 2], "before that nothing is known"


def test_a_search_waits_for_all_and_begins_where_all_can() -> None:
    search, wanted = Search(), {(0, 0, 1): None, (0, 0, 2): None}
    assert search.begins({}) is None and search.begins(wanted) is None
    search.told[0, 0, 1] = (4, 9, 2)
    assert search.begins(wanted) is None
    search.told[0, 0, 2] = (6, 8, 1)
    assert search.begins(wanted) == (6, 9, 1)


def test_bundles_are_kept_until_they_are_let_go_at_the_consumers_level() -> None:
    producer = Producer(0, 0, level=2)
    producer.on_view({0: {9: 0}})
    for epoch in range(5):
        producer.offer(epoch, True, {0: Frames(str(epoch))})
    ack(producer, 4, 3, 1)
    assert [k.epoch for k in producer.lanes[0].kept] == [2, 3, 4]
    assert producer.log(0) == (1, 4, 2)
    assert [producer.reached(level) for level in range(3)] == [4, 3, 1]


def test_a_consumer_of_which_nothing_is_left_still_needs_what_is_kept_for_it() -> None:
    producer = Producer(0, 0, level=1)
    producer.on_view({0: {9: 0}, 1: {8: 0}})
    for epoch in range(5):
        producer.offer(epoch, True, {0: Frames(str(epoch)), 1: Frames(str(epoch))})
    ack(producer, 4, 1)
    producer.on_ack(AckArrived(0, 0, 1, 8, 0, 4, 99, False, -1, 0, (3,)))
    assert producer.reached(1) == 1
    producer.on_view({0: {}, 1: {8: 0}})
    assert producer.reached(1) == 1 and producer.log(0) == (1, 4, 1), "and not 3, as the other one"
    producer.on_view({0: {7: 2}, 1: {8: 0}})
    assert producer.reached(1) == NO_EPOCH, "it has not said anything yet"


def test_what_was_made_anew_is_complete_at_a_lower_level_until_the_consumer_has_moved_on() -> None:
    producer = Producer(0, 0, level=2, made=7, credit=1)
    producer.on_view({0: {9: 0}})
    assert producer.log(0) == (7, 7, 1)
    for epoch in (8, 9):
        producer.offer(epoch, True, {0: Frames(str(epoch))})
    ack(producer, 9, 8, 6)
    assert producer.log(0) == (7, 9, 1), "it may still need epoch 7"
    ack(producer, 9, 9, 7)
    assert producer.log(0) == (7, 9, 2)


def test_a_unit_says_what_it_needs_at_every_level() -> None:
    """Its consumer has received epoch 1, and needs what comes after epoch 0."""
    machine = site(1, "0", "1", "2", "2", connected=(0, 2))
    assert machine.units[FIRST].needs is not None
    assert machine.units[FIRST].levels(2, 2) == (-1, -1)
    for epoch, after in ((0, 0), (1, 0), (2, 1)):
        machine.units[FIRST].busy = True
        machine.handle(UnitProcessed(FIRST, epoch, True, {1: {0: Frames("x")}}, after))
    machine.handle(AckArrived(1, 0, 0, 2, 0, 1, 4, True, -1, 0, (0, 0)))
    assert machine.units[FIRST].levels(2, 2) == (0, 0)
    machine.handle(AckArrived(1, 0, 0, 2, 0, 2, 5, True, -1, 0, (1, 1)))
    assert machine.units[FIRST].levels(2, 2) == (1, 0)


def test_a_unit_that_has_copies_needs_nothing_that_it_has() -> None:
    machine = site(2, "0", "1", "1", "2", connected=(0, 1))
    (sent,) = machine.consumers[2, 0].acks(machine.connected)
    assert isinstance(sent, SendAck) and sent.levels == (-1, -1)
    machine.consumers[2, 0].received[0] = 5
    (sent,) = machine.consumers[2, 0].acks(machine.connected)
    assert sent.levels == (5, 5)


def test_a_lost_unit_is_made_anew_from_where_its_producers_have_its_input() -> None:
    """Site 3 gets the first stage, of which nothing is left; the source has two copies."""
    machine = site(3, "0,4", "1", "2", "2", connected=(0, 2, 4))
    effects = machine.handle(view(1, "0,4", "+3", "2", "2"))
    asked = [e for e in effects if isinstance(e, AskLog)]
    assert {(a.site, a.exchange, a.producer, a.consumer) for a in asked} == {
        (0, 0, 0, 0),
        (4, 0, 0, 0),
    }
    since = asked[0].since
    assert machine.handle(LogTold(0, 0, 0, 0, since, 3, 8, 2)) == []
    assert not machine.units[FIRST].installed
    effects = machine.handle(LogTold(0, 0, 0, 4, since, 5, 9, 2))
    assert machine.units[FIRST].installed and machine.units[FIRST].finished == 5
    assert ReportCopy(FIRST, "installed") in effects
    assert ReportCopy(FIRST, "caught_up") not in effects, "others have got to 9"
    takes = [e for e in effects if isinstance(e, SendAck) and e.exchange == 0 and e.take]
    assert [(e.received, e.credit) for e in takes] == [(5, 5 + ROOM_BEHIND)], "it is behind"
    assert machine.producers[1, 0].log(0) == (5, 5, 1), "what the next stage needs, but no further"


def test_it_waits_for_a_producer_that_is_made_anew_itself() -> None:
    machine = site(3, "0", "1", "2", "0", connected=(0, 1, 2))
    effects = machine.handle(view(1, "0", "+1", "+3", "0"))
    assert not [e for e in effects if isinstance(e, AskLog)]
    effects = machine.handle(view(2, "0", "1", "+3", "0"))
    assert [e.site for e in effects if isinstance(e, AskLog)] == [1]


def test_what_nobody_has_any_more_cannot_be_made_anew() -> None:
    machine = site(3, "0", "1", "2", "0", connected=(0, 1))
    effects = machine.handle(view(1, "0", "1", "+3", "0"))
    (asked,) = [e for e in effects if isinstance(e, AskLog)]
    effects = machine.handle(LogTold(1, 0, 0, 1, asked.since, 5, 9, 0))
    assert effects == [ReportCopy(SECOND, "impossible")]


def test_a_producer_answers_when_it_counts_who_asks() -> None:
    machine = site(0, "0", "1", "2", "2", connected=(1, 2, 3))
    asked = LogAsked(0, 0, 0, 3, 1)
    assert machine.handle(asked) == []
    lost = view(0, "0", "", "2", "2").view
    joined = lost.changed({FIRST: lost.cohort(FIRST).joined_by(3, 1)}, [3])
    assert TellLog(3, 0, 0, 0, 1, -1, -1, 2) in machine.handle(ViewCommitted(joined))


def test_nothing_is_sent_again_that_the_consumer_has() -> None:
    machine = site(3, "0", "1", "2", "2", connected=(0, 2))
    machine.handle(view(1, "0", "+3", "2", "2"))
    machine.handle(LogTold(0, 0, 0, 0, 0, 3, 3, 2))
    machine.handle(AckArrived(1, 0, 0, 2, 0, 5, 8, True, -1, 0, (3, 3)))
    sent = []
    for epoch in (4, 5, 6):
        machine.units[FIRST].busy = True
        done = UnitProcessed(FIRST, epoch, True, {1: {0: Frames(str(epoch))}}, epoch)
        sent += [e.epoch for e in machine.handle(done) if isinstance(e, SendBundle)]
    assert sent == [6]
    assert not [
        e for e in machine.handle(view(2, "0", "3", "2", "2")) if isinstance(e, ProcessBundles)
    ]
