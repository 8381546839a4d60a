"""The two ends of an exchange, for one partition group on one site.

Every replica of a consumer acknowledges to every replica of a producer, cumulatively, up to which
epoch it has `received`, and subscribes to one of them for its frames. A producer replica keeps a
bundle until all replicas of the consumer have received it: that epoch is `stable`. Whichever
replicas die, every survivor on the producer's side has what a surviving consumer lacks, or will
make it; and "have I seen this?" is one comparison of epochs.

A consumer that is rebuilt from its input if it dies (see `holdfast.core.upstream`) also
acknowledges up to which epoch it no longer needs that input, at each *level*; for its producers
that epoch is stable.

An exchange cannot deadlock: processing an epoch needs bundles of that epoch only, a consumer's
credit always covers the epoch it processes next, and receivers read everything that arrives. The
oldest epoch of the flow can always proceed, whichever site is slow and whichever buffer is full.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from holdfast.core.effects import SendAck, SendBundle
from holdfast.core.ids import NO_EPOCH, Epoch, ExchangeId, GroupId, SiteId
from holdfast.core.messages import Ack, BundleKey
from holdfast.core.upstream import Gap, Log, Needed, ValidAfter, merged
from holdfast.errors import DivergenceError, InvariantError, ProtocolError

NOTHING = Needed()
"""No levels: the consumer no longer needs what it has received."""


class Kept(NamedTuple):
    """A bundle that a replica of the consumer may still need."""

    epoch: Epoch
    last: bool
    bundle: Any
    part: int = 0
    """Which of the epoch's parts it is; with ordered merging there is only one."""


@dataclass(slots=True)
class _Cursor:
    """What a producer knows of one replica of a consumer: its last ack, and what to send next."""

    joined_view: int
    received: Epoch = NO_EPOCH
    levels: tuple[Epoch, ...] = ()
    valid_after: tuple[ValidAfter, ...] = ()
    credit: Epoch = NO_EPOCH
    subscribed: bool = False
    next: int = 0
    """The bundle to send next, counted from the beginning of the lane."""

    def reached(self, level: int) -> Epoch:
        """Up to which epoch it has everything (level 0), or no longer needs it."""
        if level == 0:
            return self.received
        return self.levels[level - 1] if level <= len(self.levels) else NO_EPOCH

    def valid_after_at(self, level: int) -> ValidAfter:
        """What goes with that, if it is rebuilt."""
        return self.valid_after[level - 1] if 0 < level <= len(self.valid_after) else {}


@dataclass(slots=True)
class _Lane:
    """The bundles kept for one consumer partition group, and a cursor for each of its replicas."""

    kept: deque[Kept] = field(default_factory=deque)
    trimmed: int = 0
    """How many bundles were dropped."""
    trimmed_upto: Epoch = NO_EPOCH
    """Bundles up to this epoch were dropped, or were never here."""
    known_stable: Epoch = NO_EPOCH
    """A replica of the consumer, dead or alive, is known not to need bundles up to this epoch."""
    rebuilt_from: Epoch = NO_EPOCH
    """If this producer was rebuilt: its output is right after this epoch."""
    complete_level: int = 0
    """The level at which that is all that the consumer needs, until it acknowledges more."""
    valid_after: ValidAfter = field(default_factory=dict)
    """After which epochs the output of the consumer and of tasks behind it is right, if they are
    rebuilt from this lane."""
    cursors: dict[SiteId, _Cursor] = field(default_factory=dict)
    claims: dict[Epoch, int] = field(default_factory=dict)
    """Checksums that a consumer has reported for epochs that are not made here yet."""


