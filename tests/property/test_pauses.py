"""Live runs whose sources pause, so that splits become idle, while sites die and connections break.

`test_live` has sources that give rows whenever they are asked. Here a split has nothing now and
then: for a moment, or for so long that it is idle.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pyarrow as pa
import pytest

from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.connectors.sources import Position, RowsSource, SplitReader
from holdfast.core import sequencer
from holdfast.core.protection import ProtectionSpec
from holdfast.core.sequencer import Budget
from holdfast.engine.batches import empty
from holdfast.errors import FlowError
from holdfast.lab.sim.world import World
from holdfast.protections import active, none, pairs, passive, rollback, upstream
from holdfast.site import ingress
from holdfast.sources import rows
from tests.support.live_flows import BUILD, STRICT, How, _rows, build
from tests.support.reference import check, ordered

STEPS_MAX = 60_000
PROTECTIONS: list[ProtectionSpec] = [
    none(),
    pairs(failure_domain="process"),
    pairs(replicas=3, failure_domain="process"),
    active(failure_domain="process"),
    passive(interval=0.008, failure_domain="process"),
    upstream(summary_interval=0.02, failure_domain="process"),
    rollback(summary_interval=0.02, failure_domain="process"),
]


class Pausing(RowsSource):
    """Rows in memory that are not always there when they are asked for."""

    def __init__(self, *splits: pa.RecordBatch, rng: random.Random, longest: int) -> None:
        super().__init__(*splits)
        self.rng, self.longest = rng, longest

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        return PausingReader(self, super().open(split, offset, position))


class PausingReader(SplitReader):
    def __init__(self, source: Pausing, reader: SplitReader) -> None:
        self.source, self.reader, self.left = source, reader, 0

    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        if due:
            return self.reader.read(rows_max, due=True)
        if self.left == 0 and self.source.rng.random() < 0.4:
            self.left = 1 + self.source.rng.randint(0, self.source.longest)
        if self.left:
            self.left -= 1
            return empty(self.source.schema)
        return self.reader.read(rows_max)


@dataclass
class Story:
    """One run: what it is drawn from, and whether splits become idle, are in order, are drained."""

    rng: random.Random
    idle: bool = True
    drained: bool = False

    def flow(self) -> Flow:
        rng, numbers = self.rng, np.random.default_rng(self.rng.randrange(2**32))
        name = rng.choice(sorted(BUILD))
        flow = Flow(name, protect=rng.choice(PROTECTIONS))
        disorder = rng.choice([0, 3, 20]) if self.idle else 0
        streams = []
        for source in range(rng.randint(1, 3)):
            splits = [
                _rows(numbers, rng.randint(0, 25), disorder) for _ in range(rng.randint(1, 3))
            ]
            made = Pausing(*splits, rng=rng, longest=rng.choice([0, 4, 30]))
            streams.append(flow.source(f"s{source}", made, event_time="ts"))
        build(flow, streams, How(rng.choice([0, 5]), STRICT))
        return flow

    def world(self) -> World:
        rng, flow = self.rng, self.flow()
        block = rng.choice([3, 10, 40])
        options = Options(
            partitions=rng.choice([1, 3, 8]),
            budget=Budget(
                epoch_rows_max=rng.choice([1, 8, 25, 100]),
                epochs_in_flight_max=rng.randint(1, 5),
                small_in_flight_max=rng.randint(1, 3),
            ),
            window=rng.randint(1, 3),
            block_rows=block,
            read_ahead_rows=block * rng.randint(1, 4),
            idle=rng.choice([0, 3, 10, 50]) / 1e3 if self.idle else None,
        )
        sites = rng.randint(1, 4) if flow.protection.name == "none" else rng.randint(4, 5)
        return World(flow, sites=sites, seed=rng.randrange(2**32), options=options)

    def told(self) -> World:
        """The world at its end, after three losses of sites or connections."""
        world = self.world()
        faults = self.faults() if world.flow.protection.name != "none" else iter(())
        due = next(faults, None)
        drain = self.rng.randint(50, 1_500) if self.drained else STEPS_MAX
        while not world.ended:
            if world.controller.running and due is not None and world.steps >= due:
                self.harm(world)
                due = next(faults, None)
            if world.controller.running and world.steps >= drain:
                world.drain()
                drain = STEPS_MAX
            assert world.step(), f"stuck: {world.describe()}"
            assert world.steps < STEPS_MAX, f"no end: {world.describe()}"
        assert world.error is None
        return world

    def faults(self) -> Iterator[int]:
        due = 0
        for _ in range(3):
            due += self.rng.randint(20, 300)
            yield due

    def harm(self, world: World) -> None:
        sites = sorted(world.nodes)
        if self.rng.random() < 0.6:
            victim = self.rng.choice(sites)
            if world.survives(victim):
                world.crash(victim)
        elif len(sites) > 1:
            world.reset(*self.rng.sample(sites, 2))


@pytest.fixture
def scarce(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few steps of event time fit into a block, and into a record."""
    monkeypatch.setattr(sequencer, "STEPS_MAX", 9)
    monkeypatch.setattr(ingress, "BLOCK_STEPS_MAX", 5)


