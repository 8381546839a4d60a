"""The life of a replica: one site's replica of a task, from the view that assigns it to the one
that removes it.

A view says what the site is to a task (`Event`, the first group). Together with what happens at
the site (a hand-over begins, breaks off, is complete; the rebuild point is found; the replica has
caught up) that drives the states below. `TABLE` is all of it; `docs/replicas.md` has the picture.

What used to be flags follows from the state:

| state      | has state | computes | takes input | what is known beside it                      |
| ---------- | --------- | -------- | ----------- | -------------------------------------------- |
| JOINING    | no        | no       | no          |                                              |
| INSTALLING | no        | no       | no          | `source_site`: who hands over                |
| SEARCHING  | no        | no       | no          | `search`: what producers have said           |
| REPLAYING  | yes       | yes      | yes         | `replaying_to`: when it has caught up        |
| ACTIVE     | yes       | yes      | yes         |                                              |
| FOLLOWER   | yes       | no       | no          | sources and sinks only                       |
| STANDBY    | yes       | no       | no          | `source_site`: who sends a checkpoint, if any |
| RETIRED    | no        | no       | no          |                                              |

Six flags could have been set in 64 ways; these are all that occurred, and why:

- A replica searches only while it has no state, and only if no replica with state is left.
- A replica that has state computes, is a standby or follows. Which one, it knows before the view
does:
  the view still has it as joining until the controller has heard of it. So a view that has it join
  changes nothing once it has state.
- A standby has no followers' work, and a follower no checkpoints: only keyed stages have standbys,
  only sources and sinks have followers.
- A standby becomes a replica that computes where it is. The reverse does not happen: a replica
  that has computed is ahead of what it would be given, so it joins again, in a new joined_view.
  Nor does one that has computed come to follow: protection changes for keyed stages only. Before
  the flow starts both do happen, if a site dies and the others are placed again.
- A replica that is rebuilt is the only one that joins, so no donor appears while it searches.
- Only a replica that computes replays. A follower that comes to lead has work to do, too, but
  nobody waits to hear that it is done.

Two things are not states, because they go on across transitions. `work` is the order that the
replica is busy with: given while it replays, it may be done when the replica is active or
retired. `retain_after` is the
epoch up to which nothing may be needed any more until the replica could be rebuilt; it belongs to
one view, which may come while the replica replays or when it is active.

An event that has no entry in `TABLE` is either stale, and discarded for the reason in `STALE`, or
contradicts what the replica knows: that is a bug, and raises with the replica's history.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping
from enum import Enum
from typing import Any

from holdfast.core.donor import Donor
from holdfast.core.effects import (
    DiscardState,
    FollowEpoch,
    IngestEpochs,
    ProcessBundles,
    ReceiveState,
    ReportReplica,
    SendAck,
    SiteEffect,
)
from holdfast.core.events import TaskProcessed
from holdfast.core.exchange import Consumer, Producer
from holdfast.core.ids import NO_EPOCH, Epoch, ExchangeId, GroupId, SiteId, TaskId
from holdfast.core.layout import PartitionGroup, Shape, StageShape
from holdfast.core.records import EpochRecord
from holdfast.core.upstream import Gap, Line, Log, Needed, Needs, Search, Source, merged
from holdfast.core.work import Work
from holdfast.errors import InvariantError, require

ROOM_BEHIND = 64
"""For so many epochs a stage has room that is behind."""
HISTORY_MAX = 32


class State(Enum):
    JOINING = "joining"
    """It waits for a donor to hand its state over."""
    INSTALLING = "installing"
    """A donor's state is coming in."""
    SEARCHING = "searching"
    """Nobody has the state. It asks its producers from where on it can be rebuilt."""
    REPLAYING = "replaying"
    """It computes, and has not caught up with what was recorded when it began."""
    ACTIVE = "active"
    """It computes."""
    FOLLOWER = "follower"
    """Another replica of the source or sink leads. It only knows what nobody needs any more."""
    STANDBY = "standby"
    """It has a checkpoint, and gets another one now and then."""
    RETIRED = "retired"
    """A view has removed it."""


