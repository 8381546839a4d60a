"""Runs Holdfast under the paper's conditions: the real nodes on simulated sites, whose links have
the paper's delay and bandwidth. Every message takes the bytes of its real encoding.

The flow is a source, one keyed stage and a sink. Source and sink are pairs, even if the stage is
not protected; the stage is the paper's node. No two of their replicas share a site. Windows of one
tick of event time permit every protection of the stage, and give one row for each row. An epoch has
the rows of one communication interval; sites send acks and checkpoints at that interval, too.

A site that dies is silent: all other sites and the controller learn of the failure at the same
time, when it is detected.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.nodes import KeyedNode
from holdfast.api.options import Options
from holdfast.api.protection import Protection, active, none, pairs, passive, rollback, upstream
from holdfast.api.streams import Stream
from holdfast.connectors.sinks import Authority, Sink, SinkWriter, discard
from holdfast.connectors.sources import Position, Source, SplitReader
from holdfast.control import events as ev
from holdfast.control.node import ControlNode
from holdfast.core.controller import Controller
from holdfast.core.effects import ControllerEffect
from holdfast.core.ids import GroupId, SiteId, StageId
from holdfast.core.layout import View
from holdfast.core.sequencer import Budget
from holdfast.engine.batches import empty
from holdfast.engine.expressions import col
from holdfast.errors import InvariantError
from holdfast.lab.paper.layouts import Parameters
from holdfast.lab.paper.measure import Recovery, recovery_of
from holdfast.lab.sim.links import Down, Link, SitePort
from holdfast.lab.sim.timed import Pace, TimedWorld
from holdfast.lab.sim.world import World
from holdfast.net import wire
from holdfast.plan.planner import plan, shape
from holdfast.site.node import SiteNode

PROTECTIONS = ("passive", "active", "upstream", "rollback", "pairs")
WARM_S = 0.3
AFTER_S = 0.1
"""Duration of the simulation after a failure was detected, in addition to some intervals."""
NEVER_S = 1e6
FIELDS = ("a", "b", "c")
"""Additional columns of a row, of eight bytes each."""
SCHEMA = pa.schema(
    [("n", pa.int64()), ("k", pa.int64()), ("due_us", pa.int64()), ("flag", pa.int16())]
    + [(name, pa.int64()) for name in FIELDS]
)
"""Fifty bytes per row."""


def protection(name: str, interval_s: float, k: int = 1) -> Protection:
    """Return a protection under which `k` sites may be lost at once. Active and passive standby
    have one further site in any case."""
    # A millisecond less than the interval of the clock that polls it, so that every poll is due.
    every_ms = max(1, round(interval_s * 1e3) - 1)
    protections = {
        "none": none(),
        "passive": passive(interval=every_ms / 1e3, failure_domain="process"),
        "active": active(failure_domain="process"),
        "upstream": upstream(k=k, failure_domain="process"),
        "rollback": rollback(failure_domain="process"),
        "pairs": pairs(replicas=1 + k, failure_domain="process"),
    }
    return protections[name]


class _PoissonSource(Source):
    """A source whose rows arrive at the times of a Poisson process, determined by the seed."""

    schema = SCHEMA

    def __init__(self, rate: float, seed: int, seconds: float) -> None:
        random_ = random.Random(f"{seed}/0")
        count = int(rate * seconds * 1.3) + 100
        gaps_us = [1 + int(1e6 * random_.expovariate(rate)) for _ in range(count)]
        self.due_us = np.cumsum(gaps_us)
        self.world: TimedWorld | None = None

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        return _PoissonReader(self, offset)

    def rows(self, begin: int, end: int) -> pa.RecordBatch:
        n = np.arange(begin, end)
        columns = dict.fromkeys(FIELDS, n * 7)
        return pa.RecordBatch.from_pydict(
            {"n": n, "k": n % 64, "due_us": self.due_us[begin:end], "flag": n % 2, **columns},
            schema=SCHEMA,
        )


class _PoissonReader(SplitReader):
    def __init__(self, source: _PoissonSource, offset: int) -> None:
        self._source, self._next = source, offset

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        source, begin = self._source, self._next
        assert source.world is not None
        now = np.inf if due else source.world.time * 1e6
        end = min(int(np.searchsorted(source.due_us, now)), begin + rows_max)
        if end <= begin:
            return empty(SCHEMA)
        self._next = end
        return source.rows(begin, end)


class _ArrivalSink(Sink):
    """Records when each row arrived, and when it was due."""

    def __init__(self, world: WiredWorld) -> None:
        self.world = world

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return _ArrivalWriter(self.world)


class _ArrivalWriter(SinkWriter):
    def __init__(self, world: WiredWorld) -> None:
        self._world = world

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        now = self._world.time
        numbers, due = batch.column("n").to_pylist(), batch.column("due_us").to_pylist()
        self._world.rows += numbers
        self._world.arrivals += [(us / 1e6, now) for us in due]


class _Spread(Controller):
    """Puts every replica on a separate site, and leaves the last site for rebuilt tasks.

    Otherwise a stage's second replica would share a site with the source's, and its input would
    cost nothing.
    """

    def _commit(self, view: View) -> list[ControllerEffect]:
        if self.view is None:
            free, placed = iter(view.members), []
            for (group,) in view.groups:
                replicas = tuple(next(free) for _ in group.replicas)
                standbys = tuple(next(free) for _ in group.standbys)
                placed.append((replace(group, replicas=replicas, standbys=standbys),))
            view = replace(view, groups=tuple(placed))
        return super()._commit(view)


class WiredWorld(TimedWorld):
    """A world whose messages have their real encoding, and take a time that depends on its size."""

    def __init__(
        self,
        flow: Flow,
        source: _PoissonSource,
        options: Options,
        pace: Pace,
        seed: int,
        sites: int,
    ):
        self.site_count = sites
        self.sent_bytes = self.input_bytes = self.ack_bytes = 0
        """Bytes between sites; among them the input of the keyed stages, and their acks of it.
        Messages from and to the controller do not count."""
        self.arrivals: list[tuple[float, float]] = []
        self.rows: list[int] = []
        super().__init__(flow, sites=sites, seed=seed, options=options, pace=pace)
        source.world = self
        self.keyed = [s for s in self.plan.stages if s.source is None and s.sink is None]
        self._inputs = {exchange.id for stage in self.keyed for exchange in stage.inputs}
        for stage in self.plan.sinks:
            stage.sink = _ArrivalSink(self)

    def make_control(self, app: int) -> ControlNode:
        return ControlNode(
            self.shape, self.options, holder="0", sites=self.site_count, machine=_Spread
        )

    def make_node(self, site: SiteId) -> SiteNode:
        return SiteNode(self.plan, site, self.options, SitePort(self, site), now=self.now)

    def packed(self, message: wire.Message, body: list[Any] | None) -> tuple[wire.Message, Any]:
        return World.packed(self, message, body)

    def _schedule(self, link: Link, item: Any) -> None:
        """Send the messages of a link one after the other; each arrives with its last byte."""
        nbytes = len(wire.encode(item[0])) + len(item[1]) if isinstance(item, tuple) else 0
        if min(link) >= 0 and isinstance(item, tuple):
            self._count(item[0], nbytes)
        begun = max(self._free.get(link, 0.0), self.time)
        self._free[link] = begun + nbytes / self.pace.bytes_per_s
        self.add(self._free[link] + self.pace.delay - self.time, "net", link)

    def _count(self, message: wire.Message, nbytes: int) -> None:
        self.sent_bytes += nbytes
        if isinstance(message, wire.Bundle) and message.key.exchange in self._inputs:
            self.input_bytes += nbytes
        elif isinstance(message, wire.Acks) and message.acks[0].exchange in self._inputs:
            self.ack_bytes += nbytes

    def fall_silent(self, site: SiteId, detected_after: float) -> None:
        """End a process. Messages that it has sent still arrive, and no other process learns of the
        failure until it is detected."""
        del self.nodes[site]
        for link in [k for k in self.network if k[1] == site]:
            self.network[link] = deque()
        self.add(detected_after, "do", lambda world: world.detect(site))

    def detect(self, site: SiteId) -> None:
        for link in [k for k in self.network if site in k]:
            if link[0] == site and link[1] in self.nodes:
                self.network[link] = deque([Down()])
                self.deliver(link)
            self.network.pop(link, None)
        self.control(0, ev.ProcessExited(site, "crashed"))
        self.control(0, ev.TimerFired(ev.InquireTimer()))
        for other in list(self.nodes):
            self._rouse(other)


@dataclass(frozen=True, slots=True)
class PaperRun:
    """The parameters of a run: see `world`."""

    protection: str
    parameters: Parameters
    seed: int = 0
    boxes: int = 1
    selectivity: float = 1.0
    seconds: float = 2.0
    stages: int = 1
    """How many keyed stages there are in a row, each with the same protection."""

    @property
    def sites(self) -> int:
        """A site for each replica and standby; at least two for a stage, of which the second is
        for a task that is rebuilt."""
        source = _PoissonSource(self.parameters.rate, self.seed, self.seconds)
        stages = shape(plan(self._flow(source)), 1).stages
        return sum(max(2, stage.guard.wanted) for stage in stages)

    def world(self) -> WiredWorld:
        parameters, interval = self.parameters, self.parameters.interval_s
        source = _PoissonSource(parameters.rate, self.seed, self.seconds + 2.0)
        rows = int(parameters.rate * interval)
        pace = Pace(
            delay=parameters.delay_s,
            spread=0.0,
            bytes_per_s=parameters.bytes_per_s,
            work=parameters.box_s * rows * self.boxes**0.5,
            poll=interval,
            part=0.0,
            acks=interval,
            retry_stalled=NEVER_S,
            relaunch=NEVER_S,
            arbiter=0.0,
        )
        options = Options(
            partitions=1,
            budget=Budget(epoch_rows_max=10_000, epochs_in_flight_max=60, small_in_flight_max=60),
            window=64,
            block_rows=10_000,
            read_ahead_rows=10_000,
            lease=NEVER_S,
        )
        flow = self._flow(source)
        return WiredWorld(flow, source, options, pace, self.seed, self.sites)

    def acks(self) -> float:
        """Return the bytes of the stage's acks relative to its input, in percent."""
        world = self.ran()
        return 100.0 * world.ack_bytes / world.input_bytes

    def bytes_a_row(self) -> float:
        """Return the bytes of a row on its way to the stage."""
        world = self.ran()
        rows = sum(record.rows for record in world.records)
        return world.input_bytes / rows

    def ran(self) -> WiredWorld:
        """Return the world after the whole run."""
        world = self.world()
        _go(world, WARM_S + self.seconds)
        return world

    def _flow(self, source: _PoissonSource) -> Flow:
        # The ends have as many replicas whatever the stages' protection: they are not compared.
        ends = pairs(replicas=self.parameters.k + 1, failure_domain="process")
        flow = Flow("paper", protect=ends)
        results: Stream = flow.source("sensor", source, event_time="n")
        others = {name: F.max(name) for name in (*FIELDS, "due_us", "flag")}
        for _ in range(self.stages):
            windows = results.key_by("k").window(time=1).agg(**others)
            results = windows.select("k", *others, n=col("window_start"))
        if self.selectivity < 1.0:
            results = results.filter(col("n") * 7919 % 1_000 < round(1_000 * self.selectivity))
        for _ in range(round(self.boxes**0.5) - 1):
            results = results.with_columns(a=col("a") + 0)
        results.sink("client", discard())
        interval, k = self.parameters.interval_s, self.parameters.k
        for node in flow.nodes:
            if isinstance(node, KeyedNode):
                node.protection = protection(self.protection, interval, k)
        return flow


