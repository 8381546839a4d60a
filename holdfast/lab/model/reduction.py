"""Leaves orders out that make no difference: partial-order reduction by persistent sets.

An event belongs to the site, or to the controller, whose machine takes the step. Apart from that
machine it only takes the oldest message of one link, and adds messages to the end of others. So
events of two machines commute, as long as none of them takes what the other adds: a message that is
added to a link which is not empty.

Let every link to a machine, from a machine that lives, have a message under way. Then nothing that
other machines do adds an event to those that this machine can take next, or removes one: they only
add messages behind those. Hence its events are a persistent set, and it is enough to let one of
them happen next. This holds only when

- no fault is left that may happen: a crash adds and removes events of others,
- no site is about to start, and no epoch is about to be recorded, as both add events to others,
- and the next view in line, if there is one, neither makes nor drops connections, which changes
  links in both directions.

An end of the flow stops all other events. It is reached in every order, with the same result.

No event can happen twice on a way (view numbers, epochs and messages sent only grow), so none is
put off for ever. Persistent sets keep every end, every state in which nothing can happen, and every
step of every machine. They do not keep every combination of states of two machines, so the checks
between sites (`holdfast.lab.model.checks`) see fewer of these: the search has the reduction off
unless it is asked for.
"""

from __future__ import annotations

from holdfast.lab.model import messages as ms
from holdfast.lab.model.state import CONTROL, ModelState, Move
from holdfast.lab.model.world import ModelWorld

_OF_CONTROL = ("timer", "notice")


class Reduction:
    """Chooses which events of a state are enough."""

    def __init__(self, world: ModelWorld) -> None:
        self._world = world

    def enough(self, state: ModelState, moves: list[Move]) -> list[Move]:
        """A persistent set of these events: those of one machine, or all."""
        if state.crashes or state.suspicions or state.starting or len(moves) < 2:
            return moves
        if state.recorded < self._world.bounds.epochs:
            return moves
        links, alive = dict(state.links), [site for site, _ in state.sites]
        if self._fences(links):
            return moves
        smallest = moves
        for machine in (CONTROL, *alive):
            senders = [s for s in (CONTROL, *alive) if s != machine]
            if not all(links.get((s, machine)) for s in senders):
                continue
            if machine != CONTROL and self._relinks(machine, links, alive):
                continue
            own = [move for move in moves if owner(move) == machine]
            if own and len(own) < len(smallest):
                smallest = own
        return smallest

    def _fences(self, links: dict[tuple[int, int], tuple[int, ...]]) -> bool:
        """Whether a site is about to be fenced, which ends it."""
        messages = self._world.messages.all
        ordered = [m for (s, _), queue in links.items() if s == CONTROL for m in queue]
        return any(isinstance(messages[m], ms.FenceSent) for m in ordered)

    def _relinks(
        self, site: int, links: dict[tuple[int, int], tuple[int, ...]], alive: list[int]
    ) -> bool:
        """Whether the site's next view makes or drops connections."""
        message = self._world.messages.all[links[CONTROL, site][0]]
        if not isinstance(message, ms.ViewSent):
            return False
        members = set(message.view.members)
        peers = {a if b == site else b for a, b in links if site in (a, b)} - {CONTROL}
        return peers != members - {site} or not members.issubset(alive)


def owner(move: Move) -> int:
    """The machine that takes the step."""
    if move.kind in _OF_CONTROL:
        return CONTROL
    return move.who[-1] if move.kind in ("deliver", "lose") else move.who[0]
