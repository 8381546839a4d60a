"""The simulated arbiter: the rules of the real ones, in memory, by a world's clock."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.arbiter.memory import ArbiterMemory, MemoryArbiter
from holdfast.control.knowledge import Knowledge, decode


class SimArbiter(MemoryArbiter):
    """The access of one application, until it dies."""

    def __init__(self, lease_s: float, store: ArbiterMemory, clock: Callable[[], float]) -> None:
        super().__init__("simulated", lease_s, store)
        self._clock = clock

    def _clock_ns(self) -> int:
        return round(self._clock() * 1e9)


class ArbiterLedger(ArbiterMemory):
    """What all applications share: the arbiter's entry, and the history of commits."""

    def __init__(self) -> None:
        super().__init__()
        self.views: set[tuple[int, int]] = set()
        """Term and number of every view that was committed."""
        self.broken: set[int] = set()
        """The terms whose leases the arbiter ended too early."""
        self._read: tuple[int, Knowledge | None] = (-1, None)

    @property
    def known(self) -> Knowledge | None:
        """The decoded value of the entry."""
        entry = self.record.entry
        if self._read[0] != entry.version:
            self._read = (entry.version, decode(entry.value) if entry.value else None)
        return self._read[1]

    def note(self) -> None:
        """Record the view of a commit that succeeded."""
        known = self.known
        if known is not None and known.view is not None:
            self.views.add((known.view.term, known.view.number))

    def end_lease(self) -> None:
        """End the lease of the current leader."""
        self.broken.add(self.record.entry.term)
        self.leases[self.record.entry.term] = 0
