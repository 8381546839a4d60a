"""Nexmark on real processes, of which some are killed."""

from __future__ import annotations

from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.api.graph import Flow
from holdfast.api.nodes import SourceNode
from holdfast.api.options import Options
from holdfast.connectors.sources import Generator, Position, Source, SplitReader
from holdfast.core.sequencer import Budget
from holdfast.engine.batches import empty
from holdfast.lab.workloads.nexmark import AUCTION, BID, PERSON, Nexmark, nexmark_flow
from holdfast.protections import pairs
from holdfast.sinks import parquet
from tests.support.nexmark_oracle import expected, rows_of
from tests.support.runs import kill, until, until_protected
from tests.support.tiers import nightly

CYCLES = 480
RATE = 400
PACE = 8_000
"""Events in a second of the clock, so that sites are killed while rows come in."""
FREE = 0.7
"""The part of its rows that a source gives before the last site was killed."""
OPTIONS = Options(
    budget=Budget(epoch_rows_max=1_000),
    block_rows=200,
    read_ahead_rows=1_000,
    # A source that is slow because a site was killed is not idle: what it has is not late.
    idle=60,
)


def events_of(splits: int, group: int) -> Nexmark:
    return Nexmark(CYCLES, rate=RATE, group=group, splits=splits)


class Held(Source):
    """Keeps the last rows of each split back until there is a file `gate`."""

    def __init__(self, source: Generator, gate: Path) -> None:
        self.source, self.gate = source, gate
        self.schema, self.splits = source.schema, source.splits

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        rows = self.source.rows_of(split)
        assert rows is not None
        free = int(rows * FREE) - offset
        return HeldReader(self.source.open(split, offset), self.gate, free, self.schema)


class HeldReader(SplitReader):
    def __init__(self, reader: SplitReader, gate: Path, free: int, schema: pa.Schema) -> None:
        self.reader, self.gate, self.free, self.schema = reader, gate, free, schema

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        if not due and self.free <= 0 and not self.gate.exists():
            return empty(self.schema)
        rows_max = min(rows_max, self.free) if self.free > 0 and not due else rows_max
        batch = self.reader.read(rows_max, due=due)
        self.free -= batch.num_rows if batch is not None else 0
        return batch

    def caught_up(self) -> bool:
        return self.gate.exists()


def hold(flow: Flow, gate: Path) -> None:
    for node in flow.nodes:
        if isinstance(node, SourceNode):
            assert isinstance(node.source, Generator)
            node.source = Held(node.source, gate)


def check(query: str, folder: Path, events: Nexmark) -> None:
    rows = (events.table(kind).to_pylist() for kind in (PERSON, AUCTION, BID))
    right = expected(query, *rows)
    found = rows_of(query, pq.read_table(folder).to_pylist())
    assert right
    assert found == right, f"lost {right - found}, made up {found - right}"


@pytest.mark.parametrize(("query", "sources"), [("q5", 1), ("q8", 3)])
def test_results_on_processes_are_the_models(kept, tmp_path, query: str, sources: int) -> None:
    events = events_of(3, 0)
    flow = nexmark_flow(query, events, parquet(tmp_path / "out"), sources=sources)
    run = flow.start(sites=3, partitions=6, options=OPTIONS)
    kept.append(run)
    assert run.wait(60)
    check(query, tmp_path / "out", events)


@pytest.mark.parametrize(
    ("query", "splits", "sources", "group"),
    [
        nightly("q5", 3, 3, 3),
        nightly("q7", 3, 1, 0),
        ("q8", 3, 3, 0),
        nightly("sessions", 1, 3, 3),
    ],
)
def test_results_on_processes_that_are_killed(
    kept, tmp_path, query: str, splits: int, sources: int, group: int
) -> None:
    events = events_of(splits, group)
    sink = parquet(tmp_path / "out")
    flow = nexmark_flow(query, events, sink, sources=sources, pace=PACE)
    flow.protection = pairs(failure_domain="process")
    hold(flow, tmp_path / "gate")
    run = flow.start(sites=4, partitions=6, options=OPTIONS)
    kept.append(run)
    until_protected(run, 4)
    until(lambda: run.status()["rows_in"] > 500, "rows come in")
    kill(run, 1)
    until(lambda: run.protected, "protected again")
    kill(run, 2)
    (tmp_path / "gate").touch()
    assert run.wait(60)
    check(query, tmp_path / "out", events)