class Event(Enum):
    """What happens to a replica. A view says one of the first six."""

    TO_JOIN = "the view has it join, and a donor"
    TO_REBUILD = "the view has it join, and no donor"
    TO_COMPUTE = "the view has it compute"
    TO_FOLLOW = "the view has it follow"
    TO_STAND_BY = "the view has it stand by"
    REMOVED = "the view does not have it"
    STATE_OFFERED = "a site begins to hand state over"
    SENDER_LOST = "the site that hands over is lost"
    STATE_COMPLETE = "all of the state is there"
    STATE_COMPLETE_TO_FOLLOW = "all of the state is there, to follow with"
    STATE_COMPLETE_TO_STAND_BY = "all of the state is there, to stand by with"
    REBUILD_POINT_FOUND = "all producers have what it needs"
    REBUILD_IMPOSSIBLE = "a producer does not have what it needs"
    CAUGHT_UP = "it has finished what was recorded"


_S, _E = State, Event

TABLE: dict[tuple[State, Event], State] = {
    (_S.JOINING, _E.TO_JOIN): _S.JOINING,
    (_S.JOINING, _E.TO_REBUILD): _S.SEARCHING,
    (_S.JOINING, _E.REMOVED): _S.RETIRED,
    (_S.JOINING, _E.STATE_OFFERED): _S.INSTALLING,
    (_S.INSTALLING, _E.TO_JOIN): _S.INSTALLING,
    (_S.INSTALLING, _E.TO_REBUILD): _S.SEARCHING,
    (_S.INSTALLING, _E.REMOVED): _S.RETIRED,
    (_S.INSTALLING, _E.STATE_OFFERED): _S.INSTALLING,
    (_S.INSTALLING, _E.SENDER_LOST): _S.JOINING,
    (_S.INSTALLING, _E.STATE_COMPLETE): _S.REPLAYING,
    (_S.INSTALLING, _E.STATE_COMPLETE_TO_FOLLOW): _S.FOLLOWER,
    (_S.INSTALLING, _E.STATE_COMPLETE_TO_STAND_BY): _S.STANDBY,
    (_S.SEARCHING, _E.TO_REBUILD): _S.SEARCHING,
    (_S.SEARCHING, _E.REMOVED): _S.RETIRED,
    (_S.SEARCHING, _E.REBUILD_POINT_FOUND): _S.REPLAYING,
    (_S.SEARCHING, _E.REBUILD_IMPOSSIBLE): _S.SEARCHING,
    (_S.REPLAYING, _E.TO_JOIN): _S.REPLAYING,
    (_S.REPLAYING, _E.TO_REBUILD): _S.REPLAYING,
    (_S.REPLAYING, _E.TO_COMPUTE): _S.REPLAYING,
    (_S.REPLAYING, _E.REMOVED): _S.RETIRED,
    (_S.REPLAYING, _E.CAUGHT_UP): _S.ACTIVE,
    (_S.ACTIVE, _E.TO_JOIN): _S.ACTIVE,
    (_S.ACTIVE, _E.TO_REBUILD): _S.ACTIVE,
    (_S.ACTIVE, _E.TO_COMPUTE): _S.ACTIVE,
    (_S.ACTIVE, _E.TO_FOLLOW): _S.FOLLOWER,  # only before the flow starts
    (_S.ACTIVE, _E.TO_STAND_BY): _S.STANDBY,  # only before the flow starts
    (_S.ACTIVE, _E.REMOVED): _S.RETIRED,
    (_S.FOLLOWER, _E.TO_JOIN): _S.FOLLOWER,
    (_S.FOLLOWER, _E.TO_FOLLOW): _S.FOLLOWER,
    (_S.FOLLOWER, _E.TO_COMPUTE): _S.ACTIVE,
    (_S.FOLLOWER, _E.REMOVED): _S.RETIRED,
    (_S.STANDBY, _E.TO_JOIN): _S.STANDBY,
    (_S.STANDBY, _E.TO_REBUILD): _S.STANDBY,
    (_S.STANDBY, _E.TO_STAND_BY): _S.STANDBY,
    (_S.STANDBY, _E.TO_COMPUTE): _S.REPLAYING,
    (_S.STANDBY, _E.REMOVED): _S.RETIRED,
    (_S.STANDBY, _E.STATE_OFFERED): _S.STANDBY,
    (_S.STANDBY, _E.SENDER_LOST): _S.STANDBY,
    (_S.STANDBY, _E.STATE_COMPLETE_TO_STAND_BY): _S.STANDBY,
}

