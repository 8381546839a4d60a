"""Which Arrow types the columns of a flow have.

Between sites a column travels by its type alone, so one that needs more to be read (a dictionary)
cannot; and not every kernel knows every layout. So columns that are encoded are decoded where they
enter a flow: what a dictionary's codes or a view stand for is plain values. What has no plain
values is refused where the flow is written.
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
    """The type of the same values without encoding; None if there is none."""
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
        # Arrow 26 takes, and sends, lists of the type null so that nobody can read them again.
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
    """The schema of the same columns without encoding."""
    fields = []
    for field in schema:
        kind = plain_type(field.type)
        if kind is None:
            raise FlowError(
                f"{where}: the column {field.name!r} is {field.type}, which a flow cannot carry",
                hint="cast it to a type of plain values before",
            )
        fields.append(field if kind == field.type else field.with_type(kind))
    return schema if fields == list(schema) else pa.schema(fields, schema.metadata)


def refuse_type(kind: pa.DataType, what: str) -> None:
    """Refuse a type that is encoded, or has no plain values, where nothing would decode it."""
    plain = plain_type(kind)
    if plain != kind:
        raise FlowError(
            f"{what} is {kind}, which a flow cannot carry",
            hint="use a type of plain values" if plain is None else f"use {plain}",
        )
