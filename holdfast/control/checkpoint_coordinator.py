"""A flow that outlives the loss of everything: its checkpoints and its records, in a folder.

While the flow runs, its state after some epoch is written there every so often, and the record of
every epoch as soon as it is cut. A sink takes an epoch only when its record is there. So whatever
sinks may have after the last checkpoint is known to come of certain rows, in a certain order: a
flow that goes on from there makes the same of them again, and sinks leave out what they have.

The folder belongs to the generation that was claimed last (`holdfast.storage.generations`). Records
are announced only when the generation has found that it still has the folder after they were
written. So what a generation of old adds, late, nobody has acted on.
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
    TaskStored,
    ViewCommitted,
)
from holdfast.core.ids import Epoch, GroupId, SiteId, StageId
from holdfast.core.layout import View
from holdfast.core.records import EpochRecord
from holdfast.errors import FlowError
from holdfast.net import wire
from holdfast.plan.planner import Plan
from holdfast.storage.restore_point import Kind, RestorePoint

log = logging.getLogger("holdfast.checkpoints")

AHEAD_S = 0.1
"""About so long it takes until all sites have heard which epoch is to be stored."""
RETRY_S = (0.1, 0.5, 1.0, 2.0)
"""How long to wait before records are written again that could not be; then the flow ends."""
RECORDS_MAX = 10_000
"""So many are remembered until a checkpoint needs one."""
AGAIN_S = 0.5
"""How long to wait before the next checkpoint, if one was given up."""


def common_restore_point(
    flow: Flow, plan: Plan, options: Options, incarnation: str, generation: int
) -> RestorePoint:
    """What all manifests of a flow say that is stored in this generation."""
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
    )


class CheckpointCoordinator:
    """The part of a flow's control that sees to it. All methods but `close` are called in its event
    loop; files are written in threads. `tell` reaches all sites, `fail` ends the flow."""

    def __init__(
        self,
        store: CheckpointStore,
        common: RestorePoint,
        restore_point: RestorePoint | None,
        tell: Callable[[wire.Message], None],
        term: Callable[[], int],
        fail: Callable[[Exception], None],
    ) -> None:
        self._store, self._common = store, common
        self._tell, self._term, self._fail = tell, term, fail
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
        self._records: dict[int, EpochRecord] = {}
        """Since the last checkpoint."""
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
        """The flow runs."""
        self._due_at = time.monotonic() + self._common.every_ms / 1e3
        loop = asyncio.get_running_loop()
        if not self._tasks:
            duties = (self._keep_records(), self._keep_checkpoints())
            self._tasks = [loop.create_task(duty) for duty in duties]
            for task in self._tasks:
                task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Without them sinks would wait for ever."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self._fail(error)

    def close(self) -> None:
        """The flow is over: when this returns nothing more is written."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._writer.shutdown(cancel_futures=True)
        self._keeper.shutdown(cancel_futures=True)

    def figures(self) -> dict[str, object]:
        """For whoever watches."""
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
        """The sequencer has cut an epoch; it may say so more than once."""
        self._records[record.epoch] = record.summary()
        while len(self._records) > RECORDS_MAX:
            del self._records[next(iter(self._records))]
        self._arrivals.append(time.monotonic())
        if record.epoch > self.recorded:
            self._waiting[record.epoch] = record
            self._news.set()
        self._handle(RecordArrived(record))

    async def _keep_records(self) -> None:
        """Write what has come while the last of it was written."""
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
            f"which rows the flow's epochs have cannot be written to {self._place}, and without it "
            f"its results could not be told from others if it were lost: {error}",
            hint="when there is room again, go on with restore_from=: nothing is lost",
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
        """So many epochs come until all sites know what is to be stored."""
        since = time.monotonic() - 1.0
        return 1 + int(AHEAD_S * sum(at > since for at in self._arrivals))

    def on_view(self, view: View) -> None:
        self._view = view
        self._handle(ViewCommitted(view))

    def on_lost(self, site: SiteId) -> None:
        self._handle(PeerLost(site))

    def on_message(self, message: wire.TaskFiles | wire.NotStored) -> None:
        task, epoch = (StageId(message.stage), GroupId(message.group)), Epoch(message.epoch)
        if isinstance(message, wire.TaskFiles):
            self._handle(TaskStored(task, epoch, message))
        else:
            self._handle(StoreFailed(epoch, message.reason, message.missed))

    def _handle(self, event: StoreEvent) -> None:
        was = self._machine.failure, self._machine.epoch
        for effect in self._machine.handle(event):
            self._apply(effect)
        if self._machine.failure and (self._machine.failure, self._machine.epoch) != was:
            log.info("no checkpoint of epoch %s: %s", was[1], self._machine.failure)
            self._due_at = min(self._due_at, time.monotonic() + AGAIN_S)

    def _apply(self, effect: StoreEffect) -> None:
        match effect:
            case OrderStore():
                self._tell(wire.Store(self._term(), effect.epoch, effect.after))
            case WriteManifest():
                self._writing = asyncio.get_running_loop().create_task(self._complete(effect))

    async def _complete(self, effect: WriteManifest) -> None:
        view, error = self._view, ""
        loop = asyncio.get_running_loop()
        try:
            if view is None or effect.epoch not in self._records:
                raise FlowError(f"epoch {effect.epoch} is not known any more")
            record = self._records[effect.epoch]
            restore_point = manifest_of(self._common, view, record, effect.stored, self._saved)
            if self._closed:
                return
            await loop.run_in_executor(self._keeper, self._store.save, restore_point)
            self._saved, self._stored_at = restore_point, time.monotonic()
            self._records = {e: r for e, r in self._records.items() if e > effect.epoch}
        except Exception as failed:  # it is said, and tried again
            error = str(failed) or type(failed).__name__
        self._handle(ManifestWritten(effect.epoch, error))
