"""What a protection would cost a flow, and how long a loss would be felt: pure functions.

For a stage of a flow on *S* sites: *w* is its work in processors, *C* all that the sites use; *in*
is what it gets, in bytes a second, *r* its rows a second, *n* the number of its keys, of *z* bytes.

*Rate*, relative to none: ``1 / (1 + slowdown)``, where the slowdown is the sum of

- ``ends · (1 − Σ w / C)``, *w* of all keyed stages, if sources and sinks are pairs: they are so
  under pairs and active. Otherwise the second replica of an end only follows, and costs nothing;
- ``replica · w / C`` for a stage under pairs or active, which is computed twice;
- ``checkpoint · (megabytes of checkpoints a second) / C`` for one under passive.

*Bytes* between sites. What an exchange carries goes to each replica of its consumer, from a replica
on the same site if there is one: ``bytes · replicas of consumer · (1 − replicas of producer / S)``.
A checkpoint every *T* seconds has the keys that were touched since the last one, which are ``n (1 −
exp(−r T / n))`` and so at most the smaller of *r T* and *n*, of *z* bytes, and 16 bytes for each
that is gone, times ``state``; and the output, if it goes to what is rebuilt. (What goes to a
passive standby is in its checkpoints before.)

*Recovery* is how much later than usual the latest row is, behind the moment when the failure is
known. A lost site had *1 / S* of every stage; what has to be done again is ``Σ w / S · span``: the
span is *T* under passive, and under upstream the time that the log reaches back.

- pairs, active: ``route``;
- passive: ``route + switch + redo · (what has to be done again)``;
- upstream, rollback, and ends that are no pairs: ``route + max(ask, remake · (what has to be done
  again))``.

*Memory*: a second replica's state; what producers keep since the last checkpoint, *T · in*; or the
log, *in* times the life of the state, and of that of the stages after it that are rebuilt. A
producer that is a pair keeps it twice.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.advise.facts import FlowFacts

TWICE = ("pairs", "active")
ANEW = ("upstream", "rollback")
GONE_BYTES = 16
"""By which a checkpoint names a key that is no more."""


@dataclass(frozen=True, slots=True)
class Constants:
    """What `holdfast.advise.fit` finds in a benchmark."""

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
    """A protection by its name; of passive standby also the interval."""

    name: str
    every_ms: int = 0

    @property
    def replicas(self) -> int:
        return 2 if self.name in TWICE else 1

    def __str__(self) -> str:
        return (
            f"{self.name}(interval={self.every_ms / 1e3:g})" if self.every_ms else f"{self.name}()"
        )


Choices = Mapping[int, Choice]
"""Of every keyed stage, by its position."""


def overall(choices: Choices) -> Choice:
    """What to say of the whole flow, by which its ends are protected: what most stages have."""
    every = [c for c in choices.values() if c.name != "none"]
    if not choices:
        return Choice("upstream")
    return Counter(every).most_common(1)[0][0] if every else Choice("pairs")


@dataclass(frozen=True, slots=True)
class Part:
    """What one keyed stage contributes."""

    slowdown: float
    extra_bytes: float
    """A second, on what arrives at it and on its checkpoints."""
    recovery_ms: float
    """If nothing but this stage had to recover."""
    memory_bytes: float
    log_s: float
    """How far back what its producers keep for it reaches."""


@dataclass(frozen=True, slots=True)
class Prediction:
    """Of a whole flow, relative to the same flow without protection."""

    rate: float
    extra_bytes: float
    recovery_ms: float
    memory_bytes: float
    plain_bytes: float
    """What sites send each other without protection, a second."""
    parts: Mapping[int, Part]

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
    """What the flow would be like if its keyed stages were protected so, and its `ends`: by default
    as most stages are."""
    ends = ends or overall(choices)
    replicas = {i: choices.get(i, ends).replicas for i in range(len(facts.stages))}
    parts = {i: _part(facts, i, choices, constants, replicas) for i in choices}
    slowdown = sum(p.slowdown for p in parts.values())
    recovery_ms = _recovery_ms(facts, choices, constants)
    if ends.name in TWICE:
        slowdown += constants.ends * ends_share(facts)
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
    """Of all processor time, what keyed stages do not work."""
    return 1.0 - sum(share(facts, i) for i in facts.keyed)


def share(facts: FlowFacts, stage: int) -> float:
    return facts.stages[stage].work / facts.cores


def sent(
    facts: FlowFacts, producer: int, consumer: int, carried: float, replicas: Mapping[int, int]
) -> float:
    """Bytes a second between sites; a stage has one replica unless `replicas` says otherwise."""
    here = min(1.0, replicas.get(producer, 1) / facts.sites)
    return carried * replicas.get(consumer, 1) * (1.0 - here)


def _part(
    facts: FlowFacts,
    stage: int,
    choices: Choices,
    constants: Constants,
    replicas: Mapping[int, int],
) -> Part:
    choice = choices[stage]
    extra = sum(
        sent(facts, c.producer, stage, c.bytes, replicas)
        - sent(facts, c.producer, stage, c.bytes, {})
        for c in facts.into(stage)
    )
    slowdown = memory = 0.0
    if choice.name in TWICE:
        slowdown = constants.replica * share(facts, stage)
        memory = facts.stages[stage].state_bytes
    if choice.name == "passive":
        checkpoints = checkpoint_bytes(facts, stage, choices, constants)
        slowdown = constants.checkpoint_s_per_mb * checkpoints / 1e6 / facts.cores
        extra += checkpoints
        memory = facts.stages[stage].state_bytes
    log = log_s(facts, stage, choices)
    memory += sum(c.bytes * replicas[c.producer] * log for c in facts.into(stage))
    alone = _recovery_ms(facts, {stage: choice}, constants, log)
    return Part(slowdown, extra, alone, memory, log)


def touched(rows: float, keys: float) -> float:
    """How many different ones of `keys` keys so many rows have, if none is preferred.

    >>> [round(touched(rows, 1000)) for rows in (0, 10, 1000, 100_000)]
    [0, 10, 632, 1000]
    """
    return keys * -math.expm1(-rows / keys) if keys else 0.0


def checkpoint_bytes(facts: FlowFacts, stage: int, choices: Choices, constants: Constants) -> float:
    """A second."""
    said, every_s = facts.stages[stage], choices[stage].every_ms / 1e3
    keys = touched(said.rows_in * every_s, said.keys)
    # What a replica has received is let go of, and what a standby has a checkpoint of.
    consumers = [(c, choices.get(c.consumer)) for c in facts.out_of(stage)]
    kept = [c.bytes for c, choice in consumers if choice is not None and choice.name in ANEW]
    changed = keys * said.key_bytes / every_s + GONE_BYTES * said.removals
    return constants.state * changed + sum(kept)


def log_s(facts: FlowFacts, stage: int, choices: Choices) -> float:
    """How many seconds of its input are kept for a stage, beyond what is under way."""
    choice = choices[stage]
    if choice.name == "passive":
        return choice.every_ms / 1e3
    if choice.name not in ANEW:
        return 0.0
    after = [c.consumer for c in facts.out_of(stage)]
    logs = [log_s(facts, i, choices) for i in after if i in choices and choices[i].name in ANEW]
    life = facts.stages[stage].life_s
    return (math.inf if life is None else life) + max(logs, default=0.0)


def work_again_ms(facts: FlowFacts, stage: int, span_s: float) -> float:
    """What a site has worked for its part of a stage in so long."""
    return 1e3 * facts.stages[stage].work / facts.sites * span_s


def _recovery_ms(
    facts: FlowFacts, choices: Choices, constants: Constants, log: float | None = None
) -> float:
    """Of all these stages: a site has partitions of each, and is lost with all of them."""
    names = {c.name for c in choices.values()}
    if "none" in names:
        return math.inf
    again = {
        i: work_again_ms(facts, i, log_s(facts, i, choices) if log is None else log)
        for i in choices
    }
    found = constants.route_ms
    redone = [again[i] for i, c in choices.items() if c.name == "passive"]
    remade = [again[i] for i, c in choices.items() if c.name in ANEW]
    if redone:
        found += constants.switch_ms + constants.redo * sum(redone)
    if remade:
        found += max(constants.ask_ms, constants.remake * sum(remade))
    return found
