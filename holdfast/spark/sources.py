"""Spark DataFrames as push sources: Spark tasks push the rows directly to the ingress."""

from __future__ import annotations

import copy
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from typing import Any, Generic, TypeVar

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql import DataFrame
from pyspark.sql.pandas.types import to_arrow_schema
from pyspark.sql.types import AtomicType

from holdfast.connectors.sources import Locate, Source
from holdfast.errors import FlowError
from holdfast.net import wire
from holdfast.net.client import Refused, to_leader
from holdfast.net.handshake import Party
from holdfast.spark.session import cause, use_this_python
from holdfast.storage.temporary import TemporaryFolder


class SparkSource(Source):
    """Base of both sources: one split, whose rows Spark tasks push, in a configurable order."""

    pushed = True

    def __init__(self, df: DataFrame, order_by: Sequence[str]) -> None:
        for name in order_by:
            if name not in df.columns:
                raise FlowError(
                    f"order_by: the DataFrame has no column {name!r}",
                    hint=f"its columns are {df.columns}",
                )
        use_this_python(df.sparkSession)
        self.df: DataFrame | None = df
        self.order_by = list(order_by)
        self.schema = pa.schema(
            [pa.field(f.name, f.type) for f in to_arrow_schema(df.schema, timezone="UTC")]
        )

    def timed(self, event_time: str) -> SparkSource:
        """Return this source ordered by event time, unless it has `order_by`.

        In Spark's order, the rows of one partition follow those of another, and would be late. The
        other columns make the order independent of Spark's partitions.
        """
        if self.order_by or self.df is None:
            return self
        flat = [f.name for f in self.df.schema if isinstance(f.dataType, AtomicType)]
        ordered = copy.copy(self)
        ordered.df, ordered.order_by = self.df, [*dict.fromkeys([event_time, *flat])]
        return ordered

    def __getstate__(self) -> dict[str, Any]:
        # Sites need only the schema; the DataFrame lives on the driver.
        return self.__dict__ | {"df": None}


class SparkBatch(SparkSource):
    """A batch DataFrame, read once, in order."""

    through = True

    def pusher(self) -> _BatchPusher:
        return _BatchPusher(self)


class SparkStream(SparkSource):
    """A streaming DataFrame: the tasks of each micro-batch push it, then the driver commits it."""

    def __init__(
        self,
        df: DataFrame,
        order_by: Sequence[str],
        checkpoint: str | None,
        trigger: dict[str, Any] | None,
    ) -> None:
        super().__init__(df, order_by)
        self.checkpoint, self.trigger = checkpoint, trigger
        self.resumable = checkpoint is not None

    def dry_run(self) -> SparkStream:
        dry = copy.copy(self)
        # `copy` drops the DataFrame like pickling for a site; this process needs it.
        dry.df, dry.checkpoint, dry.resumable = self.df, None, False
        return dry

    def pusher(self) -> _StreamPusher:
        return _StreamPusher(self)


def spark_batch(df: DataFrame, *, order_by: str | Sequence[str] = ()) -> Source:
    """Return a source of a batch DataFrame's rows, ordered by the columns `order_by`. Without them,
    rows are in the order of event time, or in Spark's order if the source has no event time."""
    if df.isStreaming:
        raise FlowError("spark_batch(): this DataFrame is a stream", hint="use spark_stream(df)")
    return SparkBatch(df, [order_by] if isinstance(order_by, str) else order_by)


def spark_stream(
    df: DataFrame,
    *,
    order_by: str | Sequence[str] = (),
    checkpoint: str | None = None,
    trigger: dict[str, Any] | None = None,
) -> Source:
    """Return a source of a streaming DataFrame's rows, with any Spark SQL applied to it.

    The rows of a micro-batch follow those of the previous one, ordered by `order_by`. Without it,
    rows are in the order of event time, or in Spark's order if the source has no event time.
    `checkpoint` is the query's checkpoint location. `trigger` holds the arguments of
    ``writeStream.trigger``, such as ``{"availableNow": True}`` to read all available rows and end.
    """
    if not df.isStreaming:
        raise FlowError(
            "spark_stream(): this DataFrame is not a stream", hint="use spark_batch(df)"
        )
    order = [order_by] if isinstance(order_by, str) else order_by
    return SparkStream(df, order, checkpoint, trigger)


