"""What tests do to a run on plain processes: wait, look at it, kill its sites."""

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

from holdfast.control.run import Run

PATIENCE_S = 60


def until(condition: Callable[[], object], what: str, within: float = PATIENCE_S) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert time.monotonic() < deadline, f"not within {within} s: {what}"
        time.sleep(0.02)


def until_protected(run: Run, sites: int) -> None:
    """Every replica is there, and every site has said who it is."""

    def ready() -> bool:
        assert not run.ended(0), run.error
        return run.protected and len(run.status()["sites"]) >= sites

    until(ready, "protected")


def until_rows(run: Run, more: int = 5_000) -> None:
    """Some more rows have come in."""
    before = run.status()["rows_in"]
    until(lambda: run.status()["rows_in"] > before + more, "rows come in")


def pids(run: Run) -> dict[int, int]:
    return {s["site"]: s["pid"] for s in run.status()["sites"]}


def replicas(run: Run) -> dict[tuple[str, int], list[int]]:
    """Who has the replicas of each partition group, by stage and first partition."""
    return {(p["stage"], p["partitions"][0]): p["replicas"] for p in run.status()["partitions"]}


def kill(run: Run, *sites: int) -> None:
    found = pids(run)
    for site in sites:
        os.kill(found[site], signal.SIGKILL)
    until(lambda: set(sites) <= set(run.status()["dead"]), f"the death of {sites} is known")


def taken(run: Run) -> dict[str, int]:
    """How many rows of each source are in epochs."""
    found = dict.fromkeys((s.name for s in run.plan.sources), 0)
    for record in run.records():
        for r in record.ranges:
            found[run.plan.stages[r.source].name] += r.rows
    return found


def exists(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()
