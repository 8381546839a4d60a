"""The authentication of messages at the level `mac`.

A seal is the first half of an HMAC of the message and its number under a key that only this
direction of this connection has. The number is not sent: a message that was dropped, repeated or
moved does not fit its seal.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterable

from holdfast.errors import ProtocolError

SEAL_BYTES = 16

Buffer = bytes | memoryview


class Sealer:
    """Seals the messages of one direction, in their order, or checks their seals.

    >>> sender, receiver = Sealer(b"key"), Sealer(b"key")
    >>> seal = sender.seal([b"order", b"body"])
    >>> receiver.check([b"orderbody"], seal)
    >>> receiver.check([b"orderbody"], seal)
    Traceback (most recent call last):
    holdfast.errors.ProtocolError: message 1 has a wrong seal: it was changed, repeated or moved
    """

    def __init__(self, key: bytes) -> None:
        self._mac = hmac.new(key, digestmod=hashlib.sha256)
        self._number = 0

    def seal(self, parts: Iterable[Buffer]) -> bytes:
        mac = self._mac.copy()
        mac.update(self._number.to_bytes(8, "little"))
        for part in parts:
            mac.update(part)
        self._number += 1
        return mac.digest()[:SEAL_BYTES]

    def check(self, parts: Iterable[Buffer], seal: Buffer) -> None:
        number = self._number
        if not hmac.compare_digest(self.seal(parts), bytes(seal)):
            raise ProtocolError(
                f"message {number} has a wrong seal: it was changed, repeated or moved"
            )
