"""The two ends of an exchange, event by event."""

from dataclasses import dataclass

import pytest

from holdfast.core.effects import SendAck, SendBundle
from holdfast.core.exchange import Consumer, Kept, Producer
from holdfast.core.ids import NO_EPOCH
from holdfast.core.messages import Ack, BundleKey
from holdfast.errors import DivergenceError, ProtocolError

X = 4


@dataclass(frozen=True)
class Frames:
    """Stands for a bundle."""

    name: str
    checksum: int = 0
    nbytes: int = 10


def sent(effects: list[SendBundle]) -> list[tuple[int, int, int, str]]:
    """To whom, for which partition group, which epoch, what."""
    return [(e.site, e.key.consumer, e.key.epoch, e.bundle.name) for e in effects]


def producer(**replicas: tuple[int, ...]) -> Producer:
    """A producer partition group 0, and the replicas of its consumers: ``c1=(7, 8)``."""
    made = Producer(X, 0)
    made.on_view({int(c[1:]): dict.fromkeys(sites, 0) for c, sites in replicas.items()})
    return made


def offer(made: Producer, epoch: int, **bundles: str | Frames) -> list[tuple[int, int, int, str]]:
    named = {int(c[1:]): b if isinstance(b, Frames) else Frames(b) for c, b in bundles.items()}
    return sent(made.offer(epoch, True, named))


def ack(
    site: int,
    received: int,
    credit: int = 99,
    *,
    consumer: int = 1,
    take: bool = True,
    finished: int = NO_EPOCH,
    checksum: int = 0,
) -> tuple[int, Ack]:
    return site, Ack(X, 0, consumer, 0, received, credit, take, finished, checksum)


def consumer(replicas: dict[int, tuple[int, ...]], window: int = 2, **known) -> Consumer:
    """Consumer partition group 1 that takes from these replicas of its producers."""
    made = Consumer(X, 1, window)
    joining = known.get("joining", {})
    made.on_view(
        replicas,
        {p: joining.get(p, ()) for p in replicas},
        known.get("prefer", {}),
        known.get("connected", {s for sites in replicas.values() for s in sites}),
    )
    return made


def arrived(
    epoch: int, producer: int, name: str, last: bool = True, checksum: int = 0, part: int = 0
):
    return BundleKey(X, epoch, producer, 1, 0, part, last), Frames(name, checksum)


# --- one replica on each side ---------------------------------------------------------------------


def test_bundles_go_out_while_there_is_credit() -> None:
    made = producer(c1=(1,), c2=(2,))
    for group, site in ((1, 1), (2, 2)):
        made.on_ack(*ack(site, NO_EPOCH, 0, consumer=group))
    assert offer(made, 0, c1="a", c2="b") == [(1, 1, 0, "a"), (2, 2, 0, "b")]
    assert offer(made, 1, c1="c", c2="d") == []
    assert sent(made.on_ack(*ack(2, 0, 1, consumer=2))) == [(2, 2, 1, "d")]
    assert sent(made.on_ack(*ack(1, 0, 3))) == [(1, 1, 1, "c")]
    made.check_invariants()


def test_nothing_goes_out_before_it_is_asked_for() -> None:
    made = producer(c1=(1,))
    assert offer(made, 0, c1="a") == []
    assert sent(made.on_ack(*ack(1, NO_EPOCH, take=False))) == []
    assert sent(made.on_ack(*ack(1, NO_EPOCH))) == [(1, 1, 0, "a")]


def test_what_is_received_is_let_go_and_only_that() -> None:
    made = producer(c1=(1,))
    for epoch in range(3):
        offer(made, epoch, c1=str(epoch))
    made.on_ack(*ack(1, 1))
    assert [b.epoch for b in made.lanes[1].kept] == [2]
    made.on_ack(*ack(1, 0, 0))  # an old ack changes nothing
    assert made.lanes[1].cursors[1].received == 1
    assert made.held() == 1
    made.check_invariants()


def test_an_epoch_is_complete_with_the_last_part_of_every_producer() -> None:
    made = consumer({0: (10,), 1: (11,)})
    assert made.on_bundle(*arrived(0, 0, "a", last=False))
    assert made.on_bundle(*arrived(0, 1, "c"))
    assert not made.complete(0)
    assert not made.on_bundle(*arrived(0, 0, "a", last=False)), "it came over a broken connection"
    assert made.on_bundle(*arrived(0, 0, "b", part=1))
    assert made.complete(0)
    assert [b.name for b in made.take(0)] == ["a", "b", "c"]


