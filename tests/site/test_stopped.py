"""A flow is stopped, and goes on later from what it has written down, as if nothing had been."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import (
    Flow,
    FlowError,
    col,
    count,
    follow,
    max_,
    pairs,
    parquet,
    passive,
    sum_,
    upstream,
    view,
)
from holdfast.flow.past import Past
from holdfast.flow.protection import Protection
from holdfast.flow.sources import Source, generator
from holdfast.run import Run
from tests.site.test_pairs import PATIENCE_S, copies, kill, until, until_protected, until_rows
from tests.site.test_protections import events

ROWS = 120_000


def mixed(source: Source, out: Path, protect: Protection | None = None) -> Flow:
    """State of several kinds, and two sinks."""
    flow = Flow("mixed", protect=protect)
    keyed = flow.source("events", source, event_time="ts").key_by("k")
    totals = keyed.window(time=300, lateness=20).agg(t=sum_("v"), n=count())
    totals.select(g=col("k") % 50, t=col("t")).key_by("g").agg(m=max_("t"), n=count()).sink(
        "windows", parquet(out / "windows", with_order=True)
    )
    running = keyed.agg(t=sum_("v"), n=count())
    running.sink("running", parquet(out / "running", with_order=True))
    running.sink("latest", view("k"))
    return flow


def made(rate: int | None) -> Source:
    return generator(events, events(0, 0, 0).schema, rows=ROWS, rate=rate)


def results(out: Path) -> dict[str, pa.Table]:
    found = {}
    for name in ("windows", "running"):
        table = pq.read_table(out / name)
        order = [(n, "ascending") for n in table.column_names if n.startswith("__o")]
        found[name] = table.sort_by(order).combine_chunks()
    return found


def test_it_goes_on_with_other_sites_and_another_protection(
    kept: list[Run], tmp_path: Path
) -> None:
    flow = mixed(made(20_000), tmp_path / "out", pairs(apart="process"))
    first = flow.start(sites=3, partitions=6, store=str(tmp_path / "one"))
    kept.append(first)
    until_rows(first, 20_000)
    first.stop(timeout=PATIENCE_S)
    rows_in = first.status()["rows_in"]
    assert 20_000 < rows_in < ROWS

    flow = mixed(made(20_000), tmp_path / "out", passive(every_ms=100, apart="process"))
    again = {"resume": str(tmp_path / "one"), "store": str(tmp_path / "two")}
    second = flow.start(sites=2, partitions=6, **again)
    kept.append(second)
    # What stands by has begun with the same as what computes.
    until_protected(second, 2)
    kill(second, copies(second)["running aggregate by (k)", 0][0])
    until_rows(second, 20_000)
    assert second.records()[0].base == rows_in
    total = sum(row["n"] for row in second.view("latest").table().to_pylist())
    assert total > rows_in, "the view has what was before"
    second.stop(timeout=PATIENCE_S)

    flow = mixed(made(None), tmp_path / "out")
    third = flow.start(sites=1, partitions=6, resume=str(tmp_path / "two"))
    kept.append(third)
    assert third.wait(PATIENCE_S) and third.status()["rows_in"] == ROWS
    alone = mixed(made(None), tmp_path / "alone").start(sites=1, partitions=6)
    kept.append(alone)
    assert alone.wait(PATIENCE_S)
    found, wanted = results(tmp_path / "out"), results(tmp_path / "alone")
    assert found["running"].num_rows == ROWS
    for name, table in wanted.items():
        assert found[name].equals(table), name


def test_what_it_goes_on_with_is_not_forgotten_when_a_unit_is_made_anew(
    kept: list[Run], tmp_path: Path
) -> None:
    """Windows that were open when the flow was stopped are longer than all that comes after."""

    def windows(source: Source, out: Path, protect: Protection | None = None) -> Flow:
        flow = Flow("long", protect=protect)
        keyed = flow.source("events", source, event_time="ts").key_by("k")
        keyed.window(time=100_000).agg(t=sum_("v"), n=count()).sink("out", parquet(out))
        return flow

    protected = upstream(apart="process")
    first = windows(made(20_000), tmp_path / "out", protected)
    run = first.start(sites=2, partitions=4, store=str(tmp_path / "one"))
    kept.append(run)
    until_rows(run, 20_000)
    run.stop(timeout=PATIENCE_S)
    again = windows(made(20_000), tmp_path / "out", protected)
    second = again.start(sites=3, partitions=4, resume=str(tmp_path / "one"))
    kept.append(second)
    until_protected(second, 3)
    until_rows(second, 10_000)
    kill(second, copies(second)["time window by (k)", 0][0])
    assert second.wait(PATIENCE_S) and second.status()["dead"]
    alone = windows(made(None), tmp_path / "alone").start(sites=1)
    kept.append(alone)
    assert alone.wait(PATIENCE_S)
    found, wanted = (pq.read_table(tmp_path / f).sort_by("k") for f in ("out", "alone"))
    assert found.equals(wanted) and found.num_rows == 700


def test_files_that_were_read_are_not_read_again(kept: list[Run], tmp_path: Path) -> None:
    folder = tmp_path / "in"
    folder.mkdir()

    def add(number: int) -> None:
        pq.write_table(pa.Table.from_batches([events(0, number * 1_000, 1_000)]), folder / ".new")
        (folder / ".new").rename(folder / f"{number:03d}.parquet")

    def start(**more: str) -> Run:
        source = follow(folder, events(0, 0, 0).schema, until="_END")
        run = mixed(source, tmp_path / "out").start(sites=2, partitions=4, **more)
        kept.append(run)
        return run

    for number in range(5):
        add(number)
    run = start(store=str(tmp_path / "store"))
    until_rows(run, 4_999)
    run.stop(timeout=PATIENCE_S)
    for number in range(5, 8):
        add(number)
    (folder / "_END").touch()
    assert start(resume=str(tmp_path / "store")).wait(PATIENCE_S)
    counts = results(tmp_path / "out")["running"]
    assert counts.num_rows == 8_000
    alone = mixed(generator(events, events(0, 0, 0).schema, rows=8_000), tmp_path / "alone")
    with alone.start(sites=1, partitions=4) as plain:
        assert plain.wait(PATIENCE_S)
    assert results(tmp_path / "out")["windows"].equals(results(tmp_path / "alone")["windows"])


def test_what_does_not_fit_is_refused(kept: list[Run], tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = mixed(made(20_000), tmp_path / "out").start(sites=1, partitions=4, store=store)
    kept.append(run)
    until_rows(run, 5_000)
    run.stop(timeout=PATIENCE_S)
    with pytest.raises(FlowError, match="is not empty"):
        mixed(made(None), tmp_path / "other").start(sites=1, store=store)
    with pytest.raises(FlowError, match="5 partitions a stage, not 4"):
        mixed(made(None), tmp_path / "out").start(sites=1, partitions=5, resume=store)
    other = Flow("mixed")
    other.source("events", made(None)).sink("running", parquet(tmp_path / "out"))
    with pytest.raises(FlowError, match=r"its stages are \['events', 'running'\]"):
        other.start(sites=1, partitions=4, resume=store)
    with pytest.raises(FlowError, match=r"\(manifests is missing\)"):
        mixed(made(None), tmp_path / "out").start(sites=1, resume=str(tmp_path))


FILE = """
from pathlib import Path
from tests.site.test_stopped import made, mixed

flow = mixed(made(5_000), Path({out!r}))
"""


AT_A_TERMINAL = """
import signal, sys
from holdfast.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
sys.exit(main(sys.argv[1:]))
"""


def test_ctrl_c_drains_a_flow_that_has_a_store(tmp_path: Path) -> None:
    """It reaches the sites, too, which leave it to whoever runs the flow."""
    file, store = tmp_path / "flow.py", tmp_path / "store"
    file.write_text(FILE.format(out=str(tmp_path / "out")))
    arguments = ["run", str(file), "--host", "process", "--quiet", "--store", str(store)]
    root = str(Path(__file__).parents[2])
    running = subprocess.Popen(
        [sys.executable, "-c", AT_A_TERMINAL, *arguments],
        env=os.environ | {"PYTHONPATH": root},
        start_new_session=True,
    )
    try:
        until(lambda: any((tmp_path / "out" / "running").glob("*.parquet")), "rows come out")
        os.killpg(running.pid, signal.SIGINT)
        assert running.wait(PATIENCE_S) == 0
    finally:
        running.kill()
    past = Past.load(str(store))
    assert past.rows == pq.read_table(tmp_path / "out" / "running").num_rows > 0
