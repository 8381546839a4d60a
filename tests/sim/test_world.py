"""Flows on simulated sites: any interleaving gives the same result, and nothing can get stuck."""

import pyarrow as pa
import pytest

from holdfast import Flow
from holdfast import functions as F
from holdfast.core.effects import IngestEpochs
from holdfast.core.ids import SiteId
from holdfast.errors import SiteLostError
from holdfast.lab.sim.world import World
from holdfast.sinks import discard
from holdfast.sources import rows
from tests.support.reference import check
from tests.support.sim_flows import SMALL, diamond, events, result


@pytest.fixture(scope="module")
def expected() -> dict[str, pa.Table]:
    world = World(diamond([events(600)]), sites=1)
    world.run()
    return {sink: result(world, sink) for sink in ("out", "windows")}


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("sites", [1, 2, 3])
def test_any_interleaving_gives_the_same_rows(
    seed: int, sites: int, expected: dict[str, pa.Table]
) -> None:
    world = World(diamond([events(600)]), sites=sites, seed=seed, options=SMALL)
    world.run()
    assert len(world.records) > 5
    for sink in ("out", "windows"):
        assert result(world, sink).equals(expected[sink])
        assert expected[sink].num_rows > 0


def test_the_same_seed_gives_the_same_run() -> None:
    traces = []
    for _ in range(2):
        world = World(diamond([events(300)]), sites=3, seed=5, options=SMALL)
        world.run()
        traces.append((world.steps, world.records, world.result("out")))
    assert traces[0] == traces[1]


@pytest.mark.parametrize("seed", range(3))
def test_several_splits_are_ordered_by_the_records(seed: int) -> None:
    parts = [events(200, seed=s) for s in (1, 2, 3)]
    world = World(diamond(parts), sites=2, seed=seed, options=SMALL)
    world.run()
    right = check(world)
    assert all(right.rows(sink) for sink in ("out", "windows"))


@pytest.mark.parametrize("stage", ["running aggregate by (k) #2", "row window by (k)", "out"])
def test_a_stalled_stage_holds_the_source_back_and_nothing_deadlocks(
    stage: str, expected: dict[str, pa.Table]
) -> None:
    world = World(diamond([events(600)]), sites=3, seed=2, options=SMALL)
    number = world.plan.stage_named(stage).id
    world.stalled = lambda site, order: order.task[0] == number
    world.run_until_idle()
    taken = sum(r.rows for r in world.records)
    held = sum(s.rows_held for node in world.nodes.values() for _, s in node.stages.splits())
    assert taken < 600, "the stall must reach the sequencer"
    assert len(world.records) <= SMALL.budget.epochs_in_flight_max
    assert held <= SMALL.read_ahead_rows + SMALL.block_rows, "and the source"
    finished = [
        u.finished
        for node in world.nodes.values()
        for u in node.dataflow.tasks.values()
        if u.shape.name == "time window by (g)"
    ]
    assert all(f >= SMALL.window - 1 for f in finished), "other branches go on within their credit"
    world.stalled = lambda site, order: False
    world.run()
    assert result(world, "out").equals(expected["out"])


def test_one_stalled_site_only_uses_up_its_own_credit() -> None:
    world = World(diamond([events(600)]), sites=3, seed=4, options=SMALL)
    stage = world.plan.stage_named("running aggregate by (k)").id
    world.stalled = lambda site, order: site == 1 and order.task[0] == stage
    world.run_until_idle()
    unsent = 0
    for node in world.nodes.values():
        for producer in node.dataflow.exchanges.producers.values():
            for lane in producer.lanes.values():
                for taker in lane.cursors.values():
                    waiting = list(lane.kept)[taker.next - lane.trimmed :]
                    assert all(b.epoch > taker.credit for b in waiting)
                    unsent += len(waiting)
    assert unsent > 0, "something does wait"
    world.stalled = lambda site, order: False
    world.run()


def test_arrival_merging_does_not_wait_for_a_slow_producer() -> None:
    def flow(merge: str) -> Flow:
        flow = Flow("arrival")
        source = flow.source("events", rows(events(300, 1), events(300, 2)))
        keyed = source.key_by("k", merge=merge)
        keyed.agg(n=F.count(), total=F.sum("g")).sink("out", discard())
        return flow

    finished = {}
    for merge in ("ordered", "arrival"):
        world = World(flow(merge), sites=2, seed=1, options=SMALL)
        # One of the two ingresses is stuck: its partners have nothing from it.
        world.stalled = lambda site, order: site == 1 and isinstance(order, IngestEpochs)
        world.run_until_idle()
        finished[merge] = sum(
            runner.calls
            for node in world.nodes.values()
            for task, runner in node.stages.tasks.items()
            if task[0] == 1
        )
        world.stalled = lambda site, order: False
        world.run()
        # Counts and integer sums do not mind the order: the last row of each key is the same.
        table = world.result("out").to_pandas().groupby("k").max()
        assert int(table["n"].sum()) == 600
    assert finished["ordered"] == 0
    assert finished["arrival"] > 0


def test_draining_delivers_what_was_taken_and_closes_no_window() -> None:
    world = World(diamond([events(600)]), sites=2, seed=8, options=SMALL)
    for _ in range(150):
        world.step()
    world.drain()
    world.run()
    last = world.records[-1]
    assert last.last and not last.ended
    taken = sum(r.rows for r in world.records)
    assert 0 < taken < 600
    assert sum(b.num_rows for b in world.results["out"].values()) == 2 * taken


@pytest.mark.parametrize("seed", range(3))
def test_connections_that_break_change_nothing(seed: int, expected: dict[str, pa.Table]) -> None:
    world = World(diamond([events(600)]), sites=3, seed=seed, options=SMALL)
    while not world.ended:
        if world.steps % 90 == 89:
            world.reset(*world.random.sample(sorted(world.nodes), 2))
        assert world.step(), world.describe()
    assert world.error is None
    assert sum("reset" in line for line in world.log) > 5
    for sink in ("out", "windows"):
        assert result(world, sink).equals(expected[sink])


def test_the_loss_of_an_unprotected_site_ends_the_flow() -> None:
    world = World(diamond([events(600)]), sites=3, seed=1, options=SMALL)
    for _ in range(200):
        world.step()
    world.crash(SiteId(2))
    with pytest.raises(SiteLostError, match=r"site 2 died \(crashed\); its partitions were not"):
        world.run()
