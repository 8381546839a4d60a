"""The PostgreSQL sink with a real server: every value, every refusal, and every row once, whatever
is killed, stopped or restarted."""

import datetime
import decimal
import math
import os
import pickle
import random
import signal
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import psycopg
import pyarrow as pa
import pytest

from holdfast import Flow, FlowError, SinkError, SinkRewoundError
from holdfast import functions as F
from holdfast.api.options import Checkpoint, Options
from holdfast.connectors.postgres.session import Session
from holdfast.connectors.postgres.sink import Postgres
from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.control.run import Run
from holdfast.protections import pairs
from holdfast.sinks import postgres
from holdfast.sources import generator, rows
from tests.support.lines import SCHEMA, numbers
from tests.support.pages import pages_that_need, run_page
from tests.support.postgres_server import PostgresServer
from tests.support.runs import (
    exists,
    kill,
    pids,
    replicas,
    taken,
    until,
    until_protected,
    until_rows,
)

ROWS = pa.schema([("n", pa.int64()), ("s", pa.string())])


@pytest.fixture
def name(database: PostgresServer) -> str:
    """Of a table that no other test has."""
    return f"t_{uuid.uuid4().hex[:12]}"


@pytest.fixture
def ask(database: PostgresServer) -> Iterator[Callable[..., list[tuple]]]:
    """Run a statement, on whatever connection there is; gives the rows."""

    def asked(statement: str) -> list[tuple]:
        with psycopg.connect(database.dsn, autocommit=True) as connection:
            cursor = connection.execute(statement)
            return cursor.fetchall() if cursor.description else []

    yield asked


def whose(term: int = 1, incarnation: str = "first", flow: str = "flow") -> Authority:
    return Authority(flow, "out", incarnation, term)


def some(*numbers: int, text: str = "x") -> pa.RecordBatch:
    return pa.record_batch({"n": pa.array(numbers, pa.int64()), "s": [text] * len(numbers)})


def give(writer: SinkWriter, epoch: int, batch: pa.RecordBatch) -> int:
    writer.write(epoch, batch)
    return writer.commit(epoch)


def written(sink: Any, batch: pa.RecordBatch, by: Authority) -> None:
    writer = sink.open(by, batch.schema)
    give(writer, 0, batch)
    writer.close()


# --- values -------------------------------------------------------------------------------------

NAN, INF = float("nan"), float("inf")
BERLIN = datetime.timezone(datetime.timedelta(hours=2))
MOMENT = datetime.datetime(2024, 6, 1, 12, 30, 15, 123456)
TEXTS = [
    "",
    "it's",
    'a "b"',
    "two\nlines",
    "\\",
    "\\.",
    "a\n\\.\nb",
    "\\N",
    "a,b\tc\r\n",
    "ünï😀",
    None,
]
VALUES: list[tuple[pa.Array, list]] = [
    (pa.array([-128, 127, None], pa.int8()), [-128, 127, None]),
    (pa.array([0, 2**64 - 1, None], pa.uint64()), [0, 2**64 - 1, None]),
    (pa.array([-(2**63), 2**63 - 1, None]), [-(2**63), 2**63 - 1, None]),
    (
        pa.array([0.1, -0.0, NAN, INF, -INF, 5e-324, 1.7976931348623157e308, None]),
        [0.1, -0.0, NAN, INF, -INF, 5e-324, 1.7976931348623157e308, None],
    ),
    (pa.array([1.5, NAN, None], pa.float32()), [1.5, NAN, None]),
    (pa.array([True, False, None]), [True, False, None]),
    (pa.array(TEXTS), TEXTS),
    (pa.array(TEXTS, pa.large_string()), TEXTS),
    (pa.array(TEXTS).dictionary_encode(), TEXTS),
    (pa.array([b"", b"\x00\xff\\", b"a" * 300, None]), [b"", b"\x00\xff\\", b"a" * 300, None]),
    (pa.array([b"ab", None], pa.binary(2)), [b"ab", None]),
    (
        pa.array([datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None]),
        [datetime.date(1, 1, 1), datetime.date(9999, 12, 31), None],
    ),
    (
        pa.array([MOMENT, datetime.datetime(1, 1, 1), None]),
        [MOMENT, datetime.datetime(1, 1, 1), None],
    ),
    (pa.array([MOMENT.replace(microsecond=0)], pa.timestamp("s")), [MOMENT.replace(microsecond=0)]),
    (
        pa.array([MOMENT.replace(tzinfo=BERLIN), None], pa.timestamp("us", "Europe/Berlin")),
        [MOMENT.replace(tzinfo=BERLIN), None],
    ),
    (
        pa.array([datetime.time(23, 59, 59, 999999), None]),
        [datetime.time(23, 59, 59, 999999), None],
    ),
    (
        pa.array([decimal.Decimal("-12345678.90"), None], pa.decimal128(10, 2)),
        [decimal.Decimal("-12345678.90"), None],
    ),
    (
        pa.array([decimal.Decimal("1200"), None], pa.decimal128(3, -2)),
        [decimal.Decimal("1200"), None],
    ),
]


