"""Which sites get which replicas: the first view, and replicas that are missing."""

from dataclasses import replace
from itertools import combinations

import pytest

from holdfast.core.ids import SiteId, TaskId
from holdfast.core.layout import Domain, PartitionGroup, Shape, StageShape, View, spans
from holdfast.core.placement import Assignment, Candidates, assign, missing, place, substituted
from holdfast.core.protection import ProtectionSpec
from holdfast.core.separation import exposures, joint_exposures, lost_stretch
from holdfast.errors import HostError

SHAPE = Shape(
    (
        StageShape(0, "packets", "source", 2, (), (0,)),
        StageShape(1, "sessions", "keyed", 8, (0,), (1,)),
        StageShape(2, "alerts", "sink", 1, (1,), ()),
    ),
    producer_of=(0, 1),
    consumer_of=(1, 2),
)


def protected(replicas: int = 2, apart: str = "process") -> Shape:
    guard = ProtectionSpec(replicas=replicas, failure_domain=apart)
    return replace(SHAPE, stages=tuple(replace(s, guard=guard) for s in SHAPE.stages))


def domain(site: int) -> Domain:
    return Domain(f"p{site}", f"p{site}", "h", "a")


# --- the first view -----------------------------------------------------------------------------


def test_partitions_are_spread_evenly_and_single_ones_do_not_pile_up() -> None:
    domains = {s: domain(s) for s in range(3)}
    view = place(SHAPE, [0, 1, 2], domains)
    assert [(c.first, c.end) for c in view.groups[1]] == [(0, 3), (3, 6), (6, 8)]
    assert str(view) == "view 0.0 of 0 1 2: 0 1 | 2 0 1 | 2"
    with pytest.raises(HostError):
        place(SHAPE, [], {})


@pytest.mark.parametrize("count", [1, 2, 3])
def test_replicas_are_chained_so_that_a_loss_burdens_several(count: int) -> None:
    domains = {s: domain(s) for s in range(5)}
    view = place(protected(count), list(domains), domains)
    for group in view.groups[1]:
        first = group.replicas[0]
        assert group.replicas == tuple((first + k) % 5 for k in range(count))
    for position in range(count):
        assert sorted(c.replicas[position] for c in view.groups[1]) == list(range(5)), "even"


GRID = {s: Domain(f"p{s}", f"e{s // 2}", f"h{s // 4}", f"a{s // 8}") for s in range(16)}
"""Two sites to an executor, two executors to a host, two hosts to an application."""


@pytest.mark.parametrize("apart", ["process", "executor", "host", "application"])
def test_replicas_are_as_far_apart_as_asked_and_as_can_be(apart: str) -> None:
    view = place(protected(apart=apart), list(GRID), GRID)
    for task in view.tasks():
        one, other = (GRID[s] for s in view.group(task).replicas)
        assert getattr(one, apart) != getattr(other, apart)
        assert one.application != other.application, "there are two: why share one"


def test_three_replicas_on_two_applications_share_no_host() -> None:
    view = place(protected(3, "host"), list(GRID), GRID)
    for task in view.tasks():
        assert len({GRID[s].host for s in view.group(task).replicas}) == 3


@pytest.mark.parametrize(
    ("apart", "found"), [("executor", "only 1: e0"), ("application", "only 1: a0")]
)
def test_replicas_that_cannot_be_apart_are_refused_with_what_there_is(
    apart: str, found: str
) -> None:
    with pytest.raises(HostError) as caught:
        place(protected(apart=apart), [0, 1], GRID)
    text = str(caught.value)
    assert f"'packets' wants 2 replicas of each partition, no two in one {apart}" in text
    assert found in text and "pairs(failure_domain=...)" in text


# --- lost before the start ----------------------------------------------------------------------


def test_a_site_that_is_lost_before_the_start_is_substituted_and_the_others_keep_theirs() -> None:
    domains = {s: domain(s) for s in range(5)}
    view = place(protected(), [0, 1, 2, 3], domains)
    assert str(view) == "view 0.0 of 0 1 2 3: 0,1 1,2 | 2,3 3,0 0,1 1,2 | 2,3"
    again = substituted(view, protected(), [0, 4, 2, 3], domains)
    assert str(again) == "view 0.0 of 0 4 2 3: 0,4 4,2 | 2,3 3,0 0,4 4,2 | 2,3"


def test_a_site_is_not_substituted_by_one_that_shares_a_failure_domain() -> None:
    shape, domains = protected(apart="executor"), {0: GRID[0], 2: GRID[2]}
    view = place(shape, [0, 2], domains)
    assert substituted(view, shape, [0, 1], {0: GRID[0], 1: GRID[1]}) is None
    assert substituted(view, shape, [0], {0: GRID[0]}) is None, "there are fewer sites"