_HAS_STATE = "it has its state, and computes or follows"
STALE: dict[tuple[State, Event], str] = {
    (_S.JOINING, _E.STATE_COMPLETE): "the hand-over was broken off",
    (_S.JOINING, _E.STATE_COMPLETE_TO_FOLLOW): "the hand-over was broken off",
    (_S.JOINING, _E.STATE_COMPLETE_TO_STAND_BY): "the hand-over was broken off",
    (_S.SEARCHING, _E.STATE_OFFERED): "no replica is left that could hand over",
    (_S.SEARCHING, _E.STATE_COMPLETE): "no replica is left that could hand over",
    (_S.SEARCHING, _E.STATE_COMPLETE_TO_FOLLOW): "no replica is left that could hand over",
    (_S.SEARCHING, _E.STATE_COMPLETE_TO_STAND_BY): "no replica is left that could hand over",
} | {
    (state, event): _HAS_STATE
    for state in (_S.REPLAYING, _S.ACTIVE, _S.FOLLOWER)
    for event in (
        _E.STATE_OFFERED,
        _E.STATE_COMPLETE,
        _E.STATE_COMPLETE_TO_FOLLOW,
        _E.STATE_COMPLETE_TO_STAND_BY,
    )
}
"""What may arrive late, and why it does not count."""

START = {
    Event.TO_JOIN: State.JOINING,
    Event.TO_REBUILD: State.SEARCHING,
    Event.TO_COMPUTE: State.ACTIVE,
    Event.TO_FOLLOW: State.FOLLOWER,
    Event.TO_STAND_BY: State.STANDBY,
}
"""The state in which a replica begins, by what the first view says that has it."""


def assigned(group: PartitionGroup, site: SiteId, shape: StageShape) -> Event:
    """What a view says of the replica at a site that is in it."""
    if site in group.replicas:
        follows = shape.guard.followers and not group.led_by(site)
        return Event.TO_FOLLOW if follows else Event.TO_COMPUTE
    if site in group.standbys:
        return Event.TO_STAND_BY
    return Event.TO_JOIN if group.replicas else Event.TO_REBUILD