def same(a: Any, b: Any) -> bool:
    if isinstance(a, float) and isinstance(b, float):
        return (math.isnan(a) and math.isnan(b)) or (
            a == b and math.copysign(1, a) == math.copysign(1, b)
        )
    return type(a) is type(b) and a == b


@pytest.mark.parametrize(("column", "expected"), VALUES, ids=lambda v: str(getattr(v, "type", "")))
def test_every_value_arrives_as_it_is(database, name, ask, column, expected) -> None:
    batch = pa.record_batch({"at": pa.array(range(len(column))), "v": column}).slice(1)
    written(postgres(database.dsn, name, create=True), batch, whose(flow=name))
    found = [v for (v,) in ask(f"SELECT v FROM {name} ORDER BY at")]
    if column.type == pa.uint64():
        expected = [None if v is None else decimal.Decimal(v) for v in expected]
    assert len(found) == len(expected) - 1
    assert all(same(a, b) for a, b in zip(found, expected[1:], strict=True)), found


def test_a_single_column_of_nothing(database, name, ask) -> None:
    batch = pa.record_batch({"v": pa.array([None, "", None], pa.string())})
    written(postgres(database.dsn, name, create=True), batch, whose(flow=name))
    assert sorted(ask(f"SELECT v FROM {name}"), key=str) == [("",), (None,), (None,)]


def test_text_becomes_what_is_written_as_text(database, name, ask) -> None:
    ask(f'CREATE TABLE {name} (doc jsonb, id uuid, "odd {{name}}" varchar(9), extra int DEFAULT 7)')
    batch = pa.record_batch(
        {"odd {name}": ["x"], "doc": ['{"a": [1]}'], "id": [str(uuid.UUID(int=5))]}
    )
    written(postgres(database.dsn, name), batch, whose(flow=name))
    assert ask(f"SELECT * FROM {name}") == [({"a": [1]}, uuid.UUID(int=5), "x", 7)]


# --- refusals -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "kind",
    [pa.list_(pa.int64()), pa.timestamp("ns"), pa.duration("s"), pa.struct([("a", pa.int8())])],
    ids=str,
)
def test_a_column_that_has_no_place_is_named_while_the_flow_is_written(kind) -> None:
    stream = Flow("f").source("s", rows(pa.record_batch([pa.array([], kind)], ["odd"])))
    with pytest.raises(FlowError, match="PostgreSQL has no type for the column 'odd'"):
        stream.sink("out", postgres("", "t"))


def test_a_key_must_be_a_column() -> None:
    stream = Flow("f").source("s", rows(some(1)))
    with pytest.raises(FlowError, match="key column 'k' does not exist"):
        stream.sink("out", postgres("", "t", key=["k"]))


