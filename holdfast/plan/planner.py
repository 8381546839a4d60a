"""From a graph to stages: the flow is cut at every change of key.

Stateless steps join the stage that makes their input. A union is nothing but several exchanges
into the same consumer. Columns that no stage reads are dropped before they travel. The plan is a
function of the flow alone, so every site, the controller and the batch job work out the same one.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Literal

import pyarrow as pa

from holdfast.api.graph import Flow
from holdfast.api.nodes import (
    DEAD_LETTER,
    DeadLetterNode,
    FlowNode,
    KeyedNode,
    Merge,
    SinkNode,
    SourceNode,
    StepNode,
    UnionNode,
    topological,
)
from holdfast.api.protection import none
from holdfast.api.streams import Stream
from holdfast.connectors.sinks import Sink
from holdfast.connectors.sources import Source
from holdfast.core.ids import ExchangeId, StageId
from holdfast.core.layout import Shape, StageShape
from holdfast.core.protection import ProtectionSpec
from holdfast.engine.batches import with_order
from holdfast.engine.operators.base import KeyedOperator, Port
from holdfast.engine.steps import Branch, Step
from holdfast.errors import FlowError
from holdfast.storage.restore_point import RestorePoint

DEAD = "dead"
"""The register of the rows that a stage diverts."""


@dataclass(eq=False)
class PlannedStep:
    """A step of a stage: reads one register, writes another, and keeps only the columns in use."""

    step: Step
    source: str
    target: str
    columns: list[str] = field(default_factory=list)


@dataclass(eq=False)
class Exchange:
    """What connects two stages: a register of the producer to an input of the consumer."""

    id: int
    producer: int
    register: str
    consumer: int
    input: int
    keys: list[str] | None
    """None: everything goes to the consumer's only partition (a sink)."""
    schema: pa.Schema = None
    """User columns in use, then the order key."""


@dataclass(eq=False)
class Stage:
    """A head (a source, a keyed operator or a sink) and the stateless steps behind it."""

    id: int
    name: str
    kind: Literal["source", "keyed", "sink"]
    ports: dict[str, Port]
    source: Source | None = None
    operator: KeyedOperator | None = None
    sink: Sink | None = None
    merge: Merge = "ordered"
    protection: ProtectionSpec | None = None
    steps: list[PlannedStep] = field(default_factory=list)
    inputs: list[Exchange] = field(default_factory=list)
    outputs: list[Exchange] = field(default_factory=list)
    used: dict[str, list[str]] = field(default_factory=dict)
    """Per register of the head: the columns that are read."""

    @property
    def event_time(self) -> str | None:
        return self.ports["out"].event_time if self.kind == "source" else None


@dataclass(eq=False)
class Plan:
    flow: str
    on_error: str
    stages: list[Stage]
    exchanges: list[Exchange]
    boundaries: list[tuple[int, int]]
    """(period, offset) of every set of watermarks at which some operator does something."""
    restore_point: RestorePoint | None = None
    """What the flow begins with, if not with nothing."""

    def stage_named(self, name: str) -> Stage:
        return next(s for s in self.stages if s.name == name)

    @property
    def sources(self) -> list[Stage]:
        return [s for s in self.stages if s.kind == "source"]

    @property
    def splits(self) -> list[tuple[StageId, int]]:
        """All splits of all sources, as the sequencer knows them."""
        return [(StageId(s.id), n) for s in self.stages if s.source for n in range(s.source.splits)]

    @property
    def timed_splits(self) -> list[tuple[StageId, int]]:
        """Those whose rows move the watermark."""
        timed = {s.id for s in self.sources if s.event_time is not None}
        return [key for key in self.splits if key[0] in timed]

    @property
    def sinks(self) -> list[Stage]:
        return [s for s in self.stages if s.kind == "sink"]


def shape(plan: Plan, partitions: int) -> Shape:
    """The plan as the core sees it: numbers only."""
    stages = []
    levels = _levels(plan)
    for stage in plan.stages:
        protection = stage.protection or none()
        count = partitions if stage.kind == "keyed" else 1
        if stage.source is not None:
            count = stage.source.splits
        stages.append(
            StageShape(
                StageId(stage.id),
                stage.name,
                stage.kind,
                count,
                tuple(ExchangeId(e.id) for e in stage.inputs),
                tuple(ExchangeId(e.id) for e in stage.outputs),
                stage.merge == "ordered",
                protection.resolved(levels[stage.id], _has_followers(stage)),
            )
        )
    wanted = {(s.protection or none()).granularity for s in plan.stages}
    if len(wanted) > 1:
        raise FlowError(
            f"flow {plan.flow!r}: all stages must be protected by {' or by '.join(sorted(wanted))} "
            "pairs, not some by each"
        )
    return Shape(
        tuple(stages),
        tuple(StageId(e.producer) for e in plan.exchanges),
        tuple(StageId(e.consumer) for e in plan.exchanges),
        wanted.pop(),
    )


