"""Which reports about replicas that join still count."""

from holdfast.core.events import ReplicaReported
from holdfast.core.ids import GroupId, SiteId, StageId
from holdfast.core.joins import ReplicaJoins
from holdfast.core.layout import PartitionGroup
from tests.support.core_machines import SHAPE, view

SOURCE = (StageId(0), GroupId(0))
JOINER = SiteId(3)


def reported(number: int) -> ReplicaReported:
    return ReplicaReported(JOINER, SOURCE, number, "installed", "")


def test_a_replica_of_a_source_that_another_leader_counted_is_not_whole() -> None:
    """The new leader may have let pushed rows enter that the replica lacks."""
    joins = ReplicaJoins()
    group = PartitionGroup(0, 1, (SiteId(2),)).joined_by(JOINER, 4)
    assert joins.is_stale(reported(3), group) and not joins.is_stale(reported(4), group)
    before, after = view(5, "2,3", "2", "2").view, view(6, "3", "2", "2").view
    joins.on_take_over(before, after, SHAPE)
    assert joins.is_stale(reported(5), group), "the leader was lost meanwhile"
    assert not joins.is_stale(reported(6), group)
