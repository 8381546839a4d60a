"""The watermark: how far event time has come, row by row, in the recorded input order.

At a row it is the least, over all sources that declare an event time, of the largest time that the
source has shown up to and including that row; it never falls. A source that has shown none yet
holds it at `Track.NEVER`, one that is idle does not hold it at all. What leaves this module is
thinned to the steps that some event-time operator can notice, so a track stays short however many
rows there are. The batch job and the live ingress both compute it here, and only here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import pyarrow as pa

from holdfast.errors import InputError
from holdfast.flow.batches import Track, row_values, take
from holdfast.flow.sources import FLAW
from holdfast.flow.state import Field

Steps = tuple[np.ndarray, np.ndarray]
"""Sequence numbers, and the watermark from each of those rows on."""

_NO_STEPS: Steps = (np.empty(0, np.int64), np.empty(0, np.int64))


class Watermark:
    """The watermark over rows that come block by block, each block of one source and in order.

    >>> mark = Watermark([0], boundaries=[(10, 0)])
    >>> seqs, marks = mark.advance(0, np.arange(5), np.array([3, 12, 11, 19, 25]))
    >>> seqs.tolist(), marks.tolist()
    ([0, 1, 4], [3, 12, 25])
    """

    def __init__(self, sources: Iterable[int], boundaries: Sequence[tuple[int, int]]) -> None:
        self.boundaries = [(period, offset % period) for period, offset in boundaries]
        self._top = dict.fromkeys(sources, Track.NEVER)
        self._idle: set[int] = set()
        self._value = Track.NEVER
        self._reported = Track.NEVER  # the mark at the last row; a step is a move away from it

    @property
    def value(self) -> int:
        """The watermark after everything that was said so far."""
        return self._value

    def advance(self, source: int, seqs: np.ndarray, times: np.ndarray) -> Steps:
        """Take the source's next rows, in order; give the steps at them that matter."""
        if seqs.size == 0:
            return _NO_STEPS
        self._idle.discard(source)
        own = np.maximum(np.maximum.accumulate(times), self._top[source])
        self._top[source] = int(own[-1])
        marks = np.maximum(np.minimum(own, self._held_at(source)), self._value)
        self._value = int(marks[-1])
        return self._thinned(seqs, marks)

    def observe(self, source: int, max_time: int) -> None:
        """Rows of `source` have come whose times another machine has: their steps are its to
        report, here only the largest time is known. Not to be called for an empty block."""
        self._idle.discard(source)
        self._top[source] = max(self._top[source], max_time)
        self._settle()
        self._reported = self._value

    def idle(self, source: int) -> None:
        """`source` holds nothing back until it has a row again. What that sets free is a step at
        the next row of any source: only rows have a place in the order."""
        self._idle.add(source)
        self._settle()

    def let_go(self, sources: Iterable[int], end: int) -> Steps:
        """The sources that an epoch calls idle let go behind its last row, the one before `end`."""
        for source in sources:
            if source in self._top:
                self.idle(source)
        return np.array([end - 1]), np.array([self._value])

    def end(self, seq: int) -> Steps:
        """The input has ended before `seq`, which no row has: everything closes there."""
        self._value = self._reported = Track.END
        return np.array([seq], np.int64), np.array([Track.END], np.int64)

    def save(self) -> bytes:
        """All it knows, for the `restore` of another watermark over the same sources."""
        idle = [source in self._idle for source in self._top]
        known = [self._value, self._reported, *self._top.values(), *idle]
        return np.array(known, np.int64).tobytes()

    def restore(self, saved: bytes) -> None:
        """Go on from where the one that was saved has come to."""
        self._value, self._reported, *rest = np.frombuffer(saved, np.int64).tolist()
        tops, idle = rest[: len(self._top)], rest[len(self._top) :]
        self._top = dict(zip(self._top, tops, strict=True))
        self._idle = {s for s, away in zip(self._top, idle, strict=True) if away}

    def _held_at(self, but: int | None = None) -> int:
        """Where the sources that count (leaving out one) hold the watermark."""
        tops = (t for s, t in self._top.items() if s != but and s not in self._idle)
        return min(tops, default=Track.END)

    def _settle(self) -> None:
        held = self._held_at()
        if held != Track.END:  # with all sources idle nothing is known, so nothing moves
            self._value = max(self._value, held)

    def _thinned(self, seqs: np.ndarray, marks: np.ndarray) -> Steps:
        line = np.concatenate([[self._reported], marks])
        self._reported = self._value
        moved = np.zeros(marks.size, bool)
        for period, offset in self.boundaries:
            cell = cells(line, period, offset)
            moved |= cell[1:] != cell[:-1]
        return seqs[moved], marks[moved]


