"""What a flow does, as far as the models need to know it: rates, state, and where time goes.

Everything comes from looks at a run (`Look`): rates from the first and the last, so that what was
before (processes that start, modules that are loaded) does not count; state is where it is largest.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from holdfast.control.run import Run
from holdfast.core.records import EpochRecord
from holdfast.errors import FlowError
from holdfast.plan.planner import Plan, Stage


@dataclass(frozen=True, slots=True)
class StageFacts:
    """One stage, on all sites together; rates are per second."""

    name: str
    kind: str
    rows_in: float
    rows_out: float
    calls: float
    removals: float
    """Keys that are forgotten."""
    work: float
    """How many processors it keeps busy."""
    keys: int
    state_bytes: int
    given_bytes: int
    """What the state would be on its way to another site."""
    bounded: bool
    """Whether its state comes from recent rows only."""
    life_s: float | None
    """How far back these rows are at most, in seconds of the stream; None if that is not known."""
    ordered: bool = True
    """Whether it merges in the recorded order: if not, its replicas would differ."""
    by: tuple[str, ...] = ()
    """The columns that are its key."""

    @property
    def key_bytes(self) -> float:
        return self.given_bytes / self.keys if self.keys else 0.0


@dataclass(frozen=True, slots=True)
class Carried:
    """What an exchange carries: between which stages, by position, and how many bytes a second."""

    producer: int
    consumer: int
    bytes: float


@dataclass(frozen=True, slots=True)
class FlowFacts:
    flow: str
    sites: int
    seconds: float
    cores: float
    """How many processors all sites keep busy, with everything that is not a stage's work."""
    stages: tuple[StageFacts, ...]
    carried: tuple[Carried, ...]
    uniform: bool = True
    """Whether all ways between two stages are equally long, as `rollback` needs it."""

    @property
    def keyed(self) -> list[int]:
        return [i for i, s in enumerate(self.stages) if s.kind == "keyed"]

    @property
    def rows_in(self) -> float:
        return sum(s.rows_in for s in self.stages if s.kind == "source")

    def into(self, stage: int) -> list[Carried]:
        return [c for c in self.carried if c.consumer == stage]

    def out_of(self, stage: int) -> list[Carried]:
        return [c for c in self.carried if c.producer == stage]

    def bytes_in(self, stage: int) -> float:
        return sum(c.bytes for c in self.into(stage))

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, said: Mapping[str, Any]) -> FlowFacts:
        stages = tuple(StageFacts(**{**s, "by": tuple(s.get("by", ()))}) for s in said["stages"])
        carried = tuple(Carried(**c) for c in said["carried"])
        return cls(**{**said, "stages": stages, "carried": carried})


@dataclass(frozen=True)
class Look:
    """What a run had done at some moment."""

    at: float
    sites: Sequence[Mapping[str, Any]]
    times: Mapping[int, int]
    """By source: the latest event time that had been seen."""

    @classmethod
    def at_run(cls, run: Run) -> Look:
        return cls(time.monotonic(), run.status()["sites"], _times(run.records()))

    def total(self, what: str, stage: str) -> float:
        return float(sum(s[what] for s in self._of(stage)))

    def bytes_out(self, stage: str, position: int) -> float:
        return float(sum(s["bytes_out"][position] for s in self._of(stage)))

    def of_sites(self, what: str) -> float:
        return float(sum(site[what] for site in self.sites))

    def _of(self, stage: str) -> list[Mapping[str, Any]]:
        return [s for site in self.sites for s in site["stages"] if s["stage"] == stage]


def _times(records: Sequence[EpochRecord]) -> dict[int, int]:
    found: dict[int, int] = {}
    for record in records:
        for part in record.ranges:
            if part.time_max is not None:
                found[part.source] = max(part.time_max, found.get(part.source, part.time_max))
    return found


def between(plan: Plan, sites: int, looks: Sequence[Look], uniform: bool = True) -> FlowFacts:
    """What the flow has done from the first look to the last."""
    first, last = looks[0], looks[-1]
    seconds = last.at - first.at
    speed = _speed(first, last)

    def rate(what: str, stage: Stage) -> float:
        return (last.total(what, stage.name) - first.total(what, stage.name)) / seconds

    def most(what: str, stage: Stage) -> int:
        return int(max(look.total(what, stage.name) for look in looks))

    stages = []
    for stage in plan.stages:
        operator = stage.operator
        bounded = operator is not None and operator.bounded
        life = operator.horizon / speed if operator is not None and bounded and speed else None
        stages.append(
            StageFacts(
                stage.name,
                stage.kind,
                rate("rows_in", stage),
                rate("rows_out", stage),
                rate("calls", stage),
                rate("removals", stage),
                rate("work_s", stage),
                most("keys", stage),
                most("state_bytes", stage),
                most("given_bytes", stage),
                bounded,
                life,
                stage.merge == "ordered",
                tuple(operator.keys) if operator is not None else (),
            )
        )
    carried = []
    for exchange in plan.exchanges:
        producer = plan.stages[exchange.producer]
        position = producer.outputs.index(exchange)
        sent = last.bytes_out(producer.name, position) - first.bytes_out(producer.name, position)
        carried.append(Carried(exchange.producer, exchange.consumer, sent / seconds))
    cores = (last.of_sites("cpu_s") - first.of_sites("cpu_s")) / seconds
    cores = max(cores, sum(s.work for s in stages), 1e-9)
    if not any(s.rows_in for s in stages if s.kind == "source"):
        raise FlowError(
            f"flow {plan.flow!r} got no row in {seconds:.1f} s, so there is nothing to go by",
            hint="see whether its sources have rows, or give it more time with --seconds",
        )
    return FlowFacts(plan.flow, sites, seconds, cores, tuple(stages), tuple(carried), uniform)


def _speed(first: Look, last: Look) -> float:
    """How much event time passes in a second: of several sources, where it is slowest."""
    passed = [t - first.times[s] for s, t in last.times.items() if s in first.times]
    return min(passed, default=0) / (last.at - first.at)
