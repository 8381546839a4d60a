"""Connections of the model: between two sites, and between a site and the controller.

A connection is one value with both directions, so that whatever one end does to it depends on this
value alone. `None` instead of a queue: there is no connection in this direction.
"""

from __future__ import annotations

from typing import Any, NamedTuple

Queue = tuple[int, ...] | None
"""Messages under way, the oldest first."""
DOWN, UP, FENCE = 0, 1, 2
"""Messages that links know: see `holdfast.lab.model.messages`."""


class SiteLink(NamedTuple):
    """Between two sites; whether each lives, and what is under way from each to the other."""

    lives: tuple[bool, bool] = (False, False)
    queues: tuple[Queue, Queue] = (None, None)

    def popped(self, side: int) -> SiteLink:
        """Without the oldest message of this sender."""
        return self.with_queue(side, (self.queues[side] or ())[1:] or self._rest(side))

    def _rest(self, side: int) -> Queue:
        """What is left of a queue after its last message: the loss of a connection ends it."""
        return None if self.queues[side] == (DOWN,) else ()

    def lost(self, side: int) -> SiteLink | None:
        """All that a dead sender had sent is lost; None if that is nothing new."""
        queue = self.queues[side] or ()
        if self.lives[side] or len(queue) < 2:
            return None
        return self.with_queue(side, (DOWN,))

    def with_queue(self, side: int, queue: Queue) -> SiteLink:
        one, other = self.queues
        return self._replace(queues=(queue, other) if side == 0 else (one, queue))

    def after(self, side: int, op: tuple[Any, ...]) -> SiteLink:
        """The link after something that the site on this side does."""
        match op:
            case ("send", message):
                return self._sent(side, message)
            case ("member",):
                return self._connected(side)
            case ("no member",):
                return self._dropped(side)
            case ("start",):
                return self._replace(lives=self._lives(side, True))
            case ("vanish",):
                return self._vanished(side)
        raise ValueError(op)

    def _lives(self, side: int, lives: bool) -> tuple[bool, bool]:
        return (lives, self.lives[1]) if side == 0 else (self.lives[0], lives)

    def _sent(self, side: int, message: int) -> SiteLink:
        queue = self.queues[side]
        if queue is None or not self.lives[1 - side] or queue[-1:] == (DOWN,):
            return self
        return self.with_queue(side, (*queue, message))

    def _connected(self, side: int) -> SiteLink:
        """The other is a member: connect to it, unless there is a connection from it."""
        other = 1 - side
        if not self.lives[other] or self.queues[other] is not None:
            return self
        lost = (DOWN,) if self.queues[side] is not None else ()
        return self.with_queue(side, (*lost, UP)).with_queue(other, (UP,))

    def _dropped(self, side: int) -> SiteLink:
        """The other is no member: accept nothing from it any more."""
        had = self.queues[side] is not None and self.lives[1 - side]
        return self.with_queue(1 - side, None).with_queue(side, (DOWN,) if had else None)

    def _vanished(self, side: int) -> SiteLink:
        """The site ends. What it had sent is under way, and then the loss is noticed."""
        queue = self.queues[side]
        if not self.lives[1 - side]:
            queue = None
        elif queue is not None and queue[-1:] != (DOWN,):
            queue = (*queue, DOWN)
        link = self.with_queue(1 - side, None).with_queue(side, queue)
        return link._replace(lives=self._lives(side, False))


class ControlLink(NamedTuple):
    """Between the controller and a site: orders, and reports."""

    orders: Queue = None
    reports: Queue = None

    def after(self, op: tuple[Any, ...]) -> ControlLink:
        match op:
            case ("send", message):
                sent = self.orders if self.orders is None else (*self.orders, message)
                reports = None if message == FENCE else self.reports
                return ControlLink(sent, reports)
            case ("tell", message):
                return self._replace(
                    reports=self.reports if self.reports is None else (*self.reports, message)
                )
            case ("start",):
                return ControlLink((), ())
            case ("vanish",):
                return self._replace(orders=None)
            case ("notice",):
                return self._replace(reports=None)
        raise ValueError(op)


class Rest(NamedTuple):
    """What else a state has."""

    starting: tuple[int, ...] = ()
    """Sites that are launched and have not registered."""
    timers: tuple[int, ...] = ()
    unnoticed: tuple[int, ...] = ()
    """Dead sites that the controller believes alive."""
    written: tuple[int, ...] = ()
    """By partition group of the last stage: how many epochs the store has."""
    crashes: int = 0
    """How many crashes may still happen."""
    suspicions: int = 0
    """How often a live site may still be believed dead."""
    ended: str | None = None
    """How the flow has ended: empty if all was delivered, else the name of the error."""
