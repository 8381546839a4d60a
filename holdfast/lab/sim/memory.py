"""Remembers the results of operators: in many runs of a flow most orders are the same.

The two replicas of a partition do the same work, and so do the runs of other seeds, as long as
their epochs are cut in the same way. The runner here looks up the result of the same operator with
the same state for the same frames, byte for byte, and computes only what is not in the memory. Its
own operator gets its state only when something reads it.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from holdfast.core.effects import ProcessBundles
from holdfast.core.ids import ExchangeId
from holdfast.engine.batches import Track, content_of, row_digests
from holdfast.engine.operators.base import KeyedOperator
from holdfast.engine.state import StateTable
from holdfast.net import wire
from holdfast.site.stages import Outputs, TaskRunner

ENTRIES_MAX = 20_000


@dataclass(frozen=True, slots=True, eq=False)
class _RememberedState:
    """The state of an operator: its tables, and its other values. Equal states have equal
    `name`s."""

    name: Hashable
    tables: dict[str, pa.RecordBatch]
    extras: dict[str, int]

    @classmethod
    def of(cls, operator: KeyedOperator) -> _RememberedState:
        tables, extras = operator.extract(), operator.extras()
        rows = tuple((table, _in_any_order(batch)) for table, batch in tables.items())
        return cls((rows, tuple(extras.items())), tables, extras)

    def put_into(self, operator: KeyedOperator) -> None:
        operator.install(self.tables)
        operator.install_extras(self.extras)


def _in_any_order(batch: pa.RecordBatch) -> bytes:
    """Encode the rows of a table without their slots and their epochs."""
    values = batch.select([n for n in batch.schema.names if n != "__changed"])
    return np.sort(row_digests(values)).tobytes()


class Memory:
    """The results of orders, for all runs of one flow."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Any] = {}
        self.asked = self.missed = 0

    def replay_results(self, key: Hashable) -> Any:
        self.asked += 1
        return self._known.get(key)

    def keep(self, key: Hashable, value: Any) -> Any:
        if len(self._known) >= ENTRIES_MAX:
            self._known.clear()
        self.missed += 1
        self._known[key] = value
        return value

    def runner(self) -> type[TaskRunner]:
        """Return a class of runners that use this memory."""
        return type("Remembering", (_Remembering,), {"memory": self})


class _Remembering(TaskRunner):
    """Runs a task with results from the memory."""

    memory: Memory
    processor_s = staticmethod(lambda: 0.0)

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._who = (self.stage.id, *((c.first, c.end) for c in self._consumers()))
        self._state: _RememberedState | None = None
        self._is_behind = False
        """Whether the operator lacks that state."""
        operator = self.runner.operator
        self._tells_all = operator is None or all(
            isinstance(table, StateTable) for table in operator.tables().values()
        )
        """Whether the extracted tables are the operator's whole state. A join also knows when rows
        arrived."""

    def _consumers(self) -> list[Any]:
        return [c for e in self.stage.outputs for c in self.routers[ExchangeId(e.id)].groups]

    @property
    def operator(self) -> KeyedOperator | None:
        if self._is_behind and self._state is not None and self.stage.operator is not None:
            self._is_behind = False
            self.runner.operator = self.stage.operator.open(self.partitions)
            self.protect(self.guard, self.followers)
            self._state.put_into(self.runner.operator)
        return self.runner.operator

    def operator_came_from(self, epoch: int) -> int:
        if not self._is_behind or self._state is None:
            return super().operator_came_from(epoch)
        born = [pc.min(t.column("__born")).as_py() for t in self._state.tables.values() if t]
        return min([epoch, *(b - 1 for b in born)])

    def restore(self, extras: wire.Extras, held: list[tuple[int, pa.RecordBatch]]) -> None:
        super().restore(extras, held)
        self._state = None

    def ingest(
        self, made: Sequence[tuple[pa.RecordBatch, Track]], bases: Sequence[int], epoch: int
    ) -> list[Outputs]:
        rows = tuple((track.to_bytes(), content_of(batch)) for batch, track in made)
        key = (self._who, rows, tuple(bases))
        known = self.memory.replay_results(key)
        return known or self.memory.keep(key, super().ingest(made, bases, epoch))

    def merge(self, order: ProcessBundles) -> list[pa.RecordBatch]:
        key = (self._who, _frames(order))
        known = self.memory.replay_results(key)
        return known or self.memory.keep(key, super().merge(order))

    def process(self, order: ProcessBundles) -> list[Outputs]:
        if not self._tells_all:
            return super().process(order)
        if self._state is None:
            assert self.operator is not None
            self._state = _RememberedState.of(self.operator)
        key = (self._who, self._state.name, order.epoch, _frames(order))
        known = self.memory.replay_results(key)
        if known is None:
            known = self.memory.keep(key, self._compute(order))
        else:
            self._is_behind = True
        outputs, self._state, dead_rows = known
        self.runner.dead_rows += dead_rows
        return outputs

    def _compute(self, order: ProcessBundles) -> tuple[list[Outputs], _RememberedState, int]:
        operator, dead_rows = self.operator, self.runner.dead_rows
        assert operator is not None
        outputs = super().process(order)
        found = self.runner.dead_rows - dead_rows
        self.runner.dead_rows = dead_rows
        return outputs, _RememberedState.of(operator), found


def _frames(order: ProcessBundles) -> Hashable:
    return tuple(
        (x, *(f.content for f in frames))
        for bundles in order.epochs
        for x, frames in bundles.items()
    )
