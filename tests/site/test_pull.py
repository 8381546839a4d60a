"""Sources that one site reads: a folder that files are added to, and a socket."""

import json
import os
import socket
import threading
from pathlib import Path

import msgspec
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import Flow, FlowError
from holdfast import functions as F
from holdfast.connectors import pull as pull_readers
from holdfast.connectors.pull import FolderReader
from holdfast.connectors.sources import PullReader, Source
from holdfast.control.run import Run
from holdfast.core.effects import HandOver
from holdfast.core.ids import Epoch, GroupId, SiteId, StageId
from holdfast.net import wire
from holdfast.plan.planner import Plan, plan
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.site.handover import Incoming, Outgoing
from holdfast.site.push import PushReader
from holdfast.site.stages import TaskRunner
from holdfast.sources import follow, lines, rows
from holdfast.storage.files import Folder
from holdfast.storage.restore_point import RestorePoint, store_state, stored_state
from tests.support.lines import SCHEMA, numbers
from tests.support.runs import kill, replicas, until, until_protected
from tests.support.task_runner import runner

PER_FILE = 2_000


def add(folder: Path, number: int, when: int | None = None) -> None:
    """Put a file with some of the numbers there, whole."""
    hidden = folder / f".{number}"
    table = pa.Table.from_batches([numbers(0, number * PER_FILE, PER_FILE)])
    pq.write_table(table, hidden, row_group_size=700)
    if when is not None:
        os.utime(hidden, ns=(when, when))
    hidden.rename(folder / f"{number:04d}.parquet")


def taken(pull_reader: PullReader, schema: pa.Schema = SCHEMA) -> pa.Table:
    """What it gives until it has no more, and that it has entered the flow."""
    found: list[pa.RecordBatch] = []
    while (got := pull_reader.take()) is not None and got != ([], ""):
        found += got[0]
        pull_reader.note(got[1], 0)
    return pa.Table.from_batches(found, schema)


def copied(pull_reader: FolderReader, source: Source) -> FolderReader:
    """Another one, as it is made of what is handed over, or stored."""
    made = source.pull_reader()
    assert isinstance(made, FolderReader)
    snapshot = pull_reader.snapshot()
    while (part := snapshot.next(7)) is not None:
        made.install({part[0]: part[1]})
    made.restore(pull_reader.save())
    return made


def whole(files: int) -> pa.Table:
    return pa.Table.from_batches([numbers(0, 0, files * PER_FILE)])


def test_files_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    for number, when in ((0, 5), (2, 7), (1, 6)):
        add(tmp_path, number, when)
    (tmp_path / "_ignored.parquet").write_bytes(b"nothing")
    pull_reader = follow(tmp_path, SCHEMA, interval=0).pull_reader()
    assert taken(pull_reader).equals(whole(3))
    assert pull_reader.take() == ([], "")
    add(tmp_path, 3)
    assert taken(pull_reader).slice(0).equals(whole(4).slice(3 * PER_FILE))


def test_another_goes_on_in_the_middle_of_a_file(tmp_path: Path) -> None:
    for number in range(2):
        add(tmp_path, number, number)
    source = follow(tmp_path, SCHEMA, interval=0, until="_END")
    one, told = source.pull_reader(), source.pull_reader()
    first, second = one.take(), one.take()
    assert first is not None and 0 < first[0][0].num_rows <= PER_FILE
    assert second is not None and second[1], "which nobody else has got"
    for pull_reader in (one, told):
        pull_reader.note(first[1], 0)
    handed = copied(one, source)
    told.rewind()
    for other in (told, handed):
        rest = taken(other)
        assert pa.concat_tables([pa.Table.from_batches(first[0]), rest]).equals(whole(2))
    assert told.take() == ([], ""), "more may come"
    (tmp_path / "_END").touch()
    assert told.take() is None


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(FlowError, match=r"cannot read .*bad\.parquet as parquet"):
        taken(follow(tmp_path, SCHEMA).pull_reader())
    with pytest.raises(FlowError, match="format 'xml'"):
        follow(tmp_path, SCHEMA, format="xml")


def test_other_formats(tmp_path: Path) -> None:
    schema = pa.schema([("k", pa.int64()), ("v", pa.float64())])
    (tmp_path / "a.csv").write_text("k,v\n1,1.5\n2,2.5\n")
    (tmp_path / "b.json").write_text('{"k": 1, "v": 1.5}\n{"k": 2, "v": 2.5}\n')
    for format in ("csv", "json"):
        pull_reader = follow(tmp_path, schema, format=format, pattern=f"*.{format}").pull_reader()
        assert taken(pull_reader, schema).to_pylist() == [{"k": 1, "v": 1.5}, {"k": 2, "v": 2.5}]


