"""Events of the machines: facts. The line before each group names the machine."""

from __future__ import annotations

from typing import Any

from holdfast.core.effects import ArbiterAsk, AskCommit, AskLead, AskRead, AskRenew, AskResign
from holdfast.core.ids import NO_EPOCH, Entry, Epoch, ExchangeId, GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import Domain, View
from holdfast.core.messages import Ack, BundleKey, LogQuery, SequencerState
from holdfast.core.records import Block, EpochRecord
from holdfast.core.requests import Request
from holdfast.core.timers import Timer
from holdfast.core.upstream import Gap, Log
from holdfast.core.values import value

# --- a site's dataflow, and its replica of the sequencer ---------------------------------------


@value
class ViewCommitted:
    """The controller has committed a view. The site acts on it from now on."""

    view: View


# --- a site's dataflow --------------------------------------------------------------------------


@value
class PeerConnected:
    """The site has a new connection to another site. Nothing has been sent on it yet."""

    site: SiteId


@value
class PeerLost:
    """The connection to another site broke. That site may be alive."""

    site: SiteId


@value
class RecordArrived:
    """The sequencer has recorded an epoch."""

    record: EpochRecord


@value
class BundleArrived:
    """A bundle, or a part of one, has arrived for a replica of a consumer at this site."""

    key: BundleKey
    bundle: Any


@value
class AckArrived:
    """The replica of a consumer at `site` acknowledges bundles."""

    site: SiteId
    ack: Ack


@value
class TaskProcessed:
    """A task has executed an order to ingest or process."""

    task: TaskId
    epoch: Epoch
    last: bool
    outputs: dict[ExchangeId, dict[GroupId, Any]]
    """By exchange and consumer."""
    needs: Epoch = NO_EPOCH
    """The state after this epoch derives from the input after the epoch `needs`."""
    earlier: tuple[dict[ExchangeId, dict[GroupId, Any]], ...] = ()
    """The output of the epochs right before this one, if the order was for several."""
    seconds: float = 0.0
    """How long the order took."""


@value
class LogAsked:
    """The replica of a consumer at `site` is being rebuilt, and asks for a producer's log."""

    site: SiteId
    query: LogQuery


@value
class LogTold:
    """The replica of a producer at `site` answers with its log."""

    site: SiteId
    query: LogQuery
    log: Log


@value
class CheckpointDue:
    """A task must hand its state over to its standbys."""

    task: TaskId


@value
class SinkDurable:
    """The leading replica of a sink has durably written all rows up to this epoch."""

    task: TaskId
    epoch: Epoch


@value
class StoreOrdered:
    """The controller orders a checkpoint: each task that is led here stores its state."""

    epoch: Epoch
    """The state after this epoch."""
    after: Epoch | None
    """Only what has changed after this epoch, if the task was stored then; otherwise all of it."""


@value
class CatchUpOrdered:
    """All members count the joining replica, so the donor may hand over to it."""

    task: TaskId
    joiner: SiteId


@value
class RetentionOrdered:
    """All members act on the view with this number, and retain what its protection needs. The site
    reports each task that would be rebuilt from that, once the task needs nothing older."""

    number: int


@value
class HandOverBegun:
    """A site begins to hand the state after `epoch` over to the replica here, or what has changed
    since `after`."""

    task: TaskId
    sender: SiteId
    offer: Any
    joined_view: int = 0
    epoch: Epoch = NO_EPOCH
    after: Epoch | None = None


@value
class CheckpointRefused:
    """A standby cannot use the checkpoint that a task here has begun to send to it."""

    task: TaskId
    standby: SiteId
    joined_view: int
    offered: Epoch
    has: Epoch


@value
class ReplicaInstalled:
    """The state of another replica after `epoch` is in place here, with its retained bundles."""

    task: TaskId
    epoch: Epoch
    kept: dict[ExchangeId, dict[GroupId, list[Any]]]
    gaps: dict[ExchangeId, dict[GroupId, Gap]]
    """What the other replica no longer had."""
    whole: bool = True
    """Whether these are all of its bundles; otherwise those of later epochs than it gave before."""
    needs: Epoch = NO_EPOCH
    """The state derives from the input after this epoch, if that is known."""


