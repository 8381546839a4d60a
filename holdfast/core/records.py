"""Epoch records: the only place where the input order is decided.

The watermark is a function of the records as well: a range says at which of its rows the event time
of its split rises, and a record says which splits are idle. So every ingress computes the same
watermark at every row, whichever splits it reads.
"""

from __future__ import annotations

import struct
from bisect import bisect_left
from dataclasses import dataclass, replace

from holdfast.core.ids import Epoch, StageId

_STEP = struct.Struct("=qq")
STEP_BYTES = _STEP.size

SplitKey = tuple[StageId, int]
"""A split: its source, and its number there."""


def pack_step(row: int, time: int) -> bytes:
    """A step of a split's event time: from the row with this offset on, the largest time so far
    is `time`. Steps stay packed, in the order of their rows; the core only cuts them."""
    return _STEP.pack(row, time)


def cut_steps(steps: bytes, row: int) -> tuple[bytes, bytes]:
    """The steps of the rows before `row`, and those of the rows from there on. Both begin with a
    step, so that the time of a block's first row is always known.

    >>> before, after = cut_steps(pack_step(0, 50) + pack_step(7, 60), 5)
    >>> before == pack_step(0, 50), after == pack_step(5, 50) + pack_step(7, 60)
    (True, True)
    """
    rows = memoryview(steps).cast("q")[::2]
    at = bisect_left(rows, row)
    before, after = steps[: STEP_BYTES * at], steps[STEP_BYTES * at :]
    if at and (at == len(rows) or rows[at] != row):
        after = pack_step(row, _STEP.unpack_from(before, len(before) - STEP_BYTES)[1]) + after
    return before, after


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of a split that an ingress holds."""

    start: int
    end: int
    nbytes: int
    steps: bytes = b""
    """Where the largest event time of these rows rises, from the first row on; empty if no operator
    uses the source's event time."""

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def steps_count(self) -> int:
        return len(self.steps) // STEP_BYTES

    @property
    def time_first(self) -> int | None:
        """The event time of the first row."""
        return _STEP.unpack_from(self.steps)[1] if self.steps else None

    def row_of_step(self, number: int) -> int:
        return _STEP.unpack_from(self.steps, STEP_BYTES * number)[0]

    def cut(self, row: int) -> tuple[Block, Block]:
        """The rows before the offset `row`, and the rest; both have some."""
        before, after = cut_steps(self.steps, row)
        nbytes = self.nbytes * (row - self.start) // self.rows
        return (
            Block(self.start, row, nbytes, before),
            Block(row, self.end, self.nbytes - nbytes, after),
        )


@dataclass(frozen=True, slots=True)
class Range:
    """Rows ``[start, end)`` of one split, at this place of an epoch."""

    source: StageId
    split: int
    start: int
    end: int
    steps: bytes = b""
    """As in `Block`."""

    @property
    def rows(self) -> int:
        return self.end - self.start

    @property
    def time_max(self) -> int | None:
        """The largest event time of its steps."""
        return max(memoryview(self.steps).cast("q")[1::2]) if self.steps else None

    def summary(self) -> Range:
        time = self.time_max
        return self if time is None else replace(self, steps=pack_step(self.start, time))


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """Which rows an epoch consists of, in order. Row `i` of it has sequence number ``base + i``."""

    epoch: Epoch
    base: int
    ranges: tuple[Range, ...]
    idle: tuple[SplitKey, ...] = ()
    """Splits that have become idle or have ended. After the last row of this epoch they no longer
    hold the watermark back, until they have a row again."""
    last: bool = False
    """No epoch follows."""
    ended: bool = False
    """All sources have ended: every window closes."""
    awake: bool = False
    """The flow continues here after it was stopped or lost. From the first row on every split holds
    the watermark back, until its source has been heard from again."""

    @property
    def rows(self) -> int:
        return sum(r.rows for r in self.ranges)

    def summary(self) -> EpochRecord:
        """The same rows, with one step of event time for each range: for keeping many records when
        no watermark is computed from them."""
        return replace(self, ranges=tuple(r.summary() for r in self.ranges))
