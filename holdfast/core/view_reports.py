"""What sites have reported about the latest view. It is forgotten with the next one."""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import View


class ViewReports:
    """The reports of members that act on a view."""

    def __init__(self, departed: Iterable[SiteId] = ()) -> None:
        """The `departed` had finished before."""
        self._seen: set[SiteId] = set()
        self._finished: set[SiteId] = set(departed)
        self._retained: set[tuple[TaskId, SiteId]] = set()

    def on_seen(self, site: SiteId) -> None:
        """The site acts on the view."""
        self._seen.add(site)

    def on_finished(self, site: SiteId) -> None:
        """The site has nothing left to do under this view. The next one may give it more to do,
        such as to lead a sink."""
        self._finished.add(site)

    def on_retained(self, task: TaskId, site: SiteId) -> None:
        """Producers keep everything that this replica would be rebuilt from."""
        self._retained.add((task, site))

    def seen_by_all(self, view: View) -> bool:
        return self._seen.issuperset(view.members)

    def have_finished(self, sites: Iterable[SiteId]) -> bool:
        return self._finished.issuperset(sites)

    def leaders_have_finished(self, view: View) -> bool:
        """Whether every task has a leader, and all leaders have finished: all is delivered."""
        groups = [view.group(task) for task in view.tasks()]
        return all(g.replicas and g.replicas[0] in self._finished for g in groups)

    def is_retained(self, task: TaskId, sites: Iterable[SiteId]) -> bool:
        """Whether the replicas of a task at all of these sites could be rebuilt."""
        return all((task, site) in self._retained for site in sites)
