"""Tasks that are rebuilt, in the simulated world: what they begin with, where they are right."""

from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
import pytest

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.connectors.sources import Source, SplitReader, rows
from holdfast.core.sequencer import Budget
from holdfast.engine.batches import empty
from holdfast.engine.expressions import col
from holdfast.lab.sim import explore, flows, timed
from holdfast.lab.sim.explore import Case, run
from holdfast.lab.sim.faults import Fault
from holdfast.lab.sim.timed import TimedWorld
from holdfast.sinks import discard

Patch = pytest.MonkeyPatch


def seldom(rows_in: int) -> Flow:
    """Windows with few rows, and the largest of them: a window that is known in part may be taken
    for such a one."""
    flow = Flow("seldom")
    source = flow.source("events", rows(flows._events(rows_in)), event_time="ts")
    counts = source.key_by("k").window(time=20, lateness=5).agg(n=F.count(), x=F.sum("v"))
    few = counts.filter(col("n") <= 1).select("window_start", "n", "x", g=col("k") % 3)
    few.key_by("g").window(time=60).agg(most=F.max("x"), n=F.sum("n")).sink("out", discard())
    return flow


def test_two_stages_in_a_row_are_lost_and_the_second_takes_no_half_known_window(
    monkeypatch: Patch,
) -> None:
    """They have one partition each: nobody else knows where the first one is right."""
    monkeypatch.setitem(flows.FLOWS, "seldom", seldom)
    budget = Budget(epoch_rows_max=10, epochs_in_flight_max=4)
    options = replace(
        explore.OPTIONS, partitions=1, block_rows=5, read_ahead_rows=20, budget=budget
    )
    monkeypatch.setattr(explore, "OPTIONS", options)
    for n in range(0, 40, 2):
        fault = Fault("crash of two", 0.02 + n * 0.0012, who=1, other=1)
        done = run(Case(n * 4, "seldom", "upstream", sites=6, faults=(fault,)))
        assert done.problem is None, f"{n}: {done.problem}"


@pytest.mark.parametrize("protocol", ["upstream-1", "rollback-2"])
@pytest.mark.parametrize("who", range(4))
def test_one_site_is_lost_and_the_stages_in_a_row_that_it_has_are_not_too_many(
    protocol: str, who: int
) -> None:
    """The papers' own settings, with two keyed stages in a row."""
    crash = (Fault("crash", 0.03, who=who),)
    done = run(Case(0, "times", protocol, sites=4, faults=crash))
    assert done.problem is None and not done.stopped


def long(rows_in: int) -> Flow:
    """Windows that are long compared with what may be kept for a replica that is behind."""
    flow = Flow("long")
    source = flow.source("events", rows(flows._events(rows_in)), event_time="ts")
    source.key_by("k").window(time=400).agg(n=F.count(), x=F.sum("v")).sink("out", discard())
    return flow


def test_a_task_with_a_long_log_is_not_let_go_because_it_is_behind(monkeypatch: Patch) -> None:
    """It must be, at first. Letting it go would have it rebuilt elsewhere, from the same log."""
    monkeypatch.setitem(flows.FLOWS, "long", long)
    options = replace(explore.OPTIONS, kept_bytes_max=4_500)
    monkeypatch.setattr(explore, "OPTIONS", options)
    monkeypatch.setattr(timed, "Pace", partial(timed.Pace, status=0.003))
    crash = (Fault("crash", 0.04, who=2),)
    done = run(Case(1, "long", "upstream", sites=5, rows_in=2_000, faults=crash))
    assert done.problem is None
    assert sum("view" in line for line in done.log) < 12, "after a single crash"


@pytest.mark.parametrize("seed", [10, 83])
def test_a_task_is_lost_while_its_second_replica_is_made(seed: int) -> None:
    """On the way to a standby. It is rebuilt at one site, of which then others are made."""
    kinds = ("crash", "controller", "crash of two", "block", "reset")
    done = run(Case(seed, "times", "upstream", "upstream", "passive", kinds=kinds))
    assert done.problem is None


def hands_over(world: TimedWorld) -> int | None:
    """Who hands a task of the first keyed stage over just now, and has sent some of its state."""
    view = world.controller.view
    for number, group in enumerate(view.groups[1] if view is not None else ()):
        for joiner in group.joining if group.replicas else ():
            node, task = world.nodes[joiner], (1, number)
            if task in node.transfers.incoming and world.survives(group.donor):
                keeper = node.stages.tasks[task].keeper
                if any(table.size for table in keeper.tables().values()):
                    return group.donor
    return None


@pytest.mark.parametrize("seed", range(4))
def test_a_task_is_rebuilt_where_a_hand_over_broke_off(seed: int) -> None:
    """Its donor and the controller die together, so nobody is told. Nothing of what was handed
    over may be in the state that it begins with."""
    case = Case(seed, "times", "upstream", "upstream", "pairs", faults=(), sites=4)
    world, lost = case.world(), False
    while not world.ended:
        assert world.step() and world.time < 10, world.describe()
        donor = hands_over(world) if not lost and not world.leaderless else None
        if donor is not None:
            world.crash_controller()
            world.crash(donor)
            lost = True
        if lost and not world.leaderless and world.controller.protected:
            world.gate_is_open = True
    assert lost and world.error is None
    right = flows.expected("times", case.rows_in)["out"]
    assert flows.in_order(world.result("out")).equals(right)


class Strict(Source):
    """Gives so many rows at first, and none to a reader that is closed: as Kafka does."""

    def __init__(self, source: Source, rows_first: int) -> None:
        self._source, self.rows_first = source, rows_first
        self.schema, self.splits = source.schema, source.splits

    def open(self, split: int, offset: int = 0, position: Any = None) -> SplitReader:
        return StrictReader(self._source.open(split, offset, position), self, offset)


class StrictReader(SplitReader):
    def __init__(self, reader: SplitReader, source: Strict, offset: int) -> None:
        self._reader, self._source, self._offset = reader, source, offset
        self._closed = False

    def position(self) -> Any:
        return self._reader.position()

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        assert not self._closed, "the reader is closed"
        if self._offset >= self._source.rows_first and not due:
            return empty(self._source.schema)
        batch = self._reader.read(rows_max, due=due)
        self._offset += batch.num_rows if batch is not None else 0
        return batch

    def close(self) -> None:
        assert not self._closed, "the reader is closed twice"
        self._closed = True


def test_a_task_is_lost_when_its_source_has_finished() -> None:
    """The flow is drained, and the source's site is through and has closed its readers. It has more
    to do again when a task is rebuilt, but nothing to read."""
    flow = Flow("ends", protect=explore.PROTOCOLS["upstream"])
    source = flow.source("events", Strict(rows(flows._events(6_000)), 1_500), event_time="ts")
    source.key_by("k").window(time=400).agg(n=F.count()).sink("out", discard())
    world = TimedWorld(flow, sites=5, seed=0, options=explore.OPTIONS)
    drained = crashed = False
    while not world.ended:
        assert world.step(), world.describe()
        if not drained and world.time > 0.3:
            world.drain()
            drained = True
        view = world.controller.view
        if not drained or crashed or view is None:
            continue
        source_at, sink_at = view.groups[0][0].all, view.groups[2][0].all
        victims = [s for c in view.groups[1] for s in c.replicas if s not in source_at + sink_at]
        if victims and world.nodes[source_at[0]].finished:
            world.crash(victims[0])
            crashed = True
            for site in world.nodes:  # so that the others have something to do for a while
                world.slow(site, 1.0 if site == source_at[0] else 30.0, 1.0)
    assert crashed and world.error is None
