"""Leadership by a lease: a time on a clock that all parties share.

Safety does not depend on the lease: every change of the entry is a compare-and-set of its version.
The lease only decides when a contender may try. It is exact nevertheless, because of two orders of
events. A contender reads the clock before it reads the lease. A leader reads the clock again after
it has written the new lease, and counts as renewed only if the old lease was still valid then. A
contender that finds a lease expired has therefore seen every renewal that succeeded.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace

from holdfast.arbiter import Arbiter, following
from holdfast.core.ids import Entry


@dataclass(frozen=True, slots=True)
class VersionRecord:
    """A stored version. `until_ns` is the end of the first lease of its leader."""

    entry: Entry = field(default_factory=Entry)
    until_ns: int = 0


class LeasedArbiter(Arbiter):
    """The rules of leadership, over six primitives that a subclass implements."""

    def __init__(self, flow: str, lease_s: float) -> None:
        super().__init__(flow, lease_s)
        self._lease_ns = round(lease_s * 1e9)

    @abstractmethod
    def _clock_ns(self) -> int: ...

    @abstractmethod
    def _latest(self) -> VersionRecord: ...

    @abstractmethod
    def _append(self, record: VersionRecord) -> bool:
        """Make `record` the latest one, unless its version is or ever was in use."""

    @abstractmethod
    def _until_ns(self, record: VersionRecord) -> int:
        """Return when the lease of the record's term ends, or ended."""

    @abstractmethod
    def _extend(self, term: int, until_ns: int) -> None:
        """Set the lease of `term`. Only the leader of that term calls this."""

    @abstractmethod
    def _remove(self) -> None:
        """Remove all that is stored for the flow."""

    def read(self) -> Entry:
        return self._latest().entry

    def commit(self, expected: Entry, value: bytes) -> Entry:
        record, wanted = self._latest(), following(expected, value)
        if not self._leads(record, expected.term):
            raise self._superseded(expected, record.entry)
        if record.entry == wanted:
            return wanted  # a retry: the first call took effect
        if record.entry.version != expected.version or not self._append(
            replace(record, entry=wanted)
        ):
            raise self._superseded(expected, self._latest().entry)
        return wanted

    def lead(self, holder: str, despite: Entry | None = None) -> Entry | None:
        now = self._clock_ns()
        record = self._latest()
        last = record.entry
        deposed = despite is not None and despite.term == last.term
        if now < self._until_ns(record) and not deposed:
            mine = last.term == self._term and last.holder == holder
            return last if mine and self.renew(last) else None
        entry = Entry(last.version + 1, last.term + 1, holder, last.value)
        if not self._append(VersionRecord(entry, self._clock_ns() + self._lease_ns)):
            return None
        self._term = entry.term
        return entry

    def renew(self, entry: Entry) -> bool:
        now, record = self._clock_ns(), self._latest()
        until = self._until_ns(record)
        if not self._leads(record, entry.term):
            return False
        self._extend(entry.term, now + self._lease_ns)
        if self._clock_ns() < until:
            return True
        self.resign(entry)  # too late: a contender may have read the expired lease
        return False

    def resign(self, entry: Entry) -> None:
        if entry.term == self._term != 0:
            self._extend(entry.term, 0)
            self._term = 0

    def remove(self, entry: Entry) -> bool:
        now, record = self._clock_ns(), self._latest()
        if record.entry != entry or now < self._until_ns(record):
            return False
        self._remove()
        return True

    def _leads(self, record: VersionRecord, term: int) -> bool:
        return term == self._term == record.entry.term and self._clock_ns() < self._until_ns(record)
