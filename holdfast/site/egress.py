"""Egress: a sink's rows on one site, from the last merge to the sink's writer.

One replica leads and writes. The others keep what they have until it is durable: if the leader
dies, the next replica finds out what really was, and writes the rest. Of a flow that has a past its
results are the first epochs; nobody keeps them, as every replica finds them where they are stored.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.connectors.sinks import Authority, SinkWriter
from holdfast.engine.batches import user_names
from holdfast.errors import ProtocolError
from holdfast.net import wire
from holdfast.plan.planner import Stage
from holdfast.storage.restore_point import RestorePoint

GENERATION_BITS = 48
"""A flow that goes on after it was lost has higher terms than it had before."""


class Egress:
    """One replica of a sink's only task."""

    def __init__(
        self,
        flow: str,
        stage: Stage,
        incarnation: str = "",
        restore_point: RestorePoint | None = None,
    ) -> None:
        assert stage.sink is not None
        self._restore_point, self._stage = restore_point, stage.id
        self._replayed, self._stored = (
            0,
            restore_point.epochs if restore_point and restore_point.results else 0,
        )
        """Of the epochs that are stored, those before this one were taken."""
        self._later: list[tuple[int, pa.RecordBatch]] = []
        """Epochs that were taken and go on when all that are stored have been."""
        lost = (
            restore_point
            if restore_point is not None and restore_point.lost and not restore_point.untouched
            else None
        )
        self._lost = lost is not None
        self._sink = stage.sink
        self._whose = Authority(
            flow,
            stage.name,
            lost.incarnation if lost else incarnation,
            after=restore_point.epochs - 1
            if restore_point and restore_point.stopped and not lost
            else -1,
            lost=lost is not None,
        )
        self._generation = lost.generation if lost else 0
        schema = stage.inputs[0].schema
        self.columns = schema.names if stage.sink.with_order else user_names(schema)
        self._schema = pa.schema([schema.field(n) for n in self.columns])
        self.writer: SinkWriter | None = None
        self.leads = False
        self.taken = self.durable = (
            restore_point.epochs - 1 if restore_point and restore_point.stopped else -1
        )
        self._held: deque[tuple[int, pa.RecordBatch]] = deque()
        self._held_bytes = 0
        if stage.sink.replicated:
            self.writer = stage.sink.open(self._whose, self._schema)

    def recover(self, restore_point: RestorePoint) -> None:
        """Be as the egress was of a flow that was lost: what it held may be durable or not. Of one
        that was stopped everything is, but for rows that are kept for readers."""
        stored = restore_point.sinks.get(self._stage)
        if stored is None:
            return
        saved = msgspec.msgpack.decode(stored.saved, type=wire.EgressExtras)
        if "incarnation" not in saved:
            # Of a version that counted epochs without rows, which the store was not told of.
            self._whose = replace(self._whose, after=saved["durable"], lost=False)
        writer = saved.get("incarnation", self._whose.incarnation)
        if writer == self._whose.incarnation or self.is_read:
            self.restore(saved, restore_point.held_by(self._stage, self._schema))
        else:
            self._whose = replace(self._whose, before=(writer, saved["durable"]))

    def _in_term(self, term: int) -> Authority:
        return replace(self._whose, term=(self._generation << GENERATION_BITS) + term)

    @property
    def held(self) -> list[tuple[int, pa.RecordBatch]]:
        """The epochs with rows that are not known to be durable."""
        return [*self._held, *self._later]

    def begin(self, term: int = 0) -> None:
        """Lead from the first epoch on."""
        if self._lost:
            self.lead(term)  # in place of the one that was lost
            return
        self.leads = True
        whose = self._in_term(term)
        if self.writer is None and self._restore_point is not None and self._restore_point.stopped:
            self.writer = self._sink.go_on(whose, self._schema, self.durable)
        elif self.writer is None:
            self.writer = self._sink.open(whose, self._schema)

    def lead(self, term: int) -> None:
        """Go on in place of a leader that is gone."""
        if self.leads:
            return
        self.leads = True
        if self.writer is None:
            whose = self._in_term(term)
            self.writer, self.durable = self._sink.resume(whose, self._schema, self.durable)
            self.let_go(self.durable)
            self._replayed = self.durable + 1
            self._later = self.held
            self._hold([])
            self._go_on()

    @property
    def is_read(self) -> bool:
        """Whether readers ask this site for the rows."""
        return self._sink.unread_bytes_max is not None

    @property
    def ready(self) -> bool:
        """Whether an epoch can be taken now."""
        return self.is_replayed and self._has_room()

    @property
    def _writes(self) -> bool:
        return self.writer is not None and (self.leads or self._sink.replicated)

    def _has_room(self) -> bool:
        most = self._sink.unread_bytes_max
        if most is not None and self._held_bytes >= most:
            return False
        return self.writer is None or not self.leads or self.writer.room()

    def replay_results(self) -> None:
        """Called again and again: take one more of the epochs that are stored, if there is room."""
        if self._replayed < self._stored and self._writes and self._has_room():
            assert self._restore_point is not None
            epoch, self._replayed = self._replayed, self._replayed + 1
            batch = self._restore_point.result_of(self._stage, epoch, self._schema)
            batch = batch.select(self.columns).cast(self._schema)
            if self._sink.replicated:
                self.take(epoch, batch)
            else:  # it need not be held
                self.taken = epoch
                self._write(epoch, batch)
            self._go_on()

    def _go_on(self) -> None:
        """Take again what waited for the epochs that are stored, if it did."""
        if self._replayed >= self._stored:
            later, self._later = self._later, []
            for epoch, batch in later:
                self.take(epoch, batch)

    def flush_notes(self) -> None:
        """Called every now and then: what was taken becomes durable also when nothing follows it,
        what goes wrong is heard of, and readers that are away for too long are dropped."""
        if self.writer is None or not self.leads:
            return
        while self.is_read and self.writer.drop_reader(self._held_bytes):
            self.let_go(self.writer.commit(self._given))
        if self.durable < self._given:
            self.let_go(self.writer.commit(self._given))

    @property
    def _given(self) -> int:
        """Up to here the writer that leads has been given all rows. What was taken while another
        one led may wait for epochs that are stored."""
        return self.taken if self._replayed >= self._stored else self._replayed - 1

    def take(self, epoch: int, batch: pa.RecordBatch) -> None:
        self.taken = max(self.taken, epoch)
        if epoch > self.durable and batch.num_rows:  # one without may never become durable
            self._held.append((epoch, batch))
            self._held_bytes += int(batch.nbytes)
        # A leader before this one may have got further than this replica has.
        if self.writer is not None and (self._sink.replicated or epoch > self.durable):
            self._write(epoch, batch)

    def _write(self, epoch: int, batch: pa.RecordBatch) -> None:
        assert self.writer is not None
        self.writer.write(epoch, batch)
        self.let_go(self.writer.commit(epoch))

    def let_go(self, durable: int) -> None:
        """Everything up to this epoch is durable."""
        self.durable = max(self.durable, durable)
        while self._held and self._held[0][0] <= self.durable:
            self._held_bytes -= int(self._held.popleft()[1].nbytes)

    def _hold(self, held: list[tuple[int, pa.RecordBatch]]) -> None:
        self._held = deque(held)
        self._held_bytes = sum(int(batch.nbytes) for _, batch in held)

    @property
    def safe(self) -> int:
        """Up to here all rows are durable, if there were any."""
        held = self.held
        return held[0][0] - 1 if held else max(self.taken, self.durable)

    @property
    def is_drained(self) -> bool:
        """Whether nobody is expected to read any more of it."""
        return self.is_replayed and (not self.is_read or self.durable >= self.taken)

    @property
    def is_replayed(self) -> bool:
        """Whether all that is stored has been taken."""
        return not (self._writes and self._replayed < self._stored)

    @property
    def is_attended(self) -> bool:
        """Whether a reader is about to read what is held."""
        return self.writer is not None and self.leads and self.writer.is_attended()

    def answer(self, request: Mapping[str, Any]) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        """See `SinkWriter.answer`."""
        assert self.writer is not None
        answer = self.writer.answer(request, self._held)
        self.let_go(self.writer.commit(self.taken))
        return answer

    @property
    def notes(self) -> dict[str, Any]:
        """What readers have told the writer."""
        return self.writer.save() if self.writer is not None and self.is_read else {}

    def note(self, notes: dict[str, Any]) -> None:
        """What they have told the replica that leads."""
        if self.writer is None or not self.is_read:
            raise ProtocolError(f"sink {self._whose.sink!r} has no readers")
        self.writer.restore(notes)
        self.let_go(self.writer.commit(self.taken))

    def report(self) -> dict[str, Any] | None:
        return self.writer.report() if self.writer is not None and self.leads else None

    def save(self) -> wire.EgressExtras:
        saved = self.writer.save() if self.writer is not None and self._sink.replicated else {}
        return {
            "taken": self.taken,
            "durable": self.durable,
            "replayed_results": self._replayed,
            "writer": saved,
            "incarnation": self._whose.incarnation,
        }

    def restore(self, saved: wire.EgressExtras, held: list[tuple[int, pa.RecordBatch]]) -> None:
        if any(batch.schema != self._schema for _, batch in held):
            raise ProtocolError(
                f"sink {self._whose.sink!r}: rows of another schema were handed over"
            )
        self.taken, self.durable = saved["taken"], saved["durable"]
        self._replayed = saved["replayed_results"]
        self._hold(held)
        if self.writer is not None:
            self.writer.restore(saved["writer"])
            if self.is_read:
                self.let_go(self.writer.commit(self.taken))

    def finish(self) -> bool:
        """The last epoch is through; whether the sink has made everything durable. Asked again
        until it has."""
        if self.writer is None or not self.leads:
            return True
        self.let_go(self.writer.commit(self.taken))
        return self.writer.finish()

    def close(self) -> None:
        """The last epoch is through. What the store confirms of it counts for a flow that goes on
        from here: it will find out whether the store still has that."""
        if self.writer is not None and self.leads:
            self.writer.close()
            self.let_go(self.writer.commit(self.taken))

    def abandon(self) -> None:
        """Write nothing more, whatever is left."""
        if self.writer is not None:
            self.writer.abandon()
