"""Where a flow is hosted: its applications, the host of its sites, and what it cannot have
there."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Protocol

from holdfast import errors
from holdfast.api.graph import Flow
from holdfast.core.layout import Shape
from holdfast.plan.planner import Plan
from holdfast.site.config import OnExit, SiteConfig

Address = tuple[str, int]
Route = Callable[[int, int, Address], Address]
"""The address that the first site dials to reach the second, which listens at the given one."""


def direct(site: int, other: int, address: Address) -> Address:
    """Sites connect to each other directly."""
    return address


class Host(Protocol):
    """Starts the sites' processes, and reports when one has ended."""

    name: str
    application: str
    listen_host: str
    advertise_host: str
    """The address at which sites reach the controller."""

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None: ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class Place:
    """Which of the flow's applications this is, and how they reach each other."""

    app: int = 0
    controls: tuple[tuple[str, int], ...] = ()
    """By application: the address of its control; empty if there is only one."""
    arbiter_url: str | None = None

    def __post_init__(self) -> None:
        if len(self.controls) > 1 and self.arbiter_url is None:
            raise errors.HostError(
                f"{len(self.controls)} applications need an arbiter that decides which one leads",
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
    """Raise if something cannot be protected as the user wants it."""
    for stage in plan.sources:
        if stage.source is None or not stage.source.pushed:
            continue
        if apps > 1 and not stage.source.resumable:
            raise errors.HostError(
                f"source {stage.name!r}: without a checkpoint location the query that feeds it "
                "could not be taken over by another application",
                hint="write spark_stream(df, checkpoint=...), at a place that all of them reach",
            )
    if apps > 1 and shaped.granularity != "partition":
        raise errors.HostError(
            f"{shaped.granularity} pairs are for measurements, and run in one application only"
        )


def widen_failure_domains(shaped: Shape, apps: int) -> Shape:
    """The shape with replicas in different applications, if there are enough: a flow that is hosted
    by several applications is to survive the loss of one."""
    if apps == 1:
        return shaped
    stages = tuple(
        replace(s, guard=replace(s.guard, failure_domain="application"))
        if 1 < s.guard.wanted <= apps
        else s
        for s in shaped.stages
    )
    return replace(shaped, stages=stages)
