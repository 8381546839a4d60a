"""The closed world of the model: which events can happen in a state, and what each leads to.

Each link keeps its order; across links every order is possible. A site that dies leaves what it had
sent under way; any suffix of that may be lost, on each link. There is no time: a timer fires, a
death is noticed, and a launched site registers at any moment after it may.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.core.ids import GroupId, SiteId
from holdfast.core.layout import View
from holdfast.lab.model import flow
from holdfast.lab.model import messages as ms
from holdfast.lab.model.control import ModelControl
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
from holdfast.lab.model.parts import Parts, Values
from holdfast.lab.model.site import ModelSite
from holdfast.lab.model.state import CONTROL, Link, ModelState, Move
from holdfast.lab.sim.checks import Violation

Key = tuple[object, ...]


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
    cuts: bool = False
    """Whether epochs are recorded one after another, at any moment; otherwise all are recorded when
    the flow starts."""


class _Draft:
    """A state that is being changed."""

    def __init__(self, state: ModelState) -> None:
        self.control = state.control
        self.sites = dict(state.sites)
        self.links = dict(state.links)
        self.starting, self.timers = list(state.starting), list(state.timers)
        self.unnoticed = list(state.unnoticed)
        self.written = list(state.written)
        self.recorded = state.recorded
        self.crashes, self.suspicions = state.crashes, state.suspicions
        self.exceeded, self.ended = state.exceeded, state.ended

    def state(self) -> ModelState:
        if self.ended is not None:  # nothing counts any more but the result
            written = () if self.ended else tuple(self.written)
            return ModelState(0, (), (), (), (), (), written, 0, 0, 0, self.exceeded, self.ended)
        return ModelState(
            self.control,
            tuple(sorted(self.sites.items())),
            tuple(sorted(self.links.items())),
            tuple(self.starting),
            tuple(sorted(self.timers)),
            tuple(self.unnoticed),
            tuple(self.written),
            self.recorded,
            self.crashes,
            self.suspicions,
            self.exceeded,
        )


class ModelWorld:
    """All that is known of a world with these bounds. It grows as states are visited."""

    def __init__(self, bounds: ModelBounds) -> None:
        self.bounds = bounds
        self.shape = flow.shape(bounds.sources, bounds.partitions)
        self.messages, self.timers = Values(), Values()
        self.sites, self.controls = Parts(self.messages), Parts(self.messages)
        self._down = self.messages.number(ms.LinkDown())
        self._up = self.messages.number(ms.LinkUp())
        self._fenced = self.messages.number(ms.FenceSent())
        self._work: dict[int, tuple[Move, ...]] = {}
        self._views: dict[int, View] = {}
        self._known: dict[tuple[int, int], bool] = {}

    # --- the beginning --------------------------------------------------------------------------

    def begin(self) -> ModelState:
        """The state in which the flow starts: all sites act on the first view, are connected, and
        have told each other so."""
        control = self.controls.add(ModelControl(self.shape, 2))
        draft = _Draft(ModelState(control, (), (), (0, 1), (), (), (), 0, 0, 0))
        draft.written = [0] * min(2, self.bounds.partitions)
        for site in (0, 1):
            self._start(draft, site)
        while queued := [link for link, queue in draft.links.items() if queue]:
            self._deliver(draft, min(queued))
        if not self.bounds.cuts:
            self._record(draft, self.bounds.epochs)
        draft.crashes, draft.suspicions = self.bounds.crashes, self.bounds.suspicions
        return draft.state()

    def view(self, control: int) -> View:
        """The latest view of a controller."""
        found = self._views.get(control)
        if found is None:
            found = self._views[control] = self.controls.get(control).controller.view
        return found

    # --- what can happen ------------------------------------------------------------------------

    def moves(self, state: ModelState) -> Iterator[Move]:
        """All events that can happen next."""
        if state.ended is not None:
            return
        for site, machine in state.sites:
            for kind, _, what in self._work_of(machine):
                yield Move(kind, (site,), what)
        alive = dict(state.sites)
        for link, queue in state.links:
            if queue:
                yield Move("deliver", link)
                if link[0] not in alive and CONTROL not in link and len(queue) > 1:
                    yield Move("lose", link)
        yield from (Move("start", (site,)) for site in state.starting)
        yield from (Move("timer", (), (timer,)) for timer in state.timers)
        yield from (Move("notice", (site,)) for site in state.unnoticed)
        if len(state.unnoticed) > 1:
            yield Move("notice", state.unnoticed)
        if state.recorded < self.bounds.epochs:
            yield Move("record", ())
        yield from self._faults(state)

    def _faults(self, state: ModelState) -> Iterator[Move]:
        if state.crashes:
            yield from (Move("crash", (site,)) for site, _ in state.sites)
        if state.suspicions:
            members = self.view(state.control).members
            yield from (Move("suspect", (s,)) for s, _ in state.sites if s in members)

    def _work_of(self, machine: int) -> tuple[Move, ...]:
        """What a site can do by itself."""
        found = self._work.get(machine)
        if found is None:
            site = self.sites.get(machine)
            works = [Move("work", (), task) for task in site.orders]
            rests = [Move("rest", (), (*task, joiner)) for task, joiner in site.outgoing]
            found = self._work[machine] = (*works, *rests)
        return found

    # --- what it leads to -----------------------------------------------------------------------

    def after(self, state: ModelState, move: Move) -> ModelState:
        """The state after an event; raises `Broken` or `Violation`."""
        draft = _Draft(state)
        match move.kind:
            case "deliver":
                self._deliver(draft, (move.who[0], move.who[1]))
            case "work":
                self._step_site(draft, move.who[0], ("work", move.what), "work", move.what)
            case "rest":
                task, joiner = move.what[:2], move.what[2]
                self._step_site(draft, move.who[0], ("rest", move.what), "rest", task, joiner)
            case "crash":
                self._crash(draft, move.who[0])
            case "notice":
                self._notice(draft, move.who)
            case "suspect":
                draft.suspicions -= 1
                self._step_control(draft, ("failed", move.who, False), "failed", move.who, False)
            case "lose":
                draft.links[move.who[0], move.who[1]] = (self._down,)
            case "start":
                self._start(draft, move.who[0])
            case "timer":
                draft.timers.remove(move.what[0])
                timer = self.timers.all[move.what[0]]
                self._step_control(draft, ("timer", move.what[0]), "timer", timer)
            case "record":
                self._record(draft, draft.recorded + 1)
            case _:
                raise ValueError(move)
        self._drop_stale(draft)
        return draft.state()

    def _drop_stale(self, draft: _Draft) -> None:
        """Drop reports about earlier views. The controller ignores them, now and later, so a state
        with them is the same as one without."""
        if draft.ended is not None:
            return
        number = self.view(draft.control).number
        for link, queue in draft.links.items():
            if link[1] == CONTROL and queue:
                left = tuple(m for m in queue if not self._is_stale(m, number))
                if len(left) < len(queue):
                    draft.links[link] = left

    def _is_stale(self, message: int, number: int) -> bool:
        found = self.messages.all[message]
        return isinstance(found, ms.ViewActedOn | ms.SiteDone) and found.number < number

    def _start(self, draft: _Draft, site: int) -> None:
        draft.starting.remove(site)
        made = ModelSite(SiteId(site), self.shape, self.bounds.window)
        draft.sites[site] = self.sites.add(made)
        draft.links[site, CONTROL] = draft.links[CONTROL, site] = ()
        if draft.recorded:
            self._give_records(draft, site, 0)
        self._step_control(draft, ("registered", site), "registered", site)

    def _record(self, draft: _Draft, upto: int) -> None:
        """Record epochs. All sites learn of it at once."""
        first, draft.recorded = draft.recorded, upto
        for site in list(draft.sites):
            self._give_records(draft, site, first)

    def _give_records(self, draft: _Draft, site: int, first: int) -> None:
        what = (first, draft.recorded, self.bounds.epochs)
        self._step_site(draft, site, ("records", *what), "records", *what)

    def _deliver(self, draft: _Draft, link: Link) -> None:
        sender, receiver = link
        number, *rest = draft.links[link]
        draft.links[link] = tuple(rest)
        message = self.messages.all[number]
        if number == self._down:
            del draft.links[link]
        if receiver == CONTROL:
            self._step_control(draft, ("message", sender, number), "message", sender, message)
        else:
            key = ("message", sender, number)
            self._step_site(draft, receiver, key, "message", sender, message)

    def _crash(self, draft: _Draft, site: int) -> None:
        draft.crashes -= 1
        view = self.view(draft.control)
        living = set(draft.sites) - {site}
        groups = [view.group(task) for task in view.tasks()]
        if not all(living.intersection(group.replicas) for group in groups):
            draft.exceeded = True
        self._vanish(draft, site)
        if site in view.members or self._is_waiting(draft.control, site):
            draft.unnoticed.append(site)

    def _is_waiting(self, control: int, site: int) -> bool:
        """Whether the controller counts on a site that is no member."""
        known = self._known.get((control, site))
        if known is None:
            roster = self.controls.get(control).controller.roster
            known = self._known[control, site] = roster.knows(site)
        return known

    def _notice(self, draft: _Draft, sites: tuple[int, ...]) -> None:
        for site in sites:
            draft.unnoticed.remove(site)
            draft.links.pop((site, CONTROL), None)
        self._step_control(draft, ("failed", sites, True), "failed", sites, True)

    def _vanish(self, draft: _Draft, site: int) -> None:
        del draft.sites[site]
        for link in [k for k in draft.links if site in k]:
            _, receiver = link
            if receiver == site:
                del draft.links[link]
            elif receiver in draft.sites:
                draft.links[link] = (*draft.links[link], self._down)

    # --- outputs --------------------------------------------------------------------------------

    def _step_site(self, draft: _Draft, site: int, key: Key, kind: str, *what: object) -> None:
        machine, outputs = self.sites.step(draft.sites[site], key, kind, *what)
        draft.sites[site] = machine
        for output in outputs:
            self._apply(draft, site, output)

    def _step_control(self, draft: _Draft, key: Key, kind: str, *what: object) -> None:
        draft.control, outputs = self.controls.step(draft.control, key, kind, *what)
        for output in outputs:
            self._apply(draft, CONTROL, output)

    def _apply(self, draft: _Draft, who: int, output: Output) -> None:
        match output:
            case Send():
                self._put(draft, (who, output.site), output.message)
                if output.message == self._fenced:
                    draft.links.pop((output.site, CONTROL), None)
                    if output.site in draft.unnoticed:
                        draft.unnoticed.remove(output.site)
            case Tell():
                self._put(draft, (who, CONTROL), output.message)
            case Members():
                self._connect(draft, who, output.members)
            case Write():
                self._write(draft, output.task[1], output.epoch, output.result, who)
            case Join():
                for epoch, result in enumerate(output.results):
                    self._write(draft, output.task[1], epoch, result, who)
            case Vanish():
                self._vanish(draft, who)
            case LaunchOrder():
                draft.starting.append(output.site)
            case StartTimer():
                draft.timers.append(self.timers.number(output.timer))
            case FlowOver():
                self._end(draft, output.error)

    def _put(self, draft: _Draft, link: Link, message: int) -> None:
        queue = draft.links.get(link)
        if queue is not None and link[1] != CONTROL and link[1] not in draft.sites:
            return
        if queue is not None:
            draft.links[link] = (*queue, message)

    def _connect(self, draft: _Draft, site: int, members: tuple[int, ...]) -> None:
        """A site accepts nothing from sites that are not members, and connects to those that
        are."""
        for one, other in [k for k in draft.links if site in k and CONTROL not in k]:
            peer = one if other == site else other
            if peer in members:
                continue
            del draft.links[one, other]
            if other != site and other in draft.sites:
                draft.links[one, other] = (self._down,)
        for other in members:
            if other != site and other in draft.sites and (other, site) not in draft.links:
                lost = (self._down,) if (site, other) in draft.links else ()
                draft.links[site, other] = (*lost, self._up)
                draft.links[other, site] = (self._up,)

    def _write(self, draft: _Draft, group: int, epoch: int, result: int, site: int) -> None:
        task = (flow.LAST, GroupId(group))
        producers = len(self.view(draft.control).groups[flow.SOURCE])
        if epoch > draft.written[group]:
            raise Violation(f"site {site} wrote epoch {epoch} of {task}, and the one before lacks")
        if result != flow.reference(task, epoch, producers):
            raise Violation(f"site {site} wrote a wrong result of {task}, epoch {epoch}")
        draft.written[group] = max(draft.written[group], epoch + 1)

    def _end(self, draft: _Draft, error: str) -> None:
        draft.ended = error
        if error and not draft.exceeded:
            raise Violation(f"the flow stopped without a reason: {error}")
        if not error and any(n != self.bounds.epochs for n in draft.written):
            raise Violation(f"the flow ended, and the store has {draft.written} epochs")
