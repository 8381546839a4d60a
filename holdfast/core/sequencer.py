"""The sequencer: decides the input order, and nothing else does.

It hears which blocks of rows the ingresses have in hand and how far the sinks have got, and cuts
epochs. An epoch is cut as soon as there is something to cut and room for it in flight. So an idle
stream has tiny epochs and millisecond latency, and a saturated one, whose blocks pile up while
the budget is used, has large ones.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import assert_never

from holdfast.core.effects import PublishRecord
from holdfast.core.events import (
    BlocksAvailable,
    DrainRequested,
    EpochDelivered,
    SequencerEvent,
    SplitEnded,
    SplitIdle,
)
from holdfast.core.ids import NO_EPOCH, Epoch, StageId
from holdfast.core.records import Block, EpochRecord, Range
from holdfast.errors import ProtocolError, require


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be on its way from the sources to the sinks."""

    epoch_rows_max: int = 262_144
    epochs_in_flight_max: int = 6
    bytes_in_flight_max: int = 64 << 20
    small_in_flight_max: int = 1
    """An epoch that is less than half full waits until fewer than so many are in flight: it would
    only queue behind them, and fills up in the meantime."""


@dataclass(slots=True)
class _Split:
    blocks: deque[Block] = field(default_factory=deque)
    next_offset: int = 0
    rows_waiting: int = 0
    idle: bool = False
    ended: bool = False


class Sequencer:
    """The machine. `splits` are all (source, split) pairs, `sinks` all sink stages."""

    def __init__(
        self, splits: Iterable[tuple[StageId, int]], sinks: Iterable[StageId], budget: Budget
    ) -> None:
        self.budget = budget
        self.splits = {key: _Split() for key in sorted(splits)}
        self.delivered: dict[StageId, Epoch] = dict.fromkeys(sinks, NO_EPOCH)
        self.next_epoch = Epoch(0)
        self.next_seq = 0
        self.finished = False
        self._draining = False
        self._in_flight: dict[Epoch, int] = {}
        self._turn = 0

    def handle(self, event: SequencerEvent) -> list[PublishRecord]:
        match event:
            case BlocksAvailable():
                self._on_blocks_available(event)
            case SplitIdle():
                self._split(event.source, event.split).idle = True
            case SplitEnded():
                self._split(event.source, event.split).ended = True
            case EpochDelivered():
                self._on_epoch_delivered(event)
            case DrainRequested():
                self._draining = True
            case _:
                assert_never(event)
        return self._cut_all()

    def _split(self, source: StageId, split: int) -> _Split:
        found = self.splits.get((source, split))
        if found is None:
            raise ProtocolError(f"there is no split {split} of source {source}")
        return found

    def _on_blocks_available(self, event: BlocksAvailable) -> None:
        split = self._split(event.source, event.split)
        for block in event.blocks:
            if block.start != split.next_offset or block.rows <= 0:
                raise ProtocolError(
                    f"source {event.source}, split {event.split}: block [{block.start}, "
                    f"{block.end}) does not follow offset {split.next_offset}"
                )
            split.next_offset = block.end
            split.blocks.append(block)
            split.rows_waiting += block.rows
            split.idle = False

    def _on_epoch_delivered(self, event: EpochDelivered) -> None:
        self.delivered[event.sink] = max(self.delivered[event.sink], event.epoch)
        everywhere = min(self.delivered.values())
        for epoch in [e for e in self._in_flight if e <= everywhere]:
            del self._in_flight[epoch]

    def _cut_all(self) -> list[PublishRecord]:
        effects: list[PublishRecord] = []
        while (record := self._cut()) is not None:
            effects.append(PublishRecord(record))
        return effects

    def _cut(self) -> EpochRecord | None:
        if self.finished or not self._has_room() or self._better_wait():
            return None
        ranges, nbytes = ([], 0) if self._draining else self._take_blocks()
        exhausted = all(s.ended and not s.blocks for s in self.splits.values())
        if not ranges and not exhausted and not self._draining:
            return None
        record = EpochRecord(
            self.next_epoch,
            self.next_seq,
            tuple(ranges),
            self._idle_sources(),
            last=exhausted or self._draining,
            ended=exhausted,
        )
        self.finished = record.last
        self._in_flight[record.epoch] = nbytes
        self.next_epoch = Epoch(self.next_epoch + 1)
        self.next_seq += record.rows
        return record

    def _has_room(self) -> bool:
        return (
            len(self._in_flight) < self.budget.epochs_in_flight_max
            and sum(self._in_flight.values()) < self.budget.bytes_in_flight_max
        )

    def _better_wait(self) -> bool:
        if len(self._in_flight) < self.budget.small_in_flight_max:
            return False
        return 2 * sum(s.rows_waiting for s in self.splits.values()) < self.budget.epoch_rows_max

    def _take_blocks(self) -> tuple[list[Range], int]:
        """Whole blocks, a turn for each split, until the epoch is full; then in row order."""
        taken: dict[tuple[StageId, int], list[Block]] = {}
        rows = nbytes = 0
        keys = list(self.splits)
        waiting = deque(keys[self._turn :] + keys[: self._turn])
        while waiting and rows < self.budget.epoch_rows_max:
            key = waiting.popleft()
            blocks = self.splits[key].blocks
            if blocks:
                block = blocks.popleft()
                self.splits[key].rows_waiting -= block.rows
                taken.setdefault(key, []).append(block)
                rows, nbytes = rows + block.rows, nbytes + block.nbytes
                waiting.append(key)
        self._turn = (self._turn + 1) % len(keys)
        ranges = [
            Range(source, split, b.start, b.end, b.time_max)
            for (source, split), blocks in sorted(taken.items())
            for b in blocks
        ]
        return _joined(ranges), nbytes

    def _idle_sources(self) -> tuple[StageId, ...]:
        """Sources all of whose splits are idle or have ended, and have nothing waiting."""
        sources = sorted({source for source, _ in self.splits})
        quiet = {
            s: all(
                (v.idle or v.ended) and not v.blocks for k, v in self.splits.items() if k[0] == s
            )
            for s in sources
        }
        return tuple(s for s in sources if quiet[s])

    def check_invariants(self) -> None:
        require(
            len(self._in_flight) <= self.budget.epochs_in_flight_max, "more epochs than the budget"
        )


def _joined(ranges: list[Range]) -> list[Range]:
    """Neighbouring blocks of one split as one range."""
    joined: list[Range] = []
    for r in ranges:
        if joined and (joined[-1].source, joined[-1].split) == (r.source, r.split):
            before = joined.pop()
            times = [t for t in (before.time_max, r.time_max) if t is not None]
            r = Range(r.source, r.split, before.start, r.end, max(times, default=None))
        joined.append(r)
    return joined