SiteEvent = (
    ViewCommitted
    | PeerConnected
    | PeerLost
    | RecordArrived
    | BundleArrived
    | AckArrived
    | TaskProcessed
    | LogAsked
    | LogTold
    | CheckpointDue
    | SinkDurable
    | StoreOrdered
    | CatchUpOrdered
    | RetentionOrdered
    | HandOverBegun
    | CheckpointRefused
    | ReplicaInstalled
)

# --- the sequencer ------------------------------------------------------------------------------


@value
class BlocksAvailable:
    """An ingress has read these rows and holds them."""

    source: StageId
    split: int
    blocks: tuple[Block, ...]
    again: bool = False
    """Whether this replaces everything that was announced of the split before."""


@value
class SplitQuiet:
    """A split has no rows at `offset` or after it."""

    source: StageId
    split: int
    offset: int
    ended: bool
    """Whether it never has more rows; otherwise it has none for the time being."""


@value
class EpochDelivered:
    """A sink has taken all rows up to this epoch."""

    sink: StageId
    epoch: Epoch


@value
class DrainRequested:
    """The sequencer must take no more rows, and finish the epochs that it has cut."""


@value
class PauseRequested:
    """The sequencer must stop cutting epochs, or resume."""

    paused: bool


@value
class RecordPassed:
    """The previous replica of the sequencer in the chain has passed a record on."""

    record: EpochRecord


@value
class ChainJoined:
    """A new replica of the sequencer asks to follow this one in the chain."""

    site: SiteId
    has: Epoch
    """It has all records before this epoch; `NO_EPOCH`: it needs the state first."""


@value
class SuccessorConnected:
    """There is a new connection to a site. If it is next in the chain, it may lack records."""

    site: SiteId


@value
class SequencerCopied:
    """The previous replica in the chain has sent its state to this new one."""

    state: SequencerState


SequencerEvent = (
    ViewCommitted
    | BlocksAvailable
    | SplitQuiet
    | EpochDelivered
    | DrainRequested
    | PauseRequested
    | RecordPassed
    | ChainJoined
    | SuccessorConnected
    | SequencerCopied
)

# --- the controller -----------------------------------------------------------------------------


@value
class SiteRegistered:
    """The process of a site has started and listens at `address`, in this failure domain."""

    site: SiteId
    address: tuple[str, int]
    domain: Domain


@value
class ViewSeen:
    """A site acts on this view, and is connected to all its members."""

    site: SiteId
    term: int
    number: int


@value
class SitesFailed:
    """The processes of these sites are gone, or the sites were silent for longer than the lease.
    Sites that fail together (an executor, a host, an application) are one event."""

    sites: tuple[SiteId, ...]
    reason: str
    certain: bool = True
    """False: only silent. Such a site is removed if every partition has a replica elsewhere."""


@value
class ReplicaReported:
    """A site reports on a replica. A joining replica has its state in place (`installed`), has
    caught up with what was recorded by then (`caught_up`), could not join (`failed`), or cannot be
    rebuilt (`impossible`). Producers keep all that a task needs to be rebuilt (`retained`)."""

    site: SiteId
    task: TaskId
    number: int
    """The number of the view that the reporting site acts on."""
    phase: str
    reason: str = ""


@value
class ReplicaBehind:
    """Another site must keep more bytes for the replicas at `site` than it has room for."""

    site: SiteId
    reason: str


@value
class SitesPartitioned:
    """Sites hear nothing from each other, although they work and reach the controller."""

    couples: dict[tuple[SiteId, SiteId], tuple[int, str]]
    """For how many leases the first of each couple has heard nothing from the second, and how it
    knows."""


@value
class Call:
    """A call that a site has been in for `seconds`, in which it does nothing else."""

    stage: str
    """The name of the stage whose code runs; empty if it is no stage."""
    epoch: int
    """-1 if the call belongs to no epoch."""
    seconds: float

    def __str__(self) -> str:
        at = f", epoch {self.epoch}," if self.epoch >= 0 else ""
        where = f"in stage {self.stage!r}{at}" if self.stage else "busy with something"
        return f"{where} for {self.seconds:.0f} s"


@value
class SitesHung:
    """Sites have been in one call for so long that it may never end."""

    calls: dict[SiteId, Call]
    """The calls that have taken at least half of the limit; one has taken longer than it."""
    limit_s: float


