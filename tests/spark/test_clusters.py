"""The same flow on Spark's other masters: local-cluster, and a real standalone cluster."""

import contextlib
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyspark
import pytest

from holdfast.spark.session import provide_java

ROOT = Path(__file__).parents[2]
SCRIPT = """
import os, signal, sys, time
from pyspark.sql import SparkSession
from holdfast import SiteLostError, discard
from holdfast.bench.dmz import DmzRows, dmz_flow, oracle

settings = {
    "spark.ui.enabled": "false", "spark.driver.host": "127.0.0.1", "spark.log.level": "ERROR",
    "spark.driver.bindAddress": "127.0.0.1", "spark.ui.showConsoleProgress": "false",
    "spark.executor.memory": "512m", "spark.executor.cores": "2",
    "spark.executorEnv.PYTHONPATH": os.environ["PYTHONPATH"],
}
builder = SparkSession.builder.master(sys.argv[1])
for key, value in settings.items():
    builder = builder.config(key, value)
spark = builder.getOrCreate()
make = DmzRows(keys=20_000, splits=2)
run = dmz_flow(make.source(rows=400_000), discard()).start(spark, sites=3, listen="127.0.0.1")
assert run.wait(60)
expected, found = oracle(400_000, keys=20_000, splits=2), run.sink_report("alerts")
assert (found["rows"], found["digest"]) == (expected["rows"], expected["digest"]), found
executors = {d.executor for d in run.status()["domains"].values()}
print("executors:", len(executors))

run = dmz_flow(make.source(rate=50_000), discard()).start(spark, sites=3, listen="127.0.0.1")
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
    provide_java()
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return os.environ | {
        "PYTHONPATH": paths,
        "PYSPARK_PYTHON": sys.executable,
        "SPARK_LOCAL_IP": "127.0.0.1",
    }


def check(master: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, master],
        capture_output=True,
        text=True,
        timeout=240,
        env=environment(),
    )
    assert done.returncode == 0, done.stdout + done.stderr[-4_000:]
    assert "executors: 2" in done.stdout
    assert re.search(r"lost: site \d(, \d)* died .* not protected", done.stdout), done.stdout


def test_local_cluster() -> None:
    check("local-cluster[2,2,512]")


@contextlib.contextmanager
def standalone(folder: Path) -> Iterator[str]:
    """A master and two workers from the PySpark distribution."""
    spark_class = Path(pyspark.__file__).parent / "bin" / "spark-class"
    started: list[subprocess.Popen] = []

    def launch(name: str, *arguments: str) -> Path:
        log = folder / f"{name}.log"
        with log.open("w") as out:
            started.append(
                subprocess.Popen(
                    [str(spark_class), *arguments],
                    stdout=out,
                    stderr=subprocess.STDOUT,
                    env=environment() | {"SPARK_WORKER_DIR": str(folder / name)},
                )
            )
        return log

    try:
        listen = ("--host", "127.0.0.1", "--port", "0", "--webui-port", "0")
        log = launch("master", "org.apache.spark.deploy.master.Master", *listen)
        address = wait_for(log, r"Starting Spark master at (spark://\S+)")
        for n in (1, 2):
            size = ("--cores", "2", "--memory", "1g")
            worker = "org.apache.spark.deploy.worker.Worker"
            wait_for(
                launch(f"worker{n}", worker, *listen, *size, address), "(Successfully registered)"
            )
        yield address
    finally:
        for process in reversed(started):
            process.terminate()
        for process in started:
            process.wait(20)


def wait_for(log: Path, pattern: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if found := re.search(pattern, log.read_text()):
            return found.group(1)
        time.sleep(0.1)
    pytest.fail(f"{log.name} never said {pattern!r}:\n{log.read_text()[-2_000:]}")


def test_a_standalone_cluster(tmp_path: Path) -> None:
    with standalone(tmp_path) as address:
        check(address)
