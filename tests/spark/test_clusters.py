"""The same flow on a real standalone cluster, to which the environment is shipped."""

import json
import os
import random
import re
import shutil
import subprocess
import sys
import tarfile
import time
import urllib.request
import venv
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyspark
import pytest

from holdfast.lab.workloads.dmz import oracle, read_back
from holdfast.spark.session import provide_java
from tests.support import cluster_flow

ROOT = Path(__file__).parents[2]
SPARK = Path(pyspark.__file__).parent / "bin"
SETTINGS = {
    "spark.driver.bindAddress": "127.0.0.1",
    "spark.driver.host": "127.0.0.1",
    "spark.executor.cores": "2",
    "spark.executor.memory": "512m",
    "spark.log.level": "ERROR",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
}
SCRIPT = """
import os, signal, sys, time
from pyspark.sql import SparkSession
from holdfast import Options, SiteLostError
from holdfast.sinks import discard
from holdfast.lab.workloads.dmz import DmzRows, dmz_flow, oracle

def where(_):
    import holdfast
    return holdfast.__file__

spark = SparkSession.builder.master(sys.argv[1]).getOrCreate()
print("from:", *spark.sparkContext.parallelize([0], 1).map(where).collect())
make = DmzRows(keys=20_000, splits=2)
local = Options(listen="127.0.0.1")
run = dmz_flow(make.source(rows=400_000), discard()).start(spark, sites=3, options=local)
assert run.wait(60)
expected, found = oracle(400_000, keys=20_000, splits=2), run.sink_report("alerts")
assert (found["rows"], found["digest"]) == (expected["rows"], expected["digest"]), found
executors = {d.executor for d in run.status()["domains"].values()}
print("executors:", len(executors))

run = dmz_flow(make.source(rate=50_000), discard()).start(spark, sites=3, options=local)
while len(run.status()["sites"]) < 3:
    time.sleep(0.05)
victim = run.status()["domains"][1].executor.rsplit("-", 1)[1]
os.kill(int(victim), signal.SIGKILL)
try:
    run.wait(60)
    print("the flow went on")
except SiteLostError as error:
    print("lost:", str(error).splitlines()[0])
spark.stop()
"""


def environment() -> dict[str, str]:
    """What somebody has who has a Spark, and no Holdfast."""
    provide_java()
    ours = ("PYTHONPATH", "PYSPARK_PYTHON", "PYSPARK_DRIVER_PYTHON", "PYSPARK_SUBMIT_ARGS")
    mine = {name: value for name, value in os.environ.items() if name not in ours}
    # There are many JVMs, and none lives long enough for its code to be worth much.
    java = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -XX:-UsePerfData"
    return mine | {"SPARK_LOCAL_IP": "127.0.0.1", "JAVA_TOOL_OPTIONS": java}


def options(settings: dict[str, str]) -> list[str]:
    return [text for item in settings.items() for text in ("--conf", "=".join(item))]


def check(master: str, python: str, submit: list[str], loaded: str) -> None:
    """A driver of one's own, which is run by plain Python and finds Holdfast in the sources."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, master],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment()
        | {
            "PYTHONPATH": paths,
            "PYSPARK_PYTHON": python,
            "PYSPARK_SUBMIT_ARGS": " ".join([*options(SETTINGS), *submit, "pyspark-shell"]),
        },
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    assert "executors: 2" in done.stdout
    assert re.search(rf"from: \S*{re.escape(loaded)}\S*$", done.stdout, re.M), done.stdout
    assert re.search(r"lost: site \d(, \d)* died .* not protected", done.stdout), done.stdout


# --- a standalone cluster -------------------------------------------------------------------------


class Standalone:
    """A master and workers from the PySpark distribution. They know nothing of Holdfast."""

    LISTEN = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
    SIZE = ("--cores", "2", "--memory", "1g")

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._processes: list[subprocess.Popen] = []
        self.workers: list[subprocess.Popen] = []

    def __enter__(self) -> "Standalone":
        try:
            _, log = self._launch("org.apache.spark.deploy.master.Master", *self.LISTEN)
            self.master = wait_for(log, r"Starting Spark master at (spark://\S+)")
            self.start_workers(2)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for process in reversed(self._processes):
            process.terminate()
        for process in self._processes:
            process.wait(20)

    def _launch(self, *arguments: str) -> tuple[subprocess.Popen, Path]:
        """A process of Spark's (the script becomes the JVM), and where it says what it does."""
        place = self._folder / str(len(self._processes))
        log = place.with_suffix(".log")
        with log.open("w") as out:
            process = subprocess.Popen(
                [str(SPARK / "spark-class"), *arguments],
                stdout=out,
                stderr=subprocess.STDOUT,
                # As if each were on a machine of its own. Executors inherit it.
                env=environment()
                | {"SPARK_WORKER_DIR": str(place), "HOLDFAST_HOST": f"machine {place.name}"},
            )
        self._processes.append(process)
        return process, log

    def start_workers(self, count: int) -> None:
        name = "org.apache.spark.deploy.worker.Worker"
        started = [self._launch(name, *self.LISTEN, *self.SIZE, self.master) for _ in range(count)]
        for worker, log in started:
            wait_for(log, "(Successfully registered)")
            self.workers.append(worker)

    def kill_worker(self, draw: random.Random) -> None:
        worker = self.workers.pop(draw.randrange(len(self.workers)))
        worker.kill()
        worker.wait()

    def kill_executor(self, draw: random.Random) -> None:
        os.kill(draw.choice(executors_of(draw.choice(self.workers).pid)), 9)


