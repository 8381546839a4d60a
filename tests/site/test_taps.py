"""Sources that one site reads: a folder that files are added to, and a socket."""

import json
import os
import socket
import threading
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import Flow, FlowError, count, discard, follow, lines, pairs, rows, sum_
from holdfast.core.ids import SiteId
from holdfast.flow.sources import Source, Tap
from holdfast.run import Run
from holdfast.site.feed import FedReader
from tests.site.test_pairs import SCHEMA, copies, kill, numbers, until, until_protected

PER_FILE = 2_000


def add(folder: Path, number: int, when: int | None = None) -> None:
    """Put a file with some of the numbers there, whole."""
    hidden = folder / f".{number}"
    table = pa.Table.from_batches([numbers(0, number * PER_FILE, PER_FILE)])
    pq.write_table(table, hidden, row_group_size=700)
    if when is not None:
        os.utime(hidden, ns=(when, when))
    hidden.rename(folder / f"{number:04d}.parquet")


def taken(tap: Tap, parts: int = 1_000) -> pa.Table:
    """What it gives, at most so many times."""
    found: list[pa.RecordBatch] = []
    for _ in range(parts):
        got = tap.take()
        if got is None or got == ([], ""):
            break
        found += got[0]
    return pa.Table.from_batches(found, SCHEMA)


def whole(files: int) -> pa.Table:
    return pa.Table.from_batches([numbers(0, 0, files * PER_FILE)])


def test_files_come_in_the_order_of_their_times(tmp_path: Path) -> None:
    for number, when in ((0, 5), (2, 7), (1, 6)):
        add(tmp_path, number, when)
    (tmp_path / "_ignored.parquet").write_bytes(b"nothing")
    tap = follow(tmp_path, SCHEMA, every_s=0).tap()
    assert taken(tap).equals(whole(3))
    assert tap.take() == ([], "")
    add(tmp_path, 3)
    assert taken(tap).slice(0).equals(whole(4).slice(3 * PER_FILE))


def test_another_goes_on_in_the_middle_of_a_file(tmp_path: Path) -> None:
    for number in range(2):
        add(tmp_path, number, number)
    source = follow(tmp_path, SCHEMA, every_s=0, until="_END")
    one, told = source.tap(), source.tap()
    first = one.take()
    assert first is not None and 0 < first[0][0].num_rows <= PER_FILE
    told.note(first[1])
    handed = source.tap()
    handed.restore(one.save())
    for other in (told, handed):
        rest = taken(other)
        assert pa.concat_tables([pa.Table.from_batches(first[0]), rest]).equals(whole(2))
    assert told.take() == ([], ""), "more may come"
    (tmp_path / "_END").touch()
    assert told.take() is None


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "bad.parquet").write_bytes(b"not parquet at all")
    with pytest.raises(FlowError, match=r"cannot read .*bad\.parquet as parquet"):
        taken(follow(tmp_path, SCHEMA).tap())
    with pytest.raises(FlowError, match="format 'xml'"):
        follow(tmp_path, SCHEMA, format="xml")


def test_other_formats(tmp_path: Path) -> None:
    schema = pa.schema([("k", pa.int64()), ("v", pa.float64())])
    (tmp_path / "a.csv").write_text("k,v\n1,1.5\n2,2.5\n")
    (tmp_path / "b.json").write_text('{"k": 1, "v": 1.5}\n{"k": 2, "v": 2.5}\n')
    for format in ("csv", "json"):
        tap = follow(tmp_path, schema, format=format, pattern=f"*.{format}").tap()
        assert taken(tap).to_pylist() == [{"k": 1, "v": 1.5}, {"k": 2, "v": 2.5}]


def test_rows_enter_when_the_other_copy_has_them(tmp_path: Path) -> None:
    for number in range(3):
        add(tmp_path, number, number)
    source = follow(tmp_path, SCHEMA, every_s=0)
    leader, other = (FedReader(0, SCHEMA, False, source.tap()) for _ in range(2))
    sent = []
    leader.send = lambda site, message, body: sent.append((message, body))
    leader.on_copies(True, [SiteId(2)], [])
    other.on_copies(False, [SiteId(1)], [])
    leader.pull()
    assert leader.read(9_999) is not None and leader.read(9_999).num_rows == 0  # type: ignore[union-attr]
    message, body = sent[0]
    other.on_portion(message, memoryview(b"".join(bytes(memoryview(b)) for b in body)))
    leader.on_has(SiteId(2), 1, False)
    first = leader.read(9_999)
    assert first is not None and first.num_rows > 0
    # The leader dies: what the other has is in, and it goes on from there.
    assert other.read(9_999).equals(first)  # type: ignore[union-attr]
    other.on_copies(True, [], [])
    found = [first]
    while len(found) < 100:
        other.pull()
        batch = other.read(9_999)
        if batch is None or batch.num_rows == 0:
            break
        found.append(batch)
    assert pa.Table.from_batches(found).equals(whole(3))


def totals(source: Source) -> Flow:
    flow = Flow("tapped", protect=pairs(apart="process"))
    keyed = flow.source("numbers", source).key_by("k")
    keyed.agg(t=sum_("v"), n=count()).sink("out", discard())
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
            kill(run, copies(run)["numbers", 0][0])
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
