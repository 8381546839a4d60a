"""Identifiers, each a type of its own."""

from __future__ import annotations

from typing import NewType

Epoch = NewType("Epoch", int)
SiteId = NewType("SiteId", int)
"""One life of a site: a site that is launched again gets another."""
StageId = NewType("StageId", int)
ExchangeId = NewType("ExchangeId", int)
CohortId = NewType("CohortId", int)
"""Numbers the cohorts of a stage."""
Unit = tuple[StageId, CohortId]
"""A cohort of a stage: what a site processes in one call."""

FIRST: Unit = (StageId(0), CohortId(0))
"""The first cohort of the first source, which the sequencer lives with."""

STORE = SiteId(-1)
"""No site: to it goes what is to outlive all of them."""

NO_EPOCH = Epoch(-1)
"""Before the first epoch, which is 0."""
