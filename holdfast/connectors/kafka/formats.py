"""Formats of the values of Kafka records: JSON, Arrow, or plain bytes.

A format decodes the values of many records into one batch, and encodes a batch into values. Neither
handles rows one by one, except that encoding creates a Python object for each value.
"""

from __future__ import annotations

import io
from collections.abc import Sequence

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.json as pj

from holdfast.errors import FlowError

Values = Sequence[bytes | None]


class Format:
    """Base of the formats."""

    name: str
    has_decode_errors = True
    """Whether a value can be undecodable."""
    rows_per_value: int | None = 1
    """None if a value may hold any number of rows."""

    def __init__(self, schema: pa.Schema) -> None:
        self.schema = schema

    def decode(self, values: Values) -> tuple[pa.RecordBatch, np.ndarray | None]:
        """Return the rows, and the number of rows of each value (None for one each). Raises
        `ValueError` or an `ArrowException` if a value is invalid, without saying which."""
        raise NotImplementedError

    def encode(self, batch: pa.RecordBatch) -> list[bytes]:
        raise NotImplementedError


class Json(Format):
    """Every value is a JSON object with the columns as members. Other members are ignored, and
    missing ones are null."""

    name = "json"
    _HEAD, _BETWEEN, _TAIL = b'{"v":', b'}\n{"v":', b"}"

    def __init__(self, schema: pa.Schema) -> None:
        super().__init__(schema)
        self._read = pa.struct([pa.field(f.name, _readable(f.type)) for f in schema])
        self._options = pj.ParseOptions(
            explicit_schema=pa.schema([("v", self._read)]), unexpected_field_behavior="ignore"
        )
        self._required = [f.name for f in schema if not f.nullable]
        self._temporal = [i for i, f in enumerate(schema) if pa.types.is_temporal(f.type)]
        # A struct's attributes need valid names, and columns may have any.
        names = {f"c{i}": name for i, name in enumerate(schema.names)}
        self._row = msgspec.defstruct("Row", [(n, object) for n in names], rename=names)
        self._encoder = msgspec.json.Encoder()

    def decode(self, values: Values) -> tuple[pa.RecordBatch, np.ndarray | None]:
        """Decode all values with one call of Arrow's parser. Each value becomes the only member of
        an object. A value cannot swallow the start of the next object, because a JSON string cannot
        contain a line end. So if there are as many rows as values, each value is one row."""
        if None in values:
            raise ValueError("a record without a value")
        data = b"".join((self._HEAD, self._BETWEEN.join(values), self._TAIL))  # type: ignore[arg-type]
        str(data, "utf-8")  # the parser does not check the encoding
        whole = pj.ReadOptions(use_threads=False, block_size=len(data) + 1)
        table = pj.read_json(io.BytesIO(data), whole, self._options)
        column = table.column("v").combine_chunks()
        if len(column) != len(values):
            raise ValueError("not one JSON object")
        if column.null_count:
            raise ValueError("null is not a JSON object")
        return self._typed(column), None

    def _typed(self, column: pa.StructArray) -> pa.RecordBatch:
        arrays = [
            array if array.type == field.type else array.cast(field.type)
            for array, field in zip(column.flatten(), self.schema, strict=True)
        ]
        batch = pa.RecordBatch.from_arrays(arrays, schema=self.schema)
        for name in self._required:
            if batch.column(name).null_count:
                raise ValueError(f"{name!r} is missing or null")
        return batch

    def encode(self, batch: pa.RecordBatch) -> list[bytes]:
        columns = [self._plain(i, batch.column(i)) for i in range(batch.num_columns)]
        lines = self._encoder.encode_lines(list(map(self._row, *columns)))
        return lines.splitlines()

    def _plain(self, at: int, column: pa.Array) -> list[object]:
        """Return the column as Python values; times as text, which keeps all digits."""
        if at in self._temporal:
            column = column.cast(pa.string())
        if pa.types.is_primitive(column.type) and not column.null_count:
            return column.to_numpy(zero_copy_only=False).tolist()
        return column.to_pylist()


