"""A TCP proxy that the connections of sites go through, and that can break or hold them.

Every ordered pair (who dials, whom) has a port of its own, so that the two can be parted and all
others left alone. It lives in a thread; whoever calls it need not.
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
"""Stands for the controller among the ends of a route."""

_RST = struct.pack("ii", 1, 0)
"""A socket that is closed with this option sends a reset, whatever it still has to send."""


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
        """Where `site` is to dial to reach `other`, which listens at `address`."""
        with self._lock:
            found = self._routes.get((site, other))
            if found is None:
                found = self._routes[site, other] = _Route(self._host, address)
                asyncio.run_coroutine_threadsafe(found.serve(), self._loop)
        return found.address

    def reset(self, one: int, other: int) -> int:
        """Break what connects the two now; how many connections that were."""
        return sum(self._call(route.reset) for route in self._between(one, other))

    def hold(self, one: int, other: int) -> None:
        """Let nothing through between the two, neither on connections that are nor on new ones."""
        for route in self._between(one, other):
            self._call(route.hold)

    def release(self, one: int, other: int) -> None:
        for route in self._between(one, other):
            self._call(route.release)

    def ways(self, one: int, other: int) -> list[tuple[int, int]]:
        """Who of the two dials here at which port to reach the other."""
        with self._lock:
            keys = [(one, other), (other, one)]
            return [(k[0], self._routes[k].address[1]) for k in keys if k in self._routes]

    def forget(self, site: int) -> None:
        """The site is gone for good."""
        with self._lock:
            gone = [self._routes.pop(key) for key in list(self._routes) if site in key]
        for route in gone:
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
    """One way: a listening port, and the connections that came in there."""

    def __init__(self, host: str, to: Address) -> None:
        self._socket = socket.create_server((host, 0), backlog=128)
        self.address: Address = (host, self._socket.getsockname()[1])
        self.to, self.held, self.closed = to, False, False
        self.ends: set[_End] = set()
        self._server: asyncio.Server | None = None

    async def serve(self) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self), sock=self._socket)
        if self.closed:  # the site was gone before its port was open
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


class _End(asyncio.Protocol):
    """One end of a connection that goes through; what comes in here goes out at the other."""

    def __init__(self, route: _Route, other: _End | None = None) -> None:
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
        transport.pause_reading()  # until there is somebody to pass it on to
        self._reach = asyncio.get_running_loop().create_task(self._connect())

    async def _connect(self) -> None:
        try:
            loop = asyncio.get_running_loop()
            await loop.create_connection(lambda: _End(self._route, self), *self._route.to)
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
        """So that both kernels see a reset, and not an orderly end."""
        if self._transport is None:
            return
        plain = self._transport.get_extra_info("socket")
        with suppress(OSError):
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _RST)
        self._transport.abort()
