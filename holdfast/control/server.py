"""A control node on asyncio: its connections and timers.

It runs in its own event loop and takes no part in the flow of data. It decides nothing: what
arrives becomes an event of the `ControlNode`, and the server executes the effects. It also keeps
what sites report, for the status of the run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, TypeVar, assert_never

import msgspec

from holdfast import errors
from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.control import events as ev
from holdfast.control.arbitration import ArbiterClient
from holdfast.control.checkpoint_coordinator import CheckpointCoordinator, common_restore_point
from holdfast.control.checkpoint_store import CheckpointStore
from holdfast.control.credentials import Credentials
from holdfast.control.feeding import SourceFeeder
from holdfast.control.hosting import (
    Address,
    Host,
    Place,
    Route,
    direct,
    refuse,
    widen_failure_domains,
)
from holdfast.control.launching import SiteLauncher
from holdfast.control.locating import locate_sink, locate_stage
from holdfast.control.node import ControlNode
from holdfast.control.record_log import RecordLog
from holdfast.control.rotating import KeyRotator
from holdfast.control.rotation import Member, members_of
from holdfast.control.site_connections import SiteConnections
from holdfast.core import events as core
from holdfast.core import requests
from holdfast.core.controller import Controller
from holdfast.core.effects import ArbiterAsk, AskCommit, AskLead, AskRead, AskRenew, AskResign
from holdfast.core.flow_phase import FlowPhase
from holdfast.core.ids import SiteId, TaskId
from holdfast.core.placement import place
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord
from holdfast.errors import ProtocolError
from holdfast.net import protocol, wire
from holdfast.net.connection import Connection, dial, listen
from holdfast.net.protocol import Receiver
from holdfast.plan.fingerprint import stage_marks
from holdfast.plan.planner import Plan, shape

R = TypeVar("R", bound=requests.Request)
log = logging.getLogger("holdfast.control")

LAST_WORDS_S = 2.0
"""How long a control whose flow has ended waits for the arbiter's answer when it resigns."""


