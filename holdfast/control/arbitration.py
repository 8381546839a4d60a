"""What an arbiter answers to what a control asks it."""

from __future__ import annotations

from typing import assert_never

from holdfast.arbiter import Arbiter
from holdfast.control.events import ArbiterAnswer
from holdfast.core.effects import ArbiterAsk, AskCommit, AskLead, AskRead, AskRenew, AskResign
from holdfast.core.events import (
    ArbiterUnreachable,
    CommitRefused,
    Committed,
    EntryRead,
    LeadGranted,
    LeadRefused,
    LeaseLost,
    Renewed,
    Resigned,
)
from holdfast.core.ids import Entry
from holdfast.errors import ArbiterAway, Superseded


def answer(arbiter: Arbiter, holder: str, ask: ArbiterAsk, lease_s: float) -> ArbiterAnswer:
    """It may take its time for that."""
    try:
        match ask:
            case AskLead():
                entry = arbiter.lead(holder, despite=_own(ask.despite) if ask.despite else None)
                return LeadRefused(ask) if entry is None else LeadGranted(ask, entry, lease_s)
            case AskRenew():
                if arbiter.renew(_own(ask.entry)):
                    return Renewed(ask, lease_s)
                return LeaseLost(ask, "its lease has run out")
            case AskRead():
                return EntryRead(ask, arbiter.read())
            case AskResign():
                arbiter.resign(_own(ask.entry))
                return Resigned(ask)
            case AskCommit():
                return Committed(ask, arbiter.commit(_own(ask.entry), ask.value))
            case _:
                assert_never(ask)
    except ArbiterAway as error:
        return ArbiterUnreachable(ask, str(error))
    except Superseded as error:
        assert isinstance(ask, AskCommit)
        return CommitRefused(ask, str(error))


def _own(entry: object) -> Entry:
    assert isinstance(entry, Entry)
    return entry
