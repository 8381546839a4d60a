"""A model of Hwang and others' (2005) stream processing: nodes, boxes, queues, and three approaches
to protection. It simulates every tuple and does not use the paper's formulas.

A stream is a chain of boxes on the nodes of its path, from a source to the client. A node keeps the
tuples that it has sent in the output queue of each stream until the receivers have confirmed them.
When they confirm depends on the approach:

- *passive*: a node sends its changes to its standby every interval, and then confirms its input.
  After a failure the standby continues from there, and receives unconfirmed tuples again.
- *active*: a second node gets the same input. It withholds its output, and drops it when the first
  node tells it to.
- *upstream*: a node confirms input (level 0), and releases it (level 1) once its results have been
  confirmed. A node that replaces a lost one starts with the input that was not released.

With `Parameters.k` above 1 there are that many standbys or further nodes, or levels of release.

Every message has a size and a transmission time on its link; `Traffic` counts it when it is sent. A
tuple keeps the number that its source gave it, and receivers ignore tuples they already have.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.lab.paper.lanes import NONE, ModelLane, Output, Tuple
from holdfast.lab.paper.layouts import Layout, Parameters
from holdfast.lab.paper.wires import Clock, Machine, Wires

Approach = Literal["passive", "active", "upstream"]
APPROACHES: tuple[Approach, ...] = ("passive", "active", "upstream")


@dataclass(slots=True)
class Traffic:
    """Bytes between nodes, and between nodes and their standbys: of tuples that would be sent
    without protection, and of everything else. Traffic from sources and to clients, and for the
    protection of nodes with input from sources, is not counted."""

    tuples: int = 0
    extra: int = 0


@dataclass(slots=True)
class Saved:
    """A standby's checkpoint of a lane."""

    queues: list[list[Tuple]]
    heads: list[int]
    kept: list[Tuple]


