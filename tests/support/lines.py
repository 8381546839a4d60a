"""Flows whose results do not depend on how their rows interleave."""

import numpy as np
import pyarrow as pa

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.connectors.sinks import Sink
from holdfast.control.run import Run
from holdfast.sinks import discard
from holdfast.sources import generator
from tests.support.runs import PATIENCE_S, taken


def numbers(split: int, offset: int, n: int) -> pa.RecordBatch:
    at = np.arange(offset, offset + n)
    return pa.record_batch({"k": pa.array(at * 7919 % 5000), "v": pa.array((at % 997) * 1.0)})


SCHEMA = numbers(0, 0, 0).schema


def two_lines(protect=None, *, left: int | None = None, right: int | None = None) -> Flow:
    """Two sources of one split each, so that no result depends on how their rows interleave."""
    flow = Flow("lines") if protect is None else Flow("lines", protect=protect)
    for name, rows in (("left", left), ("right", right)):
        rate = 40_000 if rows is None else None
        source = flow.source(name, generator(numbers, SCHEMA, rows=rows, rate=rate))
        totals = (
            source.key_by("k").agg(t=F.sum("v"), n=F.count()).select(g=col("k") % 100, t=col("t"))
        )
        totals.key_by("g").agg(m=F.max("t"), c=F.count()).sink(f"{name} out", discard())
    return flow


def one_line(sink: Sink, protect=None, rows: int | None = None) -> Flow:
    flow = Flow("line") if protect is None else Flow("line", protect=protect)
    rate = 40_000 if rows is None else None
    source = flow.source("numbers", generator(numbers, SCHEMA, rows=rows, rate=rate))
    source.key_by("k").agg(t=F.sum("v"), n=F.count()).sink("out", sink)
    return flow


def check_lines(run: Run, kept: list[Run]) -> None:
    """Drain, and compare with an undisturbed run of the same rows."""
    run.stop(timeout=PATIENCE_S)
    assert run.state == "done"
    rows = taken(run)
    assert min(rows.values()) > 10_000
    plain = two_lines(**rows).start(sites=1)
    kept.append(plain)
    assert plain.wait(PATIENCE_S)
    for name in ("left out", "right out"):
        assert run.sink_report(name)["rows"] == rows[name.split()[0]]
        assert run.sink_report(name) == plain.sink_report(name)
