"""The constants of the models, from what ``holdfast bench protections`` has measured.

Every constant is the median, over the flows that tell anything about it, of what makes the model
give the measured figure: one after the other, each with those before it. Nothing is weighted and
nothing is left out; what cannot be (a cost below zero, by chance) is zero.
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
    ANEW,
    TWICE,
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
"""Beside this file. ``holdfast bench protections --json FILE``, then ``holdfast advise --fit FILE
--json holdfast/advise/constants.json`` rebuilds it."""
CHECKPOINT_MS = 1_000
"""The interval of passive standby in the benchmark."""
NOTHING = Constants(0, 0, 0, 1, 0, 0, 0, 0, 0)
FLOWS = ("events", "dmz", "stateless")
"""The flows of the benchmark."""


def by_flow(figures: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    """The figures of each flow, by protection: those of *events* stand beside the other flows."""
    found = {"events": {k: v for k, v in figures.items() if k not in FLOWS}}
    found |= {name: dict(figures[name]) for name in FLOWS if name in figures}
    return {name: said for name, said in found.items() if said}


class _Measured:
    """One flow of the benchmark: what it did, at full speed and at the rate of the kills, and what
    came out under each protection."""

    def __init__(self, said: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
        self.said = {name: figures for name, figures in said.items() if name != "none"}
        self.full = FlowFacts.from_dict(facts["full"])
        self.paced = FlowFacts.from_dict(facts["paced"])
        self.ends = ends_share(self.full)

    @property
    def keyed(self) -> list[int]:
        return self.full.keyed

    def choices(self, name: str) -> dict[int, Choice]:
        """What a protection is for each stage: where nothing can be rebuilt, passive standby."""
        standby = Choice("passive", CHECKPOINT_MS)
        if name == "passive":
            return dict.fromkeys(self.keyed, standby)
        bounded = {i for i in self.keyed if self.full.stages[i].bounded}
        return {i: Choice(name) if name in TWICE or i in bounded else standby for i in self.keyed}

    def kinds(self, name: str) -> set[str]:
        return {choice.name for choice in self.choices(name).values()}

    def slowdown(self, name: str) -> float:
        return 1.0 / self.said[name]["rate"] - 1.0

    def gap_ms(self, name: str) -> float:
        """The longest of all kills: who asks how long a recovery takes wants it to be shorter."""
        said = self.said[name]
        return said.get("gaps_ms", {}).get("max", said["gap_ms"])

    def again_ms(self, name: str) -> float:
        choices = self.choices(name)
        spans = {i: log_s(self.paced, i, choices) for i in choices}
        return sum(work_again_ms(self.paced, i, span) for i, span in spans.items())

    def has(self, *names: str) -> list[str]:
        return [name for name in names if name in self.said]


def fit(figures: Mapping[str, Any], facts: Mapping[str, Any] | None = None) -> Constants:
    """The constants by which the models give these figures, as the benchmark's JSON has them.

    What the benchmark's flows do is in the figures; if not, in `facts`, by default those that were
    measured for the constants that are shipped.
    """
    flows = _measured(figures, facts)
    # If there is no flow that has nothing but ends, they cost what the stages between them cost.
    only_ends = [m for m in flows if not m.keyed] or flows
    ends = _median(
        (m.slowdown(name) for m in only_ends for name in m.has(*TWICE)),
        "the cost of pairs at the ends",
    )
    replica = _median(
        (
            (m.slowdown(name) - ends * m.ends) / (1.0 - m.ends)
            for m in flows
            for name in m.has(*TWICE)
            if m.keyed
        ),
        "the cost of a second replica",
    )
    state = _median((s for m in flows for s in _state(m)), "the bytes of a checkpoint")
    checkpoint = _median(
        (c for m in flows for c in _checkpoint(m, state)), "the cost of a checkpoint"
    )
    felt = [(m, name, m.gap_ms(name)) for m in flows if m.keyed for name in m.said]
    route = _median((g for _, name, g in felt if name in TWICE), "how long pairs recover")
    asked = [(m, name, g - route) for m, name, g in felt if m.kinds(name) <= set(ANEW)]
    ask = _median((g for _, _, g in asked), "how long upstream backup recovers")
    remake = _median(
        (g / m.again_ms(name) for m, name, g in asked if m.again_ms(name)),
        "how long upstream backup recovers",
    )
    stood_by = [(m, name, g - route) for m, name, g in felt if m.kinds(name) == {"passive"}]
    # A standby that takes over has less to ask for than what is rebuilt.
    switch = max(0.0, min([ask, *(g for _, _, g in stood_by)]))
    redo = _median(
        ((g - switch) / m.again_ms(name) for m, name, g in stood_by),
        "how long passive standby recovers",
    )
    return Constants(ends, replica, checkpoint, state, route, switch, redo, ask, remake)


def _state(flow: _Measured) -> list[float]:
    """Bytes on the wire for one of the state, from what passive standby sends more."""
    if not flow.keyed or not flow.has("passive"):
        return []
    choices = flow.choices("passive")
    without, with_one = (
        predict(flow.full, choices, _with(state=s)).extra_bytes for s in (0.0, 1.0)
    )
    if with_one == without:
        return []
    return [(flow.said["passive"]["extra_bytes"] - without) / (with_one - without)]


def _checkpoint(flow: _Measured, state: float) -> list[float]:
    """Processor seconds for a megabyte of checkpoints."""
    if not flow.keyed or not flow.has("passive"):
        return []
    choices, constants = flow.choices("passive"), _with(state=state)
    sent = sum(checkpoint_bytes(flow.full, i, choices, constants) for i in choices) / 1e6
    return [flow.slowdown("passive") * flow.full.cores / sent] if sent else []


def _with(**values: float) -> Constants:
    return Constants(**{**NOTHING.to_dict(), **values})


def _median(found: Iterable[float], what: str) -> float:
    values = list(found)
    if not values:
        raise FlowError(
            f"the figures say nothing of {what}",
            hint="they should be those of `holdfast bench protections --json FILE`",
        )
    return max(0.0, statistics.median(values))


def _measured(figures: Mapping[str, Any], facts: Mapping[str, Any] | None) -> list[_Measured]:
    known = shipped()["facts"] if facts is None else facts
    try:
        flows = by_flow(figures)
        own = {name: said.get("none", {}).get("facts") for name, said in flows.items()}
        return [
            _Measured(said, own[name] or known[name])
            for name, said in flows.items()
            if own[name] or name in known
        ]
    except (AttributeError, KeyError, TypeError) as error:
        raise FlowError(
            f"these are not the figures of protections: {error!r}",
            hint="they should be those of `holdfast bench protections --json FILE`",
        ) from error


# --- files --------------------------------------------------------------------------------------


def shipped() -> dict[str, Any]:
    """The file of constants that comes with Holdfast."""
    return json.loads(resources.files("holdfast.advise").joinpath(SHIPPED).read_text())


def shipped_constants() -> Constants:
    return Constants(**shipped()["constants"])


def read_figures(path: str) -> dict[str, Any]:
    """What a benchmark has written."""
    try:
        found = json.loads(Path(path).read_text())
    except (OSError, ValueError) as error:
        raise FlowError(f"--fit {path}: {error}") from error
    if not isinstance(found, dict):
        raise FlowError(f"--fit {path}: no object of figures")
    return found


def document(figures: Mapping[str, Any], origin: str) -> dict[str, Any]:
    """What belongs into the file of constants, from a benchmark's figures."""
    own = {name: said.get("none", {}).get("facts") for name, said in by_flow(figures).items()}
    facts = {name: said for name, said in own.items() if said} or shipped()["facts"]
    return {"from": origin, "constants": fit(figures).to_dict(), "facts": facts}
