"""The balancing policy: its formulas by hand, and where it leads from any load."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.core.balance import (
    BalanceHistory,
    BalanceMode,
    BalanceParams,
    BalancePolicy,
    Collection,
    PartLoad,
    Relocation,
    Round,
    SiteLoad,
    next_collect_ms,
    plan_round,
)
from holdfast.core.ids import GroupId, SiteId, StageId, TaskId

EXACT = BalanceParams(smooth_ms=0.0, evidence_ms=0.0)
SECOND = Collection(1_000.0)
MB = 1_000_000


def task(group: int, stage: int = 1) -> TaskId:
    return StageId(stage), GroupId(group)


def anywhere(task: TaskId, source: SiteId, target: SiteId) -> bool:
    return True


def site(number: int, busy: float, **more: object) -> SiteLoad:
    return SiteLoad(SiteId(number), busy, **more)  # type: ignore[arg-type]


def part(
    group: int, at: int, work_s: float, rows: int = 0, state: int = MB, **more: object
) -> PartLoad:
    return PartLoad(task(group), SiteId(at), rows, work_s, state, **more)  # type: ignore[arg-type]


def moved(found: Round) -> list[tuple[int, int, int]]:
    return [(m.task[1], m.source, m.target) for m in found.moves]


# --- formulas -------------------------------------------------------------------------------------


def test_the_move_that_lowers_the_higher_site_most_is_chosen_with_its_reason() -> None:
    """Site 0: U = 0.9 from 0.5 + 0.3 + 0.1; site 1: U = 0.2 from 0.2. Moving 0.3 gives
    0.9 (1 - 0.3 / 0.9) = 0.6 and 0.2 (1 + 0.3 / 0.2) = 0.5."""
    sites = [site(0, 0.9), site(1, 0.2)]
    parts = [part(0, 0, 0.5), part(1, 0, 0.3), part(2, 0, 0.1), part(3, 1, 0.2)]
    one = replace(EXACT, moves_max=1)
    found = plan_round(sites, parts, SECOND, one, anywhere, name=lambda t: f"{t[1]} of 'stats'")
    assert moved(found) == [(1, 0, 1)]
    words = "site 0 at 0.90, site 1 at 0.20: 1 of 'stats' moves, expected 0.60 / 0.50"
    assert found.moves[0].reason == words and found.reasons == (words,)
    assert found.imbalance == pytest.approx(0.9 / 0.55)


def test_rows_count_where_nobody_measured_work() -> None:
    """The thesis' formulas with rows: U'_d = 0.8 (1 - 300/800), U'_r = 0.2 (1 + 300/400)."""
    sites = [site(0, 0.8), site(1, 0.2)]
    parts = [part(0, 0, 0.0, 500), part(1, 0, 0.0, 300), part(2, 1, 0.0, 400)]
    found = plan_round(sites, parts, SECOND, EXACT, anywhere)
    assert moved(found) == [(0, 0, 1)]
    assert "expected 0.30 / 0.45" in found.reasons[0]


def test_a_throttled_donor_and_a_free_receiver_count_by_their_own_capacity() -> None:
    """The donor gets 0.4 s of work done in a second that it is busy, the receiver 1 s. A partition
    of 0.1 s relieves the donor by 0.25 and costs the receiver 0.1."""
    sites = [site(0, 1.0), site(1, 0.4)]
    parts = [*(part(n, 0, 0.1) for n in range(4)), *(part(n, 1, 0.1) for n in range(4, 8))]
    found = plan_round(sites, parts, SECOND, replace(EXACT, moves_max=1), anywhere)
    assert "expected 0.75 / 0.50" in found.reasons[0]


def test_processor_time_of_no_partition_stays_where_it_is() -> None:
    """Half of site 0 is not its partitions' work: moving 0.1 of 1.0 s takes off 0.1, not 0.2."""
    sites = [site(0, 1.0, cpu_s=1.0), site(1, 0.2, cpu_s=0.2)]
    parts = [*(part(n, 0, 0.1) for n in range(5)), part(9, 1, 0.2)]
    found = plan_round(sites, parts, SECOND, replace(EXACT, moves_max=1), anywhere)
    assert "expected 0.90 / 0.30" in found.reasons[0]