# --- replicas that are missing ------------------------------------------------------------------


def candidates(*sites: int, launching: bool = False, await_launch: bool = False) -> Candidates:
    domains = {SiteId(s): domain(s) for s in sites}
    return Candidates(domains, 4, launching, await_launch)


def lost_one() -> tuple[View, list[TaskId]]:
    """Site 1 of four is gone."""
    view = place(protected(), [0, 1, 2, 3], {s: domain(s) for s in range(4)}).without([1])
    assert str(view) == "view 0.1 of 0 2 3: 0 2 | 2,3 3,0 0 2 | 2,3"
    return view, missing(view, protected())


def test_missing_replicas_join_one_of_a_stage_at_a_time_where_there_is_least_to_do() -> None:
    view, tasks = lost_one()
    assert tasks == [(0, 0), (0, 1), (1, 2), (1, 3)]
    assigned = assign(view, protected(), tasks, candidates(0, 2, 3, 4))
    assert assigned == Assignment({(0, 0): 4, (1, 2): 4}, (4, 4))
    after = assigned.view(view)
    assert str(after) == "view 0.2 of 0 2 3 4: 0+4 2 | 2,3 3,0 0+4 2 | 2,3"
    assert after.group((0, 0)).joined_view_of(SiteId(4)) == 2
    assert missing(after, protected()) == [(0, 1), (1, 3)], "joining ones are not missing"
    more = assign(after, protected(), [(0, 1), (1, 3)], candidates(0, 2, 3, 4))
    assert more.joiners == {}, "one of each stage joins already"


def test_a_busy_site_gets_no_replica_while_another_site_is_about_to_come() -> None:
    view, tasks = lost_one()
    waiting = candidates(0, 2, 3, launching=True, await_launch=True)
    assert assign(view, protected(), tasks, waiting) == Assignment({}, (), waits=True)
    over = candidates(0, 2, 3, launching=True)
    assert assign(view, protected(), tasks, over).joiners == {(0, 0): 3, (1, 2): 2}


def test_a_task_that_no_site_can_hold_is_named_unless_more_sites_come() -> None:
    view = place(protected(), [0, 1], {s: domain(s) for s in range(2)}).without([1])
    tasks = missing(view, protected())
    assigned = assign(view, protected(), tasks, candidates(0))
    assert assigned.joiners == {} and list(assigned.impossible) == tasks
    assert set(assigned.impossible.values()) == {"no site is in another process than its replicas"}
    assert assign(view, protected(), tasks, candidates(0, launching=True)).impossible == {}


def test_tasks_without_a_replica_do_not_wait_for_each_other_but_each_joins_once() -> None:
    lost = tuple(PartitionGroup(n, n + 1, ()) for n in range(2))
    view = View(0, 3, (0,), ((PartitionGroup(0, 2, (0,)),), lost, (PartitionGroup(0, 1, (0,)),)))
    shape, tasks = protected(), [(1, 0), (1, 1)]
    assigned = assign(view, shape, tasks, candidates(0, 2))
    assert assigned.joiners == {(1, 0): 2, (1, 1): 2}
    assert assign(assigned.view(view), shape, tasks, candidates(0, 2)).joiners == {}


# --- stages that must not be lost together ------------------------------------------------------


def rebuilt(k: int, *edges: tuple[int, int], stages: int = 4, partitions: int = 8) -> Shape:
    """A source (0), keyed stages that are rebuilt at level k, and a sink (the last stage)."""
    guard = ProtectionSpec("upstream", 1, "process", level=k, rebuild_level=k)
    ends = ProtectionSpec("pairs", 2, "process", followers=True)

    def stage(n: int) -> StageShape:
        inputs = tuple(x for x, (_, to) in enumerate(edges) if to == n)
        outputs = tuple(x for x, (of, _) in enumerate(edges) if of == n)
        keyed = 0 < n < stages - 1
        kind = "keyed" if keyed else "source" if n == 0 else "sink"
        count = partitions if keyed else 1
        return StageShape(n, f"s{n}", kind, count, inputs, outputs, guard=guard if keyed else ends)

    made = tuple(stage(n) for n in range(stages))
    return Shape(made, tuple(of for of, _ in edges), tuple(to for _, to in edges))


CHAIN = ((0, 1), (1, 2), (2, 3))
SKIPPING = ((0, 1), (1, 2), (2, 3), (1, 3), (3, 4))
"""A diamond of which one side is longer: each of the three keyed stages is next to the others."""


@pytest.mark.parametrize("sites", [2, 3, 4, 5])
def test_stages_that_must_not_be_lost_together_share_no_site(sites: int) -> None:
    domains = {s: domain(s) for s in range(sites)}
    view = place(rebuilt(1, *CHAIN), list(domains), domains)
    first, second = ({s for c in stage for s in c.replicas} for stage in view.groups[1:3])
    assert not first & second and first | second == set(domains)
    assert abs(len(first) - len(second)) <= 1
    assert exposures(view, rebuilt(1, *CHAIN), domains) == []