def test_what_comes_twice_is_dropped() -> None:
    made = consumer({0: (10,)})
    assert made.on_bundle(*arrived(0, 0, "a"))
    assert not made.on_bundle(*arrived(0, 0, "a"))
    assert [b.name for b in made.take(0)] == ["a"]
    made.finish(0, {10})
    assert not made.on_bundle(*arrived(0, 0, "a")), "nor when it was processed long ago"


def test_a_gap_is_refused() -> None:
    made = consumer({0: (10,)})
    with pytest.raises(ProtocolError, match="partition group 0 sent epoch 2 after -1"):
        made.on_bundle(*arrived(2, 0, "a"))
    with pytest.raises(ProtocolError, match="no producer"):
        made.on_bundle(*arrived(0, 7, "a"))


def test_acks_are_cumulative_and_carry_credit_and_checksums() -> None:
    made = consumer({0: (10,), 1: (11,)}, window=3)
    for epoch in range(2):
        made.on_bundle(*arrived(epoch, 0, "a", checksum=70 + epoch))
    made.on_bundle(*arrived(0, 1, "a", checksum=80))
    made.take(0)
    assert made.finish(0, {10, 11}) == [
        SendAck(10, Ack(X, 0, 1, 0, 1, 3, True, 0, 70)),
        SendAck(11, Ack(X, 1, 1, 0, 0, 3, True, 0, 80)),
    ]
    made.check_invariants()


# --- several replicas of the consumer -------------------------------------------------------------


def test_a_bundle_is_kept_until_both_replicas_have_it() -> None:
    made = producer(c1=(7, 8))
    made.on_ack(*ack(7, NO_EPOCH))
    made.on_ack(*ack(8, NO_EPOCH))
    assert offer(made, 0, c1="a") == [(7, 1, 0, "a"), (8, 1, 0, "a")]
    made.on_ack(*ack(7, 0))
    assert made.held() == 1
    made.on_ack(*ack(8, 0))
    assert made.held() == 0
    made.check_invariants()


def test_a_replica_that_takes_from_elsewhere_is_kept_for_and_not_sent_to() -> None:
    made = producer(c1=(7, 8))
    made.on_ack(*ack(7, NO_EPOCH))
    made.on_ack(*ack(8, NO_EPOCH, take=False))
    assert offer(made, 0, c1="a") == [(7, 1, 0, "a")]
    made.on_ack(*ack(7, 0))
    assert made.held() == 1, "8 may have to ask here yet"
    assert sent(made.on_ack(*ack(8, NO_EPOCH, take=True))) == [(8, 1, 0, "a")]


def test_a_replica_that_turns_here_gets_what_it_has_not_received_and_in_order() -> None:
    made = producer(c1=(7, 8))
    made.on_ack(*ack(7, NO_EPOCH))
    made.on_ack(*ack(8, NO_EPOCH, credit=1, take=False))
    for epoch in range(4):
        offer(made, epoch, c1=f"e{epoch}")
    made.on_ack(*ack(7, 2))
    again = sent(made.on_ack(*ack(8, 1, credit=2)))
    assert again == [(8, 1, 2, "e2")], "what it has is not sent, what it has no room for neither"
    assert sent(made.on_ack(*ack(8, 2, credit=5))) == [(8, 1, 3, "e3")]


def test_a_replica_that_is_gone_is_not_kept_for() -> None:
    made = producer(c1=(7, 8))
    made.on_ack(*ack(7, NO_EPOCH))
    for epoch in range(3):
        offer(made, epoch, c1=str(epoch))
    made.on_ack(*ack(7, 1))
    assert made.held() == 3
    made.on_view({1: {7: 0}})
    assert made.held() == 1
    assert made.joined_view(1, 8) == -1
    made.check_invariants()


def test_a_new_replica_is_kept_for_from_the_view_on_that_has_it() -> None:
    made = producer(c1=(7,))
    made.on_ack(*ack(7, NO_EPOCH))
    offer(made, 0, c1="a")
    made.on_ack(*ack(7, 0))
    made.on_view({1: {7: 0, 9: 0}})
    offer(made, 1, c1="b")
    made.on_ack(*ack(7, 1))
    assert [k.epoch for k in made.lanes[1].kept] == [1]
    assert sent(made.on_ack(*ack(9, 0))) == [(9, 1, 1, "b")]
    made.on_ack(*ack(9, 1))
    assert made.held() == 0


def test_after_a_broken_connection_all_that_was_not_received_is_sent_again() -> None:
    made = producer(c1=(7,))
    made.on_ack(*ack(7, NO_EPOCH))
    for epoch in range(3):
        offer(made, epoch, c1=f"e{epoch}")
    made.on_lost(7)
    assert offer(made, 3, c1="e3") == [], "nobody is there to send to"
    assert sent(made.on_ack(*ack(7, 0))) == [(7, 1, 1, "e1"), (7, 1, 2, "e2"), (7, 1, 3, "e3")]


