"""The orders that a site has yet to execute: the oldest epoch first, and within it the stage
nearest to the sinks."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator

from holdfast.core.effects import IngestEpochs, ProcessBundles
from holdfast.core.ids import TaskId

Order = IngestEpochs | ProcessBundles


class OrderQueue:
    """At most one order for each task."""

    def __init__(self) -> None:
        self._heap: list[tuple[int, int, int, Order]] = []
        self._ties = itertools.count()

    def __len__(self) -> int:
        return len(self._heap)

    def __iter__(self) -> Iterator[Order]:
        """In no particular order."""
        return (entry[-1] for entry in self._heap)

    def put(self, order: Order) -> None:
        heapq.heappush(self._heap, (order.first, -order.task[0], next(self._ties), order))

    def pop_first(self, ready: Callable[[Order], bool]) -> Order | None:
        """Remove and return the first order that is ready."""
        if self._heap and ready(self._heap[0][-1]):
            return heapq.heappop(self._heap)[-1]
        for entry in sorted(self._heap)[1:]:
            if ready(entry[-1]):
                self._heap.remove(entry)
                heapq.heapify(self._heap)
                return entry[-1]
        return None

    def remove(self, order: Order) -> None:
        self._drop(lambda other: other is order)

    def drop_task(self, task: TaskId) -> None:
        self._drop(lambda order: order.task == task)

    def _drop(self, unwanted: Callable[[Order], bool]) -> None:
        self._heap = [entry for entry in self._heap if not unwanted(entry[-1])]
        heapq.heapify(self._heap)
