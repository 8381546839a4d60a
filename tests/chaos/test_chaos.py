"""A quick ``holdfast chaos`` on real processes: faults of every kind that can be done here, and a
few under other protections than pairs."""

import json
from pathlib import Path

import pytest

from holdfast.lab.chaos.faults import DISK, EXECUTOR, KINDS, TWO_KILLS
from holdfast.lab.chaos.namespaces import unavailable
from holdfast.ui.cli import main
from tests.support.tiers import nightly

SEED = 2
A_DECK = sum(kind.weight for kind in KINDS if kind not in (EXECUTOR, DISK))
"""In so many faults is every kind."""
KILLS_AND_STOPS = 288
"""A seed whose first four faults have kills of one and of two, and a stop, wherever it is run."""


@pytest.mark.parametrize("faults", [A_DECK, nightly(50)])
def test_faults_of_every_kind_lose_and_repeat_nothing(tmp_path: Path, faults: int) -> None:
    file = tmp_path / "chaos.json"
    status = main(["chaos", "--faults", str(faults), "--seed", str(SEED), "--json", str(file)])
    said = json.loads(file.read_text())
    assert status == 0, said["failures"]
    assert said["faults"] == faults and said["rows_out"] > 0
    assert (said["lost_rows"], said["repeated_rows"]) == (0, 0)
    assert said["fenced"] == said["fenced_and_left"] > 0
    done, left_out = said["kinds"], said["left_out"]
    why = unavailable()
    for kind in KINDS:
        if kind.needs == "namespaces" and why is not None:
            assert left_out[kind.name] == why
        elif kind in (EXECUTOR, DISK):
            assert left_out[kind.name]
        else:
            replaced = kind is TWO_KILLS and said["one_killed_instead_of_two"] > 0
            assert (kind.name in done or replaced) and kind.name not in left_out
    assert sum(row["during_recovery"] for row in done.values()) > 0


@pytest.mark.parametrize(
    "protection", [nightly("active"), nightly("passive"), "upstream", nightly("rollback")]
)
def test_a_few_faults_lose_and_repeat_nothing(tmp_path: Path, protection: str) -> None:
    file = tmp_path / "chaos.json"
    command = ["chaos", "--protection", protection, "--seed", str(KILLS_AND_STOPS)]
    status = main([*command, "--faults", "4", "--json", str(file)])
    said = json.loads(file.read_text())
    assert status == 0, said["failures"]
    assert (said["protection"], said["faults"]) == (protection, 4) and said["rows_out"] > 0
    assert (said["lost_rows"], said["repeated_rows"]) == (0, 0)