def test_the_replica_that_most_is_kept_for_is_known() -> None:
    made = producer(c1=(7, 8), c2=(8,))
    assert made.slowest({}) in ((7, 0), (8, 0))
    offer(made, 0, c1=Frames("a", nbytes=100), c2=Frames("b", nbytes=1))
    made.on_ack(*ack(7, 0))
    assert made.slowest({}) == (8, 100)


# --- several replicas of the producer -------------------------------------------------------------


def takes(acks: list[SendAck]) -> dict[int, bool]:
    return {a.site: a.ack.subscribe for a in acks}


def test_one_replica_of_a_producer_is_taken_from_and_all_are_told() -> None:
    made = consumer({0: (10, 11)}, joining={0: (12,)}, connected={10, 11, 12})
    told = made.acks({10, 11, 12})
    assert [a.site for a in told] == [10, 11, 12], "those that join must know, too"
    assert sum(a.ack.subscribe for a in told) == 1
    assert made.source[0] in (10, 11), "and are not taken from"
    assert {a.ack.received for a in told} == {NO_EPOCH}


def test_groups_take_from_different_replicas() -> None:
    sources = set()
    for group in (0, 1):
        made = Consumer(X, group, 2)
        made.on_view({0: (10, 11)}, {0: ()}, {}, {10, 11})
        sources.add(made.source[0])
    assert sources == {10, 11}


def test_a_replica_on_the_same_site_is_preferred() -> None:
    for here in (10, 11):
        made = consumer({0: (10, 11)}, prefer={0: here})
        assert made.source[0] == here
        made.on_view({0: (10, 11)}, {0: ()}, {}, {10, 11})
        assert made.source[0] == here, "and kept to"


def test_when_the_connection_breaks_the_other_replica_is_asked_at_once() -> None:
    made = consumer({0: (10, 11), 1: (11,)}, prefer={0: 10})
    made.on_bundle(*arrived(0, 0, "a"))
    assert made.on_lost(11, {10}) == [], (
        "partition group 1 has no other, and its only one is not there"
    )
    assert made.source == {0: 10, 1: None}
    assert made.on_connected(11, {10, 11}) == [
        SendAck(11, Ack(X, 0, 1, 0, 0, 1, False, NO_EPOCH, 0)),
        SendAck(11, Ack(X, 1, 1, 0, NO_EPOCH, 1, True, NO_EPOCH, 0)),
    ]
    (told,) = made.on_lost(10, {11})
    assert told == SendAck(11, Ack(X, 0, 1, 0, 0, 1, True, NO_EPOCH, 0))


def test_what_two_replicas_send_is_taken_once_whichever_is_first() -> None:
    made = consumer({0: (10, 11)}, window=4, prefer={0: 10})
    assert made.on_bundle(*arrived(0, 0, "from 10"))
    made.on_lost(10, {11})
    assert not made.on_bundle(*arrived(0, 0, "from 11"))
    assert made.on_bundle(*arrived(1, 0, "from 11"))
    made.on_connected(10, {10, 11})
    assert not made.on_bundle(*arrived(1, 0, "from 10"))
    assert [b.name for e in (0, 1) for b in made.take(e)] == ["from 10", "from 11"]


def test_a_view_without_the_replica_that_was_taken_from_turns_to_another() -> None:
    made = consumer({0: (10, 11)}, prefer={0: 10})
    told = made.on_view({0: (11,)}, {0: ()}, {}, {10, 11})
    assert takes(told) == {11: True}


# --- two replicas on both sides -------------------------------------------------------------------


def test_whichever_replicas_die_a_survivor_has_what_a_survivor_lacks() -> None:
    """Producer replicas 10 and 11, consumer replicas 7 (from 10) and 8 (from 11). 10 and 8 die."""
    ten, eleven = producer(c1=(7, 8)), producer(c1=(7, 8))
    seven = consumer({0: (10, 11)}, window=9, prefer={0: 10})
    for made, site in ((ten, 10), (eleven, 11)):
        made.on_ack(*ack(7, NO_EPOCH, take=site == 10))
        made.on_ack(*ack(8, NO_EPOCH, take=site == 11))
    for epoch in range(4):
        frames = Frames(f"e{epoch}", 70 + epoch)
        assert (7, 1, epoch, frames.name) in offer(ten, epoch, c1=frames)
        assert (8, 1, epoch, frames.name) in offer(eleven, epoch, c1=frames)
    for epoch in range(2):  # two of the four arrive before 10 dies
        seven.on_bundle(*arrived(epoch, 0, f"e{epoch}", checksum=70 + epoch))
    eleven.on_ack(*ack(8, 3, take=True))  # 8 had all of them
    assert eleven.held() == 4, "7 has not"
    (told,) = seven.on_lost(10, {11})
    eleven.on_view({1: {7: 0}})
    replayed = eleven.on_ack(*ack(7, told.ack.received, told.ack.credit, take=told.ack.subscribe))
    assert sent(replayed) == [(7, 1, 2, "e2"), (7, 1, 3, "e3")]
    for effect in replayed:
        assert seven.on_bundle(*arrived(effect.key.epoch, 0, effect.bundle.name))
    assert seven.complete(3)
    seven.check_invariants()