class Control:
    """One application's control. All methods but `post` are called in its event loop."""

    def __init__(
        self,
        flow: Flow,
        plan: Plan,
        host: Host,
        sites: int,
        spares: int,
        options: Options,
        secret: bytes,
        place: Place,
        generation: int = 0,
    ) -> None:
        self.flow, self.plan, self.options = flow, plan, options
        self.generation = generation
        """The generation that writes to the checkpoint folder: see
        `holdfast.storage.generations`."""
        self.place = place
        self.shape = widen_failure_domains(shape(plan, options.partitions), place.apps)
        refuse(plan, self.shape, place.apps)
        self.error: Exception | None = None
        self.records = RecordLog()
        self.on_running: Callable[[], None] = lambda: None
        self.describe: Callable[[], dict[str, Any]] = dict
        """Returns the status that the leading application sends to the others."""
        self.leader_status: dict[str, Any] = {}
        """The status that the leading application sent last, while this one follows."""
        self.route: Route = direct
        self.loop = asyncio.new_event_loop()
        self._host = host
        hosts = [host.listen_host, *(name for name, _ in place.controls)]
        self.credentials = Credentials(
            secret, options.security, hosts, place.app, stage_marks(plan), flow.name
        )
        self.node = ControlNode(
            self.shape,
            options,
            app=place.app,
            apps=place.apps,
            sites=sites,
            spares=spares,
        )
        incarnation = self.credentials.keys.incarnation
        self.arbiter = ArbiterClient(place.arbiter_url, flow.name, incarnation, options.lease_s)
        self.launcher = SiteLauncher(
            flow, host, place, options, self.credentials, generation, self.post
        )
        self._stretcher = ThreadPoolExecutor(1, thread_name_prefix="holdfast-keys")
        self._feeder = SourceFeeder(
            plan, flow.name, self.credentials.pusher, self._locate, self._on_push_failed
        )
        self._sites = SiteConnections()
        self._agents: dict[int, Connection] = {}
        self._leader: Connection | None = None
        self.rotator = KeyRotator(
            self.credentials,
            self._sites,
            self._agents,
            term=lambda: self.node.term,
            leads=lambda: self.controller is not None,
            members=self._members,
            stretch=self._stretch,
        )
        self._handlers = protocol.handlers({Receiver.CONTROL: self, Receiver.ROTATOR: self.rotator})
        self._port = 0
        self._events: deque[ev.ControlEvent] = deque()
        self._handling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_words: list[asyncio.Task[None]] = []
        self.started = False
        """Whether rows may have been taken."""
        self.checkpoints: CheckpointCoordinator | None = None
        """Stores the flow while it runs, if that is wanted."""
        self.final: dict[TaskId, wire.TaskFiles] = {}
        """The tasks of a stopped flow that are stored."""
        self.store: CheckpointStore | None = None
        """The folder that the flow is stored in; None with several applications."""
        if options.store is not None and place.apps == 1:
            self.store = CheckpointStore(options.store, generation)
        if self.store is not None and options.store_every_ms:
            common = common_restore_point(flow, plan, options, incarnation, generation)
            self.checkpoints = CheckpointCoordinator(
                self.store,
                common,
                flow.restore_point,
                tell=self._sites.send_all,
                term=lambda: self.node.term,
                fail=lambda error: self.handle(core.FlowFailed(SiteId(-1), error)),
                under_way=lambda stores: self.handle(core.StoreUnderWay(stores)),
            )

    # --- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Serve until the flow has ended."""
        self._over: asyncio.Future[None] = self.loop.create_future()
        port = self.place.controls[self.place.app][1] if self.place.controls else 0
        self._server, self._port = await listen(self._accept, self._host.listen_host, port)
        self.node.leadership.holder = _text(self.address)
        self.handle(ev.Began())
        try:
            await self._over
        finally:
            self._sites.close()
            for connection in self._agents.values():
                connection.close()
            if self.checkpoints is not None:
                self.checkpoints.close()
            self._feeder.stop()
            self._server.close()
            if self._last_words:
                await asyncio.wait(self._last_words, timeout=LAST_WORDS_S)
            await asyncio.sleep(0.05)
            await self._cancel_rest()
            self.arbiter.close()
            self._stretcher.shutdown(wait=False, cancel_futures=True)

    async def _cancel_rest(self) -> None:
        """Cancel all tasks that are under way."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    @property
    def address(self) -> tuple[str, int]:
        return self._host.advertise_host, self._port

    @property
    def controller(self) -> Controller | None:
        """The controller, if this application leads."""
        return self.node.controller

    @property
    def status(self) -> dict[int, dict[str, Any]]:
        """By site: the metrics that it reported last."""
        return self.node.watch.status

    def _end(self, error: Exception | None) -> None:
        self.error = error
        if not self._over.done():
            self._over.set_result(None)

    def post(self, event: ev.ControlEvent) -> None:
        """Hand an event to the node, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the flow has ended
            self.loop.call_soon_threadsafe(self.handle, event)

    def stop(self, drain: bool) -> None:
        """End the flow, from any thread. If this application does not lead, the request must reach
        the others as well; if none leads just now, the next leader acts on it."""
        self.post(requests.StopRequested(drain))

    def request(self, what: str, make: Callable[[Controller], R]) -> R:
        """Have the controller do what the request says that `make` returns, or raises for. Called
        in the controller's thread."""
        controller = self.controller
        if controller is None:
            raise errors.HostError("another application leads the flow", hint=f"{what} there")
        if controller.view is None or controller.state is not FlowPhase.RUNNING:
            raise errors.HostError(f"the flow is {controller.state.value}: it cannot {what} now")
        request = make(controller)
        self.handle(request)
        return request

    def protect(self, guards: Sequence[ProtectionSpec]) -> None:
        """Change the protection of stages. Called in the controller's thread."""

        def make(controller: Controller) -> requests.ProtectionWanted:
            assert controller.view is not None
            shape = controller.shape.guarded(tuple(guards))
            wanted = widen_failure_domains(shape, self.place.apps)
            view, domains = controller.view, controller.roster.domains
            staying = [s for s in view.members if s not in view.emptying]
            place(wanted, staying, domains)  # it raises if there are too few sites
            return requests.ProtectionWanted(wanted.guards)

        self.request("change its protection", make)

    def _stretch(self, secrets: Sequence[bytes], then: Callable[[], None]) -> None:
        def work() -> None:
            self.credentials.stretch(secrets)
            with contextlib.suppress(RuntimeError):  # the loop is closed: the flow has ended
                self.loop.call_soon_threadsafe(then)

        self._stretcher.submit(work)

    def rotate_secret(self, secret: str | None, wanted: bytes | None = None) -> Future[str]:
        """Replace the flow's secret. Called in the controller's thread; the future gets the new
        secret when no process accepts the old one."""
        if self.controller is None or self.controller.state is not FlowPhase.RUNNING:
            raise errors.HostError(
                "only the application that leads a running flow can replace its secret"
            )
        return self.rotator.ask(secret, wanted)

    def _members(self) -> tuple[Member, ...]:
        """Who must hold new keys before they are used: also sites and applications that are just
        not connected, and sites that were launched with the old ones."""
        controller, sites = self.controller, list(self._sites)
        if controller is not None and controller.view is not None:
            known = {*controller.view.members, *controller.addresses, *controller.roster.launched}
            sites += sorted(known)
        others = [app for app in range(self.place.apps) if app != self.place.app]
        return members_of(dict.fromkeys(sites), others)

    # --- events and effects ---------------------------------------------------------------------

    def handle(self, event: ev.ControlEvent) -> None:
        """Have the node handle an event, and execute the effects, one event after the other."""
        self._events.append(event)
        if self._handling:
            return  # an effect has caused this event
        self._handling = True
        try:
            while self._events:
                for effect in self.node.handle(self._events.popleft(), _now()):
                    self._apply(effect)
        finally:
            self._handling = False
        self.rotator.follow_members()

    def _apply(self, effect: ev.ControlEffect) -> None:
        match effect:
            case AskLead() | AskRenew() | AskRead() | AskResign() | AskCommit():
                self._ask(effect)
            case ev.SendSite():
                self._send(effect.site, effect.message)
            case ev.ExpelSite():
                self._sites.expel(effect)
            case ev.SendAgent():
                if effect.app in self._agents:
                    self._agents[effect.app].send(effect.message)
            case ev.HangUpOnAgents():
                for app in effect.apps:
                    if app in self._agents:
                        self._agents.pop(app).close()
            case ev.TellAgents():
                self._tell_agents()
            case ev.DialLeader():
                self._later(self._dial_leader(effect.entry))
            case ev.SendLeader():
                if self._leader is not None:
                    self._leader.send(effect.message)
            case ev.HangUpOnLeader():
                self.leader_status = {}
                if self._leader is not None:
                    leader, self._leader = self._leader, None
                    leader.close()
            case ev.LaunchHere():
                self.launcher.launch(effect.site, self.address)
            case ev.Probe():
                self._later(self._probe(effect))
            case ev.SetTimer():
                self.loop.call_later(effect.seconds, self.handle, ev.TimerFired(effect.timer))
            case ev.ViewGiven():
                log.info("%s", effect.view)
                if self.checkpoints is not None:
                    self.checkpoints.on_view(effect.view)
            case ev.FlowRuns():
                self._on_flow_runs(effect)
            case ev.Attached():
                self.on_running()
            case ev.StopFeeding():
                self._feeder.stop()
            case ev.Note():
                log.log(logging.WARNING if effect.warns else logging.INFO, "%s", effect.text)
            case ev.End():
                self._end(effect.error)
            case _:
                assert_never(effect)

    def _later(self, what: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = self.loop.create_task(what)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _on_flow_runs(self, effect: ev.FlowRuns) -> None:
        self.started = True
        self._feeder.start()
        if effect.begins and self.checkpoints is not None:
            self.checkpoints.start()

    # --- the arbiter ----------------------------------------------------------------------------

    def _ask(self, ask: ArbiterAsk) -> None:
        """Ask the arbiter. An application that is alone has its answer at once."""
        if self.arbiter.alone:
            self.handle(self.arbiter.answer(ask, self.node.leadership.holder))
            return
        task = self._later(self._ask_in_thread(ask))
        if isinstance(ask, AskResign):
            self._last_words = [t for t in self._last_words if not t.done()] + [task]

    async def _ask_in_thread(self, ask: ArbiterAsk) -> None:
        try:
            self.handle(await self.arbiter.answer_in_thread(ask, self.node.leadership.holder))
        except errors.HoldfastError as error:
            self._end(error)

    # --- other applications ---------------------------------------------------------------------

    async def _dial_leader(self, entry: Any) -> None:
        try:
            await dial(partial(self._dialled_leader, entry.holder), _address(entry.holder))
        except ConnectionRefusedError:
            self.handle(core.LeaderGone(entry))
        except OSError as error:
            log.info("the leader at %s does not answer: %s", entry.holder, error)

    def _dialled_leader(self, holder: str) -> Connection:
        return Connection(
            self.credentials.party,
            partial(self._on_leader_open, holder),
            self._on_message,
            self._on_leader_lost,
            identity=(wire.AGENT, self.place.app),
        )

    def _on_leader_open(self, holder: str, connection: Connection) -> None:
        self._leader = connection
        self.handle(ev.LeaderOpened(holder))

    def _on_leader_lost(self, connection: Connection, error: Exception | None) -> None:
        if self._leader is connection:
            self._leader, self.leader_status = None, {}
            self.handle(ev.LeaderLost())

    def _tell_agents(self) -> None:
        """Send the status to the applications that follow: only the leader knows all of it."""
        metrics = msgspec.json.encode(self.describe())
        for connection in self._agents.values():
            connection.send(wire.Status(metrics))

    async def _probe(self, probe: ev.Probe) -> None:
        self.handle(await self.launcher.probe(probe))

    # --- connections from sites and other applications ------------------------------------------

    def _accept(self) -> Connection:
        return Connection(self.credentials.party, self._on_open, self._on_message, self._on_close)

    def _on_open(self, connection: Connection) -> None:
        if connection.role == wire.AGENT:
            self._agents[connection.id] = connection
            self.rotator.on_joined((wire.AGENT, connection.id))
            self.handle(ev.AgentOpened(connection.id))

    def _on_message(self, connection: Connection, message: wire.Message, body: memoryview) -> None:
        """From a site, the control of another application, or a reader. The node gets every message
        of a site, since each is a sign of life."""
        try:
            if type(message) in self._handlers:
                protocol.dispatch(self._handlers, connection, message, body)
            elif not protocol.is_for(message, Receiver.CONTROL_NODE):
                raise ProtocolError("no control expects it")
        except ProtocolError as error:
            about = (type(message).__name__, connection.role, connection.id, error)
            log.warning("refused %s from %s %s: %s", *about)
            connection.abort()
            return
        match connection.role:
            case wire.SITE | wire.PULSE:
                self.handle(ev.SiteSaid(SiteId(connection.id), message))
            case wire.AGENT:
                self.handle(ev.AgentSaid(connection.id, message))
            case wire.SERVER if connection is self._leader:
                self.handle(ev.LeaderSaid(message))

    def on_register(self, connection: Connection, message: wire.Register) -> None:
        if message.site != connection.id:
            raise ProtocolError(f"it registers as site {message.site}")
        self._sites.add(connection)
        self.rotator.on_joined((wire.SITE, message.site))

    def on_beat(self, connection: Connection, message: wire.Beat) -> None:
        if connection.role == wire.PULSE:
            self._sites.add_pulse(connection)

    def on_cut(self, connection: Connection, message: wire.Cut) -> None:
        self._note_record(message.record)

    def on_task_files(self, connection: Connection, message: wire.TaskFiles) -> None:
        if message.final:
            self.final[message.task] = message
        elif self.checkpoints is not None:
            self.checkpoints.on_task_files(message)

    def on_not_stored(self, connection: Connection, message: wire.NotStored) -> None:
        if self.checkpoints is not None:
            self.checkpoints.on_not_stored(message)

    def on_status(self, connection: Connection, message: wire.Status) -> None:
        """The node keeps the status of sites; this is the flow's, from the leader."""
        if connection is self._leader:
            self.leader_status = msgspec.json.decode(message.metrics)

    def on_where(self, connection: Connection, message: wire.Where) -> None:
        connection.send(self._there(message.sink))

    def _on_close(self, connection: Connection, error: Exception | None) -> None:
        if connection.role == wire.AGENT and self._agents.get(connection.id) is connection:
            del self._agents[connection.id]
            self.handle(ev.AgentLost(connection.id))
        lost = self._sites.on_close(connection)
        if isinstance(lost, ev.SiteLost) and self.checkpoints is not None:
            self.checkpoints.on_lost(lost.site)
        if lost is not None:
            self.handle(lost)

    def _note_record(self, record: EpochRecord) -> None:
        self.records.add(record)
        if self.checkpoints is not None:
            self.checkpoints.note(record)

    def _send(self, site: SiteId, message: wire.Message) -> None:
        if not isinstance(message, wire.NewView):
            self._sites.send(site, message)
        elif site in self._sites:
            addresses = {s: self.route(site, s, a) for s, a in message.addresses.items()}
            self._sites.send(site, wire.NewView(message.view, addresses))
            if self.checkpoints is not None:
                recorded = wire.Recorded(self.node.term, self.checkpoints.recorded)
                self._sites.send(site, recorded)

    # --- where stages are -----------------------------------------------------------------------

    def _there(self, name: str) -> wire.There:
        """Where readers find a sink."""
        if self.controller is None or self.controller.view is None:
            return wire.There(f"application {self.place.app} does not lead")
        return locate_sink(self.plan, self.flow.name, self.controller, name)

    def _locate(self, stage: int) -> list[Address]:
        """Where a pusher finds its source. Any thread may ask."""
        controller = self.controller
        assert controller is not None
        return locate_stage(controller, stage)

    def _on_push_failed(self, error: Exception) -> None:
        self.post(core.FlowFailed(SiteId(-1), error))


def _now() -> float:
    """The time of a clock that runs while the machine sleeps, as the leases of arbiters do."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)
