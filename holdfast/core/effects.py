"""Orders that a machine gives to whoever runs it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from holdfast.core.ids import Epoch, ExchangeId, SiteId, StageId
from holdfast.core.layout import Layout
from holdfast.core.records import EpochRecord

# --- of a site's dataflow -----------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class IngestEpoch:
    """Make the source's frames of this epoch from the rows in hand; answer `StageProcessed`."""

    stage: StageId
    record: EpochRecord


@dataclass(frozen=True, slots=True)
class ProcessBundles:
    """Run the stage over these bundles (by exchange); answer `StageProcessed`."""

    stage: StageId
    epoch: Epoch
    last: bool
    bundles: dict[ExchangeId, list[Any]]


@dataclass(frozen=True, slots=True)
class SendBundle:
    exchange: ExchangeId
    epoch: Epoch
    consumer: SiteId
    last: bool
    bundle: Any


@dataclass(frozen=True, slots=True)
class SendAck:
    exchange: ExchangeId
    producer: SiteId
    received: Epoch
    stable: Epoch
    credit: Epoch


@dataclass(frozen=True, slots=True)
class ReportDelivered:
    """Tell the sequencer that this sink has taken everything up to `epoch`."""

    sink: StageId
    epoch: Epoch


@dataclass(frozen=True, slots=True)
class ReportFinished:
    """Tell the controller that this site has seen the last epoch through."""


SiteEffect = IngestEpoch | ProcessBundles | SendBundle | SendAck | ReportDelivered | ReportFinished

# --- of the sequencer ---------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PublishRecord:
    """Send the record to every site."""

    record: EpochRecord


# --- of the controller --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class AssignSites:
    """Give all sites the layout and each other's addresses."""

    layout: Layout
    addresses: dict[SiteId, tuple[str, int]]


@dataclass(frozen=True, slots=True)
class StartFlow:
    """Every site is connected: sources may be read."""


@dataclass(frozen=True, slots=True)
class DrainFlow:
    """Ask the sequencer to take no more rows."""


@dataclass(frozen=True, slots=True)
class RelaunchSite:
    """Have the host start the site's process again, after this many milliseconds."""

    site: SiteId
    attempt: int
    after_ms: int


@dataclass(frozen=True, slots=True)
class EndFlow:
    """Dismiss all sites. `error` is None when everything was delivered or the user stopped it."""

    error: Exception | None


ControllerEffect = AssignSites | StartFlow | DrainFlow | RelaunchSite | EndFlow
