"""From programs that read a sink, and between the sink's replicas.

    reader -> control   Where; answered with There
    reader -> site      Ask, again and again; answered with Answer

A reader asks the site that leads the sink's egress; another site refuses and names the leader. An
`Ask` names what the reader has already, so asking twice gives the same rows. The leading egress
keeps rows until its readers have them, and replicates what it knows of readers (`Notes`) before it
drops any.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from holdfast.net.wire.base import EpochNumber, Message, Number, NumberOrNone

ReaderWord = Literal["reading", "idle", "behind", "forgotten"]


class Where(Message, frozen=True):
    """Which sites have this sink?"""

    sink: str


class There(Message, frozen=True):
    """The number of the sink's stage, the schema of its rows (Arrow IPC), and where the sites
    listen that can be asked, the likeliest first; or the `reason` why the control cannot say."""

    reason: str
    stage: Number = 0
    schema: bytes = b""
    addresses: tuple[tuple[str, int], ...] = ()


class Ask(Message, frozen=True):
    """See `SinkWriter.answer`."""

    sink: Number
    request: dict[str, str | int]


class Answer(Message, frozen=True):
    """Rows (Arrow IPC streams of these sizes in the body) and plain values. If not `ok`, why not;
    and where the site listens that leads the egress, if this one does not."""

    ok: bool
    reason: str = ""
    leader: tuple[str, int] | None = None
    values: dict[str, NumberOrNone] = msgspec.field(default_factory=dict)
    sizes: tuple[Number, ...] = ()


class Notes(Message, frozen=True):
    """The leading egress to its other replicas: up to which epoch each reader has everything, of
    which incarnation, and its state (see `ReaderState`); how many readers are yet to come; and up
    to which epoch rows were dropped. Answered with `NotesKept`."""

    sink: Number
    number: Number
    readers: dict[str, tuple[EpochNumber, str, ReaderWord]]
    awaited: Number
    durable: EpochNumber


class NotesKept(Message, frozen=True):
    """A replica of an egress to the leading one: it has those notes."""

    sink: Number
    number: Number
