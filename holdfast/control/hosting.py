"""Where a flow is hosted: in which applications, who starts its sites, what cannot be had there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast import errors
from holdfast.api.graph import Flow
from holdfast.core.layout import Shape
from holdfast.plan.planner import Plan
from holdfast.site.runtime import OnExit, SiteConfig

Address = tuple[str, int]
Route = Callable[[int, int, Address], Address]
"""Where the first site is to dial to reach the second, which listens at the given address."""


def direct(site: int, other: int, address: Address) -> Address:
    """Sites connect to each other without detours."""
    return address


class Host(Protocol):
    """Who starts the sites' processes, and says when one has ended."""

    name: str
    application: str
    listen_host: str
    advertise_host: str
    """Where sites find the controller."""

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Which of the flow's applications this is, and how they find each other."""

    app: int = 0
    controls: tuple[tuple[str, int], ...] = ()
    """Where each application's control listens; empty if there is only one application."""
    arbiter_url: str | None = None

    def __post_init__(self) -> None:
        if len(self.controls) > 1 and self.arbiter_url is None:
            raise errors.HostError(
                f"{len(self.controls)} applications need an arbiter to settle who leads",
                hint="give --arbiter file:/path on one host, zk://host:port,host:port across hosts",
            )
        hosts = {host for host, _ in self.controls}
        if len(hosts) > 1 and not str(self.arbiter_url).startswith("zk://"):
            raise errors.HostError(
                f"applications on {len(hosts)} hosts ({', '.join(sorted(hosts))}) need an arbiter "
                "that all of them reach",
                hint="give --arbiter zk://host:port,host:port",
            )

    @property
    def apps(self) -> int:
        return max(1, len(self.controls))


def refuse(plan: Plan, shaped: Shape, apps: int) -> None:
    """What cannot be protected as asked, by name."""
    for stage in plan.sources:
        if stage.source is None or not stage.source.pushed:
            continue
        if shaped.stages[stage.id].guard.replicas > 2:
            raise errors.HostError(
                f"source {stage.name!r} is one whose rows come once, and such a source can have "
                f"2 replicas, not {shaped.stages[stage.id].guard.replicas}",
                hint="protect the flow with pairs(), or take a source that can be read again",
            )
        if apps > 1 and not stage.source.resumable:
            raise errors.HostError(
                f"source {stage.name!r}: without a checkpoint location the query that feeds it "
                "could not be taken over by another application",
                hint="write spark_stream(df, checkpoint=...), at a place that all of them reach",
            )
    if apps > 1 and shaped.granularity != "partition":
        raise errors.HostError(
            f"{shaped.granularity} pairs are there to be measured, in one application"
        )


def apart(shaped: Shape, apps: int) -> Shape:
    """With several applications, replicas are in different ones: that is what they are for."""
    if apps == 1:
        return shaped
    stages = tuple(
        replace(s, guard=replace(s.guard, failure_domain="application"))
        if 1 < s.guard.wanted <= apps
        else s
        for s in shaped.stages
    )
    return replace(shaped, stages=stages)
