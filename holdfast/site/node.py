"""A site without its sockets: the machines, the tasks, and what goes between them.

Messages become events for the machines (`Dataflow`, and on some sites `Sequencer`). Their effects
become messages, or orders that wait in a queue. The runner of a node (`Site` on asyncio, the
simulator in virtual time) delivers messages to it, has it execute one order at a time, and in
between has it read its sources and send parts of what it hands over.

The node's components each have one concern: `Sequencing`, `Sourcing` (sources), `Serving` (readers
of sinks), `Transfers` (hand-overs), `ReplicaReports`, `Ending`. `holdfast.net.protocol` says which
of them receives a message.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol, assert_never

import pyarrow as pa

from holdfast.api.options import Options
from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import (
    AbandonHandOver,
    AskLog,
    AskRecords,
    BeginTask,
    CloseTask,
    DiscardState,
    FollowEpoch,
    HandOver,
    IngestEpochs,
    OpenTask,
    ProcessBundles,
    ReceiveState,
    RefuseCheckpoint,
    ReportDelivered,
    ReportFinished,
    ReportJoinFailed,
    ReportMissed,
    ReportReplica,
    SendAck,
    SendBundle,
    SiteEffect,
    StoreState,
    TellLog,
)
from holdfast.core.events import (
    AckArrived,
    BundleArrived,
    ChainJoined,
    LogAsked,
    LogTold,
    PeerConnected,
    PeerLost,
    RecordArrived,
    SinkDurable,
    SiteEvent,
    ViewCommitted,
)
from holdfast.core.ids import FIRST, NO_EPOCH, Epoch, GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import View
from holdfast.core.records import EpochRecord
from holdfast.core.sequencer import Sequencer
from holdfast.net import bundles, protocol, wire
from holdfast.net.bundles import Frames
from holdfast.net.checks import Checks
from holdfast.net.protocol import Receiver
from holdfast.plan.planner import Plan, shape
from holdfast.site.acks import AckQueue
from holdfast.site.checkpoints import CheckpointWriter, Stores
from holdfast.site.ending import Ending
from holdfast.site.metrics import OutputGaps, quantiles
from holdfast.site.orders import Order, OrderQueue
from holdfast.site.replica_reports import ReplicaReports
from holdfast.site.sequencing import Sequencing
from holdfast.site.serving import Serving
from holdfast.site.sourcing import Sourcing
from holdfast.site.spill import Spill
from holdfast.site.stages import SiteStages, TaskRunner
from holdfast.site.standby_checkpoints import StandbyCheckpoints
from holdfast.site.transfers import Transfers

log = logging.getLogger("holdfast.site")

NO_BODY = memoryview(b"")


class Transport(Protocol):
    """How a node reaches others. It drops what it cannot send; the other side asks again."""

    def send(self, site: SiteId, message: wire.Message, body: list[Any] | None = None) -> None: ...

    def tell(self, message: wire.Message) -> None:
        """Send a message to the controller."""


class Codec:
    """How the bundles of a node become bytes, and back. (The simulator's nodes share a process and
    need no bytes: see `holdfast.lab.sim`.)"""

    def pack(self, frames: Frames) -> list[Any]:
        return bundles.packed(frames)

    def unpack(self, message: wire.Bundle, body: memoryview, schema: pa.Schema) -> Frames:
        return bundles.decode(message, body, schema)


class SiteNode:
    """One site of a flow."""

    def __init__(
        self,
        plan: Plan,
        site: SiteId,
        options: Options,
        transport: Transport,
        now: Callable[[], float] = time.monotonic,
        codec: Codec | None = None,
        runner: type[TaskRunner] = TaskRunner,
        incarnation: str = "",
        spill: Spill | None = None,
        checkpoint_writer: CheckpointWriter | None = None,
    ) -> None:
        self.plan, self.site, self.options = plan, site, options
        self._transport, self._now, self._spill = transport, now, spill
        self._codec = codec or Codec()
        self.view: View | None = None
        self.term = 0
        """The latest term in which a leader has given this site orders."""
        stage_writer = checkpoint_writer if options.store_every_ms else None
        self.stages = SiteStages(plan, site, options, incarnation, runner, stage_writer)
        self.stages.send = transport.send
        shaped = shape(plan, options.partitions)
        self._sinks = [StageId(s.id) for s in plan.sinks]
        self._checks = Checks(plan, shaped, options.window)
        begun = Epoch(plan.restore_point.epochs - 1) if plan.restore_point else NO_EPOCH
        self.dataflow = Dataflow(site, shaped, options.window, begun)
        self.sourcing = Sourcing(
            self.stages, self.dataflow, options, now, transport.send, self._to_sequencer
        )
        self.sequencing = Sequencing(plan, site, options, begun, now, self._to, self._publish)
        self.transfers = Transfers(
            plan, self.stages, self.dataflow, self.sourcing, now, transport.send, self._handle
        )
        self.reports = ReplicaReports(
            site, self.stages, self.dataflow, self.sequencing, transport.tell
        )
        self.stores = Stores(checkpoint_writer)
        self.serving = Serving(
            self.stages.egress,
            transport.send,
            lambda: self.dataflow.records.last,
            self._after_reading,
        )
        self.ending = Ending(
            site, self.stages, self.dataflow, self.serving, self.stores, now, transport.tell
        )
        self.orders = OrderQueue()
        self._acks = AckQueue(options.window)
        self._working = False
        self._gaps = OutputGaps()
        self._standby_checkpoints = StandbyCheckpoints(
            self.stages, self.dataflow, self.transfers, self._handle
        )
        self._handlers = protocol.handlers(
            {
                Receiver.NODE: self,
                Receiver.SEQUENCING: self.sequencing,
                Receiver.SOURCING: self.sourcing,
                Receiver.SERVING: self.serving,
                Receiver.TRANSFERS: self.transfers,
            }
        )

    @property
    def finished(self) -> bool:
        return self.ending.finished

    @property
    def sequencer(self) -> Sequencer | None:
        return self.sequencing.sequencer

    # --- the view and connections ---------------------------------------------------------------

    def obeys(self, order: wire.Message) -> bool:
        """Whether an order of a leader counts: not if a later leader has given one. Views are
        ordered by `View.replaces` instead."""
        term = protocol.term_of(order)
        if term is None:
            return True
        if term < self.term and not isinstance(order, wire.NewView):
            log.info("site %s: %s of term %s is void", self.site, type(order).__name__, term)
            return False
        self.term = max(self.term, term)
        return True

    def on_view(self, view: View) -> None:
        """Act on a view, unless a later one came before."""
        known = self.view
        if not view.replaces(known):
            return
        self.view = view
        self.ending.on_view()
        self.reports.on_view(view)
        first = view.group(FIRST)
        # Not only in the first view: all is placed again if a site is lost before the start.
        from_start = self.site in view.sequencers and not first.joined_view_of(self.site)
        if from_start and self.sequencer is None:
            self.sequencing.open()
        self.stages.on_view(view)
        self._handle(ViewCommitted(view))
        self.stages.on_view(view)  # tasks that it opened
        self.serving.on_view(view, self.site, self._sinks)
        self.sourcing.announce_again()
        self.sourcing.ask_for_push_batches()
        self.sequencing.on_view(view)
        joins = self.site in first.joining and self.dataflow.tasks[FIRST].has_state
        if joins and known is not None and known.sequencers[-1:] != view.sequencers[-1:]:
            self.sequencing.waits_for_chain = True  # the replica it was chained to is gone
        self.sequencing.take_early()
        self.sequencing.join_chain(view)
        if known is not None:
            self.reports.on_leaders_changed(known, view)

    def on_connected(self, site: SiteId) -> None:
        """There is a connection to another site. What was under way on an earlier one may be lost:
        ask again, and repeat what the other side does not ask for."""
        self._handle(PeerConnected(site))
        if self.view is None:
            return
        self._transport.send(site, wire.RecordsAfter(self.dataflow.lacks_records()))
        self.sequencing.on_connected(site)
        if site == self.view.sequencers[0]:
            self.sourcing.announce_again()
            self._apply_all(self.dataflow.delivered())
        if site == self.view.sequencers[-1]:
            self.sequencing.join_chain(self.view)
        self.serving.on_connected(site)
        self.sourcing.ask_for_push_batches()

    def on_lost(self, site: SiteId) -> None:
        self._acks.forget(site)
        self._handle(PeerLost(site))

    def report_again(self) -> None:
        """Repeat what a controller may have missed, or a new one must know."""
        if self.view is not None:
            self.ending.repeat()
            self.reports.repeat()
        if self.sequencer is not None:
            for record in self.sequencer.history:
                self._transport.tell(wire.Cut(record))

    # --- messages -------------------------------------------------------------------------------

    def receive(self, site: SiteId, message: wire.Message, body: memoryview) -> None:
        """Handle a message from another site, or from the controller. An invalid one is a
        `ProtocolError`, and has changed nothing."""
        if site != self.site:
            protocol.validate(self._checks, message, body)
        protocol.dispatch(self._handlers, site, message, body)

    def on_bundle(self, site: SiteId, message: wire.Bundle, body: memoryview) -> None:
        schema = self.plan.exchanges[message.key.exchange].schema
        self._handle(BundleArrived(message.key, self._codec.unpack(message, body, schema)))

    def on_acks(self, site: SiteId, message: wire.Acks) -> None:
        for ack in message.acks:
            self._handle(AckArrived(site, ack))

    def on_log_request(self, site: SiteId, message: wire.LogRequest) -> None:
        self._handle(LogAsked(site, message.query))

    def on_log_reply(self, site: SiteId, message: wire.LogReply) -> None:
        self._handle(LogTold(site, message.query, message.log))

    def on_record(self, site: SiteId, message: wire.Record) -> None:
        self._handle(RecordArrived(message.record))

    def on_records_after(self, site: SiteId, message: wire.RecordsAfter) -> None:
        for record in self.dataflow.records.after(message.epoch):
            self._transport.send(site, wire.Record(record))

    def on_join_chain(self, site: SiteId, message: wire.JoinChain) -> None:
        counted = self.view.group(FIRST).joined_view_of(site) if self.view is not None else None
        if counted == message.joined_view:
            self.sequencing.handle(ChainJoined(site, message.has))

    def on_sequencer_copy(self, site: SiteId, message: wire.SequencerCopy) -> None:
        if self.view is not None and self.sequencing.on_state(message.state):
            for record in message.state.history:
                self._handle(RecordArrived(record))
            self.sequencing.join_chain(self.view)

    def on_chained(self, site: SiteId, message: wire.Chained) -> None:
        if self.sequencing.on_chained():
            self.reports.report_if_whole(FIRST)

    def on_delivered(self, site: SiteId, message: wire.Delivered) -> None:
        sink = StageId(message.sink)
        egress = self.stages.egress(sink)
        if egress is not None:
            self._gaps.delivered(self._now())
            if not egress.leads:
                egress.drop_durable(message.durable)
                self._handle(SinkDurable((sink, GroupId(0)), message.safe))
        self.sequencing.on_delivered(sink, message.epoch)

    def on_push_counted(self, site: SiteId, message: wire.PushCounted) -> None:
        reader = self.stages.pushed().get(message.source)
        if reader is not None and reader.follows(site, message.rank):
            self.reports.on_push_counted(message.source)

    def on_recorded(self, site: SiteId, message: wire.Recorded) -> None:
        if self.stages.recorded is not None:
            self.stages.recorded = max(self.stages.recorded, message.epoch)

    def on_retain(self, site: SiteId, message: wire.Retain) -> None:
        self._handle(message.order)

    def on_catch_up(self, site: SiteId, message: wire.CatchUp) -> None:
        if self.view is None or message.term < self.view.term:
            return
        if not self.reports.refuses(message.order):
            self._handle(message.order)

    def on_store(self, site: SiteId, message: wire.Store) -> None:
        if self.ending.stores_final:
            return
        self.stores.abandon_all()
        if self.view is not None:
            self._handle(message.order)

    def ask(
        self, message: wire.Ask, reply: Callable[[wire.Answer, list[Any]], None], leader: Any
    ) -> None:
        """Answer the reader of a sink."""
        self.serving.ask(message, reply, leader)

    def _after_reading(self) -> None:
        self.ending.advance()

    # --- work -----------------------------------------------------------------------------------

    def work(self) -> Order | None:
        """Execute and return the oldest order that is ready; None if there is none."""
        order = self.orders.pop_first(self.stages.ready)
        if order is not None:
            self.execute(order)
        return order

    def execute(self, order: Order) -> None:
        if order.task in self.stages.tasks:
            begun = self._now()
            processed = self.stages.execute(order)
            self._working = True
            self._handle(replace(processed, seconds=self._now() - begun))
            self._working = False

    @property
    def acks_wait(self) -> bool:
        return self._acks.waits

    @property
    def acks_are_due(self) -> bool:
        return self._acks.is_due

    def flush(self) -> None:
        """Send the acks that are queued."""
        for site, acks in self._acks.take().items():
            self._to(site, wire.Acks(acks))

    @property
    def hands_over(self) -> bool:
        """Whether state is being handed over or stored."""
        return bool(self.transfers.outgoing or self.stores)

    def hand_over(self) -> int:
        """Send the next part of what is being handed over, or store it; return its size, -1 if
        there is none."""
        size = self.transfers.send_part()
        if size is None:
            size = self.stores.write_part()
        return -1 if size is None else size

    def read_ahead(self, only_leading: bool = False) -> None:
        """Called periodically: read what the sources have, and take checkpoints."""
        if not self.finished:
            self.stages.replay_results()
            self._standby_checkpoints.take_due(self._now())
            self.sourcing.read_ahead(only_leading)
            self.ending.advance()

    def retry_stalled(self) -> None:
        """Called periodically: have a task that has not moved since subscribe to other replicas,
        and look after sinks."""
        self._apply_all(self.dataflow.retry_stalled())
        self.sourcing.tell_positions()
        if not self.finished:
            self.stages.flush_notes()
            self.serving.flush_notes()
            self.ending.advance()

    def make_room(self) -> None:
        """Called periodically: spill kept bundles to disk if they are many."""
        if self._spill is not None:
            self._spill.make_room(
                k for p in self.dataflow.exchanges.producers.values() for k in p.kept()
            )

    # --- effects --------------------------------------------------------------------------------

    def _handle(self, event: SiteEvent) -> None:
        self._apply_all(self.dataflow.handle(event))

    def _apply_all(self, effects: list[SiteEffect]) -> None:
        for effect in effects:
            self._apply(effect)

    def _apply(self, effect: SiteEffect) -> None:
        match effect:  # the frequent ones first
            case IngestEpochs() | ProcessBundles():
                self.orders.put(effect)
            case SendBundle():
                self._send_bundle(effect)
            case SendAck():
                # An ack of what was processed asks the producer for nothing.
                self._acks.put(effect.site, effect.ack, lazy=self._working)
            case OpenTask():
                group = effect.view.group(effect.task)
                begins = self.site in group.replicas + group.standbys
                self.stages.open(effect.task, effect.view, begins=begins)
            case BeginTask():
                self._begin_task(effect)
            case CloseTask():
                self._close_task(effect.task)
            case FollowEpoch():
                self.stages.tasks[effect.task].follow(effect.record)
            case AskLog():
                self._to(effect.site, wire.LogRequest(effect.query))
            case TellLog():
                self._to(effect.site, wire.LogReply(effect.query, effect.log))
            case AskRecords():
                assert self.view is not None
                self._to(self.view.sequencers[-1], wire.RecordsAfter(effect.after))
            case HandOver():
                self.transfers.begin(effect)
            case AbandonHandOver():
                self.transfers.abandon(effect.task, effect.joiner)
            case RefuseCheckpoint():
                refused = (effect.task, effect.joined_view, effect.offered, effect.has)
                self._to(effect.sender, wire.HandOverRefused(*refused))
            case ReceiveState():
                self._receive_state(effect)
            case DiscardState():
                self.transfers.discard_state(effect.task)
            case StoreState():
                self.stores.begin(effect, self.stages.tasks[effect.task])
            case ReportMissed():
                reason = f"site {self.site} was told of it too late"
                self._transport.tell(wire.NotStored(effect.task, effect.epoch, reason, True))
            case ReportJoinFailed():
                self.reports.fail(effect.task, effect.joiner, effect.reason)
            case ReportDelivered():
                self._report_delivered(effect)
            case ReportReplica():
                self.reports.report(effect)
            case ReportFinished():
                self.ending.finish()
            case _:
                assert_never(effect)

    def _begin_task(self, effect: BeginTask) -> None:
        self.transfers.incoming.pop(effect.task, None)
        self.transfers.empty(effect.task)
        if effect.at_start and self.plan.restore_point is not None:
            self.stages.tasks[effect.task].begin(self.plan.restore_point)

    def _close_task(self, task: TaskId) -> None:
        self.stores.abandon(task)
        self.ending.on_closed(task)
        self.stages.shut(task)
        self.transfers.incoming.pop(task, None)
        self.reports.closed(task)
        if task == FIRST:
            self.sequencing.close()
        self.orders.drop_task(task)

    def _receive_state(self, effect: ReceiveState) -> None:
        if not effect.checkpoint:
            self.reports.begin_again(effect.task)
        self.transfers.receive_state(effect)

    def _send_bundle(self, effect: SendBundle) -> None:
        if effect.site == self.site:
            self._handle(BundleArrived(effect.key, effect.bundle))
            return
        message, body = bundles.encode(effect.key, effect.bundle, self._codec.pack)
        self._transport.send(effect.site, message, body)

    def _report_delivered(self, effect: ReportDelivered) -> None:
        assert self.view is not None
        egress = self.stages.egress(effect.sink)
        assert egress is not None
        message = wire.Delivered(
            effect.sink, effect.epoch, Epoch(egress.durable), Epoch(egress.safe)
        )
        replicas = self.view.group((effect.sink, GroupId(0))).all
        for site in {self.view.sequencers[0], *replicas}:
            self._to(site, message)

    def _publish(self, record: EpochRecord) -> None:
        assert self.view is not None
        self._transport.tell(wire.Cut(record))
        for site in self.view.members:
            if site != self.site:
                self._transport.send(site, wire.Record(record))
        self._handle(RecordArrived(record))

    def _to_sequencer(self, message: wire.Message) -> None:
        assert self.view is not None
        self._to(self.view.sequencers[0], message)

    def _to(self, site: SiteId, message: wire.Message) -> None:
        """Send a message to any site, this one included."""
        if site == self.site:
            self.receive(site, message, NO_BODY)
        else:
            self._transport.send(site, message)

    # --- metrics --------------------------------------------------------------------------------

    def metrics(self) -> dict[str, Any]:
        return {
            "site": self.site,
            "held_bundles": sum(p.held() for p in self.dataflow.exchanges.producers.values()),
            "kept_bytes": self._spill.kept_bytes if self._spill else None,
            "spilled_bytes": self._spill.spilled_bytes if self._spill else None,
            "spill_error": self._spill.error if self._spill else None,
            "stages": self.stages.metrics(),
            "latency_ms": quantiles(list(self.sequencing.latency_ms)),
            "output_gap_ms": self._gaps.longest_ms(self._now()),
            "copying": self.transfers.metrics(),
            "finished_epochs": [
                [*task, u.finished, u.has_state] for task, u in self.dataflow.tasks.items()
            ],
        }

    def behind(self) -> tuple[SiteId, int] | None:
        """The replica elsewhere that this site keeps the most for, and how many bytes."""
        return self.dataflow.exchanges.slowest()
