"""Proposes a protection for each stage: the cheapest possible combination within bounds.

The protections of the stages depend on each other: a lost site had partitions of every stage, and
what a stage retains depends on the protection of the stages after it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.advise.facts import FlowFacts
from holdfast.advise.model import (
    TWO_REPLICAS,
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
"""Minimum and maximum of proposed checkpoint intervals."""
KEPT_BYTES_MAX = Options().kept_bytes_max
"""Maximum bytes that a site may have to retain for another."""
COMBINATIONS_MAX = 5_000
INDISTINGUISHABLE = 0.02
"""A difference in overhead too small to measure; within it, the bytes sent decide."""
NEAR = 0.0005
"""Resolution of overheads: they are equal if they differ by less."""


@dataclass(frozen=True, slots=True)
class Bounds:
    recovery_ms: float
    overhead: float
    losses: int = 1
    """How many losses at once the flow is to survive."""

    def excess(self, predicted: Prediction) -> float:
        """Return the sum of the relative excess over each bound; 0 if both are met."""
        late = predicted.recovery_ms / max(self.recovery_ms, 1.0) - 1.0
        dear = predicted.overhead / max(self.overhead, 0.001) - 1.0
        return max(0.0, late) + max(0.0, dear)

    def missed(self, predicted: Prediction) -> list[str]:
        missed = []
        if predicted.recovery_ms > self.recovery_ms:
            much, bound = predicted.recovery_ms, self.recovery_ms
            missed.append(
                f"recovery: {in_time(much)} instead of {in_time(bound)}, "
                f"{in_time(much - bound)} too long"
            )
        if predicted.overhead > self.overhead:
            much, bound = predicted.overhead, self.overhead
            missed.append(
                f"overhead: {in_percent(much)} instead of {in_percent(bound)}, "
                f"{100 * (much - bound):.1f} points too much"
            )
        return missed


@dataclass(frozen=True, slots=True)
class TurnedDown:
    """A protection that was not proposed for a stage: the reason, and the prediction for the whole
    flow with it; None if it is not possible there."""

    name: str
    why: str
    predicted: Prediction | None = None


@dataclass(frozen=True, slots=True)
class Proposed:
    """The proposal for one stage."""

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

    @property
    def unprotected(self) -> bool:
        """Whether a stage cannot be protected at all."""
        return any(choice.name == "none" for choice in self.choices.values())

    def code(self) -> list[str]:
        """Return the Python code of the proposal."""
        ends = overall(self.choices)
        count = self.bounds.losses
        asked = f", losses={count}" if count > 1 and not self.unprotected else ""
        lines = [f'flow = Flow("{self.facts.flow}", protect={ends}{asked})']
        for position, choice in self.choices.items():
            if choice != ends:
                stage = self.facts.stages[position]
                keys = ", ".join(f'"{key}"' for key in stage.by)
                lines.append(f".key_by({keys}).protect({choice})  # {stage.name}")
        return lines

    def to_dict(self) -> dict[str, Any]:
        stages = self.facts.stages
        data = {
            "flow": self.facts.flow,
            "bounds": asdict(self.bounds),
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
        return _finite(data)


def _part_of(predicted: Prediction, stage: int) -> dict[str, float]:
    part = predicted.parts[stage]
    return {
        "slowdown": part.slowdown,
        "extra_bytes_per_s": part.extra_bytes,
        "recovery_ms": part.recovery_ms,
        "memory_bytes": part.memory_bytes,
        "log_s": part.log_s,
    }


def _finite(data: Any) -> Any:
    """Replace infinity, which JSON does not have, by None."""
    if isinstance(data, Mapping):
        return {name: _finite(value) for name, value in data.items()}
    if isinstance(data, list | tuple):
        return [_finite(value) for value in data]
    return None if isinstance(data, float) and not math.isfinite(data) else data


# --- choosing -----------------------------------------------------------------------------------


def propose(facts: FlowFacts, bounds: Bounds, constants: Constants) -> Advice:
    """Propose the cheapest protections within `bounds`, or the closest to them."""

    def rank(choices: Choices) -> tuple[float, float, float]:
        predicted = predict(facts, choices, constants)
        overhead = round(predicted.overhead / NEAR) * NEAR
        return round(bounds.excess(predicted), 3), overhead, predicted.memory_bytes

    tried = list(_combinations(facts, bounds, constants, rank))
    best = _sends_least(facts, tried, min(tried, key=rank), bounds, constants)
    predicted = predict(facts, best, constants)
    proposed = tuple(
        Proposed(
            stage,
            choice,
            _why(facts, stage, best, bounds, constants),
            tuple(_turned_down(facts, stage, best, bounds, constants)),
        )
        for stage, choice in best.items()
    )
    missed = bounds.missed(predicted)
    return Advice(
        facts, bounds, predicted, proposed, tuple(missed), tuple(_notes(facts, best, constants))
    )


def _sends_least(
    facts: FlowFacts,
    tried: list[dict[int, Choice]],
    cheapest: dict[int, Choice],
    bounds: Bounds,
    constants: Constants,
) -> dict[int, Choice]:
    """Return the combination that sends least among those within bounds that are indistinguishable
    from the cheapest in cost."""
    least = predict(facts, cheapest, constants)
    if bounds.excess(least):
        return cheapest

    def rank(choices: Choices) -> tuple[float, float, float]:
        predicted = predict(facts, choices, constants)
        return round(predicted.extra_bytes, 2), predicted.memory_bytes, predicted.overhead

    similar = [
        choices
        for choices in tried
        if not bounds.excess(predicted := predict(facts, choices, constants))
        and predicted.overhead <= least.overhead + INDISTINGUISHABLE
    ]
    return min(similar, key=rank)


def refused(facts: FlowFacts, stage: int, name: str) -> str | None:
    """Return why a stage cannot have this protection; None if it can."""
    of_stage = facts.stages[stage]
    if not of_stage.ordered:
        return "it merges in the order of arrival, which differs between replicas"
    if name not in ("upstream", "rollback"):
        return None
    if name == "rollback" and not facts.uniform:
        return "the paths between two stages of this flow do not have the same length"
    if not of_stage.bounded:
        return "its state depends on all rows of a key; with summary_interval= it would be passive"
    if of_stage.life_s is None:
        return "the life of its state is unknown, because event time did not advance"
    kept = facts.bytes_in(stage) / facts.sites * of_stage.life_s
    if kept > KEPT_BYTES_MAX:
        return f"each site would keep {in_bytes(kept)} for it"
    return None


def _possible(facts: FlowFacts, stage: int) -> list[str]:
    names = [n for n in ("upstream", "passive", "pairs") if refused(facts, stage, n) is None]
    return names or ["none"]


def _combinations(
    facts: FlowFacts, bounds: Bounds, constants: Constants, rank: Any
) -> Iterator[dict[int, Choice]]:
    """Yield all combinations; of a flow with very many stages, those of a hill climb that changes
    one stage at a time."""
    names = {i: _possible(facts, i) for i in facts.keyed}
    if math.prod(len(n) for n in names.values()) <= COMBINATIONS_MAX:
        for chosen in itertools.product(*names.values()):
            yield _with_interval(facts, dict(zip(names, chosen, strict=True)), bounds, constants)
        return
    now = {i: n[-1] for i, n in names.items()}
    best = _with_interval(facts, now, bounds, constants)
    while True:
        yield best
        others = [
            _with_interval(facts, now | {i: name}, bounds, constants)
            for i in names
            for name in names[i]
        ]
        better = min(others, key=rank)
        if rank(better) >= rank(best):
            return
        best, now = better, {i: c.name for i, c in better.items()}


def _with_interval(
    facts: FlowFacts, names: Mapping[int, str], bounds: Bounds, constants: Constants
) -> dict[int, Choice]:
    """Return choices with a checkpoint interval, the same for all passive stages."""
    every_ms = _every_ms(facts, names, bounds, constants)
    return {
        i: Choice(n, every_ms if n == "passive" else 0, bounds.losses) for i, n in names.items()
    }


def _every_ms(
    facts: FlowFacts, names: Mapping[int, str], bounds: Bounds, constants: Constants
) -> int:
    """Return the longest interval within bounds: it makes checkpoints cheapest."""
    passive = [i for i, name in names.items() if name == "passive"]
    if not passive:
        return 0
    at_once = {
        i: Choice(name, 1 if name == "passive" else 0, bounds.losses) for i, name in names.items()
    }
    left_ms = bounds.recovery_ms - predict(facts, at_once, constants).recovery_ms
    per_s = constants.redo * sum(work_again_ms(facts, i, 1.0) for i in passive)
    by_time = 1e3 * left_ms / per_s if per_s else math.inf
    most = max(facts.bytes_in(i) for i in passive) / facts.sites
    by_memory = 1e3 * KEPT_BYTES_MAX / 2 / most if most else math.inf
    return _rounded(max(EVERY_MS[0], min(EVERY_MS[1], by_time, by_memory)))


def _rounded(value: float) -> int:
    """Round down to two digits.

    >>> [_rounded(v) for v in (20, 87.5, 728.0, 10_000)]
    [20, 87, 720, 10000]
    """
    digit = 10 ** max(0, math.floor(math.log10(value)) - 1)
    return int(value // digit * digit)


# --- reasons ------------------------------------------------------------------------------------


def _why(
    facts: FlowFacts, stage: int, choices: Choices, bounds: Bounds, constants: Constants
) -> str:
    of_stage, choice = facts.stages[stage], choices[stage]
    work = f"{in_percent(share(facts, stage))} of the processor time"
    if choice.name == "none":
        return str(refused(facts, stage, "pairs"))
    if choice.name == "upstream":
        return (
            f"its state depends on the last {in_time(1e3 * (of_stage.life_s or 0.0))}, so it can "
            "be rebuilt from retained input, and no work or data is duplicated"
        )
    if choice.name == "passive":
        checkpoints = checkpoint_bytes(facts, stage, choices, constants)
        return (
            f"checkpoints of {in_bytes(checkpoints)} per second cost less than doing its work "
            f"twice ({work}), and the work since the last one can be repeated within the bound"
        )
    other = _otherwise(facts, stage, "passive", choices, bounds, constants)
    if predict(facts, other, constants).recovery_ms > bounds.recovery_ms:
        return f"only a second replica can take over immediately; its work is {work}"
    alternative, chosen = (predict(facts, c, constants) for c in (other, choices))
    if alternative.overhead > chosen.overhead:
        return f"doing its work twice ({work}) costs less than checkpoints that are frequent enough"
    return (
        f"doing its work twice ({work}) costs hardly more than checkpoints that are frequent "
        "enough, and sends less"
    )


def _otherwise(
    facts: FlowFacts,
    stage: int,
    name: str,
    choices: Choices,
    bounds: Bounds,
    constants: Constants,
) -> dict[int, Choice]:
    """Return the same choices with another protection for one stage."""
    names = {i: c.name for i, c in choices.items()} | {stage: name}
    return _with_interval(facts, names, bounds, constants)


def _turned_down(
    facts: FlowFacts, stage: int, choices: Choices, bounds: Bounds, constants: Constants
) -> Iterator[TurnedDown]:
    chosen = predict(facts, choices, constants)
    for name in ("upstream", "rollback", "passive", "pairs", "active"):
        if name == choices[stage].name:
            continue
        why = refused(facts, stage, name)
        if why is not None:
            yield TurnedDown(f"{name}()", why)
            continue
        other = _otherwise(facts, stage, name, choices, bounds, constants)
        alternative = predict(facts, other, constants)
        why = _same_as(choices[stage].name, name) or _worse(alternative, chosen, bounds)
        yield TurnedDown(str(other[stage]), why, alternative)


def _same_as(chosen: str, name: str) -> str | None:
    if (chosen, name) == ("upstream", "rollback"):
        return "same cost and recovery; upstream() also supports flows that are not uniform"
    if (chosen, name) == ("pairs", "active"):
        return "same cost and recovery; for operators whose replicas differ in the order of rows"
    return None


def _worse(alternative: Prediction, chosen: Prediction, bounds: Bounds) -> str:
    overhead, recovery_ms = alternative.overhead, alternative.recovery_ms
    if recovery_ms > bounds.recovery_ms and recovery_ms > chosen.recovery_ms:
        return f"the flow would recover in {in_time(recovery_ms)}"
    if overhead > bounds.overhead and overhead > chosen.overhead + NEAR:
        return f"the flow would lose {in_percent(overhead)} of its rate"
    if overhead > chosen.overhead + NEAR:
        return f"within the bounds, but costs {100 * (overhead - chosen.overhead):.1f} points more"
    if round(alternative.extra_bytes, 2) > round(chosen.extra_bytes, 2):
        return "hardly cheaper, and sends more"
    return f"hardly cheaper, and keeps {in_bytes(alternative.memory_bytes)} in memory"


def _notes(facts: FlowFacts, choices: Choices, constants: Constants) -> Iterator[str]:
    if overall(choices).name in TWO_REPLICAS:
        ends = constants.ends * overall(choices).losses * ends_share(facts)
        yield f"sources and sinks are pairs, which alone costs {in_percent(ends / (1.0 + ends))}"
    for stage in facts.stages:
        if stage.life_s is not None and stage.life_s > facts.seconds:
            yield (
                f"the state of {stage.name!r} lives for {in_time(1e3 * stage.life_s)}, but was "
                f"measured for only {facts.seconds:.0f} s: it will grow beyond the measured size"
            )
    if not facts.keyed:
        yield "there is no keyed stage: only sources and sinks can be protected"


# --- formatting -----------------------------------------------------------------------------------


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
