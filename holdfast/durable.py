"""A flow that outlives the loss of everything: its checkpoints and its records, in a folder.

While the flow runs, its state after some epoch is written there every so often, and the record of
every epoch as soon as it is cut. A sink takes an epoch only when its record is there. So whatever
sinks may have after the last checkpoint is known to come of certain rows, in a certain order: a
flow that goes on from there makes the same of them again, and sinks leave out what they have.

The folder has one *owner*, whoever started the flow last. It is named before the new owner looks at
what is there, and an owner announces records only when it has found itself still named after they
were written. So what an owner of old adds, late, nobody has acted on.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

import msgspec
import pyarrow as pa

from holdfast.core.checkpoints import Checkpoints
from holdfast.core.effects import OrderStore, StoreEffect, WriteManifest
from holdfast.core.events import (
    ManifestWritten,
    PeerLost,
    RecordArrived,
    StoreDue,
    StoreEvent,
    StoreFailed,
    UnitStored,
    ViewCommitted,
)
from holdfast.core.ids import CohortId, Epoch, SiteId, StageId, Unit
from holdfast.core.layout import View
from holdfast.core.records import EpochRecord
from holdfast.errors import FlowError
from holdfast.flow.graph import Flow
from holdfast.flow.options import Options
from holdfast.flow.past import (
    CHECKPOINTS,
    MANIFEST,
    PORTIONS,
    RECORDS,
    SOURCES,
    STATE,
    WAITING,
    Folder,
    Layer,
    Past,
    Stored,
)
from holdfast.flow.plan import Plan
from holdfast.site import wire

log = logging.getLogger("holdfast.durable")

K = TypeVar("K", int, tuple[int, int])
V = TypeVar("V")

OWNER = "owner.arrow"
AHEAD_S = 0.1
"""About so long it takes until all sites have heard which epoch is to be stored."""
RETRY_S = (0.1, 0.5, 1.0, 2.0)
"""How long to wait before records are written again that could not be; then the flow ends."""
RECORDS_MAX = 10_000
"""So many are remembered until a checkpoint needs one."""
AGAIN_S = 0.5
"""How long to wait before the next checkpoint, if one was given up."""


class Owner(msgspec.Struct, frozen=True):
    name: str
    life: int
    """How often the flow has been gone on from."""


def claim(folder: Folder, life: int) -> Owner:
    """From now on nobody else adds to the folder what counts."""
    owner = Owner(uuid.uuid4().hex, life)
    folder.put(OWNER, owner)
    return owner


def claimed(place: str) -> Past:
    """The last checkpoint of a flow that was lost, and what is known of the epochs after it; to be
    gone on from by the caller and nobody else."""
    folder = Folder(place)
    owner = claim(folder, folder.get(OWNER, Owner).life + 1)
    past = Past.load(place)  # which the owner before may have written until now
    past.check()
    now = {"life": owner.life, "owner": owner.name}
    records, portions = known_records(folder, past), known_portions(folder, past)
    return msgspec.structs.replace(past, records=records, portions=portions, **now)


def known_records(folder: Folder, past: Past) -> list[EpochRecord]:
    """The records of the epochs after a checkpoint. Those that were added by an owner of old after
    another one had begun to add its own are void. A flow that was about to stop is not now."""
    found: dict[int, dict[int, EpochRecord]] = {}
    for file in folder.list(RECORDS):
        _, last, life = (int(n) for n in file.split("/")[1].removesuffix(".arrow").split("-"))
        if last >= past.epochs and life >= past.life:
            records = found.setdefault(life, {})
            for batch in folder.read(file):
                for data in batch.column("data").to_pylist():
                    record = msgspec.msgpack.decode(data, type=EpochRecord)
                    records[record.epoch] = record
    known = _not_void(found)
    epochs = [e for e in sorted(known) if e >= past.epochs]
    if epochs != list(range(past.epochs, past.epochs + len(epochs))):
        raise FlowError(
            f"of the flow's epochs after {past.epochs - 1} some records are missing: there are "
            f"{len(epochs)}, up to {epochs[-1]}",
            hint=f"were files removed from {RECORDS!r} in its folder?",
        )
    return [replace(known[e], last=known[e].ended) for e in epochs]


def known_portions(folder: Folder, past: Past) -> dict[int, list[str]]:
    """Where to find what has come in of fed sources after a checkpoint."""
    found: dict[int, dict[tuple[int, int], dict[int, str]]] = {}
    bases: dict[tuple[int, int], int] = {}
    for file in folder.list(PORTIONS):
        _, source, name = file.split("/")
        number, life, rank, *base = (int(n) for n in name.removesuffix(".arrow").split("-"))
        found.setdefault(int(source), {}).setdefault((life, rank), {})[number] = file
        if base:  # which was not in names at first
            bases[life, rank] = base[0]
    portions: dict[int, list[str]] = {}
    for stage, by_leader in found.items():
        taken, rank = _fed_up_to(past, stage)
        valid = {at: files for at, files in by_leader.items() if at >= (past.life, rank)}
        known = {n: file for n, file in _not_void(valid, bases).items() if n > taken}
        if sorted(known) != list(range(taken + 1, taken + 1 + len(known))):
            raise FlowError(
                f"of what came in of source {past.stages[stage]!r} after the last checkpoint some "
                "is missing",
                hint=f"were files removed from {PORTIONS!r} in its folder?",
            )
        portions[stage] = [known[n] for n in sorted(known)]
    return portions


def _fed_up_to(past: Past, source: int) -> tuple[int, int]:
    """How many portions of a fed source the checkpoint has, and who had taken them."""
    if source not in past.sources:
        return 0, 0
    saved = msgspec.msgpack.decode(past.sources[source], type=wire.IngressExtras)
    return (saved["feeds"][0]["taken"], saved["feeds"][0]["rank"]) if saved["feeds"] else (0, 0)


def _not_void(
    found: Mapping[K, Mapping[int, V]], bases: Mapping[K, int] | None = None
) -> dict[int, V]:
    """What was added by one after another. When a later one begins, what those before it have
    added beyond that is void, if only because it does not know of it. Up to its base, if there is
    one, it has what they had, and may add some of it once more."""
    known: dict[int, V] = {}
    for by in sorted(found):
        base = (bases or {}).get(by, min(found[by]) - 1)
        known = {n: what for n, what in known.items() if n <= base} | dict(found[by])
    return known


class Durable:
    """The part of a flow's control that sees to it. All methods but `prepare` and `close` are
    called in its event loop; files are written in threads."""

    def __init__(self, flow: Flow, plan: Plan, options: Options, incarnation: str) -> None:
        assert options.store is not None
        self._place, self._folder = options.store, Folder(options.store)
        past = flow.past
        lost = past if past is not None and past.lost else None
        self._goes_on = lost is not None
        if lost is not None and not lost.untouched:
            incarnation = lost.incarnation
        self._common = Past(
            self._place,
            0,
            0,
            b"",
            {},
            {},
            stages=[stage.name for stage in plan.stages],
            partitions=options.partitions,
            settled=flow.settled,
            flow=flow.name,
            incarnation=incarnation,
            life=lost.life if lost is not None else 0,
            every_ms=options.store_every_ms,
            owner=lost.owner if lost is not None else "",
        )
        self._past = past
        begun = past.epochs - 1 + len(past.records) if past is not None else -1
        self.recorded = Epoch(begun)
        """The last epoch whose record is durable."""
        self._waiting: dict[int, EpochRecord] = {}
        self._records: dict[int, EpochRecord] = {}
        """Since the last checkpoint."""
        self._layers: dict[Unit, list[Layer]] = {}
        self._machine = Checkpoints(self.recorded)
        self._stored_at: float | None = None
        self._due_at = 0.0
        self._arrivals: deque[float] = deque(maxlen=1_000)
        self._news = asyncio.Event()
        self._closed = False
        self._tasks: list[asyncio.Task[None]] = []
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="holdfast-records")
        self._keeper = ThreadPoolExecutor(1, thread_name_prefix="holdfast-manifest")
        self.view: Callable[[], View | None] = lambda: None
        self.tell: Callable[[wire.Message], None] = lambda message: None
        """To all sites."""
        self.fail: Callable[[Exception], None] = lambda error: None

    def prepare(self) -> None:
        """Before the flow starts: see to it that there is something to go on from if it is lost at
        once."""
        if self._goes_on:
            for name in (STATE, SOURCES, WAITING):  # it was about to stop
                self._folder.remove(name)
        else:
            owner = claim(self._folder, 0)
            self._common = msgspec.structs.replace(self._common, owner=owner.name)
        if self._past is None or not self._goes_on or self._past.untouched:
            self._folder.put(MANIFEST, self._first())

    def _first(self) -> Past:
        """What there is to go on from before anything has happened."""
        # What earlier lives have taken in counts, as there is nothing else that has it.
        common, past = msgspec.structs.replace(self._common, fresh=True, life=0), self._past
        if past is None:
            return common
        names = ("stages", "partitions", "settled", "flow", "incarnation", "life", "every_ms")
        same = {name: getattr(common, name) for name in (*names, "owner", "fresh")}
        elsewhere = past.elsewhere or past.place != common.place
        return msgspec.structs.replace(past, elsewhere=elsewhere, portions={}, **same)

    def start(self) -> None:
        """The flow runs."""
        self._due_at = time.monotonic() + self._common.every_ms / 1e3
        loop = asyncio.get_running_loop()
        if not self._tasks:
            duties = (self._keep_records(), self._keep_checkpoints())
            self._tasks = [loop.create_task(duty) for duty in duties]
            for task in self._tasks:
                task.add_done_callback(self._on_done)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        """Without them sinks would wait for ever."""
        error = None if task.cancelled() else task.exception()
        if isinstance(error, Exception):
            self.fail(error)

    def close(self) -> None:
        """The flow is over: when this returns nothing more is written."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        self._writer.shutdown(cancel_futures=True)
        self._keeper.shutdown(cancel_futures=True)

    def clean(self) -> None:
        """The flow was stopped, and has left another manifest."""
        for name in (CHECKPOINTS, RECORDS, PORTIONS):
            self._folder.remove(name)

    def figures(self) -> dict[str, object]:
        """For whoever watches."""
        age = None if self._stored_at is None else time.monotonic() - self._stored_at
        return {
            "epoch": self._machine.complete,
            "seconds_ago": age,
            "recorded": self.recorded,
            "under_way": self._machine.epoch,
            "failure": self._machine.failure or None,
        }

    # --- records --------------------------------------------------------------------------------

    def note(self, record: EpochRecord) -> None:
        """The sequencer has cut an epoch; it may say so more than once."""
        self._records[record.epoch] = record
        while len(self._records) > RECORDS_MAX:
            del self._records[next(iter(self._records))]
        self._arrivals.append(time.monotonic())
        if record.epoch > self.recorded:
            self._waiting[record.epoch] = record
            self._news.set()
        self._handle(RecordArrived(record))

    async def _keep_records(self) -> None:
        """Write what has come while the last of it was written."""
        while True:
            await self._news.wait()
            self._news.clear()
            while records := self._next_records():
                if not await self._write_records(records):
                    return
                self.recorded = records[-1].epoch
                self.tell(wire.Recorded(self.recorded))

    def _next_records(self) -> list[EpochRecord]:
        found: list[EpochRecord] = []
        while (record := self._waiting.pop(self.recorded + 1 + len(found), None)) is not None:
            found.append(record)
        return found

    async def _write_records(self, records: list[EpochRecord]) -> bool:
        loop = asyncio.get_running_loop()
        for pause in (*RETRY_S, None):
            try:
                await loop.run_in_executor(self._writer, self._append, records)
                return True
            except FlowError as error:
                self.fail(error)
                return False
            except (OSError, pa.ArrowException) as error:
                log.warning("records cannot be written to %s: %s", self._place, error)
                if pause is None:
                    self.fail(self._unwritten(error))
                    return False
                await asyncio.sleep(pause)
        return False

    def _unwritten(self, error: Exception) -> FlowError:
        return FlowError(
            f"which rows the flow's epochs have cannot be written to {self._place}, and without it "
            f"its results could not be told from others if it were lost: {error}",
            hint="when there is room again, go on with resume=: nothing is lost",
        )

    def _append(self, records: list[EpochRecord]) -> None:
        data = [msgspec.msgpack.encode(r) for r in records]
        span = f"{records[0].epoch:012d}-{records[-1].epoch:012d}-{self._common.life}"
        self._folder.write(f"{RECORDS}/{span}.arrow", [pa.record_batch({"data": data})], sync=True)
        self._check_owner()

    def _check_owner(self) -> None:
        if self._folder.get(OWNER, Owner).name != self._common.owner:
            raise FlowError(
                f"another flow goes on from {self._place}, so this one must not",
                hint="only one can: end whatever has been started with resume= there",
            )

    # --- checkpoints ----------------------------------------------------------------------------

    async def _keep_checkpoints(self) -> None:
        every_s = self._common.every_ms / 1e3
        while True:
            await asyncio.sleep(max(0.01, min(every_s, self._due_at - time.monotonic())))
            view = self.view()
            if view is None or self._machine.epoch is not None:
                self._due_at = max(self._due_at, time.monotonic() + 0.05)
            elif time.monotonic() >= self._due_at:
                self._due_at = time.monotonic() + every_s
                self._handle(StoreDue(view, self._ahead()))

    def _ahead(self) -> int:
        """So many epochs come until all sites know what is to be stored."""
        since = time.monotonic() - 1.0
        return 1 + int(AHEAD_S * sum(at > since for at in self._arrivals))

    def on_view(self, view: View) -> None:
        self._handle(ViewCommitted(view))

    def on_lost(self, site: SiteId) -> None:
        self._handle(PeerLost(site))

    def on_message(self, message: wire.UnitFiles | wire.NotStored) -> None:
        unit, epoch = (StageId(message.stage), CohortId(message.cohort)), Epoch(message.epoch)
        if isinstance(message, wire.UnitFiles):
            self._handle(UnitStored(unit, epoch, message))
        else:
            self._handle(StoreFailed(epoch, message.reason, message.missed))

    def _handle(self, event: StoreEvent) -> None:
        was = self._machine.failure, self._machine.epoch
        for effect in self._machine.handle(event):
            self._apply(effect)
        if self._machine.failure and (self._machine.failure, self._machine.epoch) != was:
            log.info("no checkpoint of epoch %s: %s", was[1], self._machine.failure)
            self._due_at = min(self._due_at, time.monotonic() + AGAIN_S)

    def _apply(self, effect: StoreEffect) -> None:
        match effect:
            case OrderStore():
                self.tell(wire.Store(effect.epoch, effect.after))
            case WriteManifest():
                self._writing = asyncio.get_running_loop().create_task(self._complete(effect))

    async def _complete(self, effect: WriteManifest) -> None:
        view, error = self.view(), ""
        loop = asyncio.get_running_loop()
        try:
            if view is None or effect.epoch not in self._records:
                raise FlowError(f"epoch {effect.epoch} is not known any more")
            past, layers = self._past_of(effect, view)
            if self._closed:
                return
            await loop.run_in_executor(self._keeper, self._save, past)
            self._layers, self._stored_at = layers, time.monotonic()
            self._records = {e: r for e, r in self._records.items() if e > effect.epoch}
        except Exception as failed:  # it is said, and tried again
            error = str(failed) or type(failed).__name__
        self._handle(ManifestWritten(effect.epoch, error))

    def _past_of(self, effect: WriteManifest, view: View) -> tuple[Past, dict[Unit, list[Layer]]]:
        """What the manifest says."""
        layers: dict[Unit, list[Layer]] = {}
        sources: dict[int, wire.IngressExtras] = {}
        sinks: dict[int, Stored] = {}
        waiting: dict[int, list[str]] = {}
        for unit, files in sorted(effect.stored.items()):
            assert isinstance(files, wire.UnitFiles)
            cohort, extras = view.cohort(unit), files.extras
            new = [Layer(cohort.first, cohort.end, *named) for named in files.files]
            layers[unit] = [*(self._layers[unit] if files.after is not None else []), *new]
            if extras["egress"] is not None:
                saved = msgspec.msgpack.encode(extras["egress"])
                sinks[unit[0]] = Stored(saved, files.held, files.held_file)
            elif extras["ingress"] is not None:
                known = sources.setdefault(unit[0], extras["ingress"])
                known["offsets"] |= extras["ingress"]["offsets"]
                known["positions"] |= extras["ingress"]["positions"]
                if files.held_file:
                    waiting.setdefault(unit[0], []).append(files.held_file)
        record = self._records[effect.epoch]
        by_stage: dict[int, list[Layer]] = {}
        for unit, found in layers.items():
            by_stage.setdefault(unit[0], []).extend(found)
        past = msgspec.structs.replace(
            self._common,
            epochs=effect.epoch + 1,
            rows=record.base + record.rows,
            mark=next((known["mark"] for known in sources.values()), b""),
            layers=by_stage,
            sources={s: msgspec.msgpack.encode(known) for s, known in sources.items()},
            sinks=sinks,
            waiting=waiting,
            offsets=[(s, int(n), o) for s, k in sources.items() for n, o in k["offsets"].items()],
        )
        return past, layers

    def _save(self, past: Past) -> None:
        """Only now the checkpoint counts; what nobody needs any more goes."""
        self._check_owner()
        past.save()
        try:
            self._tidy(past)
        except (OSError, pa.ArrowException) as error:  # it is only in the way
            log.warning("cannot tidy up %s: %s", self._place, error)

    def _tidy(self, past: Past) -> None:
        named = [layer.file for layers in past.layers.values() for layer in layers]
        named += [stored.file for stored in past.sinks.values()]
        named += [file for files in past.waiting.values() for file in files]
        needed = {name.rsplit("/", 1)[0] for name in named}
        for folder in self._folder.folders(CHECKPOINTS):
            if folder not in needed:
                self._folder.remove(folder)
        for file in self._folder.list(RECORDS):
            if int(file.split("/")[1].split("-")[1]) < past.epochs:
                self._folder.remove(file)
        for file in self._folder.list(PORTIONS):
            _, source, name = file.split("/")
            if int(name.split("-")[0]) <= _fed_up_to(past, int(source))[0]:
                self._folder.remove(file)