def overhead(run: PaperRun) -> float:
    """Return the additional bytes between sites due to the stage's protection, relative to its
    input, in percent."""
    protected, _ = _traffic(run)
    unprotected, input_bytes = _traffic(replace(run, protection="none"))
    return 100.0 * (protected - unprotected) / input_bytes


@cache
def _traffic(run: PaperRun) -> tuple[int, int]:
    """Return the bytes between sites, and among them the stage's input."""
    world = run.world()
    _go(world, WARM_S)
    begun = world.sent_bytes, world.input_bytes
    _go(world, WARM_S + run.seconds)
    return world.sent_bytes - begun[0], world.input_bytes - begun[1]


def recovery(run: PaperRun) -> Recovery:
    """Crash the site that computes the keyed stage, and measure the recovery."""
    arrivals, fails_at = crashed(run)
    return recovery_of(arrivals, fails_at, fails_at + run.parameters.detection_s)


def crashed(run: PaperRun) -> tuple[list[tuple[float, float]], float]:
    """Crash the site that computes the first keyed stage, at a moment determined by the seed.
    Return the creation and arrival times of the rows, and that moment."""
    world = run.world()
    interval = run.parameters.interval_s
    _go(world, WARM_S + 3 * interval + 0.1 * random.Random(run.seed).random())
    assert world.controller.view is not None
    task = (StageId(world.keyed[0].id), GroupId(0))
    victim = world.controller.view.group(task).replicas[0]
    fails_at = world.time
    world.fall_silent(victim, run.parameters.detection_s)
    _go(world, fails_at + run.parameters.detection_s + AFTER_S + 4 * interval)
    if len(set(world.rows)) != len(world.rows) or world.rows != sorted(world.rows):
        raise InvariantError("rows arrived twice, or in the wrong order")
    return world.arrivals, fails_at


def _go(world: WiredWorld, until: float) -> None:
    while world.agenda and world.agenda.next_due < until:
        world.step()
        if world.error is not None:
            raise world.error
    world.time = until
