"""``holdfast sim --minutes``: searches at random over everything that a run can differ in.

A seed decides on the flow, its protection, that of its first keyed stage, a change of it, the
numbers of sites, applications and rows, and the faults. Seeds of one group share the flow and the
protections, because such runs remember each other's results.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from rich.console import Console

from holdfast.errors import FlowError
from holdfast.lab.sim.command import show_failure
from holdfast.lab.sim.edges import EDGES, Edge, reached, share, summary
from holdfast.lab.sim.explore import MIRRORED, PROTOCOLS, Case, Outcome, run
from holdfast.lab.sim.faults import APP_PAIRS, PAIRS, STARTING, Fault
from holdfast.lab.sim.flows import FLOWS, POISONED
from holdfast.plan.planner import plan

GROUP = 8
"""Number of seeds that share a flow and its protections."""
ROWS = (300, 600, 1_000)
POISONED_ROWS_MIN = 600
"""With fewer rows, a flow that is to stop at a bad one may not get to it."""
MOVES = (0, 4, 12)
GROUPS = (1, 1, 2)
"""Numbers of partition groups of a keyed stage for each site."""
UNMIXED = ("triples", *MIRRORED)
"""Protocols that are not combined with others, and run in one application."""
EARLY, EARLY_S_MAX = 0.15, 0.003
"""The share of runs in which something fails before the flow has started, and until when."""
EARLY_KINDS = ("crash", "crash", "reset")
UNREACHED_MAX = 20
"""Number of unreached pairs of the machines' tables that are printed."""


def drawn(seed: int) -> Case:
    """Return the case of a seed.

    >>> drawn(17) == drawn(17), drawn(17).flow == drawn(18).flow
    (True, True)
    """
    shared, chance = random.Random(f"flow {seed // GROUP}"), random.Random(f"case {seed}")
    while True:
        flow, protocol = shared.choice(list(FLOWS)), shared.choice(list(PROTOCOLS))
        others = [p for p in PROTOCOLS if p not in (protocol, *UNMIXED)]
        mixed, rows_in = shared.random() < 0.4, shared.choice(ROWS)
        if flow in POISONED:
            rows_in = max(rows_in, POISONED_ROWS_MIN)
        first = shared.choice(others) if mixed and protocol not in UNMIXED else None
        if _is_allowed(flow, protocol, first):
            break
    changes = chance.random() < 0.3 and protocol not in UNMIXED
    then = chance.choice([p for p in others if p != first]) if changes else None
    if then is not None and not _is_allowed(flow, protocol, then):
        then = None
    several = protocol not in UNMIXED and chance.random() < 0.1
    case = Case(
        seed,
        flow,
        protocol,
        first,
        then,
        sites=chance.choice((0, 0, 3, 4, 6, 7)),
        apps=chance.choice((2, 3)) if several else 0,
        rows_in=rows_in,
        moves=0 if protocol in MIRRORED else chance.choice(MOVES),
        groups=shared.choice(GROUPS),
    )
    if chance.random() >= EARLY:
        return case
    kind, at = chance.choice(EARLY_KINDS), chance.uniform(0.0, EARLY_S_MAX)
    early = Fault(kind, at, STARTING, chance.randrange(12), chance.randrange(12))
    return replace(case, faults=(early, *case.schedule()))


@cache
def _is_allowed(flow: str, protocol: str, first: str | None) -> bool:
    """Whether a flow can be protected in this way."""
    try:
        plan(Case(0, flow, protocol).flow_with(first))
    except FlowError:
        return False
    return True


