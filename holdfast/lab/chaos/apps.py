"""Chaos to a flow in two applications: to the one that leads, and to the arbiter of both.

The arbiter is a ZooKeeper server, if one is installed. While it is away data must flow and the
sites must act on the view that they have; when it is back, what happened meanwhile is mended.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from holdfast.control.applications import Apps
from holdfast.errors import HostError
from holdfast.lab.bench.failover import kill_driver
from holdfast.lab.bench.processes import tree
from holdfast.lab.chaos import load
from holdfast.lab.chaos.engine import TICK_S, Done, phases
from holdfast.lab.chaos.faults import ARBITER_SITE, ARBITER_STOP, DRIVER, Fault
from holdfast.lab.chaos.zookeeper import Server

PATIENCE_S = 180.0
"""So long a flow may take to begin or to be protected again: an application may have to start."""

REPORT_S = 1.0
"""What is known of sites is younger than that."""


class AppsChaos:
    """Faults to one flow in two applications, each when all is mended."""

    def __init__(
        self,
        apps: Apps,
        server: Server | None,
        folder: str,
        lease_s: float,
        console: Console | None = None,
    ) -> None:
        self.done: list[Done] = []
        self._apps, self._server, self._lease_s = apps, server, lease_s
        self._log, self._console = Path(load.log_path(folder)), console
        self._known: set[int] = set()
        self._killed: set[int] = set()

    def run(self, chosen: Iterable[Fault], until: float = float("inf")) -> None:
        """Do the faults, at most until then; at the end all is mended, or it is an error."""
        self._until(self._settled, "everything is protected at the beginning")
        for fault in chosen:
            if time.monotonic() > until:
                break
            self._pass(fault.pause_s)
            self._known |= {site["site"] for site in self._apps.status()["sites"]}
            if self._console is not None:
                self._console.print(f"  {fault}", highlight=False)
            self.done.append(self._do(fault))
            self._until(self._settled, f"all is mended after fault {fault}")

    def unexpected(self) -> dict[int, str]:
        """Sites that took part and were declared dead, and whose process nobody has killed."""
        dead = {int(s): why for s, why in self._apps.status().get("dead", {}).items()}
        return {s: why for s, why in dead.items() if s in self._known - self._killed}

    def _do(self, fault: Fault) -> Done:
        done = Done(fault, fault.kind, (), (), time.time(), False)
        if fault.kind is DRIVER:
            self._killed |= self._of_the_leader()
            kill = kill_driver(self._apps)
            done.at, done.recovered_at = kill.at, kill.protected_at
            return done
        if fault.kind is ARBITER_SITE:
            site = self._victim(fault)
            done.victims, done.pids = (site["site"],), (site["pid"],)
        self._without_arbiter(fault, done)
        self._until(lambda: self._knows(done.victims) and self._settled(), f"{fault} is mended")
        done.recovered_at, done.dead = time.time(), set(done.victims)
        return done

    # --- the arbiter is away --------------------------------------------------------------------

    def _without_arbiter(self, fault: Fault, done: Done) -> None:
        assert self._server is not None
        back = self._take_away(fault)
        done.at = time.time()
        try:
            self._pass(REPORT_S)  # until all that was committed before has been heard of
            views = self._views() | {"None"}  # a new site waits for its first
            for pid in done.pids:
                os.kill(pid, signal.SIGKILL)
            self._killed |= set(done.victims)
            self._pass(fault.lasts * self._lease_s)
            if not done.victims:  # with one, what it led waits for the next view
                self._until(self._more_results(), f"data flows during {fault}")
            others = self._views() - views
            if others:
                raise HostError(
                    f"fault {fault}: membership has changed without an arbiter: sites act on "
                    f"{'; '.join(sorted(others))}"
                )
        finally:
            back()
            done.healed_at = time.time()

    def _take_away(self, fault: Fault) -> Callable[[], None]:
        """Kill or stop the server; what brings it back."""
        server = self._server
        assert server is not None
        if fault.kind is ARBITER_STOP or (fault.kind is ARBITER_SITE and fault.rank % 2):
            server.signal(signal.SIGSTOP)
            return lambda: server.signal(signal.SIGCONT)
        server.kill()
        return server.start

    def _more_results(self) -> Callable[[], bool]:
        before = self._log.stat().st_size
        return lambda: self._log.stat().st_size > before

    # --- looking --------------------------------------------------------------------------------

    def _settled(self) -> bool:
        """All is protected, and all members have said that they act on the same view. A site that
        came late has none."""
        status = self._apps.status()
        there = len(status["sites"]) >= load.SITES and self._views() <= {status["view"], "None"}
        return there and bool(status["protected"])

    def _views(self) -> set[str]:
        return {site["view"] for site in self._apps.status()["sites"]}

    def _knows(self, victims: Iterable[int]) -> bool:
        return {str(s) for s in victims} <= self._apps.status()["dead"].keys()

    def _victim(self, fault: Fault) -> dict[str, Any]:
        sites: list[dict[str, Any]] = self._apps.status()["sites"]
        return sites[fault.rank % len(sites)]

    def _of_the_leader(self) -> set[int]:
        leader = self._apps.leader
        below = tree(self._apps.processes[leader].pid) if leader is not None else []
        return {s["site"] for s in self._apps.status()["sites"] if s["pid"] in below}

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                said = self._apps.status()
                raise HostError(
                    f"not within {PATIENCE_S:.0f} s: {what}; {said['view']}",
                    hint=f"sites act on {self._views()}; dead: {said.get('dead')}; "
                    f"phases: {phases(said) or 'all protected'}",
                )
            self._tick()

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tick()

    def _tick(self) -> None:
        if self._apps.ended(TICK_S):
            self._apps.wait()
            raise HostError("the flow has ended before its time")
