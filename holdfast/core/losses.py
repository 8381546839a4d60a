"""What it means to lose a site: which site to fail, and when the flow cannot continue.

Functions from observed facts to a decision: a site that fails (`SitesFailed`), an error that ends
the flow, or None, which is to wait.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from holdfast.core.events import SitesFailed, SitesHung
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Shape, View, partitions_of
from holdfast.errors import HoldfastError, HostError, HungError, SiteLostError

APART_LEASES_MAX = 10
"""For how many leases two sites may be partitioned before the flow ends, if it needs both."""

Couples = Mapping[tuple[SiteId, SiteId], tuple[int, str]]
"""By (site, site that it has not heard from): for how many leases, and how it is known."""
CanLose = Callable[[SiteId], bool]
"""Whether the flow can continue without a site."""


def unrecoverable(view: View, shape: Shape) -> list[TaskId]:
    """The tasks without a replica that cannot be rebuilt either."""
    return [u for u in view.bare() if not shape.stages[u[0]].guard.rebuild_level]


def site_lost(
    view: View, shape: Shape, gone: Sequence[SiteId], tasks: Iterable[TaskId], reason: str
) -> SiteLostError:
    """The error that ends a flow which has lost all replicas of these tasks."""
    tasks = list(tasks)
    names = partitions_of(view, tasks, shape)
    protected = any(shape.stages[u[0]].guard.wanted > 1 for u in tasks)
    verdict = "no replica is left of" if protected else "its partitions were not protected:"
    happened = f"site {_listed(gone)} died ({reason})" if gone else reason
    return SiteLostError(
        f"{happened}; {verdict} {names}",
        hint="start the flow again"
        + (", with more replicas" if protected else ", or protect its stages with pairs()"),
    )


def not_rebuilt(view: View, shape: Shape, task: TaskId) -> SiteLostError:
    """The error that ends a flow if a lost task cannot be rebuilt."""
    names = partitions_of(view, [task], shape)
    level = shape.stages[task[0]].guard.level
    return SiteLostError(
        f"{names} cannot be rebuilt: more than {level} stages in a row were lost within a "
        "short time, and with them what it needs",
        hint=f"start the flow again, with upstream(k={level + 1})",
    )


def judge_partition(
    couples: Couples, members: Collection[SiteId], load: Mapping[SiteId, int], can_lose: CanLose
) -> SitesFailed | HoldfastError | None:
    """Fail one of the sites that hear nothing from each other: the one that is cut off from most
    others, of equals the one with the fewest tasks. Sites that are still partitioned after that are
    reported again."""
    couples = {c: known for c, known in couples.items() if all(s in members for s in c)}
    others: dict[SiteId, dict[SiteId, str]] = {}
    for (one, other), (_, how) in couples.items():
        others.setdefault(one, {})[other] = how
        others.setdefault(other, {})[one] = how
    for site in sorted(others, key=lambda s: (-len(others[s]), load[s], -s)):
        if can_lose(site):
            how = "; ".join(sorted(set(others[site].values())))
            reason = f"it and site {_listed(others[site])} have heard nothing from each other"
            return SitesFailed((site,), f"{reason}: {how}")
    if all(leases < APART_LEASES_MAX for leases, _ in couples.values()):
        return None
    (one, other), (leases, how) = max(couples.items(), key=lambda item: item[1])
    return HostError(
        f"sites {one} and {other} have heard nothing from each other for {leases} leases "
        f"({how}), and there is no other replica of what they hold",
        hint="check the network between the executors",
    )


def judge_hung(
    event: SitesHung, members: Collection[SiteId], can_lose: CanLose
) -> SitesFailed | HoldfastError | None:
    """Fail the site whose call has taken the longest, if the call would end elsewhere. If several
    sites hang in the same stage, the cause is the stage's code or what that waits for, and the next
    replica would hang as well: the flow ends."""
    calls = {s: c for s, c in event.calls.items() if s in members}
    hung = [(s, c) for s, c in calls.items() if c.seconds > event.limit_s]
    if not hung:
        return None
    site, call = max(hung, key=lambda item: item[1].seconds)
    same = sorted(s for s, c in calls.items() if call.stage and c.stage == call.stage)
    if len(same) > 1:
        return _hung(f"sites {_listed(same)} have been {call}")
    if can_lose(site):
        return SitesFailed((site,), f"it has been {call}")
    return _hung(f"site {site} has been {call}, and there is no other replica of what it holds")


def _hung(text: str) -> HungError:
    return HungError(
        text,
        hint="does a function of the flow wait for something that does not come? If calls take "
        "that long, make epochs smaller with Options(budget=Budget(epoch_rows_max=...)), or allow "
        "longer calls with Options(call_timeout=...)",
    )


def _listed(sites: Iterable[SiteId]) -> str:
    return ", ".join(str(s) for s in sorted(sites))
