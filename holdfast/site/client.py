"""A blocking client of a site's wire, for tasks and threads that push rows into a flow."""

from __future__ import annotations

import os
import socket
from typing import Any

import pyarrow as pa

from holdfast.errors import HostError, ProtocolError
from holdfast.flow.batches import to_ipc
from holdfast.site import wire

UNANSWERED_MAX = 16


class FeedClient:
    """One authenticated connection to the ingress of a fed source."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        try:
            self._socket = socket.create_connection(address, timeout=10)
        except OSError as error:
            raise HostError(
                f"cannot reach the ingress at {address[0]}:{address[1]}: {error}"
            ) from error
        self._unanswered = 0
        self._shake_hands(secret)
        self._socket.settimeout(None)  # an answer comes when there is room, however long it takes

    def _shake_hands(self, secret: bytes) -> None:
        challenge = self._receive(wire.Challenge)
        nonce = os.urandom(16)
        self._socket.sendall(wire.encode(wire.hello(secret, challenge, nonce, "feeder", 0)))
        wire.check_welcome(secret, challenge, nonce, self._receive(wire.Welcome))

    def _receive(self, kind: type[Any]) -> Any:
        body, header = wire.PREFIX.unpack(self._exactly(wire.PREFIX.size))
        message = wire.decode(self._exactly(header + body)[:header])
        if not isinstance(message, kind):
            raise ProtocolError(f"expected {kind.__name__}, got {type(message).__name__}")
        return message

    def _exactly(self, nbytes: int) -> bytes:
        data = bytearray()
        while len(data) < nbytes:
            part = self._socket.recv(nbytes - len(data))
            if not part:
                raise HostError("the ingress closed the connection: has the flow ended?")
            data += part
        return bytes(data)

    def ask(self, message: wire.Message) -> str:
        """Send a message and wait until the ingress has taken it; its remark."""
        self._socket.sendall(wire.encode(message))
        self._unanswered += 1
        while self._unanswered > 1:
            self._answer()
        return self._answer()

    def _answer(self) -> str:
        taken = self._receive(wire.FeedTaken)
        self._unanswered -= 1
        if not taken.ok:
            raise HostError(f"the ingress refused rows: {taken.reason}")
        return str(taken.reason)

    def send_rows(self, batch: pa.RecordBatch) -> None:
        """Send rows; waits only when too many of those before have not been taken yet."""
        body = to_ipc(batch)
        self._socket.sendall(wire.encode(wire.FeedRows(), body.size))
        self._socket.sendall(body)
        self._unanswered += 1
        if self._unanswered >= UNANSWERED_MAX:
            self._answer()

    def close(self) -> None:
        self._socket.close()
