"""User-defined keyed operators: subclass `KeyedFunction` and pass it to ``.apply(...)``."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pyarrow as pa

from holdfast.engine.batches import Track, as_array, empty, order_arrays, take
from holdfast.engine.expressions import Column, unwrap
from holdfast.engine.groups import Groups
from holdfast.engine.operators.base import KeyedOperator, Port
from holdfast.engine.state import StateTable
from holdfast.engine.state_rows import Field, distinct
from holdfast.engine.types import plain_schema, refuse_type
from holdfast.errors import FlowError


class Rows:
    """The input of a `KeyedFunction`: rows in sequence order, each with the slot of its key."""

    def __init__(self, batch: pa.RecordBatch, slots: np.ndarray) -> None:
        self.batch, self.slots = batch, slots

    def __len__(self) -> int:
        return self.batch.num_rows

    def __getitem__(self, name: str) -> Column:
        """Return a column: numpy for numbers without nulls, otherwise Arrow."""
        return unwrap(self.batch.column(name))

    def groups(self) -> Groups:
        """Return the rows grouped by key, in order within each group."""
        return Groups(self.slots)


class KeyedFunction:
    """State per key, and a function of (rows, state).

    One call gets rows of many keys, in sequence order; ``rows.slots`` has the slot of each row's
    key in the state. The new state of a key, and the rows it emits, must depend only on that key's
    rows, never on how the rows are split into calls.

    Numbers and times are numpy arrays: ``state["last"][rows.slots]``. Other types, such as text and
    lists, are Arrow: read them with ``state.get(name, slots)`` and write them with
    ``state.put(name, slots, values)``.

    >>> class Jump(KeyedFunction):
    ...     '''Emit each value that differs from its key's previous one by more than 10.'''
    ...     state = {"last": (pa.float64(), float("nan"))}
    ...     output = pa.schema([("value", pa.float64())])
    ...
    ...     def process(self, rows, state):
    ...         groups = rows.groups()
    ...         value = rows["value"][groups.rows]
    ...         before = np.empty_like(value)
    ...         before[1:] = value[:-1]
    ...         before[groups.starts] = state["last"][groups.slots]
    ...         state["last"][groups.slots] = value[groups.lasts]
    ...         jumped = groups.rows[np.abs(value - before) > 10]
    ...         return np.sort(jumped), {"value": rows["value"][np.sort(jumped)]}
    """

    state: ClassVar[dict[str, tuple[pa.DataType, Any]]] = {}
    """The columns of state: name, type, and value of a new key."""
    output: ClassVar[pa.Schema] = pa.schema([])
    """The columns of the result. The key's columns are added before them."""

    def process(self, rows: Rows, state: StateTable) -> tuple[np.ndarray, dict[str, Any]]:
        """Update `state`; return the rows (ascending) that emit a result, and the columns."""
        raise NotImplementedError


class CustomOperator(KeyedOperator):
    def __init__(
        self, keys: Sequence[str], source: Port, function: KeyedFunction, where: str
    ) -> None:
        super().__init__(keys, [source])
        if not isinstance(function, KeyedFunction):
            raise FlowError(
                f"{where}: {function!r} is not a KeyedFunction", hint="pass an instance"
            )
        self.function = function
        self.label = type(function).__name__
        self.needs[0] |= set(source.schema.names)
        here = f"{where}, {self.label}"
        self._fields = {n: _field(n, spec, here) for n, spec in function.state.items()}
        if not isinstance(function.output, pa.Schema):
            raise FlowError(f"{where}: {self.label}.output must be a pyarrow.Schema")
        fields = [source.schema.field(k) for k in keys if k not in function.output.names]
        schema = pa.schema([*fields, *plain_schema(function.output, here)])
        self.outputs["out"] = Port(schema, source.width, delay=source.delay)

    def parameters(self) -> dict[str, object]:
        return {"state": {n: f.kind for n, f in self._fields.items()}}

    @property
    def called(self) -> object:
        return self.function

    def _allocate(self) -> None:
        self.function = copy.deepcopy(self.function)
        self.table = StateTable(self._fields, self.partitions)

    def tables(self) -> dict[str, StateTable]:
        return {"state": self.table}

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        batch = inputs[0]
        if batch.num_rows == 0:
            return {"out": empty(self.outputs["out"].full_schema)}
        slots = self.table.slots(self.words(batch))
        touched = distinct(slots)
        self.table.touch(touched, epoch)
        before = self.table.backup(touched)
        try:
            rows, columns = self.function.process(Rows(batch, slots), self.table)
            out = self._output(batch, np.asarray(rows), columns)
        except Exception:
            # Undo the changes, so that the caller can retry the rows one by one.
            self.table.put_back(touched, before)
            raise
        return {"out": out}

    def _output(
        self, batch: pa.RecordBatch, rows: np.ndarray, columns: dict[str, Any]
    ) -> pa.RecordBatch:
        missing = set(self.function.output.names) - set(columns)
        if missing:
            raise TypeError(f"process() returned no column {sorted(missing)[0]!r}")
        for name in self.function.output.names:
            if len(columns[name]) != rows.size:
                raise TypeError(
                    f"process() returned {rows.size} rows, "
                    f"but {len(columns[name])} values of {name!r}"
                )
        if rows.size and rows.dtype.kind not in "iu":
            raise TypeError(
                f"process() must return emitting rows as row numbers, not as {rows.dtype}"
            )
        if np.any(rows[1:] <= rows[:-1]):
            raise TypeError("process() must return the emitting rows once each, in ascending order")
        if rows.size and (rows[0] < 0 or rows[-1] >= batch.num_rows):
            raise TypeError(
                f"process() got {batch.num_rows} rows and returned a row number outside of them"
            )
        origin = take(batch, rows) if rows.size else batch.slice(0, 0)
        port = self.outputs["out"]
        arrays = [
            as_array(columns[f.name], f.type) if f.name in columns else origin.column(f.name)
            for f in port.schema
        ]
        return pa.RecordBatch.from_arrays([*arrays, *order_arrays(origin)], schema=port.full_schema)


def _field(name: str, spec: object, where: str) -> Field:
    """Convert a user's declaration of a column of state."""
    if name.startswith("__"):
        raise FlowError(f"{where}: the state name {name!r} is reserved (it starts with __)")
    if not (isinstance(spec, tuple) and len(spec) == 2 and isinstance(spec[0], pa.DataType)):
        hint = "use (type, value of a new key)"
        raise FlowError(f"{where}: state {name!r} has the invalid declaration {spec!r}", hint=hint)
    refuse_type(spec[0], f"{where}: state {name!r}")
    field = Field(*spec)
    try:
        if field.fixed and field.fill is None:
            raise TypeError(f"{field.kind} is stored as numbers")
        field.loaded(field.allocate(1), None) if field.fixed else field.new_heap()
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        hint = "times are stored as integers; only types such as text can start as None"
        raise FlowError(
            f"{where}: state {name!r} cannot start as {spec[1]!r}: {error}", hint=hint
        ) from error
    return field
