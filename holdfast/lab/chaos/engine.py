"""Injects one fault after another into a running flow, and records how the flow recovers.

Everything happens in the thread that calls `Chaos.run`. While it waits, it ends faults whose time
is up, and records when everything is protected again.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from holdfast.lab.chaos.faults import (
    BLIP,
    CUT,
    EXECUTOR,
    HOLD,
    KILL,
    NAP,
    PART,
    RESET,
    RESET_CONTROL,
    SLEEP,
    TWO_KILLS,
    ChaosFault,
    Deaths,
    FaultKind,
    candidates,
    survivable,
)
from holdfast.lab.chaos.namespaces import Network
from holdfast.lab.chaos.proxy import CONTROL, Proxy
from holdfast.lab.chaos.waiting import Waiter
from holdfast.lab.workloads.paced import WatchedRun

KILLS = (KILL, TWO_KILLS, EXECUTOR)
SPARED_LEASES = 5.0
PATIENCE_S = 60.0
"""Maximum time for the flow to be protected again, and for a fenced site to leave."""


@dataclass(slots=True)
class Done:
    """An injected fault."""

    fault: ChaosFault
    kind: FaultKind
    """The fault's kind, or a weaker one if there were no possible victims for it."""
    victims: tuple[int, ...]
    pids: tuple[int, ...]
    at: float
    unprotected: bool
    """Whether the flow was still recovering from the last loss."""
    healed_at: float | None = None
    recovered_at: float | None = None
    """When everything was protected again, and all required victims were dead."""
    dead: set[int] = field(default_factory=set)
    """The victims that were declared dead."""
    spared: bool = False
    """Whether the fault ended before that, because the flow had come to need the victims."""

    @property
    def deaths_complete(self) -> bool:
        """Whether all victims that must die have been declared dead."""
        required = {Deaths.ALL: len(self.victims), Deaths.ONE: 1, Deaths.NONE: 0}
        return self.spared or len(self.dead) >= required[self.kind.deaths]

    @property
    def over(self) -> bool:
        """Whether the fault has ended, or the flow can recover before it ends."""
        lasting = self.kind.lasts[1] > 0 and self.kind.deaths is not Deaths.ONE
        return not lasting or self.healed_at is not None

    def __str__(self) -> str:
        sites = ", ".join(str(s) for s in self.victims) or "–"
        recovery = f"{self.recovered_at - self.at:.2f} s" if self.recovered_at else "never"
        during = ", during recovery" if self.unprotected else ""
        return f"{self.fault.number}: {self.kind.name} (site {sites}{during}), recovery: {recovery}"


Heal = tuple[float, Done, Callable[[], None]]
"""When to end a fault, the fault, and the function that ends it."""


