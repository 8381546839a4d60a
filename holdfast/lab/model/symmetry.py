"""States that differ only in the numbers of sites count as one.

After the crash of either site of a pair the rest is the same, apart from the numbers. `SiteNames`
numbers sites by the place at which the latest view names them first, and all others behind them, in
the order of their launch. Two states with the same form under these numbers behave alike: the
machines compare sites only for equality, except where several could take a replica, and here there
is never more than one.

Only the key under which a visited state is remembered is renamed, never a machine.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.core.layout import PartitionGroup, View
from holdfast.lab.model.freeze import OMITTED, digest_of, freeze
from holdfast.lab.model.state import CONTROL, ModelState
from holdfast.lab.model.world import ModelWorld

Names = Mapping[int, int]
Form = Callable[[Any, Names], Any]


def _site(value: Any, names: Names) -> Any:
    return names.get(value, value)


def _set(value: Any, names: Names) -> Any:
    return tuple(sorted(names[s] for s in value))


def _list(value: Any, names: Names) -> Any:
    return tuple(names[s] for s in value)


def _by_site(value: Any, names: Names) -> Any:
    return tuple((names[s], frozen(v, names)) for s, v in value.items())


def _of_sites(value: Any, names: Names) -> Any:
    return tuple((freeze(k), names.get(s, s)) for k, s in value.items())


def _of_lists(value: Any, names: Names) -> Any:
    return tuple((freeze(k), _list(sites, names)) for k, sites in value.items())


def _by_task_and_site(value: Any, names: Names) -> Any:
    return tuple(((freeze(u), names[s]), frozen(v, names)) for (u, s), v in value.items())


def _orders(value: Any, names: Names) -> Any:
    return tuple(((u, names[s]), (names[d], int(n))) for (u, s), (d, n) in value.items())


def _early(value: Any, names: Names) -> Any:
    return tuple(((*ends[:3], names[ends[3]]), freeze(e.ack)) for ends, e in value.items())


def _losses(value: Any, names: Names) -> Any:
    return tuple((n, _list(loss.sites, names)) for n, loss in value.items())


FORMS: dict[tuple[str, str], Form] = {
    ("ModelSite", "site"): _site,
    ("ModelSite", "incoming"): _of_sites,
    ("ModelSite", "outgoing"): _by_task_and_site,
    ("ModelSite", "failed"): _by_task_and_site,
    ("SiteExchanges", "connected"): _set,
    ("EarlyEvents", "acks"): _early,
    ("Replica", "source_site"): _site,
    ("Donor", "due"): _by_site,
    ("Donor", "handed"): _by_site,
    ("_Lane", "cursors"): _by_site,
    ("Consumer", "source"): _of_sites,
    ("Consumer", "_replicas"): _of_lists,
    ("CatchUpSent", "joiner"): _site,
    ("ReplicaSaid", "site"): _site,
    ("SiteRoster", "sites"): _set,  # once the flow runs, only how many there are counts
    ("SiteRoster", "launched"): _set,
    ("SiteRoster", "domains"): _set,
    ("SiteRoster", "_next_id"): _site,
    ("SiteRoster", "_failed_starts"): _by_site,
    ("ReplicaJoins", "ordered"): _orders,
    ("DoubtfulLosses", "_waiting"): _losses,
    ("ViewReports", "_seen"): _set,
    ("ViewReports", "_finished"): _set,
}
"""Where machines and messages have numbers of sites."""


def frozen(value: Any, names: Names) -> Any:
    """The canonical form of a machine or message with these names of sites."""
    kind = type(value)
    if kind is View:
        return _view(value, names)
    if kind is dict:
        return ("{", *[(freeze(k), frozen(v, names)) for k, v in value.items()])
    if kind is tuple or kind is list:
        return tuple([frozen(v, names) for v in value])
    fields = getattr(value, "_fields", None) or _attributes(value)
    if kind.__name__ not in CONTAINERS:
        return freeze(value)
    omitted = OMITTED.get(kind.__name__, frozenset())
    return (kind.__name__, *[_field(value, f, names) for f in fields if f not in omitted])


CONTAINERS = {owner for owner, _ in FORMS} | {
    "ModelControl",
    "Controller",
    "Dataflow",
    "Producer",
    "ViewSent",
}
"""The classes that have numbers of sites, or refer to such."""


def _attributes(value: Any) -> list[str]:
    slots = [s for k in type(value).__mro__ for s in getattr(k, "__slots__", ())]
    return [*slots, *getattr(value, "__dict__", ())]


def _field(value: Any, name: str, names: Names) -> Any:
    found, form = getattr(value, name), FORMS.get((type(value).__name__, name))
    if type(value).__name__ == "_Lane":
        # Counted from the oldest bundle that is kept, as `freeze` counts.
        if name == "cursors":
            _, cursors, *_ = freeze(value)
            return tuple((names[c[0]], *c[1:]) for c in cursors)
        return None if name not in ("kept", "trimmed_upto", "claims") else freeze(found)
    return form(found, names) if form is not None else frozen(found, names)


def _view(view: View, names: Names) -> Any:
    groups = tuple(tuple(_group(g, names) for g in stage) for stage in view.groups)
    return (int(view.number), _set(view.members, names), groups)


def _group(group: PartitionGroup, names: Names) -> Any:
    joined = tuple((names[s], int(n)) for s, n in group.joined_view)
    return (_list(group.replicas, names), _list(group.joining, names), joined)


class SiteNames:
    """Makes the keys of a world's states."""

    def __init__(self, world: ModelWorld) -> None:
        self._world = world
        bounds = world.bounds
        self._sites = range(3 + bounds.crashes + bounds.suspicions)
        self._names: dict[int, tuple[int, Names]] = {}
        """By controller: the names, and their number."""
        self._known: dict[tuple[tuple[int, int], ...], int] = {}
        self._forms: dict[tuple[str, int, int], int] = {}
        self._numbers: dict[bytes, int] = {}

    def key(self, state: ModelState) -> tuple[Any, ...]:
        """Equal for states that differ only in the numbers of sites."""
        if state.ended is not None:
            return tuple(state)
        number, names = self._names_of(state.control)
        messages = self._world.messages.all
        links = [
            (
                (names.get(a, a), names.get(b, b)),
                tuple([self._form("message", m, number, names, messages) for m in queue]),
            )
            for (a, b), queue in state.links
        ]
        sites = [(names[s], self._form("site", m, number, names, None)) for s, m in state.sites]
        return (
            self._form("control", state.control, number, names, None),
            tuple(sorted(sites)),
            tuple(sorted(links)),
            tuple(names[s] for s in state.starting),
            state.timers,
            tuple(sorted(names[s] for s in state.unnoticed)),
            *state[6:],
        )

    def _names_of(self, control: int) -> tuple[int, Names]:
        found = self._names.get(control)
        if found is None:
            view = self._world.view(control)
            first = [s for u in view.tasks() for s in view.group(u).all]
            names = {CONTROL: CONTROL}
            for site in (*first, *self._sites):
                names.setdefault(site, len(names) - 1)
            number = self._known.setdefault(tuple(names.items()), len(self._known))
            found = self._names[control] = (number, names)
        return found

    def _form(self, kind: str, part: int, number: int, names: Names, values: Any) -> int:
        found = self._forms.get((kind, part, number))
        if found is None:
            parts = {"control": self._world.controls, "site": self._world.sites}
            value = values[part] if values is not None else parts[kind].get(part)
            key = digest_of((kind, frozen(value, names)))
            found = self._numbers.setdefault(key, len(self._numbers))
            self._forms[kind, part, number] = found
        return found
