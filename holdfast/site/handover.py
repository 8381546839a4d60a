"""The hand-over of a task to a new replica: the donor's side and the joining replica's.

The donor freezes its operator's tables and sends them in parts between its orders, so it never
pauses for longer than one part takes. The joining replica installs the parts as they arrive.

A standby gets its state in the same way, repeatedly, and only the changes: a checkpoint. It
installs a checkpoint when it is complete; until then the one before counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa

from holdfast.core.effects import HandOver
from holdfast.core.events import ReplicaInstalled
from holdfast.core.exchange import Kept
from holdfast.core.ids import ExchangeId, GroupId, TaskId
from holdfast.core.messages import BundleKey
from holdfast.engine.batches import to_ipc
from holdfast.errors import HoldfastError, ProtocolError
from holdfast.net import bundles, wire
from holdfast.plan.planner import Plan
from holdfast.site.spill import Overflow
from holdfast.site.stages import TaskRunner, reader_at

Part = tuple[wire.Message, list[Any] | None]

PART_BYTES = 1 << 18
HELD_BYTES_MAX = 64 << 20
"""Maximum bytes of held rows in memory at the receiver; others go to disk."""


class Outgoing:
    """The donor's side: `next` returns the parts of a task's state."""

    def __init__(self, order: HandOver, runner: TaskRunner) -> None:
        self.task, self.joiner = order.task, order.joiner
        keeper = runner.keeper
        whose = reader_at(order.joiner)
        self._snapshot = keeper.snapshot(order.after, whose=whose) if keeper else None
        held = runner.held()
        kept = [b for lanes in order.kept.values() for lane in lanes.values() for b in lane]
        self._rest = sum(k.bundle.nbytes for k in kept) + sum(int(b.nbytes) for _, b in held)
        self.nbytes = self.nbytes_left
        begin = wire.HandOverBegin(
            order.task,
            order.epoch,
            self.nbytes,
            runner.extras(),
            order.after,
            order.gaps,
            order.joined_view,
        )
        self._parts = self._all(begin, order, held)

    @property
    def nbytes_left(self) -> int:
        return self._rest + (self._snapshot.nbytes_left if self._snapshot else 0)

    def next(self) -> Part | None:
        """Return the next part to send; None after the last."""
        return next(self._parts, None)

    def _all(
        self, begin: wire.HandOverBegin, order: HandOver, held: list[tuple[int, pa.RecordBatch]]
    ) -> Iterator[Part]:
        yield begin, None
        for exchange, lanes in order.kept.items():
            for consumer, lane in lanes.items():
                for epoch, last, bundle, part in lane:
                    self._rest -= bundle.nbytes
                    key = BundleKey(exchange, epoch, self.task[1], consumer, 0, part, last)
                    header, body = bundles.encode(key, bundle)
                    yield wire.HandOverKept(self.task, header), body
        for number, batch in held:
            self._rest -= int(batch.nbytes)
            yield wire.HandOverHeld(self.task, number), [to_ipc(batch)]
        if self._snapshot is not None:
            rows = self._snapshot.rows_left
            width = max(1, self._snapshot.nbytes_left // max(1, rows))
            for table, gone in self._snapshot.gone.items():
                yield wire.HandOverState(self.task, table, True), [to_ipc(gone)]
            while (part := self._snapshot.next(max(256, PART_BYTES // width))) is not None:
                yield wire.HandOverState(self.task, part[0]), [to_ipc(part[1])]
        yield wire.HandOverEnd(self.task), None

    def close(self) -> None:
        """Discard the remaining parts."""
        if self._snapshot is not None:
            self._snapshot.close()


@contextmanager
def _from_a_peer() -> Iterator[None]:
    """Convert any error to a `ProtocolError`: state that does not fit is the donor's fault. The
    half-installed task is opened again, empty, before other state is installed."""
    try:
        yield
    except HoldfastError:
        raise
    except Exception as error:
        raise ProtocolError(f"the state of a hand-over does not fit: {error!r}") from error


class Incoming:
    """The receiver's side: takes the parts of a task's state."""

    def __init__(self, begin: wire.HandOverBegin, donor: int, runner: TaskRunner) -> None:
        self.begin, self.donor = begin, donor
        self.nbytes = 0
        self._runner = runner
        self._kept: dict[ExchangeId, dict[GroupId, list[Kept]]] = {
            ExchangeId(e.id): {} for e in runner.stage.outputs
        }
        self._held: list[tuple[int, pa.RecordBatch]] = []
        # A source may hold more rows than fit into memory.
        self._overflow = Overflow(runner.spill, HELD_BYTES_MAX)

    def take(self, plan: Plan, message: wire.Message, body: memoryview) -> None:
        """Install one part."""
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
                key = message.bundle.key
                schema = plan.exchanges[key.exchange].schema
                frames = bundles.decode(message.bundle, body, schema)
                lane = self._kept[key.exchange].setdefault(key.consumer, [])
                if lane and (lane[-1].epoch, lane[-1].part) >= (key.epoch, key.part):
                    raise ProtocolError("kept bundles out of order")
                lane.append(Kept(key.epoch, key.last, frames, key.part))
            case wire.HandOverHeld():
                rows = self._overflow.hold(bundles.rows_of(body)).rows
                self._held.append((message.number, rows))

    def install(self, task: TaskId) -> ReplicaInstalled:
        """Finish the replica after the last part."""
        with _from_a_peer():
            self._runner.restore(self.begin.extras, self._held)
        self._runner.epoch = self.begin.epoch
        gaps = {x: dict(self.begin.gaps.get(x, {})) for x in self._kept}
        whole = self.begin.after is None
        epoch = self.begin.epoch
        needs = self._runner.came_from(epoch)
        return ReplicaInstalled(task, epoch, self._kept, gaps, whole, needs)


class IncomingCheckpoint(Incoming):
    """The receiver's side of a checkpoint: a standby installs it only when it is complete."""

    def __init__(self, begin: wire.HandOverBegin, donor: int, runner: TaskRunner) -> None:
        super().__init__(begin, donor, runner)
        self._waiting: list[tuple[Plan, wire.Message, bytes]] = []

    def take(self, plan: Plan, message: wire.Message, body: memoryview) -> None:
        self.nbytes += body.nbytes
        self._waiting.append((plan, message, bytes(body)))

    def put_into(self, runner: TaskRunner) -> None:
        """Install into another runner, with empty state, instead of the one that has the last
        checkpoint."""
        self._runner = runner

    def install(self, task: TaskId) -> ReplicaInstalled:
        for plan, message, body in self._waiting:
            with _from_a_peer():
                self._take(plan, message, memoryview(body))
        return super().install(task)
