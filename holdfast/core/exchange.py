"""The two ends of an exchange, for one partition group on one site.

Every replica of a consumer partition group tells every replica of a producer partition group,
cumulatively, up to which epoch it has `received`, and takes its frames from one of them. A producer
replica keeps a bundle until all replicas of the consumer have it: that epoch is `stable`. So
whichever replicas die, what a survivor lacks is kept by, or will be made again by, any survivor on
the other side; and "have I seen this?" is one comparison of epochs.

A consumer that is rebuilt from its input if it dies (see `holdfast.core.upstream`) also says up
to which epoch it does not need that input any more, at each *level*; then that is what is stable.

Why this cannot deadlock: processing an epoch needs bundles of that epoch only, a consumer's
credit always covers the epoch it processes next, and receivers take whatever arrives off the
wire. So the oldest epoch of the flow can always be moved on, whoever is slow and whatever is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.core.effects import SendAck, SendBundle
from holdfast.core.events import AckArrived, BundleArrived
from holdfast.core.ids import NO_EPOCH, Epoch, ExchangeId, GroupId, SiteId
from holdfast.core.upstream import Gap, Line, Log, Needed, merged
from holdfast.errors import DivergenceError, ProtocolError, require

NOTHING = Needed()
"""There are no levels: what is received is not needed any more."""


class Kept(NamedTuple):
    """A bundle that some replica of the consumer may still need."""

    epoch: Epoch
    last: bool
    bundle: Any
    part: int = 0
    """Which of the epoch's parts it is; with ordered merging there is only one."""


@dataclass(slots=True)
class _Taker:
    """What a producer knows of one replica of a consumer."""

    def reached(self, level: int) -> Epoch:
        """What it has (level 0), or does not need any more."""
        if level == 0:
            return self.received
        return self.levels[level - 1] if level <= len(self.levels) else NO_EPOCH

    def line(self, level: int) -> Line:
        """What goes with that, if it is rebuilt."""
        return self.lines[level - 1] if 0 < level <= len(self.lines) else {}

    joined_view: int
    received: Epoch = NO_EPOCH
    levels: tuple[Epoch, ...] = ()
    lines: tuple[Line, ...] = ()
    credit: Epoch = NO_EPOCH
    takes: bool = False
    next: int = 0
    """Which bundle goes out to it next, counted from the beginning of the lane."""


@dataclass(slots=True)
class _Lane:
    """The bundles for one consumer partition group, and the replicas it has."""

    kept: deque[Kept] = field(default_factory=deque)
    trimmed: int = 0
    """How many bundles have been let go."""
    let_go: Epoch = NO_EPOCH
    """Up to which epoch they have, or were never here."""
    known: Epoch = NO_EPOCH
    """Up to which epoch some replica of the consumer, dead or alive, was known not to need any."""
    base: Epoch = NO_EPOCH
    """After which epoch what is here is right, if it was rebuilt."""
    credit: int = 0
    """At which level that is all that the consumer needs, until it is known to need less."""
    line: Line = field(default_factory=dict)
    """From where on the consumer, and whoever follows it, is right if it is rebuilt."""
    takers: dict[SiteId, _Taker] = field(default_factory=dict)
    claims: dict[Epoch, int] = field(default_factory=dict)
    """Checksums that a consumer has reported of epochs that are not made here yet."""


