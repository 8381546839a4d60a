"""Breadth-first search through all states of the model."""

from __future__ import annotations

import marshal
import resource
import time
from array import array
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from hashlib import blake2b

from holdfast.lab.model.checks import StateChecks
from holdfast.lab.model.parts import Broken
from holdfast.lab.model.state import ModelState, Move
from holdfast.lab.model.world import ModelBounds, ModelWorld
from holdfast.lab.sim.checks import Violation


@dataclass(slots=True)
class SearchResult:
    """What a search has found."""

    bounds: ModelBounds
    states: int = 0
    transitions: int = 0
    depth: int = 0
    """The number of events on the shortest way to the farthest state."""
    ends: dict[str, int] = field(default_factory=dict)
    """How many different ends there are, by kind."""
    problem: str | None = None
    trace: list[Move] = field(default_factory=list)
    """The shortest sequence of events that leads to the problem."""
    complete: bool = False
    seconds: float = 0.0
    site_states: int = 0
    control_states: int = 0
    steps: int = 0
    """How many different steps machines have taken."""
    terminal: set[ModelState] = field(default_factory=set)

    @property
    def memory_mb(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class ModelSearch:
    """Visits every state of a world once."""

    def __init__(
        self,
        bounds: ModelBounds,
        states_max: int = 1 << 62,
        seconds_max: float = 1e9,
        progress: Callable[[SearchResult], None] | None = None,
    ) -> None:
        self.world = ModelWorld(bounds)
        self.found = SearchResult(bounds)
        self._checks = StateChecks(self.world.sites)
        self._states_max, self._seconds_max = states_max, seconds_max
        self._progress = progress
        self._numbers: dict[bytes, int] = {}
        self._parents = array("I")
        self._depths = array("H")

    def run(self) -> SearchResult:
        begun = time.perf_counter()
        found = self.found
        first = self.world.begin()
        self._add(first, 0, 0)
        waiting = deque([first])
        while waiting:
            if len(self._parents) > self._states_max:
                break
            if found.transitions % 1024 < 8:
                found.seconds = time.perf_counter() - begun
                self._note()
                if found.seconds > self._seconds_max:
                    break
                if self._progress:
                    self._progress(found)
            state = waiting.popleft()
            if not self._visit(state, waiting):
                break
        found.complete = not waiting and found.problem is None
        found.seconds = time.perf_counter() - begun
        self._note()
        return found

    def _note(self) -> None:
        found, world = self.found, self.world
        found.states = len(self._parents)
        found.site_states, found.control_states = len(world.sites), len(world.controls)
        found.steps = world.sites.steps + world.controls.steps

    def _add(self, state: ModelState, parent: int, depth: int) -> bool:
        """Note a state; False if it is known."""
        key = self._key(state)
        if key in self._numbers:
            return False
        self._numbers[key] = len(self._parents)
        self._parents.append(parent)
        self._depths.append(depth)
        return True

    def _key(self, state: ModelState) -> bytes:
        return blake2b(marshal.dumps(tuple(state), 2), digest_size=12).digest()

    def _visit(self, state: ModelState, waiting: deque[ModelState]) -> bool:
        found, world = self.found, self.world
        number = self._numbers[self._key(state)]
        depth = self._depths[number]
        found.depth = max(found.depth, depth)
        moved = False
        for move in world.moves(state):
            moved = True
            found.transitions += 1
            try:
                after = world.after(state, move)
                if after.ended is None:
                    view = world.view(after.control)
                    self._checks.check(view, after.sites, after.exceeded)
            except (Broken, Violation) as error:
                self._fail(str(error), number, move)
                return False
            if self._add(after, number, depth + 1):
                waiting.append(after)
        if moved:
            return True
        if state.ended is None:
            self._fail("nothing can happen any more, and the flow has not ended", number, None)
            return False
        name = state.ended or "all delivered"
        found.ends[name] = found.ends.get(name, 0) + 1
        found.terminal.add(state)
        return True

    def _fail(self, problem: str, number: int, move: Move | None) -> None:
        self.found.problem = problem
        self.found.trace = [*self._way_to(number), *([move] if move else [])]

    def _way_to(self, number: int) -> list[Move]:
        """The events that lead to a state. Only the numbers of states are kept, so take the way
        once more and look which event leads to the next."""
        numbers = [number]
        while numbers[-1]:
            numbers.append(self._parents[numbers[-1]])
        state, way = self.world.begin(), []
        for wanted in reversed(numbers[:-1]):
            for move in self.world.moves(state):
                after = self.world.after(state, move)
                if self._numbers[self._key(after)] == wanted:
                    state = after
                    way.append(move)
                    break
        return way
