"""Between sites and controls, and between the controls of several applications.

A site dials every application's control, registers, and reports to all of them. Only the leader
answers. A connection carries messages in order; when it breaks, the site dials again, registers
again, and repeats what a new leader must know (`Node.report_again`).

    site -> control    Register, then at any time Seen, ReplicaReport, Behind, Unheard, Status,
                       Cut, TaskFiles, NotStored, Failed, Finished, Beat, KeysHeld
    leader -> site     NewView, Start, CatchUp, Retain, Drain, Pause, Store, Recorded, Dismiss,
                       Fenced, NewKeys
    leader -> agent    Launch, Dismiss, Status, NewSecrets
    agent -> leader    Exited, KeysHeld

Every order carries the term of the leader that gives it. A site ignores orders of earlier terms
than it has seen; a leader sends an order only after the arbiter has committed what it rests on.
Orders may come twice, and a site must tolerate that: every one of them states what shall be, not
what shall change.
"""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict

import msgspec

from holdfast.core.events import (
    CatchUpOrdered,
    ReplicaBehind,
    ReplicaReported,
    RetentionOrdered,
    StoreOrdered,
)
from holdfast.core.ids import TaskId
from holdfast.core.layout import Domain, View
from holdfast.core.records import EpochRecord
from holdfast.net.wire.base import EpochNumber, Message, Number, NumberOrNone
from holdfast.storage.files import FileInfo

# --- a site reports -----------------------------------------------------------------------------


class Register(Message, frozen=True):
    """The site is up, listens at this address, and runs in this failure domain. The leader gives it
    a view, or fences it."""

    site: Number
    host: str
    port: Number
    pid: Number
    domain: Domain


class Seen(Message, frozen=True):
    """The site acts on this view, and is connected to all its members."""

    term: Number
    number: Number


class ReplicaReport(Message, frozen=True):
    """A replica has reached a phase, or a hand-over to it has failed."""

    report: ReplicaReported


class Behind(Message, frozen=True):
    """The sender keeps too much for the replicas at another site."""

    replica: ReplicaBehind


class Unheard(Message, frozen=True):
    """The sender has heard nothing of a member for this many leases, though it listened. `how`
    describes the connection, for people."""

    site: Number
    leases: Number
    how: str


class Beat(Message, frozen=True):
    """The sender is alive. Sites also send it to each other on a connection that is quiet. `busy`:
    for longer than the lease the site has not read from its connections, nor sent beats on them."""

    busy: bool = False
    seconds: float = 0.0
    """If busy: for how long, and with what (see `holdfast.core.events.Call`)."""
    stage: str = ""
    epoch: int = -1


class Status(Message, frozen=True):
    """Metrics as JSON: of a site to controls, of the flow from the leader to agents."""

    metrics: bytes


class Failed(Message, frozen=True):
    """The site cannot go on; the leader ends the flow with this error. `kind` is the class of the
    error, `detail` its fields."""

    kind: str
    detail: dict[str, str | int | None]


class Finished(Message, frozen=True):
    """The site has completed the last epoch, as far as it has part in it in the view `number`."""

    number: Number


class Cut(Message, frozen=True):
    """The sequencer has cut an epoch."""

    record: EpochRecord


class IngressExtras(TypedDict):
    """What an ingress knows besides its rows."""

    offsets: dict[str, Number]
    positions: dict[str, dict[str, Number]]
    """Of splits whose readers need more than the offset."""
    mark: bytes
    push_readers: list[dict[str, NumberOrNone]]
    pull_readers: list[str]
    queries: NotRequired[list[str]]
    """The query that feeds each; missing in checkpoints from before queries were told apart."""


class EgressExtras(TypedDict):
    """What an egress knows besides its rows."""

    taken: NumberOrNone
    durable: NumberOrNone
    replayed_results: Number
    writer: dict[str, Any]
    incarnation: NotRequired[str]
    """By which the sink's store knows the flow."""


