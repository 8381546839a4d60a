"""The parts of a simulated network of machines: a clock, links and processors.

They know nothing of the contents of messages. Each direction of a link has its own delay and
bandwidth; a machine executes one task after the other.
"""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable
from typing import Any

Act = Callable[..., None]


class Clock:
    """Virtual time in seconds, and the scheduled actions."""

    def __init__(self) -> None:
        self.now = 0.0
        self._due: list[tuple[float, int, Act, tuple[Any, ...]]] = []
        self._ties = itertools.count()

    def at(self, when: float, act: Act, *args: Any) -> None:
        heapq.heappush(self._due, (when, next(self._ties), act, args))

    def after(self, seconds: float, act: Act, *args: Any) -> None:
        self.at(self.now + seconds, act, *args)

    def run(self, until: float) -> None:
        """Run all actions that are due before `until`."""
        due = self._due
        while due and due[0][0] < until:
            self.now, _, act, args = heapq.heappop(due)
            act(*args)
        self.now = until


class Machine:
    """A machine: executes its tasks in the order of submission, one at a time."""

    def __init__(self, clock: Clock, name: str) -> None:
        self.name = name
        self._clock = clock
        self._waiting: deque[tuple[float, Act, tuple[Any, ...]]] = deque()
        self._busy = False

    def do(self, seconds: float, act: Act, *args: Any) -> None:
        """Call `act` once the processor has spent `seconds` on it."""
        self._waiting.append((seconds, act, args))
        if not self._busy:
            self._begin()

    def _begin(self) -> None:
        self._busy = True
        seconds, act, args = self._waiting.popleft()
        self._clock.after(seconds, self._end, act, args)

    def _end(self, act: Act, args: tuple[Any, ...]) -> None:
        self._busy = False
        act(*args)
        if self._waiting and not self._busy:
            self._begin()


class Wires:
    """A link between any two machines. A sent message arrives even if its sender has failed."""

    def __init__(self, clock: Clock, delay: float, bytes_per_s: float) -> None:
        self._clock, self._delay, self._bytes_per_s = clock, delay, bytes_per_s
        self._free: dict[tuple[str, str], float] = {}

    def send(
        self, sender: Machine, receiver: Machine, nbytes: int, arrive: Act, *args: Any
    ) -> None:
        """Call `arrive` when the last byte has arrived; immediately within one machine."""
        if sender is receiver:
            self._clock.after(0.0, arrive, *args)
            return
        link = (sender.name, receiver.name)
        begun = max(self._clock.now, self._free.get(link, 0.0))
        self._free[link] = begun + nbytes / self._bytes_per_s
        self._clock.at(self._free[link] + self._delay, arrive, *args)
