"""Effects of the machines: orders to the caller. The line before each group names the machine.

The answer to any ask of the arbiter may also be `ArbiterUnreachable`.
"""

from __future__ import annotations

from typing import Any

from holdfast.core.ids import Entry, Epoch, ExchangeId, GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import View
from holdfast.core.messages import Ack, BundleKey, LogQuery, SequencerState
from holdfast.core.records import EpochRecord
from holdfast.core.timers import Timer
from holdfast.core.upstream import Gap, Log
from holdfast.core.values import value

# --- a site's dataflow --------------------------------------------------------------------------


@value
class OpenTask:
    """Create the task's operator, source readers or sink writer, with empty state."""

    task: TaskId
    view: View


@value
class BeginTask:
    """Rebuild the task: begin with empty state, and drop state that was being handed over to it."""

    task: TaskId
    at_start: bool
    """Whether it begins with what the flow begins with."""


@value
class CloseTask:
    """Drop the task and its state: this site no longer holds it."""

    task: TaskId


@value
class IngestEpochs:
    """Make the source's frames of these epochs from the rows held. Answer `TaskProcessed`."""

    task: TaskId
    records: tuple[EpochRecord, ...]
    """Of several epochs if the source is behind."""

    @property
    def epoch(self) -> Epoch:
        """The last epoch."""
        return self.records[-1].epoch

    @property
    def first(self) -> Epoch:
        return self.records[0].epoch


@value
class FollowEpoch:
    """Skip an epoch of a source without reading it: no consumer needs its rows any more."""

    task: TaskId
    record: EpochRecord


@value
class ProcessBundles:
    """Run the stage over these bundles, by exchange. Answer `TaskProcessed`."""

    task: TaskId
    epoch: Epoch
    last: bool
    bundles: dict[ExchangeId, list[Any]]
    earlier: tuple[dict[ExchangeId, list[Any]], ...] = ()
    """The bundles of the epochs right before it, if the task is behind."""

    @property
    def first(self) -> Epoch:
        return Epoch(self.epoch - len(self.earlier))

    @property
    def epochs(self) -> tuple[dict[ExchangeId, list[Any]], ...]:
        """The bundles of each epoch."""
        return (*self.earlier, self.bundles)

    def frames(self) -> list[Any]:
        """All bundles, in the order of their epochs, exchanges and producers."""
        return [b for epoch in self.epochs for bundles in epoch.values() for b in bundles]


@value
class SendBundle:
    """Send a bundle to the replica of its consumer at `site`."""

    site: SiteId
    key: BundleKey
    bundle: Any


@value
class SendAck:
    """Send an acknowledgement to the replica of its producer at `site`."""

    site: SiteId
    ack: Ack


@value
class AskLog:
    """Ask the replica of a producer at `site` for its log: a consumer here is being rebuilt."""

    site: SiteId
    query: LogQuery


@value
class TellLog:
    """Send the log of a producer to the replica of its consumer at `site`."""

    site: SiteId
    query: LogQuery
    log: Log


@value
class AskRecords:
    """Ask the last sequencer of the chain for records."""

    after: Epoch | None
    """All records after this epoch; None: only the latest."""


@value
class HandOver:
    """Freeze the task's state after `epoch`, and send it in parts while the task continues."""

    task: TaskId
    joiner: SiteId
    epoch: Epoch
    kept: dict[ExchangeId, dict[GroupId, list[Any]]]
    gaps: dict[ExchangeId, dict[GroupId, Gap]]
    """What this replica no longer keeps."""
    after: Epoch | None = None
    """Only what has changed after this epoch; the receiver has the rest."""
    joined_view: int = 0
    """The view in which the replica at `joiner` joined."""


@value
class StoreState:
    """Freeze the task's state after `epoch`, and store it in parts while the task continues."""

    task: TaskId
    epoch: Epoch
    after: Epoch | None = None
    """Only what has changed after this epoch."""


@value
class ReportMissed:
    """Report to the controller that the task was past the epoch that it must be stored after."""

    task: TaskId
    epoch: Epoch


@value
class ReceiveState:
    """Install the state that `sender` hands over, and drop what came in before. Answer
    `ReplicaInstalled`."""

    task: TaskId
    sender: SiteId
    offer: Any
    checkpoint: bool
    """Whether it is a checkpoint, which replaces the state of the task when it is complete;
    otherwise the task is emptied first."""


@value
class DiscardState:
    """Drop what was handed over to the task: the rest will not come, or is not wanted."""

    task: TaskId


@value
class ReportJoinFailed:
    """Report to the controller that the hand-over to `joiner` failed, and why."""

    task: TaskId
    joiner: SiteId
    reason: str


@value
class AbandonHandOver:
    """Stop a hand-over: the view no longer has the replica at `joiner`, or its connection broke."""

    task: TaskId
    joiner: SiteId


@value
class RefuseCheckpoint:
    """Tell the site that has begun to send a checkpoint that the standby here cannot use it."""

    task: TaskId
    sender: SiteId
    joined_view: int
    offered: Epoch
    """The epoch of that checkpoint."""
    has: Epoch
    """The epoch of the one that is here."""


@value
class ReportDelivered:
    """Report to the sequencer that this sink has taken everything up to `epoch`."""

    sink: StageId
    epoch: Epoch


