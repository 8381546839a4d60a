"""How a flow is run: all settings of ``flow.start``.

Durations are seconds, as numbers, or `datetime.timedelta`; their names have no unit. The properties
with a unit in their names are for the engine.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from typing import Literal

from holdfast.api.security import Security, level_of
from holdfast.core.sequencer import Budget
from holdfast.engine.durations import Seconds, milliseconds, positive_seconds, seconds
from holdfast.errors import FlowError


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Where a flow's state is written: to `path`, a folder or URL, when the flow is stopped; with
    an `interval` also while it runs, that often, so that it can go on if everything is lost.

    Give each run a folder of its own. A flow that goes on with ``restore_from=`` writes to the same
    folder again, by default at the same interval.
    """

    path: str | os.PathLike[str]
    interval: Seconds | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.path, str | os.PathLike) or not os.fspath(self.path):
            raise FlowError(
                f"Checkpoint({self.path!r}): the path is a folder, or a URL such as s3://bucket/x"
            )
        if self.interval is not None:
            positive_seconds(self.interval, "Checkpoint(interval)", "None: only when it is stopped")

    @property
    def interval_ms(self) -> int:
        """0 if it is only written when the flow is stopped."""
        return 0 if self.interval is None else milliseconds(self.interval, "interval")


TOKEN_LENGTH_MIN = 16


@dataclass(frozen=True, slots=True)
class Http:
    """Where a flow's metrics, status and tables are served over HTTP, and to whom.

    `address` is ``"host:port"``; ``":port"`` is a port of this machine only. At a loopback address
    no token is needed unless one is given. At any other address a client must send `token`, or the
    one in `token_file`, as ``Authorization: Bearer TOKEN``; without either a new token is made, and
    stored in `token_file` if that is given and does not exist. With `cert` and `key`, files in PEM
    format, the pages are served over TLS; with `client_ca` clients must have a certificate of that
    authority, and then need a token only if one is given.
    """

    address: str
    token: str | None = field(default=None, repr=False)
    token_file: str | os.PathLike[str] | None = None
    cert: str | os.PathLike[str] | None = None
    key: str | os.PathLike[str] | None = None
    client_ca: str | os.PathLike[str] | None = None

    def __post_init__(self) -> None:
        if self.token is not None and self.token_file is not None:
            raise FlowError("Http(token=, token_file=): give one of them")
        if self.token is not None and len(self.token) < TOKEN_LENGTH_MIN:
            raise FlowError(f"Http(token=): it must have at least {TOKEN_LENGTH_MIN} characters")
        if self.cert is None and (self.key is not None or self.client_ca is not None):
            raise FlowError("Http(key=, client_ca=) need cert=, the server's own certificate")


