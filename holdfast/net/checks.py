"""What a message must be like before the machines of a site get to see it.

The decoder knows the classes of messages and how large a number may be; here they are held against
the plan: exchanges, tasks, splits and sinks that there are, records and blocks that can be, acks
that agree with themselves. A peer may act on a later view than this site, so nothing is held
against the view; and what depends on how far things have come is for the machines to judge.

Against a member that lies (says to have what it has not) there is no protection here.
"""

from __future__ import annotations

import numpy as np

from holdfast.core.layout import Shape, StageShape
from holdfast.core.records import STEP_BYTES, Block, EpochRecord
from holdfast.core.replica import ROOM_BEHIND
from holdfast.errors import ProtocolError
from holdfast.net import wire
from holdfast.plan.planner import Plan

NUMBERS = range(wire.NUMBER_MAX)
WITH_BODY = (
    wire.Bundle,
    wire.HandOverState,
    wire.HandOverKept,
    wire.HandOverHeld,
    wire.PushBatch,
)
MARKS = {"committed", "total", "ended", "more", "everywhere"}


class Checks:
    """The checks of one flow's messages: `check` raises a `ProtocolError` or does nothing."""

    def __init__(self, plan: Plan, shape: Shape, window: int) -> None:
        self._shape, self._room = shape, max(window, ROOM_BEHIND)
        self._splits = set(plan.splits)
        self._pushed = {s.id for s in plan.sources if s.source is not None and s.source.pushed}
        self._sinks = {s.id: s.sink for s in plan.sinks}

    def check(self, message: wire.Message, body: memoryview) -> None:
        _require(not body.nbytes or isinstance(message, WITH_BODY), "a body where none can be")
        match message:
            case wire.Bundle():
                self._bundle(message)
            case wire.Acks():
                for ack in message.acks:
                    self._ack(ack)
            case wire.AskLog():
                self._ends(message.exchange, message.producer, message.consumer)
            case wire.TellLog():
                self._ends(message.exchange, message.producer, message.consumer)
                self._line(message.line)
            case wire.Record() | wire.Pass():
                self._record(message.record)
            case wire.SequencerState():
                self._sequencer(message)
            case wire.Blocks():
                _require(self._has_split(message.source, message.split), "there is no such split")
                for block in message.blocks:
                    _require(_is_sound(block), "a block that cannot be")
            case wire.SplitState() | wire.SplitAt():
                _require(self._has_split(message.source, message.split), "there is no such split")
            case wire.Delivered():
                _require(message.sink in self._sinks, "there is no such sink")
                _require(message.durable <= message.safe, "a delivery that cannot be")
            case wire.HandOverBegin():
                outputs = self._task(message.stage, message.group).outputs
                for gap in message.gaps:
                    _require(gap.exchange in outputs, "bundles of another stage")
                    self._task(self._shape.consumer_of[gap.exchange], gap.consumer)
                    self._line(gap.line)
            case wire.CatchUp() | wire.HandOverState() | wire.HandOverHeld() | wire.HandOverEnd():
                self._task(message.stage, message.group)
            case wire.HandOverKept():
                stage = self._task(message.stage, message.group)
                bundle = message.bundle
                _require(bundle.exchange in stage.outputs, "a bundle of another stage")
                _require(bundle.producer == message.group, "a bundle of another partition group")
                self._bundle(bundle)
            case wire.PushBatch():
                _require(message.source in self._pushed, "the source is not fed")
                _require(message.marks.keys() >= MARKS, "a push batch without all marks")
                _require(message.marks["everywhere"] < message.number, "a push batch known to all")
                _require(sum(message.sizes) == body.nbytes, "a push batch of another size")
                part = bool(message.marks["more"])
                _require(
                    not (part and message.pull_reader), "a part of a push batch with a position"
                )
            case wire.PushHas() | wire.PushCounted():
                _require(message.source in self._pushed, "the source is not fed")
            case wire.Notes() | wire.NotesKept():
                sink = self._sinks.get(message.sink)
                read = sink is not None and sink.unread_bytes_max is not None
                _require(read, "there is no such sink that is read")

    def record(self, record: EpochRecord) -> None:
        """One that was stored, and not sent."""
        self._record(record)

    def _bundle(self, bundle: wire.Bundle) -> None:
        producer, consumer = self._ends(bundle.exchange, bundle.producer, bundle.consumer)
        whole = bundle.last and bundle.part == 0
        _require(whole or not producer.ordered, "a part of a bundle where there are no parts")
        _require(bundle.digests <= 8 * consumer.partitions, "more digests than partitions")

    def _ack(self, ack: wire.Ack) -> None:
        self._ends(ack.exchange, ack.producer, ack.consumer)
        _require(ack.finished <= ack.received <= ack.credit, "an ack that cannot be")
        _require(ack.credit <= ack.received + self._room, "an ack that cannot be")
        _require(len(ack.levels) <= len(self._shape.stages), "an ack that cannot be")
        _require(all(level <= ack.received for level in ack.levels), "an ack that cannot be")
        _require(len(ack.lines) in (0, len(ack.levels)), "an ack that cannot be")
        for line in ack.lines:
            self._line(line)

    def _ends(self, exchange: int, producer: int, consumer: int) -> tuple[StageShape, StageShape]:
        """The stages at the ends of an exchange, if they have such partition groups."""
        _require(exchange < len(self._shape.consumer_of), "there is no such exchange")
        return (
            self._task(self._shape.producer_of[exchange], producer),
            self._task(self._shape.consumer_of[exchange], consumer),
        )

    def _line(self, line: wire.Line) -> None:
        for stage, group, _ in line:
            self._task(stage, group)

    def _task(self, stage: int, group: int) -> StageShape:
        _require(stage < len(self._shape.stages), "there is no such stage")
        found = self._shape.stages[stage]
        _require(group < found.partitions, "there is no such partition group")
        return found

    def _has_split(self, source: int, split: int) -> bool:
        return (source, split) in self._splits

    def _record(self, record: EpochRecord) -> None:
        _require(record.epoch in NUMBERS and record.base in NUMBERS, "a record that cannot be")
        _require(self._splits.issuperset(record.idle), "there is no such split")
        _require(record.last or not record.ended, "a record that cannot be")
        for r in record.ranges:
            _require(self._has_split(r.source, r.split), "there is no such split")
            block = Block(r.start, r.end, 0, r.steps)
            _require(_is_sound(block), "a range that cannot be")

    def _sequencer(self, message: wire.SequencerState) -> None:
        count = len(self._splits)
        known = len(message.cuts) == len(message.let_go) == count
        _require(known and message.turn < count, "other splits than ours")
        for record in message.history:
            self._record(record)
        epochs = [r.epoch for r in message.history]
        expected = list(range(message.next_epoch - len(epochs), message.next_epoch))
        _require(epochs == expected, "a history with gaps")


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
