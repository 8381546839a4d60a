"""A PostgreSQL table as a sink: every row exactly once. One transaction adds rows and records the
last epoch.

A small progress table has a row for each sink of each incarnation of a flow: the last epoch whose
rows are in the results, and the highest term that has written. A writer first *claims* that row for
its term. Afterwards it adds rows only in the statement that advances the epoch, which succeeds only
if the epoch is still the one that the writer continues from and no later term has claimed. So if
two writers both believe that they lead, only one adds an epoch, and the other reads the new state.

The rows wait in a temporary table of the session until a single statement advances the epoch and
adds them. The writer sends that statement together with its COMMIT. So a writer that is paused at
any moment, even forever, holds no lock that another writer waits for.

A thread writes, so that the site does not block while the server works or does not answer.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from holdfast.connectors.postgres.columns import hint_for, sql_type
from holdfast.connectors.postgres.session import Session, driver, is_temporary, message_of
from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.engine.durations import Seconds, seconds
from holdfast.errors import FlowError

log = logging.getLogger("holdfast.postgres")

RETRY_S, RETRY_S_MAX = 0.1, 2.0


class Postgres(Sink):
    """Inserts every row exactly once or, with a key, replaces the row of the same key."""

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
            raise FlowError(f"postgres({table!r}): key must be a list of columns, not {key!r}")
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
                    hint=hint_for(field.type),
                )
        for name in self.key:
            if name not in schema.names:
                raise FlowError(
                    f"{where}: the key column {name!r} does not exist",
                    hint=f"the columns are {', '.join(schema.names)}",
                )

    def open(self, whose: Authority, schema: pa.Schema) -> SinkWriter:
        session = Session(self, whose, schema)
        session.begin()
        return _PostgresWriter(self, session, whose.after, whose.after)

    def resume(self, whose: Authority, schema: pa.Schema, durable: int) -> tuple[SinkWriter, int]:
        """The writer's thread asks the server later: it may not answer now."""
        session = Session(self, whose, schema)
        return _PostgresWriter(self, session, durable, whose.confirmed(durable)), durable


class _PostgresWriter(SinkWriter):
    """Holds rows until a thread has added them. While the server does not answer, the writer holds
    up to `held_bytes_max` bytes; at that bound the sink has no room."""

    def __init__(
        self, sink: Postgres, session: Session, durable: int, confirmed: int | None
    ) -> None:
        self._sink, self._session = sink, session
        self._confirmed = confirmed
        """The epoch that the server must have at least; None if it may not know the flow."""
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
        """Write everything, waiting for the server if necessary."""
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
                if self._advance(upto):
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
        """Wait for rows and return the epoch up to which to add them; None at the end."""
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

    def _advance(self, upto: int) -> bool:
        """Add rows, or claim and read the last epoch. Return whether the server answered."""
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
                self._claim()
        except psycopg.Error as error:
            self._session.close()
            if is_temporary(error):
                self._note_away(message_of(error))
                return False
            raise self._session.refused(error, self._epoch, upto) from error
        return True

    def _claim(self) -> None:
        """Claim, and continue from the server's last epoch. If another writer has a later term,
        this one stops: it no longer leads, and its site will learn that. Raises if the server has
        less than before, because then rows are gone that the flow no longer has."""
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
                "table %s: holding rows until the server answers: %s", self._sink.table, why
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
    """Add every row exactly once to a PostgreSQL table, in transactions at most every `interval`
    (half a second).

    Columns are matched by name. With a `key` (which needs a unique index) a row replaces the row
    with the same key, so the latest wins. `create` creates the table if it does not exist. While
    the server does not answer, the sink holds up to `held_bytes_max` bytes of rows; then it holds
    back the source. The table `progress`, by default ``holdfast_sinks`` in the same schema, records
    the last epoch. Put the password into a ``PGPASSFILE`` on the sites rather than into the `dsn`,
    which is sent to all sites with the flow.
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
