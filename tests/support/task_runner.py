"""A task of a flow by itself, without a site around it."""

from holdfast.api.options import Options
from holdfast.core.ids import ExchangeId, SiteId
from holdfast.core.layout import PartitionGroup
from holdfast.net.bundles import Router
from holdfast.plan.planner import Plan, shape
from holdfast.site.stages import TaskRunner, reader_at

OPTIONS = Options(partitions=4)
JOINER = SiteId(9)
"""The site of the standby, if the protection has one."""


def runner(planned: Plan, stage: int, partitions: int) -> TaskRunner:
    """A task whose consumers have one partition group each."""
    routers = {
        ExchangeId(e.id): Router(e, [PartitionGroup(0, OPTIONS.partitions, (0,))], digests=False)
        for e in planned.exchanges
    }
    group = PartitionGroup(0, partitions, (0,))
    made = TaskRunner(planned, planned.stages[stage], group, OPTIONS, routers)
    guard = shape(planned, OPTIONS.partitions).stages[stage].guard
    made.protect(guard, (reader_at(JOINER),) * guard.standbys)
    return made
