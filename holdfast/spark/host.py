"""Runs sites as Spark tasks: every site is a long-lived job with one task.

Every launch of a site is a separate job, so that the loss of one site never cancels another, and
Spark's limit on task failures never applies. When a site dies, the controller launches a
replacement; for the same reason a task that Spark itself retries returns immediately.

The controller launches sites while the flow runs and competes for processor time. The jobs
therefore use RDDs, which need no query planner, and their workers come from a daemon that has
everything loaded (see `holdfast.spark.daemon`).
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pyspark import InheritableThread, TaskContext
from pyspark.sql import SparkSession

from holdfast.api.graph import Flow
from holdfast.errors import HostError
from holdfast.plan.planner import Plan
from holdfast.site.config import OnExit, SiteConfig
from holdfast.site.runtime import run_site
from holdfast.spark.session import cause, use_this_python

EXECUTORS_S_MAX = 20.0
TAKE_OVER_S = 0.3
"""Delay between the death of a site and the launch of the next one. During it the surviving
replicas take over, and Spark handles the failed task."""

UNFIT = {
    "spark.speculation": "a speculative attempt at a site's task would be a second site",
    "spark.dynamicAllocation.enabled": "Spark would add and remove executors under the sites",
    "spark.excludeOnFailure.enabled": "an executor that lost a site could not host it again",
    "spark.python.worker.killOnIdleTimeout": "Spark would kill sites, which never send it any data",
}


class SparkHost:
    """Launches sites on the executors of a Spark session."""

    name = "spark"

    def __init__(self, spark: Any, plan: Plan, sites: int) -> None:
        if not isinstance(spark, SparkSession) or not hasattr(spark, "_jsparkSession"):
            raise HostError(
                f"{type(spark).__module__}.{type(spark).__name__} is not a classic SparkSession: "
                "Spark Connect cannot host sites, because a Connect client is not in the cluster's "
                "network and cannot see its task slots",
                hint="start it from a driver: spark-submit, or SparkSession.builder.master(...)",
            )
        use_this_python(spark)
        self._spark = spark
        self._context = spark.sparkContext
        self._group = f"holdfast-{plan.flow}-{id(self)}"
        self._flow_name = plan.flow
        self.application = self._context.applicationId
        self._local = self._context.master.startswith("local")
        self.listen_host = "127.0.0.1" if self._local else "0.0.0.0"
        self.advertise_host = self.listen_host if self._local else self._driver_host()
        self._threads: list[threading.Thread] = []
        self._sites, self._launched = sites, 0
        self._ending = threading.Event()
        self._refuse_unfit()
        sources = [s.source for s in plan.sources if s.source is not None]
        self._count_slots(sites, sum(s.pushed and not s.pulled for s in sources))

    def _driver_host(self) -> str:
        return str(self._context.getConf().get("spark.driver.host"))

    def _refuse_unfit(self) -> None:
        conf = self._context.getConf()
        for key, reason in UNFIT.items():
            if str(conf.get(key, "false")).lower() == "true":
                raise HostError(f"{key} is on: {reason}", hint=f"set {key}=false")

    def _count_slots(self, sites: int, push_readers: int) -> None:
        """Raise unless all sites, and one task for each push source, can run at the same time."""
        deadline = time.monotonic() + (0 if self._local_threads() else EXECUTORS_S_MAX)
        while (slots := self._slots()) < sites + push_readers and time.monotonic() < deadline:
            time.sleep(0.2)  # executors register one by one after the session has started
        if slots < sites + push_readers:
            raise HostError(
                f"the flow needs {sites + push_readers} task slots ({sites} sites, {push_readers} "
                f"push sources) and Spark has {slots} (master {self._context.master})",
                hint="give Spark more cores, such as local[8], or start fewer sites",
            )

    def _local_threads(self) -> bool:
        return self._context.master.startswith("local") and "cluster" not in self._context.master

    def _slots(self) -> int:
        java = self._context._jsc.sc()
        profile = java.resourceProfileManager().defaultResourceProfile()
        return int(java.maxNumConcurrentTasks(profile))

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None:
        self._launched += 1
        pause = TAKE_OVER_S if self._launched > self._sites else 0.0
        thread = InheritableThread(
            target=self._run_job,
            args=(flow, config, on_exit, pause),
            daemon=True,
            name="holdfast-site",
        )
        self._threads = [t for t in self._threads if t.is_alive()] + [thread]
        thread.start()

    def _run_job(self, flow: Flow, config: SiteConfig, on_exit: OnExit, pause: float) -> None:
        if self._ending.wait(pause):
            return
        description = f"Holdfast flow {self._flow_name!r}: site {config.site}"
        reason = "its Spark job ended"
        try:
            self._context.setJobGroup(self._group, description, interruptOnCancel=True)
            one = self._context.parallelize([config.site], 1)
            one.foreachPartition(_site_task(flow, config))
        except Exception as error:
            reason = f"its Spark job failed: {cause(error)}"
        if not self._ending.is_set():
            on_exit(config.site, reason)

    def close(self) -> None:
        """Wait for the dismissed sites to end their jobs, then cancel the remaining ones."""
        self._ending.set()
        for thread in self._threads:
            thread.join(timeout=5)
        if any(t.is_alive() for t in self._threads) and self._context._jsc is not None:
            self._context.cancelJobGroup(self._group)


def _site_task(flow: Flow, config: SiteConfig) -> Callable[[Iterator[int]], None]:
    def task(numbers: Iterator[int]) -> None:
        for _ in numbers:
            pass  # Spark does not reuse a worker that has left input unread
        context = TaskContext.get()
        if context is not None and context.attemptNumber() > 0:
            return  # Spark's retry of a site that has died: the controller launches the next one
        run_site(flow, replace(config, executor=_executor()))

    return task


def _executor() -> str:
    """Return the name of the executor's JVM: the parent of the daemon that forked this worker."""
    with open(f"/proc/{os.getppid()}/stat") as stat:
        return f"{os.uname().nodename}/jvm-{stat.read().rsplit(')', 1)[1].split()[1]}"
