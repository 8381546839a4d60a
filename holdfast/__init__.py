"""Continuous dataflows on a Spark cluster that keep running.

A flow file needs `Flow`, `col` and `lit`, and four namespaces: `sources`, `sinks`, `functions`
and `protections`.
"""

from holdfast import functions, protections, sinks, sources
from holdfast.api.graph import Flow
from holdfast.api.options import Checkpoint, Http, Options
from holdfast.api.protection import Protection
from holdfast.api.security import Tls
from holdfast.api.streams import ExpiringStream, JoinedStream, KeyedStream, Stream, TimedStream
from holdfast.connectors.sinks import Sink
from holdfast.connectors.sources import Source
from holdfast.control.run import Run
from holdfast.core.sequencer import Budget
from holdfast.engine.aggregates import Aggregate
from holdfast.engine.expressions import Expr, col, lit
from holdfast.engine.operators.custom import KeyedFunction, Rows
from holdfast.errors import (
    DivergenceError,
    FlowError,
    HoldfastError,
    HostError,
    HungError,
    InputError,
    OperatorError,
    OutOfMemoryError,
    SinkError,
    SinkRewoundError,
    SiteLostError,
)

__version__ = "0.1.0"

__all__ = [
    "Aggregate",
    "Budget",
    "Checkpoint",
    "DivergenceError",
    "ExpiringStream",
    "Expr",
    "Flow",
    "FlowError",
    "HoldfastError",
    "HostError",
    "Http",
    "HungError",
    "InputError",
    "JoinedStream",
    "KeyedFunction",
    "KeyedStream",
    "OperatorError",
    "Options",
    "OutOfMemoryError",
    "Protection",
    "Rows",
    "Run",
    "Sink",
    "SinkError",
    "SinkRewoundError",
    "SiteLostError",
    "Source",
    "Stream",
    "TimedStream",
    "Tls",
    "col",
    "functions",
    "lit",
    "protections",
    "sinks",
    "sources",
]
