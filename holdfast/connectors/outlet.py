"""Results that are kept until those who read them have them: the flow's end of a Spark stream.

Rows wait at the replicas of the egress. Each reader has a name; it says up to which epoch it has
everything for good, and what all of them have is let go. Who the readers are is known to all
replicas, so none is forgotten with a site that dies. Until all that are expected have come,
everything is kept.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa

from holdfast.connectors.readers import Readers, ReaderState
from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.engine.durations import Seconds, positive_seconds
from holdfast.errors import FlowError

log = logging.getLogger("holdfast.outlet")

UNREAD_BYTES_MAX = 256 << 20
ANSWER_BYTES = 8 << 20
NAME_CHARS_MAX = 200
DEAF_S = 5.0
"""A site that does not get to look after its readers for so long may not have heard them either."""
AWAY_S = 5.0
"""A reader that was not seen for so long is not waited for when the flow is stopped and stored."""

Held = Sequence[tuple[int, pa.RecordBatch]]

LISTED = pa.schema(
    [
        ("reader", pa.string()),
        ("state", pa.string()),
        ("epoch", pa.int64()),
        ("epochs_behind", pa.int64()),
        ("bytes_held", pa.int64()),
        ("seen_s_ago", pa.float64()),
    ]
)
"""What is told of each reader."""


class Outlet(Sink):
    """A sink that is read where it is written."""

    replicated = True

    def __init__(
        self,
        readers: int = 1,
        unread_bytes_max: int = UNREAD_BYTES_MAX,
        reader_timeout: Seconds | None = None,
        reader_bytes_max: int | None = None,
    ) -> None:
        if readers < 1:
            raise FlowError(f"outlet(): readers={readers}, so nobody would read the rows")
        if unread_bytes_max <= 0:
            raise FlowError(
                f"outlet(): unread_bytes_max={unread_bytes_max} leaves no room for a row"
            )
        self.reader_idle_s_max: float | None = None
        if reader_timeout is not None:
            self.reader_idle_s_max = positive_seconds(
                reader_timeout,
                "outlet(): reader_timeout",
                "give more time than a query needs for a micro-batch, or is away for",
            )
        if reader_bytes_max is not None and not 0 < reader_bytes_max <= unread_bytes_max:
            raise FlowError(
                f"outlet(): reader_bytes_max={reader_bytes_max} is not between 1 and "
                f"unread_bytes_max={unread_bytes_max}, at which the flow waits",
            )
        self.readers, self.unread_bytes_max = readers, unread_bytes_max
        self.reader_bytes_max = reader_bytes_max

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        return OutletWriter(whose, self)


class OutletWriter(SinkWriter):
    """One replica's. Only the one that leads is asked, and drops readers."""

    def __init__(
        self, whose: Authority, sink: Outlet, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._whose, self._sink, self._now = whose, sink, now
        self._readers = Readers(sink.readers)
        self._taken = self._durable = -1
        self._seen: dict[str, float] = {}
        self._watched = self._looked = float("-inf")
        """Since when, and when last, this replica looked after the readers."""

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        """The egress keeps the rows."""

    def commit(self, epoch: int) -> int:
        self._taken = max(self._taken, epoch)
        self._durable = max(self._durable, self._readers.let_go(self._taken))
        return self._durable

    def save(self) -> dict[str, Any]:
        return {**self._readers.save(), "durable": self._durable}

    def restore(self, saved: dict[str, Any]) -> None:
        self._readers.restore(saved)
        self._durable = max(self._durable, saved["durable"])

    def report(self) -> dict[str, Any]:
        known = self._readers.known
        behind = {name: self._taken - r.epoch for name, r in self._readers.reading.items()}
        dropped = {n: r.state.value for n, r in known.items() if n not in behind}
        return {"epoch": self._taken, "epochs_behind": behind, "dropped": dropped}

    # --- what readers ask -----------------------------------------------------------------------

    def answer(
        self, request: Mapping[str, Any], held: Held
    ) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        match request.get("do"):
            case "begin":
                return {"epoch": self._begin(request)}, []
            case "latest":
                after = int(request["after"])
                had = self._commit(request, after)
                return {"epoch": self._latest(held, after, request["rows"]), "had": had}, []
            case "read":
                return self._read(request, held)
            case "commit":
                return {"had": self._commit(request, int(request["epoch"]))}, []
            case "look":
                return {"epoch": self._taken}, []
            case "list":
                return {}, [self._list(held)]
            case "forget":
                self._forget(str(request["reader"]))
                return {}, []
        raise FlowError(f"sink {self._whose.sink!r} does not know how to {request.get('do')!r}")

    def _begin(self, request: Mapping[str, Any]) -> int:
        """A query without a checkpoint: it gets what is kept, or what comes. From now on rows are
        held for it. Another one of that name is none any more."""
        name = self._name(request)
        epoch = self._taken if request["latest"] else self._durable
        self._put(name, epoch, self._whose.incarnation)
        return epoch

    def _commit(self, request: Mapping[str, Any], epoch: int) -> int:
        """A reader has everything up to `epoch` for good, and will want what follows; up to where
        it is known to have it. From the first time on it is one that counts."""
        name, incarnation = self._name(request), self._incarnation(request)
        self._expect(name, epoch)
        known = self._readers.known.get(name)
        # Whoever leads since just now may be behind its readers.
        had = min(epoch, max(self._taken, known.epoch if known is not None else -1))
        self._put(name, had, incarnation)
        return had

    def _put(self, name: str, epoch: int, incarnation: str) -> None:
        self._readers.put(name, epoch, incarnation)
        self._seen[name] = self._now()

    def _name(self, request: Mapping[str, Any]) -> str:
        name = str(request["reader"])
        if not 0 < len(name) <= NAME_CHARS_MAX:
            raise FlowError(
                f"sink {self._whose.sink!r}: a reader's name has 1 to {NAME_CHARS_MAX} characters"
            )
        return name

    def _incarnation(self, request: Mapping[str, Any]) -> str:
        """Of the flow whose epochs the reader counts: this one, or the one that it goes on from,
        if the reader was known there."""
        incarnation = str(request.get("incarnation", self._whose.incarnation))
        reader = self._readers.known.get(str(request["reader"]))
        known = (self._whose.incarnation, reader.incarnation if reader is not None else "")
        if incarnation not in known:
            raise FlowError(
                f"sink {self._whose.sink!r}: the query has read another life of the flow, whose "
                "epochs have nothing to do with those of this one",
                hint="start the query with a new checkpoint",
            )
        return incarnation

    def _expect(self, name: str, after: int) -> None:
        """Refuse a reader that lacks rows which are not there any more."""
        if after >= self._durable:
            return
        gone = f"{after + 1} to {self._durable}"
        begins = f"start the query with a new checkpoint: it begins with epoch {self._durable + 1}"
        reader = self._readers.known.get(name)
        if reader is None or reader.state is ReaderState.READING:
            raise FlowError(
                f"sink {self._whose.sink!r}: the rows of epochs {gone} were let go, as all readers "
                f"had them; reader {name!r} comes too late",
                hint=f"does another query use the name? If not, {begins}",
            )
        why = self._why(reader.state)
        raise FlowError(
            f"sink {self._whose.sink!r}: reader {name!r} was dropped, as {why}; "
            f"the rows of epochs {gone} are gone, and it lacks them",
            hint=f"{begins}. Give outlet() higher limits for readers that are away for longer",
        )

    def _why(self, state: ReaderState) -> str:
        match state:
            case ReaderState.IDLE:
                return f"it was not seen for {self._sink.reader_idle_s_max:g} s"
            case ReaderState.BEHIND:
                return f"more than {self._sink.reader_bytes_max} bytes were held for it"
        return "somebody had it forgotten"

    def _latest(self, held: Held, after: int, rows_max: int) -> int:
        """Up to where a reader may go that wants at most so many rows (but an epoch at least)."""
        rows = 0
        for epoch, batch in held:
            if epoch <= after:
                continue
            rows += batch.num_rows
            if rows > rows_max >= 0:
                return max(epoch - 1, after) if rows > batch.num_rows else epoch
        return max(after, self._taken)

    def _read(
        self, request: Mapping[str, Any], held: Held
    ) -> tuple[dict[str, int], list[pa.RecordBatch]]:
        """Rows of the epochs after `after`, as far as they fit into an answer. A site that leads
        since just now may not have come as far as the one before it."""
        name, after, upto = self._name(request), int(request["after"]), int(request["upto"])
        self._incarnation(request)
        self._expect(name, after)
        if name in self._readers.known:
            self._seen[name] = self._now()
        found: list[pa.RecordBatch] = []
        nbytes = 0
        for epoch, batch in held:
            if epoch <= after:
                continue
            nbytes += int(batch.nbytes)
            if epoch > upto:
                break
            if found and nbytes > ANSWER_BYTES:
                return {"epoch": epoch - 1}, found
            found.append(batch)
        return {"epoch": max(after, min(upto, self._taken))}, found

    # --- who looks after the readers ------------------------------------------------------------

    def _list(self, held: Held) -> pa.RecordBatch:
        now = self._now()
        sizes = [(epoch, int(batch.nbytes)) for epoch, batch in held]
        rows = [
            {
                "reader": name,
                "state": reader.state.value,
                "epoch": reader.epoch,
                "epochs_behind": self._taken - reader.epoch,
                "bytes_held": sum(nbytes for epoch, nbytes in sizes if epoch > reader.epoch),
                "seen_s_ago": now - self._seen[name] if name in self._seen else None,
            }
            for name, reader in self._readers.known.items()
        ]
        return pa.RecordBatch.from_pylist(rows, LISTED)

    def _forget(self, name: str) -> None:
        if name not in self._readers.known:
            raise FlowError(
                f"sink {self._whose.sink!r} has no reader {name!r}",
                hint=f"it has {', '.join(map(repr, sorted(self._readers.known))) or 'none'}",
            )
        if name in self._readers.reading:
            self._readers.drop(name, ReaderState.FORGOTTEN)

    def drop_reader(self, held_bytes: int) -> bool:
        now = self._now()
        if now - self._looked > DEAF_S:
            self._watched = now
        self._looked = now
        found = self._to_drop(now, held_bytes)
        if found is not None:
            name, why = found
            self._readers.drop(name, why)
            self._seen = {n: at for n, at in self._seen.items() if n in self._readers.known}
            log.warning("sink %r: reader %r is dropped: %s", self._whose.sink, name, self._why(why))
        return found is not None

    def _to_drop(self, now: float, held_bytes: int) -> tuple[str, ReaderState] | None:
        slowest = self._readers.slowest()
        if slowest is None:
            return None
        idle_s, bytes_max = self._sink.reader_idle_s_max, self._sink.reader_bytes_max
        for name in self._readers.reading:
            unseen = now - max(self._seen.get(name, self._watched), self._watched)
            if idle_s is not None and unseen > idle_s:
                return name, ReaderState.IDLE
        if bytes_max is not None and held_bytes >= bytes_max:
            return slowest, ReaderState.BEHIND
        return None

    def is_attended(self) -> bool:
        seen = (
            self._seen.get(n) for n, r in self._readers.reading.items() if r.epoch < self._taken
        )
        return any(at is not None and self._now() - at < AWAY_S for at in seen)


def outlet(
    *,
    readers: int = 1,
    unread_bytes_max: int = UNREAD_BYTES_MAX,
    reader_timeout: Seconds | None = None,
    reader_bytes_max: int | None = None,
) -> Sink:
    """Keep results until they are read, by ``spark.readStream.format("holdfast")``.

    Everything is kept until as many `readers` have come; then what the slowest of them lacks, so
    give the number of queries that are to have all rows. At most about `unread_bytes_max` bytes are
    kept; a flow whose readers are slower waits for them, and it ends when they have everything.

    A reader that was not seen for `reader_timeout`, or for which `reader_bytes_max` bytes
    are held, is dropped: nothing is held for it any more. When it comes back and rows are
    gone that it lacks, its query fails and says which. Without these limits a reader that never
    comes back holds the flow up, until ``run.forget_reader``.
    """
    return Outlet(readers, unread_bytes_max, reader_timeout, reader_bytes_max)
