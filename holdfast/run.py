"""A flow that runs: what ``flow.start`` returns, and the controller's side of the wire.

The controller lives in a thread of the process that called ``start`` (on Spark, the driver). It
gathers the sites, watches them and ends the flow; rows never pass through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, assert_never

import msgspec

from holdfast import errors
from holdfast.core.controller import Controller
from holdfast.core.effects import (
    AssignSites,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    RelaunchSite,
    StartFlow,
)
from holdfast.core.events import (
    ControllerEvent,
    FlowFailed,
    SiteConnected,
    SiteFailed,
    SiteFinished,
    SiteRegistered,
    StopRequested,
)
from holdfast.core.ids import SiteId
from holdfast.core.records import EpochRecord
from holdfast.flow.graph import Flow
from holdfast.flow.options import Options
from holdfast.flow.plan import Plan, plan, shape
from holdfast.flow.sources import Feeder
from holdfast.site import wire
from holdfast.site.process_host import ProcessHost
from holdfast.site.runtime import OnExit, SiteConfig

log = logging.getLogger("holdfast.run")


class Host(Protocol):
    """Who starts the sites' processes, and says when one has ended."""

    name: str
    application: str
    listen_host: str
    advertise_host: str
    """Where sites find the controller."""

    def launch(self, flow: Flow, config: SiteConfig, on_exit: OnExit) -> None: ...

    def close(self) -> None: ...


def start(
    flow: Flow,
    spark: Any = None,
    *,
    sites: int = 2,
    standbys: int = 0,
    partitions: int = 32,
    listen: str | None = None,
    start_timeout: float = 60.0,
    host: Host | None = None,
    options: Options | None = None,
) -> Run:
    """Run `flow` on `sites` sites, and return as soon as its rows flow.

    With a SparkSession every site is a long-lived Spark task; without one a subprocess. Each
    keyed stage has `partitions` partitions. `listen` is the address that the controller and the
    sites listen on: loopback by default on a local master, all interfaces on a cluster.
    """
    if sites < 1 or standbys < 0:
        raise errors.FlowError(
            f"sites must be at least 1 and standbys not negative, not {sites}, {standbys}"
        )
    planned = plan(flow)
    if host is None and spark is not None:
        from holdfast.spark.host import SparkHost

        host = SparkHost(spark, planned, sites + standbys)
    host = host or ProcessHost()
    if listen is not None:
        host.listen_host = listen
        if not wire.is_wildcard(listen):
            host.advertise_host = listen
    options = replace(options or Options(), partitions=partitions)
    run = Run(flow, planned, host, sites, standbys, options)
    run._begin(start_timeout)
    return run


