"""Nexmark on simulated sites: however the input is split and cut, the results are the model's.

No row of these inputs may be late: a split's rows are in order, or the windows wait for as long as
rows may be delayed. So the model needs to know nothing but the rows.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from functools import cache

import pytest

from holdfast.api.options import Options
from holdfast.core.sequencer import Budget
from holdfast.lab.sim.world import World
from holdfast.lab.workloads.nexmark import (
    AUCTION,
    BID,
    EVENT_SCHEMA,
    PERSON,
    QUERIES,
    SCHEMAS,
    Nexmark,
)
from holdfast.lab.workloads.nexmark import nexmark_flow as flow_of
from holdfast.protections import pairs
from holdfast.sinks import discard
from tests.support.nexmark_oracle import Rows, expected, rows_of
from tests.support.tiers import nightly

CYCLES = 30
RATE = 50
"""Events in a second of event time, so that there are several windows of ten seconds."""
GROUP = 3
OPTIONS = Options(
    partitions=5,
    budget=Budget(epoch_rows_max=120, epochs_in_flight_max=5, bytes_in_flight_max=1 << 20),
    window=2,
    block_rows=60,
    read_ahead_rows=150,
)
GRID = [
    (query, splits, sources, group)
    for query in QUERIES
    for splits in (1, 3)
    for sources in (1, 3)
    for group in (0, GROUP)
]


def named(case: tuple[str, int, int, int]) -> str:
    query, splits, sources, group = case
    order = "out of order" if group else "in order"
    return f"{query}, {splits} splits, {sources} sources, {order}"


@cache
def model(query: str, seed: int = 1) -> Rows:
    events = Nexmark(CYCLES, seed, RATE)
    return expected(query, *(events.table(kind).to_pylist() for kind in (PERSON, AUCTION, BID)))


def events_of(splits: int, group: int, seed: int = 1) -> Nexmark:
    return Nexmark(CYCLES, seed, RATE, group=group, splits=splits)


def late_rows(world: World) -> dict[str, int]:
    """By stage: how many rows came too late for it, as far as those know who are still there."""
    found: dict[str, int] = {}
    for node in world.nodes.values():
        for task in node.stages.tasks.values():
            if task.operator is not None and task.operator.late_rows:
                found[task.stage.name] = found.get(task.stage.name, 0) + task.operator.late_rows
    return found


def check(world: World, query: str, seed: int = 1) -> None:
    right = model(query, seed)
    assert right, "the test would prove nothing"
    found = rows_of(query, world.result("out").to_pylist())
    late = late_rows(world)
    assert found == right, f"lost {right - found}, made up {found - right}, late {late}"
    assert not late


# --- the input ------------------------------------------------------------------------------------


@pytest.mark.parametrize("splits", [1, 3])
@pytest.mark.parametrize("group", [0, GROUP])
def test_however_it_is_split_the_events_are_the_same(splits: int, group: int) -> None:
    plain, events = events_of(1, 0), events_of(splits, group)
    combined = events.combined()
    for kind, schema in SCHEMAS.items():
        source = events.source(kind)
        given = [row for s in range(splits) for row in _rows(source, s)]
        mixed = [row for s in range(splits) for row in _rows(combined, s) if row["kind"] == kind]
        right = sorted(tuple(row.values()) for row in plain.table(kind).to_pylist())
        assert sorted(tuple(row.values()) for row in given) == right
        assert sorted(tuple(row[n] for n in schema.names) for row in mixed) == right
        others = set(EVENT_SCHEMA.names) - set(schema.names) - {"kind"}
        assert all(row[name] is None for row in mixed for name in others)


@pytest.mark.parametrize("group", [0, GROUP])
def test_events_of_a_split_are_delayed_by_no_more_than_is_said(group: int) -> None:
    events = events_of(3, group)
    late = 0
    for source in (events.combined(), *(events.source(kind) for kind in SCHEMAS)):
        for split in range(3):
            newest = 0
            for row in _rows(source, split):
                assert newest - row["ts"] <= events.disorder_ms
                late += newest > row["ts"]
                newest = max(newest, row["ts"])
    assert (late > 100) == bool(group)


def test_events_are_a_function_of_seed_and_number() -> None:
    events, other = events_of(3, GROUP), events_of(3, GROUP, seed=2)
    for source, unlike in ((events.combined(), other.combined()), (events.source(BID),) * 2):
        whole = source.make(1, 0, 200)
        pieces = [source.make(1, at, 50) for at in range(0, 200, 50)]
        assert [r for p in pieces for r in p.to_pylist()] == whole.to_pylist()
        assert unlike is source or unlike.make(1, 0, 200) != whole


def test_events_follow_the_rules_of_the_benchmark() -> None:
    events = Nexmark(cycles=400, rate=10_000)
    bids = events.table(BID).to_pandas()
    persons, auctions = (events.table(kind).to_pandas() for kind in (PERSON, AUCTION))
    assert (len(persons), len(auctions), len(bids)) == (400, 1_200, 18_400)
    assert persons["id"].is_unique and auctions["id"].is_unique
    assert bids["ts"].is_monotonic_increasing and bids["ts"].max() - bids["ts"].min() == 1_999
    hot = (bids["auction"] - 1_000) % 100 == 0
    assert 0.48 < hot.mean() < 0.53, "half of the bids"
    assert 0.74 < ((bids["bidder"] - 1_000) % 100 == 1).mean() < 0.78
    assert 0.70 < ((auctions["seller"] - 1_000) % 100 == 0).mean() < 0.80
    newest = (bids.index // 46 + 1) * 3 + 999
    assert (bids["auction"] <= newest + 10).all() and (bids["auction"] >= newest - 199).all()
    assert bids["price"].between(100, 10**8).all()
    assert (auctions["expires"] > auctions["ts"]).all()


def _rows(source: object, split: int) -> list[dict]:
    reader = source.open(split)  # type: ignore[attr-defined]
    return [row for batch in iter(lambda: reader.read(70), None) for row in batch.to_pylist()]


# --- without faults -------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GRID, ids=named)
def test_results_are_the_models(case: tuple[str, int, int, int]) -> None:
    query, splits, sources, group = case
    for seed in range(2):
        flow = flow_of(query, events_of(splits, group), discard(), sources=sources)
        world = World(flow, sites=1 + 2 * seed, seed=seed, options=OPTIONS)
        world.run()
        assert len(world.records) > 5
        check(world, query)


def test_the_whole_input_in_one_epoch() -> None:
    """Nothing is ever late then, live or not: what a cut could change is not in play."""
    for query in QUERIES:
        world = World(flow_of(query, events_of(1, GROUP), discard()), sites=1)
        world.run()
        check(world, query)


# --- with faults ----------------------------------------------------------------------------------

KILLS = [
    (query, splits, sources, GROUP * (n % 2))
    for n, (query, (splits, sources)) in enumerate(
        (q, s) for q in QUERIES for s in ((1, 1), (3, 1), (3, 3))
    )
]


# Every query, and every way of splitting it; nightly, each query in each way.
@pytest.mark.parametrize(
    "case",
    [c if n % 3 == n // 3 % 3 else nightly(c) for n, c in enumerate(KILLS)],
    ids=[named(c) for c in KILLS],
)
def test_sites_are_killed(case: tuple[str, int, int, int]) -> None:
    query, splits, sources, group = case
    seed = 10 * KILLS.index(case)
    flow = flow_of(query, events_of(splits, group), discard(), sources=sources)
    flow.protection = pairs(failure_domain="process")
    world = World(flow, sites=4, seed=seed, options=OPTIONS)
    assert run_with_kills(world, seed) > 1
    check(world, query)


def run_with_kills(world: World, seed: int) -> int:
    """Run to the end, killing sites at random moments where a replica of everything is left; how
    many it were."""
    choice = random.Random(seed)
    moments = _moments(choice)
    due, killed = next(moments), 0
    while not world.ended:
        if world.steps >= due and world.controller.running:
            victim = choice.choice(sorted(world.nodes))
            if world.survives(victim):
                world.crash(victim)
                killed += 1
                due = next(moments)
        assert world.step(), f"stuck after {world.steps} steps: {world.describe()}"
        assert world.steps < 100_000, f"no end: {world.describe()}"
    if world.error is not None:
        raise world.error
    return killed


def _moments(choice: random.Random) -> Iterator[int]:
    at = choice.randint(50, 400)
    for _ in range(4):
        yield at
        at += choice.choice([choice.randint(1, 60), choice.randint(100, 700)])
    while True:
        yield 10**9
