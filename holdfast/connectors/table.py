"""The table sink: the latest row of every key, in the memory of the egress's replicas.

Readers ask the leading replica, either for the rows of some keys or for a scan. A scan returns all
rows as of one epoch, in parts, while the table continues to change.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.engine.batches import empty
from holdfast.engine.keys import key_words
from holdfast.engine.operators.base import OperatorSnapshot
from holdfast.engine.snapshot import Snapshot
from holdfast.engine.state import STANDBY, StateTable
from holdfast.engine.state_rows import Field
from holdfast.errors import FlowError

PART_ROWS = 50_000
SCANS_MAX = 8
SCAN_S_MAX = 60.0
"""The table closes a scan that its reader has not continued for this long: open scans cost
memory."""


class LatestTable(Sink):
    """The latest row of every key, in memory; see `table`."""

    replicated = True

    def __init__(self, key: Sequence[str]) -> None:
        if not key:
            raise FlowError("table() needs a key", hint='for example table("user")')
        self.key = list(key)

    def check(self, schema: pa.Schema, where: str) -> None:
        for name in self.key:
            if name not in schema.names:
                raise FlowError(
                    f"{where}: the key column {name!r} does not exist",
                    hint=f"the columns are {schema.names}",
                )

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return LatestTableWriter(whose, schema, self.key)


class LatestTableWriter(SinkWriter):
    """One replica of a table."""

    def __init__(self, whose: Authority, schema: pa.Schema, key: list[str]) -> None:
        self._authority, self._schema, self._key = whose, schema, key
        self._table = StateTable({f.name: Field(f.type) for f in schema}, 1)
        self._scans: dict[int, tuple[Snapshot, float]] = {}
        self._next = 0
        self._epoch = -1

    def tables(self) -> dict[str, StateTable]:
        """The rows, for the hand-over to another replica."""
        return {"rows": self._table}

    def snapshot(self, after: int | None = None, *, whose: str = STANDBY) -> OperatorSnapshot:
        return OperatorSnapshot(self.tables(), {}, after, whose=whose)

    def install(self, state: dict[str, pa.RecordBatch]) -> None:
        self._table.install(state["rows"])

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        slots = self._table.slots(key_words([batch.column(k) for k in self._key]))
        self._table.touch(slots, epoch)
        for name in self._schema.names:
            self._table.put(name, slots, batch.column(name))

    def commit(self, epoch: int) -> int:
        self._epoch = epoch
        return epoch

    def report(self) -> dict[str, Any]:
        return {"keys": self._table.size, "bytes": self._table.nbytes, "epoch": self._epoch}

    def answer(
        self, request: Mapping[str, Any], held: Sequence[tuple[int, pa.RecordBatch]]
    ) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        match request.get("do"):
            case "get":
                return {"epoch": self._epoch}, [self._get(json.loads(request["keys"]))]
            case "scan":
                return {"epoch": self._epoch, "scan": self._begin_scan()}, []
            case "go on":
                return {"rows": 1}, self._continue_scan(int(request["scan"]))
        raise FlowError(f"sink {self._authority.sink!r}: unknown request {request.get('do')!r}")

    def _get(self, keys: list[list[Any]]) -> pa.RecordBatch:
        """Return the rows of those of these keys that have one."""
        if any(len(key) != len(self._key) for key in keys):
            raise FlowError(
                f"sink {self._authority.sink!r}: a key must have the columns {', '.join(self._key)}"
            )
        kinds = [self._schema.field(name).type for name in self._key]
        try:
            columns = [
                pa.array([key[at] for key in keys]).cast(kind) for at, kind in enumerate(kinds)
            ]
        except (pa.ArrowException, TypeError) as error:
            columns_text = ", ".join(f"{n}: {k}" for n, k in zip(self._key, kinds, strict=True))
            raise FlowError(
                f"sink {self._authority.sink!r}: a key must have the columns {columns_text}: "
                f"{error}"
            ) from error
        if not keys:
            return empty(self._schema)
        slots = self._table.find(key_words(columns))
        found = slots[slots >= 0]
        arrays = [self._table.get(name, found) for name in self._schema.names]
        return pa.RecordBatch.from_arrays(arrays, schema=self._schema)

    def _begin_scan(self) -> int:
        """Take a snapshot for a scan and return the scan's number."""
        limit = time.monotonic() - SCAN_S_MAX
        for number in [n for n, (_, at) in self._scans.items() if at < limit]:
            self._scans.pop(number)[0].close()
        if len(self._scans) >= SCANS_MAX:
            raise FlowError(f"sink {self._authority.sink!r}: {SCANS_MAX} scans are already open")
        self._next += 1
        self._scans[self._next] = (self._table.snapshot(), time.monotonic())
        return self._next

    def _continue_scan(self, number: int) -> list[pa.RecordBatch]:
        """Return the next rows of a scan, or none when it is complete."""
        if number not in self._scans:
            raise FlowError(f"sink {self._authority.sink!r}: scan {number} is closed")
        snapshot = self._scans[number][0]
        part = snapshot.next(PART_ROWS)
        if part is None:
            del self._scans[number]
            return []
        self._scans[number] = (snapshot, time.monotonic())
        rows = part.select(self._schema.names)
        return [pa.RecordBatch.from_arrays(rows.columns, schema=self._schema)]


def table(*key: str) -> Sink:
    """Keep the latest row of every key in memory, to be read while the flow runs: with
    ``run.table(name)``, over HTTP, and with ``spark.read.format("holdfast")``."""
    return LatestTable(key)
