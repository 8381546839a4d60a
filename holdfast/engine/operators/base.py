"""What the engine asks of a keyed operator.

An operator is made where the flow is written: it checks its input there and says what it gives,
what it reads and which event-time boundaries it watches. A site copies it and calls `open`, which
allocates state for all the partitions the site holds. From then on `process` gets, for each epoch,
all rows of these partitions in sequence order. No operator ever sees a protocol, a partition or a
clock.
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
from holdfast.engine.state import STANDBY, Field, StateTable
from holdfast.engine.types import refuse_type
from holdfast.errors import FlowError


@dataclass(frozen=True)
class Port:
    """One output of an operator: its user columns and the width of its order key.

    `delay` is how far, in event time, its rows may trail the watermark at their place in the
    order: what event-time operators after it have to allow for.
    """

    schema: pa.Schema
    width: int = 1
    event_time: str | None = None
    delay: int = 0

    @cached_property
    def full_schema(self) -> pa.Schema:
        return with_order(self.schema, self.width)


class KeyedOperator:
    """Base of the keyed operators. Subclasses fill in the attributes and the two methods."""

    label = "keyed"
    ordered = True
    """Whether the result depends on the order of rows of different producers."""
    bounded = False
    """Whether its state comes from recent rows only, however long it has been at work."""
    horizon = 0
    """Of a bounded operator: how far behind the watermark, in event time, such a row may be."""
    clocked = False
    """Whether results stand where the watermark moved: at rows of any source."""

    def __init__(self, keys: Sequence[str], inputs: Sequence[Port]) -> None:
        self.keys = list(keys)
        self.inputs = list(inputs)
        self.outputs: dict[str, Port] = {}
        self.needs: list[set[str]] = [set(keys) for _ in inputs]
        self.boundaries: list[tuple[int, int]] = []
        self.partitions = 0
        self.late_rows = 0

    def open(self, partitions: int) -> Self:
        """A working replica with empty state."""
        opened = copy.copy(self)
        opened.partitions = partitions
        opened._allocate()
        return opened

    def needed(self, position: int, used: set[str]) -> set[str]:
        """The columns of an input that it reads, given which of its outputs are used."""
        for name, port in self.outputs.items():
            if name in used and port.schema is self.inputs[position].schema:
                return set(port.schema.names)  # rows of the input are given out as they came
        return self.needs[position]

    def _allocate(self) -> None:
        raise NotImplementedError

    def tables(self) -> dict[str, StateTable]:
        """The state, for whoever snapshots, moves or measures it."""
        raise NotImplementedError

    def process(
        self, inputs: list[pa.RecordBatch], track: Track, epoch: int
    ) -> dict[str, pa.RecordBatch]:
        """Take one epoch's rows (a batch per input, each in order) and give those it causes."""
        raise NotImplementedError

    def refuse_sums(self, agg: Agg, batch: pa.RecordBatch, rows: np.ndarray) -> None:
        """Raise if there are `rows` of `batch` that take their key's sum out of int64: instead of
        a sum that is wrong. To be called before the rows have changed any state."""
        if rows.size == 0:
            return
        row = int(rows.min())
        key = ", ".join(f"{k}={batch.column(k)[row]}" for k in self.keys)
        raise OverflowError(
            f"{agg.kind}({agg.expr}) of the key ({key}) does not fit into int64; "
            f"sum a .cast(pa.float64()) if that is exact enough"
        )

    def words(self, batch: pa.RecordBatch) -> KeyWords:
        return key_words([batch.column(k) for k in self.keys])

    def state_rows(self) -> int:
        return sum(t.size for t in self.tables().values())

    def state_bytes(self) -> int:
        return sum(t.nbytes for t in self.tables().values())

    def given_bytes(self) -> int:
        """About what it would give out of its state, if all of it went elsewhere."""
        return sum(t.size * t.row_bytes for t in self.tables().values())

    def removals(self) -> int:
        """How many keys it has forgotten so far."""
        return sum(t.removals for t in self.tables().values())

    def came_from(self, epoch: int) -> int:
        """After which epoch the rows came that the state after `epoch` comes from."""
        born = [b for t in self.tables().values() if (b := t.oldest()) is not None]
        return min([epoch, *(b - 1 for b in born)])

    def extract(self, partitions: Sequence[int] | None = None) -> dict[str, pa.RecordBatch]:
        """The state of some partitions, to be installed elsewhere."""
        return {name: t.extract(partitions) for name, t in self.tables().items()}

    def install(self, state: dict[str, pa.RecordBatch]) -> None:
        for name, batch in state.items():
            self.tables()[name].install(batch)

    def extras(self) -> dict[str, int]:
        """What it knows besides its tables, in plain values."""
        return {"late_rows": self.late_rows}

    def install_extras(self, extras: Mapping[str, int]) -> None:
        self.late_rows += extras["late_rows"]

    def snapshot(
        self,
        after: int | None = None,
        partitions: Sequence[int] | None = None,
        whose: str = STANDBY,
    ) -> OperatorSnapshot:
        """Freeze the state of some partitions (all, by default): `process` may go on while it is
        given out. With `after`, only what has changed since the snapshot after that epoch that was
        made for the same follower of changes."""
        return OperatorSnapshot(self.tables(), self.extras(), after, partitions, whose)


