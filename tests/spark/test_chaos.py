"""A few faults of ``holdfast chaos`` on Spark: executors are killed, and a driver."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from holdfast.lab.chaos.faults import APPS_KINDS, DISK, DRIVER, EXECUTOR, KINDS
from holdfast.lab.chaos.zookeeper import unavailable


@pytest.mark.nightly
def test_a_few_faults_lose_and_repeat_nothing(tmp_path: Path) -> None:
    """In a process of its own: it has another Spark application than the other tests."""
    file = tmp_path / "chaos.json"
    command = [sys.executable, "-m", "holdfast.ui.cli", "chaos", "--host", "spark"]
    ended = subprocess.run(
        [*command, "--faults", "6", "--seed", "7", "--json", str(file)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    said = json.loads(file.read_text())
    assert said["faults"] == 7 and said["rows_out"] > 0
    assert (said["lost_rows"], said["repeated_rows"]) == (0, 0)
    assert said["kinds"][EXECUTOR.name]["faults"] == 2
    assert said["kinds"][DRIVER.name]["faults"] == 1
    in_namespaces = {k.name for k in KINDS if k.needs == "namespaces"}
    with_zookeeper = {k.name for k in APPS_KINDS if k.needs == "zookeeper" and unavailable()}
    assert in_namespaces | with_zookeeper | {DISK.name} == said["left_out"].keys()
    assert all(said["left_out"].values())
