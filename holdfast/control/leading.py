"""What a control knows and has under way in one term. All of it dies with the term."""

from __future__ import annotations

import msgspec

from holdfast import errors
from holdfast.core.controller import Controller, State
from holdfast.core.effects import (
    CommitView,
    ControllerEffect,
    DrainFlow,
    EndFlow,
    FenceSite,
    StartFlow,
)
from holdfast.core.ids import SiteId
from holdfast.core.layout import Domain, View


class Knowledge(msgspec.Struct, frozen=True):
    """The value of the arbiter's entry: what a controller knows that another needs to go on."""

    view: View | None
    addresses: dict[int, tuple[str, int]]
    domains: dict[int, Domain]
    app_of: dict[int, int]
    dead: dict[int, str]
    launched: list[int]
    running: bool
    draining: bool
    ended: bool = False
    error: str | None = None

    @property
    def failure(self) -> Exception | None:
        """What a flow that has ended failed with."""
        return errors.HoldfastError(self.error) if self.error else None

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)


def decode(value: bytes) -> Knowledge:
    return msgspec.msgpack.decode(value, type=Knowledge)


NEEDS_COMMIT = (CommitView, StartFlow, DrainFlow, FenceSite, EndFlow)
"""Decisions that a successor must know before anybody acts on them."""


class Leading:
    """One term. Decisions wait here until what they rest on is committed: `under_way` for the
    commit that the arbiter was asked for, `waiting` for the next one."""

    def __init__(
        self, term: int, controller: Controller, app_of: dict[int, int], running: bool
    ) -> None:
        self.term, self.controller, self.app_of = term, controller, app_of
        self.running = running
        """Whether sources may be read, as far as that is committed."""
        self.agents: list[int] = []
        """The applications whose controls follow this one."""
        self.under_way: list[ControllerEffect] = []
        self.waiting: list[ControllerEffect] = []
        self._back: dict[SiteId, None] = {}
        """Who has registered again while something was under way."""

    @property
    def frozen(self) -> bool:
        """Whether a decision is not committed yet: until then nothing else that can wait is."""
        return bool(self.under_way or self.waiting)

    @property
    def ends(self) -> bool:
        return self.controller.state in (State.DONE, State.FAILED)

    @property
    def error(self) -> Exception | None:
        """What the flow has failed with."""
        decided = [*self.under_way, *self.waiting]
        return next((e.error for e in decided if isinstance(e, EndFlow)), None)

    @property
    def to_commit(self) -> bool:
        """Whether something waits that must be committed. As long as there is no view there is
        nothing to go on from: whoever leads next begins the flow again."""
        begun = self.ends or self.controller.view is not None
        return begun and any(isinstance(e, NEEDS_COMMIT) for e in self.waiting)

    def add(self, effect: ControllerEffect) -> None:
        """Of several views that wait only the last is committed, and is to be acted on."""
        if isinstance(effect, CommitView):
            self.waiting = [e for e in self.waiting if not isinstance(e, CommitView)]
        self.waiting.append(effect)

    def begin(self) -> None:
        """The arbiter is asked, or will be when it has answered: what waits goes along."""
        if not self.under_way:
            self.under_way, self.waiting = self.waiting, []

    def done(self, more: bool) -> list[ControllerEffect]:
        """What may be carried out; `more`: what came later is being committed now."""
        done, rest = self.under_way, self.waiting
        self.under_way, self.waiting = (rest, []) if more else ([], [])
        return done if more else [*done, *rest]

    def released(self) -> list[ControllerEffect]:
        """What waits for nothing."""
        waiting, self.waiting = self.waiting, []
        return waiting

    def came_back(self, site: SiteId) -> None:
        self._back[site] = None

    def returned(self) -> list[SiteId]:
        back, self._back = list(self._back), {}
        return back

    def note_app(self, site: SiteId) -> None:
        """A site that is launched in place of another belongs to the same application."""
        before = next((o for o, n in self.controller.replaced.items() if n == site), None)
        self.app_of[site] = self.app_of.get(before, 0) if before is not None else 0

    def knowledge(self) -> Knowledge:
        controller, error = self.controller, self.error
        return Knowledge(
            controller.view,
            {int(s): a for s, a in controller.addresses.items()},
            {int(s): d for s, d in controller.domains.items()},
            self.app_of,
            {int(s): r for s, r in controller.dead.items()},
            sorted(int(s) for s in controller.launched),
            controller.running,
            controller.state is State.DRAINING,
            self.ends,
            str(error) if error else None,
        )
