"""A site on asyncio: one process that holds partitions of a flow's stages.

Everything runs in one thread. Messages go to the `SiteNode`, which queues orders. The site executes
one order at a time, and the event loop drains all sockets between two of them, so that a site that
computes does not block its senders for long. `Peers` keeps the connections to other sites, `Pulse`
reports that the process lives, `Trickle` paces hand-overs.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import os
import resource
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.api.graph import Flow
from holdfast.api.security import Tls
from holdfast.core.effects import IngestEpochs
from holdfast.core.events import ReplicaBehind
from holdfast.core.ids import NO_EPOCH, Epoch, SiteId
from holdfast.core.layout import Domain
from holdfast.engine.memory import NO_STATE, is_out_of_memory, limit_bytes, out_of_memory
from holdfast.errors import HoldfastError, OutOfMemoryError, ProtocolError
from holdfast.net import protocol, wire
from holdfast.net.addresses import is_wildcard
from holdfast.net.admission import Listener
from holdfast.net.connection import Connection, dial, listen
from holdfast.net.handshake import Party
from holdfast.net.keys import Keys
from holdfast.net.protocol import Receiver
from holdfast.net.tls import Certificate
from holdfast.plan.planner import plan
from holdfast.site.checkpoints import CheckpointWriter
from holdfast.site.config import HOST, SiteConfig
from holdfast.site.metrics import BusyTime, IdleSelector
from holdfast.site.node import SiteNode
from holdfast.site.peers import REDIAL_S, Peers
from holdfast.site.pulse import Pulse
from holdfast.site.pushers import PushReaders
from holdfast.site.spill import Spill
from holdfast.site.trickle import Trickle

log = logging.getLogger("holdfast.site")

ACK_S = 0.05
POLL_S = 0.002
POLL_S_MAX = 0.02
READS_PER_EPOCH = 2
"""How often a source is read while its rows wait for their epoch: every read costs about the same,
however few rows it returns."""
ROOM_S = 0.1
"""How often the site checks whether it keeps too much in memory."""
RETRY_S = 1.0
"""A task that has waited this long subscribes to another replica. Not sooner: bundles under way
then arrive twice, which makes a slow flow slower."""
RESERVE_BYTES = 1 << 20
"""Memory that is freed when there is no more: enough to report that."""
ORPHAN_S = 10.0
"""How long a site goes on without a connection to any control."""


def _certified(config: SiteConfig) -> Party:
    """Who the site is. Certificates of the user's own are on the site's machine."""
    files = config.options.security
    if isinstance(files, Tls):
        return replace(config.party, certificate=Certificate.read(files))
    return config.party


class Site:
    """The site's life: register, act on views, leave."""

    def __init__(self, flow: Flow, config: SiteConfig, selector: IdleSelector) -> None:
        """`selector` is the one of the event loop that the site will run in."""
        self.config, self._selector = config, selector
        self._busy = BusyTime(time.monotonic(), selector.idle_s)
        self.id = SiteId(config.site)
        party = _certified(config)
        self.party = party
        spill = Spill(config.options.spill, config.options.log_bytes_max)
        planned = plan(flow)
        self._checkpoint_writer: CheckpointWriter | None = None
        if config.options.store is not None:
            where = (config.options.store, config.generation, config.site)
            self._checkpoint_writer = CheckpointWriter(*where, self._tell_soon, self._soon)
        self.node = SiteNode(
            planned,
            self.id,
            config.options,
            self,
            now=partial(_wall_clock, time.time() - time.monotonic()),
            incarnation=party.ring.current.incarnation,
            spill=spill,
            checkpoint_writer=self._checkpoint_writer,
        )
        self._controllers: dict[tuple[str, int], Connection] = {}
        self._server: Listener | None = None
        self._over: asyncio.Future[None] | None = None
        self.peers = Peers(
            self.id,
            party,
            self._on_message,
            self._on_close,
            lambda site: self._guarded(partial(self.node.on_connected, site)),
            lambda site: self._guarded(partial(self.node.on_lost, site)),
        )
        self._pulse = Pulse(
            self.id,
            party,
            config.options.lease_s,
            lambda: self.node.stages.call,
            lambda: self.node.term,
        )
        self._trickle = Trickle(self.node, self.peers, config.options.catch_up_mb_s)
        self._push_readers = PushReaders(self.node.stages.pushed, self._leader_of)
        self.node.stages.on_pushed = self._on_pushed
        self._handlers = protocol.handlers(
            {Receiver.SITE: self, Receiver.PUSHES: self._push_readers}
        )
        self._limit = limit_bytes()
        self._started = False
        self._reserve: bytes | None = bytes(RESERVE_BYTES)
        self._failure: wire.Failed | None = None
        """The error with which this site has stopped to work."""
        self._kicked = self._handing_over = self._pushed = self._flushing = False
        self._unseen = False
        self._ingested, self._ingested_at, self._epoch_s = NO_EPOCH, 0.0, 0.0

    # --- coming and going -----------------------------------------------------------------------

    async def run(self) -> None:
        """Live until dismissed, fenced, or without a controller for too long."""
        loop = self._loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._server, self._port = await listen(self._accept, self.config.listen_host)
        for address in self.config.controllers:
            self._pulse.start(address)
        duties = (
            self._report_status(),
            self.peers.keep_dialling(self._on_open),
            self.peers.keep_in_touch(self.config.options.lease_s, self._pulse.turned, self.tell),
            self._keep_reporting(),
            self._retry_stalled(),
            self._make_room(),
        )
        tasks = [loop.create_task(duty) for duty in duties]
        try:
            await self._over
        finally:
            self._pulse.stop()
            for task in tasks:
                task.cancel()
            self.node.stages.abandon()
            if self._checkpoint_writer is not None:
                self._checkpoint_writer.close()
            self._server.close()
            self.peers.close()
            for connection in self._controllers.values():
                connection.close()
            await asyncio.sleep(0)

    def _accept(self) -> Connection:
        return Connection(self.party, self._on_open, self._on_message, self._on_close)

    async def _keep_reporting(self) -> None:
        """Have a connection to every application's control. While there is none, data flows on and
        membership stands still; a site that no control reaches for too long leaves."""
        alone_since = time.monotonic()
        while True:
            for address in self.config.controllers:
                if address not in self._controllers:
                    try:
                        await dial(partial(self._dialled_controller, address), address)
                    except OSError as error:
                        log.info("site %s: no controller at %s: %s", self.id, address, error)
            if any(connection.open for connection in self._controllers.values()):
                alone_since = time.monotonic()
            patience = ORPHAN_S if self._started or self._controllers else 0
            if time.monotonic() - alone_since > patience:
                self._leave()
            await asyncio.sleep(REDIAL_S)

    def _dialled_controller(self, address: tuple[str, int]) -> Connection:
        connection = Connection(
            self.party,
            self._register,
            self._on_message,
            partial(self._on_controller_lost, address),
            identity=(wire.SITE, self.id),
        )
        self._controllers[address] = connection
        return connection

    def _on_controller_lost(
        self, address: tuple[str, int], connection: Connection, error: Exception | None
    ) -> None:
        if self._controllers.get(address) is connection:
            del self._controllers[address]
        if error is not None and is_out_of_memory(error):
            self._fail(error)

    def _register(self, connection: Connection) -> None:
        process = f"{socket.gethostname()}/{os.getpid()}"
        # In a container only its name is to be seen, not that of the machine it is on.
        host = os.environ.get(HOST) or socket.gethostname()
        domain = Domain(process, self.config.executor or process, host, self.config.application)
        address = self._advertised(connection)
        connection.send(wire.Register(self.id, address, self._port, os.getpid(), domain))
        self._report_again()

    def _report_again(self) -> None:
        """Say what a controller may not have heard, or was not to be told when it did not lead."""
        if self._failure is not None:
            self.tell(self._failure)
        self.node.report_again()

    def _advertised(self, controller: Connection) -> str:
        """The address under which the other sites reach this one: that by which it reaches the
        controller, if it is on another machine. The name of a machine often stands for 127.0.1.1 in
        its own /etc/hosts."""
        if not is_wildcard(self.config.listen_host):
            return self.config.listen_host
        if not ipaddress.ip_address(controller.local_host).is_loopback:
            return controller.local_host
        return socket.gethostbyname(socket.gethostname())

    def _leave(self) -> None:
        if self._over is not None and not self._over.done():
            self._over.set_result(None)

    def _fail(self, error: BaseException) -> None:
        """Tell the controller what is wrong and stop working; it will end the flow."""
        self._started = False
        if is_out_of_memory(error):
            self._reserve = None
            error = self._out_of_memory(error)
        detail: dict[str, str | int | None]
        if isinstance(error, HoldfastError):
            detail = {name: getattr(error, name) for name in error.fields}
        else:
            text = "".join(traceback.format_exception(error))
            detail = {"message": f"site {self.id}: {text}", "hint": None}
        log.error("site %s fails: %s", self.id, error)
        self._failure = wire.Failed(type(error).__name__, detail)
        self.tell(self._failure)

    def _out_of_memory(self, error: BaseException) -> OutOfMemoryError:
        """The same, with what this site holds, unless it says where it comes from."""
        if isinstance(error, OutOfMemoryError):
            return error
        stages = {r.stage.name: r.state_size() for r in self.node.stages.tasks.values()}
        held = "; ".join(f"{name!r}: {size}" for name, size in stages.items() if size != NO_STATE)
        return out_of_memory(f"site {self.id}", held or "No stage has state here", error)

    @property
    def _failed(self) -> bool:
        return self._failure is not None

    # --- the node's transport -------------------------------------------------------------------

    def send(self, site: SiteId, message: wire.Message, body: list[Any] | None = None) -> None:
        self.peers.send(site, message, body)

    def tell(self, message: wire.Message) -> None:
        if isinstance(message, wire.Finished):
            self.send_status()  # the last metrics are the ones that count
        for connection in self._controllers.values():
            if connection.open:
                connection.send(message)

    def _tell_soon(self, message: wire.Message) -> None:
        """Say something to the controller, from another thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self.tell, message)

    def _soon(self, action: Callable[[], object]) -> None:
        """Do something that another thread has come upon."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._guarded, action)

    # --- connections ----------------------------------------------------------------------------

    def _on_open(self, connection: Connection) -> None:
        if connection.role == wire.SITE:
            self.peers.accept(connection, self.node.term)
            self._report_seen()

    def _on_close(self, connection: Connection, error: Exception | None) -> None:
        if error is not None and is_out_of_memory(error):
            self._fail(error)
        self._push_readers.forget(connection)
        self.peers.forget(connection)

    def on_new_view(self, connection: Connection, message: wire.NewView) -> None:
        view, known = message.view, self.node.view
        if view.replaces(known):
            for site in self.peers.on_view(view, known, message.addresses):
                self.node.on_lost(site)
            self.node.on_view(view)
            if any(not view.group(task).replicas for task in view.tasks()):
                self._trickle.hold(time.monotonic())
            if known is not None and view.term > known.term:
                self._report_again()  # to a controller that has just begun to lead
        self._unseen = True
        self._report_seen()

    def _report_seen(self) -> None:
        view = self.node.view
        if view is not None and self._unseen and self.peers.are_complete:
            self._unseen = False
            self.tell(wire.Seen(view.term, view.number))

    # --- messages -------------------------------------------------------------------------------

    def _on_message(self, connection: Connection, message: wire.Message, body: memoryview) -> None:
        try:
            self._receive(connection, message, body)
        except ProtocolError as error:
            if is_out_of_memory(error):  # no fault of the sender's, and no better the next time
                self._fail(error)
                return
            log.warning(
                "site %s: %s from %s: %s", self.id, type(message).__name__, connection.id, error
            )
            connection.abort()
        except Exception as error:
            self._fail(error)
        self._kick()

    def _receive(self, connection: Connection, message: wire.Message, body: memoryview) -> None:
        if connection.role == wire.SERVER and not self.node.obeys(message):
            return
        if type(message) in self._handlers:
            protocol.dispatch(self._handlers, connection, message, body)
        elif not self._failed:
            self.node.receive(SiteId(connection.id), message, body)

    def on_start(self, connection: Connection, message: wire.Start) -> None:
        if not self._started and not self._failed:
            self._started = True
            self._poll()

    def on_beat(self, connection: Connection, message: wire.Beat) -> None:
        """Nothing to do: the connection has noted that the peer is heard."""

    def on_dismiss(self, connection: Connection, message: wire.Dismiss) -> None:
        self._leave()

    def on_fenced(self, connection: Connection, message: wire.Fenced) -> None:
        if message.term >= self.node.term:
            self._leave()

    def on_new_keys(self, connection: Connection, message: wire.NewKeys) -> None:
        certificate = Certificate(*message.certificate, True) if message.certificate else None
        keys = [Keys(k.id, k.incarnation, k.held) for k in message.keys]
        self.party.hold(keys, certificate)
        self.tell(wire.KeysHeld(tuple(k.id for k in keys)))
        self.party.close_retired()

    def on_ask(self, connection: Connection, message: wire.Ask) -> None:
        self.node.ask(message, connection.send, self._leader_of(message.sink))

    def _guarded(self, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:
            self._fail(error)
        self._kick()

    def _leader_of(self, source: int) -> tuple[str, int] | None:
        """Where the site listens that leads a push source's ingress."""
        view = self.node.view
        if view is None or not 0 <= source < len(view.groups):
            return None
        return self.peers.addresses.get(view.groups[source][0].replicas[0])

    # --- work -----------------------------------------------------------------------------------

    def _kick(self) -> None:
        """See to it that what can be done is done, after what has come in meanwhile."""
        if not self._kicked:
            self._kicked = True
            asyncio.get_running_loop().call_soon(self._do_one)

    def _do_one(self) -> None:
        self._kicked = False
        if self._failed:
            return
        try:
            self._flush_acks()
            order = self.node.work()
            if order is not None:
                self._flush_acks()
                self._kick()
            if self.node.hands_over and not self._handing_over:
                self._handing_over = True
                asyncio.get_running_loop().call_soon(self._hand_over)
            if isinstance(order, IngestEpochs):
                self._time_epochs(order.epoch)
            if isinstance(order, IngestEpochs) or self._pushed:
                self._read_ahead()
        except Exception as error:
            self._fail(error)

    def _flush_acks(self) -> None:
        """Now if they are due, and a little later if not: others may go with them."""
        if self.node.acks_are_due:
            self.node.flush()
        elif self.node.acks_wait and not self._flushing:
            self._flushing = True
            asyncio.get_running_loop().call_later(ACK_S, self._flush_late)

    def _flush_late(self) -> None:
        self._flushing = False
        self._guarded(self.node.flush)

    def _hand_over(self) -> None:
        self._handing_over = False
        try:
            pause = self._trickle.run(time.monotonic(), time.monotonic)
        except Exception as error:
            self._fail(error)
        if not self._failed and self.node.hands_over:
            self._handing_over = True
            asyncio.get_running_loop().call_later(pause, self._hand_over)

    def _poll(self) -> None:
        if self._started:
            self._guarded(lambda: self._read_ahead(only_leading=True))
            waiting = any(split.rows_held for _, split in self.node.stages.splits())
            pause = self._epoch_s / READS_PER_EPOCH if waiting else 0.0
            pause = min(max(pause, POLL_S), POLL_S_MAX)
            asyncio.get_running_loop().call_later(pause, self._poll)

    def _time_epochs(self, epoch: Epoch) -> None:
        """Know about how long it takes from one epoch to the next."""
        now = time.monotonic()
        if epoch > self._ingested:
            elapsed = min(now - self._ingested_at, 1.0)
            self._epoch_s += (elapsed - self._epoch_s) / 8
            self._ingested, self._ingested_at = epoch, now

    def _read_ahead(self, only_leading: bool = False) -> None:
        """Not at every turn: of a source with a set rate that would only get crumbs."""
        self._pushed = False
        if self._started:
            self.node.read_ahead(only_leading)

    def _on_pushed(self) -> None:
        self._pushed = True
        self._kick()

    # --- being watched --------------------------------------------------------------------------

    async def _retry_stalled(self) -> None:
        """Have tasks that wait for a slow replica take from another one."""
        while True:
            await asyncio.sleep(RETRY_S)
            self._guarded(self.node.retry_stalled)

    async def _make_room(self) -> None:
        while True:
            await asyncio.sleep(ROOM_S)
            self._guarded(self.node.make_room)

    async def _report_status(self) -> None:
        while True:
            await asyncio.sleep(self.config.options.status_ms / 1e3)
            self.send_status()

    def send_status(self) -> None:
        """Tell the controller how things are, and whom too much is kept for."""
        usage = resource.getrusage(resource.RUSAGE_SELF)
        metrics = {
            **self.node.metrics(),
            "view": str(self.node.view),
            "pid": os.getpid(),
            "rss_mb": usage.ru_maxrss / 1024,
            "memory_limit_mb": self._limit / 2**20,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "at_s": time.monotonic(),
            "idle_s": self._selector.idle_s,
            "busy": self._busy.part(time.monotonic(), self._selector.idle_s),
            "queued_bytes": self.peers.queued_bytes,
            "sent_bytes": self.peers.sent_bytes,
            "stall_ms": max(self._trickle.stall_ms, self.node.transfers.freeze_ms),
        }
        self.tell(wire.Status(msgspec.json.encode(metrics)))
        behind = self.node.behind()
        if behind is not None and behind[1] > self.config.options.kept_bytes_max:
            reason = f"{behind[1] >> 20} MB are kept for it at site {self.id}"
            self.tell(wire.Behind(ReplicaBehind(behind[0], reason)))


def _wall_clock(ahead_s: float) -> float:
    """The time as other machines have it, too, which never goes back."""
    return time.monotonic() + ahead_s


def run_site(flow: Flow, config: SiteConfig) -> None:
    """Run a site in this process until it is dismissed."""
    pa.array([0])  # only now pyarrow imports pandas; later all others would wait for that
    selector = IdleSelector()
    site = Site(flow, config, selector)
    # What is loaded by now stays. Walking all of it would stop the site for tens of milliseconds
    # whenever the garbage collector looks at its oldest generation.
    gc.freeze()
    try:
        with asyncio.Runner(loop_factory=partial(asyncio.SelectorEventLoop, selector)) as runner:
            runner.run(site.run())
    finally:
        gc.unfreeze()
