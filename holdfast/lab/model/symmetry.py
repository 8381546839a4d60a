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
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from holdfast.core.layout import PartitionGroup, View
from holdfast.lab.model.freeze import OMITTED, digest_of, freeze
from holdfast.lab.model.links import Rest
from holdfast.lab.model.memo import Hashes, Memo
from holdfast.lab.model.state import CONTROL, Rows
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
    ("DepartedSites", "sites"): _set,
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


class StateKeys:
    """Makes the fingerprints of a world's states.

    The fingerprint of a row is the sum of one number for each column: that of the value's form,
    times an odd number for its place. Without `symmetry` sites keep their numbers."""

    def __init__(self, world: ModelWorld, symmetry: bool) -> None:
        self._world, self._symmetry = world, symmetry
        self._names: list[Names] = []
        self._numbers: dict[tuple[tuple[int, int], ...], int] = {}
        self._by_control = Memo(self._names_of)
        self._hashes: dict[tuple[str, int], NDArray[np.uint64]] = {}
        self._message_forms: dict[tuple[int, int], bytes] = {}

    def of(self, rows: Rows) -> Hashes:
        """Equal for states that differ only in the numbers of sites; never 0."""
        columns = self._world.columns
        found = np.zeros(rows.shape[1], np.uint64)
        names = self._by_control(rows[columns.control].astype(np.int64))
        for number in np.unique(names).tolist():
            where = np.flatnonzero(names == number)
            part = rows[:, where] if len(where) < rows.shape[1] else rows
            found[where] = self._sum(part, number)
        return np.maximum(found, np.uint64(1))

    def _sum(self, rows: Rows, number: int) -> Hashes:
        c, names = self._world.columns, self._names[number]
        total = self._hash("control", rows[c.control], number) * _odd("control", 0)
        total += self._hash("rest", rows[c.rest], number) * _odd("rest", 0)
        for site in c.sites:
            name = names[site]
            total += self._hash("site", rows[c.machine[site]], number) * _odd("site", name)
            links = rows[c.control_link[site]]
            total += self._hash("orders", links, number) * _odd("orders", name)
        for (a, b), column in c.site_link.items():
            one, other = sorted((names[a], names[b]))
            kind = "link" if names[a] < names[b] else "turned"
            odd = _odd("link", 16 * one + other)
            total += self._hash(kind, rows[column], number) * odd
        return total

    def _hash(self, kind: str, values: NDArray[Any], number: int) -> Hashes:
        table = self._hashes.get((kind, number))
        last = int(values.max(initial=0))
        if table is None or len(table) <= last:
            old = table if table is not None else np.zeros(0, np.uint64)
            table = np.zeros(max(1024, 2 * last), np.uint64)
            table[: len(old)] = old
            self._hashes[kind, number] = table
        found: Hashes = table[values]
        if not found.all():
            for value in np.unique(values[found == 0]).tolist():
                table[value] = self._hash_of(kind, value, number)
            found = table[values]
        return np.where(found == _NOTHING, np.uint64(0), found)

    def _hash_of(self, kind: str, value: int, number: int) -> int:
        form = self._form(kind, value, self._names[number], number)
        if form is None:
            return int(_NOTHING)
        return int.from_bytes(digest_of((kind.replace("turned", "link"), form))[:8], "little") | 2

    def _form(self, kind: str, value: int, names: Names, number: int) -> Any:
        """The form of a value; None if it is as good as not there."""
        world = self._world
        match kind:
            case "control":
                return frozen(world.controls.get(value), names) if value else None
            case "site":
                return frozen(world.sites.get(value), names) if value else None
            case "orders":
                return self._queues(world.control_links.all[value], number)
            case "link":
                return self._queues(world.site_links.all[value].queues, number)
            case "turned":
                return self._queues(world.site_links.all[value].queues[::-1], number)
        rest: Rest = world.rests.all[value]
        starting = tuple(sorted(names[s] for s in rest.starting))
        unnoticed = tuple(sorted(names[s] for s in rest.unnoticed))
        return tuple(rest._replace(starting=starting, unnoticed=unnoticed))

    def _queues(self, queues: Any, number: int) -> Any:
        if all(queue is None for queue in queues):
            return None
        return tuple(
            None if queue is None else tuple(self._message(m, number) for m in queue)
            for queue in queues
        )

    def _message(self, message: int, number: int) -> bytes:
        found = self._message_forms.get((message, number))
        if found is None:
            form = frozen(self._world.messages.all[message], self._names[number])
            found = self._message_forms[message, number] = digest_of(form)
        return found

    def _names_of(self, control: int) -> int:
        """The number of the names under a controller: the view's sites first, as it names them."""
        names = {CONTROL: CONTROL}
        view = self._world.view(control) if control and self._symmetry else None
        first = [s for u in view.tasks() for s in view.group(u).all] if view is not None else []
        for site in (*first, *self._world.columns.sites, len(self._world.columns.sites)):
            names.setdefault(site, len(names) - 1)
        key = tuple(names.items())
        found = self._numbers.setdefault(key, len(self._names))
        if found == len(self._names):
            self._names.append(names)
        return found


_NOTHING = np.uint64(1)


@cache
def _odd(kind: str, place: int) -> np.uint64:
    """An odd number for a place in the row."""
    return np.uint64(int.from_bytes(digest_of((kind, place))[:8], "little") | 1)
