"""Facts that reach a machine. The line before each group says whose they are."""

from __future__ import annotations

from enum import Enum
from typing import Any

from holdfast.core.effects import ArbiterAsk, AskCommit, AskLead, AskRead, AskRenew, AskResign
from holdfast.core.ids import NO_EPOCH, Entry, Epoch, ExchangeId, GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import Domain, View
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import Block, EpochRecord
from holdfast.core.timers import Timer
from holdfast.core.upstream import Gap, Line, Log
from holdfast.core.values import value

# --- of a site's dataflow, and of its replica of the sequencer ------------------------------------


@value
class ViewCommitted:
    """The controller has committed a view; the sites act on it from now on."""

    view: View


# --- of a site's dataflow -----------------------------------------------------------------------


@value
class PeerConnected:
    """There is a connection to this site, on which nothing has been sent yet."""

    site: SiteId


@value
class PeerLost:
    """The connection to this site broke. That is not to say that the site is dead."""

    site: SiteId


@value
class RecordArrived:
    """The sequencer has fixed an epoch."""

    record: EpochRecord


@value
class BundleArrived:
    """The frames that one partition group sends to another in one epoch of an exchange, or a part
    of them.

    With ordered merging `last` is always set, with arrival merging on the epoch's last part.
    """

    exchange: ExchangeId
    epoch: Epoch
    producer: GroupId
    consumer: GroupId
    joined_view: int
    """For the replica of the consumer that began in this view, and not one before it at this
    site."""
    last: bool
    bundle: Any
    part: int = 0


@value
class AckArrived:
    """What a replica of a consumer partition group, at `site`, says to a replica of a producer
    partition group."""

    exchange: ExchangeId
    producer: GroupId
    consumer: GroupId
    site: SiteId
    joined_view: int
    received: Epoch
    """It has everything up to this epoch."""
    credit: Epoch
    """It has room up to this epoch."""
    take: bool
    """Whether it takes its frames from this replica; from the others it only wants them kept."""
    finished: Epoch
    checksum: int
    """The last epoch it has processed, and the checksum of that epoch's bundle."""
    levels: tuple[Epoch, ...] = ()
    """Up to which epochs it does not need its input any more, if tasks are rebuilt from it."""
    lines: tuple[Line, ...] = ()
    """What goes with each of them, if any: see `holdfast.core.upstream`."""


@value
class TaskProcessed:
    """An order to ingest or process was carried out; its output, by exchange and consumer."""

    task: TaskId
    epoch: Epoch
    last: bool
    outputs: dict[ExchangeId, dict[GroupId, Any]]
    needs: Epoch = NO_EPOCH
    """The state after this epoch comes from the input after the epoch `needs`."""
    earlier: tuple[dict[ExchangeId, dict[GroupId, Any]], ...] = ()
    """The output of the epochs right before this one, if the order was for several."""
    seconds: float = 0.0
    """How long that took."""


@value
class LogAsked:
    """The replica of a consumer at `site` is to be rebuilt, and wants to know from where on."""

    exchange: ExchangeId
    producer: GroupId
    consumer: GroupId
    site: SiteId
    joined_view: int


@value
class LogTold:
    """What the replica of a producer at `site` has for a consumer that is to be rebuilt."""

    exchange: ExchangeId
    producer: GroupId
    consumer: GroupId
    site: SiteId
    joined_view: int
    log: Log


@value
class CheckpointDue:
    """It is time to give a task's state to standbys."""

    task: TaskId


@value
class SinkDurable:
    """The sink's first replica has written all rows up to this epoch for good."""

    task: TaskId
    epoch: Epoch


@value
class StoreOrdered:
    """Tasks that are led here are to be stored as they are after `epoch`: what has changed after
    the epoch `after`, if that is when they were stored last, and all of it otherwise."""

    epoch: Epoch
    after: Epoch | None


@value
class CatchUpOrdered:
    """Every member counts the joining replica: the donor may hand over to it."""

    task: TaskId
    joiner: SiteId


@value
class RetentionOrdered:
    """Every member of the view with this number keeps what it shall keep: say of each task that
    will be rebuilt from it when nothing older is needed any more."""

    number: int


@value
class HandOverBegun:
    """The site `sender` begins to hand a task over to the replica that joined in this view; `offer`
    is what it says of it."""

    task: TaskId
    sender: SiteId
    offer: Any
    joined_view: int = 0


