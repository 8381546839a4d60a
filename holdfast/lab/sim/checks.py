"""What must hold in a simulated world: after every step, and at the end.

The machines check themselves (`check_invariants`). This module has the conditions that concern
several sites, which no machine can check alone.
"""

from __future__ import annotations

from collections.abc import Iterator

from holdfast.core.exchange import Consumer, Producer
from holdfast.core.flow_phase import FlowPhase
from holdfast.core.ids import Epoch, ExchangeId, GroupId, SiteId, TaskId
from holdfast.core.layout import View
from holdfast.core.placement import may_join
from holdfast.core.roster import EMPTIED
from holdfast.errors import OperatorError, SiteLostError
from holdfast.lab.sim.flows import expected, in_order
from holdfast.lab.sim.timed import TimedWorld
from holdfast.site.node import SiteNode

Ends = tuple[ExchangeId, GroupId]
"""An exchange, and a partition group of its consumer."""


class Violation(AssertionError):
    """A condition does not hold."""


class Stall(Violation):
    """The flow does not go on, or is not protected again in time."""


class WorldChecks:
    """Checks a world after its steps. To check everything after each step would take most of the
    time. So it checks the site that acted last after every `NEAR` steps, and all sites, and the
    conditions between them, after every `FAR` steps and after each fault and view."""

    NEAR = 12
    FAR = 120

    def __init__(self, world: TimedWorld) -> None:
        self.world = world
        self._received: dict[tuple[SiteId, Ends, int], dict[GroupId, Epoch]] = {}
        """What each replica of a consumer had received when it was last checked."""
        self._log = 0

    def step(self) -> None:
        world = self.world
        if world.steps % self.FAR == 0 or len(world.log) != self._log:
            self._log = len(world.log)
            self.all()
        elif world.steps % self.NEAR == 0 and world.shell.acted in world.nodes:
            self._one(world.shell.acted, world.nodes[world.shell.acted])

    def all(self) -> None:
        """Check every condition that must hold during a run."""
        view = self.world.controller.view
        for site, node in self.world.nodes.items():
            self._one(site, node)
        if view is not None:
            self._apart(view)
            self._not_exposed_by_moves(view)
            if not self.world.exceeded:
                self._nothing_lost(view)

    def _one(self, site: SiteId, node: SiteNode) -> None:
        """Check one site, and what it believes about other sites."""
        self.world.check(node)
        self._acts_on_what_is_committed(site, node)
        self._in_order(site, node)
        self._bounded(site, node)
        for producer in node.dataflow.exchanges.producers.values():
            self._acked_no_more_than_received(site, producer)

    def _acts_on_what_is_committed(self, site: SiteId, node: SiteNode) -> None:
        view = node.view
        if view is not None and (view.term, view.number) not in self.world.ledger.views:
            raise Violation(f"site {site} acts on {view}, which was never committed")

    def _in_order(self, site: SiteId, node: SiteNode) -> None:
        """The epoch that a consumer has received from a producer never decreases."""
        for ends, consumer in node.dataflow.exchanges.consumers.items():
            before = self._received.setdefault((site, ends, consumer.joined_view), {})
            if before != consumer.received:
                for producer, received in consumer.received.items():
                    if received < before.get(producer, received):
                        raise Violation(f"site {site}, exchange {ends[0]}: received decreased")
                before.update(consumer.received)

    def _bounded(self, site: SiteId, node: SiteNode) -> None:
        """Credits bound the bundles that wait at a consumer; a task has at most one order."""
        for (exchange, _), consumer in node.dataflow.exchanges.consumers.items():
            if consumer.count_waiting() > consumer.room + 1:
                raise Violation(f"site {site}, exchange {exchange}: too many bundles wait")
        if len(node.orders) > len(node.dataflow.tasks):
            raise Violation(f"site {site}: {len(node.orders)} orders for its tasks")

    def _acked_no_more_than_received(self, site: SiteId, producer: Producer) -> None:
        exchange, nodes = producer.exchange, self.world.nodes
        for group, lane in producer.lanes.items():
            for replica, known in lane.cursors.items():
                node = nodes.get(replica)
                if node is None:
                    continue
                consumer = node.dataflow.exchanges.consumers.get((exchange, group))
                if consumer is None or consumer.joined_view != known.joined_view:
                    continue
                has = consumer.received.get(producer.group)
                if has is not None and known.received > has:
                    raise Violation(
                        f"site {site} believes that {replica} has epoch {known.received} of "
                        f"exchange {producer.exchange}; it has {has}"
                    )

    def _consumer(self, site: SiteId, exchange: ExchangeId, group: GroupId) -> Consumer | None:
        node = self.world.nodes.get(site)
        return (
            node.dataflow.exchanges.consumers.get((exchange, group)) if node is not None else None
        )

    def _apart(self, view: View) -> None:
        for task in view.tasks():
            shape, domains = self.world.shape.under(view), self.world.controller.roster.domains
            stage = shape.stages[task[0]]
            replicas = [s for s in view.group(task).staying if s in domains]
            pairs = [(replicas[:n], s) for n, s in enumerate(replicas)]
            if not all(may_join(stage, others, site, domains) for others, site in pairs):
                raise Violation(
                    f"task {task}: two replicas in one {stage.guard.failure_domain}: {view}"
                )

    def _not_exposed_by_moves(self, view: View) -> None:
        """As long as no site has died, all replicas that are wanted are there."""
        controller = self.world.controller
        died = any(reason != EMPTIED for reason in controller.dead.values())
        if died or view.guards or not controller.running:
            return
        for task in view.tasks():
            group, guard = view.group(task), controller.shape.stages[task[0]].guard
            if len(group.replicas) + len(group.standbys) < guard.wanted:
                raise Violation(f"task {task} lacks a replica, and no site has died: {view}")

    def _nothing_lost(self, view: View) -> None:
        """For every epoch that a live replica lacks, a live replica of the producer holds the
        bundle, or will make it."""
        for exchange, stage in enumerate(self.world.shape.consumer_of):
            source = self.world.shape.producer_of[exchange]
            producers_of = {
                GroupId(i): list(self._producers(view, exchange, (source, GroupId(i))))
                for i in range(len(view.groups[source]))
            }
            for j, group in enumerate(view.groups[stage]):
                for site in group.replicas:
                    consumer = self._consumer(site, ExchangeId(exchange), GroupId(j))
                    if consumer is None:
                        continue
                    for i, received in consumer.received.items():
                        producers = producers_of[i]
                        if producers and not any(
                            _holds(p, GroupId(j), received) for p in producers
                        ):
                            raise Violation(
                                f"site {site} has epoch {received} of producer {i} on exchange "
                                f"{exchange}, and no live producer has the next one"
                            )

    def _producers(self, view: View, exchange: int, task: TaskId) -> Iterator[Producer]:
        for site in view.group(task).replicas:
            node = self.world.nodes.get(site)
            found = (
                node.dataflow.exchanges.producers.get((ExchangeId(exchange), task[1]))
                if node
                else None
            )
            if found is not None:
                yield found

    # --- at the end -----------------------------------------------------------------------------

    def end(self, flow: str, rows_in: int) -> None:
        """Check that the flow ended with exactly the right rows, or stopped for a good reason."""
        world = self.world
        if world.error is not None:
            self._stopped_rightly(world.error)
        elif world.poisoned:
            raise Violation("the flow ended although a row could not be processed")
        elif world.controller.state is not FlowPhase.DONE:
            raise Violation(f"the flow has not ended: {world.describe()}")
        if world.ledger.known is None or not world.ledger.known.ended:
            raise Violation("the flow has ended, and that was not committed")
        for sink, right in expected(flow, rows_in).items():
            found = in_order(world.result(sink))
            if world.error is None and not found.equals(right):
                raise Violation(
                    f"sink {sink!r}: {found.num_rows} rows instead of {right.num_rows}"
                    if found.num_rows != right.num_rows
                    else f"sink {sink!r}: wrong rows"
                )

    def _stopped_rightly(self, error: Exception) -> None:
        if isinstance(error, SiteLostError) and self.world.exceeded:
            return
        if isinstance(error, OperatorError) and self.world.poisoned:
            return
        raise Violation(f"the flow stopped without a reason: {error}") from error


def _holds(producer: Producer, consumer: GroupId, received: Epoch) -> bool:
    lane = producer.lanes.get(consumer)
    if lane is None:
        return False
    if producer.made <= received:
        return True
    return bool(lane.kept) and lane.kept[0].epoch <= received + 1