def _push_task(
    addresses: list[tuple[str, int]], access: Party, source: int, push: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return the function of a pushing task.

    It pushes its Spark partition to the ingress, and returns the numbers of partition and attempt.
    If Spark runs a task more than once, the driver receives one attempt only.
    """

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.taskAttemptId()
        opening = wire.PushOpen(source, push, partition, attempt)
        client, remark = to_leader(addresses, access, opening)
        with closing(client):
            if remark != wire.TAKEN:
                for rows in batches:
                    if rows.num_rows:
                        client.send_rows(rows)
                client.ask(wire.PushDone())
        yield pa.record_batch({"partition": pa.array([partition]), "attempt": pa.array([attempt])})

    task.__name__ = "push to the flow"
    return task


_PUSHED_DDL = "partition long, attempt long"
MOVED_S_MAX = 3.0
"""Maximum wait for new addresses of the ingress before a failed push is reported."""
SourceT = TypeVar("SourceT", bound=SparkSource)


class _SparkPusher(Generic[SourceT]):
    """Runs a push source on the driver. It calls `failed` with the error if pushing fails."""

    def __init__(self, source: SourceT) -> None:
        self.failed: Callable[[Exception], None] = lambda error: None
        self._spark_source = source
        self._stopped = False
        self._refused: Refused | None = None

    def _send(self, message: wire.Message) -> str:
        """Send a message to the leading ingress and return its answer. A refusal is kept, because
        the ingress would refuse the message again."""
        try:
            client, remark = to_leader(self._locate(), self._access, message)
        except Refused as error:
            self._refused = error
            raise
        client.close()
        return remark

    def start(self, locate: Locate, access: Party, source: int, name: str, flow: str) -> None:
        self._locate, self._access, self._source, self._name = locate, access, source, name
        self._described = f"Holdfast flow {flow!r}: feed source {name!r}"
        self._thread = threading.Thread(target=self._guarded, daemon=True, name="holdfast-feed")
        self._thread.start()

    def _retry_if_moved(self, attempt: Callable[[list[tuple[str, int]]], None]) -> None:
        """Call `attempt` with the ingress's addresses; again if it failed and they changed, or the
        flow's secret was replaced: tasks were sent the old key."""
        while True:
            before, keys = self._locate(), self._access.ring.current.id
            self._refused = None
            try:
                attempt(before)
                return
            except Exception:
                if self._stopped:
                    raise
                if self._access.ring.current.id == keys and not self._moved(before):
                    raise

    def _moved(self, before: list[tuple[str, int]]) -> bool:
        deadline = time.monotonic() + MOVED_S_MAX
        while self._locate() == before and time.monotonic() < deadline:
            time.sleep(0.05)
        return self._locate() != before

    def _guarded(self) -> None:
        try:
            self._feed()
        except Exception as error:
            if not self._stopped:
                # Spark's error shows where a refusal was raised, but not its whole text.
                reason = self._refused.reason if self._refused is not None else cause(error)
                self.failed(FlowError(f"feeding source {self._name!r} failed: {reason}"))

    def _end(self, query: str) -> None:
        self._send(wire.PushEnd(self._source, query))

    def _feed(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._stopped = True


class _BatchPusher(_SparkPusher[SparkBatch]):
    def _feed(self) -> None:
        df = self._spark_source.df
        assert df is not None
        context = df.sparkSession.sparkContext
        self._group = f"holdfast-feed-{id(self)}"
        context.setJobGroup(self._group, self._described, interruptOnCancel=True)
        if self._spark_source.order_by:
            df = df.orderBy(*self._spark_source.order_by)
        ordered = df

        def push(addresses: list[tuple[str, int]]) -> None:
            name = uuid.uuid4().hex
            if self._send(wire.PushBegin(self._source, "", 0, name)) != wire.TAKEN:
                task = _push_task(addresses, self._access, self._source, name)
                ordered.mapInArrow(task, _PUSHED_DDL).collect()

        self._retry_if_moved(push)
        self._retry_if_moved(lambda _: self._end(""))

    def stop(self) -> None:
        super().stop()
        df = self._spark_source.df
        if df is not None and hasattr(self, "_group"):
            df.sparkSession.sparkContext.cancelJobGroup(self._group)


class _StreamPusher(_SparkPusher[SparkStream]):
    _query: Any = None

    def __init__(self, source: SparkStream) -> None:
        super().__init__(source)
        self._begun = threading.Event()
        """Set once `_query` is assigned: the first micro-batch may start before that."""

    @property
    def _id(self) -> str:
        """The query's id, which Spark keeps in the checkpoint location: it is the same whenever the
        query starts from there, and different at another location."""
        self._begun.wait()
        return str(self._query.id)

    def _feed(self) -> None:
        if self._spark_source.checkpoint:
            self._run_query(self._spark_source.checkpoint)
            return
        with TemporaryFolder("feed") as folder:
            self._run_query(str(folder.path / "checkpoint"))

    def _run_query(self, checkpoint: str) -> None:
        source = self._spark_source
        assert source.df is not None
        writer = source.df.writeStream.foreachBatch(self._take_batch)
        writer = writer.option("checkpointLocation", checkpoint).queryName(
            f"{self._described} ({uuid.uuid4().hex[:6]})"
        )
        if source.trigger:
            writer = writer.trigger(**source.trigger)
        try:
            self._query = writer.start()
        finally:
            self._begun.set()
        if self._stopped:
            self._query.stop()
        self._query.awaitTermination()
        if not self._stopped:
            self._retry_if_moved(lambda _: self._end(self._id))

    def _take_batch(self, df: DataFrame, batch: int) -> None:
        if self._spark_source.order_by:
            # One task sorts a micro-batch faster than orderBy, which first runs a sampling job.
            df = df.coalesce(1).sortWithinPartitions(*self._spark_source.order_by)

        described = f"{self._described}, micro-batch {batch}"
        df.sparkSession.sparkContext.setJobDescription(described)

        def push(addresses: list[tuple[str, int]]) -> None:
            name = uuid.uuid4().hex
            if self._send(wire.PushBegin(self._source, self._id, batch, name)) == wire.TAKEN:
                return
            task = _push_task(addresses, self._access, self._source, name)
            pushed = df.mapInArrow(task, _PUSHED_DDL).collect()
            partitions = tuple(sorted((row["partition"], row["attempt"]) for row in pushed))
            self._send(wire.PushCommit(self._source, name, partitions))

        self._retry_if_moved(push)

    def stop(self) -> None:
        super().stop()
        if self._query is not None:
            self._query.stop()
