"""Parses Spark's schema DDL and encodes values by their schema, without a JVM.

Sites have no JVM, and state travels between them. State is therefore never pickled, but encoded
with the schema that it was declared with.
"""

from __future__ import annotations

import datetime
import decimal
import re
from collections.abc import Callable
from typing import Any

import msgspec
import numpy as np
import pyarrow as pa
from pyspark.sql import types as T
from pyspark.sql.pandas.types import to_arrow_schema

from holdfast.errors import FlowError

_PLAIN: dict[str, T.DataType] = {
    "boolean": T.BooleanType(),
    "tinyint": T.ByteType(),
    "byte": T.ByteType(),
    "smallint": T.ShortType(),
    "short": T.ShortType(),
    "int": T.IntegerType(),
    "integer": T.IntegerType(),
    "bigint": T.LongType(),
    "long": T.LongType(),
    "float": T.FloatType(),
    "real": T.FloatType(),
    "double": T.DoubleType(),
    "string": T.StringType(),
    "binary": T.BinaryType(),
    "date": T.DateType(),
    "timestamp": T.TimestampType(),
    "timestamp_ltz": T.TimestampType(),
    "timestamp_ntz": T.TimestampNTZType(),
    "decimal": T.DecimalType(10, 0),
}
_TOKEN = re.compile(r"\s*(`(?:[^`]|``)*`|'(?:[^']|'')*'|\w+|[<>(),:])")

Encode = Callable[[Any], Any]


# --- DDL ------------------------------------------------------------------------------------------


def struct_of(schema: T.StructType | str | pa.Schema, where: str) -> T.StructType:
    """Return a schema in any notation as a `StructType`.

    >>> struct_of("id bigint, tags array<string>, at struct<x: int>", "here").simpleString()
    'struct<id:bigint,tags:array<string>,at:struct<x:int>>'
    """
    if isinstance(schema, T.StructType):
        return schema
    if isinstance(schema, pa.Schema):
        from pyspark.sql.pandas.types import from_arrow_schema

        return from_arrow_schema(schema)
    if not isinstance(schema, str):
        raise FlowError(f"{where}: {schema!r} is not a schema", hint="pass a StructType or its DDL")
    try:
        return _Ddl(schema).struct()
    except ValueError as error:
        raise FlowError(
            f"{where}: cannot parse the schema {schema!r}: {error}", hint="pass a StructType"
        ) from error


def arrow_of(schema: T.StructType | str | pa.Schema, where: str) -> pa.Schema:
    """Return a schema in any notation as an Arrow schema."""
    if isinstance(schema, pa.Schema):
        return schema
    arrow = to_arrow_schema(struct_of(schema, where), timezone="UTC")
    return pa.schema([pa.field(f.name, f.type) for f in arrow])


class _Ddl:
    """Parses ``name type, name: type`` by recursive descent."""

    def __init__(self, text: str) -> None:
        self._tokens = []
        at = 0
        while text[at:].strip():
            token = _TOKEN.match(text, at)
            if token is None:
                raise ValueError(f"unexpected {text[at:].strip()!r}")
            self._tokens.append(token.group(1))
            at = token.end()

    def struct(self) -> T.StructType:
        fields = self._fields("")
        if self._tokens:
            raise ValueError(f"unexpected {self._tokens[0]!r}")
        return fields

    def _fields(self, end: str) -> T.StructType:
        fields = []
        while True:
            name = self._next().strip("`").replace("``", "`")
            self._skip(":")
            kind = self._type()
            nullable = not self._skip("not")
            if not nullable:
                self._expect("null")
            if self._skip("comment"):
                self._next()
            fields.append(T.StructField(name, kind, nullable))
            if not self._skip(","):
                break
        if end:
            self._expect(end)
        return T.StructType(fields)

    def _type(self) -> T.DataType:
        name = self._next().lower()
        if name == "array":
            (item,) = self._inner(1)
            return T.ArrayType(item)
        if name == "map":
            return T.MapType(*self._inner(2))
        if name == "struct":
            self._expect("<")
            return self._fields(">")
        if name in ("decimal", "dec", "numeric") and self._skip("("):
            precision, scale = int(self._next()), 0
            if self._skip(","):
                scale = int(self._next())
            self._expect(")")
            return T.DecimalType(precision, scale)
        if name not in _PLAIN:
            raise ValueError(f"unknown type {name!r}")
        return _PLAIN[name]

    def _inner(self, count: int) -> list[T.DataType]:
        self._expect("<")
        kinds = [self._type()]
        for _ in range(count - 1):
            self._expect(",")
            kinds.append(self._type())
        self._expect(">")
        return kinds

    def _next(self) -> str:
        if not self._tokens:
            raise ValueError("unexpected end")
        return self._tokens.pop(0)

    def _skip(self, token: str) -> bool:
        if self._tokens and self._tokens[0].lower() == token:
            self._tokens.pop(0)
            return True
        return False

    def _expect(self, token: str) -> None:
        if not self._skip(token):
            raise ValueError(f"expected {token!r} before {' '.join(self._tokens[:3])!r}")


# --- values as bytes ------------------------------------------------------------------------------


