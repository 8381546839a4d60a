"""Who may wait at a port without having said who it is, and how many descriptors that may take.

A stranger can open connections faster than they time out. So each of them counts until it has
authenticated, and beyond a limit one that waits is dropped: the oldest of the address that has the
most. A peer that knows the secret needs one round trip, so it has authenticated long before it is
the oldest; and a flood from one address does not touch those from others. Nobody is kept out
because the places are taken: the newest connection always gets one.

Descriptors are held in reserve for what else the process opens: files of sinks, spilled rows,
connections that it dials. `Listener` stands in for asyncio's server, which at the limit of the
process calls ``accept`` 512 times a turn and logs each failure.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import logging
import resource
import socket
import ssl
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from holdfast.log_limit import LimitedLog

log = logging.getLogger("holdfast.wire")
limited = LimitedLog(log)

ACCEPTS_PER_TURN = 16
"""Maximum connections accepted in one turn of the event loop, so that other work continues."""
RETRY_S = 0.5
"""The wait after ``accept`` has failed because the process or the machine has no descriptor."""
BACKLOG = 512
TLS_MAX = 32
"""Maximum handshakes of TLS at once. Each takes 0.3 MB, most of it a buffer of asyncio's, so
strangers take 10 MB in all."""
TLS_S = 1.0
"""How long a handshake of TLS may take while others wait for its place."""
ALIVE = b"\0"
"""Sent on a connection that is closed at once: a probe takes any byte for a sign of life, and an
end without one for the death of the process (`holdfast.net.connection.is_listening`)."""


@dataclass(frozen=True, slots=True)
class AdmissionLimits:
    """How many connections may wait, and which descriptors are in reserve."""

    waiting: int
    per_address: int
    descriptors: int
    """The number of the first descriptor that is in reserve."""

    @classmethod
    def of_process(cls) -> AdmissionLimits:
        """Derive the limits from the process's limit of descriptors.

        A quarter of the descriptors may wait (256 of the usual 1,024), half of those from one
        address: hundreds of tasks on one machine may connect at once. An eighth is in reserve.
        """
        soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        allowed = 1 << 20 if soft == resource.RLIM_INFINITY else soft
        waiting = max(2 * ACCEPTS_PER_TURN, min(allowed // 4, 1024))
        reserve = max(2 * ACCEPTS_PER_TURN, min(allowed // 8, 256))
        return cls(waiting, waiting // 2, allowed - reserve)

    def in_reserve(self, descriptor: int) -> bool:
        """Whether this descriptor is one of the last: the kernel gives the lowest that is free, so
        all below it are in use."""
        return descriptor >= self.descriptors


C = TypeVar("C", bound=Hashable)


class WaitingRoom(Generic[C]):
    """The connections that have not authenticated yet.

    >>> room = WaitingRoom(AdmissionLimits(waiting=3, per_address=2, descriptors=100))
    >>> [room.enter(name, host) for name, host in [("a", "h"), ("b", "h"), ("c", "h"), ("d", "i")]]
    [None, None, 'a', None]
    >>> room.enter("e", "j"), room.leave("e"), len(room)
    ('b', None, 2)
    """

    def __init__(self, limits: AdmissionLimits) -> None:
        self._limits = limits
        self._by_address: dict[str, dict[C, None]] = {}
        self._addresses: dict[C, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def enter(self, connection: C, address: str) -> C | None:
        """Take a connection in. Return the one that must go for it, if any."""
        address, evicted = network_of(address), None
        there = self._by_address.get(address, {})
        if len(there) >= self._limits.per_address:
            evicted = self._evict(address)
        elif len(self) >= self._limits.waiting:
            evicted = self.evict()
        self._by_address.setdefault(address, {})[connection] = None
        self._addresses[connection] = address
        return evicted

    def leave(self, connection: C) -> None:
        """A connection has authenticated, or is closed."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            del self._by_address[address][connection]
            if not self._by_address[address]:
                del self._by_address[address]

    def evict(self) -> C | None:
        """Remove the oldest connection of the address that has the most; None if all are gone."""
        if not self._by_address:
            return None
        return self._evict(max(self._by_address, key=lambda a: len(self._by_address[a])))

    def _evict(self, address: str) -> C:
        oldest = next(iter(self._by_address[address]))
        self.leave(oldest)
        return oldest

    def __iter__(self) -> Any:
        return iter(list(self._addresses))


