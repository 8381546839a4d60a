"""Doing it: one fault after another to a flow that runs, and seeing what becomes of it.

Everything happens in the thread that calls `Chaos.run`. While it waits, whatever was stopped or
cut off comes back when its time is up, and it is noted when everything is protected again.
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

from holdfast.errors import HostError
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
    Deaths,
    Fault,
    Kind,
    candidates,
    survivable,
)
from holdfast.lab.chaos.namespaces import Network
from holdfast.lab.chaos.proxy import CONTROL, Proxy
from holdfast.lab.workloads.paced import Watched

KILLS = (KILL, TWO_KILLS, EXECUTOR)
TICK_S = 0.01
SPARED_LEASES = 5.0
PATIENCE_S = 60.0
"""So long the flow may take to be protected again, or a fenced site to leave."""


@dataclass(slots=True)
class Done:
    """A fault that has happened."""

    fault: Fault
    kind: Kind
    """That of the fault, or a weaker one if no victims were to be had for it."""
    victims: tuple[int, ...]
    pids: tuple[int, ...]
    at: float
    unprotected: bool
    """The last loss was still being mended."""
    healed_at: float | None = None
    recovered_at: float | None = None
    """When all was protected again, the victims gone if they had to go."""
    dead: set[int] = field(default_factory=set)
    """Those of the victims that were declared dead."""
    spared: bool = False
    """They came back before that, as the flow could not do without them."""

    @property
    def gone(self) -> bool:
        """All are dead who must be."""
        required = {Deaths.ALL: len(self.victims), Deaths.ONE: 1, Deaths.NONE: 0}
        return self.spared or len(self.dead) >= required[self.kind.deaths]

    @property
    def over(self) -> bool:
        """It is not going on, or need not end for the flow to recover."""
        lasting = self.kind.lasts[1] > 0 and self.kind.deaths is not Deaths.ONE
        return not lasting or self.healed_at is not None

    def __str__(self) -> str:
        sites = ", ".join(str(s) for s in self.victims) or "–"
        mended = f"{self.recovered_at - self.at:.2f} s" if self.recovered_at else "never"
        during = ", during recovery" if self.unprotected else ""
        return f"{self.fault.number}: {self.kind.name} (site {sites}{during}), mended: {mended}"


Heal = tuple[float, Done, Callable[[], None]]
"""When something is over, what, and how to end it."""


class Chaos:
    """Faults to one run. `exits` has when sites' processes ended, and `rebuilt` the stages that are
    rebuilt if no replica is left."""

    def __init__(
        self,
        run: Watched,
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

    # --- all of it ------------------------------------------------------------------------------

    def run(self, chosen: Iterable[Fault], until: float = float("inf")) -> None:
        """Do the faults, at most until then; at the end all is mended, or it is an error."""
        try:
            self._until(lambda: self._run.protected, "everything is protected at the beginning")
            for fault in chosen:
                if time.monotonic() > until:
                    break
                if not fault.finished_before:
                    self._until(self._mended, f"all is mended before fault {fault}")
                self._pass(fault.pause_s)
                self._do(fault)
            self._until(self._mended, "everything is protected again after the last fault")
            self._until(self._left, "the fenced sites have left")
        finally:
            self._heal_all()

    def fenced(self) -> set[int]:
        """Sites that were declared dead though their process lived."""
        return {s for d in self.done if d.kind not in KILLS for s in d.dead}

    def gone_by_themselves(self) -> set[int]:
        return {s for s in self.fenced() if s in self._exits}

    def unexpected(self) -> dict[int, str]:
        """Sites that were declared dead and that nothing was done to that could excuse it. Silence
        is an excuse on a machine that is too busy."""
        expected = {s for d in self.done if d.kind.deaths is not Deaths.NONE for s in d.victims}
        return {s: why for s, why in self.dead.items() if s not in expected}

    def _mended(self) -> bool:
        return not self._open and self._run.protected

    def _left(self) -> bool:
        return self.fenced() <= self._exits.keys()

    # --- waiting --------------------------------------------------------------------------------

    def _until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            if time.monotonic() > deadline:
                said = self._run.status()
                raise HostError(
                    f"not within {PATIENCE_S:.0f} s: {what}; {said.get('view')}",
                    hint=f"open: {'; '.join(map(str, self._open)) or 'nothing'}; "
                    f"fenced and still there: {sorted(self.fenced() - self._exits.keys())}; "
                    f"phases: {phases(said)}",
                )
            self._tick()

    def _pass(self, seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            self._tick()

    def _tick(self) -> None:
        if self._run.ended(TICK_S):
            self._run.wait()
            raise HostError("the flow has ended before its time")
        self._look()
        for heal in [h for h in self._heals if self._is_over(h)]:
            self._heal(heal)

    def _look(self) -> None:
        """Note who is dead by now, and what is mended."""
        status = self._run.status()
        for site, why in status.get("dead", {}).items():
            if int(site) not in self.dead:
                self._note_death(int(site), why)
        for done in list(self._open):
            if done.gone and done.over and status["protected"]:
                done.recovered_at = time.time()
                self._open.remove(done)

    def _note_death(self, site: int, why: str) -> None:
        """It goes to the last fault that the site was a victim of."""
        self.dead[site] = why
        for done in reversed(self.done):
            if site in done.victims:
                done.dead.add(site)
                return

    def _is_over(self, heal: Heal) -> bool:
        """What is to outlast the lease does so until that was noticed: a controller that did not
        get to run for a while begins to count again. If others have died meanwhile that only seemed
        to, the flow may have come to need the victim, and waits for it: so it comes back."""
        due, done, _ = heal
        late = time.monotonic() - due
        if late < 0 or done.gone:
            return late >= 0
        if late > SPARED_LEASES * self._lease_s:
            partitions = self._run.status()["partitions"]
            losses = _losses(done.kind, done.victims)
            done.spared = not any(survivable(partitions, loss, self._rebuilt) for loss in losses)
        return done.spared

    def _heal(self, heal: Heal) -> None:
        self._heals.remove(heal)
        _, done, action = heal
        with suppress(OSError):  # it may have left
            action()
        done.healed_at = time.time()

    def _heal_all(self) -> None:
        for heal in list(self._heals):
            self._heal(heal)

    # --- doing ----------------------------------------------------------------------------------

    def _do(self, fault: Fault) -> None:
        """Wait until the fault may happen, and let it happen."""
        found: list[tuple[Kind, tuple[int, ...], dict[str, Any]]] = []

        def possible() -> bool:
            found[:] = self._possible(fault)
            return bool(found)

        self._until(possible, f"fault {fault} may happen")
        kind, victims, status = found[0]
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

    def _possible(self, fault: Fault) -> list[tuple[Kind, tuple[int, ...], dict[str, Any]]]:
        """Whom the fault may happen to now. When everything is protected and no two sites can be
        spared together, one is killed instead."""
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
        if fault.kind is TWO_KILLS and living and self._mended() and status["protected"]:
            return [(KILL, (sorted(living)[fault.rank % len(living)],), status)]
        return []

    def _down(self) -> set[int]:
        """Who cannot be counted on: also those that are just back, and whose silence is not over
        for the controller yet."""
        recent = [d for d in self.done if time.time() - (d.healed_at or 0.0) < self._lease_s]
        open_ = [d for d in self._open if d.kind not in (RESET, RESET_CONTROL)]
        return {s for d in recent + open_ for s in d.victims}

    def _begin(
        self, kind: Kind, victims: tuple[int, ...], pids: tuple[int, ...]
    ) -> Callable[[], None] | None:
        """Do it; what ends it, if it is not for good."""
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
        """By the kernel of the one who dials, if that can be: then it gets no acknowledgements,
        while at the other end the proxy gives them."""
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


def _losses(kind: Kind, victims: tuple[int, ...]) -> list[set[int]]:
    """What the flow must be able to do without, each by itself, for the fault to be fair."""
    if kind in (RESET, RESET_CONTROL):
        return []
    return [{s} for s in victims] if kind in (HOLD, PART) else [set(victims)]


def _pid(status: Mapping[str, Any], site: int) -> int:
    """The process of a site that is registered: it has said so itself."""
    return int(status["domains"][site].process.rpartition("/")[2])


def _beside(status: Mapping[str, Any], site: int) -> tuple[int, ...]:
    """The site, and all others in the same executor."""
    executor = status["domains"][site].executor
    return tuple(sorted(s for s, d in status["domains"].items() if d.executor == executor))


def _targets(kind: Kind, status: Mapping[str, Any], victims: tuple[int, ...]) -> tuple[int, ...]:
    """The processes that it is done to: those of the sites, or their executor's."""
    if kind is EXECUTOR:
        return (int(status["domains"][victims[0]].executor.rpartition("-")[2]),)
    return tuple(_pid(status, s) for s in victims)


def _signal(pids: Iterable[int], number: int) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def phases(status: Mapping[str, Any]) -> str:
    """What is not protected, if anything."""
    rows = [p for p in status.get("partitions", []) if p["phase"] != "protected"]
    return "; ".join(
        f"{p['stage']} {p['replicas']}+{p['joining']}~{p['standbys']} {p['phase']}" for p in rows
    )
