"""What must be known before a flow is planned, and is not in the flow: such as how many partitions
a topic has, and where reading it begins. Whoever starts the flow finds it out, once.

Of several applications each starts the flow, at its own time, and again when it has died. All must
go by what the first has found: it is an entry of the arbiter.
"""

from __future__ import annotations

import copy
import logging
import time
from typing import Any

import msgspec

from holdfast.arbiter import Arbiter, arbiter
from holdfast.control import Place
from holdfast.errors import ArbiterAway, Superseded
from holdfast.flow.graph import Flow, SourceNode
from holdfast.site import wire

log = logging.getLogger("holdfast.settle")

AGAIN_S = 0.2


def settled(flow: Flow, place: Place, secret: bytes, lease_s: float) -> Flow:
    """The flow with `Flow.settled` filled in; the same one if there is nothing to find out."""
    if place.arbiter_url is None:
        values = _find_out(flow)
    else:
        key = f"{flow.name}-{wire.incarnation(secret)}-settled"
        party = arbiter(place.arbiter_url, key, lease_s)
        try:
            values = msgspec.msgpack.decode(_agreed(party, flow, f"application {place.app}"))
        finally:
            party.close()
    if not values:
        return flow
    flow = copy.copy(flow)
    flow.settled = values
    return flow


def _find_out(flow: Flow) -> dict[str, Any]:
    found = {
        node.name: node.source.settle(flow.protection.copies)
        for node in flow.nodes
        if isinstance(node, SourceNode)
    }
    return {name: values for name, values in found.items() if values is not None}


def _agreed(party: Arbiter, flow: Flow, who: str) -> bytes:
    """What the first to ask has found out, waiting for it if need be."""
    while True:
        try:
            entry = party.read()
            if entry.value:
                return entry.value
            led = party.lead(who)
            if led is not None:
                value = led.value or msgspec.msgpack.encode(_find_out(flow))
                party.resign(party.commit(led, value))
                return value
        except (ArbiterAway, Superseded) as error:
            log.warning("flow %r is not settled yet: %s", flow.name, error)
        time.sleep(AGAIN_S)
