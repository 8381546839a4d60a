"""A simulated cluster of the Flux thesis, chapter 4: one stage on 32 machines with skew.

Time goes in slices of a few ms. What waits in a buffer or a connection is a number of tuples per
partition, and a slice moves as many as buffers, connections and processors allow. Tuples are drawn
at random, so that short samples are as uneven as they are in the thesis. All producers draw from
one distribution and see the same blocked machines; they are simulated as one with the buffers of
all. Within a connection and a consumer's queue tuples of all partitions are mixed evenly.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, Protocol

import numpy as np

Array = np.ndarray[Any, Any]

SITES = 32
TUPLE_BYTES = 80
RATE = 690_000 / SITES
"""Tuples a second that an unloaded machine processes."""
LOADED = 0.43
"""What is left of a machine with the external load: 100 µs of every 150 µs and the switches."""
CONNECTION = 25 * SITES
"""Tuples on their way to a machine: two packets of 1 KB from each producer."""
LATENCY_S = 70e-6
INSTALL_S = 0.2e-6
"""To extract or install one tuple of state."""
LINK_BITS, NETWORK_BITS = 250e6, 500e6
"""Of a move, and of all moves."""
DISK_BYTES, SEEK_S = 20e6, 5e-3
SPOOL_BYTES = 65_536
"""What is written at once of the input of a partition on disk. The thesis does not say it."""
SPOOL_S = (SEEK_S + SPOOL_BYTES / DISK_BYTES) * TUPLE_BYTES / SPOOL_BYTES
"""To spool one tuple."""
PRODUCE_MAX = 60e6


@dataclass(frozen=True, slots=True)
class SkewSetting:
    """What an experiment runs on."""

    partitions: int = 64
    """Of each machine."""
    state_bytes: float = 800e3
    """Of each partition."""
    buffer: int = 2_048
    """Tuples in the buffer of each producer."""
    divided: bool = False
    """Whether the buffer is divided evenly among machines, as in Exchange, or shared."""
    memory: float = 1_024e6
    slice_s: float = 0.005
    weights: Sequence[float] | None = None
    """By partition: how often its keys come; None if all are alike."""


@dataclass(frozen=True, slots=True)
class RoundSample:
    """What machines and partitions measured in a collection."""

    seconds: float
    busy: Array
    rows: Array
    owner: Array
    on_disk: Array
    memory: Array
    state_bytes: float
    moves_took_s: float
    gathering_took_s: float


Order = tuple[int, int]
"""A partition, and where it goes."""


class Balancer(Protocol):
    overlaps: bool
    """Whether it collects while moves are under way."""

    def first_collect_s(self) -> float: ...

    def plan(self, sample: RoundSample, under_way: Sequence[Order]) -> tuple[list[Order], float]:
        """Orders, and how long to collect next."""
        ...

    def after_moves_s(self, took_s: float) -> float: ...


class TransferPhase(Enum):
    ORDERED = "ordered"
    QUIESCING = "quiescing"
    SENDING = "sending"
    INSTALLING = "installing"
    DONE = "done"


@dataclass
class Transfer:
    """A partition that moves: its input stops, its state is sent, its input goes on there."""

    partition: int
    target: int
    phase: TransferPhase = TransferPhase.ORDERED
    until: float = 0.0
    bits: float = 0.0


@dataclass
class SkewTrace:
    """What an experiment measured, second by second."""

    throughput: list[float] = field(default_factory=list)
    latency_s: list[float] = field(default_factory=list)
    moves: list[float] = field(default_factory=list)
    """When each move was done."""

    def rate(self, begin: int, end: int | None = None) -> float:
        some = self.throughput[begin:end]
        return sum(some) / len(some)

    def latency(self, begin: int, end: int | None = None) -> float:
        rows = self.throughput[begin:end]
        late = self.latency_s[begin:end]
        done = sum(rows)
        return sum(r * s for r, s in zip(rows, late, strict=True)) / done if done else 0.0


class SkewedCluster:
    """The machines, the partitions and what waits for them."""

    def __init__(
        self, setting: SkewSetting, balancer: Balancer | None = None, seed: int = 7
    ) -> None:
        self.setting, self.balancer = setting, balancer
        self.count = SITES * setting.partitions
        self.rng = np.random.default_rng(seed)
        self.owner = np.arange(self.count) % SITES
        self.now = 0.0
        self.speed = np.ones(SITES)
        self.memory = np.full(SITES, setting.memory)
        weights = np.asarray(setting.weights or np.ones(self.count), dtype=float)
        self.share = weights / weights.sum()
        self._table = self._drawn()
        self.buffer = np.zeros(self.count)
        self.queue = np.zeros(self.count)
        self.spool = np.zeros(self.count)
        self._spooled_at = np.zeros(self.count)
        self.paused = np.zeros(self.count, dtype=bool)
        self.on_disk = np.zeros(self.count, dtype=bool)
        self.blocked = np.zeros(SITES)
        """Until when a machine does nothing but IO, extracting and installing."""
        self._swap_after = np.zeros(SITES)
        self._active = [deque(np.flatnonzero(self.owner == s).tolist()) for s in range(SITES)]
        self._inactive: list[deque[int]] = [deque() for _ in range(SITES)]
        self._pressed = False
        self.transfers: list[Transfer] = []
        self.trace = SkewTrace()
        self._second = [0.0, 0.0]
        self._control = BalanceRounds(self, balancer) if balancer else None
        self.busy, self.rows = np.zeros(SITES), np.zeros(self.count)

    def _drawn(self) -> Array:
        """Partitions of many random tuples, to draw from."""
        edges = np.round(np.cumsum(self.share) * (1 << 20)).astype(int)
        return np.repeat(np.arange(self.count), np.diff(edges, prepend=0)).astype(np.int32)

    # --- what an experiment does to it ----------------------------------------------------------

    def warm_up(self) -> None:
        """Fill the buffers."""
        self.buffer = self.share * self.setting.buffer * SITES

    def press(self, site: int, memory: float) -> None:
        """Another process takes memory away from a machine."""
        self.memory[site] = memory
        self._pressed = True

    def run(
        self, seconds: float, at_slice: Callable[[SkewedCluster], None] | None = None
    ) -> SkewTrace:
        slices = round(seconds / self.setting.slice_s)
        each = round(1.0 / self.setting.slice_s)
        for n in range(slices):
            if at_slice is not None:
                at_slice(self)
            self._slice()
            self.now = (n + 1) * self.setting.slice_s
            if (n + 1) % each == 0:
                done, late = self._second
                self.trace.throughput.append(float(done))
                self.trace.latency_s.append(float(late / done) if done else 0.0)
                self._second = [0.0, 0.0]
        return self.trace

    # --- a slice of time ------------------------------------------------------------------------

    def _slice(self) -> None:
        if self.setting.divided:
            self._produce_divided()
        else:
            self._produce()
        self._send()
        if self.transfers:
            self._move()
        if self._pressed:
            for site in range(SITES):
                if self.blocked[site] <= self.now:
                    self._manage_memory(site)
        self._consume()
        if self._control is not None:
            self._control.step()

    def _produce(self) -> None:
        room = int(self.setting.buffer * SITES - self.buffer.sum())
        count = min(room, int(PRODUCE_MAX * self.setting.slice_s))
        if count > 0:
            drawn = self._table[self.rng.integers(0, len(self._table), count)]
            self.buffer += np.bincount(drawn, minlength=self.count)

    def _produce_divided(self) -> None:
        """Fill the connections until the first one is full: a producer waits there."""
        room = CONNECTION + self.setting.buffer - self.queue
        self.queue += self.share * max(0.0, float((room / self.share).min()))

    def _send(self) -> None:
        """Drain the buffers of partitions whose machine can take more."""
        waiting = np.where(self.paused, 0.0, self.buffer)
        wanted = np.bincount(self.owner, waiting, SITES)
        free = CONNECTION - np.bincount(self.owner, self.queue, SITES)
        part = np.clip(free / np.maximum(wanted, 1e-9), 0.0, 1.0)
        sent = waiting * part[self.owner]
        self.buffer -= sent
        self.queue += sent

    def _consume(self) -> None:
        slice_s = self.setting.slice_s
        free = np.clip(self.now + slice_s - self.blocked, 0.0, slice_s)
        cost = np.where(self.on_disk, SPOOL_S, 1.0 / RATE) if self._pressed else 1.0 / RATE
        need = np.bincount(self.owner, self.queue * cost, SITES) / self.speed
        part = np.minimum(1.0, free / np.maximum(need, 1e-12))
        done = self.queue * part[self.owner]
        self.queue -= done
        self.busy += slice_s - free + np.minimum(free, need)
        if self._pressed:
            spooled = np.where(self.on_disk, done, 0.0)
            self.spool += spooled
            self._spooled_at += spooled * self.now
            done = done - spooled
        self.rows += done
        by_site = np.bincount(self.owner, done, SITES)
        self._second[0] += by_site.sum()
        self._second[1] += (by_site / RATE / self.speed).sum()

    # --- moves ----------------------------------------------------------------------------------

    @property
    def _tuples(self) -> float:
        return self.setting.state_bytes / TUPLE_BYTES

    def order(self, orders: Sequence[Order]) -> None:
        self.transfers += [Transfer(partition, target) for partition, target in orders]

    def _block(self, site: int, seconds: float) -> None:
        self.blocked[site] = max(self.blocked[site], self.now) + seconds

    def _move(self) -> None:
        sending = [t for t in self.transfers if t.phase is TransferPhase.SENDING]
        if sending:
            bits = min(LINK_BITS, NETWORK_BITS / len(sending)) * self.setting.slice_s
            for t in sending:
                t.bits -= bits
        for t in self.transfers:
            self._advance(t)
        self.transfers = [t for t in self.transfers if t.phase is not TransferPhase.DONE]

    def _advance(self, t: Transfer) -> None:
        source = int(self.owner[t.partition])
        match t.phase:
            case TransferPhase.ORDERED if self.blocked[source] <= self.now:
                self.paused[t.partition] = True
                drain = 0.0 if self._pressed else self._queued(source) / RATE / self.speed[source]
                t.phase, t.until = TransferPhase.QUIESCING, self.now + drain + 2 * LATENCY_S
            case TransferPhase.QUIESCING if max(t.until, self.blocked[source]) <= self.now:
                if self.on_disk[t.partition]:
                    self._read(source, t.partition)
                self._block(source, self._tuples * INSTALL_S / self.speed[source])
                self.buffer[t.partition] += self.queue[t.partition]
                self.queue[t.partition] = 0.0
                self._forget(source, t.partition)
                t.phase, t.bits = TransferPhase.SENDING, 8.0 * self.setting.state_bytes
            case TransferPhase.SENDING if t.bits <= 0 and self.blocked[t.target] <= self.now:
                self._block(t.target, self._tuples * INSTALL_S / self.speed[t.target])
                t.phase, t.until = TransferPhase.INSTALLING, self.blocked[t.target]
            case TransferPhase.INSTALLING if t.until <= self.now:
                t.phase = TransferPhase.DONE
                self.owner[t.partition] = t.target
                self.paused[t.partition] = False
                self._active[t.target].append(t.partition)
                self.trace.moves.append(self.now)
            case _:
                pass

    def _queued(self, site: int) -> float:
        return float(self.queue[self.owner == site].sum())

    def _forget(self, site: int, partition: int) -> None:
        for some in (self._active[site], self._inactive[site]):
            if partition in some:
                some.remove(partition)

    # --- memory ---------------------------------------------------------------------------------

    def _io_s(self) -> float:
        return SEEK_S + self.setting.state_bytes / DISK_BYTES

    def _manage_memory(self, site: int) -> None:
        """Spill while there is too much, bring back while there is room, else rotate."""
        size, active = self.setting.state_bytes, self._active[site]
        used = size * len(active)
        if used > self.memory[site]:
            self._write(site)
        elif self._inactive[site]:
            if used + size <= self.memory[site]:
                self._activate(site)
            elif self._swap_after[site] <= self.now:
                self._write(site)
                self._activate(site)

    def _write(self, site: int) -> None:
        partition = self._active[site].popleft()
        self._inactive[site].append(partition)
        self.on_disk[partition] = True
        self._block(site, self._io_s() + self._tuples * INSTALL_S / self.speed[site])

    def _activate(self, site: int) -> None:
        partition = self._inactive[site].popleft()
        self._active[site].append(partition)
        self._block(site, self._tuples * INSTALL_S / self.speed[site])
        self._read(site, partition)
        self._swap_after[site] = self.blocked[site] + self._io_s()

    def _read(self, site: int, partition: int) -> None:
        """Read a partition from disk, and process the input that has waited for it."""
        self.on_disk[partition] = False
        waiting = float(self.spool[partition])
        spooled = waiting * TUPLE_BYTES / DISK_BYTES + (SEEK_S if waiting else 0.0)
        self._block(site, self._io_s() + spooled + waiting / RATE / self.speed[site])
        self._second[0] += waiting
        self._second[1] += waiting * self.blocked[site] - float(self._spooled_at[partition])
        self.rows[partition] += waiting
        self.spool[partition] = self._spooled_at[partition] = 0.0


class BalanceRounds:
    """The rounds of the controller: collect, gather, move."""

    def __init__(self, cluster: SkewedCluster, balancer: Balancer) -> None:
        self._cluster, self._balancer = cluster, balancer
        self._moves_took = 0.0
        self._moves_began: float | None = None
        self._begin(balancer.first_collect_s())

    def _begin(self, seconds: float) -> None:
        cluster = self._cluster
        cluster.busy, cluster.rows = np.zeros(SITES), np.zeros(cluster.count)
        self._began, self._until = cluster.now, cluster.now + seconds
        self._asked: float | None = None

    def step(self) -> None:
        cluster = self._cluster
        if self._moves_began is not None:
            if not cluster.transfers:
                self._moves_took = cluster.now - self._moves_began
                self._moves_began = None
                if not self._balancer.overlaps:
                    self._begin(self._balancer.after_moves_s(self._moves_took))
            elif not self._balancer.overlaps:
                return
        if cluster.now + 1e-9 < self._until:
            return
        if self._asked is None:
            self._asked = cluster.now
            self._until = max(cluster.now, float(cluster.blocked.max()))
            if self._until > cluster.now:
                return
        self._plan(cluster.now - self._asked)

    def _plan(self, gathering_s: float) -> None:
        cluster = self._cluster
        seconds = cluster.now - self._began
        if seconds <= 0:
            return
        sample = RoundSample(
            seconds,
            np.minimum(1.0, cluster.busy / seconds),
            cluster.rows,
            cluster.owner,
            cluster.on_disk,
            cluster.memory,
            cluster.setting.state_bytes,
            self._moves_took,
            gathering_s,
        )
        under_way = [(t.partition, t.target) for t in cluster.transfers]
        orders, next_s = self._balancer.plan(sample, under_way)
        self._moves_took = 0.0
        cluster.order(orders)
        if orders and self._moves_began is None:
            self._moves_began = cluster.now
        self._begin(next_s)