@pytest.mark.parametrize(
    ("columns", "options", "complaint"),
    [
        (None, {}, "the table does not exist"),
        ("n bigint", {}, "the table has no column 's'"),
        (
            "n integer, s text",
            {},
            "the column 'n' is integer, which cannot hold every value of int64",
        ),
        ("n numeric(18), s text", {}, r"the column 'n' is numeric\(18,0\), which cannot hold"),
        ("n double precision, s text", {}, "the column 'n' is double precision"),
        ("n bigint, s bytea", {}, "the column 's' is bytea"),
        ("n bigint, s date", {}, "the column 's' is date"),
        (
            "n bigint, s text",
            {"key": ["n"]},
            r"no unique index has exactly the key's columns \(n\)",
        ),
    ],
)
def test_a_table_that_does_not_fit(database, name, ask, columns, options, complaint) -> None:
    if columns is not None:
        ask(f"CREATE TABLE {name} ({columns})")
    with pytest.raises(SinkError, match=complaint):
        postgres(database.dsn, name, **options).open(whose(flow=name), ROWS)


@pytest.mark.parametrize(
    ("kind", "column"),
    [
        (pa.decimal128(10, 2), "numeric(10,1)"),
        (pa.timestamp("us"), "timestamp with time zone"),
        (pa.timestamp("us"), "timestamp(3)"),
        (pa.float64(), "real"),
    ],
    ids=str,
)
def test_nothing_is_rounded_in_silence(database, name, ask, kind, column) -> None:
    ask(f"CREATE TABLE {name} (v {column})")
    with pytest.raises(SinkError, match="cannot hold every value"):
        postgres(database.dsn, name).open(whose(flow=name), pa.schema([("v", kind)]))


def test_a_wrong_password_ends_the_start(database, name, ask, kept) -> None:
    ask("DROP ROLE IF EXISTS app; CREATE ROLE app LOGIN PASSWORD 'right'")
    flow = Flow("secret")
    flow.source("s", rows(some(1))).sink("out", postgres(database.app_dsn("wr0ng"), name))
    with pytest.raises(SinkError, match="password authentication failed") as caught:
        kept.append(flow.start(sites=1, partitions=1))
    assert "sink 'out'" in str(caught.value) and "wr0ng" not in str(caught.value)


def test_who_may_not_create_is_told_what_to_have_made(database, name, ask) -> None:
    ask("DROP ROLE IF EXISTS app; CREATE ROLE app LOGIN PASSWORD 'right'")
    ask(f"CREATE TABLE {name} (n bigint, s text); GRANT INSERT, SELECT ON {name} TO app")
    sink = postgres(database.app_dsn("right"), name, progress=f"p{name}")
    try:
        with pytest.raises(SinkError, match=f"have it created: CREATE TABLE p{name}"):
            sink.open(whose(flow=name), ROWS)
        ask(f"CREATE TABLE p{name} (LIKE {_progress(ask)} INCLUDING ALL)")
        with pytest.raises(SinkError, match="permission denied"):
            sink.open(whose(flow=name), ROWS)
        ask(f"GRANT SELECT, INSERT, UPDATE ON p{name} TO app")
        written(sink, some(1, 2), whose(flow=name))
        assert ask(f"SELECT n FROM {name}") == [(1,), (2,)]
    finally:
        ask(f"DROP TABLE {name}; DROP TABLE p{name}; DROP ROLE app")


def _progress(ask) -> str:
    ask(
        "CREATE TABLE IF NOT EXISTS holdfast_sinks (flow text, sink text, incarnation text, "
        "epoch bigint NOT NULL, term bigint NOT NULL, PRIMARY KEY (flow, sink, incarnation))"
    )
    return "holdfast_sinks"


