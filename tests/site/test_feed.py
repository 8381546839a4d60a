"""What feeding tasks send is taken once and in order, whatever is tried again."""

import pyarrow as pa

from holdfast.core.ids import SiteId
from holdfast.site import feed, wire
from holdfast.site.feed import FedReader

SCHEMA = pa.schema([("x", pa.int64())])


class Replies(list):
    def __call__(self, ok: bool, reason: str) -> None:
        self.append((ok, reason))


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64())})


def drained(reader: FedReader) -> list[int]:
    taken = []
    while (rows := reader.read(1_000)) is not None and rows.num_rows:
        taken += rows.column("x").to_pylist()
    return taken


def hand_over(
    reader: FedReader, number: int, partition: int, attempt: int, *values: int
) -> Replies:
    replies = Replies()
    reader.open(number, partition, attempt, replies)
    reader.rows(number, partition, attempt, batch(*values), replies)
    reader.done(number, partition, attempt, replies)
    return replies


def test_a_staged_batch_is_taken_at_its_commit_in_partition_order() -> None:
    reader, replies = FedReader(0, SCHEMA, through=False), Replies()
    hand_over(reader, 0, 1, 5, 3, 4)
    hand_over(reader, 0, 0, 6, 1, 2)
    assert drained(reader) == []
    reader.commit(0, (0, 1), replies)
    assert drained(reader) == [1, 2, 3, 4]
    reader.commit(0, (0, 1), replies)  # the driver was not sure
    assert replies == [(True, ""), (True, "taken")]
    assert drained(reader) == []


def test_a_second_attempt_replaces_the_first() -> None:
    reader, replies = FedReader(0, SCHEMA, through=False), Replies()
    reader.open(0, 0, 1, replies)
    reader.rows(0, 0, 1, batch(1), replies)
    hand_over(reader, 0, 0, 2, 7, 8)
    late = Replies()
    reader.rows(0, 0, 1, batch(2), late)  # the first attempt was only slow
    assert late == [(False, "another attempt at this partition has begun")]
    reader.commit(0, (0,), replies)
    assert drained(reader) == [7, 8]


def test_a_batch_that_is_not_complete_is_not_taken() -> None:
    reader, replies = FedReader(0, SCHEMA, through=False), Replies()
    reader.open(0, 0, 1, replies)
    reader.rows(0, 0, 1, batch(1), replies)
    reader.commit(0, (0,), replies)
    assert replies[-1] == (False, "batch 0: partition 0 is not complete")
    assert drained(reader) == []


def test_through_takes_partitions_in_turn_as_they_come() -> None:
    reader, replies = FedReader(0, SCHEMA, through=True), Replies()
    hand_over(reader, 0, 1, 2, 3, 4)
    assert drained(reader) == []
    reader.open(0, 0, 1, replies)
    reader.rows(0, 0, 1, batch(1), replies)
    assert drained(reader) == [1], "the first partition is not waited for"
    reader.rows(0, 0, 1, batch(2), replies)
    reader.done(0, 0, 1, replies)
    assert drained(reader) == [2, 3, 4]


def test_through_skips_what_an_earlier_attempt_had_handed_over() -> None:
    reader, replies = FedReader(0, SCHEMA, through=True), Replies()
    reader.open(0, 0, 1, replies)
    reader.rows(0, 0, 1, batch(1, 2), replies)
    assert drained(reader) == [1, 2]
    hand_over(reader, 0, 0, 2, 1, 2, 3)
    assert drained(reader) == [3]
    assert hand_over(reader, 0, 0, 3, 1, 2, 3)[0] == (True, "taken")


def test_feeders_wait_while_there_is_no_room(monkeypatch) -> None:
    monkeypatch.setattr(feed, "HELD_BYTES_MAX", 100)
    reader, replies = FedReader(0, SCHEMA, through=True), Replies()
    reader.open(0, 0, 1, replies)
    reader.rows(0, 0, 1, batch(*range(50)), replies)
    assert replies == [(True, "")], "only the opening is answered"
    assert len(drained(reader)) == 50
    assert replies == [(True, ""), (True, "")]


