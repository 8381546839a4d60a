"""PySpark's `StatefulProcessor` as a keyed operator."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.stateful_processor import (
    ExpiredTimerInfo,
    StatefulProcessor,
    TimerValues,
)

from holdfast.engine.operators.base import Port
from holdfast.errors import FlowError
from holdfast.spark.schemas import arrow_of
from holdfast.spark.stateful.adapters import FrameAdapter, RowAdapter, numpy_keys
from holdfast.spark.stateful.base import StatefulOperator
from holdfast.spark.stateful.clock import SparkClock
from holdfast.spark.stateful.handles import Handle, KeyState, Variable


class TransformWithState(StatefulOperator):
    """PySpark's `transformWithState` and `transformWithStateInPandas`."""

    def __init__(
        self,
        keys: Sequence[str],
        source: Port,
        processor: StatefulProcessor,
        schema: Any,
        *,
        clock: SparkClock | None,
        pandas: bool,
        where: str,
    ) -> None:
        if not isinstance(processor, StatefulProcessor):
            raise FlowError(
                f"{where}: {processor!r} is not a StatefulProcessor", hint="pass an instance"
            )
        self.processor, self.pandas = processor, pandas
        self.label = type(processor).__name__
        here = f"{where}, {self.label}"
        super().__init__(
            keys, source, arrow_of(schema, here), _declared(processor, clock, here), clock, here
        )

    @property
    def called(self) -> object:
        return self.processor

    def _begin(self) -> None:
        self.processor = copy.deepcopy(self.processor)
        self._named = Row(*self.keys)
        self._handle = Handle(self.clock is not None, self.where)
        self.processor.init(self._handle)
        self._handle.seal()
        self._adapter = (FrameAdapter if self.pandas else RowAdapter)(self._names, self.label)

    def _inputs(self, batch: pa.RecordBatch) -> Callable[[int], Any]:
        return self._adapter.inputs(batch)

    def _key_values(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return numpy_keys(columns) if self.pandas else super()._key_values(columns)

    def _on_row(self, key_state: KeyState, row: Any, watermark_ms: int) -> Iterable[Any]:
        values = self._enter(key_state, watermark_ms)
        return self._adapter.checked(
            self.processor.handleInputRows(key_state.key, iter([row]), values)
        )

    def _on_timer(self, key_state: KeyState, due: int, watermark_ms: int) -> Iterable[Any]:
        values = self._enter(key_state, watermark_ms)
        yield from self._adapter.checked(
            self.processor.handleExpiredTimer(
                key=self._named(*key_state.key),
                timerValues=values,
                expiredTimerInfo=ExpiredTimerInfo(due),
            )
        )
        if due in key_state.timers:
            key_state.timers.remove(due)

    def _enter(self, key_state: KeyState, watermark_ms: int) -> TimerValues:
        self._handle.key_state = key_state
        return _EventTime(watermark_ms) if self.clock else TimerValues(-1, -1)

    def _batches(self, outputs: list[Any]) -> list[pa.RecordBatch]:
        return self._adapter.batches(outputs, self.outputs["out"].schema)


class _EventTime(TimerValues):
    """Timer values without processing time."""

    def __init__(self, watermark_ms: int) -> None:
        super().__init__(-1, watermark_ms)

    def getCurrentProcessingTimeInMs(self) -> int:
        raise NotImplementedError(
            "getCurrentProcessingTimeInMs: results in Holdfast never depend on processing time"
        )


def _declared(processor: StatefulProcessor, clock: SparkClock | None, where: str) -> list[Variable]:
    """Call the processor's `init` to learn its state variables, as Spark does on the driver."""
    handle = Handle(clock is not None, where)
    processor = copy.deepcopy(processor)
    try:
        processor.init(handle)
        processor.close()
    except FlowError:
        raise
    except Exception as error:
        raise FlowError(f"{where}: init() raised {type(error).__name__}: {error}") from error
    return handle.variables
