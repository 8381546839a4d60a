"""Durations, of which there are two kinds.

*Event time* is whatever the rows say: a `Duration` is a `timedelta` if they have timestamps, and a
whole number of the column's units if they have numbers. Everything about how a flow is *run*
(leases, intervals, time-outs) passes on a clock: such `Seconds` are a number of seconds or a
`timedelta`, and their names have no unit.
"""

from __future__ import annotations

import datetime
import math

import pyarrow as pa

from holdfast.errors import FlowError

Duration = int | datetime.timedelta
Seconds = float | datetime.timedelta

_PER_SECOND = {"s": 1, "ms": 10**3, "us": 10**6, "ns": 10**9}


def seconds(value: Seconds, what: str) -> float:
    """A duration of the clock as a number; `what` names it in errors.

    >>> seconds(datetime.timedelta(minutes=1), "lease")
    60.0
    """
    if isinstance(value, datetime.timedelta):
        value = value.total_seconds()
    if isinstance(value, bool) or not isinstance(value, int | float) or math.isnan(value):
        raise FlowError(
            f"{what}={value!r} is not a duration",
            hint="give a number of seconds, or a datetime.timedelta",
        )
    if value < 0:
        raise FlowError(f"{what}={value!r}: a duration is not negative")
    return float(value)


def positive_seconds(value: Seconds, what: str, hint: str | None = None) -> float:
    """The same, of a duration that must not be zero."""
    found = seconds(value, what)
    if not found:
        raise FlowError(f"{what}={value!r}: it must be positive", hint=hint)
    return found


def milliseconds(value: Seconds, what: str) -> int:
    """A duration of the clock in whole milliseconds, at least one of them.

    >>> milliseconds(0.5, "interval")
    500
    """
    return max(1, round(1e3 * positive_seconds(value, what)))


def event_units(duration: Duration, kind: pa.DataType, where: str) -> int:
    """A duration in the units of the event time it is compared with."""
    if isinstance(duration, datetime.timedelta):
        if not pa.types.is_timestamp(kind):
            raise FlowError(f"{where}: the event time is {kind}: give durations as whole numbers")
        micros = duration // datetime.timedelta(microseconds=1)
        units, rest = divmod(micros * _PER_SECOND[kind.unit], 10**6)
        if rest:
            raise FlowError(f"{where}: {duration} is not a whole number of the units of {kind}")
        return units
    if not isinstance(duration, int):
        raise FlowError(f"{where}: {duration!r} is not a duration (a whole number or a timedelta)")
    if pa.types.is_timestamp(kind) and duration != 0:
        raise FlowError(f"{where}: the event time is {kind}: give durations as timedelta")
    return duration
