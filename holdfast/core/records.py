"""Epoch records: the only place where the input order is decided."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.ids import Epoch, StageId


@dataclass(frozen=True, slots=True)
class Block:
    """Consecutive rows of a split that an ingress has in hand. Epochs are made of whole blocks."""

    start: int
    end: int
    nbytes: int
    time_max: int | None = None
    """The largest event time among the rows; None where the source has none."""

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class Range:
    """Rows ``[start, end)`` of one split, which an epoch takes in this place."""

    source: StageId
    split: int
    start: int
    end: int
    time_max: int | None

    @property
    def rows(self) -> int:
        return self.end - self.start


@dataclass(frozen=True, slots=True)
class EpochRecord:
    """Which rows an epoch consists of, in order. Row `i` of it has sequence number ``base + i``."""

    epoch: Epoch
    base: int
    ranges: tuple[Range, ...]
    idle: tuple[StageId, ...] = ()
    """Sources that have nothing to say and must not hold the watermark back."""
    last: bool = False
    """No epoch follows."""
    ended: bool = False
    """All sources have ended: every window closes."""

    @property
    def rows(self) -> int:
        return sum(r.rows for r in self.ranges)
