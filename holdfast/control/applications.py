"""Runs one flow in several applications on this machine, so that it outlives any of them.

Every application is a process with its own Spark driver, and holds one replica of every partition.
Applications connect to each other at fixed ports, and an arbiter decides which one leads: by
default a directory, which is enough on one host. `Apps` starts the applications, restarts those
that die, and reads what the leading one reports. It is not part of the flow: without it data still
flows.

Across hosts each application is started separately, under a service manager that restarts it, with
``holdfast run FLOW.py --app N --controls HOST:PORT,HOST:PORT --arbiter zk://...``.
"""

from __future__ import annotations

import logging
import os
import pickle
import secrets
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from holdfast.api.options import Http, Options
from holdfast.control.hosting import Place
from holdfast.errors import FlowError, HoldfastError, HostError
from holdfast.log_limit import LimitedLog
from holdfast.storage.temporary import TemporaryFolder

if TYPE_CHECKING:
    from holdfast.control.run import Run
    from holdfast.ui.web import Web

log = logging.getLogger("holdfast.apps")
limited = LimitedLog(log)

STATUS_S = 0.25
"""How often an application writes its status."""
SECRET = "secret"
"""The file with the flow's secret, once it was replaced. Only the user can read it."""
START_S_MAX = 180.0
SHORT_LIFE_S = 10.0
"""An application that ends sooner than this has a short life."""
SHORT_LIVES_MAX = 5
"""After this many short lives in a row the flow has failed."""
BACKOFF_S = (0.0, 1.0, 2.0, 5.0)
"""The wait before a restart, by the number of short lives; the last value repeats."""


@dataclass(frozen=True)
class AppConfig:
    """The configuration of an application; its process reads it from standard input."""

    file: str
    place: Place
    secret: bytes
    host: str
    master: str | None
    sites: int
    spares: int
    options: Options
    status: str
    http: str | Http | None = None


class Apps:
    """A flow file run by `apps` applications. It has the methods of a `Run` for watching a flow.

    With `http` ("host:port") each application serves the flow's metrics: the first at that port,
    the second at the next, and so on.
    """

    def __init__(
        self,
        file: str,
        *,
        apps: int = 2,
        sites: int = 4,
        spares: int = 0,
        host: str = "spark",
        master: str | None = None,
        arbiter: str | None = None,
        options: Options | None = None,
        http: str | Http | None = None,
    ) -> None:
        if apps < 2 or sites < apps:
            raise FlowError(f"{apps} applications need at least as many sites, not {sites}")
        self._folder = TemporaryFolder("apps")
        self._directory = self._folder.path
        controls = tuple(("127.0.0.1", port) for port in free_ports(apps))
        url = arbiter or f"file:{self._directory / 'arbiter'}"
        secret = secrets.token_bytes(32)
        self.configs = [
            AppConfig(
                os.path.abspath(file),
                Place(app, controls, url),
                secret,
                host,
                master,
                sites,
                spares,
                options or Options(),
                str(self._directory / f"status-{app}.json"),
                http_of(http, app),
            )
            for app in range(apps)
        ]
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.lives = dict.fromkeys(range(apps), 0)
        self.error: Exception | None = None
        self._last_status: dict[str, Any] = {
            "state": "gathering",
            "view": None,
            "rows_in": 0,
            "sites": [],
            "partitions": [],
        }
        self._over = threading.Event()
        self._threads = [
            threading.Thread(target=self._supervise, args=(c,), daemon=True) for c in self.configs
        ]
        for thread in self._threads:
            thread.start()

    def _supervise(self, config: AppConfig) -> None:
        """Keep one application running until the flow has ended."""
        short = 0
        while not self._over.is_set():
            begun = time.monotonic()
            with open(self._log(config.place.app), "ab") as output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "holdfast.control.applications"],
                    stdin=subprocess.PIPE,
                    stderr=output,
                    start_new_session=True,
                    # The folder may hold the arbiter: it stays as long as an application lives,
                    # also without this process.
                    pass_fds=[self._folder.lock],
                )
            self.processes[config.place.app] = process
            self.lives[config.place.app] += 1
            assert process.stdin is not None
            process.stdin.write(pickle.dumps(replace(config, secret=self._secret(config))))
            process.stdin.close()
            code = process.wait()
            if code == 0 or (self._over.is_set() and code != FAILED):
                self._over.set()
                return
            short = short + 1 if time.monotonic() - begun < SHORT_LIFE_S else 0
            log.warning("application %s ended with status %s", config.place.app, code)
            if code == FAILED or short >= SHORT_LIVES_MAX:
                self.error = self._failure(config.place.app, code)
                self._over.set()
                return
            self._over.wait(BACKOFF_S[min(short, len(BACKOFF_S) - 1)])

    def _secret(self, config: AppConfig) -> bytes:
        """The flow's secret, which may have been replaced since this application was started."""
        try:
            return (self._directory / SECRET).read_bytes()
        except FileNotFoundError:
            return config.secret

    def _log(self, app: int) -> Path:
        return self._directory / f"application-{app}.log"

    def _failure(self, app: int, code: int) -> HostError:
        error = self._reports().get(app, {}).get("error")
        last = self._log(app).read_text(errors="replace").splitlines()[-15:]
        return HostError(
            error or f"application {app} ended with status {code}",
            hint="the end of its log: " + "\n    ".join(last),
        )

    def _reports(self) -> dict[int, dict[str, Any]]:
        found = {}
        for config in self.configs:
            try:
                found[config.place.app] = msgspec.json.decode(Path(config.status).read_bytes())
            except (OSError, msgspec.MsgspecError):
                continue
        return found

    def status(self) -> dict[str, Any]:
        """The last status of the leading application. An application that was suspended may report
        once more that it leads, before it learns that it does not: the later term is right."""
        reports = self._reports().values()
        leading = [r for r in reports if r["state"] != "following"]
        self._last_status = max(
            leading, key=lambda r: (r["term"], r["time"]), default=self._last_status
        )
        return self._last_status

    @property
    def leader(self) -> int | None:
        """The application that leads, by the last reports."""
        return self.status().get("app")

    @property
    def protected(self) -> bool:
        return bool(self.status().get("protected"))

    def ended(self, timeout: float | None = None) -> bool:
        """Whether the flow has ended, with or without an error; waits for `timeout` seconds at
        most."""
        return self._over.wait(timeout)

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flow has ended; raise its error."""
        ended = self._over.wait(timeout)
        if ended:
            for thread in self._threads:
                thread.join(30)
            if self.error is not None:
                raise self.error
        return ended

    def stop(self, *, drain: bool = True, timeout: float | None = 60.0) -> None:
        """End the flow, and all applications."""
        command = self._directory / ("drain" if drain else "stop")
        command.touch()
        self._over.wait(timeout)

    def rotate_secret(self, timeout: float = 60.0) -> None:
        """Replace the secret that the applications share: see `Run.rotate_secret`."""
        command = self._directory / "rotate"
        command.touch()
        deadline = time.monotonic() + timeout
        while command.exists():
            if self._over.is_set() or time.monotonic() > deadline:
                raise HostError("no application has replaced the secret", hint="try it again")
            time.sleep(STATUS_S / 5)

    def close(self) -> None:
        """End applications that still run, and remove files."""
        self._over.set()
        for process in self.processes.values():
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, 9)
                process.wait()
        self._folder.close()

    def __enter__(self) -> Apps:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._over.is_set():
            self.stop(drain=False)
        self.close()


FAILED = 3
"""The exit status if the flow itself has failed: a restart would not help."""


def run_app(config: AppConfig) -> int:
    """Run one application, and return its exit status."""
    from holdfast.control.run import start
    from holdfast.ui.flow_file import load_flow

    try:
        spark = _session(config) if config.host == "spark" else None
        run = start(
            load_flow(config.file, spark),
            spark,
            options=replace(
                config.options,
                sites=config.sites,
                spares=config.spares,
                start_timeout=START_S_MAX,
            ),
            place=config.place,
            secret=config.secret,
        )
        _attend(config, run)
        run.wait()
    except HoldfastError as error:
        print(error, file=sys.stderr)
        return FAILED
    return 0


def _attend(config: AppConfig, run: Run) -> None:
    """Report the flow's status and obey the supervisor, until the flow has ended."""
    commands = Path(config.status).parent
    draining = False
    while not run.ended(STATUS_S):
        if config.http is not None and run.web is None:
            run.web = _web(config.http, run)
        _write_status(config, run.status())
        if (commands / "stop").exists():
            run.stop(drain=False)
        elif (commands / "drain").exists() and not draining and run.state == "running":
            draining = True
            threading.Thread(target=run.stop, daemon=True).start()
        elif (commands / "rotate").exists() and run.state == "running":
            _rotate(run, commands)
    _write_status(config, run.status())