# --- each file once -----------------------------------------------------------------------------


def test_a_file_that_a_listing_lacks_is_not_read_again(tmp_path: Path) -> None:
    folder, elsewhere = tmp_path / "in", tmp_path / "elsewhere"
    for path in (folder, elsewhere):
        path.mkdir()
    source = follow(folder, SCHEMA, interval=0)
    pull_reader = source.pull_reader()
    assert isinstance(pull_reader, FolderReader)
    for number in range(3):
        add(folder, number, number)
    assert taken(pull_reader).equals(whole(3))
    (folder / "0001.parquet").rename(elsewhere / "0001.parquet")
    assert taken(pull_reader).num_rows == 0
    others = [pull_reader, copied(pull_reader, source), copied(pull_reader, source)]
    add(folder, 3)
    (elsewhere / "0001.parquet").rename(folder / "0001.parquet")
    for other in others:
        assert taken(other).equals(whole(4).slice(3 * PER_FILE))


def test_a_folder_that_is_not_there_for_a_while(tmp_path: Path, monkeypatch) -> None:
    """What is not mounted looks like an empty folder, or like none."""
    now = [1e9]
    monkeypatch.setattr(pull_readers.time, "time", lambda: now[0])
    folder, pull_reader = tmp_path / "in", follow(tmp_path / "in", SCHEMA, interval=0).pull_reader()
    folder.mkdir()
    add(folder, 0)
    assert taken(pull_reader).equals(whole(1))
    folder.rename(tmp_path / "away")
    for _ in range(3):
        assert taken(pull_reader).num_rows == 0
        now[0] += pull_readers.FORGET_S
    folder.mkdir()
    for _ in range(3):
        assert taken(pull_reader).num_rows == 0
        now[0] += pull_readers.FORGET_S
    folder.rmdir()
    (tmp_path / "away").rename(folder)
    assert taken(pull_reader).num_rows == 0


def test_files_that_were_removed_are_forgotten_in_the_end(tmp_path: Path, monkeypatch) -> None:
    """A folder to which files are added for months must not fill the memory with their names. All
    replicas forget the same ones."""
    now = [1e9]
    monkeypatch.setattr(pull_readers.time, "time", lambda: now[0])
    monkeypatch.setattr(pull_readers, "KEYS_MAX", 4)
    source = follow(tmp_path, SCHEMA, interval=0)
    pull_reader, other = source.pull_reader(), source.pull_reader()
    assert isinstance(pull_reader, FolderReader) and isinstance(other, FolderReader)

    def listed() -> None:
        while (got := pull_reader.take()) != ([], ""):
            assert got is not None
            for replica in (pull_reader, other):
                replica.note(got[1], 0)

    sizes = []
    for day in range(40):
        for number in range(3):
            add(tmp_path, 3 * day + number, 3 * day + number)
        listed()
        (tmp_path / f"{3 * day:04d}.parquet").unlink()
        if day:
            (tmp_path / f"{3 * day - 2:04d}.parquet").unlink()
            (tmp_path / f"{3 * day - 1:04d}.parquet").unlink()
        listed()
        now[0] += 86_400
        sizes.append((pull_reader.tables()["files"].size, other.tables()["files"].size))
    assert all(mine == theirs <= 3 * 10 for mine, theirs in sizes) and sizes[-1][0] > 3 * 7
    other.rewind()
    assert taken(other).num_rows == 0
    add(tmp_path, 0)  # a name that was used long ago
    assert taken(other).equals(whole(1))


@pytest.mark.parametrize("when", ["while", "after", "elsewhere"])
def test_a_file_that_was_not_whole_when_it_appeared_is_named(tmp_path: Path, when: str) -> None:
    schema = pa.schema([("k", pa.int64())])
    source = follow(tmp_path, schema, format="csv", interval=0)
    file, pull_reader = tmp_path / "a.csv", source.pull_reader()
    assert isinstance(pull_reader, FolderReader)
    file.write_text("k\n1\n2\n")
    if when == "while":
        first = pull_reader.take()
        assert first is not None and first[0][0].num_rows == 2
        pull_reader.note(first[1], 0)
    else:
        assert taken(pull_reader, schema).num_rows == 2
    if when == "elsewhere":
        pull_reader = copied(pull_reader, source)
    with file.open("a") as more:
        more.write("3\n")
    with pytest.raises(FlowError, match=r"a\.csv had 6 bytes when it was read, and has 8 now"):
        taken(pull_reader, schema)


