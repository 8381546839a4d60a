"""A sink that holds results until its readers have them: the flow's side of a Spark stream.

The replicas of the egress hold the rows. Each reader has a name and commits epochs that it has
stored; the sink drops rows that all readers have committed. All replicas know the readers, so no
reader is lost with a site. Until all expected readers have registered, the sink holds everything.
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
STALL_S = 5.0
"""After a gap this long in `drop_reader` calls, the idle time of all readers starts anew: a site
that was stalled may have missed their requests."""
INACTIVE_S = 5.0
"""A flow that is stopped and stored does not wait for a reader that was inactive this long."""

Held = Sequence[tuple[int, pa.RecordBatch]]

READER_COLUMNS = pa.schema(
    [
        ("reader", pa.string()),
        ("state", pa.string()),
        ("epoch", pa.int64()),
        ("epochs_behind", pa.int64()),
        ("bytes_held", pa.int64()),
        ("seen_s_ago", pa.float64()),
    ]
)
"""The columns of the list of readers."""


class Outlet(Sink):
    """A sink that readers read from the egress; see `outlet`."""

    replicated = True

    def __init__(
        self,
        readers: int = 1,
        unread_bytes_max: int = UNREAD_BYTES_MAX,
        reader_timeout: Seconds | None = None,
        reader_bytes_max: int | None = None,
    ) -> None:
        if readers < 1:
            raise FlowError(f"outlet(): readers={readers}: no reader would get the rows")
        if unread_bytes_max <= 0:
            raise FlowError(
                f"outlet(): unread_bytes_max={unread_bytes_max} leaves no room for a row"
            )
        self.reader_idle_s_max: float | None = None
        if reader_timeout is not None:
            self.reader_idle_s_max = positive_seconds(
                reader_timeout,
                "outlet(): reader_timeout",
                "allow more time than a query needs for a micro-batch or a restart",
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
    """One replica of an outlet. Only the leading one answers and drops readers."""

    def __init__(
        self, whose: Authority, sink: Outlet, now: Callable[[], float] = time.monotonic
    ) -> None:
        self._authority, self._sink, self._now = whose, sink, now
        self._readers = Readers(sink.readers)
        self._taken = self._durable = -1
        self._seen: dict[str, float] = {}
        self._watched_since = self._checked_at = float("-inf")
        """The first and the last time that this replica checked the readers without a gap."""

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        """Do nothing: the egress holds the rows."""

    def commit(self, epoch: int) -> int:
        self._taken = max(self._taken, epoch)
        self._durable = max(self._durable, self._readers.unneeded_upto(self._taken))
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

    # --- requests of readers --------------------------------------------------------------------

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
        raise FlowError(f"sink {self._authority.sink!r}: unknown request {request.get('do')!r}")

    def _begin(self, request: Mapping[str, Any]) -> int:
        """Register a query without a checkpoint, from the first held epoch or the next one on. The
        sink holds rows for it from now on. It replaces an earlier reader of the same name."""
        name = self._name(request)
        epoch = self._taken if request["latest"] else self._durable
        self._put(name, epoch, self._authority.incarnation)
        return epoch

    def _commit(self, request: Mapping[str, Any], epoch: int) -> int:
        """Note that a reader has stored everything up to `epoch`, and return the committed epoch.
        The first commit registers the reader."""
        name, incarnation = self._name(request), self._incarnation(request)
        self._check_held(name, epoch)
        known = self._readers.known.get(name)
        # A new leader may be behind its readers.
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
                f"sink {self._authority.sink!r}: a reader's name must have 1 to {NAME_CHARS_MAX} "
                "characters"
            )
        return name

    def _incarnation(self, request: Mapping[str, Any]) -> str:
        """Return the incarnation whose epochs the reader counts: this one, or the one that this
        flow continues if the reader was known there."""
        incarnation = str(request.get("incarnation", self._authority.incarnation))
        reader = self._readers.known.get(str(request["reader"]))
        known = (self._authority.incarnation, reader.incarnation if reader is not None else "")
        if incarnation not in known:
            raise FlowError(
                f"sink {self._authority.sink!r}: the query has read another incarnation of the "
                "flow, whose epochs are unrelated to those of this one",
                hint="start the query with a new checkpoint",
            )
        return incarnation

    def _check_held(self, name: str, after: int) -> None:
        """Refuse a reader that lacks rows that are gone."""
        if after >= self._durable:
            return
        gone = f"{after + 1} to {self._durable}"
        begins = f"start the query with a new checkpoint; it begins at epoch {self._durable + 1}"
        reader = self._readers.known.get(name)
        if reader is None or reader.state is ReaderState.READING:
            raise FlowError(
                f"sink {self._authority.sink!r}: reader {name!r} is too late: the rows of epochs "
                f"{gone} were dropped, as all readers had them",
                hint=f"does another query use the name? If not, {begins}",
            )
        why = self._why(reader.state)
        raise FlowError(
            f"sink {self._authority.sink!r}: reader {name!r} was dropped because {why}; "
            f"it lacks the rows of epochs {gone}, which are gone",
            hint=f"{begins}. Set higher limits in outlet() for readers that pause for longer",
        )

    def _why(self, state: ReaderState) -> str:
        match state:
            case ReaderState.IDLE:
                return f"it was inactive for {self._sink.reader_idle_s_max:g} s"
            case ReaderState.BEHIND:
                return f"more than {self._sink.reader_bytes_max} bytes were held for it"
        return "a user had it forgotten"

    def _latest(self, held: Held, after: int, rows_max: int) -> int:
        """Return the last epoch of a read with at most `rows_max` rows, but at least one epoch."""
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
        """Return rows of the epochs above `after`, up to `upto`, as far as they fit into an answer.
        A new leader may not have processed as many epochs as the one before it."""
        name, after, upto = self._name(request), int(request["after"]), int(request["upto"])
        self._incarnation(request)
        self._check_held(name, after)
        if name in self._readers.known:
            self._seen[name] = self._now()
        batches: list[pa.RecordBatch] = []
        nbytes = 0
        for epoch, batch in held:
            if epoch <= after:
                continue
            nbytes += int(batch.nbytes)
            if epoch > upto:
                break
            if batches and nbytes > ANSWER_BYTES:
                return {"epoch": epoch - 1}, batches
            batches.append(batch)
        return {"epoch": max(after, min(upto, self._taken))}, batches

    # --- listing and dropping readers -----------------------------------------------------------

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
        return pa.RecordBatch.from_pylist(rows, READER_COLUMNS)

    def _forget(self, name: str) -> None:
        if name not in self._readers.known:
            raise FlowError(
                f"sink {self._authority.sink!r} has no reader {name!r}",
                hint=f"its readers: {', '.join(map(repr, sorted(self._readers.known))) or 'none'}",
            )
        if name in self._readers.reading:
            self._readers.drop(name, ReaderState.FORGOTTEN)

    def drop_reader(self, held_bytes: int) -> bool:
        now = self._now()
        if now - self._checked_at > STALL_S:
            self._watched_since = now
        self._checked_at = now
        drop = self._to_drop(now, held_bytes)
        if drop is not None:
            name, why = drop
            self._readers.drop(name, why)
            self._seen = {n: at for n, at in self._seen.items() if n in self._readers.known}
            log.warning(
                "sink %r: dropped reader %r: %s", self._authority.sink, name, self._why(why)
            )
        return drop is not None

    def _to_drop(self, now: float, held_bytes: int) -> tuple[str, ReaderState] | None:
        slowest = self._readers.slowest()
        if slowest is None:
            return None
        idle_s, bytes_max = self._sink.reader_idle_s_max, self._sink.reader_bytes_max
        for name in self._readers.reading:
            unseen = now - max(self._seen.get(name, self._watched_since), self._watched_since)
            if idle_s is not None and unseen > idle_s:
                return name, ReaderState.IDLE
        if bytes_max is not None and held_bytes >= bytes_max:
            return slowest, ReaderState.BEHIND
        return None

    def is_attended(self) -> bool:
        seen = (
            self._seen.get(n) for n, r in self._readers.reading.items() if r.epoch < self._taken
        )
        return any(at is not None and self._now() - at < INACTIVE_S for at in seen)


def outlet(
    *,
    readers: int = 1,
    unread_bytes_max: int = UNREAD_BYTES_MAX,
    reader_timeout: Seconds | None = None,
    reader_bytes_max: int | None = None,
) -> Sink:
    """Hold results until ``spark.readStream.format("holdfast")`` has read them.

    The sink holds all rows until `readers` readers have registered, and then the rows that the
    slowest of them lacks: set `readers` to the number of queries that must get all rows. It holds
    at most about `unread_bytes_max` bytes. The flow waits for readers that are slower, and ends
    when they have everything.

    The sink drops a reader that was inactive for `reader_timeout`, or for which it holds
    `reader_bytes_max` bytes, and holds no more rows for it. If the reader returns and lacks rows
    that are gone, its query fails and names their epochs. Without these limits a reader that never
    returns blocks the flow until ``run.forget_reader``.
    """
    return Outlet(readers, unread_bytes_max, reader_timeout, reader_bytes_max)
