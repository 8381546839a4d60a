"""A flow is stopped, and goes on later from what it has written down, as if nothing had been."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import Flow, FlowError
from holdfast import functions as F
from holdfast.api.options import Checkpoint, Options
from holdfast.connectors.sources import Source, generator
from holdfast.control.run import Run
from holdfast.core.protection import ProtectionSpec
from holdfast.errors import HostError
from holdfast.protections import pairs, passive, upstream
from holdfast.sinks import parquet
from holdfast.sources import follow
from holdfast.storage.files import Folder
from holdfast.storage.restore_point import Kind, RestorePoint
from holdfast.ui.cli import main
from tests.support.runs import PATIENCE_S, kill, replicas, until, until_protected, until_rows
from tests.support.stopped_flow import ROWS, made, mixed
from tests.support.windows import events


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
    flow = mixed(made(20_000), tmp_path / "out", pairs(failure_domain="process"))
    first = flow.start(sites=3, partitions=6, checkpoint=Checkpoint(str(tmp_path / "one")))
    kept.append(first)
    until_rows(first, 20_000)
    first.stop(timeout=PATIENCE_S)
    rows_in = first.status()["rows_in"]
    assert 20_000 < rows_in < ROWS

    flow = mixed(made(20_000), tmp_path / "out", passive(interval=0.1, failure_domain="process"))
    one, two = str(tmp_path / "one"), Checkpoint(str(tmp_path / "two"))
    second = flow.start(sites=2, partitions=6, restore_from=one, checkpoint=two)
    kept.append(second)
    # What is a standby has begun with the same as what computes.
    until_protected(second, 2)
    kill(second, replicas(second)["running aggregate by (k)", 0][0])
    until_rows(second, 20_000)
    assert second.records()[0].base == rows_in
    total = sum(row["n"] for row in second.table("latest").to_arrow().to_pylist())
    assert total > rows_in, "the view has what was before"
    second.stop(timeout=PATIENCE_S)

    flow = mixed(made(None), tmp_path / "out")
    third = flow.start(sites=1, partitions=6, restore_from=str(tmp_path / "two"))
    kept.append(third)
    assert third.wait(PATIENCE_S) and third.status()["rows_in"] == ROWS
    alone = mixed(made(None), tmp_path / "alone").start(sites=1, partitions=6)
    kept.append(alone)
    assert alone.wait(PATIENCE_S)
    found, wanted = results(tmp_path / "out"), results(tmp_path / "alone")
    assert found["running"].num_rows == ROWS
    for name, rows in wanted.items():
        assert found[name].equals(rows), name


def test_what_it_goes_on_with_is_not_forgotten_when_a_task_is_rebuilt(
    kept: list[Run], tmp_path: Path
) -> None:
    """Windows that were open when the flow was stopped are longer than all that comes after."""

    def windows(source: Source, out: Path, protect: ProtectionSpec | None = None) -> Flow:
        flow = Flow("long", protect=protect)
        keyed = flow.source("events", source, event_time="ts").key_by("k")
        keyed.window(time=100_000).agg(t=F.sum("v"), n=F.count()).sink("out", parquet(out))
        return flow

    protected = upstream(failure_domain="process")
    first = windows(made(20_000), tmp_path / "out", protected)
    run = first.start(sites=2, partitions=4, checkpoint=Checkpoint(str(tmp_path / "one")))
    kept.append(run)
    until_rows(run, 20_000)
    run.stop(timeout=PATIENCE_S)
    again = windows(made(20_000), tmp_path / "out", protected)
    second = again.start(sites=3, partitions=4, restore_from=str(tmp_path / "one"))
    kept.append(second)
    until_protected(second, 3)
    until_rows(second, 10_000)
    kill(second, replicas(second)["time window by (k)", 0][0])
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

    def start(**more: Any) -> Run:
        source = follow(folder, events(0, 0, 0).schema, until="_END")
        run = mixed(source, tmp_path / "out").start(sites=2, partitions=4, **more)
        kept.append(run)
        return run

    for number in range(5):
        add(number)
    run = start(checkpoint=Checkpoint(str(tmp_path / "store")))
    until_rows(run, 4_999)
    run.stop(timeout=PATIENCE_S)
    for number in range(5, 8):
        add(number)
    (folder / "_END").touch()
    assert start(restore_from=str(tmp_path / "store")).wait(PATIENCE_S)
    counts = results(tmp_path / "out")["running"]
    assert counts.num_rows == 8_000
    alone = mixed(generator(events, events(0, 0, 0).schema, rows=8_000), tmp_path / "alone")
    with alone.start(sites=1, partitions=4) as plain:
        assert plain.wait(PATIENCE_S)
    assert results(tmp_path / "out")["windows"].equals(results(tmp_path / "alone")["windows"])


def test_what_does_not_fit_is_refused(kept: list[Run], tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    run = mixed(made(20_000), tmp_path / "out").start(
        sites=1, partitions=4, checkpoint=Checkpoint(store)
    )
    kept.append(run)
    until_rows(run, 5_000)
    run.stop(timeout=PATIENCE_S)
    with pytest.raises(FlowError, match="is not empty"):
        mixed(made(None), tmp_path / "other").start(sites=1, checkpoint=Checkpoint(store))
    with pytest.raises(FlowError, match="5 partitions a stage, not 4"):
        mixed(made(None), tmp_path / "out").start(sites=1, partitions=5, restore_from=store)
    other = Flow("mixed")
    other.source("events", made(None)).sink("running", parquet(tmp_path / "out"))
    with pytest.raises(FlowError, match=r"with another plan: stage .* is missing"):
        other.start(sites=1, partitions=4, restore_from=store)
    with pytest.raises(FlowError, match="manifests is missing"):
        mixed(made(None), tmp_path / "out").start(sites=1, restore_from=str(tmp_path))


FILE = """
from pathlib import Path
from tests.support.stopped_flow import made, mixed

