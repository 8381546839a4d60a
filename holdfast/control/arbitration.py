"""What an arbiter answers to what a control asks it, and the threads that ask."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import assert_never

from holdfast.arbiter import Arbiter, arbiter, following
from holdfast.control.events import ArbiterAnswer
from holdfast.control.starts import ENDED, FlowStarts, key_of
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
from holdfast.errors import ArbiterAway, HoldfastError, Superseded

log = logging.getLogger("holdfast.control")


class ArbiterClient:
    """The arbiter of a flow. It may take long to answer, so threads ask it.

    Without a URL there is only one application. It leads for ever, and what it decides is
    committed.
    """

    def __init__(self, url: str | None, flow: str, incarnation: str, lease_s: float) -> None:
        def connect() -> Arbiter:
            return arbiter(url, key_of(flow, incarnation), lease_s)

        self._connect = connect
        self.arbiter = connect()
        self.alone = url is None
        self._starts = FlowStarts(url, flow, incarnation, lease_s) if url is not None else None
        self._cleaner: threading.Thread | None = None
        # Threads of its own: a renewal must not wait for sites that are being launched.
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="holdfast-arbiter")

    def answer(self, ask: ArbiterAsk, holder: str) -> ArbiterAnswer:
        """Ask, and wait for the answer."""
        if self.alone and isinstance(ask, AskCommit):
            return Committed(ask, following(_own(ask.entry), ask.value))
        lease_s = float("inf") if self.alone else self.arbiter.lease_s
        if self._starts is not None and isinstance(ask, AskLead):
            return self._answer_to_lead(self._starts, ask, holder)
        return answer(self.arbiter, holder, ask, lease_s)

    def _answer_to_lead(self, starts: FlowStarts, ask: AskLead, holder: str) -> ArbiterAnswer:
        """Who is granted an empty entry begins the flow, unless a later start has removed the entry
        because the flow has ended. Then that is said again, for all who come late."""
        try:
            if self.arbiter.removed and starts.has_ended():
                self.arbiter = self._connect()
            given = answer(self.arbiter, holder, ask, self.arbiter.lease_s)
            if not isinstance(given, LeadGranted) or given.entry.value:
                return given
            if starts.has_ended():
                self.arbiter.resign(self.arbiter.commit(_own(given.entry), ENDED))
                return LeadRefused(ask)
        except ArbiterAway as error:
            return ArbiterUnreachable(ask, str(error))
        except Superseded:
            return LeadRefused(ask)
        if self._cleaner is None:
            self._cleaner = threading.Thread(target=_clean, args=(starts,), daemon=True)
            self._cleaner.start()
        return given

    async def answer_in_thread(self, ask: ArbiterAsk, holder: str) -> ArbiterAnswer:
        """Ask without blocking the event loop."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self.answer, ask, holder)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self.arbiter.close()


def answer(arbiter: Arbiter, holder: str, ask: ArbiterAsk, lease_s: float) -> ArbiterAnswer:
    """Ask an arbiter, and wait for the answer."""
    try:
        match ask:
            case AskLead():
                entry = arbiter.lead(holder, despite=_own(ask.despite) if ask.despite else None)
                return LeadRefused(ask) if entry is None else LeadGranted(ask, entry, lease_s)
            case AskRenew():
                if arbiter.renew(_own(ask.entry)):
                    return Renewed(ask, lease_s)
                return LeaseLost(ask, "its lease has expired")
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


def _clean(starts: FlowStarts) -> None:
    try:
        starts.remove_ended()
    except HoldfastError as error:
        log.warning("what earlier starts of the flow left in the arbiter stays: %s", error)


def _own(entry: object) -> Entry:
    assert isinstance(entry, Entry)
    return entry
