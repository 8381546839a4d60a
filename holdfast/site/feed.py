"""Rows that Spark tasks push to an ingress, instead of the ingress reading them.

A batch of a source consists of numbered partitions. Two ways of taking one:

*Staged* (a streaming query's micro-batches): rows wait until the driver commits the batch, since a
task may be run again and a re-run batch may differ; then they are taken in partition order, once.

*Through* (one batch DataFrame, read in order): partitions are taken one after another, each as it
comes in; the tasks of later partitions wait. Nothing is held but what the limit allows. Here a
batch is an attempt to read the whole: when Spark sorts anew it cuts the partitions elsewhere, so a
later attempt passes over as many rows as have been taken, whatever partitions they are in.

What is pushed cannot be read again, so the leading copy of the ingress gives whatever it takes, as
numbered *portions*, to the other copies first. Only when all of them have a portion do its rows
enter the flow, and only then is the feeder told that they were taken. A new leader goes on from
the last portion it has: it knows which batches, or how many rows of which partition, those were.

Of a flow that is stored while it runs the store is one more copy: it has a portion before anything
comes of it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pyarrow as pa

from holdfast.core.ids import STORE, SiteId
from holdfast.errors import ProtocolError
from holdfast.flow.batches import empty, to_ipc
from holdfast.flow.sources import SplitReader, Tap
from holdfast.site import wire
from holdfast.site.bundles import rows_of
from holdfast.site.connection import Connection

Reply = Callable[[bool, str], None]
Keep = Callable[[int, int, wire.FeedPortion, list[Any]], None]
"""Stores a portion, given the reader's rank and the portion's number; `FedReader.on_has` is to be
called when it is there."""

HELD_BYTES_MAX = 32 << 20
PULLED_MAX = 16
"""So many portions of a source that is tapped may be on their way to the other copies."""
NOT_HERE = "another site leads the ingress"


@dataclass
class _Partition:
    attempt: int
    batches: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    done: bool = False
    waiting: list[Reply] = field(default_factory=list)


@dataclass
class _Portion:
    """Rows that enter the flow together, and where the feed stands after them."""

    number: int
    rows: list[pa.RecordBatch]
    marks: dict[str, int]
    taken: Reply | None
    tap: str = ""
    """How far a source has been read that only the leading copy reads."""


class FedReader(SplitReader):
    """One copy of the only split of a fed source. Replies to feeders when there is room for more.

    `send` gives a message to another site; `on_ready` is called when there are rows to read.
    """

    def __init__(
        self, source: int, schema: pa.Schema, through: bool, tap: Tap | None = None
    ) -> None:
        self.source = source
        self._tap, self._tapped_all = tap, False
        self._empty = empty(schema)
        self.through = through
        self.leads = False
        self.send: Callable[[SiteId, wire.Message, list[Any]], None] = lambda *_: None
        self.on_ready: Callable[[], None] = lambda: None
        self.keep: Keep | None = None
        self._rank = 0  # of the view in which it came to lead
        self._ready: deque[pa.RecordBatch] = deque()
        self._ready_bytes = 0
        self._staged: dict[tuple[int, int], _Partition] = {}
        self._committed = -1
        self._head = 0  # through: the partition whose turn it is
        self._head_taken = 0  # through: how many of its rows were taken
        self._attempt = 0  # through: at reading the whole
        self._total = 0  # through: how many rows were taken in all
        self._passed = 0  # through: how many rows of this attempt are known from earlier ones
        self._ended = False
        self._waiting: list[Reply] = []  # commits that wait for room
        self._portions: deque[_Portion] = deque()  # not yet at all copies
        self._submitted = self._taken = 0  # how many portions
        self._has: dict[SiteId, int] = {}  # of the other copies: how many portions
        self._counted: set[SiteId] = set()  # those that must have one before it enters

    # --- the flow's side ------------------------------------------------------------------------

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        if not self._ready:
            return None if self._ended else self._empty
        batch = self._ready.popleft()
        if batch.num_rows > rows_max:
            self._ready.appendleft(batch.slice(rows_max))
            batch = batch.slice(0, rows_max)
        self._ready_bytes -= batch.nbytes
        if not self._ready:
            self._ready_bytes = 0
        if self._ready_bytes < HELD_BYTES_MAX:
            self._answer_waiting()
        return batch

    def _answer_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        head = self._staged.get((self._attempt, self._head)) if self.through else None
        if head is not None:
            waiting, head.waiting = waiting + head.waiting, []
        for reply in waiting:
            reply(True, "")

    # --- the feeders' side ----------------------------------------------------------------------

    def open(self, batch: int, partition: int, attempt: int, reply: Reply) -> None:
        if self.through and batch < self._attempt:
            reply(False, "another attempt at the whole has begun")
            return
        if self.through and batch > self._attempt:
            self._attempt, self._passed = batch, self._total
            self._head = self._head_taken = 0
            self._staged.clear()
        if batch <= self._committed or (self.through and partition < self._head):
            reply(True, "taken")  # the feeder need not send it again
            return
        self._staged[batch, partition] = _Partition(attempt)
        reply(True, "")

    def rows(
        self, batch: int, partition: int, attempt: int, rows: pa.RecordBatch, reply: Reply
    ) -> None:
        staged = self._staged.get((batch, partition))
        if staged is None or staged.attempt != attempt:
            reply(False, "another attempt at this partition has begun")
            return
        before, staged.rows = staged.rows, staged.rows + rows.num_rows
        if self.through and partition == self._head:
            fresh = rows.slice(max(0, self._head_taken - before))
            self._head_taken = max(self._head_taken, staged.rows)
            self._submit([fresh], reply)
            return
        staged.batches.append(rows)
        if self.through and sum(b.nbytes for b in staged.batches) >= HELD_BYTES_MAX:
            staged.waiting.append(reply)
        else:
            reply(True, "")

    def done(self, batch: int, partition: int, attempt: int, reply: Reply) -> None:
        staged = self._staged.get((batch, partition))
        if staged is None or staged.attempt != attempt:
            reply(False, "another attempt at this partition has begun")
            return
        staged.done = True
        if self.through:
            self._pass_on(reply)
        else:
            reply(True, "")

    def _pass_on(self, reply: Reply) -> None:
        """Through: go on to the next partition, and let in what of it is already here."""
        rows: list[pa.RecordBatch] = []
        while (staged := self._staged.get((self._attempt, self._head))) is not None and staged.done:
            del self._staged[self._attempt, self._head]
            self._head, self._head_taken = self._head + 1, 0
            following = self._staged.get((self._attempt, self._head))
            if following is not None:
                rows += following.batches
                following.batches = []
                self._head_taken = following.rows
        self._submit(rows, reply)
        self._answer_waiting()

    def commit(self, batch: int, partitions: tuple[int, ...], reply: Reply) -> None:
        """Take a staged batch: all of its partitions, in order, once."""
        if batch <= self._committed:
            reply(True, "taken")
            return
        parts = {p: self._staged.get((batch, p)) for p in sorted(partitions)}
        missing = [p for p, part in parts.items() if part is None or not part.done]
        if missing:
            reply(False, f"batch {batch}: partition {missing[0]} is not complete")
            return
        self._committed = batch
        rows = [b for p in parts for b in self._staged.pop((batch, p)).batches]
        for stale in [key for key in self._staged if key[0] <= batch]:
            del self._staged[stale]
        self._submit(rows, reply)

    def end(self, reply: Reply) -> None:
        self._submit([], reply, ended=True)

    def pull(self) -> None:
        """Of a source that the leading copy reads itself: take what there is, if there is room."""
        if self._tap is None or not self.leads or self._tapped_all:
            return
        while len(self._portions) < PULLED_MAX and self._ready_bytes < HELD_BYTES_MAX:
            taken = self._tap.take()
            self._tapped_all = taken is None
            rows, mark = taken or ([], "")
            if not rows and not mark and not self._tapped_all:
                return
            self._submit(rows, None, ended=self._tapped_all, tap=mark)
            if self._tapped_all:
                return

    # --- the copies -----------------------------------------------------------------------------

    def _submit(
        self, rows: list[pa.RecordBatch], reply: Reply | None, ended: bool = False, tap: str = ""
    ) -> None:
        """Give a portion to all copies; it is taken when they have it."""
        if self.through:
            rows = self._unknown(rows)
        self._submitted += 1
        marks = {
            "committed": self._committed,
            "head": self._head,
            "head_taken": self._head_taken,
            "attempt": self._attempt,
            "total": self._total,
            "passed": self._passed,
            "ended": int(ended),
            "everywhere": min(self._has.values(), default=self._submitted),
        }
        portion = _Portion(self._submitted, rows, marks, reply, tap)
        self._portions.append(portion)
        for site in self._has:
            self._give(site, portion)
        self._enter()

    def _unknown(self, rows: list[pa.RecordBatch]) -> list[pa.RecordBatch]:
        """What of these rows no earlier attempt has brought."""
        fresh = []
        for batch in rows:
            known = min(self._passed, batch.num_rows)
            self._passed -= known
            fresh.append(batch.slice(known))
        self._total += sum(b.num_rows for b in fresh)
        return fresh

    def _give(self, site: SiteId, portion: _Portion) -> None:
        bodies = [to_ipc(b) for b in portion.rows]
        sizes = [b.size for b in bodies]
        message = wire.FeedPortion(self.source, portion.number, portion.marks, sizes, portion.tap)
        if site != STORE:
            self.send(site, message, list(bodies))
        elif self.keep is not None:
            self.keep(self._rank, portion.number, message, list(bodies))

    def _enter(self) -> None:
        """Take what all copies that count have, and forget what all have."""
        everywhere = min((self._has[s] for s in self._counted), default=self._submitted)
        for portion in self._portions:
            if self._taken < portion.number <= everywhere:
                self._take(portion)
        kept = min(self._has.values(), default=self._submitted)
        while self._portions and self._portions[0].number <= min(kept, self._taken):
            self._portions.popleft()

    def _take(self, portion: _Portion) -> None:
        self._taken = portion.number
        for rows in portion.rows:
            if rows.num_rows:
                self._ready.append(rows)
                self._ready_bytes += rows.nbytes
        self._ended = self._ended or bool(portion.marks["ended"])
        if portion.taken is not None:
            if self._ready_bytes >= HELD_BYTES_MAX:
                self._waiting.append(portion.taken)
            else:
                portion.taken(True, "")
        self.on_ready()

    def on_copies(
        self, leads: bool, others: Iterable[SiteId], joining: Iterable[SiteId], rank: int = 0
    ) -> None:
        """Who the other copies are has changed, in a view of this rank."""
        comes_to_lead = leads and not self.leads
        if comes_to_lead:
            self._submitted, self._rank = self._taken, rank
        self.leads = leads
        others, joining = set(others), set(joining)
        if self.keep is not None:
            others.add(STORE)
        self._counted = others | (self._counted & joining)
        if comes_to_lead and self.keep is not None:
            self._has[STORE] = self._portions[0].number - 1 if self._portions else self._taken
            for portion in self._portions:
                self._give(STORE, portion)
        if leads:
            self._has = {s: self._has.get(s, 0) for s in others | joining}
            self._enter()
        else:
            self._has = {}

    def on_portion(self, message: wire.FeedPortion, body: memoryview) -> None:
        """The leader has given this copy a portion."""
        if message.number != self._taken + 1:
            return  # it came before; or it left before the leader knew what this copy lacks
        rows, at = [], 0
        for size in message.sizes:
            rows.append(rows_of(body[at : at + size]))
            at += size
        portion = _Portion(message.number, rows, message.marks, None, message.tap)
        self._note(portion)
        # Kept in case this copy comes to lead while another one lacks it.
        self._portions.append(portion)
        while self._portions[0].number <= message.marks["everywhere"]:
            self._portions.popleft()
        self._take(portion)

    def _note(self, portion: _Portion) -> None:
        self._at(portion.marks)
        if self._tap is not None and portion.tap:
            try:
                self._tap.note(portion.tap)
            except (ValueError, KeyError, TypeError) as error:
                raise ProtocolError(f"a mark that is none: {error!r}") from error

    def recover(self, message: wire.FeedPortion, rows: list[pa.RecordBatch]) -> None:
        """Of a flow that was lost: all copies have this portion, as it is stored."""
        portion = _Portion(message.number, rows, message.marks, None, message.tap)
        self._note(portion)
        self._take(portion)
        self._submitted = self._taken

    def _at(self, marks: Mapping[str, int]) -> None:
        """Stand where another copy of the feed stood."""
        self._committed = marks["committed"]
        self._head, self._head_taken = marks["head"], marks["head_taken"]
        self._attempt, self._total, self._passed = (
            marks["attempt"],
            marks["total"],
            marks["passed"],
        )

    def on_has(self, site: SiteId, number: int, again: bool) -> None:
        """Another copy has so many portions; `again`: it wants those that follow sent again."""
        if site not in self._has:
            return
        self._has[site] = max(self._has[site], number)
        if again:
            self._counted.add(site)  # from now on no portion enters that it does not have
            for portion in self._portions:
                if portion.number > number:
                    self._give(site, portion)
        self._enter()

    @property
    def submitted(self) -> int:
        """How many portions there are, also of those that have not entered. What `save` gives is
        after all of them."""
        return self._submitted

    def is_kept(self, number: int) -> bool:
        """Whether all portions up to this one are stored."""
        return self._has.get(STORE, 0) >= number

    @property
    def has(self) -> int:
        """How many portions this copy has."""
        return self._taken

    def save(self) -> dict[str, int]:
        """Where the feed stands; what has been read of it is not part of it."""
        return {
            "committed": self._committed,
            "head": self._head,
            "head_taken": self._head_taken,
            "attempt": self._attempt,
            "total": self._total,
            "passed": self._passed,
            "ended": int(self._ended),
            "taken": self._taken,
            "rank": self._rank,
        }

    def save_tap(self) -> str:
        """How far a source has been read that only the leading copy reads."""
        return self._tap.save() if self._tap is not None else ""

    def restore_tap(self, saved: str) -> None:
        if self._tap is not None and saved:
            self._tap.restore(saved)

    def close(self) -> None:
        if self._tap is not None:
            self._tap.close()

    def unread(self) -> list[pa.RecordBatch]:
        """The rows that have entered and were not read."""
        return list(self._ready)

    def restore(self, saved: dict[str, int]) -> None:
        self._at(saved)
        self._ended = bool(saved["ended"])
        self._taken = self._submitted = saved["taken"]
        self._ready.clear()
        self._staged.clear()
        self._portions.clear()
        self._ready_bytes = 0


class Feeds:
    """The feeders' connections to one site: turns their messages into calls of the readers."""

    def __init__(
        self,
        readers: Callable[[], dict[int, FedReader]],
        leader: Callable[[int], tuple[str, int] | None],
    ) -> None:
        self._readers, self._leader = readers, leader
        self._opened: dict[Connection, wire.FeedOpen] = {}

    def forget(self, connection: Connection) -> None:
        """The connection is gone; what it had not completed waits for another attempt."""
        self._opened.pop(connection, None)

    def take(self, connection: Connection, message: wire.Message, body: memoryview) -> None:
        def reply(ok: bool, reason: str) -> None:
            connection.send(wire.FeedTaken(ok, reason))

        if isinstance(message, wire.FeedOpen | wire.FeedCommit | wire.FeedEnd):
            here = self._readers().get(message.source)
            if here is None or not here.leads:
                leader = self._leader(message.source)
                connection.send(wire.FeedTaken(False, NOT_HERE, leader))
                return
        match message:
            case wire.FeedOpen():
                reader = self._reader(message.source)
                self._opened[connection] = message
                reader.open(message.batch, message.partition, message.attempt, reply)
            case wire.FeedRows():
                reader, at = self._feed(connection)
                reader.rows(*at, rows_of(body), reply)
            case wire.FeedDone():
                reader, at = self._feed(connection)
                reader.done(*at, reply)
            case wire.FeedCommit():
                self._reader(message.source).commit(message.batch, message.partitions, reply)
            case wire.FeedEnd():
                self._reader(message.source).end(reply)

    def _feed(self, connection: Connection) -> tuple[FedReader, tuple[int, int, int]]:
        opened = self._opened.get(connection)
        if opened is None:
            raise ProtocolError("rows of a feed that was not opened")
        return self._reader(opened.source), (opened.batch, opened.partition, opened.attempt)

    def _reader(self, source: int) -> FedReader:
        reader = self._readers().get(source)
        if reader is None:
            raise ProtocolError(f"source {source} is not fed here")
        return reader
