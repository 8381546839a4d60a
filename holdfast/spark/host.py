"""Sites as Spark tasks: every site is a long-lived job of one task.

Each life of a site is a job of its own, so that the loss of one never cancels another, and so that
Spark's limit on a task's failures never applies: when a site dies it is the controller that has it
launched again. A task that Spark itself retries ends at once, for the same reason.

Sites are launched while a flow runs and its rows wait for processor time. So the jobs are made of
RDDs, which need no query planner, and a few Python workers are kept idle that have everything
loaded: Spark gives them to the next tasks.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from pyspark import InheritableThread, TaskContext
from pyspark.sql import SparkSession

from holdfast.errors import HostError
from holdfast.flow.graph import Flow
from holdfast.flow.plan import Plan
from holdfast.site.runtime import OnExit, SiteConfig, run_site
from holdfast.spark.session import cause, use_this_python

log = logging.getLogger("holdfast.spark")

EXECUTORS_S_MAX = 20.0
IDLE_WORKERS = 3
"""After the death of a site one is for Spark's retry, and one for the site that comes next."""
RENEW_S = 3.0
"""How long after a death another idle worker is made: when the flow has recovered."""

LOAD_S = 0.1
NICE = 10

UNFIT = {
    "spark.speculation": "a second attempt at a site's task would be a second site",
    "spark.dynamicAllocation.enabled": "executors come and go under the sites",
    "spark.excludeOnFailure.enabled": "an executor that lost a site could not host it again",
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
        self._closed = False
        self._group = f"holdfast-{plan.flow}-{id(self)}"
        self._flow_name = plan.flow
        self.application = self._context.applicationId
        self._local = self._context.master.startswith("local")
        self.listen_host = "127.0.0.1" if self._local else "0.0.0.0"
        self.advertise_host = self.listen_host if self._local else self._driver_host()
        self._threads: list[threading.Thread] = []
        self._ending = threading.Event()
        self._refuse_unfit()
        needed = sites + sum(1 for s in plan.sources if s.source and s.source.fed)
        self._idle_workers = min(IDLE_WORKERS, self._count_slots(sites, needed) - needed)
        self._start(self._load_workers)

    def _driver_host(self) -> str:
        return str(self._context.getConf().get("spark.driver.host"))

    def _refuse_unfit(self) -> None:
        conf = self._context.getConf()
        for key, reason in UNFIT.items():
            if str(conf.get(key, "false")).lower() == "true":
                raise HostError(f"{key} is on: {reason}", hint=f"set {key}=false")

    def _count_slots(self, sites: int, needed: int) -> int:
        """Refuse if not all sites, and a task for each source that Spark feeds, can run at once."""
        deadline = time.monotonic() + (0 if self._local_threads() else EXECUTORS_S_MAX)
        while (slots := self._slots()) < needed and time.monotonic() < deadline:
            time.sleep(0.2)  # executors register one by one after the session has started
        if slots < needed:
            raise HostError(
                f"the flow needs {needed} task slots ({sites} sites, {needed - sites} for the "
                f"queries that feed it) and Spark has {slots} (master {self._context.master})",
                hint="give Spark more cores, such as local[8], or start fewer sites",
            )
        return slots

    def _local_threads(self) -> bool:
        return self._context.master.startswith("local") and "cluster" not in self._context.master

    def _slots(self) -> int:
        java = self._context._jsc.sc()
        profile = java.resourceProfileManager().defaultResourceProfile()
        return int(java.maxNumConcurrentTasks(profile))

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None:
        self._start(self._run_job, flow, config, on_exit)

    def _start(self, target: Callable[..., None], *args: Any) -> None:
        thread = InheritableThread(target=target, args=args, daemon=True, name="holdfast-site")
        self._threads.append(thread)
        thread.start()

    def _run_job(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None:
        reason = "its Spark job ended"
        try:
            self._describe(f"site {config.site}")
            one = self._context.parallelize([config.site], 1)
            left = one.mapPartitions(_site_task(flow, config)).collect()
        except Exception as error:
            left, reason = [], f"its Spark job failed: {cause(error)}"
        if self._closed:
            return
        on_exit(config.site, reason)
        if not left and not self._ending.wait(RENEW_S):
            self._load_workers()

    def _load_workers(self) -> None:
        """Have enough workers that have everything loaded and wait for a task: those there are,
        and as many new ones as it takes to run so many tasks at once."""
        count = self._idle_workers
        if count < 1:
            return
        self._describe("loads workers")
        try:
            self._context.parallelize(range(count), count).foreachPartition(_loader())
        except Exception as error:
            log.info("workers are not loaded in advance: %s", cause(error))

    def _describe(self, what: str) -> None:
        description = f"Holdfast flow {self._flow_name!r}: {what}"
        self._context.setJobGroup(self._group, description, interruptOnCancel=True)

    def close(self) -> None:
        """Let the dismissed sites end their jobs; cancel those that do not."""
        self._closed = True
        self._ending.set()
        for thread in self._threads:
            thread.join(timeout=5)
        if any(t.is_alive() for t in self._threads) and self._context._jsc is not None:
            self._context.cancelJobGroup(self._group)


def _site_task(flow: Flow, config: SiteConfig) -> Callable[[Iterator[int]], Iterator[int]]:
    """A task that lives as long as the site, and returns its number if it left in peace."""

    def task(numbers: Iterator[int]) -> Iterator[int]:
        _exhaust(numbers)
        context = TaskContext.get()
        if context is not None and context.attemptNumber() > 0:
            return  # Spark's retry of a life that is over: the controller launches the next
        run_site(flow, replace(config, executor=_executor()))
        yield config.site

    return task


def _loader() -> Callable[[Iterator[int]], None]:
    """A task after which its worker has loaded all that a site needs.

    It is a function within a function, so that it is sent as code: sent as a name, it would load
    this module before it runs. It loads in a thread of low rank, because the flow
    that may be running here has more urgent things to do; a thread's rank ends with the thread.
    """

    def load(numbers: Iterator[int]) -> None:
        def gently() -> None:
            if sys.platform == "linux":
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
            importlib.import_module("holdfast.spark.host")
            importlib.import_module("pyarrow").array([0])  # only now it imports pandas

        import importlib
        import os
        import sys
        import threading
        import time

        for _ in numbers:
            pass
        thread = threading.Thread(target=gently)
        thread.start()
        thread.join()
        time.sleep(LOAD_S)  # so that other tasks go to other workers

    return load


def _exhaust(numbers: Iterator[int]) -> None:
    """Spark does not use a worker again that has left input unread."""
    for _ in numbers:
        pass


def _executor() -> str:
    """The executor's JVM: the parent of the daemon that forked this worker."""
    with open(f"/proc/{os.getppid()}/stat") as stat:
        return f"{os.uname().nodename}/jvm-{stat.read().rsplit(')', 1)[1].split()[1]}"
