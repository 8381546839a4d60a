"""Identifiers, each a type of its own."""

from __future__ import annotations

from typing import NewType, Protocol

Epoch = NewType("Epoch", int)
SiteId = NewType("SiteId", int)
"""One life of a site: a site that is launched again gets another."""
StageId = NewType("StageId", int)
ExchangeId = NewType("ExchangeId", int)
GroupId = NewType("GroupId", int)
"""Numbers the partition groups of a stage."""
TaskId = tuple[StageId, GroupId]
"""A partition group of a stage: what a site processes in one call."""

FIRST: TaskId = (StageId(0), GroupId(0))
"""The first partition group of the first source, which the sequencer lives with."""

STORE = SiteId(-1)
"""No site: to it goes what is to outlive all of them."""

NO_EPOCH = Epoch(-1)
"""Before the first epoch, which is 0."""


class Entry(Protocol):
    """What an arbiter has decided (`holdfast.arbiter.Entry`); its value is opaque."""

    @property
    def term(self) -> int: ...

    @property
    def holder(self) -> str: ...

    @property
    def value(self) -> bytes: ...
