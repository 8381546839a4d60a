"""Arrays of any type that a flow may carry, and what is in them to the last bit.

Values are made in Arrow, not from Python's: only so are there NaN beside null, null lists beside
empty ones, and times that Python has no name for.
"""

from __future__ import annotations

import decimal
import math
import random

import numpy as np
import pyarrow as pa
from hypothesis import strategies as st

FLOATS = [0.0, -0.0, 1.5, math.nan, math.inf, -math.inf]
NUMBERS = [
    *(f() for f in (pa.int8, pa.int16, pa.int32, pa.int64)),
    *(f() for f in (pa.uint8, pa.uint16, pa.uint32, pa.uint64)),
    *(f() for f in (pa.float16, pa.float32, pa.float64, pa.bool_)),
]
TIMES = [
    pa.date32(),
    pa.date64(),
    pa.time32("ms"),
    pa.time64("ns"),
    pa.timestamp("s"),
    pa.timestamp("us", "Europe/Vienna"),
    pa.timestamp("ns", "UTC"),
    pa.duration("us"),
]
DECIMALS = [
    pa.decimal32(6, 2),
    pa.decimal64(12, 3),
    pa.decimal128(30, 4),
    pa.decimal256(60, 5),
]
TEXTS = [pa.string(), pa.large_string(), pa.binary(), pa.large_binary(), pa.binary(3)]
ENCODED = [
    pa.dictionary(pa.int8(), pa.string()),
    pa.dictionary(pa.int32(), pa.timestamp("us")),
    pa.string_view(),
    pa.binary_view(),
]
"""Types that are decoded where they enter a flow."""
LEAVES = [*NUMBERS, *TIMES, *DECIMALS, *TEXTS, pa.null(), pa.month_day_nano_interval()]
KEYS = [*NUMBERS, *TIMES, *DECIMALS, *TEXTS, pa.null(), *ENCODED]


def kinds(encoded: bool = False) -> st.SearchStrategy[pa.DataType]:
    """Types, nested up to three deep."""
    leaves = st.sampled_from([*LEAVES, *ENCODED] if encoded else LEAVES)
    return st.recursive(leaves, _nested, max_leaves=4)


def _nested(inner: st.SearchStrategy[pa.DataType]) -> st.SearchStrategy[pa.DataType]:
    inner = inner.filter(lambda kind: not pa.types.is_null(kind))  # which are refused
    fields = st.lists(inner, min_size=1, max_size=3)
    keys = st.sampled_from([pa.string(), pa.int64(), pa.date32()])
    return st.one_of(
        inner.map(pa.list_),
        inner.map(pa.large_list),
        inner.map(lambda kind: pa.list_(kind, 2)),
        st.builds(pa.map_, keys, inner),
        fields.map(lambda some: pa.struct([(f"f{i}", kind) for i, kind in enumerate(some)])),
    )


def array_of(kind: pa.DataType, rng: random.Random, n: int, *, nulls: bool = True) -> pa.Array:
    """`n` values of any type, nulls at every level."""
    if pa.types.is_null(kind):
        return pa.nulls(n)
    missing = [nulls and rng.random() < 0.3 for _ in range(n)]
    mask = pa.array(missing, pa.bool_())
    if pa.types.is_struct(kind):
        children = [array_of(f.type, rng, n) for f in kind]
        return pa.StructArray.from_arrays(children, fields=list(kind), mask=mask)
    if pa.types.is_fixed_size_list(kind):
        values = array_of(kind.value_type, rng, n * kind.list_size)
        return pa.FixedSizeListArray.from_arrays(values, type=kind, mask=mask)
    if pa.types.is_nested(kind):
        return _lists(kind, rng, missing, mask)
    return _leaf(kind, rng, missing)


