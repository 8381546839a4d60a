"""Stateless steps, which process rows between two exchanges.

A step maps a batch to a batch, keeps the order key of each row, and declares the columns that it
reads, so that the plan can drop all others before an exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast.engine.batches import (
    as_array,
    is_order_name,
    order_arrays,
    row_values,
    take,
    user_names,
    with_order,
)
from holdfast.engine.expressions import Col, Expr
from holdfast.engine.operators.base import Port, broadcast, holds, infer, require_columns
from holdfast.errors import FlowError


class Step:
    """Base class of the stateless steps."""

    label = "step"
    port: Port

    def parameters(self) -> dict[str, object]:
        """Return what the step was given, as `KeyedOperator.parameters` does."""
        return {}

    def needs(self, wanted: set[str]) -> set[str]:
        """Return the input columns that the step reads to compute the output columns `wanted`."""
        raise NotImplementedError

    def run(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        raise NotImplementedError


class Select(Step):
    """Computes columns; with `keep`, in addition to the existing ones."""

    label = "select"

    def __init__(self, source: Port, exprs: Mapping[str, Expr], keep: bool, where: str) -> None:
        self.exprs = dict(exprs)
        fields = {f.name: f for f in source.schema} if keep else {}
        for name, expr in self.exprs.items():
            fields[name] = pa.field(name, infer(expr, source.schema, f"{where}, column {name!r}"))
        for name in source.schema.names if keep else ():
            self.exprs.setdefault(name, Col(name))
        self.exprs = {name: self.exprs[name] for name in fields}
        self.port = Port(pa.schema(list(fields.values())), source.width, *self._time(source))

    def _time(self, source: Port) -> tuple[str | None, int]:
        """Return the event time's name after this step, and its delay."""
        for name, expr in self.exprs.items():
            if isinstance(expr, Col) and expr.name == source.event_time:
                return name, source.delay
        return None, source.delay

    def parameters(self) -> dict[str, object]:
        return dict(self.exprs)

    def needs(self, wanted: set[str]) -> set[str]:
        return {c for name in wanted for c in self.exprs[name].columns()}

    def run(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        have = set(batch.schema.names)
        arrays, fields = [], []
        for field in self.port.schema:
            expr = self.exprs[field.name]
            if isinstance(expr, Col):
                if expr.name not in have:
                    continue  # pruned: no later operator reads it
                arrays.append(batch.column(expr.name))
            elif have.issuperset(expr.columns()):
                value = broadcast(expr.eval(batch), batch.num_rows, field.type)
                arrays.append(as_array(value, field.type))
            else:
                continue
            fields.append(field)
        return _with_order_of(batch, arrays, fields)


class Filter(Step):
    """Keeps the rows for which a condition is true."""

    label = "filter"

    def __init__(self, source: Port, condition: Expr, where: str) -> None:
        kind = infer(condition, source.schema, where)
        if not pa.types.is_boolean(kind):
            raise FlowError(f"{where}: the condition {condition} has the type {kind}, not bool")
        self.condition, self.port = condition, source

    def parameters(self) -> dict[str, object]:
        return {"condition": self.condition}

    def needs(self, wanted: set[str]) -> set[str]:
        return wanted | set(self.condition.columns())

    def run(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        return take(batch, np.flatnonzero(holds(self.condition, batch)))


class UserMap(Step):
    """A user's function over whole batches, with one output row per input row."""

    def __init__(
        self, source: Port, function: Callable[..., Any], schema: pa.Schema, form: str, where: str
    ) -> None:
        if not callable(function):
            raise FlowError(f"{where}: {function!r} is not a function")
        self.function, self.form = function, form
        self.label = getattr(function, "__name__", form)
        self.source = source
        self.port = Port(schema, source.width, _time_of(source, schema), source.delay)

    def parameters(self) -> dict[str, object]:
        return {"schema": self.port.schema}

    def needs(self, wanted: set[str]) -> set[str]:
        return set(self.source.schema.names)

    def run(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        rows = batch.select(self.source.schema.names)
        if self.form == "pandas":
            import pandas as pd

            frame = self.function(rows.to_pandas())
            if not isinstance(frame, pd.DataFrame):
                raise TypeError(f"{self.label}() returned {type(frame).__name__}, not a DataFrame")
            result = pa.RecordBatch.from_pandas(frame, preserve_index=False)
        else:
            result = self.function(rows)
        result = _checked(result, self.port.schema, self.label)
        if result.num_rows != batch.num_rows:
            raise TypeError(
                f"{self.label}() got {batch.num_rows} rows and returned {result.num_rows}; "
                f"map needs one output row per input row, otherwise use filter or flat_map"
            )
        return _with_order_of(batch, result.columns, list(self.port.schema))


class FlatMap(Step):
    """A user's function that returns any number of rows per input row, and their origins."""

    def __init__(
        self, source: Port, function: Callable[..., Any], schema: pa.Schema, where: str
    ) -> None:
        if not callable(function):
            raise FlowError(f"{where}: {function!r} is not a function")
        self.function = function
        self.label = getattr(function, "__name__", "flat_map")
        self.source = source
        self.port = Port(schema, source.width + 1, _time_of(source, schema), source.delay)

    def parameters(self) -> dict[str, object]:
        return {"schema": self.port.schema}

    def needs(self, wanted: set[str]) -> set[str]:
        return set(self.source.schema.names)

    def run(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        returned = self.function(batch.select(self.source.schema.names))
        if not isinstance(returned, tuple) or len(returned) != 2:
            raise TypeError(
                f"{self.label}() must return (batch, origins), not {type(returned).__name__}"
            )
        result = _checked(returned[0], self.port.schema, self.label)
        origin = np.asarray(returned[1])
        if origin.size != result.num_rows:
            raise TypeError(
                f"{self.label}() returned {result.num_rows} rows and {origin.size} origins"
            )
        if origin.size and (
            origin.min() < 0 or origin.max() >= batch.num_rows or np.any(origin[1:] < origin[:-1])
        ):
            raise TypeError(f"{self.label}(): origins must be ascending row numbers of its input")
        first = np.searchsorted(origin, origin, "left")
        order = [c.take(pa.array(origin, pa.int64())) for c in order_arrays(batch)]
        order.append(pa.array(np.arange(origin.size) - first))
        return pa.RecordBatch.from_arrays([*result.columns, *order], schema=self.port.full_schema)


class Branch(Step):
    """Widens the order key at a union, and numbers its branches if they share input rows."""

    label = "union"

    def __init__(self, source: Port, width: int, branch: int | None) -> None:
        self.source, self.branch = source, branch
        self.port = Port(source.schema, width, source.event_time, source.delay)

    def parameters(self) -> dict[str, object]:
        return {"branch": self.branch}

    def needs(self, wanted: set[str]) -> set[str]:
        return wanted

    def run(self, batch: pa.RecordBatch) -> pa.RecordBatch:
        zeros = pa.array(np.zeros(batch.num_rows, np.int64))
        order = order_arrays(batch)
        order += [zeros] * (self.port.width - len(order))
        if self.branch is not None:
            order[-1] = pa.array(np.full(batch.num_rows, self.branch, np.int64))
        user = batch.select(user_names(batch.schema))
        schema = with_order(user.schema, self.port.width)
        return pa.RecordBatch.from_arrays([*user.columns, *order], schema=schema)


def _with_order_of(
    batch: pa.RecordBatch, arrays: list[pa.Array], fields: list[pa.Field]
) -> pa.RecordBatch:
    order = [f for f in batch.schema if is_order_name(f.name)]
    return pa.RecordBatch.from_arrays(
        [*arrays, *order_arrays(batch)], schema=pa.schema([*fields, *order])
    )


def _time_of(source: Port, schema: pa.Schema) -> str | None:
    """Return the event time after a user's function: the column of the same name and type."""
    name = source.event_time
    if name is None or name not in schema.names:
        return None
    return name if schema.field(name).type == source.schema.field(name).type else None


def _checked(result: Any, schema: pa.Schema, label: str) -> pa.RecordBatch:
    """Convert a user's result to `schema`; raise if it does not match."""
    if isinstance(result, pa.Table):
        result = pa.RecordBatch.from_struct_array(result.to_struct_array().combine_chunks())
    if not isinstance(result, pa.RecordBatch):
        raise TypeError(f"{label}() returned {type(result).__name__}, not an Arrow batch")
    arrays = []
    for field in schema:
        if field.name not in result.schema.names:
            raise TypeError(
                f"{label}() returned no column {field.name!r}; declared: {schema.names}"
            )
        column = result.column(field.name)
        try:
            arrays.append(as_array(column, field.type))
        except pa.ArrowException as error:
            raise TypeError(
                f"{label}() returned {field.name!r} as {column.type}, not {field.type}: {error}"
            ) from error
        if arrays[-1].null_count and not field.nullable:
            raise TypeError(f"{label}() returned a null in {field.name!r}, declared not nullable")
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def conform(batch: pa.RecordBatch, schema: pa.Schema, source: str) -> pa.RecordBatch:
    """Convert a source's rows to its declared schema, or raise an `InputError` with the row."""
    from holdfast.errors import InputError

    if batch.schema.equals(schema) and not any(
        c.null_count and not f.nullable for f, c in zip(schema, batch.columns, strict=True)
    ):
        return batch
    arrays = []
    for field in schema:
        if field.name not in batch.schema.names:
            raise InputError(
                f"source {source!r}: rows have no column {field.name!r}",
                hint=f"declared: {schema.names}; delivered: {batch.schema.names}",
            )
        column = batch.column(field.name)
        bad = None
        try:
            column = as_array(column, field.type)
        except pa.ArrowMemoryError:
            raise
        except pa.ArrowException as error:
            bad, why = _first_misfit(column, field.type), str(error)
        if bad is None and column.null_count and not field.nullable:
            bad, why = column.is_null().index(True).as_py(), "null, but declared not nullable"
        if bad is not None:
            row = row_values(batch, bad) if batch.num_rows else "(none)"
            raise InputError(
                f"source {source!r}: row does not match the schema at {field.name!r} "
                f"({field.type}): {why}\n  row {bad} of its batch: {row}"
            )
        arrays.append(column)
    return pa.RecordBatch.from_arrays(arrays, schema=schema)


def _first_misfit(column: pa.Array, kind: pa.DataType) -> int:
    """Return the position of the first value that cannot be cast, by bisection."""
    low, high = 0, len(column)
    while high - low > 1:
        middle = (low + high) // 2
        try:
            column.slice(low, middle - low).cast(kind)
            low = middle
        except pa.ArrowMemoryError:
            raise
        except pa.ArrowException:
            high = middle
    return low


__all__ = ["Branch", "Filter", "FlatMap", "Select", "Step", "UserMap", "conform", "require_columns"]
