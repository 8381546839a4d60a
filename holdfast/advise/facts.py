"""The measurements of a flow that the models need: rates, state, and the use of processor time.

All come from samples of a run (`Sample`). Rates are computed from the first and the last sample, so
that the start of processes and the loading of modules do not count. State is the largest sample.
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
    """Keys removed."""
    work: float
    """Number of processors it keeps busy."""
    keys: int
    state_bytes: int
    given_bytes: int
    """Size of the state when it is sent to another site."""
    bounded: bool
    """Whether its state depends on recent rows only."""
    life_s: float | None
    """Maximum age of these rows, in seconds of the stream; None if it is not known."""
    ordered: bool = True
    """Whether it merges in the recorded order; otherwise its replicas would differ."""
    by: tuple[str, ...] = ()
    """Its key columns."""

    @property
    def key_bytes(self) -> float:
        return self.given_bytes / self.keys if self.keys else 0.0


@dataclass(frozen=True, slots=True)
class Carried:
    """Bytes per second that an exchange carries, and the positions of its two stages."""

    producer: int
    consumer: int
    bytes: float


@dataclass(frozen=True, slots=True)
class FlowFacts:
    flow: str
    sites: int
    seconds: float
    cores: float
    """Number of processors that all sites keep busy, including work outside of stages."""
    stages: tuple[StageFacts, ...]
    carried: tuple[Carried, ...]
    uniform: bool = True
    """Whether all paths between two stages have the same length, as `rollback` requires."""

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
    def from_dict(cls, data: Mapping[str, Any]) -> FlowFacts:
        stages = tuple(StageFacts(**{**s, "by": tuple(s.get("by", ()))}) for s in data["stages"])
        carried = tuple(Carried(**c) for c in data["carried"])
        return cls(**{**data, "stages": stages, "carried": carried})


@dataclass(frozen=True)
class Sample:
    """The cumulative counters of a run at one moment."""

    at: float
    sites: Sequence[Mapping[str, Any]]
    times: Mapping[int, int]
    """The latest event time so far, by source."""

    @classmethod
    def of(cls, run: Run) -> Sample:
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
    latest: dict[int, int] = {}
    for record in records:
        for part in record.ranges:
            if part.time_max is not None:
                latest[part.source] = max(part.time_max, latest.get(part.source, part.time_max))
    return latest


def between(plan: Plan, sites: int, samples: Sequence[Sample], uniform: bool = True) -> FlowFacts:
    """Compute the facts of a flow from the first sample to the last."""
    first, last = samples[0], samples[-1]
    seconds = last.at - first.at
    speed = _speed(first, last)

    def rate(what: str, stage: Stage) -> float:
        return (last.total(what, stage.name) - first.total(what, stage.name)) / seconds

    def most(what: str, stage: Stage) -> int:
        return int(max(sample.total(what, stage.name) for sample in samples))

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
            f"flow {plan.flow!r} got no rows in {seconds:.1f} s, so nothing could be measured",
            hint="check that its sources have rows, or measure for longer with --seconds",
        )
    return FlowFacts(plan.flow, sites, seconds, cores, tuple(stages), tuple(carried), uniform)


def _speed(first: Sample, last: Sample) -> float:
    """Return how much event time passes per second; of several sources, that of the slowest."""
    passed = [t - first.times[s] for s, t in last.times.items() if s in first.times]
    return min(passed, default=0) / (last.at - first.at)
