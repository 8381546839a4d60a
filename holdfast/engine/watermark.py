"""The watermark: the progress of event time, row by row, in the recorded input order.

Each split of a source with an event time has a largest time, up to and including the current row.
The watermark is the minimum of these over all splits, and it never decreases. Splits that are each
in order therefore have no late rows, however their reads interleave. A split without rows holds the
watermark at `Track.NEVER`; a split that is idle or has ended does not hold it. If all splits are
idle, the watermark is the maximum of their largest times.

A source announces a block of rows with the *steps* of the block's largest time, reduced to those
that some event-time operator can notice. The steps become part of the epoch record, so the
watermark is a function of the records. The tracks that this module returns are reduced in the same
way and stay short for any number of rows. The batch job and the ingress both use this module.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.core.records import EpochRecord, Range
from holdfast.engine.batches import DECODE_ERROR, Track, row_values, take
from holdfast.engine.state_rows import Field
from holdfast.errors import InputError

Steps = tuple[np.ndarray, np.ndarray]
"""Sequence numbers, and the watermark from each of these rows on."""

Boundaries = Sequence[tuple[int, int]]
"""(period, offset) of each series of watermarks at which some operator acts."""

_NO_STEPS: Steps = (np.empty(0, np.int64), np.empty(0, np.int64))


class _SavedWatermark(msgspec.Struct):
    """A watermark in a hand-over or a checkpoint."""

    value: int
    splits: list[tuple[int, int, int, bool]]
    """Source, number, largest time, and whether the split is idle."""


class Watermark:
    """The watermark over ranges of rows. Each range belongs to one split and is in order.

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
        """The current watermark."""
        return self._value

    def track(self, record: EpochRecord) -> Track:
        """Advance by an epoch, using the steps in its record, and return the epoch's track."""
        start = self._value
        return track_of(self.follow(record, _recorded), start)

    def follow(self, record: EpochRecord, steps_of: Callable[[Range, int], Steps]) -> list[Steps]:
        """Advance by an epoch and return its steps. `steps_of` returns the steps of a range's
        largest time, given the range and its first sequence number."""
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
            self.mark_idle(*record.idle)
            # The step is at the last row, because only rows have sequence numbers.
            steps.append(self._steps(np.array([seq - 1]), np.array([self._value]), before))
        if record.ended:
            steps.append(self.end(seq))
        return steps

    def advance(self, split: tuple[int, int], seqs: np.ndarray, times: np.ndarray) -> Steps:
        """Advance by the split's next rows, in order, or by those at which its largest time may
        rise. Return the steps that cross a boundary."""
        if seqs.size == 0:
            return _NO_STEPS
        at = self._wake(split)
        own = np.maximum(np.maximum.accumulate(times), self._tops[at])
        marks = np.maximum(np.minimum(own, self._held_at(but=at)), self._value)
        self._tops[at] = own[-1]
        before, self._value = self._value, int(marks[-1])
        return self._steps(seqs, marks, before)

    def mark_idle(self, *splits: tuple[int, int]) -> None:
        """Mark splits as idle: they do not hold the watermark until their next row."""
        self._idle[[self._at[split] for split in splits if split in self._at]] = True
        if not self._at:
            return
        # If all are idle, none holds the watermark: it is the largest time of all splits.
        held = int(self._tops.max()) if self._idle.all() else self._held_at()
        self._value = max(self._value, held)

    def end(self, seq: int) -> Steps:
        """End the input before `seq`, which no row has: all windows close there."""
        self._value = Track.END
        return np.array([seq], np.int64), np.array([Track.END], np.int64)

    def save(self) -> bytes:
        """Encode the watermark, for the `restore` of another one."""
        splits = [
            (source, number, int(self._tops[at]), bool(self._idle[at]))
            for (source, number), at in self._at.items()
        ]
        return msgspec.msgpack.encode(_SavedWatermark(self._value, splits))

    def restore(self, saved: bytes) -> None:
        """Continue from a saved watermark. A split that it does not contain counts as a split
        without rows: the batch job over a history has only one split per source."""
        known = msgspec.msgpack.decode(saved, type=_SavedWatermark)
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
        """Return the smallest largest time of the splits that are not idle, except `but`."""
        counts = ~self._idle
        if but is not None:
            counts[but] = False
        return int(np.min(self._tops, where=counts, initial=Track.END))


def _recorded(r: Range, seq: int) -> Steps:
    rows, times = np.frombuffer(r.steps, np.int64).reshape(-1, 2).T
    return rows - r.start + seq, times


