"""Sites in plain processes on this machine, for quick tests and for use without Spark."""

from __future__ import annotations

import threading
from functools import partial

from holdfast.api.graph import Flow
from holdfast.hosts.fork_server import Child, Work, shared
from holdfast.site.config import OnExit, SiteConfig
from holdfast.site.runtime import run_site


class ProcessHost:
    """Launches every site in its own process, forked from the fork server."""

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
        """Return the function that a site's process runs."""
        return partial(run_site, flow, config)

    def _ended(self, site: int, on_exit: OnExit, pid: int, status: int) -> None:
        with self._lock:
            child = self._processes.get(site)
            if child is not None and child.pid == pid:
                del self._processes[site]
        if not self._closed:
            on_exit(site, f"process {pid} ended with status {status}")

    def close(self) -> None:
        """Wait up to 5 s for each site to leave, then kill those that did not."""
        with self._lock:
            self._closed = True
            children = list(self._processes.values())
        for child in children:
            if child.wait(timeout=5) is None:
                child.kill()
                child.wait()
