"""Several applications in a world with a clock: their connections, the arbiter's delays, faults.

Messages between controls, and answers of the arbiter, take time and may get lost. An application
can be stopped (when it wakes up, it finds everything that arrived meanwhile), can be cut off from
the arbiter alone, and can die at any moment, also between a request to the arbiter and the answer.
The arbiter then does what was requested, and no control gets the answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from holdfast.control import events as ev
from holdfast.core import events as core
from holdfast.core.effects import ArbiterAsk
from holdfast.core.ids import SiteId
from holdfast.core.layout import View
from holdfast.lab.sim.links import CONTROLLER, Down, control_of
from holdfast.net import wire

if TYPE_CHECKING:
    from holdfast.lab.sim.timed import TimedWorld


class Applications:
    """The connections between the controls of a world, and from them to the arbiter."""

    def __init__(self, world: TimedWorld) -> None:
        self.world = world
        self.away_until = 0.0
        """No application reaches the arbiter before this time."""
        self.cut_off_until: dict[int, float] = {}
        """Single applications do not reach it before this time."""
        self.unheard: dict[int, int] = {}
        """Number of the arbiter's next answers to an application that get lost."""
        self._follows: dict[int, int] = {}
        self.old_view: View | None = None
        """The view that was committed when an application last came back."""

    # --- the arbiter ----------------------------------------------------------------------------

    def ask(self, app: int, ask: ArbiterAsk) -> None:
        self.world.add(self._delay(), "ask", (app, self.world.plane.lives[app], ask))

    def _delay(self) -> float:
        pace = self.world.pace
        return pace.arbiter * self.world.random.lognormvariate(0.0, pace.spread)

    def reaches_arbiter(self, app: int) -> bool:
        return max(self.away_until, self.cut_off_until.get(app, 0.0)) <= self.world.time

    def on_ask(self, app: int, life: int, ask: ArbiterAsk) -> None:
        """Deliver a request to the arbiter. The control that sent it may have died since."""
        world = self.world
        unheard = core.ArbiterUnreachable(ask, "simulated")
        patience = world.lease_s * world.random.uniform(0.1, 0.8)
        if not self.reaches_arbiter(app):
            self.tell(app, life, unheard, patience)
            return
        if world.plane.lives[app] != life:
            return  # its session has ended with it
        answer = world.plane.answer(app, ask)
        if self.unheard.get(app, 0) > 0:
            self.unheard[app] -= 1
            world.log.append(f"{world.time:.4f}: application {app} does not hear {answer}")
            self.tell(app, life, unheard, patience)
        else:
            self.tell(app, life, answer, self._delay())

    # --- between applications -------------------------------------------------------------------

    def tell(self, app: int, life: int, event: ev.ControlEvent, after: float) -> None:
        self.world.add(after, "control", (app, life, event))

    def _say(self, app: int, event: ev.ControlEvent) -> None:
        """Send an event to another application. The delay is fixed, so events keep their order."""
        if app in self.world.controls:
            self.tell(app, self.world.plane.lives[app], event, self.world.pace.delay)

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
        """Tell the controls that were connected to a dead one."""
        for other, leader in list(self._follows.items()):
            if leader == app:
                del self._follows[other]
                self._say(other, ev.LeaderLost())
        if app in self._follows:
            self._say(self._follows.pop(app), ev.AgentLost(app))

    # --- faults ---------------------------------------------------------------------------------

    def stop(self, app: int, seconds: float) -> None:
        """Stop a control (SIGSTOP). It finds out later that it does not lead any more. Its sites go
        on."""
        self._note(f"application {app} stopped for {seconds:.4f}")
        self.world.note("fault", control_of(app), "stopped", None, self.world.time + seconds)
        self.world.sleep(control_of(app), seconds)

    def cut_off_from_arbiter(self, app: int, seconds: float) -> None:
        """Let an application reach everything but the arbiter."""
        self._note(f"no arbiter for application {app} for {seconds:.4f}")
        self.world.note("fault", control_of(app), "no arbiter", None, self.world.time + seconds)
        self.cut_off_until[app] = self.world.time + seconds

    def reset_connection(self, site: SiteId, app: int) -> None:
        """Break the connection of a site to a control; the site connects again."""
        self._note(f"reset of {site} and application {app}")
        self.world.note("fault", site, "reset", control_of(app))
        self.world.put_instead((control_of(app), site), [])
        self.world.put_instead((site, control_of(app)), [Down()])
        self.world.announce(site, app)

    def lose_session(self) -> None:
        """Have the arbiter end the leader's lease, without the leader's knowledge."""
        self._note("the leader has lost its session")
        self.world.note("fault", CONTROLLER, "session lost")
        self.world.ledger.end_lease()

    def lose_answers(self, app: int, count: int) -> None:
        """Lose the arbiter's next answers to an application, though it does what they say."""
        self._note(f"{count} answers to application {app} get lost")
        self.world.note("fault", control_of(app), "answers lost")
        self.unheard[app] = count

    def take_arbiter_away(self, seconds: float) -> None:
        self._note(f"arbiter away for {seconds:.4f}")
        self.world.note("fault", CONTROLLER, "arbiter away", None, self.world.time + seconds)
        self.away_until = self.world.time + seconds

    def crash(self, app: int) -> None:
        """Kill an application with all its sites."""
        self.world.crash(*self.sites_of(app))
        if app in self.world.controls:
            self.world.crash_controller(app)

    def note_old_view(self) -> None:
        known = self.world.ledger.known
        self.old_view = known.view if known is not None else None

    def send_old_view(self) -> None:
        """Have a control that does not know yet that it lost the lead repeat its last orders."""
        old = self.old_view
        if old is None:
            return
        self._note(f"old {old}")
        self.world.note("fault", CONTROLLER, "an old leader speaks")
        for site in self.world.nodes:
            self.world.send_order(0, site, wire.NewView(old, {}))
            for task in old.tasks_at(site):
                message = wire.CatchUp(old.term, core.CatchUpOrdered(task, max(self.world.nodes)))
                self.world.send_order(0, site, message)

    def _note(self, text: str) -> None:
        self.world.log.append(f"{self.world.time:.4f}: {text}")

    def sites_of(self, app: int) -> list[SiteId]:
        return [s for s in self.world.nodes if self.world.home[s] == app]
