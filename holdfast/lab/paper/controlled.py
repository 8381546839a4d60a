"""The mean time to failure with Holdfast's own controller: it decides where replicas join.

`holdfast.lab.paper.reliability` has every place taken over by one standby. The real controller has
other rules: it rebuilds one replica of a stage at a time, and if no standby is there it rebuilds on
sites that have other partitions. Here the machine itself gets failures, registrations and reports
at random times. Everything it places comes from `holdfast.core.placement`.

A run never takes a failure that would end the flow. It adds up the rate of those failures over
time; the mean time to failure is time divided by that sum. This holds as long as failures that end
the flow are rare.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import numpy as np

from holdfast.core.controller import Controller
from holdfast.core.effects import ControllerEffect, EndFlow, LaunchSite, Wait
from holdfast.core.events import (
    ControllerEvent,
    ReplicaReported,
    SiteRegistered,
    SitesFailed,
    ViewSeen,
    WaitOver,
)
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Shape, View
from holdfast.core.mirrors import is_whole
from holdfast.errors import InvariantError
from holdfast.lab.paper.reliability import Estimate, Times, domains

BATCHES = 20
"""Parts of a run, whose means give the confidence interval."""


@dataclass(slots=True)
class _Sum:
    """Time that has passed, and the rate of failures that end the flow, integrated over it."""

    seconds: float = 0.0
    fatal: float = 0.0


class ControlledSites:
    """A controller, and sites that fail, come back and catch up at random times."""

    def __init__(self, shape: Shape, sites: int, standbys: int, times: Times, seed: int) -> None:
        self.shape, self.times, self.random = shape, times, random.Random(seed)
        ids = [SiteId(n) for n in range(sites + standbys)]
        self.controller = Controller(shape, ids[:sites], ids[sites:])
        self.launched: list[SiteId] = [*ids]
        self.alive: list[SiteId] = []
        for site in ids:
            self._register(site)
        self._full_share = max(self._share(s) for s in ids)

    @property
    def view(self) -> View:
        assert self.controller.view is not None
        return self.controller.view

    # --- what the controller is told ------------------------------------------------------------

    def _tell(self, event: ControllerEvent) -> None:
        """Hand over an event and its consequences. Views are seen at once, and no wait for a site
        that is launched is worth its time: repairs take longer."""
        waiting = [event]
        while waiting:
            for effect in self.controller.handle(waiting.pop(0)):
                waiting += self._answers(effect)
            if not waiting and self.controller.view and not self.controller.seen_by_all:
                view = self.view
                waiting += [ViewSeen(s, view.term, view.number) for s in view.members]

    def _answers(self, effect: ControllerEffect) -> list[ControllerEvent]:
        match effect:
            case EndFlow():
                raise InvariantError(f"the flow has ended: {effect.error}")
            case LaunchSite():
                self.launched.append(effect.site)
            case Wait():
                return [WaitOver(effect.timer)]
        return []

    def _register(self, site: SiteId) -> None:
        self.launched.remove(site)
        self.alive.append(site)
        self._tell(SiteRegistered(site, ("", 0), domains([site])[site]))

    def _fail(self, site: SiteId) -> None:
        self.alive.remove(site)
        self._tell(SitesFailed((site,), "failed"))

    def _catch_up(self, joins: list[tuple[TaskId, SiteId]]) -> None:
        for task, site in joins:
            for phase in ("installed", "caught_up"):
                self._tell(ReplicaReported(site, task, self.view.number, phase))

    # --- what happens next ----------------------------------------------------------------------

    def _joins(self) -> list[tuple[TaskId, SiteId]]:
        return [(u, s) for u in self.view.tasks() for s in self.view.group(u).joining]

    def _share(self, site: SiteId) -> int:
        """Return the largest number of partitions of a stage that a site holds."""
        by_stage: dict[int, int] = {}
        for task in self.view.tasks_at(site):
            group = self.view.group(task)
            by_stage[task[0]] = by_stage.get(task[0], 0) + group.end - group.first
        return max(by_stage.values(), default=0)

    def _round_s(self, joins: list[tuple[TaskId, SiteId]]) -> float:
        """Return how long the replicas that join now take. A whole site takes `catch_up_s`; what
        joins at different sites joins side by side."""
        groups = [self.view.group(task) for task, _ in joins]
        return self.times.catch_up_s * max(g.end - g.first for g in groups) / self._full_share

    def fatal(self) -> list[SiteId]:
        """Return the sites whose failure would end the flow now."""
        if self.shape.granularity == "partition":
            groups = [self.view.group(task).replicas for task in self.view.tasks()]
            return sorted({group[0] for group in groups if len(group) == 1})
        return [s for s in self.alive if not is_whole(self.view, set(self.alive) - {s})]

    def step(self, sums: _Sum) -> None:
        """Let time pass until the next event that does not end the flow, and let it happen."""
        fatal, joins = self.fatal(), self._joins()
        safe = [s for s in self.alive if s not in fatal]
        per_site = 1.0 / self.times.site_mttf_s
        rates = [
            len(safe) * per_site,
            len(self.launched) / self.times.repair_s,
            1.0 / self._round_s(joins) if joins else 0.0,
        ]
        held = 1.0 / sum(rates)
        sums.seconds += held
        sums.fatal += held * len(fatal) * per_site
        (what,) = self.random.choices(("fails", "returns", "catches up"), rates)
        if what == "fails":
            self._fail(self.random.choice(safe))
        elif what == "returns":
            self._register(self.random.choice(self.launched))
        else:
            self._catch_up(joins)


def simulate(
    shape: Shape, sites: int, standbys: int, times: Times, steps: int, seed: int = 1
) -> Estimate:
    """Estimate the mean time to failure under the real controller."""
    world = ControlledSites(shape, sites, standbys, times, seed)
    batches = [_Sum() for _ in range(BATCHES)]
    for number in range(steps):
        world.step(batches[number * BATCHES // steps])
    seconds, fatal = (np.array([getattr(b, n) for b in batches]) for n in ("seconds", "fatal"))
    return Estimate.of_ratio(seconds, fatal)
