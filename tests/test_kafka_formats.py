"""What becomes of the values of Kafka records, without a broker."""

import datetime

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import Flow, FlowError
from holdfast.connectors.kafka.formats import Arrow, Format, Json
from holdfast.connectors.kafka.source import KafkaSource
from holdfast.sinks import kafka as kafka_sink
from holdfast.sources import kafka as kafka_source
from holdfast.sources import rows

SCHEMA = pa.schema([("k", pa.int64()), ("s", pa.string()), ("x", pa.float64())])


def decoded(format: Format, *values: bytes) -> list[dict]:
    return format.decode(values)[0].to_pylist()


def test_members_that_are_no_columns_are_passed_over_and_others_null() -> None:
    made = decoded(Json(SCHEMA), b'{"k": 1, "z": [{}]}', b'\n{\n"x":\n0.5e1 }', b"{}")
    assert made == [
        {"k": 1, "s": None, "x": None},
        {"k": None, "s": None, "x": 5.0},
        {"k": None, "s": None, "x": None},
    ]


WRONG = [
    b"",
    b"{",
    b"null",
    b"1",
    b"[]",
    b'{"k": 1}{"k": 2}',
    b'{"k": 1}\n{"k": 2}',
    b'{"k": 1}}\n{"v":{"k": 2}',
    b'{"k": 1}}\n{"v":{"k": 2}}\n{"v":{"k": 3}',
    b'{"k": "1"}',
    b'{"k": 1.5}',
    b'{"k": 1, "k": 1}',
    b'{"s": "\xff"}',
    b'{"s": "a\nb"}',
    b'{"s": "',
    b'"}',
]


@pytest.mark.parametrize("wrong", WRONG)
def test_wrong_values_are_noticed_wherever_they_stand(wrong: bytes) -> None:
    good = b'{"k": 1}'
    for values in ([wrong], [wrong, good], [good, wrong], [good, wrong, good]):
        with pytest.raises((ValueError, pa.ArrowException)):
            Json(SCHEMA).decode(values)


@given(st.lists(st.sampled_from([b'{"k": 1}', *WRONG]), min_size=2, max_size=5))
def test_two_wrong_values_do_not_make_a_right_one(values: list[bytes]) -> None:
    try:
        made = decoded(Json(SCHEMA), *values)
    except (ValueError, pa.ArrowException):
        return
    assert set(values) == {b'{"k": 1}'} and len(made) == len(values)


def test_a_column_that_must_be_there() -> None:
    needed = Json(pa.schema([pa.field("k", pa.int64(), nullable=False)]))
    assert decoded(needed, b'{"k": 1}') == [{"k": 1}]
    for value in (b"{}", b'{"k": null}'):
        with pytest.raises(ValueError, match="'k' is missing or null"):
            needed.decode([value])


def test_a_record_without_a_value() -> None:
    for format in (Json(SCHEMA), Arrow(SCHEMA)):
        with pytest.raises(ValueError, match="without a value"):
            format.decode([None])


ROWS = st.lists(
    st.fixed_dictionaries(
        {
            "k": st.none() | st.integers(-(2**63), 2**63 - 1),
            "s": st.none() | st.text(),
            "x": st.none() | st.floats(allow_nan=False, allow_infinity=False),
            "t": st.none() | st.datetimes(datetime.datetime(1700, 1, 1)),
        }
    ),
    min_size=1,
    max_size=5,
)


@pytest.mark.parametrize("kind", [Json, Arrow])
@given(rows=ROWS)
def test_what_is_written_is_read_again(kind: type[Format], rows: list[dict]) -> None:
    format = kind(pa.schema([*SCHEMA, ("t", pa.timestamp("us"))]))
    batch = pa.RecordBatch.from_pylist(rows, format.schema)
    again, counts = format.decode(format.encode(batch))
    assert again.equals(batch)
    assert counts is None or counts.tolist() == [len(rows)]


def test_arrow_values_of_many_rows() -> None:
    format = Arrow(pa.schema([("k", pa.int64())]))
    batches = [pa.record_batch({"k": pa.array(np.arange(n))}) for n in (3, 0, 2)]
    made, counts = format.decode([v for b in batches for v in format.encode(b)])
    assert made["k"].to_pylist() == [0, 1, 2, 0, 1]
    assert counts is not None and counts.tolist() == [3, 0, 2]
    for wrong in (b"", b"no", format.encode(pa.record_batch({"z": pa.array([1])}))[0]):
        with pytest.raises((ValueError, KeyError, pa.ArrowException)):
            format.decode([wrong])


@pytest.mark.parametrize(
    ("wrong", "match"),
    [
        ({"schema": None}, "json needs a schema"),
        ({"format": "xml"}, "format must be one of json, arrow, bytes"),
        ({"format": "bytes"}, "bytes have no schema"),
        ({"start": "now"}, "start must be 'earliest', 'latest', a time or a mapping"),
        ({"start": {}}, "must map partitions to offsets"),
        ({"start": datetime.datetime(2026, 1, 1)}, "has no time zone"),
        ({"end": "never"}, "end must be 'latest' or None"),
        ({"key": "k"}, "two columns have the same name"),
        ({"options": {"isolation.level": "read_uncommitted"}}, "itself sets isolation.level"),
        ({"schema": pa.schema([("d", pa.duration("s"))])}, "JSON cannot represent this schema"),
    ],
)
def test_sources_that_cannot_be(wrong: dict, match: str) -> None:
    with pytest.raises(FlowError, match=match):
        kafka_source("host:9092", "t", **{"schema": SCHEMA, **wrong})


def test_sinks_that_cannot_be() -> None:
    with pytest.raises(FlowError, match="several rows cannot have a key"):
        kafka_sink("host:9092", "t", format="arrow", key="k")
    with pytest.raises(FlowError, match="linger=-1: a duration is not negative"):
        kafka_sink("host:9092", "t", linger=-1)
    with pytest.raises(FlowError, match="servers must be 'host"):
        kafka_sink("", "t")
    stream = Flow("f").source("in", rows(pa.record_batch({"k": [1], "l": [[1]]})))
    for wrong, match in (
        (kafka_sink("host:9092", "t", key="z"), "the key column 'z' does not exist"),
        (kafka_sink("host:9092", "t", key="l"), "cannot be the key"),
        (
            kafka_sink("host:9092", "t", format="bytes"),
            "exactly one column of bytes or text, not k, l",
        ),
    ):
        with pytest.raises(FlowError, match=match):
            stream.sink("out", wrong)


def test_a_source_is_not_read_before_it_is_settled() -> None:
    made = kafka_source("host:9092", "t", schema=SCHEMA)
    with pytest.raises(FlowError, match="first offsets are not resolved"):
        made.open(0)
    settled = made.resolved({"begins": [4, 5], "ends": None})
    assert settled.splits == 2 and isinstance(made, KafkaSource) and made.begins is None
    assert settled.open(1).position() == {"row": 0, "offset": 5}
