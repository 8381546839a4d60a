"""One term of a leader: its decisions, their commit and their execution. It ends with the term."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.control import events as ev
from holdfast.control import orders
from holdfast.control.balancer import LoadBalancer
from holdfast.control.decisions import PendingDecisions
from holdfast.control.knowledge import VERSION, Knowledge
from holdfast.control.orders import Audience
from holdfast.control.site_watch import SiteWatch
from holdfast.core.controller import Controller
from holdfast.core.effects import ControllerEffect, FenceSite, LaunchSite, StartFlow, Wait
from holdfast.core.events import CommitWanted, EndWanted
from holdfast.core.flow_phase import FlowPhase
from holdfast.core.ids import SiteId
from holdfast.core.roster import first_id, ids_end
from holdfast.net import wire

LeadingEffect = ev.ControlEffect | CommitWanted | EndWanted
"""A commit is wanted from `Leadership`; the other effects are those of the node."""


class Leading:
    """A term that the application `app` leads.

    The controller decides. A decision is executed when it and all decisions before it are
    committed; only launches and timers do not wait. A launch does wait if its number is not
    reserved for this term: the next leader, which does not know of it, could use the number again.
    """

    def __init__(
        self,
        term: int,
        controller: Controller,
        app: int,
        app_of: dict[int, int],
        running: bool,
        sites: SiteWatch,
        next_id: int = 0,
        balancer: LoadBalancer | None = None,
    ) -> None:
        """`next_id` is what the last leader committed."""
        self.term, self.controller, self.balancer = term, controller, balancer
        self._app, self._app_of, self._sites = app, app_of, sites
        self.running = running
        """Whether the start of the flow is committed."""
        self.agents: list[int] = []
        """The applications whose controls follow this one."""
        self.decisions = PendingDecisions()
        self._ids_end = max(first_id(term + 1), next_id)
        """No later leader uses a number below."""
        self._returned: dict[SiteId, None] = {}
        """Sites that have registered again while decisions were not committed."""

    @property
    def frozen(self) -> bool:
        """Whether a decision is not committed. Until it is, optional decisions are not made."""
        return bool(self.decisions)

    @property
    def ends(self) -> bool:
        return self.controller.state in (FlowPhase.DONE, FlowPhase.FAILED)

    @property
    def audience(self) -> Audience:
        """The recipients of this leader's orders, as they are now."""
        addresses, sites = self.controller.addresses, self._sites.connected
        return Audience(self.term, sites, self.agents, addresses, self.running)

    # --- decisions ------------------------------------------------------------------------------

    def decide(self, effects: Iterable[ControllerEffect]) -> list[LeadingEffect]:
        """Act on decisions of the controller: launch and wait immediately, commit the others if
        they need it, and execute them when all decisions before them are committed."""
        out: list[LeadingEffect] = []
        for effect in effects:
            match effect:
                case LaunchSite() if effect.site < self._ids_end:
                    out += self._launch_after(effect)
                case Wait():
                    timer = ev.WaitTimer(self.term, effect.timer)
                    out.append(ev.SetTimer(timer, effect.ms / 1e3))
                case _:
                    self.decisions.add(effect)
        # Without a view there is nothing to commit: the next leader begins the flow again.
        if self.decisions.need_commit and (self.ends or self.controller.view is not None):
            return out + self._commit()
        return out + self._execute(self.decisions.released())

    def _commit(self) -> list[LeadingEffect]:
        value = self._knowledge().encode()
        wanted = EndWanted if self.ends else CommitWanted
        self.decisions.begin()
        return [wanted(self.term, value)]

    def on_committed(self, more: bool) -> list[LeadingEffect]:
        """The arbiter has committed the decisions under way; `more`: another commit follows."""
        out = self._execute(self.decisions.done(more))
        if not self.frozen:
            returned, self._returned = self._returned, {}
            for site in returned:
                out += self._repeat_orders(site)
        return out

    def _execute(self, effects: Iterable[ControllerEffect]) -> list[LeadingEffect]:
        """Execute decisions that need no commit, or are committed."""
        out: list[LeadingEffect] = []
        for effect in effects:
            if isinstance(effect, FenceSite):
                out.append(self.expel(effect.site))
                continue
            if isinstance(effect, LaunchSite):
                self._ids_end = max(self._ids_end, ids_end(effect.site + 1))
                out += self._launch_after(effect)
                continue
            if isinstance(effect, StartFlow):
                self.running = True
            out += orders.of(effect, self.audience)
        return out

    def _knowledge(self) -> Knowledge:
        """What the next commit stores."""
        controller, error = self.controller, self.decisions.error
        # Before the flow runs, the next leader replaces dead members by sites of their application.
        members = controller.view.members if controller.view is not None else ()
        alive = {*controller.addresses, *controller.roster.launched, *members}
        self._app_of = {s: app for s, app in self._app_of.items() if s in alive}
        return Knowledge(
            controller.view,
            {int(s): a for s, a in controller.addresses.items()},
            {int(s): d for s, d in controller.roster.domains.items()},
            self._app_of,
            {int(s): r for s, r in controller.dead.items()},
            sorted(int(s) for s in controller.roster.launched),
            controller.running,
            controller.state is FlowPhase.DRAINING,
            self.ends,
            str(error) if error else None,
            next_id=ids_end(controller.roster.next_id),
            version=VERSION,
            sites=len(controller.roster.sites),
        )

    # --- sites ----------------------------------------------------------------------------------

    def on_registered_again(self, site: SiteId) -> list[LeadingEffect]:
        """A site has registered that had registered before, or is dead. While decisions are not
        committed it waits, also if it is dead: that may be one of them."""
        if self.frozen:
            self._returned[site] = None
            return []
        return self._repeat_orders(site)

    def _repeat_orders(self, site: SiteId) -> list[LeadingEffect]:
        """Send a site its last orders: some may be lost with its connection."""
        if self.controller.is_dead(site):
            return [self.expel(site)]
        view = self.controller.view
        if view is None:
            return []
        sent = orders.view_for(site, view, self.audience)
        return [*sent, *self._execute(self.controller.orders_for(site))]

    def expel(self, site: SiteId) -> ev.ExpelSite:
        """Make a site leave that is dead or unknown to this leader."""
        self._sites.expel(site)
        return ev.ExpelSite(site, wire.Fenced(self.term))

    # --- launches, here and at other applications -----------------------------------------------

    def launch(self, site: SiteId) -> list[LeadingEffect]:
        """Have the application of a site start its process."""
        if self.controller.is_dead(site):
            return []  # it was given up while its launch waited
        app = self._app_of[site]
        if app == self._app:
            return [ev.LaunchHere(site)]
        # An application that is not connected gets the order when it connects.
        return [ev.SendAgent(app, wire.Launch(self.term, site))] if app in self.agents else []

    def _launch_after(self, effect: LaunchSite) -> list[LeadingEffect]:
        site = effect.site
        # A new site belongs to the application of the site that it replaces, or else to the one
        # that has the fewest.
        replaced = self.controller.roster.replaced.items()
        before = next((old for old, new in replaced if new == site), None)
        apps = [self._app, *self.agents]
        fewest = min(apps, key=lambda app: (list(self._app_of.values()).count(app), app))
        self._app_of[site] = self._app_of.get(before, fewest) if before is not None else fewest
        if effect.after_ms:
            return [ev.SetTimer(ev.LaunchTimer(self.term, site), effect.after_ms / 1e3)]
        return self.launch(site)

    def on_agent_opened(self, app: int) -> list[LeadingEffect]:
        """Have an application that follows launch its sites, also those that it may have launched
        before: the last control of the application may have died with them."""
        if app not in self.agents:
            self.agents.append(app)
        launched = sorted(self.controller.roster.launched)
        return [e for s in launched if self._app_of.get(s) == app for e in self.launch(s)]

    def on_agent_lost(self, app: int) -> None:
        if app in self.agents:
            self.agents.remove(app)
