"""Predicts the cost of protections and the recovery time after a loss, with pure functions.

For a stage of a flow on *S* sites, *w* is its work in processors, and *C* that of all sites; *in*
is its input in bytes per second, *r* its rows per second, *n* the number of its keys, and *z* their
size in bytes.

*Rate*, relative to none: ``1 / (1 + slowdown)``. The slowdown is the sum of

- ``ends · (1 − Σ w / C)``, with *w* of all keyed stages, if sources and sinks are pairs, as they
  are under pairs and active. Otherwise the second replica of a source or sink only follows, and
  costs nothing;
- ``replica · w / C`` for a stage under pairs or active, which is computed twice;
- ``checkpoint · (megabytes of checkpoints per second) / C`` for a stage under passive.

*Bytes* between sites. The rows of an exchange go to each replica of its consumer, from a replica on
the same site if there is one: ``bytes · replicas of consumer · (1 − replicas of producer / S)``. A
checkpoint every *T* seconds has the keys touched since the last one, which are ``n (1 − exp(−r T /
n))`` (at most the smaller of *r T* and *n*), of *z* bytes, and 16 bytes for each removed key, times
``state``. It also has the output that goes to stages that are rebuilt. (A consumer with a passive
standby has the output in its own checkpoints.)

*Recovery* is the additional latency of the latest row, counted from the detection of the failure. A
lost site had *1 / S* of every stage, so the work to repeat is ``Σ w / S · span``. The span is *T*
under passive, and the length of the log under upstream.

- pairs, active: ``route``;
- passive: ``route + switch + redo · (work to repeat)``;
- upstream, rollback, and sources and sinks that are not pairs: ``route + max(ask, remake · (work to
  repeat))``.

To survive K losses at once there are K further replicas or standbys, so K times their slowdown,
checkpoints and state. Recovery stays that of one loss.

*Memory*: the state of a second replica; the output that producers retain since the last checkpoint,
*T · in*; or the log, which is *in* times the life of the state and of the states of the stages
after it that are rebuilt. A producer that is a pair retains it twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.advise.facts import FlowFacts

TWO_REPLICAS = ("pairs", "active")
REBUILDS = ("upstream", "rollback")
REMOVED_KEY_BYTES = 16
"""Size of a removed key in a checkpoint."""


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of the models, which `holdfast.advise.fit` fits to a benchmark."""

    ends: float
    replica: float
    checkpoint_s_per_mb: float
    state: float
    route_ms: float
    switch_ms: float
    redo: float
    ask_ms: float
    remake: float

    def to_dict(self) -> dict[str, float]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Choice:
    """A protection by name; for passive standby also the interval."""

    name: str
    every_ms: int = 0
    losses: int = 1
    """How many losses at once it is to survive."""

    @property
    def replicas(self) -> int:
        return 1 + self.losses if self.name in TWO_REPLICAS else 1

    def __str__(self) -> str:
        """
        >>> [str(Choice("passive", 200, n)) for n in (1, 2)]
        ['passive(interval=0.2)', 'passive(standbys=2, interval=0.2)']
        """
        given = []
        if self.losses > 1 and self.name in TWO_REPLICAS:
            given.append(f"replicas={self.replicas}")
        if self.losses > 1 and self.name == "passive":
            given.append(f"standbys={self.losses}")
        if self.every_ms:
            given.append(f"interval={self.every_ms / 1e3:g}")
        return f"{self.name}({', '.join(given)})"


Choices = Mapping[int, Choice]
"""The protection of every keyed stage, by position."""


def overall(choices: Choices) -> Choice:
    """Return the protection of the whole flow, which applies to sources and sinks: that of most
    stages."""
    every = [c for c in choices.values() if c.name != "none"]
    losses = max((c.losses for c in choices.values()), default=1)
    if not choices:
        return Choice("upstream")
    return Counter(every).most_common(1)[0][0] if every else Choice("pairs", losses=losses)


@dataclass(frozen=True, slots=True)
class StagePrediction:
    """The contribution of one keyed stage."""

    slowdown: float
    extra_bytes: float
    """Additional bytes per second of its input and its checkpoints."""
    recovery_ms: float
    """Recovery time if only this stage had to recover."""
    memory_bytes: float
    log_s: float
    """Seconds of input that its producers retain for it."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for a whole flow, relative to the same flow without protection."""

    rate: float
    extra_bytes: float
    recovery_ms: float
    memory_bytes: float
    plain_bytes: float
    """Bytes per second between sites without protection."""
    parts: Mapping[int, StagePrediction]

    @property
    def overhead(self) -> float:
        return 1.0 - self.rate

    def to_dict(self) -> dict[str, Any]:
        return {
            "rate": self.rate,
            "extra_bytes": self.extra_bytes,
            "recovery_ms": self.recovery_ms,
            "memory_bytes": self.memory_bytes,
        }


