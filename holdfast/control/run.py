"""Starts a flow, and the handle of a running flow that ``flow.start`` returns.

The controller runs in a thread of the process that called ``start`` (on Spark, the driver). It
gathers the sites, watches them and ends the flow. No rows pass through it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec
import pyarrow as pa

from holdfast import errors
from holdfast.api.graph import Flow
from holdfast.api.options import Checkpoint, Options
from holdfast.control import status
from holdfast.control.bootstrap import resolved
from holdfast.control.checkpoint_coordinator import common_restore_point
from holdfast.control.checkpoint_store import CheckpointStore, first_manifest
from holdfast.control.hosting import Host, Place, Route, direct
from holdfast.control.placing import moves_wanted, sites_to_empty, sites_wanted
from holdfast.control.savepoint import resumed, write_ended, write_stopped
from holdfast.control.server import Control
from holdfast.core.controller import Controller
from holdfast.core.layout import View
from holdfast.core.protection import ProtectionSpec
from holdfast.core.records import EpochRecord
from holdfast.engine.durations import Seconds, seconds
from holdfast.hosts.processes import ProcessHost
from holdfast.net.addresses import is_wildcard
from holdfast.net.keys import Keys
from holdfast.net.reader import TableReader, forget_reader, readers_of, url_of
from holdfast.plan.planner import Plan, plan, protected_otherwise
from holdfast.storage.files import Folder, located
from holdfast.storage.generations import claim
from holdfast.storage.layout import GENERATIONS
from holdfast.storage.restore_point import Kind, RestorePoint

if TYPE_CHECKING:
    from holdfast.ui.web import Web

log = logging.getLogger("holdfast.run")

T = TypeVar("T")
LOOK_S = 0.05
"""How often a thread that waits for an answer checks whether the controller's thread still runs."""

AWAIT_S = 0.02
"""How often a call that waits for a view looks at it."""


def start(
    flow: Flow,
    spark: Any = None,
    *,
    options: Options | None = None,
    history: Any = None,
    host: Host | None = None,
    place: Place | None = None,
    secret: bytes | None = None,
    route: Route = direct,
) -> Run:
    """Run `flow`, and return as soon as rows flow. Users call `Flow.start`; the other parameters
    are for hosting flows and for tests.

    With a `place` this is one of several applications that host the flow together, with the same
    `secret` (see `holdfast.control.applications`). `route` may redirect the connections between
    sites, for example through a proxy that breaks them (see `holdfast.lab.chaos`).
    """
    options, place = (options or Options()).resolved(), place or Place()
    secret = secret or secrets.token_bytes(32)
    incarnation = Keys.of(secret, flow.name).incarnation
    if history is not None and options.restore_from is not None:
        raise errors.FlowError(
            "a flow begins with history= or continues with restore_from=, not both"
        )
    flow = _resolved(flow, place, incarnation, options, history)
    options = _located(options)
    origin = _origin(flow, options, place)
    options = replace(options, checkpoint=origin.checkpoint)
    store = options.store
    if store is not None and not origin.here:
        _refuse_used(store)
    if options.store_every_ms:
        _refuse_to_store(flow, place)
    if origin.path is not None:
        flow = resumed(flow, origin.path, options.partitions, here=origin.here)
    planned = plan(flow)
    host = _prepared(host, spark, planned, options, place)
    generation = (
        flow.restore_point.generation if origin.here and flow.restore_point is not None else 0
    )
    if store is not None and not origin.here and place.apps == 1:
        generation = claim(Folder(store), flow.name)
    control = Control(
        flow, planned, host, options.sites, options.spares, options, secret, place, generation
    )
    control.route = route
    run = Run(control, host)
    try:
        run._prepare_store()
        if options.http is not None:
            from holdfast.ui.web import Web

            run.web = Web(run, options.http)
        run._begin(options.start_s_max)
    except BaseException:
        run._give_up()
        raise
    return run