def block_steps(times: np.ndarray, first: int, boundaries: Boundaries) -> bytes:
    """Return the steps of a block of rows that begins at the offset `first`: its first row, and the
    rows at which the largest time crosses a boundary. They are packed as in `core.records`.

    >>> packed = block_steps(np.array([3, 12, 11, 19, 25]), 100, [(10, 0)])
    >>> np.frombuffer(packed, np.int64).reshape(-1, 2).tolist()
    [[100, 3], [101, 12], [104, 25]]
    """
    line = np.maximum.accumulate(times)
    rows = np.append(0, 1 + np.flatnonzero(_moves(line, boundaries)))
    return np.column_stack([rows + first, line[rows]]).astype(np.int64).tobytes()


def _moves(line: np.ndarray, boundaries: Boundaries) -> np.ndarray:
    """Return for each of these rising marks, except the first, whether it crosses a boundary."""
    moved = np.zeros(line.size - 1, bool)
    for period, offset in boundaries:
        cell = cells(line, period, offset)
        moved |= cell[1:] != cell[:-1]
    return moved


def cells(marks: np.ndarray, period: int, offset: int) -> np.ndarray:
    """Return ``floor((marks - offset) / period)`` without overflow, if the offset is below the
    period."""
    quotient, rest = np.divmod(marks, period)
    return quotient - (rest < offset)


def track_of(steps: Sequence[Steps], start: int = Track.NEVER) -> Track:
    """Return the track that begins at the mark `start` and has the rising ones of these steps."""
    seqs = np.concatenate([np.array([Track.START]), *(s for s, _ in steps)])
    marks = np.concatenate([np.array([start]), *(m for _, m in steps)])
    up = np.append(True, marks[1:] > np.maximum.accumulate(marks)[:-1])
    return Track(seqs[up], marks[up])


REACH_MAX = 1 << 57
"""Maximum event time that an operator may span, and that its results may trail the watermark."""
_ROOM = 1 << 59
"""Minimum distance of a source's event times from the ends of int64. `Track.NEVER` and `Track.END`
are at these ends, and adding durations to times close to them would overflow. Times that operators
compute, and ends of windows, are closer by at most `REACH_MAX`."""


def event_times(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """Return the event time of every row, in the unit of its column."""
    array = batch.column(name)
    if array.null_count:
        raise ValueError(f"the event time {name!r} is null")
    return Field(array.type).stored(array).astype(np.int64, copy=False)


def operator_times(batch: pa.RecordBatch, name: str) -> np.ndarray:
    """Return the event times of an operator's input, which a step may have computed."""
    times = event_times(batch, name)
    at = _first_beyond(times, (Track.END - _ROOM // 2) // _finest(batch.schema.field(name).type))
    if at is not None:
        raise ValueError(f"the event time {name!r} is {times[at]}, too close to the ends of int64")
    return times


def reach_max(kind: pa.DataType) -> int:
    """Return `REACH_MAX` for event times of this type."""
    return REACH_MAX // _finest(kind)


def _finest(kind: pa.DataType) -> int:
    """Return the subdivision of a unit: seconds are also counted in milliseconds."""
    return 1000 if pa.types.is_timestamp(kind) and kind.unit == "s" else 1


def _first_beyond(times: np.ndarray, limit: int) -> int | None:
    if times.size == 0 or (times.min() >= -limit and times.max() <= limit):
        return None
    return int(np.flatnonzero((times < -limit) | (times > limit))[0])


def source_times(batch: pa.RecordBatch, name: str, source: str) -> np.ndarray:
    """Return the event times of a source's rows; raise an `InputError` for a row without one."""
    if (
        DECODE_ERROR in batch.schema.names
        and batch.column(DECODE_ERROR).null_count < batch.num_rows
    ):
        return _decoded_times(batch, name, source)
    array = batch.column(name)
    if array.null_count:
        row = row_values(batch, array.is_null().index(True).as_py())
        raise InputError(f"source {source!r}: the event time {name!r} is null\n  row: {row}")
    times = event_times(batch, name)
    limit = (Track.END - _ROOM) // _finest(array.type)
    at = _first_beyond(times, limit)
    if at is not None:
        raise InputError(
            f"source {source!r}: the event time {name!r} is {times[at]}, which is too close to the "
            f"ends of int64\n  row: {row_values(batch, at)}",
            hint=f"use times between {-limit} and {limit}; remove other rows before the source",
        )
    return times


def _decoded_times(batch: pa.RecordBatch, name: str, source: str) -> np.ndarray:
    """Like `source_times`; rows with a decode error get `Track.NEVER`, which moves no watermark."""
    valid = np.flatnonzero(batch.column(DECODE_ERROR).is_null().to_numpy(zero_copy_only=False))
    times = np.full(batch.num_rows, Track.NEVER)
    rest = batch.select([n for n in batch.schema.names if n != DECODE_ERROR])
    times[valid] = source_times(take(rest, valid), name, source)
    return times
