"""Orders that a machine gives to whoever runs it."""

from __future__ import annotations

from typing import Any

from holdfast.core.ids import Entry, Epoch, ExchangeId, GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import View
from holdfast.core.records import EpochRecord
from holdfast.core.timers import Timer
from holdfast.core.upstream import Gap, Line, Log
from holdfast.core.values import value

# --- of a site's dataflow -----------------------------------------------------------------------


@value
class OpenTask:
    """Make the task's operator, source readers or sink writer, with empty state."""

    task: TaskId
    view: View


@value
class BeginTask:
    """The task is rebuilt: it begins with empty state, whatever another replica may have begun to
    hand over to it; or with what the flow begins with."""

    task: TaskId
    at_start: bool


@value
class CloseTask:
    """This site no longer holds the task: forget its state."""

    task: TaskId


@value
class IngestEpochs:
    """Make the source's frames of these epochs from the rows in hand; answer `TaskProcessed`. There
    are several if it is behind."""

    task: TaskId
    records: tuple[EpochRecord, ...]

    @property
    def epoch(self) -> Epoch:
        """The last of them."""
        return self.records[-1].epoch

    @property
    def first(self) -> Epoch:
        return self.records[0].epoch


@value
class FollowEpoch:
    """Be after an epoch of a source without having read it: all who need its rows have them."""

    task: TaskId
    record: EpochRecord


@value
class ProcessBundles:
    """Run the stage over these bundles (by exchange); answer `TaskProcessed`."""

    task: TaskId
    epoch: Epoch
    last: bool
    bundles: dict[ExchangeId, list[Any]]
    earlier: tuple[dict[ExchangeId, list[Any]], ...] = ()
    """Those of the epochs right before it, if the task is behind."""

    @property
    def first(self) -> Epoch:
        return Epoch(self.epoch - len(self.earlier))

    @property
    def epochs(self) -> tuple[dict[ExchangeId, list[Any]], ...]:
        """The bundles of each."""
        return (*self.earlier, self.bundles)

    def frames(self) -> list[Any]:
        """All bundles, in the order of their epochs, exchanges and producers."""
        return [b for epoch in self.epochs for bundles in epoch.values() for b in bundles]


@value
class SendBundle:
    site: SiteId
    exchange: ExchangeId
    epoch: Epoch
    producer: GroupId
    consumer: GroupId
    joined_view: int
    last: bool
    bundle: Any
    part: int = 0


@value
class SendAck:
    """To the replica of `producer` at `site`; the rest as in `AckArrived`."""

    site: SiteId
    exchange: ExchangeId
    producer: GroupId
    consumer: GroupId
    joined_view: int
    received: Epoch
    credit: Epoch
    take: bool
    finished: Epoch
    checksum: int
    levels: tuple[Epoch, ...] = ()
    lines: tuple[Line, ...] = ()


@value
class AskLog:
    """Ask the replica of `producer` at `site` from where on it has what this consumer needs."""

    site: SiteId
    exchange: ExchangeId
    producer: GroupId
    consumer: GroupId
    joined_view: int


@value
class TellLog:
    """To the replica of `consumer` at `site`; the rest as in `LogTold`."""

    site: SiteId
    exchange: ExchangeId
    producer: GroupId
    consumer: GroupId
    joined_view: int
    log: Log


@value
class AskRecords:
    """Ask the last sequencer of the chain for the records after this epoch; None: for the latest,
    and no other."""

    after: Epoch | None


@value
class HandOver:
    """Freeze the task's state, which is that after `epoch`, and send it with these bundles to
    `joiner`, a little at a time; the task goes on meanwhile."""

    task: TaskId
    joiner: SiteId
    epoch: Epoch
    kept: dict[ExchangeId, dict[GroupId, list[Any]]]
    gaps: dict[ExchangeId, dict[GroupId, Gap]]
    """What is not kept any more."""
    after: Epoch | None = None
    """Only what has changed after this epoch; the rest is there already."""
    joined_view: int = 0
    """Of the replica at `joiner` that it is for."""


@value
class StoreState:
    """Freeze the task's state, which is that after `epoch`, and store it, a little at a time; with
    `after`, what has changed after that epoch. The task goes on meanwhile."""

    task: TaskId
    epoch: Epoch
    after: Epoch | None = None


@value
class ReportMissed:
    """Tell the controller that the task was past the epoch when it heard that it is to be stored
    after it."""

    task: TaskId
    epoch: Epoch


@value
class ReceiveState:
    """Put in what `sender` hands over: into the task, emptied before, or as a checkpoint that
    replaces the task's state when it is complete. Answer `ReplicaInstalled`. Whatever came in
    before is void."""

    task: TaskId
    sender: SiteId
    offer: Any
    checkpoint: bool


@value
class DiscardState:
    """The rest of what was being handed over to the task will not come, or is not wanted."""

    task: TaskId


