"""What must hold between the sites of the model, in every state.

The machines check themselves in every step (`holdfast.lab.model.site`). These are the conditions
that no machine can check alone, the same as in `holdfast.lab.sim.checks`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from holdfast.core.exchange import Producer
from holdfast.core.ids import GroupId
from holdfast.core.layout import View
from holdfast.lab.model.flow import LAST, SOURCE
from holdfast.lab.model.memo import Fingerprints, Memo
from holdfast.lab.model.site import ModelSite
from holdfast.lab.model.state import Rows
from holdfast.lab.model.world import ModelWorld
from holdfast.lab.sim.checks import Violation

_SPREAD = np.uint64(0xD6E8FEB86659FD93)


class _LaneFacts(NamedTuple):
    """What a producer has for a consumer, and what it believes of the consumer's replicas."""

    made: int
    oldest: int | None
    """The oldest bundle that is kept."""
    believed: tuple[tuple[int, int, int], ...]
    """Site of a replica, the view in which it joined, and what it is believed to have."""


class _Facts(NamedTuple):
    """What counts of a site here."""

    received: dict[int, tuple[int, dict[int, int]]]
    """By consumer: the view in which it joined, and what it has of each producer."""
    lanes: dict[tuple[int, int], _LaneFacts]
    """By producer and consumer."""


class StateChecks:
    """Checks states of a world; the same facts are checked once."""

    def __init__(self, world: ModelWorld) -> None:
        self._world = world
        self._facts: list[_Facts | None] = [None]
        self._numbers: dict[str, int] = {}
        self._of_machine, self._of_control = Memo(self._facts_of), Memo(self._view_of)
        self._views: list[View | None] = [None]
        self._right = Fingerprints()

    def check(self, rows: Rows) -> tuple[int, str] | None:
        """Which of these states is wrong, and why; None if all are right."""
        c = self._world.columns
        views = self._of_control(rows[c.control].astype(np.int64))
        facts = [self._of_machine(rows[m].astype(np.int64)) for m in c.machine]
        keys = views.astype(np.uint64)
        for known in facts:
            keys = (keys ^ (keys >> np.uint64(29))) * _SPREAD + known.astype(np.uint64)
        for at in np.flatnonzero(self._right.add(np.maximum(keys, np.uint64(1)))).tolist():
            try:
                self._check(int(views[at]), [int(known[at]) for known in facts])
            except Violation as violation:
                return at, str(violation)
        return None

    def _check(self, view: int, numbers: list[int]) -> None:
        facts = {s: known for s, n in enumerate(numbers) if (known := self._facts[n]) is not None}
        for site, known in facts.items():
            _acked_no_more_than_received(site, known, facts)
        if (latest := self._views[view]) is not None:
            _nothing_lost(latest, facts)

    def _facts_of(self, machine: int) -> int:
        if not machine:
            return 0
        facts = _facts(self._world.sites.get(machine))
        found = self._numbers.setdefault(repr(facts), len(self._facts))
        if found == len(self._facts):
            self._facts.append(facts)
        return found

    def _view_of(self, control: int) -> int:
        view = self._world.view(control) if control else None
        if view not in self._views:
            self._views.append(view)
        return self._views.index(view)


def _facts(site: ModelSite) -> _Facts:
    exchanges = site.dataflow.exchanges
    received = {
        int(group): (consumer.joined_view, {int(p): int(e) for p, e in consumer.received.items()})
        for (_, group), consumer in exchanges.consumers.items()
    }
    lanes = {
        (int(producer.group), int(group)): _lane(producer, group)
        for producer in exchanges.producers.values()
        for group in producer.lanes
    }
    return _Facts(received, lanes)


def _lane(producer: Producer, group: GroupId) -> _LaneFacts:
    lane = producer.lanes[group]
    believed = tuple((s, c.joined_view, c.received) for s, c in lane.cursors.items())
    return _LaneFacts(producer.made, lane.kept[0].epoch if lane.kept else None, believed)


def _acked_no_more_than_received(site: int, known: _Facts, facts: dict[int, _Facts]) -> None:
    for (producer, consumer), lane in known.lanes.items():
        for replica, joined_view, believed in lane.believed:
            there = facts[replica].received.get(consumer) if replica in facts else None
            if there is not None and there[0] == joined_view and believed > there[1][producer]:
                raise Violation(
                    f"site {site} believes that counts/{consumer} at site {replica} has epoch "
                    f"{believed} of source/{producer}; it has {there[1][producer]}"
                )


def _nothing_lost(view: View, facts: dict[int, _Facts]) -> None:
    """For every epoch that a live replica lacks, a live replica of the producer holds the bundle,
    or will make it."""
    for consumer, group in enumerate(view.groups[LAST]):
        for site in group.replicas:
            there = facts[site].received.get(consumer) if site in facts else None
            for producer, received in there[1].items() if there is not None else ():
                live = [s for s in view.groups[SOURCE][producer].replicas if s in facts]
                lanes = [facts[s].lanes.get((producer, consumer)) for s in live]
                if lanes and not any(_holds(lane, received) for lane in lanes if lane is not None):
                    raise Violation(
                        f"counts/{consumer} at site {site} has epoch {received} of "
                        f"source/{producer}, and no live replica of that has the next one"
                    )


def _holds(lane: _LaneFacts, received: int) -> bool:
    return lane.made <= received or (lane.oldest is not None and lane.oldest <= received + 1)
