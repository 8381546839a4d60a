"""How messages become bytes.

A message is a fixed prefix (body length and header length, 32 bits each), a header, and a body. The
header is msgpack, decoded against the message classes: a peer can only make one of these, and
nothing is unpickled. The body is Arrow IPC or raw arrays.
"""

from __future__ import annotations

import struct
from typing import Union

import msgspec

from holdfast.errors import FlowError, ProtocolError
from holdfast.net.wire import control, data, handover, push, read
from holdfast.net.wire.base import Message
from holdfast.net.wire.handshake import Challenge, Hello, Refusal, Welcome

PREFIX = struct.Struct("<II")
"""Lengths of the body and of the header, before every message."""
HANDSHAKE_BYTES_MAX = 1 << 10
HEADER_BYTES_MAX = 1 << 25
"""The largest header is a `SequencerCopy`, with all records that the sequencer keeps."""
BODY_BYTES_MAX = 1 << 30
PIECE_BYTES = 1 << 20
"""Approximate size of the pieces in which rows are handed over and written to disk."""

GREETINGS = (Challenge, Hello, Welcome, Refusal)
PROTOCOLS = (control, data, handover, push, read)
"""Importing these modules defines their messages."""
MESSAGES = tuple(m for m in Message.__subclasses__() if m not in GREETINGS)
"""All messages but the handshake's."""

_decoder = msgspec.msgpack.Decoder(type=Union[MESSAGES])  # noqa: UP007
_greetings = msgspec.msgpack.Decoder(type=Challenge | Hello | Welcome | Refusal)
_encoder = msgspec.msgpack.Encoder()


def decode(header: bytes | memoryview, greeting: bool = False) -> Message:
    """Decode a message; with `greeting` one of the handshake's."""
    try:
        return (_greetings if greeting else _decoder).decode(header)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"a header that is no message: {error}") from error


def check_lengths(body: int, header: int, greeting: bool = False) -> None:
    """Refuse a message that is too long."""
    if greeting and (body or header > HANDSHAKE_BYTES_MAX):
        raise ProtocolError("a message before the handshake is too long")
    if header == 0 or header > HEADER_BYTES_MAX or body > BODY_BYTES_MAX:
        raise ProtocolError(f"a message of {header} + {body} bytes")


def encode(message: Message, body_length: int = 0) -> bytes:
    """Return the prefix and the header. Every receiver refuses a message that is too long, so the
    sender does not send it at all."""
    header = _encoder.encode(message)
    if len(header) > HEADER_BYTES_MAX or body_length > BODY_BYTES_MAX:
        raise FlowError(
            f"{type(message).__name__} has {len(header)} + {body_length} bytes, and a message has "
            f"at most {HEADER_BYTES_MAX} + {BODY_BYTES_MAX}",
            hint="are there rows of hundreds of megabytes, or epochs of that size?",
        )
    return PREFIX.pack(body_length, len(header)) + header
