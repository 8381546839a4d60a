"""A keyed stream that is cut into windows, waiting for ``agg``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from holdfast.api.columns import event_time_of, require_time, require_timed_sources
from holdfast.engine.aggregates import Aggregate
from holdfast.engine.durations import Duration, event_units
from holdfast.engine.operators.base import require_columns
from holdfast.engine.operators.row_window import RowWindow
from holdfast.engine.operators.time_window import TimeWindow
from holdfast.errors import FlowError

if TYPE_CHECKING:
    from holdfast.api.streams import KeyedStream, Stream, TimedStream


class RowWindows:
    """The last rows of each key."""

    def __init__(self, keyed: KeyedStream, rows: int, every: Duration) -> None:
        self._keyed, self._rows, self._every = keyed, rows, every

    def agg(self, **aggregates: Aggregate) -> Stream:
        """The aggregates of each window."""
        keyed, port = self._keyed, self._keyed.stream.port
        where = keyed._where("window")
        refuse_none(aggregates, where)
        if not isinstance(self._every, int):
            raise FlowError(f"{where}: every= of windows over rows is a number of rows")
        operator = RowWindow(keyed.keys, port, self._rows, self._every, aggregates, where)
        return keyed._operate(operator)["out"]


class TimeWindows:
    """Windows over the event time of each key's rows."""

    def __init__(
        self,
        keyed: KeyedStream,
        time: Duration,
        every: Duration,
        lateness: Duration,
        on: str | None,
    ) -> None:
        self._keyed, self._on = keyed, on
        self._durations = time, every, lateness

    def agg(self, **aggregates: Aggregate) -> TimedStream:
        """The aggregates of each window; ``.late`` of the result has the rows that came too
        late."""
        from holdfast.api.streams import TimedStream

        keyed, port = self._keyed, self._keyed.stream.port
        where = keyed._where("window")
        refuse_none(aggregates, where)
        on = self._event_time(where)
        kind = require_time(port.schema, on, where)
        size, step, lateness = (event_units(d, kind, where) for d in self._durations)
        window = TimeWindow(keyed.keys, port, on, size, step, lateness, aggregates, where)
        return TimedStream(keyed._operate(window))

    def _event_time(self, where: str) -> str:
        """The column that says to which windows a row belongs."""
        stream = self._keyed.stream
        if self._on is None:
            again = ", or keep the time (for example with agg(ts=F.max(...))) and say on="
            return event_time_of(stream, where, again)
        require_columns([self._on], stream.schema, where)
        require_time(stream.schema, self._on, where)
        require_timed_sources(stream, where)
        return self._on


def refuse_none(aggregates: Mapping[str, Aggregate], where: str) -> None:
    """An operator without an aggregate would give nothing but keys."""
    if not aggregates:
        raise FlowError(f"{where}: no aggregate was given", hint="for example agg(n=F.count())")
