"""Spark DataFrames as sources: their rows go from the executors straight to the ingress."""

from __future__ import annotations

import copy
import tempfile
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
from holdfast.spark.session import cause, use_this_python


class SparkSource(Source):
    """Base of both kinds: one split, fed by Spark tasks, in an order that can be given."""

    pushed = True

    def __init__(self, df: DataFrame, order_by: Sequence[str]) -> None:
        for name in order_by:
            if name not in df.columns:
                raise FlowError(
                    f"order_by: there is no column {name!r}", hint=f"the columns are {df.columns}"
                )
        use_this_python(df.sparkSession)
        self.df: DataFrame | None = df
        self.order_by = list(order_by)
        self.schema = pa.schema(
            [pa.field(f.name, f.type) for f in to_arrow_schema(df.schema, timezone="UTC")]
        )

    def timed(self, event_time: str) -> SparkSource:
        """In the order of event time, unless another is given. As Spark has them, rows of one
        partition come behind those of another, and would be late. The other columns make the order
        the same however Spark has cut the rows."""
        if self.order_by or self.df is None:
            return self
        flat = [f.name for f in self.df.schema if isinstance(f.dataType, AtomicType)]
        made = copy.copy(self)
        made.df, made.order_by = self.df, [*dict.fromkeys([event_time, *flat])]
        return made

    def __getstate__(self) -> dict[str, Any]:
        # Sites need the schema; the DataFrame lives on the driver only.
        return self.__dict__ | {"df": None}


class SparkBatch(SparkSource):
    """A batch DataFrame, read once, in order."""

    through = True

    def pusher(self) -> _BatchPusher:
        return _BatchPusher(self)


class SparkStream(SparkSource):
    """A streaming DataFrame: each micro-batch is handed over by its tasks, then committed."""

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
        made = copy.copy(self)
        # Copied as a site would get it, without its DataFrame, which belongs to this process.
        made.df, made.checkpoint, made.resumable = self.df, None, False
        return made

    def pusher(self) -> _StreamPusher:
        return _StreamPusher(self)


def spark_batch(df: DataFrame, *, order_by: str | Sequence[str] = ()) -> Source:
    """The rows of a batch DataFrame, ordered by the columns `order_by`; without them by their event
    time, or, if the source has none, as Spark has them."""
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
    """The rows of a streaming DataFrame, with whatever Spark SQL was applied to it.

    Micro-batches are taken in turn, rows within one by `order_by`; without it by their event time,
    or, if the source has none, as Spark has them.
    `checkpoint` is the query's checkpoint location; `trigger` what ``writeStream.trigger`` takes,
    such as ``{"availableNow": True}`` to read what is there and end.
    """
    if not df.isStreaming:
        raise FlowError(
            "spark_stream(): this DataFrame is not a stream", hint="use spark_batch(df)"
        )
    order = [order_by] if isinstance(order_by, str) else order_by
    return SparkStream(df, order, checkpoint, trigger)