def test_a_site_without_load_receives_one_partition_to_show_its_capacity() -> None:
    sites = [site(0, 1.0), site(1, 0.0), site(2, 0.2)]
    parts = [*(part(n, 0, 0.1) for n in range(10)), part(10, 2, 0.2)]
    found = plan_round(sites, parts, SECOND, EXACT, anywhere)
    assert [target for _, _, target in moved(found)].count(1) == 1


def test_nothing_moves_below_the_threshold_unless_moves_have_begun() -> None:
    sites = [site(0, 0.66), site(1, 0.60)]
    parts = [part(n, n % 2, 0.66 / 33 if n % 2 == 0 else 0.60 / 33) for n in range(66)]
    found = plan_round(sites, parts, SECOND, EXACT, anywhere)
    assert found.moves == () and found.reasons == ("nothing to gain: sites at 0.60 to 0.66",)
    begun = BalanceHistory(mode=BalanceMode.BALANCING)
    assert len(plan_round(sites, parts, SECOND, EXACT, anywhere, history=begun).moves) == 1


def test_a_busy_site_receives_nothing() -> None:
    sites = [site(0, 1.0), site(1, 0.93)]
    parts = [*(part(n, 0, 0.01) for n in range(20)), part(99, 1, 0.93)]
    assert plan_round(sites, parts, SECOND, EXACT, anywhere).moves == ()


def test_one_move_a_site_unless_the_load_is_severe() -> None:
    parts = [*(part(n, 0, 0.05) for n in range(16)), part(90, 1, 0.6), part(91, 2, 0.65)]
    mild = plan_round([site(0, 0.8), site(1, 0.6), site(2, 0.65)], parts, SECOND, EXACT, anywhere)
    assert len(mild.moves) == 1
    parts = [*(part(n, 0, 0.06) for n in range(15)), part(90, 1, 0.1), part(91, 2, 0.2)]
    severe = plan_round([site(0, 0.9), site(1, 0.1), site(2, 0.2)], parts, SECOND, EXACT, anywhere)
    assert len(severe.moves) > 3


def test_moves_and_bytes_at_a_time_are_limited() -> None:
    sites = [site(0, 0.9), site(1, 0.1)]
    parts = [*(part(n, 0, 0.03) for n in range(30)), part(90, 1, 0.1)]
    few = replace(EXACT, moves_max=3)
    first = plan_round(sites, parts, SECOND, few, anywhere)
    assert len(first.moves) == 3
    assert plan_round(sites, parts, SECOND, few, anywhere, in_flight=first.moves).moves == ()
    small = replace(EXACT, bytes_max=2 * MB)
    assert len(plan_round(sites, parts, SECOND, small, anywhere).moves) == 2


def test_what_is_under_way_counts_where_it_goes() -> None:
    sites = [site(0, 0.9), site(1, 0.1)]
    parts = [*(part(n, 0, 0.1) for n in range(9)), part(90, 1, 0.1)]
    under_way = [Relocation(task(n), SiteId(0), SiteId(1)) for n in range(4)]
    assert plan_round(sites, parts, SECOND, EXACT, anywhere, in_flight=under_way).moves == ()


def test_what_moved_rests() -> None:
    sites = [site(0, 0.9), site(1, 0.2)]
    parts = [part(0, 0, 0.3), part(1, 0, 0.6), part(2, 1, 0.2)]
    resting = BalanceHistory(resting={task(0): 1})
    found = plan_round(sites, parts, SECOND, EXACT, anywhere, history=resting)
    assert found.moves == () and found.history.resting == {}
    assert moved(plan_round(sites, parts, SECOND, EXACT, anywhere)) == [(0, 0, 1)]


