"""What feeding tasks send is taken once and in order, whatever is tried again."""

import os
from collections import deque
from typing import Any

import msgspec
import pyarrow as pa
import pytest

from holdfast.control.checkpoint_store import known_push_batches
from holdfast.core.ids import SiteId
from holdfast.engine.batches import cut
from holdfast.errors import FlowError
from holdfast.net import wire
from holdfast.site import push, push_lane, push_log
from holdfast.site.push import PushReader
from holdfast.site.push_entries import Lead
from holdfast.site.spill import Overflow
from holdfast.site.staging import GIVEN_UP, Staged
from holdfast.storage.files import Folder
from holdfast.storage.layout import push_batch_file, push_batch_name
from holdfast.storage.restore_point import RestorePoint

SCHEMA = pa.schema([("x", pa.int64())])
LEADER, OTHER = SiteId(1), SiteId(2)


class Replies(list):
    def __call__(self, ok: bool, reason: str) -> None:
        self.append((ok, reason))


def batch(*values: int) -> pa.RecordBatch:
    return pa.record_batch({"x": pa.array(values, pa.int64())})


def drained(reader: PushReader, due: bool = False) -> list[int]:
    taken = []
    while (rows := reader.read(1_000, due=due)) is not None and rows.num_rows:
        taken += rows.column("x").to_pylist()
    return taken


def hand_over(
    reader: PushReader, push: str, partition: int, attempt: int, *values: int
) -> tuple[Staged | None, Replies]:
    """What a task does that has all of its rows in one batch."""
    replies = Replies()
    staged = reader.open(push, partition, attempt, replies)
    if staged is not None:
        reader.rows(staged, batch(*values), replies)
        reader.done(staged, replies)
    return staged, replies


def begun(reader: PushReader, number: int, push: str, query: str = "query") -> tuple[bool, str]:
    replies = Replies()
    reader.begin(query, number, push, replies)
    ((ok, reason),) = replies
    return ok, reason


def pushed(reader: PushReader, number: int, *values: int, query: str = "query") -> Replies:
    """A micro-batch of one partition, from the beginning to the commit."""
    push, replies = f"push {number}", Replies()
    ok, reason = begun(reader, number, push, query)
    if not ok or reason:
        replies(ok, reason)
        return replies
    hand_over(reader, push, 0, 1, *values)
    reader.commit(push, [(0, 1)], replies)
    return replies


