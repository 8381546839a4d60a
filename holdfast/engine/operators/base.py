"""The interface of a keyed operator.

An operator is created when the flow is built: it checks its input schema and declares its outputs,
the columns that it reads and its event-time boundaries. A site copies it and calls `open`, which
allocates state for all partitions that the site holds. `process` then gets, for each epoch, all
rows of these partitions in sequence order. Operators know no protocol, no partitions and no clock.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self

import numpy as np
import pyarrow as pa

from holdfast.engine.aggregates import Aggregate
from holdfast.engine.batches import Track, empty, with_order
from holdfast.engine.expressions import Col, Column, Expr, is_plain, type_of
from holdfast.engine.groups import Groups
from holdfast.engine.keys import KeyWords, key_words
from holdfast.engine.state import STANDBY, StateTable
from holdfast.engine.state_rows import Field
from holdfast.engine.types import refuse_type
from holdfast.errors import FlowError


@dataclass(frozen=True)
class Port:
    """One output of an operator: its user columns and the width of its order key.

    `delay` is the maximum event time by which its rows may trail the watermark at their place in
    the order. Downstream event-time operators must allow for it.
    """

    schema: pa.Schema
    width: int = 1
    event_time: str | None = None
    delay: int = 0

    @cached_property
    def full_schema(self) -> pa.Schema:
        return with_order(self.schema, self.width)


class KeyedOperator:
    """Base class of the keyed operators. Subclasses set the attributes and implement `_allocate`,
    `tables` and `process`."""

    label = "keyed"
    ordered = True
    """Whether the result depends on the order of rows from different producers."""
    bounded = False
    """Whether its state depends on recent rows only, however long it has run."""
    horizon = 0
    """Maximum event time by which such a row trails the watermark, if `bounded`."""
    clocked = False
    """Whether results are placed where the watermark moved, which may be at rows of any source."""

    def __init__(self, keys: Sequence[str], inputs: Sequence[Port]) -> None:
        self.keys = list(keys)
        self.inputs = list(inputs)
        self.outputs: dict[str, Port] = {}
        self.needs: list[set[str]] = [set(keys) for _ in inputs]
        self.boundaries: list[tuple[int, int]] = []
        self.partitions = 0
        self.late_rows = 0

    def open(self, partitions: int) -> Self:
        """Return a copy of the operator with empty state."""
        opened = copy.copy(self)
        opened.partitions = partitions
        opened._allocate()
        return opened

    def needed(self, position: int, used: set[str]) -> set[str]:
        """Return the columns of an input that the operator reads, given the outputs in use."""
        for name, port in self.outputs.items():
            if name in used and port.schema is self.inputs[position].schema:
                return set(port.schema.names)  # this output emits rows of the input unchanged
        return self.needs[position]

    def parameters(self) -> dict[str, object]:
        """Return what the operator was given besides its keys, under names that stay the same from
        version to version: stores compare them."""
        raise NotImplementedError

    @property
    def called(self) -> object | None:
        """The user's function or object that it calls, if any."""
        return None

    def _allocate(self) -> None:
        raise NotImplementedError

    def tables(self) -> dict[str, StateTable]:
        """Return the state tables by name, for snapshots, moves and metrics."""
        raise NotImplementedError

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        """Process the rows of one epoch (one batch per input, in order) and return the results."""
        raise NotImplementedError

    def refuse_sums(self, agg: Agg, batch: pa.RecordBatch, rows: np.ndarray) -> None:
        """Raise an OverflowError if `rows` is not empty: these rows of `batch` make the sum of
        their key overflow int64. Call this before the rows change any state."""
        if rows.size == 0:
            return
        row = int(rows.min())
        key = ", ".join(f"{k}={batch.column(k)[row]}" for k in self.keys)
        raise OverflowError(
            f"{agg.kind}({agg.expr}) of the key ({key}) does not fit into int64; "
            f"cast the operand with .cast(pa.float64()) if its precision is sufficient"
        )

    def words(self, batch: pa.RecordBatch) -> KeyWords:
        return key_words([batch.column(k) for k in self.keys])

    def state_rows(self) -> int:
        return sum(t.size for t in self.tables().values())

    def state_bytes(self) -> int:
        return sum(t.nbytes for t in self.tables().values())

    def given_bytes(self) -> int:
        """Return the approximate size of a snapshot of all state."""
        return sum(t.size * t.row_bytes for t in self.tables().values())

    def removals(self) -> int:
        """Return the number of keys removed so far."""
        return sum(t.removals for t in self.tables().values())

    def came_from(self, epoch: int) -> int:
        """Return an epoch such that the state after `epoch` depends only on rows of later epochs
        than it."""
        born = [b for t in self.tables().values() if (b := t.oldest()) is not None]
        return min([epoch, *(b - 1 for b in born)])

    def extract(self, partitions: Sequence[int] | None = None) -> dict[str, pa.RecordBatch]:
        """Return the state of some partitions, to be installed in another operator."""
        return {name: t.extract(partitions) for name, t in self.tables().items()}

    def install(self, state: dict[str, pa.RecordBatch]) -> None:
        for name, batch in state.items():
            self.tables()[name].install(batch)

    def extras(self) -> dict[str, int]:
        """Return the state outside the tables, as plain values."""
        return {"late_rows": self.late_rows}

    def install_extras(self, extras: Mapping[str, int]) -> None:
        self.late_rows += extras["late_rows"]

    def snapshot(
        self,
        after: int | None = None,
        partitions: Sequence[int] | None = None,
        whose: str = STANDBY,
    ) -> OperatorSnapshot:
        """Return a snapshot of some partitions (by default all), which can be read while `process`
        continues. With `after`, it has only the rows changed after that epoch, which must be the
        epoch of the last snapshot for the same reader of changes, `whose`."""
        return OperatorSnapshot(self.tables(), self.extras(), after, partitions, whose)


