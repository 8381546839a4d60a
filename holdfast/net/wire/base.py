"""What all messages have in common: their base class, the bounds of their numbers, and the roles of
those who send them."""

from __future__ import annotations

from typing import Annotated

import msgspec

from holdfast.core.ids import Epoch

NUMBER_MAX = 1 << 48
"""Nothing that is counted gets this far, and sums of it still fit into 64 bits."""
Number = Annotated[int, msgspec.Meta(ge=0, le=NUMBER_MAX)]
NumberOrNone = Annotated[int, msgspec.Meta(ge=-1, le=NUMBER_MAX)]
"""-1 stands for none."""
EpochNumber = Annotated[Epoch, msgspec.Meta(ge=-1, le=NUMBER_MAX)]

SITE = "site"
SERVER = "server"
"""The dialled side, if it is no site: the control of an application. Only it gives orders."""
AGENT = "agent"
"""The control of an application that does not lead, towards the one that does."""
PULSE = "pulse"
"""The thread of a site that reports that the site lives while its event loop is busy."""
PUSHER = "pusher"
"""A Spark task or driver that pushes rows into a source."""
READER = "reader"
"""Reads a sink."""


class Message(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Base of all messages. On the wire: an array of the class's name and the fields."""
