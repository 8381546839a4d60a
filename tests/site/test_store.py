"""What is stored is there after a loss of power, is refused if it is damaged, and has one owner."""

from __future__ import annotations

import re
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from holdfast.control.checkpoint_store import (
    CheckpointStore,
    claimed,
    first_manifest,
    known,
    manifest_of,
)
from holdfast.core.layout import PartitionGroup, View
from holdfast.core.records import EpochRecord, Range
from holdfast.errors import FlowError, StoreDamagedError, StoreTakenError
from holdfast.net import wire
from holdfast.site.checkpoints import OpenTaskFiles
from holdfast.storage import files, generations, layout
from holdfast.storage.files import Folder, LocalDisk, RemoteDisk, located
from holdfast.storage.restore_point import Kind, RestorePoint
from tests.support.lost_power import LossyDisk, PowerLost, Survives
from tests.support.races import raced

ROWS = 10
"""Of every epoch."""
VIEW = View(0, 0, (0,), ((PartitionGroup(0, 4, (0,)),), (PartitionGroup(0, 1, (0,)),)))
KEYED, FED = (0, 0), (1, 0)
NO_EXTRAS: dict[str, Any] = {"counts": (0, 0, 0, 0), "operator": None, "egress": None}


def record(epoch: int, last: bool = False) -> EpochRecord:
    start = epoch * ROWS
    return EpochRecord(epoch, start, (Range(1, 0, start, start + ROWS),), last=last)


def state(epoch: int) -> pa.RecordBatch:
    """That of the keyed stage after an epoch."""
    return pa.record_batch(
        {"k": [f"key {n}" for n in range(epoch + 1)], "v": [epoch] * (epoch + 1)}
    )


def held(epoch: int) -> pa.RecordBatch:
    """Rows of the push source that are in no epoch."""
    return pa.record_batch({"x": [epoch, epoch + 1]})


def ends(made: EpochRecord) -> tuple[int, int]:
    """An epoch, and how many rows there are up to its end."""
    return made.epoch, made.base + made.rows


class Writer:
    """What a flow writes, its driver and its site, one thing after another."""

    def __init__(self, place: str, restore_point: RestorePoint | None = None) -> None:
        self.place, self.restore_point = place, restore_point
        self.generation = (
            restore_point.generation if restore_point else generations.claim(Folder(place), "f")
        )
        self.store = CheckpointStore(place, self.generation)
        names = {"stages": ["keyed", "pushed"], "partitions": 4, "flow": "f", "every_ms": 100}
        self.common = RestorePoint(place, 0, 0, b"", {}, {}, home=place, kind=Kind.RUNNING, **names)
        self.common = msgspec.structs.replace(self.common, generation=self.generation)
        self.before: RestorePoint | None = None
        self.base: int | None = None
        self.store.begin(first_manifest(self.common, restore_point))

    def tasks(self, epoch: int, *, stop: bool = False) -> dict[tuple[int, int], wire.TaskFiles]:
        folder, stored = Folder(self.place), {}
        taken = {"taken": epoch, "rank": 0, "committed": 0, "head": 0, "head_taken": 0}
        taken |= {"attempt": 0, "total": 0, "passed": 0, "ended": 0}
        offsets = {"0": (epoch + 1) * ROWS}
        ingress = {
            "offsets": offsets,
            "positions": {},
            "mark": b"",
            "push_readers": [taken],
            "pull_readers": [""],
        }
        for task, what in ((KEYED, "groups"), (FED, "held")):
            file = layout.task_file(self.generation, epoch, task, 0, what, stop=stop)
            out = OpenTaskFiles()
            out.add(folder, file, state(epoch) if task == KEYED else held(epoch))
            infos = out.close(folder)
            assert out.error is None
            extras = {**NO_EXTRAS, "ingress": ingress if task == FED else None}
            named = [(what, file, False)] if task == KEYED else []
            rows = file if task == FED else ""
            said = wire.TaskFiles(task, epoch, None, named, extras, [], rows, infos, stop)
            stored[task] = said
        return stored

    def records(self, *epochs: int) -> None:
        self.store.append([record(e) for e in epochs])

    def push_batch(self, number: int) -> None:
        if self.base is None:
            self.base = number - 1
        name = layout.push_batch_file(self.generation, 1, number, 0, self.base)
        rows = pa.record_batch({"data": pa.array([b"header", f"rows {number}".encode()])})
        Folder(self.place).write(name, [rows], sync=True)

    def checkpoint(self, epoch: int) -> None:
        restore_point = manifest_of(
            self.common, VIEW, *ends(record(epoch)), self.tasks(epoch), self.before
        )
        self.store.save(restore_point)
        self.before = restore_point

    def stop(self, epoch: int) -> None:
        common = msgspec.structs.replace(self.common, kind=Kind.STOPPED)
        stored = self.tasks(epoch, stop=True)
        self.store.save(manifest_of(common, VIEW, *ends(record(epoch, last=True)), stored))


