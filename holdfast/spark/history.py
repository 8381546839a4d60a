"""Builds a flow's restore point with the batch job, which processes history in parallel. The flow
continues from there as if it had streamed the history.

The tasks of keyed stages write their final state, and those of sinks their results in order,
directly to a folder (see `holdfast.storage.restore_point`). The driver receives only the file
names.
"""

from __future__ import annotations

import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F

from holdfast.api.graph import Flow
from holdfast.engine.batches import concat
from holdfast.engine.operators.base import KeyedOperator
from holdfast.engine.steps import conform
from holdfast.errors import FlowError, HoldfastError
from holdfast.plan.planner import Stage, plan
from holdfast.spark import shuffle_blocks as blocks
from holdfast.spark.batch import BatchJob, Order
from holdfast.spark.session import cause, use_this_python
from holdfast.storage.files import Folder
from holdfast.storage.layout import RESULTS
from holdfast.storage.restore_point import RestorePoint, store_state, stored_state

RANGE_ROWS, RANGES_MAX = 500_000, 256
"""Input rows per range in which results are sorted, and maximum number of ranges."""
LOOK_S = 0.2
_WRITTEN = "range int, number int, file string"

Progress = Callable[[int, int], None]
"""Called with the number of finished tasks, and of all tasks known so far."""


