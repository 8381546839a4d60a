"""Rows that Spark tasks push to an ingress, or that its leading replica pulls from a source.

A driver announces a *push* (`PushBegin`), and its tasks send the rows of its partitions. There are
two kinds of push:

*Staged* (the micro-batches of a streaming query): rows wait until the driver commits the push and
names the attempt at each partition that counts. Then they are taken in partition order, once. The
ingress knows the query by its id and the micro-batches by their numbers. It does not take a
micro-batch again that it has, and refuses one of another query, or out of turn.

*Through* (one batch DataFrame, read in order): partitions are taken one after another, each as its
rows arrive; the tasks of later partitions wait. Here a push is an attempt to read the whole
DataFrame. When Spark sorts again it cuts the partitions elsewhere, so a later push skips as many
rows as were taken before, in any partitions.

Rows that are taken go to the other replicas of the ingress as push batches (`push_log.py`). When
they have entered the flow, the driver gets its answer.

Memory does not limit the size of a micro-batch: rows that do not fit into memory are on disk, and
only a window of unconfirmed push batches is on its way to another replica.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, assert_never

import pyarrow as pa

from holdfast.connectors.sources import PullReader, SplitReader
from holdfast.core.ids import STORE, SiteId
from holdfast.engine.batches import cut, empty
from holdfast.errors import ProtocolError
from holdfast.net import wire
from holdfast.site.entered_rows import EnteredRows
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
from holdfast.site.push_log import PushLog
from holdfast.site.push_messages import decode, encode, rows_in
from holdfast.site.spill import Held, Overflow
from holdfast.site.staging import GIVEN_UP, Push, Reply, Staged

Keep = Callable[[Lead, wire.PushBatch, list[Any]], None]
"""Stores a push batch of a leader, and calls `PushReader.on_stored` when it is stored."""

HELD_BYTES_MAX = 32 << 20
"""Pushers wait while more bytes than this have entered the flow and were not read."""
MEMORY_BYTES_MAX = 64 << 20
"""Bytes in memory of all rows that a reader holds, staged ones included."""
PULLED_MAX = 16
"""Push batches of a pull source that may be on their way to the other replicas."""
ENDED = "the flow has ended and takes no more rows"


@dataclass(slots=True)
class ThroughCursor:
    """How far a push that is read through was taken."""

    known_rows: int
    """Rows still to come in this push that earlier pushes brought."""
    partition: int = 0
    """The partition that is being taken."""
    rows: int = 0
    """Rows of the partition that were taken, from whichever attempt."""

    def next_partition(self) -> None:
        self.partition, self.rows = self.partition + 1, 0

    def new_rows(self, rows: pa.RecordBatch, before: int) -> pa.RecordBatch:
        """Take rows of an attempt at the current partition that come after `before` others, and
        return those that no attempt before has brought."""
        fresh = rows.slice(max(0, self.rows - before))
        self.rows = max(self.rows, before + rows.num_rows)
        return fresh

    def pass_known(self, piece: Held) -> bool:
        """Cut off the rows that earlier pushes brought; return whether others are left."""
        known = min(self.known_rows, piece.rows.num_rows)
        self.known_rows -= known
        if known < piece.rows.num_rows:
            piece.rows = piece.rows.slice(known)
            return True
        return False


class PushReader(SplitReader):
    """One replica of the only split of a push source. It replies to pushers once there is room for
    more rows.

    `send` sends a message to another site; `on_ready` is called when there are rows to read;
    `epoch` returns the epoch that the task has reached. Rows that do not fit into memory go to
    `folder`.
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
        self.send: Callable[[SiteId, wire.Message, list[Any]], None] = lambda *_: None
        self.on_ready: Callable[[], None] = lambda: None
        self.keep: Keep | None = None
        self.epoch: Callable[[], int] = lambda: -1
        self.overflow = Overflow(folder, MEMORY_BYTES_MAX)
        self._log = PushLog()
        self._effects: deque[LogEffect] = deque()
        self._executing = False
        self._entered = EnteredRows(self.overflow)
        self._closed = False
        self._push: Push | None = None
        self._cursor = ThroughCursor(0)
        self._last_push = ""  # the push that was committed here last
        self._waiting: list[tuple[Reply, str]] = []  # answers that wait for room
        self._rewinds_at: int | None = None
        """A new leader of a pull source reads on when the push batches up to this one have
        entered: they say how far the source was read."""

    # --- the flow's side ------------------------------------------------------------------------

    @property
    def leads(self) -> bool:
        return self._log.leads

    @property
    def rank(self) -> int:
        """The rank of the leader that this replica knows."""
        return self._log.rank

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        if not self._entered:
            return None if self._log.entered_at.ended else self._empty
        if not due and not self.leads:
            return self._empty  # another replica decides what is read
        batch = self._entered.read(rows_max)
        if self._entered.nbytes < HELD_BYTES_MAX:
            self._answer_waiting()
        return batch

    def _answer_waiting(self) -> None:
        answers, self._waiting = self._waiting, []
        for reply, remark in answers:
            reply(True, remark)
        if self._push is None or not self.through:
            return
        for staged in self._push.waiting():
            is_current = staged.partition == self._cursor.partition
            if is_current or self._push.nbytes < HELD_BYTES_MAX:
                held_back, staged.waiting = staged.waiting, []
                for held in held_back:
                    held(True, "")

    @property
    def all_entered(self) -> bool:
        """Whether everything that was submitted has entered the flow."""
        return self._log.all_entered

    def caught_up(self) -> bool:
        """A batch that has not ended has more rows, and so has a stream that has not given any. An
        open push has rows on their way, however long their task takes."""
        if self.pull_reader is not None:
            return self.all_entered
        idle = self._push is None and self.all_entered
        return not self.through and idle and self._log.entered > 0

    def unread(self) -> list[pa.RecordBatch]:
        """Return the rows that have entered and were not read."""
        return self._entered.unread()

    # --- the pushers' side ----------------------------------------------------------------------

    def begin(self, query: str, batch: int, push: str, reply: Reply) -> None:
        """Start a push; earlier ones are void."""
        place = self._log.submitted_at
        refusal = ENDED if self._closed else "" if self.through else place.refusal(query, batch)
        if refusal:
            reply(False, refusal)
        elif place.ended if self.through else batch == place.committed:
            self._answer_when_entered(reply)
        else:
            self._give_up()
            self._push = Push(push, query, batch, self.overflow, single=self.through)
            self._cursor = ThroughCursor(place.total)
            reply(True, "")

    def _answer_when_entered(self, reply: Reply) -> None:
        """Reply once the rows that were submitted last have entered. A new leader has rows that
        others may lack, and must not confirm them yet: the pusher would not send them again."""
        pending = self._log.pending
        if pending is not None:
            pending.answers.append((reply, wire.TAKEN))
        else:
            reply(True, wire.TAKEN)

    def _give_up(self) -> None:
        push, self._push = self._push, None
        if push is not None:
            push.give_up()

    def open(self, push: str, partition: int, attempt: int, reply: Reply) -> Staged | None:
        """Begin an attempt at a partition. The task passes the result along with its rows."""
        if self._push is None or self._push.name != push:
            reply(False, GIVEN_UP)
            return None
        if self.through and partition < self._cursor.partition:
            reply(True, wire.TAKEN)
            return None
        staged = self._push.open(partition, attempt)
        reply(True, "")
        return staged

    def rows(self, staged: Staged, rows: pa.RecordBatch, reply: Reply) -> None:
        """Take or stage rows of an attempt."""
        push = self._push
        if push is None or not push.has(staged):
            reply(False, GIVEN_UP)
            return
        before, staged.rows = staged.rows, staged.rows + rows.num_rows
        if self.through and staged.partition == self._cursor.partition:
            fresh = self._cursor.new_rows(rows, before)
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
        """Note that an attempt has sent all rows of its partition."""
        if self._push is None or not self._push.has(staged):
            reply(False, GIVEN_UP)
            return
        staged.done = True
        if self.through:
            self._take_next_partitions(self._push, reply)
        else:
            reply(True, "")

    def forget(self, staged: Staged) -> None:
        """Drop an attempt whose task is gone, unless it is complete."""
        if self._push is not None and not staged.done:
            self._push.remove(staged)

    def _take_next_partitions(self, push: Push, reply: Reply) -> None:
        """Through: go on to the next partition, and take the rows of it that are already here."""
        cursor, pieces = self._cursor, list[Held]()
        while (current := push.find(cursor.partition)) is not None and current.done:
            self._waiting += [(held_back, "") for held_back in current.waiting]
            current.waiting = []
            push.remove(current)
            cursor.next_partition()
            following = push.find(cursor.partition)
            if following is not None:
                pieces += push.take(following)
                cursor.rows = following.rows
        self._submit_unknown(pieces, reply)
        self._answer_waiting()

    def commit(self, push: str, partitions: Iterable[tuple[int, int]], reply: Reply) -> None:
        """Take a micro-batch: all of its partitions, in order, once."""
        if push == self._last_push:
            self._answer_when_entered(reply)  # the driver asks again
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
        place = replace(self._log.submitted_at, query=self._push.query, committed=batch)
        self._give_up()
        self._last_push = push
        self._submit(pieces, place, reply)

    def end(self, query: str, reply: Reply) -> None:
        """Note that the source has ended."""
        refusal, place = ENDED if self._closed else "", self._log.submitted_at
        if not self.through and place.query not in ("", query):
            refusal = place.refusal(query, 0)
        if refusal:
            reply(False, refusal)
        else:
            self._submit([], replace(place, ended=True), reply)

    def pull(self) -> None:
        """Take the rows that a pull source has, if there is room for them."""
        if self.pull_reader is None or not self.leads or self._closed:
            return
        if self._rewinds_at is not None:
            if self._log.entered < self._rewinds_at:
                return
            self._rewinds_at = None
            self.pull_reader.rewind()
        while (
            not self._pulled_all
            and self._log.submitted - self._log.entered < PULLED_MAX
            and self._entered.nbytes < HELD_BYTES_MAX
        ):
            taken = self.pull_reader.take()
            self._pulled_all = taken is None
            rows, mark = taken or ([], "")
            if not rows and not mark and not self._pulled_all:
                return
            pieces = [self.overflow.hold(p) for batch in rows for p in cut(batch, wire.PIECE_BYTES)]
            place = replace(self._log.submitted_at, ended=self._pulled_all)
            self._submit(pieces, place, None, mark)

    def close(self) -> None:
        """Take no more rows. Pushers that wait get no answer: it is not known whether the rows that
        they sent are part of the flow's result."""
        self._closed = True
        self._give_up()
        self._waiting.clear()
        self._log.drop_answers()
        if self.pull_reader is not None:
            self.pull_reader.close()

    # --- the log ----------------------------------------------------------------------------------

    def _submit_unknown(self, pieces: list[Held], reply: Reply) -> None:
        """Through: submit the rows that no earlier push has brought."""
        fresh: list[Held] = []
        for piece in pieces:
            if self._cursor.pass_known(piece):
                fresh.append(piece)
            else:
                self.overflow.release([piece])
        place = self._log.submitted_at
        total = place.total + sum(p.rows.num_rows for p in fresh)
        self._submit(fresh, replace(place, total=total), reply)

    def _submit(
        self, pieces: list[Held], place: FeedPlace, reply: Reply | None, pull_mark: str = ""
    ) -> None:
        self._execute(self._log.submit(pieces, place, pull_mark, reply))

    def on_replicas(
        self,
        leader: SiteId | None,
        others: Mapping[SiteId, int],
        joining: Mapping[SiteId, int],
        rank: int = 0,
    ) -> None:
        """Adopt a view of this rank; see `PushLog.on_replicas`."""
        begins = leader is None and not self.leads
        if leader is not None:
            self._give_up()
        stored = self.keep is not None
        effects = self._log.on_replicas(leader, others, joining, rank, stored)
        if begins:
            self._rewinds_at = self._log.submitted
        self._execute(effects)
        if self.leads:
            self.on_ready()

    def on_push_has(self, site: SiteId, message: wire.PushHas) -> bool:
        """Handle what another replica has. Return whether to tell it that it counts: see
        `PushLog.on_asked`."""
        if not self.leads or not self._log.sends_to(site):
            return False
        if message.again:
            tell, effects = self._log.on_asked(site, Holding(message.entered, message.made))
        elif message.rank == self._log.lead.rank:
            tell, effects = self._log.on_has(site, message.number, message.entered)
        else:
            return False  # it confirms push batches of an earlier leader
        self._execute(effects)
        self.on_ready()
        return tell

    def on_stored(self, lead: Lead, number: int) -> None:
        """The store has a push batch that this replica wrote under this lead."""
        if self.leads and lead == self._log.lead and self._log.sends_to(STORE):
            self._execute(self._log.on_has(STORE, number, number)[1])
            self.on_ready()

    def follows(self, site: SiteId, rank: int) -> bool:
        """Whether a message of a leader counts; see `PushLog.follow`."""
        return self._log.follow(site, rank)

    def on_push_batch(self, site: SiteId, message: wire.PushBatch, body: memoryview) -> bool:
        """Take a push batch from the leader. Return whether to confirm what is here."""
        rows = rows_in(message, body)
        if self.pull_reader is not None and message.pull_reader:
            try:
                self.pull_reader.check(message.pull_reader)
            except ValueError as error:
                raise ProtocolError(f"an invalid mark of a pull source: {error}") from error
        if not self.follows(site, message.rank):
            return False
        self._execute(self._log.receive(decode(message, rows, self.overflow)))
        return True

    def on_push_known(self, site: SiteId, message: wire.PushKnown) -> bool:
        """Learn what the leader knows. Return whether to confirm what is here."""
        if not self.follows(site, message.rank):
            return False
        before = self._log.entered
        known = Known(message.matched, message.entered, message.everywhere)
        self._execute(self._log.on_known(known))
        return self._log.entered > before

    def holding(self, again: bool) -> wire.PushHas:
        """Return what this replica has, for the leader. With `again` it asks for what it lacks."""
        log, made = self._log, self._log.holding().made if again else ()
        return wire.PushHas(
            self.source, log.matched, again, log.entered, max(0, log.rank), tuple(made)
        )

    def recover(self, message: wire.PushBatch, rows: list[pa.RecordBatch]) -> None:
        """Take a stored push batch of a flow that was lost; all replicas have it. `drop_part`
        follows after the last one."""
        self._execute(self._log.recover(decode(message, rows, self.overflow)))

    def drop_part(self) -> None:
        """Drop the push batches of a run that is not complete."""
        self._execute(self._log.drop_incomplete_run())

    def _execute(self, effects: Iterable[LogEffect]) -> None:
        """Execute effects of the log in order. An effect may cause further ones, which follow."""
        self._effects.extend(effects)
        if self._executing:
            return
        self._executing = True
        try:
            while self._effects:
                self._execute_one(self._effects.popleft())
        finally:
            self._executing = False

    def _execute_one(self, effect: LogEffect) -> None:
        match effect:
            case SendEntry():
                self._send_entry(effect)
            case AskReplica(site):
                self.send(site, wire.PushLead(self.source, self._log.rank), [])
            case TellKnown(site, known):
                self._tell(site, known)
            case EnterRun(run):
                self._note(run[-1])
                self._let_in(run)
            case ReleaseRows(entry):
                self.overflow.release(entry.rows)
                answers, entry.answers = entry.answers, []
                for reply, _ in answers:
                    reply(False, GIVEN_UP)
            case _:
                assert_never(effect)

    def _send_entry(self, effect: SendEntry) -> None:
        message, bodies = encode(self.source, self._log.rank, effect.entry)
        if effect.site != STORE:
            self.send(effect.site, message, list(bodies))
        elif self.keep is not None:
            self.keep(self._log.lead, message, list(bodies))

    def _tell(self, site: SiteId, known: Known) -> None:
        message = wire.PushKnown(
            self.source, self._log.rank, known.matched, known.entered, known.everywhere
        )
        self.send(site, message, [])

    def _let_in(self, run: tuple[LogEntry, ...]) -> None:
        """Make the rows of a run readable."""
        last = run[-1]
        for held in (held for entry in run for held in entry.rows if held.rows.num_rows):
            self._entered.add(last.number, held.share())
        answers, last.answers = last.answers, []
        if self._entered.nbytes >= HELD_BYTES_MAX:
            self._waiting += answers
        else:
            for reply, remark in answers:
                reply(True, remark)
        self.on_ready()

    def _note(self, entry: LogEntry) -> None:
        if self.pull_reader is not None and entry.pull_mark:
            try:
                self.pull_reader.note(entry.pull_mark, self.epoch() + 1)
            except (ValueError, KeyError, TypeError) as error:
                raise ProtocolError(f"an invalid mark of a pull source: {error!r}") from error

    # --- what is saved ----------------------------------------------------------------------------

    @property
    def has(self) -> int:
        """The number of push batches that this replica is known to share with the leader."""
        return self._log.submitted if self.leads else self._log.matched

    def check_invariants(self) -> None:
        self._log.check_invariants()

    @property
    def query(self) -> str:
        """The streaming query that feeds the flow; empty if it is unknown, or nothing was taken."""
        return self._log.entered_at.query

    def save(self) -> dict[str, int]:
        """Return the place of the feed after the rows that have entered, read or not."""
        marks = self._log.entered_at.marks()
        return marks | {"taken": self._log.entered, "rank": self._log.lead.rank}

    def restore(self, saved: dict[str, int], query: str = "") -> None:
        """The inverse of `save`."""
        self._give_up()
        self._entered.clear()
        self._execute(self._log.restore(FeedPlace.restored(saved, query), saved["taken"]))

    def save_pull(self) -> str:
        """Return the position of a pull source after the rows that have entered. The tables of the
        pull reader are not part of it."""
        return self.pull_reader.save() if self.pull_reader is not None else ""

    def restore_pull(self, saved: str) -> None:
        if self.pull_reader is not None and saved:
            self.pull_reader.restore(saved)