def test_replicas_that_disagree_stop_the_flow_with_the_place_named() -> None:
    """7 takes from elsewhere, and says what it got; it is not what was made here."""
    made = producer(c1=(7,))
    offer(made, 0, c1=Frames("a", checksum=70))
    offer(made, 1, c1=Frames("b", checksum=71))
    made.on_ack(*ack(7, NO_EPOCH, take=False, finished=0, checksum=70))
    with pytest.raises(DivergenceError, match="not deterministic") as caught:
        made.on_ack(*ack(7, 0, take=False, finished=1, checksum=99))
    for part in (
        "exchange 4",
        "epoch 1",
        "producer partition group 0",
        "consumer partition group 1",
    ):
        assert part in str(caught.value)


def test_a_replica_that_is_behind_finds_out_when_it_gets_there() -> None:
    made = producer(c1=(7,))
    made.on_ack(*ack(7, 2, take=False, finished=2, checksum=72))
    for epoch in range(2):
        offer(made, epoch, c1=Frames("a", checksum=70 + epoch))
    with pytest.raises(DivergenceError, match="epoch 2"):
        offer(made, 2, c1=Frames("b", checksum=99))


def test_who_takes_from_here_is_not_compared_with() -> None:
    made = producer(c1=(7,))
    offer(made, 0, c1=Frames("a", checksum=70))
    made.on_ack(*ack(7, NO_EPOCH, take=True, finished=0, checksum=99))


# --- a new replica --------------------------------------------------------------------------------


def test_a_new_replica_can_send_whatever_the_old_one_could() -> None:
    old = producer(c1=(7, 8), c2=(8,))
    for site, group in ((7, 1), (8, 1), (8, 2)):
        old.on_ack(*ack(site, NO_EPOCH, consumer=group))
    for epoch in range(4):
        offer(old, epoch, c1=f"a{epoch}", c2=f"b{epoch}")
    old.on_ack(*ack(7, 3))
    old.on_ack(*ack(8, 1))
    old.on_ack(*ack(8, 2, consumer=2))
    exported = old.export()
    assert {c: [k.epoch for k in kept] for c, kept in exported.items()} == {1: [2, 3], 2: [3]}
    new = Producer(X, 0)
    new.install(3, exported, old.gaps())
    new.on_view({1: {7: 0, 8: 0}, 2: {8: 0}})
    assert new.made == 3
    assert sent(new.on_ack(*ack(8, 1))) == [(8, 1, 2, "a2"), (8, 1, 3, "a3")]
    assert sent(new.on_ack(*ack(7, 3))) == []
    assert sent(new.on_ack(*ack(8, 2, consumer=2))) == [(8, 2, 3, "b3")]
    assert offer(new, 4, c1="a4", c2="b4") == [(7, 1, 4, "a4"), (8, 1, 4, "a4"), (8, 2, 4, "b4")]
    assert [k.epoch for k in old.lanes[1].kept] == [2, 3], "the old one is untouched"
    new.check_invariants()


def test_what_is_exported_is_not_changed_by_what_follows() -> None:
    made = producer(c1=(7,))
    offer(made, 0, c1="a")
    exported = made.export()
    offer(made, 1, c1="b")
    made.on_ack(*ack(7, 1))
    assert [(k.epoch, k.bundle.name) for k in exported[1]] == [(0, "a")]
    assert all(isinstance(k, Kept) for k in exported[1])


def test_a_new_consumer_begins_after_the_epoch_of_its_state() -> None:
    made = Consumer(X, 1, 3, finished=5)
    told = made.on_view({0: (10, 11)}, {0: ()}, {}, {10, 11})
    assert {(a.ack.received, a.ack.credit, a.ack.finished) for a in told} == {(5, 8, NO_EPOCH)}
    assert not made.on_bundle(*arrived(5, 0, "old"))
    assert made.on_bundle(*arrived(6, 0, "new"))
