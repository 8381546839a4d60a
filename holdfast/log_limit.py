"""Limits how often a line is logged that somebody else can cause at any rate: a stranger who
connects again and again, or a server that stays away.

The first line is logged at once. Those that follow are counted, and one is logged at growing
intervals, with the count. `LogLimit` decides for one kind of line and gets the time as an
argument; `LimitedLog` is a logger with a clock and a limit for each kind; `RepeatsFilter` limits
the lines of a library.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Hashable

INTERVAL_S = 1.0
INTERVAL_S_MAX = 300.0
KINDS_MAX = 32
"""Maximum kinds of lines that are limited apart from each other. A stranger may cause any number of
kinds; those beyond the first ones share a limit."""


class LogLimit:
    """Which of the lines of one kind are logged.

    >>> limit = LogLimit()
    >>> [limit.count(at) for at in (0.0, 0.2, 0.4, 1.0, 2.9, 3.0)]
    [1, None, None, 3, None, 2]
    >>> limit.over(), limit.over()
    (True, False)
    """

    def __init__(self, interval_s_max: float = INTERVAL_S_MAX) -> None:
        self._interval_s_max = interval_s_max
        self._interval_s = INTERVAL_S
        self._due_s = self._last_s = float("-inf")
        self._count = 0
        self._logged = False

    def count(self, now_s: float) -> int | None:
        """Count an occurrence. Return the number since the last line if it is to be logged now,
        and None if not. After a long pause the intervals begin again with the shortest one."""
        if now_s - self._last_s > self._interval_s_max:
            self._interval_s, self._due_s = INTERVAL_S, now_s
        self._last_s = now_s
        self._count += 1
        if now_s < self._due_s:
            return None
        self._due_s = now_s + self._interval_s
        self._interval_s = min(2 * self._interval_s, self._interval_s_max)
        count, self._count, self._logged = self._count, 0, True
        return count

    def over(self) -> bool:
        """The condition has ended. Return whether to log that: whether a line was logged since the
        last end. The intervals go on growing, so that a condition that comes and goes does not fill
        the log either."""
        logged, self._logged = self._logged, False
        return logged


class LimitedLog:
    """Logs warnings of each kind within its limit. Any thread may call it."""

    def __init__(self, log: logging.Logger, clock_s: Callable[[], float] = time.monotonic) -> None:
        self._log, self._clock_s = log, clock_s
        self._limits: dict[Hashable, LogLimit] = {}
        self._lock = threading.Lock()

    def warning(self, kind: Hashable, text: str, *args: object) -> None:
        """Log a warning, or count it; `kind` is the part of it that repeats."""
        with self._lock:
            if kind not in self._limits and len(self._limits) >= KINDS_MAX:
                kind = None
            limit = self._limits.setdefault(kind, LogLimit())
            count = limit.count(self._clock_s())
        if count is not None:
            self._log.warning("%s%s", text % args, repeated(count))


class RepeatsFilter(logging.Filter):
    """Limits the lines of a logger that other code writes to: a kind is a line's format."""

    def __init__(self, clock_s: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock_s = clock_s
        self._limits: dict[Hashable, LogLimit] = {}

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno < logging.WARNING:
            return True
        kind = record.msg if len(self._limits) < KINDS_MAX else None
        count = self._limits.setdefault(kind, LogLimit()).count(self._clock_s())
        if count is None:
            return False
        record.msg, record.args = record.getMessage() + repeated(count), None
        return True


def repeated(count: int) -> str:
    """The end of a line that stands for `count` of them.

    >>> repeated(1), repeated(3)
    ('', ' (2 more like it since the last line)')
    """
    return f" ({count - 1:,} more like it since the last line)" if count > 1 else ""