def test_a_server_that_is_not_there_ends_the_start(name) -> None:
    with pytest.raises(SinkError, match=r"(?i)connection refused"):
        postgres("host=127.0.0.1 port=1", name).open(whose(), ROWS)
    with pytest.raises(SinkError, match="libpq cannot parse the dsn") as caught:
        postgres("hunter2", name).open(whose(), ROWS)
    assert "hunter2" not in str(caught.value)


def test_rows_that_the_server_refuses_are_an_error_with_its_words(database, name, ask) -> None:
    ask(f"CREATE TABLE {name} (n bigint CHECK (n < 10), s text)")
    writer = postgres(database.dsn, name).open(whose(flow=name), ROWS)
    give(writer, 0, some(1))
    give(writer, 1, some(11))
    with pytest.raises(SinkError, match=r"refused the rows of epochs .*violates check constraint"):
        writer.close()
    with pytest.raises(SinkError, match="refused"):
        writer.room()
    assert ask(f"SELECT n FROM {name}") in ([], [(1,)])


# --- one writer, and another --------------------------------------------------------------------


def test_the_latest_row_of_a_key_stays(database, name, ask) -> None:
    sink = postgres(database.dsn, name, key=["n"], create=True, interval=0)
    writer = sink.open(whose(flow=name), ROWS)
    give(writer, 0, some(1, 2, text="a"))
    give(writer, 1, pa.record_batch({"n": [2, 2, 3], "s": ["b", "c", "d"]}))
    writer.close()
    assert sorted(ask(f"SELECT n, s FROM {name}")) == [(1, "a"), (2, "c"), (3, "d")]


def test_results_of_another_incarnation_stay(database, name, ask) -> None:
    sink = postgres(database.dsn, name, create=True)
    written(sink, some(1), whose(flow=name, incarnation="one"))
    written(sink, some(2), whose(flow=name, incarnation="two"))
    assert ask(f"SELECT n FROM {name} ORDER BY n") == [(1,), (2,)]
    with pytest.raises(SinkError, match="already has results of this incarnation, up to epoch 0"):
        sink.open(whose(flow=name, incarnation="one"), ROWS)


def test_only_what_the_server_confirms_is_durable(database, name, ask) -> None:
    """It is not told of epochs without rows. Another leader must not expect them there."""
    sink = postgres(database.dsn, name, create=True, interval=0)
    writer = sink.open(whose(flow=name), ROWS)
    assert give(writer, 0, some()) == -1
    give(writer, 1, some(5))
    until(lambda: writer.commit(1) == 1, "the row is there")
    for epoch in range(2, 6):
        durable = give(writer, epoch, some())
    writer.close()
    assert durable == 1 == progress(ask, name)
    new, _ = sink.resume(whose(2, flow=name), ROWS, durable)
    give(new, 6, some(6))
    new.close()
    assert ask(f"SELECT n FROM {name} ORDER BY n") == [(5,), (6,)]


def test_whoever_was_overtaken_writes_nothing_more(database, name, ask) -> None:
    sink = postgres(database.dsn, name, create=True, interval=0)
    old = sink.open(whose(1, flow=name), ROWS)
    give(old, 0, some(0))
    until(lambda: old.commit(0) == 0, "the first row is there")
    new, durable = sink.resume(whose(2, flow=name), ROWS, -1)
    assert durable == -1, "the server is not asked yet"
    for epoch in (0, 1):
        give(new, epoch, some(epoch))
    until(lambda: new.commit(1) == 1, "the second row is there")
    for epoch in (1, 2):
        give(old, epoch, some(epoch, text="a zombie's"))
    old.close()
    give(new, 2, some(2))
    new.close()
    assert sorted(ask(f"SELECT n, s FROM {name}")) == [(0, "x"), (1, "x"), (2, "x")]


# --- a server that has less than before ---------------------------------------------------------


def progress(ask, name: str) -> int:
    ((epoch,),) = ask(f"SELECT epoch FROM holdfast_sinks WHERE flow = '{name}'")
    return epoch


