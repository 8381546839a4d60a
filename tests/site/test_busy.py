"""A site in a long call still says that it lives, and one in a call that never ends is found."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from holdfast import Flow, HungError, KeyedFunction
from holdfast.api.options import Options
from holdfast.control.run import Run
from holdfast.core.peer_monitor import Standstill
from holdfast.core.sequencer import Budget
from holdfast.net import wire
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.sources import generator
from tests.support.lonely_site import lonely_site
from tests.support.runs import PATIENCE_S, until

ROWS, KEYS = 12_000, 40
LEASE_S, LONG_S, HUNG_S = 1.0, 2.5, 8.0


def numbers(split: int, offset: int, n: int) -> pa.RecordBatch:
    at = np.arange(offset, offset + n)
    return pa.record_batch({"k": pa.array(at % KEYS), "v": pa.array(at)})


SCHEMA = numbers(0, 0, 0).schema


class Slow(KeyedFunction):
    """The running sum of a key; `dawdle` is called once for the row in the middle."""

    state = {"sum": (pa.int64(), 0)}  # noqa: RUF012
    output = pa.schema([("sum", pa.int64())])

    def __init__(self, dawdle: Callable[[], None]) -> None:
        self._dawdle = dawdle

    def process(self, rows: Any, state: Any) -> tuple[np.ndarray, dict[str, Any]]:
        groups = rows.groups()
        if ROWS // 2 in rows["v"]:
            self._dawdle()
        values = groups.fold(np.add, state["sum"][groups.slots], rows["v"][groups.rows])
        state["sum"][groups.slots] = values[groups.lasts]
        return np.arange(len(rows)), {"sum": groups.scattered(values)}


def spin() -> None:
    """Python code that never waits for anything."""
    end = time.monotonic() + LONG_S
    while time.monotonic() < end:
        sum(range(100))


def sleep() -> None:
    time.sleep(LONG_S)


def hang() -> None:
    while True:
        time.sleep(3600)


class HangOnce:
    """The first process that calls it never gets out of it, and the others do not get into it."""

    def __init__(self, mark: Path) -> None:
        self._mark = str(mark)

    def __call__(self) -> None:
        try:
            mark = os.open(self._mark, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return
        os.write(mark, str(os.getpid()).encode())
        os.close(mark)
        hang()


def slow_flow(dawdle: Callable[[], None]) -> Flow:
    flow = Flow("slow", protect=pairs(failure_domain="process"))
    source = flow.source("numbers", generator(numbers, SCHEMA, rows=ROWS))
    source.key_by("k").apply(Slow(dawdle)).sink("out", discard())
    return flow


def options(call_s_max: float = 60.0) -> Options:
    budget = Budget(epoch_rows_max=1_000)
    return Options(lease=LEASE_S, call_timeout=call_s_max, budget=budget, block_rows=500)


@cache
def expected() -> tuple[int, int]:
    """What the sink gets if no call is long."""
    with slow_flow(return_at_once).start(sites=2, options=options()) as run:
        assert run.wait(PATIENCE_S)
    return delivered(run)


def return_at_once() -> None:
    pass


def delivered(run: Run) -> tuple[int, int]:
    report = run.sink_report("out")
    return report["rows"], report["digest"]


def is_alive(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rsplit(")", 1)[1].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize("dawdle", [sleep, spin], ids=["sleeps", "computes"])
def test_a_site_in_a_call_longer_than_the_lease_is_not_declared_dead(
    kept, dawdle: Callable[[], None]
) -> None:
    run = slow_flow(dawdle).start(sites=3, options=options())
    kept.append(run)
    assert run.wait(PATIENCE_S)
    assert run.status()["dead"] == {}
    assert delivered(run) == expected()


def test_a_site_in_a_call_that_never_ends_is_declared_dead_and_ends_its_process(
    kept, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    mark = tmp_path / "mark"
    run = slow_flow(HangOnce(mark)).start(sites=3, options=options(HUNG_S))
    kept.append(run)
    assert run.wait(PATIENCE_S)
    ((_, reason),) = run.status()["dead"].items()
    assert "it has been in stage 'Slow by (k)', epoch " in reason and reason.endswith(" s")
    assert delivered(run) == expected()
    pid = int(mark.read_text())
    until(lambda: not is_alive(pid), "the hung process ends")
    assert "was declared dead in a call that does not end; it exits" in capfd.readouterr().err


def test_a_function_that_never_returns_stops_the_flow_and_is_named(kept) -> None:
    """No replica is failed for it: the next one would hang at the same row."""
    run = slow_flow(hang).start(sites=2, options=options(HUNG_S))
    kept.append(run)
    with pytest.raises(HungError) as caught:
        run.wait(PATIENCE_S)
    assert "have been in stage 'Slow by (k)', epoch " in str(caught.value)
    assert run.status()["dead"] == {}


def test_a_site_that_was_stopped_is_not_in_a_long_call_when_it_goes_on() -> None:
    """Its pulse may be said before its event loop gets to turn."""
    site = lonely_site()
    pulse, site.node.stages.call = site._pulse, ("Slow by (k)", 7)
    pulse.turned(100.0)
    still = Standstill(0.2)
    assert pulse.message(still, 100.2) == wire.Beat()
    assert pulse.message(still, 100.4) == wire.Beat()
    beat = pulse.message(still, 999.0)
    assert (beat.busy, beat.stage, beat.epoch) == (True, "Slow by (k)", 7)
    assert beat.seconds < 1.0
    said = [pulse.message(still, 999.0 + n * 0.2).seconds for n in range(1, 60)]
    assert said == sorted(said) and said[-1] > 10.0
    pulse.turned(1010.9)
    assert pulse.message(still, 1011.0) == wire.Beat()