class ModelNode:
    """A node's part of the query network, or its second instance."""

    def __init__(self, system: System, number: int, machine: Machine) -> None:
        self.system, self.number, self.machine = system, number, machine
        who = next(system.names)
        hops = [(s, p.index(number)) for s, p in enumerate(system.layout.paths) if number in p]
        self.lanes = {s: ModelLane(system, machine, s, hop, who) for s, hop in hops}
        self.alive = True
        self.saved: dict[int, Saved] = {}
        """The last checkpoint at the standby. (The node object holds it for its standby.)"""
        self._last_ids: dict[tuple[int, int], int] = {}
        self._sent: set[tuple[int, int, int]] = set()

    def begin(self) -> None:
        """Start to send checkpoints or confirmations every interval."""
        every = self.system.parameters.interval_s
        self.system.clock.after(every * self.system.random.random(), self._tick)

    def _tick(self) -> None:
        if not self.alive:
            return
        self.system.clock.after(self.system.parameters.interval_s, self._tick)
        if self.system.approach == "passive":
            self._checkpoint()
            return
        for lane in self.lanes.values():
            lane.confirm(lane.received)
        if self.system.approach == "active" and self.system.nodes[self.number][0] is self:
            self._trim_second()

    def _id_bytes(self, lane: ModelLane, box: int, number: int) -> int:
        """Return the bytes of an identifier, or 0 if it is the same as last time."""
        last = self._last_ids.get((lane.stream, box), NONE)
        self._last_ids[lane.stream, box] = number
        return self.system.parameters.id_bytes if number != last else 0

    # --- passive standby ------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        """Send a checkpoint: the tuples emitted since the last one, the tuples between boxes, and
        the heads of the queues."""
        standbys = self.system.standbys_of(self)
        if not standbys:
            return
        nbytes, saved = 0, {}
        for stream, lane in self.lanes.items():
            between = [(s, i[0]) for s, q in enumerate(lane.queues) if s for i in q]
            keys = {(stream, *place) for place in between} - self._sent
            self._sent = {k for k in self._sent if k[0] != stream} | {
                (stream, *place) for place in between
            }
            nbytes += (len(lane.emitted) + len(keys)) * self.system.parameters.tuple_bytes
            lane.emitted.clear()
            nbytes += self._id_bytes(lane, 0, lane.out.confirmed[0])
            nbytes += sum(self._id_bytes(lane, b, h) for b, h in enumerate(lane.heads) if b)
            queues = [list(q) for q in lane.queues[1:]]
            saved[stream] = Saved(queues, list(lane.heads), list(lane.out.kept))
        for standby in standbys if nbytes else []:
            self.system.send_extra(self, standby, nbytes, self.saved.update, saved)
        for lane in self.lanes.values():
            lane.confirm(lane.heads[0])

    def restore(self, saved: dict[int, Saved]) -> None:
        """Restore the state of the last checkpoint."""
        for stream, known in saved.items():
            lane = self.lanes[stream]
            lane.received, lane.heads = known.heads[0], list(known.heads)
            lane.out.kept.extend(known.kept)
            for box, queue in enumerate(known.queues, 1):
                for item in queue:
                    lane.enqueue(box, item)

    # --- active standby -------------------------------------------------------------------------

    def _trim_second(self) -> None:
        """Tell the second node which results it can drop, in terms of the input."""
        others = self.system.nodes[self.number][1:]
        causes = {s: lane.cause() for s, lane in self.lanes.items()}
        nbytes = sum(self._id_bytes(self.lanes[s], 0, cause) for s, cause in causes.items())
        for other in others if nbytes else []:
            self.system.send_extra(self, other.machine, nbytes, other.trim, causes)

    def trim(self, causes: dict[int, int]) -> None:
        for stream, number in causes.items():
            self.lanes[stream].out.trim(number)


class System:
    """Sources, nodes and the client, in virtual time."""

    def __init__(
        self, layout: Layout, approach: Approach, parameters: Parameters, seed: int
    ) -> None:
        self.layout, self.approach, self.parameters = layout, approach, parameters
        self.random = random.Random(f"{approach}/{seed}")
        self.clock = Clock()
        self.wires = Wires(self.clock, parameters.delay_s, parameters.bytes_per_s)
        self.traffic = Traffic()
        self.names = iter(range(1 << 30))
        numbers = sorted({n for path in layout.paths for n in path})
        self.nodes = {n: [ModelNode(self, n, self._machine(f"node {n}"))] for n in numbers}
        self._standbys: dict[int, list[Machine]] = {}
        for n in numbers:
            for copy in range(parameters.k):
                self._stand_by(n, copy)
        client = self._machine("client")
        self._ends = [
            ModelLane(self, client, s, len(path), NONE) for s, path in enumerate(layout.paths)
        ]
        self._sources = [
            Output(self, self._machine(f"source {s}"), s, 0) for s in range(len(layout.paths))
        ]
        for source in self._sources:
            random_ = random.Random(f"{seed}/{source.stream}")
            self.clock.after(random_.expovariate(parameters.rate), self._make, source, 0, random_)
        for node in [node for nodes in self.nodes.values() for node in nodes]:
            node.begin()
        self.clock.after(parameters.interval_s * self.random.random(), self._client_tick)

    def _machine(self, name: str) -> Machine:
        return Machine(self.clock, name)

    def _stand_by(self, number: int, copy: int) -> None:
        machine = self._machine(f"standby {number}.{copy}")
        if self.approach == "passive":
            self._standbys.setdefault(number, []).append(machine)
        elif self.approach == "active":
            second = ModelNode(self, number, machine)
            for lane in second.lanes.values():
                lane.out.silent = True
            self.nodes[number].append(second)

    def _make(self, source: Output, number: int, random_: random.Random) -> None:
        """Create a tuple, and schedule the next one of the Poisson process."""
        source.emit((number, self.clock.now))
        self.clock.after(
            random_.expovariate(self.parameters.rate), self._make, source, number + 1, random_
        )

    def _client_tick(self) -> None:
        self.clock.after(self.parameters.interval_s, self._client_tick)
        for lane in self._ends:
            lane.confirm(lane.received)

    def watch(self, node: int) -> list[list[tuple[float, float]]]:
        """Record the tuples of a node, or of its replacement. Return a list for each stream, which
        gets the creation time of each tuple and its arrival time at the next node."""
        watched = []
        for stream, path in enumerate(self.layout.paths):
            if node in path:
                lane = self.receivers(stream, path.index(node) + 1)[0]
                lane.arrivals = []
                watched.append(lane.arrivals)
        return watched

    # --- placement ------------------------------------------------------------------------------

    def receivers(self, stream: int, hop: int) -> Sequence[ModelLane]:
        """Return the receivers of a stream at one hop of its path: a node, and its second instance
        if there is one."""
        path = self.layout.paths[stream]
        if hop == len(path):
            return self._ends[stream : stream + 1]
        return [node.lanes[stream] for node in self.nodes[path[hop]]]

    def _producer(self, lane: ModelLane) -> Output:
        if lane.hop == 0:
            return self._sources[lane.stream]
        before = self.layout.paths[lane.stream][lane.hop - 1]
        return self.nodes[before][0].lanes[lane.stream].out

    def standbys_of(self, node: ModelNode) -> list[Machine]:
        return self._standbys.get(node.number, [])

    # --- messages -------------------------------------------------------------------------------

    def _count(self, lane: ModelLane, nbytes: int, extra: bool) -> None:
        if lane.client or lane.hop == 0:
            return
        if extra:
            self.traffic.extra += nbytes
        else:
            self.traffic.tuples += nbytes

    def send_tuple(self, out: Output, lane: ModelLane, item: Tuple, again: bool) -> None:
        nbytes = self.parameters.tuple_bytes
        self._count(lane, nbytes, extra=again)
        self.wires.send(out.machine, lane.machine, nbytes, lane.receive, item)

    def send_ack(self, lane: ModelLane, level: int, number: int) -> None:
        nbytes, out = self.parameters.id_bytes, self._producer(lane)
        self._count(lane, nbytes, extra=True)
        self.wires.send(lane.machine, out.machine, nbytes, out.on_ack, lane.who, level, number)

    def send_extra(
        self, node: ModelNode, to: Machine, nbytes: int, arrive: object, what: object
    ) -> None:
        """Send a message from a node to its standby."""
        lane = next(iter(node.lanes.values()))
        self._count(lane, nbytes, extra=True)
        assert callable(arrive)
        self.wires.send(node.machine, to, nbytes, arrive, what)

    # --- failures -------------------------------------------------------------------------------

    def crash(self, number: int) -> None:
        """Crash a node, and recover it after the detection time."""
        self._stop(self.nodes[number][0])
        self.clock.after(self.parameters.detection_s, self._recover, number)

    def _stop(self, node: ModelNode) -> None:
        node.alive = False
        for lane in node.lanes.values():
            lane.alive = False

    def _recover(self, number: int) -> None:
        lost = self.nodes[number].pop(0)
        if self.approach == "active":
            node = self.nodes[number][0]
        else:
            node = ModelNode(self, number, self._new_machine(number))
            self.nodes[number] = [node]
            node.restore(lost.saved)
            self._standbys[number] = self._standbys.get(number, [])[1:]
            node.begin()
        for lane in node.lanes.values():
            lane.out.silent = False
            lane.out.resend()
            if self.approach != "active":
                self._producer(lane).resend()

    def _new_machine(self, number: int) -> Machine:
        if self.approach == "passive":
            return self._standbys[number][0]
        if self.layout.spares:
            return self._machine("spare")
        living = [n for n in self.nodes if n != number]
        return self.nodes[self.random.choice(living)][0].machine
