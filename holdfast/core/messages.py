"""Values that machines at two sites exchange.

The machine that makes such a value, the wire and the machine that receives it share one class, so
that nothing is copied field by field on the way. The frequent ones are named tuples: the wire sends
them as arrays, without the names of their fields.

A key or an acknowledgement names the replica of the consumer that it is for, or from, by
`joined_view`: the number of the view in which that replica joined. A site may hold a task, lose it,
and hold it again; `joined_view` tells the two replicas apart.
"""

from __future__ import annotations

from typing import NamedTuple

from holdfast.core.ids import Epoch, ExchangeId, GroupId
from holdfast.core.records import EpochRecord
from holdfast.core.upstream import ValidAfter


class BundleKey(NamedTuple):
    """Which bundle it is: the frames from one partition group to another in one epoch of an
    exchange, or a part of them.

    With ordered merging a bundle is whole: `part` is 0 and `last` is set. With arrival merging
    `last` is set on the epoch's last part.
    """

    exchange: ExchangeId
    epoch: Epoch
    producer: GroupId
    consumer: GroupId
    joined_view: int
    part: int = 0
    last: bool = True


class Ack(NamedTuple):
    """What a replica of a consumer tells a replica of a producer. Cumulative: a later ack of the
    same replica replaces an earlier one."""

    exchange: ExchangeId
    producer: GroupId
    consumer: GroupId
    joined_view: int
    received: Epoch
    """The consumer has everything up to this epoch."""
    credit: Epoch
    """The producer may send up to this epoch."""
    subscribe: bool
    """Whether this replica of the producer shall send. The others only keep their bundles."""
    finished: Epoch
    """The last epoch that the consumer has processed, ..."""
    checksum: int
    """... and the checksum of that epoch's bundle."""
    levels: tuple[Epoch, ...] = ()
    """Up to which epochs the consumer no longer needs its input, at each level (see
    `holdfast.core.upstream`)."""
    valid_after: tuple[ValidAfter, ...] = ()
    """What goes with each level, if tasks are rebuilt."""


class LogQuery(NamedTuple):
    """A replica of a consumer that shall be rebuilt asks a replica of a producer for its log."""

    exchange: ExchangeId
    producer: GroupId
    consumer: GroupId
    joined_view: int


class SequencerState(NamedTuple):
    """What a new replica of the sequencer begins with. `cuts` and `idle` are by split."""

    next_epoch: Epoch
    next_seq: int
    finished: bool
    turn: int
    cuts: tuple[int, ...]
    idle: tuple[bool, ...]
    history: tuple[EpochRecord, ...]
