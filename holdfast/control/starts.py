"""Starts of a flow that have ended: which they are, and removal of what they left in the arbiter.

Each start of a flow has entries of its own in the arbiter. The last thing that a start commits says
that it has ended; an application that comes late finds that, and ends. A later start of the same
flow removes such entries. An application that comes later still must not begin the flow again, so
the start is first noted in an entry that all starts of the flow share, with the last `NOTED` of
them. Who finds an empty entry and is granted the lead looks there. Entries of starts that are not
known to have ended stay: their applications may be started again.
"""

from __future__ import annotations

import contextlib
import logging
import re
from collections.abc import Iterator

import msgspec

from holdfast.arbiter import Arbiter, arbiter
from holdfast.control.knowledge import VERSION, Knowledge, decode
from holdfast.errors import HoldfastError, HostError

log = logging.getLogger("holdfast.control")

NOTED = 1000
"""Starts that are known to have ended after their entries were removed."""

ENDED = Knowledge(None, {}, {}, {}, {}, [], False, False, ended=True, version=VERSION).encode()


class FlowStarts:
    """The starts of the flow `flow`, as its start `incarnation` sees them."""

    def __init__(self, url: str, flow: str, incarnation: str, lease_s: float) -> None:
        self._url, self._flow, self._lease_s = url, flow, lease_s
        self.incarnation = incarnation

    def has_ended(self) -> bool:
        """Whether this start has ended, and its entry was removed."""
        with self._party(f"{self._flow}-ended") as index:
            try:
                return self.incarnation in _noted(index.read().value)
            except HostError:
                return False  # another user's: nobody has removed an entry of this one

    def remove_ended(self) -> list[str]:
        """Remove the entries of other starts that have ended. Return their incarnations."""
        with self._party(f"{self._flow}-ended") as index:
            ended = [i for i in self._others(index) if self._left_ended(i)]
            if not ended or not self._note(index, ended):
                return []
        removed = [i for i in ended if self._remove(i)]
        log.info("removed what %d earlier starts of the flow left in the arbiter", len(removed))
        return removed

    def _others(self, index: Arbiter) -> list[str]:
        """All other starts that have an entry."""
        ours = re.compile(re.escape(self._flow) + r"-([0-9a-f]{12})")
        found = [ours.fullmatch(name) for name in index.names()]
        return sorted(f[1] for f in found if f is not None and f[1] != self.incarnation)

    def _left_ended(self, incarnation: str) -> bool:
        with self._party(key_of(self._flow, incarnation)) as party:
            try:
                value = party.read().value
                return bool(value) and decode(value).ended
            except HoldfastError:
                return False  # of another user, or of a later version

    def _note(self, index: Arbiter, ended: list[str]) -> bool:
        entry = index.lead(self.incarnation)
        if entry is None:
            return False  # another start does the same
        noted = [*_noted(entry.value), *ended]
        value = msgspec.msgpack.encode(list(dict.fromkeys(noted))[-NOTED:])
        index.resign(index.commit(entry, value))
        return True

    def _remove(self, incarnation: str) -> bool:
        """Remove the entry that says that the start has ended last, so that a removal that is
        broken off is completed by the next start."""
        key = key_of(self._flow, incarnation)
        with self._party(resolved_key(self._flow, incarnation)) as party:
            party.remove(party.read())
        with self._party(key) as party:
            return party.remove(party.read())

    @contextlib.contextmanager
    def _party(self, key: str) -> Iterator[Arbiter]:
        party = arbiter(self._url, key, self._lease_s)
        try:
            yield party
        finally:
            party.close()


def key_of(flow: str, incarnation: str) -> str:
    """The name of a start's entry. A flow that is started again must not find that of its last
    start."""
    return f"{flow}-{incarnation}"


def resolved_key(flow: str, incarnation: str) -> str:
    """The name of the entry with what a start has looked up: see `holdfast.control.bootstrap`."""
    return f"{key_of(flow, incarnation)}-resolved"


def _noted(value: bytes) -> list[str]:
    return msgspec.msgpack.decode(value, type=list[str]) if value else []
