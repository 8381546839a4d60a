"""Partitions move between real processes, sites are drained and added, while rows flow."""

import pytest

from holdfast import FlowError, HostError
from holdfast.api.options import Options
from holdfast.control.run import Run
from holdfast.protections import active, pairs, passive, upstream
from tests.support.runs import exists, kill, pids, replicas, until, until_protected, until_rows
from tests.support.tiers import nightly
from tests.support.windows import check_rows, paced, windows

ALL = {
    "pairs": pairs(failure_domain="process"),
    "passive": passive(interval=0.2, failure_domain="process"),
    "upstream": upstream(failure_domain="process"),
    "active": active(failure_domain="process"),
}
OPTIONS = Options(groups_per_site=2)


def holders(run: Run, first: int) -> set[int]:
    """The sites that hold a partition group of the stage `totals`."""
    found = next(
        p
        for p in run.status()["partitions"]
        if p["stage"] == "totals" and p["partitions"][0] == first
    )
    return {*found["replicas"], *found["standbys"]}


@pytest.mark.parametrize("name", ["pairs", "passive", nightly("upstream"), nightly("active")])
def test_partitions_move_and_move_back(kept, tmp_path, name: str) -> None:
    run = windows(paced(tmp_path), ALL[name]).start(sites=4, partitions=8, options=OPTIONS)
    kept.append(run)
    until_protected(run, 4)
    until_rows(run, 30_000)
    source = replicas(run)["totals", 0][0]
    target = next(s for s in pids(run) if s not in holders(run, 0))
    wanted = (holders(run, 0) - {source}) | {target}
    run.move("totals", [0], to=target, source=source)
    assert holders(run, 0) == wanted
    run.move("totals", range(1), to=target)  # it is there
    until_rows(run, 30_000)
    run.move("totals", [0], to=source, source=target)
    assert source in holders(run, 0) and target not in holders(run, 0)
    assert run.protected and not run.status()["dead"]
    check_rows(run, kept, tmp_path)


def test_what_cannot_be_moved_is_refused_by_name(kept, tmp_path) -> None:
    run = windows(paced(tmp_path), ALL["pairs"]).start(sites=3, partitions=6)
    kept.append(run)
    until_protected(run, 3)
    one, other = replicas(run)["totals", 0]
    with pytest.raises(FlowError, match="no keyed stage 'events'"):
        run.move("events", [0], to=0)
    with pytest.raises(FlowError, match="partitions 0-1 of stage 'totals' move together"):
        run.move("totals", [0], to=0)
    with pytest.raises(FlowError, match="has no partition 6-7"):
        run.move("totals", [0, 1, 6, 7], to=0)
    with pytest.raises(HostError, match="site 9 takes no partitions"):
        run.move("totals", [0, 1], to=9)
    third = next(s for s in pids(run) if s not in (one, other))
    with pytest.raises(HostError, match=f"site {third + 10} does not hold 'totals': 0-1"):
        run.move("totals", [0, 1], to=third, source=third + 10)
    with pytest.raises(HostError, match="the flow has no site 9"):
        run.drain(9)
    with pytest.raises(HostError, match=r"1 sites are too few: stage .* wants 2 replicas"):
        run.scale(1)
    check_rows(run, kept, tmp_path)


@pytest.mark.parametrize("name", ["pairs", nightly("passive"), nightly("upstream")])
def test_a_site_is_drained_and_others_come(kept, tmp_path, name: str) -> None:
    """The site that leads the source, and with it the sequencer, leaves."""
    run = windows(paced(tmp_path), ALL[name]).start(sites=4, partitions=8, options=OPTIONS)
    kept.append(run)
    until_protected(run, 4)
    until_rows(run, 30_000)
    site = replicas(run)["events", 0][0]
    pid = pids(run)[site]
    run.drain(site)
    assert run.protected
    assert run.status()["dead"] == {site: "it was drained"}
    until(lambda: not exists(pid), "its process ends")
    until_rows(run, 30_000)
    run.scale(5)
    held = len(run.status()["domains"])
    assert held == 5
    until_rows(run, 30_000)
    run.scale(3)
    assert len(run.status()["domains"]) == 3 and run.protected
    check_rows(run, kept, tmp_path)


def test_sites_are_killed_while_partitions_move(kept, tmp_path) -> None:
    """One that a replica joins, and one that is being drained."""
    run = windows(paced(tmp_path), ALL["pairs"]).start(sites=5, partitions=10)
    kept.append(run)
    until_protected(run, 5)
    until_rows(run, 30_000)
    source = replicas(run)["totals", 0][0]
    target = next(s for s in sorted(pids(run)) if s not in holders(run, 0) and _spares(run, s))
    with pytest.raises(HostError, match="not moved to site"):
        run.move("totals", [0, 1], to=target, source=source, timeout=0)
    kill(run, target)
    until_protected(run, 5)
    leaves = next(s for s in sorted(pids(run)) if _spares(run, s))
    with pytest.raises(HostError, match="is not drained"):
        run.drain(leaves, timeout=0)
    kill(run, leaves)
    until(lambda: run.status()["emptying"] == [], "it is gone")
    until_protected(run, 4)
    check_rows(run, kept, tmp_path)


def _spares(run: Run, site: int) -> bool:
    """Whether a site has no replica of a source or sink."""
    return all(site not in replicas(run)[name, 0] for name in ("events", "out"))
