"""A server on a loopback port that tests can kill, stop and restart."""

from __future__ import annotations

import signal
import subprocess
import time

from holdfast.errors import HostError


class ServerProcess:
    """One process of a server. Its data survive a kill and restart."""

    start_s_max = 30.0

    def __init__(self) -> None:
        self._process: subprocess.Popen[bytes] | None = None

    # --- implemented by each server -----------------------------------------------------------

    def _launch(self) -> subprocess.Popen[bytes]:
        raise NotImplementedError

    def _answers(self) -> bool:
        """Whether the server can be used."""
        raise NotImplementedError

    def _failure(self, what: str) -> HostError:
        """Return the error of a server that `what`, with a hint."""
        raise NotImplementedError

    # ------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the server, and wait until it answers."""
        self._process = self._launch()
        deadline = time.monotonic() + self.start_s_max
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failure("did not start")
            time.sleep(0.05)

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
