"""A blocking client of the wire protocol, for tasks and threads outside the event loops."""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import pyarrow as pa

from holdfast.api.security import Level
from holdfast.engine.batches import cut, to_ipc
from holdfast.errors import HostError, ProtocolError
from holdfast.net import wire
from holdfast.net.handshake import Handshake, HandshakePhase, Identity, Party
from holdfast.net.sealing import SEAL_BYTES, Sealer

M = TypeVar("M", bound=wire.Message)
UNANSWERED_MAX = 16
"""Maximum pieces of rows that are sent and not yet answered."""


LEADER_S_MAX = 2.0
RECEIVE_BYTES = 1 << 16
OTHER_SECRET = "it is of another flow or start, or the flow's secret was rotated"


def to_leader(
    addresses: Sequence[tuple[str, int]], party: Party, message: wire.Message
) -> tuple[Client, str]:
    """Send a message to the leader of an ingress. Return a connection to it, and its answer.

    Every site knows the leader. After a leader has died, the call waits for the next one, up to
    `LEADER_S_MAX`.
    """
    deadline = time.monotonic() + LEADER_S_MAX
    leader: tuple[str, int] | None = None
    while True:
        for address in [leader, *addresses] if leader else addresses:
            client = None
            try:
                client = Client(address, party)
                return client, client.ask(message)
            except (HostError, OSError) as error:
                failure = error
                if client is not None:
                    client.close()
                if isinstance(error, Refused):
                    if wire.NOT_HERE not in error.message:
                        raise
                    leader = error.leader
        if time.monotonic() > deadline:
            raise HostError(f"no ingress accepts rows: {failure}") from failure
        time.sleep(0.02)


class Refused(HostError):
    """The ingress refused a message; `leader` is the address of its leader, if known."""

    leader: tuple[str, int] | None = None
    reason = ""


class Client:
    """One authenticated connection, to the ingress of a push source or to the controller."""

    def __init__(
        self,
        address: tuple[str, int],
        party: Party,
        identity: Identity | None = None,
        peer: Identity = (wire.SITE, -1),
    ) -> None:
        """`identity` is the party's own unless another is given; `peer` is the dialled one."""
        self._sealer: Sealer | None = None
        self._checker: Sealer | None = None
        self._read = bytearray()  # bytes that have come and are not used yet
        self._unanswered = 0
        try:
            self._socket = socket.create_connection(address, timeout=10)
        except OSError as error:
            raise HostError(f"cannot reach {address[0]}:{address[1]}: {error}") from error
        try:
            self._shake_hands(Handshake(party, identity or party.own, peer))
        except BaseException:
            self._socket.close()
            raise
        # The ingress answers when it has room, which may take any time.
        self._socket.settimeout(None)

    def _shake_hands(self, handshake: Handshake) -> None:
        handshake.handle(self._greeting())
        channel = None
        if handshake.level is Level.TLS:
            if self._read:
                raise ProtocolError("there is more than a Challenge before TLS")
            try:
                channel = handshake.context.wrap_socket(self._socket)
            except OSError as error:
                raise HostError(f"TLS: {error}", hint=OTHER_SECRET) from error
            self._socket = channel
        hello = handshake.secured(channel)
        assert hello is not None
        self._socket.sendall(wire.encode(hello))
        try:
            handshake.handle(self._greeting())
        except (HostError, OSError) as error:
            raise HostError(
                f"the peer refused this {handshake.identity[0]}'s key: {error}",
                hint=OTHER_SECRET,
            ) from error
        if handshake.phase is not HandshakePhase.OPEN:
            raise ProtocolError(f"the handshake {handshake.phase.value}")
        self._sealer, self._checker = handshake.sealers() or (None, None)

    def _greeting(self) -> wire.Message:
        return self._next(greeting=True)[0]

    def _receive(self, kind: type[Any]) -> Any:
        return self._receive_all(kind)[0]

    def _receive_all(self, kind: type[Any]) -> tuple[Any, bytes]:
        """Return a message and its body."""
        message, body = self._next()
        if not isinstance(message, kind):
            raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message, body

    def _next(self, greeting: bool = False) -> tuple[wire.Message, bytes]:
        prefix = self._exactly(wire.PREFIX.size)
        body, header = wire.PREFIX.unpack(prefix)
        wire.check_lengths(body, header, greeting)
        data = self._exactly(header + body)
        if self._checker is not None:
            self._checker.check((prefix, data), self._exactly(SEAL_BYTES))
        return wire.decode(data[:header], greeting), data[header:]

    def _send(self, message: wire.Message, body: Any = b"") -> None:
        """`body` is a buffer."""
        view = memoryview(body).cast("B")
        head = wire.encode(message, view.nbytes)
        self._socket.sendall(head)
        if view.nbytes:
            self._socket.sendall(view)
        if self._sealer is not None:
            self._socket.sendall(self._sealer.seal((head, view)))

    def exchange(self, message: wire.Message, kind: type[Any]) -> tuple[Any, bytes]:
        """Send a message and wait for its answer: a message of this kind, and its body."""
        self._send(message)
        return self._receive_all(kind)

    def _exactly(self, nbytes: int) -> bytes:
        while len(self._read) < nbytes:
            part = self._socket.recv(max(nbytes - len(self._read), RECEIVE_BYTES))
            if not part:
                raise HostError("the peer closed the connection: has the flow ended?")
            self._read += part
        data = bytes(self._read[:nbytes])
        del self._read[:nbytes]
        return data

    def tell(self, message: wire.Message) -> None:
        """Send a message that has no answer."""
        self._send(message)

    def heard(self, kind: type[M]) -> M | None:
        """Return the message of this kind that has arrived, if any, from a peer that sends no other
        kind."""
        self._socket.settimeout(0)
        try:
            part = self._socket.recv(RECEIVE_BYTES)
            if not part:
                raise HostError("the peer closed the connection")
            self._read += part
        except (BlockingIOError, ssl.SSLWantReadError):
            pass
        finally:
            self._socket.settimeout(None)
        if not self._read:
            return None
        message: M = self._receive(kind)
        return message

    def ask(self, message: wire.Message) -> str:
        """Send a message, wait until the ingress has taken it, and return its answer."""
        self._send(message)
        self._unanswered += 1
        while self._unanswered > 1:
            self._answer()
        return self._answer()

    def _answer(self) -> str:
        taken = self._receive(wire.PushTaken)
        self._unanswered -= 1
        if not taken.ok:
            refused = Refused(f"the ingress refused rows: {taken.reason}")
            refused.leader, refused.reason = taken.leader, taken.reason
            raise refused
        return str(taken.reason)

    def send_rows(self, batch: pa.RecordBatch) -> None:
        """Send rows. Waits only while `UNANSWERED_MAX` pieces are not answered."""
        for piece in cut(batch, wire.PIECE_BYTES):
            body = to_ipc(piece)
            self._send(wire.PushRows(), body)
            self._unanswered += 1
            if self._unanswered >= UNANSWERED_MAX:
                self._answer()

    def close(self) -> None:
        self._socket.close()
