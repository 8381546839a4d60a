"""Which containers grow: walks everything that objects refer to, and compares two walks.

A list of names would only find what its author thought of. The walker follows attributes, slots,
items, bound methods and partial functions, and adds up the lengths of all containers that are at
the same place, whatever the keys on the way to them are.
"""

from __future__ import annotations

import functools
import types
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import Enum
from typing import Any

import numpy as np
import pyarrow as pa

LEAVES = (int, float, complex, bool, Enum, type, np.ndarray, np.generic, types.ModuleType)
"""What refers to nothing of interest. State tables and Arrow data are measured by others."""
DEPTH_MAX = 40

Sizes = dict[str, int]
"""By place: how many elements the containers there have, taken together."""


def sizes(
    roots: Mapping[str, Any],
    ignored: Collection[str] = ("holdfast.lab",),
    *,
    texts: bool = True,
) -> Sizes:
    """The containers that the roots refer to; with `texts`, also the lengths of texts and bytes.
    Objects of `ignored` packages are not entered."""
    found: Sizes = {}
    seen: set[int] = set()
    waiting = deque((name, root) for name, root in roots.items())
    keep = []  # so that no id is used twice
    while waiting:
        place, value = waiting.popleft()
        if value is None or isinstance(value, LEAVES) or _is_arrow(value) or id(value) in seen:
            continue
        seen.add(id(value))
        keep.append(value)
        if type(value).__module__.startswith(tuple(ignored)) or place.count(".") > DEPTH_MAX:
            continue
        counts = texts or not isinstance(value, str | bytes | bytearray | memoryview)
        if isinstance(value, deque) and value.maxlen is not None:
            counts = False  # it has its bound
        if isinstance(value, Collection) and counts:
            found[place] = found.get(place, 0) + len(value)
        waiting.extend((f"{place}{step}", inner) for step, inner in _inside(value))
    return found


def grown(before: Sizes, after: Sizes, slack: int = 0) -> dict[str, tuple[int, int]]:
    """The places with more than `slack` elements more than before."""
    return {
        place: (before.get(place, 0), size)
        for place, size in sorted(after.items())
        if size > before.get(place, 0) + slack
    }


def _is_arrow(value: object) -> bool:
    return type(value).__module__.split(".")[0] in (pa.__name__, "numpy")


def _inside(value: Any) -> Iterable[tuple[str, Any]]:
    match value:
        case str() | bytes() | bytearray() | memoryview():
            return ()
        case Mapping():
            keys = (("[key]", key) for key in list(value))
            return [*keys, *(("[*]", inner) for inner in list(value.values()))]
        case list() | tuple() | set() | frozenset() | deque():
            return [("[*]", inner) for inner in list(value)]
        case types.MethodType():
            return [("()", value.__self__)]
        case functools.partial():
            return [("()", value.func), ("()", value.args), ("()", value.keywords)]
        case types.FunctionType():
            cells = value.__closure__ or ()
            return [("()", cell.cell_contents) for cell in cells if _is_filled(cell)]
    return list(_attributes(value))


def _is_filled(cell: types.CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:
        return False
    return True


def _attributes(value: Any) -> Iterator[tuple[str, Any]]:
    for name, inner in list(getattr(value, "__dict__", {}).items()):
        yield f".{name}", inner
    for owner in type(value).__mro__:
        slots = owner.__dict__.get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if hasattr(value, name) and not name.startswith("__"):
                yield f".{name}", getattr(value, name)
