"""Chaos on Spark: sites are tasks of an application that has one executor for each of them."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from holdfast.api.graph import Flow
from holdfast.lab.chaos.hosts import Exits, detoured
from holdfast.lab.chaos.proxy import Proxy
from holdfast.plan.planner import plan
from holdfast.site.config import OnExit, SiteConfig
from holdfast.spark.host import SparkHost
from holdfast.spark.session import cluster_session, executors_folder

MISSING = {
    "namespaces": "Spark's daemon forks all Python workers into its own network namespace",
}


class ChaosSpark(SparkHost):
    """Starts sites as Spark tasks whose connections pass through a proxy."""

    def __init__(self, spark: Any, flow: Flow, sites: int, proxy: Proxy) -> None:
        super().__init__(spark, plan(flow), sites)
        self.exits = Exits(proxy)
        self._proxy = proxy

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None:
        super().launch(flow, detoured(config, self._proxy), self.exits.recording(on_exit))


@contextmanager
def session(sites: int) -> Iterator[Any]:
    """Yield a separate application, which does not log failed tasks."""
    spark = cluster_session("holdfast chaos", sites, **{"spark.ui.enabled": "false"})
    spark.sparkContext.setLogLevel("OFF")
    folder = executors_folder(spark)
    try:
        yield spark
    finally:
        spark.stop()
        shutil.rmtree(folder, ignore_errors=True)
