"""One stream on one node of the model: its boxes with their queues, and its output queue."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from holdfast.lab.paper.wires import Machine

if TYPE_CHECKING:
    from holdfast.lab.paper.model import System

NONE = -1
"""The number before that of a stream's first tuple."""

Tuple = tuple[int, float]
"""A tuple's number in its stream, and the time of its creation."""


class Output:
    """The output queue of one stream, at a node or at its source."""

    def __init__(self, system: System, machine: Machine, stream: int, hop: int) -> None:
        self.system, self.machine, self.stream, self.hop = system, machine, stream, hop
        self.kept: deque[Tuple] = deque()
        self.silent = False
        self.confirmed = [NONE] * system.parameters.k
        """By level: the last tuple that all receivers have acknowledged."""
        self.lane: ModelLane | None = None
        """The lane that emits the tuples; None at a source."""
        self._acked: dict[tuple[int, int], int] = {}

    def emit(self, item: Tuple) -> None:
        self.kept.append(item)
        if not self.silent:
            for place, lane in enumerate(self.system.receivers(self.stream, self.hop)):
                self.system.send_tuple(self, lane, item, again=place > 0)

    def resend(self) -> None:
        """Send all kept tuples."""
        for item in self.kept:
            for lane in self.system.receivers(self.stream, self.hop):
                self.system.send_tuple(self, lane, item, again=True)

    def on_ack(self, who: int, level: int, number: int) -> None:
        if self.lane is not None and not self.lane.alive:
            return
        k, upstream = self.system.parameters.k, self.system.approach == "upstream"
        self._acked[level, who] = number
        living = self.system.receivers(self.stream, self.hop)
        low = min(self._acked.get((level, lane.who), NONE) for lane in living)
        last = self.hop == len(self.system.layout.paths[self.stream])
        if level == k or not upstream or last:
            self.trim(low)
        # The client is not lost, so its acknowledgement is one of every level. Elsewhere one of a
        # level implies those below it.
        for known in range(k if last else min(level + 1, k)):
            self.confirmed[known] = max(low, self.confirmed[known])
        if upstream and self.lane is not None:
            self.lane.release()

    def trim(self, number: int) -> None:
        """Drop all tuples up to this one."""
        while self.kept and self.kept[0][0] <= number:
            self.kept.popleft()


class ModelLane:
    """One stream's boxes on a node, with the queue before each; or the stream's end at the
    client."""

    def __init__(self, system: System, machine: Machine, stream: int, hop: int, who: int) -> None:
        self.system, self.machine, self.stream, self.hop, self.who = (
            system,
            machine,
            stream,
            hop,
            who,
        )
        self.alive = True
        self.arrivals: list[tuple[float, float]] | None = None
        """If the lane is watched: when each tuple was created, and when it arrived."""
        path = system.layout.paths[stream]
        self.client = hop == len(path)
        depth = 0 if self.client else system.layout.boxes[stream][hop]
        self.passes = 1.0 if self.client else system.layout.selectivity.get(path[hop], 1.0)
        self.queues: list[deque[Tuple]] = [deque() for _ in range(depth)]
        self.heads = [NONE] * depth
        """The last tuple that each box has processed."""
        self.received = self._acked = NONE
        self.released = [NONE] * (1 + system.parameters.k)
        """By level: the last tuple that was acknowledged to the producer."""
        self.out = Output(system, machine, stream, hop + 1)
        self.out.lane = self
        self.emitted: list[Tuple] = []
        """The tuples emitted since the last checkpoint."""

    def receive(self, item: Tuple) -> None:
        """Accept a tuple, unless it has been received before."""
        if not self.alive or item[0] <= self.received:
            return
        self.received = item[0]
        if self.arrivals is not None:
            self.arrivals.append((item[1], self.system.clock.now))
        if not self.client:
            self.enqueue(0, item)

    def enqueue(self, box: int, item: Tuple) -> None:
        self.queues[box].append(item)
        self.machine.do(self.system.parameters.box_s, self._run, box)

    def _run(self, box: int) -> None:
        if not self.alive:
            return
        item = self.queues[box].popleft()
        self.heads[box] = item[0]
        if box == 0 and not self._passes(item[0]):
            return
        if box + 1 < len(self.queues):
            self.enqueue(box + 1, item)
        else:
            self.emitted.append(item)
            self.out.emit(item)

    def _passes(self, number: int) -> bool:
        """Return whether the first box passes a tuple; a function of its number and stream."""
        if self.passes >= 1.0:
            return True
        mixed = (number * 0x9E3779B97F4A7C15 + self.stream * 0xD1B54A32D192ED03) % (1 << 64)
        mixed = (mixed ^ (mixed >> 29)) * 0xBF58476D1CE4E5B9 % (1 << 64)
        return (mixed >> 32) < self.passes * (1 << 32)

    def cause(self, level: int = 0) -> int:
        """Return the last input tuple all of whose results have been confirmed at a level. A tuple
        that was filtered out counts as confirmed, like the paper's flow tuples."""
        waiting = [q[0][0] for q in self.queues if q]
        waiting += [item[0] for item in self.out.kept if item[0] > self.out.confirmed[level]][:1]
        return min(waiting) - 1 if waiting else self.received

    def confirm(self, number: int) -> None:
        """Send a level-0 acknowledgement if it is newer than the last."""
        if number > self._acked:
            self._acked = number
            self.system.send_ack(self, 0, number)

    def release(self) -> None:
        """Acknowledge the input whose results have been acknowledged one level below, the highest
        level first: it implies the others."""
        implied = NONE
        for level in range(self.system.parameters.k, 0, -1):
            number = self.cause(level - 1)
            if number > max(implied, self.released[level]):
                self.released[level] = number
                self.system.send_ack(self, level, number)
            implied = max(implied, self.released[level])
