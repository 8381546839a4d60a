"""Flows on real processes and real sockets."""

import gc
import os
import signal
import socket
import subprocess
import sys
import time

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from holdfast import Flow, FlowError, HostError, InputError, OperatorError, SiteLostError, col
from holdfast import functions as F
from holdfast.api.options import Options
from holdfast.control.run import start
from holdfast.core.sequencer import Budget
from holdfast.hosts.processes import ProcessHost
from holdfast.lab.workloads.dmz import DmzRows, dmz_flow, oracle
from holdfast.protections import pairs
from holdfast.sinks import discard, parquet
from holdfast.site.config import SiteConfig
from holdfast.sources import generator, rows
from tests.support.parties import party


def numbers(split: int, offset: int, n: int) -> pa.RecordBatch:
    at = np.arange(offset, offset + n)
    return pa.record_batch({"k": pa.array(at % 13), "v": pa.array(at * (split + 1))})


NUMBERS = numbers(0, 0, 0).schema


def test_the_dmz_flow_gives_the_oracles_answer(kept) -> None:
    make = DmzRows(keys=20_000, splits=2)
    run = dmz_flow(make.source(rows=400_000), discard()).start(sites=2)
    kept.append(run)
    assert run.wait(60)
    expected = oracle(400_000, keys=20_000, splits=2)
    report = run.sink_report("alerts")
    assert (report["rows"], report["digest"]) == (expected["rows"], expected["digest"])
    status = run.status()
    assert status["state"] == "done" and status["rows_in"] == 400_000
    assert len({d.process for d in status["domains"].values()}) == 2


def test_a_flow_that_ends_well_prints_nothing(capfd) -> None:
    flow = Flow("sums", protect=pairs(failure_domain="process"))
    source = flow.source("numbers", generator(numbers, NUMBERS, rows=60_000))
    source.key_by("k").agg(total=F.sum("v")).sink("out", discard())
    with flow.start(sites=3) as run:
        assert run.wait(60)
    gc.collect()
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(("sites", "partitions"), [(1, 1), (3, 5), (4, 64)])
def test_sites_and_partitions_do_not_change_the_result(kept, tmp_path, sites, partitions) -> None:
    flow = Flow("sums")
    source = flow.source("numbers", generator(numbers, NUMBERS, rows=60_000))
    source.key_by("k").agg(total=F.sum("v"), n=F.count()).sink("out", parquet(tmp_path / "out"))
    options = Options(budget=Budget(epoch_rows_max=7_000), block_rows=3_000, read_ahead_rows=9_000)
    run = flow.start(sites=sites, partitions=partitions, options=options)
    kept.append(run)
    assert run.wait(60)
    table = pq.read_table(tmp_path / "out")
    assert table.num_rows == 60_000
    v = np.arange(60_000)
    for k in range(13):
        mine = table.filter(pa.compute.equal(table["k"], k))
        assert np.array_equal(mine["total"].to_numpy(), np.cumsum(v[v % 13 == k]))
    assert len(run.records()) > 5


def test_draining_delivers_everything_that_was_taken(kept) -> None:
    flow = Flow("endless")
    source = flow.source("numbers", generator(numbers, NUMBERS, rate=200_000, splits=2))
    source.key_by("k").agg(n=F.count()).sink("out", discard())
    run = flow.start(sites=2)
    kept.append(run)
    time.sleep(1)
    assert run.state == "running"
    run.stop()
    taken = sum(r.rows for r in run.records())
    assert taken > 0 and run.sink_report("out")["rows"] == taken


def test_a_killed_site_stops_an_unprotected_flow_and_names_what_is_lost(kept) -> None:
    run = endless("doomed").start(sites=2, partitions=8)
    kept.append(run)
    wait_for_metrics(run, 2)
    victim = next(s["pid"] for s in run.status()["sites"] if s["site"] == 1)
    os.kill(victim, signal.SIGKILL)
    with pytest.raises(SiteLostError, match=r"site 1 died.*'running aggregate by \(k\)': 0-3"):
        run.wait(30)
    assert run.state == "failed"


def test_a_site_killed_before_the_start_is_launched_again(kept) -> None:
    from holdfast.hosts.processes import ProcessHost

    class Clumsy(ProcessHost):
        """Kills site 1, and the first two that are launched in its place."""

        launches = 0

        def launch(self, flow, config, on_exit) -> None:
            super().launch(flow, config, on_exit)
            if 1 <= config.site < 4:
                self._processes[config.site].kill()
            self.launches += 1

    flow = Flow("patient")
    flow.source("numbers", generator(numbers, NUMBERS, rows=1_000)).sink("out", discard())
    host = Clumsy()
    run = start(flow, options=Options(sites=2), host=host)
    kept.append(run)
    assert run.wait(30)
    assert host.launches == 5 and set(run.status()["dead"]) == {1, 2, 3}
    assert run._controller.roster.replaced == {1: 2, 2: 3, 3: 4}


