"""What a flow may begin with: the state after epochs that were computed elsewhere or before, and
what they gave, in files that all sites reach.

A past stands for the first epochs of its flow. Copies of stages that are there from the first view
on take their state from it, instead of none; egresses take its results, in order, before any
others. Copies that are made later are handed over as ever.

It comes from a history that the batch job went through, or from a flow of the same stages that was
stopped: then its sinks have the results, and its sources go on where they were. Or it is the last
checkpoint of a flow that was lost while it ran. Then its epochs since are known as well, and have
to come again as they were, for sinks may have their results or not.
"""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs

from holdfast.core.records import EpochRecord
from holdfast.errors import FlowError
from holdfast.flow.state import StateTable

STATE, RESULTS, SOURCES, WAITING = "state", "results", "sources", "waiting"
CHECKPOINTS, RECORDS, PORTIONS = "checkpoints", "records", "portions"
MANIFEST = "manifest.arrow"
PART_ROWS = 50_000
"""So many rows of state are put in at once."""

T = TypeVar("T")


class Layer(msgspec.Struct, frozen=True, array_like=True):
    """A file with state of the partitions ``[first, end)``: rows of a table, which replace those of
    layers before it; or keys that are `gone` from it."""

    first: int
    end: int
    table: str
    file: str
    gone: bool = False


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A sink of a flow that was lost: what its egress knew, as it saves that, and how many rows of
    which epochs are in the file, because they were not durable elsewhere."""

    saved: bytes
    epochs: list[tuple[int, int]] = []
    file: str = ""


class Past(msgspec.Struct, frozen=True):
    """Where the files are, and what they are."""

    place: str
    epochs: int
    """For so many it stands, from epoch 0 on."""
    rows: int
    """So many rows came in, with the first sequence numbers."""
    mark: bytes
    """The watermark after them, as `Watermark.save` gives it; empty if the flow has none."""
    state: dict[int, list[tuple[int, str, str]]]
    """Of every stage: partition, table and file."""
    results: dict[int, list[str]]
    """Of every sink: a file for each of the first epochs, as far as there are any."""
    sources: dict[int, bytes] = {}
    """Of every source of a flow that was stopped: where it was, as the ingress saves it."""
    waiting: dict[int, list[str]] = {}
    """Of a source that was fed: the files with rows that are in no epoch."""
    offsets: list[tuple[int, int, int]] = []
    """Source, split, and the first of its rows that is in no epoch."""
    stages: list[str] = []
    partitions: int = 0
    layers: dict[int, list[Layer]] = {}
    """Of every stage of a flow that ran: its state, in the order in which it is to be put in."""
    sinks: dict[int, Stored] = {}
    records: list[EpochRecord] = []
    """Of the epochs after these, as far as any are known."""
    portions: dict[int, list[str]] = {}
    """Of every source that was fed: what has come in since, in files, in order."""
    settled: dict[str, Any] = {}
    """What was found out about the sources before the flow was started first."""
    flow: str = ""
    incarnation: str = ""
    """That of the flow when it was started first: to its sinks it is still the same."""
    life: int = 0
    """How often it has been gone on from."""
    every_ms: int = 0
    """How often it is written anew; 0 if the flow has ended."""
    owner: str = ""
    """Who writes it: see `holdfast.durable`."""
    fresh: bool = False
    """Whether it was written before the flow was started."""
    elsewhere: bool = False
    """Whether its files are at `place`, and not beside the manifest."""

    @property
    def stopped(self) -> bool:
        """Whether it is that of a flow that was stopped, or lost."""
        return bool(self.sources) or self.lost

    @property
    def lost(self) -> bool:
        """Whether it is that of a flow that has not come to an end."""
        return self.every_ms > 0

    @property
    def untouched(self) -> bool:
        """Whether no sink can have got anything of the flow that was lost."""
        return self.fresh and not self.records

    def waiting_of(self, source: int) -> Iterator[pa.RecordBatch]:
        """The rows of a fed source that are in no epoch."""
        folder = Folder(self.place)
        for file in self.waiting.get(source, []):
            yield from folder.batches(file)

    def portions_of(self, source: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """What came in of a fed source since the checkpoint: a header, and rows as Arrow IPC."""
        folder = Folder(self.place)
        for file in self.portions.get(source, []):
            header, *bodies = [d for b in folder.read(file) for d in b.column("data").to_pylist()]
            yield header, bodies

    def save(self) -> None:
        """So that `load` finds it: the last thing that is written."""
        Folder(self.place).put(MANIFEST, self)

    @classmethod
    def load(cls, place: str) -> Past:
        """What `save` has put there."""
        past = Folder(place).get(MANIFEST, cls)
        return past if past.elsewhere else msgspec.structs.replace(past, place=place)

    def check(self) -> None:
        """Whether all files are there; those who need them would only find out when it runs."""
        named = [layer.file for layers in self.layers.values() for layer in layers]
        named += [file for stage in self.state.values() for _, _, file in stage]
        named += [file for files in self.waiting.values() for file in files]
        named += [stored.file for stored in self.sinks.values() if stored.file]
        named += [file for files in self.results.values() for file in files]
        missing = Folder(self.place).missing(named)
        if missing:
            raise FlowError(
                f"{self.place} is not whole: {missing[0]} is missing"
                + (f", and {len(missing) - 1} more files" if len(missing) > 1 else ""),
                hint="were files removed, or copied while the flow ran?",
            )

    def state_of(self, stage: int, first: int, end: int) -> Iterator[tuple[Layer, pa.RecordBatch]]:
        """The state of a stage's partitions ``[first, end)`` in the order in which it is to be put
        in, and perhaps that of others."""
        folder = Folder(self.place)
        layers = [Layer(p, p + 1, table, file) for p, table, file in self.state.get(stage, [])]
        for layer in layers + self.layers.get(stage, []):
            if layer.first < end and first < layer.end:
                for batch in folder.read(layer.file):
                    yield layer, batch

    def held_by(self, sink: int) -> list[tuple[int, pa.RecordBatch]]:
        """The rows that a sink had, and that were not durable elsewhere, by epoch."""
        stored = self.sinks[sink]
        found: list[tuple[int, pa.RecordBatch]] = []
        if stored.epochs:
            rows = pa.Table.from_batches(Folder(self.place).read(stored.file)).combine_chunks()
            (batch,) = rows.to_batches()
            at = 0
            for epoch, count in stored.epochs:
                found.append((epoch, batch.slice(at, count)))
                at += count
        return found

    def result_of(self, sink: int, epoch: int, schema: pa.Schema) -> pa.RecordBatch:
        """What a sink gets in one of its first epochs."""
        files = self.results.get(sink, [])
        found = Folder(self.place).read(files[epoch]) if epoch < len(files) else ()
        table = pa.Table.from_batches(found, None if found else schema).combine_chunks()
        (batch,) = table.to_batches() or [pa.RecordBatch.from_pylist([], schema)]
        return batch

    def remove(self) -> None:
        """Nobody needs it any more."""
        with contextlib.suppress(OSError):  # it is only in the way
            Folder(self.place).remove()


def store_state(folder: Folder, stage: int, tables: Mapping[str, StateTable]) -> None:
    """Write the tables of a stage, or of some of its partitions: a file for each of these."""
    for name, table in tables.items():
        for partition in table.held():
            file = f"{STATE}/{stage}/{partition}/{name}.arrow"
            folder.write(file, [table.extract([partition])])


def stored_state(folder: Folder) -> dict[int, list[tuple[int, str, str]]]:
    """What `store_state` has written, as a `Past` has it."""
    state: dict[int, list[tuple[int, str, str]]] = {}
    for file in folder.list(STATE):
        _, stage, partition, table = file.removesuffix(".arrow").split("/")
        state.setdefault(int(stage), []).append((int(partition), table, file))
    return state


class Folder:
    """A folder on this machine, or wherever pyarrow gets to (``s3://``, ``hdfs://``, ...)."""

    def __init__(self, place: str) -> None:
        self._place = place
        self._files: pafs.FileSystem
        self._root: str
        try:
            if urlsplit(place).scheme in ("", "file"):
                self._files, self._root = pafs.LocalFileSystem(), urlsplit(place).path
            else:
                self._files, self._root = pafs.FileSystem.from_uri(place)
        except (pa.ArrowException, OSError) as error:
            raise FlowError(f"cannot get to {place}: {error}") from error
        self._root = self._root.rstrip("/")
        self._is_local = isinstance(self._files, pafs.LocalFileSystem)
        self._known: set[str] = set()
        """Folders whose own names are on the disk."""

    def write(self, name: str, batches: Sequence[pa.RecordBatch], *, sync: bool = False) -> None:
        """Add a file; it is there when it is whole. With `sync` it outlives a loss of power."""
        with self.growing(name, batches[0].schema, sync=sync) as out:
            for batch in batches:
                for start in range(0, batch.num_rows, PART_ROWS):
                    out.add(batch.slice(start, PART_ROWS))
        if sync:
            self.sync(name)

    def sync(self, name: str) -> None:
        """The names of files like this one outlive a loss of power, too."""
        if self._is_local:
            folder = os.path.dirname(f"{self._root}/{name}")
            _sync(folder)
            if folder not in self._known:  # it may be new
                _sync(os.path.dirname(folder))
                self._known.add(folder)

    def growing(self, name: str, schema: pa.Schema, *, sync: bool = False) -> Growing:
        """A file that is written a part at a time. With `sync` what is in it outlives a loss of
        power; `Folder.sync` is for its name."""
        return Growing(self._files, f"{self._root}/{name}", schema, sync and self._is_local)

    def put(self, name: str, value: msgspec.Struct) -> None:
        """Write a value, in place of what has the name. It outlives a loss of power."""
        data = msgspec.msgpack.encode(value)
        self.write(name, [pa.record_batch({"data": [data]})], sync=True)

    def get(self, name: str, kind: type[T]) -> T:
        """What `put` has written."""
        try:
            (batch,) = self.read(name)
            return msgspec.msgpack.decode(batch.column("data")[0].as_py(), type=kind)
        except (msgspec.MsgspecError, KeyError, ValueError, TypeError) as error:
            raise self._damaged(name, error) from error

    def read(self, name: str) -> list[pa.RecordBatch]:
        return list(self.batches(name))

    def batches(self, name: str) -> Iterator[pa.RecordBatch]:
        """One after another, so that they need not be in memory together."""
        try:
            with self._files.open_input_stream(f"{self._root}/{name}") as file:
                yield from pa.ipc.open_stream(file)
        except FileNotFoundError:
            raise FlowError(
                f"what the flow begins with is not at {self._place} ({name} is missing)",
                hint="the folder must be one that the driver and all executors reach",
            ) from None
        except (pa.ArrowException, EOFError) as error:
            raise self._damaged(name, error) from error

    def _damaged(self, name: str, error: Exception) -> FlowError:
        return FlowError(
            f"{name} at {self._place} is damaged, or nothing that Holdfast has written: {error}",
            hint="is this the folder that was given with store=?",
        )

    def missing(self, names: Iterable[str]) -> list[str]:
        """Which of these files are not there."""
        names = list(names)
        found = self._files.get_file_info([f"{self._root}/{name}" for name in names])
        return [name for name, info in zip(names, found, strict=True) if not info.is_file]

    def folders(self, name: str) -> list[str]:
        """The names of the folders in a folder of this one."""
        where = pafs.FileSelector(f"{self._root}/{name}", allow_not_found=True)
        kind = pafs.FileType.Directory
        found = (info.path for info in self._files.get_file_info(where) if info.type == kind)
        return sorted(path[len(self._root) + 1 :] for path in found)

    def list(self, name: str) -> list[str]:
        """The names of all whole files in a folder of this one."""
        where = pafs.FileSelector(f"{self._root}/{name}", allow_not_found=True, recursive=True)
        found = (info.path for info in self._files.get_file_info(where) if info.is_file)
        start = len(self._root) + 1
        return sorted(path[start:] for path in found if path.endswith(".arrow"))

    def remove(self, name: str = "") -> None:
        """Remove everything, or a folder or file of this one, if it is there."""
        path = f"{self._root}/{name}" if name else self._root
        self._known.discard(path)
        info = self._files.get_file_info(path)
        if info.type == pafs.FileType.Directory:
            self._files.delete_dir(path)
        elif info.type != pafs.FileType.NotFound:
            self._files.delete_file(path)


class Growing:
    """A file that is being written. It is there when it is closed, and not at all if that fails."""

    def __init__(self, files: pafs.FileSystem, path: str, schema: pa.Schema, sync: bool) -> None:
        self._files, self._path, self._sync = files, path, sync
        self._hidden = f"{path}.{uuid.uuid4().hex}.part"
        files.create_dir(path.rsplit("/", 1)[0])
        self._out = files.open_output_stream(self._hidden)
        self._writer = pa.ipc.new_stream(self._out, schema)

    def add(self, batch: pa.RecordBatch) -> None:
        self._writer.write_batch(batch)

    def close(self) -> None:
        self._writer.close()
        self._out.close()
        if self._sync:
            _sync(self._hidden)
        self._files.move(self._hidden, self._path)

    def abandon(self) -> None:
        """Leave nothing behind."""
        with contextlib.suppress(OSError, pa.ArrowException):
            self._out.close()
        with contextlib.suppress(OSError):
            self._files.delete_file(self._hidden)

    def __enter__(self) -> Growing:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: object, trace: TracebackType | None
    ) -> None:
        if kind is not None:
            self.abandon()
            return
        try:
            self.close()
        except BaseException:
            self.abandon()
            raise


def _sync(path: str) -> None:
    """Have the disk write what it was given of a file, or of a folder's names."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
