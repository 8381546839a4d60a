"""Stores tasks in files, while the flow runs and when it is stopped: a site's part in checkpoints.

The tables of a task are frozen between two epochs and read in parts between the site's orders, as
for a new replica. A thread writes the parts to files and reports when they are durable; the site
never waits for a disk. The controller decides which site stores which task, and whether a
checkpoint is complete.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.core.effects import StoreState
from holdfast.core.ids import Epoch, TaskId
from holdfast.engine.operators.base import OperatorSnapshot
from holdfast.errors import FlowError
from holdfast.net import wire
from holdfast.site.stages import KEPT, Keeper, TaskRunner
from holdfast.storage.files import FileInfo, Folder, Growing
from holdfast.storage.layout import task_file

RETRY_S = (0.1, 0.5, 1.0, 2.0)
"""Pauses before a failed write of rows is repeated. After the last the flow ends."""
PART_BYTES = 1 << 20
Done = Callable[[wire.TaskFiles], None]
QUEUED_BYTES_MAX = 16 << 20
"""Maximum bytes that wait for the disk."""


class CheckpointWriter:
    """Writes to the folder of a flow, in its generation, as one of its sites. `tell` sends a
    message about a stored task to the controls, and `soon` runs a function; both do so in the
    site's own thread."""

    def __init__(
        self,
        place: str,
        generation: int,
        site: int,
        tell: Callable[[wire.Message], None],
        soon: Callable[[Callable[[], object]], None],
    ) -> None:
        self.generation, self.site = generation, site
        self._tell, self._soon = tell, soon
        self._place, self._folder = place, Folder(place)
        self._rows = ThreadPoolExecutor(1, thread_name_prefix="holdfast-push-batches")
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="holdfast-store")
        self._closed = False
        self._given = self._written = 0  # bytes; each is counted by one thread

    @property
    def room(self) -> bool:
        return self._given - self._written < QUEUED_BYTES_MAX

    def add(self, files: OpenTaskFiles, name: str, batch: pa.RecordBatch) -> None:
        self._given += int(batch.nbytes)
        self._submit(self._add, files, name, batch)

    def _add(self, files: OpenTaskFiles, name: str, batch: pa.RecordBatch) -> None:
        files.add(self._folder, name, batch)
        self._written += int(batch.nbytes)

    def finish(
        self, files: OpenTaskFiles, message: wire.TaskFiles, done: Done | None = None
    ) -> None:
        """Finish a task to which everything was added. When it is durable, call `done`, or tell the
        controls."""
        self._submit(self._finish, files, message, done)

    def _finish(self, files: OpenTaskFiles, message: wire.TaskFiles, done: Done | None) -> None:
        infos = files.close(self._folder)
        message = msgspec.structs.replace(message, infos=infos)
        if done is not None and files.error is not None:
            self._soon(partial(self._fail_to_stop, files.error))
        elif done is not None:
            self._soon(partial(done, message))
        elif files.error is not None:
            self._tell(wire.NotStored(message.task, message.epoch, files.error, False))
        else:
            self._tell(message)

    def _fail_to_stop(self, error: str) -> None:
        raise FlowError(
            f"the state of the stopped flow cannot be written to {self._place}: {error}",
            hint="the rows that its sinks have stay; it can be resumed only with store_every_ms",
        )

    def drop(self, files: OpenTaskFiles) -> None:
        self._submit(files.abandon)

    def _submit(self, call: Callable[..., None], *arguments: Any) -> None:
        if not self._closed:
            self._thread.submit(call, *arguments)

    def write(self, name: str, batches: list[pa.RecordBatch], done: Callable[[], object]) -> None:
        """Write a file of rows that cannot be read again, and call `done` when it is durable. It
        does not wait for tasks that are being stored."""
        if not self._closed:
            self._rows.submit(self._write, name, batches, done)

    def _write(self, name: str, batches: list[pa.RecordBatch], done: Callable[[], object]) -> None:
        for pause in (*RETRY_S, None):
            try:
                self._folder.write(name, batches, sync=True)
                self._soon(done)
                return
            except (OSError, pa.ArrowException) as error:
                if pause is None:
                    self._soon(partial(self._fail, error))
                else:
                    time.sleep(pause)

    def _fail(self, error: Exception) -> None:
        raise FlowError(
            f"pushed rows cannot be written to {self._place}, and cannot be read again: {error}",
            hint="when the folder can be written again, resume the flow with restore_from=",
        )

    def close(self) -> None:
        """Stop without waiting for writes in progress: they no longer count."""
        self._closed = True
        for thread in (self._thread, self._rows):
            thread.shutdown(wait=False, cancel_futures=True)


class OpenTaskFiles:
    """The files of one task while they are written. After an error nothing more is written."""

    def __init__(self) -> None:
        self.error: str | None = None
        self._growing: dict[str, Growing] = {}

    def add(self, folder: Folder, name: str, batch: pa.RecordBatch) -> None:
        if self.error is None:
            try:
                if name not in self._growing:
                    self._growing[name] = folder.growing(name, batch.schema, sync=True)
                self._growing[name].add(batch)
            except Exception as error:  # any error: the checkpoint must not wait for this task
                self._fail(error)

    def close(self, folder: Folder) -> dict[str, FileInfo]:
        """Sync all files, and return their descriptions."""
        try:
            for file in self._growing.values() if self.error is None else ():
                file.close()
            for name in list(self._growing)[:1]:
                folder.sync(name)
            return {name: file.info for name, file in self._growing.items()}
        except Exception as error:
            self._fail(error)
        return {}

    def _fail(self, error: Exception) -> None:
        self.abandon()
        self.error = str(error) or type(error).__name__

    def abandon(self) -> None:
        self.error = "given up"
        for file in self._growing.values():
            file.abandon()
        self._growing = {}


