"""Who reads a sink where it is written, and how far each reader is.

Every reader has a name that it keeps. Rows are held for those that are *reading*. A reader that is
dropped, because it was not seen for too long, holds too much, or somebody forgot it, stays known:
if rows have gone meanwhile that it lacks, it is told so when it comes back. It never gets past them
unnoticed.

What is here is the same at all replicas of the egress, and is stored when the flow is stopped. When
a reader was seen is known only to the replica that leads.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import require

DROPPED_MAX = 1_000
"""So many readers that were dropped are remembered, the latest. Others are refused as well if they
lack rows, but not told why they were dropped."""


class ReaderState(enum.Enum):
    READING = "reading"
    IDLE = "idle"
    """Dropped: it was not seen for too long."""
    BEHIND = "behind"
    """Dropped: too much was held for it."""
    FORGOTTEN = "forgotten"
    """Dropped: somebody said so."""


S = ReaderState
NEXT: dict[ReaderState, tuple[ReaderState, ...]] = {
    S.READING: (S.READING, S.IDLE, S.BEHIND, S.FORGOTTEN),
    S.IDLE: (S.READING,),
    S.BEHIND: (S.READING,),
    S.FORGOTTEN: (S.READING,),
}


@dataclass(frozen=True, slots=True)
class Reader:
    epoch: int
    """It has everything up to here for good."""
    incarnation: str
    """Of the flow when it last said so. One that goes on from a stopped flow has another."""
    state: ReaderState = ReaderState.READING


class Readers:
    """The readers of one sink, of which `awaited` have yet to come."""

    def __init__(self, awaited: int) -> None:
        self.awaited = awaited
        self.known: dict[str, Reader] = {}

    @property
    def reading(self) -> dict[str, Reader]:
        return {n: r for n, r in self.known.items() if r.state is ReaderState.READING}

    def let_go(self, taken: int) -> int:
        """Up to which epoch nobody needs the rows. While a reader is awaited it will need all of
        them; if all were dropped nobody needs any."""
        if self.awaited:
            return -1
        return min((r.epoch for r in self.reading.values()), default=taken)

    def slowest(self) -> str | None:
        """Whose rows are held; None if nobody reads, or somebody else is awaited."""
        reading = self.reading
        if self.awaited or not reading:
            return None
        return min(reading, key=lambda name: reading[name].epoch)

    def put(self, name: str, epoch: int, incarnation: str) -> None:
        """A reader has everything up to `epoch`, and wants what follows."""
        if name not in self.known:
            self.awaited = max(self.awaited - 1, 0)
        self._set(name, Reader(epoch, incarnation))

    def drop(self, name: str, why: ReaderState) -> None:
        """Hold nothing for a reader from now on."""
        self._set(name, replace(self.known[name], state=why))
        dropped = [n for n, r in self.known.items() if r.state is not ReaderState.READING]
        for oldest in dropped[:-DROPPED_MAX]:
            del self.known[oldest]

    def _set(self, name: str, reader: Reader) -> None:
        before = self.known.get(name)
        if before is not None:
            allowed = reader.state in NEXT[before.state]
            require(allowed, f"reader {name!r} cannot be {reader.state} after {before.state}")
            if reader.state is not before.state:
                del self.known[name]  # the latest that was dropped comes last
        self.known[name] = reader

    def save(self) -> dict[str, Any]:
        known = {n: (r.epoch, r.incarnation, r.state.value) for n, r in self.known.items()}
        return {"readers": known, "awaited": self.awaited}

    def restore(self, saved: Mapping[str, Any]) -> None:
        self.known = {
            name: Reader(epoch, incarnation, ReaderState(state))
            for name, (epoch, incarnation, state) in saved["readers"].items()
        }
        self.awaited = saved["awaited"]