class _Default(int):
    """A default, told apart from the same number that somebody has given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The settings of a run. The first six can also be given to ``flow.start`` itself."""

    sites: int = _Default(2)
    """Number of sites that run the flow."""
    spares: int = _Default(0)
    """Number of further sites that wait to take the place of one that dies."""
    partitions: int = _Default(32)
    """Number of partitions of each keyed stage."""
    checkpoint: Checkpoint | None = None
    """Where the flow's state is written, and how often."""
    restore_from: str | os.PathLike[str] | None = None
    """The folder, or URL, of a flow with the same stages. The flow continues from its last
    checkpoint."""
    http: str | Http | None = None
    """Where the flow's metrics, status and tables are served: ``"host:port"``, or an `Http` with a
    token or TLS."""

    lease: Seconds = 1.0
    """A site that has been silent for this long is declared dead."""
    call_timeout: Seconds = 300.0
    """A call of a stage's code that takes longer, and longer than two leases, counts as one that
    never ends: its site is declared dead if the flow can do without it; if not, the flow ends."""
    idle: Seconds | None = 2.0
    """A split that has had no rows for this long does not hold the watermark back until it has some
    again. None: every split holds it back. Set it longer than the pauses of a source that comes in
    bursts."""
    relaunch_wait: Seconds = 2.0
    """How long a missing replica waits for the site that is launched in place of a dead one. After
    that it is made on a site that has others already. Nothing that has no replica left waits for
    that, unless it may not be on the same sites as its neighbours (``upstream(k=1)``)."""
    start_timeout: Seconds = 60.0
    """Maximum time that the sites may take to start."""
    status_interval: Seconds = 0.5
    """The interval at which sites report their status."""
    budget: Budget = field(default_factory=Budget)
    """How large epochs are, and how many are in flight."""
    balance: Literal["auto", "manual", "off"] = "manual"
    """Who moves partitions between sites. ``"auto"``: the flow itself, so that no site is busier
    than it must be; ``"manual"``: ``run.move`` only; ``"off"``: nobody."""
    groups_per_site: int = 1
    """Number of partition groups of each keyed stage for each site that the flow begins on. A group
    is processed in one call, and is what can be moved to another site. More groups move in smaller
    pieces, and cost more per row."""
    window: int = 4
    """Number of epochs that a consumer has room for ahead of its own."""
    block_rows: int = 65_536
    """Maximum rows that are read from a source at once."""
    read_ahead_rows: int = 262_144
    """Maximum rows that are read ahead of a split, beyond those that are in epochs."""
    digests: bool = True
    """Whether replicas compare their output."""
    catch_up_mb_s: float = 100.0
    """How fast a site hands state over to new replicas, in megabytes a second."""
    kept_bytes_max: int = 256 << 20
    """Maximum bytes that a site keeps for a replica that is behind. Beyond it the replica's site is
    failed, if the flow can do without it."""
    log_bytes_max: int = 256 << 20
    """Maximum bytes of a site's logs that stay in memory; the rest goes to disk."""
    spill: str | None = None
    """The folder for what goes to disk; the one for temporary files by default."""
    listen: str | None = None
    """The address that controller and sites listen on: loopback by default on a local master, all
    interfaces on a cluster."""
    security: Security | None = None
    """How connections are protected: ``"tls"``, ``"mac"`` or ``"auth"``, or `Tls` with
    certificates. By default ``"auth"`` if all addresses are loopback, else ``"tls"``."""
    history_folder: str | None = None
    """A folder that driver and executors reach, for the state and results of a history."""

    def __post_init__(self) -> None:
        if self.sites < 1 or self.spares < 0:
            raise FlowError(
                f"sites must be at least 1 and spares not negative, not {self.sites}, {self.spares}"
            )
        if not 1 <= self.partitions <= 65_535:
            raise FlowError(f"partitions must be between 1 and 65,535, not {self.partitions}")
        if self.checkpoint is not None and not isinstance(self.checkpoint, Checkpoint):
            raise FlowError(
                f"checkpoint={self.checkpoint!r} is not a Checkpoint",
                hint=f"write checkpoint=Checkpoint({self.checkpoint!r})",
            )
        for name in ("lease", "call_timeout", "relaunch_wait", "start_timeout", "status_interval"):
            positive_seconds(getattr(self, name), name)
        if self.idle is not None:
            seconds(self.idle, "idle")
        for name in (
            "catch_up_mb_s",
            "kept_bytes_max",
            "window",
            "block_rows",
            "groups_per_site",
        ):
            if getattr(self, name) <= 0:
                raise FlowError(f"{name} must be positive, not {getattr(self, name)}")
        if self.balance not in ("auto", "manual", "off"):
            raise FlowError(f"balance must be auto, manual or off, not {self.balance!r}")
        level_of(self.security)
        if self.log_bytes_max < 0:
            raise FlowError(f"log_bytes_max must not be negative, as {self.log_bytes_max} is")
        if self.read_ahead_rows < self.block_rows:
            raise FlowError(
                f"read_ahead_rows={self.read_ahead_rows} is less than "
                f"block_rows={self.block_rows}, and nothing could be read"
            )

    def merged(
        self,
        *,
        sites: int | None,
        spares: int | None,
        partitions: int | None,
        checkpoint: Checkpoint | None,
        restore_from: str | os.PathLike[str] | None,
        http: str | Http | None,
    ) -> Options:
        """These options with the arguments that ``flow.start`` was given beside them (None: it was
        not). Refused if both places say something, and not the same."""
        given = {
            "sites": sites,
            "spares": spares,
            "partitions": partitions,
            "checkpoint": checkpoint,
            "restore_from": restore_from,
            "http": http,
        }
        wanted = {name: value for name, value in given.items() if value is not None}
        for name, value in wanted.items():
            own = getattr(self, name)
            if own is not None and not isinstance(own, _Default) and own != value:
                raise FlowError(
                    f"start({name}={value!r}) and options=Options({name}={own!r}) contradict "
                    "each other",
                    hint="give it in one place",
                )
        return replace(self, **wanted)  # type: ignore[arg-type]

    def resolved(self) -> Options:
        """These options, in which every number is one that was given."""
        return replace(
            self,
            sites=int(self.sites),
            spares=int(self.spares),
            partitions=int(self.partitions),
        )

    # --- for the engine ---------------------------------------------------------------------------

    @property
    def lease_s(self) -> float:
        return seconds(self.lease, "lease")

    @property
    def call_s_max(self) -> float:
        return seconds(self.call_timeout, "call_timeout")

    @property
    def start_s_max(self) -> float:
        return seconds(self.start_timeout, "start_timeout")

    @property
    def idle_ms(self) -> float | None:
        return None if self.idle is None else 1e3 * seconds(self.idle, "idle")

    @property
    def relaunch_wait_ms(self) -> int:
        return milliseconds(self.relaunch_wait, "relaunch_wait")

    @property
    def status_ms(self) -> float:
        return 1e3 * seconds(self.status_interval, "status_interval")

    @property
    def store(self) -> str | None:
        return None if self.checkpoint is None else os.fspath(self.checkpoint.path)

    @property
    def store_every_ms(self) -> int:
        return 0 if self.checkpoint is None else self.checkpoint.interval_ms