def _has_followers(stage: Stage) -> bool:
    """Whether a replica can follow the one that leads without doing what it does: a source that can
    be read again, or a sink that knows by itself what it has."""
    if stage.protection is None or not stage.protection.followers:
        return False
    if stage.source is not None:
        return not stage.source.pushed
    return not (stage.sink is None or stage.sink.replicated or stage.sink.unread_bytes_max)


def protected_otherwise(
    flow: Flow, stage: str, protection: ProtectionSpec, partitions: int
) -> tuple[KeyedNode, tuple[ProtectionSpec, ...]]:
    """The node behind a stage of `flow`; and how all stages are protected if this one is so."""
    planner = _Planner(flow)
    planned = planner.plan()
    known = {s.name: s.kind for s in planned.stages}
    if known.get(stage) != "keyed":
        keyed = ", ".join(repr(name) for name, kind in known.items() if kind == "keyed")
        raise FlowError(
            f"flow {flow.name!r} has no keyed stage {stage!r}",
            hint=f"it has {keyed}; sources and sinks stay as they are" if keyed else None,
        )
    node = planner.keyed_nodes()[stage]
    if {protection.granularity, shape(planned, partitions).granularity} != {"partition"}:
        raise FlowError(f"stage {stage!r}: only partition pairs can be changed while a flow runs")
    before, node.protection = node.protection, protection
    try:
        return node, shape(plan(flow), partitions).guards
    finally:
        node.protection = before


def _walk(stages: Iterable[Stage]) -> str:
    return " → ".join(repr(stage.name) for stage in stages)


def _levels(plan: Plan) -> dict[int, int]:
    """By stage: how many stages in a row, from it on, are rebuilt if they are lost together."""
    found: dict[int, int] = {}

    def level(stage: Stage) -> int:
        if stage.id not in found:
            after = [level(plan.stages[e.consumer]) for e in stage.outputs]
            found[stage.id] = min(
                (stage.protection or none()).rebuild_level, 1 + max(after, default=0)
            )
        return found[stage.id]

    return {stage.id: level(stage) for stage in plan.stages}


def nodes_by_stage(flow: Flow) -> dict[str, KeyedNode]:
    """What is behind each keyed stage."""
    planner = _Planner(flow)
    planner.plan()
    return planner.keyed_nodes()


def losses(flow: Flow) -> int:
    """How many losses at once sources, sinks and sequencer must survive: as many as the flow is to
    survive, or as any of its stages does."""
    keyed = [n.protection for n in flow.nodes if isinstance(n, KeyedNode) and n.protection]
    return max([flow.losses, flow.protection.losses, *(p.losses for p in keyed)])


def plan(flow: Flow) -> Plan:
    """Cut `flow` into stages, or say why it cannot run."""
    return _Planner(flow).plan()


