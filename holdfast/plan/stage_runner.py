"""Running one stage: its operator and its steps over the rows of one epoch.

The same code runs in a site, in the batch job and under Structured Streaming. Errors of user code
are found here: the rows that raise are bisected for, and named in an `OperatorError` or put aside
as dead letters, as the flow chose. That there is no more memory is the fault of no row: it stops
the flow with an `OutOfMemoryError`, which names the stage and the size of its state.
"""

from __future__ import annotations

import json
from contextlib import AbstractContextManager
from functools import partial

import numpy as np
import pyarrow as pa

from holdfast.api.nodes import DEAD_LETTER
from holdfast.engine.batches import (
    DECODE_ERROR,
    Track,
    concat,
    empty,
    is_order_name,
    merge,
    order_names,
    order_of,
    row_digests,
    row_values,
    sort,
    take,
    user_names,
)
from holdfast.engine.memory import NO_STATE, is_out_of_memory, naming, state_size
from holdfast.engine.operators.base import KeyedOperator, Port
from holdfast.errors import OperatorError
from holdfast.plan.planner import DEAD, Plan, PlannedStep, Stage

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
        self._read = {e.register for e in stage.outputs} | {s.source for s in stage.steps}
        self._gives_dead_letters = DEAD in self._read
        self._over_dead = _descendants(stage, DEAD)

    def run_source(self, batch: pa.RecordBatch, epoch: int) -> dict[int, pa.RecordBatch]:
        """Send a source's rows (with their order key) through the stage's steps."""
        with self._naming(epoch):
            return self._finish({"out": self._without_decode_errors(batch, epoch)}, epoch)

    def place(self, epoch: int) -> str:
        """Where in the flow this is, for errors."""
        return f"flow {self.plan.flow!r}, stage {self.stage.name!r}, epoch {epoch}"

    def _naming(self, epoch: int) -> AbstractContextManager[None]:
        """Whatever runs out of memory in here says where that was."""
        return naming(partial(self.place, epoch), self._state_size)

    def _state_size(self) -> str:
        operator = self.operator
        return state_size(operator.state_rows(), operator.state_bytes()) if operator else NO_STATE

    def _without_decode_errors(self, batch: pa.RecordBatch, epoch: int) -> pa.RecordBatch:
        """Rows that the source could not read are like rows that a step raised on."""
        if DECODE_ERROR not in batch.schema.names:
            return batch
        decode_errors = batch.column(DECODE_ERROR)
        names = [n for n in batch.schema.names if n != DECODE_ERROR]
        declared = self.stage.ports["out"].full_schema
        batch = pa.RecordBatch.from_arrays(
            [batch.column(n) for n in names], schema=pa.schema([declared.field(n) for n in names])
        )
        fine = decode_errors.is_null().to_numpy(zero_copy_only=False)
        if fine.all():
            return batch
        for at in np.flatnonzero(~fine).tolist():
            cause, row = json.loads(decode_errors[at].as_py())
            self._set_aside("read", "in", batch.slice(at, 1), epoch, cause, row)
        return take(batch, np.flatnonzero(fine))

    def run_keyed(
        self, inputs: list[list[pa.RecordBatch]], track: Track, epoch: int
    ) -> dict[int, pa.RecordBatch]:
        """Process an epoch: `inputs` has, for each exchange into the stage, its batches."""
        return self.run_merged(self.merged(inputs), track, epoch)

    def run_merged(
        self, merged: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[int, pa.RecordBatch]:
        """Process an epoch: `merged` has, for each input of the head, its rows in order."""
        assert self.operator is not None
        with self._naming(epoch):
            registers = self._operate(merged, track, epoch)
            kept = {}
            for name, port in self.stage.ports.items():
                if self.stage.used[name] or name in self._read:
                    names = [*self.stage.used[name], *order_names(port.width)]
                    kept[name] = registers[name].select(names)
            return self._finish(kept, epoch)

    def merged(self, inputs: list[list[pa.RecordBatch]]) -> list[pa.RecordBatch]:
        """One batch for each input of the head, in sequence order."""
        arity = 1 + max(e.input for e in self.stage.inputs)
        merged = []
        for position in range(arity):
            at = [i for i, e in enumerate(self.stage.inputs) if e.input == position]
            schema = self.stage.inputs[at[0]].schema
            merged.append(merge([b for i in at for b in inputs[i]], schema))
        return merged

    def _finish(
        self, registers: dict[str, pa.RecordBatch], epoch: int
    ) -> dict[int, pa.RecordBatch]:
        for planned in self.stage.steps:
            if planned.target not in self._over_dead:
                registers[planned.target] = self._step(planned, registers[planned.source], epoch)
        if self._gives_dead_letters:
            registers[DEAD] = concat([empty(_DEAD_PORT.full_schema), *self._dead])
            self._dead = []
        for planned in self.stage.steps:
            if planned.target in self._over_dead:
                registers[planned.target] = self._step(planned, registers[planned.source], epoch)
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
            if is_out_of_memory(error):
                raise
            if batch.num_rows == 1:
                self._put_aside(step.label, planned.target, batch, epoch, error)
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
            with np.errstate(all="ignore"):
                return self.operator.process(inputs, track, epoch)
        except Exception as error:
            rows = sum(b.num_rows for b in inputs)
            if rows == 0 or is_out_of_memory(error):
                raise  # no row is to blame
            if rows == 1:
                position = next(i for i, b in enumerate(inputs) if b.num_rows)
                place = f"in{position}"
                self._put_aside(self.operator.label, place, inputs[position], epoch, error)
                return self.operator.process([b.slice(0, 0) for b in inputs], track, epoch)
            first, second = _halves(inputs)
            # The watermark's step at the first row of the second half comes after that row; and
            # after those of the first half that stand at the same place.
            seq = min(int(order_of(b)[0][0]) for b in second if b.num_rows)
            tracks = track.split(seq - 1)
            results = [
                self._operate(first, tracks[0], epoch),
                self._operate(second, tracks[1], epoch),
            ]
            return {name: sort(concat([r[name] for r in results])) for name in results[0]}

    def _put_aside(
        self, label: str, place: str, batch: pa.RecordBatch, epoch: int, error: Exception
    ) -> None:
        cause = f"{type(error).__name__}: {error}"
        user = batch.select(user_names(batch.schema))
        row = json.dumps(row_values(user, 0), default=str)
        self._set_aside(label, place, batch, epoch, cause, row, error)

    def _set_aside(
        self,
        label: str,
        place: str,
        batch: pa.RecordBatch,
        epoch: int,
        cause: str,
        row: str,
        error: Exception | None = None,
    ) -> None:
        """Stop at the one row of `batch`, or make a dead letter of it. A step over dead letters
        always stops: there is nowhere left to put them."""
        if self.plan.on_error == "stop" or place in self._over_dead:
            raise OperatorError(
                flow=self.plan.flow,
                stage=self.stage.name,
                operator=label,
                epoch=epoch,
                row=f"sequence number {order_of(batch)[0][0]}: {row}",
                cause=cause,
            ) from error
        self.dead_rows += 1
        arrays = [pa.array([v], pa.string()) for v in (self.stage.name, label, cause, row)]
        order = [int(order_of(batch)[0][0]), self.stage.id, _tell_apart(batch, place)]
        arrays += [pa.array([o], pa.int64()) for o in order]
        self._dead.append(pa.RecordBatch.from_arrays(arrays, schema=_DEAD_PORT.full_schema))


def _descendants(stage: Stage, register: str) -> set[str]:
    """The registers that steps of `stage` fill, directly or not, from `register`."""
    found = {register}
    for planned in stage.steps:
        if planned.source in found:
            found.add(planned.target)
    return found - {register}


def _tell_apart(batch: pa.RecordBatch, place: str) -> int:
    """A number for the one row of `batch` at `place` in its stage: several rows with the same
    sequence number may be put aside, on different sites, and need places of their own."""
    order = batch.select([n for n in batch.schema.names if is_order_name(n)])
    named = order.append_column("place", pa.array([place]))
    return int(row_digests(named).view(np.int64)[0])


def _halves(inputs: list[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """The first half of all rows in their order, and the second; of equals, by input."""
    width = max(len(order_of(b)) for b in inputs)
    columns: list[list[np.ndarray]] = [[] for _ in range(width + 1)]
    for position, batch in enumerate(inputs):
        order = order_of(batch)
        zero = np.zeros(batch.num_rows, np.int64)
        for level in range(width):
            columns[level].append(order[level] if level < len(order) else zero)
        columns[width].append(zero + position)
    ranked = np.lexsort([np.concatenate(c) for c in reversed(columns)])
    early = np.zeros(ranked.size, bool)
    early[ranked[: ranked.size // 2]] = True
    parts = np.split(early, np.cumsum([b.num_rows for b in inputs])[:-1])
    first = [take(b, np.flatnonzero(e)) for b, e in zip(inputs, parts, strict=True)]
    second = [take(b, np.flatnonzero(~e)) for b, e in zip(inputs, parts, strict=True)]
    return first, second
