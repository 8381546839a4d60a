"""Several applications in a world with a clock: their connections, the arbiter's delays, faults.

What one control says to another, and what the arbiter answers, takes time, and may never arrive. An
application can be stopped (it wakes up later and finds everything that came meanwhile), can be cut
off from the arbiter alone, and can die at any moment: also between what it asks the arbiter for and
the answer. What was asked for then happens, and nobody hears of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.control import events as ev
from holdfast.core import events as core
from holdfast.core.effects import ArbiterAsk
from holdfast.core.ids import SiteId

if TYPE_CHECKING:
    from holdfast.lab.sim.timed import TimedWorld


class Applications:
    """What is between the controls of a world, and between them and the arbiter."""

    def __init__(self, world: TimedWorld) -> None:
        self.world = world
        self.away_until = 0.0
        """Nobody reaches the arbiter before."""
        self.cut_off_until: dict[int, float] = {}
        """These do not reach it before."""
        self.unheard: dict[int, int] = {}
        """So many of its next answers to an application get lost."""
        self._follows: dict[int, int] = {}

    # --- the arbiter ----------------------------------------------------------------------------

    def ask(self, app: int, ask: ArbiterAsk) -> None:
        self.world._push(self._delay(), "ask", (app, self.world.lives[app], ask))

    def _delay(self) -> float:
        pace = self.world.pace
        return pace.arbiter * self.world.random.lognormvariate(0.0, pace.spread)

    def reaches_arbiter(self, app: int) -> bool:
        return max(self.away_until, self.cut_off_until.get(app, 0.0)) <= self.world.time

    def on_ask(self, app: int, life: int, ask: ArbiterAsk) -> None:
        """The arbiter gets a request; whoever has sent it may be dead by now."""
        world = self.world
        unheard = core.ArbiterUnreachable(ask, "simulated")
        patience = world.lease_s * world.random.uniform(0.1, 0.8)
        if not self.reaches_arbiter(app):
            self.tell(app, life, unheard, patience)
            return
        if world.lives[app] != life:
            return  # its session has ended with it
        answer = world.answer(app, ask)
        if self.unheard.get(app, 0) > 0:
            self.unheard[app] -= 1
            world.log.append(f"{world.time:.4f}: application {app} does not hear {answer}")
            self.tell(app, life, unheard, patience)
        else:
            self.tell(app, life, answer, self._delay())

    # --- between applications -------------------------------------------------------------------

    def tell(self, app: int, life: int, event: ev.ControlEvent, after: float) -> None:
        self.world._push(after, "control", (app, life, event))

    def _say(self, app: int, event: ev.ControlEvent) -> None:
        """On its way to another application; it overtakes nothing."""
        if app in self.world.controls:
            self.tell(app, self.world.lives[app], event, self.world.pace.delay)

    def execute(self, app: int, effect: ev.ControlEffect) -> None:
        match effect:
            case ev.DialLeader():
                self._dial(app, effect)
            case ev.SendAgent():
                if self._follows.get(effect.app) == app:
                    self._say(effect.app, ev.LeaderSaid(effect.message))
            case ev.SendLeader():
                if app in self._follows:
                    self._say(self._follows[app], ev.AgentSaid(app, effect.message))
            case ev.HangUpOnAgents():
                for other in effect.apps:
                    if self._follows.get(other) == app:
                        del self._follows[other]
                        self._say(other, ev.LeaderLost())
            case ev.HangUpOnLeader():
                if app in self._follows:
                    self._say(self._follows.pop(app), ev.AgentLost(app))
            case _:
                pass

    def _dial(self, app: int, effect: ev.DialLeader) -> None:
        other = int(effect.entry.holder)
        if other not in self.world.controls:
            self._say(app, core.LeaderGone(effect.entry))
            return
        self._follows[app] = other
        self._say(other, ev.AgentOpened(app))
        self._say(app, ev.LeaderOpened(effect.entry.holder))

    def died(self, app: int) -> None:
        """Those that were connected to it notice."""
        for other, leader in list(self._follows.items()):
            if leader == app:
                del self._follows[other]
                self._say(other, ev.LeaderLost())
        if app in self._follows:
            self._say(self._follows.pop(app), ev.AgentLost(app))

    def sites_of(self, app: int) -> list[SiteId]:
        return [s for s in self.world.nodes if self.world.home[s] == app]
