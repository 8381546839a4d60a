"""The rounds of the balancer, with the controller's own machine and invented statistics."""

from typing import Any

import pytest

from holdfast.control.balancer import LoadBalancer, RoundPhase
from holdfast.core.controller import Controller
from holdfast.core.events import ReplicaReported, SitesFailed
from holdfast.core.requests import MovesWanted
from tests.support.controllers import PAIRS, running, seen


class Sites:
    """What sites report: how busy they are, and how the work is distributed over their tasks."""

    def __init__(self, controller: Controller) -> None:
        self.controller = controller
        self.now = 100.0
        self.busy = dict.fromkeys(controller.roster.domains, 0.5)
        self._idle = dict.fromkeys(self.busy, 0.0)
        self._work: dict[tuple[int, int, int], float] = {}

    def pass_time(self, seconds: float) -> None:
        self.now += seconds
        for site, busy in self.busy.items():
            self._idle[site] += (1 - busy) * seconds
            held = self.controller.view.tasks_at(site)
            for task in held:
                key = (site, *task)
                self._work[key] = self._work.get(key, 0.0) + busy * seconds / len(held)

    def status(self) -> dict[int, dict[str, Any]]:
        names = [s.name for s in self.controller.shape.stages]
        return {
            site: {
                "at_s": self.now,
                "idle_s": self._idle[site],
                "cpu_s": sum(w for (s, *_), w in self._work.items() if s == site),
                "stages": [
                    {
                        "stage": names[task[0]],
                        "group": task[1],
                        "rows_in": 0,
                        "work_s": self._work.get((site, *task), 0.0),
                        "state_bytes": 10,
                    }
                    for task in self.controller.view.tasks_at(site)
                ],
            }
            for site in self.busy
        }


@pytest.fixture
def controller() -> Controller:
    return running(PAIRS, sites=4, spares=0)


def step(balancer: LoadBalancer, sites: Sites, seconds: float = 0.3) -> MovesWanted | None:
    sites.pass_time(seconds)
    return balancer.step(sites.controller, sites.status(), sites.now)


def rounds(balancer: LoadBalancer, sites: Sites, count: int) -> list[MovesWanted]:
    found = [step(balancer, sites) for _ in range(count)]
    return [f for f in found if f is not None]


def test_sites_that_are_alike_keep_what_they_have(controller: Controller) -> None:
    balancer, sites = LoadBalancer(), Sites(controller)
    assert rounds(balancer, sites, 10) == []
    assert balancer.phase is RoundPhase.COLLECTING
    assert balancer.rounds[-1].imbalance == pytest.approx(1.0)


def test_a_busy_site_gives_and_the_next_round_waits_for_the_move(controller: Controller) -> None:
    balancer, sites = LoadBalancer(), Sites(controller)
    held = {s: controller.view.tasks_at(s) for s in controller.view.members}
    keyed = [s for s, tasks in held.items() if sum(u[0] == 1 for u in tasks) > 1]
    sites.busy = dict.fromkeys(sites.busy, 0.2) | {keyed[0]: 1.0}
    (wanted, *_) = rounds(balancer, sites, 8)
    assert {m.source for m in wanted.moves} == {keyed[0]}
    assert "moves, expected" in balancer.rounds[-1].reasons[0] or balancer.rounds[0].reasons
    controller.handle(wanted)
    seen(controller)
    assert step(balancer, sites) is None and balancer.phase is RoundPhase.MOVING
    for move in wanted.moves:
        number = controller.view.number
        controller.handle(ReplicaReported(move.target, move.task, number, "installed"))
        controller.handle(ReplicaReported(move.target, move.task, number, "caught_up"))
    seen(controller)
    step(balancer, sites)
    assert balancer.phase is RoundPhase.COLLECTING


def test_a_failure_abandons_the_round(controller: Controller) -> None:
    balancer, sites = LoadBalancer(), Sites(controller)
    step(balancer, sites)
    controller.handle(SitesFailed((3,), "killed"))
    del sites.busy[3]
    assert step(balancer, sites) is None
    assert balancer.phase is RoundPhase.RESTING
    assert balancer.metrics()["phase"] == "resting"


def test_a_site_that_has_not_reported_is_waited_for(controller: Controller) -> None:
    balancer, sites = LoadBalancer(), Sites(controller)
    sites.busy = {0: 1.0, 1: 0.1}
    assert rounds(balancer, sites, 5) == [] and not balancer.rounds
