"""The canonical form of a machine: equal for two machines that behave alike from now on.

`freeze` turns an object and everything that it refers to into nested tuples of plain values. It
leaves out what no decision depends on: histories for error messages, counters of discarded events,
and how long orders took. A producer counts the bundles of a lane from the lane's beginning; here
they count from the oldest that is kept.
"""

from __future__ import annotations

import marshal
from collections import deque
from enum import Enum
from hashlib import blake2b
from typing import Any

from holdfast.core.exchange import _Lane
from holdfast.core.layout import View

OMITTED: dict[str, frozenset[str]] = {
    kind: frozenset(names.split())
    for kind, names in {
        # What never changes in a world of pairs, or is elsewhere in the machine:
        "ModelSite": "_out",
        "ModelControl": "_out",
        "Dataflow": "site shape window begun stale",
        "SiteExchanges": "_site _shape _view producers consumers",
        "Replica": "shape history _begun _window _levels _hurried search needs retain_after",
        "Work": "_paces _amount",
        "Donor": "key _stored given",
        "Producer": "exchange group level complete _deterministic _log _part",
        "Consumer": "exchange group _deterministic _parts _counted",
        "KnownRecords": "by_epoch ended",
        "Controller": "shape term _mirrors",
        "Lifecycle": "history",
        "ReplicaJoins": "replaying _chain_changed",
        "SiteRoster": "_relaunch_ms spares dead replaced addresses",
        "ViewReports": "_retained",
        "EarlyEvents": "queries",
        "DoubtfulLosses": "",
    }.items()
}
"""By class: attributes that no decision in this world depends on, or that follow from others."""
_SLOTS: dict[type, tuple[str, ...]] = {}
_VIEWS: dict[View, int] = {}


def view_number(view: View) -> int:
    """Equal views have the same number, in this process."""
    return _VIEWS.setdefault(view, len(_VIEWS))


def digest(value: Any) -> bytes:
    """The fingerprint of an object's canonical form."""
    return digest_of(freeze(value))


def digest_of(form: Any) -> bytes:
    """The fingerprint of a canonical form."""
    return blake2b(marshal.dumps(form, 2), digest_size=16).digest()


def freeze(value: Any) -> Any:
    """Return nested tuples that say all that counts of an object."""
    kind = type(value)
    if kind is int or kind is str or kind is bool or value is None:
        return value
    if kind is dict:
        return ("{", *[(freeze(k), freeze(v)) for k, v in value.items()])
    if kind is set or kind is frozenset:
        return ("s", *sorted(freeze(v) for v in value))
    if kind is View:
        return view_number(value)
    if kind is _Lane:
        return _lane(value)
    if kind is tuple or kind is list or kind is deque:
        return tuple([freeze(v) for v in value])
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple):
        return (kind.__name__, *[freeze(v) for v in value])
    if isinstance(value, float):
        return value
    if isinstance(value, int):
        return int(value)
    return (kind.__name__, *[freeze(v) for v in _fields(value)])


def _fields(value: Any) -> list[Any]:
    kind = type(value)
    names = _SLOTS.get(kind)
    if names is None:
        slots = [s for k in kind.__mro__ for s in getattr(k, "__slots__", ())]
        omitted = OMITTED.get(kind.__name__, frozenset())
        names = tuple(n for n in (*slots, *getattr(value, "__dict__", ())) if n not in omitted)
        _SLOTS[kind] = names
    return [getattr(value, n) for n in names]


def _lane(lane: _Lane) -> Any:
    """A lane, with its cursors counted from the oldest bundle that is kept."""
    cursors = [
        (
            site,
            c.joined_view,
            c.received,
            c.levels,
            c.credit,
            c.subscribed,
            max(0, c.next - lane.trimmed) if c.subscribed else 0,
        )
        for site, c in lane.cursors.items()
    ]
    rest = (lane.kept, lane.trimmed_upto)
    return ("lane", freeze(cursors), freeze(rest), freeze(sorted(lane.claims.items())))
