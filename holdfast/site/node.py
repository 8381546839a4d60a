"""A site without its sockets: the machines, the tasks, and what goes between them.

Messages become events for the machines (`Dataflow`, and on some sites `Sequencer`); their effects
become messages, and orders that wait in a heap. Whoever runs a node (`Site` on asyncio, the
simulator in virtual time) delivers messages to it, has it carry out one order at a time, and has
it read its sources and send what it hands over in between.
"""

from __future__ import annotations

import heapq
import itertools
import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import replace
from functools import partial
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
    BlocksAvailable,
    BundleArrived,
    CatchUpOrdered,
    ChainJoined,
    CheckpointDue,
    DrainRequested,
    HandOverBegun,
    LogAsked,
    LogTold,
    PauseRequested,
    PeerConnected,
    PeerLost,
    RecordArrived,
    RecordPassed,
    RetentionOrdered,
    SinkDurable,
    SiteEvent,
    SplitEnded,
    SplitIdle,
    StoreOrdered,
    ViewCommitted,
)
from holdfast.core.ids import FIRST, NO_EPOCH, Epoch, ExchangeId, GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import View
from holdfast.core.records import EpochRecord
from holdfast.core.replica import State
from holdfast.core.sequencer import Sequencer
from holdfast.core.upstream import Log
from holdfast.errors import ProtocolError
from holdfast.net import bundles, wire
from holdfast.net.bundles import Frames
from holdfast.net.checks import Checks
from holdfast.plan.planner import Plan, shape
from holdfast.site.checkpoint_schedule import CheckpointSchedule, Progress
from holdfast.site.checkpoints import CheckpointWriter, Storing
from holdfast.site.handover import Checkpoint, Incoming, Outgoing
from holdfast.site.sequencing import Sequencing
from holdfast.site.serving import Serving
from holdfast.site.sourcing import Sourcing
from holdfast.site.spill import Spill
from holdfast.site.stages import SiteStages, TaskRunner

log = logging.getLogger("holdfast.site")

Order = IngestEpochs | ProcessBundles

READERS_S = 10.0
"""A flow that is stopped and stored waits so long, at the most, for readers that are there."""


class Transport(Protocol):
    """How a node reaches others. What cannot be sent is dropped: the other side will ask again."""

    def send(self, site: SiteId, message: wire.Message, body: list[Any] | None = None) -> None: ...

    def tell(self, message: wire.Message) -> None:
        """Say something to the controller."""


class Codec:
    """How the bundles of a node become bytes, and back. (Those of nodes in one process need not:
    see `holdfast.lab.sim`.)"""

    def pack(self, frames: Frames) -> list[Any]:
        return bundles.packed(frames)

    def unpack(self, message: wire.Bundle, body: memoryview, schema: pa.Schema) -> Frames:
        return bundles.decode(message, body, schema)


