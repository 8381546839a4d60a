"""Chaos on Spark: to sites that are tasks of one application; then to one of two applications."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from holdfast.apps import Apps
from holdfast.bench.failover import kill_driver
from holdfast.chaos import load
from holdfast.chaos.engine import PATIENCE_S, Done
from holdfast.chaos.faults import DRIVER, Fault
from holdfast.chaos.hosts import Exits, detoured
from holdfast.chaos.proxy import Proxy
from holdfast.errors import HostError
from holdfast.flow.graph import Flow
from holdfast.flow.plan import plan
from holdfast.site.runtime import OnExit, SiteConfig
from holdfast.spark.host import SparkHost
from holdfast.spark.session import hosting_session

APPS_S_MAX = 180.0
SLOTS_SPARE = 4
"""A site that was killed or stopped leaves its slot later than the next one wants it."""

MISSING = {
    "namespaces": "Spark's daemon forks all Python workers into its own network namespace",
    "executors": "all sites are tasks of one local executor; tests/spark/test_clusters.py has more",
}


class ChaosSpark(SparkHost):
    """Spark tasks whose connections can be tampered with."""

    def __init__(self, spark: Any, flow: Flow, sites: int, proxy: Proxy) -> None:
        super().__init__(spark, plan(flow), sites)
        self.exits = Exits(proxy)
        self._proxy = proxy

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None:
        super().launch(flow, detoured(config, self._proxy), self.exits.noting(on_exit))


@contextmanager
def session(sites: int) -> Iterator[Any]:
    """An application of our own, which does not tell of every task that fails."""
    spark = hosting_session("holdfast chaos", sites + SLOTS_SPARE, **{"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("OFF")
    try:
        yield spark
    finally:
        spark.stop()


def kill_drivers(folder: str, count: int, first: int) -> tuple[int, list[Done]]:
    """Host the flow in two applications and kill the leading one, `count` times, each when the
    last is back; how many rows went in, and what was done."""
    file = Path(folder, "flow.py")
    file.write_text(f"from holdfast.chaos import load\n\nflow = load.flow({folder!r})\n")
    done = []
    with Apps(str(file), apps=2, sites=load.SITES) as apps:
        for number in range(first, first + count):
            _until_protected(apps)
            kill = kill_driver(apps)
            fault = Fault(number, DRIVER, 0, 0.0, 0.0, False)
            done.append(Done(fault, DRIVER, (), (), kill.at, False, None, kill.protected_at))
        rows = load.source(folder).end()
        if not apps.ended(PATIENCE_S):
            raise HostError(f"the flow has not drained within {PATIENCE_S:.0f} s: {apps.status()}")
        apps.wait()
    return rows, done


def _until_protected(apps: Apps) -> None:
    deadline = time.monotonic() + APPS_S_MAX
    while not apps.protected:
        if apps.ended(0.05):
            apps.wait()
            raise HostError("the flow has ended before its time")
        if time.monotonic() > deadline:
            raise HostError(f"not protected within {APPS_S_MAX:.0f} s: {apps.status()['view']}")
