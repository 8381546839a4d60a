"""The messages to sites and other applications that follow from a leader's committed decisions.

Every order carries the term. A site without a connection gets its orders when it connects again.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from holdfast.control import events as ev
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
from holdfast.core.events import CatchUpOrdered, RetentionOrdered
from holdfast.core.ids import SiteId
from holdfast.core.layout import View
from holdfast.errors import InvariantError
from holdfast.net import wire


@dataclass(frozen=True, slots=True)
class Audience:
    """The recipients of a leader's orders, and what they must know of the flow."""

    term: int
    sites: Collection[SiteId]
    """The sites that are connected to the leader."""
    agents: Collection[int]
    """The applications that follow the leader."""
    addresses: Mapping[SiteId, tuple[str, int]]
    running: bool
    """Whether the start of the flow is committed."""

    def tell(self, site: SiteId, message: wire.Message) -> list[ev.ControlEffect]:
        return [ev.SendSite(site, message)] if site in self.sites else []


def of(effect: ControllerEffect, to: Audience) -> list[ev.ControlEffect]:
    """The effects of a decision of the leading controller, except for fences."""
    match effect:
        case CommitView():
            given: list[ev.ControlEffect] = [ev.ViewGiven(effect.view)]
            for site in effect.view.members:
                given += view_for(site, effect.view, to)
            return given
        case StartFlow():
            sent = [ev.SendSite(site, wire.Start(to.term)) for site in to.sites]
            return [*sent, ev.FlowRuns(begins=True), ev.Attached()]
        case OrderCatchUp():
            order = CatchUpOrdered(effect.task, effect.joiner)
            return to.tell(effect.donor, wire.CatchUp(to.term, order))
        case OrderRetention():
            return to.tell(effect.site, wire.Retain(to.term, RetentionOrdered(effect.number)))
        case DrainFlow():
            return [ev.StopFeeding(), *to.tell(effect.site, wire.Drain(to.term))]
        case PauseFlow():
            return to.tell(effect.site, wire.Pause(to.term, effect.paused))
        case EndFlow():
            return dismissals(to)
        case _:
            raise InvariantError(f"{effect} is no order")


def view_for(site: SiteId, view: View, to: Audience) -> list[ev.ControlEffect]:
    """The messages that a site needs to act on a view."""
    if site not in to.sites:
        return []
    sent: list[ev.ControlEffect] = []
    if site in view.members:
        addresses = {int(s): to.addresses[s] for s in view.members if s in to.addresses}
        sent.append(ev.SendSite(site, wire.NewView(view, addresses)))
    if to.running:
        sent.append(ev.SendSite(site, wire.Start(to.term)))
    return sent


def dismissals(to: Audience) -> list[ev.ControlEffect]:
    """The messages that end the flow at all sites and applications."""
    order = wire.Dismiss(to.term)
    sites = [ev.SendSite(site, order) for site in to.sites]
    return [*sites, *(ev.SendAgent(app, order) for app in to.agents)]
