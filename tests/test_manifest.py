"""Manifests of other versions, and of other plans."""

from pathlib import Path

import msgspec
import pytest

from holdfast import Flow, FlowError
from holdfast.control.savepoint import resumed
from holdfast.plan.fingerprint import describe, stored
from holdfast.plan.planner import plan
from holdfast.sinks import parquet
from holdfast.storage import layout
from holdfast.storage.files import Folder
from holdfast.storage.restore_point import VERSION, Kind, RestorePoint
from tests.support.plan_flows import calls


def stop(flow: Flow, place: str) -> RestorePoint:
    """What a flow has stored when it was stopped, without any state."""
    planned = plan(flow)
    manifest = RestorePoint(
        place,
        7,
        70,
        b"",
        {},
        {},
        stages=[stage.name for stage in planned.stages],
        partitions=4,
        flow=flow.name,
        kind=Kind.STOPPED,
        plan=stored(describe(planned)),
    )
    manifest.save(Folder(place))
    return manifest


class Other(msgspec.Struct, frozen=True):
    """A manifest of a version with other fields."""

    version: int
    epochs: str = "seven"


def test_a_flow_that_is_the_same_goes_on(tmp_path: Path) -> None:
    stop(calls(), str(tmp_path))
    assert RestorePoint.load(str(tmp_path)).version == VERSION
    # The code of steps may be newer.
    flow = resumed(calls(least=2.0), str(tmp_path), 4, here=False)
    assert flow.restore_point is not None and flow.restore_point.rows == 70


def test_stages_that_differ_are_named_with_what_can_be_done(tmp_path: Path) -> None:
    stop(calls(), str(tmp_path))
    with pytest.raises(FlowError) as caught:
        resumed(calls(time=60), str(tmp_path), 4, here=False)
    text = str(caught.value)
    assert "stored with another plan: stage 'time window by (k)': operator is time window(" in text
    assert "time=60" in text and "time=300" in text
    assert "continue with the flow as it was; or start the changed flow without" in text
    with pytest.raises(FlowError, match=r"stage 'time window by \(ts\)': name is .*; key is ts, n"):
        resumed(calls(key="ts"), str(tmp_path), 4, here=False)


def test_another_source_or_sink_of_the_same_name_checks_itself_whether_it_fits(
    tmp_path: Path,
) -> None:
    stop(calls(), str(tmp_path / "store"))
    flow = calls()
    flow.nodes[-1].sink = parquet(tmp_path / "out")  # type: ignore[attr-defined]
    assert resumed(flow, str(tmp_path / "store"), 4, here=False).restore_point is not None


def test_a_manifest_of_a_version_without_a_plan_is_read_and_its_stages_compared_by_name(
    tmp_path: Path,
) -> None:
    manifest, folder = stop(calls(), str(tmp_path)), Folder(str(tmp_path))
    old = msgspec.structs.replace(manifest, plan=[], version=0)
    folder.put(layout.manifest_file(0), old)
    assert resumed(calls(time=60), str(tmp_path), 4, here=False).restore_point is not None
    with pytest.raises(FlowError, match=r"stage 'time window by \(ts\)' is new; stage 'time windo"):
        resumed(calls(key="ts"), str(tmp_path), 4, here=False)


def test_a_manifest_of_a_later_version_is_refused_by_its_name_and_version(tmp_path: Path) -> None:
    """Not as damaged, whatever its fields are."""
    Folder(str(tmp_path)).put(layout.manifest_file(3), Other(VERSION + 1))
    with pytest.raises(FlowError) as caught:
        RestorePoint.load(str(tmp_path))
    assert "manifests/000003.arrow at" in str(caught.value) and "version 2" in str(caught.value)
    assert "resume the flow with the version of Holdfast that it last ran" in str(caught.value)
