"""A TCP proxy for the connections of sites, which can reset or hold them.

Every ordered pair (dialling site, listening site) has a separate port, so that two sites can be
separated without affecting others. The proxy runs in its own thread; its methods are thread-safe.
"""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

T = TypeVar("T")
Address = tuple[str, int]
CONTROL = -1
"""Represents the controller as an end of a route."""

_RST = struct.pack("ii", 1, 0)
"""With this linger option, closing a socket sends a reset and discards unsent data."""


class Proxy:
    """Routes between sites, all at the address `host`."""

    def __init__(self, host: str = "127.0.0.1") -> None:
        self._host = host
        self._lock = threading.Lock()
        self._routes: dict[tuple[int, int], _Route] = {}
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._loop.run_forever, name="holdfast-proxy", daemon=True
        )
        self._thread.start()

    def route(self, site: int, other: int, address: Address) -> Address:
        """Return the address that `site` dials to reach `other`, which listens at `address`."""
        with self._lock:
            route = self._routes.get((site, other))
            if route is None:
                route = self._routes[site, other] = _Route(self._host, address)
                asyncio.run_coroutine_threadsafe(route.serve(), self._loop)
        return route.address

    def reset(self, one: int, other: int) -> int:
        """Reset the connections between the two, and return their number."""
        return sum(self._call(route.reset) for route in self._between(one, other))

    def hold(self, one: int, other: int) -> None:
        """Hold all data between the two, on existing and on new connections."""
        for route in self._between(one, other):
            self._call(route.hold)

    def release(self, one: int, other: int) -> None:
        for route in self._between(one, other):
            self._call(route.release)

    def ways(self, one: int, other: int) -> list[tuple[int, int]]:
        """Return the dialling site and the port of each route between the two."""
        with self._lock:
            keys = [(one, other), (other, one)]
            return [(k[0], self._routes[k].address[1]) for k in keys if k in self._routes]

    def forget(self, site: int) -> None:
        """Close all routes of a site that has ended."""
        with self._lock:
            routes = [self._routes.pop(key) for key in list(self._routes) if site in key]
        for route in routes:
            self._loop.call_soon_threadsafe(route.close)

    def close(self) -> None:
        with self._lock:
            routes, self._routes = list(self._routes.values()), {}
        for route in routes:
            self._call(route.close)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _between(self, one: int, other: int) -> list[_Route]:
        with self._lock:
            keys = [(one, other), (other, one)]
            return [self._routes[key] for key in keys if key in self._routes]

    def _call(self, function: Callable[[], T]) -> T:
        async def call() -> T:
            return function()

        return asyncio.run_coroutine_threadsafe(call(), self._loop).result(10)


class _Route:
    """A route in one direction: a listening port and its connections."""

    def __init__(self, host: str, to: Address) -> None:
        self._socket = socket.create_server((host, 0), backlog=128)
        self.address: Address = (host, self._socket.getsockname()[1])
        self.to, self.held, self.closed = to, False, False
        self.ends: set[_RouteEnd] = set()
        self._server: asyncio.Server | None = None

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _RouteEnd(self), sock=self._socket)
        if self.closed:  # the site ended before its port was open
            self._server.close()

    def reset(self) -> int:
        dialled = [end for end in self.ends if end.dialled]
        for end in list(self.ends):
            end.reset()
        return len(dialled)

    def hold(self) -> None:
        self.held = True
        for end in self.ends:
            end.pause()

    def release(self) -> None:
        self.held = False
        for end in list(self.ends):
            end.resume()

    def close(self) -> None:
        self.closed = True
        if self._server is not None:
            self._server.close()
        self.reset()


class _RouteEnd(asyncio.Protocol):
    """One end of a proxied connection; it forwards received data to the other end."""

    def __init__(self, route: _Route, other: _RouteEnd | None = None) -> None:
        self._route, self._other = route, other
        self.dialled = other is None
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        self._route.ends.add(self)
        if self._other is not None:
            self._other._other = self
            self._other.resume()
            if self._route.held:
                self.pause()
            return
        transport.pause_reading()  # until the other end is connected
        self._reach = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: _RouteEnd(self._route, self), *self._route.to)
        except OSError:
            self.reset()

    def data_received(self, data: bytes) -> None:
        if self._other is not None and self._other._transport is not None:
            self._other._transport.write(data)

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        self._route.ends.discard(self)
        other, self._other = self._other, None
        if other is not None and other._transport is not None:
            other._other = None
            other._transport.close()

    def pause_writing(self) -> None:
        if self._other is not None:
            self._other.pause()

    def resume_writing(self) -> None:
        if self._other is not None:
            self._other.resume()

    def pause(self) -> None:
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        ready = self._other is not None and not self._route.held
        if ready and self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def reset(self) -> None:
        """Abort the connection so that both kernels see a reset instead of an orderly end."""
        if self._transport is None:
            return
        plain = self._transport.get_extra_info("socket")
        with suppress(OSError):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        self._transport.abort()
