"""What tests do to a run on Spark."""

import os
import signal
import time
from collections.abc import Callable

from pyspark.sql import DataFrame
from pyspark.sql import functions as F

from holdfast.control.run import Run


def until(run: Run, holds: Callable[[], bool], what: str, within: float = 60.0) -> None:
    deadline = time.monotonic() + within
    while not holds():
        assert not run.ended(0.02), f"the flow ended before {what}: {run.error}"
        assert time.monotonic() < deadline, f"not within {within} s: {what}: {run.status()['view']}"


def kill_leader(run: Run, stage: str) -> None:
    """The site that leads a stage's first partition group."""
    until(run, lambda: run.protected, "everything is protected")
    status = run.status()
    leader = next(p["replicas"][0] for p in status["partitions"] if p["stage"] == stage)
    os.kill(int(status["domains"][leader].process.rpartition("/")[2]), signal.SIGKILL)
    until(run, lambda: leader in run.status()["dead"], "its death is noticed")


def same(found: DataFrame, expected: DataFrame) -> bool:
    """Whether both have the same rows, some at least, in whatever order."""
    hashed = F.xxhash64(*found.columns).cast("decimal(38,0)")
    ours, theirs = (df.agg(F.count("*"), F.sum(hashed)).collect()[0] for df in (found, expected))
    return bool(ours[0]) and ours == theirs
