"""Event time as Spark's stateful operators see it.

Spark counts in milliseconds and holds the watermark back by the allowed lateness. `SparkClock`
converts a flow's watermark accordingly.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import pyarrow as pa

from holdfast.engine.batches import Track
from holdfast.engine.operators.base import Port
from holdfast.engine.watermark import operator_times
from holdfast.errors import FlowError
from holdfast.spark.stateful.handles import NO_TIMER

_PER_MS = {"s": (1, 1_000), "ms": (1, 1), "us": (1_000, 1), "ns": (1_000_000, 1)}
LAST_MS = 253_402_300_799_999
"""The watermark that timers see when the input has ended: the end of the year 9999. It is later
than any valid time, and user code can still do arithmetic with it."""
_LONG_AGO = np.iinfo(np.int64).min


@dataclass(frozen=True)
class SparkClock:
    """Converts the watermark to Spark's: in milliseconds, and delayed by the allowed lateness."""

    on: str
    kind: pa.DataType
    hold: int
    """Delay behind the flow's watermark, in the unit of the event time."""

    @property
    def unit(self) -> str:
        return str(self.kind.unit)

    def behind(self, lateness: int) -> SparkClock:
        return replace(self, hold=self.hold + lateness)

    @property
    def boundary(self) -> tuple[int, int]:
        period = _PER_MS[self.unit][0]
        return period, self.hold % period

    def ms(self, marks: np.ndarray) -> np.ndarray:
        """Convert marks of a track to milliseconds; the final one is later than any timer."""
        divisor, factor = _PER_MS[self.unit]
        moved = (marks != Track.NEVER) & (marks != Track.END)
        ms = (np.where(moved, marks, self.hold) - self.hold) // divisor * factor
        return np.where(moved, ms, np.where(marks == Track.END, NO_TIMER, _LONG_AGO))

    def late(self, batch: pa.RecordBatch, marks_ms: np.ndarray) -> np.ndarray:
        """Return a mask of the rows whose time is not later than the watermark before them."""
        divisor, factor = _PER_MS[self.unit]
        times = operator_times(batch, self.on)
        before = np.where(marks_ms == _LONG_AGO, 0, marks_ms) * divisor
        return (marks_ms != _LONG_AGO) & (times * factor <= before)

    def steps(self, track: Track) -> tuple[np.ndarray, np.ndarray]:
        """Return the sequence numbers at which the watermark advances in milliseconds, and its
        values from there on."""
        ms = self.ms(track.marks)
        moved = np.flatnonzero(ms[1:] > ms[:-1]) + 1
        return track.seqs[moved], ms[moved]


Steps = tuple[np.ndarray, np.ndarray]
NO_STEPS: Steps = (np.empty(0, np.int64), np.empty(0, np.int64))


def shown(mark: int) -> int:
    """Return a mark as user code sees it: it is 0 before the first watermark, as in Spark."""
    return min(max(mark, 0), LAST_MS)


def clock_of(source: Port, on: str, where: str) -> SparkClock:
    """Return the clock of an operator over `source`, whose rows have the event time `on`."""
    kind = source.schema.field(on).type
    if not pa.types.is_timestamp(kind):
        raise FlowError(
            f"{where}: timers are in milliseconds, but the event time {on!r} is {kind}",
            hint="convert it to a timestamp",
        )
    return SparkClock(on, kind, source.delay)