def test_the_length_of_the_next_collection() -> None:
    params = BalanceParams(collect_ms_min=250.0, collect_ms_max=5_000.0)
    assert next_collect_ms(params, Collection(1_000.0)) == 500.0
    assert next_collect_ms(params, Collection(300.0)) == 250.0
    assert next_collect_ms(params, Collection(300.0, moves_took_ms=1_200.0)) == 1_200.0
    assert next_collect_ms(params, Collection(300.0, 9_000.0)) == 5_000.0
    assert next_collect_ms(params, Collection(300.0, 0.0, gathering_took_ms=700.0)) == 700.0


def test_short_rounds_wait_for_evidence_and_are_smoothed() -> None:
    params = BalanceParams(evidence_ms=250.0, smooth_ms=500.0)
    sites, tenth = [site(0, 1.0), site(1, 0.4)], Collection(100.0)
    parts = [*(part(n, 0, 0.01) for n in range(10)), part(90, 1, 0.04)]
    history = None
    for n in range(3):
        found = plan_round(sites, parts, tenth, params, anywhere, history=history)
        assert bool(found.moves) == (n == 2)
        history = found.history
    assert history is not None
    spike = [replace(p, work_s=p.work_s * (50 if p.task == task(3) else 1)) for p in parts]
    after = plan_round(sites, spike, tenth, params, anywhere, history=history).history.loads
    key = (task(3), SiteId(0))
    measured = 0.5 / sum(p.work_s for p in spike)
    assert history.loads.shares[key] < after.shares[key] < 0.5 * measured


def test_what_has_just_moved_does_not_change_its_share() -> None:
    """It was held up, and then gets all that waited for it: both say nothing."""
    sites = [site(0, 0.8), site(1, 0.2)]
    parts = [part(0, 0, 0.5), part(1, 0, 0.3), part(2, 1, 0.2)]
    found = plan_round(sites, parts, SECOND, EXACT, anywhere)
    assert moved(found) == [(1, 0, 1)]
    burst = [part(0, 0, 0.3), part(1, 1, 0.6), part(2, 1, 0.1)]
    sites = [site(0, 0.3), site(1, 0.7)]
    after = plan_round(sites, burst, SECOND, EXACT, anywhere, history=found.history)
    assert after.moves == ()
    assert after.history.loads.shares[task(1), SiteId(1)] == pytest.approx(0.3, abs=0.15)


def test_the_tasks_of_a_site_that_got_slower_keep_their_share() -> None:
    """Four equal sites never wait, since buffers before them are full. One gets slower, and at
    first the others have enough to do. Its tasks have not become smaller."""
    full = [site(n, 1.0) for n in range(4)]
    parts = [part(n, n % 4, 0.25) for n in range(16)]
    history = plan_round(full, parts, SECOND, EXACT, anywhere).history
    slow = [replace(p, work_s=0.1) if p.site == 3 else p for p in parts]
    found = plan_round(full, slow, SECOND, EXACT, anywhere, history=history)
    shares = found.history.loads.shares
    assert sum(share for (_, at), share in shares.items() if at == 3) > 0.22
    assert found.moves == () and found.imbalance > 1.5


# --- sites that cannot keep up --------------------------------------------------------------------


def test_a_stalled_site_is_left_and_that_is_said() -> None:
    sites = [site(0, 1.0), site(1, 0.3), site(2, 0.3)]
    parts = [part(0, 0, 0.0), part(1, 0, 0.0), part(2, 1, 0.3, 300), part(3, 2, 0.3, 300)]
    found = plan_round(sites, parts, SECOND, EXACT, anywhere)
    assert found.leaving == (0,) and sorted(moved(found)) == [(0, 0, 1), (1, 0, 2)]
    words = "site 0 cannot keep up, site 1 at 0.30: group 0 of stage 1 moves, expected 0.60"
    assert found.reasons[0] == words
    left = [site(0, 0.0), site(1, 0.6), site(2, 0.6)]
    parts = [part(0, 1, 0.3), part(1, 2, 0.3), part(2, 1, 0.3), part(3, 2, 0.3)]
    assert found.history.resting.keys() == {task(0), task(1)}
    rested = replace(found.history, resting={})
    later = plan_round(left, parts, SECOND, EXACT, anywhere, history=rested)
    assert later.leaving == (0,) and later.moves == ()
    retried = plan_round(left, parts, Collection(60_000.0), EXACT, anywhere, history=later.history)
    assert retried.leaving == ()
    tried = plan_round(left, parts, SECOND, EXACT, anywhere, history=retried.history)
    assert [target for _, _, target in moved(tried)] == [0]


