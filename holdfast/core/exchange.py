"""The two ends of an exchange on one site.

A consumer publishes, for each producer, two epochs: `received`, and `stable` ("I will never ask
again for anything up to here"), and with them its `credit`: the newest epoch it has room for. A
producer keeps a bundle until it is stable at its consumer, and sends it when there is credit.

Why this cannot deadlock: processing an epoch needs bundles of that epoch only, a consumer's
credit always covers the epoch it processes next, and receivers take whatever arrives off the
wire. So the oldest epoch of the flow can always be moved on, whoever is slow and whatever is full.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.effects import SendAck, SendBundle
from holdfast.core.events import AckArrived, BundleArrived
from holdfast.core.ids import NO_EPOCH, Epoch, ExchangeId, SiteId
from holdfast.errors import ProtocolError, require


@dataclass(slots=True)
class _Lane:
    """What a producer knows of one consumer."""

    received: Epoch = NO_EPOCH
    stable: Epoch = NO_EPOCH
    credit: Epoch = NO_EPOCH
    kept: list[SendBundle] = field(default_factory=list)
    sent: int = 0
    """How many of `kept`, from the oldest on, are on their way."""


class Producer:
    """The sending end of one exchange on one site: a lane for every consumer site."""

    def __init__(self, exchange: ExchangeId, consumers: Iterable[SiteId], credit: Epoch) -> None:
        self.exchange = exchange
        self.lanes = {site: _Lane(credit=credit) for site in consumers}

    def offer(self, epoch: Epoch, last: bool, bundles: dict[SiteId, Any]) -> list[SendBundle]:
        """Take an epoch's output; what there is credit for goes out at once."""
        effects: list[SendBundle] = []
        for site, lane in self.lanes.items():
            lane.kept.append(SendBundle(self.exchange, epoch, site, last, bundles[site]))
            effects += self._sendable(lane)
        return effects

    def on_ack(self, ack: AckArrived) -> list[SendBundle]:
        lane = self.lanes.get(ack.consumer)
        if lane is None:
            raise ProtocolError(
                f"exchange {self.exchange}: ack from site {ack.consumer}, no consumer"
            )
        lane.received = max(lane.received, ack.received)
        lane.stable = max(lane.stable, ack.stable)
        lane.credit = max(lane.credit, ack.credit)
        trimmed = 0
        while trimmed < lane.sent and lane.kept[trimmed].epoch <= lane.stable:
            trimmed += 1
        del lane.kept[:trimmed]
        lane.sent -= trimmed
        return self._sendable(lane)

    @staticmethod
    def _sendable(lane: _Lane) -> list[SendBundle]:
        ready: list[SendBundle] = []
        while lane.sent < len(lane.kept) and lane.kept[lane.sent].epoch <= lane.credit:
            ready.append(lane.kept[lane.sent])
            lane.sent += 1
        return ready

    def held(self) -> int:
        """How many bundles wait for credit or for their ack."""
        return sum(len(lane.kept) for lane in self.lanes.values())

    def check_invariants(self) -> None:
        for site, lane in self.lanes.items():
            require(lane.stable <= lane.received, f"site {site}: stable runs ahead of received")
            epochs = [b.epoch for b in lane.kept]
            require(epochs == sorted(epochs), f"site {site}: kept bundles are out of order")
            require(
                all(b.epoch > lane.stable for b in lane.kept),
                f"site {site}: a stable bundle is kept",
            )


class Consumer:
    """The receiving end of one exchange on one site: bundles by epoch and producer site."""

    def __init__(self, exchange: ExchangeId, producers: Iterable[SiteId], window: int) -> None:
        self.exchange = exchange
        self.window = window
        self.received: dict[SiteId, Epoch] = dict.fromkeys(producers, NO_EPOCH)
        self.finished = NO_EPOCH
        self._arrived: dict[Epoch, dict[SiteId, list[Any]]] = {}

    def on_bundle(self, event: BundleArrived) -> bool:
        """Take a bundle in; False if it is one that came before and is dropped."""
        seen = self.received.get(event.producer)
        if seen is None:
            raise ProtocolError(
                f"exchange {self.exchange}: bundle from site {event.producer}, no producer"
            )
        if event.epoch <= seen:
            return False
        if event.epoch != seen + 1:
            raise ProtocolError(
                f"exchange {self.exchange}: site {event.producer} sent epoch {event.epoch} "
                f"after {seen}"
            )
        parts = self._arrived.setdefault(event.epoch, {}).setdefault(event.producer, [])
        parts.append(event.bundle)
        if event.last:
            self.received[event.producer] = event.epoch
        return True

    def complete(self, epoch: Epoch) -> bool:
        """Whether every producer's frames of `epoch` are here."""
        return all(received >= epoch for received in self.received.values())

    def take(self, epoch: Epoch) -> list[Any]:
        """The bundles of an epoch that are here and were not taken before, by producer."""
        by_site = self._arrived.pop(epoch, {})
        return [bundle for site in sorted(by_site) for bundle in by_site[site]]

    def waiting(self) -> list[Epoch]:
        """The epochs of which something is here, oldest first."""
        return sorted(self._arrived)

    def finish(self, epoch: Epoch) -> list[SendAck]:
        """The stage has processed everything up to `epoch`: tell all producers."""
        self.finished = epoch
        return [self.ack(site) for site in self.received]

    def ack(self, producer: SiteId) -> SendAck:
        received = self.received[producer]
        # Without protection what was received is never asked for again.
        return SendAck(
            self.exchange, producer, received, received, Epoch(self.finished + self.window)
        )

    def check_invariants(self) -> None:
        for site, received in self.received.items():
            require(received >= self.finished, f"site {site}: finished runs ahead of received")
        require(
            all(e > self.finished for e in self._arrived), "bundles of a finished epoch are kept"
        )
