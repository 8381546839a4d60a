"""Handing a task over to a new replica: the donor's side and the joiner's.

The donor freezes its operator's tables and gives them out a part at a time, between its orders;
it never stands still for longer than one part takes. The joiner puts the parts in as they come.

A standby gets its state in the same way, again and again, and only what has changed:
a checkpoint. It is put in when it is complete; until then the one before counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from holdfast.core.effects import HandOver
from holdfast.core.events import ReplicaInstalled
from holdfast.core.exchange import Kept
from holdfast.core.ids import Epoch, ExchangeId, GroupId, TaskId
from holdfast.core.upstream import Gap
from holdfast.engine.batches import to_ipc
from holdfast.errors import HoldfastError, ProtocolError
from holdfast.net import bundles, wire
from holdfast.plan.planner import Plan
from holdfast.site.spill import Overflow
from holdfast.site.stages import TaskRunner

Part = tuple[wire.Message, list[Any] | None]

PART_BYTES = 1 << 18
HELD_BYTES_MAX = 64 << 20
"""So much of the held rows that are handed over comes to be in memory, and the rest on disk."""


class Outgoing:
    """A task's state on its way to a new replica; `next` gives the parts."""

    def __init__(self, order: HandOver, runner: TaskRunner) -> None:
        self.task, self.joiner = order.task, order.joiner
        keeper = runner.keeper
        self._snapshot = keeper.snapshot(order.after) if keeper else None
        held = runner.held()
        kept = [b for lanes in order.kept.values() for lane in lanes.values() for b in lane]
        self._rest = sum(k.bundle.nbytes for k in kept) + sum(int(b.nbytes) for _, b in held)
        self.nbytes = self.nbytes_left
        gaps = [
            wire.Gap(x, c, *gap[:-1], wire.line(gap.line))
            for x, lanes in order.gaps.items()
            for c, gap in lanes.items()
        ]
        begin = wire.HandOverBegin(
            *order.task,
            order.epoch,
            self.nbytes,
            runner.extras(),
            order.after,
            gaps,
            order.joined_view,
        )
        self._parts = self._all(begin, order, held)

    @property
    def nbytes_left(self) -> int:
        return self._rest + (self._snapshot.nbytes_left if self._snapshot else 0)

    def next(self) -> Part | None:
        """The next part to send; None after the last."""
        return next(self._parts, None)

    def _all(
        self, begin: wire.HandOverBegin, order: HandOver, held: list[tuple[int, pa.RecordBatch]]
    ) -> Iterator[Part]:
        yield begin, None
        for exchange, lanes in order.kept.items():
            for consumer, lane in lanes.items():
                for epoch, last, bundle, part in lane:
                    self._rest -= bundle.nbytes
                    header, body = bundles.encode(
                        bundle, exchange, epoch, self.task[1], consumer, part=part, last=last
                    )
                    yield wire.HandOverKept(*self.task, header), body
        for number, batch in held:
            self._rest -= int(batch.nbytes)
            yield wire.HandOverHeld(*self.task, number), [to_ipc(batch)]
        if self._snapshot is not None:
            rows = self._snapshot.rows_left
            width = max(1, self._snapshot.nbytes_left // max(1, rows))
            for table, gone in self._snapshot.gone.items():
                yield wire.HandOverState(*self.task, table, True), [to_ipc(gone)]
            while (part := self._snapshot.next(max(256, PART_BYTES // width))) is not None:
                yield wire.HandOverState(*self.task, part[0]), [to_ipc(part[1])]
        yield wire.HandOverEnd(*self.task), None

    def close(self) -> None:
        """Nobody wants the rest."""
        if self._snapshot is not None:
            self._snapshot.close()


@contextmanager
def _from_a_peer() -> Iterator[None]:
    """What was handed over and does not fit is the donor's mistake, whatever it looks like here.
    The task that was half made is rebuilt before anything else is put into it."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise ProtocolError(f"what was handed over does not fit: {error!r}") from error


class Incoming:
    """A task's state as it comes in from its donor."""

    def __init__(self, begin: wire.HandOverBegin, donor: int, runner: TaskRunner) -> None:
        self.begin, self.donor = begin, donor
        self.nbytes = 0
        self._runner = runner
        self._kept: dict[ExchangeId, dict[GroupId, list[Kept]]] = {
            ExchangeId(e.id): {} for e in runner.stage.outputs
        }
        self._held: list[tuple[int, pa.RecordBatch]] = []
        # A source may hold more rows than there is memory for.
        self._overflow = Overflow(runner.spill, HELD_BYTES_MAX)

    def take(self, plan: Plan, message: wire.Message, body: memoryview) -> None:
        """Put one part in."""
        with _from_a_peer():
            self._take(plan, message, body)

    def _take(self, plan: Plan, message: wire.Message, body: memoryview) -> None:
        self.nbytes += body.nbytes
        match message:
            case wire.HandOverState():
                keeper = self._runner.keeper
                if keeper is None or message.table not in keeper.tables():
                    raise ProtocolError(f"the task has no table {message.table!r}")
                if message.gone:
                    keeper.tables()[message.table].take_out(bundles.rows_of(body))
                else:
                    keeper.install({message.table: bundles.rows_of(body)})
            case wire.HandOverKept():
                header = message.bundle
                schema = plan.exchanges[header.exchange].schema
                frames = bundles.decode(header, body, schema)
                lane = self._kept[ExchangeId(header.exchange)].setdefault(
                    GroupId(header.consumer), []
                )
                if lane and (lane[-1].epoch, lane[-1].part) >= (header.epoch, header.part):
                    raise ProtocolError("kept bundles out of order")
                lane.append(Kept(Epoch(header.epoch), header.last, frames, header.part))
            case wire.HandOverHeld():
                rows = self._overflow.hold(bundles.rows_of(body)).rows
                self._held.append((message.number, rows))

    def install(self, task: TaskId) -> ReplicaInstalled:
        """All parts are in: be the replica."""
        with _from_a_peer():
            self._runner.restore(self.begin.extras, self._held)
        self._runner.epoch = self.begin.epoch
        gaps: dict[ExchangeId, dict[GroupId, Gap]] = {x: {} for x in self._kept}
        for said in self.begin.gaps:
            let_go, known, base = Epoch(said.let_go), Epoch(said.known), Epoch(said.base)
            gap = Gap(let_go, known, base, said.credit, wire.from_line(said.line))
            gaps[ExchangeId(said.exchange)][GroupId(said.consumer)] = gap
        whole = self.begin.after is None
        epoch = Epoch(self.begin.epoch)
        needs = self._runner.came_from(epoch)
        return ReplicaInstalled(task, epoch, self._kept, gaps, whole, needs)


class Checkpoint(Incoming):
    """State for a standby: nothing changes there before all of it has come."""

    def __init__(self, begin: wire.HandOverBegin, donor: int, runner: TaskRunner) -> None:
        super().__init__(begin, donor, runner)
        self._waiting: list[tuple[Plan, wire.Message, bytes]] = []

    def take(self, plan: Plan, message: wire.Message, body: memoryview) -> None:
        self.nbytes += body.nbytes
        self._waiting.append((plan, message, bytes(body)))

    def put_into(self, runner: TaskRunner) -> None:
        """Into one with empty state, instead of that with the checkpoint before."""
        self._runner = runner

    def install(self, task: TaskId) -> ReplicaInstalled:
        for plan, message, body in self._waiting:
            with _from_a_peer():
                self._take(plan, message, memoryview(body))
        return super().install(task)