def test_stages_that_may_be_lost_together_use_all_sites() -> None:
    domains = {s: domain(s) for s in range(3)}
    view = place(rebuilt(2, *CHAIN), list(domains), domains)
    assert all(len(stage) == 3 for stage in view.groups[1:3])


def test_with_enough_sites_any_k_of_them_leave_a_stage_of_each_stretch() -> None:
    shape = rebuilt(2, *((n, n + 1) for n in range(5)), stages=6)
    domains = {s: domain(s) for s in range(6)}
    view = place(shape, list(domains), domains)
    for one in domains:
        for other in domains:
            assert lost_stretch(view.without([one, other]), shape) is None, str(view)


def test_stages_share_no_failure_domain_that_is_asked_for() -> None:
    shape = rebuilt(1, *CHAIN)
    stages = (replace(s, guard=replace(s.guard, failure_domain="host")) for s in shape.stages)
    shape = replace(shape, stages=tuple(stages))
    view = place(shape, list(range(8)), GRID)
    hosts = [{GRID[s].host for c in stage for s in c.replicas} for stage in view.groups[1:3]]
    assert not hosts[0] & hosts[1]


def test_too_few_sites_are_said_with_how_many_it_takes() -> None:
    shape, domains = rebuilt(1, *SKIPPING, stages=5), {s: domain(s) for s in range(2)}
    found = exposures(place(shape, [0, 1], domains), shape, domains)
    assert len(found) == 1, "only one of the two has neighbours"
    assert "would end the flow: it has partitions of 's" in str(found[0])
    assert str(found[0]).endswith("takes sites in 3 different processes")
    domains = {s: domain(s) for s in range(3)}
    assert exposures(place(shape, [0, 1, 2], domains), shape, domains) == []


@pytest.mark.parametrize("sites", range(2, 8))
def test_too_few_sites_for_two_losses_at_once_are_said(sites: int) -> None:
    shape = rebuilt(2, *((n, n + 1) for n in range(5)), stages=6)
    domains = {s: domain(s) for s in range(sites)}
    view = place(shape, list(domains), domains)
    alone = [s for s in domains if lost_stretch(view.without([s]), shape)]
    couples = [c for c in combinations(domains, 2) if lost_stretch(view.without(c), shape)]
    joint = joint_exposures(view, shape, domains)
    assert bool(exposures(view, shape, domains)) == bool(alone)
    assert bool(joint) == bool(couples and not alone), str(view)
    assert all(exposure.sites in couples for exposure in joint)
    for exposure in joint:
        one, other = exposure.sites
        text = f"the loss of sites {one}, {other} at once would end the flow: they have partitions"
        assert str(exposure).startswith(text)
        assert str(exposure).endswith("takes sites in 3 different processes")


def test_a_lost_task_is_rebuilt_where_its_neighbours_are_not() -> None:
    shape, domains = rebuilt(1, *CHAIN), {s: domain(s) for s in range(4)}
    view = place(shape, list(domains), domains)
    lost = view.groups[1][0].replicas[0]
    left = view.without([lost])
    assigned = assign(left, shape, left.bare(), candidates(*left.members))
    assert assigned.joiners and exposures(assigned.view(left), shape, domains) == []


def test_a_lost_task_waits_for_a_launch_rather_than_join_its_neighbours() -> None:
    shape, domains = rebuilt(1, *CHAIN), {s: domain(s) for s in range(2)}
    view = place(shape, list(domains), domains)
    lost = view.groups[1][0].replicas[0]
    left = view.without([lost])
    (rest,) = left.members
    waiting = assign(left, shape, left.bare(), candidates(rest, launching=True, await_launch=True))
    assert waiting == Assignment({}, (), waits=True)
    over = assign(left, shape, left.bare(), candidates(rest, launching=True))
    assert set(over.joiners.values()) == {rest}, "late is worse than exposed"
    assert exposures(over.view(left), shape, {rest: domain(rest)})


def test_a_substitute_that_shares_a_domain_with_a_neighbour_is_refused() -> None:
    shape, domains = rebuilt(1, *CHAIN), {s: domain(s) for s in range(5)}
    view = place(shape, [0, 1, 2, 3], domains)
    assert substituted(view, shape, [0, 4, 2, 3], domains) is not None
    near = domains | {4: replace(domain(4), process=domain(0).process)}
    assert substituted(view, shape, [0, 4, 2, 3], near) is None


def test_spans() -> None:
    assert spans([0, 1, 2, 5, 7, 8]) == "0-2, 5, 7-8"
    assert spans([]) == ""
