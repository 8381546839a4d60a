"""Validation of messages before a site's machines see them.

The decoder checks the types of fields and the bounds of plain numbers. The checks here compare a
message with the plan: its exchange, task, split or sink must exist, its records and blocks must be
possible, its acks consistent. Values of the core that a message carries have plain types, so their
bounds are checked here, too. A peer may act on a later view than this site, so nothing is compared
with the view; and the machines judge what depends on how far the flow is.

The checks do not protect against a member that lies, for example one that acknowledges what it does
not have.
"""

from __future__ import annotations

import numpy as np

from holdfast.core.ids import NO_EPOCH, TaskId
from holdfast.core.layout import Shape, StageShape
from holdfast.core.messages import Ack, BundleKey, LogQuery
from holdfast.core.records import STEP_BYTES, Block, EpochRecord
from holdfast.core.replica import ROOM_BEHIND
from holdfast.core.upstream import ValidAfter
from holdfast.errors import ProtocolError
from holdfast.net import wire
from holdfast.plan.planner import Plan

NUMBERS = range(wire.NUMBER_MAX)
EPOCHS = range(NO_EPOCH, wire.NUMBER_MAX)
MARKS = {"committed", "total", "ended", "more"}


class Checks:
    """The checks of one flow's messages, a method for each: it raises a `ProtocolError` or does
    nothing. `holdfast.net.protocol` says which message needs which."""

    def __init__(self, plan: Plan, shape: Shape, window: int) -> None:
        self._shape, self._room = shape, max(window, ROOM_BEHIND)
        stages = shape.stages
        self._stages_of = [
            (stages[producer], stages[consumer])
            for producer, consumer in zip(shape.producer_of, shape.consumer_of, strict=True)
        ]
        """By exchange: the stages at its ends."""
        self._splits = set(plan.splits)
        self._pushed = {s.id for s in plan.sources if s.source is not None and s.source.pushed}
        self._sinks = {s.id: s.sink for s in plan.sinks}

    # --- orders ---------------------------------------------------------------------------------

    def catch_up(self, message: wire.CatchUp, body: memoryview) -> None:
        self._task(message.order.task)
        _require(message.order.joiner in NUMBERS, "there is no such site")

    def store(self, message: wire.Store, body: memoryview) -> None:
        order = message.order
        _require(order.epoch in EPOCHS, "an epoch that cannot be")
        _require(order.after is None or order.after in EPOCHS, "an epoch that cannot be")

    # --- the order of the input -----------------------------------------------------------------

    def carried_record(self, message: wire.Record | wire.Pass, body: memoryview) -> None:
        self.record(message.record)

    def record(self, record: EpochRecord) -> None:
        _require(record.epoch in NUMBERS and record.base in NUMBERS, "a record that cannot be")
        _require(self._splits.issuperset(record.idle), "there is no such split")
        _require(record.last or not record.ended, "a record that cannot be")
        for r in record.ranges:
            self._split(r.source, r.split)
            block = Block(r.start, r.end, 0, r.steps)
            _require(_is_sound(block), "a range that cannot be")

    def sequencer_copy(self, message: wire.SequencerCopy, body: memoryview) -> None:
        state, count = message.state, len(self._splits)
        known = len(state.cuts) == len(state.idle) == count
        _require(known and 0 <= state.turn < count, "other splits than ours")
        _require(all(cut in NUMBERS for cut in state.cuts), "a cut that cannot be")
        _require(state.next_epoch in EPOCHS and state.next_seq in NUMBERS, "a state that cannot be")
        for record in state.history:
            self.record(record)
        epochs = [r.epoch for r in state.history]
        expected = list(range(state.next_epoch - len(epochs), state.next_epoch))
        _require(epochs == expected, "a history with gaps")

    def blocks(self, message: wire.Blocks, body: memoryview) -> None:
        available = message.available
        self._split(available.source, available.split)
        for block in available.blocks:
            _require(_is_sound(block), "a block that cannot be")

    def quiet(self, message: wire.Quiet, body: memoryview) -> None:
        self._split(message.split.source, message.split.split)
        _require(message.split.offset in NUMBERS, "an offset that cannot be")

    def split_at(self, message: wire.SplitAt, body: memoryview) -> None:
        self._split(message.source, message.split)

    # --- frames ---------------------------------------------------------------------------------

    def bundle(self, message: wire.Bundle, body: memoryview) -> None:
        key = message.key
        producer, consumer = self._ends(key)
        _require(key.epoch in NUMBERS and key.part in NUMBERS, "a bundle that cannot be")
        whole = key.last and key.part == 0
        _require(whole or not producer.ordered, "a part of a bundle where there are no parts")
        _require(message.digests <= 8 * consumer.partitions, "more digests than partitions")

    def acks(self, message: wire.Acks, body: memoryview) -> None:
        for ack in message.acks:
            self._ends(ack)
            _require(_is_consistent(ack, self._room), "an ack that cannot be")
            _require(len(ack.levels) <= len(self._shape.stages), "an ack that cannot be")
            for valid_after in ack.valid_after:
                self._valid_after(valid_after)

    def log_request(self, message: wire.LogRequest, body: memoryview) -> None:
        self._ends(message.query)

    def log_reply(self, message: wire.LogReply, body: memoryview) -> None:
        self._ends(message.query)
        log = message.log
        _require(log.after in EPOCHS and log.upto in EPOCHS, "a log that cannot be")
        _require(log.complete_level in NUMBERS, "a log that cannot be")
        self._valid_after(log.valid_after)

    def delivered(self, message: wire.Delivered, body: memoryview) -> None:
        _require(message.sink in self._sinks, "there is no such sink")
        _require(message.durable <= message.safe, "a delivery that cannot be")

    # --- hand-over ------------------------------------------------------------------------------

    def hand_over_begin(self, message: wire.HandOverBegin, body: memoryview) -> None:
        outputs = self._task(message.task).outputs
        for exchange, gaps in message.gaps.items():
            _require(exchange in outputs, "bundles of another stage")
            for consumer, gap in gaps.items():
                self._task((self._shape.consumer_of[exchange], consumer))
                epochs = (gap.trimmed_upto, gap.known_stable, gap.rebuilt_from)
                _require(all(epoch in EPOCHS for epoch in epochs), "a gap that cannot be")
                _require(gap.complete_level in NUMBERS, "a gap that cannot be")
                self._valid_after(gap.valid_after)

    def hand_over_part(
        self,
        message: wire.HandOverState | wire.HandOverHeld | wire.HandOverEnd | wire.HandOverRefused,
        body: memoryview,
    ) -> None:
        self._task(message.task)

    def hand_over_kept(self, message: wire.HandOverKept, body: memoryview) -> None:
        stage, key = self._task(message.task), message.bundle.key
        _require(key.exchange in stage.outputs, "a bundle of another stage")
        _require(key.producer == message.task[1], "a bundle of another partition group")
        self.bundle(message.bundle, body)

    # --- rows that are pushed, sinks that are read ------------------------------------------------

    def push_batch(self, message: wire.PushBatch, body: memoryview) -> None:
        _require(message.source in self._pushed, "the source is not fed")
        _require(message.marks.keys() >= MARKS, "a push batch without all marks")
        _require(message.number > 0, "push batches begin with 1")
        _require(message.made[0] <= message.rank, "a push batch of a later leader")
        _require(message.made[1] < message.number, "a push batch of an earlier leader")
        _require(sum(message.sizes) == body.nbytes, "a push batch of another size")
        part = bool(message.marks["more"])
        _require(not (part and message.pull_reader), "a part of a push batch with a position")

    def pushed(
        self,
        message: wire.PushHas | wire.PushKnown | wire.PushLead | wire.PushCounted,
        body: memoryview,
    ) -> None:
        _require(message.source in self._pushed, "the source is not fed")

    def push_has(self, message: wire.PushHas, body: memoryview) -> None:
        self.pushed(message, body)
        _require(message.entered <= message.number, "push batches that entered and are not there")
        ranks, ends = [r for r, _ in message.made], [message.entered, *(n for _, n in message.made)]
        _require(ranks == sorted(set(ranks)), "push batches of leaders in another order")
        _require(ends == sorted(set(ends)), "push batches in another order")

    def push_known(self, message: wire.PushKnown, body: memoryview) -> None:
        self.pushed(message, body)
        _require(message.everywhere <= message.entered, "push batches that entered at others only")

    def notes(self, message: wire.Notes | wire.NotesKept, body: memoryview) -> None:
        sink = self._sinks.get(message.sink)
        read = sink is not None and sink.unread_bytes_max is not None
        _require(read, "there is no such sink that is read")

    # --- what there is --------------------------------------------------------------------------

    def _ends(self, key: BundleKey | Ack | LogQuery) -> tuple[StageShape, StageShape]:
        """The stages at the ends of an exchange, if they have such partition groups."""
        _require(0 <= key.exchange < len(self._stages_of), "there is no such exchange")
        _require(key.joined_view in NUMBERS, "there is no such view")
        producer, consumer = ends = self._stages_of[key.exchange]
        known = 0 <= key.producer < producer.partitions and 0 <= key.consumer < consumer.partitions
        _require(known, "there is no such partition group")
        return ends

    def _task(self, task: TaskId) -> StageShape:
        stage, group = task
        _require(0 <= stage < len(self._shape.stages), "there is no such stage")
        found = self._shape.stages[stage]
        _require(0 <= group < found.partitions, "there is no such partition group")
        return found

    def _valid_after(self, valid_after: ValidAfter) -> None:
        for task, epoch in valid_after.items():
            self._task(task)
            _require(epoch in EPOCHS, "an epoch that cannot be")

    def _split(self, source: int, split: int) -> None:
        _require((source, split) in self._splits, "there is no such split")


def _is_consistent(ack: Ack, room: int) -> bool:
    return (
        ack.finished >= NO_EPOCH
        and ack.finished <= ack.received <= ack.credit <= ack.received + room
        and ack.received in EPOCHS
        and ack.checksum >= 0
        and all(NO_EPOCH <= level <= ack.received for level in ack.levels)
        and len(ack.valid_after) in (0, len(ack.levels))
    )


def _is_sound(block: Block) -> bool:
    rows = 0 <= block.start < block.end < wire.NUMBER_MAX
    return rows and block.nbytes in NUMBERS and _has_sound_steps(block)


def _has_sound_steps(block: Block) -> bool:
    """Whether the steps are at rows of the block, in order, and at the first one."""
    if not block.steps:
        return True
    if len(block.steps) % STEP_BYTES:
        return False
    rows = np.frombuffer(block.steps, np.int64)[::2]
    inside = rows[0] == block.start and rows[-1] < block.end
    return bool(inside and np.all(rows[1:] > rows[:-1]))


def _require(condition: bool, complaint: str) -> None:
    if not condition:
        raise ProtocolError(complaint)
