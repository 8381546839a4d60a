"""Dataflow pairs and cluster pairs on simulated sites: kills in every phase, quiet sources, idle
sites, and both mirrors at once."""

import pytest

from holdfast.errors import SiteLostError
from holdfast.lab.sim import explore
from holdfast.lab.sim.explore import MIRRORED, PROTOCOLS, Case, run
from holdfast.lab.sim.faults import PHASES, Fault
from holdfast.lab.sim.flows import expected, in_order, make
from holdfast.lab.sim.world import World

FIRST_AT = 0.02
SITES = {"dataflow": 2, "cluster": 4}
"""None is idle, so that a mirror waits for a site that is launched."""


@pytest.mark.parametrize("phase", [p for p, before in PHASES.items() if "crash" in before])
@pytest.mark.parametrize("protocol", MIRRORED)
def test_a_site_is_killed_in_every_phase_of_the_rebuild(protocol: str, phase: str) -> None:
    """First a site of one mirror, then any other in this phase: the flow goes on if the whole
    mirror is left, and says so if not."""
    hit = False
    for who in range(4):
        faults = (
            Fault("crash", FIRST_AT, who=who % 2),
            Fault("crash", FIRST_AT, phase, who=who, beyond=who == 3),
        )
        outcome = run(Case(who, "windows", protocol, sites=SITES[protocol], faults=faults))
        assert outcome.problem is None, (who, outcome.problem)
        hit = hit or (phase, "crash") in outcome.done
    # The flow stands still while a mirror is rebuilt, so there may be nothing to replay.
    assert hit or phase == "replaying"


@pytest.mark.parametrize("share", [0.8, 0.0], ids=["after some rows", "before the first row"])
@pytest.mark.parametrize("protocol", MIRRORED)
def test_a_mirror_is_rebuilt_while_the_source_is_quiet(
    protocol: str, share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The source gives the rest of its rows only when everything is protected again."""
    monkeypatch.setattr(explore, "FREE", share)
    for who in range(2):
        crash = (Fault("crash", 0.4, who=who),)
        outcome = run(Case(0, "windows", protocol, sites=4, faults=crash))
        assert outcome.problem is None and outcome.done == [("protected", "crash")]


@pytest.mark.parametrize("protocol,sites", [("dataflow", 3), ("cluster", 5)])
def test_a_mirror_is_rebuilt_on_idle_sites_if_no_other_is_launched(
    protocol: str, sites: int
) -> None:
    world = World(
        make("windows", PROTOCOLS[protocol]), sites=sites, options=explore.OPTIONS, relaunch=False
    )
    while world.steps < 60:
        world.step()
    world.crash(1)
    protected = False
    while not world.ended:
        assert world.step(), world.describe()
        protected = protected or (1 in world.controller.dead and world.controller.protected)
    assert world.error is None and protected
    for sink, right in expected("windows").items():
        assert in_order(world.result(sink)).equals(right)


@pytest.mark.parametrize("protocol", MIRRORED)
def test_both_mirrors_at_once_end_the_flow_by_name(protocol: str) -> None:
    world = World(make("windows", PROTOCOLS[protocol]), sites=4, options=explore.OPTIONS)
    while world.steps < 60:
        world.step()
    world.crash(0, 1)
    assert world.exceeded
    with pytest.raises(SiteLostError, match="no replica is left of 'events'"):
        world.run()


def test_a_controller_that_dies_while_a_mirror_is_rebuilt_leaves_no_flow_paused() -> None:
    faults = (
        Fault("crash", FIRST_AT, who=1),
        Fault("controller", FIRST_AT, "joining"),
    )
    for seed in range(3):
        outcome = run(Case(seed, "windows", "cluster", sites=4, faults=faults))
        assert outcome.problem is None and ("joining", "controller") in outcome.done
