"""Two tiers: what every change must pass, and what `make test-nightly` tries besides."""

from collections.abc import Iterable
from typing import Any

import pytest


def nightly(*values: Any) -> Any:
    """One set of parameters that only `make test-nightly` tries."""
    return pytest.param(*values, marks=pytest.mark.nightly)


def rest_nightly(values: Iterable[Any], fast: Iterable[Any]) -> list[Any]:
    """All `values` as parameters; those that are not `fast`, only nightly."""
    every, now = list(values), list(fast)
    assert all(value in every for value in now), now
    found = []
    for value in every:
        row = value if isinstance(value, tuple) else (value,)
        found.append(pytest.param(*row) if value in now else nightly(*row))
    return found
