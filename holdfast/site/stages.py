"""The tasks of a flow on one site. Carries out the orders of the dataflow machine."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Protocol

import msgspec
import numpy as np
import pyarrow as pa

from holdfast.api.options import Options
from holdfast.connectors.pull import FolderReader
from holdfast.connectors.sources import SplitReader
from holdfast.connectors.table import LatestTableWriter
from holdfast.core.effects import IngestEpochs, ProcessBundles
from holdfast.core.events import TaskProcessed
from holdfast.core.ids import NO_EPOCH, Epoch, ExchangeId, GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import PartitionGroup, View
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord
from holdfast.engine.batches import Track, concat, order_of
from holdfast.engine.memory import NO_STATE, naming, state_size
from holdfast.engine.operators.base import KeyedOperator, OperatorSnapshot
from holdfast.engine.state import STANDBY, StateTable
from holdfast.errors import FlowError, ProtocolError
from holdfast.net import bundles, wire
from holdfast.net.bundles import Frames, Router
from holdfast.plan.planner import Plan, Stage, shape
from holdfast.plan.stage_runner import StageRunner
from holdfast.site.egress import Egress
from holdfast.site.ingress import Ingress, Split
from holdfast.site.push import PushReader
from holdfast.site.push_entries import Lead
from holdfast.storage.layout import push_batch_file
from holdfast.storage.restore_point import RestorePoint

KEPT = "store"
"""The reader of table changes that writes checkpoints to files."""

Outputs = dict[ExchangeId, dict[GroupId, Frames]]
"""The output of an epoch: a bundle for every consumer partition group of every exchange."""


class Keeper(Protocol):
    """Anything whose state is in tables."""

    def tables(self) -> dict[str, StateTable]: ...

    def snapshot(self, after: int | None = None, *, whose: str = ...) -> OperatorSnapshot: ...

    def install(self, state: dict[str, pa.RecordBatch]) -> None: ...


def reader_at(site: SiteId) -> str:
    """The reader of a task's changes that is the standby at `site`. Each gets its own checkpoints,
    so each has its own changes since the last one."""
    return f"{STANDBY} {site}"


def together(order: ProcessBundles) -> Iterator[tuple[ProcessBundles, list[int]]]:
    """Divide the epochs of an order into those that an operator can process in one call, with the
    sequence number at which each epoch begins: a result's sequence number then tells its epoch. An
    epoch at the end of which the watermark moves, with the sequence number of the next epoch's
    first row, is the last of its call."""
    epochs: list[dict[ExchangeId, list[Any]]] = []
    begins: list[int] = []
    latest = Track.START
    for epoch, taken in enumerate(order.epochs, order.first):
        frames = [f for found in taken.values() for f in found]
        seqs = [f.track.seqs[1:] for f in frames]
        seqs += [order_of(f.batch)[0] for f in frames if f.batch.num_rows]
        begin = min((int(s.min()) for s in seqs if s.size), default=latest + 1)
        if epochs and begin <= latest:
            yield _part(order, Epoch(epoch - 1), epochs), begins
            epochs, begins = [], []
        epochs.append(taken)
        begins.append(begin if begins else Track.START)
        latest = max([latest, *(int(s.max()) for s in seqs if s.size)])
    yield _part(order, order.epoch, epochs), begins


def _part(
    order: ProcessBundles, last: Epoch, epochs: list[dict[ExchangeId, list[Any]]]
) -> ProcessBundles:
    return ProcessBundles(order.task, last, True, epochs[-1], tuple(epochs[:-1]))


class TaskRunner:
    """One task: a partition group of a stage with its operator, and its source readers or sink
    writer."""

    processor_s = staticmethod(time.thread_time)
    """The processor time of this thread, in seconds. Each call is a call of the system."""

    def __init__(
        self,
        plan: Plan,
        stage: Stage,
        group: PartitionGroup,
        options: Options,
        routers: Mapping[ExchangeId, Router],
        incarnation: str = "",
    ) -> None:
        self.stage, self.group, self.partitions = stage, group, options.partitions
        self.spill = options.spill
        """The folder for rows that do not fit into memory."""
        self.runner = StageRunner(plan, stage, options.partitions)
        self.guard = ProtectionSpec()
        self.followers: tuple[str, ...] = ()
        """The readers that get the changes of the task's state from this replica."""
        self.routers = routers
        self.ingress: Ingress | None = None
        self.egress: Egress | None = None
        self.rows_in = self.rows_out = self.calls = 0
        self.checkpoints = 0
        self.bytes_out = {ExchangeId(x.id): 0 for x in stage.outputs}
        self.work_s = 0.0
        """Processor time of all calls. Like `bytes_out`, it counts only this replica's own work."""
        self.epoch = -1
        if stage.source is not None:
            numbers = range(group.first, group.end)
            readers = {n: _reader(stage, n, options.spill) for n in numbers}
            self.ingress = Ingress(plan, stage, readers)
            if self.pushed is not None:
                self.pushed.epoch = lambda: self.epoch
        if stage.sink is not None:
            self.egress = Egress(plan.flow, stage, incarnation, plan.restore_point)

    def begin(self, restore_point: RestorePoint) -> None:
        """Restore the task from the flow's restore point."""
        self.epoch = restore_point.epochs - 1
        if self.keeper is not None:
            self._install(restore_point, self.keeper)
        if self.ingress is not None:  # after the tables: push batches that it recovers change them
            self.ingress.begin(restore_point)
        if self.egress is not None:
            self.egress.recover(restore_point)

    def _install(self, restore_point: RestorePoint, keeper: Keeper) -> None:
        first, end = self.group.first, self.group.end
        for delta, batch in restore_point.state_of(self.stage.id, first, end):
            try:
                table = keeper.tables()[delta.table]
                if delta.gone:
                    table.take_out(batch)
                elif first <= delta.first and delta.end <= end:
                    keeper.install({delta.table: batch})
                else:
                    keeper.install({delta.table: table.within(batch, first, end)})
            except (KeyError, ValueError, TypeError, IndexError, pa.ArrowException) as error:
                raise FlowError(
                    f"stage {self.stage.name!r} cannot continue with the state in "
                    f"{delta.file} at {restore_point.place}: {error!r}",
                    hint="its operator must be the one that wrote it",
                ) from error

    def protect(self, guard: ProtectionSpec, followers: tuple[str, ...] = ()) -> None:
        """Track the changes of state that this protection and these readers need. The table keeps
        removed keys for each reader until it asks for them, so every reader must ask."""
        self.guard, self.followers = guard, followers
        for table in self.keeper.tables().values() if self.keeper is not None else ():
            table.follow(births=guard.level > 0, changes=followers)

    def came_from(self, epoch: int) -> Epoch:
        """Return the epoch after which all rows came that the state after `epoch` depends on."""
        if not self.guard.level or self.runner.operator is None:
            return NO_EPOCH
        return max(NO_EPOCH, Epoch(self.operator_came_from(epoch)))

    def operator_came_from(self, epoch: int) -> int:
        assert self.operator is not None
        return self.operator.came_from(epoch)

    @property
    def operator(self) -> KeyedOperator | None:
        """The operator, with its current state."""
        return self.runner.operator

    @property
    def keeper(self) -> Keeper | None:
        """The owner of the tables that a new replica needs: the operator, a sink that is a table,
        or a pull reader."""
        if self.egress is not None and isinstance(self.egress.writer, LatestTableWriter):
            return self.egress.writer
        if self.pushed is not None and isinstance(self.pushed.pull_reader, FolderReader):
            return self.pushed.pull_reader
        return self.operator

    def run(self, order: IngestEpochs | ProcessBundles) -> list[Outputs]:
        """Carry out an order. Return the output of each of its epochs, split by consumer partition
        group."""
        with naming(partial(self.runner.place, order.epoch), self.state_size):
            return self._run(order)

    def state_size(self) -> str:
        """Describe the size of the state."""
        tables = self.keeper.tables().values() if self.keeper is not None else ()
        if not tables:
            return NO_STATE
        return state_size(sum(t.size for t in tables), sum(t.nbytes for t in tables))

    def _run(self, order: IngestEpochs | ProcessBundles) -> list[Outputs]:
        begun = self.processor_s()
        if isinstance(order, IngestEpochs):
            assert self.ingress is not None
            made = [self.ingress.epoch(record) for record in order.records]
            rows = sum(batch.num_rows for batch, _ in made)
            outputs = self.ingest(made, [record.base for record in order.records], order.epoch)
        else:
            rows = sum(f.batch.num_rows for f in order.frames())
            outputs = self.process(order) if self.egress is None else [{}]
            if self.egress is not None:
                self.egress.take(order.epoch, self.merge(order)[0].select(self.egress.columns))
        self.calls += 1
        self.rows_in += rows
        for exchange, frames in ((x, f) for epoch in outputs for x, f in epoch.items()):
            self.rows_out += sum(f.batch.num_rows for f in frames.values())
            self.bytes_out[exchange] += sum(f.nbytes for f in frames.values())
        self.work_s += self.processor_s() - begun
        self.epoch = order.epoch
        return outputs

    def follow(self, record: EpochRecord) -> None:
        """Skip an epoch of a source that another replica processes."""
        assert self.ingress is not None
        self.ingress.follow(record)
        self.epoch = record.epoch

    def ingest(
        self, made: Sequence[tuple[pa.RecordBatch, Track]], bases: Sequence[int], epoch: int
    ) -> list[Outputs]:
        """Run the steps on a source's rows of some epochs, which begin with the sequence numbers
        `bases`. `epoch` is the last of them."""
        batch, tracks = concat([batch for batch, _ in made]), [track for _, track in made]
        return self._split(self.runner.run_source(batch, epoch), tracks, bases)

    def merge(self, order: ProcessBundles) -> list[pa.RecordBatch]:
        """Merge and check all frames of an order. Return a batch for each input of the stage."""
        frames = [[f.batch for epoch in order.epochs for f in epoch[x]] for x in order.bundles]
        merged = self.runner.merged(frames)
        where = f"stage {self.stage.name!r}, partition group {order.task[1]}, epoch {order.epoch}"
        bundles.check(order.frames(), merged, where)
        return merged

    def process(self, order: ProcessBundles) -> list[Outputs]:
        """Run the operator and its steps on the frames of an order. State that a call changes
        counts as that of the call's first epoch."""
        if order.earlier:
            return [outputs for part in together(order) for outputs in self._process(*part)]
        return self._process(order, [Track.START])

    def _process(self, order: ProcessBundles, begins: list[int]) -> list[Outputs]:
        """Process epochs in one call; each begins with a sequence number of `begins`."""
        epochs = [[f.track for frames in e.values() for f in frames] for e in order.epochs]
        tracks = [Track.merged(epoch) for epoch in epochs]
        whole = tracks[0]
        if len(tracks) > 1:
            whole = Track.merged([t.begun_at(at) for t, at in zip(tracks, begins, strict=True)])
        outputs = self.runner.run_merged(self.merge(order), whole, order.first)
        return self._split(outputs, tracks, begins)

    def _split(
        self, outputs: dict[int, pa.RecordBatch], tracks: Sequence[Track], begins: Sequence[int]
    ) -> list[Outputs]:
        """Split the output by epoch and by consumer partition group. The epochs begin with these
        sequence numbers."""
        split: list[Outputs] = [{} for _ in tracks]
        for number, rows in outputs.items():
            exchange = ExchangeId(number)
            router = self.routers[exchange]
            if len(tracks) == 1:
                split[0][exchange] = router.split(rows, tracks[0])
                continue
            epoch_of = np.searchsorted(begins, order_of(rows)[0], side="right") - 1
            for out, frames in zip(split, router.split_epochs(rows, tracks, epoch_of), strict=True):
                out[exchange] = frames
        return split

    @property
    def pushed(self) -> PushReader | None:
        """The reader of a push source; None if the task has none."""
        if self.ingress is None:
            return None
        readers = [s.reader for s in self.ingress.splits.values()]
        return readers[0] if isinstance(readers[0], PushReader) else None

    def held(self) -> list[tuple[int, pa.RecordBatch]]:
        """Return the rows that exist only at replicas of this task: of a sink, those that are not
        durable; of a push source, those in no epoch yet."""
        if self.egress is not None:
            return self.egress.held
        if self.ingress is not None and self.pushed is not None:
            return list(enumerate(self.ingress.unsequenced()))
        return []

    def extras(self) -> wire.Extras:
        """Return what a new replica needs in addition to tables, kept bundles and held rows."""
        operator = self.operator
        return {
            "counts": (self.rows_in, self.rows_out, self.calls, self.runner.dead_rows),
            "ingress": self.ingress.save() if self.ingress else None,
            "egress": self.egress.save() if self.egress else None,
            "operator": operator.extras() if operator else None,
        }

    def restore(self, extras: wire.Extras, held: list[tuple[int, pa.RecordBatch]]) -> None:
        ingress, egress, operator = extras["ingress"], extras["egress"], extras["operator"]
        have = (self.ingress, self.egress, self.operator)
        if [h is None for h in have] != [e is None for e in (ingress, egress, operator)]:
            raise ProtocolError("the state of another kind of task was handed over")
        self.rows_in, self.rows_out, self.calls, self.runner.dead_rows = extras["counts"]
        if self.ingress is not None and ingress is not None:
            self.ingress.restore(ingress, [rows for _, rows in held])
        if self.egress is not None and egress is not None:
            self.egress.restore(egress, held)
        if self.operator is not None and operator is not None:
            self.operator.late_rows = 0
            self.operator.install_extras(operator)

    def metrics(self) -> dict[str, Any]:
        operator = self.operator
        return {
            "stage": self.stage.name,
            "kind": self.stage.kind,
            "first": self.group.first,
            "partitions": self.group.end - self.group.first,
            "epoch": self.epoch,
            "rows_in": self.rows_in,
            "rows_out": self.rows_out,
            "calls": self.calls,
            "checkpoints": self.checkpoints,
            "bytes_out": list(self.bytes_out.values()),
            "work_s": self.work_s,
            "keys": operator.state_rows() if operator else 0,
            "state_bytes": operator.state_bytes() if operator else 0,
            "given_bytes": operator.given_bytes() if operator else 0,
            "removals": operator.removals() if operator else 0,
            "late_rows": operator.late_rows if operator else 0,
            "dead_rows": self.runner.dead_rows,
            "sink": self.egress.report() if self.egress else None,
        }


