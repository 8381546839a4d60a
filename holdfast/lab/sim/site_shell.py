"""What a site's process does around its node, as `site/runtime.py` does it.

It hands messages to the node, obeys the controls, reports the node's errors to them, and refuses
sites that are not members of its view.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from holdfast.core.ids import SiteId
from holdfast.core.layout import View
from holdfast.errors import HoldfastError, InvariantError, ProtocolError
from holdfast.lab.sim.links import NOTHING, Down, SitePort, Up
from holdfast.net import wire
from holdfast.site.node import SiteNode

if TYPE_CHECKING:
    from holdfast.lab.sim.world import World


class SiteShell:
    """Plays the processes of all sites of a world."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.acting: SiteId | None = None
        """The site whose code runs."""
        self.acted: SiteId | None = None
        """The site whose code ran last."""
        self.failed: dict[SiteId, HoldfastError] = {}
        """Sites that have failed, and why. They repeat it to a new controller."""
        self.started = False
        """Whether a control has told a site to read its sources."""

    def guarded(self, node: SiteNode, act: Callable[[], object]) -> None:
        """Run code of a site, and report its error to the controls."""
        self.acting = self.acted = node.site
        try:
            act()
            self._world.after(node)
        except (InvariantError, ProtocolError):
            raise
        except HoldfastError as error:
            self.failed[node.site] = error
            self._report_failure(node)
        self.acting = None

    def _report_failure(self, node: SiteNode) -> None:
        error = self.failed[node.site]
        detail = {name: getattr(error, name) for name in error.fields}
        SitePort(self._world, node.site).tell(wire.Failed(type(error).__name__, detail))

    def take(self, node: SiteNode, sender: SiteId, item: Any) -> None:
        """Take what arrives on a link."""
        if isinstance(item, Up):
            self._world.broken.discard((node.site, sender))
            node.on_connected(sender)
        elif isinstance(item, Down):
            node.on_lost(sender)
        elif sender < 0:
            self._obey(node, sender, item[0])
        elif node.site not in self.failed:
            node.receive(sender, *item)

    def _obey(self, node: SiteNode, control: SiteId, order: wire.Message) -> None:
        if not node.obeys(order):
            return
        match order:
            case wire.NewView():
                self._on_new_view(node, order)
            case wire.Start():
                self.started = True
            case wire.Fenced():
                self._on_fenced(node)
            case wire.Dismiss():
                self._on_dismissed(node)
            case _:
                if node.site not in self.failed:
                    node.receive(control, order, NOTHING)

    def _on_fenced(self, node: SiteNode) -> None:
        known = self._world.ledger.known
        members = known.view.members if known is not None and known.view is not None else ()
        lives = known is not None and (node.site in known.addresses or node.site in known.launched)
        if known is not None and node.site in members and lives:
            raise InvariantError(f"site {node.site} was fenced, and is in {known.view}")
        self._world.vanish(node.site)

    def _on_dismissed(self, node: SiteNode) -> None:
        known = self._world.ledger.known
        if known is None or not known.ended:
            raise InvariantError(f"site {node.site} was dismissed, and the flow has not ended")
        self._world.vanish(node.site)

    def _on_new_view(self, node: SiteNode, message: wire.NewView) -> None:
        site, view, known = node.site, message.view, node.view
        if view.replaces(known):
            self._adopt(node, view, known)
        assert node.view is not None
        SitePort(self._world, site).tell(wire.Seen(node.view.term, node.view.number))

    def _adopt(self, node: SiteNode, view: View, known: View | None) -> None:
        site, network = node.site, self._world.network
        self.fence(node, view)
        node.on_view(view)
        if known is not None and view.term > known.term:
            if site in self.failed:
                self._report_failure(node)
            node.report_again()
        for other in view.members:
            if other != site and other in self._world.nodes and (other, site) not in network:
                # It may have been connected before, and not know yet that it was not a member.
                lost = [Down()] if (site, other) in network else []
                self._world.put_instead((site, other), [*lost, Up()])
                self._world.put_instead((other, site), [Up()])

    def fence(self, node: SiteNode, view: View) -> None:
        """Drop the connections to sites that are not members: nothing from them counts."""
        world = self._world
        for link in [k for k in world.network if node.site in k]:
            other = link[0] if link[1] == node.site else link[1]
            if other >= 0 and other not in view.members:
                del world.network[link]
                if link[1] == node.site:
                    node.on_lost(other)
                elif other in world.nodes:
                    world.put_instead(link, [Down()])