def wait_for_error(writer: SinkWriter) -> SinkRewoundError:
    found: list[SinkRewoundError] = []

    def fails() -> bool:
        try:
            writer.room()
        except SinkRewoundError as error:
            found.append(error)
        return bool(found)

    until(fails, "it is noticed")
    return found[0]


def with_three_epochs(sink: Sink, name: str) -> SinkWriter:
    writer = sink.open(whose(flow=name), ROWS)
    for epoch in range(3):
        give(writer, epoch, some(epoch))
        until(lambda epoch=epoch: writer.commit(epoch) == epoch, "the row is there")
    return writer


def lose(ask, name: str, after: int) -> None:
    """As on a standby that lacked the last transactions when it was promoted; and whoever was
    connected is not any more."""
    ask(f"DELETE FROM {name} WHERE n > {after}")
    ask(f"UPDATE holdfast_sinks SET epoch = {after} WHERE flow = '{name}'")
    ask(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity "
        f"WHERE application_name = 'holdfast {name}/out'"
    )


def test_a_writer_that_connects_again_finds_out_that_epochs_are_lost(database, name, ask) -> None:
    writer = with_three_epochs(postgres(database.dsn, name, create=True, interval=0), name)
    lose(ask, name, after=0)
    give(writer, 3, some(3))
    error = wait_for_error(writer)
    assert (error.sink, error.committed, error.found) == ("out", 2, 0)
    assert ask(f"SELECT n FROM {name}") == [(0,)], "epoch 3 would leave a gap"
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize("how", ["less", "nothing", "no table"])
def test_a_new_leader_finds_out_that_epochs_are_lost(database, name, ask, how) -> None:
    sink = postgres(database.dsn, name, create=True, interval=0, progress=f"p{name}")
    with_three_epochs(sink, name).close()
    if how == "no table":
        ask(f"DROP TABLE p{name}")
    else:
        ask(f"UPDATE p{name} SET epoch = 1" if how == "less" else f"DELETE FROM p{name}")
    writer, _ = sink.resume(whose(2, flow=name), ROWS, 2)
    give(writer, 3, some(3))
    error = wait_for_error(writer)
    assert (error.committed, error.found) == (2, 1 if how == "less" else -1)
    assert (3,) not in ask(f"SELECT n FROM {name}")
    if how != "no table":  # what the error says helps
        assert error.hint is not None
        ask(error.hint.rpartition("execute: ")[2])
        writer, _ = sink.resume(whose(3, flow=name), ROWS, 2)
        give(writer, 3, some(3))
        writer.close()
        assert ask(f"SELECT n FROM {name} ORDER BY n") == [(n,) for n in range(4)]


def test_a_flow_that_was_lost_expects_to_be_known(database, name, ask) -> None:
    """Though it had heard of no epoch that was durable: some may have been."""
    sink = postgres(database.dsn, name, create=True, interval=0)
    with_three_epochs(sink, name).close()
    again = replace(whose(1 << 48, flow=name), lost=True)
    writer, _ = sink.resume(again, ROWS, -1)
    give(writer, 3, some(3))
    writer.close()
    ask(f"DELETE FROM holdfast_sinks WHERE flow = '{name}'")
    writer, _ = sink.resume(again, ROWS, -1)
    give(writer, 4, some(4))
    assert (wait_for_error(writer).committed, progress_rows(ask, name)) == (-1, [])


def progress_rows(ask, name: str) -> list[tuple]:
    return ask(f"SELECT incarnation, epoch FROM holdfast_sinks WHERE flow = '{name}' ORDER BY 1")


