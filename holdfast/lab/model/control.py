"""The controller of the model: the real `Controller`. It does not fail, and what it commits is
committed at once."""

from __future__ import annotations

from typing import Any

from holdfast.core import effects as fx
from holdfast.core.controller import Controller
from holdfast.core.events import (
    ControllerEvent,
    ReplicaReported,
    SiteFinished,
    SiteRegistered,
    SitesFailed,
    ViewSeen,
    WaitOver,
)
from holdfast.core.ids import SiteId
from holdfast.core.layout import Domain, Shape
from holdfast.core.timers import PatienceTimer, Timer
from holdfast.lab.model import messages as ms
from holdfast.lab.model.outputs import FlowOver, LaunchOrder, Output, Send, StartTimer


class ModelControl:
    """`step` takes what happens to the controller and returns its orders."""

    def __init__(self, shape: Shape, sites: int) -> None:
        self.controller = Controller(shape, [SiteId(s) for s in range(sites)])
        self._out: list[Output] = []

    def step(self, kind: str, *what: Any) -> tuple[Output, ...]:
        self._out = []
        getattr(self, f"_on_{kind}")(*what)
        found, self._out = tuple(self._out), []
        self._forget()
        return found

    def _forget(self) -> None:
        """Forget changes of leaders that no report can be older than: those before the replica
        began to join, or, if none joins, all."""
        view, joins = self.controller.view, self.controller.joins
        groups = {task: view.group(task) for task in view.tasks()} if view is not None else {}
        joins._leader_changed = {
            task: number
            for task, number in joins._leader_changed.items()
            if any(groups[task].joined_view_of(s) < number for s in groups[task].joining)
        }

    def _on_registered(self, site: SiteId) -> None:
        process = f"p{site}"
        domain = Domain(process, process, "host", "application")
        self._handle(SiteRegistered(site, ("", site), domain))

    def _on_failed(self, sites: tuple[SiteId, ...], certain: bool) -> None:
        self._handle(SitesFailed(sites, "dead" if certain else "silent", certain))

    def _on_timer(self, timer: Timer) -> None:
        self._handle(WaitOver(timer))

    def _on_message(self, site: SiteId, message: Any) -> None:
        match message:
            case ms.ViewActedOn():
                self._handle(ViewSeen(site, message.term, message.number))
            case ms.ReplicaSaid():
                self._handle(ReplicaReported(*message, "it broke off"))
            case ms.SiteDone():
                self._handle(SiteFinished(site, message.number))
            case _:
                raise TypeError(message)

    def _handle(self, event: ControllerEvent) -> None:
        for effect in self.controller.handle(event):
            self._apply(effect)

    def _apply(self, effect: fx.ControllerEffect) -> None:
        match effect:
            case fx.CommitView():
                self._out += [Send(s, ms.ViewSent(effect.view)) for s in effect.view.members]
            case fx.FenceSite():
                self._out.append(Send(effect.site, ms.FenceSent()))
            case fx.LaunchSite():
                self._out.append(LaunchOrder(effect.site))
            case fx.OrderCatchUp():
                self._out.append(Send(effect.donor, ms.CatchUpSent(effect.task, effect.joiner)))
            case fx.Wait():
                # With two sites there is no other site that a replica could join instead.
                if not isinstance(effect.timer, PatienceTimer):
                    self._out.append(StartTimer(effect.timer))
            case fx.EndFlow():
                name = type(effect.error).__name__ if effect.error is not None else ""
                self._out.append(FlowOver(name))
            case fx.StartFlow():
                pass
            case _:
                raise TypeError(effect)
