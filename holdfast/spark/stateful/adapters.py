"""Converts batches to what user code takes, and what it returns to batches.

User code works on `Row` or on `pandas.DataFrame`; there is an adapter for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import Row


class RowAdapter:
    """Converts inputs and outputs of user code that works on `Row`."""

    def __init__(self, names: list[str], label: str) -> None:
        self._names, self._label = names, label

    def inputs(self, batch: pa.RecordBatch) -> Callable[[int], Any]:
        row_class = Row(*self._names)
        columns = [batch.column(n).to_pylist() for n in self._names]
        return lambda row: row_class(*(c[row] for c in columns))

    def checked(self, outputs: Iterable[Any] | None) -> Iterator[Any]:
        for output in outputs or ():
            if not (isinstance(output, Row) and hasattr(output, "__fields__")):
                raise TypeError(f"{self._label} returned {output!r}, which is not a Row with names")
            yield output

    def batches(self, outputs: list[Any], schema: pa.Schema) -> list[pa.RecordBatch]:
        return [pa.RecordBatch.from_pylist([row.asDict(True) for row in outputs], schema)]


class FrameAdapter:
    """Converts inputs and outputs of user code that works on `pandas.DataFrame`."""

    def __init__(self, names: list[str], label: str) -> None:
        self._names, self._label = names, label

    def inputs(self, batch: pa.RecordBatch) -> Callable[[int], Any]:
        frame, one = _frame(batch.select(self._names)), pd.RangeIndex(1)

        def frame_of(row: int) -> pd.DataFrame:
            part = frame.iloc[row : row + 1].copy()
            part.index = one
            return part

        return frame_of

    def checked(self, outputs: Iterable[Any] | None) -> Iterator[Any]:
        if isinstance(outputs, pd.DataFrame):
            raise TypeError(f"{self._label} returned a DataFrame instead of an iterator of them")
        for output in outputs or ():
            if not isinstance(output, pd.DataFrame):
                raise TypeError(f"{self._label} returned {type(output).__name__}, not a DataFrame")
            if len(output):
                yield output

    def batches(self, outputs: list[Any], schema: pa.Schema) -> list[pa.RecordBatch]:
        """Convert all frames in one step if their columns have the same names and types, which is
        ten times as fast. Concatenating other frames would change their types."""
        first = outputs[0]
        uniform = all(
            f.dtypes.equals(first.dtypes) and f.columns.equals(first.columns) for f in outputs
        )
        frames = [pd.concat(outputs, ignore_index=True)] if uniform else outputs
        return [self._batch(frame, schema) for frame in frames]

    def _batch(self, frame: pd.DataFrame, schema: pa.Schema) -> pa.RecordBatch:
        if len(frame.columns) != len(schema):
            raise TypeError(
                f"{self._label} returned {len(frame.columns)} columns, but its result schema has "
                f"{len(schema)}"
            )
        if all(isinstance(name, str) for name in frame.columns):
            missing = [n for n in schema.names if n not in frame.columns]
            if missing:
                raise TypeError(f"{self._label} returned no column {missing[0]!r}")
            frame = frame[schema.names]
        else:
            frame = frame.set_axis(schema.names, axis=1)
        return pa.RecordBatch.from_pandas(frame, schema, preserve_index=False)


def _frame(batch: pa.RecordBatch) -> pd.DataFrame:
    """Convert a batch to pandas as Spark does in a UTC session: times have no zone."""
    frame = batch.to_pandas(date_as_object=True, coerce_temporal_nanoseconds=True)
    for field in batch.schema:
        if pa.types.is_timestamp(field.type) and field.type.tz is not None:
            frame[field.name] = frame[field.name].dt.tz_convert("UTC").dt.tz_localize(None)
    return frame


def numpy_keys(columns: list[pa.Array]) -> list[tuple[Any, ...]]:
    """Return keys in numpy's types, as Spark passes them to pandas functions."""
    frame = _frame(pa.RecordBatch.from_arrays(columns, [f"k{n}" for n in range(len(columns))]))
    arrays = [frame[name].array for name in frame.columns]
    return [tuple(array[i] for array in arrays) for i in range(len(frame))]
