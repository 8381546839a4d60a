"""A simulated world in which sites crash and connections break."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

from holdfast.api.options import Options
from holdfast.core.sequencer import Budget
from holdfast.lab.sim.world import World
from holdfast.protections import pairs

TINY = Options(
    partitions=4,
    budget=Budget(epoch_rows_max=16, epochs_in_flight_max=4, bytes_in_flight_max=1 << 20),
    window=2,
    block_rows=10,
    read_ahead_rows=40,
)


PAIRS = pairs(failure_domain="process")


class Faults:
    """Crashes and resets at random moments, many of them soon after one another."""

    def __init__(self, seed: int, crashes: int = 4, at_once: int = 1, resets: int = 0) -> None:
        self.random = random.Random(seed)
        self.crashes, self.at_once, self.resets = crashes, at_once, resets
        self.crashed = 0
        self._next_crash = self.random.randint(20, 400)
        self._next_reset = self.random.randint(20, 300)

    def __call__(self, world: World) -> None:
        if world.controller.running and world.steps >= self._next_crash and self.crashes:
            self._crash(world)
        if world.steps >= self._next_reset and self.resets and len(world.nodes) > 1:
            self._reset(world)

    def _crash(self, world: World) -> None:
        count = min(self.random.randint(1, self.at_once), len(world.nodes))
        victims = self.random.sample(sorted(world.nodes), count)
        if not world.survives(*victims):
            return
        world.crash(*victims)
        self.crashes -= 1
        self.crashed += 1
        gaps = [(1, 30), (1, 200), (100, 400)]
        self._next_crash = world.steps + self.random.randint(*self.random.choice(gaps))

    def _reset(self, world: World) -> None:
        one, other = self.random.sample(sorted(world.nodes), 2)
        if (one, other) in world.network and (other, one) in world.network:
            world.reset(one, other)
            self.resets -= 1
            self._next_reset = world.steps + self.random.randint(1, 150)


def go(world: World, *disturb: Callable[[World], None], until: Callable[[], Any] = bool) -> None:
    """Run to the end of the flow, or until something holds, with these disturbances."""
    while not world.ended and not until():
        for each in disturb:
            each(world)
        assert world.step(), f"stuck after {world.steps} steps: {world.describe()}"
        assert world.steps < 50_000, f"no end: {world.describe()}"
        check_chain(world)


def check_chain(world: World) -> None:
    """Records pass through sites only that have, or are about to have, a replica of the
    sequencer."""
    for site, node in world.nodes.items():
        if node.sequencer is not None and node.view is not None and site in node.view.sequencers:
            chain = (None, *node.view.groups[0][0].all)
            assert node.sequencer.successor in chain, f"{site}: {world.describe()}"
