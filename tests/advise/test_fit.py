"""Constants from figures: those that were made with known ones give these back."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from holdfast.advise import fit as fitting
from holdfast.advise.facts import FlowFacts
from holdfast.advise.fit import CHECKPOINT_MS, document, fit, shipped, shipped_constants
from holdfast.advise.model import Choice, Constants, predict
from holdfast.errors import FlowError
from holdfast.ui.cli import main
from tests.support.advise_facts import CONSTANTS, RUNNING, WINDOW, flow

FACTS = {
    "events": flow(WINDOW, replace(WINDOW, work=0.1)),
    "dmz": flow(RUNNING, replace(RUNNING, keys=500, work=0.3)),
    "stateless": flow(),
}
KNOWN = replace(CONSTANTS, switch_ms=20.0, ask_ms=20.0)
"""With what a standby takes to switch seen as nothing less than asking."""


def said(facts: FlowFacts, constants: Constants) -> dict[str, Any]:
    """As the benchmark would, of a flow that is just as the models say."""
    found: dict[str, Any] = {"none": {"facts": {k: facts.to_dict() for k in ("full", "paced")}}}
    for name in ("pairs", "active", "passive", "upstream", "rollback"):
        every_ms = CHECKPOINT_MS if name == "passive" else 0
        choices = {i: Choice(name, every_ms) for i in facts.keyed}
        predicted = predict(facts, choices, constants, Choice(name, every_ms))
        if math.isfinite(predicted.recovery_ms):
            found[name] = {
                "rate": predicted.rate,
                "extra_bytes": predicted.extra_bytes,
                "gap_ms": predicted.recovery_ms,
                "full_recovery_ms": 2 * predicted.recovery_ms,
            }
    return found


def figures(constants: Constants = KNOWN) -> dict[str, Any]:
    flows = {name: said(facts, constants) for name, facts in FACTS.items()}
    return flows.pop("events") | flows


def test_known_constants_are_found() -> None:
    # A log of three seconds, of what takes 0.3 / 4 processors: 225 ms, and more than asking takes.
    known = replace(KNOWN, remake=0.5, ask_ms=62.5, switch_ms=62.5)
    found = fit(figures(known)).to_dict()
    assert found == pytest.approx(known.to_dict(), rel=1e-6)


def test_other_rates_give_other_constants() -> None:
    assert fit(figures(replace(KNOWN, replica=1.6))).replica == pytest.approx(1.6)
    assert fit(figures(replace(KNOWN, state=3.0))).state == pytest.approx(3.0)


def test_facts_may_come_from_elsewhere() -> None:
    plain = json.loads(json.dumps(figures()))
    facts = {n: plain[n]["none"].pop("facts") for n in ("dmz", "stateless")}
    facts["events"] = plain["none"].pop("facts")
    assert fit(plain, facts) == fit(figures())
    assert fit(plain).replica > 0  # by what is shipped


def test_figures_of_something_else_are_refused() -> None:
    with pytest.raises(FlowError, match="holdfast bench protections"):
        fit({"rows_per_s": 5.0})
    with pytest.raises(FlowError, match="have no measurement of"):
        fit({"none": {}})


def test_what_is_shipped_can_be_used() -> None:
    constants = shipped_constants()
    assert all(value >= 0 for value in constants.to_dict().values())
    assert shipped()["from"] and set(shipped()["facts"]) == set(FACTS)


def test_what_is_shipped_is_rebuilt_by_one_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given, made = tmp_path / "bench.json", tmp_path / fitting.SHIPPED
    given.write_text(json.dumps(figures()))
    assert main(["advise", "--fit", str(given), "--json", str(made)]) == 0
    assert "checkpoint_s_per_mb" in capsys.readouterr().out
    written = json.loads(made.read_text())
    assert written == json.loads(json.dumps(document(figures(), written["from"])))
    assert set(written) == set(shipped())
    assert Constants(**written["constants"]) == fit(figures())


def test_files_that_are_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["advise", "--fit", str(tmp_path / "missing.json")]) == 2
    (tmp_path / "odd.json").write_text("[1]")
    assert main(["advise", "--fit", str(tmp_path / "odd.json")]) == 2
    assert "--fit" in capsys.readouterr().err
