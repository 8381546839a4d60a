"""A site that has no more memory stops the flow and says so, whatever becomes of bad rows."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pyarrow as pa
import pytest

from holdfast import Flow, OutOfMemoryError
from holdfast import functions as F
from holdfast.core.ids import SiteId
from holdfast.engine.memory import is_out_of_memory, limits
from holdfast.errors import ProtocolError
from holdfast.net import bundles, wire
from holdfast.protections import pairs
from holdfast.sinks import discard
from holdfast.site import handover
from holdfast.sources import generator
from tests.support.lonely_site import lonely_site

MORE_BYTES = 96 << 20


def numbers(split: int, offset: int, n: int) -> pa.RecordBatch:
    at = np.arange(offset, offset + n)
    return pa.record_batch({"k": pa.array(at), "v": pa.array(at)})


SCHEMA = numbers(0, 0, 0).schema


def limited(batch: pa.RecordBatch) -> pa.RecordBatch:
    """The first time in a process: from now on it gets only so much memory more."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    if soft == resource.RLIM_INFINITY:
        with open("/proc/self/statm") as file:
            mapped = int(file.read().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (mapped + MORE_BYTES, hard))
    return batch


@pytest.mark.parametrize("protected", [False, True], ids=["one replica", "pairs"])
def test_a_flow_whose_state_does_not_fit_stops_and_blames_no_row(kept, protected: bool) -> None:
    """Not even if bad rows are put aside; and of replicas with the same state none is failed."""
    protect = {"protect": pairs(failure_domain="process")} if protected else {}
    flow = Flow("wide", on_error="dead-letter", **protect)
    source = flow.source("numbers", generator(numbers, SCHEMA, rows=50_000_000))
    wide = source.map(limited, SCHEMA).key_by("k").window(rows=64).agg(m=F.max("v"))
    wide.sink("out", discard())
    flow.dead_letters().sink("aside", discard())
    run = flow.start(sites=2)
    kept.append(run)
    with pytest.raises(OutOfMemoryError) as caught:
        run.wait(120)
    said = str(caught.value)
    assert "flow 'wide', stage 'row window by (k)'" in said and " keys in " in said
    assert "RLIMIT_AS" in said
    assert run.status()["dead"] == {}


# --- wherever it is noticed -----------------------------------------------------------------------


def arrow_error() -> MemoryError:
    return pa.ArrowMemoryError("malloc of size 99 failed")


@contextmanager
def failing(monkeypatch: pytest.MonkeyPatch, owner: object, name: str) -> Iterator[None]:
    def fail(*args: object, **kwargs: object) -> None:
        raise arrow_error()

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail)
        yield


def test_errors_that_mean_there_is_no_memory() -> None:
    from_it = RuntimeError("the timer raised")
    from_it.__cause__ = arrow_error()
    assert is_out_of_memory(from_it) and is_out_of_memory(OSError(12, "Cannot allocate memory"))
    assert is_out_of_memory(np._core._exceptions._ArrayMemoryError((9,), np.dtype(int)))
    assert not is_out_of_memory(OSError(13, "Permission denied"))
    assert not is_out_of_memory(ValueError("MemoryError"))
    assert not is_out_of_memory(None)


def test_the_limit_of_the_process_is_among_the_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda which: (5 << 30, resource.RLIM_INFINITY))
    assert limits()["of the process (RLIMIT_AS)"] == 5 << 30


def test_rows_that_cannot_be_taken_in_are_no_fault_of_the_sender(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Such a connection would be dropped and made again for ever."""
    site, said = lonely_site(), []
    monkeypatch.setattr(site, "tell", said.append)
    monkeypatch.setattr(site, "_kick", lambda: None)

    def receive(connection: object, message: wire.Message, body: memoryview) -> None:
        with failing(monkeypatch, bundles, "from_ipc"):
            bundles.rows_of(memoryview(b"x"))

    monkeypatch.setattr(site, "_receive", receive)
    peer = Peer()
    site._on_message(peer, wire.Beat(), memoryview(b""))  # type: ignore[arg-type]
    assert [(m.kind, peer.aborted) for m in said] == [("OutOfMemoryError", False)]
    assert "site 0: out of memory" in str(said[0].detail["message"])


class Peer:
    id, role, aborted = 1, "site", False

    def abort(self) -> None:
        self.aborted = True


def test_a_connection_that_broke_for_want_of_memory_stops_the_flow(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    site, said = lonely_site(), []
    monkeypatch.setattr(site, "tell", said.append)
    monkeypatch.setattr(site, "_kick", lambda: None)
    site.peers._connections[SiteId(1)] = peer = Peer()  # type: ignore[assignment]
    peer.sent_bytes = 0  # type: ignore[attr-defined]
    site._on_close(peer, MemoryError())  # type: ignore[arg-type]
    assert [m.kind for m in said if isinstance(m, wire.Failed)] == ["OutOfMemoryError"]


def test_state_that_cannot_be_taken_in_is_no_mistake_of_the_donor() -> None:
    with pytest.raises(ProtocolError) as caught, handover._from_a_peer():
        raise arrow_error()
    assert is_out_of_memory(caught.value)
