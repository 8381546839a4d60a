"""``holdfast chaos``: set up, do it, compare, tell."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import islice

from rich.console import Console

from holdfast.bench.paced import read_log
from holdfast.chaos import load
from holdfast.chaos.engine import PATIENCE_S, Chaos, Done
from holdfast.chaos.faults import KINDS, Kind, faults
from holdfast.chaos.hosts import ChaosProcesses
from holdfast.chaos.namespaces import Network, unavailable
from holdfast.chaos.proxy import Proxy
from holdfast.chaos.report import Outcome, gaps, show
from holdfast.errors import HoldfastError, HostError
from holdfast.flow.options import Options

LEASE_S = 1.0


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
    outcome = Outcome(seed, host)
    begun = time.monotonic()
    try:
        _on_processes(outcome, folder, count, minutes, console if verbose else None)
    except HoldfastError as error:
        outcome.error = f"{type(error).__name__}: {error}"
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    outcome.seconds = time.monotonic() - begun
    outcome.gaps_ms += [0.0] * (len(outcome.done) - len(outcome.gaps_ms))
    show(outcome, console)
    return outcome


def _on_processes(
    outcome: Outcome,
    folder: str,
    count: int | None,
    minutes: float | None,
    console: Console | None,
) -> None:
    with ExitStack() as stack:
        network, why = stack.enter_context(_network())
        kinds = _kinds({"namespaces": why} if why else {}, outcome)
        proxy = Proxy(network.address if network else "127.0.0.1")
        stack.callback(proxy.close)
        host = ChaosProcesses(proxy, network)
        run = stack.enter_context(
            load.flow(folder).start(
                sites=load.SITES,
                standbys=1,
                partitions=16,
                host=host,
                options=Options(lease_s=LEASE_S),
                route=proxy.route,
            )
        )
        works = Chaos(run, LEASE_S, proxy, network, host.exits.at, console)
        outcome.done = works.done
        until = time.monotonic() + minutes * 60 if minutes else float("inf")
        try:
            works.run(islice(faults(outcome.seed, kinds), count), until)
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
    outcome.usual_ms, found = gaps(lines, done)
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


def _kinds(missing: dict[str, str], outcome: Outcome) -> list[Kind]:
    """Those that can be done; the others are noted as left out."""
    outcome.left_out |= {k.name: missing[k.needs] for k in KINDS if k.needs in missing}
    return [k for k in KINDS if k.needs not in missing]
