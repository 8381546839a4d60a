"""A flow that was stopped, and goes on later: elsewhere, on other sites, with newer code.

When the last epoch is through, every unit writes down where it is, in the folder that the flow was
started with. Then whoever has stopped it adds a manifest, which makes a `Past` of it. Of one that
was lost before it could be stopped there may be a checkpoint: see `holdfast.durable`.
"""

from __future__ import annotations

import copy

import msgspec

from holdfast.core.records import EpochRecord
from holdfast.durable import claimed
from holdfast.errors import FlowError
from holdfast.flow.graph import Flow
from holdfast.flow.past import SINKS, SOURCES, WAITING, Folder, Past, Stored, stored_state
from holdfast.flow.plan import Plan, plan
from holdfast.site import wire


def write_manifest(place: str, planned: Plan, partitions: int, last: EpochRecord) -> None:
    """All units of the flow are in the folder, after the epoch `last`."""
    folder = Folder(place)
    state = stored_state(folder)
    waiting: dict[int, list[str]] = {}
    for file in folder.list(WAITING):
        waiting.setdefault(int(file.split("/")[1]), []).append(file)
    sources = _sources(folder)
    offsets = [
        (s, int(n), at) for s, known in sources.items() for n, at in known["offsets"].items()
    ]
    mark = next((known["mark"] for known in sources.values()), b"")
    saved = {s: msgspec.msgpack.encode(known) for s, known in sources.items()}
    names = [stage.name for stage in planned.stages]
    rows = last.base + last.rows
    past = Past(
        place,
        last.epoch + 1,
        rows,
        mark,
        state,
        {},
        saved,
        waiting,
        offsets,
        names,
        partitions,
        sinks=_sinks(folder),
    )
    past.save()


def _sinks(folder: Folder) -> dict[int, Stored]:
    """What the store of every sink has confirmed, and what is kept for its readers."""
    known = [file for file in folder.list(SINKS) if file.endswith("/known.arrow")]
    return {int(file.split("/")[1]): folder.get(file, Stored) for file in known}


def _sources(folder: Folder) -> dict[int, wire.IngressExtras]:
    """Where every source is; its splits may have been on several sites."""
    found: dict[int, wire.IngressExtras] = {}
    for file in folder.list(SOURCES):
        (batch,) = folder.read(file)
        said = msgspec.msgpack.decode(batch.column("data")[0].as_py(), type=wire.IngressExtras)
        known = found.setdefault(int(file.split("/")[1]), said)
        known["offsets"] |= said["offsets"]
        known["positions"] |= said["positions"]
    return found


def resumed(flow: Flow, place: str, partitions: int) -> Flow:
    """`flow`, to go on from where the one in this folder was stopped, or lost."""
    past, planned = Past.load(place), plan(flow)
    where = f"flow {flow.name!r} cannot go on from {place}"
    names = [stage.name for stage in planned.stages]
    if names != past.stages:
        raise FlowError(f"{where}: its stages are {names}, those of the other are {past.stages}")
    if partitions != past.partitions:
        raise FlowError(f"{where}: {partitions} partitions a stage, not {past.partitions}")
    if past.lost and past.flow != flow.name:
        raise FlowError(
            f"{where}: the other is called {past.flow!r}, and its sinks know it by its name"
        )
    flow = copy.copy(flow)
    flow.past = past
    if past.lost:
        flow.past = claimed(place)
        flow.settled = past.settled
    else:
        past.check()
    return flow
