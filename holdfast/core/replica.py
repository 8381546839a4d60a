"""One site's replica of a task: how far it is, its ends of the exchanges, and what it owes to
others.

What it may do next follows from what is here; that it may do anything at all, and with whom, is for
the site's `Dataflow` to say, which knows the view. A replica computes, or it is a standby with a
checkpoint, or (of a source or sink) it only is a follower and follows the one that leads.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.core.effects import (
    FollowEpoch,
    HandOver,
    IngestEpochs,
    ProcessBundles,
    ReportReplica,
    SendAck,
    StoreState,
)
from holdfast.core.exchange import Consumer, Producer
from holdfast.core.ids import NO_EPOCH, STORE, Epoch, ExchangeId, GroupId, SiteId, TaskId
from holdfast.core.layout import PartitionGroup, StageShape
from holdfast.core.records import EpochRecord
from holdfast.core.upstream import Gap, Line, Needs, Search, merged

AT_ONCE, AT_ONCE_ROWS = 64, 1 << 16
"""As many epochs, and as many rows, a source that is behind takes together."""
REPLAYED, AT_ONCE_BYTES = 16, 1 << 20
"""As many epochs a stage takes together that is behind, while they have no more bytes: it must
also find time for others that want something of its site."""
AT_ONCE_S = 0.05
"""As much as it takes about so long for is done together, by how long it took the last two times.
Meanwhile the site is deaf; and little is gained by calls that are longer than that."""
EPOCH_ROWS, EPOCH_BYTES = 16, 1 << 10
"""What an epoch counts for, however few rows are in it."""
ROOM_BEHIND = 64
"""For so many epochs a stage has room that is behind."""

Bundles = dict[ExchangeId, list[Any]]


@dataclass(slots=True)
class Replica:
    key: TaskId
    shape: StageShape
    installed: bool
    """Whether its state is in place. Only then it has ends of its exchanges."""
    joined_view: int
    finished: Epoch = NO_EPOCH
    inputs: dict[ExchangeId, Consumer] = field(default_factory=dict)
    outputs: dict[ExchangeId, Producer] = field(default_factory=dict)
    busy: int = 0
    """With how many epochs."""
    amount: int = 0
    """And with how much of their input: rows of a source, bytes otherwise."""
    paces: tuple[float, ...] = ()
    """How many seconds it took for each of that, the last two times."""
    replaying_to: Epoch | None = None
    """A new replica has caught up when it has finished this epoch."""
    handovers: dict[SiteId, Epoch] = field(default_factory=dict)
    """To whom its state goes, once it has finished this epoch; to the `STORE` after no other."""
    handed: dict[SiteId, int] = field(default_factory=dict)
    """To whom its state has been given out, and since which view that replica joins."""
    finished_before: Epoch = NO_EPOCH
    """What it had finished when it was last looked at."""
    needs: Needs | None = None
    """Of a task that is rebuilt if it is lost: from which input its state comes."""
    search: Search | None = None
    """It is being rebuilt, and it is not known yet from where on."""
    standby: bool = False
    """It has a checkpoint, and computes nothing."""
    given: dict[SiteId, Epoch] = field(default_factory=dict)
    """To whom that is a standby it has given its state, and after which epoch that was."""
    follower: bool = False
    """Another replica leads, and this one only follows: see `Guard.follower`."""
    retain_upto: Epoch | None = None
    """What was let go before is not needed any more when nothing up to this epoch is."""

    @property
    def works(self) -> bool:
        """Whether it is to process epochs as they come."""
        return self.installed and not self.standby and not self.follower

    @property
    def received(self) -> Epoch:
        """Up to which epoch it has something of its input: producers have let go of nothing later
        that they keep for it."""
        received = [e for c in self.inputs.values() for e in c.received.values()]
        return max([*received, self.finished])

    def levels(self, count: int, received: Epoch) -> tuple[Epoch, ...]:
        """Up to which epochs it does not need its input any more. One that has other replicas needs
        nothing that it has received."""
        if self.needs is None or self.standby:
            return (received,) * count
        reached = [min(p.reached(k) for p in self.outputs.values()) for k in range(count)]
        self.needs.forget(min(reached))
        return tuple(self.needs.at(epoch) for epoch in reached)

    def lines(self, count: int) -> tuple[Line, ...]:
        """What goes with that: see `holdfast.core.upstream`."""
        if self.needs is None or self.standby or not count:
            return ()
        outputs = self.outputs.values()
        own = [{self.key: min(p.reached(k) for p in outputs)} for k in range(count)]
        return tuple(merged([own[k], *(p.line(k) for p in outputs)]) for k in range(count))

    # --- what it does next ----------------------------------------------------------------------

    def worked(self, seconds: float) -> None:
        """It has done what it was busy with, in so much time."""
        self.paces = (*self.paces[-1:], seconds / max(1, self.amount))
        self.busy = 0

    def _takes_long(self, amount: int) -> bool:
        """Whether so much is too much to be done at once, or it is not known how long it takes."""
        return not self.paces or amount * max(self.paces) > AT_ONCE_S

    def next_epochs(
        self, records: Mapping[Epoch, EpochRecord], recorded: Epoch
    ) -> IngestEpochs | ProcessBundles | None:
        """What it can do now, if anything; from then on it is busy with that."""
        if self.shape.kind == "source":
            due = self._due(records, recorded)
            self.busy = len(due)
            return IngestEpochs(self.key, due) if due else None
        if taken := self._complete():
            self.busy = len(taken)
            *earlier, bundles = taken
            last = Epoch(self.finished + len(taken))
            return ProcessBundles(self.key, last, True, bundles, tuple(earlier))
        return None if self.shape.ordered else self._arrived()

    def _due(
        self, records: Mapping[Epoch, EpochRecord], recorded: Epoch
    ) -> tuple[EpochRecord, ...]:
        """What a source is to do next: an epoch, or several small ones if it is behind; none after
        one after which somebody wants its state."""
        epoch = Epoch(self.finished + 1)
        wanted = min(self.handovers.values(), default=recorded)
        due: list[EpochRecord] = []
        rows = self.amount = 0
        while record := records.get(epoch):
            rows += record.rows
            amount = self.amount + max(record.rows, EPOCH_ROWS)
            if due and (rows > AT_ONCE_ROWS or len(due) == AT_ONCE or epoch > wanted):
                break
            if due and self._takes_long(amount):
                break
            due.append(record)
            self.amount = amount
            epoch = Epoch(epoch + 1)
        return tuple(due)

    def _complete(self) -> list[Bundles]:
        """The bundles of the next epoch, if all of them are here; and of small ones after it, as
        long as a task that has taken another's place has not caught up."""
        taken: list[Bundles] = []
        largest = self.amount = 0
        epoch, upto = Epoch(self.finished + 1), Epoch(self.finished + 1)
        if self.replaying_to is not None and self.shape.kind == "keyed" and self.shape.ordered:
            upto = min([self.replaying_to, *self.handovers.values()])
        while all(c.complete(epoch) for c in self.inputs.values()):
            bundles = self._take(epoch)
            taken.append(bundles)
            nbytes = sum(b.nbytes for found in bundles.values() for b in found)
            largest = max(largest, nbytes, EPOCH_BYTES)
            self.amount += max(nbytes, EPOCH_BYTES)
            if epoch >= upto or len(taken) == REPLAYED:
                break
            if self.amount > AT_ONCE_BYTES or self._takes_long(self.amount + largest):
                break
            epoch = Epoch(epoch + 1)
        return taken

    def _arrived(self) -> ProcessBundles | None:
        """Arrival merging takes what is there, be it of a later epoch: what it causes belongs to
        the epoch that the stage has reached."""
        waiting = sorted({e for c in self.inputs.values() for e in c.waiting()})
        if not waiting:
            return None
        self.busy = self.amount = 1
        return ProcessBundles(self.key, Epoch(self.finished + 1), False, self._take(waiting[0]))

    def _take(self, epoch: Epoch) -> Bundles:
        return {exchange: consumer.take(epoch) for exchange, consumer in self.inputs.items()}

    def follow(self, records: Mapping[Epoch, EpochRecord]) -> list[FollowEpoch]:
        """Of a source that only is a follower: leave epochs out that nobody needs any more."""
        if self.shape.kind != "source":
            return []
        effects: list[FollowEpoch] = []
        stable = min(p.stable for p in self.outputs.values())
        while self.finished < stable and (record := records.get(Epoch(self.finished + 1))):
            self.finished = record.epoch
            for producer in self.outputs.values():
                producer.skip(record.epoch)
            effects.append(FollowEpoch(self.key, record))
        return effects

    def adopt_checkpoint(self, epoch: Epoch, connected: set[SiteId]) -> list[SendAck]:
        """Its state is that after `epoch` now, and what was before is not needed any more."""
        self.finished = epoch
        return [ack for c in self.inputs.values() for ack in c.adopt_checkpoint(epoch, connected)]

    # --- being behind ---------------------------------------------------------------------------

    def replay(self, upto: Epoch | None, window: int) -> None:
        """It is behind until it has finished `upto`, and has room for more as long as it is."""
        self.replaying_to = upto
        behind = upto is not None and self.shape.kind == "keyed"
        for consumer in self.inputs.values():
            consumer.window = max(window, ROOM_BEHIND) if behind else window

    def caught_up(self, window: int) -> list[ReportReplica]:
        if self.replaying_to is None or self.finished < self.replaying_to:
            return []
        self.replay(None, window)
        return [ReportReplica(self.key, "caught_up")]

    def retained(self, levels: int) -> list[ReportReplica]:
        """Say it when all is kept that the task would be rebuilt from: see `retain_upto`."""
        if self.retain_upto is None or self.standby:
            return []
        if self.levels(levels, self.finished)[self.shape.guard.level - 1] < self.retain_upto:
            return []
        self.retain_upto = None
        return [ReportReplica(self.key, "retained")]

    # --- giving its state to others -------------------------------------------------------------

    def hand_over(self, group: PartitionGroup, stored: Epoch | None) -> list[HandOver | StoreState]:
        """To all for whom it is time. `stored` is the last epoch that is known to be stored."""
        effects: list[HandOver | StoreState] = []
        for joiner in [s for s, due in self.handovers.items() if self.finished >= due]:
            del self.handovers[joiner]
            after = self.given.get(joiner)
            self.given[joiner] = self.finished
            if joiner == STORE:  # what was given before may not have become part of a checkpoint
                after = after if after == stored else None
                effects.append(StoreState(self.key, self.finished, after))
                continue
            self.handed[joiner] = group.joined_view_of(joiner)
            kept = {x: p.export(after) for x, p in self.outputs.items()}
            gaps = {x: p.gaps() for x, p in self.outputs.items()}
            effects.append(HandOver(self.key, joiner, self.finished, kept, gaps, after))
        return effects

    def keep_handovers(self, group: PartitionGroup, leads: bool) -> list[SiteId]:
        """Of a new view: only those in it get its state. To whom it was on its way in vain."""
        wanted = group.joining + group.standbys + ((STORE,) if leads else ())
        self.handovers = {s: e for s, e in self.handovers.items() if s in wanted}
        self.given = {s: e for s, e in self.given.items() if s in wanted}
        gone = [
            s for s, n in self.handed.items() if s not in wanted or group.joined_view_of(s) != n
        ]
        for site in gone:
            del self.handed[site]
            self.given.pop(site, None)
        return gone

    def checkpoint(self, standbys: tuple[SiteId, ...]) -> None:
        """Give its state to all that are standbys, unless nothing has happened since the last
        time."""
        for site in standbys:
            if self.given.get(site) != self.finished or self.busy:
                self.handovers[site] = self.finished

    def install_outputs(
        self,
        epoch: Epoch,
        kept: Mapping[ExchangeId, Mapping[GroupId, list[Any]]],
        gaps: Mapping[ExchangeId, Mapping[GroupId, Gap]],
        whole: bool = True,
    ) -> None:
        """Keep what the replica kept that this one's state is from: all of it, or what it had in
        addition to the last time."""
        for exchange, producer in self.outputs.items():
            producer.install(epoch, kept[exchange], gaps[exchange], whole)