class Chaos:
    """Injects faults into one run. `exits` holds when the sites' processes ended; `rebuilt` names
    the stages that the flow rebuilds if no replica is left."""

    def __init__(
        self,
        run: WatchedRun,
        lease_s: float,
        proxy: Proxy,
        network: Network | None,
        exits: Mapping[int, float],
        rebuilt: Collection[str] = (),
        console: Console | None = None,
    ) -> None:
        self.done: list[Done] = []
        self.dead: dict[int, str] = {}
        self._run, self._lease_s, self._console = run, lease_s, console
        self._proxy, self._network, self._exits = proxy, network, exits
        self._rebuilt = rebuilt
        self._heals: list[Heal] = []
        self._open: list[Done] = []
        self._waiter = Waiter(run, PATIENCE_S, self._describe, self._on_tick)

    def run(self, chosen: Iterable[ChaosFault], until: float = float("inf")) -> None:
        """Inject the faults, no new one after `until`; raise unless the flow recovers from all."""
        try:
            self._waiter.until(lambda: self._run.protected, "everything is protected at the start")
            for fault in chosen:
                if time.monotonic() > until:
                    break
                if not fault.overlaps:
                    self._waiter.until(
                        self._recovered, f"the flow has recovered before fault {fault}"
                    )
                self._waiter.pause(fault.pause_s)
                self._inject(fault)
            self._waiter.until(
                self._recovered, "everything is protected again after the last fault"
            )
            self._waiter.until(self._left, "the fenced sites have left")
        finally:
            self._heal_all()

    def fenced(self) -> set[int]:
        """Return the sites that were declared dead while their process was alive."""
        return {s for d in self.done if d.kind not in KILLS for s in d.dead}

    def fenced_and_left(self) -> set[int]:
        return {s for s in self.fenced() if s in self._exits}

    def unexpected(self) -> dict[int, str]:
        """Return the sites that were declared dead although no fault explains it, with the reason.
        On a very busy machine silence is a legitimate one."""
        expected = {s for d in self.done if d.kind.deaths is not Deaths.NONE for s in d.victims}
        return {s: why for s, why in self.dead.items() if s not in expected}

    def _recovered(self) -> bool:
        return not self._open and self._run.protected

    def _left(self) -> bool:
        return self.fenced() <= self._exits.keys()

    # --- waiting --------------------------------------------------------------------------------

    def _describe(self) -> str:
        return (
            f"open faults: {'; '.join(map(str, self._open)) or 'none'}; "
            f"fenced and still running: {sorted(self.fenced() - self._exits.keys())}; "
            f"phases: {phases(self._run.status())}"
        )

    def _on_tick(self) -> None:
        self._observe()
        for heal in [h for h in self._heals if self._is_over(h)]:
            self._heal(heal)

    def _observe(self) -> None:
        """Record new deaths, and the faults that the flow has recovered from."""
        status = self._run.status()
        for site, why in status.get("dead", {}).items():
            if int(site) not in self.dead:
                self._note_death(int(site), why)
        for done in list(self._open):
            if done.deaths_complete and done.over and status["protected"]:
                done.recovered_at = time.time()
                self._open.remove(done)

    def _note_death(self, site: int, why: str) -> None:
        """Record a death with the last fault of which the site was a victim."""
        self.dead[site] = why
        for done in reversed(self.done):
            if site in done.victims:
                done.dead.add(site)
                return

    def _is_over(self, heal: Heal) -> bool:
        """Return whether to end a fault now.

        A fault that is meant to outlast the lease lasts until its victims are declared dead: a
        controller that did not run for a while starts to count the lease again. If other sites were
        fenced in the meantime, the flow may need the victim and wait for it, so the fault ends.
        """
        due, done, _ = heal
        late = time.monotonic() - due
        if late < 0 or done.deaths_complete:
            return late >= 0
        if late > SPARED_LEASES * self._lease_s:
            partitions = self._run.status()["partitions"]
            losses = _losses(done.kind, done.victims)
            done.spared = not any(survivable(partitions, loss, self._rebuilt) for loss in losses)
        return done.spared

    def _heal(self, heal: Heal) -> None:
        self._heals.remove(heal)
        _, done, action = heal
        with suppress(OSError):  # the site may have left
            action()
        done.healed_at = time.time()

    def _heal_all(self) -> None:
        for heal in list(self._heals):
            self._heal(heal)

    # --- injecting ------------------------------------------------------------------------------

    def _inject(self, fault: ChaosFault) -> None:
        """Wait until the fault is permitted, then inject it."""
        choices: list[tuple[FaultKind, tuple[int, ...], dict[str, Any]]] = []

        def possible() -> bool:
            choices[:] = self._possible(fault)
            return bool(choices)

        self._waiter.until(possible, f"fault {fault} is permitted")
        kind, victims, status = choices[0]
        pids = tuple(_pid(status, s) for s in victims)
        done = Done(fault, kind, victims, pids, time.time(), not status["protected"])
        self.done.append(done)
        self._open.append(done)
        heal = self._begin(kind, victims, _targets(kind, status, victims))
        if heal is not None:
            due = time.monotonic() + fault.lasts * self._lease_s
            self._heals.append((due, done, heal))
        if self._console is not None:
            self._console.print(f"  {fault.number}: {kind.name}, site {victims}", highlight=False)

    def _possible(
        self, fault: ChaosFault
    ) -> list[tuple[FaultKind, tuple[int, ...], dict[str, Any]]]:
        """Return the permitted victims of the fault, if any. When everything is protected and the
        flow can spare no two sites together, one is killed instead."""
        status = self._run.status()
        if status["state"] != "running":
            return []
        down = self._down()
        partitions = status["partitions"]
        members = {s for p in partitions for s in (*p["replicas"], *p["standbys"])}
        living = [s for s in members if s in status["domains"] and s not in down]
        for victims in candidates(fault, living):
            if fault.kind is EXECUTOR:
                victims = _beside(status, victims[0])
            losses = _losses(fault.kind, victims)
            if all(survivable(partitions, down | loss, self._rebuilt) for loss in losses):
                return [(fault.kind, victims, status)]
        if fault.kind is TWO_KILLS and living and self._recovered() and status["protected"]:
            return [(KILL, (sorted(living)[fault.rank % len(living)],), status)]
        return []

    def _down(self) -> set[int]:
        """Return the sites that the flow cannot rely on. They include sites that have just come
        back, because the controller may still count their silence."""
        recent = [d for d in self.done if time.time() - (d.healed_at or 0.0) < self._lease_s]
        open_ = [d for d in self._open if d.kind not in (RESET, RESET_CONTROL)]
        return {s for d in recent + open_ for s in d.victims}

    def _begin(
        self, kind: FaultKind, victims: tuple[int, ...], pids: tuple[int, ...]
    ) -> Callable[[], None] | None:
        """Start the fault; return the function that ends it, or None if it is permanent."""
        one, other = victims[0], victims[-1]
        if kind in KILLS:
            _signal(pids, signal.SIGKILL)
            return None
        if kind in (NAP, SLEEP):
            _signal(pids, signal.SIGSTOP)
            return lambda: _signal(pids, signal.SIGCONT)
        if kind in (RESET, RESET_CONTROL):
            self._proxy.reset(one, other if kind is RESET else CONTROL)
            return None
        if kind in (HOLD, PART):
            return self._part(one, other)
        assert kind in (BLIP, CUT) and self._network is not None
        network = self._network
        network.cut(one)
        return lambda: network.heal(one)

    def _part(self, one: int, other: int) -> Callable[[], None]:
        """Separate two sites; return the function that joins them again.

        With namespaces, the kernel of the dialling site drops the packets, so that it gets no TCP
        acknowledgements; at the other end the proxy acknowledges.
        """
        proxy, network = self._proxy, self._network
        if network is None:
            proxy.hold(one, other)
            return lambda: proxy.release(one, other)
        ways = proxy.ways(one, other)
        for site, port in ways:
            network.part(site, port)

        def join() -> None:
            for site, port in ways:
                network.join(site, port)

        return join


