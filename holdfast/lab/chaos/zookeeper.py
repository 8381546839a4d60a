"""Runs a ZooKeeper server from Debian's package on a free loopback port, so that tests can kill,
stop and restart it."""

from __future__ import annotations

import importlib.util
import shutil
import signal
import socket
import subprocess
import time
from pathlib import Path

from holdfast.errors import HostError

JAR = Path("/usr/share/java/zookeeper.jar")
START_S_MAX = 30.0


class Server:
    """One server process. Its short ticks permit short sessions: from 0.4 to 4 s."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._config = directory / "zoo.cfg"
        self._config.write_text(
            f"tickTime=200\ndataDir={directory / 'data'}\nclientPort={self.port}\n"
            "clientPortAddress=127.0.0.1\nadmin.enableServer=false\nmaxClientCnxns=0\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"zk://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start the server, and wait until it answers. Its data survive a kill and restart."""
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        self._process = subprocess.Popen(
            # Without syncing the server does not survive a power cut, and never waits for a disk.
            ["java", "-Xmx128m", "-Dzookeeper.forceSync=no", "-cp", JAR, main, self._config],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + START_S_MAX
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise HostError(
                    f"the ZooKeeper server at {self.url} did not start",
                    hint=f"see the output of java -cp {JAR} {main} {self._config}",
                )
            time.sleep(0.05)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"srvr")
                return connection.recv(9) == b"Zookeeper"
        except OSError:
            return False

    def signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()


def unavailable() -> str | None:
    """Return the reason why no server can run here, or None."""
    if not JAR.exists() or shutil.which("java") is None:
        return f"ZooKeeper is not installed: there is no java, or no {JAR} (make test-integration)"
    if importlib.util.find_spec("kazoo") is None:
        return "kazoo is not installed: pip install 'holdfast[zookeeper]'"
    return None