@dataclass(slots=True)
class Tried:
    """What a search has tried so far."""

    runs: int = 0
    stopped: int = 0
    steps: int = 0
    processor_s: float = 0.0
    counts: dict[str, Counter[str]] = field(default_factory=dict)
    """By name of what runs differ in: how often each value was tried."""
    hit: set[tuple[str, str]] = field(default_factory=set)
    """The pairs of a phase and a fault."""
    edges: set[Edge] = field(default_factory=set)
    failed: Outcome | None = None
    """The first run that failed."""

    def add(self, outcome: Outcome) -> None:
        case = outcome.case
        if outcome.failure is not None and self.failed is None:
            self.failed = outcome
        self.runs += 1
        self.stopped += outcome.stopped
        self.steps += outcome.steps
        self.hit.update(outcome.done)
        self._count("flows", case.flow)
        self._count("protocols", case.protocol)
        if case.first is not None:
            self._count("mixes", f"{case.first}+{case.protocol}")
        if case.then is not None:
            self._count("changes", f"{case.first or case.protocol}>{case.then}")
        self._count("sites", str(case.sites or 3 + case.seed % 3))
        self._count("applications", str(case.applications))
        self._count("moves", str(case.moves))
        self._count("groups per site", str(case.groups))

    def _count(self, what: str, value: str) -> None:
        self.counts.setdefault(what, Counter())[value] += 1

    def lines(self) -> Iterator[str]:
        """Describe it."""
        rate = self.runs / self.processor_s if self.processor_s else 0.0
        yield (
            f"{self.runs} runs, {self.stopped} stopped as they should; "
            f"{rate:.1f} runs per second and core"
        )
        for what, values in self.counts.items():
            if len(values) <= len(PROTOCOLS):
                shown = ", ".join(f"{v} {n}" for v, n in sorted(values.items()))
                yield f"{what}: {shown}"
            else:
                yield f"{what}: {len(values)} in {values.total()} runs"
        pairs = {*PAIRS, *APP_PAIRS}
        yield f"pairs of phase and fault: {len(self.hit & pairs)} of {len(pairs)}"
        yield f"(state, event) pairs: {share(self.edges):.0%} ({summary(self.edges)})"
        missing = sorted(EDGES - self.edges)
        for edge in missing[:UNREACHED_MAX]:
            yield f"  not reached: {edge}"
        if len(missing) > UNREACHED_MAX:
            yield f"  and {len(missing) - UNREACHED_MAX} more"


@dataclass(slots=True)
class _SeedGroup:
    """The outcomes of a group of seeds, up to the first that fails."""

    outcomes: list[Outcome]
    edges: set[Edge]
    processor_s: float


def _try_group(first: int) -> _SeedGroup:
    begun, outcomes = time.process_time(), []
    with reached() as edges:
        for seed in range(first, first + GROUP):
            outcome = run(drawn(seed))
            outcome.problem = None  # an exception may not survive pickling
            outcome.log.clear()
            outcomes.append(outcome)
            if outcome.failure is not None:
                break
    return _SeedGroup(outcomes, edges, time.process_time() - begun)


def _groups(first: int, jobs: int, goes_on: Callable[[], bool]) -> Iterator[_SeedGroup]:
    """Try groups of seeds, at least one, as long as `goes_on`."""
    if jobs == 1:
        yield _try_group(first)
        while goes_on():
            first += GROUP
            yield _try_group(first)
        return
    with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
        running: set[Future[_SeedGroup]] = {pool.submit(_try_group, first)}
        while running:
            while len(running) <= jobs and goes_on():
                first += GROUP
                running.add(pool.submit(_try_group, first))
            done, running = wait(running, return_when=FIRST_COMPLETED)
            yield from (future.result() for future in done)


def search(minutes: float, seed: int, out: Path, console: Console, jobs: int = 0) -> int:
    """Search for this time, from the group of this seed on, in all processors. Print what was
    tried. If a run fails, show it minimised and return the exit status of its kind of `Failure`."""
    until = time.monotonic() + 60 * minutes
    tried, first = Tried(), seed // GROUP * GROUP
    console.print(f"seeds from {first}, {minutes:g} minutes", highlight=False)

    def goes_on() -> bool:
        return tried.failed is None and time.monotonic() < until

    for group in _groups(first, jobs or os.cpu_count() or 1, goes_on):
        tried.edges |= group.edges
        tried.processor_s += group.processor_s
        for outcome in group.outcomes:
            tried.add(outcome)
    for line in tried.lines():
        console.print(line, markup=False, highlight=False, soft_wrap=True)
    return _show(tried.failed, out, console) if tried.failed is not None else 0


def _show(failed: Outcome, out: Path, console: Console) -> int:
    assert failed.failure is not None
    again = f"holdfast sim --drawn --seed {failed.case.seed} --trace"
    console.print(str(failed.case), markup=False, highlight=False, soft_wrap=True)
    show_failure(failed.case, out, console, again=again)
    return failed.failure.value