class Node:
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
        self._checkpoint_writer = checkpoint_writer
        self.storing: dict[TaskId, Storing] = {}
        self._final: dict[TaskId, wire.TaskFiles] = {}
        """The tasks that are stored as the flow is stopped with them."""
        self._finalizing: set[TaskId] = set()
        """Those that are on their way there."""
        self._finishes = False
        """Whether nothing is left to do here in this view but to store tasks."""
        self._codec = codec or Codec()
        self.view: View | None = None
        self.term = 0
        """The last one in which a leader has given this site orders."""
        self.stages = SiteStages(
            plan,
            site,
            options,
            incarnation,
            runner,
            checkpoint_writer if options.store_every_ms else None,
        )
        self.stages.send = transport.send
        shaped = shape(plan, options.partitions)
        self._sinks = [StageId(s.id) for s in plan.sinks]
        self._over = False
        """Whether nothing is left to do here, but that somebody reads what is kept."""
        self._over_since = 0.0
        self._checks = Checks(plan, shaped, options.window)
        self._begun = Epoch(plan.restore_point.epochs - 1) if plan.restore_point else NO_EPOCH
        self.dataflow = Dataflow(site, shaped, options.window, self._begun)
        self.sourcing = Sourcing(
            self.stages, self.dataflow, options, now, transport.send, self._to_sequencer
        )
        self.serving = Serving(self.stages.egress, transport.send, lambda: self.dataflow.last)
        self.sequencing = Sequencing(plan, site, options, self._begun, now, self._to, self._publish)
        self.orders: list[tuple[int, int, int, Order]] = []
        self.outgoing: dict[tuple[TaskId, SiteId], Outgoing] = {}
        self.incoming: dict[TaskId, Incoming] = {}
        self._failed_replicas: dict[tuple[TaskId, SiteId], tuple[int, str]] = {}
        """Hand-overs from or to here that failed: since which view that replica joins, and why. The
        controller that was told may be gone before it has committed a view that gives the replica
        up, and nothing else would tell the next one that nobody is handing over any more."""
        self.finished = False
        self.freeze_ms = 0.0
        self._gaps = _Gaps()
        self._ties = itertools.count()
        self._acks: dict[SiteId, dict[tuple[int, int, int], wire.Ack]] = {}
        self._working = self._hasty = False
        self._schedule = CheckpointSchedule()
        self._uncounted: set[TaskId] = set()

    # --- what a shell calls ---------------------------------------------------------------------

    def obeys(self, order: wire.Message) -> bool:
        """Whether an order of a leading control counts: not if a later leader has given one. A view
        of old is told from the others by `View.replaces`."""
        term = wire.term_of(order)
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
        self.view, self.finished, self._over, self._finishes = view, False, False, False
        self._failed_replicas = {
            (task, site): (joined_view, reason)
            for (task, site), (joined_view, reason) in self._failed_replicas.items()
            if self._joined_view_of_joiner(task, site) == joined_view
        }
        # Not only in the first view: all is placed again if a site is lost before the start.
        from_start = self.site in view.sequencers and not view.group(FIRST).joined_view_of(
            self.site
        )
        if from_start and self.sequencer is None:
            self.sequencing.open()
        self.stages.on_view(view)
        self._handle(ViewCommitted(view))
        self.stages.on_view(view)  # tasks that it opened
        self.serving.on_view(view, self.site, self._sinks)
        self.sourcing.announce_again()
        self.sourcing.ask_for_push_batches()
        self.sequencing.on_view(view)
        joins = self.site in view.group(FIRST).joining and self.dataflow.tasks[FIRST].has_state
        if joins and known is not None and known.sequencers[-1:] != view.sequencers[-1:]:
            self.sequencing.waits_for_chain = True  # the replica it was chained to is gone
        self.sequencing.take_early()
        self.sequencing.join_chain(view)

    def retry_stalled(self) -> None:
        """Called every now and then: a task that has not moved since takes from other replicas, and
        sinks are seen to."""
        for effect in self.dataflow.retry_stalled():
            self._apply(effect)
        self.sourcing.tell_positions()
        if not self.finished:
            self.stages.flush_notes()
            self.serving.flush_notes()
            self._after_reading()

    def make_room(self) -> None:
        """Called every now and then: what is kept for others goes to disk if it is much."""
        if self._spill is not None:
            self._spill.make_room(k for p in self.dataflow.producers.values() for k in p.kept())

    def on_connected(self, site: SiteId) -> None:
        """There is a connection to another site. If there was one before, what was on it is lost:
        ask again, and say again, whatever nobody else would repeat."""
        self._handle(PeerConnected(site))
        if self.view is None:
            return
        self._transport.send(site, wire.RecordsAfter(self.dataflow.lacks_records()))
        self.sequencing.on_connected(site)
        if site == self.view.sequencers[0]:
            self.sourcing.announce_again()
            for effect in self.dataflow.delivered():
                self._apply(effect)
        if site == self.view.sequencers[-1]:
            self.sequencing.join_chain(self.view)
        self.serving.on_connected(site)
        self.sourcing.ask_for_push_batches()

    def on_lost(self, site: SiteId) -> None:
        self._acks.pop(site, None)
        self._handle(PeerLost(site))

    def report_again(self) -> None:
        """Say again what a controller may not have heard, or a new one must know."""
        if self.view is not None:
            for message in self._final.values():
                self._transport.tell(message)
            if self.finished:
                self._transport.tell(wire.Finished(self.view.number))
            for task in self.view.tasks_at(self.site):
                held = self.dataflow.tasks[task]
                if held.joined_view:
                    self._tell_if_whole(task)
            for (task, site), (_, reason) in self._failed_replicas.items():
                self._tell_replica(task, site, "failed", reason)
        if self.sequencer is not None:
            for record in self.sequencer.history:
                self._transport.tell(wire.Cut(record))

    def receive(self, site: SiteId, message: wire.Message, body: memoryview) -> None:
        """A message from another site, or from the controller. One that cannot be is a
        `ProtocolError`, and has changed nothing."""
        if site != self.site:
            self._checks.check(message, body)
        match message:
            case wire.Bundle():
                self._on_bundle(message, body)
            case wire.Acks():
                for ack in message.acks:
                    self._handle(_arrived(ack, site))
            case wire.AskLog():
                self._handle(LogAsked(*_ends(message), site, message.joined_view))
            case wire.TellLog():
                line = wire.from_line(message.line)
                log = Log(Epoch(message.after), Epoch(message.upto), message.credit, line)
                self._handle(LogTold(*_ends(message), site, message.joined_view, log))
            case wire.Record():
                self._handle(RecordArrived(message.record))
            case wire.Pass():
                self.sequencing.handle(RecordPassed(message.record))
            case wire.RecordsAfter():
                after = None if message.epoch is None else Epoch(message.epoch)
                for record in self.dataflow.records_after(after):
                    self._transport.send(site, wire.Record(record))
            case wire.JoinChain():
                if (
                    self.view is not None
                    and self.view.group(FIRST).joined_view_of(site) == message.joined_view
                ):
                    self.sequencing.handle(ChainJoined(site, Epoch(message.has)))
            case wire.Chained():
                if self.sequencing.on_chained():
                    self._tell_if_whole(FIRST)
            case wire.SequencerState():
                self._on_sequencer_state(message)
            case wire.Blocks():
                self.sequencing.handle(
                    BlocksAvailable(
                        StageId(message.source), message.split, message.blocks, message.again
                    )
                )
            case wire.SplitState():
                kind = SplitEnded if message.ended else SplitIdle
                at = (StageId(message.source), message.split, message.offset)
                self.sequencing.handle(kind(*at))
            case wire.SplitAt():
                self.sourcing.on_split_at(message)
            case wire.Delivered():
                self._on_delivered(message)
            case wire.Drain():
                self.sequencing.handle(DrainRequested())
            case wire.Pause():
                self.sequencing.handle(PauseRequested(message.paused))
            case wire.Recorded():
                if self.stages.recorded is not None:
                    self.stages.recorded = max(self.stages.recorded, message.epoch)
            case wire.Store():
                self._on_store(message)
            case wire.CatchUp():
                self._on_catch_up(message)
            case wire.Retain():
                self._handle(RetentionOrdered(message.number))
            case wire.HandOverBegin():
                task = (StageId(message.stage), GroupId(message.group))
                self._handle(HandOverBegun(task, site, message, message.joined_view))
            case wire.HandOverState() | wire.HandOverKept() | wire.HandOverHeld():
                incoming = self.incoming.get((StageId(message.stage), GroupId(message.group)))
                if incoming is not None and incoming.donor == site:
                    incoming.take(self.plan, message, body)
            case wire.HandOverEnd():
                self._on_hand_over_end(site, message)
            case wire.PushBatch():
                self.sourcing.on_push_batch(site, message, body)
            case wire.PushHas():
                self.sourcing.on_push_has(site, message)
            case wire.PushCounted():
                self._on_push_counted(message.source)
            case wire.Notes():
                self.serving.on_notes(site, message)
                self._after_reading()
            case wire.NotesKept():
                self.serving.on_kept(site, message)
                self._after_reading()
            case _:
                raise ProtocolError(f"a site does not expect {type(message).__name__}")

    @property
    def acks_wait(self) -> bool:
        """Whether there are acks to be sent, soon at the latest."""
        return bool(self._acks)

    @property
    def acks_are_due(self) -> bool:
        """Whether somebody waits for them: a producer that is to send, or that needs credit."""
        return bool(self._acks) and self._hasty

    def flush(self) -> None:
        """Send the acks that have come together."""
        self._hasty = False
        waiting, self._acks = self._acks, {}
        for site, acks in waiting.items():
            if site == self.site:
                for ack in acks.values():
                    self._handle(_arrived(ack, site))
            else:
                self._transport.send(site, wire.Acks(list(acks.values())))

    def work(self) -> Order | None:
        """Carry out the oldest order that can be, and say which it was; None if there is none."""
        for at, entry in enumerate(sorted(self.orders)):
            if self.stages.ready(entry[-1]):
                self._pop(at, entry)
                self.execute(entry[-1])
                return entry[-1]
        return None

    def execute(self, order: Order) -> None:
        if order.task in self.stages.tasks:
            begun = self._now()
            processed = self.stages.execute(order)
            self._working = True
            self._handle(replace(processed, seconds=self._now() - begun))
            self._working = False

    def _pop(self, at: int, entry: tuple[int, int, int, Order]) -> None:
        if at == 0:
            heapq.heappop(self.orders)
        else:
            self.orders.remove(entry)
            heapq.heapify(self.orders)

    def hand_over(self) -> int:
        """Send the next part of what is being handed over, or have it stored; how many bytes it
        had, -1 if none."""
        for key, outgoing in self.outgoing.items():
            part = outgoing.next()
            if part is None:
                del self.outgoing[key]
                return 0
            message, body = part
            self._transport.send(outgoing.joiner, message, body)
            return sum(memoryview(b).nbytes for b in body or [])
        for task, storing in self.storing.items():
            stored = storing.next()
            if stored is None:
                del self.storing[task]
            return stored or 0
        return -1

    # --- effects --------------------------------------------------------------------------------

    def _handle(self, event: SiteEvent) -> None:
        for effect in self.dataflow.handle(event):
            self._apply(effect)

    def _apply(self, effect: SiteEffect) -> None:
        match effect:
            case OpenTask():
                group = effect.view.group(effect.task)
                begins = self.site in group.replicas + group.standbys
                self.stages.open(effect.task, effect.view, begins=begins)
            case BeginTask():
                self.incoming.pop(effect.task, None)
                self._empty(effect.task)
                if effect.at_start and self.plan.restore_point is not None:
                    self.stages.tasks[effect.task].begin(self.plan.restore_point)
            case CloseTask():
                self._abandon_store(effect.task)
                self.stages.shut(effect.task)
                self.incoming.pop(effect.task, None)
                self._uncounted.discard(effect.task)
                if effect.task == FIRST:
                    self.sequencing.close()
                self.orders = [o for o in self.orders if o[-1].task != effect.task]
                heapq.heapify(self.orders)
            case FollowEpoch():
                self.stages.tasks[effect.task].follow(effect.record)
            case IngestEpochs() | ProcessBundles():
                self._enqueue(effect)
            case SendBundle():
                self._send_bundle(effect)
            case SendAck():
                self._put_ack(effect)
            case AskLog():
                asked = (effect.exchange, effect.producer, effect.consumer, effect.joined_view)
                self._to(effect.site, wire.AskLog(*asked))
            case TellLog():
                asked = (effect.exchange, effect.producer, effect.consumer, effect.joined_view)
                after, upto, credit, line = effect.log
                told = wire.TellLog(*asked, after, upto, credit, wire.line(line))
                self._to(effect.site, told)
            case AskRecords():
                assert self.view is not None
                self._to(self.view.sequencers[-1], wire.RecordsAfter(effect.after))
            case HandOver():
                self._begin_hand_over(effect)
            case StoreState():
                if self._checkpoint_writer is not None:
                    runner = self.stages.tasks[effect.task]
                    self.storing[effect.task] = Storing(effect, runner, self._checkpoint_writer)
            case ReportMissed():
                reason = f"site {self.site} was told of it too late"
                missed = wire.NotStored(*effect.task, effect.epoch, reason, True)
                self._transport.tell(missed)
            case AbandonHandOver():
                self._abandon(effect.task, effect.joiner)
            case ReceiveState():
                self._receive_state(effect)
            case DiscardState():
                self._discard_state(effect.task)
            case ReportJoinFailed():
                self._fail_replica(effect.task, effect.joiner, effect.reason)
            case ReportDelivered():
                self._report_delivered(effect)
            case ReportReplica():
                self._report_replica(effect)
            case ReportFinished():
                self._finish()
            case _:
                assert_never(effect)

    def _put_ack(self, effect: SendAck) -> None:
        """An ack of what was processed only lets the producers forget, which can wait until there
        is another one. The others ask for something."""
        waiting = self._acks.setdefault(effect.site, {})
        key = (effect.exchange, effect.producer, effect.consumer)
        self._hasty |= not self._working or key in waiting or self.options.window < 4
        waiting[key] = wire.Ack(
            *key,
            effect.joined_view,
            effect.received,
            effect.credit,
            effect.take,
            effect.finished,
            effect.checksum,
            effect.levels,
            tuple(wire.line(line) for line in effect.lines),
        )

    def ask(
        self, message: wire.Ask, reply: Callable[[wire.Answer, list[Any]], None], leader: Any
    ) -> None:
        """Somebody reads a sink."""
        if self.serving.ask(message, reply, leader):
            self._after_reading()

    def _after_reading(self) -> None:
        """There may be nothing left in a sink."""
        if self._over:
            self._finish()

    def _finish(self) -> None:
        """Nothing is left to do here; wait for sinks that have yet to make it durable, and for
        those who read what is kept. If it is stored they can read it later, so only those are
        waited for that are about to."""
        assert self.view is not None
        egresses = [r.egress for r in self.stages.tasks.values() if r.egress is not None]
        stores = self._checkpoint_writer is not None and not self.dataflow.ended
        if not self._over:
            self._over_since = self._now()
        patient = not stores or self._now() - self._over_since < READERS_S
        # A reader that is not told that it has everything would ask again, and find nobody.
        read = [
            egress.is_replayed
            and (egress.is_drained or not patient or (stores and not egress.is_attended))
            for egress in egresses
        ]
        done = [ready and e.finish() for ready, e in zip(read, egresses, strict=True)]
        self._over = self.serving.owes_answers or not all(done)
        if self._over:
            self._finishes = False
            return
        if not self._finishes:
            self._finishes = True
            self.stages.close_sinks()  # before it is stored how far they reach
        if stores and self._is_to_store():
            return
        self.finished = True
        self.stages.close_sources()
        self._transport.tell(wire.Finished(self.view.number))

    def _is_to_store(self) -> bool:
        """Whether tasks are led here that are not stored as the flow is stopped with them; they are
        from now on."""
        assert self.view is not None and self._checkpoint_writer is not None
        assert self.dataflow.last is not None
        led = [u for u in self.stages.tasks if self.view.group(u).led_by(self.site)]
        missing = [u for u in led if u not in self._final]
        for task in (u for u in missing if u not in self._finalizing):
            self._abandon_store(task)  # of a checkpoint that the last one replaces
            self._finalizing.add(task)
            order = StoreState(task, self.dataflow.last, None)
            runner = self.stages.tasks[task]
            self.storing[task] = Storing(order, runner, self._checkpoint_writer, self._on_stored)
        return bool(missing)

    def _on_stored(self, message: wire.TaskFiles) -> None:
        task = (StageId(message.stage), GroupId(message.group))
        self._finalizing.discard(task)
        self._final[task] = message
        self._transport.tell(message)
        if self._finishes:
            self._finish()

    def _enqueue(self, order: Order) -> None:
        # The oldest epoch first; within it the stage nearest to the sinks.
        heapq.heappush(self.orders, (order.first, -order.task[0], next(self._ties), order))

    def _to(self, site: SiteId, message: wire.Message) -> None:
        if site == self.site:
            self.receive(site, message, memoryview(b""))
        else:
            self._transport.send(site, message)

    def _send_bundle(self, effect: SendBundle) -> None:
        to = (effect.exchange, effect.epoch, effect.producer, effect.consumer)
        joined_view, part, last = effect.joined_view, effect.part, effect.last
        if effect.site == self.site:
            self._handle(BundleArrived(*to, joined_view, last, effect.bundle, part))
            return
        message, body = bundles.encode(
            effect.bundle, *to, joined_view=joined_view, part=part, last=last, pack=self._codec.pack
        )
        self._transport.send(effect.site, message, body)

    def _on_bundle(self, message: wire.Bundle, body: memoryview) -> None:
        schema = self.plan.exchanges[message.exchange].schema
        frames = self._codec.unpack(message, body, schema)
        self._handle(
            BundleArrived(
                ExchangeId(message.exchange),
                Epoch(message.epoch),
                GroupId(message.producer),
                GroupId(message.consumer),
                message.joined_view,
                message.last,
                frames,
                message.part,
            )
        )

    # --- new replicas -----------------------------------------------------------------------------

    def _on_catch_up(self, message: wire.CatchUp) -> None:
        if self.view is None or message.term < self.view.term:
            return
        task, joiner = (StageId(message.stage), GroupId(message.group)), SiteId(message.joiner)
        failed = self._failed_replicas.get((task, joiner))
        if failed is not None:  # some of its state may be there: it must join again
            self._tell_replica(task, joiner, "failed", failed[1])
        else:
            self._handle(CatchUpOrdered(task, joiner))

    def _begin_hand_over(self, effect: HandOver) -> None:
        begun = self._now()
        outgoing = Outgoing(effect, self.stages.tasks[effect.task])
        self.outgoing[effect.task, effect.joiner] = outgoing
        self.freeze_ms = max(self.freeze_ms, (self._now() - begun) * 1e3)

    def checkpoint(self) -> None:
        """Called every now and then: have tasks whose time has come give their state to those that
        stand by. One that is still on its way is not overtaken by the next."""
        now = self._now()
        for task, runner in self.stages.tasks.items():
            standbys = self.view.group(task).standbys if self.view is not None else ()
            held = self.dataflow.tasks[task]
            if not standbys or not held.computes:
                continue
            if any((task, site) in self.outgoing for site in standbys):
                continue
            so_far = Progress(now, runner.epoch, self._work_s())
            is_covered = partial(self.dataflow.is_covered, task)
            if self._schedule.is_due(task, runner.guard, so_far, is_covered):
                runner.checkpoints += 1
                self._handle(CheckpointDue(task))

    def _work_s(self) -> float:
        """How long tasks here have been at work that would go on elsewhere from checkpoints."""
        return sum(r.work_s for r in self.stages.tasks.values() if r.guard.recovery_ms)

    def _on_store(self, message: wire.Store) -> None:
        if self._finalizing or self._final:
            return  # the flow is being stopped
        for task in list(self.storing):
            self._abandon_store(task)
        after = None if message.after is None else Epoch(message.after)
        if self.view is not None:
            self._handle(StoreOrdered(Epoch(message.epoch), after))

    def _abandon_store(self, task: TaskId) -> None:
        self._finalizing.discard(task)
        storing = self.storing.pop(task, None)
        if storing is not None:
            storing.close()

    def _abandon(self, task: TaskId, joiner: SiteId) -> None:
        outgoing = self.outgoing.pop((task, joiner), None)
        if outgoing is not None:
            outgoing.close()

    def _receive_state(self, effect: ReceiveState) -> None:
        task = effect.task
        if effect.checkpoint:
            runner = self.stages.tasks[task]
            self.incoming[task] = Checkpoint(effect.offer, effect.sender, runner)
            return
        self._failed_replicas.pop((task, self.site), None)
        self._empty(task)
        self.incoming[task] = Incoming(effect.offer, effect.sender, self.stages.tasks[task])

    def _discard_state(self, task: TaskId) -> None:
        self.incoming.pop(task, None)

    def _on_hand_over_end(self, site: SiteId, message: wire.HandOverEnd) -> None:
        task = (StageId(message.stage), GroupId(message.group))
        incoming = self.incoming.get(task)
        if incoming is not None and incoming.donor == site:
            assert self.view is not None
            if isinstance(incoming, Checkpoint) and incoming.begin.after is None:
                self._empty(task)
                incoming.put_into(self.stages.tasks[task])
            installed = incoming.install(task)
            del self.incoming[task]
            self._handle(installed)
            self.stages.on_view(self.view)
            self.sourcing.ask_for_push_batches()

    def _empty(self, task: TaskId) -> None:
        """Whatever was put into it before is void."""
        assert self.view is not None
        self.stages.shut(task)
        self.stages.open(task, self.view, begins=False)
        self.stages.on_view(self.view)

    def _joined_view_of_joiner(self, task: TaskId, site: SiteId) -> int | None:
        """Since which view a replica joins; None if it does not."""
        assert self.view is not None
        group = self.view.group(task)
        return group.joined_view_of(site) if site in group.joining else None

    def _fail_replica(self, task: TaskId, site: SiteId, reason: str) -> None:
        joined_view = self._joined_view_of_joiner(task, site)
        if joined_view is not None:
            self._failed_replicas[task, site] = (joined_view, reason)
        self._tell_replica(task, site, "failed", reason)

    def _tell_replica(self, task: TaskId, site: SiteId, phase: str, reason: str = "") -> None:
        assert self.view is not None
        self._transport.tell(wire.ReplicaReport(*task, site, self.view.number, phase, reason))

    def _report_replica(self, effect: ReportReplica) -> None:
        task, phase = effect.task, effect.phase
        if phase == "failed":
            self._fail_replica(task, self.site, effect.reason)
            return
        if phase == "installed":
            self._failed_replicas.pop((task, self.site), None)
        if phase == "installed" and task[0] in self.stages.pushed():
            self._uncounted.add(task)
        if phase == "installed" and task == FIRST:
            assert self.view is not None
            self.sequencing.waits_for_chain = True
            self.sequencing.join_chain(self.view)
        if self._is_whole(task):
            self._tell_replica(task, self.site, phase)

    def _is_whole(self, task: TaskId) -> bool:
        """Whether a new replica can take the place of the others: also as far as the sequencer and
        the rows that were pushed to them are concerned."""
        return task not in self._uncounted and not (
            task == FIRST and self.sequencing.waits_for_chain
        )

    def _tell_if_whole(self, task: TaskId) -> None:
        held = self.dataflow.tasks.get(task)
        if held is not None and held.has_state and self._is_whole(task):
            self._tell_replica(task, self.site, "installed")
            if held.state is not State.REPLAYING:
                self._tell_replica(task, self.site, "caught_up")

    def _on_sequencer_state(self, message: wire.SequencerState) -> None:
        if self.view is not None and self.sequencing.on_state(message):
            for record in message.history:
                self._handle(RecordArrived(record))
            self.sequencing.join_chain(self.view)

    # --- the sequencer --------------------------------------------------------------------------

    @property
    def sequencer(self) -> Sequencer | None:
        return self.sequencing.sequencer

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

    # --- sinks ----------------------------------------------------------------------------------

    def _report_delivered(self, effect: ReportDelivered) -> None:
        assert self.view is not None
        egress = self.stages.egress(effect.sink)
        assert egress is not None
        message = wire.Delivered(effect.sink, effect.epoch, egress.durable, egress.safe)
        replicas = self.view.group((effect.sink, GroupId(0))).all
        for site in {self.view.sequencers[0], *replicas}:
            self._to(site, message)

    def _on_delivered(self, message: wire.Delivered) -> None:
        egress = self.stages.egress(StageId(message.sink))
        if egress is not None:
            self._gaps.delivered(self._now())
            if not egress.leads:
                egress.let_go(message.durable)
                task = (StageId(message.sink), GroupId(0))
                self._handle(SinkDurable(task, Epoch(message.safe)))
        self.sequencing.on_delivered(StageId(message.sink), Epoch(message.epoch))

    # --- sources --------------------------------------------------------------------------------

    def read_ahead(self, only_leading: bool = False) -> None:
        """Called every now and then: read what the sources have, and take checkpoints."""
        if not self.finished:
            self.stages.replay_results()
            self.checkpoint()
            self.sourcing.read_ahead(only_leading)
            if self._over:
                self._finish()

    def _on_push_counted(self, source: int) -> None:
        task = (StageId(source), GroupId(0))
        if task in self._uncounted:
            self._uncounted.discard(task)
            self._tell_if_whole(task)

    # --- being watched --------------------------------------------------------------------------

    def figures(self) -> dict[str, Any]:
        return {
            "site": self.site,
            "held_bundles": sum(p.held() for p in self.dataflow.producers.values()),
            "kept_bytes": self._spill.kept_bytes if self._spill else None,
            "spilled_bytes": self._spill.spilled_bytes if self._spill else None,
            "spill_error": self._spill.error if self._spill else None,
            "stages": self.stages.figures(),
            "latency_ms": _quantiles(list(self.sequencing.latency_ms)),
            "output_gap_ms": self._gaps.longest_ms(self._now()),
            "copying": [
                {"task": list(task), "to": joiner, "bytes_left": o.nbytes_left, "bytes": o.nbytes}
                for (task, joiner), o in self.outgoing.items()
            ],
            "finished_epochs": [
                [*task, u.finished, u.has_state] for task, u in self.dataflow.tasks.items()
            ],
        }

    def behind(self) -> tuple[SiteId, int] | None:
        """The replica elsewhere that most is kept for here, and how many bytes."""
        return self.dataflow.slowest()


