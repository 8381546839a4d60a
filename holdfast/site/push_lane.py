"""Another replica of a push source, as the leading one sees it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from holdfast.site.push_entries import LogEntry

WINDOW_BYTES = 16 << 20
"""Bytes that may be sent to another replica before it confirms them."""


class LaneState(Enum):
    UNKNOWN = "the leader does not know what the replica has"
    BEHIND = "the replica may lack push batches that entered before it was waited for"
    COUNTS = "the replica has everything that has entered"


class LaneEvent(Enum):
    ASKED = "the replica has said what it has"
    REACHED = "the replica has what had entered then"


LANE_TABLE: Mapping[tuple[LaneState, LaneEvent], LaneState] = {
    (LaneState.UNKNOWN, LaneEvent.ASKED): LaneState.BEHIND,
    (LaneState.BEHIND, LaneEvent.ASKED): LaneState.BEHIND,
    (LaneState.COUNTS, LaneEvent.ASKED): LaneState.BEHIND,
    (LaneState.BEHIND, LaneEvent.REACHED): LaneState.COUNTS,
}


@dataclass(slots=True, eq=False)
class ReplicaLane:
    """The push batches that another replica has, and those that are on their way to it."""

    joined_view: int = 0
    """Distinguishes the replica from an earlier one at the same site."""
    state: LaneState = LaneState.UNKNOWN
    has: int = 0
    entered: int = 0
    sent: int = 0
    _counts_from: int = 0
    """The number of push batches that it must have before it counts."""
    _unconfirmed: deque[tuple[int, int]] = field(default_factory=deque)
    """Numbers and sizes of the push batches that were sent."""
    _unconfirmed_bytes: int = 0

    @property
    def is_open(self) -> bool:
        known = self.state is not LaneState.UNKNOWN
        return known and self._unconfirmed_bytes < WINDOW_BYTES

    def _advance(self, event: LaneEvent) -> None:
        self.state = LANE_TABLE[self.state, event]

    def ask(self, has: int, entered: int, counts_from: int) -> None:
        """The replica has these push batches, and lacks what follows: anything that was on its way
        may be lost."""
        self._advance(LaneEvent.ASKED)
        self.has = self.sent = has
        self.entered, self._counts_from = entered, counts_from
        self._unconfirmed_bytes = 0
        self._unconfirmed.clear()

    def send(self, entry: LogEntry) -> None:
        self.sent = entry.number
        self._unconfirmed.append((entry.number, entry.nbytes))
        self._unconfirmed_bytes += entry.nbytes

    def confirm(self, number: int, entered: int) -> None:
        self.has, self.entered = max(self.has, number), max(self.entered, entered)
        while self._unconfirmed and self._unconfirmed[0][0] <= self.has:
            self._unconfirmed_bytes -= self._unconfirmed.popleft()[1]

    def reaches(self) -> bool:
        """Whether the replica counts from now on."""
        if self.state is not LaneState.BEHIND or self.has < self._counts_from:
            return False
        self._advance(LaneEvent.REACHED)
        return True
