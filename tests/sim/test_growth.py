"""What a site keeps, however long a flow runs."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from holdfast import col
from holdfast import functions as F
from holdfast.api.graph import Flow
from holdfast.api.options import Checkpoint, Options
from holdfast.api.protection import passive, upstream
from holdfast.connectors.sinks import Sink
from holdfast.connectors.sources import rows
from holdfast.core.protection import ProtectionSpec
from holdfast.lab.sim import flows
from holdfast.lab.sim.explore import OPTIONS
from holdfast.lab.sim.timed import TimedWorld
from holdfast.protections import pairs
from holdfast.sinks import discard, parquet
from holdfast.site.ingress import Split
from holdfast.site.node import SiteNode

UPSTREAM, PASSIVE = (
    upstream(failure_domain="process"),
    passive(interval=0.008, failure_domain="process"),
)


def most(world: TimedWorld, measured: Callable[[SiteNode], int]) -> int:
    """At any site, at any time until the end of the flow."""
    found = 0
    while not world.ended and world.step():
        found = max([found, *map(measured, world.nodes.values())])
    assert world.error is None
    return found


def counts(
    protection: ProtectionSpec,
    sink: Sink,
    least: int = 0,
    sites: int = 4,
    options: Options = OPTIONS,
) -> TimedWorld:
    """How many rows a window had, of windows that had at least so many."""
    flow = Flow("counts", protect=protection)
    source = flow.source("events", rows(flows._events(3_000)), event_time="ts")
    counted = source.key_by("k").window(time=20).agg(n=F.count())
    counted.filter(col("n") >= least).sink("out", sink)
    world = TimedWorld(flow, sites=sites, seed=1, options=options)
    world.plan.sinks[0].sink = sink
    return world


def kept(node: SiteNode) -> int:
    lanes = [lane for p in node.dataflow.exchanges.producers.values() for lane in p.lanes.values()]
    return max([len(lane.kept) for lane in lanes], default=0)


@pytest.mark.parametrize("protection", [UPSTREAM, PASSIVE], ids=["upstream", "passive"])
def test_a_sink_without_rows_keeps_nothing_back(protection: ProtectionSpec, tmp_path: Path) -> None:
    busy, quiet = (
        most(counts(protection, parquet(tmp_path / str(least), interval=0), least), kept)
        for least in (0, 1_000)
    )
    assert quiet <= busy + 20


def noted(node: SiteNode) -> int:
    """For how many calls it is noted which keys were removed, at replicas that nobody asks for
    it."""
    assert node.view is not None or not node.stages.tasks
    found = 0
    for task, runner in node.stages.tasks.items():
        leads = node.view is not None and node.view.group(task).led_by(node.site)
        for table in runner.keeper.tables().values() if runner.keeper and not leads else ():
            found = max([found, *map(len, table._removed.values())])
    return found


def test_a_standby_does_not_note_which_keys_are_gone() -> None:
    assert most(counts(PASSIVE, discard()), noted) == 0


def test_a_replica_that_is_not_stored_does_not_note_which_keys_are_gone(tmp_path: Path) -> None:
    options = replace(OPTIONS, checkpoint=Checkpoint(str(tmp_path), interval=0.1))
    world = counts(pairs(failure_domain="process"), discard(), options=options)
    for node in world.nodes.values():
        node.stages.recorded = None  # sinks would wait for records, which nobody stores here
    assert most(world, noted) == 0


def test_when_epochs_were_cut_is_forgotten_when_they_are_delivered() -> None:
    """Also where the sequencer has a replica and no sink has one."""
    world = counts(pairs(failure_domain="process"), discard(), sites=6)
    assert 0 < most(world, lambda node: len(node.sequencing._cut_at)) < 20


def test_a_position_that_is_reported_again_is_known_once() -> None:
    stage = counts(UPSTREAM, discard()).plan.sources[0]
    assert stage.source is not None
    split = Split(stage, 0, stage.source.open(0), ())
    for _ in range(9):
        split.note(5, {"at": 17})
    assert len(split._reported) == 1
