"""Flows that were never run: what the models are told of them."""

from dataclasses import replace
from typing import Any

from holdfast.advise.facts import Carried, FlowFacts, StageFacts
from holdfast.advise.model import Constants

CONSTANTS = Constants(
    ends=0.1,
    replica=0.8,
    checkpoint_s_per_mb=0.01,
    state=1.5,
    route_ms=2.0,
    switch_ms=30.0,
    redo=3.0,
    ask_ms=40.0,
    remake=0.5,
)


def stage(name: str, kind: str = "keyed", **more: Any) -> StageFacts:
    said = StageFacts(
        name=name,
        kind=kind,
        rows_in=50_000.0,
        rows_out=25_000.0,
        calls=40.0,
        removals=0.0,
        work=0.2 if kind == "keyed" else 0.02,
        keys=10_000,
        state_bytes=2_000_000,
        given_bytes=1_000_000,
        bounded=False,
        life_s=None,
        by=("key",),
    )
    return replace(said, **more)


def flow(*keyed: StageFacts, sites: int = 4, cores: float = 1.0) -> FlowFacts:
    """A source, these stages in a row, and a sink."""
    stages = (stage("source", "source"), *keyed, stage("sink", "sink"))
    carried = tuple(Carried(i, i + 1, 2e6 / (i + 1)) for i in range(len(stages) - 1))
    return FlowFacts("made-up", sites, 10.0, cores, stages, carried)


WINDOW = stage("window", bounded=True, life_s=1.0)
RUNNING = stage("running")