class Producer:
    """The sending end: a lane for every consumer partition group."""

    def __init__(
        self,
        exchange: ExchangeId,
        group: GroupId,
        level: int = 0,
        made: Epoch = NO_EPOCH,
        log: Log | None = None,
        deterministic: bool = True,
    ) -> None:
        """Begin after the epoch `made`. A bundle is stable once the consumers no longer need it at
        this `level`. If the producer was rebuilt, its output is right after the epoch `log.after`,
        and complete at `log.complete_level` at first. Replicas that are `deterministic` make the
        same frames."""
        self.exchange, self.group, self.level = exchange, group, level
        self.complete = level
        """The level at which what is kept is complete."""
        self.lanes: dict[GroupId, _Lane] = {}
        self.made = made
        self._deterministic = deterministic
        self._log = log or Log(made, made, level, {})
        self._part = 0

    def protect(self, level: int, complete: int, deterministic: bool) -> None:
        """Change the level at which bundles are stable, the one at which what is kept is complete,
        and whether frames of other replicas are compared with this one's."""
        self.level, self.complete, self._deterministic = level, complete, deterministic

    def on_view(self, replicas: Mapping[GroupId, Mapping[SiteId, int]]) -> None:
        """Keep bundles for these replicas of the consumers, and no others; each with the view in
        which it joined."""
        for consumer, sites in replicas.items():
            lane = self.lanes.get(consumer) or self._new_lane(consumer)
            known = {s: t for s, t in lane.cursors.items() if sites.get(s) == t.joined_view}
            lane.cursors = {
                s: known.get(s) or _Cursor(joined_view) for s, joined_view in sites.items()
            }
            self._trim(lane)

    def _new_lane(self, consumer: GroupId) -> _Lane:
        after, _, complete, valid = self._log
        lane = _Lane(
            trimmed_upto=after,
            rebuilt_from=after,
            complete_level=min(self.level, complete),
            valid_after=valid,
        )
        self.lanes[consumer] = lane
        return lane

    def joined_view(self, consumer: GroupId, site: SiteId) -> int:
        """The view in which the replica of `consumer` at `site` joined; -1 if none is counted."""
        lane = self.lanes.get(consumer)
        cursor = lane.cursors.get(site) if lane else None
        return cursor.joined_view if cursor else -1

    def received(self, consumer: GroupId, site: SiteId) -> Epoch:
        """Up to which epoch the replica of `consumer` at `site` has everything."""
        return self.lanes[consumer].cursors[site].received

    def offer(self, epoch: Epoch, last: bool, bundles: Mapping[GroupId, Any]) -> list[SendBundle]:
        """Keep an epoch's output; return what subscribed consumers have credit for."""
        effects: list[SendBundle] = []
        for consumer, lane in self.lanes.items():
            bundle = bundles[consumer]
            if epoch <= lane.rebuilt_from:
                continue  # it may be wrong, and no consumer lacks it
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

    def on_ack(self, site: SiteId, ack: Ack) -> list[SendBundle]:
        lane = self.lanes[ack.consumer]
        cursor = lane.cursors[site]
        self._verify(lane, ack)
        cursor.received = max(cursor.received, ack.received)
        if ack.levels or cursor.levels:
            known = cursor.levels + (NO_EPOCH,) * (len(ack.levels) - len(cursor.levels))
            cursor.levels = tuple(map(max, known, ack.levels))
        cursor.valid_after = ack.valid_after
        lane.known_stable = max(lane.known_stable, cursor.reached(self.level))
        if ack.valid_after:
            lane.valid_after = merged([lane.valid_after, cursor.valid_after_at(self.level)])
        cursor.credit = max(cursor.credit, ack.credit)
        if ack.subscribe and not cursor.subscribed:
            held = sum(1 for k in lane.kept if k.epoch <= cursor.received)
            cursor.next = lane.trimmed + held
        cursor.subscribed = ack.subscribe
        self._trim(lane)
        return self._sendable(ack.consumer, lane)

    def on_lost(self, site: SiteId) -> None:
        """The connection broke: bundles under way may be lost, so the consumer subscribes again."""
        for lane in self.lanes.values():
            if site in lane.cursors:
                lane.cursors[site].subscribed = False

    def _trim(self, lane: _Lane) -> None:
        if not lane.kept:
            return
        stable = self._stable(lane)
        while lane.kept and lane.kept[0].epoch <= stable:
            lane.trimmed_upto = lane.kept.popleft().epoch
            lane.trimmed += 1

    def _stable(self, lane: _Lane) -> Epoch:
        cursors, level = lane.cursors.values(), self.level
        reached = [c.reached(level) for c in cursors] if level else [c.received for c in cursors]
        return min(reached, default=NO_EPOCH)

    @property
    def stable(self) -> Epoch:
        """No replica of any consumer will ask for bundles up to this epoch."""
        return min((self._stable(lane) for lane in self.lanes.values()), default=NO_EPOCH)

    def skip(self, epoch: Epoch) -> None:
        """Follow past an epoch that is stable without having made it."""
        self.made = epoch
        for lane in self.lanes.values():
            lane.trimmed_upto = max(lane.trimmed_upto, epoch)

    def reached(self, level: int) -> Epoch:
        """Up to which epoch all replicas of all consumers have everything (level 0), or no longer
        need it. A consumer without replicas will be rebuilt, and needs all that is kept for it."""
        return min(
            (
                min((t.reached(level) for t in lane.cursors.values()), default=lane.trimmed_upto)
                for lane in self.lanes.values()
            ),
            default=NO_EPOCH,
        )

    def valid_after_at(self, level: int) -> ValidAfter:
        """What goes with `reached`."""
        return merged(
            bound
            for lane in self.lanes.values()
            for bound in [c.valid_after_at(level) for c in lane.cursors.values()]
            or [lane.valid_after]
        )

    def log(self, consumer: GroupId) -> Log:
        """What is kept for a consumer that shall be rebuilt."""
        lane = self.lanes[consumer]
        short = lane.known_stable < lane.rebuilt_from
        level = min(lane.complete_level, self.complete) if short else self.complete
        return Log(lane.trimmed_upto, self.made, level, lane.valid_after)

    def _sendable(self, consumer: GroupId, lane: _Lane) -> list[SendBundle]:
        ready: list[SendBundle] = []
        for site, cursor in lane.cursors.items():
            if not cursor.subscribed:
                continue
            cursor.next = max(cursor.next, lane.trimmed)
            while cursor.next - lane.trimmed < len(lane.kept):
                epoch, last, bundle, part = lane.kept[cursor.next - lane.trimmed]
                if epoch > cursor.credit:
                    break
                if epoch > cursor.received:
                    ends = (self.exchange, epoch, self.group, consumer)
                    key = BundleKey(*ends, cursor.joined_view, part, last)
                    ready.append(SendBundle(site, key, bundle))
                cursor.next += 1
        return ready

    def _verify(self, lane: _Lane, ack: Ack) -> None:
        """Compare the frames that another replica sent with this one's: they must be the same."""
        if ack.subscribe or ack.finished == NO_EPOCH or not self._deterministic:
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
        """Return the kept bundles, for another replica that may have to send them; only those
        after an epoch, if the other replica has the rest."""
        return {
            consumer: [k for k in lane.kept if after is None or k.epoch > after]
            for consumer, lane in self.lanes.items()
        }

    def gaps(self) -> dict[GroupId, Gap]:
        """What is not here, by consumer."""
        return {
            consumer: Gap(
                lane.trimmed_upto,
                lane.known_stable,
                lane.rebuilt_from,
                lane.complete_level,
                lane.valid_after,
            )
            for consumer, lane in self.lanes.items()
        }

    def install(
        self,
        made: Epoch,
        kept: Mapping[GroupId, Iterable[Kept]],
        gaps: Mapping[GroupId, Gap],
        whole: bool = True,
    ) -> None:
        """Become what another replica was after epoch `made`. Unless `whole`, `kept` has later
        bundles only, and this replica keeps earlier ones that the other one kept, too."""
        self.made = made
        for consumer, gap in gaps.items():
            lane = self.lanes.setdefault(consumer, _Lane())
            if whole:
                lane.kept.clear()
            lane.kept.extend(Kept(*k) for k in kept.get(consumer, ()))
            lane.trimmed_upto = max(lane.trimmed_upto, gap.trimmed_upto)
            lane.known_stable = max(lane.known_stable, gap.known_stable)
            lane.rebuilt_from, lane.complete_level = gap.rebuilt_from, gap.complete_level
            lane.valid_after = merged([lane.valid_after, gap.valid_after])
            while lane.kept and lane.kept[0].epoch <= lane.trimmed_upto:
                lane.kept.popleft()
                lane.trimmed += 1
            self._trim(lane)  # acks may have come before

    def kept(self) -> Iterator[Kept]:
        """All kept bundles, by consumer, the oldest first."""
        for lane in self.lanes.values():
            yield from lane.kept

    def held(self) -> int:
        """Count the kept bundles."""
        return sum(len(lane.kept) for lane in self.lanes.values())

    def slowest(self, but: Mapping[GroupId, Iterable[SiteId]]) -> tuple[SiteId, int] | None:
        """The replica with the most bytes of bundles that it has not received, and how many bytes;
        without the replicas in `but`, which are behind by design."""
        worst: tuple[int, SiteId] | None = None
        for consumer, lane in self.lanes.items():
            for site, cursor in lane.cursors.items():
                if site in but.get(consumer, ()):
                    continue
                waiting = sum(k.bundle.nbytes for k in lane.kept if k.epoch > cursor.received)
                if worst is None or waiting > worst[0]:
                    worst = (waiting, site)
        return None if worst is None else (worst[1], worst[0])

    def check_invariants(self) -> None:
        for consumer, lane in self.lanes.items():
            if not lane.kept:
                continue
            # This runs after every event of a simulated site: no text is made for what holds.
            epochs = [k.epoch for k in lane.kept]
            if epochs != sorted(epochs):
                raise InvariantError(f"partition group {consumer}: kept bundles are out of order")
            oldest = epochs[0]
            if oldest <= self._stable(lane):
                raise InvariantError(f"partition group {consumer}: a stable bundle is kept")
            if not lane.trimmed_upto <= oldest <= lane.trimmed_upto + 1:
                raise InvariantError(f"partition group {consumer}: a bundle is missing")


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
        """Producers have credit up to this epoch, even if the window has shrunk since."""
        self._subscribes = True
        """If not, producers keep bundles for it and send none."""
        self._deterministic = True
        """Whether all replicas of a producer make the same frames."""
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
        subscribes: bool = True,
        deterministic: bool = True,
    ) -> list[SendAck]:
        """Subscribe to one replica of each producer, and acknowledge to all, joining ones included.

        `prefer` names the replicas that are on this site and not behind. A consumer that does not
        compute does not subscribe. If the producer's replicas are not `deterministic`, it
        subscribes to the first.
        """
        self._subscribes, self._deterministic = subscribes, deterministic
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
        """Subscribe to another replica for what this one was sending. Frames may come twice."""
        effects = []
        for producer, source in self.source.items():
            if source == site:
                self._choose(producer, connected, None)
                effects += [a for a in self.acks(connected, needed) if a.ack.producer == producer]
        return effects

    def _choose(self, producer: GroupId, connected: set[SiteId], prefer: SiteId | None) -> None:
        alive = [s for s in self._replicas[producer] if s in connected and self._subscribes]
        if not self._deterministic:
            self.source[producer] = alive[0] if alive else None
        elif prefer is not None and prefer in alive:
            self.source[producer] = prefer
        elif self.source.get(producer) not in alive:
            turn = (producer + self.group) % len(alive) if alive else 0
            self.source[producer] = alive[turn] if alive else None

    def turn(self, connected: set[SiteId], needed: Needed = NOTHING) -> list[SendAck]:
        """Subscribe to the next replica of each producer that the next epoch waits for."""
        effects = []
        for producer, received in self.received.items() if self._deterministic else ():
            alive = [s for s in self._replicas[producer] if s in connected]
            source = self.source.get(producer)
            if received == self.finished and source in alive and len(alive) > 1:
                self.source[producer] = alive[(alive.index(source) + 1) % len(alive)]
                effects += [a for a in self.acks(connected, needed) if a.ack.producer == producer]
        return effects

    @property
    def room(self) -> int:
        """How many epochs ahead producers may send."""
        return max(self._promised - self.finished, self.window)

    def on_bundle(self, key: BundleKey, bundle: Any) -> bool:
        """Accept a bundle; return False for one that came before."""
        seen = self.received.get(key.producer)
        if seen is None:
            raise ProtocolError(
                f"exchange {self.exchange}: bundle from partition group {key.producer}, no producer"
            )
        if key.epoch <= seen:
            return False
        if key.epoch != seen + 1:
            raise ProtocolError(
                f"exchange {self.exchange}: partition group {key.producer} sent epoch {key.epoch} "
                f"after {seen}"
            )
        if key.epoch > self.finished + self.room:
            raise ProtocolError(
                f"exchange {self.exchange}: partition group {key.producer} sent epoch {key.epoch} "
                "without credit"
            )
        expected = self._parts.get(key.producer, 0)
        if key.part < expected:
            return False
        if key.part > expected:
            raise ProtocolError(
                f"exchange {self.exchange}: partition group {key.producer} sent part {key.part} "
                f"of epoch {key.epoch}, not {expected}"
            )
        parts = self._arrived.setdefault(key.epoch, {}).setdefault(key.producer, [])
        parts.append(bundle)
        self._parts[key.producer] = 0 if key.last else key.part + 1
        if key.last:
            self.received[key.producer] = key.epoch
        return True

    def complete(self, epoch: Epoch) -> bool:
        """Whether every producer's frames of `epoch` are here."""
        return min(self.received.values(), default=epoch) >= epoch

    def take(self, epoch: Epoch) -> list[Any]:
        """Remove and return the bundles of an epoch that have arrived, ordered by producer."""
        by_producer = self._arrived.pop(epoch, {})
        self._taken = {p: parts[-1].checksum for p, parts in by_producer.items()}
        return [bundle for p in sorted(by_producer) for bundle in by_producer[p]]

    def count_waiting(self) -> int:
        """Count the epochs with bundles that were not taken."""
        return len(self._arrived)

    def waiting(self) -> list[Epoch]:
        """The epochs with bundles that were not taken, oldest first."""
        return sorted(self._arrived)

    def finish(
        self, epoch: Epoch, connected: set[SiteId], needed: Needed = NOTHING
    ) -> list[SendAck]:
        """The task has processed everything up to `epoch`: acknowledge to all producers."""
        self.finished = epoch
        self._checksum = self._taken
        return self.acks(connected, needed)

    def adopt_checkpoint(
        self, epoch: Epoch, connected: set[SiteId], needed: Needed = NOTHING
    ) -> list[SendAck]:
        """The state is now that after `epoch`: earlier input is no longer needed."""
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
        ack = Ack(
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
            needed.valid_after,
        )
        return SendAck(site, ack)

    def check_invariants(self) -> None:
        finished = self.finished
        for producer, received in self.received.items():
            if received < finished:
                raise InvariantError(f"partition group {producer}: finished ahead of received")
        if self._arrived and min(self._arrived) <= finished:
            raise InvariantError("bundles of a finished epoch are kept")