def test_a_site_may_get_its_view_long_after_its_peer(kept, monkeypatch) -> None:
    """The peer has connected to it by then, and that connection must stay."""
    from holdfast.control.server import Control

    send = Control._send

    def late_to_site_1(self, site, message) -> None:
        if site == 1 and not self.started:
            self.loop.call_later(1, send, self, site, message)
        else:
            send(self, site, message)

    monkeypatch.setattr(Control, "_send", late_to_site_1)
    flow = Flow("late")
    source = flow.source("numbers", generator(numbers, NUMBERS, rows=1_000))
    source.key_by("k").agg(n=F.count()).sink("out", discard())
    run = flow.start(sites=2, options=Options(start_timeout=10))
    kept.append(run)
    assert run.wait(10)


def test_standbys_register_and_wait(kept) -> None:
    flow = Flow("spare")
    flow.source("numbers", generator(numbers, NUMBERS, rate=1_000)).sink("out", discard())
    run = flow.start(sites=1, spares=1)
    kept.append(run)
    deadline = time.monotonic() + 20
    while len(run.status()["domains"]) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert set(run.status()["domains"]) == {0, 1}
    run.stop()


def broken(batch: pa.RecordBatch) -> pa.RecordBatch:
    if 4_321 in batch.column("v").to_pylist():
        raise ValueError("I do not like 4321")
    return batch


def test_a_function_that_raises_stops_the_flow_and_names_the_row(kept) -> None:
    flow = Flow("fragile")
    source = flow.source("numbers", generator(numbers, NUMBERS, rows=10_000))
    source.map(broken, NUMBERS).key_by("k").agg(n=F.count()).sink("out", discard())
    run = flow.start(sites=2)
    kept.append(run)
    with pytest.raises(OperatorError) as caught:
        run.wait(30)
    text = str(caught.value)
    for part in ("flow 'fragile'", "stage 'numbers'", "operator 'broken'", "epoch", "4321"):
        assert part in text
    assert caught.value.operator == "broken"


def test_dead_letters_hold_exactly_the_bad_rows(kept, tmp_path) -> None:
    flow = Flow("tolerant", on_error="dead-letter")
    source = flow.source("numbers", generator(numbers, NUMBERS, rows=10_000))
    source.map(broken, NUMBERS).key_by("k").agg(n=F.count()).sink("out", discard())
    flow.dead_letters().sink("dead", parquet(tmp_path / "dead"))
    run = flow.start(sites=2)
    kept.append(run)
    assert run.wait(30)
    (letter,) = pq.read_table(tmp_path / "dead").to_pylist()
    assert letter["operator"] == "broken" and "4321" in letter["row"]
    assert run.sink_report("out")["rows"] == 9_999


def test_a_row_that_does_not_fit_the_schema_is_named(kept) -> None:
    schema = pa.schema([pa.field("k", pa.int64(), nullable=False)])

    def make(split: int, offset: int, n: int) -> pa.RecordBatch:
        values = [None if i == 777 else i for i in range(offset, offset + n)]
        return pa.record_batch({"k": pa.array(values, pa.int64())})

    flow = Flow("misfit")
    flow.source("numbers", generator(make, schema, rows=2_000)).sink("out", discard())
    run = flow.start(sites=1)
    kept.append(run)
    with pytest.raises(InputError, match=r"source 'numbers'.*'k'[\s\S]*row"):
        run.wait(30)


def test_a_stranger_at_the_door_changes_nothing(kept) -> None:
    flow = Flow("calm")
    source = flow.source("numbers", generator(numbers, NUMBERS, rate=20_000, rows=40_000))
    source.key_by("k").agg(n=F.count()).sink("out", discard())
    run = flow.start(sites=2)
    kept.append(run)
    doors = [*run._controller.addresses.values(), ("127.0.0.1", run._control._port)]
    for door in doors:
        for data in (b"GET / HTTP/1.1\r\n\r\n", b"\xff" * 64, b""):
            with socket.create_connection(door, timeout=5) as stranger:
                stranger.sendall(data)
    assert run.wait(30)
    assert run.sink_report("out")["rows"] == 40_000


def test_a_stalled_sink_pushes_back_to_the_source(kept, tmp_path) -> None:
    gate = tmp_path / "gate"

    def hold(epoch: int, batch: pa.RecordBatch) -> None:
        while not gate.exists():
            time.sleep(0.02)

    from holdfast.sinks import callback

    flow = Flow("blocked")
    source = flow.source("numbers", generator(numbers, NUMBERS, rows=2_000_000, splits=2))
    left = source.key_by("k").agg(n=F.count())
    right = source.filter(col("v") >= 0).key_by("v").agg(n=F.count()).select(k=col("v"), n=col("n"))
    left.union(right).key_by("k").agg(n=F.count()).sink("out", discard())
    source.select("k").sink("slow", callback(hold))
    run = flow.start(sites=2, options=Options(budget=Budget(epoch_rows_max=20_000)))
    kept.append(run)
    time.sleep(3)
    first = run.status()["rows_in"]
    time.sleep(1)
    assert run.status()["rows_in"] == first < 2_000_000
    gate.touch()
    assert run.wait(60)
    assert run.sink_report("out")["rows"] == 4_000_000


