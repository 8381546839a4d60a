"""What a flow may begin with: the state after epochs that were computed elsewhere or before, and
what they gave, in files that all sites reach.

A restore point stands for the first epochs of its flow. Replicas of stages that are there from the
first view on take their state from it, instead of none; egresses take its results, in order, before
any others. Replicas that are made later are handed over as ever.

It comes from a history that the batch job went through, or from a flow of the same stages that was
stopped: then its sinks have the results, and its sources go on where they were. Or it is the last
checkpoint of a flow that was lost while it ran. Then its epochs since are known as well, and have
to come again as they were, for sinks may have their results or not.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from enum import Enum
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.core.records import EpochRecord
from holdfast.engine.state import StateTable
from holdfast.errors import FlowError, StoreDamagedError
from holdfast.storage import generations, layout
from holdfast.storage.files import FileInfo, Folder


class Kind(Enum):
    """What a past is of."""

    HISTORY = "history"
    """Rows that a batch job went through."""
    RUNNING = "running"
    """A flow that runs, or was lost while it ran."""
    STOPPED = "stopped"
    """A flow that was stopped and drained: its sinks have everything up to here."""
    ENDED = "ended"
    """A flow whose sources have ended: there is nothing to go on with."""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """A file with state of the partitions ``[first, end)``: rows of a table, which replace those of
    deltas before it; or keys that are `gone` from it."""

    first: int
    end: int
    table: str
    file: str
    gone: bool = False


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A sink of a flow that was stopped or lost: what its egress knew, as it saves that, and how
    many rows of which epochs are in the file, because they were not durable elsewhere."""

    saved: bytes
    epochs: list[tuple[int, int]] = []
    file: str = ""


