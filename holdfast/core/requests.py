"""What a user, or the balancer for the user, asks of a flow's controller."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.ids import SiteId, TaskId
from holdfast.core.protection import ProtectionSpec
from holdfast.core.values import value


@dataclass(frozen=True, slots=True)
class Relocation:
    """A move of one replica of a task from a site to another."""

    task: TaskId
    source: SiteId
    target: SiteId
    reason: str = ""


@value
class StopRequested:
    """End the flow."""

    drain: bool
    """Whether rows that were taken are delivered first."""


@value
class ProtectionWanted:
    """Change the protection of stages."""

    guards: tuple[ProtectionSpec, ...]
    """By stage."""


@value
class MovesWanted:
    """Move replicas to other sites. Those that cannot be moved now stay where they are."""

    moves: tuple[Relocation, ...]


@value
class EmptySites:
    """Move everything away from these sites, and let them leave the flow."""

    sites: tuple[SiteId, ...]


@value
class SitesWanted:
    """Run the flow on this many sites: launch more, or empty some."""

    count: int


Change = ProtectionWanted | MovesWanted | EmptySites | SitesWanted
"""What only a flow that runs can do."""
Request = StopRequested | Change
