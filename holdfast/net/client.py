"""A blocking client of the wire protocol, for tasks and threads outside the event loops."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import pyarrow as pa

from holdfast.engine.batches import cut, to_ipc
from holdfast.errors import HostError, ProtocolError
from holdfast.net import wire

M = TypeVar("M", bound=wire.Message)
UNANSWERED_MAX = 16
"""Maximum pieces of rows that are sent and not yet answered."""


LEADER_S_MAX = 2.0


def to_leader(
    addresses: Sequence[tuple[str, int]], secret: bytes, message: wire.Message
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
                client = Client(address, secret)
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
        self, address: tuple[str, int], secret: bytes, identity: tuple[str, int] = ("pusher", 0)
    ) -> None:
        try:
            self._socket = socket.create_connection(address, timeout=10)
        except OSError as error:
            raise HostError(f"cannot reach {address[0]}:{address[1]}: {error}") from error
        self._unanswered = 0
        self._shake_hands(secret, identity)
        # The ingress answers when it has room, which may take any time.
        self._socket.settimeout(None)

    def _shake_hands(self, secret: bytes, identity: tuple[str, int]) -> None:
        challenge = self._receive(wire.Challenge)
        nonce = os.urandom(16)
        self._socket.sendall(wire.encode(wire.hello(secret, challenge, nonce, *identity)))
        wire.check_welcome(secret, challenge, nonce, self._receive(wire.Welcome))

    def _receive(self, kind: type[Any]) -> Any:
        return self._receive_all(kind)[0]

    def _receive_all(self, kind: type[Any]) -> tuple[Any, bytes]:
        """Return a message and its body."""
        greeting = kind in (wire.Challenge, wire.Welcome)
        body, header = wire.PREFIX.unpack(self._exactly(wire.PREFIX.size))
        wire.check_lengths(body, header, greeting)
        data = self._exactly(header + body)
        message = wire.decode(data[:header], greeting)
        if not isinstance(message, kind):
            raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message, data[header:]

    def exchange(self, message: wire.Message, kind: type[Any]) -> tuple[Any, bytes]:
        """Send a message and wait for its answer: a message of this kind, and its body."""
        self._socket.sendall(wire.encode(message))
        return self._receive_all(kind)

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            part = self._socket.recv(nbytes - len(data))
            if not part:
                raise HostError("the peer closed the connection: has the flow ended?")
            data += part
        return bytes(data)

    def tell(self, message: wire.Message) -> None:
        """Send a message that has no answer."""
        self._socket.sendall(wire.encode(message))

    def heard(self, kind: type[M]) -> M | None:
        """Return the message of this kind that has arrived, if any, from a peer that sends no other
        kind."""
        try:
            self._socket.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except BlockingIOError:
            return None
        message: M = self._receive(kind)
        return message

    def ask(self, message: wire.Message) -> str:
        """Send a message, wait until the ingress has taken it, and return its answer."""
        self._socket.sendall(wire.encode(message))
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
            self._socket.sendall(wire.encode(wire.PushRows(), body.size))
            self._socket.sendall(body)
            self._unanswered += 1
            if self._unanswered >= UNANSWERED_MAX:
                self._answer()

    def close(self) -> None:
        self._socket.close()
