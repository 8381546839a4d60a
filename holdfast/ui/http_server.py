"""An HTTP server that slow, large and many requests do not exhaust.

A thread serves each connection. Connections without a complete request count as waiting: they have
`REQUEST_S` in all, and beyond the limit the oldest of the busiest address is dropped, as at the
ports of sites (`holdfast.net.admission`). At most `SERVED_MAX` requests are answered at once.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import logging
import socket
import socketserver
import ssl
import sys
import threading
import time
from dataclasses import dataclass, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from holdfast.log_limit import LimitedLog
from holdfast.net.admission import RETRY_S, AdmissionLimits, WaitingRoom

limited = LimitedLog(logging.getLogger("holdfast.web"))

REQUEST_S = 10.0
"""Maximum time from connecting to the end of the request."""
WRITE_S = 30.0
"""Maximum time that one write of a response may take."""
REQUEST_BYTES_MAX = 16 << 10
"""Maximum size of a request with all its headers."""
WAITING_MAX = 32
SERVED_MAX = 32


@dataclass(eq=False)
class _Visit:
    """A connection. Its socket is replaced when TLS begins."""

    connected: socket.socket
    address: str
    until: float

    def drop(self) -> None:
        """Make the thread that reads or writes here stop. It closes the socket."""
        with contextlib.suppress(OSError):
            # Not the method of ssl's class: that takes the encryption from under the thread.
            socket.socket.shutdown(self.connected, socket.SHUT_RDWR)


class GuardedServer(ThreadingHTTPServer):
    """Accepts connections within the limits; `tls` encrypts them."""

    daemon_threads = True
    block_on_close = False
    request_queue_size = 128

    def __init__(
        self,
        address: tuple[str, int],
        handler: type[GuardedHandler],
        tls: ssl.SSLContext | None = None,
    ) -> None:
        if ":" in address[0]:
            self.address_family = socket.AF_INET6
        self._tls = tls
        self._limits = replace(
            AdmissionLimits.of_process(), waiting=WAITING_MAX, per_address=WAITING_MAX // 2
        )
        self._lock = threading.Lock()
        self._waiting: WaitingRoom[_Visit] = WaitingRoom(self._limits)
        self._visits: dict[socket.socket, _Visit] = {}
        self._served = 0
        super().__init__(address, handler)

    def server_bind(self) -> None:
        """Without the base class's look-up of the host's name, which may take long."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = str(self.server_address[0]), self.server_address[1]

    # --- accepting --------------------------------------------------------------------------------

    def get_request(self) -> tuple[socket.socket, Any]:
        try:
            return super().get_request()
        except OSError as error:
            limited.warning("accept", "no HTTP connection can be accepted for now: %s", error)
            time.sleep(RETRY_S)  # the base class would try again at once, and for ever
            raise

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Decide whether the connection is served at all. False closes it."""
        visit = _Visit(request, str(client_address[0]), time.monotonic() + REQUEST_S)
        with self._lock:
            if self._limits.in_reserve(request.fileno()):
                evicted = self._waiting.evict()
                refused = evicted is None
            else:
                evicted, refused = None, False
            if not refused:
                evicted = self._waiting.enter(visit, visit.address) or evicted
                self._visits[request] = visit
        if evicted is not None:
            limited.warning("dropped", "dropped an HTTP connection without a request: too many")
            evicted.drop()
        return not refused

    def service_actions(self) -> None:
        """Drop those that have not sent a request in time. Called about twice a second."""
        now = time.monotonic()
        with self._lock:
            late = [visit for visit in self._waiting if visit.until < now]
        for visit in late:
            visit.drop()

    # --- a thread for each connection -------------------------------------------------------------

    def finish_request(self, request: Any, client_address: Any) -> None:
        visit = self._visits[request]
        request.settimeout(REQUEST_S)
        if self._tls is not None:
            wrapped = self._tls.wrap_socket(
                request, server_side=True, do_handshake_on_connect=False
            )
            visit.connected = wrapped
            with self._lock:
                self._visits[wrapped] = visit
            wrapped.do_handshake()
        super().finish_request(visit.connected, client_address)

    def shutdown_request(self, request: Any) -> None:
        """The end of every connection, served or not."""
        with self._lock:
            visit = self._visits.pop(request, None)
            if visit is not None:
                self._visits.pop(visit.connected, None)
                self._waiting.leave(visit)
        super().shutdown_request(request if visit is None else visit.connected)

    def begin_answer(self, connected: socket.socket) -> bool:
        """The request is complete. Return whether there is room to answer it."""
        connected.settimeout(WRITE_S)
        with self._lock:
            self._waiting.leave(self._visits[connected])
            self._served += 1
            return self._served <= SERVED_MAX

    def end_answer(self) -> None:
        with self._lock:
            self._served -= 1

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients that break off, or fail the handshake, are no errors of ours."""
        error = sys.exc_info()[1]
        if not isinstance(error, OSError):
            limited.warning(repr(type(error)), "an HTTP request failed: %r", error)


class GuardedHandler(BaseHTTPRequestHandler):
    """One request for each connection, of limited size. Subclasses answer it in `answer`."""

    server: GuardedServer

    def setup(self) -> None:
        super().setup()
        self.rfile = _LimitedReader(self.rfile, REQUEST_BYTES_MAX)  # type: ignore[assignment]

    def do_GET(self) -> None:
        try:
            if self.server.begin_answer(self.connection):
                self.answer()
            else:
                self.respond(503, "text/plain", b"too many requests at once\n")
        finally:
            self.server.end_answer()

    def answer(self) -> None:
        raise NotImplementedError

    def respond(self, code: int, kind: str, body: bytes, **headers: str) -> None:
        self.begin_response(code, kind, **{"Content-Length": str(len(body)), **headers})
        self.wfile.write(body)

    def begin_response(self, code: int, kind: str, **headers: str) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Cache-Control", "no-store")
        self.send_header("X-Content-Type-Options", "nosniff")
        self.send_header("Referrer-Policy", "no-referrer")
        self.send_header("Content-Security-Policy", "default-src 'self'; frame-ancestors 'none'")
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()

    def version_string(self) -> str:
        return "holdfast"

    def log_message(self, format: str, *args: Any) -> None:
        """Do not log requests to the user's terminal."""


class _LimitedReader:
    """Reads the lines of a request, up to a size in all."""

    def __init__(self, inner: io.BufferedIOBase, nbytes: int) -> None:
        self._inner, self._left = inner, nbytes

    def readline(self, limit: int = -1) -> bytes:
        if self._left <= 0:
            raise http.client.LineTooLong("request")
        line = self._inner.readline(self._left if limit < 0 else min(limit, self._left))
        self._left -= len(line)
        return line

    def close(self) -> None:
        self._inner.close()

    @property
    def closed(self) -> bool:
        return self._inner.closed