def test_a_flow_goes_on_from_a_stopped_one_only_where_its_results_are(database, name, ask) -> None:
    sink = postgres(database.dsn, name, create=True, interval=0)
    with_three_epochs(sink, name).close()
    second = replace(whose(flow=name, incarnation="second"), after=5, before=("first", 2))
    writer = sink.go_on(second, ROWS, 5)
    give(writer, 6, some(6))
    writer.close()
    assert progress_rows(ask, name) == [("first", 2), ("second", 6)]
    taking_over, _ = sink.resume(replace(second, term=2, before=None), ROWS, 5)
    give(taking_over, 7, some(7))
    taking_over.close()
    ask(f"UPDATE holdfast_sinks SET epoch = 1 WHERE flow = '{name}' AND incarnation = 'first'")
    with pytest.raises(SinkRewoundError) as caught:
        sink.go_on(replace(second, incarnation="third"), ROWS, 5)
    assert (caught.value.committed, caught.value.found) == (2, 1)


def until_added(run: Run, rows: int) -> None:
    until(lambda: run.sink_report("out").get("rows", 0) > rows, "rows are there")


def test_a_flow_stops_when_a_standby_takes_over_that_lacks_results(
    database, name, ask, kept
) -> None:
    """A server with an older backup of the data answers at the same address."""
    server = PostgresServer()
    server.start()
    try:
        flow = Flow(name, protect=pairs(failure_domain="process"))
        source = flow.source("in", generator(numbers, SCHEMA, rate=20_000.0))
        source.sink("out", postgres(server.dsn, name, create=True, interval=0.05))
        run = flow.start(sites=3, partitions=6)
        kept.append(run)
        until_protected(run, 3)
        until_added(run, 1_000)
        server.back_up()
        until_added(run, run.sink_report("out")["rows"] + 10_000)
        server.crash()
        server.go_back()
        server.start()
        with pytest.raises(SinkRewoundError) as caught:
            run.wait(60)
        error = caught.value
        assert error.sink == "out" and -1 <= error.found < error.committed
    finally:
        server.remove()


# --- who wins -----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(20))
def test_any_interleaving_of_writers_adds_every_epoch_once(database, name, ask, seed) -> None:
    """Sessions with terms of their own claim and put in a random order; some begin from an epoch
    that is not there any more. The table always has the rows of the epochs it says."""
    draw = random.Random(seed)
    sink = Postgres(database.dsn, name, create=True)
    sessions: dict[int, Session] = {}
    known: dict[int, int | None] = {}
    confirmed: dict[int, int | None] = {}  # more than is there would be an error
    for term in range(3):
        sessions[term] = Session(sink, whose(term, flow=name), ROWS)
        sessions[term].begin() if term == 0 else sessions[term].connect()
        known[term], confirmed[term] = -1, None
    claimed = 0
    for _ in range(25):
        term = draw.randrange(3)
        after = known[term]
        if after is None or draw.random() < 0.3:
            known[term] = sessions[term].claim(confirmed[term])
            assert (known[term] is None) == (term < claimed)
            claimed = max(claimed, term)
        else:
            upto = after + draw.randrange(1, 4)
            won = sessions[term].put(after, upto, [some(*range(after + 1, upto + 1))])
            assert won <= (term >= claimed)
            claimed = max(claimed, term) if won else claimed
            known[term] = upto if won else None
        confirmed[term] = confirmed[term] if known[term] is None else known[term]
    for session in sessions.values():
        session.close()
    ((epoch,),) = ask(f"SELECT epoch FROM holdfast_sinks WHERE flow = '{name}'")
    assert sorted(ask(f"SELECT n FROM {name}")) == [(n,) for n in range(epoch + 1)]


