"""Which protection for which stage: of all that are possible the cheapest that is within bounds.

The stages of a flow are not chosen for one by one. A site has partitions of each and is lost with
all of them, and what one stage keeps depends on how those after it are protected.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from holdfast.advise.facts import FlowFacts
from holdfast.advise.model import (
    TWICE,
    Choice,
    Choices,
    Constants,
    Prediction,
    checkpoint_bytes,
    ends_share,
    overall,
    predict,
    share,
    work_again_ms,
)
from holdfast.api.options import Options

EVERY_MS = (20, 10_000)
"""Checkpoints are not proposed more often, or more seldom."""
KEPT_BYTES_MAX = Options().kept_bytes_max
"""What a site may have to keep for another."""
COMBINATIONS_MAX = 5_000
ALIKE = 0.02
"""Overheads that differ by less cannot be told apart by measuring: then bytes decide."""
NEAR = 0.0005
"""Overheads that differ by less are the same."""


@dataclass(frozen=True, slots=True)
class Bounds:
    recovery_ms: float
    overhead: float

    def excess(self, found: Prediction) -> float:
        """By how much they are missed, each relative to itself; 0 if they are not."""
        late = found.recovery_ms / max(self.recovery_ms, 1.0) - 1.0
        dear = found.overhead / max(self.overhead, 0.001) - 1.0
        return max(0.0, late) + max(0.0, dear)

    def missed(self, found: Prediction) -> list[str]:
        said = []
        if found.recovery_ms > self.recovery_ms:
            much, bound = found.recovery_ms, self.recovery_ms
            said.append(
                f"recovery: {in_time(much)} instead of {in_time(bound)}, "
                f"{in_time(much - bound)} too long"
            )
        if found.overhead > self.overhead:
            points = 100 * (found.overhead - self.overhead)
            said.append(
                f"overhead: {in_percent(found.overhead)} instead of {in_percent(self.overhead)}, "
                f"{points:.1f} points too much"
            )
        return said


@dataclass(frozen=True, slots=True)
class TurnedDown:
    """A protection that was not proposed for a stage: why, and what the whole flow would be like
    with it there; None if it cannot be."""

    name: str
    why: str
    predicted: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Proposed:
    """For one stage."""

    stage: int
    choice: Choice
    why: str
    turned_down: tuple[TurnedDown, ...]


@dataclass(frozen=True, slots=True)
class Advice:
    facts: FlowFacts
    bounds: Bounds
    predicted: Prediction
    proposed: tuple[Proposed, ...]
    missed: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def choices(self) -> dict[int, Choice]:
        return {p.stage: p.choice for p in self.proposed}

    def code(self) -> list[str]:
        """What to write in Python."""
        ends = overall(self.choices)
        lines = [f'flow = Flow("{self.facts.flow}", protect={ends})']
        for position, choice in self.choices.items():
            if choice != ends:
                stage = self.facts.stages[position]
                keys = ", ".join(f'"{key}"' for key in stage.by)
                lines.append(f".key_by({keys}).protect({choice})  # {stage.name}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        stages = self.facts.stages
        said = {
            "flow": self.facts.flow,
            "bounds": {"recovery_ms": self.bounds.recovery_ms, "overhead": self.bounds.overhead},
            "fits": not self.missed,
            "missed": list(self.missed),
            "measured": self.facts.to_dict(),
            "predicted": self.predicted.to_dict(),
            "proposed": [
                {
                    "stage": stages[p.stage].name,
                    "protection": str(p.choice),
                    "why": p.why,
                    "predicted": _part_of(self.predicted, p.stage),
                    "turned_down": [
                        {
                            "protection": t.name,
                            "why": t.why,
                            "flow": t.predicted.to_dict() if t.predicted else None,
                        }
                        for t in p.turned_down
                    ],
                }
                for p in self.proposed
            ],
            "code": self.code(),
            "notes": list(self.notes),
        }
        return _finite(said)


def _part_of(found: Prediction, stage: int) -> dict[str, float]:
    part = found.parts[stage]
    return {
        "slowdown": part.slowdown,
        "extra_bytes_per_s": part.extra_bytes,
        "recovery_ms": part.recovery_ms,
        "memory_bytes": part.memory_bytes,
        "log_s": part.log_s,
    }


def _finite(said: Any) -> Any:
    """JSON has no infinity."""
    if isinstance(said, Mapping):
        return {name: _finite(value) for name, value in said.items()}
    if isinstance(said, list | tuple):
        return [_finite(value) for value in said]
    return None if isinstance(said, float) and not math.isfinite(said) else said


# --- choosing -----------------------------------------------------------------------------------


def propose(facts: FlowFacts, bounds: Bounds, constants: Constants) -> Advice:
    """The cheapest protection of each stage that is within `bounds`, or what comes closest."""

    def rank(choices: Choices) -> tuple[float, float, float]:
        found = predict(facts, choices, constants)
        overhead = round(found.overhead / NEAR) * NEAR
        return round(bounds.excess(found), 3), overhead, found.memory_bytes

    tried = list(_combinations(facts, bounds, constants, rank))
    found = _sends_least(facts, tried, min(tried, key=rank), bounds, constants)
    predicted = predict(facts, found, constants)
    proposed = tuple(
        Proposed(
            stage,
            choice,
            _why(facts, stage, found, bounds, constants),
            tuple(_turned_down(facts, stage, found, bounds, constants)),
        )
        for stage, choice in found.items()
    )
    missed = bounds.missed(predicted)
    return Advice(
        facts, bounds, predicted, proposed, tuple(missed), tuple(_notes(facts, found, constants))
    )


def _sends_least(
    facts: FlowFacts,
    tried: list[dict[int, Choice]],
    cheapest: dict[int, Choice],
    bounds: Bounds,
    constants: Constants,
) -> dict[int, Choice]:
    """Of those within bounds that cost as good as nothing more than the cheapest."""
    least = predict(facts, cheapest, constants)
    if bounds.excess(least):
        return cheapest

    def rank(choices: Choices) -> tuple[float, float, float]:
        found = predict(facts, choices, constants)
        return round(found.extra_bytes, 2), found.memory_bytes, found.overhead

    alike = [
        choices
        for choices in tried
        if not bounds.excess(found := predict(facts, choices, constants))
        and found.overhead <= least.overhead + ALIKE
    ]
    return min(alike, key=rank)


def refused(facts: FlowFacts, stage: int, name: str) -> str | None:
    """Why a stage cannot be protected so; None if it can."""
    said = facts.stages[stage]
    if not said.ordered:
        return "it merges in the order of arrival, which replicas would not see alike"
    if name not in ("upstream", "rollback"):
        return None
    if name == "rollback" and not facts.uniform:
        return "ways between two stages of this flow are not equally long"
    if not said.bounded:
        return (
            "its state comes from all rows that a key ever had: summary_interval= would make it "
            "passive"
        )
    if said.life_s is None:
        return "how long its state lives could not be seen, as event time did not pass"
    kept = facts.bytes_in(stage) / facts.sites * said.life_s
    if kept > KEPT_BYTES_MAX:
        return f"each site would keep {in_bytes(kept)} for it"
    return None


def _possible(facts: FlowFacts, stage: int) -> list[str]:
    names = [n for n in ("upstream", "passive", "pairs") if refused(facts, stage, n) is None]
    return names or ["none"]


def _combinations(
    facts: FlowFacts, bounds: Bounds, constants: Constants, rank: Any
) -> Iterator[dict[int, Choice]]:
    """All of them; of a flow with very many stages, those on the way to where changing any one
    stage is no gain."""
    names = {i: _possible(facts, i) for i in facts.keyed}
    if math.prod(len(n) for n in names.values()) <= COMBINATIONS_MAX:
        for chosen in itertools.product(*names.values()):
            yield _settled(facts, dict(zip(names, chosen, strict=True)), bounds, constants)
        return
    now = {i: n[-1] for i, n in names.items()}
    best = _settled(facts, now, bounds, constants)
    while True:
        yield best
        others = [
            _settled(facts, now | {i: name}, bounds, constants) for i in names for name in names[i]
        ]
        better = min(others, key=rank)
        if rank(better) >= rank(best):
            return
        best, now = better, {i: c.name for i, c in better.items()}


def _settled(
    facts: FlowFacts, names: Mapping[int, str], bounds: Bounds, constants: Constants
) -> dict[int, Choice]:
    """With an interval, the same for all stages that have checkpoints."""
    every_ms = _every_ms(facts, names, bounds, constants)
    return {i: Choice(n, every_ms if n == "passive" else 0) for i, n in names.items()}


def _every_ms(
    facts: FlowFacts, names: Mapping[int, str], bounds: Bounds, constants: Constants
) -> int:
    """The longest interval within bounds: checkpoints are the cheaper the more seldom they are."""
    passive = [i for i, name in names.items() if name == "passive"]
    if not passive:
        return 0
    at_once = {i: Choice(name, 1 if name == "passive" else 0) for i, name in names.items()}
    left_ms = bounds.recovery_ms - predict(facts, at_once, constants).recovery_ms
    per_s = constants.redo * sum(work_again_ms(facts, i, 1.0) for i in passive)
    by_time = 1e3 * left_ms / per_s if per_s else math.inf
    most = max(facts.bytes_in(i) for i in passive) / facts.sites
    by_memory = 1e3 * KEPT_BYTES_MAX / 2 / most if most else math.inf
    return _rounded(max(EVERY_MS[0], min(EVERY_MS[1], by_time, by_memory)))


def _rounded(value: float) -> int:
    """Down, to two digits.

    >>> [_rounded(v) for v in (20, 87.5, 728.0, 10_000)]
    [20, 87, 720, 10000]
    """
    digit = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return int(value // digit * digit)


# --- reasons ------------------------------------------------------------------------------------


def _why(
    facts: FlowFacts, stage: int, choices: Choices, bounds: Bounds, constants: Constants
) -> str:
    said, choice = facts.stages[stage], choices[stage]
    twice = f"{in_percent(share(facts, stage))} of the processor time"
    if choice.name == "none":
        return str(refused(facts, stage, "pairs"))
    if choice.name == "upstream":
        return (
            f"its state comes from the last {in_time(1e3 * (said.life_s or 0.0))}, so it can be "
            "rebuilt from what its producers keep, and nothing is done or sent twice"
        )
    if choice.name == "passive":
        checkpoints = checkpoint_bytes(facts, stage, choices, constants)
        return (
            f"checkpoints of {in_bytes(checkpoints)} a second cost less than doing its work twice "
            f"({twice}), and what came since the last can be done again within the bound"
        )
    other = _otherwise(facts, stage, "passive", choices, bounds, constants)
    if predict(facts, other, constants).recovery_ms > bounds.recovery_ms:
        return f"only a second replica is ready at once; its work is {twice}"
    found, taken = (predict(facts, c, constants) for c in (other, choices))
    if found.overhead > taken.overhead:
        return f"doing its work twice ({twice}) costs less than checkpoints often enough would"
    return (
        f"doing its work twice ({twice}) costs hardly more than checkpoints often enough would, "
        "and sends less"
    )


def _otherwise(
    facts: FlowFacts,
    stage: int,
    name: str,
    choices: Choices,
    bounds: Bounds,
    constants: Constants,
) -> dict[int, Choice]:
    """The same but for one stage."""
    names = {i: c.name for i, c in choices.items()} | {stage: name}
    return _settled(facts, names, bounds, constants)


def _turned_down(
    facts: FlowFacts, stage: int, choices: Choices, bounds: Bounds, constants: Constants
) -> Iterator[TurnedDown]:
    taken = predict(facts, choices, constants)
    for name in ("upstream", "rollback", "passive", "pairs", "active"):
        if name == choices[stage].name:
            continue
        why = refused(facts, stage, name)
        if why is not None:
            yield TurnedDown(f"{name}()", why)
            continue
        other = _otherwise(facts, stage, name, choices, bounds, constants)
        found = predict(facts, other, constants)
        why = _same_as(choices[stage].name, name) or _worse(found, taken, bounds)
        yield TurnedDown(str(other[stage]), why, found)


def _same_as(taken: str, name: str) -> str | None:
    if (taken, name) == ("upstream", "rollback"):
        return "costs and takes the same; upstream() also takes flows that are not uniform"
    if (taken, name) == ("pairs", "active"):
        return "costs and takes the same; for operators whose replicas make rows in another order"
    return None


def _worse(found: Prediction, taken: Prediction, bounds: Bounds) -> str:
    late, dear = found.recovery_ms > bounds.recovery_ms, found.overhead > bounds.overhead
    if late and found.recovery_ms > taken.recovery_ms:
        return f"the flow would recover in {in_time(found.recovery_ms)}"
    if dear and found.overhead > taken.overhead + NEAR:
        return f"the flow would give up {in_percent(found.overhead)} of its rate"
    if found.overhead > taken.overhead + NEAR:
        more = 100 * (found.overhead - taken.overhead)
        return f"within the bounds, but costs {more:.1f} points more"
    if round(found.extra_bytes, 2) > round(taken.extra_bytes, 2):
        return "hardly cheaper, and sends more"
    return f"hardly cheaper, and keeps {in_bytes(found.memory_bytes)} in memory"


def _notes(facts: FlowFacts, choices: Choices, constants: Constants) -> Iterator[str]:
    if overall(choices).name in TWICE:
        ends = constants.ends * ends_share(facts)
        yield f"sources and sinks are pairs, which alone costs {in_percent(ends / (1.0 + ends))}"
    for said in facts.stages:
        if said.life_s is not None and said.life_s > facts.seconds:
            yield (
                f"the state of {said.name!r} lives for {in_time(1e3 * said.life_s)}, but was "
                f"looked at for {facts.seconds:.0f} s only: there will be more of it than was seen"
            )
    if not facts.keyed:
        yield "there is no keyed stage: nothing but the ends can be protected"


# --- how figures are said -------------------------------------------------------------------------


def in_percent(part: float) -> str:
    return f"{100 * part:.1f} %"


def in_time(ms: float) -> str:
    """
    >>> [in_time(ms) for ms in (0, 47.3, 1500, 90_000, math.inf)]
    ['0 ms', '47 ms', '1.5 s', '90 s', 'never']
    """
    if not math.isfinite(ms):
        return "never"
    return f"{ms:.0f} ms" if ms < 1_000 else f"{ms / 1e3:.3g} s"


def in_bytes(count: float) -> str:
    """
    >>> [in_bytes(n) for n in (12, 3_400, 5_600_000, -7.2e9)]
    ['12 B', '3.4 kB', '5.6 MB', '-7.2 GB']
    """
    if not math.isfinite(count):
        return "everything"
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if abs(count) >= size:
            digits = 0 if abs(count) >= 10 * size else 1
            return f"{count / size:.{digits}f} {unit}"
    return f"{count:.0f} B"
