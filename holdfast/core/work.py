"""What a replica processes next, and how much of it in one call.

A replica executes at most one order at a time. `Work` decides how many epochs an order has: one as
a rule; several small ones if the replica is behind, as long as the call stays short, because the
site receives nothing during a call.

It is separate from the state of the replica because the two do not depend on each other. An order
that begins while the replica replays may end when it is active. An order that is under way when a
view removes the replica still ends, and its result is not used.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.core.exchange import Consumer
from holdfast.core.ids import Epoch, ExchangeId
from holdfast.core.records import EpochRecord

AT_ONCE, AT_ONCE_ROWS = 64, 1 << 16
"""The most epochs, and the most rows, that a source which is behind ingests in one call."""
REPLAYED, AT_ONCE_BYTES = 16, 1 << 20
"""The most epochs that a stage which is behind processes in one call, and the most bytes. The site
has other work to do in between."""
AT_ONCE_S = 0.05
"""How long a call with several epochs should take at most, estimated from the last two calls.
Longer calls gain little."""
EPOCH_ROWS, EPOCH_BYTES = 16, 1 << 10
"""What an epoch counts at least, however few rows it has."""

Inputs = Mapping[ExchangeId, Consumer]
Bundles = dict[ExchangeId, list[Any]]


class Work:
    """The order that a replica executes, and how long its orders take."""

    __slots__ = ("_amount", "_paces", "busy")

    def __init__(self) -> None:
        self.busy = 0
        """How many epochs the order under way has; 0: there is none."""
        self._amount = 0
        """How much input it has: rows of a source, bytes otherwise."""
        self._paces: tuple[float, ...] = ()
        """Seconds per row or byte of the last two orders."""

    def done(self, seconds: float) -> None:
        """The order has ended; it took `seconds`."""
        self._paces = (*self._paces[-1:], seconds / max(1, self._amount))
        self.busy = 0

    def _takes_long(self, amount: int) -> bool:
        """Whether this amount would take too long in one call, or it is unknown how long it
        takes."""
        return not self._paces or amount * max(self._paces) > AT_ONCE_S

    def ingest(
        self, records: Mapping[Epoch, EpochRecord], after: Epoch, upto: Epoch
    ) -> tuple[EpochRecord, ...]:
        """Begin an order for the next epoch of a source, and for small ones after it up to `upto`,
        as far as their records are there."""
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
        """Begin an order for the next epoch, and for small ones after it up to `upto`, as far as
        all their bundles are there."""
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
        """Begin an order for what has arrived, even of a later epoch (arrival merging)."""
        waiting = sorted({e for c in inputs.values() for e in c.waiting()})
        if not waiting:
            return None
        self.busy = self._amount = 1
        return _take(inputs, waiting[0])


def _take(inputs: Inputs, epoch: Epoch) -> Bundles:
    return {exchange: consumer.take(epoch) for exchange, consumer in inputs.items()}
