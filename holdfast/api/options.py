"""How a flow is run: the settings of ``flow.start`` that sites need to know."""

from __future__ import annotations

from dataclasses import dataclass, field

from holdfast.core.sequencer import Budget
from holdfast.errors import FlowError


@dataclass(frozen=True, slots=True)
class Options:
    """`partitions` is per keyed stage. Epochs are as large, and as many are in flight, as `budget`
    allows; a consumer has room for `window` epochs ahead of the one it is at."""

    partitions: int = 32
    budget: Budget = field(default_factory=Budget)
    window: int = 4
    block_rows: int = 65_536
    read_ahead_rows: int = 262_144
    idle_ms: int | None = 2_000
    """A split that has had no rows for so long does not hold the watermark back until it has some
    again; None: all splits do, for ever. Longer than a source that comes in bursts pauses."""
    digests: bool = True
    status_ms: int = 500
    lease_s: float = 1.0
    """A site that has been silent for so long is declared dead."""
    call_s_max: float = 300.0
    """A call of a stage's code that takes longer, and longer than two leases, is taken for one that
    never ends: its site is declared dead if the flow can do without it; if not, the flow ends."""
    catch_up_mb_s: float = 100.0
    """How fast a site hands state over to new replicas."""
    kept_bytes_max: int = 256 << 20
    """A replica elsewhere for which a site must keep more than this is failed on purpose."""
    log_bytes_max: int = 256 << 20
    """Of what a site keeps for others so much stays in memory; the rest goes to disk."""
    spill: str | None = None
    """In which folder, if not where temporary files are."""
    store: str | None = None
    """Where the state goes when the flow is stopped."""
    store_every_ms: int = 0
    """How often it goes there while the flow runs; 0: never."""
    generation: int = 0
    """Which one of those that have written there: see `holdfast.storage.generations`."""

    def __post_init__(self) -> None:
        if not 1 <= self.partitions <= 65_535:
            raise FlowError(f"partitions must be between 1 and 65,535, not {self.partitions}")
        positive = ("lease_s", "call_s_max", "catch_up_mb_s", "kept_bytes_max")
        if any(getattr(self, name) <= 0 for name in positive):
            raise FlowError(f"{', '.join(positive[:-1])} and {positive[-1]} must be positive")
        if self.idle_ms is not None and self.idle_ms < 0:
            raise FlowError(
                f"idle_ms={self.idle_ms}: after how many milliseconds without rows a split is idle",
                hint="None means never",
            )
        if self.log_bytes_max < 0:
            raise FlowError(f"log_bytes_max must not be negative, as {self.log_bytes_max} is")
        if self.store_every_ms < 0 or (self.store_every_ms and self.store is None):
            raise FlowError(
                f"store_every_ms={self.store_every_ms}: how often the state is written, in "
                "milliseconds; it needs store=, a folder to write it to"
            )
        if self.window < 1 or self.block_rows < 1 or self.read_ahead_rows < self.block_rows:
            raise FlowError(
                "window and block_rows must be positive, and read_ahead_rows not smaller"
            )
