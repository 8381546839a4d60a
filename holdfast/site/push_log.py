"""The push batches of a push source, and their replication to the other replicas of the ingress.

Rows that were pushed cannot be read again. The leading replica therefore numbers them as *push
batches* of bounded size and sends these to the other replicas before it uses them. A micro-batch is
a *run* of push batches, of which all but the last carry the mark `more`. A run *enters* the flow
once every replica that counts has its last push batch.

A replica that becomes the leader drops a run of which it has only a part: no replica has entered
any of it, and the driver pushes the micro-batch again.

If a flow is stored while it runs, the store is one more replica.

`PushLog` holds the numbers, and what each replica has. It performs no I/O: every method that
changes it returns effects for `PushReader`, which must execute them in this order.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

from holdfast.core.ids import STORE, SiteId
from holdfast.net import wire
from holdfast.site.spill import Held
from holdfast.site.staging import Reply

PUSH_BATCH_BYTES = 4 << 20
"""Total size of the pieces of a push batch. A single piece may be larger."""
PIECES_MAX = 256
WINDOW_BYTES = 16 << 20
"""Bytes that may be sent to another replica before it confirms them."""


@dataclass(frozen=True, slots=True)
class Lead:
    """A leadership of the ingress: the rank of the view in which it began, and the number of push
    batches that had entered then. Later push batches of earlier leaders are void."""

    rank: int = 0
    base: int = 0


@dataclass(frozen=True, slots=True)
class FeedPlace:
    """The position of a feed after a push batch. It distinguishes rows that were taken from new
    ones."""

    query: str = ""
    committed: int = -1
    """The last micro-batch of the query that was taken."""
    total: int = 0
    """Through: the number of rows that were taken."""
    ended: bool = False

    @classmethod
    def after(cls, message: wire.PushBatch) -> FeedPlace:
        return cls.restored(message.marks, message.query)

    @classmethod
    def restored(cls, marks: dict[str, int], query: str) -> FeedPlace:
        return cls(query, marks["committed"], marks["total"], bool(marks["ended"]))

    def marks(self) -> dict[str, int]:
        return {"committed": self.committed, "total": self.total, "ended": int(self.ended)}

    def refusal(self, query: str, batch: int) -> str:
        """Return why a micro-batch cannot be taken here; empty if it can."""
        if self.committed < 0:
            return ""  # nothing was taken yet, so nothing can be missing or come twice
        if self.query and query != self.query:
            return (
                f"the flow is fed by the streaming query with id {self.query}, and this is query "
                f"{query}: its checkpoint location is another one, and so are its micro-batches. "
                "Start it with the checkpoint location that the flow was fed from "
                "(spark_stream(df, checkpoint=...), the same in all applications); to begin with "
                "this one, start the flow without restore_from="
            )
        if batch in (self.committed, self.committed + 1):
            return ""
        return (
            f"micro-batch {batch} of query {query} does not follow on {self.committed}, the last "
            "one that the flow has: "
            + (
                "the checkpoint location was set back. "
                if batch < self.committed
                else "those between were given to another flow with this checkpoint location. "
            )
            + "Start the query with the checkpoint location as it was when the flow was last fed; "
            "to begin with this one, start the flow without restore_from="
        )


@dataclass(slots=True, eq=False)
class LogEntry:
    """A push batch in the log."""

    number: int
    rows: list[Held]
    more: bool
    """Whether it enters the flow only together with the next one."""
    place: FeedPlace
    pull_mark: str = ""
    """The position of a pull source after these rows."""
    answers: list[tuple[Reply, str]] = field(default_factory=list)
    """Replies to pushers, with their remarks, that are due when the run has entered."""

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.rows)


@dataclass(frozen=True, slots=True)
class SendEntry:
    """Send a push batch to another replica, or to the store."""

    site: SiteId
    entry: LogEntry
    everywhere: int
    """The number of push batches that all replicas have."""


@dataclass(frozen=True, slots=True)
class EnterRun:
    """Let the rows of these push batches, which are a whole run, enter the flow."""

    entries: tuple[LogEntry, ...]


@dataclass(frozen=True, slots=True)
class ReleaseRows:
    """Release the rows of a push batch that left the log."""

    entry: LogEntry


LogEffect: TypeAlias = SendEntry | EnterRun | ReleaseRows


@dataclass(slots=True, eq=False)
class ReplicaLane:
    """The push batches that another replica has, and those that are on their way to it."""

    has: int = 0
    sent: int = 0
    counts_from: int | None = None
    """The number of push batches that it must have before the leader tells it that it counts. None
    if it knows, or does not count."""
    _unconfirmed: deque[tuple[int, int]] = field(default_factory=deque)
    """Numbers and sizes of the push batches that were sent."""
    _unconfirmed_bytes: int = 0

    @property
    def is_open(self) -> bool:
        return self._unconfirmed_bytes < WINDOW_BYTES

    def send(self, entry: LogEntry) -> None:
        self.sent = entry.number
        self._unconfirmed.append((entry.number, entry.nbytes))
        self._unconfirmed_bytes += entry.nbytes

    def confirm(self, number: int) -> None:
        self.has = max(self.has, number)
        while self._unconfirmed and self._unconfirmed[0][0] <= self.has:
            self._unconfirmed_bytes -= self._unconfirmed.popleft()[1]

    def resend_after(self, number: int) -> None:
        """Send everything after this push batch again: it may have been lost."""
        self.confirm(number)
        self.sent, self._unconfirmed_bytes = self.has, 0
        self._unconfirmed.clear()


class PushLog:
    """One replica's log of a push source. It has the push batches that some replica may lack."""

    def __init__(self) -> None:
        self.leads = False
        self.lead = Lead()
        self.submitted = self.entered = 0
        """Numbers of the last push batch that this replica has, and of the last one that entered
        the flow."""
        self.submitted_at = self.entered_at = FeedPlace()
        self._entries: deque[LogEntry] = deque()
        self._run_ends: deque[LogEntry] = deque()
        """The last push batches of the leader's runs that have not entered."""
        self._lanes: dict[SiteId, ReplicaLane] = {}
        self._counted: set[SiteId] = set()
        """The replicas that must have a push batch before it enters."""

    # --- state ------------------------------------------------------------------------------------

    @property
    def all_entered(self) -> bool:
        return self.entered == self.submitted

    @property
    def pending(self) -> LogEntry | None:
        """The last push batch of the last run that has not entered."""
        return self._run_ends[-1] if self._run_ends else None

    def sends_to(self, site: SiteId) -> bool:
        return site in self._lanes

    def is_stored(self, number: int) -> bool:
        """Whether the store has this push batch; also true if there is no store."""
        store = self._lanes.get(STORE)
        return store is None or number <= store.has

    # --- the leader's log -------------------------------------------------------------------------

    def submit(
        self, pieces: list[Held], place: FeedPlace, pull_mark: str, reply: Reply | None
    ) -> list[LogEffect]:
        """Append these pieces as a run. `reply` is due when it has entered."""
        batches = list(_batches(pieces))
        for at, rows in enumerate(batches, 1):
            self.submitted += 1
            more = at < len(batches)
            entry = LogEntry(self.submitted, rows, more, place, "" if more else pull_mark)
            self._entries.append(entry)
        self.submitted_at = place
        self._run_ends.append(entry)
        if reply is not None:
            entry.answers.append((reply, ""))
        return [*self._send_to_all(), *self._enter()]

    def on_has(self, site: SiteId, number: int, again: bool) -> tuple[bool, list[LogEffect]]:
        """Note that another replica has the push batches up to `number`. With `again` it asks for
        those that follow, from there on.

        The first result is whether to tell the replica that it counts: that it has everything that
        has entered, and that no push batch enters from now on which it does not have.
        """
        lane = self._lanes[site]
        if again:
            lane.resend_after(number)
            self._counted.add(site)
            lane.counts_from = self.entered
        else:
            lane.confirm(number)
        effects = [*self._send_to(site), *self._enter()]
        tell = (
            site in self._counted and lane.counts_from is not None and lane.has >= lane.counts_from
        )
        if tell:
            lane.counts_from = None
        return tell, effects

    def on_replicas(
        self, leads: bool, others: set[SiteId], joining: set[SiteId], rank: int, stored: bool
    ) -> list[LogEffect]:
        """Adopt a view: `others` are the other replicas, and `joining` those without state yet.
        With `stored` the store is a replica, too."""
        effects: list[LogEffect] = []
        new_leader = leads and not self.leads
        if new_leader:
            self.lead = Lead(rank, self.entered)
            effects += self.drop_incomplete_run()
            self.submitted_at = self.entered_at
        self.leads = leads
        others = others | {STORE} if stored else others
        self._counted = others | (self._counted & joining)
        if not leads:
            self._lanes = {}
            return effects
        self._lanes = {s: self._lanes.get(s) or ReplicaLane() for s in others | joining}
        if new_leader and stored:
            # The leader before has said which push batches all replicas have: so has the store.
            has = self._entries[0].number - 1 if self._entries else self.entered
            self._lanes[STORE] = ReplicaLane(has, has)
        return [*effects, *self._send_to_all(), *self._enter()]

    def _send_to_all(self) -> list[LogEffect]:
        return [effect for site in self._lanes for effect in self._send_to(site)]

    def _send_to(self, site: SiteId) -> list[LogEffect]:
        """Send another replica the push batches that it lacks, within the window."""
        lane, effects = self._lanes[site], list[LogEffect]()
        while self._entries and lane.is_open:
            first = self._entries[0].number
            at = max(lane.sent + 1, first) - first
            if at >= len(self._entries):
                break
            entry = self._entries[at]
            lane.send(entry)
            everywhere = min(self._at_all(self._lanes), entry.number - 1)
            effects.append(SendEntry(site, entry, everywhere))
        return effects

    def _at_all(self, sites: Iterable[SiteId]) -> int:
        """Return the number of push batches that all of these replicas have."""
        return min((self._lanes[s].has for s in sites if s in self._lanes), default=self.submitted)

    def _enter(self) -> list[LogEffect]:
        """Enter the runs that all counted replicas have; drop what all replicas have."""
        effects: list[LogEffect] = []
        everywhere = self._at_all(self._counted)
        while self._run_ends and self._run_ends[0].number <= everywhere:
            last = self._run_ends.popleft()
            effects.append(EnterRun(self._enter_up_to(last)))
        return effects + self.trim(self._at_all(self._lanes))

    def _enter_up_to(self, last: LogEntry) -> tuple[LogEntry, ...]:
        first = self._entries[0].number
        run = range(self.entered + 1 - first, last.number + 1 - first)
        self.entered, self.entered_at = last.number, last.place
        return tuple(self._entries[at] for at in run)

    # --- a follower's log -------------------------------------------------------------------------

    def receive(self, entry: LogEntry) -> tuple[LogEntry, ...]:
        """Append the next push batch of the leader, and return the run that it completes; empty if
        more follow. The run stays in the log: this replica may become the leader while another one
        lacks it."""
        self._entries.append(entry)
        self.submitted = entry.number
        if entry.more:
            return ()
        self.submitted_at = entry.place
        return self._enter_up_to(entry)

    def trim(self, number: int) -> list[LogEffect]:
        """Drop the push batches up to `number` that have entered."""
        effects: list[LogEffect] = []
        while self._entries and self._entries[0].number <= min(number, self.entered):
            effects.append(ReleaseRows(self._entries.popleft()))
        return effects

    def drop_incomplete_run(self) -> list[LogEffect]:
        """Drop the push batches that have not entered. Their leader is gone, and they have not
        entered at any replica."""
        effects: list[LogEffect] = []
        while self._entries and self._entries[-1].number > self.entered:
            effects.append(ReleaseRows(self._entries.pop()))
        self._run_ends.clear()
        self.submitted = self.entered
        return effects

    def restore(self, place: FeedPlace, number: int) -> list[LogEffect]:
        """Begin after this push batch."""
        effects: list[LogEffect] = [ReleaseRows(entry) for entry in self._entries]
        self._entries.clear()
        self._run_ends.clear()
        self.entered_at = self.submitted_at = place
        self.entered = self.submitted = number
        return effects

    def drop_answers(self) -> None:
        for entry in self._entries:
            entry.answers.clear()


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
