"""What a flow may begin with: the state after epochs that were computed elsewhere or before, and
what they gave, in files that all sites reach.

A past stands for the first epochs of its flow. Copies of stages that are there from the first view
on take their state from it, instead of none; egresses take its results, in order, before any
others. Copies that are made later are handed over as ever.

It comes from a history that the batch job went through, or from a flow of the same stages that was
stopped: then its sinks have the results, and its sources go on where they were.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Mapping, Sequence
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs

from holdfast.errors import FlowError
from holdfast.flow.state import StateTable

STATE, RESULTS, SOURCES, WAITING = "state", "results", "sources", "waiting"
MANIFEST = "manifest.arrow"
PART_ROWS = 50_000
"""So many rows of state are put in at once."""


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

    @property
    def stopped(self) -> bool:
        """Whether it is that of a flow that was stopped."""
        return bool(self.sources)

    def waiting_of(self, source: int) -> list[pa.RecordBatch]:
        """The rows of a fed source that are in no epoch."""
        folder = Folder(self.place)
        return [batch for file in self.waiting.get(source, []) for batch in folder.read(file)]

    def save(self) -> None:
        """So that `load` finds it: the last thing that is written."""
        data = msgspec.msgpack.encode(self)
        Folder(self.place).write(MANIFEST, [pa.record_batch({"data": [data]})])

    @classmethod
    def load(cls, place: str) -> Past:
        """What `save` has put there."""
        (batch,) = Folder(place).read(MANIFEST)
        return msgspec.msgpack.decode(batch.column("data")[0].as_py(), type=cls)

    def state_of(self, stage: int, first: int, end: int) -> Iterator[tuple[str, pa.RecordBatch]]:
        """The state of a stage's partitions ``[first, end)``: table, and some of its rows."""
        folder = Folder(self.place)
        for partition, table, file in self.state.get(stage, []):
            if first <= partition < end:
                for batch in folder.read(file):
                    yield table, batch

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

    def write(self, name: str, batches: Sequence[pa.RecordBatch]) -> None:
        """Add a file; it is there when it is whole."""
        path = f"{self._root}/{name}"
        hidden = f"{path}.{uuid.uuid4().hex}.part"
        self._files.create_dir(path.rsplit("/", 1)[0])
        with (
            self._files.open_output_stream(hidden) as out,
            pa.ipc.new_stream(out, batches[0].schema) as writer,
        ):
            for batch in batches:
                for start in range(0, batch.num_rows, PART_ROWS):
                    writer.write_batch(batch.slice(start, PART_ROWS))
        self._files.move(hidden, path)

    def read(self, name: str) -> list[pa.RecordBatch]:
        try:
            with self._files.open_input_stream(f"{self._root}/{name}") as file:
                return list(pa.ipc.open_stream(file))
        except FileNotFoundError:
            raise FlowError(
                f"what the flow begins with is not at {self._place} ({name} is missing)",
                hint="the folder must be one that the driver and all executors reach",
            ) from None

    def list(self, name: str) -> list[str]:
        """The names of all whole files in a folder of this one."""
        where = pafs.FileSelector(f"{self._root}/{name}", allow_not_found=True, recursive=True)
        found = (info.path for info in self._files.get_file_info(where) if info.is_file)
        start = len(self._root) + 1
        return sorted(path[start:] for path in found if path.endswith(".arrow"))

    def remove(self) -> None:
        info = self._files.get_file_info(self._root)
        if info.type != pafs.FileType.NotFound:
            self._files.delete_dir(self._root)