def test_a_site_that_lacks_memory_is_slow_but_not_left() -> None:
    limits = {"memory_max": 3 * MB, "state_bytes": 4 * MB, "disk_bytes": MB}
    sites = [site(0, 1.0, **limits), site(1, 0.3), site(2, 0.3)]
    parts = [*(part(n, 0, 0.001) for n in range(4)), part(4, 1, 0.3), part(5, 2, 0.3)]
    found = plan_round(sites, parts, SECOND, EXACT, anywhere)
    assert found.leaving == () and moved(found) == [(0, 0, 1)]


def test_nothing_is_forced_on_sites_that_are_full() -> None:
    sites = [site(0, 1.0), site(1, 0.95)]
    parts = [part(0, 0, 0.01), part(1, 1, 0.95)]
    found = plan_round(sites, parts, SECOND, EXACT, anywhere)
    assert found.moves == () and found.leaving == (0,)
    assert found.reasons[0] == "site 0 cannot keep up, and no site can take group 0 of stage 1"


def test_a_site_is_drained() -> None:
    sites = [site(0, 0.2), site(1, 0.2), site(2, 0.2)]
    parts = [part(n, n % 3, 0.1) for n in range(6)]
    found = plan_round(sites, parts, SECOND, EXACT, anywhere, drain=[SiteId(2)])
    assert found.leaving == (2,) and sorted(moved(found)) == [(2, 2, 0), (5, 2, 1)]


# --- memory ---------------------------------------------------------------------------------------


def with_memory(*states: tuple[int, int]) -> tuple[list[SiteLoad], list[PartLoad]]:
    """Sites with this memory and this many parts, both in units of 10 MB; what does not fit is on
    disk, the first parts first."""
    sites, parts, group = [], [], 0
    for number, (memory, count) in enumerate(states):
        spilled = max(0, count - memory)
        unit = 10 * MB
        limits = {"memory_max": memory * unit, "state_bytes": count * unit}
        sites.append(site(number, 0.5, disk_bytes=spilled * unit, **limits))
        for n in range(count):
            on_disk = unit if n < spilled else 0
            parts.append(part(group, number, 0.5 / count, 0, unit, on_disk=on_disk))
            group += 1
    return sites, parts


@pytest.mark.parametrize("policy", [BalancePolicy.MEMORY, BalancePolicy.HYBRID])
def test_memory_is_evened_out_parts_in_memory_first(policy: BalancePolicy) -> None:
    sites, parts = with_memory((4, 8), (10, 8), (16, 8))
    found = plan_round(sites, parts, SECOND, replace(EXACT, policy=policy), anywhere)
    assert moved(found) == [(4, 0, 2), (5, 0, 2), (6, 0, 2), (7, 0, 2)]
    words = "site 0 lacks 40.0 MB, site 2 has 80.0 MB: group 4 of stage 1 moves, expected "
    assert found.reasons[0] == words + "lacks 30.0 MB / has 70.0 MB"


def test_what_is_on_disk_is_spread_when_memory_is_exhausted() -> None:
    sites, parts = with_memory((2, 8), (7, 8), (7, 8))
    found = plan_round(sites, parts, SECOND, replace(EXACT, policy=BalancePolicy.MEMORY), anywhere)
    assert len(found.moves) == 3 and {target for _, _, target in moved(found)} == {1, 2}


