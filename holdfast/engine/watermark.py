"""The watermark: how far event time has come, row by row, in the recorded input order.

At a row it is the least, over all splits of all sources that declare an event time, of the largest
time that the split has shown up to and including that row; it never falls. So splits that are each
in order have no late rows, in whatever turns they are read. A split that has shown no row yet holds
it at `Track.NEVER`; one that is idle, or has ended, does not hold it at all. If all are idle, it is
where the first of them is.

A block of rows is announced with the *steps* of its own largest time, thinned to those that some
event-time operator can notice. They become part of the epoch record, and the watermark is a
function of the records. What leaves this module is thinned in the same way, so a track stays short
however many rows there are. The batch job and the live ingress both compute it here, and only here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.core.records import EpochRecord, Range
from holdfast.engine.batches import DECODE_ERROR, Track, row_values, take
from holdfast.engine.state import Field
from holdfast.errors import InputError

Steps = tuple[np.ndarray, np.ndarray]
"""Sequence numbers, and the watermark from each of those rows on."""

Boundaries = Sequence[tuple[int, int]]
"""(period, offset) of every set of watermarks at which some operator does something."""

_NO_STEPS: Steps = (np.empty(0, np.int64), np.empty(0, np.int64))


class _Saved(msgspec.Struct):
    """A watermark as it is handed over and stored."""

    value: int
    splits: list[tuple[int, int, int, bool]]
    """Source, number, largest time, whether it is idle."""


class Watermark:
    """The watermark over rows that come range by range, each of one split and in order.

    >>> mark = Watermark([(0, 0)], boundaries=[(10, 0)])
    >>> seqs, marks = mark.advance((0, 0), np.arange(5), np.array([3, 12, 11, 19, 25]))
    >>> seqs.tolist(), marks.tolist()
    ([0, 1, 4], [3, 12, 25])
    """

    def __init__(self, splits: Iterable[tuple[int, int]], boundaries: Boundaries) -> None:
        self.boundaries = [(period, offset % period) for period, offset in boundaries]
        self._at = {(source, number): at for at, (source, number) in enumerate(splits)}
        self._tops = np.full(len(self._at), Track.NEVER)
        self._idle = np.zeros(len(self._at), bool)
        self._value = Track.NEVER

    @property
    def value(self) -> int:
        """The watermark after everything that was said so far."""
        return self._value

    def track(self, record: EpochRecord) -> Track:
        """How an epoch moves it, from the steps in its record."""
        start = self._value
        return track_of(self.follow(record, _recorded), start)

    def follow(self, record: EpochRecord, steps_of: Callable[[Range, int], Steps]) -> list[Steps]:
        """Take an epoch. `steps_of` says how the largest time of a range rises, by sequence number;
        the range begins with the one it is given."""
        seq, steps = record.base, []
        if record.awake:
            self._idle[:] = False
        for r in record.ranges:
            if (r.source, r.split) in self._at:
                self._wake((r.source, r.split))
                steps.append(self.advance((r.source, r.split), *steps_of(r, seq)))
            seq += r.rows
        if record.idle:
            before = self._value
            self.let_go(*record.idle)
            # Behind the last row: only rows have a place in the order.
            steps.append(self._steps(np.array([seq - 1]), np.array([self._value]), before))
        if record.ended:
            steps.append(self.end(seq))
        return steps

    def advance(self, split: tuple[int, int], seqs: np.ndarray, times: np.ndarray) -> Steps:
        """Take the split's next rows, in order, or those at which its largest time may rise; give
        the steps at them that matter."""
        if seqs.size == 0:
            return _NO_STEPS
        at = self._wake(split)
        own = np.maximum(np.maximum.accumulate(times), self._tops[at])
        marks = np.maximum(np.minimum(own, self._held_at(but=at)), self._value)
        self._tops[at] = own[-1]
        before, self._value = self._value, int(marks[-1])
        return self._steps(seqs, marks, before)

    def let_go(self, *splits: tuple[int, int]) -> None:
        """These splits are idle: they hold nothing back until they have a row again."""
        self._idle[[self._at[split] for split in splits if split in self._at]] = True
        if not self._at:
            return
        # If all are idle, none holds it back: it is where the first of them is.
        held = int(self._tops.max()) if self._idle.all() else self._held_at()
        self._value = max(self._value, held)

    def end(self, seq: int) -> Steps:
        """The input has ended before `seq`, which no row has: everything closes there."""
        self._value = Track.END
        return np.array([seq], np.int64), np.array([Track.END], np.int64)

    def save(self) -> bytes:
        """All it knows, for the `restore` of another watermark."""
        splits = [
            (source, number, int(self._tops[at]), bool(self._idle[at]))
            for (source, number), at in self._at.items()
        ]
        return msgspec.msgpack.encode(_Saved(self._value, splits))

    def restore(self, saved: bytes) -> None:
        """Go on from where the one that was saved has come to. A split that it did not know, as the
        batch job over a history knows only one of each source, has shown no row yet."""
        known = msgspec.msgpack.decode(saved, type=_Saved)
        self._value = known.value
        for source, number, top, idle in known.splits:
            at = self._at.get((source, number))
            if at is not None:
                self._tops[at], self._idle[at] = top, idle

    def _steps(self, seqs: np.ndarray, marks: np.ndarray, before: int) -> Steps:
        moved = _moves(np.concatenate([[before], marks]), self.boundaries)
        return seqs[moved], marks[moved]

    def _wake(self, split: tuple[int, int]) -> int:
        at = self._at[split]
        self._idle[at] = False
        return at

    def _held_at(self, but: int | None = None) -> int:
        """Where the splits that count (leaving out one) hold the watermark."""
        counts = ~self._idle
        if but is not None:
            counts[but] = False
        return int(np.min(self._tops, where=counts, initial=Track.END))


def _recorded(r: Range, seq: int) -> Steps:
    rows, times = np.frombuffer(r.steps, np.int64).reshape(-1, 2).T
    return rows - r.start + seq, times


def block_steps(times: np.ndarray, first: int, boundaries: Boundaries) -> bytes:
    """The steps of a block of rows, of which the first has the offset `first`: that row, and those
    at which the largest time so far crosses a boundary. Packed as `core.records` has them.

    >>> packed = block_steps(np.array([3, 12, 11, 19, 25]), 100, [(10, 0)])
    >>> np.frombuffer(packed, np.int64).reshape(-1, 2).tolist()
    [[100, 3], [101, 12], [104, 25]]
    """
    line = np.maximum.accumulate(times)
    rows = np.append(0, 1 + np.flatnonzero(_moves(line, boundaries)))
    return np.column_stack([rows + first, line[rows]]).astype(np.int64).tobytes()


def _moves(line: np.ndarray, boundaries: Boundaries) -> np.ndarray:
    """For each but the first of some rising marks, whether it crosses a boundary."""
    moved = np.zeros(line.size - 1, bool)
    for period, offset in boundaries:
        cell = cells(line, period, offset)
        moved |= cell[1:] != cell[:-1]
    return moved


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
    if (
        DECODE_ERROR in batch.schema.names
        and batch.column(DECODE_ERROR).null_count < batch.num_rows
    ):
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
    fine = np.flatnonzero(batch.column(DECODE_ERROR).is_null().to_numpy(zero_copy_only=False))
    times = np.full(batch.num_rows, Track.NEVER)
    rest = batch.select([n for n in batch.schema.names if n != DECODE_ERROR])
    times[fine] = source_times(take(rest, fine), name, source)
    return times
