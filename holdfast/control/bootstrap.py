"""Looks up what must be known before a flow is planned and is not in the flow.

Examples are the number of partitions of a topic, the offsets at which reading begins, and the
result of the flow's history. It is looked up once. If several applications host the flow, each
starts it at its own time, and again after it has died. All must use what the first one has found,
so that is an entry of the arbiter.
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
from holdfast.control.starts import resolved_key
from holdfast.core.ids import Entry
from holdfast.errors import ArbiterAway, Superseded
from holdfast.plan.planner import losses
from holdfast.storage.restore_point import RestorePoint

log = logging.getLogger("holdfast.bootstrap")

AGAIN_S = 0.2
"""How long to wait before the arbiter is asked again."""


class Before(Protocol):
    """The history that a flow begins with: see `holdfast.spark.history`."""

    def files(self, source: str) -> list[str]:
        """The files that a source's history is read from, if any."""

    def build(self) -> RestorePoint: ...


class Found(msgspec.Struct, frozen=True):
    """What was looked up: values for each source, and the state after the history."""

    sources: dict[str, Any]
    restore_point: RestorePoint | None = None


def resolved(
    flow: Flow, place: Place, incarnation: str, lease_s: float, history: Before | None = None
) -> Flow:
    """The flow with `resolved` and `restore_point` filled in; the same flow if there is nothing to
    look up."""

    def look_up() -> Found:
        return _look_up(flow, history)

    if place.arbiter_url is None:
        found = look_up()
    else:
        key = resolved_key(flow.name, incarnation)
        party = arbiter(place.arbiter_url, key, lease_s)
        try:
            agreed = _agreed(party, look_up, lease_s, f"application {place.app}")
            found = msgspec.msgpack.decode(agreed, type=Found)
        finally:
            party.close()
    if not found.sources and found.restore_point is None:
        return flow
    flow = copy.copy(flow)
    flow.resolved, flow.restore_point = found.sources, found.restore_point
    return flow


def _look_up(flow: Flow, history: Before | None) -> Found:
    found = {}
    replicas = flow.protection.at_the_ends(losses(flow)).replicas
    for node in flow.nodes:
        if isinstance(node, SourceNode):
            known = history.files(node.name) if history else []
            found[node.name] = node.source.resolve(replicas, known)
    sources = {name: values for name, values in found.items() if values is not None}
    return Found(sources, history.build() if history else None)


def _agreed(party: Arbiter, look_up: Callable[[], Found], lease_s: float, who: str) -> bytes:
    """What the first application has found; waits for it if necessary."""
    while True:
        try:
            entry = party.read()
            if entry.value:
                return entry.value
            led = party.lead(who)
            if led is not None:
                value = led.value or _while_leading(party, led, look_up, lease_s)
                party.resign(party.commit(led, value))
                return value
        except (ArbiterAway, Superseded) as error:
            log.warning("%s does not know yet what the flow begins with: %s", who, error)
        time.sleep(AGAIN_S)


def _while_leading(
    party: Arbiter, led: Entry, look_up: Callable[[], Found], lease_s: float
) -> bytes:
    """Look up while renewing the lease, so that no other application does the same."""
    with ThreadPoolExecutor(1, thread_name_prefix="holdfast-bootstrap") as worker:
        found: Future[Found] = worker.submit(look_up)
        while True:
            try:
                return msgspec.msgpack.encode(found.result(lease_s / 5))
            except NotYet:
                party.renew(led)
