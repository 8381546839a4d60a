"""Runs many schedules of faults, and minimises those that fail."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import lru_cache, partial

from holdfast.api.graph import Flow
from holdfast.api.nodes import KeyedNode
from holdfast.api.options import Options
from holdfast.api.protection import Protection, active, pairs, passive, rollback, upstream
from holdfast.core.flow_phase import FlowPhase
from holdfast.core.sequencer import Budget
from holdfast.lab.sim import flows
from holdfast.lab.sim.checks import Stall, Violation, WorldChecks
from holdfast.lab.sim.faults import APP_KINDS, KINDS, SPAN_S, Fault, Injector, phase_of, schedule
from holdfast.lab.sim.memory import Memory
from holdfast.lab.sim.moving import Mover
from holdfast.lab.sim.run_trace import TraceEntry
from holdfast.lab.sim.timed import TimedWorld
from holdfast.plan.planner import plan, shape

STEPS_MAX = 60_000
PROTECTED_S_MAX = 3.0
"""Maximum virtual time after the last fault until everything is protected: thirty leases."""
GLANCE = 8
"""Number of steps between two checks whether everything is protected."""
CHANGE_S = 0.012
"""Maximum time by which a change of protection precedes the first fault."""
MEMORIES_MAX = 8
"""Number of flows whose results are remembered at the same time."""
FREE = 0.8
"""Share of its rows that a source gives before the flow has recovered from all faults."""

OPTIONS = Options(
    partitions=4,
    budget=Budget(epoch_rows_max=50, epochs_in_flight_max=4, bytes_in_flight_max=1 << 20),
    window=4,
    block_rows=20,
    read_ahead_rows=60,
    # Rows that wait behind the gate are not late when it opens.
    idle=3600,
    lease=0.1,
)

SCARCE_BYTES = 12_000
"""Buffers that fill up soon, so that slow replicas are removed."""

PROTOCOLS: dict[str, Protection] = {
    "pairs": pairs(failure_domain="process"),
    "triples": pairs(replicas=3, failure_domain="process"),
    "active": active(failure_domain="process"),
    "active-3": active(replicas=3, failure_domain="process"),
    "rollback": rollback(summary_interval=0.02, failure_domain="process"),
    "rollback-2": rollback(h=2, summary_interval=0.02, failure_domain="process"),
    "upstream": upstream(summary_interval=0.02, failure_domain="process"),
    "upstream-1": upstream(k=1, summary_interval=0.02, failure_domain="process"),
    "passive": passive(interval=0.008, failure_domain="process"),
    "passive-2": passive(standbys=2, interval=0.008, failure_domain="process"),
    "dataflow": pairs(granularity="dataflow", failure_domain="process"),
    "cluster": pairs(granularity="cluster", failure_domain="process"),
}
MIRRORED = ("dataflow", "cluster")
"""Protocols that lose a whole mirror with a site. They are not mixed with others, and run in one
application."""
ALONE = ("triples", "active-3", "passive-2", *MIRRORED)
"""Protocols that run in one application. They want more failure domains than there are
applications, or are mirrored."""


@dataclass(frozen=True, slots=True)
class Case:
    """Everything that determines a run."""

    seed: int
    flow: str = "dmz"
    protocol: str = "pairs"
    first: str | None = None
    """The protection of the first keyed stage, if it is not that of the flow."""
    then: str | None = None
    """The protection to which the first keyed stage changes; None: it does not change."""
    sites: int = 0
    """Number of sites; 0: three to five, depending on the seed."""
    apps: int = 0
    """Number of applications; 0: two or three for one seed in eight, else one."""
    rows_in: int = flows.ROWS
    kinds: tuple[str, ...] = KINDS
    """The kinds of faults."""
    moves: int = 0
    """Number of moves and changes of the sites that are asked for, besides the faults."""
    groups: int = 1
    """Number of partition groups for each site."""
    beyond: float = 0.1
    """The share of runs whose faults may exceed what the protection survives."""
    faults: tuple[Fault, ...] | None = None
    """The faults; None: those of the seed."""

    @property
    def finished_before(self) -> bool:
        """Whether the input ends right after the first fault, not after the flow has recovered."""
        return self.seed % 4 == 3

    @property
    def _world(self) -> tuple[str, str, str | None, int, int]:
        return self.flow, self.protocol, self.first, self.rows_in, self.groups

    def flow_with(self, first: str | None) -> Flow:
        """Return the flow, with this protection of its first keyed stage."""
        flow = flows.make(self.flow, PROTOCOLS[self.protocol], self.rows_in)
        if first is not None:
            keyed = next(node for node in flow.nodes if isinstance(node, KeyedNode))
            keyed.protection = PROTOCOLS[first]
        return flow

    @property
    def guards(self) -> tuple[Protection, ...]:
        """The protection of the stages after the change. Sources and sinks keep the replicas that
        they have."""
        before, after = (
            shape(plan(self.flow_with(name)), self._options().partitions)
            for name in (self.first, self.then)
        )
        return tuple(
            new.guard
            if new.kind == "keyed"
            else replace(new.guard, replicas=max(new.guard.replicas, old.guard.replicas))
            for old, new in zip(before.stages, after.stages, strict=True)
        )

    @property
    def applications(self) -> int:
        """The number of applications."""
        alone = any(p in ALONE for p in (self.protocol, self.first, self.then))
        if self.apps or alone or self.seed % 8 != 6:
            return self.apps or 1
        return 2 + self.seed // 8 % 2

    def schedule(self) -> list[Fault]:
        if self.faults is not None:
            return list(self.faults)
        if self.applications == 1:
            return schedule(self.seed, OPTIONS.lease_s, self.kinds, self.beyond)
        kinds = (*self.kinds, *APP_KINDS)
        return schedule(
            self.seed if self.apps else self.seed // 8, OPTIONS.lease_s, kinds, self.beyond
        )

    def _options(self) -> Options:
        options = OPTIONS
        if self.flow in flows.EVEN:
            rows = options.budget.epoch_rows_max
            options = replace(options, block_rows=rows, read_ahead_rows=3 * rows)
        options = replace(options, groups_per_site=self.groups, partitions=4 * self.groups)
        return replace(options, kept_bytes_max=SCARCE_BYTES) if self.seed % 5 == 4 else options

    def world(self) -> TimedWorld:
        flow = self.flow_with(self.first)
        stages = [*plan(flow).stages, *plan(self.flow_with(self.then or self.first)).stages]
        wanted = [s.protection for s in stages if s.protection]
        checkpoints = any(guard.every_ms for guard in wanted)
        world = TimedWorld(
            flow,
            sites=max(
                self.sites or 3 + self.seed % 3,
                self.applications,
                *(guard.wanted for guard in wanted),
            ),
            apps=self.applications,
            seed=self.seed,
            options=self._options(),
            free_rows=int(self.rows_in * FREE) // flows.SPLITS.get(self.flow, 1),
            # A memory does not hold what changed since a checkpoint, or when state began.
            memory=None if checkpoints or self.then else _memory(*self._world),
        )
        if self.then is not None:
            first = min((fault.at for fault in self.schedule()), default=SPAN_S)
            before = CHANGE_S * (self.seed % 8) / 8  # so that faults happen during the change
            world.at(max(0.0, first - before), partial(_change, guards=self.guards))
        world.poisoned = self.flow in flows.POISONED
        return world


def _change(world: TimedWorld, guards: tuple[Protection, ...]) -> None:
    """Change the protection as soon as a leader can do it."""
    if world.controller.state is FlowPhase.RUNNING and not world.leaderless:
        world.plane.want(guards)
    elif not world.ended:
        world.at(world.time + CHANGE_S, partial(_change, guards=guards))


@lru_cache(maxsize=MEMORIES_MAX)
def _memory(flow: str, protocol: str, first: str | None, rows_in: int, groups: int) -> Memory:
    """Return the memory of the runs of a flow in this process."""
    return Memory()


def forget() -> None:
    """Clear all memories: operators may compute different results from now on."""
    _memory.cache_clear()


class Failure(Enum):
    """What goes wrong in a run that fails. The values are exit statuses of ``holdfast sim``."""

    CRASH = 1
    """A machine raised an error."""
    WRONG = 3
    """The result is wrong, or a condition between sites does not hold."""
    STALL = 4
    """The flow did not end, or was not protected again in time."""

    @classmethod
    def of(cls, problem: Exception) -> Failure:
        if isinstance(problem, Stall):
            return cls.STALL
        return cls.WRONG if isinstance(problem, Violation) else cls.CRASH


@dataclass(slots=True)
class Outcome:
    """The result of a case."""

    case: Case
    problem: Exception | None
    done: list[tuple[str, str]] = field(default_factory=list)
    """The phase in which each fault was injected, and its kind."""
    stopped: bool = False
    steps: int = 0
    seconds: float = 0.0
    log: list[str] = field(default_factory=list)
    trace: list[TraceEntry] = field(default_factory=list)
    guards: tuple[Protection, ...] = ()
    """The protection of the stages at the end."""
    failure: Failure | None = None
    """The kind of the problem."""


def run(case: Case, *, trace: bool = False) -> Outcome:
    """Run a case to its end, with all checks."""
    world = case.world()
    if trace:
        world.trace.begin()
    injector, checks = Injector(world, case.schedule()), WorldChecks(world)
    mover = Mover(world, case.moves, case.seed)
    mover.begin()
    problem: Exception | None = None
    try:
        while not world.ended:
            if not world.step():
                raise Stall(f"nothing can happen any more: {world.describe()}")
            checks.step()
            injector.last_at = max(injector.last_at, mover.last_at)
            _open_gate(world, injector, case.finished_before)
            if world.steps > STEPS_MAX or world.time > injector.last_at + 2 * PROTECTED_S_MAX:
                raise Stall(f"the run does not end: {world.describe()}")
        checks.all()
        checks.end(case.flow, case.rows_in)
    except Exception as error:  # whatever a machine raises is a finding
        problem = error
    return Outcome(
        case,
        problem,
        injector.done,
        world.error is not None,
        world.steps,
        world.time,
        world.log,
        world.trace.entries,
        world.controller.shape.guards,
        Failure.of(problem) if problem is not None else None,
    )


def _open_gate(world: TimedWorld, injector: Injector, finished_before: bool) -> None:
    """Let the input end once the flow has recovered. It is a violation if it does not recover. With
    `finished_before` the input ends after the first fault."""
    if world.gate_is_open or world.steps % GLANCE or world.time < injector.last_at:
        return
    if finished_before and injector.done:
        world.gate_is_open = True
    if any(fault.phase != "ending" for fault in injector.waiting):
        return
    if phase_of(world) in ("protected", "written") and not world.moves_are_open:
        world.gate_is_open = True
    elif world.time > injector.last_at + PROTECTED_S_MAX:
        raise Stall(f"the flow is not protected again: {world.describe()}")


def shrink(case: Case) -> Case:
    """Return the smallest schedule that still fails: with fewer, simpler and shorter faults."""
    faults = case.schedule()
    smaller = True
    while smaller:
        smaller = False
        for candidate in _smaller(faults):
            tried = replace(case, faults=tuple(candidate))
            if run(tried).problem is not None:
                faults, smaller = candidate, True
                break
    return replace(case, faults=tuple(faults))


def _smaller(faults: list[Fault]) -> list[list[Fault]]:
    without = [faults[:n] + faults[n + 1 :] for n in range(len(faults))]
    plainer = [
        [*faults[:n], replace(f, phase=None), *faults[n + 1 :]]
        for n, f in enumerate(faults)
        if f.phase is not None
    ]
    shorter = [
        [*faults[:n], replace(f, seconds=f.seconds / 2), *faults[n + 1 :]]
        for n, f in enumerate(faults)
        if f.seconds > 0.005
    ]
    return without + plainer + shorter