@value
class ReportReplica:
    """Report to the controller how far a replica is: see `ReplicaReported`."""

    task: TaskId
    phase: str
    reason: str = ""


@value
class ReportFinished:
    """Report to the controller that this site has finished its part of the last epoch."""


SiteEffect = (
    OpenTask
    | BeginTask
    | CloseTask
    | IngestEpochs
    | FollowEpoch
    | ProcessBundles
    | SendBundle
    | SendAck
    | AskLog
    | TellLog
    | AskRecords
    | HandOver
    | StoreState
    | ReportMissed
    | AbandonHandOver
    | RefuseCheckpoint
    | ReceiveState
    | DiscardState
    | ReportJoinFailed
    | ReportDelivered
    | ReportReplica
    | ReportFinished
)

# --- the sequencer ------------------------------------------------------------------------------


@value
class PublishRecord:
    """Send the record to every site: all replicas of the sequencer have it."""

    record: EpochRecord


@value
class PassRecord:
    """Send the record to the next replica in the chain, which passes it on or publishes it."""

    site: SiteId
    record: EpochRecord


@value
class CopySequencer:
    """Send this state to the new replica of the sequencer at `site`."""

    site: SiteId
    state: SequencerState


@value
class ConfirmChain:
    """Tell the replica at `site` that it is the next in the chain."""

    site: SiteId


SequencerEffect = PublishRecord | PassRecord | CopySequencer | ConfirmChain

# --- the controller -----------------------------------------------------------------------------


@value
class CommitView:
    """Commit the view in the arbiter, then send it to its members, with their addresses."""

    view: View
    addresses: dict[SiteId, tuple[str, int]]


@value
class StartFlow:
    """Start the flow: all sites are connected, and sources may be read."""


@value
class OrderCatchUp:
    """Order `donor` to hand the task over to `joiner`."""

    donor: SiteId
    task: TaskId
    joiner: SiteId


@value
class OrderRetention:
    """Tell `site` that all members act on the view with this number: see `RetentionOrdered`."""

    site: SiteId
    number: int


@value
class DrainFlow:
    """Order the sequencer at `site` to take no more rows."""

    site: SiteId


@value
class PauseFlow:
    """Order the sequencer at `site` to stop cutting epochs, or to resume."""

    site: SiteId
    paused: bool


@value
class LaunchSite:
    """Have the host start the process of a site, after this many milliseconds."""

    site: SiteId
    after_ms: int


@value
class FenceSite:
    """Order this site to leave, if it still runs, and accept nothing more from it."""

    site: SiteId


@value
class Wait:
    """Answer `WaitOver(timer)` after this many milliseconds."""

    timer: Timer
    ms: int


@value
class EndFlow:
    """Dismiss all sites."""

    error: Exception | None
    """None if everything was delivered, or the user stopped the flow."""


ControllerEffect = (
    CommitView
    | StartFlow
    | OrderCatchUp
    | OrderRetention
    | DrainFlow
    | PauseFlow
    | LaunchSite
    | FenceSite
    | Wait
    | EndFlow
)

# --- leadership ---------------------------------------------------------------------------------


@value
class AskLead:
    """Ask the arbiter for the lead. Answer `LeadGranted` or `LeadRefused`."""

    number: int
    despite: Entry | None
    """The entry of a leader that is known to be dead."""


@value
class AskRenew:
    """Ask the arbiter to renew the lease. Answer `Renewed` or `LeaseLost`."""

    number: int
    entry: Entry


@value
class AskRead:
    """Ask the arbiter for its entry, which names the leader. Answer `EntryRead`."""

    number: int


@value
class AskResign:
    """Give up the lease of the entry's term. Answer `Resigned`."""

    number: int
    entry: Entry


@value
class AskCommit:
    """Ask the arbiter to replace `entry` by `value`. Answer `Committed` or `CommitRefused`."""

    number: int
    entry: Entry
    value: bytes
    ends: bool
    """Whether the flow is over with it."""


ArbiterAsk = AskLead | AskRenew | AskRead | AskResign | AskCommit


@value
class BeginTerm:
    """Begin a term: begin the flow or take it over, as the entry says. Answer `TermTaken`."""

    entry: Entry


@value
class EndTerm:
    """End the term: this application no longer leads. Drop everything that belongs to the term."""

    term: int
    reason: str


@value
class CommitDone:
    """Execute the decisions of the first commit that was wanted: it is done."""


@value
class FollowEntry:
    """Find the leader that the entry names: `LeaderFound`, `LeaderMissed` or `LeaderGone`."""

    entry: Entry


@value
class LeadershipOver:
    """End this application's part: the flow has ended."""


LeadershipEffect = ArbiterAsk | BeginTerm | EndTerm | CommitDone | FollowEntry | LeadershipOver

# --- the checkpoints of a running flow ----------------------------------------------------------


@value
class OrderStore:
    """Send the order `StoreOrdered` to all sites."""

    epoch: Epoch
    after: Epoch | None


@value
class WriteManifest:
    """Write the manifest: all tasks are stored after `epoch`. Answer `ManifestWritten`."""

    epoch: Epoch
    stored: dict[TaskId, Any]


StoreEffect = OrderStore | WriteManifest