def content(restore_point: RestorePoint) -> dict[str, object]:
    """Everything that a flow would begin with."""
    rows = [(delta.table, batch.to_pylist()) for delta, batch in restore_point.state_of(0, 0, 4)]
    return {
        "epochs": (restore_point.epochs, restore_point.rows, restore_point.kind),
        "state": rows,
        "waiting": [batch.to_pylist() for batch in restore_point.waiting_of(1)],
        "records": restore_point.records,
        "push_batches": list(restore_point.push_batches_of(1)),
        "sources": restore_point.sources,
    }


def resume(place: str) -> RestorePoint:
    return claimed(place, "f", generations.last_generation(Folder(place)))


# --- a loss of power -----------------------------------------------------------------------------


class Promised:
    """What must be there after the power was lost, as the flow has been told so."""

    def __init__(self) -> None:
        self.begun = False
        self.stored = self.recorded = -1
        self.stopped: int | None = None
        self.push_batches = 0


def life_of_a_flow(place: str, promised: Promised) -> None:
    """Started, stored twice, stopped, resumed, stored, lost, resumed, and stored again."""
    writer = Writer(place)
    promised.begun = True
    writer.records(0, 1)
    promised.recorded = 1
    writer.push_batch(1)
    promised.push_batches = 1
    for epoch in (2, 4):
        writer.records(epoch, epoch + 1)
        promised.recorded = epoch + 1
        for number in range(promised.push_batches + 1, epoch + 2):
            writer.push_batch(number)
            promised.push_batches = number
        writer.checkpoint(epoch)
        promised.stored = epoch
    writer.records(6)
    promised.recorded = 6
    writer.stop(7)
    promised.stopped = promised.stored = promised.recorded = promised.push_batches = 7
    restore_point = resume(place)
    promised.stopped = None
    writer = Writer(place, restore_point)
    writer.records(8, 9)
    promised.recorded = 9
    writer = Writer(place, resume(place))
    writer.records(10)
    promised.recorded = 10
    writer.checkpoint(9)
    promised.stored = 9


def on_disk(monkeypatch: pytest.MonkeyPatch, disk: LossyDisk) -> None:
    monkeypatch.setattr(files, "disk_of", lambda place: (disk, place))


def check_kept(place: str, promised: Promised) -> None:
    try:
        restore_point = resume(place)
    except FlowError as error:
        assert not promised.begun
        assert re.search("nothing has been stored|manifests is missing", str(error))
        return
    epoch = restore_point.epochs - 1
    assert epoch >= promised.stored
    if promised.stopped is not None:
        assert (restore_point.kind, epoch) == (Kind.STOPPED, promised.stopped)
    reached = epoch if restore_point.kind is Kind.STOPPED else epoch + len(restore_point.records)
    assert reached >= promised.recorded, "a sink may have it"
    found = content(restore_point)
    assert found["state"] == ([] if epoch < 0 else [("groups", state(epoch).to_pylist())])
    assert found["waiting"] == ([] if epoch < 0 else [held(epoch).to_pylist()])
    assert [r.epoch for r in restore_point.records] == list(
        range(epoch + 1, epoch + 1 + len(restore_point.records))
    )
    if restore_point.kind is Kind.RUNNING:
        rows = [data[0] for _, data in restore_point.push_batches_of(1)]
        taken = max(0, epoch)
        assert rows == [f"rows {n}".encode() for n in range(taken + 1, taken + 1 + len(rows))]
        assert taken + len(rows) >= promised.push_batches
    # And it can be gone on from.
    Writer(place, restore_point).checkpoint(max(epoch, promised.recorded) + 1)
    assert resume(place).epochs > restore_point.epochs


