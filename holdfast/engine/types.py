"""The Arrow types of a flow's columns.

Sites send a column with its type only, so a column that needs more to be read (a dictionary) cannot
be sent; and not every Arrow kernel supports every layout. Encoded columns, such as
dictionaries and views, are therefore decoded to plain values where they enter a flow. Types without
plain values are refused when the flow is built.
"""

from __future__ import annotations

from functools import lru_cache

import pyarrow as pa

from holdfast.errors import FlowError

_LEAVES = (
    pa.types.is_null,
    pa.types.is_boolean,
    pa.types.is_integer,
    pa.types.is_floating,
    pa.types.is_decimal,
    pa.types.is_temporal,
    pa.types.is_string,
    pa.types.is_large_string,
    pa.types.is_binary,
    pa.types.is_large_binary,
    pa.types.is_fixed_size_binary,
)


@lru_cache(maxsize=1024)
def plain_type(kind: pa.DataType) -> pa.DataType | None:
    """Return the type of the same values without encoding; None if there is none."""
    if isinstance(kind, pa.BaseExtensionType):
        return None
    if any(test(kind) for test in _LEAVES):
        return kind
    if pa.types.is_string_view(kind):
        return pa.string()
    if pa.types.is_binary_view(kind):
        return pa.binary()
    if pa.types.is_dictionary(kind):
        return None if pa.types.is_nested(kind.value_type) else plain_type(kind.value_type)
    return _plain_nested(kind) if pa.types.is_nested(kind) else None


def _plain_nested(kind: pa.DataType) -> pa.DataType | None:
    if pa.types.is_union(kind) or pa.types.is_run_end_encoded(kind):
        return None
    fields = [kind.field(i) for i in range(kind.num_fields)]
    if pa.types.is_map(kind):
        fields = [kind.key_field, kind.item_field]
    plain = []
    for field in fields:
        inner = plain_type(field.type)
        # With Arrow 26, lists of the type null cannot be read again after `take` and sending.
        if inner is None or pa.types.is_null(inner):
            return None
        plain.append(field.with_type(inner))
    if pa.types.is_struct(kind):
        return pa.struct(plain)
    if pa.types.is_map(kind):
        return pa.map_(*plain, keys_sorted=kind.keys_sorted)
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(plain[0], kind.list_size)
    wide = pa.types.is_large_list(kind) or pa.types.is_large_list_view(kind)
    return pa.large_list(plain[0]) if wide else pa.list_(plain[0])


def plain_schema(schema: pa.Schema, where: str) -> pa.Schema:
    """Return the schema of the same columns without encoding."""
    fields = []
    for field in schema:
        kind = plain_type(field.type)
        if kind is None:
            raise FlowError(
                f"{where}: the column {field.name!r} has the unsupported type {field.type}",
                hint="cast it to a type of plain values first",
            )
        fields.append(field if kind == field.type else field.with_type(kind))
    return schema if fields == list(schema) else pa.schema(fields, schema.metadata)


def refuse_type(kind: pa.DataType, what: str) -> None:
    """Raise for a type that is encoded or has no plain values, where no step decodes it."""
    plain = plain_type(kind)
    if plain != kind:
        raise FlowError(
            f"{what} has the unsupported type {kind}",
            hint="use a type of plain values" if plain is None else f"use {plain}",
        )
