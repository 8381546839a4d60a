"""A controller whose sites do what a test says."""

from dataclasses import replace

from holdfast.core.controller import Controller
from holdfast.core.effects import CommitView, ControllerEffect, StartFlow, Wait
from holdfast.core.events import ReplicaReported, SiteFinished, SiteRegistered, ViewSeen
from holdfast.core.ids import GroupId, SiteId, StageId
from holdfast.core.layout import Domain, Shape, StageShape
from holdfast.core.protection import ProtectionSpec
from holdfast.core.roster import RELAUNCH_MS
from holdfast.core.timers import Timer

SHAPE = Shape(
    (
        StageShape(0, "packets", "source", 2, (), (0,)),
        StageShape(1, "sessions", "keyed", 8, (0,), (1,)),
        StageShape(2, "alerts", "sink", 1, (1,), ()),
    ),
    producer_of=(0, 1),
    consumer_of=(1, 2),
)


def finished(controller: Controller, site: int) -> SiteFinished:
    """A site's word that it is through, as far as the latest view goes."""
    assert controller.view is not None
    return SiteFinished(SiteId(site), controller.view.number)


def reported(
    controller: Controller, site: int, task: tuple[int, int], phase: str, reason: str = ""
) -> ReplicaReported:
    """Word of a new replica, said under the latest view."""
    assert controller.view is not None
    key = (StageId(task[0]), GroupId(task[1]))
    return ReplicaReported(SiteId(site), key, controller.view.number, phase, reason)


def protected(replicas: int = 2, apart: str = "process") -> Shape:
    stages = tuple(
        replace(s, guard=ProtectionSpec(replicas=replicas, failure_domain=apart))
        for s in SHAPE.stages
    )
    return replace(SHAPE, stages=stages)


PAIRS = protected()
KEYED = (StageId(1), GroupId(0))


def domain(site: int) -> Domain:
    return Domain(f"p{site}", f"p{site}", "h", "a")


def registered(site: int) -> SiteRegistered:
    return SiteRegistered(site, ("127.0.0.1", 5000 + site), domain(site))


def addresses(*sites: int) -> dict[int, tuple[str, int]]:
    return {s: ("127.0.0.1", 5000 + s) for s in sites}


def seen(controller: Controller, *but: int) -> list[ControllerEffect]:
    """All members of the view (but these) say that they act on it."""
    view = controller.view
    assert view is not None
    sites = [s for s in view.members if s not in but]
    return [e for s in sites for e in controller.handle(ViewSeen(s, view.term, view.number))]


def running(
    shape: Shape = SHAPE, sites: int = 2, spares: int = 1, relaunch_ms: int = RELAUNCH_MS
) -> Controller:
    ids = list(range(sites + spares))
    controller = Controller(shape, ids[:sites], ids[sites:], relaunch_ms=relaunch_ms)
    for site in ids:
        controller.handle(registered(site))
    assert StartFlow() in seen(controller)
    return controller


def views(effects: list[ControllerEffect]) -> list[str]:
    return [str(e.view) for e in effects if isinstance(e, CommitView)]


def waits(effects: list[ControllerEffect]) -> list[Timer]:
    return [e.timer for e in effects if isinstance(e, Wait)]


def replicas(controller: Controller) -> str:
    """Who holds what, stage by stage."""
    return str(controller.view).split(": ", 1)[1]
