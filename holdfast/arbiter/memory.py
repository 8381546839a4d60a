"""An arbiter in this process, for a flow whose lifetime is that of one application."""

from __future__ import annotations

import threading
import time

from holdfast.arbiter.leased import LeasedArbiter, VersionRecord


class MemoryArbiter(LeasedArbiter):
    """Parties in the same process share an `ArbiterMemory`; by default each has its own."""

    def __init__(self, flow: str, lease_s: float, store: ArbiterMemory | None = None) -> None:
        super().__init__(flow, lease_s)
        self.store = ArbiterMemory() if store is None else store

    def _clock_ns(self) -> int:
        return time.monotonic_ns()

    def _latest(self) -> VersionRecord:
        return self.store.record

    def _append(self, record: VersionRecord) -> bool:
        with self.store.lock:
            if record.entry.version != self.store.record.entry.version + 1:
                return False
            self.store.record = record
            return True

    def _until_ns(self, record: VersionRecord) -> int:
        return self.store.leases.get(record.entry.term, record.until_ns)

    def names(self) -> list[str]:
        return [self.flow] if self.store.record.entry.version else []

    def _remove(self) -> None:
        with self.store.lock:
            self.store.record, self.store.leases = VersionRecord(), {}

    def _extend(self, term: int, until_ns: int) -> None:
        self.store.leases = {term: until_ns} | {
            later: until for later, until in self.store.leases.items() if later > term
        }


class ArbiterMemory:
    """The latest record and the leases, shared by the parties of a flow."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.record = VersionRecord()
        self.leases: dict[int, int] = {}