def ingress(source: Source) -> tuple[Plan, TaskRunner, PushReader, FolderReader]:
    """The task of a followed folder, as it is on a site that leads."""
    planned = plan(totals(source))
    made = runner(planned, 0, 1)
    assert made.pushed is not None and isinstance(made.pushed.pull_reader, FolderReader)
    made.pushed.on_replicas(None, {}, {})
    return planned, made, made.pushed, made.pushed.pull_reader


def test_the_position_in_a_folder_of_any_size_is_handed_over(tmp_path: Path) -> None:
    """60,000 names are more than a message may have in its header."""
    names = [f"part-{n:05d}-{'f' * 60}.parquet" for n in range(60_000)]
    source = follow(tmp_path, SCHEMA, interval=0)
    planned, donor, reader, pull_reader = ingress(source)
    for number in range(2):
        add(tmp_path, number, number)
    reader.pull()
    pull_reader._add(names, 7, 0)
    order = HandOver((StageId(0), GroupId(0)), SiteId(2), Epoch(-1), {}, {})
    outgoing = Outgoing(order, donor)
    add(tmp_path, 2, 2)  # what comes later is no part of it
    reader.pull()
    _, joiner, other, its_reader = ingress(source)
    begin = outgoing.next()
    assert begin is not None and isinstance(begin[0], wire.HandOverBegin)
    assert len(wire.encode(begin[0])) < 1_000
    incoming = Incoming(begin[0], 1, joiner)
    while (part := outgoing.next()) is not None:
        body = b"".join(bytes(memoryview(b)) for b in part[1] or ())
        assert len(wire.encode(part[0], len(body))) + len(body) < 1 << 20
        incoming.take(planned, part[0], memoryview(body))
    incoming.install((StageId(0), GroupId(0)))
    assert its_reader.tables()["files"].size == 60_002
    other.on_replicas(None, {}, {})
    other.pull()
    found = [*(b for _, b in joiner.held())]
    assert pa.Table.from_batches(found).equals(whole(3).select(found[0].schema.names))


def test_the_position_in_a_folder_is_stored_and_restored(tmp_path: Path) -> None:
    """When the flow is stopped, and then goes on."""
    folder, store = tmp_path / "in", Folder(str(tmp_path / "store"))
    folder.mkdir()
    source = follow(folder, SCHEMA, interval=0)
    _, task, reader, _ = ingress(source)
    for number in range(2):
        add(folder, number, number)
    reader.pull()
    assert task.keeper is not None
    store_state(store, 0, task.keeper.tables())
    store.write("waiting/0/0.arrow", [rows for _, rows in task.held()])
    saved, state = wire_extras(task), stored_state(store)
    restore_point = RestorePoint(
        str(tmp_path / "store"), 1, 0, b"", state, {}, {0: saved}, {0: ["waiting/0/0.arrow"]}
    )
    (folder / "0000.parquet").rename(tmp_path / "0000.parquet")
    _, again, other, _ = ingress(source)
    other.on_replicas(SiteId(1), {}, {})
    again.begin(restore_point)
    other.on_replicas(None, {}, {})
    other.pull()
    (tmp_path / "0000.parquet").rename(folder / "0000.parquet")
    add(folder, 2, 2)
    other.pull()
    found = [*(b for _, b in again.held())]
    assert pa.Table.from_batches(found).equals(whole(3).select(found[0].schema.names))


def wire_extras(task: TaskRunner) -> bytes:
    assert task.ingress is not None
    return msgspec.msgpack.encode(task.ingress.save())


def test_a_position_that_was_stored_before_there_was_a_table(tmp_path: Path) -> None:
    for number in range(4):
        add(tmp_path, number, number)
    pull_reader = follow(tmp_path, SCHEMA, interval=0).pull_reader()
    done = ["0000.parquet", "0001.parquet"]
    pull_reader.restore(json.dumps({"done": done, "file": "0002.parquet", "rows": 1_500}))
    assert taken(pull_reader).equals(whole(4).slice(2 * PER_FILE + 1_500))