class OperatorSnapshot:
    """An operator as it was between two epochs. A fresh one with all the parts and the `extras`
    installed goes on from there to the same results. To be read to the end or closed."""

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
        """The keys that are not there any more, to be forgotten before the rest is installed."""
        self._tables = {n: t.snapshot(partitions, after, whose) for n, t in tables.items()}

    @property
    def rows_left(self) -> int:
        return sum(t.rows_left for t in self._tables.values())

    @property
    def nbytes_left(self) -> int:
        """About how much is still to be given out."""
        return sum(t.nbytes_left for t in self._tables.values())

    def next(self, rows_max: int) -> tuple[str, pa.RecordBatch] | None:
        """A table's name and more of its rows, for `install`; None when the state is complete."""
        for name, table in self._tables.items():
            part = table.next(rows_max)
            if part is not None:
                return name, part
        return None

    def close(self) -> None:
        """Give up what is left."""
        for table in self._tables.values():
            table.close()


@dataclass(frozen=True)
class Agg:
    """An aggregate bound to its input: the types it takes, keeps and gives."""

    name: str
    kind: str
    expr: Expr | None
    taken: pa.DataType
    given: pa.DataType

    @classmethod
    def bind(cls, name: str, aggregate: Aggregate, schema: pa.Schema, where: str) -> Agg:
        if not isinstance(aggregate, Aggregate):
            raise FlowError(
                f"{where}: {name}={aggregate!r} is not an aggregate",
                hint='write for example total=F.sum("x") or n=F.count()',
            )
        if aggregate.expr is None:
            return cls(name, "count", None, pa.int64(), pa.int64())
        taken = infer(aggregate.expr, schema, f"{where}, aggregate {name!r}")
        numeric = is_plain(taken) and not pa.types.is_boolean(taken)
        if aggregate.kind in ("sum", "mean") and not numeric:
            raise FlowError(
                f"{where}: {aggregate.kind} of {aggregate.expr} needs numbers, not {taken}"
            )
        if aggregate.kind in ("max", "min") and not (numeric or pa.types.is_temporal(taken)):
            raise FlowError(
                f"{where}: {aggregate.kind} of {aggregate.expr} needs numbers or times, not {taken}"
            )
        given = taken
        if aggregate.kind == "mean":
            given = pa.float64()
        elif aggregate.kind == "sum":
            given = pa.float64() if pa.types.is_floating(taken) else pa.int64()
        return cls(name, aggregate.kind, aggregate.expr, taken, given)

    @cached_property
    def field(self) -> Field:
        """The state it folds into, starting from the neutral element."""
        match self.kind:
            case "count":
                return Field(pa.int64())
            case "sum" | "mean":
                whole = self.kind == "sum" and not pa.types.is_floating(self.given)
                return Field(pa.int64() if whole else pa.float64())
            case "max" | "min":
                return Field(self.taken, _neutral(self.taken_field.dtype, self.kind))
            case _:
                return self.taken_field

    @cached_property
    def taken_field(self) -> Field:
        """How the operand itself is kept."""
        return Field(self.taken)

    @cached_property
    def given_field(self) -> Field:
        """How the result is made into Arrow."""
        return Field(self.given)

    @property
    def ufunc(self) -> np.ufunc:
        # Spark orders NaN above all numbers: max keeps it, min avoids it. So do these.
        return {"max": np.maximum, "min": np.fmin}.get(self.kind, np.add)

    @property
    def picks(self) -> bool:
        """Whether it gives one of the values as it is, which may be null, instead of a fold."""
        return self.kind in ("first", "last")

    @property
    def bounded(self) -> bool:
        """Whether it adds up whole numbers, which may become larger than its type can say."""
        return self.kind == "sum" and pa.types.is_integer(self.given)

    def numbers(self, column: Column) -> np.ndarray:
        """An operand as numpy in the type it is taken in; a null is refused."""
        if isinstance(column, pa.Array) and column.null_count:
            raise ValueError(
                f"{self.kind}({self.expr}) met a null; "
                f"filter such rows out or use fill_null() before aggregating"
            )
        values = self.taken_field.stored(column)
        if self.bounded and values.dtype == np.uint64 and values.size and values.max() > LARGEST:
            raise OverflowError(f"{self.kind}({self.expr}) met a number that int64 has no room for")
        return values

    def values(self, batch: pa.RecordBatch) -> np.ndarray:
        """The operand over `batch`, as numpy in the type it is folded in."""
        values = self.numbers(self.column(batch)).astype(self.field.dtype, copy=False)
        return one_zero(values) if self.kind in ("max", "min") else values

    def column(self, batch: pa.RecordBatch) -> Column:
        assert self.expr is not None
        return broadcast(self.expr.eval(batch), batch.num_rows, self.taken)


