"""``holdfast chaos``: starts the flow, injects faults, checks the results, prints a report."""

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
from holdfast.lab.chaos.faults import APPS_KINDS, KINDS, FaultKind, faults, in_turn
from holdfast.lab.chaos.hosts import ChaosHost, ChaosProcesses
from holdfast.lab.chaos.load import Load
from holdfast.lab.chaos.proxy import Proxy
from holdfast.lab.chaos.report import ChaosOutcome, gaps, show
from holdfast.lab.workloads.paced import read_log

LEASE_S = 1.0
SPARES = 1
FAULTS_PER_APPS_FAULT = 25
"""On Spark, the number of faults in sites for each fault in applications."""
MISSING = {"spilling": "chaos does not inject disk faults"}


@dataclass(frozen=True, slots=True)
class Limits:
    """Number of faults, or duration of the run."""

    count: int | None = None
    minutes: float | None = None

    @property
    def until(self) -> float:
        return time.monotonic() + self.minutes * 60 if self.minutes else float("inf")

    @property
    def for_apps(self) -> Limits:
        """The limits of the faults in two applications that follow the others."""
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
) -> ChaosOutcome:
    """Inject `count` faults, or as many as `minutes` allow; print and return the outcome."""
    console = console or Console()
    folder = tempfile.mkdtemp(prefix="holdfast-chaos-")
    outcome, limits = ChaosOutcome(seed, host, Load.of(protection, flow)), Limits(count, minutes)
    begun, listener = time.monotonic(), console if verbose else None
    try:
        if apps > 1:
            _in_apps(outcome, folder, limits, listener)
        elif host == "spark":
            _on_spark(outcome, folder, limits, listener)
            _in_apps(outcome, tempfile.mkdtemp(dir=folder), limits.for_apps, listener)
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
    outcome: ChaosOutcome, folder: str, limits: Limits, console: Console | None = None
) -> None:
    missing = {"executors": "plain processes have no executors; use --host spark"}
    with _network() as (network, why), _proxy(network) as proxy:
        kinds = _kinds(KINDS, missing | ({"namespaces": why} if why else {}), outcome)
        host = ChaosProcesses(proxy, network)
        _to_sites(outcome, folder, limits, kinds, host, proxy, network, console)


def _on_spark(
    outcome: ChaosOutcome, folder: str, limits: Limits, console: Console | None = None
) -> None:
    """Inject faults into the sites of one application, and into its executors."""
    from holdfast.lab.chaos import spark

    kinds = _kinds(KINDS, spark.MISSING, outcome)
    sites = load.SITES + SPARES
    with spark.session(sites) as session, _proxy(None) as proxy:
        host = spark.ChaosSpark(session, outcome.load.flow(folder), sites, proxy)
        _to_sites(outcome, folder, limits, kinds, host, proxy, None, console)


def _in_apps(
    outcome: ChaosOutcome, folder: str, limits: Limits, console: Console | None = None
) -> None:
    """Inject faults into a flow in two applications, and into their arbiter."""
    from holdfast.lab.chaos.apps import AppsChaos

    why = zookeeper.unavailable()
    kinds = _kinds(APPS_KINDS, {"zookeeper": why} if why else {}, outcome)
    chosen = in_turn(outcome.seed, kinds, len(outcome.done))
    with _server(folder, why) as server, _apps(outcome, folder, server) as apps:
        engine = AppsChaos(apps, server, folder, LEASE_S, console)
        try:
            engine.run(islice(chosen, limits.count), limits.until)
        finally:
            outcome.done = outcome.done + engine.done
            outcome.unexpected |= engine.unexpected()
        rows = outcome.load.source(folder).end()
        if not apps.ended(PATIENCE_S):
            raise HostError(f"the flow has not drained within {PATIENCE_S:.0f} s: {apps.status()}")
        apps.wait()
    _judge(outcome, folder, rows, engine.done, {})


def _apps(outcome: ChaosOutcome, folder: str, server: zookeeper.ZooKeeperServer | None) -> Apps:
    file = Path(folder, "flow.py")
    flow = f"{outcome.load!r}.flow({folder!r})"
    file.write_text(f"from holdfast.lab.chaos.load import Load\n\nflow = {flow}\n")
    return Apps(
        str(file),
        apps=2,
        sites=load.SITES,
        host=outcome.host,
        arbiter=server.url if server else None,
        options=Options(partitions=16, lease=LEASE_S),
    )


def _to_sites(
    outcome: ChaosOutcome,
    folder: str,
    limits: Limits,
    kinds: Sequence[FaultKind],
    host: ChaosHost,
    proxy: Proxy,
    network: namespaces.Network | None,
    console: Console | None,
) -> None:
    """Inject faults into the sites of one run, and record their effects in `outcome`."""
    options = Options(sites=load.SITES, spares=SPARES, partitions=16, lease=LEASE_S)
    rebuilt, flow = outcome.load.rebuilt(), outcome.load.flow(folder)
    with start(flow, options=options, host=host, route=proxy.route) as run:
        engine = Chaos(run, LEASE_S, proxy, network, host.exits.at, rebuilt, console)
        outcome.done = engine.done
        try:
            engine.run(islice(faults(outcome.seed, kinds), limits.count), limits.until)
        finally:
            outcome.unexpected = engine.unexpected()
            outcome.fenced, outcome.left = len(engine.fenced()), len(engine.fenced_and_left())
        rows = outcome.load.source(folder).end()
        if not run.wait(PATIENCE_S):
            raise HostError(f"the flow has not drained within {PATIENCE_S:.0f} s: {run.status()}")
    _judge(outcome, folder, rows, engine.done, host.exits.at)


def _judge(
    outcome: ChaosOutcome, folder: str, rows: int, done: list[Done], exits: dict[int, float]
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
    usual, gaps_ms = gaps(lines, done)
    outcome.usual_ms = outcome.usual_ms or usual
    outcome.gaps_ms += gaps_ms


@contextmanager
def _network() -> Iterator[tuple[namespaces.Network | None, str | None]]:
    """Yield the network of the sites' namespaces, or the reason why there is none."""
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
def _server(folder: str, why: str | None) -> Iterator[zookeeper.ZooKeeperServer | None]:
    """Yield a running ZooKeeper server, or None if there is a reason `why` it cannot run."""
    if why is not None:
        yield None
        return
    server = zookeeper.ZooKeeperServer(Path(tempfile.mkdtemp(dir=folder)))
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


def _kinds(
    kinds: Sequence[FaultKind], missing: Mapping[str, str], outcome: ChaosOutcome
) -> list[FaultKind]:
    """Return the kinds that are possible here, and record the others as left out."""
    missing = MISSING | dict(missing)
    outcome.left_out |= {k.name: missing[k.needs] for k in kinds if k.needs in missing}
    return [k for k in kinds if k.needs not in missing]