def executors_of(worker: int) -> list[int]:
    """The JVMs that a worker has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(")", 1)[1].split()[1])
            if parent == worker and b"ExecutorBackend" in (stat.parent / "cmdline").read_bytes():
                found.append(int(stat.parent.name))
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended meanwhile
    return sorted(found)


def wait_for(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text()):
            return found.group(1)
        time.sleep(0.1)
    pytest.fail(f"{log.name} never said {pattern!r}:\n{log.read_text()[-2_000:]}")


@pytest.fixture(scope="module")
def standalone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Standalone]:
    with Standalone(tmp_path_factory.mktemp("standalone")) as cluster:
        yield cluster


def pack(folder: Path, wheel: Path | None = None) -> Path:
    """A virtual environment in an archive, as venv-pack makes one. It has what Holdfast needs (here
    only links to it, or it would be large), Holdfast if there is a `wheel`, and no PySpark."""
    venv.create(folder / "env", symlinks=True)
    (packages,) = (folder / "env").glob("lib/python*/site-packages")
    for entry in Path(pyspark.__file__).parents[1].iterdir():
        ours = entry.name.lower().startswith(("holdfast", "__editable__", "pyspark"))
        if not ours and entry.suffix != ".pth":
            (packages / entry.name).symlink_to(entry)
    if wheel is not None:
        zipfile.ZipFile(wheel).extractall(packages)
    archive = folder / "env.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(folder / "env", arcname=".")
    return archive


@pytest.mark.nightly  # the next test ships an archive, too, with Holdfast beside it
def test_the_environment_is_shipped_as_an_archive(
    standalone: Standalone, wheel: Path, tmp_path: Path
) -> None:
    check(
        standalone.master,
        "./env/bin/python",
        ["--archives", f"{pack(tmp_path, wheel)}#env"],
        loaded="/env/lib/",
    )


class Submitted:
    """`cluster_flow` under spark-submit, with Holdfast itself as a zip beside the archive."""

    def __init__(self, cluster: Standalone, wheel: Path, folder: Path) -> None:
        self.folder = folder
        archive, zipped = pack(folder), folder / "holdfast.zip"
        shutil.copy(wheel, zipped)
        settings = SETTINGS | {
            "spark.executorEnv.PYTHONPATH": zipped.name,
            "spark.python.daemon.module": "holdfast.spark.daemon",
        }
        shipped = ["--archives", f"{archive}#env", "--py-files", str(zipped)]
        with (folder / "driver.log").open("w") as log:
            self.process = subprocess.Popen(
                [
                    str(SPARK / "spark-submit"),
                    *("--master", cluster.master, *options(settings), *shipped),
                    *(cluster_flow.__file__, str(folder)),
                ],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment() | {"PYSPARK_PYTHON": "./env/bin/python"},
                cwd=folder,
            )

    def until(self, holds: Callable[[], bool], what: str, within: float = 240.0) -> None:
        deadline = time.monotonic() + within
        while not holds():
            said = (self.folder / "driver.log").read_text()[-4_000:]
            assert self.process.poll() is None, f"it ended before {what}:\n{said}"
            assert time.monotonic() < deadline, f"not within {within} s: {what}:\n{said}"
            time.sleep(0.1)

    def status(self) -> dict[str, Any]:
        address = (self.folder / "http").read_text()
        with urllib.request.urlopen(f"http://{address}/status", timeout=30) as answer:
            return json.load(answer)

    def goes_on(self) -> None:
        before = self.status()["rows_in"]
        self.until(lambda: self.status()["rows_in"] > before, "rows flow")

    def notices(self, kill: Callable[[random.Random], None], draw: random.Random) -> None:
        """Kill at some moment while rows flow and everything is protected."""
        self.until(lambda: self.status()["protected"], "everything is protected")
        dead = len(self.status()["dead"])
        time.sleep(draw.uniform(0, 1.5))
        kill(draw)
        self.until(lambda: len(self.status()["dead"]) > dead, "deaths are noticed")
        self.goes_on()

    def end(self) -> dict[str, Any]:
        (self.folder / "enough").touch()
        assert self.process.wait(120) == 0, (self.folder / "driver.log").read_text()[-4_000:]
        return json.loads((self.folder / "said").read_text())

    def __enter__(self) -> "Submitted":
        self.until((self.folder / "http").exists, "the flow has begun")
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        self.process.wait(20)


def test_executors_and_workers_are_killed_under_a_submitted_flow(
    standalone: Standalone, wheel: Path, tmp_path: Path
) -> None:
    seed = int(os.environ.get("HOLDFAST_SEED") or random.randrange(1 << 16))
    print(f"HOLDFAST_SEED={seed}")
    draw = random.Random(seed)
    with Submitted(standalone, wheel, tmp_path) as flow:
        faults = [standalone.kill_executor, standalone.kill_worker]
        draw.shuffle(faults)
        for fault in faults:
            flow.notices(fault, draw)
            if len(standalone.workers) < 2:
                # Two replicas cannot be on the one machine that is left.
                assert not flow.status()["protected"]
                standalone.start_workers(1)
        flow.until(lambda: flow.status()["protected"], "everything is protected again")
        flow.goes_on()
        said = flow.end()
    assert all(Path(file).parents[1].name == "holdfast.zip" for file in said["from"]), said
    assert Path(said["driver"]).parents[1].name == "holdfast.zip"
    right = oracle(said["rows_in"], keys=cluster_flow.KEYS, staggered=True)
    assert read_back(tmp_path / "out") == {name: right[name] for name in ("rows", "digest")}