flow = mixed(made(5_000), Path({out!r}))
"""


AT_A_TERMINAL = """
import signal, sys
from holdfast.ui.cli import main

signal.signal(signal.SIGINT, signal.default_int_handler)  # what runs in the background ignores it
sys.exit(main(sys.argv[1:]))
"""


@pytest.fixture
def command(tmp_path: Path) -> Iterator[Command]:
    commands = Command(tmp_path)
    yield commands
    commands.close()


class Command:
    """``holdfast`` in processes of its own, in the folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder, self._started = folder, []
        (folder / "flow.py").write_text(FILE.format(out=str(folder / "out")))

    def run(self, *more: str) -> subprocess.Popen[str]:
        return self("run", "flow.py", "--host", "process", "--quiet", *more)

    def __call__(self, *arguments: str) -> subprocess.Popen[str]:
        root = str(Path(__file__).parents[2])
        started = subprocess.Popen(
            [sys.executable, "-c", AT_A_TERMINAL, *arguments],
            cwd=self.folder,
            env=os.environ | {"PYTHONPATH": root},
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(started)
        return started

    def until_rows(self, running: subprocess.Popen[str], more: int = 1) -> None:
        """More rows come out."""
        files = (self.folder / "out" / "running").glob
        before = len(list(files("*.parquet")))

        def come() -> bool:
            assert running.poll() is None, running.communicate()
            return len(list(files("*.parquet"))) >= before + more

        until(come, "rows come out")

    def close(self) -> None:
        for started in self._started:
            if started.poll() is None:
                os.killpg(started.pid, signal.SIGKILL)
            started.communicate()


def test_sigterm_stops_and_stores_and_what_is_resumed_is_stored_again(
    command: Command, tmp_path: Path
) -> None:
    """In a folder with a bare name. Signals reach the sites, too, which leave it to whoever runs
    the flow."""
    rows = 0
    for how, where in ((signal.SIGTERM, "--checkpoint"), (signal.SIGINT, "--restore-from")):
        running = command.run(where, "st1")
        command.until_rows(running)
        os.killpg(running.pid, how)
        said, complaints = running.communicate(timeout=PATIENCE_S)
        assert running.returncode == 0, said + complaints
        assert "stopping" in said
        restore_point = RestorePoint.load(str(tmp_path / "st1"))
        assert restore_point.kind is Kind.STOPPED and restore_point.rows > rows
        assert restore_point.rows == pq.read_table(tmp_path / "out" / "running").num_rows
        rows = restore_point.rows
    counts = results(tmp_path / "out")["running"]
    assert counts["__o0"].to_pylist() == list(range(rows)), "each row once"


def test_a_flow_that_is_stored_while_it_runs_is_so_again_when_it_was_stopped(
    command: Command, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    running = command.run("--checkpoint", "st1", "--checkpoint-interval", "0.2")
    command.until_rows(running)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 0
    stopped = RestorePoint.load(str(tmp_path / "st1"))
    assert (stopped.kind, stopped.every_ms) == (Kind.STOPPED, 200)
    running = command.run("--restore-from", "st1")
    until(
        lambda: RestorePoint.load(str(tmp_path / "st1")).epochs > stopped.epochs,
        "it is stored again",
    )
    os.killpg(running.pid, signal.SIGKILL)
    running.wait()
    assert main(["check", str(tmp_path / "st1")]) == 0
    said = capsys.readouterr().out
    assert "running, or lost" in said and "--restore-from" in said
    running = command.run("--restore-from", "st1")
    command.until_rows(running)
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 0
    restore_point = RestorePoint.load(str(tmp_path / "st1"))
    counts = results(tmp_path / "out")["running"]
    assert counts["__o0"].to_pylist() == list(range(restore_point.rows)), "each row once"


def test_a_second_signal_gives_up(command: Command, tmp_path: Path) -> None:
    (tmp_path / "flow.py").write_text(STUCK)
    running = command.run("--checkpoint", "st1")
    until((tmp_path / "begun").exists, "the sink has rows")
    os.kill(running.pid, signal.SIGTERM)
    assert running.stdout is not None and "stopping" in running.stdout.readline()
    os.kill(running.pid, signal.SIGTERM)
    assert running.wait(PATIENCE_S) == 128 + signal.SIGTERM
    assert Folder(str(tmp_path / "st1")).list() == [], "there is nothing to go on from"


STUCK = """
import time
from pathlib import Path
from holdfast import Flow
from holdfast.sinks import callback
from tests.support.stopped_flow import made

def stuck(epoch, batch):
    Path("begun").touch()
    while not Path("go on").exists():
        time.sleep(0.01)

flow = Flow("stuck")
flow.source("events", made(5_000)).sink("out", callback(stuck))
"""


def test_a_flow_that_is_only_stored_when_it_is_stopped_is_not_resumed_twice(
    kept: list[Run], tmp_path: Path
) -> None:
    """What its sinks have got since nobody knows; another that is running would write the same."""
    out, store = tmp_path / "out", str(tmp_path / "store")

    def start(rate: int | None = 5_000, sites: int = 1, **more: Any) -> Run:
        kept.append(mixed(made(rate), out).start(sites=sites, partitions=4, **more))
        return kept[-1]

    first = start(checkpoint=Checkpoint(store))
    until_rows(first, 2_000)
    with pytest.raises(FlowError, match="has not been stopped"):
        start(restore_from=store, checkpoint=Checkpoint(str(tmp_path / "other")))
    first.stop(timeout=PATIENCE_S)
    with pytest.raises(HostError):  # it could not be started, and is still where it was
        start(restore_from=store, sites=1, options=Options(start_timeout=0.001))
    second = start(restore_from=store)
    until_rows(second, 2_000)
    with pytest.raises(FlowError, match="a flow that was started there runs, or was lost"):
        start(restore_from=store)
    second.stop(timeout=PATIENCE_S)
    stopped = RestorePoint.load(store)
    assert stopped.kind is Kind.STOPPED and stopped.generation == 2
    third = start(None, restore_from=store)
    assert third.wait(PATIENCE_S)
    with pytest.raises(FlowError, match="it has ended"):
        start(restore_from=store)
    assert results(out)["running"]["__o0"].to_pylist() == list(range(ROWS))


def test_state_that_cannot_be_written_when_it_is_stopped_is_an_error(
    kept: list[Run], tmp_path: Path
) -> None:
    store = tmp_path / "store"
    run = mixed(made(20_000), tmp_path / "out").start(
        sites=1, partitions=4, checkpoint=Checkpoint(str(store))
    )
    kept.append(run)
    until_rows(run, 1_000)
    (store / "checkpoints").touch()  # no folder can be made there
    with pytest.raises(FlowError, match="of the stopped flow cannot be written to"):
        run.stop(timeout=PATIENCE_S)
    assert Folder(str(store)).list() == [], "there is nothing to go on from"


def test_stored_state_that_was_damaged_is_refused_and_checked(
    kept: list[Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = tmp_path / "store"
    run = mixed(made(20_000), tmp_path / "out").start(
        sites=2, partitions=4, checkpoint=Checkpoint(str(store))
    )
    kept.append(run)
    until_rows(run, 5_000)
    run.stop(timeout=PATIENCE_S)
    assert main(["check", str(store)]) == 0
    said = capsys.readouterr().out
    assert "flow 'mixed'" in said and "stopped after epoch" in said and "nothing is damaged" in said
    state = max(store.rglob("checkpoints/**/*.arrow"), key=lambda file: file.stat().st_size)
    data = state.read_bytes()
    flipped = bytearray(data)
    flipped[len(data) // 2] ^= 4
    state.write_bytes(flipped)
    with pytest.raises(FlowError, match=f"{state.name} at .* is damaged.*checksum"):
        start_again = mixed(made(20_000), tmp_path / "out")
        kept.append(start_again.start(sites=2, partitions=4, restore_from=str(store)))
    assert main(["check", str(store)]) == 1
    said = capsys.readouterr().out
    assert f"{state.name}: its checksum is" in said and "restore these files from a backup" in said
    state.write_bytes(data)
    assert main(["check", str(store)]) == 0
    kept.append(start_again.start(sites=2, partitions=4, restore_from=str(store)))
    kept[-1].stop(timeout=PATIENCE_S)
    assert main(["check", str(tmp_path / "nowhere")]) == 1
