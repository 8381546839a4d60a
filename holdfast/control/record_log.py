"""The last epoch records of a flow, packed.

A record names every split that has rows in its epoch. As objects, 100,000 records of 200 splits
take gigabytes. Here a range of rows is two or three small numbers: how far it begins from where the
last range of its split ended, how many rows it has, and how far the event time has moved. Records
are packed in groups, each of which can be read by itself, and the oldest groups are dropped.
"""

from __future__ import annotations

import zlib
from collections import deque
from typing import NamedTuple

import msgspec

from holdfast.core.ids import Epoch, StageId
from holdfast.core.records import EpochRecord, Range, SplitKey, pack_step

RECORDS_MAX = 100_000
"""How many of the last records are kept."""
BYTES_MAX = 64 << 20
"""How many bytes they may take, packed. The last ones are kept if that is not enough for all."""
GROUP = 64
"""How many records are packed together."""

_Packed = tuple[int, int, list[int], list[int], int]
"""Epoch, first row, ranges, idle splits, and flags."""


class _Group(NamedTuple):
    records: int
    data: bytes


class RecordLog:
    """Records with one step of event time for each range, as `EpochRecord.summary` has them."""

    def __init__(self, records_max: int = RECORDS_MAX, bytes_max: int = BYTES_MAX) -> None:
        self._records_max, self._bytes_max = records_max, bytes_max
        self._groups: deque[_Group] = deque()
        self._packed_upto = -1
        self._latest: dict[int, EpochRecord] = {}
        """Records that are not packed yet, by epoch."""
        self.last: EpochRecord | None = None
        """The record of the latest epoch."""
        self._packed_bytes = self._packed_records = 0

    def add(self, record: EpochRecord) -> None:
        """Add a record. An epoch that is known changes nothing: sequencers may repeat it."""
        if record.epoch <= self._packed_upto:
            return
        record = record.summary()
        self._latest[record.epoch] = record
        if self.last is None or record.epoch >= self.last.epoch:
            self.last = record
        if len(self._latest) >= 2 * GROUP:
            self._pack(sorted(self._latest)[:GROUP])

    def _pack(self, epochs: list[int]) -> None:
        data = packed([self._latest.pop(epoch) for epoch in epochs])
        self._groups.append(_Group(len(epochs), data))
        self._packed_upto = epochs[-1]
        self._packed_bytes += len(data)
        self._packed_records += len(epochs)
        while self._groups and self._is_too_much(self._groups[0]):
            oldest = self._groups.popleft()
            self._packed_bytes -= len(oldest.data)
            self._packed_records -= oldest.records

    def _is_too_much(self, oldest: _Group) -> bool:
        left = self._packed_records + len(self._latest) - oldest.records
        return left >= self._records_max or self._packed_bytes > self._bytes_max

    def all(self) -> list[EpochRecord]:
        """The records in the order of their epochs."""
        found = [record for group in self._groups for record in unpacked(group.data)]
        found += [self._latest[epoch] for epoch in sorted(self._latest)]
        return found[-self._records_max :]

    @property
    def nbytes(self) -> int:
        """The size of the packed records."""
        return self._packed_bytes


def packed(records: list[EpochRecord]) -> bytes:
    """Encode records so that `unpacked` returns them. Their ranges have one step at most."""
    ends: dict[SplitKey, int] = {}
    times: dict[SplitKey, int] = {}
    return zlib.compress(msgspec.msgpack.encode([_pack(r, ends, times) for r in records]), 1)


def _pack(record: EpochRecord, ends: dict[SplitKey, int], times: dict[SplitKey, int]) -> _Packed:
    ranges: list[int] = []
    for part in record.ranges:
        split, time = (part.source, part.split), part.time_max
        ranges += (*split, part.start - ends.get(split, 0), part.rows)
        ends[split] = part.end
        if time is None:
            ranges.append(0)
        else:
            ranges += (1, time - times.get(split, 0))
            times[split] = time
    idle = [number for split in record.idle for number in split]
    flags = record.last + 2 * record.ended + 4 * record.awake
    return record.epoch, record.base, ranges, idle, flags


def unpacked(data: bytes) -> list[EpochRecord]:
    ends: dict[SplitKey, int] = {}
    times: dict[SplitKey, int] = {}
    records = msgspec.msgpack.decode(zlib.decompress(data), type=list[_Packed])
    return [_unpack(record, ends, times) for record in records]


def _unpack(values: _Packed, ends: dict[SplitKey, int], times: dict[SplitKey, int]) -> EpochRecord:
    epoch, base, numbers, idle, flags = values
    ranges, rest = [], iter(numbers)
    for source in rest:
        split = (StageId(source), next(rest))
        start = ends.get(split, 0) + next(rest)
        ends[split] = start + next(rest)
        steps = b""
        if next(rest):
            times[split] = times.get(split, 0) + next(rest)
            steps = pack_step(start, times[split])
        ranges.append(Range(*split, start, ends[split], steps))
    splits = tuple((StageId(s), n) for s, n in zip(idle[::2], idle[1::2], strict=True))
    last, ended, awake = (bool(flags & bit) for bit in (1, 2, 4))
    return EpochRecord(Epoch(epoch), base, tuple(ranges), splits, last, ended, awake)
