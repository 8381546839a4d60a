"""Tries every crash point of a small flow, and every order of events up to a bound.

The flow has a source, a keyed stage and a sink on two sites that are replicas of each other, two
partitions, and a few epochs. By default deaths are noticed at once, and all possible events take
turns. It tries

- a crash of each site after each step,
- two crashes, the second after each of the steps that follow the first, and
- a crash of each site after each step with one *preemption*: at one of the next `WINDOW` steps,
  another possible event happens first.

These are all runs with one preemption close to the crash. Random seeds cover runs with more.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cache

import pyarrow as pa
from rich.console import Console
from rich.progress import Progress

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.api.protection import none, pairs
from holdfast.connectors.sinks import discard
from holdfast.connectors.sources import rows
from holdfast.core.sequencer import Budget
from holdfast.errors import HoldfastError, SiteLostError
from holdfast.lab.sim.flows import in_order
from holdfast.lab.sim.memory import Memory
from holdfast.lab.sim.planted import Bug
from holdfast.lab.sim.world import World

WINDOW = 6
STEPS_MAX = 3_000
OPTIONS = Options(
    partitions=2,
    budget=Budget(epoch_rows_max=3, epochs_in_flight_max=2, small_in_flight_max=2),
    window=2,
    block_rows=3,
    read_ahead_rows=3,
)
MEMORY = Memory()


@dataclass(frozen=True, slots=True)
class Path:
    """One run: which site crashes after which step, and where another event happens than usual."""

    crashes: tuple[tuple[int, int], ...] = ()
    """(step, rank of the site among those alive)"""
    deviations: tuple[tuple[int, int], ...] = ()
    """(step, which of the possible events)"""


def flow(protected: bool = True) -> Flow:
    made = Flow("small", protect=pairs(failure_domain="process") if protected else none())
    batch = pa.record_batch({"k": [1, 2, 1, 3, 2, 1, 3] * 3, "v": list(range(21))})
    source = made.source("numbers", rows(batch))
    source.key_by("k").agg(t=F.sum("v"), n=F.count()).sink("out", discard())
    return made


@cache
def expected() -> pa.Table:
    world = World(flow(protected=False), sites=1)
    world.run()
    return in_order(world.result("out"))


class ChosenWorld(World):
    """A world in which a path decides what happens next."""

    def __init__(self, path: Path) -> None:
        super().__init__(flow(), sites=2, options=OPTIONS, memory=MEMORY)
        self.path = path
        self.choices: list[int] = []
        """The number of possible events at each step."""

    def step(self) -> bool:
        for step, rank in self.path.crashes:
            if step == self.steps and self.controller.running and self.nodes:
                self.crash(sorted(self.nodes)[rank % len(self.nodes)])
        moves = self.moves()
        possible = len(moves) + len(self._timers)
        self.choices.append(possible)
        if not possible:
            return False
        chosen = dict(self.path.deviations).get(self.steps, 0) % possible
        if chosen < len(self._timers):
            self.happen(self._timers.pop(chosen))
        else:
            # Take turns: if the first event always happened, one site would run ahead.
            shift = 0 if self.steps in dict(self.path.deviations) else self.steps
            moves[(chosen - len(self._timers) + shift) % len(moves)]()
        self.steps += 1
        return True


def run(path: Path) -> tuple[ChosenWorld, Exception | None]:
    """Return the world at the end of a path, and the error, if any."""
    world = ChosenWorld(path)
    try:
        world.run(STEPS_MAX)
        if not in_order(world.result("out")).equals(expected()):
            return world, AssertionError("not the right rows")
    except SiteLostError as error:
        return world, None if world.exceeded else error
    except (HoldfastError, AssertionError, KeyError, AttributeError) as error:
        return world, error
    return world, None


def one_crash() -> Iterator[Path]:
    """Crash each site after each step of an undisturbed run."""
    undisturbed, _ = run(Path())
    for step in range(undisturbed.steps):
        for rank in range(2):
            yield Path(((step, rank),))


def two_crashes(every: int = 1) -> Iterator[Path]:
    """Crash a second site after each step that follows the first crash, or after every `every`
    steps."""
    for first in list(one_crash())[::every]:
        world, _ = run(first)
        (step, _rank) = first.crashes[0]
        for second in range(step + 1, world.steps, every):
            for rank in range(2):
                yield Path((*first.crashes, (second, rank)))


def preempted(every: int = 1) -> Iterator[Path]:
    """Crash a site, and within the next `WINDOW` steps let one event happen out of turn."""
    for first in list(one_crash())[::every]:
        world, _ = run(first)
        step = first.crashes[0][0]
        for at in range(step, min(step + WINDOW, len(world.choices))):
            for other in range(1, world.choices[at]):
                yield Path(first.crashes, ((at, other),))


def explore(console: Console, bug: Bug | None = None) -> int:
    """Try all paths. Return exit status 1 if one fails."""
    with bug.planted() if bug is not None else nullcontext(), Progress(console=console) as bar:
        for name, paths in (
            ("one crash", one_crash()),
            ("one crash, one preemption", preempted()),
            ("two crashes", two_crashes()),
        ):
            listed = list(paths)
            task = bar.add_task(name, total=len(listed))
            for path in listed:
                _, problem = run(path)
                bar.advance(task)
                if problem is not None:
                    bar.stop()
                    text = str(problem).splitlines()[0]
                    console.print(f"[red]{path} fails[/red]: {text}")
                    return 1
            console.print(f"{name}: {len(listed)} paths, all right")
    return 0
