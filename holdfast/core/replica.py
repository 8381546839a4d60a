"""The state machine of a replica: one site's replica of a task, from the view that assigns it to
the view that removes it.

A view gives the site a role for the task (`Event`, the first group). These events and what happens
at the site (a hand-over begins, breaks off or is complete; the rebuild point is found; the replica
has caught up) drive the states below. `TABLE` has all transitions; `docs/replicas.md` has the
diagram.

The rest follows from the state:

| state      | has state | computes | takes input | further attributes                           |
| ---------- | --------- | -------- | ----------- | -------------------------------------------- |
| JOINING    | no        | no       | no          |                                              |
| INSTALLING | no        | no       | no          | `source_site`: the site that hands over      |
| SEARCHING  | no        | no       | no          | `search`: what producers have reported       |
| REPLAYING  | yes       | yes      | yes         | `replaying_to`: when it has caught up        |
| ACTIVE     | yes       | yes      | yes         |                                              |
| FOLLOWER   | yes       | no       | no          | sources and sinks only                       |
| STANDBY    | yes       | no       | no          | `source_site`: the sender of a checkpoint    |
| RETIRED    | no        | no       | no          |                                              |

Why there are no other states and transitions:

- A replica searches only while it has no state, and only if no replica with state is left.
- A replica that has state computes, is a standby or follows. It knows which one before the view
  does: the view has it as joining until the controller has received its report. So a view that has
  it as joining changes nothing once it has state.
- A standby does not follow, and a follower gets no checkpoints: only keyed stages have standbys,
  only sources and sinks have followers.
- A standby becomes a replica that computes without joining again. The reverse does not happen: a
  replica that has computed is ahead of the checkpoints that it would get, so it joins again, with a
  new `joined_view`. Nor does a replica that has computed become a follower: protection changes for
  keyed stages only. Before the flow starts both do happen, if a site dies and the others are placed
  again.
- A replica that is rebuilt is the only one that joins, so no donor appears while it searches.
- Only a replica that computes replays. A follower that becomes the leader also has epochs to
  process, but the controller does not wait for it.

Two attributes are not states, because they last across transitions. `work` is the order that the
replica executes: an order that begins while the replica replays may end when it is active or
retired. `retain_after` belongs to one view, which may come while the replica replays or when it is
active: when the replica needs no input up to this epoch, it could be rebuilt.

An event without an entry in `TABLE` is either stale, and discarded for the reason in `STALE`, or
contradicts what the replica knows. That is a bug, and raises with the replica's history.
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
    RefuseCheckpoint,
    ReportReplica,
    SendAck,
    SiteEffect,
)
from holdfast.core.events import HandOverBegun, TaskProcessed
from holdfast.core.exchange import Consumer, Producer
from holdfast.core.ids import NO_EPOCH, Epoch, ExchangeId, GroupId, SiteId, TaskId
from holdfast.core.layout import PartitionGroup, Shape, StageShape
from holdfast.core.records import EpochRecord
from holdfast.core.upstream import (
    Gap,
    Log,
    Needed,
    Needs,
    ProducerReplica,
    Search,
    ValidAfter,
    merged,
)
from holdfast.core.work import Work
from holdfast.errors import InvariantError, require

ROOM_BEHIND = 64
"""How many epochs of input a stage that is behind has room for, at least."""
HISTORY_MAX = 32


class State(Enum):
    JOINING = "joining"
    """It waits for a donor to hand its state over."""
    INSTALLING = "installing"
    """A donor's state is coming in."""
    SEARCHING = "searching"
    """No replica has the state. It asks its producers from which epoch on it can be rebuilt."""
    REPLAYING = "replaying"
    """It computes, and has not caught up with what was recorded when it began."""
    ACTIVE = "active"
    """It computes."""
    FOLLOWER = "follower"
    """Another replica of the source or sink leads. It only knows which epochs no consumer needs."""
    STANDBY = "standby"
    """It has a checkpoint, and gets another one at intervals."""
    RETIRED = "retired"
    """A view has removed it."""


class Event(Enum):
    """What happens to a replica. A view gives the replica one of the first six as its role."""

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
"""Events that may arrive late, and why they do not count."""

START = {
    Event.TO_JOIN: State.JOINING,
    Event.TO_REBUILD: State.SEARCHING,
    Event.TO_COMPUTE: State.ACTIVE,
    Event.TO_FOLLOW: State.FOLLOWER,
    Event.TO_STAND_BY: State.STANDBY,
}
"""The state in which a replica begins, by the role that the first view gives it."""


def assigned(group: PartitionGroup, site: SiteId, shape: StageShape) -> Event:
    """The role that a view gives the replica at one of its sites."""
    if site in group.replicas:
        follows = shape.guard.followers and not group.led_by(site)
        return Event.TO_FOLLOW if follows else Event.TO_COMPUTE
    if site in group.standbys:
        return Event.TO_STAND_BY
    return Event.TO_JOIN if group.replicas else Event.TO_REBUILD


