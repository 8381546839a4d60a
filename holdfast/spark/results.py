"""The Spark data source "holdfast": ``spark.readStream`` reads the results of a running flow as a
streaming DataFrame, ``spark.read`` reads a table of it as a batch DataFrame.

Offsets are epochs, with the flow's incarnation and the name of the reader. Tasks fetch the rows
from the site that leads the egress. The flow drops the rows of a micro-batch once Spark has
committed it. A Spark sink that applies each micro-batch exactly once therefore gets every row
exactly once.

A reader needs a permanent name, because the flow retains rows for it until it has read them. An
unnamed reader would be a new one whenever its query starts without a checkpoint.
"""

from __future__ import annotations

import itertools
import time
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
from pyspark.sql.streaming.datasource import (
    ReadAllAvailable,
    ReadLimit,
    ReadMaxRows,
    SupportsTriggerAvailableNow,
)
from pyspark.sql.types import StructType

from holdfast.errors import FlowError, HostError
from holdfast.net.reader import PATIENCE_S, PAUSE_S, SinkReader, TableReader

Offset = dict[str, Any]

_HINTS = {
    "flow": "pass run.url of the running flow",
    "sink": "pass the sink's name",
    "reader": "pass a name that is unique to the query and the same at every start: the flow "
    "holds rows for every reader that it knows, until the reader has read them",
}


class HoldfastSource(DataSource):
    """The data source. Its options:

    - *flow*: the value of ``run.url``
    - *sink*: the sink's name in the flow
    - *reader*: the permanent name of the query (streams only)
    - *startingEpochs*: ``earliest`` (all retained epochs) or ``latest``
    - *maxRowsPerBatch*
    - *partitions*: the number of tasks per micro-batch
    """

    @classmethod
    def name(cls) -> str:
        return "holdfast"

    def _option(self, name: str, default: str | None = None) -> str:
        value = self.options.get(name, default)
        if value is None:
            raise FlowError(
                f"the data source 'holdfast' needs the option {name!r}", hint=_HINTS[name]
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
            self._option("reader"),
            start == "latest",
            self._number("maxRowsPerBatch", 1 << 31),
            self._number("partitions", 1),
        )


class _ViewScan(DataSourceReader):
    """Reads a table of the flow in its current state."""

    def __init__(self, flow: str, sink: str) -> None:
        self._flow, self._sink = flow, sink

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        with TableReader(self._flow, self._sink) as reader:
            yield from reader.scan()


@dataclass
class _Epochs(InputPartition):
    """The rows of the epochs after `after` up to `upto`, in one incarnation of the flow."""

    after: int
    upto: int
    incarnation: str


class OutletReader(DataSourceStreamReader, SupportsTriggerAvailableNow):
    """The stream reader of one query. `read` runs in tasks, all other methods beside the driver."""

    def __init__(
        self, flow: str, sink: str, reader: str, latest: bool, rows_max: int, partitions: int
    ) -> None:
        self._flow, self._sink, self._reader = flow, sink, reader
        self._latest, self._rows_max, self._partitions = latest, rows_max, partitions
        self._asks: SinkReader | None = None
        self._is_over = False
        """Whether the flow has ended and this query has read all its results."""
        self._target: int | None = None
        """The last epoch to read, if the query reads only what was available at its start."""

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_asks": None}

    def _ask(self, request: dict[str, str | int]) -> dict[str, int]:
        if self._asks is None:
            self._asks = SinkReader(self._flow, self._sink)
        return self._asks.ask({"reader": self._reader, **request})[0]

    @property
    def _incarnation(self) -> str:
        return SinkReader(self._flow, self._sink).incarnation

    def _check(self, offset: Offset) -> Offset:
        if offset["reader"] != self._reader:
            raise FlowError(
                f"sink {self._sink!r}: the query's checkpoint is that of reader "
                f"{offset['reader']!r}, but its option 'reader' is {self._reader!r}",
                hint="use the previous name, or a separate checkpoint for the new one",
            )
        return offset

    def initialOffset(self) -> Offset:
        values = self._ask({"do": "begin", "latest": int(self._latest)})
        return {
            "incarnation": self._incarnation,
            "reader": self._reader,
            "epoch": values["epoch"],
        }

    def getDefaultReadLimit(self) -> ReadLimit:
        return ReadMaxRows(self._rows_max)

    def prepareForTriggerAvailableNow(self) -> None:
        self._target = self._ask({"do": "look"})["epoch"]

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:
        self._check(start)
        if self._is_over:
            return start
        rows = -1 if isinstance(limit, ReadAllAvailable) else limit.max_rows
        request = {
            "do": "latest",
            "incarnation": start["incarnation"],
            "after": start["epoch"],
            "rows": rows,
        }
        # Spark asks for the next offset once the last micro-batch is in its commit log, but calls
        # `commit` for that micro-batch only once it has found another one.
        upto = self._upto(start["epoch"], request)
        if upto <= start["epoch"]:
            return start
        return start | {"epoch": upto, "incarnation": self._incarnation}

    def _upto(self, after: int, request: dict[str, str | int]) -> int:
        """Return the last epoch of the next micro-batch.

        If the query has a target, wait for it: a new leader may not have reached it yet, and Spark
        would take an unchanged offset for the end.
        """
        deadline = time.monotonic() + PATIENCE_S
        while True:
            values = self._ask(request)
            self._is_over = bool(values["over"])
            upto = values["epoch"]
            if self._target is None:
                return upto
            if upto > after or after >= self._target:
                return max(after, min(upto, self._target))
            if time.monotonic() > deadline:
                raise HostError(
                    f"sink {self._sink!r} did not reach epoch {after + 1} within {PATIENCE_S:.0f} s"
                )
            time.sleep(PAUSE_S)

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:
        self._check(start)
        after, count = start["epoch"], end["epoch"] - start["epoch"]
        tasks = min(self._partitions, count)
        edges = [after + count * i // tasks for i in range(tasks + 1)] if tasks else []
        incarnation = end["incarnation"]
        return [_Epochs(low, high, incarnation) for low, high in itertools.pairwise(edges)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        assert isinstance(partition, _Epochs)
        after, moved = partition.after, time.monotonic()
        request: dict[str, str | int] = {
            "do": "read",
            "reader": self._reader,
            "incarnation": partition.incarnation,
            "upto": partition.upto,
        }
        with SinkReader(self._flow, self._sink) as reader:
            while after < partition.upto:
                values, batches = reader.ask({**request, "after": after})
                if values["epoch"] > after:
                    moved = time.monotonic()
                elif time.monotonic() - moved > PATIENCE_S:
                    raise HostError(
                        f"sink {self._sink!r} did not reach epoch {after + 1} within "
                        f"{PATIENCE_S:.0f} s"
                    )
                else:
                    time.sleep(PAUSE_S)  # a new leader has not reached the epoch yet
                after = values["epoch"]
                yield from batches

    def commit(self, end: Offset) -> None:
        request = {"do": "commit", "incarnation": end["incarnation"], "epoch": end["epoch"]}
        self._ask(request)

    def stop(self) -> None:
        if self._asks is not None:
            self._asks.close()
