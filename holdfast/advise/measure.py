"""Measures a flow in a dry run without side effects.

The flow runs without protection on plain processes of this machine. Its sinks are replaced by sinks
that count and discard rows, and its sources do not record how far they were read
(`Source.dry_run`).
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from holdfast.advise.facts import FlowFacts, Sample, between
from holdfast.api.graph import Flow
from holdfast.api.nodes import KeyedNode, SinkNode, SourceNode
from holdfast.api.options import Options
from holdfast.api.protection import none, rollback
from holdfast.connectors.sinks import discard
from holdfast.control.run import Run
from holdfast.errors import FlowError
from holdfast.plan.planner import plan

STATUS_MS = 100
"""Interval of the sites' status reports, which limits the precision of rates."""
WARM_UP_S = 1.0
DRAIN_S = 10.0
SAMPLE_S = 0.25
FIRST_ROW_S = 30.0
"""Maximum time until the first row: Spark may have to start a query first."""


@contextmanager
def dry_run(flow: Flow) -> Iterator[Flow]:
    """Yield the flow without protection, with sources and sinks that have no side effects; restore
    it afterwards."""
    before = [(node, dict(node.__dict__)) for node in flow.nodes]
    protection, flow.protection = flow.protection, none()
    losses, flow.losses = flow.losses, 0
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
        flow.protection, flow.losses = protection, losses
        for node, attributes in before:
            node.__dict__.update(attributes)


def measure(flow: Flow, *, sites: int, partitions: int, seconds: float) -> FlowFacts:
    """Measure a dry run of `seconds`, or until the flow's sources end."""
    with dry_run(flow):
        uniform = _is_uniform(flow)
        begun = time.monotonic()
        with flow.start(
            sites=sites, partitions=partitions, options=Options(status_interval=STATUS_MS / 1e3)
        ) as run:
            facts = observe(run, sites, begun, seconds, uniform)
            if not run.ended(0):
                run.stop(timeout=DRAIN_S)
    return facts


def observe(run: Run, sites: int, begun: float, seconds: float, uniform: bool = True) -> FlowFacts:
    """Sample a run from the end of its warm-up until `seconds` after its first row, and return its
    facts. A run that ends before is measured as a whole: most of its rows may have come during the
    warm-up."""
    limit = time.monotonic() + max(seconds, FIRST_ROW_S)
    while not run.status()["rows_in"] and time.monotonic() < limit and not run.ended(SAMPLE_S / 5):
        pass
    until = time.monotonic() + seconds
    run.ended(min(WARM_UP_S, seconds / 4))
    samples = [Sample.of(run)]
    while not run.ended(min(SAMPLE_S, max(0.0, until - time.monotonic()))):
        samples.append(Sample.of(run))
        if time.monotonic() >= until:
            break
    if run.error is not None:
        raise run.error
    if run.ended(0):
        samples[0] = Sample(begun, [], {})
    return between(run.plan, sites, [*samples, Sample.of(run)], uniform)


def _is_uniform(flow: Flow) -> bool:
    """Return whether the planner accepts the flow under `rollback`."""
    flow.protection = rollback(summary_interval=1)
    try:
        plan(flow)
    except FlowError:
        return False
    finally:
        flow.protection = none()
    return True