def test_power_is_lost_at_every_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    disk = LossyDisk()
    on_disk(monkeypatch, disk)
    life_of_a_flow("/at/store", Promised())
    steps = disk.steps
    assert steps > 150
    for until in range(steps):
        disk, promised = LossyDisk(until), Promised()
        on_disk(monkeypatch, disk)
        with pytest.raises(PowerLost):
            life_of_a_flow("/at/store", promised)
        for survives in Survives if until % 4 == 0 else (Survives.NOTHING, Survives.NAMES):
            on_disk(monkeypatch, disk.after_power_loss(survives))
            try:
                check_kept("/at/store", promised)
            except (AssertionError, FlowError) as error:
                raise AssertionError(f"{until}, {survives}: {error}; {disk.done[-5:]}") from error


def test_the_disk_that_loses_power_would_find_what_is_not_synced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Without syncs some moment loses something: the test above can fail."""
    lost = 0
    for until in range(10, 150, 7):
        disk, promised = LossyDisk(until), Promised()
        monkeypatch.setattr(disk, "sync", lambda path, disk=disk: disk.step(f"no sync {path}"))
        on_disk(monkeypatch, disk)
        with pytest.raises(PowerLost):
            life_of_a_flow("/at/store", promised)
        on_disk(monkeypatch, disk.after_power_loss(Survives.NAMES))
        try:
            check_kept("/at/store", promised)
        except (AssertionError, FlowError):
            lost += 1
    assert lost


# --- damage --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def stored(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A flow that was resumed once and lost: all kinds of files are there."""
    place = str(tmp_path_factory.mktemp("store"))
    writer = Writer(place)
    writer.records(0, 1, 2)
    writer.checkpoint(2)
    for number in (3, 4):
        writer.push_batch(number)
    writer.records(3)
    writer = Writer(place, resume(place))
    writer.records(4, 5)
    writer.push_batch(5)
    return Path(place)


def parts(place: Path) -> list[Path]:
    return sorted(f for f in place.rglob("*") if f.is_file())


def as_found(place: Path) -> RestorePoint:
    """As `resume` finds it; the folder stays as it is."""
    restore_point = known(RestorePoint.load(str(place)), Folder(str(place)))
    restore_point.check()
    return restore_point


def test_there_are_files_of_all_kinds(stored: Path) -> None:
    kinds = {f.relative_to(stored).parts[0] for f in parts(stored)}
    assert kinds == {"generations", "manifests", "checkpoints", "records", "push_batches"}
    names = [str(f.relative_to(stored)) for f in parts(stored)]
    assert all(layout.is_known(name) for name in names)
    restore_point = as_found(stored)
    assert (restore_point.epochs, len(restore_point.records)) == (3, 3)
    assert [data for _, data in restore_point.push_batches_of(1)] == [
        [f"rows {n}".encode()] for n in (3, 4, 5)
    ]


def test_every_flip_and_every_cut_of_every_file_is_found(stored: Path) -> None:
    for file in parts(stored):
        name, data = str(file.relative_to(stored)), file.read_bytes()
        files.unsealed(name, pa.py_buffer(data))
        for at in range(len(data)):
            flipped = bytearray(data)
            flipped[at] ^= 1 << at % 8
            for wrong in (flipped, data[:at]):
                with pytest.raises(ValueError):
                    files.unsealed(name, pa.py_buffer(wrong))


