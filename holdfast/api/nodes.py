"""The graph that a flow is: its nodes, and questions about what a stream descends from."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import pyarrow as pa

from holdfast.api.protection import Protection
from holdfast.connectors.sinks import Sink
from holdfast.connectors.sources import Source
from holdfast.engine.operators.base import KeyedOperator, Port
from holdfast.engine.steps import Step
from holdfast.errors import FlowError

if TYPE_CHECKING:
    from holdfast.api.streams import Stream

Merge = Literal["ordered", "arrival"]
DEAD_LETTER = pa.schema([(n, pa.string()) for n in ("stage", "operator", "error", "row")])


@dataclass(eq=False)
class FlowNode:
    """One vertex of the graph. Its inputs are streams of nodes made before it."""

    name: str
    inputs: list[Stream] = field(default_factory=list)


@dataclass(eq=False)
class SourceNode(FlowNode):
    source: Source = None  # type: ignore[assignment]
    port: Port = None  # type: ignore[assignment]


@dataclass(eq=False)
class StepNode(FlowNode):
    step: Step = None  # type: ignore[assignment]


@dataclass(eq=False)
class UnionNode(FlowNode):
    port: Port = None  # type: ignore[assignment]
    disjoint: bool = True


@dataclass(eq=False)
class KeyedNode(FlowNode):
    operator: KeyedOperator = None  # type: ignore[assignment]
    merge: Merge = "ordered"
    protection: Protection | None = None


@dataclass(eq=False)
class DeadLetterNode(FlowNode):
    port: Port = field(default_factory=lambda: Port(DEAD_LETTER, 3))


@dataclass(eq=False)
class SinkNode(FlowNode):
    sink: Sink = None  # type: ignore[assignment]


NAMED = {SourceNode: "source", KeyedNode: "stage", SinkNode: "sink"}


def ancestors(stream: Stream) -> dict[int, FlowNode]:
    """All nodes that a stream descends from, by their identity."""
    found: dict[int, FlowNode] = {}
    todo: list[FlowNode] = [stream.node]
    while todo:
        node = todo.pop()
        if id(node) not in found:
            found[id(node)] = node
            todo += [s.node for s in node.inputs]
    return found


def disjoint(streams: Sequence[Stream]) -> bool:
    """Whether no two of these streams can have rows of the same place in the input order.

    So it is when they descend from different sources. But the results of event-time windows, and
    dead letters, may stand at a row of any source.
    """
    seen: set[int] = set()
    for stream in streams:
        nodes = ancestors(stream)
        for node in nodes.values():
            anywhere = isinstance(node, DeadLetterNode) or (
                isinstance(node, KeyedNode) and node.operator.clocked
            )
            if anywhere and len(streams) > 1:
                return False
        origins = {i for i, node in nodes.items() if isinstance(node, SourceNode)}
        if seen & origins:
            return False
        seen |= origins
    return True


def descends_from_dead_letters(stream: Stream) -> bool:
    return any(isinstance(n, DeadLetterNode) for n in ancestors(stream).values())


def topological(nodes: Sequence[FlowNode], flow: str) -> list[FlowNode]:
    """The nodes with inputs before consumers, or a `FlowError` that shows the cycle."""
    done: dict[int, FlowNode] = {}
    path: list[FlowNode] = []

    def visit(node: FlowNode) -> None:
        if id(node) in done:
            return
        if any(n is node for n in path):
            at = next(i for i, n in enumerate(path) if n is node)
            names = " -> ".join(n.name for n in [*path[at:], node][::-1])
            raise FlowError(f"flow {flow!r} has a cycle: {names}")
        path.append(node)
        for stream in node.inputs:
            visit(stream.node)
        path.pop()
        done[id(node)] = node

    for node in nodes:
        visit(node)
    return list(done.values())
