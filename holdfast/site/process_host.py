"""Sites in plain subprocesses of this one: for quick tests, and for a machine without Spark."""

from __future__ import annotations

import subprocess
import sys
import threading

import cloudpickle

from holdfast.flow.graph import Flow
from holdfast.site.runtime import OnExit, SiteConfig


class ProcessHost:
    """Launches every site as ``python -m holdfast.site``, with the flow on its standard input."""

    name = "processes"
    application = "local"
    listen_host = "127.0.0.1"
    advertise_host = "127.0.0.1"

    def __init__(self) -> None:
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._closed = False
        self._lock = threading.Lock()

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None:
        with self._lock:
            if self._closed:
                return
            process = subprocess.Popen(self.command(config), stdin=subprocess.PIPE, close_fds=True)
            self._processes[config.site] = process
        assert process.stdin is not None
        try:
            process.stdin.write(cloudpickle.dumps((flow, config)))
            process.stdin.close()
        except BrokenPipeError:
            pass  # it died already; the watcher says so
        watcher = threading.Thread(
            target=self._watch, args=(process, config, on_exit), daemon=True, name="holdfast-watch"
        )
        watcher.start()

    def command(self, config: SiteConfig) -> list[str]:
        """What a site's process runs."""
        return [sys.executable, "-m", "holdfast.site"]

    def _watch(self, process: subprocess.Popen[bytes], config: SiteConfig, on_exit: OnExit) -> None:
        status = process.wait()
        if not self._closed:
            on_exit(config.site, f"process {process.pid} ended with status {status}")

    def close(self) -> None:
        """Wait a little for the sites to leave, then end those that did not."""
        with self._lock:
            self._closed = True
        for process in self._processes.values():
            try:
                process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
