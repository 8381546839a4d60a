"""A state of the model's world as a row of numbers, and the events that lead to the next.

A row has the controller, the `Rest`, then for each site its machine (0: it does not live) and its
`ControlLink`, then a `SiteLink` for each two sites. Equal numbers are equal values: see
`holdfast.lab.model.parts`. States are kept as columns of one array, so that numpy computes a step
of many states at once.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CONTROL = -1
"""The controller's number on links."""

Rows = NDArray[np.int32]
"""States: one line for each column of the row, one place in it for each state."""


class Move(NamedTuple):
    """An event that can happen next. `who` has sites, or sender and receiver; `what` is which of
    several that the machine can do by itself, or a timer."""

    kind: str
    who: tuple[int, ...]
    what: int = 0


class Columns:
    """Where things are in a row of a world with this many sites."""

    def __init__(self, sites: int) -> None:
        self.sites = range(sites)
        self.control, self.rest = 0, 1
        self.machine = [2 + s for s in self.sites]
        self.control_link = [2 + sites + s for s in self.sites]
        pairs = [(a, b) for b in self.sites for a in range(b)]
        self.site_link = {pair: 2 + 2 * sites + i for i, pair in enumerate(pairs)}
        self.count = 2 + 2 * sites + len(pairs)

    def between(self, one: int, other: int) -> tuple[int, int]:
        """The column of the link between two sites, and on which side of it the first is."""
        if one < other:
            return self.site_link[one, other], 0
        return self.site_link[other, one], 1


class Interned:
    """Hashable values; each is a number. The first is 0."""

    def __init__(self, *first: Any) -> None:
        self.all: list[Any] = []
        self._numbers: dict[Any, int] = {}
        for value in first:
            self.number(value)

    def number(self, value: Any) -> int:
        found = self._numbers.get(value)
        if found is None:
            found = self._numbers[value] = len(self.all)
            self.all.append(value)
        return found
