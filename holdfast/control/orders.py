"""What a leader's committed decisions mean for sites and for other applications: messages.

Every order carries the term. Whoever has no connection is not told: it is when it comes back.
"""

from __future__ import annotations

from collections.abc import Collection

from holdfast.control import events as ev
from holdfast.control.leading import Leading
from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    OrderCatchUp,
    OrderRetention,
    PauseFlow,
    StartFlow,
)
from holdfast.core.ids import SiteId
from holdfast.core.layout import View
from holdfast.errors import InvariantError
from holdfast.net import wire


def of(
    effect: ControllerEffect, leading: Leading, connected: Collection[SiteId]
) -> list[ev.ControlEffect]:
    """What is to be done about a decision of the leading controller, but for fences."""
    term = leading.term

    def tell(site: SiteId, message: wire.Message) -> list[ev.ControlEffect]:
        return [ev.SendSite(site, message)] if site in connected else []

    match effect:
        case CommitView():
            given: list[ev.ControlEffect] = [ev.ViewGiven(effect.view)]
            for site in effect.view.members:
                given += view_for(site, effect.view, leading, connected)
            return given
        case StartFlow():
            leading.running = True
            told = [ev.SendSite(site, wire.Start(term)) for site in connected]
            return [*told, ev.FlowRuns(begins=True), ev.Attached()]
        case OrderCatchUp():
            return tell(effect.donor, wire.CatchUp(term, *effect.task, effect.joiner))
        case OrderRetention():
            return tell(effect.site, wire.Retain(term, effect.number))
        case DrainFlow():
            return [ev.StopFeeding(), *tell(effect.site, wire.Drain(term))]
        case PauseFlow():
            return tell(effect.site, wire.Pause(term, effect.paused))
        case EndFlow():
            return dismissals(leading, connected)
        case _:
            raise InvariantError(f"{effect} is no order")


def view_for(
    site: SiteId, view: View, leading: Leading, connected: Collection[SiteId]
) -> list[ev.ControlEffect]:
    """What a site must know to act on a view."""
    if site not in connected:
        return []
    told: list[ev.ControlEffect] = []
    if site in view.members:
        known = leading.controller.addresses
        addresses = {int(s): known[s] for s in view.members if s in known}
        told.append(ev.SendSite(site, wire.NewView(view, addresses)))
    if leading.running:
        told.append(ev.SendSite(site, wire.Start(leading.term)))
    return told


def dismissals(leading: Leading, connected: Collection[SiteId]) -> list[ev.ControlEffect]:
    """The flow is over, and everybody may know."""
    order = wire.Dismiss(leading.term)
    sites = [ev.SendSite(site, order) for site in connected]
    return [*sites, *(ev.SendAgent(app, order) for app in leading.agents)]
