"""What single machines and links do, each computed once and remembered.

A step of a machine is computed from the machine and the event; what it does to a link, or to the
rest of the world, from that value and the change. All have numbers, and `Memo` answers for whole
columns of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.core.layout import View
from holdfast.lab.model import flow
from holdfast.lab.model import messages as ms
from holdfast.lab.model.links import FENCE, ControlLink, Rest, SiteLink
from holdfast.lab.model.memo import GrowingArray, Memo
from holdfast.lab.model.outputs import (
    FlowOver,
    Join,
    LaunchOrder,
    Members,
    Output,
    Send,
    StartTimer,
    Tell,
    Vanish,
    Write,
)
from holdfast.lab.model.parts import Broken, Parts, Values
from holdfast.lab.model.state import Columns, Interned
from holdfast.lab.sim.checks import Violation

_OTHER = 1 << 26
"""Events with this number or more are not messages."""
LOCAL_MAX = 12
"""How many things a site can do by itself at most."""


@dataclass(frozen=True, slots=True)
class ModelBounds:
    """How large the world is, and how much may go wrong."""

    epochs: int = 2
    sources: int = 2
    """Partitions of the first stage."""
    partitions: int = 2
    """Partitions of the second stage."""
    crashes: int = 1
    suspicions: int = 0
    window: int = 1
    """Credit of a consumer, in epochs."""


class Steps:
    """All that is known of the parts of a world. It grows as states are visited."""

    def __init__(self, bounds: ModelBounds) -> None:
        self.bounds = bounds
        self.shape = flow.shape(bounds.sources, bounds.partitions)
        self.columns = Columns(2 + bounds.crashes + bounds.suspicions)
        self.messages, self.timers = Values(), Values()
        for message in (ms.LinkDown(), ms.LinkUp(), ms.FenceSent()):
            self.messages.number(message)  # the numbers that `holdfast.lab.model.links` has
        self.sites, self.controls = Parts(self.messages), Parts(self.messages)
        self.site_links, self.control_links = Interned(SiteLink()), Interned(ControlLink())
        self.rests = Interned(Rest())
        self._events = Interned()
        self._problems = Interned("")
        self._views: dict[int, View] = {}
        count = len(self.columns.sites)
        # Steps of machines: the machine after it, and the changes to everything else.
        self._step_of_site, self._step_of_control = Memo(self._site_step), Memo(self._control_step)
        self._steps = GrowingArray(np.int32, 1 + count + 2)
        # Changes to links and the rest, by number: 0 is none.
        self._changes = Interned(())
        self._after_link = Memo(self._site_link_after)
        self._after_control_link = Memo(self._control_link_after)
        self._after_rest = Memo(self._rest_after)
        self._trimmed = Memo(self._without_stale)
        # Facts about values, by their number.
        self.locals = _FactTable(self.sites, np.int32, LOCAL_MAX, self._locals_of)
        self.heads = _FactTable(self.site_links, np.int64, 7, self._heads_of)
        self.control_heads = _FactTable(self.control_links, np.int64, 7, self._control_heads_of)
        self.rest_facts = _FactTable(self.rests, np.int64, 6, self._facts_of_rest)
        self.control_facts = _FactTable(self.controls, np.int64, 3, self._facts_of_control)
        self._may_fail = Memo(self._has_lost_all)

    @property
    def steps(self) -> int:
        """How many different steps machines have taken."""
        return len(self._steps)

    def view(self, control: int) -> View:
        """The latest view of a controller."""
        found = self._views.get(control)
        if found is None:
            found = self._views[control] = self.controls.get(control).controller.view
        return found

    # --- links and the rest ---------------------------------------------------------------------

    def _site_link_after(self, key: int) -> int:
        link, (side, ops) = self.site_links.all[key >> 32], self._changes.all[key & 0xFFFFFFFF]
        for op in ops:
            link = link.after(side, op)
        return self.site_links.number(link)

    def _control_link_after(self, key: int) -> int:
        link, ops = self.control_links.all[key >> 32], self._changes.all[key & 0xFFFFFFFF]
        for op in ops:
            link = link.after(op)
        return self.control_links.number(link)

    def _without_stale(self, key: int) -> int:
        link, number = self.control_links.all[key >> 32], key & 0xFFFFFFFF
        kept = tuple(m for m in link.reports if not self._is_stale(m, number))
        return self.control_links.number(link._replace(reports=kept))

    def _is_stale(self, message: int, number: int) -> bool:
        found = self.messages.all[message]
        return isinstance(found, ms.ViewActedOn | ms.SiteDone) and found.number < number

    def _rest_after(self, key: int) -> int:
        rest, change = self.rests.all[key >> 32], self._changes.all[key & 0xFFFFFFFF]
        try:
            return self.rests.number(self._rest(rest, change))
        except Violation as violation:
            return -self._problems.number(str(violation))

    def _rest(self, rest: Rest, change: tuple[Any, ...]) -> Rest:
        match change:
            case ("all", changes):
                for each in changes:
                    rest = self._rest(rest, each)
                return rest
            case ("started", site):
                return rest._replace(starting=_less(rest.starting, site))
            case ("launched", site):
                return rest._replace(starting=(*rest.starting, site))
            case ("fired", timer):
                return rest._replace(timers=_less(rest.timers, timer))
            case ("timer", timer):
                return rest._replace(timers=tuple(sorted((*rest.timers, timer))))
            case ("crash",):
                return rest._replace(crashes=rest.crashes - 1)
            case ("suspect",):
                return rest._replace(suspicions=rest.suspicions - 1)
            case ("unnoticed", site):
                return rest._replace(unnoticed=tuple(sorted((*rest.unnoticed, site))))
            case ("noticed", site):
                return rest._replace(unnoticed=_less(rest.unnoticed, site))
            case ("write", group, epoch, result):
                return self._written(rest, group, epoch, result)
            case ("over", error):
                return self._over(rest, error)
        raise ValueError(change)

    def _written(self, rest: Rest, group: int, epoch: int, result: int) -> Rest:
        written = list(rest.written)
        right = flow.reference((flow.LAST, group), epoch, self._producers)
        if epoch > written[group]:
            raise Violation(f"epoch {epoch} of counts/{group} is written, and the one before lacks")
        if result != right:
            raise Violation(f"a wrong result of counts/{group}, epoch {epoch}, is written")
        written[group] = max(written[group], epoch + 1)
        return rest._replace(written=tuple(written))

    @property
    def _producers(self) -> int:
        return min(2, self.bounds.sources)

    def _over(self, rest: Rest, error: str) -> Rest:
        if not error and any(n != self.bounds.epochs for n in rest.written):
            raise Violation(f"the flow ended, and the store has {rest.written} epochs")
        return Rest(written=() if error else rest.written, ended=error)

    def _has_lost_all(self, key: int) -> int:
        """Whether a task has no live replica in the view of a controller."""
        view, lives = self.view(key >> 32), key & 0xFFFFFFFF
        groups = [view.group(task) for task in view.tasks()]
        return int(any(not any(lives >> s & 1 for s in group.replicas) for group in groups))

    # --- steps of machines ----------------------------------------------------------------------

    def _event(self, kind: str, *what: Any) -> int:
        return _OTHER + self._events.number((kind, *what))

    def event(self, number: int) -> tuple[Any, ...]:
        """What happens: its kind, and the rest."""
        if number >= _OTHER:
            found: tuple[Any, ...] = self._events.all[number - _OTHER]
            return found
        return ("message", (number & 15) - 1, self.messages.all[number >> 4])

    def _site_step(self, key: int) -> int:
        try:
            machine, outputs = self.sites.step(key >> 32, *self.event(key & 0xFFFFFFFF))
        except (Broken, Violation) as error:
            return -self._problems.number(str(error))
        site = int(self.sites.get(key >> 32).site)
        if Vanish() in outputs:
            machine = 0
        changes = [self._link_changes(site, other, outputs) for other in self.columns.sites]
        rest = [change for output in outputs for change in _writes(output)]
        return self._add_step(machine, changes, rest)

    def _link_changes(self, site: int, other: int, outputs: tuple[Output, ...]) -> tuple[Any, ...]:
        ops: list[tuple[Any, ...]] = []
        for output in outputs:
            match output:
                case Send() if output.site == other:
                    ops.append(("send", output.message))
                case Tell() if other == site:
                    ops.append(("tell", output.message))
                case Members() if other != site:
                    ops.append(("member",) if other in output.members else ("no member",))
                case Vanish():
                    ops.append(("vanish",))
        if not ops or site == other:
            return tuple(ops)
        return (self.columns.between(site, other)[1], tuple(ops))

    def _control_step(self, key: int) -> int:
        try:
            machine, outputs = self.controls.step(key >> 32, *self.event(key & 0xFFFFFFFF))
        except Broken as error:
            return -self._problems.number(str(error))
        changes = [
            tuple(("send", o.message) for o in outputs if isinstance(o, Send) and o.site == site)
            for site in self.columns.sites
        ]
        rest: list[tuple[Any, ...]] = []
        over = False
        for output in outputs:
            match output:
                case Send() if isinstance(self.messages.all[output.message], ms.FenceSent):
                    rest.append(("noticed", output.site))
                case LaunchOrder():
                    rest.append(("launched", output.site))
                case StartTimer():
                    rest.append(("timer", self.timers.number(output.timer)))
                case FlowOver():
                    rest.append(("over", output.error))
                    over = True
        return self._add_step(machine, changes, rest, over)

    def _add_step(
        self,
        machine: int,
        changes: list[tuple[Any, ...]],
        rest: list[tuple[Any, ...]],
        over: bool = False,
    ) -> int:
        numbers = [self._changes.number(change) for change in changes]
        last = self._changes.number(("all", tuple(rest)) if rest else ())
        self._steps.append((machine, *numbers, last, over))
        return len(self._steps) - 1

    # --- facts about values ---------------------------------------------------------------------

    def _locals_of(self, number: int) -> list[int]:
        """What a site can do by itself."""
        if not number:
            return []
        site = self.sites.get(number)
        works = [self._event("work", task) for task in site.orders]
        return works + [self._event("rest", task, joiner) for task, joiner in site.outgoing]

    def _heads_of(self, number: int) -> list[int]:
        """For both directions: the oldest message, the link without it, the link if all is lost
        (-1: none). Behind that, in which directions there is a connection."""
        link: SiteLink = self.site_links.all[number]
        found = []
        for side, queue in enumerate(link.queues):
            lost = link.lost(side)
            found += [
                queue[0] if queue else -1,
                self.site_links.number(link.popped(side)) if queue else -1,
                self.site_links.number(lost) if lost is not None else -1,
            ]
        there = [side for side, queue in enumerate(link.queues) if queue is not None]
        return [*found, _mask(there)]

    def _control_heads_of(self, number: int) -> list[int]:
        """The next order and report with the links without them (-1: none); whether there are
        reports that may be stale; whether an order ends the site, or views differ in their members;
        the members (-1: there is no view)."""
        link: ControlLink = self.control_links.all[number]
        found = [-1] * 4
        if link.orders:
            found[:2] = [
                link.orders[0],
                self.control_links.number(link._replace(orders=link.orders[1:])),
            ]
        if link.reports:
            found[2:] = [
                link.reports[0],
                self.control_links.number(link._replace(reports=link.reports[1:])),
            ]
        views = [v.members for v in map(self._view_in, link.orders or ()) if v is not None]
        odd = int(FENCE in (link.orders or ()) or any(v != views[0] for v in views))
        return [*found, int(bool(link.reports)), odd, _mask(views[0]) if views else -1]

    def _view_in(self, message: int) -> View | None:
        found = self.messages.all[message]
        return found.view if isinstance(found, ms.ViewSent) else None

    def _facts_of_rest(self, number: int) -> list[int]:
        rest: Rest = self.rests.all[number]
        ended = 0 if rest.ended is None else 2 if rest.ended else 1
        masks = [_mask(rest.starting), _mask(rest.timers), _mask(rest.unnoticed)]
        return [*masks, rest.crashes, rest.suspicions, ended]

    def _facts_of_control(self, number: int) -> list[int]:
        """The sites that the controller counts on, the members, and the number of the view."""
        if not number:
            return [0, 0, 0]
        controller = self.controls.get(number).controller
        known = [s for s in self.columns.sites if controller.roster.knows(s)]
        view = self.view(number)
        return [_mask(known), _mask(view.members) if view else 0, view.number if view else 0]


class _FactTable:
    """What is known of each value of one kind, as a table that grows with the values."""

    def __init__(self, values: Any, dtype: Any, width: int, compute: Any) -> None:
        self._compute, self._width = compute, width
        self._known = GrowingArray(dtype, width)

    def __call__(self, numbers: NDArray[Any]) -> NDArray[Any]:
        last = int(numbers.max(initial=-1))
        while len(self._known) <= last:
            found = self._compute(len(self._known))
            self._known.append([*found, *[0] * (self._width - len(found))])
        rows: NDArray[Any] = self._known.all[numbers]
        return rows


def _writes(output: Output) -> Iterator[tuple[Any, ...]]:
    match output:
        case Write():
            yield ("write", int(output.task[1]), output.epoch, output.result)
        case Join():
            for epoch, result in enumerate(output.results):
                yield ("write", int(output.task[1]), epoch, result)


def _less(values: tuple[int, ...], value: int) -> tuple[int, ...]:
    """Without the first of these, if it is there."""
    left = list(values)
    if value in left:
        left.remove(value)
    return tuple(left)


def _mask(values: Any) -> int:
    return sum({1 << int(v) for v in values})
