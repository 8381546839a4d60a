"""The controller's side of the wire: what joins the controller machine to sites, hosts and arbiter.

It runs in an event loop of its own and takes no part in the flow of data. A flow may be hosted by
several applications. Each of them has a `Control`, to which all sites report; one leads, and only
what it has committed in the arbiter counts. The others know what it knows from the same reports,
launch sites for it, and take its place when it dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, assert_never

import msgspec
import pyarrow as pa

from holdfast import errors
from holdfast.api.graph import Flow
from holdfast.api.options import Options
from holdfast.arbiter import Arbiter, Entry, arbiter
from holdfast.connectors.sources import Pusher
from holdfast.control.checkpoint_coordinator import CheckpointCoordinator, common_restore_point
from holdfast.control.checkpoint_store import CheckpointStore
from holdfast.control.hosting import Host, Place, Route, apart, direct, refuse
from holdfast.core.controller import Controller, State, first_id
from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    FenceSite,
    LaunchSite,
    OrderCatchUp,
    OrderRetention,
    PauseFlow,
    StartFlow,
    Wait,
)
from holdfast.core.events import (
    Call,
    ControllerEvent,
    FlowFailed,
    ProtectionWanted,
    ReplicaBehind,
    ReplicaReported,
    SiteFinished,
    SiteRegistered,
    SitesFailed,
    SitesHung,
    SitesPartitioned,
    StopRequested,
    ViewSeen,
    WaitOver,
)
from holdfast.core.failure_detector import FailureDetector
from holdfast.core.ids import GroupId, SiteId, StageId, TaskId
from holdfast.core.layout import Domain, View, place
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord
from holdfast.engine.batches import user_names
from holdfast.errors import ArbiterAway, Superseded
from holdfast.net import wire
from holdfast.net.connection import Connection, dial, is_listening, listen
from holdfast.plan.planner import Plan, shape
from holdfast.site.runtime import SiteConfig

log = logging.getLogger("holdfast.control")

GATHER_S = 0.003
"""Sites that are lost within so long of each other have failed together: one view, not several."""
RECORDS_MAX = 100_000
"""So many epochs are remembered here, for whoever wants to see them."""


class Committed(msgspec.Struct, frozen=True):
    """What a controller knows that another one needs to go on."""

    view: View
    addresses: dict[int, tuple[str, int]]
    domains: dict[int, Domain]
    app_of: dict[int, int]
    dead: dict[int, str]
    launched: list[int]
    running: bool
    draining: bool
    ended: bool = False
    error: str | None = None

    @property
    def failure(self) -> Exception | None:
        """What a flow that has ended failed with."""
        return errors.HoldfastError(self.error) if self.error else None


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
        self.controller: Controller | None = None
        self.error: Exception | None = None
        self.records: dict[int, EpochRecord] = {}
        self.status: dict[int, dict[str, Any]] = {}
        self.on_running: Callable[[], None] = lambda: None
        self.describe: Callable[[], dict[str, Any]] = dict
        """What whoever watches another application is to know of the flow, from the leading one."""
        self.told: dict[str, Any] = {}
        """What the leading one said of it, as long as this one follows."""
        self.route: Route = direct
        self.loop = asyncio.new_event_loop()
        self._host, self.secret = host, secret
        self._sites, self._spares = sites, spares
        # A flow that is started again has nothing to do with the entry of old.
        key = f"{flow.name}-{wire.incarnation(secret)}"
        self._arbiter: Arbiter = arbiter(place.arbiter_url, key, options.lease_s)
        self._entry: Entry | None = None
        self._term = 0
        """The last in which this application has led."""
        self._to_fence: list[SiteId] = []
        self._uncommitted: CommitView | None = None
        self._committing = False
        self._connections: dict[SiteId, Connection] = {}
        self._registered: dict[SiteId, wire.Register] = {}
        self._app_of: dict[int, int] = {}
        self._agents: dict[int, Connection] = {}
        self._leader: Connection | None = None
        self._launched_here: set[SiteId] = set()
        self._pulses: dict[SiteId, Connection] = {}
        self._detector = FailureDetector(options.lease_s)
        self._suspects: dict[SiteId, str | None] = {}
        """Sites whose connection broke; with a reason if their process is known to be gone."""
        self._started = False
        self._asked: StopRequested | None = None
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
                fail=lambda error: self._handle(FlowFailed(SiteId(-1), error)),
            )

    # --- life -----------------------------------------------------------------------------------

    async def run(self) -> None:
        """Until the flow has ended."""
        self._over: asyncio.Future[None] = self.loop.create_future()
        port = self.place.controls[self.place.app][1] if self.place.controls else 0
        self._server, self._port = await listen(self._accept, self._host.listen_host, port)
        tasks = [self.loop.create_task(t) for t in (self._keep_leading(), self._watch())]
        try:
            await self._over
        finally:
            for task in tasks:
                task.cancel()
            if self.controller is not None:
                for connection in [*self._connections.values(), *self._agents.values()]:
                    connection.send(wire.Dismiss())
                    connection.close()
                self._say_ended()
            if self.checkpoints is not None:
                self.checkpoints.close()
            self._stop_pushers()
            self._server.close()
            await asyncio.sleep(0.05)
            await self._cancel_rest()
            self._arbiter.close()

    async def _cancel_rest(self) -> None:
        """Whatever else is under way ends with the flow."""
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    @property
    def started(self) -> bool:
        """Whether rows may have been taken."""
        return self._started

    @property
    def address(self) -> tuple[str, int]:
        return self._host.advertise_host, self._port

    def _end(self, error: Exception | None) -> None:
        self.error = error
        if not self._over.done():
            self._over.set_result(None)

    def post(self, event: ControllerEvent) -> None:
        """Tell the controller something, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the flow has ended
            self.loop.call_soon_threadsafe(self._handle, event)

    def stop(self, drain: bool) -> None:
        """End the flow, from any thread. If this application does not lead, another one is to be
        told the same; should neither lead just now, the one that comes to lead will know."""
        self._asked = StopRequested(drain)
        self.post(self._asked)

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
        self._handle(ProtectionWanted(wanted.guards))

    # --- who leads ------------------------------------------------------------------------------

    async def _keep_leading(self) -> None:
        """Lead, or follow whoever does, for as long as the flow runs. With one application nobody
        else can lead: the lease means nothing."""
        while self.controller is None or self.place.arbiter_url is not None:
            try:
                if self.controller is None:
                    entry = await self._ask(partial(self._arbiter.lead, _text(self.address)))
                    if entry is not None:
                        await self._lead(entry)
                    elif self._leader is None:
                        await self._follow()
                elif self._entry is not None and not await self._ask(
                    partial(self._arbiter.renew, self._entry)
                ):
                    self._step_down("its lease has run out")
            except ArbiterAway as error:
                log.warning("%s", error)
            except errors.HoldfastError as error:
                self._end(error)
            await asyncio.sleep(self.options.lease_s / 5)

    async def _ask(self, call: Callable[[], Any]) -> Any:
        """Something that the arbiter may take its time for."""
        if self.place.arbiter_url is None:
            return call()
        return await self.loop.run_in_executor(None, call)

    async def _lead(self, entry: Entry) -> None:
        if self._entry is not None and self._entry.term == entry.term:
            return  # it is being seen to
        if entry.term <= self._term:
            # It has stepped down in this term, which therefore is over: sites take a new leader by
            # its term, and their numbers are given out once in each.
            await self._ask(partial(self._arbiter.resign, entry))
            return
        log.info("application %s leads, term %s", self.place.app, entry.term)
        self._entry, self._term = entry, entry.term
        self.told = {}
        if self._leader is not None:
            self._leader.close()
            self._leader = None
        if entry.value:
            await self._take_over(msgspec.msgpack.decode(entry.value, type=Committed), entry.term)
        else:
            self._set_out(entry.term)
        if self._asked is not None:
            self._handle(self._asked)

    def _set_out(self, term: int) -> None:
        """Begin the flow."""
        ids = [SiteId(first_id(term) + i) for i in range(self._sites + self._spares)]
        self._app_of = {int(s): s % self.place.apps for s in ids}
        sites, spares = ids[: self._sites], ids[self._sites :]
        self.controller = Controller(self.shape, sites, spares, term)
        for site in ids:
            self._launch(site)

    async def _take_over(self, known: Committed, term: int) -> None:
        """Go on from what the last leader had committed, and from what the sites have reported."""
        if known.ended:
            self._end(known.failure)
            return
        self._app_of = {int(s): a for s, a in known.app_of.items()}
        domains = {SiteId(s): d for s, d in known.domains.items()}
        addresses = {SiteId(s): a for s, a in known.addresses.items()}
        for site, registered in list(self._registered.items()):
            if site in addresses or site in known.launched:
                domains[site] = registered.domain
                addresses[site] = (registered.host, registered.port)
            else:
                self._fence(site)  # in place of one whose death was not committed: it is done again
        gone = await self._gone(known.view.members, addresses)
        controller = Controller(self.shape, known.view.members)
        dead = {SiteId(s): reason for s, reason in known.dead.items()}
        effects = controller.resume(
            known.view, term, addresses, domains, dead, known.running, known.draining
        )
        orphans = [SiteId(s) for s in known.launched if s not in addresses]
        controller.launched |= set(orphans)
        self.status = {s: said for s, said in self.status.items() if s in self._registered}
        self.controller, self._started = controller, known.running
        self._detector.begin(addresses, time.monotonic())
        if gone or orphans:
            effects += controller.handle(SitesFailed((*gone, *orphans), "its application is gone"))
        for effect in _last_view_only(effects):
            self._apply(effect)
        if self._suspects:
            self._inquire_soon()  # they were noticed before this one led
        if known.running:
            self._start_pushers()
            self.on_running()

    def _step_down(self, reason: str) -> None:
        log.warning("application %s no longer leads: %s", self.place.app, reason)
        self._stop_pushers()
        self.controller = self._entry = self._uncommitted = None
        for connection in self._agents.values():
            connection.close()
        self._agents.clear()

    async def _follow(self) -> None:
        """Offer the leader to launch sites for it."""
        entry = await self._ask(self._arbiter.read)
        if not entry.holder or entry.holder == _text(self.address):
            return
        if entry.value:
            known = msgspec.msgpack.decode(entry.value, type=Committed)
            if known.ended:
                self._end(known.failure)
                return
        try:
            await dial(self._dialled_leader, _address(entry.holder))
        except ConnectionRefusedError:
            await self._depose(entry)
        except OSError as error:
            log.info("the leader at %s does not answer: %s", entry.holder, error)

    def _dialled_leader(self) -> Connection:
        return Connection(
            self.secret,
            self._on_leader_open,
            self._on_leader_message,
            self._on_leader_lost,
            identity=("agent", self.place.app),
        )

    def _on_leader_open(self, connection: Connection) -> None:
        self._leader = connection
        self.on_running()

    def _on_leader_message(
        self, connection: Connection, message: wire.Message, body: memoryview
    ) -> None:
        match message:
            case wire.Launch():
                self._launch_here(SiteId(message.site))
            case wire.Status():
                self.told = msgspec.json.decode(message.figures)
            case wire.Dismiss():
                self._end(None)
            case _:
                connection.abort()

    def _on_leader_lost(self, connection: Connection, error: Exception | None) -> None:
        if self._leader is connection:
            self._leader, self.told = None, {}
            if not self._over.done():
                self._inquest = self.loop.create_task(self._follow())

    async def _depose(self, entry: Entry) -> None:
        """Nobody listens where the leader did: its process is gone, and its lease need not run
        out first. Should it live after all, its next commit will fail."""
        won = await self._ask(partial(self._arbiter.lead, _text(self.address), despite=entry))
        if won is not None and self.controller is None:
            await self._lead(won)

    def _note_record(self, record: EpochRecord) -> None:
        """Keep it, among the last ones: a flow may run for years."""
        self.records[record.epoch] = record.summary()
        while len(self.records) > RECORDS_MAX:
            del self.records[next(iter(self.records))]
        if self.checkpoints is not None:
            self.checkpoints.note(record)

    # --- launching sites ------------------------------------------------------------------------

    def _launch(self, site: SiteId) -> None:
        """Have the application that the site belongs to start its process."""
        app = self._app_of[site]
        if app == self.place.app:
            self._launch_here(site)
        elif app in self._agents:
            self._agents[app].send(wire.Launch(site))  # if not, it is told when it comes

    def _launch_here(self, site: SiteId) -> None:
        if self._over.done() or site in self._launched_here:
            return
        self._launched_here.add(site)
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
            self.post(FlowFailed(site, error))

    def _on_exit(self, site: int, reason: str) -> None:
        """A site's process has ended (called from any thread)."""
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self._exited, SiteId(site), reason)

    def _exited(self, site: SiteId, reason: str) -> None:
        if self.controller is not None:
            self._suspect(site, reason)
        elif self._leader is not None:
            self._leader.send(wire.Exited(site, reason))

    # --- connections from sites and other applications ------------------------------------------

    def _accept(self) -> Connection:
        return Connection(self.secret, self._on_open, self._on_message, self._on_close)

    def _on_open(self, connection: Connection) -> None:
        if connection.role == "agent" and self.controller is None:
            connection.close()  # we follow ourselves
        elif connection.role == "agent":
            self._agents[connection.id] = connection
            # Also those it may have been told before: the last agent may have died with them.
            for site in sorted(self.controller.launched if self.controller else ()):
                if self._app_of.get(site) == connection.id:
                    connection.send(wire.Launch(site))

    def _on_message(self, connection: Connection, message: wire.Message, body: memoryview) -> None:
        if connection.role == wire.READER:
            if isinstance(message, wire.Where):
                connection.send(self._there(message.sink))
            return
        if isinstance(message, wire.Exited):
            self._suspect(SiteId(message.site), message.reason)
            return
        site = SiteId(connection.id)
        now = time.monotonic()
        self._detector.heard(site, now, isinstance(message, wire.Beat) and message.busy)
        match message:
            case wire.Beat():
                self._on_beat(connection, site, message)
            case wire.Register():
                self._on_register(connection, message)
            case wire.Seen():
                self._handle(ViewSeen(site, message.term, message.number))
            case wire.ReplicaReport():
                task = (StageId(message.stage), GroupId(message.group))
                replica = SiteId(message.site)
                self._handle(
                    ReplicaReported(replica, task, message.number, message.phase, message.reason)
                )
            case wire.Behind():
                if self._uncommitted is None:  # if not, membership is frozen
                    self._handle(ReplicaBehind(SiteId(message.site), message.reason))
            case wire.Unheard():
                if self.controller is not None:
                    other = SiteId(message.site)
                    self._detector.complained(site, other, message.leases, message.how, now)
            case wire.Status():
                if site in self._connections:
                    self.status[site] = msgspec.json.decode(message.figures)
            case wire.Cut():
                self._note_record(message.record)
            case wire.TaskFiles() if message.final:
                self.final[StageId(message.stage), GroupId(message.group)] = message
            case wire.TaskFiles() | wire.NotStored():
                if self.checkpoints is not None:
                    self.checkpoints.on_message(message)
            case wire.Failed():
                self._handle(FlowFailed(site, _rebuilt(message)))
            case wire.Finished():
                self._handle(SiteFinished(site, message.number))
            case _:
                log.warning("site %s sent %s to the controller", site, type(message).__name__)
                connection.abort()

    def _on_beat(self, connection: Connection, site: SiteId, message: wire.Beat) -> None:
        if connection.role == wire.PULSE:
            self._pulses[site] = connection
            call = Call(message.stage, message.epoch, message.seconds) if message.busy else None
            self._detector.in_call(site, call)

    def _on_register(self, connection: Connection, message: wire.Register) -> None:
        site = SiteId(message.site)
        self._connections[site] = connection
        self._registered[site] = message
        self._suspects.pop(site, None)
        if self.controller is None:
            return
        if site in self.controller.dead:
            self._fence(site)
        elif site not in self.controller.addresses:
            address = (message.host, message.port)
            self._handle(SiteRegistered(site, address, message.domain))
        elif self.controller.view is not None and self._uncommitted is None:
            self._give_view(site)  # its connection broke, and it may have missed something
            for effect in self.controller.orders_for(site):
                self._apply(effect)

    def _on_close(self, connection: Connection, error: Exception | None) -> None:
        if connection.role == "agent" and self._agents.get(connection.id) is connection:
            del self._agents[connection.id]
        site = SiteId(connection.id)
        if connection.role == wire.PULSE and self._pulses.get(site) is connection:
            del self._pulses[site]
            self._detector.in_call(site, None)
        if connection.role == "site" and self._connections.get(site) is connection:
            del self._connections[site]
            self._registered.pop(site, None)
            if self.checkpoints is not None:
                self.checkpoints.on_lost(site)
            self._suspect(site, None)

    # --- who is dead ----------------------------------------------------------------------------

    def _suspect(self, site: SiteId, reason: str | None) -> None:
        """Something is wrong with a site: find out what, together with those that follow soon. If
        this application does not lead, it is to be found out when it does."""
        if self._over.done():
            return  # they were dismissed
        if not self._suspects and self.controller is not None:
            self._inquire_soon()
        self._suspects[site] = reason or self._suspects.get(site)

    def _inquire_soon(self) -> None:
        self.loop.call_later(GATHER_S, lambda: self.loop.create_task(self._inquire()))

    async def _inquire(self) -> None:
        """Tell the dead from those whose connection broke: nobody listens where a process died."""
        suspects, self._suspects = self._suspects, {}
        gone = {s: reason for s, reason in suspects.items() if reason is not None}
        unsure = [s for s, reason in suspects.items() if reason is None]
        known = self.controller.addresses if self.controller else {}
        for site in await self._gone(unsure, known):
            gone[site] = "its process is gone"
        if gone:
            reason = "; ".join(sorted(set(gone.values())))
            self._handle(SitesFailed(tuple(gone), reason))

    async def _gone(
        self, sites: Iterable[SiteId], addresses: Mapping[SiteId, tuple[str, int]]
    ) -> list[SiteId]:
        """Those of the sites where nobody listens any more."""
        asked = [s for s in sites if s in addresses]
        patience = self.options.lease_s / 5
        there = await asyncio.gather(*(is_listening(addresses[s], patience) for s in asked))
        return [s for s, listens in zip(asked, there, strict=True) if not listens]

    async def _watch(self) -> None:
        """Declare dead who has been silent for longer than the lease, unless we have been."""
        pause = self.options.lease_s / 5
        while True:
            before = time.monotonic()
            await asyncio.sleep(pause)
            now = time.monotonic()
            if now - before > 3 * pause:  # it is this process that did not get to run
                self._detector.was_away(now)
            if self.controller is None:
                continue
            self._tell_agents()
            if silent := self._detector.silent(self.controller.addresses, now):
                reason = f"silent for more than {self.options.lease_s} s"
                self._handle(SitesFailed(tuple(silent), reason, certain=False))
            self._part(now)
            self._end_hung_calls()
            self._give_up_joins(now)

    def _tell_agents(self) -> None:
        """Only the leader knows how protected the flow is; the others are asked for it, too."""
        if self._agents:
            figures = msgspec.json.encode(self.describe())
            for connection in self._agents.values():
                connection.send(wire.Status(figures))

    def _part(self, now: float) -> None:
        """See to those that hear nothing of each other."""
        couples = self._detector.partitioned(now)
        if couples and self._uncommitted is None:  # if not, membership is frozen
            self._detector.settled()
            self._handle(SitesPartitioned(couples))

    def _end_hung_calls(self) -> None:
        """See to sites that have been in one call for too long."""
        limit = max(self.options.call_s_max, 2 * self.options.lease_s)
        calls = self._detector.hung(limit)
        if calls and self._uncommitted is None:  # if not, membership is frozen
            self._handle(SitesHung(calls, limit))

    def _give_up_joins(self, now: float) -> None:
        """A replica that is being made and gets nowhere is given up, and rebuilt."""
        view = self.controller.view if self.controller else None
        if view is None:
            return
        stuck, seconds = self._detector.stuck(view, self.status.values(), now)
        for task, site in stuck[:1]:  # the view is another one after that
            reason = f"site {site} got nothing for more than {seconds:.0f} s"
            self._handle(ReplicaReported(site, task, view.number, "failed", reason))

    # --- the controller's effects ---------------------------------------------------------------

    def _handle(self, event: ControllerEvent) -> None:
        if self.controller is not None:
            for effect in _last_view_only(self.controller.handle(event)):
                self._apply(effect)

    def _apply(self, effect: ControllerEffect) -> None:
        match effect:
            case CommitView():
                self._uncommitted = effect
                self._commit()
            case StartFlow():
                self._started = True
                for site in self._connections:
                    self._send(site, wire.Start())
                self._start_pushers()
                if self.checkpoints is not None:
                    self.checkpoints.start()
                self._commit_again()
                self.on_running()
            case OrderCatchUp():
                term = self.controller.term if self.controller else 0
                self._send(effect.donor, wire.CatchUp(term, *effect.task, effect.joiner))
            case OrderRetention():
                self._send(effect.site, wire.Retain(effect.number))
            case DrainFlow():
                self._stop_pushers()
                self._send(effect.site, wire.Drain())
                self._commit_again()
            case PauseFlow():
                self._send(effect.site, wire.Pause(effect.paused))
            case LaunchSite():
                self._note_app(effect.site)
                self.loop.call_later(effect.after_ms / 1e3, self._launch, effect.site)
            case FenceSite():
                self._to_fence.append(effect.site)  # nobody acts on a death before it is committed
            case Wait():
                self.loop.call_later(effect.ms / 1e3, self._handle, WaitOver(effect.timer))
            case EndFlow():
                self._end(effect.error)
            case _:
                assert_never(effect)

    def _note_app(self, site: SiteId) -> None:
        """A site that is launched in place of another belongs to the same application."""
        assert self.controller is not None
        before = next((o for o, n in self.controller.replaced.items() if n == site), None)
        self._app_of[site] = self._app_of.get(before, 0) if before is not None else 0

    def _fence(self, site: SiteId) -> None:
        connection = self._connections.pop(site, None)
        self._registered.pop(site, None)
        self._detector.forget(site)
        self.status.pop(site, None)
        # One that is in a call that does not end reads only what comes to its pulse.
        for told in (connection, self._pulses.pop(site, None)):
            if told is not None:
                told.send(wire.Fenced())
                told.close()

    def _commit(self) -> None:
        """Have the arbiter commit the latest view; nobody acts on it before."""
        if self.place.arbiter_url is None:
            self._committed(self._uncommitted)
        elif not self._committing:
            self._committing = True
            self._pending = self.loop.create_task(self._commit_latest())

    def _commit_again(self) -> None:
        """The same view, but something else has changed that a successor must know."""
        if self.place.arbiter_url is not None and self._uncommitted is None:
            assert self.controller is not None and self.controller.view is not None
            self._uncommitted = CommitView(self.controller.view, {})
            self._commit()

    async def _commit_latest(self) -> None:
        try:
            while (effect := self._uncommitted) is not None and self.controller is not None:
                await self._commit_value(msgspec.msgpack.encode(self._known()))
                if effect is self._uncommitted:
                    self._committed(effect)
        finally:
            self._committing = False

    async def _commit_value(self, value: bytes) -> None:
        """Say it until there is an answer. The same again is right if only the answer got lost;
        anything else would find it there, and take it for a successor's."""
        while self.controller is not None:
            assert self._entry is not None
            try:
                self._entry = await self._ask(partial(self._arbiter.commit, self._entry, value))
                return
            except ArbiterAway as error:
                log.warning("membership is frozen: %s", error)
                await asyncio.sleep(self.options.lease_s / 5)
            except Superseded as error:
                self._step_down(str(error))

    def _committed(self, effect: CommitView | None) -> None:
        self._uncommitted = None
        for dead in self._to_fence:
            self._fence(dead)
        self._to_fence.clear()
        if effect is not None:
            log.info("%s", effect.view)
            if self.checkpoints is not None:
                self.checkpoints.on_view(effect.view)
            for site in effect.view.members:
                self._give_view(site)

    def _known(self, ended: bool = False) -> Committed:
        controller = self.controller
        assert controller is not None and controller.view is not None
        return Committed(
            controller.view,
            {int(s): a for s, a in controller.addresses.items()},
            {int(s): d for s, d in controller.domains.items()},
            self._app_of,
            {int(s): r for s, r in controller.dead.items()},
            [int(s) for s in controller.launched],
            self._started,
            controller.state.value == "draining",
            ended,
            str(self.error) if self.error else None,
        )

    def _say_ended(self) -> None:
        """Leave word that the flow is over, for applications that come back later."""
        if self._entry is None or self.place.arbiter_url is None:
            return
        with contextlib.suppress(errors.HoldfastError):
            if self.controller is not None and self.controller.view is not None:
                value = msgspec.msgpack.encode(self._known(ended=True))
                self._entry = self._arbiter.commit(self._entry, value)
            self._arbiter.resign(self._entry)

    def _give_view(self, site: SiteId) -> None:
        assert self.controller is not None and self.controller.view is not None
        view, known = self.controller.view, self.controller.addresses
        if site in view.members:
            others = [s for s in view.members if s in known]
            addresses = {int(s): self.route(site, s, known[s]) for s in others}
            self._send(site, wire.NewView(view, addresses))
        if self.checkpoints is not None:
            self._send(site, wire.Recorded(self.checkpoints.recorded))
        if self._started:
            self._send(site, wire.Start())

    def _send_all(self, message: wire.Message) -> None:
        for site in list(self._connections):
            self._send(site, message)

    def _send(self, site: SiteId, message: wire.Message) -> None:
        connection = self._connections.get(site)
        if connection is not None:
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
        self.post(FlowFailed(SiteId(-1), error))

    def _stop_pushers(self) -> None:
        pushers, self._pushers = self._pushers, []
        for pusher in pushers:
            pusher.stop()


def _last_view_only(effects: list[ControllerEffect]) -> list[ControllerEffect]:
    """Of several views that follow one another at once only the last is worth committing."""
    views = [e for e in effects if isinstance(e, CommitView)]
    return [e for e in effects if e not in views[:-1]]


def _text(address: tuple[str, int]) -> str:
    return f"{address[0]}:{address[1]}"


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def _rebuilt(message: wire.Failed) -> Exception:
    """A site's error as an exception of this process; only our own classes are made."""
    kind = getattr(errors, message.kind, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.HoldfastError)):
        kind = errors.HoldfastError
    return kind.rebuilt(message.detail)