@value
class ReplicaInstalled:
    """The state that another replica had after `epoch` is in place here, and these are the bundles
    that it still kept: all of them, or those of later epochs than it had given before."""

    task: TaskId
    epoch: Epoch
    kept: dict[ExchangeId, dict[GroupId, list[Any]]]
    gaps: dict[ExchangeId, dict[GroupId, Gap]]
    """What it did not have any more."""
    whole: bool = True
    """These are all, and not only those since the last time."""
    needs: Epoch = NO_EPOCH
    """After which epoch the input came that the state comes from, if that is known."""


class Stale(Enum):
    """Why a site's dataflow discarded an event."""

    VIEW = "the view is not the one that is acted on, or not a later one"
    NOT_HELD = "the task is not held here"
    OTHER_INCARNATION = "it is for, or from, a replica that was there before"
    REPEATED = "it came before"
    NO_STATE = "the replica has no state that it could hand over"
    NOT_COMPUTING = "the replica does not compute"
    NOT_JOINING = "the joiner was given up meanwhile"
    HANDED_OVER = "the state has gone to that joiner"
    NOT_AWAITED = "the replica waits for no hand-over"
    NOT_SEARCHING = "the replica is not being rebuilt"
    NOT_FOLLOWING = "the replica knows by itself what is durable"


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
    | ReplicaInstalled
)

# --- of the sequencer ---------------------------------------------------------------------------


@value
class BlocksAvailable:
    """An ingress has read these rows and keeps them; `again`: what was announced before is void."""

    source: StageId
    split: int
    blocks: tuple[Block, ...]
    again: bool = False


@value
class SplitIdle:
    """A split has had no rows for a while, after those before `offset`."""

    source: StageId
    split: int
    offset: int


@value
class SplitEnded:
    """A split has no rows but those before `offset`."""

    source: StageId
    split: int
    offset: int


@value
class EpochDelivered:
    """A sink has taken all rows up to and including this epoch."""

    sink: StageId
    epoch: Epoch


@value
class DrainRequested:
    """Take no more rows; finish what has been taken."""


@value
class PauseRequested:
    """Cut no epochs for the time being, or do again."""

    paused: bool


@value
class RecordPassed:
    """The replica of the sequencer before this one in the chain has the record."""

    record: EpochRecord


@value
class ChainJoined:
    """A new replica of the sequencer asks to be the next in the chain after this one. It has all
    records before epoch `has`; with `NO_EPOCH` it needs the state first."""

    site: SiteId
    has: Epoch


@value
class SuccessorConnected:
    """There is a new connection to this site; if it is next in the chain, records may be lost."""

    site: SiteId


@value
class SequencerCopied:
    """The state of the replica that this new one follows in the chain."""

    state: dict[str, Any]


SequencerEvent = (
    ViewCommitted
    | BlocksAvailable
    | SplitIdle
    | SplitEnded
    | EpochDelivered
    | DrainRequested
    | PauseRequested
    | RecordPassed
    | ChainJoined
    | SuccessorConnected
    | SequencerCopied
)

# --- of the controller --------------------------------------------------------------------------


@value
class SiteRegistered:
    """A site's process has started, listens at `address`, and is where `domain` says."""

    site: SiteId
    address: tuple[str, int]
    domain: Domain


@value
class ViewSeen:
    """A site acts on this view, and has connections to all its members."""

    site: SiteId
    term: int
    number: int


@value
class SitesFailed:
    """These sites' processes are gone, or they were silent for longer than the lease. Sites that
    fail together (an executor, a host, an application) are one event."""

    sites: tuple[SiteId, ...]
    reason: str
    certain: bool = True
    """False: silent only. Such a site is let go if every partition has a replica elsewhere."""


@value
class ReplicaReported:
    """A joining site has a task's state in place (`installed`), has caught up with what had been
    recorded by then (`caught_up`), or could not (`failed`). Or of a task that is to be rebuilt
    if it is lost, all is kept that this takes (`retained`)."""

    site: SiteId
    task: TaskId
    number: int
    """The view that whoever says so acts on."""
    phase: str
    reason: str = ""


@value
class ReplicaBehind:
    """Another site must keep more for the replicas at `site` than it has room for."""

    site: SiteId
    reason: str


