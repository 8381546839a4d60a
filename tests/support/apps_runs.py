"""What tests do to a flow in several applications on plain processes."""

import time
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast.control.applications import Apps
from holdfast.protections import none
from tests.support.apps_flow import flow

FILE = str(Path(__file__).parent / "apps_flow.py")


def rows(path: Path) -> pa.Table:
    return pq.read_table(path).sort_by([("g", "ascending"), ("c", "ascending")])


def check(apps: Apps, out: Path) -> None:
    """End the flow; what came out is what one site makes of the same rows."""
    apps.stop()
    apps.wait()
    status = apps.status()
    assert status["state"] == "done" and status["rows_in"] > 0
    plain = flow(out=f"{out}-expected", rows=status["rows_in"])
    plain.protection = none()
    with plain.start(sites=1) as run:
        assert run.wait(60)
    assert rows(out).equals(rows(Path(f"{out}-expected")))


@pytest.fixture
def out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOLDFAST_TEST_OUT", str(tmp_path / "out"))
    return tmp_path / "out"


def until(apps: Apps, holds: Callable[[], bool], what: str, within: float = 90.0) -> None:
    deadline = time.monotonic() + within
    while not holds():
        assert not apps.ended(0.05), f"the flow ended before {what}: {apps.error}"
        assert time.monotonic() < deadline, f"not within {within} s: {what}: {apps.status()}"


def flows_on(apps: Apps) -> None:
    before = apps.status()["rows_in"]
    until(apps, lambda: apps.status().get("rows_in", 0) > before, "rows flow")