def cells(marks: np.ndarray, period: int, offset: int) -> np.ndarray:
    """``floor((marks - offset) / period)`` for an offset below the period, without overflow."""
    quotient, rest = np.divmod(marks, period)
    return quotient - (rest < offset)


def track_of(steps: Sequence[Steps], start: int = Track.NEVER) -> Track:
    """The track that begins at the mark `start` and takes those of these steps that lead up."""
    seqs = np.concatenate([np.array([Track.START]), *(s for s, _ in steps)])
    marks = np.concatenate([np.array([start]), *(m for _, m in steps)])
    up = np.append(True, marks[1:] > np.maximum.accumulate(marks)[:-1])
    return Track(seqs[up], marks[up])


REACH_MAX = 1 << 57
"""How far apart in event time an operator may look, and how far its results may be behind."""
_ROOM = 1 << 59
"""How far the event times of a source stay away from the ends of int64. There `Track.NEVER` and
`Track.END` are, and from there on adding up durations would lead round to the other end. Those that
operators make of them are nearer by `REACH_MAX` at most, and so is the end of a window."""


def event_times(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """The event time of every row, in the units of its column."""
    array = batch.column(name)
    if array.null_count:
        raise ValueError(f"the event time {name!r} is null")
    return Field(array.type).stored(array).astype(np.int64, copy=False)


def operator_times(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """The event times of rows that an operator takes, which any column may have been made into."""
    times = event_times(batch, name)
    at = _first_beyond(times, (Track.END - _ROOM // 2) // _finest(batch.schema.field(name).type))
    if at is not None:
        raise ValueError(f"the event time {name!r} is {times[at]}, too near to the ends of int64")
    return times


def reach_max(kind: pa.DataType) -> int:
    """`REACH_MAX` for event times of this type."""
    return REACH_MAX // _finest(kind)


def _finest(kind: pa.DataType) -> int:
    """In how many parts a unit is looked at: seconds are also counted in milliseconds."""
    return 1000 if pa.types.is_timestamp(kind) and kind.unit == "s" else 1


def _first_beyond(times: np.ndarray, limit: int) -> int | None:
    if times.size == 0 or (times.min() >= -limit and times.max() <= limit):
        return None
    return int(np.flatnonzero((times < -limit) | (times > limit))[0])


def source_times(batch: pa.RecordBatch, name: str, source: str) -> np.ndarray:
    """The event times of a source's rows; a row without one is the source's fault, and named."""
    if FLAW in batch.schema.names and batch.column(FLAW).null_count < batch.num_rows:
        return _times_of_the_others(batch, name, source)
    array = batch.column(name)
    if array.null_count:
        row = row_values(batch, array.is_null().index(True).as_py())
        raise InputError(f"source {source!r}: the event time {name!r} is null\n  row: {row}")
    times = event_times(batch, name)
    limit = (Track.END - _ROOM) // _finest(array.type)
    at = _first_beyond(times, limit)
    if at is not None:
        raise InputError(
            f"source {source!r}: the event time {name!r} is {times[at]}, which is too near to the "
            f"ends of int64 to work with\n  row: {row_values(batch, at)}",
            hint=f"times are between {-limit} and {limit}; leave such rows out before the source",
        )
    return times


def _times_of_the_others(batch: pa.RecordBatch, name: str, source: str) -> np.ndarray:
    """Rows that could not be read have no time, and do not move the watermark."""
    fine = np.flatnonzero(batch.column(FLAW).is_null().to_numpy(zero_copy_only=False))
    times = np.full(batch.num_rows, Track.NEVER)
    rest = batch.select([n for n in batch.schema.names if n != FLAW])
    times[fine] = source_times(take(rest, fine), name, source)
    return times