def test_the_cpu_policy_of_the_hybrid_needs_memory_at_the_receiver() -> None:
    sites = [site(0, 0.9), site(1, 0.1, memory_max=10 * MB, state_bytes=10 * MB), site(2, 0.3)]
    parts = [*(part(n, 0, 0.1) for n in range(9)), part(90, 1, 0.1), part(91, 2, 0.3)]
    hybrid = plan_round(sites, parts, SECOND, EXACT, anywhere)
    assert {target for _, _, target in moved(hybrid)} == {2}
    by_cpu = plan_round(sites, parts, SECOND, replace(EXACT, policy=BalancePolicy.CPU), anywhere)
    assert {target for _, _, target in moved(by_cpu)} == {1, 2}


def test_the_hybrid_balances_cpu_when_memory_lacks_everywhere_alike() -> None:
    def lacking(number: int, busy: float, lack: int) -> SiteLoad:
        state, memory = 10 * MB, (10 - lack) * MB
        return site(number, busy, memory_max=memory, state_bytes=state, disk_bytes=lack * MB)

    sites = [lacking(0, 0.9, 2), lacking(1, 0.1, 2), lacking(2, 0.3, 1)]
    parts = [*(part(n, 0, 0.1) for n in range(9)), part(90, 1, 0.1), part(91, 2, 0.3)]
    assert moved(plan_round(sites, parts, SECOND, EXACT, anywhere)) == [(0, 0, 2)]


# --- from any load --------------------------------------------------------------------------------


FIXED = 0.01
"""Utilisation of each site by what cannot move, at full rate."""


