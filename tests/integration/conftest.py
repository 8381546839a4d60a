"""A ZooKeeper server of our own, from Debian's package, on a free port of the loopback."""

import signal
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

JAR = Path("/usr/share/java/zookeeper.jar")


class Server:
    """Short ticks, so that sessions may be short: from 0.4 to 4 s."""

    def __init__(self, directory: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self.config = directory / "zoo.cfg"
        self.config.write_text(
            f"tickTime=200\ndataDir={directory / 'data'}\nclientPort={self.port}\n"
            "clientPortAddress=127.0.0.1\nadmin.enableServer=false\nmaxClientCnxns=0\n"
        )
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        main = "org.apache.zookeeper.server.ZooKeeperServerMain"
        self._process = subprocess.Popen(
            # Without syncing: the server survives no power cut, and waits for no busy disk.
            ["java", "-Xmx128m", "-Dzookeeper.forceSync=no", "-cp", JAR, main, self.config],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        deadline = time.monotonic() + 30
        while not self._answers():
            assert self._process.poll() is None, "the ZooKeeper server ended"
            assert time.monotonic() < deadline, "the ZooKeeper server does not start"
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


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    if not JAR.exists():
        pytest.fail("ZooKeeper is not installed: say make test-integration")
    server = Server(tmp_path_factory.mktemp("zookeeper"))
    server.start()
    yield server
    server.kill()
