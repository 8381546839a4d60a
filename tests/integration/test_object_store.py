"""What a flow keeps for later is in an object store, where nothing is renamed or appended to."""

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import FlowError
from holdfast.api.options import Checkpoint
from holdfast.errors import StoreTakenError
from holdfast.sinks import parquet
from holdfast.storage import generations
from holdfast.storage.files import Folder
from holdfast.storage.restore_point import RestorePoint
from holdfast.ui.check import check_store
from tests.support import object_store
from tests.support.lines import one_line
from tests.support.races import raced
from tests.support.runs import until
from tests.support.stored_flow import Driver, drivers, kill_again_and_again, undisturbed

__all__ = ["drivers", "undisturbed"]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[object_store.Server]:
    server = object_store.Server(tmp_path_factory.mktemp("store"))
    server.start()
    yield server
    server.kill()


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in object_store.KEYS.items():
        monkeypatch.setenv(name, value)


def test_files_are_there_when_they_are_whole(store: object_store.Server) -> None:
    folder = Folder(store.url("files"))
    batch = pa.record_batch({"x": [1, 2, 3]})
    with pytest.raises(ZeroDivisionError), folder.growing("a/half.arrow", batch.schema) as out:
        out.add(batch)
        1 / 0  # noqa: B018
    folder.write("a/b/whole.arrow", [batch])
    folder.write("a/b/whole.arrow", [batch, batch])
    assert folder.list("a") == ["a/b/whole.arrow"] and folder.folders("a") == ["a/b"]
    assert [b.num_rows for b in folder.read("a/b/whole.arrow")] == [3, 3]
    assert folder.sizes(["a/b/whole.arrow", "a/half.arrow"])["a/half.arrow"] is None
    assert folder.unfinished() == []
    folder.remove()
    assert folder.list() == []


def test_objects_are_written_under_their_own_names_and_never_copied(
    store: object_store.Server,
) -> None:
    """A move is a copy and a removal there: a second request for every byte."""
    folder, batch = Folder(store.url("own")), pa.record_batch({"x": pa.array(range(500_000))})
    requests = len(store.requests())
    folder.write("a/small.arrow", [batch.slice(0, 3)])
    with folder.growing("a/large.arrow", batch.schema) as out:
        for _ in range(5):  # in more than one part
            out.add(batch)
    asked = store.requests()[requests:]
    assert not [r for r in asked if ".part" in r or r.startswith("DELETE")]
    assert len([r for r in asked if r.startswith("PUT") and "small" in r]) == 1
    assert [b.num_rows for b in folder.read("a/large.arrow")] == [500_000] * 5


def test_an_object_that_is_not_completed_is_not_there(store: object_store.Server) -> None:
    folder, batch = Folder(store.url("half")), pa.record_batch({"x": pa.array(range(500_000))})
    for name, batches in (("small", 1), ("large", 5)):
        with pytest.raises(ZeroDivisionError), folder.growing(f"{name}.arrow", batch.schema) as out:
            for _ in range(batches):
                out.add(batch)
            1 / 0  # noqa: B018
    assert folder.list() == []
    assert not [r for r in store.requests() if "half/small" in r]


def test_a_flow_is_stopped_and_goes_on(store: object_store.Server, kept, tmp_path: Path) -> None:
    def rows_of(name: str) -> pa.Table:
        return pq.read_table(tmp_path / name).sort_by([("k", "ascending"), ("n", "ascending")])

    url, out = store.url("stopped"), parquet(tmp_path / "out")
    run = one_line(out).start(sites=2, partitions=6, checkpoint=Checkpoint(url))
    kept.append(run)
    until(lambda: run.status()["rows_in"] > 10_000, "some rows are taken")
    run.stop()
    run.wait()
    assert check_store(url).sound
    rows = RestorePoint.load(url).rows + 10_000
    again = one_line(out, rows=rows).start(sites=3, partitions=6, restore_from=url)
    alone = one_line(parquet(tmp_path / "right"), rows=rows).start(sites=1, partitions=6)
    kept.extend([again, alone])
    assert again.wait(60) and alone.wait(60)
    assert rows_of("out").num_rows == rows and rows_of("out").equals(rows_of("right"))


def test_everything_is_killed_again_and_again(
    store: object_store.Server,
    undisturbed: dict[str, pa.Table],
    drivers: list[Driver],
    tmp_path: Path,
) -> None:
    kill_again_and_again(store.url("running"), "None", undisturbed, drivers, tmp_path)


def test_a_store_that_cannot_be_reached_is_an_error(store: object_store.Server) -> None:
    with pytest.raises(FlowError, match="nowhere"):
        RestorePoint.load(store.url("nowhere"))


def test_of_those_who_resume_at_once_one_wins(store: object_store.Server) -> None:
    url = store.url("raced")
    first = generations.claim(Folder(url), "f")
    for last in range(first, first + 3):
        won = raced(4, lambda _, last=last: generations.claim(Folder(url), "f", last))
        assert len(won) <= 1
        if not won:  # all have seen each other, and given up
            generations.claim(Folder(url), "f", last)
        with pytest.raises(StoreTakenError, match="another process owns the store"):
            generations.check(Folder(url), last)
        generations.check(Folder(url), last + 1)
