"""`holdfast advise` on flow files: what it measures and writes, and what it leaves alone."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from holdfast import Flow, FlowError
from holdfast.advise.command import advise
from holdfast.advise.measure import dry_run, measure
from holdfast.advise.propose import Bounds
from holdfast.api.nodes import KeyedNode, SinkNode
from holdfast.protections import pairs
from holdfast.sinks import callback, discard, parquet
from holdfast.sources import lines, rows
from holdfast.ui.cli import main
from holdfast.ui.flow_file import load_flow

FLOW = """
import numpy as np
import pyarrow as pa
from holdfast import Flow, col, functions as F
from holdfast.protections import pairs
from holdfast.sinks import parquet
from holdfast.sources import generator

SCHEMA = pa.schema([("k", pa.int64()), ("v", pa.int64()), ("ts", pa.int64())])

def make(split, offset, n):
    at = np.arange(offset, offset + n)
    return pa.record_batch([at * 7919 % 500, at % 10, at // 20], schema=SCHEMA)

flow = Flow("small", protect=pairs())
events = flow.source("events", generator(make, SCHEMA, rate=20_000), event_time="ts")
windows = events.key_by("k").window(time=500).agg(n=F.count())
windows.key_by("k").agg(total=F.sum("n")).sink("totals", parquet({sink!r}))
"""


@pytest.fixture
def flow_file(tmp_path: Path) -> Path:
    file = tmp_path / "small.py"
    file.write_text(FLOW.replace("{sink!r}", repr(str(tmp_path / "written"))))
    return file


def rows_of(count: int) -> pa.RecordBatch:
    return pa.record_batch({"k": pa.array(range(count), pa.int64())})


WANTED = ["--recovery", "1s", "--overhead", "40%"]


def test_the_command(flow_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = tmp_path / "advice.json"
    small = ["--sites", "2", "--partitions", "4", "--seconds", "3"]
    assert main(["advise", str(flow_file), *WANTED, *small, "--json", str(found)]) == 0
    printed = capsys.readouterr().out
    assert "Write:" in printed and 'flow = Flow("small", protect=' in printed
    advice = json.loads(found.read_text())
    assert advice["fits"] and not advice["missed"]
    stages = {s["name"]: s for s in advice["measured"]["stages"]}
    window, running = stages["time window by (k)"], stages["running aggregate by (k)"]
    assert window["rows_in"] == pytest.approx(20_000, rel=0.3)
    assert window["life_s"] == pytest.approx(0.5, rel=0.4)  # 500 of 1,000 that pass in a second
    assert 0 < window["keys"] <= 1_500 and running["keys"] == 500
    assert running["life_s"] is None and not running["bounded"]
    assert window["work"] > 0 and advice["measured"]["cores"] > window["work"]
    assert {p["stage"] for p in advice["proposed"]} == {window["name"], running["name"]}
    assert advice["constants"]["replica"] > 0
    assert not (tmp_path / "written").exists()  # nothing went into the sink


def test_bounds_that_cannot_be_met(flow_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    wanted = ["--recovery", "0ms", "--overhead", "0%", "--seconds", "2", "--sites", "2"]
    assert main(["advise", str(flow_file), *wanted]) == 1
    printed = capsys.readouterr().out
    assert "Nothing is within the bounds" in printed and "points too much" in printed


def test_a_flow_that_ends_early_is_fine() -> None:
    flow = Flow("short")
    batch = rows_of(1_000)
    flow.source("rows", rows(batch)).sink("out", discard())
    facts = measure(flow, sites=2, partitions=2, seconds=5.0)
    assert facts.rows_in * facts.seconds == pytest.approx(1_000)


def test_a_flow_that_gets_nothing_is_not() -> None:
    flow = Flow("empty")
    flow.source("rows", rows(rows_of(0))).sink("out", discard())
    with pytest.raises(FlowError, match="got no row"):
        measure(flow, sites=2, partitions=2, seconds=2.0)


def test_the_flow_is_as_it_was(flow_file: Path) -> None:
    flow = load_flow(str(flow_file), None)
    keyed = next(n for n in flow.nodes if isinstance(n, KeyedNode))
    keyed.protection = pairs(replicas=3)
    flow.protection, flow.losses = pairs(replicas=3), 2
    before = flow.protection, [dict(n.__dict__) for n in flow.nodes]
    with dry_run(flow):
        assert flow.protection.name == "none" and keyed.protection is None and not flow.losses
        assert all(type(n.sink) is type(discard()) for n in flow.nodes if isinstance(n, SinkNode))
    assert (flow.protection, [dict(n.__dict__) for n in flow.nodes]) == before
    assert flow.losses == 2


def test_more_losses_than_sites_are_refused(flow_file: Path) -> None:
    flow = load_flow(str(flow_file), None)
    with pytest.raises(FlowError, match="2 losses at once needs at least 3 sites, not 2"):
        advise(flow, Bounds(200, 0.5, losses=2), sites=2, partitions=2, seconds=1.0)


def test_no_sink_is_touched(tmp_path: Path) -> None:
    def refuse(epoch: int, batch: object) -> None:
        raise AssertionError("a row was handed out")

    flow = Flow("quiet")
    source = flow.source("rows", rows(rows_of(100)))
    source.sink("called", callback(refuse))
    source.sink("written", parquet(tmp_path / "written"))
    measure(flow, sites=2, partitions=2, seconds=5.0)
    assert not (tmp_path / "written").exists()


def test_rows_that_would_be_missing_elsewhere_are_not_taken() -> None:
    flow = Flow("lines")
    source = lines("localhost", 1, rows_of(0).schema)
    flow.source("lines", source).sink("out", discard())
    with pytest.raises(FlowError, match="missing elsewhere"):
        measure(flow, sites=2, partitions=2, seconds=1.0)
    assert flow.nodes[0].source is source  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recovery", "200", "--overhead", "10%"], "not a duration such as 200ms"),
        (["--recovery", "200ms", "--overhead", "10"], "not a percentage below 100"),
        (["--recovery", "200ms", "--overhead", "100%"], "not a percentage below 100"),
        (["--recovery", "-1s", "--overhead", "10%"], "expected one argument"),
    ],
)
def test_bad_bounds(
    arguments: list[str], said: str, flow_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["advise", str(flow_file), *arguments])
    assert left.value.code == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "needs a FLOW.py"),
        (["no.py", *WANTED], "file no.py does not exist"),
        (["FILE"], "--recovery 200ms --overhead 10%"),
        (["FILE", *WANTED, "--sites", "1"], "at least two sites"),
        (["FILE", *WANTED, "--seconds", "0"], "--seconds must be positive"),
        (["FILE", *WANTED, "--fit", "no.json"], "--fit no.json"),
    ],
)
def test_bad_arguments(
    arguments: list[str], said: str, flow_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(flow_file) if a == "FILE" else a for a in arguments]
    assert main(["advise", *given]) == 2
    assert said in capsys.readouterr().err