def predict(
    facts: FlowFacts, choices: Choices, constants: Constants, ends: Choice | None = None
) -> Prediction:
    """Predict the flow with these protections of its keyed stages, and that of its `ends` (sources
    and sinks), by default the protection of most stages."""
    ends = ends or overall(choices)
    replicas = {i: choices.get(i, ends).replicas for i in range(len(facts.stages))}
    parts = {i: _part(facts, i, choices, constants, replicas) for i in choices}
    slowdown = sum(p.slowdown for p in parts.values())
    recovery_ms = _recovery_ms(facts, choices, constants)
    if ends.name in TWO_REPLICAS:
        slowdown += constants.ends * ends.losses * ends_share(facts)
    elif not choices:
        recovery_ms += constants.ask_ms
    plain = sum(sent(facts, c.producer, c.consumer, c.bytes, {}) for c in facts.carried)
    into_sinks = [c for c in facts.carried if c.consumer not in choices]
    extra = sum(p.extra_bytes for p in parts.values())
    extra += sum(
        sent(facts, c.producer, c.consumer, c.bytes, replicas)
        - sent(facts, c.producer, c.consumer, c.bytes, {})
        for c in into_sinks
    )
    return Prediction(
        1.0 / (1.0 + slowdown),
        extra / plain if plain else 0.0,
        recovery_ms,
        sum(p.memory_bytes for p in parts.values()),
        plain,
        parts,
    )


def ends_share(facts: FlowFacts) -> float:
    """Return the share of processor time outside of keyed stages."""
    return 1.0 - sum(share(facts, i) for i in facts.keyed)


def share(facts: FlowFacts, stage: int) -> float:
    return facts.stages[stage].work / facts.cores


def sent(
    facts: FlowFacts, producer: int, consumer: int, carried: float, replicas: Mapping[int, int]
) -> float:
    """Return the bytes per second between sites; a stage has one replica unless it is in
    `replicas`."""
    here = min(1.0, replicas.get(producer, 1) / facts.sites)
    return carried * replicas.get(consumer, 1) * (1.0 - here)


def _part(
    facts: FlowFacts,
    stage: int,
    choices: Choices,
    constants: Constants,
    replicas: Mapping[int, int],
) -> StagePrediction:
    choice = choices[stage]
    extra = sum(
        sent(facts, c.producer, stage, c.bytes, replicas)
        - sent(facts, c.producer, stage, c.bytes, {})
        for c in facts.into(stage)
    )
    slowdown = memory = 0.0
    if choice.name in TWO_REPLICAS:
        slowdown = constants.replica * choice.losses * share(facts, stage)
        memory = facts.stages[stage].state_bytes * choice.losses
    if choice.name == "passive":
        checkpoints = checkpoint_bytes(facts, stage, choices, constants) * choice.losses
        slowdown = constants.checkpoint_s_per_mb * checkpoints / 1e6 / facts.cores
        extra += checkpoints
        memory = facts.stages[stage].state_bytes * choice.losses
    log = log_s(facts, stage, choices)
    memory += sum(c.bytes * replicas[c.producer] * log for c in facts.into(stage))
    alone = _recovery_ms(facts, {stage: choice}, constants, log)
    return StagePrediction(slowdown, extra, alone, memory, log)


def touched(rows: float, keys: float) -> float:
    """Return the expected number of distinct keys in `rows` rows with uniformly distributed keys.

    >>> [round(touched(rows, 1000)) for rows in (0, 10, 1000, 100_000)]
    [0, 10, 632, 1000]
    """
    return keys * -math.expm1(-rows / keys) if keys else 0.0


def checkpoint_bytes(facts: FlowFacts, stage: int, choices: Choices, constants: Constants) -> float:
    """Return the bytes of checkpoints per second."""
    of_stage, every_s = facts.stages[stage], choices[stage].every_ms / 1e3
    keys = touched(of_stage.rows_in * every_s, of_stage.keys)
    # Output is dropped once a consumer with replicas has it, or a standby has it in a checkpoint.
    consumers = [(c, choices.get(c.consumer)) for c in facts.out_of(stage)]
    kept = [c.bytes for c, choice in consumers if choice is not None and choice.name in REBUILDS]
    changed = keys * of_stage.key_bytes / every_s + REMOVED_KEY_BYTES * of_stage.removals
    return constants.state * changed + sum(kept)


def log_s(facts: FlowFacts, stage: int, choices: Choices) -> float:
    """Return the seconds of input that are retained for a stage, without rows in flight."""
    choice = choices[stage]
    if choice.name == "passive":
        return choice.every_ms / 1e3
    if choice.name not in REBUILDS:
        return 0.0
    after = [c.consumer for c in facts.out_of(stage)]
    logs = [log_s(facts, i, choices) for i in after if i in choices and choices[i].name in REBUILDS]
    life = facts.stages[stage].life_s
    return (math.inf if life is None else life) + max(logs, default=0.0)


def work_again_ms(facts: FlowFacts, stage: int, span_s: float) -> float:
    """Return the work of one site for its part of a stage in `span_s` seconds."""
    return 1e3 * facts.stages[stage].work / facts.sites * span_s


def _recovery_ms(
    facts: FlowFacts, choices: Choices, constants: Constants, log: float | None = None
) -> float:
    """Return the recovery time of all these stages: a lost site had partitions of each."""
    names = {c.name for c in choices.values()}
    if "none" in names:
        return math.inf
    again = {
        i: work_again_ms(facts, i, log_s(facts, i, choices) if log is None else log)
        for i in choices
    }
    total = constants.route_ms
    redone = [again[i] for i, c in choices.items() if c.name == "passive"]
    remade = [again[i] for i, c in choices.items() if c.name in REBUILDS]
    if redone:
        total += constants.switch_ms + constants.redo * sum(redone)
    if remade:
        total += max(constants.ask_ms, constants.remake * sum(remade))
    return total
