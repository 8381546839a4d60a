"""Operators written for Spark under pairs, on real processes."""

from __future__ import annotations

import datetime
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from holdfast import Flow
from holdfast.api.options import Options
from holdfast.connectors.sources import Source
from holdfast.core.sequencer import Budget
from holdfast.protections import pairs
from holdfast.sinks import parquet
from holdfast.sources import generator, rows
from holdfast.spark.stateful.clock import LAST_MS
from tests.support.harness import Input, run
from tests.support.processors import VISITS, Visits
from tests.support.runs import PATIENCE_S, kill, replicas, taken, until_protected, until_rows

COMMANDS = ["wait", "add", "wait twice", "shorten", "clear", "forget timers", "quiet"]
BEGIN_US = 1_700_000_000_000_000


def visits(split: int, offset: int, n: int) -> pa.RecordBatch:
    at = np.arange(offset, offset + n)
    times = BEGIN_US + 3_000 * at - at * 7919 % 20_000
    return pa.record_batch(
        {
            "k": pa.array([f"key {i}" for i in at * 31 % 97], pa.string()),
            "ts": pa.array(times, pa.timestamp("us", "UTC")),
            "n": pa.array(at % 11),
            "cmd": pa.array([COMMANDS[i] for i in at * 13 % len(COMMANDS)], pa.string()),
        }
    )


def flow(source: Source, path: Path, protect: Any = None) -> Flow:
    made = Flow("visits", protect=protect)
    keyed = made.source("s", source, event_time="ts").key_by("k")
    lateness = datetime.timedelta(milliseconds=10)
    out = keyed.transform_with_state(Visits(), VISITS, time_mode="EventTime", lateness=lateness)
    out.sink("out", parquet(path, interval=0.1))
    return made


def test_a_site_that_holds_a_processors_state_is_killed(kept, tmp_path) -> None:
    source = generator(visits, visits(0, 0, 0).schema, rate=400)
    run_ = flow(source, tmp_path / "out", pairs()).start(
        sites=3, partitions=6, options=Options(budget=Budget(epoch_rows_max=500))
    )
    kept.append(run_)
    until_protected(run_, 3)
    until_rows(run_, 200)
    kill(run_, replicas(run_)["Visits by (k)", 0][0])
    until_protected(run_, 3)
    until_rows(run_, 200)
    run_.stop(timeout=PATIENCE_S)
    (count,) = taken(run_).values()
    whole = visits(0, 0, count)
    expected = run(flow(rows(whole), tmp_path / "none"), Input.of(s=whole)).sinks["out"]
    given = pq.read_table(tmp_path / "out")
    # The flow was stopped; its input has not ended.
    before_end = expected.filter(pc.less(expected["mark"], LAST_MS))
    assert Counter(map(_values, given.to_pylist())) == Counter(
        map(_values, before_end.select(given.schema.names).to_pylist())
    )
    assert any("timer" in what for what in given["what"].to_pylist())


def _values(row: dict) -> tuple:
    return tuple(row.values())
