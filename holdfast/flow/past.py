"""What a flow may begin with: the state after epochs that were computed elsewhere, and what they
gave, in files that all sites reach.

A past stands for the first epochs of its flow. Copies of stages that are there from the first view
on take their state from it, instead of none; egresses take its results, in order, before any
others. Copies that are made later are handed over as ever.
"""

from __future__ import annotations

import contextlib
import uuid
from collections.abc import Iterator, Sequence
from urllib.parse import urlsplit

import msgspec
import pyarrow as pa
import pyarrow.fs as pafs

from holdfast.errors import FlowError

STATE, RESULTS = "state", "results"
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
                f"the flow's history is not at {self._place} ({name} is missing)",
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
