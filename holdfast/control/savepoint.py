"""A flow that was stopped, and goes on later: elsewhere, on other sites, with newer code.

When the last epoch is through, every task writes down where it is, in the folder that the flow was
started with. Then whoever has stopped it adds a manifest, which makes a `Past` of it. Of one that
was lost before it could be stopped there may be a checkpoint: see `holdfast.control.checkpoints`.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping

import msgspec

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.control.checkpoint_store import CheckpointStore, claimed, manifest_of
from holdfast.core.ids import TaskId
from holdfast.core.layout import View
from holdfast.core.records import EpochRecord
from holdfast.errors import FlowError, ProtocolError
from holdfast.net import wire
from holdfast.net.checks import Checks
from holdfast.plan.planner import Plan, plan, shape
from holdfast.storage.files import Folder
from holdfast.storage.generations import last_generation
from holdfast.storage.restore_point import Kind, Past


def write_stopped(
    store: CheckpointStore,
    common: Past,
    view: View,
    last: EpochRecord,
    stored: Mapping[TaskId, wire.TaskFiles],
) -> None:
    """All units of the flow are in the folder, after the epoch `last`."""
    common = msgspec.structs.replace(common, kind=Kind.STOPPED)
    at_the_end = {task: said for task, said in stored.items() if said.epoch == last.epoch}
    missing = sorted(set(view.tasks()) - set(at_the_end))
    if missing:
        name = common.stages[missing[0][0]]
        raise FlowError(f"stage {name!r} has not said that its state is there")
    store.save(manifest_of(common, view, last, at_the_end))


def write_ended(store: CheckpointStore, common: Past, last: EpochRecord) -> None:
    """All sources have ended: nothing is left to go on with."""
    rows = last.base + last.rows
    store.save(msgspec.structs.replace(common, kind=Kind.ENDED, epochs=last.epoch + 1, rows=rows))


def resumed(flow: Flow, place: str, partitions: int, *, here: bool) -> Flow:
    """`flow`, to go on from where the one in this folder was stopped, or lost. If it is stored
    `here` again, nobody else does the same."""
    folder, planned = Folder(place), plan(flow)
    seen = last_generation(folder)
    past = Past.load(place)
    where = f"flow {flow.name!r} cannot go on from {place}"
    names = [stage.name for stage in planned.stages]
    if past.kind is Kind.ENDED:
        raise FlowError(f"{where}: it has ended, as all of its sources had")
    if names != past.stages:
        raise FlowError(f"{where}: its stages are {names}, those of the other are {past.stages}")
    if partitions != past.partitions:
        raise FlowError(f"{where}: {partitions} partitions a stage, not {past.partitions}")
    if past.lost and past.flow != flow.name:
        raise FlowError(
            f"{where}: the other is called {past.flow!r}, and its sinks know it by its name"
        )
    past.check()
    if here:
        _refuse_unknown(past, where)
        past = claimed(place, flow.name, seen)
        _refuse_unknown(past, where)  # another process may have begun since
    elif past.lost:
        past = _as_stopped(past)
    _check_records(past, planned, partitions, folder)
    flow = copy.copy(flow)
    flow.past = past
    if past.lost:
        flow.settled = past.settled
    return flow


def _refuse_unknown(past: Past, where: str) -> None:
    """Without records nobody knows what the sinks of a flow have got since it was started."""
    if past.lost and not past.every_ms:
        raise FlowError(
            f"{where}: a flow that was started there runs, or was lost; it was to be stored only "
            f"when it is stopped, so what its sinks have got since epoch {past.epochs - 1} is not "
            "known",
            hint="stop it if it runs; if it is lost, resume with another store= goes on from where "
            "it was stopped before, and sinks that cannot tell get again what came since",
        )


def _as_stopped(past: Past) -> Past:
    """What a flow that is not known to have come further had begun with."""
    if not past.sources:
        raise FlowError(
            f"nothing has been stored at {past.home}: flow {past.flow!r} has not been stopped yet"
        )
    return msgspec.structs.replace(past, kind=Kind.STOPPED)


def _check_records(past: Past, planned: Plan, partitions: int, folder: Folder) -> None:
    """Records that are stored have to be as sound as those that other sites send."""
    checks = Checks(planned, shape(planned, partitions), Options().window)
    for record in past.records:
        try:
            checks.record(record)
        except ProtocolError as error:
            raise folder.damaged("records", f"epoch {record.epoch}: {error}") from error