class Extras(TypedDict):
    """What a task knows besides its tables, kept bundles and held rows."""

    counts: tuple[Number, Number, Number, Number]
    ingress: IngressExtras | None
    egress: EgressExtras | None
    operator: dict[str, int] | None


class TaskFiles(Message, frozen=True):
    """A task is stored as it was after `epoch`. The checkpoint counts once the leader has this for
    every task and has written its manifest."""

    task: TaskId
    epoch: EpochNumber
    after: EpochNumber | None
    """If set: only what has changed since that epoch."""
    files: list[tuple[str, str, bool]]
    """In order: table, name, whether the file has removed keys."""
    extras: Extras
    held: list[tuple[Number, Number]]
    """Of a sink: epochs and numbers of rows in `held_file`."""
    held_file: str
    """Of a push source: the rows that are in no epoch yet."""
    infos: dict[str, FileInfo]
    """Size and checksum of each file."""
    final: bool
    """The flow is being stopped, and `epoch` is its last."""


class NotStored(Message, frozen=True):
    """A task cannot be stored as it is after `epoch`; `missed`: it was past that epoch."""

    task: TaskId
    epoch: EpochNumber
    reason: str
    missed: bool


# --- the leader orders --------------------------------------------------------------------------


class NewView(Message, frozen=True):
    """Act on this view: connect to its members, open the replicas it places here, report `Seen`.
    A site ignores a view that does not replace the one it has."""

    view: View
    addresses: dict[int, tuple[str, int]]


class Start(Message, frozen=True):
    """All members are connected: read the sources. Comes again with every later view."""

    term: Number


class CatchUp(Message, frozen=True):
    """Hand a task over to a joining replica. Every member counts the joiner by now."""

    term: Number
    order: CatchUpOrdered


class Retain(Message, frozen=True):
    """All members act on the view: report each task that would be rebuilt when all is kept that
    this takes."""

    term: Number
    order: RetentionOrdered


class Drain(Message, frozen=True):
    """Cut no new rows into epochs; finish what is cut. Only to the sequencer's site."""

    term: Number


class Pause(Message, frozen=True):
    """Cut no epochs until told otherwise. Only to the sequencer's site."""

    term: Number
    paused: bool


class Store(Message, frozen=True):
    """Store the tasks that you lead. Replaces every earlier such order."""

    term: Number
    order: StoreOrdered


class Recorded(Message, frozen=True):
    """Records up to this epoch are on disk: sinks may write the epoch."""

    term: Number
    epoch: EpochNumber


class Dismiss(Message, frozen=True):
    """The flow is over, and that is committed: leave."""

    term: Number


class Fenced(Message, frozen=True):
    """You were declared dead, or do not belong to the flow: leave. Sites tell it a dead site that
    connects to them, too."""

    term: Number


class KeySet(msgspec.Struct, frozen=True, array_like=True):
    """The keys that a site has of one secret: see `holdfast.net.keys`."""

    id: str
    incarnation: str
    held: dict[str, bytes]


class NewKeys(Message, frozen=True):
    """Accept these keys and no others, and dial with the first; with TLS show this certificate.
    Answer with `KeysHeld`."""

    term: Number
    keys: tuple[KeySet, ...]
    certificate: tuple[bytes, bytes, bytes] | None = None
    """The authorities to trust, the site's own certificate, and its key; None: as before."""


class KeysHeld(Message, frozen=True):
    """The sender accepts keys of these ids, and dials with the first."""

    ids: tuple[str, ...]


# --- between applications -----------------------------------------------------------------------


class Launch(Message, frozen=True):
    """The leader to an agent: start this site, unless its process runs already."""

    term: Number
    site: Number


class NewSecrets(Message, frozen=True):
    """The leader to an agent: accept the keys of these secrets and no others, and dial with those
    of the first. Answer with `KeysHeld`."""

    term: Number
    secrets: tuple[bytes, ...]


class Exited(Message, frozen=True):
    """An agent to the leader: the process of this site has ended."""

    site: Number
    reason: str
