"""The sequencer: the only component that decides the input order.

Ingresses announce the blocks of rows that they hold, and sinks report which epochs they have
delivered. The sequencer cuts an epoch as soon as there are rows and room in flight. So an idle
stream has tiny epochs and millisecond latency, and a saturated one, whose blocks pile up while the
budget is used, has large ones.

If rows have event times, it takes the oldest first: splits that are read from long ago advance side
by side, and windows over them close. A split that is far ahead of the others is only delayed.

Its replicas form a chain: the first one cuts, each passes the record on to the next, and the last
one publishes it. So every record that a site acts on is on all replicas, and after the death of any
replica the next one knows everything that was ever published. Ingresses announce blocks that the
first replica has not cut again to its successor.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import assert_never

from holdfast.core.effects import (
    ConfirmChain,
    CopySequencer,
    PassRecord,
    PublishRecord,
    SequencerEffect,
)
from holdfast.core.events import (
    BlocksAvailable,
    ChainJoined,
    DrainRequested,
    EpochDelivered,
    PauseRequested,
    RecordPassed,
    SequencerCopied,
    SequencerEvent,
    SplitQuiet,
    SuccessorConnected,
    ViewCommitted,
)
from holdfast.core.ids import NO_EPOCH, Epoch, SiteId, StageId
from holdfast.core.messages import SequencerState
from holdfast.core.records import Block, EpochRecord, Range, SplitKey
from holdfast.errors import FlowError, ProtocolError, require

RESENT = 64
"""How many of the latest records are sent again when the chain changes: more than can be in
flight."""
STEPS_MAX = 16_384
"""The most steps of event time that an epoch has, because its record goes to every site."""
PASSED_OVER_MAX = 64
"""A split whose rows have waited for this many epochs goes first, whatever its event time."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How much may be in flight between sources and sinks."""

    epoch_rows_max: int = 262_144
    """Maximum rows of an epoch."""
    epochs_in_flight_max: int = 6
    """Maximum epochs that were cut and that not all sinks have delivered yet."""
    bytes_in_flight_max: int = 64 << 20
    """Maximum bytes of these epochs."""
    small_in_flight_max: int = 1
    """An epoch that is less than half full waits while this many are in flight: it would only queue
    behind them, and fills up in the meantime."""

    def __post_init__(self) -> None:
        if self.epoch_rows_max < 1:
            raise FlowError(f"epoch_rows_max must be at least 1, not {self.epoch_rows_max}")
        if not 1 <= self.epochs_in_flight_max < RESENT:
            raise FlowError(
                f"epochs_in_flight_max must be at least 1 and less than {RESENT}, "
                f"not {self.epochs_in_flight_max}"
            )


@dataclass(slots=True)
class _Split:
    """What is known of a split: the rows that wait, and how far it is cut."""

    blocks: deque[Block] = field(default_factory=deque)
    cut: int = 0
    """The rows before this offset are in epochs."""
    next_offset: int = 0
    """The rows before this offset were announced."""
    rows_waiting: int = 0
    idle_at: int | None = None
    """The offset after which an ingress has read no rows for a while."""
    end: int | None = None
    """The offset of its end. The ingress that reported it may be gone, and its successor may have
    read less."""
    timed: bool = False
    """Whether rows with event times were announced."""
    idle_recorded: bool = False
    """Whether a record says that it is idle, and no record since has rows of it."""
    passed_over: int = 0
    """How many epochs were cut while its rows waited."""

    def age(self, key: SplitKey) -> tuple[bool, float, SplitKey]:
        """Sorts splits with event times: the one to cut first is the smallest."""
        time = self.blocks[0].time_first
        return self.passed_over < PASSED_OVER_MAX, -math.inf if time is None else time, key

    @property
    def ended(self) -> bool:
        """Whether all its rows are in epochs."""
        return self._is_cut_to(self.end)

    @property
    def is_quiet(self) -> bool:
        """Whether it has ended or is idle, and all its rows are in epochs."""
        return self.ended or self._is_cut_to(self.idle_at)

    def _is_cut_to(self, offset: int | None) -> bool:
        """Whether the rows before this offset were announced, and no rows wait."""
        return offset is not None and self.next_offset >= offset and not self.blocks

    def add(self, block: Block) -> None:
        """Add a block; rows of it that were announced before do not count."""
        if block.end <= self.next_offset:
            return
        if block.start < self.next_offset:
            block = block.cut(self.next_offset)[1]
        self.next_offset = block.end
        self.blocks.append(block)
        self.rows_waiting += block.rows
        self.timed = self.timed or bool(block.steps)
        self.idle_at = None

    def take(self, rows_max: int, steps_max: int) -> Block:
        """Remove the oldest block, or as much of it as an epoch has room for."""
        block = self.blocks.popleft()
        end = min(block.end, block.start + rows_max)
        if block.steps_count > steps_max:
            end = min(end, block.row_of_step(steps_max))
        if end < block.end:
            block, rest = block.cut(end)
            self.blocks.appendleft(rest)
        self.rows_waiting -= block.rows
        self.passed_over = 0
        return block

    def trim(self) -> None:
        """Drop announced rows that are in epochs."""
        waiting, self.blocks, self.next_offset = self.blocks, deque(), self.cut
        self.rows_waiting = 0
        for block in waiting:
            self.add(block)


