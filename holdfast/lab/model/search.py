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
from holdfast.lab.model.reduction import Reduction
from holdfast.lab.model.state import ModelState, Move
from holdfast.lab.model.symmetry import SiteNames
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
        symmetry: bool = True,
        reduced: bool = False,
    ) -> None:
        """`symmetry`: states that differ only in the numbers of sites count as one. `reduced`:
        orders that make no difference are left out, see `holdfast.lab.model.reduction`."""
        self.world = ModelWorld(bounds)
        self.found = SearchResult(bounds)
        self._checks = StateChecks(self.world.sites)
        self._states_max, self._seconds_max = states_max, seconds_max
        self._progress = progress
        self._names = SiteNames(self.world) if symmetry else None
        self._reduction = Reduction(self.world) if reduced else None
        self._numbers: dict[bytes, int] = {}
        self._parents = array("I")
        self._depths = array("H")

    def run(self) -> SearchResult:
        begun = time.perf_counter()
        found = self.found
        first = self.world.begin()
        self._add(first, 0, 0)
        waiting = deque([(first, 0)])
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
            state, number = waiting.popleft()
            if not self._visit(state, number, waiting):
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
        key = tuple(state) if self._names is None else self._names.key(state)
        return blake2b(marshal.dumps(key, 2), digest_size=12).digest()

    def _visit(
        self, state: ModelState, number: int, waiting: deque[tuple[ModelState, int]]
    ) -> bool:
        """Add all states that follow a state; False if one of them is wrong."""
        found, depth = self.found, self._depths[number]
        found.depth = max(found.depth, depth)
        moves = list(self.world.moves(state))
        if not moves:
            return self._visit_end(state, number)
        if self._reduction is not None:
            moves = self._reduction.enough(state, moves)
        for move in moves:
            found.transitions += 1
            try:
                after = self._after(state, move)
            except (Broken, Violation) as error:
                self._fail(str(error), number)
                return False
            if self._add(after, number, depth + 1):
                waiting.append((after, len(self._parents) - 1))
        return True

    def _after(self, state: ModelState, move: Move) -> ModelState:
        """The state after an event, with all checks."""
        after = self.world.after(state, move)
        if after.ended is None:
            view = self.world.view(after.control)
            self._checks.check(view, after.sites, after.exceeded)
        return after

    def _visit_end(self, state: ModelState, number: int) -> bool:
        if state.ended is None:
            self._fail("nothing can happen any more, and the flow has not ended", number)
            return False
        name = state.ended or "all delivered"
        self.found.ends[name] = self.found.ends.get(name, 0) + 1
        self.found.terminal.add(state)
        return True

    def _fail(self, problem: str, number: int) -> None:
        self.found.problem = problem
        self.found.trace = self._way_to(number)

    def _way_to(self, number: int) -> list[Move]:
        """The events that lead to a state, and the one that goes wrong there. Only the numbers of
        states are kept, so take the way once more and look which event leads to the next. Sites may
        have other numbers on this way than they had in the search."""
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
        for move in self.world.moves(state):
            try:
                self._after(state, move)
            except (Broken, Violation):
                return [*way, move]
        return way
