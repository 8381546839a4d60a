"""Upstream backup: what is kept, for how long, and from where a lost task begins."""

from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import (
    AskLog,
    ProcessBundles,
    ReportReplica,
    SendAck,
    SendBundle,
    SiteEffect,
    TellLog,
)
from holdfast.core.events import (
    AckArrived,
    BundleArrived,
    LogAsked,
    LogTold,
    PeerConnected,
    TaskProcessed,
    ViewCommitted,
)
from holdfast.core.exchange import Producer
from holdfast.core.ids import NO_EPOCH
from holdfast.core.layout import Shape, StageShape
from holdfast.core.messages import Ack, BundleKey, LogQuery
from holdfast.core.protection import ProtectionSpec
from holdfast.core.replica import ROOM_BEHIND
from holdfast.core.upstream import Gap, Log, Needs, Search, merged
from tests.support.core_machines import Frames, view

SHAPE = Shape(
    (
        StageShape(0, "source", "source", 1, (), (0,), guard=ProtectionSpec(replicas=2)),
        StageShape(
            1, "first", "keyed", 1, (0,), (1,), guard=ProtectionSpec(level=2, rebuild_level=2)
        ),
        StageShape(
            2, "second", "keyed", 1, (1,), (2,), guard=ProtectionSpec(level=1, rebuild_level=1)
        ),
        StageShape(3, "sink", "sink", 1, (2,), (), guard=ProtectionSpec(replicas=2)),
    ),
    producer_of=(0, 1, 2),
    consumer_of=(1, 2, 3),
)
FIRST, SECOND, SINK = (1, 0), (2, 0), (3, 0)


def site(number: int, *replicas: str, connected: tuple[int, ...] = ()) -> Dataflow:
    machine = Dataflow(number, SHAPE, window=3)
    for other in connected:
        machine.handle(PeerConnected(other))
    machine.handle(view(0, *replicas))
    return machine


def process(machine: Dataflow, done: TaskProcessed) -> list[SiteEffect]:
    """The first stage gets its input of an epoch, and processes it."""
    machine.handle(BundleArrived(BundleKey(0, done.epoch, 0, 0, 0), Frames("i")))
    return machine.handle(done)


def ack(producer: Producer, received: int, *levels: int, site: int = 9) -> None:
    producer.on_ack(site, Ack(0, 0, 0, 0, received, received + 3, True, -1, 0, levels))


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
    search.told[0, 0, 1] = Log(4, 9, 2, {FIRST: 5, SECOND: 7})
    assert search.begins(wanted) is None
    search.told[0, 0, 2] = Log(6, 8, 1, {FIRST: 6})
    assert search.begins(wanted) == (6, 9, 1, {FIRST: 6, SECOND: 7})


def test_bundles_are_kept_until_they_are_let_go_at_the_consumers_level() -> None:
    producer = Producer(0, 0, level=2)
    producer.on_view({0: {9: 0}})
    for epoch in range(5):
        producer.offer(epoch, True, {0: Frames(str(epoch))})
    ack(producer, 4, 3, 1)
    assert [k.epoch for k in producer.lanes[0].kept] == [2, 3, 4]
    assert producer.log(0) == (1, 4, 2, {})
    assert [producer.reached(level) for level in range(3)] == [4, 3, 1]


def test_a_consumer_of_which_nothing_is_left_still_needs_what_is_kept_for_it() -> None:
    producer = Producer(0, 0, level=1)
    producer.on_view({0: {9: 0}, 1: {8: 0}})
    for epoch in range(5):
        producer.offer(epoch, True, {0: Frames(str(epoch)), 1: Frames(str(epoch))})
    ack(producer, 4, 1)
    producer.on_ack(8, Ack(0, 0, 1, 0, 4, 99, False, -1, 0, (3,)))
    assert producer.reached(1) == 1
    producer.on_view({0: {}, 1: {8: 0}})
    assert producer.reached(1) == 1 and producer.log(0) == (1, 4, 1, {}), (
        "and not 3, as the other one"
    )
    producer.on_view({0: {7: 2}, 1: {8: 0}})
    assert producer.reached(1) == NO_EPOCH, "it has not said anything yet"


def test_what_was_rebuilt_is_complete_at_a_lower_level_until_the_consumer_has_moved_on() -> None:
    producer = Producer(0, 0, level=2, made=7, log=Log(7, 7, 1, {}))
    producer.on_view({0: {9: 0}})
    assert producer.log(0) == (7, 7, 1, {})
    for epoch in (8, 9):
        producer.offer(epoch, True, {0: Frames(str(epoch))})
    ack(producer, 9, 8, 6)
    assert producer.log(0) == (7, 9, 1, {}), "it may still need epoch 7"
    ack(producer, 9, 9, 7)
    assert producer.log(0) == (7, 9, 2, {})


