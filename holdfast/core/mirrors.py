"""Dataflow and cluster pairs: two mirrors, each with one replica of everything.

A mirror is lost as a whole with any of its sites, and rebuilt as a whole while the flow stands
still. That is what partition pairs avoid; mirrors are there to be compared with them.

All replicas of a mirror have the same position in their groups, because a view loses or gains a
mirror as a whole. So which sites a mirror consists of follows from the view, and a controller that
takes over knows it as well as the last one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from holdfast.core.effects import PauseFlow
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Domain, Shape, View
from holdfast.core.placement import Assignment, mirror_domain


def mirrors_of(view: View) -> list[set[SiteId]]:
    """The sites of each mirror; those of one that joins are included."""
    groups = [view.group(u) for u in view.tasks()]
    positions = max(len(group.all) for group in groups)
    return [{g.all[n] for g in groups if n < len(g.all)} for n in range(positions)]


def is_whole(view: View, living: Collection[SiteId]) -> bool:
    """Whether some mirror has all its replicas, on sites that live."""
    groups = [view.group(u).replicas for u in view.tasks()]
    return any(
        all(n < len(replicas) and replicas[n] in living for replicas in groups)
        for n in range(max(len(replicas) for replicas in groups))
    )


class Mirrors:
    """What is lost with a site, where a mirror is rebuilt, and whether the flow is paused for it.

    With partition pairs, `used` is False, and no site belongs to a mirror.
    """

    def __init__(self, used: bool) -> None:
        self.used = used
        self._told: tuple[SiteId, bool] | None = None
        """The sequencer that was told last whether to stand still, and what it was told."""

    def lost_with(self, view: View, gone: Collection[SiteId]) -> list[SiteId]:
        """All sites of the mirrors that these sites belong to, and the sites themselves."""
        if not self.used:
            return list(gone)
        hit = [mirror for mirror in mirrors_of(view) if mirror.intersection(gone)]
        return sorted({*gone, *(s for mirror in hit for s in mirror)})

    def assign(
        self,
        view: View,
        shape: Shape,
        tasks: Sequence[TaskId],
        domains: Mapping[SiteId, Domain],
    ) -> Assignment | None:
        """Where the replicas of a lost mirror join. None unless there are as many sites for it as
        the other mirror has, apart from those. Members come first: they are connected."""
        if not tasks:
            return None
        kept = list(dict.fromkeys(view.group(u).replicas[0] for u in view.tasks()))
        apart = mirror_domain(shape)
        taken = {getattr(domains[s], apart) for s in kept if s in domains}
        free = [s for s in domains if s not in kept and getattr(domains[s], apart) not in taken]
        sites = sorted(free, key=lambda s: (s not in view.members, s))[: len(kept)]
        if len(sites) < len(kept):
            return None
        joins_at = dict(zip(kept, sites, strict=True))
        joiners = {u: joins_at[view.group(u).replicas[0]] for u in tasks}
        return Assignment(joiners, tuple(sites))

    def paused(self, view: View) -> bool:
        """Whether the flow stands still under this view: a mirror is being rebuilt."""
        return self.used and any(view.group(u).joining for u in view.tasks())

    def pause(self, view: View) -> list[PauseFlow]:
        """Have the leading sequencer stand still or continue, unless it was told so. A leader that
        was never told continues by itself."""
        wanted = (view.sequencers[0], self.paused(view))
        before, self._told = self._told, wanted
        return [] if not self.used or wanted == before else [PauseFlow(*wanted)]