@value
class FlowFailed:
    """The flow itself is wrong: a user's function raised, or the frames of replicas differ."""

    site: SiteId
    error: Exception


@value
class SiteFinished:
    """A site has finished its part of the last epoch, in the view with this number."""

    site: SiteId
    number: int


@value
class WaitOver:
    """The time of a `Wait` has passed."""

    timer: Timer


# --- leadership ---------------------------------------------------------------------------------


@value
class LeadDue:
    """The application must ask for the lead, or renew its lease."""


@value
class LeadGranted:
    """The arbiter has begun a term that this application leads."""

    ask: AskLead
    entry: Entry
    lease_s: float
    """No other application can lead for this time after the ask."""


@value
class LeadRefused:
    """Another application leads."""

    ask: AskLead


@value
class Renewed:
    """The arbiter has renewed the lease of this application."""

    ask: AskRenew
    lease_s: float
    """No other application can lead for this time after the ask."""


@value
class LeaseLost:
    """The lease of this application has expired."""

    ask: AskRenew | None
    """None if it has expired by this application's own clock."""
    reason: str


@value
class Resigned:
    """The arbiter has ended the lease that this application gave up."""

    ask: AskResign


@value
class EntryRead:
    """The arbiter has returned its entry."""

    ask: AskRead
    entry: Entry


@value
class TermTaken:
    """The application has begun the flow, or taken it over, in this term."""

    term: int


@value
class CommitWanted:
    """The leader has made decisions. No site acts on them before they are committed."""

    term: int
    value: bytes


@value
class EndWanted:
    """The leader has ended the flow. No site is dismissed before that is committed."""

    term: int
    value: bytes


@value
class Committed:
    """The arbiter has committed a value."""

    ask: AskCommit
    entry: Entry


@value
class EndCommitted:
    """The arbiter has committed the end of the flow."""


@value
class CommitRefused:
    """The arbiter has refused a commit: another application leads, or may lead."""

    ask: AskCommit
    reason: str


@value
class ArbiterUnreachable:
    """The arbiter has not answered. The ask may have taken effect."""

    ask: ArbiterAsk
    reason: str


@value
class LeaderFound:
    """The application is connected to the leader."""

    holder: str


@value
class LeaderMissed:
    """The connection to the leader broke."""

    search: bool = True
    """Whether to ask the arbiter immediately which application leads."""


@value
class LeaderGone:
    """No process listens at the address of the leader that the entry names."""

    entry: Entry


@value
class FlowEnded:
    """The flow has ended, as the leader or the arbiter says."""


LeadershipEvent = (
    LeadDue
    | LeadGranted
    | LeadRefused
    | Renewed
    | LeaseLost
    | Resigned
    | EntryRead
    | TermTaken
    | CommitWanted
    | EndWanted
    | Committed
    | CommitRefused
    | ArbiterUnreachable
    | LeaderFound
    | LeaderMissed
    | LeaderGone
    | FlowEnded
)

# --- the checkpoints of a running flow ----------------------------------------------------------


@value
class StoreDue:
    """It is time for another checkpoint. Its epoch should be one that no task has reached when it
    gets the order, probably the one that is `ahead` of the last record."""

    view: View
    ahead: int


@value
class TaskStored:
    """A site has stored a task as it was after `epoch`; `what` says where."""

    task: TaskId
    epoch: Epoch
    what: Any


@value
class StoreFailed:
    """A site could not store a task."""

    epoch: Epoch
    reason: str
    missed: bool
    """Whether the task was past the epoch already."""


@value
class ManifestWritten:
    """The manifest of a checkpoint is written, so that it counts."""

    epoch: Epoch
    error: str
    """Why the manifest could not be written; empty if it could."""


StoreEvent = (
    RecordArrived | ViewCommitted | PeerLost | StoreDue | TaskStored | StoreFailed | ManifestWritten
)


@value
class StoreUnderWay:
    """A checkpoint of the flow is being stored, or no longer."""

    under_way: bool


ControllerEvent = (
    SiteRegistered
    | ViewSeen
    | SitesFailed
    | ReplicaReported
    | ReplicaBehind
    | SitesPartitioned
    | SitesHung
    | FlowFailed
    | SiteFinished
    | WaitOver
    | StoreUnderWay
    | Request
)
