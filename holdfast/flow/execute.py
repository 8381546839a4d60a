"""Running one stage: its operator and its steps over the rows of one epoch.

The same code runs in a site, in the batch job and under Structured Streaming. Errors of user code
are found here: the rows that raise are bisected for, and named in an `OperatorError` or put aside
as dead letters, as the flow chose.
"""

from __future__ import annotations

import json

import numpy as np
import pyarrow as pa

from holdfast.errors import OperatorError
from holdfast.flow.batches import Track, concat, empty, is_order_name, merge, order_names, order_of, take
from holdfast.flow.graph import DEAD_LETTER
from holdfast.flow.operators.base import KeyedOperator, Port
from holdfast.flow.plan import DEAD, Plan, PlannedStep, Stage

_DEAD_PORT = Port(DEAD_LETTER, 3)


class StageRunner:
    """One stage with its state, on one site, for the partitions that it holds there."""

    def __init__(self, plan: Plan, stage: Stage, partitions: int) -> None:
        self.plan, self.stage = plan, stage
        self.operator: KeyedOperator | None = (
            stage.operator.open(partitions) if stage.operator else None
        )
        self._dead: list[pa.RecordBatch] = []
        self.dead_rows = 0

    def run_source(self, batch: pa.RecordBatch, epoch: int) -> dict[int, pa.RecordBatch]:
        """Send a source's rows (with their order key) through the stage's steps."""
        return self._finish({"out": batch}, epoch)

    def run_keyed(
        self, inputs: list[list[pa.RecordBatch]], track: Track, epoch: int
    ) -> dict[int, pa.RecordBatch]:
        """Process an epoch: `inputs` has, for each exchange into the stage, its batches."""
        assert self.operator is not None
        merged = self.merged(inputs)
        registers = self._operate(merged, track, epoch)
        kept = {}
        for name, port in self.stage.ports.items():
            if self.stage.used[name] or name in self._read:
                names = [*self.stage.used[name], *order_names(port.width)]
                kept[name] = registers[name].select(names)
        return self._finish(kept, epoch)

    @property
    def _read(self) -> set[str]:
        return {e.register for e in self.stage.outputs} | {s.source for s in self.stage.steps}

    def merged(self, inputs: list[list[pa.RecordBatch]]) -> list[pa.RecordBatch]:
        """One batch for each input of the head, in sequence order."""
        arity = 1 + max(e.input for e in self.stage.inputs)
        merged = []
        for position in range(arity):
            at = [i for i, e in enumerate(self.stage.inputs) if e.input == position]
            schema = self.stage.inputs[at[0]].schema
            merged.append(merge([b for i in at for b in inputs[i]], schema))
        return merged

    def _finish(self, registers: dict[str, pa.RecordBatch], epoch: int) -> dict[int, pa.RecordBatch]:
        for planned in self.stage.steps:
            registers[planned.target] = self._step(planned, registers[planned.source], epoch)
        registers[DEAD] = concat([empty(_DEAD_PORT.full_schema), *self._dead])
        self._dead = []
        return {e.id: registers[e.register].select(e.schema.names) for e in self.stage.outputs}

    # --- user code, and what happens when it raises ---------------------------------------------

    def _step(self, planned: PlannedStep, batch: pa.RecordBatch, epoch: int) -> pa.RecordBatch:
        step = planned.step
        if batch.num_rows == 0:
            names = [*planned.columns, *order_names(step.port.width)]
            full = step.port.full_schema
            return empty(pa.schema([full.field(n) for n in names]))
        try:
            out = step.run(batch)
        except Exception as error:
            if batch.num_rows == 1:
                self._put_aside(step.label, batch, epoch, error)
                return self._step(planned, batch.slice(0, 0), epoch)
            half = batch.num_rows // 2
            parts = [batch.slice(0, half), batch.slice(half)]
            return concat([self._step(planned, part, epoch) for part in parts])
        return out.select([*planned.columns, *order_names(step.port.width)])

    def _operate(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        """Run the operator. It raises before it changes state, and does not mind how rows are cut
        into calls, so a batch with bad rows can be fed to it in ever smaller pieces."""
        assert self.operator is not None
        try:
            return self.operator.process(inputs, track, epoch)
        except Exception as error:
            seqs = np.unique(np.concatenate([order_of(b)[0] for b in inputs if b.num_rows]))
            if seqs.size <= 1:
                bad = next(b for b in inputs if b.num_rows)
                self._put_aside(self.operator.label, bad, epoch, error)
                return self.operator.process([b.slice(0, 0) for b in inputs], track, epoch)
            middle = int(seqs[seqs.size // 2 - 1])
            results = [
                self._operate(part, part_track, epoch)
                for part, part_track in zip(_split(inputs, middle), track.split(middle), strict=True)
            ]
            return {name: concat([r[name] for r in results]) for name in results[0]}

    def _put_aside(self, label: str, batch: pa.RecordBatch, epoch: int, error: Exception) -> None:
        cause = f"{type(error).__name__}: {error}"
        user = batch.select([n for n in batch.schema.names if not is_order_name(n)])
        rows = [json.dumps(r, default=str) for r in user.to_pylist()]
        if self.plan.on_error == "stop":
            raise OperatorError(
                flow=self.plan.flow,
                stage=self.stage.name,
                operator=label,
                epoch=epoch,
                row=f"sequence number {order_of(batch)[0][0]}: {rows[0]}",
                cause=cause,
            ) from error
        self.dead_rows += len(rows)
        n = len(rows)
        columns = [[self.stage.name] * n, [label] * n, [cause] * n, rows]
        order = [order_of(batch)[0], np.full(n, self.stage.id), np.arange(n)]
        arrays = [pa.array(c, pa.string()) for c in columns] + [pa.array(o) for o in order]
        self._dead.append(pa.RecordBatch.from_arrays(arrays, schema=_DEAD_PORT.full_schema))


def _split(inputs: list[pa.RecordBatch], seq: int) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Each input's rows up to the sequence number `seq`, and those after it."""
    first = [take(b, np.flatnonzero(order_of(b)[0] <= seq)) for b in inputs]
    second = [take(b, np.flatnonzero(order_of(b)[0] > seq)) for b in inputs]
    return first, second
