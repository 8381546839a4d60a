"""Which edges of a replica's life whole flows take when things go wrong."""

from holdfast.core.replica import TABLE, Event, State
from holdfast.lab.sim.explore import PROTOCOLS, Case, run
from tests.support.replica_edges import Edge, taken

SEEDS = range(3)
CHANGES = (("pairs", "passive"), ("passive", "pairs"), ("upstream", "passive"))

RARE: set[Edge] = {
    (State.JOINING, Event.TO_REBUILD),
    (State.INSTALLING, Event.TO_REBUILD),
    (State.INSTALLING, Event.REMOVED),
    (State.INSTALLING, Event.STATE_OFFERED),
    (State.INSTALLING, Event.SENDER_LOST),
    (State.SEARCHING, Event.REMOVED),
    (State.SEARCHING, Event.REBUILD_IMPOSSIBLE),
    (State.REPLAYING, Event.TO_JOIN),
    (State.REPLAYING, Event.TO_REBUILD),
    (State.REPLAYING, Event.REMOVED),
    (State.ACTIVE, Event.TO_REBUILD),
    (State.ACTIVE, Event.TO_FOLLOW),
    (State.ACTIVE, Event.TO_STAND_BY),
    (State.FOLLOWER, Event.REMOVED),
    (State.STANDBY, Event.TO_REBUILD),
    (State.STANDBY, Event.REMOVED),
    (State.STANDBY, Event.SENDER_LOST),
}
"""Those that so few seeds need not take; the stories of `tests/core/test_replica.py` do."""


def test_simulated_runs_take_all_edges_that_are_not_rare() -> None:
    cases = [Case(seed, "times", protocol) for protocol in PROTOCOLS for seed in SEEDS]
    cases += [Case(seed, "times", a, then=b) for a, b in CHANGES for seed in SEEDS]
    with taken() as edges:
        for case in cases:
            assert run(case).problem is None, case
    assert TABLE.keys() - RARE <= edges, TABLE.keys() - RARE - edges
