"""What a world with a clock does next: its events in the order of their times."""

from __future__ import annotations

import heapq
import itertools
from typing import Any

from holdfast.core.ids import SiteId


class Agenda:
    """A queue of events by due time. Events that are due at the same time keep their order."""

    def __init__(self) -> None:
        self._events: list[tuple[float, int, str, Any]] = []
        self._ties = itertools.count()
        self._pending: set[tuple[str, SiteId]] = set()
        """What `add_once` has added and `pop` has not returned."""

    def __bool__(self) -> bool:
        return bool(self._events)

    @property
    def next_due(self) -> float:
        return self._events[0][0]

    def add(self, due: float, kind: str, what: Any) -> None:
        heapq.heappush(self._events, (due, next(self._ties), kind, what))

    def add_once(self, due: float, kind: str, site: SiteId) -> None:
        """Add an event of a site, unless one of this kind is waiting."""
        if (kind, site) not in self._pending:
            self._pending.add((kind, site))
            self.add(due, kind, site)

    def pop(self) -> tuple[float, str, Any]:
        """Return the next event: its due time, its kind, and what it is about."""
        due, _, kind, what = heapq.heappop(self._events)
        if isinstance(what, int):
            self._pending.discard((kind, SiteId(what)))
        return due, kind, what
