"""Identifiers, each a type of its own."""

from __future__ import annotations

from typing import NewType

Epoch = NewType("Epoch", int)
SiteId = NewType("SiteId", int)
StageId = NewType("StageId", int)
ExchangeId = NewType("ExchangeId", int)
Partition = NewType("Partition", int)

NO_EPOCH = Epoch(-1)
"""Before the first epoch, which is 0."""
