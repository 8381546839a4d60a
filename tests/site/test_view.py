"""A table has the latest row of every key, whoever dies."""

import numpy as np
import pyarrow as pa
import pytest

from holdfast import Flow, FlowError
from holdfast.connectors.sinks import Authority
from holdfast.connectors.table import LatestTable, LatestTableWriter
from holdfast.control.run import Run
from holdfast.engine.keys import KeyIndex, key_words
from holdfast.net.reader import SinkReader
from holdfast.protections import pairs
from holdfast.sinks import table
from holdfast.sources import generator, rows
from tests.support.lines import SCHEMA, numbers
from tests.support.runs import kill, replicas, until_protected, until_rows

WHOSE = Authority("flow", "out")
ROWS = pa.schema([("k", pa.int64()), ("s", pa.string()), ("v", pa.float64())])


def written(*epochs: list[tuple[int, str, float]]) -> LatestTableWriter:
    writer = LatestTable(["k", "s"]).open(WHOSE, ROWS)
    assert isinstance(writer, LatestTableWriter)
    for number, made in enumerate(epochs):
        columns = [list(c) for c in zip(*made, strict=True)] if made else [[], [], []]
        arrays = [pa.array(c, f.type) for c, f in zip(columns, ROWS, strict=True)]
        writer.write(number, pa.RecordBatch.from_arrays(arrays, schema=ROWS))
        writer.commit(number)
    return writer


def test_the_latest_row_of_a_key_is_there() -> None:
    writer = written([(1, "a", 1.0), (2, "b", 2.0), (1, "a", 3.0)], [], [(2, "b", 4.0)])
    values, (found,) = writer.answer({"do": "get", "keys": '[[1, "a"], [9, "z"], [2, "b"]]'}, [])
    assert values == {"epoch": 2}
    assert found.to_pylist() == [{"k": 1, "s": "a", "v": 3.0}, {"k": 2, "s": "b", "v": 4.0}]


def test_a_scan_is_of_one_moment() -> None:
    writer = written([(n, "x", 0.0) for n in range(10)])
    number = writer.answer({"do": "scan"}, [])[0]["scan"]
    writer.write(1, pa.record_batch({"k": [3, 99], "s": ["x", "x"], "v": [7.0, 7.0]}))
    parts = writer.answer({"do": "go on", "scan": number}, [])[1]
    assert sorted(parts[0].column("k").to_pylist()) == list(range(10))
    assert set(parts[0].column("v").to_pylist()) == {0.0}
    assert writer.answer({"do": "go on", "scan": number}, [])[1] == []
    with pytest.raises(FlowError, match=f"scan {number} is closed"):
        writer.answer({"do": "go on", "scan": number}, [])


@pytest.mark.parametrize("keys", ['[["a", 1]]', "[[1]]"])
def test_what_is_no_key_is_refused(keys: str) -> None:
    with pytest.raises(FlowError, match="a key must have the columns k"):
        written([(1, "a", 1.0)]).answer({"do": "get", "keys": keys}, [])


def test_a_key_that_is_no_column_is_refused() -> None:
    with pytest.raises(FlowError, match="key column 'x' does not exist"):
        Flow("f").source("s", rows(numbers(0, 0, 5))).sink("out", table("x"))


def test_an_index_finds_what_it_has_and_nothing_else() -> None:
    index = KeyIndex(16)
    known = np.arange(0, 5_000, 2)
    slots, _ = index.lookup(key_words([pa.array(known)]))
    asked = key_words([pa.array(np.arange(5_000))])
    expected = np.full(5_000, -1)
    expected[known] = slots
    assert (index.find(asked) == expected).all() and index.size == known.size
    with_nulls = key_words([pa.array([None, 2, None, 3])])
    assert index.find(with_nulls).tolist() == [-1, expected[2], -1, -1]


def test_a_table_on_sites_outlives_its_leader(kept: list[Run]) -> None:
    flow = Flow("latest", protect=pairs(failure_domain="process"))
    source = flow.source("numbers", generator(numbers, SCHEMA, rate=20_000))
    source.sink("out", table("k"))
    run = flow.start(sites=3, partitions=6)
    kept.append(run)
    until_protected(run, 3)
    until_rows(run)
    with run.table("out") as looked:
        before = looked.to_arrow().num_rows
        assert 0 < before <= 5_000 and looked.get(7919 % 5000) is not None
        kill(run, replicas(run)["out", 0][0])
        assert looked.to_arrow().num_rows >= before
        until_protected(run, 3)
        kill(run, replicas(run)["out", 0][0])  # the last that had it from the beginning
        until_rows(run)
        assert looked.get(-5) is None
    epoch, found = scanned(run)
    rows_in = sum(
        r.rows for record in run.records() if record.epoch <= epoch for r in record.ranges
    )
    assert found == {row["k"]: row["v"] for row in numbers(0, 0, rows_in).to_pylist()}


def scanned(run: Run) -> tuple[int, dict[int, float]]:
    """All rows, and after which epoch that is."""
    with SinkReader(run.url, "out") as reader:
        values, _ = reader.ask({"do": "scan"})
        found: dict[int, float] = {}
        while parts := reader.ask({"do": "go on", "scan": values["scan"]})[1]:
            found |= {row["k"]: row["v"] for part in parts for row in part.to_pylist()}
    return values["epoch"], found