class OperatorSnapshot:
    """The state of an operator between two epochs. A new operator with all parts and the `extras`
    installed continues with the same results. Read it to the end or close it."""

    def __init__(
        self,
        tables: Mapping[str, StateTable],
        extras: dict[str, int],
        after: int | None = None,
        partitions: Sequence[int] | None = None,
        whose: str = STANDBY,
    ) -> None:
        self.extras = extras
        self.gone = {n: t.removed(whose) for n, t in tables.items() if after is not None}
        """The removed keys by table, to be removed before the rest is installed."""
        self._tables = {n: t.snapshot(partitions, after, whose) for n, t in tables.items()}

    @property
    def rows_left(self) -> int:
        return sum(t.rows_left for t in self._tables.values())

    @property
    def nbytes_left(self) -> int:
        """The approximate number of bytes not yet returned."""
        return sum(t.nbytes_left for t in self._tables.values())

    def next(self, rows_max: int) -> tuple[str, pa.RecordBatch] | None:
        """Return a table's name and its next rows, for `install`; None at the end."""
        for name, table in self._tables.items():
            part = table.next(rows_max)
            if part is not None:
                return name, part
        return None

    def close(self) -> None:
        """Discard the remaining rows."""
        for table in self._tables.values():
            table.close()


@dataclass(frozen=True)
class Agg:
    """An aggregate bound to its input schema, with the types of its operand and its result."""

    name: str
    kind: str
    expr: Expr | None
    operand_type: pa.DataType
    result_type: pa.DataType

    @classmethod
    def bind(cls, name: str, aggregate: Aggregate, schema: pa.Schema, where: str) -> Agg:
        if not isinstance(aggregate, Aggregate):
            raise FlowError(
                f"{where}: {name}={aggregate!r} is not an aggregate",
                hint='use for example total=F.sum("x") or n=F.count()',
            )
        if aggregate.expr is None:
            return cls(name, "count", None, pa.int64(), pa.int64())
        operand = infer(aggregate.expr, schema, f"{where}, aggregate {name!r}")
        numeric = is_plain(operand) and not pa.types.is_boolean(operand)
        if aggregate.kind in ("sum", "mean") and not numeric:
            raise FlowError(
                f"{where}: {aggregate.kind} of {aggregate.expr} needs numbers, not {operand}"
            )
        if aggregate.kind in ("max", "min") and not (numeric or pa.types.is_temporal(operand)):
            raise FlowError(
                f"{where}: {aggregate.kind} of {aggregate.expr} needs numbers or times, "
                f"not {operand}"
            )
        result = operand
        if aggregate.kind == "mean":
            result = pa.float64()
        elif aggregate.kind == "sum":
            result = pa.float64() if pa.types.is_floating(operand) else pa.int64()
        return cls(name, aggregate.kind, aggregate.expr, operand, result)

    @cached_property
    def field(self) -> Field:
        """The state of the fold, which starts with the neutral element."""
        match self.kind:
            case "count":
                return Field(pa.int64())
            case "sum" | "mean":
                whole = self.kind == "sum" and not pa.types.is_floating(self.result_type)
                return Field(pa.int64() if whole else pa.float64())
            case "max" | "min":
                return Field(self.operand_type, _neutral(self.operand_field.dtype, self.kind))
            case _:
                return self.operand_field

    @cached_property
    def operand_field(self) -> Field:
        """The form in which state stores the operand itself."""
        return Field(self.operand_type)

    @cached_property
    def result_field(self) -> Field:
        """The conversion of the result to Arrow."""
        return Field(self.result_type)

    @property
    def ufunc(self) -> np.ufunc:
        # Spark orders NaN above all numbers: max returns it, min avoids it. These do the same.
        return {"max": np.maximum, "min": np.fmin}.get(self.kind, np.add)

    @property
    def picks(self) -> bool:
        """Whether the result is one of the values, possibly null, instead of a fold."""
        return self.kind in ("first", "last")

    @property
    def bounded(self) -> bool:
        """Whether it sums integers, which may overflow."""
        return self.kind == "sum" and pa.types.is_integer(self.result_type)

    def numbers(self, column: Column) -> np.ndarray:
        """Convert an operand to numpy in its own type; raise for a null."""
        if isinstance(column, pa.Array) and column.null_count:
            raise ValueError(
                f"{self.kind}({self.expr}) got a null; "
                f"filter out such rows or use fill_null() before aggregating"
            )
        values = self.operand_field.stored(column)
        if self.bounded and values.dtype == np.uint64 and values.size and values.max() > LARGEST:
            raise OverflowError(
                f"{self.kind}({self.expr}) got a number that does not fit into int64"
            )
        return values

    def values(self, batch: pa.RecordBatch) -> np.ndarray:
        """Evaluate the operand over `batch`, as numpy in the type of the fold."""
        values = self.numbers(self.column(batch)).astype(self.field.dtype, copy=False)
        return one_zero(values) if self.kind in ("max", "min") else values

    def column(self, batch: pa.RecordBatch) -> Column:
        assert self.expr is not None
        return broadcast(self.expr.eval(batch), batch.num_rows, self.operand_type)


