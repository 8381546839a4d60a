"""What is measured of the model: the paper's overhead and recovery times."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from holdfast.lab.paper.layouts import Layout, Parameters
from holdfast.lab.paper.model import Approach, System

WARM_S = 0.3
AFTER_S = 0.12
"""How long is waited after a failure was noticed."""


@dataclass(frozen=True, slots=True)
class Recovery:
    """In milliseconds after the failure was noticed: when whoever comes next got the first
    tuple that it did not have, and when the last in a row that took longer than any before."""

    partial_ms: float
    full_ms: float


def overhead(
    layout: Layout, approach: Approach, parameters: Parameters, seed: int, seconds: float
) -> float:
    """Bytes that protect, relative to those of tuples that are processed; in percent."""
    extra, tuples = bandwidth(layout, approach, parameters, seed, seconds)
    return 100.0 * extra / tuples


def bandwidth(
    layout: Layout, approach: Approach, parameters: Parameters, seed: int, seconds: float
) -> tuple[float, float]:
    """Bytes a second that protect, and those of tuples."""
    system = System(layout, approach, parameters, seed)
    system.clock.run(WARM_S)
    begun = system.traffic.extra, system.traffic.tuples
    system.clock.run(WARM_S + seconds)
    extra, tuples = system.traffic.extra - begun[0], system.traffic.tuples - begun[1]
    return extra / seconds, tuples / seconds


def recovery(
    layout: Layout, approach: Approach, parameters: Parameters, seed: int, node: int
) -> Recovery:
    """Lose a node at a moment that the seed decides."""
    system = System(layout, approach, parameters, seed)
    arrivals = system.watch(node)
    fails_at = WARM_S + 2 * parameters.interval_s + 0.1 * system.random.random()
    system.clock.run(fails_at)
    system.crash(node)
    noticed = fails_at + parameters.detection_s
    system.clock.run(noticed + AFTER_S)
    found = [recovery_of(came, fails_at, noticed) for came in arrivals]
    return Recovery(min(r.partial_ms for r in found), max(r.full_ms for r in found))


def recovery_of(
    arrivals: Sequence[tuple[float, float]], fails_at: float, noticed: float
) -> Recovery:
    """From when the tuples of a stream were made and when they came, in the order of arrival.

    >>> made = [n / 10 for n in range(9)]
    >>> recovery_of([(t, t + 0.1 if t < 0.3 else max(0.7, t + 0.1)) for t in made], 0.35, 0.6)
    Recovery(partial_ms=100.0, full_ms=100.0)
    """
    usual = max(came - born for born, came in arrivals if came <= fails_at) + 1e-9
    since = [(born, came) for born, came in arrivals if came > noticed]
    late = itertools.takewhile(lambda at: at[1] - at[0] > usual, since)
    full = max((came for _, came in late), default=since[0][1])
    return Recovery(round(1e3 * (since[0][1] - noticed), 3), round(1e3 * (full - noticed), 3))


def mean(values: Iterable[float]) -> float:
    return round(statistics.fmean(values), 2)
