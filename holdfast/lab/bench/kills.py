"""Kills of sites and drivers under load, and the waiting before and after them."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from rich.console import Console

from holdfast.control.applications import Apps
from holdfast.errors import HostError
from holdfast.lab.bench.processes import tree
from holdfast.lab.workloads.paced import (
    WINDOW_S,
    Delivery,
    WatchedRun,
    gap_ms,
    p99_ms,
    read_latest,
)

PATIENCE_S = 120.0
TOO_BUSY_MS = 250.0
SETTLE_S_MAX = 10.0
CLOSED = ("protected", "not protected")
"""Phases of a task that has no recovery work left."""


def until(
    condition: Callable[[], bool],
    what: str,
    run: WatchedRun | None = None,
    every_s: float = 0.005,
) -> float:
    """Poll until `condition` holds, and return the seconds that took. Raise if the flow ends, or
    after `PATIENCE_S`."""
    begun = time.monotonic()
    while not condition():
        if run is not None and run.ended(0):
            run.wait()
            raise HostError(f"the flow has ended while the benchmark waited until {what}")
        if time.monotonic() - begun > PATIENCE_S:
            status = run.status() if run is not None else {}
            open_ = [p for p in status.get("partitions", []) if p["phase"] not in CLOSED]
            phases = [f"{p['stage']} {p['partitions']}: {p['phase']}" for p in open_]
            raise HostError(
                f"waited {PATIENCE_S:.0f} s in vain until {what}; "
                f"view {status.get('view')}; {'; '.join(phases) or 'everything is protected'}"
            )
        time.sleep(every_s)
    return time.monotonic() - begun


def settle(log: str) -> None:
    """Wait until the rows that the last kill delayed have been delivered, at most `SETTLE_S_MAX`: a
    gap measured against them would look small. On a machine that is too busy for the rate they
    never are."""
    deadline = time.monotonic() + SETTLE_S_MAX
    while time.monotonic() < deadline:
        since = time.time() - WINDOW_S
        if p99_ms([d for d in read_latest(log) if d.at >= since]) <= TOO_BUSY_MS:
            return
        time.sleep(0.2)


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill, and when everything was protected again."""

    what: str
    at: float
    protected_at: float

    @property
    def catchup_s(self) -> float:
        return self.protected_at - self.at


class Stalls:
    """The longest stall that any site has reported so far. It is kept here because a killed site's
    own report is lost."""

    def __init__(self) -> None:
        self.largest_ms = 0.0

    def update(self, run: WatchedRun) -> None:
        seen = [site["stall_ms"] for site in run.status()["sites"]]
        self.largest_ms = max([self.largest_ms, *seen])


def pause(run: WatchedRun, stalls: Stalls | None = None) -> None:
    """Let the flow run undisturbed for a random time, as the baseline of the next kill."""
    deadline = time.monotonic() + WINDOW_S + random.uniform(0.1, 1.1)
    while time.monotonic() < deadline:
        if run.ended(0.1):
            run.wait()
            raise HostError("the flow has ended too early")
        if stalls is not None:
            stalls.update(run)


def kill_site(run: WatchedRun, stalls: Stalls) -> Kill:
    status = run.status()
    site = random.choice([s for s in status["sites"] if s["site"] not in status["dead"]])
    at = time.time()
    os.kill(site["pid"], signal.SIGKILL)
    until(lambda: site["site"] in run.status()["dead"], "the site is known to be dead", run, 0.02)
    until(lambda: run.protected, "everything is protected", run)
    kill = Kill(f"site {site['site']}", at, time.time())
    stalls.update(run)
    return kill


def print_kill(console: Console, kill: Kill, deliveries: Sequence[Delivery]) -> None:
    """Print the preliminary figures of a kill; later rows may still enlarge its gap."""
    gap = gap_ms(deliveries, kill.at)
    console.print(f"  {kill.what}: gap {gap:.0f} ms, protected after {kill.catchup_s:.1f} s")


def kill_driver(apps: Apps) -> Kill:
    leader = apps.leader
    if leader is None:
        raise HostError("no application leads")
    lives, root = apps.lives[leader], apps.processes[leader].pid
    below = tree(root)
    # A site that was launched late and has no view may be unknown to the next leader: it holds
    # nothing, and no control will ever declare it dead.
    sites = [s for s in apps.status()["sites"] if s["view"] != "None"]
    killed = {s["site"] for s in sites if s["pid"] in below}

    def recovered() -> bool:
        # The next leader starts with the last leader's view, which also says "protected".
        status = apps.status()
        known = killed <= {int(site) for site in status["dead"]}
        # On a busy machine the killed application may already be restarted and lead again.
        back = status["time"] > at and apps.lives[leader] > lives
        return bool(known and back and status["protected"])

    at = kill_all(root)
    until(recovered, "the application is back and everything is protected", apps, 0.05)
    return Kill(f"application {leader}", at, time.time())


def kill_all(root: int) -> float:
    """Kill a driver with all its processes, and return the time. These are its process group, with
    the JVM, and the sites, which PySpark puts into another group."""
    descendants = tree(root)[1:]
    at = time.time()
    os.killpg(root, signal.SIGKILL)
    for pid in descendants:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return at
