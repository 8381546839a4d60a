"""Runs a Kafka broker from its published jars on a free loopback port, so that tests can kill,
stop and restart it."""

from __future__ import annotations

import base64
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path

from holdfast.control.applications import free_ports
from holdfast.errors import HostError
from holdfast.lab.chaos.server_process import ServerProcess

JARS = Path(os.environ.get("HOLDFAST_KAFKA_JARS") or Path(sys.prefix, "kafka"))
"""The folder into which `make test-integration` downloads the jars."""

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


class Broker(ServerProcess):
    """One process that is both broker and controller."""

    start_s_max = 60.0

    def __init__(self, directory: Path) -> None:
        super().__init__()
        self.port, controller = free_ports(2)
        self._directory = directory
        self._config = directory / "server.properties"
        self._config.write_text(
            _SETTINGS.format(port=self.port, controller=controller, data=directory / "data")
        )
        cluster = base64.urlsafe_b64encode(uuid.uuid4().bytes).rstrip(b"=").decode()
        # Not as a separate argument: the id may begin with a dash.
        storage = ("format", f"--cluster-id={cluster}", "--config", self._config)
        if self._java("kafka.tools.StorageTool", *storage).wait() != 0:
            raise self._failure("could not be set up")

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def _launch(self) -> subprocess.Popen[bytes]:
        return self._java("kafka.Kafka", self._config)

    def _failure(self, what: str) -> HostError:
        lines = (self._directory / "log").read_text(errors="replace").splitlines()
        return HostError(
            f"the Kafka broker at {self.servers} {what}",
            hint="the end of its log: " + "\n    ".join(lines[-15:]),
        )

    def _java(self, main: str, *arguments: object) -> subprocess.Popen[bytes]:
        command = ["java", "-Xmx400m", "-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        command += ["-cp", f"{JARS}/*", main, *map(str, arguments)]
        with open(self._directory / "log", "ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _answers(self) -> bool:
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=1):
                return True
        except OSError:
            return False


def unavailable() -> str | None:
    """Return the reason why no broker can run here, or None."""
    if not any(JARS.glob("kafka_*.jar")) or shutil.which("java") is None:
        return f"Kafka is not installed: no java, or no jars in {JARS} (make test-integration)"
    if importlib.util.find_spec("confluent_kafka") is None:
        return "confluent-kafka is not installed: pip install 'holdfast[kafka]'"
    return None
