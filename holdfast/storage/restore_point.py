"""Restore points: the state and the results of a flow's first epochs, in files that all sites can
access.

A restore point replaces the first epochs of its flow. The replicas of the first view load their
state from it instead of starting empty, and egresses emit its results, in order, before any others.
Replicas that join later get their state by a hand-over, as usual.

A restore point has one of three origins. The batch job wrote it after processing a history. Or it
is the savepoint of a flow of the same stages that was stopped: its sinks have the results, and its
sources continue at their offsets. Or it is the last checkpoint of a flow that was lost while it
ran. Then it also lists the records of the epochs since, which must be repeated unchanged, because
sinks may or may not have their results.
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

VERSION = 1
"""The version of manifests. Version 0 had none, and no `plan`: it is read."""


class _ManifestVersion(msgspec.Struct, frozen=True):
    version: int = 0


class Kind(Enum):
    """The origin of a restore point."""

    HISTORY = "history"
    """Rows that a batch job processed."""
    RUNNING = "running"
    """A flow that is running, or was lost while it ran."""
    STOPPED = "stopped"
    """A flow that was stopped and drained: its sinks have all results of its epochs."""
    ENDED = "ended"
    """A flow whose sources have ended: there is nothing to resume."""


class Delta(msgspec.Struct, frozen=True, array_like=True):
    """A file with state of the partitions ``[first, end)``: rows of a table, which replace the rows
    of earlier deltas; or, if `gone`, keys that were removed from the table."""

    first: int
    end: int
    table: str
    file: str
    gone: bool = False


class Stored(msgspec.Struct, frozen=True, array_like=True):
    """A sink of a flow that was stopped or lost: the saved state of its egress, and the file of the
    rows that were not durable elsewhere. `epochs` lists (epoch, rows in the file)."""

    saved: bytes
    epochs: list[tuple[int, int]] = []
    file: str = ""


class RestorePoint(msgspec.Struct, frozen=True):
    """The manifest: the location and the list of the files of a restore point."""

    place: str
    epochs: int
    """Number of epochs that it replaces, from epoch 0 on."""
    rows: int
    """Number of input rows of these epochs. They have the first sequence numbers."""
    mark: bytes
    """The watermark after these epochs, from `Watermark.save`; empty if the flow has none."""
    state: dict[int, list[tuple[int, str, str]]]
    """By stage: partition, table and file."""
    results: dict[int, list[str]]
    """By sink: a file for each of the first epochs; epochs beyond the list have no results."""
    sources: dict[int, bytes] = {}
    """By source of a flow that was stopped: its saved position, as the ingress wrote it."""
    waiting: dict[int, list[str]] = {}
    """By push source: the files with rows that are in no epoch."""
    offsets: list[tuple[int, int, int]] = []
    """Source, split, and the offset of the first row that is in no epoch."""
    stages: list[str] = []
    partitions: int = 0
    deltas: dict[int, list[Delta]] = {}
    """By stage of a flow that ran: its state, in the order in which to install it."""
    sinks: dict[int, Stored] = {}
    records: list[EpochRecord] = []
    """The known records of later epochs."""
    push_batches: dict[int, list[str]] = {}
    """By push source: the files of the push batches since the checkpoint, in order."""
    resolved: dict[str, Any] = {}
    """What the sources resolved before the first start of the flow."""
    flow: str = ""
    incarnation: str = ""
    """The incarnation of the first start of the flow; sinks see the same one after a resume."""
    generation: int = 0
    """The generation that wrote it: see `holdfast.storage.generations`."""
    every_ms: int = 0
    """Checkpoint interval in milliseconds; 0 if the flow stores only a savepoint when it stops."""
    fresh: bool = False
    """Whether the flow had processed nothing when the restore point was first written."""
    first: bool = False
    """Whether it is the first manifest of its generation. It then lists the records and push
    batches that were known when the generation began."""
    elsewhere: bool = False
    """Whether its files are at `place` instead of next to the manifest."""
    kind: Kind = Kind.HISTORY
    files: dict[str, FileInfo] = {}
    """The expected length, rows and checksum of every file of state, results and rows. Empty for a
    history, whose files have only their own trailers."""
    home: str = ""
    """The folder of the manifest and the push batches."""
    plan: list[dict[str, str]] = []
    """What the stages were, as `holdfast.plan.fingerprint` describes them; empty if an earlier
    version wrote it."""
    version: int = 0

    @property
    def stopped(self) -> bool:
        """Whether it belongs to a flow that was stopped or lost."""
        return self.kind in (Kind.STOPPED, Kind.RUNNING)

    @property
    def lost(self) -> bool:
        """Whether it belongs to a flow that was lost while it ran."""
        return self.kind is Kind.RUNNING

    @property
    def untouched(self) -> bool:
        """Whether no sink can have received results of the lost flow."""
        return self.fresh and not self.records

    def waiting_of(self, source: int) -> Iterator[pa.RecordBatch]:
        """Read the rows of a push source that are in no epoch."""
        for file in self.waiting.get(source, []):
            yield from self._read(file)

    def push_batches_of(self, source: int) -> Iterator[tuple[bytes, list[bytes]]]:
        """Read the push batches of a source since the checkpoint: header, and rows as Arrow IPC."""
        folder = Folder(self.home or self.place)
        for file in self.push_batches.get(source, []):
            header, *bodies = folder.read_data(file)
            yield header, bodies

    def save(self, folder: Folder) -> None:
        """Write the manifest, which `load` reads. It is written after all other files."""
        manifest = msgspec.structs.replace(self, version=VERSION)
        folder.put(layout.manifest_file(self.generation), manifest)

    @classmethod
    def load(cls, place: str) -> RestorePoint:
        """Read the last manifest that was saved there. Only the latest generation counts."""
        folder = Folder(place)
        generation = layout.latest(folder.list(layout.MANIFESTS))
        if generation < 0:
            raise _no_restore_point(folder)
        name = layout.manifest_file(generation)
        found = folder.get(name, _ManifestVersion).version
        if found > VERSION:
            raise FlowError(
                f"the manifest {name} at {place} has version {found}, and this Holdfast reads "
                f"version {VERSION} at most: a later Holdfast wrote it",
                hint="resume the flow with the version of Holdfast that it last ran with, or a "
                "later one",
            )
        restore_point = folder.get(name, cls)
        if restore_point.generation != generation:
            raise folder.damaged(
                name, f"it is the manifest of generation {restore_point.generation}"
            )
        strange = [file for file in restore_point.named() if not layout.is_known(file)]
        if strange or restore_point.epochs < 0 or restore_point.rows < 0:
            value = strange[0] if strange else restore_point.epochs
            raise folder.damaged(name, f"it contains an invalid value: {value}")
        unknown = [file for file in restore_point.named() if file not in restore_point.files]
        if unknown and not restore_point.elsewhere:
            raise folder.damaged(name, f"it has no length and checksum of {unknown[0]}")
        where = restore_point.place if restore_point.elsewhere else place
        return msgspec.structs.replace(restore_point, place=where, home=place)

    def named(self) -> list[str]:
        """List all files of the restore point except push batches."""
        named = [delta.file for deltas in self.deltas.values() for delta in deltas]
        named += [file for stage in self.state.values() for _, _, file in stage]
        named += [file for files in self.waiting.values() for file in files]
        named += [stored.file for stored in self.sinks.values() if stored.file]
        return named + [file for files in self.results.values() for file in files]

    def check(self) -> None:
        """Raise unless all files exist and have the expected length. Otherwise a site would fail
        only when it reads them, while the flow runs. Readers check the contents."""
        named, folder = self.named(), Folder(self.place)
        sizes = folder.sizes(named)
        missing = [name for name in named if sizes[name] is None]
        if missing:
            raise StoreDamagedError(
                f"{self.place} is incomplete: {missing[0]} is missing"
                + (f", and {len(missing) - 1} more files" if len(missing) > 1 else ""),
                hint="check whether files were removed, or copied while the flow ran; "
                f"`holdfast check {self.home or self.place}` finds all damage",
            )
        for name in named:
            expected = self.files.get(name)
            if expected is not None and sizes[name] != expected.nbytes:
                wrong = f"it has {sizes[name]} bytes instead of {expected.nbytes}"
                raise folder.damaged(name, wrong)

    def _read(self, file: str) -> list[pa.RecordBatch]:
        return Folder(self.place).read(file, self.files.get(file))

    def state_of(self, stage: int, first: int, end: int) -> Iterator[tuple[Delta, pa.RecordBatch]]:
        """Read the state of a stage's partitions ``[first, end)`` in the order in which to install
        it. The batches may include rows of other partitions."""
        deltas = [Delta(p, p + 1, table, file) for p, table, file in self.state.get(stage, [])]
        for delta in deltas + self.deltas.get(stage, []):
            if delta.first < end and first < delta.end:
                for batch in self._read(delta.file):
                    yield delta, batch

    def held_by(self, sink: int, schema: pa.Schema) -> list[tuple[int, pa.RecordBatch]]:
        """Return the rows of a sink that were not durable elsewhere, by epoch."""
        stored = self.sinks[sink]
        by_epoch: list[tuple[int, pa.RecordBatch]] = []
        if stored.epochs:
            batches = list(self._read(stored.file))
            rows = pa.Table.from_batches(batches, None if batches else schema).combine_chunks()
            (batch,) = rows.to_batches()
            at = 0
            for epoch, count in stored.epochs:
                by_epoch.append((epoch, batch.slice(at, count)))
                at += count
        return by_epoch

    def result_of(self, sink: int, epoch: int, schema: pa.Schema) -> pa.RecordBatch:
        """Return the results of a sink in one of its first epochs."""
        files = self.results.get(sink, [])
        batches = self._read(files[epoch]) if epoch < len(files) else ()
        table = pa.Table.from_batches(batches, None if batches else schema).combine_chunks()
        (batch,) = table.to_batches() or [pa.RecordBatch.from_pylist([], schema)]
        return batch

    def remove(self) -> None:
        """Remove the files, when no site needs them."""
        with contextlib.suppress(OSError):  # files that remain do no harm
            Folder(self.place).remove()


def _no_restore_point(folder: Folder) -> FlowError:
    """Explain why the folder has no restore point."""
    if folder.sizes([layout.FIRST_FORMAT])[layout.FIRST_FORMAT] is not None:
        return FlowError(
            f"{folder.place} was written by an earlier version of Holdfast, whose files have no "
            "checksums and cannot be verified",
            hint="resume with the version that wrote it, or start the flow from its sources",
        )
    claim = generations.holder(folder, generations.last_generation(folder))
    if claim is not None:
        return FlowError(
            f"nothing has been stored at {folder.place} yet: flow {claim.flow!r} was started there "
            f"({claim.who}) and lost before it ran",
            hint="start it again with checkpoint=, without restore_from=",
        )
    return FlowError(
        f"no restore point at {folder.place}: {layout.MANIFESTS} is missing",
        hint="use a folder that the driver and all executors can access",
    )


def store_state(folder: Folder, stage: int, tables: Mapping[str, StateTable]) -> None:
    """Write the tables of a stage, or of some of its partitions: one file per partition."""
    for name, table in tables.items():
        for partition in table.held():
            file = f"{layout.STATE}/{stage}/{partition}/{name}.arrow"
            folder.write(file, [table.extract([partition])])


def stored_state(folder: Folder) -> dict[int, list[tuple[int, str, str]]]:
    """List what `store_state` wrote, in the form of `RestorePoint.state`."""
    state: dict[int, list[tuple[int, str, str]]] = {}
    for file in folder.list(layout.STATE):
        _, stage, partition, table = file.removesuffix(".arrow").split("/")
        state.setdefault(int(stage), []).append((int(partition), table, file))
    return state
