"""A blocking client of a site's wire, for tasks and threads that push rows into a flow."""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import pyarrow as pa

from holdfast.errors import HostError, ProtocolError
from holdfast.site import wire

_PREFIX = struct.Struct("<II")


class FeedClient:
    """One authenticated connection to the ingress of a fed source."""

    def __init__(self, address: tuple[str, int], secret: bytes) -> None:
        try:
            self._socket = socket.create_connection(address, timeout=10)
        except OSError as error:
            raise HostError(
                f"cannot reach the ingress at {address[0]}:{address[1]}: {error}"
            ) from error
        self._shake_hands(secret)
        self._socket.settimeout(None)  # an answer comes when there is room, however long it takes

    def _shake_hands(self, secret: bytes) -> None:
        challenge = self._receive(wire.Challenge)
        nonce = os.urandom(16)
        said = wire.proof(secret, "client", challenge.nonce, nonce, "feeder", 0)
        self._socket.sendall(wire.encode(wire.Hello("feeder", 0, nonce, said)))
        welcome = self._receive(wire.Welcome)
        if welcome.proof != wire.proof(secret, "server", nonce, challenge.nonce):
            raise ProtocolError("the ingress does not know the flow's secret")

    def _receive(self, kind: type[Any]) -> Any:
        body, header = _PREFIX.unpack(self._exactly(_PREFIX.size))
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

    def ask(self, message: wire.Message, body: bytes | pa.Buffer = b"") -> str:
        """Send a message and wait until the ingress has taken it; its remark."""
        size = memoryview(body).nbytes
        self._socket.sendall(wire.encode(message, size))
        if size:
            self._socket.sendall(body)
        taken = self._receive(wire.FeedTaken)
        if not taken.ok:
            raise HostError(f"the ingress refused {type(message).__name__}: {taken.reason}")
        return str(taken.reason)

    def send_rows(self, batch: pa.RecordBatch) -> None:
        sink = pa.BufferOutputStream()
        with pa.ipc.new_stream(sink, batch.schema) as writer:
            writer.write_batch(batch)
        self.ask(wire.FeedRows(batch.num_rows), sink.getvalue())

    def close(self) -> None:
        self._socket.close()