class StateWriter(Protocol):
    """Writes files of a flow that is stored while it runs: see `holdfast.site.checkpoints`."""

    generation: int

    def write(
        self, name: str, batches: list[pa.RecordBatch], done: Callable[[], object]
    ) -> None: ...


class SiteStages:
    """All tasks of which this site holds a replica."""

    def __init__(
        self,
        plan: Plan,
        site: SiteId,
        options: Options,
        incarnation: str = "",
        runner: type[TaskRunner] = TaskRunner,
        checkpoint_writer: StateWriter | None = None,
    ) -> None:
        self.plan, self.site, self.options = plan, site, options
        self._shape = shape(plan, options.partitions)
        self.checkpoint_writer = checkpoint_writer
        self._incarnation = incarnation
        self.tasks: dict[TaskId, TaskRunner] = {}
        self._runner = runner
        self._routers: dict[ExchangeId, Router] = {}
        self.recorded: int | None = None
        """The last epoch whose record is durable; sinks wait for it. None if records are not
        stored."""
        if options.store_every_ms:
            self.recorded = NO_EPOCH
        self.call: tuple[str, int] | None = None
        """The name of the stage whose code runs now, and the epoch, or -1. Other threads report
        it."""
        self.on_pushed: Callable[[], None] = lambda: None
        self.send: Callable[[SiteId, wire.Message, list[Any]], None] = lambda *_: None

    def open(self, task: TaskId, view: View, *, begins: bool) -> None:
        """Create the replica of a task. If it `begins` with the flow, it has the state of the
        restore point, else empty state. If this site leads the task, its egress begins to lead."""
        stage, group = self.plan.stages[task[0]], view.group(task)
        for exchange in stage.outputs:
            if exchange.id not in self._routers:
                groups = view.groups[exchange.consumer]
                router = Router(exchange, groups, self.options.digests)
                self._routers[ExchangeId(exchange.id)] = router
        runner = self._runner(
            self.plan, stage, group, self.options, self._routers, self._incarnation
        )
        runner.protect(*self._protection(task, view))
        self.tasks[task] = runner
        if self.plan.restore_point is not None and begins:
            runner.begin(self.plan.restore_point)
        if runner.egress is not None and group.replicas[0] == self.site:
            runner.egress.begin(view.rank)
        for reader in self.pushed().values():
            reader.on_ready, reader.send = self.on_pushed, self.send
            if self.checkpoint_writer is not None:
                reader.keep = partial(self._keep, self.checkpoint_writer, reader)

    @staticmethod
    def _keep(
        checkpoint_writer: StateWriter,
        reader: PushReader,
        lead: Lead,
        push_batch: wire.PushBatch,
        rows: list[Any],
    ) -> None:
        number = push_batch.number
        name = push_batch_file(
            checkpoint_writer.generation, push_batch.source, number, lead.rank, lead.base
        )
        data = [msgspec.msgpack.encode(push_batch), *(memoryview(b).tobytes() for b in rows)]
        batches = [pa.record_batch({"data": [d]}) for d in data]
        checkpoint_writer.write(name, batches, partial(reader.on_stored, lead, number))

    def on_view(self, view: View) -> None:
        """Adopt a view: take over sinks whose leader is gone, pass the other replicas on to the
        readers of push sources, and track the changes of state that the protection needs."""
        for task, runner in self.tasks.items():
            if task not in view.tasks_at(self.site):
                continue
            protection = self._protection(task, view)
            if (runner.guard, runner.followers) != protection:
                runner.protect(*protection)
            group = view.group(task)
            leads = group.led_by(self.site)
            if runner.egress is not None and leads:
                runner.egress.lead(view.rank)
            reader = runner.pushed
            if reader is not None:
                others, joining = (
                    {s: group.joined_view_of(s) for s in sites if s != self.site}
                    for sites in (group.replicas, group.joining)
                )
                leader = None if leads else group.replicas[0]
                reader.on_replicas(leader, others, joining, view.rank)

    def _protection(self, task: TaskId, view: View) -> tuple[ProtectionSpec, tuple[str, ...]]:
        """Return the protection of a task, and the readers that get its changes from this replica.
        A new reader first gets the whole state."""
        guard, group = self._shape.under(view).stages[task[0]].guard, view.group(task)
        gives = guard.standbys > 0 and self.site not in group.standbys
        others = [s for s in group.standbys + group.joining if s != self.site] if gives else []
        stored = self.options.store_every_ms > 0 and group.led_by(self.site)
        return guard, (*map(reader_at, others), *((KEPT,) if stored else ()))

    def shut(self, task: TaskId) -> None:
        """Close a task that this site no longer holds."""
        runner = self.tasks.pop(task)
        if runner.egress is not None:
            runner.egress.abandon()
        if runner.ingress is not None:
            for split in runner.ingress.splits.values():
                split.close()

    def pushed(self) -> dict[int, PushReader]:
        """The readers of push sources, by stage."""
        return {u[0]: r.pushed for u, r in self.tasks.items() if r.pushed is not None}

    def splits(self) -> list[tuple[TaskId, Split]]:
        return [
            (task, split)
            for task, runner in self.tasks.items()
            if runner.ingress is not None
            for split in runner.ingress.splits.values()
        ]

    def ready(self, order: IngestEpochs | ProcessBundles) -> bool:
        """Whether the order can be carried out now. A source may not have its rows yet, or a sink
        may have no room."""
        runner = self.tasks.get(order.task)
        if runner is not None and runner.egress is not None:
            assert isinstance(order, ProcessBundles)
            may = self.recorded is None or order.epoch <= self.recorded
            return may and runner.egress.ready
        if runner is None or runner.ingress is None or not isinstance(order, IngestEpochs):
            return True
        return runner.ingress.ready(order.records, self.options.block_rows)

    @contextmanager
    def calling(self, task: TaskRunner, epoch: int = -1) -> Iterator[None]:
        """Note that the code of a task's stage runs in this context: its functions, source or
        sink."""
        self.call = (task.stage.name, epoch)
        try:
            yield
        finally:
            self.call = None

    def execute(self, order: IngestEpochs | ProcessBundles) -> TaskProcessed:
        """Ingest or process. The result has the output, split by consumer partition group."""
        last = order.last if isinstance(order, ProcessBundles) else True
        task = self.tasks[order.task]
        with self.calling(task, order.epoch):
            *earlier, outputs = task.run(order)
        needs = task.came_from(order.epoch)
        return TaskProcessed(order.task, order.epoch, last, outputs, needs, tuple(earlier))

    def egress(self, sink: StageId) -> Egress | None:
        runner = self.tasks.get((sink, GroupId(0)))
        return runner.egress if runner else None

    def replay_results(self) -> None:
        """Replay the restore point's results to the sinks. Called repeatedly."""
        for runner in self.tasks.values():
            if runner.egress is not None:
                with self.calling(runner):
                    runner.egress.replay_results()

    def flush_notes(self) -> None:
        """Flush the sinks that are led here. Called at intervals."""
        for runner in self.tasks.values():
            if runner.egress is not None:
                with self.calling(runner):
                    runner.egress.flush_notes()

    def metrics(self) -> list[dict[str, Any]]:
        """Return the metrics of each task held here."""
        return [
            {"group": task[1], **runner.metrics()} for task, runner in sorted(self.tasks.items())
        ]

    def close_sinks(self) -> None:
        """Close the sinks after the last epoch, so that everything they wrote is readable."""
        for runner in self.tasks.values():
            if runner.egress is not None:
                with self.calling(runner):
                    runner.egress.close()

    def close_sources(self) -> None:
        for _, split in self.splits():
            split.close()

    def abandon(self) -> None:
        """Stop all sinks without finishing: the site leaves."""
        for runner in self.tasks.values():
            if runner.egress is not None:
                runner.egress.abandon()


def _reader(stage: Stage, number: int, folder: str | None) -> SplitReader:
    assert stage.source is not None
    if stage.source.pushed:
        pull_reader = stage.source.pull_reader() if stage.source.pulled else None
        return PushReader(stage.id, stage.source.schema, stage.source.through, pull_reader, folder)
    return stage.source.open(number)
