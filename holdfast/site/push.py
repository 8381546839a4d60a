"""Rows that Spark tasks push to an ingress, or that its leading replica reads by itself.

A driver announces a *push* (`PushBegin`), its tasks send the rows of its partitions, and then:

*Staged* (a streaming query's micro-batches): rows wait until the driver commits the push and says
which attempt at each partition counts. Then they are taken in partition order, once. The ingress
knows the query by its id and its micro-batches by their numbers: one that it has is not taken
again, and one of another query, or out of turn, is refused.

*Through* (one batch DataFrame, read in order): partitions are taken one after another, each as it
comes in; the tasks of later partitions wait. Here a push is an attempt to read the whole: when
Spark sorts again it cuts the partitions elsewhere, so a later push passes over as many rows as have
been taken, whatever partitions they are in.

What is pushed cannot be read again, so the leading replica of the ingress gives whatever it takes,
as numbered *push batches* of bounded size, to the other replicas first. A micro-batch is a run of
push batches, of which all but the last carry the mark `more`. Only when all replicas have the last
one do the rows of all of them enter the flow, and only then is the driver told that they were
taken. A replica that comes to lead drops a run that it has only in part: nobody has entered any of
it, and the driver pushes the micro-batch again.

Of a flow that is stored while it runs the store is one more replica: it has a push batch before
anything comes of it.

Nothing here is bounded by the size of a micro-batch: what does not fit into memory is on disk, and
a replica is sent only so much that it has not confirmed yet.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import pyarrow as pa

from holdfast.connectors.sources import PullReader, SplitReader
from holdfast.core.ids import STORE, SiteId
from holdfast.engine.batches import cut, empty, to_ipc
from holdfast.errors import ProtocolError
from holdfast.net import wire
from holdfast.net.bundles import rows_of
from holdfast.net.connection import Connection
from holdfast.site.spill import Held, Overflow
from holdfast.site.staging import GIVEN_UP, Push, Reply, Staged

Keep = Callable[["Lead", wire.PushBatch, list[Any]], None]
"""Stores a push batch of a leader; `PushReader.on_has` is to be called when it is there."""

PUSH_BATCH_BYTES = 4 << 20
"""A push batch has pieces of about so much in all; or one piece."""
PIECES_MAX = 256
WINDOW_BYTES = 16 << 20
"""So much may be on its way to another replica."""
HELD_BYTES_MAX = 32 << 20
"""Past so much that the flow has not read yet, pushers wait."""
MEMORY_BYTES_MAX = 64 << 20
"""Of all rows that a reader holds, staged ones included, so much is in memory."""
PULLED_MAX = 16
"""So many push batches of a source that is pulled may be on their way to the other replicas."""
ENDED = "the flow has ended and takes no more rows"


@dataclass(frozen=True, slots=True)
class Lead:
    """Who gives out push batches: the rank of the view in which it came to lead, and how many push
    batches it had then. Up to there it gives out what leaders before it have given out, too; beyond
    that, what they have given out is void."""

    rank: int = 0
    base: int = 0


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a feed is after some push batch: all that tells rows it has taken from others."""

    query: str = ""
    committed: int = -1
    """The last micro-batch of the query that was taken."""
    total: int = 0
    """Through: how many rows were taken."""
    ended: bool = False

    @classmethod
    def after(cls, message: wire.PushBatch) -> _Place:
        return cls.restored(message.marks, message.query)

    @classmethod
    def restored(cls, marks: dict[str, int], query: str) -> _Place:
        return cls(query, marks["committed"], marks["total"], bool(marks["ended"]))

    def marks(self) -> dict[str, int]:
        return {"committed": self.committed, "total": self.total, "ended": int(self.ended)}


@dataclass(slots=True, eq=False)
class _PushBatch:
    number: int
    rows: list[Held]
    more: bool
    """Whether it enters the flow only together with the next one."""
    place: _Place
    pull_reader: str = ""
    """How far a source has been read that only the leading replica reads."""
    answers: list[tuple[Reply, str]] = field(default_factory=list)

    @property
    def nbytes(self) -> int:
        return sum(held.nbytes for held in self.rows)


