"""Results in a PostgreSQL table, each once: rows and how far they reach in one transaction.

A small table beside the results has a row for each sink of each incarnation of a flow: the last
epoch whose rows are there, and the highest term in which anybody wrote. A writer first *claims*
that row for its term. Then it adds rows only together with moving the epoch on, and only if the
epoch is still the one it went on from and nobody of a later term has come. So of two writers that
both believe to lead one adds an epoch, and the other finds out what is there.

The rows wait in a temporary table of the session until a single statement moves the epoch and adds
them; it is sent together with its COMMIT. So a writer that is stopped at any moment, and never goes
on, holds no lock that another one waits for.

Writing is done by a thread, so that a site does not stand still while the server works, or is away.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from holdfast.connectors.postgres.columns import sql_type, why_not
from holdfast.connectors.postgres.session import Session, driver, is_temporary, said
from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.engine.durations import Seconds, seconds
from holdfast.errors import FlowError

log = logging.getLogger("holdfast.postgres")

RETRY_S, RETRY_S_MAX = 0.1, 2.0


class Postgres(Sink):
    """A table that gets every row once, by insertion or, with a key, by replacing what is there."""

    def __init__(
        self,
        dsn: str,
        table: str,
        *,
        key: Sequence[str] = (),
        create: bool = False,
        interval: Seconds = 0.5,
        held_bytes_max: int = 64 << 20,
        progress: str | None = None,
    ) -> None:
        if isinstance(key, str):
            raise FlowError(f"postgres({table!r}): key is a list of columns, not {key!r}")
        if held_bytes_max < 1:
            raise FlowError(
                f"postgres({table!r}): held_bytes_max must be positive, not {held_bytes_max}"
            )
        self.dsn, self.table, self.key, self.create = dsn, table, list(key), create
        self.interval_s = seconds(interval, f"postgres({table!r}): interval")
        self.held_bytes_max = held_bytes_max
        schema = table.rpartition(".")[0]
        self.progress = progress or ".".join(filter(None, [schema, "holdfast_sinks"]))

    def check(self, schema: pa.Schema, where: str) -> None:
        for field in schema:
            if sql_type(field.type) is None:
                raise FlowError(
                    f"{where}: PostgreSQL has no type for the column {field.name!r}, {field.type}",
                    hint=why_not(field.type),
                )
        for name in self.key:
            if name not in schema.names:
                raise FlowError(
                    f"{where}: there is no column {name!r} to be a key",
                    hint=f"the columns are {', '.join(schema.names)}",
                )

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        session = Session(self, whose, schema)
        session.begin()
        return _PostgresWriter(self, session, whose.after, whose.after)

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        """The server is asked by the writer's thread: it may be away just now."""
        session = Session(self, whose, schema)
        return _PostgresWriter(self, session, durable, whose.confirmed(durable)), durable