@dataclass
class World:
    """Sites that process as fast as the slowest one allows, with exact statistics."""

    capacity: list[float]
    work: list[float]
    """By task: work a second at full rate."""
    held: list[list[int]]
    """By task: the sites of its replicas."""
    params: BalanceParams
    history: BalanceHistory = field(default_factory=BalanceHistory)
    past: list[Relocation] = field(default_factory=list)

    def loads(self) -> list[float]:
        """By site: its utilisation at full rate; above 1 if it cannot keep up."""
        return [
            FIXED + sum(w for w, at in zip(self.work, self.held, strict=True) if n in at) / c
            for n, c in enumerate(self.capacity)
        ]

    def statistics(self) -> tuple[list[SiteLoad], list[PartLoad]]:
        loads = self.loads()
        rate = min(1.0, 1.0 / max(loads)) if max(loads) else 1.0
        sites = [site(n, rate * u) for n, u in enumerate(loads)]
        both = zip(self.work, self.held, strict=True)
        parts = [part(n, s, rate * w, int(1e4 * w)) for n, (w, at) in enumerate(both) for s in at]
        for n, c in enumerate(self.capacity):
            parts.append(part(1_000 + n, n, rate * FIXED * c, movable=False))
        return sites, parts

    def may_hold(self, task: TaskId, source: SiteId, target: SiteId) -> bool:
        """Two sites with neighbouring numbers are in one failure domain."""
        others = [s for s in self.held[task[1]] if s != source]
        return all(s // 2 != target // 2 for s in others)

    def round(self) -> Round:
        sites, parts = self.statistics()
        found = plan_round(sites, parts, SECOND, self.params, self.may_hold, history=self.history)
        before = {s.site: s.busy for s in sites}
        self.history = found.history
        for move in found.moves:
            at = self.held[move.task[1]]
            assert move.source in at and move.target not in at
            at[at.index(move.source)] = move.target
            assert len({s // 2 for s in at}) == len(at), "two replicas in one failure domain"
        self._check_receivers(found.moves, before, parts)
        self.past += found.moves
        return found

    def _check_receivers(
        self, moves: Sequence[Relocation], before: dict[SiteId, float], parts: Sequence[PartLoad]
    ) -> None:
        """No receiver is overloaded at the rate at which the moves were chosen."""
        work = {(p.task, p.site): p.work_s for p in parts}
        for target in {m.target for m in moves}:
            more = sum(work[m.task, m.source] for m in moves if m.target == target)
            less = sum(work[m.task, m.source] for m in moves if m.source == target)
            assert before[target] + (more - less) / self.capacity[target] <= 1.0 + 1e-6

    def run(self, rounds: int = 200) -> None:
        quiet = 0
        for _ in range(rounds):
            quiet = 0 if self.round().moves else quiet + 1
            if quiet > self.params.rest_rounds + 1:
                return
        raise AssertionError("moves do not end")


PARAMS = replace(EXACT, return_ms=1e9, retry_ms=1e9, moves_max=8)


@st.composite
def worlds(draw: st.DrawFn, replicas: int) -> World:
    count = draw(st.integers(2, 5)) * 2
    capacity = draw(st.lists(st.floats(0.1, 1.0), min_size=count, max_size=count))
    tasks = draw(st.integers(count, 6 * count))
    work = draw(st.lists(st.floats(0.001, 0.2), min_size=tasks, max_size=tasks))
    held = []
    for _ in range(tasks):
        first = draw(st.integers(0, count - 1))
        second = (first + 2) % count
        held.append([first, second][:replicas])
    return World(capacity, work, held, PARAMS)


def granular(world: World) -> bool:
    """Whether what is left of an imbalance is within the thresholds, or no larger than what the
    tasks of the highest site allow."""
    loads = world.loads()
    high, low = max(loads), min(loads)
    if high < world.params.imbalance_min * low:
        return True
    donor, receiver = loads.index(high), loads.index(low)
    there = [w for w, at in zip(world.work, world.held, strict=True) if donor in at]
    costs = [1 / world.capacity[receiver], 1 / world.capacity[donor]]
    reach = costs[0] + world.params.margin * min(costs)
    return high - low <= max(there) * reach + 1e-9


@given(worlds(replicas=1))
def test_from_any_load_moves_end_near_balance_and_nothing_returns(world: World) -> None:
    before = max(world.loads())
    world.run()
    assert max(world.loads()) <= before + 1e-9
    assert granular(world)
    left = set()
    for move in world.past:
        left.add((move.task, move.source))
        assert (move.task, move.target) not in left


@given(worlds(replicas=2))
def test_replicas_are_never_together_and_moves_end(world: World) -> None:
    before = max(world.loads())
    world.run()
    assert max(world.loads()) <= before + 1e-9
    assert all(len(set(at)) == 2 for at in world.held)


@given(st.integers(2, 12), st.floats(0.001, 0.04), st.integers(2, 40))
def test_a_hopeless_site_is_emptied(count: int, slow: float, each: int) -> None:
    """Its capacity is a small part of the others': not even one task remains."""
    held = [[n % (count + 1)] for n in range(each * (count + 1))]
    world = World([slow] + [1.0] * count, [0.5 / each] * len(held), held, PARAMS)
    world.run()
    assert all(at != [0] for at in world.held)
    assert world.history.hopeless.keys() == {0}
    assert max(world.loads()) <= FIXED + sum(world.work) / count + 1.5 * max(world.work)


def test_a_trial_that_shows_a_slow_site_is_undone() -> None:
    """Nothing is known of an empty site. It gets one task, and gives it back."""
    fast = [part(n, n % 2, 0.2) for n in range(8)]
    found = plan_round([site(0, 0.8), site(1, 0.8), site(2, 0.0)], fast, SECOND, EXACT, anywhere)
    [(group, source, target)] = moved(found)
    assert target == 2 and found.history.left == {}
    slow = [replace(p, site=SiteId(2)) if p.task == task(group) else p for p in fast]
    sites = [site(0, 0.8), site(1, 0.8), site(2, 1.0)]
    sites[source] = site(source, 0.6)
    history = replace(found.history, resting={})
    back = plan_round(sites, slow, SECOND, EXACT, anywhere, history=history)
    assert moved(back) == [(group, 2, source)]
