"""Runs one stage: its operator and its steps over the rows of one epoch.

The same code runs in a site, in the batch job and under Structured Streaming. It handles errors of
user code: it bisects the batch to find the rows that raise, and raises an `OperatorError` that
names the row or diverts the rows as dead letters, as the flow's `on_error` says. Running out of
memory is not the fault of a row: it stops the flow with an `OutOfMemoryError`, which names the
stage and the size of its state.
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
    """A stage and its state, for the partitions that one site holds."""

    def __init__(self, plan: Plan, stage: Stage, partitions: int) -> None:
        self.plan, self.stage = plan, stage
        self.operator: KeyedOperator | None = (
            stage.operator.open(partitions) if stage.operator else None
        )
        self._dead: list[pa.RecordBatch] = []
        self.dead_rows = 0
        self._read = {e.register for e in stage.outputs} | {s.source for s in stage.steps}
        self._emits_dead_letters = DEAD in self._read
        self._over_dead = _descendants(stage, DEAD)

    def run_source(self, batch: pa.RecordBatch, epoch: int) -> dict[int, pa.RecordBatch]:
        """Run the stage's steps over a source's rows, which have their order key."""
        with self._naming(epoch):
            return self._finish({"out": self._without_decode_errors(batch, epoch)}, epoch)

    def place(self, epoch: int) -> str:
        """Describe the flow, stage and epoch for error messages."""
        return f"flow {self.plan.flow!r}, stage {self.stage.name!r}, epoch {epoch}"

    def _naming(self, epoch: int) -> AbstractContextManager[None]:
        """Return a context that adds flow, stage, epoch and state size to out-of-memory errors."""
        return naming(partial(self.place, epoch), self._state_size)

    def _state_size(self) -> str:
        operator = self.operator
        return state_size(operator.state_rows(), operator.state_bytes()) if operator else NO_STATE

    def _without_decode_errors(self, batch: pa.RecordBatch, epoch: int) -> pa.RecordBatch:
        """Divert rows that the source could not decode, like rows that a step raised on."""
        if DECODE_ERROR not in batch.schema.names:
            return batch
        decode_errors = batch.column(DECODE_ERROR)
        names = [n for n in batch.schema.names if n != DECODE_ERROR]
        declared = self.stage.ports["out"].full_schema
        batch = pa.RecordBatch.from_arrays(
            [batch.column(n) for n in names], schema=pa.schema([declared.field(n) for n in names])
        )
        valid = decode_errors.is_null().to_numpy(zero_copy_only=False)
        if valid.all():
            return batch
        for at in np.flatnonzero(~valid).tolist():
            cause, row = json.loads(decode_errors[at].as_py())
            self._divert("read", "in", batch.slice(at, 1), epoch, cause, row)
        return take(batch, np.flatnonzero(valid))

    def run_keyed(
        self, inputs: list[list[pa.RecordBatch]], track: Track, epoch: int
    ) -> dict[int, pa.RecordBatch]:
        """Process an epoch; `inputs` holds the batches of each exchange into the stage."""
        return self.run_merged(self.merged(inputs), track, epoch)

    def run_merged(
        self, merged: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[int, pa.RecordBatch]:
        """Process an epoch; `merged` holds each input of the head, in sequence order."""
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
        """Merge the batches of the exchanges into one batch per input of the head, in sequence
        order."""
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
        if self._emits_dead_letters:
            registers[DEAD] = concat([empty(_DEAD_PORT.full_schema), *self._dead])
            self._dead = []
        for planned in self.stage.steps:
            if planned.target in self._over_dead:
                registers[planned.target] = self._step(planned, registers[planned.source], epoch)
        return {e.id: registers[e.register].select(e.schema.names) for e in self.stage.outputs}

    # --- user code and its errors ---------------------------------------------------------------

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
                self._divert_failed(step.label, planned.target, batch, epoch, error)
                return self._step(planned, batch.slice(0, 0), epoch)
            half = batch.num_rows // 2
            parts = [batch.slice(0, half), batch.slice(half)]
            return concat([self._step(planned, part, epoch) for part in parts])
        return out.select([*planned.columns, *order_names(step.port.width)])

    def _operate(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        """Run the operator. An operator raises before it changes state, and its results do not
        depend on how rows are split into calls, so a batch with bad rows is split in half until
        the bad row is alone."""
        assert self.operator is not None
        try:
            with np.errstate(all="ignore"):
                return self.operator.process(inputs, track, epoch)
        except Exception as error:
            rows = sum(b.num_rows for b in inputs)
            if rows == 0 or is_out_of_memory(error):
                raise  # no row is the cause
            if rows == 1:
                position = next(i for i, b in enumerate(inputs) if b.num_rows)
                place = f"in{position}"
                self._divert_failed(self.operator.label, place, inputs[position], epoch, error)
                return self.operator.process([b.slice(0, 0) for b in inputs], track, epoch)
            first, second = _halves(inputs)
            # The watermark moves after the row at `seq`, so its step there belongs to the second
            # half, even if rows of the first half have the same sequence number.
            seq = min(int(order_of(b)[0][0]) for b in second if b.num_rows)
            tracks = track.split(seq - 1)
            results = [
                self._operate(first, tracks[0], epoch),
                self._operate(second, tracks[1], epoch),
            ]
            return {name: sort(concat([r[name] for r in results])) for name in results[0]}

    def _divert_failed(
        self, label: str, place: str, batch: pa.RecordBatch, epoch: int, error: Exception
    ) -> None:
        cause = f"{type(error).__name__}: {error}"
        user = batch.select(user_names(batch.schema))
        row = json.dumps(row_values(user, 0), default=str)
        self._divert(label, place, batch, epoch, cause, row, error)

    def _divert(
        self,
        label: str,
        place: str,
        batch: pa.RecordBatch,
        epoch: int,
        cause: str,
        row: str,
        error: Exception | None = None,
    ) -> None:
        """Raise an error for the one row of `batch`, or divert it as a dead letter. A step over
        dead letters always raises, because dead letters cannot be diverted again."""
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
        order = [int(order_of(batch)[0][0]), self.stage.id, _dead_letter_order(batch, place)]
        arrays += [pa.array([o], pa.int64()) for o in order]
        self._dead.append(pa.RecordBatch.from_arrays(arrays, schema=_DEAD_PORT.full_schema))


def _descendants(stage: Stage, register: str) -> set[str]:
    """Return the registers that steps of `stage` compute from `register`, directly or not."""
    reached = {register}
    for planned in stage.steps:
        if planned.source in reached:
            reached.add(planned.target)
    return reached - {register}


def _dead_letter_order(batch: pa.RecordBatch, place: str) -> int:
    """Return the last column of the order key of a dead letter: a digest of its row's order key
    and its `place` in the stage. Sites may divert several rows with the same sequence number, and
    each dead letter needs an order key of its own."""
    order = batch.select([n for n in batch.schema.names if is_order_name(n)])
    named = order.append_column("place", pa.array([place]))
    return int(row_digests(named).view(np.int64)[0])


def _halves(inputs: list[pa.RecordBatch]) -> tuple[list[pa.RecordBatch], list[pa.RecordBatch]]:
    """Split all rows into a first and a second half by order key; the input breaks ties."""
    width = max(len(order_of(b)) for b in inputs)
    columns: list[list[np.ndarray]] = [[] for _ in range(width + 1)]
    for position, batch in enumerate(inputs):
        order = order_of(batch)
        zero = np.zeros(batch.num_rows, np.int64)
        for level in range(width):
            columns[level].append(order[level] if level < len(order) else zero)
        columns[width].append(zero + position)
    ranked = np.lexsort([np.concatenate(c) for c in reversed(columns)])
    in_first = np.zeros(ranked.size, bool)
    in_first[ranked[: ranked.size // 2]] = True
    parts = np.split(in_first, np.cumsum([b.num_rows for b in inputs])[:-1])
    first = [take(b, np.flatnonzero(e)) for b, e in zip(inputs, parts, strict=True)]
    second = [take(b, np.flatnonzero(~e)) for b, e in zip(inputs, parts, strict=True)]
    return first, second
