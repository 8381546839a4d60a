"""Moves of a simulated flow: replicas go to other sites, sites are drained, and others come."""

from __future__ import annotations

import random
from dataclasses import dataclass

from holdfast.core import moves
from holdfast.core.requests import EmptySites, MovesWanted, Relocation, SitesWanted
from holdfast.lab.sim.timed import TimedWorld

INTERVAL_S = (0.001, 0.02)
"""Shortest and longest time between two requests."""
AT_ONCE_MAX = 3
"""Maximum number of moves in one request."""


@dataclass(slots=True)
class Mover:
    """Asks for `count` moves or other changes of the sites, at random times. Requests that cannot
    be met are made as well: the controller must refuse them."""

    world: TimedWorld
    count: int
    seed: int
    last_at: float = 0.0
    """When the last request was made."""
    asked: int = 0

    def begin(self) -> None:
        chance = random.Random(f"moves {self.seed}")
        self._wait(chance, len(self.world.nodes))

    def _wait(self, chance: random.Random, sites: int) -> None:
        if self.asked == self.count or self.world.ended:
            return

        def ask(world: TimedWorld) -> None:
            if not world.ended and not world.leaderless and world.controller.running:
                self._ask(chance, sites)
            self._wait(chance, sites)

        self.asked += 1
        self.last_at = self.world.time + chance.uniform(*INTERVAL_S)
        self.world.at(self.last_at, ask)

    def _ask(self, chance: random.Random, sites: int) -> None:
        view = self.world.controller.view
        assert view is not None
        kind, members = chance.random(), list(view.members)
        if kind < 0.1:
            self.world.plane.request(EmptySites((chance.choice(members),)))
        elif kind < 0.2:
            self.world.plane.request(SitesWanted(sites + chance.randrange(-1, 2)))
        else:
            wanted = [self._any_move(chance) for _ in range(chance.randint(1, AT_ONCE_MAX))]
            self.world.plane.request(MovesWanted(tuple(wanted)))

    def _any_move(self, chance: random.Random) -> Relocation:
        """A move that the controller accepts, mostly."""
        controller = self.world.controller
        view, domains = controller.view, controller.roster.domains
        assert view is not None
        for _ in range(20):
            task = chance.choice(view.tasks())
            group, sites = view.group(task), sorted(domains)
            move = Relocation(task, chance.choice(group.all or sites), chance.choice(sites))
            if moves.refusal(view, controller.shape, domains, move) is None:
                break
        return move