@dataclass(slots=True, eq=False)
class _Lane:
    """What another replica has, and what is on its way to it."""

    has: int = 0
    sent: int = 0
    unconfirmed: deque[tuple[int, int]] = field(default_factory=deque)
    """Numbers and sizes of push batches that were sent."""
    unconfirmed_bytes: int = 0
    entered: int = 0
    """How many push batches had entered when it began to count."""
    told: bool = True
    """Whether it knows that it counts."""

    def send(self, push_batch: _PushBatch) -> None:
        self.sent = push_batch.number
        self.unconfirmed.append((push_batch.number, push_batch.nbytes))
        self.unconfirmed_bytes += push_batch.nbytes

    def confirm(self, number: int) -> None:
        self.has = max(self.has, number)
        while self.unconfirmed and self.unconfirmed[0][0] <= self.has:
            self.unconfirmed_bytes -= self.unconfirmed.popleft()[1]

    def again_after(self, number: int) -> None:
        """What was sent after this push batch may have been lost."""
        self.confirm(number)
        self.sent, self.unconfirmed_bytes = self.has, 0
        self.unconfirmed.clear()


class PushReader(SplitReader):
    """One replica of the only split of a push source. Replies to pushers when there is room for
    more.

    `send` gives a message to another site; `on_ready` is called when there are rows to read;
    `epoch` says which one the task has reached. Rows that do not fit into memory go to `folder`.
    """

    def __init__(
        self,
        source: int,
        schema: pa.Schema,
        through: bool,
        pull_reader: PullReader | None = None,
        folder: str | None = None,
    ) -> None:
        self.source = source
        self.pull_reader, self._pulled_all = pull_reader, False
        self._empty = empty(schema)
        self.through = through
        self.leads = False
        self.send: Callable[[SiteId, wire.Message, list[Any]], None] = lambda *_: None
        self.on_ready: Callable[[], None] = lambda: None
        self.keep: Keep | None = None
        self.epoch: Callable[[], int] = lambda: -1
        self.overflow = Overflow(folder, MEMORY_BYTES_MAX)
        self._lead = Lead()
        self._closed = False
        # Rows that have entered, with the number of the last push batch of their run.
        self._ready: deque[tuple[int, Held]] = deque()
        self._ready_at = 0  # how many rows of the first were read
        self._ready_bytes = 0
        # What tasks have sent.
        self._push: Push | None = None
        self._last_push = ""  # that was committed here
        self._unstored: deque[tuple[int, Reply]] = deque()  # answers that wait for the store
        self._head = 0  # through: the partition whose turn it is
        self._head_taken = 0  # through: how many of its rows were taken
        self._passed = 0  # through: how many rows of this push are known from earlier ones
        self._waiting: list[tuple[Reply, str]] = []  # answers that wait for room
        # Portions that some replica may lack; and the last ones of runs that have not entered.
        self._push_batches: deque[_PushBatch] = deque()
        self._ends: deque[_PushBatch] = deque()
        self._submitted = self._entered = 0  # how many push batches there are, and have entered
        self._submitted_at = self._entered_at = _Place()
        self._lanes: dict[SiteId, _Lane] = {}
        self._counted: set[SiteId] = set()  # those that must have a push batch before it enters

    # --- the flow's side ------------------------------------------------------------------------

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        if not self._ready:
            return None if self._entered_at.ended else self._empty
        number, held = self._ready[0]
        if not due and not self._is_readable(number):
            return self._empty
        batch = held.rows.slice(self._ready_at, rows_max)
        self._ready_at += batch.num_rows
        if self._ready_at == held.rows.num_rows:
            self._ready.popleft()
            self._ready_at = 0
            self._ready_bytes -= held.nbytes
            self.overflow.release([held])
        if self._ready_bytes < HELD_BYTES_MAX:
            self._answer_waiting()
        return batch

    def _is_readable(self, number: int) -> bool:
        """A replica that does not lead reads what is due and nothing else. One that has come to
        lead may have push batches that the store lacks: no epoch may have their rows yet."""
        stored = self._lanes.get(STORE)
        return self.leads and (stored is None or number <= stored.has)

    def _answer_waiting(self) -> None:
        answers, self._waiting = self._waiting, []
        for reply, remark in answers:
            reply(True, remark)
        if self._push is None or not self.through:
            return
        for staged in self._push.waiting():
            if staged.partition == self._head or self._push.nbytes < HELD_BYTES_MAX:
                held_back, staged.waiting = staged.waiting, []
                for held in held_back:
                    held(True, "")

    # --- the pushers' side ----------------------------------------------------------------------

    def begin(self, query: str, batch: int, push: str, reply: Reply) -> None:
        """The driver starts a push; those before it are void."""
        refusal = ENDED if self._closed else self._refusal(query, batch)
        place = self._submitted_at
        if refusal:
            reply(False, refusal)
        elif place.ended if self.through else batch == place.committed:
            self._answer_when_entered(reply)
        else:
            self._give_up()
            self._push = Push(push, query, batch, self.overflow, single=self.through)
            self._head = self._head_taken = 0
            self._passed = place.total
            reply(True, "")

    def _refusal(self, query: str, batch: int) -> str:
        """Why a micro-batch cannot be taken; empty if it can."""
        place = self._submitted_at
        if self.through or place.committed < 0:
            return ""  # nothing was taken yet, so nothing can be missing or come twice
        if place.query and query != place.query:
            return (
                f"the flow is fed by the streaming query with id {place.query}, and this is "
                "query "
                f"{query}: its checkpoint location is another one, and so are its micro-batches. "
                "Start it with the checkpoint location that the flow was fed from "
                "(spark_stream(df, checkpoint=...), the same in all applications); to begin with "
                "this one, start the flow without restore_from="
            )
        if batch not in (place.committed, place.committed + 1):
            return (
                f"micro-batch {batch} of query {query} does not follow on {place.committed}, the "
                "last one that the flow has: "
                + (
                    "the checkpoint location was set back. "
                    if batch < place.committed
                    else "those between were given to another flow with this checkpoint location. "
                )
                + "Start the query with the checkpoint location as it was when the flow was last "
                "fed; to begin with this one, start the flow without restore_from="
            )
        return ""

    def _answer_when_entered(self, reply: Reply) -> None:
        """What was submitted last is on its way, or in. A replica that has come to lead has it, and
        the store may not: whoever heard that it was taken would not give it again."""
        if self._ends:
            self._ends[-1].answers.append((reply, wire.TAKEN))
        elif self._is_readable(self._entered):
            reply(True, wire.TAKEN)
        else:
            self._unstored.append((self._entered, reply))

    def _give_up(self) -> None:
        push, self._push = self._push, None
        if push is not None:
            push.give_up()

    def open(self, push: str, partition: int, attempt: int, reply: Reply) -> Staged | None:
        """A task begins; what it has to name with what it sends."""
        if self._push is None or self._push.name != push:
            reply(False, GIVEN_UP)
            return None
        if self.through and partition < self._head:
            reply(True, wire.TAKEN)
            return None
        staged = self._push.open(partition, attempt)
        reply(True, "")
        return staged

    def rows(self, staged: Staged, rows: pa.RecordBatch, reply: Reply) -> None:
        push = self._push
        if push is None or not push.has(staged):
            reply(False, GIVEN_UP)
            return
        before, staged.rows = staged.rows, staged.rows + rows.num_rows
        if self.through and staged.partition == self._head:
            fresh = rows.slice(max(0, self._head_taken - before))
            self._head_taken = max(self._head_taken, staged.rows)
            self._submit_unknown(
                [self.overflow.hold(p) for p in cut(fresh, wire.PIECE_BYTES)], reply
            )
            return
        try:
            for piece in cut(rows, wire.PIECE_BYTES):
                push.add(staged, self.overflow.hold_within(piece))
        except OSError as error:
            push.remove(staged)
            reply(False, f"rows of a partition cannot be staged on disk: {error}")
            return
        if self.through and push.nbytes >= HELD_BYTES_MAX:
            staged.waiting.append(reply)
        else:
            reply(True, "")

    def done(self, staged: Staged, reply: Reply) -> None:
        if self._push is None or not self._push.has(staged):
            reply(False, GIVEN_UP)
            return
        staged.done = True
        if self.through:
            self._pass_on(self._push, reply)
        else:
            reply(True, "")

    def forget(self, staged: Staged) -> None:
        """Whoever sent it is gone. What is not complete waits for another attempt."""
        if self._push is not None and not staged.done:
            self._push.remove(staged)

    def _pass_on(self, push: Push, reply: Reply) -> None:
        """Through: go on to the next partition, and let in what of it is already here."""
        pieces: list[Held] = []
        while (head := push.find(self._head)) is not None and head.done:
            self._waiting += [(held_back, "") for held_back in head.waiting]
            head.waiting = []
            push.remove(head)
            self._head, self._head_taken = self._head + 1, 0
            following = push.find(self._head)
            if following is not None:
                pieces += push.take(following)
                self._head_taken = following.rows
        self._submit_unknown(pieces, reply)
        self._answer_waiting()

    def commit(self, push: str, partitions: Iterable[tuple[int, int]], reply: Reply) -> None:
        """Take a micro-batch: all of its partitions, in order, once."""
        if push == self._last_push:
            self._answer_when_entered(reply)  # the driver was not sure
            return
        if self._closed or self._push is None or self._push.name != push:
            reply(False, ENDED if self._closed else GIVEN_UP)
            return
        batch, parts = self._push.batch, sorted(partitions)
        found = {partition: self._push.find(partition, attempt) for partition, attempt in parts}
        complete = {p: staged for p, staged in found.items() if staged is not None and staged.done}
        if len(complete) < len(parts):
            lacking = [p for p, _ in parts if p not in complete]
            which = f"partition {lacking[0]} is not complete" if lacking else "one is named twice"
            reply(False, f"micro-batch {batch}: {which}")
            return
        pieces = [p for staged in complete.values() for p in self._push.take(staged)]
        place = replace(self._submitted_at, query=self._push.query, committed=batch)
        self._give_up()
        self._last_push = push
        self._submit(pieces, place, reply)

    def end(self, query: str, reply: Reply) -> None:
        refusal = ENDED if self._closed else ""
        if not self.through and self._submitted_at.query not in ("", query):
            refusal = self._refusal(query, 0)
        if refusal:
            reply(False, refusal)
        else:
            self._submit([], replace(self._submitted_at, ended=True), reply)

    def pull(self) -> None:
        """Of a source that the leading replica reads itself: take what there is, if there is
        room."""
        if self.pull_reader is None or not self.leads or self._closed:
            return
        while (
            not self._pulled_all
            and self._submitted - self._entered < PULLED_MAX
            and self._ready_bytes < HELD_BYTES_MAX
        ):
            taken = self.pull_reader.take()
            self._pulled_all = taken is None
            rows, mark = taken or ([], "")
            if not rows and not mark and not self._pulled_all:
                return
            pieces = [self.overflow.hold(p) for batch in rows for p in cut(batch, wire.PIECE_BYTES)]
            place = replace(self._submitted_at, ended=self._pulled_all)
            self._submit(pieces, place, None, mark)

    # --- the replicas -----------------------------------------------------------------------------

    def _submit_unknown(self, pieces: list[Held], reply: Reply) -> None:
        """Through: submit what of these rows no earlier push has brought."""
        fresh: list[Held] = []
        for piece in pieces:
            known = min(self._passed, piece.rows.num_rows)
            self._passed -= known
            if known == piece.rows.num_rows:
                self.overflow.release([piece])
            else:
                piece.rows = piece.rows.slice(known)
                fresh.append(piece)
        total = self._submitted_at.total + sum(p.rows.num_rows for p in fresh)
        self._submit(fresh, replace(self._submitted_at, total=total), reply)

    def _submit(
        self, pieces: list[Held], place: _Place, reply: Reply | None, pull_reader: str = ""
    ) -> None:
        """Give rows to all replicas, as a run of push batches; they enter when all have the last
        one."""
        runs = list(_runs(pieces))
        for at, rows in enumerate(runs, 1):
            self._submitted += 1
            more = at < len(runs)
            push_batch = _PushBatch(self._submitted, rows, more, place, "" if more else pull_reader)
            self._push_batches.append(push_batch)
        self._submitted_at = place
        self._ends.append(push_batch)
        if reply is not None:
            push_batch.answers.append((reply, ""))
        for site in self._lanes:
            self._send_on(site)
        self._enter()

    def _send_on(self, site: SiteId) -> None:
        """Send another replica what it lacks, as long as not too much is unconfirmed."""
        lane = self._lanes[site]
        while self._push_batches and lane.unconfirmed_bytes < WINDOW_BYTES:
            first = self._push_batches[0].number
            at = max(lane.sent + 1, first) - first
            if at >= len(self._push_batches):
                return
            push_batch = self._push_batches[at]
            lane.send(push_batch)
            self._give(site, push_batch)

    def _give(self, site: SiteId, push_batch: _PushBatch) -> None:
        everywhere = min(self._everywhere(self._lanes), push_batch.number - 1)
        marks = push_batch.place.marks() | {"more": int(push_batch.more), "everywhere": everywhere}
        bodies = [to_ipc(held.rows) for held in push_batch.rows]
        sizes, query = [b.size for b in bodies], push_batch.place.query
        number = push_batch.number
        message = wire.PushBatch(self.source, number, marks, sizes, push_batch.pull_reader, query)
        if site != STORE:
            self.send(site, message, list(bodies))
        elif self.keep is not None:
            self.keep(self._lead, message, list(bodies))

    def _everywhere(self, sites: Iterable[SiteId]) -> int:
        """How many push batches all of these replicas have."""
        return min((self._lanes[s].has for s in sites if s in self._lanes), default=self._submitted)

    def _enter(self) -> None:
        """Let in the runs that all replicas that count have, and forget what all have."""
        everywhere = self._everywhere(self._counted)
        while self._ends and self._ends[0].number <= everywhere:
            last = self._ends.popleft()
            self._note(last)
            first = self._push_batches[0].number
            run = range(self._entered + 1 - first, last.number + 1 - first)
            self._let_in([self._push_batches[at] for at in run])
        self._forget_up_to(min(self._everywhere(self._lanes), self._entered))
        while self._unstored and self._is_readable(self._unstored[0][0]):
            self._unstored.popleft()[1](True, wire.TAKEN)

    def _forget_up_to(self, number: int) -> None:
        while self._push_batches and self._push_batches[0].number <= number:
            self.overflow.release(self._push_batches.popleft().rows)

    def _let_in(self, run: list[_PushBatch]) -> None:
        """The rows of these push batches can be read."""
        last = run[-1]
        for held in (held for push_batch in run for held in push_batch.rows if held.rows.num_rows):
            self._ready.append((last.number, held.share()))
            self._ready_bytes += held.nbytes
        self._entered, self._entered_at = last.number, last.place
        answers, last.answers = last.answers, []
        if self._ready_bytes >= HELD_BYTES_MAX:
            self._waiting += answers
        else:
            for reply, remark in answers:
                reply(True, remark)
        self.on_ready()

    def on_replicas(
        self, leads: bool, others: Iterable[SiteId], joining: Iterable[SiteId], rank: int = 0
    ) -> None:
        """Who the other replicas are has changed, in a view of this rank."""
        comes_to_lead = leads and not self.leads
        if comes_to_lead:
            self._lead = Lead(rank, self._entered)
            self.drop_part()
            self._submitted, self._submitted_at = self._entered, self._entered_at
            if self.pull_reader is not None:
                self.pull_reader.rewind()
        if not leads:
            self._give_up()
        self.leads = leads
        others, joining = set(others), set(joining)
        if self.keep is not None:
            others.add(STORE)
        self._counted = others | (self._counted & joining)
        if not leads:
            self._lanes = {}
            return
        self._lanes = {s: self._lanes.get(s) or _Lane() for s in others | joining}
        if comes_to_lead and self.keep is not None:
            # Of what this replica has been told that all have it, the store has everything.
            has = self._push_batches[0].number - 1 if self._push_batches else self._entered
            self._lanes[STORE] = _Lane(has, has)
        for site in self._lanes:
            self._send_on(site)
        self._enter()
        self.on_ready()

    def drop_part(self) -> None:
        """Forget push batches of a run that is not complete: its leader is gone, and nothing of it
        has entered anywhere."""
        while self._push_batches and self._push_batches[-1].number > self._entered:
            self.overflow.release(self._push_batches.pop().rows)
        self._ends.clear()
        self._submitted = self._entered

    def on_push_batch(self, message: wire.PushBatch, body: memoryview) -> None:
        """The leader has given this replica a push batch."""
        if message.number != self._submitted + 1:
            return  # it came before; or it left before the leader knew what this replica lacks
        rows, at = [], 0
        for size in message.sizes:
            rows.append(rows_of(body[at : at + size]))
            at += size
        self._receive(message, rows)
        # Kept in case this replica comes to lead while another one lacks it.
        self._forget_up_to(min(message.marks["everywhere"], self._entered))

    def recover(self, message: wire.PushBatch, rows: list[pa.RecordBatch]) -> None:
        """Of a flow that was lost: all replicas have this push batch, as it is stored. After the
        last one comes `drop_part`."""
        self._receive(message, rows)
        self._forget_up_to(self._entered)

    def _receive(self, message: wire.PushBatch, rows: list[pa.RecordBatch]) -> None:
        more = bool(message.marks.get("more", 0))
        push_batch = _PushBatch(
            message.number, [], more, _Place.after(message), message.pull_reader
        )
        if not more:
            self._note(push_batch)  # which may find that it cannot be, before anything has changed
        push_batch.rows = [self.overflow.hold(batch) for batch in rows]
        self._push_batches.append(push_batch)
        self._submitted = push_batch.number
        if not more:
            run = [p for p in self._push_batches if p.number > self._entered]
            self._let_in(run)
            self._submitted_at = push_batch.place

    def _note(self, push_batch: _PushBatch) -> None:
        if self.pull_reader is not None and push_batch.pull_reader:
            try:
                self.pull_reader.note(push_batch.pull_reader, self.epoch() + 1)
            except (ValueError, KeyError, TypeError) as error:
                raise ProtocolError(f"a mark that is none: {error!r}") from error

    def on_has(self, site: SiteId, number: int, again: bool) -> bool:
        """Another replica has so many push batches; `again`: it wants those that follow sent again.
        True if it is to be told that it has all that has entered, and that no push batch enters any
        more that it does not have."""
        lane = self._lanes.get(site)
        if lane is None:
            return False
        if again:
            lane.again_after(number)
            self._counted.add(site)  # what enters from now on it has
            lane.entered, lane.told = self._entered, False
        else:
            lane.confirm(number)
        self._send_on(site)
        self._enter()
        self.on_ready()
        tell = site in self._counted and not lane.told and lane.has >= lane.entered
        lane.told = lane.told or tell
        return tell

    @property
    def has(self) -> int:
        """How many push batches this replica has."""
        return self._submitted

    def caught_up(self) -> bool:
        """A batch that has not ended has more rows, and so has a stream that has not given any; and
        rows that are being pushed are on their way, however long their task takes."""
        if self.pull_reader is not None:
            return self.is_settled
        return not self.through and self._push is None and self.is_settled and self._entered > 0

    @property
    def is_settled(self) -> bool:
        """Whether all that was submitted has entered."""
        return self._entered == self._submitted

    def save(self) -> dict[str, int]:
        """Where the feed is, after what has entered; what has been read is not part of it."""
        marks = self._entered_at.marks()
        return marks | {"taken": self._entered, "rank": self._lead.rank}

    @property
    def query(self) -> str:
        """By which streaming query it is fed; empty if it is not known, or nothing was
        taken."""
        return self._entered_at.query

    def save_pull(self) -> str:
        """How far a source has been read that only the leading replica reads, as far as the rows
        have entered; the tables of the pull reader are not part of it."""
        return self.pull_reader.save() if self.pull_reader is not None else ""

    def restore_pull(self, saved: str) -> None:
        if self.pull_reader is not None and saved:
            self.pull_reader.restore(saved)

    def close(self) -> None:
        """No more rows are wanted. Whoever waits for an answer gets none: it was not said whether
        what was sent is part of what the flow leaves behind."""
        self._closed = True
        self._give_up()
        self._waiting.clear()
        self._unstored.clear()
        for push_batch in self._push_batches:
            push_batch.answers.clear()
        if self.pull_reader is not None:
            self.pull_reader.close()

    def unread(self) -> list[pa.RecordBatch]:
        """The rows that have entered and were not read."""
        rows = [held.rows for _, held in self._ready]
        return [rows[0].slice(self._ready_at), *rows[1:]] if rows else []

    def restore(self, saved: dict[str, int], query: str = "") -> None:
        self._entered_at = self._submitted_at = _Place.restored(saved, query)
        self._give_up()
        self.overflow.release(held for _, held in self._ready)
        self._ready.clear()
        self._ready_at = self._ready_bytes = 0
        while self._push_batches:
            self.overflow.release(self._push_batches.popleft().rows)
        self._ends.clear()
        self._entered = self._submitted = saved["taken"]


