"""How a stage is protected: one description, from what a user writes to what the machines do.

`holdfast.api.protection` has the functions with which a user makes one. The plan resolves it for
each stage (`resolved`), and then it is part of the shape, travels in views, and is what the
machines go by. It says how many replicas there are and how they are kept up to date, never where
they are: that is for the view.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

DOMAINS = ("process", "executor", "host", "application")
"""What can fail at once, from the narrowest to the widest."""

GRANULARITIES = ("partition", "dataflow", "cluster")


@dataclass(frozen=True, slots=True)
class ProtectionSpec:
    """The protection of a stage. The default is none: one replica, and nothing in reserve."""

    name: str = "none"
    """What a user calls it."""
    replicas: int = 1
    """How many replicas compute."""
    failure_domain: str = "process"
    """What no two replicas may share."""
    standbys: int = 0
    """How many more replicas get checkpoints, and compute nothing."""
    every_ms: int = 0
    """How often they get one."""
    every_epochs: int = 0
    """Or after how many epochs."""
    recovery_ms: int = 0
    """Or within which time they shall be able to take over."""
    deterministic: bool = True
    """Whether replicas make the same frames, row by row. If not, consumers take them from the
    first replica, and the others withhold theirs."""
    followers: bool = False
    """Of sources and sinks: whether replicas other than the first only follow it. They know which
    epochs nobody needs from them any more, and do the others when they come to lead."""
    level: int = 0
    """If not 0, producers keep the stage's input at this level: see `holdfast.core.upstream`."""
    rebuild_level: int = 0
    """If not 0, a partition that is lost is rebuilt from what is kept, which is complete at this
    level. While protection changes it may be below `level`. Before the plan resolves it, it is how
    many stages in a row may be lost at once."""
    base_ms: int = 0
    """If not 0, a stage that would need all input that there ever was has a standby instead, which
    gets the state so often."""
    granularity: str = "partition"
    """What is lost with a site, and made again."""

    # --- what a user's choice means for a stage -------------------------------------------------

    def of_unbounded(self) -> ProtectionSpec | None:
        """What it means for a stage whose state comes from all rows that a key ever had; None if
        such a stage cannot be protected so."""
        if not self.rebuild_level:
            return self
        if not self.base_ms:
            return None
        return replace(self, rebuild_level=0, standbys=1, every_ms=self.base_ms)

    @property
    def at_the_ends(self) -> ProtectionSpec:
        """What it means for sources and sinks, which cannot be rebuilt from what flows."""
        alone = bool(self.rebuild_level or self.standbys)
        if not alone and self.deterministic:
            return self
        return ProtectionSpec("pairs", 2, self.failure_domain, followers=alone)

    def resolved(self, level: int, followers: bool) -> ProtectionSpec:
        """Of a stage whose input is kept at this level. A replica that only follows makes nothing
        that could be compared with what another one made."""
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
        """Whether what a replica makes must equal what another one has made. One that is rebuilt
        makes some of it wrong that nobody needs."""
        return self.deterministic and not self.rebuild_level

    @property
    def wanted(self) -> int:
        """How many sites shall have something of each partition."""
        return self.replicas + self.standbys

    @property
    def counts(self) -> tuple[int, int]:
        return self.replicas, self.standbys

    def towards(self, aim: ProtectionSpec) -> ProtectionSpec:
        """What comes before `aim`. What is kept now is kept until all replicas that are wanted are
        in place; and replicas that are there now stay until enough is kept."""
        if aim.level > self.level:
            return replace(self, level=aim.level)
        return replace(aim, level=self.level, rebuild_level=self.rebuild_level)


NO_PROTECTION = ProtectionSpec()
