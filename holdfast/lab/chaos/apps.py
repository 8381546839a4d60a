"""Injects faults into a flow in two applications: into the leading one, and into their arbiter.

The arbiter is a ZooKeeper server, if one is installed. While it is unavailable, data must flow and
the sites must act on their current view; once it is back, the flow must recover from everything
that happened in the meantime.
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
from holdfast.lab.bench.kills import kill_driver
from holdfast.lab.bench.processes import tree
from holdfast.lab.chaos import load
from holdfast.lab.chaos.engine import Done, phases
from holdfast.lab.chaos.faults import ARBITER_SITE, ARBITER_STOP, DRIVER, ChaosFault
from holdfast.lab.chaos.waiting import Waiter
from holdfast.lab.chaos.zookeeper import ZooKeeperServer

PATIENCE_S = 180.0
"""Maximum time for a flow to start, or to be protected again: an application may have to start."""

REPORT_S = 1.0
"""Maximum age of the status that sites report."""


class AppsChaos:
    """Injects faults into one flow in two applications, each after recovery from the last one."""

    def __init__(
        self,
        apps: Apps,
        server: ZooKeeperServer | None,
        folder: str,
        lease_s: float,
        console: Console | None = None,
    ) -> None:
        self.done: list[Done] = []
        self._apps, self._server, self._lease_s = apps, server, lease_s
        self._log, self._console = Path(load.log_path(folder)), console
        self._known: set[int] = set()
        self._killed: set[int] = set()
        self._waiter = Waiter(apps, PATIENCE_S, self._describe)

    def run(self, chosen: Iterable[ChaosFault], until: float = float("inf")) -> None:
        """Inject the faults, no new one after `until`; raise unless the flow recovers from all."""
        self._waiter.until(self._settled, "everything is protected at the start")
        for fault in chosen:
            if time.monotonic() > until:
                break
            self._waiter.pause(fault.pause_s)
            self._known |= {site["site"] for site in self._apps.status()["sites"]}
            if self._console is not None:
                self._console.print(f"  {fault}", highlight=False)
            self.done.append(self._inject(fault))
            self._waiter.until(self._settled, f"the flow has recovered from fault {fault}")

    def unexpected(self) -> dict[int, str]:
        """Return the members that were declared dead although no fault killed their process."""
        dead = {int(s): why for s, why in self._apps.status().get("dead", {}).items()}
        return {s: why for s, why in dead.items() if s in self._known - self._killed}

    def _inject(self, fault: ChaosFault) -> Done:
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
        self._waiter.until(
            lambda: self._knows(done.victims) and self._settled(),
            f"the flow has recovered from fault {fault}",
        )
        done.recovered_at, done.dead = time.time(), set(done.victims)
        return done

    # --- the arbiter is unavailable -------------------------------------------------------------

    def _without_arbiter(self, fault: ChaosFault, done: Done) -> None:
        assert self._server is not None
        back = self._take_away(fault)
        done.at = time.time()
        try:
            self._waiter.pause(REPORT_S)  # until the sites have reported all views committed before
            views = self._views() | {"None"}  # a new site has no view yet
            for pid in done.pids:
                os.kill(pid, signal.SIGKILL)
            self._killed |= set(done.victims)
            self._waiter.pause(fault.lasts * self._lease_s)
            if not done.victims:  # with a victim, the tasks that it led wait for the next view
                self._waiter.until(self._more_results(), f"data flows during {fault}")
            others = self._views() - views
            if others:
                raise HostError(
                    f"fault {fault}: the view changed without an arbiter: sites act on "
                    f"{'; '.join(sorted(others))}"
                )
        finally:
            back()
            done.healed_at = time.time()

    def _take_away(self, fault: ChaosFault) -> Callable[[], None]:
        """Kill or stop the server; return the function that brings it back."""
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

    # --- observing ------------------------------------------------------------------------------

    def _settled(self) -> bool:
        """Return whether everything is protected, and all members report the same view. A site that
        registered later has no view."""
        status = self._apps.status()
        there = len(status["sites"]) >= load.SITES and self._views() <= {status["view"], "None"}
        return there and bool(status["protected"])

    def _views(self) -> set[str]:
        return {site["view"] for site in self._apps.status()["sites"]}

    def _knows(self, victims: Iterable[int]) -> bool:
        return {str(s) for s in victims} <= self._apps.status()["dead"].keys()

    def _victim(self, fault: ChaosFault) -> dict[str, Any]:
        sites: list[dict[str, Any]] = self._apps.status()["sites"]
        return sites[fault.rank % len(sites)]

    def _of_the_leader(self) -> set[int]:
        leader = self._apps.leader
        below = tree(self._apps.processes[leader].pid) if leader is not None else []
        return {s["site"] for s in self._apps.status()["sites"] if s["pid"] in below}

    def _describe(self) -> str:
        status = self._apps.status()
        return (
            f"sites act on {self._views()}; dead: {status.get('dead')}; "
            f"phases: {phases(status) or 'all protected'}"
        )