def story(seed: int, **kind: bool) -> World | None:
    """None where the flow cannot be protected in the way that was drawn."""
    try:
        return Story(random.Random(seed), **kind).told()
    except FlowError:
        return None


@pytest.mark.parametrize("seeds", [range(6), range(6, 12)], ids=str)
def test_rows_come_in_time_if_no_split_is_ever_idle(scarce: None, seeds: range) -> None:
    """Splits that are each in order, whoever dies and however they pause."""
    for world in filter(None, (story(seed, idle=False) for seed in seeds)):
        check(world)
        if not world.flow.name.startswith("spans"):  # whose results may end in any order
            tasks = [u for node in world.nodes.values() for u in node.stages.tasks.values()]
            assert not [u for u in tasks if u.operator is not None and u.operator.late_rows]


@pytest.mark.parametrize("seeds", [range(6), range(6, 12)], ids=str)
def test_idle_splits_are_part_of_the_record(scarce: None, seeds: range) -> None:
    for world in filter(None, map(story, seeds)):
        check(world)
        assert any(record.idle for record in world.records)


def test_flows_that_are_drained_have_what_they_took(scarce: None) -> None:
    for world in filter(None, (story(seed, drained=True) for seed in range(6))):
        check(world)


# --- who reads a split dies when it has said that the split has ended -----------------------------


def ending(seed: int) -> World:
    rng, numbers = random.Random(seed), np.random.default_rng(seed)
    protections = [p for p in PROTECTIONS if p.name in ("pairs", "passive", "upstream")]
    flow = Flow("ending", protect=rng.choice(protections))
    halves = [_rows(numbers, 20, 0) for _ in range(2)]
    source = flow.source("s", rows(*halves), event_time="ts")
    source.key_by("k").window(time=8).agg(n=F.count()).sink("out", ordered())
    budget = Budget(epoch_rows_max=5, epochs_in_flight_max=1)
    options = Options(partitions=2, budget=budget, block_rows=10, read_ahead_rows=40, idle=None)
    return World(flow, sites=4, seed=seed, options=options)


def crash_who_reads_to_the_end(world: World) -> bool:
    """If a split is known to have ended, and rows of it wait to be cut."""
    view = world.controller.view
    assert view is not None
    first = view.sequencers[0]
    if first not in world.nodes or world.nodes[first].sequencer is None:
        return False
    for (source, number), split in world.nodes[first].sequencer.splits.items():
        (leader,) = [c.replicas[0] for c in view.groups[source] if c.first <= number < c.end]
        waits = split.end is not None and split.blocks and leader != first
        if waits and leader in world.nodes and world.survives(leader):
            world.crash(leader)
            return True
    return False


@pytest.mark.parametrize("seeds", [range(20), range(20, 40)], ids=str)
def test_rows_that_wait_are_not_lost_with_who_has_read_them(seeds: range) -> None:
    crashed = 0
    for seed in seeds:
        world, done = ending(seed), False
        while not world.ended:
            if not done and world.controller.running:
                done = crash_who_reads_to_the_end(world)
            assert world.step() and world.steps < STEPS_MAX, f"stuck: {world.describe()}"
        assert world.error is None
        check(world)
        crashed += done
    assert crashed > len(seeds) // 2
