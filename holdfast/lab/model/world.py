"""The closed world of the model: which events can happen in states, and what each leads to.

Each link keeps its order; across links every order is possible. A site that dies leaves what it had
sent under way; any suffix of that may be lost, on each link. There is no time: a timer fires, a
death is noticed, and a launched site registers at any moment after it may.

`moves` takes many states at once. What a machine does in a step, and what that does to a link, is
computed once for each machine and event, and for each link and change (`Memo`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.core.ids import SiteId
from holdfast.lab.model.control import ModelControl
from holdfast.lab.model.links import Rest
from holdfast.lab.model.memo import Memo
from holdfast.lab.model.site import ModelSite
from holdfast.lab.model.state import CONTROL, Move, Rows
from holdfast.lab.model.steps import LOCAL_MAX, Steps

EVERY = -2
"""All machines."""
Only = NDArray[np.int64] | None


@dataclass(slots=True)
class Successors:
    """What one kind of event leads to."""

    move: Move
    parents: NDArray[np.int64]
    """Which of the given states it happens in."""
    rows: Rows
    """The states after it."""


class Wrong(Exception):
    """An event leads to something wrong. Carries the event, in which of the states, and why."""

    def __init__(self, move: Move, parent: int, problem: str) -> None:
        super().__init__(problem)
        self.move, self.parent, self.problem = move, parent, problem


class ModelWorld(Steps):
    """What happens in states of a world with these bounds."""

    # --- the beginning --------------------------------------------------------------------------

    def begin(self) -> Rows:
        """The state in which the flow starts: all sites act on the first view, are connected, and
        have told each other so."""
        c = self.columns
        row = np.zeros((c.count, 1), np.int32)
        row[c.control] = self.controls.add(ModelControl(self.shape, 2))
        groups = min(2, self.bounds.partitions)
        row[c.rest] = self.rests.number(Rest(starting=(0, 1), written=(0,) * groups))
        for site in (0, 1):
            self._start(row, site, records=False)
        while delivered := next(self._deliveries(row), None):
            row = delivered.rows
        for site in (0, 1):
            self._step_sites(row, site, self._event("records", 0, *self._records))
        rest = self.rests.all[row[c.rest, 0]]
        faults = {"crashes": self.bounds.crashes, "suspicions": self.bounds.suspicions}
        row[c.rest] = self.rests.number(rest._replace(**faults))
        return row

    @property
    def _records(self) -> tuple[int, int]:
        return (self.bounds.epochs, self.bounds.epochs)

    # --- what can happen ------------------------------------------------------------------------

    def moves(self, rows: Rows, only: Only = None) -> Iterator[Successors]:
        """All events that can happen next in these states; raises `Wrong`. `only`: by state, the
        machine whose events count, or `EVERY`."""
        yield from self._local_moves(rows, only)
        yield from self._deliveries(rows, only)
        yield from self._losses(rows, only)
        yield from self._moves_of_rest(rows, only)

    def _local_moves(self, rows: Rows, only: Only) -> Iterator[Successors]:
        for site in self.columns.sites:
            machines = rows[self.columns.machine[site]]
            events = self.locals(machines)
            for which in range(LOCAL_MAX):
                able = _where(events[:, which] > 0, site, only)
                if not len(able):
                    break
                yield self._taken(Move("local", (site,), which), rows, able, events[able, which])

    def _taken(
        self, move: Move, rows: Rows, able: NDArray[np.int64], events: NDArray[Any]
    ) -> Successors:
        new = rows[:, able]
        with _Naming(move, able):
            self._step_sites(new, move.who[0], events)
        return Successors(move, able, new)

    def _deliveries(self, rows: Rows, only: Only = None) -> Iterator[Successors]:
        c = self.columns
        for site in c.sites:
            heads = self.control_heads(rows[c.control_link[site]])
            able = _where(heads[:, 0] >= 0, site, only)
            if len(able):
                move, new, heads_ = Move("deliver", (CONTROL, site)), rows[:, able], heads[able]
                new[c.control_link[site]] = heads_[:, 1]
                with _Naming(move, able):
                    self._step_sites(new, site, _from(CONTROL, heads_[:, 0]))
                yield Successors(move, able, new)
            able = _where(heads[:, 2] >= 0, CONTROL, only)
            if len(able):
                move, new, heads_ = Move("deliver", (site, CONTROL)), rows[:, able], heads[able]
                new[c.control_link[site]] = heads_[:, 3]
                with _Naming(move, able):
                    self._step_control(new, _from(site, heads_[:, 2]))
                yield Successors(move, able, new)
        for (a, b), column in c.site_link.items():
            heads = self.heads(rows[column])
            for side, (sender, receiver) in enumerate(((a, b), (b, a))):
                able = _where(heads[:, 3 * side] >= 0, receiver, only)
                if not len(able):
                    continue
                move, new, heads_ = Move("deliver", (sender, receiver)), rows[:, able], heads[able]
                new[column] = heads_[:, 3 * side + 1]
                with _Naming(move, able):
                    self._step_sites(new, receiver, _from(sender, heads_[:, 3 * side]))
                yield Successors(move, able, new)

    def _losses(self, rows: Rows, only: Only) -> Iterator[Successors]:
        for (a, b), column in self.columns.site_link.items():
            heads = self.heads(rows[column])
            for side, ends in enumerate(((a, b), (b, a))):
                able = _where(heads[:, 3 * side + 2] >= 0, ends[1], only)
                if len(able):
                    new = rows[:, able]
                    new[column] = heads[able, 3 * side + 2]
                    yield Successors(Move("lose", ends), able, new)

    def _moves_of_rest(self, rows: Rows, only: Only) -> Iterator[Successors]:
        c = self.columns
        facts = self.rest_facts(rows[c.rest])
        starting, timers, unnoticed, crashes, suspicions = facts[:, :5].T
        members = self.control_facts(rows[c.control])[:, 1]
        lives = self.living(rows)
        for site in c.sites:
            bit = 1 << site
            yield from self._each(rows, starting & bit > 0, Move("start", (site,)), only)
            yield from self._each(rows, unnoticed & bit > 0, Move("notice", (site,)), only)
            able = (crashes > 0) & (lives & bit > 0)
            yield from self._each(rows, able, Move("crash", (site,)), only)
            able = (suspicions > 0) & (lives & members & bit > 0)
            yield from self._each(rows, able, Move("suspect", (site,)), only)
        for two in c.site_link:
            both = (1 << two[0]) | (1 << two[1])
            yield from self._each(rows, unnoticed & both == both, Move("notice", two), only)
        for timer in range(len(self.timers.all)):
            able = timers & (1 << timer) > 0
            yield from self._each(rows, able, Move("timer", (), timer), only)

    def living(self, rows: Rows) -> NDArray[np.int64]:
        lives = np.zeros(rows.shape[1], np.int64)
        for site in self.columns.sites:
            lives |= (rows[self.columns.machine[site]] > 0).astype(np.int64) << site
        return lives

    def _each(
        self, rows: Rows, able: NDArray[np.bool_], move: Move, only: Only
    ) -> Iterator[Successors]:
        where = _where(able, CONTROL, only)
        if len(where):
            new = rows[:, where]
            with _Naming(move, where):
                self._do(new, move)
            yield Successors(move, where, new)

    def _do(self, new: Rows, move: Move) -> None:
        c = self.columns
        match move.kind:
            case "start":
                self._start(new, move.who[0], records=True)
            case "crash":
                self._crash(new, move.who[0])
            case "notice":
                self._notice(new, move.who)
            case "suspect":
                self._change(new, c.rest, self._after_rest, ("suspect",))
                self._step_control(new, self._event("failed", move.who, False))
            case "timer":
                self._change(new, c.rest, self._after_rest, ("fired", move.what))
                timer = self.timers.all[move.what]
                self._step_control(new, self._event("timer", timer))
            case _:
                raise ValueError(move)

    # --- what it leads to -----------------------------------------------------------------------

    def _start(self, new: Rows, site: int, records: bool) -> None:
        c = self.columns
        machine = self.sites.add(ModelSite(SiteId(site), self.shape, self.bounds.window))
        new[c.machine[site]] = machine
        self._change(new, c.rest, self._after_rest, ("started", site))
        self._change(new, c.control_link[site], self._after_control_link, (("start",),))
        for other in c.sites:
            if other != site:
                column, side = c.between(site, other)
                self._change(new, column, self._after_link, (side, (("start",),)))
        if records:
            self._step_sites(new, site, self._event("records", 0, *self._records))
        self._step_control(new, self._event("registered", site))

    def _crash(self, new: Rows, site: int) -> None:
        c = self.columns
        known = self.control_facts(new[c.control])[:, 0] >> site & 1
        self._change(new, c.rest, self._after_rest, ("crash",))
        counts = np.flatnonzero(known)
        if len(counts):
            rest = new[c.rest, counts]
            new[c.rest, counts] = self._changed(rest, self._after_rest, ("unnoticed", site))
        self._vanish(new, site)

    def _vanish(self, new: Rows, site: int) -> None:
        c = self.columns
        new[c.machine[site]] = 0
        self._change(new, c.control_link[site], self._after_control_link, (("vanish",),))
        for other in c.sites:
            if other != site:
                column, side = c.between(site, other)
                self._change(new, column, self._after_link, (side, (("vanish",),)))

    def _notice(self, new: Rows, sites: tuple[int, ...]) -> None:
        c = self.columns
        for site in sites:
            self._change(new, c.rest, self._after_rest, ("noticed", site))
            self._change(new, c.control_link[site], self._after_control_link, (("notice",),))
        self._step_control(new, self._event("failed", sites, True))

    def _step_sites(self, new: Rows, site: int, events: NDArray[Any] | int) -> None:
        c = self.columns
        keys = (new[c.machine[site]].astype(np.int64) << 32) | events
        steps = self._step_of_site(keys)
        self._stop_if_wrong(steps)
        found = self._steps.all[steps]
        new[c.machine[site]] = found[:, 0]
        for other in c.sites:
            if other != site:
                column, _ = c.between(site, other)
                self._apply(new, column, self._after_link, found[:, 1 + other])
        told = self._apply(new, c.control_link[site], self._after_control_link, found[:, 1 + site])
        if len(told):
            self._drop_stale(new, site)
        self._apply(new, c.rest, self._after_rest, found[:, -2])

    def _step_control(self, new: Rows, events: NDArray[Any] | int) -> None:
        c = self.columns
        before = new[c.control].astype(np.int64)
        steps = self._step_of_control((before << 32) | events)
        self._stop_if_wrong(steps)
        found = self._steps.all[steps]
        new[c.control] = found[:, 0]
        for site in c.sites:
            self._apply(new, c.control_link[site], self._after_control_link, found[:, 1 + site])
            self._drop_stale(new, site)
        self._apply(new, c.rest, self._after_rest, found[:, -2])
        over = np.flatnonzero(found[:, -1])
        if len(over):
            self._end(new, over, before)

    def _end(self, new: Rows, over: NDArray[np.int64], before: NDArray[np.int64]) -> None:
        """The flow has ended: nothing counts any more but the result."""
        c = self.columns
        failed = over[self.rest_facts(new[c.rest, over])[:, 5] == 2]
        lives = self.living(new[:, failed])
        legal = self._may_fail((before[failed] << 32) | lives)
        if not legal.all():
            raise _Wrong(int(failed[np.argmin(legal)]), "the flow stopped without a reason")
        rest = new[c.rest, over]
        new[:, over] = 0
        new[c.rest, over] = rest

    def _drop_stale(self, new: Rows, site: int) -> None:
        """Drop reports about earlier views. The controller ignores them, now and later, so a state
        with them is the same as one without."""
        c = self.columns
        column = new[c.control_link[site]]
        where = np.flatnonzero(self.control_heads(column)[:, 4])
        if len(where):
            numbers = self.control_facts(new[c.control, where])[:, 2]
            keys = (column[where].astype(np.int64) << 32) | numbers
            new[c.control_link[site], where] = self._trimmed(keys)

    # --- changes --------------------------------------------------------------------------------

    def _apply(self, new: Rows, column: int, memo: Memo, changes: NDArray[Any]) -> NDArray[Any]:
        """Apply these changes to a column; returns where there is one."""
        where = np.flatnonzero(changes)
        if len(where):
            keys = (new[column, where].astype(np.int64) << 32) | changes[where]
            after = memo(keys)
            wrong = np.flatnonzero(after < 0)
            if len(wrong):
                at = int(wrong[0])
                raise _Wrong(int(where[at]), self._problems.all[-after[at]])
            new[column, where] = after
        return where

    def _change(self, new: Rows, column: int, memo: Memo, change: tuple[Any, ...]) -> None:
        new[column] = self._changed(new[column], memo, change)

    def _changed(self, values: NDArray[Any], memo: Memo, change: tuple[Any, ...]) -> NDArray[Any]:
        return memo((values.astype(np.int64) << 32) | self._changes.number(change))

    def _stop_if_wrong(self, steps: NDArray[np.int32]) -> None:
        wrong = np.flatnonzero(steps < 0)
        if len(wrong):
            raise _Wrong(int(wrong[0]), self._problems.all[-steps[wrong[0]]])

    def ended(self, rows: Rows) -> NDArray[np.bool_]:
        """In which of these states the flow has ended."""
        found: NDArray[np.bool_] = self.rest_facts(rows[self.columns.rest])[:, 5] > 0
        return found


class _Wrong(Exception):
    """Something is wrong in one of the states after an event."""

    def __init__(self, at: int, problem: str) -> None:
        super().__init__(problem)
        self.at, self.problem = at, problem


class _Naming:
    """Names the event that leads to something wrong."""

    def __init__(self, move: Move, parents: NDArray[np.int64]) -> None:
        self._move, self._parents = move, parents

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        if isinstance(error, _Wrong):
            raise Wrong(self._move, int(self._parents[error.at]), error.problem) from error


def _where(able: NDArray[np.bool_], owner: int, only: Only) -> NDArray[np.int64]:
    if only is not None:
        able = able & ((only == EVERY) | (only == owner))
    return np.flatnonzero(able)


def _from(sender: int, messages: NDArray[Any]) -> NDArray[np.int64]:
    return (messages.astype(np.int64) << 4) | (sender + 1)
