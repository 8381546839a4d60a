"""Operators written for Spark on simulated sites: crashes and resets at random moments."""

from __future__ import annotations

import datetime
import random
from functools import cache

import pyarrow as pa
import pytest

from holdfast import Flow
from holdfast.api.protection import Protection
from holdfast.lab.sim.world import World
from holdfast.sources import rows
from tests.support.commands import COMMANDS, table
from tests.support.processors import SESSION, SESSIONS, VISITS, Visits, sessions
from tests.support.sim_faults import PAIRS, TINY, Faults, go
from tests.support.sim_flows import Ordered, result

SINKS = ("visits", "sessions")


def stateful(batch: pa.RecordBatch, protect: Protection | None = None) -> Flow:
    flow = Flow("stateful", protect=protect)
    keyed = flow.source("s", rows(batch), event_time="ts").key_by("k")
    lateness = datetime.timedelta(milliseconds=15)
    visits = keyed.transform_with_state(Visits(), VISITS, time_mode="EventTime", lateness=lateness)
    visits.sink("visits", Ordered())
    keyed.apply_in_pandas_with_state(
        sessions, SESSIONS, SESSION, timeout="EventTimeTimeout", lateness=lateness
    ).sink("sessions", Ordered())
    return flow


@cache
def given() -> pa.RecordBatch:
    return table(random.Random(5), 120, COMMANDS)


@cache
def expected() -> dict[str, pa.Table]:
    world = World(stateful(given()), sites=1)
    world.run()
    return {sink: result(world, sink) for sink in SINKS}


@pytest.mark.parametrize("seed", range(4))
def test_whatever_dies_the_results_are_those_of_an_undisturbed_run(seed: int) -> None:
    world = World(stateful(given(), PAIRS), sites=4, seed=seed, options=TINY)
    faults = Faults(seed, crashes=3, resets=2)
    go(world, faults)
    assert faults.crashed and world.error is None
    for sink in SINKS:
        assert result(world, sink).equals(expected()[sink])
    assert any("timer" in what for what in expected()["visits"]["what"].to_pylist())
