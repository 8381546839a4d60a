"""The mean time until a flow loses all replicas of a partition, by Monte Carlo.

Sites fail at random and independently of each other. A site that has failed is repaired and comes
back empty, as a standby. A *unit* is what is lost with a site and rebuilt as a whole: one place
with partition pairs, a whole mirror with cluster pairs. It is rebuilt as soon as every one of its
places has a site, and until then it protects nothing. All times are exponentially distributed.

Real failures of both replicas are rare, so a simulation that waits for them takes for ever. Here a
run goes from the state in which nothing is broken back to it (a cycle) and never takes a step that
would end the flow. It adds up the probability of those steps instead, and the expected duration of
its states, each weighted by the probability that the flow has got there. The mean time to failure
is the ratio of the two means. All cycles advance together, one event of each in a step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from holdfast.core.layout import Domain, View
from holdfast.core.mirrors import mirrors_of

Array = np.ndarray[Any, Any]

HOUR_S = 3_600.0
YEAR_S = 365.25 * 24 * HOUR_S
Z = 1.96
"""Half the width of a 95 % confidence interval, in standard errors."""


@dataclass(frozen=True, slots=True)
class Times:
    """Mean times in seconds."""

    site_mttf_s: float = 30 * 24 * HOUR_S
    repair_s: float = 600.0
    """From the failure of a site until it is back, as a standby."""
    catch_up_s: float = 5.0
    """Until a new site has the state of the one it replaces."""

    def without_standby(self) -> float:
        """Return for how long a failure leaves partitions unprotected if no standby is there."""
        return self.repair_s + self.catch_up_s


@dataclass(frozen=True, slots=True)
class Scheme:
    """What is lost with each site, and what must not be lost together."""

    unit_of: tuple[int, ...]
    """By place: its unit."""
    groups: tuple[tuple[int, ...], ...]
    """The sets of units that hold the replicas of some partition."""

    @property
    def places(self) -> int:
        return len(self.unit_of)

    @property
    def units(self) -> int:
        return 1 + max(self.unit_of)

    def dangerous(self, place: int) -> int:
        """Return how many other places must not fail until the loss of this one is repaired; for
        two replicas of each partition."""
        unit = self.unit_of[place]
        near = {u for group in self.groups if unit in group for u in group} - {unit}
        return sum(u in near for u in self.unit_of)

    @classmethod
    def of_view(cls, view: View, whole_mirrors: bool) -> Scheme:
        """Return the scheme of a placement. Members without replicas have no place in it."""
        groups = [view.group(task).replicas for task in view.tasks()]
        held = sorted({site for replicas in groups for site in replicas})
        if whole_mirrors:
            mirrors = mirrors_of(view)
            unit = {s: n for n, mirror in enumerate(mirrors) for s in mirror}
        else:
            unit = {site: n for n, site in enumerate(held)}
        found = {tuple(sorted({unit[s] for s in replicas})) for replicas in groups}
        return cls(tuple(unit[s] for s in held), tuple(sorted(found)))

    @classmethod
    def disjoint_pairs(cls, places: int) -> Scheme:
        """Return pairs of sites that share nothing with other sites: what the papers' formula
        counts."""
        return cls(tuple(range(places)), tuple((p, p + 1) for p in range(0, places, 2)))


def domains(sites: Sequence[Any]) -> dict[Any, Domain]:
    """Every site on a host of its own, so that they fail independently."""
    return {s: Domain(f"p{s}", f"e{s}", f"h{s}", "a") for s in sites}


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean in seconds, and half the width of its 95 % confidence interval."""

    mean_s: float
    error_s: float

    @property
    def years(self) -> float:
        return self.mean_s / YEAR_S

    @classmethod
    def of_ratio(cls, over: Array, under: Array) -> Estimate:
        """Return the ratio of the means of paired samples, with the error of that ratio."""
        ratio = over.mean() / under.mean()
        spread = np.std(over - ratio * under, ddof=1) / math.sqrt(over.size)
        return cls(float(ratio), float(Z * spread / under.mean()))


def first_order(scheme: Scheme, times: Times, exposed_s: float) -> float:
    """Return the mean time to failure in seconds if only two failures ever come together: any site
    fails first, and one of those that are dangerous then within `exposed_s`."""
    couples = sum(scheme.dangerous(place) for place in range(scheme.places))
    return times.site_mttf_s**2 / (couples * exposed_s) if couples else math.inf


