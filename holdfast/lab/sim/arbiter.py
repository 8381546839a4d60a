"""The simulated arbiter: the rules of the real ones, in memory, by a world's clock."""

from __future__ import annotations

from collections.abc import Callable

from holdfast.arbiter.memory import ArbiterMemory, MemoryArbiter
from holdfast.control.leading import Knowledge, decode


class SimArbiter(MemoryArbiter):
    """One application's access, for one life of it."""

    def __init__(self, lease_s: float, store: ArbiterMemory, clock: Callable[[], float]) -> None:
        super().__init__("simulated", lease_s, store)
        self._clock = clock

    def _clock_ns(self) -> int:
        return round(self._clock() * 1e9)


class Ledger(ArbiterMemory):
    """What all applications share: the entry, and what was ever committed."""

    def __init__(self) -> None:
        super().__init__()
        self.views: set[tuple[int, int]] = set()
        """Term and number of every view that was committed."""
        self.broken: set[int] = set()
        """The terms whose leases were ended before their time."""
        self._read: tuple[int, Knowledge | None] = (-1, None)

    @property
    def known(self) -> Knowledge | None:
        """What is committed."""
        entry = self.record.entry
        if self._read[0] != entry.version:
            self._read = (entry.version, decode(entry.value) if entry.value else None)
        return self._read[1]

    def note(self) -> None:
        """A commit went through."""
        known = self.known
        if known is not None and known.view is not None:
            self.views.add((known.view.term, known.view.number))

    def end_lease(self) -> None:
        """Whoever leads has lost its session."""
        self.broken.add(self.record.entry.term)
        self.leases[self.record.entry.term] = 0