def _lists(kind: pa.DataType, rng: random.Random, missing: list[bool], mask: pa.Array) -> pa.Array:
    lengths = [0 if gone else rng.choice([0, 1, 1, 3]) for gone in missing]
    ends = np.cumsum([0, *lengths])
    if pa.types.is_map(kind):
        keys = array_of(kind.key_type, rng, int(ends[-1]), nulls=False)
        items = array_of(kind.item_type, rng, int(ends[-1]))
        offsets = pa.array(ends, pa.int32())
        return pa.MapArray.from_arrays(offsets, keys, items, type=kind, mask=mask)
    values = array_of(kind.value_type, rng, int(ends[-1]))
    if pa.types.is_large_list(kind):
        return pa.LargeListArray.from_arrays(pa.array(ends), values, type=kind, mask=mask)
    return pa.ListArray.from_arrays(pa.array(ends, pa.int32()), values, type=kind, mask=mask)


def _leaf(kind: pa.DataType, rng: random.Random, missing: list[bool]) -> pa.Array:
    if pa.types.is_dictionary(kind):
        values = _leaf(kind.value_type, rng, missing)
        return values.dictionary_encode().cast(kind)
    if pa.types.is_temporal(kind) and kind.bit_width <= 64:
        whole = pa.int32() if kind.bit_width == 32 else pa.int64()
        pool = _times(kind)
        return pa.array([None if m else rng.choice(pool) for m in missing], whole).view(kind)
    pool = _pool(kind)
    return pa.array([None if m else rng.choice(pool) for m in missing], kind)


def _times(kind: pa.DataType) -> list[int]:
    if pa.types.is_time(kind):
        return [0, 1, 86_399_999]
    if pa.types.is_date64(kind):
        return [0, 86_400_000, -86_400_000]
    edge = 2 ** (kind.bit_width - 1)
    return [0, 1, -1, edge - 1, -edge]


def _pool(kind: pa.DataType) -> list:
    if pa.types.is_boolean(kind):
        return [True, False]
    if pa.types.is_unsigned_integer(kind):
        return [0, 1, 2**kind.bit_width - 1]
    if pa.types.is_integer(kind):
        edge = 2 ** (kind.bit_width - 1)
        return [0, 1, -1, edge - 1, -edge]
    if pa.types.is_float16(kind):
        return [np.float16(x) for x in FLOATS]
    if pa.types.is_floating(kind):
        return FLOATS
    if pa.types.is_decimal(kind):
        top = decimal.Decimal((0, (9,) * kind.precision, -kind.scale))
        return [decimal.Decimal(0), decimal.Decimal("1.25"), top, top.copy_negate()]
    if pa.types.is_interval(kind):
        return [(0, 0, 0), (1, -2, 3), (-1, 0, 2**62)]
    if pa.types.is_fixed_size_binary(kind):
        return [b"abc", b"\0\0\0", b"\xff\x00a"]
    texts = ["", "a", "\u00df", "more than twelve bytes of text"]
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind):
        return texts
    return [b"\xff\x00", *(t.encode() for t in texts)]


def exact(column: pa.Array) -> list:
    """Each value in a form that is equal to that of another just if both are the same: floats by
    their bits (but all NaNs alike), times as whole numbers, None for null at every level."""
    kind = column.type
    if pa.types.is_dictionary(kind):
        return exact(column.cast(kind.value_type))
    if pa.types.is_floating(kind):
        return _exact_floats(column)
    if pa.types.is_temporal(kind) and kind.bit_width <= 64:
        return column.view(pa.int32() if kind.bit_width == 32 else pa.int64()).to_pylist()
    if pa.types.is_struct(kind):
        parts = [exact(child) for child in column.flatten()]
        rows = zip(*parts, strict=True) if parts else ((),) * len(column)
        return [r if v else None for r, v in zip(rows, column.is_valid().to_pylist(), strict=True)]
    if pa.types.is_nested(kind):
        return [tuple(exact(item.values)) if item.is_valid else None for item in column]
    return column.to_pylist()


def _exact_floats(column: pa.Array) -> list:
    values = column.fill_null(0.0).to_numpy(zero_copy_only=False)
    bits = np.where(np.isnan(values), np.nan, values).astype(values.dtype)
    bits = bits.view(f"i{values.dtype.itemsize}").tolist()
    valid = column.is_valid().to_pylist()
    return [("bits", b) if v else None for b, v in zip(bits, valid, strict=True)]
