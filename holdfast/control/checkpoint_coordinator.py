"""Stores a running flow, its checkpoints and its records, in a folder.

It can continue from there even if all sites are lost.

While the flow runs, its state after an epoch is stored at intervals, and the record of every epoch
as soon as it is cut. A sink takes an epoch only when its record is stored. So for everything that
sinks have taken after the last checkpoint it is known which rows it comes from, in which order. A
flow that continues from the checkpoint produces the same again, and sinks skip what they have.

The folder belongs to the generation that was claimed last (`holdfast.storage.generations`). A
generation announces records only after it has found that it still owns the folder once they were
written. So no site has acted on records that an earlier generation adds late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.control.checkpoint_store import CheckpointStore, manifest_of
from holdfast.core.checkpoints import Checkpoints
from holdfast.core.effects import OrderStore, StoreEffect, WriteManifest
from holdfast.core.events import (
    ManifestWritten,
    PeerLost,
    RecordArrived,
    StoreDue,
    StoreEvent,
    StoreFailed,
    StoreOrdered,
    TaskStored,
    ViewCommitted,
)
from holdfast.core.ids import Epoch, SiteId
from holdfast.core.layout import View
from holdfast.core.records import EpochRecord
from holdfast.errors import FlowError
from holdfast.net import wire
from holdfast.plan.fingerprint import describe, stored
from holdfast.plan.planner import Plan
from holdfast.storage.restore_point import Kind, RestorePoint

log = logging.getLogger("holdfast.checkpoints")

AHEAD_S = 0.1
"""About how long it takes until all sites know which epoch is to be stored."""
RETRY_S = (0.1, 0.5, 1.0, 2.0)
"""The waits before attempts to write records again. After the last one the flow ends."""
EPOCHS_MAX = 10_000
"""For how many epochs it is known how many rows they end with, until a checkpoint needs that."""
AGAIN_S = 0.5
"""How long to wait before the next checkpoint after one that failed."""


def common_restore_point(
    flow: Flow, plan: Plan, options: Options, incarnation: str, generation: int
) -> RestorePoint:
    """What all manifests of this generation of a flow have in common."""
    assert options.store is not None
    restore_point = flow.restore_point
    lost = restore_point if restore_point is not None and restore_point.lost else None
    if lost is not None and not lost.untouched:
        incarnation = lost.incarnation
    return RestorePoint(
        options.store,
        0,
        0,
        b"",
        {},
        {},
        stages=[stage.name for stage in plan.stages],
        partitions=options.partitions,
        resolved=flow.resolved,
        flow=flow.name,
        incarnation=incarnation,
        generation=generation,
        every_ms=options.store_every_ms,
        kind=Kind.RUNNING,
        home=options.store,
        plan=stored(describe(plan)),
    )


class CheckpointCoordinator:
    """Stores a flow, as part of its control. All methods but `close` are called in the control's
    event loop; threads write files. `tell` sends to all sites, `fail` ends the flow."""

    def __init__(
        self,
        store: CheckpointStore,
        common: RestorePoint,
        restore_point: RestorePoint | None,
        tell: Callable[[wire.Message], None],
        term: Callable[[], int],
        fail: Callable[[Exception], None],
        under_way: Callable[[bool], None] = lambda _: None,
    ) -> None:
        """`under_way` is told when a checkpoint begins and when it has ended."""
        self._store, self._common = store, common
        self._tell, self._term, self._fail = tell, term, fail
        self._under_way = under_way
        self._view: View | None = None
        """The last view that was committed."""
        self._place = store.place
        begun = (
            restore_point.epochs - 1 + len(restore_point.records)
            if restore_point is not None
            else -1
        )
        self.recorded = Epoch(begun)
        """The last epoch whose record is durable."""
        self._waiting: dict[int, EpochRecord] = {}
        self._rows: dict[int, int] = {}
        """By epoch since the last checkpoint: how many input rows there are up to its end."""
        self._saved: RestorePoint | None = None
        """The last checkpoint of this generation."""
        self._machine = Checkpoints(self.recorded)
        self._stored_at: float | None = None
        self._due_at = 0.0
        self._arrivals: deque[float] = deque(maxlen=1_000)
        self._news = asyncio.Event()
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-records")
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="holdfast-manifest")

    def start(self) -> None:
        """Begin to store: the flow runs."""
        self._due_at = time.monotonic() + self._common.every_ms / 1e3
        loop = asyncio.get_running_loop()
        if not self._tasks:
            duties = (self._keep_records(), self._keep_checkpoints())
            self._tasks = [loop.create_task(duty) for duty in duties]
            for task in self._tasks:
                task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Fail the flow if a task has failed: sinks would wait for ever for records."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

    def close(self) -> None:
        """Stop: nothing is written after this returns."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._writer.shutdown(cancel_futures=True)
        self._keeper.shutdown(cancel_futures=True)

    def metrics(self) -> dict[str, object]:
        """What `Run.status` shows of checkpoints."""
        age = None if self._stored_at is None else time.monotonic() - self._stored_at
        return {
            "epoch": self._machine.complete,
            "seconds_ago": age,
            "recorded": self.recorded,
            "under_way": self._machine.epoch,
            "failure": self._machine.failure or None,
        }

    # --- records --------------------------------------------------------------------------------

    def note(self, record: EpochRecord) -> None:
        """The sequencer has cut an epoch. It may report an epoch more than once."""
        self._rows[record.epoch] = record.base + record.rows
        while len(self._rows) > EPOCHS_MAX:
            del self._rows[next(iter(self._rows))]
        self._arrivals.append(time.monotonic())
        if record.epoch > self.recorded:
            self._waiting[record.epoch] = record
            self._news.set()
        self._handle(RecordArrived(record))

    async def _keep_records(self) -> None:
        """Write records as they arrive; those that arrive during a write go together."""
        while True:
            await self._news.wait()
            self._news.clear()
            while records := self._next_records():
                if not await self._write_records(records):
                    return
                self.recorded = records[-1].epoch
                self._tell(wire.Recorded(self._term(), self.recorded))

    def _next_records(self) -> list[EpochRecord]:
        found: list[EpochRecord] = []
        while (record := self._waiting.pop(self.recorded + 1 + len(found), None)) is not None:
            found.append(record)
        return found

    async def _write_records(self, records: list[EpochRecord]) -> bool:
        loop = asyncio.get_running_loop()
        for pause in (*RETRY_S, None):
            try:
                await loop.run_in_executor(self._writer, self._store.append, records)
                return True
            except FlowError as error:
                self._fail(error)
                return False
            except (OSError, pa.ArrowException) as error:
                log.warning("records cannot be written to %s: %s", self._place, error)
                if pause is None:
                    self._fail(self._unwritten(error))
                    return False
                await asyncio.sleep(pause)
        return False

    def _unwritten(self, error: Exception) -> FlowError:
        return FlowError(
            f"the records of the flow's epochs cannot be written to {self._place}; without them "
            f"the flow could not continue exactly if it were lost: {error}",
            hint="when the folder can be written to again, continue with restore_from=: nothing "
            "is lost",
        )

    # --- checkpoints ----------------------------------------------------------------------------

    async def _keep_checkpoints(self) -> None:
        every_s = self._common.every_ms / 1e3
        while True:
            await asyncio.sleep(max(0.01, min(every_s, self._due_at - time.monotonic())))
            view = self._view
            if view is None or self._machine.epoch is not None:
                self._due_at = max(self._due_at, time.monotonic() + 0.05)
            elif time.monotonic() >= self._due_at:
                self._due_at = time.monotonic() + every_s
                self._handle(StoreDue(view, self._ahead()))

    def _ahead(self) -> int:
        """How many epochs are cut until all sites know which one is to be stored, plus one."""
        since = time.monotonic() - 1.0
        return 1 + int(AHEAD_S * sum(at > since for at in self._arrivals))

    def on_view(self, view: View) -> None:
        self._view = view
        self._handle(ViewCommitted(view))

    def on_lost(self, site: SiteId) -> None:
        self._handle(PeerLost(site))

    def on_task_files(self, message: wire.TaskFiles) -> None:
        self._handle(TaskStored(message.task, message.epoch, message))

    def on_not_stored(self, message: wire.NotStored) -> None:
        self._handle(StoreFailed(message.epoch, message.reason, message.missed))

    def _handle(self, event: StoreEvent) -> None:
        before = self._machine.failure, self._machine.epoch
        effects = self._machine.handle(event)
        if (self._machine.epoch is None) != (before[1] is None):
            self._under_way(self._machine.epoch is not None)
        for effect in effects:
            self._apply(effect)
        if self._machine.failure and (self._machine.failure, self._machine.epoch) != before:
            log.info("no checkpoint of epoch %s: %s", before[1], self._machine.failure)
            self._due_at = min(self._due_at, time.monotonic() + AGAIN_S)

    def _apply(self, effect: StoreEffect) -> None:
        match effect:
            case OrderStore():
                self._tell(wire.Store(self._term(), StoreOrdered(effect.epoch, effect.after)))
            case WriteManifest():
                self._writing = asyncio.get_running_loop().create_task(self._complete(effect))

    async def _complete(self, effect: WriteManifest) -> None:
        view, error = self._view, ""
        loop = asyncio.get_running_loop()
        try:
            if view is None or effect.epoch not in self._rows:
                raise FlowError(f"it is no longer known with which row epoch {effect.epoch} ends")
            at = (effect.epoch, self._rows[effect.epoch])
            restore_point = manifest_of(self._common, view, *at, effect.stored, self._saved)
            if self._closed:
                return
            await loop.run_in_executor(self._keeper, self._store.save, restore_point)
            self._saved, self._stored_at = restore_point, time.monotonic()
            self._rows = {e: rows for e, rows in self._rows.items() if e > effect.epoch}
        except Exception as failed:  # the machine reports it, and tries again
            error = str(failed) or type(failed).__name__
        self._handle(ManifestWritten(effect.epoch, error))
