"""The readers of a sink that is read from the egress, and the progress of each.

Every reader has a permanent name. The egress holds rows for readers in the state *reading*. It
drops a reader that was idle for too long, that holds too many rows, or that a user had it forget.
A dropped reader stays known: if it returns and rows that it lacks are gone, it gets an error. A
reader never skips rows silently.

All replicas of the egress have the same readers, and they are stored when the flow is stopped. Only
the leading replica knows when a reader was last active.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from holdfast.errors import require

DROPPED_MAX = 1_000
"""Maximum dropped readers that are remembered; the latest are kept. Readers that were dropped
earlier are also refused if they lack rows, but the error does not say why they were dropped."""


class ReaderState(enum.Enum):
    READING = "reading"
    IDLE = "idle"
    """Dropped because it was inactive for too long."""
    BEHIND = "behind"
    """Dropped because too many bytes were held for it."""
    FORGOTTEN = "forgotten"
    """Dropped on a user's request."""


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
    """It has committed everything up to this epoch."""
    incarnation: str
    """The flow's incarnation at that commit. A flow that continues a stopped one has another."""
    state: ReaderState = ReaderState.READING


class Readers:
    """The readers of one sink; `awaited` more are expected."""

    def __init__(self, awaited: int) -> None:
        self.awaited = awaited
        self.known: dict[str, Reader] = {}

    @property
    def reading(self) -> dict[str, Reader]:
        return {n: r for n, r in self.known.items() if r.state is ReaderState.READING}

    def unneeded_upto(self, taken: int) -> int:
        """Return the epoch up to which no reader needs rows. While a reader is awaited, all rows
        are needed; if all readers were dropped, none are."""
        if self.awaited:
            return -1
        return min((r.epoch for r in self.reading.values()), default=taken)

    def slowest(self) -> str | None:
        """Return the reader that holds the most rows; None if none reads or one is awaited."""
        reading = self.reading
        if self.awaited or not reading:
            return None
        return min(reading, key=lambda name: reading[name].epoch)

    def put(self, name: str, epoch: int, incarnation: str) -> None:
        """Note that a reader has everything up to `epoch` and needs the epochs after it."""
        if name not in self.known:
            self.awaited = max(self.awaited - 1, 0)
        self._set(name, Reader(epoch, incarnation))

    def drop(self, name: str, why: ReaderState) -> None:
        """Stop holding rows for a reader."""
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
                # Keeps dropped readers in the order in which they were dropped.
                del self.known[name]
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