class RowCodec:
    """Encodes tuples of one schema as bytes and decodes them. A value that does not fit the schema
    raises `TypeError`."""

    def __init__(self, schema: T.StructType, where: str) -> None:
        self.schema = schema
        self._names = schema.names
        self._pack = [_packer(f.dataType, f"{where}, field {f.name!r}") for f in schema]
        self._unpack = [_unpacker(f.dataType) for f in schema]

    def encode(self, row: Any) -> bytes:
        if isinstance(row, str | bytes) or not hasattr(row, "__len__"):
            raise TypeError(f"a state value must be a tuple of ({self._described}), not {row!r}")
        if len(row) != len(self._pack):
            raise TypeError(f"a state value must be a tuple of ({self._described}), not {row!r}")
        packed = []
        for name, pack, value in zip(self._names, self._pack, row, strict=True):
            try:
                packed.append(None if value is None else pack(_plain(value)))
            except (TypeError, ValueError, decimal.InvalidOperation) as error:
                raise TypeError(f"state field {name!r} cannot hold {value!r}: {error}") from None
        return msgspec.msgpack.encode(packed)

    def decode(self, data: bytes) -> tuple[Any, ...]:
        packed = msgspec.msgpack.decode(data)
        return tuple(
            None if value is None else unpack(value)
            for unpack, value in zip(self._unpack, packed, strict=True)
        )

    @property
    def _described(self) -> str:
        return ", ".join(f"{f.name} {f.dataType.simpleString()}" for f in self.schema)


def _plain(value: Any) -> Any:
    """Convert a scalar of numpy or pandas to Python's type, as Spark does."""
    if isinstance(value, np.generic):
        return value.item()
    if hasattr(value, "to_pydatetime"):
        return value.to_pydatetime()
    return value


def _whole(bits: int) -> Encode:
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1

    def pack(value: Any) -> int:
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError("it is not an integer")
        if not low <= value <= high:
            raise ValueError(f"it does not fit into {bits} bits")
        return value

    return pack


def _of(*kinds: type) -> Encode:
    def pack(value: Any) -> Any:
        if not isinstance(value, kinds):
            raise TypeError(f"it is not {kinds[0].__name__}")
        return value

    return pack


def _real(value: Any) -> float:
    if not isinstance(value, float | int) or isinstance(value, bool):
        raise TypeError("it is not a number")
    return float(value)


_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)
_MICROSECOND = datetime.timedelta(microseconds=1)


def _micros(value: Any) -> int:
    """Return microseconds since the Unix epoch; a time without a zone is UTC."""
    if not isinstance(value, datetime.datetime):
        raise TypeError("it is not a datetime")
    aware = value if value.tzinfo is not None else value.replace(tzinfo=datetime.UTC)
    return (aware - _EPOCH) // _MICROSECOND


def _days(value: Any) -> int:
    if not isinstance(value, datetime.date):
        raise TypeError("it is not a date")
    return value.toordinal()


def _packer(kind: T.DataType, where: str) -> Encode:
    match kind:
        case T.BooleanType():
            return _of(bool)
        case T.ByteType() | T.ShortType() | T.IntegerType() | T.LongType():
            return _whole({"tinyint": 8, "smallint": 16, "int": 32}.get(kind.simpleString(), 64))
        case T.FloatType():
            return lambda value: float(np.float32(_real(value)))
        case T.DoubleType():
            return _real
        case T.StringType():
            return _of(str)
        case T.BinaryType():
            return lambda value: bytes(_of(bytes, bytearray)(value))
        case T.DateType():
            return _days
        case T.TimestampType() | T.TimestampNTZType():
            return _micros
        case T.DecimalType():
            return _decimal(kind)
        case T.ArrayType():
            item = _packer(kind.elementType, where)
            return lambda value: [None if v is None else item(_plain(v)) for v in value]
        case T.MapType():
            of_key, of_value = _packer(kind.keyType, where), _packer(kind.valueType, where)
            return lambda value: [
                [of_key(_plain(k)), None if v is None else of_value(_plain(v))]
                for k, v in value.items()
            ]
        case T.StructType():
            return RowCodec(kind, where).encode
    raise FlowError(
        f"{where}: state of type {kind.simpleString()} is not supported",
        hint="use numbers, strings, binary, dates, timestamps, decimals, arrays, maps or structs",
    )


def _decimal(kind: T.DecimalType) -> Encode:
    unit = decimal.Decimal(1).scaleb(-kind.scale)
    context = decimal.Context(prec=kind.precision)

    def pack(value: Any) -> str:
        return str(decimal.Decimal(value).quantize(unit, context=context))

    return pack


def _unpacker(kind: T.DataType) -> Encode:
    match kind:
        case T.DateType():
            return datetime.date.fromordinal
        case T.TimestampType() | T.TimestampNTZType():
            return lambda value: (_EPOCH + value * _MICROSECOND).replace(tzinfo=None)
        case T.DecimalType():
            return decimal.Decimal
        case T.ArrayType():
            item = _unpacker(kind.elementType)
            return lambda value: [None if v is None else item(v) for v in value]
        case T.MapType():
            of_key, of_value = _unpacker(kind.keyType), _unpacker(kind.valueType)
            return lambda value: {of_key(k): None if v is None else of_value(v) for k, v in value}
        case T.StructType():
            row_class, codec = T.Row(*kind.names), RowCodec(kind, "")
            return lambda value: row_class(*codec.decode(value))
    return lambda value: value
