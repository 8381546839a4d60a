"""Every protection on real processes, and neighbours with different ones: sites are killed."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from holdfast import Flow, FlowError, HostError, col
from holdfast import functions as F
from holdfast.api.nodes import KeyedNode
from holdfast.api.protection import Protection, none
from holdfast.connectors.sources import Source
from holdfast.control.run import Run
from holdfast.core.protection import ProtectionSpec
from holdfast.lab.workloads.paced import Paced
from holdfast.plan.planner import plan
from holdfast.protections import active, pairs, passive, rollback, upstream
from holdfast.sinks import discard
from holdfast.sources import generator
from tests.site.test_pairs import PATIENCE_S, pids, replicas, until, until_protected, until_rows

RATE = 40_000


def events(split: int, first: int, n: int) -> pa.RecordBatch:
    at = np.arange(first, first + n)
    return pa.record_batch(
        {"k": at * 7919 % 700, "v": at % 997 * 1.0, "ts": at // 40 + at * 31 % 9}
    )


def paced(folder: Path, rows: int | None = None) -> Paced:
    """Rows for as long as they are wanted, however long that is; or so many, at once."""
    if rows is None:
        return Paced(str(folder), events, events(0, 0, 0).schema, RATE, 1)
    plain = folder / "plain"
    plain.mkdir()
    source = Paced(str(plain), events, events(0, 0, 0).schema, 1.0, 1, head=rows)
    source.end(0.0)
    return source


def windows(
    source: Source, flow: ProtectionSpec | None = None, stage: ProtectionSpec | None = None
) -> Flow:
    """Windows of about 20,000 rows each, and windows over them."""
    made = Flow("windows", protect=flow)
    keyed = made.source("events", source, event_time="ts").key_by("k", name="totals")
    if stage is not None:
        keyed.protect(stage)
    totals = keyed.window(time=500, lateness=20).agg(t=F.sum("v"), n=F.count())
    groups = totals.select("window_start", g=col("k") % 50, t=col("t"), n=col("n")).key_by("g")
    groups.window(time=1_000).agg(m=F.max("t"), n=F.sum("n")).sink("out", discard())
    return made


def spans(source: Source, flow: Protection | None = None) -> Flow:
    """Spans of which most end and some time out, and windows over both."""
    made = Flow("spans", protect=flow)
    ended = (
        made.source("events", source, event_time="ts")
        .key_by("k")
        .spans(
            start=col("v") < 300,
            end=col("v") > 600,
            emit={"g": col("k") % 50, "ts": F.at_start("ts"), "v": F.at_start("v")},
            timeout=40,
        )
    )
    expired = ended.expired.select("ts", g=col("k") % 50, v=-col("v")).select("g", "ts", "v")
    groups = ended.union(expired).key_by("g").window(time=500)
    groups.agg(t=F.sum("v"), n=F.count()).sink("out", discard())
    return made


def totals(source: Source, flow: ProtectionSpec | None = None) -> Flow:
    """Windows, and what each of their keys has had from the beginning."""
    made = Flow("totals", protect=flow)
    keyed = made.source("events", source, event_time="ts").key_by("k")
    sums = keyed.window(time=500, lateness=20).agg(t=F.sum("v"))
    sums.select("t", g=col("k") % 50).key_by("g").agg(t=F.sum("t")).sink("out", discard())
    return made


def kill(run: Run, *victims: int) -> None:
    found, dead = pids(run), len(run.status()["dead"])
    for site in victims:
        os.kill(found[site], signal.SIGKILL)
    until(lambda: len(run.status()["dead"]) >= dead + len(victims), "the deaths are known")


def check(
    run: Run, kept: list[Run], folder: Path, make: Callable[[Source], Flow] = windows
) -> None:
    """It gives what one site gives that nobody disturbs."""
    rows = paced(folder).end(0.5)
    assert run.wait(PATIENCE_S)
    plain = make(paced(folder, rows)).start(sites=1)
    kept.append(plain)
    assert plain.wait(PATIENCE_S)
    assert run.sink_report("out") == plain.sink_report("out") and run.status()["dead"]


ALL = {
    "pairs": pairs(failure_domain="process"),
    "passive": passive(interval=0.2, failure_domain="process"),
    "upstream": upstream(failure_domain="process"),
    "rollback": rollback(failure_domain="process"),
    "active": active(failure_domain="process"),
}


@pytest.mark.parametrize("name", ["active", "passive", "upstream", "rollback"])
def test_sites_are_killed(kept, tmp_path, name: str) -> None:
    """First one, then another: of the source and of the sink a replica must be left."""
    run = windows(paced(tmp_path), ALL[name]).start(sites=4, partitions=8)
    kept.append(run)
    for _ in range(2):
        until_protected(run, 4)
        until_rows(run, 30_000)
        only = replicas(run)["totals", 0][0]
        kill(run, only)
    check(run, kept, tmp_path)


def test_spans_with_a_time_out_are_rebuilt(kept, tmp_path) -> None:
    run = spans(paced(tmp_path), ALL["upstream"]).start(sites=4, partitions=8)
    kept.append(run)
    until_protected(run, 4)
    until_rows(run, 30_000)
    kill(run, replicas(run)["spans by (k)", 0][0])
    check(run, kept, tmp_path, spans)


def test_two_sites_are_killed_at_once_and_all_they_had_is_rebuilt(kept, tmp_path) -> None:
    run = windows(paced(tmp_path), ALL["upstream"]).start(sites=4, partitions=8)
    kept.append(run)
    until_protected(run, 4)
    until_rows(run, 30_000)
    held = replicas(run)
    ends = [set(held[name, 0]) for name in ("events", "out")]
    couples = [(a, b) for a in pids(run) for b in pids(run) if a < b]
    kill(run, *next(c for c in couples if not any(end <= set(c) for end in ends)))
    check(run, kept, tmp_path)


@pytest.mark.parametrize(
    ("first", "second"),
    [("pairs", "upstream"), ("upstream", "passive")],
)
def test_neighbours_are_protected_in_different_ways(
    kept, tmp_path, first: str, second: str
) -> None:
    """A site is killed that has a partition of the first of two stages, and then one that has one
    of the second."""
    run = windows(paced(tmp_path), ALL[second], ALL[first]).start(sites=3, partitions=6)
    kept.append(run)
    for stage in ("totals", "time window by (g)"):
        until_protected(run, 3)
        until_rows(run, 30_000)
        kill(run, replicas(run)[stage, 0][0])
    check(run, kept, tmp_path)


def test_state_that_comes_from_everything_cannot_be_rebuilt() -> None:
    flow = Flow("totals", protect=upstream())
    source = flow.source("s", generator(events, events(0, 0, 0).schema, rows=9), event_time="ts")
    source.key_by("k").agg(t=F.sum("v")).sink("out", discard())
    with pytest.raises(
        FlowError, match=r"running aggregate .* from all rows that the key ever had"
    ) as said:
        flow.start()
    assert "upstream(summary_interval=1)" in str(said.value)


def test_a_summary_cuts_off_what_state_comes_from(kept, tmp_path) -> None:
    """The first stage is rebuilt from its input, the second goes on from a summary."""
    base = upstream(summary_interval=0.1, failure_domain="process")
    run = totals(paced(tmp_path), base).start(sites=4, partitions=8)
    kept.append(run)
    for stage in ("running aggregate by (g)", "time window by (k)"):
        until_protected(run, 4)
        until_rows(run, 30_000)
        kill(run, replicas(run)[stage, 0][0])
    check(run, kept, tmp_path, totals)


@pytest.mark.parametrize(
    ("before", "after"),
    [("pairs", "upstream"), ("upstream", "passive"), ("passive", "pairs"), ("pairs", "active")],
)
def test_protection_is_changed_while_the_flow_runs(kept, tmp_path, before: str, after: str) -> None:
    """What is killed then has everything that the old protection would have needed."""
    run = windows(paced(tmp_path), pairs(failure_domain="process"), ALL[before]).start(
        sites=4, partitions=8
    )
    kept.append(run)
    stage = "totals"
    until_protected(run, 4)
    until_rows(run, 20_000)
    run.protect(stage, ALL[after])
    until(lambda: run.protected, "it is protected otherwise")
    found = [p for p in run.status()["partitions"] if p["stage"] == stage]
    wanted = (ALL[after].replicas, ALL[after].standbys)
    assert {(len(p["replicas"]), len(p["standbys"])) for p in found} == {wanted}
    kill(run, found[0]["replicas"][0])
    check(run, kept, tmp_path)


def test_what_protection_cannot_be_changed_to_is_said(kept, tmp_path) -> None:
    run = windows(paced(tmp_path), pairs(failure_domain="process")).start(sites=2, partitions=4)
    kept.append(run)
    with pytest.raises(FlowError, match=r"no keyed stage 'out'.*\n.*'totals'"):
        run.protect("out", none())
    with pytest.raises(HostError, match=r"wants 3 replicas of each partition"):
        run.protect("totals", pairs(replicas=3, failure_domain="process"))
    with pytest.raises(FlowError, match="only partition pairs"):
        run.protect("totals", pairs(failure_domain="process", granularity="cluster"))
    run.stop()
    with pytest.raises(HostError, match="the flow is done"):
        run.protect("totals", none())


def test_checkpoints_are_as_seldom_as_recovery_allows(kept, tmp_path) -> None:
    def checkpoints(recovery_ms: int) -> int:
        folder = tmp_path / str(recovery_ms)
        folder.mkdir()
        protection = passive(recovery_time=recovery_ms / 1e3, failure_domain="process")
        run = windows(paced(folder), protection).start(sites=2, partitions=4)
        kept.append(run)
        until_rows(run, 100_000)
        paced(folder).end(0.0)
        assert run.wait(PATIENCE_S)
        return sum(u["checkpoints"] for s in run.status()["sites"] for u in s["stages"])

    often, seldom = checkpoints(10), checkpoints(5_000)
    assert often > 4 and often > 2 * seldom


def test_checkpoints_come_after_so_many_epochs(kept, tmp_path) -> None:
    protection = passive(interval_epochs=20, failure_domain="process")
    run = windows(paced(tmp_path), protection).start(sites=3, partitions=6)
    kept.append(run)
    until_protected(run, 3)
    until_rows(run, 60_000)
    kill(run, replicas(run)["totals", 0][0])
    check(run, kept, tmp_path)
    tasks = [u for s in run.status()["sites"] for u in s["stages"] if u["kind"] == "keyed"]
    assert all(u["checkpoints"] <= u["epoch"] // 20 + 1 for u in tasks)
    assert any(u["checkpoints"] for u in tasks)


def test_how_often_checkpoints_come_is_said_in_one_way() -> None:
    with pytest.raises(FlowError, match="give one of interval, recovery_time, not all"):
        passive(interval=0.005, recovery_time=0.005)
    with pytest.raises(FlowError, match="interval_epochs must be at least 1, not -2"):
        passive(interval_epochs=-2)
    with pytest.raises(FlowError, match=r"passive\(\): recovery_time=0: it must be positive"):
        passive(recovery_time=0)


def test_ways_of_different_length_are_named() -> None:
    flow = Flow("diamond", protect=rollback())
    source = flow.source("s", generator(events, events(0, 0, 0).schema, rows=9), event_time="ts")
    longer = source.key_by("k").window(time=50).agg(v=F.sum("v")).select("k", "v")
    both = longer.union(source.select("k", "v"))
    both.key_by("k").window(rows=2).agg(v=F.sum("v")).sink("out", discard())
    flow.protection = none()
    assert plan(flow).sinks
    flow.protection = rollback()
    for stage in flow.nodes:
        if isinstance(stage, KeyedNode) and not stage.operator.bounded:
            stage.protection = pairs()
    ways = r"'s' → 'row window by \(k\)'; 's' → 'time window by \(k\)' → 'row window by \(k\)'"
    with pytest.raises(FlowError, match=ways):
        flow.start()