def test_a_large_folder_is_listed_a_part_at_a_time(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(pull_readers, "ENTRIES_MAX", 3)
    pull_reader = follow(tmp_path, SCHEMA, interval=0, until="_END").pull_reader()
    for number in range(10):
        add(tmp_path, number, number)
    nothing = 0
    while (got := pull_reader.take()) == ([], ""):
        nothing += 1
    assert nothing >= 3 and got is not None
    pull_reader.note(got[1], 0)
    rest = taken(pull_reader)
    assert pa.concat_tables([pa.Table.from_batches(got[0]), rest]).equals(whole(10))
    (tmp_path / "_END").touch()
    add(tmp_path, 10)
    found = 0
    while (got := pull_reader.take()) is not None:
        found += sum(batch.num_rows for batch in got[0])
        if got[1]:
            pull_reader.note(got[1], 0)
    assert found == PER_FILE, "it was there when the end was seen"


def test_a_mark_that_is_none_changes_nothing(tmp_path: Path) -> None:
    pull_reader = follow(tmp_path, SCHEMA, interval=0).pull_reader()
    for mark in ("{", "[]", '{"file": 3}', '{"keys": [[1, 99999999999999999999]]}', '{"rows": -1}'):
        with pytest.raises(ValueError):
            pull_reader.note(mark, 0)
    assert pull_reader.save() == "{}"


def test_rows_enter_when_the_other_replica_has_them(tmp_path: Path) -> None:
    for number in range(3):
        add(tmp_path, number, number)
    source = follow(tmp_path, SCHEMA, interval=0)
    leader, other = (PushReader(0, SCHEMA, False, source.pull_reader()) for _ in range(2))
    sent = []
    leader.send = lambda site, message, body: sent.append((message, body))
    leader.on_replicas(None, {SiteId(2): 0}, {})
    other.on_replicas(SiteId(1), {SiteId(1): 0}, {})
    leader.on_push_has(SiteId(2), other.holding(again=True))
    leader.pull()
    assert leader.read(9_999) is not None and leader.read(9_999).num_rows == 0  # type: ignore[union-attr]
    message, body = next(s for s in sent if isinstance(s[0], wire.PushBatch))
    data = memoryview(b"".join(bytes(memoryview(b)) for b in body))
    assert other.on_push_batch(SiteId(1), message, data)
    leader.on_push_has(SiteId(2), other.holding(again=False))
    other.on_push_known(SiteId(1), sent[-1][0])
    first = leader.read(9_999)
    assert first is not None and first.num_rows > 0
    # The leader dies: what the other has is in, and it goes on from there.
    assert other.read(9_999, due=True).equals(first)  # type: ignore[union-attr]
    other.on_replicas(None, {}, {})
    found = [first]
    while len(found) < 100:
        other.pull()
        batch = other.read(9_999)
        if batch is None or batch.num_rows == 0:
            break
        found.append(batch)
    assert pa.Table.from_batches(found).equals(whole(3))


def totals(source: Source) -> Flow:
    flow = Flow("pulled", protect=pairs(failure_domain="process"))
    keyed = flow.source("numbers", source).key_by("k")
    keyed.agg(t=F.sum("v"), n=F.count()).sink("out", discard())
    return flow


def right(files: int) -> dict[str, object]:
    run = totals(rows(whole(files))).start(sites=2)
    assert run.wait(60)
    return run.sink_report("out")


def test_every_file_is_read_once_though_its_readers_are_killed(
    kept: list[Run], tmp_path: Path
) -> None:
    files = 24
    run = totals(follow(tmp_path, SCHEMA, until="_END")).start(sites=3, partitions=6)
    kept.append(run)
    for number in range(files):
        add(tmp_path, number, number)
        if number in (8, 16):
            until(lambda: run.status()["rows_in"] > 0, "rows come in")
            until_protected(run, 3)
            kill(run, replicas(run)["numbers", 0][0])
    (tmp_path / "_END").touch()
    assert run.wait(60)
    assert run.sink_report("out") == right(files)


def test_lines_of_a_socket(kept: list[Run]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                for row in numbers(0, 0, PER_FILE).to_pylist():
                    connection.sendall(json.dumps(row).encode() + b"\n")

        threading.Thread(target=serve, daemon=True).start()
        run = totals(lines("127.0.0.1", server.getsockname()[1], SCHEMA)).start(sites=2)
        kept.append(run)
        assert run.wait(60)
    assert run.sink_report("out") == right(1)
