"""The protection of a stage: one class for what a user writes and for what the machines use.

A user makes one with the functions of `holdfast.api.protection`. The plan resolves it for each
stage (`resolved`). Then it is part of the shape, travels in views, and tells the machines what to
do. It says how many replicas there are and how they are kept up to date. Where they are is in the
view.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DOMAINS = ("process", "executor", "host", "application")
"""Failure domains: what can fail at once, from the narrowest to the widest."""

GRANULARITIES = ("partition", "dataflow", "cluster")

ALL_LEVELS = 1 << 16
"""The `rebuild_level` of a stage that is rebuilt however many stages in a row are lost with it."""


@dataclass(frozen=True, slots=True)
class ProtectionSpec:
    """The protection of a stage. The default is none: one replica and no standby."""

    name: str = "none"
    """The name of the function that made it."""
    replicas: int = 1
    """How many replicas compute."""
    failure_domain: str = "process"
    """The failure domain that no two replicas may share."""
    standbys: int = 0
    """How many more sites get checkpoints and do not compute."""
    every_ms: int = 0
    """The interval between checkpoints, if it is a time."""
    every_epochs: int = 0
    """The interval between checkpoints, if it is a number of epochs."""
    recovery_ms: int = 0
    """The time within which a standby must be able to take over, if the interval follows from
    it."""
    deterministic: bool = True
    """Whether replicas produce the same frames, row by row. If not, consumers take frames from the
    first replica, and the others withhold theirs."""
    followers: bool = False
    """Of sources and sinks: whether replicas other than the first only follow it. A follower knows
    which epochs no consumer needs any more, and processes the others when it leads."""
    level: int = 0
    """If not 0, producers keep the stage's input at this level: see `holdfast.core.upstream`."""
    rebuild_level: int = 0
    """If not 0, a lost partition is rebuilt from the input that producers keep, which is complete
    at this level. While protection changes it may be below `level`. Before the plan resolves it, it
    is the number of stages in a row that may be lost at once."""
    base_ms: int = 0
    """If not 0, a stage that could only be rebuilt from all input since the start has a standby
    instead, and this is the interval between its checkpoints."""
    granularity: str = "partition"
    """What is lost with a site, and rebuilt."""

    # --- what a user's choice means for a stage -------------------------------------------------

    @property
    def losses(self) -> int:
        """How many failure domains may be lost at once, as a user's choice promises it. With
        `upstream(k=)` that is the number of stages in a row: each loss may take one of them."""
        if not self.rebuild_level:
            return self.wanted - 1
        return 1 if self.rebuild_level >= ALL_LEVELS else self.rebuild_level

    def bears(self, losses: int) -> bool:
        """Whether a stage with this protection survives this number of losses at once."""
        return self.rebuild_level >= ALL_LEVELS or self.losses >= losses

    def of_unbounded(self, losses: int = 1) -> ProtectionSpec | None:
        """The protection of a stage whose state comes from all rows that a key ever had, in a flow
        that survives these losses at once; None if such a stage cannot be protected in this
        way."""
        if not self.rebuild_level:
            return self
        if not self.base_ms:
            return None
        standbys = max(losses, self.losses)
        return replace(self, rebuild_level=0, standbys=standbys, every_ms=self.base_ms)

    def at_the_ends(self, losses: int = 0) -> ProtectionSpec:
        """The protection of sources and sinks, which cannot be rebuilt from the input of other
        stages, in a flow of which some stage survives these losses at once. The sequencer is
        with the first source, so it has as many replicas. Without protection there is one."""
        if not self.losses:
            return self
        replicas = 1 + max(losses, self.losses)
        alone = bool(self.rebuild_level or self.standbys)
        if not alone and self.deterministic:
            return replace(self, replicas=replicas)
        return ProtectionSpec("pairs", replicas, self.failure_domain, followers=alone)

    def resolved(self, level: int, followers: bool) -> ProtectionSpec:
        """The protection of a stage whose input is kept at this level. A follower produces no
        frames that could be compared with those of another replica."""
        return replace(
            self,
            level=level,
            rebuild_level=level,
            followers=followers,
            deterministic=self.deterministic and not followers,
        )

    # --- what the machines ask ------------------------------------------------------------------

    @property
    def comparable(self) -> bool:
        """Whether the frames of a replica must equal those of another one. A rebuilt replica may
        produce wrong frames for epochs that no consumer needs."""
        return self.deterministic and not self.rebuild_level

    @property
    def wanted(self) -> int:
        """How many sites are to hold each partition: replicas and standbys."""
        return self.replicas + self.standbys

    @property
    def counts(self) -> tuple[int, int]:
        """How many replicas and how many standbys."""
        return self.replicas, self.standbys

    def towards(self, aim: ProtectionSpec) -> ProtectionSpec:
        """The protection between this one and `aim`. If `aim` keeps more input, the present
        replicas stay until enough is kept. If it keeps less, input is kept until all wanted
        replicas are in place."""
        if aim.level > self.level:
            return replace(self, level=aim.level)
        return replace(aim, level=self.level, rebuild_level=self.rebuild_level)


NO_PROTECTION = ProtectionSpec()
