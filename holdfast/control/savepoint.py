"""Savepoints: a flow is stopped, and continues later, elsewhere, on other sites, with newer code.

After the last epoch every task stores its state in the folder that the flow was started with. Then
the driver adds a manifest, which makes it a `RestorePoint`. A flow that was lost before it was
stopped may have a checkpoint instead: see `holdfast.control.checkpoint_coordinator`.
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
from holdfast.plan.fingerprint import describe, differences, from_stored
from holdfast.plan.planner import Plan, plan, shape
from holdfast.storage.files import Folder
from holdfast.storage.generations import last_generation
from holdfast.storage.restore_point import Kind, RestorePoint


def write_stopped(
    store: CheckpointStore,
    common: RestorePoint,
    view: View,
    last: EpochRecord,
    stored: Mapping[TaskId, wire.TaskFiles],
) -> None:
    """Write the manifest of a stopped flow. All tasks are stored after the epoch `last`."""
    common = msgspec.structs.replace(common, kind=Kind.STOPPED)
    at_the_end = {task: files for task, files in stored.items() if files.epoch == last.epoch}
    missing = sorted(set(view.tasks()) - set(at_the_end))
    if missing:
        name = common.stages[missing[0][0]]
        raise FlowError(f"stage {name!r} has not reported that its state is stored")
    store.save(manifest_of(common, view, last.epoch, last.base + last.rows, at_the_end))


def write_ended(store: CheckpointStore, common: RestorePoint, last: EpochRecord) -> None:
    """Write the manifest of a flow whose sources have all ended: there is nothing to continue."""
    rows = last.base + last.rows
    store.save(msgspec.structs.replace(common, kind=Kind.ENDED, epochs=last.epoch + 1, rows=rows))


def resumed(flow: Flow, place: str, partitions: int, *, here: bool) -> Flow:
    """`flow`, so that it continues where the flow in this folder was stopped or lost. If it is
    stored `here` again, this claims the folder, so that no other process continues it as well."""
    folder, planned = Folder(place), plan(flow)
    seen = last_generation(folder)
    restore_point = RestorePoint.load(place)
    where = f"flow {flow.name!r} cannot continue from {place}"
    if restore_point.kind is Kind.ENDED:
        raise FlowError(f"{where}: it has ended, as all of its sources had")
    _refuse_other_plan(planned, restore_point, where)
    if partitions != restore_point.partitions:
        raise FlowError(f"{where}: {partitions} partitions a stage, not {restore_point.partitions}")
    if restore_point.lost and restore_point.flow != flow.name:
        raise FlowError(
            f"{where}: the other is called {restore_point.flow!r}, and its sinks know it by its "
            "name"
        )
    restore_point.check()
    if here:
        _refuse_unknown(restore_point, where)
        restore_point = claimed(place, flow.name, seen)
        _refuse_unknown(restore_point, where)  # another process may have begun since
    elif restore_point.lost:
        restore_point = _as_stopped(restore_point)
    _check_records(restore_point, planned, partitions, folder)
    flow = copy.copy(flow)
    flow.restore_point = restore_point
    if restore_point.lost:
        flow.resolved = restore_point.resolved
    return flow


def _refuse_other_plan(planned: Plan, restore_point: RestorePoint, where: str) -> None:
    """Raise if stored state does not fit the stages of the plan, and name those that differ. Of
    sources and sinks only the names count: another one of the same name checks by itself whether
    it can go on."""
    here, there = describe(planned), from_stored(restore_point.plan)
    names = [stage.name for stage in here]
    if there:
        mine, theirs = ([d for d in side if d.kind == "keyed"] for side in (here, there))
        found = differences(mine, theirs) or differences(here, there, ("name", "kind"))
    else:  # an earlier version stored only the names
        found = [f"stage {name!r} is new" for name in names if name not in restore_point.stages]
        found += [f"stage {n!r} is missing" for n in restore_point.stages if n not in names]
        if not found and names != restore_point.stages:
            found = [f"its stages are in the order {names}, not {restore_point.stages}"]
    if found:
        raise FlowError(
            f"{where}, which was stored with another plan: {'; '.join(found)}",
            hint="continue with the flow as it was; or start the changed flow without "
            "restore_from=, in another folder: it then computes its state from its sources",
        )


def _refuse_unknown(restore_point: RestorePoint, where: str) -> None:
    """Raise if there are no records, and so it is unknown what the sinks have taken."""
    if restore_point.lost and not restore_point.every_ms:
        raise FlowError(
            f"{where}: a flow that was started there runs, or was lost; it was to be stored only "
            f"when it is stopped, so it is unknown what its sinks have taken since epoch "
            f"{restore_point.epochs - 1}",
            hint="stop it if it runs; if it is lost, restore_from= with another checkpoint= "
            "continues where it was stopped before, and sinks that cannot skip rows get those that "
            "came since again",
        )


def _as_stopped(restore_point: RestorePoint) -> RestorePoint:
    """The restore point that a lost flow began with, as that of a stopped one."""
    if not restore_point.sources:
        raise FlowError(
            f"nothing has been stored at {restore_point.home}: flow {restore_point.flow!r} has not "
            "been stopped yet"
        )
    return msgspec.structs.replace(restore_point, kind=Kind.STOPPED)


def _check_records(
    restore_point: RestorePoint, planned: Plan, partitions: int, folder: Folder
) -> None:
    """Check stored records like those that other sites send."""
    checks = Checks(planned, shape(planned, partitions), Options().window)
    for record in restore_point.records:
        try:
            checks.record(record)
        except ProtocolError as error:
            raise folder.damaged("records", f"epoch {record.epoch}: {error}") from error
