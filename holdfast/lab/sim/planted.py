"""A bug that is planted, and the runs that may expose it: see `holdfast.lab.sim.bugs`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from holdfast.lab.sim.explore import Case, forget
from holdfast.lab.sim.faults import KINDS, Fault

Make = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Bug:
    """A mistake: a wrong method that replaces the right one."""

    name: str
    what: str
    owner: Any
    method: str
    make: Make
    flow: str = "windows"
    protocol: str = "pairs"
    kinds: tuple[str, ...] = KINDS
    """The kinds of faults that expose it."""
    beyond: float = 0.1
    """The share of runs whose faults may exceed what the protection survives."""
    then: str | None = None
    """The protection to which the first keyed stage changes during the run; None: it does not."""
    faults: tuple[Fault, ...] | None = None
    """The schedule that exposes it, if those of the seeds hardly ever do."""
    apps: int = 1
    """The number of applications of a run."""
    moves: int = 0
    """The number of moves that are asked for in a run."""
    seeds: int = 60
    """The number of seeds within which it is caught."""

    def case(self, seed: int) -> Case:
        """Return a run that may expose it."""
        case = Case(seed, self.flow, self.protocol, kinds=self.kinds, beyond=self.beyond)
        sites = 3 if self.faults else 0  # a schedule names its sites by rank
        case = replace(case, then=self.then, faults=self.faults, sites=sites, apps=self.apps)
        return replace(case, moves=self.moves)

    @contextmanager
    def planted(self) -> Iterator[None]:
        """Plant the bug in this context. The memory of results is cleared before and after, because
        right code has filled it, or wrong code."""
        right = self.owner.__dict__[self.method]
        setattr(self.owner, self.method, self.make(right))
        forget()
        try:
            yield
        finally:
            setattr(self.owner, self.method, right)
            forget()
