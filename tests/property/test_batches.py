"""Batches: a row's digest is the row's own, whatever rows it travels with."""

from __future__ import annotations

import numpy as np
import pyarrow as pa
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.batches import row_digests
from tests.support.harness import examples

COLUMNS: list[tuple[pa.DataType, st.SearchStrategy]] = [
    (pa.int64(), st.integers(-(2**63), 2**63 - 1)),
    (pa.uint64(), st.integers(0, 2**64 - 1)),
    (pa.int8(), st.integers(-128, 127)),
    (pa.float64(), st.floats()),
    (pa.float32(), st.floats(width=32)),
    (pa.bool_(), st.booleans()),
    (pa.string(), st.text(max_size=5)),
    (pa.timestamp("us"), st.integers(0, 2**50)),
    (pa.list_(pa.int64()), st.lists(st.integers(0, 9), max_size=3)),
]


@st.composite
def batches(draw: st.DrawFn) -> pa.RecordBatch:
    rows = draw(st.integers(1, 6))
    kinds = draw(st.lists(st.sampled_from(COLUMNS), min_size=1, max_size=3))
    arrays = []
    for kind, values in kinds:
        some = st.lists(st.none() | values, min_size=rows, max_size=rows)
        arrays.append(pa.array(draw(some), kind))
    return pa.RecordBatch.from_arrays(arrays, [f"c{i}" for i in range(len(arrays))])


@examples(100)
@given(batches())
def test_a_digest_does_not_depend_on_other_rows(batch: pa.RecordBatch) -> None:
    alone = [row_digests(batch.slice(i, 1))[0] for i in range(batch.num_rows)]
    assert np.array_equal(row_digests(batch), np.array(alone))


def test_nothing_is_not_zero() -> None:
    for kind in (pa.int64(), pa.float64(), pa.bool_()):
        zero, nothing = row_digests(
            pa.record_batch({"x": pa.array([0, None], pa.int64()).cast(kind)})
        )
        assert zero != nothing