@value
class ReportJoinFailed:
    """Tell the controller that the task could not be handed over to `joiner`, and why."""

    task: TaskId
    joiner: SiteId
    reason: str


@value
class AbandonHandOver:
    """The replica at `joiner` is not wanted any more."""

    task: TaskId
    joiner: SiteId


@value
class ReportDelivered:
    """Tell the sequencer that this sink has taken everything up to `epoch`."""

    sink: StageId
    epoch: Epoch


@value
class ReportReplica:
    """Tell the controller how far the replica of a task is: see `ReplicaReported`."""

    task: TaskId
    phase: str
    reason: str = ""


@value
class ReportFinished:
    """Tell the controller that this site has seen the last epoch through."""


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
    | ReceiveState
    | DiscardState
    | ReportJoinFailed
    | ReportDelivered
    | ReportReplica
    | ReportFinished
)

# --- of the sequencer ---------------------------------------------------------------------------


@value
class PublishRecord:
    """Send the record to every site: all replicas of the sequencer have it."""

    record: EpochRecord


@value
class PassRecord:
    """Send the record to the next replica in the chain, which will pass it on or publish it."""

    site: SiteId
    record: EpochRecord


@value
class CopySequencer:
    """Give the new replica at `site` this state."""

    site: SiteId
    state: dict[str, Any]


@value
class ConfirmChain:
    """Tell the replica at `site` that it is the next in the chain."""

    site: SiteId


SequencerEffect = PublishRecord | PassRecord | CopySequencer | ConfirmChain

# --- of the controller --------------------------------------------------------------------------


@value
class CommitView:
    """Commit the view in the arbiter, then give it to all its members, with their addresses."""

    view: View
    addresses: dict[SiteId, tuple[str, int]]


@value
class StartFlow:
    """Every site is connected: sources may be read."""


@value
class OrderCatchUp:
    """Tell `donor` that it may hand the task over to `joiner`."""

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
    """Ask the sequencer at `site` to take no more rows."""

    site: SiteId


@value
class PauseFlow:
    """Tell the sequencer at `site` to stand still, or to go on."""

    site: SiteId
    paused: bool


@value
class LaunchSite:
    """Have the host start a site's process, after this many milliseconds."""

    site: SiteId
    after_ms: int


@value
class FenceSite:
    """Have nothing to do with this site any more; if it still runs it must leave."""

    site: SiteId


@value
class Wait:
    """Answer `WaitOver(timer)` after so many milliseconds."""

    timer: Timer
    ms: int


@value
class EndFlow:
    """Dismiss all sites. `error` is None when everything was delivered or the user stopped it."""

    error: Exception | None


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

# --- of leadership ------------------------------------------------------------------------------


@value
class AskLead:
    """Ask the arbiter for the lead; `despite` is the entry of a leader that is known to be dead.
    Answer `LeadGranted` or `LeadRefused`; or, like to every ask, `ArbiterUnreachable`."""

    number: int
    despite: Entry | None


@value
class AskRenew:
    """Ask it for more of the lease. Answer `Renewed` or `LeaseLost`."""

    number: int
    entry: Entry


@value
class AskRead:
    """Ask it who leads. Answer `EntryRead`."""

    number: int


@value
class AskResign:
    """Give the lease of the entry's term up. Answer `Resigned`."""

    number: int
    entry: Entry


@value
class AskCommit:
    """Have it put `value` after `entry`; `ends`: the flow is over with it. Answer `Committed` or
    `CommitRefused`."""

    number: int
    entry: Entry
    value: bytes
    ends: bool


ArbiterAsk = AskLead | AskRenew | AskRead | AskResign | AskCommit


@value
class BeginTerm:
    """This application leads, if it can take over what the entry says: answer `TermTaken`."""

    entry: Entry


@value
class EndTerm:
    """It does not lead any more: forget everything that belongs to the term."""

    term: int
    reason: str


@value
class CommitDone:
    """What was wanted first is committed, and may be acted on."""


@value
class FollowEntry:
    """Find the leader that the entry names: `LeaderFound`, `LeaderMissed` or `LeaderGone`."""

    entry: Entry


@value
class LeadershipOver:
    """The flow has ended."""


LeadershipEffect = ArbiterAsk | BeginTerm | EndTerm | CommitDone | FollowEntry | LeadershipOver

# --- of the checkpoints of a flow that runs -----------------------------------------------------


@value
class OrderStore:
    """Tell all sites: see `StoreOrdered`."""

    epoch: Epoch
    after: Epoch | None


@value
class WriteManifest:
    """All tasks are stored after `epoch`: see to it that this is known. Answer
    `ManifestWritten`."""

    epoch: Epoch
    stored: dict[TaskId, Any]


StoreEffect = OrderStore | WriteManifest