DAMAGE = settings(
    max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


@DAMAGE
@given(data=st.data())
def test_what_is_damaged_is_refused_by_name_or_restored_exactly(
    stored: Path, data: st.DataObject
) -> None:
    right = content(as_found(stored))
    file = data.draw(st.sampled_from(parts(stored)))
    before = file.read_bytes()
    after = data.draw(damaged(before, [f.read_bytes() for f in parts(stored)]))
    try:
        file.write_bytes(after)
        try:
            found = content(as_found(stored))
        except FlowError as error:
            assert str(stored) in str(error)
        else:
            assert found == right
    finally:
        file.write_bytes(before)


def damaged(data: bytes, others: list[bytes]) -> st.SearchStrategy[bytes]:
    """Bytes changed, cut off, left out, put in; or those of another file of the store."""
    at = st.integers(0, len(data) - 1)
    changed = st.tuples(at, st.binary(min_size=1, max_size=9)).map(
        lambda t: data[: t[0]] + t[1] + data[t[0] + len(t[1]) :]
    )
    cut = at.map(lambda n: data[:n])
    left_out = st.tuples(at, st.integers(1, 64)).map(lambda t: data[: t[0]] + data[t[0] + t[1] :])
    put_in = st.tuples(at, st.binary(min_size=1, max_size=64)).map(
        lambda t: data[: t[0]] + t[1] + data[t[0] :]
    )
    zeros = at.map(lambda n: data[:n] + bytes(len(data) - n))
    return st.one_of(changed, cut, left_out, put_in, zeros, st.sampled_from(others))


def test_a_file_cut_at_a_batch_border_is_refused(tmp_path: Path) -> None:
    """An Arrow stream that ends early looks whole to Arrow."""
    folder = Folder(str(tmp_path))
    batch = pa.record_batch({"x": range(1_000)})
    folder.write("checkpoints/000000-000000000001/whole.arrow", [batch, batch, batch])
    file = tmp_path / "checkpoints" / "000000-000000000001" / "whole.arrow"
    data = file.read_bytes()
    with pa.ipc.open_stream(data) as stream:
        stream.read_next_batch()
    once = pa.BufferOutputStream()
    with pa.ipc.new_stream(once, batch.schema) as out:
        out.write_batch(batch)
    border = once.getvalue().size - 8  # without the mark of the end
    assert sum(b.num_rows for b in pa.ipc.open_stream(data[:border])) == 1_000
    file.write_bytes(data[:border])
    with pytest.raises(StoreDamagedError, match="truncated"):
        folder.read("checkpoints/000000-000000000001/whole.arrow")


def test_a_folder_that_was_copied_elsewhere_is_the_same(stored: Path, tmp_path: Path) -> None:
    shutil.copytree(stored, tmp_path / "copy")
    restore_point = resume(str(tmp_path / "copy"))
    assert content(restore_point) == content(as_found(stored))
    assert restore_point.place == restore_point.home == str(tmp_path / "copy")


def test_a_store_of_an_earlier_version_is_refused(tmp_path: Path) -> None:
    with pa.ipc.new_stream(str(tmp_path / "manifest.arrow"), pa.schema([("data", "binary")])):
        pass
    with pytest.raises(FlowError, match="an earlier version of Holdfast"):
        RestorePoint.load(str(tmp_path))


def test_a_manifest_that_names_what_is_no_file_of_a_store_is_refused(tmp_path: Path) -> None:
    place = str(tmp_path)
    restore_point = RestorePoint(
        place, 1, 1, b"", {0: [(0, "t", "../secret.arrow")]}, {}, kind=Kind.STOPPED
    )
    restore_point.save(Folder(place))
    with pytest.raises(StoreDamagedError, match=r"an invalid value: \.\./secret"):
        RestorePoint.load(place)


# --- one owner -----------------------------------------------------------------------------------


def test_of_those_who_resume_at_once_one_wins(stored: Path, tmp_path: Path) -> None:
    for attempt in range(5):
        place = str(tmp_path / f"{attempt}")
        shutil.copytree(stored, place)
        seen = generations.last_generation(Folder(place))
        won = raced(6, lambda _, place=place, seen=seen: claimed(place, "f", seen).generation)
        assert won == [seen + 1]


class InTurn(RemoteDisk):
    """Lets claimants do one thing each in an order that is given."""

    def __init__(self, disk: pafs.FileSystem, me: int, turns: Turns) -> None:
        super().__init__(disk)
        self.me, self.turns = me, turns

    def move(self, path: str, to: str) -> None:
        with self.turns.mine(self.me):
            super().move(path, to)

    def list(self, path: str) -> list[tuple[str, bool]]:
        with self.turns.mine(self.me):
            return super().list(path)

    def remove(self, path: str) -> None:
        with self.turns.mine(self.me):
            super().remove(path)


class Turns:
    """Whose turn it is; anybody's when the order is used up, or whoever is next has finished."""

    def __init__(self, order: list[int]) -> None:
        self._order, self._changed = order, threading.Condition()
        self.finished: set[int] = set()

    def mine(self, me: int) -> Turns:
        with self._changed:
            self._changed.wait_for(lambda: self._next() in (None, me))
        return self

    def _next(self) -> int | None:
        while self._order and self._order[0] in self.finished:
            self._order.pop(0)
        return self._order[0] if self._order else None

    def __enter__(self) -> None:
        self._changed.acquire()

    def __exit__(self, *_: object) -> None:
        if self._order:
            self._order.pop(0)
        self._changed.notify_all()
        self._changed.release()

    def finish(self, me: int) -> None:
        with self._changed:
            self.finished.add(me)
            self._changed.notify_all()


@settings(max_examples=60, deadline=None)
@given(order=st.lists(st.integers(0, 2), max_size=24))
def test_where_no_name_can_be_taken_exclusively_there_is_one_winner_too(order: list[int]) -> None:
    """An object store has neither links nor, in pyarrow, conditional puts."""
    disk, turns = pafs._MockFileSystem(), Turns(list(order))
    here = threading.local()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(files, "disk_of", lambda place: (InTurn(disk, here.me, turns), place))
        patch.setattr(generations, "RIVAL_S", 0.02)
        patch.setattr(generations, "LOOK_S", 0.001)

        def claim(me: int) -> int:
            here.me = me
            try:
                return generations.claim(Folder("store"), f"flow {me}", 6)
            finally:
                turns.finish(me)

        won = raced(3, claim)
        here.me = 9
        turns.finish(9)
        assert len(won) <= 1
        if won:
            assert generations.last_generation(Folder("store")) == 7


def test_a_generation_of_old_adds_nothing_and_removes_nothing(stored: Path, tmp_path: Path) -> None:
    place = str(tmp_path / "store")
    shutil.copytree(stored, place)
    old = Writer(place, resume(place))
    old.records(6)
    new = Writer(place, resume(place))
    with pytest.raises(StoreTakenError, match=r"process \d+ on "):
        old.records(7)
    with pytest.raises(StoreTakenError):
        old.checkpoint(6)
    assert [r.epoch for r in as_found(Path(place)).records] == [3, 4, 5, 6]
    new.records(7, 8)
    restore_point = resume(place)
    assert [r.epoch for r in restore_point.records] == [3, 4, 5, 6, 7, 8]
    assert restore_point.generation == new.generation + 1


def test_a_late_manifest_of_an_old_generation_counts_for_nothing(
    stored: Path, tmp_path: Path
) -> None:
    """It had looked whether the folder was its own, and then stood still."""
    place = str(tmp_path / "store")
    shutil.copytree(stored, place)
    old = Writer(place, resume(place))
    old.records(6)
    late = manifest_of(old.common, VIEW, *ends(record(6)), old.tasks(6), old.before)
    new = Writer(place, resume(place))
    late.save(old.store.folder)
    new.records(7)
    restore_point = resume(place)
    assert restore_point.epochs == 3 and [r.epoch for r in restore_point.records] == [3, 4, 5, 6, 7]
    assert content(restore_point)["state"] == [("groups", state(2).to_pylist())]


# --- where it is ---------------------------------------------------------------------------------


def test_a_place_is_the_same_for_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert located("st1") == located("./st1/") == located(f"file:{tmp_path}/st1")
    assert located("a#b?c%20") == str(tmp_path / "a#b?c%20")
    assert located("s3://bucket/x?region=y") == "s3://bucket/x?region=y"
    Folder("st1").write("records/000000/x.arrow", [held(1)], sync=True)
    assert (tmp_path / "st1" / "records" / "000000" / "x.arrow").exists()


@pytest.fixture(autouse=True)
def local_by_default() -> Iterator[None]:
    yield
    assert isinstance(files.disk_of("/")[0], LocalDisk)
