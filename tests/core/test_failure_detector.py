"""Who lives and who hears whom, in made-up time."""

from __future__ import annotations

from holdfast.core.events import Call
from holdfast.core.failure_detector import ALONE_LEASES, JOIN_S_MAX, FailureDetector
from holdfast.core.ids import SiteId
from holdfast.core.layout import PartitionGroup, View

ONE, OTHER = SiteId(0), SiteId(1)


def beat(detector: FailureDetector, times: list[float], *sites: SiteId) -> None:
    for at in times:
        for site in sites:
            detector.heard(site, at)


def begun() -> FailureDetector:
    detector = FailureDetector(lease_s=1.0)
    detector.begin([ONE, OTHER], 0.0)
    return detector


def test_what_was_said_of_a_silent_site_is_not_held_against_it_when_it_is_back() -> None:
    """The other may not have got to take it back yet, and may even say it once more."""
    detector = begun()
    beat(detector, [n / 4 for n in range(1, 57)], ONE)
    detector.complained(ONE, OTHER, 14, "how", 14.0)
    beat(detector, [14.25, 14.5], ONE, OTHER)
    assert detector.silent([ONE, OTHER], 14.5) == []
    assert detector.partitioned(14.5) == {}
    detector.complained(ONE, OTHER, 15, "how", 15.0)
    beat(detector, [15.0, 15.25, 15.5], ONE, OTHER)
    assert detector.partitioned(15.5) == {}


def test_whoever_is_back_and_hears_nobody_for_long_enough_is_apart() -> None:
    detector = begun()
    beat(detector, [n / 4 for n in range(1, 57)], ONE)
    beat(detector, [14 + n / 4 for n in range(1, 14)], ONE, OTHER)
    detector.complained(ONE, OTHER, 17, "how", 17.0)
    assert detector.partitioned(17.5) == {(ONE, OTHER): (17, "how")}


def test_a_site_in_a_long_call_is_not_apart_for_it() -> None:
    detector = begun()
    for at in (0.5, 1.0, 1.5, 2.0):
        detector.heard(ONE, at)
        detector.heard(OTHER, at, busy=True)
    detector.complained(ONE, OTHER, ALONE_LEASES, "how", 2.5)
    beat(detector, [2.5, 3.0], ONE, OTHER)
    assert detector.partitioned(3.0) == {}
    detector.complained(ONE, OTHER, ALONE_LEASES, "how", 4.5)
    beat(detector, [3.5, 4.0, 4.5, 5.0], ONE, OTHER)
    assert detector.partitioned(5.0) == {(ONE, OTHER): (ALONE_LEASES, "how")}


def test_a_call_is_hung_once_it_takes_too_long_and_others_beside_it_are_told() -> None:
    detector = begun()
    detector.in_call(ONE, Call("a", 3, 50.0))
    detector.in_call(OTHER, Call("b", 4, 20.0))
    assert detector.hung(60.0) == {}
    detector.in_call(ONE, Call("a", 3, 61.0))
    assert detector.hung(60.0) == {ONE: Call("a", 3, 61.0)}
    detector.in_call(OTHER, Call("a", 3, 40.0))
    assert set(detector.hung(60.0)) == {ONE, OTHER}
    detector.in_call(ONE, None)
    assert detector.hung(60.0) == {}
    detector.in_call(ONE, Call("a", 3, 61.0))
    detector.forget(ONE)
    assert detector.hung(60.0) == {}


def stuck(detector: FailureDetector, group: PartitionGroup, now: float) -> list[int]:
    """Which sites get nowhere with the replica of the only task there is, by no word of anybody."""
    found, _ = detector.stuck(View(0, 9, (ONE, OTHER), ((group,),)), [], now)
    return [site for _, site in found]


def test_a_replica_that_gets_nothing_is_stuck_and_the_next_attempt_is_not() -> None:
    detector, group = begun(), PartitionGroup(0, 1, (ONE,))
    later = 2 * JOIN_S_MAX
    assert stuck(detector, group.joined_by(OTHER, 3), 0.0) == []
    assert stuck(detector, group.joined_by(OTHER, 3), later) == [OTHER]
    assert stuck(detector, group.joined_by(OTHER, 5), later + 0.2) == []


def test_a_task_that_is_rebuilt_may_wait_for_its_input() -> None:
    """Of a producer that is silent, and cannot be spared."""
    detector, group = begun(), PartitionGroup(0, 1, ()).joined_by(OTHER, 3)
    assert stuck(detector, group, 0.0) == stuck(detector, group, 100 * JOIN_S_MAX) == []


def test_a_replica_is_not_stuck_while_its_donor_or_its_site_is_in_a_long_call() -> None:
    for busy in (ONE, OTHER):
        detector, group = begun(), PartitionGroup(0, 1, (ONE,)).joined_by(OTHER, 3)
        assert stuck(detector, group, 0.0) == []
        detector.in_call(busy, Call("a", 3, 9.0))
        assert stuck(detector, group, 2 * JOIN_S_MAX) == []
        detector.in_call(busy, None)
        assert stuck(detector, group, 2.9 * JOIN_S_MAX) == []
        assert stuck(detector, group, 3.1 * JOIN_S_MAX) == [OTHER]
