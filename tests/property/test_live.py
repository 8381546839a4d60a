"""Flows with several sources and splits, live on simulated sites, against the reference executor.

The sites, the cuts and the order in which sources and splits are read come from a seed. Whatever
they are, every sink gets what `reference` makes of the records: the same rows at the same places.
"""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.api.protection import pairs
from holdfast.api.streams import Stream
from holdfast.connectors.sources import rows
from holdfast.core.sequencer import Budget
from holdfast.engine.batches import user_names
from holdfast.lab.sim.world import World
from holdfast.plan.planner import plan
from tests.support.harness import Shape, run, runs
from tests.support.live_flows import BUILD, STRICT, Folds, How, _rows, build
from tests.support.reference import check, recorded, reference


@dataclass
class Sources:
    """The rows of some sources: one list of batches, a batch for each split, for each of them."""

    splits: list[list[pa.RecordBatch]]
    disorder: int
    """How far a row's time may be behind that of one before it in its split."""

    def streams(self, flow: Flow) -> list[Stream]:
        return [
            flow.source(f"s{n}", rows(*batches), event_time="ts")
            for n, batches in enumerate(self.splits)
        ]


@dataclass
class Cut:
    """How a live run is cut and spread."""

    seed: int
    sites: int
    options: Options

    def world(self, flow: Flow) -> World:
        return World(flow, sites=self.sites, seed=self.seed, options=self.options)


@st.composite
def sources(draw: st.DrawFn, disorder: int | None = None, most: int = 3) -> Sources:
    """One to three sources with one to three splits, as long as they may be: some are empty, and
    some end long before others do."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    if disorder is None:
        disorder = draw(st.sampled_from([0, 3, 20]))
    lengths = st.lists(st.integers(0, 25), min_size=1, max_size=3)
    wanted = draw(st.lists(lengths, min_size=1, max_size=most))
    return Sources([[_rows(rng, n, disorder) for n in each] for each in wanted], disorder)


@st.composite
def cuts(draw: st.DrawFn, sites: int = 4) -> Cut:
    block = draw(st.sampled_from([3, 10, 40]))
    budget = Budget(
        epoch_rows_max=draw(st.sampled_from([8, 25, 100])),
        epochs_in_flight_max=draw(st.integers(1, 5)),
        small_in_flight_max=draw(st.integers(1, 3)),
    )
    options = Options(
        partitions=draw(st.sampled_from([1, 3, 8])),
        budget=budget,
        window=draw(st.integers(1, 3)),
        block_rows=block,
        read_ahead_rows=block * draw(st.integers(1, 4)),
    )
    return Cut(draw(st.integers(0, 2**20)), draw(st.integers(1, sites)), options)


# --- flows ----------------------------------------------------------------------------------------

LOOSE: Folds = {"n": F.count(), "s": F.sum("g"), "m": F.max("v"), "a": F.min("v"), "z": F.max("g")}
"""Those that come out the same in any order."""


def made(name: str, given_: Sources, lateness: int, folds: Folds = STRICT) -> Flow:
    """The flow. Sources that it does not look at have sinks of their own, but count for it."""
    flow = Flow(name)
    build(flow, given_.streams(flow), How(lateness, folds))
    return flow


# --- properties -----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", BUILD)
@runs(12)
@given(sources(), cuts(), st.sampled_from([0, 5]))
def test_a_live_run_gives_what_its_records_say(
    name: str, given_: Sources, cut: Cut, lateness: int
) -> None:
    world = cut.world(made(name, given_, lateness))
    world.run()
    taken = sum(record.rows for record in world.records)
    assert taken == sum(b.num_rows for each in given_.splits for b in each)
    right = check(world)
    tasks = [u for node in world.nodes.values() for u in node.stages.tasks.values()]
    assert sum(u.operator.late_rows for u in tasks if u.operator) == right.late_rows


@pytest.mark.parametrize("name", BUILD)
@runs(6)
@given(sources(), cuts(), st.integers(0, 99))
def test_the_reference_does_not_depend_on_cuts(
    name: str, given_: Sources, cut: Cut, seed: int
) -> None:
    """The same records, and with them the same places in the order, cut and spread otherwise."""
    world = cut.world(made(name, given_, 0))
    world.run()
    p = plan(made(name, given_, 0))
    whole, order = reference(p, world.records), recorded(p, world.records)
    rng = random.Random(seed)
    total = len(order.turns)
    places = [rng.randint(0, total) for _ in range(rng.randint(0, 9))]
    shape = Shape(cuts=places, partitions=5, sites=rng.randint(1, 3), thin=seed % 2 == 0, seed=seed)
    spread = run(p, order, shape)
    for sink in whole.sinks:
        assert spread.rows(sink) == whole.rows(sink), sink
    assert spread.late_rows == whole.late_rows


@pytest.mark.parametrize("name", BUILD)
@runs(6)
@given(sources(most=2), cuts(), st.integers(0, 99))
def test_sites_die_and_the_records_still_say_it_all(
    name: str, given_: Sources, cut: Cut, seed: int
) -> None:
    flow = made(name, given_, 5)
    flow.protection = pairs(failure_domain="process")
    cut.sites = 3 + seed % 2
    world, rng = cut.world(flow), random.Random(seed)
    due, crashes = rng.randint(20, 200), 3
    while not world.ended:
        if crashes and world.steps >= due and world.controller.running:
            victim = rng.choice(sorted(world.nodes))
            if world.survives(victim):
                world.crash(victim)
                due, crashes = world.steps + rng.randint(1, 200), crashes - 1
        assert world.step(), world.describe()
    assert world.error is None
    check(world)


def rows_in(world: World, sink: str) -> Counter:
    """How often a sink has got each row, wherever it stands in the order."""
    table = world.result(sink)
    columns = [table.column(name).to_pylist() for name in user_names(table.schema)]
    return Counter(zip(*columns, strict=True))


IN_ANY_ORDER = sorted(BUILD.keys() - {"union of windows", "no event time"})
IN_ANY_ORDER = [name for name in IN_ANY_ORDER if not name.startswith("spans")]


@pytest.mark.parametrize("name", IN_ANY_ORDER)
@runs(12)
@given(sources(disorder=0), st.lists(cuts(), min_size=2, max_size=2), st.sampled_from([0, 20]))
def test_no_row_is_late_without_need(
    name: str, given_: Sources, both: list[Cut], lateness: int
) -> None:
    """Every split is in order, or windows wait long enough. So whatever the cuts are, and the order
    in which splits are read, no row is late; and the results are those of all rows."""
    if lateness:
        given_ = Sources([[delayed(b, lateness) for b in s] for s in given_.splits], lateness)
    worlds = [cut.world(made(name, given_, lateness, LOOSE)) for cut in both]
    for world in worlds:
        world.run()
        tasks = [u for node in world.nodes.values() for u in node.stages.tasks.values()]
        late = {u.stage.name: u.operator.late_rows for u in tasks if u.operator}
        assert not any(late.values()), late
    for sink in worlds[0].results:
        assert rows_in(worlds[0], sink) == rows_in(worlds[1], sink)


def delayed(batch: pa.RecordBatch, by: int) -> pa.RecordBatch:
    """The same rows in another order, in which none is more than `by` behind."""
    ts = batch.column("ts").to_numpy()
    rng = np.random.default_rng(batch.num_rows)
    return batch.take(pa.array(np.argsort(ts + rng.integers(0, by + 1, ts.size), kind="stable")))