def network_of(address: str) -> str:
    """The address that connections are counted by. Who has one address of IPv6 has 2^64 of them.

    >>> network_of("10.1.2.3"), network_of("2001:db8::1:2")
    ('10.1.2.3', '2001:db8::/64')
    """
    with contextlib.suppress(ValueError):
        if (parsed := ipaddress.ip_address(address.partition("%")[0])).version == 6:
            return str(ipaddress.ip_network((parsed, 64), strict=False))
    return address


class TlsGate(Generic[C]):
    """Lets `TLS_MAX` connections begin TLS at once; the others wait, and cost next to nothing.
    Addresses take turns. A connection that takes longer than `TLS_S` is dropped if others wait.

    >>> gate, begun = TlsGate(print, places=1), []
    >>> for name in "abc":
    ...     gate.enter(name, "h" if name < "c" else "i", lambda name=name: begun.append(name), 0.0)
    >>> gate.leave("a", 0.0); gate.leave("b", 0.0); begun
    ['a', 'b', 'c']
    >>> gate.enter("d", "h", lambda: None, 1.1)
    c
    """

    def __init__(self, drop: Callable[[C], None], places: int = TLS_MAX) -> None:
        self._drop, self._places = drop, places
        self.running: dict[C, float] = {}
        """By connection: since when it has a place."""
        self._queues: dict[str, dict[C, Callable[[], None]]] = {}
        self._addresses: dict[C, str] = {}

    def __len__(self) -> int:
        return len(self._addresses)

    def enter(self, connection: C, address: str, begin: Callable[[], None], now: float) -> None:
        """Call `begin` when there is a place."""
        address = self._addresses[connection] = network_of(address)
        self._queues.setdefault(address, {})[connection] = begin
        self.tend(now)

    def leave(self, connection: C, now: float) -> None:
        """A connection has authenticated, or is closed."""
        self.running.pop(connection, None)
        self._take(connection)
        self.tend(now)

    def tend(self, now: float) -> None:
        """Fill the places, and drop who has had one for too long. To be called now and then."""
        late = [c for c, since in self.running.items() if since + TLS_S < now]
        for connection in late[: len(self)]:
            del self.running[connection]
            self._drop(connection)
        while self._queues and len(self.running) < self._places:
            first = next(iter(self._queues))
            connection, begin = next(iter(self._queues[first].items()))
            self._take(connection)
            self.running[connection] = now
            if first in self._queues:  # the others come first now
                self._queues[first] = self._queues.pop(first)
            begin()

    def _take(self, connection: C) -> None:
        address = self._addresses.pop(connection, None)
        if address is not None:
            del self._queues[address][connection]
            if not self._queues[address]:
                del self._queues[address]


class Guest(Protocol):
    """A connection that is accepted here, as far as this module knows it."""

    settled: Callable[[], None]
    """Called when the connection has authenticated, and when it is closed."""

    before_tls: Callable[[Callable[[], None]], None]
    """Called with what begins TLS."""

    def abort(self) -> None: ...


GuestMaker = Callable[[], Any]
"""Returns a protocol of asyncio that is a `Guest`."""


class _Arrival:
    """A connection from ``accept`` on: asyncio may still be making a transport of it."""

    def __init__(
        self,
        make: GuestMaker,
        settled: Callable[[_Arrival], None],
        before_tls: Callable[[_Arrival, Callable[[], None]], None],
    ) -> None:
        self._make, self._settled, self._before_tls = make, settled, before_tls
        self._guest: Guest | None = None
        self._task: asyncio.Task[Any] | None = None

    def begin(self, accepted: socket.socket, tls: ssl.SSLContext | None, patience_s: float) -> None:
        loop = asyncio.get_running_loop()
        patience = patience_s if tls is not None else None
        self._task = loop.create_task(
            loop.connect_accepted_socket(
                self._protocol, accepted, ssl=tls, ssl_handshake_timeout=patience
            )
        )
        self._task.add_done_callback(self._made)

    def _protocol(self) -> Any:
        self._guest = self._make()
        self._guest.settled = partial(self._settled, self)
        self._guest.before_tls = partial(self._before_tls, self)
        return self._guest

    def _made(self, task: asyncio.Task[Any]) -> None:
        """The transport is there, or will never be: then the guest hears nothing of it."""
        if task.cancelled() or task.exception() is not None:
            self._settled(self)

    def drop(self) -> None:
        if self._task is not None and not self._task.done():
            self._task.cancel()
        elif self._guest is not None:
            self._guest.abort()


