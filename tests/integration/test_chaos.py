"""A flow in two applications under ``holdfast chaos``: ZooKeeper dies, or sleeps for a while."""

import json
from pathlib import Path

from holdfast.lab.chaos.faults import APPS_KINDS
from holdfast.ui.cli import main


def test_each_kind_of_fault_loses_and_repeats_nothing(tmp_path: Path) -> None:
    """While the arbiter is away data flows and no site is given another view: chaos sees to it."""
    file = tmp_path / "chaos.json"
    command = ["chaos", "--apps", "2", "--faults", str(len(APPS_KINDS)), "--seed", "1"]
    status = main([*command, "--json", str(file)])
    said = json.loads(file.read_text())
    assert status == 0, said["failures"]
    assert (said["lost_rows"], said["repeated_rows"]) == (0, 0) and said["rows_out"] > 0
    assert said["kinds"].keys() == {kind.name for kind in APPS_KINDS}
    assert said["left_out"] == {} and said["declared_dead_unexpectedly"] == {}
