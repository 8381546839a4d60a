"""A flow that is stored while it runs, and the process groups that are killed under it."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.api.protection import Protection
from holdfast.connectors.sources import Source, generator
from holdfast.sinks import parquet, table
from holdfast.storage.restore_point import RestorePoint
from tests.support.runs import PATIENCE_S, until
from tests.support.windows import events

ROWS = 160_000


RATE = 20_000


SCHEMA = events(0, 0, 0).schema


def mixed(source: Source, out: Path, protect: Protection | None = None) -> Flow:
    """Windows, windows over them, running aggregates, a join, a table, and three sinks of files."""
    flow = Flow("mixed", protect=protect)
    made = flow.source("events", source, event_time="ts")
    keyed = made.key_by("k")
    totals = keyed.window(time=300, lateness=20).agg(t=F.sum("v"), n=F.count())
    totals.select(g=col("k") % 50, t=col("t")).key_by("g").agg(m=F.max("t"), n=F.count()).sink(
        "windows", parquet(out / "windows", with_order=True, interval=0.3)
    )
    running = keyed.agg(t=F.sum("v"), n=F.count())
    running.sink("running", parquet(out / "running", with_order=True, interval=0.3))
    running.sink("latest", table("k"))
    few = made.filter(col("v") < 40.0)
    near = few.key_by("k").join(few.key_by("k"), within=20, lateness=20)
    near.sink("near", parquet(out / "near", with_order=True, interval=0.3))
    return flow


def made(rate: int | None) -> Source:
    return generator(events, SCHEMA, rows=ROWS, rate=rate)


def results(out: Path) -> dict[str, pa.Table]:
    found = {}
    for name in ("windows", "running", "near"):
        table = pq.read_table(out / name)
        order = [(n, "ascending") for n in table.column_names if n.startswith("__o")]
        found[name] = table.sort_by(order).combine_chunks()
    return found


FILE = """
from pathlib import Path
from holdfast.protections import pairs
from tests.support.stored_flow import made, mixed

flow = mixed(made({rate}), Path({out!r}), {protect})
"""


class Driver:
    """``holdfast run`` in a process group of its own, with the sites in it."""

    def __init__(self, file: Path, *arguments: str) -> None:
        command = [sys.executable, "-m", "holdfast.ui.cli", "run", str(file), "--host", "process"]
        root = str(Path(__file__).parents[2])
        self.process = subprocess.Popen(
            [*command, "--quiet", *arguments],
            env=os.environ | {"PYTHONPATH": root},
            start_new_session=True,
        )

    def kill(self) -> None:
        """All at once, whatever they do."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


@pytest.fixture
def drivers() -> Iterator[list[Driver]]:
    started: list[Driver] = []
    yield started
    for driver in started:
        driver.kill()


def size(folder: Path) -> int:
    """What is in the files of a folder."""
    return sum(f.stat().st_size for f in folder.glob("*.parquet"))


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, pa.Table]:
    out = tmp_path_factory.mktemp("alone")
    with mixed(made(None), out).start(sites=1, partitions=6) as run:
        assert run.wait(PATIENCE_S)
    return results(out)


def kill_again_and_again(
    store: str, protect: str, undisturbed: dict[str, pa.Table], drivers: list[Driver], folder: Path
) -> None:
    """Driver and sites, at moments that nobody has chosen; the results are right all the same."""
    seed = random.randrange(1 << 32)
    print(f"seed {seed}")
    moments = random.Random(seed)
    file, out = folder / "flow.py", folder / "out"
    file.write_text(FILE.format(rate=RATE, out=str(out), protect=protect))
    more = ["--sites", "2", "--partitions", "6"]
    drivers.append(Driver(file, *more, "--checkpoint", store, "--checkpoint-interval", "0.3"))
    for _ in range(3):
        before = size(out / "running")
        until(lambda before=before: size(out / "running") > before, "rows come out")
        time.sleep(moments.random() * 1.5)
        assert drivers[-1].process.poll() is None, "it did not last"
        drivers[-1].kill()
        more = ["--sites", str(moments.randint(2, 3)), "--partitions", "6"]
        drivers.append(Driver(file, *more, "--restore-from", store))
    assert drivers[-1].process.wait(PATIENCE_S) == 0
    found = results(out)
    assert found["running"].num_rows == ROWS
    for name, wanted in undisturbed.items():
        assert found[name].equals(wanted), name
    assert RestorePoint.load(store).generation >= 2