def _prepared(host: Host | None, spark: Any, planned: Plan, options: Options, place: Place) -> Host:
    """The host that starts the sites."""
    if host is None and spark is not None:
        from holdfast.spark.host import SparkHost

        host = SparkHost(spark, planned, -(-(options.sites + options.spares) // place.apps))
    host = host or ProcessHost()
    if options.listen is not None:
        host.listen_host = options.listen
        if not is_wildcard(options.listen):
            host.advertise_host = options.listen
    return host


def _resolved(flow: Flow, place: Place, incarnation: str, options: Options, history: Any) -> Flow:
    """The flow with everything that must be known before it starts."""
    if history is None:
        return resolved(flow, place, incarnation, options.lease_s)
    from holdfast.spark.history import History
    from holdfast.ui.live_table import progress_bar

    with progress_bar(f"history of {flow.name}") as progress:
        folder = options.history_folder
        before = History(flow, history, options.partitions, folder, progress)
        return resolved(flow, place, incarnation, options.lease_s, before)


def _located(options: Options) -> Options:
    """The options with folders that mean the same in every process."""
    checkpoint, origin = options.checkpoint, options.restore_from
    if checkpoint is not None:
        checkpoint = replace(checkpoint, path=located(os.fspath(checkpoint.path)))
    if origin is not None:
        origin = located(os.fspath(origin))
    return replace(options, checkpoint=checkpoint, restore_from=origin)


@dataclass(frozen=True, slots=True)
class _Origin:
    """What a flow continues from, if anything, and where it is stored."""

    path: str | None
    """The folder that it continues from."""
    here: bool
    """Whether it is stored in the same folder."""
    checkpoint: Checkpoint | None


def _origin(flow: Flow, options: Options, place: Place) -> _Origin:
    wanted, store = options.checkpoint, options.store
    if options.restore_from is None:
        return _Origin(None, False, wanted)
    path = os.fspath(options.restore_from)
    restore_point = RestorePoint.load(path)
    if store in (None, path) and place.apps == 1:
        interval = wanted.interval if wanted is not None else None
        if interval is None and restore_point.every_ms:
            interval = restore_point.every_ms / 1e3
        return _Origin(path, True, Checkpoint(path, interval))
    if restore_point.lost and restore_point.every_ms:
        raise _to_be_stored_there(path, store)
    if store is None:
        log.warning("several applications host %r: without checkpoint= it is not stored", flow.name)
    return _Origin(path, False, wanted)


def _refuse_used(store: str) -> None:
    """Raise if the folder has contents, except for claims of flows that never started."""
    found = [name for name in Folder(store).list() if not name.startswith(f"{GENERATIONS}/")]
    if found:
        raise errors.FlowError(
            f"checkpoint folder {store!r} is not empty",
            hint="give each run its own folder; to continue the flow in it, write restore_from=",
        )


def _refuse_to_store(flow: Flow, place: Place) -> None:
    """Raise if the flow could not continue after it is lost, so that storing it is useless."""
    if place.apps > 1:
        raise errors.FlowError("Checkpoint(interval=) is for a flow in one application")
    for stage in plan(flow).stages:
        if stage.source is not None and stage.source.pushed and not stage.source.resumable:
            raise errors.FlowError(
                f"Checkpoint(interval=): without a checkpoint location the query that feeds source "
                f"{stage.name!r} would begin again when the flow continues",
                hint="write spark_stream(df, checkpoint=...)",
            )
        if stage.sink is not None and stage.sink.unread_bytes_max is not None:
            raise errors.FlowError(
                f"Checkpoint(interval=): what is in the outlet {stage.name!r} is in memory alone, "
                "and its readers could not continue with a flow that was lost",
                hint="write to a sink that others read, such as sinks.kafka",
            )
        if stage.merge == "arrival":
            raise errors.FlowError(
                f"Checkpoint(interval=): stage {stage.name!r} takes rows as they arrive, so there "
                "is no state after an epoch",
                hint='leave out merge="arrival"',
            )


def _to_be_stored_there(origin: str, store: str | None) -> errors.FlowError:
    """The error for storing a lost flow in another folder. It stays in its own, so that at any
    moment there is one folder to continue from."""
    return errors.FlowError(
        f"the flow in {origin} was lost while it ran, and can only be stored there again",
        hint=f"leave out checkpoint=Checkpoint({store!r}); to store it elsewhere, stop it first",
    )


class Run:
    """A running flow."""

    def __init__(self, control: Control, host: Host) -> None:
        self.flow, self.plan, self.options = control.flow, control.plan, control.options
        self._control, self._host = control, host
        self.web: Web | None = None
        """The HTTP server of the run, if it has one."""
        self._started_at = time.time()
        self._running = threading.Event()
        self._served = threading.Event()
        """The controller's thread has ended: nothing changes any more."""
        self.stored = False
        """Whether the flow was stopped and its state is stored."""
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="holdfast-controller", daemon=True)
        control.on_running = self._running.set
        control.describe = self._described

    # --- what a user calls ----------------------------------------------------------------------

    @property
    def error(self) -> Exception | None:
        """The error that the flow failed with."""
        return self._control.error

    @property
    def _controller(self) -> Controller | None:
        return self._control.controller

    @property
    def state(self) -> str:
        """gathering, connecting, running, draining, done or failed; following if another
        application leads."""
        return self._controller.state.value if self._controller else "following"

    @property
    def url(self) -> str:
        """The address at which the flow's sinks can be read while it runs. It has the key of
        readers, which allows nothing else."""
        controls = self._control.place.controls or (self._control.address,)
        ours = self._control.credentials
        return url_of(self.flow.name, ours.keys, controls, (ours.level, ours.trust))

    def table(self, sink: str) -> TableReader:
        """Read a sink that is a table, while the flow runs."""
        return TableReader(self.url, sink)

    def readers(self, sink: str) -> list[dict[str, Any]]:
        """The readers of a sink that is an outlet: a dict for each with its name, its state, the
        epoch up to which it has everything, how many epochs and bytes it is behind, and when it was
        seen."""
        return readers_of(self.url, sink)

    def forget_reader(self, sink: str, name: str) -> None:
        """Stop holding rows for a reader of an outlet that will not come back. If it does come back
        and lacks rows that were dropped, its query fails and names them."""
        forget_reader(self.url, sink, name)

    def protect(self, stage: str, protection: ProtectionSpec) -> None:
        """Change the protection of a keyed stage while the flow runs. The old protection holds
        until the new one does, as far as both are possible at once; `protected` is True when the
        new one holds. Raises `FlowError` if the stage cannot have this protection, and `HostError`
        if there are not enough sites for it.
        """
        node, guards = protected_otherwise(self.flow, stage, protection, self.options.partitions)
        self._look(partial(self._control.protect, guards))
        node.protection = protection

    def move(
        self,
        stage: str,
        partitions: Collection[int],
        *,
        to: int,
        source: int | None = None,
        timeout: Seconds = 60.0,
    ) -> None:
        """Move a replica of these partitions of a keyed stage to the site `to`, while the flow
        runs: from the site `source`, or else from the busiest one that has a replica. A new replica
        joins at `to` and catches up, then the other one leaves: nothing is exposed meanwhile.

        Waits until it is done. Raises `FlowError` for a stage or partitions that do not exist, and
        `HostError` if they cannot be there, or if it is not done within `timeout`: a failure gives
        up a move.
        """
        if self.options.balance == "off":
            raise errors.FlowError("Options(balance='off'): nothing is moved")
        busy = self._look(lambda: {n: s["busy"] for n, s in self._control.status.items()})
        make = partial(
            moves_wanted, stage=stage, partitions=partitions, to=to, source=source, busy=busy
        )
        wanted = self._look(partial(self._control.request, "move partitions", make))
        tasks = [m.task for m in wanted.moves]

        def done(view: View) -> bool:
            groups = [view.group(u) for u in tasks]
            return all(to in g.replicas + g.standbys and not g.leaving for g in groups)

        self._await(done, timeout, f"stage {stage!r} is not moved to site {to}")

    def drain(self, site: int, timeout: Seconds = 600.0) -> None:
        """Empty a site and let it leave, while the flow runs: everything that it holds is moved to
        other sites first. Its process ends, and no other takes its place.

        Waits until it has left. Raises `HostError` if the other sites are too few, and if it has
        not left within `timeout`; it is emptied nevertheless.
        """
        make = partial(sites_to_empty, sites=(site,))
        self._look(partial(self._control.request, "drain a site", make))
        left = f"site {site} is not drained"
        self._await(lambda view: site not in view.members, timeout, left)

    def scale(self, sites: int, timeout: Seconds = 600.0) -> None:
        """Run on this number of sites from now on. More are launched; if there are too many, some
        are drained. Waits until they have come or left. Raises `HostError` if that takes longer
        than `timeout`, or if the stages cannot be protected on so few."""
        make, what = partial(sites_wanted, count=sites), "change its number of sites"
        self._look(partial(self._control.request, what, make))

        def done(view: View) -> bool:
            roster = self._controller.roster if self._controller is not None else None
            if roster is None or view.emptying or len(roster.sites) != sites:
                return False
            return all(s in roster.domains for s in roster.sites)

        self._await(done, timeout, f"the flow does not run on {sites} sites")

    def _await(self, done: Callable[[View], bool], timeout: Seconds, failure: str) -> None:
        """Wait until the view is as it should be, and all sites act on it."""

        def is_done() -> bool:
            controller = self._controller
            view = controller.view if controller is not None and controller.seen_by_all else None
            return view is not None and done(view)

        deadline = time.monotonic() + seconds(timeout, "timeout")
        while not self._look(is_done):
            if self._ended.is_set() or time.monotonic() >= deadline:
                hint = "the flow has ended" if self._ended.is_set() else "see run.status()"
                raise errors.HostError(f"{failure} within {timeout} s", hint=hint)
            time.sleep(AWAIT_S)

    def rotate_secret(self, secret: str | None = None, timeout: Seconds = 60.0) -> str:
        """Replace the flow's secret, while it runs, by `secret` or a random one, and return the new
        one: what `HOLDFAST_SECRET` must be for applications that join later. Afterwards no process
        accepts the old one, and `url` has a new key. Addresses given to readers before are refused.

        Raises `HostError` if this application does not lead, if connections are not encrypted and
        others could read the new keys, or if a site has not confirmed within `timeout`; then both
        secrets are good, and it can be called again with the same one.
        """
        wanted = self._control.credentials.wanted(secret)
        self._control.credentials.stretch([wanted])  # here, and not in the control's event loop
        done = self._look(partial(self._control.rotate_secret, secret, wanted))
        deadline = time.monotonic() + seconds(timeout, "timeout")
        while time.monotonic() < deadline and not self._served.is_set():
            with contextlib.suppress(TimeoutError):
                return done.result(LOOK_S)
        waits = self._look(lambda: self._control.rotator.waits_for)
        missing = ", ".join(f"{role} {number}" for role, number in waits)
        raise errors.HostError(
            f"the secret is not replaced everywhere yet: no answer from {missing}",
            hint="the flow has ended"
            if self._served.is_set()
            else "both secrets are good; it goes on as soon as they answer, or are replaced",
        )

    @property
    def protected(self) -> bool:
        """Whether every partition has all its replicas, and all of them are up to date."""
        return self._look(self._is_protected)

    def _is_protected(self) -> bool:
        if self._controller is None:
            return bool(self._control.leader_status.get("protected"))
        return self._controller.protected

    def _look(self, look: Callable[[], T]) -> T:
        """Call `look` in the controller's thread, and return its result. Everything that it reads
        is changed by that thread only, so nothing changes meanwhile."""
        if not self._thread.is_alive() or self._thread is threading.current_thread():
            return look()
        seen: Future[T] = Future()

        def call() -> None:
            try:
                seen.set_result(look())
            except Exception as error:
                seen.set_exception(error)

        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._control.loop.call_soon_threadsafe(call)
        while not self._served.is_set():
            with contextlib.suppress(TimeoutError):
                return seen.result(LOOK_S)
        return look()

    def status(self) -> dict[str, Any]:
        """The flow's state and the latest metrics of every site."""
        return self._look(self._status)

    def _status(self) -> dict[str, Any]:
        last, controller = self._control.records.last, self._controller
        sites = list(self._control.status.values())
        return {
            "flow": self.flow.name,
            "state": self.state,
            "seconds": time.time() - self._started_at,
            "epochs": last.epoch + 1 if last else 0,
            "rows_in": last.base + last.rows if last else 0,
            "late_rows": status.late_rows(sites),
            "sites": sorted(sites, key=lambda s: s["site"]),
            "domains": {int(s): d for s, d in controller.roster.domains.items()}
            if controller
            else {},
            **status.UNKNOWN,
            **self._described(),
            "checkpoint": self._control.checkpoints.metrics()
            if self._control.checkpoints
            else None,
            "error": str(self.error) if self.error else None,
        }

    def _described(self) -> dict[str, Any]:
        """The status that only the leading application knows; in others, what it sent last."""
        controller = self._controller
        if controller is None:
            return self._control.leader_status
        leading, sites = self._control.node.leading, list(self._control.status.values())
        return status.described(
            controller, sites, self.options, leading.balancer if leading else None
        )

    def records(self) -> list[EpochRecord]:
        """The epoch records so far: the last 100,000, or fewer if 64 MB do not hold as many, as
        with hundreds of splits. With them the batch job takes the rows in the same order."""
        return self._look(self._control.records.all)

    def sink_report(self, name: str) -> dict[str, Any]:
        """What the sink `name` last reported about itself."""
        for site in self._look(lambda: list(self._control.status.values())):
            for stage in site["stages"]:
                if stage["kind"] == "sink" and stage["stage"] == name and stage["sink"]:
                    return stage["sink"]
        return {}

    def wait(self, timeout: Seconds | None = None) -> bool:
        """Wait until the flow has ended, and raise its error. False if it still runs after
        `timeout`."""
        ended = self._ended.wait(_limit(timeout))
        if ended:
            self._thread.join(timeout=30)
            if self.error is not None:
                raise self.error
        return ended

    def ended(self, timeout: Seconds | None = None) -> bool:
        """Whether the flow has ended, with or without an error; waits for `timeout` at most."""
        return self._ended.wait(_limit(timeout))

    def stop(self, *, drain: bool = True, timeout: Seconds | None = 60.0) -> None:
        """End the flow: take no more rows and, with `drain`, deliver those that were taken. If that
        takes longer than `timeout`, the flow ends without it; this is an error if the flow was to
        be stored."""
        if not self._ended.is_set():
            self._control.stop(drain)
        if not self.wait(timeout):
            late = f"flow {self.flow.name!r} did not drain within {_limit(timeout)} s"
            log.warning("%s; it is ended now", late)
            self._control.stop(drain=False)
            self.wait()
            if drain and self.options.store is not None and not self.stored:
                raise errors.FlowError(f"{late}, so it was not stored", hint=self._if_not_stored())

    def __enter__(self) -> Run:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None and not self._ended.is_set():
            self._control.stop(drain=False)
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
            controller = self._controller
            if time.monotonic() > deadline and controller is not None:
                missing = [s for s in controller.roster.sites if s not in controller.addresses]
                reason = "; ".join(list(controller.lifecycle.history)[-5:])
                self._control.stop(drain=False)
                self._ended.wait(30)
                raise errors.HostError(
                    f"flow {self.flow.name!r} did not start within {timeout} s: "
                    f"{len(missing)} of {len(controller.roster.sites)} sites have not registered",
                    hint=f"are there free task slots for them? last events: {reason or 'none'}",
                )

    def _give_up(self) -> None:
        """End a flow whose start failed or was interrupted."""
        if self._thread.is_alive():
            self._control.stop(drain=False)
            self._ended.wait(30)
        elif not self._ended.is_set():
            self._finish_folders()

    def _prepare_store(self) -> None:
        """Write the first manifest. A flow that is stored while it runs can continue from it; for
        one that is not, it shows other processes that the flow runs."""
        store, restore_point = self._control.store, self.flow.restore_point
        if store is not None:
            store.begin(first_manifest(self._common(), restore_point))

    def _common(self) -> RestorePoint:
        return common_restore_point(
            self.flow,
            self.plan,
            self.options,
            self._control.credentials.keys.incarnation,
            self._control.generation,
        )

    def _if_not_stored(self) -> str:
        if self.options.store_every_ms:
            return f"restore_from={self.options.store!r} continues from its last checkpoint"
        return "give it more time, or store it while it runs, with Checkpoint(interval=)"

    def _finish_folders(self) -> None:
        """Remove the state that the flow began with, and store what it leaves."""
        restore_point = self.flow.restore_point
        if self.error is None and restore_point is not None and not restore_point.stopped:
            restore_point.remove()
        if self.options.store is None:
            return
        try:
            self._store_the_end()
        except (errors.HoldfastError, OSError, pa.ArrowException) as error:
            if self.error is None:
                self._control.error = errors.FlowError(
                    f"the state of flow {self.flow.name!r} could not be stored: {error}"
                )

    def _store_the_end(self) -> None:
        assert self.options.store is not None
        control, restore_point = self._control, self.flow.restore_point
        last = control.records.last
        drained = self.error is None and last is not None and last.last
        view = control.controller.view if control.controller is not None else None
        store = control.store
        if store is None:  # with several applications, only the leading one knows the whole state
            if not drained or view is None or last is None or last.ended:
                return
            store = CheckpointStore(self.options.store, 0)
            claim(store.folder, self.flow.name, -1)
        if drained and last is not None and view is not None and not last.ended:
            write_stopped(store, self._common(), view, last, control.final)
            self.stored = True
        elif drained and last is not None and not self.options.store_every_ms:
            write_ended(store, self._common(), last)
        elif not drained and not self.options.store_every_ms:
            if restore_point is None or restore_point.home != self.options.store:
                store.withdraw()
            elif not control.started:  # no row was taken since it was stopped
                stopped = msgspec.structs.replace(
                    restore_point, kind=Kind.STOPPED, generation=store.generation
                )
                store.save(stopped)

    def _serve(self) -> None:
        loop = self._control.loop
        asyncio.set_event_loop(loop)
        try:
            loop.run_until_complete(self._control.run())
        finally:
            self._served.set()
            self._host.close()
            if self.web is not None:
                self.web.close()
            self._finish_folders()
            loop.close()
            self._ended.set()


def _limit(timeout: Seconds | None) -> float | None:
    """A time-out in seconds, as threads take it; a negative one is 0."""
    if isinstance(timeout, int | float):
        timeout = max(0.0, timeout)
    return None if timeout is None else seconds(timeout, "timeout")
