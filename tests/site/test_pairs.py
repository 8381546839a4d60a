"""Partition pairs on real processes: sites are killed and stopped, and the result is exact.

What a disturbed run took in is run again, undisturbed and on one site; both must give the same.
"""

import os
import signal
import threading
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import HostError, SiteLostError
from holdfast.api.options import Options
from holdfast.control.server import Control
from holdfast.core.controller import Controller
from holdfast.core.ids import TaskId
from holdfast.net import wire
from holdfast.protections import pairs
from holdfast.sinks import discard, parquet
from tests.support.lines import check_lines, one_line, two_lines
from tests.support.runs import (
    PATIENCE_S,
    exists,
    kill,
    pids,
    replicas,
    taken,
    until,
    until_protected,
    until_rows,
)

# --- kill -9 ------------------------------------------------------------------------------------


def test_a_site_of_each_role_is_killed_in_turn(kept) -> None:
    run = two_lines(pairs()).start(sites=4, partitions=8)
    kept.append(run)
    killed = []
    for role in ("sequencer", "ingress", "egress", "plain"):
        until_protected(run, 4)
        held = replicas(run)
        leaders = {
            "sequencer": held["left", 0][0],
            "ingress": held["right", 0][0],
            "egress": held["left out", 0][0],
        }
        plain = [s for s in pids(run) if s not in leaders.values()] or sorted(pids(run))
        victim = leaders.get(role, plain[0])
        until_rows(run)
        kill(run, victim)
        killed.append(victim)
    until_protected(run, 4)
    until_rows(run)
    assert set(run.status()["dead"]) == set(killed) and len(killed) == 4
    check_lines(run, kept)


def test_two_sites_that_share_nothing_are_killed_at_once(kept) -> None:
    run = two_lines(pairs()).start(sites=4, partitions=8)
    kept.append(run)
    until_protected(run, 4)
    until_rows(run)
    held = [set(c) for c in replicas(run).values()]
    couples = [(a, b) for a in range(4) for b in range(a) if not any(c <= {a, b} for c in held)]
    assert couples, held
    kill(run, *couples[0])
    until_protected(run, 4)
    until_rows(run)
    check_lines(run, kept)


def test_all_replicas_of_a_partition_are_killed(kept) -> None:
    run = two_lines(pairs()).start(sites=4, partitions=8)
    kept.append(run)
    until_protected(run, 4)
    until_rows(run)
    (stage, first), victims = next(
        i for i in replicas(run).items() if i[0][0].startswith("running")
    )
    lost = {name for name, sites in replicas(run).items() if set(sites) <= set(victims)}
    found = pids(run)
    for site in victims:
        os.kill(found[site], signal.SIGKILL)
    with pytest.raises(SiteLostError, match="no replica is left of") as caught:
        run.wait(PATIENCE_S)
    assert run.state == "failed"
    assert f"{stage!r}: {first}" in str(caught.value)
    for name, _ in lost:
        assert repr(name) in str(caught.value)


# --- stopped for a while ------------------------------------------------------------------------


def test_a_site_that_sleeps_longer_than_the_lease_must_leave(kept) -> None:
    """It wakes up as one that was declared dead; whatever it does then changes nothing."""
    run = two_lines(pairs()).start(sites=4, partitions=8, options=Options(lease=0.7))
    kept.append(run)
    until_protected(run, 4)
    until_rows(run)
    victim = replicas(run)["left out", 0][0]  # it believes that it leads a sink
    pid = pids(run)[victim]
    os.kill(pid, signal.SIGSTOP)
    try:
        until(lambda: victim in run.status()["dead"], "the sleeper is declared dead")
        assert "silent" in run.status()["dead"][victim]
        until_protected(run, 4)
        until_rows(run)
    finally:
        os.kill(pid, signal.SIGCONT)
    until(lambda: not exists(pid), "the sleeper leaves")
    until_rows(run)
    assert set(run.status()["dead"]) == {victim}
    check_lines(run, kept)