class Producer:
    """The sending end: a lane for every consumer partition group. It begins after the epoch
    `made`."""

    def __init__(
        self,
        exchange: ExchangeId,
        group: GroupId,
        level: int = 0,
        made: Epoch = NO_EPOCH,
        log: Log | None = None,
        deterministic: bool = True,
    ) -> None:
        """The consumers let go at this `level`. The replicas of the producer make the same frames,
        if they are `deterministic`. If what comes here is rebuilt, it is right after the epoch
        `log.after`, and that is all that they need at the level `log.credit`, at first."""
        self.exchange, self.group, self.level = exchange, group, level
        self.complete = level
        """At which level what is kept is complete."""
        self.lanes: dict[GroupId, _Lane] = {}
        self.made = made
        self._deterministic = deterministic
        self._log = log or Log(made, made, level, {})
        self._part = 0

    def protect(self, level: int, complete: int, deterministic: bool) -> None:
        """The consumers let go at this `level`, and what is kept is complete at that one; what
        another replica has sent is compared, if they are `deterministic`."""
        self.level, self.complete, self._deterministic = level, complete, deterministic

    def on_view(self, replicas: Mapping[GroupId, Mapping[SiteId, int]]) -> None:
        """Count these replicas of the consumers, and no others; each with the view it is from."""
        for consumer, sites in replicas.items():
            lane = self.lanes.get(consumer) or self._new_lane(consumer)
            known = {s: t for s, t in lane.takers.items() if sites.get(s) == t.joined_view}
            lane.takers = {
                s: known.get(s) or _Taker(joined_view) for s, joined_view in sites.items()
            }
            self._trim(lane)

    def _new_lane(self, consumer: GroupId) -> _Lane:
        after, _, credit, line = self._log
        lane = _Lane(let_go=after, base=after, credit=min(self.level, credit), line=line)
        self.lanes[consumer] = lane
        return lane

    def joined_view(self, consumer: GroupId, site: SiteId) -> int:
        """From which view the replica of `consumer` at `site` is that counts here; -1 if none
        does."""
        lane = self.lanes.get(consumer)
        taker = lane.takers.get(site) if lane else None
        return taker.joined_view if taker else -1

    def received(self, consumer: GroupId, site: SiteId) -> Epoch:
        """What the replica of `consumer` at `site` has."""
        return self.lanes[consumer].takers[site].received

    def offer(self, epoch: Epoch, last: bool, bundles: Mapping[GroupId, Any]) -> list[SendBundle]:
        """Take an epoch's output; what is asked for and there is credit for goes out at once."""
        effects: list[SendBundle] = []
        for consumer, lane in self.lanes.items():
            bundle = bundles[consumer]
            if epoch <= lane.base:
                continue  # it need not be right, and nobody lacks it
            lane.kept.append(Kept(epoch, last, bundle, self._part))
            claim = lane.claims.pop(epoch, None)
            if claim is not None:
                self._compare(consumer, epoch, bundle, claim)
            self._trim(lane)
            effects += self._sendable(consumer, lane)
        self._part = 0 if last else self._part + 1
        if last:
            self.made = epoch
        return effects

    def on_ack(self, ack: AckArrived) -> list[SendBundle]:
        lane = self.lanes[ack.consumer]
        taker = lane.takers[ack.site]
        self._verify(lane, ack)
        taker.received = max(taker.received, ack.received)
        known = taker.levels + (NO_EPOCH,) * (len(ack.levels) - len(taker.levels))
        taker.levels = tuple(map(max, known, ack.levels))
        taker.lines = ack.lines
        lane.known = max(lane.known, taker.reached(self.level))
        if ack.lines:
            lane.line = merged([lane.line, taker.line(self.level)])
        taker.credit = max(taker.credit, ack.credit)
        if ack.take and not taker.takes:
            held = sum(1 for k in lane.kept if k.epoch <= taker.received)
            taker.next = lane.trimmed + held
        taker.takes = ack.take
        self._trim(lane)
        return self._sendable(ack.consumer, lane)

    def on_lost(self, site: SiteId) -> None:
        """The connection broke: what was on its way may not have arrived."""
        for lane in self.lanes.values():
            if site in lane.takers:
                lane.takers[site].takes = False

    def _trim(self, lane: _Lane) -> None:
        stable = self._stable(lane)
        while lane.kept and lane.kept[0].epoch <= stable:
            lane.let_go = lane.kept.popleft().epoch
            lane.trimmed += 1

    def _stable(self, lane: _Lane) -> Epoch:
        return min((t.reached(self.level) for t in lane.takers.values()), default=NO_EPOCH)

    @property
    def stable(self) -> Epoch:
        """What no replica of any consumer will ask for."""
        return min((self._stable(lane) for lane in self.lanes.values()), default=NO_EPOCH)

    def skip(self, epoch: Epoch) -> None:
        """An epoch is stable, and was not made here."""
        self.made = epoch
        for lane in self.lanes.values():
            lane.let_go = max(lane.let_go, epoch)

    def reached(self, level: int) -> Epoch:
        """What all replicas of all consumers have (level 0), or do not need any more. A consumer of
        which nothing is left will be rebuilt, and then needs all that is kept for it."""
        return min(
            (
                min((t.reached(level) for t in lane.takers.values()), default=lane.let_go)
                for lane in self.lanes.values()
            ),
            default=NO_EPOCH,
        )

    def line(self, level: int) -> Line:
        """What goes with `reached`."""
        return merged(
            line
            for lane in self.lanes.values()
            for line in [t.line(level) for t in lane.takers.values()] or [lane.line]
        )

    def log(self, consumer: GroupId) -> Log:
        """What is here for a consumer that is to be rebuilt."""
        lane = self.lanes[consumer]
        short = lane.known < lane.base
        credit = min(lane.credit, self.complete) if short else self.complete
        return Log(lane.let_go, self.made, credit, lane.line)

    def _sendable(self, consumer: GroupId, lane: _Lane) -> list[SendBundle]:
        ready: list[SendBundle] = []
        for site, taker in lane.takers.items():
            if not taker.takes:
                continue
            taker.next = max(taker.next, lane.trimmed)
            while taker.next - lane.trimmed < len(lane.kept):
                epoch, last, bundle, part = lane.kept[taker.next - lane.trimmed]
                if epoch > taker.credit:
                    break
                if epoch > taker.received:
                    ready.append(
                        SendBundle(
                            site,
                            self.exchange,
                            epoch,
                            self.group,
                            consumer,
                            taker.joined_view,
                            last,
                            bundle,
                            part,
                        )
                    )
                taker.next += 1
        return ready

    def _verify(self, lane: _Lane, ack: AckArrived) -> None:
        """Two replicas must make the same frames: compare what the other one sent with ours."""
        if ack.take or ack.finished == NO_EPOCH or not self._deterministic:
            return
        if ack.finished > self.made:
            lane.claims[ack.finished] = ack.checksum
            return
        for kept in lane.kept:
            if kept.epoch == ack.finished and kept.last:
                self._compare(ack.consumer, kept.epoch, kept.bundle, ack.checksum)

    def _compare(self, consumer: GroupId, epoch: Epoch, bundle: Any, claim: int) -> None:
        if bundle.checksum != claim:
            raise DivergenceError(
                f"exchange {self.exchange}, epoch {epoch}: the replicas of producer partition "
                "group "
                f"{self.group} sent different frames to consumer partition group {consumer}",
                hint="an operator or step is not deterministic: does it use the time, a random "
                "number, or the order of a set?",
            )

    def export(self, after: Epoch | None = None) -> dict[GroupId, list[Kept]]:
        """What another replica must be able to send in place of this one; without what it has, if
        it has been there after an earlier epoch."""
        return {
            consumer: [k for k in lane.kept if after is None or k.epoch > after]
            for consumer, lane in self.lanes.items()
        }

    def gaps(self) -> dict[GroupId, Gap]:
        """What is not here, by consumer."""
        return {
            consumer: Gap(lane.let_go, lane.known, lane.base, lane.credit, lane.line)
            for consumer, lane in self.lanes.items()
        }

    def install(
        self,
        made: Epoch,
        kept: Mapping[GroupId, Iterable[Kept]],
        gaps: Mapping[GroupId, Gap],
        whole: bool = True,
    ) -> None:
        """Be as another replica was after epoch `made`. If these are not all that it kept, what is
        kept here of earlier epochs stays, as long as the other one kept it."""
        self.made = made
        for consumer, gap in gaps.items():
            lane = self.lanes.setdefault(consumer, _Lane())
            if whole:
                lane.kept.clear()
            lane.kept.extend(Kept(*k) for k in kept.get(consumer, ()))
            lane.let_go = max(lane.let_go, gap.let_go)
            lane.known = max(lane.known, gap.known)
            lane.base, lane.credit = gap.base, gap.credit
            lane.line = merged([lane.line, gap.line])
            while lane.kept and lane.kept[0].epoch <= lane.let_go:
                lane.kept.popleft()
                lane.trimmed += 1
            self._trim(lane)  # acks may have come before

    def kept(self) -> Iterator[Kept]:
        """All that is kept, by consumer, the oldest first."""
        for lane in self.lanes.values():
            yield from lane.kept

    def held(self) -> int:
        """How many bundles wait for credit or for their ack."""
        return sum(len(lane.kept) for lane in self.lanes.values())

    def slowest(self, but: Mapping[GroupId, Iterable[SiteId]]) -> tuple[SiteId, int] | None:
        """The replica that most bundles are kept for, and how many bytes they are; leaving out
        some, that are meant to be behind."""
        worst: tuple[int, SiteId] | None = None
        for consumer, lane in self.lanes.items():
            for site, taker in lane.takers.items():
                if site in but.get(consumer, ()):
                    continue
                waiting = sum(k.bundle.nbytes for k in lane.kept if k.epoch > taker.received)
                if worst is None or waiting > worst[0]:
                    worst = (waiting, site)
        return None if worst is None else (worst[1], worst[0])

    def check_invariants(self) -> None:
        for consumer, lane in self.lanes.items():
            epochs = [k.epoch for k in lane.kept]
            require(
                epochs == sorted(epochs),
                f"partition group {consumer}: kept bundles are out of order",
            )
            stable = self._stable(lane)
            require(
                all(e > stable for e in epochs),
                f"partition group {consumer}: a stable bundle is kept",
            )
            require(
                not epochs or epochs[0] in (lane.let_go, lane.let_go + 1),
                f"partition group {consumer}: a bundle is missing",
            )


