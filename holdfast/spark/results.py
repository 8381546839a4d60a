"""``spark.readStream.format("holdfast")``: the results of a running flow as a streaming DataFrame,
and ``spark.read``: a view of it as a batch one.

Offsets are epochs, with the flow's incarnation and the name of the reader. Tasks fetch the rows
from the site that leads the egress; when a micro-batch has been committed the flow lets go of it.
So any Spark sink that takes a micro-batch once has every row once.
"""

from __future__ import annotations

import itertools
import time
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceReader,
    DataSourceStreamReader,
    InputPartition,
)
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows
from pyspark.sql.types import StructType

from holdfast.errors import FlowError, HostError
from holdfast.site.reading import PATIENCE_S, PAUSE_S, SinkReader, ViewReader

Offset = dict[str, Any]


class HoldfastSource(DataSource):
    """Options: *flow*, what ``run.url`` says; *sink*, its name in the flow; *reader*, a name for
    the query (made up if there is none); *startingEpochs*, ``earliest`` (what is kept) or
    ``latest``; *maxRowsPerBatch*; *partitions*, into how many tasks a micro-batch is cut."""

    @classmethod
    def name(cls) -> str:
        return "holdfast"

    def _option(self, name: str, default: str | None = None) -> str:
        value = self.options.get(name, default)
        if value is None:
            hint = {"flow": "give run.url of the running flow", "sink": "give the sink's name"}
            raise FlowError(
                f"the data source 'holdfast' needs the option {name!r}", hint=hint[name]
            )
        return str(value)

    def _number(self, name: str, default: int) -> int:
        text = self._option(name, str(default))
        if not text.isdigit() or int(text) == 0:
            raise FlowError(f"option {name!r} is {text!r}", hint="it must be a positive number")
        return int(text)

    def schema(self) -> StructType:
        with SinkReader(self._option("flow"), self._option("sink")) as reader:
            return from_arrow_schema(reader.schema)

    def reader(self, schema: StructType) -> _ViewScan:
        return _ViewScan(self._option("flow"), self._option("sink"))

    def streamReader(self, schema: StructType) -> OutletReader:
        start = self._option("startingEpochs", "earliest")
        if start not in ("earliest", "latest"):
            raise FlowError(f"option 'startingEpochs' is {start!r}, not 'earliest' or 'latest'")
        return OutletReader(
            self._option("flow"),
            self._option("sink"),
            self._option("reader", ""),
            start == "latest",
            self._number("maxRowsPerBatch", 1 << 31),
            self._number("partitions", 1),
        )


class _ViewScan(DataSourceReader):
    """A view, as it is when it is read."""

    def __init__(self, flow: str, sink: str) -> None:
        self._flow, self._sink = flow, sink

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with ViewReader(self._flow, self._sink) as reader:
            yield from reader.scan()


@dataclass
class _Epochs(InputPartition):
    """The rows of the epochs after `after`, up to `upto`."""

    after: int
    upto: int


class OutletReader(DataSourceStreamReader):
    """One query's: some of it runs beside the driver, `read` in tasks."""

    def __init__(
        self, flow: str, sink: str, reader: str, latest: bool, rows_max: int, partitions: int
    ) -> None:
        self._flow, self._sink, self._reader = flow, sink, reader
        self._latest, self._rows_max, self._partitions = latest, rows_max, partitions
        self._asks: SinkReader | None = None
        self._is_over = False
        """Whether this query has everything, and nothing will follow."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_asks": None}

    def _ask(self, request: dict[str, str | int]) -> dict[str, int]:
        if self._asks is None:
            self._asks = SinkReader(self._flow, self._sink)
        return self._asks.ask(request)[0]

    @property
    def _incarnation(self) -> str:
        return SinkReader(self._flow, self._sink).incarnation

    def _check(self, offset: Offset) -> Offset:
        if offset["incarnation"] != self._incarnation:
            raise FlowError(
                f"sink {self._sink!r}: the query has read another life of the flow, whose epochs "
                "have nothing to do with those of this one",
                hint="start the query with a new checkpoint",
            )
        return offset

    def initialOffset(self) -> Offset:
        reader = self._reader or uuid.uuid4().hex[:12]
        values = self._ask({"do": "begin", "latest": int(self._latest)})
        return {"incarnation": self._incarnation, "reader": reader, "epoch": values["epoch"]}

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows_max)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        self._check(start)
        if self._is_over:
            return start
        rows = -1 if isinstance(limit, ReadAllAvailable) else limit.max_rows
        request = {"do": "latest", "reader": start["reader"], "after": start["epoch"], "rows": rows}
        # Spark asks what comes after a micro-batch when that is in its commit log; that it has been
        # committed it says only when it has found another one.
        values = self._ask(request)
        self._is_over = bool(values["over"])
        return start | {"epoch": values["epoch"]}

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        self._check(start)
        after, count = start["epoch"], end["epoch"] - start["epoch"]
        tasks = min(self._partitions, count)
        edges = [after + count * i // tasks for i in range(tasks + 1)] if tasks else []
        return [_Epochs(low, high) for low, high in itertools.pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Epochs)
        after, moved = partition.after, time.monotonic()
        with SinkReader(self._flow, self._sink) as reader:
            while after < partition.upto:
                values, batches = reader.ask({"do": "read", "after": after, "upto": partition.upto})
                if values["epoch"] > after:
                    moved = time.monotonic()
                elif time.monotonic() - moved > PATIENCE_S:
                    raise HostError(f"sink {self._sink!r} does not come to epoch {after + 1}")
                else:
                    time.sleep(PAUSE_S)  # whoever leads now is not there yet
                after = values["epoch"]
                yield from batches

    def commit(self, end: Offset) -> None:
        self._ask({"do": "commit", "reader": end["reader"], "epoch": end["epoch"]})

    def stop(self) -> None:
        if self._asks is not None:
            self._asks.close()
