"""Breadth-first search through all states of the model.

Of a visited state the search keeps 64 bits, and the event that led to it. With n states, the chance
that two of them have the same 64 bits, so that one is left out, is n² / 2^65: one in 3,700 for a
hundred million states.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from holdfast.lab.model.checks import StateChecks
from holdfast.lab.model.memo import Fingerprints
from holdfast.lab.model.reduction import Reduction
from holdfast.lab.model.state import Interned, Move, Rows
from holdfast.lab.model.steps import ModelBounds
from holdfast.lab.model.symmetry import StateKeys
from holdfast.lab.model.world import ModelWorld, Successors, Wrong

AT_ONCE = 1 << 16
"""How many states are visited at once."""


@dataclass(slots=True)
class SearchResult:
    """What a search has found."""

    bounds: ModelBounds
    states: int = 0
    transitions: int = 0
    depth: int = 0
    """The number of events on the shortest way to the farthest state. All states that are nearer
    were visited."""
    ends: set[str] = field(default_factory=set)
    """How the flow ends."""
    problem: str | None = None
    trace: list[Move] = field(default_factory=list)
    """The shortest sequence of events that leads to the problem."""
    complete: bool = False
    seconds: float = 0.0
    site_states: int = 0
    control_states: int = 0
    steps: int = 0
    """How many different steps machines have taken."""

    @property
    def memory_mb(self) -> int:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024


class _Level:
    """The states that are reached with the same number of events: how each was reached."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.parents: list[NDArray[np.uint32]] = []
        self.moves: list[NDArray[np.uint16]] = []
        self.size = 0

    def add(self, rows: Rows, parents: NDArray[np.int64], move: int) -> None:
        self.rows.append(rows)
        self.parents.append(parents.astype(np.uint32))
        self.moves.append(np.full(len(parents), move, np.uint16))
        self.size += len(parents)


class ModelSearch:
    """Visits every state of a world once."""

    def __init__(
        self,
        bounds: ModelBounds,
        seconds_max: float = 1e9,
        memory_mb_max: int = 8_000,
        progress: Callable[[SearchResult], None] | None = None,
        symmetry: bool = True,
        reduced: bool = False,
    ) -> None:
        """`symmetry`: states that differ only in the numbers of sites count as one. `reduced`:
        orders that make no difference are left out, see `holdfast.lab.model.reduction`."""
        self.world = ModelWorld(bounds)
        self.found = SearchResult(bounds)
        self._checks = StateChecks(self.world)
        self._seconds_max, self._memory_mb_max = seconds_max, memory_mb_max
        self._progress = progress
        self._keys = StateKeys(self.world, symmetry)
        self._reduction = Reduction(self.world) if reduced else None
        self._visited = Fingerprints()
        self._moves = Interned()
        self._ways: list[tuple[NDArray[np.uint32], NDArray[np.uint16]]] = []
        """By number of events: of each state the state before it, and the event."""
        self._begun = 0.0

    def run(self) -> SearchResult:
        self._begun = time.perf_counter()
        found = self.found
        level = _Level()
        level.add(self.world.begin(), np.zeros(1, np.int64), 0)
        self._visited.add(self._keys.of(level.rows[0]))
        while level.size and found.problem is None and not self._is_over():
            level = self._next(level)
        found.complete = not level.size and found.problem is None
        self._note()
        return found

    def _is_over(self) -> bool:
        self._note()
        if self._progress:
            self._progress(self.found)
        found = self.found
        return found.seconds > self._seconds_max or found.memory_mb > self._memory_mb_max

    def _note(self) -> None:
        found, world = self.found, self.world
        found.seconds = time.perf_counter() - self._begun
        found.states = self._visited.size
        found.site_states, found.control_states = len(world.sites), len(world.controls)
        found.steps = world.steps

    def _next(self, level: _Level) -> _Level:
        """All new states that follow the states of a level."""
        self._ways.append((np.concatenate(level.parents), np.concatenate(level.moves)))
        self.found.depth = len(self._ways) - 1
        after, offset = _Level(), 0
        rows = np.concatenate(level.rows, axis=1)
        level.rows.clear()
        for begin in range(0, rows.shape[1], AT_ONCE):
            part = rows[:, begin : begin + AT_ONCE]
            if not self._visit(part, offset, after) or (begin and self._is_over()):
                after.size = max(after.size, 1)
                return after
            offset += part.shape[1]
        return after

    def _visit(self, rows: Rows, offset: int, after: _Level) -> bool:
        """Add all states that follow these; False if one of them is wrong."""
        moved = np.zeros(rows.shape[1], np.bool_)
        try:
            only = self._reduction.only(rows) if self._reduction is not None else None
            for found in self.world.moves(rows, only):
                moved[found.parents] = True
                if not self._add(found, offset, after):
                    return False
        except Wrong as wrong:
            self._fail(wrong.problem, offset + wrong.parent, wrong.move)
            return False
        return self._visit_ends(rows, offset, ~moved)

    def _add(self, found: Successors, offset: int, after: _Level) -> bool:
        self.found.transitions += len(found.parents)
        new = np.flatnonzero(self._visited.add(self._keys.of(found.rows)))
        if not len(new):
            return True
        rows, parents = found.rows[:, new], found.parents[new] + offset
        wrong = self._checks.check(rows)
        if wrong is not None:
            at, problem = wrong
            self._fail(problem, int(parents[at]), found.move)
            return False
        after.add(rows, parents, self._moves.number(found.move))
        return True

    def _visit_ends(self, rows: Rows, offset: int, still: NDArray[np.bool_]) -> bool:
        ended = self.world.ended(rows)
        stuck = np.flatnonzero(still & ~ended)
        if len(stuck):
            problem = "nothing can happen any more, and the flow has not ended"
            self._fail(problem, offset + int(stuck[0]))
            return False
        for rest in np.unique(rows[self.world.columns.rest, ended]).tolist():
            self.found.ends.add(self.world.rests.all[rest].ended or "all delivered")
        return True

    def _fail(self, problem: str, at: int, move: Move | None = None) -> None:
        """Note the problem, and the way to it."""
        self.found.problem = problem
        way = [move] if move is not None else []
        for parents, moves in reversed(self._ways[1:]):
            way.append(self._moves.all[moves[at]])
            at = int(parents[at])
        self.found.trace = way[::-1]
