"""What the driver of a flow reads and writes in the folder that the flow is stored in.

A `CheckpointStore` belongs to one generation of the flow (see `holdfast.storage.generations`). It
first writes a manifest with everything that counts of earlier generations: from then on nothing
counts that these may still add. After every write it checks that it still owns the folder. Only
when a manifest is durable and the folder still its own, it removes what that manifest does not
name. So at any moment there is one manifest to continue from, and all that it names is there.

These functions wait only for the disk. Threads call them.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import msgspec
import pyarrow as pa

from holdfast.core.ids import TaskId
from holdfast.core.layout import View
from holdfast.core.records import EpochRecord
from holdfast.errors import FlowError
from holdfast.net import wire
from holdfast.storage import generations, layout
from holdfast.storage.files import FileInfo, Folder
from holdfast.storage.restore_point import Delta, Kind, RestorePoint, Stored

log = logging.getLogger("holdfast.checkpoint_store")

K = TypeVar("K", bound=tuple[int, int])
V = TypeVar("V")


class CheckpointStore:
    """The folder of a flow, as one generation uses it."""

    def __init__(self, place: str, generation: int) -> None:
        self.place, self.generation = place, generation
        self.folder = Folder(place)

    def begin(self, restore_point: RestorePoint) -> None:
        """Before the flow starts: write a manifest to continue from if the flow is lost at once."""
        for name in self.folder.unfinished():
            self.folder.remove(name)
        self.save(restore_point)

    def append(self, records: list[EpochRecord]) -> None:
        """Write the records of epochs. Sites may act on them only after this returns."""
        data = pa.array([msgspec.msgpack.encode(r) for r in records], pa.binary())
        name = layout.records_file(self.generation, records[0].epoch, records[-1].epoch)
        self.folder.write(name, [pa.record_batch({"data": data})], sync=True)
        self.check_owner()

    def check_owner(self) -> None:
        """Raise if another generation has claimed the folder."""
        generations.check(self.folder, self.generation)

    def save(self, restore_point: RestorePoint) -> None:
        """Write a manifest, and remove files that it makes superfluous."""
        self.check_owner()
        restore_point.save(self.folder)
        # A generation that claims the folder from here on finds this manifest, and needs no other.
        self.check_owner()
        try:
            self._tidy(restore_point)
        except (OSError, pa.ArrowException) as error:  # superfluous files do no harm
            log.warning("cannot tidy up %s: %s", self.place, error)

    def withdraw(self) -> None:
        """Leave the folder as it was found: there is nothing to continue from."""
        self.folder.remove(layout.manifest_file(self.generation))
        generations.withdraw(self.folder, self.generation)

    def _tidy(self, restore_point: RestorePoint) -> None:
        named = {name.rsplit("/", 1)[0] for name in restore_point.named()}
        for folder in self.folder.folders(layout.CHECKPOINTS):
            if folder not in named and not self._is_under_way(folder, restore_point):
                self.folder.remove(folder)
        for file in self.folder.list(layout.RECORDS):
            span = layout.records_name(file)
            if span is not None and (
                span.last < restore_point.epochs or not self._is_mine(span, restore_point)
            ):
                self.folder.remove(file)
        push_batches = {file for files in restore_point.push_batches.values() for file in files}
        for file in self.folder.list(layout.PUSH_BATCHES):
            push_batch = layout.push_batch_name(file)
            if push_batch is not None and file not in push_batches:
                taken, _ = pushed_up_to(restore_point, push_batch.source)
                if push_batch.number <= taken or not self._is_mine(push_batch, restore_point):
                    self.folder.remove(file)
        for kind in (layout.MANIFESTS, layout.GENERATIONS):
            for file in self.folder.list(kind):
                generation = layout.generation_of(file)
                if generation is not None and generation < self.generation:
                    self.folder.remove(file)

    def _is_mine(
        self, name: layout.RecordsName | layout.PushBatchName, restore_point: RestorePoint
    ) -> bool:
        return restore_point.lost and name.generation >= self.generation

    def _is_under_way(self, folder: str, restore_point: RestorePoint) -> bool:
        """Whether a folder may belong to a later checkpoint that sites are writing."""
        at = layout.checkpoint_name(folder)
        if at is None or not restore_point.lost:
            return at is None
        return at.generation >= self.generation and at.epoch >= restore_point.epochs - 1


# --- manifests ----------------------------------------------------------------------------------


def first_manifest(common: RestorePoint, restore_point: RestorePoint | None) -> RestorePoint:
    """The manifest before the flow starts: what the flow itself continues from, with all that is
    known of later epochs."""
    if restore_point is None:
        return msgspec.structs.replace(common, fresh=True, first=True)
    names = ["stages", "partitions", "resolved", "flow", "generation", "every_ms", "home", "kind"]
    names.append("plan")
    touched = restore_point.lost and not restore_point.untouched
    if not touched:  # to its sinks it is a different flow
        names.append("incarnation")
    same = {name: getattr(common, name) for name in names}
    elsewhere = restore_point.elsewhere or restore_point.place != common.place
    fresh = restore_point.fresh or not touched
    return msgspec.structs.replace(
        restore_point, elsewhere=elsewhere, fresh=fresh, first=True, **same
    )


def manifest_of(
    common: RestorePoint,
    view: View,
    epoch: int,
    rows: int,
    stored: Mapping[TaskId, wire.TaskFiles],
    before: RestorePoint | None = None,
) -> RestorePoint:
    """The manifest of the state of all tasks after an epoch, with which the input has had `rows`
    rows. If a task has stored only what has changed, the rest is in the files of the checkpoint
    `before`."""
    deltas: dict[int, list[Delta]] = {}
    sources: dict[int, wire.IngressExtras] = {}
    sinks: dict[int, Stored] = {}
    waiting: dict[int, list[str]] = {}
    files: dict[str, FileInfo] = dict(before.files) if before is not None else {}
    for task, task_files in sorted(stored.items()):
        group, extras, stage = view.group(task), task_files.extras, task[0]
        files |= task_files.infos
        if task_files.after is not None and before is not None:
            old = [x for x in before.deltas.get(stage, []) if x.first == group.first]
            deltas.setdefault(stage, []).extend(old)
        new = [Delta(group.first, group.end, *named) for named in task_files.files]
        deltas.setdefault(stage, []).extend(new)
        if extras["egress"] is not None:
            saved = msgspec.msgpack.encode(extras["egress"])
            sinks[stage] = Stored(saved, task_files.held, task_files.held_file)
        elif extras["ingress"] is not None:
            known = sources.setdefault(stage, extras["ingress"])
            known["offsets"] |= extras["ingress"]["offsets"]
            known["positions"] |= extras["ingress"]["positions"]
            if task_files.held_file:
                waiting.setdefault(stage, []).append(task_files.held_file)
    restore_point = msgspec.structs.replace(
        common,
        epochs=epoch + 1,
        rows=rows,
        mark=next((known["mark"] for known in sources.values()), b""),
        deltas=deltas,
        sources={s: msgspec.msgpack.encode(known) for s, known in sources.items()},
        sinks=sinks,
        waiting=waiting,
        offsets=[(s, int(n), o) for s, k in sources.items() for n, o in k["offsets"].items()],
    )
    return msgspec.structs.replace(
        restore_point, files={name: files[name] for name in restore_point.named()}
    )


# --- what is stored -----------------------------------------------------------------------------


def claimed(place: str, flow: str, after: int) -> RestorePoint:
    """Claim the folder for the caller alone, and return what to continue from, with all that is
    known of later epochs. `after` is the generation that the caller has seen."""
    folder = Folder(place)
    generation = generations.claim(folder, flow, after)
    # The generation before may have written until now.
    restore_point = known(RestorePoint.load(place), folder)
    restore_point.check()
    return msgspec.structs.replace(restore_point, generation=generation)


def known(restore_point: RestorePoint, folder: Folder) -> RestorePoint:
    """The restore point with all that is known of later epochs."""
    if restore_point.kind is not Kind.RUNNING:
        return restore_point
    records, push_batches = (
        known_records(folder, restore_point),
        known_push_batches(folder, restore_point),
    )
    return msgspec.structs.replace(restore_point, records=records, push_batches=push_batches)


def known_records(folder: Folder, restore_point: RestorePoint) -> list[EpochRecord]:
    """The records of the epochs after a checkpoint: those that were known when its generation
    began, and those that it has added. A flow that was about to stop continues, so no record is the
    last one unless the sources had ended."""
    found = {record.epoch: record for record in restore_point.records}
    for file in folder.list(f"{layout.RECORDS}/{restore_point.generation:06d}"):
        span = layout.records_name(file)
        if span is not None and span.last >= restore_point.epochs:
            found |= {record.epoch: record for record in read_records(folder, file)}
    epochs = [e for e in sorted(found) if e >= restore_point.epochs]
    if epochs != list(range(restore_point.epochs, restore_point.epochs + len(epochs))):
        raise FlowError(
            f"some records of epochs after {restore_point.epochs - 1} are missing: there are "
            f"{len(epochs)}, up to {epochs[-1]}",
            hint=f"were files removed from {layout.RECORDS!r} in {folder.place}?",
        )
    rows = restore_point.rows
    for record in (found[e] for e in epochs):
        if record.base != rows:
            wrong = f"epoch {record.epoch} begins with row {record.base} instead of {rows}"
            raise folder.damaged(f"{layout.RECORDS}/{restore_point.generation:06d}", wrong)
        rows += record.rows
    return [replace(found[e], last=found[e].ended) for e in epochs]


def read_records(folder: Folder, file: str) -> list[EpochRecord]:
    span = layout.records_name(file)
    try:
        data = folder.read_data(file)
        records = [msgspec.msgpack.decode(d, type=EpochRecord) for d in data]
    except msgspec.MsgspecError as error:
        raise folder.damaged(file, f"it holds no records: {error}") from error
    epochs = [record.epoch for record in records]
    if span is not None and epochs != list(range(span.first, span.last + 1)):
        raise folder.damaged(file, f"it holds the records of epochs {epochs[:1]} to {epochs[-1:]}")
    return records


def known_push_batches(folder: Folder, restore_point: RestorePoint) -> dict[int, list[str]]:
    """By push source: the files of what it has received after a checkpoint, in order."""
    listed = folder.list(f"{layout.PUSH_BATCHES}/{restore_point.generation:06d}")
    earlier = [file for files in restore_point.push_batches.values() for file in files]
    found: dict[int, dict[tuple[int, int], dict[int, str]]] = {}
    bases: dict[int, dict[tuple[int, int], int]] = {}
    for file in dict.fromkeys([*earlier, *listed]):
        name = layout.push_batch_name(file)
        if name is not None:
            by_leader = found.setdefault(name.source, {})
            by_leader.setdefault((name.generation, name.rank), {})[name.number] = file
            bases.setdefault(name.source, {})[name.generation, name.rank] = name.base
    push_batches: dict[int, list[str]] = {}
    for stage, by_leader in found.items():
        taken, rank = pushed_up_to(restore_point, stage)
        # An earlier leader may have added files with the same numbers. Those that were known when
        # the generation began are valid, whichever leader wrote them.
        least = (0, 0) if restore_point.first else (restore_point.generation, rank)
        valid = {at: files for at, files in by_leader.items() if at >= least}
        numbered = {n: file for n, file in not_void(valid, bases[stage]).items() if n > taken}
        if sorted(numbered) != list(range(taken + 1, taken + 1 + len(numbered))):
            raise FlowError(
                f"some of what source {restore_point.stages[stage]!r} received after the last "
                "checkpoint is missing",
                hint=f"were files removed from {layout.PUSH_BATCHES!r} in {folder.place}?",
            )
        push_batches[stage] = [numbered[n] for n in sorted(numbered)]
    return push_batches


def pushed_up_to(restore_point: RestorePoint, source: int) -> tuple[int, int]:
    """How many push batches of a push source the checkpoint has, and the rank of the leader that
    took them."""
    if source not in restore_point.sources:
        return 0, 0
    saved = msgspec.msgpack.decode(restore_point.sources[source], type=wire.IngressExtras)
    return (
        (saved["push_readers"][0]["taken"], saved["push_readers"][0]["rank"])
        if saved["push_readers"]
        else (0, 0)
    )


def not_void(found: Mapping[K, Mapping[int, V]], bases: Mapping[K, int]) -> dict[int, V]:
    """What leaders have added one after the other, without what is void. When a later leader
    begins, what earlier ones have added beyond its base is void, because it does not know of it. Up
    to its base it has what they had, and may add some of that again."""
    known: dict[int, V] = {}
    for by in sorted(found):
        known = {n: what for n, what in known.items() if n <= bases[by]} | dict(found[by])
    return known
