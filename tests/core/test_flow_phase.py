"""The phases of a flow: the table is whole, and the documentation shows it."""

from pathlib import Path

import pytest

from holdfast.core.diagram import mermaid
from holdfast.core.flow_phase import TABLE, FlowPhase, Lifecycle, PhaseEvent
from holdfast.errors import InvariantError

FINAL = {FlowPhase.DONE, FlowPhase.FAILED}


def test_the_diagram_in_the_documentation_is_that_of_the_table() -> None:
    page = Path(__file__).parents[2] / "docs" / "control.md"
    assert f"```mermaid\n{mermaid([FlowPhase.GATHERING], TABLE)}\n```" in page.read_text()


def test_every_phase_is_reached_and_all_but_the_final_ones_are_left() -> None:
    reached = {FlowPhase.GATHERING}
    while more := {then for (phase, _), then in TABLE.items() if phase in reached} - reached:
        reached |= more
    assert reached == set(FlowPhase)
    assert {phase for phase, _ in TABLE} == set(FlowPhase) - FINAL
    assert {event for _, event in TABLE} == set(PhaseEvent)


def test_a_flow_can_end_and_fail_in_every_phase() -> None:
    for phase in set(FlowPhase) - FINAL:
        assert TABLE[phase, PhaseEvent.ENDED] is FlowPhase.DONE
        assert TABLE[phase, PhaseEvent.FLOW_FAILED] is FlowPhase.FAILED


def test_only_edges_of_the_table_are_taken() -> None:
    lifecycle = Lifecycle()
    lifecycle.advance(PhaseEvent.PLACED)
    lifecycle.advance(PhaseEvent.CONNECTED)
    with pytest.raises(InvariantError, match=r"PLACED in phase RUNNING; history: .*connecting"):
        lifecycle.advance(PhaseEvent.PLACED)
    assert lifecycle.phase is FlowPhase.RUNNING
