"""What is asked of the columns that rows have: their names, their types, and which one is the
event time."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pyarrow as pa

from holdfast.api.nodes import SourceNode, ancestors
from holdfast.engine.operators.base import KeyedOperator
from holdfast.engine.types import plain_schema
from holdfast.engine.watermark import REACH_MAX, reach_max
from holdfast.errors import FlowError

if TYPE_CHECKING:
    from holdfast.api.streams import Stream


def declared(schema: pa.Schema, where: str) -> pa.Schema:
    """The columns that rows have from there on: encoded ones are decoded."""
    if not isinstance(schema, pa.Schema):
        raise FlowError(f"{where}: the schema of the result must be a pyarrow.Schema")
    refuse_reserved(schema, where)
    return plain_schema(schema, where)


def refuse_reserved(schema: pa.Schema, where: str) -> None:
    for name in schema.names:
        if name.startswith("__"):
            raise FlowError(f"{where}: the column name {name!r} is reserved (it starts with __)")
        if schema.names.count(name) > 1:
            raise FlowError(f"{where}: there are two columns {name!r}")


def require_time(schema: pa.Schema, name: str, where: str) -> pa.DataType:
    kind = schema.field(name).type
    if not (pa.types.is_int64(kind) or pa.types.is_timestamp(kind)):
        raise FlowError(f"{where}: an event time is int64 or timestamp, but {name!r} is {kind}")
    return kind


def event_time_of(stream: Stream, where: str, hint: str = "") -> str:
    """The column that says when each row of `stream` happened."""
    require_timed_sources(stream, where)
    if stream.port.event_time is None:
        node, column = _event_time_lost(stream)
        raise FlowError(
            f"{where}: the rows have no event time: {node!r} does not pass {column!r} on",
            hint=f"do this before it{hint}",
        )
    return stream.port.event_time


def require_timed_sources(stream: Stream, where: str) -> None:
    """The watermark comes from the sources: if one has no event time, nothing would ever close."""
    for node in ancestors(stream).values():
        if isinstance(node, SourceNode) and node.port.event_time is None:
            raise FlowError(
                f"{where}: source {node.name!r} has no event time",
                hint=f'say which column it is: flow.source({node.name!r}, ..., event_time="ts")',
            )


def _event_time_lost(stream: Stream) -> tuple[str, str]:
    """Behind which node a stream without event time has none any more, and what it was called."""
    timed = [s.port.event_time for s in stream.node.inputs if s.port.event_time is not None]
    if timed:
        return stream.node.name, timed[0]
    return _event_time_lost(stream.node.inputs[0])


def refuse_reach(operator: KeyedOperator, where: str) -> None:
    """Times must not be so far apart that int64 has no number for them."""
    reach = max(operator.horizon, *(port.delay for port in operator.outputs.values()))
    timed = [p.schema.field(p.event_time).type for p in operator.inputs if p.event_time]
    limit = min(map(reach_max, timed), default=REACH_MAX)
    if reach > limit:
        raise FlowError(
            f"{where}: it looks back by {reach} units of event time, at most {limit} are possible",
            hint="window, lateness, time-out and those of the operators before it count together",
        )