def test_a_writer_that_stands_still_in_the_middle_holds_nobody_up(database, name, ask) -> None:
    """It may be stopped after any statement; here in the middle of sending its rows, the same as
    the other's and with a unique key."""
    ask(f"CREATE TABLE {name} (n bigint PRIMARY KEY, s text)")
    sink = Postgres(database.dsn, name)
    stopped = Session(sink, whose(1, flow=name), ROWS)
    stopped.begin()
    reached, go_on, outcome = threading.Event(), threading.Event(), []

    def rows_of_a_sleeper() -> Iterator[pa.RecordBatch]:
        yield some(0)
        reached.set()
        go_on.wait()
        yield some(1)

    sleeper = threading.Thread(
        target=lambda: outcome.append(stopped.put(-1, 1, rows_of_a_sleeper()))  # type: ignore[arg-type]
    )
    sleeper.start()
    reached.wait()
    writer, _ = sink.resume(whose(2, flow=name), ROWS, -1)
    give(writer, 0, some(0))
    give(writer, 1, some(1))
    writer.close()
    go_on.set()
    sleeper.join()
    assert outcome == [False]
    assert sorted(ask(f"SELECT n FROM {name}")) == [(0,), (1,)]


@pytest.mark.parametrize("heard", ["nothing was done", "all was done"])
def test_an_answer_that_got_lost(database, name, ask, monkeypatch, heard) -> None:
    put, lost = Session.put, []

    def unheard(self: Session, *given: Any) -> bool:
        if len(lost) % 2 == 0:
            lost.append(put(self, *given) if heard == "all was done" else None)
            raise psycopg.OperationalError("the connection is lost")
        lost.append(put(self, *given))
        return bool(lost[-1])

    monkeypatch.setattr(Session, "put", unheard)
    writer = postgres(database.dsn, name, create=True, interval=0).open(whose(flow=name), ROWS)
    for epoch in range(4):
        give(writer, epoch, some(epoch))
    writer.close()
    assert sorted(ask(f"SELECT n FROM {name}")) == [(n,) for n in range(4)] and lost


def test_rows_are_held_while_the_server_is_away_and_then_there_is_no_room(
    database, name, ask
) -> None:
    sink = postgres(database.dsn, name, create=True, interval=0, held_bytes_max=1_000)
    writer = sink.open(whose(flow=name), ROWS)
    give(writer, 0, some(0))
    until(lambda: writer.commit(0) == 0, "the first row is there")
    database.crash()
    try:
        until(lambda: give(writer, 1, some(1)) == 0, "a row is held")
        until(lambda: writer.report()["away"], "it is noticed")
        assert writer.room()
        give(writer, 2, some(*range(100)))
        assert not writer.room()
    finally:
        database.start()
    until(writer.room, "the rows are gone")
    assert writer.report()["away"] is None
    writer.close()
    assert len(ask(f"SELECT n FROM {name}")) >= 102


def test_a_writer_that_is_abandoned_ends(database, name) -> None:
    writer = postgres(database.dsn, name, create=True).open(whose(flow=name), ROWS)
    writer.abandon()
    until(lambda: not writer._thread.is_alive(), "its thread ends")  # type: ignore[attr-defined]


# --- flows --------------------------------------------------------------------------------------


def line(sink: Sink, protect: Any = None) -> Flow:
    flow = Flow("line", protect=protect)
    source = flow.source("numbers", generator(numbers, SCHEMA, rate=5_000))
    source.key_by("k").agg(t=F.sum("v"), n=F.count()).sink("out", sink)
    return flow


def totals(rows: int) -> pd.DataFrame:
    """What `line` gives for its first rows."""
    at = np.arange(rows)
    given = pd.DataFrame({"k": at * 7919 % 5000, "v": at % 997 * 1.0})
    groups = given.groupby("k")["v"]
    return pd.DataFrame({"k": given["k"], "t": groups.cumsum(), "n": groups.cumcount() + 1})


