"""K sites are killed at the same instant, whatever they hold: protections that survive K losses."""

from collections.abc import Callable
from itertools import combinations

import pytest

from holdfast.api.graph import Flow
from holdfast.api.protection import Protection, active, none, pairs, passive, upstream
from holdfast.core.events import HandOverBegun
from holdfast.core.ids import GroupId, StageId
from holdfast.core.layout import Domain, PartitionGroup
from holdfast.core.placement import place
from holdfast.core.replica import Replica
from holdfast.errors import FlowError, HostError, ProtocolError
from holdfast.lab.sim import explore, flows
from holdfast.lab.sim.bugs import BUGS
from holdfast.lab.sim.explore import PROTOCOLS, Case, run
from holdfast.lab.sim.faults import PHASES, Fault
from holdfast.lab.sim.planted import Bug
from holdfast.plan.planner import plan, shape
from tests.support.tiers import nightly

SITES = 5
TWO = [(who, other) for who in range(SITES) for other in range(SITES - 1) if who <= other]
"""All two of the sites: `other` is a rank among those that are not `who`."""


def killed(seed: int, protocol: str, flow: str, *faults: Fault, sites: int = SITES) -> None:
    """The flow survives, and its result is right."""
    done = run(Case(seed, flow, protocol, sites=sites, faults=faults))
    assert done.problem is None, (seed, done.problem)
    assert not done.stopped and len(done.done) == len(faults), (seed, done.done)


def test_every_two_of_the_sites_are_named() -> None:
    named = {tuple(sorted((a, [s for s in range(SITES) if s != a][b]))) for a, b in TWO}
    assert named == set(combinations(range(SITES), 2))