class Replica:
    """The machine. It begins with the view that assigns the replica. If the replica has its state
    then, that is the state after the epoch `begun`."""

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
        role: Event,
        begun: Epoch,
        window: int,
    ) -> None:
        self.key, self.shape, self.joined_view = key, shape, joined_view
        self.state = START[role]
        self.history: deque[str] = deque([f"begins {self.state.value}"], maxlen=HISTORY_MAX)
        self._begun = begun
        self.finished = begun if self.has_state else NO_EPOCH
        self.inputs: dict[ExchangeId, Consumer] = {}
        self.outputs: dict[ExchangeId, Producer] = {}
        """The ends of its exchanges, once it has state."""
        self.work = Work()
        self.donor = Donor(key)
        self.search = Search()
        """While it searches: what producers have reported."""
        self.source_site: SiteId | None = None
        """The site that hands its state over to this replica."""
        self.replaying_to: Epoch | None = None
        """While it replays: it has caught up when it has finished this epoch."""
        self.retain_after: Epoch | None = None
        """When it needs no input up to this epoch, producers keep all that it would be rebuilt
        from."""
        self.needs: Needs | None = None
        """The input that its state comes from, if producers keep input longer than until it is
        received."""
        self._levels = 0
        """How many levels of acknowledgement the flow has."""
        self._window = window
        self._hurried = NO_EPOCH

    def __repr__(self) -> str:
        return f"replica of {self.key} ({self.state.value}, after epoch {self.finished})"

    # --- what follows from the state ------------------------------------------------------------

    @property
    def has_state(self) -> bool:
        """Whether it has its state. Only then it takes part in its exchanges."""
        state = self.state
        return not (
            state is State.JOINING
            or state is State.INSTALLING
            or state is State.SEARCHING
            or state is State.RETIRED
        )

    @property
    def computes(self) -> bool:
        """Whether it processes epochs as they arrive. Only then it takes input from producers."""
        return self.state is State.ACTIVE or self.state is State.REPLAYING

    @property
    def follows(self) -> bool:
        return self.state is State.FOLLOWER

    @property
    def stands_by(self) -> bool:
        return self.state is State.STANDBY

    # --- transitions ----------------------------------------------------------------------------

    def _become(self, event: Event) -> bool:
        """Enter the state that `TABLE` has for an event. False if the event is stale."""
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
        self, role: Event, shape: StageShape, members: Collection[SiteId], recorded: Epoch
    ) -> list[SiteEffect]:
        """Act on a view that still has the replica."""
        self.shape, self.retain_after = shape, None
        was = self.state
        self._become(role)
        if was is State.ACTIVE and not self.computes:
            idle = self.finished == self._begun and not self.work.busy
            require(idle, f"{self!r} has computed; history: {list(self.history)}")
        effects: list[SiteEffect] = []
        if self.state is not was:
            effects += self._drop_incoming()
            self.search = Search()
            if was is State.STANDBY:
                self.needs = None  # it is unknown what its state comes from
                self._replay(max(recorded, self.finished))
        if self.source_site is not None and self.source_site not in members:
            effects += self.on_sender_lost(f"site {self.source_site} died")
        return effects

    def retire(self) -> None:
        self._become(Event.REMOVED)

    def on_offered(self, event: HandOverBegun) -> list[SiteEffect]:
        """A site begins to hand over: state to a replica without it, or a checkpoint to a standby.
        This replaces a hand-over that was under way."""
        if not self._become(Event.STATE_OFFERED):
            return []
        if self.stands_by and not self._may_use(event):
            dropped = self._drop_incoming() if self.source_site == event.sender else []
            ends = (self.key, event.sender, self.joined_view)
            return [*dropped, RefuseCheckpoint(*ends, event.epoch, self.finished)]
        self.source_site = event.sender
        return [ReceiveState(self.key, event.sender, event.offer, self.stands_by)]

    def _may_use(self, event: HandOverBegun) -> bool:
        """Whether a standby may replace its checkpoint. Of several standbys the one that takes over
        may have an older one: producers have dropped what this one has said that it has, so it
        never goes back. What has changed since another epoch than its own is of no use."""
        if event.after is None:
            return event.epoch >= self.finished
        return event.after == self.finished

    def on_sender_lost(self, reason: str) -> list[SiteEffect]:
        """The site that was handing over sends nothing more."""
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
        """All of the state has arrived; `enough`: as many others compute as are wanted. False if it
        comes too late."""
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
        """The replica has the state after `epoch`, and replays what was recorded since."""
        self.finished = epoch
        if self.state is State.REPLAYING:
            self._replay(max(recorded, epoch))

    def on_told(self, source: ProducerReplica, log: Log) -> None:
        """A replica of a producer has reported what it has. This replica searches."""
        self.search.told[source] = log

    def rebuild_point(self, wanted: Mapping[ProducerReplica, object]) -> Log | None:
        """From where on the replica can be rebuilt, if all of these producers have reported. It is
        impossible if one of them is complete at no level."""
        log = self.search.begins(wanted) if self.state is State.SEARCHING else None
        if log is not None:
            found = log.complete_level >= 1
            self._become(Event.REBUILD_POINT_FOUND if found else Event.REBUILD_IMPOSSIBLE)
            self.search = Search()
        return log

    def caught_up(self) -> list[SiteEffect]:
        """Report once that the replica has caught up."""
        if self.replaying_to is None or self.finished < self.replaying_to:
            return []
        self._become(Event.CAUGHT_UP)
        self._replay(None)
        return [ReportReplica(self.key, "caught_up")]

    def _replay(self, upto: Epoch | None) -> None:
        """Count as behind until `upto` is finished; a stage that is behind has room for more
        input."""
        self.replaying_to = upto
        for consumer in self.inputs.values():
            consumer.window = self._room

    @property
    def _room(self) -> int:
        behind = self.replaying_to is not None and self.shape.kind == "keyed"
        return max(self._window, ROOM_BEHIND) if behind else self._window

    # --- its exchanges --------------------------------------------------------------------------

    def add_ends(self, shape: Shape, needs: Epoch, log: Log | None = None) -> None:
        """Take part in the exchanges, now that the replica has state."""
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
        """Keep and report what the protection of the task and of its neighbours needs."""
        self._levels = shape.levels
        if not self.shape.guard.level:
            self.needs = None
        elif self.needs is None:  # it is unknown what its state comes from
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
        """Keep the bundles that the donor of the state kept: all of them (`whole`), or those since
        the last checkpoint."""
        for exchange, producer in self.outputs.items():
            producer.install(epoch, kept[exchange], gaps[exchange], whole)

    @property
    def received(self) -> Epoch:
        """The last epoch of which it has some input. Producers have dropped nothing for it after
        that."""
        received = [e for c in self.inputs.values() for e in c.received.values()]
        return max([*received, self.finished])

    @property
    def needed(self) -> Needed:
        """The input that it needs, as it reports it to its producers."""
        count = self._levels
        if not count or self.needs is None or self.state is State.STANDBY:
            return Needed(count)
        return Needed(count, self.levels(count, NO_EPOCH), self.valid_after(count))

    def levels(self, count: int, received: Epoch) -> tuple[Epoch, ...]:
        """By level: the epoch up to which it no longer needs its input. A replica that is not
        rebuilt from input needs nothing that it has received."""
        if self.needs is None or self.state is State.STANDBY:
            return (received,) * count
        reached = [min(p.reached(k) for p in self.outputs.values()) for k in range(count)]
        self.needs.forget(min(reached))
        return tuple(self.needs.at(epoch) for epoch in reached)

    def valid_after(self, count: int) -> tuple[ValidAfter, ...]:
        """By level: what goes with `levels`, see `holdfast.core.upstream`."""
        if self.needs is None or self.state is State.STANDBY or not count:
            return ()
        outputs = self.outputs.values()
        own = [{self.key: min(p.reached(k) for p in outputs)} for k in range(count)]
        return tuple(
            merged([own[k], *(p.valid_after_at(k) for p in outputs)]) for k in range(count)
        )

    def retained(self) -> list[SiteEffect]:
        """Report once that producers keep all that the replica would be rebuilt from."""
        if self.retain_after is None or not self.computes:
            return []
        if self.levels(self._levels, self.finished)[self.shape.guard.level - 1] < self.retain_after:
            return []
        self.retain_after = None
        return [ReportReplica(self.key, "retained")]

    def retain(self) -> list[SiteEffect]:
        """Producers keep from now on all that the replica would be rebuilt from. Until now they
        kept what it has not received."""
        if not self.computes or self.shape.guard.rebuild_level >= self.shape.guard.level:
            return []
        self.retain_after = self.received
        return self.retained()

    # --- going forward --------------------------------------------------------------------------

    def next_order(
        self, records: Mapping[Epoch, EpochRecord], recorded: Epoch
    ) -> IngestEpochs | ProcessBundles | None:
        """Begin the next order of a replica that computes and executes none; None if there is
        nothing to do."""
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
        # The output belongs to the epoch that the stage has reached.
        arrived = work.process_arrived(self.inputs)
        return ProcessBundles(self.key, upto, False, arrived) if arrived else None

    def on_processed(self, event: TaskProcessed, connected: set[SiteId]) -> list[SiteEffect]:
        """An order has ended."""
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
        """Skip the epochs of a source that no consumer needs any more."""
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
        """The state is that after `epoch` now; input up to it is no longer needed."""
        self.finished = epoch
        needed = self.needed
        return [
            ack
            for c in self.inputs.values()
            for ack in c.adopt_checkpoint(epoch, connected, needed)
        ]

    def is_stuck(self, recorded: Epoch) -> bool:
        """Whether it has epochs to process and has finished none since the last call."""
        stuck = self.computes and not self.work.busy and self.finished == self._hurried
        self._hurried = self.finished
        return stuck and self.finished < recorded

    def check_invariants(self) -> None:
        """Raise unless the attributes fit the state."""
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
        if not sound:  # the text is made only when needed: this runs after every event
            raise InvariantError(
                f"{self!r} replays to {self.replaying_to}, gets state from {self.source_site}, is "
                f"busy with {self.work.busy} and owes to {list(self.donor.due)}; "
                f"history: {list(self.history)}"
            )
