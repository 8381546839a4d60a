"""The sinks of a simulated flow: stores outside the flow, which survive the sites."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.core.ids import GroupId, StageId, TaskId
from holdfast.errors import InvariantError

if TYPE_CHECKING:
    from holdfast.lab.sim.world import World

DURABLE_EVERY = 3
"""Number of epochs that a store makes durable together, as one does that writes files."""


class SimStore(Sink):
    """Replaces a sink of a flow. All replicas of the sink share it."""

    def __init__(
        self, world: World, stage: int, into: dict[int, pa.RecordBatch], with_order: bool
    ) -> None:
        self.world, self.into, self.with_order = world, into, with_order
        self._task: TaskId = (StageId(stage), GroupId(0))
        self.filled: set[int] = set()
        """The epochs that have rows, as far as some writer has had them."""

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return SimStoreWriter(self)

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        found = max(self.into, default=-1)
        acting = self.world.shell.acting
        if durable > found:  # a flow would treat a real store as one that was set back
            raise InvariantError(
                f"site {acting} expects epoch {durable} in a store that has {found}"
            )
        return SimStoreWriter(self), found

    def is_written_by_leader(self) -> bool:
        """Whether the site whose code runs leads the sink in the view that is committed."""
        known = self.world.ledger.known
        view = known.view if known is not None else None
        acting = self.world.shell.acting
        return view is not None and view.group(self._task).replicas[:1] == (acting,)


class SimStoreWriter(SinkWriter):
    """Writes to a store. Epochs that are not durable are lost with the writer."""

    def __init__(self, store: SimStore) -> None:
        self._store = store
        self._pending: dict[int, pa.RecordBatch] = {}

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        if epoch in self._pending:
            raise InvariantError(f"site {self._store.world.shell.acting} wrote epoch {epoch} twice")
        self._pending[epoch] = batch
        if batch.num_rows:
            self._store.filled.add(epoch)

    def commit(self, epoch: int) -> int:
        if len(self._pending) >= DURABLE_EVERY:
            self._make_durable()
        return max(self._store.into, default=-1)

    def close(self) -> None:
        self._make_durable()

    def _make_durable(self) -> None:
        pending, self._pending = self._pending, {}
        into = self._store.into
        for epoch, batch in pending.items():
            known, newest = into.get(epoch), max(into, default=-1)
            for left_out in range(newest + 1, epoch):
                if left_out in self._store.filled:
                    raise InvariantError(f"epoch {left_out}, which has rows, was left out")
                into[left_out] = batch.slice(0, 0)
            # A site that is no longer in the view may not know it. The store takes an epoch once.
            if known is not None and not known.equals(batch):
                raise InvariantError(f"epoch {epoch} was written twice, with different rows")
            if known is not None and self._store.is_written_by_leader():
                raise InvariantError(f"the leader wrote epoch {epoch}, which was there")
            into.setdefault(epoch, batch)