LARGEST = int(np.iinfo(np.int64).max)


def peak(values: np.ndarray) -> int:
    """The largest magnitude."""
    return max(int(values.max()), -int(values.min())) if values.size else 0


def overflows(
    groups: Groups, initial: np.ndarray, values: np.ndarray, folded: np.ndarray
) -> np.ndarray:
    """The sorted positions at which a group's sum leaves int64, given what `Groups.fold` has made
    of it: those where two numbers of one sign have a sum of the other."""
    if peak(initial) + peak(values) * int(groups.lengths.max(initial=0)) <= LARGEST:
        return np.empty(0, np.int64)  # which one pass over the values is enough to know
    before = np.empty_like(folded)
    before[1:] = folded[:-1]
    before[groups.starts] = initial
    return np.flatnonzero(((before ^ folded) & (values ^ folded)) < 0)


def one_zero(values: np.ndarray) -> np.ndarray:
    """Floats with -0.0 as 0.0: which of the two a maximum gives is up to the processor."""
    return values + values.dtype.type(0) if values.dtype.kind == "f" else values


def _neutral(dtype: np.dtype, kind: str) -> float:
    if dtype.kind == "f":
        return -np.inf if kind == "max" else np.nan  # fmin prefers anything to NaN
    info = np.iinfo(dtype)
    return info.min if kind == "max" else info.max


def broadcast(value: Column, rows: int, kind: pa.DataType) -> Column:
    """A literal, which has no length of its own, as a column."""
    if isinstance(value, np.ndarray) and value.ndim == 1:
        return value
    if isinstance(value, pa.Array):
        return value
    scalar = value if isinstance(value, pa.Scalar) else pa.scalar(value, kind)
    return pa.repeat(scalar, rows)


def holds(condition: Expr, batch: pa.RecordBatch) -> np.ndarray:
    """Where a condition is true; null is not."""
    value = broadcast(condition.eval(batch), batch.num_rows, pa.bool_())
    if isinstance(value, pa.Array):
        value = value.fill_null(False).to_numpy(zero_copy_only=False)
    return value


def infer(expr: Expr, schema: pa.Schema, where: str) -> pa.DataType:
    """The type of an expression over rows of `schema`."""
    require_columns(expr.columns(), schema, where)
    batch = empty(schema)
    try:
        value = expr.eval(batch)
    except Exception as error:
        raise FlowError(
            f"{where}: {expr} does not fit the columns {describe(schema)}: {error}"
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