class Consumer:
    """The receiving end: bundles by epoch and producer partition group."""

    def __init__(
        self,
        exchange: ExchangeId,
        group: GroupId,
        window: int,
        finished: Epoch = NO_EPOCH,
        joined_view: int = 0,
    ) -> None:
        self.exchange, self.group, self.window = exchange, group, window
        self.finished, self.joined_view = finished, joined_view
        self._promised = NO_EPOCH
        """Up to which epoch producers may send, as they were told; there may be less room now."""
        self._takes = True
        """If not, it takes nothing yet, and is counted."""
        self._deterministic = True
        """Whether it does not matter from which replica of a producer it takes its frames."""
        self.received: dict[GroupId, Epoch] = {}
        self.source: dict[GroupId, SiteId | None] = {}
        self._replicas: dict[GroupId, tuple[SiteId, ...]] = {}
        self._counted: dict[GroupId, tuple[SiteId, ...]] = {}
        self._arrived: dict[Epoch, dict[GroupId, list[Any]]] = {}
        self._parts: dict[GroupId, int] = {}  # how many of the next epoch have come
        self._taken: dict[GroupId, int] = {}
        self._checksum: dict[GroupId, int] = {}

    def on_view(
        self,
        replicas: Mapping[GroupId, tuple[SiteId, ...]],
        joining: Mapping[GroupId, tuple[SiteId, ...]],
        prefer: Mapping[GroupId, SiteId],
        connected: set[SiteId],
        needed: Needed = NOTHING,
        *,
        takes: bool = True,
        deterministic: bool = True,
    ) -> list[SendAck]:
        """Take from these replicas of the producers; tell them, and those that join, where we are.

        `prefer` names the replicas that are on this site and not behind. One that does not compute
        takes nothing. If the producer's replicas are not `deterministic`, it takes from the first.
        """
        self._takes, self._deterministic = takes, deterministic
        for producer, sites in replicas.items():
            self.received.setdefault(producer, self.finished)
            self._replicas[producer] = sites
            self._counted[producer] = sites + joining[producer]
            self._choose(producer, connected, prefer.get(producer))
        return self.acks(connected, needed)

    def on_connected(
        self, site: SiteId, connected: set[SiteId], needed: Needed = NOTHING
    ) -> list[SendAck]:
        for producer in self.received:
            if self.source.get(producer) is None:
                self._choose(producer, connected, None)
        return [a for a in self.acks(connected, needed) if a.site == site]

    def on_lost(
        self, site: SiteId, connected: set[SiteId], needed: Needed = NOTHING
    ) -> list[SendAck]:
        """Ask another replica at once for what this one was sending. It may come twice."""
        effects = []
        for producer, source in self.source.items():
            if source == site:
                self._choose(producer, connected, None)
                effects += [a for a in self.acks(connected, needed) if a.producer == producer]
        return effects

    def _choose(self, producer: GroupId, connected: set[SiteId], prefer: SiteId | None) -> None:
        alive = [s for s in self._replicas[producer] if s in connected and self._takes]
        if not self._deterministic:
            self.source[producer] = alive[0] if alive else None
        elif prefer is not None and prefer in alive:
            self.source[producer] = prefer
        elif self.source.get(producer) not in alive:
            turn = (producer + self.group) % len(alive) if alive else 0
            self.source[producer] = alive[turn] if alive else None

    def turn(self, connected: set[SiteId], needed: Needed = NOTHING) -> list[SendAck]:
        """Take what is lacking of the next epoch from the next replica."""
        effects = []
        for producer, received in self.received.items() if self._deterministic else ():
            alive = [s for s in self._replicas[producer] if s in connected]
            source = self.source.get(producer)
            if received == self.finished and source in alive and len(alive) > 1:
                self.source[producer] = alive[(alive.index(source) + 1) % len(alive)]
                effects += [a for a in self.acks(connected, needed) if a.producer == producer]
        return effects

    @property
    def room(self) -> int:
        """How many epochs after the one it is at producers may send."""
        return max(self._promised - self.finished, self.window)

    def on_bundle(self, event: BundleArrived) -> bool:
        """Take a bundle in; False if it is one that came before and is dropped."""
        seen = self.received.get(event.producer)
        if seen is None:
            raise ProtocolError(
                f"exchange {self.exchange}: bundle from partition group {event.producer}, no "
                "producer"
            )
        if event.epoch <= seen:
            return False
        if event.epoch != seen + 1:
            raise ProtocolError(
                f"exchange {self.exchange}: partition group {event.producer} sent epoch "
                f"{event.epoch} "
                f"after {seen}"
            )
        if event.epoch > self.finished + self.room:
            raise ProtocolError(
                f"exchange {self.exchange}: partition group {event.producer} sent epoch "
                f"{event.epoch} "
                f"without credit"
            )
        expected = self._parts.get(event.producer, 0)
        if event.part < expected:
            return False
        if event.part > expected:
            raise ProtocolError(
                f"exchange {self.exchange}: partition group {event.producer} sent part "
                f"{event.part} "
                f"of epoch {event.epoch}, not {expected}"
            )
        parts = self._arrived.setdefault(event.epoch, {}).setdefault(event.producer, [])
        parts.append(event.bundle)
        self._parts[event.producer] = 0 if event.last else event.part + 1
        if event.last:
            self.received[event.producer] = event.epoch
        return True

    def complete(self, epoch: Epoch) -> bool:
        """Whether every producer's frames of `epoch` are here."""
        return all(received >= epoch for received in self.received.values())

    def take(self, epoch: Epoch) -> list[Any]:
        """The bundles of an epoch that are here and were not taken before, by producer."""
        by_producer = self._arrived.pop(epoch, {})
        self._taken = {p: parts[-1].checksum for p, parts in by_producer.items()}
        return [bundle for p in sorted(by_producer) for bundle in by_producer[p]]

    def waiting(self) -> list[Epoch]:
        """The epochs of which something is here, oldest first."""
        return sorted(self._arrived)

    def finish(
        self, epoch: Epoch, connected: set[SiteId], needed: Needed = NOTHING
    ) -> list[SendAck]:
        """The stage has processed everything up to `epoch`: tell all producers."""
        self.finished = epoch
        self._checksum = self._taken
        return self.acks(connected, needed)

    def adopt_checkpoint(
        self, epoch: Epoch, connected: set[SiteId], needed: Needed = NOTHING
    ) -> list[SendAck]:
        """The state is that after `epoch` now: nothing before is needed any more."""
        self.finished = epoch
        self.received = dict.fromkeys(self.received, epoch)
        return self.acks(connected, needed)

    def acks(self, connected: set[SiteId], needed: Needed = NOTHING) -> list[SendAck]:
        return [
            self.ack(producer, site, needed)
            for producer, sites in self._counted.items()
            for site in sites
            if site in connected
        ]

    def ack(self, producer: GroupId, site: SiteId, needed: Needed) -> SendAck:
        known = producer in self._checksum
        received, levels = self.received[producer], needed.levels
        self._promised = max(self._promised, Epoch(self.finished + self.window))
        return SendAck(
            site,
            self.exchange,
            producer,
            self.group,
            self.joined_view,
            received,
            self._promised,
            self.source[producer] == site,
            self.finished if known else NO_EPOCH,
            self._checksum.get(producer, 0),
            (received,) * needed.depth if levels is None else levels,
            needed.lines,
        )

    def check_invariants(self) -> None:
        for producer, received in self.received.items():
            require(
                received >= self.finished, f"partition group {producer}: finished ahead of received"
            )
        require(
            all(e > self.finished for e in self._arrived), "bundles of a finished epoch are kept"
        )
