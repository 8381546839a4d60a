"""Try a flow for a while, to see what it does, without anybody noticing.

It runs unprotected on plain processes of this machine. Its sinks are replaced by ones that count
rows and keep none, and its sources leave no mark of how far they were read (`Source.dry_run`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.advise.facts import FlowFacts, Look, between
from holdfast.api.graph import Flow
from holdfast.api.nodes import KeyedNode, SinkNode, SourceNode
from holdfast.api.options import Options
from holdfast.api.protection import none, rollback
from holdfast.connectors.sinks import discard
from holdfast.control.run import Run
from holdfast.errors import FlowError
from holdfast.plan.planner import plan

STATUS_MS = 100
"""Sites tell how they are so often: rates are as exact as that."""
WARM_UP_S = 1.0
DRAIN_S = 10.0
LOOK_S = 0.25
FIRST_ROW_S = 30.0
"""So long a source may take to begin, such as a query that Spark has to start first."""


@contextmanager
def dry_run(flow: Flow) -> Iterator[Flow]:
    """The flow without protection and with harmless ends; afterwards it is as it was."""
    kept = [(node, dict(node.__dict__)) for node in flow.nodes]
    protection, flow.protection = flow.protection, none()
    try:
        for node in flow.nodes:
            if isinstance(node, SourceNode):
                node.source = node.source.dry_run()
            elif isinstance(node, KeyedNode):
                node.protection = None
            elif isinstance(node, SinkNode):
                node.sink = discard()
        yield flow
    finally:
        flow.protection = protection
        for node, before in kept:
            node.__dict__.update(before)


def measure(flow: Flow, *, sites: int, partitions: int, seconds: float) -> FlowFacts:
    """Run it for so long, or until its sources end."""
    with dry_run(flow):
        uniform = _is_uniform(flow)
        begun = time.monotonic()
        with flow.start(
            sites=sites, partitions=partitions, options=Options(status_interval=STATUS_MS / 1e3)
        ) as run:
            facts = watched(run, sites, begun, seconds, uniform)
            if not run.ended(0):
                run.stop(timeout=DRAIN_S)
    return facts


def watched(run: Run, sites: int, begun: float, seconds: float, uniform: bool = True) -> FlowFacts:
    """Look at a run from when it has warmed up to its end, or so long after its first row."""
    silent = time.monotonic() + max(seconds, FIRST_ROW_S)
    while not run.status()["rows_in"] and time.monotonic() < silent and not run.ended(LOOK_S / 5):
        pass
    until = time.monotonic() + seconds
    ended = run.ended(min(WARM_UP_S, seconds / 4))
    looks = [Look(begun, [], {}) if ended else Look.at_run(run)]
    while not run.ended(min(LOOK_S, max(0.0, until - time.monotonic()))):
        looks.append(Look.at_run(run))
        if time.monotonic() >= until:
            break
    if run.error is not None:
        raise run.error
    return between(run.plan, sites, [*looks, Look.at_run(run)], uniform)


def _is_uniform(flow: Flow) -> bool:
    """Whether `rollback` would take it."""
    flow.protection = rollback(summary_interval=1)
    try:
        plan(flow)
    except FlowError:
        return False
    finally:
        flow.protection = none()
    return True
