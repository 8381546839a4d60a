"""A site: one process that holds partitions of a flow's stages.

Everything runs in one thread on an asyncio loop. Messages become events for the machines
(`Dataflow`, and on one site `Sequencer`); their effects become messages, and orders that wait in a
heap. One order is carried out at a time, the oldest epoch first; between two of them the loop
drains all sockets, so a site that computes never blocks those that send to it for long.
"""

from __future__ import annotations

import asyncio
import gc
import heapq
import itertools
import logging
import os
import resource
import socket
import time
import traceback
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, assert_never

import msgspec

from holdfast.core.dataflow import Dataflow
from holdfast.core.effects import (
    IngestEpoch,
    ProcessBundles,
    PublishRecord,
    ReportDelivered,
    ReportFinished,
    SendAck,
    SendBundle,
    SiteEffect,
)
from holdfast.core.events import (
    AckArrived,
    BlocksAvailable,
    BundleArrived,
    DrainRequested,
    EpochDelivered,
    RecordArrived,
    SequencerEvent,
    SiteEvent,
    SplitEnded,
    SplitIdle,
)
from holdfast.core.ids import Epoch, ExchangeId, SiteId, StageId
from holdfast.core.layout import Domain, Layout
from holdfast.core.sequencer import Sequencer
from holdfast.errors import HoldfastError, HostError, OperatorError, ProtocolError
from holdfast.flow.graph import Flow
from holdfast.flow.options import Options
from holdfast.flow.plan import Plan, plan, shape
from holdfast.site import bundles, wire
from holdfast.site.feed import FedReader, Feeds
from holdfast.site.ingress import Split
from holdfast.site.memory import fitting, limit_bytes
from holdfast.site.stages import SiteStages

log = logging.getLogger("holdfast.site")

POLL_S = 0.002
PEER_LOST_S = 1.0
REDIAL_S = 0.5


OnExit = Callable[[int, int, str], None]
"""A host calls it with site, attempt and reason when a site's process has ended."""


@dataclass(frozen=True)
class SiteConfig:
    """What a site needs to know to find its flow. Travels with the code, not over the wire."""

    site: int
    attempt: int
    secret: bytes
    controller: tuple[str, int]
    listen_host: str
    options: Options
    application: str = "local"
    executor: str = ""


