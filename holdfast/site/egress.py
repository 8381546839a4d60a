"""Egress: a sink's rows on one site, from the last merge to the sink's writer.

One replica leads and writes. The others keep rows until they are durable: if the leader dies, the
next replica asks the store what is durable, and writes the rest. If a flow begins with a restore
point, the stored results are its first epochs. Replicas do not keep these rows, because each can
read them from the restore point.
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
"""Terms of the writers include the generation of a lost flow above these bits, so that terms
increase when it is resumed."""


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
        """The next epoch of the restore point to replay, and the number of those epochs."""
        self._waiting: list[tuple[int, pa.RecordBatch]] = []
        """Epochs that were taken and wait until all stored epochs have been replayed."""
        lost = (
            restore_point
            if restore_point is not None and restore_point.lost and not restore_point.untouched
            else None
        )
        self._lost = lost is not None
        self._sink = stage.sink
        self._authority = Authority(
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
            self.writer = stage.sink.open(self._authority, self._schema)

    def recover(self, restore_point: RestorePoint) -> None:
        """Restore the egress of a stored flow. If the flow was lost, the rows that it held may be
        durable or not. If it was stopped, all are, except rows that are kept for readers."""
        stored = restore_point.sinks.get(self._stage)
        if stored is None:
            return
        saved = msgspec.msgpack.decode(stored.saved, type=wire.EgressExtras)
        if "incarnation" not in saved:
            # An earlier version wrote this. It counted epochs without rows, which are not in the
            # store.
            self._authority = replace(self._authority, after=saved["durable"], lost=False)
        writer = saved.get("incarnation", self._authority.incarnation)
        if writer == self._authority.incarnation or self.is_read:
            self.restore(saved, restore_point.held_by(self._stage, self._schema))
        else:
            self._authority = replace(self._authority, before=(writer, saved["durable"]))

    def _in_term(self, term: int) -> Authority:
        return replace(self._authority, term=(self._generation << GENERATION_BITS) + term)

    @property
    def held(self) -> list[tuple[int, pa.RecordBatch]]:
        """The epochs with rows that may not be durable yet."""
        return [*self._held, *self._waiting]

    def begin(self, term: int = 0) -> None:
        """Lead from the first epoch on."""
        if self._lost:
            self.lead(term)  # it succeeds the writer of the lost flow
            return
        self.leads = True
        whose = self._in_term(term)
        if self.writer is None and self._restore_point is not None and self._restore_point.stopped:
            self.writer = self._sink.go_on(whose, self._schema, self.durable)
        elif self.writer is None:
            self.writer = self._sink.open(whose, self._schema)

    def lead(self, term: int) -> None:
        """Take over from a leader that is gone."""
        if self.leads:
            return
        self.leads = True
        if self.writer is None:
            whose = self._in_term(term)
            self.writer, self.durable = self._sink.resume(whose, self._schema, self.durable)
            self.drop_durable(self.durable)
            self._replayed = self.durable + 1
            self._waiting = self.held
            self._hold([])
            self._take_waiting()

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
        """Replay one more epoch of the restore point, if there is room. Called repeatedly."""
        if self._replayed < self._stored and self._writes and self._has_room():
            assert self._restore_point is not None
            epoch, self._replayed = self._replayed, self._replayed + 1
            batch = self._restore_point.result_of(self._stage, epoch, self._schema)
            batch = batch.select(self.columns).cast(self._schema)
            if self._sink.replicated:
                self.take(epoch, batch)
            else:  # the restore point has the rows, so they are not held
                self.taken = epoch
                self._write(epoch, batch)
            self._take_waiting()

    def _take_waiting(self) -> None:
        """Take the epochs that waited for the stored ones, once all of these are replayed."""
        if self._replayed >= self._stored:
            later, self._waiting = self._waiting, []
            for epoch, batch in later:
                self.take(epoch, batch)

    def flush_notes(self) -> None:
        """Make rows durable also when none follow, report errors of the store, and drop readers
        that stayed away for too long. Called at intervals."""
        if self.writer is None or not self.leads:
            return
        while self.is_read and self.writer.drop_reader(self._held_bytes):
            self.drop_durable(self.writer.commit(self._written_upto))
        if self.durable < self._written_upto:
            self.drop_durable(self.writer.commit(self._written_upto))

    @property
    def _written_upto(self) -> int:
        """The last epoch of which the leading writer has all rows. Epochs that were taken while
        another replica led may wait for stored epochs."""
        return self.taken if self._replayed >= self._stored else self._replayed - 1

    def take(self, epoch: int, batch: pa.RecordBatch) -> None:
        self.taken = max(self.taken, epoch)
        if epoch > self.durable and batch.num_rows:  # an empty epoch may never become durable
            self._held.append((epoch, batch))
            self._held_bytes += int(batch.nbytes)
        # An earlier leader may have written more than this replica has taken.
        if self.writer is not None and (self._sink.replicated or epoch > self.durable):
            self._write(epoch, batch)

    def _write(self, epoch: int, batch: pa.RecordBatch) -> None:
        assert self.writer is not None
        self.writer.write(epoch, batch)
        self.drop_durable(self.writer.commit(epoch))

    def drop_durable(self, durable: int) -> None:
        """Drop the rows up to this epoch, which are durable."""
        self.durable = max(self.durable, durable)
        while self._held and self._held[0][0] <= self.durable:
            self._held_bytes -= int(self._held.popleft()[1].nbytes)

    def _hold(self, held: list[tuple[int, pa.RecordBatch]]) -> None:
        self._held = deque(held)
        self._held_bytes = sum(int(batch.nbytes) for _, batch in held)

    @property
    def safe(self) -> int:
        """The last epoch up to which all rows are durable."""
        held = self.held
        return held[0][0] - 1 if held else max(self.taken, self.durable)

    @property
    def is_drained(self) -> bool:
        """Whether no reader will read more rows."""
        return self.is_replayed and (not self.is_read or self.durable >= self.taken)

    @property
    def is_replayed(self) -> bool:
        """Whether all stored epochs have been replayed, as far as this replica writes."""
        return not (self._writes and self._replayed < self._stored)

    @property
    def is_attended(self) -> bool:
        """Whether a reader is about to read the rows that are held."""
        return self.writer is not None and self.leads and self.writer.is_attended()

    def answer(self, request: Mapping[str, Any]) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        """See `SinkWriter.answer`."""
        assert self.writer is not None
        answer = self.writer.answer(request, self._held)
        self.drop_durable(self.writer.commit(self.taken))
        return answer

    @property
    def notes(self) -> dict[str, Any]:
        """What the writer knows of its readers."""
        return self.writer.save() if self.writer is not None and self.is_read else {}

    def note(self, notes: dict[str, Any]) -> None:
        """Adopt the notes of the leading replica."""
        if self.writer is None or not self.is_read:
            raise ProtocolError(f"sink {self._authority.sink!r} has no readers")
        self.writer.restore(notes)
        self.drop_durable(self.writer.commit(self.taken))

    def report(self) -> dict[str, Any] | None:
        return self.writer.report() if self.writer is not None and self.leads else None

    def save(self) -> wire.EgressExtras:
        saved = self.writer.save() if self.writer is not None and self._sink.replicated else {}
        return {
            "taken": self.taken,
            "durable": self.durable,
            "replayed_results": self._replayed,
            "writer": saved,
            "incarnation": self._authority.incarnation,
        }

    def restore(self, saved: wire.EgressExtras, held: list[tuple[int, pa.RecordBatch]]) -> None:
        if any(batch.schema != self._schema for _, batch in held):
            raise ProtocolError(
                f"sink {self._authority.sink!r}: rows of another schema were handed over"
            )
        self.taken, self.durable = saved["taken"], saved["durable"]
        self._replayed = saved["replayed_results"]
        self._hold(held)
        if self.writer is not None:
            self.writer.restore(saved["writer"])
            if self.is_read:
                self.drop_durable(self.writer.commit(self.taken))

    def finish(self) -> bool:
        """Whether the sink has made everything durable, after the last epoch. Called repeatedly
        until it has."""
        if self.writer is None or not self.leads:
            return True
        self.drop_durable(self.writer.commit(self.taken))
        return self.writer.finish()

    def close(self) -> None:
        """Close the writer after the last epoch. What the store confirms now counts for a flow that
        is resumed from here: it checks that the store still has it."""
        if self.writer is not None and self.leads:
            self.writer.close()
            self.drop_durable(self.writer.commit(self.taken))

    def abandon(self) -> None:
        """Stop writing, even if rows are left."""
        if self.writer is not None:
            self.writer.abandon()
