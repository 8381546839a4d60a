"""Notes for people when the arbiter goes and comes back.

A control asks the arbiter several times per lease. While the arbiter is away, one note says so when
it goes, others at growing intervals, and one when it answers again.
"""

from __future__ import annotations

from holdfast.control import events as ev
from holdfast.core.events import ArbiterUnreachable
from holdfast.log_limit import LogLimit, repeated


class ArbiterWatch:
    """Turns what the arbiter answers into notes."""

    def __init__(self) -> None:
        self._limit = LogLimit()
        self._away_since: float | None = None

    def on_answer(self, answer: ev.ArbiterAnswer, now: float) -> list[ev.ControlEffect]:
        if isinstance(answer, ArbiterUnreachable):
            self._away_since = now if self._away_since is None else self._away_since
            count = self._limit.count(now)
            return [] if count is None else [ev.Note(answer.reason + repeated(count), warns=True)]
        away_since, self._away_since = self._away_since, None
        if away_since is None or not self._limit.over():
            return []
        away_s = now - away_since
        return [ev.Note(f"the arbiter answers again, after {away_s:.1f} s", warns=True)]
