"""The epoch records that a site knows."""

from __future__ import annotations

from holdfast.core.ids import Epoch
from holdfast.core.records import EpochRecord
from holdfast.errors import ProtocolError

HISTORY = 512
"""Records kept for replicas that join later."""


class KnownRecords:
    """The records of a site. The flow begins after the epoch `begun`."""

    def __init__(self, begun: Epoch) -> None:
        self.by_epoch: dict[Epoch, EpochRecord] = {}
        self.recorded = begun
        """The latest epoch that is known to be recorded."""
        self.last: Epoch | None = None
        """The last epoch of the flow, once it is known."""
        self.ended = False
        """Whether the flow ends because its sources have ended: then it cannot be resumed."""

    def add(self, record: EpochRecord) -> bool:
        """Add a record. Returns whether it is new."""
        known = self.by_epoch.get(record.epoch)
        if known is not None:
            if known != record:
                raise ProtocolError(f"two records of epoch {record.epoch}")
            return False
        self.by_epoch[record.epoch] = record
        self.note(record.epoch)
        if record.last:
            self.last, self.ended = record.epoch, record.ended
        return True

    def note(self, epoch: Epoch) -> None:
        """This epoch is recorded, as a producer has output of it."""
        self.recorded = max(self.recorded, epoch)

    def after(self, epoch: Epoch | None) -> list[EpochRecord]:
        """The records after an epoch; None: only the latest."""
        if epoch is None:
            return [self.by_epoch[max(self.by_epoch)]] if self.by_epoch else []
        return [self.by_epoch[e] for e in sorted(self.by_epoch) if e > epoch]

    def trim(self, finished: list[Epoch]) -> None:
        """Drop records that all sources here have finished, except for the last `HISTORY`."""
        done = min([*finished, Epoch(self.recorded - HISTORY)])
        # Records almost always come in order. One that does not is dropped when it is the first.
        while self.by_epoch and (oldest := next(iter(self.by_epoch))) <= done:
            del self.by_epoch[oldest]