class History:
    """The rows that precede a flow: a DataFrame for its source, or one for each of several."""

    def __init__(
        self,
        flow: Flow,
        history: Any,
        partitions: int,
        at: str | None = None,
        progress: Progress | None = None,
    ) -> None:
        """`partitions` must be the flow's number of partitions; `at` is the parent of its
        folder."""
        names = [s.name for s in plan(flow).sources]
        where = f"flow {flow.name!r}, history"
        if isinstance(history, Mapping):
            self.inputs: dict[str, DataFrame] = dict(history)
        elif len(names) == 1:
            self.inputs = {names[0]: history}
        else:
            raise FlowError(
                f"{where}: the flow has several sources", hint=f"pass a dict by name: {names}"
            )
        if not self.inputs:
            raise FlowError(f"{where}: the dict is empty", hint="leave out history=")
        for name, df in self.inputs.items():
            if not isinstance(df, DataFrame) or not hasattr(df, "_jdf"):
                raise FlowError(f"{where}: {name!r} is {type(df).__name__}, not a DataFrame")
        self.flow, self.partitions, self.progress = flow, partitions, progress
        self.spark: SparkSession = next(iter(self.inputs.values())).sparkSession
        self.plan = blocks.checked_plan(flow, self._all_inputs(), partitions, streaming=False)
        name = f"holdfast-{flow.name}-{uuid.uuid4().hex[:8]}"
        self.place = f"{(at or _default_place(self.spark, flow.name)).rstrip('/')}/{name}"

    def files(self, source: str) -> list[str]:
        """Return the files that a source's history is read from, if it is read from files."""
        df = self.inputs.get(source)
        return df.inputFiles() if df is not None else []

    def build(self) -> RestorePoint:
        """Run the batch job."""
        use_this_python(self.spark)
        described = f"Holdfast flow {self.flow.name!r}: history"
        try:
            with _jobs(self.spark, described, self.progress):
                return self._build()
        except HoldfastError:
            raise
        except Exception as error:
            raise FlowError(
                f"the history of flow {self.flow.name!r} could not be computed: {cause(error)}"
            ) from error

    def _all_inputs(self) -> dict[str, DataFrame]:
        """Return the inputs of all sources; a source without history gets an empty DataFrame."""
        missing = [s for s in plan(self.flow).sources if s.name not in self.inputs]
        empty = {
            s.name: self.spark.createDataFrame([], blocks.spark_schema(s.ports["out"].schema))
            for s in missing
        }
        return self.inputs | empty

    def _build(self) -> RestorePoint:
        order = Order.of(self.plan, self._all_inputs(), ended=False)
        job = BatchJob(self.plan, order, self.partitions, keep=KeepState(self.place))
        results = {s.id: self._results(job, s) for s in self.plan.sinks}
        state = stored_state(Folder(self.place))
        epochs = max([1, *(len(files) for files in results.values())])
        return RestorePoint(self.place, epochs, order.rows, order.mark, state, results)

    def _results(self, job: BatchJob, sink: Stage) -> list[str]:
        """Write a sink's results of the history in order, and return the names of the files."""
        ranges = min(RANGES_MAX, -(-job.order.rows // RANGE_ROWS) or 1)
        rows = -(-job.order.rows // ranges) or 1
        results = job.result(sink, with_order=True)
        order = [F.col(n) for n in results.columns if n.startswith("__o")]
        at = F.floor(order[0] / F.lit(rows)).cast("int")
        at = F.least(F.greatest(at, F.lit(0)), F.lit(ranges - 1))
        placed = results.repartitionById(ranges, at).sortWithinPartitions(*order)
        task = WriteResults(self.place, sink)
        written = placed.mapInArrow(task, _WRITTEN).collect()
        return [row.file for row in sorted(written)]


class KeepState:
    """Writes the state of an operator, one file per partition and table. A retried task writes the
    same files."""

    def __init__(self, place: str) -> None:
        self.place = place

    def __call__(self, stage: Stage, operator: KeyedOperator) -> None:
        store_state(Folder(self.place), stage.id, operator.tables())


class WriteResults:
    """Writes the rows of one range, one file per epoch that the flow will deliver."""

    def __init__(self, place: str, sink: Stage) -> None:
        self.place, self.sink, self.name = place, sink.id, sink.name
        self.schema = sink.inputs[0].schema

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        at, attempt = context.partitionId(), context.taskAttemptId()
        folder = Folder(self.place)
        files: list[str] = []
        for rows in blocks.blocks(batches):
            file = f"{RESULTS}/{self.sink}/{at:05d}-{len(files):05d}-{attempt}.arrow"
            folder.write(file, [concat([conform(rows, self.schema, self.name)])])
            files.append(file)
        numbers = pa.array(range(len(files)), pa.int32())
        ranges = pa.array([at] * len(files), pa.int32())
        yield pa.record_batch({"range": ranges, "number": numbers, "file": pa.array(files)})


def _default_place(spark: SparkSession, flow: str) -> str:
    """Return Spark's checkpoint directory; on a local master without one, the temporary folder."""
    context = spark.sparkContext
    chosen = context.getCheckpointDir()
    if chosen is not None:
        return str(chosen)
    if context.master.startswith("local"):
        return tempfile.gettempdir()
    raise FlowError(
        f"flow {flow!r}, history: there is no folder for its state and results",
        hint="pass Options(history_folder=), a folder that driver and executors can access, such "
        "as s3://bucket/folder, or call spark.sparkContext.setCheckpointDir(...)",
    )


@contextmanager
def _jobs(spark: SparkSession, described: str, progress: Progress | None) -> Iterator[None]:
    """Name the jobs that Spark runs inside the block, and report their progress."""
    context = spark.sparkContext
    group, finished = f"holdfast-history-{uuid.uuid4().hex[:8]}", threading.Event()
    before = {
        key: context.getLocalProperty(key) for key in ("spark.jobGroup.id", "spark.job.description")
    }
    tracker = context.statusTracker()

    def report() -> None:
        while progress is not None and not finished.wait(LOOK_S):
            infos = [tracker.getJobInfo(job) for job in tracker.getJobIdsForGroup(group)]
            stages = {s for info in infos if info is not None for s in info.stageIds}
            seen = [i for i in map(tracker.getStageInfo, stages) if i is not None]
            progress(sum(i.numCompletedTasks for i in seen), sum(i.numTasks for i in seen))

    watcher = threading.Thread(target=report, daemon=True, name="holdfast-history")
    watcher.start()
    context.setJobGroup(group, described, interruptOnCancel=True)
    try:
        yield
    finally:
        finished.set()
        watcher.join()
        for key, value in before.items():
            context.setLocalProperty(key, value)