class Sequencer:
    """The machine. `splits` are all (source, split) pairs, `sinks` all sink stages. The flow begins
    after the epoch `begun`, with sequence number `seq` and at the offsets `cuts` of the splits.
    `known` are the records of later epochs that were cut before the flow was lost: sites may have
    acted on them, so they come first, unchanged.

    It begins as a follower that knows nothing, unless it is in the chain of the first view.
    """

    def __init__(
        self,
        site: SiteId,
        splits: Iterable[tuple[StageId, int]],
        sinks: Iterable[StageId],
        budget: Budget,
        begun: Epoch = NO_EPOCH,
        seq: int = 0,
        cuts: Mapping[tuple[StageId, int], int] | None = None,
        known: Iterable[EpochRecord] = (),
    ) -> None:
        self.site, self.budget = site, budget
        self.splits = {key: _Split() for key in sorted(splits)}
        for key, offset in (cuts or {}).items():
            self.splits[key].cut = self.splits[key].next_offset = offset
        self.delivered: dict[StageId, Epoch] = dict.fromkeys(sinks, begun)
        self.next_epoch = Epoch(begun + 1)
        self.next_seq = seq
        self.finished = False
        self.leads = False
        self.successor: SiteId | None = None
        self.history: deque[EpochRecord] = deque(maxlen=RESENT)
        self._draining = self._paused = False
        self._chain: tuple[SiteId, ...] = ()
        self._joining: tuple[SiteId, ...] = ()
        self._in_flight: dict[Epoch, int] = {}
        self._turn = 0
        self._known = deque(known)
        self._resumed_at = Epoch(begun + 1 + len(self._known)) if begun != NO_EPOCH else NO_EPOCH
        """The first epoch that has no record yet, if the flow was stopped or lost before."""

    def handle(self, event: SequencerEvent) -> list[SequencerEffect]:
        match event:
            case ViewCommitted():
                return self._on_view_committed(event)
            case RecordPassed():
                return self._on_record_passed(event)
            case ChainJoined():
                return self._on_chain_joined(event)
            case SuccessorConnected():
                return self._pass_all() if event.site == self.successor else []
            case SequencerCopied():
                self._restore(event.state)
                return []
            case BlocksAvailable():
                self._on_blocks_available(event)
            case SplitQuiet():
                self._on_split_quiet(event)
            case EpochDelivered():
                self._on_epoch_delivered(event)
            case DrainRequested():
                self._draining = True
            case PauseRequested():
                self._paused = event.paused
            case _:
                assert_never(event)
        return self._cut_all()

    # --- the chain ------------------------------------------------------------------------------

    def _on_view_committed(self, event: ViewCommitted) -> list[SequencerEffect]:
        chain = event.view.sequencers
        if self.site not in chain:
            return []
        at = chain.index(self.site)
        if at == 0 and not self.leads:
            self._lead()
        known = (self._chain, self.successor)
        self._chain, self._joining = chain, event.view.groups[0][0].joining
        joined = self.successor if self.successor in self._joining else None
        self.successor = chain[at + 1] if at + 1 < len(chain) else joined
        if (self._chain, self.successor) == known:
            return self._cut_all()
        # The replica that should have passed these on or published them may have died before.
        return self._pass_all() + self._cut_all()

    def _pass_all(self) -> list[SequencerEffect]:
        return [e for record in self.history for e in self._pass_on(record)]

    def _lead(self) -> None:
        """Cut from now on. Ingresses may have announced their blocks again already, and the last
        records may have arrived after that: drop what these have."""
        self.leads = True
        everywhere = min(self.delivered.values(), default=NO_EPOCH)
        self._in_flight = {r.epoch: 0 for r in self.history if r.epoch > everywhere}
        for split in self.splits.values():
            split.trim()

    def _on_chain_joined(self, event: ChainJoined) -> list[SequencerEffect]:
        if event.site not in self._joining:
            return []  # of a replica that was given up
        oldest = self.history[0].epoch if self.history else self.next_epoch
        if event.has < oldest:
            return [CopySequencer(event.site, self._state())]
        self.successor = event.site
        return [*self._pass_all(), ConfirmChain(event.site)]

    def _on_record_passed(self, event: RecordPassed) -> list[SequencerEffect]:
        record = event.record
        if self.leads:
            return []  # from the last leader, which does not know yet that it was replaced
        if record.epoch > self.next_epoch:
            raise ProtocolError(f"record of epoch {record.epoch}, not {self.next_epoch}")
        if record.epoch == self.next_epoch:
            self._note(record)
        return self._pass_on(record)

    def _pass_on(self, record: EpochRecord) -> list[SequencerEffect]:
        if self.successor is None:
            return [PublishRecord(record)]
        return [PassRecord(self.successor, record)]

    def _note(self, record: EpochRecord) -> None:
        """The record is part of the order from now on."""
        self.history.append(record)
        self.next_epoch = Epoch(record.epoch + 1)
        self.next_seq = record.base + record.rows
        self.finished = record.last
        for r in record.ranges:
            split = self.splits[r.source, r.split]
            split.cut = r.end
            split.next_offset = max(split.next_offset, r.end)
            split.idle_recorded = False
        if record.awake:
            for split in self.splits.values():
                split.idle_recorded = False
        for key in record.idle:
            self.splits[key].idle_recorded = True
        self._forget_known()

    def _forget_known(self) -> None:
        while self._known and self._known[0].epoch < self.next_epoch:
            self._known.popleft()

    def _state(self) -> SequencerState:
        return SequencerState(
            self.next_epoch,
            self.next_seq,
            self.finished,
            self._turn,
            tuple(s.cut for s in self.splits.values()),
            tuple(s.idle_recorded for s in self.splits.values()),
            tuple(self.history),
        )

    def _restore(self, state: SequencerState) -> None:
        self.next_epoch, self.next_seq = state.next_epoch, state.next_seq
        self.finished, self._turn = state.finished, state.turn
        for split, cut, idle in zip(self.splits.values(), state.cuts, state.idle, strict=True):
            split.cut = split.next_offset = cut
            split.idle_recorded = idle
        self.history = deque(state.history, maxlen=RESENT)
        self._forget_known()

    # --- cutting --------------------------------------------------------------------------------

    def _split(self, source: StageId, split: int) -> _Split:
        found = self.splits.get((source, split))
        if found is None:
            raise ProtocolError(f"there is no split {split} of source {source}")
        return found

    def _on_split_quiet(self, event: SplitQuiet) -> None:
        split = self._split(event.source, event.split)
        if event.ended:
            split.end = event.offset
        else:
            split.idle_at = event.offset

    def _on_blocks_available(self, event: BlocksAvailable) -> None:
        split = self._split(event.source, event.split)
        if event.again:
            split.blocks.clear()
            split.next_offset, split.rows_waiting = split.cut, 0
        for block in event.blocks:
            if block.rows <= 0 or block.start > split.next_offset:
                raise ProtocolError(
                    f"source {event.source}, split {event.split}: block [{block.start}, "
                    f"{block.end}) does not follow offset {split.next_offset}"
                )
            split.add(block)

    def _on_epoch_delivered(self, event: EpochDelivered) -> None:
        if event.sink not in self.delivered:
            raise ProtocolError(f"there is no sink {event.sink}")
        if self.leads and event.epoch >= self.next_epoch:
            raise ProtocolError(f"epoch {event.epoch} was delivered before it was cut")
        self.delivered[event.sink] = max(self.delivered[event.sink], event.epoch)
        everywhere = min(self.delivered.values())
        for epoch in [e for e in self._in_flight if e <= everywhere]:
            del self._in_flight[epoch]

    def _cut_all(self) -> list[SequencerEffect]:
        effects: list[SequencerEffect] = []
        while (record := self._cut()) is not None:
            effects += self._pass_on(record)
        return effects

    def _cut(self) -> EpochRecord | None:
        if not self.leads or self._paused or self.finished:
            return None
        if self._known and self._has_room():
            return self._cut_again(self._known[0])
        if self._known or not self._has_room() or self._better_wait():
            return None
        ranges, nbytes = ([], 0) if self._draining else self._take_blocks()
        exhausted = all(s.ended for s in self.splits.values())
        idle = self._newly_quiet({(r.source, r.split) for r in ranges})
        if not (ranges or exhausted or self._draining or self._needs_empty_epoch(idle)):
            return None
        record = EpochRecord(
            self.next_epoch,
            self.next_seq,
            tuple(ranges),
            idle,
            last=exhausted or self._draining,
            ended=exhausted,
            awake=self.next_epoch == self._resumed_at,
        )
        self._in_flight[record.epoch] = nbytes
        self._note(record)
        return record

    def _newly_quiet(self, taken: set[SplitKey]) -> tuple[SplitKey, ...]:
        """The splits that an epoch declares idle which has rows of the splits `taken`."""
        quiet = [(key, split) for key, split in self.splits.items() if split.is_quiet]
        return tuple(key for key, split in quiet if key in taken or not split.idle_recorded)

    def _needs_empty_epoch(self, idle: tuple[SplitKey, ...]) -> bool:
        """Whether to cut an epoch without rows only to declare these splits idle: windows may wait
        for them alone, and no row may come for long. Not while epochs are in flight: another one
        with rows may follow them."""
        return bool(idle) and not self._in_flight and any(s.timed for s in self.splits.values())

    def _cut_again(self, record: EpochRecord) -> EpochRecord:
        """Cut an epoch as it was before the flow was lost. Ingresses announce rows of it again,
        before or after this; those count as cut."""
        self._in_flight[record.epoch] = 0
        self._note(record)
        for split in self.splits.values():
            split.trim()
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
        """Take blocks until the epoch is full, in turns of the splits that have any; return them in
        row order. The turns of splits with event times go to the one with the oldest rows."""
        keys = list(self.splits)
        rotated = keys[self._turn :] + keys[: self._turn]
        self._turn = (self._turn + 1) % len(keys)
        waiting = [key for key in rotated if self.splits[key].blocks]
        oldest = [self.splits[k].age(k) for k in waiting if self.splits[k].blocks[0].steps]
        heapq.heapify(oldest)
        turns = deque(None if self.splits[k].blocks[0].steps else k for k in waiting)
        taken: dict[SplitKey, list[Block]] = {}
        rows = nbytes = steps = 0
        while turns and rows < self.budget.epoch_rows_max and steps < STEPS_MAX:
            turn = turns.popleft()
            key = heapq.heappop(oldest)[-1] if turn is None else turn
            split = self.splits[key]
            block = split.take(self.budget.epoch_rows_max - rows, STEPS_MAX - steps)
            taken.setdefault(key, []).append(block)
            rows, nbytes = rows + block.rows, nbytes + block.nbytes
            steps += block.steps_count
            if split.blocks:
                turns.append(turn)
                if turn is None:
                    heapq.heappush(oldest, split.age(key))
        for key in waiting:
            if key not in taken:
                self.splits[key].passed_over += 1
        ranges = [
            Range(source, split, b.start, b.end, b.steps)
            for (source, split), blocks in sorted(taken.items())
            for b in blocks
        ]
        return _joined(ranges), nbytes

    def check_invariants(self) -> None:
        if self.leads:
            require(
                len(self._in_flight) <= max(RESENT, self.budget.epochs_in_flight_max),
                "more epochs than the budget",
            )


def _joined(ranges: list[Range]) -> list[Range]:
    """The ranges, with neighbouring blocks of one split as one range."""
    joined: list[Range] = []
    for r in ranges:
        if joined and (joined[-1].source, joined[-1].split) == (r.source, r.split):
            before = joined.pop()
            r = Range(r.source, r.split, before.start, r.end, before.steps + r.steps)
        joined.append(r)
    return joined