class _PostgresWriter(SinkWriter):
    """Holds rows until a thread has added them. The server may be away for any time: then rows are
    held until there are `held_bytes_max` bytes, and from there on the sink has no room."""

    def __init__(
        self, sink: Postgres, session: Session, durable: int, confirmed: int | None
    ) -> None:
        self._sink, self._session = sink, session
        self._confirmed = confirmed
        """The server has had at least this epoch; None if it may not know of the flow."""
        self._changed = threading.Condition()
        self._held: deque[tuple[int, pa.RecordBatch]] = deque()
        self._held_bytes = 0
        self._committed = self._epoch = durable
        self._rows = 0
        self._rolled = -sink.interval_s
        self._closing = self._abandoned = self._superseded = False
        self._claimed = session.connected
        self._away: str | None = None
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="holdfast-postgres", daemon=True)
        self._thread.start()

    # --- what the egress calls ------------------------------------------------------------------

    def write(self, epoch: int, batch: pa.RecordBatch) -> None:
        with self._changed:
            if batch.num_rows and epoch > self._epoch:
                self._held.append((epoch, batch))
                self._held_bytes += batch.nbytes

    def commit(self, epoch: int) -> int:
        with self._changed:
            self._committed = epoch
            self._changed.notify()
            self._raise()
            return self._epoch

    def room(self) -> bool:
        with self._changed:
            self._raise()
            return self._held_bytes < self._sink.held_bytes_max

    def close(self) -> None:
        """Waits for the server, if need be."""
        self._end(closing=True)
        self._thread.join()
        self._raise()

    def abandon(self) -> None:
        self._end(abandoned=True)

    def _end(self, closing: bool = False, abandoned: bool = False) -> None:
        with self._changed:
            self._closing |= closing
            self._abandoned |= abandoned
            self._changed.notify()

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error

    def report(self) -> dict[str, Any]:
        with self._changed:
            held = sum(b.num_rows for _, b in self._held)
            return {"rows": self._rows, "held_rows": held, "away": self._away}

    # --- the thread -----------------------------------------------------------------------------

    def _run(self) -> None:
        pause = RETRY_S
        try:
            while (upto := self._wait_until_due()) is not None:
                if self._try(upto):
                    pause = RETRY_S
                else:
                    self._wait(pause)
                    pause = min(2 * pause, RETRY_S_MAX)
        except Exception as error:
            with self._changed:
                self._error = error
        finally:
            self._session.close()

    def _wait_until_due(self) -> int | None:
        """The epoch up to which rows are to be added now; None when there is nothing left to do."""
        with self._changed:
            while not (self._abandoned or self._superseded):
                if not self._held and self._closing:
                    return None
                ready = self._held and self._held[0][0] <= self._committed
                wait = self._rolled + self._sink.interval_s - time.monotonic()
                full = self._held_bytes >= self._sink.held_bytes_max // 2
                if ready and (wait <= 0 or full or self._closing):
                    return self._committed
                self._changed.wait(max(wait, 0.0) if ready else None)
        return None

    def _wait(self, pause: float) -> None:
        with self._changed:
            if not self._abandoned:
                self._changed.wait(pause)

    def _try(self, upto: int) -> bool:
        """Get further, or find out where things stand; whether the server was there."""
        psycopg = driver()
        with self._changed:
            group = [b for e, b in self._held if e <= upto]
        try:
            if not self._session.connected:
                self._claimed = False
                self._session.connect()
            if self._claimed and self._session.put(self._epoch, upto, group):
                self._reach(upto, sum(b.num_rows for b in group))
            else:
                self._find_out()
        except psycopg.Error as error:
            self._session.close()
            if is_temporary(error):
                self._note_away(said(error))
                return False
            raise self._session.refused(error, self._epoch, upto) from error
        return True

    def _find_out(self) -> None:
        """Claim, and go on from what is there. If another one has a later term this one is done: it
        does not lead any more, and will be told. If less is there than before, rows are gone that
        nobody here has any more."""
        epoch = self._session.claim(self._confirmed)
        self._claimed = True
        if epoch is None:
            with self._changed:
                self._superseded = True
        else:
            self._reach(epoch, 0)

    def _reach(self, epoch: int, rows: int) -> None:
        with self._changed:
            self._epoch = self._confirmed = epoch
            self._rows += rows
            while self._held and self._held[0][0] <= epoch:
                self._held_bytes -= self._held.popleft()[1].nbytes
            self._away = None
            if rows:
                self._rolled = time.monotonic()

    def _note_away(self, why: str) -> None:
        with self._changed:
            first, self._away = self._away is None, why
        if first:
            log.warning(
                "table %s: rows are held until the server is back: %s", self._sink.table, why
            )


def postgres(
    dsn: str,
    table: str,
    *,
    key: Sequence[str] = (),
    create: bool = False,
    interval: Seconds = 0.5,
    held_bytes_max: int = 64 << 20,
    progress: str | None = None,
) -> Sink:
    """Add every row once to a PostgreSQL table, in transactions at most every `interval`
    (half a second).

    The columns go by name. With a `key` (which needs a unique index) a row replaces the one with
    the same key: the latest wins. `create` makes the table if it is missing. While the server is
    away rows are held, up to `held_bytes_max`; then the source is held back. How far the results
    reach is kept in the table `progress`, by default ``holdfast_sinks`` in the same schema. A
    password is better in a ``PGPASSFILE`` on the sites than in the `dsn`, which travels with the
    flow.
    """
    return Postgres(
        dsn,
        table,
        key=key,
        create=create,
        interval=interval,
        held_bytes_max=held_bytes_max,
        progress=progress,
    )