def _runs(pieces: list[Held]) -> Iterator[list[Held]]:
    """Pieces for one push batch after another; an empty one if there are none."""
    run: list[Held] = []
    nbytes = 0
    for piece in pieces:
        if run and (nbytes + piece.nbytes > PUSH_BATCH_BYTES or len(run) == PIECES_MAX):
            yield run
            run, nbytes = [], 0
        run.append(piece)
        nbytes += piece.nbytes
    yield run


class PushReaders:
    """The pushers' connections to one site: turns their messages into calls of the readers."""

    def __init__(
        self,
        readers: Callable[[], dict[int, PushReader]],
        leader: Callable[[int], tuple[str, int] | None],
    ) -> None:
        self._readers, self._leader = readers, leader
        self._opened: dict[Connection, tuple[PushReader, Staged]] = {}

    def forget(self, connection: Connection) -> None:
        """The connection is gone; what it had not completed waits for another attempt."""
        reader, staged = self._opened.pop(connection, (None, None))
        if reader is not None and staged is not None:
            reader.forget(staged)

    def take(self, connection: Connection, message: wire.Message, body: memoryview) -> None:
        def reply(ok: bool, reason: str) -> None:
            connection.send(wire.PushTaken(ok, reason))

        match message:
            case wire.PushRows() | wire.PushDone():
                self._go_on(connection, message, body, reply)
                return
            case wire.PushBegin() | wire.PushOpen() | wire.PushCommit() | wire.PushEnd():
                reader = self._readers().get(message.source)
            case _:
                raise ProtocolError(f"{type(message).__name__} is not for a pusher to say")
        if reader is None or not reader.leads:
            connection.send(wire.PushTaken(False, wire.NOT_HERE, self._leader(message.source)))
            return
        match message:
            case wire.PushBegin():
                reader.begin(message.query, message.batch, message.push, reply)
            case wire.PushOpen():
                self.forget(connection)
                staged = reader.open(message.push, message.partition, message.attempt, reply)
                if staged is not None:
                    self._opened[connection] = reader, staged
            case wire.PushCommit():
                reader.commit(message.push, message.partitions, reply)
            case wire.PushEnd():
                reader.end(message.query, reply)

    def _go_on(
        self,
        connection: Connection,
        message: wire.PushRows | wire.PushDone,
        body: memoryview,
        reply: Reply,
    ) -> None:
        opened = self._opened.get(connection)
        if opened is None:
            raise ProtocolError("rows of a feed that was not opened")
        reader, staged = opened
        if self._readers().get(reader.source) is not reader or not reader.leads:
            reply(False, GIVEN_UP)
        elif isinstance(message, wire.PushRows):
            reader.rows(staged, rows_of(body), reply)
        else:
            reader.done(staged, reply)
