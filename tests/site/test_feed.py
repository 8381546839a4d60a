"""What feeding tasks send is taken once and in order, whatever is tried again."""

import pyarrow as pa

from holdfast.site import feed
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