class Listener:
    """Accepts connections at a port until it is closed."""

    def __init__(
        self,
        make: GuestMaker,
        sockets: list[socket.socket],
        tls: ssl.SSLContext | None,
        patience_s: float,
        limits: AdmissionLimits | None = None,
    ) -> None:
        self._make, self.sockets = make, sockets
        self._tls, self._patience_s = tls, patience_s
        self._limits = limits or AdmissionLimits.of_process()
        self.waiting: WaitingRoom[_Arrival] = WaitingRoom(self._limits)
        self.gate: TlsGate[_Arrival] = TlsGate(self._drop)
        self._tending: asyncio.TimerHandle | None = None
        self._loop = asyncio.get_running_loop()
        for listening in sockets:
            self._resume(listening)

    @property
    def port(self) -> int:
        return int(self.sockets[0].getsockname()[1])

    def close(self) -> None:
        """Accept no more, and drop those that wait. Authenticated connections stay open."""
        sockets, self.sockets = self.sockets, []
        for listening in sockets:
            self._loop.remove_reader(listening.fileno())
            listening.close()
        for arrival in self.waiting:
            arrival.drop()

    def _resume(self, listening: socket.socket) -> None:
        if listening.fileno() >= 0:
            self._loop.add_reader(listening.fileno(), self._accept, listening)

    def _accept(self, listening: socket.socket) -> None:
        for _ in range(ACCEPTS_PER_TURN):
            try:
                accepted, address = listening.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                limited.warning("accept", "no connection can be accepted for now: %s", error)
                self._loop.remove_reader(listening.fileno())
                self._loop.call_later(RETRY_S, self._resume, listening)
                return
            accepted.setblocking(False)
            self._admit(accepted, str(address[0]))

    def _admit(self, accepted: socket.socket, address: str) -> None:
        if self._limits.in_reserve(accepted.fileno()):
            oldest = self.waiting.evict()
            if oldest is None:
                self._refuse(accepted, address)
                return
            self._drop(oldest)
        arrival = _Arrival(self._make, self._settle, partial(self._before_tls, address))
        evicted = self.waiting.enter(arrival, address)
        if evicted is not None:
            self._drop(evicted)
        arrival.begin(accepted, self._tls, self._patience_s)

    def _settle(self, arrival: _Arrival) -> None:
        self.waiting.leave(arrival)
        self.gate.leave(arrival, self._loop.time())

    def _before_tls(self, address: str, arrival: _Arrival, begin: Callable[[], None]) -> None:
        self.gate.enter(arrival, address, begin, self._loop.time())
        self._tend()

    def _tend(self) -> None:
        """Tend the gate as long as somebody waits there."""
        if self._tending is None and len(self.gate):
            self._tending = self._loop.call_later(TLS_S / 5, self._tend_now)

    def _tend_now(self) -> None:
        self._tending = None
        self.gate.tend(self._loop.time())
        self._tend()

    def _drop(self, arrival: _Arrival) -> None:
        limited.warning(
            "dropped",
            "dropped the oldest connection that has not authenticated: %d wait",
            len(self.waiting) + 1,
        )
        arrival.drop()

    def _refuse(self, accepted: socket.socket, address: str) -> None:
        limited.warning(
            "reserve", "refused a connection from %s: the other descriptors are in reserve", address
        )
        with contextlib.suppress(OSError), accepted:
            accepted.send(ALIVE)


async def open_listener(
    make: GuestMaker,
    host: str,
    port: int = 0,
    *,
    tls: ssl.SSLContext | None = None,
    patience_s: float,
    limits: AdmissionLimits | None = None,
) -> Listener:
    """Listen at all addresses that `host` stands for; an empty one stands for every interface.
    `patience_s` is how long a handshake of TLS may take."""
    found = await asyncio.get_running_loop().getaddrinfo(
        host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )
    sockets: list[socket.socket] = []
    try:
        for family, *_, address in dict.fromkeys(found):
            listening = socket.create_server(address[:2], family=family, backlog=BACKLOG)
            listening.setblocking(False)
            sockets.append(listening)
    except BaseException:
        for listening in sockets:
            listening.close()
        raise
    return Listener(make, sockets, tls, patience_s, limits)