def _losses(kind: FaultKind, victims: tuple[int, ...]) -> list[set[int]]:
    """Return the sets of sites that the flow must survive losing, each by itself, for the fault to
    be permitted."""
    if kind in (RESET, RESET_CONTROL):
        return []
    return [{s} for s in victims] if kind in (HOLD, PART) else [set(victims)]


def _pid(status: Mapping[str, Any], site: int) -> int:
    """Return the process id of a registered site, from its own registration."""
    return int(status["domains"][site].process.rpartition("/")[2])


def _beside(status: Mapping[str, Any], site: int) -> tuple[int, ...]:
    """Return all sites in the same executor, including `site`."""
    executor = status["domains"][site].executor
    return tuple(sorted(s for s, d in status["domains"].items() if d.executor == executor))


def _targets(
    kind: FaultKind, status: Mapping[str, Any], victims: tuple[int, ...]
) -> tuple[int, ...]:
    """Return the processes to signal: those of the sites, or their executor's."""
    if kind is EXECUTOR:
        return (int(status["domains"][victims[0]].executor.rpartition("-")[2]),)
    return tuple(_pid(status, s) for s in victims)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def phases(status: Mapping[str, Any]) -> str:
    """Describe the tasks that are not protected; empty if all are."""
    rows = [p for p in status.get("partitions", []) if p["phase"] != "protected"]
    return "; ".join(
        f"{p['stage']} {p['replicas']}+{p['joining']}~{p['standbys']} {p['phase']}" for p in rows
    )