def test_a_broken_connection_between_sites_is_mended(kept) -> None:
    """It is no death, of neither site: the flow goes on, and the result is exact."""
    flow = Flow("cut")
    source = flow.source("numbers", generator(numbers, NUMBERS, rate=50_000, rows=100_000))
    source.key_by("k").agg(n=F.count(), total=F.sum("v")).sink("out", discard())
    plain = flow.start(sites=1)
    kept.append(plain)
    run = flow.start(sites=2)
    kept.append(run)
    wait_for_metrics(run, 2)
    pids = {s["pid"] for s in run.status()["sites"]}
    cut = 0
    while cut < 8 and not run.ended(0.15):
        cut += cut_connection_between(pids)
    assert cut >= 3, "it was not mended in time to be cut again"
    assert run.wait(30) and plain.wait(30)
    assert run.status()["dead"] == {}
    report = run.sink_report("out")
    assert report["rows"] == 100_000
    assert report == plain.sink_report("out")


def endless(name: str) -> Flow:
    flow = Flow(name)
    source = flow.source("numbers", generator(numbers, NUMBERS, rate=50_000))
    source.key_by("k").agg(n=F.count()).sink("out", discard())
    return flow


def wait_for_metrics(run, sites: int) -> None:
    deadline = time.monotonic() + 20
    while len(run.status()["sites"]) < sites and time.monotonic() < deadline:
        time.sleep(0.05)


def cut_connection_between(pids: set[int]) -> bool:
    """Shut down, from within one of them, the socket that two processes share; False if none.

    pidfd_getfd duplicates a descriptor of a child of ours; shutting the replica down ends the
    connection for both, and neither process is touched otherwise.
    """
    import ctypes

    libc = ctypes.CDLL(None, use_errno=True)
    ends: dict[tuple, int] = {}
    for pid in pids:
        handle = os.pidfd_open(pid)
        for name in os.listdir(f"/proc/{pid}/fd"):
            if not os.readlink(f"/proc/{pid}/fd/{name}").startswith("socket:"):
                continue
            copied = libc.syscall(438, handle, int(name), 0)
            assert copied >= 0, os.strerror(ctypes.get_errno())
            end = socket.socket(fileno=copied)
            try:
                key = (end.getsockname(), end.getpeername())
            except OSError:  # it listens
                key = None
            if key is None or end.family != socket.AF_INET:
                end.close()
                continue
            if (key[1], key[0]) in ends:  # the other end is in the other process
                end.shutdown(socket.SHUT_RDWR)
                end.close()
                return True
            ends[key] = pid
            end.close()
    return False


def test_impossible_starts_are_refused() -> None:
    flow = Flow("none")
    flow.source("numbers", rows(numbers(0, 0, 5))).sink("out", discard())
    with pytest.raises(FlowError, match="sites must be at least 1"):
        flow.start(sites=0)
    with pytest.raises(FlowError, match="partitions must be between"):
        flow.start(partitions=100_000)


def test_a_site_that_cannot_start_says_why(tmp_path) -> None:
    (tmp_path / "alerts").mkdir()
    pq.write_table(pa.table({"x": [1]}), tmp_path / "alerts" / "old.parquet")
    flow = Flow("late")
    flow.source("numbers", rows(numbers(0, 0, 5))).sink("out", parquet(tmp_path / "alerts"))
    with pytest.raises(FlowError, match="already holds parquet files"):
        flow.start(sites=1)


def test_sites_that_never_come_up_are_a_host_error() -> None:
    from holdfast.hosts.processes import ProcessHost

    class Hopeless(ProcessHost):
        def launch(self, flow, config, on_exit) -> None:
            super().launch(flow, config, on_exit)
            self._processes[config.site].kill()

    flow = Flow("hopeless")
    flow.source("numbers", rows(numbers(0, 0, 5))).sink("out", discard())
    with pytest.raises(HostError, match="never registered"):
        start(flow, options=Options(sites=1, start_timeout=30), host=Hopeless())


def test_a_site_has_everything_loaded_before_it_says_that_it_is_there() -> None:
    """pyarrow imports pandas when the first array is made: a second in which a site that the
    others wait for would stand still."""
    code = """
import asyncio, sys
from types import SimpleNamespace
from holdfast.site import runtime
runtime.Site = lambda *_: SimpleNamespace(run=lambda: None)
asyncio.Runner.run = lambda *_: sys.exit("pandas" not in sys.modules)
runtime.run_site(None, None)
"""
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_host_that_is_closed_launches_nothing_more() -> None:
    """A launch is prepared in another thread, and may be late."""
    host, exits = ProcessHost(), []
    host.close()
    flow = Flow("sums")
    flow.source("numbers", generator(numbers, NUMBERS, rows=10)).sink("out", discard())
    config = SiteConfig(0, party(), (("127.0.0.1", 1),), "127.0.0.1", Options())
    host.launch(flow, config, lambda site, reason: exits.append(reason))
    assert not host._processes and not exits
