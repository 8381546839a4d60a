"""Dataflow and cluster pairs: two mirrors, each with one replica of everything.

A mirror is lost as a whole with any of its sites, and rebuilt as a whole while the flow stands
still. That is what partition pairs avoid; mirrors are there to be compared with them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from holdfast.core.effects import PauseFlow
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import View
from holdfast.core.placement import Assignment


class Mirrors:
    """Which of the two mirrors a site belongs to, and whether the flow is paused to rebuild one.

    With partition pairs no site belongs to a mirror.
    """

    def __init__(self, used: bool) -> None:
        self.used = used
        self.flow_paused = False
        self._mirror_of: dict[SiteId, int] = {}

    def on_placed(self, view: View) -> None:
        """The flow begins with this view: its first replicas are one mirror, the second another."""
        if self.used:
            self._mirror_of = {
                site: mirror
                for stage in view.groups
                for group in stage
                for mirror, site in enumerate(group.replicas)
            }

    def on_replaced(self, site: SiteId, new: SiteId) -> None:
        """A new site is launched in place of a dead one."""
        if site in self._mirror_of:
            self._mirror_of[new] = self._mirror_of.pop(site)

    def without(self, view: View, gone: Collection[SiteId]) -> View:
        """`view`, in which no replica is left of the mirrors that these sites belong to. The other
        sites of these mirrors remain members."""
        lost = {mirror for site, mirror in self._mirror_of.items() if site in gone}
        useless = [s for s in view.members if self._mirror_of.get(s) in lost]
        if not useless:
            return view
        return replace(view.without(useless), number=view.number, members=view.members)

    def assign(
        self, view: View, tasks: Sequence[TaskId], registered: Collection[SiteId]
    ) -> Assignment | None:
        """Where the replicas of a lost mirror join. None unless all of its sites are there."""
        replicas = [s for u in view.tasks() for s in view.group(u).replicas]
        kept = {self._mirror_of[s] for s in replicas}
        sites = sorted(s for s, mirror in self._mirror_of.items() if mirror not in kept)
        if not tasks or not sites or any(s not in registered for s in sites):
            return None
        return Assignment({u: sites[u[1] % len(sites)] for u in tasks}, tuple(sites))

    def pause(self, paused: bool, sequencers: Iterable[SiteId]) -> list[PauseFlow]:
        """Have the leading sequencer stand still or continue, unless it does so already."""
        if paused == self.flow_paused:
            return []
        self.flow_paused = paused
        return [PauseFlow(next(iter(sequencers)), paused)]
