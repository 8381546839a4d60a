"""An arbiter in this process, for a flow that lives and dies with one application."""

from __future__ import annotations

import threading
import time

from holdfast.arbiter.leased import LeasedArbiter, Record


class MemoryArbiter(LeasedArbiter):
    """Parties in the same process share a `Store`; by default there is only one."""

    def __init__(self, flow: str, lease_s: float, store: Store | None = None) -> None:
        super().__init__(flow, lease_s)
        self.store = Store() if store is None else store

    def _clock_ns(self) -> int:
        return time.monotonic_ns()

    def _latest(self) -> Record:
        return self.store.record

    def _append(self, record: Record) -> bool:
        with self.store.lock:
            if record.entry.version != self.store.record.entry.version + 1:
                return False
            self.store.record = record
            return True

    def _until_ns(self, record: Record) -> int:
        return self.store.leases.get(record.entry.term, record.until_ns)

    def _extend(self, term: int, until_ns: int) -> None:
        self.store.leases[term] = until_ns


class Store:
    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.record = Record()
        self.leases: dict[int, int] = {}
