"""Stateful operators as users of Spark write them. Nothing here knows of Holdfast."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from typing import Any

import pandas as pd
from pyspark.sql import Row
from pyspark.sql.streaming import StatefulProcessor
from pyspark.sql.types import LongType, StructField, StructType

GAP_MS = 40
VISITS = "k string, what string, n long, list string, map string, timers long, mark long"
COUNTS = StructType([StructField("k", LongType()), StructField("n", LongType())])


def ms_of(moment: datetime.datetime) -> int:
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=datetime.UTC)
    return (moment - datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)) // (
        datetime.timedelta(milliseconds=1)
    )


class Visits(StatefulProcessor):
    """Does what the column `cmd` says to each kind of state, and shows all of it with every row."""

    def init(self, handle: Any) -> None:
        self.handle = handle
        self.total = handle.getValueState("total", "n long, seen double")
        self.recent = handle.getListState("recent", StructType([StructField("n", LongType())]))
        self.by_name = handle.getMapState("by name", "name string", "n long, at timestamp")

    def handleInputRows(self, key: Any, rows: Iterator[Row], timerValues: Any) -> Iterator[Row]:
        mark = timerValues.getCurrentWatermarkInMs()
        for row in rows:
            if row.cmd == "raise":
                raise ValueError(f"{row.n} is a bad number")
            n, seen = self.total.get() if self.total.exists() else (0, 0.5)
            self.total.update((n + row.n, seen / 2))
            self.recent.appendValue((row.n,))
            self.by_name.updateValue((row.cmd,), (row.n, row.ts))
            if row.cmd == "wait":
                self.handle.registerTimer(max(ms_of(row.ts), mark) + GAP_MS)
            elif row.cmd == "wait twice":
                self.handle.registerTimer(max(ms_of(row.ts), mark) + GAP_MS // 2)
                self.handle.registerTimer(max(ms_of(row.ts), mark) + 3 * GAP_MS)
            elif row.cmd == "forget timers":
                for timer in list(self.handle.listTimers()):
                    self.handle.deleteTimer(timer)
            elif row.cmd == "shorten":
                self.recent.put([(v * 2,) for (v,) in list(self.recent.get())[-2:]])
                self.by_name.removeKey(("wait",))
            elif row.cmd == "clear":
                self.clear()
            if row.cmd != "quiet":
                yield self.shown(key[0], f"row {row.cmd}", mark)

    def handleExpiredTimer(
        self, key: Any, timerValues: Any, expiredTimerInfo: Any
    ) -> Iterator[Row]:
        expired, mark = expiredTimerInfo.getExpiryTimeInMs(), timerValues.getCurrentWatermarkInMs()
        yield self.shown(key[0], f"timer {expired}", mark)
        if self.total.exists() and self.total.get()[0] % 2:
            self.handle.registerTimer(mark + GAP_MS)
        else:
            self.clear()

    def clear(self) -> None:
        for state in (self.total, self.recent, self.by_name):
            state.clear()

    def shown(self, key: Any, what: str, mark: int) -> Row:
        names = sorted((k, v, ms_of(at)) for (k,), (v, at) in self.by_name.iterator())
        total = self.total.get()
        return Row(
            k=key,
            what=what,
            n=None if total is None else total[0],
            list=str([v for (v,) in self.recent.get()]) if self.recent.exists() else None,
            map=str(names) if self.by_name.containsKey(("wait",)) else str(len(names)),
            timers=sum(1 for _ in self.handle.listTimers()),
            mark=mark,
        )

    def close(self) -> None:
        pass


class FrameCounts(StatefulProcessor):
    """In pandas: the running count of each key."""

    def init(self, handle: Any) -> None:
        self.count = handle.getValueState("count", "n int")

    def handleInputRows(self, key: Any, rows: Any, timerValues: Any) -> Iterator[pd.DataFrame]:
        for frame in rows:
            before = self.count.get()[0] if self.count.exists() else 0
            self.count.update((before + len(frame),))
            yield pd.DataFrame({"n": range(before + 1, before + 1 + len(frame)), "k": frame["k"]})


def sessions(key: Any, frames: Iterator[pd.DataFrame], state: Any) -> Iterator[pd.DataFrame]:
    """For applyInPandasWithState: a key's session ends when nothing came for a while."""
    if state.hasTimedOut:
        assert all(frame.empty for frame in frames)
        n, total = state.get
        state.remove()
        yield pd.DataFrame({"k": [key[0]], "what": ["over"], "n": [n], "total": [total]})
        return
    n, total = state.getOption or (0, 0)
    for frame in frames:
        n, total = n + len(frame), total + int(frame["n"].sum())
        last = ms_of(frame["ts"].max().to_pydatetime())
    state.update((n, total))
    if total % 5:
        state.setTimeoutTimestamp(max(last + GAP_MS, state.getCurrentWatermarkMs()))
    yield pd.DataFrame({"k": [key[0]], "what": ["row"], "n": [n], "total": [total]})


SESSIONS = "k string, what string, n long, total long"
SESSION = "n long, total long"
