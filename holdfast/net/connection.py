"""One end of a connection: the handshake and the framing of messages.

`holdfast.net.wire` defines the messages. A connection allocates memory for a body as bytes arrive,
not by the announced length.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

import numpy as np

from holdfast.api.security import Level
from holdfast.errors import HoldfastError, ProtocolError
from holdfast.log_limit import LimitedLog
from holdfast.net import protocol, wire
from holdfast.net.admission import Listener, open_listener
from holdfast.net.handshake import Handshake, HandshakePhase, Party
from holdfast.net.sealing import SEAL_BYTES, Sealer

log = logging.getLogger("holdfast.wire")
limited = LimitedLog(log)

HANDSHAKE_S_MAX = 5.0
SHUTDOWN_S_MAX = 1.0
"""How long the end of TLS may wait for the peer's. Nothing that matters is sent then."""
CHUNK_BYTES = 1 << 17
"""Size of the receive buffer. A message that does not fit gets a buffer of its own."""
LARGE_BYTES = 1 << 22
"""Maximum bytes allocated for a large message before its body arrives."""
_JOINED_BYTES_MAX = 1 << 16

Handler = Callable[["Connection", wire.Message, memoryview], None]


class Connection(asyncio.BufferedProtocol):
    """One end of an authenticated connection.

    `on_open` is called after the handshake, `on_message` for each message (the body is a view
    that stays valid), `on_close` once at the end. Reading never pauses: credits, not TCP, limit
    senders.
    """

    def __init__(
        self,
        party: Party,
        on_open: Callable[[Connection], None],
        on_message: Handler,
        on_close: Callable[[Connection, Exception | None], None],
        identity: tuple[str, int] | None = None,
        peer: tuple[str, int] = (wire.SERVER, -1),
    ) -> None:
        self._party, self._dials = party, identity is not None
        self._handshake = Handshake(party, identity, peer)
        self._on_open, self._on_message, self._on_close = on_open, on_message, on_close
        self.role, self.id = "", -1
        self.open = False
        self.sent_bytes = 0
        self.heard = self.spoke = True
        """Whether bytes were received or sent since the owner last cleared these flags."""
        self._transport: asyncio.Transport | None = None
        self._securing: asyncio.Task[None] | None = None
        self._sealer: Sealer | None = None
        self._checker: Sealer | None = None
        self._seal_bytes = 0
        self._chunk = _empty(CHUNK_BYTES)
        self._begin = self._end = 0  # the unparsed part of the chunk
        self._large: _Large | None = None  # a message that does not fit into a chunk
        self._waiting: list[bytes | memoryview] = []
        self._waiting_bytes = 0
        self._timer: asyncio.TimerHandle | None = None
        self.settled: Callable[[], None] = _nothing
        """Called when the connection has authenticated, and when it is closed."""
        self.before_tls: Callable[[Callable[[], None]], None] = _at_once
        """Called with what begins TLS, when it is dialled."""

    # --- asyncio's side -------------------------------------------------------------------------

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._use(transport)
        loop = asyncio.get_running_loop()
        self._timer = loop.call_later(HANDSHAKE_S_MAX, self._refuse, "no handshake in time")
        if not self._dials:
            self._write(wire.encode(self._handshake.challenge))
            self._flush()
            if self._handshake.level is Level.TLS:
                transport.pause_reading()  # what comes next is of TLS
                self.before_tls(self._secure)
            else:
                self._secure()

    def _use(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        transport.set_write_buffer_limits(high=1 << 30)

    def get_buffer(self, sizehint: int) -> memoryview:
        if self._large is not None:
            return self._large.room
        return self._chunk[self._end :]

    def buffer_updated(self, nbytes: int) -> None:
        self.heard = True
        try:
            if self._large is not None:
                self._fill(nbytes)
            else:
                self._end += nbytes
                self._take_messages()
        except ProtocolError as error:
            self._refuse(str(error))

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, error: Exception | None) -> None:
        if self._transport is None:
            return  # asyncio and a failed TLS handshake may both say so
        self._transport = None
        if self._timer is not None:
            self._timer.cancel()
        self.open = False
        self.settled()
        self._on_close(self, error)

    # --- the handshake --------------------------------------------------------------------------

    def _secure(self) -> None:
        """Begin TLS, if it is wanted. Its first bytes must not be read as messages."""
        if self._handshake.level is not Level.TLS:
            self._secured(None)
            return
        assert self._transport is not None
        if self._end > self._begin:
            raise ProtocolError("there is more than a Challenge before TLS")
        self._transport.pause_reading()
        self._securing = asyncio.get_running_loop().create_task(self._start_tls(self._transport))

    async def _start_tls(self, transport: asyncio.Transport) -> None:
        loop = asyncio.get_running_loop()
        try:
            secure = await loop.start_tls(
                transport,
                self,
                self._handshake.context,
                server_side=not self._dials,
                ssl_handshake_timeout=HANDSHAKE_S_MAX,
                ssl_shutdown_timeout=SHUTDOWN_S_MAX,
            )
            if secure is None:  # the connection was lost meanwhile
                raise ConnectionResetError("closed during the TLS handshake")
            self._use(secure)
            self._secured(secure.get_extra_info("ssl_object"))
            loop.call_soon(self.buffer_updated, 0)  # a message may have come with TLS's last one
        except ConnectionError as error:  # a probe, or a peer that has gone
            log.info("a connection was closed during its TLS handshake: %s", error)
            self.abort()
            self.connection_lost(error)
        except (OSError, HoldfastError) as error:
            self._refuse(f"TLS: {error}")
            self.connection_lost(error)

    def _secured(self, channel: Any) -> None:
        hello = self._handshake.secured(channel)
        if hello is not None:
            self._write(wire.encode(hello))

    def _greet(self, message: wire.Message) -> None:
        """Take a message of the handshake."""
        answer = self._handshake.handle(message)
        if answer is not None:
            self._write(wire.encode(answer))
        match self._handshake.phase:
            case HandshakePhase.SECURING:
                self._secure()
            case HandshakePhase.OPEN:
                self._opened()
            case HandshakePhase.REFUSED:
                assert isinstance(answer, wire.Refusal)
                limited.warning("refused", "refused a connection: %s", answer.reason)
                self.close()

    # --- framing --------------------------------------------------------------------------------

    def _take_messages(self) -> None:
        """Dispatch all complete messages; the chunk keeps the rest."""
        while self._end - self._begin >= wire.PREFIX.size and not self._closing:
            if self._handshake.phase is HandshakePhase.SECURING:
                break
            body, header = wire.PREFIX.unpack_from(self._chunk, self._begin)
            wire.check_lengths(body, header, greeting=not self.open)
            begin = self._begin + wire.PREFIX.size
            end = begin + header + body
            if end + self._seal_bytes > self._end:
                if wire.PREFIX.size + header + body + self._seal_bytes > CHUNK_BYTES:
                    sealed = body + self._seal_bytes
                    self._large = _Large(header, sealed, self._chunk[begin : self._end])
                    self._begin = self._end
                break
            if self._checker is not None:
                seal = self._chunk[end : end + SEAL_BYTES]
                self._checker.check((self._chunk[self._begin : end],), seal)
            self._begin = end + self._seal_bytes
            message = wire.decode(self._chunk[begin : begin + header], greeting=not self.open)
            content = _empty(body)  # a copy, because the chunk is reused
            content[:] = self._chunk[begin + header : end]
            self._dispatch(message, content)
        left = self._end - self._begin
        if self._begin and left:
            self._chunk[:left] = bytes(self._chunk[self._begin : self._end])
        self._begin, self._end = 0, left

    def _fill(self, nbytes: int) -> None:
        assert self._large is not None
        if self._large.fill(nbytes):
            large, self._large = self._large, None
            body = large.body
            if self._checker is not None:
                body, seal = body[:-SEAL_BYTES], body[-SEAL_BYTES:]
                prefix = wire.PREFIX.pack(body.nbytes, large.header.nbytes)
                self._checker.check((prefix, large.header, body), seal)
            self._dispatch(wire.decode(large.header), body)

    def _dispatch(self, message: wire.Message, body: memoryview) -> None:
        if self.open:
            protocol.check_sender(self.role, message)
            self._on_message(self, message, body)
            return
        self._greet(message)

    def _opened(self) -> None:
        self.role, self.id, self.open = self._handshake.role, self._handshake.id, True
        sealers = self._handshake.sealers()
        if sealers is not None:
            (self._sealer, self._checker), self._seal_bytes = sealers, SEAL_BYTES
        if self._timer is not None:
            self._timer.cancel()
        self._party.connections.add(self)
        self.settled()
        self._on_open(self)

    def _refuse(self, reason: str) -> None:
        peer = self._transport.get_extra_info("peername") if self._transport else None
        limited.warning(reason, "refused a connection from %s: %s", peer, reason)
        self.abort()

    # --- our side -------------------------------------------------------------------------------

    @property
    def local_host(self) -> str:
        """The local address of this connection."""
        assert self._transport is not None
        return str(self._transport.get_extra_info("sockname")[0])

    @property
    def keys(self) -> str:
        """The id of the keys that the connection was opened with."""
        return self._handshake.keys

    @property
    def _closing(self) -> bool:
        return self._transport is None or self._transport.is_closing()

    def _write(self, data: bytes | memoryview) -> None:
        """Queue data, to be sent together with all other data of this turn of the event loop: a
        system call costs more than copying a little data."""
        if self._closing:
            return
        if not self._waiting:
            asyncio.get_running_loop().call_soon(self._flush)
            self.spoke = True
        self.sent_bytes += len(data)
        self._waiting.append(data)
        self._waiting_bytes += len(data)

    def _flush(self) -> None:
        """Send the queue. Adjacent small buffers are joined; large ones are sent without a copy."""
        waiting, self._waiting, self._waiting_bytes = self._waiting, [], 0
        small: list[bytes | memoryview] = []
        for data in waiting:
            if len(data) <= _JOINED_BYTES_MAX:
                small.append(data)
            else:
                self._write_through(b"".join(small))
                self._write_through(data)
                small = []
        self._write_through(b"".join(small))

    def _write_through(self, data: bytes | memoryview) -> None:
        if data and self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    def send(self, message: wire.Message, body: list[Any] | None = None) -> None:
        """Queue a message. `body` is a list of buffers, which must not change afterwards."""
        views = [memoryview(b).cast("B") for b in body or ()]
        head = wire.encode(message, sum(v.nbytes for v in views))
        self._write(head)
        for view in views:
            self._write(view)
        if self._sealer is not None:
            self._write(self._sealer.seal((head, *views)))

    @property
    def queued(self) -> int:
        """Bytes that the kernel has not accepted yet."""
        written = self._transport.get_write_buffer_size() if self._transport else 0
        return written + self._waiting_bytes

    def close(self) -> None:
        """Send the queued data, then close."""
        if self._transport is not None:
            self._flush()
            self._transport.close()

    def abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class _Large:
    """The buffer of a message that does not fit into a chunk. It is received in place.

    The buffer begins with at most `LARGE_BYTES` and grows fourfold each time it is full, so that a
    peer that only announces a large body does not make this side allocate it. The sizes are a
    quarter of the message, a quarter of that and so on, so that growing copies less than a third of
    the message in all.
    """

    def __init__(self, header: int, body: int, received: memoryview) -> None:
        self._header, self._nbytes = header, header + body
        room = self._nbytes
        while room > LARGE_BYTES:
            room = -(-room // 4)  # rounded up
        self._held = self._make(room)
        self._filled = received.nbytes
        self._held[: self._filled] = received

    @property
    def room(self) -> memoryview:
        """The unfilled part of the buffer; never empty."""
        return self._held[self._filled :]

    def fill(self, nbytes: int) -> bool:
        """Note that `nbytes` were received into `room`. Return whether the message is complete."""
        self._filled += nbytes
        if self._filled == self._held.nbytes < self._nbytes:
            held = self._held
            self._held = self._make(min(self._nbytes, 4 * held.nbytes))
            self._held[: self._filled] = held
        return self._filled == self._nbytes

    def _make(self, nbytes: int) -> memoryview:
        aligned = -self._header % 64  # the body begins at a multiple of 64
        return _empty(aligned + nbytes)[aligned:]

    @property
    def header(self) -> memoryview:
        return self._held[: self._header]

    @property
    def body(self) -> memoryview:
        return self._held[self._header :]


def _empty(nbytes: int) -> memoryview:
    return np.empty(nbytes, np.uint8).data  # not zeroed, unlike a bytearray


def _at_once(begin: Callable[[], None]) -> None:
    begin()


def _nothing() -> None:
    pass


ConnectionMaker = Callable[[], Connection]


async def listen(make: ConnectionMaker, host: str, port: int = 0) -> tuple[Listener, int]:
    listener = await open_listener(make, host, port, patience_s=HANDSHAKE_S_MAX)
    return listener, listener.port


async def dial(make: ConnectionMaker, address: tuple[str, int]) -> Connection:
    """Connect. The handshake then runs by itself and ends in `on_open` or `on_close`. Raises
    `TimeoutError` after `HANDSHAKE_S_MAX`, long before the kernel would give up."""
    async with asyncio.timeout(HANDSHAKE_S_MAX):
        _, connection = await asyncio.get_running_loop().create_connection(make, *address)
    return connection


async def is_listening(address: tuple[str, int], patience_s: float) -> bool:
    """Whether a process listens at an address. False is certain; True may also mean no answer."""
    try:
        async with asyncio.timeout(patience_s):
            reader, writer = await asyncio.open_connection(*address)
            with contextlib.closing(writer):
                # The kernel may still accept connections for a process that is ending. A live site
                # begins the handshake.
                return bool(await reader.read(1))
    except (ConnectionRefusedError, ConnectionResetError):
        return False
    except (OSError, TimeoutError) as error:
        log.info("no answer from %s: %s", address, error)
        return True
