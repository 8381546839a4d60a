"""A PostgreSQL server of our own, from Debian's package, on a free port of the loopback: to be
ended without a word and started again."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import psycopg

from holdfast.errors import HostError
from holdfast.lab.chaos.server_process import ServerProcess

PROGRAMS = next(iter(sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)), Path())


class PostgresServer(ServerProcess):
    """Knows a superuser without a password, and the user ``app`` with one."""

    def __init__(self) -> None:
        super().__init__()
        with socket.create_server(("127.0.0.1", 0)) as probe:
            self.port = probe.getsockname()[1]
        self._home = Path(tempfile.mkdtemp(prefix="holdfast-postgres-"))
        # The server refuses to run as root.
        self._as: dict[str, Any] = {}
        if os.geteuid() == 0:
            shutil.chown(self._home, "postgres", "postgres")
            self._as = {"user": "postgres", "group": "postgres", "extra_groups": []}
        made = ["--no-sync", "--encoding=UTF8", "--locale=C", "--username=postgres", "--auth=trust"]
        subprocess.run(
            [PROGRAMS / "initdb", "-D", self._data, *made],
            check=True,
            cwd=self._home,
            stdout=subprocess.DEVNULL,
            **self._as,
        )
        (self._data / "pg_hba.conf").write_text(
            "host all app 127.0.0.1/32 scram-sha-256\nhost all all 127.0.0.1/32 trust\n"
        )

    @property
    def _data(self) -> Path:
        return self._home / "data"

    @property
    def dsn(self) -> str:
        return f"host=127.0.0.1 port={self.port} user=postgres dbname=postgres"

    def app_dsn(self, password: str) -> str:
        return f"host=127.0.0.1 port={self.port} user=app dbname=postgres password={password}"

    def _launch(self) -> subprocess.Popen[bytes]:
        settings = {
            "port": self.port,
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": "",
            "fsync": "off",  # it survives no power cut, and waits for no busy disk
        }
        given = [part for name, value in settings.items() for part in ("-c", f"{name}={value}")]
        return subprocess.Popen(
            [PROGRAMS / "postgres", "-D", self._data, *given],
            cwd=self._home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            **self._as,
        )

    def _failure(self, what: str) -> HostError:
        return HostError(f"the PostgreSQL server at port {self.port} {what}")

    def _answers(self) -> bool:
        try:
            psycopg.connect(self.dsn, connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True

    def crash(self) -> None:
        """End it at once; what was committed it knows when it starts again."""
        if self._process is not None:
            self._process.send_signal(signal.SIGQUIT)
            self._process.wait()

    def back_up(self) -> None:
        """Keep the data as they are now: as a standby has them that gets nothing from now on."""
        self.crash()
        subprocess.run(["cp", "-a", self._data, self._home / "copy"], check=True)
        self.start()

    def go_back(self) -> None:
        """While it does not run: to what was kept."""
        shutil.rmtree(self._data)
        (self._home / "copy").rename(self._data)
        (self._data / "postmaster.pid").unlink(missing_ok=True)

    def remove(self) -> None:
        self.crash()
        shutil.rmtree(self._home)
