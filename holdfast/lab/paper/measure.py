"""Measures the paper's overhead and recovery times on the model."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.lab.paper.layouts import Layout, Parameters
from holdfast.lab.paper.model import Approach, System

WARM_S = 0.3
AFTER_S = 0.12
"""Duration of the simulation after the failure was detected."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """Recovery times in milliseconds after the failure was detected. Partial recovery ends when the
    next node gets the first new tuple; full recovery ends with the last of the consecutive tuples
    from then on that took longer than any before the failure."""

    partial_ms: float
    full_ms: float


def overhead(
    layout: Layout, approach: Approach, parameters: Parameters, seed: int, seconds: float
) -> float:
    """Return the bytes for protection relative to those of processed tuples, in percent."""
    extra, tuples = bandwidth(layout, approach, parameters, seed, seconds)
    return 100.0 * extra / tuples


def bandwidth(
    layout: Layout, approach: Approach, parameters: Parameters, seed: int, seconds: float
) -> tuple[float, float]:
    """Return the bytes per second for protection, and those of tuples."""
    system = System(layout, approach, parameters, seed)
    system.clock.run(WARM_S)
    begun = system.traffic.extra, system.traffic.tuples
    system.clock.run(WARM_S + seconds)
    extra, tuples = system.traffic.extra - begun[0], system.traffic.tuples - begun[1]
    return extra / seconds, tuples / seconds


def recovery(
    layout: Layout, approach: Approach, parameters: Parameters, seed: int, node: int
) -> Recovery:
    """Crash a node at a moment determined by the seed, and measure its recovery."""
    arrivals, fails_at = crashed(layout, approach, parameters, seed, node)
    detected = fails_at + parameters.detection_s
    streams = [recovery_of(arrived, fails_at, detected) for arrived in arrivals]
    return Recovery(min(r.partial_ms for r in streams), max(r.full_ms for r in streams))


def crashed(
    layout: Layout, approach: Approach, parameters: Parameters, seed: int, node: int
) -> tuple[list[list[tuple[float, float]]], float]:
    """Crash a node at a moment determined by the seed. Return the creation and arrival times of
    each stream's tuples, and that moment."""
    system = System(layout, approach, parameters, seed)
    arrivals = system.watch(node)
    fails_at = WARM_S + 2 * parameters.interval_s + 0.1 * system.random.random()
    system.clock.run(fails_at)
    system.crash(node)
    system.clock.run(fails_at + parameters.detection_s + AFTER_S)
    return arrivals, fails_at


def delays(
    arrivals: Sequence[tuple[float, float]], fails_at: float, before_s: float = 0.03
) -> list[tuple[float, float]]:
    """Return when tuples arrived, in milliseconds since a failure, and how long each took.

    >>> delays([(0.9, 0.91), (1.0, 1.01), (1.01, 1.12)], 1.015)
    [(-5.0, 10.0), (105.0, 110.0)]
    """
    return [
        (round(1e3 * (arrived - fails_at), 2), round(1e3 * (arrived - created), 2))
        for created, arrived in arrivals
        if arrived >= fails_at - before_s
    ]


def recovery_of(
    arrivals: Sequence[tuple[float, float]], fails_at: float, detected: float
) -> Recovery:
    """Compute recovery times from the creation and arrival times of a stream's tuples, in the order
    of arrival.

    >>> created = [n / 10 for n in range(9)]
    >>> recovery_of([(t, t + 0.1 if t < 0.3 else max(0.7, t + 0.1)) for t in created], 0.35, 0.6)
    Recovery(partial_ms=100.0, full_ms=100.0)
    """
    usual = max(arrived - created for created, arrived in arrivals if arrived <= fails_at) + 1e-9
    since = [(created, arrived) for created, arrived in arrivals if arrived > detected]
    late = itertools.takewhile(lambda at: at[1] - at[0] > usual, since)
    full = max((arrived for _, arrived in late), default=since[0][1])
    return Recovery(round(1e3 * (since[0][1] - detected), 3), round(1e3 * (full - detected), 3))


def mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 2)
