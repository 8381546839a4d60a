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
- no site is about to start, to be noticed dead or to be fenced, as that adds or ends events of
  others,
- and no view that is under way, or the latest, makes or drops a connection, because that changes
  both directions of a link: all sites that live are connected, and are the members of these views.

An end of the flow stops all other events. It is reached in every order, with the same result.

No event can happen twice on a way (view numbers, epochs and messages sent only grow), so none is
put off for ever. Persistent sets keep every end, every state in which nothing can happen, and every
step of every machine. They do not keep every combination of states of two machines, so the checks
between sites (`holdfast.lab.model.checks`) see fewer of these: the search has the reduction off
unless it is asked for.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.lab.model.state import CONTROL, Rows
from holdfast.lab.model.world import EVERY, ModelWorld

_BOTH = 3


class Reduction:
    """Chooses which events of a state are enough."""

    def __init__(self, world: ModelWorld) -> None:
        self._world = world

    def only(self, rows: Rows) -> NDArray[np.int64]:
        """By state: the machine whose events are enough, or `EVERY`."""
        c, lives = self._world.columns, self._world.living(rows)
        orders = [self._world.control_heads(rows[c.control_link[s]]) for s in c.sites]
        links = {pair: self._world.heads(rows[k]) for pair, k in c.site_link.items()}
        quiet = self._is_quiet(rows, lives, orders, links)
        found = np.full(rows.shape[1], EVERY, np.int64)
        for site in c.sites:
            full = quiet & (lives >> site & 1 > 0) & (orders[site][:, 0] >= 0)
            for other in c.sites:
                if other != site:
                    pair = (min(site, other), max(site, other))
                    head = links[pair][:, 0 if other < site else 3]
                    full &= (head >= 0) | (lives >> other & 1 == 0)
            found[full] = site
        full = quiet & (lives > 0)
        for site in c.sites:
            full &= (orders[site][:, 2] >= 0) | (lives >> site & 1 == 0)
        found[full] = CONTROL
        return found

    def _is_quiet(
        self,
        rows: Rows,
        lives: NDArray[np.int64],
        orders: list[NDArray[Any]],
        links: dict[tuple[int, int], NDArray[Any]],
    ) -> NDArray[np.bool_]:
        """Whether nothing is left that ends or begins a site, or changes connections."""
        c = self._world.columns
        starting, _, unnoticed, crashes, suspicions, _ = self._world.rest_facts(rows[c.rest]).T
        quiet = (starting | unnoticed | crashes | suspicions) == 0
        quiet &= self._world.control_facts(rows[c.control])[:, 1] == lives
        for found in orders:
            quiet &= (found[:, 5] == 0) & ((found[:, 6] == lives) | (found[:, 6] == -1))
        for (a, b), found in links.items():
            together = lives >> a & lives >> b & 1 > 0
            quiet &= ~together | (found[:, 6] == _BOTH)
        return quiet
