"""The flow of the model: two stages under pairs, with operators on small integers.

The first stage is a source, the second a keyed stage that is also the end of the flow: its leading
replica writes the results to a store outside. An operator's state after an epoch is a digest of
everything that the partition group was given up to that epoch, so a bundle that is lost, repeated
or taken out of order changes the state, and with it all later results.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import NamedTuple

from holdfast.core.ids import Epoch, ExchangeId, GroupId, StageId, TaskId
from holdfast.core.layout import Shape, StageShape
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord, Range

SOURCE, LAST = StageId(0), StageId(1)
EXCHANGE = ExchangeId(0)
_PRIME = 999_983


class Frame(NamedTuple):
    """A bundle, reduced to a number."""

    value: int

    @property
    def checksum(self) -> int:
        return self.value

    @property
    def nbytes(self) -> int:
        return 1


def shape(sources: int, partitions: int) -> Shape:
    """The shape of the flow with this many partitions of the source and of the last stage."""
    pairs = ProtectionSpec("pairs", 2, "process")
    source = StageShape(SOURCE, "source", "source", sources, (), (EXCHANGE,), guard=pairs)
    last = StageShape(LAST, "counts", "keyed", partitions, (EXCHANGE,), (), guard=pairs)
    return Shape((source, last), (SOURCE,), (LAST,))


@cache
def record(epoch: int, epochs: int) -> EpochRecord:
    """The record of an epoch of one row; `epochs` is how many there are."""
    last = epoch == epochs - 1
    rows = (Range(SOURCE, 0, epoch, epoch + 1),)
    return EpochRecord(Epoch(epoch), epoch, rows, last=last, ended=last)


def row(producer: GroupId, epoch: int, consumer: GroupId) -> Frame:
    """What a source gives a consumer in an epoch."""
    return Frame(1 + 100 * epoch + 10 * producer + consumer)


def fold(state: int, frames: Iterable[Frame]) -> int:
    """The state of a keyed stage after these frames of one epoch."""
    for frame in frames:
        state = (state * 1_009 + frame.value) % _PRIME
    return state


@cache
def reference(task: TaskId, epoch: int, producers: int) -> int:
    """The right state of a task after an epoch."""
    if epoch < 0 or task[0] == SOURCE:
        return 0
    frames = [row(GroupId(i), epoch, task[1]) for i in range(producers)]
    return fold(reference(task, epoch - 1, producers), frames)
