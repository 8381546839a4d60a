"""A state of the model's world, and the events that lead from one to the next."""

from __future__ import annotations

from typing import NamedTuple

CONTROL = -1
"""The controller's number on links."""

Link = tuple[int, int]
"""Sender and receiver."""


class ModelState(NamedTuple):
    """Numbers only: see `holdfast.lab.model.parts`."""

    control: int
    sites: tuple[tuple[int, int], ...]
    """By live site: its machine."""
    links: tuple[tuple[Link, tuple[int, ...]], ...]
    """By link: the messages under way, the oldest first."""
    starting: tuple[int, ...]
    """Sites that are launched and have not registered."""
    timers: tuple[int, ...]
    unnoticed: tuple[int, ...]
    """Dead sites that the controller believes alive."""
    written: tuple[int, ...]
    """By partition group of the last stage: how many epochs the store has."""
    recorded: int
    """How many epochs are recorded."""
    crashes: int
    """How many crashes may still happen."""
    suspicions: int
    """How often a live site may still be believed dead."""
    exceeded: bool = False
    """Whether a crash took the last replica of a task."""
    ended: str | None = None
    """How the flow has ended: empty if all was delivered, else the name of the error."""


class Move(NamedTuple):
    """An event that can happen next. `who` has sites, or sender and receiver."""

    kind: str
    who: tuple[int, ...]
    what: tuple[int, ...] = ()
