"""``holdfast chaos``: set up, do it, compare, tell."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from rich.console import Console

from holdfast.api.options import Options
from holdfast.control.applications import Apps
from holdfast.control.run import start
from holdfast.errors import HoldfastError, HostError
from holdfast.lab.chaos import load, namespaces, zookeeper
from holdfast.lab.chaos.engine import PATIENCE_S, Chaos, Done
from holdfast.lab.chaos.faults import APPS_KINDS, KINDS, Kind, faults, in_turn
from holdfast.lab.chaos.hosts import ChaosHost, ChaosProcesses
from holdfast.lab.chaos.load import Load
from holdfast.lab.chaos.proxy import Proxy
from holdfast.lab.chaos.report import Outcome, gaps, show
from holdfast.lab.workloads.paced import read_log

LEASE_S = 1.0
SPARES = 1
FAULTS_PER_APPS_FAULT = 25
"""On Spark, how many faults are done to sites for one that is done to applications."""
MISSING = {"spilling": "nothing is spilled to disk yet"}


@dataclass(frozen=True, slots=True)
class Limits:
    """How many faults, or for how long."""

    count: int | None = None
    minutes: float | None = None

    @property
    def until(self) -> float:
        return time.monotonic() + self.minutes * 60 if self.minutes else float("inf")

    @property
    def apart(self) -> Limits:
        """How many of those that take two applications are done after the others."""
        return Limits(max(1, (self.count or 0) // FAULTS_PER_APPS_FAULT))


def chaos(
    *,
    count: int | None = None,
    minutes: float | None = None,
    seed: int = 0,
    host: str = "process",
    apps: int = 1,
    protection: str = "pairs",
    flow: str | None = None,
    console: Console | None = None,
    verbose: bool = False,
) -> Outcome:
    """Do `count` faults, or as many as `minutes` allow; the outcome is printed, too."""
    console = console or Console()
    folder = tempfile.mkdtemp(prefix="holdfast-chaos-")
    outcome, limits = Outcome(seed, host, Load.of(protection, flow)), Limits(count, minutes)
    begun, listener = time.monotonic(), console if verbose else None
    try:
        if apps > 1:
            _in_apps(outcome, folder, limits, listener)
        elif host == "spark":
            _on_spark(outcome, folder, limits, listener)
            _in_apps(outcome, tempfile.mkdtemp(dir=folder), limits.apart, listener)
        else:
            _on_processes(outcome, folder, limits, listener)
    except HoldfastError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.seconds = time.monotonic() - begun
    outcome.gaps_ms += [0.0] * (len(outcome.done) - len(outcome.gaps_ms))
    show(outcome, console)
    return outcome


def _on_processes(
    outcome: Outcome, folder: str, limits: Limits, console: Console | None = None
) -> None:
    missing = {"executors": "plain processes have none; --host spark has"}
    with _network() as (network, why), _proxy(network) as proxy:
        kinds = _kinds(KINDS, missing | ({"namespaces": why} if why else {}), outcome)
        host = ChaosProcesses(proxy, network)
        _to_sites(outcome, folder, limits, kinds, host, proxy, network, console)


def _on_spark(
    outcome: Outcome, folder: str, limits: Limits, console: Console | None = None
) -> None:
    """Faults to the sites of one application, and to its executors."""
    from holdfast.lab.chaos import spark

    kinds = _kinds(KINDS, spark.MISSING, outcome)
    sites = load.SITES + SPARES
    with spark.session(sites) as session, _proxy(None) as proxy:
        host = spark.ChaosSpark(session, outcome.load.flow(folder), sites, proxy)
        _to_sites(outcome, folder, limits, kinds, host, proxy, None, console)


def _in_apps(outcome: Outcome, folder: str, limits: Limits, console: Console | None = None) -> None:
    """Faults to a flow in two applications, and to their arbiter."""
    from holdfast.lab.chaos.apps import AppsChaos

    why = zookeeper.unavailable()
    kinds = _kinds(APPS_KINDS, {"zookeeper": why} if why else {}, outcome)
    chosen = in_turn(outcome.seed, kinds, len(outcome.done))
    with _server(folder, why) as server, _apps(outcome, folder, server) as apps:
        works = AppsChaos(apps, server, folder, LEASE_S, console)
        try:
            works.run(islice(chosen, limits.count), limits.until)
        finally:
            outcome.done = outcome.done + works.done
            outcome.unexpected |= works.unexpected()
        rows = outcome.load.source(folder).end()
        if not apps.ended(PATIENCE_S):
            raise HostError(f"the flow has not drained within {PATIENCE_S:.0f} s: {apps.status()}")
        apps.wait()
    _judge(outcome, folder, rows, works.done, {})


def _apps(outcome: Outcome, folder: str, server: zookeeper.Server | None) -> Apps:
    file = Path(folder, "flow.py")
    of_it = f"{outcome.load!r}.flow({folder!r})"
    file.write_text(f"from holdfast.lab.chaos.load import Load\n\nflow = {of_it}\n")
    return Apps(
        str(file),
        apps=2,
        sites=load.SITES,
        host=outcome.host,
        arbiter=server.url if server else None,
        options=Options(partitions=16, lease=LEASE_S),
    )


def _to_sites(
    outcome: Outcome,
    folder: str,
    limits: Limits,
    kinds: Sequence[Kind],
    host: ChaosHost,
    proxy: Proxy,
    network: namespaces.Network | None,
    console: Console | None,
) -> None:
    """The faults that happen to sites of one run, and what came of them."""
    options = Options(sites=load.SITES, spares=SPARES, partitions=16, lease=LEASE_S)
    rebuilt, flow = outcome.load.rebuilt(), outcome.load.flow(folder)
    with start(flow, options=options, host=host, route=proxy.route) as run:
        works = Chaos(run, LEASE_S, proxy, network, host.exits.at, rebuilt, console)
        outcome.done = works.done
        try:
            works.run(islice(faults(outcome.seed, kinds), limits.count), limits.until)
        finally:
            outcome.unexpected = works.unexpected()
            outcome.fenced, outcome.left = len(works.fenced()), len(works.gone_by_themselves())
        rows = outcome.load.source(folder).end()
        if not run.wait(PATIENCE_S):
            raise HostError(f"the flow has not drained within {PATIENCE_S:.0f} s: {run.status()}")
    _judge(outcome, folder, rows, works.done, host.exits.at)


def _judge(
    outcome: Outcome, folder: str, rows: int, done: list[Done], exits: dict[int, float]
) -> None:
    lines = read_log(load.log_path(folder))
    absences = [
        load.Absence(pid, d.at, exits.get(site, float("inf")))
        for d in done
        for site, pid in zip(d.victims, d.pids, strict=True)
        if site in d.dead and d.kind.lasts[1]
    ]
    outcome.rows_in += rows
    outcome.verdicts.append(load.judge(lines, outcome.load.oracle(rows), absences))
    usual, found = gaps(lines, done)
    outcome.usual_ms = outcome.usual_ms or usual
    outcome.gaps_ms += found


@contextmanager
def _network() -> Iterator[tuple[namespaces.Network | None, str | None]]:
    """Namespaces for the sites, or why there are none."""
    why = namespaces.unavailable()
    if why is not None:
        yield None, why
        return
    network = namespaces.Network()
    try:
        yield network, None
    finally:
        network.close()


@contextmanager
def _server(folder: str, why: str | None) -> Iterator[zookeeper.Server | None]:
    """A ZooKeeper server, unless there is a reason why there is none."""
    if why is not None:
        yield None
        return
    server = zookeeper.Server(Path(tempfile.mkdtemp(dir=folder)))
    server.start()
    try:
        yield server
    finally:
        server.kill()


@contextmanager
def _proxy(network: namespaces.Network | None) -> Iterator[Proxy]:
    proxy = Proxy(network.address if network else "127.0.0.1")
    try:
        yield proxy
    finally:
        proxy.close()


def _kinds(kinds: Sequence[Kind], missing: Mapping[str, str], outcome: Outcome) -> list[Kind]:
    """Those that can be done; the others are noted as left out."""
    missing = MISSING | dict(missing)
    outcome.left_out |= {k.name: missing[k.needs] for k in kinds if k.needs in missing}
    return [k for k in kinds if k.needs not in missing]
