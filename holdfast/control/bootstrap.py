"""What must be known before a flow is planned, and is not in the flow: such as how many partitions
a topic has, where reading it begins, and what its history comes to. Whoever starts the flow finds
it out, once.

Of several applications each starts the flow, at its own time, and again when it has died. All must
go by what the first has found: it is an entry of the arbiter.
"""

from __future__ import annotations

import copy
import logging
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotYet
from typing import Any, Protocol

import msgspec

from holdfast.api.graph import Flow
from holdfast.api.nodes import SourceNode
from holdfast.arbiter import Arbiter, arbiter
from holdfast.control.hosting import Place
from holdfast.core.ids import Entry
from holdfast.errors import ArbiterAway, Superseded
from holdfast.net import wire
from holdfast.storage.restore_point import RestorePoint

log = logging.getLogger("holdfast.bootstrap")

AGAIN_S = 0.2


class Before(Protocol):
    """What was before the flow: see `holdfast.spark.history`."""

    def files(self, source: str) -> list[str]:
        """What a source's history is read from, if that is files."""

    def build(self) -> RestorePoint: ...


class Found(msgspec.Struct, frozen=True):
    sources: dict[str, Any]
    restore_point: RestorePoint | None = None


def resolved(
    flow: Flow, place: Place, secret: bytes, lease_s: float, history: Before | None = None
) -> Flow:
    """The flow with `resolved` and `restore_point` filled in; itself if there is nothing to find
    out."""

    def find_out() -> Found:
        return _find_out(flow, history)

    if place.arbiter_url is None:
        found = find_out()
    else:
        key = f"{flow.name}-{wire.incarnation(secret)}-resolved"
        party = arbiter(place.arbiter_url, key, lease_s)
        try:
            agreed = _agreed(party, find_out, lease_s, f"application {place.app}")
            found = msgspec.msgpack.decode(agreed, type=Found)
        finally:
            party.close()
    if not found.sources and found.restore_point is None:
        return flow
    flow = copy.copy(flow)
    flow.resolved, flow.restore_point = found.sources, found.restore_point
    return flow


def _find_out(flow: Flow, history: Before | None) -> Found:
    found = {}
    for node in flow.nodes:
        if isinstance(node, SourceNode):
            known = history.files(node.name) if history else []
            found[node.name] = node.source.resolve(flow.protection.at_the_ends.replicas, known)
    sources = {name: values for name, values in found.items() if values is not None}
    return Found(sources, history.build() if history else None)


def _agreed(party: Arbiter, find_out: Callable[[], Found], lease_s: float, who: str) -> bytes:
    """What the first to ask has found out, waiting for it if need be."""
    while True:
        try:
            entry = party.read()
            if entry.value:
                return entry.value
            led = party.lead(who)
            if led is not None:
                value = led.value or _while_leading(party, led, find_out, lease_s)
                party.resign(party.commit(led, value))
                return value
        except (ArbiterAway, Superseded) as error:
            log.warning("%s does not know yet what the flow begins with: %s", who, error)
        time.sleep(AGAIN_S)


def _while_leading(
    party: Arbiter, led: Entry, find_out: Callable[[], Found], lease_s: float
) -> bytes:
    """It may take a while, during which nobody else is to do the same."""
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-bootstrap") as worker:
        found: Future[Found] = worker.submit(find_out)
        while True:
            try:
                return msgspec.msgpack.encode(found.result(lease_s / 5))
            except NotYet:
                party.renew(led)
