"""The faults of a simulated world, and when they happen.

A fault happens at a time, or when the flow next enters a certain phase of recovery after that time:
the moments at which protocols fail are short, and chance would hardly hit them. A fault names its
victim by a rank among the sites that are alive then. So a schedule makes sense in any run, and a
fault stays the same when others are removed from the schedule.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from holdfast.core.ids import GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import Shape, View
from holdfast.lab.sim.links import control_of
from holdfast.lab.sim.timed import TimedWorld
from holdfast.site.node import SiteNode

SPAN_S = 0.06
"""Time within which the first fault happens. The flow processes half of its rows in it."""
TICK_S = 0.0003
"""Interval at which a fault that waits for a phase checks for it."""
PATIENCE_S = 0.15
"""Maximum time that a fault waits for its phase. Then it happens in any phase."""

KINDS = (
    "crash",
    "crash of two",
    "pause",
    "zombie",
    "reset",
    "block",
    "cut off",
    "slow",
    "controller",
    "old leader",
    "arbiter",
)
APP_KINDS = (
    "application",
    "stopped",
    "no arbiter",
    "session lost",
    "answers lost",
    "control reset",
)
"""Further faults with several applications: one dies with all its sites; the leader's control is
stopped and wakes up, does not reach the arbiter, loses its session there, does not get the
arbiter's answers, or loses its connection to a site."""
LASTING = {
    "pause": (0.05, 0.8),
    "zombie": (1.3, 3.0),
    "block": (0.1, 1.5),
    "cut off": (0.3, 3.0),
    "slow": (0.2, 2.0),
    "arbiter": (0.2, 2.0),
    "stopped": (0.5, 3.0),
    "no arbiter": (0.5, 4.0),
}
"""Shortest and longest duration of the faults that last, in leases."""
LOST = ("crash", "crash", "crash", "crash of two", "zombie", "cut off")
"""The kinds of faults by which the flow loses a site, at least for a time."""
PHASES: dict[str, tuple[str, ...]] = {
    "protected": (),
    "written": (),
    "unnoticed": ("crash",),
    "taking over": LOST,
    "taken over": LOST,
    "joining": LOST,
    "transferring": LOST,
    "replaying": LOST,
    "folding in": LOST,
    "without a controller": ("controller",),
    "ending": (),
}
"""The phases of a flow, and the kinds of faults that lead to each.

*written*: a sink's leader has made rows durable, and another replica does not know it. *unnoticed*:
a process has died, and the controller does not know it. *taking over*: a view without it has been
committed; *taken over*: all members have adopted it. *joining*: there are new replicas;
*transferring*: their state is being sent; *replaying*: they have it and catch up; *folding in*: a
view that counts them has been committed.
"""
STARTING = "starting"
"""The phase before all members act on the first view. Only faults that name it happen in it."""
IMPOSSIBLE = {("without a controller", "controller")}
PAIRS = [(p, k) for p in PHASES for k in KINDS if (p, k) not in IMPOSSIBLE]
"""All phases in which each kind of fault can happen; the measure of coverage."""
APP_PAIRS = [(p, k) for p in PHASES for k in APP_KINDS if p != "without a controller"]
"""The same for the faults that need several applications."""


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault."""

    kind: str
    at: float
    """When it happens, in virtual seconds."""
    phase: str | None = None
    """The phase that it waits for."""
    who: int = 0
    other: int = 0
    seconds: float = 0.0
    beyond: bool = False
    """Whether it may take the last replica of a task."""

    def __str__(self) -> str:
        when = f"at {self.at * 1e3:.1f} ms" + (f", when {self.phase}" if self.phase else "")
        span = f" for {self.seconds * 1e3:.1f} ms" if self.seconds else ""
        return f"{self.kind} ({self.who}, {self.other}){span} {when}"


def schedule(
    seed: int, lease_s: float, kinds: Sequence[str] = KINDS, beyond_share: float = 0.1
) -> list[Fault]:
    """Return one to three faults. The last is one of `PAIRS`, which take turns; those before it
    lead to its phase. In a share of the runs the faults may exceed what the protection survives."""
    chance = random.Random(f"faults {seed}")
    beyond = chance.random() < beyond_share
    first = chance.uniform(0.0, SPAN_S)
    possible = [(p, k) for p, k in PAIRS if k in kinds]
    to_apps = [(p, k) for p, k in APP_PAIRS if k in kinds]
    if to_apps and (seed % 2 or not possible):
        possible, turn = to_apps, seed // 2
    else:
        turn = seed
    phase, last = possible[turn % len(possible)]
    before = [k for k in PHASES[phase] if k in kinds]
    if before and chance.random() < 0.3:
        chosen = [chance.choice(before), chance.choice(kinds)]
    else:
        chosen = [chance.choice(before)] if before else []
    faults = [_fault(chance, k, first, None, lease_s, beyond) for k in chosen[:1]]
    faults += [
        _fault(chance, k, first, chance.choice(list(PHASES)), lease_s, beyond) for k in chosen[1:]
    ]
    return [*faults, _fault(chance, last, first, phase, lease_s, beyond)]


def _fault(
    chance: random.Random, kind: str, at: float, phase: str | None, lease_s: float, beyond: bool
) -> Fault:
    low, high = LASTING.get(kind, (0.0, 0.0))
    seconds = lease_s * chance.uniform(low, high)
    return Fault(kind, at, phase, chance.randrange(12), chance.randrange(12), seconds, beyond)


def phase_of(world: TimedWorld) -> str:
    """Return the phase of the flow; if several things go on, the most delicate one."""
    controller, view = world.controller, world.controller.view
    if world.leaderless:
        return "without a controller"
    if not controller.running or view is None:
        return STARTING
    joining = _joining(view)
    if joining and any(_hands_over(node, joining) for node in world.nodes.values()):
        return "transferring"
    if any(site not in world.nodes for site in view.members):
        return "unnoticed"
    if joining:
        return "joining"
    if controller.joins.replaying:
        return "replaying"
    seen = controller.seen_by_all
    if _lacks_replicas(controller.shape, view):
        return "taken over" if seen else "taking over"
    if not seen:
        return "folding in"
    if world.records and world.records[-1].last:
        return "ending"
    return "written" if _is_ahead(world) else "protected"


def _joining(view: View) -> set[tuple[TaskId, SiteId]]:
    return {
        ((StageId(stage), GroupId(number)), site)
        for stage, groups in enumerate(view.groups)
        for number, group in enumerate(groups)
        for site in group.joining
    }


def _lacks_replicas(shape: Shape, view: View) -> bool:
    return any(
        len(group.staying) < stage.guard.wanted
        for stage, groups in zip(shape.stages, view.groups, strict=True)
        for group in groups
    )


def _hands_over(node: SiteNode, joining: set[tuple[TaskId, SiteId]]) -> bool:
    """Whether a site sends the state of a replica, or receives it."""
    given = any(key in joining for key in node.transfers.outgoing)
    return given or any((task, node.site) in joining for task in node.transfers.incoming)


def _is_ahead(world: TimedWorld) -> bool:
    """Whether a store has epochs that some replica of its sink does not know to be durable."""
    tasks = [r for node in world.nodes.values() for r in node.stages.tasks.values()]
    return any(
        runner.egress.durable < max(world.results[runner.stage.name], default=-1)
        for runner in tasks
        if runner.egress is not None
    )


class Injector:
    """Injects faults into a world, and records the phase in which each happened."""

    def __init__(self, world: TimedWorld, faults: list[Fault]) -> None:
        self.world = world
        self.done: list[tuple[str, str]] = []
        self.last_at = 0.0
        """When the last fault began, or ended if it lasted."""
        self.waiting = list(faults)
        for fault in faults:
            world.at(fault.at, self._armed(fault, fault.at + PATIENCE_S))

    def _armed(self, fault: Fault, deadline: float) -> Callable[[TimedWorld], None]:
        def fire(world: TimedWorld) -> None:
            phase = phase_of(world)
            early = phase == STARTING if fault.phase is None else fault.phase != phase
            if early and world.time < deadline and not world.ended:
                world.at(world.time + TICK_S, fire)
                return
            self.waiting.remove(fault)
            may_start = phase != STARTING or fault.phase == STARTING
            if not world.ended and may_start and self._do(fault):
                self.done.append((phase, fault.kind))
                self.last_at = max(self.last_at, world.time + fault.seconds)

        return fire

    def _do(self, fault: Fault) -> bool:
        world = self.world
        sites = sorted(world.nodes)
        if not sites:
            return False
        one = sites[fault.who % len(sites)]
        others = [s for s in sites if s != one]
        other = others[fault.other % len(others)] if others else None
        match fault.kind:
            case "crash":
                return self._crash(fault, one)
            case "crash of two":
                return other is not None and self._crash(fault, one, other)
            case "pause":
                world.pause(one, fault.seconds)
            case "zombie":
                return self._freeze(fault, one)
            case "reset":
                return other is not None and self._reset(one, other)
            case "block":
                if other is None or (one, other) not in world.network:
                    return False
                world.block((one, other), fault.seconds)
            case "cut off":
                world.block((one, control_of(world.leader or 0)), fault.seconds)
            case "slow":
                world.slow(one, 3.0 + fault.other, fault.seconds)
            case "controller":
                return self._crash_controller()
            case "old leader":
                return self._old_leader()
            case "arbiter":
                world.applications.take_arbiter_away(fault.seconds)
            case _:
                return self._to_an_application(fault)
        return True

    def _to_an_application(self, fault: Fault) -> bool:
        world, leader = self.world, self.world.leader
        if leader is None:
            return False
        match fault.kind:
            case "application":
                app = fault.other % world.apps
                sites = world.applications.sites_of(app)
                if app not in world.controls or not self._may_go(fault, *sites):
                    return False
                world.applications.crash(app)
            case "stopped":
                world.applications.stop(leader, fault.seconds)
            case "no arbiter":
                world.applications.cut_off_from_arbiter(leader, fault.seconds)
            case "session lost":
                world.applications.lose_session()
            case "control reset":
                site = sorted(world.nodes)[fault.who % len(world.nodes)]
                world.applications.reset_connection(site, leader)
            case "answers lost":
                world.applications.lose_answers(leader, 1 + fault.other % 3)
            case _:
                raise ValueError(fault.kind)
        return True

    def _crash(self, fault: Fault, *victims: SiteId) -> bool:
        if not self._may_go(fault, *victims):
            return False
        self.world.crash(*victims)
        return True

    def _may_go(self, fault: Fault, *victims: SiteId) -> bool:
        """Whether these sites may fail. A paused site does not count as alive: it may be removed
        before it wakes up."""
        if fault.phase == STARTING and not self.world.controller.running:
            return True  # nothing is processed yet, so the flow is placed again
        asleep = [s for s in self.world.paused_at if s in self.world.nodes]
        return fault.beyond or self.world.survives(*victims, *asleep)

    def _freeze(self, fault: Fault, site: SiteId) -> bool:
        if not self.world.survives(site, *self.world.paused_at):
            return False
        self.world.pause(site, fault.seconds)
        return True

    def _reset(self, one: SiteId, other: SiteId) -> bool:
        links = ((one, other), (other, one))
        if any(link not in self.world.network for link in links):
            return False
        self.world.reset(one, other)
        return True

    def _old_leader(self) -> bool:
        """Let a replaced leader send its old view. If no leader was replaced, replace one first."""
        if self.world.applications.old_view is not None:
            self.world.applications.send_old_view()
            return True
        if self._crash_controller():
            self.world.at(
                self.world.time + 1.2 * self.world.options.lease_s,
                lambda world: world.applications.send_old_view(),
            )
            return True
        return False

    def _crash_controller(self) -> bool:
        if self.world.leaderless or not self.world.controller.running:
            return False
        self.world.crash_controller()
        return True