def test_a_nap_shorter_than_the_lease_is_nothing(kept) -> None:
    run = two_lines(pairs()).start(sites=4, partitions=8, options=Options(lease=30))
    kept.append(run)
    until_protected(run, 4)
    until_rows(run)
    view = run.status()["view"]
    for pid in pids(run).values():
        os.kill(pid, signal.SIGSTOP)
        time.sleep(0.3)
        os.kill(pid, signal.SIGCONT)
    until_rows(run)
    assert run.status()["dead"] == {} and run.status()["view"] == view
    check_lines(run, kept)


# --- what is there ------------------------------------------------------------------------------


def test_too_few_sites_for_the_replicas_are_refused() -> None:
    with pytest.raises(
        HostError, match="wants 2 replicas of each partition, no two in one executor"
    ):
        one_line(discard(), pairs(), rows=10).start(sites=1)
    with pytest.raises(HostError, match=r"no two in one host, and the sites are in only 1"):
        one_line(discard(), pairs(failure_domain="host"), rows=10).start(sites=2)


def test_every_row_is_in_the_parquet_files_once_though_its_writers_are_killed(
    kept, tmp_path
) -> None:
    run = one_line(parquet(tmp_path / "out", interval=0.2), pairs()).start(sites=3, partitions=6)
    kept.append(run)
    for files in (1, 2):
        until_protected(run, 3)
        until_rows(run)
        until(lambda n=files: len([*(tmp_path / "out").glob("*.parquet")]) >= n, "a file is there")
        kill(run, replicas(run)["out", 0][0])
    until_rows(run)
    run.stop(timeout=PATIENCE_S)
    (rows,) = taken(run).values()
    table = pq.read_table(tmp_path / "out")
    assert table.num_rows == rows > 10_000
    at = np.arange(rows)
    for key in (0, 1, 4999):
        values = (at % 997 * 1.0)[at * 7919 % 5000 == key]
        found = table.filter(pa.compute.equal(table["k"], key)).sort_by("n")
        assert found["n"].to_pylist() == list(range(1, values.size + 1)), "each once"
        assert np.array_equal(found["t"].to_numpy(), np.cumsum(values))
    files = sorted((tmp_path / "out").glob("*.parquet"))
    assert len(files) > 2 and (tmp_path / "out" / "_SUCCESS").exists()
    following = -1
    for file in files:
        assert int(file.stem.split("-")[1]) == following + 1, "no epoch is missing or doubled"
        following = int(pq.read_metadata(file).metadata[b"holdfast.last_epoch"])


def test_a_run_is_looked_at_where_it_changes(kept, monkeypatch) -> None:
    """In the controller's thread: in any other, dicts would change under whoever walks them."""
    run = one_line(discard(), pairs()).start(sites=2, partitions=2)
    kept.append(run)
    where, phase = set(), Controller.phase

    def noted(self: Controller, task: TaskId) -> str:
        where.add(threading.current_thread().name)
        return phase(self, task)

    monkeypatch.setattr(Controller, "phase", noted)
    until_protected(run, 2)
    assert run.status()["partitions"] and where == {"holdfast-controller"}
    run.stop(timeout=30)
    assert run.status()["partitions"] and run.records(), "also afterwards"


# --- the controller's connections ---------------------------------------------------------------


@pytest.mark.parametrize("lost", [wire.CatchUp, wire.Drain], ids=["catch-up", "drain"])
def test_an_order_that_is_lost_with_its_connection_is_given_again(kept, monkeypatch, lost) -> None:
    """The site registers again at once; it must be told what it missed."""
    send, dropped = Control._send, []

    def lossy(self, site, message) -> None:
        if isinstance(message, lost) and not dropped:
            dropped.append(site)
            self._sites._sites[site].abort()
        else:
            send(self, site, message)

    monkeypatch.setattr(Control, "_send", lossy)
    run = one_line(discard(), pairs()).start(sites=3, partitions=3)
    kept.append(run)
    until_protected(run, 3)
    if lost is wire.CatchUp:
        kill(run, replicas(run)["out", 0][1])
        until(lambda: dropped, "a replica is ordered")
        until(lambda: run.protected, "the replica is made nevertheless", within=30)
    run.stop(timeout=30)
    assert dropped
    assert any(r.last for r in run.records()), "it was drained, not broken off"
