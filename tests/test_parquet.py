"""The parquet sink's writers: what they publish, who may, and what happens when the disk fails."""

import contextlib
import errno
import itertools
import os
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import FlowError, SinkError
from holdfast.connectors import parquet as parquet_module
from holdfast.connectors.sinks import Authority, Sink, SinkWriter
from holdfast.errors import SinkRewoundError
from holdfast.sinks import parquet

PATIENCE_S = 60
SCHEMA = pa.schema([("epoch", pa.int64()), ("row", pa.int64())])


def batch(epoch: int, rows: int = 2) -> pa.RecordBatch:
    return pa.record_batch({"epoch": [epoch] * rows, "row": list(range(rows))}, schema=SCHEMA)


def authority(incarnation: str = "a", term: int = 1, flow: str = "f") -> Authority:
    return Authority(flow, "out", incarnation, term)


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / "out"


@pytest.fixture
def sink(out: Path) -> Sink:
    return parquet(out, interval=0)


@pytest.fixture
def writers() -> Iterator[list[SinkWriter]]:
    """Writers put here are abandoned with the test."""
    kept: list[SinkWriter] = []
    yield kept
    for writer in kept:
        writer.abandon()


def until(condition: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline, f"not within {PATIENCE_S} s: {what}"
        time.sleep(0.002)


def give(writer: SinkWriter, *epochs: int, rows: int = 2) -> None:
    for epoch in epochs:
        writer.write(epoch, batch(epoch, rows))
        writer.commit(epoch)


def settle(writer: SinkWriter, epoch: int) -> None:
    """Everything up to this epoch is durable."""
    until(lambda: writer.commit(epoch) >= epoch, f"epoch {epoch} is durable")


def put(writer: SinkWriter, *epochs: int) -> None:
    """Publish each in a file of its own."""
    for epoch in epochs:
        give(writer, epoch)
        settle(writer, epoch)


def names(out: Path) -> list[str]:
    return sorted(f.name for f in out.glob("*.parquet"))


def rows_in(out: Path) -> list[tuple[int, int]]:
    table = pq.read_table(out)
    return sorted(zip(table["epoch"].to_pylist(), table["row"].to_pylist(), strict=True))


def expected(*epochs: int, rows: int = 2) -> list[tuple[int, int]]:
    return sorted(itertools.product(epochs, range(rows)))


def refused(writer: SinkWriter, error: type[Exception], match: str, epoch: int) -> None:
    """What the writer is asked next, or a little later, ends with this error."""

    def ask() -> bool:
        writer.commit(epoch)
        return False

    with pytest.raises(error, match=match):
        until(ask, "an error")


# --- who may publish -----------------------------------------------------------------------------


def test_a_writer_of_an_earlier_flow_adds_nothing_to_a_folder_in_use(
    sink: Sink, out: Path, writers: list[SinkWriter]
) -> None:
    old = sink.open(authority("old"), SCHEMA)
    writers.append(old)
    put(old, 0)
    shutil.rmtree(out)
    new = sink.open(authority("new"), SCHEMA)
    writers.append(new)
    put(new, 0)
    give(old, 1)
    refused(old, FlowError, "another flow", 1)
    put(new, 1, 2)
    assert rows_in(out) == expected(0, 1, 2) and len(names(out)) == 3


def test_a_writer_that_wakes_up_late_changes_nothing(
    sink: Sink, out: Path, writers: list[SinkWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It was stopped in the midst of a file, and another has published those epochs since."""
    write_table, stopped = pq.write_table, []

    def slow(table: pa.Table, where: Any, *args: object, **more: object) -> None:
        if not stopped:
            stopped.append(table)
            new, _ = sink.resume(authority(term=2), SCHEMA, -1)
            writers.append(new)
            put(new, 0, 1)
            writers.append(new)
        write_table(table, where, *args, **more)

    monkeypatch.setattr(pq, "write_table", slow)
    old = sink.open(authority(term=1), SCHEMA)
    writers.append(old)
    give(old, 0)
    until(lambda: len(writers) == 3, "another has taken over")
    new = writers[-1]
    before = {f.name: f.read_bytes() for f in out.glob("*.parquet")}
    assert sorted(before) == ["part-000000000000.parquet", "part-000000000001.parquet"]
    give(old, 1, 2)
    put(new, 2)
    assert rows_in(out) == expected(0, 1, 2)
    assert {n: (out / n).read_bytes() for n in before} == before


def test_a_new_leader_goes_on_behind_what_the_old_one_published(
    sink: Sink, out: Path, writers: list[SinkWriter]
) -> None:
    old = sink.open(authority(term=1), SCHEMA)
    put(old, 0, 1)
    new, _ = sink.resume(authority(term=2), SCHEMA, -1)
    writers += [old, new]
    give(new, 0, 1, 2, 3)
    settle(new, 3)
    new.close()
    assert rows_in(out) == expected(0, 1, 2, 3) and (out / "_SUCCESS").exists()


def test_a_writer_that_was_overtaken_keeps_quiet_for_a_while(
    sink: Sink, out: Path, writers: list[SinkWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its site is told that it leads no more, and must not end the flow before it hears that."""
    old = sink.open(authority(term=1), SCHEMA)
    new, _ = sink.resume(authority(term=2), SCHEMA, -1)
    writers += [old, new]
    put(new, 0)
    give(old, 0, 1)
    until(lambda: old.report()["held_rows"] == 0, "it gives up")
    assert old.commit(1) == -1 and old.room() and not old.finish()
    monkeypatch.setattr(parquet_module, "QUIET_S", -1.0)
    with pytest.raises(FlowError, match="a later leader of the flow has written"):
        old.commit(1)
    assert rows_in(out) == expected(0)


def test_what_writers_keep_beside_the_files_may_be_removed(
    sink: Sink, out: Path, writers: list[SinkWriter]
) -> None:
    writer = sink.open(authority(), SCHEMA)
    put(writer, 0)
    shutil.rmtree(out / "_holdfast")
    put(writer, 1)
    shutil.rmtree(out / "_holdfast")
    new, _ = sink.resume(authority(term=2), SCHEMA, 1)
    writers += [writer, new]
    put(new, 2)
    give(writer, 2)
    until(lambda: writer.report()["held_rows"] == 0, "it is fenced all the same")
    assert rows_in(out) == expected(0, 1, 2)


def test_a_flow_that_was_started_twice_with_one_secret_is_refused(
    sink: Sink, writers: list[SinkWriter]
) -> None:
    writers.append(sink.open(authority(), SCHEMA))
    with pytest.raises(FlowError, match="started twice with the same secret"):
        sink.open(authority(), SCHEMA)


def test_two_sinks_of_a_flow_do_not_share_a_folder(sink: Sink, writers: list[SinkWriter]) -> None:
    writers.append(sink.open(authority(), SCHEMA))
    with pytest.raises(FlowError, match="'out' of flow 'f'"):
        sink.open(Authority("f", "other", "a", 1), SCHEMA)


def test_a_folder_with_results_is_left_alone_by_a_flow_that_starts(
    sink: Sink, out: Path, writers: list[SinkWriter]
) -> None:
    first = sink.open(authority("first"), SCHEMA)
    writers.append(first)
    put(first, 0)
    with pytest.raises(FlowError, match="already holds parquet files"):
        sink.open(authority("second"), SCHEMA)
    put(first, 1)
    assert rows_in(out) == expected(0, 1)


# --- going on from a flow that was stopped -------------------------------------------------------


def stopped(sink: Sink, upto: int) -> None:
    writer = sink.open(authority("first"), SCHEMA)
    put(writer, *range(upto + 1))
    writer.close()


def test_a_flow_goes_on_where_another_was_stopped(sink: Sink, out: Path) -> None:
    stopped(sink, 2)
    writer = sink.go_on(authority("second"), SCHEMA, 2)
    assert not (out / "_SUCCESS").exists()
    put(writer, 3)
    writer.close()
    assert rows_in(out) == expected(0, 1, 2, 3) and (out / "_SUCCESS").exists()
    assert [pq.read_metadata(out / n).metadata[b"holdfast.incarnation"] for n in names(out)] == [
        *[b"first"] * 3,
        b"second",
    ]


def test_epochs_without_rows_at_the_end_are_not_missed(sink: Sink, out: Path) -> None:
    writer = sink.open(authority("first"), SCHEMA)
    put(writer, 0)
    give(writer, 1, 2, rows=0)
    writer.close()
    writer = sink.go_on(authority("second"), SCHEMA, 2)
    put(writer, 3)
    writer.close()
    assert rows_in(out) == expected(0, 3)


def test_a_flow_that_was_stopped_before_its_first_epoch_goes_on(sink: Sink, out: Path) -> None:
    sink.open(authority("first"), SCHEMA).close()
    assert rows_in(out) == [], "an empty result is readable"
    writer = sink.go_on(authority("second"), SCHEMA, -1)
    put(writer, 0)
    writer.close()
    assert rows_in(out) == expected(0)


def test_only_one_goes_on(sink: Sink, out: Path, writers: list[SinkWriter]) -> None:
    """Whichever came last and found nothing written since."""
    stopped(sink, 1)
    one = sink.go_on(authority("one"), SCHEMA, 1)
    other = sink.go_on(authority("other"), SCHEMA, 1)
    writers += [one, other]
    put(other, 2)
    give(one, 2)
    refused(one, FlowError, "another flow", 2)
    with pytest.raises(FlowError, match="was written after the flow was stopped"):
        sink.go_on(authority("third"), SCHEMA, 1)
    put(other, 3)
    assert rows_in(out) == expected(0, 1, 2, 3)


def test_the_results_of_another_flow_are_not_gone_on_from(sink: Sink) -> None:
    stopped(sink, 1)
    with pytest.raises(FlowError, match="of flow 'f', and this is flow 'g'"):
        sink.go_on(authority("second", flow="g"), SCHEMA, 1)


# --- a folder that went backwards ----------------------------------------------------------------


def test_files_that_were_removed_before_a_flow_goes_on_are_missed(sink: Sink, out: Path) -> None:
    stopped(sink, 3)
    (out / "part-000000000003.parquet").unlink()
    with pytest.raises(SinkRewoundError, match=r"up to 3, .* up to 2") as caught:
        sink.go_on(authority("second"), SCHEMA, 3)
    assert (caught.value.sink, caught.value.committed, caught.value.found) == ("out", 3, 2)
    (out / "part-000000000001.parquet").unlink()
    with pytest.raises(SinkRewoundError, match=r"up to 3, .* up to 0"):
        sink.go_on(authority("second"), SCHEMA, 3)
    shutil.rmtree(out)
    with pytest.raises(SinkRewoundError, match=r"up to 3, .* nothing of this flow"):
        sink.go_on(authority("second"), SCHEMA, 3)


def test_a_file_that_was_removed_from_the_middle_is_missed(sink: Sink, out: Path) -> None:
    stopped(sink, 3)
    (out / "part-000000000001.parquet").unlink()
    with pytest.raises(SinkRewoundError, match=r"up to 3, .* up to 0"):
        sink.go_on(authority("second"), SCHEMA, 3)


def test_files_that_were_removed_are_missed_by_a_new_leader(
    sink: Sink, out: Path, writers: list[SinkWriter]
) -> None:
    old = sink.open(authority(term=1), SCHEMA)
    put(old, 0, 1, 2)
    (out / "part-000000000002.parquet").unlink()
    new, _ = sink.resume(authority(term=2), SCHEMA, 2)
    writers += [old, new]
    with contextlib.suppress(SinkRewoundError):  # it may be found at once, or a little later
        give(new, 3)
    refused(new, SinkRewoundError, r"up to 2, .* up to 1", 3)
    assert names(out) == ["part-000000000000.parquet", "part-000000000001.parquet"]


@pytest.mark.parametrize("gone", ["the last file", "all files", "the folder"])
def test_files_that_are_removed_while_the_flow_runs_are_missed(
    gone: str, sink: Sink, out: Path, writers: list[SinkWriter]
) -> None:
    writer = sink.open(authority(), SCHEMA)
    writers.append(writer)
    put(writer, 0, 1)
    if gone == "the folder":
        shutil.rmtree(out)
    else:
        for file in out.glob("part-000000000001.*" if gone == "the last file" else "*.parquet"):
            file.unlink()
    give(writer, 2)
    refused(writer, SinkRewoundError, "up to 1,", 2)
    assert not any(out.glob("part-000000000002.parquet"))


def test_files_may_be_missing_if_that_is_said(out: Path, writers: list[SinkWriter]) -> None:
    """They were moved elsewhere; or the folder is a new one."""
    stopped(parquet(out, interval=0), 3)
    (out / "part-000000000001.parquet").unlink()
    (out / "part-000000000003.parquet").unlink()
    sink = parquet(out, interval=0, allow_missing=True)
    writer = sink.go_on(authority("second"), SCHEMA, 3)
    put(writer, 4)
    (out / "part-000000000004.parquet").unlink()
    put(writer, 5)
    new, _ = sink.resume(authority("second", 2), SCHEMA, 3)
    writers += [writer, new]
    give(new, 4, 5, 6)
    settle(new, 6)
    assert rows_in(out) == expected(0, 2, 5, 6)


# --- files that are not as they should be --------------------------------------------------------


@pytest.mark.parametrize("left", [0, 10, 100, -1, -9])
def test_a_torn_file_is_replaced_by_a_new_leader(
    left: int, sink: Sink, out: Path, writers: list[SinkWriter]
) -> None:
    """The power failed, and the disk had not kept what it said that it had."""
    old = sink.open(authority(term=1), SCHEMA)
    put(old, 0, 1, 2)
    torn = out / "part-000000000001.parquet"
    torn.write_bytes(torn.read_bytes()[:left])
    new, _ = sink.resume(authority(term=2), SCHEMA, 0)
    writers += [old, new]
    give(new, 1, 2, 3)
    settle(new, 3)
    assert rows_in(out) == expected(0, 1, 2, 3)


def test_a_torn_file_with_rows_that_nobody_has_any_more_is_named(sink: Sink, out: Path) -> None:
    stopped(sink, 1)
    torn = out / "part-000000000001.parquet"
    torn.write_bytes(torn.read_bytes()[:-8])
    with pytest.raises(SinkError, match=r"part-000000000001.parquet cannot be read as parquet"):
        sink.go_on(authority("second"), SCHEMA, 1)
    assert torn.exists()


def test_a_file_of_somebody_else_is_not_taken_for_rows(
    sink: Sink, out: Path, writers: list[SinkWriter]
) -> None:
    old = sink.open(authority(term=1), SCHEMA)
    put(old, 0)
    foreign = out / "part-000000000001.parquet"
    pq.write_table(pa.Table.from_batches([batch(99)]), foreign)
    new, _ = sink.resume(authority(term=2), SCHEMA, 0)
    writers += [old, new]
    give(new, 1)
    refused(new, FlowError, r"part-000000000001.parquet was not written by", 1)
    assert foreign.exists()


def test_files_that_readers_would_see_besides_are_named_in_the_status(
    sink: Sink, out: Path
) -> None:
    stopped(sink, 0)
    pq.write_table(pa.Table.from_batches([batch(99)]), out / "mine.parquet")
    writer = sink.go_on(authority("second"), SCHEMA, 0)
    assert writer.report()["foreign"] == ["mine.parquet"]
    writer.close()


# --- a disk that fails ---------------------------------------------------------------------------


def failing(monkeypatch: pytest.MonkeyPatch, name: str, error: int) -> list[str]:
    """From now on, and until the list is cleared, the call fails, and is noted."""
    calls: list[str] = ["fails"]
    real = getattr(os, name)

    def fail(*args: object, **more: object) -> object:
        if calls:
            calls.append(name)
            raise OSError(error, os.strerror(error))
        return real(*args, **more)

    monkeypatch.setattr(os, name, fail)
    return calls


@pytest.mark.parametrize(
    ("name", "error"),
    [("fsync", errno.ENOSPC), ("fsync", errno.EIO), ("link", errno.ENOSPC), ("link", errno.ESTALE)],
)
def test_rows_wait_for_a_disk_that_fails(
    name: str,
    error: int,
    out: Path,
    writers: list[SinkWriter],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sink = parquet(out, interval=0, held_bytes_max=200)
    writer = sink.open(authority(), SCHEMA)
    writers.append(writer)
    put(writer, 0)
    calls = failing(monkeypatch, name, error)
    epochs = itertools.count(1)
    while writer.room():
        give(writer, next(epochs))
    last = next(epochs) - 1
    until(lambda: writer.report()["away"], "it says so")
    assert os.strerror(error) in writer.report()["away"]
    until(lambda: len(calls) > 3, "it tries again")
    assert not writer.room() and writer.commit(last) == 0 and writer.report()["away"]
    assert sum("holding rows" in r.message for r in caplog.records) == 1, "it is logged once"
    calls.clear()
    settle(writer, last)
    assert writer.room() and writer.report()["away"] is None
    assert rows_in(out) == expected(*range(last + 1))


def test_a_new_leader_waits_for_a_disk_that_fails(
    sink: Sink, out: Path, writers: list[SinkWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that it cannot open may have any epochs."""
    old = sink.open(authority(term=1), SCHEMA)
    give(old, 0, 1)
    settle(old, 1)
    calls = failing(monkeypatch, "open", errno.EIO)
    new, _ = sink.resume(authority(term=2), SCHEMA, -1)
    writers += [old, new]
    give(new, 0, 1, 2)
    until(lambda: new.report()["away"], "it says so")
    assert new.commit(2) == -1
    calls.clear()
    settle(new, 2)
    assert rows_in(out) == expected(0, 1, 2)


def test_a_file_is_on_the_disk_before_it_is_seen_and_its_name_before_it_counts(
    sink: Sink, out: Path, writers: list[SinkWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = sink.open(authority(), SCHEMA)
    writers.append(writer)
    real_sync, real_link, log = os.fsync, os.link, []

    def sync(fd: int) -> None:
        real_sync(fd)
        log.append(("sync", os.fstat(fd).st_ino))

    def link(source: Path, target: Path) -> None:
        file = os.stat(source).st_ino
        real_link(source, target)
        log.append(("link", file))

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "link", link)
    put(writer, 0)
    durable = list(log)
    file = os.stat(out / "part-000000000000.parquet").st_ino
    at = durable.index(("link", file))
    assert ("sync", file) in durable[:at] and ("sync", os.stat(out).st_ino) in durable[at:]


def test_a_folder_that_cannot_be_written_to_is_named(sink: Sink, out: Path) -> None:
    out.write_text("a file")
    with pytest.raises(SinkError, match=r"cannot write to the folder .*/out"):
        sink.open(authority(), SCHEMA)


def test_a_folder_without_hard_links_is_refused(
    sink: Sink, monkeypatch: pytest.MonkeyPatch
) -> None:
    failing(monkeypatch, "link", errno.EOPNOTSUPP)
    with pytest.raises(SinkError, match="hard links"):
        sink.open(authority(), SCHEMA)


def test_readers_see_whole_files_only(
    sink: Sink, out: Path, writers: list[SinkWriter], monkeypatch: pytest.MonkeyPatch
) -> None:
    write_table, seen = pq.write_table, []

    def watched(table: pa.Table, where: object, *args: object, **more: object) -> None:
        write_table(table, where, *args, **more)
        seen.append([n for n in os.listdir(out) if not n.startswith(("_", "."))])

    monkeypatch.setattr(pq, "write_table", watched)
    writer = sink.open(authority(), SCHEMA)
    writers.append(writer)
    put(writer, 0, 1)
    assert seen == [[], ["part-000000000000.parquet"]]


# --- where ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "place",
    [
        "s3://bucket/x",
        "s3a://bucket/x",
        "gs://bucket/x",
        "abfss://c@account/x",
        "hdfs://host/x",
        "dbfs:/x",
        Path("s3://bucket/x"),
        "file://host/x",
    ],
)
def test_what_is_not_a_folder_of_a_file_system_is_refused(place: str | Path) -> None:
    with pytest.raises(FlowError, match=r"parquet\('.*x'\): .*a folder of a file system"):
        parquet(place)


@pytest.mark.parametrize("form", ["{}", "file://{}", "file://localhost{}", "file:{}"])
def test_a_folder_is_named_by_path_or_url(form: str, tmp_path: Path) -> None:
    folder = tmp_path / "a b"
    place = form.format(folder)
    sink = parquet(place.replace(" ", "%20") if form != "{}" else place)
    writer = sink.open(authority(), SCHEMA)
    give(writer, 0)
    writer.close()
    assert rows_in(folder) == expected(0)
