"""A site on asyncio: one process that holds partitions of a flow's stages.

Everything runs in one thread. Messages go to the `Node`, which queues orders; one order is carried
out at a time, and between two of them the loop drains all sockets, so a site that computes never
blocks those that send to it for long.

A broken connection is mended, not mourned: the site with the lower number dials again. Who is dead
is for the controller to say, in a view. A site that is not in the view any more is told so and
leaves, and nothing it sends counts.
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
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import pyarrow as pa

from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.core.effects import IngestEpochs
from holdfast.core.failure_detector import BEATS_PER_LEASE
from holdfast.core.ids import NO_EPOCH, STORE, Epoch, SiteId
from holdfast.core.layout import Domain
from holdfast.core.peer_monitor import PeerMonitor, Standstill
from holdfast.engine.memory import NO_STATE, is_out_of_memory, limit_bytes, out_of_memory
from holdfast.errors import HoldfastError, OutOfMemoryError, ProtocolError
from holdfast.net import wire
from holdfast.net.client import Client
from holdfast.net.connection import Connection, dial, listen
from holdfast.plan.planner import plan
from holdfast.site.checkpoints import CheckpointWriter
from holdfast.site.node import Node
from holdfast.site.push import PushReaders
from holdfast.site.spill import Spill

log = logging.getLogger("holdfast.site")

ACK_S = 0.05
POLL_S = 0.002
STALL_S = 0.005
"""For about so long a site stands still for what it hands over, and then does something else."""
LATE_S_MAX = 0.5
"""What was due so long ago is not made up for."""
ANEW_S = 0.5
"""So long nothing is handed over when tasks are to be rebuilt: first the stream flows again."""
POLL_S_MAX = 0.02
READS_PER_EPOCH = 2
"""How often a source is asked while rows that it gave wait for their epoch: each time costs about
the same, however few rows come of it."""
REDIAL_S = 0.05
ROOM_S = 0.1
"""How often it is looked whether too much is kept in memory."""
HURRY_S = 1.0
"""A task that has waited for so long tries another replica. Not sooner: what was on its way comes
twice then, and when everything is slow that makes it slower."""
RESERVE_BYTES = 1 << 20
"""So much is let go when there is no more memory: enough to say so."""
FENCED_S = 3.0
"""So long a site that was declared dead has to leave; then its process is ended."""
HUNG_STATUS = 75
"""With what status it ends then."""
ORPHAN_S = 10.0
"""How long a site goes on without a controller."""
QUEUED_BYTES_MAX = 4 << 20
"""What is handed over waits while so much is on its way to the new replica."""


HOST = "HOLDFAST_HOST"
"""The environment variable that tells a site what machine it is on, if its host name does not."""

OnExit = Callable[[int, str], None]
"""A host calls it with site and reason when a site's process has ended."""


@dataclass(frozen=True)
class SiteConfig:
    """What a site needs to know to find its flow. Travels with the code, not over the wire."""

    site: int
    secret: bytes
    controllers: tuple[tuple[str, int], ...]
    """Where the flow's applications listen; one of them leads."""
    listen_host: str
    options: Options
    application: str = "local"
    executor: str = ""
    generation: int = 0
    """Of those that have written to the checkpoint folder."""