def test_the_end_is_after_the_last_row() -> None:
    reader = FedReader(0, SCHEMA, through=True)
    hand_over(reader, 0, 0, 1, 1)
    reader.end(Replies())
    assert reader.read(10).num_rows == 1
    assert reader.read(10) is None


# --- copies -------------------------------------------------------------------------------------


class Pair:
    """A leading copy and another one; what goes between them waits until it is delivered."""

    def __init__(self, through: bool) -> None:
        self.leader, self.other = (FedReader(0, SCHEMA, through) for _ in range(2))
        self.sent: list[tuple[wire.FeedPortion, bytes]] = []
        self.leader.send = lambda site, message, body: self.sent.append(
            (message, b"".join(bytes(b) for b in body))
        )
        self.leader.on_copies(True, [SiteId(2)], [])
        self.other.on_copies(False, [SiteId(1)], [])

    def deliver(self, confirmed: bool = True) -> None:
        for message, body in self.sent:
            self.other.on_portion(message, memoryview(body))
        self.sent.clear()
        if confirmed:
            self.leader.on_has(SiteId(2), self.other.has, False)


def test_rows_enter_and_are_confirmed_when_all_copies_have_them() -> None:
    pair, replies = Pair(through=False), Replies()
    hand_over(pair.leader, 0, 0, 1, 1, 2)
    pair.leader.commit(0, (0,), replies)
    assert drained(pair.leader) == [] and replies == []
    pair.deliver(confirmed=False)
    assert replies == [], "it may not have arrived, for all that is known"
    pair.leader.on_has(SiteId(2), pair.other.has, False)
    assert replies == [(True, "")]
    assert drained(pair.leader) == drained(pair.other) == [1, 2]


def test_a_new_leader_knows_which_batches_were_taken() -> None:
    pair = Pair(through=False)
    hand_over(pair.leader, 0, 0, 1, 1, 2)
    pair.leader.commit(0, (0,), Replies())
    pair.deliver(confirmed=False)  # the leader dies before it hears, and has not answered
    pair.other.on_copies(True, [], [])
    again = Replies()
    hand_over(pair.other, 1, 0, 2, 3)
    pair.other.commit(0, (0,), again)
    pair.other.commit(1, (0,), again)
    assert again == [(True, "taken"), (True, "")]
    assert drained(pair.other) == [1, 2, 3]


def test_a_new_copy_is_waited_for_once_it_counts() -> None:
    """A leader that is alone would confirm what nobody else has."""
    pair, replies = Pair(through=False), Replies()
    pair.leader.on_copies(True, [], [SiteId(2)])
    pair.leader.on_has(SiteId(2), 0, True)
    hand_over(pair.leader, 0, 0, 1, 1)
    pair.leader.commit(0, (0,), replies)
    assert replies == []
    pair.deliver()
    assert replies == [(True, "")]


def test_what_left_before_the_leader_knew_what_a_copy_lacks_is_sent_again() -> None:
    pair = Pair(through=False)
    for number in range(3):
        hand_over(pair.leader, number, 0, 1, number)
        pair.leader.commit(number, (0,), Replies())
    del pair.sent[:2]
    pair.deliver()
    assert pair.other.has == 0
    pair.leader.on_has(SiteId(2), 0, True)
    pair.deliver()
    assert drained(pair.other) == [0, 1, 2]


def test_a_later_attempt_passes_over_what_was_taken_however_it_is_cut() -> None:
    """Spark sorts anew, and the partitions end elsewhere."""
    pair = Pair(through=True)
    hand_over(pair.leader, 0, 0, 1, 1, 2, 3)
    pair.deliver()
    replies = Replies()
    pair.leader.open(0, 1, 1, replies)
    pair.leader.rows(0, 1, 1, batch(4, 5), replies)
    pair.deliver()
    pair.other.on_copies(True, [], [])
    hand_over(pair.other, 1, 0, 2, 1, 2)
    hand_over(pair.other, 1, 1, 2, 3, 4, 5, 6)
    hand_over(pair.other, 1, 2, 2, 7)
    assert drained(pair.other) == [1, 2, 3, 4, 5, 6, 7]
    late = Replies()
    pair.other.open(0, 1, 3, late)
    assert late == [(False, "another attempt at the whole has begun")]