def test_a_task_says_what_it_needs_at_every_level() -> None:
    """Its consumer has received epoch 1, and needs what comes after epoch 0."""
    machine = site(1, "0", "1", "2", "2", connected=(0, 2))
    assert machine.tasks[FIRST].needs is not None
    assert machine.tasks[FIRST].levels(2, 2) == (-1, -1)
    for epoch, after in ((0, 0), (1, 0), (2, 1)):
        process(machine, TaskProcessed(FIRST, epoch, True, {1: {0: Frames("x")}}, after))
    machine.handle(AckArrived(2, Ack(1, 0, 0, 0, 1, 4, True, -1, 0, (0, 0))))
    assert machine.tasks[FIRST].levels(2, 2) == (0, 0)
    machine.handle(AckArrived(2, Ack(1, 0, 0, 0, 2, 5, True, -1, 0, (1, 1))))
    assert machine.tasks[FIRST].levels(2, 2) == (1, 0)


def test_a_task_that_has_replicas_needs_nothing_that_it_has() -> None:
    machine = site(2, "0", "1", "1", "2", connected=(0, 1))
    (sent,) = machine.exchanges.consumers[2, 0].acks(
        machine.exchanges.connected, machine.tasks[SINK].needed
    )
    assert isinstance(sent, SendAck) and sent.ack.levels == (-1, -1)
    machine.exchanges.consumers[2, 0].received[0] = 5
    (sent,) = machine.exchanges.consumers[2, 0].acks(
        machine.exchanges.connected, machine.tasks[SINK].needed
    )
    assert sent.ack.levels == (5, 5)


def test_a_lost_task_is_rebuilt_from_where_its_producers_have_its_input() -> None:
    """Site 3 gets the first stage, of which nothing is left; the source has two replicas."""
    machine = site(3, "0,4", "1", "2", "2", connected=(0, 2, 4))
    effects = machine.handle(view(1, "0,4", "+3", "2", "2"))
    asked = [e for e in effects if isinstance(e, AskLog)]
    assert {(a.site, *a.query[:3]) for a in asked} == {
        (0, 0, 0, 0),
        (4, 0, 0, 0),
    }
    joined_view = asked[0].query.joined_view
    assert machine.handle(LogTold(0, LogQuery(0, 0, 0, joined_view), Log(3, 8, 2, {}))) == []
    assert not machine.tasks[FIRST].has_state
    effects = machine.handle(LogTold(4, LogQuery(0, 0, 0, joined_view), Log(5, 9, 2, {})))
    assert machine.tasks[FIRST].has_state and machine.tasks[FIRST].finished == 5
    assert ReportReplica(FIRST, "installed") in effects
    assert ReportReplica(FIRST, "caught_up") not in effects, "others have got to 9"
    takes = [
        e for e in effects if isinstance(e, SendAck) and e.ack.exchange == 0 and e.ack.subscribe
    ]
    assert [(e.ack.received, e.ack.credit) for e in takes] == [(5, 5 + ROOM_BEHIND)], "it is behind"
    assert machine.exchanges.producers[1, 0].log(0) == (5, 5, 1, {}), (
        "what the next stage needs, but no further"
    )


def test_it_waits_for_a_producer_that_is_rebuilt_itself() -> None:
    machine = site(3, "0", "1", "2", "0", connected=(0, 1, 2))
    effects = machine.handle(view(1, "0", "+1", "+3", "0"))
    assert not [e for e in effects if isinstance(e, AskLog)]
    effects = machine.handle(view(2, "0", "1", "+3", "0"))
    assert [e.site for e in effects if isinstance(e, AskLog)] == [1]


def test_what_nobody_has_any_more_cannot_be_rebuilt() -> None:
    machine = site(3, "0", "1", "2", "0", connected=(0, 1))
    effects = machine.handle(view(1, "0", "1", "+3", "0"))
    (asked,) = [e for e in effects if isinstance(e, AskLog)]
    effects = machine.handle(
        LogTold(1, LogQuery(1, 0, 0, asked.query.joined_view), Log(5, 9, 0, {}))
    )
    assert effects == [ReportReplica(SECOND, "impossible")]


def test_a_producer_answers_when_it_counts_who_asks() -> None:
    machine = site(0, "0", "1", "2", "2", connected=(1, 2, 3))
    asked = LogAsked(3, LogQuery(0, 0, 0, 1))
    assert machine.handle(asked) == []
    lost = view(0, "0", "", "2", "2").view
    joined = lost.changed({FIRST: lost.group(FIRST).joined_by(3, 1)}, [3])
    told = TellLog(3, LogQuery(0, 0, 0, 1), Log(-1, -1, 2, {}))
    assert told in machine.handle(ViewCommitted(joined))