def _readable(kind: pa.DataType) -> pa.DataType:
    """Return the type that Arrow's parser reads for a column, before the cast to `kind`."""
    text = pa.types.is_date(kind) or pa.types.is_time(kind)
    return pa.string() if text else kind


class Arrow(Format):
    """Every value is an Arrow IPC stream of any number of rows."""

    name = "arrow"
    rows_per_value = None

    def decode(self, values: Values) -> tuple[pa.RecordBatch, np.ndarray | None]:
        if None in values:
            raise ValueError("a record without a value")
        tables = [self._table(v) for v in values if v is not None]
        (batch,) = pa.concat_tables(tables).combine_chunks().to_batches() or [None]
        rows = np.fromiter((t.num_rows for t in tables), np.int64, len(tables))
        if batch is None:
            batch = pa.RecordBatch.from_pylist([], self.schema)
        for field in self.schema:
            if not field.nullable and batch.column(field.name).null_count:
                raise ValueError(f"{field.name!r} is null")
        return pa.RecordBatch.from_arrays(batch.columns, schema=self.schema), rows

    def _table(self, value: bytes) -> pa.Table:
        with pa.ipc.open_stream(value) as reader:
            table = reader.read_all()
        table.validate(full=True)  # the data is not trusted
        return table.select(self.schema.names).cast(_nullable(self.schema))

    def encode(self, batch: pa.RecordBatch) -> list[bytes]:
        out = pa.BufferOutputStream()
        with pa.ipc.new_stream(out, batch.schema) as writer:
            writer.write_batch(batch)
        return [out.getvalue().to_pybytes()]


def _nullable(schema: pa.Schema) -> pa.Schema:
    return pa.schema([f.with_nullable(True) for f in schema])


class Bytes(Format):
    """The value is the only column, unchanged."""

    name = "bytes"
    has_decode_errors = False

    def decode(self, values: Values) -> tuple[pa.RecordBatch, np.ndarray | None]:
        array = pa.array(values, self.schema.field(0).type)
        return pa.RecordBatch.from_arrays([array], schema=self.schema), None

    def encode(self, batch: pa.RecordBatch) -> list[bytes]:
        return batch.column(0).cast(pa.binary()).to_pylist()


FORMATS: dict[str, type[Format]] = {f.name: f for f in (Json, Arrow, Bytes)}
VALUE = pa.schema([("value", pa.binary())])


def reading(name: str, schema: pa.Schema | None, what: str) -> Format:
    """Return the format for reading."""
    kind = _kind(name, what)
    if kind is Bytes and schema is not None:
        raise FlowError(f"{what}: bytes have no schema", hint="omit it; the column is 'value'")
    if kind is Bytes:
        return Bytes(VALUE)
    if not isinstance(schema, pa.Schema) or not schema.names:
        raise FlowError(f"{what}: {name} needs a schema: schema=pa.schema([...])")
    made = kind(schema)
    if kind is Json:
        try:
            made.decode([b"{}"])
        except ValueError as error:
            if "is missing or null" not in str(error):
                raise FlowError(f"{what}: JSON cannot represent this schema: {error}") from error
        except (pa.ArrowException, NotImplementedError) as error:
            raise FlowError(f"{what}: JSON cannot represent this schema: {error}") from error
    return made


def writing(name: str, schema: pa.Schema, what: str) -> Format:
    """Return the format for writing."""
    kind = _kind(name, what)
    if kind is Bytes and (len(schema) != 1 or not _is_bytes(schema.field(0).type)):
        raise FlowError(
            f"{what}: format bytes needs exactly one column of bytes or text, not "
            f"{', '.join(schema.names)}",
            hint="select it before the sink, or make the other column the key with key=",
        )
    return kind(schema)


def _kind(name: str, what: str) -> type[Format]:
    if name not in FORMATS:
        raise FlowError(f"{what}: format must be one of {', '.join(FORMATS)}, not {name!r}")
    return FORMATS[name]


def _is_bytes(kind: pa.DataType) -> bool:
    return any(
        f(kind)
        for f in (
            pa.types.is_binary,
            pa.types.is_large_binary,
            pa.types.is_string,
            pa.types.is_large_string,
        )
    )
