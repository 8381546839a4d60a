"""How a stage is protected. A protection is a description; `holdfast.core` has what it does."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Protection:
    """A name that the core knows, and how many copies of each partition it wants."""

    name: str
    copies: int = 1


def none() -> Protection:
    """A plain exchange: one copy of every partition; the loss of a site stops the flow."""
    return Protection("none")