class RestorePoint(msgspec.Struct, frozen=True):
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
    deltas: dict[int, list[Delta]] = {}
    """Of every stage of a flow that ran: its state, in the order in which it is to be put in."""
    sinks: dict[int, Stored] = {}
    records: list[EpochRecord] = []
    """Of the epochs after these, as far as any are known."""
    push_batches: dict[int, list[str]] = {}
    """Of every source that was fed: what has come in since, in files, in order."""
    resolved: dict[str, Any] = {}
    """What was found out about the sources before the flow was started first."""
    flow: str = ""
    incarnation: str = ""
    """That of the flow when it was started first: to its sinks it is still the same."""
    generation: int = 0
    """The generation that has written it: see `holdfast.storage.generations`."""
    every_ms: int = 0
    """How often a checkpoint is stored while the flow runs; 0: only when it is stopped."""
    fresh: bool = False
    """Whether the flow had not begun when it was written first."""
    first: bool = False
    """Whether it is the first manifest of its generation. Then it has the records and push batches
    that were known when that began."""
    elsewhere: bool = False
    """Whether its files are at `place`, and not beside the manifest."""
    kind: Kind = Kind.HISTORY
    files: dict[str, FileInfo] = {}
    """What every file of state, results and rows must be like. Of a history nothing is known but
    what the files say of themselves."""
    home: str = ""
    """Where the manifest is, and the push batches are."""

    @property
    def stopped(self) -> bool:
        """Whether it is that of a flow that was stopped, or lost."""
        return self.kind in (Kind.STOPPED, Kind.RUNNING)

    @property
    def lost(self) -> bool:
        """Whether it is that of a flow that has not come to an end."""
        return self.kind is Kind.RUNNING

    @property
    def untouched(self) -> bool:
        """Whether no sink can have got anything of the flow that was lost."""
        return self.fresh and not self.records

    def waiting_of(self, source: int) -> Iterator[pa.RecordBatch]:
        """The rows of a push source that are in no epoch."""
        for file in self.waiting.get(source, []):
            yield from self._read(file)

    def push_batches_of(self, source: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """What came in of a push source since the checkpoint: a header, and rows as Arrow IPC."""
        folder = Folder(self.home or self.place)
        for file in self.push_batches.get(source, []):
            header, *bodies = folder.read_data(file)
            yield header, bodies

    def save(self, folder: Folder) -> None:
        """So that `load` finds it: the last thing that is written."""
        folder.put(layout.manifest_file(self.generation), self)

    @classmethod
    def load(cls, place: str) -> RestorePoint:
        """What was saved there last. Only of the latest generation anything counts."""
        folder = Folder(place)
        generation = layout.latest(folder.list(layout.MANIFESTS))
        if generation < 0:
            raise _nothing_in(folder)
        name = layout.manifest_file(generation)
        restore_point = folder.get(name, cls)
        if restore_point.generation != generation:
            raise folder.damaged(
                name, f"it is the manifest of generation {restore_point.generation}"
            )
        strange = [file for file in restore_point.named() if not layout.is_known(file)]
        if strange or restore_point.epochs < 0 or restore_point.rows < 0:
            raise folder.damaged(
                name, f"it says what cannot be: {strange[0] if strange else restore_point.epochs}"
            )
        unknown = [file for file in restore_point.named() if file not in restore_point.files]
        if unknown and not restore_point.elsewhere:
            raise folder.damaged(name, f"it does not say how long {unknown[0]} is")
        where = restore_point.place if restore_point.elsewhere else place
        return msgspec.structs.replace(restore_point, place=where, home=place)

    def named(self) -> list[str]:
        """All files that it consists of, but for push batches."""
        named = [delta.file for deltas in self.deltas.values() for delta in deltas]
        named += [file for stage in self.state.values() for _, _, file in stage]
        named += [file for files in self.waiting.values() for file in files]
        named += [stored.file for stored in self.sinks.values() if stored.file]
        return named + [file for files in self.results.values() for file in files]

    def check(self) -> None:
        """Whether all files are there, and as long as they were: those who read them would only
        find out when the flow runs. What is in them is checked by whoever reads it."""
        named, folder = self.named(), Folder(self.place)
        sizes = folder.sizes(named)
        missing = [name for name in named if sizes[name] is None]
        if missing:
            raise StoreDamagedError(
                f"{self.place} is not whole: {missing[0]} is missing"
                + (f", and {len(missing) - 1} more files" if len(missing) > 1 else ""),
                hint="were files removed, or copied while the flow ran? "
                f"`holdfast check {self.home or self.place}` says what else is wrong",
            )
        for name in named:
            expected = self.files.get(name)
            if expected is not None and sizes[name] != expected.nbytes:
                wrong = f"it has {sizes[name]} bytes instead of {expected.nbytes}"
                raise folder.damaged(name, wrong)

    def _read(self, file: str) -> list[pa.RecordBatch]:
        return Folder(self.place).read(file, self.files.get(file))

    def state_of(self, stage: int, first: int, end: int) -> Iterator[tuple[Delta, pa.RecordBatch]]:
        """The state of a stage's partitions ``[first, end)`` in the order in which it is to be put
        in, and perhaps that of others."""
        deltas = [Delta(p, p + 1, table, file) for p, table, file in self.state.get(stage, [])]
        for delta in deltas + self.deltas.get(stage, []):
            if delta.first < end and first < delta.end:
                for batch in self._read(delta.file):
                    yield delta, batch

    def held_by(self, sink: int, schema: pa.Schema) -> list[tuple[int, pa.RecordBatch]]:
        """The rows that a sink had, and that were not durable elsewhere, by epoch."""
        stored = self.sinks[sink]
        found: list[tuple[int, pa.RecordBatch]] = []
        if stored.epochs:
            batches = list(self._read(stored.file))
            rows = pa.Table.from_batches(batches, None if batches else schema).combine_chunks()
            (batch,) = rows.to_batches()
            at = 0
            for epoch, count in stored.epochs:
                found.append((epoch, batch.slice(at, count)))
                at += count
        return found

    def result_of(self, sink: int, epoch: int, schema: pa.Schema) -> pa.RecordBatch:
        """What a sink gets in one of its first epochs."""
        files = self.results.get(sink, [])
        found = self._read(files[epoch]) if epoch < len(files) else ()
        table = pa.Table.from_batches(found, None if found else schema).combine_chunks()
        (batch,) = table.to_batches() or [pa.RecordBatch.from_pylist([], schema)]
        return batch

    def remove(self) -> None:
        """Nobody needs it any more."""
        with contextlib.suppress(OSError):  # it is only in the way
            Folder(self.place).remove()


def _nothing_in(folder: Folder) -> FlowError:
    """Why there is nothing to go on from."""
    if folder.sizes([layout.FIRST_FORMAT])[layout.FIRST_FORMAT] is not None:
        return FlowError(
            f"{folder.place} was written by an earlier version of Holdfast, whose files have no "
            "checksums: whether they are whole cannot be told",
            hint="go on with the version that wrote it, or start the flow from its sources",
        )
    begun = generations.holder(folder, generations.last_generation(folder))
    if begun is not None:
        return FlowError(
            f"nothing has been stored at {folder.place} yet: flow {begun.flow!r} was started there "
            f"({begun.who}) and lost before it ran",
            hint="start it again with checkpoint=, without restore_from=",
        )
    return FlowError(
        f"what the flow begins with is not at {folder.place} ({layout.MANIFESTS} is missing)",
        hint="the folder must be one that the driver and all executors reach",
    )


def store_state(folder: Folder, stage: int, tables: Mapping[str, StateTable]) -> None:
    """Write the tables of a stage, or of some of its partitions: a file for each of these."""
    for name, table in tables.items():
        for partition in table.held():
            file = f"{layout.STATE}/{stage}/{partition}/{name}.arrow"
            folder.write(file, [table.extract([partition])])


def stored_state(folder: Folder) -> dict[int, list[tuple[int, str, str]]]:
    """What `store_state` has written, as a `RestorePoint` has it."""
    state: dict[int, list[tuple[int, str, str]]] = {}
    for file in folder.list(layout.STATE):
        _, stage, partition, table = file.removesuffix(".arrow").split("/")
        state.setdefault(int(stage), []).append((int(partition), table, file))
    return state
