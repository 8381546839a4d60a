"""Fits the constants of the models to the figures of ``holdfast bench protections``.

Every constant is the median, over the flows that depend on it, of the values with which the model
reproduces the measured figure. The constants are fitted one after the other, each with those before
it. No flow is weighted or left out; an impossible value (a cost below zero, by chance) is zero.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Any

from holdfast.advise.facts import FlowFacts
from holdfast.advise.model import (
    REBUILDS,
    TWO_REPLICAS,
    Choice,
    Constants,
    checkpoint_bytes,
    ends_share,
    log_s,
    predict,
    work_again_ms,
)
from holdfast.errors import FlowError

SHIPPED = "constants.json"
"""The file of constants in this package. Rebuild it with ``holdfast bench protections --json FILE``
and ``holdfast advise --fit FILE --json holdfast/advise/constants.json``."""
CHECKPOINT_MS = 1_000
"""The interval of passive standby in the benchmark."""
ZERO = Constants(0, 0, 0, 1, 0, 0, 0, 0, 0)
FLOWS = ("events", "dmz", "stateless")
"""The flows of the benchmark."""


def by_flow(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """Return the figures of each flow by protection. In the JSON, those of *events* are at the top
    level, beside the other flows."""
    flows = {"events": {k: v for k, v in figures.items() if k not in FLOWS}}
    flows |= {name: dict(figures[name]) for name in FLOWS if name in figures}
    return {name: of_flow for name, of_flow in flows.items() if of_flow}


class _Measured:
    """One flow of the benchmark: its facts at maximum rate and at the rate of the kills, and its
    figures under each protection."""

    def __init__(self, figures: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self.figures = {name: values for name, values in figures.items() if name != "none"}
        self.full = FlowFacts.from_dict(facts["full"])
        self.paced = FlowFacts.from_dict(facts["paced"])
        self.ends = ends_share(self.full)

    @property
    def keyed(self) -> list[int]:
        return self.full.keyed

    def choices(self, name: str) -> dict[int, Choice]:
        """Return the effective protection of each stage: passive standby if a stage cannot be
        rebuilt."""
        standby = Choice("passive", CHECKPOINT_MS)
        if name == "passive":
            return dict.fromkeys(self.keyed, standby)
        bounded = {i for i in self.keyed if self.full.stages[i].bounded}
        return {
            i: Choice(name) if name in TWO_REPLICAS or i in bounded else standby for i in self.keyed
        }

    def kinds(self, name: str) -> set[str]:
        return {choice.name for choice in self.choices(name).values()}

    def slowdown(self, name: str) -> float:
        return 1.0 / self.figures[name]["rate"] - 1.0

    def gap_ms(self, name: str) -> float:
        """Return the longest gap of all kills: a predicted recovery time should be an upper
        bound."""
        figures = self.figures[name]
        return figures.get("gaps_ms", {}).get("max", figures["gap_ms"])

    def again_ms(self, name: str) -> float:
        choices = self.choices(name)
        spans = {i: log_s(self.paced, i, choices) for i in choices}
        return sum(work_again_ms(self.paced, i, span) for i, span in spans.items())

    def has(self, *names: str) -> list[str]:
        return [name for name in names if name in self.figures]


def fit(figures: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> Constants:
    """Return the constants with which the models reproduce these figures of the benchmark's JSON.

    The facts of the benchmark's flows are in the figures; if not, in `facts`, by default those that
    were measured for the shipped constants.
    """
    flows = _measured(figures, facts)
    # Without a flow that has only sources and sinks, they cost the same as the stages between them.
    only_ends = [m for m in flows if not m.keyed] or flows
    ends = _median(
        (m.slowdown(name) for m in only_ends for name in m.has(*TWO_REPLICAS)),
        "the cost of sources and sinks that are pairs",
    )
    replica = _median(
        (
            (m.slowdown(name) - ends * m.ends) / (1.0 - m.ends)
            for m in flows
            for name in m.has(*TWO_REPLICAS)
            if m.keyed
        ),
        "the cost of a second replica",
    )
    state = _median((s for m in flows for s in _state(m)), "the bytes of a checkpoint")
    checkpoint = _median(
        (c for m in flows for c in _checkpoint(m, state)), "the cost of a checkpoint"
    )
    gaps = [(m, name, m.gap_ms(name)) for m in flows if m.keyed for name in m.figures]
    route = _median(
        (g for _, name, g in gaps if name in TWO_REPLICAS), "the recovery time of pairs"
    )
    rebuilt = [(m, name, g - route) for m, name, g in gaps if m.kinds(name) <= set(REBUILDS)]
    ask = _median((g for _, _, g in rebuilt), "the recovery time of upstream backup")
    remake = _median(
        (g / m.again_ms(name) for m, name, g in rebuilt if m.again_ms(name)),
        "the recovery time of upstream backup",
    )
    standby = [(m, name, g - route) for m, name, g in gaps if m.kinds(name) == {"passive"}]
    # A standby that takes over requests less than a task that is rebuilt.
    switch = max(0.0, min([ask, *(g for _, _, g in standby)]))
    redo = _median(
        ((g - switch) / m.again_ms(name) for m, name, g in standby),
        "the recovery time of passive standby",
    )
    return Constants(ends, replica, checkpoint, state, route, switch, redo, ask, remake)


def _state(flow: _Measured) -> list[float]:
    """Return the bytes on the wire per byte of state, from the extra bytes of passive standby."""
    if not flow.keyed or not flow.has("passive"):
        return []
    choices = flow.choices("passive")
    without, with_one = (
        predict(flow.full, choices, _with(state=s)).extra_bytes for s in (0.0, 1.0)
    )
    if with_one == without:
        return []
    return [(flow.figures["passive"]["extra_bytes"] - without) / (with_one - without)]


def _checkpoint(flow: _Measured, state: float) -> list[float]:
    """Return the processor seconds per megabyte of checkpoints."""
    if not flow.keyed or not flow.has("passive"):
        return []
    choices, constants = flow.choices("passive"), _with(state=state)
    sent = sum(checkpoint_bytes(flow.full, i, choices, constants) for i in choices) / 1e6
    return [flow.slowdown("passive") * flow.full.cores / sent] if sent else []


def _with(**values: float) -> Constants:
    return Constants(**{**ZERO.to_dict(), **values})


def _median(values: Iterable[float], what: str) -> float:
    known = list(values)
    if not known:
        raise FlowError(
            f"the figures have no measurement of {what}",
            hint="use the output of `holdfast bench protections --json FILE`",
        )
    return max(0.0, statistics.median(known))


def _measured(figures: Mapping[str, Any], facts: Mapping[str, Any] | None) -> list[_Measured]:
    known = shipped()["facts"] if facts is None else facts
    try:
        flows = by_flow(figures)
        own = {name: of_flow.get("none", {}).get("facts") for name, of_flow in flows.items()}
        return [
            _Measured(of_flow, own[name] or known[name])
            for name, of_flow in flows.items()
            if own[name] or name in known
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise FlowError(
            f"these are not figures of protections: {error!r}",
            hint="use the output of `holdfast bench protections --json FILE`",
        ) from error


# --- files --------------------------------------------------------------------------------------


def shipped() -> dict[str, Any]:
    """Return the contents of the shipped file of constants."""
    return json.loads(resources.files("holdfast.advise").joinpath(SHIPPED).read_text())


def shipped_constants() -> Constants:
    return Constants(**shipped()["constants"])


def read_figures(path: str) -> dict[str, Any]:
    """Read the figures that a benchmark has written."""
    try:
        figures = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise FlowError(f"--fit {path}: {error}") from error
    if not isinstance(figures, dict):
        raise FlowError(
            f"--fit {path}: the file has no JSON object",
            hint="use the output of `holdfast bench protections --json FILE`",
        )
    return figures


def document(figures: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """Return the contents of a file of constants, from a benchmark's figures."""
    flows = by_flow(figures)
    own = {name: of_flow.get("none", {}).get("facts") for name, of_flow in flows.items()}
    facts = {name: measured for name, measured in own.items() if measured} or shipped()["facts"]
    return {"from": origin, "constants": fit(figures).to_dict(), "facts": facts}
