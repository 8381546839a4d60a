"""A model of Hwang and others' (2005) stream processing: nodes, boxes, queues, and three ways to
protect them. It simulates tuple by tuple; the paper's formulas are nowhere in it.

A stream is a chain of boxes, which are on the nodes of its path; from a source to the client. A
node keeps what it has sent in the output queue of each stream until its receivers have confirmed
it, in the way of the approach:

- *passive*: a node sends what has changed to its standby every interval, and then confirms its
  input. The standby goes on from there, and gets what was not confirmed again.
- *active*: a second node gets the same input. It keeps its output to itself, and lets go of it
  when the first one says so.
- *upstream*: input is confirmed (level 0), and released (level 1) when what came of it has been
  confirmed. A node that is lost begins again with what was not released.

Every message has a size and takes its time on its link; `Traffic` counts it when it is sent. A
tuple keeps the number that its source gave it, and nobody takes one twice.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from holdfast.lab.paper.lanes import NONE, Lane, Output, Tuple
from holdfast.lab.paper.layouts import Layout, Parameters
from holdfast.lab.paper.wires import Clock, Host, Wires

Approach = Literal["passive", "active", "upstream"]
APPROACHES: tuple[Approach, ...] = ("passive", "active", "upstream")


@dataclass(slots=True)
class Traffic:
    """Bytes between nodes, and between them and their standbys: of tuples on the way they would
    take anyway, and of all the rest. What sources send and what clients get, and what protects
    the nodes that sources feed, is left out."""

    tuples: int = 0
    extra: int = 0


@dataclass(slots=True)
class Saved:
    """What a standby knows of a lane."""

    queues: list[list[Tuple]]
    heads: list[int]
    kept: list[Tuple]


class Node:
    """A node's part of the query network, or a second one of the same."""

    def __init__(self, system: System, number: int, host: Host) -> None:
        self.system, self.number, self.host = system, number, host
        who = next(system.names)
        hops = [(s, p.index(number)) for s, p in enumerate(system.layout.paths) if number in p]
        self.lanes = {s: Lane(system, host, s, hop, who) for s, hop in hops}
        self.alive = True
        self.saved: dict[int, Saved] = {}
        """At the standby: the last checkpoint. (The node itself holds it for its standby.)"""
        self._told: dict[tuple[int, int], int] = {}
        self._sent: set[tuple[int, int, int]] = set()

    def begin(self) -> None:
        """Say every interval what is to be said."""
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

    def _news(self, lane: Lane, box: int, number: int) -> int:
        """The bytes of an identifier, if it is another than last time."""
        known = self._told.get((lane.stream, box), NONE)
        self._told[lane.stream, box] = number
        return self.system.parameters.id_bytes if number != known else 0

    # --- passive standby ------------------------------------------------------------------------

    def _checkpoint(self) -> None:
        """What was put out since the last one, what is between boxes, and where queues begin."""
        standby = self.system.standby_of(self)
        if standby is None:
            return
        nbytes, saved = 0, {}
        for stream, lane in self.lanes.items():
            between = [(s, i[0]) for s, q in enumerate(lane.queues) if s for i in q]
            keys = {(stream, *place) for place in between} - self._sent
            self._sent = {k for k in self._sent if k[0] != stream} | {
                (stream, *place) for place in between
            }
            nbytes += (len(lane.fresh) + len(keys)) * self.system.parameters.tuple_bytes
            lane.fresh.clear()
            nbytes += self._news(lane, 0, lane.out.confirmed)
            nbytes += sum(self._news(lane, b, h) for b, h in enumerate(lane.heads) if b)
            queues = [list(q) for q in lane.queues[1:]]
            saved[stream] = Saved(queues, list(lane.heads), list(lane.out.kept))
        if nbytes:
            self.system.send_extra(self, standby, nbytes, self.saved.update, saved)
        for lane in self.lanes.values():
            lane.confirm(lane.heads[0])

    def restore(self, saved: dict[int, Saved]) -> None:
        """Be where the node was at its last checkpoint."""
        for stream, known in saved.items():
            lane = self.lanes[stream]
            lane.received, lane.heads = known.heads[0], list(known.heads)
            lane.out.kept.extend(known.kept)
            for box, queue in enumerate(known.queues, 1):
                for item in queue:
                    lane.enqueue(box, item)

    # --- active standby -------------------------------------------------------------------------

    def _trim_second(self) -> None:
        """Tell the second node, in terms of the input, what it need not keep any more."""
        others = self.system.nodes[self.number][1:]
        causes = {s: lane.cause() for s, lane in self.lanes.items()}
        nbytes = sum(self._news(self.lanes[s], 0, cause) for s, cause in causes.items())
        for other in others if nbytes else []:
            self.system.send_extra(self, other.host, nbytes, other.trim, causes)

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
        self.nodes = {n: [Node(self, n, self._host(f"node {n}"))] for n in numbers}
        self._standbys: dict[int, Host] = {}
        for n in numbers:
            self._stand_by(n)
        client = self._host("client")
        self._ends = [Lane(self, client, s, len(path), NONE) for s, path in enumerate(layout.paths)]
        self._sources = [
            Output(self, self._host(f"source {s}"), s, 0) for s in range(len(layout.paths))
        ]
        for source in self._sources:
            drawn = random.Random(f"{seed}/{source.stream}")
            self.clock.after(drawn.expovariate(parameters.rate), self._make, source, 0, drawn)
        for node in [node for nodes in self.nodes.values() for node in nodes]:
            node.begin()
        self.clock.after(parameters.interval_s * self.random.random(), self._client_tick)

    def _host(self, name: str) -> Host:
        return Host(self.clock, name)

    def _stand_by(self, number: int) -> None:
        host = self._host(f"standby {number}")
        if self.approach == "passive":
            self._standbys[number] = host
        elif self.approach == "active":
            second = Node(self, number, host)
            for lane in second.lanes.values():
                lane.out.silent = True
            self.nodes[number].append(second)

    def _make(self, source: Output, number: int, drawn: random.Random) -> None:
        """A tuple comes into being; how long until the next is drawn, as of a Poisson process."""
        source.emit((number, self.clock.now))
        self.clock.after(
            drawn.expovariate(self.parameters.rate), self._make, source, number + 1, drawn
        )

    def _client_tick(self) -> None:
        self.clock.after(self.parameters.interval_s, self._client_tick)
        for lane in self._ends:
            lane.confirm(lane.received)

    def watch(self, node: int) -> list[list[tuple[float, float]]]:
        """What comes from a node, or from whoever takes its place, stream by stream: when each
        tuple was made, and when it came to where it goes next."""
        found = []
        for stream, path in enumerate(self.layout.paths):
            if node in path:
                lane = self.receivers(stream, path.index(node) + 1)[0]
                lane.arrivals = []
                found.append(lane.arrivals)
        return found

    # --- who is where ---------------------------------------------------------------------------

    def receivers(self, stream: int, hop: int) -> Sequence[Lane]:
        """Where a stream goes at one hop of its path: a node, and its second if there is one."""
        path = self.layout.paths[stream]
        if hop == len(path):
            return self._ends[stream : stream + 1]
        return [node.lanes[stream] for node in self.nodes[path[hop]]]

    def _producer(self, lane: Lane) -> Output:
        if lane.hop == 0:
            return self._sources[lane.stream]
        before = self.layout.paths[lane.stream][lane.hop - 1]
        return self.nodes[before][0].lanes[lane.stream].out

    def standby_of(self, node: Node) -> Host | None:
        return self._standbys.get(node.number)

    # --- messages -------------------------------------------------------------------------------

    def _count(self, lane: Lane, nbytes: int, extra: bool) -> None:
        if lane.client or lane.hop == 0:
            return
        if extra:
            self.traffic.extra += nbytes
        else:
            self.traffic.tuples += nbytes

    def send_tuple(self, out: Output, lane: Lane, item: Tuple, again: bool) -> None:
        nbytes = self.parameters.tuple_bytes
        self._count(lane, nbytes, extra=again)
        self.wires.send(out.host, lane.host, nbytes, lane.take, item)

    def send_ack(self, lane: Lane, level: int, number: int) -> None:
        nbytes, out = self.parameters.id_bytes, self._producer(lane)
        self._count(lane, nbytes, extra=True)
        self.wires.send(lane.host, out.host, nbytes, out.on_ack, lane.who, level, number)

    def send_extra(self, node: Node, to: Host, nbytes: int, arrive: object, what: object) -> None:
        """From a node to its standby."""
        lane = next(iter(node.lanes.values()))
        self._count(lane, nbytes, extra=True)
        assert callable(arrive)
        self.wires.send(node.host, to, nbytes, arrive, what)

    # --- failures -------------------------------------------------------------------------------

    def crash(self, number: int) -> None:
        """A node is gone; after a while that is noticed, and it is recovered."""
        self._stop(self.nodes[number][0])
        self.clock.after(self.parameters.detection_s, self._recover, number)

    def _stop(self, node: Node) -> None:
        node.alive = False
        for lane in node.lanes.values():
            lane.alive = False

    def _recover(self, number: int) -> None:
        lost = self.nodes[number].pop(0)
        if self.approach == "active":
            (node,) = self.nodes[number]
        else:
            node = Node(self, number, self._new_host(number))
            self.nodes[number] = [node]
            node.restore(lost.saved)
            self._standbys.pop(number, None)
            node.begin()
        for lane in node.lanes.values():
            lane.out.silent = False
            lane.out.resend()
            if self.approach != "active":
                self._producer(lane).resend()

    def _new_host(self, number: int) -> Host:
        if self.approach == "passive":
            return self._standbys[number]
        if self.layout.spares:
            return self._host("spare")
        living = [n for n in self.nodes if n != number]
        return self.nodes[self.random.choice(living)][0].host
