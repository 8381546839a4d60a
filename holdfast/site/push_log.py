"""The push batches of a push source, and their replication to the other replicas of the ingress.

Rows that were pushed cannot be read again. The leading replica therefore numbers them as *push
batches* of bounded size, appends these to its log and sends them to the other replicas before it
uses them. A micro-batch is a *run* of push batches, of which all but the last carry the mark
`more`. A run *enters* the flow, and its pusher gets the answer, once every replica that counts has
its last push batch. So all replicas but one may die, at once or one after the other, and what was
answered is there. If a flow is stored while it runs, the store is one more replica.

Any number of replicas may have different ends of the log when a leader dies: it has sent each of
them another part of what it had. The next leader is the first replica of the next view, not the
most complete one. It may, because all of them have what has entered. The protocol:

- A leadership has a *rank*: that of the view in which it began. Every message of a leader carries
  it. A replica adopts the highest rank that it hears of, and ignores lower ones; a leader that was
  replaced and does not know it gets no more confirmations. It enters nothing and answers nobody.
- A new leader drops a run that it has in part, and keeps whole runs, entered or not. They enter
  when all replicas have them (a pusher that asks is answered then), and before anything new.
- A push batch keeps the lead under which it was made. If two logs have a push batch of one number
  that was made under one lead, they are equal up to there.
- The leader sends nothing to a replica before the replica has said what it has: the number that has
  entered, and under which leads the push batches after it were made (`Holding`). It asks with
  `PushLead` when it begins, and replicas say it unasked in every view and on every connection; so
  it does not matter who learns of a view first.
- The answer is `Known`: up to which number the two logs are equal. The leader sends what follows.
- A replica replaces push batches of its own only by others of the same number, one by one, when it
  has these. It never drops what the leader might not have sent to anybody else: a push batch that
  was answered is at all replicas, and stays there.
- A replica confirms only what it knows to be equal to the leader's log. It lets runs enter when the
  leader says that they have entered (`Known`), and not when they arrive: until then the next leader
  may have others.
- A replica is sent whatever has not entered there. So a push batch leaves a log when it has entered
  everywhere.
- A replica that joins is waited for once it has said what it has, and counts (`PushCounted`) when
  it has what entered before. A new leader does not know about that: it counts the replica again.
- The store gets push batches in order, under the rank of the leader that writes them, and a new
  leader writes again what has not entered. See `Lead` for what is void then.

`PushLog` holds the numbers, and what each replica has. It performs no I/O: every method that
changes it returns effects for `PushReader`, which must execute them in this order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping

from holdfast.core.ids import STORE, SiteId
from holdfast.errors import ProtocolError, require
from holdfast.site.push_entries import (
    AskReplica,
    EnterRun,
    FeedPlace,
    Holding,
    Known,
    Lead,
    LogEffect,
    LogEntry,
    ReleaseRows,
    SendEntry,
    TellKnown,
)
from holdfast.site.push_lane import LaneState, ReplicaLane
from holdfast.site.spill import Held
from holdfast.site.staging import Reply

PUSH_BATCH_BYTES = 4 << 20
"""Total size of the pieces of a push batch. A single piece may be larger."""
PIECES_MAX = 256


class PushLog:
    """One replica's log of a push source. It has the push batches that some replica may lack."""

    def __init__(self) -> None:
        self.leads = False
        self.lead = Lead()
        """This replica's leadership, if it leads."""
        self.submitted = self.entered = self.matched = 0
        """Numbers of the last push batch that this replica has, of the last one that entered the
        flow, and of the last one up to which the log is known to equal that of the leader."""
        self.submitted_at = self.entered_at = FeedPlace()
        self.rank = -1
        """The highest rank of a leader that this replica knows."""
        self._leader: SiteId | None = None
        self._entered_there = 0
        """The number of push batches that have entered at the leader."""
        self._entries: deque[LogEntry] = deque()
        self._lanes: dict[SiteId, ReplicaLane] = {}
        self._replicas: frozenset[SiteId] = frozenset()
        """The other replicas that are not joining, and the store."""
        self._recovered: Lead | None = None
        """The lead of the last push batch that was recovered."""

    # --- state ------------------------------------------------------------------------------------

    @property
    def all_entered(self) -> bool:
        return self.entered == self.submitted

    @property
    def pending(self) -> LogEntry | None:
        """The last push batch of the last run that has not entered."""
        return self._entries[-1] if self._entries and not self.all_entered else None

    def sends_to(self, site: SiteId) -> bool:
        return site in self._lanes

    def holding(self) -> Holding:
        """What this replica has."""
        made: dict[int, int] = {}
        for entry in self._after(self.entered):
            made[entry.lead.rank] = entry.number
        return Holding(self.entered, tuple(made.items()))

    def _entry(self, number: int) -> LogEntry | None:
        at = number - self._entries[0].number if self._entries else -1
        return self._entries[at] if 0 <= at < len(self._entries) else None

    def _after(self, number: int) -> Iterator[LogEntry]:
        while (entry := self._entry(number + 1)) is not None:
            yield entry
            number += 1

    # --- who leads --------------------------------------------------------------------------------

    def on_replicas(
        self,
        leader: SiteId | None,
        others: Mapping[SiteId, int],
        joining: Mapping[SiteId, int],
        rank: int,
        stored: bool,
    ) -> list[LogEffect]:
        """Adopt a view of this rank. `leader` is another replica, or None if this one leads. The
        others have, by site, the view in which they joined; those that are `joining` may have no
        state yet. With `stored` the store is a replica, too."""
        if leader is not None:
            self.leads, self._lanes = False, {}
            if leader != self._leader:
                self._leader, self.matched = leader, self.entered
            return []
        effects = [] if self.leads else self._begin_to_lead(rank)
        lanes = self._lanes
        self._lanes = {
            site: lane
            if (lane := lanes.get(site)) is not None and lane.joined_view == joined_view
            else ReplicaLane(joined_view)
            for site, joined_view in [*others.items(), *joining.items()]
        }
        self._replicas = frozenset(others)
        if stored:
            # Whatever has entered was stored before.
            has = ReplicaLane(0, LaneState.COUNTS, self.entered, self.entered, self.entered)
            self._lanes[STORE] = lanes.get(STORE) or has
            self._replicas |= {STORE}
        new = [s for s, lane in self._lanes.items() if s != STORE and lane is not lanes.get(s)]
        return [*effects, *map(AskReplica, new), *self._send_to_all(), *self._enter()]

    def _begin_to_lead(self, rank: int) -> list[LogEffect]:
        """Lead from this view on, with the whole runs that are here."""
        effects = self.drop_incomplete_run()
        self.leads, self._leader, self._lanes = True, None, {}
        self.rank, self.lead = rank, Lead(rank, self.submitted)
        return effects

    def follow(self, site: SiteId, rank: int) -> bool:
        """Whether to act on a message of a leader: not on that of an earlier one."""
        if self.leads:
            return False  # a later leader is asked when this replica has the view
        if rank > self.rank:
            self.rank, self._leader, self.matched = rank, site, self.entered
        return rank == self.rank and site == self._leader

    # --- the leader's log -------------------------------------------------------------------------

    def submit(
        self, pieces: list[Held], place: FeedPlace, pull_mark: str, reply: Reply | None
    ) -> list[LogEffect]:
        """Append these pieces as a run. `reply` is due when it has entered."""
        batches = list(_batches(pieces))
        for at, rows in enumerate(batches, 1):
            self.submitted += 1
            more = at < len(batches)
            mark = "" if more else pull_mark
            entry = LogEntry(self.submitted, rows, more, place, mark, self.lead)
            self._entries.append(entry)
        self.submitted_at = place
        if reply is not None:
            entry.answers.append((reply, ""))
        return [*self._send_to_all(), *self._enter()]

    def on_asked(self, site: SiteId, holding: Holding) -> tuple[bool, list[LogEffect]]:
        """Note what another replica has, and send what it lacks. From now on no push batch enters
        that it does not have.

        The first result is whether to tell the replica that it counts: that it also has everything
        that has entered before.
        """
        first = self._entries[0].number if self._entries else self.submitted + 1
        if not first - 1 <= holding.entered <= self.submitted:
            raise ProtocolError(
                f"site {site} has {holding.entered} push batches, and the leader {first} to "
                f"{self.submitted}"
            )
        lane = self._lanes[site]
        lane.ask(self._equal_up_to(holding), holding.entered, self.entered)
        return self._confirmed(site, [TellKnown(site, self._known(lane))])

    def on_has(self, site: SiteId, number: int, entered: int) -> tuple[bool, list[LogEffect]]:
        """Note that another replica has the push batches up to `number`, and that those up to
        `entered` have entered there. The first result is that of `on_asked`."""
        lane = self._lanes[site]
        if lane.state is LaneState.UNKNOWN:
            return False, []  # of a replica that was at this site before
        if not entered <= number <= lane.sent:
            raise ProtocolError(f"site {site} confirms {number} of {lane.sent} push batches")
        lane.confirm(number, entered)
        return self._confirmed(site, [])

    def _confirmed(self, site: SiteId, effects: list[LogEffect]) -> tuple[bool, list[LogEffect]]:
        effects = [*effects, *self._send_to(site), *self._enter()]
        return self._lanes[site].reaches(), effects

    def _equal_up_to(self, holding: Holding) -> int:
        """Return the number up to which a replica's log equals this one."""
        number = holding.entered
        for rank, last in holding.made:
            while number < last:
                entry = self._entry(number + 1)
                if entry is None or entry.lead.rank != rank:
                    return number
                number += 1
        return number

    def _known(self, lane: ReplicaLane) -> Known:
        return Known(lane.has, self.entered, self._everywhere())

    def _everywhere(self) -> int:
        """Return the number of push batches that have entered at all replicas."""
        return min([self.entered, *(lane.entered for lane in self._lanes.values())])

    def _send_to_all(self) -> list[LogEffect]:
        return [effect for site in self._lanes for effect in self._send_to(site)]

    def _send_to(self, site: SiteId) -> list[LogEffect]:
        """Send another replica the push batches that it lacks, within the window."""
        lane, effects = self._lanes[site], list[LogEffect]()
        while lane.is_open and (entry := self._entry(lane.sent + 1)) is not None:
            lane.send(entry)
            effects.append(SendEntry(site, entry))
        return effects

    def _waited_for(self) -> int:
        """Return the number of push batches that all replicas have which are waited for."""
        return min(
            [self.submitted]
            + [
                lane.has
                for site, lane in self._lanes.items()
                if site in self._replicas or lane.state is not LaneState.UNKNOWN
            ]
        )

    def _enter(self) -> list[LogEffect]:
        """Enter the runs that all counted replicas have; drop what has entered everywhere."""
        effects = self._enter_up_to(self._waited_for())
        if effects:
            effects += [
                TellKnown(site, self._known(lane))
                for site, lane in self._lanes.items()
                if site != STORE and lane.state is not LaneState.UNKNOWN
            ]
        return effects + self.trim(self._everywhere())

    def _enter_up_to(self, number: int) -> list[LogEffect]:
        """Enter the whole runs up to this number."""
        effects, run = list[LogEffect](), list[LogEntry]()
        for entry in self._after(self.entered):
            if entry.number > number:
                break
            run.append(entry)
            if not entry.more:
                effects.append(EnterRun(tuple(run)))
                self.entered, self.entered_at, run = entry.number, entry.place, []
        return effects

    # --- a follower's log -------------------------------------------------------------------------

    def receive(self, entry: LogEntry) -> list[LogEffect]:
        """Append the next push batch of the leader, in place of one that another leader made. It
        stays in the log: this replica may become the leader while another one lacks it."""
        if entry.number != self.matched + 1:
            return [ReleaseRows(entry)]  # a repeated one
        effects, own = list[LogEffect](), self._entry(entry.number)
        if own is not None and own.lead == entry.lead:
            effects.append(ReleaseRows(entry))
        else:
            effects += self._drop_after(entry.number - 1)
            self._append(entry)
        self.matched = entry.number
        return effects + self._enter_known()

    def _append(self, entry: LogEntry) -> None:
        self._entries.append(entry)
        self.submitted, self.submitted_at = entry.number, entry.place

    def on_known(self, known: Known) -> list[LogEffect]:
        """Learn what the leader knows: runs enter, and the log is trimmed."""
        self.matched = max(self.matched, min(known.matched, self.submitted))
        self._entered_there = max(self._entered_there, known.entered)
        return self._enter_known() + self.trim(known.everywhere)

    def _enter_known(self) -> list[LogEffect]:
        return self._enter_up_to(min(self._entered_there, self.matched))

    # --- both -------------------------------------------------------------------------------------

    def trim(self, number: int) -> list[LogEffect]:
        """Drop the push batches up to `number` that have entered."""
        effects: list[LogEffect] = []
        while self._entries and self._entries[0].number <= min(number, self.entered):
            effects.append(ReleaseRows(self._entries.popleft()))
        return effects

    def _drop_after(self, number: int) -> list[LogEffect]:
        """Drop the push batches after `number`, which have not entered."""
        require(number >= self.entered, f"push batch {self.entered} has entered")
        effects: list[LogEffect] = []
        while self._entries and self._entries[-1].number > number:
            effects.append(ReleaseRows(self._entries.pop()))
        self.submitted = min(self.submitted, number)
        return effects

    def drop_incomplete_run(self) -> list[LogEffect]:
        """Drop the last push batches if their run is not whole. Their leader is gone, and they have
        not entered at any replica."""
        whole = [e for e in self._after(self.entered) if not e.more]
        effects = self._drop_after(whole[-1].number if whole else self.entered)
        self.submitted_at = whole[-1].place if whole else self.entered_at
        return effects

    def recover(self, entry: LogEntry) -> list[LogEffect]:
        """Append a stored push batch of a flow that was lost. It is ignored if it does not follow
        the one before, because another leader than the last has stored it."""
        before, self._recovered = self._recovered, entry.lead
        if before not in (None, entry.lead) and entry.lead.base != self.submitted:
            return [ReleaseRows(entry)]
        if entry.number != self.submitted + 1:
            return [ReleaseRows(entry)]
        self._append(entry)
        effects = self._enter_up_to(entry.number)
        self.matched = self.entered
        return effects + self.trim(self.entered)

    def restore(self, place: FeedPlace, number: int) -> list[LogEffect]:
        """Begin after this push batch."""
        effects: list[LogEffect] = [ReleaseRows(entry) for entry in self._entries]
        self._entries.clear()
        self.entered_at = self.submitted_at = place
        self.entered = self.submitted = self.matched = number
        return effects

    def drop_answers(self) -> None:
        for entry in self._entries:
            entry.answers.clear()

    def check_invariants(self) -> None:
        require(self.entered <= self.submitted, "more push batches have entered than there are")
        require(self.entered <= self.matched or self.leads, "push batches entered unconfirmed")
        numbers = [entry.number for entry in self._entries]
        require(
            numbers == list(range(self.submitted + 1 - len(numbers), self.submitted + 1)),
            "the log has a gap",
        )
        ranks = [entry.lead.rank for entry in self._entries]
        require(ranks == sorted(ranks), "a push batch follows one of a later leader")
        require(
            all(lane.has <= self.submitted for lane in self._lanes.values()),
            "a replica is believed to have more than the leader",
        )


def _batches(pieces: list[Held]) -> Iterator[list[Held]]:
    """Return the pieces of one push batch after another; a single empty one if there are none."""
    batch: list[Held] = []
    nbytes = 0
    for piece in pieces:
        if batch and (nbytes + piece.nbytes > PUSH_BATCH_BYTES or len(batch) == PIECES_MAX):
            yield batch
            batch, nbytes = [], 0
        batch.append(piece)
        nbytes += piece.nbytes
    yield batch