class Replica:
    """The machine. It begins with the view that assigns it; `finished` is the epoch that the flow
    begins after, if it has its state then."""

    __slots__ = (
        "_begun",
        "_hurried",
        "_levels",
        "_window",
        "donor",
        "finished",
        "history",
        "inputs",
        "joined_view",
        "key",
        "needs",
        "outputs",
        "replaying_to",
        "retain_after",
        "search",
        "shape",
        "source_site",
        "state",
        "work",
    )  # fmt: skip

    def __init__(
        self,
        key: TaskId,
        shape: StageShape,
        joined_view: int,
        says: Event,
        begun: Epoch,
        window: int,
    ) -> None:
        self.key, self.shape, self.joined_view = key, shape, joined_view
        self.state = START[says]
        self.history: deque[str] = deque([f"begins {self.state.value}"], maxlen=HISTORY_MAX)
        self._begun = begun
        self.finished = begun if self.has_state else NO_EPOCH
        self.inputs: dict[ExchangeId, Consumer] = {}
        self.outputs: dict[ExchangeId, Producer] = {}
        """The ends of its exchanges, once it has state."""
        self.work = Work()
        self.donor = Donor(key)
        self.search = Search()
        """While it is searching: what producers have said."""
        self.source_site: SiteId | None = None
        """Whose state is coming in."""
        self.replaying_to: Epoch | None = None
        """While it is replaying: it has caught up when it has finished this epoch."""
        self.retain_after: Epoch | None = None
        """All that it would be rebuilt from is kept when it needs nothing up to this epoch."""
        self.needs: Needs | None = None
        """If its input is kept for longer than until it is received: what its state comes from."""
        self._levels = 0
        """How many levels of acknowledgement the flow has."""
        self._window = window
        self._hurried = NO_EPOCH

    def __repr__(self) -> str:
        return f"replica of {self.key} ({self.state.value}, after epoch {self.finished})"

    # --- what follows from the state ------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Only then it has ends of its exchanges."""
        state = self.state
        return not (
            state is State.JOINING
            or state is State.INSTALLING
            or state is State.SEARCHING
            or state is State.RETIRED
        )

    @property
    def computes(self) -> bool:
        """Whether it processes epochs as they come. Only then it takes input from others."""
        return self.state is State.ACTIVE or self.state is State.REPLAYING

    @property
    def follows(self) -> bool:
        return self.state is State.FOLLOWER

    @property
    def stands_by(self) -> bool:
        return self.state is State.STANDBY

    # --- transitions ----------------------------------------------------------------------------

    def _become(self, event: Event) -> bool:
        """Take the edge of `TABLE`; False if the event is stale."""
        edge = (self.state, event)
        state = TABLE.get(edge)
        if state is None:
            reason = STALE.get(edge)
            if reason is None:
                raise InvariantError(
                    f"{self!r}: {event.value}, which cannot be; history: {list(self.history)}"
                )
            self.history.append(f"{self.state.value}: discarded that {event.value}: {reason}")
            return False
        if state is not self.state:
            self.history.append(f"{self.state.value} -> {state.value}: {event.value}")
            self.state = state
        return True

    def on_view(
        self, says: Event, shape: StageShape, members: Collection[SiteId], recorded: Epoch
    ) -> list[SiteEffect]:
        """A view that still has the replica."""
        self.shape, self.retain_after = shape, None
        was = self.state
        self._become(says)
        if was is State.ACTIVE and not self.computes:
            idle = self.finished == self._begun and not self.work.busy
            require(idle, f"{self!r} has computed; history: {list(self.history)}")
        effects: list[SiteEffect] = []
        if self.state is not was:
            effects += self._drop_incoming()
            self.search = Search()
            if was is State.STANDBY:
                self.needs = None  # what its state comes from was not followed
                self._replay(max(recorded, self.finished))
        if self.source_site is not None and self.source_site not in members:
            effects += self.on_sender_lost(f"site {self.source_site} died")
        return effects

    def retire(self) -> None:
        self._become(Event.REMOVED)

    def on_offered(self, sender: SiteId, offer: Any) -> list[SiteEffect]:
        """A site begins to hand over: to a replica without state, or a checkpoint to a standby. If
        another hand-over was under way, it is given up."""
        if not self._become(Event.STATE_OFFERED):
            return []
        self.source_site = sender
        return [ReceiveState(self.key, sender, offer, self.stands_by)]

    def on_sender_lost(self, reason: str) -> list[SiteEffect]:
        """Nothing more comes from the site that was handing over."""
        was = self.state
        self._become(Event.SENDER_LOST)
        effects = self._drop_incoming()
        if was is State.INSTALLING:
            effects.append(ReportReplica(self.key, "failed", reason))
        return effects

    def _drop_incoming(self) -> list[SiteEffect]:
        if self.source_site is None:
            return []
        self.source_site = None
        return [DiscardState(self.key)]

    def installs(self, enough: bool) -> bool:
        """All of the state is there; `enough` others compute. False if it comes too late."""
        if self.shape.guard.followers:
            event = Event.STATE_COMPLETE_TO_FOLLOW
        elif self.stands_by or (enough and self.shape.guard.standbys > 0):
            event = Event.STATE_COMPLETE_TO_STAND_BY
        else:
            event = Event.STATE_COMPLETE
        if not self._become(event):
            return False
        self.source_site = None
        return True

    def begins_at(self, epoch: Epoch, recorded: Epoch) -> None:
        """It has the state after `epoch` from now on, and replays what was recorded."""
        self.finished = epoch
        if self.state is State.REPLAYING:
            self._replay(max(recorded, epoch))

    def on_told(self, source: Source, log: Log) -> None:
        """While it is searching: a replica of a producer has said what it has."""
        self.search.told[source] = log

    def rebuild_point(self, wanted: Mapping[Source, object]) -> Log | None:
        """From where on the replica can be rebuilt, if all of these producers have said it; one
        that says that it is complete at no level makes it impossible."""
        log = self.search.begins(wanted) if self.state is State.SEARCHING else None
        if log is not None:
            found = log.credit >= 1
            self._become(Event.REBUILD_POINT_FOUND if found else Event.REBUILD_IMPOSSIBLE)
            self.search = Search()
        return log

    def caught_up(self) -> list[SiteEffect]:
        """Report it, once."""
        if self.replaying_to is None or self.finished < self.replaying_to:
            return []
        self._become(Event.CAUGHT_UP)
        self._replay(None)
        return [ReportReplica(self.key, "caught_up")]

    def _replay(self, upto: Epoch | None) -> None:
        """It is behind until it has finished `upto`, and has room for more as long as it is."""
        self.replaying_to = upto
        for consumer in self.inputs.values():
            consumer.window = self._room

    @property
    def _room(self) -> int:
        behind = self.replaying_to is not None and self.shape.kind == "keyed"
        return max(self._window, ROOM_BEHIND) if behind else self._window

    # --- its exchanges --------------------------------------------------------------------------

    def add_ends(self, shape: Shape, needs: Epoch, log: Log | None = None) -> None:
        """It has state: from now on it takes part in its exchanges."""
        group = self.key[1]
        self.needs = Needs(self.finished, needs)
        for exchange in self.shape.outputs:
            level = shape.stages[shape.consumer_of[exchange]].guard.level
            self.outputs[exchange] = Producer(exchange, group, level, self.finished, log)
        for exchange in self.shape.inputs:
            self.inputs[exchange] = Consumer(
                exchange, group, self._room, self.finished, self.joined_view
            )
        self.protect(shape)

    def protect(self, shape: Shape) -> None:
        """Keep, and say, what the protection of the task and of its neighbours takes."""
        self._levels = shape.levels
        if not self.shape.guard.level:
            self.needs = None
        elif self.needs is None:  # what its state comes from was not followed
            self.needs = Needs(self.finished, NO_EPOCH)
        for exchange, producer in self.outputs.items():
            guard = shape.stages[shape.consumer_of[exchange]].guard
            producer.protect(guard.level, guard.rebuild_level, self.shape.guard.comparable)

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

    @property
    def received(self) -> Epoch:
        """Up to which epoch it has something of its input: producers have dropped nothing later
        that they keep for it."""
        received = [e for c in self.inputs.values() for e in c.received.values()]
        return max([*received, self.finished])

    @property
    def needed(self) -> Needed:
        """What it tells its producers that it needs of its input."""
        count = self._levels
        if not count or self.needs is None or self.state is State.STANDBY:
            return Needed(count)
        return Needed(count, self.levels(count, NO_EPOCH), self.lines(count))

    def levels(self, count: int, received: Epoch) -> tuple[Epoch, ...]:
        """Up to which epochs it does not need its input any more. One that has other replicas needs
        nothing that it has received."""
        if self.needs is None or self.state is State.STANDBY:
            return (received,) * count
        reached = [min(p.reached(k) for p in self.outputs.values()) for k in range(count)]
        self.needs.forget(min(reached))
        return tuple(self.needs.at(epoch) for epoch in reached)

    def lines(self, count: int) -> tuple[Line, ...]:
        """What goes with that: see `holdfast.core.upstream`."""
        if self.needs is None or self.state is State.STANDBY or not count:
            return ()
        outputs = self.outputs.values()
        own = [{self.key: min(p.reached(k) for p in outputs)} for k in range(count)]
        return tuple(merged([own[k], *(p.line(k) for p in outputs)]) for k in range(count))

    def retained(self) -> list[SiteEffect]:
        """Report when all is kept that the replica would be rebuilt from."""
        if self.retain_after is None or not self.computes:
            return []
        if self.levels(self._levels, self.finished)[self.shape.guard.level - 1] < self.retain_after:
            return []
        self.retain_after = None
        return [ReportReplica(self.key, "retained")]

    def retain(self) -> list[SiteEffect]:
        """From now on producers keep all that it would be rebuilt from; before, they dropped
        nothing that it has not received by now."""
        if not self.computes or self.shape.guard.rebuild_level >= self.shape.guard.level:
            return []
        self.retain_after = self.received
        return self.retained()

    # --- going forward --------------------------------------------------------------------------

    def next_order(
        self, records: Mapping[Epoch, EpochRecord], recorded: Epoch
    ) -> IngestEpochs | ProcessBundles | None:
        """Of a replica that computes and is not busy: what it can do now. It is busy from then
        on."""
        work, after = self.work, self.finished
        if self.shape.kind == "source":
            due = work.ingest(records, after, self.donor.upto(recorded))
            return IngestEpochs(self.key, due) if due else None
        upto = Epoch(after + 1)
        if self.replaying_to is not None and self.shape.kind == "keyed" and self.shape.ordered:
            upto = min(self.replaying_to, self.donor.upto(self.replaying_to))
        if taken := work.process(self.inputs, after, upto):
            *earlier, bundles = taken
            last = Epoch(after + len(taken))
            return ProcessBundles(self.key, last, True, bundles, tuple(earlier))
        if self.shape.ordered:
            return None
        # What that causes belongs to the epoch that the stage has reached.
        arrived = work.process_arrived(self.inputs)
        return ProcessBundles(self.key, upto, False, arrived) if arrived else None

    def on_processed(self, event: TaskProcessed, connected: set[SiteId]) -> list[SiteEffect]:
        """An order was carried out."""
        first = Epoch(event.epoch - len(event.earlier))
        asked = self.work.busy == len(event.earlier) + 1
        require(asked, f"stage {self.shape.name!r} was not asked to process epoch {event.epoch}")
        self.work.done(event.seconds)
        effects: list[SiteEffect] = []
        for epoch, outputs in enumerate((*event.earlier, event.outputs), first):
            for exchange, bundles in outputs.items():
                effects += self.outputs[exchange].offer(Epoch(epoch), event.last, bundles)
        if event.last:
            require(first == self.finished + 1, f"epoch {first} was skipped")
            self.finished = event.epoch
            if self.needs is not None:
                self.needs.processed(event.epoch, event.needs)
            needed = self.needed
            for consumer in self.inputs.values():
                effects += consumer.finish(event.epoch, connected, needed)
        return effects

    def follow(self, records: Mapping[Epoch, EpochRecord]) -> list[SiteEffect]:
        """Of a source that follows: leave epochs out that nobody needs any more."""
        if self.shape.kind != "source":
            return []
        effects: list[SiteEffect] = []
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
        needed = self.needed
        return [
            ack
            for c in self.inputs.values()
            for ack in c.adopt_checkpoint(epoch, connected, needed)
        ]

    def is_stuck(self, recorded: Epoch) -> bool:
        """Whether it has something to do, and has not moved since this was asked the last time."""
        stuck = self.computes and not self.work.busy and self.finished == self._hurried
        self._hurried = self.finished
        return stuck and self.finished < recorded

    def check_invariants(self) -> None:
        """What goes with each state is there, and nothing else."""
        state, computes = self.state, self.computes
        sound = (
            (state is State.REPLAYING) == (self.replaying_to is not None)
            and self.has_state == bool(self.outputs or self.inputs)
            and (state is State.INSTALLING or self.source_site is None or state is State.STANDBY)
            and (state is not State.INSTALLING or self.source_site is not None)
            and (state is State.SEARCHING or not self.search.told)
            and (computes or not self.work.busy)
            and (computes or state is State.FOLLOWER or not self.donor.due)
        )
        if not sound:  # the text is made only if it is needed: this is asked after every event
            raise InvariantError(
                f"{self!r} replays to {self.replaying_to}, gets state from {self.source_site}, is "
                f"busy with {self.work.busy} and owes to {list(self.donor.due)}; "
                f"history: {list(self.history)}"
            )