def alone(through: bool = False, **more: Any) -> PushReader:
    """The only replica, which leads."""
    reader = PushReader(0, SCHEMA, through, **more)
    reader.on_replicas(None, {}, {})
    return reader


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is large."""
    monkeypatch.setattr(wire, "PIECE_BYTES", 64)
    monkeypatch.setattr(push_log, "PUSH_BATCH_BYTES", 160)
    monkeypatch.setattr(push_lane, "WINDOW_BYTES", 400)
    monkeypatch.setattr(push, "HELD_BYTES_MAX", 800)
    monkeypatch.setattr(push, "MEMORY_BYTES_MAX", 1_000)


# --- micro-batches ------------------------------------------------------------------------------


def test_a_staged_batch_is_taken_at_its_commit_in_partition_order() -> None:
    reader, replies = alone(), Replies()
    begun(reader, 0, "a")
    hand_over(reader, "a", 1, 5, 3, 4)
    hand_over(reader, "a", 0, 6, 1, 2)
    assert drained(reader) == []
    reader.commit("a", [(0, 6), (1, 5)], replies)
    assert drained(reader) == [1, 2, 3, 4]
    reader.commit("a", [(0, 6), (1, 5)], replies)  # the driver was not sure
    assert replies == [(True, ""), (True, "taken")]
    assert begun(reader, 0, "b") == (True, "taken")
    assert drained(reader) == []


def test_the_attempt_counts_that_the_driver_has_heard_of() -> None:
    """A speculative attempt that is complete, or comes later, or is gone, is not it."""
    reader, replies = alone(), Replies()
    begun(reader, 0, "a")
    hand_over(reader, "a", 0, 1, 7, 8)
    hand_over(reader, "a", 0, 2, 8, 7)
    late = reader.open("a", 0, 3, Replies())
    assert late is not None
    reader.rows(late, batch(9), Replies())
    reader.commit("a", [(0, 1)], replies)
    assert replies == [(True, "")] and drained(reader) == [7, 8]
    said = Replies()
    reader.rows(late, batch(10), said)
    reader.done(late, said)
    assert said == [(False, GIVEN_UP)] * 2 and drained(reader) == []
    assert reader.overflow.memory_bytes == 0, "nothing is left of the others"


def test_the_same_attempt_on_another_connection_begins_again() -> None:
    reader, replies = alone(), Replies()
    begun(reader, 0, "a")
    first = reader.open("a", 0, 1, replies)
    assert first is not None
    reader.rows(first, batch(1), replies)
    hand_over(reader, "a", 0, 1, 1, 2)
    late = Replies()
    reader.rows(first, batch(2), late)  # was on its way
    reader.forget(first)
    assert late == [(False, GIVEN_UP)]
    reader.commit("a", [(0, 1)], replies)
    assert drained(reader) == [1, 2]


def test_partitions_of_different_pushes_do_not_mix() -> None:
    """Another driver takes over and pushes the same micro-batch: its partitions are cut elsewhere,
    and its tasks may have the numbers of others."""
    reader, replies = alone(), Replies()
    begun(reader, 0, "old")
    hand_over(reader, "old", 0, 1, 1, 2, 3)
    slow = reader.open("old", 1, 2, Replies())
    assert slow is not None
    begun(reader, 0, "new")
    hand_over(reader, "new", 0, 1, 1)
    hand_over(reader, "new", 1, 2, 2, 3)
    reader.rows(slow, batch(4), replies)
    reader.commit("old", [(0, 1), (1, 2)], replies)
    assert hand_over(reader, "old", 1, 3, 4)[1] == [(False, GIVEN_UP)]
    reader.commit("new", [(0, 1), (1, 2)], replies)
    assert replies == [(False, GIVEN_UP), (False, GIVEN_UP), (True, "")]
    assert drained(reader) == [1, 2, 3]


def test_a_batch_that_is_not_complete_is_not_taken() -> None:
    reader, replies = alone(), Replies()
    begun(reader, 0, "a")
    staged = reader.open("a", 0, 1, Replies())
    assert staged is not None
    reader.rows(staged, batch(1), Replies())
    reader.commit("a", [(0, 1)], replies)
    reader.done(staged, Replies())
    reader.commit("a", [(0, 1), (0, 1)], replies)
    reader.commit("a", [(0, 1), (1, 1)], replies)
    lacks = "micro-batch 0: partition {} is not complete"
    assert replies == [
        (False, lacks.format(0)),
        (False, "micro-batch 0: one is named twice"),
        (False, lacks.format(1)),
    ]
    assert drained(reader) == []
    reader.commit("a", [(0, 1)], replies)
    assert drained(reader) == [1]


def test_rows_of_a_task_that_is_gone_are_dropped() -> None:
    reader = alone()
    begun(reader, 0, "a")
    staged = reader.open("a", 0, 1, Replies())
    assert staged is not None
    reader.rows(staged, batch(1, 2, 3), Replies())
    assert reader.overflow.memory_bytes == 24
    reader.forget(staged)
    assert reader.overflow.memory_bytes == 0


# --- whose micro-batches they are ---------------------------------------------------------------


def test_micro_batches_of_another_query_are_refused_by_name() -> None:
    """With another checkpoint location a query begins with micro-batch 0, and its rows are
    others."""
    reader = alone()
    for number in range(3):
        assert pushed(reader, number, number) == [(True, "")]
    for number in (0, 2, 3):
        ((ok, reason),) = pushed(reader, number, 77, query="other")
        assert not ok
        assert "fed by the streaming query with id query, and this is query other" in reason
        assert "spark_stream(df, checkpoint=...)" in reason
    ended = Replies()
    reader.end("other", ended)
    assert not ended[0][0]
    assert pushed(reader, 2, 2) == [(True, "taken")], "started again from the same place"
    assert pushed(reader, 3, 3) == [(True, "")]
    assert drained(reader) == [0, 1, 2, 3]


@pytest.mark.parametrize(("number", "why"), [(1, "set back"), (4, "another flow")])
def test_micro_batches_out_of_turn_are_refused(number: int, why: str) -> None:
    """The checkpoint location was restored from a backup, or fed another flow meanwhile."""
    reader = alone()
    for taken in range(3):
        pushed(reader, taken, taken)
    ((ok, reason),) = pushed(reader, number, 77)
    assert not ok and why in reason and f"micro-batch {number} of query query" in reason


def test_a_flow_that_begins_takes_whatever_micro_batch_comes_first() -> None:
    reader = alone()
    assert pushed(reader, 17, 1) == pushed(reader, 18, 2) == [(True, "")]
    assert drained(reader) == [1, 2]


def test_whoever_goes_on_knows_the_query() -> None:
    """A new replica, a flow that was stopped, and one that was lost."""
    pair = Pair(through=False)
    pushed(pair.leader, 0, 1)
    pair.deliver()
    second = PushReader(0, SCHEMA, False)
    second.restore(pair.leader.save(), pair.leader.query)
    stored = wire.PushBatch(0, 1, {"committed": 0, "total": 0, "ended": 0}, [], "", "query")
    lost = PushReader(0, SCHEMA, False)
    lost.recover(msgspec.msgpack.decode(msgspec.msgpack.encode(stored), type=type(stored)), [])
    for reader in (pair.other, second, lost):
        reader.on_replicas(None, {}, {})
        assert not pushed(reader, 0, 1, query="other")[0][0]
        assert pushed(reader, 0, 1) == [(True, "taken")]


def test_what_was_stored_before_queries_were_told_apart() -> None:
    old = {"committed": 4, "head": 0, "head_taken": 0, "attempt": 0, "total": 0, "passed": 0}
    reader = PushReader(0, SCHEMA, False)
    reader.restore(old | {"ended": 0, "taken": 5, "rank": 3})
    marks = old | {"committed": 5, "ended": 0, "everywhere": 0}
    reader.recover(wire.PushBatch(0, 6, marks, []), [batch(1)])
    reader.on_replicas(None, {}, {})
    assert "does not follow on 5" in pushed(reader, 0, 77)[0][1], "a fresh one begins with 0"
    assert pushed(reader, 5, 1, query="first") == [(True, "taken")]
    assert pushed(reader, 6, 2, query="first") == [(True, "")]
    assert not pushed(reader, 7, 3, query="second")[0][0]


# --- a batch DataFrame --------------------------------------------------------------------------


def test_through_takes_partitions_in_turn_as_they_come() -> None:
    reader, replies = alone(through=True), Replies()
    begun(reader, 0, "a")
    hand_over(reader, "a", 1, 2, 3, 4)
    assert drained(reader) == []
    staged = reader.open("a", 0, 1, replies)
    assert staged is not None
    reader.rows(staged, batch(1), replies)
    assert drained(reader) == [1], "the first partition is not waited for"
    reader.rows(staged, batch(2), replies)
    reader.done(staged, replies)
    assert drained(reader) == [2, 3, 4]


def test_through_skips_what_an_earlier_attempt_had_handed_over() -> None:
    reader = alone(through=True)
    begun(reader, 0, "a")
    staged = reader.open("a", 0, 1, Replies())
    assert staged is not None
    reader.rows(staged, batch(1, 2), Replies())
    assert drained(reader) == [1, 2]
    hand_over(reader, "a", 0, 2, 1, 2, 3)
    assert drained(reader) == [3]
    assert hand_over(reader, "a", 0, 3, 1, 2, 3)[1] == [(True, "taken")]


def test_pushers_wait_while_there_is_no_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(push, "HELD_BYTES_MAX", 100)
    reader, replies = alone(through=True), Replies()
    begun(reader, 0, "a")
    staged = reader.open("a", 0, 1, replies)
    assert staged is not None
    reader.rows(staged, batch(*range(50)), replies)
    assert replies == [(True, "")], "only the opening is answered"
    assert len(drained(reader)) == 50
    assert replies == [(True, ""), (True, "")]


def test_later_partitions_wait_when_all_of_them_have_too_much(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(push, "HELD_BYTES_MAX", 100)
    reader, said = alone(through=True), {n: Replies() for n in range(1, 9)}
    begun(reader, 0, "a")
    for number, replies in said.items():
        hand_over(reader, "a", number, number, *range(number * 3, number * 3 + 3))
        staged = reader.open("a", number, number, replies)
        assert staged is not None
        reader.rows(staged, batch(*range(number * 3, number * 3 + 3)), replies)
        reader.done(staged, replies)
    waiting = [n for n, replies in said.items() if len(replies) < 3]
    assert waiting == [5, 6, 7, 8], "24 bytes each"
    hand_over(reader, "a", 0, 0, 0, 1, 2)
    assert drained(reader) == list(range(27))
    assert all(replies == [(True, "")] * 3 for replies in said.values()), "nobody waits for ever"


def test_the_end_is_after_the_last_row() -> None:
    reader = alone(through=True)
    begun(reader, 0, "a")
    hand_over(reader, "a", 0, 1, 1)
    reader.end("", Replies())
    first = reader.read(10)
    assert first is not None and first.num_rows == 1
    assert reader.read(10) is None
    assert begun(reader, 0, "b") == (True, "taken"), "it need not be read again"


def test_another_driver_begins_with_the_whole() -> None:
    """Of a flow that was lost and goes on: the first attempt of a new driver is not the first
    attempt of the one before, whose partitions were cut elsewhere."""
    reader = alone(through=True)
    begun(reader, 0, "a")
    hand_over(reader, "a", 0, 1, 1, 2, 3)
    hand_over(reader, "a", 1, 2, 4)
    again = PushReader(0, SCHEMA, True)
    again.restore(reader.save())
    again.on_replicas(None, {}, {})
    assert hand_over(again, "a", 1, 3, 4, 5)[1] == [(False, GIVEN_UP)]
    begun(again, 0, "b")
    hand_over(again, "b", 0, 1, 1, 2)
    hand_over(again, "b", 1, 2, 3, 4, 5)
    assert drained(again) == [5]


# --- replicas -------------------------------------------------------------------------------------


class Pair:
    """A leading replica and another one. Push batches wait until they are delivered, and other
    messages do not."""

    def __init__(self, through: bool) -> None:
        self.leader, self.other = (PushReader(0, SCHEMA, through) for _ in range(2))
        self.has_state = True
        self.sent: deque[tuple[wire.PushBatch, bytes]] = deque()
        self.leader.send = self.send
        self.other.on_replicas(LEADER, {LEADER: 0}, {})
        self.leader.on_replicas(None, {OTHER: 0}, {})

    def send(self, site: SiteId, message: wire.Message, body: list[Any]) -> None:
        match message:
            case wire.PushBatch():
                self.sent.append((message, b"".join(bytes(b) for b in body)))
            case wire.PushLead() if self.has_state and self.other.follows(LEADER, message.rank):
                self.ask()
            case wire.PushKnown() if self.other.on_push_known(LEADER, message):
                self.confirm()

    def ask(self) -> bool:
        return self.leader.on_push_has(OTHER, self.other.holding(again=True))

    def confirm(self) -> bool:
        return self.leader.on_push_has(OTHER, self.other.holding(again=False))

    def take(self) -> None:
        """The other replica takes the next push batch."""
        message, body = self.sent.popleft()
        self.other.on_push_batch(LEADER, message, memoryview(body))

    def deliver(self, confirmed: bool = True, most: int = 1_000_000) -> None:
        while self.sent and most:
            most -= 1
            self.take()
            if confirmed:
                self.confirm()


def test_rows_enter_and_are_confirmed_when_all_replicas_have_them() -> None:
    pair = Pair(through=False)
    replies = pushed(pair.leader, 0, 1, 2)
    assert drained(pair.leader) == [] and replies == []
    pair.deliver(confirmed=False)
    assert replies == [], "it may not have arrived, for all that is known"
    pair.confirm()
    assert replies == [(True, "")]
    assert drained(pair.leader) == drained(pair.other, due=True) == [1, 2]


def test_a_new_leader_knows_which_batches_were_taken() -> None:
    pair = Pair(through=False)
    pushed(pair.leader, 0, 1, 2)
    pair.deliver(confirmed=False)  # the leader dies before it hears, and has not answered
    pair.other.on_replicas(None, {}, {})
    assert pushed(pair.other, 0, 1, 2) == [(True, "taken")]
    assert pushed(pair.other, 1, 3) == [(True, "")]
    assert drained(pair.other) == [1, 2, 3]


def test_a_driver_that_asks_again_hears_when_the_batch_has_entered() -> None:
    pair = Pair(through=False)
    replies = pushed(pair.leader, 0, 1, 2)
    pair.leader.begin("query", 0, "again", replies)
    pair.leader.commit("push 0", [(0, 1)], replies)
    assert replies == []
    pair.deliver()
    assert replies == [(True, ""), (True, "taken"), (True, "taken")]
    assert drained(pair.leader) == [1, 2]


def test_a_new_replica_is_waited_for_once_it_counts() -> None:
    """A leader that is alone would confirm what nobody else has."""
    pair = Pair(through=False)
    pair.leader.on_replicas(None, {}, {OTHER: 0})
    pair.ask()
    replies = pushed(pair.leader, 0, 1)
    assert replies == []
    pair.deliver()
    assert replies == [(True, "")]


def test_what_left_before_the_leader_knew_what_a_replica_lacks_is_sent_again() -> None:
    pair = Pair(through=False)
    for number in range(3):
        pushed(pair.leader, number, number)
    pair.sent.popleft()
    pair.sent.popleft()
    pair.deliver()
    assert pair.other.has == 0
    pair.ask()
    pair.deliver()
    assert drained(pair.other, due=True) == [0, 1, 2]


def test_a_later_attempt_passes_over_what_was_taken_however_it_is_cut() -> None:
    """Spark sorts again, and the partitions end elsewhere."""
    pair = Pair(through=True)
    begun(pair.leader, 0, "a")
    hand_over(pair.leader, "a", 0, 1, 1, 2, 3)
    pair.deliver()
    staged = pair.leader.open("a", 1, 1, Replies())
    assert staged is not None
    pair.leader.rows(staged, batch(4, 5), Replies())
    pair.deliver()
    pair.other.on_replicas(None, {}, {})
    begun(pair.other, 0, "b")
    hand_over(pair.other, "b", 0, 2, 1, 2)
    hand_over(pair.other, "b", 1, 2, 3, 4, 5, 6)
    hand_over(pair.other, "b", 2, 2, 7)
    assert drained(pair.other) == [1, 2, 3, 4, 5, 6, 7]
    assert hand_over(pair.other, "a", 1, 3, 4)[1] == [(False, GIVEN_UP)]


def test_what_is_on_its_way_is_no_part_of_what_is_stored() -> None:
    """A flow that is stopped then must not say that it has what nobody gets from it."""
    pair = Pair(through=False)
    pushed(pair.leader, 0, 1)
    pair.deliver()
    replies = pushed(pair.leader, 1, 2)
    saved, unread = pair.leader.save(), pair.leader.unread()
    pair.leader.close()
    pair.deliver()
    assert saved["committed"] == 0 and [b["x"].to_pylist() for b in unread] == [[1]]
    assert replies == [], "the query would go on behind it"
    assert pushed(pair.leader, 2, 3) == [(False, push.ENDED)]


def test_no_epoch_has_rows_that_the_store_lacks(small: None) -> None:
    """The other replica has them when the leader dies, and the store has not."""
    pair, stored = Pair(through=False), []
    pair.other.keep = lambda lead, message, bodies: stored.append((message.number, lead.rank))
    pushed(pair.leader, 0, 1, 2)
    pair.deliver(confirmed=False)
    assert drained(pair.other) == [], "whoever does not lead reads what is due"
    pair.other.on_replicas(None, {}, {}, 7)
    assert drained(pair.other) == [] and stored == [(1, 7)]
    replies = Replies()
    pair.other.begin("query", 0, "again", replies)
    assert replies == [], "the query would go on behind it, and the flow may be lost"
    pair.other.on_stored(Lead(7, 1), 1)
    assert drained(pair.other) == [1, 2] and replies == [(True, "taken")]


def test_a_new_replica_counts_when_it_has_what_entered_without_it(small: None) -> None:
    pair = Pair(through=False)
    pair.leader.on_replicas(None, {}, {})
    pair.has_state = False
    pair.leader.on_replicas(None, {}, {OTHER: 0})
    pair.other.restore(pair.leader.save(), pair.leader.query)
    values, _ = large(pair.leader, 0)
    assert not pair.sent, "the leader does not know what it has"
    told = [pair.ask()]
    while pair.sent:
        pair.take()
        told.append(pair.confirm())
    assert told == [False] * (len(told) - 1) + [True], "before that it must not be the only one"
    assert drained(pair.other, due=True) == values


def test_a_leader_that_stores_portions_once_more_voids_none_of_them(tmp_path) -> None:
    """It is lost in the midst of that. What it did not have is void all the same."""
    folder = Folder(str(tmp_path))
    restore_point = RestorePoint(str(tmp_path), 0, 0, b"", {}, {}, stages=["pushed"], generation=1)

    def add(*names: tuple[int, int, int]) -> None:
        for number, rank, base in names:
            file = push_batch_file(1, 0, number, rank, base)
            folder.write(file, [pa.record_batch({"data": [b""]})])

    def known() -> list[tuple[int, int]]:
        names = [push_batch_name(file) for file in known_push_batches(folder, restore_point)[0]]
        return [(name.number, name.rank) for name in names if name is not None]

    add((1, 3, 0), (2, 3, 0), (3, 3, 0), (4, 3, 0))
    add((2, 8, 3))
    assert known() == [(1, 3), (2, 8), (3, 3)]
    add((4, 8, 3), (4, 9, 3))
    assert known() == [(1, 3), (2, 8), (3, 3), (4, 9)]


# --- micro-batches of any size ------------------------------------------------------------------


def large(reader: PushReader, number: int, rows: int = 2_000) -> tuple[list[int], Replies]:
    """A micro-batch that is many times as large as everything that is bounded."""
    begun(reader, number, f"push {number}")
    values = list(range(number * rows, number * rows + rows))
    replies = Replies()
    for partition in range(4):
        part = values[partition * rows // 4 : (partition + 1) * rows // 4]
        staged = reader.open(f"push {number}", partition, partition, Replies())
        assert staged is not None
        for at in range(0, len(part), 50):
            answers = Replies()
            reader.rows(staged, batch(*part[at : at + 50]), answers)
            assert answers == [(True, "")]
        reader.done(staged, Replies())
    reader.commit(f"push {number}", [(p, p) for p in range(4)], replies)
    return values, replies


def test_what_is_staged_does_not_grow_in_memory(small: None, tmp_path) -> None:
    reader = alone(folder=str(tmp_path))
    values, replies = large(reader, 0)
    assert reader.overflow.memory_bytes <= push.MEMORY_BYTES_MAX
    assert not os.listdir(tmp_path), "files without names are gone with the process"
    assert replies == [], "there is no room for the next one"
    assert drained(reader) == values
    assert replies == [(True, "")] and reader.overflow.memory_bytes == 0


def test_a_large_micro_batch_is_sent_in_bounded_portions(small: None) -> None:
    pair = Pair(through=False)
    values, replies = large(pair.leader, 0)
    most, parts = 0, []
    while pair.sent:
        most = max(most, len(pair.sent))
        message, _ = pair.sent[0]
        parts.append(message.marks["more"])
        assert len(message.sizes) <= 3
        assert drained(pair.leader) == drained(pair.other, due=True) == [], "all of it, or nothing"
        pair.deliver(most=1)
    assert most <= 4 and parts == [1] * (len(parts) - 1) + [0] and len(parts) > 99
    for reader in (pair.leader, pair.other):
        assert reader.overflow.memory_bytes <= push.MEMORY_BYTES_MAX
        assert drained(reader, due=True) == values
    assert replies == [(True, "")]


@pytest.mark.parametrize("arrived", [0, 1, 17, 119, 1_000])
def test_half_a_micro_batch_is_none(small: None, arrived: int) -> None:
    """The leader dies when the other replica has some push batches of it."""
    pair = Pair(through=False)
    pushed(pair.leader, 0, -1)
    pair.deliver()
    values, _ = large(pair.leader, 1)
    pair.deliver(most=arrived)
    complete = not pair.sent
    pair.other.on_replicas(None, {}, {})
    assert begun(pair.other, 1, "again")[1] == ("taken" if complete else "")
    if not complete:
        hand_over(pair.other, "again", 0, 1, *reversed(values))  # Spark may give it otherwise
        pair.other.commit("again", [(0, 1)], Replies())
        values.reverse()
    assert drained(pair.other) == [-1, *values]
    assert pushed(pair.other, 2, -2) == [(True, "")]


def test_the_other_replica_dies_in_the_middle_of_a_micro_batch(small: None) -> None:
    pair = Pair(through=False)
    values, replies = large(pair.leader, 0)
    pair.deliver(most=9)
    pair.leader.on_replicas(None, {}, {})
    assert replies == [] and drained(pair.leader) == values
    assert replies == [(True, "")]


def test_another_replica_comes_in_the_middle_of_a_micro_batch(small: None) -> None:
    """It gets the push batches that are on their way to the store, and no more of them at once."""
    pair, stored = Pair(through=False), []
    pair.leader.keep = lambda lead, message, bodies: stored.append(message.number)
    pair.leader.on_replicas(None, {}, {})
    values, replies = large(pair.leader, 0)
    while len(stored) < 40:
        pair.leader.on_stored(Lead(0, 0), stored[-1])
    pair.leader.on_replicas(None, {}, {OTHER: 0})
    pair.other.restore(pair.leader.save(), pair.leader.query)
    pair.sent.clear()  # it was not there yet
    assert pair.ask(), "nothing has entered that it lacks"
    assert len(pair.sent) <= 4
    pair.deliver()
    assert drained(pair.other, due=True) == drained(pair.leader) == []
    while not pair.leader.unread():
        pair.leader.on_stored(Lead(0, 0), stored[-1])
    assert drained(pair.leader) == values and replies == [(True, "")]
    assert drained(pair.other, due=True) == values
    assert stored == list(range(1, stored[-1] + 1))


def test_rows_that_cannot_be_staged_are_refused(small: None, tmp_path) -> None:
    reader, replies = alone(folder=str(tmp_path / "missing")), Replies()
    begun(reader, 0, "a")
    staged = reader.open("a", 0, 1, Replies())
    assert staged is not None
    for at in range(0, 400, 50):
        reader.rows(staged, batch(*range(at, at + 50)), replies)
    assert [ok for ok, _ in replies] == [True] * 2 + [False] * 6
    assert "cannot be staged on disk" in replies[2][1]
    reader.commit("a", [(0, 1)], replies)
    assert not replies[-1][0] and reader.overflow.memory_bytes == 0


def test_a_message_that_nobody_would_take_is_not_sent() -> None:
    with pytest.raises(FlowError, match=r"PushRows has \d+ \+ 1073741825 bytes"):
        wire.encode(wire.PushRows(), wire.BODY_BYTES_MAX + 1)
    with pytest.raises(FlowError, match="PushEnd has"):
        wire.encode(wire.PushEnd(0, "q" * wire.HEADER_BYTES_MAX))


def test_rows_are_cut_to_size_whatever_they_are() -> None:
    texts = ["x" * n for n in (5, 90_000, 3, 3, 70_000, 0, 20, 4_000)]
    rows = pa.record_batch({"t": texts, "l": [[t] for t in texts]})
    pieces = list(cut(rows, 10_000))
    assert pa.Table.from_batches(pieces) == pa.Table.from_batches([rows])
    assert all(p.num_rows == 1 or p.nbytes <= 10_000 for p in pieces) and len(pieces) < 8
    shared = pa.record_batch({"d": pa.array(texts * 9).dictionary_encode()})
    assert len(list(cut(shared, 10_000))) == 1, "each part would have all of the dictionary"
    assert list(cut(batch(), 10)) == [batch()]


def test_what_overflows_is_what_it_was(tmp_path) -> None:
    overflow = Overflow(str(tmp_path), 1_000)
    rows = [pa.record_batch({"t": [f"{n}-{i}" for i in range(n)]}) for n in range(120)]
    held = [overflow.hold(r) for r in rows]
    assert [h.rows for h in held] == rows and overflow.memory_bytes <= 1_000
    assert {h.on_disk for h in held} == {True, False}
    overflow.release(held)
    assert overflow.memory_bytes == 0
