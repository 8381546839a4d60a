"""Identifiers, each a type of its own; and the entry of an arbiter, which numbers terms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NewType

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


@dataclass(frozen=True, slots=True)
class Entry:
    """The state of a flow that its arbiter has committed. `version` counts changes, `term` counts
    changes of leader; `value` is opaque to the core."""

    version: int = 0
    term: int = 0
    holder: str = ""
    value: bytes = b""