@pytest.mark.parametrize(
    ("flow", "seeds"),
    [("times", range(1)), nightly("times", range(1, 8)), nightly("windows", range(8))],
)
@pytest.mark.parametrize("protocol", ["passive-2", "active-3", "triples", "upstream-of-2"])
def test_any_two_sites_are_killed_at_once(
    protocol: str, flow: str, seeds: range, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All roles are among them: of a computing replica and its standbys, of the ends, of the chain
    of sequencers."""
    monkeypatch.setitem(PROTOCOLS, "upstream-of-2", UPSTREAM_OF_2)
    monkeypatch.setattr(explore.Case, "flow_with", _losing_two)
    for seed in seeds:
        for who, other in TWO:
            at = 0.015 + 0.004 * ((seed + who + 2 * other) % 8)
            killed(seed, protocol, flow, Fault("crash of two", at, who=who, other=other))


UPSTREAM_OF_2 = upstream(summary_interval=0.02, failure_domain="process")


def _losing_two(self: Case, first: str | None) -> Flow:
    flow = flows.make(self.flow, PROTOCOLS[self.protocol], self.rows_in)
    flow.losses = 2
    return flow


@pytest.mark.parametrize("protocol", ["passive-2", "active-3"])
@pytest.mark.parametrize("phase", [p for p in PHASES if p != "without a controller"])
def test_two_more_are_killed_whenever_the_flow_can_lose_them(protocol: str, phase: str) -> None:
    """After a crash, in every phase of its recovery. `Injector` leaves out what would take the last
    holder of a task."""
    first, then = Fault("crash", 0.02, who=1), Fault("crash of two", 0.02, phase, who=2, other=3)
    outcomes = [run(Case(s, "times", protocol, sites=6, faults=(first, then))) for s in range(3)]
    assert not [o.problem for o in outcomes if o.problem is not None]
    assert not any(o.stopped for o in outcomes)


def bug(name: str) -> Bug:
    return next(b for b in BUGS if b.name == name)


def test_that_one_standby_has_a_checkpoint_is_not_enough_and_only_two_kills_show_it() -> None:
    with bug("one standby is enough").planted():
        for who in range(SITES):
            killed(who, "passive-2", "times", Fault("crash", 0.03, who=who))
        outcomes = [
            run(Case(0, "times", "passive-2", sites=SITES, faults=(fault,)))
            for fault in (Fault("crash of two", 0.03, who=a, other=b) for a, b in TWO)
        ]
    assert any(o.problem for o in outcomes)


# --- how many replicas the ends have ------------------------------------------------------------


def ends(flow: Protection, stage: Protection | None = None, losses: int = 0) -> set[int]:
    made = flows.make("times", flow)
    made.losses = losses
    if stage is not None:
        next(n for n in made.nodes if hasattr(n, "operator")).protection = stage
    planned = plan(made)
    return {s.protection.replicas for s in planned.stages if s.protection and s.kind != "keyed"}


def test_sources_and_sinks_survive_what_the_strongest_stage_does() -> None:
    assert ends(passive()) == ends(upstream()) == ends(active()) == {2}
    assert ends(passive(standbys=2)) == ends(active(replicas=3)) == ends(pairs(replicas=3)) == {3}
    assert ends(upstream(k=1)) == {2} and ends(upstream(k=2)) == {3}
    assert ends(pairs(), passive(standbys=3)) == {4}
    assert ends(upstream(), losses=2) == {3}


def test_a_stage_that_survives_fewer_losses_than_the_flow_is_refused() -> None:
    weak = r"survive 2 losses at once, and stage 'time window by \(k\)' protected by pairs\(\) .*1"
    with pytest.raises(FlowError, match=weak):
        ends(upstream(), pairs(), losses=2)
    with pytest.raises(FlowError, match=r"sources and sinks protected by none\(\) survive only 0"):
        ends(none(), losses=1)
    with pytest.raises(FlowError, match="losses must not be negative"):
        Flow("f", losses=-1)
    with pytest.raises(FlowError, match=r"passive\(\) needs at least 1 standby, not 0"):
        passive(standbys=0)
    with pytest.raises(FlowError, match=r"active\(\) needs at least 2 replicas, not 1"):
        active(replicas=1)


def test_a_summary_survives_what_the_flow_does() -> None:
    made = flows.make("dmz", upstream(k=2, summary_interval=1))
    keyed = [s.protection for s in plan(made).stages if s.kind == "keyed"]
    assert {p.standbys for p in keyed if p} == {2}


def test_too_few_failure_domains_are_refused_at_the_start() -> None:
    made = flows.make("times", passive(standbys=2, failure_domain="process"))
    domains = {s: Domain(f"p{s}", f"p{s}", "h", "a") for s in range(2)}
    with pytest.raises(HostError, match=r"wants 3 replicas of each partition.* only 2"):
        place(shape(plan(made), 4), [*domains], domains)


# --- standbys with different checkpoints --------------------------------------------------------


class OlderTakesOver:
    """The first standby of a task gets no checkpoints for a while. Then the replica dies, and that
    standby takes over, slowly. It dies when it has begun to send a checkpoint to the other one,
    which has a later one."""

    TASK = (StageId(1), GroupId(0))

    def __init__(self, seed: int) -> None:
        self.world = Case(seed, "times", "passive-2", faults=(), sites=4).world()
        self.refusals = 0
        self._next: Callable[[PartitionGroup], None] | None = self._block

    def run(self) -> None:
        world = self.world
        while not world.ended:
            assert world.step() and world.time < 10, world.describe()
            view = world.controller.view
            if view is None or not world.controller.running or world.time < 0.008:
                continue
            if self._next is not None:
                self._next(view.group(self.TASK))
            elif world.controller.protected:
                world.gate_is_open = True

    def _block(self, group: PartitionGroup) -> None:
        self.replica, (self.older, self.later) = group.replicas[0], group.standbys
        if (self.replica, self.older) in self.world.network:
            self.world.block((self.replica, self.older), 0.09)
            self._next = self._crash_replica

    def _crash_replica(self, group: PartitionGroup) -> None:
        nodes = self.world.nodes
        older, later = (
            nodes[s].dataflow.tasks[self.TASK].finished for s in (self.older, self.later)
        )
        if later >= older + 2:
            self.world.slow(self.older, 60.0, 0.4)
            self.world.crash(self.replica)
            self._next = self._crash_older

    def _crash_older(self, group: PartitionGroup) -> None:
        if group.led_by(self.older) and self.refusals:
            self.world.crash(self.older)
            self._next = None


@pytest.fixture
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    guard = passive(standbys=2, interval=0.002, failure_domain="process")
    monkeypatch.setitem(PROTOCOLS, "passive-2", guard)


def counted(story: OlderTakesOver, monkeypatch: pytest.MonkeyPatch, *, refuses: bool) -> None:
    right = Replica._may_use

    def may_use(self: Replica, event: HandOverBegun) -> bool:
        usable = right(self, event)
        story.refusals += not usable
        return usable or not refuses

    monkeypatch.setattr(Replica, "_may_use", may_use)


@pytest.mark.usefixtures("often")
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_standby_keeps_its_checkpoint_when_one_with_an_older_one_takes_over(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    story = OlderTakesOver(seed)
    counted(story, monkeypatch, refuses=True)
    story.run()
    assert story.refusals and story.world.error is None
    right = flows.expected("times")["out"]
    assert flows.in_order(story.world.result("out")).equals(right)


@pytest.mark.usefixtures("often")
def test_a_standby_that_goes_back_lacks_input(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the story shows what it is meant to show."""
    story = OlderTakesOver(1)
    counted(story, monkeypatch, refuses=False)
    with pytest.raises(ProtocolError, match="sent epoch 2 after -1"):
        story.run()
