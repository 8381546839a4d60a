"""Arrow columns in PostgreSQL: the type that holds a column without loss, and the rows as CSV.

The sink uses CSV, not the binary form of COPY. The server parses each CSV value as the column's own
type, so that an int64 fits into a numeric and a string into a jsonb, and pyarrow writes CSV without
a loop in Python. A type that would round or truncate values is refused before the first row.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

_CSV = csv.WriteOptions(include_header=False, quoting_style="needed")
_HEX = np.array([f"{byte:02x}".encode() for byte in range(256)], "S2")
_INTEGERS = {"smallint": 16, "integer": 32, "bigint": 64}
_DIGITS = {8: 3, 16: 5, 32: 10, 64: 19}
_UNIT_DIGITS = {"s": 0, "ms": 3, "us": 6}


def sql_type(kind: pa.DataType) -> str | None:
    """Return the PostgreSQL type that holds every value of an Arrow type; None if none does."""
    if pa.types.is_dictionary(kind):
        return sql_type(kind.value_type)
    if pa.types.is_boolean(kind):
        return "boolean"
    if pa.types.is_integer(kind):
        bits = kind.bit_width + (0 if pa.types.is_signed_integer(kind) else 1)
        return next((name for name, size in _INTEGERS.items() if bits <= size), "numeric")
    if pa.types.is_floating(kind):
        return "real" if kind.bit_width <= 32 else "double precision"
    if pa.types.is_decimal(kind):
        scale = max(kind.scale, 0)
        return f"numeric({kind.precision + scale - kind.scale},{scale})"
    if _is_text(kind):
        return "text"
    if _is_bytes(kind):
        return "bytea"
    return _sql_time(kind)


def _sql_time(kind: pa.DataType) -> str | None:
    if pa.types.is_date(kind):
        return "date"
    if pa.types.is_timestamp(kind) and kind.unit != "ns":
        return "timestamp without time zone" if kind.tz is None else "timestamp with time zone"
    if pa.types.is_time(kind) and kind.unit != "ns":
        return "time without time zone"
    return None


def _is_text(kind: pa.DataType) -> bool:
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()


def _is_bytes(kind: pa.DataType) -> bool:
    plain = pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
    return plain or pa.types.is_fixed_size_binary(kind) or kind == pa.binary_view()


def hint_for(kind: pa.DataType) -> str:
    """Return a hint for a type for which `sql_type` returns None."""
    if pa.types.is_temporal(kind) and "ns" in str(kind):
        return "PostgreSQL keeps microseconds: cast the column to them"
    return "drop the column, or convert it to text or numbers, with select() or map()"


@dataclass(frozen=True)
class Column:
    """A column of a table, as the server describes it."""

    type: str
    """The type without modifiers: ``numeric``, ``timestamp with time zone``."""
    category: str
    """The server's ``typcategory``: N for numbers, S for strings."""
    full: str
    """The type with modifiers: ``numeric(10,2)``."""

    @property
    def modifiers(self) -> list[int]:
        found = re.search(r"\(([\d,]+)\)", self.full)
        return [int(n) for n in found.group(1).split(",")] if found else []

    def holds(self, kind: pa.DataType) -> bool:
        """Whether the column stores every value of an Arrow type unchanged. Text also fits any type
        that is written as text: json, uuid, an enum, an address."""
        if pa.types.is_dictionary(kind):
            return self.holds(kind.value_type)
        if _is_text(kind):
            return self.category not in "NBDT" and self.type != "bytea"
        if self.type == "numeric":
            return self._numeric_holds(kind)
        wanted = sql_type(kind)
        if wanted in _INTEGERS:
            return _INTEGERS.get(self.type, 0) >= _INTEGERS[wanted]
        if wanted == "real":
            return self.type in ("real", "double precision")
        if pa.types.is_timestamp(kind) or pa.types.is_time(kind):
            digits = self.modifiers or [6]
            return self.type == wanted and digits[0] >= _UNIT_DIGITS[kind.unit]
        return self.type == wanted

    def _numeric_holds(self, kind: pa.DataType) -> bool:
        if pa.types.is_integer(kind):
            whole, scale = 20 if kind == pa.uint64() else _DIGITS[kind.bit_width], 0
        elif pa.types.is_decimal(kind):
            whole, scale = kind.precision - kind.scale, max(kind.scale, 0)
        else:
            return False
        if not self.modifiers:
            return True
        precision, kept = [*self.modifiers, 0][:2]
        return kept >= scale and precision - kept >= whole


def to_csv(batch: pa.RecordBatch) -> pa.Buffer:
    """Encode rows for ``COPY ... FROM STDIN (FORMAT csv)``; a null is empty, text is quoted."""
    arrays = [_writable(column) for column in batch.columns]
    out = pa.BufferOutputStream()
    csv.write_csv(pa.RecordBatch.from_arrays(arrays, batch.schema.names), out, _CSV)
    return out.getvalue()


def _writable(column: pa.Array) -> pa.Array:
    """Cast a column to a type that pyarrow writes in PostgreSQL's syntax."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return _writable(column.dictionary_decode())
    if _is_bytes(kind):
        return _hex(column.cast(pa.large_binary()))
    if kind == pa.string_view():
        return column.cast(pa.large_string())
    if pa.types.is_timestamp(kind) and kind.tz is not None:
        return column.cast(pa.timestamp(kind.unit, "UTC"))
    return column


def _hex(column: pa.Array) -> pa.Array:
    r"""Encode bytes as bytea text: ``\x`` and two hexadecimal digits for each byte."""
    offsets = np.frombuffer(column.buffers()[1], np.int64)[column.offset :][: len(column) + 1]
    data = np.frombuffer(column.buffers()[2] or b"", np.uint8)[offsets[0] : offsets[-1]]
    digits = pa.py_buffer(np.ascontiguousarray(_HEX[data]))
    ends = pa.py_buffer((offsets - offsets[0]) * 2)
    text = pa.LargeStringArray.from_buffers(len(column), ends, digits)
    mark, nothing, null = (pa.scalar(v, pa.large_string()) for v in ("\\x", "", None))
    return pc.if_else(column.is_valid(), pc.binary_join_element_wise(mark, text, nothing), null)
