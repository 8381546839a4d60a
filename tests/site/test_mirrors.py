"""Dataflow pairs and cluster pairs on real processes: a killed site takes its mirror with it, and
the result is exact. `tests/sim/test_mirrors.py` has every phase of it."""

import os
import signal

import pytest

from holdfast import Flow, SiteLostError
from holdfast import functions as F
from holdfast.lab.workloads.paced import Paced
from holdfast.protections import pairs
from holdfast.sinks import discard
from tests.support.lines import SCHEMA, check_lines, numbers, two_lines
from tests.support.runs import (
    PATIENCE_S,
    kill,
    pids,
    replicas,
    until,
    until_protected,
    until_rows,
)

SITES = {"dataflow": 2, "cluster": 4}


def mirrored(granularity: str, kept: list, **settings):
    flow = two_lines(pairs(granularity=granularity))
    run = flow.start(partitions=8, **settings)
    kept.append(run)
    return run


def mirrors(run) -> list[set[int]]:
    """The sites of the first and of the second replica of everything."""
    return [{sites[n] for sites in replicas(run).values()} for n in range(2)]


@pytest.mark.parametrize("granularity", SITES)
def test_a_site_of_each_mirror_is_killed_in_turn(kept, granularity: str) -> None:
    sites = SITES[granularity]
    run = mirrored(granularity, kept, sites=sites)
    killed = []
    for mirror in range(2):
        until_protected(run, sites)
        until_rows(run)
        held = mirrors(run)
        assert not held[0] & held[1] and len(held[0]) == len(held[1]) == sites // 2
        killed.append(max(held[mirror]))
        kill(run, killed[-1])
    until_protected(run, sites)
    until_rows(run)
    assert set(run.status()["dead"]) == set(killed)
    check_lines(run, kept)


@pytest.mark.parametrize("granularity", SITES)
def test_a_mirror_is_rebuilt_on_sites_that_were_idle(kept, granularity: str) -> None:
    """Spares are there before a new site is launched, and members of the lost mirror go on."""
    sites = SITES[granularity]
    run = mirrored(granularity, kept, sites=sites, spares=1)
    until_protected(run, sites + 1)
    until_rows(run)
    kept_mirror, lost = mirrors(run)
    assert sites not in kept_mirror | lost, "the spare is idle"
    victim = max(lost)
    kill(run, victim)
    until_protected(run, sites)
    assert mirrors(run) == [kept_mirror, lost - {victim} | {sites}]
    until_rows(run)
    check_lines(run, kept)


@pytest.mark.parametrize("granularity", SITES)
def test_a_site_of_each_mirror_at_once_ends_the_flow_by_name(kept, granularity: str) -> None:
    run = mirrored(granularity, kept, sites=SITES[granularity])
    until_protected(run, SITES[granularity])
    until_rows(run)
    first, second = mirrors(run)
    found = pids(run)
    for site in (min(first), min(second)):
        os.kill(found[site], signal.SIGKILL)
    with pytest.raises(SiteLostError, match="no replica is left of"):
        run.wait(PATIENCE_S)
    assert run.state == "failed"


def test_a_mirror_is_rebuilt_while_the_source_is_quiet(kept, tmp_path) -> None:
    """No epoch comes that could carry the rebuild along; and the rows after it are right."""
    source = Paced(str(tmp_path), numbers, SCHEMA, rate=1e-6, splits=1, head=20_000)
    reports = []
    for killed in (True, False):
        flow = Flow("quiet", protect=pairs(granularity="cluster"))
        totals = flow.source("numbers", source).key_by("k").agg(t=F.sum("v"), n=F.count())
        totals.sink("out", discard())
        run = flow.start(sites=4, partitions=8)
        kept.append(run)
        if killed:
            until_protected(run, 4)
            until(lambda r=run: r.status()["rows_in"] == 20_000, "all rows have come in")
            kill(run, max(mirrors(run)[1]))
            until_protected(run, 4)
            assert run.status()["rows_in"] == 20_000
            source.end(0.0)
        assert run.wait(PATIENCE_S)
        reports.append(run.sink_report("out"))
    assert reports[0] == reports[1] and reports[0]["rows"] == 20_000