def _rotate(run: Run, commands: Path) -> None:
    """Replace the secret, and leave the new one for applications that are started later."""
    try:
        secret = run.rotate_secret()
    except HoldfastError as error:
        log.warning("%s; this is tried again", error)
        return
    hidden = commands / f"{SECRET}.tmp"
    hidden.touch(mode=0o600)
    hidden.write_text(secret)
    hidden.rename(commands / SECRET)
    (commands / "rotate").unlink()


def http_of(http: str | Http | None, app: int) -> str | Http | None:
    """Where an application is served over HTTP, if the first one is at `http`.

    >>> http_of("127.0.0.1:9090", 1)
    '127.0.0.1:9091'
    """
    if http is None:
        return None
    address = http.address if isinstance(http, Http) else http
    host, colon, port = address.rpartition(":")
    if not colon or not port.isdigit() or port == "0":
        raise FlowError(
            f"http={address!r} is no address that others can be counted from",
            hint="write http='127.0.0.1:9090': the second application is at port 9091",
        )
    own = f"{host}:{int(port) + app}"
    return replace(http, address=own) if isinstance(http, Http) else own


def _web(http: str | Http, run: Run) -> Web | None:
    """Serve the flow's status. If that fails, the flow runs on without it."""
    from holdfast.ui.web import Web

    try:
        return Web(run, http)
    except FlowError as error:
        limited.warning("http", "%s; this is tried again", error)
        return None


def _session(config: AppConfig) -> Any:
    from holdfast.spark.session import local_session, session

    name = f"holdfast application {config.place.app}"
    if config.master is not None:
        return session(name, config.master)
    return local_session(name, -(-(config.sites + config.spares) // config.place.apps) + 4)


def _write_status(config: AppConfig, status: dict[str, Any]) -> None:
    report = {**status, "app": config.place.app, "pid": os.getpid(), "time": time.time()}
    hidden = f"{config.status}.tmp"
    Path(hidden).write_bytes(msgspec.json.encode(report))
    os.replace(hidden, config.status)


def free_ports(count: int) -> list[int]:
    """Ports that are free on this machine. Another process may take them first."""
    probes = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [int(p.getsockname()[1]) for p in probes]
    for probe in probes:
        probe.close()
    return ports


if __name__ == "__main__":
    # A signal to the supervisor may reach this process as well. The supervisor ends it.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(name)s %(message)s")
    sys.exit(run_app(pickle.load(sys.stdin.buffer)))
