"""Where the stages of a flow are, for those that push rows into it or read from its sinks."""

from __future__ import annotations

import pyarrow as pa

from holdfast.control.hosting import Address
from holdfast.core.controller import Controller
from holdfast.core.ids import StageId
from holdfast.engine.batches import user_names
from holdfast.net import wire
from holdfast.plan.planner import Plan


def locate_stage(controller: Controller, stage: int) -> list[Address]:
    """The addresses of a stage with one partition group: its replicas, the leading one first, then
    all other members, which know where it is."""
    assert controller.view is not None
    view, addresses = controller.view, dict(controller.addresses)
    sites = dict.fromkeys([*view.groups[stage][0].replicas, *view.members])
    return [addresses[s] for s in sites if s in addresses]


def locate_sink(plan: Plan, flow: str, controller: Controller, name: str) -> wire.There:
    """The answer to a reader that asks where a sink is."""
    sinks = {stage.name: stage for stage in plan.sinks}
    if name not in sinks:
        return wire.There(f"flow {flow!r} has no sink {name!r}, but {sorted(sinks)}")
    stage = sinks[name]
    schema = stage.inputs[0].schema
    shown = pa.schema([schema.field(n) for n in user_names(schema)])
    addresses = locate_stage(controller, StageId(stage.id))
    return wire.There("", stage.id, shown.serialize().to_pybytes(), tuple(addresses))
