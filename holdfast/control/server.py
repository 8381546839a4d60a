"""A control node on asyncio: sockets, threads that ask the arbiter, hosts, and what feeds sources.

It runs in an event loop of its own and takes no part in the flow of data. It decides nothing: what
comes in becomes an event of the `ControlNode`, and what that wants done is done here. Besides, it
keeps what sites report for others to look at.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, assert_never

import msgspec
import pyarrow as pa

from holdfast import errors
from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.arbiter import Arbiter, arbiter, following
from holdfast.connectors.sources import Pusher
from holdfast.control import events as ev
from holdfast.control.arbitration import answer
from holdfast.control.checkpoint_coordinator import CheckpointCoordinator, common_restore_point
from holdfast.control.checkpoint_store import CheckpointStore
from holdfast.control.hosting import Host, Place, Route, apart, direct, refuse
from holdfast.control.node import ControlNode
from holdfast.core import events as core
from holdfast.core.controller import Controller, State
from holdfast.core.effects import ArbiterAsk, AskCommit, AskLead, AskRead, AskRenew, AskResign
from holdfast.core.ids import Entry, GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import place
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord
from holdfast.engine.batches import user_names
from holdfast.net import wire
from holdfast.net.connection import Connection, dial, is_listening, listen
from holdfast.plan.planner import Plan, shape
from holdfast.site.runtime import SiteConfig

log = logging.getLogger("holdfast.control")

RECORDS_MAX = 100_000
"""So many epochs are remembered here, for whoever wants to see them."""
LAST_WORDS_S = 2.0
"""So long a control whose flow has ended waits for the arbiter to hear that it resigns."""


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
        """Which one of those that have written to the checkpoint folder: see
        `holdfast.storage.generations`."""
        self.place = place
        self.shape = apart(shape(plan, options.partitions), place.apps)
        refuse(plan, self.shape, place.apps)
        self.error: Exception | None = None
        self.records: dict[int, EpochRecord] = {}
        self.on_running: Callable[[], None] = lambda: None
        self.describe: Callable[[], dict[str, Any]] = dict
        """What whoever watches another application is to know of the flow, from the leading one."""
        self.told: dict[str, Any] = {}
        """What the leading one said of it, as long as this one follows."""
        self.route: Route = direct
        self.loop = asyncio.new_event_loop()
        self._host, self.secret = host, secret
        self.node = ControlNode(
            self.shape,
            options,
            app=place.app,
            apps=place.apps,
            sites=sites,
            spares=spares,
        )
        # A flow that is started again has nothing to do with the entry of old.
        key = f"{flow.name}-{wire.incarnation(secret)}"
        self._arbiter: Arbiter = arbiter(place.arbiter_url, key, options.lease_s)
        # A renewal must not wait for sites that are being launched.
        self._askers = ThreadPoolExecutor(2, thread_name_prefix="holdfast-arbiter")
        self._connections: dict[SiteId, Connection] = {}
        self._pulses: dict[SiteId, Connection] = {}
        self._agents: dict[int, Connection] = {}
        self._leader: Connection | None = None
        self._port = 0
        self._events: deque[ev.ControlEvent] = deque()
        self._handling = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._last_words: list[asyncio.Task[None]] = []
        self.started = False
        """Whether rows may have been taken."""
        self._pushers: list[Pusher] = []
        self.checkpoints: CheckpointCoordinator | None = None
        """Who sees to it that the flow can be gone on from if it is lost."""
        self.final: dict[TaskId, wire.TaskFiles] = {}
        """Of a flow that is being stopped: the tasks that are stored."""
        self.store: CheckpointStore | None = None
        """Where the flow is stored; of a flow in several applications nobody has the folder."""
        if options.store is not None and place.apps == 1:
            self.store = CheckpointStore(options.store, generation)
        if self.store is not None and options.store_every_ms:
            common = common_restore_point(flow, plan, options, wire.incarnation(secret), generation)
            self.checkpoints = CheckpointCoordinator(
                self.store,
                common,
                flow.restore_point,
                tell=self._send_all,
                term=lambda: self.node.term,
                fail=lambda error: self.handle(core.FlowFailed(SiteId(-1), error)),
            )

    # --- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the flow has ended."""
        self._over: asyncio.Future[None] = self.loop.create_future()
        port = self.place.controls[self.place.app][1] if self.place.controls else 0
        self._server, self._port = await listen(self._accept, self._host.listen_host, port)
        self.node.leadership.holder = _text(self.address)
        self.handle(ev.Began())
        try:
            await self._over
        finally:
            for connection in [*self._connections.values(), *self._agents.values()]:
                connection.close()
            if self.checkpoints is not None:
                self.checkpoints.close()
            self._stop_pushers()
            self._server.close()
            if self._last_words:
                await asyncio.wait(self._last_words, timeout=LAST_WORDS_S)
            await asyncio.sleep(0.05)
            await self._cancel_rest()
            self._askers.shutdown(wait=False, cancel_futures=True)
            self._arbiter.close()

    async def _cancel_rest(self) -> None:
        """Whatever else is under way ends with the flow."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    @property
    def address(self) -> tuple[str, int]:
        return self._host.advertise_host, self._port

    @property
    def controller(self) -> Controller | None:
        """Who decides on members, if this application leads."""
        return self.node.controller

    @property
    def status(self) -> dict[int, dict[str, Any]]:
        """What sites say of themselves."""
        return self.node.status

    def _end(self, error: Exception | None) -> None:
        self.error = error
        if not self._over.done():
            self._over.set_result(None)

    def post(self, event: ev.ControlEvent) -> None:
        """Tell the node something, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the flow has ended
            self.loop.call_soon_threadsafe(self.handle, event)

    def stop(self, drain: bool) -> None:
        """End the flow, from any thread. If this application does not lead, another one is to be
        told the same; should neither lead just now, the one that comes to lead will know."""
        self.post(core.StopRequested(drain))

    def protect(self, guards: Sequence[ProtectionSpec]) -> None:
        """Protect stages so from now on; to be called in the controller's thread."""
        controller = self.controller
        if controller is None:
            raise errors.HostError(
                "another application leads the flow", hint="change its protection there"
            )
        if controller.view is None or controller.state is not State.RUNNING:
            raise errors.HostError(
                f"the flow is {controller.state.value}, so its protection cannot be changed"
            )
        wanted = apart(controller.shape.guarded(tuple(guards)), self.place.apps)
        place(wanted, controller.view.members, controller.domains)  # raises if that cannot be
        self.handle(core.ProtectionWanted(wanted.guards))

    # --- events and effects ---------------------------------------------------------------------

    def handle(self, event: ev.ControlEvent) -> None:
        """Have the node handle an event, and carry out what follows, one event after the other."""
        self._events.append(event)
        if self._handling:
            return  # carrying something out has brought it about
        self._handling = True
        try:
            while self._events:
                for effect in self.node.handle(self._events.popleft(), _now()):
                    self._apply(effect)
        finally:
            self._handling = False

    def _apply(self, effect: ev.ControlEffect) -> None:
        match effect:
            case AskLead() | AskRenew() | AskRead() | AskResign() | AskCommit():
                self._ask(effect)
            case ev.SendSite():
                self._send(effect.site, effect.message)
            case ev.ExpelSite():
                self._expel(effect)
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
                self.told = {}
                if self._leader is not None:
                    leader, self._leader = self._leader, None
                    leader.close()
            case ev.LaunchHere():
                self._launch_here(effect.site)
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
                self._stop_pushers()
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
        self._start_pushers()
        if effect.begins and self.checkpoints is not None:
            self.checkpoints.start()

    # --- the arbiter ----------------------------------------------------------------------------

    def _ask(self, ask: ArbiterAsk) -> None:
        """Something that the arbiter may take its time for. Whoever is alone leads for ever, and
        what it says is committed."""
        if self.place.arbiter_url is not None:
            task = self._later(self._ask_in_thread(ask))
            if isinstance(ask, AskResign):
                self._last_words.append(task)
        elif isinstance(ask, AskCommit):
            assert isinstance(ask.entry, Entry)
            self.handle(core.Committed(ask, following(ask.entry, ask.value)))
        else:
            self.handle(self._answer(ask))

    async def _ask_in_thread(self, ask: ArbiterAsk) -> None:
        try:
            self.handle(await self.loop.run_in_executor(self._askers, self._answer, ask))
        except errors.HoldfastError as error:
            self._end(error)

    def _answer(self, ask: ArbiterAsk) -> ev.ArbiterAnswer:
        """Called in any thread."""
        lease_s = self._arbiter.lease_s if self.place.arbiter_url is not None else float("inf")
        return answer(self._arbiter, self.node.leadership.holder, ask, lease_s)

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
            self.secret,
            partial(self._on_leader_open, holder),
            self._on_leader_message,
            self._on_leader_lost,
            identity=("agent", self.place.app),
        )

    def _on_leader_open(self, holder: str, connection: Connection) -> None:
        self._leader = connection
        self.handle(ev.LeaderOpened(holder))

    def _on_leader_message(
        self, connection: Connection, message: wire.Message, body: memoryview
    ) -> None:
        match message:
            case wire.Launch() | wire.Dismiss():
                if connection is self._leader:
                    self.handle(ev.LeaderSaid(message))
            case wire.Status():
                self.told = msgspec.json.decode(message.figures)
            case _:
                connection.abort()

    def _on_leader_lost(self, connection: Connection, error: Exception | None) -> None:
        if self._leader is connection:
            self._leader, self.told = None, {}
            self.handle(ev.LeaderLost())

    def _tell_agents(self) -> None:
        """Only the leader knows how protected the flow is; the others are asked for it, too."""
        figures = msgspec.json.encode(self.describe())
        for connection in self._agents.values():
            connection.send(wire.Status(figures))

    # --- launching sites ------------------------------------------------------------------------

    def _launch_here(self, site: SiteId) -> None:
        several = self.place.apps > 1
        config = SiteConfig(
            site,
            self.secret,
            self.place.controls or (self.address,),
            self._host.listen_host,
            self.options,
            f"application {self.place.app}" if several else self._host.application,
            generation=self.generation,
        )
        # Not in the loop: packing the flow takes a while, and others may fail meanwhile.
        self.loop.run_in_executor(None, self._launch_now, site, config)

    def _launch_now(self, site: SiteId, config: SiteConfig) -> None:
        try:
            self._host.launch(self.flow, config, self._on_exit)
        except Exception as error:
            self.post(core.FlowFailed(site, error))

    def _on_exit(self, site: int, reason: str) -> None:
        """A site's process has ended (called from any thread)."""
        self.post(ev.ProcessExited(SiteId(site), reason))

    async def _probe(self, effect: ev.Probe) -> None:
        gone = await self._gone(effect.addresses)
        self.handle(ev.Probed(effect.number, tuple(gone)))

    async def _gone(self, addresses: Mapping[SiteId, tuple[str, int]]) -> list[SiteId]:
        """Those of the sites where nobody listens any more."""
        patience = self.options.lease_s / 5
        there = await asyncio.gather(*(is_listening(a, patience) for a in addresses.values()))
        return [s for s, listens in zip(addresses, there, strict=True) if not listens]

    # --- connections from sites and other applications ------------------------------------------

    def _accept(self) -> Connection:
        return Connection(self.secret, self._on_open, self._on_message, self._on_close)

    def _on_open(self, connection: Connection) -> None:
        if connection.role == "agent":
            self._agents[connection.id] = connection
            self.handle(ev.AgentOpened(connection.id))

    def _on_message(self, connection: Connection, message: wire.Message, body: memoryview) -> None:
        if connection.role == wire.READER:
            if isinstance(message, wire.Where):
                connection.send(self._there(message.sink))
            return
        if isinstance(message, wire.Exited):
            self.handle(ev.AgentSaid(connection.id, message))
            return
        site = SiteId(connection.id)
        match message:
            case wire.Beat():
                if connection.role == wire.PULSE:
                    self._pulses[site] = connection
            case wire.Register():
                site = SiteId(message.site)
                self._connections[site] = connection
            case wire.Cut():
                self._note_record(message.record)
            case wire.TaskFiles() if message.final:
                self.final[StageId(message.stage), GroupId(message.group)] = message
            case wire.TaskFiles() | wire.NotStored():
                if self.checkpoints is not None:
                    self.checkpoints.on_message(message)
            case (
                wire.Seen()
                | wire.ReplicaReport()
                | wire.Behind()
                | wire.Unheard()
                | wire.Status()
                | wire.Failed()
                | wire.Finished()
            ):
                pass
            case _:
                log.warning("site %s sent %s to the controller", site, type(message).__name__)
                connection.abort()
                return
        self.handle(ev.SiteSaid(site, message, connection.role == wire.PULSE))

    def _on_close(self, connection: Connection, error: Exception | None) -> None:
        if connection.role == "agent" and self._agents.get(connection.id) is connection:
            del self._agents[connection.id]
            self.handle(ev.AgentLost(connection.id))
        site = SiteId(connection.id)
        if connection.role == wire.PULSE and self._pulses.get(site) is connection:
            del self._pulses[site]
            self.handle(ev.PulseLost(site))
        if connection.role == "site" and self._connections.get(site) is connection:
            del self._connections[site]
            if self.checkpoints is not None:
                self.checkpoints.on_lost(site)
            self.handle(ev.SiteLost(site))

    def _note_record(self, record: EpochRecord) -> None:
        """Keep it, among the last ones: a flow may run for years."""
        self.records[record.epoch] = record.summary()
        while len(self.records) > RECORDS_MAX:
            del self.records[next(iter(self.records))]
        if self.checkpoints is not None:
            self.checkpoints.note(record)

    def _expel(self, effect: ev.ExpelSite) -> None:
        # One that is in a call that does not end reads only what comes to its pulse.
        site = effect.site
        for told in (self._connections.pop(site, None), self._pulses.pop(site, None)):
            if told is not None:
                told.send(effect.message)
                told.close()

    def _send_all(self, message: wire.Message) -> None:
        for site in list(self._connections):
            self._send(site, message)

    def _send(self, site: SiteId, message: wire.Message) -> None:
        connection = self._connections.get(site)
        if connection is None:
            return
        if isinstance(message, wire.NewView):
            others = message.addresses.items()
            addresses = {s: self.route(site, s, a) for s, a in others}
            connection.send(wire.NewView(message.view, addresses))
            if self.checkpoints is not None:
                connection.send(wire.Recorded(self.node.term, self.checkpoints.recorded))
        else:
            connection.send(message)

    # --- reading --------------------------------------------------------------------------------

    def _there(self, name: str) -> wire.There:
        """Where readers find a sink."""
        if self.controller is None or self.controller.view is None:
            return wire.There(f"application {self.place.app} does not lead")
        sinks = {stage.name: stage for stage in self.plan.sinks}
        if name not in sinks:
            return wire.There(f"flow {self.flow.name!r} has no sink {name!r}, but {sorted(sinks)}")
        stage = sinks[name]
        schema = stage.inputs[0].schema
        shown = pa.schema([schema.field(n) for n in user_names(schema)])
        addresses = self._locate(stage.id)
        return wire.There("", stage.id, shown.serialize().to_pybytes(), addresses)

    # --- feeding --------------------------------------------------------------------------------

    def _start_pushers(self) -> None:
        for stage in self.plan.sources:
            assert stage.source is not None
            if stage.source.pushed and not stage.source.pulled:
                pusher = stage.source.pusher()
                pusher.failed = self._on_push_failed
                where = partial(self._locate, stage.id)
                pusher.start(where, self.secret, stage.id, stage.name, self.flow.name)
                self._pushers.append(pusher)

    def _locate(self, stage: int) -> list[tuple[str, int]]:
        """Where a stage with one partition group is: the leading replica first, then all who know
        of it."""
        assert self.controller is not None and self.controller.view is not None
        view, addresses = self.controller.view, dict(self.controller.addresses)
        sites = dict.fromkeys([*view.groups[stage][0].replicas, *view.members])
        return [addresses[s] for s in sites if s in addresses]

    def _on_push_failed(self, error: Exception) -> None:
        self.post(core.FlowFailed(SiteId(-1), error))

    def _stop_pushers(self) -> None:
        pushers, self._pushers = self._pushers, []
        for pusher in pushers:
            pusher.stop()


def _now() -> float:
    """Of a clock that goes on while the machine sleeps, as the leases of arbiters do."""
    return time.clock_gettime(getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC))


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)
