"""Facts that reach a machine. The word before each class says whose they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.core.ids import Epoch, ExchangeId, SiteId, StageId
from holdfast.core.layout import Domain
from holdfast.core.records import Block, EpochRecord

# --- of a site's dataflow -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RecordArrived:
    """The sequencer has fixed an epoch."""

    record: EpochRecord


@dataclass(frozen=True, slots=True)
class BundleArrived:
    """The frames that one site sends to this one in one epoch of an exchange, or a part of them."""

    exchange: ExchangeId
    epoch: Epoch
    producer: SiteId
    last: bool
    """With ordered merging always; with arrival merging on the epoch's last part."""
    bundle: Any


@dataclass(frozen=True, slots=True)
class AckArrived:
    """A consumer has received, will never ask again for, and has room up to these epochs."""

    exchange: ExchangeId
    consumer: SiteId
    received: Epoch
    stable: Epoch
    credit: Epoch


@dataclass(frozen=True, slots=True)
class StageProcessed:
    """An order to ingest or process was carried out; its output, by exchange and site."""

    stage: StageId
    epoch: Epoch
    last: bool
    outputs: dict[ExchangeId, dict[SiteId, Any]]


SiteEvent = RecordArrived | BundleArrived | AckArrived | StageProcessed

# --- of the sequencer ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class BlocksAvailable:
    """An ingress has read these rows and keeps them."""

    source: StageId
    split: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, slots=True)
class SplitIdle:
    """A split has had no rows for a while."""

    source: StageId
    split: int


@dataclass(frozen=True, slots=True)
class SplitEnded:
    """A split will have no more rows."""

    source: StageId
    split: int


@dataclass(frozen=True, slots=True)
class EpochDelivered:
    """A sink has taken all rows up to and including this epoch."""

    sink: StageId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class DrainRequested:
    """Take no more rows; finish what has been taken."""


SequencerEvent = BlocksAvailable | SplitIdle | SplitEnded | EpochDelivered | DrainRequested

# --- of the controller --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SiteRegistered:
    """A site's process has started, listens at `address`, and is where `domain` says."""

    site: SiteId
    attempt: int
    address: tuple[str, int]
    domain: Domain


@dataclass(frozen=True, slots=True)
class SiteConnected:
    """A site has its connections to all others."""

    site: SiteId


@dataclass(frozen=True, slots=True)
class SiteFailed:
    """A site's process is gone, or it said that it cannot go on."""

    site: SiteId
    attempt: int
    reason: str


@dataclass(frozen=True, slots=True)
class FlowFailed:
    """Something is wrong with the flow itself: a user's function raised, frames diverge."""

    site: SiteId
    error: Exception


@dataclass(frozen=True, slots=True)
class SiteFinished:
    """A site has seen the last epoch through."""

    site: SiteId


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The user wants the flow to end: after what was taken is delivered, or at once."""

    drain: bool


ControllerEvent = (
    SiteRegistered | SiteConnected | SiteFailed | FlowFailed | SiteFinished | StopRequested
)