class Site:
    """The site's life: register, be assigned, connect, run, leave."""

    def __init__(self, flow: Flow, config: SiteConfig) -> None:
        self.config = config
        self.id = SiteId(config.site)
        self.plan: Plan = plan(flow)
        self.shape = shape(self.plan, config.options.partitions)
        self._controller: wire.Connection | None = None
        self._server: asyncio.Server | None = None
        self._over: asyncio.Future[None] | None = None
        self._work: list[tuple[int, int, int, IngestEpoch | ProcessBundles]] = []
        self._ties = itertools.count()
        self._limit = limit_bytes()
        self._working = False
        self._unassigned()

    def _unassigned(self) -> None:
        self._peers: dict[SiteId, wire.Connection] = {}
        self._layout: Layout | None = None
        self._dataflow: Dataflow | None = None
        self._sequencer: Sequencer | None = None
        self._stages: SiteStages | None = None
        self._started = False
        self._cut_at: dict[int, float] = {}
        self._latency_ms: deque[float] = deque(maxlen=2_000)
        self._feeds = Feeds({})
        self._quiet_since: dict[Split, float] = {}
        self._work.clear()

    # --- coming and going -----------------------------------------------------------------------

    async def run(self) -> None:
        """Live until dismissed, or until the controller is gone."""
        loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._server, port = await wire.listen(self._accept, self.config.listen_host)
        self._port = port
        self._controller = await wire.dial(self._dialled_controller, self.config.controller)
        status = loop.create_task(self._report_status())
        try:
            await self._over
        finally:
            status.cancel()
            self._server.close()
            for connection in [*self._peers.values(), self._controller]:
                connection.close()
            await asyncio.sleep(0)

    def _accept(self) -> wire.Connection:
        return wire.Connection(
            self.config.secret, self._on_open, self._on_message, self._on_peer_lost
        )

    def _dialled(self, site: SiteId) -> wire.Connection:
        return wire.Connection(
            self.config.secret,
            self._on_open,
            self._on_message,
            self._on_peer_lost,
            identity=("site", self.id),
            peer=("site", site),
        )

    def _dialled_controller(self) -> wire.Connection:
        return wire.Connection(
            self.config.secret,
            self._register,
            self._on_message,
            self._on_controller_lost,
            identity=("site", self.id),
        )

    def _register(self, connection: wire.Connection) -> None:
        host = socket.gethostname()
        domain = Domain(
            f"{host}/{os.getpid()}", self.config.executor or host, host, self.config.application
        )
        connection.send(
            wire.Register(
                self.id, self.config.attempt, self._advertised(), self._port, os.getpid(), domain
            )
        )

    def _advertised(self) -> str:
        """The address under which the other sites reach this one."""
        if wire.is_wildcard(self.config.listen_host):
            return socket.gethostbyname(socket.gethostname())
        return self.config.listen_host

    def _on_controller_lost(self, connection: wire.Connection, error: Exception | None) -> None:
        self._leave()

    def _leave(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Tell the controller what is wrong and stop working; it will end the flow."""
        self._work.clear()
        self._started = False
        detail: dict[str, str | int | None]
        if isinstance(error, OperatorError):
            names = ("flow", "stage", "operator", "epoch", "row", "cause")
            detail = {n: getattr(error, n) for n in names}
        elif isinstance(error, HoldfastError):
            detail = {"message": error.message, "hint": error.hint}
        else:
            text = "".join(traceback.format_exception(error))
            detail = {"message": f"site {self.id}: {text}", "hint": None}
        log.error("site %s fails: %s", self.id, error)
        if self._controller is not None:
            self._controller.send(wire.Failed(type(error).__name__, detail))

    # --- messages -------------------------------------------------------------------------------

    def _on_open(self, connection: wire.Connection) -> None:
        if connection.role == "site" and connection.id not in self._peers:
            self._peers[SiteId(connection.id)] = connection
            self._when_connected()

    def _on_peer_lost(self, connection: wire.Connection, error: Exception | None) -> None:
        self._feeds.forget(connection)
        if self._peers.get(SiteId(connection.id)) is connection:
            del self._peers[SiteId(connection.id)]
            log.info("site %s: connection to site %s is lost", self.id, connection.id)
            if self._started:
                loop = asyncio.get_running_loop()
                loop.call_later(PEER_LOST_S, self._give_up, connection.id)

    def _give_up(self, peer: int) -> None:
        """Without protection what was on a broken connection is lost. If the peer has died the
        controller knows by now, and this site is dismissed; if not, somebody must say so."""
        if self._started:
            self._fail(
                HostError(
                    f"the connection between sites {self.id} and {peer} broke, and what was on it "
                    "is not protected",
                    hint="start the flow again; is the network between the executors sound?",
                )
            )

    def _on_message(
        self, connection: wire.Connection, message: wire.Message, body: memoryview
    ) -> None:
        try:
            self._receive(connection, message, body)
        except ProtocolError as error:
            log.warning(
                "site %s: %s from %s: %s", self.id, type(message).__name__, connection.id, error
            )
            connection.abort()
        except Exception as error:
            self._fail(error)

    def _receive(
        self, connection: wire.Connection, message: wire.Message, body: memoryview
    ) -> None:
        match message:
            case wire.Bundle():
                self._on_bundle(connection, message, body)
            case wire.Ack():
                self._handle(
                    AckArrived(
                        ExchangeId(message.exchange),
                        SiteId(connection.id),
                        Epoch(message.received),
                        Epoch(message.stable),
                        Epoch(message.credit),
                    )
                )
            case wire.Record():
                self._handle(RecordArrived(message.record))
            case wire.Blocks():
                self._sequence(
                    BlocksAvailable(StageId(message.source), message.split, message.blocks)
                )
            case wire.SplitState():
                kind = SplitEnded if message.ended else SplitIdle
                self._sequence(kind(StageId(message.source), message.split))
            case wire.Delivered():
                self._sequence(EpochDelivered(StageId(message.sink), Epoch(message.epoch)))
            case wire.Assign():
                self._on_assign(message)
            case wire.Start():
                self._on_start()
            case wire.Drain():
                self._sequence(DrainRequested())
            case wire.Dismiss():
                self._leave()
            case (
                wire.FeedOpen()
                | wire.FeedRows()
                | wire.FeedDone()
                | wire.FeedCommit()
                | wire.FeedEnd()
            ):
                self._feeds.take(connection, message, body)
            case _:
                raise ProtocolError(f"a site does not expect {type(message).__name__}")

    def _on_assign(self, message: wire.Assign) -> None:
        # A peer that was assigned earlier may have connected already; nothing was sent yet on any
        # connection, so those that are open stay good.
        peers = self._peers
        self._unassigned()
        self._peers = peers
        self._layout = message.layout
        self._stages = SiteStages(self.plan, message.layout, self.id, self.config.options)
        fed = {s.stage.id: s.reader for s in self._stages.splits if isinstance(s.reader, FedReader)}
        for reader in fed.values():
            reader.on_ready = self._read_ahead
        self._feeds = Feeds(fed)
        self._dataflow = Dataflow(self.id, self.shape, message.layout, self.config.options.window)
        if message.layout.sequencer == self.id:
            self._sequencer = self._make_sequencer()
        self._expected = {SiteId(s) for s in message.addresses if s != self.id}
        task = asyncio.ensure_future(self._connect(message))
        task.add_done_callback(lambda t: t.cancelled() or t.exception())
        self._when_connected()

    def _make_sequencer(self) -> Sequencer:
        sinks = [StageId(s.id) for s in self.plan.sinks]
        return Sequencer(self.plan.splits, sinks, fitting(self.config.options.budget, self._limit))

    async def _connect(self, assigned: wire.Assign) -> None:
        """Dial the sites with higher numbers, again and again until the flow starts: a peer may
        not be there yet, or be about to find out that it lives anew."""
        while self._layout is assigned.layout and not self._started:
            for site, address in assigned.addresses.items():
                if site > self.id and site not in self._peers:
                    await self._dial(SiteId(site), address)
            await asyncio.sleep(REDIAL_S)

    async def _dial(self, site: SiteId, address: tuple[str, int]) -> None:
        try:
            await wire.dial(lambda: self._dialled(site), address)
        except OSError as error:
            log.warning("site %s cannot reach site %s at %s: %s", self.id, site, address, error)

    def _when_connected(self) -> None:
        if self._layout is not None and self._expected.issubset(self._peers):
            assert self._controller is not None
            self._controller.send(wire.Connected())

    # --- machines -------------------------------------------------------------------------------

    def _handle(self, event: SiteEvent) -> None:
        assert self._dataflow is not None
        for effect in self._dataflow.handle(event):
            self._apply(effect)

    def _apply(self, effect: SiteEffect) -> None:
        match effect:
            case IngestEpoch():
                self._enqueue(effect.record.epoch, effect)
            case ProcessBundles():
                self._enqueue(effect.epoch, effect)
            case SendBundle():
                self._send_bundle(effect)
            case SendAck():
                self._send_ack(effect)
            case ReportDelivered():
                self._to_sequencer(EpochDelivered(effect.sink, effect.epoch))
            case ReportFinished():
                self._finish()
            case _:
                assert_never(effect)

    def _send_bundle(self, effect: SendBundle) -> None:
        if effect.consumer == self.id:
            self._handle(
                BundleArrived(effect.exchange, effect.epoch, self.id, effect.last, effect.bundle)
            )
            return
        message, body = bundles.encode(effect.bundle, effect.exchange, effect.epoch, effect.last)
        self._to_site(effect.consumer, message, body)

    def _send_ack(self, effect: SendAck) -> None:
        received, stable, credit = effect.received, effect.stable, effect.credit
        if effect.producer == self.id:
            self._handle(AckArrived(effect.exchange, self.id, received, stable, credit))
        else:
            self._to_site(effect.producer, wire.Ack(effect.exchange, received, stable, credit))

    def _to_site(self, site: SiteId, message: wire.Message, body: list[Any] | None = None) -> None:
        connection = self._peers.get(site)
        if connection is not None:
            connection.send(message, body)

    def _on_bundle(
        self, connection: wire.Connection, message: wire.Bundle, body: memoryview
    ) -> None:
        if not 0 <= message.exchange < len(self.plan.exchanges):
            raise ProtocolError(f"there is no exchange {message.exchange}")
        frames = bundles.decode(message, body, self.plan.exchanges[message.exchange].schema)
        assert self._stages is not None
        if message.exchange in self._stages.checkers:
            self._stages.checkers[message.exchange].check(frames, message.epoch, connection.id)
        self._handle(
            BundleArrived(
                ExchangeId(message.exchange),
                Epoch(message.epoch),
                SiteId(connection.id),
                message.last,
                frames,
            )
        )

    def _sequence(self, event: SequencerEvent) -> None:
        if self._sequencer is None:
            raise ProtocolError(f"site {self.id} is not the sequencer")
        if isinstance(event, EpochDelivered):
            self._note_latency(event)
        for effect in self._sequencer.handle(event):
            self._publish(effect)

    def _publish(self, effect: PublishRecord) -> None:
        self._cut_at[effect.record.epoch] = time.monotonic()
        assert self._controller is not None
        self._controller.send(wire.Cut(effect.record))
        for site in sorted(self._peers):
            self._peers[site].send(wire.Record(effect.record))
        self._handle(RecordArrived(effect.record))

    def _note_latency(self, event: EpochDelivered) -> None:
        assert self._sequencer is not None
        others = [e for sink, e in self._sequencer.delivered.items() if sink != event.sink]
        if all(e >= event.epoch for e in others):
            now = time.monotonic()
            for epoch in [e for e in self._cut_at if e <= event.epoch]:
                self._latency_ms.append((now - self._cut_at.pop(epoch)) * 1e3)

    def _to_sequencer(self, event: SequencerEvent) -> None:
        assert self._layout is not None
        if self._layout.sequencer == self.id:
            self._sequence(event)
        else:
            self._to_site(self._layout.sequencer, _message_of(event))

    # --- work -----------------------------------------------------------------------------------

    def _enqueue(self, epoch: int, order: IngestEpoch | ProcessBundles) -> None:
        # The oldest epoch first; within it the stage nearest to the sinks.
        heapq.heappush(self._work, (epoch, -order.stage, next(self._ties), order))
        if not self._working:
            self._working = True
            asyncio.get_running_loop().call_soon(self._do_one)

    def _do_one(self) -> None:
        if not self._work:
            self._working = False
            return
        order = heapq.heappop(self._work)[-1]
        assert self._stages is not None
        try:
            self._handle(self._stages.carry_out(order))
        except Exception as error:
            self._fail(error)
        if isinstance(order, IngestEpoch):
            asyncio.get_running_loop().call_soon(self._read_ahead)
        asyncio.get_running_loop().call_soon(self._do_one)

    def _finish(self) -> None:
        assert self._stages is not None and self._controller is not None
        self._started = False
        self._stages.close()
        self._send_status()
        self._controller.send(wire.Finished())

    # --- sources --------------------------------------------------------------------------------

    def _on_start(self) -> None:
        assert self._stages is not None
        if not self._expected.issubset(self._peers):
            missing = sorted(self._expected - self._peers.keys())
            raise HostError(f"site {self.id} lost its connection to site {missing[0]} at the start")
        self._started = True
        self._poll()

    def _poll(self) -> None:
        if self._started:
            self._read_ahead()
            asyncio.get_running_loop().call_later(POLL_S, self._poll)

    def _read_ahead(self) -> None:
        """Read what the sources have, up to the limit, and offer it to the sequencer."""
        if not self._started or self._stages is None:
            return
        try:
            for split in self._stages.splits:
                self._read_split(split)
        except Exception as error:
            self._fail(error)

    def _read_split(self, split: Split) -> None:
        options = self.config.options
        source, number = StageId(split.stage.id), split.number
        while not split.ended and split.rows_held < options.read_ahead_rows:
            block = split.read(options.block_rows)
            if block is None:
                break
            self._quiet_since.pop(split, None)
            self._to_sequencer(BlocksAvailable(source, number, (block,)))
            if block.rows < options.block_rows:
                return  # that was all there is; asking again at once would only find crumbs
        else:
            return
        if split.ended:
            self._to_sequencer(SplitEnded(source, number))
        else:
            self._notice_quiet(split)

    def _notice_quiet(self, split: Split) -> None:
        now = time.monotonic()
        since = self._quiet_since.setdefault(split, now)
        if since < now - self.config.options.idle_ms / 1e3:
            self._quiet_since[split] = float("inf")  # say it once
            self._to_sequencer(SplitIdle(StageId(split.stage.id), split.number))

    # --- being watched --------------------------------------------------------------------------

    async def _report_status(self) -> None:
        while True:
            await asyncio.sleep(self.config.options.status_ms / 1e3)
            self._send_status()

    def _send_status(self) -> None:
        if self._controller is None or self._stages is None:
            return
        usage = resource.getrusage(resource.RUSAGE_SELF)
        figures = {
            "site": self.id,
            "pid": os.getpid(),
            "rss_mb": usage.ru_maxrss / 1024,
            "memory_limit_mb": self._limit / 2**20,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "queued_bytes": sum(c.queued for c in self._peers.values()),
            "held_bundles": sum(p.held() for p in self._dataflow.producers.values())
            if self._dataflow
            else 0,
            "stages": self._stages.figures(),
            "latency_ms": _quantiles(list(self._latency_ms)),
        }
        self._controller.send(wire.Status(msgspec.json.encode(figures)))


def _message_of(event: SequencerEvent) -> wire.Message:
    """An event as it travels to the sequencer; `Site._receive` has the way back."""
    match event:
        case BlocksAvailable():
            return wire.Blocks(event.source, event.split, event.blocks)
        case SplitEnded():
            return wire.SplitState(event.source, event.split, True)
        case SplitIdle():
            return wire.SplitState(event.source, event.split, False)
        case EpochDelivered():
            return wire.Delivered(event.sink, event.epoch)
        case DrainRequested():
            return wire.Drain()
    assert_never(event)


def _quantiles(samples: list[float]) -> dict[str, float] | None:
    if not samples:
        return None
    ordered = sorted(samples)
    return {f"p{q}": ordered[min(len(ordered) - 1, len(ordered) * q // 100)] for q in (50, 99)}


def run_site(flow: Flow, config: SiteConfig) -> None:
    """Run a site in this process until it is dismissed."""
    site = Site(flow, config)
    # What is loaded by now stays. Walking all of it would stop the site for tens of milliseconds
    # whenever the garbage collector looks at its oldest generation.
    gc.collect()
    gc.freeze()
    try:
        asyncio.run(site.run())
    finally:
        gc.unfreeze()