class Site:
    """The site's life: register, act on views, leave."""

    def __init__(self, flow: Flow, config: SiteConfig) -> None:
        self.config = config
        self.id = SiteId(config.site)
        named = wire.incarnation(config.secret)
        spill = Spill(config.options.spill, config.options.log_bytes_max)
        planned = plan(flow)
        self._checkpoint_writer: CheckpointWriter | None = None
        if config.options.store is not None:
            where = (config.options.store, config.generation, config.site)
            self._checkpoint_writer = CheckpointWriter(*where, self._tell_soon, self._soon)
        self.node = Node(
            planned,
            self.id,
            config.options,
            self,
            now=partial(_wall_clock, time.time() - time.monotonic()),
            incarnation=named,
            spill=spill,
            checkpoint_writer=self._checkpoint_writer,
        )
        self._controllers: dict[tuple[str, int], Connection] = {}
        self._server: asyncio.Server | None = None
        self._over: asyncio.Future[None] | None = None
        self._peers: dict[SiteId, Connection] = {}
        self._dials: dict[SiteId, asyncio.Task[None]] = {}
        self._addresses: dict[SiteId, tuple[str, int]] = {}
        self._dead: set[SiteId] = set()
        self._push_readers = PushReaders(self.node.stages.pushed, self._leader_of)
        self.node.stages.on_pushed = self._on_pushed
        self._limit = limit_bytes()
        self._started = False
        self._reserve: bytes | None = bytes(RESERVE_BYTES)
        self._failure: wire.Failed | None = None
        """What this site has failed with; it works no more."""
        self._part_at = 0.0
        """When the next part of what is handed over is due."""
        self._kicked = self._handing_over = self._pushed = self._flushing = False
        self._unseen = False
        self._ingested, self._ingested_at, self._epoch_s = NO_EPOCH, 0.0, 0.0
        self._stall_ms = 0.0
        self._sent_bytes = 0
        """To other sites, on connections that are no more."""
        self._undialled: dict[SiteId, str] = {}
        """Why the last attempt at a connection to a member came to nothing."""
        self._turned = time.monotonic()
        """When the event loop last got to beat."""
        self._left = threading.Event()

    # --- coming and going -----------------------------------------------------------------------

    async def run(self) -> None:
        """Live until dismissed, fenced, or without a controller for too long."""
        loop = self._loop = asyncio.get_running_loop()
        self._over = loop.create_future()
        self._server, self._port = await listen(self._accept, self.config.listen_host)
        for address in self.config.controllers:
            threading.Thread(
                target=self._beat, args=(address,), daemon=True, name="holdfast-pulse"
            ).start()
        duties = (
            self._report_status(),
            self._keep_dialling(),
            self._keep_in_touch(),
            self._keep_reporting(),
            self._retry_stalled(),
            self._make_room(),
        )
        tasks = [loop.create_task(duty) for duty in duties]
        try:
            await self._over
        finally:
            self._left.set()
            for task in tasks:
                task.cancel()
            self.node.stages.abandon()
            if self._checkpoint_writer is not None:
                self._checkpoint_writer.close()
            self._server.close()
            for connection in [*self._peers.values(), *self._controllers.values()]:
                connection.close()
            await asyncio.sleep(0)

    def _accept(self) -> Connection:
        return Connection(self.config.secret, self._on_open, self._on_message, self._on_peer_lost)

    def _dialled(self, site: SiteId, settled: asyncio.Future[None]) -> Connection:
        def settle() -> None:
            if not settled.done():
                settled.set_result(None)

        def on_open(connection: Connection) -> None:
            settle()
            self._on_open(connection)

        def on_close(connection: Connection, error: Exception | None) -> None:
            settle()
            self._on_peer_lost(connection, error)

        return Connection(
            self.config.secret,
            on_open,
            self._on_message,
            on_close,
            identity=("site", self.id),
            peer=("site", site),
        )

    async def _keep_reporting(self) -> None:
        """Have a connection to every application's control. While there is none, data flows on and
        membership stands still; a site that nobody controls for too long leaves."""
        alone_since = time.monotonic()
        while True:
            for address in self.config.controllers:
                if address not in self._controllers:
                    try:
                        await dial(partial(self._dialled_controller, address), address)
                    except OSError as error:
                        log.info("site %s: no controller at %s: %s", self.id, address, error)
            if self._controllers:
                alone_since = time.monotonic()
            elif time.monotonic() - alone_since > (ORPHAN_S if self._started else 0):
                self._leave()
            await asyncio.sleep(REDIAL_S)

    def _dialled_controller(self, address: tuple[str, int]) -> Connection:
        connection = Connection(
            self.config.secret,
            self._register,
            self._on_message,
            partial(self._on_controller_lost, address),
            identity=("site", self.id),
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
        if not wire.is_wildcard(self.config.listen_host):
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
        connection = self._peers.get(site)
        if connection is not None:
            connection.send(message, body)

    def tell(self, message: wire.Message) -> None:
        if isinstance(message, wire.Finished):
            self.send_status()  # the last figures are the ones that count
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
        if connection.role != "site":
            return
        site = SiteId(connection.id)
        if site == self.id:
            log.warning("site %s: somebody else says to be it", self.id)
            connection.abort()
            return
        if site in self._dead:
            connection.send(wire.Fenced(self.node.term))
            connection.close()
            return
        old = self._peers.get(site)
        if old is not None:
            del self._peers[site]
            old.abort()
            self._guarded(lambda: self.node.on_lost(site))
        self._peers[site] = connection
        self._undialled.pop(site, None)
        self._guarded(lambda: self.node.on_connected(site))
        self._say_seen()

    def _on_peer_lost(self, connection: Connection, error: Exception | None) -> None:
        if error is not None and is_out_of_memory(error):
            self._fail(error)
        self._push_readers.forget(connection)
        site = SiteId(connection.id)
        if connection.role == "site" and self._peers.get(site) is connection:
            del self._peers[site]
            self._sent_bytes += connection.sent_bytes
            log.info("site %s: connection to site %s is lost", self.id, site)
            self._guarded(lambda: self.node.on_lost(site))

    async def _keep_dialling(self) -> None:
        """Dial the members with higher numbers that there is no connection to."""
        while True:
            for site, address in list(self._addresses.items()):
                if site > self.id and site not in self._peers and site not in self._dials:
                    dial = self._dial(site, address)
                    self._dials[site] = asyncio.get_running_loop().create_task(dial)
            await asyncio.sleep(REDIAL_S)

    async def _dial(self, site: SiteId, address: tuple[str, int]) -> None:
        """One attempt, until the handshake has ended, well or not. Another one meanwhile would end
        this one as soon as it opens, and with it whatever is being handed over."""
        settled = asyncio.get_running_loop().create_future()
        try:
            await dial(partial(self._dialled, site, settled), address)
            await settled
        except OSError as error:
            self._undialled[site] = f"site {self.id} dials in vain: {error or type(error).__name__}"
        finally:
            self._dials.pop(site, None)

    async def _keep_in_touch(self) -> None:
        """Beat on connections that are quiet, and say so if a member that there should be one to is
        not heard of. The controller lets one of the two go if the flow can do without it; if not,
        nothing moves, and that must not stay unsaid."""
        lease = self.config.options.lease_s
        monitor = PeerMonitor(lease)
        while True:
            await asyncio.sleep(lease / BEATS_PER_LEASE)
            self._turned = time.monotonic()
            heard = set()
            for site, connection in self._peers.items():
                if not connection.spoke:
                    connection.send(wire.Beat())
                if connection.heard:
                    heard.add(site)
                connection.heard = connection.spoke = False
            for site, leases in monitor.listen(self._turned, self._addresses, heard):
                self.tell(wire.Unheard(site, leases, self._contact(site)))

    def _contact(self, site: SiteId) -> str:
        """How things stand with a member that is not heard of."""
        connection = self._peers.get(site)
        if connection is not None:
            return f"connected, {connection.queued} bytes queued at site {self.id}"
        if site < self.id:
            return f"site {self.id} was not dialled"
        return self._undialled.get(site, f"site {self.id} dials")

    def _on_new_view(self, message: wire.NewView) -> None:
        members = set(message.view.members)
        known = self.node.view
        if message.view.replaces(known):
            if known is not None:
                self._dead |= set(known.members) - members
            for site in [s for s in self._peers if s in self._dead]:
                self._peers.pop(site).abort()
                self.node.on_lost(site)
            self._addresses = {SiteId(s): a for s, a in message.addresses.items() if s != self.id}
            self.node.on_view(message.view)
            if any(not message.view.group(u).replicas for u in message.view.tasks()):
                self._part_at = max(self._part_at, time.monotonic() + ANEW_S)
            if known is not None and message.view.term > known.term:
                self._report_again()  # to a controller that has just begun to lead
        self._unseen = True
        self._say_seen()

    def _say_seen(self) -> None:
        view = self.node.view
        if view is None or not self._unseen or not self._peers.keys() >= self._addresses.keys():
            return
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
        wire.check_speaker(connection.role, message)
        if connection.role == wire.SERVER and not self.node.obeys(message):
            return
        match message:
            case wire.NewView():
                self._on_new_view(message)
            case wire.Start():
                if not self._started and not self._failed:  # it comes with every view
                    self._started = True
                    self._poll()
            case wire.Beat():
                pass  # something was heard, and that is all there is to it
            case wire.Dismiss() | wire.Fenced():
                self._leave()
            case (
                wire.PushBegin()
                | wire.PushOpen()
                | wire.PushRows()
                | wire.PushDone()
                | wire.PushCommit()
                | wire.PushEnd()
            ):
                self._push_readers.take(connection, message, body)
            case wire.Ask():
                leader = self._leader_of(message.sink)
                self.node.ask(message, connection.send, leader)
            case _:
                if not self._failed:
                    self.node.receive(SiteId(connection.id), message, body)

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
        return self._addresses.get(view.groups[source][0].replicas[0])

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
            if (self.node.outgoing or self.node.storing) and not self._handing_over:
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
        """Send what is due by now of all that is handed over, but not for long."""
        self._handing_over = False
        begun = now = time.monotonic()
        self._part_at = max(self._part_at, begun - LATE_S_MAX)
        try:
            while self._part_at <= now < begun + STALL_S and self._hand_over_part():
                now = time.monotonic()
        except Exception as error:
            self._fail(error)
        self._stall_ms = max(self._stall_ms, (now - begun) * 1e3)
        if not self._failed and (self.node.outgoing or self.node.storing):
            self._handing_over = True
            wait = max(self._part_at - now, 0.0) or POLL_S
            asyncio.get_running_loop().call_later(wait, self._hand_over)

    def _hand_over_part(self) -> bool:
        """Whether there was one that could be sent; the next is due when its size allows."""
        joiner = next((joiner for _, joiner in self.node.outgoing), STORE)
        connection = self._peers.get(joiner)
        if connection is not None and connection.queued >= QUEUED_BYTES_MAX:
            return False
        sent = self.node.hand_over()
        self._part_at += max(0, sent) / (self.config.options.catch_up_mb_s * 1e6)
        return sent > 0 or (sent == 0 and joiner != STORE)

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

    def _beat(self, address: tuple[str, int]) -> None:
        """Say every now and then that this process lives: in a thread and on a connection of its
        own, so that a long operator call does not look like death. During one this site is deaf
        and dumb to the others: the controller is told, so that it does not listen to them, and how
        long that has been so, since a call that never ends must be found. Code that holds Python's
        global lock for longer than the lease silences this thread, too."""
        pause = self.config.options.lease_s / 5
        still = Standstill(pause)
        while not self._left.is_set():
            try:
                client = Client(address, self.config.secret, (wire.PULSE, self.id))
                while not self._left.is_set():
                    client.tell(self._pulse(still, time.monotonic()))
                    fenced = client.heard(wire.Fenced)
                    if fenced is not None and fenced.term >= self.node.term:
                        self._end_if_hung()
                    self._left.wait(pause)
                client.close()
            except (OSError, HoldfastError):
                self._left.wait(REDIAL_S)

    def _pulse(self, still: Standstill, now: float) -> wire.Beat:
        seconds = still.seconds(now, self._turned)
        stage, epoch = self.node.stages.call or ("", -1)
        if now - self._turned <= self.config.options.lease_s:
            return wire.Beat()
        return wire.Beat(True, seconds, stage, epoch)

    def _end_if_hung(self) -> None:
        """This site was declared dead, and another takes its place. If its event loop does not get
        to hear of it, nobody else ends this process."""
        if not self._left.wait(FENCED_S):
            log.error("site %s was declared dead in a call that does not end; it exits", self.id)
            os._exit(HUNG_STATUS)

    async def _retry_stalled(self) -> None:
        """Have tasks that wait for a slow replica take from another one."""
        while True:
            await asyncio.sleep(HURRY_S)
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
        figures = {
            **self.node.figures(),
            "view": str(self.node.view),
            "pid": os.getpid(),
            "rss_mb": usage.ru_maxrss / 1024,
            "memory_limit_mb": self._limit / 2**20,
            "cpu_s": usage.ru_utime + usage.ru_stime,
            "queued_bytes": sum(c.queued for c in self._peers.values()),
            "sent_bytes": self._sent_bytes + sum(c.sent_bytes for c in self._peers.values()),
            "stall_ms": max(self._stall_ms, self.node.freeze_ms),
        }
        self.tell(wire.Status(msgspec.json.encode(figures)))
        behind = self.node.behind()
        if behind is not None and behind[1] > self.config.options.kept_bytes_max:
            reason = f"{behind[1] >> 20} MB are kept for it at site {self.id}"
            self.tell(wire.Behind(behind[0], reason))


def _wall_clock(ahead_s: float) -> float:
    """The time as other machines have it, too, which never goes back."""
    return time.monotonic() + ahead_s


def run_site(flow: Flow, config: SiteConfig) -> None:
    """Run a site in this process until it is dismissed."""
    pa.array([0])  # only now pyarrow imports pandas; later all others would wait for that
    site = Site(flow, config)
    # What is loaded by now stays. Walking all of it would stop the site for tens of milliseconds
    # whenever the garbage collector looks at its oldest generation.
    gc.freeze()
    try:
        asyncio.run(site.run())
    finally:
        gc.unfreeze()