def test_nothing_is_sent_again_that_the_consumer_has() -> None:
    machine = site(3, "0", "1", "2", "2", connected=(0, 2))
    machine.handle(view(1, "0", "+3", "2", "2"))
    machine.handle(LogTold(0, LogQuery(0, 0, 0, 0), Log(3, 3, 2, {})))
    machine.handle(AckArrived(2, Ack(1, 0, 0, 0, 5, 8, True, -1, 0, (3, 3))))
    sent = []
    for epoch in (4, 5, 6):
        done = TaskProcessed(FIRST, epoch, True, {1: {0: Frames(str(epoch))}}, epoch)
        sent += [e.key.epoch for e in process(machine, done) if isinstance(e, SendBundle)]
    assert sent == [6]
    assert not [
        e for e in machine.handle(view(2, "0", "3", "2", "2")) if isinstance(e, ProcessBundles)
    ]


# --- from where on it is right ------------------------------------------------------------------


def rebuilt(log: Log, second: str = "2") -> Dataflow:
    """Site 3 has the first stage, made from what the source at site 0 has."""
    machine = site(3, "0", "1", second, "2", connected=(0, 2))
    machine.handle(view(1, "0", "+3", second, "2"))
    machine.handle(LogTold(0, LogQuery(0, 0, 0, 0), log))
    return machine


def test_a_task_says_from_where_on_it_and_those_behind_it_would_be_right() -> None:
    machine = site(1, "0", "1", "2", "2", connected=(0, 2))
    for epoch in (0, 1, 2):
        process(machine, TaskProcessed(FIRST, epoch, True, {1: {0: Frames("x")}}, epoch))
    lines = ({SECOND: 1}, {SECOND: 0})
    machine.handle(AckArrived(2, Ack(1, 0, 0, 0, 2, 5, True, -1, 0, (1, 0), lines)))
    assert machine.tasks[FIRST].valid_after(2) == ({FIRST: 2}, {FIRST: 1, SECOND: 1})
    (sent,) = machine.exchanges.consumers[0, 0].acks(
        machine.exchanges.connected, machine.tasks[FIRST].needed
    )
    assert sent.ack.levels == (2, 1) and sent.ack.valid_after == machine.tasks[FIRST].valid_after(2)


def test_a_producer_remembers_the_line_of_a_consumer_that_is_gone() -> None:
    producer = Producer(0, 0, level=1)
    producer.on_view({0: {9: 0}})
    for epoch in range(5):
        producer.offer(epoch, True, {0: Frames(str(epoch))})
    producer.on_ack(9, Ack(0, 0, 0, 0, 4, 7, True, -1, 0, (1,), ({FIRST: 3},)))
    producer.on_view({0: {}})
    assert producer.log(0) == (1, 4, 1, {FIRST: 3})
    assert producer.valid_after_at(1) == {FIRST: 3}, "as for what is reached"


def test_what_is_not_right_yet_is_not_offered_to_consumers_that_are_rebuilt_too() -> None:
    """The first stage begins after epoch 3, with windows that it knows in part until epoch 5."""
    machine = rebuilt(Log(3, 6, 2, {FIRST: 5, SECOND: 9}))
    for epoch in (4, 5, 6):
        process(machine, TaskProcessed(FIRST, epoch, True, {1: {0: Frames(str(epoch))}}, epoch))
    producer = machine.exchanges.producers[1, 0]
    assert [k.epoch for k in producer.lanes[0].kept] == [6]
    assert producer.log(0) == (5, 6, 1, {FIRST: 5, SECOND: 9})
    producer.check_invariants()


def test_what_a_log_lacks_is_handed_over_with_it() -> None:
    """A replica that is made of one that was rebuilt knows no more than that."""
    machine = rebuilt(Log(3, 6, 1, {FIRST: 5}))
    told = machine.exchanges.producers[1, 0].log(0)
    assert told == (5, 3, 0, {FIRST: 5}), "complete at no level"
    (gaps,) = (p.gaps() for p in machine.exchanges.producers.values())
    assert gaps == {0: Gap(5, -1, 5, 0, {FIRST: 5})}
    replica = Producer(1, 0, level=1, made=3)
    replica.install(3, {0: []}, gaps)
    replica.on_view({0: {2: 0}})
    assert replica.log(0) == told


def test_of_two_lines_the_later_epochs_count() -> None:
    assert merged([{FIRST: 3, SECOND: 1}, {}, {FIRST: 2, SECOND: 4}]) == {FIRST: 3, SECOND: 4}