def simulate(
    scheme: Scheme, times: Times, standbys: int, cycles: int = 20_000, seed: int = 1
) -> Estimate:
    """Estimate the mean time to failure."""
    runs = _Cycles(scheme, times, standbys, cycles, np.random.default_rng(seed))
    while runs.open.size:
        runs.step()
    return Estimate.of_ratio(runs.lasted_s, runs.failed)


class _Cycles:
    """Cycles that advance together. Rows are cycles; `open` has those that have not ended."""

    def __init__(
        self, scheme: Scheme, times: Times, standbys: int, cycles: int, random: np.random.Generator
    ) -> None:
        self._times, self._standbys, self._random = times, standbys, random
        self._unit_of = np.array(scheme.unit_of)
        self._holds = np.zeros((len(scheme.groups), scheme.units), np.int16)
        for number, group in enumerate(scheme.groups):
            self._holds[number, list(group)] = 1
        self._belongs = np.zeros((scheme.places, scheme.units), np.int16)
        self._belongs[np.arange(scheme.places), self._unit_of] = 1
        self.open = np.arange(cycles)
        self.lasted_s, self.failed = np.zeros(cycles), np.zeros(cycles)
        """By cycle: its expected duration, and the probability that the flow has ended in it."""
        self._weight = np.ones(cycles)
        self._manned = np.ones((cycles, scheme.places), bool)
        """By place: whether it has a site."""
        self._up = np.ones((cycles, scheme.units), bool)
        """By unit: whether it has its state."""
        self._idle = np.full(cycles, standbys)
        self._broken = np.zeros(cycles, np.int64)

    def step(self) -> None:
        """Let one event happen in every open cycle."""
        rates, fatal = self._rates()
        total = rates.sum(axis=1)
        at, risk = self.open, (rates[:, : fatal.shape[1]] * fatal).sum(axis=1) / total
        self.lasted_s[at] += self._weight[at] / total
        self.failed[at] += self._weight[at] * risk  # 1 - weight would lose digits
        self._weight[at] *= 1.0 - risk
        rates[:, : fatal.shape[1]][fatal] = 0.0
        self._happen(_draw(rates, self._random))
        self._staff()
        whole = self._up.all(axis=1) & (self._broken == 0) & (self._idle == self._standbys)
        self._keep(~whole)

    def _rates(self) -> tuple[Array, Array]:
        """Return the rates of all events, and which failures of a place would end the flow."""
        fails = self._manned / self._times.site_mttf_s
        complete = ~((~self._manned).astype(np.int16) @ self._belongs > 0)
        caught_up = (complete & ~self._up) / self._times.catch_up_s
        idle_fails = self._idle / self._times.site_mttf_s
        repaired = self._broken / self._times.repair_s
        rates = np.column_stack([fails, caught_up, idle_fails, repaired])
        up = self._up.astype(np.int16)
        alone = (up @ self._holds.T == 1).astype(np.int16) @ self._holds > 0
        return rates, (alone & self._up)[:, self._unit_of] & self._manned

    def _happen(self, event: Array) -> None:
        rows, places, units = np.arange(event.size), self._manned.shape[1], self._up.shape[1]
        failed = event < places
        self._manned[rows[failed], event[failed]] = False
        self._up[rows[failed], self._unit_of[event[failed]]] = False
        caught_up = ~failed & (event < places + units)
        self._up[rows[caught_up], event[caught_up] - places] = True
        idle_failed, repaired = event == places + units, event == places + units + 1
        self._idle += repaired.astype(np.int64) - idle_failed
        self._broken += failed.astype(np.int64) + idle_failed - repaired

    def _staff(self) -> None:
        """Give a standby to the first place without a site. One event causes at most one such."""
        rows = np.flatnonzero((self._idle > 0) & ~self._manned.all(axis=1))
        self._manned[rows, self._manned[rows].argmin(axis=1)] = True
        self._idle[rows] -= 1

    def _keep(self, rows: Array) -> None:
        self.open, self._manned, self._up = self.open[rows], self._manned[rows], self._up[rows]
        self._idle, self._broken = self._idle[rows], self._broken[rows]


def _draw(rates: Array, random: np.random.Generator) -> Array:
    """Return a column for each row, with probabilities proportional to the rates."""
    upto = rates.cumsum(axis=1)
    return (random.random(len(upto))[:, None] * upto[:, -1:] >= upto).sum(axis=1)