class Run:
    """A running flow."""

    def __init__(
        self, flow: Flow, planned: Plan, host: Host, sites: int, standbys: int, options: Options
    ) -> None:
        self.flow, self.plan = flow, planned
        self.options = options
        self.error: Exception | None = None
        self._host = host
        self._secret = secrets.token_bytes(32)
        ids = [SiteId(i) for i in range(sites + standbys)]
        self._controller = Controller(shape(planned, options.partitions), ids[:sites], ids[sites:])
        self._connections: dict[SiteId, wire.Connection] = {}
        self._status: dict[int, dict[str, Any]] = {}
        self._records: list[EpochRecord] = []
        self._started_at = time.time()
        self._loop = asyncio.new_event_loop()
        self._running = threading.Event()
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="holdfast-controller", daemon=True)
        self._feeders: list[Feeder] = []
        self._server: asyncio.Server | None = None

    # --- what a user calls ----------------------------------------------------------------------

    @property
    def state(self) -> str:
        """gathering, connecting, running, draining, done or failed."""
        return self._controller.state.value

    def status(self) -> dict[str, Any]:
        """The flow's state and the latest figures of every site."""
        return {
            "flow": self.flow.name,
            "state": self.state,
            "seconds": time.time() - self._started_at,
            "epochs": len(self._records),
            "rows_in": self._records[-1].base + self._records[-1].rows if self._records else 0,
            "sites": sorted(self._status.values(), key=lambda s: s["site"]),
            "domains": {int(s): d for s, d in self._controller.domains.items()},
            "relaunches": {int(s): n for s, n in self._controller.attempts.items() if n},
            "error": str(self.error) if self.error else None,
        }

    def records(self) -> list[EpochRecord]:
        """The epoch records so far: what the batch job needs to take the rows in the same order."""
        return list(self._records)

    def sink_report(self, name: str) -> dict[str, Any]:
        """What the sink `name` last reported about itself."""
        for site in self._status.values():
            for stage in site["stages"]:
                if stage["kind"] == "sink" and stage["stage"] == name:
                    return stage["sink"] or {}
        return {}

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the flow has ended; raise its error. False if it runs on after `timeout`."""
        ended = self._ended.wait(timeout)
        if ended:
            self._thread.join(timeout=30)
            if self.error is not None:
                raise self.error
        return ended

    def ended(self, timeout: float | None = None) -> bool:
        """Whether the flow has ended, well or not, waiting at most `timeout` seconds for it."""
        return self._ended.wait(timeout)

    def stop(self, *, drain: bool = True, timeout: float | None = 60.0) -> None:
        """End the flow: take no more rows and, with `drain`, deliver those that were taken."""
        if not self._ended.is_set():
            self._post(StopRequested(drain))
        if not self.wait(timeout):
            log.warning(
                "flow %r did not drain within %s s; it is ended now", self.flow.name, timeout
            )
            self._post(StopRequested(drain=False))
            self.wait()

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and not self._ended.is_set():
            self._post(StopRequested(drain=False))
            self._ended.wait(30)
        elif not self._ended.is_set():
            self.stop()

    # --- the controller's thread ----------------------------------------------------------------

    def _begin(self, timeout: float) -> None:
        self._thread.start()
        deadline = time.monotonic() + timeout
        while not self._running.wait(0.05):
            if self._ended.is_set():
                self.wait()
                return
            if time.monotonic() > deadline:
                missing = [s for s in self._controller.sites if s not in self._controller.addresses]
                reason = "; ".join(list(self._controller.history)[-5:])
                self._post(StopRequested(drain=False))
                self._ended.wait(30)
                raise errors.HostError(
                    f"flow {self.flow.name!r} did not start within {timeout} s: "
                    f"{len(missing)} of {len(self._controller.sites)} sites have not registered",
                    hint=f"are there free task slots for them? last events: {reason or 'none'}",
                )

    def _serve(self) -> None:
        asyncio.set_event_loop(self._loop)
        try:
            self._loop.run_until_complete(self._main())
        finally:
            self._stop_feeders()
            self._host.close()
            self._loop.close()
            self._ended.set()

    async def _main(self) -> None:
        self._over: asyncio.Future[None] = self._loop.create_future()
        self._server, port = await wire.listen(self._accept, self._host.listen_host)
        self._port = port
        for site in [*self._controller.sites, *self._controller.standbys]:
            self._launch(site, 0)
        await self._over
        for connection in self._connections.values():
            connection.send(wire.Dismiss())
            connection.close()
        self._server.close()
        await asyncio.sleep(0.05)

    def _launch(self, site: SiteId, attempt: int) -> None:
        if self._over.done():
            return
        config = SiteConfig(
            site,
            attempt,
            self._secret,
            (self._host.advertise_host, self._port),
            self._host.listen_host,
            self.options,
            self._host.application,
        )
        try:
            self._host.launch(self.flow, config, self._on_exit)
        except Exception as error:
            self._handle(FlowFailed(site, error))

    def _on_exit(self, site: int, attempt: int, reason: str) -> None:
        """A site's process has ended (called from any thread)."""
        self._post(SiteFailed(SiteId(site), attempt, reason))

    def _post(self, event: ControllerEvent) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: the flow has ended
            self._loop.call_soon_threadsafe(self._handle, event)

    def _accept(self) -> wire.Connection:
        return wire.Connection(self._secret, lambda c: None, self._on_message, self._on_close)

    def _on_message(
        self, connection: wire.Connection, message: wire.Message, body: memoryview
    ) -> None:
        site = SiteId(connection.id)
        match message:
            case wire.Register():
                self._connections[site] = connection
                address = (message.host, message.port)
                self._handle(SiteRegistered(site, message.attempt, address, message.domain))
            case wire.Connected():
                self._handle(SiteConnected(site))
            case wire.Status():
                self._status[site] = msgspec.json.decode(message.figures)
            case wire.Cut():
                self._records.append(message.record)
            case wire.Failed():
                self._handle(FlowFailed(site, _rebuilt(message)))
            case wire.Finished():
                self._handle(SiteFinished(site))
            case _:
                log.warning("site %s sent %s to the controller", site, type(message).__name__)
                connection.abort()

    def _on_close(self, connection: wire.Connection, error: Exception | None) -> None:
        if connection.role == "site" and self._connections.get(SiteId(connection.id)) is connection:
            del self._connections[SiteId(connection.id)]
            attempt = self._controller.attempts.get(SiteId(connection.id), 0)
            reason = f"its connection to the controller broke{f': {error}' if error else ''}"
            self._handle(SiteFailed(SiteId(connection.id), attempt, reason))

    def _handle(self, event: ControllerEvent) -> None:
        for effect in self._controller.handle(event):
            self._apply(effect)

    def _apply(self, effect: ControllerEffect) -> None:
        match effect:
            case AssignSites():
                addresses = {int(s): a for s, a in effect.addresses.items()}
                for site in self._controller.sites:
                    self._connections[site].send(wire.Assign(effect.layout, addresses))
            case StartFlow():
                for site in self._controller.sites:
                    self._connections[site].send(wire.Start())
                self._start_feeders()
                self._running.set()
            case DrainFlow():
                assert self._controller.layout is not None
                self._stop_feeders()
                self._connections[self._controller.layout.sequencer].send(wire.Drain())
            case RelaunchSite():
                self._loop.call_later(
                    effect.after_ms / 1e3, self._launch, effect.site, effect.attempt
                )
            case EndFlow():
                self.error = effect.error
                if not self._over.done():
                    self._over.set_result(None)
            case _:
                assert_never(effect)

    def _start_feeders(self) -> None:
        assert self._controller.layout is not None
        for stage in self.plan.sources:
            assert stage.source is not None
            if stage.source.fed:
                site = self._controller.layout.sites[stage.id][0][0]
                feeder = stage.source.feeder()
                feeder.failed = partial(self._on_feed_failed, site)
                feeder.start(self._controller.addresses[site], self._secret, stage.id, stage.name)
                self._feeders.append(feeder)

    def _on_feed_failed(self, site: SiteId, error: Exception) -> None:
        self._post(FlowFailed(site, error))

    def _stop_feeders(self) -> None:
        feeders, self._feeders = self._feeders, []
        for feeder in feeders:
            feeder.stop()


def _rebuilt(message: wire.Failed) -> Exception:
    """A site's error as an exception of this process; only our own classes are made."""
    kind = getattr(errors, message.kind, None)
    detail: dict[str, Any] = dict(message.detail)
    if kind is errors.OperatorError:
        return errors.OperatorError(**detail)
    if not (isinstance(kind, type) and issubclass(kind, errors.HoldfastError)):
        kind = errors.HoldfastError
    return kind(detail["message"], hint=detail.get("hint"))