def _keeps_rows(runner: TaskRunner) -> bool:
    """Whether a task can have rows to store when the flow is stopped: a push source those in no
    epoch, an outlet those that were not read. All other sinks have made theirs durable by then."""
    return runner.egress is None or runner.egress.is_read


class Storing:
    """Stores one task; `next` stores a part. With `done` it is the final state of a stopped flow:
    everything, except rows that sinks have made durable."""

    def __init__(
        self,
        order: StoreState,
        runner: TaskRunner,
        checkpoint_writer: CheckpointWriter,
        done: Done | None = None,
    ) -> None:
        self._order, self._checkpoint_writer, self._done = order, checkpoint_writer, done
        self._runner = runner
        self._files = OpenTaskFiles()
        self._named: dict[str, tuple[str, str, bool]] = {}
        self._snapshot: OperatorSnapshot | None = None
        self._begun = False
        if done is None:
            self._begin()

    def _begin(self) -> None:
        """Freeze the current state of the task."""
        runner, self._begun = self._runner, True
        self._after, self._snapshot = _frozen(runner.keeper, self._order.after)
        self._extras = runner.extras()
        held = runner.held() if self._done is None or _keeps_rows(runner) else []
        self._held = [(epoch, rows) for epoch, rows in held if rows.num_rows]
        if self._snapshot is not None:
            for table, gone in self._snapshot.gone.items():
                if gone.num_rows:
                    self._add(table, gone, gone=True)
            width = self._snapshot.nbytes_left // max(1, self._snapshot.rows_left)
            self._rows = max(1_024, PART_BYTES // max(1, width))

    def next(self) -> int | None:
        """Store the next part. Return its bytes, or None after the last."""
        if not self._checkpoint_writer.room:
            return 0
        if not self._begun:
            if self._runner.pushed is not None and not self._runner.pushed.all_entered:
                return 0  # the last pushed rows are still on their way to the other replicas
            self._begin()
        part = self._snapshot.next(self._rows) if self._snapshot is not None else None
        if part is not None:
            self._add(*part)
            return int(part[1].nbytes)
        self._finish()
        return None

    def _add(self, table: str, batch: pa.RecordBatch, gone: bool = False) -> None:
        name = self._name(f"{table}-gone" if gone else table)
        self._named[name] = (table, name, gone)
        self._checkpoint_writer.add(self._files, name, batch)

    def _name(self, what: str) -> str:
        generation, site, order = (
            self._checkpoint_writer.generation,
            self._checkpoint_writer.site,
            self._order,
        )
        stop = self._done is not None
        return task_file(generation, order.epoch, order.task, site, what, stop=stop)

    def _finish(self) -> None:
        for _, rows in self._held:
            self._checkpoint_writer.add(self._files, self._name("held"), rows)
        message = wire.TaskFiles(
            self._order.task,
            self._order.epoch,
            self._after,
            list(self._named.values()),
            self._extras,
            [(epoch, rows.num_rows) for epoch, rows in self._held],
            self._name("held") if self._held else "",
            {},
            self._done is not None,
        )
        self._checkpoint_writer.finish(self._files, message, self._done)

    def close(self) -> None:
        """Abandon the task's files."""
        if self._snapshot is not None:
            self._snapshot.close()
        self._checkpoint_writer.drop(self._files)


class Stores:
    """The tasks of a site that are being stored, one `Storing` each."""

    def __init__(self, writer: CheckpointWriter | None) -> None:
        self._writer = writer
        self._storing: dict[TaskId, Storing] = {}

    def __bool__(self) -> bool:
        return bool(self._storing)

    @property
    def can_store(self) -> bool:
        return self._writer is not None

    def begin(self, order: StoreState, runner: TaskRunner, done: Done | None = None) -> None:
        """Store a task; what was being stored of it before is void."""
        self.abandon(order.task)
        if self._writer is not None:
            self._storing[order.task] = Storing(order, runner, self._writer, done)

    def abandon(self, task: TaskId) -> None:
        storing = self._storing.pop(task, None)
        if storing is not None:
            storing.close()

    def abandon_all(self) -> None:
        for task in list(self._storing):
            self.abandon(task)

    def write_part(self) -> int | None:
        """Hand the next part to the writer. Return its size, 0 at the end of a task or while the
        disk is behind; None if nothing is being stored."""
        for task, storing in self._storing.items():
            size = storing.next()
            if size is None:
                del self._storing[task]
            return size or 0
        return None


def _frozen(
    keeper: Keeper | None, after: Epoch | None
) -> tuple[Epoch | None, OperatorSnapshot | None]:
    """Return a snapshot of the changes after an epoch, or of everything if most rows have changed:
    then earlier files are not needed any more."""
    if keeper is None:
        return after, None
    snapshot = keeper.snapshot(after, whose=KEPT)
    rows = sum(table.size for table in keeper.tables().values())
    if after is None or 2 * snapshot.rows_left <= rows:
        return after, snapshot
    snapshot.close()
    return None, keeper.snapshot(whose=KEPT)
