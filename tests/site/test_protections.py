"""Every protection on real processes, and neighbours with different ones: sites are killed."""

import pytest

from holdfast import Flow, FlowError, HostError
from holdfast import functions as F
from holdfast.api.nodes import KeyedNode
from holdfast.api.protection import none
from holdfast.control.run import Run
from holdfast.plan.planner import plan
from holdfast.protections import active, pairs, passive, rollback, upstream
from holdfast.sinks import discard
from holdfast.sources import generator
from tests.support.runs import PATIENCE_S, pids, replicas, until, until_protected, until_rows
from tests.support.tiers import nightly
from tests.support.windows import check, events, kill, paced, spans, totals, windows

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


PAPERS = {
    "upstream": upstream(k=1, failure_domain="process"),
    "rollback": rollback(h=2, failure_domain="process"),
}
TWO_LOSSES = {
    "passive": passive(standbys=2, interval=0.2, failure_domain="process"),
    "active": active(replicas=3, failure_domain="process"),
}


@pytest.mark.parametrize("name", ["upstream", nightly("rollback")])
def test_a_site_is_killed_under_the_papers_own_settings(kept, tmp_path, name: str) -> None:
    """Neighbouring stages share no site, so one loss takes a partition of one of them."""
    run = windows(paced(tmp_path), PAPERS[name]).start(sites=4, partitions=8)
    kept.append(run)
    until_protected(run, 4)
    until_rows(run, 30_000)
    assert run.status()["exposed"] == []
    kill(run, replicas(run)["totals", 0][0])
    check(run, kept, tmp_path)


def holders(run: Run, stage: str) -> list[int]:
    """The sites of a stage's first partition group: those that compute, then the standbys."""
    found = next(p for p in run.status()["partitions"] if p["stage"] == stage)
    return [*found["replicas"], *found["standbys"]]


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("passive", "totals"),
        ("active", "events"),
        nightly("active", "totals"),
        nightly("passive", "events"),
        nightly("passive", "out"),
    ],
)
def test_two_sites_are_killed_at_once_and_nothing_is_lost(
    kept, tmp_path, name: str, stage: str
) -> None:
    """Of three that hold a partition two die: the computing one and its first standby; or the
    leading replica of the source, which is the first sequencer, and the next one."""
    run = windows(paced(tmp_path), TWO_LOSSES[name]).start(sites=4, partitions=8)
    kept.append(run)
    until_protected(run, 4)
    until_rows(run, 30_000)
    held = holders(run, stage)
    assert len(held) == 3
    kill(run, *held[:2])
    until_protected(run, 4)
    assert len(holders(run, stage)) == 3, "those that died are replaced"
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
    [("pairs", "upstream"), nightly("upstream", "passive")],
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
    [
        ("pairs", "upstream"),
        nightly("upstream", "passive"),
        nightly("passive", "pairs"),
        nightly("pairs", "active"),
    ],
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