def check_totals(run: Any, name: str, ask: Callable) -> None:
    (rows,) = taken(run).values()
    assert rows > 2_000
    found = pd.DataFrame(ask(f"SELECT k, t, n FROM {name} ORDER BY k, n"), columns=["k", "t", "n"])
    expected = totals(rows).sort_values(["k", "n"], ignore_index=True)
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_every_row_is_there_once_though_leaders_die_and_sleep_and_the_server_crashes(
    database, name, ask, kept
) -> None:
    draw = random.Random(7)
    sink = postgres(database.dsn, name, create=True, interval=0.05)
    run = line(sink, pairs()).start(sites=3, partitions=6, options=Options(lease=0.7))
    kept.append(run)
    for _ in range(2):
        until_protected(run, 3)
        until_rows(run, 1_000)
        time.sleep(draw.random() * 0.1)
        kill(run, replicas(run)["out", 0][0])
    until_protected(run, 3)
    until_rows(run, 1_000)
    victim = replicas(run)["out", 0][0]
    pid = pids(run)[victim]
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: victim in run.status()["dead"], "the sleeper is declared dead")
        until_rows(run, 1_000)
        database.crash()
    finally:
        os.kill(pid, signal.SIGCONT)
        database.start()
    until(lambda: not exists(pid), "the sleeper leaves")
    until_protected(run, 3)
    until_rows(run, 1_000)
    run.stop(timeout=60)
    check_totals(run, name, ask)


def test_a_flow_that_is_lost_goes_on_behind_what_is_there(
    database, name, ask, kept, tmp_path
) -> None:
    sink = postgres(database.dsn, name, create=True, interval=0.05)

    def start(**more: Any) -> Any:
        kept.append(line(sink).start(sites=2, partitions=6, **more))
        return kept[-1]

    run = start(checkpoint=Checkpoint(str(tmp_path / "store"), interval=0.2))
    for _ in range(2):
        until_rows(run, 2_000)
        run.stop(drain=False)
        run = start(restore_from=str(tmp_path / "store"))
    until_rows(run, 2_000)
    run.stop(timeout=60)
    found = pd.DataFrame(ask(f"SELECT k, t, n FROM {name} ORDER BY k, n"), columns=["k", "t", "n"])
    expected = totals(run.status()["rows_in"]).sort_values(["k", "n"], ignore_index=True)
    pd.testing.assert_frame_equal(found, expected, check_exact=True)


def test_a_server_that_is_away_holds_the_source_back_and_fails_nothing(
    database, name, ask, kept
) -> None:
    sink = postgres(database.dsn, name, create=True, interval=0.05, held_bytes_max=100_000)
    run = line(sink).start(sites=1, partitions=2)
    kept.append(run)
    until_rows(run, 1_000)
    database.crash()
    try:
        until(lambda: run.sink_report("out").get("away"), "it is noticed")
        before = -1
        while run.status()["rows_in"] != before:
            before = run.status()["rows_in"]
            time.sleep(0.5)
        held = run.sink_report("out")["held_rows"]
        assert 24 * held < 100_000 + 24 * 10_000, "what is held is bounded"
    finally:
        database.start()
    until_rows(run, 1_000)
    run.stop(timeout=60)
    check_totals(run, name, ask)


def test_a_quiet_stream_is_written_and_its_refusals_are_heard_of(database, name, ask, kept) -> None:
    """No epoch follows the rows: nothing but time says that they are due."""
    ask(f"CREATE TABLE {name} (n bigint CHECK (n < 4), s text)")
    flow = Flow("quiet")
    make = lambda split, at, n: some(*range(at, at + n))  # noqa: E731
    source = flow.source("s", generator(make, ROWS, rate=4))
    source.sink("out", postgres(database.dsn, name, interval=0))
    run = flow.start(sites=1, partitions=1)
    kept.append(run)
    until(lambda: ask(f"SELECT n FROM {name}"), "the first row is there")
    with pytest.raises(SinkError, match="violates check constraint"):
        run.wait(60)
    assert sorted(ask(f"SELECT n FROM {name}")) == [(n,) for n in range(4)]


def test_the_page_shows_what_its_programs_print(database: PostgresServer, tmp_path: Path) -> None:
    (page,) = pages_that_need("postgres")
    run_page(page, tmp_path, replaced={"host=localhost dbname=shops": database.dsn})
