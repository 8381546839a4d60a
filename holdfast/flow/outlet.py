"""Results that are kept until those who read them have them: the flow's end of a Spark stream.

Rows wait at the copies of the egress. Each reader has a name; it says up to which epoch it has
everything for good, and what all of them have is let go. Who the readers are is known to all
copies, so none is forgotten with a site that dies. Until all that are expected have come,
everything is kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa

from holdfast.errors import FlowError
from holdfast.flow.sinks import Authority, Sink, SinkWriter

UNREAD_BYTES_MAX = 256 << 20
ANSWER_BYTES = 8 << 20

Held = Sequence[tuple[int, pa.RecordBatch]]


class Outlet(Sink):
    """A sink that is read where it is written."""

    replicated = True

    def __init__(self, readers: int = 1, unread_bytes_max: int = UNREAD_BYTES_MAX) -> None:
        if readers < 1:
            raise FlowError(f"outlet(): readers={readers}, so nobody would read the rows")
        if unread_bytes_max <= 0:
            raise FlowError(
                f"outlet(): unread_bytes_max={unread_bytes_max} leaves no room for a row"
            )
        self.readers, self.unread_bytes_max = readers, unread_bytes_max

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return _OutletWriter(whose, self.readers)


class _OutletWriter(SinkWriter):
    def __init__(self, whose: Authority, awaited: int) -> None:
        self._whose = whose
        self._awaited = awaited
        """How many readers have yet to come before anything is let go."""
        self._readers: dict[str, int] = {}
        self._taken = self._durable = -1

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        """The egress keeps the rows."""

    def commit(self, epoch: int) -> int:
        self._taken = max(self._taken, epoch)
        if not self._awaited:
            self._durable = max(self._durable, min(self._readers.values(), default=-1))
        return self._durable

    def save(self) -> dict[str, Any]:
        return {
            "readers": dict(self._readers),
            "awaited": self._awaited,
            "durable": self._durable,
        }

    def restore(self, saved: dict[str, Any]) -> None:
        self._readers, self._awaited = dict(saved["readers"]), saved["awaited"]
        self._durable = max(self._durable, saved["durable"])

    def report(self) -> dict[str, Any]:
        behind = {reader: self._taken - epoch for reader, epoch in self._readers.items()}
        return {"epoch": self._taken, "epochs_behind": behind}

    def answer(
        self, request: Mapping[str, Any], held: Held
    ) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        match request.get("do"):
            case "begin":
                return {"epoch": self._taken if request["latest"] else self._durable}, []
            case "latest":
                after = int(request["after"])
                had = self._commit(str(request["reader"]), after)
                return {"epoch": self._latest(held, after, request["rows"]), "had": had}, []
            case "read":
                return self._read(held, int(request["after"]), int(request["upto"]))
            case "commit":
                return {"had": self._commit(str(request["reader"]), int(request["epoch"]))}, []
            case "forget":
                self._readers.pop(str(request["reader"]), None)
                return {}, []
        raise FlowError(f"sink {self._whose.sink!r} does not know how to {request.get('do')!r}")

    def _commit(self, reader: str, epoch: int) -> int:
        """A reader has everything up to `epoch` for good, and will want what follows; up to where
        it is known to have it. From the first time on it is one that counts."""
        if reader not in self._readers:
            self._expect(epoch)
            self._awaited = max(self._awaited - 1, 0)
        had = max(self._readers.get(reader, -1), min(epoch, self._taken))
        self._readers[reader] = had
        return had

    def _expect(self, after: int) -> None:
        if after < self._durable:
            raise FlowError(
                f"sink {self._whose.sink!r}: epoch {after + 1} was let go, as all readers had it",
                hint="start the query anew, with another checkpoint",
            )

    def _latest(self, held: Held, after: int, rows_max: int) -> int:
        """Up to where a reader may go that wants at most so many rows (but an epoch at least)."""
        rows, upto = 0, after
        for epoch, batch in held:
            if epoch <= after:
                continue
            rows += batch.num_rows
            if rows > rows_max >= 0 and upto > after:
                break
            upto = epoch
        return upto

    def _read(
        self, held: Held, after: int, upto: int
    ) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        """Rows of the epochs after `after`, as far as they fit into an answer. A site that leads
        since just now may not have come as far as the one before it."""
        self._expect(after)
        found: list[pa.RecordBatch] = []
        nbytes = 0
        for epoch, batch in held:
            if epoch <= after:
                continue
            nbytes += int(batch.nbytes)
            if epoch > upto or (found and nbytes > ANSWER_BYTES):
                break
            if batch.num_rows:
                found.append(batch)
            after = epoch
        return {"epoch": after}, found


def outlet(*, readers: int = 1, unread_bytes_max: int = UNREAD_BYTES_MAX) -> Sink:
    """Keep results until they are read, by ``spark.readStream.format("holdfast")``.

    Everything is kept until as many `readers` have come; then what the slowest of them lacks, so
    give the number of queries that are to have all rows. At most about `unread_bytes_max` bytes are
    kept; a flow whose readers are slower waits for them, and it ends when they have everything.
    """
    return Outlet(readers, unread_bytes_max)
