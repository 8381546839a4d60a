"""Two sites that are apart though both reach the controller: one is let go. Not so one that is
busy, or that is silent and cannot be spared: it is waited for."""

import os
import signal
import time
from collections.abc import Iterator

import numpy as np
import pyarrow as pa
import pytest

from holdfast import Flow
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.control.run import start
from holdfast.core.peer_monitor import PeerMonitor
from holdfast.lab.chaos.proxy import Proxy
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.sources import generator
from tests.support.lines import check_lines, two_lines
from tests.support.runs import PATIENCE_S, pids, replicas, until, until_protected, until_rows

LEASE_S = 1.0


@pytest.fixture
def proxy() -> Iterator[Proxy]:
    proxy = Proxy()
    yield proxy
    proxy.close()


def test_of_two_that_hear_nothing_of_each_other_one_is_let_go(kept, proxy: Proxy) -> None:
    """Their connection stays up: the kernels on both sides see their bytes acknowledged."""
    options = Options(sites=4, partitions=8, lease=LEASE_S)
    run = start(two_lines(pairs()), options=options, route=proxy.route)
    kept.append(run)
    until_protected(run, 4)
    until_rows(run)
    one, other = replicas(run)["left", 0]
    proxy.hold(one, other)
    until(lambda: run.status()["dead"], "one of the two is let go")
    ((dead, reason),) = run.status()["dead"].items()
    assert dead in (one, other) and "have heard nothing from each other" in reason
    until_protected(run, 4)
    until_rows(run)
    check_lines(run, kept)
    assert set(run.status()["dead"]) == {dead}


def test_who_is_apart_from_all_others_is_let_go_and_not_they(kept, proxy: Proxy) -> None:
    options = Options(sites=4, partitions=8, lease=LEASE_S)
    run = start(two_lines(pairs()), options=options, route=proxy.route)
    kept.append(run)
    until_protected(run, 4)
    until_rows(run)
    lonely = replicas(run)["right", 0][0]
    for other in set(pids(run)) - {lonely}:
        proxy.hold(lonely, other)
    until(lambda: run.status()["dead"], "it is let go")
    until_protected(run, 4)
    until_rows(run)
    assert set(run.status()["dead"]) == {lonely}
    check_lines(run, kept)


ROWS, LONG = 60_000, 4 * LEASE_S


def places(split: int, offset: int, n: int) -> pa.RecordBatch:
    return pa.record_batch({"at": pa.array(np.arange(offset, offset + n))})


def one_long_call(batch: pa.RecordBatch) -> pa.RecordBatch:
    at = batch["at"].to_numpy()
    if at.size and at[0] <= ROWS // 2 <= at[-1]:
        time.sleep(LONG)
    return batch


def test_a_site_in_a_long_call_hears_nothing_and_is_not_let_go_for_it(kept) -> None:
    flow = Flow("long call", protect=pairs())
    source = flow.source(
        "places", generator(places, places(0, 0, 0).schema, rows=ROWS, rate=20_000)
    )
    kept_back = source.map(one_long_call, places(0, 0, 0).schema)
    kept_back.key_by("at").agg(n=F.count()).sink("out", discard())
    run = flow.start(sites=4, partitions=8, options=Options(lease=LEASE_S))
    kept.append(run)
    assert run.wait(PATIENCE_S)
    assert run.sink_report("out")["rows"] == ROWS
    assert run.status()["dead"] == {}


def test_a_silent_site_that_cannot_be_spared_is_waited_for(kept) -> None:
    """However long: that others hear nothing of it either is no news."""
    flow = two_lines(left=200_000, right=200_000)
    run = flow.start(sites=2, partitions=8, options=Options(lease=0.2))
    kept.append(run)
    until(lambda: len(run.status()["sites"]) == 2, "both are there")
    pid = pids(run)[1]
    os.kill(pid, signal.SIGSTOP)
    time.sleep(15 * 0.2)
    os.kill(pid, signal.SIGCONT)
    assert run.wait(PATIENCE_S)
    assert run.status()["dead"] == {}


# --- counting -----------------------------------------------------------------------------------


def listen(monitor: PeerMonitor, times: list[float], heard: list[int]) -> list[tuple[int, int]]:
    return [said for at in times for said in monitor.listen(at, [7, 8], heard)]


def test_silence_is_told_once_a_lease_and_ends_with_a_word() -> None:
    monitor, quarters = PeerMonitor(1.0), [n / 4 for n in range(40)]
    assert listen(monitor, quarters[:8], [8]) == []
    assert listen(monitor, quarters[8:17], [8]) == [(7, 2), (7, 3), (7, 4)]
    assert listen(monitor, quarters[17:18], [7, 8]) == []
    assert listen(monitor, quarters[18:25], [8]) == []
    assert listen(monitor, quarters[25:27], [8]) == [(7, 2)]


def test_who_did_not_get_to_run_has_not_listened() -> None:
    monitor = PeerMonitor(1.0)
    assert listen(monitor, [0.0, 0.25, 60.0, 60.25], []) == []
    assert listen(monitor, [61.0, 61.5], []) == [(7, 2), (8, 2)]
