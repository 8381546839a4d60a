"""A leader's decisions that are not executed yet."""

from __future__ import annotations

from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    FenceSite,
    StartFlow,
)

NEEDS_COMMIT = (CommitView, StartFlow, DrainFlow, FenceSite, EndFlow)
"""Decisions that must be committed, so that a successor knows them, before they are executed."""


class PendingDecisions:
    """The decisions of one term. Each waits until all decisions before it are committed: those in
    `under_way` for the commit that the arbiter was asked for, those in `waiting` for the next."""

    def __init__(self) -> None:
        self.under_way: list[ControllerEffect] = []
        self.waiting: list[ControllerEffect] = []

    def __bool__(self) -> bool:
        return bool(self.under_way or self.waiting)

    @property
    def error(self) -> Exception | None:
        """The error that ends the flow, if one of the decisions is to end it."""
        decided = [*self.under_way, *self.waiting]
        return next((e.error for e in decided if isinstance(e, EndFlow)), None)

    @property
    def need_commit(self) -> bool:
        """Whether a decision waits that must be committed."""
        return any(isinstance(e, NEEDS_COMMIT) for e in self.waiting)

    def add(self, effect: ControllerEffect) -> None:
        """Add a decision. Of several views that wait only the last is committed and executed."""
        if isinstance(effect, CommitView):
            self.waiting = [e for e in self.waiting if not isinstance(e, CommitView)]
        self.waiting.append(effect)

    def begin(self) -> None:
        """The decisions that wait are part of the next commit, unless one is under way."""
        if not self.under_way:
            self.under_way, self.waiting = self.waiting, []

    def done(self, more: bool) -> list[ControllerEffect]:
        """The decisions that may be executed, after a commit; `more`: those that came later are
        being committed now."""
        done, rest = self.under_way, self.waiting
        self.under_way, self.waiting = (rest, []) if more else ([], [])
        return done if more else [*done, *rest]

    def released(self) -> list[ControllerEffect]:
        """The decisions that need no commit."""
        if self.under_way:
            return []
        waiting, self.waiting = self.waiting, []
        return waiting
