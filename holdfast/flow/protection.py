"""How a stage is protected. A protection is a description; `holdfast.core` has what it does."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.core.layout import DOMAINS
from holdfast.errors import FlowError


@dataclass(frozen=True, slots=True)
class Protection:
    """A name that the core knows, how many copies of each partition it wants, and what no two of
    them may share."""

    name: str
    copies: int = 1
    apart: str = "process"


def none() -> Protection:
    """A plain exchange: one copy of every partition; the loss of a site stops the flow."""
    return Protection("none")


def pairs(*, copies: int = 2, apart: str = "executor") -> Protection:
    """Partition pairs: every partition has two copies (or more) that compute. When one dies the
    other goes on at once, and a new copy is made while the stream flows.

    `apart` is what no two copies may share: ``"process"``, ``"executor"``, ``"host"`` or
    ``"application"``. On a local Spark master all sites are in one executor, so there only
    ``"process"`` can be had; the loss of the driver then ends the flow.
    """
    if copies < 2:
        raise FlowError(f"pairs() needs at least 2 copies, not {copies}", hint="none() has one")
    if apart not in DOMAINS:
        raise FlowError(f"pairs(): apart must be one of {', '.join(DOMAINS)}, not {apart!r}")
    return Protection("pairs", copies, apart)
