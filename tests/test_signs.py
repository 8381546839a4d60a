"""Who lives and who hears whom, in made-up time."""

from __future__ import annotations

from holdfast.core.events import Call
from holdfast.core.failure_detector import ALONE_LEASES, JOIN_S_MAX, Signs
from holdfast.core.ids import SiteId
from holdfast.core.layout import PartitionGroup, View

ONE, OTHER = SiteId(0), SiteId(1)


def beat(signs: Signs, times: list[float], *sites: SiteId) -> None:
    for at in times:
        for site in sites:
            signs.heard(site, at)


def begun() -> Signs:
    signs = Signs(lease_s=1.0)
    signs.begin([ONE, OTHER], 0.0)
    return signs


def test_what_was_said_of_a_silent_site_is_not_held_against_it_when_it_is_back() -> None:
    """The other may not have got to take it back yet, and may even say it once more."""
    signs = begun()
    beat(signs, [n / 4 for n in range(1, 57)], ONE)
    signs.complained(ONE, OTHER, 14, "how", 14.0)
    beat(signs, [14.25, 14.5], ONE, OTHER)
    assert signs.silent([ONE, OTHER], 14.5) == []
    assert signs.parted(14.5) == {}
    signs.complained(ONE, OTHER, 15, "how", 15.0)
    beat(signs, [15.0, 15.25, 15.5], ONE, OTHER)
    assert signs.parted(15.5) == {}


def test_whoever_is_back_and_hears_nobody_for_long_enough_is_apart() -> None:
    signs = begun()
    beat(signs, [n / 4 for n in range(1, 57)], ONE)
    beat(signs, [14 + n / 4 for n in range(1, 14)], ONE, OTHER)
    signs.complained(ONE, OTHER, 17, "how", 17.0)
    assert signs.parted(17.5) == {(ONE, OTHER): (17, "how")}


def test_a_site_in_a_long_call_is_not_apart_for_it() -> None:
    signs = begun()
    for at in (0.5, 1.0, 1.5, 2.0):
        signs.heard(ONE, at)
        signs.heard(OTHER, at, busy=True)
    signs.complained(ONE, OTHER, ALONE_LEASES, "how", 2.5)
    beat(signs, [2.5, 3.0], ONE, OTHER)
    assert signs.parted(3.0) == {}
    signs.complained(ONE, OTHER, ALONE_LEASES, "how", 4.5)
    beat(signs, [3.5, 4.0, 4.5, 5.0], ONE, OTHER)
    assert signs.parted(5.0) == {(ONE, OTHER): (ALONE_LEASES, "how")}


def test_a_call_is_hung_once_it_takes_too_long_and_others_beside_it_are_told() -> None:
    signs = begun()
    signs.in_call(ONE, Call("a", 3, 50.0))
    signs.in_call(OTHER, Call("b", 4, 20.0))
    assert signs.hung(60.0) == {}
    signs.in_call(ONE, Call("a", 3, 61.0))
    assert signs.hung(60.0) == {ONE: Call("a", 3, 61.0)}
    signs.in_call(OTHER, Call("a", 3, 40.0))
    assert set(signs.hung(60.0)) == {ONE, OTHER}
    signs.in_call(ONE, None)
    assert signs.hung(60.0) == {}
    signs.in_call(ONE, Call("a", 3, 61.0))
    signs.forget(ONE)
    assert signs.hung(60.0) == {}


def stuck(signs: Signs, group: PartitionGroup, now: float) -> list[int]:
    """Which sites get nowhere with the replica of the only task there is, by no word of anybody."""
    found, _ = signs.stuck(View(0, 9, (ONE, OTHER), ((group,),)), [], now)
    return [site for _, site in found]


def test_a_replica_that_gets_nothing_is_stuck_and_the_next_attempt_is_not() -> None:
    signs, group = begun(), PartitionGroup(0, 1, (ONE,))
    later = 2 * JOIN_S_MAX
    assert stuck(signs, group.joined_by(OTHER, 3), 0.0) == []
    assert stuck(signs, group.joined_by(OTHER, 3), later) == [OTHER]
    assert stuck(signs, group.joined_by(OTHER, 5), later + 0.2) == []


def test_a_task_that_is_made_anew_may_wait_for_its_input() -> None:
    """Of a producer that is silent, and cannot be spared."""
    signs, group = begun(), PartitionGroup(0, 1, ()).joined_by(OTHER, 3)
    assert stuck(signs, group, 0.0) == stuck(signs, group, 100 * JOIN_S_MAX) == []


def test_a_replica_is_not_stuck_while_its_donor_or_its_site_is_in_a_long_call() -> None:
    for busy in (ONE, OTHER):
        signs, group = begun(), PartitionGroup(0, 1, (ONE,)).joined_by(OTHER, 3)
        assert stuck(signs, group, 0.0) == []
        signs.in_call(busy, Call("a", 3, 9.0))
        assert stuck(signs, group, 2 * JOIN_S_MAX) == []
        signs.in_call(busy, None)
        assert stuck(signs, group, 2.9 * JOIN_S_MAX) == []
        assert stuck(signs, group, 3.1 * JOIN_S_MAX) == [OTHER]