def _hand_over(
    addresses: list[tuple[str, int]], secret: bytes, source: int, push: str
) -> Callable[[Iterator[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """What a feeding task runs: push its partition to the ingress, and say which it was, and which
    attempt at it. If Spark runs a task more than once, the driver hears of one attempt only."""

    def task(batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        context = TaskContext.get()
        assert context is not None
        partition, attempt = context.partitionId(), context.taskAttemptId()
        opening = wire.PushOpen(source, push, partition, attempt)
        client, remark = to_leader(addresses, secret, opening)
        with closing(client):
            if remark != wire.TAKEN:
                for rows in batches:
                    if rows.num_rows:
                        client.send_rows(rows)
                client.ask(wire.PushDone())
        yield pa.record_batch({"partition": pa.array([partition]), "attempt": pa.array([attempt])})

    task.__name__ = "hand over to the flow"
    return task


_HANDED = "partition long, attempt long"
MOVED_S_MAX = 3.0
"""How long to wait for word that the ingress is elsewhere before feeding is said to have failed."""
SourceT = TypeVar("SourceT", bound=SparkSource)


class _Pusher(Generic[SourceT]):
    """Runs on the driver; `failed` is called with the error if feeding breaks down."""

    def __init__(self, source: SourceT) -> None:
        self.failed: Callable[[Exception], None] = lambda error: None
        self._spark_source = source
        self._stopped = False
        self._refused: Refused | None = None

    def _say(self, message: wire.Message) -> str:
        """Tell the ingress something; its remark. What it refuses, it will refuse again."""
        try:
            client, remark = to_leader(self._locate(), self._secret, message)
        except Refused as error:
            self._refused = error
            raise
        client.close()
        return remark

    def start(self, locate: Locate, secret: bytes, source: int, name: str, flow: str) -> None:
        self._locate, self._secret, self._source, self._name = locate, secret, source, name
        self._described = f"Holdfast flow {flow!r}: feed source {name!r}"
        self._thread = threading.Thread(target=self._guarded, daemon=True, name="holdfast-feed")
        self._thread.start()

    def _again_if_moved(self, attempt: Callable[[list[tuple[str, int]]], None]) -> None:
        """Do something with the ingress; once more if it failed because its replicas changed."""
        while True:
            before = self._locate()
            self._refused = None
            try:
                attempt(before)
                return
            except Exception:
                if self._stopped or not self._moved(before):
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
                # Spark would show where it was raised, and not all of what it says.
                said = self._refused.reason if self._refused is not None else cause(error)
                self.failed(FlowError(f"feeding source {self._name!r} failed: {said}"))

    def _end(self, query: str) -> None:
        self._say(wire.PushEnd(self._source, query))

    def _feed(self) -> None:
        raise NotImplementedError

    def stop(self) -> None:
        self._stopped = True


class _BatchPusher(_Pusher[SparkBatch]):
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
            if self._say(wire.PushBegin(self._source, "", 0, name)) != wire.TAKEN:
                task = _hand_over(addresses, self._secret, self._source, name)
                ordered.mapInArrow(task, _HANDED).collect()

        self._again_if_moved(push)
        self._again_if_moved(lambda _: self._end(""))

    def stop(self) -> None:
        super().stop()
        df = self._spark_source.df
        if df is not None and hasattr(self, "_group"):
            df.sparkSession.sparkContext.cancelJobGroup(self._group)


class _StreamPusher(_Pusher[SparkStream]):
    _query: Any = None

    def __init__(self, source: SparkStream) -> None:
        super().__init__(source)
        self._begun = threading.Event()
        """Whether the query is known: its first micro-batch may come before it is."""

    @property
    def _id(self) -> str:
        """Of the query, as Spark keeps it in the checkpoint location: the same whenever the query
        is started from there, and another one at another place."""
        self._begun.wait()
        return str(self._query.id)

    def _feed(self) -> None:
        source = self._spark_source
        assert source.df is not None
        checkpoint = source.checkpoint or tempfile.mkdtemp(prefix="holdfast-feed-")
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
            self._again_if_moved(lambda _: self._end(self._id))

    def _take_batch(self, df: DataFrame, batch: int) -> None:
        if self._spark_source.order_by:
            # One task sorts a micro-batch sooner than orderBy, which first runs a job to sample it.
            df = df.coalesce(1).sortWithinPartitions(*self._spark_source.order_by)

        described = f"{self._described}, micro-batch {batch}"
        df.sparkSession.sparkContext.setJobDescription(described)

        def push(addresses: list[tuple[str, int]]) -> None:
            name = uuid.uuid4().hex
            if self._say(wire.PushBegin(self._source, self._id, batch, name)) == wire.TAKEN:
                return
            task = _hand_over(addresses, self._secret, self._source, name)
            handed = df.mapInArrow(task, _HANDED).collect()
            partitions = tuple(sorted((row["partition"], row["attempt"]) for row in handed))
            self._say(wire.PushCommit(self._source, name, partitions))

        self._again_if_moved(push)

    def stop(self) -> None:
        super().stop()
        if self._query is not None:
            self._query.stop()
