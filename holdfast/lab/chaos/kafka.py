"""A Kafka broker of our own, from its published jars, on a free port of the loopback: to be
killed, stopped and started again."""

from __future__ import annotations

import base64
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

from holdfast.control.applications import free_ports
from holdfast.errors import HostError

JARS = Path(os.environ.get("HOLDFAST_KAFKA_JARS") or Path(sys.prefix, "kafka"))
"""Where `make test-integration` puts the jars."""
START_S_MAX = 60.0

_SETTINGS = """
process.roles=broker,controller
node.id=1
controller.quorum.voters=1@127.0.0.1:{controller}
listeners=PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller}
controller.listener.names=CONTROLLER
listener.security.protocol.map=PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT
log.dirs={data}
auto.create.topics.enable=false
delete.topic.enable=true
offsets.topic.num.partitions=2
offsets.topic.replication.factor=1
transaction.state.log.num.partitions=2
transaction.state.log.replication.factor=1
transaction.state.log.min.isr=1
group.initial.rebalance.delay.ms=0
broker.session.timeout.ms=2000
broker.heartbeat.interval.ms=500
log.cleaner.backoff.ms=200
log.retention.check.interval.ms=500
log.initial.task.delay.ms=500
"""


class Broker:
    """One process that is both broker and controller. What it was told before it was killed it
    knows when it is started again."""

    def __init__(self, directory: Path) -> None:
        self.port, controller = free_ports(2)
        self._directory = directory
        self._config = directory / "server.properties"
        self._config.write_text(
            _SETTINGS.format(port=self.port, controller=controller, data=directory / "data")
        )
        self._process: subprocess.Popen[bytes] | None = None
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        # Not as an argument of its own: it may begin with a dash.
        storage = ("format", f"--cluster-id={cluster}", "--config", self._config)
        if self._java("kafka.tools.StorageTool", *storage).wait() != 0:
            raise self._failure("cannot be set up")

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, and wait until it takes connections."""
        self._process = self._java("kafka.Kafka", self._config)
        deadline = time.monotonic() + START_S_MAX
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline:
                raise self._failure("does not start")
            time.sleep(0.05)

    def _failure(self, what: str) -> HostError:
        said = (self._directory / "said").read_text(errors="replace").splitlines()
        return HostError(
            f"the Kafka broker at {self.servers} {what}",
            hint="its last words: " + "\n    ".join(said[-15:]),
        )

    def _java(self, main: str, *arguments: object) -> subprocess.Popen[bytes]:
        command = ["java", "-Xmx400m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command += ["-cp", f"{JARS}/*", main, *map(str, arguments)]
        with open(self._directory / "said", "ab") as said:
            return subprocess.Popen(command, stdout=said, stderr=said)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
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
    """Why there can be no broker here, if so."""
    if not any(JARS.glob("kafka_*.jar")) or shutil.which("java") is None:
        return f"Kafka is not there: no java, or no jars in {JARS} (make test-integration)"
    if importlib.util.find_spec("confluent_kafka") is None:
        return "confluent-kafka is not installed: pip install 'holdfast[kafka]'"
    return None
