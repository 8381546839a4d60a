"""``holdfast chaos``: set up, do it, compare, tell."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice

from rich.console import Console

from holdfast.bench.paced import read_log
from holdfast.chaos import load
from holdfast.chaos.engine import PATIENCE_S, Chaos, Done
from holdfast.chaos.faults import EXECUTOR, KINDS, Kind, faults
from holdfast.chaos.hosts import ChaosHost, ChaosProcesses
from holdfast.chaos.namespaces import Network, unavailable
from holdfast.chaos.proxy import Proxy
from holdfast.chaos.report import Outcome, gaps, show
from holdfast.errors import HoldfastError, HostError
from holdfast.flow.options import Options

LEASE_S = 1.0
STANDBYS = 1
FAULTS_PER_DRIVER_KILL = 25


@dataclass(frozen=True, slots=True)
class Limits:
    """How many faults, or for how long."""

    count: int | None = None
    minutes: float | None = None

    @property
    def until(self) -> float:
        return time.monotonic() + self.minutes * 60 if self.minutes else float("inf")

    @property
    def driver_kills(self) -> int:
        return max(1, (self.count or 0) // FAULTS_PER_DRIVER_KILL)


def chaos(
    *,
    count: int | None = None,
    minutes: float | None = None,
    seed: int = 0,
    host: str = "process",
    console: Console | None = None,
    verbose: bool = False,
) -> Outcome:
    """Do `count` faults, or as many as `minutes` allow; the outcome is printed, too."""
    console = console or Console()
    folder = tempfile.mkdtemp(prefix="holdfast-chaos-")
    outcome, limits = Outcome(seed, host), Limits(count, minutes)
    begun = time.monotonic()
    try:
        todo = _on_spark if host == "spark" else _on_processes
        todo(outcome, folder, limits, console if verbose else None)
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
    with _network() as (network, why), _proxy(network) as proxy:
        kinds = _kinds({"namespaces": why} if why else {}, outcome)
        host = ChaosProcesses(proxy, network)
        _to_sites(outcome, folder, limits, kinds, host, proxy, network, console)


def _on_spark(
    outcome: Outcome, folder: str, limits: Limits, console: Console | None = None
) -> None:
    """Faults to the sites of one application; then drivers of two are killed."""
    from holdfast.chaos import spark

    kinds = _kinds(spark.MISSING, outcome)
    sites = load.SITES + STANDBYS
    with spark.session(sites) as session, _proxy(None) as proxy:
        host = spark.ChaosSpark(session, load.flow(folder), sites, proxy)
        _to_sites(outcome, folder, limits, kinds, host, proxy, None, console)
    both = tempfile.mkdtemp(dir=folder)
    rows, done = spark.kill_drivers(both, limits.driver_kills, len(outcome.done))
    outcome.done = outcome.done + done
    _judge(outcome, both, rows, done, {})


def _to_sites(
    outcome: Outcome,
    folder: str,
    limits: Limits,
    kinds: Sequence[Kind],
    host: ChaosHost,
    proxy: Proxy,
    network: Network | None,
    console: Console | None,
) -> None:
    """The faults that happen to sites of one run, and what came of them."""
    options = Options(lease_s=LEASE_S)
    start = {"sites": load.SITES, "standbys": STANDBYS, "partitions": 16, "options": options}
    with load.flow(folder).start(host=host, route=proxy.route, **start) as run:
        works = Chaos(run, LEASE_S, proxy, network, host.exits.at, console)
        outcome.done = works.done
        try:
            works.run(islice(faults(outcome.seed, kinds), limits.count), limits.until)
        finally:
            outcome.unexpected = works.unexpected()
            outcome.fenced, outcome.left = len(works.fenced()), len(works.gone_by_themselves())
        rows = load.source(folder).end()
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
    outcome.verdicts.append(load.judge(lines, rows, absences))
    usual, found = gaps(lines, done)
    outcome.usual_ms = outcome.usual_ms or usual
    outcome.gaps_ms += found


@contextmanager
def _network() -> Iterator[tuple[Network | None, str | None]]:
    """Namespaces for the sites, or why there are none."""
    why = unavailable()
    if why is not None:
        yield None, why
        return
    network = Network()
    try:
        yield network, None
    finally:
        network.close()


@contextmanager
def _proxy(network: Network | None) -> Iterator[Proxy]:
    proxy = Proxy(network.address if network else "127.0.0.1")
    try:
        yield proxy
    finally:
        proxy.close()


def _kinds(missing: Mapping[str, str], outcome: Outcome) -> list[Kind]:
    """Those that can be done; the others are noted as left out."""
    outcome.left_out |= {k.name: missing[k.needs] for k in (*KINDS, EXECUTOR) if k.needs in missing}
    return [k for k in KINDS if k.needs not in missing]