class _Gaps:
    """How long a sink got nothing, as its replicas see it: also across the death of the leader."""

    _SPAN_S = 5.0

    def __init__(self) -> None:
        self._last: float | None = None
        self._gaps: deque[tuple[float, float]] = deque()

    def delivered(self, now: float) -> None:
        if self._last is not None:
            self._gaps.append((now, now - self._last))
        self._last = now
        while self._gaps and self._gaps[0][0] < now - self._SPAN_S:
            self._gaps.popleft()

    def longest_ms(self, now: float) -> float | None:
        """During the last seconds, the one that is not over included; None if no sink is here."""
        if self._last is None:
            return None
        return 1e3 * max([now - self._last, *(gap for _, gap in self._gaps)])


def _ends(message: wire.AskLog | wire.TellLog) -> tuple[ExchangeId, GroupId, GroupId]:
    return ExchangeId(message.exchange), GroupId(message.producer), GroupId(message.consumer)


def _arrived(ack: wire.Ack, site: SiteId) -> AckArrived:
    return AckArrived(
        ExchangeId(ack.exchange),
        GroupId(ack.producer),
        GroupId(ack.consumer),
        site,
        ack.joined_view,
        Epoch(ack.received),
        Epoch(ack.credit),
        ack.take,
        Epoch(ack.finished),
        ack.checksum,
        tuple(Epoch(level) for level in ack.levels),
        tuple(wire.from_line(line) for line in ack.lines),
    )


def _quantiles(samples: list[float]) -> dict[str, float] | None:
    if not samples:
        return None
    ordered = sorted(samples)
    return {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 99)}
