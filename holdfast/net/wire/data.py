"""Between sites: the order of the input, frames, acknowledgements.

A pair of sites shares one connection, dialled by the site with the lower number. Messages on it
arrive in the order in which they were sent. When it breaks, what was under way is lost; after it is
open again both sides ask for what they may lack, so a message may also come twice:

- `Record`s: the receiver asks with `RecordsAfter`; a record that it has is ignored.
- `Bundle`s: the consumer subscribes with its next `Ack`; a bundle up to `received` is ignored.
- `Ack`s, `Delivered`: cumulative; the sender repeats the latest.
- `Blocks`: the ingress announces again with `again`, which voids earlier announcements.

The sequencer's replicas form a chain. The first cuts a record and passes it on (`Pass`); the last
publishes it to all sites (`Record`), so a record that any site acts on is at every replica of the
sequencer. A new replica asks the last one to join (`JoinChain`), gets the state if it lacks it
(`SequencerCopy`), and is part of the chain from `Chained` on.
"""

from __future__ import annotations

from holdfast.core.events import BlocksAvailable, SplitQuiet
from holdfast.core.messages import Ack, BundleKey, LogQuery, SequencerState
from holdfast.core.records import EpochRecord
from holdfast.core.upstream import Log
from holdfast.net.wire.base import EpochNumber, Message, Number

# --- the order of the input ---------------------------------------------------------------------


class Record(Message, frozen=True):
    """A record that all replicas of the sequencer have: act on it."""

    record: EpochRecord


class RecordsAfter(Message, frozen=True):
    """Send the records after this epoch; None: the latest only."""

    epoch: EpochNumber | None


class Pass(Message, frozen=True):
    """A record for the next replica in the chain, which passes it on or publishes it."""

    record: EpochRecord


class JoinChain(Message, frozen=True):
    """The sender shall have a replica of the sequencer. `has` is its next epoch if it has one: pass
    your records on to it. If it is -1, send the state first."""

    has: EpochNumber
    joined_view: Number
    """The view in which the sender's replica of the first task joined."""


class SequencerCopy(Message, frozen=True):
    """The state for a new replica of the sequencer."""

    state: SequencerState


class Chained(Message, frozen=True):
    """The receiver is the next in the chain from now on."""


class Blocks(Message, frozen=True):
    """The leading ingress of a split to the sequencer: rows that can be cut into epochs."""

    available: BlocksAvailable


class Quiet(Message, frozen=True):
    """The leading ingress of a split to the sequencer: there are no more rows, for now or for
    ever."""

    split: SplitQuiet


class SplitAt(Message, frozen=True):
    """The leading ingress to a follower: where row `row` of the split is, to read on from there."""

    source: Number
    split: Number
    row: Number
    position: dict[str, Number]


# --- frames -------------------------------------------------------------------------------------


class Bundle(Message, frozen=True):
    """A bundle of frames. The body is the track of the watermark (`track` bytes), then the digest
    of each of the consumer's partitions' frames (`digests` bytes), then an Arrow record batch (none
    if there are no rows). The receiver acknowledges it."""

    key: BundleKey
    rows: Number
    track: Number
    digests: Number


class Acks(Message, frozen=True):
    """All acknowledgements that a site has for another at the moment."""

    acks: list[Ack]


class LogRequest(Message, frozen=True):
    """A task that shall be rebuilt asks a producer for its log. Answered with `LogReply` as soon as
    the producer counts the sender's replica."""

    query: LogQuery


class LogReply(Message, frozen=True):
    query: LogQuery
    log: Log


class Delivered(Message, frozen=True):
    """The leading egress to the sequencer and to its other replicas: the sink has accepted all
    epochs up to `epoch`, and holds those up to `durable` even if this site dies. Between `durable`
    and `safe` there are no rows."""

    sink: Number
    epoch: EpochNumber
    durable: EpochNumber
    safe: EpochNumber
