"""The parquet sink on real processes: a writer is stopped right before it publishes, the disk is
full, files are removed before a flow goes on."""

import errno
import os
import signal
import threading
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from holdfast.api.options import Checkpoint
from holdfast.connectors.parquet import Parquet
from holdfast.control.run import Run
from holdfast.errors import SinkRewoundError
from holdfast.protections import pairs
from holdfast.sinks import parquet
from holdfast.storage.disk import Disk
from tests.support.lines import one_line
from tests.support.runs import PATIENCE_S, taken, until, until_protected, until_rows


class Told(Disk):
    """Does what files in a folder beside the results say."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def link(self, source: str, target: str) -> None:
        if (self._folder / "stop").exists() and target.endswith(".parquet"):
            (self._folder / "stop").rename(self._folder / f"stopped-{os.getpid()}")
            os.kill(os.getpid(), signal.SIGSTOP)
        super().link(source, target)

    def sync(self, file: object) -> None:
        if (self._folder / "full").exists():
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().sync(file)  # type: ignore[arg-type]


@pytest.fixture
def told(tmp_path: Path) -> Path:
    (tmp_path / "told").mkdir()
    return tmp_path / "told"


def sink(out: Path, told: Path, **more: int) -> Parquet:
    made = Parquet(out, interval=0.1, **more)
    made.disk = Told(told)
    return made


def check(run: Run, out: Path) -> None:
    """Each row is there once, and the ranges of the files neither overlap nor miss an epoch."""
    (rows,) = taken(run).values()
    table = pq.read_table(out)
    assert table.num_rows == rows
    at = np.arange(rows)
    for key in (0, 1, 4999):
        values = (at % 997 * 1.0)[at * 7919 % 5000 == key]
        found = table.filter(pc.equal(table["k"], key)).sort_by("n")
        assert found["n"].to_pylist() == list(range(1, values.size + 1)), "each once"
        assert np.array_equal(found["t"].to_numpy(), np.cumsum(values))
    following = 0
    for file in sorted(out.glob("*.parquet")):
        said = pq.read_metadata(file).metadata
        assert int(said[b"holdfast.first_epoch"]) == following
        following = int(said[b"holdfast.last_epoch"]) + 1
    assert following == run.records()[-1].epoch + 1


def test_a_writer_that_was_stopped_at_its_last_call_publishes_nothing_when_it_wakes(
    kept: list[Run], tmp_path: Path, told: Path
) -> None:
    out = tmp_path / "out"
    run = one_line(sink(out, told), pairs()).start(sites=3, partitions=6)
    kept.append(run)
    until_protected(run, 3)
    (told / "stop").touch()
    until(lambda: [*told.glob("stopped-*")], "a writer stops")
    (pid,) = (int(f.name.split("-")[1]) for f in told.glob("stopped-*"))
    try:
        until(lambda: run.status()["dead"], "it is taken for dead")
        before = {f.name for f in out.glob("*.parquet")}
        until(lambda: {f.name for f in out.glob("*.parquet")} - before, "another one publishes")
    finally:
        os.kill(pid, signal.SIGCONT)
    until_rows(run)
    run.stop(timeout=PATIENCE_S)
    check(run, out)


def test_a_flow_waits_for_a_full_disk_and_loses_nothing(
    kept: list[Run], tmp_path: Path, told: Path
) -> None:
    out = tmp_path / "out"
    run = one_line(sink(out, told, held_bytes_max=1 << 18)).start(sites=2, partitions=4)
    kept.append(run)
    until_rows(run)
    (told / "full").touch()
    until(lambda: run.sink_report("out").get("away"), "the sink says so")
    assert "No space left" in run.sink_report("out")["away"]
    last: list[int] = []

    def waits() -> bool:
        last.append(run.status()["rows_in"])
        return len(last) > 20 and len(set(last[-20:])) == 1

    until(waits, "the source is held back")
    assert not run.ended(0) and run.sink_report("out")["held_rows"] > 0
    (told / "full").unlink()
    until_rows(run)
    until(lambda: run.sink_report("out")["away"] is None, "the sink writes again")
    run.stop(timeout=PATIENCE_S)
    check(run, out)


def test_a_site_does_not_stand_still_while_the_last_rows_wait_for_the_disk(
    kept: list[Run], tmp_path: Path, told: Path
) -> None:
    """If it did, its status would not say what it waits for."""
    out = tmp_path / "out"
    made = sink(out, told)
    made.interval_s = 3600.0  # everything is written at the end
    run = one_line(made).start(sites=1, partitions=4)
    kept.append(run)
    until_rows(run)
    (told / "full").touch()
    stopping = threading.Thread(target=run.stop, kwargs={"timeout": PATIENCE_S})
    stopping.start()
    try:
        until(lambda: run.sink_report("out").get("away"), "the sink says so")
        assert not run.ended(0)
    finally:
        (told / "full").unlink()
        stopping.join()
    check(run, out)


def test_files_that_are_gone_are_missed_by_a_flow_that_goes_on(
    kept: list[Run], tmp_path: Path
) -> None:
    out, store = tmp_path / "out", str(tmp_path / "store")
    run = one_line(parquet(out, interval=0.1)).start(
        sites=2, partitions=4, checkpoint=Checkpoint(store)
    )
    kept.append(run)
    until_rows(run)
    run.stop(timeout=PATIENCE_S)
    files = sorted(out.glob("*.parquet"))
    last = int(pq.read_metadata(files[-1]).metadata[b"holdfast.last_epoch"])
    before = int(pq.read_metadata(files[-2]).metadata[b"holdfast.last_epoch"])
    assert last == run.records()[-1].epoch, "epochs without rows count"
    files[-1].unlink()
    with pytest.raises(SinkRewoundError, match="allow_missing") as caught:
        one_line(parquet(out)).start(sites=1, partitions=4, restore_from=store)
    assert (caught.value.sink, caught.value.committed, caught.value.found) == ("out", last, before)
    again = one_line(parquet(out, allow_missing=True)).start(
        sites=1, partitions=4, restore_from=store
    )
    kept.append(again)
    until_rows(again)
    again.stop(timeout=PATIENCE_S)
    assert again.records()[0].epoch == last + 1
    assert (out / f"part-{last + 1:012d}.parquet").exists()
