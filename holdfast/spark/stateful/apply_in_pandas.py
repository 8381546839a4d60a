"""The functions of PySpark's `applyInPandasWithState` as a keyed operator."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pandas as pd
import pyarrow as pa
from pyspark.sql import Row
from pyspark.sql.streaming.state import GroupState, GroupStateTimeout

from holdfast.engine.operators.base import Port
from holdfast.errors import FlowError
from holdfast.spark.schemas import RowCodec, arrow_of, struct_of
from holdfast.spark.stateful.adapters import FrameAdapter, numpy_keys
from holdfast.spark.stateful.base import StatefulOperator
from holdfast.spark.stateful.clock import SparkClock
from holdfast.spark.stateful.handles import KeyState, Variable


class ApplyInPandasWithState(StatefulOperator):
    """PySpark's `applyInPandasWithState`. A timeout is a timer; a key has at most one."""

    due_after = 1  # a timeout is due once the watermark is past it

    def __init__(
        self,
        keys: Sequence[str],
        source: Port,
        function: Callable[..., Any],
        schema: Any,
        state_schema: Any,
        *,
        clock: SparkClock | None,
        where: str,
    ) -> None:
        if not callable(function):
            raise FlowError(f"{where}: {function!r} is not a function")
        self.function = function
        self.label = getattr(function, "__name__", "applyInPandasWithState")
        here = f"{where}, {self.label}"
        state = Variable("state", "value", struct_of(state_schema, here))
        super().__init__(keys, source, arrow_of(schema, here), [state], clock, here)

    @property
    def called(self) -> object:
        return self.function

    def _begin(self) -> None:
        self._codec = RowCodec(self.variables[0].schema, self.where)
        self._adapter = FrameAdapter(self._names, self.label)
        self._no_rows = pd.DataFrame(columns=self._names)

    def _inputs(self, batch: pa.RecordBatch) -> Callable[[int], Any]:
        return self._adapter.inputs(batch)

    def _key_values(self, columns: list[pa.Array]) -> list[tuple[Any, ...]]:
        return numpy_keys(columns)

    def _on_row(self, key_state: KeyState, row: Any, watermark_ms: int) -> Iterable[Any]:
        return self._call(key_state, row, watermark_ms, timed_out=False)

    def _on_timer(self, key_state: KeyState, due: int, watermark_ms: int) -> Iterable[Any]:
        return self._call(key_state, self._no_rows.copy(), watermark_ms, timed_out=True)

    def _call(
        self, key_state: KeyState, frame: pd.DataFrame, watermark_ms: int, timed_out: bool
    ) -> Iterator[Any]:
        state = self._group_state(key_state, watermark_ms, timed_out)
        yield from self._adapter.checked(self.function(key_state.key, iter([frame]), state))
        key_state.put(0, self._codec.encode(tuple(state._value)) if state.exists else None)
        timeout = state._timeout_timestamp
        key_state.timers[:] = [] if timeout == GroupState.NO_TIMESTAMP else [int(timeout)]

    def _group_state(self, key_state: KeyState, watermark_ms: int, timed_out: bool) -> GroupState:
        stored = key_state.value(0)
        conf = GroupStateTimeout
        return _EventTimeState(
            optionalValue=None if stored is None else Row(*self._codec.decode(stored)),
            batchProcessingTimeMs=-1,
            eventTimeWatermarkMs=watermark_ms if self.clock else GroupState.NO_TIMESTAMP,
            timeoutConf=conf.EventTimeTimeout if self.clock else conf.NoTimeout,
            hasTimedOut=timed_out,
            watermarkPresent=self.clock is not None,
            defined=stored is not None,
            updated=False,
            removed=False,
            timeoutTimestamp=GroupState.NO_TIMESTAMP,
            keyAsUnsafe=b"",
            valueSchema=self.variables[0].schema,
        )

    def _batches(self, outputs: list[Any]) -> list[pa.RecordBatch]:
        return self._adapter.batches(outputs, self.outputs["out"].schema)


class _EventTimeState(GroupState):
    def getCurrentProcessingTimeMs(self) -> int:
        raise NotImplementedError(
            "getCurrentProcessingTimeMs: results in Holdfast never depend on processing time"
        )
