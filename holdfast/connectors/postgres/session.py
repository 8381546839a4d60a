"""A writer's connection to PostgreSQL: its checks, its claim and its inserts.

This module does not wait or retry; the writer does.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa

from holdfast.connectors.postgres.columns import Column, sql_type, to_csv
from holdfast.connectors.sinks import Authority
from holdfast.errors import SinkError, SinkRewoundError

if TYPE_CHECKING:
    from holdfast.connectors.postgres.sink import Postgres

ROW = "__row"
"""With a key: the column of the temporary table that numbers the rows, so that the latest wins."""
CHUNK_ROWS = 65_536

DSN_DEFAULTS = {
    "connect_timeout": "10",
    "keepalives_idle": "10",
    "keepalives_interval": "5",
    "keepalives_count": "3",
    "tcp_user_timeout": "30000",
}
"""Defaults for the dsn, with which the client detects a server that has vanished."""

TEMPORARY = ("08", "40", "53", "55", "57", "58", "25006")
"""SQLSTATEs, or their classes, of a server that is shutting down, starting, full, or a standby. The
writer keeps the rows and tries again."""

PROGRESS = """(
    flow text, sink text, incarnation text, epoch bigint NOT NULL, term bigint NOT NULL,
    PRIMARY KEY (flow, sink, incarnation)
)"""

COLUMNS = """
SELECT a.attname, format_type(b.oid, NULL), b.typcategory,
    format_type(b.oid, CASE WHEN t.typtype = 'd' THEN t.typtypmod ELSE a.atttypmod END)