class _Planner:
    def __init__(self, flow: Flow) -> None:
        self.flow = flow
        self.stages: list[Stage] = []
        self.exchanges: list[Exchange] = []
        self._stage_of: dict[int, Stage] = {}
        self._places: dict[tuple[int, str], list[tuple[Stage, str, Port]]] = {}
        self._losses = losses(flow)

    def keyed_nodes(self) -> dict[str, KeyedNode]:
        """By the names of their stages, once these have been planned."""
        nodes = [n for n in self.flow.nodes if isinstance(n, KeyedNode)]
        return {self._stage_of[id(n)].name: n for n in nodes}

    def plan(self) -> Plan:
        nodes = topological(self.flow.nodes, self.flow.name)
        self._refuse_pointless(nodes)
        self._refuse_weak(self.flow.protection, "sources and sinks")
        # Sources first, in the order in which they were written: it is part of the row order.
        for node in self.flow.nodes:
            if isinstance(node, SourceNode):
                self._add_stage(node, "source", {"out": node.port}, source=self._resolved(node))
        for node in nodes:
            if isinstance(node, KeyedNode):
                self._add_keyed(node)
        for node in nodes:
            if isinstance(node, SinkNode):
                stage = self._add_stage(node, "sink", {}, sink=node.sink)
                self._connect(node.inputs[0], stage, 0, None)
        self._prune()
        if any((s.protection or none()).name == "rollback" for s in self.stages):
            self._refuse_uneven()
        boundaries = {b for s in self.stages if s.operator for b in s.operator.boundaries}
        if boundaries:
            self._refuse_mixed_times()
        return Plan(
            self.flow.name,
            self.flow.on_error,
            self.stages,
            self.exchanges,
            sorted(boundaries),
            self.flow.restore_point,
        )

    def _refuse_mixed_times(self) -> None:
        """There is one watermark, so event times must be comparable as numbers."""
        units: dict[str, Stage] = {}
        for stage in self.stages:
            if stage.event_time is not None:
                assert stage.source is not None
                kind = stage.source.schema.field(stage.event_time).type
                units.setdefault(kind.unit if pa.types.is_timestamp(kind) else "", stage)
        if len(units) > 1:
            kinds = [
                f"{s.name!r}: {s.ports['out'].schema.field(s.event_time).type}"
                for s in units.values()
            ]
            raise FlowError(
                f"flow {self.flow.name!r}: the event times of its sources differ in type: "
                f"{', '.join(kinds)}",
                hint="convert them to one type before they come here",
            )

    def _refuse_weak(self, wanted: ProtectionSpec, what: str) -> None:
        """Refuse a protection that does not survive as many losses as the flow is to survive."""
        count = self.flow.losses
        if not wanted.bears(count):
            raise FlowError(
                f"flow {self.flow.name!r} is to survive {count} losses at once, and {what} "
                f"protected by {wanted.name}() survive only {wanted.losses}",
                hint=f"write pairs(replicas={count + 1}), active(replicas={count + 1}), "
                f"passive(standbys={count}), or upstream()",
            )

    def _resolved(self, node: SourceNode) -> Source:
        values = self.flow.resolved.get(node.name)
        return node.source if values is None else node.source.resolved(values)

    def _refuse_uneven(self) -> None:
        """Refuse a flow under rollback with paths of different lengths between two stages: a marker
        would come back at different times."""
        for first in self.stages:
            walks: dict[int, list[Stage]] = {first.id: [first]}
            waiting = [first]
            while waiting:
                stage = waiting.pop(0)
                for after in dict.fromkeys(e.consumer for e in stage.outputs):
                    walk = [*walks[stage.id], self.stages[after]]
                    known = walks.setdefault(after, walk)
                    if len(known) != len(walk):
                        raise FlowError(
                            f"flow {self.flow.name!r}: rollback() needs all ways between two "
                            f"stages to be equally long: {_walk(known)}; {_walk(walk)}",
                            hint="protect it with upstream(), which does not mind",
                        )
                    if known is walk:
                        waiting.append(self.stages[after])

    def _refuse_pointless(self, nodes: list[FlowNode]) -> None:
        name = self.flow.name
        if not any(isinstance(n, SourceNode) for n in nodes):
            raise FlowError(f"flow {name!r} has no source", hint="start with flow.source(...)")
        if not any(isinstance(n, SinkNode) for n in nodes):
            raise FlowError(f"flow {name!r} has no sink", hint="end a stream with .sink(name, ...)")
        used = {id(s.node) for n in nodes for s in n.inputs}
        for node in nodes:
            if id(node) not in used and not isinstance(node, SinkNode):
                raise FlowError(
                    f"flow {name!r}: the result of {node.name!r} goes nowhere",
                    hint="give it a sink or take it out",
                )
        dead = any(isinstance(n, DeadLetterNode) for n in nodes)
        if self.flow.on_error == "dead-letter" and not dead:
            raise FlowError(
                f"flow {name!r} puts bad rows aside but nothing takes them",
                hint='write flow.dead_letters().sink("dead", ...)',
            )

    def _add_stage(
        self,
        node: FlowNode,
        kind: Literal["source", "keyed", "sink"],
        ports: dict[str, Port],
        *,
        source: Source | None = None,
        operator: KeyedOperator | None = None,
        sink: Sink | None = None,
    ) -> Stage:
        taken = {s.name for s in self.stages}
        name, n = node.name, 2
        while name in taken:
            name, n = f"{node.name} #{n}", n + 1
        stage = Stage(
            len(self.stages), name, kind, ports, source=source, operator=operator, sink=sink
        )
        stage.protection = self.flow.protection.at_the_ends(self._losses)
        self.stages.append(stage)
        self._stage_of[id(node)] = stage
        return stage

    def _add_keyed(self, node: KeyedNode) -> None:
        stage = self._add_stage(node, "keyed", node.operator.outputs, operator=node.operator)
        stage.merge = node.merge
        stage.protection = self._protection_of(node, stage)
        if stage.merge == "arrival" and stage.protection.name != "none":
            raise FlowError(
                f"stage {stage.name!r} merges in the order of arrival, which its replicas would "
                "not "
                f"see alike: {stage.protection.name} needs ordered merging",
                hint='leave out merge="arrival", or protect the stage with none()',
            )
        for position, stream in enumerate(node.inputs):
            self._connect(stream, stage, position, node.operator.keys)

    def _protection_of(self, node: KeyedNode, stage: Stage) -> ProtectionSpec:
        wanted = node.protection or self.flow.protection
        self._refuse_weak(wanted, f"stage {stage.name!r}")
        found = wanted if node.operator.bounded else wanted.of_unbounded(self.flow.losses)
        if found is None:
            raise FlowError(
                f"stage {stage.name!r}: what a {node.operator.label} knows of a key comes from all "
                "rows that the key ever had, so all of its input would have to be kept",
                hint=f"write {wanted.name}(summary_interval=1), so that a summary of them is; or "
                "protect it with pairs(), or use an event-time window or a time-out",
            )
        return found

    def _connect(
        self, stream: Stream, consumer: Stage, position: int, keys: list[str] | None
    ) -> None:
        for producer, register, _ in self._place(stream):
            exchange = Exchange(
                len(self.exchanges), producer.id, register, consumer.id, position, keys
            )
            self.exchanges.append(exchange)
            producer.outputs.append(exchange)
            consumer.inputs.append(exchange)

    def _place(self, stream: Stream) -> list[tuple[Stage, str, Port]]:
        """The stages and registers in which the rows of a stream come to be."""
        key = (id(stream.node), stream.out)
        if key not in self._places:
            self._places[key] = self._find_places(stream)
        return self._places[key]

    def _find_places(self, stream: Stream) -> list[tuple[Stage, str, Port]]:
        node = stream.node
        match node:
            case SourceNode() | KeyedNode():
                return [(self._stage_of[id(node)], stream.out, stream.port)]
            case StepNode():
                return [
                    self._append(stage, register, node.step)
                    for stage, register, _ in self._place(node.inputs[0])
                ]
            case UnionNode():
                return self._place_union(node)
            case DeadLetterNode():
                return [(s, DEAD, node.port) for s in self.stages if s.kind != "sink"]
        raise FlowError(f"flow {self.flow.name!r}: {node.name!r} has no output")

    def _place_union(self, node: UnionNode) -> list[tuple[Stage, str, Port]]:
        places = []
        for branch, stream in enumerate(node.inputs):
            tag = None if node.disjoint else branch
            for stage, register, port in self._place(stream):
                if port.width == node.port.width and tag is None:
                    places.append((stage, register, port))
                else:
                    places.append(self._append(stage, register, Branch(port, node.port.width, tag)))
        return places

    def _append(self, stage: Stage, register: str, step: Step) -> tuple[Stage, str, Port]:
        target = f"r{len(stage.steps)}"
        stage.steps.append(PlannedStep(step, register, target))
        return stage, target, step.port

    def _prune(self) -> None:
        """Work back from the sinks which columns of which register anyone reads."""
        for stage in self._consumers_first():
            wanted: dict[str, set[str]] = {}
            for exchange in stage.outputs:
                need = self._needed_by_consumer(exchange, stage)
                wanted.setdefault(exchange.register, set()).update(need)
            for planned in reversed(stage.steps):
                need = wanted.setdefault(planned.target, set())
                planned.columns = [n for n in planned.step.port.schema.names if n in need]
                wanted.setdefault(planned.source, set()).update(planned.step.needs(need))
            for name, port in stage.ports.items():
                stage.used[name] = [n for n in port.schema.names if n in wanted.get(name, set())]
            if stage.event_time is not None and stage.event_time not in stage.used["out"]:
                stage.used["out"].append(stage.event_time)  # ingress computes the watermark from it
            for exchange in stage.outputs:
                self._set_schema(exchange, stage, wanted[exchange.register])

    def _consumers_first(self) -> list[Stage]:
        """Each stage after all of its consumers."""
        order: list[Stage] = []
        seen: set[int] = set()

        def visit(stage: Stage) -> None:
            if stage.id in seen:
                return
            seen.add(stage.id)
            for exchange in stage.outputs:
                visit(self.stages[exchange.consumer])
            order.append(stage)

        for stage in self.stages:
            visit(stage)
        return order

    def _needed_by_consumer(self, exchange: Exchange, producer: Stage) -> set[str]:
        consumer = self.stages[exchange.consumer]
        port = self._port(producer, exchange.register)
        if consumer.operator is None:
            return set(port.schema.names)
        used = {e.register for e in consumer.outputs} | {s.source for s in consumer.steps}
        return consumer.operator.needed(exchange.input, used)

    def _set_schema(self, exchange: Exchange, stage: Stage, wanted: set[str]) -> None:
        port = self._port(stage, exchange.register)
        need = self._needed_by_consumer(exchange, stage)
        fields = [f for f in port.schema if f.name in need]
        exchange.schema = with_order(pa.schema(fields), port.width)

    @staticmethod
    def _port(stage: Stage, register: str) -> Port:
        if register == DEAD:
            return Port(DEAD_LETTER, 3)
        if register in stage.ports:
            return stage.ports[register]
        return next(s.step.port for s in stage.steps if s.target == register)
