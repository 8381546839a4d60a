"""Runs a ZooKeeper server from Debian's package on a free loopback port, so that tests can kill,
stop and restart it."""

from __future__ import annotations

import importlib.util
import shutil
import socket
import subprocess
from pathlib import Path

from holdfast.errors import HostError
from holdfast.lab.chaos.server_process import ServerProcess

JAR = Path("/usr/share/java/zookeeper.jar")
MAIN = "org.apache.zookeeper.server.ZooKeeperServerMain"


class ZooKeeperServer(ServerProcess):
    """One server process. Its short ticks permit short sessions: from 0.4 to 4 s."""

    def __init__(self, directory: Path) -> None:
        super().__init__()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._config = directory / "zoo.cfg"
        self._config.write_text(
            f"tickTime=200\ndataDir={directory / 'data'}\nclientPort={self.port}\n"
            "clientPortAddress=127.0.0.1\nadmin.enableServer=false\nmaxClientCnxns=0\n"
        )

    @property
    def url(self) -> str:
        return f"zk://127.0.0.1:{self.port}"

    def _launch(self) -> subprocess.Popen[bytes]:
        return subprocess.Popen(
            # Without syncing the server does not survive a power cut, and never waits for a disk.
            ["java", "-Xmx128m", "-Dzookeeper.forceSync=no", "-cp", JAR, MAIN, self._config],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )

    def _failure(self, what: str) -> HostError:
        return HostError(
            f"the ZooKeeper server at {self.url} {what}",
            hint=f"see the output of java -cp {JAR} {MAIN} {self._config}",
        )

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1) as connection:
                connection.sendall(b"srvr")
                return connection.recv(9) == b"Zookeeper"
        except OSError:
            return False


def unavailable() -> str | None:
    """Return the reason why no server can run here, or None."""
    if not JAR.exists() or shutil.which("java") is None:
        return f"ZooKeeper is not installed: there is no java, or no {JAR} (make test-integration)"
    if importlib.util.find_spec("kazoo") is None:
        return "kazoo is not installed: pip install 'holdfast[zookeeper]'"
    return None
