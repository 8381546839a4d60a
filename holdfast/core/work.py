"""What a replica processes next, and how much of it in one call.

A replica is busy with at most one order at a time. How many epochs that order has is decided here:
one as a rule; several small ones if the replica is behind, as long as the call stays short, since
the site is deaf meanwhile.

This is apart from the life of the replica because the two do not depend on each other: an order
that is given while the replica replays may be done when it is active, and one that is under way
when a view removes the replica is finished all the same, for nobody.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.exchange import Consumer
from holdfast.core.ids import Epoch, ExchangeId
from holdfast.core.records import EpochRecord

AT_ONCE, AT_ONCE_ROWS = 64, 1 << 16
"""As many epochs, and as many rows, a source that is behind takes together."""
REPLAYED, AT_ONCE_BYTES = 16, 1 << 20
"""As many epochs a stage takes together that is behind, while they have no more bytes: it must
also find time for others that want something of its site."""
AT_ONCE_S = 0.05
"""As much as it takes about so long for is done together, by how long it took the last two times.
Little is gained by calls that are longer than that."""
EPOCH_ROWS, EPOCH_BYTES = 16, 1 << 10
"""What an epoch counts for, however few rows are in it."""

Inputs = Mapping[ExchangeId, Consumer]
Bundles = dict[ExchangeId, list[Any]]


class Work:
    """The order that a replica is busy with, and how long its orders take."""

    __slots__ = ("_amount", "_paces", "busy")

    def __init__(self) -> None:
        self.busy = 0
        """With how many epochs."""
        self._amount = 0
        """And with how much of their input: rows of a source, bytes otherwise."""
        self._paces: tuple[float, ...] = ()
        """How many seconds it took for each of that, the last two times."""

    def done(self, seconds: float) -> None:
        """The order was carried out, in so much time."""
        self._paces = (*self._paces[-1:], seconds / max(1, self._amount))
        self.busy = 0

    def _takes_long(self, amount: int) -> bool:
        """Whether so much is too much to be done at once, or it is not known how long it takes."""
        return not self._paces or amount * max(self._paces) > AT_ONCE_S

    def ingest(
        self, records: Mapping[Epoch, EpochRecord], after: Epoch, upto: Epoch
    ) -> tuple[EpochRecord, ...]:
        """Begin with the next epoch of a source, and small ones behind it up to `upto`, if their
        records are there."""
        epoch = Epoch(after + 1)
        due: list[EpochRecord] = []
        rows = self._amount = 0
        while record := records.get(epoch):
            rows += record.rows
            amount = self._amount + max(record.rows, EPOCH_ROWS)
            if due and (rows > AT_ONCE_ROWS or len(due) == AT_ONCE or epoch > upto):
                break
            if due and self._takes_long(amount):
                break
            due.append(record)
            self._amount = amount
            epoch = Epoch(epoch + 1)
        self.busy = len(due)
        return tuple(due)

    def process(self, inputs: Inputs, after: Epoch, upto: Epoch) -> list[Bundles]:
        """Begin with the next epoch, if all its bundles are there, and small ones behind it up to
        `upto`."""
        taken: list[Bundles] = []
        largest = self._amount = 0
        epoch = Epoch(after + 1)
        while all(c.complete(epoch) for c in inputs.values()):
            bundles = _take(inputs, epoch)
            taken.append(bundles)
            nbytes = sum(b.nbytes for found in bundles.values() for b in found)
            largest = max(largest, nbytes, EPOCH_BYTES)
            self._amount += max(nbytes, EPOCH_BYTES)
            if epoch >= upto or len(taken) == REPLAYED:
                break
            if self._amount > AT_ONCE_BYTES or self._takes_long(self._amount + largest):
                break
            epoch = Epoch(epoch + 1)
        self.busy = len(taken)
        return taken

    def process_arrived(self, inputs: Inputs) -> Bundles | None:
        """Begin with whatever has come, be it of a later epoch (arrival merging)."""
        waiting = sorted({e for c in inputs.values() for e in c.waiting()})
        if not waiting:
            return None
        self.busy = self._amount = 1
        return _take(inputs, waiting[0])


def _take(inputs: Inputs, epoch: Epoch) -> Bundles:
    return {exchange: consumer.take(epoch) for exchange, consumer in inputs.items()}