LARGEST = int(np.iinfo(np.int64).max)


def peak(values: np.ndarray) -> int:
    """Return the largest absolute value; 0 if there are no values."""
    return max(int(values.max()), -int(values.min())) if values.size else 0


def overflows(
    groups: Groups, initial: np.ndarray, values: np.ndarray, folded: np.ndarray
) -> np.ndarray:
    """Return the sorted positions at which a group's sum overflows int64, given the result of
    `Groups.fold`: those where two numbers of the same sign have a sum of the other sign."""
    if peak(initial) + peak(values) * int(groups.lengths.max(initial=0)) <= LARGEST:
        return np.empty(0, np.int64)  # the cheap check: one pass over the values
    before = np.empty_like(folded)
    before[1:] = folded[:-1]
    before[groups.starts] = initial
    return np.flatnonzero(((before ^ folded) & (values ^ folded)) < 0)


def one_zero(values: np.ndarray) -> np.ndarray:
    """Replace -0.0 by 0.0: which of the two a maximum returns depends on the processor."""
    return values + values.dtype.type(0) if values.dtype.kind == "f" else values


def _neutral(dtype: np.dtype, kind: str) -> float:
    if dtype.kind == "f":
        return -np.inf if kind == "max" else np.nan  # fmin prefers anything to NaN
    info = np.iinfo(dtype)
    return info.min if kind == "max" else info.max


def broadcast(value: Column, rows: int, kind: pa.DataType) -> Column:
    """Convert a literal, which has no length, to a column; return columns unchanged."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return value
    if isinstance(value, pa.Array):
        return value
    scalar = value if isinstance(value, pa.Scalar) else pa.scalar(value, kind)
    return pa.repeat(scalar, rows)


def holds(condition: Expr, batch: pa.RecordBatch) -> np.ndarray:
    """Return where a condition is true; null counts as false."""
    value = broadcast(condition.eval(batch), batch.num_rows, pa.bool_())
    if isinstance(value, pa.Array):
        value = value.fill_null(False).to_numpy(zero_copy_only=False)
    return value


def infer(expr: Expr, schema: pa.Schema, where: str) -> pa.DataType:
    """Return the type of an expression over rows of `schema`."""
    require_columns(expr.columns(), schema, where)
    batch = empty(schema)
    try:
        value = expr.eval(batch)
    except Exception as error:
        raise FlowError(
            f"{where}: cannot evaluate {expr} over the columns {describe(schema)}: {error}"
        ) from error
    kind = type_of(value)
    refuse_type(kind, f"{where}: {expr}")
    return kind


def require_columns(names: object, schema: pa.Schema, where: str) -> None:
    for name in names:  # type: ignore[attr-defined]
        if name not in schema.names:
            raise FlowError(
                f"{where}: there is no column {name!r}", hint=f"the columns are {describe(schema)}"
            )


def describe(schema: pa.Schema) -> str:
    return ", ".join(f"{f.name}: {f.type}" for f in schema)


def columns_of(exprs: Sequence[Expr | Aggregate]) -> set[str]:
    return {name for e in exprs for name in e.columns()}


__all__ = [
    "LARGEST",
    "Agg",
    "Col",
    "KeyedOperator",
    "OperatorSnapshot",
    "Port",
    "broadcast",
    "columns_of",
    "holds",
    "infer",
    "one_zero",
    "overflows",
    "peak",
    "require_columns",
]
