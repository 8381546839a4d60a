"""The two ends of an exchange, event by event."""

import pytest

from holdfast.core.effects import SendAck, SendBundle
from holdfast.core.events import AckArrived, BundleArrived
from holdfast.core.exchange import Consumer, Producer
from holdfast.errors import ProtocolError

X = 4


def sent(effects: list[SendBundle]) -> list[tuple[int, int, object]]:
    return [(e.consumer, e.epoch, e.bundle) for e in effects]


def test_bundles_go_out_while_there_is_credit() -> None:
    producer = Producer(X, [1, 2], credit=0)
    assert sent(producer.offer(0, True, {1: "a", 2: "b"})) == [(1, 0, "a"), (2, 0, "b")]
    assert sent(producer.offer(1, True, {1: "c", 2: "d"})) == []
    assert sent(producer.on_ack(AckArrived(X, 2, 0, 0, 1))) == [(2, 1, "d")]
    assert sent(producer.on_ack(AckArrived(X, 1, 0, 0, 3))) == [(1, 1, "c")]
    producer.check_invariants()


def test_what_is_stable_is_let_go_and_only_that() -> None:
    producer = Producer(X, [1], credit=9)
    for epoch in range(3):
        producer.offer(epoch, True, {1: epoch})
    producer.on_ack(AckArrived(X, 1, 2, 1, 9))
    assert [b.epoch for b in producer.lanes[1].kept] == [2]
    producer.on_ack(AckArrived(X, 1, 0, 0, 0))  # an old ack changes nothing
    assert producer.lanes[1].received == 2
    assert producer.held() == 1


def test_an_ack_from_a_stranger_is_refused() -> None:
    with pytest.raises(ProtocolError, match="no consumer"):
        Producer(X, [1], credit=0).on_ack(AckArrived(X, 5, 0, 0, 0))


def test_an_epoch_is_complete_with_the_last_part_of_every_producer() -> None:
    consumer = Consumer(X, [0, 1], window=2)
    assert consumer.on_bundle(BundleArrived(X, 0, 0, False, "a"))
    assert consumer.on_bundle(BundleArrived(X, 0, 1, True, "c"))
    assert not consumer.complete(0)
    assert consumer.on_bundle(BundleArrived(X, 0, 0, True, "b"))
    assert consumer.complete(0)
    assert consumer.take(0) == ["a", "b", "c"]


def test_what_comes_twice_is_dropped() -> None:
    consumer = Consumer(X, [0], window=2)
    assert consumer.on_bundle(BundleArrived(X, 0, 0, True, "a"))
    assert not consumer.on_bundle(BundleArrived(X, 0, 0, True, "a"))
    assert consumer.take(0) == ["a"]


def test_a_gap_is_refused() -> None:
    consumer = Consumer(X, [0], window=2)
    with pytest.raises(ProtocolError, match="site 0 sent epoch 2 after -1"):
        consumer.on_bundle(BundleArrived(X, 2, 0, True, "a"))
    with pytest.raises(ProtocolError, match="no producer"):
        consumer.on_bundle(BundleArrived(X, 0, 7, True, "a"))


def test_acks_are_cumulative_and_carry_credit() -> None:
    consumer = Consumer(X, [0, 1], window=3)
    for epoch in range(2):
        consumer.on_bundle(BundleArrived(X, epoch, 0, True, "a"))
    consumer.on_bundle(BundleArrived(X, 0, 1, True, "a"))
    consumer.take(0)
    assert consumer.finish(0) == [SendAck(X, 0, 1, 1, 3), SendAck(X, 1, 0, 0, 3)]
    consumer.check_invariants()
