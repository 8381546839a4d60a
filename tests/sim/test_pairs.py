"""Partition pairs on simulated sites: whatever dies while a replica of everything is left, whenever
it dies, the results are those of an undisturbed run; if the last replica goes, that is said.

A seed that fails is run again with ``one(seed, ...)``; `world.describe()` has the last views.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import pyarrow as pa
import pytest

from holdfast import Flow, col
from holdfast import functions as F
from holdfast.connectors.sources import Position, Source, SplitReader
from holdfast.control import events as ev
from holdfast.core.effects import ProcessBundles
from holdfast.core.events import ReplicaBehind
from holdfast.core.flow_phase import FlowPhase
from holdfast.core.ids import SiteId
from holdfast.core.protection import ProtectionSpec
from holdfast.errors import DivergenceError, SiteLostError
from holdfast.lab.sim.links import CONTROLLER
from holdfast.lab.sim.world import World
from holdfast.net import wire
from holdfast.protections import pairs
from holdfast.sources import rows
from tests.support import reference
from tests.support.sim_faults import PAIRS, TINY, Faults, go
from tests.support.sim_flows import SMALL, Ordered, diamond, events, result

N = 160
SINKS = ("out", "windows")
ROOMY = replace(TINY.budget, epochs_in_flight_max=50, small_in_flight_max=50)


def line(batches: list[pa.RecordBatch], protect: ProtectionSpec | None = None) -> Flow:
    """A source, two keyed stages in a row and a window beside them, each with a sink."""
    flow = Flow("line") if protect is None else Flow("line", protect=protect)
    source = flow.source("events", rows(*batches), event_time="ts")
    totals = source.key_by("k").agg(x=F.sum("v")).select(k=col("k") % 3, x=col("x"))
    totals.key_by("k").agg(m=F.max("x"), n=F.count()).sink("out", Ordered())
    windows = source.key_by("g").window(time=20, every=10, lateness=5).agg(n=F.count())
    windows.sink("windows", Ordered())
    return flow


def undisturbed(batch: pa.RecordBatch) -> dict[str, pa.Table]:
    world = World(line([batch]), sites=1)
    world.run()
    return {sink: result(world, sink) for sink in SINKS}


@cache
def expected() -> dict[str, pa.Table]:
    return undisturbed(events(N))


def finish(world: World, *disturb: Callable[[World], None]) -> World:
    """Run to the end, which must be a good one with the right result."""
    go(world, *disturb)
    if world.error is not None:
        raise world.error
    for sink in SINKS:
        found = result(world, sink)
        assert found.equals(expected()[sink]), (sink, found.num_rows, world.describe())
    return world


def protected_world(seed: int, **settings: Any) -> World:
    protect = settings.pop("protect", PAIRS)
    return World(
        line([events(N)], protect), **{"sites": 4, "options": TINY, "seed": seed} | settings
    )


def steps(world: World, count: int) -> None:
    for _ in range(count):
        assert world.step()


# --- at random ----------------------------------------------------------------------------------


def test_the_flow_with_replicas_gives_what_it_gives_without() -> None:
    assert expected()["out"].num_rows == N and expected()["windows"].num_rows > 20
    world = finish(protected_world(0))
    assert world.controller.state is FlowPhase.DONE
    assert "crash" not in "".join(world.log)


@pytest.mark.parametrize("seed", [2, 9, 35, *range(100, 112)])
def test_crashes_at_any_moment(seed: int) -> None:
    faults = Faults(seed)
    finish(protected_world(seed), faults)
    assert faults.crashed > 0


@pytest.mark.parametrize("seed", range(200, 206))
def test_crashes_and_connections_that_break(seed: int) -> None:
    finish(protected_world(seed), Faults(seed, resets=15))


@pytest.mark.parametrize("seed", range(300, 306))
def test_two_sites_at_once_with_three_replicas(seed: int) -> None:
    world = protected_world(seed, sites=5, protect=pairs(replicas=3, failure_domain="process"))
    faults = Faults(seed, at_once=2)
    finish(world, faults)
    assert faults.crashed > 0


@pytest.mark.parametrize("seed", range(400, 405))
def test_nobody_is_launched_and_the_others_take_the_replicas(seed: int) -> None:
    world = protected_world(seed, sites=5, relaunch=False)
    steps(world, 150)
    world.crash(SiteId(2))
    finish(world)
    view = world.controller.view
    assert view is not None and set(view.members) == {0, 1, 3, 4}
    joined = [line for line in world.log if "+" in line]
    assert joined, "replicas were made on the sites that are left"


@pytest.mark.parametrize("seed", range(500, 503))
def test_standbys_take_the_replicas(seed: int) -> None:
    world = protected_world(seed, spares=2, relaunch=False)
    steps(world, 150)
    world.crash(SiteId(1))
    go(world, until=lambda: world.controller.dead)
    view = world.controller.view
    assert view is not None and {4, 5} & set(view.members), "at once"
    assert list(joining(world))
    finish(world, Faults(seed, crashes=1))


@pytest.mark.parametrize("seed", range(600, 605))
def test_draining_while_replicas_are_made(seed: int) -> None:
    world = protected_world(seed)
    faults = Faults(seed, crashes=3)
    go(world, faults, until=lambda: faults.crashed)
    steps(world, faults.random.randint(0, 150))
    if not world.ended:
        world.drain()
    go(world, faults)
    assert world.error is None and world.controller.state is FlowPhase.DONE
    last = world.records[-1]
    assert last.last
    taken = sum(r.rows for r in world.records)
    assert result(world, "out").num_rows == taken
    assert result(world, "out").equals(expected()["out"].slice(0, taken))


@pytest.mark.parametrize("seed", range(700, 703))
def test_several_splits_are_read_again_in_the_recorded_order(seed: int) -> None:
    parts = [events(60, seed=s) for s in (1, 2, 3)]
    world = World(line(parts, PAIRS), sites=4, seed=seed, options=TINY)
    go(world, Faults(seed, crashes=3, resets=4))
    assert world.error is None
    reference.check(world)


@pytest.mark.parametrize("seed", [3, 4])
def test_a_diamond_loses_sites(seed: int) -> None:
    plain = World(diamond([events(400)]), sites=1)
    plain.run()
    flow = diamond([events(400)])
    flow.protection = PAIRS
    world = World(flow, sites=3, seed=seed, options=SMALL)
    go(world, Faults(seed, crashes=3, resets=3))
    assert world.error is None
    for sink in SINKS:
        assert result(world, sink).equals(result(plain, sink))


# --- by role ------------------------------------------------------------------------------------


def leader_of(world: World, role: str) -> SiteId:
    view = world.controller.view
    assert view is not None
    if role == "sequencer":
        return view.sequencers[0]
    if role == "sequencer's follower":
        return view.sequencers[-1]
    return view.group((world.plan.stage_named(role).id, 0)).replicas[0]  # type: ignore[arg-type]


@pytest.mark.parametrize("role", ["sequencer", "sequencer's follower", "out", "windows"])
def test_one_after_another_whoever_has_the_role(role: str) -> None:
    """Whenever all is well again the one in this role is taken away."""
    world = protected_world(11)
    taken: list[SiteId] = []

    def take(world: World) -> None:
        if world.steps % 10 == 9 and world.controller.protected and len(taken) < 4:
            victim = leader_of(world, role)
            if victim in world.nodes and world.survives(victim):
                world.crash(victim)
                taken.append(victim)

    finish(world, take)
    assert len(taken) >= 2 and len(set(taken)) == len(taken)


def test_epochs_are_numbered_on_by_every_sequencer() -> None:
    world = protected_world(12)
    first = leader_of(world, "sequencer")
    go(world, until=lambda: len(world.records) >= 3)
    world.crash(first)
    finish(world)
    assert leader_of(world, "sequencer") != first
    assert [r.epoch for r in world.records] == list(range(len(world.records)))
    bases = [r.base + r.rows for r in world.records]
    assert [r.base for r in world.records] == [0, *bases[:-1]]


# --- when the last replica goes -------------------------------------------------------------------


def through(world: World, site: SiteId) -> bool:
    """Whether a site has processed the last epoch."""
    last = world.records[-1]
    return last.last and all(
        u.finished == last.epoch for u in world.nodes[site].dataflow.tasks.values()
    )


def is_prefix(world: World) -> bool:
    """Whether each sink has got all of its first epochs, and nothing that is not expected."""
    for sink in SINKS:
        epochs = sorted(world.results[sink])
        if epochs != list(range(len(epochs))):
            return False
        if not epochs:
            continue
        found = world.result(sink)
        wanted = expected()[sink].slice(0, found.num_rows)
        if not result(world, sink).equals(wanted):
            return False
    return True


@pytest.mark.parametrize("seed", range(800, 806))
def test_the_loss_of_all_replicas_is_said_and_nothing_wrong_was_delivered(seed: int) -> None:
    world = protected_world(seed)
    rng = random.Random(seed)
    steps(world, rng.randint(60, 300))
    if seed % 2:  # while the replicas of another are being made
        world.crash(SiteId(rng.randrange(4)))
        steps(world, rng.randint(1, 200))
    view = world.controller.view
    assert view is not None
    task = rng.choice([u for u in view.tasks() if set(view.group(u).replicas) <= set(world.nodes)])
    world.crash(*view.group(task).replicas)
    with pytest.raises(SiteLostError) as caught:
        world.run()
    stage = world.plan.stages[task[0]].name
    assert "no replica is left of" in str(caught.value) and repr(stage) in str(caught.value)
    assert is_prefix(world)


def test_a_site_that_is_through_and_dies_before_its_frames_arrived() -> None:
    """It had nothing left to do, but others still need what it kept."""
    world = World(
        line([events(60)]),
        sites=6,  # so that the source is alone on one
        seed=5,
        options=replace(TINY, partitions=1, window=1, budget=ROOMY),
    )
    world.stalled = lambda site, order: isinstance(order, ProcessBundles)
    go(world, until=lambda: len(world.records) >= 4)
    world.drain()
    world.run_until_idle()
    source = SiteId(0)
    assert through(world, source)
    assert any(p.held() for p in world.nodes[source].dataflow.exchanges.producers.values())
    world.crash(source)
    world.stalled = lambda site, order: False
    with pytest.raises(SiteLostError, match="'events'"):
        world.run()


# --- by script ----------------------------------------------------------------------------------


class Held(deque):  # type: ignore[type-arg]
    """A queue of the network of which nothing is delivered while it is held."""

    held = True

    def __bool__(self) -> bool:
        return len(self) > 0 and not self.held


def hold(world: World, sender: SiteId, receiver: SiteId) -> Held:
    held = Held(world.network[sender, receiver])
    world.network[sender, receiver] = held
    return held


def _value(message: wire.Message) -> Any:
    """What a message is a shell of, if it is one."""
    return getattr(message, "report", None) or getattr(message, "split", message)


def told(queue: deque[Any], kind: type, **fields: Any) -> bool:
    """Whether a message like this is on its way."""
    return any(
        isinstance(item, tuple)
        and isinstance(item[0], kind)
        and all(getattr(_value(item[0]), k) == v for k, v in fields.items())
        for item in queue
    )


def joining(world: World) -> Iterator[tuple[Any, SiteId]]:
    view = world.controller.view
    assert view is not None
    for task in view.tasks():
        for site in view.group(task).joining:
            yield task, site


def test_word_of_a_replica_that_was_given_up_is_not_taken_for_the_next_one() -> None:
    """A new replica is in place, and says so; before that is heard its donor says that the
    connection broke. The replica is given up and made again, and then the old word arrives."""
    world = protected_world(21, sites=3, relaunch=False, options=replace(TINY, partitions=1))
    # The sinks stand still, so that the stream does not end meanwhile.
    world.stalled = lambda site, order: order.task[0] >= 4
    go(world, until=lambda: len(world.records) >= 2)
    world.crash(SiteId(1))
    go(world, until=lambda: world.controller.dead and list(joining(world)))
    task, joiner = next((u, s) for u, s in joining(world) if world.plan.stages[u[0]].operator)
    words = hold(world, joiner, CONTROLLER)
    words.held = False
    go(world, until=lambda: told(words, wire.ReplicaReport, task=task, phase="installed"))
    words.held = True
    world.reset(world.controller.view.group(task).donor, joiner)
    go(world, until=lambda: joiner not in world.controller.view.group(task).joining)
    go(world, until=lambda: joiner in world.controller.view.group(task).joining)
    words.held = False
    world.stalled = lambda site, order: False
    finish(world)
    assert sum(f"+{joiner}" in line for line in world.log) >= 2


def test_state_for_a_joiner_that_was_given_up_is_not_taken_when_it_joins_again() -> None:
    """All of it is on its way to a slow site that has nothing else to do. The joiner is given up;
    producers drop what nobody else needs; it joins again, and then the old state arrives."""
    settings = replace(TINY, partitions=1)
    world = protected_world(21, sites=3, spares=1, relaunch=False, options=settings)

    def last_sinks_wait(site: SiteId, order: Any) -> bool:
        return bool(order.task[0] >= 4)  # so that the stream does not end meanwhile

    world.stalled = last_sinks_wait
    go(world, until=lambda: len(world.records) >= 2)
    world.crash(SiteId(1))
    go(world, until=lambda: world.controller.dead and list(joining(world)))
    task, joiner = next((u, s) for u, s in joining(world) if world.plan.stages[u[0]].operator)
    donor = world.controller.view.group(task).donor
    go(world, until=lambda: (task, joiner) in world.controller.joins.ordered)
    late = hold(world, donor, joiner)
    go(world, until=lambda: told(late, wire.HandOverEnd, task=task))
    world.control(0, ev.SiteSaid(donor, wire.Behind(ReplicaBehind(joiner, "it is slow"))))
    assert joiner not in world.controller.view.group(task).joining
    timers, world._timers = world._timers, []  # it does not join again at once
    world.stalled = lambda site, order: False
    epochs = len(world.records) + 8
    go(world, until=lambda: len(world.records) >= epochs)
    world.stalled = last_sinks_wait
    world._timers += timers
    go(world, until=lambda: joiner in world.controller.view.group(task).joining)
    go(world, until=lambda: world.nodes[joiner].view.number == world.controller.view.number)
    late.held = False
    world.stalled = lambda site, order: False
    finish(world)


def test_the_state_of_a_new_sequencer_is_lost_with_its_connection() -> None:
    """It asks again; what is passed on to it before that is answered does no harm."""
    world = protected_world(5004, spares=2)
    steps(world, 150)
    world.crash(world.controller.view.sequencers[1])
    first, site = SiteId(0), None

    def asked() -> bool:
        nonlocal site
        for (sender, receiver), queue in world.network.items():
            if sender == first and told(queue, wire.SequencerCopy):
                site = receiver
        return site is not None

    go(world, until=asked)
    world.reset(first, site)
    finish(world)


def test_a_new_sequencer_that_was_given_up_is_not_in_the_chain() -> None:
    """It had asked to be, and asks again when its connection is mended; but it joins no more."""
    world = protected_world(81, spares=2)
    steps(world, 150)
    first, follower = world.controller.view.sequencers
    world.crash(follower)
    go(world, until=lambda: world.controller.dead and list(joining(world)))
    (joiner,) = world.controller.view.groups[0][0].joining
    go(world, until=lambda: told(world.network.get((joiner, first), deque()), wire.JoinChain))
    world.reset(first, joiner)
    finish(world)


def test_a_connection_to_a_sequencer_that_has_no_view_yet_breaks() -> None:
    world = World(line([events(80, 1), events(80, 2)], PAIRS), sites=4, seed=3, options=TINY)
    hold(world, CONTROLLER, SiteId(0))
    go(world, until=lambda: world.nodes[SiteId(1)].view and (0, 1) in world.network)
    for _ in range(3):
        world.reset(SiteId(0), SiteId(1))
        world.run_until_idle()
    world.network[CONTROLLER, SiteId(0)].held = False
    world.run()
    assert sum(r.rows for r in world.records) == 160


class Silent(Source):
    """Never has a row, and never ends."""

    splits = 1
    schema = events(0).schema

    def open(self, split: int, offset: int = 0, position: Position | None = None) -> SplitReader:
        return _Nothing()


class _Nothing(SplitReader):
    def read(self, rows_max: int, *, due: bool = False) -> pa.RecordBatch | None:
        return events(0)


@pytest.mark.parametrize("lost", [False, True])
def test_an_idle_source_is_told_to_the_sequencer_that_takes_over(lost: bool) -> None:
    """With `lost` the first sequencer dies before it hears that the source is idle. No window
    closes until that is known."""
    flow = Flow("idle", protect=PAIRS)
    source = flow.source("events", rows(events(400)), event_time="ts")
    flow.source("silent", Silent(), event_time="ts").key_by("k").agg(n=F.count()).sink(
        "none", Ordered()
    )
    source.key_by("g").window(time=20).agg(n=F.count()).sink("windows", Ordered())
    world = World(flow, sites=4, seed=71, options=replace(TINY, idle=0.03))
    silent = world.plan.stage_named("silent").id
    go(world, until=lambda: world.controller.running)
    sequencer = leader_of(world, "sequencer")
    said = world.network[leader_of(world, "silent"), sequencer]
    go(world, until=lambda: told(said, wire.Quiet, source=silent, ended=False))
    if lost:
        world.crash(sequencer)
    before = len(world.records)
    go(world, until=lambda: sum(r.rows for r in world.records) == 400)
    assert any((silent, 0) in r.idle for r in world.records[before:])
    world.drain()
    go(world)
    assert world.error is None
    assert result(world, "windows").num_rows > 0


@pytest.mark.parametrize("phase", ["joining", "ordered", "handing over", "installed", "promoted"])
@pytest.mark.parametrize("who", ["joiner", "donor"])
def test_a_death_in_each_phase_of_making_a_replica(phase: str, who: str) -> None:
    """With three replicas, so that the donor is never the last one."""
    world = protected_world(31, protect=pairs(replicas=3, failure_domain="process"))
    steps(world, 120)
    world.crash(SiteId(1))
    go(world, until=lambda: world.controller.dead and list(joining(world)))
    task, joiner = next(joining(world))
    view = world.controller.view
    assert view is not None
    donor = view.group(task).donor
    reached = {
        "joining": lambda: True,
        "ordered": lambda: (task, joiner) in world.controller.joins.ordered,
        "handing over": lambda: task in world.nodes[joiner].transfers.incoming,
        "installed": lambda: (
            task in world.nodes[joiner].dataflow.tasks
            and world.nodes[joiner].dataflow.tasks[task].has_state
        ),
        "promoted": lambda: joiner in world.controller.view.group(task).replicas,  # type: ignore[union-attr]
    }
    go(world, until=reached[phase])
    assert not world.ended
    victim = joiner if who == "joiner" else donor
    assert world.survives(victim)
    world.crash(victim)
    finish(world)


def test_a_sink_leader_dies_with_the_last_rows_and_all_others_are_through() -> None:
    """Its other replica has said that it is through; it has yet to write what the leader has
    not."""
    world = protected_world(41, sites=2, relaunch=False, options=replace(TINY, budget=ROOMY))
    sink = world.plan.stage_named("out").id
    go(world, until=lambda: world.controller.running)
    view = world.controller.view
    assert view is not None
    leader, other = view.group((sink, 0)).replicas  # type: ignore[arg-type]
    world.stalled = lambda site, order: site == leader and order.task[0] == sink
    go(world, until=lambda: len(world.records) >= 4)
    world.drain()
    world.run_until_idle()
    assert through(world, other) and not through(world, leader)
    world.crash(leader)
    go(world)
    assert world.error is None
    taken = sum(r.rows for r in world.records)
    assert result(world, "out").num_rows == taken


# --- the checks themselves ----------------------------------------------------------------------


def test_replicas_that_differ_are_found_out() -> None:
    """An operator that depends on the site it runs at."""
    world = protected_world(51)
    go(world, until=lambda: world.controller.running)
    stage = world.plan.stage_named("running aggregate by (k)").id
    world._work = _skewed(world, stage, noticed=False)  # type: ignore[method-assign]
    with pytest.raises(DivergenceError, match="not deterministic"):
        finish(world)


def test_rows_that_are_lost_on_the_way_are_found_out() -> None:
    world = protected_world(52)
    go(world, until=lambda: world.controller.running)
    stage = world.plan.stage_named("running aggregate by (k)").id
    world._work = _skewed(world, stage, noticed=True)  # type: ignore[method-assign]
    with pytest.raises(
        DivergenceError, match=r"partition group \d+, epoch .* do not match the digests"
    ):
        finish(world)


def _skewed(world: World, stage: int, noticed: bool) -> Callable[[SiteId, Any], None]:
    work = World._work

    def skewed(site: SiteId, order: Any) -> None:
        if order.task[0] == stage and site == 2 and isinstance(order, ProcessBundles):
            for frames in order.bundles.values():
                for f in frames:
                    f.batch = f.batch.slice(1)
                    f.digests = f.digests if noticed else None
        work(world, site, order)

    return skewed


def test_a_replica_that_loses_rows_when_it_is_made_is_found_out(monkeypatch: Any) -> None:
    """The harness notices if a hand-over leaves something behind."""
    from holdfast.site.handover import Incoming

    take = Incoming.take

    def forgetful(self: Incoming, plan: Any, message: Any, body: memoryview) -> None:
        if not isinstance(message, wire.HandOverState):
            take(self, plan, message, body)

    monkeypatch.setattr(Incoming, "take", forgetful)
    with pytest.raises((DivergenceError, AssertionError)):
        for seed in range(61, 66):
            world = protected_world(seed)
            steps(world, 200)
            world.crash(SiteId(1))
            finish(world, Faults(seed, crashes=1))


# --- the controller dies ------------------------------------------------------------------------


class ControllerFaults(Faults):
    """The controller crashes, too."""

    def __init__(self, seed: int, controllers: int = 3) -> None:
        super().__init__(seed)
        self.controllers = controllers
        self._next = self.random.randint(20, 300)

    def __call__(self, world: World) -> None:
        super().__call__(world)
        if world.steps >= self._next and self.controllers and world.controller.running:
            if not world.leaderless:
                world.crash_controller()
                self.controllers -= 1
            self._next = world.steps + self.random.randint(1, 300)


@pytest.mark.parametrize("seed", [953, *range(800, 812)])
def test_controllers_and_sites_crash(seed: int) -> None:
    world = finish(protected_world(seed), ControllerFaults(seed))
    assert world.controller.term > 1
