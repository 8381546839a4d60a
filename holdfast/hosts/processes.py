"""Sites in plain subprocesses of this one: for quick tests, and for a machine without Spark."""

from __future__ import annotations

import threading
from functools import partial

from holdfast.api.graph import Flow
from holdfast.hosts.fork_server import Child, Work, shared
from holdfast.site.runtime import OnExit, SiteConfig, run_site


class ProcessHost:
    """Launches every site in a process of its own, forked from the fork server."""

    name = "processes"
    application = "local"
    listen_host = "127.0.0.1"
    advertise_host = "127.0.0.1"

    def __init__(self) -> None:
        self._processes: dict[int, Child] = {}
        self._closed = False
        self._lock = threading.Lock()

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None:
        with self._lock:
            if self._closed:
                return
            on_end = partial(self._ended, config.site, on_exit)
            self._processes[config.site] = shared.fork(self.work(flow, config), on_end)

    def work(self, flow: Flow, config: SiteConfig) -> Work:
        """What a site's process does."""
        return partial(run_site, flow, config)

    def _ended(self, site: int, on_exit: OnExit, pid: int, status: int) -> None:
        if not self._closed:
            on_exit(site, f"process {pid} ended with status {status}")

    def close(self) -> None:
        """Wait a little for the sites to leave, then end those that did not."""
        with self._lock:
            self._closed = True
        for born in self._processes.values():
            if born.wait(timeout=5) is None:
                born.kill()
                born.wait()
