"""Values of many types on real sites: sent, kept as state, handed over, stored and resumed."""

import random
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import Flow, InputError
from holdfast import functions as F
from holdfast.api.options import Checkpoint
from holdfast.control.run import Run
from holdfast.protections import pairs
from holdfast.sinks import discard, parquet
from holdfast.sources import generator, rows
from tests.support.arrays import array_of, exact
from tests.support.runs import PATIENCE_S, kill, replicas, until_protected, until_rows

KEYS = 37
KINDS = {
    "reals": pa.list_(pa.float64()),
    "deep": pa.map_(pa.string(), pa.struct([("a", pa.list_(pa.int64())), ("b", pa.date32())])),
    "money": pa.decimal128(20, 2),
    "raw": pa.binary(),
    "at": pa.timestamp("us", "Europe/Vienna"),
    "code": pa.string(),
    "text": pa.string(),
}
BASE = pa.record_batch({n: array_of(k, random.Random(7), 500) for n, k in KINDS.items()})
ENCODED = {"code": pa.dictionary(pa.int16(), pa.string()), "text": pa.string_view()}


def made(split: int, offset: int, n: int) -> pa.RecordBatch:
    """Columns as readers of files and users of pandas have them: dictionaries and views, too."""
    i = np.arange(offset, offset + n)
    taken = BASE.take(pa.array(i % 500))
    columns = {name: taken.column(name).cast(ENCODED.get(name, k)) for name, k in KINDS.items()}
    return pa.record_batch({"k": pa.array(i % KEYS), "i": pa.array(i), **columns})


def flow_of(out: Path) -> Flow:
    flow = Flow("values", protect=pairs(failure_domain="process"))
    source = generator(made, made(0, 0, 0).schema, rate=4_000)
    aggs = {f"first_{n}": F.first(n) for n in KINDS} | {f"last_{n}": F.last(n) for n in KINDS}
    keyed = flow.source("s", source).key_by("k")
    keyed.agg(n=F.count(), i=F.last("i"), **aggs).sink("out", parquet(out))
    return flow


def test_values_of_all_types_survive_a_kill_and_a_restart(kept: list[Run], tmp_path: Path) -> None:
    run = flow_of(tmp_path / "out").start(
        sites=3, partitions=6, checkpoint=Checkpoint(str(tmp_path / "store"))
    )
    kept.append(run)
    until_protected(run, 3)
    until_rows(run, 2_000)
    kill(run, replicas(run)["running aggregate by (k)", 0][0])
    until_protected(run, 3)
    run.stop(timeout=PATIENCE_S)
    before = sum(r.rows for r in run.records())

    again = flow_of(tmp_path / "out").start(
        sites=2, partitions=6, restore_from=str(tmp_path / "store")
    )
    kept.append(again)
    until_rows(again, 2_000)
    again.stop(timeout=PATIENCE_S)
    table = pq.read_table(tmp_path / "out").sort_by("i").combine_chunks()
    assert table.num_rows > before
    i = np.arange(table.num_rows)
    assert np.array_equal(table["i"].to_numpy(), i)
    assert np.array_equal(table["n"].to_numpy(), i // KEYS + 1)
    for name in KINDS:
        cells = exact(BASE.column(name))
        assert exact(table[f"last_{name}"].combine_chunks()) == [cells[n % 500] for n in i]
        assert exact(table[f"first_{name}"].combine_chunks()) == [cells[n % KEYS] for n in i]


def test_the_largest_time_there_is_ends_the_flow_and_is_named(kept: list[Run]) -> None:
    batch = pa.record_batch({"k": [1, 2, 3], "ts": [5, 2**63 - 1, 6]})
    flow = Flow("late")
    source = flow.source("calls", rows(batch), event_time="ts")
    source.key_by("k").window(time=10).agg(n=F.count()).sink("out", discard())
    run = flow.start(sites=2)
    kept.append(run)
    with pytest.raises(InputError, match=r"'calls'[\s\S]*9223372036854775807[\s\S]*'k': 2"):
        run.wait(30)