FROM pg_attribute a JOIN pg_type t ON t.oid = a.atttypid
JOIN pg_type b ON b.oid = CASE WHEN t.typtype = 'd' THEN t.typbasetype ELSE t.oid END
WHERE a.attrelid = to_regclass(%s) AND a.attnum > 0 AND NOT a.attisdropped
"""


class Session:
    """The connection of one writer. Every method except `close` may raise the driver's errors;
    errors that a user can fix are `SinkError`."""

    def __init__(self, sink: Postgres, whose: Authority, schema: pa.Schema) -> None:
        self._sink, self._authority, self._schema = sink, whose, schema
        self._connection: Any = None
        self._sql: dict[str, Any] = {}

    # --- connecting -----------------------------------------------------------------------------

    @property
    def connected(self) -> bool:
        return self._connection is not None and not self._connection.closed

    def connect(self) -> None:
        psycopg = driver()
        try:
            given = psycopg.conninfo.conninfo_to_dict(self._sink.dsn)
        except psycopg.Error:
            # The driver's message would show parts of the dsn, and so the password.
            raise self._error(
                "libpq cannot parse the dsn", "see the libpq manual on connection strings"
            ) from None
        name = f"holdfast {self._authority.flow}/{self._authority.sink}"
        named = {**DSN_DEFAULTS, "application_name": name[:63], **given}
        self._connection = psycopg.connect(**named, autocommit=True, prepare_threshold=None)
        self._execute(
            "SET client_encoding = 'UTF8'; SET DateStyle = 'ISO'; SET TimeZone = 'UTC';"
            "SET default_transaction_isolation = 'read committed';"
            # Rows that were reported durable must survive a crash of the server.
            "SELECT set_config('synchronous_commit', 'on', false)"
            " WHERE current_setting('synchronous_commit') = 'off'"
        )
        self._write_statements()

    def close(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def begin(self) -> None:
        """Before the first epoch: create missing tables, check existing ones, and claim."""
        psycopg = driver()
        try:
            self.connect()
            self._make_progress_table()
            if self._sink.create:
                self._create_table()
            self._check_columns()
            self._try_statements()
            self._check_predecessor()
            epoch = self.claim()
        except psycopg.Error as error:
            raise self._error(message_of(error), "see the server's message") from error
        if epoch is not None and epoch > self._authority.after:
            raise self._error(
                f"the table already has results of this incarnation, up to epoch {epoch}",
                "start the flow with another secret (HOLDFAST_SECRET), or delete its results and "
                f"its row in {self._sink.progress}",
            )

    def _check_predecessor(self) -> None:
        """Raise if rows of the stopped flow that this one continues are missing."""
        if self._authority.before is not None:
            incarnation, confirmed = self._authority.before
            found = self._epoch_of(incarnation)
            if found is None or found < confirmed:
                raise self._rewound(incarnation, confirmed, found)

    def _epoch_of(self, incarnation: str) -> int | None:
        """Return the last epoch of an incarnation; None if the server does not know it."""
        sql = driver().sql
        statement = sql.SQL(
            "SELECT epoch FROM {} WHERE flow = {} AND sink = {} AND incarnation = {}"
        )
        row = self._execute(
            statement.format(
                _identifier(self._sink.progress),
                self._authority.flow,
                self._authority.sink,
                incarnation,
            )
        ).fetchone()
        return None if row is None else int(row[0])

    def _rewound(self, incarnation: str, confirmed: int, found: int | None) -> SinkRewoundError:
        sql = driver().sql
        repair = sql.SQL(
            "INSERT INTO {} VALUES ({}, {}, {}, {}, 0) "
            "ON CONFLICT (flow, sink, incarnation) DO UPDATE SET epoch = EXCLUDED.epoch"
        ).format(
            _identifier(self._sink.progress),
            self._authority.flow,
            self._authority.sink,
            incarnation,
            sql.Literal(confirmed),
        )
        return SinkRewoundError(
            self._authority.sink,
            confirmed,
            -1 if found is None else found,
            f"table {self._sink.table}: is this another server, a standby that lacks the last "
            f"transactions, or a restored backup? Go back to the server that has them and continue "
            f"with restore_from=. To continue without these rows, or after adding them, first "
            f"execute: {repair.as_string(self._connection)}",
        )

    def _error(self, what: str, hint: str | None = None) -> SinkError:
        return SinkError(
            f"flow {self._authority.flow!r}, sink {self._authority.sink!r}, "
            f"table {self._sink.table}: {what}",
            hint=hint,
        )

    # --- checks before the first row ------------------------------------------------------------

    def _exists(self, table: str) -> bool:
        name = _identifier(table).as_string(self._connection)
        row = self._connection.execute("SELECT to_regclass(%s) IS NOT NULL", [name]).fetchone()
        return bool(row[0])

    def _make_progress_table(self) -> None:
        """Create the progress table if it is missing. A user without the permission to create
        tables can have it created beforehand."""
        psycopg = driver()
        if self._exists(self._sink.progress):
            return
        made = psycopg.sql.SQL("CREATE TABLE IF NOT EXISTS {} " + PROGRESS)
        try:
            self._execute(made.format(_identifier(self._sink.progress)))
        except psycopg.errors.UniqueViolation:
            pass  # another flow created it at the same time
        except psycopg.errors.InsufficientPrivilege as error:
            hint = f"have it created: CREATE TABLE {self._sink.progress} {PROGRESS}"
            what = f"the table {self._sink.progress} is missing: {message_of(error)}"
            raise self._error(what, hint) from error

    def _create_table(self) -> None:
        if self._exists(self._sink.table):
            return
        sql = driver().sql
        parts = [
            sql.SQL("{} {}").format(sql.Identifier(f.name), sql.SQL(sql_type(f.type)))
            for f in self._schema
        ]
        if self._sink.key:
            parts.append(sql.SQL("PRIMARY KEY ({})").format(_names(self._sink.key)))
        made = sql.SQL("CREATE TABLE IF NOT EXISTS {} ({})")
        self._execute(made.format(_identifier(self._sink.table), sql.SQL(", ").join(parts)))

    def _check_columns(self) -> None:
        name = _identifier(self._sink.table).as_string(self._connection)
        found = {n: Column(*rest) for n, *rest in self._connection.execute(COLUMNS, [name])}
        if not found:
            raise self._error(
                "the table does not exist", "create it, or set postgres(..., create=True)"
            )
        for field in self._schema:
            column = found.get(field.name)
            if column is None:
                raise self._error(
                    f"the table has no column {field.name!r}",
                    f"its columns are {', '.join(sorted(found))}",
                )
            if not column.holds(field.type):
                raise self._error(
                    f"the column {field.name!r} is {column.full}, which cannot hold every value of "
                    f"{field.type}",
                    f"change it to {sql_type(field.type)}, or cast the stream's column",
                )

    def _try_statements(self) -> None:
        """Let the server explain the statements without executing them, which detects a key without
        a unique index and missing permissions."""
        psycopg = driver()
        self._execute("BEGIN")
        try:
            self._execute(self._sql["stage"])
            self._execute(psycopg.sql.SQL("EXPLAIN ") + self._put(-1, 0))
        except psycopg.errors.InvalidColumnReference as error:
            names = ", ".join(self._sink.key)
            raise self._error(
                f"no unique index has exactly the key's columns ({names})",
                f"ALTER TABLE {self._sink.table} ADD UNIQUE ({names})",
            ) from error
        finally:
            self._execute("ROLLBACK")

    # --- epochs ---------------------------------------------------------------------------------

    def claim(self, confirmed: int | None = None) -> int | None:
        """Fence earlier terms. Return the last epoch on the server, or None if a later term has
        claimed. `confirmed` is the epoch that the server must have at least (see
        `Authority.confirmed`); raises `SinkRewoundError` if it has less."""
        if confirmed is None:
            self._execute(self._sql["admit"])
        elif not self._exists(self._sink.progress):
            raise self._rewound(self._authority.incarnation, confirmed, None)
        row = self._execute(self._sql["claim"]).fetchone()
        found = self._epoch_of(self._authority.incarnation) if row is None else int(row[0])
        if confirmed is not None and (found is None or found < confirmed):
            raise self._rewound(self._authority.incarnation, confirmed, found)
        return None if row is None else found

    def put(self, after: int, upto: int, batches: Sequence[pa.RecordBatch]) -> bool:
        """Add the rows of the epochs above `after` up to `upto`. Return False if the epoch was no
        longer `after`, or a later term has claimed."""
        self._execute("BEGIN")
        self._execute(self._sql["stage"])
        cursor, row = self._connection.cursor(), 0
        with cursor.copy(self._sql["copy"]) as copy:
            for batch in batches:
                for at in range(0, batch.num_rows, CHUNK_ROWS):
                    chunk = batch.slice(at, CHUNK_ROWS)
                    copy.write(memoryview(to_csv(self._numbered(chunk, row))))
                    row += chunk.num_rows
        won = self._execute(self._put(after, upto) + driver().sql.SQL("; COMMIT")).fetchone()
        return bool(won[0])

    def _numbered(self, batch: pa.RecordBatch, first: int) -> pa.RecordBatch:
        if not self._sink.key:
            return batch
        return batch.append_column(ROW, pa.array(np.arange(first, first + batch.num_rows)))

    def _execute(self, statement: Any) -> Any:
        return self._connection.execute(statement)

    def _write_statements(self) -> None:
        sql = driver().sql
        authority, progress = self._authority, _identifier(self._sink.progress)
        names, table = _names(self._schema.names), _identifier(self._sink.table)
        numbered = sql.SQL(f', 0::bigint AS "{ROW}"' if self._sink.key else "")
        self._sql["stage"] = sql.SQL(
            "CREATE TEMPORARY TABLE __holdfast_rows ON COMMIT DROP "
            "AS SELECT {}{} FROM {} WITH NO DATA"
        ).format(names, numbered, table)
        self._sql["copy"] = sql.SQL("COPY pg_temp.__holdfast_rows FROM STDIN (FORMAT csv)")
        mine = sql.SQL("flow = {} AND sink = {} AND incarnation = {} AND term <= {}").format(
            authority.flow, authority.sink, authority.incarnation, authority.term
        )
        self._sql["admit"] = sql.SQL(
            "INSERT INTO {} VALUES ({}, {}, {}, {}, {}) ON CONFLICT DO NOTHING"
        ).format(
            progress,
            authority.flow,
            authority.sink,
            authority.incarnation,
            authority.after,
            authority.term,
        )
        self._sql["claim"] = sql.SQL("UPDATE {} SET term = {} WHERE {} RETURNING epoch").format(
            progress, authority.term, mine
        )
        self._sql["mine"], self._sql["rows"] = mine, self._insertion(table, names)

    def _put(self, after: int, upto: int) -> Any:
        """Return the statement that advances the epoch and, if that succeeds, adds the rows."""
        return (
            driver()
            .sql.SQL(
                "WITH won AS (UPDATE {} SET epoch = {}, term = {} WHERE {} AND epoch = {} "
                "RETURNING epoch), put AS ({}) SELECT count(*) FROM won"
            )
            .format(
                _identifier(self._sink.progress),
                upto,
                self._authority.term,
                self._sql["mine"],
                after,
                self._sql["rows"],
            )
        )

    def _insertion(self, table: Any, names: Any) -> Any:
        sql = driver().sql
        into = sql.SQL("INSERT INTO {} ({}) SELECT ").format(table, names)
        rows = sql.SQL("{} FROM pg_temp.__holdfast_rows WHERE EXISTS (SELECT FROM won)").format(
            names
        )
        if not self._sink.key:
            return into + rows
        others = [n for n in self._schema.names if n not in self._sink.key]
        sets = [sql.SQL("{0} = EXCLUDED.{0}").format(sql.Identifier(n)) for n in others]
        action = sql.SQL("UPDATE SET ") + sql.SQL(", ").join(sets) if sets else sql.SQL("NOTHING")
        return into + sql.SQL(
            f'DISTINCT ON ({{0}}) {{1}} ORDER BY {{0}}, "{ROW}" DESC ON CONFLICT ({{0}}) DO {{2}}'
        ).format(_names(self._sink.key), rows, action)

    def refused(self, error: Exception, after: int, upto: int) -> SinkError:
        return self._error(
            f"the server refused the rows of epochs {after + 1} to {upto}: {message_of(error)}"
        )


def is_temporary(error: Exception) -> bool:
    """Whether the server may accept the same rows later."""
    state = getattr(error, "sqlstate", None)
    return state is None or state.startswith(TEMPORARY)


def message_of(error: Exception) -> str:
    """Return the message of the server or the driver, without the statement."""
    diagnosis = getattr(error, "diag", None)
    parts = [getattr(diagnosis, n, None) for n in ("message_primary", "message_detail", "context")]
    return "; ".join(p for p in parts if p) or str(error).strip()


def driver() -> Any:
    try:
        import psycopg
        import psycopg.conninfo
        import psycopg.sql
    except ImportError as error:
        raise SinkError(
            f"cannot import the PostgreSQL driver: {error}",
            hint="pip install 'holdfast[postgres]', here and where the sites run",
        ) from error
    return psycopg


def _identifier(table: str) -> Any:
    return driver().sql.Identifier(*table.split("."))


def _names(names: Sequence[str]) -> Any:
    sql = driver().sql
    return sql.SQL(", ").join(sql.Identifier(n) for n in names)