@value
class SitesPartitioned:
    """The first of each couple has heard nothing of the second for so many leases, though both
    are at work and reach the controller; and how things stand, in words."""

    couples: dict[tuple[SiteId, SiteId], tuple[int, str]]


@value
class Call:
    """What a site is at that has not got to anything else for `seconds`. `stage` is the name of the
    stage whose code it runs, "" if it is none; `epoch` is -1 if it is at none."""

    stage: str
    epoch: int
    seconds: float

    def __str__(self) -> str:
        at = f", epoch {self.epoch}," if self.epoch >= 0 else ""
        where = f"in stage {self.stage!r}{at}" if self.stage else "busy with something"
        return f"{where} for {self.seconds:.0f} s"


@value
class SitesHung:
    """Sites that have been in one call for so long that it may never end: longer than `limit_s`, or
    at least half as long."""

    calls: dict[SiteId, Call]
    limit_s: float


@value
class FlowFailed:
    """Something is wrong with the flow itself: a user's function raised, frames diverge."""

    site: SiteId
    error: Exception


@value
class SiteFinished:
    """A site has seen the last epoch through, as far as it is its own in the view `number`."""

    site: SiteId
    number: int


@value
class WaitOver:
    """The time asked for with `Wait` has passed."""

    timer: Timer


@value
class ProtectionWanted:
    """The user wants stages to be protected so."""

    guards: tuple[ProtectionSpec, ...]
    """By stage."""


@value
class StopRequested:
    """The user wants the flow to end: after what was taken is delivered, or at once."""

    drain: bool


# --- of leadership ------------------------------------------------------------------------------


@value
class LeadDue:
    """It is time to ask for the lead, or for more of it."""


@value
class LeadGranted:
    """The arbiter has begun a term with this application as its leader. Nobody else can lead for
    `lease_s` from when it was asked."""

    ask: AskLead
    entry: Entry
    lease_s: float


@value
class LeadRefused:
    """Another application leads."""

    ask: AskLead


@value
class Renewed:
    """Nobody else can lead for `lease_s` from when it was asked."""

    ask: AskRenew
    lease_s: float


@value
class LeaseLost:
    """The lease has run out; without an `ask`: by this application's own clock."""

    ask: AskRenew | None
    reason: str


@value
class Resigned:
    """The lease is given up."""

    ask: AskResign


@value
class EntryRead:
    """What the arbiter has."""

    ask: AskRead
    entry: Entry


@value
class TermTaken:
    """The flow is taken over in this term, or begun."""

    term: int


@value
class CommitWanted:
    """What the leader knows has changed, and nobody may act on it before it is committed."""

    term: int
    value: bytes


@value
class EndWanted:
    """The leader has ended the flow. Nobody is told before that is committed."""

    term: int
    value: bytes


@value
class Committed:
    """The arbiter has taken it."""

    ask: AskCommit
    entry: Entry


@value
class EndCommitted:
    """The same, of the end."""


@value
class CommitRefused:
    """Another one leads, or may."""

    ask: AskCommit
    reason: str


@value
class ArbiterUnreachable:
    """There is no answer. Whether the ask took effect is not known."""

    ask: ArbiterAsk
    reason: str


@value
class LeaderFound:
    """There is a connection to the leader."""

    holder: str


@value
class LeaderMissed:
    """There is none any more."""


@value
class LeaderGone:
    """Nobody listens where the leader of this entry did."""

    entry: Entry


@value
class FlowEnded:
    """The leader says so, or the arbiter."""


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

# --- of the checkpoints of a flow that runs -----------------------------------------------------


@value
class StoreDue:
    """It is time for another checkpoint, of an epoch that no task has come to before it hears of
    it: probably the one that is `ahead` of the last record."""

    view: View
    ahead: int


@value
class TaskStored:
    """A task is stored as it was after `epoch`; `what` says where."""

    task: TaskId
    epoch: Epoch
    what: Any


@value
class StoreFailed:
    """A task could not be stored; `missed`: it was past the epoch already."""

    epoch: Epoch
    reason: str
    missed: bool


@value
class ManifestWritten:
    """The checkpoint counts; with an error it could not be written."""

    epoch: Epoch
    error: str


StoreEvent = (
    RecordArrived | ViewCommitted | PeerLost | StoreDue | TaskStored | StoreFailed | ManifestWritten
)

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
    | StopRequested
    | ProtectionWanted
)
