"""Rows that Spark tasks push to an ingress, instead of the ingress reading them.

A batch of a source consists of numbered partitions. Two ways of taking one:

*Staged* (a streaming query's micro-batches): rows wait until the driver commits the batch, since a
task may be run again and a re-run batch may differ; then they are taken in partition order, once.

*Through* (one batch DataFrame, read in order): partitions are taken one after another, each as it
comes in; the tasks of later partitions wait. Nothing is held but what the limit allows.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import pyarrow as pa

from holdfast.errors import ProtocolError
from holdfast.flow.batches import from_ipc
from holdfast.flow.sources import SplitReader
from holdfast.site import wire

Reply = Callable[[bool, str], None]

HELD_BYTES_MAX = 32 << 20


@dataclass
class _Partition:
    attempt: int
    batches: list[pa.RecordBatch] = field(default_factory=list)
    rows: int = 0
    done: bool = False
    waiting: list[Reply] = field(default_factory=list)


class FedReader(SplitReader):
    """The only split of a fed source. Replies to feeders when there is room for more."""

    def __init__(self, schema: pa.Schema, through: bool) -> None:
        self._empty = pa.RecordBatch.from_pylist([], schema=schema)
        self.through = through
        self._ready: deque[pa.RecordBatch] = deque()
        self._ready_bytes = 0
        self._staged: dict[tuple[int, int], _Partition] = {}
        self._committed = -1
        self._head = 0  # through: the partition whose turn it is
        self._head_taken = 0  # through: how many of its rows were taken
        self._ended = False
        self._waiting: list[Reply] = []  # commits that wait for room
        self.on_ready: Callable[[], None] = lambda: None

    # --- the flow's side ------------------------------------------------------------------------

    def read(self, rows_max: int) -> pa.RecordBatch | None:
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
        head = self._staged.get((0, self._head)) if self.through else None
        if head is not None:
            waiting, head.waiting = waiting + head.waiting, []
        for reply in waiting:
            reply(True, "")

    # --- the feeders' side ----------------------------------------------------------------------

    def open(self, batch: int, partition: int, attempt: int, reply: Reply) -> None:
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
            self._take(rows.slice(max(0, self._head_taken - before)))
            self._head_taken = max(self._head_taken, staged.rows)
            if self._ready_bytes >= HELD_BYTES_MAX:
                staged.waiting.append(reply)
                return
        else:
            staged.batches.append(rows)
            if self.through and sum(b.nbytes for b in staged.batches) >= HELD_BYTES_MAX:
                staged.waiting.append(reply)
                return
        reply(True, "")

    def done(self, batch: int, partition: int, attempt: int, reply: Reply) -> None:
        staged = self._staged.get((batch, partition))
        if staged is None or staged.attempt != attempt:
            reply(False, "another attempt at this partition has begun")
            return
        staged.done = True
        reply(True, "")
        if self.through:
            self._pass_on()

    def _pass_on(self) -> None:
        """Through: go on to the next partition, and let in what of it is already here."""
        while (staged := self._staged.get((0, self._head))) is not None and staged.done:
            del self._staged[0, self._head]
            self._head, self._head_taken = self._head + 1, 0
            following = self._staged.get((0, self._head))
            if following is not None:
                for rows in following.batches:
                    self._take(rows)
                following.batches = []
                self._head_taken = following.rows
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
        for partition in parts:
            for rows in self._staged.pop((batch, partition)).batches:
                self._take(rows)
        for stale in [key for key in self._staged if key[0] <= batch]:
            del self._staged[stale]
        if self._ready_bytes >= HELD_BYTES_MAX:
            self._waiting.append(reply)
        else:
            reply(True, "")

    def end(self, reply: Reply) -> None:
        self._ended = True
        reply(True, "")
        self.on_ready()

    def _take(self, rows: pa.RecordBatch) -> None:
        if rows.num_rows:
            self._ready.append(rows)
            self._ready_bytes += rows.nbytes
            self.on_ready()


class Feeds:
    """The feeders' connections to one site: turns their messages into calls of the readers."""

    def __init__(self, readers: dict[int, FedReader]) -> None:
        self._readers = readers
        self._opened: dict[wire.Connection, wire.FeedOpen] = {}

    def forget(self, connection: wire.Connection) -> None:
        """The connection is gone; what it had not completed waits for another attempt."""
        self._opened.pop(connection, None)

    def take(self, connection: wire.Connection, message: wire.Message, body: memoryview) -> None:
        def reply(ok: bool, reason: str) -> None:
            connection.send(wire.FeedTaken(ok, reason))

        match message:
            case wire.FeedOpen():
                reader = self._reader(message.source)
                self._opened[connection] = message
                reader.open(message.batch, message.partition, message.attempt, reply)
            case wire.FeedRows():
                reader, at = self._feed(connection)
                reader.rows(*at, _decoded(body), reply)
            case wire.FeedDone():
                reader, at = self._feed(connection)
                reader.done(*at, reply)
            case wire.FeedCommit():
                self._reader(message.source).commit(message.batch, message.partitions, reply)
            case wire.FeedEnd():
                self._reader(message.source).end(reply)

    def _feed(self, connection: wire.Connection) -> tuple[FedReader, tuple[int, int, int]]:
        opened = self._opened.get(connection)
        if opened is None:
            raise ProtocolError("rows of a feed that was not opened")
        return self._reader(opened.source), (opened.batch, opened.partition, opened.attempt)

    def _reader(self, source: int) -> FedReader:
        if source not in self._readers:
            raise ProtocolError(f"source {source} is not fed here")
        return self._readers[source]


def _decoded(body: memoryview) -> pa.RecordBatch:
    """The rows that a feeder sent."""
    try:
        batch = from_ipc(pa.py_buffer(body))
        batch.validate()
        return batch
    except (pa.ArrowException, OSError, StopIteration) as error:
        raise ProtocolError(f"rows that are no Arrow batch: {error}") from error
